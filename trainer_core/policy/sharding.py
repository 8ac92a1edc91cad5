"""The policy sharded by FSDP2: each rank holds some rows of every parameter.

Running the model is a collective: all ranks do it equally often in the same order.
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

from atropos_common.models.model_math import why_not_shared, why_not_spread
from trainer_core.config import TrainingConfig
from trainer_core.errors import UsageError
from trainer_core.policy.load import (
    checkpoint_tensors,
    decoder_layers,
    empty_model,
    load_config,
    load_model,
)
from trainer_core.policy.tensor_parallel import parallel_of
from trainer_core.ranks.world import ALONE, World

T = TypeVar("T")


def load_for(world: World, name: str | Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Load the model for `shard`; only rank 0 reads the weights."""
    if world.size == 1:
        return load_model(name, dtype, device)
    config = load_config(str(name), frozen=True)  # the policy's own check ran before
    context = world.context.size if world.context else 1
    if refused := why_not_spread(vars(config)) or why_not_shared(vars(config), context):
        raise UsageError(f"--model-name {name}: {': '.join(refused)}")
    if world.rank == 0:
        return load_model(name, dtype, torch.device("cpu"))
    return empty_model(config, dtype)


def shard(
    model: nn.Module, world: World, device: torch.device, config: TrainingConfig
) -> nn.Module:
    """Move `model`, from `load_for`, to `device` and shard it in place; a collective."""
    if world.mesh is None:
        return model
    # Ranks other than 0 hold meta tensors, so facts about the stored weights come from rank 0.
    compute = world.share(lambda: next(model.parameters()).dtype)
    named = dict(model.named_parameters())
    adapters = {name for name in named if config.trains_adapters and named[name].requires_grad}
    source = {name: parameter.detach() for name, parameter in named.items()}
    source |= dict(model.named_buffers())
    stored = world.share(lambda: {name: tensor.dtype for name, tensor in source.items()})
    # These stay whole on every rank: FSDP needs one dtype per group and at least one dimension.
    odd = {name for name in named if stored[name] != compute or not named[name].ndim} | adapters
    slim = (
        config.master_weights != "fp32"
        or config.gradient_dtype != "float32"
        or config.optimizer_offload
    )
    # Rows that become float32 master weights. With a memory-saving option rows have the model's
    # dtype, and `optimizers.py` keeps its own state.
    wide = set() if slim else {name for name in named if named[name].requires_grad} - odd
    float32 = torch.promote_types(compute, torch.float32)
    _without_memory(model, stored | dict.fromkeys(wide, float32))
    whole = {parameter for name, parameter in model.named_parameters() if name in odd}
    policy = MixedPrecisionPolicy(compute, reduce_dtype=float32, cast_forward_inputs=False)
    for part in [*decoder_layers(model), model]:
        fully_shard(part, mesh=world.mesh, mp_policy=policy, ignored_params=whole)
        # Sum gradients: the loss is already divided by the tokens of all ranks.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    _distribute(model, world, device, source, stored)
    model.compute_dtype = compute  # type: ignore[assignment]
    model.context = world.context  # type: ignore[assignment]
    model.compute_gathered = lambda compute: compute()  # type: ignore[assignment]
    # FSDP treats this method like `forward`: it gathers the root's parameters around the call.
    register_fsdp_forward_method(model, "compute_gathered")
    if config.gradient_dtype == "float32":
        _gradients_in_float32(model)
    return model


def anywhere(world: World, flags: list[bool]) -> list[bool]:
    """Return True for each flag that is set on any rank; a collective."""
    return [bool(flag) for flag in world.largest(torch.tensor(flags, dtype=torch.uint8)).tolist()]


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the computation; parameters may have another."""
    found: torch.dtype = getattr(model, "compute_dtype", None) or next(model.parameters()).dtype
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a sharded tensor, detached, sharing memory."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Rows:
    """One rank's rows of a parameter."""

    shape: tuple[int, ...]  # of the whole parameter
    first: int
    count: int
    """Rows from `first` on; 1 for a scalar."""


