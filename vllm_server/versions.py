"""Weight versions of completions, and the state that decides whether the server may generate.

Callers pass times in `time.monotonic()` seconds. On Linux all processes share that clock, so an
engine's token times and the server's version changes are comparable.
"""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atropos_common.protocol.bridge import VersionSpan
from atropos_common.system.files import write_private

logger = logging.getLogger(__name__)

Span = tuple[int, int]
"""Oldest and newest weight version that contributed tokens."""
Runs = list[tuple[int, int]]
"""(weight version, tokens), in the order of generation."""
TokensAt = dict[float, int]
"""Moment of a version change -> tokens of one request before it."""

MAX_LEASE_S = 24 * 3600.0


class SpanStore:
    """Bounded map from completion digest to span."""

    def __init__(self, path: Path | None = None, *, capacity: int = 200_000) -> None:
        # A restarted server reads its predecessor's completions from this file: one line each, with
        # digest and span. Each write goes to the kernel at once, so lines survive a killed server,
        # but not a power loss.
        self._path, self._capacity = path, capacity
        self._spans: OrderedDict[str, VersionSpan] = OrderedDict()
        self._lines = 0
        self._warned = False
        self._descriptor = -1
        if path is not None:
            for digest, span in _read_spans(path):
                self._note(digest, span)
            self._compact(path)

    def __len__(self) -> int:
        return len(self._spans)

    def remember(self, digest: str, span: VersionSpan) -> None:
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

    def look_up(self, digests: Sequence[str]) -> list[VersionSpan | None]:
        """Return the spans of `digests`; None: unknown or dropped."""
        found = []
        for digest in digests:
            span = self._spans.get(digest)
            if span is not None:
                self._spans.move_to_end(digest)
            found.append(span)
        return found

    def _note(self, digest: str, span: VersionSpan) -> None:
        self._spans[digest] = span
        self._spans.move_to_end(digest)
        if len(self._spans) > self._capacity:
            self._spans.popitem(last=False)

    # A full disk must not stop rollouts. It loses spans only at a restart.
    def _failed(self, error: OSError) -> None:
        if not self._warned:
            why = f"{self._path} cannot be written ({error})"
            logger.warning("%s: a restarted server will not know these weight versions", why)
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


def _span_line(digest: str, span: VersionSpan) -> str:
    return f"{digest} {' '.join(map(str, span))}\n"


# Torn and malformed lines are skipped, and a missing file counts as empty.
def _read_spans(path: Path) -> list[tuple[str, VersionSpan]]:
    try:
        lines = path.read_text(errors="replace").split("\n")[:-1]
    except OSError:
        return []
    spans = []
    for line in lines:
        with suppress(ValueError, IndexError):
            digest, oldest, newest, *mean = line.split()  # earlier releases wrote no mean
            known = (int(mean[0]), float(mean[1])) if mean else ()
            spans.append((digest, VersionSpan(int(oldest), int(newest), *known)))
    return spans


class VersionHistory:
    """The weight version at each moment; 0 before the first change."""

    def __init__(self, keep: int = 4096) -> None:
        self._keep = keep
        self._since: list[float] = [-math.inf]
        self._versions: list[int] = [0]
        self._followed: dict[str, TokensAt] = {}
        self.keeps_cache = False
        """Requests in flight keep the keys and values of older versions."""

    def change(self, version: int, moment: float, made: Mapping[str, int] | None = None) -> None:
        """Make `version` current from `moment` on; moments never decrease.

        Args:
            made: tokens that each unfinished request has so far.
        """
        assert moment >= self._since[-1], "version changes are recorded in order"
        self._since.append(moment)
        self._versions.append(version)
        for request_id, tokens in (made or {}).items():
            if (tokens_at := self._followed.get(request_id)) is not None:
                tokens_at[moment] = tokens
        if len(self._since) > self._keep:
            del self._since[0], self._versions[0]

    @property
    def current(self) -> int:
        return self._versions[-1]

    @contextmanager
    def follow(self, request_id: str) -> Iterator[TokensAt]:
        """Yield a map in which `change` records the request's tokens."""
        tokens_at = self._followed[request_id] = {}
        try:
            yield tokens_at
        finally:
            del self._followed[request_id]

    def span(self, first: float, last: float) -> Span:
        """Return the oldest and newest version from `first` to `last`, inclusive."""
        inside = self._versions[self._between(first, last)]
        return min(inside), max(inside)

    def runs(self, first: float, last: float, tokens: int, tokens_at: TokensAt) -> Runs:
        """Return how many of a completion's tokens each version made.

        A change that `tokens_at` lacks divides them in proportion to time.

        Args:
            first: time of the first token; `last` likewise.
            tokens: at least 1.
        """
        inside = self._between(first, last)
        ends = [
            tokens_at.get(moment, 1 + int((tokens - 1) * (moment - first) / (last - first)))
            for moment in self._since[inside][1:]
        ]
        runs: Runs = []
        done = 0
        for version, end in zip(self._versions[inside], [*ends, tokens], strict=True):
            if (more := min(end, tokens) - done) > 0:
                runs.append((version, more))
                done += more
        return runs

    def _between(self, first: float, last: float) -> slice:
        low = max(bisect_right(self._since, first) - 1, 0)
        return slice(low, max(bisect_right(self._since, last), low + 1))


def span_of(span: Span, runs: Runs) -> VersionSpan:
    """Add the mean of `runs` to `span`."""
    tokens = sum(count for _, count in runs)
    total = sum(version * count for version, count in runs)
    return VersionSpan(*span, tokens, total / max(tokens, 1))


# Result of an expired lease: resume, or stay paused and become unhealthy.
Expiry = Literal["resume", "fault"]


@dataclass
class BridgeState:
    held: bool = False
    weight_version: int | None = None
    paused: bool = False
    dirty: bool = False
    lease_until: float | None = None
    holder: str = ""
    """Holder of the pause; empty: any client may resume."""
    fault: str | None = None
    """Reason for the user why the server is unhealthy."""

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
        # Stays set until a resume: another pause does not complete half-written weights.
        self.dirty = self.dirty or dirty
        self.lease_until = now + lease_s
        self.fault = None

    def resume(self, weight_version: int) -> None:
        """Declare the weights complete: end pause, hold and fault."""
        self.weight_version = weight_version
        self.held = False
        self._release()

    def expire(self, now: float) -> Expiry | None:
        """At the end of the lease, end a clean pause, or turn a dirty one into a fault."""
        if not self.paused or self.lease_until is None or now < self.lease_until:
            return None
        if self.dirty:
            self.lease_until = None
            self.fault = (
                "the weights may be half-written: a write began, and no /bridge/resume declared it "
                "complete within the lease. fix: let the trainer publish again, or restart this "
                "server"
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
