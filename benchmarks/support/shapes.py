"""Shapes of the models that the benchmarks make, with random weights and a tokenizer.

    python -m benchmarks.support.shapes SHAPE FOLDER cpu|cuda

writes one, in a process whose end gives the memory back.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40_960,
}
_A3B = _QWEN3 | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131_072,
    },
    "qwen3-1.7b": _QWEN3
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-14b": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "qwen3-32b": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "qwen3-30b-a3b": _A3B,
    "qwen3-moe-8": _A3B | {"num_hidden_layers": 8},
    "tiny-moe": _A3B
    | {
        "hidden_size": 128,
        "intermediate_size": 384,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
    "tiny": _QWEN3
    | {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}
SHAPES["demo"] = SHAPES["tiny"] | {"vocab_size": 14, "rope_theta": 1e4}


def model_config(shape: str) -> Any:
    """transformers' configuration of that shape."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**SHAPES[shape])


def build(
    shape: str, device: torch.device, attention: str, dtype: torch.dtype | None = None
) -> Any:
    """The model with random weights, the same each time: in `dtype`, else bfloat16 on a GPU and
    float32 elsewhere."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(
            model_config(shape), dtype=dtype, attn_implementation=attention
        )


def byte_level(model: Any) -> Tokenizer:
    """A tokenizer of bytes around a model of `tokenizers`."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    core = Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


def save_tokenizer(size: int, folder: Path) -> None:
    """A byte-level tokenizer with a vocabulary of `size`."""
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in letters for b in letters]
    merges = (pairs + [(a + b, c) for a, b in pairs for c in letters])[: size - 1 - len(letters)]
    words = ["<eos>", *letters, *("".join(merge) for merge in merges)]
    core = byte_level(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(folder)


def save_model(shape: str, folder: Path, device: torch.device) -> None:
    """Random weights of the shape, with a tokenizer of its vocabulary's size."""
    import torch
    from transformers import GenerationConfig

    save_tokenizer(SHAPES[shape]["vocab_size"], folder)
    model = build(shape, device, "sdpa")
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    model.save_pretrained(folder, max_shard_size="4GB")
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", file=sys.stderr, flush=True)
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(argv: list[str]) -> None:
    import torch

    shape, folder, device = argv
    save_model(shape, Path(folder), torch.device(device))


if __name__ == "__main__":
    main(sys.argv[1:])
