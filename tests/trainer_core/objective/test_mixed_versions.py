"""Completions whose tokens several weight versions made, in float64 against formulas in numpy.

The policy is a table of logits by the previous token, so its gradient is known in closed form.
Token t of a completion comes from version t.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from trainer_core.config import TrainingConfig
from trainer_core.objective.loss import Sequences
from trainer_core.objective.registry import Objective

Table = NDArray[np.float64]
"""[WORDS + 1, WORDS] logits; the last row is that of the first token."""
WORDS, LENGTH = 3, 3
COMPLETIONS = list(product(range(WORDS), repeat=LENGTH))


def tables(seed: int, apart: float) -> tuple[Table, list[Table]]:
    """The trainer's policy, and one version for each token."""
    rng = np.random.default_rng(seed)
    policy = rng.normal(size=(WORDS + 1, WORDS))
    return policy, [policy + apart * rng.normal(size=policy.shape) for _ in range(LENGTH)]


def log_pi(table: Table) -> Table:
    return table - np.log(np.exp(table).sum(1, keepdims=True))


def steps(tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """(t, token before, token); before the first there is none."""
    return [(t, tokens[t - 1] if t else WORDS, token) for t, token in enumerate(tokens)]


def logprobs_by(versions: Sequence[Table], tokens: Sequence[int]) -> Table:
    """[T] logprobs of a completion whose token t is that of version t."""
    return np.array([log_pi(versions[t])[row, token] for t, row, token in steps(tokens)])


def score(table: Table, row: int, token: int) -> Table:
    """Gradient of log pi(token | row): one-hot minus probabilities, in that row."""
    gradient = np.zeros_like(table)
    gradient[row] = -np.exp(log_pi(table)[row])
    gradient[row, token] += 1.0
    return gradient


def ours(
    objective: Objective,
    policy: Table,
    tokens: Sequence[int],
    rollout: Table,
    advantages: Table,
    base: Table | None = None,
) -> Table:
    """Gradient of the trainer's loss, summed over the tokens of one completion.

    `base` are the trainer's logprobs at batch start; None: the policy has not moved since.
    """
    table = torch.tensor(policy, requires_grad=True)
    rows = [row for _, row, _ in steps(tokens)]
    logprobs = table.log_softmax(1)[rows, list(tokens)]
    alone = Sequences(torch.zeros(len(rows), dtype=torch.int64), 1)
    made = torch.tensor(rollout)
    fixed = logprobs.detach() if base is None else torch.tensor(base)
    correction = objective.correction(fixed, made, alone)
    objective.sums(logprobs, made, torch.tensor(advantages), alone, correction).loss.backward()
    assert table.grad is not None
    return table.grad.numpy()


def config(**fields: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"model_name": "m", "dual_clip": 0, **fields})


@pytest.mark.parametrize("cap", [1.2, 2.0, 1e9])
@pytest.mark.parametrize("moved", [0.0, 0.6], ids=["first-step", "clipped"])
@pytest.mark.parametrize("advantage", [1.5, -0.7])
def test_the_gradient_is_that_of_truncated_importance_sampling_by_token(
    cap: float, moved: float, advantage: float
) -> None:
    """-A min(pi_old / mu_t, C) r grad log pi, where r = pi / pi_old is inside its clip range."""
    old, versions = tables(1, apart=0.8)
    policy = old + moved * np.random.default_rng(2).normal(size=old.shape)
    objective = Objective(config(tis_cap=cap)).for_lag(LENGTH)
    truncated = clipped = 0
    for tokens in COMPLETIONS:
        expected = np.zeros_like(policy)
        for t, row, token in steps(tokens):
            pi, pi_old, mu = (
                np.exp(log_pi(table)[row, token]) for table in (policy, old, versions[t])
            )
            weight, ratio = min(pi_old / mu, cap), pi / pi_old
            stopped = ratio > 1.2 if advantage > 0 else ratio < 0.8
            truncated, clipped = truncated + (pi_old / mu > cap), clipped + stopped
            if not stopped:
                expected -= advantage * weight * ratio * score(policy, row, token)
        rollout, base = logprobs_by(versions, tokens), logprobs_by([old] * LENGTH, tokens)
        found = ours(objective, policy, tokens, rollout, np.full(LENGTH, advantage), base)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert (truncated > 0) == (cap < 1e9) and (clipped > 0) == (moved > 0)


