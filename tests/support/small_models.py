"""Tiny real transformers models, one for each architecture with a formula in the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from atropos_tui.profile.budget.inventory import Model, read_model

SMALL: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "llama tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SMALL, head_dim=16),
    "mistral tied": MistralConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2 tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "qwen3 tied": Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True, attention_bias=True),
    "gpt2": GPT2Config(vocab_size=80, n_embd=32, n_layer=3, n_head=4, n_positions=64),
    "gpt2 untied": GPT2Config(
        vocab_size=80, n_embd=32, n_layer=2, n_head=4, n_inner=50, tie_word_embeddings=False
    ),
}


def build(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def saved(config: PreTrainedConfig, folder: Path) -> Model:
    """The model as `read_model` finds it after `save_pretrained`."""
    build(config).save_pretrained(folder)
    model = read_model(str(folder))
    assert isinstance(model, Model), model
    return model


def sizes_of(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in build(config).named_parameters()}
