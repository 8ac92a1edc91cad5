"""Causal attention over packed sequences of different lengths, as an attention implementation of transformers.

On CUDA in half precision FlashAttention 2 (`torch.nn.attention.varlen`) or FlashAttention 4 (`flash4.py`) runs over the
packed row as it is; `kernel_choice.use_attention` chooses. On a CPU, or in float32, there
is no such kernel: each sequence becomes a row of one right-padded batch for SDPA, which is exact, since a causal row
never looks at what follows it. Scores that are soft-capped or have a sink beside them are computed whole, a sequence at
a time.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from trainer_core.context_parallel import Context
from trainer_core.policy.flash4 import PROVEN, flash4

NAME = "atropos_packed"
NAME_FLASH4 = "atropos_packed_4"
"""Without "flash", which transformers would look for among its own."""
HALF = (torch.bfloat16, torch.float16)
KERNEL_HEAD = 256
"""Largest head that the kernel for variable lengths computes."""


@dataclass(frozen=True)
class Layout:
    """Where the S sequences of a packed row of N tokens lie."""

    varlen: bool
    """Use the kernel for variable lengths, on CUDA."""
    lengths: tuple[int, ...]
    max_length: int
    """Of a sequence; for the kernel rounded up, so that compiled code meets few values of it."""
    cumulative: torch.Tensor
    """[S + 1] int32, first position of each sequence, then N."""
    pad: torch.Tensor | None
    """[S * max_length] int64, position of every cell of the padded batch (any position where it is padding); null when
    all lengths are equal."""
    unpad: torch.Tensor | None
    """[N] int64, cell of every position."""
    context: Context | None = None
    """Where other ranks have some of these tokens."""


def layout(
    lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype, context: Context | None = None
) -> Layout:
    """The layout of a row whose sequences have these lengths, for weights of `dtype`."""
    varlen = device.type == "cuda" and dtype in HALF
    longest = max(lengths)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
    if varlen:
        return Layout(varlen, lengths, max(256, 1 << (longest - 1).bit_length()), starts, None, None, context)
    if min(lengths) == longest:
        return Layout(varlen, lengths, longest, starts, None, None, context)
    cells = torch.arange(longest)
    sizes = torch.tensor(lengths)
    real = cells[None, :] < sizes[:, None]
    pad = torch.where(real, starts[:-1, None].long().cpu() + cells[None, :], 0).flatten()
    unpad = torch.nonzero(real.flatten()).flatten()
    return Layout(varlen, lengths, longest, starts, pad.to(device), unpad.to(device), context)


def register() -> str:
    """Make the implementation known to transformers; returns its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name, function in ((NAME, packed_attention), (NAME_FLASH4, _packed_by_flash4)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, lambda *args, **kwargs: None)  # the layout says it all
    return NAME


