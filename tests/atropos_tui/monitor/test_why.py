"""`why` as text: first what the run waits for, in every state, live or ended."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from atropos_common.protocol.control import (
    ComponentStatus,
    GpuStatus,
    Phase,
    Role,
    RunStatus,
    StageStatus,
    State,
)
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import DiagnosisRecord
from atropos_tui.cli import show
from atropos_tui.monitor.run.run_files import PlannedComponent, RunInfo
from atropos_tui.monitor.run.state import RunState
from atropos_tui.monitor.why import Explanation, open_diagnoses
from tests.support.run_maker import step_records

NOW = 1000.0
ROLES = {"api": Role.API, "vllm": Role.ENGINE, "trainer": Role.TRAINER, "env": Role.ENV}
PLAN = [
    PlannedComponent("api", Role.API, start_timeout_s=600),
    PlannedComponent("vllm", Role.ENGINE, start_timeout_s=1800),
    PlannedComponent("env", Role.ENV, depends_on={"api": "healthy"}),
    PlannedComponent(
        "trainer", Role.TRAINER, depends_on={"api": "healthy"}, max_restarts=3, window_s=600
    ),
]


def row(name: str, state: State, *, age: float = 5.0, **fields: Any) -> ComponentStatus:
    return ComponentStatus(name=name, role=ROLES[name], state=state, since=NOW - age, **fields)


def state_of(*records: Record) -> RunState:
    """Return a reader's state after these records."""
    state = RunState()
    for seq, record in enumerate(records):
        state.apply(record.model_copy(update={"seq": seq}))
    return state


def steps(last_at: float) -> list[Record]:
    """A trainer that did 73 steps, one a second, the last one at `last_at`."""
    rng = random.Random(0)
    return [
        record
        for step in range(1, 74)
        for record in step_records(step, rng, time=last_at - 73 + step)
    ]


def status_of(phase: Phase, code: int | None) -> RunStatus:
    return RunStatus(
        run_id="d", name="d", mode="none", run_dir="/r", phase=phase, started_at=0.0, exit_code=code
    )


def lines(
    *rows: ComponentStatus,
    phase: Phase = Phase.STARTING,
    plan: bool = True,
    records: Sequence[Record] = (),
    **fields: Any,
) -> list[str]:
    known = {found.name for found in rows}
    given = [row(name, State.HEALTHY) for name in ROLES if name not in known]
    status = RunStatus(
        run_id="demo-1",
        name="demo",
        mode="none",
        run_dir="/r",
        phase=phase,
        started_at=0.0,
        components=sorted([*rows, *given], key=lambda found: list(ROLES).index(found.name)),
        **fields,
    )
    return Explanation(
        status, RunInfo(components=PLAN if plan else []), state_of(*records), NOW
    ).lines()


def paragraph(found: list[str], name: str) -> list[str]:
    """The lines of one component, without its name and state."""
    at = next(index for index, line in enumerate(found) if line.startswith(f"  {name} "))
    following = found[at + 1 :]
    end = next(
        (index for index, line in enumerate(following) if not line.startswith(" " * 12)),
        len(following),
    )
    return [found[at][24:].strip(), *(line.strip() for line in following[:end])]


def test_the_first_line_goes_to_the_root() -> None:
    starting = row(
        "api",
        State.STARTING,
        age=12,
        probe="readiness",
        healthy=False,
        probe_detail="GET /info: refused",
    )
    found = lines(
        starting,
        row("env", State.PENDING, waiting_for="api to be healthy"),
        row("trainer", State.PENDING, waiting_for="api to be healthy"),
    )
    assert (
        found[0]
        == "demo-1 is starting; it waits for api, which is starting for 12 s, at most 10:00"
    )
    assert paragraph(found, "api") == [
        "for 12 s, at most 10:00",
        "its readiness check has not passed: GET /info: refused",
    ]
    assert paragraph(found, "env") == ["waits for api to be healthy: it is starting for 12 s"]


