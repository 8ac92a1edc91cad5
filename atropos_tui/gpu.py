"""GPUs that this process may use, and NVML, the driver's library."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
SHARES_S = 1.0
"""Least seconds over which the shares of a GPU are measured."""


@dataclass(frozen=True)
class Card:
    """One GPU at one moment; memory in bytes."""

    index: int
    used: int
    total: int
    name: str = ""
    utilization: int | None = None
    processes: dict[int, int | None] | None = None
    """Bytes by pid of the host, None where unknown; None without a list of processes."""
    power_w: float | None = None
    temperature_c: int | None = None
    sm_percent: float | None = None
    bandwidth_percent: float | None = None
    memory_busy_percent: int | None = None
    """As in `control.GpuStatus`."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability; only `driver` reads it."""

    def figures(self) -> dict[str, Any]:
        """Return the fields of `control.GpuStatus`."""
        return {
            "index": self.index,
            "name": self.name,
            "used_bytes": self.used,
            "total_bytes": self.total,
            "utilization_percent": self.utilization,
            "power_w": self.power_w,
            "temperature_c": self.temperature_c,
            "sm_percent": self.sm_percent,
            "bandwidth_percent": self.bandwidth_percent,
            "memory_busy_percent": self.memory_busy_percent,
        }


@dataclass(frozen=True)
class NvidiaDriver:
    version: str
    cuda: tuple[int, int]
    """Newest supported CUDA version."""
    cards: list[Card]


VISIBLE = "CUDA_VISIBLE_DEVICES"
"""CUDA's variable: the GPUs that a process may use, which it counts from 0."""
_UUIDS = ("GPU-", "MIG-")


class NoDriverError(Exception):
    """This machine has no usable driver; `refuses`: one is installed, but cannot be opened."""

    def __init__(self, reason: str, *, refuses: bool = False) -> None:
        super().__init__(reason)
        self.refuses = refuses


def given_here() -> str | None:
    """Return the GPUs that SLURM or the user gave this process, as numbers and UUIDs with commas.

    None: every GPU; "": none. As CUDA does, this leaves out what follows an unknown word. A number
    beyond the GPUs of this machine was meant for the machine around a container, which shows only
    its own.
    """
    value = os.environ.get(VISIBLE)
    if value is None:
        return None
    words = [word.strip() for word in value.split(",")]
    named = list(takewhile(lambda word: word.isdecimal() or word.startswith(_UUIDS), words))
    # A job without GPUs of its own.
    if not named and "SLURM_JOB_ID" in os.environ:
        return None
    numbers = [int(word) for word in named if word.isdecimal()]
    return None if numbers and max(numbers) >= _count(max(numbers) + 1) else ",".join(named)


def gpus_within(env: Mapping[str, str], given: str | None) -> dict[str, str]:
    """Map GPU numbers to the GPUs that a batch system or the user's shell shows."""
    there = (given or "").split(",")
    # Values that are no plain numbers, such as UUIDs, stay as they are.
    wanted = env.get(VISIBLE, "").split(",")
    if not given or not all(each.isdecimal() and int(each) < len(there) for each in wanted):
        return dict(env)
    return {**env, VISIBLE: ",".join(there[int(each)] for each in wanted)}


def _count(default: int) -> int:
    """Return the number of GPUs; `default` without a driver."""
    every = Nvml()
    try:
        return every.count()
    except NoDriverError:
        return default
    finally:
        every.close()


@dataclass(frozen=True)
class _Sample:
    """Counters of a GPU at one moment, for NVML's GPU performance monitoring (Hopper and later)."""

    counters: Any
    at: float
    shares: tuple[float | None, float | None] = (None, None)
    """Busy SMs and used memory bandwidth since the sample before, in percent."""


