"""Models whose tensors real vLLM stores in other ways than the checkpoint. Single copy finds them
by what vLLM's loader did, a broadcast and a load in place by the checkpoint's names.

python -m pytest -m e2e tests/e2e/engine/test_any_model.py    # experts
python -m pytest -m "e2e and slow" tests/e2e/engine/test_any_model.py    # the others
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atropos_common.system.run_dir import ENV_CONTROL_SOCKET, ENV_RUN_DIR, ENV_TOKEN
from tests.e2e.engine.test_broadcast import config as broadcast
from tests.e2e.engine.test_none import UPDATES
from tests.e2e.engine.test_none import config as none
from tests.e2e.gate import PROMPTS
from tests.e2e.gate import config as single_copy
from tests.e2e.small_models import OTHERS, make_model
from tests.e2e.vllm_server_live import TOKEN, Server, end_of, largest_gap, start_server
from trainer_core.policy.load import checkpoint_tensors
from trainer_core.weight_sync.base import Start, WeightSync
from trainer_core.weight_sync.broadcast import Broadcast
from trainer_core.weight_sync.none_reload import Reload
from trainer_core.weight_sync.shared_vllm import SingleCopy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
IN_CI = "qwen3-moe"
NAMES = [pytest.param(name, marks=() if name == IN_CI else pytest.mark.slow) for name in OTHERS]
EXACT = 1e-4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.setenv(ENV_TOKEN, TOKEN)
    for name in (ENV_RUN_DIR, ENV_CONTROL_SOCKET, "LOGDIR", "VLLM_BRIDGE_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Any]:
    """Starts one server for a model."""
    made: list[Server] = []

    def serve(name: str, **env: str) -> Server:
        model = make_model(name, tmp_path / "model")
        made.append(
            start_server(
                tmp_path, model, ATROPOS_TOKEN=TOKEN, **{"ATROPOS_HOLD_GENERATION": "1", **env}
            )
        )
        return made[-1]

    yield serve
    for each in made:
        each.process.terminate()  # so that it removes its shared file
        each.process.wait(20)
        end_of(each.process)


@torch.no_grad()
def change(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(
            0.85 + torch.rand_like(parameter) * 0.3
        )  # as large as before, or rounding shows


def answer_of(server: Server) -> dict[str, Any]:
    return server.generate(prompt=PROMPTS[0], n=2, max_tokens=12, ignore_eos=True, temperature=1.0)


class Plain:
    """The policy's present weights in a model of transformers' own, which knows nothing of packed
    rows or views."""

    def __init__(self, server: Server, policy: torch.nn.Module) -> None:
        from transformers import AutoModelForCausalLM

        self.policy = policy
        self.model = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32).eval()

    @torch.no_grad()
    def gap(self, answer: dict[str, Any]) -> float:
        for mine, theirs in zip(self.model.parameters(), self.policy.parameters(), strict=True):
            mine.copy_(theirs)
        return largest_gap(self.model, answer)


def assert_follows(server: Server, sync: WeightSync, model: torch.nn.Module, first: int) -> None:
    """Assert that the server's answers are those of the trainer's weights, at two versions."""
    plain = Plain(server, model)
    for version in (first, first + 1):
        before = answer_of(server)
        assert plain.gap(before) < EXACT
        sync.publish(version, lambda: change(model))
        after = answer_of(server)
        print(f"\nversion {version}: {plain.gap(after):.1e}, moved by {plain.gap(before):.2f}")
        assert plain.gap(after) < EXACT
        assert plain.gap(before) > 100 * EXACT, "the change must show, or this test sees nothing"


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_single_copy(name: str, serving: Any, tmp_path: Path) -> None:
    server = serving(name)
    assert "kinds of layers compute from the weights in place" in server.log.read_text()
    sync = SingleCopy(single_copy(server, tmp_path), CPU, threading.Event())
    model = sync.attach(Start())
    checkpoint = load_file(server.model / "model.safetensors")
    mine = checkpoint_tensors(model)
    assert mine.keys() == checkpoint.keys()
    assert all(torch.equal(mine[tensor], checkpoint[tensor]) for tensor in mine), "bit for bit"
    assert_follows(server, sync, model, 1)
    sync.close()


@pytest.mark.parametrize("name", NAMES)
def test_broadcast_and_load_in_place(name: str, serving: Any, tmp_path: Path) -> None:
    server = serving(name, ATROPOS_RUN_DIR=str(tmp_path), **UPDATES)
    sync: WeightSync = Broadcast(broadcast(server.model, server.url), CPU, threading.Event())
    assert_follows(server, sync, sync.attach(Start()), 1)
    sync.close()
    assert server.get("/bridge/info").json()["load_obstacle"] is None
    sync = Reload(none(server.model, tmp_path, server.url), CPU, threading.Event())
    assert_follows(server, sync, sync.attach(Start(version=3)), 4)
    sync.close()
