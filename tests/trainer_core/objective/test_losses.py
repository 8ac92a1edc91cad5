"""Every objective: clip truth table, REINFORCE at ratio 1, float64 gradients, the same for any
split."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.made_rollouts import Beside, plain_logprobs, rollouts_of
from trainer_core.config import TrainingConfig
from trainer_core.objective.loss import (
    Bounds,
    Correction,
    Sequences,
    cispo_loss,
    correct,
    grpo_loss,
    gspo_loss,
)
from trainer_core.objective.registry import OBJECTIVES, Counts, Objective, count
from trainer_core.optimization.optimizers import Stepper
from trainer_core.optimization.step import StepOutcome, _Totals, accumulate
from trainer_core.policy.load import load_model
from trainer_core.policy.logprobs import row_logprobs
from trainer_core.ranks.world import ALONE
from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.packing import PackedRow, pack

CPU = torch.device("cpu")
ALL = sorted(OBJECTIVES)
RATIOS = [
    {},
    {"ratio_base": "proximal"},
    {"ratio_base": "proximal", "tis_mask": "token", "tis_mask_high": 3.0},
    {"ratio_base": "proximal", "tis_mask": "sequence", "tis_mask_low": 0.2},
]


def _config(**fields: object) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {"model_name": "m", "optimizer": "adamw", "max_grad_norm": 0, **fields}
    )


DAPO = dict(
    zip(("clip_eps", "clip_eps_high"), Objective(_config(objective="dapo")).clip, strict=True)
)
TABLE = [
    # loss function, options, ratio, advantage, loss / A at that ratio, gradient of the loss
    *[
        (grpo_loss, {}, r, a, loss, grad)
        for r, a, loss, grad in [
            (1.0, 1.0, -1.0, -1.0),
            (1.0, -1.0, 1.0, 1.0),
            (1.5, 1.0, -1.2, 0.0),
            (1.5, -1.0, 1.5, 1.5),
            (0.5, 1.0, -0.5, -0.5),
            (0.5, -1.0, 0.8, 0.0),
            (3.0, -1.0, 3.0, 3.0),
            (1.1, 1.0, -1.1, -1.1),
            (0.9, -1.0, 0.9, 0.9),
            (2.0, 0.0, 0.0, 0.0),
        ]
    ],
    (grpo_loss, DAPO, 1.25, 1.0, -1.25, -1.25),  # inside the higher bound
    (grpo_loss, DAPO, 1.30, 1.0, -1.28, 0.0),
    (grpo_loss, DAPO, 0.75, -1.0, 0.8, 0.0),
    (grpo_loss, DAPO, 1.30, -1.0, 1.3, 1.3),
    (gspo_loss, {}, 1.0005, 1.0, -1.0004, 0.0),
    (gspo_loss, {}, 1.0003, 1.0, -1.0003, -1.0003),
    (gspo_loss, {}, 0.9995, -1.0, 0.9997, 0.0),
    (gspo_loss, {}, 0.5, 1.0, -0.5, -0.5),
    (grpo_loss, {"clip_eps": 0.2, "clip_eps_high": 0.5}, 1.4, 1.0, -1.4, -1.4),
    (grpo_loss, {"dual_clip": 3.0}, 5.0, -1.0, 3.0, 0.0),  # at most 3 |A|
    (grpo_loss, {"dual_clip": 3.0}, 2.0, -1.0, 2.0, 2.0),
    (grpo_loss, {"dual_clip": 3.0}, 5.0, 1.0, -1.2, 0.0),
    (gspo_loss, {"dual_clip": 3.0}, 5.0, -1.0, 3.0, 0.0),
]


def _one(
    function: Callable[..., object], ratio: float, advantage: float, **options: object
) -> tuple[float, float]:
    """Loss and its gradient by the logprob, for a sequence of one token."""
    rollout = torch.tensor([-1.0], dtype=torch.float64)
    logprob = (rollout + math.log(ratio)).requires_grad_()
    alone = Sequences(torch.zeros(1, dtype=torch.int64), 1)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    sums = function(logprob, rollout, advantages, sequences=alone, **options)
    sums.loss.backward()  # type: ignore[attr-defined]
    assert logprob.grad is not None
    return sums.loss.item(), logprob.grad.item()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("function", "options", "ratio", "advantage", "loss", "gradient"), TABLE)
def test_clip_truth_table(
    function: Callable[..., object],
    options: dict[str, object],
    ratio: float,
    advantage: float,
    loss: float,
    gradient: float,
) -> None:
    assert _one(function, ratio, advantage, **options) == pytest.approx((loss, gradient), abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [
        (1.0, 1.0, 1.0),
        (10.0, 1.0, 5.0),
        (10.0, -1.0, 5.0),
        (0.01, 1.0, 0.01),
        (0.01, -1.0, 0.01),
        (3.0, -2.0, 3.0),
    ],
)
def test_cispo_clips_the_weight_and_keeps_the_gradient(
    ratio: float, advantage: float, weight: float
) -> None:
    loss, gradient = _one(cispo_loss, ratio, advantage)
    assert gradient == pytest.approx(-weight * advantage)
    assert loss == pytest.approx(-weight * advantage * (math.log(ratio) - 1.0))
    assert _one(cispo_loss, 0.5, advantage, clip_eps=0.2)[1] == pytest.approx(-0.8 * advantage)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("denominator", ["tokens", "sequences"])
def test_ratio_one_is_reinforce(name: str, denominator: str) -> None:
    torch.manual_seed(0)
    ids = torch.tensor([0, 0, 0, 1, 2, 2])
    logits = torch.randn(6, 7, requires_grad=True)
    logprobs = logits.log_softmax(-1).gather(1, torch.randint(7, (6,))[:, None])[:, 0]
    advantages = torch.randn(6)
    objective = Objective(_config(objective=name, loss_denominator=denominator))
    sums = objective.sums(logprobs, logprobs.detach(), advantages, Sequences(ids, 3), None)
    weights = (
        1 / torch.tensor([3.0, 3, 3, 1, 2, 2]) if denominator == "sequences" else torch.ones(6)
    )
    got = torch.autograd.grad(sums.loss, logits, retain_graph=True)[0]
    expected = torch.autograd.grad(-(weights * logprobs * advantages).sum(), logits)[0]
    torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-6)


def test_gspo_has_one_ratio_for_a_sequence() -> None:
    """Against eq. 5 and 7 written down as they are, where all tokens of a sequence have one
    advantage."""
    torch.manual_seed(0)
    ids = torch.tensor([0, 0, 0, 1, 1])
    logprobs = torch.randn(5, dtype=torch.float64, requires_grad=True)
    rollout = logprobs.detach() + torch.tensor([0.5, -0.1, 0.2, -0.4, 0.1], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0], dtype=torch.float64)
    sums = gspo_loss(
        logprobs, rollout, advantages, clip_eps=0.1, clip_eps_high=0.1, sequences=Sequences(ids, 2)
    )
    gap = logprobs - rollout
    ratios = [gap[:3].mean().exp(), gap[3:].mean().exp()]
    clipped = [r.clamp(0.9, 1.1) for r in ratios]
    direct = -torch.minimum(ratios[0], clipped[0]) + 2 * torch.maximum(ratios[1], clipped[1])
    assert sums.loss.item() == pytest.approx(direct.item(), abs=1e-12)
    got = torch.autograd.grad(sums.loss, logprobs)[0]
    torch.testing.assert_close(got, torch.autograd.grad(direct, logprobs)[0])
    with pytest.raises(ValueError, match="sequences"):
        gspo_loss(logprobs, rollout, advantages)


def _published(
    name: str, logprobs: torch.Tensor, base: torch.Tensor, advantage: torch.Tensor
) -> torch.Tensor:
    """Loss of each token of one sequence, [T], as the papers write it."""
    ratio = (logprobs - base).exp()
    if name == "gspo":
        # eq. 14, since weights differ within a sequence; that it is eq. 5 where they do not has its
        # own test
        ratio = (logprobs - base).mean().exp().detach() * (logprobs - logprobs.detach()).exp()
    if name == "cispo":
        return -ratio.clamp(0.0, 5.0).detach() * advantage * logprobs
    low, high = {"dapo": (0.8, 1.28), "gspo": (1 - 3e-4, 1 + 4e-4)}.get(name, (0.8, 1.2))
    clipped = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    return -torch.where(
        advantage < 0, torch.maximum(clipped, 3.0 * advantage), clipped
    )  # the dual clip's default


def _reference(
    model: torch.nn.Module, rollouts: list[Rollout], config: TrainingConfig
) -> torch.Tensor:
    """The step's loss in float64, sequence by sequence."""
    per = {"dr_grpo": "constant", "gspo": "sequences"}.get(config.objective, "tokens")
    total, tokens, sequences = torch.zeros((), dtype=torch.float64), 0, 0
    for r in rollouts:
        logprobs = plain_logprobs(model, r)
        rollout = torch.from_numpy(r.logprobs[r.trained]).double()
        rollout = torch.where(rollout.isnan(), logprobs.detach(), rollout)
        advantage = torch.from_numpy(r.advantages[r.trained]).double()
        base, weight, keep = (
            rollout,
            torch.ones_like(rollout),
            torch.ones_like(rollout, dtype=torch.bool),
        )
        if config.ratio_base == "proximal":
            base = logprobs.detach()
            weight = (base - rollout).exp()
            inside = {
                "none": weight * 0 + 1,
                "token": weight,
                "sequence": (base - rollout).mean().exp() + weight * 0,
            }
            judged = inside[config.tis_mask]
            keep = (judged >= config.tis_mask_low) & (judged <= config.tis_mask_high)
            weight = weight.clamp(max=config.tis_cap)
        if not keep.any():
            continue
        q = (logprobs - rollout).exp()
        loss = weight[keep] * _published(
            config.objective, logprobs[keep], base[keep], advantage[keep]
        )
        loss = (
            loss + config.kl_coef * (q - 1 - q.log()).clamp(max=10.0)[keep]
        )  # where verl bounds it, too
        total = total + (loss.mean() if per == "sequences" else loss.sum())
        tokens, sequences = tokens + int(keep.sum()), sequences + 1
    return (
        total
        / {"tokens": tokens, "sequences": sequences, "constant": sequences * config.seq_len}[per]
    )


