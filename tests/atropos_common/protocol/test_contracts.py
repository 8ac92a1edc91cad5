"""Formats shared by programs: each reads back what another writes, a newer writer included."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_common.protocol import bridge, control, manifest, records, trainer_records
from atropos_common.protocol.record_base import RecordError
from atropos_common.system.run_dir import RunDir, is_safe_name

FIELDS: dict[str, dict[str, Any]] = {
    "state": {
        "component": "vllm",
        "role": "engine",
        "old": "pending",
        "new": "starting",
        "attempt": 1,
    },
    "probe": {"component": "vllm", "probe": "readiness", "ok": True, "latency_s": 0.1},
    "stage": {"component": "trainer", "stage": "first batch", "attempt": 1},
    "command": {"command_id": "c1", "action": "restart", "status": "accepted"},
    "diagnosis": {"component": "api", "title": "port in use", "evidence": "…", "fix": "stop it"},
    "step": {
        "loss": 0.1,
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "lr": 1e-4,
        "grad_norm": 1.0,
        "ratio_mean": 1.0,
        "clip_fraction": 0.0,
        "tokens": 10,
        "sequences": 2,
        "weight_version": 1,
    },
    "alignment": {"tokens": 3, "verdict": "ok"},
    "timing": {
        "step_s": 1.0,
        "data_wait_s": 0.1,
        "train_s": 0.2,
        "sync_s": 0.3,
        "checkpoint_s": 0.0,
        "tokens_per_s": 10.0,
    },
    "memory": {"rss_bytes": 1},
    "ranks": {
        "ranks": [
            {"rank": 0, "tokens": 10, "alone_s": 0.1},
            {"rank": 1, "gpu": "5", "alone_s": 0.2},
        ]
    },
    "sync": {"mode": "shared_vllm", "weight_version": 1, "seconds": 0.1, "phases": {"pause": 0.01}},
    "rollout": {"prompt": "1+1=", "completion": "2", "reward": 1.0, "advantage": 0.5},
    "checkpoint": {"path": "step_1", "seconds": 0.1, "bytes": 10},
    "benchmark": {
        "mode": "shared_vllm",
        "total_s": 1.0,
        "steps": 1,
        "avg_step_s": 1.0,
        "total_step_s": 1.0,
        "avg_sync_s": 0.0,
        "syncs": 0,
        "total_sync_s": 0.0,
        "avg_data_wait_s": 0.1,
        "total_data_wait_s": 0.1,
        "tokens_per_s": 1.0,
    },
    "eval": {"env": "arithmetic", "accuracy": 0.5, "correct": 1, "questions": 2},
    "env_counts": {
        "env": "arithmetic",
        "sent": 3,
        "left_out": {"flat": 2},
        "failures": {"KeyError": 1},
    },
    "env_metrics": {"env": "arithmetic", "metrics": {"train/percent_correct": 0.5}},
    "gauges": {"engines": {"vllm": {"running": 4.0}}, "queue": 2},
}


@pytest.mark.parametrize("kind", sorted(records.RECORD_TYPES))
def test_every_kind_round_trips(kind: str) -> None:
    record = records.RECORD_TYPES[kind](run_id="r", time=1.5, seq=3, **FIELDS[kind])
    line = record.to_line()
    assert line.endswith("\n") and "\n" not in line[:-1]
    assert records.parse_line(line) == record
    assert json.loads(line)["kind"] == kind


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_any_float_survives_as_strict_json(value: float) -> None:
    line = trainer_records.StepRecord(**{**FIELDS["step"], "loss": value}).to_line()
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = records.parse_line(line)
    assert isinstance(back, trainer_records.StepRecord)
    assert back.loss == value or (math.isnan(value) and math.isnan(back.loss))


def test_a_newer_writer_is_understood() -> None:
    record = records.parse_line('{"v": 9, "kind": "hologram", "seq": 1, "shape": [1]}')
    assert record.kind == "hologram" and record.v == 9
    step = records.parse_line(json.dumps({"kind": "step", "new_field": 1, **FIELDS["step"]}))
    assert isinstance(step, trainer_records.StepRecord)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "3",
        '{"kind": 3}',
        '{"kind": "step"}',
        "\x00\xff",
        "[" * 100_000,
        r'{"kind": "hologram", "shape": "\ud800"}',
    ],
)
def test_what_is_no_record_is_refused(line: str) -> None:
    with pytest.raises(RecordError):
        records.parse_line(line)


def test_control_messages_round_trip() -> None:
    status = control.RunStatus(
        run_id="r",
        name="demo",
        mode="none",
        run_dir="/r",
        phase=control.Phase.RUNNING,
        started_at=1.0,
        components=[
            control.ComponentStatus(name="api", role=control.Role.API, state=control.State.HEALTHY)
        ],
    )
    assert control.RunStatus.model_validate_json(status.model_dump_json()) == status
    newer = json.loads(status.model_dump_json()) | {"future": 1}
    assert control.RunStatus.model_validate(newer) == status


def _manifest() -> manifest.Manifest:
    entry = manifest.TensorEntry(shape=[2, 2], stride=[2, 1], dtype="float32")
    view = manifest.TensorView(parameter="w", offset=2, shape=[2], stride=[1])
    shard = manifest.Shard(
        kind="shm",
        shm_path="/dev/shm/x",
        shm_bytes=16,
        param_mappings={"w": entry},
        views={"row": view},
    )
    return manifest.Manifest(
        model="m",
        architecture="Qwen3ForCausalLM",
        config={},
        instance_id="i",
        server_pid=1,
        server_create_time=1.0,
        base_url="http://127.0.0.1:9001",
        vllm_version="0.32.0",
        ranks={0: shard},
    )


def test_manifest_round_trips_privately(tmp_path: Path) -> None:
    path = tmp_path / "bridge" / "vllm_bridge_config.json"
    manifest.write_manifest(_manifest(), path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert manifest.read_manifest(path) == _manifest()
    assert list(path.parent.iterdir()) == [path]


def test_ranks_together_have_all_of_each_tensor() -> None:
    def rank(begin: int, rows: int) -> manifest.Shard:
        entry = manifest.TensorEntry(shape=[4, 2], stride=[2, 1], dtype="float32")
        part = manifest.TensorView(
            parameter="w", offset=0, shape=[rows, 2], stride=[2, 1], begin=[begin, 0], whole=[5, 2]
        )
        return manifest.Shard(kind="shm", param_mappings={"w": entry}, views={"w": part})

    assert manifest.left_out({0: rank(0, 3), 1: rank(3, 2)}) == []
    assert manifest.left_out({0: rank(0, 3), 1: rank(0, 3), 2: rank(3, 2)}) == [], (
        "two have the same heads"
    )
    assert manifest.left_out({0: rank(0, 3), 1: rank(3, 1)}) == ["w"]
    assert manifest.left_out({0: rank(0, 3)}) == ["w"]
    with pytest.raises(ValueError, match=r"begins at \[4, 0\] with shape \[2, 2\] of \[5, 2\]"):
        rank(4, 2)


def test_manifest_that_must_not_be_used(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    with pytest.raises(manifest.ManifestError, match="VLLM_ENABLE_SHARED_WEIGHTS"):
        manifest.read_manifest(path)
    manifest.write_manifest(_manifest(), path)
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(manifest.ManifestError, match="not a manifest"):
        manifest.read_manifest(path)
    path.write_text(json.dumps(json.loads(whole) | {"ranks": {}}))
    with pytest.raises(manifest.ManifestError, match="rank 0 is missing"):
        manifest.read_manifest(path)
    older = json.loads(whole) | {"version": 1}
    del older["ranks"]["0"]["views"]
    path.write_text(json.dumps(older))
    with pytest.raises(
        manifest.ManifestError, match=r"version 1, this trainer reads 3; .* of the same release"
    ):
        manifest.read_manifest(path)
    path.write_text(whole)
    path.chmod(0o644)
    with pytest.raises(manifest.ManifestError, match="0600"):
        manifest.read_manifest(path)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    with pytest.raises(manifest.ManifestError, match="regular file"):
        manifest.read_manifest(link)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parameter": "v"}, "row lies in v, which is no parameter"),
        ({"offset": 3}, "row reaches beyond w"),
        ({"offset": -1}, "greater than or equal to 0"),
        ({"shape": [3]}, "row reaches beyond w"),
        ({"stride": [3]}, "row reaches beyond w"),
        ({"stride": [-1]}, "has shape"),
        ({"shape": [0]}, "has shape"),
        ({"stride": [1, 1]}, "has shape"),
    ],
)
def test_a_view_beyond_its_parameter_is_not_believed(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "m.json"
    manifest.write_manifest(_manifest(), path)
    raw = json.loads(path.read_text())
    raw["ranks"]["0"]["views"]["row"] |= change
    path.write_text(json.dumps(raw))
    with pytest.raises(manifest.ManifestError, match=words):
        manifest.read_manifest(path)


def test_digest_survives_json_and_tells_completions_apart() -> None:
    tokens, logprobs = [5, 6, 1], [-0.1, -1e-7, -3.3333333333333335]
    digest = bridge.completion_digest(tokens, logprobs)
    assert digest == bridge.completion_digest(
        json.loads(json.dumps(tokens)), json.loads(json.dumps(logprobs))
    )
    assert digest != bridge.completion_digest(tokens, [-0.1, -1e-7, -3.3333333333333330])
    assert digest != bridge.completion_digest([5, 6, 2], logprobs)
    with pytest.raises(ValueError, match="2 tokens but 3"):
        bridge.completion_digest([1, 2], logprobs)


def test_run_dir_is_private(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    assert run.root.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in run.root.iterdir()} == {"logs", "bridge", "checkpoints"}


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("vllm-0.a_b", True),
        ("", False),
        ("../x", False),
        ("-x", False),
        ("a b", False),
        ("é", False),
    ],
)
def test_names_are_safe_in_paths(name: str, safe: bool) -> None:
    assert is_safe_name(name) is safe


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("trainer_core", "torch"),
        ("trainer_core.config", "torch"),
        ("atropos_common.protocol.records", "torch"),
        ("vllm_server", "vllm"),
        ("atropos_api", "atroposlib"),
        ("atropos_common.net.ports", "pydantic"),
        ("atropos_tui.supervisor.runner", "textual"),
        ("atropos_tui.supervisor.runner", "torch"),
        ("atropos_tui.supervisor.runner", "atropos_tui.profile.profile"),
        ("atropos_tui.monitor.run.state", "textual"),
        ("atropos_tui.cli.start.profiles", "textual"),
        ("atropos_tui.ui.app", "torch"),
        ("atropos_tui.__main__", "pydantic"),
        ("atropos_tui.cli.parser", "pydantic"),
    ],
)
def test_imports_stay_light(module: str, forbidden: str) -> None:
    """Import rules hold at run time too, not only in the linter's graph."""
    code = f"import sys, {module}; sys.exit({forbidden!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
