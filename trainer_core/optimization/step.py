"""One optimizer step up to the point where weights change: forward, backward, gradient clipping.

The denominator belongs to the whole step (its tokens, its sequences or a constant) and is known
before the first backward pass, so the split into rows and ranks changes neither loss nor gradient.
The balance loss of a mixture of experts is per row, weighted by the row's share of the step's
tokens, whatever the denominator. Sums stay on the device; one transfer at the end brings them to
the CPU.

Several ranks train one row each at a time, and each forward and backward pass involves all ranks.
So whether a row gets a pass is decided over all ranks' rows at the same index; a rank without a row
there has an empty one.

Rows whose advantages are all 0 have no gradient unless another term of the loss gives them one.
They only pass forward, for the figures over all tokens (ratio, entropy, alignment).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trainer_core.objective.alignment import DiffSums
from trainer_core.objective.loss import (
    Correction,
    LossSums,
    Sequences,
    balance_loss,
    reference_kl,
    teacher_kl,
)
from trainer_core.objective.registry import Counts, Objective, count
from trainer_core.optimization.optimizers import Stepper
from trainer_core.policy.logprobs import TokenScores, row_logprobs, row_scores
from trainer_core.policy.reference import Reference
from trainer_core.policy.sharding import anywhere
from trainer_core.policy.speed import ThreadGradients, in_threads
from trainer_core.ranks.world import ALONE, World
from trainer_core.rollouts.packing import PackedRow


@dataclass(frozen=True)
class StepOutcome:
    """Means over the trained tokens of one optimizer step."""

    loss: float
    ratio_mean: float
    clip_fraction: float
    kl_k3: float
    grad_norm: float
    lr: float
    diffs: DiffSums
    """Trainer against rollout logprobs, over the trained tokens that came with one, including
    masked ones."""
    tokens: int
    clip_low: float = 0.0
    clip_high: float = 0.0
    """Shares of tokens with a ratio below and above the clip range; their sum is
    `clip_fraction`."""
    dual_clip: float = 0.0
    ratio_max: float = 1.0
    """Largest unclipped ratio of a trained token."""
    entropy: float = 0.0
    """Mean entropy of the policy in nats, over all trained tokens, at their sampling
    temperature."""
    tis_mean: float | None = None
    """Mean importance weight; None with `ratio_base = rollout`, like the next two."""
    tis_truncated: float | None = None
    tis_masked: float | None = None
    """Shares of all trained tokens whose weight was capped, and that were masked out."""
    ref_kl: float | None = None
    distill_kl: float | None = None
    """KL to the frozen reference and to the teacher, over the trained tokens that have one; None if
    none has."""
    steps: int = 1
    """Number of optimizer steps that these are the means of."""

    @property
    def finite(self) -> bool:
        """True if the update may be applied."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class _DeviceRow:
    """A packed row on the device, with the objective's extra inputs."""

    packed: PackedRow
    sequences: Sequences
    correction: Correction | None
    learns: bool = True
    """Needs a backward pass."""
    measured: torch.Tensor | None = None
    """[T] bool, False where the trainer's own logprob replaces a missing one; None: all came with
    the rollouts."""
    known: bool = False
    """The trainer's own logprobs are already included."""


