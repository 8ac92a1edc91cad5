"""What looks while a run goes: about once a second, at what components printed and what the trainer recorded.

`Watcher` belongs to the supervisor's event loop; everything that takes time (`_work`: finding lines, parsing records,
asking run-api) happens in a thread. `LogScanner` reads what one attempt of a component prints, at a bounded cost:
`feed` keeps bytes and does nothing else, so that draining the pipe costs no more than before. Of what comes between two
looks it keeps the first `HEAD` and the last `REST` bytes and drops what is between, which only a flood of more than
192 KB a second makes it do. `scan` finds each pattern by its anchor with `bytes.find`, over all bytes at once, and
looks at a line only where an anchor was found. Anchors whose rule has spoken are skipped after their first hit, and at
most `LINES` lines are looked at for a pattern in one look, so that a program that prints nothing but telling lines
costs no more.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import httpx

from atropos_common.control import Role, State
from atropos_common.record_tail import RecordTail
from atropos_common.records import (
    OF_EACH_STEP,
    EnvCountsRecord,
    EvalRecord,
    Record,
    StepRecord,
    TimingRecord,
    TrainerRecord,
)
from atropos_common.run_dir import RunDir
from atropos_tui.diagnoses.flow import FlowWatch
from atropos_tui.diagnoses.flow_rules import FLOW_RULES, FlowRule, explain
from atropos_tui.diagnoses.log_rules import LOG_RULES
from atropos_tui.diagnoses.metric_rules import METRIC_RULES, MetricRule, alert_rules
from atropos_tui.diagnoses.model import (
    LONGEST_LINE,
    WATCHER_FAULT,
    WORK_S,
    Diagnosis,
    Ends,
    Finding,
    LogMatch,
    LogPattern,
    LogRule,
    Names,
    plain,
    shortened,
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
)
from atropos_tui.profile.spec import REGISTERED, ComponentSpec, StackSpec

LOOK_S = 1.0
ASK_S = 30.0
"""run-api is asked no more often than this, and only while nothing trains."""
ANSWER_S = 3.0
LIST_S = 2.0
"""Nor which environments are registered there, and only while one is not known to be."""
DISK_S = 10.0
HEAD = 160 * 1024
REST = 32 * 1024
LINES = 20
RECENT = 64 * 1024
"""Of what was printed last, for rules that look for a cause around their pattern."""
MUCH = 16 * 1024
"""With more bytes than this at hand the event loop is let through between two patterns: it has a flood to drain."""
COUNTED: dict[Role, dict[str, bytes]] = {
    Role.ENV: {
        "dropped groups": b"Scores are the same in a group, skipping",
        "timed-out rollouts": b"has timed out after",
        "registrations": b"registered as environment ",
        "stock registrations": b"Initialized env with id ",
        "refusals": b"/generate: 4",
        "stock refusals": b"ClientResponseError",
        "openai refusals": b"BadRequestError",
    },
    Role.API: {
        "disconnections": b'"POST /disconnect-env HTTP/1.1" 200',
        "groups": b'"POST /scored_data HTTP/1.1" 200',
    },
    Role.TRAINER: {
        "first batches": b"inference_logprobs found in batch",
        "recomputed": b"came without inference_logprobs",
        "pauses": b"Training pauses until there is room",
    },
}
"""Lines whose number tells why no batch comes; in a flood they are counted only as far as they are kept."""
CAME = ("registrations", "stock registrations")
HEARD = ("refusals", "stock refusals", "openai refusals")
NOTED: dict[Role, bytes] = {Role.ENGINE: b"[vllm_server] refused "}
"""Lines that are kept as they are, for rules about other components."""
PACE_STEPS = 20
NORMAL = 3
"""Optimizer steps, or groups of an environment that run-api accepted, which show that a component works again."""
GONE_S = 8.0
"""Seconds for which a look at the whole run no longer finds something before its diagnosis is over."""
SLOWEST = 8
"""Limit of the factor on `MetricRule.good` for a number that goes wrong again and again."""


@dataclass(frozen=True)
class Work:
    """Proof that a component works, for the end of what its log told."""

    healthy: bool = False
    steps: Sequence[float] | None = None
    """Times of its newest steps or groups, at most `NORMAL`, on the clock of `LogScanner.scan`; None for a component
    whose work is not counted."""

    def since(self, at: float, *, counted: bool) -> bool:
        """Whether it has worked normally since `at`; with `counted` health alone does not show that."""
        if not self.healthy or (counted and self.steps is None):
            return False
        return self.steps is None or (len(self.steps) == NORMAL and self.steps[0] > at)


UNKNOWN = Work()


@dataclass
class _Open:
    """A match that needs patience: since when, and the line."""

    since: float
    match: LogMatch


class LogScanner:
    """Finds patterns in what one attempt prints. `feed` and `take` belong to the event loop, the rest to one thread."""

    def __init__(self, spec: ComponentSpec, names: Names) -> None:
        self.spec = spec
        self.names = names
        self.counts: Counter[str] = Counter()
        self.errors = 0
        """How often it printed `ERROR`."""
        self.noted: list[str] = []
        """Newest lines with the role's needle in `NOTED`; whoever takes them clears the list."""
        self._head: list[bytes] = []
        self._room = HEAD
        self._rest = bytearray()
        self._carry = b""
        self._patterns = [
            (rule, pattern) for rule in LOG_RULES if rule.concerns(spec.role) for pattern in rule.patterns
        ]
        self._counted = COUNTED.get(spec.role, {})
        self._findings: dict[str, Finding] = {}
        """By rule, for each that has spoken in this attempt."""
        self._was_healthy = False
        self._open: dict[LogPattern, _Open] = {}
        self._settling: dict[str, tuple[LogRule, _Open]] = {}
        self._recent: bytearray | None = bytearray() if any(rule.settle_s for rule, _ in self._patterns) else None

    def feed(self, data: bytes) -> None:
        """Keep `data` for the next look, or its two ends."""
        if self._room > 0:
            self._head.append(data[: self._room])
            data = data[self._room :]
            self._room -= len(self._head[-1])
        if data:
            self._rest += data[-REST:]
            if len(self._rest) > 2 * REST:
                del self._rest[:-REST]

    def take(self) -> list[bytes]:
        """What was kept since the last call: one run of bytes, or two with a gap between."""
        if not self._head:
            return []
        head, rest = b"".join(self._head), bytes(self._rest[-REST:])
        whole = len(self._rest) <= REST
        self._head, self._room, self._rest = [], HEAD, bytearray()
        return [head + rest] if whole else [head, rest]

    def scan(
        self, pieces: list[bytes], now: float, starting: Collection[Role] = (), work: Work = UNKNOWN
    ) -> list[Diagnosis]:
        """Diagnoses, and ends of diagnoses, from `pieces` and from what was seen before.

        Args:
            now: seconds of any one clock.
            starting: roles of which a component is starting; who waits for them is right to wait.
            work: what is known of the component's health and work.
        """
        said: list[Diagnosis] = []
        for piece in pieces[:-1]:  # a gap follows, so nothing that comes completes its last line
            said += self._look(self._carry + piece, now)
            self._carry = b""
        if pieces:
            text = self._carry + pieces[-1]
            cut = text.rfind(b"\n") + 1
            if len(text) - cut > LONGEST_LINE:
                cut = len(text)
            said += self._look(text[:cut], now)
            self._carry = text[cut:]
        said += self._settled(now) + self._impatient(now, starting) + self._ended(now, work)
        self._was_healthy = work.healthy
        return said

    def close(self, now: float) -> list[Diagnosis]:
        """The attempt is over: its last line may lack its newline, and it waits for nothing any more."""
        text, self._carry = self._carry, b""
        said = self._look(text, now)
        self._open.clear()
        return said + self._settled(float("inf"))

    def _look(self, text: bytes, now: float) -> list[Diagnosis]:
        said: list[Diagnosis] = []
        if self._recent is not None:
            self._recent += text
            del self._recent[:-RECENT]
        for rule, pattern in self._patterns:
            if len(text) > MUCH:
                time.sleep(0)
            if pattern.patience_s > 0:
                said += self._wait(rule, pattern, text, now)
            elif (found := self._find(pattern, text, 0, self._most(rule))) is not None:
                if rule.settle_s:
                    self._settling.setdefault(rule.name, (rule, _Open(now, found)))
                else:
                    said += self._say(rule, found, now)
        self.errors += text.count(b"ERROR")
        for name, needle in self._counted.items():
            self.counts[name] += text.count(needle)
        if (wanted := NOTED.get(self.spec.role)) is not None:
            self.noted = [*self.noted, *_lines_with(text, wanted, 0, LINES)][-LINES:]
        return said

    def _wait(self, rule: LogRule, pattern: LogPattern, text: bytes, now: float) -> list[Diagnosis]:
        said: list[Diagnosis] = []
        cleared = max((text.rfind(end) for end in pattern.ends), default=-1)
        if cleared >= 0:
            self._open.pop(pattern, None)
            if (finding := self._findings.get(rule.name)) is not None:
                said = finding.closed(next(_lines_with(text, pattern.ending(text, cleared), cleared, 1)))
        if pattern not in self._open and (found := self._find(pattern, text, cleared + 1, LINES)) is not None:
            self._open[pattern] = _Open(now, found)
        return said

    def _ended(self, now: float, work: Work) -> list[Diagnosis]:
        """Ends of diagnoses whose lines came no more while the component came up, or has worked since."""
        said: list[Diagnosis] = []
        if not work.healthy:
            return said
        for rule in {rule.name: rule for rule, _ in self._patterns if rule.name in self._findings}.values():
            finding = self._findings[rule.name]
            if rule.ends is not Ends.WORK or finding.open is None:
                continue
            waits = any(pattern.ends for pattern in rule.patterns)
            quiet = finding.is_gone(now, WORK_S if rule.quiet_s is None else rule.quiet_s)
            if not self._was_healthy and now > finding.seen_at:
                said += finding.closed(f"{self.spec.name} became healthy")
            elif quiet and work.since(finding.seen_at, counted=waits):
                said += finding.closed(
                    f"{self.spec.name} works, and has not printed it for {now - finding.seen_at:.0f} s"
                )
        return said

    def _find(self, pattern: LogPattern, text: bytes, begin: int, most: int) -> LogMatch | None:
        """The first line of `text` from `begin` on that is such a pattern, of at most `most` that hold its anchor."""
        for line in _lines_with(text, pattern.needle, begin, most):
            if (match := pattern.match(line)) is not None:
                return LogMatch(self.spec, self.names, line, tuple(group or "" for group in match.groups()))
        return None

    def _most(self, rule: LogRule) -> int:
        finding = self._findings.get(rule.name)
        return 1 if finding is not None and finding.open is not None else LINES

    def _settled(self, now: float) -> list[Diagnosis]:
        """What is to be said of patterns after which the program has told all that it had to tell."""
        said: list[Diagnosis] = []
        for name, (rule, seen) in list(self._settling.items()):
            if now - seen.since >= rule.settle_s:
                del self._settling[name]
                around = tuple(bytes(self._recent or b"").decode(errors="replace").splitlines())
                said += self._say(rule, replace(seen.match, around=around), seen.since)
        return said

    def _impatient(self, now: float, starting: Collection[Role]) -> list[Diagnosis]:
        said: list[Diagnosis] = []
        for rule, pattern in self._patterns:
            waited = self._open.get(pattern)
            if waited is None:
                continue
            if any(role in starting for role in pattern.waits_for):
                waited.since = now
            elif now - waited.since >= pattern.patience_s:
                del self._open[pattern]
                said += self._say(rule, waited.match, now)
        return said

    def _say(self, rule: LogRule, found: LogMatch, now: float) -> list[Diagnosis]:
        if any(self._findings[name].open for name in rule.unless if name in self._findings):
            return []
        return self._findings.setdefault(rule.name, Finding()).raised(now, lambda: rule.explain(found))


