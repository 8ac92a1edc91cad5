"""Rendezvous, waiting and transport of a broadcast: authenticated store, gloo, NCCL. Needs torch,
no vLLM.

Any process that reaches the store's port can read and write its keys. Each value therefore carries
a MAC with the group's secret: others can break a group, but nothing that they write is used. NCCL's
ranks find each other by a secret id.

Every wait polls with a deadline, and watches the store of the trainer's rank 0 (`Lifeline`): a dead
peer is an error, never a hang.
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

from atropos_common.broadcast.transfer import Chunk, TransferInit

SECRET_BYTES = 32
# Seconds between polls: of the store, and of a condition (`Lifeline.until`).
STORE_POLL_S = 0.001
POLL_S = 0.0002
# Seconds of frequent polling; then polls are 20 times rarer.
BRISK_S = 0.05
# Seconds between checks of the trainer's store.
STORE_CHECK_S = 0.1
MAC_BYTES = 32
NCCL_ID_BYTES = 128
# An abort can itself wait for the device; then its thread is abandoned.
ABORT_S = 5.0
NCCL_LIBRARIES = ("libnccl.so.2", "librccl.so.1")
"""File names under which torch loads NCCL or RCCL."""

_UINT8 = 1


class SealedStore(dist.Store):  # type: ignore[misc]
    """Key-value store that ignores values without the group's MAC."""

    def __init__(self, store: Any, secret: bytes, timeout: timedelta) -> None:
        super().__init__()
        self._store, self._secret, self._timeout = store, secret, timeout

    def mac(self, name: str, value: bytes = b"") -> bytes:
        # The length goes first, so that no other split of name and value has the same MAC.
        text = name.encode()
        return hmac.digest(self._secret, len(text).to_bytes(8, "big") + text + value, "sha256")

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, self.mac(key, value) + value)

    def get(self, key: str) -> bytes:
        """Wait for the key.

        Raises:
            RuntimeError: timeout, or the store is gone.
        """
        (value,) = self._awaited([key], self._timeout)
        return value

    def check(self, keys: list[str]) -> bool:
        return all(self._own(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._awaited(keys, timeout or self._timeout)

    # Otherwise torch uses calls that would bypass the MAC.
    def has_extended_api(self) -> bool:
        return False

    def _awaited(self, keys: list[str], limit: timedelta) -> list[bytes]:
        deadline = time.monotonic() + limit.total_seconds()
        while True:
            found = [value for key in keys if (value := self._own(key)) is not None]
            if len(found) == len(keys):
                return found
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"no member of the group set {', '.join(keys)} within "
                    f"{limit.total_seconds():.0f} s"
                )
            time.sleep(STORE_POLL_S)

    def _own(self, key: str) -> bytes | None:
        if not self._store.check([key]):
            return None
        # `check` first: `get` of a missing key would block in C++ for the whole timeout.
        sealed = bytes(self._store.get(key))
        mac, value = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        return value if hmac.compare_digest(mac, self.mac(key, value)) else None


def own_address(towards: str) -> str:
    """Address of this machine on the route to `towards`.

    Raises:
        RuntimeError: no route.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # datagram socket: this sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RuntimeError(f"no route from here to {towards} ({error.strerror or error})") from None


class Gloo:
    """One rank over gloo, through CPU memory."""

    def __init__(
        self, store: SealedStore, rank: int, world_size: int, address: str, timeout_s: float
    ) -> None:
        """Connect and verify every rank.

        Raises:
            RuntimeError: a rank did not connect, or another process did.
        """
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        # Without a device gloo resolves this machine's host name, which may be a loopback address.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        self._parts: list[Any] = [store, dist.ProcessGroupGloo(store, rank, world_size, options)]
        try:
            prove(self._parts[1], store, rank, world_size)
        except RuntimeError:
            self.close()
            raise

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Any:
        """Start a broadcast; keep the returned work until it is done."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._parts[1].broadcast([tensor], options)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, by rank; all have one shape and dtype."""
        found = [torch.empty_like(tensor) for _ in range(self._parts[1].size())]
        self._parts[1].allgather([found], [tensor]).wait()
        return found

    def close(self, works: Sequence[Any] = ()) -> None:
        """Leave without waiting for work in flight."""
        # The objects are destroyed in the thread. A daemon thread is wrong here: the interpreter
        # aborts (SIGABRT) if it ends while one is inside C++.
        parts, self._parts = [*works, *self._parts], []
        threading.Thread(target=parts.clear).start()


def prove(group: Any, store: SealedStore, rank: int, size: int) -> None:
    """Verify all peers: gloo accepts any process with a peer's number.

    Raises:
        RuntimeError: another process connected, or a peer is gone.
    """
    peers = [peer for peer in range(size) if peer != rank]
    sent = {peer: _tensor(store.mac(f"{rank} to {peer}")) for peer in peers}
    received = {peer: torch.zeros(MAC_BYTES, dtype=torch.uint8) for peer in peers}
    # Send and receive all at once: in sequence two ranks could wait for each other.
    works = [group.send([sent[peer]], peer, 0) for peer in peers]
    works += [group.recv([received[peer]], peer, 0) for peer in peers]
    for work in works:
        work.wait()
    for peer in peers:
        if not hmac.compare_digest(bytes(received[peer].tolist()), store.mac(f"{peer} to {rank}")):
            raise RuntimeError(f"another process has connected in the place of rank {peer}")


def cut(chunk: Chunk, buffer: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """Pieces of `buffer` (uint8), each with its sending rank."""
    return [
        (buffer[piece.start - chunk.start : piece.end - chunk.start], piece.root)
        for piece in chunk.pieces
    ]


class LinkError(RuntimeError):
    """The group failed; the message names the phase."""


class Lifeline:
    def __init__(self, init: TransferInit, rank: int, gpu: str = "") -> None:
        """Report to the trainer's store. `gpu`: UUID of this rank's GPU; empty on a CPU.

        Raises:
            LinkError: no store.
        """
        self._where, self._timeout_s = f"{init.address}:{init.port}", init.timeout_s
        timeout = timedelta(seconds=init.timeout_s)
        try:
            store: Any = dist.TCPStore(
                init.address, init.port, None, False, timeout, wait_for_workers=False
            )
            self.store = SealedStore(dist.PrefixStore(init.key, store), init.secret, timeout)
            self.store.set(f"here/{rank}", gpu.encode())
        except RuntimeError as error:
            raise LinkError(
                f"no trainer at {self._where} (phase rendezvous: {first_line(error)}). Is it "
                "alive, and does MASTER_ADDR name an address of its machine that this one reaches?"
            ) from None
        # The trainer sets `go` when every rank has reported.
        self.until(lambda: self.store.check(["go"]), "rendezvous", "the others did not come")
        self._rank = rank

    def connecting(self) -> None:
        self.store.set(f"connecting/{self._rank}", b"1")

    def until(self, done: Callable[[], bool], phase: str, otherwise: str) -> None:
        """Poll until `done`.

        Raises:
            LinkError: timeout (`otherwise`), or the trainer left.
        """
        began = looked = time.monotonic()
        while not self._ask(done, phase):
            now = time.monotonic()
            # The trainer sets `off` when it gives up, so that ranks do not wait for the whole
            # timeout.
            if now - looked > STORE_CHECK_S:
                looked = now
                if self._ask(lambda: self.store.check(["off"]), phase):
                    raise LinkError(f"the trainer gave this group up (phase {phase})")
            if now - began > self._timeout_s:
                raise LinkError(f"{otherwise} within {self._timeout_s:.0f} s (phase {phase})")
            time.sleep(POLL_S if now - began < BRISK_S else 20 * POLL_S)

    def _ask(self, question: Callable[[], bool], phase: str) -> bool:
        try:
            return question()
        except RuntimeError as error:
            raise self.died(phase, error) from None

    def died(self, phase: str, error: Exception) -> LinkError:
        return LinkError(f"the trainer at {self._where} died (phase {phase}: {first_line(error)})")


def gpu_of(device: torch.device) -> str:
    """UUID; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


MESSAGE_LENGTH = 900
"""Characters of an error message."""


def first_line(error: BaseException) -> str:
    """Return the message without torch's C++ stack, or the type of an error without a message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:MESSAGE_LENGTH]


class NcclError(RuntimeError):
    pass


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * NCCL_ID_BYTES)]


