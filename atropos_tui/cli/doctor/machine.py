"""Checks of `doctor` on this machine. torch is never imported in this process."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

from atropos_common.system.installation import install_command
from atropos_common.system.parent_death import with_parent
from atropos_tui.cli.answers import Check
from atropos_tui.cli.manage import cleanup
from atropos_tui.gpu import Card, NvidiaDriver
from atropos_tui.monitor.format import bytes_text
from atropos_tui.profile.load import cache_dir
from atropos_tui.supervisor import client
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.processes.process import become_subreaper

GB = 1_000_000_000
MEMORY = 4 * GB
"""Bytes that the CPU demo needs."""
LEAST_SHARED_MEMORY = GB
"""Bytes. Containers start with 64 MB; NCCL's and vLLM's queues lie there, on a CPU the weights
too."""
OPEN_FILES = 4096
PROCESSES = 2048
DISK_FAIL, DISK_WARN = GB, 20 * GB
"""Bytes for a week of logs, telemetry and a few small checkpoints."""
SLOW_LOOPBACK_S = 0.05
TIME_ERROR = 5
"""Returned by adjtimex(2) if nothing synchronises the clock."""
BLACKWELL = (10, 0)
AMPERE = (8, 0)
LEAST_GPU_MEMORY = 8 * GB
"""Bytes that profile demo-gpu needs."""
BUSY_SHARE = 0.05
"""Share of a card's memory that the driver itself may use."""
IMPORT_S = 60.0
"""Seconds; a cold `import torch` on a slow disk takes 30."""
ASK_TORCH = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())"


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)


def warn(name: str, found: str, fix: str) -> Check:
    return Check(name, "warn", found, fix)


def fail(name: str, found: str, fix: str) -> Check:
    return Check(name, "fail", found, fix)


def judge(name: str, found: str, problem: bool, fix: str) -> Check:
    return warn(name, found, fix) if problem else ok(name, found)


def machine() -> Iterator[Check]:
    yield from (_memory(), _swap(), _cores(), _shared_memory())
    yield from limits({name: resource.getrlimit(number) for name, number in LIMITS.items()})
    yield from (_disk("disk of runs/", Path("runs")), _disk("disk of the cache", cache_dir()))
    yield from (_kernel(), ok("control groups", procfs.describe_groups()), _socket_folder())
    yield from (_clock(), _loopback(), _localhost(), _proxy())


def leftovers() -> Iterator[Check]:
    """One check for each dead run with remains."""
    found = cleanup.all_dead()
    for run in found:
        said = ", ".join(
            part for part in (run.count_text, f"{len(run.files)} files", run.group) if part
        )
        yield warn(
            f"run {run.run_id}", f"its supervisor is gone and left {said}", "atropos-tui clean"
        )
    unlisted = cleanup.unlisted()
    for run in unlisted:
        said = (
            f"{run.count_text} without a supervisor; the run is not in the list of runs "
            f"({run.root})"
        )
        yield warn(f"run {run.run_id}", said, f"atropos-tui clean --run-dir {run.root}")
    stale = cleanup.stale_sockets()
    yield judge(
        "stale sockets",
        f"{len(stale)} without a listener" if stale else "none",
        bool(stale),
        "atropos-tui clean",
    )
    if not found and not unlisted:
        yield ok("leftovers of dead runs", "none")


LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "core dumps": resource.RLIMIT_CORE,
}


def limits(found: dict[str, tuple[int, int]]) -> Iterator[Check]:
    """(soft, hard) limits as `ulimit` shows them."""
    for name, least, flag in (("open files", OPEN_FILES, "n"), ("processes", PROCESSES, "u")):
        soft, hard = found[name]
        said = f"{_limit(soft)} (hard limit {_limit(hard)})"
        low = soft != resource.RLIM_INFINITY and soft < least
        # A soft limit can only be raised up to the hard one.
        target = _limit(hard) if 0 <= hard < 16 * least else str(16 * least)
        yield judge(
            f"limit of {name}",
            said,
            low,
            f"ulimit -{flag} {target} before `up`; /etc/security/limits.conf makes it permanent",
        )
    soft, hard = found["locked memory"]
    yield ok("limit of locked memory", f"{_limit(soft, size=True)} (only InfiniBand needs more)")
    soft, hard = found["core dumps"]
    said = "off" if soft == 0 else _limit(soft, size=True)
    fix = "ulimit -c 0 before `up`: a crash of an engine may write all its memory to disk"
    yield judge("limit of core dumps", said, soft == resource.RLIM_INFINITY, fix)


