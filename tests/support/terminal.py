"""A program on a pseudo terminal, and the cells that a terminal would show."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable

from rich.cells import cell_len

ALTERNATE_ON, ALTERNATE_OFF = b"\x1b[?1049h", b"\x1b[?1049l"
_PIECE = re.compile(
    r"\x1b\[([0-9;?<=>]*)[ -/]*([@-~])|\x1b[PX^_\]].*?(?:\x07|\x1b\\)|\x1b[^\[PX^_\]]|([^\x1b])",
    re.DOTALL,
)
"""A control sequence (parameters and letter), a control string, another escape, or one
character."""


class Cells:
    """The cells of a terminal: positioned text and erasing, which is all that Textual uses; styles
    are left out."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns = columns
        self._lines = [[" "] * columns for _ in range(rows)]
        self._x = self._y = 0

    def write(self, text: str) -> None:
        for piece in _PIECE.finditer(text):
            parameters, letter, character = piece.groups()
            if character is not None:
                self._put(character)
            elif letter in ("H", "f"):
                row, _, column = parameters.partition(";")
                self._x, self._y = int(column or 1) - 1, int(row or 1) - 1
            elif letter == "J":
                self._lines = [[" "] * self._columns for _ in self._lines]

    def _put(self, character: str) -> None:
        if character == "\n":
            self._y += 1
        elif character == "\r":
            self._x = 0
        elif (
            (width := cell_len(character))
            and self._y < len(self._lines)
            and self._x + width <= self._columns
        ):
            self._lines[self._y][self._x : self._x + width] = [character, *[""] * (width - 1)]
            self._x += width

    @property
    def text(self) -> str:
        """Every cell, line by line."""
        return "\n".join("".join(line) for line in self._lines)


class Terminal:
    """`command` on a terminal of `columns` x `rows`, in a session of its own. Read only while it is
    waited for."""

    def __init__(self, command: list[str], columns: int = 100, rows: int = 30) -> None:
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env=os.environ
            | {"COLUMNS": str(columns), "LINES": str(rows), "TERM": "xterm-256color"},
        )
        os.close(inner)
        self.cells = Cells(columns, rows)
        self.seen = b""
        """All that was written, or what came since a test emptied it."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._torn = ""

    def read(self, wait_s: float = 0.1) -> bool:
        """Take in what is written within `wait_s`; False once nobody can write any more."""
        if not select.select([self._fd], [], [], wait_s)[0]:
            return True
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:
            return False
        self.seen += data
        self._draw(data)
        return bool(data)

    def _draw(self, data: bytes) -> None:
        """Give the cells what is whole: a read may end amid a character or a sequence."""
        text = self._torn + self._decoder.decode(data)
        last = text.rfind("\x1b")
        end = len(text) if last < 0 or _PIECE.match(text, last) else last
        self.cells.write(text[:end])
        self._torn = text[end:]

    def until(self, true: Callable[[bytes], object], timeout_s: float = 20.0) -> None:
        """Wait until what was written makes it true."""
        self._wait(lambda: true(self.seen), timeout_s)

    def shows(self, true: Callable[[str], object], timeout_s: float = 20.0) -> float:
        """Wait until what is on the screen makes it true; the Unix time at which it was."""
        self._wait(lambda: true(self.cells.text), timeout_s)
        return time.time()

    def _wait(self, true: Callable[[], object], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        open_ = True
        while not true():
            assert open_ and time.monotonic() < deadline, (
                f"it never was; the screen:\n{self.cells.text}"
            )
            open_ = self.read()

    def ends(self, timeout_s: float = 20.0) -> int:
        """Read on until the program has left the terminal and ended; its exit code.

        The terminal closes a moment before the process can be reaped, so neither stands for the
        other.
        """
        deadline = time.monotonic() + timeout_s
        while self.read():
            assert time.monotonic() < deadline, f"it went on; the screen:\n{self.cells.text}"
        return self.process.wait(max(1.0, deadline - time.monotonic()))

    def type(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def vanish(self) -> None:
        """Close the other side. The program gets no signal, because it does not own this
        terminal."""
        os.close(self._fd)
        self._fd = -1

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(5)
        if self._fd >= 0:
            os.close(self._fd)
