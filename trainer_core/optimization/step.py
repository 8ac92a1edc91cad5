"""One optimizer step up to the point where weights change: forward, backward, gradient clipping.

The denominator belongs to the whole step and is known before the first backward pass, so the split
into rows and ranks changes neither loss nor gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from atropos_common.protocol.trainer_records import StepRecord, metrics_of
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

METRICS = {
    name: metric
    for name, metric in metrics_of(StepRecord).items()
    if metric.mean_of or metric.max_of or name in ("loss", "grad_norm", "lr")
}
"""Metrics of an optimizer step, by field of the `step` record."""
_DIFFS = [f"diffs.{each.name}" for each in fields(DiffSums)]
_MAXIMA = [metric.max_of for metric in METRICS.values() if metric.max_of] + ["diffs.abs_max"]
# In a fixed order without repetition: several metrics share a denominator.
_SUMS = list(
    dict.fromkeys(
        [
            *("loss", "balance", "labels"),
            *(metric.mean_of for metric in METRICS.values() if metric.mean_of),
            *(metric.over for metric in METRICS.values() if metric.mean_of),
            *(name for name in _DIFFS if name not in _MAXIMA),
        ]
    )
)


@dataclass(frozen=True)
class StepOutcome:
    """Figures of one optimizer step, or of all steps on a batch."""

    metrics: dict[str, float]
    """Values by field of the `step` record; without those that apply to no token."""
    diffs: DiffSums
    """Over trained tokens that came with a logprob, masked ones included."""
    tokens: int
    steps: int = 1

    @property
    def finite(self) -> bool:
        """The update may be applied."""
        return math.isfinite(self.metrics["loss"]) and math.isfinite(self.metrics["grad_norm"])


Seen = Callable[[PackedRow, torch.Tensor], None]


@dataclass(frozen=True)
class _DeviceRow:
    packed: PackedRow
    sequences: Sequences
    correction: Correction | None
    learns: bool = True  # needs a backward pass
    measured: torch.Tensor | None = None
    """[T] bool, False where the trainer's own logprob replaces a missing one"""
    known: bool = False  # the trainer's own logprobs are included


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
    seen: Seen = lambda row, logprobs: None,
) -> StepOutcome:
    """Accumulate the clipped gradient of one optimizer step in `stepper`; no parameter changes.

    Args:
        rows: this rank's rows; equally many on every rank, with a trained token in all.
        step: optimizer step from 1, for the learning rate.
        world: ranks that train the other rows; the outcome covers all of them.
        threads: threads that train rows in parallel; for models on a CPU.
        reference: fills in missing reference logprobs.
        seen: called with each row and the policy's logprobs of its labels, [T].
    """
    device = next(model.parameters()).device
    if reference is not None:
        rows = reference.fill(rows, threads, world)
    learns = anywhere(world, [objective.teaches(row.advantages) for row in rows])
    # Rows without a gradient pass forward only, for the figures. Each pass involves all ranks, so
    # whether a row gets one is decided over all ranks' rows at the same index.
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
    sums = _Totals(device)
    stepper.zero_grad()
    gradients = ThreadGradients(stepper.params, threads) if threads > 1 else None

    def train(row: _DeviceRow, thread: int) -> Values | None:
        # FSDP's collectives need a pass on every rank.
        if not len(row.packed.labels):
            _accompany(model, row)
            return None
        with torch.set_grad_enabled(row.learns):
            scores, penalty, uneven, values = _forward(model, row.packed, objective)
            if not row.known:
                row = _based(row, scores.logprobs.detach(), objective)
            packed = row.packed
            seen(packed, scores.logprobs.detach())
            part = objective.sums(
                scores.logprobs,
                packed.logprobs,
                packed.advantages,
                row.sequences,
                row.correction,
                penalty,
            )
        loss = part.loss / denominator
        if uneven is not None:
            # A term of the whole row: outside of the tokens' denominator, and of any mask.
            values["balance"] = uneven * (len(packed.labels) / labels)
            loss = loss + values["balance"]
        if row.learns:
            loss = loss if scale is None else loss * scale
            if gradients is None:
                loss.backward()
            else:
                gradients.backward(loss, thread)
        found = values | _values(part, scores, row)
        return {name: value.detach() for name, value in found.items()}

    for values in in_threads(train, ready, threads):
        if values is not None:
            # In the order of rows, so that sums do not depend on the timing of threads.
            sums.add(values)
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
    """Return the objective's denominator and all trained tokens, over the whole step."""
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
    """Add the trainer's own logprobs, [T]: base of the ratio, and in place of missing ones."""
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
    # Other ranks have tokens in this row; the gradient of an empty one is 0.
    with torch.set_grad_enabled(row.learns):
        nothing = row_logprobs(model, row.packed).sum()
    if row.learns:
        nothing.backward()


