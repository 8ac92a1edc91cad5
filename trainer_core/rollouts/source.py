"""Fetch the trainer's next batch, measure its policy lag, leave out what must not train."""

from __future__ import annotations

import inspect
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from atropos_common.protocol.bridge import MOST_DIGESTS, VersionSpan
from atropos_common.protocol.records import TOO_OLD
from atropos_common.protocol.stages import FIRST_BATCH, reach
from atropos_common.protocol.trainer_records import MISSING, AlignmentRecord
from trainer_core.config import TrainingConfig
from trainer_core.errors import (
    ApiError,
    EngineError,
    EngineGone,
    MissingLogprobs,
    RolloutsEnd,
    TooMuchLeftOut,
    UsageError,
)
from trainer_core.rollouts.asking import MissingAsker, RoutingAsker
from trainer_core.rollouts.batch import (
    ASKED,
    RECOMPUTED,
    UNNAMED,
    Baselines,
    Batch,
    Rollout,
    Selection,
    read_batch,
)
from trainer_core.rollouts.client import Background, RawBatch, RolloutSource, RunApi
from trainer_core.rollouts.fields import NOT_READ, WHY_UNUSED
from trainer_core.telemetry import Telemetry

REPEAT_S = 60.0
"""Seconds between warnings with the same text."""
MANY_EMPTY = 10
"""Consecutive batches with nothing to train on before a warning gives reasons."""

LEFT_OUT_WINDOW = 20
"""Window of `max_left_out`, in batches."""
MOST_NAMED = 50
"""Limit of ignored fields that are printed."""

MOST_USELESS = 100
"""Limit of consecutive batches from an `OwnSource` that are malformed throughout."""
SHAPE = 'a batch is a list of groups, or {"batch": [GROUP, ...]}'

LOST_IN_API = "lost in run-api, which could not send their batch (HTTP 500)"
UNSENDABLE_WHY = (
    "one of its groups has NaN or Infinity, which JSON does not allow; the others are lost with it"
)
EMPTY_WHY = "a batch without groups"
UNKNOWN_AGE = "rollouts are of unknown age, so --max-policy-lag does not apply to them"

ENOUGH_REPLAYED = 0.9
LITTLE_REPLAYED = "batches in which little routing is replayed"
NOT_REPLAYED = (
    "{share:.0%} of the tokens of this one. For the others the routers choose, because no server "
    "has their experts: it was restarted, its memory for experts is full, or an environment sends "
    "other tokens than the server read"
)


class Lag(NamedTuple):
    """Policy lag of a rollout, in weight versions."""

    oldest: int
    """Lag of its oldest token; negative if it has tokens of weights newer than the policy's."""
    tokens: int = 0
    """Tokens in `mean`."""
    mean: float = 0.0
    spans: tuple[VersionSpan | None, ...] = ()
    """Weight versions of each turn; None: unknown."""


Lags = list[Lag | None]
"""One per rollout; None: unknown."""
Versions = Callable[[list[str]], list[VersionSpan | None]]


class LagMeter:
    def __init__(self, servers: Sequence[Versions]) -> None:
        self._servers = list(servers)

    def measure(self, rollouts: list[Rollout], version: int) -> Lags:
        """Return each rollout's lag behind `version`, the policy's."""
        versions = iter(self._ask([digest for r in rollouts for digest in r.digests]))
        lags: Lags = []
        for rollout in rollouts:
            every = tuple(next(versions) for _ in rollout.digests)
            spans = [span for span in every if span is not None]
            seen = [each for span in spans for each in (span.oldest, span.newest)]
            seen += [] if rollout.oldest_version is None else [rollout.oldest_version]
            tokens = sum(span.tokens for span in spans)
            # Every token has the same weight, in whichever turn.
            late = sum(span.tokens * (version - span.mean) for span in spans)
            mean = late / tokens if tokens else 0.0
            if not seen:
                lags.append(None)
                continue
            # The oldest token counts, unless some are of a version that a restart has discarded.
            of = max(seen) if max(seen) > version else min(seen)
            lags.append(Lag(version - of, tokens, mean, every))
        return lags

    def bounds(self, derived: dict[str, int]) -> dict[str, int]:
        """Return each environment's lag bound if the settings have none."""
        return derived

    def _ask(self, digests: list[str]) -> list[VersionSpan | None]:
        known: list[VersionSpan | None] = [None] * len(digests)
        parts = [digests[at : at + MOST_DIGESTS] for at in range(0, len(digests), MOST_DIGESTS)]
        for ask in list(self._servers):
            try:
                answer = [span for part in parts for span in ask(part)]
            except EngineGone as error:
                print(f"Policy lag of this batch is unknown: {error}")
            except EngineError as error:  # the server does not support the request
                print(f"Policy lag is unknown from now on: {error}")
                self._servers.remove(ask)
            else:
                # Only the server that made a completion knows it.
                known = [old or new for old, new in zip(known, answer, strict=True)]
        return known


