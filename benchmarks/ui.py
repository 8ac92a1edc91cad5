"""Measure the screen: attaching to a long run, keys in a flood of logs, idle CPU, memory.

    python -m benchmarks.ui [--seconds 30] [--json]

Every figure is of `atropos-tui attach` in a pseudo terminal, of 160 x 45 unless its name says
another size, against a real supervisor. In the flood one child prints 200,000 lines a second and
telemetry grows by 20 records a second; half an hour of telemetry is then written at a higher speed,
with the flood going on. CPU is of one core; of a key, what the screen used until it was shown,
which says more than the time where other work shares the machine. `--json` prints one JSON object.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import random
import select
import statistics
import struct
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from atropos_common.protocol.control import Role
from atropos_common.system.run_dir import RunDir
from atropos_tui.profile.spec import LogPolicy
from atropos_tui.ui.terminal import COLLECT_S
from benchmarks.supervisor import SLEEP, child, supervised
from tests.support.run_maker import make_run, step_records, write_records

LINES_PER_S = 200_000
RECORDS_PER_S = 20.0
HALF_HOUR_RECORDS = 36_000
SIMULATED_S = 60.0
"""Seconds in which half an hour of telemetry is written."""
LONG_STEPS = (1_000, 10_000, 50_000, 60_000, 80_000, 100_000)
FULL_STEPS = 50_000
"""Steps after which the memory of a run is measured between garbage collections."""
IDLE_S = 20.0
HISTORY_STEPS = 5_556
"""Steps of 9 records each: 50,004 records."""
ATTACHES = 5
PRESSES, SETTLE_S = 20, 0.3
SIZES = ((80, 24), (140, 45), (160, 45))
"""From 150 columns on, the machine panel also draws the load of other programs: 140 to 290 bytes a
second on a busy machine, none on an idle one. The smaller sizes have no such panel."""
KEYS = ((b"2", b"Gradient"), (b"9", b"processes"), (b"1", b"steps/h"), (b"?", b"esc closes"))
"""Keys to press, and the text that only their effect writes to the terminal."""
FLOOD = f"""
import sys, time
n, began = 0, time.monotonic()
while True:
    due = int((time.monotonic() - began) * {LINES_PER_S})
    lines = (f"{{i:012d}} INFO a line of a log that nobody reads\\n" for i in range(n, due))
    sys.stdout.write("".join(lines))
    sys.stdout.flush()
    n = due
    time.sleep(0.01)
"""


class Screen:
    """The cockpit in a terminal of its own; a thread keeps what it writes."""

    def __init__(self, run: Path, columns: int = 160, rows: int = 45) -> None:
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.began = time.monotonic()
        self.process = psutil.Popen(
            [sys.executable, "-m", "atropos_tui", "attach", "--run-dir", str(run)],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env=_environment(),
        )
        os.close(inner)
        self._seen = bytearray()
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                if select.select([self._fd], [], [], 0.5)[0]:
                    data = os.read(self._fd, 1 << 16)
                    if b"\x1b[c" in data:  # what a terminal is, which every one answers
                        os.write(self._fd, b"\x1b[?62;22c")
                    with self._changed:
                        self._seen += data
                        self._changed.notify_all()
            except (OSError, ValueError):
                return

    @property
    def written(self) -> int:
        """Bytes that it has sent to the terminal."""
        return len(self._seen)

    def wait(self, words: bytes, since: int = 0, timeout_s: float = 30.0) -> float:
        """The moment at which `words` were written, after the first `since` bytes."""
        give_up = time.monotonic() + timeout_s
        with self._changed:
            while self._seen.find(words, since) < 0:
                left = give_up - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise TimeoutError(
                        f"the screen never said {words!r}; it ends with "
                        f"{bytes(self._seen[-500:])!r}"
                    )
            return time.monotonic()

    def press(self, key: bytes, words: bytes) -> float:
        """Seconds from the key to what it shows."""
        with self._changed:
            del self._seen[:]
        pressed = time.monotonic()
        os.write(self._fd, key)
        return self.wait(words) - pressed

    def write(self, key: bytes) -> None:
        os.write(self._fd, key)

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def memory_mb(self) -> float:
        if self.process.poll() is not None:
            raise RuntimeError(f"the screen is gone; its last words: {bytes(self._seen[-2000:])!r}")
        return float(self.process.memory_info().rss / 1e6)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        os.close(self._fd)


def _environment() -> dict[str, str]:
    """Environment of a user's terminal; bytecode is kept, as after any installation."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}