# Only the NCCL functions that a broadcast needs; their ABI is stable.
_COMMUNICATOR = ctypes.c_void_p
_CALLS = {
    "ncclGetUniqueId": [ctypes.POINTER(_Id)],
    "ncclCommInitRank": [ctypes.POINTER(_COMMUNICATOR), ctypes.c_int, _Id, ctypes.c_int],
    "ncclBroadcast": [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        _COMMUNICATOR,
        ctypes.c_void_p,
    ],
    "ncclCommAbort": [_COMMUNICATOR],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
}


def unique_id() -> bytes:
    """Id of a new group.

    Raises:
        NcclError: no library, or no network interface.
    """
    library, made = _library(), _Id()
    _check(library, library.ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


class Communicator:
    """One rank, on the current CUDA device."""

    def __init__(self, group_id: bytes, world_size: int, rank: int) -> None:
        """Connect all ranks.

        Raises:
            NcclError: no connection.
        """
        if len(group_id) != NCCL_ID_BYTES:
            raise NcclError(
                f"an id of NCCL has {NCCL_ID_BYTES} bytes, and this one {len(group_id)}"
            )
        self._library = _library()
        self._handle: ctypes.c_void_p | None = _COMMUNICATOR()
        made = _Id.from_buffer_copy(group_id)
        _check(
            self._library,
            self._library.ncclCommInitRank(ctypes.byref(self._handle), world_size, made, rank),
        )

    def broadcast(self, pieces: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Queue broadcasts on a CUDA stream in one launch.

        Args:
            pieces: address, bytes and sending rank of each.

        Raises:
            NcclError: a peer is lost, or this rank has left.
        """
        if self._handle is None:
            raise NcclError("this rank has left its group")
        # A group call launches all broadcasts in one kernel.
        _check(self._library, self._library.ncclGroupStart())
        try:
            for address, size, root in pieces:
                queued = self._library.ncclBroadcast(
                    address, address, size, _UINT8, root, self._handle, stream
                )
                _check(self._library, queued)
        finally:
            ended = self._library.ncclGroupEnd()
        _check(self._library, ended)

    def abort(self) -> None:
        # Destroying the communicator would wait for dead peers.
        handle, self._handle = self._handle, None
        if handle is None:
            return
        # A daemon thread: an abort that hangs in the driver must not keep the process alive.
        thread = threading.Thread(target=self._library.ncclCommAbort, args=(handle,), daemon=True)
        thread.start()
        thread.join(ABORT_S)


class Nccl:
    def __init__(self, group_id: bytes, rank: int, world_size: int, device: torch.device) -> None:
        """Connect, and move one byte: NCCL connects at its first use.

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
        """Queue contiguous tensors, each with its sending rank, on a CUDA stream."""
        self._communicator.broadcast(
            [(tensor.data_ptr(), tensor.nbytes, root) for tensor, root in pieces],
            stream.cuda_stream,
        )

    def close(self) -> None:
        self._communicator.abort()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def _library() -> ctypes.CDLL:
    # By default the library that torch has loaded: two NCCL versions in one process conflict.
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
