"""Measure what a restart, a kill or a stopped process costs a run: seconds, lost steps, attempts.

    python -m benchmarks.restarts [--modes lora_only ...] [--events "restart vllm" ...]
        [--times 20] [--seed 0] [--profile arithmetic-gpu --set vllm.gpus=[1] ...]
        [--records FILE] [--json]
    python -m benchmarks.restarts --table FILE ...    # of several records

The demo's real stack (real vLLM) for each mode, under 16 streams of completions beside the
environment's own load. An event comes at a random moment of a step, and the next one when the stack
has recovered and trained two more steps. `kill` and `restart` are the product's own commands, the
others are signals to single processes of the engine; a worker is one of two tensor parallel ones.
Next step: seconds from the event to the first step that ends after every component is healthy again
(for a stopped process: after it goes on). Lost: steps that a later attempt of the trainer did
again. Attempts: of the trainer, beyond the one that ran. Runs are kept in --folder; --records gets
a JSON line for each event, so that several of these may run side by side, or be stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.runs.demo_stack import NotRecovered, Stack, lost_steps
from benchmarks.support.checks import Checks
from tests.e2e.streams import Streams

MODES = ("shared_vllm", "broadcast", "lora_only", "lora_restart", "none")
STOPPED_S = 30.0
"""How long a stopped process stands still."""
STEPS_AFTER = 2
"""Steps from the recovery to the next event."""
PROMPT = [2 + i % 12 for i in range(12)]


@dataclass
class Outcome:
    """One event of one mode."""

    next_step_s: float
    lost: int
    attempts: int
    engine_attempts: int


@dataclass
class Row:
    """All outcomes of one event in one mode."""

    mode: str
    event: str
    outcomes: list[Outcome] = field(default_factory=list)
    error: str = ""

    def fields(self) -> dict[str, Any]:
        waits = [each.next_step_s for each in self.outcomes]
        return {
            "mode": self.mode,
            "event": self.event,
            "times": len(waits),
            "next_step_s": round(median(waits), 1) if waits else None,
            "worst_s": round(max(waits), 1) if waits else None,
            "lost": sum(each.lost for each in self.outcomes),
            "attempts": sum(each.attempts for each in self.outcomes),
            "error": self.error,
        }


Act = Callable[[Stack], float]
"""Carries out an event; returns seconds for which a process was stopped."""


def commanded(action: str, name: str) -> Act:
    def act(stack: Stack) -> float:
        stack.command(action, name)
        return 0.0

    return act


def killed(kind: str) -> Act:
    def act(stack: Stack) -> float:
        stack.process(kind).kill()
        return 0.0

    return act


def stopped(kind: str) -> Act:
    def act(stack: Stack) -> float:
        process = stack.process(kind)
        process.suspend()
        time.sleep(STOPPED_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
        return STOPPED_S

    return act


EVENTS: dict[str, Act] = {
    "restart vllm": commanded("restart", "vllm"),
    "kill vllm": commanded("kill", "vllm"),
    "SIGKILL core": killed("core"),
    "SIGKILL server": killed("server"),
    "SIGSTOP core": stopped("core"),
    "SIGSTOP server": stopped("server"),
    "restart api": commanded("restart", "api"),
    "restart arithmetic": commanded("restart", "arithmetic"),
    "SIGKILL worker": killed("worker"),
}
TENSOR_PARALLEL = ("SIGKILL worker",)
"""Events of an engine with two workers, for modes that can have one."""
TENSOR_PARALLEL_MODES = ("broadcast", "none")


def one_event(stack: Stack, act: Act, moments: random.Random) -> Outcome:
    """Wait for a healthy stack, act at a random moment of a step, wait until it trains again.

    Raises:
        NotRecovered: it does not.
    """
    begun = len(stack.steps())
    stack.wait(lambda: stack.settled() and len(stack.steps()) >= begun + STEPS_AFTER, "two steps")
    trainer, engine = stack.component("trainer").attempt, stack.component("vllm").attempt
    time.sleep(moments.random())
    before = {each.name: each.attempt for each in stack.status().components}
    at, written = time.time(), len(stack.steps())
    still_s = act(stack)
    went_on = time.time() if still_s else at
    if not still_s:
        stack.wait(
            lambda: (
                not stack.settled()
                or {e.name: e.attempt for e in stack.status().components} != before
            ),
            "the event",
            60.0,
        )
    stack.wait(stack.settled, "every component healthy")
    healthy = max(time.time(), went_on)
    stack.wait(lambda: any(moment > healthy for moment, _ in stack.steps()), "a step")
    steps = stack.steps()
    following = min(moment for moment, _ in steps if moment > healthy)
    return Outcome(
        following - at,
        lost_steps(steps, written),
        stack.component("trainer").attempt - trainer,
        stack.component("vllm").attempt - engine,
    )


def run_mode(
    mode: str,
    events: list[str],
    times: int,
    seed: int,
    folder: Path,
    *,
    workers: int = 1,
    profile: str = "demo",
    given: dict[str, str] | None = None,
    records: Path | None = None,
) -> list[Row]:
    """Measure `times` rounds of every event. A stack that does not recover is replaced by a new
    one."""
    rows = {event: Row(mode, event) for event in events}
    left = events * times
    moments = random.Random(f"{seed} {mode} {events}")
    while left:
        root = folder / f"{mode}-{workers}-{len(left)}"
        stack = Stack(root, mode, workers=workers, profile=profile, given=given or {})
        stack.live.up()
        try:
            for event, outcome in run_stack(stack, left, moments):
                rows[event].outcomes.append(outcome)
                print(f"  {mode} {event}: {outcome}", file=sys.stderr, flush=True)
                record(records, mode, event, asdict(outcome))
        except NotRecovered as error:
            event = left.pop(0)
            rows[event].error += f"{error}; {root} "
            record(records, mode, event, {"error": str(error)})
        finally:
            stack.live.close()
    return list(rows.values())


def run_stack(
    stack: Stack, left: list[str], moments: random.Random
) -> Iterator[tuple[str, Outcome]]:
    """Carry out the events that are left, in order; each is taken off the list once the stack has
    recovered from it.

    Raises:
        NotRecovered: it has not, from the first of the list.
    """
    stack.wait(stack.live.run.control_sock.exists, "the supervisor", 60)
    stack.wait(lambda: len(stack.steps()) >= STEPS_AFTER, "the first steps")
    with Streams(stack.url(), prompt=PROMPT, max_tokens=40, patient=True):
        while left:
            outcome = one_event(stack, EVENTS[left[0]], moments)
            yield left.pop(0), outcome


def record(path: Path | None, mode: str, event: str, what: dict[str, Any]) -> None:
    if path is not None:
        with path.open("a") as stream:
            stream.write(json.dumps({"mode": mode, "event": event, **what}) + "\n")


def recorded(paths: Iterable[Path]) -> list[Row]:
    """Read the rows of several records, by mode and event; a row counts the events without
    recovery."""
    rows = {(mode, event): Row(mode, event) for mode in MODES for event in EVENTS}
    for line in (line for path in paths for line in path.read_text().splitlines()):
        fields = json.loads(line)
        row = rows[fields.pop("mode"), fields.pop("event")]
        if "error" in fields:
            row.error = f"{row.error}; {fields['error']}" if row.error else fields["error"]
        else:
            row.outcomes.append(Outcome(**fields))
    return [row for row in rows.values() if row.outcomes or row.error]


def table(rows: list[Row]) -> str:
    """As Markdown."""
    lines = [
        "| mode | event | times | next step, s (worst) | steps lost | attempts | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one = row.fields()
        wait = f"{one['next_step_s']} ({one['worst_s']})"
        lines.append(
            f"| {row.mode} | {row.event} | {one['times']} | {wait} | {one['lost']} | "
            f"{one['attempts']} | {row.error} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--events", nargs="+", choices=list(EVENTS), default=list(EVENTS))
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    parser.add_argument("--profile", default="demo")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the profile"
    )
    parser.add_argument("--records", type=Path, help="append a JSON line for each event")
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="only print the table of these records",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(recorded(options.table)))
        return 0
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # its run is ended like that of an interrupted one
    given = dict(pair.split("=", 1) for pair in options.set)
    common = {"profile": options.profile, "given": given, "records": options.records}
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for mode in options.modes:
            plain = [event for event in options.events if event not in TENSOR_PARALLEL]
            rows += run_mode(mode, plain, options.times, options.seed, folder, **common)
            split = [event for event in options.events if event in TENSOR_PARALLEL]
            if split and mode in TENSOR_PARALLEL_MODES:
                rows += run_mode(
                    mode, split, options.times, options.seed, folder, workers=2, **common
                )
            print(table(rows), file=sys.stderr, flush=True)
    print(json.dumps({"rows": [row.fields() for row in rows]}) if options.json else table(rows))
    checks = Checks()
    for row in rows:
        checks.that(not row.error, f"{row.mode}, {row.event}: {row.error}")
    return checks.status()


if __name__ == "__main__":
    sys.exit(main())
