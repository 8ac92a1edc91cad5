"""One optimizer step up to the point where weights change: forward, backward, gradient clipping.

The denominator belongs to the whole step (its tokens, its sequences or a constant) and is known before the first
backward pass, so the split into rows and ranks changes neither loss nor gradient. The balance loss of a mixture of
experts is no sum over tokens: each row's counts by its share of the step's tokens, whatever the denominator. Sums
stay on the device; one transfer at the end brings them to the CPU.

Several ranks train a row each at a time, and each forward and backward pass is one of all of them: whether a row gets
one is asked of all rows at the same place, and a rank without a row there has an empty one.

Rows whose advantages are all 0 have no gradient where no other term of the loss gives them one: they pass forward
alone, for what is told of all tokens (ratio, entropy, alignment), which stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trainer_core.objective.alignment import DiffSums
from trainer_core.objective.loss import Correction, LossSums, Sequences, balance_loss, reference_kl, teacher_kl
from trainer_core.objective.registry import Counts, Objective, count
from trainer_core.optim import Stepper
from trainer_core.policy.logprobs import TokenScores, row_logprobs, row_scores
from trainer_core.policy.reference import Reference
from trainer_core.policy.sharding import anywhere
from trainer_core.policy.speed import ThreadGradients, in_threads
from trainer_core.rollouts.packing import PackedRow
from trainer_core.world import ALONE, World


@dataclass(frozen=True)
class StepOutcome:
    """Means over the trained tokens of one optimizer step, made once, here."""

    loss: float
    ratio_mean: float
    clip_fraction: float
    kl_k3: float
    grad_norm: float
    lr: float
    diffs: DiffSums
    """Trainer against rollout logprobs, over the trained tokens that came with one, masked ones included."""
    tokens: int
    clip_low: float = 0.0
    clip_high: float = 0.0
    """Shares of tokens with a ratio below and above the clip range; together `clip_fraction`."""
    dual_clip: float = 0.0
    ratio_max: float = 1.0
    """The largest ratio of a token that trains, however it was clipped."""
    entropy: float = 0.0
    """Mean over all trained tokens of the policy's entropy at their sampling temperature, in nats."""
    tis_mean: float | None = None
    """Mean importance weight; null with `ratio_base = rollout`, as the next two."""
    tis_truncated: float | None = None
    tis_masked: float | None = None
    """Shares of all trained tokens whose weight was capped, and that were left out."""
    ref_kl: float | None = None
    distill_kl: float | None = None
    """KL to the frozen reference and to the teacher, by the trained tokens that have one; null where none has."""
    steps: int = 1
    """Optimizer steps that these are the means of."""

    @property
    def finite(self) -> bool:
        """Whether the update may be applied."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class _DeviceRow:
    """A packed row on the device, with what the objective needs beside it."""

    packed: PackedRow
    sequences: Sequences
    correction: Correction | None
    learns: bool = True
    """Whether it needs a backward pass."""
    measured: torch.Tensor | None = None
    """[T] bool, false where the trainer's own logprob stands in for a missing one; null: all came with the rollouts."""
    known: bool = False
    """Whether the trainer's own logprobs are in it."""


