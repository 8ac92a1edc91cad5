"""Check a batch from run-api: which tokens train, with which advantage, temperature and logprob.

Pure functions, without torch. A malformed group is left out whole and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from atropos_common.protocol import records
from atropos_common.protocol.bridge import completion_digest
from trainer_core.errors import MissingLogprobs
from trainer_core.rollouts.fields import (
    FLOAT32_MAX,
    IGNORED,
    PLACEHOLDER,
    POSITIVE_TOLERANCE,
    Group,
    Malformed,
    Teacher,
    advantages,
    batches_ahead,
    environment,
    masked_tokens,
    reference_logprobs,
    rollout_logprobs,
    same_length,
    table,
    teacher_of,
    temperature,
    token_ids,
    unused,
)

# Rounding alone makes equal scores differ a little.
FLAT_TOLERANCE = 1e-6
"""Largest spread of equal scores, relative to max(1, largest |score|)."""
WINDOW = 256
"""Window of the running mean, in scores."""

NO_LOGPROBS = (
    "GRPO requires inference_logprobs for importance sampling, and {what}. Only "
    "server_type=vllm calls /generate, which returns them: set --openai.server_type vllm in the "
    "environment, and point its base_url at a server with /generate (python -m vllm_server)"
)
UNNAMED = "unnamed"
WITHOUT_LOGPROBS = "without inference_logprobs"
RECOMPUTED = (
    "sequences came without inference_logprobs, and no server knows theirs: the trainer uses its "
    "own (missing_logprobs = recompute), so their ratio starts at 1 whatever the policy lag"
)
ASKED = (
    "sequences came without inference_logprobs: the trainer uses those that the engine computed "
    "when it made them (missing_logprobs = recompute)"
)
PARTLY = "generated tokens have a placeholder instead of a logprob and do not train"


@dataclass(frozen=True)
class Selection:
    """An objective's choice of sequences, beside the common checks."""

    drop_flat: bool = False
    """Leave out groups of equal scores (DAPO's dynamic sampling, without replacements)."""
    max_completion: int | None = None
    """Limit of a completion (one turn), in tokens."""
    overlong_buffer: int = 0
    """Tokens before the limit over which scores fall; 0: off."""
    overlong_penalty: float = 1.0
    overlong_mask: bool = False
    """Leave out completions that were cut off at the limit."""
    vocab_size: int | None = None
    """Exclusive upper bound of token ids."""
    end_tokens: frozenset[int] = frozenset()
    """Token ids that end a completion."""
    group_of_one: Literal["baseline", "score"] = "baseline"
    reference: bool = False
    teacher: bool = False
    """Read reference and teacher logprobs from the environment."""

    def punishment(self, length: int) -> float:
        """Return the score penalty of a completion, 0 to `overlong_penalty`.

        Soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13).
        """
        if not self.overlong_buffer or self.max_completion is None:
            return 0.0
        over = (length - (self.max_completion - self.overlong_buffer)) / self.overlong_buffer
        return self.overlong_penalty * min(1.0, max(0.0, over))


@dataclass(frozen=True)
class Rollout:
    """One sequence of L tokens: prompt and completions."""

    # Arrays without a shape have [L].
    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    """True for generated tokens that train; never for the first."""
    logprobs: NDArray[np.float32]
    """In nats, where trained; NaN: the trainer computes it."""
    advantages: NDArray[np.float32]
    temperature: float
    score: float
    env: str
    digests: tuple[str, ...]
    """One for each turn."""
    reference: NDArray[np.float32] | None = None
    """Reference logprobs of the environment, NaN where missing."""
    teacher: Teacher | None = None
    base: NDArray[np.float32] | None = None
    """Logprobs before the batch's first optimizer step; None: it has one step."""
    experts: NDArray[np.int16] | None = None
    """[L, sparse layers, K] experts that the engine chose, -1 if unknown."""
    oldest_version: int | None = None
    """Oldest weight version reported with the logprobs."""

    @property
    def complete(self) -> bool:
        return not bool(np.isnan(self.logprobs[self.trained]).any())

    @property
    def prompt_length(self) -> int:
        """Tokens before the first generated one."""
        generated = np.flatnonzero(self.trained)
        return int(generated[0]) if len(generated) else len(self.tokens)


