"""The disk that checkpoints take: the size of real ones, what is kept, warnings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atropos_tui.profile.budget.disk import Disk, disk_of
from atropos_tui.profile.budget.inventory import Hardware
from atropos_tui.profile.budget.memory import site_budget, take_inventory
from atropos_tui.profile.profile import parse_profile
from atropos_tui.profile.site import make_site
from tests.support.small_models import CONFIGS, build, saved
from trainer_core.checkpoints import checkpoint
from trainer_core.config import TrainingConfig
from trainer_core.optimization.optimizers import Stepper
from trainer_core.policy.load import train_only

GIB = 1024**3


def saved_in(folder: Path) -> Path:
    saved(CONFIGS["qwen3"], folder / "model")
    return folder / "model"


def disk(folder: Path, model: Path, mode: str = "shared_vllm", **trainer: object) -> Disk | None:
    settings = {"device": "cpu", "dtype": "float32", "training_steps": 60, "optimizer": "adamw"}
    profile = parse_profile(
        {
            "name": "n",
            "mode": mode,
            "model": str(model),
            "env": {"module": "atropos_envs.sums_server"},
            "trainer": settings | trainer,
        },
        "p.toml",
    )
    site = make_site(profile, folder / "run", run_id="r")
    inventory = take_inventory(site, Hardware((), 64 * GIB))
    return disk_of(site, inventory, site_budget(site, inventory))


@pytest.mark.parametrize(
    ("dtype", "masters"), [("float32", "fp32"), ("bfloat16", "fp32"), ("bfloat16", "kahan")]
)
def test_a_checkpoint_is_as_large_as_the_one_that_the_trainer_writes(
    tmp_path: Path, dtype: str, masters: str
) -> None:
    saved(CONFIGS["qwen3"], tmp_path / "model")
    counted = disk(tmp_path, tmp_path / "model", dtype=dtype, master_weights=masters)
    assert counted is not None
    model = build(CONFIGS["qwen3"], getattr(torch, dtype))
    train_only(model, None)
    settings = TrainingConfig(
        model_name=str(tmp_path / "model"),
        save_path=str(tmp_path / "out"),
        optimizer="adamw",
        master_weights=masters,
        device="cpu",
    )
    stepper = Stepper(model, settings)
    for param in stepper.params:
        param.sum().backward()
    stepper.compute()
    stepper.write()
    made = checkpoint.save_step(model, settings, stepper, step=1, version=1)
    files = made.path.rglob("*.safetensors")
    assert sum(file.stat().st_size for file in files) == pytest.approx(counted.each, rel=0.1)


@pytest.mark.parametrize(
    ("trainer", "number"),
    [({}, 20), ({"checkpoint_interval": 50}, 1), ({"keep_checkpoints": 2}, 3)],
)
def test_the_most_checkpoints_at_once_count(
    tmp_path: Path, trainer: dict[str, int], number: int
) -> None:
    found = disk(tmp_path, saved_in(tmp_path), **trainer)
    assert found is not None and found.checkpoints == number
    assert found.wanted == number * found.each and not found.warnings()


def test_adapters_are_small_and_no_interval_saves_nothing(tmp_path: Path) -> None:
    folder = saved_in(tmp_path)
    full, adapters = disk(tmp_path, folder), disk(tmp_path, folder, mode="lora_only")
    assert full is not None and adapters is not None and adapters.each < full.each
    assert disk(tmp_path, folder, checkpoint_interval=0) is None
    waiting = disk(tmp_path, folder, checkpoint_in_background=False)
    assert waiting is not None and full.host_copy == full.each
    assert waiting.host_copy == adapters.host_copy == 0
    assert any("copy in host memory" in line for line in full.lines())
    assert not any("copy in host memory" in line for line in waiting.lines())


def test_a_disk_that_is_too_small_is_a_warning_with_the_keys() -> None:
    (words,) = Disk(7 * GIB, 33, 3, keeps_all=True, free=100 * GIB).warnings()
    assert words == (
        "disk: 33 checkpoints take 231.0 GiB, but only 100.0 GiB are free. Fixes: raise "
        "trainer.checkpoint_interval (now 3); set trainer.keep_checkpoints = 3"
    )
    assert not Disk(7 * GIB, 33, 3, keeps_all=True, free=None).warnings()
    (words,) = Disk(7 * GIB, 4, 3, keeps_all=False, free=20 * GIB).warnings()
    assert words.endswith("Fixes: set trainer.keep_checkpoints = 1")
    (words,) = Disk(7 * GIB, 1, 40, keeps_all=True, free=6 * GIB).warnings()
    assert words == (
        "disk: 1 checkpoint takes 7.0 GiB, but only 6.0 GiB are free. Fixes: choose another disk "
        "(--run-dir)"
    )