def _gradient(
    model: torch.nn.Module,
    rows: list[PackedRow],
    config: TrainingConfig,
    others: Counts | None = None,
) -> tuple[StepOutcome, torch.Tensor]:
    world = ALONE if others is None else Beside(others)
    outcome = accumulate(model, Stepper(model, config), rows, Objective(config), 1, world=world)
    return outcome, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _equals_float64(base: Path, rollouts: list[Rollout], config: TrainingConfig) -> StepOutcome:
    """Loss and gradient of a step are those of the formulas in float64."""
    outcome, gradient = _gradient(
        load_model(str(base), torch.float32, CPU), pack(rollouts, 60), config
    )
    exact = load_model(str(base), torch.float64, CPU)
    exact.base_model.rotary_emb.double()
    loss = _reference(exact, rollouts, config)
    loss.backward()
    reference = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    assert (gradient.double() - reference).norm() / reference.norm() < 1e-5
    assert outcome.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    return outcome


@pytest.mark.parametrize(
    "ratio", RATIOS, ids=["rollout", "proximal", "token-mask", "sequence-mask"]
)
@pytest.mark.parametrize("name", ALL)
def test_gradient_against_float64(base: Path, name: str, ratio: dict[str, object]) -> None:
    rollouts = rollouts_of(spread=6.0)
    config = _config(objective=name, kl_coef=0.05, seq_len=32, **ratio)
    outcome = _equals_float64(base, rollouts, config)
    if not ratio and name in ("grpo", "dapo", "dr_grpo"):
        assert outcome.metrics["dual_clip_fraction"] > 0 and outcome.metrics["ratio_max"] > 3
    assert (outcome.metrics.get("tis_masked_fraction", 0.0) > 0) == ("tis_mask" in ratio)


