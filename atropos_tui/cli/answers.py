"""What commands print with `--json`, as models. `schemas.py` makes JSON Schema and docs/json.md of them.

Fields are added, never renamed or taken away: scripts rely on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from atropos_common.records import DiagnosisRecord
from atropos_tui.cli.show import ascii_json
from atropos_tui.errors import Problem
from atropos_tui.monitor.bench import RunBenchmark
from atropos_tui.profile.memory import Device
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
    """What one command prints."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    def as_json(self) -> str:
        """As it is printed: ASCII, since a terminal obeys some of the rest."""
        return ascii_json(self.model_dump_json(indent=2))


class ComponentWhy(Answer):
    """A paragraph of `why`."""

    name: str
    state: str
    says: list[str]
    """One idea each: what it waits for, since when, what usually keeps it, what is wrong and the way out."""


class Why(Answer):
    """What a run or a component of it waits for, or why it ended."""

    run_id: str
    phase: str
    exit_code: int | None
    sentence: str
    """What is to be known first: what limits or breaks it, and what to change."""
    headline: str
    """What it waits for, or how it ended."""
    components: list[ComponentWhy]
    diagnoses: list[DiagnosisRecord]
    """Those that are open, the gravest first; after the end all, with `over` on those that have ended."""


class LogRow(Answer):
    """One line of `logs --json`, in a line of its own."""

    time: float
    """Of arrival, Unix seconds."""
    component: str
    attempt: int
    text: str


class Validated(Answer):
    """Whether a profile is right, and this machine, or the one that `--gpus` names, fit for it."""

    valid: bool
    file: str
    mode: str = ""
    components: list[str] = Field(default_factory=list)
    """Names in start order; empty where the profile is not valid."""
    notes: list[str] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    """What may bite: memory that is tight."""
    problems: list[Problem] = Field(default_factory=list)
    """What has to be changed; empty where the profile is valid."""


class MemoryBudget(Answer):
    """The memory that a stack wants; bytes, null where it is not known."""

    notes: list[str]
    warnings: list[str]
    devices: list[Device]
    by_component: dict[str, dict[str, int]]
    """Bytes by component and device."""


class Plan(Answer):
    """What a profile would start; values that look secret are left out."""

    run_id: str
    name: str
    mode: str
    run_dir: str
    components: list[ComponentSpec]
    """In start order."""
    logs: LogPolicy
    notify: NotifyPolicy
    metrics: MetricsPolicy
    alerts: list[AlertSpec]
    survive: bool
    launcher: LauncherName
    nodes: list[Node]
    """The machines, the supervisor's own first; empty where there is only that."""
    notes: list[str]
    budget: MemoryBudget
    advice: list[str]
    """Settings that fit better."""
    problems: list[Problem]
    """Why this machine, or the named one, cannot run it."""


class Written(Answer):
    """The profile that `init` wrote."""

    file: str
    mode: str
    components: list[str]
    said: str
    """What was set so that it fits, and why."""
    problems: list[Problem]
    """What the model's and the environment's own files say against it."""
    lacking: list[Problem]
    """What this machine needs before it can start it."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkRow(RunBenchmark):
    """Figures of one run, and of several those to the first."""

    waiting_share: float | None = None
    """Share of all steps' time in which the trainer waited for rollouts."""
    ratios: dict[str, float] | None = None
    """To the first run, where both have a figure; absent in the first."""


class Benchmarks(Answer):
    """Figures of runs, in the order in which they were named."""

    runs: list[BenchmarkRow]


class SweepCell(Answer):
    """One combination of settings."""

    label: str
    """Names its folder below the sweep's."""
    settings: dict[str, str]
    """By key, as they were given."""
    state: str
    """`done`, `ended CODE: REASON`, `not started`, or what kept it from being started."""
    exit_code: int | None
    benchmark: RunBenchmark | None
    """Null where it was never started."""


class Sweep(Answer):
    """What came of a sweep."""

    dir: str
    cells: list[SweepCell]


@dataclass(frozen=True)
class Check:
    """`fail` keeps a stack from running, `warn` may bite later."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


class Doctor(Answer):
    """What was looked at on this machine, and what is missing."""

    version: str
    python: str
    platform: str
    verdict: Verdict
    """The worst of all checks."""
    seconds: float
    checks: list[Check]
