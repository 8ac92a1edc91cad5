"""What a supervisor and a keeper say to each other, over any two file descriptors: of a socket, two pipes, an ssh.

A frame is `KIND LENGTH`, a newline, and LENGTH bytes. To the keeper: `start` (a marshalled job) or `attach`, later
`finish`. From it: `kept` (its pid, the component's pid, start ticks and time), `notes`, `ready`; then `output` as it is
printed, `exit` with the code, `problem`. The end of the file means that the other side is gone. Imports nothing of
ours, since every keeper uses it.
"""

from __future__ import annotations

import os
import select

CHUNK = 256 * 1024

Frame = tuple[str, bytes]


class LineClosedError(OSError):
    """The other side is gone, or says nothing for too long."""


class Line:
    """Both directions. Owns its descriptors, which may be one.

    Args:
        patience_s: so long a reader may be busy, where the descriptors do not block; None: for ever.
    """

    def __init__(self, reading: int, writing: int, patience_s: float | None = None) -> None:
        self.reading, self.writing, self._patience_s = reading, writing, patience_s
        self._data = bytearray()
        self._frames: list[Frame] = []

    def say(self, kind: str, payload: bytes = b"") -> None:
        """Send one frame; waits for a busy reader.

        Raises:
            OSError: nobody is there to read it.
        """
        parts = [memoryview(f"{kind} {len(payload)}\n".encode()), memoryview(payload)]
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
        try:
            data = os.read(self.reading, CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
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
        while (end := self._data.find(b"\n")) >= 0:
            kind, _, length = bytes(self._data[:end]).partition(b" ")
            stop = end + 1 + int(length)
            if len(self._data) < stop:
                break
            frames.append((kind.decode(), bytes(self._data[end + 1 : stop])))
            del self._data[:stop]
        return frames
