"""Mode `broadcast` over NCCL: trainer on GPU 0, servers on the others, with CUDA graphs and prefix
cache.

python -m pytest -m gpu tests/gpu/test_broadcast.py -s        # two GPUs: about six minutes; four:
tensor parallel too
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import psutil
import pytest
import torch

from atropos_envs.tiny_model import build_tiny_model, save_model
from tests.e2e import vllm_server_live
from tests.e2e.engine.test_broadcast import config
from tests.e2e.engine.test_lora import PROMPT, STEPS
from tests.e2e.engine.test_none import UPDATES, Whole
from tests.e2e.live_stack import LiveStack
from tests.e2e.streams import Streams
from tests.e2e.vllm_server_live import TOKEN, Server, end_of, start_server
from tests.gpu.big_model import make_qwen3_1_7b
from tests.gpu.test_reload_parallel import BF16, mean_gap
from trainer_core.errors import EngineGone
from trainer_core.weight_sync.base import Start
from trainer_core.weight_sync.broadcast import Broadcast

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(590),
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]
Start_ = Callable[..., LiveStack]
FLAGS = ("--no-enforce-eager", "--dtype", "bfloat16", "--kv-cache-memory-bytes", str(1 << 30))


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    monkeypatch.setattr(vllm_server_live, "START_S", 400.0)


def serve(folder: Path, model: Path, gpus: str) -> Server:
    folder.mkdir(parents=True, exist_ok=True)
    ranks = len(gpus.split(","))
    flags = (*FLAGS, "--tensor-parallel-size", str(ranks))
    return start_server(
        folder, model, flags=flags, ATROPOS_TOKEN=TOKEN, CUDA_VISIBLE_DEVICES=gpus, **UPDATES
    )


@pytest.mark.parametrize(
    "layout",
    [
        ("1",),
        pytest.param(("1,2",), marks=pytest.mark.skipif(GPUS < 3, reason="needs three GPUs")),
        pytest.param(("1", "2,3"), marks=pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")),
    ],
    ids=["one server", "tensor parallel", "two servers"],
)
def test_broadcasts_under_streams(layout: tuple[str, ...], tmp_path: Path) -> None:
    model = save_model(build_tiny_model(dtype="bfloat16"), tmp_path / "model")
    servers = [serve(tmp_path / gpus, model, gpus) for gpus in layout]
    settings = config(
        model,
        "",
        vllm_urls=[each.url for each in servers],
        dtype="bfloat16",
        device="cuda:0",
        lr=2e-4,
    )
    trainer = Whole(Broadcast, settings, device=torch.device("cuda:0"))  # type: ignore[arg-type]
    loads = [Streams(each.url, TOKEN, prompt=PROMPT, max_tokens=24) for each in servers]
    # A run of two servers on four GPUs was silent here for two minutes: every wait below has a
    # limit of its own, so the last line, or the threads' places after two minutes, tell which part
    # it was.
    faulthandler.dump_traceback_later(120, repeat=True)
    try:
        for server, load in zip(servers, loads, strict=True):
            load.__enter__()
            load.until(20)
            print(f"{server.url} generates", flush=True)
        reports = []
        for number in range(STEPS):
            reports.append(trainer.step())
            print(f"step {number + 1}: {reports[-1].seconds:.3f} s", flush=True)
            for load in loads:
                load.until(2)
        published = time.monotonic()
        for load in loads:
            load.until(60)
            load.__exit__()
            load.assert_whole()
            newest = [each for each in load.completions if each.sent > published]
            now, before = mean_gap(trainer, newest), mean_gap(trainer, load.completions[:16])
            print(f"\nmean |diff| {now:.4f} now, {before:.4f} to the base model's")
            assert now < BF16 < before
        print({name: f"{seconds * 1000:.1f} ms" for name, seconds in reports[-1].phases.items()})
        for server in servers:
            assert "Graph capturing finished" in server.log.read_text(), "CUDA graphs were on"
    finally:
        faulthandler.cancel_dump_traceback_later()
        trainer.sync.close()
        for server in servers:
            end_of(server.process)


def test_3_4_gb_arrive_quickly(tmp_path: Path) -> None:
    """The figure of vLLM's own path, and then as much less as goes."""
    model = make_qwen3_1_7b(tmp_path / "model")
    server = serve(tmp_path / "server", model, "1")
    device = torch.device("cuda:0")
    settings = config(model, server.url, dtype="bfloat16", device="cuda:0")
    sync = Broadcast(settings, device, threading.Event())
    try:
        began = time.perf_counter()
        policy = sync.attach(Start())
        print(f"\nattach {time.perf_counter() - began:.2f} s")
        norm = policy.get_parameter("model.norm.weight")
        reports = []
        for version in range(1, 12):
            with torch.no_grad():
                reports.append(sync.publish(version, lambda: norm.mul_(1.0)))
        for name in reports[-1].phases:
            each = sorted(report.phases[name] * 1000 for report in reports[1:])
            print(f"{name}: median {each[5]:.1f} ms, fastest {each[0]:.1f}, slowest {each[-1]:.1f}")
        size = sum(p.numel() * p.element_size() for p in policy.parameters())
        received = sorted(report.phases["receive"] for report in reports[1:])[5]
        print(f"{size / 1e9:.2f} GB in {received * 1000:.1f} ms: {size / received / 1e9:.0f} GB/s")
        assert 3.3e9 < size < 3.6e9
        assert received < 0.085
    finally:
        sync.close()
        end_of(server.process)


def test_a_server_whose_engine_hangs_is_named(tmp_path: Path) -> None:
    """It answers HTTP, and its workers come neither to the meeting nor to NCCL: the trainer says
    which, and ends."""
    model = save_model(build_tiny_model(dtype="bfloat16"), tmp_path / "model")
    server = serve(tmp_path / "server", model, "1")
    settings = config(
        model, server.url, dtype="bfloat16", device="cuda:0", broadcast_timeout=5, engine_timeout=5
    )
    try:
        for process in psutil.Process(server.process.pid).children(recursive=True):
            process.suspend()
        began = time.monotonic()
        with pytest.raises(EngineGone) as raised:
            Broadcast(settings, torch.device("cuda:0"), threading.Event()).attach(Start())
        print(f"\nafter {time.monotonic() - began:.1f} s: {raised.value}")
        assert "phase rendezvous" in str(raised.value) and server.url in str(raised.value)
    finally:
        end_of(server.process)


def test_four_processes_and_a_killed_server(stack: Start_) -> None:
    """The trainer's broadcast to a server that dies is aborted; the new server gets the present
    weights."""
    run = stack(
        profile="arithmetic-gpu",
        mode="broadcast",
        vllm__gpus="[1]",
        trainer__gpus="[0]",
        trainer__training_steps=60,
        trainer__checkpoint_interval=0,
    )
    run.until_step(10, timeout=400)
    os.kill(run.pid_of("vllm"), signal.SIGKILL)
    code, output = run.wait(timeout=500)
    assert code == 0, output[-6000:]
    steps = run.telemetry("step")
    assert [step.step for step in steps] == list(range(1, 61)) and {
        step.attempt for step in steps
    } == {1}
    assert {record.attempt for record in run.states("vllm") if record.new == "healthy"} == {1, 2}
    alignment = run.telemetry("alignment")
    probes = [
        record.probe_diff_abs_mean for record in alignment if record.probe_diff_abs_mean is not None
    ]
    assert mean(probes) < BF16 and {record.verdict for record in alignment} == {"ok"}
    (bench,) = run.telemetry("benchmark")
    print(f"\n{bench.model_dump()}")
    run.assert_nothing_left()
