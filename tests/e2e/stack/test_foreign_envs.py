"""Unmodified environments that do not know this stack, through `atropos-tui up`."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from atropos_common.protocol.records import (
    DiagnosisRecord,
    EnvCountsRecord,
    EvalRecord,
    StageRecord,
)
from tests.e2e.live_stack import LiveStack, prepare_demo, read_records

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
FOREIGN = Path(__file__).parent / "foreign"
STEPS = 8
NAMES = ("bare", "two", "careless", "alone", "taught")
PROFILE = """
extends = "demo"
name = "foreign"

[trainer]
training_steps = {steps}
batch_size = 32
ref_kl_coef = 0.01
distill_coef = 0.5
lr = 2e-5

[[env]]
name = "bare"
script = "{folder}/bare_config.py"

[[env]]
name = "two"
script = "{folder}/two_servers.py"

[[env]]
name = "careless"
script = "{folder}/careless.py"

[[env]]
name = "alone"
script = "{folder}/alone.py"

[[env]]
name = "taught"
script = "{folder}/teacher.py"
"""


@pytest.mark.slow
def test_they_train_and_what_is_left_out_is_named(tmp_path: Path) -> None:
    prepare_demo()
    profile = tmp_path / "foreign.toml"
    profile.write_text(PROFILE.format(folder=FOREIGN, steps=STEPS))
    run = LiveStack(tmp_path / "run", profile=str(profile)).up()
    try:
        code, output = run.wait(300)
        assert code == 0, output[-4000:]
        assert [step.step for step in run.steps()] == list(range(1, STEPS + 1))
        counts = {name: _last_counts(run, name) for name in NAMES}
        assert all(each.sent > 0 for each in counts.values()), counts
        assert any(reason.startswith("KeyError") for reason in counts["careless"].failures), counts[
            "careless"
        ]
        assert "group_size" in counts["careless"].left_out
        log = "".join(path.read_text() for path in (run.run.logs / "trainer").glob("*.log"))
        assert "missing_logprobs = recompute" in log
        assert counts["careless"].left_out["not_finite"] > 0
        assert "lost in run-api" not in log, (
            "one such score would cost a whole batch, everybody's groups"
        )
        assert counts["bare"].adjusted["top_p"] > 0 and counts["two"].adjusted["top_k"] > 0
        own = (run.run.logs / "bare").glob("*.log")
        assert not any(
            "HTTP Request" in path.read_text() or "same in a group" in path.read_text()
            for path in own
        )
        found = {
            r.rule for r in read_records(run.run.supervisor_jsonl) if isinstance(r, DiagnosisRecord)
        }
        assert {"sampling_adjusted", "logprobs_recomputed"} <= found, found
        accuracies = [
            r for r in read_records(run.root / "eval.bare.jsonl") if isinstance(r, EvalRecord)
        ]
        assert {record.split for record in accuracies} == {"percent_correct"}
        verdicts = [record.verdict for record in run.telemetry("alignment")]
        assert verdicts.count("ok") >= STEPS - 1, verdicts
        _shows_what_they_sent(run, log)
        run.assert_nothing_left()
    finally:
        run.close()


@pytest.mark.slow
def test_max_left_out_ends_the_run_with_one_attempt(tmp_path: Path) -> None:
    prepare_demo()
    profile = tmp_path / "careless.toml"
    profile.write_text(
        'extends = "demo"\nname = "careless"\n\n[trainer]\nmax_left_out = 0.01\n\n'
        f'[env]\nname = "careless"\nscript = "{FOREIGN}/careless.py"\n'
    )
    run = LiveStack(tmp_path / "run", profile=str(profile)).up()
    try:
        code, output = run.wait(300)
        assert code == 3 and "more than max_left_out = 0.01" in output, output[-4000:]
        assert {record.attempt for record in run.states("trainer")} == {1}
        rules = {
            r.rule for r in read_records(run.run.supervisor_jsonl) if isinstance(r, DiagnosisRecord)
        }
        assert "gave_up" in rules and "bad_usage" not in rules, rules
    finally:
        run.close()


def _shows_what_they_sent(run: LiveStack, log: str) -> None:
    """Groups of one train, a teacher and references count, pictures are refused, what nobody reads
    is named once."""
    steps = run.steps()
    groups = sum((Counter(step.groups_by_env) for step in steps), Counter[str]())
    flat = sum((Counter(step.flat_groups_by_env) for step in steps), Counter[str]())
    assert groups.keys() == set(NAMES), groups
    assert flat["alone"] < groups["alone"] and flat["taught"] == 0, flat
    left_out = sum((Counter(step.left_out) for step in steps), Counter[str]())
    assert left_out["with images, which this trainer cannot read"] >= 2, left_out
    taught = [step.distill_kl for step in steps if step.groups_by_env.get("taught")]
    assert taught and all(value is not None and value > 0 for value in taught), taught
    assert all(step.ref_kl > 0 for step in steps if step.groups_by_env.get("taught"))
    sources = sum((Counter(step.logprobs_from) for step in steps), Counter[str]())
    assert sources["engine"] > 0, "of bare, whose text the engine made"
    assert sources["environment"] > 0
    unused = sum((Counter(step.unused_fields) for step in steps), Counter[str]())
    assert {"overrides.color", "group_overrides.note", "messages", "scores"} <= unused.keys(), (
        unused
    )
    for name in ("overrides.color", "group_overrides.note", "messages"):
        assert log.count(f"an environment sends {name}, which is not used") == 1


def _last_counts(run: LiveStack, name: str) -> EnvCountsRecord:
    records = [
        r for r in read_records(run.root / f"eval.{name}.jsonl") if isinstance(r, EnvCountsRecord)
    ]
    assert records, f"{name} told nothing: {json.dumps([str(p) for p in run.root.iterdir()])}"
    return records[-1]


WAITING = """
extends = "demo"
name = "waiting"

