"""What tests of whole trainer runs share: a tiny model in a folder, and an inference server that holds its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.trainer_stand_ins import Engine

# torch is imported where it is used: most unit tests do without it.


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen3 with random weights."""
    import torch

    from atropos_envs.tiny_model import make_tiny_model

    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def engine(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A server that decodes from weights in a shared file, with its token in the environment."""
    import torch

    from tests.unit.trainer_stand_ins import TOKEN, Engine, plain_model

    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    torch.manual_seed(0)
    made = Engine(tmp_path, plain_model(base))
    yield made
    made.close()
