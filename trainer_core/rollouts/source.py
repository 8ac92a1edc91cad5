"""The trainer's next batch: fetch it, measure the policy lag of its rollouts, and leave out what
must not train.

If run-api keeps a batch until it trains (`RunApi.keeps_batches`), a thread fetches and reads the
next one during training. It is the same batch as without prefetching: run-api returns the oldest
groups first, and environments still count it as queued. So no rollout gets older. Its lag is
measured when it trains.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atropos_common.protocol.bridge import MOST_DIGESTS
from atropos_common.protocol.records import MISSING, AlignmentRecord
from atropos_common.protocol.stages import FIRST_BATCH, reach
from trainer_core.config import TrainingConfig
from trainer_core.errors import ApiError, EngineError, EngineGone, MissingLogprobs, TooMuchLeftOut
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
from trainer_core.rollouts.own import MOST_USELESS, OwnSource
from trainer_core.telemetry import Telemetry

REPEAT_S = 60.0
"""Seconds between two warnings with the same text."""
MANY_EMPTY = 10
"""Consecutive batches with nothing to train on, after which a warning gives the reasons."""

LEFT_OUT_WINDOW = 20
"""Window of `max_left_out` in batches; the limit applies once it is full."""
MOST_NAMED = 50
"""Limit of ignored fields that are printed; an environment may send any number."""

UNSENDABLE = "lost in run-api, which could not send their batch (HTTP 500)"
UNSENDABLE_WHY = (
    "one of its groups has NaN or Infinity, which JSON does not allow; the others are lost with it"
)
UNKNOWN_AGE = "rollouts are of unknown age, so --max-policy-lag does not apply to them"

ENOUGH_REPLAYED = 0.9
LITTLE_REPLAYED = "batches in which little routing is replayed"
NOT_REPLAYED = (
    "{share:.0%} of the tokens of this one. No server knows the experts of the others, so "
    "routers choose for them: "
    "it was restarted, its memory for them is full, or an environment sends other tokens "
    "than the server read"
)

Lags = list[int | None]
"""Policy lag of each rollout in weight versions; None if no server knows the completion."""
Versions = Callable[[list[str]], list[tuple[int, int] | None]]
"""Map completion digests to the oldest and newest weight version of each; None if unknown."""


class LagMeter:
    """Ask the servers for the weight versions of each completion. A server that does not support
    the request is dropped."""

    def __init__(self, servers: Sequence[Versions]) -> None:
        self._servers = list(servers)

    def measure(self, rollouts: list[Rollout], version: int) -> Lags:
        """`version` (the policy's) minus the oldest version of each rollout."""
        versions = iter(self._ask([digest for r in rollouts for digest in r.digests]))
        lags: Lags = []
        for rollout in rollouts:
            oldest = [
                pair[0] for pair in (next(versions) for _ in rollout.digests) if pair is not None
            ]
            oldest += [] if rollout.oldest_version is None else [rollout.oldest_version]
            lags.append(version - min(oldest) if oldest else None)
        return lags

    def bounds(self, derived: dict[str, int]) -> dict[str, int]:
        """Lag bound of each environment if the settings have none; here the `derived` one."""
        return derived

    def _ask(self, digests: list[str]) -> list[tuple[int, int] | None]:
        """Oldest and newest version of each completion; None if no server knows it."""
        known: list[tuple[int, int] | None] = [None] * len(digests)
        for ask in list(self._servers):
            try:
                parts = [
                    ask(digests[at : at + MOST_DIGESTS])
                    for at in range(0, len(digests), MOST_DIGESTS)
                ]
            except EngineGone as error:
                print(f"Policy lag of this batch is unknown: {error}")
            except EngineError as error:
                print(f"Policy lag is unknown from now on: {error}")
                self._servers.remove(ask)
            else:
                answer = [pair for part in parts for pair in part]
                # Each completion is known to the one server that made it.
                known = [old or new for old, new in zip(known, answer, strict=True)]
        return known


class RateLimitedWarnings:
    """Print a new warning at once, and repeat it every `REPEAT_S` with the count since."""

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
        """Consecutive batches that are empty or have only malformed groups."""
        self._began = self._printed_at = 0.0

    def add(self, batch: Batch) -> None:
        """Add a batch; warn at the first one, and with reasons after `MANY_EMPTY`."""
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
                f"({now - self._began:.0f} s): "
                f"{count} sequences left out: {reason}. Training continues with the first "
                f"usable batch. fix: correct "
                "or stop the environment that sends them, or change the setting that the "
                "reason names"
            )


