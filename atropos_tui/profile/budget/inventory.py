"""The machine and the models of a budget: GPUs, host memory, models without their weights.

    read_machine()            # from NVML and the host
    named_machine("8xH100")   # also 2xH200, 1xA100-40GB, 4x80GB, 2xH200,1xL40S
    read_model("Qwen/Qwen3-8B")

Shapes of common architectures have a formula. transformers builds others without memory in a second
process; if that fails, the headers of the files are read. Only config.json is downloaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from atropos_common.models.model_math import GPU_MEMORY, Dimensions, bits_of
from atropos_common.system.files import open_regular, read_regular, write_private
from atropos_common.system.parent_death import with_parent
from atropos_tui.gpu import Nvml, given_here
from atropos_tui.profile.load import cache_dir

MOST_GPUS = 1024
_NAMED = re.compile(r"(?:(\d{1,4})\s*[xX*]\s*)?([A-Za-z0-9][A-Za-z0-9 _-]*)")
_SIZE = re.compile(r"(?:(?P<name>.+)-)?(?P<size>\d{1,4})\s*GI?B", re.IGNORECASE)


@dataclass(frozen=True)
class Gpu:
    name: str
    total: int


@dataclass(frozen=True)
class Hardware:
    """GPUs by index, and the host's memory in bytes."""

    gpus: tuple[Gpu, ...]
    host: int | None
    is_here: bool = True
    """The machine that this process runs on."""


def read_machine() -> Hardware:
    try:
        gpus = tuple(Gpu(card.name, card.total) for card in Nvml(given_here()).read())
    except Exception:  # NVML has one error class for each cause; all mean that no GPU is usable
        gpus = ()
    return Hardware(gpus, psutil.virtual_memory().total)


def named_machine(text: str) -> Hardware:
    """Raises:
    ValueError: unknown GPU; the message lists the known ones.
    """
    gpus: list[Gpu] = []
    for part in text.split(","):
        match = _NAMED.fullmatch(part.strip())
        if match is None or not 0 < int(match[1] or 1) <= MOST_GPUS - len(gpus):
            raise ValueError(f"not a list of GPUs such as {EXAMPLES}")
        gpus += [_gpu(match[2])] * int(match[1] or 1)
    return Hardware(tuple(gpus), None, is_here=False)


EXAMPLES = "8xH100, 2xH200, 1xA100-40GB, or by size as 4x80GB"


def _gpu(text: str) -> Gpu:
    name = re.sub(r"[\s_-]+", "-", text.strip()).upper().removeprefix("NVIDIA-")
    if name in GPU_MEMORY:
        return Gpu(name, GPU_MEMORY[name] * 1024**2)
    if size := _SIZE.fullmatch(name):
        known = GPU_MEMORY.get(size["name"] or "")
        # Marketing sizes differ from the usable memory: an H100-80GB has 79.6 GiB, an H200-141GB
        # 140.4.
        if known and abs(known / 1024 - int(size["size"])) < 3:
            return Gpu(name, known * 1024**2)
        if int(size["size"]):
            return Gpu(name, int(size["size"]) * 1024**3)
    known_names = ", ".join(GPU_MEMORY)
    raise ValueError(
        f"unknown GPU {text.strip()!r}; use one of {known_names}, or a size such as 4x80GB"
    )


Shape = tuple[int, ...]
Shapes = dict[str, Shape]

LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
BUILD_TIMEOUT = 180.0
"""About 6 s on an idle core."""
HUB_TIMEOUT = 5.0
_ABSENT = "model not on this machine"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PARTS = re.compile(r"(?:^|_)(?:layers?|experts?|heads?|blocks|groups|depths?|stages?)$")
"""Keys that count parts of a model."""
MOST_PARTS = 4096
MOST_NUMBER = 2**53
_MAX_HEADER = 100_000_000
"""Bytes; limit of the safetensors format."""