@dataclass
class Batch:
    """Rollouts of one optimizer step, and counts of what is left out."""

    rollouts: list[Rollout]
    # Counts of groups.
    groups: int = 0
    """Well-formed groups."""
    flat_groups: int = 0
    """Groups of equal scores, without advantage."""
    groups_by_env: Counter[str] = field(default_factory=Counter)
    flat_by_env: Counter[str] = field(default_factory=Counter)
    """The same two by environment."""
    logprobs_from: Counter[str] = field(default_factory=Counter)
    """Sequences by source of logprobs: environment, engine or trainer."""
    unused: Counter[str] = field(default_factory=Counter)
    """Groups by name of a field that the trainer ignores."""
    # Sequences that do not train, and warnings about those that do.
    left_out: dict[str, int] = field(default_factory=dict)
    """Sequences by reason; a group of unknown size counts as one."""
    left_out_tokens: Counter[str] = field(default_factory=Counter)
    """Their generated tokens, by reason of `records.StepRecord.left_out_tokens`."""
    too_old: int = 0
    """Sequences left out for their policy lag."""
    policy_lag_bound: int | None = None
    """Bound that left out the newest of them; else the largest, if every environment has one."""
    examples: dict[str, str] = field(default_factory=dict)
    faults_by_env: dict[str, Counter[str]] = field(default_factory=dict)
    """Malformed sequences of each environment, by reason."""
    fault_examples: dict[str, str] = field(default_factory=dict)
    """First malformed example of each environment."""
    remarks: dict[str, int] = field(default_factory=dict)
    """Warning about trained data -> count."""
    # Figures for the step's record.
    sample_len: int = 0
    """Length of the first list of inference_logprobs; 0: none."""
    logprob_sum: float = 0.0
    generated: int = 0
    """Generated tokens and the sum of their logprobs as received."""
    unselected_scores: list[float] = field(default_factory=list)
    """Scores of good sequences that the objective leaves out."""
    completion_tokens: list[int] = field(default_factory=list)
    """Generated tokens of each good sequence."""
    reached_limit: list[bool] = field(default_factory=list)
    """True for a good sequence with a turn at the length limit."""
    ended: list[bool] = field(default_factory=list)
    """True for a good sequence that ends with an end token."""
    # State of the environments and the run.
    ahead: dict[str, int | None] = field(default_factory=dict)
    """`max_batches_offpolicy` of each environment."""
    baselines: dict[str, list[float]] = field(default_factory=dict)
    """Running means of groups of one after this batch."""
    raw: list[Any] = field(default_factory=list)
    """Groups as received, if they are recorded."""
    asked_routing: bool = False
    """Recorded experts are requested."""

    @property
    def trained_tokens(self) -> int:
        return sum(int(r.trained.sum()) for r in self.rollouts)

    @property
    def tokens(self) -> int:
        return sum(len(r.tokens) for r in self.rollouts)

    @property
    def scores(self) -> NDArray[np.float64]:
        scores = [rollout.score for rollout in self.rollouts]
        return np.array([*scores, *self.unselected_scores], dtype=np.float64)

    @property
    def completion_tokens_mean(self) -> float | None:
        return float(np.mean(self.completion_tokens)) if self.completion_tokens else None

    @property
    def truncated_fraction(self) -> float | None:
        """Share of sequences with a turn at the length limit, else without an end token."""
        if self.reached_limit:
            return float(np.mean(self.reached_limit))
        # If none ends with one, completions may end otherwise, as with stop strings.
        return 1.0 - float(np.mean(self.ended)) if any(self.ended) else None

    @property
    def logprob_warning(self) -> str | None:
        """Warn of logprobs that look like placeholders, in the guides' words."""
        average = self.logprob_sum / self.generated if self.generated else 0.0
        if average <= POSITIVE_TOLERANCE:
            return None
        return f"ref_logprobs avg {average:.3f} (should be negative!)"

    @property
    def routing_replayed(self) -> float | None:
        """Share of tokens with recorded experts; None if not requested."""
        if not self.asked_routing:
            return None
        recorded = [r.experts[:, 0, 0] >= 0 for r in self.rollouts if r.experts is not None]
        # Routers see each sequence up to its last trained token, which is itself not read.
        seen = [int(np.flatnonzero(r.trained)[-1]) for r in self.rollouts if r.trained.any()]
        return sum(int(known.sum()) for known in recorded) / max(1, sum(seen))

    def leave_out(
        self,
        reason: str,
        count: int,
        example: str = "",
        env: str = "",
        *,
        tokens: int = 0,
        kind: str = records.MALFORMED,
    ) -> None:
        """Count sequences that do not train.

        `env` is the environment that sent malformed ones; `tokens` of them were generated, and
        `kind` is their key in `left_out_tokens`.
        """
        if tokens:
            self.left_out_tokens[kind] += tokens
        self.left_out[reason] = self.left_out.get(reason, 0) + count
        self.examples.setdefault(reason, example)
        if env:
            self.faults_by_env.setdefault(env, Counter())[reason] += count
            self.fault_examples.setdefault(env, example)

    def absorb(self, other: Batch) -> None:
        """Add the counts of an earlier batch that had nothing to train on."""
        for reason, count in other.left_out.items():
            self.leave_out(reason, count, other.examples.get(reason, ""))
        self.left_out_tokens.update(other.left_out_tokens)
        for env, reasons in other.faults_by_env.items():
            self.faults_by_env.setdefault(env, Counter()).update(reasons)
            self.fault_examples.setdefault(env, other.fault_examples[env])
        if other.too_old and not self.too_old:
            self.policy_lag_bound = other.policy_lag_bound
        self.too_old += other.too_old
        self.groups += other.groups
        self.flat_groups += other.flat_groups
        self.groups_by_env.update(other.groups_by_env)
        self.flat_by_env.update(other.flat_by_env)
        self.logprobs_from.update(other.logprobs_from)
        self.unused.update(other.unused)
        self.completion_tokens += other.completion_tokens
        self.reached_limit += other.reached_limit
        self.ended += other.ended
        self.unselected_scores += other.unselected_scores

    def remark(self, text: str, count: int = 1) -> None:
        if count:
            self.remarks[text] = self.remarks.get(text, 0) + count


