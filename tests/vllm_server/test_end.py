"""Why a server ended: by a signal, or because its engine died. vLLM serves and takes signals; the
engine is a stand-in."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from atropos_common.net.http import allowed_hosts
from atropos_common.protocol.manifest import CudaIpc, Manifest, Shard, TensorEntry, write_manifest
from vllm_server import app, flags
from vllm_server.auth import Access, AuthMiddleware, GenerationHold
from vllm_server.config import ConfigError, ServerConfig


class Engine:
    """One whose core process still runs, as that of a worker that was killed does for a while."""

    errored = True
    is_running = False
    vllm_config = SimpleNamespace(shutdown_timeout=0)
    engine_core = SimpleNamespace(
        resources=SimpleNamespace(
            engine_manager=SimpleNamespace(processes=[SimpleNamespace(exitcode=None)])
        )
    )

    def shutdown(self, timeout: float) -> None:
        pass


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """A server takes the signals of its process, and this one is the tests'."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@contextlib.asynccontextmanager
async def as_vllm(served: FastAPI) -> AsyncIterator[None]:
    """At its end vLLM's app has no state any more."""
    yield
    del served.state


def told_by(number: int) -> Callable[[FastAPI], None]:
    return lambda served: os.kill(os.getpid(), number)


def engine_dies(served: FastAPI) -> None:
    """Do what vLLM does when its engine has died."""
    served.state.server.should_exit = True


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (engine_dies, 1, "the engine died; its own log lines are above"),
        (told_by(signal.SIGTERM), 0, "stopped"),
        (told_by(signal.SIGINT), 0, "stopped"),
    ],
    ids=["the engine died", "SIGTERM", "SIGINT"],
)
async def test_only_a_server_that_was_told_to_end_ends_well(
    end: Callable[[FastAPI], None],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody has sent a request before."""
    engine, served = Engine(), FastAPI(lifespan=as_vllm)
    served.add_middleware(AuthMiddleware)
    served.state.engine_client = engine
    served.state.atropos_access = Access(
        "token",
        allowed_hosts(None),
        GenerationHold(held=False),
        signals=(signal.SIGTERM, signal.SIGINT),
    )

    @contextlib.asynccontextmanager
    async def start_engine(*_: Any) -> AsyncIterator[Engine]:
        yield engine

    async def build(*_: Any) -> FastAPI:
        return served

    async def end_when_it_serves() -> None:
        while not getattr(getattr(served.state, "server", None), "started", False):
            await asyncio.sleep(0.01)
        end(served)

    monkeypatch.setattr(app, "start_engine", start_engine)
    monkeypatch.setattr(app, "build", build)
    args = flags.parse_arguments(
        ["--model", "any", "--port", "0", "--distributed-executor-backend", "mp"]
    )
    config = ServerConfig.from_env({"LOGDIR": str(tmp_path)})
    ending = asyncio.create_task(end_when_it_serves())
    with caplog.at_level("INFO", logger="vllm_server.app"):
        assert await asyncio.wait_for(app.serve(config, args), timeout=30) == code
    await ending
    assert caplog.messages[-1] == words


def test_a_bridge_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = ServerConfig.from_env({"LOGDIR": str(tmp_path / "file" / "bridge")})
    with pytest.raises(ConfigError, match=r"file/bridge cannot be used [(]Not a directory"):
        app.prepare_bridge_dir(config)


@pytest.mark.parametrize("how", ["it ends", "the next one begins"])
def test_a_killed_trainer_leaves_no_counter(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch counts in /dev/shm who has an engine's memory open, and who was killed is counted for
    ever."""
    monkeypatch.setattr(app, "SHARED_MEMORY", tmp_path)
    with subprocess.Popen(["true"]) as ended:
        pass
    gone, here = ended.pid, os.getpid()
    mine, others = (
        (f"torch_{gone}_17_0", f"cuda.shm.{os.getuid()}.{gone:x}.1"),
        ("torch_1_2_3", "torch_x", "else"),
    )
    living = f"torch_{here}_17_0"
    for name in (*mine, *others, living):
        (tmp_path / name).touch()
    config = ServerConfig.from_env(
        {"LOGDIR": str(tmp_path / "run"), "VLLM_ENABLE_SHARED_WEIGHTS": "1"}
    )
    config.bridge_dir.mkdir(mode=0o700, parents=True)
    write_manifest(
        _offering(f"/{mine[0]}", f"/{living}", "/torch_x", "/../else"), config.manifest_path
    )
    (app.clean_up if how == "it ends" else app.prepare_bridge_dir)(config)
    assert not config.manifest_path.exists()
    assert {path.name for path in tmp_path.iterdir()} - {"run"} == {*others, living}


def _offering(*counters: str) -> Manifest:
    """Memory of a GPU, with torch's counters of these names."""
    entries = {
        f"p{number}": TensorEntry(
            shape=[2],
            stride=[1],
            dtype="float32",
            ipc_handle=CudaIpc(
                device=0,
                handle="",
                storage_bytes=8,
                storage_offset_bytes=0,
                ref_counter_handle=base64.b64encode(counter.encode()).decode(),
                ref_counter_offset=0,
                event_handle="",
                event_sync_required=True,
            ),
        )
        for number, counter in enumerate(counters)
    }
    return Manifest(
        model="m",
        architecture="A",
        config={},
        instance_id="i",
        server_pid=1,
        server_create_time=0.0,
        base_url="",
        vllm_version="0",
        tensor_parallel_size=1,
        ranks={0: Shard(kind="cuda_ipc", param_mappings=entries, views={})},
    )
