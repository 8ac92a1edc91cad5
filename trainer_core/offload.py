"""What a trainer keeps in the host's memory until it is needed on the device: masters and optimizer state between two
steps, hidden states between forward and backward pass.

Copies run on streams of their own, beside what is computed: the next part comes and the last one goes while a part is
stepped, and the hidden state of the layer below comes while a layer is computed anew. A tensor that is away keeps its
name, shape and place in the optimizer and has no memory there. On a CPU the same is done without streams, which proves
the bookkeeping and saves nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

SMALL = 4096
"""Elements up to which a tensor of the optimizer's state stays on the device: counters, tables, vectors."""

Part = TypeVar("Part")


class _Beside:
    """A stream beside the one in use; on a CPU none, and everything happens at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after_now(self) -> AbstractContextManager[Any]:
        """What is begun in this context runs beside, after what the stream in use has been given so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """The present end of this stream."""
        return None if self._stream is None else self._stream.record_event()

    def borrow(self, tensor: torch.Tensor) -> None:
        """The memory of `tensor` is given away only when this stream is done with it."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def await_mark(self, mark: torch.cuda.Event | None) -> None:
        """What the stream in use is given from now on runs after `mark`."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)


def host_tensor(like: torch.Tensor) -> torch.Tensor:
    """Uninitialised, in memory of the host that a GPU reads and writes without waiting."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


class HostMemory:
    """Tensors of a device whose content lies in the host's memory but while their part is stepped."""

    def __init__(self, device: torch.device) -> None:
        self._up, self._down = _Beside(device), _Beside(device)
        self._device = device
        self._host: dict[torch.Tensor, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        """In the host's memory."""
        return sum(tensor.nbytes for tensor in self._host.values())

    @torch.no_grad()
    def put_away(self, tensor: torch.Tensor, content: torch.Tensor | None = None) -> torch.Tensor:
        """Keep `tensor` in the host's memory from now on, with its content or the one given; returns it, emptied."""
        self._host[tensor] = host_tensor(tensor).copy_(tensor if content is None else content)
        tensor.untyped_storage().resize_(0)
        return tensor

    def adopt(self, content: Any, away: bool) -> Any:
        """Of an optimizer's saved state: on the device, or `away` in the host's memory unless it is small."""
        if not isinstance(content, torch.Tensor):
            return content
        if not away or content.numel() <= SMALL:
            return content.to(self._device)
        return self.put_away(torch.empty_like(content, device=self._device), content)

    def content(self, value: Any) -> Any:
        """`value`, a tree of dicts, lists and tensors, with what lies in the host's memory in its place."""
        if isinstance(value, torch.Tensor):
            return self._host.get(value, value)
        if isinstance(value, dict):
            return {key: self.content(item) for key, item in value.items()}
        return [self.content(item) for item in value] if isinstance(value, (list, tuple)) else value

    @torch.no_grad()
    def streamed(self, parts: Sequence[Part], tensors_of: Callable[[Part], list[torch.Tensor]]) -> Iterator[Part]:
        """Each part, whose tensors have memory and content on the device until the next one is asked for.

        Never more than three parts have memory: one comes, one is there, one goes.

        Args:
            tensors_of: what a part needs; what is not known yet, such as state that its first step makes, is kept in
                the host's memory from then on.
        """
        coming = self._fetch(tensors_of(parts[0])) if parts else None
        gone: tuple[list[torch.Tensor], torch.cuda.Event | None] | None = None
        for number, part in enumerate(parts):
            ready = coming
            coming = self._fetch(tensors_of(parts[number + 1])) if number + 1 < len(parts) else None
            self._up.await_mark(ready)
            yield part
            before, gone = gone, self._send(tensors_of(part))
            self._release(before)
        self._release(gone)

    def _fetch(self, tensors: list[torch.Tensor]) -> torch.cuda.Event | None:
        known = [tensor for tensor in tensors if tensor in self._host]
        for tensor in known:
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        with self._up.after_now():
            for tensor in known:
                tensor.copy_(self._host[tensor], non_blocking=True)
        return self._up.mark()

    def _send(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        for tensor in tensors:
            if tensor not in self._host:
                self._host[tensor] = host_tensor(tensor)
        with self._down.after_now():
            for tensor in tensors:
                self._host[tensor].copy_(tensor, non_blocking=True)
        return tensors, self._down.mark()

    def _release(self, gone: tuple[list[torch.Tensor], torch.cuda.Event | None] | None) -> None:
        tensors, mark = gone or ([], None)
        self._down.await_mark(mark)
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)


@dataclass(eq=False)
class _Saved:
    """A hidden state in the host's memory."""

    host: torch.Tensor
    written: torch.cuda.Event | None
    below: weakref.ref[_Saved] | None
    """The one that the backward pass needs next; the graph alone keeps it, which frozen layers never ask for."""
    back: torch.Tensor | None = None
    """On the device again."""
    ready: torch.cuda.Event | None = None


class SavedStates:
    """What checkpointed layers save for the backward pass, kept in the host's memory in between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = _Beside(device), _Beside(device)
        self._newest: weakref.ref[_Saved] | None = None

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """`checkpoint`, the function that a layer is called through, whose saved inputs go to the host's memory."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                return checkpoint(*args, **kwargs)

        return call

    @torch.no_grad()
    def _pack(self, tensor: torch.Tensor) -> _Saved | torch.Tensor:
        if not tensor.is_floating_point() or tensor.numel() <= SMALL:
            return tensor
        host = host_tensor(tensor)
        with self._down.after_now():
            host.copy_(tensor, non_blocking=True)
        self._down.borrow(tensor)
        saved = _Saved(host, self._down.mark(), self._newest)
        self._newest = weakref.ref(saved)
        return saved

    @torch.no_grad()
    def _unpack(self, saved: _Saved | torch.Tensor) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        back = self._fetched(saved)
        self._up.await_mark(saved.ready)
        saved.back, self._newest = None, saved.below
        if saved.below is not None and (below := saved.below()) is not None:
            self._fetched(below)
        return back

    def _fetched(self, saved: _Saved) -> torch.Tensor:
        """On its way back to the device, at the latest from now on."""
        if saved.back is None:
            saved.back = torch.empty_like(saved.host, device=self._device)
            with self._up.after_now():
                self._up.await_mark(saved.written)
                saved.back.copy_(saved.host, non_blocking=True)
            saved.ready = self._up.mark()
            self._up.borrow(saved.back)
        return saved.back
