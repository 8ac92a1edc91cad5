"""A worker's end of the broadcast group: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

import torch
from vllm.utils.nccl import unpinned_nccl_env

from atropos_common.broadcast.group import (
    Gloo,
    Lifeline,
    LinkError,
    Nccl,
    cut,
    first_line,
    gpu_of,
    own_address,
)
from atropos_common.broadcast.transfer import SLOTS, Chunk, TransferInit

# Prefix of an error that a retry would meet again; only the text of an error leaves a worker.
REFUSED_PREFIX = "refused: "


class Link:
    """Receives the trainer's broadcasts in order."""

    def receive(self, chunk: Chunk, buffer: torch.Tensor, slot: int) -> None:
        """Fill `buffer`, uint8 of the chunk's bytes, before work that is queued on the device
        later."""
        raise NotImplementedError

    def emptied(self, slot: int) -> None:
        """Mark the slot as used by the work queued on the device up to now."""

    def finish(self) -> None:
        """Wait until everything received is in place.

        Raises:
            LinkError: the trainer is gone, or the timeout passed.
        """

    def close(self) -> None:
        """Leave the group, whatever state the others are in."""
        raise NotImplementedError


def join(init: TransferInit, rank: int, device: torch.device) -> Link:
    """Meet the other processes in the trainer's store, then connect.

    Raises:
        LinkError: names the phase and the usual causes.
    """
    lifeline = Lifeline(init, rank, gpu_of(device))
    try:
        lifeline.connecting()
        if init.backend == "gloo":
            return GlooLink(lifeline, rank, init)
        return NcclLink(lifeline, rank, init, device)
    except RuntimeError as error:
        why = f"phase connect: {first_line(error)}"
        raise LinkError(f"rank {rank}: no {init.backend} connection ({why})") from None


class GlooLink(Link):
    """Transfer through CPU memory; a receive returns when its data has arrived."""

    def __init__(self, lifeline: Lifeline, rank: int, init: TransferInit) -> None:
        self._lifeline = lifeline
        address = own_address(init.address)
        self._gloo = Gloo(lifeline.store, rank, init.world_size, address, init.timeout_s)

    def receive(self, chunk: Chunk, buffer: torch.Tensor, slot: int) -> None:
        try:
            works = [self._gloo.broadcast(part, root) for part, root in cut(chunk, buffer)]

            def arrived() -> bool:
                return all(work.is_completed() for work in works)

            # A wait of gloo's own would hang after the trainer's death.
            self._lifeline.until(arrived, "receive", "no data from the trainer")
            for work in works:
                work.wait()
        except LinkError:
            raise
        except RuntimeError as error:
            raise self._lifeline.died("receive", error) from None

    def close(self) -> None:
        self._gloo.close()


class NcclLink(Link):
    """Broadcasts on a stream of their own."""

    def __init__(
        self, lifeline: Lifeline, rank: int, init: TransferInit, device: torch.device
    ) -> None:
        self._lifeline = lifeline
        # vLLM changes NCCL's environment for its own groups; the trainer uses the launch's.
        with unpinned_nccl_env():
            self._nccl = Nccl(init.nccl_id, rank, init.world_size, device)
        self._stream = torch.cuda.Stream(device)
        self._filled = torch.cuda.Event()
        self._emptied = [torch.cuda.Event() for _ in range(SLOTS)]

    def receive(self, chunk: Chunk, buffer: torch.Tensor, slot: int) -> None:
        # The broadcast overwrites the slot, so it waits for the copies out of it; the copies wait
        # for the broadcast. The host waits for neither.
        self._stream.wait_event(self._emptied[slot])
        self._nccl.broadcast(cut(chunk, buffer), self._stream)
        self._filled.record(self._stream)
        torch.cuda.current_stream().wait_event(self._filled)

    def emptied(self, slot: int) -> None:
        self._emptied[slot].record(torch.cuda.current_stream())

    def finish(self) -> None:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream())
        fault = "no data from the trainer, or NCCL is not connected (NCCL_DEBUG=INFO tells why),"
        self._lifeline.until(done.query, "receive", fault)

    def close(self) -> None:
        self._nccl.close()
