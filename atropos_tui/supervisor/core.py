"""The core: one task owns the state of every component. Everything else sends it messages.

A message (an exit, a probe's verdict, a command, a timer) is handled to its end before the next one. Handlers change
state by checked transitions; then `_reconcile` looks at what has become possible: stop the next one, start what its
gates allow, finish commands, end the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atropos_tui.stack.nvml import Nvml
from atropos_tui.stack.recipes import recipe
from atropos_tui.supervisor import procfs
from atropos_tui.supervisor.adoption import Estate
from atropos_tui.supervisor.conductor import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TIMEOUT,
    Conductor,
    new_id,
)
from atropos_tui.supervisor.diagnoses import Diagnosis, describe_exit
from atropos_tui.supervisor.diagnoses.model import shortened
from atropos_tui.supervisor.gpu_memory import GpuMemory
from atropos_tui.supervisor.guarding import Guard
from atropos_tui.supervisor.launching import stuck
from atropos_tui.supervisor.ledger import Ledger
from atropos_tui.supervisor.members import Tracker
from atropos_tui.supervisor.messages import (
    Deadline,
    Draining,
    Exited,
    Fault,
    Gone,
    Hurry,
    Interrupt,
    Leftovers,
    Message,
    Noted,
    PortTaken,
    Staged,
    Submit,
    Verdict,
    Wake,
)
from atropos_tui.supervisor.nvml import Reader
from atropos_tui.supervisor.operations import Operation, RefusedError, refusal
from atropos_tui.supervisor.result import RunResult
from atropos_tui.supervisor.sampling import Sampler
from atropos_tui.supervisor.unit import HEALTHY_RESET_S, Unit, next_delay
from atropos_tui.supervisor.watching import Watcher
from trainer_core.contracts.control import Accepted, CommandRequest, Phase, Recipe, Refusal, Role, State
from trainer_core.contracts.records import DiagnosisRecord, ProbeRecord, StageRecord
from trainer_core.contracts.run_dir import RunDir

SWEEP_S = 5.0
"""How often adopted zombies are collected and new sessions of members are told to the guard."""
REASON_ROOM = 300
"""Characters of an error line in the reason of a state."""
STRAYS_S = 10.0
"""So long strays are killed again and again at the end; then they are named, and the result is written."""


class Core(Conductor):
    """Runs one stack to its end."""

    def __init__(self, ledger: Ledger, guard: Guard, socket: str, token: str, estate: Estate) -> None:
        self.tracker = Tracker(ledger.stack.run_id)
        self._gpus = GpuMemory(Reader(Nvml()))
        self.sampler = Sampler(self.tracker, self._gpus)
        self._guard = guard
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._interrupts = 0
        self._began = procfs.ticks_now()
        super().__init__(ledger, guard, self.tracker, self._gpus, self._messages.put_nowait, socket, token, estate)
        self._estate = estate
        self._watcher = Watcher(ledger, self._messages.put_nowait)
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            Exited: self._on_exited,
            Leftovers: self._on_leftovers,
            Draining: self._on_draining,
            Staged: self._on_staged,
            Gone: self._on_gone,
            Verdict: self._on_verdict,
            Deadline: self._on_deadline,
            Noted: lambda m: self.ledger.diagnose(self.units[m.name], m.diagnosis, m.attempt),
            PortTaken: self._on_port_taken,
            Submit: self._on_submit,
            Interrupt: self._on_interrupt,
            Hurry: lambda _: self._hurry(),
            Wake: lambda _: None,
            Fault: self._on_fault,
        }

    # What others may call.

    async def submit(self, request: CommandRequest) -> Accepted:
        """Hand in a command; answered at once.

        Raises:
            RefusedError: it cannot be taken now.
        """
        if self.ledger.phase is Phase.ENDED:
            raise RefusedError(409, Refusal(error="the run has ended", fix="start a new one: atropos-tui up PROFILE"))
        answer: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self._messages.put_nowait(Submit(request, answer))
        return await answer

    def interrupt(self, name: str) -> None:
        """A signal arrived: stop the stack; the second time, kill it."""
        self._messages.put_nowait(Interrupt(name))

    def recipe_for(self, request: CommandRequest) -> Recipe:
        """What `request` would do.

        Raises:
            RefusedError: no such component.
        """
        try:
            among = self._partners(request.action, request.component)
            return recipe(
                self.ledger.stack, request.action, request.component, initiator=request.initiator, among=among
            )
        except KeyError:
            known = ", ".join(self.units)
            raise RefusedError(
                404, Refusal(error=f"no component {request.component!r}", fix=f"one of: {known}")
            ) from None

    async def run(self) -> RunResult:
        """Start everything, stay until the end, leave nothing behind."""
        besides = [self._launcher.task(self._sweep_forever()), self._launcher.task(self._watcher.watch())]
        try:
            self._take_over(self._estate)
            self._reconcile()
            while not self._over():
                message = await self._messages.get()
                self._handlers[type(message)](message)
                self._reconcile()
        finally:
            for task in besides:
                task.cancel()
            await self._launcher.close()
        assert self.result is not None
        await self._end_strays()
        with contextlib.suppress(Exception):  # a fault of the diagnosing must not hide how the run ended
            await self._watcher.look()
        self._refuse_the_rest()
        self.result.ended_at = time.time()
        self.result.write(RunDir(Path(self.ledger.stack.run_dir)).result_json)
        self.ledger.exit_code, self.ledger.reason = self.result.exit_code, self.result.reason
        self.ledger.phase = Phase.ENDED
        self.ledger.notify()
        return self.result

    def _over(self) -> bool:
        resting = all(unit.state.is_resting and unit.child is None for unit in self.units.values())
        return self.ledger.phase is Phase.STOPPING and resting

    def _refuse_the_rest(self) -> None:
        while not self._messages.empty():
            message = self._messages.get_nowait()
            if isinstance(message, Submit) and not message.answer.done():
                message.answer.set_exception(RefusedError(409, Refusal(error="the run has ended")))
            elif isinstance(message, Noted):
                self._handlers[Noted](message)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            found = await asyncio.to_thread(self.tracker.survey)
            await asyncio.to_thread(self.tracker.note_shared_memory, found)
            for rows in found.values():
                self._guard.remember_members(rows)
            if any(unit.spec.gpus for unit in self.units.values()):
                await self._gpus.note({name: [row.pid for row in rows] for name, rows in found.items()})
            self._launcher.note_progress()

    async def _end_strays(self) -> None:
        give_up = time.monotonic() + STRAYS_S
        while rows := await asyncio.to_thread(self.tracker.strays, self._began):
            if time.monotonic() > give_up:
                found = stuck(rows)
                said = DiagnosisRecord(rule=found.rule, title=found.title, evidence=found.evidence, fix=found.fix)
                self.ledger.emit(said)
                break
            for row in rows:
                procfs.send(row, signal.SIGKILL)
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self.tracker.survey)  # collects their zombies

    # Messages about processes.

    def _present(self, name: str, attempt: int) -> Unit | None:
        unit = self.units[name]
        return unit if unit.attempt == attempt and unit.child is not None else None

    def _on_exited(self, message: Exited) -> None:
        unit = self._present(message.name, message.attempt)
        if unit:
            unit.exited_at = time.time()
        if unit and unit.ending is None:
            self._launcher.begin_end(unit, "", signal.SIGKILL, 0.0)

    def _on_leftovers(self, message: Leftovers) -> None:
        unit = self._present(message.name, message.attempt)
        if unit and unit.child and unit.child.exit_code is not None and unit.state is not State.STOPPING:
            end = describe_exit(unit.child.exit_code)
            reason = f"{end}; ending {message.count} processes that it left"
            self.ledger.move(unit, State.STOPPING, reason, exit_code=unit.child.exit_code)

    def _on_draining(self, message: Draining) -> None:
        unit = self._present(message.name, message.attempt)
        if unit is None or unit.child is None or unit.child.exit_code is None:
            return
        if unit.state is not State.STOPPING:
            code = unit.child.exit_code
            reason = f"{describe_exit(code)}; waiting for {message.memory}"
            self.ledger.move(unit, State.STOPPING, reason, exit_code=code)
            unit.reason = describe_exit(code)
        unit.draining = message.memory
        self.ledger.notify()

    def _on_staged(self, message: Staged) -> None:
        unit = self._present(message.name, message.attempt)
        if unit:
            unit.stages[message.stage] = time.time()
            unit.came_up = unit.came_up or not unit.has_gate
            self.ledger.emit(StageRecord(component=unit.name, stage=message.stage, attempt=unit.attempt))
            self._launcher.note_progress()

    def _on_gone(self, message: Gone) -> None:
        unit = self._present(message.name, message.attempt)
        if unit is None:
            return
        lived = (unit.exited_at or time.time()) - (unit.started_at or 0.0)
        outcome = unit.outcome
        code = self._launcher.collect(unit)
        unit.lived(lived)
        end = describe_exit(code)
        stopping = self.ledger.phase is Phase.STOPPING
        if outcome == "timeout":
            self._fail(unit, EXIT_TIMEOUT, unit.reason)
        elif outcome == "stopped" or stopping or self._being_stopped(unit):
            clean = code == 0 and not outcome and stopping
            said = self._stopped_how(unit, code, message.killed) if outcome == "stopped" else end
            self.ledger.move(unit, State.COMPLETED if clean else State.STOPPED, said, exit_code=code)
        elif outcome == "crash":
            self._crash(unit, unit.reason, None)
        elif outcome == "killed":
            self._crash(unit, "killed by command", None)
        elif code == 0 and (unit.one_shot or unit.spec.ends_run or unit.spec.restart.policy != "always"):
            self.ledger.move(unit, State.COMPLETED, end, exit_code=code)
            if unit.spec.ends_run:
                self._end_run(RunResult(exit_code=EXIT_DONE, reason=f"{unit.name} finished", component=unit.name))
        else:
            self._crash(unit, end, message.diagnosis, message.error)

    def _being_stopped(self, unit: Unit) -> bool:
        return any(op.stage == "stop" and op.action != "kill" and unit.name in op.stop for op in self._active())

    def _crash(self, unit: Unit, reason: str, diagnosis: Diagnosis | None, error: str = "") -> None:
        if diagnosis:
            self.ledger.diagnose(unit, diagnosis, ending=True)
        now = time.monotonic()
        if unit.healthy_at is not None and now - unit.healthy_at > HEALTHY_RESET_S:
            unit.streak = 0
        policy = unit.spec.restart
        hopeless = "wrong usage, not retried" if unit.exit_code == 2 and not unit.proven else ""
        if unit.fails_alike(error):
            hopeless = f"the start failed twice in the same words, not tried again: {shortened(error, REASON_ROOM)}"
        delay = None if hopeless else next_delay(policy, unit.crashes, unit.streak, now)
        if delay is None:
            why = hopeless or f"restart policy {policy.policy}"
            if not hopeless and policy.policy != "never":
                why = f"gave up after {policy.max_restarts} restarts in {policy.window_s:g} s"
            self._fail(unit, EXIT_FAILED, f"{reason}; {why}")
            return
        unit.streak += 1
        unit.restarts += 1
        unit.command_id = None
        plan = recipe(self.ledger.stack, "restart", unit.name)
        partners = [name for name in plan.stop if name != unit.name and self._comes_along(self.units[name])]
        unit.retry_at = time.time() + delay
        self.ledger.move(unit, State.BACKOFF, f"{reason}; again in {delay:.1f} s", exit_code=unit.exit_code)
        request = CommandRequest(action="restart", component=unit.name)
        start = [name for name in plan.start if name == unit.name or name in partners]
        self._begin(Operation(new_id(), request, plan, False, stop=partners, start=start, not_before=now + delay))
        asyncio.get_running_loop().call_later(delay + 0.001, self._messages.put_nowait, Wake())

    def _on_verdict(self, message: Verdict) -> None:
        unit = self._present(message.name, message.attempt)
        if unit is None or unit.ending is not None:
            return
        found = message.result
        if found.ok or unit.state is not State.STARTING:
            self.ledger.emit(
                ProbeRecord(
                    component=unit.name,
                    probe=found.which,
                    ok=found.ok,
                    latency_s=found.latency_s,
                    detail=found.detail,
                )
            )
        if found.which == "liveness":
            if not found.ok:
                self._dead_alive(unit, found.detail)
            return
        if found.which == "startup" and (not found.ok or unit.spec.probes.readiness):
            return
        if found.ok and unit.state in (State.STARTING, State.UNHEALTHY):
            self._healthy(unit, found.detail)
        elif not found.ok and unit.state is State.HEALTHY:
            self.ledger.move(unit, State.UNHEALTHY, found.detail)

    def _dead_alive(self, unit: Unit, detail: str) -> None:
        reason = f"liveness failed: {detail}"
        fix = f"it is being restarted; atropos-tui logs {unit.name} shows what it was doing"
        self.ledger.diagnose(unit, Diagnosis(f"{unit.name} runs but does not answer", detail, fix, "not_answering"))
        if unit.state is State.HEALTHY:
            self.ledger.move(unit, State.UNHEALTHY, reason)
        self._launcher.begin_end(unit, "crash")
        self.ledger.move(unit, State.STOPPING, reason)

    def _on_deadline(self, message: Deadline) -> None:
        unit = self._present(message.name, message.attempt)
        if unit is None or unit.state is not State.STARTING or unit.ending is not None:
            return
        probe = unit.newest_probe()
        detail = probe.detail if probe else "it has not finished"
        reason = f"not {'done' if unit.one_shot else 'healthy'} within {unit.spec.start_timeout_s:g} s: {detail}"
        fix = f"see atropos-tui logs {unit.name}; if it only needs longer, raise start_timeout_s"
        rule = "health_timeout" if unit.spec.role is Role.ENGINE else "not_ready"
        self.ledger.diagnose(unit, Diagnosis(f"{unit.name} did not become ready", detail, fix, rule))
        self._launcher.begin_end(unit, "timeout")
        self.ledger.move(unit, State.STOPPING, reason)

    def _on_port_taken(self, message: PortTaken) -> None:
        unit = self.units[message.name]
        if unit.state is State.PENDING and unit.wanted:
            self.ledger.diagnose(unit, message.diagnosis)
            self._fail(unit, EXIT_FAILED, f"{message.diagnosis.title}: {message.diagnosis.evidence}")

    def _on_fault(self, message: Fault) -> None:
        raise message.error

    # Commands.

    def _on_submit(self, message: Submit) -> None:
        request = message.request
        command_id = new_id()
        refused = refusal(request, self.units, self._active(), self.ledger.phase)
        if refused:
            self._record(request, command_id, "refused", refused[1].error)
            message.answer.set_exception(RefusedError(*refused))
            return
        plan = self.recipe_for(request)
        operation = Operation(command_id, request, plan, stop=list(plan.stop), start=list(plan.start))
        if request.action == "kill":  # the rest is what follows from the crash
            operation.stop, operation.start = plan.stop[:1], []
        if request.component:
            operation.attempt = self.units[request.component].attempt
        self._record(request, command_id, "accepted", plan.note)
        operation.status = "running"
        self._make_way(operation)
        if request.action == "down":
            reason = "stopped by command"
            self._end_run(RunResult(exit_code=EXIT_INTERRUPTED, reason=reason), operation)
            if request.timeout_s is not None:
                asyncio.get_running_loop().call_later(request.timeout_s, self._messages.put_nowait, Hurry())
        else:
            self._begin(operation)
        message.answer.set_result(Accepted(command_id=command_id, recipe=plan))

    def _on_interrupt(self, message: Interrupt) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            self._hurry()
        else:
            self._end_run(RunResult(exit_code=EXIT_INTERRUPTED, reason=f"interrupted by {message.name}"))

    def _hurry(self) -> None:
        for unit in self.units.values():
            if unit.child is not None:
                self._launcher.begin_end(unit, "stopped", signal.SIGKILL, 0.0)
