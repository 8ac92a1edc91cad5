"""Facts about a model from its files: against real transformers models, the hub's cache and broken
files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from atropos_tui.profile.budget.inventory import Model, model_shapes, read_model
from tests.support.small_models import CONFIGS, build, saved, sizes_of


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    real = {key: tuple(tensor.shape) for key, tensor in build(CONFIGS[name]).named_parameters()}
    model = saved(CONFIGS[name], tmp_path)
    assert model.shapes == real and model.source == "config.json"
    assert model.parameters == sum(math.prod(shape) for shape in real.values())
    dimensions = model.dimensions
    assert (dimensions.hidden, dimensions.heads, dimensions.vocab) == (32, 4, 80)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_what_an_older_configuration_leaves_out_is_the_class_s_default(name: str) -> None:
    config = CONFIGS[name]
    optional = {
        "tie_word_embeddings",
        "num_key_value_heads",
        "head_dim",
        "attention_bias",
        "mlp_bias",
        "n_inner",
    }
    written = {key: value for key, value in config.to_dict().items() if key not in optional}
    if (
        name == "mistral"
    ):  # its class has a number of its own for this one, and every real file names it
        written["num_key_value_heads"] = 2
    if name == "qwen3":
        written["head_dim"] = 16
    if name in ("qwen2", "qwen3"):
        written["num_key_value_heads"] = 2
    names = {"gpt2": "GPT2LMHeadModel"}.get(name, f"{name.capitalize()}ForCausalLM")
    assert model_shapes(written | {"architectures": [names]}) == sizes_of(type(config)(**written))


def test_a_known_size() -> None:
    config = Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    with torch.device("meta"):
        real = sum(p.numel() for p in build(config).parameters())
    model = Model(config.to_dict(), sizes_of(config), "")
    assert model.parameters == real == 1_720_574_976


def test_an_unknown_architecture_is_read_from_its_safetensors(tmp_path: Path) -> None:
    config = {
        "architectures": ["Unheard"],
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "vocab_size": 10,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "no formula for Unheard" in str(read_model(str(tmp_path)))
    save_file(
        {"a": torch.zeros(10, 8), "layers.0.b": torch.zeros(3)}, tmp_path / "model-1.safetensors"
    )
    save_file({"c": torch.zeros(2, 2, 2, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    model = read_model(str(tmp_path))
    assert isinstance(model, Model)
    assert (model.parameters, model.source) == (91, "safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "d": "model-9.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "no safetensors" in str(read_model(str(tmp_path))), "half a download tells nothing"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read"),
        (b"\xff\x00", "cannot be read"),
        (b"[1, 2]", "cannot be read"),
        (b'{"architectures": ["LlamaForCausalLM"]}', "lacks hidden_size"),
        (b'{"architectures": ["GPT2LMHeadModel"], "n_embd": "x"}', "lacks vocab_size"),
        (b"[" * 100_000, "cannot be read"),
    ],
)
def test_a_broken_configuration_is_words(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert said in str(read_model(str(tmp_path)))


def test_a_hub_id_is_looked_up_in_the_local_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("no network"))
    assert read_model("owner/model") == "model not on this machine"
    snapshot = tmp_path / "models--owner--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--owner--model/refs").mkdir()
    (tmp_path / "models--owner--model/refs/main").write_text("abc")
    CONFIGS["qwen3"].save_pretrained(snapshot)
    config = json.loads((snapshot / "config.json").read_text()) | {
        "architectures": ["Qwen3ForCausalLM"]
    }
    (snapshot / "config.json").write_text(json.dumps(config))
    model = read_model("owner/model")
    assert isinstance(model, Model) and model.parameters == sum(
        p.numel() for p in build(CONFIGS["qwen3"]).parameters()
    )
