"""Inject random faults into the demo's real stack at random moments, and check that it recovers.

    python -m benchmarks.chaos --minutes 60 --seed 0 [--mode lora_only] [--records FILE]
        [--faults SIGKILL ...]
    python -m benchmarks.chaos --in-turn --faults "SIGKILL trainer" ...    # all equally often
    python -m benchmarks.chaos --table FILE ...                           # of several records

A fault (`benchmarks/runs/faults.py`) comes at a random moment of a step, one in five with a second
one on top. After it every component has to be healthy again and the next optimizer step has to come
within `RECOVERY_S`, or the run ends with the exit code that belongs to the fault, and goes on when
it is resumed. Then what `ps --json` shows is held against /proc, and each stream is read. After
`FAULTS_A_RUN` faults the run is ended, and nothing of it may be left: no process, no socket,
nothing in /dev/shm or its temporary folder. No line is lost of the log of a component that numbers
its lines; each attempt of the trainer begins where a checkpoint ends.

Fault N of a seed and a mode is always the same. --records gets a JSON line for each, and with the
same file and seed a later call goes on where the last one ended; what went wrong stands under
`wrong`, and that run's files are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from atropos_common.system.run_dir import RunDir
from benchmarks.demo import prepare
from benchmarks.restarts import MODES
from benchmarks.runs.demo_stack import NotRecovered, Stack, lost_steps
from benchmarks.runs.faults import (
    CLOCK,
    COUNTER,
    COUNTING,
    FAULTS,
    Fault,
    enter_isolation,
    own_disk,
    signalled,
    with_clock,
)
from benchmarks.ui import Screen
from tests.support.harness import alive, check_log, check_records

FAULTS_A_RUN = 10
STEPS_BEFORE = 2
CHECKPOINT_INTERVAL = 5
GUARD_S = 10.0
STATES_S = 5.0
"""Seconds for which the displayed states may be wrong."""
KILLED = ("trainer", "engine core", "API server", "environment", "run-api", "supervisor")
"""Rows of the table of recoveries."""


def plan(
    number: int, seed: int, mode: str, offered: list[Fault], *, in_turn: bool = False
) -> tuple[random.Random, Fault]:
    """Random generator of fault `number`, and the fault."""
    dice = random.Random(f"{seed} {mode} {number}")
    return dice, offered[number % len(offered)] if in_turn else dice.choice(offered)


def begin(
    root: Path, mode: str, profile: str = "demo", more: dict[str, str] | None = None
) -> Stack:
    """A new run."""
    given: dict[str, Any] = {
        "trainer.checkpoint_interval": CHECKPOINT_INTERVAL,
        "trainer.keep_checkpoints": 2,
        f"component.{COUNTER}.command": json.dumps([sys.executable, "-c", COUNTING]),
        f"component.{COUNTER}.restart.max_restarts": 10_000,
    }
    stack = Stack(root, mode, workers=1, profile=profile, given=given | (more or {}))
    stack.live.up()
    return stack


def started(stack: Stack) -> None:
    """Wait until a supervisor answers.

    Raises:
        NotRecovered: none does.
    """

    def answers() -> bool:
        with contextlib.suppress(NotRecovered):  # nobody listens yet, or no more
            return bool(stack.status())
        return False

    stack.wait(answers, "the supervisor", 90)


def one_fault(stack: Stack, fault: Fault, dice: random.Random, *, alone: bool) -> dict[str, Any]:
    """Wait for a step, do harm, wait until the stack trains again, and look for what is wrong.

    Raises:
        NotRecovered: it does not train again.
    """
    begun = len(stack.steps())
    stack.wait(lambda: stack.settled() and len(stack.steps()) >= begun + STEPS_BEFORE, "two steps")
    time.sleep(dice.uniform(0, 2))
    at, before, written = time.time(), attempts(stack), len(stack.steps())
    target = fault.act(stack, dice)
    left: list[str] = []
    if fault.ends:
        left = resumed(stack, fault)
    elif not alone and dice.random() < 0.2:
        time.sleep(dice.uniform(0, 5))
        with contextlib.suppress(NotRecovered):  # its victim is away already
            target += " + SIGKILL " + signalled(signal.SIGKILL, *KILLED[:-1])(stack, dice)
    with contextlib.suppress(NotRecovered):
        stack.wait(lambda: not stack.settled() or attempts(stack) != before, "a reaction", 3.0)
    stack.wait(stack.settled, "every component healthy")
    count = len(stack.steps())
    stack.wait(lambda: len(stack.steps()) > count, "a step")
    lost = lost_steps(stack.steps(), written)
    if lost > 2 * CHECKPOINT_INTERVAL:  # two faults at most
        left.append(f"{lost} steps were done again")
    return {
        "target": target,
        "next_step_s": round(time.time() - at, 1),
        "lost": lost,
        "wrong": left + wrong_states(stack) + wrong_records(stack),
    }


def attempts(stack: Stack) -> dict[str, int]:
    return {each.name: each.attempt for each in stack.status().components}


def resumed(stack: Stack, fault: Fault) -> list[str]:
    """Wait for the end that the fault has, look for leftovers, and go on; what is left over."""
    code, output = stack.live.wait(90)
    if code not in fault.ends:
        raise NotRecovered(f"the run ended with {code} instead of {fault.ends}: {output[-500:]}")
    left = leftovers(stack)
    stack.live.resume()
    stack.resumed = True
    started(stack)
    return left


def leftovers(stack: Stack) -> list[str]:
    """Describe what an ended run has left, once its guard has had `GUARD_S`."""
    until = time.monotonic() + GUARD_S
    while (found := _left(stack)) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def _left(stack: Stack) -> list[str]:
    found = []
    try:
        stack.live.assert_nothing_left()
    except AssertionError as error:
        found.append(str(error) or "the control socket is left")
    temporary = [path.name for path in Path(tempfile.gettempdir()).iterdir()]
    # What torch has compiled is kept on purpose.
    found += [
        f"left in the temporary folder: {name}"
        for name in temporary
        if not name.startswith("torchinductor")
    ]
    return found


def wrong_states(stack: Stack) -> list[str]:
    """Return how the displayed states differ from /proc, where they do for longer than
    `STATES_S`."""
    until = time.monotonic() + STATES_S
    while True:
        wrong = []
        for each in stack.status().components:
            if each.state.has_process and not (each.pid and alive(each.pid)):
                wrong.append(
                    f"{each.name} is {each.state}, and its process {each.pid} is not there"
                )
            if not each.state.has_process and each.pids:
                wrong.append(f"{each.name} is {each.state} and has processes {each.pids}")
            wrong += [f"{each.name}: {pid} is not there" for pid in each.pids if not alive(pid)]
        if not wrong or time.monotonic() > until:
            return wrong
        time.sleep(0.5)


def wrong_records(stack: Stack) -> list[str]:
    """Lines of the streams that cannot be read although nobody overwrote them, are missing, or tell
    of lost steps."""
    run, wrong = stack.live.run, []
    for path in (run.telemetry_jsonl, *run.root.glob("eval.*.jsonl")):
        records = [_record(line) for line in path.read_bytes().split(b"\n")[:-1]]
        bad, overwritten = records.count(None), stack.overwritten.get(path, 0)
        if bad > overwritten:
            wrong.append(f"{path.name}: {bad} lines are no records")
        if path == run.telemetry_jsonl and not overwritten:
            wrong += wrong_steps([record for record in records if record], _resumed(run))
    try:
        overwritten = stack.overwritten.get(run.supervisor_jsonl, 0)
        check_records(run, overwritten, resumed=stack.resumed)
    except AssertionError as error:
        wrong.append(f"supervisor.jsonl: {error}")
    for path in sorted((run.logs / COUNTER).glob("*.log")):
        data = path.read_bytes()
        try:  # the last line may be on its way
            check_log(data[: data.rfind(b"\n") + 1], line=b"line 000000000\n")
        except AssertionError as error:
            wrong.append(f"{path.relative_to(run.root)}: {error}")
    return wrong


def wrong_steps(records: list[dict[str, Any]], resumed: Mapping[int, int]) -> list[str]:
    """Attempts of the trainer that do not begin where a checkpoint, or the base model, ends, and
    verdicts of steps that did not come from the weights that they should have come from.

    Args:
        resumed: by attempt the step of the checkpoint that its log names. It counts where the
        attempt before ended with
            that very step: killed between writing the checkpoint and telling of it.
    """
    saved, wrong, attempt, done = {0}, [], None, 0
    for record in records:
        if record["kind"] == "checkpoint":
            saved.add(record["step"])
        elif record["kind"] == "step":
            before, done = done, record["step"]
            if record["attempt"] == attempt:
                continue
            attempt = record["attempt"]
            if done - 1 not in saved and not before == done - 1 == resumed.get(attempt):
                wrong.append(
                    f"attempt {attempt} begins with step {done}; checkpoints: {sorted(saved)}"
                )
        elif record["kind"] == "alignment" and record["verdict"] == "mismatch":
            wrong.append(f"step {record['step']} is a mismatch")
    return wrong


def _resumed(run: RunDir) -> dict[int, int]:
    """Return the step of the checkpoint that each attempt of the trainer continues from, by
    attempt."""
    found = {}
    for path in (run.logs / "trainer").glob("*.log"):
        if said := re.search(rb"^.*Resuming from .*: step (\d+),", path.read_bytes(), re.MULTILINE):
            found[int(path.stem)] = int(said[1])
    return found


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "kind" in found else None


def one_run(
    first: int,
    numbers: Iterator[int],
    options: argparse.Namespace,
    folder: Path,
    offered: list[Fault],
) -> Iterator[dict[str, Any]]:
    """One run: its faults until ten are done, time is over, or it does not recover; a record of
    each."""
    number, failed = first, False
    seed, mode, in_turn = options.seed, options.mode, options.in_turn
    root = folder / "disk/run"
    base: dict[str, Any] = {"seed": seed, "mode": mode}
    record = base | noted(number, "begin")
    stack = begin(root, mode, options.profile, dict(pair.split("=", 1) for pair in options.set))
    screen = None
    try:
        started(stack)
        while number >= 0:
            if screen is None or screen.process.poll() is not None:
                screen = Screen(root)
            dice, fault = plan(number, seed, mode, offered, in_turn=in_turn)
            record = base | noted(number, fault.name)
            record |= one_fault(stack, fault, dice, alone=in_turn)
            yield record
            failed = failed or bool(record["wrong"])
            number = -1 if (number + 1) % FAULTS_A_RUN == 0 else next(numbers, -1)
        record = base | noted(record["number"], "down")
        stack.live.cli("down", timeout=120)
        code, _ = stack.live.wait(60)
        record["wrong"] = ([f"it ended with {code}"] if code != 130 else []) + leftovers(stack)
    except NotRecovered as error:
        record["wrong"] = [str(error)]
    finally:
        if screen is not None:
            screen.process.kill()
        stack.live.close()
        if record["wrong"]:
            stack.live.cli("clean", "--yes")
    if record["wrong"]:
        yield record
    if record["wrong"] or failed:
        ignored = shutil.ignore_patterns("*.sock", "checkpoints")
        kept = options.records.parent / f"chaos-{mode}-{seed}-{record['number']}"
        shutil.copytree(root, kept, symlinks=True, dirs_exist_ok=True, ignore=ignored)
    shutil.rmtree(root, ignore_errors=True)


def noted(number: int, fault: str) -> dict[str, Any]:
    now, load = round(time.time(), 1), round(os.getloadavg()[0], 1)
    return {
        "number": number,
        "fault": fault,
        "target": "",
        "time": now,
        "load": load,
        "lost": 0,
        "wrong": [],
    }


def recorded(paths: list[Path]) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in paths
        if path.exists()
        for line in path.read_text().splitlines()
    ]


def cell(rows: list[dict[str, Any]]) -> str:
    """Median and (worst) seconds to the next step, and of how many."""
    seconds = [row["next_step_s"] for row in rows if "next_step_s" in row]
    return f"{median(seconds):.0f} ({max(seconds):.0f}), {len(seconds)}" if seconds else "-"


def table(rows: list[dict[str, Any]]) -> str:
    """Faults by kind, then recoveries from a kill by mode, as Markdown."""
    by_fault = defaultdict(list)
    for row in rows:
        by_fault[row["fault"]].append(row)
    lines = [
        "| fault | times | next step, s: median (worst), of | steps done again | wrong |",
        "|---|---|---|---|---|",
    ]
    for fault, some in sorted(by_fault.items()):
        wrong = sum(bool(row["wrong"]) for row in some)
        lines.append(
            f"| {fault} | {len(some)} | {cell(some)} | "
            f"{sum(row.get('lost', 0) for row in some)} | {wrong} |"
        )
    modes = [mode for mode in MODES if any(row["mode"] == mode for row in rows)]
    lines += ["", f"| killed | {' | '.join(modes)} |", "|---|" + "---|" * len(modes)]
    for name in KILLED:
        cells = [
            cell(
                [
                    row
                    for row in by_fault[f"SIGKILL {name}"]
                    if row["mode"] == mode and row["target"] == name
                ]
            )
            for mode in modes
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    loads = [row["load"] for row in rows]
    lines += (
        ["", f"{len(rows)} faults; load average {min(loads):.0f} to {max(loads):.0f}"]
        if rows
        else []
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=MODES, default="shared_vllm")
    parser.add_argument(
        "--profile", default="demo", help="the demo, or the demo on a GPU: arithmetic-gpu"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the profile"
    )
    parser.add_argument(
        "--records",
        type=Path,
        default=Path("chaos.jsonl"),
        help="append a JSON line for each fault",
    )
    parser.add_argument("--faults", nargs="+", default=[""], help="only those whose names begin so")
    parser.add_argument(
        "--in-turn", action="store_true", help="one after the other instead of by dice, none on top"
    )
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="only print the table of these records",
    )
    options = parser.parse_args()
    if options.table:
        print(table(recorded(options.table)))
        return 0
    isolated = enter_isolation()
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # its run is ended like that of an interrupted one
    prepare(options.profile, 0)
    rows = disturb(options, isolated)
    print(table(rows))
    return int(any(row["wrong"] for row in rows))


def disturb(options: argparse.Namespace, isolated: bool) -> list[dict[str, Any]]:
    """Run after run until time is over; what was recorded now."""
    done = [
        row["number"]
        for row in recorded([options.records])
        if (row["seed"], row["mode"]) == (options.seed, options.mode)
    ]
    offered = [fault for fault in (*FAULTS, CLOCK) if fault.name.startswith(tuple(options.faults))]
    offered = [fault for fault in offered if isolated or not fault.isolated]
    rows = []
    with place(isolated) as folder:
        if not with_clock(folder):
            offered = [fault for fault in offered if fault is not CLOCK]
        numbers = until(time.monotonic() + 60 * options.minutes, max(done, default=-1) + 1)
        for first in numbers:
            for row in one_run(first, numbers, options, folder, offered):
                rows.append(row)
                print(f"  {row}", file=sys.stderr, flush=True)
                with options.records.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
    return rows


def until(over: float, number: int) -> Iterator[int]:
    while time.monotonic() < over:
        yield number
        number += 1


@contextlib.contextmanager
def place(isolated: bool) -> Iterator[Path]:
    """A folder for runs, on a disk of its own where that is allowed, and temporary files beside
    it."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        for each in ("disk", "tmp"):
            (folder / each).mkdir(mode=0o700)
        os.environ |= {"TMPDIR": str(folder / "tmp"), "XDG_STATE_HOME": str(folder / "state")}
        tempfile.tempdir = None
        with own_disk(folder / "disk") if isolated else contextlib.nullcontext():
            yield folder


if __name__ == "__main__":
    sys.exit(main())
