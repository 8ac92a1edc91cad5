"""Rows of an optimizer step side by side on the cores of a CPU, for models too small to share out one product.

Splitting each small operation over threads makes them wait for one another thousands of times a step, and on cores that
other processes use too those waits are long. So each thread takes every n-th row, alone, with a gradient of its own;
gradients are added up in order, so results do not depend on timing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import nn

from trainer_core.config import TrainingConfig

SMALL_MODEL = 50_000_000
"""Parameters below which rows side by side are faster than threads within an operation."""
MOST_THREADS = 8
"""Each holds a gradient of its own."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def use_cores(model: nn.Module, config: TrainingConfig, device: torch.device) -> int:
    """Set torch's threads for this model; returns those for `accumulate`, 1 where operations are split instead.

    Without `torch_threads` a small model on a CPU gets as many as there are cores, or OMP_NUM_THREADS.
    """
    small = sum(p.numel() for p in model.parameters()) < SMALL_MODEL
    if device.type != "cpu" or not small:
        if config.torch_threads:
            torch.set_num_threads(config.torch_threads)
        return 1
    torch.set_num_threads(1)
    return min(config.torch_threads or _cores(), MOST_THREADS)


def _cores() -> int:
    """Cores that this process may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(wanted) if wanted.isdigit() and int(wanted) else len(os.sched_getaffinity(0))


def in_threads(work: Callable[[Item, int], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """work(item, thread) for every item, item i in thread i % threads; results in the order of the items."""
    if threads == 1:
        return [work(item, 0) for item in items]

    def one_thread(thread: int) -> list[Result]:
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
