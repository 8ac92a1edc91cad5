"""Choose a model's attention kernel, and test FlashAttention 4 on the device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from trainer_core.config import AttentionKernel
from trainer_core.errors import UsageError
from trainer_core.policy.attention import (
    HALF,
    NAME_FLASH4,
    PROVEN,
    flash4,
    kernels,
    layout,
    one_by_one,
)
from trainer_core.policy.sharding import compute_dtype

BOUND = 0.01
"""Limit of the relative error against float32; bfloat16's rounding causes up to 0.0035."""
# Tokens of the test sequences: below, across and above the kernels' tiles.
_LENGTHS = (1, 7, 300, 64, 513)


def use_attention(model: nn.Module, kernel: AttentionKernel) -> str:
    """Set the attention kernel of `model` and return its name, "sdpa" on a CPU and in float32.

    Call it before layers are compiled.
    """
    if next(model.parameters()).device.type != "cuda" or compute_dtype(model) not in HALF:
        if kernel == "flash_attention_4":
            raise UsageError(
                f"--attention-kernel {kernel} needs a GPU and half precision; use auto"
            )
        return "sdpa"
    why_not = "" if kernel == "flash_attention_2" else _why_not_flash4(model)
    if kernel == "flash_attention_4" and why_not:
        raise UsageError(f"--attention-kernel {kernel}: {why_not}; or use auto")
    if kernel == "flash_attention_2" or why_not:
        return "flash_attention_2"
    model.set_attn_implementation(NAME_FLASH4)  # type: ignore[operator]  # transformers' models have it
    return "flash_attention_4"


def _why_not_flash4(model: nn.Module) -> str:
    device = next(model.parameters()).device
    if torch.cuda.get_device_capability(device)[0] < 9:
        return "it needs a GPU of compute capability 9.0 or newer"
    if kernels() is None:
        return "it is not installed: pip install flash-attn-4"
    heads, window = _heads(model)
    if not all(isinstance(one, int) for one in heads):
        return "the model's configuration does not name its heads"
    dtype = compute_dtype(model)
    # Some head sizes are wrong: 80 has gradients off by 130 % (4.0.0b18 on an H200).
    windows = [None, window] if window else [None]
    return next(filter(None, (wrong_kernels(device, dtype, *heads, one) for one in windows)), "")


def _heads(model: nn.Module) -> tuple[tuple[Any, Any, Any, Any], int | None]:
    """((query heads, key heads, key size, value size), sliding window); None where not
    configured."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]

    def first_of(*names: str) -> Any:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if value is not None), None)

    heads, latent = first_of("num_attention_heads"), first_of("kv_lora_rank")  # MLA
    size, hidden = first_of("qk_head_dim", "head_dim"), first_of("hidden_size")
    if not size and isinstance(heads, int) and hidden:
        size = hidden // heads
    # MLA expands its latent vector to keys for every query head.
    kv_heads = heads if latent else first_of("num_key_value_heads", "num_attention_heads")
    value_size = first_of("v_head_dim") if latent else size
    return (heads, kv_heads, size, value_size), first_of("sliding_window")


@cache
def wrong_kernels(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    value_size: int,
    window: int | None,
) -> str:
    """Return why not to use FlashAttention 4 for this shape on `device`; empty if it is correct.

    Compares output and gradients of five random sequences with full scores in float32.
    """
    packing = layout(_LENGTHS, device, dtype)
    more = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": dtype}
    shapes = ((heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size))
    query, key, value, to_out = (
        torch.randn(sum(_LENGTHS), *shape, **more).requires_grad_() for shape in shapes
    )
    # The first call of a shape compiles its kernels, some seconds that training needs anyway.
    try:
        out = flash4(query, key, value, packing.cumulative, max(_LENGTHS), window=window)
        found = out.detach(), *torch.autograd.grad(out, (query, key, value), to_out)
    except Exception as error:  # the compiler's errors share no base class
        return f"it does not run: {type(error).__name__}: {str(error)[:200]}"
    wide = [x.detach().float().requires_grad_() for x in (query, key, value)]
    # The kernel takes [N, heads, size], `one_by_one` takes [heads, N, size].
    across = (x.transpose(0, 1) for x in wide)
    out = one_by_one(*across, packing, heads // kv_heads, window=window)[0]
    exact = out.detach(), *torch.autograd.grad(out, wide, to_out.float())
    pairs = zip(found, exact, strict=True)
    far = max(float((ours.float() - theirs).norm() / theirs.norm()) for ours, theirs in pairs)
    # Written so that NaN counts as wrong.
    if not far < BOUND:
        return f"results for heads of size {size} are wrong, relative error {far:.2g}"
    PROVEN.add((size, value_size))
    return ""
