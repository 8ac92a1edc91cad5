"""Run a stack to its end, and serve its control socket meanwhile.

`python -m atropos_tui.supervisor < stack.json` does the same in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_common.net.body import BodyError, read_body
from atropos_common.net.connections import ConnectionLimits
from atropos_common.net.http import run_key
from atropos_common.protocol.control import (
    OTHER_RUN,
    RUN_ID_HEADER,
    CommandRequest,
    Phase,
    Refusal,
    Snapshot,
    State,
    WaitResult,
)
from atropos_common.system.run_dir import ENV_RUN_KEY, ENV_TOKEN, RunDir
from atropos_tui.cluster.remote_launcher import (
    RemoteLauncher,
    sweep_nodes,
    turn_of_job,
)
from atropos_tui.diagnoses.model import GUARD_DIES, NO_METRICS
from atropos_tui.errors import Exit
from atropos_tui.profile.spec import StackSpec, check_stack
from atropos_tui.supervisor.client import socket_path
from atropos_tui.supervisor.journal.run_lock import lock_run
from atropos_tui.supervisor.journal.store import (
    Journal,
    OnEvent,
    ProcessTable,
    RunResult,
    Store,
    Subscription,
    reserve,
)
from atropos_tui.supervisor.journal.tracker import reap_leftovers
from atropos_tui.supervisor.launchers.guard import Guard
from atropos_tui.supervisor.launchers.launcher import DirectLauncher, Host, Launcher
from atropos_tui.supervisor.notify import Notifier
from atropos_tui.supervisor.operations import RefusedError
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.processes.process import become_subreaper
from atropos_tui.supervisor.supervisor import Supervisor

SWITCH_S = 0.0005
"""Python's thread switch interval, in seconds. Threads that read /proc ask for the interpreter
after every system call; 5 ms each is slow while a log floods."""
THREADS = 6
"""Threads for blocking calls, started in advance."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
LARGEST_COMMAND = 1 << 20
"""Largest request body of a command, in bytes."""


async def run_stack(
    stack: StackSpec, *, on_event: OnEvent | None = None, lock: int | None = None
) -> int:
    """Run `stack` in this process; return its exit code (0, 1, 3, 4, 130).

    SIGTERM, SIGINT and a closed terminal stop the stack, a second signal kills it; in a SLURM job
    SIGUSR1 stops it too.
    Call it in the main thread.

    Args:
        on_event: called with every record, in order.
        lock: result of `lock_run`, closed at the end; None: lock here.

    Raises:
        StackError: the stack cannot run as configured.
        RunInUseError: another supervisor owns the run directory.
        SocketError: the control socket cannot be created safely.
    """
    sys.setswitchinterval(SWITCH_S)
    asyncio.get_running_loop().set_default_executor(ready_threads())
    run = RunDir(Path(stack.run_dir))
    run.create()
    with (
        _Signals() as signals,
        contextlib.closing(await _journal(run, stack.run_id, lock)) as journal,
    ):
        # The lock comes first: everything below writes into the run directory.
        check_stack(stack)
        store = Store(stack, journal, on_event)
        store.diagnoses.restore(list(journal.diagnoses()))
        # Before any child: orphans of components must become children of this process.
        become_subreaper()
        await asyncio.to_thread(_reap_earlier, stack.run_id, run)
        for name, found in (
            await asyncio.to_thread(sweep_nodes, ProcessTable.load(run.journal_json))
        ).items():
            store.emit(found.record(name))
        # A resumed run must not show the result of its earlier life.
        run.result_json.unlink(missing_ok=True)
        reserve(run.result_json)
        return await _with_socket(stack, store, run, signals)


def _reap_earlier(run_id: str, run: RunDir) -> None:
    """Kill what an earlier supervisor of this run directory left."""
    if (table := ProcessTable.load(run.journal_json)) is not None:
        reap_leftovers(table.run_id, table)
    reap_leftovers(run_id)


def ready_threads() -> ThreadPoolExecutor:
    """Pool of running threads: a machine out of processes starts no new one, and every end of a
    component needs one."""
    pool, all_run = ThreadPoolExecutor(THREADS, "supervisor"), threading.Barrier(THREADS)
    for _ in range(THREADS):
        pool.submit(all_run.wait)
    return pool


