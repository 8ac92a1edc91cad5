"""Logprobs of the whole distribution at a request's temperature, for requests that sample from a part of it.

vLLM's raw logprobs are those at temperature 1. The sampler is told each batch's temperatures before it computes them,
through torch's own hooks: nothing of vLLM is replaced but one function of one object.
"""

from __future__ import annotations

from typing import Any

import torch

from atropos_common.bridge import GREEDY_BELOW


def scale_raw_logprobs(sampler: torch.nn.Module) -> None:
    """Have `sampler`, vLLM's, compute raw logprobs [B, V] in nats as log softmax(logits / temperature [B])."""
    present: list[torch.Tensor | None] = [None]

    def remember(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        metadata = kwargs["sampling_metadata"] if "sampling_metadata" in kwargs else args[1]
        present[0] = metadata.temperature

    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        temperature = present[0]
        if temperature is None or len(temperature) != len(logits):  # all greedy, or prompts, which nothing samples
            return logits.log_softmax(-1, dtype=torch.float32)
        scale = torch.where(temperature < GREEDY_BELOW, 1.0, temperature).unsqueeze(1)
        return (logits.float() / scale).log_softmax(-1)

    sampler.register_forward_pre_hook(remember, with_kwargs=True)
    sampler.compute_logprobs = compute_logprobs  # type: ignore[assignment]