def accumulate(
    model: torch.nn.Module, stepper: Stepper, rows: Sequence[PackedRow], objective: Objective, step: int,
    *, world: World = ALONE, threads: int = 1, reference: Reference | None = None,
) -> StepOutcome:  # fmt: skip
    """Gradient of one optimizer step, clipped and ready in `stepper`; no parameter changes.

    Args:
        rows: of this rank, as many as every other has, on any device; at least one trained token in all.
        step: from 1, for the learning rate.
        world: whose ranks train the other rows of this step; what is returned is of all of them.
        threads: that each train rows of their own, side by side; for models on a CPU.
        reference: answers where rows come without reference logprobs; null: they have no such term there.
    """
    device = next(model.parameters()).device
    if reference is not None:
        rows = reference.fill(rows, threads, world)
    learns = anywhere(world, [objective.teaches(row.advantages) for row in rows])
    learns[0] |= not any(learns)  # an optimizer's momentum moves on when a gradient is 0, not where there is none
    asks = anywhere(world, [_asks_first(row, objective) for row in rows])
    ready = in_threads(
        lambda item, _: _on_device(model, item[0], objective, device, item[1], item[2]),
        list(zip(rows, learns, asks, strict=True)), threads,
    )  # fmt: skip
    denominator, labels = _divisors(ready, objective, world, device)
    scale = None if stepper.scale is None else stepper.scale.factor(denominator)
    sums = _Sums(device)
    stepper.zero_grad()
    gradients = ThreadGradients(stepper.params, threads) if threads > 1 else None

    def train(row: _DeviceRow, thread: int) -> tuple[LossSums, TokenScores, torch.Tensor, _DeviceRow] | None:
        if not len(row.packed.labels):
            _accompany(model, row)
            return None
        with torch.set_grad_enabled(row.learns):
            scores, penalty, uneven, penalties = _forward(model, row.packed, objective)
            if not row.known:
                row = _based(row, scores.logprobs.detach(), objective)
            packed = row.packed
            part = objective.sums(
                scores.logprobs, packed.logprobs, packed.advantages, row.sequences, row.correction, penalty
            )
        loss = part.loss / denominator
        if uneven is not None:  # a term of the whole row: outside of the tokens' denominator, and of any mask
            share = uneven * (len(packed.labels) / labels)
            loss, penalties[4] = loss + share, share.detach()
        if not row.learns:
            return part, scores, penalties, row
        loss = loss if scale is None else loss * scale
        if gradients is None:
            loss.backward()
        else:
            gradients.backward(loss, thread)
        detached = TokenScores(*(value.detach() for value in scores))
        return LossSums(*(value.detach() for value in part)), detached, penalties, row

    for done in in_threads(train, ready, threads):
        if done is not None:
            part, scores, penalties, row = done
            sums.add(part, scores, row)
            sums.penalties += penalties
    if gradients is not None:
        stepper.take_gradients(gradients.total())
    stepper.add_up()
    if scale is not None:
        stepper.unscale(scale)
    lr = stepper.set_lr(step)
    outcome = sums.over(world).outcome(denominator, stepper.clip(), lr)
    if stepper.scale is not None:
        stepper.scale.saw(outcome.finite)
    return outcome