async def _with_socket(stack: StackSpec, store: Store, run: RunDir, signals: _Signals) -> int:
    listening, path = listen(run)
    lock, own = store.journal.fileno(), (path, run.control_sock)
    on_trouble = functools.partial(_report_guard, store)
    group = procfs.run_group(stack.run_id)
    guard = Guard(stack.run_id, lock, group=group, own=own, on_trouble=on_trouble)
    api: ApiServer | None = None
    figures: ApiServer | None = None
    try:
        token = os.environ.get(ENV_TOKEN) or secrets.token_urlsafe(32)
        _export_key(stack, token)
        launcher = _launcher(stack, guard.group, str(path), token)
        supervisor = Supervisor(store, Host(stack, guard, launcher, str(path), token))
        api = ApiServer(Routes(supervisor).app(), listening)
        await api.started()
        figures = await _serve_metrics(supervisor, run, token if stack.nodes else "")
        # Signals that came while the run was being set up are delivered now.
        signals.attach(supervisor)
        notifier = Notifier(stack, store, lambda: supervisor.result)
        try:
            return (await supervisor.run()).exit_code
        except Exception:
            return _fault(supervisor)
        finally:
            await notifier.close(RunResult.load(run.result_json))
    except asyncio.CancelledError:
        RunResult(exit_code=Exit.INTERRUPTED, reason="the supervisor was cancelled").write(
            run.result_json
        )
        raise
    finally:
        reap_leftovers(stack.run_id, ProcessTable.load(run.journal_json))
        # Close the hub first: open `/events` streams end, and the servers can stop.
        store.hub.close()
        for server in filter(None, (figures, api)):
            await server.stop()
        unlisten(listening, path, run)
        await guard.close()


def _launcher(stack: StackSpec, group: str, socket: str, token: str) -> Launcher:
    if any(spec.is_far for spec in stack.components):
        return RemoteLauncher(stack, group, socket, token)
    return DirectLauncher(stack, group)


def _report_guard(store: Store, trouble: str) -> None:
    fix = "see dmesg for what kills it; if the supervisor is killed too, run atropos-tui clean"
    found = GUARD_DIES.diagnosis(trouble, fix)
    store.diagnoses.add(None, found if trouble else found.ended("it is running again"))


async def _serve_metrics(supervisor: Supervisor, run: RunDir, token: str) -> ApiServer | None:
    """A port in use is a diagnosis and does not end the run."""
    policy = supervisor.stack.metrics
    if policy.port is None:
        return None
    from atropos_tui.supervisor.metrics import (
        listen_tcp,
        metrics_app,
    )  # imported only where `[metrics]` is on

    try:
        listening = await asyncio.to_thread(listen_tcp, policy)
    except OSError as error:
        evidence = f"{policy.host}:{policy.port}: {error.strerror or error}"
        fix = "free that port, or give [metrics] another, and start the run again with up --resume"
        supervisor.store.diagnoses.add(None, NO_METRICS.diagnosis(evidence, fix))
        return None
    gpus = supervisor.stack.gpu_count
    server = ApiServer(metrics_app(run, policy, token, supervisor.measured, gpus), listening)
    await server.started()
    return server


async def _journal(run: RunDir, run_id: str, lock: int | None) -> Journal:
    lock = await asyncio.to_thread(lock_run, run) if lock is None else lock
    return Journal(run.supervisor_jsonl, run_id, lock)


def _export_key(stack: StackSpec, token: str) -> None:
    """Put the key for servers that other machines reach into the environment."""
    os.environ.pop(ENV_RUN_KEY, None)  # it may belong to an enclosing run
    if stack.nodes:
        os.environ[ENV_RUN_KEY] = run_key(token)


