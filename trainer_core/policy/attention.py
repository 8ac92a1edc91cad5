"""Causal attention over packed sequences, as an attention implementation of transformers."""

from __future__ import annotations

import importlib
import inspect
import warnings
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from trainer_core.ranks.context_parallel import Context

NAME = "atropos_packed"
# Without the word "flash": transformers would take it for an implementation of its own.
NAME_FLASH4 = "atropos_packed_4"
HALF = (torch.bfloat16, torch.float16)
KERNEL_HEAD = 256
"""Largest head size of the varlen kernel."""
PROVEN: set[tuple[int, int]] = set()
"""(key, value) head sizes for which FlashAttention 4 is correct on this device."""


@dataclass(frozen=True)
class Layout:
    """Positions of the S sequences in a packed row of N tokens."""

    varlen: bool
    lengths: tuple[int, ...]
    max_length: int
    """Longest sequence; for the kernel rounded up to a power of two."""
    cumulative: torch.Tensor
    """[S + 1] int32, first position of each sequence, then N."""
    pad: torch.Tensor | None
    """[S * max_length] int64, position of each cell of the padded batch; None: equal lengths."""
    unpad: torch.Tensor | None
    """[N] int64, cell of each position; None: equal lengths."""
    context: Context | None = None
    """Set when other ranks hold part of the row."""


def layout(
    lengths: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    context: Context | None = None,
) -> Layout:
    varlen = device.type == "cuda" and dtype in HALF
    longest = max(lengths)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(
        device, non_blocking=True
    )
    if varlen:
        # The next power of two: every new value would make torch.compile compile again.
        return Layout(
            varlen, lengths, max(256, 1 << (longest - 1).bit_length()), starts, None, None, context
        )
    if min(lengths) == longest:
        return Layout(varlen, lengths, longest, starts, None, None, context)
    cells = torch.arange(longest)
    sizes = torch.tensor(lengths)
    real = cells[None, :] < sizes[:, None]
    # real: [S, longest] bool, True where the padded batch holds a token.
    pad = torch.where(real, starts[:-1, None].long().cpu() + cells[None, :], 0).flatten()
    unpad = torch.nonzero(real.flatten()).flatten()
    return Layout(varlen, lengths, longest, starts, pad.to(device), unpad.to(device), context)


