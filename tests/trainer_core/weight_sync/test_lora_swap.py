"""Adapter modes: a server that dies inside a publish costs no step, and its successor gets that
adapter."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from atropos_common.protocol.manifest import write_manifest
from tests.trainer_core.stand_ins import (
    TOKEN,
    Engine,
    Recorded,
    Refused,
    fused_tensors,
    group,
    plain_model,
    run_config,
)
from trainer_core.errors import EngineError, EngineGone
from trainer_core.loop import train
from trainer_core.policy.lora import add_adapter
from trainer_core.weight_sync import lora
from trainer_core.weight_sync.lora import KEPT, SharedBase

ANSWERS = {
    "its engine is dead": (503, "EngineCore encountered an issue"),
    "it ends": (500, "Internal Server Error"),
    "a proxy speaks for it": (502, "Bad Gateway"),
}
"""Answers of an engine that is going away."""
STEPS = 4
VICTIM = 2
"""The weight version in whose publish the server dies."""


class AdapterEngine(Engine):
    """Takes adapters. At the load of `victim` it dies in the way `death`, and another one takes its
    place."""

    def __init__(
        self, folder: Path, base: Path, death: str | None = None, back_after_s: float | None = 0.3
    ) -> None:
        super().__init__(folder, plain_model(base))
        self.death, self.back_after_s, self.life, self.falls = death, back_after_s, 1, False
        self.serves: dict[str, Any] | None = None
        """Version, path and tensors of its answers."""
        self.loads: list[tuple[int, int]] = []
        """Life and version of each load that was taken."""

    def info(self) -> dict[str, Any]:
        return super().info() | {"instance_id": f"i-{self.life}"}

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if not path.startswith("/lora/"):
            return super().answer(path, body)
        if path == "/lora/load":
            self._load(body)
        now = self.serves or {"path": None, "version": None}
        return {"enabled": True, "name": "n", "weight_version": now["version"], "path": now["path"]}

    def _load(self, body: dict[str, Any]) -> None:
        death = self.death if (self.life, body["weight_version"]) == (1, VICTIM) else None
        if death in ANSWERS:
            self._fall()
            raise Refused(*ANSWERS[death])
        if death != "before it has read the adapter":
            tensors = load_file(Path(body["path"]) / "adapter_model.safetensors")
            self.serves = {
                "version": body["weight_version"],
                "path": body["path"],
                "tensors": tensors,
            }
            self.loads.append((self.life, body["weight_version"]))
            self.held = False
        if death is not None:
            self.die()
            self._fall()
            raise ConnectionAbortedError("died")

    def _fall(self) -> None:
        if self.back_after_s is not None and not self.falls:
            threading.Timer(self.back_after_s, self.restart).start()
        self.falls = True

    def restart(self) -> None:
        """A new process: it holds its generation, and has no adapter."""
        self.life, self.held, self.serves = self.life + 1, True, None
        place = self.manifest_path.parent / f"weights of life {self.life}"
        old, self.tensors = self.tensors, self._share(place, fused_tensors(self.model))
        for tensor in old.values():
            tensor.fill_(9e9)  # a computation with memory of a dead process gives noise
        self._write_manifest(place)
        write_manifest(
            self.manifest.model_copy(update={"instance_id": f"i-{self.life}"}), self.manifest_path
        )
        self.dead = False


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)


def run(engine: AdapterEngine, base: Path, folder: Path, **fields: Any) -> dict[str, torch.Tensor]:
    """Train on a fixed stream of batches; returns the final adapter."""
    torch.manual_seed(1)
    batches = [[group(engine, [3, 12, 4, 13], 4, 3) for _ in range(4)] for _ in range(STEPS)]
    settings = run_config(
        engine,
        base,
        folder,
        **{
            "weight_bridge_mode": "lora_only",
            "training_steps": STEPS,
            "probe_interval": 0,
            "lora_r": 4,
            "vllm_urls": [engine.url],
            "vllm_config_path": None,
            "engine_timeout": 10,
            **fields,
        },
    )
    torch.manual_seed(3)
    train(settings, api=Recorded(batches))  # type: ignore[arg-type]
    return load_file(folder / "out" / "final_model" / "adapter_model.safetensors")


@pytest.fixture
def straight(base: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The adapter of the same run with a server that lives."""
    (tmp_path / "straight").mkdir()
    return run(AdapterEngine(tmp_path / "straight", base), base, tmp_path / "straight")