def accumulate(
    model: torch.nn.Module,
    stepper: Stepper,
    rows: Sequence[PackedRow],
    objective: Objective,
    step: int,
    *,
    world: World = ALONE,
    threads: int = 1,
    reference: Reference | None = None,
) -> StepOutcome:
    """Accumulate the clipped gradient of one optimizer step in `stepper`; no parameter changes.

    Args:
        rows: this rank's rows, on any device; equally many on every rank, with at least one trained
            token in all.
        step: optimizer step from 1, for the learning rate.
        world: ranks that train the other rows of this step; the outcome covers all of them.
        threads: number of threads that train rows in parallel; for models on a CPU.
        reference: fills in missing reference logprobs; None: such rows have no reference term.
    """
    device = next(model.parameters()).device
    if reference is not None:
        rows = reference.fill(rows, threads, world)
    learns = anywhere(world, [objective.teaches(row.advantages) for row in rows])
    # With no gradient at all the optimizer would skip every parameter.
    learns[0] |= not any(learns)  # momentum needs a gradient, even if it is 0
    needs_own = anywhere(world, [_needs_own_logprobs(row, objective) for row in rows])
    ready = in_threads(
        lambda item, _: _on_device(model, item[0], objective, device, item[1], item[2]),
        list(zip(rows, learns, needs_own, strict=True)),
        threads,
    )
    # Before the first backward pass: each row's loss is divided by it.
    denominator, labels = _divisors(ready, objective, world, device)
    scale = None if stepper.scale is None else stepper.scale.factor(denominator)
    sums = _Sums(device)
    stepper.zero_grad()
    gradients = ThreadGradients(stepper.params, threads) if threads > 1 else None

    def train(
        row: _DeviceRow, thread: int
    ) -> tuple[LossSums, TokenScores, torch.Tensor, _DeviceRow] | None:
        # FSDP's collectives need a pass on every rank.
        if not len(row.packed.labels):
            _accompany(model, row)
            return None
        with torch.set_grad_enabled(row.learns):
            scores, penalty, uneven, penalties = _forward(model, row.packed, objective)
            if not row.known:
                row = _based(row, scores.logprobs.detach(), objective)
            packed = row.packed
            part = objective.sums(
                scores.logprobs,
                packed.logprobs,
                packed.advantages,
                row.sequences,
                row.correction,
                penalty,
            )
        loss = part.loss / denominator
        if (
            uneven is not None
        ):  # a term of the whole row: outside of the tokens' denominator, and of any mask
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
            # In the order of rows, so that sums do not depend on the timing of threads.
            part, scores, penalties, row = done
            sums.add(part, scores, row)
            sums.penalties += penalties
    if gradients is not None:
        stepper.take_gradients(gradients.total())
    # Gradients are complete only now: over rows, then over ranks, then without the loss scale.
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
    """Return the objective's denominator and the number of all trained tokens, masked ones
    included; both over the whole step."""
    # After `_on_device`, so that masked tokens are already out of the counts.
    counts = count([(row.sequences, row.correction) for row in rows], device)
    labels = torch.tensor(
        float(sum(len(row.packed.labels) for row in rows)), dtype=torch.float64, device=device
    )
    if objective.balance_coef:  # nothing else needs them
        labels = world.total(labels)
    return objective.denominator(
        Counts(world.total(counts.tokens), world.total(counts.sequences))
    ), labels


def _needs_own_logprobs(row: PackedRow, objective: Objective) -> bool:
    """Return True if the trainer's own logprobs are needed before any row trains."""
    # A mask changes the denominator, so it needs them first. Otherwise those of the training pass
    # are the same: no weight has changed yet, and batches of several steps bring their base along.
    return row.base is None and objective.bounds is not None and objective.bounds.mask != "none"


def _on_device(
    model: torch.nn.Module,
    row: PackedRow,
    objective: Objective,
    device: torch.device,
    learns: bool,
    needs_own: bool,
) -> _DeviceRow:
    """Move a row to the device; if `needs_own`, compute the trainer's own logprobs for it."""
    ids, missing = row.sequences, row.logprobs.isnan()
    some_missing = bool(missing.any())  # on the CPU: on a GPU this would synchronize
    row = row.to(device)
    sequences = Sequences(ids.to(device, non_blocking=True), len(row.lengths))
    measured = ~missing.to(device, non_blocking=True) if some_missing else None
    ready, base = _DeviceRow(row, sequences, None, learns, measured), row.base
    if needs_own:
        with torch.no_grad():
            own = row_logprobs(model, row)
        base = own if base is None else base
    return ready if base is None else _based(ready, base, objective)


def _based(ready: _DeviceRow, base: torch.Tensor, objective: Objective) -> _DeviceRow:
    """Add the trainer's own logprobs, [T]: the base of the ratio with `ratio_base = proximal`, and
    the replacement for missing rollout logprobs."""
    row = ready.packed
    if not len(row.labels):
        return ready
    if ready.measured is not None:
        row = replace(row, logprobs=torch.where(ready.measured, row.logprobs, base.float()))
    return replace(
        ready,
        packed=row,
        correction=objective.correction(base, row.logprobs, ready.sequences),
        known=True,
    )


def _accompany(model: torch.nn.Module, row: _DeviceRow) -> None:
    """Run the model on an empty row, because other ranks have tokens there; its gradient is 0."""
    with torch.set_grad_enabled(row.learns):
        nothing = row_logprobs(model, row.packed).sum()
    if row.learns:
        nothing.backward()