def _divisors(
    rows: Sequence[_DeviceRow], objective: Objective, world: World, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The objective's denominator, and all trained tokens, masked ones included; both of the whole step."""
    counts = count([(row.sequences, row.correction) for row in rows], device)
    labels = torch.tensor(float(sum(len(row.packed.labels) for row in rows)), dtype=torch.float64, device=device)
    if objective.balance_coef:  # nothing else needs them
        labels = world.total(labels)
    return objective.denominator(Counts(world.total(counts.tokens), world.total(counts.sequences))), labels


def _asks_first(row: PackedRow, objective: Objective) -> bool:
    """Whether the trainer's own logprobs of it, before the batch changes anything, are needed before any row trains,
    and not known: they decide what a mask leaves out of the denominator. Else those of the forward pass that trains are
    the same, since a batch of several steps brings its own."""
    return row.base is None and objective.bounds is not None and objective.bounds.mask != "none"


def _on_device(
    model: torch.nn.Module, row: PackedRow, objective: Objective, device: torch.device, learns: bool, asks: bool
) -> _DeviceRow:
    """The row moved, with the trainer's own logprobs where it `asks` itself."""
    ids, missing = row.sequences, row.logprobs.isnan()
    some_missing = bool(missing.any())  # asked of the CPU's copy: a GPU would have to be waited for
    row = row.to(device)
    sequences = Sequences(ids.to(device, non_blocking=True), len(row.lengths))
    measured = ~missing.to(device, non_blocking=True) if some_missing else None
    ready, base = _DeviceRow(row, sequences, None, learns, measured), row.base
    if asks:
        with torch.no_grad():
            own = row_logprobs(model, row)
        base = own if base is None else base
    return ready if base is None else _based(ready, base, objective)


def _based(ready: _DeviceRow, base: torch.Tensor, objective: Objective) -> _DeviceRow:
    """`ready` with the trainer's own logprobs, [T]: they are the base of the ratio with `ratio_base = proximal`, and
    stand in where the rollouts came without."""
    row = ready.packed
    if not len(row.labels):
        return ready
    if ready.measured is not None:
        row = replace(row, logprobs=torch.where(ready.measured, row.logprobs, base.float()))
    return replace(ready, packed=row, correction=objective.correction(base, row.logprobs, ready.sequences), known=True)


def _accompany(model: torch.nn.Module, row: _DeviceRow) -> None:
    """Run the model on an empty row, for the ranks that have one with tokens; its gradient is 0."""
    with torch.set_grad_enabled(row.learns):
        nothing = row_logprobs(model, row.packed).sum()
    if row.learns:
        nothing.backward()


def _forward(
    model: torch.nn.Module, row: PackedRow, objective: Objective
) -> tuple[TokenScores, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Scores of the labels, [T]; further terms of each token's loss, [T]; the row's weighed balance loss, []; and the
    sums of `_Sums.penalties`. None stands for a term that the objective does not have."""
    told = torch.zeros(5, dtype=torch.float64, device=row.tokens.device)
    routing: list[torch.Tensor] | None = [] if objective.balance_coef else None
    if row.teacher_ids is None or row.teacher_logprobs is None:
        scores, penalty = row_scores(model, row, routing=routing), None
    else:
        labels = torch.cat([row.labels[:, None], row.teacher_ids], dim=1)
        whole = row_scores(model, row, labels=labels, routing=routing)
        scores = TokenScores(whole.logprobs[:, 0], whole.entropy)
        to_teacher = teacher_kl(whole.logprobs[:, 1:], row.teacher_logprobs)
        penalty = objective.distill_coef * to_teacher
        told[2] = to_teacher.detach().sum()
        told[3] = (row.teacher_logprobs > -torch.inf).any(1).sum()
    if row.reference is not None:
        to_reference = reference_kl(scores.logprobs, row.reference)
        weighed = objective.ref_kl_coef * to_reference
        penalty = weighed if penalty is None else penalty + weighed
        told[0] = to_reference.detach().sum()
        told[1] = (~row.reference.isnan()).sum()
    uneven = objective.balance_coef * balance_loss(routing, model.config.num_experts_per_tok) if routing else None
    return scores, penalty, uneven, told


class _Sums:
    """Sums over the rows of a step, in float64 on the device."""

    def __init__(self, device: torch.device) -> None:
        self._values = torch.zeros(17, dtype=torch.float64, device=device)
        self._largest = self._ratio_max = torch.zeros((), device=device)
        self.penalties = torch.zeros(5, dtype=torch.float64, device=device)
        """KL to the reference, tokens that have one, KL to the teacher, tokens that have one; the balance loss."""

    @torch.no_grad()
    def add(self, part: LossSums, scores: TokenScores, row: _DeviceRow) -> None:
        logprobs, rollout, correction = scores.logprobs, row.packed.logprobs, row.correction
        measured = torch.ones_like(rollout) if row.measured is None else row.measured.to(rollout.dtype)
        diff = torch.where(measured > 0, logprobs - rollout, 0.0)
        self._largest = torch.maximum(self._largest, diff.abs().max())
        everything = torch.ones_like(rollout).sum()
        theirs = [(logprobs * measured).sum(), (rollout * measured).sum(), measured.sum()]
        self._ratio_max = torch.maximum(self._ratio_max, part.ratio_max)
        values = [*part[:-1], diff.sum(), diff.abs().sum(), *theirs, everything, scores.entropy.sum()]
        values += [everything * 0, everything * 0] if correction is None else [
            correction.weight.sum(), correction.truncated.sum()
        ]  # fmt: skip
        self._values += torch.stack([value.detach().double() for value in values])

    def over(self, world: World) -> _Sums:
        """Over the rows of all ranks."""
        count = len(self._values)
        self._values, self.penalties = world.total(torch.cat([self._values, self.penalties])).split([count, 5])
        self._largest, self._ratio_max = world.largest(torch.stack([self._largest, self._ratio_max]))
        return self

    def outcome(self, denominator: torch.Tensor, norm: torch.Tensor, lr: float) -> StepOutcome:
        extra = torch.stack([x.double() for x in (self._largest, denominator, norm, self._ratio_max)])
        values = torch.cat([self._values, extra, self.penalties]).tolist()
        diff, abs_diff, train, inference, measured, tokens = values[8:14]
        entropy, weight, truncated, largest, denominator_, norm_, ratio_max = values[14:21]
        to_reference, referenced, to_teacher, taught, uneven = values[21:]
        part = LossSums(*[*values[:8], ratio_max])
        kept = part.tokens

        def mean(total: float, over: float) -> float:
            return total / over if over else math.nan

        corrected = bool(weight)
        return StepOutcome(
            loss=part.loss / denominator_ + uneven, ratio_mean=mean(part.ratio, kept),
            clip_fraction=mean(part.clipped, kept), kl_k3=mean(part.kl_k3, kept), grad_norm=norm_, lr=lr,
            tokens=int(tokens),
            diffs=DiffSums(int(measured), diff, abs_diff, largest, train, inference),
            clip_low=mean(part.clipped_low, kept), clip_high=mean(part.clipped_high, kept),
            dual_clip=mean(part.dual_clipped, kept), ratio_max=part.ratio_max, entropy=mean(entropy, tokens),
            tis_mean=mean(weight, tokens) if corrected else None,
            tis_truncated=mean(truncated, tokens) if corrected else None,
            tis_masked=1.0 - mean(kept, tokens) if corrected else None,
            ref_kl=to_reference / referenced if referenced else None,
            distill_kl=to_teacher / taught if taught else None,
        )  # fmt: skip
