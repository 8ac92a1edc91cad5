"""KL to a frozen reference and to a teacher: float64 formulas, packing, adapters, ends of
sequences."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.made_rollouts import plain_logprobs, rollouts_of
from trainer_core.config import TrainingConfig
from trainer_core.objective.loss import reference_kl, teacher_kl
from trainer_core.objective.registry import Objective
from trainer_core.optimization.optimizers import Stepper
from trainer_core.optimization.step import StepOutcome, accumulate
from trainer_core.policy.load import load_model
from trainer_core.policy.lora import add_adapter
from trainer_core.policy.reference import Reference
from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.fields import Teacher
from trainer_core.rollouts.packing import pack

CPU = torch.device("cpu")
REF, DISTILL = 0.3, 0.7


def _config(base: Path, **fields: object) -> TrainingConfig:
    own = {"ref_kl_coef": REF, "distill_coef": DISTILL, "ratio_base": "proximal"} | fields
    return TrainingConfig.model_validate(
        {"model_name": str(base), "optimizer": "adamw", "max_grad_norm": 0, **own}
    )


def _moved(base: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The base model some way off, the same in every type."""
    model = load_model(base, dtype, CPU)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    if dtype == torch.float64:
        model.base_model.rotary_emb.double()
    return model


def _sent(rollouts: list[Rollout]) -> list[Rollout]:
    """Some bring logprobs of a reference, some of those with a gap; some a teacher, for some tokens
    or all."""
    rng = np.random.default_rng(5)
    made = []
    for i, r in enumerate(rollouts):
        length, k = len(r.tokens), 2 + i % 3
        reference = rng.uniform(-3, 0, length).astype(np.float32)
        reference[:: 2 if i % 4 == 0 else length + 1] = np.nan
        ids = np.stack([rng.choice(14, k, replace=False) for _ in range(length)])
        logprobs = np.log(rng.dirichlet(np.ones(k + 1), length)[:, :k]).astype(np.float32)
        logprobs[: i % 3] = -np.inf
        logprobs[-1, 1:] = -np.inf
        teacher = Teacher(ids, logprobs) if i % 2 else None
        made.append(replace(r, reference=reference if i % 2 == 0 else None, teacher=teacher))
    return made


