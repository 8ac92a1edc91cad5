"""Shapes of models that the benchmarks make, with random weights."""

from __future__ import annotations

from typing import Any

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 40_960,
}  # fmt: skip
_A3B = _QWEN3 | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "rope_theta": 5e5,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 131_072,
    },
    "qwen3-1.7b": _QWEN3 | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
    },
    "qwen3-14b": _QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 40, "num_attention_heads": 40,
    },
    "qwen3-32b": _QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64,
    },
    "qwen3-30b-a3b": _A3B,
    "qwen3-moe-8": _A3B | {"num_hidden_layers": 8},
    "tiny-moe": _A3B | {
        "hidden_size": 128, "intermediate_size": 384, "moe_intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "num_experts": 32,
        "num_experts_per_tok": 4,
    },
    "tiny": _QWEN3 | {
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip
SHAPES["demo"] = SHAPES["tiny"] | {"vocab_size": 14, "rope_theta": 1e4}


def model_config(shape: str) -> Any:
    """transformers' configuration of that shape."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**SHAPES[shape])
