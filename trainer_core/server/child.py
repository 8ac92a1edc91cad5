"""An inference server as this trainer's own child: started when nobody else has, ended with the trainer.

The child dies with the trainer even when that is killed: `contracts/parent_death.py` arms the kernel's signal before it
becomes the server.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from atropos_common import parent_death, ports
from atropos_common.run_dir import ENV_HELD_PORT, ENV_HOLD_GENERATION, ENV_TOKEN, ENV_WAIT_FOR_GO, GO_LINE
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone, Stopped, UsageError
from trainer_core.server.client import ServerClient

POLL_S = 0.1
GRACE_S = 20.0
"""From SIGTERM to SIGKILL; the server itself gives requests in flight two seconds."""
TAIL_LINES = 12
USAGE = 2
"""Exit code of a server that refuses its flags."""


class ServerChild:
    """`python -m vllm_server` at `vllm_port`, or whatever server of ours already runs there."""

    def __init__(
        self,
        config: TrainingConfig,
        stop: threading.Event,
        flags: Sequence[str] = (),
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
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
        self._inherited = {**env, **os.environ}

    @property
    def can_restart(self) -> bool:
        return not self._foreign

    def ensure(self) -> None:
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
        if self._process is None or (self._spare is not None and self._spare.poll() is None):
            return
        self._spare = self._spawn(waits=True)

    def restart(self, reason: str) -> None:
        if self._foreign:
            raise UsageError(
                f"{self.url} was started by somebody else, so it cannot be restarted from here: end it and let the "
                "trainer start its own, or run all with atropos-tui"
            )
        print(f"Restarting the server at {self.url}: {reason}")
        self._end()
        self._start()

    def close(self) -> None:
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
        engine = ServerClient(self.url, timeout_s=10.0)
        try:
            engine.info()
        except EngineError as error:
            raise UsageError(f"--vllm-port {self.config.vllm_port} is taken: {error}") from None
        except EngineGone as error:
            raise UsageError(
                f"--vllm-port {self.config.vllm_port} is taken by another program ({error}): choose another port, or "
                "end that program"
            ) from None
        finally:
            engine.close()
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
        deadline = time.monotonic() + self.config.engine_timeout
        engine = ServerClient(self.url, timeout_s=10.0)
        try:
            while True:
                if (code := process.poll()) is not None:
                    kind = UsageError if code == USAGE else EngineError
                    raise kind(f"the inference server ended with exit code {code}; {self._last_lines()}")
                try:
                    engine.info()
                    return
                except EngineGone as error:
                    if time.monotonic() > deadline:
                        raise EngineGone(
                            f"{error} (waited {self.config.engine_timeout:.0f} s); {self._last_lines()}"
                        ) from None
                if self.stop.wait(POLL_S):
                    raise Stopped
        finally:
            engine.close()

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
