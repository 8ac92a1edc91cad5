"""Whole runs: single copy on a shared file, atroposlib's run-api, a server that decodes from the
file."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from atropos_common.protocol.manifest import ManifestError, write_manifest
from atropos_common.protocol.records import parse_line
from atropos_common.protocol.trainer_records import StepRecord, TimingRecord, table_of
from tests.support.nursery import TRAINER, forked
from tests.trainer_core.stand_ins import (
    TOKEN,
    Engine,
    EnvThread,
    Recorded,
    RunApiThread,
    group,
    plain_model,
    run_config,
    slice_of,
)
from trainer_core.checkpoints import checkpoint
from trainer_core.config import TrainingConfig
from trainer_core.errors import ApiError, EngineError, EngineGone, NonFiniteError, UsageError
from trainer_core.loop import TrainResult, train
from trainer_core.policy.load import attach_views, empty_model, load_config, load_model
from trainer_core.policy.logprobs import sequence_logprobs
from trainer_core.weight_sync.base import Start
from trainer_core.weight_sync.mapping import open_tensors
from trainer_core.weight_sync.shared_vllm import SingleCopy

CPU = torch.device("cpu")


@pytest.fixture
def api() -> Iterator[RunApiThread]:
    made = RunApiThread()
    yield made
    made.close()


def _attach(
    engine: Engine, base: Path, tmp_path: Path, start: Start | None = None, **fields: Any
) -> tuple[Any, Any]:
    sync = SingleCopy(run_config(engine, base, tmp_path, **fields), CPU, threading.Event())
    return sync, sync.attach(start or Start())


def test_every_parameter_is_a_view(engine: Engine, base: Path) -> None:
    config = load_config(str(base))
    model = empty_model(config, torch.float32)
    shard = engine.manifest.ranks[0]
    tensors = open_tensors(shard, CPU)
    assert attach_views(model, tensors, shard) == len(list(model.parameters()))
    original = load_model(str(base), torch.float32, CPU)
    for name, value in original.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), value, atol=0, rtol=0)
    for (name, ours), (_, theirs) in zip(
        model.named_buffers(), original.named_buffers(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0, msg=name)
    qkv = tensors["model.layers.1.self_attn.qkv_proj.weight"]
    k_proj = model.get_parameter("model.layers.1.self_attn.k_proj.weight")
    with torch.no_grad():
        k_proj[0, 0] = 77.0
    assert qkv[128, 0] == 77.0 == engine.tensors["model.layers.1.self_attn.qkv_proj.weight"][128, 0]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda tensors, views: views.pop(GATE), "gate_proj.weight: missing on the server"),
        (
            lambda tensors, views: tensors.update({"model.extra.weight": torch.ones(3)}),
            "model.extra.weight: a tensor of",
        ),
        (
            lambda tensors, views: setattr(views[GATE], "shape", [64]),
            r"gate_proj.weight: \[.*\] does not fit",
        ),
        (
            lambda tensors, views: setattr(views[GATE], "stride", [0, 1]),
            "gate_proj.weight: no view covers its 1 parts",
        ),
    ],
)
def test_a_partial_mapping_is_refused_with_the_list(
    engine: Engine, base: Path, break_it: Any, words: str
) -> None:
    shard = engine.manifest.ranks[0].model_copy(deep=True)
    tensors = open_tensors(shard, CPU)
    break_it(tensors, shard.views)
    with pytest.raises(UsageError, match=words) as refused:
        attach_views(empty_model(load_config(str(base)), torch.float32), tensors, shard)
    assert "broadcast, lora_only" in str(refused.value), "and what works instead"


def test_attach_proves_sharing_and_resumes_as_version_0(
    engine: Engine, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = engine.tensors["model.norm.weight"].clone()
    sync, model = _attach(engine, base, tmp_path)
    assert "Sharing proved" in capsys.readouterr().out
    assert torch.equal(engine.tensors["model.norm.weight"], before)
    assert (engine.version, engine.held) == (0, False)
    ((ids, theirs),) = engine.sample([3, 4], 5, 1)
    assert sequence_logprobs(model, [3, 4], ids) == pytest.approx(theirs, abs=1e-5)
    sync.close()


def test_a_trainer_that_died_while_it_proved_the_sharing_leaves_nothing(
    engine: Engine, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed before it put the value back: the next one must not take that for the base weights."""
    before = engine.tensors["model.norm.weight"].clone()
    engine.tensors["model.norm.weight"][0] += 64 * (1 + before[0].abs())
    sync, _ = _attach(engine, base, tmp_path)
    assert torch.equal(engine.tensors["model.norm.weight"], before)
    assert "Writing version 0" in capsys.readouterr().out
    sync.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offset": 10**9}, "not a tensor of the server's memory"),
        ({"offset": -1}, "not a tensor of the server's memory"),
        ({"stride": [1, 1, 1]}, "not a tensor of the server's memory"),
        ({"dtype": "float31"}, "a type float31"),
    ],
)
def test_an_entry_that_lies_elsewhere_is_refused(
    engine: Engine, change: dict[str, Any], words: str
) -> None:
    shard = engine.manifest.ranks[0].model_copy(deep=True)
    name = "model.embed_tokens.weight"
    shard.param_mappings[name] = shard.param_mappings[name].model_copy(update=change)
    with pytest.raises(ManifestError, match=words):
        open_tensors(shard, CPU)


