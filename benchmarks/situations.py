"""Cause sixteen situations in a run; print each verdict, and the seconds until it comes and ends.

    python -m benchmarks.situations [--only NAME...] [--json]

Most situations are caused one after another in one training demo with real processes (vLLM,
run-api, trainer, environment). `planted_env.py` makes a slow environment, an engine with many or
few requests, equal scores, refused requests and groups, and groups of `None`. SIGSTOP slows the
trainer down. The disk is a tmpfs that is filled. The environment requests a hub that does not
exist; the time counts from its request. Commands stop and start run-api, and kill the engine.

The policy lag at its bound, and the slow judge beside a fast environment, each need a demo with
other settings. Three small child processes replace three engines, of which one dies. The verdict is
read from the run's files and its supervisor, as `ps` and the screen do.

The exit status is 1 if the right verdict does not come within 15 s, or does not end within 30 s
after its cause has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from atropos_common.protocol.control import CommandRequest, Role, State
from atropos_common.protocol.record_tail import RecordTail
from atropos_common.protocol.trainer_records import StepRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.run.run_files import RunFeed, read_info
from atropos_tui.monitor.run.state import RunState
from atropos_tui.monitor.verdict import Verdict, verdict
from atropos_tui.profile.load import find_profile
from atropos_tui.profile.spec import LogCheck, Probe, Probes, RestartPolicy
from atropos_tui.supervisor.client import ControlClient
from benchmarks.supervisor import child, supervised
from benchmarks.support.children import up

PATIENCE_S = 60.0
RIGHT_S, GONE_S = 15.0, 30.0
"""Limits in seconds: until the right verdict, and from the end of its cause to its end."""
START_S = 180.0
LOOK_S = 0.5
DISK_MB = 600
STOPPED = 0.85
"""Share of the time for which `slowed` stops a component."""
LAG, ENGINE_DEAD, JUDGE = "lag at its bound", "one engine of three dead", "judge slow"
WEIGHTS = {"fast": 3, "judge": 1}
"""Weights of the two environments in `slow_judge`."""
SHARE_BOUND = 0.2
"""Limit for the relative error of an environment's share of the groups."""
SHARE_STEPS = 10
WORDS: dict[str, tuple[str, ...]] = {
    "environment slow": ("limited by the environment",),
    "engine slow": ("limited by the engine",),
    "trainer slow": ("limited by training",),
    "all groups flat": ("are flat", "rewards are the same"),
    "requests refused": ("refuses the requests",),
    "hub unreachable": ("hub cannot be reached",),
    "disk nearly full": ("disk is nearly full",),
    ENGINE_DEAD: ("2 of 3 engines",),
    LAG: ("policy lag at its bound",),
    "healthy": ("healthy",),
    "run-api away": ("does not reach run-api", "stopped by hand"),
    "engine killed": ("restarting (killed by hand",),
    "group refused": ("do not reach run-api",),
    "group None": ("are left out",),
    "few requests": ("limited by the environment",),
    JUDGE: ("limited by the environment judge",),
}
"""Words that the right verdict contains, by situation."""
UP = "print('up', flush=True)\nimport time\ntime.sleep(600)"


class Watch:
    """Reads a run as the screen does."""

    def __init__(self, root: Path) -> None:
        self.run = RunDir(root)
        self._feed, self._state = RunFeed(self.run), RunState()

    def said(self) -> Verdict | None:
        """Return the present verdict; None while the supervisor does not answer."""
        try:
            status = asyncio.run(ControlClient(self.run.root).status())
        except OSError:
            return None
        self._state = self._feed.catch_up(self._state)
        return verdict(status, read_info(self.run), self._state, time.time())

    def until_gone(self, words: tuple[str, ...]) -> float | None:
        """Return the seconds until the verdict has none of `words`; None after `PATIENCE_S`."""
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE_S:
            with contextlib.suppress(Exception):
                found = self.said()
                if found and not any(word in found.text for word in words):
                    return time.monotonic() - began
            time.sleep(LOOK_S)
        return None

    def until(self, words: tuple[str, ...], patience_s: float) -> tuple[float | None, str]:
        """Return the seconds until the verdict has one of `words`, and that verdict; after
        `patience_s` None and the last verdict."""
        began, last = time.monotonic(), ""
        while time.monotonic() - began < patience_s:
            with contextlib.suppress(Exception):
                found = self.said()
                last = found.line if found else last
                if found and any(word in found.text for word in words):
                    return time.monotonic() - began, found.line
            time.sleep(LOOK_S)
        return None, last


