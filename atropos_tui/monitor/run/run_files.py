"""Read the files of a run: description, status or result, and records as one feed.

Every file may be missing, cut or of another version: what cannot be read is left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any, TypeVar

from atropos_common.protocol.control import (
    ComponentStatus,
    Phase,
    Role,
    RunStatus,
    StageStatus,
    State,
)
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.record_tail import CHUNK_BYTES, RecordTail, kind_words, nth_from_end
from atropos_common.protocol.records import StateRecord
from atropos_common.system.files import read_regular
from atropos_common.system.run_dir import LATEST_TIME, RunDir
from atropos_tui.monitor.format import counted, one_line, real
from atropos_tui.monitor.run.series import MOST_STEPS
from atropos_tui.monitor.run.state import ROLLOUTS_KEPT, RunState
from atropos_tui.profile.load import parse_toml
from atropos_tui.supervisor.journal import tracker
from atropos_tui.supervisor.journal.liveness import left_by, run_elsewhere
from atropos_tui.supervisor.journal.store import ProcessTable
from atropos_tui.supervisor.journal.tracker import Leftover

GONE = "its supervisor is gone and left no result"
# As the trainer writes it; inside a text its quotation marks would be escaped.
_ROLLOUT, _ = kind_words("rollout")
# The end of a longer stream is shown while the rest is read.
LONG_BYTES = 4 * CHUNK_BYTES
# Newest neighbouring runs among which one of the same name is searched for.
NEIGHBOURS = 20
E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True)
class PlannedComponent:
    """A component in plan.json."""

    name: str
    role: Role
    port: int | None = None
    gpus: tuple[int, ...] = ()
    """NVML indices on its node."""
    node: str = ""
    command: tuple[str, ...] = ()
    depends_on: dict[str, str] = field(default_factory=dict)
    """Condition (started, healthy or completed) by component that it waits for."""
    start_timeout_s: float | None = None
    max_restarts: int | None = None
    window_s: float | None = None
    stages: dict[str, str] = field(default_factory=dict)
    """Usual reason why each stage is not reached."""


@dataclass(frozen=True)
class RunInfo:
    """Description of a run; what no file has is empty or None."""

    run_id: str = ""
    name: str = ""
    mode: str = ""
    model: str = ""
    training_steps: int | None = None
    components: list[PlannedComponent] = field(default_factory=list)
    other_trainer: str = ""
    """Program and first argument of a trainer that is not ours."""
    last_start_s: dict[str, float] = field(default_factory=dict)
    """Start times in the newest run of the same name (`last_starts`)."""

    @property
    def gpu_count(self) -> int:
        """Number of GPUs of all components; one that several share counts once."""
        return len({(part.node, gpu) for part in self.components for gpu in part.gpus})

    @property
    def short_model(self) -> str:
        """The model without the folders of a path."""
        return PurePath(self.model).name if self.model.startswith(("/", ".", "${")) else self.model


def read_info(run: RunDir) -> RunInfo:
    """Read run.json, plan.json and profile.toml."""
    meta, plan = read_json(run.run_json), read_json(run.plan_json)
    profile = read_toml(run.profile_toml)
    trainer = next((c for c in _dicts(plan.get("components")) if c.get("role") == Role.TRAINER), {})
    command = _list(trainer.get("command"))
    own = _dict(profile.get("trainer"))
    steps = flag(command, "--training-steps") or str(own.get("training_steps") or "")
    return RunInfo(
        run_id=_text(plan.get("run_id")) or _text(meta.get("run_id")),
        name=_text(plan.get("name")) or _text(profile.get("name")) or run.root.name,
        mode=_text(plan.get("mode")) or _text(profile.get("mode")) or _text(meta.get("mode")),
        model=flag(command, "--model-name") or _text(profile.get("model")),
        training_steps=_step_count(steps),
        other_trainer=" ".join(PurePath(_text(w)).name for w in _list(own.get("command"))[:2]),
        components=[_planned(c) for c in _dicts(plan.get("components")) if _text(c.get("name"))],
    )


def start_seconds(transitions: Iterable[StateRecord]) -> dict[str, float]:
    """Return the seconds of each component's newest completed start."""
    began: dict[str, float] = {}
    took: dict[str, float] = {}
    for move in transitions:
        name = move.component or ""
        if move.new == State.STARTING:
            began[name] = move.time
        elif move.old == State.STARTING and move.new == State.HEALTHY and name in began:
            took[name] = move.time - began[name]
    return took


