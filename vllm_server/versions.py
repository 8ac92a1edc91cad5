"""Weight versions of completions, and the state that decides whether the server may generate.

Times are `time.monotonic()` seconds, passed in. On Linux all processes share that clock, so the
engine's token times and the server's version changes are comparable.
"""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atropos_common.system.files import write_private

logger = logging.getLogger(__name__)

Span = tuple[int, int]
"""Oldest and newest weight version that contributed tokens."""

MAX_LEASE_S = 24 * 3600.0


class SpanStore:
    """Bounded map from completion digest to span."""

    def __init__(self, path: Path | None = None, *, capacity: int = 200_000) -> None:
        # A restarted server knows its predecessor's completions from this file, one line each with
        # digest, oldest and newest version. Lines reach the kernel at once, so they survive a
        # killed server, but not a power loss.
        self._path, self._capacity = path, capacity
        self._spans: OrderedDict[str, Span] = OrderedDict()
        self._lines = 0
        self._warned = False
        self._descriptor = -1
        if path is not None:
            for digest, span in _read_spans(path):
                self._note(digest, span)
            self._compact(path)

    def __len__(self) -> int:
        return len(self._spans)

    def remember(self, digest: str, span: Span) -> None:
        """Record `span`; of two identical completions the later one wins."""
        self._note(digest, span)
        if self._path is None:
            return
        if self._lines >= 2 * self._capacity:
            self._compact(self._path)
            return
        try:
            os.write(self._descriptor, _span_line(digest, span).encode())
            self._lines += 1
        except OSError as error:
            self._failed(error)

    def look_up(self, digests: Sequence[str]) -> list[Span | None]:
        """Return the spans of `digests`; None for an unknown or dropped digest."""
        found = []
        for digest in digests:
            span = self._spans.get(digest)
            if span is not None:
                self._spans.move_to_end(digest)
            found.append(span)
        return found

    def _note(self, digest: str, span: Span) -> None:
        self._spans[digest] = span
        self._spans.move_to_end(digest)
        if len(self._spans) > self._capacity:
            self._spans.popitem(last=False)

    # A full disk must not stop rollouts: only a restart would lose spans.
    def _failed(self, error: OSError) -> None:
        if not self._warned:
            why = f"{self._path} cannot be written ({error})"
            logger.warning("%s: a restarted server will not know", why)
        self._warned = True

    def _compact(self, path: Path) -> None:
        self._lines = len(self._spans)
        lines = [_span_line(digest, span) for digest, span in self._spans.items()]
        try:
            write_private(path, "".join(lines))
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            self._failed(error)
            return
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor


def _span_line(digest: str, span: Span) -> str:
    return f"{digest} {span[0]} {span[1]}\n"


# Torn and malformed lines are skipped, and a missing file counts as empty.
def _read_spans(path: Path) -> list[tuple[str, Span]]:
    try:
        lines = path.read_text(errors="replace").split("\n")[:-1]
    except OSError:
        return []
    spans = []
    for line in lines:
        parts = line.split()
        if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
            spans.append((parts[0], (int(parts[1]), int(parts[2]))))
    return spans


class VersionHistory:
    """The weight version at each moment; 0 before the first change."""

    def __init__(self, keep: int = 4096) -> None:
        self._keep = keep
        self._since: list[float] = [-math.inf]
        self._versions: list[int] = [0]

    def change(self, version: int, moment: float) -> None:
        """Make `version` current from `moment` on; moments never decrease."""
        assert moment >= self._since[-1], "version changes are recorded in order"
        self._since.append(moment)
        self._versions.append(version)
        if len(self._since) > self._keep:
            del self._since[0], self._versions[0]

    @property
    def current(self) -> int:
        return self._versions[-1]

    def span(self, first: float, last: float) -> Span:
        """Return the oldest and newest version from `first` to `last`, included."""
        low = max(bisect_right(self._since, first) - 1, 0)
        high = max(bisect_right(self._since, last), low + 1)
        inside = self._versions[low:high]
        return min(inside), max(inside)


# Of a lease: resume, or stay paused and become unhealthy.
Expiry = Literal["resume", "fault"]


@dataclass
class BridgeState:
    """Hold, pause, dirty flag and lease of one server."""

    held: bool = False
    weight_version: int | None = None
    paused: bool = False
    dirty: bool = False
    lease_until: float | None = None
    holder: str = ""
    """Holder of the pause; empty: any client may resume."""
    fault: str | None = None
    """Reason why the server is unhealthy, for the user."""

    def pause(self, *, lease_s: float, dirty: bool, now: float, holder: str = "") -> None:
        """Start or renew a pause, or take over another holder's.

        Raises:
            ValueError: the lease is not a positive, finite number of seconds.
        """
        if not 0 < lease_s <= MAX_LEASE_S:
            limit = f"at most {MAX_LEASE_S:.0f} seconds"
            raise ValueError(f"lease_s must be above 0 and {limit}, not {lease_s}")
        self.paused = True
        self.holder = holder
        # Until a resume: another pause does not make half-written weights whole.
        self.dirty = self.dirty or dirty
        self.lease_until = now + lease_s
        self.fault = None

    def resume(self, weight_version: int) -> None:
        """Declare the weights complete: end pause, hold and fault."""
        self.weight_version = weight_version
        self.held = False
        self._release()

    def expire(self, now: float) -> Expiry | None:
        """Handle a possibly expired lease: a clean pause ends, a dirty one becomes a fault."""
        if not self.paused or self.lease_until is None or now < self.lease_until:
            return None
        if self.dirty:
            self.lease_until = None
            self.fault = (
                "a write to the weights began and was never declared complete (no /bridge/resume "
                "within the lease); they may be half-written. Let the trainer publish again, or "
                "restart this server."
            )
            return "fault"
        self._release()
        return "resume"

    def fail(self, fault: str) -> None:
        """Record a failed write; pause and dirty flag stay."""
        self.lease_until = None
        self.fault = fault

    def _release(self) -> None:
        self.paused = False
        self.holder = ""
        self.dirty = False
        self.lease_until = None
        self.fault = None
