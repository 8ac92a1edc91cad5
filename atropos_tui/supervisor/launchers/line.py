"""What a supervisor and the parent of a component say to each other, over any two descriptors: a socket, pipes, an ssh.

A frame is `KIND LENGTH`, a newline, and LENGTH bytes. The end of the file means that the other side is gone. Which
kinds there are is for the two ends to say: `keeper.py`, `far_end.py`. Inside an event loop frames go out by an
`outbox.Outbox`. Imports only the standard library, and nothing of it that takes long.
"""

from __future__ import annotations

import os
import select
import socket
import struct

from atropos_tui.supervisor.logs import read_some

MOST_FRAME = 256 * 1024 * 1024
"""Bytes of a frame: no more is waited for, whoever is at the other end."""

Frame = tuple[str, bytes]


def head(kind: str, payload: bytes = b"") -> bytes:
    """What comes before the payload of a frame."""
    return f"{kind} {len(payload)}\n".encode()


def is_own_peer(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end of a Unix socket."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


class LineClosedError(OSError):
    """The other side is gone, or says nothing for too long."""


class Line:
    """Both directions. Owns its descriptors, which may be one.

    Args:
        patience_s: so long a reader may be busy, where the descriptors do not block; None: for ever.
        after: what comes before these bytes is not ours; they are told as a frame `began`.
    """

    def __init__(self, reading: int, writing: int, patience_s: float | None = None, after: bytes = b"") -> None:
        self.reading, self.writing, self._patience_s, self._after = reading, writing, patience_s, after
        self._data = bytearray()
        self._frames: list[Frame] = []

    def say(self, kind: str, payload: bytes = b"") -> None:
        """Send one frame; waits for a busy reader.

        Raises:
            OSError: nobody is there to read it.
        """
        parts = [memoryview(head(kind, payload)), memoryview(payload)]
        while parts:
            try:
                written = os.writev(self.writing, parts)
            except BlockingIOError:
                waiting = select.poll()
                waiting.register(self.writing, select.POLLOUT)
                if not waiting.poll(None if self._patience_s is None else self._patience_s * 1000):
                    raise LineClosedError(f"nothing was read for {self._patience_s:g} s") from None
                continue
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][written:]

    def read(self) -> list[Frame] | None:
        """The frames that are complete with what can be read now; None at the end, or if it is no line of ours."""
        data = read_some(self.reading)
        if data is None:
            return []
        self._data += data
        try:
            return self._complete() if data else None
        except ValueError:
            return None

    def hear(self, timeout_s: float | None = None) -> Frame:
        """The next frame; blocking.

        Raises:
            LineClosedError: there is none within `timeout_s`, or ever.
        """
        waiting = select.poll()
        waiting.register(self.reading, select.POLLIN)
        while not self._frames:
            if not waiting.poll(None if timeout_s is None else timeout_s * 1000):
                raise LineClosedError(f"no answer within {timeout_s:g} s")
            frames = self.read()
            if frames is None:
                raise LineClosedError("the other side has ended")
            self._frames += frames
        return self._frames.pop(0)

    def heard(self) -> list[Frame]:
        """Frames that came with the last one that `hear` gave."""
        frames, self._frames = self._frames, []
        return frames

    def close(self) -> None:
        for descriptor in {self.reading, self.writing} - {-1}:
            os.close(descriptor)
        self.reading = self.writing = -1

    def _complete(self) -> list[Frame]:
        frames = []
        if self._after:
            begin = self._data.find(self._after)
            if begin < 0:
                del self._data[: -len(self._after)]
                return []
            del self._data[: begin + len(self._after)]
            self._after = b""
            frames.append(("began", b""))
        while (end := self._data.find(b"\n")) >= 0:
            kind, _, length = bytes(self._data[:end]).partition(b" ")
            if not length.isdigit() or int(length[:20]) > MOST_FRAME:
                raise ValueError
            stop = end + 1 + int(length)
            if len(self._data) < stop:
                break
            frames.append((kind.decode(), bytes(self._data[end + 1 : stop])))
            del self._data[:stop]
        return frames
