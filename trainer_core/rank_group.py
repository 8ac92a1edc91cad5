"""Several ranks of one trainer: they meet, speak, add up, and see one another's end.

They meet in a folder that is this user's alone, so nobody else can take part: torchrun's own store, which listens on a
port, is not used. There they find a secret; values travel over the loopback, or from node to node, with a MAC made with
it, and are not unpickled without. Waiting for rank 0 has no limit, for a batch may take hours. That a rank has died is
seen at its process, and of one on another node in that folder, where those beside it leave word: a rank that then
stands in a collective which never ends is ended.
"""

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

from atropos_common.files import write_private
from atropos_common.group import MAC_BYTES, SECRET_BYTES, Gloo, SealedStore, first_line, prove
from atropos_common.node import interface_of
from atropos_common.parent_death import die_with_parent
from trainer_core.context_parallel import Context
from trainer_core.errors import RankGone, Stopped, TrainerError, UsageError
from trainer_core.ranks import (
    GONE_CODE,
    SEEN_S,
    first_rank,
    leave_word,
    meeting_place,
    node_address,
    on_several_nodes,
    own_rank,
    rank_count,
)
from trainer_core.world import ALONE, KNOWN, World, on_every_rank

T = TypeVar("T")

EVER_S = 365 * 86_400.0
"""The limit of waiting for rank 0, which waits for rollouts."""
LOOK_S = 0.5
"""Between two looks for words of a rank that has failed."""
GRACE_S = 3.0
"""So long a rank may take to leave by itself after another one has ended."""
LEAVING_S = 30.0
"""And so long for what it does on its way out, such as handing in what a tracker has not sent."""


def join(device: torch.device, timeout_s: float, stop: threading.Event | None = None) -> World:
    """The rank that torchrun has given this process, connected to all others; `ALONE` where it gave none.

    Args:
        device: what the ranks compute on; on GPUs each has one of its own, the current device from here on.
        timeout_s: of a collective of the model, from the first rank's coming to the last one's.
        stop: ends the waiting for rank 0, which may take long to come.

    Raises:
        UsageError: the ranks are on several nodes, and were not started by `trainer_core.launch`, or the folder where
            they would meet is another's.
        Stopped: while rank 0 was awaited.
        RankGone: one has ended, or did not come.
    """
    return ALONE if rank_count() == 1 else Ranks(device, timeout_s, stop or threading.Event())


