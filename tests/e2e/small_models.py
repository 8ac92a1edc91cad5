"""Small random models of every supported architecture, with the tiny model's tokenizer.

Weights are larger than transformers' own start, biases and norms included, so that a tensor put in
the wrong place or a rotary frequency that is off shows in every logprob.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atropos_envs.tiny_model import (
    EOS_ID,
    PAD_ID,
    VOCABULARY,
    build_tiny_model,
    make_tokenizer,
    save_model,
)

_SHAPE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "head_dim": 32,
        },
    ),
    "llama3-tied": (
        "Llama",
        {"tie_word_embeddings": True, "head_dim": 32, "num_key_value_heads": 1},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-tied": (
        "Mistral",
        {"sliding_window": None, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "qwen2": (
        "Qwen2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "hidden_size": 128},
    ),
    "qwen2-tied": (
        "Qwen2",
        {"tie_word_embeddings": True, "hidden_size": 128, "num_key_value_heads": 4},
    ),
    "qwen3": (
        "Qwen3",
        {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}
"""Name -> transformers' prefix and what differs from the common shape."""

_TWO_EXPERTS = {"num_experts_per_tok": 2}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {"hidden_size": 128}),
    "gemma3": ("Gemma3", {"head_dim": 32, "sliding_window": 64, "query_pre_attn_scalar": 32}),
    "glm4": ("Glm4", {"head_dim": 32}),
    "smollm3": ("SmolLM3", {"hidden_size": 128}),
    "olmo2": ("Olmo2", {"hidden_size": 128}),
    "granite": ("Granite", {"hidden_size": 128}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"head_dim": 32, "num_experts": 4, "moe_intermediate_size": 96, **_TWO_EXPERTS},
    ),
    "mixtral": (
        "Mixtral",
        {"head_dim": 32, "num_local_experts": 4, "sliding_window": None, **_TWO_EXPERTS},
    ),
}
"""Models with tensors that the server stores in other ways: fused in the checkpoint, fused on the
server, one for each expert."""
_CONFIGS = {"Gemma3": "Gemma3Text"}
"""Prefixes of configurations where they are others."""


TINY = "tiny qwen3"
"""The demo's model."""


def make_model(
    name: str, path: Path, *, seed: int = 5, generation: dict[str, Any] | None = None, **shape: Any
) -> Path:
    """Save a random float32 model of `ARCHITECTURES` or `OTHERS`, or the demo's; `generation` goes
    into its generation_config.json, `shape` changes its configuration."""
    if name == TINY:
        return save_model(build_tiny_model(), path)
    import torch
    import transformers

    prefix, changes = (ARCHITECTURES | OTHERS)[name]
    config = getattr(transformers, f"{_CONFIGS.get(prefix, prefix)}Config")(
        **{**_SHAPE, "dtype": "float32", **changes, **shape}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                else:
                    parameter.copy_(torch.randn_like(parameter) * 1.2 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    asked = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID, **(generation or {})}
    (path / "generation_config.json").write_text(json.dumps(asked))
    return path


def another_model(model: Path, path: Path) -> Path:
    """A model that is not `model`: to Qwen2 a Llama of its shape, which has fewer tensors; else a
    Qwen2."""
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "qwen2":
        return make_model("qwen2", path)
    same = {
        key: config[key] for key in ("hidden_size", "num_key_value_heads", "tie_word_embeddings")
    }
    return make_model("llama3", path, **same)
