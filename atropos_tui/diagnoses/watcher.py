"""Evaluation of all live rules, about once a second. Slow work runs in a thread."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import httpx

from atropos_common.protocol.control import Role, State
from atropos_common.protocol.record_tail import RecordTail
from atropos_common.protocol.records import EnvCountsRecord, StageRecord
from atropos_common.protocol.stages import REGISTERED
from atropos_common.protocol.trainer_records import StepRecord, TimingRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.diagnoses.flow import FlowWatch
from atropos_tui.diagnoses.flow_rules import FLOW_RULES, FlowRule, explain
from atropos_tui.diagnoses.log_rules import LOG_RULES
from atropos_tui.diagnoses.log_scanner import NORMAL, LogScanner, Printed, Work
from atropos_tui.diagnoses.metric_rules import METRIC_RULES, alert_rules
from atropos_tui.diagnoses.metric_watch import MetricWatch
from atropos_tui.diagnoses.model import (
    WATCHER_FAULT,
    Diagnosis,
    Finding,
    Names,
)
from atropos_tui.diagnoses.questions import asking, fetch
from atropos_tui.diagnoses.stall_rules import (
    RUNS,
    STALL_RULES,
    ApiView,
    Flow,
    Part,
    RefusalWatch,
    RunSnapshot,
    StallRule,
    stalled_s,
    starting_roles,
    stopped_roles,
)
from atropos_tui.profile.spec import StackSpec

CHECK_EVERY_S = 1.0
API_EVERY_S = 30.0
"""Seconds between two queries of run-api's state, while the run is stalled."""
API_TIMEOUT_S = 3.0
LIST_S = 2.0
"""Seconds between two queries for registrations, while one is missing."""
DISK_S = 10.0
REGISTRATIONS = ("registrations", "stock registrations")
REFUSAL_COUNTS = ("refusals", "stock refusals", "openai refusals")
RECORDED = tuple(rule.name for rule in LOG_RULES if rule.recorded)
GONE_S = 8.0
"""Seconds for which a run rule must find the opposite before its diagnosis ends."""


class Watched(Protocol):
    def observe(self) -> tuple[Part, Printed | None]:
        """Return its state and new output; no output before its first attempt."""

    def diagnose(self, found: Diagnosis, attempt: int | None = None) -> None: ...

    def reach(self, stage: str, attempt: int) -> None: ...


