"""NCCL by its C interface: the few calls that a broadcast takes, alike at both ends. Torch-free, and without vLLM.

The ranks of a group find each other by an id of 128 bytes. It holds an address and a random number that NCCL asks of
every connection, so it is a secret: it goes through the call that the token protects, and nowhere else.
"""

from __future__ import annotations

import ctypes
import os
import threading

ID_BYTES = 128
ABORT_S = 5.0
"""An abort may itself wait for the device; longer than this it is left to its thread."""
LIBRARIES = ("libnccl.so.2", "librccl.so.1")
"""By the name under which torch has loaded it; `VLLM_NCCL_SO_PATH` names another, for vLLM and for this."""

_UINT8 = 1


class NcclError(RuntimeError):
    """A call of NCCL failed, or there is no NCCL."""


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * ID_BYTES)]


_COMMUNICATOR = ctypes.c_void_p
_CALLS = {
    "ncclGetUniqueId": [ctypes.POINTER(_Id)],
    "ncclCommInitRank": [ctypes.POINTER(_COMMUNICATOR), ctypes.c_int, _Id, ctypes.c_int],
    "ncclBroadcast": [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _COMMUNICATOR, ctypes.c_void_p,
    ],
    "ncclCommAbort": [_COMMUNICATOR],
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
        if len(group_id) != ID_BYTES:
            raise NcclError(f"an id of NCCL has {ID_BYTES} bytes, and this one {len(group_id)}")
        self._library = _library()
        self._handle: ctypes.c_void_p | None = _COMMUNICATOR()
        made = _Id.from_buffer_copy(group_id)
        _check(self._library, self._library.ncclCommInitRank(ctypes.byref(self._handle), world_size, made, rank))

    def broadcast(self, address: int, size: int, root: int, stream: int) -> None:
        """Queue the broadcast of `size` bytes on a CUDA stream: sent from `address` by `root`, written there by others.

        Raises:
            NcclError: a peer is lost, or this rank has left.
        """
        if self._handle is None:
            raise NcclError("this rank has left its group")
        queued = self._library.ncclBroadcast(address, address, size, _UINT8, root, self._handle, stream)
        _check(self._library, queued)

    def abort(self) -> None:
        """Leave at once: destroying would wait for peers that may be gone."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        thread = threading.Thread(target=self._library.ncclCommAbort, args=(handle,), daemon=True)
        thread.start()
        thread.join(ABORT_S)


def _library() -> ctypes.CDLL:
    named = os.environ.get("VLLM_NCCL_SO_PATH")
    for name in [named] if named else LIBRARIES:
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
