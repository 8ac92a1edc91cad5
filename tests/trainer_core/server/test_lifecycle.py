"""Start and restart of the inference server: as the trainer's own child, and by the supervisor's
socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from atropos_common.protocol.control import Accepted, CommandRequest, CommandStatus, Recipe, Refusal
from atropos_common.system.run_dir import ENV_CONTROL_SOCKET, ENV_TOKEN
from tests.support.other_user import as_another_user, needs_another_user, other_user, squat
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone, Stopped, UsageError
from trainer_core.server import lifecycle as lifecycle_module
from trainer_core.server.client import ServerClient
from trainer_core.server.lifecycle import (
    Lifecycle,
    ServerChild,
    Supervised,
    make_lifecycle,
    wait_for_server,
)

CHILD = Path(__file__).with_name("engine_child.py")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def config(tmp_path: Path, **fields: Any) -> TrainingConfig:
    values = {
        "model_name": "m",
        "weight_bridge_mode": "lora_restart",
        "vllm_port": free_port(),
        "engine_timeout": 20,
        "log_dir": str(tmp_path / "logs"),
        **fields,
    }
    return TrainingConfig.model_validate(values)


class Child(ServerChild):
    """Starts the stand-in instead of vLLM."""

    wrong: list[str] = []  # noqa: RUF012

    def command(self) -> list[str]:
        return [sys.executable, str(CHILD), str(self.config.vllm_port), *self.wrong]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_CONTROL_SOCKET, raising=False)
    monkeypatch.setenv(ENV_TOKEN, "")
    monkeypatch.delenv(ENV_TOKEN)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    all_of_them: list[ServerChild] = []

    def make(*wrong: str, **fields: Any) -> Child:
        lifecycle = Child(config(tmp_path, **fields), threading.Event())
        lifecycle.wrong = list(wrong)
        all_of_them.append(lifecycle)
        return lifecycle

    yield make
    for each in all_of_them:
        each.close()


def instance(lifecycle: ServerChild) -> str:
    engine = ServerClient(lifecycle.url)
    try:
        info = engine.info()
        assert info.held, "a server without the trainer's weights serves nobody"
        return info.instance_id
    finally:
        engine.close()


def gone(pid: int, within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_a_child_is_started_once_restarted_and_ended(made: Any) -> None:
    lifecycle = made()
    lifecycle.ensure()
    first = instance(lifecycle)
    lifecycle.ensure()
    assert instance(lifecycle) == first and lifecycle.can_restart
    lifecycle.restart("for the test")
    second = instance(lifecycle)
    assert second != first and gone(int(first))
    lifecycle.close()
    assert gone(int(second))


def test_a_child_that_died_is_started_again(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lifecycle = made()
    lifecycle.ensure()
    first = int(instance(lifecycle))
    os.kill(first, signal.SIGKILL)
    assert gone(first)
    lifecycle.ensure()
    assert instance(lifecycle) != str(first)
    assert "has ended (exit code -9); starting it again" in capsys.readouterr().out


def test_what_it_leaves_behind_is_killed_too(made: Any, tmp_path: Path) -> None:
    lifecycle = made("--grandchild", str(tmp_path / "pid"))
    lifecycle.ensure()
    other = int((tmp_path / "pid").read_text())
    lifecycle.close()
    assert gone(other)


def test_a_stubborn_child_is_killed(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle_module, "STOP_GRACE_S", 0.2)
    lifecycle = made("--stubborn")
    lifecycle.ensure()
    pid = int(instance(lifecycle))
    lifecycle.close()
    assert gone(pid)


def test_the_server_dies_with_a_killed_trainer(tmp_path: Path) -> None:
    code = (
        "import sys, threading, time; from tests.trainer_core.server.test_lifecycle import Child;"
        "from trainer_core.config import TrainingConfig;"
        "c = Child(TrainingConfig.model_validate_json(sys.argv[1]), threading.Event()); c.ensure();"
        "print(c._process.pid, flush=True); time.sleep(600)"
    )
    settings = config(tmp_path).model_dump_json(exclude_unset=True)
    trainer = subprocess.Popen(
        [sys.executable, "-c", code, settings], stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    pid = int(next(line for line in iter(trainer.stdout.readline, "") if line.strip().isdecimal()))
    assert psutil.pid_exists(pid)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert gone(pid)


@pytest.mark.parametrize(("code", "kind"), [(2, UsageError), (1, EngineError)])
def test_a_server_that_does_not_start_is_shown_with_its_last_lines(
    made: Any, code: int, kind: type[Exception]
) -> None:
    with pytest.raises(
        kind, match=rf"exit code {code}; the last lines of .*vllm.log:\n .*\n .*--model is wrong"
    ):
        made("--exit", str(code)).ensure()


def test_a_port_of_another_program_is_refused(made: Any) -> None:
    lifecycle = made()
    with socket.create_server(("127.0.0.1", lifecycle.config.vllm_port)) as other:
        threading.Thread(
            target=lambda: other.accept()[0].close() or other.accept()[0].close(), daemon=True
        ).start()
        with pytest.raises(
            UsageError,
            match=f"--vllm-port {lifecycle.config.vllm_port} is taken by another program",
        ):
            lifecycle.ensure()


@pytest.mark.parametrize(("token", "works"), [("shared-token-1", True), ("another-token", False)])
def test_a_server_that_runs_already_is_used_with_the_token_and_left_alone(
    made: Any, token: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle = made()
    environment = {**os.environ, ENV_TOKEN: "shared-token-1", "ATROPOS_HOLD_GENERATION": "1"}
    other = subprocess.Popen(
        [sys.executable, str(CHILD), str(lifecycle.config.vllm_port)], env=environment
    )
    try:
        deadline = time.monotonic() + 10
        with socket.socket() as probe:
            while (
                probe.connect_ex(("127.0.0.1", lifecycle.config.vllm_port))
                and time.monotonic() < deadline
            ):
                time.sleep(0.02)
        monkeypatch.setenv(ENV_TOKEN, token)
        if not works:
            with pytest.raises(UsageError, match=f"is taken: .*403.*set {ENV_TOKEN}"):
                lifecycle.ensure()
            return
        lifecycle.ensure()
        assert instance(lifecycle) == str(other.pid) and not lifecycle.can_restart
        with pytest.raises(UsageError, match="was not started by this trainer"):
            lifecycle.restart("for the test")
        lifecycle.close()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.slow
@needs_another_user
def test_no_other_user_gets_the_port_between_two_servers(made: Any) -> None:
    lifecycle = made()
    lifecycle.ensure()
    with other_user(lambda: squat(lifecycle.config.vllm_port, 4.0)) as waiting:
        while waiting.waits():
            lifecycle.restart("for the test")
        assert waiting.said() == []
    lifecycle.close()
    assert as_another_user(lambda: squat(lifecycle.config.vllm_port, 2.0)) != [], (
        "with the trainer it is free again"
    )


def test_a_start_that_failed_can_be_tried_again(made: Any) -> None:
    """The port that is held from the first try on is no server of somebody else."""
    lifecycle = made("--exit", "1")
    for _ in range(2):
        with pytest.raises(EngineError, match="exit code 1"):
            lifecycle.ensure()
    assert lifecycle.can_restart


def test_a_stop_while_it_starts_ends_it(made: Any, tmp_path: Path) -> None:
    lifecycle = made()
    lifecycle.command = lambda: ["sleep", "600"]
    threading.Timer(0.3, lifecycle.stop.set).start()
    with pytest.raises(Stopped):
        lifecycle.ensure()
    assert lifecycle._process is None


def test_the_command_and_environment_are_the_same_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's compile cache is keyed by its arguments and its environment: a restart must find it
    again."""
    monkeypatch.setenv("VLLM_BRIDGE_CONFIG_PATH", "/somewhere/else.json")
    settings = config(
        tmp_path, vllm_gpu=1, gpu_memory_utilization=0.3, max_model_len=128, dtype="float32", seed=5
    )
    monkeypatch.setenv("MINE", "kept")
    env = {"MINE": "another", "ATROPOS_WEIGHT_UPDATES": "1"}
    lifecycle = make_lifecycle(settings, threading.Event(), flags=["--enable-lora"], env=env)
    assert isinstance(lifecycle, ServerChild)
    assert lifecycle.command() == lifecycle.command()
    assert lifecycle.command()[1:] == [
        "-P",
        "-m",
        "vllm_server",
        "--model",
        "m",
        "--host",
        "127.0.0.1",
        "--port",
        str(settings.vllm_port),
        "--dtype",
        "float32",
        "--seed",
        "5",
        "--gpu-memory-utilization",
        "0.3",
        "--max-model-len",
        "128",
        "--enable-lora",
    ]
    first = lifecycle._environment()
    # What torch sets in this process when it compiles something for the trainer.
    monkeypatch.setenv("TRITON_CACHE_DIR", "/tmp/torchinductor/triton/0")
    assert lifecycle._environment() == first and "TRITON_CACHE_DIR" not in first
    assert first["MINE"] == "kept" and first["ATROPOS_WEIGHT_UPDATES"] == "1"
    assert first["CUDA_VISIBLE_DEVICES"] == "1" and first["ATROPOS_HOLD_GENERATION"] == "1"
    assert (
        first["LOGDIR"] == str(tmp_path / "logs" / "vllm-bridge")
        and "VLLM_BRIDGE_CONFIG_PATH" not in first
    )