def _forward(
    model: torch.nn.Module, row: PackedRow, objective: Objective
) -> tuple[TokenScores, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Return the labels' scores, [T]; more terms of each token's loss, [T]; the row's weighted
    balance loss, []; and the sums of `_Sums.penalties`. None stands for a term that the objective
    does not have."""
    # [5] as in `_Sums.penalties`.
    penalties = torch.zeros(5, dtype=torch.float64, device=row.tokens.device)
    routing: list[torch.Tensor] | None = [] if objective.balance_coef else None
    if row.teacher_ids is None or row.teacher_logprobs is None:
        scores, penalty = row_scores(model, row, routing=routing), None
    else:
        # [T, 1 + K]: one forward pass scores the label and the teacher's K tokens.
        labels = torch.cat([row.labels[:, None], row.teacher_ids], dim=1)
        whole = row_scores(model, row, labels=labels, routing=routing)
        scores = TokenScores(whole.logprobs[:, 0], whole.entropy)
        to_teacher = teacher_kl(whole.logprobs[:, 1:], row.teacher_logprobs)
        penalty = objective.distill_coef * to_teacher
        penalties[2] = to_teacher.detach().sum()
        penalties[3] = (row.teacher_logprobs > -torch.inf).any(1).sum()
    if row.reference is not None:
        to_reference = reference_kl(scores.logprobs, row.reference)
        weighed = objective.ref_kl_coef * to_reference
        penalty = weighed if penalty is None else penalty + weighed
        penalties[0] = to_reference.detach().sum()
        penalties[1] = (~row.reference.isnan()).sum()
    uneven = (
        objective.balance_coef * balance_loss(routing, model.config.num_experts_per_tok)
        if routing
        else None
    )
    return scores, penalty, uneven, penalties


class _Sums:
    """Sums over the rows of a step, in float64 on the device."""

    def __init__(self, device: torch.device) -> None:
        self._values = torch.zeros(17, dtype=torch.float64, device=device)
        self._largest = self._ratio_max = torch.zeros((), device=device)
        self.penalties = torch.zeros(5, dtype=torch.float64, device=device)
        """[5]: KL to the reference, tokens that have one, KL to the teacher, tokens that have one,
        balance loss."""

    @torch.no_grad()
    def add(self, part: LossSums, scores: TokenScores, row: _DeviceRow) -> None:
        logprobs, rollout, correction = scores.logprobs, row.packed.logprobs, row.correction
        measured = (
            torch.ones_like(rollout) if row.measured is None else row.measured.to(rollout.dtype)
        )
        # A replaced logprob is the trainer's own: its difference of 0 would hide
        # a mismatch.
        diff = torch.where(measured > 0, logprobs - rollout, 0.0)
        self._largest = torch.maximum(self._largest, diff.abs().max())
        everything = torch.ones_like(rollout).sum()
        theirs = [(logprobs * measured).sum(), (rollout * measured).sum(), measured.sum()]
        self._ratio_max = torch.maximum(self._ratio_max, part.ratio_max)
        values = [
            *part[:-1],
            diff.sum(),
            diff.abs().sum(),
            *theirs,
            everything,
            scores.entropy.sum(),
        ]
        # Tensors on the device, so that no transfer is needed here.
        values += (
            [everything * 0, everything * 0]
            if correction is None
            else [correction.weight.sum(), correction.truncated.sum()]
        )
        self._values += torch.stack([value.detach().double() for value in values])

    def over(self, world: World) -> _Sums:
        """Reduce over all ranks, in place."""
        count = len(self._values)
        # One all-reduce for all sums and one for the maxima.
        self._values, self.penalties = world.total(torch.cat([self._values, self.penalties])).split(
            [count, 5]
        )
        self._largest, self._ratio_max = world.largest(
            torch.stack([self._largest, self._ratio_max])
        )
        return self

    def outcome(self, denominator: torch.Tensor, norm: torch.Tensor, lr: float) -> StepOutcome:
        extra = torch.stack(
            [x.double() for x in (self._largest, denominator, norm, self._ratio_max)]
        )
        # The only transfer to the CPU: it waits for the whole step on the device.
        values = torch.cat([self._values, extra, self.penalties]).tolist()
        diff, abs_diff, train, inference, measured, tokens = values[8:14]
        entropy, weight, truncated, largest, denominator_, norm_, ratio_max = values[14:21]
        to_reference, referenced, to_teacher, taught, uneven = values[21:]
        part = LossSums(*[*values[:8], ratio_max])
        kept = part.tokens

        def mean(total: float, over: float) -> float:
            return total / over if over else math.nan

        # With `ratio_base = rollout` there are no importance weights, so their sum is 0.
        corrected = bool(weight)
        return StepOutcome(
            loss=part.loss / denominator_ + uneven,
            ratio_mean=mean(part.ratio, kept),
            clip_fraction=mean(part.clipped, kept),
            kl_k3=mean(part.kl_k3, kept),
            grad_norm=norm_,
            lr=lr,
            tokens=int(tokens),
            diffs=DiffSums(int(measured), diff, abs_diff, largest, train, inference),
            clip_low=mean(part.clipped_low, kept),
            clip_high=mean(part.clipped_high, kept),
            dual_clip=mean(part.dual_clipped, kept),
            ratio_max=part.ratio_max,
            entropy=mean(entropy, tokens),
            tis_mean=mean(weight, tokens) if corrected else None,
            tis_truncated=mean(truncated, tokens) if corrected else None,
            tis_masked=1.0 - mean(kept, tokens) if corrected else None,
            ref_kl=to_reference / referenced if referenced else None,
            distill_kl=to_teacher / taught if taught else None,
        )
