"""The way out of a `line.Line` inside an event loop: frames that wait for room, beats, and connections that go through.

Who hears nothing for long takes the other side for gone. Beats therefore come from a thread of their own (`Beats`): an
event loop that waits for a disk says nothing, and nobody is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable

from atropos_tui.supervisor.launchers.line import Frame, head
from atropos_tui.supervisor.logs import CHUNK

MOST_WAITING = 1024 * 1024
"""Bytes on their way out from which on nothing more is taken from the component."""
MOST_UNREAD = 8 * 1024 * 1024
"""A program that leaves so much of the supervisor's answer unread is cut off."""
BEAT = head("beat")
_NUMBER = struct.Struct("<I")


class Outbox:
    """Frames on their way out, inside the event loop, over a descriptor that it owns."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._fd = descriptor
        self.on_room: Callable[[], None] = lambda: None
        """Called when it takes more again, after `is_full`."""
        self._waiting: deque[bytes] = deque()
        self._count = 0
        self._room = asyncio.Event()
        self._empty = asyncio.Event()
        self._room.set()
        self._empty.set()
        self._lock = threading.RLock()
        """Between the event loop and a thread that beats."""
        self._loop = asyncio.get_running_loop()

    @property
    def is_full(self) -> bool:
        return self._count > MOST_WAITING

    def send(self, kind: str, payload: bytes = b"") -> None:
        """Send a frame; if nobody is there to read it, it is lost."""
        self.write(head(kind, payload) + payload)

    def beat(self) -> None:
        """Say `beat`, from any thread; while frames wait they say as much."""
        with self._lock, contextlib.suppress(OSError):
            if self._fd >= 0 and not self._waiting:
                os.write(self._fd, BEAT)  # so few bytes go whole or not at all

    def write(self, data: bytes) -> None:
        with self._lock:
            if self._fd < 0:
                return
            self._waiting.append(data)
            self._count += len(data)
            if len(self._waiting) == 1 and not self._flush():
                self._empty.clear()
                self._loop.add_writer(self._fd, self._flush)
            if self.is_full:
                self._room.clear()

    async def room(self) -> None:
        """Return when it is not full."""
        await self._room.wait()

    async def flush(self, timeout_s: float) -> None:
        """Return when all has been sent, or can be sent no more."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)

    def close(self) -> None:
        """Nothing more goes out: the other side sees the end."""
        with self._lock:
            if self._fd >= 0:
                self._loop.remove_writer(self._fd)
                os.close(self._fd)
                self._fd = -1
            self._waiting.clear()
        self._sent()

    def _flush(self) -> bool:
        """Write what goes; whether that was all."""
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
                if written < len(self._waiting[0]):
                    self._waiting[0] = self._waiting[0][written:]
                else:
                    self._waiting.popleft()
        self._sent()
        return True

    def _sent(self) -> None:
        self._count = 0
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
        self._empty.set()
        if not self._room.is_set():
            self._room.set()
            self.on_room()


class Beats:
    """A thread that says `beat` over some lines.

    Args:
        outboxes: those of them that are open by now; called in the thread.
    """

    def __init__(self, every_s: float, outboxes: Callable[[], Iterable[Outbox]]) -> None:
        self._every_s, self._outboxes = every_s, outboxes
        self._over = threading.Event()
        threading.Thread(target=self._run, name="beats", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            for outbox in self._outboxes():
                outbox.beat()


class Channels:
    """Connections that go through a line, each by its number; the same at both ends."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._half: set[int] = set()
        """One direction has ended."""
        self._early: dict[int, list[Frame]] = {}
        """What came for connections that are still being made."""
        self._opened = 0

    async def open(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let the other end connect somebody, and `carry` what passes."""
        self._opened += 1
        self._out.send("open", _NUMBER.pack(self._opened))
        await self.carry(self._opened, reader, writer)

    async def carry(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send on what `reader` gives, until its end; `take` gives `writer` what comes back."""
        self._writers[number] = writer
        for kind, payload in self._early.pop(number, ()):
            self.take(kind, payload)
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._out.room()
                self._out.send("data", _NUMBER.pack(number) + data)
        self._out.send("close", _NUMBER.pack(number))
        self._ended(number)

    def expect(self, number: int) -> None:
        """A connection is being made; what comes for it is kept until `carry`."""
        self._early[number] = []

    def take(self, kind: str, payload: bytes) -> None:
        """`data` or `close` of a connection; one that is gone needs neither."""
        number = number_of(payload)
        if number in self._early:
            self._early[number].append((kind, payload))
            return
        writer = self._writers.get(number)
        if writer is None:
            return
        if kind == "data":
            writer.write(payload[_NUMBER.size :])
            if writer.transport.get_write_buffer_size() > MOST_UNREAD:
                writer.transport.abort()
        else:
            with contextlib.suppress(OSError):
                writer.write_eof()
            self._ended(number)

    def refuse(self, number: int) -> None:
        """Nobody is there to be connected to."""
        del self._early[number]
        self._out.send("close", _NUMBER.pack(number))

    def close(self) -> None:
        """The line is going away."""
        for writer in self._writers.values():
            writer.transport.abort()

    def _ended(self, number: int) -> None:
        if number in self._half:
            self._half.discard(number)
            self._writers.pop(number).close()
        else:
            self._half.add(number)


def number_of(payload: bytes) -> int:
    """Which connection a frame is about."""
    return int(_NUMBER.unpack_from(payload)[0])
