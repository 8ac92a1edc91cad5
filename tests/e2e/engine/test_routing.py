"""Routing recorded by real vLLM and replayed in the trainer: it is the routers' choice, and
complete.

python -m pytest -m e2e tests/e2e/engine/test_routing.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from atropos_common.system.run_dir import ENV_CONTROL_SOCKET, ENV_RUN_DIR, ENV_TOKEN
from tests.e2e.gate import PROMPTS, Live, alignments, train_on
from tests.e2e.small_models import make_model
from tests.e2e.vllm_server_live import TOKEN, Server, end_of, start_server
from trainer_core.errors import UsageError
from trainer_core.policy.load import load_model
from trainer_core.policy.logprobs import whole_row
from trainer_core.policy.routing import own_experts, replay_in
from trainer_core.rollouts.asking import RoutingAsker
from trainer_core.server.client import ServerClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
RECORDS = ("--enable-return-routed-experts",)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv(ENV_TOKEN, TOKEN)
    for name in (ENV_RUN_DIR, ENV_CONTROL_SOCKET, "LOGDIR", "VLLM_BRIDGE_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("routing")
    made = start_server(
        folder, make_model("qwen3-moe", folder / "model"), flags=RECORDS, ATROPOS_TOKEN=TOKEN
    )
    yield made
    made.process.terminate()  # so that it removes its shared file
    made.process.wait(20)
    end_of(made.process)


class Turns(Live):
    """Each sequence has two turns with something in between; the second is read as a stream of
    deltas, which brings no logprobs."""

    def _group(self, prompt: list[int]) -> dict[str, Any]:
        group = super()._group(prompt)
        for i, tokens in enumerate(group["tokens"]):
            between = [3 + i, 4, 5]
            second = self._streamed([*tokens, *between])
            group["tokens"][i] = [*tokens, *between, *second]
            group["masks"][i] += [-100] * len(between) + second
            group["inference_logprobs"][i] += [1.0] * (len(between) + len(second))
        return group

    def _streamed(self, prompt: list[int]) -> list[int]:
        body = {
            "model": str(self.server.model),
            "prompt": prompt,
            "max_tokens": 6,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        ids: list[int] = []
        with httpx.stream(
            "POST", self.server.url + "/v1/completions", json=body, timeout=60
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: "))["choices"]
                    ids += (choices[0].get("token_ids") or []) if choices else []
        assert len(ids) == 6
        return ids


def test_what_is_recorded_is_what_routers_chose(server: Server) -> None:
    """In float32 both sides agree about every token, those on a cached prefix as well."""
    model = load_model(server.model, torch.float32, torch.device("cpu"))
    shape = replay_in(model)
    client = ServerClient(server.url, TOKEN)
    assert client.info().records_routing
    asker, cached = RoutingAsker([client.routing], shape), 0
    for prompt in (PROMPTS[0], PROMPTS[0], PROMPTS[1][:3]):
        answer = server.generate(
            prompt=prompt, n=3, max_tokens=20, ignore_eos=True, temperature=1.0
        )
        cached += sum(count or 0 for count in answer["cached_tokens"])
        for ids in answer["token_ids"]:
            experts = asker.of_answer(prompt, ids)
            assert experts is not None and (experts[-1] == -1).all(), "nothing read the last token"
            own = own_experts(model, whole_row([torch.tensor([*prompt, *ids])])).numpy()
            assert (np.sort(experts[:-1], -1) == np.sort(own[:-1], -1)).all()
    assert cached > 0
    assert asker.of_answer(PROMPTS[2], [5, 6, 7]) is None


@pytest.mark.parametrize("live", [Live, pytest.param(Turns, marks=pytest.mark.slow)])
def test_a_run_takes_all_of_it(server: Server, live: type[Live], tmp_path: Path) -> None:
    """At every version of the weights; the probe, replayed too, finds no difference."""
    found = alignments(train_on(server, tmp_path, live(server), routing_replay=True))
    assert [one.routing_replayed for one in found] == [1.0] * 3
    assert [one.verdict for one in found] == ["ok"] * 3
    probes = [one.probe_diff_abs_mean for one in found if one.probe_diff_abs_mean is not None]
    assert probes and max(probes) < 1e-4


@pytest.mark.slow
def test_a_server_that_records_nothing_is_refused(tmp_path: Path) -> None:
    made = start_server(tmp_path, make_model("qwen3-moe", tmp_path / "model"), ATROPOS_TOKEN=TOKEN)
    try:
        with pytest.raises(UsageError, match="start it with --enable-return-routed-experts"):
            train_on(made, tmp_path, routing_replay=True)
    finally:
        made.process.terminate()
        made.process.wait(20)
        end_of(made.process)


@pytest.mark.slow
def test_a_dense_model_is_refused_by_the_server(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="--enable-return-routed-experts with --model"):
        start_server(
            tmp_path,
            make_model("tiny qwen3", tmp_path / "model"),
            flags=RECORDS,
            ATROPOS_TOKEN=TOKEN,
        )
