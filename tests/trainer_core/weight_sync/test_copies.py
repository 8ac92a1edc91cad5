"""Servers on the trainer's GPU beside the one in single copy."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from atropos_common.protocol.manifest import ManifestError, write_manifest
from tests.trainer_core.stand_ins import Engine, plain_model, run_config
from trainer_core.errors import EngineGone, UsageError
from trainer_core.ranks.world import World
from trainer_core.server.client import ServerClient
from trainer_core.weight_sync.base import Start, WeightSync, make_sync
from trainer_core.weight_sync.further_servers import SingleCopyAndOthers

CPU = torch.device("cpu")


def _further(folder: Path, base: Path) -> Iterator[Engine]:
    """Another server of the same model, whose weights were lost."""
    folder.mkdir()
    made = Engine(folder, plain_model(base))
    for tensor in made.tensors.values():
        tensor.zero_()
    yield made
    made.close()


@pytest.fixture
def beside(tmp_path: Path, base: Path, engine: Engine) -> Iterator[Engine]:
    yield from _further(tmp_path / "beside", base)


@pytest.fixture
def third(tmp_path: Path, base: Path, engine: Engine) -> Iterator[Engine]:
    yield from _further(tmp_path / "third", base)


def sync_of(
    engine: Engine, *further: Engine, base: Path, folder: Path, **fields: Any
) -> WeightSync:
    paths = [str(each.manifest_path) for each in further]
    config = run_config(engine, base, folder, copy_config_paths=paths, **fields)
    return make_sync(config, CPU, threading.Event())


def assert_equal(engine: Engine, beside: Engine) -> None:
    for name, tensor in engine.tensors.items():
        assert torch.equal(tensor, beside.tensors[name]), name


def test_each_version_is_copied_while_the_server_is_paused(
    engine: Engine, beside: Engine, base: Path, tmp_path: Path
) -> None:
    sync = sync_of(engine, beside, base=base, folder=tmp_path, in_flight="keep")
    assert isinstance(sync, SingleCopyAndOthers)
    model = sync.attach(Start(version=3))
    assert_equal(engine, beside)
    assert [each.base_url for each in sync.engines] == [engine.url, beside.url]
    assert beside.version == 3 and beside.calls[-2:] == ["/bridge/pause", "/bridge/resume"]

    def write() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)

    report = sync.publish(4, write)
    assert report.moved and report.phases["copy"] > 0
    assert_equal(engine, beside)
    assert (engine.version, beside.version) == (4, 4) and not beside.paused
    sync.close()


@pytest.mark.parametrize("what", ["pause", "resume"])
def test_all_servers_pause_and_resume_at_once(
    engine: Engine,
    beside: Engine,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    """A pause waits for the engine's step under way, and a resume for a busy server."""
    sync = sync_of(engine, beside, base=base, folder=tmp_path)
    sync.attach(Start())
    meeting, one = threading.Barrier(2, timeout=20), getattr(ServerClient, what)

    def both(self: ServerClient, *args: Any, **how: Any) -> Any:
        meeting.wait()
        return one(self, *args, **how)

    monkeypatch.setattr(ServerClient, what, both)
    sync.publish(1, lambda: None)
    assert (engine.version, beside.version) == (1, 1) and not beside.paused
    sync.close()


