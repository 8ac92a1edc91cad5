"""Frame protocol between a supervisor and a node agent, over any two descriptors.

A frame is `KIND LENGTH`, a newline, and LENGTH bytes. `node_agent.py` defines the kinds. Imports
only quick parts of the standard library.
"""

from __future__ import annotations

import os
import select

from atropos_tui.supervisor.processes.logs import read_some

MOST_FRAME = 256 * 1024 * 1024
"""Largest frame in bytes."""

Frame = tuple[str, bytes]


def head(kind: str, payload: bytes = b"") -> bytes:
    return f"{kind} {len(payload)}\n".encode()


class ConnectionClosedError(OSError):
    """The peer has exited, or is silent for too long."""


class Connection:
    """Both directions of a connection; owns its descriptors.

    Args:
        patience_s: seconds that a reader may be busy; None: no limit.
        after: marker; everything up to it is skipped, and a frame `began` reports it.
    """

    def __init__(
        self, reading: int, writing: int, patience_s: float | None = None, after: bytes = b""
    ) -> None:
        self.reading, self.writing, self._patience_s, self._after = (
            reading,
            writing,
            patience_s,
            after,
        )
        self._data = bytearray()
        self._frames: list[Frame] = []

    def send(self, kind: str, payload: bytes = b"") -> None:
        """Send one frame; waits for a busy reader.

        Raises:
            OSError: the peer has exited, or reads nothing for `patience_s`.
        """
        parts = [memoryview(head(kind, payload)), memoryview(payload)]
        while parts:
            try:
                written = os.writev(self.writing, parts)
            except BlockingIOError:
                waiting = select.poll()
                waiting.register(self.writing, select.POLLOUT)
                if not waiting.poll(None if self._patience_s is None else self._patience_s * 1000):
                    raise ConnectionClosedError(
                        f"nothing was read for {self._patience_s:g} s"
                    ) from None
                continue
            # writev may write any part of the frame: drop what is written, and go on.
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][written:]

    def read(self) -> list[Frame] | None:
        """Frames completed by one read; None at the end, or after a protocol error."""
        data = read_some(self.reading)
        if data is None:
            return []
        self._data += data
        try:
            return self._complete() if data else None
        except ValueError:
            return None

    def receive(self, timeout_s: float | None = None) -> Frame:
        """Raises:
        ConnectionClosedError: no frame within `timeout_s`, or the peer has exited.
        """
        waiting = select.poll()
        waiting.register(self.reading, select.POLLIN)
        while not self._frames:
            if not waiting.poll(None if timeout_s is None else timeout_s * 1000):
                raise ConnectionClosedError(f"no answer within {timeout_s:g} s")
            frames = self.read()
            if frames is None:
                raise ConnectionClosedError("the peer has exited")
            self._frames += frames
        return self._frames.pop(0)

    def pending(self) -> list[Frame]:
        """Frames that arrived with the last frame of `receive`."""
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
            # Keep the last bytes: the marker may arrive in two reads.
            if begin < 0:
                del self._data[: -len(self._after)]
                return []
            del self._data[: begin + len(self._after)]
            self._after = b""
            frames.append(("began", b""))
        while (end := self._data.find(b"\n")) >= 0:
            kind, _, length = bytes(self._data[:end]).partition(b" ")
            # The length limits the memory that a broken peer can make this process use.
            if not length.isdigit() or int(length[:20]) > MOST_FRAME:
                raise ValueError
            stop = end + 1 + int(length)
            # The rest of the frame has not arrived yet.
            if len(self._data) < stop:
                break
            frames.append((kind.decode(), bytes(self._data[end + 1 : stop])))
            del self._data[:stop]
        return frames