class Telemetry:
    """Appends records to a run, at a rate that may change."""

    def __init__(self, run: RunDir, first_step: int) -> None:
        self.rate = RECORDS_PER_S
        self.written = 0
        self._run = run
        self._step = first_step
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        rng = random.Random(1)
        while not self._over.is_set():
            records = step_records(self._step, rng, time=time.time())
            write_records(self._run.telemetry_jsonl, records)
            self._step += 1
            self.written += len(records)
            self._over.wait(len(records) / self.rate)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def screen_of(
    folder: Path, name: str, steps: int, *, flood: bool, size: tuple[int, int] = (160, 45)
) -> Iterator[tuple[RunDir, Screen]]:
    """A live run of `steps` steps with a screen on it."""
    made = make_run(folder / f"{name}-files", steps=steps, training_steps=20_000)
    parts = [
        child("run-api", SLEEP, role=Role.API),
        child("vllm", FLOOD if flood else SLEEP, role=Role.ENGINE),
        child("trainer", SLEEP, role=Role.TRAINER),
    ]
    with supervised(folder, name, *parts, max_log_bytes=LogPolicy().max_bytes) as (client, _):
        run = client.run_dir
        for ours, from_there in ((run.plan_json, made.plan_json), (run.run_json, made.run_json)):
            ours.write_bytes(from_there.read_bytes())
        run.telemetry_jsonl.write_bytes(made.telemetry_jsonl.read_bytes())
        screen = Screen(run.root, *size)
        try:
            yield run, screen
        finally:
            screen.close()


def newest_line(run: RunDir) -> int:
    """The number of the newest line that reached the log."""
    with run.log("vllm", 1).open("rb") as file:
        file.seek(-min(4096, os.fstat(file.fileno()).st_size), os.SEEK_END)
        return int(file.read().split(b"\n")[-2].split()[0])


def attach(folder: Path) -> dict[str, float]:
    found: list[tuple[float, float, float]] = []
    for turn in range(1 + ATTACHES):  # the first one only brings code and files into memory
        with screen_of(folder, f"attach{turn}", HISTORY_STEPS, flood=False) as (_, screen):
            shown = screen.wait(f"no step {HISTORY_STEPS + 1} for".encode()) - screen.began
            found.append((shown, screen.cpu_s(), screen.memory_mb()))
    seconds, cpu, memory = (statistics.median(values) for values in zip(*found[1:], strict=True))
    worst = max(shown for shown, *_ in found[1:])
    return {
        "attach_50k_s": seconds,
        "attach_50k_max_s": worst,
        "attach_50k_cpu_s": cpu,
        "attach_50k_mb": memory,
    }


def keys(folder: Path) -> dict[str, float]:
    """CPU that each key takes until the screen is at rest again, without a flood, in the mean."""
    found: dict[str, float] = {}
    with screen_of(folder, "keys", 400, flood=False) as (_, screen):
        screen.wait(b"no step 401 for")
        time.sleep(3)
        for _ in range(PRESSES):
            for key, words in KEYS:
                before = screen.cpu_s()
                screen.press(key, words)
                time.sleep(SETTLE_S)
                name = f"key_{key.decode()}_cpu_ms"
                found[name] = found.get(name, 0.0) + 1000 * (screen.cpu_s() - before) / PRESSES
            screen.write(b"?")
            time.sleep(SETTLE_S)
    return found


def idle(folder: Path) -> dict[str, float]:
    with screen_of(folder, "idle", 100, flood=False) as (_, screen):
        screen.wait(b"no step 101 for")
        time.sleep(3)
        before, began = screen.cpu_s(), time.monotonic()
        time.sleep(IDLE_S)
        return {"idle_cpu_percent": 100 * (screen.cpu_s() - before) / (time.monotonic() - began)}


def rest(folder: Path) -> dict[str, float]:
    """Bytes a second to the terminal, at each size: of a run in which nothing happens, and of one
    that is over."""
    found: dict[str, float] = {}
    for columns, rows in SIZES:
        with screen_of(folder, f"rest{columns}", 100, flood=False, size=(columns, rows)) as (
            run,
            screen,
        ):
            screen.wait(b"no step 101 for")
            found[f"rest_{columns}x{rows}_bytes_per_s"] = bytes_per_s(screen)
        over = Screen(run.root, columns, rows)
        try:
            over.wait(b"stopped")
            found[f"over_{columns}x{rows}_bytes_per_s"] = bytes_per_s(over)
        finally:
            over.close()
    return found


