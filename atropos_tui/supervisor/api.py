"""The control socket's HTTP routes, exactly as `atropos_common.control` names them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from atropos_common.control import CommandRequest, Phase, Refusal, Snapshot, State, WaitResult
from atropos_common.records import Record
from atropos_common.run_dir import RunDir
from atropos_tui.supervisor.logs import last_lines
from atropos_tui.supervisor.operations import RefusedError
from atropos_tui.supervisor.store import Subscription
from atropos_tui.supervisor.supervisor import Supervisor

MOST_LINES = 100_000


class Routes:
    """Answers requests from the supervisor's state; changes nothing but through `Supervisor.submit`."""

    def __init__(self, supervisor: Supervisor, run: RunDir) -> None:
        self._supervisor = supervisor
        self._run = run

    def app(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                Route("/status", self.status),
                Route("/events", self.events),
                Route("/commands", self.command, methods=["POST"]),
                Route("/commands/{command_id}", self.command_status),
                Route("/recipe", self.recipe),
                Route("/logs/{component}", self.logs),
                Route("/wait", self.wait),
            ]
        )

    async def status(self, _: Request) -> Response:
        usage = await self._supervisor.sampler.fresh()
        return answer(self._supervisor.status(usage))

    async def events(self, request: Request) -> Response:
        try:
            after = int(request.query_params["after"]) if "after" in request.query_params else None
        except ValueError:
            return refuse(422, Refusal(error="after must be a number", fix="leave it out to begin with now"))
        usage = await self._supervisor.sampler.fresh()
        store = self._supervisor.store
        status, live = store.hub.subscribe(lambda: self._supervisor.status(usage))
        missed = iter(()) if after is None else store.journal.between(after, status.seq)
        lines = self._lines(Snapshot(status=status), missed, live)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def _lines(self, snapshot: Snapshot, missed: Iterator[str], live: Subscription[Record]) -> AsyncIterator[str]:
        """Dropped subscribers see their connection break: `SubscriberDroppedError` leaves through here."""
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
            wanted = CommandRequest.model_validate_json(await request.body())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "body"
            return refuse(422, Refusal(error=f"{where}: {first['msg']}", fix="see CommandRequest in the contracts"))
        try:
            return answer(await self._supervisor.submit(wanted), 202)
        except RefusedError as error:
            return refuse(error.status, error.refusal)

    async def command_status(self, request: Request) -> Response:
        operation = self._supervisor.operations.get(request.path_params["command_id"])
        if operation is None:
            return refuse(404, Refusal(error=f"no command {request.path_params['command_id']!r}"))
        return answer(operation.as_status())

    async def recipe(self, request: Request) -> Response:
        try:
            wanted = CommandRequest.model_validate(dict(request.query_params))
            return answer(self._supervisor.recipe_for(wanted))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            return refuse(422, Refusal(error=f"{'.'.join(map(str, first['loc']))}: {first['msg']}"))
        except RefusedError as error:
            return refuse(error.status, error.refusal)

    async def logs(self, request: Request) -> Response:
        component = self._supervisor.components.get(request.path_params["component"])
        if component is None:
            known = ", ".join(self._supervisor.components)
            return refuse(404, Refusal(error=f"no component {request.path_params['component']!r}", fix=known))
        try:
            count = min(max(int(request.query_params.get("n", 100)), 0), MOST_LINES)
        except ValueError:
            return refuse(422, Refusal(error="n must be a number"))
        if not component.attempt:
            return PlainTextResponse("")
        lines = await asyncio.to_thread(last_lines, self._run.log(component.name, component.attempt), count)
        return PlainTextResponse("".join(line + "\n" for line in lines))

    async def wait(self, request: Request) -> Response:
        target = request.query_params.get("for", "ready")
        try:
            timeout = float(request.query_params["timeout"]) if "timeout" in request.query_params else None
        except ValueError:
            return refuse(422, Refusal(error="timeout must be a number of seconds"))
        if target not in ("ready", "done") and target not in self._supervisor.components:
            known = ", ".join(["ready", "done", *self._supervisor.components])
            return refuse(404, Refusal(error=f"nothing called {target!r} to wait for", fix=f"one of: {known}"))
        return answer(await wait_for(self._supervisor, target, timeout))


def answer(message: BaseModel, status: int = 200) -> Response:
    """A message as JSON."""
    return Response(message.model_dump_json(), status, media_type="application/json")


def refuse(status: int, refusal: Refusal) -> Response:
    """A refusal as JSON."""
    return answer(refusal, status)


async def wait_for(supervisor: Supervisor, target: str, timeout_s: float | None) -> WaitResult:
    """Wait until `target` (ready, done, a component's name) is reached, becomes impossible, or time is up."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
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
    if component is None and supervisor.ready():
        return WaitResult(outcome="reached", detail="every component is healthy or done")
    for one in [component] if component else supervisor.components.values():
        if one.state is State.FAILED:
            return WaitResult(outcome="impossible", detail=f"{one.name} failed: {one.reason}")
    if supervisor.phase in (Phase.STOPPING, Phase.ENDED):
        return WaitResult(outcome="impossible", detail=f"the run is {supervisor.phase}: {supervisor.reason}")
    return None


def _ended(supervisor: Supervisor) -> WaitResult | None:
    if supervisor.phase is not Phase.ENDED:
        return None
    detail = f"exit code {supervisor.exit_code}: {supervisor.reason}"
    return WaitResult(outcome="reached" if supervisor.exit_code == 0 else "impossible", detail=detail)


def _missing(supervisor: Supervisor, target: str) -> str:
    if target == "done":
        return f"the run is {supervisor.phase}"
    among = supervisor.components
    return "; ".join(
        f"{each.name} is {each.state}" + (f", waiting for {each.waiting_for}" if each.waiting_for else "")
        for each in ([among[target]] if target in among else among.values())
        if each.state not in (State.HEALTHY, State.COMPLETED)
    )


class _Server(uvicorn.Server):
    """Leaves signals to the supervisor."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiServer:
    """Serves the routes on a bound Unix socket, in the supervisor's event loop."""

    def __init__(self, supervisor: Supervisor, run: RunDir, listening: socket.socket) -> None:
        config = uvicorn.Config(
            Routes(supervisor, run).app(),
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def started(self, timeout_s: float = 10.0) -> None:
        """Return when requests are answered."""
        give_up = time.monotonic() + timeout_s
        while not self._server.started and not self._task.done() and time.monotonic() < give_up:
            await asyncio.sleep(0.005)
        if self._task.done():
            self._task.result()
        assert self._server.started, "the control socket did not start"

    async def stop(self) -> None:
        """Finish what is being answered (at most a second) and close."""
        self._server.should_exit = True
        await self._task
