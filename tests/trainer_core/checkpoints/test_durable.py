"""Checkpoints survive a crash at any moment, detect damage, and wait for room on a full disk."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tmpfs import mounted
from tests.trainer_core.stand_ins import Engine, Recorded, group, plain_model, run_config
from trainer_core.checkpoints import checkpoint, saving
from trainer_core.checkpoints.checkpoint import PART_BYTES, checksums, damage, seal
from trainer_core.checkpoints.companions import read_companions
from trainer_core.checkpoints.saving import BackgroundSave, Saver
from trainer_core.config import TrainingConfig
from trainer_core.errors import DiskFull, UsageError
from trainer_core.loop import train
from trainer_core.optimization.optimizers import Stepper
from trainer_core.ranks.world import ALONE


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    with mounted(tmp_path / "disk", "size=64m") as folder:
        yield folder


def _settings(base: Path, out: Path, **fields: Any) -> TrainingConfig:
    return TrainingConfig(
        model_name=str(base),
        weight_bridge_mode="shared_vllm",
        save_path=str(out),
        optimizer="adamw",
        device="cpu",
        training_steps=10_000,  # more than any test saves: a longer checkpoint is refused
        **fields,
    )


def _save(model: torch.nn.Module, stepper: Stepper, settings: TrainingConfig, step: int) -> Path:
    return checkpoint.save_step(model, settings, stepper, step=step, version=step).path


def _save_for_ever(
    model: torch.nn.Module, settings: TrainingConfig, first: int, begun: Event
) -> None:
    torch.set_num_threads(1)
    stepper = Stepper(model, settings)
    begun.set()
    for step in range(first, first + 1000):
        if settings.checkpoint_in_background:
            _in_background(model, stepper, settings, step).finish()
        else:
            _save(model, stepper, settings, step)


def _in_background(
    model: torch.nn.Module,
    stepper: Stepper,
    settings: TrainingConfig,
    step: int,
    copies: dict[str, torch.Tensor] | None = None,
) -> BackgroundSave:
    return BackgroundSave(
        model,
        settings,
        stepper,
        step=step,
        version=step,
        progress={},
        world=ALONE,
        copies={} if copies is None else copies,
    )


def test_the_next_write_uses_the_memory_of_the_one_before(base: Path, tmp_path: Path) -> None:
    settings = _settings(base, tmp_path / "out", resume="auto")
    model = plain_model(base)
    stepper, copies = Stepper(model, settings), dict[str, torch.Tensor]()
    first = _in_background(model, stepper, settings, 1, copies).finish().path
    before = {name: copy.data_ptr() for name, copy in copies.items()}
    assert len(before) > len(list(model.parameters()))
    with torch.no_grad():
        for tensor in [*model.parameters(), *stepper.copies().values()]:
            tensor.add_(1.0)
    second = _in_background(model, stepper, settings, 2, copies).finish().path
    assert {name: copy.data_ptr() for name, copy in copies.items()} == before
    other = settings.model_copy(update={"save_path": str(tmp_path / "at once")})
    at_once = _save(model, stepper, other, 2)
    assert (second / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()
    for name in ("model.safetensors", "trainer_state/tensors.safetensors"):
        assert (second / name).read_bytes() == (at_once / name).read_bytes(), name


def test_what_is_written_in_the_background_is_what_was_when_it_began(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes its time, and weights, optimizer and everything else go on meanwhile."""
    settings = _settings(base, tmp_path / "out", resume="auto")
    model = plain_model(base)
    stepper = Stepper(model, settings)
    at_once = _save(
        model, stepper, settings.model_copy(update={"save_path": str(tmp_path / "wait")}), 1
    )
    slow, write = threading.Event(), saving.write_state

    def waits(*values: Any) -> None:
        assert slow.wait(30)
        write(*values)

    monkeypatch.setattr(saving, "write_state", waits)
    written = _in_background(model, stepper, settings, 1)
    assert not written.over() and not checkpoint.complete_checkpoints(tmp_path / "out")
    with torch.no_grad():
        for tensor in [*model.parameters(), *(copy for copy in stepper.copies().values())]:
            tensor.add_(1.0)
    torch.rand(3)
    slow.set()
    path = written.finish().path
    assert checkpoint.starting_point(settings).path == path
    for name in ("model.safetensors", "trainer_state/tensors.safetensors"):
        assert (path / name).read_bytes() == (at_once / name).read_bytes(), name