@contextmanager
def slowed(run: RunDir, component: str) -> Iterator[None]:
    """Stop all processes of a component for the share `STOPPED` of the time."""
    status = asyncio.run(ControlClient(run.root).status())
    pids = next(row.pids for row in status.components if row.name == component)
    over = threading.Event()

    def send(number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def work() -> None:
        while not over.is_set():
            send(signal.SIGSTOP)
            over.wait(0.4 * STOPPED)
            send(signal.SIGCONT)
            over.wait(0.4 * (1 - STOPPED))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        send(signal.SIGCONT)


class Stack:
    """The demo with `planted_env`, started by `atropos-tui up --headless`."""

    def __init__(self, folder: Path, sets: dict[str, Any], profile: str | Path = "") -> None:
        """Args:
        profile: replaces the demo's profile; it names its own environments.
        """
        self.folder, self.root = folder, folder / "run"
        self._switch = folder / "plant"
        planted = {
            "env.module": "benchmarks.runs.planted_env",
            "env.cwd": Path(__file__).parents[1],
            "env.env.PLANT": self._switch,
        }
        sets = (
            {
                "trainer.training_steps": 100_000,
                "trainer.checkpoint_interval": 100_000,
                "trainer.lr": 1e-6,
                "vllm.sampling": "refuse",
                "api.port": 28_110,
                "vllm.port": 28_111,
            }
            | ({} if profile else planted)
            | sets
        )
        self.process = subprocess.Popen(
            up(profile or "demo", self.root, sets),
            stdin=subprocess.DEVNULL,
            stdout=(folder / "up.txt").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.watch = Watch(self.root)

    def trains(self) -> None:
        """Wait until the run trains without a problem."""
        self.first_step()
        seconds, last = self.watch.until(("healthy", "limited by training", "take turns"), START_S)
        if seconds is None:
            raise RuntimeError(
                f"it does not train: {last}; {(self.folder / 'up.txt').read_text()[-2000:]}"
            )

    def shares(self, steps: int) -> dict[str, float]:
        """Return each environment's share of the groups in the next `steps` optimizer steps."""
        tail, give_up = RecordTail(self.watch.run.telemetry_jsonl), time.monotonic() + START_S
        for _ in tail.rest():
            pass
        groups: Counter[str] = Counter()
        while steps > 0 and time.monotonic() < give_up:
            for record in tail.rest():
                if isinstance(record, StepRecord):
                    groups.update(record.groups_by_env)
                    steps -= 1
            time.sleep(LOOK_S)
        return {name: round(count / groups.total(), 3) for name, count in groups.items()}

    def first_step(self) -> None:
        give_up = time.monotonic() + START_S
        while not (
            self.watch.run.telemetry_jsonl.exists()
            and '"step"' in self.watch.run.telemetry_jsonl.read_text()
        ):
            if time.monotonic() > give_up or self.process.poll() is not None:
                raise RuntimeError(
                    f"it does not train: {(self.folder / 'up.txt').read_text()[-2000:]}"
                )
            time.sleep(LOOK_S)

    @contextmanager
    def switched(self, what: str) -> Iterator[None]:
        self._switch.write_text(what)
        try:
            yield
        finally:
            self._switch.unlink()

    @contextmanager
    def without_hub(self) -> Iterator[None]:
        with self.switched("hub"):
            status = asyncio.run(ControlClient(self.root).status())
            psutil.Process(
                next(row.pid for row in status.components if row.role is Role.ENV) or 0
            ).kill()
            asked, give_up = (
                self._switch.with_name(f"{self._switch.name}.asked"),
                time.monotonic() + START_S,
            )
            while not asked.exists() and time.monotonic() < give_up:
                time.sleep(0.1)
            yield

    @contextmanager
    def without_api(self) -> Iterator[None]:
        """Stop run-api; start it again at the end."""
        self._command("stop", "api")
        self._until("api", State.STOPPED)
        try:
            yield
        finally:
            self._command("start", "api")
            self._until("api", State.HEALTHY)

    @contextmanager
    def without_engine(self) -> Iterator[None]:
        """Kill the engine by a command; at the end wait until it and the trainer are healthy."""
        self._command("kill", "vllm")
        self._until("vllm", State.STARTING)
        try:
            yield
        finally:
            self._until("vllm", State.HEALTHY)
            self._until("trainer", State.HEALTHY)

    def _command(self, action: Literal["start", "stop", "kill"], component: str) -> None:
        asyncio.run(
            ControlClient(self.root).command(CommandRequest(action=action, component=component))
        )

    def _until(self, component: str, state: State) -> None:
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up:
            rows = asyncio.run(ControlClient(self.root).status()).components
            if any(row.name == component and row.state is state for row in rows):
                return
            time.sleep(0.1)

    @contextmanager
    def full(self) -> Iterator[None]:
        filler = fill(self.folder)
        try:
            yield
        finally:
            filler.unlink()

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(90)


def fill(folder: Path) -> Path:
    """Fill the file system of `folder` except 4 MB; return the file that fills it.

    The file stays empty if `folder` is not a mount of its own.
    """
    filler, free = folder / "filler", os.statvfs(folder)
    with filler.open("wb") as file:
        if folder.is_mount():
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - 4_000_000)
    return filler


BEFORE_HEALTHY = "environment slow"
IN_THE_DEMO: dict[str, Callable[[Stack], contextlib.AbstractContextManager[None]]] = {
    BEFORE_HEALTHY: lambda stack: stack.switched("slow"),
    "healthy": lambda stack: contextlib.nullcontext(),
    "engine slow": lambda stack: stack.switched("busy"),
    "trainer slow": lambda stack: slowed(stack.watch.run, "trainer"),
    "all groups flat": lambda stack: stack.switched("flat"),
    "requests refused": lambda stack: stack.switched("top_p"),
    "hub unreachable": lambda stack: stack.without_hub(),
    "disk nearly full": lambda stack: stack.full(),
    "run-api away": lambda stack: stack.without_api(),
    "engine killed": lambda stack: stack.without_engine(),
    "group refused": lambda stack: stack.switched("refused"),
    "group None": lambda stack: stack.switched("none"),
    "few requests": lambda stack: stack.switched("few"),
}
"""Situations of one demo in their order, and the context manager that causes each."""

WITHOUT_END = ("healthy",)
"""Situations whose verdict has no end."""


class Row(NamedTuple):
    """Result of one situation."""

    situation: str
    seconds: float | None
    """Seconds until the right verdict; None: never."""
    sentence: str
    gone_s: float | None = None
    """Seconds from the end of its cause to its end; None: never, or not measured."""
    has_end: bool = False
    note: str = ""
    """Description of another fault; empty if there is none."""

    @property
    def wrong(self) -> str:
        """Description of the fault; empty if there is none."""
        if self.seconds is None or self.seconds > RIGHT_S:
            return "no right verdict in time"
        late = self.has_end and (self.gone_s is None or self.gone_s > GONE_S)
        return "stays too long" if late else self.note


def in_the_demo(wanted: Callable[[str], bool]) -> Iterator[Row]:
    """Yield the results of the situations in one training demo."""
    with tempfile.TemporaryDirectory() as place, on_small_disk(Path(place)) as folder:
        stack = Stack(folder, {})
        try:
            stack.trains()
            for name in filter(wanted, IN_THE_DEMO):
                with IN_THE_DEMO[name](stack):
                    seconds, line = stack.watch.until(WORDS[name], PATIENCE_S)
                if name in WITHOUT_END:
                    yield Row(name, seconds, line)
                else:
                    yield Row(
                        name, seconds, line, stack.watch.until_gone(WORDS[name]), has_end=True
                    )
                if not (name == BEFORE_HEALTHY and wanted("healthy")):  # its time counts from here
                    stack.trains()
        finally:
            stack.close()


@contextmanager
def on_small_disk(folder: Path) -> Iterator[Path]:
    """Mount a tmpfs on `folder` if that is allowed; else its disk never becomes full."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=0700", "none", str(folder)]
    is_mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield folder
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def lag() -> Iterator[Row]:
    """Yield the result of a demo whose environment generates more than the trainer takes.

    The time counts from the first step.
    """
    ahead = {
        "env.args.env.max_batches_offpolicy": 4,
        "env.args.env.max_num_workers": 64,
        "trainer.max_policy_lag": 1,
    }
    with tempfile.TemporaryDirectory() as name:
        stack = Stack(Path(name), ahead)
        try:
            stack.first_step()
            seconds, line = stack.watch.until(WORDS[LAG], PATIENCE_S)
            yield Row(LAG, seconds, line)
        finally:
            stack.close()


ENVIRONMENT = """[[env]]
name = "{name}"
module = "benchmarks.runs.planted_env"
cwd = "{cwd}"
weight = {weight}
env = {{ PLANT = "{plant}" }}
args = {{ env = {{ group_size = 8, max_batches_offpolicy = 1 }} }}

"""


def slow_judge() -> Iterator[Row]:
    """Yield the result of a demo with two environments, one of which is slow."""
    with tempfile.TemporaryDirectory() as place:
        folder, demo = Path(place), find_profile("demo").read_text()
        both = "".join(
            ENVIRONMENT.format(
                name=name, cwd=Path(__file__).parents[1], weight=weight, plant=folder / name
            )
            for name, weight in WEIGHTS.items()
        )
        profile = folder / "judge.toml"
        profile.write_text(demo[: demo.index("[env]")] + both + demo[demo.index("[vllm]") :])
        judges = folder / "judge"
        stack = Stack(folder, {}, profile)
        try:
            stack.trains()
            judges.write_text("slow")
            seconds, line = stack.watch.until(WORDS[JUDGE], PATIENCE_S)
            shares = stack.shares(SHARE_STEPS)
            judges.unlink()
            gone_s = stack.watch.until_gone(WORDS[JUDGE])
            yield Row(
                JUDGE, seconds, f"{line} ({shares})", gone_s, has_end=True, note=wrong_share(shares)
            )
        finally:
            stack.close()


def wrong_share(shares: dict[str, float]) -> str:
    """Describe the environment whose share of the groups differs from its weight; else empty."""
    for name, weight in WEIGHTS.items():
        due = weight / sum(WEIGHTS.values())
        if abs(shares.get(name, 0.0) - due) > SHARE_BOUND * due:
            return f"{name} has {shares.get(name, 0.0):.0%} of the groups, due are {due:.0%}"
    return ""


def engine_dead() -> Iterator[Row]:
    """Yield the result of three child processes in place of engines, one of which is killed."""
    ready = Probes(readiness=Probe(checks=[LogCheck(pattern="up")], interval_s=0.1))
    again = RestartPolicy(backoff_s=30.0)
    parts = [
        child(f"vllm-{at}", UP, role=Role.ENGINE, probes=ready, restart=again) for at in (1, 2, 3)
    ]
    with (
        tempfile.TemporaryDirectory() as name,
        supervised(Path(name), "engines", *parts) as (client, _),
    ):
        watch = Watch(client.run_dir.root)
        while any(row.state != "healthy" for row in asyncio.run(client.status()).components):
            time.sleep(0.1)
        psutil.Process(asyncio.run(client.status()).components[1].pid or 0).kill()
        seconds, line = watch.until(WORDS[ENGINE_DEAD], PATIENCE_S)
        yield Row(ENGINE_DEAD, seconds, line)


def tell(rows: list[Row], *, as_json: bool) -> int:
    """Print the results; return the exit status, 1 if one is wrong."""
    if as_json:
        print(json.dumps([row._asdict() | {"wrong": row.wrong} for row in rows]))
    else:
        for row in rows:
            seconds, gone = (
                f"{'never' if value is None else f'{value:5.1f} s':>7}"
                for value in (row.seconds, row.gone_s)
            )
            gone = gone if row.has_end else f"{'':>7}"
            print(
                f"{row.situation:<26} {seconds} {gone}  "
                f"{row.sentence}{f'  WRONG: {row.wrong}' if row.wrong else ''}"
            )
    return int(any(row.wrong for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="beginnings of situations' names"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # SIGTERM raises KeyboardInterrupt, so the run is stopped as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def wanted(name: str) -> bool:
        return not options.only or name.startswith(tuple(options.only))

    rows: list[Row] = []
    for name, plant in (
        (ENGINE_DEAD, engine_dead),
        (LAG, lag),
        (JUDGE, slow_judge),
        ("", lambda: in_the_demo(wanted)),
    ):
        if wanted(name) if name else any(map(wanted, IN_THE_DEMO)):
            for row in plant():
                rows.append(row)
                print(f"  {row}", file=sys.stderr, flush=True)
    return tell(rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
