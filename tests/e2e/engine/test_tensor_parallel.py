"""Single copy over a tensor-parallel vLLM on a CPU: two workers, two ranks of the trainer, one copy
of the weights.

pytest -m "e2e and slow" tests/e2e/engine/test_tensor_parallel.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atropos_common.protocol.trainer_records import StepRecord
from tests.e2e.gate import PROMPTS, alignments, records
from tests.e2e.small_models import make_model
from tests.e2e.vllm_server_live import TOKEN, Server, end_of, largest_gap, start_server
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
FLAGS = ("--tensor-parallel-size", "2")
VOCABULARY = 96
"""vLLM pads it to 128: 64 rows for one worker, 32 and padding for the other."""


def train_a_rank(folder: Path, url: str, bridge_dir: str, model: str) -> int:
    """On each rank: twenty steps; rank 0 asks for the rollouts."""
    from tests.e2e.gate import Live, config
    from trainer_core.loop import train

    torch.set_num_threads(1)
    server = Server(None, url, Path(bridge_dir), folder / "none", Path(model))  # type: ignore[arg-type]
    api: Any = Live(server) if os.environ["RANK"] == "0" else None
    train(config(server, folder, training_steps=20, lr=5e-4), api=api)
    return 0


@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("parallel")
    model = make_model(request.param, folder / "model", vocab_size=VOCABULARY)
    running = start_server(
        folder,
        model,
        flags=FLAGS,
        ATROPOS_TOKEN=TOKEN,
        ATROPOS_HOLD_GENERATION="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    yield running
    end_of(running.process)


def test_exact_before_and_after_twenty_steps(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with one rank: the engine answers what transformers does with the base weights, then with
    the saved ones."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    for name in ("ATROPOS_RUN_DIR", "LOGDIR", "VLLM_BRIDGE_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)
    shards = server.manifest().ranks
    assert len(shards) == 2 and len({shard.shm_path for shard in shards.values()}) == 2
    body = {"prompt": PROMPTS[0], "n": 4, "max_tokens": 24, "ignore_eos": True}
    base = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32).eval()
    before = largest_gap(base, server.post("/generate", body).json())
    ended = run_ranks(
        "tests.e2e.engine.test_tensor_parallel:train_a_rank",
        tmp_path,
        server.url,
        str(server.bridge_dir),
        str(server.model),
        limit_s=400.0,
    )
    assert [rank.code for rank in ended] == [0, 0], "\n".join(rank.output[-3000:] for rank in ended)
    assert (
        "✓ Sharing proved" in ended[0].output and "no weight memory of its own" in ended[0].output
    )
    trained = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out" / "final_model", dtype=torch.float32
    ).eval()
    fresh, cached = server.generate(**body), server.generate(**body)
    after, moved = (
        max(largest_gap(trained, fresh), largest_gap(trained, cached)),
        largest_gap(base, fresh),
    )
    print(f"\nbefore {before:.1e}, after 20 steps {after:.1e}; moved by {moved:.2f}")
    assert max(before, after) < 1e-4 and moved > 0.1
    found = records(tmp_path)
    assert [record.verdict for record in alignments(found)] == ["ok"] * 20
    assert all(record.probe_diff_abs_max < 1e-4 for record in alignments(found))
    steps = [record for record in found if isinstance(record, StepRecord)]
    assert [step.policy_lag_max for step in steps] == [0.0] * 20
    assert (steps[-1].entropy_mean or 0.0) > 0.5, (
        "a policy that is sure of itself would agree with anyone"
    )
