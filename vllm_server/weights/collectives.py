"""A worker's end of the group in which weights are broadcast: gloo between CPU processes, NCCL between GPUs.

A peer that dies is an error, never a hang: every wait is a poll with a deadline, and while it lasts the trainer's store
is looked at, which says when the trainer leaves, and breaks off when it dies.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from atropos_common.group import Gloo, Nccl, SealedStore
from atropos_common.transfer import SLOTS, TransferInit

REFUSED = "refused: "
"""How a worker's error begins that the next try would meet again; of an error only the text leaves the worker."""
POLL_S = 0.0002
BRISK_S = 0.05
"""After this long without an end, polls become rare."""
LOOK_S = 0.1
"""How often the trainer's store is looked at during a wait."""


class LinkError(RuntimeError):
    """The group did not form, or broke; the message says in which phase."""


class Link:
    """Receives the trainer's broadcasts in order."""

    def receive(self, buffer: torch.Tensor, slot: int) -> None:
        """Fill `buffer`; what is queued on the device after this sees it full."""
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


class Lifeline:
    """Waits that end with the trainer."""

    def __init__(self, init: TransferInit, rank: int) -> None:
        """Find the trainer's store and report there.

        Raises:
            LinkError: there is none.
        """
        self._where, self._timeout_s = f"{init.address}:{init.port}", init.timeout_s
        timeout = timedelta(seconds=init.timeout_s)
        try:
            store: Any = dist.TCPStore(init.address, init.port, None, False, timeout, wait_for_workers=False)
            self.store = SealedStore(dist.PrefixStore(init.key, store), init.secret, timeout)
            self.store.set(f"here/{rank}", b"1")
        except RuntimeError as error:
            raise LinkError(
                f"no trainer at {self._where} (phase rendezvous: {first_line(error)}). Is it alive, and does "
                "MASTER_ADDR name an address of its machine that this one reaches?"
            ) from None
        self.until(lambda: self.store.check(["go"]), "rendezvous", "the others did not come")

    def until(self, done: Callable[[], bool], phase: str, otherwise: str) -> None:
        """Poll until `done`.

        Raises:
            LinkError: the trainer left or died, or `otherwise` for as long as the timeout.
        """
        began = looked = time.monotonic()
        while not self._asked(done, phase):
            now = time.monotonic()
            if now - looked > LOOK_S:
                looked = now
                if self._asked(lambda: self.store.check(["off"]), phase):
                    raise LinkError(f"the trainer gave this group up (phase {phase})")
            if now - began > self._timeout_s:
                raise LinkError(f"{otherwise} within {self._timeout_s:.0f} s (phase {phase})")
            time.sleep(POLL_S if now - began < BRISK_S else 20 * POLL_S)

    def _asked(self, question: Callable[[], bool], phase: str) -> bool:
        try:
            return question()
        except RuntimeError as error:
            raise self.died(phase, error) from None

    def died(self, phase: str, error: Exception) -> LinkError:
        """What a connection to the trainer that breaks off means."""
        return LinkError(f"the trainer at {self._where} died (phase {phase}: {first_line(error)})")


def join(init: TransferInit, rank: int, device: torch.device) -> Link:
    """Meet the others in the trainer's store, then connect.

    Raises:
        LinkError: with the phase and the usual causes.
    """
    lifeline = Lifeline(init, rank)
    try:
        if init.backend == "gloo":
            return GlooLink(lifeline, rank, init)
        return NcclLink(lifeline, rank, init, device)
    except RuntimeError as error:
        raise LinkError(f"rank {rank}: no {init.backend} connection (phase connect: {first_line(error)})") from None


class GlooLink(Link):
    """Through CPU memory; a receive returns when its data is there, so nothing is left to wait for."""

    def __init__(self, lifeline: Lifeline, rank: int, init: TransferInit) -> None:
        self._lifeline = lifeline
        self._gloo = Gloo(lifeline.store, rank, init.world_size, init.address, init.timeout_s)

    def receive(self, buffer: torch.Tensor, slot: int) -> None:
        try:
            work = self._gloo.broadcast(buffer)
            self._lifeline.until(work.is_completed, "receive", "no data from the trainer")
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

    def receive(self, buffer: torch.Tensor, slot: int) -> None:
        self._stream.wait_event(self._emptied[slot])
        self._nccl.broadcast(buffer, self._stream)
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


def first_line(error: Exception) -> str:
    """Of what torch says, without the C++ stack below it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
