"""Run a stack to its end: `await run_stack(stack)`, or in the background `detach(stack)`.

python -m atropos_tui.supervisor < stack.json      # what detach() starts: own session, SIGHUP ignored
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
import traceback
from pathlib import Path

from atropos_common.run_dir import ENV_TOKEN, RunDir
from atropos_tui.profile.spec import StackSpec, check_stack
from atropos_tui.supervisor import cgroup, keeper_launcher, leftovers, sockets
from atropos_tui.supervisor.api import ApiServer
from atropos_tui.supervisor.guarding import Guard
from atropos_tui.supervisor.keeper_launcher import Estate, KeeperLauncher
from atropos_tui.supervisor.launcher import DirectLauncher, Host, Launcher
from atropos_tui.supervisor.notify import Notifier
from atropos_tui.supervisor.process import become_subreaper
from atropos_tui.supervisor.store import Journal, OnEvent, ProcessTable, RunInUseError, RunResult, Store
from atropos_tui.supervisor.supervisor import EXIT_FAULT, EXIT_INTERRUPTED, Supervisor

GUARD_PATIENCE_S = 60.0
"""How long to wait for the guard of a supervisor that was killed; it gives up by itself after that time."""
SWITCH_S = 0.0005
"""Threads that read /proc or logs ask for the interpreter after every system call; while a flood is drained, each such
turn would take Python's default of 5 ms."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def run_stack(stack: StackSpec, *, on_event: OnEvent | None = None) -> int:
    """Run `stack` in this process; its exit code (0, 1, 3, 4, 130).

    SIGTERM and SIGINT stop the stack, a second one kills it. Must run in the main thread. `on_event` is called with
    every record after it was journaled, in order.

    Raises:
        StackError: the stack cannot be run as written.
        RunInUseError: another supervisor owns the run directory.
        SocketError: the control socket cannot be made safely.
    """
    sys.setswitchinterval(SWITCH_S)
    run = RunDir(Path(stack.run_dir))
    run.create()
    with _Signals() as signals, contextlib.closing(await _journal(run, stack.run_id)) as journal:
        check_stack(stack)
        store = Store(stack, journal, on_event)
        become_subreaper()
        estate = await asyncio.to_thread(keeper_launcher.claim, stack, run)
        run.result_json.unlink(missing_ok=True)
        return await _with_socket(stack, store, run, signals, estate)


async def _with_socket(stack: StackSpec, store: Store, run: RunDir, signals: _Signals, estate: Estate) -> int:
    listening, path = sockets.listen(run, estate.socket)
    lock, own = store.journal.fileno(), (path, run.control_sock)
    guard = Guard(stack.run_id, lock, group=_group(stack.run_id, estate), own=own, keep=stack.survive)
    api: ApiServer | None = None
    try:
        token = _token(estate)
        launcher = _launcher(stack, guard.group, str(path), token, estate)
        supervisor = Supervisor(store, Host(stack, guard, launcher, str(path), token, estate.table))
        api = ApiServer(supervisor, run, listening)
        await api.started()
        signals.attach(supervisor)
        notifier = Notifier(stack, store, lambda: supervisor.result)
        try:
            return (await supervisor.run()).exit_code
        except Exception:
            return _fault(supervisor, guard)
        finally:
            await notifier.close(RunResult.load(run.result_json))
    except asyncio.CancelledError:
        guard.end_keeping()
        RunResult(exit_code=EXIT_INTERRUPTED, reason="the supervisor was cancelled").write(run.result_json)
        raise
    finally:
        if not guard.keeps:
            leftovers.reap(stack.run_id, ProcessTable.load(run.journal_json))
        store.hub.close()
        if api is not None:
            await api.stop()
        sockets.close(listening, path, run)
        await guard.close()


async def _journal(run: RunDir, run_id: str) -> Journal:
    """The journal, once the guard of a supervisor that was killed here has finished."""
    give_up = time.monotonic() + GUARD_PATIENCE_S
    while True:
        try:
            return Journal(run.supervisor_jsonl, run_id)
        except RunInUseError:
            table = ProcessTable.load(run.journal_json)
            if table is None or leftovers.supervisor_alive(table) or time.monotonic() > give_up:
                raise
        await asyncio.sleep(0.02)


def _group(run_id: str, estate: Estate) -> str:
    """The run's control group: the one that adopted components are in, or a new one."""
    earlier = estate.table.group if estate.table else ""
    return earlier if cgroup.is_of(earlier, run_id) else cgroup.run_group(run_id)


def _launcher(stack: StackSpec, group: str, socket: str, token: str, estate: Estate) -> Launcher:
    if stack.survive:
        return KeeperLauncher(stack, group, socket, token, estate.heirs)
    return DirectLauncher(stack, group)


def _token(estate: Estate) -> str:
    """The run's token: the one that adopted components hold, the one of our own environment, or a new one."""
    if estate.token and ENV_TOKEN in os.environ:
        os.environ[ENV_TOKEN] = estate.token  # components inherit this environment
    return estate.token or os.environ.get(ENV_TOKEN) or secrets.token_urlsafe(32)


class _Signals:
    """While entered, signals to this process go to the supervisor; early ones wait for it, late ones do no harm."""

    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None
        self._early: list[str] = []

    def attach(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        for name in self._early:
            supervisor.interrupt(name)

    def _arrived(self, name: str) -> None:
        if self._supervisor is None:
            self._early.append(name)
        else:
            self._supervisor.interrupt(name)

    def __enter__(self) -> _Signals:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._arrived, signal.Signals(number).name)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def _fault(supervisor: Supervisor, guard: Guard) -> int:
    """A fault of ours: everything is ended, unless it shall survive us; the report lies beside the run."""
    report, run, run_id = traceback.format_exc(), supervisor.run_dir, supervisor.stack.run_id
    states = "\n".join(f"{each.name}: {each.state} {each.reason}" for each in supervisor.components.values())
    with contextlib.suppress(OSError):
        run.fault_txt.write_text(f"atropos-tui supervisor fault, run {run_id}\n\n{report}\n{states}\n")
    reason = f"a fault of the supervisor: {report.strip().splitlines()[-1]}; please report {run.fault_txt}"
    if guard.keeps:
        reason += f"; the components go on: atropos-tui up --resume {run.root} adopts them, atropos-tui clean ends them"
    else:
        leftovers.reap(run_id, ProcessTable.load(run.journal_json))
    result = RunResult(exit_code=EXIT_FAULT, reason=reason)
    result.write(run.result_json)
    supervisor.ended(result)
    return EXIT_FAULT
