"""`[[alert]]`: when each condition holds, what a profile may contain, and the notifications of a
live run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.records import DiagnosisRecord, EvalRecord
from atropos_common.protocol.trainer_records import (
    METRIC_KINDS,
    AlignmentRecord,
    StepRecord,
)
from atropos_common.system.run_dir import ENV_TOKEN
from atropos_tui.diagnoses.metric_rules import alert_rules
from atropos_tui.diagnoses.metric_watch import MetricWatch
from atropos_tui.errors import UserError
from atropos_tui.profile.plan import stack_of
from atropos_tui.profile.profile import parse_profile
from atropos_tui.profile.site import make_site
from atropos_tui.profile.spec import AlertSpec, NotifyPolicy
from atropos_tui.supervisor.notify import DeliveryError, run_command
from tests.support.harness import part, python, wait_until

PROFILE = {"name": "p", "model": "m", "env": {"module": "atropos_envs.arithmetic_server"}}


def record(step: int, **fields: Any) -> StepRecord:
    figures: dict[str, Any] = {
        "loss": 0.0,
        "reward_mean": 0.5,
        "reward_std": 0.3,
        "lr": 1e-4,
        "grad_norm": 1,
        "ratio_mean": 1,
        "clip_fraction": 0,
        "tokens": 384,
        "sequences": 128,
        "weight_version": step,
        "run_id": "r",
    }
    return StepRecord(time=1e9 + step, step=step, **figures | fields)


def told(alert: AlertSpec, values: Sequence[float | None]) -> list[tuple[int, str, str]]:
    """Return step, title and evidence of each alert while `values` arrive, one for each step."""
    watch = MetricWatch(0.0, alert_rules([alert]))
    found = []
    for step, value in enumerate(values, 1):
        found += [
            (step, said.title, said.evidence)
            for said in watch.feed(record(step, **{alert.metric: value}))
        ]
    return found


def test_below_and_above_speak_once_when_they_have_held_for_so_many_steps() -> None:
    alert = AlertSpec(metric="entropy_mean", below=0.05, for_steps=3)
    assert told(alert, [1, 0.04, 0.03, 0.06, 0.04, 0.03, 0.02, 0.01, 0.01]) == [
        (7, "alert: entropy_mean is below 0.05 for 3 steps", "0.04, 0.03, 0.02 at steps 5-7")
    ]
    assert told(AlertSpec(metric="grad_norm", above=10.0), [9, 10, 11]) == [
        (3, "alert: grad_norm is above 10", "11 at steps 3-3")
    ]
    assert told(alert, [None, None, None, None]) == [], "a value that does not exist is not 0"


def test_a_slope_has_a_direction() -> None:
    falls = AlertSpec(metric="reward_mean", slope=-0.1)
    assert told(falls, [0.5, 0.6, 0.7, 0.8, 0.9]) == []
    assert told(falls, [0.9, 0.8, 0.7, 0.6]) == [], "fewer than five steps are no line"
    step, title, evidence = told(falls, [0.9, 0.79, 0.68, 0.57, 0.46])[0]
    assert (step, title) == (5, "alert: reward_mean falls by 0.1 a step")
    assert evidence.startswith("-0.11 a step; 0.9, 0.79")
    assert told(AlertSpec(metric="reward_mean", slope=0.1), [0, 0.2, 0.4, 0.6, 0.8])


def test_a_z_score_is_against_the_steps_before() -> None:
    alert = AlertSpec(metric="grad_norm", z=4.0)
    calm = [1.0, 1.2, 0.8, 1.1, 0.9] * 3
    assert told(alert, [*calm, 1.3]) == []
    (found,) = told(alert, [*calm, 3.0])
    assert found[0] == 16 and "3 at steps 16-16; the 15 steps before: 1 ± 0.14" in found[2]
    assert told(alert, [1.0, 1.2, 9.0]) == [], "two steps are nothing to compare with"


def test_a_held_out_accuracy_is_watched_by_split_and_by_environment() -> None:
    def evals(metric: str) -> list[tuple[str, str]]:
        watch = MetricWatch(0.0, alert_rules([AlertSpec(metric=metric, below=0.5, for_steps=2)]))
        accuracies = {
            ("sums", "held_out"): 0.4,
            ("sums", "carries"): 0.3,
            ("words", "held_out"): 0.2,
        }
        records = [
            EvalRecord(
                time=1e9 + version, env=env, split=split, accuracy=accuracy, weight_version=version
            )
            for version in (10, 20, 30)
            for (env, split), accuracy in accuracies.items()
        ]
        return [(said.title, said.evidence) for record in records for said in watch.feed(record)]

    title = "alert: eval/held_out is below 0.5 for 2 steps"
    assert evals("eval/held_out") == [
        (title, "0.4, 0.4 at steps 10-20"),
        (title, "0.2, 0.2 at steps 10-20"),
    ]
    assert [evidence for _, evidence in evals("eval/sums/held_out")] == ["0.4, 0.4 at steps 10-20"]
    assert evals("eval/sums") == []


def test_every_number_of_a_step_can_be_watched_and_nothing_else() -> None:
    assert {"entropy_mean", "step_s", "probe_diff_abs_max", "rss_bytes", "tokens"} <= set(
        METRIC_KINDS
    )
    assert not {"left_out", "objective", "verdict", "step", "time", "attempt", "cause"} & set(
        METRIC_KINDS
    )
    assert METRIC_KINDS["tokens"] is StepRecord and METRIC_KINDS["train_mean"] is AlignmentRecord


@pytest.mark.parametrize(
    ("alert", "words"),
    [
        ({"metric": "entropy", "below": 1.0}, "did you mean entropy_mean?"),
        ({"metric": "eval/", "below": 1.0}, "a held-out accuracy is eval/SPLIT"),
        ({"metric": "entropy_mean"}, "set below, above, slope or z"),
        ({"metric": "entropy_mean", "slope": 0.0}, "a slope of 0 is no change"),
        ({"metric": "entropy_mean", "below": 1.0, "for_step": 3}, "did you mean for_steps?"),
        ({"metric": "entropy_mean", "z": -1.0}, "alert[0].z"),
    ],
)
def test_a_mistake_in_an_alert_is_refused_with_the_way_out(
    alert: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as refused:
        parse_profile({**PROFILE, "alert": [alert]}, "p.toml")
    said = " ".join(
        f"{problem.key} {problem.reason} {problem.fix}" for problem in refused.value.problems
    )
    assert words in said and len(refused.value.problems) == 1, said


def test_a_profile_s_alerts_reach_the_supervisor(tmp_path: Path) -> None:
    parse_profile({**PROFILE, "alert": {"metric": "eval/held_out", "below": 0.3}}, "p.toml")
    profile = parse_profile({**PROFILE, "alert": {"metric": "loss", "above": 3.0}}, "p.toml")
    stack = stack_of(make_site(profile, tmp_path, run_id="r"))
    assert [(alert.metric, alert.above, alert.for_steps) for alert in stack.alerts] == [
        ("loss", 3.0, 1)
    ]


async def test_a_live_run_runs_the_command_with_what_the_alert_found(
    launch: Any, tmp_path: Path
) -> None:
    out = tmp_path / "told.json"
    writer = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    notify = NotifyPolicy(command=python(writer), on=("alert",))
    alert = AlertSpec(metric="reward_mean", below=0.2)
    async with launch(part("trainer"), notify=notify, alerts=[alert]) as running:
        await running.until("trainer", "healthy")
        line = record(1, reward_mean=0.1).model_copy(update={"time": time.time() + 1}).to_line()
        running.run.telemetry_jsonl.write_text(line)
        await wait_until(lambda: out.exists() and out.stat().st_size > 0)
        said = json.loads(out.read_text())
        assert (said["event"], said["component"]) == ("alert", "trainer")
        assert said["reason"] == "alert: reward_mean is below 0.2: 0.1 at steps 1-1"
        found = [each for each in running.records if isinstance(each, DiagnosisRecord)]
        assert [(each.rule, each.component) for each in found] == [("alert", "trainer")]


async def test_a_command_gets_no_token_and_says_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_TOKEN, "secret")
    show = f"import os, sys; open({str(tmp_path / 'env')!r}, 'w').write(repr(dict(os.environ)))"
    await run_command(python(show), {})
    assert ENV_TOKEN not in (tmp_path / "env").read_text()
    with pytest.raises(DeliveryError, match="ended with code 3: no such channel"):
        await run_command(
            python("import sys; print('no such channel', file=sys.stderr); sys.exit(3)"), {}
        )
    with pytest.raises(DeliveryError, match="cannot be started"):
        await run_command(["/nowhere/at-all"], {})
    monkeypatch.setattr("atropos_tui.supervisor.notify.COMMAND_S", 0.3)
    with pytest.raises(DeliveryError, match=r"did not end within 0\.3 s"):
        await run_command(python("import time; time.sleep(60)"), {})
