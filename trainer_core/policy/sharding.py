"""The policy spread over the ranks of a trainer by FSDP2: each holds its rows of every parameter, and gathers a layer's
whole parameters while that layer computes.

    model = load_for(world, name, dtype, device)     # one copy in rank 0's host memory, without memory on the others
    ...                                              # adapters, frozen layers
    model = shard(model, world, device, config)

Where `master_weights` is fp32, and nothing asks for less memory, what trains lies in float32: these rows are the master
weights, and forward passes get them rounded. Else rows lie in the model's type, with what `optim.py` keeps beside. What
FSDP cannot mix stays whole on every rank: adapters, and the few parameters that a model keeps in another type.
Gradients are added up in float32, never averaged: the loss is divided by what all ranks train on (`step.py`).

Nobody calls the model's own forward pass here, so parameters beside the layers (embeddings, norm, head) are gathered by
`gathered`. Everything that runs the model is a collective: all ranks do it, in the same order, equally often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from atropos_common.model_math import why_not_shared, why_not_spread
from trainer_core.config import TrainingConfig
from trainer_core.errors import UsageError
from trainer_core.policy.checkpoint_layout import checkpoint_tensors
from trainer_core.policy.load import decoder_layers, empty_model, load_config, load_model
from trainer_core.policy.tensor_parallel import parallel_of
from trainer_core.world import World

T = TypeVar("T")


def load_for(world: World, name: str | Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model `name` as `shard` takes it: its weights are read once, by rank 0, whatever the number of ranks.

    Raises:
        UsageError: one whose ranks could not pass through it together.
    """
    if world.size == 1:
        return load_model(name, dtype, device)
    fields = vars(load_config(str(name), frozen=True))  # who trains them has asked before
    if refused := why_not_spread(fields) or why_not_shared(fields, world.context.size if world.context else 1):
        raise UsageError(f"--model-name {name}: {': '.join(refused)}")
    if world.rank == 0:
        return load_model(name, dtype, torch.device("cpu"))
    return empty_model(load_config(str(name), frozen=True), dtype)


def shard(model: nn.Module, world: World, device: torch.device, config: TrainingConfig) -> nn.Module:
    """`model` on `device`, spread over all ranks, in place; for a single rank as it is. A collective.

    Args:
        model: from `load_for`, with `requires_grad` where it trains.
    """
    if world.mesh is None:
        return model
    compute = world.share(lambda: next(model.parameters()).dtype)
    named = dict(model.named_parameters())
    adapters = {name for name in named if config.trains_adapters and named[name].requires_grad}
    source = {name: parameter.detach() for name, parameter in named.items()} | dict(model.named_buffers())
    stored = world.share(lambda: {name: tensor.dtype for name, tensor in source.items()})
    odd = {name for name in named if stored[name] != compute or not named[name].ndim} | adapters
    slim = config.master_weights != "fp32" or config.gradient_dtype != "float32" or config.optimizer_offload
    wide = set() if slim else {name for name in named if named[name].requires_grad} - odd
    _without_memory(model, stored | dict.fromkeys(wide, torch.promote_types(compute, torch.float32)))
    whole = {parameter for name, parameter in model.named_parameters() if name in odd}
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.promote_types(compute, torch.float32), cast_forward_inputs=False
    )
    for part in [*decoder_layers(model), model]:
        fully_shard(part, mesh=world.mesh, mp_policy=policy, ignored_params=whole)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    _distribute(model, world, device, source, stored)
    model.compute_dtype = compute  # type: ignore[assignment]
    model.context = world.context  # type: ignore[assignment]
    model.compute_gathered = lambda compute: compute()  # type: ignore[assignment]
    register_fsdp_forward_method(model, "compute_gathered")
    if config.gradient_dtype == "float32":
        _gradients_in_float32(model)
    return model