@pytest.mark.parametrize(("mask", "passes"), [("none", 0), ("token", 1)])
def test_a_single_step_asks_the_model_once_unless_a_mask_wants_to_know_first(
    base: Path, monkeypatch: pytest.MonkeyPatch, mask: str, passes: int
) -> None:
    asked = []
    monkeypatch.setattr(
        "trainer_core.optimization.step.row_logprobs",
        lambda model, row: asked.append(row) or row_logprobs(model, row),
    )
    config = _config(ratio_base="proximal", tis_mask=mask)
    outcome, _ = _gradient(
        load_model(str(base), torch.float32, CPU), pack(rollouts_of(), 10_000), config
    )
    assert (
        len(asked) == passes
        and outcome.metrics["ratio_mean"] == pytest.approx(1.0)
        and "tis_mean" in outcome.metrics
    )


@pytest.mark.parametrize("ratio", RATIOS[:2], ids=["rollout", "proximal"])
@pytest.mark.parametrize("name", ALL)
def test_missing_logprobs_are_the_trainers_own(
    base: Path, name: str, ratio: dict[str, object]
) -> None:
    """Some sequences came without, one with some: the loss is that of the trainer's own there, as a
    constant, and what is measured against the server's are the others alone."""
    rollouts = rollouts_of()
    measured = 0
    for number, each in enumerate(rollouts):
        missing = (
            np.arange(len(each.tokens)) % 2 == 0
            if number == 4
            else np.full(len(each.tokens), number % 3 == 0)
        )
        each.logprobs[missing] = np.nan
        measured += int((each.trained & ~missing).sum())
    config = _config(objective=name, kl_coef=0.05, **ratio)
    outcome = _equals_float64(base, rollouts, config)
    assert (
        outcome.tokens
        == sum(int(each.trained.sum()) for each in rollouts)
        > outcome.diffs.tokens
        == measured
        > 0
    )
    assert math.isfinite(outcome.diffs.abs_diff)


