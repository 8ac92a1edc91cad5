"""The supervisor: runs one stack to its end. Read `run`, then `_do` and `_reconcile`.

Whatever happens (an exit, a probe's verdict, a command, a timer) is one call, handled to its end before the next one:
helpers `post` it to the event loop. It changes a component by that component's own methods; then `_reconcile` looks at
what has become possible: stop the next one, start what its gates allow, finish commands, end the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from atropos_common.control import (
    Accepted,
    Action,
    CommandRequest,
    CommandStatus,
    Phase,
    Recipe,
    Refusal,
    RunStatus,
    State,
)
from atropos_common.records import CommandRecord
from atropos_common.run_dir import RunDir
from atropos_tui.diagnoses import Diagnosis, describe_exit
from atropos_tui.diagnoses.model import CANNOT_START
from atropos_tui.diagnoses.watcher import Watcher
from atropos_tui.errors import Exit
from atropos_tui.profile.recipes import recipe
from atropos_tui.supervisor import procfs
from atropos_tui.supervisor.component import SIGNALS, Component, Ended, look_again, stuck
from atropos_tui.supervisor.gauges import record_gauges
from atropos_tui.supervisor.launchers.launcher import Host, Usage, UsageSampler
from atropos_tui.supervisor.logs import latest_attempt
from atropos_tui.supervisor.process import LaunchError, describe
from atropos_tui.supervisor.store import RunResult, Store

KEPT_OPERATIONS = 200
RESULT_LINES = 40
SWEEP_S = 5.0
"""How often adopted zombies are collected and new sessions of members are told to the guard."""
TIME_LIMIT = signal.SIGUSR1.name
"""Signal that SLURM sends some minutes before the time limit of a job."""
STRAYS_S = 10.0
"""So long strays are killed again and again at the end; then they are named, and the result is written."""


class RefusedError(Exception):
    """A command that was not taken: HTTP status and the reason."""

    def __init__(self, status: int, error: str, fix: str = "") -> None:
        super().__init__(error)
        self.status = status
        self.refusal = Refusal(error=error, fix=fix)


@dataclass
class Operation:
    """One recipe on its way. `stop`: each gone before the next; `start`: all released together, gates order them."""

    id: str
    request: CommandRequest
    recipe: Recipe
    by_hand: bool = True
    """False for restarts by policy and for the end of the run: no command records."""
    why: str = ""
    """The reason to tell, where it is neither a command nor a crash."""
    stage: Literal["stop", "start", "settle", "over"] = "stop"
    stop: list[str] = field(default_factory=list)
    start: list[str] = field(default_factory=list)
    not_before: float = 0.0
    """Monotonic time before which nothing is started (backoff)."""
    attempt: int = 0
    """For `kill`: the attempt that shall end."""
    sent: bool = False
    """For `kill`: whether the signal went out."""
    status: Literal["accepted", "running", "done", "failed"] = "accepted"
    detail: str = ""

    @property
    def action(self) -> str:
        return self.request.action

    @property
    def own_id(self) -> str | None:
        """What its transitions carry as their command; None where nobody gave one."""
        return self.id if self.by_hand else None

    def holds(self, name: str) -> bool:
        """Whether `name` must not be started yet because of this operation."""
        return self.stage in ("stop", "start") and name in self.start

    def said(self) -> str:
        """The reason of what it makes happen."""
        if self.why:
            return self.why
        if self.action == "down":
            return "the stack is being stopped"
        whose = self.request.component or "the stack"
        who = {"user": "by hand", "trainer": "asked for by the trainer"}[self.request.initiator]
        return f"{self.action} of {whose} {who if self.by_hand else 'after its crash'}"

    def stopped_for(self, name: str) -> str:
        """What a component that it has stopped is told to have been stopped for."""
        if self.why:
            return f"stopped, since {self.why}"
        if self.action == "down":
            return "stopped with the stack"
        if self.action != "restart":
            return "stopped by hand" + ("" if name == self.request.component else f" with {self.request.component}")
        if not self.by_hand:
            return f"stopped, since {self.request.component} crashed"
        if self.request.initiator == "trainer":
            return "stopped for a restart, as the trainer asked"
        whose = self.request.component or "the stack"
        return "stopped for a restart by hand" + ("" if name == whose else f" of {whose}")

    def as_status(self) -> CommandStatus:
        return CommandStatus(
            command_id=self.id,
            action=self.action,
            component=self.request.component,
            status=self.status,
            detail=self.detail,
        )


class Supervisor:
    """Dependency gates, commands, restarts and the end of one run; what a component is in is the component's."""

    def __init__(self, store: Store, host: Host) -> None:
        stack = host.stack
        self.stack, self.store, self.host = stack, store, host
        self.run_dir = RunDir(Path(stack.run_dir))
        self.components = {
            spec.name: Component(spec, host, store, self, _attempts_so_far(self.run_dir.logs / spec.name))
            for spec in stack.components
        }
        self.operations: dict[str, Operation] = {}
        self.sampler = UsageSampler(host.tracker, host.gpus, host.launcher)
        self.phase = Phase.STARTING
        self.started_at = time.time()
        self.reason = ""
        self.exit_code: int | None = None
        self.result: RunResult | None = None
        """How the run ends, as soon as that is decided."""
        self._unwanted: set[str] = set()
        """Components that shall not run, since someone has stopped them by hand."""
        self._stopped_with: dict[str, str] = {}
        """Who was stopped by hand only because of another, and of whom: it comes back with that one."""
        self._interrupts = 0
        self._began = procfs.ticks_now()
        self._watcher = Watcher(stack, self.components)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun = asyncio.Event()
        self._over: asyncio.Future[None] = self._loop.create_future()

    # What others may call.

    async def submit(self, request: CommandRequest) -> Accepted:
        """Hand in a command; answered at once.

        Raises:
            RefusedError: it cannot be taken now.
        """
        await self._begun.wait()
        if self._over.done():
            raise RefusedError(409, "the run has ended", "start a new one: atropos-tui up PROFILE")
        answer: asyncio.Future[Accepted] = self._loop.create_future()
        self._do(self._command, request, answer)
        return await answer

    def interrupt(self, name: str) -> None:
        """A signal arrived: stop the stack; the second time, kill it. SIGUSR1 only announces SLURM's time limit."""
        if name == TIME_LIMIT:
            self.post(self._out_of_time)
        else:
            self.post(self._interrupted, name)

    def recipe_for(self, request: CommandRequest) -> Recipe:
        """What `request` would do.

        Raises:
            RefusedError: no such component.
        """
        try:
            among = self._partners(request.action, request.component)
            return recipe(self.stack, request.action, request.component, initiator=request.initiator, among=among)
        except KeyError:
            raise self._unknown(request.component) from None

    def status(self, usage: Mapping[str, Usage]) -> RunStatus:
        """Everything, as of the last record; `usage` is the sampler's newest."""
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
            components=[each.row(usage.get(each.name, Usage())) for each in self.components.values()],
            gpus=list(self.sampler.gpus),
            nodes=self.sampler.nodes(self.stack),
        )

    async def measured(self) -> RunStatus:
        """The status, with what the components use now."""
        usage = await self.sampler.fresh()
        return self.status(usage)

    def ready(self) -> bool:
        """Every long-running component is healthy or done, every one-shot step done."""
        return all(
            each.state is State.COMPLETED or (each.state is State.HEALTHY and not each.one_shot)
            for each in self.components.values()
        )

    # The run.

    async def run(self) -> RunResult:
        """Start everything, stay until the end, leave nothing behind."""
        urls = {spec.name: spec.url for spec in self.stack.components}
        gauges = record_gauges(self.run_dir.gauges_jsonl, self.measured, lambda: self._watcher.flows, urls)
        besides = [self.task(work) for work in (self._sweep_forever(), self._watcher.watch(), gauges)]
        try:
            self._do(self._take_over)
            self._begun.set()
            await self._over
        finally:
            for task in besides:
                task.cancel()
            await self._close()
        assert self.result is not None
        await self._end_strays()
        with contextlib.suppress(Exception):  # a fault of the diagnosing must not hide how the run ended
            await self._watcher.look()
        if self.result.exit_code == Exit.DONE:
            self.store.diagnoses.end_all("the run ended well")
        self.result.ended_at = time.time()
        self.result.write(self.run_dir.result_json)
        self.ended(self.result)
        return self.result

    def ended(self, result: RunResult) -> None:
        """Tell everyone that the run is over."""
        self.exit_code, self.reason, self.phase = result.exit_code, result.reason, Phase.ENDED
        self.store.notify()

    def post(self, act: Callable[..., None], *args: Any) -> None:
        """Call `act` soon, then look at what has become possible."""
        self._loop.call_soon(self._do, act, *args)

    def _do(self, act: Callable[..., None], *args: Any) -> None:
        if self._over.done():
            return
        try:
            act(*args)
            self._reconcile()
        except Exception as error:  # a fault of ours: `run` raises it
            self._over.set_exception(error)
            return
        resting = all(each.state.is_resting and each.child is None for each in self.components.values())
        if self.phase is Phase.STOPPING and resting:
            self._over.set_result(None)

    def task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` beside everything else; if it raises, so does `run`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._over.done():
            self._over.set_exception(error)

    async def _close(self) -> None:
        """Cancel what runs beside, and let go of what the components shared."""
        self.host.launcher.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.host.close()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            with contextlib.suppress(OSError):  # without a descriptor nobody is seen; the next look has one
                await self.host.survey()
            for component in self.components.values():
                component.note_progress()

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

    def _take_over(self) -> None:
        """Go on with what an earlier supervisor left; what its plan has changed is restarted, by its recipe."""
        inherited = self.host.launcher.inherited
        for component in self.components.values():
            if component.name in inherited:
                component.adopt()
            elif component.name in self.host.table.done:
                component.done_before()
        changed = [name for name, each in inherited.items() if each.changed]
        if changed:
            plans = [recipe(self.stack, "restart", name) for name in changed]
            touched = {name for plan in plans for name in (*plan.stop, *plan.start) if name in inherited}
            order = [name for name in self.components if name in touched]
            request = CommandRequest(action="restart", component=changed[0])
            why = f"the plan of {', '.join(changed)} has changed"
            self._begin(Operation(new_id(), request, plans[0], False, why, stop=order[::-1], start=order))

    # What has become possible.

    def _reconcile(self) -> None:
        seen = -2
        while seen != self.store.journal.seq:  # every step is a record: look again until nothing more happens
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
                self.components[name].release(op.said(), op.own_id)
            op.stage = "settle"
        if op.stage == "settle":
            started = [self.components[name] for name in op.start]
            lost = [
                each
                for each in started
                if each.state is State.FAILED or (each.name in self._unwanted and each.state.is_resting)
            ]
            if lost:
                self._finish(op, "failed", f"{lost[0].name} is {lost[0].state}: {lost[0].reason}")
            elif all(each.state in (State.HEALTHY, State.COMPLETED) for each in started):
                self._finish(op, "done")

    def _is_down(self, op: Operation, component: Component) -> bool:
        """Whether it is out of the way of `op`; if not, see to it. The caller stops at the first that is not."""
        if op.action == "kill":
            if component.child is None or component.attempt != op.attempt:
                return True
            if not op.sent:
                component.kill(op.own_id)
                op.sent = True
            return False
        if component.child is not None:
            component.stop(op.own_id, op.said())
            return False
        if op.action == "stop":
            # What it has read by then may not be what is there at the next start.
            self.host.launcher.drop_next(component.name)
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

    # An attempt is over: what follows.

    def on_gone(self, component: Component, ended: Ended) -> None:
        """Nothing of an attempt is left: it is down for good, or is started again."""
        end = ended.lost or describe_exit(ended.exit_code)
        stopping = self.phase is Phase.STOPPING
        spec, outcome = component.spec, ended.outcome
        if outcome == "timeout":
            self._fail(component, Exit.TIMEOUT, component.reason)
        elif outcome == "stopped" or stopping or self._is_being_stopped(component):
            clean = ended.exit_code == 0 and not outcome and stopping
            said = self._stopped_how(component, ended) if outcome == "stopped" else end
            component.rest(State.COMPLETED if clean else State.STOPPED, said)
        elif outcome == "crash":
            self._crash(component, component.reason, ended)
        elif outcome == "killed":
            self._crash(component, "killed by command", ended)
        elif ended.exit_code == 0 and (component.one_shot or spec.ends_run or spec.restart.policy != "always"):
            component.rest(State.COMPLETED, end)
            if spec.ends_run:
                reason = f"{component.name} finished"
                self._end_run(RunResult(exit_code=Exit.DONE, reason=reason, component=component.name))
        else:
            self._crash(component, end, ended)

    def on_port_taken(self, component: Component, found: Diagnosis) -> None:
        """A stranger holds its port and did not let it go."""
        if component.state is State.PENDING and component.name not in self._unwanted:
            component.diagnose(found)
            self._fail(component, Exit.COMPONENT_FAILED, f"{found.title}: {found.evidence}")

    def _is_being_stopped(self, component: Component) -> bool:
        return any(op.stage == "stop" and op.action != "kill" and component.name in op.stop for op in self._active())

    def _stopped_how(self, component: Component, ended: Ended) -> str:
        """Words for a stop that was asked for; the exit code only where it is not what the stop signal gives."""
        number = SIGNALS[component.spec.stop.signal]
        op = next((op for op in self._active() if op.stage == "stop" and component.name in op.stop), None)
        said = op.stopped_for(component.name) if op else "stopped with the stack"
        if ended.killed:
            return f"{said}; {ended.killed} killed after the grace"
        usual = ended.exit_code in (0, -number, 128 + number)
        return said if usual else f"{said}; {describe_exit(ended.exit_code)}"

    def _crash(self, component: Component, reason: str, ended: Ended) -> None:
        if ended.diagnosis:
            component.diagnose(ended.diagnosis, ending=True)
        delay, why_not = component.delay_after_crash(ended.error, usage=ended.usage)
        if delay is None:
            self._fail(component, Exit.COMPONENT_FAILED, f"{reason}; {why_not}")
            return
        again_at = time.monotonic() + delay
        plan = recipe(self.stack, "restart", component.name)
        partners = [name for name in plan.stop if name != component.name and self._comes_along(name)]
        component.back_off(delay, reason)
        request = CommandRequest(action="restart", component=component.name)
        start = [name for name in plan.start if name == component.name or name in partners]
        self._begin(Operation(new_id(), request, plan, False, stop=partners, start=start, not_before=again_at))
        self._loop.call_later(delay + 0.001, self._do, look_again)

    def _comes_along(self, name: str) -> bool:
        return name not in self._unwanted and not self.components[name].state.is_resting

    def _fail(self, component: Component, code: int, reason: str) -> None:
        lines = component.log.tail(RESULT_LINES) if component.log else []
        component.rest(State.FAILED, reason)
        name, found = component.name, component.found
        said = f"{found.title} ({reason})" if found and found.title not in reason else reason
        if not said.startswith(f"{name} "):
            said = f"{name}: {said}"
        self._end_run(RunResult(exit_code=code, reason=said, component=name, last_lines=lines))

    def _end_run(self, result: RunResult, operation: Operation | None = None) -> None:
        """Begin the end; whoever came first decides how it is told."""
        if self.phase is Phase.STOPPING:
            if operation:
                self._begin(operation)
            if self.result and self.result.ended_by == "time_limit" and result.ended_by in ("command", "signal"):
                self.result, self.reason = result, result.reason  # else the job would be queued again
            return
        self.result = result
        self.host.end()
        self.phase, self.reason = Phase.STOPPING, result.reason
        for other in self._active():
            self._finish(other, "failed", "the run is ending")
        plan = recipe(self.stack, "down", None)
        request = CommandRequest(action="down")
        self._begin(operation or Operation(new_id(), request, plan, False, stop=list(plan.stop)))

    # Commands.

    def _command(self, request: CommandRequest, answer: asyncio.Future[Accepted]) -> None:
        command_id = new_id()
        try:
            self._check(request)
        except RefusedError as refused:
            self._record(request, command_id, "refused", refused.refusal.error)
            answer.set_exception(refused)
            return
        plan = self.recipe_for(request)
        operation = Operation(command_id, request, plan, stop=list(plan.stop), start=list(plan.start))
        if request.action == "kill":  # the rest is what follows from the crash
            operation.stop, operation.start = plan.stop[:1], []
        if request.component:
            operation.attempt = self.components[request.component].attempt
        self._record(request, command_id, "accepted", plan.note)
        operation.status = "running"
        self._make_way(operation)
        if request.action == "down":
            by_hand = RunResult(exit_code=Exit.INTERRUPTED, reason="stopped by command", ended_by="command")
            self._end_run(by_hand, operation)
            if request.timeout_s is not None:
                self._loop.call_later(request.timeout_s, self._do, self._hurry)
        else:
            self._begin(operation)
        answer.set_result(Accepted(command_id=command_id, recipe=plan))

    def _check(self, request: CommandRequest) -> None:
        """Let a command pass that can be taken now.

        Raises:
            RefusedError: it cannot.
        """
        action, name = request.action, request.component
        whole = action == "restart" and not name
        if action == "down":
            return
        if not name and not whole:
            raise RefusedError(422, f"{action} needs a component", f"one of: {', '.join(self.components)}")
        if name and name not in self.components:
            raise self._unknown(name)
        if self.phase is Phase.STOPPING and action != "kill":
            fix = "wait for its end" + (", or kill the component" if name else "")
            raise RefusedError(409, "the stack is being stopped", fix)
        if name:
            self._check_state(action, self.components[name])
        elif all(component.state.is_resting for component in self.components.values()):
            raise RefusedError(409, "nothing runs", "start the components that shall run")
        if action not in ("start", "restart"):
            return  # stop and kill always win
        for other in self._by_hand():
            whose, wait = other.request.component, "wait until that command is done"
            if whole:
                raise RefusedError(409, f"{other.action} of {whose or 'the stack'} is under way ({other.id})", wait)
            if name in {*other.stop, *other.start}:
                told = f"{other.action} {whose or 'of the stack'}"
                raise RefusedError(409, f"{name} is part of {told} ({other.id})", wait)

    def _check_state(self, action: Action, component: Component) -> None:
        name, state = component.name, component.state
        if action == "start" and not state.is_resting and state is not State.BACKOFF:
            wait = "wait until it is stopped, or " if state is State.STOPPING else ""
            raise RefusedError(409, f"{name} is {state} already", f"{wait}use: restart {name}")
        if action == "stop" and (state.is_resting or state is State.STOPPING):
            raise RefusedError(409, f"{name} is {state} already", "nothing to do")
        if action == "kill" and component.child is None:
            raise RefusedError(409, f"{name} has no process ({state})", f"use: stop {name}, if it shall stay down")

    def _unknown(self, name: str | None) -> RefusedError:
        return RefusedError(404, f"no component {name!r}", f"one of: {', '.join(self.components)}")

    def _by_hand(self) -> Iterator[Operation]:
        """Commands that are stopping components, or about to start some."""
        return (op for op in self._active() if op.by_hand and op.stage in ("stop", "start"))

    def _interrupted(self, name: str) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            self._hurry()
        else:
            reason = f"interrupted by {name}"
            self._end_run(RunResult(exit_code=Exit.INTERRUPTED, reason=reason, ended_by="signal"))

    def _out_of_time(self) -> None:
        """The time limit of the job is near: save and stop, unless the run is being stopped already."""
        if self.phase is Phase.STOPPING:
            return
        plan = recipe(self.stack, "down", None)
        operation = Operation(new_id(), CommandRequest(action="down"), plan, stop=list(plan.stop), status="running")
        said = "the job's time is almost up: the run saves and stops"
        self._record(operation.request, operation.id, "accepted", said)
        result = RunResult(exit_code=Exit.INTERRUPTED, reason="the job's time limit", ended_by="time_limit")
        self._end_run(result, operation)

    def _hurry(self) -> None:
        for component in self.components.values():
            component.hurry()

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
                self._unwanted.add(name)
                if name != operation.request.component:
                    self._stopped_with[name] = operation.request.component or ""

    def _partners(self, action: str, component: str | None) -> set[str]:
        """Components that `action` on `component` can take along, in the state that they are in now."""
        held = {name for op in self._active() for name in op.start if op.holds(name)} - self._unwanted
        lives = {name for name in self.components if self._comes_along(name)} | held
        resting = {name for name, whose in self._stopped_with.items() if whose == component}
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


def new_id() -> str:
    return secrets.token_hex(4)


def _attempts_so_far(folder: Path) -> int:
    """A resumed run goes on counting, so that no log is overwritten and telemetry tells its attempts apart."""
    latest = latest_attempt(folder)
    return int(latest.stem) if latest else 0
