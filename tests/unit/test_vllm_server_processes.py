"""How the engine process begins: by fork only where that is safe, and not before the server is told to go."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from vllm_server import processes
from vllm_server.config import prepare_environment

ONE = {"OMP_NUM_THREADS": "1", "ATROPOS_FORK_ENGINE": "1"}


@pytest.fixture
def task_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /proc/self/task, since a test process has threads of its own: one thread."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "comm").write_text("python\n")
    monkeypatch.setattr(processes, "TASKS", tmp_path)
    return tmp_path


def test_one_thread_and_an_untouched_gpu_may_fork(task_folder: Path) -> None:
    assert processes.why_not_fork(ONE, cpu=True) is None
    asked = {"ATROPOS_FORK_ENGINE": "1"}
    assert processes.why_not_fork(asked, cpu=False) is None, "on a GPU machine OpenMP has no say"


def test_openmp_on_the_cpu_may_not(task_folder: Path) -> None:
    assert processes.why_not_fork({}, cpu=True) == "OMP_NUM_THREADS is not 1"
    assert processes.why_not_fork({"OMP_NUM_THREADS": "2"}, cpu=True) == "OMP_NUM_THREADS is not 1"


@pytest.mark.parametrize("cpu", [True, False])
def test_threads_may_not_and_are_named(task_folder: Path, cpu: bool) -> None:
    for number, name in ((2, "ZMQbg/IO/0"), (3, "python")):
        (task_folder / str(number)).mkdir()
        (task_folder / str(number) / "comm").write_text(f"{name}\n")
    assert processes.why_not_fork(ONE, cpu=cpu) == "3 threads run already (ZMQbg/IO/0, python)"


def test_real_threads_are_counted() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert "threads run already" in (processes.why_not_fork(ONE, cpu=True) or "")
    finally:
        release.set()
        thread.join()


@pytest.mark.parametrize("cpu", [True, False])
def test_a_touched_gpu_may_not(task_folder: Path, monkeypatch: pytest.MonkeyPatch, cpu: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert processes.why_not_fork(ONE, cpu=cpu) == "CUDA is initialised"


@pytest.mark.parametrize("cpu", [True, False])
def test_the_user_may_forbid_it(task_folder: Path, cpu: bool) -> None:
    assert processes.why_not_fork(ONE | {"ATROPOS_FORK_ENGINE": "0"}, cpu=cpu) == "ATROPOS_FORK_ENGINE is not 1"


def test_on_a_gpu_it_has_to_be_asked_for(task_folder: Path) -> None:
    unset = {name: value for name, value in ONE.items() if name != "ATROPOS_FORK_ENGINE"}
    assert processes.why_not_fork(unset, cpu=True) is None
    assert processes.why_not_fork(unset, cpu=False) == "ATROPOS_FORK_ENGINE is not 1"


def test_on_a_gpu_machine_openblas_starts_no_threads_that_would_forbid_it() -> None:
    env: dict[str, str] = {}
    prepare_environment(env, cpu=False)
    assert env["OPENBLAS_NUM_THREADS"] == "1"
    kept = {"OPENBLAS_NUM_THREADS": "4"}
    prepare_environment(kept, cpu=False)
    assert kept["OPENBLAS_NUM_THREADS"] == "4"


FORKS = """
import multiprocessing, os, socket, time
from vllm_server import processes

listening = socket.create_server(("127.0.0.1", 0))
processes.prepare_fork(listening.fileno())
fork = multiprocessing.get_context("fork")

def grandchild():
    time.sleep(600)

def engine():
    own = fork.Process(target=grandchild)
    own.start()
    time.sleep(0.2)
    print("engine", os.getpid(), own.pid, os.readlink(f"/proc/self/fd/{listening.fileno()}"), flush=True)
    time.sleep(600)

fork.Process(target=engine).start()
time.sleep(600)
"""


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE, text=True)
    yield process
    for each in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
        each.kill()
    process.kill()
    process.communicate()


def test_a_forked_engine_dies_with_the_server_and_holds_no_port(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    name, engine, own, socket_is = server.stdout.readline().split()
    assert name == "engine" and socket_is == "/dev/null"
    child, grandchild = psutil.Process(int(engine)), psutil.Process(int(own))
    assert grandchild.is_running() and grandchild.status() != psutil.STATUS_ZOMBIE, "not ours to end"
    server.kill()
    server.wait()
    child.wait(5)
    grandchild.kill()


WAITS = """
import os, sys
from vllm_server import processes
went = processes.wait_for_go(os.environ, ["json.tool", "no.such.part"])
print(went, "json.tool" in sys.modules, os.environ.get("ATROPOS_WAIT_FOR_GO"))
"""


@pytest.mark.parametrize(("said", "answer"), [("go\n", "True"), ("", "False"), ("stop\n", "False")])
def test_a_server_that_waits_imports_first_and_goes_when_told(said: str, answer: str) -> None:
    environment = os.environ | {"ATROPOS_WAIT_FOR_GO": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WAITS], input=said, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [answer, "True", "None"], "a process that executes itself again does not wait again"


def test_others_do_not_wait_at_all() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WAITS], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False", "None"]
