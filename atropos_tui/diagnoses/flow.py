"""Measure the rollout path over the newest seconds: environments, idle engines, waits of the
trainer."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median_low
from typing import Any

from atropos_common.protocol.bridge import (
    METRIC_CAPACITY,
    METRIC_IDLE_S,
    METRIC_REQUESTS,
    METRIC_SLOTS,
)
from atropos_common.protocol.control import Role, State
from atropos_common.protocol.records import FLAT, EnvCountsRecord
from atropos_common.protocol.stages import FIRST_BATCH, REGISTERED
from atropos_common.protocol.trainer_records import StepRecord, TimingRecord
from atropos_tui.diagnoses.questions import asking, fetch_page
from atropos_tui.diagnoses.stall_rules import RUNS, Flow, Part, asked_engines
from atropos_tui.profile.spec import StackSpec, is_hosted

WINDOW_S = 12.0
"""Longest window for shares of waiting, in seconds."""
STEPS, STEPS_S = 4, 6.0
"""Steps that are enough for a window, and its shortest length in seconds."""
LEAST_S = 8.0
"""Shortest window, in seconds, from which waiting is concluded."""
SETTLING_S = 5.0
COUNTS_S = 30.0
"""Window for counting groups, in seconds."""
FAULT_STEPS = 5
"""Newest steps in which malformed rollouts are counted."""
SCRAPE_EVERY_S = 1.5
SCRAPE_TIMEOUT_S = 2.0
RUNNING, TOKENS = "vllm:num_requests_running", "vllm:generation_tokens_total"
QUEUED = "vllm:num_requests_waiting"
READ = (METRIC_CAPACITY, METRIC_IDLE_S, METRIC_REQUESTS, METRIC_SLOTS, RUNNING, QUEUED, TOKENS)


BOUNDS = {
    "workers": "busy_workers",
    "waiting_for_slot": "waiting_for_slot",
    "free_slots": "free_slots",
    "awaited": "awaited",
    "in_engine": "in_engine",
}
"""Field of an `env_counts` record -> field of `EnvFlow`."""
NEWEST = {
    "max_workers",
    "queue_slots",
    "group_size",
    "target_sequences",
    "knee_sequences",
    "concurrency",
    "batches_ahead",
}
"""Fields of an `env_counts` record that `EnvFlow` has too."""
BOUNDS_S = 12.0
"""Age limit of averaged records, in seconds."""


@dataclass(frozen=True)
class EngineLook:
    """Counters of one engine at a Unix time."""

    at: float
    figures: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.figures.get(name, 0.0)


def read_figures(text: str, names: Collection[str]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    begins = tuple(names)
    for line in text.splitlines():
        if not line.startswith(begins):
            continue
        name = line.partition("{")[0] if "{" in line else line.partition(" ")[0]
        try:
            value = float(line[line.rfind("}") + 1 :].split()[0 if "{" in line else 1])
        except (ValueError, IndexError):
            continue
        if name in names and 0 <= value < math.inf:
            found.setdefault(name, []).append(value)
    return found


def parse_look(text: str, at: float) -> EngineLook | None:
    """Parse an engine's `/metrics`; None if it does not count idle seconds."""
    found = {name: sum(values) for name, values in read_figures(text, READ).items()}
    return EngineLook(at, found) if METRIC_IDLE_S in found else None


@dataclass
class _Env:
    attempt: int
    engines: tuple[str, ...]
    hosted: bool
    """It runs in our host, and counts its own groups."""
    counts: deque[EnvCountsRecord] = field(default_factory=lambda: deque(maxlen=40))
    registered_at: float | None = None
    asked_before: float | None = None
    """Request count of its engines when this attempt was first seen."""
    asks_since: float | None = None
    """Unix time at which that count first grew."""

    def cap(self, now: float) -> None:
        """Limit its times to `now`: they are later only if the clock was set back."""
        self.registered_at = None if self.registered_at is None else min(self.registered_at, now)
        self.asks_since = None if self.asks_since is None else min(self.asks_since, now)


