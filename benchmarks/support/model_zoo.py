"""Tiny models of many architectures, with random weights large enough for every part to matter.

`matrix` in benchmarks/models.py trains each of them in every mode;
tests/trainer_core/policy/test_proof.py proves each on its own. Windows are short, so that a
sequence of some tens of tokens reaches past them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WINDOW = 8
_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MANY: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "original_max_position_embeddings": 256,
    "factor": 2.0,
}


@dataclass(frozen=True)
class Architecture:
    """A configuration class of transformers and what differs from `_SMALL`."""

    config: str
    options: dict[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    """Names of `_SMALL` that this class has otherwise."""
    lora_targets: tuple[str, ...] = ()
    """Where the trainer's own choice, q_proj and v_proj, does not exist."""

    def build(self) -> Any:
        """The configuration."""
        import transformers

        small = {name: value for name, value in _SMALL.items() if name not in self.drop}
        return getattr(transformers, self.config)(**small | self.options)


ZOO: dict[str, Architecture] = {
    "Llama 3": Architecture("LlamaConfig"),
    "Mistral": Architecture("MistralConfig", {"sliding_window": WINDOW}),
    "Qwen2": Architecture("Qwen2Config"),
    "Qwen3": Architecture("Qwen3Config", {"head_dim": 32}),
    "Phi-3, Phi-4": Architecture(
        "Phi3Config", {"sliding_window": None}, lora_targets=("qkv_proj",)
    ),
    "Phi-3 long": Architecture(
        "Phi3Config", {"rope_parameters": _LONG, "original_max_position_embeddings": 256}
    ),
    "Gemma 2": Architecture(
        "Gemma2Config",
        _MIXED
        | {
            "head_dim": 32,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma 3": Architecture(
        "Gemma3TextConfig",
        _MIXED | {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    "Gemma 4": Architecture(
        "Gemma4TextConfig",
        _MIXED
        | {
            "head_dim": 32,
            "global_head_dim": 32,
            "tie_word_embeddings": True,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 0,
        },
    ),
    "GLM-4": Architecture("Glm4Config", {"head_dim": 32}),
    "Granite": Architecture(
        "GraniteConfig",
        {
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.3,
        },
    ),
    "Cohere 2": Architecture(
        "Cohere2Config", _MIXED | {"logit_scale": 0.25, "tie_word_embeddings": True}
    ),
    "OLMo 2": Architecture("Olmo2Config"),
    "OLMo 3": Architecture("Olmo3Config", _MIXED),
    "SmolLM3": Architecture("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "StarCoder2": Architecture("Starcoder2Config"),
    "GPT-2": Architecture(
        "GPT2Config",
        {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512, "tie_word_embeddings": True},
    ),
    "Qwen3-MoE": Architecture("Qwen3MoeConfig", _EXPERTS | {"head_dim": 32}),
    "Qwen2-MoE": Architecture("Qwen2MoeConfig", _EXPERTS | {"shared_expert_intermediate_size": 32}),
    "Mixtral": Architecture("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "OLMoE": Architecture("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "GLM-4-MoE": Architecture("Glm4MoeConfig", _MANY | {"head_dim": 32}),
    "DeepSeek-V3": Architecture(
        "DeepseekV3Config", _MANY | _MLA | {"topk_method": "noaux_tc"}, lora_targets=("o_proj",)
    ),
    "GPT-OSS": Architecture(
        "GptOssConfig", _MIXED | {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "Qwen3-Next": Architecture(
        "Qwen3NextConfig",
        _LINEAR | _EXPERTS | {"head_dim": 32, "shared_expert_intermediate_size": 32},
    ),
    "Qwen3.5": Architecture("Qwen3_5TextConfig", _LINEAR | {"head_dim": 32}),
    "Falcon-H1": Architecture(
        "FalconH1Config",
        {
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "lm_head_multiplier": 0.5,
        },
    ),
    "LFM2": Architecture(
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 128,
            "block_dim": 128,
            "tie_word_embeddings": True,
        },  # as all are: vLLM's has no head of its own
    ),
    "Llama 4": Architecture(
        "Llama4TextConfig",
        {
            "head_dim": 32,
            "intermediate_size_mlp": 160,
            "num_local_experts": 2,
            "attention_chunk_size": 64,
        },
    ),
    "Nemotron": Architecture("NemotronConfig"),
}


_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
MORE: dict[str, Architecture] = {
    **{
        name: Architecture(f"{name}Config")
        for name in (
            "Apertus",
            "Arcee",
            "Cohere",
            "Ernie4_5",
            "GPTNeoX",
            "NanoChat",
            "OPT",
            "Olmo",
            "Phi",
        )
    },
    **{
        name: Architecture(f"{name}Config", {"head_dim": 32})
        for name in ("Gemma", "Glm", "Helium", "SeedOss")
    },
    "HunYuanDenseV1": Architecture("HunYuanDenseV1Config", {"head_dim": 32}),
    "Exaone4": Architecture("Exaone4Config", _MIXED),
    "Ministral": Architecture("MinistralConfig", _MIXED | {"head_dim": 32}),
    "VaultGemma": Architecture("VaultGemmaConfig", _MIXED | {"head_dim": 32}),
    "GraniteMoe": Architecture("GraniteMoeConfig", _FOUR),
    "Phimoe": Architecture("PhimoeConfig", _FOUR),
    "MiniMaxM2": Architecture("MiniMaxM2Config", _FOUR | {"head_dim": 32, "rotary_dim": 32}),
    "FlexOlmo": Architecture("FlexOlmoConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Ernie4_5_Moe": Architecture(
        "Ernie4_5_MoeConfig", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}
    ),
    "Dots1": Architecture("Dots1Config", _MANY),
    "DeepseekV2": Architecture("DeepseekV2Config", _MANY | _MLA | {"topk_method": "greedy"}),
    "Glm4MoeLite": Architecture("Glm4MoeLiteConfig", _MANY | _MLA),
    "GraniteMoeHybrid": Architecture(
        "GraniteMoeHybridConfig",
        {
            "num_local_experts": 0,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
        },
    ),
    "Jamba": Architecture(
        "JambaConfig",
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
    "Lfm2Moe": Architecture(
        "Lfm2MoeConfig",
        _EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "Mamba2": Architecture(
        "Mamba2Config", {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1}
    ),
    "NemotronH": Architecture("NemotronHConfig", {"hybrid_override_pattern": "M*"}),
}
"""Proved in the trainer, without a server."""


@torch.no_grad()
def build(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """The architecture of this name with random weights: matrices so large that logits are some
    nats apart."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        (ZOO | MORE)[name].build(), dtype=dtype
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.1)
        elif parameter.ndim == 1 and not parameter.any():
            parameter.normal_(0, 0.3)  # biases, sinks, norms that add one
    return model.eval()


def save(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write the model of this name as a checkpoint that loads by itself, without a tokenizer."""
    base, write = QUANTIZED.get(name, (name, None))
    model = build(base, dtype=dtype)
    if write is None:
        model.save_pretrained(folder)
    else:
        write(model, folder)


@torch.no_grad()
def _save_fp8(model: Any, folder: Path) -> None:
    """Matrices of layers in float8_e4m3, with a scale for each block, as DeepSeek and Qwen publish
    them."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        small = (blocks / scales[:, None, :, None]).reshape(rows, columns)
        tensors |= {name: small.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (folder / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def _save_4_bits(model: Any, folder: Path) -> None:
    """Linear layers in integers of 4 bits, a scale for each group of a row, as llm-compressor
    writes them."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=BLOCK
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    config = QuantizationConfig(
        config_groups={"linear": scheme},
        ignore=["lm_head"],
        format="pack-quantized",
        quantization_status="frozen",
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.reshape(module.weight.shape[0], -1, BLOCK)
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
            module.weight_scale.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


BLOCK = 32
"""Weights that share a scale, to each side."""
QUANTIZED: dict[str, tuple[str, Callable[[Any, Path], None]]] = {
    "Llama 3 in FP8": ("Llama 3", _save_fp8),
    "Qwen3 in 4 bits": ("Qwen3", _save_4_bits),
}
"""Checkpoints of models of the zoo whose weights are quantized: a base for adapters."""
