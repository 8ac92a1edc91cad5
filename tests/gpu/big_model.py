"""A random model of Qwen3-1.7B's shape, 3.4 GB in bfloat16: training does not change what moving
weights costs."""

from __future__ import annotations

from pathlib import Path


def make_qwen3_1_7b(folder: Path) -> Path:
    """Write it with the character tokenizer of the tiny model, once; returns `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from atropos_envs.tiny_model import make_tokenizer

    if (folder / "config.json").is_file():
        return folder
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        architectures=["Qwen3ForCausalLM"],
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