def _limit(value: int, *, size: bool = False) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return bytes_text(value) if size else f"{value}"


def _memory() -> Check:
    memory = psutil.virtual_memory()
    limit = _group_limit("memory.max", "memory/memory.limit_in_bytes")
    said = f"{bytes_text(memory.available)} available of {bytes_text(memory.total)}"
    # psutil reports the host's memory inside a container as well.
    if limit is not None and limit < memory.total:
        said += f"; this container may use {bytes_text(limit)}"
    least = min(memory.available, limit if limit is not None else memory.available)
    return judge(
        "memory",
        said,
        least < MEMORY,
        f"end other programs: the CPU demo needs about {bytes_text(MEMORY)}",
    )


def _group_limit(*names: str) -> int | None:
    """A container's limit, by either version of control groups."""
    for name in names:
        try:
            text = (Path("/sys/fs/cgroup") / name).read_text().split()[0]
            return int(text)  # ValueError: the word `max`, no limit
        except (OSError, ValueError, IndexError):
            continue
    return None


def _swap() -> Check:
    swap = psutil.swap_memory()
    if not swap.total:
        return ok("swap", "none: a process that needs more memory is killed at once")
    said = f"{bytes_text(swap.used)} of {bytes_text(swap.total)} in use"
    return judge(
        "swap",
        said,
        swap.used > swap.total / 2,
        "end other programs: memory is short, and swapped weights are slow",
    )


def _cores() -> Check:
    return cores(len(os.sched_getaffinity(0)), os.cpu_count() or 1, os.getloadavg()[0])


def cores(usable: int, present: int, load: float) -> Check:
    """Usable cores, and the load of one minute."""
    said = f"{usable} of {present} usable, load {load:.1f}"
    if load > present:
        fix = "end other programs (`top` shows them), or expect slow starts and wrong timings"
        return warn("cores", f"{said}: other programs use them", fix)
    fix = (
        "raise start_timeout_s of [vllm], or give the container more cores: a start on one core "
        "takes minutes"
    )
    return judge("cores", said, usable < 2, fix)


def _shared_memory() -> Check:
    try:
        total, _, free = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return fail(
            "/dev/shm",
            str(error.strerror),
            "mount a tmpfs there: mount -t tmpfs -o size=8g tmpfs /dev/shm",
        )
    if not os.access("/dev/shm", os.W_OK):
        return fail("/dev/shm", "this user cannot write to it", "chmod 1777 /dev/shm")
    said = f"{bytes_text(free)} free of {bytes_text(total)}"
    fix = (
        "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm: it holds weights and "
        "queues"
    )
    return judge("/dev/shm", said, free < LEAST_SHARED_MEMORY, fix)


def _disk(name: str, path: Path) -> Check:
    # `path` may not exist yet; its first existing parent is on the same disk.
    folder = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    total, _, free = shutil.disk_usage(folder)
    said = f"{bytes_text(free)} free of {bytes_text(total)} at {folder}"
    fix = "free some space: on a full disk the run goes on, but loses checkpoints and logs"
    if not os.access(folder, os.W_OK):
        return fail(
            name,
            f"this user cannot write to {folder}",
            "choose another folder: --run-dir, ATROPOS_CACHE",
        )
    if (
        os.statvfs(folder).f_favail == 0 and os.statvfs(folder).f_files
    ):  # btrfs reports 0 of 0 inodes
        return fail(name, f"{said}, but no inode", "remove small files")
    return fail(name, said, fix) if free < DISK_FAIL else judge(name, said, free < DISK_WARN, fix)


def _kernel() -> Check:
    release = os.uname().release
    missing = []
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        missing.append("pidfd")
    if not become_subreaper():  # setting it is the test; it is harmless in this process
        missing.append("subreaper")
    if missing:
        return fail(
            "kernel", f"{release}, without {' and '.join(missing)}", "use Linux 5.3 or newer"
        )
    return ok("kernel", f"{release}, with pidfd and subreaper")


