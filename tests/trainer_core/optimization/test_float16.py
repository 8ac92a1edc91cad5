"""float16: gradients that underflow, steps that overflow, and the loss scale."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.made_rollouts import Beside, rollouts_of
from trainer_core.config import TrainingConfig
from trainer_core.objective.registry import Counts, Objective
from trainer_core.optimization.optimizers import LossScale, Stepper
from trainer_core.optimization.step import StepOutcome, accumulate
from trainer_core.policy.load import load_model
from trainer_core.rollouts.packing import pack

CPU = torch.device("cpu")
OTHERS = (0, 40_000, 4_000_000)
"""Tokens that the rest of a step trains: the gradient of ours is that much smaller."""


def _stepper(base: Path, dtype: torch.dtype, **fields: Any) -> tuple[torch.nn.Module, Stepper]:
    model = load_model(str(base), dtype, CPU)
    if dtype == torch.float64:
        model.base_model.rotary_emb.double()
    config = TrainingConfig.model_validate(
        {"model_name": "m", "optimizer": "adamw", "max_grad_norm": 0, **fields}
    )
    return model, Stepper(model, config)


def _accumulate(
    model: torch.nn.Module, stepper: Stepper, others: int = 0, *, threads: int = 1
) -> StepOutcome:
    rest = Counts(
        torch.tensor(float(others), dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    )
    rows = pack(rollouts_of(), 40)
    return accumulate(
        model, stepper, rows, Objective(stepper.config), 1, world=Beside(rest), threads=threads
    )


def _gradient(stepper: Stepper) -> torch.Tensor:
    return torch.cat([master.grad.double().flatten() for master in stepper.masters])


def _error(base: Path, others: int, *, scaled: bool, threads: int = 1) -> float:
    """Relative error of the gradient in float16."""
    exact_model, exact = _stepper(base, torch.float64)
    model, half = _stepper(base, torch.float16)
    assert half.scale is not None and exact.scale is None
    half.scale = half.scale if scaled else None
    _accumulate(exact_model, exact, others)
    _accumulate(model, half, others, threads=threads)
    wanted, found = _gradient(exact), _gradient(half)
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("others", OTHERS)
def test_the_gradient_does_not_sink_below_float16(base: Path, others: int) -> None:
    error = _error(base, others, scaled=True)
    print(f"{others:,} other tokens: error {error:.4f}")
    assert error < 0.01
    if others == OTHERS[-1]:
        assert _error(base, others, scaled=False) > 0.1, "what the scale is for"
        assert _error(base, others, scaled=True, threads=2) < 0.01


def test_what_overflows_is_left_out_and_the_scale_halved(base: Path) -> None:
    model, stepper = _stepper(base, torch.float16, lr=1e-3)
    start = [p.detach().clone() for p in stepper.params]
    stepper.scale = LossScale(16)
    seen = []
    while not (outcome := _accumulate(model, stepper)).finite:
        seen.append(stepper.scale.exponent)
        stepper.zero_grad()
        assert not math.isfinite(outcome.metrics["grad_norm"]) and math.isfinite(
            outcome.metrics["loss"]
        )
    assert seen and seen == list(range(15, 15 - len(seen), -1))
    assert all(map(torch.equal, stepper.params, start))
    stepper.compute()
    stepper.write()
    assert not all(map(torch.equal, stepper.params, start))
    again = _stepper(base, torch.float16)[1]
    again.load_state_dict(stepper.state_dict())
    assert again.scale is not None and again.scale.state() == stepper.scale.state() == [seen[-1], 1]


def test_the_scale_is_a_power_of_two_that_grows_back() -> None:
    scale = LossScale()
    for denominator in (1.0, 3.0, 256.0, 40_256.0, 500.5):
        factor = scale.factor(torch.tensor(denominator, dtype=torch.float64)).item()
        assert math.log2(factor).is_integer() and 0.5 <= denominator / factor < 1
    for _ in range(LossScale.PATIENCE):
        scale.saw(True)
    assert scale.state() == [1, 0]
    scale.saw(False)
    scale.saw(True)
    assert scale.state() == [0, 1]


def test_only_float16_is_scaled(base: Path) -> None:
    assert all(_stepper(base, dtype)[1].scale is None for dtype in (torch.float32, torch.bfloat16))
