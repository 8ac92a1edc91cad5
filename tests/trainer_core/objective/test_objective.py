"""The objective: clipping on both sides, REINFORCE at ratio 1, verdicts with causes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_core.objective.alignment import DiffSums, Thresholds, diff_sums, thresholds
from trainer_core.objective.loss import grpo_loss


def _one(ratio: float, advantage: float, **options: float) -> tuple[float, float]:
    """Loss and its gradient by the logprob, for one token."""
    logprob = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    sums = grpo_loss(logprob, torch.tensor([-1.0]), torch.tensor([advantage]), **options)
    sums.loss.backward()
    assert logprob.grad is not None
    return sums.loss.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 1.0, -1.0, -1.0),
        (1.0, -1.0, 1.0, 1.0),
        (1.5, 1.0, -1.2, 0.0),  # already raised enough: clipped
        (1.5, -1.0, 1.5, 1.5),  # raised though it should fall: full gradient back
        (0.5, 1.0, -0.5, -0.5),  # fallen though it should rise: full gradient back
        (0.5, -1.0, 0.8, 0.0),  # already lowered enough: clipped
        (3.0, -1.0, 3.0, 3.0),
        (1.1, 1.0, -1.1, -1.1),
        (0.9, -1.0, 0.9, 0.9),
        (2.0, 0.0, 0.0, 0.0),
    ],
)
def test_clip_truth_table(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    got = _one(ratio, advantage, clip_eps=0.2)
    assert got == pytest.approx((loss, gradient), abs=1e-6)


def test_ratio_one_is_reinforce() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 7, requires_grad=True)
    labels, advantages = torch.randint(7, (50,)), torch.randn(50)
    logprobs = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    grpo = torch.autograd.grad(
        grpo_loss(logprobs, logprobs.detach(), advantages).loss, logits, retain_graph=True
    )[0]
    reinforce = torch.autograd.grad(-(logprobs * advantages).sum(), logits)[0]
    torch.testing.assert_close(grpo, reinforce, atol=1e-7, rtol=1e-6)


def test_sums_count_what_they_say() -> None:
    ratio = torch.tensor([1.0, 1.5, 0.5, 1.1])
    sums = grpo_loss(ratio.log() - 2, torch.full((4,), -2.0), torch.ones(4), clip_eps=0.2)
    assert sums.tokens.item() == 4
    assert sums.clipped.item() == 2
    assert sums.ratio.item() == pytest.approx(4.1, abs=1e-5)
    assert sums.kl_k3.item() == pytest.approx(
        sum(r - 1 - math.log(r) for r in ratio.tolist()), abs=1e-5
    )


def test_kl_pulls_back_to_the_rollout_policy() -> None:
    assert _one(1.5, 0.0, kl_coef=1.0)[1] > 0 > _one(0.5, 0.0, kl_coef=1.0)[1]
    assert _one(1.0, 0.0, kl_coef=1.0) == pytest.approx((0.0, 0.0), abs=1e-6)


def test_a_huge_ratio_stays_finite() -> None:
    for advantage in (1.0, -1.0):
        logprob = torch.tensor([-0.1], requires_grad=True)
        loss = grpo_loss(logprob, torch.tensor([-500.0]), torch.tensor([advantage])).loss
        loss.backward()
        assert logprob.grad is not None
        assert torch.isfinite(loss) and torch.isfinite(logprob.grad).all()


def test_half_precision_input_is_computed_in_float32() -> None:
    exact = grpo_loss(torch.tensor([-1.0039]).bfloat16(), torch.tensor([-1.0]), torch.tensor([1.0]))
    assert exact.loss.dtype == torch.float32


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.floats(-3, 3)), min_size=2, max_size=30
    ),
    st.data(),
)
def test_sums_add_up_over_any_split(
    tokens: list[tuple[float, float, float]], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, len(tokens) - 1))
    columns = torch.tensor(tokens).T
    whole = grpo_loss(*columns, kl_coef=0.1)
    parts = [grpo_loss(*columns[:, :cut], kl_coef=0.1), grpo_loss(*columns[:, cut:], kl_coef=0.1)]
    for field in whole._fields:
        total = (max if field == "ratio_max" else sum)(
            getattr(part, field).item() for part in parts
        )
        assert getattr(whole, field).item() == pytest.approx(total, rel=1e-4, abs=1e-4)


def test_diff_sums_and_nan() -> None:
    sums = diff_sums([-1.0, -2.0], [-1.5, -1.0])
    assert (sums.tokens, sums.diff, sums.abs_diff, sums.abs_max) == (2, -0.5, 1.5, 1.0)
    assert math.isnan((diff_sums([math.nan], [-1.0]) + sums).abs_max)
    assert math.isnan((sums + diff_sums([math.nan, -1.0], [-1.0, -1.0])).abs_max)
    assert DiffSums().abs_mean is None


def test_thresholds_follow_the_dtype_and_the_flags() -> None:
    assert thresholds("bfloat16").ok == 0.1
    assert thresholds("float32").ok == 1e-3
    assert thresholds("float32", 0.2, None) == Thresholds(0.2, 0.2)
