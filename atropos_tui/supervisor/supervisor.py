"""The supervisor: runs one stack to its end. Read `run`, then `_do` and `_reconcile`.

Every event is one call that `post` puts into the event loop and that changes one component. Then
`_reconcile` does what has become possible: stop the next component, start those whose gates allow
it, finish commands, end the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from atropos_common.protocol.control import (
    Accepted,
    Action,
    CommandRequest,
    Phase,
    Recipe,
    RunStatus,
    State,
)
from atropos_common.protocol.records import CommandRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.diagnoses import Diagnosis, describe_exit
from atropos_tui.diagnoses.model import CANNOT_START
from atropos_tui.diagnoses.watcher import Watcher
from atropos_tui.errors import Exit
from atropos_tui.profile.spec import recipe
from atropos_tui.supervisor.component import SIGNALS, Component, Ended, look_again, stuck
from atropos_tui.supervisor.gauges import record_gauges
from atropos_tui.supervisor.journal.store import RunResult, Store
from atropos_tui.supervisor.launchers.launcher import Host, Usage, UsageSampler
from atropos_tui.supervisor.operations import Operation, RefusedError, new_id
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.processes.logs import latest_attempt
from atropos_tui.supervisor.processes.process import LaunchError, describe

KEPT_OPERATIONS = 200
RESULT_LINES = 40
SURVEY_EVERY_S = 5.0
"""Seconds between two surveys of the process table."""
TIME_LIMIT = signal.SIGUSR1.name
"""Signal that SLURM sends before a job's time limit."""
STRAYS_S = 10.0
"""Seconds in which strays are killed at the end; then a diagnosis names them."""