@pytest.mark.parametrize(
    "ratio", RATIOS, ids=["rollout", "proximal", "token-mask", "sequence-mask"]
)
@pytest.mark.parametrize("name", ALL)
def test_no_split_changes_anything(base: Path, name: str, ratio: dict[str, object]) -> None:
    """Rows of any size, any order, and ranks: the same loss and gradient."""
    model = load_model(str(base), torch.float32, CPU)
    rollouts = rollouts_of()
    config = _config(objective=name, **ratio)
    whole, gradient = _gradient(model, pack(rollouts, 10_000), config)
    for budget in (1, 45):
        split, other = _gradient(model, pack(rollouts[::-1], budget), config)
        torch.testing.assert_close(gradient, other, atol=1e-6, rtol=1e-5)
        assert whole.metrics["loss"] == pytest.approx(split.metrics["loss"], abs=1e-6)
        assert (
            whole.metrics["clip_fraction_low"],
            whole.metrics["clip_fraction_high"],
        ) == pytest.approx(
            (split.metrics["clip_fraction_low"], split.metrics["clip_fraction_high"])
        )
    halves = [pack(rollouts[:5], 40), pack(rollouts[5:], 40)]
    counts = [_counts(model, rows, config) for rows in halves]
    ranks = [
        _gradient(model, rows, config, others)
        for rows, others in zip(halves, counts[::-1], strict=True)
    ]
    torch.testing.assert_close(gradient, ranks[0][1] + ranks[1][1], atol=1e-6, rtol=1e-5)
    assert whole.metrics["loss"] == pytest.approx(
        sum(outcome.metrics["loss"] for outcome, _ in ranks), abs=1e-6
    )


def _counts(model: torch.nn.Module, rows: list[PackedRow], config: TrainingConfig) -> Counts:
    objective, found = Objective(config), []
    for row in rows:
        sequences = Sequences(row.sequences, len(row.lengths))
        found.append(
            (
                sequences,
                objective.correction(row_logprobs(model, row).detach(), row.logprobs, sequences),
            )
        )
    return count(found, CPU)


def test_a_longer_batch_of_the_same_weighs_the_same(base: Path) -> None:
    """Denominators: twice the same sequences give the same mean, whatever it is a mean of."""
    model = load_model(str(base), torch.float32, CPU)
    rollouts = rollouts_of(6)
    for name in ALL:
        once, twice = (
            _gradient(model, pack(r, 64), _config(objective=name))[1]
            for r in (rollouts, rollouts * 2)
        )
        torch.testing.assert_close(once, twice, atol=1e-6, rtol=1e-5)


def test_proximal_ratio_is_one_and_the_weight_is_what_is_left(base: Path) -> None:
    model = load_model(str(base), torch.float32, CPU)
    rollouts = rollouts_of()
    outcome, _ = _gradient(model, pack(rollouts, 64), _config(ratio_base="proximal", tis_cap=1.5))
    assert (outcome.metrics["ratio_mean"], outcome.metrics["clip_fraction"]) == (1.0, 0.0)
    with torch.no_grad():
        gaps = torch.cat(
            [plain_logprobs(model, r) - torch.from_numpy(r.logprobs[r.trained]) for r in rollouts]
        )
    assert outcome.metrics["tis_mean"] == pytest.approx(
        gaps.exp().clamp(max=1.5).mean().item(), rel=1e-4
    )
    assert outcome.metrics["tis_truncated_fraction"] == pytest.approx(
        (gaps.exp() > 1.5).double().mean().item()
    )
    assert outcome.metrics["tis_masked_fraction"] == 0
    plain, _ = _gradient(load_model(str(base), torch.float32, CPU), pack(rollouts, 64), _config())
    assert not {"tis_mean", "tis_truncated_fraction", "tis_masked_fraction"} & set(plain.metrics)
    assert plain.metrics["kl_k3"] == pytest.approx(outcome.metrics["kl_k3"], rel=1e-5), (
        "k3 is against the rollout policy in both"
    )


