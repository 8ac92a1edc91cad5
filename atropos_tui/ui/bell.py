"""When the screen rings: what `[notify]` of the run's plan asks for, while somebody watches it happen."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError

from atropos_common.control import Phase, RunStatus
from atropos_common.records import Record
from atropos_common.run_dir import RunDir
from atropos_tui.monitor.run_info import read_json
from atropos_tui.profile.spec import NotifyPolicy
from atropos_tui.supervisor.notify import event_of_exit, is_mismatch

NEWS_S = 60.0
"""An older record is history: the screen was opened since, or a file is read again."""


class Bell:
    """Decides about ringing; what had happened before the screen was opened is no news."""

    def __init__(self, run: RunDir) -> None:
        try:
            self._policy = NotifyPolicy.model_validate(read_json(run.plan_json).get("notify") or {})
        except ValidationError:
            self._policy = NotifyPolicy()
        self._saw_it_run = False

    def at_records(self, records: Iterable[Record], now: float) -> bool:
        """Whether one of these records is to be rung for."""
        return self._wants("mismatch") and any(r.time > now - NEWS_S and is_mismatch(r) for r in records)

    def at_status(self, status: RunStatus | None) -> bool:
        """Whether the run has just ended in a way to be rung for."""
        if status is None:
            return False
        ended = status.phase is Phase.ENDED
        news, self._saw_it_run = self._saw_it_run and ended, not ended
        return news and self._wants(event_of_exit(status.exit_code))

    def _wants(self, event: str | None) -> bool:
        return self._policy.bell and event in self._policy.on
