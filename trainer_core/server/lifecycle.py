"""Start and restart the inference server: through the supervisor, or else as a child of this
trainer.

    lifecycle = make_lifecycle(config, stop, flags=["--enable-lora"])
    lifecycle.ensure() # without a supervisor: start one, unless one runs at vllm_port
    lifecycle.restart("new adapter") # returns when the new one answers, on hold, with the base
    model's weights
    lifecycle.close()                  # end the processes started here

A new server holds all requests until the trainer names its weight version.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from atropos_common.net import ports
from atropos_common.net.http import LIMITS, certificates
from atropos_common.protocol.bridge import ROUTING_FLAG, BridgeInfo
from atropos_common.protocol.control import (
    Accepted,
    CommandRequest,
    CommandStatus,
    ComponentStatus,
    Refusal,
    Role,
    RunStatus,
    State,
)
from atropos_common.system import parent_death
from atropos_common.system.run_dir import (
    ENV_CONTROL_SOCKET,
    ENV_HELD_PORT,
    ENV_HOLD_GENERATION,
    ENV_TOKEN,
)
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone, Stopped, UsageError
from trainer_core.server.client import ServerClient

POLL_S = 0.1
STATUS_EVERY_S = 1.0
"""Seconds between two status requests to the supervisor."""
ANSWER_S = 30.0
"""Timeout in seconds of the supervisor's answers, which are immediate except under load."""
GRACE_S = 20.0
"""Seconds from SIGTERM to SIGKILL; the server gives requests in flight two seconds."""
TAIL_LINES = 12
USAGE = 2
"""Exit code of a server that refuses its flags."""

T = TypeVar("T")
Answer = TypeVar("Answer", bound=BaseModel)


def wait_for_server(
    ready: Callable[[], T],
    timeout_s: float,
    stop: threading.Event,
    *,
    meanwhile: tuple[type[Exception], ...] = (EngineGone,),
    coming: Callable[[], str | None] = lambda: None,
) -> T:
    """Return the result of `ready` once it stops raising one of `meanwhile`; print each new reason
    for waiting.

    Args:
        coming: progress text of the supervisor ("vllm is starting"), or None if it does nothing.
            The timeout is suspended meanwhile, because the supervisor has its own limits.

    Raises:
        Exception: the last of `meanwhile`, after `timeout_s`.
        Stopped: `stop` is set.
    """
    deadline = time.monotonic() + timeout_s
    requested_at = 0.0
    printed = ""
    while True:
        try:
            return ready()
        except meanwhile as error:
            now = time.monotonic()
            if now - requested_at >= STATUS_EVERY_S:
                requested_at = now
                news = coming()
                # The supervisor is working on it, so the timeout starts again.
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
"""States in which the supervisor is bringing an engine up."""


