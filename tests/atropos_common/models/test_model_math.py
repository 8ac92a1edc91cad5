"""Sizes and costs of a model, against what torch computes and keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.optimization import Adafactor

from atropos_common.models.model_math import (
    Dimensions,
    effective_optimizer,
    optimizer_bytes,
    peak_flops,
    reached_flops,
)
from atropos_common.protocol.benchmark_summary import summary_sections, summary_text
from atropos_common.protocol.trainer_records import BenchmarkRecord
from trainer_core.config import TrainingConfig
from trainer_core.policy.attention import register
from trainer_core.policy.load import dimensions, train_only
from trainer_core.policy.logprobs import row_logprobs
from trainer_core.policy.lora import add_adapter
from trainer_core.policy.speed import activations
from trainer_core.report import MfuMeter
from trainer_core.rollouts.packing import PackedRow

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "vocab_size": 80,
}
CONFIGS = {"llama": LlamaConfig(**SMALL), "qwen3": Qwen3Config(**SMALL)}


def _model(name: str, **options: Any) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_config(CONFIGS[name], **options)
    return model


def _everything(model: torch.nn.Module) -> None:
    """Train it all."""


def _upper_layer(model: torch.nn.Module) -> None:
    train_only(model, [2])


def _adapters(model: torch.nn.Module, **fields: Any) -> None:
    add_adapter(
        model, TrainingConfig(model_name="m", weight_bridge_mode="lora_only", lora_r=1, **fields)
    )


@pytest.mark.parametrize(
    ("train", "reached"),
    [
        (_everything, 3),
        (_upper_layer, 1),
        (_adapters, 3),
        (partial(_adapters, lora_layer_indices=[1, 2]), 2),
    ],
    ids=["all", "layer 2", "LoRA", "LoRA on layers 1 and 2"],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_operations_are_those_that_torch_counts(
    name: str, train: Callable[[torch.nn.Module], None], reached: int
) -> None:
    """Forward and backward, the head for a third of the tokens alone. What adapters add does not
    count, nor that nobody asks for the gradient below the lowest of them: a part of one layer."""
    model, tokens, predicted = _model(name, attn_implementation="eager"), 48, 16
    train(model)
    with FlopCounterMode(display=False) as counter:
        hidden = model.base_model(torch.arange(tokens)[None] % 80).last_hidden_state[0, -predicted:]
        model.get_output_embeddings()(hidden).sum().backward()
    sizes = dimensions(model)
    masked_half = (
        2 * (sizes.layers + 2 * reached) * sizes.queries * tokens**2
    )  # torch counts it too
    mine = MfuMeter(model, torch.device("cpu")).flops([tokens], predicted)
    assert mine == pytest.approx(
        counter.get_total_flops() - masked_half,
        rel=1e-9 if train in (_everything, _upper_layer) else 0.04,
    )


EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURES: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3MoeConfig(**SMALL, num_experts=4, mlp_only_layers=[1], **EXPERTS),
    "glm4": Glm4MoeConfig(
        **SMALL, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, **EXPERTS
    ),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(**SMALL | {"head_dim": 64}, num_experts=4, num_experts_per_tok=3),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_of_experts_those_of_the_token_count(name: str) -> None:
    torch.manual_seed(0)
    eager = {"experts_implementation": "eager", "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(MIXTURES[name], **eager).eval()
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(48)[None] % 80, use_cache=False)
    sizes = dimensions(model)
    assert sizes.experts == 4
    forward = 2.0 * 48 * (sizes.layers * sizes.layer + sizes.vocab * sizes.hidden)
    scores = 4.0 * sizes.layers * sizes.queries * 48**2
    assert forward + scores == pytest.approx(counter.get_total_flops(), rel=1e-9)


def test_gpt2_names_its_sizes_otherwise() -> None:
    sizes = Dimensions.of({"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100})
    assert sizes == Dimensions(
        layers=2, hidden=64, inner=256, heads=4, kv_heads=4, head_size=16, vocab=100
    )


@pytest.mark.parametrize(("kept", "name"), [(3, "llama"), (3, "qwen3"), (1, "qwen3")])
def test_the_activation_estimate_is_near_what_autograd_keeps(name: str, kept: int) -> None:
    model, tokens = _model(name, dtype=torch.bfloat16, attn_implementation=register()), 512
    if kept == 1:
        train_only(model, [2])
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        row_logprobs(model, _row(tokens))
    kept_bytes = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    # Twice the tokens less once: what grows with tokens, which the largest gradient does not.
    estimate = activations(model, 2 * tokens).total - activations(model, tokens).total
    assert 0.8 < estimate / kept_bytes < 1.5, (estimate, kept_bytes)


def _row(tokens: int) -> PackedRow:
    flat = torch.arange(tokens) % 80
    predict = torch.arange(tokens - 1)
    nothing = torch.zeros(len(predict))
    return PackedRow(
        tokens=flat,
        positions=torch.arange(tokens),
        lengths=(tokens,),
        predict=predict,
        labels=flat[predict + 1],
        logprobs=nothing,
        advantages=nothing,
        temperatures=torch.ones(len(predict)),
    )


def test_optimizer_state_is_what_the_optimizers_keep() -> None:
    shapes = [(64, 32), (32,), (3, 5, 7)]
    params = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    for name, optimizer in (("adamw", torch.optim.AdamW(params)), ("adafactor", Adafactor(params))):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [value for value in states if isinstance(value, torch.Tensor) and value.dim()]
        assert optimizer_bytes(shapes, name) == sum(tensor.nbytes for tensor in tensors)
    assert optimizer_bytes([(4095,)], "adamw_8bit") == 8 * 4095, "smaller tensors stay in float32"
    assert optimizer_bytes([(4096,)], "adamw_8bit") == 2 * (4096 + 4 * 16)


def test_only_the_default_gives_way_on_a_cpu() -> None:
    assert effective_optimizer("adamw_8bit", chosen=False, on_gpu=False) == "adamw"
    for chosen, on_gpu in ((True, False), (False, True), (True, True)):
        assert effective_optimizer("adamw_8bit", chosen=chosen, on_gpu=on_gpu) == "adamw_8bit"
    assert effective_optimizer("adafactor", chosen=False, on_gpu=False) == "adafactor"


def test_a_gpu_that_is_not_known_has_no_peak() -> None:
    assert peak_flops("NVIDIA H200") == 989e12 and reached_flops("NVIDIA H200") == 790e12
    assert peak_flops("NVIDIA H20") == 148e12 and reached_flops("NVIDIA H20") is None
    assert peak_flops("NVIDIA H100 PCIe") == 756e12 and reached_flops("NVIDIA H100 PCIe") is None
    assert peak_flops("NVIDIA T4") is None
    assert reached_flops("NVIDIA T4") is None and peak_flops("") is None


def test_mfu_is_given_of_both_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    meter = MfuMeter(model, torch.device("cuda"), ranks=2)
    found = meter.measure([64], 32, 0.001)
    assert found.of_peak is not None
    assert found.of_peak == pytest.approx(meter.flops([64], 32) / 0.001 / 989e12 / 2)
    assert found.of_reached == pytest.approx(found.of_peak * 989 / 790)
    assert meter.measure([64], 32, 0.0).of_peak is None


def test_the_summary_shows_whatever_a_record_holds() -> None:
    figures = BenchmarkRecord(
        mode="none",
        total_s=90.0,
        steps=3,
        avg_step_s=float("nan"),
        total_step_s=float("inf"),
        avg_sync_s=0.0123,
        syncs=2,
        total_sync_s=1e300,
        avg_data_wait_s=0.5,
        total_data_wait_s=1.5,
        peak_bytes=10**400,
        tokens_per_s=1234.5,
    )
    text = summary_text(f"({figures.mode})", summary_sections(figures, no_memory="n/a (CPU)"))
    assert (
        "BENCHMARK SUMMARY (none)\n" in text
        and "  Total training time:     90.00s (1.50 min)\n" in text
    )
    assert "    Avg step time:         NaN\n" in text and "    Total step time:       ∞\n" in text
    assert (
        "    Avg sync time:         0.0123s (x2 syncs)\n" in text
        and "    Tokens per second:     1,234\n" in text
    )
    assert (
        "    Peak GPU memory:       ∞\n" in text
        and "    Avg GPU memory:        n/a (CPU)\n" in text
    )
    assert text.count("no data") == 3 and "    Engine capacity used:  no data\n" in text
    assert "    Trainer waiting:       0%\n" in text and max(map(len, text.splitlines())) <= 70
