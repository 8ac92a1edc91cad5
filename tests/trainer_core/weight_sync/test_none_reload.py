"""Mode `none`: when the server loads which weights, its errors, and the files left on the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from tests.e2e.live_stack import read_records
from tests.trainer_core.stand_ins import (
    TOKEN,
    Engine,
    EnvThread,
    Recorded,
    Refused,
    RunApiThread,
    group,
    plain_model,
    run_config,
)
from trainer_core.config import TrainingConfig, validate
from trainer_core.errors import EngineError, EngineGone, TrainerError, UsageError
from trainer_core.loop import train
from trainer_core.ranks.world import World
from trainer_core.weight_sync import none_reload
from trainer_core.weight_sync.base import FIRST_PAUSE_S, Start
from trainer_core.weight_sync.none_reload import Backoff, Reload

CPU = torch.device("cpu")
NOTHING = "it was started without ATROPOS_WEIGHT_UPDATES=1"


class LoadingEngine(Engine):
    """Engine that loads weights from the disk on request; can be restarted."""

    def __init__(self, folder: Path, model: torch.nn.Module) -> None:
        super().__init__(folder, model)
        self.life, self.obstacle, self.noted, self.started_from = 1, None, None, None
        self.base = {name: param.detach().clone() for name, param in model.named_parameters()}
        self.loads: list[tuple[int, bool]] = []
        """Version of each load, and whether it was for the next start."""
        self.on_load: Callable[[], None] = lambda: None

    def info(self) -> dict[str, Any]:
        return super().info() | {
            "instance_id": f"i-{self.life}",
            "load_obstacle": self.obstacle,
            "started_from": self.started_from,
        }

    def restart(self) -> None:
        """A new process: held, with the base weights or those noted."""
        self.life += 1
        self.dead, self.held, self.version, self.started_from = False, True, None, self.noted
        self._write(load_file(Path(self.noted) / "model.safetensors") if self.noted else self.base)

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path != "/bridge/load":
            return super().answer(path, body)
        self.loads.append((body["weight_version"], body["at_restart"]))
        self.loaded_from = Path(body["path"])
        self.on_load()
        if self.dead:
            raise ConnectionAbortedError("died")
        if body["at_restart"]:
            self.noted = body["path"]
        elif self.started_from != body["path"] or self.version is not None:
            if self.obstacle:
                raise Refused(409, self.obstacle)
            self._write(load_file(Path(body["path"]) / "model.safetensors"))
        if not body["at_restart"]:
            self.version, self.held = body["weight_version"], False
        return {
            "instance_id": f"i-{self.life}",
            "weight_version": self.version,
            "tensors": 1,
            "bytes": 1,
            "phases": {"load": 0.25, "resume": 0.125},
        }

    def _write(self, tensors: dict[str, torch.Tensor]) -> None:
        views = {
            name: view
            for (name, _), (_, view) in zip(self.model.named_parameters(), self.pairs, strict=True)
        }
        assert tensors.keys() == views.keys(), "unfused names, a tied head once"
        with self.lock:
            for name, view in views.items():
                view.copy_(tensors[name])

    def holds(self, model: torch.nn.Module) -> bool:
        return all(
            torch.equal(view, param)
            for (_, view), param in zip(self.pairs, model.parameters(), strict=True)
        )


class Restarter:
    """A supervisor, or not even that."""

    def __init__(self, engine: LoadingEngine, *, can_restart: bool = True) -> None:
        self.engine, self.can_restart, self.reasons = engine, can_restart, []

    def ensure(self) -> None:
        pass

    def restart(self, reason: str) -> None:
        self.reasons.append(reason)
        time.sleep(0.1)
        self.engine.restart()

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)


@pytest.fixture
def engine(tmp_path: Path, base: Path) -> Iterator[LoadingEngine]:
    made = LoadingEngine(tmp_path, plain_model(base))
    yield made
    made.close()


def config(
    engine: LoadingEngine,
    base: Path,
    tmp_path: Path,
    url: str = "http://127.0.0.1:9",
    **fields: Any,
) -> Any:
    settings = {
        "weight_bridge_mode": "none",
        "vllm_port": engine.server.server_port,
        "vllm_config_path": None,
    }
    return run_config(engine, base, tmp_path, url, **{"engine_timeout": 5.0, **settings, **fields})


@pytest.fixture
def make(engine: LoadingEngine, base: Path, tmp_path: Path) -> Iterator[Callable[..., Reload]]:
    made: list[Reload] = []

    def build(restarter: Restarter | None = None, **fields: Any) -> Reload:
        sync = Reload(config(engine, base, tmp_path, **fields), CPU, threading.Event())
        sync.lifecycle = None if "vllm_urls" in fields else restarter or Restarter(engine)
        made.append(sync)
        return sync

    yield build
    for sync in made:
        sync.close()


def nudge(model: torch.nn.Module, by: float = 0.5) -> Callable[[], None]:
    def write() -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(by)

    return write


def folders(sync: Reload) -> list[str]:
    return (
        sorted(path.name.split("-")[0] for path in sync._folder.iterdir())
        if sync._folder.exists()
        else []
    )


def test_a_folder_behind_a_link_is_named_as_it_was_given(
    make: Any, engine: LoadingEngine, tmp_path: Path
) -> None:
    """A node may reach that disk under the link's name alone."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "shared").symlink_to(tmp_path / "disk")
    sync = make(save_path=str(tmp_path / "shared"), vllm_restart_interval=1)
    model = sync.attach(Start())
    sync.publish(1, nudge(model))
    assert engine.loads == [(1, False)] and engine.loaded_from.is_relative_to(tmp_path / "shared")


