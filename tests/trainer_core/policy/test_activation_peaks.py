"""Peak memory of a pass against the plan: bytes that torch's allocator counts on a CPU, for a small
model with recomputed layers."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from trainer_core.config import TrainingConfig
from trainer_core.policy.lora import add_adapter
from trainer_core.policy.speed import activations, compile_layers, use_checkpointing

CPU = torch.device("cpu")
COMPILER = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler"),
]
"""Cases that only a compiler with kernels of its own saves; the first compilation of a machine
takes a minute or more."""
SHAPES: dict[str, Any] = {
    "llama": LlamaConfig(
        hidden_size=256, intermediate_size=896, num_attention_heads=8, num_key_value_heads=2
    ),
    "qwen3": Qwen3Config(
        hidden_size=256,
        intermediate_size=1280,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=32,
    ),
}
"""Heads and widths in the proportions of Llama-3.1-8B and Qwen3-32B."""


def _peak(model: Any, tokens: int) -> int:
    """Bytes beyond what was there before, at the peak of a forward and a backward pass of the
    layers."""
    inputs = torch.randn(
        1, tokens, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True
    )
    gradient, positions = torch.randn_like(inputs), torch.arange(tokens)[None]

    def step() -> None:
        model.base_model(inputs_embeds=inputs, position_ids=positions, use_cache=False)[0].backward(
            gradient
        )
        model.zero_grad()
        inputs.grad = None

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [
        event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("llama", False),
        pytest.param("llama", True, marks=COMPILER),
        pytest.param("qwen3", True, marks=COMPILER),
    ],
)
def test_adapters_over_a_layer_that_is_computed_anew(name: str, compiled: bool) -> None:
    """Their float32 gradients are twice and more the size of what the layer itself would have
    there."""
    config = SHAPES[name]
    config.vocab_size, config.num_hidden_layers = 64, 2
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    settings = TrainingConfig(
        model_name="m", weight_bridge_mode="lora_only", lora_target_modules=["all-linear"], lora_r=4
    )
    add_adapter(model, settings)
    use_checkpointing(model, "on", tokens=0, optimizer="adamw", device=CPU)
    if compiled:
        compile_layers(model)
    short, long = 128, 256
    counted = _peak(model, long) - _peak(model, short)
    planned = [
        activations(model, tokens, compiled=compiled, recomputed=2) for tokens in (short, long)
    ]
    assert planned[1]._again > planned[1].head, "there is next to no head here"
    # What grows with tokens.
    grows = [one.total - max(one.head, one._again) + one._again for one in planned]
    assert grows[1] - grows[0] == pytest.approx(counted, rel=0.1)