class RateLimitedWarnings:
    """Warnings printed at once, then every `REPEAT_S` with the count since."""

    def __init__(self) -> None:
        self._unprinted: Counter[str] = Counter()
        self._printed_at: dict[str, float] = {}

    def count(self, what: str, count: int, why: str = "") -> None:
        """Count a warning that reads "`count` `what`; `why`"."""
        self._unprinted[what] += count
        now = time.monotonic()
        if now - self._printed_at.get(what, -REPEAT_S) >= REPEAT_S:
            self._printed_at[what] = now
            print(f"[WARNING] {self._unprinted.pop(what)} {what}{f'; {why}' if why else ''}")


class EmptyBatches:
    """Consecutive batches with nothing to train on."""

    def __init__(self) -> None:
        self.held = Batch([])
        """Sum of their counts."""
        self._batches = 0
        self.useless = 0
        """Consecutive batches that are empty or malformed throughout."""
        self._began = self._printed_at = 0.0

    def add(self, batch: Batch) -> None:
        """Warn at the first batch, and with reasons after `MANY_EMPTY`."""
        now = time.monotonic()
        self.held.absorb(batch)
        self._batches += 1
        self.useless = 0 if batch.unselected_scores else self.useless + 1
        if self._batches == 1:
            self._began, self._printed_at = now, now - REPEAT_S
            print("[WARNING] nothing to train on in this batch; taking the next one")
        elif self._batches >= MANY_EMPTY and now - self._printed_at >= REPEAT_S:
            self._printed_at = now
            reasons = Counter(self.held.left_out)
            reason, count = reasons.most_common(1)[0] if reasons else ("they are empty", 0)
            print(
                f"[WARNING] nothing to train on in the last {self._batches} batches "
                f"({now - self._began:.0f} s): {count} sequences left out: {reason}. Training "
                "continues with the first usable batch. fix: correct or stop the environment that "
                "sends them, or change the setting that the reason names"
            )


