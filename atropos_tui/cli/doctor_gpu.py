"""`doctor` on GPUs: driver against torch's build, architecture, memory that somebody holds. NVML only, no torch."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from atropos_tui.cli.doctor_check import Check, fail, ok, warn
from atropos_tui.monitor.format import bytes_text

BLACKWELL = (10, 0)
AMPERE = (8, 0)
BUSY_SHARE = 0.05
"""Memory in use below this share is the driver's own."""
IMPORT_S = 60.0
"""A cold `import torch` on a slow disk takes half a minute."""
ASK_TORCH = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())"


@dataclass(frozen=True)
class Gpu:
    """One card, as NVML tells it. Bytes; `processes` are pids of the host, which a container cannot look up."""

    index: int
    name: str
    capability: tuple[int, int]
    total: int
    used: int
    processes: dict[int, int] = field(default_factory=dict)
    """pid -> bytes."""


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver and its cards."""

    version: str
    cuda: tuple[int, int]
    """The newest CUDA that it supports."""
    gpus: list[Gpu]


def read_driver() -> Driver | str | None:
    """Ask NVML; None without a driver, and its words where one is there but refuses."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        return str(error)
    try:
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion())
        gpus = [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return Driver(str(pynvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10), gpus)
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    total, used = 0, 0
    processes: dict[int, int] = {}
    with contextlib.suppress(pynvml.NVMLError):  # not told under MIG and in some containers
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        total, used = int(memory.total), int(memory.used)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        processes = {int(one.pid): int(one.usedGpuMemory or 0) for one in running}
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(index, str(pynvml.nvmlDeviceGetName(handle)), (int(major), int(minor)), total, used, processes)


def graphics(driver: Driver | str | None, torch_cuda: str | None, engine: str | None) -> Iterator[Check]:
    """Judge what was read. `torch_cuda` is the CUDA of torch's build, `engine` the installed vLLM package."""
    if isinstance(driver, str):
        fix = (
            "after an update of the driver restart the machine; in a container its tools must be of the host's version"
        )
        yield fail("NVIDIA driver", f"it is there but refuses: {driver}", fix)
        return
    if driver is None:
        if torch_cuda or engine == "vllm":
            said = f"no NVIDIA driver answers, but CUDA builds are installed (torch for CUDA {torch_cuda or 'none'})"
            yield fail(
                "NVIDIA driver", said, "install the driver; in a container start it with --gpus all; or make install"
            )
        else:
            yield ok("NVIDIA driver", "none: CPU builds run here")
        return
    yield ok("NVIDIA driver", f"{driver.version}, CUDA up to {_dotted(driver.cuda)}, {len(driver.gpus)} GPU(s)")
    yield _fits(driver, torch_cuda)
    for gpu in driver.gpus:
        yield _architecture(gpu)
        yield _memory(gpu)


def _fits(driver: Driver, torch_cuda: str | None) -> Check:
    name = "CUDA of torch"
    if torch_cuda is None:
        return warn(name, "torch is a CPU build: the GPUs lie idle", "make install EXTRA=gpu in a fresh .venv")
    built = tuple(int(part) for part in torch_cuda.split(".")[:2])
    said = f"torch was built for CUDA {torch_cuda}, the driver supports up to {_dotted(driver.cuda)}"
    update = "update the driver, or install a torch that was built for an older CUDA"
    if built[0] > driver.cuda[0]:
        return fail(name, said, update)
    if built > driver.cuda:
        return warn(name, f"{said}: works, but kernels compiled at run time (Triton) may not load", update)
    return ok(name, said)


def _architecture(gpu: Gpu) -> Check:
    name, said = f"GPU {gpu.index}", f"{gpu.name}, compute capability {_dotted(gpu.capability)}"
    if gpu.capability >= BLACKWELL:
        fix = "if Triton fails to compile (LoRA kernels): enforce-eager = true under [vllm.args], or a newer vLLM"
        return warn(name, f"{said} (Blackwell)", fix)
    if gpu.capability < AMPERE:
        return warn(name, f"{said}: no bfloat16", 'set dtype = "float16" or "float32" under [trainer]')
    return ok(name, said)


def _memory(gpu: Gpu) -> Check:
    name = f"memory of GPU {gpu.index}"
    said = f"{bytes_text(gpu.used)} of {bytes_text(gpu.total)} in use"
    holders = ", ".join(f"pid {pid} ({bytes_text(held)})" for pid, held in sorted(gpu.processes.items()))
    if not gpu.total:
        return ok(name, "not told by the driver")
    if gpu.used < gpu.total * BUSY_SHARE:
        return ok(name, said)
    fix = "atropos-tui runs and atropos-tui clean show whether it is a run's; nvidia-smi shows the rest"
    return warn(name, f"{said} by {holders or 'processes that the driver does not name here'}", fix)


def torch_sees_gpus(present: int, python: str = sys.executable, timeout_s: float = IMPORT_S) -> Check:
    """Ask torch itself, in a process of its own."""
    name, began = "torch.cuda", time.monotonic()
    fix = (
        "see `python -c 'import torch; torch.cuda.init()'`; a restart of the machine after a driver update often helps"
    )
    try:
        command = [python, "-P", "-c", ASK_TORCH]  # torch, and no folder of that name here
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return fail(
            name, f"import torch took longer than {timeout_s:g} s", "is the disk slow, or the GPU hung? see dmesg"
        )
    took = f"asked in {time.monotonic() - began:.1f} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return fail(name, f"import torch fails: {last} ({took})", fix)
    available, count = done.stdout.split()[-2:]
    if available != "True" or int(count) == 0:
        return fail(name, f"torch sees no GPU although the driver shows {present} ({took})", fix)
    if int(count) != present:
        said = f"torch sees {count} of {present} GPUs ({took})"
        return warn(name, said, "CUDA_VISIBLE_DEVICES hides the others, or one of them is broken: see nvidia-smi")
    return ok(name, f"torch sees {count} GPU(s) ({took})")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