class Supervisor:
    """The control socket's three routes, on a real Unix socket."""

    def __init__(self, path: Path) -> None:
        self.engines = [("vllm", 9001), ("other", 9002)]
        self.state = "healthy"
        self.refuse = 0
        self.statuses: list[Any] = ["running", "done"]
        self.detail = ""
        self.commands: list[CommandRequest] = []
        supervisor = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(200, supervisor.look(self.path))

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                self._reply(*supervisor.take(CommandRequest.model_validate_json(raw)))

            def _reply(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def address_string(self) -> str:
                return "unix"

            def log_message(self, *args: object) -> None:
                pass

        class Server(HTTPServer):
            address_family = socket.AF_UNIX

            def server_bind(self) -> None:
                self.socket.bind(self.server_address)  # type: ignore[arg-type]

        self.server = Server(str(path), Handler)  # type: ignore[arg-type]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def look(self, path: str) -> str:
        import json

        if path.startswith("/commands/"):
            status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
            return CommandStatus(
                command_id="c1",
                action="restart",
                component="vllm",
                status=status,
                detail=self.detail,
            ).model_dump_json()
        parts = [
            {"name": name, "role": "engine", "state": self.state, "port": port}
            for name, port in self.engines
        ]
        run = {
            "run_id": "r",
            "name": "n",
            "mode": "m",
            "run_dir": "/r",
            "phase": "running",
            "started_at": 0.0,
        }
        return json.dumps(
            run
            | {"components": [{"name": "trainer", "role": "trainer", "state": "healthy"}, *parts]}
        )

    def take(self, request: CommandRequest) -> tuple[int, str]:
        self.commands.append(request)
        if self.refuse:
            self.refuse -= 1
            return 409, Refusal(
                error="vllm is part of restart vllm (x)", fix="wait"
            ).model_dump_json()
        recipe = Recipe(action="restart", component=request.component)
        return 202, Accepted(command_id="c1", recipe=recipe).model_dump_json()


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path / "s.sock")
    monkeypatch.setenv(ENV_CONTROL_SOCKET, str(tmp_path / "s.sock"))
    yield made
    made.server.shutdown()
    made.server.server_close()


