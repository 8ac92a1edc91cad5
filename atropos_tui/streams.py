"""Standard streams of a command that may be closed, not UTF-8, or on a full disk.

Call `prepare` first and `finish` last. On a full disk the command goes on: lost bytes are counted
and reported.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

# These keep their exit code when output is lost, because it reports the outcome of a run.
KEEPS_ITS_CODE = frozenset(
    {"up", "attach", "down", "start", "stop", "restart", "kill", "wait", "sweep", "compare"}
)
OUTPUT_LOST = 2


class Output(io.FileIO):
    """A file descriptor whose failed writes are dropped and counted."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.lost = 0  # bytes that were not written
        self.problem = ""
        self._unreported = 0

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        try:
            self._report_loss()
            written = super().write(view)
            while written is None:  # another process made the shared descriptor non-blocking
                select.select([], [self], [])
                written = super().write(view)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.problem = error.strerror or str(error)
            self.lost += len(view)
            self._unreported += len(view)
            return len(view)  # reported as written, so that the buffer above does not try again
        return written

    def _report_loss(self) -> None:
        if self._unreported:
            super().write(
                f"[atropos] {self._unreported} bytes of output are missing here: "
                f"{self.problem}\n".encode()
            )
            self._unreported = 0


_outputs: list[Output] = []


def prepare() -> None:
    """Open closed streams on `os.devnull`; make output and error never raise for bad text or a
    full disk."""
    # A closed descriptor 0 to 2 would be reused by the next file that opens, and `print` would
    # write into that file.
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != descriptor:
                os.dup2(nothing, descriptor)
                os.close(nothing)
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115
    _outputs[:] = [Output(1), Output(2)]
    sys.stdout = _stream(_outputs[0], sys.stdout, "replace")
    sys.stderr = _stream(_outputs[1], sys.stderr, "backslashreplace")


def _stream(raw: Output, before: TextIO | None, errors: str) -> TextIO:
    encoding = before.encoding if before else "utf-8"
    lines = raw.isatty() or raw.fileno() == 2
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=lines)


def finish(code: int, argv: Sequence[str]) -> int:
    """Flush, report lost bytes, and return the final exit code."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has left; without this, Python reports it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    output = _outputs[0]
    if not output.lost:
        return code
    with contextlib.suppress(OSError):
        print(
            f"atropos-tui: {output.lost} bytes of the output are lost: {output.problem}",
            file=sys.stderr,
        )
    return code or (0 if argv[:1] and argv[0] in KEEPS_ITS_CODE else OUTPUT_LOST)