class _Signals:
    """Pass signals to the supervisor while entered; keep those before `attach`."""

    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None
        self._early: list[str] = []
        self._numbers: tuple[signal.Signals, ...] = SIGNALS
        if turn_of_job():
            self._numbers += (signal.SIGUSR1,)
        # The terminal of a run in the foreground closes. `nohup`, and a supervisor in the
        # background, ignore the signal.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._numbers += (signal.SIGHUP,)

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
        for number in self._numbers:
            loop.add_signal_handler(number, self._arrived, signal.Signals(number).name)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)
        if signal.SIGUSR1 in self._numbers:
            # SLURM may still send it after the run's end, and its default action kills.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _fault(supervisor: Supervisor) -> int:
    """Handle an internal error: write the report, kill the components, write the result."""
    report, run, run_id = traceback.format_exc(), supervisor.run_dir, supervisor.stack.run_id
    states = "\n".join(
        f"{each.name}: {each.state} {each.reason}" for each in supervisor.components.values()
    )
    with contextlib.suppress(OSError):
        run.fault_txt.write_text(
            f"atropos-tui supervisor fault, run {run_id}\n\n{report}\n{states}\n",
            encoding="utf-8",
            errors="replace",
        )
    reason = (
        f"internal error of the supervisor: {report.strip().splitlines()[-1]}; please report "
        f"{run.fault_txt}"
    )
    reap_leftovers(run_id, ProcessTable.load(run.journal_json))
    result = RunResult(exit_code=Exit.FAULT, reason=reason)
    result.write(run.result_json)
    supervisor.ended(result)
    return Exit.FAULT


class Routes:
    """Routes of the control socket. They change state only through `Supervisor.submit`."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/status", self.status),
                Route("/events", self.events),
                Route("/commands", self.command, methods=["POST"]),
                Route("/commands/{command_id}", self.command_status),
                Route("/recipe", self.recipe),
                Route("/wait", self.wait),
            ],
            exception_handlers={RefusedError: refused},
            middleware=[Middleware(OnlyThisRun, run_id=self._supervisor.stack.run_id)],
        )

    async def status(self, _: Request) -> Response:
        return answer(await self._supervisor.measured())

    async def events(self, request: Request) -> Response:
        try:
            after = int(request.query_params["after"]) if "after" in request.query_params else None
        except ValueError:
            raise RefusedError(
                422, "after must be a number", "leave it out to begin with now"
            ) from None
        # Measured before the subscription, because it awaits.
        usage = await self._supervisor.sampler.fresh()
        store = self._supervisor.store
        # No await between the two calls: no record is lost or sent twice.
        live, status = store.hub.subscribe(), self._supervisor.status(usage)
        missed = iter(()) if after is None else store.journal.between(after, status.seq)
        lines = self._lines(Snapshot(status=status), missed, live)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def _lines(
        self, snapshot: Snapshot, missed: Iterator[str], live: Subscription
    ) -> AsyncIterator[str]:
        """Yield snapshot, missed and live records. `SubscriberDroppedError` passes, so the
        connection breaks."""
        try:
            yield snapshot.model_dump_json() + "\n"
            for line in missed:
                yield line
            async for record in live:
                yield record.to_line()
        finally:
            live.close()

    async def command(self, request: Request) -> Response:
        try:
            _, receive = await read_body(request.scope, request.receive, LARGEST_COMMAND)
        except BodyError as error:
            raise RefusedError(error.status, str(error)) from None
        body = await Request(request.scope, receive).body()
        return answer(await self._supervisor.submit(request_of(body)), 202)

    async def command_status(self, request: Request) -> Response:
        command_id = request.path_params["command_id"]
        if command_id not in self._supervisor.operations:
            raise RefusedError(404, f"no command {command_id!r}")
        return answer(self._supervisor.operations[command_id].as_status())

    async def recipe(self, request: Request) -> Response:
        return answer(self._supervisor.recipe_for(request_of(dict(request.query_params))))

    async def wait(self, request: Request) -> Response:
        target = request.query_params.get("for", "ready")
        try:
            timeout = (
                float(request.query_params["timeout"])
                if "timeout" in request.query_params
                else None
            )
            if timeout is not None and math.isnan(timeout):
                raise ValueError  # NaN never expires: `wait_for` would spin
        except ValueError:
            raise RefusedError(422, "timeout must be a number of seconds") from None
        if target not in ("ready", "done") and target not in self._supervisor.components:
            known = ", ".join(["ready", "done", *self._supervisor.components])
            raise RefusedError(404, f"nothing called {target!r} to wait for", f"one of: {known}")
        return answer(await wait_for(self._supervisor, target, timeout))


class OnlyThisRun:
    """Refuse a request for another run: the client has read another directory's run.json."""

    def __init__(self, app: ASGIApp, run_id: str) -> None:
        self._app, self._run_id = app, run_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        meant = Headers(scope=scope).get(RUN_ID_HEADER, self._run_id)
        app: ASGIApp = self._app
        if meant != self._run_id:
            app = answer(
                Refusal(error=f"this is the supervisor of {self._run_id}, not of {meant}"),
                OTHER_RUN,
            )
        await app(scope, receive, send)


