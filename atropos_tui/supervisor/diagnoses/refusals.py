"""An engine refuses what environments ask of it: who is concerned, and the way out. Fed with the engine's own lines.

    refused 331 requests to /generate (400): top_p=0.95: changes ... Send top_p=1 [of 332 since 10:04:51]

`vllm_server/refusals.py` writes them: at the first refusal of a reason, soon after it, then less and less often.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atropos_common.control import Role, State
from atropos_tui.profile.spec import ComponentSpec, StackSpec
from atropos_tui.supervisor.diagnoses.model import Diagnosis, Rule, shortened
from atropos_tui.supervisor.diagnoses.waiting import Part

REFUSED = Rule("rollouts_refused", "an engine refuses the requests of an environment")
ENOUGH = 5
"""Refusals; fewer may be an accident."""
SHARE = 0.5
"""Of the requests since the first refusal: below it rollouts come."""
LASTS_S = 320.0
"""An engine that goes on refusing says so at least every 300 s."""
KEPT = 40
"""Lines of one reason."""
SAID = re.compile(r"(refused (\d+) requests? to (\S+) \((\d+)\): (.*) \[of (\d+) since [\d:]+\])$")
RUNS = (State.HEALTHY, State.UNHEALTHY)

FIXES = (
    (
        re.compile(r"\. ((?:Send|Leave out) .+?)(?:, or\b|$)"),
        "{env} asks for what cannot be trained on: {0}. That is in its program, or under [env.args] where it has such "
        "an option; then atropos-tui restart {env}",
    ),
    (
        re.compile(r"does not exist|is not served here"),
        "leave out openai.model_name under [env.args], it is derived; then atropos-tui restart {env}",
    ),
    (
        re.compile(r"maximum (?:model|context) length|max_model_len"),
        "raise [vllm] max_model_len, or shorten what {env} asks for: env.max_token_length under [env.args]",
    ),
    (
        re.compile(""),
        "change what {env} sends; atropos-tui logs {engine} --grep refused shows every reason; then atropos-tui "
        "restart {env}",
    ),
)
"""Words of a reason, and the way out; the first that fits."""


@dataclass(frozen=True)
class _Row:
    """One line of the engine."""

    at: float
    """When it was read, in Unix seconds."""
    text: str
    status: str
    reason: str
    count: int
    """Refusals for this reason."""
    seen: int
    """Requests since the first of them, those under way included."""


class RefusalWatch:
    """What each engine refuses, and which environment that stops."""

    def __init__(self, stack: StackSpec) -> None:
        self._asks = asked_engines(stack.components)
        self._attempts: dict[str, int] = {}
        self._rows: dict[str, dict[tuple[str, ...], list[_Row]]] = {}
        self._heard: Counter[tuple[str, int]] = Counter()

    def feed(self, engine: str, attempt: int, lines: Iterable[str], now: float) -> None:
        """What `engine` has said since the last call."""
        if self._attempts.get(engine) != attempt:
            self._attempts[engine], self._rows[engine] = attempt, {}
        for line in lines:
            if (said := SAID.search(line)) is None:
                continue
            text, count, path, status, reason, seen = said.groups()
            rows = self._rows[engine].setdefault((path, status, reason), [])
            if rows and rows[-1].count >= int(count):
                rows.clear()  # it was forgotten, and begins anew
            rows.append(_Row(now, text, status, reason, int(count), int(seen)))
            del rows[:-KEPT]

    def hear(self, env: str, attempt: int, count: int) -> None:
        """The log of `env` tells of `count` more refusals."""
        self._heard[env, attempt] += count

    def judge(self, parts: Sequence[Part], now: float) -> dict[str, Diagnosis]:
        """By environment: its engine refuses what it asks.

        Where several ask one engine, those are meant whose own log tells of refusals, and all where none does.
        """
        running = [part for part in parts if part.role is Role.ENV and part.state in RUNS]
        engines = {part.name for part in parts if part.role is Role.ENGINE and part.state in RUNS}
        found: dict[str, Diagnosis] = {}
        for env in running:
            engine = self._asks.get(env.name, "")
            beside = [part for part in running if self._asks.get(part.name) == engine]
            heard = self._heard[env.name, env.attempt]
            if engine not in engines or (not heard and any(self._heard[part.name, part.attempt] for part in beside)):
                continue
            worst = self._worst(engine, env.started_at, heard >= ENOUGH, now)
            if worst is not None:
                found[env.name] = _diagnosis(env.name, engine, worst)
        return found

    def _worst(self, engine: str, started_at: float, heard: bool, now: float) -> _Row | None:
        """The most frequent reason, if `engine` refuses most of what came since the environment was started."""
        standing = []
        for rows in self._rows.get(engine, {}).values():
            if now - rows[-1].at <= LASTS_S:
                standing.append((rows[-1], *_since(rows, started_at, heard)))
        refused, seen = sum(count for _, count, _ in standing), max((seen for *_, seen in standing), default=0)
        if refused < ENOUGH or refused < SHARE * seen:
            return None
        return max(standing, key=lambda row: row[1])[0]


def _since(rows: Sequence[_Row], started_at: float, heard: bool) -> tuple[int, int]:
    """Refused and seen requests that an environment started at `started_at` may have sent.

    What was refused before may be told only after that, so the first line then does not count, unless the environment
    itself has heard of refusals.
    """
    newest, after = rows[-1], [row for row in rows if row.at >= started_at]
    if heard or len(after) == len(rows):
        return newest.count, newest.seen
    return (newest.count - after[0].count, newest.seen - after[0].seen) if after else (0, 0)


def asked_engines(components: Iterable[ComponentSpec]) -> dict[str, str]:
    """The engine of each environment: the one whose port its command names, else the first."""
    components = list(components)
    engines = [spec for spec in components if spec.role is Role.ENGINE]
    return {
        spec.name: next(
            (each.name for each in engines if re.search(rf":{each.port}\b", " ".join(spec.command))), engines[0].name
        )
        for spec in components
        if spec.role is Role.ENV and engines
    }


def _diagnosis(env: str, engine: str, row: _Row) -> Diagnosis:
    said, fix = next((match, fix) for pattern, fix in FIXES if (match := pattern.search(row.reason)))
    words = [f"{group[0].lower()}{group[1:]}" for group in said.groups()]
    title = f"{engine} refuses the requests of {env} ({row.status})"
    return Diagnosis(title, shortened(row.text), fix.format(*words, env=env, engine=engine), REFUSED.name)
