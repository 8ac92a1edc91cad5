"""Custom loss functions, right and wrong."""

from __future__ import annotations

import torch

from trainer_core import LossSums, Sequences

T = torch.Tensor


def clipped(logprobs: T, rollout_logprobs: T, advantages: T, sequences: Sequences) -> T:
    """GRPO's, with the default clip range."""
    ratio = (logprobs - rollout_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def sums(logprobs: T, rollout_logprobs: T, advantages: T, sequences: Sequences) -> LossSums:
    """REINFORCE, everything counted by itself."""
    zero, tokens = logprobs.new_zeros(()), torch.tensor(float(len(logprobs)))
    return LossSums(
        -(logprobs * advantages).sum(), tokens, zero, zero, tokens, zero, zero, zero, zero + 1
    )


def three_arguments(logprobs: T, rollout_logprobs: T, advantages: T) -> T:
    return -logprobs * advantages


def summed(logprobs: T, rollout_logprobs: T, advantages: T, sequences: Sequences) -> T:
    return (-logprobs * advantages).sum()


def number(logprobs: T, rollout_logprobs: T, advantages: T, sequences: Sequences) -> float:
    return 0.0


def nan(logprobs: T, rollout_logprobs: T, advantages: T, sequences: Sequences) -> T:
    return -logprobs * advantages * float("nan")


def root(logprobs: T, rollout_logprobs: T, advantages: T, sequences: Sequences) -> T:
    """Finite, with an infinite gradient where both sides agree."""
    return (logprobs - rollout_logprobs).abs().sqrt()


def constant(logprobs: T, rollout_logprobs: T, advantages: T, sequences: Sequences) -> T:
    return -logprobs.detach() * advantages


def raises(logprobs: T, rollout_logprobs: T, advantages: T, sequences: Sequences) -> T:
    raise KeyError("oops")


calls: list[str] = []


def raises_later(logprobs: T, rollout_logprobs: T, advantages: T, sequences: Sequences) -> T:
    """From the fifth call on."""
    calls.append("raises_later")
    if len(calls) > 4:
        raise ValueError("no more")
    return clipped(logprobs, rollout_logprobs, advantages, sequences)


def nan_later(logprobs: T, rollout_logprobs: T, advantages: T, sequences: Sequences) -> T:
    """From the fourth call on."""
    calls.append("nan_later")
    return clipped(logprobs, rollout_logprobs, advantages, sequences) * (
        1.0 if len(calls) < 4 else float("nan")
    )


a_list = [clipped]
