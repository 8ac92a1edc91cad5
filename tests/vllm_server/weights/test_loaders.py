"""The server's report on weights that vLLM lays out again, computes or copies after loading
them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atropos_common.protocol.manifest import TensorView
from tests.vllm_server.weights.test_graph_check import Model
from tests.vllm_server.weights.test_graph_check import Server as Engine
from vllm_server import app
from vllm_server.weights import loaders
from vllm_server.weights.loaders import LoadTrace, PlainLayers, SharedWeightsError

VIEW = TensorView(parameter="w", offset=0, shape=[2], stride=[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_of_another_layout_is_told_by_its_sample(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 32, 16).to(dtype)
    weight[0, 0, 0] = float("nan")
    sample = loaders._sample(weight)
    assert loaders._same(sample, weight.clone()), "moved, but as it was"
    with torch.device("meta"):  # a default device that is not the parameter's, as while vLLM loads
        assert loaders._same(sample, weight), "whatever the default device is"
    assert not loaders._same(sample, weight.roll(16, dims=1)), "ups before gates"
    assert not loaders._same(sample, weight.transpose(1, 2).contiguous().view(3, 32, 16))
    assert not loaders._same(
        sample, weight.float() if dtype == torch.bfloat16 else weight.bfloat16()
    )
    assert not loaders._same(sample, torch.nn.functional.pad(weight, (0, 32)))


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (None, "how its weights were loaded was not recorded: leave out --load-format"),
        (
            LoadTrace({"a": VIEW}, {}, ["layers.1.w13_weight"]),
            "changes the layout of 1 parameters .*w13_weight.*triton.*[(]lora_only",
        ),
        (
            LoadTrace({"a": VIEW}, {"b": "is a buffer of the model, b"}, []),
            "1 tensors .* b is a buffer .*broadcast",
        ),
    ],
)
def test_weights_that_cannot_be_shared_say_why_and_what_works(
    trace: LoadTrace | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaders, "_trace", trace)
    with pytest.raises(SharedWeightsError, match=words):
        loaders._views()
    assert (loaders.why_not_in_place() is None) == bool(trace and not trace.laid_anew)
    monkeypatch.setattr(loaders, "_trace", LoadTrace({"a": VIEW}, {}, []))
    assert loaders._views() == {"a": VIEW} and loaders.why_not_in_place() is None


class Server(Engine):
    """A server with a worker that answers `reason`."""

    reason: str | None = None
    model_config = SimpleNamespace(quantization=None, max_model_len=64, get_vocab_size=lambda: 2000)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return (
            [None, self.reason]
            if method.endswith("why_not_in_place")
            else await super().collective_rpc(method, args)
        )


async def test_a_server_that_takes_weights_says_what_does_not_follow() -> None:
    server: Any = Server(Model())
    assert await app.why_not_in_place(server, server) is None
    server.model.stale = True
    assert (
        await app.why_not_in_place(server, server)
        == "it computes from a copy of layers.1.norm.weight"
    )
    server.reason = "laid out anew"
    assert await app.why_not_in_place(server, server) == "laid out anew", "as one of its ranks says"
    server.model_config = SimpleNamespace(quantization="fp8")
    assert await app.why_not_in_place(server, server) == "its weights are quantized (fp8)"


class Experts(torch.nn.Module):
    """As vLLM's: its kernel computes from repacked weights after loading."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.randn(4, 6, 5), requires_grad=False)
        self.w2_weight = torch.nn.Parameter(torch.randn(4, 5, 3), requires_grad=False)
        self.activation = SimpleNamespace(value=activation)
        self.quant_method = SimpleNamespace(
            moe_kernel=SimpleNamespace(fused_experts=SimpleNamespace())
        )

    def repack(self) -> None:
        self.w13_weight = torch.nn.Parameter(self.w13_weight.flip(1), requires_grad=False)


def test_experts_on_a_cpu_compute_from_their_parameters() -> None:
    experts = Experts("silu")
    w13, w2 = experts.w13_weight, experts.w2_weight
    plain = PlainLayers(experts)
    experts.repack()
    plain.restore()
    assert experts.w13_weight is w13
    hidden, output = torch.randn(7, 5), torch.empty(7, 5)
    ids, weights = torch.stack([torch.randperm(4)[:2] for _ in range(7)]), torch.rand(7, 2)
    w13.data.mul_(2)
    experts.quant_method.moe_kernel.fused_experts.apply(
        output=output,
        hidden_states=hidden,
        w1=experts.w13_weight,
        w2=w2,
        topk_weights=weights,
        topk_ids=ids,
        activation=None,
        apply_router_weight_on_input=False,
    )
    for row, chosen, share, answer in zip(hidden, ids, weights, output, strict=True):
        parts = []
        for expert, part in zip(chosen.tolist(), share, strict=True):
            gate, up = (w13[expert] @ row).chunk(2)
            parts.append(part * (w2[expert] @ (torch.nn.functional.silu(gate) * up)))
        torch.testing.assert_close(answer, sum(parts))


def test_experts_of_a_kind_that_is_not_known_stay_vllm_s() -> None:
    experts = Experts("swigluoai")
    plain = PlainLayers(experts)
    experts.repack()
    repacked = experts.w13_weight
    plain.restore()
    assert experts.w13_weight is repacked, "which the sample then tells"


def test_convolutions_are_packed_by_vllm_as_their_kernel_needs_it() -> None:
    """Plain they would be read as if they were packed: gated delta nets were 1.6 nats off, and
    nothing said so."""
    model = torch.nn.ModuleDict(
        {"conv1d": torch.nn.Conv1d(8, 8, 4, groups=8), "proj": torch.nn.Linear(8, 8)}
    )
    plain = PlainLayers(model)
    assert not hasattr(model["conv1d"], "_cpu_skip_gemm_dispatch"), "so that vLLM packs it"
    assert model["proj"]._cpu_skip_gemm_dispatch
    packed = torch.nn.Parameter(model["conv1d"].weight.detach().flip(0), requires_grad=False)
    model["conv1d"].weight = packed
    plain.restore()
    assert model["conv1d"].weight is packed, "which the sample then tells"