def group_advantages(scores: NDArray[np.float64], *, std: bool = True) -> NDArray[np.float64]:
    """Scores minus their mean, divided by their (population) deviation, [G]; equal scores give
    0."""
    # Dividing by a deviation that is only rounding noise would make noise into large advantages.
    if _equal(scores):
        return np.zeros_like(scores)
    centred = scores - scores.mean()
    return centred / scores.std() if std else centred


def _equal(scores: NDArray[np.float64]) -> bool:
    # Scores may be as large as float64 allows.
    with np.errstate(over="ignore"):
        return bool(np.ptp(scores) < FLAT_TOLERANCE * max(1.0, float(np.abs(scores).max())))


@dataclass
class _Running:
    """Mean and (population) variance of about the last `WINDOW` scores."""

    count: float = 0.0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, scores: NDArray[np.float64]) -> None:
        """Merge new scores (Chan et al. 1983, "Algorithms for computing the sample variance")."""
        new, new_mean = len(scores), float(scores.mean())
        total = self.count + new
        mean = (self.count * self.mean + new * new_mean) / total
        # Each part's variance around the new mean.
        old_part = self.count * (self.variance + (self.mean - mean) ** 2)
        new_part = new * (float(scores.var()) + (new_mean - mean) ** 2)
        self.variance = (old_part + new_part) / total
        # After that many scores, each new one weighs 1 / WINDOW.
        self.mean, self.count = mean, min(total, WINDOW)


