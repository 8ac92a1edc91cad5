"""Layers under torch.compile: those with experts as one graph, in half precision as on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from benchmarks.support.model_zoo import build
from tests.support.made_rollouts import rollouts_of
from trainer_core.policy import logprobs
from trainer_core.policy.attention import register
from trainer_core.policy.load import decoder_layers
from trainer_core.policy.logprobs import compile_scores, row_logprobs, use_head, whole_row
from trainer_core.policy.routing import replay_in
from trainer_core.rollouts.packing import pack

CAPTURED = "eager"
"""Runs what was captured, as it is."""
DIFFERENTIATED = aot_autograd(fw_compiler=lambda graph, _: graph.forward)
"""And traces its backward pass with it, which takes three times as long."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "backend"),
    [("Qwen3-MoE", CAPTURED), pytest.param("Mixtral", DIFFERENTIATED, marks=pytest.mark.slow)],
    ids=["Qwen3-MoE", "Mixtral"],
)
def test_a_layer_with_experts_is_one_graph_for_all_lengths(name: str, backend: Any) -> None:
    """An expert's tokens depend on them; their number in all does not."""
    torch.compiler.reset()
    counters.clear()
    model = build(name, dtype=torch.bfloat16)
    config: Any = model.config
    assert config._experts_implementation == "grouped_mm"
    found = []
    for compiled in (False, True):
        for layer in decoder_layers(model) if compiled else ():
            layer.compile(dynamic=True, backend=backend)
        for length in (40, 57):
            tokens = (torch.arange(length) * 7 % 120)[None] + 3
            model.zero_grad()
            logits = model(tokens, use_cache=False).logits
            logits.float().log_softmax(-1).square().sum().backward()
            found.append(
                [
                    logits.detach(),
                    *(p.grad.clone() for p in model.parameters() if p.grad is not None),
                ]
            )
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert counters["stats"]["unique_graphs"] == 1
    _equal(found, model)


@pytest.mark.parametrize("head_dtype", ["model", "float32"])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_the_first_rows_need_no_kernel_that_was_not_compiled_for_no_row(
    head_dtype: str, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    counters.clear()
    for name in ("_pick", "_spread"):
        plain = getattr(logprobs, name).__wrapped__
        monkeypatch.setattr(logprobs, name, torch.compile(plain, dynamic=True, backend=CAPTURED))
    model = build("Qwen3", dtype=torch.bfloat16)
    model.config.final_logit_softcapping = cap
    use_head(model, head_dtype)
    wide = head_dtype == "float32"
    compile_scores(model.config, torch.bfloat16, torch.device("cpu"), wide=wide)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled == (2 if wide else 3)
    for row in pack(rollouts_of(40, longest=120), 2048):
        row_logprobs(model, row).square().sum().backward()
        with torch.no_grad():
            row_logprobs(model, row, head_dtype=torch.float32)
    assert counters["stats"]["unique_graphs"] == compiled


def _equal(found: list[list[torch.Tensor]], model: torch.nn.Module) -> None:
    """Compare two lengths without compiling with the same two compiled: an output and the gradient
    of each parameter."""
    for plain, again in zip(found[:2], found[2:], strict=True):
        assert len(plain) == len(again) == 1 + len(list(model.parameters()))
        assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("hooks", ["inside", "outside"])
def test_routers_that_take_the_engines_choice_are_one_graph_too(hooks: str) -> None:
    """A graph for each layer would be one for eight of them, and the layers above uncompiled.
    Layers of a model that ranks share are compiled without their own hooks."""
    torch.compiler.reset()
    counters.clear()
    model = build("Qwen3-MoE", dtype=torch.bfloat16)
    model.set_attn_implementation(register())
    shape = replay_in(model)
    generator = torch.Generator().manual_seed(0)
    found = []
    for compiled in (False, True):
        for layer in decoder_layers(model) if compiled else ():
            if hooks == "inside":
                layer.compile(dynamic=True, backend=DIFFERENTIATED)
            else:
                layer.forward = torch.compile(layer.forward, dynamic=True, backend=DIFFERENTIATED)
        for length in (40, 57):
            tokens = torch.arange(length) * 7 % 120 + 3
            ranks = torch.rand(
                length, len(shape.sparse), shape.experts, generator=generator.manual_seed(length)
            )
            row = replace(
                whole_row([tokens]), experts=ranks.topk(shape.chosen).indices.to(torch.int16)
            )
            model.zero_grad()
            logprobs = row_logprobs(model, row)
            logprobs.sum().backward()
            found.append(
                [
                    logprobs.detach(),
                    *(p.grad.clone() for p in model.parameters() if p.grad is not None),
                ]
            )
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert counters["stats"]["unique_graphs"] == 1 and len(shape.sparse) > 1
    _equal(found, model)
