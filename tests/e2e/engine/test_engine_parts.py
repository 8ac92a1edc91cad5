"""An engine over two machines on real vLLM: two parts with an address each, gloo between their
workers.

pytest -m "e2e and slow" tests/e2e/engine/test_engine_parts.py
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atropos_common.system.run_dir import ENV_NODE_ADDRESS, ENV_TOKEN
from tests.e2e.engine.test_broadcast import trainer_of as broadcasting
from tests.e2e.engine.test_lora import EXACT, ask
from tests.e2e.engine.test_none import TWO_RANKS, UPDATES
from tests.e2e.engine.test_none import trainer_of as loading
from tests.e2e.small_models import TINY, make_model
from tests.e2e.vllm_server_live import (
    TOKEN,
    Server,
    await_ready,
    begin_server,
    end_of,
    still_running,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]
HOSTS = ("127.0.0.2", "127.0.0.3")
READY = "[vllm_server] ready after"


def begin_parts(folder: Path, model: Path) -> list[Server]:
    with socket.create_server((HOSTS[0], 0)) as probe:
        port = probe.getsockname()[1]
    words = (
        "--tensor-parallel-size",
        "2",
        "--nnodes",
        "2",
        "--master-addr",
        HOSTS[0],
        "--master-port",
        str(port),
    )
    begun = []
    for rank, address in enumerate(HOSTS):
        part = folder / f"part{rank}"
        part.mkdir()
        flags = (*words, "--node-rank", str(rank), *(["--headless"] if rank else []))
        env = {ENV_NODE_ADDRESS: address, "ATROPOS_TOKEN": TOKEN, "ATROPOS_RUN_DIR": str(folder)}
        begun.append(begin_server(part, model, flags=flags, **env, **UPDATES, **TWO_RANKS))
    return begun


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("parts")
    begun = begin_parts(folder, make_model(TINY, folder / "model"))
    try:
        await_ready(begun[0])
        yield begun
    finally:
        for part in begun:
            end_of(part.process)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_TOKEN, TOKEN)


def ended(part: Server, limit_s: float = 60.0) -> int | None:
    """The exit code, once it has one."""
    until = time.monotonic() + limit_s
    while part.process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    return part.process.poll()


def assert_gone(processes: list[psutil.Process]) -> None:
    """A worker notices within seconds that the others have ended."""
    until = time.monotonic() + 10
    while still_running(processes) and time.monotonic() < until:
        time.sleep(0.05)
    assert still_running(processes) == []


def test_a_broadcast_reaches_the_workers_of_both(parts: list[Server]) -> None:
    head, other = parts
    assert READY in other.log.read_text() and "part 2 of 2" in other.log.read_text()
    assert head.get("/bridge/info").json()["workers"] == 2
    assert all(len(psutil.Process(part.process.pid).children(recursive=True)) > 0 for part in parts)
    trainer = broadcasting(head)
    assert trainer.gap(ask(head.url), 0) < EXACT
    for version in (1, 2, 3):
        trainer.step()
        assert trainer.gap(ask(head.url), version) < EXACT
    assert trainer.gap(ask(head.url), 0) > EXACT, "the weights moved"
    trainer.sync.close()


def test_a_folder_is_loaded_by_the_workers_of_both(parts: list[Server]) -> None:
    trainer = loading(parts[0])
    for _ in range(2):
        trainer.step()
    assert trainer.gap(ask(parts[0].url), 2) < EXACT < trainer.gap(ask(parts[0].url), 0)
    trainer.sync.close()


def test_a_worker_that_dies_ends_its_part(parts: list[Server]) -> None:
    """The supervisor then ends the other one: by TERM the first leaves, whatever its workers wait
    for."""
    head, other = parts
    inside = psutil.Process(other.process.pid).children(recursive=True)
    worker = max(inside, key=lambda process: process.memory_info().rss)
    worker.kill()
    assert ended(other) == 1, other.log.read_text()[-3000:]
    assert "a worker died" in other.log.read_text()
    everyone = [*inside, *psutil.Process(head.process.pid).children(recursive=True)]
    head.process.send_signal(signal.SIGTERM)
    code = ended(head)
    assert code is not None, head.log.read_text()[-3000:]
    assert_gone(everyone)


def test_parts_that_are_told_to_end_leave_nothing(tmp_path: Path) -> None:
    begun = begin_parts(tmp_path, make_model(TINY, tmp_path / "model"))
    try:
        head, other = begun
        await_ready(head)
        everyone = [
            child
            for part in begun
            for child in psutil.Process(part.process.pid).children(recursive=True)
        ]
        for part in (other, head):
            part.process.send_signal(signal.SIGTERM)
        assert ended(other) == 0, other.log.read_text()[-3000:]
        assert ended(head) is not None, head.log.read_text()[-3000:]
        assert_gone(everyone)
    finally:
        for part in begun:
            end_of(part.process)
