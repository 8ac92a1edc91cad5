"""The lines that a component prints, searched for what rules look for, at a bounded cost.

`LogScanner.feed` keeps bytes and does nothing else, so that draining the pipe costs no more than before. Of what comes
between two looks it keeps the first `HEAD` and the last `REST` bytes and drops what is between, which only a flood of
more than 192 KB a second makes it do. `scan` finds each pattern by its anchor with `bytes.find`, over all bytes at
once, and looks at a line only where an anchor was found. Anchors whose rule has spoken are skipped after their first
hit, and at most `LINES` lines are looked at for a pattern in one look, so that a program that prints nothing but
telling lines costs no more.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from atropos_common.control import Role
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
"""Of what was printed last, for rules that look for a cause around their pattern."""
MUCH = 16 * 1024
"""With more bytes than this at hand the event loop is let through between two patterns: it has a flood to drain."""
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
"""Lines whose number tells why no batch comes; in a flood they are counted only as far as they are kept."""
NOTED: dict[Role, bytes] = {Role.ENGINE: b"[vllm_server] refused "}
"""Lines that are kept as they are, for rules about other components."""
NORMAL = 3
"""Optimizer steps, or groups of an environment that run-api accepted, which show that a component works again."""


@dataclass(frozen=True)
class Work:
    """Proof that a component works, for the end of what its log told."""

    healthy: bool = False
    steps: Sequence[float] | None = None
    """Times of its newest steps or groups, at most `NORMAL`, on the clock of `LogScanner.scan`; None for a component
    whose work is not counted."""

    def since(self, at: float, *, counted: bool) -> bool:
        """Whether it has worked normally since `at`; with `counted` health alone does not show that."""
        if not self.healthy or (counted and self.steps is None):
            return False
        return self.steps is None or (len(self.steps) == NORMAL and self.steps[0] > at)


UNKNOWN = Work()


@dataclass
class _Open:
    """A match that needs patience: since when, and the line."""

    since: float
    match: LogMatch


class LogScanner:
    """Finds patterns in what one attempt prints. `feed` and `take` belong to the event loop, the rest to one thread."""

    def __init__(self, spec: ComponentSpec, names: Names) -> None:
        self.spec = spec
        self.names = names
        self.counts: Counter[str] = Counter()
        self.errors = 0
        """How often it printed `ERROR`."""
        self.noted: list[str] = []
        """Newest lines with the role's needle in `NOTED`; whoever takes them clears the list."""
        self._head: list[bytes] = []
        self._room = HEAD
        self._rest = bytearray()
        self._carry = b""
        self._patterns = [
            (rule, pattern) for rule in LOG_RULES if rule.concerns(spec.role) for pattern in rule.patterns
        ]
        self._counted = COUNTED.get(spec.role, {})
        self._findings: dict[str, Finding] = {}
        """By rule, for each that has spoken in this attempt."""
        self._was_healthy = False
        self._open: dict[LogPattern, _Open] = {}
        self._settling: dict[str, tuple[LogRule, _Open]] = {}
        self._recent: bytearray | None = bytearray() if any(rule.settle_s for rule, _ in self._patterns) else None

    def feed(self, data: bytes) -> None:
        """Keep `data` for the next look, or its two ends."""
        if self._room > 0:
            self._head.append(data[: self._room])
            data = data[self._room :]
            self._room -= len(self._head[-1])
        if data:
            self._rest += data[-REST:]
            if len(self._rest) > 2 * REST:
                del self._rest[:-REST]

    def take(self) -> list[bytes]:
        """What was kept since the last call: one run of bytes, or two with a gap between."""
        if not self._head:
            return []
        head, rest = b"".join(self._head), bytes(self._rest[-REST:])
        whole = len(self._rest) <= REST
        self._head, self._room, self._rest = [], HEAD, bytearray()
        return [head + rest] if whole else [head, rest]

    def scan(
        self, pieces: list[bytes], now: float, starting: Collection[Role] = (), work: Work = UNKNOWN
    ) -> list[Diagnosis]:
        """Diagnoses, and ends of diagnoses, from `pieces` and from what was seen before.

        Args:
            now: seconds of any one clock.
            starting: roles of which a component is starting; who waits for them is right to wait.
            work: what is known of the component's health and work.
        """
        said: list[Diagnosis] = []
        for piece in pieces[:-1]:  # a gap follows, so nothing that comes completes its last line
            said += self._look(self._carry + piece, now)
            self._carry = b""
        if pieces:
            text = self._carry + pieces[-1]
            cut = text.rfind(b"\n") + 1
            if len(text) - cut > LONGEST_LINE:
                cut = len(text)
            said += self._look(text[:cut], now)
            self._carry = text[cut:]
        said += self._settled(now) + self._impatient(now, starting) + self._ended(now, work)
        self._was_healthy = work.healthy
        return said

    def close(self, now: float) -> list[Diagnosis]:
        """The attempt is over: its last line may lack its newline, and it waits for nothing any more."""
        text, self._carry = self._carry, b""
        said = self._look(text, now)
        self._open.clear()
        return said + self._settled(float("inf"))

    def _look(self, text: bytes, now: float) -> list[Diagnosis]:
        said: list[Diagnosis] = []
        if self._recent is not None:
            self._recent += text
            del self._recent[:-RECENT]
        for rule, pattern in self._patterns:
            if len(text) > MUCH:
                time.sleep(0)
            if pattern.patience_s > 0:
                said += self._wait(rule, pattern, text, now)
            elif (found := self._find(pattern, text, 0, self._most(rule))) is not None:
                if rule.settle_s:
                    self._settling.setdefault(rule.name, (rule, _Open(now, found)))
                else:
                    said += self._say(rule, found, now)
        self.errors += text.count(b"ERROR")
        for name, needle in self._counted.items():
            self.counts[name] += text.count(needle)
        if (wanted := NOTED.get(self.spec.role)) is not None:
            self.noted = [*self.noted, *_lines_with(text, wanted, 0, LINES)][-LINES:]
        return said

    def _wait(self, rule: LogRule, pattern: LogPattern, text: bytes, now: float) -> list[Diagnosis]:
        said: list[Diagnosis] = []
        cleared = max((text.rfind(end) for end in pattern.ends), default=-1)
        if cleared >= 0:
            self._open.pop(pattern, None)
            if (finding := self._findings.get(rule.name)) is not None:
                said = finding.closed(next(_lines_with(text, pattern.ending(text, cleared), cleared, 1)))
        if pattern not in self._open and (found := self._find(pattern, text, cleared + 1, LINES)) is not None:
            self._open[pattern] = _Open(now, found)
        return said

    def _ended(self, now: float, work: Work) -> list[Diagnosis]:
        """Ends of diagnoses whose lines came no more while the component came up, or has worked since."""
        said: list[Diagnosis] = []
        if not work.healthy:
            return said
        for rule in {rule.name: rule for rule, _ in self._patterns if rule.name in self._findings}.values():
            finding = self._findings[rule.name]
            if rule.ends is not Ends.WORK or finding.open is None:
                continue
            waits = any(pattern.ends for pattern in rule.patterns)
            quiet = finding.is_gone(now, WORK_S if rule.quiet_s is None else rule.quiet_s)
            if not self._was_healthy and now > finding.seen_at:
                said += finding.closed(f"{self.spec.name} became healthy")
            elif quiet and work.since(finding.seen_at, counted=waits):
                said += finding.closed(
                    f"{self.spec.name} works, and has not printed it for {now - finding.seen_at:.0f} s"
                )
        return said

    def _find(self, pattern: LogPattern, text: bytes, begin: int, most: int) -> LogMatch | None:
        """The first line of `text` from `begin` on that is such a pattern, of at most `most` that hold its anchor."""
        for line in _lines_with(text, pattern.needle, begin, most):
            if (match := pattern.match(line)) is not None:
                return LogMatch(self.spec, self.names, line, tuple(group or "" for group in match.groups()))
        return None

    def _most(self, rule: LogRule) -> int:
        finding = self._findings.get(rule.name)
        return 1 if finding is not None and finding.open is not None else LINES

    def _settled(self, now: float) -> list[Diagnosis]:
        """What is to be said of patterns after which the program has told all that it had to tell."""
        said: list[Diagnosis] = []
        for name, (rule, seen) in list(self._settling.items()):
            if now - seen.since >= rule.settle_s:
                del self._settling[name]
                around = tuple(bytes(self._recent or b"").decode(errors="replace").splitlines())
                said += self._say(rule, replace(seen.match, around=around), seen.since)
        return said

    def _impatient(self, now: float, starting: Collection[Role]) -> list[Diagnosis]:
        said: list[Diagnosis] = []
        for rule, pattern in self._patterns:
            waited = self._open.get(pattern)
            if waited is None:
                continue
            if any(role in starting for role in pattern.waits_for):
                waited.since = now
            elif now - waited.since >= pattern.patience_s:
                del self._open[pattern]
                said += self._say(rule, waited.match, now)
        return said

    def _say(self, rule: LogRule, found: LogMatch, now: float) -> list[Diagnosis]:
        if any(self._findings[name].open for name in rule.unless if name in self._findings):
            return []
        return self._findings.setdefault(rule.name, Finding()).raised(now, lambda: rule.explain(found))


def _lines_with(text: bytes, needle: bytes, begin: int, most: int) -> Iterator[str]:
    """At most `most` lines of `text` from `begin` on that hold `needle`. A carriage return ends a line, too."""
    position = text.find(needle, begin)
    while position >= 0 and most > 0:
        first, last = max(0, position - LONGEST_LINE // 2), position + LONGEST_LINE // 2
        start = max(text.rfind(b"\n", first, position), text.rfind(b"\r", first, position), first - 1) + 1
        ends = (text.find(b"\n", position, last), text.find(b"\r", position, last))
        end = min((end for end in ends if end >= 0), default=min(last, len(text)))
        yield plain(text[start:end])
        position = text.find(needle, end)
        most -= 1


@dataclass(frozen=True)
class Printed:
    """What the present attempt of a component printed since the last look."""

    scanner: LogScanner
    pieces: list[bytes]
    over: bool
    """It prints no more."""
    asked_to_go: bool
    """It was stopped or killed on purpose: what it cries out while it dies is no trouble."""
