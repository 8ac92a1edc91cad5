"""Diagnoses during a run: real children that print and record, under a real supervisor."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.control import CommandRequest, Role, RunStatus
from atropos_common.protocol.records import DiagnosisRecord
from atropos_tui.diagnoses import log_scanner, stall_rules, watcher
from atropos_tui.monitor.run.run_files import load_run, status_from_files
from atropos_tui.monitor.verdict import verdict
from atropos_tui.monitor.why import open_diagnoses
from atropos_tui.profile.spec import FileCheck, LogCheck, Probe, Probes, StopPolicy
from atropos_tui.supervisor.component import stuck
from tests.support.harness import NEVER, QUICK, SLEEP, Running, part, python, ready, wait_until

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
FILES = "OSError: [Errno 24] Too many open files: '/dev/null'"
SAY = """import sys, time
for line in sys.argv[2:]:
    print(line, flush=True)
    time.sleep(0.4)
time.sleep(float(sys.argv[1]))"""
SAY_AND_DIE = SAY + "\nsys.exit(1)"
RECORD = """import os, sys, time
with open(os.environ['ATROPOS_RUN_DIR'] + '/telemetry.jsonl', 'a') as file:
    file.write(sys.argv[2])
time.sleep(float(sys.argv[1]))"""
Launch = Callable[..., Any]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look twenty times a second, so that tests need not wait."""
    monkeypatch.setattr(watcher, "CHECK_EVERY_S", 0.05)


def diagnoses(running: Running) -> list[DiagnosisRecord]:
    return [each for each in running.records if isinstance(each, DiagnosisRecord) and not each.over]


def ends(running: Running) -> list[DiagnosisRecord]:
    return [each for each in running.records if isinstance(each, DiagnosisRecord) and each.over]


def rules(running: Running) -> list[tuple[str | None, str]]:
    return [(found.component, found.rule) for found in diagnoses(running)]


