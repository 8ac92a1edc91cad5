"""The record of weight versions on disk, so that a restarted server still knows what its predecessor generated.

One line a completion: digest, oldest and newest version. Appended as completions are made, read and compacted at start.
The lines reach the kernel at once, so they outlive a killed server, though not a killed machine.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from vllm_server.versions import Span, SpanStore

logger = logging.getLogger(__name__)


class SpanFile:
    """Keeps a `SpanStore` and its file alike."""

    def __init__(self, path: Path, store: SpanStore) -> None:
        self._path = path
        self._store = store
        self._lines = 0
        self._warned = False
        for digest, span in _read(path):
            store.remember(digest, span)
        self._descriptor = self._compact()

    def remember(self, digest: str, span: Span) -> None:
        """Record one completion in memory and on disk."""
        self._store.remember(digest, span)
        if self._lines >= 2 * self._store.capacity:
            os.close(self._descriptor)
            self._descriptor = self._compact()
        else:
            self._append(_line(digest, span))

    def _append(self, line: bytes) -> None:
        try:
            os.write(self._descriptor, line)
            self._lines += 1
        except OSError as error:
            # A full disk must not stop rollouts: memory still knows, only a restart would forget.
            if not self._warned:
                logger.warning("%s cannot be written (%s): a restarted server will not know", self._path, error)
            self._warned = True

    def _compact(self) -> int:
        """Rewrite the file with what the store holds; returns a descriptor that appends."""
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.write(descriptor, b"".join(_line(digest, span) for digest, span in self._store.items()))
        aside.replace(self._path)
        self._lines = len(self._store)
        return descriptor


def _line(digest: str, span: Span) -> bytes:
    return f"{digest} {span[0]} {span[1]}\n".encode()


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