class FlowWatch:
    """Flow measurements of one run, from one thread. Times are Unix seconds."""

    def __init__(self, stack: StackSpec) -> None:
        self._asks = asked_engines(stack.components)
        self._urls = {
            spec.name: f"{spec.url}/metrics"
            for spec in stack.components
            if spec.role is Role.ENGINE and spec.port
        }
        self._envs: dict[str, _Env] = {}
        self._looks: dict[tuple[str, int], deque[EngineLook]] = {}
        self._timings: deque[TimingRecord] = deque(maxlen=200)
        self._steps: deque[StepRecord] = deque(maxlen=FAULT_STEPS)
        self._has_batch = 0
        self._paused_at = float("-inf")
        """Time at which the trainer last waited for disk space."""
        self._frozen_at = float("-inf")
        """Time at which a process beside the environments was last stopped by a signal."""
        self._asked_at = float("-inf")
        self.environments = [spec.name for spec in stack.components if spec.role is Role.ENV]
        self._hosted = {spec.name for spec in stack.components if is_hosted(spec.command)}
        alone = len(self.environments) == 1 and self.environments[0] not in self._hosted
        self._unhosted = self.environments[0] if alone else ""
        """The only environment, if it does not count its groups."""
        self._seen: Counter[str] = Counter()
        self._http = asking("", SCRAPE_TIMEOUT_S)
        steps = next(
            (
                _flag(spec.command, "--training-steps")
                for spec in stack.components
                if spec.role is Role.TRAINER
            ),
            "",
        )
        self.last_step = int(steps) if steps and steps.isdecimal() else math.inf
        """Last optimizer step of the run."""
        self._workers = {
            spec.name: _flag(spec.command, "--env.max_num_workers") for spec in stack.components
        }

    def count(self, record: EnvCountsRecord) -> None:
        if (env := self._envs.get(record.env)) is not None:
            env.counts.append(record)

    def step(self, record: TimingRecord) -> None:
        self._timings.append(record)

    def trained(self, record: StepRecord) -> None:
        self._steps.append(record)

    def printed(self, part: Part, counts: Counter[str], now: float) -> None:
        if part.role is Role.TRAINER and counts["pauses"]:
            self._paused_at = now
        self._seen["groups"] += counts["groups"]
        self._seen["dropped groups"] += counts["dropped groups"]
        if (counts["groups"] or counts["dropped groups"]) and (
            env := self._envs.get(self._unhosted)
        ) is not None:
            # A stock environment logs flat groups as dropped, and run-api logs each accepted group.
            left_out = {FLAT: self._seen["dropped groups"]} if self._seen["dropped groups"] else {}
            sent = self._seen["groups"]
            env.counts.append(
                EnvCountsRecord(time=now, env=self._unhosted, sent=sent, left_out=left_out)
            )
        if part.role is Role.ENV and counts["stock registrations"]:
            self.registered(part, now)

    def reached(self, part: Part, stage: str, at: float) -> None:
        if part.role is Role.ENV and stage == REGISTERED:
            self.registered(part, at)
        elif part.role is Role.TRAINER and stage == FIRST_BATCH:
            self._has_batch = part.attempt

    def registered(self, part: Part, now: float) -> None:
        env = self._env(part)
        env.registered_at = env.registered_at or now

    def is_registered(self, part: Part) -> bool:
        return self._env(part).registered_at is not None

    def ask(
        self, parts: Sequence[Part], now: float, get: Callable[[str], str | None] | None = None
    ) -> None:
        if (
            abs(now - self._asked_at) < SCRAPE_EVERY_S
        ):  # abs(): a clock that was set back does not stop polling
            return
        self._asked_at = now
        for part in parts:
            if (
                part.role is not Role.ENGINE
                or part.state not in RUNS
                or part.name not in self._urls
            ):
                continue
            url = self._urls[part.name]
            text = get(url) if get else fetch_page(self._http, url)
            look = parse_look(text, now) if text else None
            if look is not None:
                looks = self._looks.setdefault((part.name, part.attempt), deque(maxlen=40))
                if looks and look.at <= looks[-1].at:
                    looks.clear()  # the clock was set back: intervals across that are unknown
                looks.append(look)
        for part in parts:
            if part.role is Role.ENV and part.state in RUNS:
                self._note_requests(self._env(part), parts)

    def view(self, parts: Sequence[Part], now: float) -> dict[str, Flow]:
        """Return the flow of each running environment."""
        trainer = next(
            (part for part in parts if part.role is Role.TRAINER and part.state is State.HEALTHY),
            None,
        )
        flows, span = {}, self._span(trainer, now)
        if any(part.stopped_pid for part in parts if part.role is not Role.ENV):
            self._frozen_at = now  # nobody is to blame for the time in which a process was stopped
        # The clock may have been set back.
        self._paused_at, self._frozen_at = min(self._paused_at, now), min(self._frozen_at, now)
        for part in parts:
            if part.role is Role.ENV and part.state in RUNS:
                env = self._env(part)
                env.cap(now)
                flow = self._counted(part, env, parts, now)
                looks = self._of_engines(env, parts)
                # A start or restart of api, engine or trainer makes everyone wait: measure after
                # it.
                settled = max(
                    (each.since for each in parts if each.role is not Role.ENV), default=now
                )
                begin = max(
                    now - span,
                    settled,
                    self._frozen_at,
                    env.asks_since or now,
                    (env.registered_at or 0.0) + SETTLING_S,
                )
                if trainer is not None and looks and now - begin >= min(span, LEAST_S):
                    flow = _with_engines(flow, looks, begin)
                    flow = replace(flow, waiting=self._waiting(trainer, begin, now))
                flows[part.name] = flow
        return flows

    def _env(self, part: Part) -> _Env:
        env = self._envs.get(part.name)
        if env is None or env.attempt != part.attempt:
            env = self._envs[part.name] = _Env(
                part.attempt, self._asks.get(part.name, ()), part.name in self._hosted
            )
        return env

    def _of_engines(self, env: _Env, parts: Sequence[Part]) -> list[deque[EngineLook]]:
        running = [
            (part.name, part.attempt)
            for part in parts
            if part.name in env.engines and part.state in RUNS
        ]
        return [looks for each in running if (looks := self._looks.get(each))]

    def _note_requests(self, env: _Env, parts: Sequence[Part]) -> None:
        looks = self._of_engines(env, parts)
        if not looks:
            return
        asked = sum(each[-1][METRIC_REQUESTS] for each in looks)
        # A count that falls means a restarted engine: it counts from 0 again.
        if env.asked_before is None or asked < env.asked_before:
            env.asked_before = asked
        elif asked > env.asked_before:
            env.asks_since = env.asks_since or max(each[-1].at for each in looks)

    def _could_ask_s(self, env: _Env, parts: Sequence[Part], now: float) -> float | None:
        healthy = [
            part.since for part in parts if part.name in env.engines and part.state is State.HEALTHY
        ]
        if env.registered_at is None or not healthy:
            return None
        return now - max(env.registered_at, min(healthy))

    def _counted(self, part: Part, env: _Env, parts: Sequence[Part], now: float) -> Flow:
        """Count groups over the newest `COUNTS_S` seconds."""
        own = [record for record in env.counts if record.time >= part.started_at]
        old = next((record for record in reversed(own) if record.time <= now - COUNTS_S), None)
        new = own[-1] if own else None
        # Oldest record with the newest `sent`: groups left out since then are the current streak.
        last = next((record for record in own if new and record.sent == new.sent), None)
        asked = None if env.asks_since is None else max(0.0, now - env.asks_since)
        return Flow(
            engine=" and ".join(env.engines),
            workers=self._workers.get(part.name),
            could_ask_s=self._could_ask_s(env, parts, now),
            hosted=env.hosted,
            requests=(new.requests or 0) if new else 0,
            asked_s=asked,
            watches_engine=env.asked_before is not None,
            counted_s=now - old.time if old else asked or 0.0,
            counts=new is not None or env.hosted,
            sent=(new.sent if new else 0) - (old.sent if old else 0),
            left_out=_grown(new.left_out if new else {}, old.left_out if old else {}),
            **self._malformed(part.name),
            examples=new.examples if new else {},
            evaluation_failures=Counter(new.evaluation_failures if new else {}),
            failures=_grown(new.failures if new else {}, old.failures if old else {}),
            streak=_grown(new.left_out, last.left_out) if new and last else Counter(),
            bounds=_bounds([record for record in own if record.time > now - BOUNDS_S]),
        )

    def _malformed(self, env: str) -> dict[str, Any]:
        counts, example = Counter[str](), ""
        for step in self._steps:
            for name, reasons in step.faults_by_env.items():
                if name == env or len(self.environments) == 1:
                    counts.update(reasons)
                    example = step.fault_examples.get(name, "")
        return {"malformed": counts, "malformed_example": example}

    def _of_trainer(self, trainer: Part) -> list[TimingRecord]:
        return [timing for timing in self._timings if timing.time >= trainer.since]

    def _span(self, trainer: Part | None, now: float) -> float:
        newest = self._of_trainer(trainer)[-STEPS:] if trainer is not None else []
        if len(newest) < STEPS:
            return WINDOW_S
        return min(WINDOW_S, max(STEPS_S, now - (newest[0].time - newest[0].step_s)))

    def _waiting(self, trainer: Part, begin: float, now: float) -> float:
        """Return the share of the time in which the trainer waited for a batch. A step starts with
        its wait."""
        own = self._of_trainer(trainer)
        waits = [(t.time - t.step_s, t.time - t.step_s + t.data_wait_s) for t in own]
        # The current step has no record yet. Count its time since the last step as waiting, except
        # for the usual seconds of work of a step.
        if own and own[-1].step < self.last_step and own[-1].time > self._paused_at:
            busy = median_low([t.step_s - t.data_wait_s for t in own[-5:]])
            waits.append((own[-1].time, now - busy))
        elif not own and self._has_batch != trainer.attempt:
            waits.append((trainer.since, now))
        return sum(max(0.0, min(end, now) - max(start, begin)) for start, end in waits) / (
            now - begin
        )