def test_all_masked_is_no_gradient_and_no_crash(base: Path) -> None:
    model = load_model(str(base), torch.float32, CPU)
    config = _config(ratio_base="proximal", tis_mask="token", tis_mask_low=1e6, tis_mask_high=1e7)
    outcome, gradient = _gradient(model, pack(rollouts_of(4), 64), config)
    assert (outcome.metrics["tis_masked_fraction"], outcome.metrics["loss"]) == (
        1.0,
        0.0,
    ) and not gradient.any()
    assert math.isnan(outcome.metrics["ratio_mean"]), "a mean over nothing is not 0"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=20),
    st.floats(0.5, 10),
    st.sampled_from(["none", "token", "sequence"]),
)
def test_weights_stay_within_their_bounds(
    pairs: list[tuple[float, float]], cap: float, mask: str
) -> None:
    base, rollout = torch.tensor(pairs).T.clone().requires_grad_()
    sequences = Sequences(torch.zeros(len(pairs), dtype=torch.int64), 1)
    found = correct(base, rollout.detach(), Bounds(cap, mask, 0.5, 2.0), sequences)
    ratio = (base - rollout).detach().exp()
    assert (
        (found.weight > 0).all()
        and (found.weight <= cap * (1 + 1e-6)).all()
        and not found.weight.requires_grad
    )
    assert (found.truncated == (ratio > cap)).all()
    torch.testing.assert_close(
        found.weight[~found.truncated], ratio.clamp(min=math.exp(-20))[~found.truncated]
    )
    if mask == "none":
        assert found.keep is None
    elif mask == "token":
        assert found.keep is not None and (found.keep == ((ratio >= 0.5) & (ratio <= 2.0))).all()
    else:
        assert found.keep is not None and found.keep.unique().numel() == 1