def register() -> str:
    """Register the implementations with transformers; return the default's name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name, function in ((NAME, packed_attention), (NAME_FLASH4, _packed_by_flash4)):
        AttentionInterface.register(name, function)
        # `packing` replaces masks.
        AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
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
    """Compute attention through transformers' interface.

    Args:
        query: [1, heads, N, head_dim]; key and value: [1, kv_heads, N, head_dim].
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
        s_aux: [heads], sinks: one more score per head in the softmax, without a value (GPT-OSS).

    Returns:
        [1, N, heads, head_dim] and no attention weights.
    """
    if packing is None:
        raise ValueError("its attention layers drop the keyword `packing`")
    if attention_mask is not None or dropout:
        raise ValueError(
            "packed attention takes its layout from `packing`, without mask and dropout"
        )
    if packing.context is not None:
        # Context parallelism: exchange a part of the tokens with all heads for all tokens with a
        # part of the heads.
        query, key, value, s_aux = packing.context.heads(query, key, value, s_aux)
    result = _attend(
        query[0], key[0], value[0], packing, scaling, sliding_window, softcap, s_aux, by_flash4
    )
    return (result if packing.context is None else packing.context.tokens(result)), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Layout,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    by_flash4: bool,
) -> torch.Tensor:
    # Half precision on CUDA goes through FlashAttention 2 (`torch.nn.attention.varlen`) or 4, as
    # `kernel_choice` decides, the rest through SDPA. No kernel takes soft-capped scores and sinks.
    groups = query.shape[0] // key.shape[0]
    window = window if window and window < packing.max_length else None
    # The kernel takes half precision and limited head sizes; the start-up proof runs in float32.
    beyond = packing.varlen and (query.dtype == torch.float32 or query.shape[-1] > KERNEL_HEAD)
    if softcap is not None or sinks is not None or beyond:
        return one_by_one(query, key, value, packing, groups, scaling, window, softcap, sinks)
    if by_flash4 and packing.varlen and (query.shape[-1], value.shape[-1]) in PROVEN:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        starts, longest = packing.cumulative, packing.max_length
        return flash4(query, key, value, starts, longest, scale=scaling, window=window)[None]
    run = _varlen if packing.varlen else _padded
    return run(query, key, value, packing, groups, scaling, window)[None]


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Layout,
    groups: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    more: dict[str, Any] = {}
    if groups > 1 and _KERNEL_GROUPS:
        more["enable_gqa"] = True
    elif groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    starts, longest = packing.cumulative, packing.max_length
    size, narrower = value.shape[-1], query.shape[-1] - value.shape[-1]
    if narrower > 0:  # MLA: values are narrower than keys, and the kernel needs one size
        value = F.pad(value, (0, narrower))
    result: torch.Tensor = varlen_attn(
        query,
        key,
        value,
        starts,
        starts,
        longest,
        longest,
        window_size=(-1 if window is None else window - 1, 0),
        scale=scaling,
        **more,
    )
    return result[..., :size]


def _kernel_groups() -> bool:
    # torch 2.13 supports grouped-query heads, 2.11 does not.
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


_KERNEL_GROUPS = _kernel_groups()


def _padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Layout,
    groups: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    longest = packing.max_length
    sequences = packing.cumulative.numel() - 1

    def batch(x: torch.Tensor, repeat: int) -> torch.Tensor:
        x = x.transpose(0, 1)  # [N, heads, head_dim]
        x = x if packing.pad is None else x.index_select(0, packing.pad)
        x = x.reshape(sequences, longest, *x.shape[1:]).transpose(1, 2)
        return x.repeat_interleave(repeat, dim=1) if repeat > 1 else x

    # Padding on the right needs no mask: a causal row never attends to later positions.
    # SDPA's own causal flag is faster than a mask, so a mask exists for sliding windows only.
    mask = None
    if window is not None:
        cells = torch.arange(longest, device=query.device)
        gap = cells[:, None] - cells[None, :]
        mask = (gap >= 0) & (gap < window)
    result = F.scaled_dot_product_attention(
        batch(query, 1),
        batch(key, groups),
        batch(value, groups),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    result = result.transpose(1, 2).flatten(0, 1)  # [S * longest, heads, head_dim]
    return result if packing.unpad is None else result.index_select(0, packing.unpad)


@torch.compiler.disable  # lengths change with every row
def one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Layout,
    groups: int,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute full scores for what no kernel supports, [1, N, heads, head_dim].

    Args:
        query: [heads, N, head_dim]; key and value: [kv_heads, N, head_dim].
    """
    key, value = (x.repeat_interleave(groups, dim=0) if groups > 1 else x for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = zip(*(x.split(packing.lengths, dim=1) for x in (query, key, value)), strict=True)
    # The backward pass computes the scores again, so memory holds those of one sequence.
    whole = partial(checkpoint, _whole, use_reentrant=False, preserve_rng_state=False)
    results = [whole(*part, scale, window, softcap, sinks) for part in parts]
    return torch.cat(results, dim=1).transpose(0, 1)[None]


def _whole(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    scores = query @ key.transpose(1, 2) * scale
    # The softmax runs in float32 at least, as in the kernels.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    cells = torch.arange(query.shape[1], device=query.device)
    gap = cells[:, None] - cells[None, :]
    seen = (gap >= 0) if window is None else (gap >= 0) & (gap < window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        # [heads, n, 1]: the sink is one more column of the softmax, dropped before the product with
        # values.
        beside = sinks.to(scores.dtype)[:, None, None].expand(-1, query.shape[1], 1)
        scores = torch.cat([scores, beside], dim=-1)
    shares = scores.softmax(-1)
    return (shares if sinks is None else shares[..., :-1]).to(value.dtype) @ value


# FlashAttention 4 is the package flash-attn-4 (CuTe DSL, sm_90 and newer; source:
# flash_attn/cute/interface.py). Custom operators hide it from torch.compile.
@cache
def kernels() -> Any | None:
    """Import flash-attn-4's interface; None if it is missing or does not import."""
    # The compiler warns once per argument that it passes through.
    warnings.filterwarnings(
        "ignore", message="Argument .* cannot be converted to a JitArgument", category=UserWarning
    )
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except Exception:  # an incompatible cutlass fails with various exception types
        return None


def flash4(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention within each sequence of a packed row, by FlashAttention 4.

    Args:
        query: [N, heads, head_dim] in half precision; key: [N, kv_heads, head_dim]; value: [N,
            kv_heads, value_dim].
        starts: [S + 1] int32, first position of each sequence, then N.
        window: tokens that each position attends to, itself included.

    Returns:
        [N, heads, value_dim].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    left = -1 if window is None else window - 1
    return _flash4_forward(query, key, value, starts, longest, scale, left)[0]


def _flash4_arguments(
    starts: torch.Tensor, longest: int, scale: float, left: int
) -> dict[str, Any]:
    return {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "softmax_scale": scale,
        "causal": left < 0,
        "window_size_left": None if left < 0 else left,
        "window_size_right": None if left < 0 else 0,
    }


@torch.library.custom_op("atropos::flash4_forward", mutates_args=())
def _flash4_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
    left: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    found = kernels()._flash_attn_fwd(  # type: ignore[union-attr]  # callers check `kernels()`
        query, key, value, **_flash4_arguments(starts, longest, scale, left), return_lse=True
    )
    return found[0], found[1]


# Shapes for torch.compile: the output, [N, heads, value_dim], and the softmax log-sums, [heads, N].
@_flash4_forward.register_fake
def _(query, key, value, *_):  # type: ignore[no-untyped-def]
    tokens, heads, _ = query.shape
    sums = query.new_empty(heads, tokens, dtype=torch.float32)
    return query.new_empty(tokens, heads, value.shape[-1]), sums


@torch.library.custom_op("atropos::flash4_backward", mutates_args=())
def _flash4_backward(
    to_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
    left: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = (query, key, value)
    found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
    more = _flash4_arguments(starts, longest, scale, left)
    more |= zip(("dq", "dk", "dv"), found, strict=True)
    kernels()._flash_attn_bwd(*inputs, out, to_out, sums, **more)  # type: ignore[union-attr]
    return found[0], found[1], found[2]


@_flash4_backward.register_fake
def _(to_out, query, key, value, *_):  # type: ignore[no-untyped-def]
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))


def _flash4_keep(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    query, key, value, starts, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, starts)


def _flash4_differentiate(
    ctx: Any, to_out: torch.Tensor, to_sums: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    found = _flash4_backward(to_out.contiguous(), *ctx.saved_tensors, *ctx.rest)
    # No gradients for starts, longest, scale and left.
    return *found, None, None, None, None


_flash4_forward.register_autograd(_flash4_differentiate, setup_context=_flash4_keep)
