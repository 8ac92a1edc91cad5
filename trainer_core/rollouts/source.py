"""The way in: the next batch of run-api, the policy lag of its rollouts, and what of it is left out.

Where run-api keeps a batch until it trains (`RunApi.keeps_batches`), the next one is fetched and read in a thread while
the present one trains. It is the batch that would have been fetched later, for run-api hands out the oldest groups
first and environments go on counting it: no rollout gets older by that. Its lag is measured when it trains.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atropos_common.bridge import MOST_DIGESTS
from atropos_common.records import MISSING, AlignmentRecord
from atropos_common.stages import FIRST_BATCH, reach
from trainer_core.config import TrainingConfig
from trainer_core.errors import ApiError, EngineError, EngineGone, MissingLogprobs, TooMuchLeftOut
from trainer_core.rollouts.asking import MissingAsker, RoutingAsker
from trainer_core.rollouts.batch import ASKED, RECOMPUTED, UNNAMED, Baselines, Batch, Rollout, Selection, read_batch
from trainer_core.rollouts.client import Background, RawBatch, RolloutSource, RunApi
from trainer_core.rollouts.fields import NOBODY_READS, WHY_UNUSED
from trainer_core.rollouts.own import MOST_USELESS, OwnSource
from trainer_core.telemetry import Telemetry

REPEAT_S = 60.0
"""Between two lines about the same thing."""
MANY_EMPTY = 10
"""So many batches in a row with nothing to train on are worth a word of their own."""

LOOKED_AT = 20
"""Batches over which `max_left_out` is measured: fewer say nothing."""
MOST_NAMED = 50
"""Fields that are named; an environment may invent any number."""

UNSENDABLE = "lost in run-api, which could not send their batch (HTTP 500)"
UNSENDABLE_WHY = "NaN or Infinity in one of its groups, which JSON cannot hold: the others are lost with it"
UNKNOWN_AGE = "rollouts are of unknown age, so that --max-policy-lag does not hold for them"

ENOUGH_REPLAYED = 0.9
LITTLE_REPLAYED = "batches in which little routing is replayed"
NOT_REPLAYED = (
    "{share:.0%} of the tokens of this one. No server knows which experts the others took, so routers choose for them: "
    "it was restarted, had no room for so many, or an environment sends other tokens than it read"
)

Lags = list[int | None]
"""Policy lag of each rollout in weight versions; null where the server does not know the completion."""
Versions = Callable[[list[str]], list[tuple[int, int] | None]]
"""Digests of completions -> oldest and newest weight version of each; null for one not known."""


class LagMeter:
    """Asks the servers which weights wrote each completion: one of them did. Stops asking one that cannot tell."""

    def __init__(self, servers: Sequence[Versions]) -> None:
        self._servers = list(servers)

    def measure(self, rollouts: list[Rollout], version: int) -> Lags:
        """`version` (what the policy holds) minus the oldest version of each rollout."""
        versions = iter(self._ask([digest for r in rollouts for digest in r.digests]))
        lags: Lags = []
        for rollout in rollouts:
            oldest = [pair[0] for pair in (next(versions) for _ in rollout.digests) if pair is not None]
            oldest += [] if rollout.oldest_version is None else [rollout.oldest_version]
            lags.append(version - min(oldest) if oldest else None)
        return lags

    def bounds(self, derived: dict[str, int]) -> dict[str, int]:
        """The lag bound of each environment where the settings have none: the one `derived` from its own."""
        return derived

    def _ask(self, digests: list[str]) -> list[tuple[int, int] | None]:
        """Oldest and newest version of each, by the server that knows it; null where none does."""
        known: list[tuple[int, int] | None] = [None] * len(digests)
        for ask in list(self._servers):
            try:
                parts = [ask(digests[at : at + MOST_DIGESTS]) for at in range(0, len(digests), MOST_DIGESTS)]
            except EngineGone as error:
                print(f"Policy lag of this batch unknown: {error}")
            except EngineError as error:
                print(f"Policy lag unknown: {error}")
                self._servers.remove(ask)
            else:
                answer = [pair for part in parts for pair in part]
                known = [old or new for old, new in zip(known, answer, strict=True)]
        return known


class RateLimitedWarnings:
    """Warns on the console: of something new at once, of the same again every `REPEAT_S`, with the count since."""

    def __init__(self) -> None:
        self._unprinted: Counter[str] = Counter()
        self._printed_at: dict[str, float] = {}

    def count(self, what: str, count: int, why: str = "") -> None:
        """`count` times `what`, which a line ends with after the number; `why` explains it in that line."""
        self._unprinted[what] += count
        now = time.monotonic()
        if now - self._printed_at.get(what, -REPEAT_S) >= REPEAT_S:
            self._printed_at[what] = now
            print(f"[WARNING] {self._unprinted.pop(what)} {what}{f'; {why}' if why else ''}")


class EmptyBatches:
    """Batches in a row in which nothing was left to train on."""

    def __init__(self) -> None:
        self.held = Batch([])
        """What was counted in all of them."""
        self._batches = 0
        self.useless = 0
        """Those in a row whose groups are all malformed, or that are empty."""
        self._began = self._printed_at = 0.0

    def add(self, batch: Batch) -> None:
        """One more; says so at the first, and clearly once there are many."""
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
                f"[WARNING] nothing to train on in the last {self._batches} batches ({now - self._began:.0f} s): "
                f"{count} sequences left out: {reason}. It goes on as soon as one holds something. Way out: mend "
                "or stop the environment that sends them, or change the setting that the reason names"
            )


class LeftOutShare:
    """Which share of the last `LOOKED_AT` batches' sequences had to be left out, not counting what an objective or a
    lag leaves out of good ones."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._batches: deque[tuple[int, int, Counter[str]]] = deque(maxlen=LOOKED_AT)

    def add(self, batch: Batch) -> None:
        """One more, as it was read.

        Raises:
            TooMuchLeftOut: the share is above `most`.
        """
        good = len(batch.rollouts) + len(batch.unselected_scores)
        bad = sum(batch.left_out.values()) - len(batch.unselected_scores)
        mended = Counter({reason: count for reason, count in batch.left_out.items() if batch.examples[reason]})
        self._batches.append((bad, good + bad, mended))
        left_out, total = sum(bad for bad, _, _ in self._batches), sum(count for _, count, _ in self._batches)
        if len(self._batches) < LOOKED_AT or left_out <= self._most * total:
            return
        told = sum((reasons for _, _, reasons in self._batches), Counter[str]())
        reasons = ", ".join(f"{reason} ({count})" for reason, count in told.most_common(3))
        example = next(filter(None, batch.examples.values()), "none in the newest batch")
        raise TooMuchLeftOut(
            f"{left_out} of the last {total} sequences cannot be trained on, more than max_left_out = {self._most:g}: "
            f"{reasons}. An example: {example}. Mend the environment or leave it out, "
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
    """Both are what the objective needs of a batch."""
    lag_meter: LagMeter
    while_waiting: Callable[[], None]
    """Called before a batch is taken and about once a second until it comes; may raise."""
    missing: MissingAsker = field(default_factory=lambda: MissingAsker([]))
    routing: RoutingAsker | None = None
    """Asked for the experts of each batch as it is read, beside the training of another; null: routers choose."""
    record: Callable[[int, int, list[Any], dict[str, int]], None] | None = None
    """Takes the step, the policy's weight version, the groups and the lag bounds of each batch that trains."""
    baselines: Baselines = field(default_factory=Baselines)
    position: Callable[[], dict[str, Any] | None] = lambda: None
    """Place of the next batch in a rollouts file; None where they come from elsewhere."""
    _ahead: Background[Batch] | None = None
    """The batch after the last one, on its way."""
    _began: bool = False
    """The first batch has come."""
    _greeted: bool = False
    _warnings: RateLimitedWarnings = field(default_factory=RateLimitedWarnings)
    _named: set[str] = field(default_factory=set)
    _left_out: Batch = field(default_factory=lambda: Batch([]))
    """The counts of the batches in which this attempt found nothing to train on."""

    def __post_init__(self) -> None:
        self._share = LeftOutShare(self.config.max_left_out)
        self._seen = self.baselines.state()

    def next_batch(self, step: int, version: int) -> tuple[Batch, Lags]:
        """The next batch that holds something to train on, and the policy lag of each of its rollouts.

        Args:
            step: optimizer steps done.
            version: of the weights that the policy holds.

        Raises:
            MissingLogprobs: nothing has logprobs, from the first batch on; a record for the screen is written.
            TooMuchLeftOut: as `max_left_out` says.
        """
        streak = EmptyBatches()
        while True:
            # Without a server a batch stays in run-api, for whoever goes on with a new one.
            self.while_waiting()
            batch = self._take(step)
            self._share.add(batch)
            self.missing.fill(batch)
            batch.remark(ASKED, batch.logprobs_from["engine"])
            batch.remark(RECOMPUTED, batch.logprobs_from["trainer"])
            measured = self.lag_meter.measure(batch.rollouts, version)
            bounds = self._lag_bounds(batch)
            asked = self.config.max_policy_lag is not None
            keep_unknown = self.config.unknown_lag == "keep" or not asked
            lags = leave_out_by_lag(batch, measured, bounds, keep_unknown=keep_unknown)
            batch.remark(UNKNOWN_AGE, lags.count(None) if asked else 0)
            self._print_remarks(batch)
            self._warn_of_routing(batch)
            if isinstance(self.api, RunApi) and self.api.keeps_batches:
                self._ahead = self.api.fetch_ahead(self._read)
            self._seen = batch.baselines
            if batch.trained_tokens:
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
                    f"rollouts: the last {streak.useless} batches of {self.api.name} hold nothing to train on: "
                    f"{self.left_out_in_words()}. fix: correct the groups, or end with RolloutsEnd"
                )

    def _lag_bounds(self, batch: Batch) -> dict[str, int]:
        """The largest policy lag of each environment's rollouts: `max_policy_lag`, else what its own bound gives."""
        if (most := self.config.max_policy_lag) is not None:
            return dict.fromkeys(batch.groups_by_env, most)
        derived = {env: lag_bound(self.config, ahead) for env, ahead in batch.ahead.items() if ahead is not None}
        return self.lag_meter.bounds(derived)

    def state(self) -> dict[str, Any]:
        """The part of a checkpoint that a later attempt continues from; a batch fetched ahead is not in it."""
        return {"baselines": self._seen, "position": self.position()}

    def left_out_in_words(self) -> str:
        """Sequences of batches with nothing to train on, by reason, with an example; "" where there were none."""
        reasons = Counter(self._left_out.left_out)
        if not reasons:
            return ""
        parts = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
        example = next(filter(None, map(self._left_out.examples.get, dict(reasons.most_common()))), "")
        said = f"{reasons.total()} of {reasons.total()} sequences were left out: {parts}"
        return f"{said}. Example: {example}" if example else said

    def _take(self, step: int) -> Batch:
        """The batch that is on its way, or the next of run-api."""
        ahead, self._ahead = self._ahead, None
        try:
            if ahead is not None:
                assert isinstance(self.api, RunApi)
                self.api.await_from(step)
                began = time.monotonic()
                try:
                    return ahead.answer(on_idle=self.while_waiting)
                except ApiError:  # away while nobody waited: patience begins anew
                    if time.monotonic() - began >= self.config.api_timeout:
                        raise
            return self._read(self.api.next_batch(step, on_idle=self.while_waiting))
        except MissingLogprobs as error:
            self.telemetry.write(AlignmentRecord, step + 1, verdict="mismatch", cause=f"{MISSING}: {error}")
            raise

    def _read(self, raw: RawBatch) -> Batch:
        if self.config.dump_last_batch:
            self._dump(raw)
        if not raw:
            lost = Batch([])
            lost.leave_out(UNSENDABLE, self.config.sequences_per_step, UNSENDABLE_WHY)
            return lost
        batch = read_batch(
            raw, seq_len=self.config.seq_len, temperature=self.config.temperature, advantage_std=self.advantage_std,
            selection=self.selection, logprobs_seen=self._greeted,
            recompute=self.config.missing_logprobs == "recompute", baselines=self.baselines,
        )  # fmt: skip
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
            self._warnings.count("batches could not be kept as temp.json", 1, str(error))

    def _print_remarks(self, batch: Batch) -> None:
        """On the console: the first batch with logprobs, and what is odd about any."""
        if not self._began:
            self._began = True
            reach(FIRST_BATCH)
        if not self._greeted and batch.sample_len:
            self._greeted = True
            print(f"✓ inference_logprobs found in batch (sample len: {batch.sample_len})")
        if batch.logprob_warning:
            self._warnings.count("batches whose inference_logprobs are no logprobs", 1, batch.logprob_warning)
        for reason, count in batch.left_out.items():
            self._warnings.count(f"sequences left out: {reason}", count, batch.examples[reason])
        for text, count in batch.remarks.items():
            self._warnings.count(text, count)
        for name in sorted(batch.unused.keys() - self._named)[: MOST_NAMED - len(self._named)]:
            self._named.add(name)
            print(f"[NOTE] an environment sends {name}, which is not used: {WHY_UNUSED.get(name, NOBODY_READS)}")

    def _warn_of_routing(self, batch: Batch) -> None:
        replayed = batch.routing_replayed
        if batch.rollouts and replayed is not None and replayed < ENOUGH_REPLAYED:
            self._warnings.count(LITTLE_REPLAYED, 1, NOT_REPLAYED.format(share=replayed))


