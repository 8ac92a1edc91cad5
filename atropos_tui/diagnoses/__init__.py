"""Diagnoses: title, evidence and fix of a problem, from exits, log lines, telemetry and stalls.

Rules are data and small pure functions. `watcher.Watcher` evaluates them while the run goes on;
`diagnose` explains why a component ended.
"""

from collections.abc import Iterable

from atropos_common.protocol.records import DiagnosisRecord, Severity
from atropos_tui.diagnoses.exit_rules import EXIT_RULES, Evidence, describe_exit, diagnose
from atropos_tui.diagnoses.flow_rules import FLOW_RULES
from atropos_tui.diagnoses.log_rules import LOG_RULES
from atropos_tui.diagnoses.machine_rules import port_taken
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
"""Every rule; each has a section in `docs/troubleshooting.md`."""
BY_NAME: dict[str, Rule] = {rule.name: rule for rule in reversed(RULES)}
"""First rule of each name; rules of one name share severity, layer and event."""
UNKNOWN = Rule("", "")
"""For a rule that this version does not know."""
SEVERITIES: tuple[Severity, ...] = ("alarm", "warning", "advice")
"""Gravest first."""


def rule_of(found: DiagnosisRecord) -> Rule:
    return BY_NAME.get(found.rule, UNKNOWN)


def gravest_first(found: Iterable[DiagnosisRecord]) -> list[DiagnosisRecord]:
    """Sort by severity, then layer (causes first), then newest first."""
    newest = sorted(found, key=lambda each: each.time, reverse=True)
    return sorted(newest, key=lambda each: (SEVERITIES.index(each.severity), rule_of(each).layer))


ALIGNMENT_RULES = frozenset(rule.name for rule in METRIC_RULES if rule.kinds == ALIGNMENTS)
"""Names of the rules that use alignment records only."""

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
]