def last_starts(run: RunDir, name: str) -> dict[str, float]:
    """Return `start_seconds` of the newest run of this name beside `run`."""
    # A folder's modification time is close to its run's start or end: good enough to order runs.
    for root in sorted(within(run.root.parent), key=changed_at, reverse=True)[:NEIGHBOURS]:
        other = RunDir(root)
        if root.name != run.root.name and read_json(other.plan_json).get("name") == name:
            records = RecordTail(other.supervisor_jsonl).read()
            moves = (record for record in records if isinstance(record, StateRecord))
            if took := start_seconds(moves):
                return took
    return {}


def changed_at(path: Path) -> int:
    """Return the modification time in nanoseconds; 0 without a file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def status_from_files(run: RunDir, info: RunInfo, state: RunState) -> RunStatus:
    """Build the status from the last recorded states, result.json, or else the process table."""
    result = read_json(run.result_json)
    started = moment(read_json(run.run_json).get("started_at"))
    code = exit_code(run)
    first = state.transitions[0].time if state.transitions else 0.0
    status = RunStatus(
        run_id=info.run_id,
        name=info.name,
        mode=info.mode,
        run_dir=str(run.root),
        phase=Phase.ENDED,
        started_at=first if started is None else started,
        seq=state.supervisor_seq,
        exit_code=code,
        reason=_text(result.get("reason")),
        components=component_rows(info, state),
        gpus=state.gauges.last.gpus if state.gauges.last else [],
    )
    return status if code is not None else without_result(run, status)


def component_rows(info: RunInfo, state: RunState) -> list[ComponentStatus]:
    """Return every component in its last state; pending if it had no transition."""
    rows = {}
    for item in info.components:
        new = ComponentStatus(name=item.name, role=item.role, state=State.PENDING, port=item.port)
        rows[item.name] = new.model_copy(update={"stages": _stages(item, state)})
    for record in state.transitions:
        if record.component and _member(State, record.new) is not None:
            rows[record.component] = _moved(rows.get(record.component), record)
    # Advice is not a fault of the component, so its row does not show it.
    for found in state.standing.values():
        if (row := rows.get(found.component or "")) and found.severity != "advice":
            rows[row.name] = row.model_copy(update={"diagnosis": found.title})
    return list(rows.values())


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; empty if it cannot be read."""
    return _read(path, json.loads)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the TOML table in `path`; empty if it cannot be read."""
    return _read(path, parse_toml)


def exit_code(run: RunDir) -> int | None:
    """Return the exit code of `run`; None without a result."""
    return _whole(read_json(run.result_json).get("exit_code"))


def moment(value: object) -> float | None:
    """Return a time in Unix seconds; None if `value` is not one."""
    seconds = _number(value)
    return seconds if seconds is not None and 0 <= seconds <= LATEST_TIME else None


def flag(command: list[Any], name: str) -> str:
    """Return the value of a flag (`--a b` or `--a=b`), if set."""
    for at, part in enumerate(command):
        if part == name and at + 1 < len(command):
            return str(command[at + 1])
        if isinstance(part, str) and part.startswith(f"{name}="):
            return part.partition("=")[2]
    return ""


def _moved(row: ComponentStatus | None, record: StateRecord) -> ComponentStatus:
    role = _member(Role, record.role) or (row.role if row else Role.OTHER)
    name = one_line(record.component or "")
    before = row or ComponentStatus(name=name, role=role, state=State.PENDING)
    new = State(record.new)
    return before.model_copy(
        update={
            "role": role,
            "state": new,
            "attempt": record.attempt or before.attempt,
            "restarts": before.restarts + (new is State.BACKOFF),
            "since": record.time,
            "started_at": record.time if new is State.STARTING else before.started_at,
            "exit_code": record.exit_code if record.exit_code is not None else before.exit_code,
            "reason": record.reason,
            "retry_at": record.retry_at,
            "healthy": None,
        }
    )


def _planned(item: dict[str, Any]) -> PlannedComponent:
    restart = _dict(item.get("restart"))
    return PlannedComponent(
        name=_text(item.get("name")),
        role=_member(Role, item.get("role")) or Role.OTHER,
        port=_whole(item.get("port")),
        gpus=tuple(gpu for gpu in _list(item.get("gpus")) if isinstance(gpu, int)),
        node=_text(_dict(item.get("place")).get("node")),
        command=tuple(map(str, _list(item.get("command")))),
        depends_on={name: _text(value) for name, value in _dict(item.get("depends_on")).items()},
        start_timeout_s=_number(item.get("start_timeout_s")),
        max_restarts=_whole(restart.get("max_restarts")),
        window_s=_number(restart.get("window_s")),
        stages={_text(s.get("name")): _text(s.get("usually")) for s in _dicts(item.get("stages"))},
    )


def _stages(item: PlannedComponent, state: RunState) -> list[StageStatus]:
    # With the times of its newest attempt.
    attempts = [record.attempt for record in state.transitions if record.component == item.name]
    found = state.stages.get(item.name, [])
    reached = {one.stage: one.time for one in found if one.attempt == max(attempts, default=0)}
    return [
        StageStatus(name=name, reached_at=reached.get(name), usually=usually)
        for name, usually in item.stages.items()
    ]


def _member(kind: type[E], value: object) -> E | None:
    # None if this version does not know the value.
    return next((member for member in kind if member.value == value), None)


def _read(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        return _dict(parse(read_regular(path)))
    except (OSError, ValueError, RecursionError):
        return {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    # A foreign name must not send escape sequences to a terminal.
    return one_line(value) if isinstance(value, str) else ""


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and abs(value) <= MOST_STEPS else None


def _number(value: object) -> float | None:
    return real(value) if isinstance(value, int | float) else None


def _step_count(words: str) -> int | None:
    # The length first: Python refuses to parse huge numbers.
    short = words.isdecimal() and len(words) <= len(str(MOST_STEPS))
    return _whole(int(words)) if short else None


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in _list(value) if isinstance(item, dict)]


def living_supervisor(table: ProcessTable | None) -> int | None:
    """Return the pid of the supervisor in the journal, if it is alive."""
    if table and table.supervisor and tracker.supervisor_alive(table):
        return table.supervisor.pid
    return None


def supervisor_gone(run: RunDir) -> bool:
    """Return True if a run has no result and its supervisor is not alive."""
    table = ProcessTable.load(run.journal_json)
    return not run.result_json.exists() and living_supervisor(table) is None


def is_crashed(status: RunStatus) -> bool:
    """Return True if the run ended without a result."""
    return status.phase is Phase.ENDED and status.exit_code is None


def without_result(run: RunDir, status: RunStatus) -> RunStatus:
    """Correct `status` from the journal by the processes that exist."""
    table = ProcessTable.load(run.journal_json)
    # The journal is the more reliable source: plan.json may be missing.
    run_id = table.run_id if table else status.run_id
    found = left_by(run, run_id, table)
    if found is None:
        pid = living_supervisor(table)
        reason = f"its supervisor{f' (pid {pid})' if pid else ''} does not answer"
        alive = {"phase": Phase.RUNNING, "supervisor_pid": pid, "reason": reason}
        return status.model_copy(update=alive)
    mains = {name: entry.pid for name, entry in table.components.items()} if table else {}
    rows = [
        _present(row, mains.get(row.name), [one for one in found if one.component == row.name])
        for row in status.components
    ]
    reason = GONE + _last_heard(status)
    # A copy says nothing about processes.
    if original := run_elsewhere(run, run_id):
        reason = f"this folder is a copy: {run_id} runs in {original}"
    elif found:
        left = counted(len(found), "process")
        reason += f"; {left} left: atropos-tui clean ends what its guard does not"
    return status.model_copy(update={"reason": reason, "components": rows})


def _last_heard(status: RunStatus) -> str:
    # The journal may know the end although result.json is missing, as on a full disk.
    failed = next((row for row in status.components if row.state is State.FAILED), None)
    if failed:
        return f"; before, {failed.name} had failed: {failed.reason}"
    trainer = next((row for row in status.components if row.role is Role.TRAINER), None)
    finished = trainer is not None and trainer.state is State.COMPLETED
    return "; before, the trainer had finished" if finished else ""


def _present(row: ComponentStatus, main: int | None, found: list[Leftover]) -> ComponentStatus:
    if pids := sorted(one.pid for one in found):
        living = {"pid": main if main in pids else pids[0], "pids": pids}
        reason = "left without a supervisor"
        return row.model_copy(update=living | {"reason": reason, "state": State.UNHEALTHY})
    if row.state.is_resting:
        return row
    reason = "was never started" if row.started_at is None else "gone with the supervisor"
    gone: dict[str, Any] = {"state": State.STOPPED, "reason": reason, "pid": None, "pids": []}
    return row.model_copy(update=gone)


@dataclass
class RecordBatch:
    records: list[Record]
    behind: bool
    """More data is waiting: read again at once."""
    from_start: bool
    """A file was replaced: begin with a new `RunState`."""


def streams(run: RunDir) -> list[Path]:
    """Return all record files of `run`, existing or not."""
    ours = (run.supervisor_jsonl, run.telemetry_jsonl, run.gauges_jsonl)
    return [*ours, *sorted(run.root.glob("eval.*.jsonl"))]


@dataclass
class RunFeed:
    """All record streams of `run`."""

    run: RunDir
    _tails: dict[Path, RecordTail] = field(default_factory=dict)
    _restarts: int = 0

    @property
    def bad_lines(self) -> int:
        """Invalid lines in all streams."""
        return sum(tail.bad_lines for tail in self._tails.values())

    def read(self) -> RecordBatch:
        """Read one bounded chunk of every stream."""
        for path in streams(self.run):  # an environment's eval file may appear later
            if path not in self._tails:
                self._tails[path] = self._tail(path)
        records = [record for tail in self._tails.values() for record in tail.read()]
        restarts = sum(tail.restarts for tail in self._tails.values())
        # One replaced file is enough: its old records cannot be removed from the state one by one.
        if restarts != self._restarts:
            return self._start_over()
        return RecordBatch(records, any(tail.behind for tail in self._tails.values()), False)

    def newest(self) -> list[Record]:
        """Return the newest records of a run with a long stream: its state without its history."""
        paths = streams(self.run)
        if max(map(size_of, paths)) <= LONG_BYTES:
            return []
        tails = [RecordTail(path, from_end=True, keep=CHUNK_BYTES) for path in paths]
        return [record for tail in tails for record in tail.read()]

    def catch_up(self, state: RunState) -> RunState:
        """Apply everything in the files; return a new state if files were replaced."""
        while True:
            batch = self.read()
            if batch.from_start:
                state = RunState()
            for record in batch.records:
                state.apply(record)
            if not batch.behind:
                return state

    def _tail(self, path: Path) -> RecordTail:
        # Without rollouts that the state would drop again.
        kept_from = nth_from_end(path, (_ROLLOUT,), ROLLOUTS_KEPT)
        return RecordTail(path, unread=_ROLLOUT, unread_before=kept_from)

    def _start_over(self) -> RecordBatch:
        # All streams, so that one new state holds all of them.
        self._tails = {path: RecordTail(path) for path in self._tails}
        self._restarts = 0
        return RecordBatch([], True, True)


def names_of(roots: Sequence[Path]) -> list[str]:
    """Return the folders of runs, with their parents if names repeat."""
    count = Counter(root.name for root in roots)
    parents = [f"{root.parent.name}/" if count[root.name] > 1 else "" for root in roots]
    return [parent + root.name for parent, root in zip(parents, roots, strict=True)]


def load_run(root: Path) -> tuple[RunInfo, RunState, RunFeed]:
    """Read all files of a run."""
    feed = RunFeed(RunDir(root))
    state = feed.catch_up(RunState())
    info = read_info(feed.run)
    return replace(info, last_start_s=last_starts(feed.run, info.name)), state, feed


def size_of(path: Path) -> int:
    """Return the size in bytes; 0 without a file."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def within(folder: Path) -> list[Path]:
    """Return the entries of `folder`; none if it cannot be listed."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []
