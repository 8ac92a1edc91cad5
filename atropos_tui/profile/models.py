"""What a model is made of: config.json and the shapes of its tensors, without its weights.

Names and shapes of the tensors are those of transformers; a tied head is the embedding and is listed once. The most
usual architectures have a formula, so that a laptop without torch can plan for them in no time; for any other
transformers is asked, in another process (`model_files.py`), or the headers of the files are read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from atropos_common.model_math import Dimensions
from atropos_common.quantized import bits_of
from atropos_tui.profile.model_files import build, config_file

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
_MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors format itself."""


@dataclass(frozen=True)
class Model:
    """One model, without its weights."""

    name: str
    config: dict[str, Any]
    shapes: Shapes
    source: str
    """Where the shapes come from, for people."""

    @cached_property
    def parameters(self) -> int:
        """Parameters in all."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def stored_bytes(self, width: int) -> int:
        """Of all weights in memory where plain ones take `width` bytes each: matrices of layers may be quantized."""
        bits = bits_of(self.config)
        if bits is None:
            return self.parameters * width
        layers = sum(math.prod(s) for n, s in self.shapes.items() if len(s) > 1 and LAYER.search(n))
        return int(layers * bits / 8) + (self.parameters - layers) * width

    @property
    def largest(self) -> int:
        """Parameters of the largest tensor."""
        return max(math.prod(shape) for shape in self.shapes.values())

    @property
    def decoder(self) -> Mapping[str, Any]:
        """The part of the configuration that describes the language model."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def dimensions(self) -> Dimensions:
        """Sizes of its layers, by which memory is estimated."""
        return Dimensions.of(self.decoder, head_norms=any("q_norm" in name for name in self.shapes))

    @property
    def max_length(self) -> int | None:
        """Longest context the model was made for, in tokens."""
        longest = self.decoder.get("max_position_embeddings") or self.decoder.get("n_positions")
        return int(longest) if longest else None

    @property
    def dtype(self) -> str:
        """The type its weights are stored in."""
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32").removeprefix("torch.")

    def trained(self, layers: list[int] | None) -> Shapes:
        """The tensors that are trained when only these transformer layers are; all for None."""
        if layers is None:
            return self.shapes
        return {n: s for n, s in self.shapes.items() if (layer := LAYER.search(n)) and int(layer[1]) in layers}


def read_model(name: str) -> Model | str:
    """The model, or in words why nothing is known about it.

    Args:
        name: a directory, or a hub id.
    """
    path = config_file(name)
    if isinstance(path, str):
        return path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if shapes := model_shapes(config):
            model: Model | str = Model(name, config, shapes, "config.json")
        else:
            model = _built(name, path.parent, config)
        if isinstance(model, Model):
            # Read now what the budget needs, so that a configuration without it is found here.
            _ = (model.dimensions, model.max_length)
        return model
    except KeyError as error:
        return f"{path} lacks {error.args[0]}"
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        return f"{path} cannot be read as a model's configuration ({type(error).__name__})"


def _built(name: str, folder: Path, config: dict[str, Any]) -> Model | str:
    """A model of an architecture without a formula: as transformers builds it, else as its files have it."""
    if not isinstance(built := build(folder, config), str):
        return Model(name, built.config, built.shapes, "transformers")
    if shapes := _stored_shapes(folder):
        return Model(name, config, shapes, "safetensors")
    return f"no formula for {architecture(config)}, and {built}; no safetensors beside its config.json either"


def _stored_shapes(folder: Path) -> Shapes:
    """Shapes from the headers of every safetensors file; empty when a file of the index is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / name for name in names]
        if not all(file.is_file() for file in files):
            return {}
    else:
        files = sorted(folder.glob("*.safetensors"))
    shapes: Shapes = {}
    for file in files:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > _MAX_HEADER:
                raise ValueError(f"{file} is no safetensors file")
            header = json.loads(stream.read(size))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def architecture(config: Mapping[str, Any]) -> str:
    """The class that transformers would build."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "(none)"


def model_shapes(config: Mapping[str, Any]) -> Shapes | None:
    """Every tensor of the model; None for an architecture that no formula here knows.

    Raises:
        KeyError: the configuration lacks a field that its architecture needs.
    """
    formula = _FORMULAS.get(architecture(config))
    return formula(config) if formula else None


def _decoder(
    config: Mapping[str, Any],
    *,
    qkv_bias: bool | None = None,
    output_bias: bool | None = None,
    head_norms: bool = False,
) -> Shapes:
    """Embedding, layers of attention and gated MLP, final norm, head.

    Args:
        qkv_bias: whether these projections have a bias; left out, the configuration says so.
        output_bias: the same of the projection behind the heads.
        head_norms: queries and keys are normalised in each head.
    """
    hidden, vocab, inner = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    queries, keys = heads * size, (config.get("num_key_value_heads") or heads) * size
    configured, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    qkv_bias = configured if qkv_bias is None else qkv_bias
    output_bias = configured if output_bias is None else output_bias
    linear = {
        "self_attn.q_proj": (queries, hidden, qkv_bias),
        "self_attn.k_proj": (keys, hidden, qkv_bias),
        "self_attn.v_proj": (keys, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, queries, output_bias),
        "mlp.gate_proj": (inner, hidden, mlp_bias),
        "mlp.up_proj": (inner, hidden, mlp_bias),
        "mlp.down_proj": (hidden, inner, mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if head_norms:
        norms |= {"self_attn.q_norm": size, "self_attn.k_norm": size}
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name, (rows, columns, bias) in linear.items():
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        shapes |= {f"{layer}.{name}.weight": (width,) for name, width in norms.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _gpt2(config: Mapping[str, Any]) -> Shapes:
    hidden, vocab = config["n_embd"], config["vocab_size"]
    inner = config.get("n_inner") or 4 * hidden
    shapes: Shapes = {
        "transformer.wte.weight": (vocab, hidden),
        "transformer.wpe.weight": (config["n_positions"], hidden),
    }
    for index in range(config["n_layer"]):
        layer = f"transformer.h.{index}"
        # Conv1D: columns are the output.
        for name, rows, columns in (
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, inner),
            ("mlp.c_proj", inner, hidden),
        ):
            shapes |= {f"{layer}.{name}.weight": (rows, columns), f"{layer}.{name}.bias": (columns,)}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"{layer}.{name}.weight": (hidden,), f"{layer}.{name}.bias": (hidden,)}
    shapes |= {"transformer.ln_f.weight": (hidden,), "transformer.ln_f.bias": (hidden,)}
    if not config.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


_FORMULAS: dict[str, Callable[[Mapping[str, Any]], Shapes]] = {
    "LlamaForCausalLM": _decoder,
    "MistralForCausalLM": partial(_decoder, qkv_bias=False, output_bias=False),
    "Qwen2ForCausalLM": partial(_decoder, qkv_bias=True, output_bias=False),
    "Qwen3ForCausalLM": partial(_decoder, head_norms=True),
    "GPT2LMHeadModel": _gpt2,
}
