"""A run that has left no result.json: whether its supervisor is gone, and which of its components live on.

Asked of the process table, so that what the journal told last is not taken for the present.
"""

from __future__ import annotations

from atropos_common.control import ComponentStatus, Phase, RunStatus, State
from atropos_common.run_dir import RunDir
from atropos_tui.monitor.plain import counted
from atropos_tui.supervisor import tracker
from atropos_tui.supervisor.store import ProcessTable
from atropos_tui.supervisor.tracker import Leftover

GONE = "its supervisor is gone and left no result"


def supervisor_gone(run: RunDir) -> bool:
    """Whether a run has neither a result nor the supervisor that its journal names."""
    table = ProcessTable.load(run.journal_json)
    return not run.result_json.exists() and not (table and tracker.supervisor_alive(table))


def is_crashed(status: RunStatus) -> bool:
    """Whether `status` is that of a run which ended without a result."""
    return status.phase is Phase.ENDED and status.exit_code is None


def without_result(run: RunDir, status: RunStatus) -> RunStatus:
    """`status`, last heard of in the journal, set right by the process table."""
    table = ProcessTable.load(run.journal_json)
    if table and table.supervisor and tracker.supervisor_alive(table):
        pid = table.supervisor.pid
        reason = f"its supervisor (pid {pid}) does not answer"
        return status.model_copy(update={"phase": Phase.RUNNING, "supervisor_pid": pid, "reason": reason})
    run_id = table.run_id if table else status.run_id
    found = tracker.find_leftovers(run_id, table) if run_id else []
    mains = {name: entry.pid for name, entry in table.components.items()} if table else {}
    keepers = {entry.keeper_pid for entry in table.components.values()} if table else set()
    rows = [
        _present(row, mains.get(row.name), [one for one in found if one.component == row.name], keepers)
        for row in status.components
    ]
    reason = GONE
    if kept := [row.name for row in rows if any(one.adoptable and one.component == row.name for one in found)]:
        reason += f"; {', '.join(kept)} kept: atropos-tui up --resume {run.root} adopts them"
    elif found:
        reason += f"; {counted(len(found), 'process')} left: atropos-tui clean ends what its guard does not"
    return status.model_copy(update={"reason": reason, "components": rows})


def _present(row: ComponentStatus, main: int | None, found: list[Leftover], keepers: set[int]) -> ComponentStatus:
    pids = sorted(one.pid for one in found if one.pid not in keepers)
    if pids:
        kept = any(one.adoptable for one in found)
        reason = "kept for the next supervisor: up --resume" if kept else "left without a supervisor"
        living = {"pid": main if main in pids else pids[0], "pids": pids, "reason": reason}
        return row.model_copy(update=living if kept else living | {"state": State.UNHEALTHY})
    if row.state.is_resting:
        return row
    if found:  # its keeper alone
        reason = "ended without a supervisor: up --resume reads how"
    else:
        reason = "was never started" if row.started_at is None else "gone with the supervisor"
    return row.model_copy(update={"state": State.STOPPED, "reason": reason, "pid": None, "pids": []})