def step(number: int, **changes: Any) -> str:
    """A line of the clean run's telemetry, with changes."""
    lines = (Path(__file__).parent / "logs/clean/telemetry.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    row = next(row for row in rows if row["kind"] == "step" and row["step"] == number)
    return json.dumps(row | {"time": 4e9} | changes) + "\n"


async def test_a_line_is_explained_while_its_program_runs(launch: Launch) -> None:
    async with launch(part("train", python(SAY, 600, OOM, OOM), role=Role.TRAINER)) as running:
        await running.until("train", "healthy")
        await wait_until(lambda: bool(diagnoses(running)))
        found = diagnoses(running)[0]
        assert (found.component, found.role, found.rule) == ("train", "trainer", "out_of_memory")
        assert found.evidence == OOM
        assert "adafactor" in found.fix
        row = (await running.client.status()).components[0]
        assert row.state == "healthy" and row.diagnosis.startswith(
            "GPU memory is exhausted: five ways out"
        )
        await asyncio.sleep(0.8)
        assert len(diagnoses(running)) == 1, "the second line is the same cause"


async def test_an_end_is_not_explained_twice_and_each_attempt_once(launch: Launch) -> None:
    async with launch(
        part("train", python(SAY_AND_DIE, 0.2, OOM), role=Role.TRAINER, restart=QUICK)
    ) as running:
        assert await running.end() == 3
        assert running.path("train").count("starting") == 3
        assert rules(running) == [("train", "out_of_memory")] * 3
        assert "GPU memory is exhausted" in running.result().reason


async def test_the_cause_of_an_end_has_the_last_word(launch: Launch) -> None:
    async with launch(part("x", python(SAY_AND_DIE, 0.2, OOM, FILES), restart=NEVER)) as running:
        assert await running.end() == 3
        assert [rule for _, rule in rules(running)] == [
            "out_of_memory",
            "too_many_files",
            "out_of_memory",
        ]


async def test_telemetry_is_judged_while_it_is_written(launch: Launch) -> None:
    lines = step(1) + step(2, loss=-12.0) + "no json\n" + step(3, loss=-13.0) + step(4)[:40]
    async with launch(
        part("other"), part("train", python(RECORD, 600, lines), role=Role.TRAINER)
    ) as running:
        await wait_until(lambda: bool(diagnoses(running)))
        found = diagnoses(running)[0]
        assert (found.component, found.rule) == ("train", "loss_too_low")
        assert found.evidence == "step 2: loss -12"
        await asyncio.sleep(0.3)
        assert len(diagnoses(running)) == 1


async def test_what_was_written_in_the_last_moment_is_judged(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "CHECK_EVERY_S", 1e6)
    code = RECORD + f"\nprint({OOM!r})"
    trainer = part("train", python(code, 0, step(1, loss="NaN")), role=Role.TRAINER, ends_run=True)
    async with launch(trainer) as running:
        assert await running.end() == 0
        assert rules(running) == [("train", "non_finite"), ("train", "out_of_memory")]


async def test_evaluations_are_judged(launch: Launch, tmp_path: Path) -> None:
    async with launch(part("a")) as running:
        await running.until("a", "healthy")
        rows = [
            {
                "kind": "eval",
                "time": 4e9,
                "env": "e",
                "accuracy": a,
                "correct": 1,
                "questions": 200,
                "weight_version": v,
            }
            for v, a in enumerate([0.5, 0.59, 0.07, 0.06])
        ]
        (running.run.root / "eval.e.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
        await wait_until(lambda: bool(diagnoses(running)))
        found = diagnoses(running)[0]
        assert (
            found.rule == "accuracy_collapse"
            and "59.0% at weight version 1, 7.0%" in found.evidence
        )


async def test_the_last_environment_has_ended(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The diagnosis comes at once, and once: the stall that follows has this cause."""
    monkeypatch.setattr(stall_rules, "STALL_S", 0.2)
    env = part("env", python("print('done')"), role=Role.ENV)
    async with launch(env, part("train", python(SLEEP), role=Role.TRAINER)) as running:
        await wait_until(lambda: bool(diagnoses(running)))
        await asyncio.sleep(0.3)
        found = diagnoses(running)
        assert [one.title for one in found] == ["env ended before the run"]
        assert (found[0].component, found[0].evidence.split("; ")[1]) == (
            "env",
            "its last line: done",
        )
        assert "atropos-tui start env" in found[0].fix


async def test_another_cause_is_another_word(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_rules, "STALL_S", 0.3)
    env = part("env", python(SAY, 2), role=Role.ENV)
    async with launch(env, part("train", python(SLEEP), role=Role.TRAINER)) as running:
        await wait_until(lambda: len(diagnoses(running)) > 1)
        titles = [found.title for found in diagnoses(running)]
        assert titles == ["no batches: rollouts are slow", "env ended before the run"]


DROPPED = "WARNING atroposlib.envs.base: Scores are the same in a group, skipping..."
CAME = "INFO atroposlib.envs.base: Initialized env with id 0"


async def test_lines_that_are_counted_name_the_cause(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program has no host of ours."""
    env = part("env", python(SAY, 600, *["\n".join([DROPPED] * 4)] * 2), role=Role.ENV)
    async with launch(env, part("train", role=Role.TRAINER)) as running:
        await wait_until(lambda: bool(diagnoses(running)))
        assert rules(running) == [("env", "groups_all_flat")]
        assert "8 of the newest 8 groups have one score" in diagnoses(running)[0].evidence


async def test_a_step_ends_the_counting(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_rules, "STALL_S", 3.0)
    env = part(
        "env",
        python(SAY, 600, *["a rollout has timed out after its limit, skipping"] * 3),
        role=Role.ENV,
    )
    async with launch(env, part("train", role=Role.TRAINER)) as running:
        await running.until("train", "healthy")
        await wait_until(lambda: (running.run.log("env", 1)).read_text().count("skipping") == 3)
        await asyncio.sleep(0.3)
        running.run.telemetry_jsonl.write_text(step(5, time=time.time()))
        await wait_until(lambda: bool(diagnoses(running)))
        found = diagnoses(running)[-1]
        assert (found.title, found.evidence.split("; ")[0][-12:]) == (
            "no batches: rollouts are slow",
            "after step 5",
        )


async def test_a_ghost_is_laid_by_a_new_run_api(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_rules, "STALL_S", 1.0)
    env = part("env", python(SAY, 600, CAME, CAME), role=Role.ENV)
    async with launch(part("api", role=Role.API), env, part("train", role=Role.TRAINER)) as running:
        await wait_until(lambda: bool(diagnoses(running)))
        assert (
            diagnoses(running)[0].title
            == "no batches: run-api waits for an environment that is gone"
        )
        await running.client.command(CommandRequest(action="restart", component="api"))
        await wait_until(lambda: len(diagnoses(running)) > 1)
        assert diagnoses(running)[-1].title == "no batches: rollouts are slow"


async def test_what_went_away_and_comes_back_is_told_again(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "DISK_S", 0.0)
    monkeypatch.setattr(watcher, "GONE_S", 0.1)
    monkeypatch.setattr(stall_rules, "NEVER_LOW_SHARE", 1.0)
    async with launch(part("x")) as running:
        await running.until("x", "healthy")
        for low in (True, False, True):
            monkeypatch.setattr(stall_rules, "LOW_BYTES", 10**18 if low else 0)
            await asyncio.sleep(0.6)
        assert rules(running) == [("x", "disk_low")] * 2


async def test_a_start_that_drags_on(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has said something by then, however busy the machine."""
    monkeypatch.setattr(stall_rules, "SLOW_START_ANY_S", 1.5)
    probes = Probes(readiness=Probe(checks=[LogCheck(pattern="never")], interval_s=0.02))
    slow = part("slow", python(SAY, 600, "step 1 of 9"), probes=probes, start_timeout_s=2.5)
    async with launch(slow) as running:
        assert await running.end() == 4
        assert rules(running) == [("slow", "slow_start"), ("slow", "not_ready")]
        assert "last line: step 1 of 9" in diagnoses(running)[0].evidence


AWAY_AND_BACK = """import os, pathlib, sys, time
print('Atropos API not reachable at http://127.0.0.1:1 (ConnectError); waiting', flush=True)
while not pathlib.Path(os.environ['ATROPOS_RUN_DIR'], 'back').exists(): time.sleep(0.01)
print('run-api is back after 34 s', flush=True)
time.sleep(600)"""


def sentence(running: Running, status: RunStatus) -> str:
    info, state, _ = load_run(running.run.root)
    return verdict(status, info, state, time.time()).line


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience of all patterns is at most 0.2 s."""
    rules = [
        replace(
            rule,
            patterns=tuple(
                replace(each, patience_s=min(each.patience_s, 0.2)) for each in rule.patterns
            ),
        )
        for rule in log_scanner.LOG_RULES
    ]
    monkeypatch.setattr(log_scanner, "LOG_RULES", tuple(rules))


@pytest.mark.usefixtures("soon")
async def test_run_api_away_and_back_leaves_no_alarm(launch: Launch) -> None:
    async with launch(
        part("api", role=Role.API), part("train", python(AWAY_AND_BACK), role=Role.TRAINER)
    ) as running:
        await wait_until(lambda: bool(diagnoses(running)))
        status = await running.client.status()
        assert sentence(running, status).startswith("✖ train does not reach run-api")
        assert "does not reach run-api" in status.components[1].diagnosis
        (running.run.root / "back").touch()
        await wait_until(lambda: bool(ends(running)))
        (over,) = ends(running)
        assert (over.component, over.rule, over.severity) == ("train", "api_unreachable", "alarm")
        assert (over.title, over.evidence) == (
            "train does not reach run-api",
            "run-api is back after 34 s",
        )
        status = await running.client.status()
        assert "run-api" not in sentence(running, status) and status.components[1].diagnosis == ""


AWAY_LATER = AWAY_AND_BACK.replace(
    "print('Atropos",
    "while not pathlib.Path(os.environ['ATROPOS_RUN_DIR'], 'gone').exists(): time.sleep(0.01)\n"
    "print('Atropos",
    1,
)


@pytest.mark.usefixtures("soon")
async def test_run_api_that_a_user_stopped_raises_no_alarm(launch: Launch) -> None:
    async with launch(
        part("api", role=Role.API), part("train", python(AWAY_LATER), role=Role.TRAINER)
    ) as running:
        await running.until("train", "healthy")
        await running.client.command(CommandRequest(action="stop", component="api"))
        await running.until("api", "stopped")
        (running.run.root / "gone").touch()
        await asyncio.sleep(4)
        assert not diagnoses(running)
        await running.client.command(CommandRequest(action="start", component="api"))
        await wait_until(lambda: bool(diagnoses(running)))


MISMATCH = "LogProb Alignment: MISMATCH (temperature: the rollouts' logprobs fit 1.18)"


def alignment(number: int, verdict: str) -> str:
    cause = "temperature" if verdict == "mismatch" else ""
    return json.dumps(
        {
            "kind": "alignment",
            "attempt": 1,
            "rank": 0,
            "step": number,
            "time": 4e9,
            "verdict": verdict,
            "cause": cause,
            "cause_kind": cause,
        }
    )


def patient(monkeypatch: pytest.MonkeyPatch, patience_s: float) -> None:
    """Give the lines of a mismatch that much patience."""
    rules = tuple(
        replace(
            rule, patterns=tuple(replace(each, patience_s=patience_s) for each in rule.patterns)
        )
        if rule.name == "alignment_mismatch"
        else rule
        for rule in log_scanner.LOG_RULES
    )
    monkeypatch.setattr(log_scanner, "LOG_RULES", rules)


async def test_a_mismatch_in_record_and_log_is_one_alarm(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen at 4 steps a second: the record's alarm was over before the line's patience was."""
    patient(monkeypatch, 0.5)
    lines = [alignment(1, "mismatch"), *(alignment(n, "ok") for n in range(2, 8))]
    code = RECORD.replace("time.sleep", f"print({MISMATCH!r}, flush=True)\ntime.sleep")
    trainer = part("train", python(code, 600, "\n".join(lines) + "\n"), role=Role.TRAINER)
    async with launch(trainer) as running:
        await wait_until(lambda: bool(ends(running)))
        await asyncio.sleep(1.2)
        titles = ["alignment MISMATCH: temperature"]
        assert [found.title for found in diagnoses(running)] == titles
        assert [found.title for found in ends(running)] == titles


async def test_a_record_takes_the_place_of_its_line(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a long first step comes after the line's patience; a foreign trainer has
    none."""
    patient(monkeypatch, 0.1)
    async with launch(part("train", python(SAY, 600, MISMATCH), role=Role.TRAINER)) as running:
        await wait_until(lambda: bool(diagnoses(running)))
        assert diagnoses(running)[0].evidence == MISMATCH and ends(running) == []
        with running.run.telemetry_jsonl.open("a") as file:
            file.write(alignment(1, "mismatch") + "\n")
        await wait_until(lambda: bool(ends(running)))
        first, second = diagnoses(running)
        assert second.title == "alignment MISMATCH: temperature"
        (over,) = ends(running)
        assert (over.title, over.evidence) == (first.title, "the trainer's records show it")


async def test_a_line_is_over_when_its_program_works_again(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_scanner, "WORK_S", 0.3)
    async with launch(part("train", python(SAY, 600, FILES), role=Role.TRAINER)) as running:
        await wait_until(lambda: bool(diagnoses(running)))
        await asyncio.sleep(0.6)
        assert ends(running) == [], "it has made no step since"
        with running.run.telemetry_jsonl.open("a") as file:
            for number in (1, 2, 3):
                file.write(step(number))
        await wait_until(lambda: bool(ends(running)))
        assert [(found.rule, found.over) for found in ends(running)] == [("too_many_files", True)]


async def test_a_run_that_ended_well_leaves_no_open_diagnosis(launch: Launch) -> None:
    async with launch(
        part("train", python(SAY, 0.3, OOM), role=Role.TRAINER, ends_run=True)
    ) as running:
        assert await running.end() == 0
        await wait_until(lambda: bool(ends(running)))
        assert rules(running) == [("train", "out_of_memory")]
        info, state, _ = load_run(running.run.root)
        assert open_diagnoses(state, status_from_files(running.run, info, state)) == []


async def test_a_fault_of_the_watcher_is_told_once_and_the_run_goes_on(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[Any]:
        raise ValueError("a bug")

    monkeypatch.setattr(watcher.Watcher, "_work", broken)
    async with launch(part("train", python(SAY, 0.5), role=Role.TRAINER, ends_run=True)) as running:
        assert await running.end() == 0
        assert rules(running) == [("train", "watcher_fault")]
        assert "a bug" in diagnoses(running)[0].evidence


async def test_a_full_disk_is_told(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_rules, "LOW_BYTES", 10**18)
    monkeypatch.setattr(stall_rules, "NEVER_LOW_SHARE", 1.0)
    async with launch(part("x")) as running:
        await wait_until(lambda: bool(diagnoses(running)))
        assert rules(running) == [("x", "disk_low")]


async def test_quiet_children_say_nothing(launch: Launch) -> None:
    parts = [
        part(role.value, python(SAY, 600, "all is well"), role=role)
        for role in Role
        if role is not Role.PREPARE
    ]
    async with launch(*parts) as running:
        await running.until("other", "healthy")
        await asyncio.sleep(0.8)
        assert diagnoses(running) == []


async def test_what_the_supervisor_finds_has_a_name_too(launch: Launch) -> None:
    deaf = Probes(
        liveness=Probe(checks=[FileCheck(path="/no/such")], interval_s=0.02, failure_threshold=2)
    )
    async with launch(part("deaf", probes=deaf, restart=NEVER)) as running:
        assert await running.end() == 3
        assert rules(running) == [("deaf", "not_answering")]


async def test_what_cannot_be_removed_or_started_has_a_name_too(
    launch: Launch, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "a-file-now"
    messy = part(
        "messy", python(f"open({str(in_the_way)!r}, 'w')"), clears=[f"{in_the_way}/manifest"]
    )
    absent = part("absent", ["/no/such/program"], depends_on={"messy": "completed"})
    async with launch(messy, absent) as running:
        assert await running.end() == 3
        assert rules(running) == [("messy", "stale_file"), ("absent", "cannot_start")]
    assert stuck([]).rule == "unkillable"


DYING = """import signal, sys, time
def go(*_):
    for line in sys.argv[1:]:
        print(line, flush=True)
    time.sleep(0.3)
    sys.exit(1)
signal.signal(signal.SIGTERM, go)
print('up', flush=True)
time.sleep(600)"""


async def test_what_is_cried_out_on_the_way_to_a_stop_is_no_trouble(launch: Launch) -> None:
    """vLLM's API server may see its engine go first; the lines are of a clean run's end."""
    lines = (Path(__file__).parent / "logs/vllm_stopped.log").read_text().splitlines()
    assert any("EngineDeadError" in line for line in lines)
    engine = part(
        "vllm", python(DYING, *lines), role=Role.ENGINE, probes=ready(), stop=StopPolicy(grace_s=5)
    )
    async with launch(engine, part("stay")) as running:
        await running.until("vllm", "healthy")
        await running.client.command(CommandRequest(action="stop", component="vllm"))
        await running.until("vllm", "stopped")
        await asyncio.sleep(0.3)
        assert "EngineDeadError" in running.run.log("vllm", 1).read_text()
        assert diagnoses(running) == []
