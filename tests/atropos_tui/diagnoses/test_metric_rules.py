"""Metric rules against the records of a real run (`logs/clean`, 60 steps of the demo), and with one
wrong value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import EvalRecord, parse_line
from atropos_common.protocol.trainer_records import RolloutRecord, StepRecord, SyncRecord
from atropos_tui.diagnoses import Diagnosis
from atropos_tui.diagnoses.metric_rules import (
    CAUSE_FIXES,
    METRIC_RULES,
    MetricRule,
    reward_collapsed,
)
from atropos_tui.diagnoses.metric_watch import MetricWatch
from atropos_tui.diagnoses.model import Finding

CLEAN = Path(__file__).parent / "logs/clean"
RUN = [parse_line(line) for line in (CLEAN / "telemetry.jsonl").read_text().splitlines()]
EVALS = [parse_line(line) for line in (CLEAN / "eval.arithmetic.jsonl").read_text().splitlines()]

Change = Callable[[dict[str, Any]], dict[str, Any]]


def changed(kind: str, change: Change, first: int = 1, last: int = 10_000) -> list[Record]:
    """The clean run with `change` applied to records of `kind` in steps `first` to `last`."""
    out = []
    for record in RUN:
        if record.kind == kind and first <= getattr(record, "step", 0) <= last:
            record = type(record).model_validate(record.model_dump() | change(record.model_dump()))
        out.append(record)
    return out


def said(records: list[Record], watch: MetricWatch | None = None) -> list[Diagnosis]:
    """Diagnoses that the records open."""
    watch = watch or MetricWatch(0.0)
    return [found for record in records for found in watch.feed(record) if not found.over]


def fixed(**values: Any) -> Change:
    return lambda _: values


LOOP = "The answer is to add. " * 30
CASES: list[tuple[str, list[Record], str]] = [
    (
        "engine_left_out",
        [
            SyncRecord(
                step=number,
                time=RUN[-1].time + number,
                mode="broadcast",
                weight_version=number,
                seconds=0.1,
                left_out={"http://127.0.0.1:9002": "it has not answered for 5 s"}
                if number in (3, 4)
                else {},
            )
            for number in range(1, 7)
        ],
        "http://127.0.0.1:9002: it has not answered for 5 s",
    ),
    (
        "ratio_out_of_range",
        changed("step", fixed(ratio_mean=1.31), 20, 30),
        "step 22: ratio_mean 1.31",
    ),
    (
        "ratio_out_of_range",
        changed("step", fixed(ratio_mean=0.62), 20, 30),
        "step 20: ratio_mean 0.62",
    ),
    (
        "ratio_out_of_range",
        changed("step", fixed(ratio_mean=1.0, tis_mean=0.7), 20, 30),
        "step 20: tis_mean 0.7",
    ),
    (
        "clip_fraction_high",
        changed("step", fixed(clip_fraction=0.3), 20, 30),
        "clip_fraction 30.0%",
    ),
    ("loss_too_low", changed("step", fixed(loss=-12.5), 33, 33), "step 33: loss -12.5"),
    (
        "alignment_mismatch",
        changed(
            "alignment",
            fixed(
                verdict="mismatch",
                probe_diff_abs_mean=1.4,
                cause="stale weights: still",
                cause_kind="stale weights",
            ),
            7,
            7,
        ),
        "step 7: verdict mismatch, mean |trainer - engine| 0.0262 (rollouts), mean |trainer "
        "- engine| 1.4 (probe at "
        "the same weights), cause: stale weights: still",
    ),
    ("alignment_drift", changed("alignment", fixed(verdict="drift"), 7, 10), "verdict drift"),
    (
        "alignment_drift",
        changed("alignment", fixed(logprob_diff_abs_mean=0.1), 7, 10),
        "0.1 (rollouts)",
    ),
    (
        "non_finite",
        changed("step", fixed(loss="NaN", grad_norm="Infinity"), 9, 9),
        "loss is nan, grad_norm is inf",
    ),
    (
        "non_finite",
        changed("alignment", fixed(kl_k3="NaN"), 9, 9),
        "step 9 (alignment): kl_k3 is nan",
    ),
    (
        "lost_gradients",
        changed("step", fixed(grad_norm=0.0), 1),
        "step 3: grad_norm 0 with reward_std 0.488",
    ),
    (
        "reward_constant",
        changed("step", fixed(reward_std=0.0, reward_mean=1.0), 30),
        "step 32: reward_mean 1",
    ),
    (
        "groups_all_flat",
        changed("step", fixed(flat_groups=15), 30),
        "step 30: 15 of 16 groups have equal scores",
    ),
    (
        "accuracy_collapse",
        changed(
            "step", lambda row: {"reward_mean": row["reward_mean"] * 0.1, "reward_std": 0.2}, 50
        ),
        "over steps",
    ),
    ("repetition", changed("rollout", fixed(completion=LOOP), 30), "again and again"),
    (
        "policy_lag_growing",
        changed(
            "step", lambda row: {"policy_lag_mean": row["step"] / 5, "policy_lag_max": row["step"]}
        ),
        "mean policy lag",
    ),
    (
        "slow_progress",
        changed("timing", fixed(step_s=20.0, data_wait_s=18.0), 30),
        "waiting for data: 18.0 s",
    ),
    ("slow_progress", changed("timing", fixed(step_s=60.0, train_s=58.0), 30), "training: 58.0 s"),
    (
        "slow_progress",
        changed("timing", fixed(step_s=60.0, data_wait_s=55.0)),
        "55.0 s of it waiting for data",
    ),
    (
        "accuracy_collapse",
        [*EVALS, *(e.model_copy(update={"accuracy": 0.07, "correct": 2}) for e in EVALS[-4:])],
        "held_out: 84.0% at weight version 49, 7.0%",
    ),
]


@pytest.mark.parametrize(
    ("rule", "records", "evidence"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_number_that_is_wrong_is_told_once(
    rule: str, records: list[Record], evidence: str
) -> None:
    found = said(records)
    assert [one.rule for one in found] in ([rule], [rule, rule])  # accuracy of two splits
    assert evidence in found[0].evidence
    assert found[0].title and found[0].fix


FIXES = {
    "stale weights": "restart vllm",
    "stale prefix cache": "enable-prefix-caching",
    "temperature": "generation_params",
    "shifted logprobs": "inference_logprobs[i] belongs to tokens[i]",
    "missing logprobs": "server_type",
    "head dtype": "head_dtype",
    "broken weights": "--resume",
    "other weights": "`model`",
    "sampling": "top_p",
    "policy lag": "a `cause` in the evidence names it",
    "outlier": "a `cause` in the evidence names it",
    "rounding": "a `cause` in the evidence names it",
}


def test_every_cause_of_a_mismatch_has_its_own_fix() -> None:
    assert CAUSE_FIXES.keys() <= FIXES.keys()
    for cause, words in FIXES.items():
        wrong = fixed(verdict="mismatch", cause=f"{cause}: what was seen", cause_kind=cause)
        (found,) = said(changed("alignment", wrong, 7, 7))
        assert found.rule == "alignment_mismatch" and words in found.fix.replace(
            "{engine}", "vllm"
        ), cause
        assert cause in found.evidence


def test_one_rounded_token_at_a_time_is_no_drift() -> None:
    for noise in ("outlier", "rounding"):
        assert said(changed("alignment", fixed(verdict="drift", cause_kind=noise), 7, 12)) == []
    assert [
        found.rule
        for found in said(
            changed("alignment", fixed(verdict="drift", cause_kind="policy lag"), 7, 12)
        )
    ] == ["alignment_drift"]


def test_a_drift_of_fresh_rollouts_is_the_learning_rate() -> None:
    """A lower lag is no fix where the lag is 1 already."""
    drift = fixed(verdict="drift", cause_kind="large update", logprob_diff_abs_mean=0.15)
    (found,) = said(changed("alignment", drift, 7, 10))
    assert found.rule == "alignment_drift" and found.fix.startswith("lower [trainer] lr")
    assert "max_batches_offpolicy" not in found.fix


def test_a_lag_that_rises_to_its_bound_is_no_alarm() -> None:
    """With the shipped settings it rises from 0 to 4 in the first 20 steps, and stays there."""

    def rising(row: dict[str, Any]) -> dict[str, Any]:
        return {"policy_lag_mean": min(4.0, row["step"] / 5), "policy_lag_bound": 16}

    assert said(changed("step", rising)) == []


def test_every_number_rule_is_shown_here() -> None:
    assert {rule.name for rule in METRIC_RULES} == {case[0] for case in CASES}


def test_a_clean_run_says_nothing() -> None:
    assert len(RUN) > 180 and len(EVALS) == 16
    assert said(RUN + EVALS) == []


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("step", fixed(ratio_mean=0.8, clip_fraction=0.299, loss=-9.9)),
        ("step", fixed(ratio_mean=1.2)),
        ("alignment", fixed(logprob_diff_abs_mean=0.0999)),
        ("alignment", fixed(logprob_diff_abs_mean=None, probe_diff_abs_mean=None)),
        ("step", fixed(policy_lag_mean=None, policy_lag_max=None)),
        ("step", fixed(policy_lag_mean=6.0)),
        ("step", lambda row: {"policy_lag_mean": row["step"] / 25}),
        ("timing", fixed(step_s=120.0, data_wait_s=60.0, train_s=50.0)),
        (
            "step",
            lambda row: {
                "reward_mean": 0.99 - row["step"] * 0.002,
                "reward_std": 0.1 + row["step"] * 0.004,
            },
        ),
        (
            "rollout",
            fixed(
                completion="First 3 + 4 = 7, then 7 + 5 = 12, so the answer is 12. "
                + "x = 12\n" * 4
            ),
        ),
        ("rollout", fixed(completion="7" * 20)),
    ],
)
def test_the_edges_are_healthy(kind: str, change: Change) -> None:
    assert said(changed(kind, change)) == []


def test_one_odd_step_is_noise() -> None:
    for kind, change in (
        ("step", fixed(ratio_mean=3.0, clip_fraction=0.9)),
        ("alignment", fixed(verdict="drift")),
    ):
        assert said(changed(kind, change, 20, 21)) == []
    assert said(changed("timing", fixed(step_s=90.0, train_s=89.0), 40, 43)) == []
    assert said(changed("step", fixed(reward_mean=0.0), 20, 24)) == []


def test_a_number_that_goes_wrong_again_is_told_at_once_and_is_over_later_each_time() -> None:
    bad = [record for record in changed("step", fixed(loss=-11.0)) if record.kind == "step"]
    good = [record for record in RUN if record.kind == "step"]
    watch = MetricWatch(0.0)

    def feed(records: list[Record]) -> list[bool]:
        return [found.over for record in records for found in watch.feed(record)]

    assert feed(bad[:9]) == [False]
    assert feed(good[:4] + bad[:2]) == [], "four good steps are no recovery"
    assert feed(good[:5]) == [True]
    assert feed(bad[:2]) == [False], "it holds now, whatever was said a minute ago"
    assert feed(good[:9]) == []
    assert feed(good[:1]) == [True], "twice as many good steps"


def test_a_clock_that_is_set_back_keeps_no_diagnosis_open() -> None:
    finding = Finding()
    assert finding.raised(1e6, lambda: Diagnosis("x", "", ""))
    assert not finding.is_gone(1e6 + 5, 20.0)
    assert finding.is_gone(1e6 - 3600, 20.0)


def test_a_later_attempt_begins_anew() -> None:
    """The crash at step 30 goes back to step 21: what was between counts no more, and the same
    trouble speaks again."""
    first = [
        record
        for record in changed("step", fixed(ratio_mean=2.0), 28)
        if getattr(record, "step", 99) <= 30
    ]
    second = [
        record.model_copy(update={"attempt": 2})
        for record in changed("step", fixed(ratio_mean=2.0), 21, 22)
        if 21 <= getattr(record, "step", 0) <= 40
    ]
    watch = MetricWatch(0.0)
    assert [found.evidence.count("step") for found in said(first, watch)] == [3]
    assert said(second, watch) == [], (
        "two bad steps of this attempt and one of the dropped ones are not three in a row"
    )
    assert (watch.attempt, watch.step) == (2, 40)
    assert said(first, watch) == [], "late lines of an attempt that is over"
    third = [
        record.model_copy(update={"attempt": 3})
        for record in changed("step", fixed(ratio_mean=2.0), 41)
        if getattr(record, "step", 0) > 40
    ]
    assert [found.rule for found in said(third, watch)] == ["ratio_out_of_range"]


def test_a_resumed_run_does_not_tell_of_long_ago() -> None:
    bad = changed("step", fixed(loss=-11.0), 5, 6)
    watch = MetricWatch(since=RUN[-1].time + 1)
    assert said(bad, watch) == []
    assert watch.step == 60


def test_only_rank_0_and_known_kinds_count() -> None:
    other = [
        record.model_copy(update={"rank": 1})
        for record in changed("step", fixed(loss=-11.0))
        if record.kind == "step"
    ]
    assert (
        said([*other, Record(kind="new"), parse_line('{"kind": "state", "old": "a", "new": "b"}')])
        == []
    )


def test_a_rule_may_be_over_records_of_any_kind() -> None:
    rule = MetricRule(
        "slow", "publishes are slow", "wait", (SyncRecord,), lambda syncs: f"{syncs[-1].seconds} s"
    )
    sync = SyncRecord(time=1e9, step=1, mode="broadcast", weight_version=1, seconds=9)
    assert [found.evidence for found in said([sync], MetricWatch(0.0, (rule,)))] == ["9.0 s"]


def test_two_environments_are_judged_apart() -> None:
    def evaluation(env: str, accuracy: float, version: int) -> EvalRecord:
        return EvalRecord(
            time=1e9 + version,
            env=env,
            accuracy=accuracy,
            correct=int(100 * accuracy),
            questions=100,
            weight_version=version,
        )

    good = [evaluation("a", 0.9, version) for version in range(6)]
    weak = [evaluation("b", 0.1, version) for version in range(6)]
    mixed = [record for pair in zip(good, weak, strict=True) for record in pair]
    assert said(list(mixed)) == []
    assert [
        found.rule for found in said([*mixed, evaluation("a", 0.1, 7), evaluation("a", 0.1, 8)])
    ] == ["accuracy_collapse"]


def test_a_collapse_that_lasts_is_one_alarm() -> None:
    """The reward is 0 from the third step on, however many steps were made since."""

    def after(steps: int) -> str | None:
        made = changed("step", lambda row: {"reward_mean": 0.36 * (row["step"] < 3)}, 1, steps)
        records = [record for record in made if isinstance(record, StepRecord)][:steps]
        spread = [record.model_copy(update={"reward_std": 0.05}) for record in records]
        return reward_collapsed(spread)

    assert after(19) is None
    assert all(after(steps) for steps in range(20, 48)), [n for n in range(20, 48) if not after(n)]


def test_a_short_completion_is_no_repetition() -> None:
    rollouts = [
        RolloutRecord(step=n, prompt="1+1=", completion="2", reward=1, advantage=0)
        for n in range(40)
    ]
    assert said(list(rollouts)) == []