def _socket_folder() -> Check:
    try:
        return ok("socket folder", str(client.socket_folder()))
    except (OSError, client.SocketError) as error:
        return fail(
            "socket folder",
            str(error),
            "create it with mode 700, or set XDG_RUNTIME_DIR to a folder of yours",
        )


def _clock() -> Check:
    """A wrong time breaks TLS, tokens and the times in records."""
    newest = Path(__file__).stat().st_mtime
    now = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(now))
    if now < newest:
        return fail(
            "clock",
            f"{shown} is earlier than the installation of these files",
            "timedatectl set-ntp true",
        )
    # A zeroed struct timex only reads; 512 bytes are more than it has.
    status = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    kept = "not set by NTP here (as in most containers)" if status == TIME_ERROR else "set by NTP"
    return ok("clock", f"{shown}, {kept}")


def _loopback() -> Check:
    """All components talk over 127.0.0.1."""
    name, began = "loopback", time.perf_counter()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2)
            with (
                socket.create_connection(server.getsockname(), timeout=2) as ours,
                server.accept()[0] as theirs,
            ):
                theirs.settimeout(2)
                ours.sendall(b"x")
                theirs.recv(1)
    except OSError as error:
        return fail(
            name,
            f"127.0.0.1 cannot be reached: {error}",
            "ip link set lo up; check for a firewall on lo",
        )
    took = time.perf_counter() - began
    return judge(
        name,
        f"127.0.0.1 answers in {took * 1000:.1f} ms",
        took > SLOW_LOOPBACK_S,
        "end other programs if the machine is overloaded",
    )


def _localhost() -> Check:
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo("localhost", None)}
    except OSError:
        found = set()
    said = f"localhost is {', '.join(sorted(found)) or 'unknown'}"
    return judge(
        "name localhost", said, "127.0.0.1" not in found, "add `127.0.0.1 localhost` to /etc/hosts"
    )


def _proxy() -> Check:
    """A proxy would take requests to this machine: run-api and vLLM would look dead."""
    proxies = sorted(urllib.request.getproxies_environment().keys() & {"http", "https", "all"})
    if not proxies:
        return ok("proxy", "none set")
    around = urllib.request.proxy_bypass("127.0.0.1") and urllib.request.proxy_bypass("localhost")
    said = (
        f"set for {', '.join(proxies)}; requests to this machine "
        f"{'bypass it' if around else 'would go through it'}"
    )
    return judge("proxy", said, not around, "export NO_PROXY=127.0.0.1,localhost (and no_proxy)")


def graphics(
    driver: NvidiaDriver | str | None, torch_cuda: str | None, engine: str | None
) -> Iterator[Check]:
    """Judge driver and cards.

    Args:
        torch_cuda: CUDA version of torch's build.
        engine: installed vLLM package.
    """
    if isinstance(driver, str):
        fix = (
            "restart the machine after a driver update; in a container, use the driver libraries "
            "of the host's version"
        )
        yield fail("NVIDIA driver", f"installed, but NVML fails: {driver}", fix)
        return
    if driver is None:
        # Beside vLLM for the CPU, a CUDA build of torch computes on the CPU and needs no driver.
        if engine == "vllm" or (torch_cuda and engine is None):
            said = (
                f"no NVIDIA driver answers, but CUDA builds are installed (torch for CUDA "
                f"{torch_cuda or 'none'})"
            )
            yield fail(
                "NVIDIA driver",
                said,
                "install the driver; in a container start it with --gpus all; or, in a fresh "
                f"environment: {install_command('cpu')}",
            )
        else:
            yield ok("NVIDIA driver", "none: the stack runs on the CPU here")
        return
    yield ok(
        "NVIDIA driver",
        f"{driver.version}, CUDA up to {_dotted(driver.cuda)}, {len(driver.cards)} GPU(s)",
    )
    yield _fits(driver, torch_cuda)
    for card in driver.cards:
        yield _architecture(card)
        yield _card_memory(card)