def test_ids_of_sequences_in_a_row() -> None:
    rollouts = rollouts_of(7)
    (row,) = pack(rollouts, 10_000)
    sizes = sorted(
        ((np.flatnonzero(r.trained)[-1], r.trained.sum()) for r in rollouts),
        key=lambda pair: -pair[0],
    )
    assert row.sequences.tolist() == [i for i, (_, size) in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize("ratio", RATIOS[:2], ids=["rollout", "proximal"])
@pytest.mark.parametrize("name", ALL)
def test_a_bandit_converges(name: str, ratio: dict[str, object]) -> None:
    """Ten arms, sequences of three pulls, rollouts one update old: the policy finds the arm that
    pays."""
    torch.manual_seed(0)
    logits = torch.zeros(10, requires_grad=True)
    config = _config(objective=name, **ratio)
    objective, optimizer = Objective(config), torch.optim.Adam([logits], lr=0.1)
    stale = logits.detach().clone()
    ids = torch.arange(64).repeat_interleave(3)
    for _ in range(250):
        pulls = torch.multinomial(stale.softmax(-1), 64 * 3, replacement=True)
        rewards = (pulls == 7).double().view(64, 3).mean(1).view(8, 8)
        centred = rewards - rewards.mean(1, keepdim=True)
        scale = (
            rewards.std(1, unbiased=False, keepdim=True).clamp(min=1e-8)
            if objective.advantage_std
            else 1.0
        )
        advantages = (centred / scale).flatten()[ids].float()
        logprobs, sampled = logits.log_softmax(-1)[pulls], stale.log_softmax(-1)[pulls]
        sequences = Sequences(ids, 64)
        correction = objective.correction(logprobs.detach(), sampled, sequences)
        part = objective.sums(logprobs, sampled, advantages, sequences, correction)
        stale = logits.detach().clone()
        optimizer.zero_grad()
        (part.loss / objective.denominator(count([(sequences, correction)], CPU))).backward()
        optimizer.step()
    assert logits.softmax(-1)[7] > 0.9


def test_one_wrong_logprob_does_not_outweigh_the_batch() -> None:
    """One of 40,000 tokens, to be lowered, came with a logprob that is 8 or 15 nats too low."""
    torch.manual_seed(0)
    for name in ("grpo", "dapo", "dr_grpo"):
        for gap in (8.0, 15.0, 30.0):
            logprobs = (-torch.rand(40_000)).requires_grad_()
            rollout = logprobs.detach() + 0.05 * torch.randn(40_000)
            rollout[7] -= gap
            advantages = torch.randn(40_000)
            advantages[7] = -1.0
            ids = Sequences(torch.arange(40_000) // 100, 400)
            shares = {}
            for bound in ({}, {"dual_clip": 0}):
                sums = Objective(_config(objective=name, **bound)).sums(
                    logprobs, rollout, advantages, ids, None
                )
                (gradient,) = torch.autograd.grad(sums.loss, logprobs)
                shares["dual_clip" in bound] = (gradient[7].abs() / gradient.norm()).item()
                assert sums.ratio_max.item() == pytest.approx(math.exp(min(gap, 20.0)), rel=0.5)
                assert sums.dual_clipped.item() == (0 if bound else 1)
            assert shares[False] == 0.0
            assert shares[True] > 0.99 or gap > 20, "without the bound it is all there is"


def test_what_no_objective_takes_is_refused() -> None:
    one, rows = torch.zeros(5), Sequences(torch.zeros(5, dtype=torch.int64), 1)
    for function in (grpo_loss, gspo_loss, cispo_loss):
        with pytest.raises(
            TypeError, match="no objective takes klcoef; choose from kl_coef, dual_clip"
        ):
            function(one, one, one, sequences=rows, klcoef=0.1)
        for values in ((one, one[:, None], one), (one, one, one[:, None]), (one, one[:4], one)):
            with pytest.raises(
                ValueError, match=r"one value for each of T tokens .* are \[5\], but"
            ):
                function(*values, sequences=rows)
        with pytest.raises(ValueError, match=r"sequences.ids \[4\]"):
            function(one, one, one, sequences=Sequences(rows.ids[:4], 1))
        with pytest.raises(ValueError, match=r"which is not \[T\]"):
            function(
                *[torch.zeros(2, 3)] * 3,
                sequences=rows._replace(ids=torch.zeros(2, 3, dtype=torch.int64)),
            )
        with pytest.raises(ValueError, match=r"correction.keep \[3\]"):
            function(
                one, one, one, sequences=rows, correction=Correction(one, one, one > 0, one[:3] > 0)
            )


def test_published_settings_and_what_overrides_them() -> None:
    published = {"cispo": (1.0, 4.0), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "grpo": (0.2, 0.2)}
    assert {name: Objective(_config(objective=name)).clip for name in ALL} == {
        **published,
        "dr_grpo": (0.2, 0.2),
    }
    assert Objective(_config(objective="gspo", clip_eps=0.1)).clip == (0.1, 0.1)
    assert Objective(_config(objective="gspo", clip_eps_high=0.1)).clip == (3e-4, 0.1)
    assert [Objective(_config(objective=name)).advantage_std for name in ("grpo", "dr_grpo")] == [
        True,
        False,
    ]
    assert Objective(_config(objective="dr_grpo", advantage_std=True)).advantage_std
    chosen = Objective(_config(objective="dapo", max_completion_tokens=20480)).selection(100)
    assert (chosen.drop_flat, chosen.overlong_buffer, chosen.vocab_size) == (True, 4096, 100)
    assert Objective(_config(max_completion_tokens=20480)).selection().overlong_buffer == 0
    counts = Counts(torch.tensor(30.0), torch.tensor(4.0))
    by = {
        per: Objective(_config(loss_denominator=per, max_completion_tokens=10))
        .denominator(counts)
        .item()
        for per in ("tokens", "sequences", "constant")
    }
    assert by == {"tokens": 30, "sequences": 4, "constant": 40}


def test_a_sum_that_no_metric_uses_or_that_is_missing_is_an_error() -> None:
    """A metric is found by its name: no order, and no default."""
    ones = torch.ones(())
    with pytest.raises(KeyError, match="mine"):
        _Totals(torch.device("cpu")).add({"mine": ones})
    with pytest.raises(KeyError, match="entropy"):
        _Totals(torch.device("cpu")).add({"labels": ones})


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
    assert _one(grpo_loss, 1.5, 0.0, kl_coef=1.0)[1] > 0
    assert _one(grpo_loss, 0.5, 0.0, kl_coef=1.0)[1] < 0
    assert _one(grpo_loss, 1.0, 0.0, kl_coef=1.0) == pytest.approx((0.0, 0.0), abs=1e-6)


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
