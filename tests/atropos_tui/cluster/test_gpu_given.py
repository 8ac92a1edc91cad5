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


def test_without_a_job_all_cards_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan names the machine's, whatever the shell has set."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("ABCD"))
    monkeypatch.setattr(gpu.ctypes, "CDLL", lambda _: None)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert given_here() is None
    assert [card.name for card in Nvml(given_here()).read()] == list("ABCD")
