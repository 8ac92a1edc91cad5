"""Offload to the host's memory on a real GPU: the same step bit for bit, less GPU memory, copies
beside the step.

python -m pytest -m gpu tests/gpu/test_offload.py -s        # six minutes
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.support.made_rollouts import rollouts_of
from trainer_core.checkpoints.state import split_tensors
from trainer_core.config import TrainingConfig
from trainer_core.objective.registry import Objective
from trainer_core.optimization.optimizers import Stepper, round_stochastically, salt
from trainer_core.optimization.step import accumulate
from trainer_core.policy.attention import register
from trainer_core.policy.speed import use_checkpointing
from trainer_core.rollouts.packing import pack

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
GPU = torch.device("cuda")


def _steps(
    steps: int, side: int = 1024, count: int = 96, **fields: Any
) -> tuple[torch.Tensor, int, float]:
    """Return the weights after `steps` steps in the host's memory, where they count in no later
    peak, the peak bytes of a step beyond weights and gradients, and its seconds."""
    torch.manual_seed(0)
    model = torch.nn.ParameterList(
        torch.randn(side, side, device=GPU).mul_(0.02).bfloat16() for _ in range(count)
    )
    config = TrainingConfig.model_validate(
        {"model_name": "m", "lr": 1e-3, "max_grad_norm": 0.5, **fields}
    )
    stepper = Stepper(model, config)
    generator = torch.Generator(GPU).manual_seed(1)
    most, lasted = 0, 0.0
    for step in range(1, steps + 1):
        for param in model:
            (param * torch.randn(param.shape, device=GPU, generator=generator)).sum().backward()
        stepper.set_lr(step)
        stepper.clip()
        torch.cuda.synchronize()
        held = sum(p.nbytes for p in model) + sum(g.nbytes for g in stepper.gradients)
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        stepper.compute()
        lasted = time.perf_counter() - began
        most = max(most, torch.cuda.max_memory_allocated() - held)
        stepper.write()
    whole = split_tensors(stepper.state_dict())[1]
    assert all(torch.isfinite(t).all() for t in whole.values() if t.is_floating_point())
    return torch.cat([p.detach().flatten().cpu() for p in model]), most, lasted


@pytest.mark.parametrize("gradients", ["float32", "bfloat16"])
@pytest.mark.parametrize("masters", ["fp32", "kahan", "stochastic"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "adafactor"])
def test_the_step_is_the_same_and_takes_less(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, masters: str, gradients: str
) -> None:
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(
        "trainer_core.optimization.optimizers.PART_PARAMETERS", 1 << 20
    )  # a weight a part, of 96
    fields = {"optimizer": optimizer, "master_weights": masters, "gradient_dtype": gradients}
    here, most_here, _ = _steps(4, **fields)
    away, most_away, lasted = _steps(4, **fields, optimizer_offload=True)
    assert torch.equal(here, away)
    per = most_here / here.numel(), most_away / here.numel()
    print(
        f"\n{optimizer} {masters} {gradients}: {per[0]:.2f} and {per[1]:.2f} bytes a "
        f"parameter, {lasted:.3f} s"
    )
    if (optimizer, masters) != ("adafactor", "stochastic"):
        assert most_away < most_here


def test_rounding_is_the_same_as_on_a_cpu() -> None:
    """Compiled on the one, by operations on the other."""
    for count, first in ((100_003, 5), (1 << 20, (1 << 32) - 1000)):
        values = torch.randn(count, generator=torch.Generator().manual_seed(count))
        here, there = (
            round_stochastically(values.to(device), salt(b"8 bytes.", first, device))
            for device in (GPU, torch.device("cpu"))
        )
        assert torch.equal(here.cpu(), there)


def _gradient(offload: bool) -> tuple[torch.Tensor, int]:
    torch.manual_seed(0)
    shape = Qwen3Config(
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=512,
        tie_word_embeddings=True,
    )
    with GPU:
        model = AutoModelForCausalLM.from_config(
            shape, dtype=torch.bfloat16, attn_implementation=register()
        ).eval()
    config = TrainingConfig(model_name="m", optimizer="adafactor", max_grad_norm=0)
    use_checkpointing(model, "on", tokens=1, optimizer="adafactor", device=GPU, offload=offload)
    stepper = Stepper(model, config)
    rows = pack(rollouts_of(600, longest=120), 16_384)
    for _ in range(2):  # the second with the host's memory at hand
        torch.cuda.reset_peak_memory_stats()
        accumulate(model, stepper, rows, Objective(config), 1)
    gradients = torch.cat([g.flatten().cpu() for g in stepper.gradients])
    return gradients, torch.cuda.max_memory_allocated()


def test_checkpointed_activations_come_back_the_same() -> None:
    (here, most_here), (away, most_away) = _gradient(False), _gradient(True)
    print(
        f"\npeak {most_here / 2**20:.0f} MiB on the device, {most_away / 2**20:.0f} with "
        f"hidden states in the host"
    )
    spread = (here - away).abs().max() / here.abs().max()
    assert spread < 1e-2, "attention's backward pass adds up in any order"
    assert most_away < most_here
