"""Use of the machine: threads on a CPU; torch.compile and gradient checkpointing on a GPU."""

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
"""Parameters below which parallel rows are faster than threads within an operation."""
MOST_THREADS = 8
"""Limit of threads."""

Function = TypeVar("Function", bound=Callable[..., Any])
Item = TypeVar("Item")
Result = TypeVar("Result")


# Splitting each small operation over threads would make them wait for each other thousands of
# times a step, so on a CPU small models compute several rows in parallel, one a thread.
def use_cores(
    model: nn.Module, config: TrainingConfig, device: torch.device, ranks: int = 1
) -> int:
    """Set torch's threads; return those for `accumulate`, 1 if operations are split instead."""
    small = sum(p.numel() for p in model.parameters()) < SMALL_MODEL
    if device.type != "cpu" or not small:
        if config.torch_threads:
            torch.set_num_threads(config.torch_threads)
        return 1
    torch.set_num_threads(1)
    # Several ranks run the model together, one row at a time.
    return min(config.torch_threads or _cores(), MOST_THREADS) if ranks == 1 else 1


def _cores() -> int:
    # OMP_NUM_THREADS may be a list with one number per nesting level.
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(wanted) if wanted.isdigit() and int(wanted) else len(os.sched_getaffinity(0))


def in_threads(
    work: Callable[[Item, int], Result], items: Sequence[Item], threads: int
) -> list[Result]:
    """Call work(item, thread) for every item; return the results in order."""
    if threads == 1:
        return [work(item, 0) for item in items]

    graph = torch.is_grad_enabled()  # grad mode is per thread

    # Thread n takes every n-th item, so the order of its sums does not depend on timing.
    def one_thread(thread: int) -> list[Result]:
        with torch.set_grad_enabled(graph):
            return [work(item, thread) for item in items[thread::threads]]

    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(one_thread, range(threads)))
    return [done[i % threads][i // threads] for i in range(len(items))]


class ThreadGradients:
    """Gradients of shared parameters, summed for each thread."""

    def __init__(self, params: list[torch.Tensor], threads: int) -> None:
        self._params = params
        self._sums: list[list[torch.Tensor | None]] = [[None] * len(params) for _ in range(threads)]

    def backward(self, loss: torch.Tensor, thread: int) -> None:
        """Add the gradient of `loss` to the thread's sum, in at least float32."""
        mine = self._sums[thread]
        for i, gradient in enumerate(torch.autograd.grad(loss, self._params, allow_unused=True)):
            mine[i] = _sum(mine[i], gradient)

    def total(self) -> list[torch.Tensor | None]:
        """Sum over threads; None for a parameter without gradient."""
        first, *others = self._sums
        for thread in others:
            first = [_sum(one, other) for one, other in zip(first, thread, strict=True)]
        return first


def _sum(total: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    if more is None:
        return total
    if total is None:
        # Copy: autograd may return the same tensor for two parameters.
        return more.to(torch.promote_types(more.dtype, torch.float32), copy=True)
    return total.add_(more)


def use_memory(device: torch.device) -> None:
    """Set torch's allocator to expandable segments, unless the environment configures it."""
    # Passes of different lengths fragment the memory: an eighth of an H200 with 8B parameters.
    configured = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if device.type == "cuda" and not configured:
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
    large = sum(p.numel() for p in model.parameters()) >= model_math.LARGE_MODEL
    return mode == "on" or (mode == "auto" and device.type == "cuda" and large)


def compile_layers(model: nn.Module) -> None:
    """Compile every transformer layer in place."""
    torch._dynamo.config.suppress_errors = True  # a missing compiler causes a warning only
    # Layers are alike, so they share one compilation; dynamic, because row lengths change.
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
    """Set up gradient checkpointing and return the number of recomputed layers.

    With `mode` auto it is the smallest number that fits in memory. If it is 0 and the logits fit as
    well, they are kept for the backward pass.

    Args:
        tokens: of the largest forward pass.
        optimizer: whose state is not allocated yet; empty: it is not on this GPU.
        offload: move saved activations to host memory, which needs every layer recomputed.
        gradient_bytes: per trained parameter.
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
        free -= gradients + state + gathered_bytes(model)
        room = min(world.gather(model_math.room_for_activations(free, total)))
        kept = functools.partial(activations, model, tokens, compiled)
        recomputed = model_math.layers_recomputed(kept, layers_reached(model), room)
        wanted = kept(0).total
        width = getattr(model, "logits_dtype", compute_dtype(model)).itemsize
        logits = tokens * dimensions(model).vocab * width
        # Kept logits save a quarter of the head's products.
        model.keeps_logits = not recomputed and wanted + logits <= room  # type: ignore[assignment]
        decision = f"on, {recomputed} of {len(layers)} layers" if recomputed else "off"
        print(
            f"Gradient checkpointing {decision}: {tokens} tokens need about "
            f"{wanted / 1e9:.1f} GB, {max(0, room) / 1e9:.1f} GB are free for them"
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
    """Estimate what a GPU keeps from the forward pass of `tokens` tokens."""
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
    """Return the bytes that a pass needs beside this rank's rows; 0 if the model is not sharded."""
    if not _is_sharded(model):
        return 0
    layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
    beside = sum(p.numel() for p in model.parameters()) - sum(layers)
    # Everything outside the layers, and two layers: the current one and the next. Each parameter
    # has a value and a gradient in the compute dtype, and a float32 sum.
    return (beside + 2 * max(layers)) * (2 * compute_dtype(model).itemsize + 4)


def layers_reached(model: nn.Module) -> int:
    """Count the layers that a gradient passes through."""

    def trained(module: nn.Module) -> bool:
        return any(parameter.requires_grad for parameter in module.parameters())

    layers = decoder_layers(model)
    if trained(model.get_input_embeddings()):
        return len(layers)
    return len(layers) - next((i for i, each in enumerate(layers) if trained(each)), len(layers))


def _memory(device: torch.device) -> tuple[int, int]:
    """(free bytes, with torch's unused reservations; total bytes)."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def _enable(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    # This hook makes embeddings require a gradient for reentrant checkpointing; frozen layers would
    # compute one.
    model.disable_input_require_grads()
    # Not `layer.train()`: its submodules stay free of dropout.
    for layer in layers:
        layer.training = True
