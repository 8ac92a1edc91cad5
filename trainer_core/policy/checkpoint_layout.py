"""Where each checkpoint tensor lies in the parameters of the transformers model that loads it.

Most are a parameter under its own name. Others differ: transformers renames some, and stacks a
layer's experts into one parameter, while checkpoints and vLLM's loader hold them one by one.
transformers' own reverse conversion runs here on meta tensors, so the results are views of the
parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Spot:
    """View of a parameter; offset and stride in elements."""

    parameter: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _StillViews(TorchDispatchMode):  # type: ignore[misc]
    """Replace clones, which would lose the link to the parameter, by views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0].detach()
        return func(*args, **(kwargs or {}))


def checkpoint_layout(model: torch.nn.Module) -> dict[str, Spot | None]:
    """Map each checkpoint name to its place in the model's parameters and persistent buffers; a
    tied tensor appears once.

    None marks a tensor that transformers computes when it saves.
    """
    from transformers.core_model_loading import revert_weight_conversion

    empty = {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        for name, tensor in _tensors(model).items()
    }
    # A view shares the storage of its parameter, so the storage's address identifies the parameter.
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in empty.items()}
    with _StillViews():
        converted = revert_weight_conversion(model, dict(empty))
    found: dict[str, Spot | None] = {}
    for name, tensor in converted.items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        spot = (
            Spot(owner, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            if owner
            else None
        )
        found[name] = spot
    return found


def checkpoint_tensors(
    model: torch.nn.Module, parameters: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The model's tensors in the checkpoint's form: views, except those that transformers computes.

    Args:
        parameters: replace the model's own.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tensors = _tensors(model) | (parameters or {})
    layout = checkpoint_layout(model)
    if not all(layout.values()):
        # Some tensor is computed on saving, so let transformers convert real values.
        return dict(revert_weight_conversion(model, tensors))
    return {name: view_of(tensors[spot.parameter], spot) for name, spot in layout.items() if spot}


def view_of(tensor: torch.Tensor, spot: Spot) -> torch.Tensor:
    """The view `spot` of its parameter `tensor`, which must be contiguous unless `spot` covers all
    of it."""
    if spot.shape == tensor.shape:
        return tensor
    return tensor.as_strided(spot.shape, spot.stride, tensor.storage_offset() + spot.offset)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers; a tied parameter appears once."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    # A state dict leaves out non-persistent buffers, such as rotary frequencies.
    kept = model.state_dict()
    return parameters | {name: buffer for name, buffer in model.named_buffers() if name in kept}
