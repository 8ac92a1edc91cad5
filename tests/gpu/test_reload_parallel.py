"""Mode `none` with tensor parallel 2 on two GPUs: vLLM splits a whole model in place, with CUDA
graphs.

python -m pytest -m gpu tests/gpu/test_reload_parallel.py -s        # two GPUs, about two minutes
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import mean

import pytest
import torch

from atropos_envs.tiny_model import build_tiny_model, save_model
from tests.e2e import vllm_server_live
from tests.e2e.engine.test_lora import PROMPT, STEPS
from tests.e2e.engine.test_none import UPDATES, Whole, config
from tests.e2e.streams import Streamed, Streams
from tests.e2e.vllm_server_live import TOKEN, end_of, start_server
from trainer_core.policy.logprobs import sequence_logprobs
from trainer_core.weight_sync.none_reload import Reload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(560),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

BF16 = 0.03
"""Largest mean |difference| of logprobs in bfloat16."""


def mean_gap(trainer: Whole, completions: list[Streamed]) -> float:
    """Mean |server - trainer at its present weights| over all tokens."""
    gaps: list[float] = []
    for done in completions:
        ours = sequence_logprobs(trainer.model, done.prompt, done.token_ids)
        gaps += [abs(a - b) for a, b in zip(ours, done.logprobs, strict=True)]
    return mean(gaps)


def test_two_ranks_load_under_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    monkeypatch.setattr(vllm_server_live, "START_S", 400.0)
    model = save_model(build_tiny_model(dtype="bfloat16"), tmp_path / "model")
    flags = (
        "--tensor-parallel-size",
        "2",
        "--no-enforce-eager",
        "--dtype",
        "bfloat16",
        "--kv-cache-memory-bytes",
        str(1 << 30),
        "--gpu-memory-utilization",
        "0.2",
    )
    server = start_server(tmp_path, model, flags=flags, ATROPOS_TOKEN=TOKEN, **UPDATES)
    settings = config(model, tmp_path, server.url, dtype="bfloat16", device="cuda:0", lr=2e-4)
    trainer = Whole(Reload, settings, device=torch.device("cuda:0"))
    try:
        with Streams(server.url, TOKEN, prompt=PROMPT, max_tokens=24) as load:
            load.until(20)
            reports = []
            for _ in range(STEPS):
                reports.append(trainer.step())
                load.until(2)
            published = time.monotonic()
            load.until(60)
        load.assert_whole()
        newest = [each for each in load.completions if each.sent > published]
        oldest = load.completions[:16]
        print(
            f"\nmean |diff| {mean_gap(trainer, newest):.4f} now, "
            f"{mean_gap(trainer, oldest):.4f} to the base model's"
        )
        print({name: f"{seconds * 1000:.1f} ms" for name, seconds in reports[-1].phases.items()})
        assert mean_gap(trainer, newest) < BF16 < mean_gap(trainer, oldest)
        assert "Graph capturing finished" in server.log.read_text(), "CUDA graphs were on"
    finally:
        trainer.sync.close()
        end_of(server.process)