class LeftOutShare:
    """Share of the last `LEFT_OUT_WINDOW` batches' sequences that could not train. Good sequences
    left out by the objective or the lag bound do not count."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._batches: deque[tuple[int, int, Counter[str]]] = deque(maxlen=LEFT_OUT_WINDOW)

    def add(self, batch: Batch) -> None:
        """Add a batch as read, before the lag check.

        Raises:
            TooMuchLeftOut: the share exceeds `most`.
        """
        good = len(batch.rollouts) + len(batch.unselected_scores)
        # An objective's own choice is counted in both.
        bad = sum(batch.left_out.values()) - len(batch.unselected_scores)
        faults = Counter(
            {reason: count for reason, count in batch.left_out.items() if batch.examples[reason]}
        )
        self._batches.append((bad, good + bad, faults))
        left_out, total = (
            sum(bad for bad, _, _ in self._batches),
            sum(count for _, count, _ in self._batches),
        )
        if len(self._batches) < LEFT_OUT_WINDOW or left_out <= self._most * total:
            return
        counts = sum((faults for _, _, faults in self._batches), Counter[str]())
        reasons = ", ".join(f"{reason} ({count})" for reason, count in counts.most_common(3))
        example = next(filter(None, batch.examples.values()), "none in the newest batch")
        raise TooMuchLeftOut(
            f"{left_out} of the last {total} sequences cannot train, more than max_left_out "
            f"= {self._most:g}: "
            f"{reasons}. Example: {example}. fix: correct the environment or remove it, "
            "or raise max_left_out under [trainer]"
        )


@dataclass
class BatchSource:
    """Batches for one policy."""

    config: TrainingConfig
    api: RolloutSource
    telemetry: Telemetry
    selection: Selection
    advantage_std: bool
    """Both are set by the objective."""
    lag_meter: LagMeter
    while_waiting: Callable[[], None]
    """Called before a batch is taken and about once a second until it comes; may raise."""
    missing: MissingAsker = field(default_factory=lambda: MissingAsker([]))
    routing: RoutingAsker | None = None
    """Fetches the experts of each batch when it is read, in parallel to training; None: routers
    choose."""
    record: Callable[[int, int, list[Any], dict[str, int]], None] | None = None
    """Receives step, weight version, groups and lag bounds of each batch that trains."""
    baselines: Baselines = field(default_factory=Baselines)
    position: Callable[[], dict[str, Any] | None] = lambda: None
    """Position of the next batch in a rollouts file; None for other sources."""
    _ahead: Background[Batch] | None = None
    """The prefetched batch."""
    _began: bool = False
    """The first batch has arrived."""
    _greeted: bool = False
    _warnings: RateLimitedWarnings = field(default_factory=RateLimitedWarnings)
    _named: set[str] = field(default_factory=set)
    _left_out: Batch = field(default_factory=lambda: Batch([]))
    """Counts of this attempt's batches with nothing to train on."""

    def __post_init__(self) -> None:
        self._share = LeftOutShare(self.config.max_left_out)
        self._seen = self.baselines.state()

    def next_batch(self, step: int, version: int) -> tuple[Batch, Lags]:
        """Return the next batch that has something to train on, and the policy lag of each rollout.

        Args:
            step: optimizer steps done.
            version: weight version of the policy.

        Raises:
            MissingLogprobs: no sequence has logprobs, from the first batch on; a telemetry record
                is written.
            TooMuchLeftOut: the limit `max_left_out` is exceeded.
        """
        streak = EmptyBatches()
        while True:
            # First, because it raises without a server: the batch then stays in run-api for the
            # next attempt.
            self.while_waiting()
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
            batch.remark(UNKNOWN_AGE, lags.count(None) if asked else 0)
            self._print_remarks(batch)
            self._warn_of_routing(batch)
            if isinstance(self.api, RunApi) and self.api.keeps_batches:
                # Start only after this batch is checked: the request for the next one makes run-api
                # drop it.
                self._ahead = self.api.fetch_ahead(self._read)
            # Here rather than on reading: a prefetched batch changes the running means before it
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
                raise TooMuchLeftOut(
                    f"rollouts: the last {streak.useless} batches of {self.api.name} have "
                    f"nothing to train on: "
                    f"{self.left_out_in_words()}. fix: correct the groups, or end with RolloutsEnd"
                )

    def _lag_bounds(self, batch: Batch) -> dict[str, int]:
        """Largest policy lag of each environment's rollouts: `max_policy_lag`, else derived from
        the environment's own bound."""
        if (most := self.config.max_policy_lag) is not None:
            return dict.fromkeys(batch.groups_by_env, most)
        derived = {
            env: lag_bound(self.config, ahead)
            for env, ahead in batch.ahead.items()
            if ahead is not None
        }
        return self.lag_meter.bounds(derived)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint; excludes a prefetched batch."""
        return {"baselines": self._seen, "position": self.position()}

    def left_out_in_words(self) -> str:
        """Reasons and an example of sequences in batches with nothing to train on; empty if there
        were none."""
        reasons = Counter(self._left_out.left_out)
        if not reasons:
            return ""
        parts = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
        example = next(
            filter(None, map(self._left_out.examples.get, dict(reasons.most_common()))), ""
        )
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
                AlignmentRecord, step + 1, verdict="mismatch", cause=f"{MISSING}: {error}"
            )
            raise

    def _read(self, raw: RawBatch) -> Batch:
        if self.config.dump_last_batch:
            self._dump(raw)
        if not raw:
            # `RunApi.next_batch` returns an empty list for a batch that run-api lost.
            lost = Batch([])
            lost.leave_out(UNSENDABLE, self.config.sequences_per_step, UNSENDABLE_WHY)
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
        if batch.logprob_warning:
            self._warnings.count(
                "batches with inference_logprobs that are not logprobs", 1, batch.logprob_warning
            )
        for reason, count in batch.left_out.items():
            self._warnings.count(f"sequences left out: {reason}", count, batch.examples[reason])
        for text, count in batch.remarks.items():
            self._warnings.count(text, count)
        # Once per field and run.
        for name in sorted(batch.unused.keys() - self._named)[: MOST_NAMED - len(self._named)]:
            self._named.add(name)
            print(
                f"[NOTE] an environment sends {name}, which is not used: "
                f"{WHY_UNUSED.get(name, NOT_READ)}"
            )

    def _warn_of_routing(self, batch: Batch) -> None:
        replayed = batch.routing_replayed
        if batch.rollouts and replayed is not None and replayed < ENOUGH_REPLAYED:
            self._warnings.count(LITTLE_REPLAYED, 1, NOT_REPLAYED.format(share=replayed))


def lag_bound(config: TrainingConfig, ahead: int) -> int:
    """Largest policy lag, in weight versions, of an environment that may be `ahead` batches ahead
    of the trainer.

    A group waits in run-api behind at most `ahead` batches. The same number is allowed for batches
    that train while its completions are generated. Older groups are left out.
    """
    # In single copy each optimizer step of a batch is a version of its own.
    batch = config.minibatches * config.epochs if config.mode == "shared_vllm" else 1
    reloads = config.mode in ("none", "lora_restart")  # the engine may be behind the trainer
    # `overlap_publish` is True or False: engines may be one version behind.
    return (
        2 * ahead * batch
        + (config.vllm_restart_interval - 1 if reloads else 0)
        + config.overlap_publish
    )


def leave_out_by_lag(
    batch: Batch, lags: Lags, bounds: Mapping[str, int], *, keep_unknown: bool = True
) -> Lags:
    """Leave out rollouts older than their environment's bound, and rollouts of abandoned weights:
    versions from before a return to a checkpoint, which no update leads to. `keep_unknown` keeps
    rollouts of unknown age."""

    def reason(rollout: Rollout, lag: int | None) -> str | None:
        most = bounds.get(rollout.env or UNNAMED)
        if lag is None:
            return (
                None
                if keep_unknown or most is None
                else f"of unknown age, with --max-policy-lag {most}"
            )
        # Newer than the policy: published before a return to a checkpoint.
        if lag < 0:
            return "generated by weights that a restart gave up"
        if most is None or lag <= most:
            return None
        batch.too_old, batch.policy_lag_bound = batch.too_old + 1, most
        return f"older than --max-policy-lag {most}"

    why = [reason(rollout, lag) for rollout, lag in zip(batch.rollouts, lags, strict=True)]
    for text in filter(None, why):
        batch.leave_out(text, 1)
    batch.rollouts = [
        rollout for rollout, out in zip(batch.rollouts, why, strict=True) if out is None
    ]
    return [lag for lag, out in zip(lags, why, strict=True) if out is None]