@dataclass(frozen=True)
class Model:
    config: dict[str, Any]
    shapes: Shapes
    source: str
    """Origin of the shapes, for display."""

    @cached_property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def stored_bytes(self, width: int) -> int:
        """Bytes in memory if an unquantized weight has `width` bytes."""
        bits = bits_of(self.config)
        if bits is None:
            return self.parameters * width
        layers = sum(math.prod(s) for n, s in self.shapes.items() if len(s) > 1 and LAYER.search(n))
        return int(layers * bits / 8) + (self.parameters - layers) * width

    @property
    def decoder(self) -> Mapping[str, Any]:
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def dimensions(self) -> Dimensions:
        return Dimensions.of(self.decoder, head_norms=any("q_norm" in name for name in self.shapes))

    @property
    def max_length(self) -> int | None:
        """Longest context in tokens."""
        longest = self.decoder.get("max_position_embeddings") or self.decoder.get("n_positions")
        return int(longest) if longest else None

    @property
    def dtype(self) -> str:
        return str(
            self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        ).removeprefix("torch.")

    def trained(self, layers: list[int] | None) -> Shapes:
        if layers is None:
            return self.shapes
        return {
            n: s
            for n, s in self.shapes.items()
            if (layer := LAYER.search(n)) and int(layer[1]) in layers
        }


def read_model(name: str) -> Model | str:
    """The model, or why it is unknown. `name`: a folder or a hub id."""
    path = config_file(name)
    if isinstance(path, str):
        return path
    try:
        config = json.loads(read_regular(path, unlinked=0))
        if reason := absurd_size(config):
            return f"{path}: {reason}"
        if shapes := model_shapes(config):
            model: Model | str = Model(config, shapes, "config.json")
        else:
            model = _without_formula(path.parent, config)
        if isinstance(model, Model):
            # Read what the budget needs now, so that a configuration without it fails here, with a
            # reason.
            _ = (model.dimensions, model.max_length)
        return model
    except KeyError as error:
        return f"{path} lacks {error.args[0]}"
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        return f"{path} cannot be read as a model's configuration ({type(error).__name__})"


def absurd_size(value: object, key: str = "") -> str:
    """Why a number is not a possible size. One hostile number of layers could use all memory."""
    if isinstance(value, dict):
        return next(
            filter(None, (absurd_size(item, str(name)) for name, item in value.items())), ""
        )
    if isinstance(value, list):
        return next(filter(None, (absurd_size(item, key) for item in value)), "")
    # Other numbers, such as token ids or lengths, may be large.
    if isinstance(value, int) and value > (
        most := MOST_PARTS if _PARTS.search(key) else MOST_NUMBER
    ):
        return f"{key} is {value:,}; no model has more than {most:,}"
    return ""


def _without_formula(folder: Path, config: dict[str, Any]) -> Model | str:
    if not isinstance(built := build(folder, config), str):
        return built
    if shapes := _stored_shapes(folder):
        return Model(config, shapes, "safetensors")
    return (
        f"no formula for {architecture(config)}, and {built}; its folder has no safetensors either"
    )


def is_hub_id(model: str) -> bool:
    """`owner/name`: one slash, no leading dot, and no folder of that name here."""
    looks = _HUB_ID.fullmatch(model) is not None and not model.startswith(".")
    return looks and not Path(model.split("/")[0]).is_dir()


def config_file(name: str) -> Path | str:
    """The config.json of a folder or hub id, or why there is none."""
    try:
        folder = Path(name).expanduser()
        if (folder / "config.json").is_file():
            return folder / "config.json"
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
    except (
        Exception
    ):  # no huggingface_hub, or a name that it refuses: the model is not in its cache
        return _ABSENT
    if isinstance(cached, str):
        return Path(cached)
    return _from_hub(name) if is_hub_id(name) else _ABSENT


