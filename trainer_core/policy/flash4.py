"""FlashAttention 4 for packed rows, as two operators that torch.compile does not look into.

The kernels are those of the package `flash-attn-4` (CuTe DSL, compiled for the device on first use; sm_90 and newer).
They take fewer heads for keys than for queries, and windows. Source: flash_attn/cute/interface.py. Which sizes of heads
they get right, `kernel_choice` proves on the device.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from typing import Any

import torch

PROVEN: set[tuple[int, int]] = set()
"""Sizes of a head, of keys and of values, that `kernel_choice.wrong_kernels` has found right on this device."""


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
    out, _ = _forward(query, key, value, starts, longest, scale, -1 if window is None else window - 1)
    return out


def _arguments(starts: torch.Tensor, longest: int, scale: float, left: int) -> dict[str, Any]:
    return {
        "cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest,
        "softmax_scale": scale, "causal": left < 0, "window_size_left": None if left < 0 else left,
        "window_size_right": None if left < 0 else 0,
    }  # fmt: skip


@torch.library.custom_op("atropos::flash4_forward", mutates_args=())
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scale: float,
    left: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    found = kernels()._flash_attn_fwd(  # type: ignore[union-attr]  # who calls has asked
        query, key, value, **_arguments(starts, longest, scale, left), return_lse=True
    )
    return found[0], found[1]


@_forward.register_fake
def _(query, key, value, *_):  # type: ignore[no-untyped-def]
    tokens, heads, _ = query.shape
    return query.new_empty(tokens, heads, value.shape[-1]), query.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("atropos::flash4_backward", mutates_args=())
def _backward(
    to_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    sums: torch.Tensor, starts: torch.Tensor, longest: int, scale: float, left: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    to_query, to_key, to_value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    kernels()._flash_attn_bwd(  # type: ignore[union-attr]
        query, key, value, out, to_out, sums, dq=to_query, dk=to_key, dv=to_value,
        **_arguments(starts, longest, scale, left),
    )  # fmt: skip
    return to_query, to_key, to_value


@_backward.register_fake
def _(to_out, query, key, value, *_):  # type: ignore[no-untyped-def]
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, starts, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, starts)


def _differentiate(ctx: Any, to_out: torch.Tensor, to_sums: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    found = _backward(to_out.contiguous(), *ctx.saved_tensors, *ctx.rest)
    return *found, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
