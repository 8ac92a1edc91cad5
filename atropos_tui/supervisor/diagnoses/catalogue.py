"""Every rule by its stable name: what `DiagnosisRecord.rule` may hold, and where each comes from.

`docs/troubleshooting.md` has an entry for each; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from atropos_tui.supervisor.diagnoses.lines import LOG_RULES
from atropos_tui.supervisor.diagnoses.numbers import NUMBER_RULES

Kind = Literal["log line", "number", "waiting", "exit", "supervisor"]


@dataclass(frozen=True)
class Entry:
    """One rule. `kinds` says over what it watches; one name may speak over several."""

    rule: str
    title: str
    kinds: tuple[Kind, ...]


REFUSALS = {"rollouts_refused": "an engine refuses the requests of an environment"}
WAITING = {
    "no_batches": "no batches: the trainer stands still",
    "slow_start": "a component takes unusually long to start",
    "disk_low": "the run's disk is nearly full",
}
EXITS = {
    "missing_module": "a Python module is missing",
    "import_failed": "a Python import failed",
    "model_missing": "the model was not found",
    "bad_usage": "a component refused its arguments",
    "not_executable": "a command cannot be run",
    "killed": "killed by a signal",
    "python_error": "a component raised an exception",
    "exited": "a component exited",
}
SUPERVISOR = {
    "health_timeout": "vLLM did not become healthy in time",
    "not_ready": "a component did not become ready",
    "not_answering": "a component runs but does not answer",
    "port_in_use": "a port is in use",
    "cannot_start": "a component cannot be started as written",
    "log_unwritable": "the log cannot be written",
    "stale_file": "a stale file cannot be removed",
    "unkillable": "a process cannot be killed",
    "watcher_fault": "the diagnosing itself failed",
}
"""What the supervisor says of its own doing, with no rule in this package."""


def _all() -> dict[str, Entry]:
    sources: list[tuple[Kind, dict[str, str]]] = [
        ("log line", {rule.name: rule.title for rule in reversed(LOG_RULES)}),
        ("log line", REFUSALS),
        ("number", {rule.name: rule.title for rule in reversed(NUMBER_RULES)}),
        ("waiting", WAITING),
        ("exit", EXITS),
        ("supervisor", SUPERVISOR),
    ]
    found: dict[str, Entry] = {}
    for kind, rules in sources:
        for name, title in rules.items():
            known = found.get(name)
            found[name] = Entry(name, known.title if known else title, (*(known.kinds if known else ()), kind))
    return dict(sorted(found.items()))


CATALOGUE: dict[str, Entry] = _all()