def _lines_with(text: bytes, needle: bytes, begin: int, most: int) -> Iterator[str]:
    """At most `most` lines of `text` from `begin` on that hold `needle`. A carriage return ends a line, too."""
    position = text.find(needle, begin)
    while position >= 0 and most > 0:
        first, last = max(0, position - LONGEST_LINE // 2), position + LONGEST_LINE // 2
        start = max(text.rfind(b"\n", first, position), text.rfind(b"\r", first, position), first - 1) + 1
        ends = (text.find(b"\n", position, last), text.find(b"\r", position, last))
        end = min((end for end in ends if end >= 0), default=min(last, len(text)))
        yield plain(text[start:end])
        position = text.find(needle, end)
        most -= 1


class _Track:
    """One rule over one series: its window, its finding, and how many records without evidence came last."""

    def __init__(self, rule: MetricRule) -> None:
        self.rule = rule
        self.records: deque[Record] = deque(maxlen=rule.window)
        self.finding = Finding()
        self._good = 0

    def put(self, record: Record) -> list[Diagnosis]:
        self.records.append(record)
        evidence = self.rule.judge(list(self.records))
        if evidence is not None:
            self._good = 0
            rule = self.rule
            return self.finding.raised(record.time, lambda: rule.diagnosis(shortened(evidence), rule.fix))
        self._good += 1
        if self._good < self.rule.good * min(self.finding.slower, SLOWEST):
            return []
        step = getattr(record, "step", 0)
        return self.finding.closed(f"{self._good} records without it" + (f", up to step {step}" if step else ""))


class MetricWatch:
    """Rules over the trainer's records: each opens one diagnosis while its trouble lasts, in each attempt."""

    def __init__(self, since: float, rules: Sequence[MetricRule] = METRIC_RULES) -> None:
        """`since`: Unix seconds; older records (of a run that is resumed) are known, but not spoken of."""
        self._rules = rules
        self.attempt = 0
        self.step = 0
        """Newest optimizer step, 0 before the first."""
        self.step_at: float | None = None
        """When it was written."""
        self._since = since
        self._pace: deque[float] = deque(maxlen=PACE_STEPS)
        self._tracks: dict[Hashable, _Track] = {}

    @property
    def pace_s(self) -> float:
        """Seconds between the newest steps, the longest of them; 0 where there is none."""
        return max(self._pace, default=0.0)

    def feed(self, record: Record) -> list[Diagnosis]:
        """Diagnoses, and ends of diagnoses, now that `record` has come."""
        if isinstance(record, TrainerRecord):
            return self._feed_trainer(record)
        if isinstance(record, EvalRecord):
            return self._judge(record, (record.env, record.split))
        return []

    def _feed_trainer(self, record: TrainerRecord) -> list[Diagnosis]:
        if record.rank != 0 or record.attempt < self.attempt:
            return []  # a late line of an attempt that is over
        if record.attempt > self.attempt and isinstance(record, OF_EACH_STEP):
            self._begin_attempt(record)
        if isinstance(record, StepRecord):
            self.step, self.step_at = record.step, record.time
        elif isinstance(record, TimingRecord):
            self._pace.append(record.step_s)
        return self._judge(record, None)

    def _begin_attempt(self, record: TrainerRecord) -> None:
        """From a later attempt's first step on, what earlier ones did does not count; every rule may speak again."""
        self.attempt = record.attempt
        for track in self._tracks.values():
            kept = [old for old in track.records if not isinstance(old, TrainerRecord) or old.step < record.step]
            track.records = deque(kept, maxlen=track.rule.window)
            track.finding = Finding()

    def is_open(self, rule: str) -> bool:
        """Whether the numbers say now what `rule` is about."""
        return any(track.rule.name == rule and track.finding.open for track in self._tracks.values())

    def _judge(self, record: Record, series: Hashable) -> list[Diagnosis]:
        said: list[Diagnosis] = []
        for rule in self._rules:
            if isinstance(record, rule.kinds):
                key = (rule.name, rule.title, rule.kinds, series)
                found = self._tracks.setdefault(key, _Track(rule)).put(record)
                if record.time >= self._since:
                    said += found
        return said


@dataclass(frozen=True)
class Printed:
    """What the present attempt of a component printed since the last look."""

    scanner: LogScanner
    pieces: list[bytes]
    over: bool
    """It prints no more."""
    asked_to_go: bool
    """It was stopped or killed on purpose: what it cries out while it dies is no trouble."""


class Watched(Protocol):
    """What the watcher needs of a component."""

    def observe(self) -> tuple[Part, Printed | None]:
        """What is seen of it now, and what it printed since the last call; None before its first attempt."""

    def diagnose(self, found: Diagnosis, attempt: int | None = None) -> None:
        """Publish what is known about a failure."""

    def reach(self, stage: str, attempt: int) -> None:
        """Note that `attempt` has reached a stage that its log does not tell of."""


class Watcher:
    """Runs every rule that speaks while the run goes. `look` belongs to the event loop; one at a time."""

    def __init__(self, stack: StackSpec, components: Mapping[str, Watched]) -> None:
        self._stack, self._components = stack, components
        self._run = RunDir(Path(stack.run_dir))
        self._names = Names.of(stack)
        self._metrics = MetricWatch(time.time(), (*METRIC_RULES, *alert_rules(stack.alerts)))
        self._tails: dict[Path, RecordTail] = {}
        self._looking = asyncio.Lock()
        self._findings: dict[tuple[str, str, str, int], Finding] = {}
        """By rule, component, title (another title is another cause) and, where each opens its own, attempt."""
        self._work_done: dict[str, deque[float]] = {}
        """Times of the newest accepted groups by environment, and of the newest steps under an empty name, on the
        monotonic clock."""
        self._sent: dict[str, int] = {}
        """Groups of each environment that counts them."""
        self._fault: Diagnosis | None = None
        self._counts: Counter[str] = Counter()
        self._since_step: Counter[str] = Counter()
        self._refusals = RefusalWatch(stack)
        self._flows = FlowWatch(stack)
        self.flows: Mapping[str, Flow] = {}
        """What was seen of each environment at the last look."""
        api = next((spec for spec in stack.components if spec.role is Role.API and spec.port), None)
        self._api_url = api.url if api else ""
        self._api_attempt = 0
        self._api: ApiView | None = None
        self._asked_at = self._disk_at = self._listed_at = float("-inf")
        self._ahead: dict[float, float] = {}
        """Moments that a clock which was set back has yet to reach -> when that was seen."""
        self._disk: tuple[int, int] | tuple[None, None] = (None, None)

    async def watch(self) -> None:
        """Look again and again, until cancelled. A fault in here is told, and never ends the run."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                # Shielded: what a look has read is not read again, so its end must come even when we are cancelled.
                await asyncio.shield(asyncio.ensure_future(self.look()))
                if self._fault is not None:
                    self._tell_of_fault(self._fault.ended("it works again"))
                    self._fault = None
            except Exception as error:
                fix = "the run goes on, its diagnoses may be missing; please report it with the run's supervisor.jsonl"
                self._fault = WATCHER_FAULT.diagnosis(repr(error), fix)
                self._tell_of_fault(self._fault)

    def _tell_of_fault(self, found: Diagnosis) -> None:
        next(iter(self._components.values())).diagnose(found, 0)

    async def look(self) -> None:
        """One look at everything; what is found is told."""
        async with self._looking:
            seen = [component.observe() for component in self._components.values()]
            attempts = {part.name: part.attempt for part, _ in seen}
            for name, found in await asyncio.to_thread(self._work, time.time(), seen):
                self._components[name].diagnose(found, attempts[name])
            for part, _ in seen:
                if part.role is Role.ENV and self._flows.is_registered(part):
                    self._components[part.name].reach(REGISTERED, part.attempt)

    # In the thread.

    def _work(self, now: float, seen: list[tuple[Part, Printed | None]]) -> list[tuple[str, Diagnosis]]:
        clock = time.monotonic()  # what a scanner waits for has nothing to do with the time of day
        run = RunSnapshot(now, tuple(self._placed(part, now) for part, _ in seen), self._names)
        starting = starting_roles(run)
        said = [(run.trainer, found) for found in self._read_records(clock)]
        for part, printed in seen:
            if printed is not None:
                scanner = printed.scanner
                found_here = scanner.scan(printed.pieces, clock, starting, self._work_of(part))
                found_here += scanner.close(clock) if printed.over else []
                said += [(part.name, found) for found in found_here if self._is_told(part, printed, found)]
                self._count(part, scanner, now)
        self._look_for_registrations(run.parts, now)
        run = self._completed(run)
        rules: tuple[StallRule | FlowRule, ...] = (*STALL_RULES, *FLOW_RULES)
        for rule in rules:
            stalls = rule.look(run)
            for part in run.parts:
                said += self._speak(rule, part, stalls.get(part.name), run, clock)
        return said

    def _is_told(self, part: Part, printed: Printed, found: Diagnosis) -> bool:
        """Whether a finding in a log is news: not while the component is stopped on purpose, nor where the trainer's
        numbers say the same."""
        if printed.asked_to_go:
            return False
        return found.over or part.role is not Role.TRAINER or not self._metrics.is_open(found.rule)

    def _work_of(self, part: Part) -> Work:
        """Health and newest work of a component, for the ends of what its log told."""
        steps: Sequence[float] | None = None
        if part.role in (Role.TRAINER, Role.ENV):
            steps = self._work_done.get(part.name, self._work_done.get("", ()))
        return Work(part.state is State.HEALTHY, steps)

    def _works(self, name: str, count: int, clock: float) -> None:
        """`count` more steps (of the trainer, whose name here is empty) or accepted groups (of environment `name`)."""
        self._work_done.setdefault(name, deque(maxlen=NORMAL)).extend([clock] * min(count, NORMAL))
        for env in [name] if name else set(self._flows.environments) - set(self._sent):
            self._refusals.accepted(env, count)

    def _past(self, at: float, now: float) -> float:
        """`at`, unless it lies ahead: the clock was set back since, and it counts from when that was seen."""
        return self._ahead.setdefault(at, now) if at > now else self._ahead.get(at, at)

    def _placed(self, part: Part, now: float) -> Part:
        return replace(part, since=self._past(part.since, now), started_at=self._past(part.started_at, now))

    def _read_records(self, clock: float) -> list[Diagnosis]:
        said: list[Diagnosis] = []
        step = self._metrics.step_at
        steps = 0
        for path in (self._run.telemetry_jsonl, *sorted(self._run.root.glob("eval.*.jsonl"))):
            tail = self._tails.setdefault(path, RecordTail(path))
            for record in tail.rest():
                said += self._metrics.feed(record)
                steps += isinstance(record, StepRecord) and record.rank == 0
                if isinstance(record, EnvCountsRecord):
                    self._flows.count(record)
                    before, self._sent[record.env] = self._sent.get(record.env, 0), record.sent
                    self._works(record.env, record.sent - before if record.sent >= before else record.sent, clock)
                elif isinstance(record, TimingRecord) and record.rank == 0:
                    self._flows.step(record)
        if steps:
            self._works("", steps, clock)
        if self._metrics.step_at != step:
            self._since_step.clear()
        return said

    def _count(self, part: Part, scanner: LogScanner, now: float) -> None:
        counts = scanner.counts
        self._flows.printed(part, counts, now)
        if part.role is Role.ENV:
            self._refusals.hear(part.name, part.attempt, sum(counts[name] for name in HEARD))
        if part.role is Role.ENGINE:
            self._refusals.feed(part.name, part.attempt, scanner.noted, now)
            scanner.noted.clear()
        if part.role is Role.API and part.attempt != self._api_attempt:
            self._api_attempt = part.attempt
            self._counts.clear()  # a new run-api knows nobody
        self._counts.update(counts)
        self._since_step.update(counts)
        counts.clear()

    def _completed(self, bare: RunSnapshot) -> RunSnapshot:
        """`bare` with what is known of steps, logs, the disk and, once nothing trains, run-api."""
        metrics = self._metrics
        live = sum(not part.state.is_resting for part in bare.of(Role.ENV))
        came = sum(self._counts[name] for name in CAME)
        free, size = self._free(bare.now)
        self._flows.ask(bare.parts, bare.now)
        self.flows = flows = {} if starting_roles(bare) else self._flows.view(bare.parts, bare.now)
        refused = self._refusals.judge(bare.parts, bare.now)
        run = replace(
            bare,
            step=metrics.step,
            last_step=self._flows.last_step,
            step_at=None if metrics.step_at is None else self._past(metrics.step_at, bare.now),
            pace_s=metrics.pace_s,
            counts=dict(self._since_step),
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
        elif abs(bare.now - self._asked_at) >= ASK_S:
            self._asked_at = bare.now
            self._api = ask_api(self._api_url) if self._api_url else None
        return replace(run, api=self._api)

    def _look_for_registrations(self, parts: Sequence[Part], now: float) -> None:
        """Ask run-api about environments that have not said themselves that they are registered."""
        missing = [p for p in parts if p.role is Role.ENV and p.state in RUNS and not self._flows.is_registered(p)]
        if not missing or not self._api_url or abs(now - self._listed_at) < LIST_S:
            return
        self._listed_at = now
        for name, at in registrations(self._api_url):
            for part in missing:
                spec = next(spec for spec in self._stack.components if spec.name == part.name)
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

    def _speak(
        self, rule: StallRule | FlowRule, part: Part, found: Diagnosis | None, run: RunSnapshot, clock: float
    ) -> list[tuple[str, Diagnosis]]:
        """The diagnosis `found` if it is new, and the ends of those that it replaces or that no longer hold."""
        said: list[Diagnosis] = []
        cause = found.title if found else "", part.attempt if rule.each_attempt else 0
        for key, finding in self._findings.items():
            if key[:2] != (rule.name, part.name) or finding.open is None:
                continue
            if found is not None:
                said += finding.closed(f"now: {found.title}") if key[2:] != cause else []
            elif not rule.refuted(run, part):
                finding.seen_at = clock
            elif finding.is_gone(clock, GONE_S):
                said += finding.closed(rule.end)
        if found is not None:
            finding = self._findings.setdefault((rule.name, part.name, *cause), Finding())
            said += finding.raised(clock, lambda: rule.stamp(found))
        return [(part.name, each) for each in said]


def registrations(url: str) -> list[tuple[str, float]]:
    """Name and moment (Unix seconds) of each environment at the run-api at `url`; nothing where it does not tell."""
    try:
        with asking(url, ANSWER_S) as http:
            answer = json.loads(fetch(http, "/envs"))
        return [(str(env["name"]), float(env["registered_at"])) for env in answer["envs"] if env["connected"]]
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return []


def _newest_group(http: httpx.Client) -> int:
    """Sequences of the group that came last; 0 where run-api does not give it, such as one with a NaN."""
    try:
        return len(json.loads(fetch(http, "/latest_example")).get("tokens") or [])
    except (httpx.HTTPError, ValueError, AttributeError, TypeError):
        return 0


def ask_api(url: str) -> ApiView:
    """What the run-api at `url` says of itself; its newest group only when groups wait, since it may be large."""
    try:
        with asking(url, ANSWER_S) as http:
            status, info = (json.loads(fetch(http, path)) for path in ("/status", "/info"))
            queue = int(status.get("queue_size") or 0)
            group = _newest_group(http) if queue else 0
            return ApiView(int(info.get("batch_size", -1)), queue, group, int(status.get("current_step") or 0))
    except (httpx.HTTPError, ValueError, AttributeError, TypeError) as error:
        words = str(error).partition("\n")[0] or type(error).__name__  # httpx adds where to read of a status
        return ApiView(problem=f"{url}: {words}")
