"""Fixtures of the trainer's tests: a tiny model in a folder, and an inference server that holds its
weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atropos_envs.tiny_model import build_tiny_model, save_model
from tests.trainer_core.stand_ins import TOKEN, Engine, plain_model

# Most of a step's time is its layers: two of the demo's are enough for most tests.
LAYERS = 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3 with random weights: the demo's model with `LAYERS` layers."""
    torch.set_num_threads(1)
    model = build_tiny_model()
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    model.config.layer_types = model.config.layer_types[:LAYERS]
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_model(model, folder)
    return folder


@pytest.fixture(scope="module")
def demo_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the demo's model with all its layers and random weights."""
    torch.set_num_threads(1)
    return save_model(build_tiny_model(), tmp_path_factory.mktemp("model") / "demo")


@pytest.fixture
def engine(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A server that decodes from weights in a shared file, with its token in the environment."""
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    torch.manual_seed(0)
    made = Engine(tmp_path, plain_model(base))
    yield made
    made.close()