def _packed_by_flash4(*args: Any, **more: Any) -> tuple[torch.Tensor, None]:
    return packed_attention(*args, **more, by_flash4=True)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Layout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    by_flash4: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' form.

    Args:
        query: [1, heads, N, head_dim]; key and value: [1, kv_heads, N, head_dim].
        packing: the row's layout; the caller of the model passes it as a keyword.
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
        s_aux: [heads], a score beside those of all keys that takes its share and gives nothing, a sink (GPT-OSS).
        by_flash4: compute what FlashAttention 4 can with it.

    Returns:
        [1, N, heads, head_dim] and no attention weights.

    Raises:
        ValueError: the model's class does not pass `packing` on, or wants a mask or dropout.
    """
    if packing is None:
        raise ValueError("its attention leaves out where the sequences of a row lie")
    if attention_mask is not None or dropout:
        raise ValueError("packed attention takes its layout from `packing`, without mask and dropout")
    if packing.context is not None:
        query, key, value, s_aux = packing.context.heads(query, key, value, s_aux)
    result = _attend(query[0], key[0], value[0], packing, scaling, sliding_window, softcap, s_aux, by_flash4)
    return (result if packing.context is None else packing.context.tokens(result)), None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Layout, scaling: float | None,
    window: int | None, softcap: float | None, sinks: torch.Tensor | None, by_flash4: bool,
) -> torch.Tensor:  # fmt: skip
    """[1, N, heads, head_dim]."""
    groups = query.shape[0] // key.shape[0]
    # The kernel takes half precision (the proof on a GPU does not), and heads up to a size.
    beyond = packing.varlen and (query.dtype == torch.float32 or query.shape[-1] > KERNEL_HEAD)
    if softcap is not None or sinks is not None or beyond:
        return one_by_one(query, key, value, packing, groups, scaling, window, softcap, sinks)
    if by_flash4 and packing.varlen and (query.shape[-1], value.shape[-1]) in PROVEN:
        return _flash4(query, key, value, packing, scaling, window)[None]
    run = _varlen if packing.varlen else _padded
    return run(query, key, value, packing, groups, scaling, window)[None]


def _flash4(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Layout, scaling: float | None,
    window: int | None,
) -> torch.Tensor:  # fmt: skip
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    longest = packing.max_length
    window = window if window and window < longest else None
    return flash4(query, key, value, packing.cumulative, longest, scale=scaling, window=window)


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Layout, groups: int,
    scaling: float | None, window: int | None,
) -> torch.Tensor:  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    more: dict[str, Any] = {}
    if groups > 1 and _KERNEL_GROUPS:
        more["enable_gqa"] = True
    elif groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    starts, longest = packing.cumulative, packing.max_length
    size, narrower = value.shape[-1], query.shape[-1] - value.shape[-1]
    if narrower > 0:  # MLA; the kernel wants one size
        value = F.pad(value, (0, narrower))
    result: torch.Tensor = varlen_attn(
        query, key, value, starts, starts, longest, longest,
        window_size=(window - 1 if window and window < longest else -1, 0), scale=scaling, **more,
    )  # fmt: skip
    return result[..., :size]


def _kernel_groups() -> bool:
    """Whether this torch's kernel takes fewer heads for keys than for queries (2.13 does, 2.11 does not)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


_KERNEL_GROUPS = _kernel_groups()


def _padded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Layout, groups: int,
    scaling: float | None, window: int | None,
) -> torch.Tensor:  # fmt: skip
    longest = packing.max_length
    sequences = packing.cumulative.numel() - 1

    def batch(x: torch.Tensor, repeat: int) -> torch.Tensor:
        x = x.transpose(0, 1)  # [N, heads, head_dim]
        x = x if packing.pad is None else x.index_select(0, packing.pad)
        x = x.reshape(sequences, longest, *x.shape[1:]).transpose(1, 2)
        return x.repeat_interleave(repeat, dim=1) if repeat > 1 else x

    mask = None
    if window is not None and window < longest:
        cells = torch.arange(longest, device=query.device)
        gap = cells[:, None] - cells[None, :]
        mask = (gap >= 0) & (gap < window)
    result = F.scaled_dot_product_attention(
        batch(query, 1), batch(key, groups), batch(value, groups), attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    result = result.transpose(1, 2).flatten(0, 1)  # [S * longest, heads, head_dim]
    return result if packing.unpad is None else result.index_select(0, packing.unpad)


@torch.compiler.disable  # lengths change with every row
def one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Layout, groups: int,
    scaling: float | None = None, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """[1, N, heads, head_dim] from [heads, N, head_dim] and [kv_heads, N, head_dim], for what no kernel here does:
    whole scores, one sequence at a time, and anew in the backward pass, so that those of one sequence alone are
    held."""
    key, value = (x.repeat_interleave(groups, dim=0) if groups > 1 else x for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = zip(*(x.split(packing.lengths, dim=1) for x in (query, key, value)), strict=True)
    results = [
        checkpoint(_whole, *part, scale, window, softcap, sinks, use_reentrant=False, preserve_rng_state=False)
        for part in parts
    ]
    return torch.cat(results, dim=1).transpose(0, 1)[None]


def _whole(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None,
    softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """[heads, n, head_dim], of one sequence."""
    scores = query @ key.transpose(1, 2) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    cells = torch.arange(query.shape[1], device=query.device)
    gap = cells[:, None] - cells[None, :]
    seen = (gap >= 0) if window is None else (gap >= 0) & (gap < window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        beside = sinks.to(scores.dtype)[:, None, None].expand(-1, query.shape[1], 1)
        scores = torch.cat([scores, beside], dim=-1)
    shares = scores.softmax(-1)
    return (shares if sinks is None else shares[..., :-1]).to(value.dtype) @ value
