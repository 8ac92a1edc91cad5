"""The checkpoint's tensors as views of a transformers model, and a server that keeps experts in
another order."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Gemma3TextConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from atropos_common.protocol.manifest import Shard, TensorEntry, TensorView
from tests.support.small_models import CONFIGS, SMALL, build
from trainer_core.errors import UsageError
from trainer_core.policy.load import (
    attach_views,
    checkpoint_layout,
    checkpoint_tensors,
    empty_model,
)
from trainer_core.weight_sync.shared_vllm import PROOF, _proof_value

MOE = Qwen3MoeConfig(
    **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=16
)
MODELS: dict[str, PreTrainedConfig] = {
    "qwen3 tied": CONFIGS["qwen3 tied"],
    "phi3": Phi3Config(**SMALL, pad_token_id=0),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=16),
    "qwen3 moe": MOE,
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
}


def _empty(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return empty_model(copy.deepcopy(config), dtype)  # which names the packed attention in it


@pytest.mark.parametrize("name", MODELS)
def test_a_model_s_tensors_are_those_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    model = build(MODELS[name])
    model.save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    mine = checkpoint_tensors(model)
    assert mine.keys() == checkpoint.keys()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for tensor, value in mine.items():
        assert torch.equal(value, checkpoint[tensor]), tensor
        assert value.untyped_storage().data_ptr() in own, "a view: what is trained is seen in it"
    assert checkpoint_layout(_empty(MODELS[name])) == checkpoint_layout(model)


def served(
    checkpoint: dict[str, torch.Tensor], config: Any
) -> tuple[dict[str, torch.Tensor], Shard]:
    """As vLLM keeps Qwen3-MoE: gate and up of all experts in w13, down in w2; nothing else is fused
    here."""
    tensors, views = {}, {}
    for name, value in checkpoint.items():
        stem, is_expert, rest = name.partition(".experts.")
        if not is_expert:
            tensors[name] = value.clone()
            views[name] = TensorView(
                parameter=name, offset=0, shape=list(value.shape), stride=list(value.stride())
            )
            continue
        number, kind, _ = rest.split(".")
        rows, columns = value.shape
        both = 1 if kind == "down_proj" else 2
        whole = tensors.setdefault(
            f"{stem}.w{2 if both == 1 else 13}",
            torch.zeros(config.num_experts, both * rows, columns),
        )
        part = whole[int(number), rows if kind == "up_proj" else 0 :][:rows]
        part.copy_(value)
        views[name] = TensorView(
            parameter=f"{stem}.w{2 if both == 1 else 13}",
            offset=part.storage_offset(),
            shape=[rows, columns],
            stride=list(part.stride()),
        )
    entries = {
        name: TensorEntry(shape=list(t.shape), stride=list(t.stride()), dtype="float32")
        for name, t in tensors.items()
    }
    return tensors, Shard(kind="shm", param_mappings=entries, views=views)


def test_stacked_experts_are_views_of_the_server_s_stack(tmp_path: Path) -> None:
    original = build(MOE).eval()
    original.save_pretrained(tmp_path)
    tensors, shard = served(load_file(tmp_path / "model.safetensors"), MOE)
    model = _empty(MOE)
    assert attach_views(model, tensors, shard) == len(list(original.parameters()))
    for (name, mine), (_, true) in zip(
        model.named_parameters(), original.named_parameters(), strict=True
    ):
        assert torch.equal(mine, true), name
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")[2, 30, 5] = 7.0
    assert tensors["model.layers.1.mlp.w13"][2, 30, 5] == 7.0


def test_experts_in_another_order_are_refused(tmp_path: Path) -> None:
    build(MOE).save_pretrained(tmp_path)
    tensors, shard = served(load_file(tmp_path / "model.safetensors"), MOE)
    one, other = (shard.views[f"model.layers.0.mlp.experts.{i}.gate_proj.weight"] for i in (1, 2))
    one.offset, other.offset = other.offset, one.offset
    with pytest.raises(
        UsageError, match=r"experts.gate_up_proj: no view covers its 8 parts in the server's"
    ):
        attach_views(_empty(MOE), tensors, shard)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_memory_has_the_buffers_of_a_loaded_one(name: str) -> None:
    empty, true = _empty(MODELS[name], torch.bfloat16), build(MODELS[name], torch.bfloat16)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert [each for each, _ in empty.named_parameters()] == [
        each for each, _ in true.named_parameters()
    ], "ties too"
    for (buffer, mine), (_, theirs) in zip(
        empty.named_buffers(), true.named_buffers(), strict=True
    ):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), buffer


@pytest.mark.parametrize("name", [*MODELS, "gpt2"])
def test_the_value_that_proves_sharing_is_seen_in_logits_whatever_its_name(name: str) -> None:
    torch.manual_seed(0)
    model = build(copy.deepcopy((MODELS | CONFIGS)[name])).eval()
    tokens = torch.tensor([[2, 2, 2, 2]])
    value = _proof_value(model)
    assert value.shape == (1,) and not value.requires_grad
    with torch.no_grad():
        before = model(tokens).logits
        value.add_(PROOF * (1 + value.abs()))
        assert (model(tokens).logits - before).abs().max() > 0.1
