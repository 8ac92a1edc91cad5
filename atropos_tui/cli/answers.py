"""Models of what commands print with `--json`. `schemas.py` generates JSON Schema and docs/json.md
from them.

Fields may be added, never renamed or removed: scripts rely on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from atropos_common.protocol.records import DiagnosisRecord
from atropos_tui.cli.show import ascii_json
from atropos_tui.errors import Problem
from atropos_tui.monitor.bench import RunBenchmark
from atropos_tui.profile.budget.memory import Device
from atropos_tui.profile.spec import (
    AlertSpec,
    ComponentSpec,
    LauncherName,
    LogPolicy,
    MetricsPolicy,
    Node,
    NotifyPolicy,
)

Verdict = Literal["ok", "warn", "fail"]


class Answer(BaseModel):
    """Output of one command."""

    # defer_build: a command builds the validators of its own answer only.
    model_config = ConfigDict(frozen=True, defer_build=True)

    def as_json(self) -> str:
        """JSON text in ASCII: other characters may contain commands to a terminal."""
        return ascii_json(self.model_dump_json(indent=2))


class ComponentWhy(Answer):
    """One paragraph of `why`."""

    name: str
    state: str
    says: list[str]
    """One statement each: what it waits for, since when, the usual cause, what is wrong, and the
    fix."""


class Why(Answer):
    """State of a run and its components: what they wait for, or why they ended."""

    run_id: str
    phase: str
    exit_code: int | None
    sentence: str
    """The most important fact: what limits or breaks the run, and what to change."""
    headline: str
    """Current wait of the run, or how it ended."""
    components: list[ComponentWhy]
    diagnoses: list[DiagnosisRecord]
    """Open diagnoses, the most severe first. After the end of the run: all diagnoses; `over` marks
    those that ended before."""


class LogRow(Answer):
    """One line of `logs --json`."""

    time: float
    """Time of arrival in Unix seconds."""
    component: str
    attempt: int
    text: str


class Validated(Answer):
    """Result of a check of a profile, and of this machine or the one that `--gpus` describes."""

    valid: bool
    file: str
    mode: str = ""
    components: list[str] = Field(default_factory=list)
    """Names in start order; empty if the profile is not valid."""
    notes: list[str] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    """Risks such as tight memory."""
    problems: list[Problem] = Field(default_factory=list)
    """Mistakes to fix; empty if the profile is valid."""


class MemoryBudget(Answer):
    """Memory that a stack needs, in bytes; JSON null where it is not known."""

    notes: list[str]
    warnings: list[str]
    devices: list[Device]
    by_component: dict[str, dict[str, int]]
    """Bytes by component and device."""


class DiskBudget(Answer):
    """Checkpoints that a run keeps, in bytes."""

    each: int
    checkpoints: int
    """Largest number that exists at once."""
    interval: int
    """Steps between two checkpoints."""
    keeps_all: bool
    free: int | None
    """Free bytes on the run's disk; JSON null with `--gpus`."""
    host_copy: int
    """Bytes of host memory in which a checkpoint is copied for the write in the background."""
    wanted: int


class Plan(Answer):
    """Processes that a profile would start; values that look secret are left out."""

    run_id: str
    name: str
    mode: str
    run_dir: str
    components: list[ComponentSpec]
    """Components in start order."""
    logs: LogPolicy
    notify: NotifyPolicy
    metrics: MetricsPolicy
    alerts: list[AlertSpec]
    launcher: LauncherName
    nodes: list[Node]
    """All machines, the supervisor's own first; empty if that is the only one."""
    notes: list[str]
    budget: MemoryBudget
    disk: DiskBudget | None = None
    """JSON null if nothing is saved, or the model is unknown."""
    advice: list[str]
    """Settings that fit better."""
    problems: list[Problem]
    """Reasons why this machine, or the one of `--gpus`, cannot run the stack."""


class Written(Answer):
    """The profile that `init` wrote."""

    file: str
    mode: str
    components: list[str]
    said: str
    """Settings that `init` changed to make the stack fit, and why."""
    problems: list[Problem]
    """Settings that contradict the files of the model or of the environment."""
    lacking: list[Problem]
    """Things that this machine lacks to start the stack."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkRow(RunBenchmark):
    """Figures of one run, and their ratios to the first run if there are several."""

    waiting_share: float | None = None
    """Share of the time of all steps in which the trainer waited for rollouts."""
    ratios: dict[str, float] | None = None
    """Ratio to the first run, where both have the figure; absent in the first run."""


class Benchmarks(Answer):
    """Figures of runs, in the order of the arguments."""

    runs: list[BenchmarkRow]


class SweepCell(Answer):
    """One combination of settings."""

    label: str
    """Name of its folder below the folder of the sweep."""
    settings: dict[str, str]
    """Values by key, as given."""
    state: str
    """`done`, `ended CODE: REASON`, `not started`, or the reason why it could not start."""
    exit_code: int | None
    benchmark: RunBenchmark | None
    """Null in JSON if it was never started."""


class Sweep(Answer):
    """Result of a sweep."""

    dir: str
    cells: list[SweepCell]


@dataclass(frozen=True)
class Check:
    """One check of `doctor`; `fail` keeps a stack from running, `warn` may cause trouble later."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


class Doctor(Answer):
    """Checks of this machine, and what is missing."""

    version: str
    python: str
    platform: str
    verdict: Verdict
    """Worst verdict of all checks."""
    seconds: float
    checks: list[Check]