class TwoRanks(World):
    def __init__(self) -> None:
        super().__init__()
        self.size = 2
        self.alone = False

    def share(self, make: Callable[[], Any]) -> Any:
        self.alone = True
        try:
            return make()
        finally:
            self.alone = False


def test_ranks_gather_the_base_together_for_a_server_with_other_weights(
    make: Any, engine: LoadingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer without a checkpoint died after a reload: rank 0 gathered alone, and hung."""
    engine.version, sync = 5, make()
    sync.world, gather, alone = TwoRanks(), none_reload.weights, []

    def seen(model: torch.nn.Module) -> Any:
        alone.append(sync.world.alone)
        return gather(model)

    monkeypatch.setattr(none_reload, "weights", seen)
    sync.attach(Start())
    assert alone == [False] and engine.version == 0


def test_every_third_step_is_loaded_and_the_folder_before_goes(
    make: Any, engine: LoadingEngine
) -> None:
    sync = make()
    model = sync.attach(Start())
    assert engine.loads == [], "the base weights are there already"
    assert (engine.version, engine.held) == (0, False)
    reports = [sync.publish(version, nudge(model)) for version in range(1, 7)]
    assert engine.loads == [(3, False), (6, False)]
    assert [r.phases.keys() for r in reports[:2]] == [{"write"}, {"write"}]
    assert [r.moved for r in reports] == [False, False, True] * 2
    assert reports[2].phases.keys() == {"write", "save", "load", "resume"}
    assert reports[2].phases["load"] == 0.25
    assert reports[2].seconds == pytest.approx(sum(reports[2].phases.values()))
    assert folders(sync) == ["v6"]
    assert engine.holds(model)
    sync.close()
    assert not sync._folder.exists()


def test_what_is_written_is_unfused_float32_and_whole_under_its_name(
    make: Any, engine: LoadingEngine
) -> None:
    sync = make(vllm_restart_interval=1)
    model = sync.attach(Start())
    seen: dict[str, Any] = {}

    def look() -> None:
        (folder,) = sync._folder.iterdir()
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            seen.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118

    engine.on_load = look
    sync.publish(1, nudge(model))
    assert seen.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(seen[name], param) for name, param in model.named_parameters())


def test_a_server_that_serves_other_weights_gets_those_of_the_start(
    make: Any, engine: LoadingEngine
) -> None:
    engine.version, engine.held = 7, False
    nudge(engine.model)()
    sync = make()
    model = sync.attach(Start())
    assert engine.loads == [(0, False)]
    assert engine.holds(model)


def test_a_restarted_server_gets_the_present_weights_not_the_last_published(
    make: Any, engine: LoadingEngine
) -> None:
    sync = make()
    model = sync.attach(Start())
    for version in (1, 2, 3, 4):
        sync.publish(version, nudge(model))
    engine.restart()
    assert engine.held
    sync._checked = 0.0
    sync.check()
    assert (engine.version, engine.held, engine.life) == (4, False, 2)
    assert engine.holds(model)


def test_a_server_killed_during_the_load_is_waited_for(make: Any, engine: LoadingEngine) -> None:
    sync = make(vllm_restart_interval=1)
    model = sync.attach(Start())

    def die() -> None:
        engine.on_load = lambda: None
        engine.die()
        threading.Timer(0.3, engine.restart).start()

    engine.on_load = die
    report = sync.publish(1, nudge(model))
    assert (engine.version, engine.life) == (1, 2)
    assert engine.holds(model)
    assert report.phases["restart"] > 0.25


def test_a_load_that_breaks_off_is_tried_again(make: Any, engine: LoadingEngine) -> None:
    sync = make(vllm_restart_interval=1)
    model = sync.attach(Start())
    left = [Refused(503, "weights are mixed"), Refused(503, "weights are mixed")]

    def fail() -> None:
        if left:
            raise left.pop()

    engine.on_load = fail
    sync.publish(1, nudge(model))
    assert len(engine.loads) == 3
    assert engine.holds(model)


def test_refused_weights_end_the_run(make: Any, engine: LoadingEngine) -> None:
    sync = make(vllm_restart_interval=1)
    model = sync.attach(Start())

    def refuse() -> None:
        raise Refused(409, "these are the weights of another model")

    engine.on_load = refuse
    with pytest.raises(EngineError, match="another model"):
        sync.publish(1, nudge(model))


@pytest.mark.parametrize("why", ["asked", "needed"])
def test_a_restart_begins_with_the_new_weights(make: Any, engine: LoadingEngine, why: str) -> None:
    restarter = Restarter(engine)
    engine.obstacle = None if why == "asked" else "its weights are quantized (fp8)"
    sync = make(
        restarter,
        vllm_restart_interval=2,
        engine_reload="restart" if why == "asked" else "in_place",
    )
    model = sync.attach(Start())
    reports = [sync.publish(version, nudge(model)) for version in range(1, 5)]
    assert engine.loads == [(2, True), (2, False), (4, True), (4, False)]
    assert (
        "engine_reload is restart" if why == "asked" else "quantized (fp8)"
    ) in restarter.reasons[0]
    assert (len(restarter.reasons), engine.life, engine.version) == (2, 3, 4)
    assert reports[1].phases.keys() == {"write", "save", "restart"}
    assert reports[1].phases["restart"] >= 0.1, "the restart itself is counted"
    assert engine.holds(model)
    # It crashes later: what it starts from is old by then.
    sync.publish(5, nudge(model))
    engine.restart()
    sync._checked = 0.0
    sync.check()
    assert engine.version == 5
    assert engine.holds(model)


def test_a_server_of_somebody_else_is_not_restarted(make: Any, engine: LoadingEngine) -> None:
    engine.obstacle = NOTHING
    sync = make(Restarter(engine, can_restart=False), vllm_restart_interval=1)
    model = sync.attach(Start())
    with pytest.raises(
        UsageError,
        match=r"ATROPOS_WEIGHT_UPDATES=1.*cannot restart it. fix: let the trainer start its",
    ):
        sync.publish(1, nudge(model))


def test_of_several_servers_none_is_restarted(make: Any, engine: LoadingEngine) -> None:
    """A user with several servers runs them with atropos-tui already."""
    engine.obstacle = NOTHING
    sync = make(vllm_restart_interval=1, vllm_urls=[engine.url, engine.url])
    model = sync.attach(Start())
    with pytest.raises(
        UsageError, match=r"cannot restart it. fix: take one server, or mode broadcast"
    ):
        sync.publish(1, nudge(model))


def test_a_full_disk_is_said_and_nothing_half_written_stays(
    make: Any, engine: LoadingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = make(vllm_restart_interval=1)
    model = sync.attach(Start())

    def full(_: Any, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer_core.weight_sync.none_reload.save_torch_state_dict", full)
    with pytest.raises(
        TrainerError, match=r"version 1 cannot be written into .*No space left.*Free [\d.]+ GB"
    ):
        sync.publish(1, nudge(model))
    assert folders(sync) == []
    assert (engine.loads, engine.version) == ([], 0)


def test_where_somebody_waits_for_room_a_full_disk_ends_nothing(
    make: Any, engine: LoadingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = make(vllm_restart_interval=1)
    model = sync.attach(Start())
    waited: list[tuple[Path, str]] = []
    sync.wait_for_room = lambda folder, words: waited.append((folder, words))
    save = none_reload.save_torch_state_dict

    def full_twice(tensors: Any, folder: Path) -> None:
        save(tensors, folder)
        if len(waited) < 2:
            raise SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            )

    monkeypatch.setattr(none_reload, "save_torch_state_dict", full_twice)
    sync.publish(1, nudge(model))
    assert waited == [(sync._folder, "No space left on device")] * 2
    assert engine.version == 1 and folders(sync) == ["v1"]


def test_a_run_counts_the_lag_and_is_probed_at_the_same_weights_only(
    engine: LoadingEngine, base: Path, tmp_path: Path
) -> None:
    api = RunApiThread()
    env = EnvThread(api.url, engine, groups=4, size=4)
    done = train(config(engine, base, tmp_path, api.url, training_steps=7, lr=1e-5))
    env.close()
    api.close()
    assert (done.step, engine.version) == (7, 6)
    (stream,) = (tmp_path / "out").rglob("telemetry*.jsonl")
    found = read_records(stream)
    probes = {r.step: r.probe_tokens for r in found if r.kind == "alignment"}
    assert all((probes[step] > 0) == (step in (1, 4, 7)) for step in probes), probes
    assert {r.verdict for r in found if r.kind == "alignment"} == {"ok"}
    lags = [r.policy_lag_max for r in found if r.kind == "step"]
    assert 2 <= max(lag for lag in lags if lag is not None) <= 5
    moved = {r.step: r.seconds for r in found if r.kind == "sync" and r.moved}
    (bench,) = (r for r in found if r.kind == "benchmark")
    assert (bench.syncs, moved.keys()) == (2, {3, 6}), "a step that loads nothing is no sync"
    assert bench.total_sync_s == pytest.approx(sum(moved.values()))


def test_resume_goes_on_bit_for_bit(engine: LoadingEngine, base: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    batches = [[group(engine, [3, 12, 4, 13], 4, 3) for _ in range(4)] for _ in range(5)]
    settings = {"checkpoint_interval": 2, "training_steps": 5, "probe_interval": 0}
    train(config(engine, base, tmp_path, **settings), api=Recorded(batches))  # type: ignore[arg-type]
    straight = load_file(tmp_path / "out" / "final_model" / "model.safetensors")
    step_2 = tmp_path / "out" / "step_2"
    engine.loads.clear()
    train(config(engine, base, tmp_path, **settings, resume=str(step_2)), api=Recorded(batches))  # type: ignore[arg-type]
    assert engine.loads == [(2, False), (3, False)]
    again = load_file(tmp_path / "out" / "final_model" / "model.safetensors")
    assert all(torch.equal(straight[name], again[name]) for name in straight)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_policy_lag": 1}, "--vllm-restart-interval 2 or lower"),
        ({"engine_reload": "restart", "vllm_urls": ["http://127.0.0.1:1"]}, "--vllm-urls"),
        ({"engine_reload": "restart", "weight_bridge_mode": "lora_only"}, "does nothing with"),
    ],
)
def test_settings_that_cannot_work(fields: dict[str, Any], says: str) -> None:
    made, problems = validate({"model_name": "m", **fields})
    assert made is None
    assert says in " ".join(problems)
    assert isinstance(validate({"model_name": "m", "max_policy_lag": 2})[0], TrainingConfig)


def test_only_the_same_server_is_left_in_peace() -> None:
    backoff = Backoff()

    def attempt(instance: str, fails: bool = True) -> str:
        try:
            with backoff.attempt(instance):
                if fails:
                    raise EngineGone(f"{instance} failed")
        except EngineGone as error:
            return str(error)
        return ""

    assert attempt("a") == "a failed"
    assert attempt("a", fails=False) == "a failed", "too early, and why it waits is not forgotten"
    assert attempt("b") == "b failed", "another server: at once"
    time.sleep(FIRST_PAUSE_S)
    assert attempt("b", fails=False) == ""
    assert attempt("b") == "b failed", "a success wipes the slate"
