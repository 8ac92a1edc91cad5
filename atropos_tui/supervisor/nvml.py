"""The NVIDIA driver's own word on GPU memory, read in a thread that may hang without anyone waiting for it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

PATIENCE_S = 5.0
"""So long a reading may take; a driver in trouble answers after minutes, or never."""
LIBRARY = "libnvidia-ml.so.1"
RETRY_S = 30.0
"""After a reading that failed, the driver is left alone for this long."""


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


class Driver(Protocol):
    """What the gate needs of NVML. Both are called in a thread and may raise anything."""

    def read(self) -> list[Card]:
        """Every card, by index.

        Raises:
            NoDriverError: there is none, and there will be none.
        """
        ...

    def has_open(self, pid: int, index: int) -> bool:
        """Whether the process that is `pid` here really uses card `index`."""
        ...


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


class Reader:
    """Readings for the event loop: never raises, never blocks, None where there is no answer."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.absent = False
        """There is no driver: nobody has to ask again."""
        self.awake = False
        """A reading has come back: the next ones take milliseconds, not the seconds of the first."""
        self._running: asyncio.Future[list[Card] | None] | None = None
        self._began = 0.0
        self._silent_until = 0.0

    async def cards(self, patience_s: float | None = None) -> list[Card] | None:
        """Every card as it is now; None without a driver, after a failure, and when it takes too long.

        Args:
            patience_s: how long this caller waits, at most `PATIENCE_S` after the reading began.
        """
        if self._running is None:
            if self.absent or time.monotonic() < self._silent_until:
                return None
            self._begin()
        assert self._running is not None
        left = self._began + PATIENCE_S - time.monotonic()
        wait_s = max(0.0, left if patience_s is None else min(left, patience_s))
        running = self._running
        await asyncio.wait([running], timeout=wait_s)
        return running.result() if running.done() else None

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._running, self._began = loop.create_future(), time.monotonic()

        def read() -> None:
            found = self._read()
            with contextlib.suppress(RuntimeError):  # the loop has ended in the meantime
                loop.call_soon_threadsafe(self._finish, found)

        # A thread of its own: one of a pool that hangs in the driver would hold up the end of the program.
        threading.Thread(target=read, name="nvml", daemon=True).start()

    def _finish(self, found: list[Card] | None) -> None:
        running, self._running, self.awake = self._running, None, True
        if running is not None:
            running.set_result(found)

    def _read(self) -> list[Card] | None:
        try:
            return self.driver.read()
        except NoDriverError:
            self.absent = True
        except Exception:  # a GPU that fell off the bus must not take the run with it
            self._silent_until = time.monotonic() + RETRY_S
        return None
