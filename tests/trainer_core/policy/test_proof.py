"""Proof of a model before training: every architecture of the zoo passes, each known error is
caught."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from atropos_common.models.model_math import why_refused
from benchmarks.support.model_zoo import MORE, WINDOW, ZOO, Architecture, build, save
from trainer_core.config import TrainingConfig
from trainer_core.errors import UsageError
from trainer_core.objective.loss import balance_coefficient, balance_loss
from trainer_core.objective.registry import Objective
from trainer_core.optimization.optimizers import Stepper
from trainer_core.optimization.step import accumulate
from trainer_core.policy import attention, logprobs
from trainer_core.policy.attention import register
from trainer_core.policy.load import load_model
from trainer_core.policy.logprobs import (
    LogitTransform,
    chunked_scores,
    row_logprobs,
    row_scores,
    whole_row,
)
from trainer_core.policy.proof import prove
from trainer_core.probe import _ScoredRow
from trainer_core.ranks.world import ALONE
from trainer_core.report import MfuMeter
from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.packing import pack

TRAINED = [name for name in ZOO if name not in ("Llama 4", "Nemotron")]
SEQUENCES = [torch.arange(3, 33) * 7 % 120, torch.arange(3, 20) * 11 % 120]


def _packed(model: torch.nn.Module) -> torch.nn.Module:
    model.set_attn_implementation(register())
    return model


def _made(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return _packed(build(name, dtype=dtype))


def test_the_windows_of_cohere_2_are_the_server_s(tmp_path: Path) -> None:
    """vLLM lets it see one token more than transformers' own code does with the same config."""
    save("Cohere 2", tmp_path)
    row = whole_row(SEQUENCES)
    ours = row_logprobs(load_model(tmp_path, torch.float32, torch.device("cpu")), row)
    theirs = build("Cohere 2")
    apart = row_logprobs(_packed(theirs), row)
    for holder in (theirs.config, *theirs.modules()):
        if getattr(holder, "sliding_window", None) is not None:
            holder.sliding_window = WINDOW + 1
    assert torch.allclose(ours, row_logprobs(theirs, row), atol=1e-5)
    assert (ours - apart).abs().max() > 0.01


