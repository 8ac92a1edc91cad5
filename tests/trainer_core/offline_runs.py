"""Runs without a server: made-up groups in a file, and their settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from trainer_core.config import TrainingConfig

STEPS = 4


def group_of(seed: int, size: int = 4, **extra: Any) -> dict[str, Any]:
    """A group of `size` made-up completions of 2 to 6 tokens."""
    rng = np.random.default_rng(seed)
    prompt = [3 + seed % 5, 12, 4, 13]
    made = [rng.integers(3, 14, rng.integers(2, 7)).tolist() for _ in range(size)]
    return {
        "tokens": [prompt + ids for ids in made],
        "masks": [[-100] * 4 + ids for ids in made],
        "scores": [float(sum(i % 2 for i in ids)) + rng.random() for ids in made],
        "inference_logprobs": [[1.0] * 4 + rng.uniform(-3, -1, len(ids)).tolist() for ids in made],
        "env_id": 0,
        **extra,
    }


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def offline_config(base: Path, tmp_path: Path, **fields: Any) -> TrainingConfig:
    """Four steps of two groups of four, of the model in `base`, in float32 on the CPU."""
    return TrainingConfig.model_validate(
        {
            "model_name": str(base),
            "dtype": "float32",
            "device": "cpu",
            "optimizer": "adamw",
            "lr": 1e-3,
            "training_steps": STEPS,
            "batch_size": 4,
            "gradient_accumulation_steps": 2,
            "checkpoint_interval": 0,
            "save_path": str(tmp_path / "offline"),
            **fields,
        }
    )