class Supervisor:
    """Dependency gates, commands, restarts and the end of one run. Each component owns its own
    state."""

    def __init__(self, store: Store, host: Host) -> None:
        stack = host.stack
        self.stack, self.store, self.host = stack, store, host
        self.run_dir = RunDir(Path(stack.run_dir))
        self.components = {
            spec.name: Component(
                spec, host, store, self, _attempts_so_far(self.run_dir.logs / spec.name)
            )
            for spec in stack.components
        }
        self.operations: dict[str, Operation] = {}
        self.sampler = UsageSampler(host.tracker, host.gpus, host.launcher)
        self.phase = Phase.STARTING
        self.started_at = time.time()
        self.reason = ""
        self.exit_code: int | None = None
        self.result: RunResult | None = None
        self._unwanted: set[str] = set()
        """Components that a user stopped."""
        self._stopped_with: dict[str, str] = {}
        """Component that was stopped only with another -> that other, which brings it back."""
        self._interrupts = 0
        self._began = procfs.ticks_now()
        self._watcher = Watcher(stack, self.components)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun = asyncio.Event()
        self._over: asyncio.Future[None] = self._loop.create_future()

    # Public interface.

    async def submit(self, request: CommandRequest) -> Accepted:
        """Accept a command and answer at once.

        Raises:
            RefusedError: it is not possible now.
        """
        # Commands may arrive before `run` has begun.
        await self._begun.wait()
        if self._over.done():
            raise RefusedError(409, "the run has ended", "start a new one: atropos-tui up PROFILE")
        answer: asyncio.Future[Accepted] = self._loop.create_future()
        self._do(self._command, request, answer)
        return await answer

    def interrupt(self, name: str) -> None:
        """Stop the stack; the second time, kill it. SIGUSR1 announces SLURM's time limit."""
        if name == TIME_LIMIT:
            self.post(self._out_of_time)
        else:
            self.post(self._interrupted, name)

    def recipe_for(self, request: CommandRequest) -> Recipe:
        """Return the recipe of `request` without executing it.

        Raises:
            RefusedError: no such component.
        """
        try:
            among = self._partners(request.action, request.component)
            return recipe(
                self.stack,
                request.action,
                request.component,
                initiator=request.initiator,
                among=among,
            )
        except KeyError:
            raise self._unknown(request.component) from None

    def status(self, usage: Mapping[str, Usage]) -> RunStatus:
        """Status as of the last record; `usage` is the sampler's newest."""
        return RunStatus(
            run_id=self.stack.run_id,
            name=self.stack.name,
            mode=self.stack.mode,
            run_dir=self.stack.run_dir,
            phase=self.phase,
            started_at=self.started_at,
            seq=self.store.journal.seq,
            exit_code=self.exit_code,
            reason=self.reason,
            supervisor_pid=os.getpid(),
            components=[
                each.row(usage.get(each.name, Usage())) for each in self.components.values()
            ],
            gpus=list(self.sampler.gpus),
            nodes=self.sampler.nodes(self.stack),
        )

    async def measured(self) -> RunStatus:
        """Status with the current resource usage."""
        usage = await self.sampler.fresh()
        return self.status(usage)

    def ready(self) -> bool:
        """True if every long-running component is healthy, and every one-shot step done."""
        return all(
            each.state is State.COMPLETED or (each.state is State.HEALTHY and not each.one_shot)
            for each in self.components.values()
        )

    # The run.

    async def run(self) -> RunResult:
        """Start everything, wait for the end, clean up, and write the result."""
        urls = {spec.name: spec.url for spec in self.stack.components}
        gauges = record_gauges(
            self.run_dir.gauges_jsonl, self.measured, lambda: self._watcher.flows, urls
        )
        background = [
            self.task(work) for work in (self._sweep_forever(), self._watcher.watch(), gauges)
        ]
        try:
            self.post(lambda: None)  # the first reconcile starts the stack
            self._begun.set()
            await self._over
        finally:
            for task in background:
                task.cancel()
            # Close before the strays are killed: nothing may start a process any more.
            await self._close()
        assert self.result is not None
        await self._end_strays()
        with contextlib.suppress(Exception):  # an error in a rule must not hide the result
            await self._watcher.look()
        if self.result.exit_code == Exit.DONE:
            # Open diagnoses of a run that is done are no problem any more.
            self.store.diagnoses.end_all("the run ended well")
        self.result.ended_at = time.time()
        self.result.write(self.run_dir.result_json)
        self.ended(self.result)
        return self.result

    def ended(self, result: RunResult) -> None:
        self.exit_code, self.reason, self.phase = result.exit_code, result.reason, Phase.ENDED
        self.store.notify()

    def post(self, act: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon(self._do, act, *args)

    def _do(self, act: Callable[..., None], *args: Any) -> None:
        if self._over.done():
            return
        try:
            act(*args)
            self._reconcile()
        except Exception as error:  # an internal error: `run` raises it
            self._over.set_exception(error)
            return
        # `child` stays set until the whole process set and its GPU memory are gone.
        resting = all(
            each.state.is_resting and each.child is None for each in self.components.values()
        )
        if self.phase is Phase.STOPPING and resting:
            self._over.set_result(None)

    def task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background; if it raises, `run` raises."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if (
            not task.cancelled()
            and (error := task.exception()) is not None
            and not self._over.done()
        ):
            self._over.set_exception(error)

    async def _close(self) -> None:
        self.host.launcher.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.host.close()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SURVEY_EVERY_S)
            with contextlib.suppress(OSError):  # out of descriptors: the next survey may succeed
                await self.host.survey()

    async def _end_strays(self) -> None:
        give_up = time.monotonic() + STRAYS_S
        tracker = self.host.tracker
        while rows := await asyncio.to_thread(tracker.strays, self._began):
            if time.monotonic() > give_up:
                self.store.diagnoses.add(None, stuck(describe(rows)))
                break
            for row in rows:
                procfs.send(row, signal.SIGKILL)
            await asyncio.sleep(0.01)
        await asyncio.to_thread(tracker.survey)  # collects their zombies

    # Reconciling.

    def _reconcile(self) -> None:
        # Below every sequence number, so that the first pass always runs.
        seen = -2
        while (
            seen != self.store.journal.seq
        ):  # every transition is a record: repeat until none follows
            seen = self.store.journal.seq
            for operation in self._active():
                self._advance(operation)
            for component in self.components.values():
                self._maybe_start(component)
            self._look_at_the_whole()

    def _advance(self, op: Operation) -> None:
        if op.stage == "stop":
            if not all(self._is_down(op, self.components[name]) for name in op.stop):
                return
            op.stage = "start"
        if op.stage == "start":
            if op.start and time.monotonic() < op.not_before:
                return
            for name in op.start:
                self._unwanted.discard(name)
                self.components[name].release(op.cause(), op.own_id)
            op.stage = "settle"
        if op.stage == "settle":
            started = [self.components[name] for name in op.start]
            # A component that failed or was stopped again by the user will not become healthy.
            lost = [
                each
                for each in started
                if each.state is State.FAILED
                or (each.name in self._unwanted and each.state.is_resting)
            ]
            if lost:
                self._finish(op, "failed", f"{lost[0].name} is {lost[0].state}: {lost[0].reason}")
            elif all(each.state in (State.HEALTHY, State.COMPLETED) for each in started):
                self._finish(op, "done")

    def _is_down(self, op: Operation, component: Component) -> bool:
        """True if the component does not block `op`; otherwise stop it."""
        if op.action == "kill":
            if component.child is None or component.attempt != op.attempt:
                return True
            if not op.sent:
                component.kill(op.own_id)
                op.sent = True
            return False
        if component.child is not None:
            component.stop(op.own_id, op.cause())
            return False
        if op.action in ("stop", "down") and component.state in (State.PENDING, State.BACKOFF):
            component.call_off(op.own_id, op.stopped_for(component.name))
        return True

    def _maybe_start(self, component: Component) -> None:
        if component.state is not State.PENDING or self.phase is Phase.STOPPING:
            return
        if any(op.holds(component.name) for op in self._active()):
            return
        missing = (
            f"{name} to be {condition} (it is {self.components[name].state})"
            for name, condition in component.spec.depends_on.items()
            if not self.components[name].state.satisfies(condition)
        )
        try:
            component.start(", ".join(missing))
        except LaunchError as error:
            evidence = f"before start {component.attempt + 1}"
            component.diagnose(CANNOT_START.diagnosis(evidence, error.fix, error.problem))
            self._fail(component, Exit.COMPONENT_FAILED, error.problem)

    def _look_at_the_whole(self) -> None:
        if self.phase is Phase.STARTING and self.ready():
            self.phase = Phase.RUNNING
            self.store.notify()
        done = all(each.state is State.COMPLETED for each in self.components.values())
        if done and self.phase is not Phase.STOPPING:
            self._end_run(RunResult(exit_code=Exit.DONE, reason="every component is done"))

    # After an attempt.

    def on_gone(self, component: Component, ended: Ended) -> None:
        """Decide what follows a finished attempt: a final state or a restart."""
        end = ended.lost or describe_exit(ended.exit_code)
        stopping = self.phase is Phase.STOPPING
        spec, outcome = component.spec, ended.outcome
        if outcome == "timeout":
            self._fail(component, Exit.TIMEOUT, component.reason)
        elif outcome == "stopped" or stopping or self._is_being_stopped(component):
            clean = ended.exit_code == 0 and not outcome and stopping
            reason = self._stopped_how(component, ended) if outcome == "stopped" else end
            component.rest(State.COMPLETED if clean else State.STOPPED, reason)
        elif outcome == "crash":
            self._crash(component, component.reason, ended)
        elif outcome == "killed":
            self._crash(component, "killed by command", ended)
        elif ended.exit_code == 0 and (
            component.one_shot or spec.ends_run or spec.restart.policy != "always"
        ):
            component.rest(State.COMPLETED, end)
            if spec.ends_run:
                reason = f"{component.name} finished"
                self._end_run(
                    RunResult(exit_code=Exit.DONE, reason=reason, component=component.name)
                )
        else:
            self._crash(component, end, ended)

    def on_port_taken(self, component: Component, found: Diagnosis) -> None:
        """Fail a component whose port another process holds."""
        if component.state is State.PENDING and component.name not in self._unwanted:
            component.diagnose(found)
            self._fail(component, Exit.COMPONENT_FAILED, f"{found.title}: {found.evidence}")

    def _is_being_stopped(self, component: Component) -> bool:
        return any(
            op.stage == "stop" and op.action != "kill" and component.name in op.stop
            for op in self._active()
        )

    def _stopped_how(self, component: Component, ended: Ended) -> str:
        """Reason of an intended stop; the exit code only if it is unusual for the stop signal."""
        number = SIGNALS[component.spec.stop.signal]
        op = next(
            (op for op in self._active() if op.stage == "stop" and component.name in op.stop), None
        )
        reason = op.stopped_for(component.name) if op else "stopped with the stack"
        if ended.killed:
            return f"{reason}; {ended.killed} killed after the grace period"
        usual = ended.exit_code in (0, -number, 128 + number)
        return reason if usual else f"{reason}; {describe_exit(ended.exit_code)}"

    def _crash(self, component: Component, reason: str, ended: Ended) -> None:
        if ended.diagnosis:
            component.diagnose(ended.diagnosis, ending=True)
        delay, why_not = component.delay_after_crash(ended.error, usage=ended.usage)
        if delay is None:
            self._fail(component, Exit.COMPONENT_FAILED, f"{reason}; {why_not}")
            return
        # The stop of partners starts now, and overlaps with the backoff.
        again_at = time.monotonic() + delay
        plan = recipe(self.stack, "restart", component.name)
        partners = [
            name for name in plan.stop if name != component.name and self._comes_along(name)
        ]
        component.back_off(delay, reason)
        request = CommandRequest(action="restart", component=component.name)
        start = [name for name in plan.start if name == component.name or name in partners]
        self._begin(
            Operation(new_id(), request, False, stop=partners, start=start, not_before=again_at)
        )
        # Reconcile just after `not_before`; an event loop timer may fire slightly early.
        self._loop.call_later(delay + 0.001, self._do, look_again)

    def _comes_along(self, name: str) -> bool:
        return name not in self._unwanted and not self.components[name].state.is_resting

    def _fail(self, component: Component, code: int, reason: str) -> None:
        # `result.json` keeps the last log lines of the component that ended the run.
        lines = component.log.tail(RESULT_LINES) if component.log else []
        component.rest(State.FAILED, reason)
        name, found = component.name, component.found
        text = f"{found.title} ({reason})" if found and found.title not in reason else reason
        if not text.startswith(f"{name} "):
            text = f"{name}: {text}"
        self._end_run(RunResult(exit_code=code, reason=text, component=name, last_lines=lines))

    def _end_run(self, result: RunResult, operation: Operation | None = None) -> None:
        """Begin the end of the run. The first caller decides the result."""
        if self.phase is Phase.STOPPING:
            if operation:
                self._begin(operation)
            if (
                self.result
                and self.result.ended_by == "time_limit"
                and result.ended_by in ("command", "signal")
            ):
                self.result, self.reason = (
                    result,
                    result.reason,
                )  # otherwise the job would be requeued
            return
        self.result = result
        self.phase, self.reason = Phase.STOPPING, result.reason
        for other in self._active():
            self._finish(other, "failed", "the run is ending")
        plan = recipe(self.stack, "down", None)
        request = CommandRequest(action="down")
        self._begin(operation or Operation(new_id(), request, False, stop=list(plan.stop)))

    # Commands.

    def _command(self, request: CommandRequest, answer: asyncio.Future[Accepted]) -> None:
        command_id = new_id()
        try:
            self._check(request)
            plan = self.recipe_for(request)
        except RefusedError as refused:
            self._record(request, command_id, "refused", refused.refusal.error)
            answer.set_exception(refused)
            return
        operation = Operation(command_id, request, stop=list(plan.stop), start=list(plan.start))
        if request.action == "kill":  # the restart follows from the crash
            operation.stop, operation.start = plan.stop[:1], []
        if request.component:
            operation.attempt = self.components[request.component].attempt
        self._record(request, command_id, "accepted", plan.note)
        operation.status = "running"
        self._make_way(operation)
        if request.action == "down":
            by_hand = RunResult(
                exit_code=Exit.INTERRUPTED, reason="stopped by command", ended_by="command"
            )
            self._end_run(by_hand, operation)
            if request.timeout_s is not None:
                self._loop.call_later(request.timeout_s, self._do, self._hurry)
        else:
            self._begin(operation)
        answer.set_result(Accepted(command_id=command_id, recipe=plan))

    def _check(self, request: CommandRequest) -> None:
        """Raises:
        RefusedError: the command is not possible now.
        """
        action, name = request.action, request.component
        whole = action == "restart" and name is None
        if action == "down":
            return
        if not name and not whole:
            raise RefusedError(
                422, f"{action} needs a component", f"one of: {', '.join(self.components)}"
            )
        if name and name not in self.components:
            raise self._unknown(name)
        if self.phase is Phase.STOPPING and action != "kill":
            fix = "wait until it has stopped" + (", or kill the component" if name else "")
            raise RefusedError(409, "the stack is being stopped", fix)
        if name:
            self._check_state(action, self.components[name])
        elif all(component.state.is_resting for component in self.components.values()):
            raise RefusedError(409, "nothing runs", "start the components that you need")
        if action not in ("start", "restart"):
            return  # stop and kill always win
        for other in self._by_hand():
            whose, wait = other.request.component, "wait until that command is done"
            if whole:
                raise RefusedError(
                    409, f"{other.action} of {whose or 'the stack'} is under way ({other.id})", wait
                )
            if name in {*other.stop, *other.start}:
                part_of = f"{other.action} {whose or 'of the stack'}"
                raise RefusedError(409, f"{name} is part of {part_of} ({other.id})", wait)

    def _check_state(self, action: Action, component: Component) -> None:
        name, state = component.name, component.state
        if action == "start" and not state.is_resting and state is not State.BACKOFF:
            wait = "wait until it is stopped, or " if state is State.STOPPING else ""
            raise RefusedError(409, f"{name} is {state} already", f"{wait}use: restart {name}")
        if action == "stop" and (state.is_resting or state is State.STOPPING):
            raise RefusedError(409, f"{name} is {state} already", "nothing to do")
        if action == "kill" and component.child is None:
            raise RefusedError(
                409,
                f"{name} has no process ({state})",
                f"use: stop {name}, if it must stay stopped",
            )

    def _unknown(self, name: str | None) -> RefusedError:
        return RefusedError(404, f"no component {name!r}", f"one of: {', '.join(self.components)}")

    def _by_hand(self) -> Iterator[Operation]:
        return (op for op in self._active() if op.by_hand and op.stage in ("stop", "start"))

    def _interrupted(self, name: str) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            self._hurry()
        else:
            reason = f"interrupted by {name}"
            self._end_run(RunResult(exit_code=Exit.INTERRUPTED, reason=reason, ended_by="signal"))

    def _out_of_time(self) -> None:
        """Save and stop before the job's time limit."""
        if self.phase is Phase.STOPPING:
            return
        plan = recipe(self.stack, "down", None)
        operation = Operation(
            new_id(), CommandRequest(action="down"), stop=list(plan.stop), status="running"
        )
        detail = "the job's time is almost up: the run saves and stops"
        self._record(operation.request, operation.id, "accepted", detail)
        result = RunResult(
            exit_code=Exit.INTERRUPTED, reason="the job's time limit", ended_by="time_limit"
        )
        self._end_run(result, operation)

    def _hurry(self) -> None:
        for component in self.components.values():
            component.hurry()

    def _active(self) -> list[Operation]:
        return [op for op in self.operations.values() if op.stage != "over"]

    def _begin(self, operation: Operation) -> None:
        self.operations[operation.id] = operation
        # Keep the last finished operations for `/commands/ID`.
        over = [op.id for op in self.operations.values() if op.stage == "over"]
        for command_id in over[: max(0, len(over) - KEPT_OPERATIONS)]:
            del self.operations[command_id]

    def _make_way(self, operation: Operation) -> None:
        """Let a user command end the backoffs that it touches."""
        touched = {*operation.stop, *operation.start}
        for other in self._active():
            # A start by hand does not wait for the backoff of an earlier crash.
            if touched & set(other.start):
                other.not_before = 0.0
                if operation.action == "stop":
                    other.start = [name for name in other.start if name not in touched]
        for name in touched:
            self._stopped_with.pop(name, None)
        if operation.action == "stop":
            for name in operation.stop:
                self._unwanted.add(name)
                if name != operation.request.component:
                    self._stopped_with[name] = operation.request.component or ""

    def _partners(self, action: str, component: str | None) -> set[str]:
        """Components that `action` on `component` may include now."""
        # Components that an operation is about to start count as running.
        held = {
            name for op in self._active() for name in op.start if op.holds(name)
        } - self._unwanted
        lives = {name for name in self.components if self._comes_along(name)} | held
        resting = {name for name, other in self._stopped_with.items() if other == component}
        return {"start": resting, "restart": lives | resting}.get(action, lives)

    def _finish(self, op: Operation, status: Literal["done", "failed"], detail: str = "") -> None:
        op.stage = "over"
        op.status, op.detail = status, detail
        if op.by_hand:
            self._record(op.request, op.id, status, detail)

    def _record(
        self,
        request: CommandRequest,
        command_id: str,
        status: Literal["accepted", "refused", "done", "failed"],
        detail: str,
    ) -> None:
        self.store.emit(
            CommandRecord(
                component=request.component,
                command_id=command_id,
                action=request.action,
                status=status,
                initiator=request.initiator,
                detail=detail,
            )
        )


def _attempts_so_far(folder: Path) -> int:
    """Last attempt number: a resumed run continues the count and overwrites no log."""
    latest = latest_attempt(folder)
    return int(latest.stem) if latest else 0