def bytes_per_s(screen: Screen) -> float:
    time.sleep(8)  # until it is quiet
    before, began = screen.written, time.monotonic()
    time.sleep(IDLE_S)
    return (screen.written - before) / (time.monotonic() - began)


def flood(folder: Path, seconds: float) -> dict[str, float]:
    with screen_of(folder, "flood", 100, flood=True) as (run, screen):
        screen.wait(b"no step 101 for")
        screen.write(b"[" * 3 + b"]")  # the log of the child that prints
        telemetry = Telemetry(run, 101)
        time.sleep(3)
        line, before, began, records = (
            newest_line(run),
            screen.cpu_s(),
            time.monotonic(),
            telemetry.written,
        )
        delays, used = [], 0.0
        while time.monotonic() - began < seconds:
            for key, words in KEYS:
                at_key = screen.cpu_s()
                delays.append(screen.press(key, words))
                used += screen.cpu_s() - at_key
                time.sleep(0.5)
            screen.write(b"?")  # closes the help
            time.sleep(0.5)
        passed = time.monotonic() - began
        found = {
            "lines_per_s": (newest_line(run) - line) / passed,
            "records_per_s": (telemetry.written - records) / passed,
            "keys": len(delays),
            "key_p50_ms": 1000 * statistics.median(delays),
            "key_p95_ms": 1000 * statistics.quantiles(delays, n=20)[-1],
            "key_max_ms": 1000 * max(delays),
            "key_cpu_ms": 1000 * used / len(delays),
            "flood_cpu_percent": 100 * (screen.cpu_s() - before) / passed,
            "flood_mb": screen.memory_mb(),
        }
        found |= half_hour(screen, telemetry)
        telemetry.stop()
        return found


def half_hour(screen: Screen, telemetry: Telemetry) -> dict[str, float]:
    """Memory while half an hour of records arrives at once."""
    telemetry.rate = HALF_HOUR_RECORDS / SIMULATED_S
    start, sizes = telemetry.written, [screen.memory_mb()]
    for quarter in range(1, 5):
        while telemetry.written - start < quarter * HALF_HOUR_RECORDS / 4:
            time.sleep(0.1)
        sizes.append(screen.memory_mb())
    telemetry.rate = RECORDS_PER_S
    return {
        "half_hour_mb": sizes[-1],
        "half_hour_growth_mb": sizes[-1] - sizes[0],
        "last_quarter_mb": sizes[-1] - sizes[-2],
    }


def long(folder: Path) -> dict[str, float]:
    """Measure the memory after each number of steps, and the growth for each step of the last
    half.

    Two points alone would take a memory that rises and falls for growth, so the figures include the
    range of all points of the last half.
    """
    rng, found = random.Random(1), {}
    with screen_of(folder, "long", 100, flood=False) as (run, screen):
        screen.wait(b"no step 101 for")
        step = 100
        for goal in LONG_STEPS:
            while step < goal:
                batch = range(step + 1, min(step + 100, goal) + 1)
                records = [
                    record for at in batch for record in step_records(at, rng, time=time.time())
                ]
                write_records(run.telemetry_jsonl, records)
                step = batch[-1]
            screen.wait(f"{goal}/".encode(), timeout_s=120)
            if goal >= FULL_STEPS:
                # The screen gives memory back at its collections, whose gaps would count as growth.
                time.sleep(COLLECT_S + 5)
            found[f"after_{goal}_steps_mb"] = screen.memory_mb()
    half = [found[f"after_{goal}_steps_mb"] for goal in LONG_STEPS if goal >= FULL_STEPS]
    growth = (half[-1] - half[0]) * 1e6 / (LONG_STEPS[-1] - FULL_STEPS)
    return found | {"bytes_a_step": growth, "long_range_mb": max(half) - min(half)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="length of the flood (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        choices=("attach", "keys", "idle", "rest", "flood", "long"),
        help="measure this alone",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {"load_average": os.getloadavg()[0], "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts: dict[str, Callable[[Path], dict[str, Any]]] = {
            "attach": attach,
            "keys": keys,
            "idle": idle,
            "rest": rest,
            "long": long,
            "flood": lambda at: flood(at, options.seconds),
        }
        for part, measure in parts.items():
            if options.only in (None, part):
                found |= measure(folder)
    if options.json:
        print(json.dumps(found))
    else:
        for key, value in found.items():
            print(
                f"{key:<22} {value:>12,.2f}"
                if isinstance(value, float)
                else f"{key:<22} {value:>12,}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
