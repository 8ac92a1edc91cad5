"""On a CPU: layers that compute from the parameter itself instead of a copy that vLLM repacked for its kernels.

Runs in vLLM's worker process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

EXPERTS = ("w13_weight", "w2_weight")
"""Of vLLM's mixtures of experts, shapes [experts, 2 * width, hidden] and [experts, hidden, width]."""

Activation = Callable[[torch.Tensor], torch.Tensor]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"),
}


class PlainLayers:
    """Remembers the weights of a model just loaded, and gives them back to it once vLLM has processed them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
        for module in model.modules():
            if (weight := module._parameters.get("weight")) is not None:
                self._weights.append((module, "weight", weight))
                # vLLM's own switch (0.28 and later) for layers whose weight is read elsewhere: no repacking.
                module._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]
            if all(name in module._parameters for name in EXPERTS) and "w13_bias" not in module._parameters:
                self._weights += [(module, name, module.get_parameter(name)) for name in EXPERTS]

    def restore(self) -> None:
        """Let every layer compute from them."""
        for module, name, weight in self._weights:
            if name in EXPERTS and not _computes_plainly(module):
                continue
            if module._parameters.get(name) is not weight:
                setattr(module, name, weight)
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = linear
        self._weights.clear()


def _computes_plainly(experts: Any) -> bool:
    """Let these experts compute from their parameters; False, and nothing done, where that is not known how."""
    kernel: Any = getattr(getattr(experts, "quant_method", None), "moe_kernel", None)
    activation = _ACTIVATIONS.get(getattr(getattr(experts, "activation", None), "value", ""))
    if not hasattr(kernel, "fused_experts") or activation is None:
        return False

    def apply(
        output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
        topk_weights: torch.Tensor, topk_ids: torch.Tensor, *_: Any, apply_router_weight_on_input: bool, **__: Any,
    ) -> None:  # fmt: skip
        output.zero_()
        for expert in topk_ids.unique().tolist():
            rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
            answer = linear(activation(gate) * up, w2[expert])
            if not apply_router_weight_on_input:  # else its weight is in the hidden states already
                answer = answer * topk_weights[rows, slots, None].to(answer.dtype)
            output.index_add_(0, rows, answer)

    kernel.fused_experts.apply = apply
    return True
