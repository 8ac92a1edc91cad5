"""Faults injected into a running stack. A temporary fault is undone at its end.

Faults of the network, of /dev/shm and of the disk run only inside separate namespaces (`isolated`),
so that they do not affect other programs. The clock that jumps needs a C compiler (`clock.c`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.runs.demo_stack import NotRecovered, Stack, engine_processes

ENV_ISOLATED = "CHAOS_ISOLATED"
DISK_MB = 512
"""Size of the run's own disk and of its own /dev/shm."""
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
"""Values of <linux/sockios.h> and <net/if.h>."""
MOUNT = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=0700", "none"]
LONGEST_S = 20.0
"""Longest duration in seconds of a stop, and of the exhaustion of a resource."""
COUNTER = "counter"
"""A component that writes numbered lines."""
COUNTING = (
    "import time\nn = 0\nwhile True:\n print(f'line {n:09d}', flush=True)\n n += 1\n "
    "time.sleep(0.01)"
)
ENGINE = {"engine core": "core", "worker": "worker"}
OWN_NAMES = {"vllm": "API server", "arithmetic": "environment", "api": "run-api"}


def enter_isolation() -> bool:
    """Restart this program with mounts and a network of its own where the system allows it; return
    True inside them. There, /dev/shm has `DISK_MB`, and the loopback carries only the run's
    packets."""
    if os.environ.get(ENV_ISOLATED):
        subprocess.run([*MOUNT, "/dev/shm"], check=True)
        loopback(up=True)
        return True
    unshare = ["unshare", "--mount", "--net", *(["--map-root-user"] if os.geteuid() else [])]
    if subprocess.run([*unshare, *MOUNT, "/dev/shm"], capture_output=True, check=False).returncode:
        print(
            "no namespaces here: faults of disk, /dev/shm and network are left out", file=sys.stderr
        )
        return False
    os.environ[ENV_ISOLATED] = "1"
    return os.execvp("unshare", [*unshare, sys.executable, "-m", "benchmarks.chaos", *sys.argv[1:]])


def loopback(*, up: bool) -> None:
    """Switch the loopback of this network namespace on or off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh", b"lo", IFF_UP if up else 0)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)


@contextlib.contextmanager
def own_disk(folder: Path) -> Iterator[None]:
    """A file system of `DISK_MB` at `folder`."""
    subprocess.run([*MOUNT, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def with_clock(folder: Path) -> bool:
    """Give the runs that begin from now on a wall clock that jumps (`clock.c`), if there is a C
    compiler."""
    compiler = shutil.which("cc")
    if compiler:
        library, told = folder / "clock.so", folder / "clock"
        source = Path(__file__).with_name("clock.c")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"],
            check=True,
        )
        told.write_bytes(bytes(8))
        os.environ |= {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(told)}
    return compiler is not None


def processes(stack: Stack) -> dict[str, psutil.Process]:
    """Return the run's live processes by their role: the supervisor, components, and helpers."""
    status = stack.status()
    found: dict[str, int | None] = {"supervisor": status.supervisor_pid}
    for component in status.components:
        if component.state.has_process:
            found[OWN_NAMES.get(component.name, component.name)] = component.pid
    if server := found.get("API server"):
        with contextlib.suppress(psutil.Error):
            engine = engine_processes(server)
            found |= {name: engine[kind].pid for name, kind in ENGINE.items() if kind in engine}
    for process in psutil.process_iter(["pid", "ppid", "cmdline"]):
        title = " ".join(process.info["cmdline"] or [])
        if process.info["ppid"] == status.supervisor_pid and "launchers.guard" in title:
            found["guard"] = process.pid
        elif f"--run-dir {stack.live.root}" in title and "attach" in title:
            found["screen"] = process.pid
    return {
        name: psutil.Process(pid) for name, pid in found.items() if pid and psutil.pid_exists(pid)
    }


Act = Callable[[Stack, random.Random], str]


@dataclass(frozen=True)
class Fault:
    """A fault. `act` injects it, and returns a description of what it hit."""

    name: str
    act: Act
    ends: tuple[int, ...] = ()
    """Expected exit codes of the run, if the fault ends it. The run is then resumed."""
    isolated: bool = False
    """Offered only inside separate namespaces."""


