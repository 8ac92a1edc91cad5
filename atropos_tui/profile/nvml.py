"""The NVIDIA driver's own word on its cards. It may hang: who cannot wait asks `supervisor.gpu_memory.Reader`."""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
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


class NoDriverError(Exception):
    """This machine has no NVIDIA driver that could be asked."""


class Nvml:
    """NVML through nvidia-ml-py: imported and initialised at the first reading, kept until one fails."""

    def __init__(self) -> None:
        self._library: Any = None
        self._handles: list[Any] = []
        self._nodes: list[str] = []

    def read(self) -> list[Card]:
        if self._library is None:
            self._open()
        try:
            return [self._card(index, handle) for index, handle in enumerate(self._handles)]
        except Exception:
            self._close()
            raise

    def has_open(self, pid: int, index: int) -> bool:
        node = self._nodes[index] if index < len(self._nodes) else ""
        try:
            return any(os.readlink(entry.path) == node for entry in os.scandir(f"/proc/{pid}/fd"))  # noqa: PTH115
        except OSError:
            return False

    def _open(self) -> None:
        try:
            ctypes.CDLL(LIBRARY)  # before an import that costs 6 MB and 0.1 s, for nothing on most machines
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # no library, no driver, no permission: NVML has a class for each
            raise NoDriverError(str(error)) from None
        count = pynvml.nvmlDeviceGetCount()
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        self._nodes = [_node(pynvml, handle) for handle in self._handles]
        self._library = pynvml

    def _close(self) -> None:
        library, self._library, self._handles = self._library, None, []
        with contextlib.suppress(Exception):
            library.nvmlShutdown()

    def _card(self, index: int, handle: Any) -> Card:
        library = self._library
        memory = library.nvmlDeviceGetMemoryInfo(handle)
        name = library.nvmlDeviceGetName(handle)
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
        text = name.decode() if isinstance(name, bytes) else str(name)
        return Card(index, int(memory.used), int(memory.total), text, utilization, processes, power_w, temperature_c)


def _node(library: Any, handle: Any) -> str:
    """The device file of a card; empty where it has none of its own."""
    try:
        return f"/dev/nvidia{library.nvmlDeviceGetMinorNumber(handle)}"
    except library.NVMLError:
        return ""
