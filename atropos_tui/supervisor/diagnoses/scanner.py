"""Reads what one attempt of a component prints, once a second, at a bounded cost, and finds telling lines.

`feed` keeps bytes and does nothing else, so that draining the pipe costs no more than before: of what comes between two
looks it keeps the first `HEAD` and the last `REST` bytes and drops what is between, which only a flood of more than
192 KB a second makes it do. `scan` finds each sign by its anchor with `bytes.find`, over all bytes at
once, and looks at a line only where an anchor was found.

Anchors whose rule has spoken are skipped after their first hit, and at most `LINES` lines are looked at for a sign in
one look, so that a program that prints nothing but telling lines costs no more either.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from atropos_common.control import Role
from atropos_tui.profile.spec import ComponentSpec
from atropos_tui.supervisor.diagnoses.lines import LOG_RULES
from atropos_tui.supervisor.diagnoses.model import QUIET_S, Diagnosis, Names, Sighting, Voice
from atropos_tui.supervisor.diagnoses.signs import LONGEST_LINE, LogRule, Sign, plain

HEAD = 160 * 1024
REST = 32 * 1024
LINES = 20
RECENT = 64 * 1024
"""Of what was printed last, for rules that look for a cause around their sign."""
MUCH = 16 * 1024
"""With more bytes than this at hand the event loop is let through between two signs: it has a flood to drain."""

COUNTED: dict[Role, dict[str, bytes]] = {
    Role.ENV: {
        "dropped groups": b"Scores are the same in a group, skipping",
        "timed-out rollouts": b"has timed out after",
        "registrations": b"registered as environment ",
        "stock registrations": b"Initialized env with id ",
        "refusals": b"/generate: 4",
        "stock refusals": b"ClientResponseError",
        "openai refusals": b"BadRequestError",
    },
    Role.API: {"disconnections": b'"POST /disconnect-env HTTP/1.1" 200'},
}
"""Lines whose number tells why no batch comes; in a flood they are counted only as far as they are kept."""
NOTED: dict[Role, bytes] = {Role.ENGINE: b"[vllm_server] refused "}
"""Lines that are kept as they are, for rules about other components."""


@dataclass
class _Open:
    """A sighting that needs patience: since when, and the line."""

    since: float
    found: Sighting


class LogScanner:
    """Finds signs in the output of one attempt. `feed` and `take` belong to the event loop, the rest to one thread."""

    def __init__(self, spec: ComponentSpec, names: Names) -> None:
        self.spec = spec
        self.names = names
        self.counts: Counter[str] = Counter()
        self.noted: list[str] = []
        """Newest lines with the role's needle in `NOTED`; whoever takes them clears the list."""
        self._head: list[bytes] = []
        self._room = HEAD
        self._rest = bytearray()
        self._carry = b""
        self._signs = [
            (rule, sign) for rule in LOG_RULES if rule.live and rule.concerns(spec.role) for sign in rule.signs
        ]
        self._counted = COUNTED.get(spec.role, {})
        self._voices: dict[str, Voice] = {}
        self._open: dict[Sign, _Open] = {}
        self._settling: dict[str, tuple[LogRule, _Open]] = {}
        self._recent: bytearray | None = bytearray() if any(rule.settle_s for rule, _ in self._signs) else None

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

    def scan(self, pieces: list[bytes], now: float, starting: Collection[Role] = ()) -> list[Diagnosis]:
        """What is to be said about `pieces` and about what was seen before.

        Args:
            now: seconds of any one clock.
            starting: roles of which a component is starting; who waits for them is right to wait.
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
        return said + self._settled(now) + self._impatient(now, starting)

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
        for rule, sign in self._signs:
            if len(text) > MUCH:
                time.sleep(0)
            if sign.patience_s > 0:
                self._wait(rule, sign, text, now)
            elif (found := self._find(sign, text, 0, self._most(rule))) is not None:
                if rule.settle_s:
                    self._settling.setdefault(rule.name, (rule, _Open(now, found)))
                else:
                    said += self._say(rule, found, now)
        for name, needle in self._counted.items():
            self.counts[name] += text.count(needle)
        if (wanted := NOTED.get(self.spec.role)) is not None:
            self.noted = [*self.noted, *_lines_with(text, wanted, 0, LINES)][-LINES:]
        return said

    def _wait(self, rule: LogRule, sign: Sign, text: bytes, now: float) -> None:
        cleared = max((text.rfind(end) for end in sign.ends), default=-1)
        if cleared >= 0:
            self._open.pop(sign, None)
            if (voice := self._voices.get(rule.name)) is not None:
                voice.lowered()
        if sign not in self._open and (found := self._find(sign, text, cleared + 1, LINES)) is not None:
            self._open[sign] = _Open(now, found)

    def _find(self, sign: Sign, text: bytes, begin: int, most: int) -> Sighting | None:
        """The first line of `text` from `begin` on that is such a sign, of at most `most` that hold its anchor."""
        for line in _lines_with(text, sign.needle, begin, most):
            if (match := sign.match(line)) is not None:
                return Sighting(self.spec, self.names, line, tuple(group or "" for group in match.groups()))
        return None

    def _most(self, rule: LogRule) -> int:
        voice = self._voices.get(rule.name)
        return 1 if voice is not None and voice.active else LINES

    def _settled(self, now: float) -> list[Diagnosis]:
        """What is to be said of signs after which the program has told all that it had to tell."""
        said: list[Diagnosis] = []
        for name, (rule, seen) in list(self._settling.items()):
            if now - seen.since >= rule.settle_s:
                del self._settling[name]
                around = tuple(bytes(self._recent or b"").decode(errors="replace").splitlines())
                said += self._say(rule, replace(seen.found, around=around), seen.since)
        return said

    def _impatient(self, now: float, starting: Collection[Role]) -> list[Diagnosis]:
        said: list[Diagnosis] = []
        for rule, sign in self._signs:
            waited = self._open.get(sign)
            if waited is None:
                continue
            if any(role in starting for role in sign.waits_for):
                waited.since = now
            elif now - waited.since >= sign.patience_s:
                del self._open[sign]
                said += self._say(rule, waited.found, now)
        return said

    def _say(self, rule: LogRule, found: Sighting, now: float) -> list[Diagnosis]:
        if any(self._voices[name].active for name in rule.unless if name in self._voices):
            return []
        voice = self._voices.setdefault(rule.name, Voice())
        if voice.active and now - voice.seen_at > QUIET_S:
            voice.lowered()
        return [rule.explain(found, voice.episodes - 1)] if voice.raised(now) else []


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