class Baselines:
    """Running mean of each environment, REINFORCE's baseline (Williams 1992)."""

    def __init__(self, state: dict[str, list[float]] | None = None) -> None:
        self._running = {env: _Running(*numbers) for env, numbers in (state or {}).items()}

    def state(self) -> dict[str, list[float]]:
        """Count, mean and variance of each environment, for a checkpoint."""
        return {env: [each.count, each.mean, each.variance] for env, each in self._running.items()}

    def advantages(
        self, env: str, scores: NDArray[np.float64], *, std: bool
    ) -> NDArray[np.float64]:
        """Scores, [N], minus the running mean, divided by the running deviation."""
        # A score's share in its own baseline is a bias: 1 / N of N scores, as in a group of N.
        running = self._running.setdefault(env, _Running())
        running.add(scores)
        deviation = running.variance**0.5
        # Written so that NaN counts as no deviation.
        if not deviation >= FLAT_TOLERANCE * max(1.0, abs(running.mean)):
            return np.zeros_like(scores)
        centred = scores - running.mean
        return centred / deviation if std else centred


def read_batch(
    groups: Sequence[Any],
    *,
    seq_len: int,
    temperature: float = 1.0,
    advantage_std: bool = True,
    selection: Selection | None = None,
    logprobs_seen: bool = False,
    recompute: bool = False,
    baselines: Baselines | None = None,
) -> Batch:
    """Check the groups of one `GET /batch`, whatever they contain.

    Args:
        seq_len: limit of a sequence, in tokens.
        temperature: default where the group has none.
        advantage_std: as in `group_advantages`.
        logprobs_seen: an earlier batch had logprobs, so the settings are right.
        recompute: train tokens without a logprob, with NaN in its place.
        baselines: running means, to which this batch is added.

    Raises:
        MissingLogprobs: neither this batch nor an earlier one has logprobs.
    """
    selection, baselines = selection or Selection(), baselines or Baselines()
    reader = _Reader(Batch([]), seq_len, temperature, advantage_std, selection, recompute)
    reader.read(groups, baselines)
    batch = reader.batch
    batch.baselines = baselines.state()
    # No logprob since the start means wrong settings, which waiting would not fix.
    if WITHOUT_LOGPROBS in batch.left_out and not batch.sample_len and not logprobs_seen:
        raise MissingLogprobs(batch.examples[WITHOUT_LOGPROBS])
    return batch


@dataclass(frozen=True)
class _Judged:
    """One checked sequence: a rollout, or the reason why there is none."""

    rollout: Rollout | None
    reason: str = ""
    example: str = ""
    generated: int = 0
    logprob_sum: float = 0.0
    """As received."""
    placeholders: int = 0
    """Generated tokens without a logprob."""
    is_too_long: bool = False