def test_a_trainer_that_waits_for_the_engine_is_not_what_the_run_waits_for() -> None:
    found = lines(row("vllm", State.STARTING, age=40), row("trainer", State.STARTING, age=41))
    assert (
        found[0]
        == "demo-1 is starting; it waits for vllm, which is starting for 40 s, at most 30:00"
    )
    alone = lines(row("trainer", State.STARTING, age=41))
    assert alone[0] == "demo-1 is starting; it waits for trainer, which is starting for 41 s"


def test_a_running_stack_waits_for_the_trainers_next_stage_or_for_nothing() -> None:
    stages = [
        StageStatus(name="registered", reached_at=NOW - 12),
        StageStatus(name="first batch", usually="all groups had equal scores"),
    ]
    found = lines(row("trainer", State.HEALTHY, age=30, stages=stages), phase=Phase.RUNNING)
    assert found[0] == "demo-1 is running; it waits for first batch of trainer for 12 s"
    said = [
        "registered 12 s ago; waiting for: first batch for 12 s",
        "usually: all groups had equal scores",
    ]
    assert paragraph(found, "trainer") == said
    assert paragraph(found, "vllm") == [""]
    first = lines(row("trainer", State.HEALTHY, stages=stages[:1]), phase=Phase.RUNNING)
    assert first[0] == "demo-1 is running; it waits for the first optimizer step for 12 s"
    done = lines(
        row("trainer", State.HEALTHY, stages=stages[:1]),
        phase=Phase.RUNNING,
        records=steps(NOW - 2),
    )
    assert done[0] == "demo-1 is running; it waits for nothing: every component is healthy or done"
    assert paragraph(done, "trainer") == [""]


def test_a_stage_that_was_jumped_over_is_not_waited_for() -> None:
    stages = [StageStatus(name="registered"), StageStatus(name="attached", reached_at=NOW - 3)]
    found = lines(
        row("trainer", State.HEALTHY, stages=stages), phase=Phase.RUNNING, records=steps(NOW - 2)
    )
    assert found[0].endswith("healthy or done")


def test_a_step_that_is_overdue_is_what_a_run_waits_for() -> None:
    stopped = row("env", State.STOPPED, reason="stopped by hand")
    found = lines(stopped, phase=Phase.RUNNING, records=steps(NOW - 16))
    assert found[0] == "demo-1 is running; no step 74 for 16 s (usual: 0.32 s), env not running"
    soon = lines(stopped, phase=Phase.RUNNING, records=steps(NOW - 2))
    assert soon[0].endswith(
        "it waits for nothing: every component is healthy or done, but env is stopped"
    )


def test_backoff_names_the_next_try_and_the_last_one() -> None:
    crashed = row("trainer", State.BACKOFF, reason="exit code 9", retry_at=NOW + 3, crashes=2)
    found = lines(crashed)
    assert paragraph(found, "trainer") == [
        "crashed: exit code 9",
        "next start in 3.0 s",
        "crash 2 within 10:00; crash 4 is the last",
    ]
    assert (
        paragraph(lines(crashed.model_copy(update={"retry_at": NOW - 1})), "trainer")[1]
        == "starts again now"
    )


def test_stopping_names_processes_and_gpu_memory() -> None:
    ending = row("vllm", State.STOPPING, reason="stop of vllm by hand", pids=list(range(1, 12)))
    assert paragraph(lines(ending), "vllm") == [
        "stop of vllm by hand for 5.0 s",
        "11 processes left: pid 1, 2, 3, 4, 5, 6, 7, 8 and 3 more",
    ]
    held = row(
        "vllm", State.STOPPING, reason="SIGKILL", waiting_for="40.0 GiB on GPU 0 to be given back"
    )
    assert paragraph(lines(held), "vllm")[1] == "waits for 40.0 GiB on GPU 0 to be given back"
    ending_run = lines(
        ending, row("api", State.STOPPED), phase=Phase.STOPPING, reason="stopped by command"
    )
    assert ending_run[0] == (
        "demo-1 is being stopped (stopped by command); it waits for vllm, trainer and env to "
        "be gone"
    )