def test_a_server_that_pauses_late_keeps_no_other_paused(
    engine: Engine,
    beside: Engine,
    third: Engine,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sync = sync_of(engine, beside, third, base=base, folder=tmp_path)
    sync.attach(Start())
    pause, resume = ServerClient.pause, ServerClient.resume
    resumed = threading.Event()

    def late(self: ServerClient, **how: Any) -> Any:
        if self.base_url == beside.url:
            assert resumed.wait(20), "the third server resumes meanwhile"
        return pause(self, **how)

    def seen(self: ServerClient, version: int) -> Any:
        answer = resume(self, version)
        if self.base_url == third.url:
            resumed.set()
        return answer

    monkeypatch.setattr(ServerClient, "pause", late)
    monkeypatch.setattr(ServerClient, "resume", seen)
    sync.publish(1, lambda: None)
    assert [each.version for each in (engine, beside, third)] == [1, 1, 1]
    sync.close()


def test_another_model_is_refused(
    engine: Engine, beside: Engine, base: Path, tmp_path: Path
) -> None:
    name, entry = next(iter(beside.manifest.ranks[0].param_mappings.items()))
    entry.shape = [entry.shape[0] - 1, *entry.shape[1:]]
    write_manifest(beside.manifest, beside.manifest_path)
    with pytest.raises(ManifestError, match=f"of another model than the first server's: {name} is"):
        sync_of(engine, beside, base=base, folder=tmp_path).attach(Start())
    assert "/bridge/pause" not in beside.calls


def test_a_server_that_has_ended_is_not_written_to_and_no_step_is_lost(
    engine: Engine, beside: Engine, base: Path, tmp_path: Path
) -> None:
    server = subprocess.Popen(["sleep", "60"])
    beside.manifest.server_pid = server.pid
    beside.manifest.server_create_time = psutil.Process(server.pid).create_time()
    write_manifest(beside.manifest, beside.manifest_path)
    sync = sync_of(engine, beside, base=base, folder=tmp_path)
    model = sync.attach(Start())
    sync.check()
    server.send_signal(signal.SIGKILL)
    server.wait()
    with pytest.raises(EngineGone, match="has ended"):
        sync.check()
    before = {name: tensor.clone() for name, tensor in beside.tensors.items()}

    def write() -> None:
        with torch.no_grad():
            model.get_parameter("model.norm.weight").fill_(7.0)

    with pytest.raises(EngineGone, match="has ended"):
        sync.publish(1, write)
    assert all(torch.equal(tensor, before[name]) for name, tensor in beside.tensors.items())
    assert engine.version == 1 and not engine.paused
    # The first server lives, so its memory still has the step.
    assert sync.let_go({}) == ""
    engine.tensors["model.norm.weight"].zero_()
    assert model.get_parameter("model.norm.weight").eq(7.0).all(), "in memory of its own"
    sync.close()


def test_float32_copies_are_taken_before_memory_that_may_have_ended(
    engine: Engine, beside: Engine, base: Path, tmp_path: Path
) -> None:
    """A worker ends seconds before the process that the trainer watches."""
    sync = sync_of(engine, beside, base=base, folder=tmp_path)
    model = sync.attach(Start())
    kept = {each: torch.full_like(each, 7.0, dtype=torch.float32) for each in model.parameters()}
    sync.device = torch.device("cuda")
    assert sync.let_go(kept) == ""
    assert all(each.eq(7.0).all() for each in model.parameters())
    sync.close()


def test_time_does_not_run_while_the_supervisor_brings_that_server_up(
    engine: Engine, beside: Engine, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor knows it by name, and the name of its folder is the same."""

    class Stack:
        def coming(self, name: str | None = None) -> str | None:
            return "beside is starting" if name == "beside" else None

    monkeypatch.setattr("trainer_core.weight_sync.copies.supervised", lambda *_: Stack())
    monkeypatch.setattr("trainer_core.server.lifecycle.STATUS_EVERY_S", 0.05)
    later = beside.manifest_path.rename(tmp_path / "later.json")
    sync = sync_of(engine, beside, base=base, folder=tmp_path, engine_timeout=0.3)
    threading.Timer(1.0, later.rename, [beside.manifest_path]).start()
    sync.attach(Start(version=3))
    assert beside.version == 3
    sync.close()


def test_a_tensor_parallel_server_is_refused_by_name(
    engine: Engine, beside: Engine, base: Path, tmp_path: Path
) -> None:
    (shard,) = beside.manifest.ranks.values()
    beside.manifest.ranks[1] = shard.model_copy(update={"rank": 1})
    beside.manifest.tensor_parallel_size = 2
    write_manifest(beside.manifest, beside.manifest_path)
    with pytest.raises(UsageError, match="--tensor-parallel-size 2, and a copy on the trainer's"):
        sync_of(engine, beside, base=base, folder=tmp_path).attach(Start())


def test_it_needs_one_rank(engine: Engine, beside: Engine, base: Path, tmp_path: Path) -> None:
    sync = sync_of(engine, beside, base=base, folder=tmp_path)
    sync.world = World()
    sync.world.size = 2
    with pytest.raises(UsageError, match="--copy-config-paths in single copy needs the whole"):
        sync.attach(Start())