class LeftOutShare:
    """Share of sequences that could not train, in the last `LEFT_OUT_WINDOW` batches."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._batches: deque[tuple[int, int, Counter[str]]] = deque(maxlen=LEFT_OUT_WINDOW)

    def add(self, batch: Batch) -> None:
        """Add a batch before its lag check.

        Raises:
            TooMuchLeftOut: the share exceeds `most`.
        """
        good = len(batch.rollouts) + len(batch.unselected_scores)
        # `left_out` also counts sequences that the objective did not select; they are not faulty.
        bad = sum(batch.left_out.values()) - len(batch.unselected_scores)
        faults = Counter({why: n for why, n in batch.left_out.items() if batch.examples[why]})
        self._batches.append((bad, good + bad, faults))
        left_out = sum(bad for bad, _, _ in self._batches)
        total = sum(count for _, count, _ in self._batches)
        if len(self._batches) < LEFT_OUT_WINDOW or left_out <= self._most * total:
            return
        counts = sum((faults for _, _, faults in self._batches), Counter[str]())
        reasons = ", ".join(f"{reason} ({count})" for reason, count in counts.most_common(3))
        example = next(filter(None, batch.examples.values()), "none in the newest batch")
        raise TooMuchLeftOut(
            f"{left_out} of the last {total} sequences cannot train, more than max_left_out = "
            f"{self._most:g}: {reasons}. Example: {example}. fix: correct the environment or "
            "remove it, or raise max_left_out under [trainer]"
        )


@dataclass
class BatchSource:
    config: TrainingConfig
    api: RolloutSource
    telemetry: Telemetry
    selection: Selection
    advantage_std: bool
    """It and `selection` come from the objective."""
    lag_meter: LagMeter
    while_waiting: Callable[[], None]
    """Called before each batch and about once a second until it comes; may raise."""
    missing: MissingAsker = field(default_factory=lambda: MissingAsker([]))
    routing: RoutingAsker | None = None
    """Fetches experts in parallel to training; None: routers choose."""
    record: Callable[[int, int, list[Any], dict[str, int]], None] | None = None
    """Receives step, weight version, groups and lag bounds of each trained batch."""
    baselines: Baselines = field(default_factory=Baselines)
    position: Callable[[], dict[str, Any] | None] = lambda: None
    """Position of the next batch in a rollouts file."""
    _ahead: Background[Batch] | None = None
    _began: bool = False
    _greeted: bool = False
    _warnings: RateLimitedWarnings = field(default_factory=RateLimitedWarnings)
    _named: set[str] = field(default_factory=set)
    _left_out: Batch = field(default_factory=lambda: Batch([]))
    """Counts of batches with nothing to train on."""

    def __post_init__(self) -> None:
        self._share = LeftOutShare(self.config.max_left_out)
        self._seen = self.baselines.state()

    def next_batch(self, step: int, version: int) -> tuple[Batch, Lags]:
        """Return the next batch that has something to train on, and its policy lags.

        Args:
            step: optimizer steps done.
            version: weight version of the policy.

        Raises:
            MissingLogprobs: no sequence has logprobs, from the first batch on.
            TooMuchLeftOut: the limit `max_left_out` is exceeded.
        """
        streak = EmptyBatches()
        while True:
            # Called first, because it raises if no server answers: the batch then stays in run-api
            # for the next attempt.
            self.while_waiting()
            # Prefetching does not change a batch, since run-api returns the oldest groups first.
            # Its lag is measured here, when it trains.
            batch = self._take(step)
            self._share.add(batch)
            self.missing.fill(batch)
            batch.remark(ASKED, batch.logprobs_from["engine"])
            batch.remark(RECOMPUTED, batch.logprobs_from["trainer"])
            measured = self.lag_meter.measure(batch.rollouts, version)
            bounds = self._lag_bounds(batch)
            asked = self.config.max_policy_lag is not None
            # Without a lag bound the age does not matter.
            keep_unknown = self.config.unknown_lag == "keep" or not asked
            lags = leave_out_by_lag(batch, measured, bounds, keep_unknown=keep_unknown)
            if batch.policy_lag_bound is None and bounds.keys() >= batch.groups_by_env.keys():
                batch.policy_lag_bound = max(bounds.values(), default=None)
            batch.remark(UNKNOWN_AGE, lags.count(None) if asked else 0)
            self._print_remarks(batch)
            self._warn_of_routing(batch)
            if isinstance(self.api, RunApi) and self.api.keeps_batches:
                # Prefetch only after the checks of this batch: the request for the next one makes
                # run-api drop it.
                self._ahead = self.api.fetch_ahead(self._read)
            # Set here and not on reading: a prefetched batch changes the running means before it
            # trains.
            self._seen = batch.baselines
            if batch.trained_tokens:
                # The step's record also counts the unusable batches before it.
                batch.absorb(streak.held)
                if self.record is not None:
                    self.record(step + 1, version, batch.raw, bounds)
                    batch.raw = []
                return batch, lags
            for reason, count in batch.left_out.items():
                self._left_out.leave_out(reason, count, batch.examples[reason])
            streak.add(batch)
            if isinstance(self.api, OwnSource) and streak.useless >= MOST_USELESS:
                last = f"the last {streak.useless} batches of {self.api.name}"
                raise TooMuchLeftOut(
                    f"rollouts: {last} have nothing to train on: {self.left_out_in_words()}. "
                    "fix: correct the groups, or end with RolloutsEnd"
                )

    def _lag_bounds(self, batch: Batch) -> dict[str, int]:
        if (most := self.config.max_policy_lag) is not None:
            return dict.fromkeys(batch.groups_by_env, most)
        ahead = ((env, batches) for env, batches in batch.ahead.items() if batches is not None)
        return self.lag_meter.bounds({env: lag_bound(self.config, each) for env, each in ahead})

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, without a prefetched batch."""
        return {"baselines": self._seen, "position": self.position()}

    def left_out_in_words(self) -> str:
        """Reasons and an example from batches with nothing to train on."""
        reasons = Counter(self._left_out.left_out)
        if not reasons:
            return ""
        parts = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
        examples = (self._left_out.examples[reason] for reason, _ in reasons.most_common())
        example = next(filter(None, examples), "")
        text = f"{reasons.total()} of {reasons.total()} sequences were left out: {parts}"
        return f"{text}. Example: {example}" if example else text

    def _take(self, step: int) -> Batch:
        ahead, self._ahead = self._ahead, None
        try:
            if ahead is not None:
                assert isinstance(self.api, RunApi)
                self.api.await_from(step)
                began = time.monotonic()
                try:
                    return ahead.answer(on_idle=self.while_waiting)
                except ApiError:  # the outage began during training: the timeout restarts now
                    if time.monotonic() - began >= self.config.api_timeout:
                        raise
            return self._read(self.api.next_batch(step, on_idle=self.while_waiting))
        except MissingLogprobs as error:
            self.telemetry.write(
                AlignmentRecord,
                step + 1,
                verdict="mismatch",
                cause=f"{MISSING}: {error}",
                cause_kind=MISSING,
            )
            raise

    def _read(self, raw: RawBatch) -> Batch:
        if self.config.dump_last_batch:
            self._dump(raw)
        if not raw:
            # `RunApi.next_batch` returns an empty list for a batch that run-api lost.
            lost, name = Batch([]), getattr(self.api, "name", "")
            why = (f"empty batches of {name}", EMPTY_WHY) if name else (LOST_IN_API, UNSENDABLE_WHY)
            lost.leave_out(why[0], self.config.sequences_per_step, why[1])
            return lost
        batch = read_batch(
            raw,
            seq_len=self.config.seq_len,
            temperature=self.config.temperature,
            advantage_std=self.advantage_std,
            selection=self.selection,
            logprobs_seen=self._greeted,
            recompute=self.config.missing_logprobs == "recompute",
            baselines=self.baselines,
        )
        batch.raw = raw if self.record is not None else []
        if self.routing is not None:
            self.routing.fill(batch)
        return batch

    def _dump(self, raw: RawBatch) -> None:
        target = Path(self.config.save_path)
        try:
            target.mkdir(parents=True, exist_ok=True)
            (target / "temp.json").write_text(json.dumps({"batch": raw}))
        except (OSError, RecursionError) as error:
            self._warnings.count("batches could not be written to temp.json", 1, str(error))

    def _print_remarks(self, batch: Batch) -> None:
        if not self._began:
            self._began = True
            reach(FIRST_BATCH)
        if not self._greeted and batch.sample_len:
            self._greeted = True
            print(f"✓ inference_logprobs found in batch (sample len: {batch.sample_len})")
        if why := batch.logprob_warning:
            what = "batches with inference_logprobs that are not logprobs"
            self._warnings.count(what, 1, why)
        for reason, count in batch.left_out.items():
            self._warnings.count(f"sequences left out: {reason}", count, batch.examples[reason])
        for text, count in batch.remarks.items():
            self._warnings.count(text, count)
        # Once per field and run.
        for name in sorted(batch.unused.keys() - self._named)[: MOST_NAMED - len(self._named)]:
            self._named.add(name)
            why = WHY_UNUSED.get(name, NOT_READ)
            print(f"[NOTE] an environment sends {name}, which is not used: {why}")

    def _warn_of_routing(self, batch: Batch) -> None:
        replayed = batch.routing_replayed
        if batch.rollouts and replayed is not None and replayed < ENOUGH_REPLAYED:
            self._warnings.count(LITTLE_REPLAYED, 1, NOT_REPLAYED.format(share=replayed))


