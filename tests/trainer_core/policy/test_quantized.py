"""A quantized base: the trainer computes with the dequantized weights, and trains adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atropos_common.models.model_math import bits_of
from benchmarks.support.model_zoo import BLOCK, QUANTIZED, build, save
from trainer_core.errors import UsageError
from trainer_core.policy.load import load_config, load_model

CPU = torch.device("cpu")
LAYER = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module", params=QUANTIZED)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("quantized")
    save(request.param, folder)
    return request.param, folder


def test_its_weights_are_made_plain(saved: tuple[str, Path]) -> None:
    name, folder = saved
    model, whole = load_model(folder, torch.float32, CPU), build(QUANTIZED[name][0])
    found, exact = dict(model.named_parameters()), dict(whole.named_parameters())
    assert found.keys() == exact.keys() and not hasattr(model.config, "quantization_config")
    for each in exact:
        if not each.endswith("_proj.weight"):
            assert torch.equal(found[each], exact[each]), f"{each} was not quantized"
    gap = (found[LAYER] - exact[LAYER]).detach().abs()
    steps = (
        15 if "4 bits" in name else 14
    )  # of 4 bits in a group; of the largest value that FP8 rounds, a sixteenth
    assert 0 < float(gap.max()) <= float(exact[LAYER].abs().max()) * 1.05 / steps


def test_fp8_is_what_it_stands_for_to_the_last_bit(tmp_path: Path) -> None:
    save("Llama 3 in FP8", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    scales = stored[f"{LAYER}_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    plain = dict(load_model(tmp_path, torch.float32, CPU).named_parameters())[LAYER]
    assert torch.equal(plain, stored[LAYER].float() * scales)


@pytest.mark.parametrize(
    ("frozen", "shared", "words"),
    [
        (
            False,
            False,
            "training them would need each step to quantize them again; use the checkpoint",
        ),
        (True, True, "nothing to compute a gradient with; use .* set trainer.single_copy = false"),
    ],
)
def test_where_it_is_refused(
    saved: tuple[str, Path], frozen: bool, shared: bool, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        load_config(str(saved[1]), frozen=frozen, shared=shared)
    assert load_config(str(saved[1]), frozen=True).vocab_size == 128


def test_what_cannot_be_read_is_refused_in_words(saved: tuple[str, Path], tmp_path: Path) -> None:
    config = json.loads((saved[1] / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UsageError,
        match=r"\(gptq\), which transformers cannot make plain weights of; use the check",
    ):
        load_config(str(tmp_path), frozen=True)
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"its weights are quantized \(bitsandbytes\): "):
        load_model(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize(
    ("given", "bits"),
    [
        (None, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.125),
        ({"quant_method": "awq", "w_bit": 4, "group_size": 64}, 4.25),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"weights": {"num_bits": 8}}},
            },
            8,
        ),
    ],
)
def test_bits_of_a_weight(given: dict[str, object] | None, bits: float | None) -> None:
    assert bits_of({"quantization_config": given} if given else {}) == bits
