"""GPUs that a run may use inside a SLURM job: those of a machine or of a cgroup; NVML is a
stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from atropos_tui import gpu
from atropos_tui.cluster import node_probe
from atropos_tui.gpu import Nvml, given_here
from atropos_tui.profile.budget.inventory import read_machine
from atropos_tui.profile.spec import ComponentSpec, StackSpec
from atropos_tui.supervisor.processes.launch import prepare
from atropos_tui.supervisor.processes.process import LaunchError


class FakeNvml(SimpleNamespace):
    """Cards named A, B, ... with the UUIDs GPU-A, GPU-B, ..."""

    NVMLError = NVMLError_LibraryNotFound = NVMLError_DriverNotLoaded = RuntimeError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, names: str) -> None:
        super().__init__()
        self.names = names

    def __getattr__(self, name: str) -> Any:
        def absent(*_: object) -> Any:
            raise RuntimeError(name)

        return absent

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.names[index]

    def nvmlDeviceGetName(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=0, total=80)

    def nvmlDeviceGetMinorNumber(self, handle: str) -> int:
        return ord(handle) - ord("A")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580"


@pytest.mark.parametrize(
    ("there", "given", "seen"),
    [
        (
            "ABCDEFGH",
            "4,5",
            "EF",
        ),  # NVML shows the whole machine: SLURM does not keep cards from a job
        ("EF", "0,1", "EF"),  # it does: NVML and CUDA count those of the job alone
        ("ABCD", "GPU-C,GPU-A", "CA"),
        (
            "EF",
            "4,5",
            "EF",
        ),  # a container shows its own, and what is set was for the machine around it
        ("ABCD", "", "ABCD"),
    ],
)
def test_a_job_counts_the_cards_that_it_was_given(
    there: str, given: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(there))
    monkeypatch.setattr(gpu.ctypes, "CDLL", lambda _: None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_GPUS", "4,5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    driver = Nvml(given_here())
    assert [(card.index, card.name) for card in driver.read()] == list(enumerate(seen))
    assert driver._nodes == [f"/dev/nvidia{ord(name) - ord('A')}" for name in seen]
    assert [each.name for each in read_machine().gpus] == list(seen)
    if "GPU" not in given:
        assert [card["name"] for card in node_probe._cards()["cards"]] == list(seen)


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("2", "C"),
        ("3,1", "DB"),
        ("2, 3", "CD"),
        ("3,", "D"),
        ("GPU-B", "B"),
        ("1,x,2", "B"),  # as CUDA: nothing behind an unknown word
        ("", ""),
        ("-1", ""),
        (None, "ABCD"),
        ("4,5", "ABCD"),  # a container shows its own, and what is set was for the machine around it
    ],
)
def test_a_shell_that_shows_some_cards_counts_those(
    given: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may belong to somebody else."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("ABCD"))
    monkeypatch.setattr(gpu.ctypes, "CDLL", lambda _: None)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert [card.name for card in Nvml(given_here()).read()] == list(seen)
    stack = StackSpec(run_id="r", name="s", mode="none", run_dir="/tmp/run", components=[])
    for number in range(5):
        spec = ComponentSpec(
            name="vllm",
            command=[sys.executable],
            gpus=[number],
            env={"CUDA_VISIBLE_DEVICES": str(number)},
        )
        if seen == "ABCD":
            started = prepare(stack, spec, 1, "", "").env["CUDA_VISIBLE_DEVICES"]
            assert started == str(number), "a plan for more GPUs is refused before"
        elif number < len(seen):
            started = prepare(stack, spec, 1, "", "").env["CUDA_VISIBLE_DEVICES"]
            assert started in (str(ord(seen[number]) - ord("A")), f"GPU-{seen[number]}")
        else:
            with pytest.raises(LaunchError, match=f"GPU {number} does not exist: CUDA_VISIBLE"):
                prepare(stack, spec, 1, "", "")


class FakeCounters(FakeNvml):
    """Hopper cards: each sample is a number, and the shares are its growth."""

    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 2, 10

    def __init__(self, names: str, *, supported: bool = True) -> None:
        super().__init__(names)
        self.supported, self.refused, self.taken, self.freed = supported, False, 0, 0

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=97, memory=30)

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self.supported))

    def nvmlGpmSampleAlloc(self) -> Any:
        self.taken += 1
        return SimpleNamespace(value=0)

    def nvmlGpmSampleGet(self, handle: str, sample: Any) -> None:
        if self.refused:
            raise RuntimeError("no permission")
        sample.value = 10 * self.taken

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.freed += 1

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(2)]
        return SimpleNamespace(metrics=metrics)

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        grown = asked.sample2.value - asked.sample1.value
        for metric in asked.metrics:
            metric.value = grown * metric.metricId
            metric.nvmlReturn = int(metric.metricId == self.NVML_GPM_METRIC_SM_UTIL and grown > 10)


def test_shares_of_a_gpu_are_measured_between_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    library, now = FakeCounters("A"), [0.0]
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(gpu.ctypes, "CDLL", lambda _: None)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    driver = Nvml()

    def shares(after_s: float) -> tuple[float | None, float | None]:
        now[0] += after_s
        (card,) = driver.read()
        assert card.figures()["memory_busy_percent"] == 30
        return card.sm_percent, card.bandwidth_percent

    assert shares(0) == (None, None), "nothing to compare with"
    assert shares(2) == (20.0, 100.0)
    assert shares(0.1) == (20.0, 100.0), "too soon: the newest known ones"
    library.refused = True
    assert shares(2) == (None, None)
    library.refused = False
    assert shares(2) == (None, None), "the driver does not know one share, the other is impossible"
    driver.close()
    assert library.taken == library.freed, "no sample is left behind"


def test_a_card_without_counters_has_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.ctypes, "CDLL", lambda _: None)
    for library in (FakeCounters("A", supported=False), FakeNvml("A")):
        monkeypatch.setitem(sys.modules, "pynvml", library)
        driver = Nvml()
        for _ in range(2):
            (card,) = driver.read()
            assert (card.sm_percent, card.bandwidth_percent) == (None, None)
        driver.close()