def _teacher_kl(model: torch.nn.Module, r: Rollout) -> tuple[torch.Tensor, int]:
    """Sum over the trained tokens with a teacher of KL over K + 1 outcomes, from full logits; and
    how many."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    if r.teacher is None:
        return total, count
    everything = model(torch.from_numpy(r.tokens)[None]).logits[0].double() / r.temperature
    for at in np.flatnonzero(r.trained):
        named = np.isfinite(r.teacher.logprobs[at])
        if not named.any():
            continue
        ours = everything[at - 1].softmax(-1)[torch.from_numpy(r.teacher.ids[at][named])]
        theirs = torch.from_numpy(r.teacher.logprobs[at][named]).double().exp()
        p, q = (torch.cat([x, 1 - x.sum(0, keepdim=True)]) for x in (ours, theirs))
        total, count = total + (p * (p / q).log()).sum(), count + 1
    return total, count


def _by_hand(
    policy: torch.nn.Module, frozen: torch.nn.Module, rollouts: list[Rollout]
) -> dict[str, torch.Tensor]:
    """The step of GRPO with `ratio_base = proximal` (so ratio 1), in float64, sequence by
    sequence."""
    sums = {
        name: torch.zeros((), dtype=torch.float64)
        for name in ("loss", "tokens", "ref", "taught", "distill")
    }
    for r in rollouts:
        logprobs = plain_logprobs(policy, r)
        with torch.no_grad():
            own = plain_logprobs(frozen, r)
        sent = (
            torch.full_like(own, math.nan)
            if r.reference is None
            else torch.from_numpy(r.reference[r.trained]).double()
        )
        gap = torch.where(sent.isnan(), own, sent) - logprobs
        k3 = (gap.exp() - 1 - gap).clamp(max=10.0)  # where verl bounds it, too
        weight = (logprobs.detach() - torch.from_numpy(r.logprobs[r.trained])).exp().clamp(max=2.0)
        ratio = (logprobs - logprobs.detach()).exp()
        objective = -weight * ratio * torch.from_numpy(r.advantages[r.trained]).double()
        distill, count = _teacher_kl(policy, r)
        sums["loss"] = sums["loss"] + objective.sum() + REF * k3.sum() + DISTILL * distill
        sums["tokens"] += len(logprobs)
        sums["ref"] += k3.detach().sum()
        sums["distill"] += distill.detach()
        sums["taught"] += count
    return sums


def _step(
    policy: torch.nn.Module, rollouts: list[Rollout], config: TrainingConfig, budget: int
) -> StepOutcome:
    return accumulate(
        policy,
        Stepper(policy, config),
        pack(rollouts, budget),
        Objective(config),
        1,
        reference=Reference(config, policy, CPU),
    )


@pytest.mark.parametrize("budget", [1, 60])
def test_step_against_float64(base: Path, budget: int) -> None:
    rollouts, policy, exact = (
        _sent(rollouts_of()),
        _moved(base, torch.float32),
        _moved(base, torch.float64),
    )
    outcome = _step(policy, rollouts, _config(base), budget)
    frozen = load_model(base, torch.float64, CPU)
    frozen.base_model.rotary_emb.double()
    sums = _by_hand(exact, frozen, rollouts)
    (sums["loss"] / sums["tokens"]).backward()
    got = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]).double()
    wanted = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    assert (got - wanted).norm() / wanted.norm() < 1e-5
    assert outcome.metrics["loss"] == pytest.approx(
        (sums["loss"] / sums["tokens"]).item(), rel=1e-5
    )
    assert outcome.metrics["ref_kl"] == pytest.approx(
        (sums["ref"] / sums["tokens"]).item(), rel=1e-5
    )
    assert outcome.metrics["distill_kl"] == pytest.approx(
        (sums["distill"] / sums["taught"]).item(), rel=1e-5
    )


def test_adapters_off_are_the_reference_and_on_again_afterwards(base: Path) -> None:
    """At the base model's own weights, whatever the adapters have become; their gradient stays
    theirs."""
    config = _config(base, weight_bridge_mode="lora_only", distill_coef=0.0)
    policy = load_model(base, torch.float32, CPU)
    add_adapter(policy, config)
    rollouts = rollouts_of()
    trained = [p for p in policy.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter += 0.3 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
        before = torch.cat([plain_logprobs(policy, r) for r in rollouts])
        frozen = load_model(base, torch.float32, CPU)
        gaps = torch.cat([plain_logprobs(frozen, r) for r in rollouts]) - before
    outcome = _step(policy, rollouts, config, 60)
    assert (
        outcome.metrics["ref_kl"] == pytest.approx((gaps.exp() - 1 - gaps).mean().item(), rel=1e-4)
        and outcome.metrics["ref_kl"] > 1e-3
    )
    assert "distill_kl" not in outcome.metrics
    assert all(p.requires_grad and p.grad is not None for p in trained)
    assert sum(p.requires_grad for p in policy.parameters()) == len(trained)
    with torch.no_grad():
        assert torch.equal(torch.cat([plain_logprobs(policy, r) for r in rollouts]), before)


def test_a_model_that_is_its_reference_is_not_pulled(base: Path) -> None:
    config = _config(base, distill_coef=0.0)
    still = [replace(r, advantages=np.zeros_like(r.advantages)) for r in rollouts_of(4)]
    outcome = _step(load_model(base, torch.float32, CPU), still, config, 60)
    assert (
        outcome.metrics["ref_kl"] == pytest.approx(0, abs=1e-9)
        and outcome.metrics["grad_norm"] < 1e-4
    )


def test_k3_stays_finite_and_knows_no_reference() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -50.0], requires_grad=True)
    values = reference_kl(logprobs, torch.tensor([math.nan, -1.5, -0.1]))
    values.sum().backward()
    assert (
        values[0] == 0
        and values[1].item() == pytest.approx(math.exp(-0.5) - 0.5)
        and values.isfinite().all()
    )
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx(
        [0.0, 1 - math.exp(-0.5), 0.0]
    )


@pytest.mark.parametrize("k", [1, 3, 16])
def test_reverse_kl_is_a_divergence_and_below_that_of_the_vocabulary(k: int) -> None:
    """0 only where both agree; with all tokens named it is the whole divergence."""
    logits = torch.randn(50, 16, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    ours, theirs = logits.log_softmax(1), logits.flip(0).log_softmax(1)
    top = theirs.topk(k, dim=1)
    named = teacher_kl(ours.gather(1, top.indices), top.values)
    whole = (ours.exp() * (ours - theirs)).sum(1)
    assert (named > 0).all() and (named <= whole + 1e-4).all()
    if k == 16:
        torch.testing.assert_close(named, whole, atol=1e-4, rtol=0)
    same = teacher_kl(theirs.gather(1, top.indices), top.values)
    assert same.abs().max() < 1e-9


def test_no_teacher_is_no_term_and_no_gradient() -> None:
    logprobs = torch.full((2, 2), -1.0, requires_grad=True)
    values = teacher_kl(logprobs, torch.tensor([[-math.inf, -math.inf], [0.0, -math.inf]]))
    values.sum().backward()
    assert values[0] == 0 and values[1] > 0 and logprobs.grad is not None
    assert (
        logprobs.grad[0].tolist() == [0, 0]
        and logprobs.grad[1][1] == 0
        and logprobs.grad.isfinite().all()
    )
