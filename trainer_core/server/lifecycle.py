"""Who starts and restarts the inference server: the supervisor, else this trainer, with the server as its child.

    lifecycle = make_lifecycle(config, stop, flags=["--enable-lora"])
    lifecycle.ensure()                 # alone: start one, unless one runs at vllm_port
    lifecycle.restart("new adapter")   # returns when the new one answers; it is held, with the base model's weights
    lifecycle.close()                  # ends what was started here

Neither way gives the new server any weights: it serves nobody until its weight version is named.
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

from atropos_common import parent_death, ports
from atropos_common.bridge import ROUTING_FLAG, BridgeInfo
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
from atropos_common.http import LIMITS, certificates
from atropos_common.run_dir import (
    ENV_CONTROL_SOCKET,
    ENV_HELD_PORT,
    ENV_HOLD_GENERATION,
    ENV_TOKEN,
    ENV_WAIT_FOR_GO,
    GO_LINE,
)
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone, Stopped, UsageError
from trainer_core.server.client import ServerClient

POLL_S = 0.1
ASK_S = 1.0
"""Between two questions to the supervisor."""
ANSWER_S = 30.0
"""The supervisor answers commands at once; this is for a machine under load."""
GRACE_S = 20.0
"""From SIGTERM to SIGKILL; the server itself gives requests in flight two seconds."""
TAIL_LINES = 12
USAGE = 2
"""Exit code of a server that refuses its flags."""

T = TypeVar("T")
Answer = TypeVar("Answer", bound=BaseModel)


def wait_for_server(
    ready: Callable[[], T], timeout_s: float, stop: threading.Event, *,
    meanwhile: tuple[type[Exception], ...] = (EngineGone,), coming: Callable[[], str | None] = lambda: None,
) -> T:  # fmt: skip
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
        transport = httpx.HTTPTransport(uds=socket, limits=LIMITS, verify=certificates("http:"))
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
        """Return when the new server answers.

        Raises:
            UsageError: the run has no engine at `vllm_port`.
            EngineGone: the supervisor, or the new server, did not answer within `engine_timeout`; or the restart was
                overtaken by another command or a crash. A server may yet come back.
            EngineError: the supervisor refuses.
            Stopped: a stop was asked for meanwhile.
        """
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


class ServerChild:
    """`python -m vllm_server` at `vllm_port` as this trainer's child, or whatever server of ours already runs there.

    The child dies with the trainer even when that is killed: `atropos_common/parent_death.py` arms the kernel's signal
    before it becomes the server.
    """

    def __init__(
        self, config: TrainingConfig, stop: threading.Event, flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.stop = stop
        self.flags = list(flags)
        self.url = f"http://127.0.0.1:{config.vllm_port}"
        self.log = Path(config.log_dir).absolute() / "vllm.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._spare: subprocess.Popen[bytes] | None = None
        """The next server: it has imported what it needs, or does so now, and waits for `go`."""
        self._foreign = False
        self._port: socket.socket | None = None
        """Holds the port, so that no other user takes it between two servers."""
        # As it is now: torch puts the places of its own caches there as soon as the trainer compiles something, and a
        # server that took those over would find nothing of what the server before it compiled.
        self._inherited = {**(env or {}), **os.environ}

    @property
    def can_restart(self) -> bool:
        """False for a server that somebody else started."""
        return not self._foreign

    def ensure(self) -> None:
        """See to it that a server runs; cheap when one does. Returns when it answers.

        Raises:
            UsageError: the port belongs to another program, or the server refuses its flags.
            EngineError: the server ended while it started; with its last lines.
            EngineGone: it did not answer within `engine_timeout`.
            Stopped: a stop was asked for meanwhile.
        """
        if self._foreign or (self._process is not None and self._process.poll() is None):
            return
        if self._process is not None:
            print(f"The server started here has ended (exit code {self._process.returncode}); starting it again")
            self._end()
        elif self._somebody_else():
            self._foreign = True
            print(f"Using the server that runs at {self.url}; it is not restarted from here")
            return
        self._start()

    def prepare(self) -> None:
        """Start the next server, which waits: the next restart takes less time. Returns at once."""
        if self._process is None or (self._spare is not None and self._spare.poll() is None):
            return
        self._spare = self._spawn(waits=True)

    def restart(self, reason: str) -> None:
        """End the server and start it anew, with what `ensure` raises.

        Raises:
            UsageError: somebody else started it.
        """
        if self._foreign:
            raise UsageError(
                f"{self.url} was started by somebody else, so it cannot be restarted from here: end it and let the "
                "trainer start its own, or run all with atropos-tui"
            )
        print(f"Restarting the server at {self.url}: {reason}")
        self._end()
        self._start()

    def close(self) -> None:
        """End what was started here."""
        self._end()
        spare, self._spare = self._spare, None
        if spare is not None:
            _kill_session(spare)
        if self._port is not None:
            self._port.close()
            self._port = None

    def _somebody_else(self) -> bool:
        """Whether a server of ours runs at the port, or is being started there; if not, the port is held from here on.

        Raises:
            UsageError: another program has the port.
        """
        try:
            with socket.create_connection(("127.0.0.1", self.config.vllm_port), timeout=5):
                pass
        except OSError:
            return not self._hold_port()  # taken, not listening yet: a server that loads its model
        try:
            with closing(ServerClient(self.url, timeout_s=10.0)) as engine:
                engine.info()
        except EngineError as error:
            raise UsageError(f"--vllm-port {self.config.vllm_port} is taken: {error}") from None
        except EngineGone as error:
            raise UsageError(
                f"--vllm-port {self.config.vllm_port} is taken by another program ({error}): choose another port, or "
                "end that program"
            ) from None
        return True

    def _hold_port(self) -> bool:
        """Keep the port for our servers; False if somebody has it."""
        if self._port is None:
            with suppress(OSError):
                self._port = ports.hold(self.config.vllm_port)
        return self._port is not None

    def _start(self) -> None:
        self._process = self._released() or self._spawn()
        print(f"Starting the inference server (pid {self._process.pid}), which logs to {self.log}")
        try:
            self._await(self._process)
        except BaseException:
            self._end()
            raise

    def _spawn(self, *, waits: bool = False) -> subprocess.Popen[bytes]:
        """A new server process; one that `waits` imports its parts and goes no further before it is told."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # Both sides read it from their environment; a restart keeps it.
        token = os.environ.setdefault(ENV_TOKEN, secrets.token_urlsafe(24))
        env = self._environment() | {ENV_TOKEN: token} | ({ENV_WAIT_FOR_GO: "1"} if waits else {})
        with self.log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), "", *self.command()],
                env=env, stdin=subprocess.PIPE if waits else subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    def _released(self) -> subprocess.Popen[bytes] | None:
        """The server that waited, told to start; null when none waits."""
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        assert spare.stdin is not None
        try:
            with spare.stdin as pipe:
                pipe.write(GO_LINE)
        except BrokenPipeError:  # it has died, which says nothing about the next
            _kill_session(spare)
            return None
        return spare

    def command(self) -> list[str]:
        """What is executed."""
        config = self.config
        return [
            sys.executable, "-P", "-m", "vllm_server", "--model", config.model_name, "--host", "127.0.0.1",
            "--port", str(config.vllm_port), "--dtype", config.dtype, "--seed", str(config.seed),
            "--gpu-memory-utilization", str(config.gpu_memory_utilization),
            "--max-model-len", str(config.max_model_len), *self.flags,
            *([f"--{ROUTING_FLAG}"] if config.routing_replay else []),
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        # The same at every start, so that vLLM finds its compile cache again.
        held = {ENV_HELD_PORT: str(self.config.vllm_port), ENV_HOLD_GENERATION: "1"}
        env = self._inherited | held | {"LOGDIR": str(self.log.with_name("vllm-bridge"))}
        env.pop("VLLM_BRIDGE_CONFIG_PATH", None)
        env.pop(ENV_WAIT_FOR_GO, None)
        if self.config.vllm_gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = str(self.config.vllm_gpu)
        return env

    def _await(self, process: subprocess.Popen[bytes]) -> None:
        """Return when the new server answers."""

        def answers() -> BridgeInfo:
            if (code := process.poll()) is not None:
                kind = UsageError if code == USAGE else EngineError
                raise kind(f"the inference server ended with exit code {code}; {self._last_lines()}")
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
        """Let it stop, then kill its whole session; nothing of it is left after this."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                print(f"The inference server (pid {process.pid}) does not end within {GRACE_S:.0f} s: killing it")
        _kill_session(process)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


Lifecycle = Supervised | ServerChild
"""The server at `vllm_port`, and how it begins and ends."""


def make_lifecycle(
    config: TrainingConfig, stop: threading.Event, *, flags: Sequence[str] = (), env: Mapping[str, str] | None = None
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
