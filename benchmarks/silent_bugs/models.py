"""Tiny models whose random weights are large enough to differ visibly; no download."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 320
POSITIONS = 512
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
# The spread of the weights; random models with the usual 0.02 say nearly nothing about a token.
SPREAD = 0.15


def _rope(base: float) -> dict[str, Any]:
    return {"rope_theta": base, "rope_type": "default"}


def _llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=_rope(500_000.0)))


def _qwen2() -> nn.Module:
    rope = _rope(1_000_000.0)
    return Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True, rope_parameters=rope))


def _qwen3() -> nn.Module:
    rope = _rope(1_000_000.0)
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=32, rope_parameters=rope))


def _gemma() -> nn.Module:
    config = Gemma3TextConfig(
        **SMALL,
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32,
    )
    return Gemma3ForCausalLM(config)


def _moe() -> nn.Module:
    rope = _rope(1_000_000.0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **MOE, head_dim=32, rope_parameters=rope))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "moe": _moe,
}


def build(family: str, *, seed: int = 0) -> Any:
    """Build a model whose matrices, biases and norms are all random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FAMILIES[family]().eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                zero = "norm" in name and family == "gemma"
                if weight.dim() == 1:
                    around = 0.0 if zero or name.endswith("bias") else 1.0
                    weight.normal_(around, 0.2)
                elif "embed" in name and family == "gemma":
                    weight.normal_(0.0, 0.06)  # Gemma multiplies its embeddings by sqrt(hidden)
                else:
                    weight.normal_(0.0, SPREAD)
    return model


def save(model: Any, folder: Path, *, dtype: str = "float32", **config: Any) -> Path:
    """Write a model and its tokenizer.

    Args:
        config: keys of config.json that replace the model's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = model.dtype
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    model.to(kept)
    tokenizer().save_pretrained(folder)
    edit_json(folder / "config.json", **config)
    # vLLM would take its sampling defaults from here.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder


def changed(source: Path, target: Path, change: Callable[[Any], None], **save_as: Any) -> Path:
    """Write a copy of a folder with changed weights."""
    dtype = json.loads((source / "config.json").read_text())["dtype"]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        change(model)
    return save(model, target, **{"dtype": dtype, **save_as})


def copied(source: Path, target: Path, **config: Any) -> Path:
    """Write a copy of a folder with other keys in its config.json; None removes a key."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    edit_json(target / "config.json", **config)
    return target


def moved_copy(source: Path, target: Path, change: Callable[[Any], None]) -> Path:
    """Write a copy of any model's folder with changed weights and everything else as it is."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    for file in target.glob("*.safetensors*"):
        file.unlink()
    dtype = json.loads((source / "config.json").read_text())
    name = str(dtype.get("dtype") or dtype.get("torch_dtype") or "float32")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        change(model)
    model.to(getattr(torch, name)).save_pretrained(target)
    return target


def edit_json(path: Path, **keys: Any) -> None:
    found = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))


def tokenizer(*, shift: int = 0) -> Any:
    """Return a tokenizer of single bytes.

    Args:
        shift: moves every id, which makes another tokenizer of the same size.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    letters = sorted(ByteLevel.alphabet())
    letters = letters[shift:] + letters[:shift]
    words = ["<pad>", "<s>", "</s>", *letters]
    core = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return made


def write_adapter(
    base: Path,
    folder: Path,
    *,
    seed: int = 7,
    rank: int = 8,
    alpha: float = 16.0,
    spread: float = 0.08,
    targets: tuple[str, ...] = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
) -> Path:
    """Write a random LoRA adapter of a folder's model, in peft's format."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.split(".")[-1] in targets:
            a = torch.randn(rank, module.in_features, generator=draw) * spread
            b = torch.randn(module.out_features, rank, generator=draw) * spread
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    write_adapter_config(folder, base, rank, alpha, targets)
    return folder


def write_adapter_config(
    folder: Path, base: Path, rank: int, alpha: float, targets: tuple[str, ...]
) -> None:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
