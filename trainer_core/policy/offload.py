"""Offload optimizer state between steps, and hidden states until the backward pass, to host memory.

An offloaded tensor keeps its identity and shape; only its device storage is freed. On a CPU the
same code runs without streams, for tests.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

SMALL = 4096
"""Largest tensor, in elements, that stays on the device."""

Part = TypeVar("Part")


class _CopyStream:
    """A CUDA stream for copies; on a CPU they are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after_now(self) -> AbstractContextManager[Any]:
        """Run operations on this stream after all work queued on the current one."""
        if self._stream is None:
            return nullcontext()
        # The copy must not start before the kernels that produce or free its tensors.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()

    def borrow(self, tensor: torch.Tensor) -> None:
        """Keep the memory of `tensor` until this stream is done with it."""
        if self._stream is not None:
            # PyTorch's allocator only knows the stream that allocated the memory.
            tensor.record_stream(self._stream)

    def await_mark(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)


def host_tensor(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


class HostMemory:
    """Device tensors whose content is in host memory until their part is stepped."""

    def __init__(self, device: torch.device) -> None:
        self._up, self._down = _CopyStream(device), _CopyStream(device)
        self._device = device
        self._host: dict[torch.Tensor, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._host.values())

    @torch.no_grad()
    def put_away(self, tensor: torch.Tensor, content: torch.Tensor | None = None) -> torch.Tensor:
        """Offload `tensor`, with its content or the given one; return it without storage."""
        # The tensor object stays: the optimizer uses it as the key of its state.
        self._host[tensor] = host_tensor(tensor).copy_(tensor if content is None else content)
        tensor.untyped_storage().resize_(0)
        return tensor

    def adopt(self, content: Any, away: bool) -> Any:
        """Put a value of a saved optimizer state on the device, or offload it."""
        if not isinstance(content, torch.Tensor):
            return content
        if not away or content.numel() <= SMALL:
            return content.to(self._device)
        return self.put_away(torch.empty_like(content, device=self._device), content)

    def content(self, value: Any) -> Any:
        """Return the tree `value` with host copies in place of offloaded tensors."""
        if isinstance(value, torch.Tensor):
            return self._host.get(value, value)
        if isinstance(value, dict):
            return {key: self.content(item) for key, item in value.items()}
        return [self.content(item) for item in value] if isinstance(value, (list, tuple)) else value

    @torch.no_grad()
    def streamed(
        self, parts: Sequence[Part], tensors_of: Callable[[Part], list[torch.Tensor]]
    ) -> Iterator[Part]:
        """Yield each part with its tensors on the device until the next part is requested."""
        # At most three parts are on the device: one arriving, one in use, one leaving.
        coming = self._fetch(tensors_of(parts[0])) if parts else None
        gone: tuple[list[torch.Tensor], torch.cuda.Event | None] | None = None
        for number, part in enumerate(parts):
            ready = coming
            # Prefetch the next part, so that its copy overlaps with the step of this one.
            coming = self._fetch(tensors_of(parts[number + 1])) if number + 1 < len(parts) else None
            self._up.await_mark(ready)
            yield part
            # Free the previous part only now: its copy to the host had the whole step to finish.
            before, gone = gone, self._send(tensors_of(part))
            if before is not None:
                self._release(*before)
        if gone is not None:
            self._release(*gone)

    def _fetch(self, tensors: list[torch.Tensor]) -> torch.cuda.Event | None:
        # State that a first step creates is not offloaded yet.
        known = [tensor for tensor in tensors if tensor in self._host]
        for tensor in known:
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        with self._up.after_now():
            for tensor in known:
                tensor.copy_(self._host[tensor], non_blocking=True)
        return self._up.mark()

    def _send(
        self, tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        for tensor in tensors:
            # State that a first step has created.
            if tensor not in self._host:
                self._host[tensor] = host_tensor(tensor)
        with self._down.after_now():
            for tensor in tensors:
                self._host[tensor].copy_(tensor, non_blocking=True)
        return tensors, self._down.mark()

    def _release(self, tensors: list[torch.Tensor], mark: torch.cuda.Event | None) -> None:
        self._down.await_mark(mark)
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)


@dataclass(eq=False)
class _SavedState:
    host: torch.Tensor
    written: torch.cuda.Event | None
    # A weak reference: only the graph keeps a state alive, and frozen layers never request theirs.
    below: weakref.ref[_SavedState] | None
    """State that the backward pass needs next."""
    back: torch.Tensor | None = None
    """Copy on the device."""
    ready: torch.cuda.Event | None = None


class SavedStates:
    """Tensors saved for the backward pass, kept in host memory meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = _CopyStream(device), _CopyStream(device)
        self._newest: weakref.ref[_SavedState] | None = None

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that calls a layer, so that its saved inputs are offloaded."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                return checkpoint(*args, **kwargs)

        return call

    @torch.no_grad()
    def _pack(self, tensor: torch.Tensor) -> _SavedState | torch.Tensor:
        # Indices and small tensors are not worth a copy.
        if not tensor.is_floating_point() or tensor.numel() <= SMALL:
            return tensor
        host = host_tensor(tensor)
        with self._down.after_now():
            host.copy_(tensor, non_blocking=True)
        # The layer may free its input before the copy has finished.
        self._down.borrow(tensor)
        saved = _SavedState(host, self._down.mark(), self._newest)
        self._newest = weakref.ref(saved)
        return saved

    @torch.no_grad()
    def _unpack(self, saved: _SavedState | torch.Tensor) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        back = self._fetched(saved)
        self._up.await_mark(saved.ready)
        # Backward goes from the last layer down: fetch the state below while this layer is
        # recomputed.
        saved.back, self._newest = None, saved.below
        if saved.below is not None and (below := saved.below()) is not None:
            self._fetched(below)
        return back

    def _fetched(self, saved: _SavedState) -> torch.Tensor:
        if saved.back is None:
            saved.back = torch.empty_like(saved.host, device=self._device)
            with self._up.after_now():
                # The state may still be on its way to the host.
                self._up.await_mark(saved.written)
                saved.back.copy_(saved.host, non_blocking=True)
            saved.ready = self._up.mark()
            self._up.borrow(saved.back)
        return saved.back
