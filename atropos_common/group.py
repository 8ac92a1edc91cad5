"""How both ends of a broadcast meet, wait and speak: the trainer's store, in which only the group's own words count,
gloo over it, and NCCL.

Whoever reaches the store's port may list, read, write and delete its keys. Every value therefore carries a MAC made
with the group's secret; one without is as if it were not there. So a stranger can keep a group from forming, or break
it, and no more: none of his values is believed, or read as anything but bytes.

NCCL is called by its C interface, the few calls that a broadcast takes. The ranks of a group find each other by an id
of 128 bytes. It holds an address and a random number that NCCL asks of every connection, so it is a secret: it goes
through the call that the token protects, and nowhere else.

A rank waits for as long as the trainer's rank 0 lives, and no longer than it may (`Lifeline`): every wait is a poll
with a deadline, during which the store of rank 0 is looked at. That says when the group is given up, and breaks off
when that process dies, so a peer that is gone is an error, never a hang. Needs torch, unlike the rest of this package;
and no vLLM.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from atropos_common.transfer import Chunk, TransferInit

SECRET_BYTES = 32
STORE_POLL_S = 0.001
POLL_S = 0.0002
BRISK_S = 0.05
"""After this long without an end, polls become rare."""
LOOK_S = 0.1
"""How often the trainer's store is looked at during a wait."""
MAC_BYTES = 32
NCCL_ID_BYTES = 128
ABORT_S = 5.0
"""An abort may itself wait for the device; longer than this it is left to its thread."""
NCCL_LIBRARIES = ("libnccl.so.2", "librccl.so.1")
"""By the name under which torch has loaded it; `VLLM_NCCL_SO_PATH` names another, for vLLM and for this."""

_UINT8 = 1