Values = dict[str, torch.Tensor]
"""Sums and maxima of a row by name, as in `_SUMS` and `_MAXIMA`: scalars on the device."""


def _forward(
    model: torch.nn.Module, row: PackedRow, objective: Objective
) -> tuple[TokenScores, torch.Tensor | None, torch.Tensor | None, Values]:
    """Return scores, [T]; further terms of each token's loss, [T]; balance loss, []; sums."""
    values: Values = {}
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
        values["distill_kl"] = to_teacher.sum()
        values["taught"] = (row.teacher_logprobs > -torch.inf).any(1).sum()
    if row.reference is not None:
        to_reference = reference_kl(scores.logprobs, row.reference)
        weighed = objective.ref_kl_coef * to_reference
        penalty = weighed if penalty is None else penalty + weighed
        values["ref_kl"] = to_reference.sum()
        values["referenced"] = (~row.reference.isnan()).sum()
    uneven = (
        objective.balance_coef * balance_loss(routing, model.config.num_experts_per_tok)
        if routing
        else None
    )
    return scores, penalty, uneven, values


@torch.no_grad()
def _values(part: LossSums, scores: TokenScores, row: _DeviceRow) -> Values:
    logprobs, rollout, correction = scores.logprobs, row.packed.logprobs, row.correction
    labels = torch.ones_like(rollout).sum()
    measured = torch.ones_like(rollout) if row.measured is None else row.measured.to(rollout.dtype)
    # A replaced logprob is the trainer's own: its difference of 0 would hide a mismatch.
    diff = torch.where(measured > 0, logprobs - rollout, 0.0)
    values = part._asdict() | {
        "labels": labels,
        "entropy": scores.entropy.sum(),
        "diffs.tokens": measured.sum(),
        "diffs.diff": diff.sum(),
        "diffs.abs_diff": diff.abs().sum(),
        "diffs.abs_max": diff.abs().max(),
        "diffs.train": (logprobs * measured).sum(),
        "diffs.inference": (rollout * measured).sum(),
    }
    if correction is not None:
        values |= {
            "weighted": labels,
            "tis_weight": correction.weight.sum(),
            "tis_truncated": correction.truncated.sum(),
            "tis_masked": labels - part.tokens,
        }
    return values


class _Totals:
    """Sums and maxima over the rows of a step, in float64 on the device."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)

    def add(self, values: Values) -> None:
        wanted = {m.mean_of for m in METRICS.values() if m.mean_of and m.over in values}
        # A wrong name would make a metric 0 without a word.
        if wrong := (values.keys() - {*_SUMS, *_MAXIMA}) | (wanted - values.keys()):
            raise KeyError(f"StepRecord has other metrics: {', '.join(sorted(wrong))}")
        none = torch.zeros((), device=self._sums.device)

        def column(names: list[str]) -> torch.Tensor:
            return torch.stack([values.get(name, none).double() for name in names])

        self._sums += column(_SUMS)
        self._maxima = torch.maximum(self._maxima, column(_MAXIMA))

    def over(self, world: World) -> _Totals:
        self._sums, self._maxima = world.total(self._sums), world.largest(self._maxima)
        return self

    def outcome(self, denominator: torch.Tensor, norm: torch.Tensor, lr: float) -> StepOutcome:
        more = torch.stack([denominator.double(), norm.double()])
        # The only transfer to the CPU: it waits for the whole step on the device.
        *found, divisor, grad_norm = torch.cat([self._sums, self._maxima, more]).tolist()
        totals = dict(zip((*_SUMS, *_MAXIMA), found, strict=True))
        loss = totals["loss"] / divisor + totals["balance"]
        metrics = {"loss": loss, "grad_norm": grad_norm, "lr": lr}
        for name, metric in METRICS.items():
            if metric.max_of:
                metrics[name] = totals[metric.max_of]
            elif metric.mean_of and totals[metric.over]:
                metrics[name] = totals[metric.mean_of] / totals[metric.over]
            elif metric.mean_of and not metric.optional:
                metrics[name] = math.nan
        diffs = DiffSums(**{each.name: totals[f"diffs.{each.name}"] for each in fields(DiffSums)})
        return StepOutcome(metrics, replace(diffs, tokens=int(diffs.tokens)), int(totals["labels"]))
