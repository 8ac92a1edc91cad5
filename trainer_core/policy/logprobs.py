"""Logprobs of trained tokens under the present weights, in float32, without ever holding full logits."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch.utils.checkpoint import checkpoint

from trainer_core.policy.attention import layout
from trainer_core.rollouts.packing import PackedRow

CHUNK_ELEMENTS = 1 << 26
"""Logits held at a time (256 MB in float32)."""


def row_logprobs(model: torch.nn.Module, row: PackedRow) -> torch.Tensor:
    """Logprobs of the labels of `row`, [T] float32, in nats, at each token's temperature.

    Args:
        model: a causal language model of transformers with the packed attention.
        row: on the model's device.
    """
    head = model.get_output_embeddings()
    hidden = model.base_model(
        input_ids=row.tokens[None],
        position_ids=row.positions[None],
        use_cache=False,
        packing=layout(row.lengths, row.tokens.device, head.weight.dtype),
    ).last_hidden_state[0]
    return chunked_logprobs(hidden.index_select(0, row.predict), head.weight, head.bias, row.labels, row.temperatures)


@torch.no_grad()
def sequence_logprobs(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> list[float]:
    """Logprobs of each token of `completion` after `prompt`, in nats, at temperature 1."""
    return completions_logprobs(model, [(prompt, completion)])[0]


@torch.no_grad()
def completions_logprobs(model: torch.nn.Module, pairs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
    """The same for several (prompt, completion), packed into one row."""
    tokens = [[*prompt, *completion] for prompt, completion in pairs]
    starts = [0, *accumulate(map(len, tokens))]
    predict = [
        start + i - 1
        for start, (prompt, completion) in zip(starts[:-1], pairs, strict=True)
        for i in range(len(prompt), len(prompt) + len(completion))
    ]
    flat = torch.tensor([t for whole in tokens for t in whole])
    where = torch.tensor(predict)
    nothing = torch.zeros(len(predict))
    row = PackedRow(
        tokens=flat,
        positions=torch.cat([torch.arange(len(whole)) for whole in tokens]),
        lengths=tuple(map(len, tokens)),
        predict=where,
        labels=flat[where + 1],
        logprobs=nothing,
        advantages=nothing,
        temperatures=torch.ones(len(predict)),
    ).to(next(model.parameters()).device)
    values = row_logprobs(model, row).tolist()
    ends = [0, *accumulate(len(completion) for _, completion in pairs)]
    return [values[a:b] for a, b in pairwise(ends)]


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> torch.Tensor:
    """log softmax(hidden @ weight.T / temperature)[label], [T] float32.

    Args:
        hidden: [T, H]; weight: [V, H]; bias: [V] or null; labels: [T] int64; temperatures: [T] float32.
        chunk_elements: at most this many logits live at once; the backward pass computes them anew.
    """
    size = max(1, chunk_elements // weight.shape[0])
    if len(labels) <= size:
        return _logprobs(hidden, weight, bias, labels, temperatures)
    parts = [
        checkpoint(
            _logprobs, hidden[a : a + size], weight, bias, labels[a : a + size], temperatures[a : a + size],
            use_reentrant=False, preserve_rng_state=False,
        )
        for a in range(0, len(labels), size)
    ]  # fmt: skip
    return torch.cat(parts)


def _logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    temperatures: torch.Tensor,
) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float() / temperatures[:, None]
    return logits.gather(1, labels[:, None])[:, 0] - logits.logsumexp(1)
