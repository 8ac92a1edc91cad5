"""What is wrong, how we know, and the way out: rules over exits, log lines, telemetry and waiting.

Rules are data and small pure functions; `RULES` has them all. `watcher.Watcher` feeds them while the run goes,
`diagnose` explains an end. One name may speak over several things: over a log line, and over a number.
"""

from atropos_tui.diagnoses.exit_rules import EXIT_RULES, Evidence, describe_exit, diagnose
from atropos_tui.diagnoses.flow_rules import FLOW_RULES
from atropos_tui.diagnoses.log_rules import LOG_RULES, port_taken
from atropos_tui.diagnoses.metric_rules import ALERT, METRIC_RULES
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
"""What `DiagnosisRecord.rule` may hold; `docs/troubleshooting.md` has an entry for each name."""

__all__ = ["RULES", "Diagnosis", "Evidence", "Names", "describe_exit", "diagnose", "node_lost", "port_taken"]
