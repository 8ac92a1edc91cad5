"""The CUDA paths: packed attention by the variable-length kernel, single copy over CUDA IPC between
processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atropos_common.protocol.manifest import read_manifest
from atropos_common.protocol.records import parse_line
from atropos_envs.tiny_model import build_tiny_model, save_model
from benchmarks.support.model_zoo import ZOO, build
from tests.trainer_core.stand_ins import TOKEN, Engine
from trainer_core.config import TrainingConfig
from trainer_core.loop import train
from trainer_core.policy.attention import register
from trainer_core.policy.load import load_model
from trainer_core.policy.logprobs import row_logprobs
from trainer_core.policy.proof import prove
from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.packing import pack
from trainer_core.server.client import ServerClient

pytestmark = pytest.mark.gpu
PROMPTS = [[3 + i, 12, 4, 13] for i in range(4)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(build_tiny_model(dtype="bfloat16"), tmp_path_factory.mktemp("model") / "tiny")


def _rollouts() -> list[Rollout]:
    rng = np.random.default_rng(0)
    made = []
    for length in rng.integers(3, 60, 40).tolist():
        trained = np.arange(length) >= min(3, length - 1)
        tokens, zeros = rng.integers(0, 14, length), np.zeros(length, dtype=np.float32)
        made.append(Rollout(tokens, trained, zeros - 1, zeros + 1, 1.0, 0.0, "", ()))
    return made


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float32, 1e-4)])
def test_packed_on_the_gpu_equals_float32_on_the_cpu(
    base: Path, dtype: torch.dtype, tolerance: float
) -> None:
    device = torch.device("cuda")
    (row,) = pack(_rollouts(), 10_000)
    exact = row_logprobs(load_model(base, torch.float32, torch.device("cpu")), row)
    model = load_model(base, dtype, device)
    got = row_logprobs(model, row.to(device))
    got.sum().backward()
    assert got.dtype == torch.float32
    assert (got.cpu() - exact).abs().max() < tolerance
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", [name for name in ZOO if name not in ("Llama 4", "Nemotron")])
def test_every_architecture_is_proved_through_the_kernel(name: str) -> None:
    """In half precision, the proof in float32 and the row through the kernel; then a backward
    pass."""
    model = build(name, dtype=torch.bfloat16).cuda()
    model.set_attn_implementation(register())
    assert prove(model) < 1e-3
    (row,) = pack(_rollouts(), 10_000)
    row_logprobs(model, row.to(torch.device("cuda"))).sum().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


def _serve(base: str, folder: str, ready: Any, done: Any) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).cuda().eval()
    engine = Engine(Path(folder), model)
    ready.set()
    done.wait()
    engine.close()


@pytest.fixture
def manifest(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_serve, args=(str(base), str(tmp_path), ready, done))
    process.start()
    assert ready.wait(100)
    yield tmp_path / "vllm_bridge_config.json"
    done.set()
    process.join(20)


class Sampled:
    """Batches sampled from the server at the present weights, in place of run-api."""

    def __init__(self, url: str) -> None:
        self.engine = ServerClient(url, TOKEN)

    def next_batch(self, step: int, on_idle: Any = None) -> list[dict[str, Any]]:
        return [self._group(prompt) for prompt in PROMPTS]

    def _group(self, prompt: list[int]) -> dict[str, Any]:
        answers = [self.engine.generate(prompt, 4) for _ in range(4)]
        return {
            "tokens": [prompt + a.token_ids for a in answers],
            "masks": [[-100] * len(prompt) + a.token_ids for a in answers],
            "scores": [sum(i % 2 == 0 for i in a.token_ids) / 4 for a in answers],
            "inference_logprobs": [[1.0] * len(prompt) + a.logprobs for a in answers],
        }

    def close(self) -> None:
        self.engine.close()


def test_single_copy_over_cuda_ipc(
    base: Path, manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainingConfig(
        model_name=str(base),
        weight_bridge_mode="shared_vllm",
        vllm_config_path=str(manifest),
        optimizer="adamw",
        lr=1e-3,
        training_steps=15,
        batch_size=4,
        gradient_accumulation_steps=4,
        checkpoint_interval=0,
        save_path=str(tmp_path / "out"),
    )
    result = train(config, api=Sampled(read_manifest(manifest).base_url))  # type: ignore[arg-type]
    out = capsys.readouterr().out
    print(out)
    assert result.done and "Sharing proved" in out
    records = [
        parse_line(line) for line in (tmp_path / "out" / "telemetry.jsonl").read_text().splitlines()
    ]
    steps: list[Any] = [r for r in records if r.kind == "step"]
    alignments: list[Any] = [r for r in records if r.kind == "alignment"]
    assert all(a.verdict == "ok" and a.probe_diff_abs_mean < 0.05 for a in alignments)
    assert all(s.policy_lag_max == 0 for s in steps)
    assert sum(s.reward_mean for s in steps[-3:]) > sum(s.reward_mean for s in steps[:3]) + 0.3, (
        "it learns"
    )