def oldest_lag(lags: Lags) -> int | None:
    """Largest policy lag of a token; None: unknown."""
    return max((lag.oldest for lag in lags if lag is not None), default=None)


def token_mean(lags: Lags) -> float | None:
    """Mean policy lag over all tokens whose version is known."""
    known = [lag for lag in lags if lag is not None and lag.tokens]
    tokens = sum(lag.tokens for lag in known)
    return sum(lag.tokens * lag.mean for lag in known) / tokens if tokens else None


def lag_bound(config: TrainingConfig, ahead: int) -> int:
    """Largest policy lag of an environment that may be `ahead` batches ahead."""
    # A group waits in run-api behind at most `ahead` batches, and as many train while its
    # completions are generated.
    # In single copy each optimizer step of a batch is a version of its own.
    batch = config.minibatches * config.epochs if config.mode == "shared_vllm" else 1
    # Engines may be behind the trainer: by a reload interval, or by a publish under way.
    reloads = config.mode in ("none", "lora_restart")
    behind = config.vllm_restart_interval - 1 if reloads else 0
    return 2 * ahead * batch + behind + config.overlap_publish


def leave_out_by_lag(
    batch: Batch, lags: Lags, bounds: Mapping[str, int], *, keep_unknown: bool = True
) -> Lags:
    """Leave out rollouts older than their bound, or generated by abandoned weights."""

    def reason(rollout: Rollout, lag: Lag | None) -> str | None:
        most = bounds.get(rollout.env or UNNAMED)
        if lag is None:
            kept = keep_unknown or most is None
            return None if kept else f"of unknown age, with --max-policy-lag {most}"
        # Its weights are newer than the policy: the trainer has returned to an older checkpoint.
        if lag.oldest < 0:
            return "generated by weights that a restart discarded"
        if most is None or lag.oldest <= most:
            return None
        batch.too_old, batch.policy_lag_bound = batch.too_old + 1, most
        return f"older than --max-policy-lag {most}"

    why = [reason(rollout, lag) for rollout, lag in zip(batch.rollouts, lags, strict=True)]
    for rollout, text in zip(batch.rollouts, why, strict=True):
        if text is not None:
            batch.leave_out(text, 1, tokens=int(rollout.trained.sum()), kind=TOO_OLD)
    kept = zip(batch.rollouts, why, strict=True)
    batch.rollouts = [rollout for rollout, out in kept if out is None]
    return [lag for lag, out in zip(lags, why, strict=True) if out is None]