def _fits(driver: NvidiaDriver, torch_cuda: str | None) -> Check:
    name = "CUDA of torch"
    if torch_cuda is None:
        return warn(
            name,
            "torch is a CPU build: the GPUs are idle",
            f"in a fresh environment: {install_command('gpu')}",
        )
    built = tuple(int(part) for part in torch_cuda.split(".")[:2])
    said = (
        f"torch was built for CUDA {torch_cuda}, the driver supports up to {_dotted(driver.cuda)}"
    )
    update = "update the driver, or install a torch that was built for an older CUDA"
    # CUDA guarantees compatibility within a major version, except for code that the driver compiles
    # itself.
    if built[0] > driver.cuda[0]:
        return fail(name, said, update)
    if built > driver.cuda:
        return warn(
            name, f"{said}: works, but kernels compiled at run time (Triton) may not load", update
        )
    return ok(name, said)


def _architecture(card: Card) -> Check:
    name, said = f"GPU {card.index}", f"{card.name}, compute capability {_dotted(card.capability)}"
    if card.capability >= BLACKWELL:
        fix = (
            "if Triton fails to compile (LoRA kernels): enforce-eager = true under [vllm.args], "
            "or a newer vLLM"
        )
        return warn(name, f"{said} (Blackwell)", fix)
    if card.capability < AMPERE:
        return warn(
            name, f"{said}: no bfloat16", 'set dtype = "float16" or "float32" under [trainer]'
        )
    return ok(name, said)


def _card_memory(card: Card) -> Check:
    name = f"memory of GPU {card.index}"
    said = f"{bytes_text(card.used)} of {bytes_text(card.total)} in use"
    holders = ", ".join(
        f"pid {pid} ({bytes_text(held or 0)})"
        for pid, held in sorted((card.processes or {}).items())
    )
    if not card.total:  # such as under MIG
        return ok(name, "not reported by the driver")
    if card.total < LEAST_GPU_MEMORY:
        return warn(
            name,
            f"{said}: little",
            f"use profile demo, which needs no GPU; demo-gpu needs {bytes_text(LEAST_GPU_MEMORY)}",
        )
    if card.used < card.total * BUSY_SHARE:
        return ok(name, said)
    fix = (
        "atropos-tui runs and atropos-tui clean show processes of runs; nvidia-smi shows all others"
    )
    return warn(name, f"{said} by {holders or 'processes that the driver does not list'}", fix)


def compiler(found: str | None, header: Path) -> Check:
    """Triton compiles code at its first start, with a C compiler and Python's headers."""
    name = "C compiler"
    missing = [] if found else ["no gcc, cc or clang"]
    missing += [] if header.exists() else [f"no {header}"]
    if missing:
        said = f"{' and '.join(missing)}: Triton's kernels do not compile, so vLLM does not start"
        return fail(
            name, said, "apt-get install gcc python3-dev, or your system's packages for them"
        )
    return ok(name, f"{found}, with Python's headers")


def find_compiler() -> tuple[str | None, Path]:
    """The compiler that Triton picks, and the header that it needs."""
    named = (
        shutil.which(name) for name in (os.environ.get("CC", ""), "gcc", "cc", "clang") if name
    )
    return next(filter(None, named), None), Path(sysconfig.get_paths()["include"]) / "Python.h"


def torch_sees_gpus(
    present: int, python: str = sys.executable, timeout_s: float = IMPORT_S
) -> Check:
    """GPUs that torch sees, in a process of its own."""
    name, began = "torch.cuda", time.monotonic()
    fix = (
        "run `python -c 'import torch; torch.cuda.init()'` for the error; restart the machine "
        "after a driver update"
    )
    try:
        command = with_parent(
            [python, "-P", "-c", ASK_TORCH]
        )  # -P: not a folder `torch` in the current one
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return fail(
            name,
            f"import torch took longer than {timeout_s:g} s",
            "check dmesg for a slow disk or a hung GPU",
        )
    took = f"after {time.monotonic() - began:.1f} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return fail(name, f"import torch fails: {last} ({took})", fix)
    available, count = done.stdout.split()[
        -2:
    ]  # the last two words: an import may print warnings first
    if available != "True" or int(count) == 0:
        return fail(name, f"torch sees no GPU although the driver shows {present} ({took})", fix)
    if int(count) != present:
        said = f"torch sees {count} of {present} GPUs ({took})"
        return warn(
            name,
            said,
            "check CUDA_VISIBLE_DEVICES, which may hide GPUs, and nvidia-smi for a broken one",
        )
    return ok(name, f"torch sees {count} GPU(s) ({took})")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