def _bounds(records: Sequence[EnvCountsRecord]) -> dict[str, Any]:
    """Mean workers and queue slots, and what was newest, as fields of `EnvFlow`."""
    records = [record for record in records if record.workers is not None]
    found: dict[str, Any] = {}
    for name, field_ in BOUNDS.items():
        # An environment that is now alone has no `awaited`: its older values no longer apply.
        if not records or getattr(records[-1], name) is None:
            continue
        known = [float(value) for record in records if (value := getattr(record, name)) is not None]
        found[field_] = sum(known) / len(known)
    newest = records[-1].model_dump(include=NEWEST) if records else {}
    return found | {name: value for name, value in newest.items() if value is not None}


def _flag(command: Sequence[str], name: str) -> str | None:
    return next((value for flag, value in pairwise(command) if flag == name), None)


def _grown(new: dict[str, int], old: dict[str, int]) -> Counter[str]:
    return Counter(new) - Counter(old)


def _with_engines(flow: Flow, looks: Iterable[Iterable[EngineLook]], begin: float) -> Flow:
    each = [
        one for one in (_with_engine(flow, own, begin) for own in looks) if one.seconds is not None
    ]
    if not each:
        return flow
    return replace(
        each[0],
        idle=sum(one.idle for one in each) / len(each),
        tokens_per_s=sum(one.tokens_per_s for one in each),
        running=sum(one.running for one in each),
        queued=sum(one.queued for one in each),
        slots=sum(one.slots for one in each),
        # One engine of unknown capacity makes the sum unknown.
        ceiling=sum(one.ceiling or 0.0 for one in each)
        if all(one.ceiling for one in each)
        else None,
    )


def _with_engine(flow: Flow, looks: Iterable[EngineLook], begin: float) -> Flow:
    # One look before `begin` is allowed, since looks are up to SCRAPE_EVERY_S apart.
    inside = [look for look in looks if look.at >= begin - SCRAPE_EVERY_S]
    if len(inside) < 2:
        return flow
    first, last = inside[0], inside[-1]
    seconds = last.at - first.at
    return replace(
        flow,
        seconds=seconds,
        idle=min(1.0, max(0.0, last[METRIC_IDLE_S] - first[METRIC_IDLE_S]) / seconds),
        tokens_per_s=max(0.0, last[TOKENS] - first[TOKENS]) / seconds,
        running=sum(look[RUNNING] for look in inside) / len(inside),
        queued=sum(look[QUEUED] for look in inside) / len(inside),
        slots=last[METRIC_SLOTS],
        ceiling=last[METRIC_CAPACITY] or None,
    )
