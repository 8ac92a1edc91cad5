"""Causal attention over packed sequences of different lengths, as an attention implementation of transformers.

On CUDA in half precision FlashAttention 2 (`torch.nn.attention.varlen`) or FlashAttention 4 runs over the packed row as
it is; `kernel_choice.use_attention` chooses. On a CPU, or in float32, there is no such kernel: each sequence becomes a
row of one right-padded batch for SDPA, which is exact, since a causal row never looks at what follows it. Scores that
are soft-capped or have a sink beside them are computed whole, a sequence at a time.

FlashAttention 4's kernels are those of the package `flash-attn-4` (CuTe DSL, compiled for the device on first use;
sm_90 and newer), here as two operators that torch.compile does not look into. They take fewer heads for keys than for
queries, and windows. Source: flash_attn/cute/interface.py. Which sizes of heads they get right, `kernel_choice` proves
on the device.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from trainer_core.context_parallel import Context

NAME = "atropos_packed"
NAME_FLASH4 = "atropos_packed_4"
"""Without "flash", which transformers would look for among its own."""
HALF = (torch.bfloat16, torch.float16)
KERNEL_HEAD = 256
"""Largest head that the kernel for variable lengths computes."""
PROVEN: set[tuple[int, int]] = set()
"""Sizes of a head, of keys and of values, that `kernel_choice.wrong_kernels` has found right on this device."""


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


@cache
def kernels() -> Any | None:
    """The package's interface; None where it is not installed, or not with what it needs."""
    # One warning for each argument that its compiler passes on as it is.
    warnings.filterwarnings("ignore", message="Argument .* cannot be converted to a JitArgument", category=UserWarning)
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except Exception:  # with another cutlass than its own it fails in ways of its own
        return None


def flash4(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, *,
    scale: float | None = None, window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention within each sequence of a packed row.

    Args:
        query: [N, heads, head_dim] in half precision; key: [N, kv_heads, head_dim]; value: [N, kv_heads, value_dim].
        starts: [sequences + 1] int32, where each sequence begins and the last one ends.
        longest: at least the tokens of the longest sequence.
        window: tokens that each one sees, itself included; None is all before it.

    Returns:
        [N, heads, value_dim].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, _ = _flash4_forward(query, key, value, starts, longest, scale, -1 if window is None else window - 1)
    return out


def _flash4_arguments(starts: torch.Tensor, longest: int, scale: float, left: int) -> dict[str, Any]:
    return {
        "cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest,
        "softmax_scale": scale, "causal": left < 0, "window_size_left": None if left < 0 else left,
        "window_size_right": None if left < 0 else 0,
    }  # fmt: skip


@torch.library.custom_op("atropos::flash4_forward", mutates_args=())
def _flash4_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scale: float,
    left: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    found = kernels()._flash_attn_fwd(  # type: ignore[union-attr]  # who calls has asked
        query, key, value, **_flash4_arguments(starts, longest, scale, left), return_lse=True
    )
    return found[0], found[1]


@_flash4_forward.register_fake
def _(query, key, value, *_):  # type: ignore[no-untyped-def]
    tokens, heads, _ = query.shape
    return query.new_empty(tokens, heads, value.shape[-1]), query.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("atropos::flash4_backward", mutates_args=())
def _flash4_backward(
    to_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    sums: torch.Tensor, starts: torch.Tensor, longest: int, scale: float, left: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    to_query, to_key, to_value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    kernels()._flash_attn_bwd(  # type: ignore[union-attr]
        query, key, value, out, to_out, sums, dq=to_query, dk=to_key, dv=to_value,
        **_flash4_arguments(starts, longest, scale, left),
    )  # fmt: skip
    return to_query, to_key, to_value


@_flash4_backward.register_fake
def _(to_out, query, key, value, *_):  # type: ignore[no-untyped-def]
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))


def _flash4_keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, starts, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, starts)


def _flash4_differentiate(ctx: Any, to_out: torch.Tensor, to_sums: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    found = _flash4_backward(to_out.contiguous(), *ctx.saved_tensors, *ctx.rest)
    return *found, None, None, None, None


_flash4_forward.register_autograd(_flash4_differentiate, setup_context=_flash4_keep)