class Supervised:
    """A server that the supervisor owns; restarts are requests to the supervisor."""

    can_restart = True

    def __init__(self, config: TrainingConfig, stop: threading.Event, socket: str) -> None:
        self.config = config
        self.stop = stop
        # The supervisor listens on a Unix socket, so the host name below is arbitrary.
        transport = httpx.HTTPTransport(uds=socket, limits=LIMITS, verify=certificates("http:"))
        self._http = httpx.Client(
            base_url="http://supervisor", transport=transport, timeout=ANSWER_S, trust_env=False
        )

    def ensure(self) -> None:
        """Do nothing: the supervisor starts the server, also after a crash."""

    def coming(self) -> str | None:
        """Describe how the supervisor brings up an engine that receives weights; None if it does
        not, or does not answer."""
        # Other engines of the run get no weights from this trainer.
        ports = {urlsplit(url).port for url in self.config.engine_urls}
        with suppress(EngineGone, EngineError):
            for engine in self._engines():
                if engine.port in ports and engine.state in ON_ITS_WAY:
                    return f"{engine.name} is {engine.state}" + (
                        f" ({engine.reason})" if engine.reason else ""
                    )
        return None

    def restart(self, reason: str) -> None:
        """Restart the server; return when it answers.

        Raises:
            UsageError: the run has no engine at `vllm_port`.
            EngineGone: the supervisor or the new server did not answer within `engine_timeout`, or
                another command or a crash interrupted the restart. A server may still come back.
            EngineError: the supervisor refuses.
            Stopped: `stop` is set.
        """
        name = self._component().name
        deadline = time.monotonic() + self.config.engine_timeout
        print(f"Asking the supervisor to restart {name}: {reason}")
        command = self._submit(name, deadline)
        while True:
            state = self._request("GET", f"/commands/{command}", CommandStatus)
            if state.status == "done":
                return
            if state.status == "failed":
                self._pause()  # if the stack is shutting down, this trainer gets its stop now
                raise EngineGone(
                    f"the restart of {name} failed: {state.detail or 'see atropos-tui why ' + name}"
                )
            self._wait_until(deadline, f"the restart of {name} is not done")

    def close(self) -> None:
        self._http.close()

    def _component(self) -> ComponentStatus:
        """The engine at `vllm_port`.

        Raises:
            UsageError: the run has no engine there.
        """
        engines = self._engines()
        engine = next((c for c in engines if c.port == self.config.vllm_port), None)
        if engine is None:
            ports = ", ".join(f"{c.name} at {c.port}" for c in engines) or "none"
            raise UsageError(
                f"--vllm-port {self.config.vllm_port}: this run has no engine there. Its "
                f"engines: {ports}"
            )
        return engine

    def _engines(self) -> list[ComponentStatus]:
        return [
            c
            for c in self._request("GET", "/status", RunStatus).components
            if c.role is Role.ENGINE
        ]

    def _submit(self, name: str, deadline: float) -> str:
        """Submit the restart and return the command's id; wait while another command on the engine
        runs."""
        request = CommandRequest(action="restart", component=name, initiator="trainer")
        while True:
            try:
                return self._request("POST", "/commands", Accepted, request).command_id
            except _Refused as refused:
                # 409: another command on the engine is running.
                if refused.status != 409:
                    raise EngineError(
                        f"the supervisor does not restart {name}: {refused}"
                    ) from None
                self._wait_until(deadline, f"the supervisor does not restart {name}: {refused}")

    def _wait_until(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise EngineGone(f"{what} after {self.config.engine_timeout:.0f} s (engine_timeout)")
        self._pause()

    def _pause(self) -> None:
        if self.stop.wait(POLL_S):
            raise Stopped

    def _request(
        self, method: str, path: str, kind: type[Answer], body: BaseModel | None = None
    ) -> Answer:
        """Send a request; raise _Refused for a refusal, EngineGone if the supervisor does not
        answer."""
        try:
            response = self._http.request(
                method, path, content=body.model_dump_json() if body else None
            )
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
    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        refusal = Refusal(error=f"HTTP {response.status_code}")
        with suppress(ValidationError):
            refusal = Refusal.model_validate_json(response.content)
        super().__init__(f"{refusal.error}; {refusal.fix}" if refusal.fix else refusal.error)


class ServerChild:
    """`python -m vllm_server` at `vllm_port` as a child of this trainer, or a server of ours that
    already runs there.

    The child dies with the trainer, even after SIGKILL: `atropos_common/system/parent_death.py`
    sets the kernel's parent-death signal before it executes the server.
    """

    def __init__(
        self,
        config: TrainingConfig,
        stop: threading.Event,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.stop = stop
        self.flags = list(flags)
        self.url = f"http://127.0.0.1:{config.vllm_port}"
        self.log = Path(config.log_dir).absolute() / "vllm.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._foreign = False
        self._port: socket.socket | None = None
        """Keeps the port bound, so that no other user takes it between two servers."""
        # A copy from before any compilation: torch later adds its cache folders to the environment,
        # and with those a server would miss its predecessor's compile cache.
        self._inherited = {**(env or {}), **os.environ}

    @property
    def can_restart(self) -> bool:
        """False for a server that this trainer did not start."""
        return not self._foreign

    def ensure(self) -> None:
        """Start the server unless one runs; return when it answers.

        Raises:
            UsageError: another program has the port, or the server refuses its flags.
            EngineError: the server ended during its start; includes its last log lines.
            EngineGone: it did not answer within `engine_timeout`.
            Stopped: `stop` is set.
        """
        if self._foreign or (self._process is not None and self._process.poll() is None):
            return
        if self._process is not None:
            print(f"The server has ended (exit code {self._process.returncode}); starting it again")
            self._end()
        elif self._server_exists():
            self._foreign = True
            print(f"Using the server that runs at {self.url}; this trainer cannot restart it")
            return
        self._start()

    def restart(self, reason: str) -> None:
        """End the server and start a new one; raises as `ensure` does.

        Raises:
            UsageError: this trainer did not start the server.
        """
        if self._foreign:
            raise UsageError(
                f"{self.url} was not started by this trainer, so it cannot restart it. fix: "
                f"end it and let the "
                "trainer start its own, or run the stack with atropos-tui"
            )
        print(f"Restarting the server at {self.url}: {reason}")
        self._end()
        self._start()

    def close(self) -> None:
        """End all processes started here."""
        self._end()
        if self._port is not None:
            self._port.close()
            self._port = None

    def _server_exists(self) -> bool:
        """True if a server of ours runs or starts at the port; otherwise the port is held from now
        on.

        Raises:
            UsageError: another program has the port.
        """
        try:
            with socket.create_connection(("127.0.0.1", self.config.vllm_port), timeout=5):
                pass
        except OSError:
            return not self._hold_port()  # bound but not listening: a server that loads its model
        try:
            with closing(ServerClient(self.url, timeout_s=10.0)) as engine:
                engine.info()
        except EngineError as error:
            raise UsageError(f"--vllm-port {self.config.vllm_port} is taken: {error}") from None
        except EngineGone as error:
            raise UsageError(
                f"--vllm-port {self.config.vllm_port} is taken by another program ({error}). "
                "fix: choose another port, or end that program"
            ) from None
        return True

    def _hold_port(self) -> bool:
        """Bind the port for our servers; return False if another process has it."""
        if self._port is None:
            with suppress(OSError):
                self._port = ports.hold(self.config.vllm_port)
        return self._port is not None

    def _start(self) -> None:
        self._process = self._spawn()
        print(f"Starting the inference server (pid {self._process.pid}), which logs to {self.log}")
        try:
            self._await(self._process)
        # Also after a stop: a server that does not answer must not stay behind.
        except BaseException:
            self._end()
            raise

    def _spawn(self) -> subprocess.Popen[bytes]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # Trainer and server read the same token from their environment; a restart keeps it.
        token = os.environ.setdefault(ENV_TOKEN, secrets.token_urlsafe(24))
        env = self._environment() | {ENV_TOKEN: token}
        with self.log.open("ab") as out:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    parent_death.__file__,
                    str(os.getpid()),
                    "",
                    *self.command(),
                ],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # A session of its own, so that one signal reaches all of vLLM's processes.
                start_new_session=True,
            )

    def command(self) -> list[str]:
        """Command line of the server."""
        config = self.config
        return [
            sys.executable,
            "-P",
            "-m",
            "vllm_server",
            "--model",
            config.model_name,
            "--host",
            "127.0.0.1",
            "--port",
            str(config.vllm_port),
            "--dtype",
            config.dtype,
            "--seed",
            str(config.seed),
            "--gpu-memory-utilization",
            str(config.gpu_memory_utilization),
            "--max-model-len",
            str(config.max_model_len),
            *self.flags,
            *([f"--{ROUTING_FLAG}"] if config.routing_replay else []),
        ]

    def _environment(self) -> dict[str, str]:
        # The same variables at every start, because they are part of vLLM's compile cache key.
        held = {ENV_HELD_PORT: str(self.config.vllm_port), ENV_HOLD_GENERATION: "1"}
        env = self._inherited | held | {"LOGDIR": str(self.log.with_name("vllm-bridge"))}
        # An inherited path would override LOGDIR.
        env.pop("VLLM_BRIDGE_CONFIG_PATH", None)
        if self.config.vllm_gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = str(self.config.vllm_gpu)
        return env

    def _await(self, process: subprocess.Popen[bytes]) -> None:

        def answers() -> BridgeInfo:
            if (code := process.poll()) is not None:
                # Wrong flags fail again at every start, so callers must not retry.
                kind = UsageError if code == USAGE else EngineError
                raise kind(
                    f"the inference server ended with exit code {code}; {self._last_lines()}"
                )
            return engine.info()

        with closing(ServerClient(self.url, timeout_s=10.0)) as engine:
            try:
                wait_for_server(answers, self.config.engine_timeout, self.stop)
            except EngineGone as error:
                raise EngineGone(f"{error}; {self._last_lines()}") from None

    def _last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return f"the last lines of {self.log}:\n  " + "\n  ".join(lines)

    def _end(self) -> None:
        """Stop the server, then kill its whole session, so that no process is left."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            # Only the server itself: it shuts its own workers down.
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                print(
                    f"The inference server (pid {process.pid}) did not end within "
                    f"{GRACE_S:.0f} s: killing it"
                )
        _kill_session(process)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    with suppress(ProcessLookupError):
        # Kills workers that outlived the server; the group may be empty by now.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


Lifecycle = Supervised | ServerChild
"""Owner of the server at `vllm_port`: the supervisor or this trainer."""


def make_lifecycle(
    config: TrainingConfig,
    stop: threading.Event,
    *,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Lifecycle:
    """The supervisor if there is one (`ATROPOS_CONTROL_SOCKET`), else a child of this process.

    Args:
        flags: of `python -m vllm_server` for a child, in addition to those from `config`.
        env: variables for a child that this process does not set.
    """
    return supervised(config, stop) or ServerChild(config, stop, flags, env)


def supervised(config: TrainingConfig, stop: threading.Event) -> Supervised | None:
    """The supervisor's server; None in a run without a supervisor."""
    socket = os.environ.get(ENV_CONTROL_SOCKET)
    return Supervised(config, stop, socket) if socket else None
