"""Why do trainer and server disagree? Suppose a cause, compute the logprobs anew under it, see whether they agree then.

Run only on a verdict that is not ok, on a few sequences, before weights change. A supposition is accepted when it
accounts for most of the difference, so policy lag or noise is never taken for one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atropos_common.records import HEAD_DTYPE, OTHER_WEIGHTS, POLICY_LAG, SAMPLING, SHIFTED, TEMPERATURE
from trainer_core.objective.alignment import Alignment
from trainer_core.policy.logprobs import chunked_logprobs, completions_logprobs, predicting_states
from trainer_core.probe import Answers
from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.packing import PackedRow, pack

LEFT = 0.3
"""A cause accounts for a difference of which at most this share is left under it."""
NOISE = 0.05
"""Nats by which two computations of a logprob may differ in half precision."""
NEAREST_TEMPERATURE = 0.04
"""Share by which a temperature has to differ before it is called the cause."""
SEQUENCES = 6
FEWEST_TOKENS = 8
LAG_INTERVAL = 10
"""A lag of several versions is an ordinary cause: look behind it only at every so many steps."""


@torch.no_grad()
def explain(
    judged: Alignment, model: torch.nn.Module, rollouts: Sequence[Rollout], answers: Answers, *, step: int,
    lag_max: float | None,
) -> Alignment:  # fmt: skip
    """`judged`, or a mismatch with the cause that accounts for it.

    Args:
        rollouts: of the step's batch.
        answers: of the step's probe, at the model's present weights; empty when there was none.
        lag_max: oldest rollout in weight versions; null when unknown.
    """
    if judged.verdict == "ok":
        return judged
    cause = judged.cause.partition(":")[0]
    often = lag_max is None or lag_max <= 1 or step % LAG_INTERVAL == 1
    if cause == SAMPLING or (cause == POLICY_LAG and often):
        return judged.explained(_of_rollouts(model, rollouts))
    return judged.explained(_of_head(model, answers)) if cause == OTHER_WEIGHTS else judged


def _of_rollouts(model: torch.nn.Module, rollouts: Sequence[Rollout]) -> str | None:
    chosen = [r for r in rollouts if r.trained.any()][:SEQUENCES]
    rows = pack(chosen, max((len(r.tokens) for r in chosen), default=0) * len(chosen))
    if not rows or len(rows[0].labels) < FEWEST_TOKENS:
        return None
    row = rows[0].to(next(model.parameters()).device)
    scored = _Scored(model, row)
    return _shifted(scored) or _temperature(scored) or _filtered(scored)


class _Scored:
    """A packed row whose hidden states are kept, so that other temperatures cost a product with the head alone."""

    def __init__(self, model: torch.nn.Module, row: PackedRow) -> None:
        self.row = row
        self.head = model.get_output_embeddings()
        self.states = predicting_states(model, row)
        self.train = self.at(1.0)

    def at(self, factor: float) -> torch.Tensor:
        """Logprobs of the labels with every temperature times `factor`, [T]."""
        temperatures = self.row.temperatures * factor
        return chunked_logprobs(self.states, self.head.weight, self.head.bias, self.row.labels, temperatures)

    def left(self, factor: float) -> float:
        """Mean |trainer - rollout| then."""
        return float((self.at(factor) - self.row.logprobs).abs().mean())


def _shifted(scored: _Scored) -> str | None:
    """Do the rollouts' logprobs belong to the token before, or after?"""
    train, theirs, ids = scored.train, scored.row.logprobs, scored.row.sequences
    for mine, other, where in (
        (slice(1, None), slice(None, -1), "the token before"),
        (slice(None, -1), slice(1, None), "the next token"),
    ):
        inside = ids[mine] == ids[other]
        if int(inside.sum()) < FEWEST_TOKENS:
            continue
        as_given = (train[mine] - theirs[mine]).abs()[inside].mean()
        moved = (train[other] - theirs[mine]).abs()[inside].mean()
        if float(moved) <= LEFT * float(as_given):
            return f"{SHIFTED}: each rollout logprob is that of {where}"
    return None


def _temperature(scored: _Scored) -> str | None:
    """Is there a temperature at which both agree? One too close to ours is not told from an update that sharpened."""
    before = scored.left(1.0)
    best, width = 1.0, 2.0
    for _ in range(5):
        best = min((best * width ** (i / 3) for i in range(-6, 7)), key=scored.left)
        width **= 1 / 3
    if scored.left(best) > LEFT * before or abs(best - 1.0) < NEAREST_TEMPERATURE:
        return None
    assumed = float(scored.row.temperatures.median())
    raw = ": raw logprobs, or that temperature" if abs(best * assumed - 1.0) < 0.02 else ""
    return f"{TEMPERATURE}: the rollouts' logprobs fit {best * assumed:.2f}{raw}; the trainer counts with {assumed:.2f}"


def _filtered(scored: _Scored) -> str | None:
    """Is every token likelier to the server? So it is where a filter took the others' probability away."""
    surplus = scored.row.logprobs - scored.train
    if float(surplus.min()) < -NOISE or float(surplus.mean()) < NOISE:
        return None
    return (
        f"{SAMPLING}: every rollout logprob is above the trainer's, by {float(surplus.mean()):.2g} on average: top-p, "
        "top-k or min-p took the other tokens away"
    )


def _of_head(model: torch.nn.Module, answers: Answers) -> str | None:
    """Does the server multiply with its head in another type?"""
    pairs = [(prompt, done.token_ids) for prompt, *both in answers for done in both]
    theirs = torch.tensor([value for _, *both in answers for done in both for value in done.logprobs])
    if not len(theirs):
        return None

    def left(dtype: torch.dtype | None) -> float:
        mine = completions_logprobs(model, pairs, head_dtype=dtype)
        return float((torch.tensor([value for one in mine for value in one]) - theirs).abs().mean())

    own = model.get_output_embeddings().weight.dtype
    before = left(None)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if dtype != own and left(dtype) <= LEFT * before:
            return f"{HEAD_DTYPE}: the server computes with its head in {_name(dtype)}, the trainer in {_name(own)}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
