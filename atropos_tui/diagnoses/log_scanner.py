"""Search the output of a component for the patterns of rules, at a bounded cost.

`feed` only stores bytes, so draining the pipe stays cheap. Above 192 KB/s the middle is dropped.
`scan` looks for each anchor with `bytes.find` and decodes a line only at a hit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from atropos_common.protocol.control import Role
from atropos_tui.diagnoses.log_rules import LOG_RULES
from atropos_tui.diagnoses.model import (
    LONGEST_LINE,
    WORK_S,
    Diagnosis,
    Ends,
    Finding,
    LogMatch,
    LogPattern,
    LogRule,
    Names,
    plain,
)
from atropos_tui.profile.spec import ComponentSpec

HEAD = 160 * 1024
REST = 32 * 1024
LINES = 20
RECENT = 64 * 1024
"""Newest output, in bytes, that rules may search for a cause."""
MUCH = 16 * 1024
"""Bytes above which a scan yields to the event loop between two patterns."""
COUNTED: dict[Role, dict[str, bytes]] = {
    Role.ENV: {
        "dropped groups": b"Scores are the same in a group, skipping",
        "timed-out rollouts": b"has timed out after",
        "stock registrations": b"Initialized env with id ",
        "refusals": b"/generate: 4",
        "stock refusals": b"ClientResponseError",
        "openai refusals": b"BadRequestError",
    },
    Role.API: {
        "disconnections": b'"POST /disconnect-env HTTP/1.1" 200',
        "groups": b'"POST /scored_data HTTP/1.1" 200',
    },
    Role.TRAINER: {
        "pauses": b"Training pauses until there is room",
    },
}
NOTED: dict[Role, bytes] = {Role.ENGINE: b"[vllm_server] refused "}
"""Lines that are kept whole, for rules about other components."""
NORMAL = 3
"""Steps, or accepted groups, that prove a component works again."""


@dataclass(frozen=True)
class Work:
    """Evidence that a component works."""

    healthy: bool = False
    steps: Sequence[float] | None = None
    """Times of its newest steps or groups; None if not counted."""

    def since(self, at: float, *, counted: bool) -> bool:
        """True if it has worked since `at`; with `counted`, health is not enough."""
        if not self.healthy or (counted and self.steps is None):
            return False
        return self.steps is None or (len(self.steps) == NORMAL and self.steps[0] > at)


UNKNOWN = Work()


@dataclass
class _Open:
    since: float
    match: LogMatch


class LogScanner:
    """Pattern search in one attempt's output. The event loop calls `feed` and `take`; one thread
    the rest."""

    def __init__(self, spec: ComponentSpec, names: Names) -> None:
        self.spec = spec
        self.names = names
        self.counts: Counter[str] = Counter()
        self.errors = 0
        """Lines with `ERROR`."""
        self.noted: list[str] = []
        """Newest lines with the role's needle in `NOTED`."""
        self._head: list[bytes] = []
        self._room = HEAD
        self._rest = bytearray()
        self._carry = b""
        self._patterns = [
            (rule, pattern)
            for rule in LOG_RULES
            if rule.concerns(spec.role)
            for pattern in rule.patterns
        ]
        self._counted = COUNTED.get(spec.role, {})
        self._findings: dict[str, Finding] = {}
        """Rule -> finding in this attempt."""
        self._was_healthy = False
        self._open: dict[LogPattern, _Open] = {}
        self._settling: dict[str, tuple[LogRule, _Open]] = {}
        self._recent: bytearray | None = (
            bytearray() if any(rule.settle_s for rule, _ in self._patterns) else None
        )

    def feed(self, data: bytes) -> None:
        if self._room > 0:
            self._head.append(data[: self._room])
            data = data[self._room :]
            self._room -= len(self._head[-1])
        if data:
            self._rest += data[-REST:]
            # Trim at twice the size, so that each byte is moved at most once.
            if len(self._rest) > 2 * REST:
                del self._rest[:-REST]

    def take(self) -> list[bytes]:
        """Return the bytes kept since the last call: one piece, or two with a gap."""
        if not self._head:
            return []
        head, rest = b"".join(self._head), bytes(self._rest[-REST:])
        whole = len(self._rest) <= REST
        self._head, self._room, self._rest = [], HEAD, bytearray()
        return [head + rest] if whole else [head, rest]

    def scan(
        self, pieces: list[bytes], now: float, away: Collection[Role] = (), work: Work = UNKNOWN
    ) -> list[Diagnosis]:
        """Return new diagnoses, and ends of diagnoses.

        Args:
            pieces: result of `take`.
            now: seconds of any one clock.
            away: roles that are starting or stopped; patience does not run for who waits for them.
        """
        results: list[Diagnosis] = []
        for piece in pieces[:-1]:  # a gap follows: the rest of its last line is lost
            results += self._look(self._carry + piece, now)
            self._carry = b""
        if pieces:
            text = self._carry + pieces[-1]
            cut = text.rfind(b"\n") + 1
            # Keep an unfinished line for the next scan, unless it is too long to be a log line.
            if len(text) - cut > LONGEST_LINE:
                cut = len(text)
            results += self._look(text[:cut], now)
            self._carry = text[cut:]
        results += self._settled(now) + self._out_of_patience(now, away) + self._ended(now, work)
        self._was_healthy = work.healthy
        return results

    def close(self, now: float) -> list[Diagnosis]:
        """Scan the rest at the end of the attempt."""
        text, self._carry = self._carry, b""
        results = self._look(text, now)
        self._open.clear()
        return results + self._settled(float("inf"))  # no more output: do not wait for `settle_s`

    def replaced(self, rule: str, why: str) -> list[Diagnosis]:
        """End the open diagnosis of `rule`, if there is one."""
        finding = self._findings.get(rule)
        return [] if finding is None else finding.closed(why)

    def _look(self, text: bytes, now: float) -> list[Diagnosis]:
        results: list[Diagnosis] = []
        if self._recent is not None:
            self._recent += text
            del self._recent[:-RECENT]
        for rule, pattern in self._patterns:
            if len(text) > MUCH:
                time.sleep(0)  # release the GIL
            if pattern.patience_s > 0:
                results += self._wait(rule, pattern, text, now)
            elif (found := self._find(pattern, text, 0, self._most(rule))) is not None:
                if rule.settle_s:
                    self._settling.setdefault(rule.name, (rule, _Open(now, found)))
                else:
                    results += self._report(rule, found, now)
        self.errors += text.count(b"ERROR")
        for name, needle in self._counted.items():
            self.counts[name] += text.count(needle)
        if (wanted := NOTED.get(self.spec.role)) is not None:
            self.noted = [*self.noted, *_lines_with(text, wanted, 0, LINES)][-LINES:]
        return results

    def _wait(self, rule: LogRule, pattern: LogPattern, text: bytes, now: float) -> list[Diagnosis]:
        results: list[Diagnosis] = []
        # Only lines after the last clearing text count.
        cleared = max((text.rfind(end) for end in pattern.ends), default=-1)
        if cleared >= 0:
            self._open.pop(pattern, None)
            if (finding := self._findings.get(rule.name)) is not None:
                results = finding.closed(
                    next(_lines_with(text, pattern.ending(text, cleared), cleared, 1))
                )
        if (
            pattern not in self._open
            and (found := self._find(pattern, text, cleared + 1, LINES)) is not None
        ):
            self._open[pattern] = _Open(now, found)
        return results

    def _ended(self, now: float, work: Work) -> list[Diagnosis]:
        results: list[Diagnosis] = []
        if not work.healthy:
            return results
        for rule in {
            rule.name: rule for rule, _ in self._patterns if rule.name in self._findings
        }.values():
            finding = self._findings[rule.name]
            if rule.ends is not Ends.WORK or finding.open is None:
                continue
            # A rule with clearing texts is about waiting: a healthy component may still wait, so
            # only counted work ends it.
            waits = any(pattern.ends for pattern in rule.patterns)
            quiet = finding.is_gone(now, WORK_S if rule.quiet_s is None else rule.quiet_s)
            if not self._was_healthy and now > finding.seen_at:
                results += finding.closed(f"{self.spec.name} became healthy")
            elif quiet and work.since(finding.seen_at, counted=waits):
                results += finding.closed(
                    f"{self.spec.name} works, and has not printed it for "
                    f"{now - finding.seen_at:.0f} s"
                )
        return results

    def _find(self, pattern: LogPattern, text: bytes, begin: int, most: int) -> LogMatch | None:
        """Return the first match after `begin`; read at most `most` lines with the anchor."""
        for line in _lines_with(text, pattern.needle, begin, most):
            if (match := pattern.match(line)) is not None:
                return LogMatch(
                    self.spec, self.names, line, tuple(group or "" for group in match.groups())
                )
        return None

    def _most(self, rule: LogRule) -> int:
        finding = self._findings.get(rule.name)
        return 1 if finding is not None and finding.open is not None else LINES

    def _settled(self, now: float) -> list[Diagnosis]:
        """Report matches whose `settle_s` has passed."""
        results: list[Diagnosis] = []
        for name, (rule, seen) in list(self._settling.items()):
            if now - seen.since >= rule.settle_s:
                del self._settling[name]
                around = tuple(bytes(self._recent or b"").decode(errors="replace").splitlines())
                results += self._report(rule, replace(seen.match, around=around), seen.since)
        return results

    def _out_of_patience(self, now: float, away: Collection[Role]) -> list[Diagnosis]:
        results: list[Diagnosis] = []
        for rule, pattern in self._patterns:
            waited = self._open.get(pattern)
            if waited is None:
                continue
            if any(role in away for role in pattern.waits_for):
                waited.since = now  # waiting for it is normal
            elif now - waited.since >= pattern.patience_s:
                del self._open[pattern]
                results += self._report(rule, waited.match, now)
        return results

    def _report(self, rule: LogRule, found: LogMatch, now: float) -> list[Diagnosis]:
        if any(self._findings[name].open for name in rule.unless if name in self._findings):
            return []
        return self._findings.setdefault(rule.name, Finding()).raised(
            now, lambda: rule.explain(found)
        )


def _lines_with(text: bytes, needle: bytes, begin: int, most: int) -> Iterator[str]:
    position = text.find(needle, begin)
    while position >= 0 and most > 0:
        # Bound the search for line ends: output may have no newline for megabytes.
        first, last = max(0, position - LONGEST_LINE // 2), position + LONGEST_LINE // 2
        start = (
            max(text.rfind(b"\n", first, position), text.rfind(b"\r", first, position), first - 1)
            + 1
        )
        ends = (text.find(b"\n", position, last), text.find(b"\r", position, last))
        end = min((end for end in ends if end >= 0), default=min(last, len(text)))
        yield plain(text[start:end])
        position = text.find(needle, end)
        most -= 1


@dataclass(frozen=True)
class Printed:
    scanner: LogScanner
    pieces: list[bytes]
    over: bool
    asked_to_go: bool
    """It was stopped on purpose, so its last errors are not reported."""
