"""Several ranks of one trainer: meeting, collectives, and detection of a dead rank."""

from __future__ import annotations

import hmac
import os
import pickle
import secrets
import select
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from atropos_common.broadcast.group import (
    MAC_BYTES,
    SECRET_BYTES,
    Gloo,
    SealedStore,
    first_line,
    prove,
)
from atropos_common.net.ports import interface_of
from atropos_common.system.files import write_private
from atropos_common.system.parent_death import die_with_parent
from trainer_core.errors import RankGone, Stopped, TrainerError, UsageError
from trainer_core.ranks.context_parallel import Context
from trainer_core.ranks.world import (
    ALONE,
    GONE_CODE,
    KNOWN,
    SEEN_S,
    World,
    first_rank,
    meeting_place,
    node_address,
    on_every_rank,
    on_several_nodes,
    own_rank,
    rank_count,
    record_end,
)

T = TypeVar("T")

EVER_S = 365 * 86_400.0
"""Timeout in seconds for rank 0, which may wait hours for rollouts."""
POLL_S = 0.5
"""Seconds between checks for failed ranks."""
LEAVE_TIMEOUT_S = 3.0
"""Seconds for this rank to leave after another one has ended."""
# Its cleanup may send the rest of a tracker's data.
LEAVING_S = 30.0


def join(device: torch.device, timeout_s: float, stop: threading.Event | None = None) -> World:
    """Connect this rank to all others; return `ALONE` if there is one.

    Args:
        timeout_s: of the model's collectives.
        stop: ends the wait for the other ranks.

    Raises:
        UsageError: the nodes were started another way, or the folder belongs to another user.
        Stopped: `stop` was set.
        RankGone: a rank has ended, or did not arrive.
    """
    return ALONE if rank_count() == 1 else Ranks(device, timeout_s, stop or threading.Event())


