"""Carries recipes out: stop these in order, start those as their gates open, end the run. Owned by the core's task."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable

from atropos_tui.stack.recipes import recipe
from atropos_tui.supervisor import states
from atropos_tui.supervisor.adoption import Estate
from atropos_tui.supervisor.diagnoses import Diagnosis, describe_exit
from atropos_tui.supervisor.environment import LaunchError
from atropos_tui.supervisor.gpu_memory import GpuMemory
from atropos_tui.supervisor.guarding import Guard
from atropos_tui.supervisor.launching import SIGNALS, Launcher
from atropos_tui.supervisor.ledger import Ledger
from atropos_tui.supervisor.members import Tracker
from atropos_tui.supervisor.messages import Message
from atropos_tui.supervisor.operations import Operation
from atropos_tui.supervisor.result import RunResult
from atropos_tui.supervisor.unit import Unit
from trainer_core.contracts.control import CommandRequest, Phase, State
from trainer_core.contracts.records import CommandRecord

EXIT_DONE, EXIT_FAULT, EXIT_FAILED, EXIT_TIMEOUT, EXIT_INTERRUPTED = 0, 1, 3, 4, 130
KEPT_OPERATIONS = 200
RESULT_LINES = 40


class Conductor:
    """What shall happen, and what of it is possible now."""

    def __init__(
        self,
        ledger: Ledger,
        guard: Guard,
        tracker: Tracker,
        gpus: GpuMemory,
        post: Callable[[Message], None],
        socket: str,
        token: str,
        estate: Estate,
    ) -> None:
        self.ledger = ledger
        self.units = ledger.units
        self.operations: dict[str, Operation] = {}
        self._stopped_with: dict[str, str] = {}
        """Who was stopped by hand only because of another, and of whom: it comes back with that one."""
        self.result: RunResult | None = None
        self._launcher = Launcher(ledger, tracker, guard, gpus, post, socket, token, estate)

    def _active(self) -> list[Operation]:
        return [op for op in self.operations.values() if op.stage != "over"]

    def _begin(self, operation: Operation) -> None:
        self.operations[operation.id] = operation
        over = [op.id for op in self.operations.values() if op.stage == "over"]
        for command_id in over[: max(0, len(over) - KEPT_OPERATIONS)]:
            del self.operations[command_id]

    def _make_way(self, operation: Operation) -> None:
        """A command by hand ends the waiting of backoffs that it touches; a stop takes its components out of them."""
        touched = {*operation.stop, *operation.start}
        for other in self._active():
            if touched & set(other.start):
                other.not_before = 0.0
                if operation.action == "stop":
                    other.start = [name for name in other.start if name not in touched]
        for name in touched:
            self._stopped_with.pop(name, None)
        if operation.action == "stop":
            for name in operation.stop:
                self.units[name].wanted = False
                if name != operation.request.component:
                    self._stopped_with[name] = operation.request.component or ""

    def _partners(self, action: str, component: str | None) -> set[str]:
        """Components that `action` on `component` can take along, in the state that they are in now."""
        held = {name for op in self._active() for name in op.start if op.holds(name)}
        lives = {
            unit.name for unit in self.units.values() if self._comes_along(unit) or (unit.wanted and unit.name in held)
        }
        resting = {name for name, whose in self._stopped_with.items() if whose == component}
        return {"start": resting, "restart": lives | resting}.get(action, lives)

    def _take_over(self, estate: Estate) -> None:
        """Go on with what an earlier supervisor left; what its plan has changed is restarted, by its recipe."""
        for unit in self.units.values():
            heir = estate.heirs.get(unit.name)
            if heir is not None:
                self._launcher.adopt(unit, heir)
                if heir.handle.exit_code is None and not unit.has_gate and not unit.one_shot:
                    self._healthy(unit, "adopted; it has no probe")
            elif estate.table is not None and unit.name in estate.table.done:
                self.ledger.move(unit, State.COMPLETED, "done before, under the earlier supervisor")
        changed = [name for name, heir in estate.heirs.items() if heir.changed]
        if changed:
            plans = [recipe(self.ledger.stack, "restart", name) for name in changed]
            touched = {name for plan in plans for name in (*plan.stop, *plan.start) if name in estate.heirs}
            order = [name for name in self.units if name in touched]
            request = CommandRequest(action="restart", component=changed[0])
            why = f"the plan of {', '.join(changed)} has changed"
            self._begin(Operation(new_id(), request, plans[0], False, why, stop=order[::-1], start=order))

    def _reconcile(self) -> None:
        self.ledger.moved = True
        while self.ledger.moved:
            self.ledger.moved = False
            for operation in self._active():
                self._advance(operation)
            for unit in self.units.values():
                self._maybe_start(unit)
            self._look_at_the_whole()

    def _advance(self, op: Operation) -> None:
        if op.stage == "stop":
            if not all(self._is_down(op, self.units[name]) for name in op.stop):
                return
            op.stage = "start"
        if op.stage == "start":
            if op.start and time.monotonic() < op.not_before:
                return
            for name in op.start:
                self._release(op, self.units[name])
            op.stage = "settle"
        if op.stage == "settle":
            units = [self.units[name] for name in op.start]
            lost = [u for u in units if u.state is State.FAILED or (not u.wanted and u.state.is_resting)]
            if lost:
                self._finish(op, "failed", f"{lost[0].name} is {lost[0].state}: {lost[0].reason}")
            elif all(unit.state in (State.HEALTHY, State.COMPLETED) for unit in units):
                self._finish(op, "done", "")

    def _is_down(self, op: Operation, unit: Unit) -> bool:
        """Whether `unit` is out of the way of `op`; if not, see to it. The caller stops at the first that is not."""
        own_id = op.id if op.by_hand else None
        if op.action == "kill":
            if unit.child is None or unit.attempt != op.attempt:
                return True
            if not op.sent:
                unit.command_id = own_id
                self._launcher.begin_end(unit, "killed", signal.SIGKILL, 0.0)
                op.sent = True
            return False
        if unit.child is not None:
            if unit.state is not State.STOPPING:
                unit.command_id = own_id
                self._launcher.begin_end(unit, "stopped")
                self.ledger.move(unit, State.STOPPING, _said(op))
            elif unit.outcome != "stopped":
                self._launcher.begin_end(unit, "stopped")
            return False
        if op.action == "stop":
            self._launcher.drop_next(unit.name)  # what it has read by then may not be what is there at the next start
        if op.action in ("stop", "down") and unit.state in (State.PENDING, State.BACKOFF):
            unit.command_id = own_id
            self.ledger.move(unit, State.STOPPED, _stopped_for(op, unit.name))
        return True

    def _stopped_how(self, unit: Unit, code: int, killed: int) -> str:
        """Words for a stop that was asked for; the exit code only where it is not what the stop signal gives."""
        number = SIGNALS[unit.spec.stop.signal]
        op = next((op for op in self._active() if op.stage == "stop" and unit.name in op.stop), None)
        said = _stopped_for(op, unit.name) if op else "stopped with the stack"
        if killed:
            return f"{said}; {killed} killed after the grace"
        return said if code in (0, -number, 128 + number) else f"{said}; {describe_exit(code)}"

    def _release(self, op: Operation, unit: Unit) -> None:
        unit.wanted = True
        if op.by_hand:
            unit.command_id = op.id
            unit.port_wait = None
            unit.start_error = ""  # whoever asks may have mended it
        if unit.state.is_resting or unit.state is State.BACKOFF:
            self.ledger.move(unit, State.PENDING, _said(op))

    def _finish(self, op: Operation, status: str, detail: str) -> None:
        op.stage = "over"
        op.status = "failed" if status == "failed" else "done"
        op.detail = detail
        if op.by_hand:
            self._record(op.request, op.id, op.status, detail)

    def _maybe_start(self, unit: Unit) -> None:
        if unit.state is not State.PENDING or self.ledger.phase is Phase.STOPPING:
            return
        if any(op.holds(unit.name) for op in self._active()):
            return
        unit.waiting_for = ", ".join(
            f"{name} to be {condition} (it is {self.units[name].state})"
            for name, condition in unit.spec.depends_on.items()
            if not states.satisfies(self.units[name].state, condition)
        )
        if unit.waiting_for:
            return
        try:
            self._launcher.start(unit)
        except LaunchError as error:
            self.ledger.diagnose(
                unit, Diagnosis(error.problem, f"before start {unit.attempt + 1}", error.fix, "cannot_start")
            )
            self._fail(unit, EXIT_FAILED, error.problem)
            return
        if unit.state is State.STARTING and not unit.has_gate and not unit.one_shot:
            self._healthy(unit, "started; it has no probe")

    def _look_at_the_whole(self) -> None:
        if self.ledger.phase is Phase.STARTING and self.ledger.ready():
            self.ledger.phase = Phase.RUNNING
            self.ledger.notify()
        done = all(unit.state is State.COMPLETED for unit in self.units.values())
        if done and self.ledger.phase is not Phase.STOPPING:
            self._end_run(RunResult(exit_code=EXIT_DONE, reason="every component is done"))

    @staticmethod
    def _comes_along(unit: Unit) -> bool:
        return unit.wanted and not unit.state.is_resting

    def _fail(self, unit: Unit, code: int, reason: str) -> None:
        lines = unit.log.tail(RESULT_LINES) if unit.log else []
        self.ledger.move(unit, State.FAILED, reason, exit_code=unit.exit_code)
        said = f"{unit.name}: {reason}" + (f" ({unit.diagnosis})" if unit.diagnosis else "")
        self._end_run(RunResult(exit_code=code, reason=said, component=unit.name, last_lines=lines))

    def _healthy(self, unit: Unit, reason: str) -> None:
        if unit.timer and not unit.one_shot:
            unit.timer.cancel()
        unit.proven = unit.proven or unit.has_gate
        unit.came_up = unit.came_up or unit.has_gate
        unit.healthy_at = unit.healthy_at or time.monotonic()
        self._launcher.note_progress()
        self.ledger.move(unit, State.HEALTHY, reason)
        self._launcher.prepare_next(unit)

    def _record(self, request: CommandRequest, command_id: str, status: str, detail: str) -> None:
        self.ledger.emit(
            CommandRecord.model_validate(
                {
                    "component": request.component,
                    "command_id": command_id,
                    "action": request.action,
                    "status": status,
                    "initiator": request.initiator,
                    "detail": detail,
                }
            )
        )

    def _end_run(self, result: RunResult, operation: Operation | None = None) -> None:
        """Begin the end; whoever came first decides how it is told."""
        if self.ledger.phase is Phase.STOPPING:
            if operation:
                self._begin(operation)
            return
        self.result = result
        self._launcher.end_keeping()
        self._launcher.drop_next()
        self.ledger.phase, self.ledger.reason = Phase.STOPPING, result.reason
        for other in self._active():
            self._finish(other, "failed", "the run is ending")
        plan = recipe(self.ledger.stack, "down", None)
        request = CommandRequest(action="down")
        self._begin(operation or Operation(new_id(), request, plan, False, stop=list(plan.stop)))


def new_id() -> str:
    return secrets.token_hex(4)


def _said(op: Operation) -> str:
    if op.why:
        return op.why
    if op.action == "down":
        return "the stack is being stopped"
    whose = op.request.component or "the stack"
    who = {"user": "by hand", "trainer": "asked for by the trainer"}[op.request.initiator]
    return f"{op.action} of {whose} {who if op.by_hand else 'after its crash'}"


def _stopped_for(op: Operation, name: str) -> str:
    """What a component that `op` has stopped is told to have been stopped for."""
    if op.why:
        return f"stopped, since {op.why}"
    if op.action == "down":
        return "stopped with the stack"
    if op.action != "restart":
        return "stopped by hand" + ("" if name == op.request.component else f" with {op.request.component}")
    if not op.by_hand:
        return f"stopped, since {op.request.component} crashed"
    if op.request.initiator == "trainer":
        return "stopped for a restart, as the trainer asked"
    whose = op.request.component or "the stack"
    return "stopped for a restart by hand" + ("" if name == whose else f" of {whose}")