def test_a_server_with_other_memory_is_found_out(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    engine.stale = True
    with pytest.raises(EngineError, match="does not see the trainer's writes"):
        _attach(engine, base, tmp_path)
    assert engine.held, "nothing may be generated from weights that are not shared"


def test_publish_writes_between_pause_and_resume(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    sync, _ = _attach(engine, base, tmp_path)
    engine.calls.clear()
    report = sync.publish(
        1, lambda: engine.calls.append(f"write while paused={engine.paused} dirty={engine.dirty}")
    )
    assert engine.calls == ["/bridge/pause", "write while paused=True dirty=True", "/bridge/resume"]
    assert list(report.phases) == ["pause", "write", "device_sync", "resume"]
    assert report.seconds == pytest.approx(sum(report.phases.values()))
    assert engine.version == 1


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"config": {"hidden_size": 64}}, ManifestError, "another model.*hidden_size 128 here, 64"),
        ({"instance_id": "old"}, ManifestError, "server instance old"),
        ({"server_create_time": 1.0}, ManifestError, "is gone"),
        (
            {"tensor_parallel_size": 2},
            UsageError,
            "a rank for each worker.*torchrun --nproc-per-node 2",
        ),
    ],
)
def test_a_foreign_manifest_is_refused(
    engine: Engine,
    base: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    write_manifest(engine.manifest.model_copy(update=changes), engine.manifest_path)
    with pytest.raises(error, match=words):
        _attach(engine, base, tmp_path)


def test_dtype_and_device_must_agree(engine: Engine, base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pass --dtype float32"):
        _attach(engine, base, tmp_path, dtype="bfloat16")
    with pytest.raises(ManifestError, match="--device cpu"):
        open_tensors(engine.manifest.ranks[0], torch.device("cuda"))


def test_a_used_server_gets_the_base_weights_back(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    engine.version = 7
    before = engine.tensors["model.norm.weight"].clone()
    engine.tensors["model.norm.weight"].add_(1.0)
    sync, _ = _attach(engine, base, tmp_path)
    assert torch.equal(engine.tensors["model.norm.weight"], before)
    assert engine.version == 0
    sync.close()


def test_a_pause_that_a_dead_trainer_left_is_taken_over(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    engine.version, engine.held, engine.paused = 0, False, True
    sync, _ = _attach(engine, base, tmp_path)
    assert engine.calls.index("/bridge/pause") < engine.calls.index("/bridge/resume")
    assert not engine.paused
    sync.close()


def _records(path: Path) -> list[Any]:
    return [parse_line(line) for line in path.read_text().splitlines()]


def _run(
    config: TrainingConfig, engine: Engine, api: RunApiThread, stop: threading.Event | None = None
) -> TrainResult:
    env = EnvThread(api.url, engine, groups=4, size=4)
    try:
        return train(config, stop=stop)
    finally:
        env.close()


def _when_version(engine: Engine, version: int, act: Any) -> None:
    while (engine.version or 0) < version:
        time.sleep(0.01)
    act()


def test_a_whole_run(
    engine: Engine,
    api: RunApiThread,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = run_config(
        engine, base, tmp_path, api.url, training_steps=12, checkpoint_interval=5, benchmark=True
    )
    result = _run(config, engine, api)
    out = capsys.readouterr().out
    assert (result.done, result.step, result.weight_version, engine.version) == (True, 12, 12, 12)
    records = _records(tmp_path / "out" / "telemetry.jsonl")
    assert [r.seq for r in records] == list(range(len(records)))
    kinds = {r.kind for r in records}
    assert kinds == {
        "step",
        "alignment",
        "timing",
        "memory",
        "sync",
        "rollout",
        "checkpoint",
        "benchmark",
    }
    steps = [r for r in records if isinstance(r, StepRecord)]
    assert [s.step for s in steps] == list(range(1, 13)) == [s.weight_version for s in steps]
    described = (Path(__file__).parents[3] / "docs" / "telemetry.md").read_text(encoding="utf-8")
    assert table_of(StepRecord) in described, "docs/telemetry.md has the rows of `table_of`"
    assert not steps[0].model_extra, "every field of a step is declared"
    assert sum(s.reward_mean for s in steps[-3:]) > sum(s.reward_mean for s in steps[:3]), (
        "it learns"
    )
    timings = [r for r in records if isinstance(r, TimingRecord)]
    for step, timing in zip(steps, timings, strict=True):
        accepted = round((timing.accepted_tokens_per_s or 0.0) * timing.step_s)
        assert accepted + step.left_out_tokens.get("flat", 0) == step.tokens
    assert all(s.policy_lag_max is not None and 0 <= s.policy_lag_max <= 3 for s in steps)
    alignments = [r for r in records if r.kind == "alignment"]
    assert all(a.verdict in ("ok", "drift") and a.probe_tokens == 32 for a in alignments)
    assert max(a.probe_diff_abs_max for a in alignments) < 1e-4
    rollout = next(r for r in records if r.kind == "rollout")
    assert re.fullmatch(r"\d\+2=", rollout.prompt) and rollout.env == "even"
    for line in (
        "✓ inference_logprobs found in batch (sample len: 7)",
        "BENCHMARK SUMMARY (shared_vllm)",
        "Mapped 24/24 params",
        "Starting from the base model",
        "step 12/12",
    ):
        assert line in out, line
    served = plain_model(tmp_path / "out" / "final_model")
    for name, value in served.named_parameters():
        assert torch.equal(value, slice_of(engine.tensors, name, value)), name
    saved = load_file(tmp_path / "out" / "final_model" / "model.safetensors")
    assert "lm_head.weight" not in saved
    assert torch.equal(saved["model.norm.weight"], engine.tensors["model.norm.weight"])
    assert [p.name for p in checkpoint.complete_checkpoints(tmp_path / "out")] == [
        "step_5",
        "step_10",
    ]


def test_learning_rate_zero_changes_no_weight(
    engine: Engine, api: RunApiThread, base: Path, tmp_path: Path
) -> None:
    before = {name: t.clone() for name, t in engine.tensors.items()}
    _run(run_config(engine, base, tmp_path, api.url, lr=0.0), engine, api)
    assert all(torch.equal(t, before[name]) for name, t in engine.tensors.items())


def test_stop_saves_and_resume_goes_on(
    engine: Engine,
    api: RunApiThread,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop = threading.Event()
    config = run_config(engine, base, tmp_path, api.url, training_steps=500, resume="auto")
    threading.Thread(target=_when_version, args=(engine, 3, stop.set), daemon=True).start()
    first = _run(config, engine, api, stop)
    assert not first.done and first.step > 0 and first.path is not None
    assert "no checkpoint in" in capsys.readouterr().out
    trained = engine.tensors["model.norm.weight"].clone()
    engine.tensors["model.norm.weight"].fill_(9.0)  # a new server would hold base weights
    engine.version, engine.held = None, True
    api.close()
    again = RunApiThread()
    second = _run(
        config.model_copy(update={"atropos_url": again.url, "training_steps": first.step + 2}),
        engine,
        again,
    )
    status = httpx.get(f"{again.url}/status").json()["current_step"]
    again.close()
    out = capsys.readouterr().out
    assert f"Resuming from {first.path}: step {first.step}, weight version {first.step}" in out
    assert (second.done, second.step) == (True, first.step + 2)
    assert status >= first.step, "registered with its own starting step"
    assert (engine.tensors["model.norm.weight"] - trained).abs().max() < 0.05
    steps = [r.step for r in _records(tmp_path / "out" / "telemetry.jsonl") if r.kind == "step"]
    assert steps == list(range(1, first.step + 3))


def test_sigterm_acts_after_the_step_and_saves(
    engine: Engine, api: RunApiThread, base: Path, tmp_path: Path
) -> None:
    """The trainer as a program, stopped in the middle of its run."""
    config = run_config(
        engine, base, tmp_path, api.url, training_steps=100_000, engine_timeout=60, api_timeout=60
    )
    env = EnvThread(api.url, engine, groups=4, size=4)
    said = tmp_path / "said"
    child = forked(TRAINER, "trainer_core.__main__:main", config.to_args(), said)
    try:
        _when_version(engine, 3, lambda: child.send_signal(signal.SIGTERM))
        code, out = child.wait(60), said.read_text()
    finally:
        child.kill()
        env.close()
    assert code == 143, out
    steps = [r.step for r in _records(tmp_path / "out" / "telemetry.jsonl") if r.kind == "step"]
    (saved,) = checkpoint.complete_checkpoints(tmp_path / "out")
    assert steps == list(range(1, engine.version + 1)) and saved.name == f"step_{steps[-1]}"
    assert f"Stopped after step {steps[-1]}. Last checkpoint: {saved}" in out
    weights = load_file(saved / "model.safetensors")
    assert torch.equal(weights["model.norm.weight"], engine.tensors["model.norm.weight"]), (
        "what the server has"
    )


def test_engine_gone_ends_the_run(
    engine: Engine,
    api: RunApiThread,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    threading.Thread(target=_when_version, args=(engine, 2, engine.die), daemon=True).start()
    config = run_config(engine, base, tmp_path, api.url, training_steps=10_000, rollout_samples=0)
    with pytest.raises(EngineGone, match="does not answer"):
        _run(config, engine, api)
    assert "No step is lost" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_equals_never_stopped_bit_for_bit(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    ends: list[Any] = []
    for name, cuts in (("straight", [4]), ("cut", [2, 4])):
        torch.manual_seed(1)
        (tmp_path / name).mkdir()
        model = plain_model(base).to(getattr(torch, dtype))
        engine = Engine(tmp_path / name, model)
        batches = (
            ends[0][1]
            if ends
            else [[group(engine, [3, 12, 4, 13], 4, 3) for _ in range(4)] for _ in range(4)]
        )
        for steps in cuts:
            config = run_config(
                engine,
                base,
                tmp_path / name,
                training_steps=steps,
                checkpoint_interval=2,
                resume="auto",
                dtype=dtype,
                probe_interval=0,
                warmup_steps=3,
                ratio_base="rollout",  # this engine forgets its versions, and so the lag
            )
            train(config, api=Recorded(batches))  # type: ignore[arg-type]
            if steps == 2:
                for tensor in engine.tensors.values():
                    tensor.zero_()
                engine.version, engine.held = None, True
        ends.append(
            (load_file(tmp_path / name / "out" / "final_model" / "model.safetensors"), batches)
        )
        engine.close()
    (straight, _), (cut, _) = ends
    assert straight.keys() == cut.keys()
    assert all(torch.equal(straight[k], cut[k]) for k in straight)


def test_keep_checkpoints_and_half_written_ones(engine: Engine, base: Path, tmp_path: Path) -> None:
    batches = [[group(engine, [3, 12, 4, 13], 4, 3) for _ in range(4)]] * 4
    config = run_config(
        engine, base, tmp_path, checkpoint_interval=1, keep_checkpoints=2, probe_interval=0
    )
    train(config, api=Recorded(batches))  # type: ignore[arg-type]
    out = tmp_path / "out"
    assert [p.name for p in checkpoint.complete_checkpoints(out)] == ["step_3", "step_4"]
    (out / ".step_9.writing").mkdir()
    (out / "step_9").mkdir()
    (out / "step_9" / "trainer_state.json").write_text("{}")
    assert checkpoint.starting_point(config.model_copy(update={"resume": "auto"})).step == 4
    with pytest.raises(UsageError, match="not a checkpoint"):
        checkpoint.starting_point(config.model_copy(update={"resume": str(out / "step_9")}))
    with pytest.raises(UsageError, match="--optimizer adamw and --master-weights fp32 over"):
        train(
            config.model_copy(
                update={"resume": "auto", "optimizer": "adafactor", "training_steps": 5}
            ),
            api=Recorded(batches),  # type: ignore[arg-type]
        )


def test_a_broken_batch_skips_the_update(
    engine: Engine, base: Path, tmp_path: Path, capsys: Any
) -> None:
    good = [group(engine, [3, 12, 4, 13], 4, 3) for _ in range(4)]
    bad = json.loads(json.dumps(good))
    bad[0]["advantages"] = [[3e38] * 7] * 4  # finite, but the gradient is not
    train(run_config(engine, base, tmp_path, training_steps=2), api=Recorded([bad, good]))  # type: ignore[arg-type]
    steps = [r for r in _records(tmp_path / "out" / "telemetry.jsonl") if isinstance(r, StepRecord)]
    assert [s.weight_version for s in steps] == [0, 1]
    assert [s.skipped_update for s in steps] == [True, False]
    assert "UPDATE SKIPPED" in capsys.readouterr().out


def test_a_run_that_learns_nothing_any_more_ends(
    engine: Engine, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three broken batches end the run, two do not. Their steps are recorded, and give no
    checkpoint."""
    monkeypatch.setattr("trainer_core.ending.MOST_SKIPPED", 3)
    good = [group(engine, [3, 12, 4, 13], 4, 3) for _ in range(4)]
    bad = json.loads(json.dumps(good))
    bad[0]["advantages"] = [[3e38] * 7] * 4
    batches = Recorded([bad, bad, good, bad, bad, bad, good])
    with pytest.raises(
        NonFiniteError, match=r"in 3 steps in a row, so no update was made\. There is no checkpoint"
    ):
        train(run_config(engine, base, tmp_path, training_steps=7), api=batches)  # type: ignore[arg-type]
    steps = [r for r in _records(tmp_path / "out" / "telemetry.jsonl") if isinstance(r, StepRecord)]
    assert [s.weight_version for s in steps] == [0, 0, 1, 1, 1, 1]
    assert not checkpoint.complete_checkpoints(tmp_path / "out")


def test_unreachable_run_api_gives_up(engine: Engine, base: Path, tmp_path: Path) -> None:
    with pytest.raises(ApiError, match=r"Atropos API not reachable.*run-api --host"):
        train(run_config(engine, base, tmp_path))
