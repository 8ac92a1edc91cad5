"""Checkpoints whose weights are quantized: what their config.json says, and what can be done with them. Torch-free.

An adapter trains over such a base: the engine serves it as it is, the trainer computes with the plain weights that it
stands for, in its own type. Nothing here trains the quantized weights themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

READ = ("fp8", "mxfp4", "compressed-tensors", "bitsandbytes")
"""Methods of which transformers makes plain weights again."""
_SCALE_BITS = 16


def method_of(config: Mapping[str, Any]) -> str | None:
    """How the checkpoint of this config.json is quantized, as transformers names it; None for plain weights."""
    found = config.get("quantization_config")
    return str(found.get("quant_method") or "unnamed") if isinstance(found, Mapping) else None


def bits_of(config: Mapping[str, Any]) -> float | None:
    """Bits of a quantized weight with its share of the scales, as stored and as served; None for plain weights."""
    method = method_of(config)
    if method is None:
        return None
    given = config["quantization_config"]
    if method == "compressed-tensors":
        groups = [group.get("weights") or {} for group in (given.get("config_groups") or {}).values()]
        weights = groups[0] if groups else {}
        return _with_scales(weights.get("num_bits") or 8, weights.get("group_size"))
    if method == "bitsandbytes":
        return _with_scales(4, 32) if given.get("load_in_4bit") else 8.0
    if method == "mxfp4":
        return 4.25
    return _with_scales(given.get("bits") or given.get("w_bit") or 8, given.get("group_size"))


def _with_scales(bits: float, group: Any) -> float:
    return bits + (_SCALE_BITS / group if isinstance(group, int) and group > 0 else 0)


def why_not_base(config: Mapping[str, Any], *, frozen: bool, shared: bool) -> tuple[str, str] | None:
    """The part of `model_math.why_refused` that is about quantized weights."""
    method = method_of(config)
    if method is None:
        return None
    other = "use the checkpoint that it was made from"
    if not frozen:
        reason = f"its weights are quantized ({method}), and training them would need each step to quantize them anew"
        return reason, f"{other}, or train adapters over it: mode = lora_only"
    if shared:
        reason = f"its weights are quantized ({method}): the engine holds nothing to compute a gradient with"
        return reason, f"{other}, or set trainer.single_copy = false"
    if method not in READ:
        return f"its weights are quantized ({method}), which transformers cannot make plain weights of", other
    return None