class OwnSource:
    """`RolloutSource` over `train`'s argument `rollouts`: an iterable, or an object with
    `next_batch`."""

    def __init__(self, source: Any) -> None:
        """Raises:
        UsageError: `source` is neither.
        """
        self.name = type(source).__name__
        self._source = source
        call = getattr(source, "next_batch", None)
        if isinstance(source, type):
            raise UsageError(f"rollouts: {source.__name__} is a class. fix: pass an instance of it")
        if callable(call):
            self._ask = _fitted(call, self.name)
        elif isinstance(source, Iterable) and not isinstance(source, str | bytes | dict):
            batches = iter(source)
            self._ask = lambda step, on_idle: next(batches)
        else:
            raise UsageError(
                f"rollouts: {self.name} is not a source of batches. fix: pass a file's path, an "
                f"iterable of batches, or an object with next_batch(step, on_idle); {SHAPE}"
            )

    def next_batch(self, step: int, on_idle: Callable[[], None] = lambda: None) -> RawBatch:
        """Raises:
        RolloutsEnd: the source has no more.
        UsageError: it returned something that is not a batch.
        """
        try:
            given = self._ask(step, on_idle)
        except StopIteration:
            raise RolloutsEnd(f"{self.name} has no more rollouts") from None
        batch = given.get("batch") if isinstance(given, dict) else given
        if not isinstance(batch, list | tuple):
            # Raise at once: the batch would count as empty, and the next one would be no better.
            keys = f" with the keys {', '.join(map(str, given))}" if isinstance(given, dict) else ""
            what = f"{self.name} returned {type(given).__name__}{keys} as a batch"
            raise UsageError(f"rollouts: {what}. fix: {SHAPE}")
        return list(batch)

    def close(self) -> None:
        if callable(close := getattr(self._source, "close", None)):
            close()


def _fitted(call: Callable[..., Any], name: str) -> Callable[[int, Callable[[], None]], Any]:
    """Adapt `call` to (step, on_idle): it may take both, only `step`, or none."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # a builtin without a signature
        return lambda step, on_idle: call(step, on_idle=on_idle)
    # Most arguments first: a callable gets all that it accepts.
    ways: list[tuple[tuple[str, ...], Callable[[int, Callable[[], None]], Any]]] = [
        (("step", "on_idle"), lambda step, on_idle: call(step, on_idle=on_idle)),
        (("step",), lambda step, on_idle: call(step)),
        ((), lambda step, on_idle: call()),
    ]
    for names, ask in ways:
        with suppress(TypeError):
            signature.bind(*names[:1], **dict.fromkeys(names[1:]))
            return ask
    raise UsageError(f"rollouts: {name}.next_batch{signature} must take (step, on_idle)")