def choose(stack: Stack, dice: random.Random, among: tuple[str, ...]) -> tuple[str, psutil.Process]:
    """Choose a live process of `among`; wait for one if none is alive.

    `lora_restart` often has no engine. The number of random draws is the same in either case.

    Raises:
        NotRecovered: none of them starts.
    """
    order = sorted(among, key=lambda _: dice.random())
    give_up = time.monotonic() + LONGEST_S
    while True:
        alive = processes(stack)
        for name in order:
            if name in alive:
                return name, alive[name]
        if time.monotonic() > give_up:
            raise NotRecovered(f"none of {', '.join(among)} is alive")
        time.sleep(0.1)


def signalled(number: signal.Signals, *among: str) -> Act:
    def act(stack: Stack, dice: random.Random) -> str:
        name, process = choose(stack, dice, among)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        return name

    return act


def stopped(*among: str) -> Act:
    def act(stack: Stack, dice: random.Random) -> str:
        name, process = choose(stack, dice, among)
        seconds = dice.uniform(1, LONGEST_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
            time.sleep(seconds)
            process.resume()
        return f"{name}, {seconds:.0f} s"

    return act


def limited(limit: int, what: Callable[[psutil.Process], int]) -> Act:
    """Limit a resource of one process to its present use, for some seconds."""

    def act(stack: Stack, dice: random.Random) -> str:
        name, process = choose(
            stack, dice, ("supervisor", "run-api", "environment", "trainer", "API server")
        )
        seconds = dice.uniform(1, LONGEST_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            usual = process.rlimit(limit)
            process.rlimit(limit, (what(process), usual[1]))
            time.sleep(seconds)
            process.rlimit(limit, usual)
        return f"{name}, {seconds:.0f} s"

    return act


def filled(folder: Callable[[Stack], Path]) -> Act:
    """Fill a file system to the last byte, for some seconds."""

    def act(stack: Stack, dice: random.Random) -> str:
        ballast = folder(stack) / "ballast"
        seconds = dice.uniform(2, LONGEST_S)
        try:
            for size in (1 << 20, 1):
                with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
                    while True:
                        file.write(bytes(size))
            time.sleep(seconds)
        finally:
            ballast.unlink()
        return f"{folder(stack)}, {seconds:.0f} s"

    return act


def connections_reset(stack: Stack, dice: random.Random) -> str:
    """Reset every connection of one server."""
    name = dice.choice(["api", "vllm"])
    port = stack.component(name).port
    for side in ("sport", "dport"):
        subprocess.run(
            ["ss", "--kill", "state", "established", side, f"= :{port}"],
            capture_output=True,
            check=True,
        )
    return f"connections of {name}"


def loopback_down(stack: Stack, dice: random.Random) -> str:
    """Switch the loopback off for some seconds."""
    seconds = dice.uniform(1, LONGEST_S)
    loopback(up=False)
    try:
        time.sleep(seconds)
    finally:
        loopback(up=True)
    return f"loopback, {seconds:.0f} s"


def port_bind_attempt(stack: Stack, dice: random.Random) -> str:
    """Kill a server, and try for ten seconds to bind its port, which the run holds.

    Raises:
        NotRecovered: the port was free.
    """
    name = dice.choice(["api", "vllm"])
    server = stack.component(name)
    psutil.Process(server.pid).kill()
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with socket.socket() as taker:
            try:
                taker.bind(("127.0.0.1", server.port or 0))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                raise NotRecovered(f"the port of {name} was free while the server was down")
        time.sleep(0.02)
    return f"port of {name}"


def line_overwritten(stack: Stack, dice: random.Random) -> str:
    """Overwrite one line in the middle of a record or log file."""
    run = stack.live.run
    paths = [run.telemetry_jsonl, run.supervisor_jsonl, *sorted(run.root.glob("eval.*.jsonl"))]
    paths += sorted(path for path in run.logs.glob("*/*.log") if path.parent.name != COUNTER)
    path = dice.choice(
        [path for path in paths if path.exists() and path.read_bytes().count(b"\n") > 4]
    )
    lines = path.read_bytes().splitlines(keepends=True)
    number = dice.randrange(1, len(lines) - 1)
    with path.open("r+b") as file:
        file.seek(sum(map(len, lines[:number])))
        file.write(dice.randbytes(len(lines[number]) - 1).replace(b"\n", b"?"))
    stack.overwritten[path] = stack.overwritten.get(path, 0) + 1
    return f"{path.relative_to(run.root)}, line {number + 1}"


def clock_jumped(stack: Stack, dice: random.Random) -> str:
    """Let the wall clock of every process of the run jump, and jump back some seconds later."""
    seconds, jump = dice.uniform(2, LONGEST_S), dice.choice([-86_400, -3600, -10, 10, 3600, 86_400])
    told = Path(os.environ["CHAOS_CLOCK"])
    for ahead in (jump, 0):
        with told.open("r+b") as file:
            file.write(ahead.to_bytes(8, sys.byteorder, signed=True))
        time.sleep(seconds if ahead else 0)
    return f"{jump:+d} s for {seconds:.0f} s"


def ended(stack: Stack) -> None:
    """Send SIGTERM to the run, and wait for its end."""
    assert stack.live.process is not None
    stack.live.process.terminate()
    stack.live.process.wait(60)


def checkpoint_truncated(stack: Stack, dice: random.Random) -> str:
    """End the run, and truncate a file of its newest checkpoint."""
    ended(stack)
    newest = max(stack.live.run.checkpoints.glob("*step_*"), key=lambda path: path.stat().st_mtime)
    path = dice.choice(
        sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    )
    os.truncate(path, dice.randrange(path.stat().st_size))
    return str(path.relative_to(stack.live.run.checkpoints))


def port_taken(stack: Stack, dice: random.Random) -> str:
    """End the run, occupy one of its ports, and expect `up --resume` to refuse with the port.

    Raises:
        NotRecovered: the resume did not refuse.
    """
    name = dice.choice(["api", "vllm"])
    port = stack.component(name).port
    ended(stack)
    with socket.create_server(("127.0.0.1", port or 0)):
        stack.resumed = True
        code, output = stack.live.resume().wait(60)
    if code != 2 or str(port) not in output or "fix:" not in output:
        raise NotRecovered(
            f"with the port of {name} taken, `up --resume` ended with {code}: {output[-500:]}"
        )
    return f"port of {name}"


SERVERS = ("run-api", "environment", "API server", "engine core", "worker", "trainer", COUNTER)
HELPERS = ("guard", "screen")
FAULTS = (
    *(
        Fault(f"SIGKILL {name}", signalled(signal.SIGKILL, name))
        for name in SERVERS
        if name != "worker"
    ),
    Fault("SIGKILL helper", signalled(signal.SIGKILL, *HELPERS)),
    Fault("SIGTERM any", signalled(signal.SIGTERM, *SERVERS, *HELPERS)),
    Fault("SIGSTOP any", stopped(*SERVERS, *HELPERS, "supervisor")),
    Fault("SIGKILL supervisor", signalled(signal.SIGKILL, "supervisor"), ends=(-signal.SIGKILL,)),
    Fault("SIGTERM supervisor", signalled(signal.SIGTERM, "supervisor"), ends=(130,)),
    Fault(
        "descriptors used up", limited(resource.RLIMIT_NOFILE, lambda process: process.num_fds())
    ),
    Fault(
        "memory limit",
        limited(resource.RLIMIT_AS, lambda process: process.memory_info().vms + (1 << 20)),
    ),
    Fault("disk full", filled(lambda stack: stack.live.root.parent), isolated=True),
    Fault("/dev/shm full", filled(lambda _: Path("/dev/shm")), isolated=True),
    Fault("connections reset", connections_reset, isolated=True),
    Fault("loopback down", loopback_down, isolated=True),
    Fault("port bind attempt", port_bind_attempt),
    Fault("port taken", port_taken, ends=(2,)),
    Fault("checkpoint truncated", checkpoint_truncated, ends=(130,)),
    Fault("line overwritten", line_overwritten),
)
CLOCK = Fault("clock jumps", clock_jumped)
