"""The record of weight versions on disk, so that a restarted server still knows what its predecessor generated.

One line a completion: digest, oldest and newest version. Appended as completions are made, read and compacted at start.
The lines reach the kernel at once, so they outlive a killed server, though not a killed machine.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from trainer_core.contracts.files import write_private
from vllm_server.versions import Span, SpanStore

logger = logging.getLogger(__name__)


class SpanFile:
    """Keeps a `SpanStore` and its file alike."""

    def __init__(self, path: Path, store: SpanStore) -> None:
        self._path = path
        self._store = store
        self._lines = 0
        self._warned = False
        self._descriptor = -1
        for digest, span in _read(path):
            store.remember(digest, span)
        self._compact()

    def remember(self, digest: str, span: Span) -> None:
        """Record one completion in memory and on disk."""
        self._store.remember(digest, span)
        if self._lines >= 2 * self._store.capacity:
            self._compact()
        else:
            self._append(_line(digest, span).encode())

    def _append(self, line: bytes) -> None:
        try:
            os.write(self._descriptor, line)
            self._lines += 1
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        """A full disk must not stop rollouts: memory still knows, only a restart would forget."""
        if not self._warned:
            logger.warning("%s cannot be written (%s): a restarted server will not know", self._path, error)
        self._warned = True

    def _compact(self) -> None:
        """Rewrite the file with what the store holds, and append there; where that fails, go on as before."""
        self._lines = len(self._store)
        try:
            write_private(self._path, "".join(_line(digest, span) for digest, span in self._store.items()))
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            self._failed(error)
            return
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor


def _line(digest: str, span: Span) -> str:
    return f"{digest} {span[0]} {span[1]}\n"


def _read(path: Path) -> list[tuple[str, Span]]:
    """Whole lines of `path`; a torn or foreign one is left out, and a missing file is an empty one."""
    try:
        lines = path.read_text(errors="replace").split("\n")[:-1]
    except OSError:
        return []
    found = []
    for line in lines:
        parts = line.split()
        if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
            found.append((parts[0], (int(parts[1]), int(parts[2]))))
    return found