class Ranks(World):
    """World of several ranks, started by torchrun."""

    def __init__(self, device: torch.device, timeout_s: float, stop: threading.Event) -> None:
        super().__init__()
        self.rank, self.size = own_rank(), rank_count()
        # torchrun on several nodes makes these differ; `launch.py` starts one for each node.
        count = os.environ.get("WORLD_SIZE")
        if os.environ.get("LOCAL_WORLD_SIZE", count) != count:
            raise UsageError(
                "ranks on several nodes: start trainer_core.ranks.launch on each, with --nnodes "
                "and --node-rank"
            )
        # Without torchrun nobody would end this rank.
        if not die_with_parent(os.getppid()):
            raise RankGone("torchrun has ended")
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        interface = interface_of(node_address())
        # gloo would otherwise use the interface of the host's name, which may be unreachable.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if on_several_nodes():  # on one node NCCL chooses: a broadcast's engines may be elsewhere
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        self._folder = meeting_place(os.getppid())
        self._lost = ""
        self._leaving, self._closed = threading.Event(), threading.Event()
        self._message = 0
        self._stop = stop
        self._dealt: World = self
        secret = self._meet(stop)
        try:
            self._connect(device, timedelta(seconds=timeout_s), secret)
        except RuntimeError as error:
            self._raise_cause(error)

    def _meet(self, stop: threading.Event) -> bytes:
        # In a private folder instead of torchrun's TCP store, so that other users cannot join.
        if self.rank == 0:
            write_private(self._folder / "secret", secrets.token_hex(SECRET_BYTES))
        # After the secret: a pid file tells the others that everything before it is in place.
        write_private(self._folder / f"pid.{self.rank}", f"{first_rank()} {os.getpid()}")
        others = (rank for rank in range(self.size) if rank != self.rank)
        pids = {rank: self._folder / f"pid.{rank}" for rank in others}
        while not set(pids.values()) <= set(self._folder.iterdir()):
            # No timeout: rank 0 may take long to start.
            if stop.wait(0.02):
                raise Stopped
        entries = {rank: path.read_text().split() for rank, path in pids.items()}
        # A process id means something only on its own node; the first rank identifies the node.
        found = {
            rank: int(pid) if int(first) == first_rank() else None
            for rank, (first, pid) in entries.items()
        }
        threading.Thread(target=self._watch, args=(found,), daemon=True).start()
        return bytes.fromhex((self._folder / "secret").read_text())

    def _connect(self, device: torch.device, limit: timedelta, secret: bytes) -> None:
        # `_control` is for pickled values and has no timeout; torch's own group, for tensors, has.
        store = dist.FileStore(str(self._folder / "store"), self.size)
        store.set_timeout(limit)
        self._sealed = SealedStore(store, secret, limit)
        self._control = Gloo(self._sealed, self.rank, self.size, node_address(), EVER_S)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("model", store),
            rank=self.rank,
            world_size=self.size,
            timeout=limit,
        )
        # Check with the shared secret that each connection belongs to a rank of this run.
        prove(dist.group.WORLD, self._sealed, self.rank, self.size)
        self.mesh = init_device_mesh(device.type, (self.size,), mesh_dim_names=("fsdp",))

    @property
    def dealt(self) -> World:
        return self._dealt

    def split(self, context: int) -> None:
        if context == 1:
            return
        own: dict[bool, Any] = {}
        every = range(self.size)
        # True: neighbours share rows. False: every `context`-th rank, which have different rows.
        for beside, several in (
            (True, [every[first : first + context] for first in every[::context]]),
            (False, [every[first::context] for first in range(context)]),
        ):
            for ranks in several:
                # torch requires every rank to create every group, in the same order.
                group = dist.new_group(list(ranks))
                if self.rank in ranks:
                    prove(group, self._sealed, ranks.index(self.rank), len(ranks))
                    own[beside] = group
        self.context = Context(own[True], self.rank % context, context)
        self._dealt = Dealt(self, own[False], context)

    def share(self, make: Callable[[], T]) -> T:
        if self.rank:
            done, value = pickle.loads(self._receive())
        else:
            try:
                done, value = True, make()
                # Inside the `try`: a value that cannot be pickled must raise on all ranks.
                message = pickle.dumps((True, value), protocol=5)
            except Exception as error:
                done, value = False, error
                message = pickle.dumps((False, _portable(error)), protocol=5)
            self._send(message)
        if not done:
            self._raise(value)
        return cast(T, value)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def gather(self, value: T) -> list[T]:
        message = self._with_mac(self.rank, pickle.dumps(value, protocol=5))
        try:
            # gather needs equal sizes, so exchange the lengths first and pad.
            sizes = [int(size) for size in self._control.gather(torch.tensor([len(message)]))]
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: len(message)] = torch.frombuffer(message, dtype=torch.uint8)
            found = self._control.gather(padded)
        except RuntimeError as error:
            self._raise_cause(error)
        parts = enumerate(zip(found, sizes, strict=True))
        return [pickle.loads(self._verified(rank, part[:size])) for rank, (part, size) in parts]

    def agree(self, error: BaseException | None) -> None:
        found = self.gather(None if error is None else _portable(error))
        errors = [(rank, each) for rank, each in enumerate(found) if each is not None]
        if not errors:
            return
        rank, first = errors[0]
        # The original, with its traceback, on the rank that raised it.
        first = error if error is not None and rank == self.rank else first
        if rank:
            first.args = (f"rank {rank}: {first}", *first.args[1:])
        self._raise(first)

    def known(self, error: BaseException) -> bool:
        return on_every_rank(error)

    def check(self, *, patience_s: float = 0.0) -> None:
        until = time.monotonic() + patience_s
        while not self._lost and time.monotonic() < until:
            time.sleep(0.05)
        if self._lost:
            self._leaving.set()
            raise RankGone(self._lost)

    def close(self, error: BaseException | None = None) -> None:
        known = error is None or self.known(error)
        # Before the connections close, so that the others find the reason when theirs break.
        reason = "" if known or error is None else first_line(error)
        (self._folder / f"left.{self.rank}").write_text(reason)
        self._leaving.set()
        self._closed.set()
        if known:
            try:
                # A barrier: nobody closes its connections while others still use them.
                self._control.gather(torch.zeros(1))
            except RuntimeError as gone:
                print(f"[WARNING] a rank was missing at the end: {gone}", file=sys.stderr)
        self._control.close()
        # After a failure the group stays: destroying it would wait for the missing rank.
        if dist.is_initialized() and known:
            dist.destroy_process_group()

    @staticmethod
    def _raise(error: BaseException) -> NoReturn:
        setattr(error, KNOWN, True)
        raise error

    def _send(self, message: bytes) -> None:
        signed = self._with_mac(0, message)
        try:
            for part in (torch.tensor([len(signed)]), torch.frombuffer(signed, dtype=torch.uint8)):
                self._control.broadcast(part).wait()
        except RuntimeError as error:
            self._raise_cause(error)

    def _receive(self) -> bytes:
        self._message += 1
        try:
            size = torch.zeros(1, dtype=torch.int64)
            self._control.broadcast(size).wait()
            signed = torch.empty(int(size), dtype=torch.uint8)
            self._control.broadcast(signed).wait()
        except RuntimeError as error:
            self._raise_cause(error)
        return self._verified(0, signed)

    # Pickled values go over the network, so each carries a MAC, verified before unpickling.
    def _with_mac(self, rank: int, message: bytes) -> bytearray:
        self._message += 1
        # The counter and the rank are part of the MAC, so a message cannot be replayed.
        return bytearray(self._sealed.mac(f"{self._message} by {rank}", message) + message)

    def _verified(self, rank: int, signed: torch.Tensor) -> bytes:
        mac, message = bytes(signed[:MAC_BYTES].numpy()), bytes(signed[MAC_BYTES:].numpy())
        if not hmac.compare_digest(mac, self._sealed.mac(f"{self._message} by {rank}", message)):
            raise RankGone(f"a message of rank {rank} has a wrong MAC: another process sent it")
        return message

    def _reduced(self, tensor: torch.Tensor, how: Any, group: Any = None) -> torch.Tensor:
        try:
            dist.all_reduce(tensor, how, group)
        except RuntimeError as error:
            self._raise_cause(error)
        return tensor

    def _raise_cause(self, error: RuntimeError) -> NoReturn:
        # Connections close before the process ends, so the watch thread may need a moment.
        self.check(patience_s=SEEN_S)
        raise error

    # A process id is None for a rank on another node.
    def _watch(self, pids: dict[int, int | None]) -> None:
        """End this process if another rank has ended and this one does not leave."""
        running = {}
        for rank, pid in pids.items():
            try:
                # A pidfd becomes readable when the process ends, and never means a reused id.
                running[rank] = None if pid is None else os.pidfd_open(pid)
            except ProcessLookupError:
                self._lost = self._reason_of_end(rank, ended=True)
        poll = select.poll()
        here = {rank: descriptor for rank, descriptor in running.items() if descriptor is not None}
        for descriptor in here.values():
            poll.register(descriptor, select.POLLIN)
        while not self._lost and not self._leaving.is_set():
            ended = {descriptor for descriptor, _ in poll.poll(POLL_S * 1000)}
            self._forward_stop()
            each = running.items()
            reasons = [self._reason_of_end(rank, ended=pidfd in ended) for rank, pidfd in each]
            self._lost = next(filter(None, reasons), "")
        for descriptor in here.values():
            os.close(descriptor)
        if self._lost:
            # The main thread is leaving by itself; give it time for its cleanup.
            if self._leaving.wait(LEAVE_TIMEOUT_S) and self._closed.wait(LEAVING_S):
                return
            exits = f"error: {self._lost}. Rank {self.rank} cannot go on without it and exits"
            print(exits, file=sys.stderr, flush=True)
            # The main thread hangs in a collective, so no exception can reach it.
            os._exit(GONE_CODE)

    def _forward_stop(self) -> None:
        """Pass a stop on another node to rank 0, which alone ends the steps."""
        request = self._folder / "stop"
        if self.rank and self._stop.is_set():
            request.touch()
        elif not self.rank and request.exists():
            self._stop.set()

    def _reason_of_end(self, rank: int, *, ended: bool) -> str:
        # A reason is empty if the rank has left together with all others.
        path = self._folder / f"left.{rank}"
        try:
            # A network file system may cache that a name was missing, so list the folder first.
            reason = path.read_text() if ended or path in set(self._folder.iterdir()) else None
        except FileNotFoundError:
            reason = None
        if reason is None:
            # A missing folder means that the launcher has removed it at a normal end.
            if not ended or not self._folder.exists():
                return ""
            record_end(self._folder, rank, "its process is gone")
            return f"rank {rank} has ended"
        return f"rank {rank} has ended: {reason}" if reason else ""


class Dealt(World):
    """One rank of each set that shares rows: those with this rank's place in their set."""

    def __init__(self, all_ranks: Ranks, group: Any, context: int) -> None:
        super().__init__()
        self.rank, self.size = all_ranks.rank // context, all_ranks.size // context
        self._all, self._group = all_ranks, group
        self._own = slice(all_ranks.rank % context, None, context)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._all._reduced(tensor, dist.ReduceOp.SUM, self._group)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._all._reduced(tensor, dist.ReduceOp.MAX, self._group)

    def gather(self, value: T) -> list[T]:
        return self._all.gather(value)[self._own]


def _portable(error: BaseException) -> BaseException:
    # Some exceptions cannot be pickled, or not be built again from their arguments.
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        kind = TrainerError if isinstance(error, TrainerError) else RuntimeError
        return kind(str(error) if kind is TrainerError else f"{type(error).__name__}: {error}")
    return error
