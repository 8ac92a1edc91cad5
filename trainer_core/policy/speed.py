"""Use of the machine by forward and backward passes: threads on a CPU; torch.compile and gradient
checkpointing on a GPU.

On a CPU, small models compute several rows of an optimizer step in parallel, one row per thread.
Splitting each small operation over threads would make them wait for each other thousands of times a
step, and longer on shared cores. Each thread takes every n-th row and has its own gradient;
gradients are summed in order, so results do not depend on timing.

Compilation changes speed, and results only by rounding. If the compiler fails, the trainer warns
and runs uncompiled code. Gradient checkpointing covers as few layers as memory allows.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn

from atropos_common.models import model_math
from trainer_core.config import TrainingConfig
from trainer_core.policy.load import decoder_layers, dimensions
from trainer_core.policy.offload import SavedStates
from trainer_core.policy.sharding import compute_dtype, local
from trainer_core.ranks.world import ALONE, World

SMALL_MODEL = 50_000_000
"""Number of parameters below which parallel rows are faster than threads within an operation."""
MOST_THREADS = 8
"""Limit of threads; each holds a gradient of the whole model."""
LARGE_MODEL = 100_000_000
"""Number of parameters from which compilation pays off within a short run."""

Function = TypeVar("Function", bound=Callable[..., Any])
Item = TypeVar("Item")
Result = TypeVar("Result")


def use_cores(
    model: nn.Module, config: TrainingConfig, device: torch.device, ranks: int = 1
) -> int:
    """Set torch's threads for this model; return the threads for `accumulate`, 1 if operations are
    split instead.

    Without `torch_threads` a small model on a CPU gets one thread per core, or OMP_NUM_THREADS.
    With several ranks it gets 1, because the ranks run the model together, one row at a time.
    """
    small = sum(p.numel() for p in model.parameters()) < SMALL_MODEL
    if device.type != "cpu" or not small:
        if config.torch_threads:
            torch.set_num_threads(config.torch_threads)
        return 1
    # Parallelism comes from rows, so each operation runs in one thread.
    torch.set_num_threads(1)
    return min(config.torch_threads or _cores(), MOST_THREADS) if ranks == 1 else 1


def _cores() -> int:
    # It may be a list with one number per nesting level.
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(wanted) if wanted.isdigit() and int(wanted) else len(os.sched_getaffinity(0))


def in_threads(
    work: Callable[[Item, int], Result], items: Sequence[Item], threads: int
) -> list[Result]:
    """Call work(item, thread) for every item, item i in thread i % threads; return results in the
    order of the items."""
    if threads == 1:
        return [work(item, 0) for item in items]

    graph = torch.is_grad_enabled()  # grad mode is per thread

    def one_thread(thread: int) -> list[Result]:
        with torch.set_grad_enabled(graph):
            return [work(item, thread) for item in items[thread::threads]]

    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(one_thread, range(threads)))
    return [done[i % threads][i // threads] for i in range(len(items))]


class ThreadGradients:
    """Gradients of shared parameters, collected separately by each thread."""

    def __init__(self, params: list[torch.Tensor], threads: int) -> None:
        self._params = params
        self._sums: list[list[torch.Tensor | None]] = [[None] * len(params) for _ in range(threads)]

    def backward(self, loss: torch.Tensor, thread: int) -> None:
        """Add the gradient of `loss` to the thread's sum, in at least float32."""
        mine = self._sums[thread]
        for i, gradient in enumerate(torch.autograd.grad(loss, self._params, allow_unused=True)):
            mine[i] = _sum(mine[i], gradient)

    def total(self) -> list[torch.Tensor | None]:
        """The sum over threads for each parameter; None if no loss depends on it."""
        first, *others = self._sums
        for thread in others:
            first = [_sum(one, other) for one, other in zip(first, thread, strict=True)]
        return first


