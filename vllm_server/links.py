"""A worker's end of the group in which weights are broadcast: gloo between CPU processes, NCCL between GPUs.

A peer that dies is an error, never a hang: every wait is a poll with a deadline, and while it lasts the trainer's store
is looked at, which says when the trainer leaves, and breaks off when it dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trainer_core.contracts.transfer import SLOTS, TransferInit

REFUSED = "refused: "
"""How a worker's error begins that the next try would meet again; of an error only the text leaves the worker."""
POLL_S = 0.0002
BRISK_S = 0.05
"""After this long without an end, polls become rare."""
LOOK_S = 0.1
"""How often the trainer's store is looked at during a wait."""
ABORT_S = 5.0
"""An abort may itself wait for the device; longer than this it is left to its thread."""


class LinkError(RuntimeError):
    """The group did not form, or broke; the message says in which phase."""


class Link(Protocol):
    """Receives the trainer's broadcasts in order."""

    def receive(self, buffer: torch.Tensor, slot: int) -> None:
        """Fill `buffer`; what is queued on the device after this sees it full."""
        ...

    def emptied(self, slot: int) -> None:
        """What is queued on the device so far was the last use of that slot's content."""
        ...

    def finish(self) -> None:
        """Wait until everything received is where it belongs.

        Raises:
            LinkError: the trainer is gone, or nothing came within the timeout.
        """
        ...

    def close(self) -> None:
        """Leave, whatever state the others are in."""
        ...


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
            self.store: Any = dist.PrefixStore(init.key, store)
            self.store.set(f"here/{rank}", b"1")
        except RuntimeError as error:
            raise LinkError(
                f"no trainer at {self._where} (phase rendezvous: {first_line(error)}). Is it alive, and does "
                "MASTER_ADDR name an address of its machine that this one reaches?"
            ) from None
        self.until(lambda: bool(self.store.check(["go"])), "rendezvous", "the others did not come")

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
                if self._asked(lambda: bool(self.store.check(["off"])), phase):
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


class GlooLink:
    """Through CPU memory; a receive returns when its data is there."""

    def __init__(self, lifeline: Lifeline, rank: int, init: TransferInit) -> None:
        self._lifeline = lifeline
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=init.timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=init.address)]  # one machine: loopback
        self._group: Any = dist.ProcessGroupGloo(lifeline.store, rank, init.world_size, options)

    def receive(self, buffer: torch.Tensor, slot: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            work = self._group.broadcast([buffer], options)
            self._lifeline.until(work.is_completed, "receive", "no data from the trainer")
            work.wait()
        except LinkError:
            raise
        except RuntimeError as error:
            raise self._lifeline.died("receive", error) from None

    def emptied(self, slot: int) -> None:
        """Copies on the CPU are over when they return."""

    def finish(self) -> None:
        """Every receive has waited already."""

    def close(self) -> None:
        # The group's end waits for what is under way, up to its timeout; nobody here does. Only the interpreter: it
        # aborts (SIGABRT) when it ends while a daemon thread is in there.
        last, self._group = [self._group], None
        threading.Thread(target=last.clear).start()


class NcclLink:
    """Broadcasts run on a stream of their own while the present stream empties the buffer before."""

    def __init__(self, lifeline: Lifeline, rank: int, init: TransferInit, device: torch.device) -> None:
        self._lifeline = lifeline
        self._communicator = _communicator(lifeline.store, rank, init.world_size, device)
        if self._communicator.disabled:
            raise LinkError("the NCCL library does not load: see NCCL_DEBUG=INFO and VLLM_NCCL_SO_PATH")
        self._stream = torch.cuda.Stream(device)
        self._filled = torch.cuda.Event()
        self._emptied = [torch.cuda.Event() for _ in range(SLOTS)]

    def receive(self, buffer: torch.Tensor, slot: int) -> None:
        self._stream.wait_event(self._emptied[slot])
        self._communicator.broadcast(buffer, src=0, stream=self._stream)
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
        """Abort: a peer may be gone, and then destroying would wait for it."""
        if self._communicator.disabled:
            return
        self._communicator.disabled, self._communicator.available = True, False
        abort = threading.Thread(
            target=self._communicator.nccl.lib.ncclCommAbort, args=(self._communicator.comm,), daemon=True
        )
        abort.start()
        abort.join(ABORT_S)


def _communicator(store: Any, rank: int, world_size: int, device: torch.device) -> Any:
    """vLLM's own, apart from the groups in which its workers compute."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    try:
        from vllm.utils.nccl import unpinned_nccl_env as as_launched
    except ImportError:
        as_launched = contextlib.nullcontext
    named = {field.name for field in dataclasses.fields(StatelessProcessGroup)}
    extra = {"socket": None} if "socket" in named else {}  # releases that keep the listening socket there
    group = StatelessProcessGroup(rank=rank, world_size=world_size, store=store, **extra)
    # Later releases change NCCL's settings for their own groups; the trainer has those of the launch.
    with as_launched():
        return PyNcclCommunicator(group, device=device)


def first_line(error: Exception) -> str:
    """Of what torch says, without the C++ stack below it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