@dataclass
class _Reader:
    """Check groups and add them to `batch`."""

    batch: Batch
    seq_len: int
    temperature: float
    advantage_std: bool
    selection: Selection
    recompute: bool

    def read(self, raws: Sequence[Any], baselines: Baselines) -> None:
        parsed = ((raw, self._parse(f"group {i} of the batch", raw)) for i, raw in enumerate(raws))
        good = [(raw, *found) for raw, found in parsed if found is not None]
        # Groups of one share a baseline, so all scores are read before any advantage is computed.
        lone = self._lone([(group, scores) for _, group, scores in good], baselines)
        for index, (raw, group, scores) in enumerate(good):
            shared = lone.get(index, group_advantages(scores, std=self.advantage_std))
            try:
                judged = [self._sequence(group, i, float(value)) for i, value in enumerate(shared)]
            except Malformed as error:
                self._refuse(raw, error)
                continue
            # An environment's own advantages may differ even if the scores are equal, and be 0 if
            # they differ.
            rollouts = [each.rollout for each in judged if each.rollout]
            flat = not shared.any()
            if group.advantages:
                flat = bool(rollouts) and not any(r.advantages[r.trained].any() for r in rollouts)
            self._take_group(raw, group, judged, flat=flat)

    def _parse(self, where: str, raw: Any) -> tuple[Group, NDArray[np.float64]] | None:
        select = self.selection
        try:
            group = Group.parse(where, raw, reference=select.reference, teacher=select.teacher)
            with np.errstate(over="ignore", invalid="ignore"):
                scores = group.scores
                if select.overlong_buffer:
                    # Advantages come from punished scores, the mean reward from the original ones.
                    lengths = map(_longest_turn, group.masks)
                    scores = scores - np.array([select.punishment(each) for each in lengths])
                values = scores
                if len(scores) > 1:
                    values = group_advantages(scores, std=self.advantage_std)
                if not (np.abs(values).max() <= FLOAT32_MAX and np.isfinite(scores.std())):
                    what = f"{group.where}: scores up to {np.abs(scores).max():g}"
                    raise Malformed("scores are too far apart to compare", what)
        except Malformed as error:
            self._refuse(raw, error)
            return None
        return group, scores

    def _refuse(self, raw: Any, error: Malformed) -> None:
        tokens = raw.get("tokens") if isinstance(raw, dict) else None
        count = len(tokens) if isinstance(tokens, list) else 0
        env = environment(raw) if isinstance(raw, dict) else ""
        self.batch.leave_out(
            error.reason, max(1, count), str(error), env or UNNAMED, tokens=_generated_tokens(raw)
        )

    def _lone(
        self, groups: list[tuple[Group, NDArray[np.float64]]], baselines: Baselines
    ) -> dict[int, NDArray[np.float64]]:
        each = enumerate(groups)
        alone = [i for i, (group, s) in each if len(s) == 1 and not group.advantages]
        if self.selection.group_of_one == "score":
            return {i: groups[i][1] for i in alone}
        found = {}
        for env in {groups[i][0].env for i in alone}:
            places = [i for i in alone if groups[i][0].env == env]
            scores = np.concatenate([groups[i][1] for i in places])
            values = baselines.advantages(env, scores, std=self.advantage_std)
            found.update({i: values[at : at + 1] for at, i in enumerate(places)})
        return found

    def _take_group(
        self, raw: dict[str, Any], group: Group, judged: list[_Judged], *, flat: bool
    ) -> None:
        batch, name = self.batch, group.env or UNNAMED
        batch.groups += 1
        batch.groups_by_env[name] += 1
        # `tables[0]` is generation_params.
        batch.ahead[name] = batches_ahead(group.tables[0])
        flat = flat and not group.teacher_ids  # a teacher's tokens train whatever the scores are
        if flat:
            batch.flat_groups += 1
            batch.flat_by_env[name] += 1
        select = self.selection
        batch.unused.update(unused(raw, reference=select.reference, teacher=select.teacher))
        for each, mask in zip(judged, group.masks, strict=True):
            self._take(each, mask, flat)

    def _sequence(self, group: Group, i: int, shared: float) -> _Judged:
        spot, tokens = f"{group.where}, sequence {i}", group.tokens[i]
        override = table(spot, "overrides", group.overrides[i] if group.overrides else None)
        logprobs = group.logprobs[i] if group.logprobs else None
        same_length(spot, len(tokens), masks=group.masks[i])
        if len(tokens) > self.seq_len:
            reason = f"longer than --seq-len {self.seq_len}"
            return _Judged(None, reason, f"{spot}: {len(tokens)} tokens", is_too_long=True)
        ids = token_ids(spot, tokens, self.selection.vocab_size)
        generated = masked_tokens(spot, group.masks[i], ids)
        given = group.advantages[i] if group.advantages else None
        values_of = advantages(spot, override, given, shared, len(ids))
        heat = temperature(spot, (override, *group.tables), self.temperature)
        if not generated[1:].any():
            example = f"{spot}: masks is {IGNORED} after the first token"
            return _Judged(None, "nothing generated", example)
        if logprobs is None and not self.recompute:
            example = NO_LOGPROBS.format(what=f"{group.where} has none")
            return _Judged(None, WITHOUT_LOGPROBS, example)
        values, seen = np.full(len(ids), PLACEHOLDER), (0, 0.0, 0)
        if logprobs is not None:
            values = rollout_logprobs(spot, logprobs, generated)
            own = values[generated]
            seen = len(own), float(own.sum()), int((own > POSITIVE_TOLERANCE).sum())
        # A positive value is a placeholder: a logprob is at most 0.
        real = generated & (values <= POSITIVE_TOLERANCE)
        usable = generated.copy() if self.recompute else real.copy()
        # No position predicts the first token.
        usable[0] = False
        if not usable.any():
            only = (values[generated] == PLACEHOLDER).all()
            what = f"{spot} has {'only placeholders' if only else 'no real one'}"
            return _Judged(None, WITHOUT_LOGPROBS, NO_LOGPROBS.format(what=what), *seen)
        known = np.where(real, values, np.nan) if self.recompute else values
        given = group.reference[i] if group.reference else None
        given_logprobs = logprobs or []
        rollout = Rollout(
            tokens=ids,
            trained=usable,
            logprobs=np.where(usable, known, 0.0).astype(np.float32),
            advantages=values_of,
            temperature=heat,
            score=float(group.scores[i]),
            env=group.env,
            # By digests the servers recognize their completions; a segment with placeholders
            # cannot match.
            digests=tuple(
                completion_digest(tokens[a:b], given_logprobs[a:b])
                for a, b in segments(generated)
                if given_logprobs and real[a:b].all()
            ),
            reference=None if given is None else reference_logprobs(spot, given, generated),
            teacher=self._teacher(spot, group, i, usable),
        )
        return _Judged(rollout, "", "", *seen)

    def _teacher(
        self, spot: str, group: Group, i: int, usable: NDArray[np.bool_]
    ) -> Teacher | None:
        if not group.teacher_ids:
            return None
        ids, logprobs = group.teacher_ids[i], group.teacher_logprobs[i]
        return teacher_of(spot, ids, logprobs, usable, self.selection.vocab_size)

    def _take(self, judged: _Judged, mask: list[Any], flat: bool) -> None:
        batch, rollout = self.batch, judged.rollout
        batch.generated += judged.generated
        batch.logprob_sum += judged.logprob_sum
        if rollout is None:
            kind = records.TOO_LONG if judged.is_too_long else records.MALFORMED
            batch.leave_out(judged.reason, 1, judged.example, tokens=_labelled(mask), kind=kind)
            return
        # `sample_len` shows in the log that logprobs arrive at all.
        if rollout.complete:
            batch.sample_len = batch.sample_len or len(rollout.tokens)
        reached_limit = self._measure(rollout, mask)
        kind = records.FLAT
        if flat and self.selection.drop_flat:
            reason = "in a group of equal scores"
        elif self.selection.overlong_mask and reached_limit:
            reason = f"cut off at --max-completion-tokens {self.selection.max_completion}"
            kind = records.CUT_OFF
        else:
            batch.rollouts.append(rollout)
            if not self.recompute:
                batch.remark(PARTLY, judged.placeholders)
            return
        batch.leave_out(reason, 1, tokens=int(rollout.trained.sum()), kind=kind)
        # A good sequence: its score stays in the mean reward.
        batch.unselected_scores.append(rollout.score)

    def _measure(self, rollout: Rollout, mask: list[Any]) -> bool:
        generated, limit = np.flatnonzero(rollout.trained), self.selection.max_completion
        self.batch.completion_tokens.append(len(generated))
        self.batch.ended.append(int(rollout.tokens[generated[-1]]) in self.selection.end_tokens)
        if limit is None:
            return False
        self.batch.reached_limit.append(_longest_turn(mask) >= limit)
        return self.batch.reached_limit[-1]


def _labelled(mask: list[Any]) -> int:
    return sum(1 for label in mask if label != IGNORED)


def _generated_tokens(raw: Any) -> int:
    """Count the generated tokens of a malformed group, as far as its masks tell."""
    masks = raw.get("masks") if isinstance(raw, dict) else None
    lists = masks if isinstance(masks, list) else []
    return sum(_labelled(mask) for mask in lists if isinstance(mask, list))


def _longest_turn(mask: list[Any]) -> int:
    # The environment's limit applies to each turn.
    runs = groupby(mask, key=lambda label: label != IGNORED)
    return max((sum(1 for _ in run) for generated, run in runs if generated), default=0)


def segments(generated: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Half-open ranges of contiguous generated tokens."""
    # False on both ends, so that segments at the borders have two edges as well.
    edges = np.flatnonzero(np.diff(np.concatenate(([0], generated.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