def test_a_full_disk_in_the_background_leaves_nothing_and_is_said(base: Path, tmpfs: Path) -> None:
    settings = _settings(base, tmpfs, resume="auto")
    model = plain_model(base)
    stepper = Stepper(model, settings)
    good = _in_background(model, stepper, settings, 1).finish().path
    (tmpfs / "ballast").write_bytes(bytes(shutil.disk_usage(tmpfs).free - 200_000))
    with pytest.raises(OSError, match="No space left on device"):
        _in_background(model, stepper, settings, 2).finish()
    assert not list(tmpfs.glob(".*")) and checkpoint.starting_point(settings).path == good


@pytest.mark.parametrize("kills", [16, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.slow), True])
def test_killed_at_any_moment_the_last_good_one_stays(
    base: Path, tmp_path: Path, background: bool, kills: int
) -> None:
    """Also where a checkpoint is written again under its own name, and one alone is kept."""
    settings = _settings(
        base,
        tmp_path / "out",
        keep_checkpoints=1,
        resume="auto",
        checkpoint_in_background=background,
    )
    model = plain_model(base)
    saved = _save(model, Stepper(model, settings), settings, 1)
    assert saved.name == "step_1"
    began = time.monotonic()
    _save(model, Stepper(model, settings), settings, 1)
    took = time.monotonic() - began  # longer on a busy machine
    moments, fork = random.Random(0), multiprocessing.get_context("fork")
    reached = 1
    for number in range(kills):
        again = number % 2 == 1  # the present one is written again
        begun = fork.Event()
        process = fork.Process(
            target=_save_for_ever, args=(model, settings, reached if again else reached + 1, begun)
        )
        process.start()
        assert begun.wait(30)
        time.sleep(moments.uniform(0.1, 4.0) * took)
        process.kill()
        process.join()
        point = checkpoint.starting_point(settings)
        assert point.step >= reached and point.path is not None
        assert checkpoint._why_damaged(point.path, deep=True) is None
        assert [
            path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")
        ] == []
        reached = point.step
    assert reached > kills // 8


HOWS = [
    "truncated",
    "one bit",
    "missing",
    "state truncated",
    "state changed",
    "nested",
    "a list",
    "step",
    "progress",
    "lacks",
]


@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_checkpoint_is_passed_over_and_named(
    base: Path, tmp_path: Path, how: str, capsys: Any
) -> None:
    settings = _settings(base, tmp_path / "out", resume="auto")
    model = plain_model(base)
    stepper = Stepper(model, settings)
    good, bad = _save(model, stepper, settings, 3), _save(model, stepper, settings, 6)
    weights, state = bad / "model.safetensors", bad / "trainer_state.json"
    match how:
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "one bit":
            content = bytearray(weights.read_bytes())
            content[len(content) // 2] ^= 1
            weights.write_bytes(content)
        case "missing":
            (bad / "trainer_state" / "tensors.safetensors").unlink()
        case "state truncated":
            state.write_bytes(state.read_bytes()[:-40])
        case "state changed":
            state.write_text(json.dumps(json.loads(state.read_text()) | {"weight_version": 7}))
        case "nested":
            state.write_text("[" * 200_000)
        case "a list":
            state.write_text("[]")
        case "step" | "progress":  # of another type, with a right checksum
            facts = json.loads(state.read_text()) | {how: "six" if how == "step" else [1]}
            del facts["sha256"]
            state.write_text(json.dumps(facts | {"sha256": checkpoint._facts_digest(facts)}))
        case "lacks":
            facts = json.loads(state.read_text())
            del facts["sha256"], facts["settings"]
            state.write_text(json.dumps(facts | {"sha256": checkpoint._facts_digest(facts)}))
    assert checkpoint.starting_point(settings).path == good
    assert f"[WARNING] passed over: --resume {bad}: " in capsys.readouterr().out
    with pytest.raises(UsageError, match="step_6: "):
        checkpoint.starting_point(settings.model_copy(update={"resume": str(bad)}))


def test_keep_does_not_count_damaged_ones(base: Path, tmp_path: Path) -> None:
    settings = _settings(base, tmp_path / "out", keep_checkpoints=2)
    model = plain_model(base)
    stepper = Stepper(model, settings)
    paths = [_save(model, stepper, settings, step) for step in (1, 2)]
    (paths[1] / "model.safetensors").write_bytes(b"")
    _save(model, stepper, settings, 3)
    assert [path.name for path in checkpoint.complete_checkpoints(tmp_path / "out")] == [
        "step_1",
        "step_3",
    ]


def test_keep_leaves_what_another_run_or_the_next_attempt_needs(base: Path, tmp_path: Path) -> None:
    settings = _settings(base, tmp_path / "out", keep_checkpoints=1)
    model = plain_model(base)
    stepper = Stepper(model, settings)
    all_of_them = settings.model_copy(update={"keep_checkpoints": 0})
    start, later = (_save(model, stepper, all_of_them, step) for step in (4, 60))
    resumed = settings.model_copy(update={"resume": str(start)})
    for step in (5, 6):
        _save(model, stepper, resumed, step)
    names = [path.name for path in checkpoint.complete_checkpoints(tmp_path / "out")]
    assert names == [start.name, "step_6", later.name]


def test_a_full_disk_leaves_no_half_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    half = SimpleNamespace(save_pretrained=save)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: half)
    with pytest.raises(UsageError, match=r"No space left on device.*fix: free space"):
        read_companions(str(tmp_path))