class Watcher:
    """Evaluator of every live rule. Call `look` from the event loop."""

    def __init__(self, stack: StackSpec, components: Mapping[str, Watched]) -> None:
        self._stack, self._components = stack, components
        self._run = RunDir(Path(stack.run_dir))
        self._names = Names.of(stack)
        self._began = time.time()
        self._metrics = MetricWatch(self._began, (*METRIC_RULES, *alert_rules(stack.alerts)))
        self._tails: dict[Path, RecordTail] = {}
        self._looking = asyncio.Lock()
        self._findings: dict[tuple[str, str, str, int], Finding] = {}
        """Finding by rule, component, title, and attempt (0 without `each_attempt`)."""
        self._work_done: dict[str, deque[float]] = {}
        """Monotonic times of the newest accepted groups by environment; of steps under an empty
        name."""
        self._sent: dict[str, int] = {}
        """Accepted groups of each environment."""
        self._fault: Diagnosis | None = None
        self._counts: Counter[str] = Counter()
        self._since_step: Counter[str] = Counter()
        self._stepped_at: float | None = None
        """Monotonic time at which the newest step was read."""
        self._refusals = RefusalWatch(stack)
        self._flows = FlowWatch(stack)
        self.flows: Mapping[str, Flow] = {}
        api = next((spec for spec in stack.components if spec.role is Role.API and spec.port), None)
        self._api_url = api.url if api else ""
        self._api_attempt = 0
        self._api: ApiView | None = None
        self._asked_at = self._disk_at = self._listed_at = float("-inf")
        self._ahead: dict[float, float] = {}
        """Times ahead of a clock that was set back -> when that was noticed."""
        self._disk: tuple[int, int] | tuple[None, None] = (None, None)

    async def watch(self) -> None:
        """Look until cancelled. An exception becomes a diagnosis; the run goes on."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            try:
                # Shielded: records are read once, so a look must publish its findings even if this
                # task is cancelled.
                await asyncio.shield(asyncio.ensure_future(self.look()))
                if self._fault is not None:
                    self._publish_fault(self._fault.ended("it works again"))
                    self._fault = None
            except Exception as error:
                fix = (
                    "the run goes on, its diagnoses may be missing; please report it with the "
                    "run's supervisor.jsonl"
                )
                self._fault = WATCHER_FAULT.diagnosis(repr(error), fix)
                self._publish_fault(self._fault)

    def _publish_fault(self, found: Diagnosis) -> None:
        next(iter(self._components.values())).diagnose(found, 0)

    async def look(self) -> None:
        async with self._looking:
            seen = [component.observe() for component in self._components.values()]
            attempts = {part.name: part.attempt for part, _ in seen}
            for name, found in await asyncio.to_thread(self._work, time.time(), seen):
                self._components[name].diagnose(found, attempts[name])
            for part, _ in seen:
                if part.role is Role.ENV and self._flows.is_registered(part):
                    self._components[part.name].reach(REGISTERED, part.attempt)

    # The methods below run in the thread.

    def _work(
        self, now: float, seen: list[tuple[Part, Printed | None]]
    ) -> list[tuple[str, Diagnosis]]:
        clock = time.monotonic()  # patience must not depend on changes of the time of day
        run = RunSnapshot(now, tuple(self._placed(part, now) for part, _ in seen), self._names)
        away = starting_roles(run) | stopped_roles(run)
        results = [(run.trainer, found) for found in self._read_records(clock)]
        self._read_stages(run.parts)
        # Records and stages first: the end of a log finding depends on the newest work.
        for part, printed in seen:
            if printed is not None:
                scanner = printed.scanner
                in_log = scanner.scan(printed.pieces, clock, away, self._work_of(part))
                in_log += scanner.close(clock) if printed.over else []
                for name in self._by_records(part):
                    in_log += scanner.replaced(name, "the trainer's records show it")
                results += [
                    (part.name, found) for found in in_log if self._is_news(part, printed, found)
                ]
                self._count(part, scanner, now, clock)
        self._look_for_registrations(run.parts, now)
        run = self._completed(run, clock)
        rules: tuple[StallRule | FlowRule, ...] = (*STALL_RULES, *FLOW_RULES)
        for rule in rules:
            stalls = rule.look(run)
            for part in run.parts:
                results += self._update(rule, part, stalls.get(part.name), run, clock)
        return results

    def _is_news(self, part: Part, printed: Printed, found: Diagnosis) -> bool:
        """False if the component was stopped on purpose, or a metric rule reports the same."""
        if printed.asked_to_go:
            return False
        if found.over or part.role is not Role.TRAINER:
            return True
        # A record that is over by now has reported the line as well.
        return not self._metrics.is_open(found.rule) and found.rule not in self._by_records(part)

    def _by_records(self, part: Part) -> list[str]:
        """Rules for log lines whose problem the records of this attempt show."""
        if part.role is not Role.TRAINER:
            return []
        return [name for name in RECORDED if self._metrics.judges(name, part.attempt)]

    def _work_of(self, part: Part) -> Work:
        """Health and newest work of a component."""
        steps: Sequence[float] | None = None
        if part.role in (Role.TRAINER, Role.ENV):
            steps = self._work_done.get(part.name, self._work_done.get("", ()))
        return Work(part.state is State.HEALTHY, steps)

    def _works(self, name: str, count: int, clock: float) -> None:
        self._work_done.setdefault(name, deque(maxlen=NORMAL)).extend([clock] * min(count, NORMAL))
        # A step proves that batches arrive: it counts for every environment without its own counts.
        for env in [name] if name else set(self._flows.environments) - set(self._sent):
            self._refusals.accepted(env, count, clock)

    def _past(self, at: float, now: float) -> float:
        """Return `at`; for a future time (the clock was set back), when that was noticed."""
        return self._ahead.setdefault(at, now) if at > now else self._ahead.get(at, at)

    def _placed(self, part: Part, now: float) -> Part:
        return replace(
            part, since=self._past(part.since, now), started_at=self._past(part.started_at, now)
        )

    def _read_records(self, clock: float) -> list[Diagnosis]:
        results: list[Diagnosis] = []
        step = self._metrics.step_at
        steps = 0
        for path in (self._run.telemetry_jsonl, *sorted(self._run.root.glob("eval.*.jsonl"))):
            tail = self._tails.setdefault(path, RecordTail(path))
            for record in tail.rest():
                results += self._metrics.feed(record)
                steps += isinstance(record, StepRecord) and record.rank == 0
                if isinstance(record, EnvCountsRecord):
                    self._flows.count(record)
                    before, self._sent[record.env] = self._sent.get(record.env, 0), record.sent
                    self._works(
                        record.env,
                        record.sent - before if record.sent >= before else record.sent,
                        clock,
                    )
                elif isinstance(record, TimingRecord) and record.rank == 0:
                    self._flows.step(record)
                elif isinstance(record, StepRecord) and record.rank == 0:
                    self._flows.trained(record)
        if steps:
            self._works("", steps, clock)
        if self._metrics.step_at != step:  # log counts explain missing steps only
            self._since_step.clear()
            self._stepped_at = clock
        return results

    def _read_stages(self, parts: Sequence[Part]) -> None:
        """Read the stages that components recorded since the last look."""
        for part in parts:
            path = self._run.stages_jsonl(part.name)
            for record in self._tails.setdefault(path, RecordTail(path)).rest():
                if isinstance(record, StageRecord) and record.time >= self._began:
                    if record.attempt == part.attempt:
                        self._flows.reached(part, record.stage, record.time)
                    self._counts["registrations"] += (
                        part.role is Role.ENV and record.stage == REGISTERED
                    )

    def _count(self, part: Part, scanner: LogScanner, now: float, clock: float) -> None:
        counts = scanner.counts
        self._flows.printed(part, counts, now)
        if part.role is Role.ENV:
            self._refusals.note_refusals(
                part.name, part.attempt, sum(counts[name] for name in REFUSAL_COUNTS)
            )
        if part.role is Role.ENGINE:
            self._refusals.feed(part.name, part.attempt, scanner.noted, now, clock)
            scanner.noted.clear()
        if part.role is Role.API and part.attempt != self._api_attempt:
            self._api_attempt = part.attempt
            self._counts.clear()  # a new run-api has no registrations
        self._counts.update(counts)
        self._since_step.update(counts)
        counts.clear()

    def _completed(self, bare: RunSnapshot, clock: float) -> RunSnapshot:
        metrics = self._metrics
        live = sum(not part.state.is_resting for part in bare.of(Role.ENV))
        came = sum(self._counts[name] for name in REGISTRATIONS)
        free, size = self._free(bare.now)
        self._flows.ask(bare.parts, bare.now)
        self.flows = flows = {} if starting_roles(bare) else self._flows.view(bare.parts, bare.now)
        refused = self._refusals.judge(bare.parts, bare.now)
        run = replace(
            bare,
            step=metrics.step,
            last_step=self._flows.last_step,
            # Not the record's own time: the time of day may have jumped since.
            step_at=None if self._stepped_at is None else bare.now - (clock - self._stepped_at),
            pace_s=metrics.pace_s,
            counts=dict(self._since_step),
            # A dead environment never disconnects, so its registration remains.
            ghosts=max(0, came - self._counts["disconnections"] - live),
            free_bytes=free,
            disk_bytes=size,
            refused=refused,
            accepted=self._refusals.working(),
            flows=flows,
            explained=explain(flows, refused),
        )
        if stalled_s(run) is None:
            self._api = None
        elif abs(bare.now - self._asked_at) >= API_EVERY_S:
            self._asked_at = bare.now
            self._api = ask_api(self._api_url) if self._api_url else None
        return replace(run, api=self._api)

    def _look_for_registrations(self, parts: Sequence[Part], now: float) -> None:
        missing = [
            p
            for p in parts
            if p.role is Role.ENV and p.state in RUNS and not self._flows.is_registered(p)
        ]
        if not missing or not self._api_url or abs(now - self._listed_at) < LIST_S:
            return
        self._listed_at = now
        for name, at in registrations(self._api_url):
            for part in missing:
                spec = next(spec for spec in self._stack.components if spec.name == part.name)
                # A stock environment registers under a name from its command line.
                meant = name in (part.name, *spec.command) or len(self._flows.environments) == 1
                if meant and at >= part.started_at:
                    self._flows.registered(part, at)

    def _free(self, now: float) -> tuple[int, int] | tuple[None, None]:
        if abs(now - self._disk_at) >= DISK_S:
            self._disk_at = now
            try:
                disk = shutil.disk_usage(self._run.root)
                self._disk = disk.free, disk.total
            except OSError:
                self._disk = (None, None)
        return self._disk

    def _update(
        self,
        rule: StallRule | FlowRule,
        part: Part,
        found: Diagnosis | None,
        run: RunSnapshot,
        clock: float,
    ) -> list[tuple[str, Diagnosis]]:
        """Return `found` as a new diagnosis, and the ends of those that it replaces or refutes."""
        results: list[Diagnosis] = []
        cause = found.title if found else "", part.attempt if rule.each_attempt else 0
        for key, finding in self._findings.items():
            if key[:2] != (rule.name, part.name) or finding.open is None:
                continue
            if found is not None:  # another cause replaces the old one at once
                results += finding.closed(f"now: {found.title}") if key[2:] != cause else []
            elif part.state is not State.STOPPED and not rule.refuted(run, part):
                finding.seen_at = clock  # neither found nor refuted: keep it open
            elif finding.is_gone(clock, GONE_S):
                is_stopped = part.state is State.STOPPED
                results += finding.closed("it was stopped" if is_stopped else rule.end)
        if found is not None:
            finding = self._findings.setdefault((rule.name, part.name, *cause), Finding())
            results += finding.raised(clock, lambda: rule.stamp(found))
        return [(part.name, each) for each in results]


def registrations(url: str) -> list[tuple[str, float]]:
    """Name and registration time (Unix seconds) of each environment at `url`."""
    try:
        with asking(url, API_TIMEOUT_S) as http:
            answer = json.loads(fetch(http, "/envs"))
        return [
            (str(env["name"]), float(env["registered_at"]))
            for env in answer["envs"]
            if env["connected"]
        ]
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return []


def _newest_group(http: httpx.Client) -> int:
    try:
        return len(json.loads(fetch(http, "/latest_example")).get("tokens") or [])
    except (httpx.HTTPError, ValueError, AttributeError, TypeError):
        return 0


def ask_api(url: str) -> ApiView:
    """Query run-api; fetch its newest group only if groups wait, because it may be large."""
    try:
        with asking(url, API_TIMEOUT_S) as http:
            status, info = (json.loads(fetch(http, path)) for path in ("/status", "/info"))
            queue = int(status.get("queue_size") or 0)
            group = _newest_group(http) if queue else 0
            return ApiView(
                int(info.get("batch_size", -1)), queue, group, int(status.get("current_step") or 0)
            )
    except (httpx.HTTPError, ValueError, AttributeError, TypeError) as error:
        # httpx appends a link about the status on a second line.
        words = str(error).partition("\n")[0] or type(error).__name__
        return ApiView(problem=f"{url}: {words}")
