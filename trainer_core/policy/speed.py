"""How forward and backward passes use the machine: threads on a CPU; torch.compile and gradient checkpointing on a
GPU.

Rows of an optimizer step lie side by side on the cores of a CPU, for models too small to share out one product. Split
over threads, each small operation makes them wait for one another thousands of times a step, and on cores that other
processes use too those waits are long. So each thread takes every n-th row, alone, with a gradient of its own;
gradients are added up in order, and results do not depend on timing.

Compilation changes speed, never results beyond rounding; a compiler that does not work here costs a warning, and the
uncompiled code runs on. Gradient checkpointing is on for as few layers as memory requires.
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

from atropos_common import model_math
from trainer_core.config import TrainingConfig
from trainer_core.offload import SavedStates
from trainer_core.policy.load import decoder_layers, dimensions
from trainer_core.policy.sharding import compute_dtype, local
from trainer_core.world import ALONE, World

SMALL_MODEL = 50_000_000
"""Parameters below which rows side by side are faster than threads within an operation."""
MOST_THREADS = 8
"""Each holds a gradient of its own."""
LARGE_MODEL = 100_000_000
"""Parameters from which compiling comes back within a short run."""

Function = TypeVar("Function", bound=Callable[..., Any])
Item = TypeVar("Item")
Result = TypeVar("Result")


def use_cores(model: nn.Module, config: TrainingConfig, device: torch.device, ranks: int = 1) -> int:
    """Set torch's threads for this model; returns those for `accumulate`, 1 where operations are split instead.

    Without `torch_threads` a small model on a CPU gets as many as there are cores, or OMP_NUM_THREADS. Several ranks
    pass through the model together, a row at a time.
    """
    small = sum(p.numel() for p in model.parameters()) < SMALL_MODEL
    if device.type != "cpu" or not small:
        if config.torch_threads:
            torch.set_num_threads(config.torch_threads)
        return 1
    torch.set_num_threads(1)
    return min(config.torch_threads or _cores(), MOST_THREADS) if ranks == 1 else 1


def _cores() -> int:
    """Cores that this process may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(wanted) if wanted.isdigit() and int(wanted) else len(os.sched_getaffinity(0))


