"""A server killed in single copy over CUDA IPC: what the trainer saves, and that a new server
continues from it.

python -m pytest -m gpu tests/gpu/test_single_copy.py -s        # two server starts, about two
minutes

Killed while the trainer waits, the float32 copies are saved and nothing of the dead process's
memory is read. Killed while it computes, CUDA promises nothing: the step is saved, or the trainer
says that it is lost. The second run is a process of its own, since an error of CUDA would stay in
this one.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import pytest
import torch

from atropos_common.protocol.manifest import read_manifest
from atropos_common.protocol.records import parse_line
from atropos_envs.tiny_model import build_tiny_model, save_model
from tests.e2e.vllm_server_live import end_of, still_running
from tests.gpu.test_weight_sync import begin, until_ready
from tests.trainer_core.policy.test_cuda import Sampled
from tests.trainer_core.stand_ins import TOKEN
from trainer_core.checkpoints import checkpoint
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineGone
from trainer_core.loop import train
from trainer_core.policy.load import load_model
from trainer_core.policy.logprobs import completions_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]


class Killer(Sampled):
    """Rollouts from the server, until it is killed before the batch after step `last`; keeps every
    batch. `computing`: that batch, made while the server lived, is still handed out."""

    def __init__(self, url: str, pid: int, last: int, kept: Path, *, computing: bool) -> None:
        super().__init__(url)
        self.pid, self.last, self.kept, self.computing = pid, last, kept, computing

    def next_batch(self, step: int, on_idle: Any = None) -> list[dict[str, Any]]:
        batch = super().next_batch(step, on_idle)
        (self.kept / f"batch_{step}.json").write_text(json.dumps(batch))
        if step == self.last:
            server = psutil.Process(self.pid)
            family = [
                server,
                *server.children(recursive=True),
            ]  # the engine's process owns the memory
            os.kill(self.pid, signal.SIGKILL)
            deadline = time.monotonic() + 20
            while still_running(family) and time.monotonic() < deadline:
                time.sleep(0.01)
            if not self.computing:
                on_idle()
        return batch


def _train(
    base: Path, manifest: Path, out: Path, last: int, *, computing: bool, **fields: Any
) -> None:
    """Train up to step `last`, then the server dies."""
    config = TrainingConfig(
        model_name=str(base),
        weight_bridge_mode="shared_vllm",
        vllm_config_path=str(manifest),
        optimizer="adamw",
        lr=1e-3,
        training_steps=100,
        batch_size=4,
        gradient_accumulation_steps=4,
        checkpoint_interval=0,
        max_model_len=256,
        save_path=str(out),
        **fields,
    )
    out.mkdir(exist_ok=True)
    server = read_manifest(manifest)
    api = Killer(server.base_url, server.server_pid, last, out, computing=computing)
    with pytest.raises(EngineGone):
        train(config, api=api)  # type: ignore[arg-type]


def _resumed(base: Path, manifest: Path, out: Path, last: int, log: Path) -> None:
    """A process of its own."""
    with log.open("w") as target:
        os.dup2(target.fileno(), 1)
        os.dup2(target.fileno(), 2)
        _train(base, manifest, out, last, computing=True, resume="auto")


def _gap(weights: Path, batch: Path) -> float:
    """Mean |server - the model in `weights`| over what the server answered, in nats."""
    model = load_model(weights, torch.bfloat16, torch.device("cuda"))
    pairs, theirs = [], []
    for group in json.loads(batch.read_text()):
        for tokens, mask, logprobs in zip(
            group["tokens"], group["masks"], group["inference_logprobs"], strict=True
        ):
            start = mask.count(-100)
            pairs.append((tokens[:start], tokens[start:]))
            theirs += logprobs[start:]
    ours = [value for one in completions_logprobs(model, pairs) for value in one]
    return mean(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def _saved(out: Path) -> list[str]:
    return [path.name for path in checkpoint.complete_checkpoints(out)]


def _records(out: Path, kind: str) -> list[Any]:
    records = [parse_line(line) for line in (out / "telemetry.jsonl").read_text().splitlines()]
    return [record for record in records if record.kind == kind]


def test_what_is_left_when_the_server_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    base, out = save_model(build_tiny_model(dtype="bfloat16"), tmp_path / "tiny"), tmp_path / "out"
    manifest, log = tmp_path / "bridge" / "vllm_bridge_config.json", tmp_path / "second.log"
    first = begin("shared_vllm", base, tmp_path)
    try:
        until_ready(first)
        _train(base, manifest, out, 3, computing=False)
        said = capsys.readouterr().out
        assert (
            "Sharing proved" in said
            and "No step is lost: the weights of step 3 are intact after the end of the server"
            in said
        ), said
        assert _saved(out) == ["step_3"]
        torch.cuda.synchronize()  # this process's CUDA context is whole
    finally:
        end_of(first.process)
    written = _gap(out / "step_3", out / "batch_3.json")
    unlike = _gap(base, out / "batch_3.json")

    second = begin("shared_vllm", base, tmp_path)
    try:
        until_ready(second)
        child = multiprocessing.get_context("spawn").Process(
            target=_resumed, args=(base, manifest, out, 5, log)
        )
        child.start()
        child.join(200)
        said = log.read_text()
        assert child.exitcode == 0, said
    finally:
        end_of(second.process)
    print(
        f"\nsaved at the kill against what the server had said {written:.4f}, the base model "
        f"{unlike:.4f}; {said}"
    )
    assert "Resuming from" in said and "weight version 3" in said
    assert max(written, _gap(out / "step_3", out / "batch_3.json")) < 0.03 < unlike
    steps = [(record.step, record.weight_version) for record in _records(out, "step")]
    assert steps[:5] == [(n, n) for n in range(1, 6)]
    assert {record.verdict for record in _records(out, "alignment")[:5]} == {"ok"}
    if "No step is lost" in said:
        assert _saved(out) == ["step_3", "step_6"] and steps[5:] == [(6, 6)]
        weights = load_model(out / "step_6", torch.float32, torch.device("cpu")).parameters()
        assert all(torch.isfinite(weight).all() for weight in weights)
    else:
        assert "are lost with the server" in said and "Last checkpoint" in said
        assert _saved(out) == ["step_3"]
