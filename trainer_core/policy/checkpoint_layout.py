"""Where each tensor of a checkpoint lies in the parameters of the transformers model that it is loaded into.

Most are a parameter under its own name. Others are not: transformers renames some, and stacks the experts of a layer
into one parameter that checkpoints, and vLLM's loader, hold expert by expert. Its own way back to the checkpoint's form
is followed here on tensors without memory, so that what comes out are views of the parameters, not copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Spot:
    """A view of a parameter, in elements from its first."""

    parameter: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _StillViews(TorchDispatchMode):  # type: ignore[misc]
    """A copy made for its layout alone is the same view still."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0].detach()
        return func(*args, **(kwargs or {}))


def checkpoint_layout(model: torch.nn.Module) -> dict[str, Spot | None]:
    """Name in the checkpoint -> what it is of the model's parameters and persistent buffers, a tied one once.

    None stands for a tensor that transformers computes when it saves.
    """
    from transformers.core_model_loading import revert_weight_conversion

    empty = {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        for name, tensor in _tensors(model).items()
    }
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in empty.items()}
    with _StillViews():
        converted = revert_weight_conversion(model, dict(empty))
    found: dict[str, Spot | None] = {}
    for name, tensor in converted.items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        spot = Spot(owner, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()) if owner else None
        found[name] = spot
    return found


def checkpoint_tensors(
    model: torch.nn.Module, parameters: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The model's tensors in the checkpoint's form: views, but for those that transformers computes.

    Args:
        parameters: in the place of the model's own.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tensors = _tensors(model) | (parameters or {})
    layout = checkpoint_layout(model)
    if not all(layout.values()):
        return dict(revert_weight_conversion(model, tensors))
    return {name: view_of(tensors[spot.parameter], spot) for name, spot in layout.items() if spot}


def view_of(tensor: torch.Tensor, spot: Spot) -> torch.Tensor:
    """What `spot` names of its parameter `tensor`, which is contiguous unless `spot` is all of it."""
    if spot.shape == tensor.shape:
        return tensor
    return tensor.as_strided(spot.shape, spot.stride, tensor.storage_offset() + spot.offset)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, a tied one once, and the buffers that a checkpoint holds."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    kept = model.state_dict()
    return parameters | {name: buffer for name, buffer in model.named_buffers() if name in kept}
