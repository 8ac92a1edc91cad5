"""Flags: the guides' names and defaults, every problem at once, and no torch before validation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atropos_common.system.run_dir import RunDir
from tests.support.cpu_time import cpu_seconds
from trainer_core.__main__ import build_parser, main, parse_args
from trainer_core.config import TrainingConfig, validate
from trainer_core.errors import UsageError

GUIDES = {
    "weight_bridge_mode": "none",
    "training_steps": 10,
    "checkpoint_interval": 3,
    "batch_size": 2,
    "gradient_accumulation_steps": 32,
    "warmup_steps": 0,
    "seq_len": 2048,
    "train_layer_indices": None,
    "clip_eps": 0.2,
    "kl_coef": 0.0,
    "lr": 1e-5,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": None,
    "lora_layer_indices": None,
    "vllm_port": 9001,
    "vllm_config_path": None,
    "gpu_memory_utilization": 0.45,
    "vllm_gpu": None,
    "max_model_len": 4096,
    "dtype": "bfloat16",
    "vllm_restart_interval": 3,
    "atropos_url": "http://localhost:8000",
    "use_wandb": False,
    "wandb_project": None,
    "wandb_group": None,
    "trainer_rank": 0,
    "world_size": 1,
    "init_method": "env://",
    "num_inference_nodes": 0,
    "debug_loading": False,
    "benchmark": False,
    "log_dir": "./logs",
    "optimizer": "adamw_8bit",
    "single_copy": False,
    "use_shared_memory": False,
    "save_path": "trained_model_checkpoints",
    "adafactor_scale_parameter": False,
    "adafactor_relative_step": False,
}


def test_the_guides_flags_and_defaults() -> None:
    config = parse_args(["--model", "m"])
    for name, default in GUIDES.items():
        assert getattr(config, name) == default, name
    flags = build_parser()._option_string_actions
    for name in [*GUIDES, "device", "model_name"]:
        assert "--" + name.replace("_", "-") in flags


def test_every_field_is_a_documented_flag() -> None:
    for name, field in TrainingConfig.model_fields.items():
        assert field.description, name
        assert "--" + name.replace("_", "-") in build_parser()._option_string_actions


def test_values_of_every_shape() -> None:
    flags = (
        "--model-name m --train-layer-indices 0-3,7 --lora-target-modules q_proj v_proj "
        "--betas 0.9 0.95 --benchmark "
        "--advantage-std false --vllm-gpu none --dtype float32 --lr 0"
    )
    config = parse_args(flags.split())
    assert config.train_layer_indices == [0, 1, 2, 3, 7]
    assert config.lora_target_modules == ["q_proj", "v_proj"]
    assert config.betas == (0.9, 0.95)
    assert (config.benchmark, config.advantage_std, config.vllm_gpu, config.lr) == (
        True,
        False,
        None,
        0.0,
    )


def test_to_args_round_trip() -> None:
    config = TrainingConfig(
        model_name="m",
        train_layer_indices=[1, 2],
        betas=(0.8, 0.9),
        benchmark=True,
        single_copy=True,
        lr=3e-4,
        weight_bridge_mode="shared_vllm",
        lora_target_modules=["q_proj", "k_proj"],
        advantage_std=False,
    )
    assert parse_args(config.to_args()) == config


def test_modes_and_sizes() -> None:
    assert TrainingConfig(model_name="m", weight_bridge_mode="shared_vllm").mode == "shared_vllm"
    assert (
        TrainingConfig(
            model_name="m", weight_bridge_mode="shared_vllm", use_shared_memory=True
        ).mode
        == "broadcast"
    )
    assert TrainingConfig(model_name="m").sequences_per_step == 64


def test_all_problems_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--bogus --lr x --training-steps 0 --single-copy --use-shared-memory --batch-size 3 "
        "--group-size 7"
    )
    assert main(flags.split()) == 2
    lines = capsys.readouterr().err
    for part in (
        "--bogus",
        "--model-name is required",
        "--lr 'x'",
        "--training-steps '0'",
        "exclude each other",
        "not a multiple of the group size 7",
    ):
        assert part in lines
    assert "Traceback" not in lines


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--weight-bridge-mode lora_only --train-layer-indices 0-1", "use --lora-layer-indices"),
        (
            "--weight-bridge-mode shared_vllm --use-shared-memory --init-method file://x",
            "--init-method",
        ),
        (
            "--weight-bridge-mode lora_only --single-copy true --vllm-urls http://a",
            "--vllm-urls does nothing with adapters in single copy",
        ),
        (
            "--weight-bridge-mode lora_only --in-flight wait",
            "--in-flight wait does nothing with adapters",
        ),
        ("--world-size 2", "torchrun sets the number of ranks"),
        ("--lr inf", "--lr 'inf': Input should be a finite number"),
        ("--stop-reward nan", "finite"),
        ("--train-layer-indices 3-1", "ends before it begins"),
        ("--single-copy", "needs --weight-bridge-mode"),
        ("--weight-bridge-mode shared_vllm --resume /nowhere/step_3", "not a checkpoint"),
    ],
)
def test_refusals_exit_2(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "m", *flags.split()]) == 2
    assert words in capsys.readouterr().err


def test_unknown_keys_are_refused() -> None:
    config, problems = validate({"model_name": "m", "learning_rate": 1})
    assert config is None and problems == [
        "learning_rate: no such setting. fix: it is called lr here"
    ]


def test_defaults_in_a_run_directory(tmp_path: Path) -> None:
    config = TrainingConfig(model_name="m").in_run_dir(RunDir(tmp_path))
    assert (config.save_path, config.resume) == (str(tmp_path / "checkpoints"), "auto")
    assert (
        TrainingConfig(model_name="m", resume="never").in_run_dir(RunDir(tmp_path)).resume
        == "never"
    )
    for given, kept in (
        ("r.jsonl", tmp_path / "r.jsonl"),
        ("/elsewhere/r.jsonl", Path("/elsewhere/r.jsonl")),
    ):
        recording = TrainingConfig(model_name="m", record_rollouts=given).in_run_dir(
            RunDir(tmp_path)
        )
        assert recording.record_rollouts == str(kept)


def test_layer_indices_may_stand_apart() -> None:
    for words in (["0-3", "7"], ["0-3,7"], ["0-3, 7"]):
        assert parse_args(
            ["--model", "m", "--train-layer-indices", *words]
        ).train_layer_indices == [0, 1, 2, 3, 7]


def test_layer_indices_reject_nonsense() -> None:
    with pytest.raises(UsageError, match="not a layer index"):
        parse_args(["--model", "m", "--lora-layer-indices", "a-b"])


def test_torch_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys, trainer_core; assert not {'torch', 'pydantic'} & set(sys.modules); "
        "import trainer_core.config, trainer_core.__main__, trainer_core.checkpoints.checkpoint; "
        "import trainer_core.rollouts.client, trainer_core.weight_sync.base; "
        "trainer_core.TrainingConfig; "
        "assert not {'torch', 'transformers', 'vllm', 'textual', 'atropos_tui'} & "
        "set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_help_is_quick() -> None:
    assert cpu_seconds("-m", "trainer_core", "--help") < 1.0, "0.3 s when the machine is idle"
