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
    ENV_LOGDIR,
    ENV_TOKEN,
)
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone, Stopped, UsageError
from trainer_core.server.client import ServerClient

POLL_S = 0.1
STATUS_EVERY_S = 1.0
"""Seconds between status requests to the supervisor."""
SUPERVISOR_TIMEOUT_S = 30.0
"""Timeout in seconds of the supervisor's answers."""
STOP_GRACE_S = 20.0
"""Seconds from SIGTERM to SIGKILL."""
TAIL_LINES = 12
USAGE_CODE = 2
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
    """Return the result of `ready` once it raises none of `meanwhile`; print reasons for waiting.

    Args:
        coming: progress text of the supervisor, which suspends the timeout.

    Raises:
        Exception: the last of `meanwhile`, after `timeout_s`.
        Stopped: `stop` is set.
    """
    deadline = time.monotonic() + timeout_s
    requested_at = 0.0
    printed = ""  # each reason is printed once
    while True:
        try:
            return ready()
        except meanwhile as error:
            now = time.monotonic()
            if now - requested_at >= STATUS_EVERY_S:
                requested_at = now
                news = coming()
                # The supervisor is working on it under a limit of its own.
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
"""States in which the supervisor brings an engine up."""


class Supervised:
    """A server of the supervisor, which restarts it on request."""

    can_restart = True

    def __init__(self, config: TrainingConfig, stop: threading.Event, socket: str) -> None:
        self.config = config
        self.stop = stop
        # The supervisor listens on a Unix socket, so the host name below is arbitrary.
        transport = httpx.HTTPTransport(uds=socket, limits=LIMITS, verify=certificates("http:"))
        self._http = httpx.Client(
            base_url="http://supervisor",
            transport=transport,
            timeout=SUPERVISOR_TIMEOUT_S,
            trust_env=False,
        )

    def ensure(self) -> None:
        pass  # the supervisor starts the server, after a crash as well

    def coming(self, name: str | None = None) -> str | None:
        """Describe how the supervisor brings up the engine `name`, or one of `engine_urls`; None:
        it does not."""
        # Other engines of the run get no weights from this trainer.
        ports = {urlsplit(url).port for url in self.config.engine_urls}
        with suppress(EngineGone, EngineError):
            for engine in self._engines():
                wanted = engine.name == name if name else engine.port in ports
                if wanted and engine.state in ON_ITS_WAY:
                    reason = f" ({engine.reason})" if engine.reason else ""
                    return f"{engine.name} is {engine.state}{reason}"
        return None

    def restart(self, reason: str) -> None:
        """Restart the server; return when it answers.

        Raises:
            UsageError: the run has no engine at `vllm_port`.
            EngineGone: the restart failed or timed out; a server may still come back.
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
                detail = state.detail or f"see atropos-tui why {name}"
                raise EngineGone(f"the restart of {name} failed: {detail}")
            self._wait_until(deadline, f"the restart of {name} is not done")

    def close(self) -> None:
        self._http.close()

    def _component(self) -> ComponentStatus:
        engines = self._engines()
        engine = next((c for c in engines if c.port == self.config.vllm_port), None)
        if engine is None:
            ports = ", ".join(f"{c.name} at {c.port}" for c in engines) or "none"
            port = self.config.vllm_port
            raise UsageError(f"--vllm-port {port}: this run has no engine there. Engines: {ports}")
        return engine

    def _engines(self) -> list[ComponentStatus]:
        components = self._request("GET", "/status", RunStatus).components
        return [component for component in components if component.role is Role.ENGINE]

    def _submit(self, name: str, deadline: float) -> str:
        request = CommandRequest(action="restart", component=name, initiator="trainer")
        while True:
            try:
                return self._request("POST", "/commands", Accepted, request).command_id
            except _Refused as refused:
                what = f"the supervisor does not restart {name}: {refused}"
                # 409: another command on the engine is running.
                if refused.status != 409:
                    raise EngineError(what) from None
                self._wait_until(deadline, what)

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
        content = body.model_dump_json() if body else None
        try:
            response = self._http.request(method, path, content=content)
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
    """`python -m vllm_server` at `vllm_port`: a child of this trainer, or one that already runs."""

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
        # Keeps the port bound, so that no other user takes it between two servers.
        self._port: socket.socket | None = None
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
            EngineError: the server ended during its start.
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
        """Start a new server in place of the old; raises as `ensure` does."""
        if self._foreign:
            raise UsageError(
                f"{self.url} was not started by this trainer, so it cannot restart it. fix: end "
                "it and let the trainer start its own, or run the stack with atropos-tui"
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
        """Return True if a server of ours has the port; otherwise hold it."""
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
        # `parent_death` makes the kernel end the server with this trainer, even after SIGKILL.
        guard = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), ""]
        with self.log.open("ab") as out:
            return subprocess.Popen(
                [*guard, *self.command()],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # A session of its own, so that one signal reaches all of vLLM's processes.
                start_new_session=True,
            )

    def command(self) -> list[str]:
        config = self.config
        options = {
            "--model": config.model_name,
            "--host": "127.0.0.1",
            "--port": config.vllm_port,
            "--dtype": config.dtype,
            "--seed": config.seed,
            "--gpu-memory-utilization": config.gpu_memory_utilization,
            "--max-model-len": config.max_model_len,
        }
        command = [sys.executable, "-P", "-m", "vllm_server"]
        command += [str(word) for option in options.items() for word in option]
        routing = [f"--{ROUTING_FLAG}"] if config.routing_replay else []
        return [*command, *self.flags, *routing]

    def _environment(self) -> dict[str, str]:
        # The same variables at every start, because they are part of vLLM's compile cache key.
        held = {ENV_HELD_PORT: str(self.config.vllm_port), ENV_HOLD_GENERATION: "1"}
        env = self._inherited | held | {ENV_LOGDIR: str(self.log.with_name("vllm-bridge"))}
        # An inherited path would override LOGDIR.
        env.pop("VLLM_BRIDGE_CONFIG_PATH", None)
        if self.config.vllm_gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = str(self.config.vllm_gpu)
        return env

    def _await(self, process: subprocess.Popen[bytes]) -> None:

        def answers() -> BridgeInfo:
            if (code := process.poll()) is not None:
                # Wrong flags fail again at every start, so callers must not retry.
                kind = UsageError if code == USAGE_CODE else EngineError
                ended = f"the inference server ended with exit code {code}"
                raise kind(f"{ended}; {self._last_lines()}")
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
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            # Only the server itself: it shuts its own workers down.
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                late = f"did not end within {STOP_GRACE_S:.0f} s"
                print(f"The inference server (pid {process.pid}) {late}: killing it")
        with suppress(ProcessLookupError):
            # Kills workers that outlived the server; the group may be empty by now.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


Lifecycle = Supervised | ServerChild
"""Owner of the server at `vllm_port`."""


def make_lifecycle(
    config: TrainingConfig,
    stop: threading.Event,
    *,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Lifecycle:
    """Return the supervisor's server (`ATROPOS_CONTROL_SOCKET`), else a child of this process.

    `flags` and `env` are for a child, in addition to `config` and this environment.
    """
    return supervised(config, stop) or ServerChild(config, stop, flags, env)


def supervised(config: TrainingConfig, stop: threading.Event) -> Supervised | None:
    socket = os.environ.get(ENV_CONTROL_SOCKET)
    return Supervised(config, stop, socket) if socket else None
