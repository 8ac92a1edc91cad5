"""Kernels on the device: heads that FlashAttention 4 takes, training by it as by FlashAttention 2,
and the type of the head's gradient sums."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.support.model_zoo import build
from tests.support.made_rollouts import rollouts_of
from trainer_core.policy.attention import kernels, register
from trainer_core.policy.kernel_choice import use_attention, wrong_kernels
from trainer_core.policy.logprobs import _add_product, compile_scores, row_logprobs
from trainer_core.policy.speed import compile_layers
from trainer_core.rollouts.packing import pack

pytestmark = pytest.mark.gpu
flash4_installed = pytest.mark.skipif(kernels() is None, reason="pip install flash-attn-4")
GPU = torch.device("cuda")


@flash4_installed
@pytest.mark.parametrize(
    "shape",
    [
        (16, 8, 128, 128, None),
        (32, 8, 64, 64, None),
        (16, 8, 128, 128, 128),
        (8, 4, 256, 256, None),
        (16, 16, 192, 128, None),
        (8, 2, 96, 96, None),
    ],
)
def test_common_heads_are_right(shape: tuple[int, int, int, int, int | None]) -> None:
    assert wrong_kernels(GPU, torch.bfloat16, *shape) == ""


@flash4_installed
def test_a_model_trains_alike_by_either() -> None:
    torch.manual_seed(0)
    shape = Qwen3Config(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=512,
    )
    with GPU:
        model = AutoModelForCausalLM.from_config(
            shape, dtype=torch.bfloat16, attn_implementation=register()
        ).eval()
    (row, *_) = pack(rollouts_of(40, longest=120), 16_384)

    def gradients() -> torch.Tensor:
        model.zero_grad()
        row_logprobs(model, row.to(GPU)).sum().backward()
        return torch.cat([p.grad.float().flatten() for p in model.parameters()])

    assert use_attention(model, "flash_attention_2") == "flash_attention_2"
    older = gradients()
    assert use_attention(model, "flash_attention_4") == "flash_attention_4"
    for compiled in (False, True):
        if compiled:
            compile_layers(model)
        newer = gradients()
        assert float((newer - older).norm() / older.norm()) < 0.02, compiled


def test_the_first_rows_need_no_kernel_that_was_not_compiled_for_no_row() -> None:
    torch.compiler.reset()
    model = build("Qwen3", dtype=torch.bfloat16).to(GPU)
    model.set_attn_implementation(register())
    counters.clear()
    compile_scores(model.config, torch.bfloat16, GPU)
    assert counters["stats"]["unique_graphs"] == 3
    for row in pack(rollouts_of(40, longest=120), 2048):
        row_logprobs(model, row.to(GPU)).square().sum().backward()
    assert counters["stats"]["unique_graphs"] == 3


def test_the_head_sums_its_gradient_in_float32() -> None:
    """Many small parts would be lost in half precision."""
    torch.manual_seed(0)
    total = torch.zeros(3000, 256, device=GPU)
    exact = total.double()
    for _ in range(40):
        to_logits, hidden = (
            torch.randn(64, width, device=GPU, dtype=torch.bfloat16) for width in total.shape
        )
        _add_product(total, to_logits, hidden)
        exact += to_logits.double().T @ hidden.double()
    assert float((total - exact).norm() / exact.norm()) < 1e-6
