"""Logprobs and entropy of trained tokens in float32, without ever holding full logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from atropos_common.models.model_math import LOGITS_AT_ONCE, carries_state
from trainer_core.policy.attention import layout
from trainer_core.policy.sharding import compute_dtype, gathered
from trainer_core.policy.speed import compiled_on_cuda
from trainer_core.policy.tensor_parallel import Vocabulary, enter, over_ranks, parallel_of
from trainer_core.ranks.context_parallel import Context, RowPart, context_of
from trainer_core.rollouts.packing import PackedRow, packed_experts

COMPILED_ROWS = 48
"""Positions for which kernels are compiled: any number from 2 on gives the same kernels."""

EXPERTS = "replayed_experts"
"""Keyword that passes a row's replayed experts, [N, sparse layers, K], to the layers."""


class TokenScores(NamedTuple):
    """Scores at T positions, each at its own temperature, in nats."""

    logprobs: torch.Tensor
    """[T] float32 with gradient; [T, K] for K labels a position."""
    entropy: torch.Tensor
    """[T] float32 of the whole distribution, without gradient."""


def row_logprobs(
    model: torch.nn.Module, row: PackedRow, *, head_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the logprobs of `row_scores`."""
    return row_scores(model, row, head_dtype=head_dtype).logprobs


def row_scores(
    model: torch.nn.Module,
    row: PackedRow,
    *,
    head_dtype: torch.dtype | None = None,
    labels: torch.Tensor | None = None,
    routing: list[torch.Tensor] | None = None,
) -> TokenScores:
    """Compute logprobs of the labels of `row`, and the entropy at those positions.

    Args:
        head_dtype: of the logits; default: `head_type`.
        labels: [T, K] int64 instead of the row's own.
        routing: receives router logits with gradient, [N, experts] for each sparse layer.
    """
    labels, context = row.labels if labels is None else labels, context_of(model)

    def compute() -> TokenScores:
        if context is None:
            hidden = _predicting_states(model, row, routing)
            return _head_scores(model, hidden, labels, row.temperatures, head_dtype)
        # This rank computes a part of the row, and receives the scores of the others.
        part = context.part(row)
        hidden = _part_states(model, part, len(row.tokens), routing, context)
        temperatures = row.temperatures[part.labels]
        own = _head_scores(model, hidden, labels[part.labels], temperatures, head_dtype)
        return TokenScores(*(context.whole(each, part.labels, len(labels)) for each in own))

    return gathered(model, compute)


def head_scores(
    model: torch.nn.Module,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    temperatures: torch.Tensor,
) -> TokenScores:
    """Score labels from the states that predict them, [T, H], as `row_scores` does."""
    return gathered(model, lambda: _head_scores(model, hidden, labels, temperatures, None))


def _head_scores(
    model: torch.nn.Module,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    temperatures: torch.Tensor,
    head_dtype: torch.dtype | None,
) -> TokenScores:
    head = model.get_output_embeddings()
    weight, bias = head.weight, getattr(head, "bias", None)
    head_dtype = head_dtype or head_type(model)
    # A float32 head needs no float32 copy of a half-precision weight: with `wide` the products,
    # which are exact, are summed in float32 and not rounded.
    half = weight.dtype in (torch.bfloat16, torch.float16) and hidden.dtype == weight.dtype
    wide = half and head_dtype == torch.float32
    if not wide:
        hidden, weight = hidden.to(head_dtype), weight.to(head_dtype)
        bias = None if bias is None else bias.to(head_dtype)
    return chunked_scores(
        hidden,
        weight,
        bias,
        labels,
        temperatures,
        transform=logit_transform(model.config),
        wide=wide,
        keep=getattr(model, "keeps_logits", False),
        vocabulary=None if (parallel := parallel_of(model)) is None else parallel.vocabulary,
    )


def head_type(model: torch.nn.Module) -> torch.dtype:
    """Return the dtype of the logits: set by `use_head`, else the head's own."""
    found: torch.dtype = getattr(model, "logits_dtype", compute_dtype(model))
    return found


def use_head(model: torch.nn.Module, head_dtype: str) -> None:
    """Set the dtype of later logits: "model" (the head's own) or "float32"."""
    if head_dtype == "float32":
        model.logits_dtype = torch.float32


def predicting_states(model: torch.nn.Module, row: PackedRow) -> torch.Tensor:
    """Return the input of the head for the labels of `row`, [T, H]."""
    context = context_of(model)
    if context is None:
        return gathered(model, lambda: _predicting_states(model, row, None))
    part = context.part(row)
    hidden = gathered(model, lambda: _part_states(model, part, len(row.tokens), None, context))
    return context.whole(hidden, part.labels, len(row.labels))


def _part_states(
    model: torch.nn.Module,
    part: RowPart,
    count: int,
    routing: list[torch.Tensor] | None,
    context: Context,
) -> torch.Tensor:
    own_routing: list[torch.Tensor] | None = None if routing is None else []
    hidden = _states(
        model, part.tokens, part.positions, part.lengths, own_routing, part.experts, context
    )
    if routing is not None and own_routing is not None:
        # The last rank's part may end in padding, which has router logits as well.
        here = context.tokens_of(count)
        routing += [
            context.whole(each[: here.stop - here.start], here, count) for each in own_routing
        ]
    return hidden.index_select(0, part.predict)


def _predicting_states(
    model: torch.nn.Module, row: PackedRow, routing: list[torch.Tensor] | None
) -> torch.Tensor:
    # A recurrent state (Mamba, linear attention) would leak into the next sequence of the row.
    apart = len(row.lengths) > 1 and carries_state(vars(model.config))
    parts = [(n,) for n in row.lengths] if apart else [row.lengths]
    sizes = [sum(part) for part in parts]
    experts = [None] * len(parts) if row.experts is None else row.experts.split(sizes)
    each = zip(row.tokens.split(sizes), row.positions.split(sizes), parts, experts, strict=True)
    hidden = [
        _states(model, tokens, positions, lengths, routing, chosen)
        for tokens, positions, lengths, chosen in each
    ]
    return torch.cat(hidden).index_select(0, row.predict)


def _states(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    lengths: tuple[int, ...],
    routing: list[torch.Tensor] | None,
    experts: torch.Tensor | None,
    context: Context | None = None,
) -> torch.Tensor:
    output = model.base_model(
        input_ids=tokens[None],
        position_ids=positions[None],
        use_cache=False,
        packing=layout(lengths, tokens.device, compute_dtype(model), context),
        **({} if routing is None else {"output_router_logits": True}),
        **({} if experts is None else {EXPERTS: experts}),
    )
    if routing is not None:
        routing += output.router_logits
    states: torch.Tensor = output.last_hidden_state[0]  # [N, H], sequence after sequence
    return states


@torch.no_grad()
def sequence_logprobs(
    model: torch.nn.Module, prompt: list[int], completion: list[int]
) -> list[float]:
    """Logprobs of each token of `completion`, in nats, at temperature 1."""
    return completions_logprobs(model, [(prompt, completion)])[0]


@torch.no_grad()
def completions_logprobs(
    model: torch.nn.Module,
    pairs: list[tuple[list[int], list[int]]],
    *,
    head_dtype: torch.dtype | None = None,
    experts: Sequence[NDArray[np.int16] | None] | None = None,
) -> list[list[float]]:
    """`sequence_logprobs` of several (prompt, completion) pairs; `experts` as in `Rollout`."""
    sequences = [torch.tensor([*prompt, *completion]) for prompt, completion in pairs]
    row = whole_row(sequences, [len(prompt) for prompt, _ in pairs])
    if experts is not None:
        row = replace(row, experts=packed_experts(list(experts), list(row.lengths)))
    row = row.to(next(model.parameters()).device)
    values = row_logprobs(model, row, head_dtype=head_dtype).tolist()
    ends = [0, *accumulate(len(completion) for _, completion in pairs)]
    return [values[a:b] for a, b in pairwise(ends)]


def whole_row(sequences: list[torch.Tensor], prompts: list[int] | None = None) -> PackedRow:
    """Pack sequences, each [N] int64, at temperature 1; labels follow the prompts (default: 1
    token)."""
    prompts = prompts or [1] * len(sequences)
    starts = [0, *accumulate(map(len, sequences))]
    parts = zip(starts, prompts, sequences, strict=False)
    flat = torch.cat(sequences)
    # The state at position n predicts token n + 1, so positions shift left by one.
    where = torch.cat(
        [torch.arange(a + first - 1, a + len(tokens) - 1) for a, first, tokens in parts]
    ).to(flat.device)
    nothing = torch.zeros(len(where), device=flat.device)
    return PackedRow(
        tokens=flat,
        positions=torch.cat([torch.arange(len(tokens)) for tokens in sequences]).to(flat.device),
        lengths=tuple(map(len, sequences)),
        predict=where,
        labels=flat[where + 1],
        logprobs=nothing,
        advantages=nothing,
        temperatures=torch.ones_like(nothing),
    )


class LogitTransform(NamedTuple):
    """A model's change of its logits: cap * tanh(scale * logits / cap)."""

    scale: float = 1.0
    cap: float | None = None

    @property
    def bend(self) -> float | None:
        """c in scale * c * tanh(logits / c), which is the same with one number fewer."""
        return None if self.cap is None else self.cap / self.scale


def logit_transform(config: Any) -> LogitTransform:
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale *= getattr(config, "lm_head_multiplier", None) or 1.0  # Falcon-H1
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    return LogitTransform(scale, getattr(config, "final_logit_softcapping", None))


def chunked_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    chunk_elements: int | None = None,
    transform: LogitTransform = LogitTransform(),  # noqa: B008
    wide: bool = False,
    keep: bool = False,
    vocabulary: Vocabulary | None = None,
) -> TokenScores:
    """Return log p[label] and -sum p log p of p = softmax(transform(logits) / temperature).

    The logits are hidden @ weight.T + bias. Scores are float32, or float64 for float64 weights.

    Args:
        hidden: [T, H]; weight: [V, H]; bias: [V]; labels: [T] or [T, K] int64; temperatures: [T].
        chunk_elements: largest number of logits in memory at once.
        wide: do not round the logits of half-precision states and weights.
        keep: keep the logits until the backward pass instead of computing them again.
        vocabulary: this rank's rows of weight and bias; every rank returns the same scores.
    """
    keep = keep and torch.is_grad_enabled()
    limit = chunk_elements or LOGITS_AT_ONCE[hidden.is_cuda] << keep  # a GPU takes larger chunks
    rows = len(weight) if vocabulary is None else vocabulary.most  # the same chunks on all ranks
    size = max(1, limit // rows // (2 if wide else 1))
    if vocabulary is not None:
        # Sums the gradient of the hidden states over ranks in the backward pass.
        hidden = enter(hidden)
    temperatures = temperatures / transform.scale
    more = (size, transform.bend, wide, keep, vocabulary)
    return TokenScores(*_HeadScores.apply(hidden, weight, bias, labels, temperatures, *more))


@torch.no_grad()  # as in `_HeadScores`: kernels are compiled for one or the other
def compile_scores(
    config: Any, dtype: torch.dtype, device: torch.device, *, wide: bool = False
) -> None:
    """Compile the kernels of `chunked_scores` for a GPU, which takes seconds and needs no weights.

    Args:
        config: of the model; dtype: its weights'.
        wide: the logits will not be rounded.
    """
    cap = logit_transform(config).bend
    labels = torch.zeros(COMPILED_ROWS, dtype=torch.int64, device=device)
    temperatures = torch.ones(COMPILED_ROWS, device=device)
    trained = torch.float32 if wide else dtype
    for kind in {torch.float32, trained}:  # `prove` computes in float32
        logits = torch.zeros(COMPILED_ROWS, config.vocab_size, dtype=kind, device=device)
        logprobs, normalizers, _ = _pick(logits, labels, temperatures, cap)
        if kind == trained:
            _spread(logits, labels, temperatures, normalizers, logprobs, cap, dtype)


class _HeadScores(torch.autograd.Function):
    """Head and log-softmax, chunk by chunk in both directions, so full logits never exist."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        temperatures: torch.Tensor,
        size: int,
        cap: float | None,
        wide: bool,
        keep: bool,
        vocabulary: Vocabulary | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts, ctx.kept = [], []
        if vocabulary is not None:
            labels = labels - vocabulary.begin
        for a in range(0, len(labels), size):
            logits = _logits(hidden[a : a + size], weight, bias, wide)
            pick = _pick if vocabulary is None else _pick_own
            parts.append(pick(logits, labels[a : a + size], temperatures[a : a + size], cap))
            if keep:
                ctx.kept.append(logits)
        # No labels: concatenation needs at least one tensor.
        if not parts:
            dtype = torch.promote_types(weight.dtype, torch.float32)
            nothing = temperatures.new_zeros(0, dtype=dtype)
            parts = [(nothing.new_zeros(labels.shape), nothing, nothing)]
        logprobs, normalizers, entropy = map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, labels, temperatures, normalizers)
        ctx.mark_non_differentiable(entropy)
        ctx.size, ctx.cap, ctx.wide = size, cap, wide
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, temperatures, normalizers = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # The head's gradient is summed over chunks in float32.
        wide = torch.promote_types(weight.dtype, torch.float32)
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        for a in range(0, len(labels), ctx.size):
            part = slice(a, a + ctx.size)
            # The gradient of a logprob is (one-hot - softmax) / temperature, so only the product
            # with the head is computed again. `pop` frees each chunk of kept logits after its use.
            logits = ctx.kept.pop(0) if ctx.kept else _logits(hidden[part], weight, bias, ctx.wide)
            to_logits = logits.to(weight.dtype)
            if logits.shape[1]:
                rows = (each[part] for each in (labels, temperatures, normalizers, grads[0]))
                to_logits = _spread(logits, *rows, ctx.cap, weight.dtype)  # type: ignore[call-arg]
            if to_hidden is not None:
                torch.mm(to_logits, weight, out=to_hidden[part])
            if to_weight is not None:
                _add_product(to_weight, to_logits, hidden[part])
            if to_bias is not None:
                to_bias += to_logits.sum(0, dtype=wide)
        to_head = (None if x is None else x.to(weight.dtype) for x in (to_weight, to_bias))
        # The other seven arguments have no gradient.
        return to_hidden, *to_head, *[None] * 7


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool
) -> torch.Tensor:
    if not wide:
        return F.linear(hidden, weight, bias)
    # float32 is the dtype in which the products are summed anyway.
    if hidden.is_cuda:
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        logits = F.linear(hidden.float(), weight.float())
    return logits if bias is None else logits + bias


def _add_product(total: torch.Tensor, to_logits: torch.Tensor, hidden: torch.Tensor) -> None:
    # total += to_logits.T @ hidden, summed in the dtype of `total`.
    if total.dtype == hidden.dtype:
        total.addmm_(to_logits.T, hidden)
    elif total.is_cuda:
        torch.addmm(total, to_logits.T, hidden, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(to_logits.T, hidden)


@compiled_on_cuda
def _pick(
    logits: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor, cap: float | None
) -> tuple[torch.Tensor, ...]:
    """Return float32 logprobs in the labels' shape, log-normalizers [T] and entropy [T]."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = (wide if cap is None else cap * torch.tanh(wide / cap)) / temperatures[:, None]
    largest = scaled.amax(1)
    scaled -= largest[:, None]
    own = scaled.gather(1, labels.view(len(labels), -1))
    weights = scaled.exp()
    total = weights.sum(1)
    normalizers = total.log()
    logprobs = (own - normalizers[:, None]).view(labels.shape)
    return logprobs, normalizers + largest, normalizers - weights.mul_(scaled).sum(1) / total


def _pick_own(
    logits: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor, cap: float | None
) -> tuple[torch.Tensor, ...]:
    """`_pick` with the vocabulary split over ranks; labels count from this rank's first row."""
    labels_of = labels.view(len(labels), -1)
    if logits.shape[1]:
        scaled, largest = _scaled(logits, temperatures, cap)
        largest = over_ranks(largest, "max")
        sums = over_ranks(_own_sums(scaled, largest, labels_of))
    else:  # a vocabulary so small that this rank has none of it
        wide = torch.promote_types(logits.dtype, torch.float32)
        largest = over_ranks(torch.full_like(temperatures, -torch.inf, dtype=wide), "max")
        sums = over_ranks(largest.new_zeros(len(labels), labels_of.shape[1] + 2))
    own, total, weighed = sums[:, :-2], sums[:, -2], sums[:, -1]
    normalizers = total.log()
    logprobs = (own - normalizers[:, None]).view(labels.shape)
    return logprobs, normalizers + largest, normalizers - weighed / total


@compiled_on_cuda
def _scaled(
    logits: torch.Tensor, temperatures: torch.Tensor, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits after cap and temperature, [T, V] float32, and their maxima, [T]."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = (wide if cap is None else cap * torch.tanh(wide / cap)) / temperatures[:, None]
    return scaled, scaled.amax(1)


@compiled_on_cuda
def _own_sums(scaled: torch.Tensor, largest: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[T, K + 2] of this rank: label logits minus maximum, sum of unnormalized p, sum of p *
    logit."""
    scaled = scaled - largest[:, None]
    here = (labels >= 0) & (labels < scaled.shape[1])
    own = torch.where(here, scaled.gather(1, labels.clamp(0, scaled.shape[1] - 1)), 0.0)
    weights = scaled.exp()
    sums = [weights.sum(1, keepdim=True), (weights * scaled).sum(1, keepdim=True)]
    return torch.cat([own, *sums], dim=1)


@compiled_on_cuda
def _spread(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperatures: torch.Tensor,
    normalizers: torch.Tensor,
    grads: torch.Tensor,
    cap: float | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    wide = logits.to(normalizers.dtype)
    bent = wide if cap is None else cap * torch.tanh(wide / cap)
    # p = exp(logit / temperature - log-normalizer): the softmax without another pass for its
    # maximum.
    share = (bent / temperatures[:, None] - normalizers[:, None]).exp()
    if labels.ndim == 2:
        here = (labels >= 0) & (labels < logits.shape[1])  # with other ranks' labels elsewhere
        own = torch.where(here, grads, 0.0)
        result = -share * grads.sum(1, keepdim=True)
        result = result.scatter_add(1, labels.clamp(0, logits.shape[1] - 1), own)
        result = result.div(temperatures[:, None])
    else:
        own = torch.arange(logits.shape[1], device=logits.device)[None, :] == labels[:, None]
        result = (own.to(share.dtype) - share) * (grads / temperatures)[:, None]
    if cap is not None:
        # Derivative of cap * tanh(x / cap).
        result = result * (1 - (bent / cap) ** 2)
    return result.to(dtype)