def anywhere(world: World, flags: list[bool]) -> list[bool]:
    """Whether each is so on any rank: who runs the model, and how, all ranks have to decide alike."""
    return [bool(flag) for flag in world.largest(torch.tensor(flags, dtype=torch.uint8)).tolist()]


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The type that the model computes in, whatever the type in which its parameters are kept."""
    found: torch.dtype = getattr(model, "compute_dtype", None) or next(model.parameters()).dtype
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded tensor, in its memory and without a graph; any other tensor as it is."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Rows:
    """What one rank has of a parameter."""

    shape: tuple[int, ...]
    """Of the whole."""
    first: int
    count: int
    """Rows, from the first one on; of a scalar 0 and 1."""


def row_bounds(count: int, size: int) -> list[int]:
    """Where each of `size` ranks' rows of `count` begin, as torch.chunk cuts them, and the number of all."""
    each = -(-count // size)
    return [min(rank * each, count) for rank in range(size + 1)]


def rows_of(parameter: torch.Tensor) -> Rows:
    """This rank's rows of a parameter; all, where it is not sharded."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Rows(shape, 0, shape[0] if shape else 1)
    rank = parameter.device_mesh.get_local_rank()
    first, end = row_bounds(shape[0], parameter.device_mesh.size())[rank : rank + 2]
    return Rows(shape, first, end - first)


def gathered(model: nn.Module, compute: Callable[[], T]) -> T:
    """compute(), which runs the model's layers or uses its head; a collective."""
    through = getattr(model, "compute_gathered", None)
    if through is None:
        return compute()
    found = cast(T, through(compute))
    if not torch.is_grad_enabled():  # else the backward pass does it
        scatter(model)
    return found


def scatter(model: nn.Module) -> None:
    """Forget the parameters that were gathered beside the layers: what the next update changes is not seen in them."""
    if hasattr(model, "compute_gathered"):
        cast(Any, model).reshard()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every tensor of the checkpoint on the CPU, in the type that the model computes in, under its name there
    and contiguous, a tied head once. A collective, which gives them to rank 0 alone."""
    if (parallel := parallel_of(model)) is not None:
        return {name: whole for name, whole in parallel.gathered() if whole is not None}
    if not hasattr(model, "compute_gathered"):
        return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in checkpoint_tensors(model).items()}
    dtype, kept = compute_dtype(model), {}
    for name, parameter in model.named_parameters():
        whole = parameter.detach()
        if isinstance(whole, DTensor):
            whole = whole.to(dtype).full_tensor()  # one after the other: never all of them on the device
        if dist.get_rank() == 0:
            kept[name] = whole.to("cpu", copy=True)
    tensors = checkpoint_tensors(model, kept) if kept else {}
    # Some are parts of a parameter, such as its experts: files hold each on its own.
    own = torch.contiguous_format
    return {n: t if t.nbytes == t.untyped_storage().nbytes() else t.clone(memory_format=own)
            for n, t in tensors.items()}  # fmt: skip


def _without_memory(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Parameters of these types in the place of the model's, without memory; a tied one stays one."""
    empty = {
        parameter: nn.Parameter(torch.empty_like(parameter, dtype=dtypes[name], device="meta"), parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = empty[parameter]


@torch.no_grad()
def _distribute(
    model: nn.Module, world: World, device: torch.device, source: Mapping[str, torch.Tensor],
    stored: Mapping[str, torch.dtype],
) -> None:  # fmt: skip
    """Memory for every tensor of `model`, filled from what rank 0 has in `source`."""
    model.to_empty(device=device)
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if world.rank == 0:
            whole = source[name].to(device=device, dtype=stored[name])
        else:
            whole = torch.empty(tensor.shape, dtype=stored[name], device=device)
        if isinstance(tensor, DTensor):
            local(tensor).copy_(local(distribute_tensor(whole, tensor.device_mesh, tensor.placements)))
        else:
            dist.broadcast(whole, 0)
            tensor.copy_(whole)


def _gradients_in_float32(model: nn.Module) -> None:
    """What is added up in float32 is not rounded to the type of rows in half precision. FSDP has no setting for that,
    so its groups are told by the attribute that it looks at."""
    cast(Any, model)._get_fsdp_state()._lazy_init()
    for part in [*decoder_layers(model), model]:
        state = cast(Any, part)._get_fsdp_state()
        # One group, by the name it had up to torch 2.11, or a list of them.
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            group._orig_dtype = torch.promote_types(compute_dtype(model), torch.float32)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)  # type: ignore[attr-defined]
