"""A model that vLLM serves in part: its Qwen3 silently drops biases of the output projections.

python -m pytest -m e2e tests/e2e/engine/test_served_in_part.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atropos_common.protocol.bridge import LoadWeightsRequest
from atropos_common.system.run_dir import ENV_CONTROL_SOCKET, ENV_RUN_DIR, ENV_TOKEN
from tests.e2e.engine import test_broadcast, test_none
from tests.e2e.engine.test_none import UPDATES, Whole
from tests.e2e.small_models import make_model
from tests.e2e.vllm_server_live import TOKEN, Server, end_of, start_server
from trainer_core.errors import EngineError
from trainer_core.server.client import ServerClient
from trainer_core.weight_sync.broadcast import Broadcast
from trainer_core.weight_sync.none_reload import Reload

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]
SAYS = "has no place for 3 of the tensors, such as model.layers.0.self_attn.o_proj.bias"


def start(folder: Path) -> Server:
    return start_server(
        folder, folder / "model", ATROPOS_TOKEN=TOKEN, ATROPOS_RUN_DIR=str(folder), **UPDATES
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("part")
    make_model("qwen3-tied", folder / "model", attention_bias=True)
    made = start(folder)
    yield made
    end_of(made.process)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENV_CONTROL_SOCKET, ENV_RUN_DIR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(ENV_TOKEN, TOKEN)
    torch.set_num_threads(1)


def _serves_nobody(server: Server) -> None:
    health = server.get("/health", token=False)
    assert health.status_code == 503
    assert SAYS in health.text


def test_its_log_says_so_and_no_mode_trains_it(server: Server) -> None:
    assert SAYS in server.log.read_text(), "the start warns"
    reloading = Whole(Reload, test_none.config(server.model, server.bridge_dir.parent, server.url))
    with pytest.raises(EngineError, match=SAYS):
        reloading.step()
    _serves_nobody(server)
    reloading.sync.close()

    with pytest.raises(EngineError, match=SAYS) as refused:
        Whole(Broadcast, test_broadcast.config(server.model, server.url))  # type: ignore[arg-type]
    assert "HTTP 409" in str(refused.value), "final: no other try would do"
    _serves_nobody(server)


def test_a_restart_with_a_trainer_s_weights_is_refused(server: Server) -> None:
    engine = ServerClient(server.url, TOKEN)
    engine.load_weights(
        LoadWeightsRequest(path=str(server.model), weight_version=1, at_restart=True)
    )
    engine.close()
    end_of(server.process)
    with pytest.raises(pytest.fail.Exception, match="no server after"):
        start(server.bridge_dir.parent)
    assert "ValueError: vLLM's Qwen3ForCausalLM " + SAYS in server.log.read_text()
