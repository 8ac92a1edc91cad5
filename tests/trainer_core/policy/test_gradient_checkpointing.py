"""Gradient checkpointing: the same gradients, layer filters included, and on only where memory is
short."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.made_rollouts import rollouts_of
from trainer_core.config import TrainingConfig
from trainer_core.objective.registry import Objective
from trainer_core.optimization.optimizers import Stepper, for_device
from trainer_core.optimization.step import accumulate
from trainer_core.policy import offload, speed
from trainer_core.policy.load import load_model, train_only
from trainer_core.policy.speed import activations, use_checkpointing
from trainer_core.rollouts.packing import pack

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(demo_base: Path) -> Path:
    """The demo's model: some of its layers are recomputed, and some are not."""
    return demo_base


def _switch(model: torch.nn.Module, mode: str, device: torch.device = CPU) -> int:
    return use_checkpointing(model, mode, tokens=16384, optimizer="adamw", device=device)


def _gradient(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    config = TrainingConfig(model_name="m", optimizer="adamw", max_grad_norm=0)
    accumulate(model, Stepper(model, config), pack(rollouts_of(), 60), Objective(config), 1)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layers", [None, [1, 3], [2]])
def test_gradients_are_the_same_with_it(base: Path, layers: list[int] | None) -> None:
    found = []
    for mode in ("off", "on"):
        model = load_model(str(base), torch.float32, CPU)
        train_only(model, layers)
        assert _switch(model, mode) == (4 if mode == "on" else 0)
        recomputed = 0

        def seen(*_: Any) -> None:
            nonlocal recomputed
            recomputed += 1

        model.base_model.layers[3].self_attn.register_forward_hook(seen)
        found.append(_gradient(model))
        rows = len(pack(rollouts_of(), 60))
        assert recomputed == rows * (2 if mode == "on" else 1), (
            "checkpointing really runs, or really does not"
        )
    plain, checkpointed = found
    assert plain.keys() == checkpointed.keys() and plain
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    assert layers is None or all(any(f".layers.{i}." in name for i in layers) for name in plain)


def test_dropout_stays_off_and_frozen_layers_stay_out(base: Path) -> None:
    model = load_model(str(base), torch.float32, CPU)
    train_only(model, [3])
    _switch(model, "on")
    inner = [m for layer in model.base_model.layers for m in layer.modules() if m is not layer]
    assert not any(m.training for m in inner), (
        "only the layer itself is in training mode, nothing that drops out"
    )
    assert not model.get_input_embeddings()(torch.tensor([1])).requires_grad


def test_on_a_cpu_auto_is_off(base: Path) -> None:
    assert not _switch(load_model(str(base), torch.float32, CPU), "auto")


@pytest.mark.parametrize(("free", "on"), [(10**12, False), (10**6, True)])
def test_auto_goes_by_free_memory(
    base: Path,
    free: int,
    on: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(speed, "_memory", lambda _: (free, free))
    model = load_model(str(base), torch.float32, CPU)
    assert _switch(model, "auto", torch.device("cuda")) == (4 if on else 0)
    assert model.keeps_logits is not on
    said = "on, 4 of 4 layers" if on else "off"
    assert f"Gradient checkpointing {said}: 16384 tokens need about" in capsys.readouterr().out


@pytest.mark.parametrize("trained", [None, [2, 3]])
def test_as_few_layers_as_it_takes_are_computed_anew(
    base: Path, trained: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(base), torch.float32, CPU)
    train_only(model, trained)
    one, all_kept = activations(model, 16384, recomputed=1).total, activations(model, 16384).total
    assert one < all_kept
    trained_bytes = sum(p.numel() for p in model.parameters() if p.requires_grad) * (4 + 8)
    monkeypatch.setattr(speed, "_memory", lambda _: (trained_bytes + (one + all_kept) // 2, 0))
    plain = _gradient(model)
    model.zero_grad()
    assert _switch(model, "auto", torch.device("cuda")) == 1
    assert not model.keeps_logits, "there is no room for them"
    passes = [0] * 4
    for i, layer in enumerate(model.base_model.layers):

        def seen(*_: Any, i: int = i) -> None:
            passes[i] += 1

        layer.self_attn.register_forward_hook(seen)
    again = _gradient(model)
    rows = len(pack(rollouts_of(), 60))
    lowest = 0 if trained is None else 2
    assert passes == [rows * (2 if i == lowest else 1) for i in range(4)]
    assert plain.keys() == again.keys() and all(
        torch.equal(plain[name], again[name]) for name in plain
    )


def test_the_estimate_grows_with_what_it_should(base: Path) -> None:
    model = load_model(str(base), torch.bfloat16, CPU)
    whole = activations(model, 10_000).total
    assert activations(model, 20_000).total == pytest.approx(2 * whole, rel=0.01)
    wide = activations(load_model(str(base), torch.float32, CPU), 10_000).total
    assert 1.3 * whole < wide < 2 * whole, "norms keep their input in float32 either way"
    train_only(model, [3])
    assert activations(model, 10_000).total < 0.5 * whole, (
        "layers below the lowest trained one keep nothing"
    )


def test_the_estimate_of_a_real_shape() -> None:
    """Qwen3-1.7B with rows of 16,384 tokens: 78 GB peak were measured, 20 GB of them weights,
    gradients and states."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert activations(model, 16384).total == pytest.approx(58e9, rel=0.06)


@pytest.mark.parametrize("layers", [None, [1, 3]])
def test_what_is_saved_goes_away_and_comes_back_the_same(
    base: Path, layers: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hidden state per layer and row, and each that a trained layer needs comes back: gradients
    bit for bit."""
    monkeypatch.setattr(offload, "SMALL", 64)
    away, back = [], []
    pack_one, fetch = offload.SavedStates._pack, offload.SavedStates._fetched

    def packed(self: Any, tensor: torch.Tensor) -> Any:
        saved = pack_one(self, tensor)
        away.append(weakref.ref(saved))
        assert saved.host.data_ptr() != tensor.data_ptr()
        return saved

    def fetched(self: Any, saved: Any) -> torch.Tensor:
        back.append(saved.host)
        return fetch(self, saved)

    monkeypatch.setattr(offload.SavedStates, "_pack", packed)
    monkeypatch.setattr(offload.SavedStates, "_fetched", fetched)
    found = []
    for kept_away in (False, True):
        model = load_model(str(base), torch.float32, CPU)
        train_only(model, layers)
        anew = use_checkpointing(
            model, "auto", tokens=64, optimizer="adamw", device=CPU, offload=kept_away
        )
        assert anew == (4 if kept_away else 0)
        found.append(_gradient(model))
    rows = len(pack(rollouts_of(), 60))
    assert len(away) == rows * len(model.base_model.layers)
    assert len({id(host) for host in back}) >= (rows if layers is None else 1)
    assert not any(saved() for saved in away), (
        "nothing is kept for layers that never ask for theirs"
    )
    assert found[0].keys() == found[1].keys() and all(
        torch.equal(found[0][n], found[1][n]) for n in found[0]
    )


def test_without_checkpointing_there_is_nothing_to_keep_away(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="leave out --gradient-checkpointing off"):
        TrainingConfig(model_name="m", activation_offload=True, gradient_checkpointing="off")
    asked = TrainingConfig(model_name="m", activation_offload=True, optimizer_offload=True)
    config = for_device(asked, CPU)
    assert not config.activation_offload and not config.optimizer_offload
    said = capsys.readouterr().out
    assert (
        "--activation-offload does nothing on a CPU" in said
        and "--optimizer-offload does nothing" in said
    )