def test_a_disk_without_room_for_a_folder_is_a_full_disk(
    engine: Engine, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, full = checkpoint.begin, [True]

    def make(folder: Path) -> None:
        if full:
            full.clear()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        begin(folder)

    monkeypatch.setattr(checkpoint, "begin", make)
    batches = [[group(engine, [3, 12, 4, 13], 4, 3) for _ in range(4)]]
    config = run_config(
        engine, base, tmp_path, training_steps=1, checkpoint_interval=1, probe_interval=0
    )
    assert config.checkpoint_in_background
    assert train(config, api=Recorded(batches)).done  # type: ignore[arg-type]
    assert checkpoint.starting_point(config.model_copy(update={"resume": "auto"})).step == 1


def test_a_file_of_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum depends on every part, and on nothing but the content."""
    assert PART_BYTES % (1 << 22) == 0
    monkeypatch.setattr("trainer_core.checkpoints.checkpoint.PART_BYTES", 1 << 22)
    content = random.Random(0).randbytes((1 << 22) * 2 + 5)
    names = ["one", "other", "changed"]
    for name in names:
        (tmp_path / name).write_bytes(content if name != "changed" else content[:-1] + b"x")
    one, other, changed = checksums([tmp_path / name for name in names]).values()
    assert one == other != changed
    sealed = seal(tmp_path)
    assert damage(tmp_path, sealed) is None
    (tmp_path / "one").write_bytes(content[:-1] + b"y")
    assert damage(tmp_path, sealed, deep=False) is None
    assert damage(tmp_path, sealed) == "the content of one is not what was written"


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_pauses_the_run_until_there_is_room(
    engine: Engine,
    base: Path,
    tmpfs: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    background: bool,
) -> None:
    ballast = tmpfs / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(tmpfs).free - 200_000))
    batches = [[group(engine, [3, 12, 4, 13], 4, 3) for _ in range(4)]] * 2
    config = run_config(
        engine,
        base,
        tmpfs,
        training_steps=2,
        checkpoint_interval=1,
        keep_checkpoints=1,
        probe_interval=0,
        checkpoint_in_background=background,
    )
    paused = threading.Event()

    wait = Saver.wait_for_room

    def seen(self: Saver, step: int, folder: Path, words: str) -> None:
        assert not list(folder.glob(".*.writing"))
        paused.set()
        wait(self, step, folder, words)

    monkeypatch.setattr(Saver, "wait_for_room", seen)

    def make_room() -> None:
        assert paused.wait(30)
        time.sleep(0.5)
        ballast.unlink()

    threading.Thread(target=make_room, daemon=True).start()
    result = train(config, api=Recorded(batches))  # type: ignore[arg-type]
    assert result.done and paused.is_set()
    said = capsys.readouterr().out
    assert "No space left on device: step 1 cannot be saved in" in said or (
        background and "step 2 cannot" in said
    ), said
    assert said.count("Saved step_2") == 1, "a step that waited for room is not written again"
    assert checkpoint.starting_point(config.model_copy(update={"resume": "auto"})).step == 2


@pytest.mark.parametrize("background", [False, True])
def test_a_stop_on_a_full_disk_ends_with_words(
    engine: Engine, base: Path, tmpfs: Path, background: bool
) -> None:
    (tmpfs / "ballast").write_bytes(bytes(shutil.disk_usage(tmpfs).free - 200_000))
    batches = [[group(engine, [3, 12, 4, 13], 4, 3) for _ in range(4)]] * 2
    config = run_config(
        engine,
        base,
        tmpfs,
        training_steps=2,
        checkpoint_interval=1,
        probe_interval=0,
        checkpoint_in_background=background,
    )
    stop = threading.Event()
    threading.Timer(3.0, stop.set).start()
    # A background write fails while the next step trains; that step is saved instead.
    saved = 2 if background else 1
    with pytest.raises(
        DiskFull, match=rf"No space left on device: step {saved} .* There is no checkpoint"
    ):
        train(config, api=Recorded(batches), stop=stop)  # type: ignore[arg-type]
    assert not list((tmpfs / "out").glob("*step*"))