[trainer]
batch_size = 512

[[env]]
name = "slow"
script = "{folder}/slow.py"

[[env]]
name = "flat"
script = "{folder}/slow.py"
"""
PATIENCE_S = 20.0
"""Seconds from the trainer's attachment to the last diagnosis. Batches wait for flat until 32 of
its groups were left out, and an environment counts every 5 s."""


@pytest.mark.slow
def test_who_holds_the_run_up_is_said_with_numbers(tmp_path: Path) -> None:
    prepare_demo()
    profile = tmp_path / "waiting.toml"
    profile.write_text(WAITING.format(folder=FOREIGN))
    run = LiveStack(tmp_path / "run", profile=str(profile)).up()

    def found() -> dict[tuple[str | None, str], DiagnosisRecord]:
        records = [
            r for r in read_records(run.run.supervisor_jsonl) if isinstance(r, DiagnosisRecord)
        ]
        return {(record.component, record.rule): record for record in records}

    wanted = {("slow", "environment_bound"), ("flat", "groups_all_flat")}
    try:
        run.until(lambda: wanted <= set(found()), 240, "both diagnoses")
        stages = {
            r.stage: r.time
            for r in read_records(run.run.supervisor_jsonl)
            if isinstance(r, StageRecord)
        }
        for key in wanted:
            assert found()[key].time - stages["attached"] < PATIENCE_S
        assert set(found()) == wanted
        why = run.cli("why").stdout
        assert "slow is the bottleneck: trainer and engine wait for it" in why, why
        assert "env.max_num_workers under [env.args] of slow" in why
        assert "the groups of flat are flat: nothing is learnt from them" in why
        evidence = found()["slow", "environment_bound"].evidence
        waited, idle = (int(share) for share in re.findall(r"(\d+)% ", evidence)[:2])
        assert waited > 90 and idle > 25, evidence
        timing = run.until(lambda: run.telemetry("timing"), 60, "a step")[0]
        assert (
            0.4 < timing.engine_idle_fraction <= 1 and timing.data_wait_s > 0.5 * timing.step_s
        ), timing
        assert re.search(
            r"from slow came \d+ groups in \d+ s \(\d\.\d\d/s, 0% of them flat\)", evidence
        ), evidence
    finally:
        run.close()
