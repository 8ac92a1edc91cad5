"""What is wrong, how we know, and the way out: rules over exits, log lines, telemetry and waiting.

Rules are data and small pure functions; `RULES` has them all. `watcher.Watcher` feeds them while the run goes,
`diagnose` explains an end. One name may speak over several things: over a log line, and over a number.
"""

from collections.abc import Iterable

from atropos_common.records import DiagnosisRecord, Severity
from atropos_tui.diagnoses.exit_rules import EXIT_RULES, Evidence, describe_exit, diagnose
from atropos_tui.diagnoses.flow_rules import FLOW_RULES
from atropos_tui.diagnoses.log_rules import LOG_RULES, port_taken
from atropos_tui.diagnoses.metric_rules import ALERT, ALIGNMENTS, METRIC_RULES
from atropos_tui.diagnoses.model import OWN_RULES, Diagnosis, Names, Rule
from atropos_tui.diagnoses.node_rules import NODE_LOST, node_lost
from atropos_tui.diagnoses.stall_rules import STALL_RULES

RULES: tuple[Rule, ...] = (
    *LOG_RULES,
    *METRIC_RULES,
    *STALL_RULES,
    *FLOW_RULES,
    *EXIT_RULES,
    *OWN_RULES,
    NODE_LOST,
    ALERT,
)
"""Every rule; `docs/troubleshooting.md` has an entry for each name."""
BY_NAME: dict[str, Rule] = {rule.name: rule for rule in reversed(RULES)}
"""Of rules that share a name the first: severity, layer and event are the same for all of them."""
UNKNOWN = Rule("", "")
"""Stands for a rule that this version does not know, or that an older one did not name."""
SEVERITIES: tuple[Severity, ...] = ("alarm", "warning", "advice")
"""Gravest first."""


def rule_of(found: DiagnosisRecord) -> Rule:
    """The rule of a record."""
    return BY_NAME.get(found.rule, UNKNOWN)


def severity_of(found: DiagnosisRecord) -> Severity:
    """The severity of a record; an older version's record has that of its rule."""
    return found.severity or rule_of(found).severity


def gravest_first(found: Iterable[DiagnosisRecord]) -> list[DiagnosisRecord]:
    """Records by severity, then by layer (causes before what follows from them), then the newest first."""
    newest = sorted(found, key=lambda each: each.time, reverse=True)
    return sorted(newest, key=lambda each: (SEVERITIES.index(severity_of(each)), rule_of(each).layer))


ALIGNMENT_RULES = frozenset(rule.name for rule in METRIC_RULES if rule.kinds == ALIGNMENTS)
"""Names of the rules about alignment alone."""

__all__ = [
    "ALIGNMENT_RULES",
    "RULES",
    "SEVERITIES",
    "Diagnosis",
    "Evidence",
    "Names",
    "describe_exit",
    "diagnose",
    "gravest_first",
    "node_lost",
    "port_taken",
    "rule_of",
    "severity_of",
]