def answer(message: BaseModel, status: int = 200) -> Response:
    return Response(message.model_dump_json(), status, media_type="application/json")


async def refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return answer(error.refusal, error.status)


def request_of(data: bytes | dict[str, str]) -> CommandRequest:
    """Parse a command from a request body or query.

    Raises:
        RefusedError: it is not valid.
    """
    try:
        if isinstance(data, bytes):
            return CommandRequest.model_validate_json(data)
        return CommandRequest.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise RefusedError(
            422, f"{where}: {first['msg']}", "see CommandRequest in the contracts"
        ) from None


async def wait_for(supervisor: Supervisor, target: str, timeout_s: float | None) -> WaitResult:
    """Wait until `target` is reached or impossible, or `timeout_s` passes."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        # Take the event before reading the state, or a change in between would be missed.
        changed = supervisor.store.changed
        found = _reached(supervisor, target)
        if found is not None:
            return found
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return WaitResult(outcome="timeout", detail=_missing(supervisor, target))
        try:
            await asyncio.wait_for(changed.wait(), left)
        except TimeoutError:
            continue


def _reached(supervisor: Supervisor, target: str) -> WaitResult | None:
    if target == "done":
        return _ended(supervisor)
    component = supervisor.components.get(target)
    if component is not None and component.state in (State.HEALTHY, State.COMPLETED):
        return WaitResult(outcome="reached", detail=f"{target} is {component.state}")
    # `component` is None for the target `ready`.
    if component is None and supervisor.ready():
        return WaitResult(outcome="reached", detail="every component is healthy or done")
    for one in [component] if component else supervisor.components.values():
        if one.state is State.FAILED:
            return WaitResult(outcome="impossible", detail=f"{one.name} failed: {one.reason}")
    if supervisor.phase in (Phase.STOPPING, Phase.ENDED):
        return WaitResult(
            outcome="impossible", detail=f"the run is {supervisor.phase}: {supervisor.reason}"
        )
    return None


def _ended(supervisor: Supervisor) -> WaitResult | None:
    if supervisor.phase is not Phase.ENDED:
        return None
    detail = f"exit code {supervisor.exit_code}: {supervisor.reason}"
    return WaitResult(
        outcome="reached" if supervisor.exit_code == 0 else "impossible", detail=detail
    )


def _missing(supervisor: Supervisor, target: str) -> str:
    if target == "done":
        return f"the run is {supervisor.phase}"
    among = supervisor.components
    return "; ".join(
        f"{each.name} is {each.state}"
        + (f", waiting for {each.waiting_for}" if each.waiting_for else "")
        for each in ([among[target]] if target in among else among.values())
        if each.state not in (State.HEALTHY, State.COMPLETED)
    )


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiServer:
    """Serves an application on a bound socket, in the supervisor's event loop."""

    def __init__(self, app: Starlette, listening: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=ConnectionLimits().protocol(),
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            # Event streams never end by themselves.
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def started(self, timeout_s: float = 10.0) -> None:
        """Return once the server answers."""
        give_up = time.monotonic() + timeout_s
        while not self._server.started and not self._task.done() and time.monotonic() < give_up:
            await asyncio.sleep(0.005)
        if self._task.done():
            self._task.result()
        assert self._server.started, "the socket did not start"

    async def stop(self) -> None:
        """Finish the responses in progress (at most one second) and close."""
        self._server.should_exit = True
        await self._task


def listen(run: RunDir) -> tuple[socket.socket, Path]:
    """Bind the run's socket (mode 0600) and point `RUN/control.sock` at it. A dead socket is
    replaced."""
    path = socket_path(run)
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The umask sets mode 0600 from the first moment; a chmod after `bind` would leave a gap.
    before = os.umask(0o177)
    try:
        server.bind(str(path))
    finally:
        os.umask(before)
    server.listen(128)
    server.setblocking(False)
    aside = run.control_sock.with_name(f".{run.control_sock.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    # A new link and a rename replace the old link atomically.
    aside.symlink_to(path)
    aside.replace(run.control_sock)
    return server, path


def unlisten(server: socket.socket, path: Path, run: RunDir) -> None:
    """Close the socket and remove both names."""
    server.close()
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        run.control_sock.unlink(missing_ok=True)
