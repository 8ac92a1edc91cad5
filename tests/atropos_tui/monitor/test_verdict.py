"""The one sentence about a run: ten planted situations, and their priority."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from atropos_common.protocol.control import (
    ComponentStatus,
    Phase,
    Role,
    RunStatus,
    StageStatus,
    State,
)
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import (
    CommandRecord,
    DiagnosisRecord,
    EnvFlow,
    EvalRecord,
    GaugesRecord,
    StateRecord,
)
from atropos_common.protocol.trainer_records import StepRecord, TimingRecord
from atropos_tui.diagnoses import BY_NAME, UNKNOWN
from atropos_tui.monitor import limits
from atropos_tui.monitor.run.run_files import PlannedComponent, RunInfo
from atropos_tui.monitor.run.state import RunState
from atropos_tui.monitor.verdict import GLYPHS, TONES, Severity, Verdict, verdict

NOW = 1000.0
ROLES = {"api": Role.API, "vllm": Role.ENGINE, "math": Role.ENV, "trainer": Role.TRAINER}
INFO = RunInfo(
    training_steps=60,
    components=[
        PlannedComponent("math", Role.ENV, command=("python", "--env.max_batches_offpolicy", "1")),
        PlannedComponent("vllm", Role.ENGINE, gpus=(0,), command=("python", "--enforce-eager")),
    ],
    last_start_s={"vllm": 41.0},
)
ON_CPU = replace(INFO, components=[replace(each, gpus=()) for each in INFO.components])


def row(
    name: str, state: State = State.HEALTHY, role: Role | None = None, **fields: Any
) -> ComponentStatus:
    return ComponentStatus(
        name=name, role=role or ROLES[name], state=state, **{"since": NOW - 300} | fields
    )


def step(number: int, **fields: Any) -> list[Record]:
    """One step a second, the newest a second ago: half of it training, a tenth publishing."""
    common: dict[str, Any] = {"step": number, "time": NOW - 38 + number}
    figures: dict[str, Any] = {
        "loss": 0.0,
        "reward_mean": 0.2 + number / 100,
        "reward_std": 0.3,
        "lr": 1e-4,
        "grad_norm": 1,
        "ratio_mean": 1,
        "clip_fraction": 0,
        "tokens": 384,
        "sequences": 128,
        "policy_lag_max": 1,
        "weight_version": number,
    }
    timing = {
        "step_s": 1.0,
        "data_wait_s": 0.2,
        "train_s": 0.6,
        "sync_s": 0.1,
        "checkpoint_s": 0,
        "tokens_per_s": 384,
    }
    return [StepRecord(**common, **figures | fields), TimingRecord(**common, **timing)]


STEPS = [record for number in range(1, 38) for record in step(number)]


def flow(waiting: float, idle: float, made: int = 60, **fields: Any) -> GaugesRecord:
    figures = {
        "engine": "vllm",
        "workers": "8",
        "counted_s": 30.0,
        "running": 60.0,
        "slots": 128.0,
    } | fields
    found = EnvFlow(waiting=waiting, idle=idle, made=made, **figures)
    return GaugesRecord(time=NOW - 3, flows={"math": found})


def said(
    *records: Record,
    rows: list[ComponentStatus] | None = None,
    steps: bool = True,
    info: RunInfo = INFO,
    **fields: Any,
) -> Verdict:
    state = RunState()
    for seq, record in enumerate([*(STEPS if steps else []), *records]):
        state.apply(record.model_copy(update={"seq": seq}))
    changed = {each.name: each for each in rows or []}
    every = [changed.pop(name, None) or row(name) for name in ROLES]
    status = RunStatus(
        run_id="r",
        name="r",
        run_dir="",
        started_at=NOW - 300,
        components=[*every, *changed.values()],
        **{"phase": Phase.RUNNING, "mode": "none"} | fields,
    )
    return verdict(status, info, state, NOW)


def diagnosed(
    rule: str, component: str, title: str, fix: str, evidence: str = ""
) -> DiagnosisRecord:
    return DiagnosisRecord(
        time=NOW - 0.5,
        rule=rule,
        severity=BY_NAME.get(rule, UNKNOWN).severity,
        component=component,
        role=ROLES[component],
        title=title,
        evidence=evidence,
        fix=fix,
    )


REFUSED = diagnosed(
    "rollouts_refused",
    "math",
    "vllm refuses the requests of math (400)",
    "math asks for what cannot be trained on: send top_p=1. That is in its program, or under "
    "[env.args]",
    "refused 331 requests to /generate (400): top_p=0.95",
)
HUB = diagnosed(
    "dataset_unreachable",
    "math",
    "a data set or model hub cannot be reached",
    "check the network or HF_ENDPOINT",
)
DISK = diagnosed(
    "disk_low",
    "trainer",
    "the run's disk is nearly full",
    "free space (df -h)",
    "120 MB of 64,000 MB are free in the run directory",
)
FLAT = diagnosed(
    "groups_all_flat",
    "math",
    "the groups of math are flat: nothing is learnt from them",
    "easier ones",
)
ENGINES = [row(f"vllm-{at}", role=Role.ENGINE) for at in (1, 2)]
OLD = step(38, too_old=40, policy_lag_bound=2, sequences=88)

SITUATIONS: dict[str, tuple[Severity, str, Verdict]] = {
    "environment slow": (
        "advice",
        "limited by the environment math: 2 of 10 possible groups/s; the trainer waits 90% "
        "of the time, the engine "
        "idles 80%; raise env.max_num_workers (now 8), or make its scoring faster",
        said(flow(0.9, 0.8)),
    ),
    "engine slow": (
        "advice",
        "limited by the engine vllm: busy 97% of the time with 100 of 128 possible "
        "sequences, while the trainer waits "
        "71%; shorter env.max_token_length, a further GPU in [vllm] gpus, or no enforce-eager",
        said(flow(0.71, 0.03, running=100.0)),
    ),
    "trainer slow": (
        "advice",
        "limited by training: train is 60% of a step, lag 1 of 1; the engine idles 62%; more "
        "[trainer] gpus",
        said(flow(0.05, 0.62)),
    ),
    "all groups flat": (
        "alarm",
        "the groups of math are flat: nothing is learnt from them; easier ones",
        said(FLAT),
    ),
    "requests refused": (
        "alarm",
        "vllm refuses the requests of math (400): refused 331 requests to /generate (400): "
        "top_p=0.95; math asks for "
        "what cannot be trained on: send top_p=1",
        said(REFUSED),
    ),
    "hub unreachable": (
        "alarm",
        "math crashed and starts again in 8.0 s: a data set or model hub cannot be reached; "
        "check the network or "
        "HF_ENDPOINT",
        said(HUB, rows=[row("math", State.BACKOFF, retry_at=NOW + 8)]),
    ),
    "disk nearly full": (
        "alarm",
        "the run's disk is nearly full: 120 MB of 64,000 MB are free in the run directory; "
        "free space (df -h)",
        said(DISK),
    ),
    "one engine of three dead": (
        "alarm",
        "vllm has failed for good, 2 of 3 engines are left: exit code -9; atropos-tui why vllm",
        said(rows=[row("vllm", State.FAILED, reason="exit code -9"), *ENGINES]),
    ),
    "lag at its bound": (
        "warning",
        "policy lag at its bound: 40 of the newest 1280 sequences are older than "
        "max_policy_lag = 2 and left out; "
        "env.max_batches_offpolicy = 1 and fewer env.max_num_workers make rollouts younger, "
        "or raise [trainer] "
        "max_policy_lag",
        said(*OLD, step(39, sequences=0, too_old=60, policy_lag_bound=2)[0], flow(0.3, 0.1)),
    ),
    "healthy": (
        "healthy",
        "healthy: step 37 of 60, ETA 23 s, the trainer waits 20%, the engine idles 10%",
        said(flow(0.2, 0.1)),
    ),
}


@pytest.mark.parametrize("name", [name for name in SITUATIONS if name != "lag at its bound"])
def test_each_situation_has_its_sentence_with_its_numbers_and_what_to_change(name: str) -> None:
    severity, text, found = SITUATIONS[name]
    assert (found.severity, found.text) == (severity, text)


def test_sequences_that_are_too_old_are_counted_over_the_newest_steps() -> None:
    _, _, found = SITUATIONS["lag at its bound"]
    assert found.severity == "warning"
    assert found.what.startswith(
        "policy lag at its bound: 100 of the newest 1212 sequences are older than"
    )
    assert "max_policy_lag = 2" in found.what and "env.max_batches_offpolicy = 1" in found.do
    assert said(*OLD, flow(0.3, 0.1)).severity == "healthy", "3 % is not worth a word"


def test_few_requests_in_flight_are_the_environment_s_limit_however_busy_the_engine_is() -> None:
    found = said(flow(0.8, 0.0, running=4.0))
    assert found.what.startswith(
        "limited by the environment math: 2 groups/s; the trainer waits 80%"
    )


def test_an_engine_that_has_room_is_told_to_take_more_at_a_time() -> None:
    assert said(flow(0.71, 0.03, running=46.0)).do.startswith(
        "more at a time: env.max_batches_offpolicy above 1 (policy lag grows with it), "
        "shorter env.max_token_length"
    )
    assert "at a time" not in said(flow(0.71, 0.03, running=100.0)).do


def test_trainer_and_engine_that_take_turns_are_told_how_to_overlap() -> None:
    assert said(flow(0.5, 0.5)).do == (
        "raise env.max_batches_offpolicy above 1 to overlap them (policy lag rises with it)"
    )


def test_flat_groups_are_a_reason_of_a_slow_environment() -> None:
    assert "50% of its groups are flat" in said(flow(0.9, 0.8, flat=30)).do


def test_what_is_broken_comes_first_then_what_is_wrong_then_advice() -> None:
    ill = [row("api", State.UNHEALTHY, probe_detail="no answer within 5 s")]
    assert (
        said(REFUSED, flow(0.9, 0.8), rows=ill).what == "api does not answer: no answer within 5 s"
    )
    assert said(FLAT, DISK, REFUSED, flow(0.9, 0.8)).diagnosis is not None
    assert said(FLAT, DISK, flow(0.9, 0.8)).what.startswith("the run's disk"), (
        "the gravest, not the newest"
    )
    other = diagnosed("repetition", "trainer", "the model repeats itself", "lower [trainer] lr")
    assert said(other, flow(0.9, 0.8)).severity == "warning"


def test_what_is_over_is_no_trouble_any_more() -> None:
    over = [each.model_copy(update={"over": True, "fix": ""}) for each in (DISK, REFUSED)]
    assert said(DISK, REFUSED, flow(0.2, 0.1)).what.startswith("the run's disk")
    assert said(DISK, REFUSED, over[0], flow(0.2, 0.1)).diagnosis is not None
    assert said(DISK, REFUSED, *over, flow(0.2, 0.1)).severity == "healthy"


def test_advice_hides_neither_health_nor_limits() -> None:
    graphs = diagnosed("eager_fallback", "vllm", "Qwen: no CUDA graphs", "nothing is wrong")
    assert said(graphs, flow(0.2, 0.1)).severity == "healthy"
    assert said(graphs, flow(0.9, 0.8)).what.startswith("limited by the environment")


def test_a_bound_environment_is_told_by_the_rates_of_now_and_not_by_an_old_diagnosis() -> None:
    bound = diagnosed(
        "environment_bound",
        "math",
        "math is the bottleneck: trainer and engine wait for it",
        "more",
    )
    assert said(bound, flow(0.2, 0.1)).severity == "healthy"


def test_old_rates_say_nothing_of_now() -> None:
    old = flow(0.9, 0.8).model_copy(update={"time": NOW - 60})
    assert said(old).text == "healthy: step 37 of 60, ETA 23 s"


def test_rates_of_the_steps_stand_in_where_the_supervisor_recorded_none() -> None:
    idle = [
        record.model_copy(update={"engine_idle_fraction": 0.7})
        if isinstance(record, TimingRecord)
        else record
        for record in STEPS
    ]
    assert said(*idle, steps=False).what.startswith(
        "limited by training: train is 60% of a step, lag 1 of 1; the engine idles 70%"
    )


def test_an_environment_that_starts_again_is_named_before_anything_is_overdue() -> None:
    stages = [StageStatus(name="registered")]
    again = row("math", attempt=2, started_at=NOW - 2.5, stages=stages)
    found = said(rows=[again])
    assert (found.severity, found.text) == (
        "coming",
        "math has started again: it registers with run-api · 2.5 s",
    )
    known = row(
        "math",
        attempt=2,
        started_at=NOW - 2.5,
        stages=[StageStatus(name="registered", reached_at=NOW - 3)],
    )
    other = row("math-2", role=Role.ENV, started_at=NOW - 300, stages=known.stages)
    sends = row("math", attempt=2, started_at=NOW - 30, stages=stages)
    for rows in ([known], [again, other], [sends]):
        assert said(rows=rows).text.startswith("healthy"), rows
    assert said(rows=[again], steps=False).text.startswith("the first optimizer step"), (
        "that is the run's own start"
    )


def test_a_component_that_was_stopped_by_hand_is_named_with_its_start() -> None:
    stopped = [
        commanded("stop", "math", 5),
        moved("math", "stopping", "stopped", 5, command_id="c1"),
    ]
    found = said(*stopped, rows=[row("math", State.STOPPED)])
    assert (found.severity, found.text) == (
        "warning",
        "math stopped by hand; atropos-tui start math",
    )
    silent = [each.model_copy(update={"time": each.time - 60}) for each in STEPS]
    late = said(*silent, *stopped, rows=[row("math", State.STOPPED)], steps=False)
    assert (
        late.what == "math stopped by hand: no step 38 for 1:01 (usual: 1.00 s), math not running"
    )
    crashed = said(*stopped[1:], rows=[row("math", State.STOPPED)])
    assert "by hand" not in crashed.text, "nobody asked for it"


def test_while_it_starts_it_says_what_for_how_long_and_how_long_it_took_the_last_time() -> None:
    rows = [
        row("vllm", State.STARTING, since=NOW - 29),
        row("trainer", State.PENDING, waiting_for="vllm"),
    ]
    found = said(rows=rows, steps=False, phase=Phase.STARTING)
    assert (found.severity, found.text) == ("coming", "vllm is starting · 29 s (last time 41 s)")


def test_before_the_first_step_it_is_waited_for() -> None:
    assert said(steps=False).text == "the first optimizer step · 5:00"


def test_after_the_end_a_slow_run_names_its_limit_and_the_change() -> None:
    timing = {"step_s": 1.0, "data_wait_s": 0.86, "train_s": 0.1, "sync_s": 0.04, "tokens_per_s": 9}
    slow = [
        TimingRecord(step=at, time=NOW - 38 + at, checkpoint_s=0, **timing) for at in range(1, 38)
    ]
    over: dict[str, Any] = {"phase": Phase.ENDED, "exit_code": 0}
    found = said(*slow, **over)
    assert found.what.endswith("the trainer waited for rollouts 86% of the time") and not found.do
    idle = [one.model_copy(update={"engine_idle_fraction": 0.7}) for one in slow]
    found = said(*idle, **over)
    assert "; in its last steps limited by the environment: the trainer waits 86%" in found.what
    assert "env.max_num_workers" in found.do
    quick = [one.model_copy(update={"data_wait_s": 0.1}) for one in idle]
    assert "limited" not in said(*quick, **over).text


def test_after_the_end_it_says_what_was_reached_and_what_was_wrong() -> None:
    evals = [
        EvalRecord(env="math", accuracy=accuracy, weight_version=at)
        for at, accuracy in enumerate((0.04, 0.5, 0.92))
    ]
    done = said(*evals, phase=Phase.ENDED, exit_code=0)
    assert done.text == "done: 37 steps, reward 0.23 → 0.55 (means of 5 steps), held-out 4% → 92%"
    stopped = said(
        REFUSED, steps=False, phase=Phase.ENDED, exit_code=130, reason="interrupted by SIGTERM"
    )
    assert stopped.what == "stopped by hand: 0 steps; vllm refuses the requests of math (400)"
    failed = said(phase=Phase.ENDED, exit_code=3, reason="trainer failed for good")
    assert (failed.severity, failed.what) == (
        "alarm",
        "failed with code 3: trainer failed for good",
    )


def test_after_the_last_step_the_model_is_saved_and_no_step_is_late() -> None:
    silent = [each.model_copy(update={"time": each.time - 60}) for each in STEPS]
    late = said(*silent, steps=False)
    assert late.severity == "warning" and late.what.startswith("no step 38 for 1:01")
    saves = said(*silent, steps=False, info=replace(INFO, training_steps=37))
    assert (saves.severity, saves.what) == (
        "coming",
        "all 37 steps are done; saving the model · 1:01",
    )


def test_severity_is_never_colour_alone() -> None:
    assert len(set(GLYPHS.values())) == len(GLYPHS) and set(GLYPHS) == set(TONES)


def test_what_programs_wrote_is_plain_text_in_it() -> None:
    evil = diagnosed("repetition", "trainer", "\x1b]52;c;aGk=\x07title\n[red]", "fix\x1b[2J it")
    assert said(evil).text == "title⏎[red]; fix it"


@pytest.mark.parametrize(
    ("mode", "refused", "named"),
    [
        ("shared_vllm", ("more [trainer] gpus",), "[vllm] gpus"),
        ("broadcast", ("mode broadcast",), "more"),
    ],
)
def test_advice_is_what_the_mode_takes(mode: str, refused: tuple[str, ...], named: str) -> None:
    for rates in (flow(0.71, 0.03), flow(0.05, 0.62)):
        do = said(rates, mode=mode).do
        assert named in do and not any(words in do for words in refused)


def test_a_slow_publish_is_advised_on_by_its_mode() -> None:
    timing = {
        "step_s": 1.0,
        "data_wait_s": 0.1,
        "train_s": 0.1,
        "sync_s": 0.7,
        "checkpoint_s": 0,
        "tokens_per_s": 384,
    }
    slow = [TimingRecord(step=at, time=NOW - 38 + at, **timing) for at in range(30, 38)]
    advice = {
        mode: said(*slow, flow(0.05, 0.62), mode=mode)
        for mode in ("none", "broadcast", "shared_vllm", "lora_only")
    }
    assert all(found.what.startswith("limited by publishing weights") for found in advice.values())
    assert "vllm_restart_interval" in advice["none"].do and "broadcast" in advice["none"].do
    assert not any(
        "broadcast" in found.do or "interval" in found.do
        for mode, found in advice.items()
        if mode != "none"
    )


@pytest.mark.parametrize("mode", ["shared_vllm", "broadcast", "none", "lora_only"])
def test_a_run_without_gpus_gets_no_advice_about_gpus(mode: str) -> None:
    for rates in (flow(0.71, 0.03), flow(0.05, 0.62), flow(0.9, 0.8), flow(0.5, 0.5)):
        text = said(rates, mode=mode, info=ON_CPU).text
        assert not any(
            word in text for word in ("gpu", "GPU", "tensor_parallel", "enforce-eager", "seq_len")
        ), text
    assert said(flow(0.05, 0.62), mode=mode, info=ON_CPU).do == "", "nothing can be done"


def test_an_engine_that_idles_in_single_copy_is_said_to_share_its_gpus() -> None:
    found = said(flow(0.05, 0.62), mode="shared_vllm")
    assert found.what.endswith("the engine idles 62%, which shares its GPUs with the trainer")
    assert "shares" not in said(flow(0.05, 0.62), mode="shared_vllm", info=ON_CPU).what


def test_epochs_are_advised_on_where_there_are_several() -> None:
    trainer = PlannedComponent("trainer", Role.TRAINER, command=("python", "--epochs", "3"))
    several = replace(ON_CPU, components=[*ON_CPU.components, trainer])
    assert said(flow(0.05, 0.62), info=several).do == "fewer [trainer] epochs"


COUNTED = {
    "max_workers": 48,
    "queue_slots": 16,
    "free_slots": 0.1,
    "group_size": 8,
    "waiting_for_slot": 0.0,
}
"""An environment whose queue has 16 slots for 48 workers."""


def test_queue_slots_that_are_the_limit_are_named_and_not_the_workers() -> None:
    """GSM8K on one H100: 384 sequences allowed, 40 of 1,024 running, the engine never without a
    request."""
    found = said(
        flow(
            0.79, 0.02, running=40.0, slots=1024.0, busy_workers=5.5, capacity_used=0.35, **COUNTED
        ),
        mode="shared_vllm",
    )
    assert found.what == (
        "limited by the queue slots of math, 16 groups (on average 6 of 48 workers are "
        "busy): 2 groups/s; the trainer "
        "waits 79% of the time, engine capacity used 35%"
    )
    assert found.do == (
        "raise env.max_batches_offpolicy above 1 (policy lag grows with it); more "
        "env.max_num_workers change nothing"
    )


def test_workers_that_are_all_busy_are_named_with_their_number() -> None:
    counted = COUNTED | {"max_workers": 4, "free_slots": 12.0}
    found = said(
        flow(0.79, 0.02, running=30.0, slots=1024.0, busy_workers=4.0, capacity_used=0.3, **counted)
    )
    assert found.what.startswith("limited by the environment math: 2 groups/s")
    assert found.do == "raise env.max_num_workers (now 4), or make its scoring faster"
    both = counted | {"max_workers": 16, "free_slots": 0.0}
    found = said(
        flow(0.79, 0.02, running=120.0, slots=1024.0, busy_workers=16.0, capacity_used=0.3, **both)
    )
    assert (
        "env.max_num_workers (now 16) together with env.max_batches_offpolicy (now 1)" in found.do
    )


FOLLOWS = {"target_sequences": 200.0, "knee_sequences": 210.0, "batches_ahead": 8}
"""Fields of an environment whose sequences in flight follow the engine."""


@pytest.mark.parametrize(
    ("phase", "do"),
    [
        ("knee", "set [env] concurrency above 200 sequences, or make its scoring faster"),
        ("rising", "wait: the sequences in flight still rise to what the engine needs, or make"),
        ("queue slots", "raise env.max_batches_offpolicy above 8 (policy lag grows with it); more"),
    ],
)
def test_an_environment_that_follows_its_engine_is_told_of_its_own_bound(
    phase: str, do: str
) -> None:
    counted = COUNTED | {"max_workers": 30, "concurrency": phase} | FOLLOWS
    found = said(
        flow(
            0.79, 0.02, running=40.0, slots=1024.0, busy_workers=29.0, capacity_used=0.35, **counted
        ),
        mode="shared_vllm",
    )
    assert found.do.startswith(do)


def test_an_environment_that_scores_most_of_the_time_is_told_to_score_faster() -> None:
    counted = COUNTED | {"max_workers": 16, "free_slots": 0.0}
    found = said(flow(0.9, 0.8, in_engine=6.4, busy_workers=16.0, **counted))
    assert found.what.endswith("95% of its sequences are outside the engine (scoring, tools)")
    assert found.do.startswith("make its scoring faster, or raise env.max_num_workers (now 16)")


def test_of_two_environments_the_one_that_works_while_the_other_waits_is_the_limit() -> None:
    fast = flow(0.9, 0.8, busy_workers=0.2, **COUNTED).flows["math"]
    judge = flow(0.9, 0.8, busy_workers=4.0, in_engine=1.0, **COUNTED).flows["math"]
    both = GaugesRecord(time=NOW - 3, flows={"fast": fast, "judge": judge, "late": fast})
    assert said(both).what.startswith("limited by the environment judge")


def test_an_engine_whose_capacity_is_used_is_the_limit_with_few_of_its_slots_taken() -> None:
    found = said(
        flow(
            0.79, 0.02, running=60.0, slots=1024.0, busy_workers=5.5, capacity_used=0.85, **COUNTED
        )
    )
    assert found.what == (
        "limited by the engine vllm: 85% used with 60 of 1024 possible sequences, while the "
        "trainer waits 79%"
    )


def moved(name: str, old: str, new: str, ago: float, **fields: Any) -> StateRecord:
    return StateRecord(time=NOW - ago, component=name, role=ROLES[name], old=old, new=new, **fields)


def commanded(action: str, component: str, ago: float, initiator: str = "user") -> CommandRecord:
    return CommandRecord(
        time=NOW - ago,
        command_id="c1",
        action=action,
        component=component,
        status="done",
        initiator=initiator,
    )


EARLIER = [
    moved("vllm", "pending", "starting", 100),
    moved("vllm", "starting", "healthy", 88),
    moved("trainer", "pending", "starting", 90),
    moved("trainer", "starting", "healthy", 75),
]
KILLED = [
    *EARLIER,
    commanded("kill", "vllm", 10),
    moved("vllm", "healthy", "backoff", 10, command_id="c1"),
    moved("trainer", "healthy", "stopping", 10),
    moved("vllm", "backoff", "starting", 8),
]
COMING = [row("vllm", State.STARTING, since=NOW - 8), row("trainer", State.STARTING, since=NOW - 7)]


def test_components_that_restart_are_named_before_rates_and_before_a_late_step() -> None:
    words = "vllm and trainer are restarting (killed by hand 10 s ago; last time 15 s)"
    found = said(flow(0.05, 0.62), *KILLED, rows=COMING)
    assert (found.severity, found.text) == ("coming", words)
    silent = [each.model_copy(update={"time": each.time - 60}) for each in STEPS]
    assert said(*silent, *KILLED, steps=False, rows=COMING).text == words, "a late step"
    backs_off = [row("vllm", State.BACKOFF, retry_at=NOW + 1), row("trainer", State.STOPPING)]
    assert said(*KILLED[:-1], rows=backs_off).text == words, "while it backs off"
    unreached = diagnosed("api_unreachable", "trainer", "trainer does not reach run-api", "wait")
    assert said(*KILLED, unreached, rows=COMING).text == words, "what follows from the restart"
    away = row("math", State.UNHEALTHY, since=NOW - 5, probe_detail="no answer")
    assert said(*KILLED, rows=[*COMING, away]).text == words


def test_a_restart_by_a_crash_names_the_crash() -> None:
    crash = [
        *EARLIER,
        diagnosed("oom", "vllm", "out of GPU memory", "lower it").model_copy(
            update={"time": NOW - 10}
        ),
        moved("vllm", "healthy", "backoff", 10),
        moved("vllm", "backoff", "starting", 8),
    ]
    found = said(*crash, rows=COMING[:1])
    assert (
        found.text
        == "vllm is restarting (vllm crashed 10 s ago: out of GPU memory; last time 12 s); lower it"
    )
    assert (
        said(*crash[:-1], rows=[row("vllm", State.BACKOFF, retry_at=NOW + 1)]).severity == "alarm"
    )


def test_a_restart_that_takes_long_gives_way_to_what_is_wrong() -> None:
    long_ago = [each.model_copy(update={"time": each.time - 200}) for each in KILLED]
    rows = [row("vllm", State.STARTING, since=NOW - 208)]
    assert said(*long_ago, rows=rows).text.endswith("; atropos-tui why vllm")
    assert said(*long_ago, DISK, rows=rows).what.startswith("the run's disk")


def test_who_asked_for_a_restart_is_named() -> None:
    moves = [moved("vllm", "healthy", "stopping", 5, command_id="c1")]
    rows = [row("vllm", State.STOPPING)]
    asked = said(commanded("restart", "vllm", 5, "trainer"), *moves, rows=rows)
    assert asked.text == "vllm is restarting (restarted by the trainer 5.0 s ago; last time 41 s)"
    stopped = said(commanded("stop", "vllm", 5), *moves, rows=rows)
    assert "restarting" not in stopped.text, "it is not coming back"
    first = said(
        *EARLIER[:1], rows=[row("vllm", State.STARTING, since=NOW - 100)], phase=Phase.STARTING
    )
    assert "restarting" not in first.text, "that is the run's own start"


def test_a_failure_is_said_once() -> None:
    reason = "vllm refused its arguments: --no-such-flag (exit code 2; wrong usage, not retried)"
    fix = "correct its section of the profile"
    usage = diagnosed("bad_usage", "vllm", "vllm refused its arguments: --no-such-flag", fix)
    ended: dict[str, Any] = {"phase": Phase.ENDED, "exit_code": 3, "reason": reason}
    found = said(usage, rows=[row("vllm", State.FAILED, reason=reason)], steps=False, **ended)
    assert found.text == f"failed with code 3: {reason}; {fix}"
    assert (
        said(usage, DISK, rows=[row("vllm", State.FAILED)], steps=False, **ended).text == found.text
    ), "its own fix"


def test_of_two_environments_the_one_that_a_batch_waits_for_is_the_limit() -> None:
    """Both ask the same engine, which idles while the judge of one takes its time."""
    flows = {
        name: EnvFlow(engine="vllm", waiting=0.9, idle=0.8, awaited=awaited)
        for name, awaited in (("fast", 0.0), ("judge", 0.9))
    }
    state: Any = SimpleNamespace(
        gauges=SimpleNamespace(last=SimpleNamespace(time=NOW, flows=flows))
    )
    found = limits.rates(state, NOW)
    assert found is not None and found.env == "judge"