class Ranks(World):
    """This rank among those that torchrun has started."""

    def __init__(self, device: torch.device, timeout_s: float, stop: threading.Event) -> None:
        super().__init__()
        self.rank, self.size = own_rank(), rank_count()
        if os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE")):
            raise UsageError("ranks on several nodes: start trainer_core.launch on each, with --nnodes and --node-rank")
        if not die_with_parent(os.getppid()):
            raise RankGone("torchrun has ended")
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        interface = interface_of(node_address())
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if on_several_nodes():  # else NCCL looks itself: engines of a broadcast may be on other machines
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        self._folder = meeting_place(os.getppid())
        self._lost = ""
        self._leaving, self._closed = threading.Event(), threading.Event()
        self._said = 0
        self._stop = stop
        self._dealt: World = self
        secret = self._meet(stop)
        try:
            self._connect(device, timedelta(seconds=timeout_s), secret)
        except RuntimeError as error:
            self._blame(error)

    def _meet(self, stop: threading.Event) -> bytes:
        """Wait for all ranks, and watch over them from there on; the secret that rank 0 has thought of."""
        if self.rank == 0:
            write_private(self._folder / "secret", secrets.token_hex(SECRET_BYTES))
        write_private(self._folder / f"pid.{self.rank}", f"{first_rank()} {os.getpid()}")
        pids = {rank: self._folder / f"pid.{rank}" for rank in range(self.size) if rank != self.rank}
        while not set(pids.values()) <= set(self._folder.iterdir()):
            if stop.wait(0.02):
                raise Stopped
        said = {rank: path.read_text().split() for rank, path in pids.items()}
        found = {rank: int(pid) if int(first) == first_rank() else None for rank, (first, pid) in said.items()}
        threading.Thread(target=self._watch, args=(found,), daemon=True).start()
        return bytes.fromhex((self._folder / "secret").read_text())

    def _connect(self, device: torch.device, limit: timedelta, secret: bytes) -> None:
        store = dist.FileStore(str(self._folder / "store"), self.size)
        store.set_timeout(limit)
        self._sealed = SealedStore(store, secret, limit)
        self._control = Gloo(self._sealed, self.rank, self.size, node_address(), EVER_S)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("model", store), rank=self.rank, world_size=self.size, timeout=limit,
        )  # fmt: skip
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
        for beside, several in (
            (True, [every[first : first + context] for first in every[::context]]),
            (False, [every[first::context] for first in range(context)]),
        ):
            for ranks in several:
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
                said = pickle.dumps((True, value), protocol=5)
            except Exception as error:
                done, value = False, error
                said = pickle.dumps((False, _portable(error)), protocol=5)
            self._send(said)
        if not done:
            self._raise(value)
        return cast(T, value)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def gather(self, value: T) -> list[T]:
        said = self._sealed_words(self.rank, pickle.dumps(value, protocol=5))
        try:
            sizes = [int(size) for size in self._control.gather(torch.tensor([len(said)]))]
            room = torch.zeros(max(sizes), dtype=torch.uint8)
            room[: len(said)] = torch.frombuffer(said, dtype=torch.uint8)
            found = self._control.gather(room)
        except RuntimeError as error:
            self._blame(error)
        parts = enumerate(zip(found, sizes, strict=True))
        return [pickle.loads(self._opened(rank, part[:size])) for rank, (part, size) in parts]

    def agree(self, error: BaseException | None) -> None:
        found = self.gather(None if error is None else _portable(error))
        errors = [(rank, each) for rank, each in enumerate(found) if each is not None]
        if not errors:
            return
        rank, first = errors[0]
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
        (self._folder / f"left.{self.rank}").write_text("" if known or error is None else first_line(error))
        self._leaving.set()
        self._closed.set()
        if known:
            try:
                self._control.gather(torch.zeros(1))
            except RuntimeError as gone:
                print(f"[WARNING] not every rank was there at the end: {gone}", file=sys.stderr)
        self._control.close()
        if dist.is_initialized() and known:
            dist.destroy_process_group()

    @staticmethod
    def _raise(error: BaseException) -> NoReturn:
        setattr(error, KNOWN, True)
        raise error

    def _send(self, said: bytes) -> None:
        words = self._sealed_words(0, said)
        try:
            for part in (torch.tensor([len(words)]), torch.frombuffer(words, dtype=torch.uint8)):
                self._control.broadcast(part).wait()
        except RuntimeError as error:
            self._blame(error)

    def _receive(self) -> bytes:
        self._said += 1
        try:
            size = torch.zeros(1, dtype=torch.int64)
            self._control.broadcast(size).wait()
            words = torch.empty(int(size), dtype=torch.uint8)
            self._control.broadcast(words).wait()
        except RuntimeError as error:
            self._blame(error)
        return self._opened(0, words)

    def _sealed_words(self, rank: int, said: bytes) -> bytearray:
        """The next words of all ranks, or of rank 0, with a MAC in front."""
        self._said += 1
        return bytearray(self._sealed.mac(f"{self._said} by {rank}", said) + said)

    def _opened(self, rank: int, words: torch.Tensor) -> bytes:
        mac, said = bytes(words[:MAC_BYTES].numpy()), bytes(words[MAC_BYTES:].numpy())
        if not hmac.compare_digest(mac, self._sealed.mac(f"{self._said} by {rank}", said)):
            raise RankGone(f"a stranger speaks in the place of rank {rank}")
        return said

    def _reduced(self, tensor: torch.Tensor, how: Any, group: Any = None) -> torch.Tensor:
        try:
            dist.all_reduce(tensor, how, group)
        except RuntimeError as error:
            self._blame(error)
        return tensor

    def _blame(self, error: RuntimeError) -> NoReturn:
        """Raise `RankGone` where the end of another rank explains `error`, else `error` itself."""
        self.check(patience_s=SEEN_S)
        raise error

    def _watch(self, pids: dict[int, int | None]) -> None:
        """See the end of another rank, and end this one where it does not do so by itself.

        Args:
            pids: by rank; null for one on another node.
        """
        running = {}
        for rank, pid in pids.items():
            try:
                running[rank] = None if pid is None else os.pidfd_open(pid)
            except ProcessLookupError:
                self._lost = self._last_words(rank, ended=True)
        look = select.poll()
        here = {rank: descriptor for rank, descriptor in running.items() if descriptor is not None}
        for descriptor in here.values():
            look.register(descriptor, select.POLLIN)
        while not self._lost and not self._leaving.is_set():
            ended = {descriptor for descriptor, _ in look.poll(LOOK_S * 1000)}
            self._hand_on_stop()
            words = [self._last_words(rank, ended=descriptor in ended) for rank, descriptor in running.items()]
            self._lost = next(filter(None, words), "")
        for descriptor in here.values():
            os.close(descriptor)
        if self._lost:
            if self._leaving.wait(GRACE_S) and self._closed.wait(LEAVING_S):
                return
            print(f"error: {self._lost}. Rank {self.rank} waits for it in vain and leaves", file=sys.stderr, flush=True)
            os._exit(GONE_CODE)

    def _hand_on_stop(self) -> None:
        """Rank 0 alone ends the steps; where another node was asked to end, it learns of it."""
        asked = self._folder / "stop"
        if self.rank and self._stop.is_set():
            asked.touch()
        elif not self.rank and asked.exists():
            self._stop.set()

    def _last_words(self, rank: int, *, ended: bool) -> str:
        """What another rank has ended with, in words; nothing where it runs, or has left together with all others."""
        path = self._folder / f"left.{rank}"
        try:
            # A folder is read anew on a network file system, and that a name was missing may be remembered there.
            said = path.read_text() if ended or path in set(self._folder.iterdir()) else None
        except FileNotFoundError:
            said = None
        if said is None:
            if not ended or not self._folder.exists():
                return ""
            leave_word(self._folder, rank, "its process is gone")
            return f"rank {rank} has ended"
        return f"rank {rank} has ended: {said}" if said else ""


class Dealt(World):
    """Of the ranks that share rows one each, with this one."""

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
    """`error`, or where it does not survive being sent, one of the nearest kind with the same words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        kind = TrainerError if isinstance(error, TrainerError) else RuntimeError
        return kind(str(error) if kind is TrainerError else f"{type(error).__name__}: {error}")
    return error