class SealedStore(dist.Store):  # type: ignore[misc]
    """A key-value store over another one, in which only values count that somebody with the secret has set."""

    def __init__(self, store: Any, secret: bytes, timeout: timedelta) -> None:
        super().__init__()
        self._store, self._secret, self._timeout = store, secret, timeout

    def mac(self, name: str, value: bytes = b"") -> bytes:
        """What nobody without the secret can say of `name` and `value`."""
        text = name.encode()
        return hmac.digest(self._secret, len(text).to_bytes(8, "big") + text + value, "sha256")

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, self.mac(key, value) + value)

    def get(self, key: str) -> bytes:
        """Waits for the key.

        Raises:
            RuntimeError: nobody of the group has set it within the timeout, or the store is gone.
        """
        (value,) = self._awaited([key], self._timeout)
        return value

    def check(self, keys: list[str]) -> bool:
        """Whether the group has set all of them."""
        return all(self._own(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._awaited(keys, timeout or self._timeout)

    def has_extended_api(self) -> bool:
        return False

    def _awaited(self, keys: list[str], limit: timedelta) -> list[bytes]:
        deadline = time.monotonic() + limit.total_seconds()
        while True:
            found = [value for key in keys if (value := self._own(key)) is not None]
            if len(found) == len(keys):
                return found
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody of the group said {', '.join(keys)} within {limit.total_seconds():.0f} s")
            time.sleep(STORE_POLL_S)

    def _own(self, key: str) -> bytes | None:
        if not self._store.check([key]):
            return None
        sealed = bytes(self._store.get(key))
        mac, value = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        return value if hmac.compare_digest(mac, self.mac(key, value)) else None


def own_address(towards: str) -> str:
    """The address of this machine by which those reach it who are at, or beside, `towards`: of the interface on the
    way there.

    Raises:
        RuntimeError: there is no way there.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(place)  # of a datagram socket: nothing is sent
            return str(way.getsockname()[0])
    except OSError as error:
        raise RuntimeError(f"no way from here to {towards} ({error.strerror or error})") from None


class Gloo:
    """One rank of a group over gloo, through CPU memory."""

    def __init__(self, store: SealedStore, rank: int, world_size: int, address: str, timeout_s: float) -> None:
        """Connect to every rank, and let each prove that it belongs to the group.

        Raises:
            RuntimeError: somebody does not come, or a stranger has come in somebody's place.
        """
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        self._parts: list[Any] = [store, dist.ProcessGroupGloo(store, rank, world_size, options)]
        try:
            prove(self._parts[1], store, rank, world_size)
        except RuntimeError:
            self.close()
            raise

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Any:
        """The work that fills `tensor`, or sends it from `root`; keep it until it is over."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._parts[1].broadcast([tensor], options)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, by rank; all have the same shape and type."""
        found = [torch.empty_like(tensor) for _ in range(self._parts[1].size())]
        self._parts[1].allgather([found], [tensor]).wait()
        return found

    def close(self, works: Sequence[Any] = ()) -> None:
        """Leave. The end of a group waits for what is under way, up to its timeout; nobody here does."""
        # Only the interpreter does: it aborts (SIGABRT) when it ends while a daemon thread is in there.
        parts, self._parts = [*works, *self._parts], []
        threading.Thread(target=parts.clear).start()


def prove(group: Any, store: SealedStore, rank: int, size: int) -> None:
    """gloo takes whoever connects to a rank's port with the number of a peer; only a peer can say its word.

    Raises:
        RuntimeError: a stranger has connected, or a peer has gone.
    """
    peers = [peer for peer in range(size) if peer != rank]
    said = {peer: _tensor(store.mac(f"{rank} to {peer}")) for peer in peers}
    heard = {peer: torch.zeros(MAC_BYTES, dtype=torch.uint8) for peer in peers}
    works = [group.send([said[peer]], peer, 0) for peer in peers]
    works += [group.recv([heard[peer]], peer, 0) for peer in peers]
    for work in works:
        work.wait()
    for peer in peers:
        if not hmac.compare_digest(bytes(heard[peer].tolist()), store.mac(f"{peer} to {rank}")):
            raise RuntimeError(f"a stranger has connected in the place of rank {peer}")


def cut(chunk: Chunk, buffer: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """`buffer`, uint8 of the chunk's bytes, by its pieces: each with the rank that sends it."""
    return [(buffer[piece.start - chunk.start : piece.end - chunk.start], piece.root) for piece in chunk.pieces]


class LinkError(RuntimeError):
    """The group did not form, or broke; the message says in which phase."""


class Lifeline:
    """Waits that end with the trainer."""

    def __init__(self, init: TransferInit, rank: int, gpu: str = "") -> None:
        """Find the trainer's store and report there.

        Args:
            gpu: the name of this rank's GPU, which no other rank may use; nothing on a CPU.

        Raises:
            LinkError: there is none.
        """
        self._where, self._timeout_s = f"{init.address}:{init.port}", init.timeout_s
        timeout = timedelta(seconds=init.timeout_s)
        try:
            store: Any = dist.TCPStore(init.address, init.port, None, False, timeout, wait_for_workers=False)
            self.store = SealedStore(dist.PrefixStore(init.key, store), init.secret, timeout)
            self.store.set(f"here/{rank}", gpu.encode())
        except RuntimeError as error:
            raise LinkError(
                f"no trainer at {self._where} (phase rendezvous: {first_line(error)}). Is it alive, and does "
                "MASTER_ADDR name an address of its machine that this one reaches?"
            ) from None
        self.until(lambda: self.store.check(["go"]), "rendezvous", "the others did not come")
        self._rank = rank

    def connecting(self) -> None:
        """Let the trainer know that this rank does its part now."""
        self.store.set(f"connecting/{self._rank}", b"1")

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


def gpu_of(device: torch.device) -> str:
    """A name that no other GPU has; nothing for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


LINE = 900
"""Characters: the end of our own errors is the way out."""


def first_line(error: BaseException) -> str:
    """Of what an error says, without the C++ stack below it of torch; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:LINE]


class NcclError(RuntimeError):
    """A call of NCCL failed, or there is no NCCL."""


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * NCCL_ID_BYTES)]