class Nvml:
    """Opened at the first reading, until one fails; `given`: cards, as in
    `CUDA_VISIBLE_DEVICES`."""

    def __init__(self, given: str | None = None) -> None:
        self._given = given
        self._library: Any = None
        self._handles: list[Any] = []
        self._nodes: list[str] = []
        # The newest sample of each card; None where the card has no such counters.
        self._samples: dict[int, _Sample | None] = {}

    def read(self) -> list[Card]:
        """Read every card.

        Raises:
            NoDriverError: there is no driver.
        """
        if self._library is None:
            self._open()
        try:
            return [self._card(index, handle) for index, handle in enumerate(self._handles)]
        except Exception:
            self.close()
            raise

    def count(self) -> int:
        """Return the number of cards.

        Raises:
            NoDriverError: there is no driver.
        """
        if self._library is None:
            self._open()
        return len(self._handles)

    def driver(self) -> NvidiaDriver:
        """Read versions, and cards with compute capability; 0 bytes where NVML reports none
        (MIG)."""
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
                card = Card(index, 0, 0, library.nvmlDeviceGetName(handle))
            cards.append(replace(card, capability=(int(major), int(minor))))
        # NVML writes CUDA 12.4 as 12040.
        return NvidiaDriver(
            library.nvmlSystemGetDriverVersion(), (cuda // 1000, cuda % 1000 // 10), cards
        )

    def has_open(self, pid: int, index: int) -> bool:
        """Return True if process `pid` has the device file of card `index` open."""
        # NVML lists pids of the host. Inside a container such a number may belong to an unrelated
        # process, so the open device file is the proof.
        node = self._nodes[index] if index < len(self._nodes) else ""
        try:
            return any(os.readlink(entry.path) == node for entry in os.scandir(f"/proc/{pid}/fd"))  # noqa: PTH115
        except OSError:
            return False

    def close(self) -> None:
        library, self._library, self._handles = self._library, None, []
        samples, self._samples = self._samples.values(), {}
        for sample in filter(None, samples):
            with contextlib.suppress(Exception):
                library.nvmlGpmSampleFree(sample.counters)
        with contextlib.suppress(Exception):
            library.nvmlShutdown()

    def _open(self) -> None:
        try:
            # Most machines without a GPU fail here, and save 6 MB and 0.1 s for the import.
            ctypes.CDLL(LIBRARY)
            import pynvml
        except Exception as error:
            raise NoDriverError(str(error)) from None
        try:
            pynvml.nvmlInit()
        except Exception as error:  # NVML has an error class for each reason
            absent = (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded)
            raise NoDriverError(str(error), refuses=not isinstance(error, absent)) from None
        count = pynvml.nvmlDeviceGetCount()
        every = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        self._handles = every if self._given is None else _chosen(pynvml, every, self._given)
        self._nodes = [_node(pynvml, handle) for handle in self._handles]
        self._library = pynvml

    def _card(self, index: int, handle: Any) -> Card:
        library = self._library
        memory = library.nvmlDeviceGetMemoryInfo(handle)
        name = library.nvmlDeviceGetName(handle)
        utilization: int | None = None
        power_w: float | None = None
        temperature_c: int | None = None
        processes: dict[int, int | None] | None = None
        # Each figure by itself: a card may support some of them only.
        memory_busy: int | None = None
        with contextlib.suppress(library.NVMLError):  # MIG has no utilization
            rates = library.nvmlDeviceGetUtilizationRates(handle)
            utilization, memory_busy = int(rates.gpu), int(rates.memory)
        with contextlib.suppress(library.NVMLError):
            power_w = library.nvmlDeviceGetPowerUsage(handle) / 1000
        with contextlib.suppress(library.NVMLError):
            temperature_c = int(
                library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)
            )
        with contextlib.suppress(library.NVMLError):
            rows = library.nvmlDeviceGetComputeRunningProcesses(handle)
            processes = {int(row.pid): row.usedGpuMemory for row in rows}
        used, total = int(memory.used), int(memory.total)
        sm, bandwidth = self._shares(index, handle)
        return Card(
            index,
            used,
            total,
            name,
            utilization,
            processes,
            power_w,
            temperature_c,
            sm,
            bandwidth,
            memory_busy,
        )

    def _shares(self, index: int, handle: Any) -> tuple[float | None, float | None]:
        """Shares of SMs and memory bandwidth since an earlier reading, in percent."""
        library, before, now = self._library, self._samples.get(index), time.monotonic()
        if before is None and index in self._samples:
            return None, None
        if before is not None and now - before.at < SHARES_S:
            return before.shares
        counters = None
        try:
            if before is None and not library.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                self._samples[index] = None
                return None, None
            counters = library.nvmlGpmSampleAlloc()
            library.nvmlGpmSampleGet(handle, counters)
            shares = self._between(before.counters, counters) if before else (None, None)
        # Older libraries lack the functions; containers and MIG may refuse them.
        except (library.NVMLError, AttributeError):
            shares = None
        stale = counters if shares is None else before and before.counters
        if stale is not None:
            with contextlib.suppress(library.NVMLError):
                library.nvmlGpmSampleFree(stale)
        if shares is None:
            # One failure later on keeps the earlier sample for the next reading.
            self._samples.setdefault(index, None)
            return None, None
        self._samples[index] = _Sample(counters, now, shares)
        return shares

    def _between(self, before: Any, now: Any) -> tuple[float | None, float | None]:
        library = self._library
        asked = library.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = library.NVML_GPM_METRICS_GET_VERSION, 2
        asked.sample1, asked.sample2 = before, now
        asked.metrics[0].metricId = library.NVML_GPM_METRIC_SM_UTIL
        asked.metrics[1].metricId = library.NVML_GPM_METRIC_DRAM_BW_UTIL
        library.nvmlGpmMetricsGet(asked)
        sm, bandwidth = (
            float(metric.value) if metric.nvmlReturn == 0 and 0 <= metric.value <= 100 else None
            for metric in (asked.metrics[0], asked.metrics[1])
        )
        return sm, bandwidth


def read_driver() -> NvidiaDriver | str | None:
    """Read the driver once; the error text if it cannot be opened, None without one."""
    nvml = Nvml(given_here())
    try:
        return nvml.driver()
    except NoDriverError as error:
        return str(error) if error.refuses else None
    finally:
        nvml.close()


def _chosen(library: Any, handles: list[Any], given: str) -> list[Any]:
    # All cards if one of the given ones is unknown to NVML, such as a slice of a card (MIG).
    found, words = [], given.split(",") if given else []
    for word in words:
        if word.isdecimal():
            found += handles[int(word) : int(word) + 1]
        else:
            ids = [library.nvmlDeviceGetUUID(each) for each in handles if word]
            found += [
                each for each, id_ in zip(handles, ids, strict=False) if id_.startswith(word)
            ][:1]
    return found if len(found) == len(words) else handles


def _node(library: Any, handle: Any) -> str:
    try:
        return f"/dev/nvidia{library.nvmlDeviceGetMinorNumber(handle)}"
    except library.NVMLError:
        return ""
