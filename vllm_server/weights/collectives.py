"""A worker's end of the group in which weights are broadcast: gloo between CPU processes, NCCL between GPUs.

A peer that dies is an error, never a hang: every wait is one of the `Lifeline`'s.
"""

from __future__ import annotations

import contextlib

import torch

from atropos_common.group import Gloo, Lifeline, LinkError, Nccl, cut, first_line, gpu_of, own_address
from atropos_common.transfer import SLOTS, Chunk, TransferInit

REFUSED = "refused: "
"""How a worker's error begins that the next try would meet again; of an error only the text leaves the worker."""


class Link:
    """Receives the trainer's broadcasts in order."""

    def receive(self, chunk: Chunk, buffer: torch.Tensor, slot: int) -> None:
        """Fill `buffer`, uint8 of the chunk's bytes; what is queued on the device after this sees it full."""
        raise NotImplementedError

    def emptied(self, slot: int) -> None:
        """What is queued on the device so far was the last use of that slot's content."""

    def finish(self) -> None:
        """Wait until everything received is where it belongs.

        Raises:
            LinkError: the trainer is gone, or nothing came within the timeout.
        """

    def close(self) -> None:
        """Leave, whatever state the others are in."""
        raise NotImplementedError


def join(init: TransferInit, rank: int, device: torch.device) -> Link:
    """Meet the others in the trainer's store, then connect.

    Raises:
        LinkError: with the phase and the usual causes.
    """
    lifeline = Lifeline(init, rank, gpu_of(device))
    try:
        lifeline.connecting()
        if init.backend == "gloo":
            return GlooLink(lifeline, rank, init)
        return NcclLink(lifeline, rank, init, device)
    except RuntimeError as error:
        raise LinkError(f"rank {rank}: no {init.backend} connection (phase connect: {first_line(error)})") from None


class GlooLink(Link):
    """Through CPU memory; a receive returns when its data is there, so nothing is left to wait for."""

    def __init__(self, lifeline: Lifeline, rank: int, init: TransferInit) -> None:
        self._lifeline = lifeline
        self._gloo = Gloo(lifeline.store, rank, init.world_size, own_address(init.address), init.timeout_s)

    def receive(self, chunk: Chunk, buffer: torch.Tensor, slot: int) -> None:
        try:
            works = [self._gloo.broadcast(part, root) for part, root in cut(chunk, buffer)]
            self._lifeline.until(
                lambda: all(work.is_completed() for work in works), "receive", "no data from the trainer"
            )
            for work in works:
                work.wait()
        except LinkError:
            raise
        except RuntimeError as error:
            raise self._lifeline.died("receive", error) from None

    def close(self) -> None:
        self._gloo.close()


class NcclLink(Link):
    """Broadcasts run on a stream of their own while the present stream empties the buffer before."""

    def __init__(self, lifeline: Lifeline, rank: int, init: TransferInit, device: torch.device) -> None:
        self._lifeline = lifeline
        # Later releases change NCCL's settings for vLLM's own groups; the trainer has those of the launch.
        with _as_launched():
            self._nccl = Nccl(init.nccl_id, rank, init.world_size, device)
        self._stream = torch.cuda.Stream(device)
        self._filled = torch.cuda.Event()
        self._emptied = [torch.cuda.Event() for _ in range(SLOTS)]

    def receive(self, chunk: Chunk, buffer: torch.Tensor, slot: int) -> None:
        self._stream.wait_event(self._emptied[slot])
        self._nccl.broadcast(cut(chunk, buffer), self._stream)
        self._filled.record(self._stream)
        torch.cuda.current_stream().wait_event(self._filled)

    def emptied(self, slot: int) -> None:
        self._emptied[slot].record(torch.cuda.current_stream())

    def finish(self) -> None:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream())
        self._lifeline.until(
            done.query, "receive", "no data from the trainer, or NCCL is not connected (NCCL_DEBUG=INFO tells why),"
        )

    def close(self) -> None:
        self._nccl.close()


def _as_launched() -> contextlib.AbstractContextManager[None]:
    try:
        from vllm.utils.nccl import unpinned_nccl_env
    except ImportError:
        return contextlib.nullcontext()
    as_launched: contextlib.AbstractContextManager[None] = unpinned_nccl_env()
    return as_launched