@pytest.mark.parametrize("advantage", [1.5, -0.7])
def test_without_correction_the_clipped_ratio_is_that_of_each_token_s_version(
    advantage: float,
) -> None:
    """-A r grad log pi with r = pi / mu_t, inside the clip range: a batch of lag 1."""
    policy, versions = tables(1, apart=0.3)
    objective = Objective(config()).for_lag(1)
    for tokens in COMPLETIONS:
        expected = np.zeros_like(policy)
        for t, row, token in steps(tokens):
            ratio = np.exp((log_pi(policy) - log_pi(versions[t]))[row, token])
            if not (ratio > 1.2 if advantage > 0 else ratio < 0.8):
                expected -= advantage * ratio * score(policy, row, token)
        rollout = logprobs_by(versions, tokens)
        found = ours(objective, policy, tokens, rollout, np.full(LENGTH, advantage))
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def reward(tokens: Sequence[int]) -> float:
    return float(np.random.default_rng([7, *tokens]).normal())


def on_policy(policy: Table) -> Table:
    """E over the policy of -reward x gradient of log pi(completion), by enumeration."""
    total = np.zeros_like(policy)
    for tokens in COMPLETIONS:
        chance = np.exp(logprobs_by([policy] * LENGTH, tokens).sum())
        total -= (
            chance * reward(tokens) * sum(score(policy, row, to) for _, row, to in steps(tokens))
        )
    return total


def test_the_weights_make_mixed_completions_unbiased() -> None:
    """Over all completions of the mixed versions, the expectation is the on-policy gradient.

    A token's own weight comes from the trainer. Those of the other tokens are in its advantage:
    only the product of all weights corrects the whole completion.
    """
    policy, versions = tables(3, apart=0.7)
    objective = Objective(config(tis_cap=1e9)).for_lag(LENGTH)
    total = np.zeros_like(policy)
    for tokens in COMPLETIONS:
        rollout = logprobs_by(versions, tokens)
        weights = np.exp(logprobs_by([policy] * LENGTH, tokens) - rollout)
        others = np.array([np.delete(weights, t).prod() for t in range(LENGTH)])
        gradient = ours(objective, policy, tokens, rollout, reward(tokens) * others)
        total += np.exp(rollout.sum()) * gradient
    np.testing.assert_allclose(total, on_policy(policy), rtol=1e-10, atol=1e-12)


def test_weights_by_token_are_unbiased_at_the_prefixes_of_the_rollouts() -> None:
    """The trainer's own weights alone: each token as if the policy had drawn it, between the prefix
    and the rest that the older versions made."""
    policy, versions = tables(3, apart=0.7)
    objective = Objective(config(tis_cap=1e9)).for_lag(LENGTH)
    total, expected = np.zeros_like(policy), np.zeros_like(policy)
    for tokens in COMPLETIONS:
        rollout, own = logprobs_by(versions, tokens), logprobs_by([policy] * LENGTH, tokens)
        advantages = np.full(LENGTH, reward(tokens))
        total += np.exp(rollout.sum()) * ours(objective, policy, tokens, rollout, advantages)
        for t, row, token in steps(tokens):
            chance = np.exp(rollout[:t].sum() + own[t] + rollout[t + 1 :].sum())
            expected -= chance * reward(tokens) * score(policy, row, token)
    np.testing.assert_allclose(total, expected, rtol=1e-10, atol=1e-12)


def bias(apart: float, seed: int, *, corrected: bool) -> float:
    """Distance of the expected gradient from the on-policy one, relative to that."""
    policy, versions = tables(seed, apart)
    objective = Objective(config(tis_cap=1e9)).for_lag(LENGTH)
    total = np.zeros_like(policy)
    for tokens in COMPLETIONS:
        rollout = logprobs_by(versions, tokens)
        own = logprobs_by([policy] * LENGTH, tokens)
        given = rollout if corrected else own
        advantages = np.full(LENGTH, reward(tokens))
        total += np.exp(rollout.sum()) * ours(objective, policy, tokens, given, advantages)
    exact = on_policy(policy)
    return float(np.linalg.norm(total - exact) / np.linalg.norm(exact))


def test_what_weights_by_token_leave_shrinks_with_the_distance_of_the_versions() -> None:
    near, far = (
        np.mean([bias(apart, seed, corrected=True) for seed in range(8)]) for apart in (0.05, 0.1)
    )
    without = np.mean([bias(0.1, seed, corrected=False) for seed in range(8)])
    assert near == pytest.approx(far / 2, rel=0.1), "in proportion"
    assert far < without