_COMMUNICATOR = ctypes.c_void_p
_CALLS = {
    "ncclGetUniqueId": [ctypes.POINTER(_Id)],
    "ncclCommInitRank": [ctypes.POINTER(_COMMUNICATOR), ctypes.c_int, _Id, ctypes.c_int],
    "ncclBroadcast": [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _COMMUNICATOR, ctypes.c_void_p,
    ],
    "ncclCommAbort": [_COMMUNICATOR],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
}  # fmt: skip


def unique_id() -> bytes:
    """A new group's id; this process is where its ranks will find each other.

    Raises:
        NcclError: NCCL does not load, or finds no network interface.
    """
    library, made = _library(), _Id()
    _check(library, library.ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


class Communicator:
    """One rank of a group, on the CUDA device that is current when it is made."""

    def __init__(self, group_id: bytes, world_size: int, rank: int) -> None:
        """Connect; returns when every rank has come.

        Raises:
            NcclError: no connection.
        """
        if len(group_id) != NCCL_ID_BYTES:
            raise NcclError(f"an id of NCCL has {NCCL_ID_BYTES} bytes, and this one {len(group_id)}")
        self._library = _library()
        self._handle: ctypes.c_void_p | None = _COMMUNICATOR()
        made = _Id.from_buffer_copy(group_id)
        _check(self._library, self._library.ncclCommInitRank(ctypes.byref(self._handle), world_size, made, rank))

    def broadcast(self, pieces: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Queue broadcasts on a CUDA stream, all in one launch.

        Args:
            pieces: address and bytes, and the rank that sends them from there; the others' are written there.

        Raises:
            NcclError: a peer is lost, or this rank has left.
        """
        if self._handle is None:
            raise NcclError("this rank has left its group")
        _check(self._library, self._library.ncclGroupStart())
        try:
            for address, size, root in pieces:
                queued = self._library.ncclBroadcast(address, address, size, _UINT8, root, self._handle, stream)
                _check(self._library, queued)
        finally:
            ended = self._library.ncclGroupEnd()
        _check(self._library, ended)

    def abort(self) -> None:
        """Leave at once: destroying would wait for peers that may be gone."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        thread = threading.Thread(target=self._library.ncclCommAbort, args=(handle,), daemon=True)
        thread.start()
        thread.join(ABORT_S)


class Nccl:
    """One rank of a group over NCCL, on `device`."""

    def __init__(self, group_id: bytes, rank: int, world_size: int, device: torch.device) -> None:
        """Connect, and move one byte: NCCL makes its connections when it first uses them.

        Raises:
            RuntimeError: no connection.
        """
        with torch.cuda.device(device):
            self._communicator = Communicator(group_id, world_size, rank)
            stream = torch.cuda.current_stream(device)
            try:
                self.broadcast([(torch.zeros(1, dtype=torch.uint8, device=device), 0)], stream)
                stream.synchronize()
            except RuntimeError:
                self.close()
                raise

    def broadcast(self, pieces: Sequence[tuple[torch.Tensor, int]], stream: Any) -> None:
        """Queue the broadcasts of contiguous tensors, each with the rank that sends it, on a CUDA stream."""
        self._communicator.broadcast(
            [(tensor.data_ptr(), tensor.nbytes, root) for tensor, root in pieces], stream.cuda_stream
        )

    def close(self) -> None:
        """Leave, whatever state the others are in."""
        self._communicator.abort()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def _library() -> ctypes.CDLL:
    named = os.environ.get("VLLM_NCCL_SO_PATH")
    for name in [named] if named else NCCL_LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        for call, arguments in _CALLS.items():
            getattr(library, call).argtypes = arguments
        library.ncclGetErrorString.restype = ctypes.c_char_p
        return library
    raise NcclError("the NCCL library does not load: see NCCL_DEBUG=INFO and VLLM_NCCL_SO_PATH")


def _check(library: ctypes.CDLL, result: int) -> None:
    if result:
        raise NcclError(f"NCCL: {library.ncclGetErrorString(result).decode(errors='replace')}")
