"""What unit tests share: one parser of the cockpit's commands, hosts to reach by ssh, and for whole
trainer runs a tiny model in a folder and an inference server that holds its weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from atropos_tui.cli import main
from atropos_tui.profile.budget import models

if TYPE_CHECKING:
    from tests.cluster.ssh_nodes import SshNodes
    from tests.unit.trainer_stand_ins import Engine

LAYERS = 2
"""Of the tiny model."""


@pytest.fixture(scope="session", autouse=True)
def _one_parser() -> Iterator[None]:
    """Building the cockpit's parser is three quarters of a command that runs in the test's own
    process, and thousands do. Parsing leaves a parser as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "build_parser", functools.cache(main.build_parser))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_hub() -> Iterator[None]:
    """Shipped profiles name hub models, and `plan` would ask the hub for their configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "_from_hub", lambda name: "model not on this machine")
        yield


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshNodes]:
    """Three hosts behind private sshds."""
    from tests.cluster.processes import Missing
    from tests.cluster.ssh_nodes import SshNodes

    try:
        with SshNodes(tmp_path_factory.mktemp("ssh")) as nodes:
            yield nodes
    except Missing as error:
        pytest.skip(str(error))


# torch is imported where it is used: most unit tests do without it.


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen3 with random weights: the demo's with two of its layers, since a
    layer is what most of a step takes."""
    import torch

    from atropos_envs.tiny_model import build_tiny_model, save_model

    torch.set_num_threads(1)
    model = build_tiny_model()
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers, model.config.layer_types = (
        LAYERS,
        model.config.layer_types[:LAYERS],
    )
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_model(model, folder)
    return folder


@pytest.fixture(scope="module")
def demo_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with all layers of the demo's."""
    import torch

    from atropos_envs.tiny_model import make_tiny_model

    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "demo")


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