@pytest.mark.parametrize(
    "name", [*TRAINED, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_an_architecture_is_computed_right(name: str) -> None:
    """Logprobs by the proof, and gradients of all parameters against the model's own eager code."""
    model = _made(name)
    assert prove(model) < 1e-4
    assert MfuMeter(model, torch.device("cpu")).flops([30, 20], 8) > 0, (
        "its sizes are known to whoever counts"
    )
    with torch.no_grad():
        row = whole_row(SEQUENCES)
        assert torch.allclose(
            _ScoredRow(model, row, ALONE).train, row_logprobs(model, row), atol=1e-5
        ), "nor is a cause made up"
    row_logprobs(model, whole_row(SEQUENCES)).sum().backward()
    packed = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"
    for tokens in SEQUENCES:
        shares = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        shares.gather(1, tokens[1:, None]).sum().backward()
    for n, p in model.named_parameters():
        mine, own = packed[n], p.grad
        assert (mine is None) == (own is None), n
        if mine is not None and own is not None:
            assert (mine - own).norm() <= 1e-4 * own.norm() + 1e-5, n


def test_half_precision_is_proved_in_float32() -> None:
    """On weights of bfloat16 the bound is as sharp, and every parameter is its own again
    afterwards."""
    model = _made("Qwen3-MoE", torch.bfloat16)
    before = dict(model.named_parameters())
    assert prove(model) < 1e-4
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    assert all(parameter.dtype == torch.bfloat16 for parameter in before.values())


def _no_last_word(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(logprobs, "logit_transform", lambda config: LogitTransform())


def _state_runs_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(logprobs, "carries_state", lambda config: False)


def _whole_without(left_out: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        right: Any = attention._whole

        def wrong(*args: Any) -> torch.Tensor:
            return right(*(None if i == left_out else value for i, value in enumerate(args)))  # type: ignore[no-any-return]

        patch.setattr(attention, "_whole", wrong)

    return plant


def _no_window(patch: pytest.MonkeyPatch) -> None:
    right: Any = attention._padded
    patch.setattr(attention, "_padded", lambda *args: right(*args[:-1], None))


def _nothing(patch: pytest.MonkeyPatch) -> None:
    """The configuration is enough."""


CHANGING: dict[str, Any] = {
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 26,
    "factor": 4.0,
}
LONGROPE = CHANGING | {
    "rope_type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
}
PLANTED: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = {
    "soft-capping of logits": ("Gemma 2", _no_last_word, "final_logit_softcapping = 3.0"),
    "soft-capping of scores": ("Gemma 2", _whole_without(5), "attn_logit_softcapping = 2.0"),
    "logits_scaling": ("Granite", _no_last_word, "logits_scaling = 4.0"),
    "logit_scale": ("Cohere 2", _no_last_word, "logit_scale = 0.25"),
    "sinks": ("GPT-OSS", _whole_without(6), "attention sinks (s_aux)"),
    "a state that runs on": ("Qwen3-Next", _state_runs_on, "layers of kind linear_attention"),
    "a state that runs on, Mamba": ("Falcon-H1", _state_runs_on, "layers of kind state-space"),
    "a window": ("Mistral", _no_window, "sliding_window = 8"),
    "longrope": ("longrope", _nothing, "rope_type longrope"),
    "dynamic": ("dynamic", _nothing, "rope_type dynamic"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_wrong_is_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant, cause = PLANTED[what]
    monkeypatch.setitem(
        ZOO,
        "longrope",
        Architecture("LlamaConfig", {"rope_parameters": LONGROPE, "max_position_embeddings": 104}),
    )
    dynamic = CHANGING | {"rope_type": "dynamic"}
    monkeypatch.setitem(
        ZOO,
        "dynamic",
        Architecture("LlamaConfig", {"rope_parameters": dynamic, "max_position_embeddings": 26}),
    )
    model = _made(name)
    plant(monkeypatch)
    with pytest.raises(
        UsageError, match=r"does not compute \w+ right: packed sequences are off by"
    ) as refused:
        prove(model)
    assert cause in str(refused.value)


@pytest.mark.parametrize("name", ["Llama 4", "Nemotron"])
def test_what_does_not_go_our_way_at_all_is_refused_in_words(name: str) -> None:
    model = _made(name)
    with pytest.raises(UsageError, match="its forward pass failed") as refused:
        prove(model)
    assert why_refused(model.config.to_dict()), "and from the configuration alone"
    assert name == "Llama 4" or "its attention layers drop the keyword" in str(refused.value)


def test_a_class_that_fails_without_a_word_is_refused_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError

    model = _made("Qwen3")
    monkeypatch.setattr("trainer_core.policy.proof.row_logprobs", fails)
    with pytest.raises(UsageError, match=r"its forward pass failed \(NotImplementedError"):
        prove(model)


@pytest.mark.parametrize("labels", [1, 3])
def test_the_last_word_has_its_gradient(labels: int) -> None:
    """Scaled and capped logits, in chunks, against plain float64."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 6, dtype=torch.float64), torch.randn(11, 6, dtype=torch.float64)
    wanted = torch.randint(11, (9, labels)) if labels > 1 else torch.randint(11, (9,))
    temperatures = torch.rand(9, dtype=torch.float64) + 0.5
    ways = []
    for chunked in (True, False):
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        if chunked:
            bent = LogitTransform(0.7, 2.5)
            scores = chunked_scores(
                *inputs, None, wanted, temperatures, chunk_elements=33, transform=bent
            )
            own, entropy = scores.logprobs, scores.entropy
        else:
            logits = 2.5 * torch.tanh(0.7 * inputs[0] @ inputs[1].T / 2.5) / temperatures[:, None]
            shares = logits.log_softmax(-1)
            own, entropy = (
                shares.gather(1, wanted.view(9, -1)).view(wanted.shape),
                -(shares.exp() * shares).sum(1),
            )
        (own * torch.arange(own.numel(), dtype=own.dtype).view(own.shape)).sum().backward()
        ways.append([own, entropy, *(value.grad for value in inputs)])
    for mine, plain in zip(*ways, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("name", ["Qwen3-MoE", "Mixtral", "OLMoE", "GLM-4-MoE"])
def test_the_balance_loss_is_that_of_transformers(name: str) -> None:
    """Value and gradient for one sequence; a row of several counts all of their tokens."""
    model = _made(name)
    tokens = SEQUENCES[0]
    routing: list[torch.Tensor] = []
    row_scores(model, whole_row([tokens]), routing=routing)
    chosen = model.config.num_experts_per_tok
    mine = balance_loss(routing, chosen)
    mine.backward()
    routers = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    theirs = load_balancing_loss_func(tuple(routing_of(model, tokens)), 4, chosen)
    torch.testing.assert_close(mine, theirs)
    theirs.backward()
    for n, p in model.named_parameters():
        assert (p.grad is None) == (n not in routers), n
        if p.grad is not None:
            torch.testing.assert_close(routers[n], p.grad, atol=1e-6, rtol=1e-4)


def routing_of(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    model.set_attn_implementation("eager")
    return list(
        model.base_model(
            input_ids=tokens[None], use_cache=False, output_router_logits=True
        ).router_logits
    )


def test_the_balance_loss_is_part_of_a_step() -> None:
    """As the setting or config.json asks; a dense model has nothing to balance."""
    config = TrainingConfig.model_validate(
        {"model_name": "m", "optimizer": "adamw", "max_grad_norm": 0}
    )
    rollouts = [
        Rollout(
            tokens.numpy(),
            np.arange(len(tokens)) > 3,
            *np.zeros((2, len(tokens)), np.float32),
            1.0,
            0.0,
            "",
            (),
        )
        for tokens in SEQUENCES
    ]
    norms = []
    for coefficient in (0.0, 0.5):
        objective = Objective(config.model_copy(update={"router_aux_loss_coef": coefficient}))
        model = _made("Qwen3-MoE")
        norms.append(
            accumulate(model, Stepper(model, config), pack(rollouts, 100), objective, 1).metrics[
                "grad_norm"
            ]
        )
    assert norms[0] == 0 < norms[1], "advantages are all 0, so the balance is all there is"
    assert balance_coefficient(model, None) == 0 and balance_coefficient(model, 0.2) == 0.2
    model.config.output_router_logits = True
    assert balance_coefficient(model, None) == model.config.router_aux_loss_coef > 0
    assert balance_coefficient(model, 0.0) == 0
    with pytest.raises(UsageError, match="no experts to balance"):
        balance_coefficient(_made("Llama 3"), 0.1)


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo", "gspo"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_balance_loss_does_not_depend_on_the_denominator(objective: str, masked: bool) -> None:
    """One value per row, by its share of the step's tokens, against transformers' function in
    float64."""
    fields: dict[str, Any] = {
        "model_name": "m",
        "optimizer": "adamw",
        "max_grad_norm": 0,
        "seq_len": 2048,
    }
    if masked:  # every token: nothing of the objective is left
        mask = {
            "ratio_base": "proximal",
            "tis_mask": "token",
            "tis_mask_low": 0,
            "tis_mask_high": 1e-6,
        }
        fields |= {**mask, "max_completion_tokens": 1000}
    config = TrainingConfig.model_validate(
        fields | {"objective": objective, "router_aux_loss_coef": 0.5}
    )
    rollouts = [
        Rollout(
            t.numpy(), np.arange(len(t)) > 3, *np.full((2, len(t)), 0, np.float32), 1.0, 0.0, "", ()
        )
        for t in SEQUENCES
    ]
    model = _made("Qwen3-MoE")
    rows = pack(rollouts, max(map(len, SEQUENCES)))
    assert len(rows) > 1
    outcome = accumulate(model, Stepper(model, config), rows, Objective(config), 1)
    total = sum(len(row.labels) for row in rows)
    wanted = 0.0
    for row in rows:
        parts = [routing_of(model, part) for part in row.tokens.split(row.lengths)]
        logits = [torch.cat(layer).double() for layer in zip(*parts, strict=True)]
        chosen = model.config.num_experts_per_tok
        aux = load_balancing_loss_func(tuple(logits), model.config.num_experts, chosen)
        wanted += 0.5 * float(aux.detach()) * len(row.labels) / total
    assert outcome.metrics["loss"] == pytest.approx(wanted, rel=1e-5)
