"""Which kernel computes a model's attention: the choice at the start, and the proof that it rests on.

FlashAttention 4 is not right for every size of heads (80: gradients off by 130 %, 4.0.0b18 on an H200), so each is
proved on the device before it is used.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from trainer_core.config import AttentionKernel
from trainer_core.errors import UsageError
from trainer_core.policy.attention import HALF, NAME_FLASH4, PROVEN, flash4, kernels, layout, one_by_one
from trainer_core.policy.sharding import compute_dtype

BOUND = 0.01
"""Relative distance of a kernel's result to float32's; rounding to bfloat16 takes up to 0.0035."""
_LENGTHS = (1, 7, 300, 64, 513)


def use_attention(model: nn.Module, kernel: AttentionKernel) -> str:
    """Let `model`, before its layers are compiled, compute attention by this kernel; returns the one that it uses,
    "sdpa" on a CPU and in float32.

    Args:
        model: loaded with `register`'s implementation, on its device.
        kernel: "auto" takes FlashAttention 4 where it is installed and right for this model's heads on this device.

    Raises:
        UsageError: FlashAttention 4 is asked for and cannot be used.
    """
    if next(model.parameters()).device.type != "cuda" or compute_dtype(model) not in HALF:
        if kernel == "flash_attention_4":
            raise UsageError(f"--attention-kernel {kernel} needs a GPU and half precision. auto takes what there is")
        return "sdpa"
    why_not = "" if kernel == "flash_attention_2" else _why_not_flash4(model)
    if kernel == "flash_attention_4" and why_not:
        raise UsageError(f"--attention-kernel {kernel}: {why_not}. auto takes what there is")
    if kernel == "flash_attention_2" or why_not:
        return "flash_attention_2"
    model.set_attn_implementation(NAME_FLASH4)  # type: ignore[operator]  # transformers' models have it
    return "flash_attention_4"


def _why_not_flash4(model: nn.Module) -> str:
    device = next(model.parameters()).device
    if torch.cuda.get_device_capability(device)[0] < 9:
        return "it needs a GPU of compute capability 9.0 or newer"
    if kernels() is None:
        return "pip install flash-attn-4"
    heads, window = _heads(model)
    if not all(isinstance(one, int) for one in heads):
        return "the model's configuration does not name its heads"
    dtype = compute_dtype(model)
    windows = [None, window] if window else [None]
    return next(filter(None, (wrong_kernels(device, dtype, *heads, one) for one in windows)), "")


def _heads(model: nn.Module) -> tuple[tuple[Any, Any, Any, Any], int | None]:
    """Heads of queries and of keys, a head's size in keys and in values, as the configuration says of all layers or
    most, and None for what it leaves out; the window of layers that have one."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]

    def told(*names: str) -> Any:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    heads, latent = told("num_attention_heads"), told("kv_lora_rank")  # MLA
    hidden = told("hidden_size")
    size = told("qk_head_dim", "head_dim") or (hidden // heads if isinstance(heads, int) and hidden else None)
    kv_heads = heads if latent else told("num_key_value_heads", "num_attention_heads")
    return (heads, kv_heads, size, told("v_head_dim") if latent else size), told("sliding_window")


@cache
def wrong_kernels(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int, value_size: int, window: int | None
) -> str:
    """Why attention of this shape is not left to FlashAttention 4, installed, on `device`, in words; empty when it is.

    Output and gradients of five random sequences are held against whole scores in float32. The first call of a shape
    compiles its kernels, which takes some seconds; training would do it otherwise.
    """
    packing = layout(_LENGTHS, device, dtype)
    dice = torch.Generator(device).manual_seed(0)
    query, key, value, to_out = (
        torch.randn(sum(_LENGTHS), number, width, generator=dice, device=device, dtype=dtype).requires_grad_()
        for number, width in ((heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size))
    )
    try:
        out = flash4(query, key, value, packing.cumulative, max(_LENGTHS), window=window)
        found = out.detach(), *torch.autograd.grad(out, (query, key, value), to_out)
    except Exception as error:  # the compiler's errors have no class in common
        return f"it does not run: {type(error).__name__}: {str(error)[:200]}"
    wide = [x.detach().float().requires_grad_() for x in (query, key, value)]
    out = one_by_one(*(x.transpose(0, 1) for x in wide), packing, heads // kv_heads, window=window)[0]
    exact = out.detach(), *torch.autograd.grad(out, wide, to_out.float())
    far = max(float((mine.float() - theirs).norm() / theirs.norm()) for mine, theirs in zip(found, exact, strict=True))
    if not far < BOUND:
        return f"heads of {size} come out wrong, by {far:.2g} of their size"
    PROVEN.add((size, value_size))
    return ""