def lag_bound(config: TrainingConfig, ahead: int) -> int:
    """Largest policy lag, in weight versions, of an environment that may be `ahead` batches ahead of the trainer.

    A group waits in run-api behind at most `ahead` batches. While its completions are generated others may train: it is
    granted as many batches again for that. Older ones are left out.
    """
    batch = config.minibatches * config.epochs if config.mode == "shared_vllm" else 1
    reloads = config.mode in ("none", "lora_restart")  # the engine may be behind the trainer
    return 2 * ahead * batch + (config.vllm_restart_interval - 1 if reloads else 0) + config.overlap_publish


def leave_out_by_lag(batch: Batch, lags: Lags, bounds: Mapping[str, int], *, keep_unknown: bool = True) -> Lags:
    """Leave out what is older than the bound of its environment, and what weights wrote that a return to a checkpoint
    gave up: no update leads to those. Rollouts of unknown age stay where `keep_unknown`."""

    def reason(rollout: Rollout, lag: int | None) -> str | None:
        most = bounds.get(rollout.env or UNNAMED)
        if lag is None:
            return None if keep_unknown or most is None else f"of unknown age, with --max-policy-lag {most}"
        if lag < 0:
            return "generated by weights that a restart gave up"
        if most is None or lag <= most:
            return None
        batch.too_old, batch.policy_lag_bound = batch.too_old + 1, most
        return f"older than --max-policy-lag {most}"

    why = [reason(rollout, lag) for rollout, lag in zip(batch.rollouts, lags, strict=True)]
    for text in filter(None, why):
        batch.leave_out(text, 1)
    batch.rollouts = [rollout for rollout, out in zip(batch.rollouts, why, strict=True) if out is None]
    return [lag for lag, out in zip(lags, why, strict=True) if out is None]