def ask(tmp_path: Path, stop: threading.Event | None = None, **fields: Any) -> Lifecycle:
    lifecycle = make_lifecycle(
        config(tmp_path, **{"vllm_port": 9001, **fields}), stop or threading.Event()
    )
    assert isinstance(lifecycle, Supervised) and lifecycle.can_restart
    return lifecycle


def test_the_supervisor_restarts_the_engine_at_the_trainer_s_port(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    lifecycle = ask(tmp_path, vllm_port=9002)
    lifecycle.ensure()
    assert supervisor.commands == []
    supervisor.refuse = 2
    lifecycle.restart("a new adapter")
    assert [(c.action, c.component, c.initiator) for c in supervisor.commands] == [
        ("restart", "other", "trainer")
    ] * 3
    lifecycle.close()


def test_a_restart_that_fails_or_stands_still_says_so(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor.statuses, supervisor.detail = ["failed"], "stopped by hand"
    with pytest.raises(EngineGone, match="the restart of vllm failed: stopped by hand"):
        ask(tmp_path).restart("x")
    supervisor.statuses = ["running"]
    with pytest.raises(EngineGone, match="the restart of vllm is not done after 0 s"):
        ask(tmp_path, engine_timeout=0.3).restart("x")
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        ask(tmp_path, stop).restart("x")
    with pytest.raises(
        UsageError, match=r"this run has no engine there. Engines: vllm at 9001, other at 9002"
    ):
        ask(tmp_path, vllm_port=9003).restart("x")


def test_a_supervisor_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_CONTROL_SOCKET, str(tmp_path / "nobody.sock"))
    with pytest.raises(EngineGone, match="the supervisor does not answer /status"):
        ask(tmp_path).restart("x")


def test_time_does_not_run_while_the_supervisor_brings_the_engine_back(
    supervisor: Supervisor,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer_core.server.lifecycle.STATUS_EVERY_S", 0.05)
    stack = ask(tmp_path, vllm_port=9002)
    assert isinstance(stack, Supervised)
    supervisor.state = "backoff"
    began, tries = time.monotonic(), 0

    def ready() -> float:
        nonlocal tries
        tries += 1
        if time.monotonic() - began < 0.9:
            raise EngineGone("connection refused")
        return time.monotonic() - began

    assert wait_for_server(ready, 0.3, stack.stop, coming=stack.coming) >= 0.9
    assert (
        "Waiting for the inference server: other is backoff: connection refused"
        in capsys.readouterr().out
    )
    assert stack.coming("vllm") == "vllm is backoff", "a server that gets copies"
    assert stack.coming("judge") is None
    supervisor.state = "stopped"  # by hand: nobody brings it back

    def never() -> None:
        raise EngineGone("connection refused")

    with pytest.raises(EngineGone, match=r"connection refused \(waited 0 s\)"):
        wait_for_server(never, 0.3, stack.stop, coming=stack.coming)


def test_a_supervisor_that_does_not_answer_is_no_reason_to_wait_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_CONTROL_SOCKET, str(tmp_path / "nobody.sock"))
    stack = ask(tmp_path)
    assert isinstance(stack, Supervised) and stack.coming() is None