def row_bounds(count: int, size: int) -> list[int]:
    """Return the first row of each of `size` ranks, then `count`."""
    # Rounded up, as in torch.chunk; the last ranks may have fewer rows or none.
    each = -(-count // size)
    return [min(rank * each, count) for rank in range(size + 1)]


def rows_of(parameter: torch.Tensor) -> Rows:
    """Return this rank's rows; all of them if the parameter is not sharded."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Rows(shape, 0, shape[0] if shape else 1)
    rank = parameter.device_mesh.get_local_rank()
    first, end = row_bounds(shape[0], parameter.device_mesh.size())[rank : rank + 2]
    return Rows(shape, first, end - first)


def gathered(model: nn.Module, compute: Callable[[], T]) -> T:
    """Call `compute` with the parameters outside the layers gathered; a collective."""
    # FSDP would gather them around the model's own forward pass, which the trainer never calls.
    through = getattr(model, "compute_gathered", None)
    if through is None:
        return compute()
    found = cast(T, through(compute))
    if not torch.is_grad_enabled():  # otherwise the backward pass frees them
        scatter(model)
    return found


def scatter(model: nn.Module) -> None:
    """Free the gathered parameters outside the layers."""
    # They do not see the next update.
    if hasattr(model, "compute_gathered"):
        cast(Any, model).reshard()


def host_copy(
    tensor: torch.Tensor, name: str, copies: dict[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """Copy a tensor to the CPU, contiguous; into `copies[name]` if that has its shape and dtype.

    New memory costs several times as much as the copy itself. `copies` receives the copy.
    """
    kept = None if copies is None else copies.get(name)
    if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
        kept = torch.empty(tensor.shape, dtype=tensor.dtype)
    kept.copy_(tensor.detach())
    if copies is not None:
        copies[name] = kept
    return kept


def weights(
    model: nn.Module, copies: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Copy every checkpoint tensor to the CPU in the compute dtype, by checkpoint name.

    A tied head appears once. A collective; ranks other than 0 get an empty dict.

    Args:
        copies: of a write that has ended; their memory is used again.
    """
    if (parallel := parallel_of(model)) is not None:
        return {name: whole for name, whole in parallel.gathered() if whole is not None}
    if not hasattr(model, "compute_gathered"):
        return {
            name: host_copy(tensor, name, copies)
            for name, tensor in checkpoint_tensors(model).items()
        }
    dtype, kept = compute_dtype(model), {}
    for name, parameter in model.named_parameters():
        whole = parameter.detach()
        if isinstance(whole, DTensor):
            whole = whole.to(dtype).full_tensor()  # one at a time, to limit device memory
        if dist.get_rank() == 0:
            kept[name] = whole.to("cpu", copy=True)
    tensors = checkpoint_tensors(model, kept) if kept else {}
    # Views of a larger parameter, such as experts, get memory of their own: files store them
    # separately.
    own = torch.contiguous_format
    return {
        n: t if t.nbytes == t.untyped_storage().nbytes() else t.clone(memory_format=own)
        for n, t in tensors.items()
    }


@torch.no_grad()
def copy_weights(model: nn.Module, source: str | Path, world: World = ALONE) -> None:
    """Overwrite parameters, or this rank's parts, from a directory or hub id; a collective."""
    parallel = parallel_of(model)
    ours = dict(model.named_parameters())
    shapes = {
        name: ours[name].shape if parallel is None else torch.Size(parallel.part(name).whole)
        for name in ours
    }

    def read() -> dict[str, torch.Tensor]:
        loaded = load_model(source, next(iter(ours.values())).dtype, torch.device("cpu"))
        theirs = {name: param.detach() for name, param in loaded.named_parameters()}
        odd = sorted(theirs.keys() ^ ours.keys()) or [
            name for name in ours if theirs[name].shape != shapes[name]
        ]
        if odd:
            raise UsageError(f"{source} holds another model: {', '.join(odd[:5])}")
        return theirs

    wholes = world.first(read)
    if parallel is not None:
        parallel.fill(wholes)
        return
    for name, param in ours.items():
        param.copy_(wholes[name])


def _without_memory(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    empty = {
        parameter: nn.Parameter(
            torch.empty_like(parameter, dtype=dtypes[name], device="meta"), parameter.requires_grad
        )
        for name, parameter in model.named_parameters()
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = empty[parameter]


@torch.no_grad()
def _distribute(
    model: nn.Module,
    world: World,
    device: torch.device,
    source: Mapping[str, torch.Tensor],
    stored: Mapping[str, torch.dtype],
) -> None:
    model.to_empty(device=device)
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if world.rank == 0:
            whole = source[name].to(device=device, dtype=stored[name])
        else:
            whole = torch.empty(tensor.shape, dtype=stored[name], device=device)
        if isinstance(tensor, DTensor):
            rows = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
            local(tensor).copy_(local(rows))
        else:
            # Buffers and unsharded parameters are the same on every rank.
            dist.broadcast(whole, 0)
            tensor.copy_(whole)


def _gradients_in_float32(model: nn.Module) -> None:
    # FSDP has no setting for this, so set the private attribute that it reads.
    cast(Any, model)._get_fsdp_state()._lazy_init()
    for part in [*decoder_layers(model), model]:
        state = cast(Any, part)._get_fsdp_state()
        # A list of groups, or the single group of torch up to 2.11.
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            group._orig_dtype = torch.promote_types(compute_dtype(model), torch.float32)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)  # type: ignore[attr-defined]