def test_a_diagnosis_is_told_while_it_is_about_what_is_now() -> None:
    said = DiagnosisRecord(
        component="vllm", title="GPU memory is exhausted", evidence="OOM", fix="less", time=NOW - 9
    )
    failed = lines(row("vllm", State.FAILED, reason="exit code 1", age=8.9), records=[said])
    assert paragraph(failed, "vllm") == [
        "exit code 1",
        "diagnosis: GPU memory is exhausted",
        "evidence: OOM",
        "fix: less",
    ]
    over = said.model_copy(update={"time": NOW - 2, "over": True, "fix": ""})
    healed = lines(row("vllm", State.HEALTHY, age=20), records=[said, over])
    assert paragraph(healed, "vllm") == [""]
    again = said.model_copy(update={"time": NOW - 1})
    lives = lines(row("vllm", State.HEALTHY, age=20), records=[said, over, again])
    assert "fix: less" in paragraph(lives, "vllm")


def test_every_open_diagnosis_of_a_component_is_told_the_gravest_first() -> None:
    said = [
        DiagnosisRecord(
            component="trainer", rule=rule, severity=severity, title=rule, time=NOW - age
        )
        for rule, severity, age in [
            ("logprobs_recomputed", "advice", 3),
            ("reward_constant", "warning", 5),
            ("alignment_mismatch", "alarm", 20),
            ("disk_low", "alarm", 30),
        ]
    ]
    found = paragraph(lines(row("trainer", State.HEALTHY), records=said), "trainer")
    assert found == [
        "diagnosis: disk_low",
        "diagnosis: alignment_mismatch",
        "diagnosis: reward_constant",
        "diagnosis: logprobs_recomputed",
    ]


def test_a_run_that_ended_well_has_no_open_diagnosis() -> None:
    said = DiagnosisRecord(
        component="trainer", rule="no_batches", title="no batches", time=NOW - 90
    )
    over = said.model_copy(update={"time": NOW - 60, "over": True})
    state = state_of(said)
    assert open_diagnoses(state, status_of(Phase.ENDED, 0)) == []
    assert [found.rule for found in open_diagnoses(state, status_of(Phase.ENDED, 3))] == [
        "no_batches"
    ]
    told = paragraph(lines(phase=Phase.ENDED, exit_code=0, records=[said, over]), "trainer")
    assert told[0].startswith("diagnosis at ") and ", over at " in told[0]


def test_after_the_end_every_diagnosis_is_told_with_its_way_out() -> None:
    """Stopping is a state, too: it made earlier diagnoses look old."""
    said = [
        DiagnosisRecord(
            component="trainer",
            rule=rule,
            title=title,
            evidence="180 s",
            fix="look",
            time=NOW - age,
        )
        for rule, title, age in [
            ("no_batches", "no batches", 90),
            ("no_batches", "no batches", 50),
            ("ratio", "far", 9),
        ]
    ]
    found = lines(
        row("trainer", State.STOPPED, reason="stopped with the stack", age=1),
        phase=Phase.ENDED,
        exit_code=130,
        reason="interrupted by SIGTERM",
        records=said,
    )
    told = paragraph(found, "trainer")
    assert [line.split(" ")[0] for line in told] == [
        "stopped",
        *["diagnosis", "evidence:", "fix:"] * 2,
    ]
    assert (
        told[1].endswith(": no batches")
        and told[4].endswith(": far")
        and told[2:4] == ["evidence: 180 s", "fix: look"]
    )
    many = [
        DiagnosisRecord(component="env", rule=f"r{at}", title=f"t{at}", time=NOW - 9 + at)
        for at in range(8)
    ]
    ended = paragraph(lines(phase=Phase.ENDED, exit_code=3, records=many), "env")
    assert len(ended) == 6 and ended[-2].endswith(": t7")
    assert ended[-1] == "and 3 before: atropos-tui events --kind diagnosis --component env"


