"""Who starts and restarts the inference server: the supervisor, else this trainer, with the server as its child.

    lifecycle = make_lifecycle(config, stop, flags=["--enable-lora"])
    lifecycle.ensure()                 # alone: start one, unless one runs at vllm_port
    lifecycle.restart("new adapter")   # returns when the new one answers; it is held, with the base model's weights
    lifecycle.close()                  # ends what was started here

Neither way gives the new server any weights: it serves nobody until its weight version is named.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from atropos_common.control import (
    Accepted,
    CommandRequest,
    CommandStatus,
    ComponentStatus,
    Refusal,
    Role,
    RunStatus,
    State,
)
from atropos_common.http import LIMITS
from atropos_common.run_dir import ENV_CONTROL_SOCKET
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone, Stopped, UsageError
from trainer_core.server.child import ServerChild

POLL_S = 0.1
ASK_S = 1.0
"""Between two questions to the supervisor."""
ANSWER_S = 30.0
"""The supervisor answers commands at once; this is for a machine under load."""

T = TypeVar("T")
Answer = TypeVar("Answer", bound=BaseModel)


class Lifecycle(Protocol):
    """The server at `vllm_port`, and how it begins and ends."""

    @property
    def can_restart(self) -> bool:
        """False for a server that somebody else started, where there is no supervisor to ask."""
        ...

    def ensure(self) -> None:
        """See to it that somebody starts a server; cheap when one runs. Alone, returns when the own child answers.

        Raises:
            UsageError: the port belongs to another program, or the server refuses its flags.
            EngineError: the server ended while it started; with its last lines.
            Stopped: a stop was asked for meanwhile.
        """
        ...

    def prepare(self) -> None:
        """Let the next restart take less time, where that can be done now; returns at once."""
        ...

    def restart(self, reason: str) -> None:
        """End the server, start it anew, return when the new one answers.

        Raises:
            UsageError: it cannot be restarted from here (see `can_restart`).
            EngineGone: the supervisor, or the new server, did not answer within `engine_timeout`; or the restart was
                overtaken by another command or a crash. A server may yet come back.
            EngineError: the supervisor refuses, or the own child ended while it started.
            Stopped: a stop was asked for meanwhile.
        """
        ...

    def close(self) -> None:
        """End a server that was started here."""
        ...


def make_lifecycle(
    config: TrainingConfig,
    stop: threading.Event,
    *,
    flags: Sequence[str] = (),
    env: Mapping[str, str] = MappingProxyType({}),
) -> Lifecycle:
    """The supervisor's where there is one (`ATROPOS_CONTROL_SOCKET`), else a child of this process.

    Args:
        flags: of `python -m vllm_server`, beyond what `config` says, for an own child.
        env: variables of an own child, where this process has none of that name.
    """
    return supervised(config, stop) or ServerChild(config, stop, flags, env)


def supervised(config: TrainingConfig, stop: threading.Event) -> Supervised | None:
    """The server of a run with a supervisor; null where there is none to ask."""
    socket = os.environ.get(ENV_CONTROL_SOCKET)
    return Supervised(config, stop, socket) if socket else None


def wait_for_server(
    ready: Callable[[], T],
    timeout_s: float,
    stop: threading.Event,
    *,
    meanwhile: tuple[type[Exception], ...] = (EngineGone,),
    coming: Callable[[], str | None] = lambda: None,
) -> T:
    """What `ready` returns once it no longer raises one of `meanwhile`; why it waits is printed once for each reason.

    Args:
        coming: what somebody who sees to the server says of it ("vllm is starting"). The time does not run while he
            does: he has limits of his own. Null: nobody sees to it.

    Raises:
        Exception: the last of `meanwhile`, after `timeout_s`.
        Stopped: `stop` was set.
    """
    deadline = time.monotonic() + timeout_s
    asked = 0.0
    printed = ""
    while True:
        try:
            return ready()
        except meanwhile as error:
            now = time.monotonic()
            if now - asked >= ASK_S:
                asked = now
                news = coming()
                deadline = max(deadline, now + timeout_s) if news else deadline
                reason = f"{news}: {error}" if news else str(error)
                if reason != printed:
                    printed = reason
                    print(f"Waiting for the inference server: {reason}")
            if now > deadline:
                raise type(error)(f"{error} (waited {timeout_s:.0f} s)") from None
        if stop.wait(POLL_S):
            raise Stopped


ON_ITS_WAY = (State.PENDING, State.STARTING, State.STOPPING, State.BACKOFF)
"""States in which the supervisor sees to it that an engine comes."""


class Supervised:
    """A server that the supervisor owns: it starts and restarts it, and this asks for it."""

    can_restart = True

    def __init__(self, config: TrainingConfig, stop: threading.Event, socket: str) -> None:
        self.config = config
        self.stop = stop
        transport = httpx.HTTPTransport(uds=socket, limits=LIMITS)
        self._http = httpx.Client(base_url="http://supervisor", transport=transport, timeout=ANSWER_S, trust_env=False)

    def ensure(self) -> None:
        """Nothing to do: the supervisor starts it, and again after a crash."""

    def coming(self) -> str | None:
        """What the supervisor does to bring a server (back) that gets weights, in words; null when it does nothing, or
        does not say."""
        ports = {urlsplit(url).port for url in self.config.engine_urls}
        with suppress(EngineGone, EngineError):
            for engine in self._engines():
                if engine.port in ports and engine.state in ON_ITS_WAY:
                    return f"{engine.name} is {engine.state}" + (f" ({engine.reason})" if engine.reason else "")
        return None

    def prepare(self) -> None:
        """Nothing to do: only the supervisor starts processes, and it starts one when the one before has ended."""

    def restart(self, reason: str) -> None:
        name = self._component().name
        deadline = time.monotonic() + self.config.engine_timeout
        print(f"Asking the supervisor to restart {name}: {reason}")
        command = self._submit(name, deadline)
        while True:
            state = self._ask("GET", f"/commands/{command}", CommandStatus)
            if state.status == "done":
                return
            if state.status == "failed":
                self._pause()  # a stack that is being stopped tells its trainer so in a moment
                raise EngineGone(f"the restart of {name} failed: {state.detail or 'see atropos-tui why ' + name}")
            self._in_time(deadline, f"the restart of {name} is not done")

    def close(self) -> None:
        self._http.close()

    def _component(self) -> ComponentStatus:
        """The engine at `vllm_port`.

        Raises:
            UsageError: the run has none there.
        """
        engines = self._engines()
        engine = next((c for c in engines if c.port == self.config.vllm_port), None)
        if engine is None:
            ports = ", ".join(f"{c.name} at {c.port}" for c in engines) or "none"
            raise UsageError(f"--vllm-port {self.config.vllm_port}: no engine of this run is there; it has {ports}")
        return engine

    def _engines(self) -> list[ComponentStatus]:
        return [c for c in self._ask("GET", "/status", RunStatus).components if c.role is Role.ENGINE]

    def _submit(self, name: str, deadline: float) -> str:
        """The command's id; while another command on the engine is under way, wait for its end."""
        request = CommandRequest(action="restart", component=name, initiator="trainer")
        while True:
            try:
                return self._ask("POST", "/commands", Accepted, request).command_id
            except _Refused as refused:
                if refused.status != 409:
                    raise EngineError(f"the supervisor does not restart {name}: {refused}") from None
                self._in_time(deadline, f"the supervisor does not restart {name}: {refused}")

    def _in_time(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise EngineGone(f"{what} after {self.config.engine_timeout:.0f} s (engine_timeout)")
        self._pause()

    def _pause(self) -> None:
        if self.stop.wait(POLL_S):
            raise Stopped

    def _ask(self, method: str, path: str, kind: type[Answer], body: BaseModel | None = None) -> Answer:
        """Raises _Refused; EngineGone when the supervisor does not answer."""
        try:
            response = self._http.request(method, path, content=body.model_dump_json() if body else None)
        except httpx.TransportError as error:
            detail = str(error) or type(error).__name__
            raise EngineGone(f"the supervisor does not answer {path} ({detail})") from None
        if response.status_code >= 400:
            raise _Refused(response)
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise EngineError(f"the supervisor's {path}: {error.errors()[0]['msg']}") from None


class _Refused(EngineError):
    """The supervisor's refusal."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        refusal = Refusal(error=f"HTTP {response.status_code}")
        with suppress(ValidationError):
            refusal = Refusal.model_validate_json(response.content)
        super().__init__(f"{refusal.error}; {refusal.fix}" if refusal.fix else refusal.error)
