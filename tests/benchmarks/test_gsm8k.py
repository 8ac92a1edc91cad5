"""Figures of `benchmarks.gsm8k` from a run's records, its settings, checks and picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.profile.profile import load_profile
from benchmarks import gsm8k
from benchmarks.support.curve import apart, draw, nice

BEGAN = 1_000.0


def write(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def step(number: int, lag: float = 1.0) -> list[dict[str, Any]]:
    """Return the records of a step of 2 s, half of it waiting, with 400 trained tokens."""
    common = {"time": BEGAN + 2 * number, "step": number}
    loss = dict.fromkeys(("loss", "grad_norm", "lr", "reward_mean", "reward_std"), 0.0)
    return [
        common
        | loss
        | {"kind": "step", "tokens": 500, "sequences": 8, "ratio_mean": 1.0, "clip_fraction": 0.0}
        | {"weight_version": number, "policy_lag_mean": lag / 2, "policy_lag_max": lag},
        common | {"kind": "alignment", "verdict": "ok", "probe_diff_abs_mean": 0.01 * number},
        common
        | {"kind": "timing", "step_s": 2.0, "data_wait_s": 1.0, "train_s": 0.8, "sync_s": 0.1}
        | {"checkpoint_s": 0.0, "tokens_per_s": 250.0, "accepted_tokens_per_s": 200.0}
        | {"engine_capacity_used": 0.5 if number > 1 else None},
    ]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    write(run.telemetry_jsonl, *(record for number in (1, 2, 3) for record in step(number)))
    write(
        run.gauges_jsonl,
        *(
            {"kind": "gauges", "time": BEGAN + seconds}
            | {"engines": {"vllm": {"running": running, "generated_tokens": tokens}}}
            # The engine restarts after 4 s; the first sample lies before the training.
            for seconds, running, tokens in ((-5, 0, 0), (0, 10, 100), (2, 30, 900), (4, 20, 50))
        ),
    )
    evaluation = {"kind": "eval", "env": "gsm8k", "split": "test", "questions": 8}
    write(
        run.eval_jsonl("gsm8k"),
        evaluation | {"time": BEGAN + 1, "accuracy": 0.25, "correct": 2, "weight_version": 0},
        {"kind": "env_counts", "time": BEGAN + 3, "env": "gsm8k", "sent": 6}
        | {"left_out": {"flat": 3, "surplus": 1}},
        evaluation | {"time": BEGAN + 4.5, "accuracy": 0.5, "correct": 4, "weight_version": 2},
        evaluation | {"time": BEGAN + 99, "accuracy": 1.0, "correct": 8, "weight_version": 9},
    )
    return run


def test_figures_are_of_the_time_from_the_first_step_to_the_limit(run: RunDir) -> None:
    found = gsm8k.figures(run, BEGAN + 5, gpus=2)
    assert found["steps"] == 2 and found["step_s"] == 2.0 and found["trainer_waits"] == 0.5
    assert found["tokens_per_s_per_gpu"] == 100.0, "200 a second, on two GPUs"
    assert found["engine_tokens_per_s"] == 200.0, "800 tokens in 4 s; a restart adds nothing"
    assert found["engine_capacity_used"] == 0.5 and found["flat_share"] == 0.3
    assert found["sequences_running"]["mean"] == 20.0
    assert (found["policy_lag_mean"], found["policy_lag_max"]) == (0.5, 1.0)
    assert found["verdict_of_step"] == {"1": "ok", "2": "ok"} and found["verdicts"] == {"ok": 2}
    assert [(each["steps"], each["right"]) for each in found["held_out"]] == [(0, 2), (2, 4)]
    assert found["held_out"][1]["minutes"] == 4.5 / 60


def test_a_run_without_a_step_has_no_figures(tmp_path: Path) -> None:
    assert gsm8k.figures(RunDir(tmp_path), BEGAN, gpus=1) == {"steps": 0, "held_out": []}


def test_the_shipped_profile_takes_the_settings(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"question": "?", "answer": "#### 1"})
    write(tmp_path / "test.jsonl", *({"question": str(n), "answer": "#### 1"} for n in range(5)))
    data = gsm8k.held_out_data(tmp_path, tmp_path / "cut", 3)
    assert len((data / "test.jsonl").read_text().splitlines()) == 3
    options = gsm8k.Options(tmp_path, tmp_path, 10.0, "", sets=["trainer.lr=3e-6"])
    sets = options.settings(data)
    profile, _ = load_profile("gsm8k", sets)
    assert profile.trainer.settings["lr"] == 3e-6
    every = profile.env[0].args["env.eval_interval_s"]
    assert isinstance(every, float) and (600 - gsm8k.LAST_EVAL_S) % every < 1
    gpus, bound = gsm8k.layout("gsm8k", sets)
    assert gpus == 1 and bound >= 1


def test_a_run_fails_that_misses_its_limit_or_its_bound(run: RunDir) -> None:
    found = gsm8k.figures(run, BEGAN + 5, gpus=1)
    found |= {"ended": "limit", "policy_lag_bound": 2, "left_behind": []}
    assert gsm8k.checked(found).status() == 0
    for worse in (
        {"ended": "interrupted"},
        {"policy_lag_max": 3.0},
        {"left_behind": ["7 python"]},
        {"verdict_of_step": {"1": "mismatch: stale weights"}},
    ):
        assert gsm8k.checked(found | worse).status() == 1, worse


def test_the_table_and_the_picture_have_the_figures(run: RunDir, tmp_path: Path) -> None:
    found = gsm8k.figures(run, BEGAN + 5, gpus=1)
    found |= {"label": "a <b>", "model": "m", "minutes": 10.0, "ended": "limit"}
    assert "50.0%" in gsm8k.table(found) and "2 ok" in gsm8k.table(found)
    files = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "images/curve.svg"]
    for file in files[:2]:
        file.write_text(json.dumps(found))
    assert gsm8k.picture(files) == 0
    root = ET.fromstring(files[2].read_text())
    texts = [each.text or "" for each in root.iter() if each.tag.endswith("text")]
    assert texts.count("50.0 %") == 2 and texts.count("a <b>") == 2
    with pytest.raises(ValueError, match="no evaluation"):
        draw([found | {"held_out": []}])


def test_labels_move_apart_and_steps_are_round() -> None:
    upper, lower = apart([100.0, 101.0])
    assert lower - upper == pytest.approx(20.0) and upper + lower == pytest.approx(201.0)
    assert [nice(step) for step in (0.3, 1.0, 1.7, 30.0)] == pytest.approx([0.5, 1, 2, 50])