DEATHS = ["before it has read the adapter", "after it has taken it, answer lost", *ANSWERS]


@pytest.mark.parametrize(
    "death", [*DEATHS[:2], *(pytest.param(death, marks=pytest.mark.slow) for death in DEATHS[2:])]
)
def test_a_server_that_dies_at_the_swap_costs_no_step(
    base: Path,
    tmp_path: Path,
    straight: dict[str, torch.Tensor],
    death: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = AdapterEngine(tmp_path, base, death)
    final = run(engine, base, tmp_path)
    assert final.keys() == straight.keys() and all(
        torch.equal(final[name], straight[name]) for name in final
    )
    lost = [(1, VICTIM)] if death == DEATHS[1] else []
    successor = [(2, version) for version in range(VICTIM, STEPS + 1)]
    taken = list(
        dict.fromkeys(engine.loads)
    )  # a successor that came between being met and its load is given it twice
    assert taken == [(1, version) for version in range(VICTIM)] + lost + successor, (
        "each version, in order"
    )
    assert engine.serves is not None and not engine.held
    assert all(torch.equal(engine.serves["tensors"][name], final[name]) for name in final)
    shown = capsys.readouterr().out
    assert "Waiting for the inference server: " in shown
    assert f"answers with weight version {VICTIM}" in shown
    assert len(list((tmp_path / "out" / "adapters").iterdir())) <= KEPT


@pytest.mark.parametrize("death", DEATHS[:2])
def test_over_one_copy_the_base_comes_from_the_new_server(
    base: Path,
    tmp_path: Path,
    straight: dict[str, torch.Tensor],
    death: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Adapter and optimizer stay in the trainer, which goes on as if nothing had happened."""
    engine = AdapterEngine(tmp_path, base, death)
    final = run(engine, base, tmp_path, **over_one_copy(engine))
    assert all(torch.equal(final[name], straight[name]) for name in straight)
    assert engine.serves is not None
    assert all(torch.equal(engine.serves["tensors"][name], final[name]) for name in final)
    shown = capsys.readouterr().out
    assert (
        "no memory for the base model" in shown
        and "The base model lies in the memory of the new server" in shown
    )


def test_memory_of_a_dead_server_is_let_go_of(base: Path, tmp_path: Path) -> None:
    engine = AdapterEngine(tmp_path, base)
    settings = run_config(engine, base, tmp_path, **over_one_copy(engine))
    shared = SharedBase(settings, torch.device("cpu"), Event())
    model = shared.load()
    add_adapter(model, settings)
    shared.release_ended()
    sizes = {name: p.shape for name, p in model.named_parameters()}
    assert all(len(p) for p in model.parameters()), "it lives"
    with subprocess.Popen(["true"]) as ended:
        shared._memory._process = psutil.Process(ended.pid)
    shared.release_ended()
    assert all(bool(len(p)) == p.requires_grad for p in model.parameters()), (
        "the adapter alone is left"
    )
    shared.follow("i-1")
    assert {name: p.shape for name, p in model.named_parameters()} == sizes


def over_one_copy(engine: AdapterEngine) -> dict[str, Any]:
    """Settings of a trainer without memory for the base model."""
    return {
        "weight_bridge_mode": "lora_only",
        "single_copy": True,
        "vllm_urls": None,
        "vllm_port": int(engine.url.rpartition(":")[2]),
        "vllm_config_path": str(engine.manifest_path),
    }


def test_a_server_that_does_not_come_back_ends_the_run_with_the_step_saved(
    base: Path, tmp_path: Path
) -> None:
    engine = AdapterEngine(tmp_path, base, DEATHS[0], back_after_s=None)
    with pytest.raises(EngineGone, match=r"does not answer .* \(waited 0 s\)"):
        run(engine, base, tmp_path, engine_timeout=0.4, resume="auto", checkpoint_interval=1)
    assert engine.loads == [(1, 0), (1, 1)]
    saved = {path.name for path in (tmp_path / "out").glob("adapter_step_*")}
    assert f"adapter_step_{VICTIM}" in saved, (
        f"the update that could not be published is not lost: {saved}"
    )


def test_a_refused_adapter_is_no_death(base: Path, tmp_path: Path) -> None:
    """A living server refuses the same adapter again tomorrow: the run ends at once, in its
    words."""

    class Refusing(AdapterEngine):
        def _load(self, body: dict[str, Any]) -> None:
            if body["weight_version"] == VICTIM:
                raise Refused(400, "the adapter is not one of this model")
            super()._load(body)

    with pytest.raises(EngineError, match="the adapter is not one of this model"):
        run(Refusing(tmp_path, base), base, tmp_path)
    saved = {path.name for path in (tmp_path / "out").glob("adapter_step_*")}
    assert saved == {f"adapter_step_{VICTIM}"}, "the step that could not be published is not lost"


def test_a_full_disk_at_the_swap_is_waited_out(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended the attempt of the trainer, though the checkpoint that followed waited for the same
    room."""
    failures = iter([SafetensorError("I/O error: No space left on device (os error 28)")] * 2)
    save = lora.write_adapter

    def full(model: Any, folder: Path, dtype: Any = None) -> None:
        if folder.name.startswith(f".v{VICTIM}-") and (error := next(failures, None)):
            raise error
        save(model, folder, dtype)

    monkeypatch.setattr(lora, "write_adapter", full)
    monkeypatch.setattr("trainer_core.checkpoints.saving.FULL_DISK_RETRY_S", 0.1)
    run(AdapterEngine(tmp_path, base), base, tmp_path)
    assert capsys.readouterr().out.count("Training pauses until there is room") == 2


def test_a_crash_of_any_kind_costs_no_step(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights are the trainer's own: what is trained is saved, and the next attempt goes on
    from there."""
    engine = AdapterEngine(tmp_path, base)
    torch.manual_seed(1)
    batches = [[group(engine, [3, 12, 4, 13], 4, 3) for _ in range(4)] for _ in range(2)]

    class Breaking(Recorded):
        def next_batch(self, step: int, on_idle: Any = None) -> Any:
            if step == 2:
                raise KeyError("a fault of ours")
            return super().next_batch(step, on_idle)

    settings = run_config(
        engine,
        base,
        tmp_path,
        weight_bridge_mode="lora_only",
        training_steps=STEPS,
        probe_interval=0,
        lora_r=4,
        vllm_urls=[engine.url],
        vllm_config_path=None,
        engine_timeout=10,
        checkpoint_interval=0,
    )
    with pytest.raises(KeyError, match="a fault of ours"):
        train(settings, api=Breaking(batches))  # type: ignore[arg-type]
    assert {path.name for path in (tmp_path / "out").glob("adapter_step_*")} == {"adapter_step_2"}
    assert (
        "No step is lost: the weights of step 2 are intact after the error"
        in capsys.readouterr().out
    )


class Restarts:
    """Stand-in for the part that restarts the engine; records the requests in order."""

    can_restart = True

    def __init__(self, engine: AdapterEngine, *, fails: bool = False) -> None:
        self.engine, self.fails, self.asked = engine, fails, []

    def ensure(self) -> None:
        self.asked.append("ensure")

    def restart(self, reason: str) -> None:
        self.asked.append(reason)
        if self.fails:
            threading.Timer(0.2, self.engine.restart).start()
            raise EngineGone("the restart of vllm failed: overtaken by a crash")
        self.engine.restart()

    def close(self) -> None:
        self.asked.append("close")


@pytest.mark.parametrize("fails", [False, True], ids=["restarted", "overtaken by a crash"])
def test_a_restart_every_few_steps(
    base: Path,
    tmp_path: Path,
    straight: dict[str, torch.Tensor],
    fails: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server gets an adapter at the restarts only, and training is the same."""
    engine = AdapterEngine(tmp_path, base)
    lifecycle = Restarts(engine, fails=fails)
    monkeypatch.setattr(lora, "make_lifecycle", lambda *_, **__: lifecycle)
    final = run(
        engine,
        base,
        tmp_path,
        weight_bridge_mode="lora_restart",
        vllm_restart_interval=2,
        vllm_urls=None,
        vllm_port=int(engine.url.rpartition(":")[2]),
    )
    assert all(torch.equal(final[name], straight[name]) for name in straight)
    # One that crashed begins at any moment, and is given what is of now.
    assert [v for v in dict.fromkeys(v for _, v in engine.loads) if not (fails and v == 3)] == [
        0,
        2,
        4,
    ]
    asked = [each for each in lifecycle.asked if each != "ensure"]
    restart = "adapter of version {}".format
    assert asked == [restart(2), restart(4), "close"]
