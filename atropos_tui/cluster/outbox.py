"""Send side of a `frames.Connection` in an event loop: queue, heartbeats, tunnelled connections.

Heartbeats come from a thread: an event loop that waits for a disk sends nothing although the
process lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable

from atropos_tui.cluster.frames import Frame, head
from atropos_tui.supervisor.processes.logs import CHUNK

MOST_WAITING = 1024 * 1024
"""Queued bytes above which no more output is read."""
MOST_UNREAD = 8 * 1024 * 1024
"""Bytes that a program may leave unread before its connection is cut."""
HEARTBEAT = head("heartbeat")
_NUMBER = struct.Struct("<I")


class Outbox:
    """Queue of frames for a descriptor that it owns."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._fd = descriptor
        self.on_space: Callable[[], None] = lambda: None
        """Called when the queue accepts more after `is_full`."""
        self._waiting: deque[bytes] = deque()
        self._count = 0
        self._space = asyncio.Event()
        self._empty = asyncio.Event()
        self._space.set()
        self._empty.set()
        self._lock = threading.RLock()
        """Guards the queue between the event loop and the thread of `Heartbeats`."""
        self._loop = asyncio.get_running_loop()

    @property
    def is_full(self) -> bool:
        return self._count > MOST_WAITING

    def send(self, kind: str, payload: bytes = b"") -> None:
        self.write(head(kind, payload) + payload)

    def heartbeat(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._fd >= 0 and not self._waiting:
                os.write(self._fd, HEARTBEAT)  # so few bytes are written whole or not at all

    def write(self, data: bytes) -> None:
        with self._lock:
            if self._fd < 0:
                return
            self._waiting.append(data)
            self._count += len(data)
            # With more than one frame the writer callback is installed already.
            if len(self._waiting) == 1 and not self._flush():
                self._empty.clear()
                self._loop.add_writer(self._fd, self._flush)
            if self.is_full:
                self._space.clear()

    async def wait_for_space(self) -> None:
        """Wait until the queue is not full."""
        await self._space.wait()

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything is sent, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                self._loop.remove_writer(self._fd)
                os.close(self._fd)
                self._fd = -1
            self._waiting.clear()
        self._emptied()

    def _flush(self) -> bool:
        """Write as much as possible; True if nothing is left."""
        with self._lock:
            while self._waiting:
                try:
                    written = os.write(self._fd, self._waiting[0])
                except BlockingIOError:
                    return False
                except OSError:
                    self.close()
                    return True
                self._count -= written
                # A partly written frame keeps its place.
                if written < len(self._waiting[0]):
                    self._waiting[0] = self._waiting[0][written:]
                else:
                    self._waiting.popleft()
        self._emptied()
        return True

    def _emptied(self) -> None:
        self._count = 0
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
        self._empty.set()
        if not self._space.is_set():
            self._space.set()
            self.on_space()


class Heartbeats:
    def __init__(self, every_s: float, outboxes: Callable[[], Iterable[Outbox]]) -> None:
        self._every_s, self._outboxes = every_s, outboxes
        self._over = threading.Event()
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            # This thread runs even while the event loop is blocked.
            for outbox in self._outboxes():
                outbox.heartbeat()


class Channels:
    """Numbered connections tunnelled through a frame connection; the same class at both ends."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._half: set[int] = set()
        """Connections with one direction ended."""
        self._early: dict[int, list[Frame]] = {}
        """Frames for connections that are not established yet."""
        self._opened = 0

    async def open(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Ask the peer for a new connection, and `carry` its bytes."""
        self._opened += 1
        self._out.send("open", _NUMBER.pack(self._opened))
        await self.carry(self._opened, reader, writer)

    async def carry(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send the bytes of `reader` until its end; `take` writes the answers to `writer`."""
        self._writers[number] = writer
        for kind, payload in self._early.pop(number, ()):
            self.take(kind, payload)
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                # Backpressure: stop reading while the queue is full.
                await self._out.wait_for_space()
                self._out.send("data", _NUMBER.pack(number) + data)
        self._out.send("close", _NUMBER.pack(number))
        self._ended(number)

    def expect(self, number: int) -> None:
        self._early[number] = []

    def take(self, kind: str, payload: bytes) -> None:
        """Handle `data` or `close`; ignore a connection that is gone."""
        number = number_of(payload)
        if number in self._early:
            self._early[number].append((kind, payload))
            return
        writer = self._writers.get(number)
        if writer is None:
            return
        if kind == "data":
            writer.write(payload[_NUMBER.size :])
            # No backpressure here: one slow program must not stop the frames of the others.
            if writer.transport.get_write_buffer_size() > MOST_UNREAD:
                writer.transport.abort()
        else:
            with contextlib.suppress(OSError):
                writer.write_eof()
            self._ended(number)

    def refuse(self, number: int) -> None:
        """Report that a connection could not be established."""
        del self._early[number]
        self._out.send("close", _NUMBER.pack(number))

    def close(self) -> None:
        for writer in self._writers.values():
            writer.transport.abort()

    def _ended(self, number: int) -> None:
        # Both directions must end before the number is free.
        if number in self._half:
            self._half.discard(number)
            self._writers.pop(number).close()
        else:
            self._half.add(number)


def number_of(payload: bytes) -> int:
    return int(_NUMBER.unpack_from(payload)[0])