def test_after_the_end_no_clock_runs() -> None:
    found = lines(
        row("vllm", State.FAILED, reason="exit code 1; gave up"),
        row("env", State.STOPPED, reason="stopped with the stack"),
        row("trainer", State.STOPPING),
        phase=Phase.ENDED,
        exit_code=3,
        reason="vllm: gave up",
    )
    assert found[0] == "demo-1 ended with code 3: vllm: gave up"
    assert paragraph(found, "env") == ["stopped with the stack"]
    assert not any(" for " in line for line in found)
    crashed = lines(
        row("vllm", State.HEALTHY, reason="kept", pids=[7, 8]), phase=Phase.ENDED, reason="gone"
    )
    assert crashed[0] == "demo-1 crashed: gone" and paragraph(crashed, "vllm") == ["kept; pid 7, 8"]


def test_without_a_plan_the_supervisors_own_words_serve() -> None:
    waits = row("env", State.PENDING, waiting_for="api to be healthy (it is starting)")
    found = lines(waits, plan=False)
    assert paragraph(found, "env") == ["waits for api to be healthy (it is starting) for 5.0 s"]
    assert found[0].startswith("demo-1 is starting; it waits for env, which is pending")


def test_on_a_terminal_long_lines_go_on_below_their_beginning() -> None:
    stages = [
        StageStatus(
            name="first batch", usually="all groups had equal scores and were dropped, see the log"
        )
    ]
    part = row("trainer", State.HEALTHY, stages=stages, started_at=NOW - 5)
    status = RunStatus(
        run_id="demo-1",
        name="demo",
        mode="none",
        run_dir="/r",
        phase=Phase.RUNNING,
        started_at=0.0,
        components=[part],
    )
    found = Explanation(status, RunInfo(), RunState(), NOW).lines(columns=60)
    assert max(map(len, found)) <= 60
    assert found[-3:] == [
        "  trainer  ● healthy    waiting for: first batch for 5.0 s",
        "                        usually: all groups had equal scores",
        "                        and were dropped, see the log",
    ]


@pytest.mark.parametrize("state", list(State))
def test_every_state_has_words_and_hostile_text_stays_text(state: State) -> None:
    evil = "\x1b]52;c;x\x07bad\nnews"
    part = row(
        "vllm", state, reason=evil, probe_detail=evil, waiting_for=evil, pids=[1], retry_at=NOW
    )
    found = lines(part)
    assert "\x1b" not in "".join(found) and "\x07" not in "".join(found)
    assert all("\n" not in line for line in found)


def test_ps_shows_gpu_memory_where_it_is_known() -> None:
    status = RunStatus(
        run_id="demo-1",
        name="demo",
        mode="none",
        run_dir="/r",
        phase=Phase.RUNNING,
        started_at=0.0,
        components=[
            row("vllm", State.HEALTHY, gpu_bytes=40_000_000_000),
            row("api", State.HEALTHY),
        ],
        gpus=[
            GpuStatus(index=0, name="H200", used_bytes=41_000_000_000, total_bytes=150_000_000_000)
        ],
    )
    text = show.ps_table(status, now=NOW)
    head, vllm, api = text.splitlines()[1:4]
    assert vllm[: head.index("GPU") + 3].endswith("40.0 GB")
    assert api[: head.index("GPU") + 3].rstrip().endswith("–")
    assert text.splitlines()[-1] == "GPU 0 (H200): 41.0 GB of 150.0 GB used"
    bare = status.model_copy(update={"gpus": [], "components": [row("api", State.HEALTHY)]})
    assert "GPU" not in show.ps_table(bare, now=NOW)
