"""What is wrong, how we know, and the way out: rules over exits, log lines, telemetry and waiting.

Rules are data and small pure functions; `RULES` has them all. `watching` (beside this package) feeds them while the run
goes, `diagnose` explains an end. One name may speak over several things: over a log line, and over a number.
"""

from atropos_tui.supervisor.diagnoses.exits import EXIT_RULES, Evidence, describe_exit, diagnose
from atropos_tui.supervisor.diagnoses.lines import LOG_RULES
from atropos_tui.supervisor.diagnoses.machine import port_taken
from atropos_tui.supervisor.diagnoses.model import Diagnosis, Names, Rule
from atropos_tui.supervisor.diagnoses.numbers import NUMBER_RULES
from atropos_tui.supervisor.diagnoses.own import OWN_RULES
from atropos_tui.supervisor.diagnoses.refusals import REFUSED
from atropos_tui.supervisor.diagnoses.waiting import WAIT_RULES

RULES: tuple[Rule, ...] = (*LOG_RULES, REFUSED, *NUMBER_RULES, *WAIT_RULES, *EXIT_RULES, *OWN_RULES)
"""What `DiagnosisRecord.rule` may hold; `docs/troubleshooting.md` has an entry for each name."""

__all__ = ["RULES", "Diagnosis", "Evidence", "Names", "describe_exit", "diagnose", "port_taken"]
