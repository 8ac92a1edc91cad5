"""The one place that opens NVML, and what the NVIDIA driver says of its cards there.

The driver may hang: the supervisor, which cannot wait, asks through `supervisor.gpu_memory.Reader`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class Card:
    """One GPU at one moment; memory in bytes."""

    index: int
    used: int
    total: int
    name: str = ""
    utilization: int | None = None
    processes: dict[int, int | None] | None = None
    """Bytes by pid, as the driver numbers processes: inside a container those are pids of the host. None where it
    lists no processes; a process may have an unknown amount."""
    power_w: float | None = None
    temperature_c: int | None = None
    capability: tuple[int, int] = (0, 0)
    """Compute capability; only `read_driver` asks for it."""

    def figures(self) -> dict[str, Any]:
        """Fields of `control.GpuStatus`."""
        return {
            "index": self.index,
            "name": self.name,
            "used_bytes": self.used,
            "total_bytes": self.total,
            "utilization_percent": self.utilization,
            "power_w": self.power_w,
            "temperature_c": self.temperature_c,
        }


@dataclass(frozen=True)
class NvidiaDriver:
    """The NVIDIA driver and its cards."""

    version: str
    cuda: tuple[int, int]
    """The newest CUDA that it supports."""
    cards: list[Card]


class NoDriverError(Exception):
    """This machine has no NVIDIA driver that could be asked.

    Args:
        refuses: one is installed, but does not let itself be opened.
    """

    def __init__(self, reason: str, *, refuses: bool = False) -> None:
        super().__init__(reason)
        self.refuses = refuses


def given_here(environment: Mapping[str, str] = os.environ) -> str | None:
    """The GPUs that SLURM has given this process, as CUDA reads them; None: no job, or one that was given none.

    NVML counts the cards of the machine, or where SLURM keeps the others from a job those of the job alone. What SLURM
    writes for CUDA is counted in the same way; `SLURM_JOB_GPUS` is always that of the machine.
    """
    return environment.get("CUDA_VISIBLE_DEVICES") if "SLURM_JOB_ID" in environment else None


class Nvml:
    """NVML through nvidia-ml-py: imported and initialised at the first reading, kept until one fails.

    Args:
        given: only these are cards, in this order, as `CUDA_VISIBLE_DEVICES` has them (`given_here`); all else.
    """

    def __init__(self, given: str | None = None) -> None:
        self._given = given
        self._library: Any = None
        self._handles: list[Any] = []
        self._nodes: list[str] = []

    def read(self) -> list[Card]:
        """Every card, by index.

        Raises:
            NoDriverError: there is none, and there will be none.
            Exception: of NVML, when the driver is in trouble; the next reading opens it anew.
        """
        if self._library is None:
            self._open()
        try:
            return [self._card(index, handle) for index, handle in enumerate(self._handles)]
        except Exception:
            self.close()
            raise

    def driver(self) -> NvidiaDriver:
        """The driver, and each card with its capability; 0 bytes of memory where it tells none, as under MIG.

        Raises:
            NoDriverError: there is none.
        """
        if self._library is None:
            self._open()
        library = self._library
        cuda = int(library.nvmlSystemGetCudaDriverVersion())
        cards = []
        for index, handle in enumerate(self._handles):
            major, minor = library.nvmlDeviceGetCudaComputeCapability(handle)
            try:
                card = self._card(index, handle)
            except library.NVMLError:
                card = Card(index, 0, 0, _text(library.nvmlDeviceGetName(handle)))
            cards.append(replace(card, capability=(int(major), int(minor))))
        return NvidiaDriver(_text(library.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10), cards)

    def has_open(self, pid: int, index: int) -> bool:
        """Whether the process that is `pid` here really uses card `index`."""
        node = self._nodes[index] if index < len(self._nodes) else ""
        try:
            return any(os.readlink(entry.path) == node for entry in os.scandir(f"/proc/{pid}/fd"))  # noqa: PTH115
        except OSError:
            return False

    def close(self) -> None:
        """Let the driver go; the next reading opens it again."""
        library, self._library, self._handles = self._library, None, []
        with contextlib.suppress(Exception):
            library.nvmlShutdown()

    def _open(self) -> None:
        try:
            ctypes.CDLL(LIBRARY)  # before an import that costs 6 MB and 0.1 s, for nothing on most machines
            import pynvml
        except Exception as error:
            raise NoDriverError(str(error)) from None
        try:
            pynvml.nvmlInit()
        except Exception as error:  # no driver, no permission: NVML has a class for each
            absent = (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded)
            raise NoDriverError(str(error), refuses=not isinstance(error, absent)) from None
        count = pynvml.nvmlDeviceGetCount()
        every = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        self._handles = _chosen(pynvml, every, self._given) if self._given else every
        self._nodes = [_node(pynvml, handle) for handle in self._handles]
        self._library = pynvml

    def _card(self, index: int, handle: Any) -> Card:
        library = self._library
        memory = library.nvmlDeviceGetMemoryInfo(handle)
        name = _text(library.nvmlDeviceGetName(handle))
        utilization: int | None = None
        power_w: float | None = None
        temperature_c: int | None = None
        processes: dict[int, int | None] | None = None
        with contextlib.suppress(library.NVMLError):  # not under MIG
            utilization = int(library.nvmlDeviceGetUtilizationRates(handle).gpu)
        with contextlib.suppress(library.NVMLError):
            power_w = library.nvmlDeviceGetPowerUsage(handle) / 1000
        with contextlib.suppress(library.NVMLError):
            temperature_c = int(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU))
        with contextlib.suppress(library.NVMLError):
            rows = library.nvmlDeviceGetComputeRunningProcesses(handle)
            processes = {int(row.pid): row.usedGpuMemory for row in rows}
        return Card(index, int(memory.used), int(memory.total), name, utilization, processes, power_w, temperature_c)


def read_driver() -> NvidiaDriver | str | None:
    """What NVML tells; None without a driver, and its words where one is there but refuses."""
    nvml = Nvml(given_here())
    try:
        return nvml.driver()
    except NoDriverError as error:
        return str(error) if error.refuses else None
    finally:
        nvml.close()


def _chosen(library: Any, handles: list[Any], given: str) -> list[Any]:
    """The cards that `given` names, by index or by the beginning of a UUID; all, where it names one that is not there,
    as in a container that shows its own cards alone."""
    found = []
    for word in given.split(","):
        if word.isdecimal():
            found += handles[int(word) : int(word) + 1]
        else:
            found += [each for each in handles if word and _text(library.nvmlDeviceGetUUID(each)).startswith(word)][:1]
    return found if len(found) == len(given.split(",")) else handles


def _text(value: str | bytes) -> str:
    """Older releases of nvidia-ml-py give bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _node(library: Any, handle: Any) -> str:
    """The device file of a card; empty where it has none of its own."""
    try:
        return f"/dev/nvidia{library.nvmlDeviceGetMinorNumber(handle)}"
    except library.NVMLError:
        return ""
