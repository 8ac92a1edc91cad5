"""A profile with small stand-ins for its four programs: real processes, real gates, a run of a
second."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.cli.start import up
from atropos_tui.profile.spec import StackSpec
from benchmarks.support.nursery import ForkedProcess
from tests.support import nursery

# A stack has two of them, and `http.server` alone would be most of what each costs.
SERVER = """
import _thread, os, socket, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
if "LOGDIR" in os.environ:
    os.makedirs(os.environ["LOGDIR"], exist_ok=True)
    with open(os.path.join(os.environ["LOGDIR"], "vllm_bridge_config.json"), "w") as file:
        file.write("{}")
def answer(connection):
    with connection:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.0 200 OK" + bytes([13, 10]) * 2 + b"{}")
held = os.environ.get("ATROPOS_HELD_PORT") == str(port)
server = socket.create_server(("127.0.0.1", port), backlog=64, reuse_port=held)
while True:
    _thread.start_new_thread(answer, (server.accept()[0],))
"""

TRAINER = """
import json, os, pathlib, sys, time
steps = int(sys.argv[sys.argv.index("--training-steps") + 1])
seconds = float(os.environ.get("STEP_S", "0.05"))
root = pathlib.Path(os.environ["ATROPOS_RUN_DIR"])
attempt, component = int(os.environ["ATROPOS_ATTEMPT"]), os.environ["ATROPOS_COMPONENT"]
stage = {"kind": "stage", "stage": "attached", "attempt": attempt, "component": component,
         "time": time.time()}
(root / f"stages.{component}.jsonl").open("a").write(json.dumps(stage) + chr(10))
number = 0
with (root / "telemetry.jsonl").open("a", buffering=1) as file:
    def say(kind, step, **fields):
        global number
        record = {"kind": kind, "seq": number, "step": step, "time": time.time(), **fields}
        file.write(json.dumps(record) + chr(10))
        number += 1
    for step in range(1, steps + 1):
        if os.environ.get("FAIL_AT") == str(step):
            raise SystemExit("the loss is not a number")
        time.sleep(seconds)
        say("step", step, loss=0.1, reward_mean=step / steps, reward_std=0.1, lr=1e-4,
            grad_norm=1.0, ratio_mean=1.0, clip_fraction=0.0, tokens=100, sequences=8,
            weight_version=step)
        say("timing", step, step_s=seconds, data_wait_s=0.0, train_s=seconds, sync_s=0.0,
            checkpoint_s=0.0, tokens_per_s=100 / seconds)
    say("checkpoint", steps, path="final_model", seconds=0.1, bytes=2_000_000_000)
"""


MAKE = """
import os, time
os.makedirs("MODEL.part")
time.sleep(0.3)
open("MODEL.part/config.json", "w").write("{}")
os.rename("MODEL.part", "MODEL")
"""

PROGRAMS = {
    "vllm_server/__main__.py": SERVER,
    "trainer_core/__main__.py": TRAINER,
    "atropos_api/__main__.py": SERVER,
    "env.py": "import time\ntime.sleep(600)\n",
}


def fork_supervisors(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Commands that run in this process have their supervisors forked, for to start one is most of
    what such a run costs; a command in a process of its own starts them as ever."""

    def start(run: RunDir, stack: StackSpec, lock: int | None) -> ForkedProcess:
        if lock is not None:
            os.close(lock)
        return nursery.supervisor(
            stack.model_dump_json(), Path(tempfile.mkdtemp(prefix="supervisor-", dir=folder))
        )

    monkeypatch.setattr(up, "_start_supervisor", start)


def write_profile(
    folder: Path, name: str, *, gpus: list[int] | None = None, ports: tuple[int, int]
) -> Path:
    """`name`.toml in `folder`; a folder with packages of the same names brings the stand-ins in."""
    for path, code in PROGRAMS.items():
        program = folder / "programs" / path
        for package in (program.parent, program.parent.parent):
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").touch()
        program.write_text(code)
    programs, model = json.dumps(str(folder / "programs")), json.dumps(str(folder / "model"))
    make = json.dumps(MAKE.replace("MODEL", str(folder / "model")))
    path = folder / f"{name}.toml"
    path.write_text(f"""
name = "{name}"
model = {model}
[[prepare]]
name = "make"
command = ["python", "-c", {make}]
creates = {model}
[api]
port = {ports[0]}
env.PYTHONPATH = {programs}
[env]
script = {json.dumps(str(folder / "programs" / "env.py"))}
[vllm]
port = {ports[1]}
gpus = {gpus or []}
env.PYTHONPATH = {programs}
[trainer]
device = "{"cuda" if gpus else "cpu"}"
training_steps = 6
env.PYTHONPATH = {programs}
""")
    return path