def in_threads(work: Callable[[Item, int], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """work(item, thread) for every item, item i in thread i % threads; results in the order of the items."""
    if threads == 1:
        return [work(item, 0) for item in items]

    graph = torch.is_grad_enabled()  # each thread has a switch of its own

    def one_thread(thread: int) -> list[Result]:
        with torch.set_grad_enabled(graph):
            return [work(item, thread) for item in items[thread::threads]]

    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(one_thread, range(threads)))
    return [done[i % threads][i // threads] for i in range(len(items))]


class ThreadGradients:
    """Gradients of shared parameters, collected by every thread for itself."""

    def __init__(self, params: list[torch.Tensor], threads: int) -> None:
        self._params = params
        self._sums: list[list[torch.Tensor | None]] = [[None] * len(params) for _ in range(threads)]

    def backward(self, loss: torch.Tensor, thread: int) -> None:
        """Add the gradient of `loss` to those of the thread, in at least float32."""
        mine = self._sums[thread]
        for i, gradient in enumerate(torch.autograd.grad(loss, self._params, allow_unused=True)):
            mine[i] = _sum(mine[i], gradient)

    def total(self) -> list[torch.Tensor | None]:
        """The sum over threads, for each parameter; null where nothing depends on it."""
        first, *others = self._sums
        for thread in others:
            first = [_sum(one, other) for one, other in zip(first, thread, strict=True)]
        return first


def _sum(total: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    if more is None or total is None:
        # A copy: autograd may hand the same tensor out for two parameters.
        return total if more is None else more.to(torch.promote_types(more.dtype, torch.float32), copy=True)
    return total.add_(more)


def use_memory(device: torch.device) -> None:
    """Let torch's allocator grow what it has instead of reserving more beside it, unless the environment says how it
    works: what passes of other lengths leave behind cannot be used otherwise, an eighth of an H200 with 8B parameters.
    """
    if device.type == "cuda" and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # type: ignore[attr-defined]


def compiled_on_cuda(function: Function) -> Function:
    """Run `function` compiled when its first argument is on CUDA, as it is otherwise."""

    @functools.cache
    def fast() -> Callable[..., Any]:
        return torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(first: torch.Tensor, *rest: Any) -> Any:
        return fast()(first, *rest) if first.is_cuda else function(first, *rest)

    return call  # type: ignore[return-value]


def compiles(model: nn.Module, mode: str, device: torch.device) -> bool:
    """Whether the layers of `model` are to be compiled for `mode` (auto, on or off)."""
    large = sum(p.numel() for p in model.parameters()) >= LARGE_MODEL
    return mode == "on" or (mode == "auto" and device.type == "cuda" and large)


def compile_layers(model: nn.Module) -> None:
    """Compile every transformer layer of `model`, in place.

    Layers are alike, so one compilation serves all of them. Row lengths change from batch to batch: they are dynamic.
    """
    torch._dynamo.config.suppress_errors = True  # a compiler that is missing costs a warning, not the run
    for layer in decoder_layers(model):
        if _is_sharded(model):
            layer.forward = torch.compile(layer.forward, dynamic=True)  # FSDP's hooks stay outside
        else:
            layer.compile(dynamic=True)


def _is_sharded(model: nn.Module) -> bool:
    return hasattr(model, "compute_gathered")


def use_checkpointing(
    model: nn.Module, mode: str, *, tokens: int, optimizer: str, device: torch.device, offload: bool = False,
    gradient_bytes: int = model_math.GRADIENT_BYTES, compiled: bool = False, world: World = ALONE,
) -> int:  # fmt: skip
    """Switch gradient checkpointing for `mode` (auto, on or off); returns the number of recomputed layers, and logs
    why. With auto these are as few as it takes, and the logits stay for the backward pass, too, where there is room for
    those of the largest pass.

    Args:
        tokens: of the largest forward pass.
        optimizer: its name; its state still has to find room. Empty: it lies elsewhere.
        offload: what it saves goes to the host's memory, so it is on.
        gradient_bytes: of one trained parameter.
        compiled: the layers will be, and keep less.
    """
    layers = decoder_layers(model)
    recomputed = len(layers) if mode == "on" or offload else 0
    if mode == "auto" and not recomputed and device.type == "cuda":
        trained = [local(p).shape for p in model.parameters() if p.requires_grad]
        # Gradients and the optimizer's state are not allocated before the first step.
        gradients = gradient_bytes * sum(map(math.prod, trained))
        state = model_math.optimizer_bytes(trained, optimizer) if optimizer else 0
        # A pass is done again on all ranks or on none: what one adds up of another is added up twice.
        free, total = _memory(device)
        room = model_math.room_for_activations(free - gradients - state - gathered_bytes(model), total)
        room = min(world.gather(room))
        kept = functools.partial(activations, model, tokens, compiled)
        recomputed = model_math.layers_recomputed(kept, layers_reached(model), room)
        wanted = kept(0).total
        width = getattr(model, "logits_dtype", compute_dtype(model)).itemsize
        logits = tokens * dimensions(model).vocab * width
        model.keeps_logits = not recomputed and wanted + logits <= room  # type: ignore[assignment]
        print(
            f"Gradient checkpointing {f'on, {recomputed} of {len(layers)} layers' if recomputed else 'off'}: "
            f"{tokens} tokens need about {wanted / 1e9:.1f} GB, {max(0, room) / 1e9:.1f} GB are there for them"
        )
    if recomputed:
        lowest = 0 if recomputed == len(layers) else len(layers) - layers_reached(model)
        # The lowest layers: when they are recomputed, what the upper ones kept is gone.
        _enable(model, layers[lowest : lowest + recomputed])
    if offload:
        saved = SavedStates(device)
        for layer in layers:
            layer._gradient_checkpointing_func = saved.around(layer._gradient_checkpointing_func)
    return recomputed


def activations(model: nn.Module, tokens: int, compiled: bool = False, recomputed: int = 0) -> model_math.Activations:
    """What the forward pass of `tokens` tokens on a GPU keeps for the backward pass, which
    recomputes `recomputed` layers."""
    trained = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    return model_math.activation_bytes(
        dimensions(model), tokens, width=compute_dtype(model).itemsize, on_gpu=True, compiled=compiled,
        recomputed=recomputed, layers=layers_reached(model), largest=max(map(math.prod, trained.values()), default=0),
        adapters=model_math.Adapters.of(trained, len(decoder_layers(model))),
    )  # fmt: skip


def gathered_bytes(model: nn.Module) -> int:
    """What a pass through a model on several ranks has beside this rank's rows: whole parameters, their gradients and
    what of those is added up, of all that is beside the layers and of two layers, the present one and the next."""
    if not _is_sharded(model):
        return 0
    layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
    beside = sum(p.numel() for p in model.parameters()) - sum(layers)
    return (beside + 2 * max(layers)) * (2 * compute_dtype(model).itemsize + 4)


def layers_reached(model: nn.Module) -> int:
    """Layers from the lowest with a trained parameter up: those that a gradient passes through."""
    layers = decoder_layers(model)
    if any(p.requires_grad for p in model.get_input_embeddings().parameters()):
        return len(layers)
    trained = [i for i, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())]
    return len(layers) - min(trained) if trained else 0


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes of the device that are free, with what torch holds and does not use, and all of them."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def _enable(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Non-reentrant, and only these layers themselves in training mode: everything in them stays free of dropout, and
    the others keep all."""
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    # The hook that makes embeddings require a gradient is for reentrant checkpointing: frozen layers would pay for it.
    model.disable_input_require_grads()
    for layer in layers:
        layer.training = True