def _sum(total: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    if more is None or total is None:
        # Copy: autograd may return the same tensor for two parameters.
        return (
            total
            if more is None
            else more.to(torch.promote_types(more.dtype, torch.float32), copy=True)
        )
    return total.add_(more)


def use_memory(device: torch.device) -> None:
    """Set torch's CUDA allocator to expandable segments, unless the environment configures it.

    Otherwise passes of different lengths fragment the memory: an eighth of an H200 with 8B
    parameters.
    """
    if (
        device.type == "cuda"
        and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    ):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # type: ignore[attr-defined]


def compiled_on_cuda(function: Function) -> Function:
    """Compile `function` for calls whose first argument is on CUDA."""

    @functools.cache
    def fast() -> Callable[..., Any]:
        return torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(first: torch.Tensor, *rest: Any) -> Any:
        return fast()(first, *rest) if first.is_cuda else function(first, *rest)

    return call  # type: ignore[return-value]


def compiles(model: nn.Module, mode: str, device: torch.device) -> bool:
    """True if `mode` (auto, on or off) compiles the layers of `model`."""
    large = sum(p.numel() for p in model.parameters()) >= LARGE_MODEL
    return mode == "on" or (mode == "auto" and device.type == "cuda" and large)


def compile_layers(model: nn.Module) -> None:
    """Compile every transformer layer of `model`, in place.

    Layers are alike, so they share one compilation. Row lengths change from batch to batch, so they
    are dynamic.
    """
    torch._dynamo.config.suppress_errors = True  # a missing compiler causes a warning only
    for layer in decoder_layers(model):
        if _is_sharded(model):
            layer.forward = torch.compile(layer.forward, dynamic=True)  # FSDP's hooks stay outside
        else:
            layer.compile(dynamic=True)


def _is_sharded(model: nn.Module) -> bool:
    return hasattr(model, "compute_gathered")


def use_checkpointing(
    model: nn.Module,
    mode: str,
    *,
    tokens: int,
    optimizer: str,
    device: torch.device,
    offload: bool = False,
    gradient_bytes: int = model_math.GRADIENT_BYTES,
    compiled: bool = False,
    world: World = ALONE,
) -> int:
    """Set up gradient checkpointing for `mode` (auto, on or off); print the decision and return the
    number of recomputed layers. With auto it is the smallest number that fits in memory; if that is
    0 and the logits of the largest pass fit as well, they are kept for the backward pass.

    Args:
        tokens: of the largest forward pass.
        optimizer: name of the optimizer, whose state is not allocated yet; empty: the state is not
            on this GPU.
        offload: move saved activations to host memory, which needs checkpointing in every layer.
        gradient_bytes: bytes per trained parameter.
        compiled: layers will be compiled, and save less.
    """
    layers = decoder_layers(model)
    recomputed = len(layers) if mode == "on" or offload else 0
    if mode == "auto" and not recomputed and device.type == "cuda":
        trained = [local(p).shape for p in model.parameters() if p.requires_grad]
        # Gradients and the optimizer's state are not allocated before the first step.
        gradients = gradient_bytes * sum(map(math.prod, trained))
        state = model_math.optimizer_bytes(trained, optimizer) if optimizer else 0
        # All ranks must recompute the same layers, or their collectives would not match; the
        # smallest room decides.
        free, total = _memory(device)
        room = model_math.room_for_activations(
            free - gradients - state - gathered_bytes(model), total
        )
        room = min(world.gather(room))
        kept = functools.partial(activations, model, tokens, compiled)
        recomputed = model_math.layers_recomputed(kept, layers_reached(model), room)
        wanted = kept(0).total
        width = getattr(model, "logits_dtype", compute_dtype(model)).itemsize
        logits = tokens * dimensions(model).vocab * width
        model.keeps_logits = not recomputed and wanted + logits <= room  # type: ignore[assignment]
        print(
            f"Gradient checkpointing "
            f"{f'on, {recomputed} of {len(layers)} layers' if recomputed else 'off'}: "
            f"{tokens} tokens need about {wanted / 1e9:.1f} GB, {max(0, room) / 1e9:.1f} GB "
            f"are free for them"
        )
    if recomputed:
        # Layers below the lowest trained one keep nothing, so recomputing them would save nothing.
        lowest = 0 if recomputed == len(layers) else len(layers) - layers_reached(model)
        # Recompute the lowest layers: by then the backward pass has freed what the upper ones kept.
        _enable(model, layers[lowest : lowest + recomputed])
    if offload:
        saved = SavedStates(device)
        for layer in layers:
            layer._gradient_checkpointing_func = saved.around(layer._gradient_checkpointing_func)
    return recomputed


def activations(
    model: nn.Module, tokens: int, compiled: bool = False, recomputed: int = 0
) -> model_math.Activations:
    """Activations that a GPU keeps from the forward pass of `tokens` tokens for a backward pass
    that recomputes `recomputed` layers."""
    trained = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    return model_math.activation_bytes(
        dimensions(model),
        tokens,
        width=compute_dtype(model).itemsize,
        on_gpu=True,
        compiled=compiled,
        recomputed=recomputed,
        layers=layers_reached(model),
        largest=max(map(math.prod, trained.values()), default=0),
        adapters=model_math.Adapters.of(trained, len(decoder_layers(model))),
    )


def gathered_bytes(model: nn.Module) -> int:
    """Bytes that a pass of a sharded model needs in addition to this rank's rows; 0 for a model
    that is not sharded.

    Counts full parameters, their gradients and float32 sums of everything outside the layers, and
    of two layers: the current one and the next.
    """
    if not _is_sharded(model):
        return 0
    layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
    beside = sum(p.numel() for p in model.parameters()) - sum(layers)
    # Bytes per parameter: value and gradient in the compute dtype, and a float32 sum.
    return (beside + 2 * max(layers)) * (2 * compute_dtype(model).itemsize + 4)


def layers_reached(model: nn.Module) -> int:
    """Number of layers that a gradient passes through: from the lowest one with a trained parameter
    up."""
    layers = decoder_layers(model)
    if any(p.requires_grad for p in model.get_input_embeddings().parameters()):
        return len(layers)
    trained = [
        i for i, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())
    ]
    return len(layers) - min(trained) if trained else 0


def _memory(device: torch.device) -> tuple[int, int]:
    """(free bytes of the device, counting torch's unused reservations; total bytes)."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def _enable(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Enable non-reentrant checkpointing for `layers`. Only the layer modules themselves enter
    training mode: their submodules stay free of dropout, and other layers keep all activations."""
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    # This hook makes embeddings require a gradient for reentrant checkpointing; frozen layers would
    # compute one.
    model.disable_input_require_grads()
    for layer in layers:
        layer.training = True