def _from_hub(name: str) -> Path | str:
    import httpx
    from huggingface_hub import constants, errors, hf_hub_download

    # huggingface_hub reads the variable only at its import.
    if (
        constants.HF_HUB_OFFLINE
        or os.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES
    ):
        return f"{_ABSENT}, and HF_HUB_OFFLINE turns the hub off"
    try:
        # A quick request first: huggingface_hub retries a failing one for half a minute.
        httpx.head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
        return Path(hf_hub_download(name, "config.json", etag_timeout=HUB_TIMEOUT))
    except (errors.RepositoryNotFoundError, errors.GatedRepoError):
        return (
            f"{_ABSENT}, and {constants.ENDPOINT} has no {name}, or needs a token for it (hf "
            f"auth login)"
        )
    except errors.EntryNotFoundError:
        return f"{_ABSENT}, and {name} on {constants.ENDPOINT} has no config.json"
    except (OSError, httpx.HTTPError, errors.HfHubHTTPError, ValueError):
        way_out = "fill the cache, or give a folder with its config.json"
        return f"{_ABSENT}, and {constants.ENDPOINT} cannot be reached: {way_out}"


def build(folder: Path, config: Mapping[str, Any]) -> Model | str:
    """Build the model with transformers; on failure return the reason. The cache folder keeps
    the result: it takes seconds."""
    if not isinstance(config.get("model_type"), str):
        return "its config.json names no model_type"
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return "torch and transformers, which would build it without memory, are not installed here"
    # Another release of transformers may build other tensors.
    key = json.dumps([config, metadata.version("transformers")], sort_keys=True).encode()
    kept = cache_dir() / "shapes" / f"{hashlib.sha256(key).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError):
        return _built(json.loads(kept.read_text(encoding="utf-8")))
    built = _build_in_child(folder)
    if isinstance(built, str):
        return built
    with suppress(OSError):  # without a cache the next call takes the same seconds again
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_private(kept, json.dumps(built))
    return _built(built)


def _build_in_child(folder: Path) -> dict[str, Any] | str:
    command = with_parent([sys.executable, "-P", "-m", "trainer_core.shapes", str(folder)])
    # No GPU and no network: a CUDA context would take memory of a GPU in use.
    quiet = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT,
            check=True,
            env=os.environ | quiet,
        )
        return dict(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"it could not be built without memory ({type(error).__name__})"


def _built(answer: Mapping[str, Any]) -> Model | str:
    if "error" in answer:
        return f"transformers {metadata.version('transformers')} cannot build it: {answer['error']}"
    return Model(
        answer["config"],
        {name: tuple(shape) for name, shape in answer["shapes"].items()},
        "transformers",
    )


def _stored_shapes(folder: Path) -> Shapes:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(read_regular(index, unlinked=0))["weight_map"].values()))
        files = [folder / name for name in names]
        if not all(file.is_file() for file in files):
            return {}
    else:
        files = sorted(folder.glob("*.safetensors"))
    shapes: Shapes = {}
    for file in files:
        with open_regular(file, unlinked=0) as stream:
            # A safetensors file begins with the length of its JSON header.
            size = int.from_bytes(stream.read(8), "little")
            if size > _MAX_HEADER:
                raise ValueError(f"{file} is no safetensors file")
            header = json.loads(stream.read(size))
        shapes |= {
            name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        }
    return shapes


def architecture(config: Mapping[str, Any]) -> str:
    # The first entry is the class that transformers builds.
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "(none)"


def model_shapes(config: Mapping[str, Any]) -> Shapes | None:
    """Every tensor; None without a formula for the architecture.

    Raises:
        KeyError: the configuration lacks a field.
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
    """Tensors of embedding, attention and gated MLP layers, final norm, and head.

    Args:
        qkv_bias: these projections have a bias; default: as configured.
        output_bias: the projection after the heads has one.
        head_norms: each head normalizes its queries and keys.
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
    # A tied head is the embedding's tensor, which counts once.
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
            shapes |= {
                f"{layer}.{name}.weight": (rows, columns),
                f"{layer}.{name}.bias": (columns,),
            }
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
