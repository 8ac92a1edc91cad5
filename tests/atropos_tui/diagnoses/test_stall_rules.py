"""Rules about waiting, on made-up states and against a real run-api."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from atropos_common.protocol.control import Role, State
from atropos_common.protocol.trainer_records import StepRecord
from atropos_tui.diagnoses.stall_rules import (
    ApiView,
    Part,
    RunSnapshot,
    disk_low,
    ended_early,
    no_batches,
    slow_start,
    stalled_s,
    starting_roles,
)
from atropos_tui.diagnoses.watcher import Watcher, ask_api
from atropos_tui.profile.spec import ComponentSpec, StackSpec
from tests.atropos_common.protocol.test_contracts import FIELDS

BEGAN = 1e9


def part(role: Role, state: State = State.HEALTHY, **fields: Any) -> Part:
    return Part(f"the-{role.value}", role, state, BEGAN, **fields)


PARTS = tuple(part(role) for role in (Role.API, Role.ENV, Role.ENGINE, Role.TRAINER))
STILL = RunSnapshot(BEGAN + 400, PARTS, step=7, step_at=BEGAN + 100, api=ApiView(128, 3, 8, 7))
"""All is healthy, and nothing has been trained for five minutes."""


def but(role: Role, state: State) -> tuple[Part, ...]:
    return tuple(part(role, state) if old.role is role else old for old in PARTS)


def test_an_environment_that_left_is_told_at_once_while_the_trainer_has_steps_to_do() -> None:
    left = replace(
        part(Role.ENV, State.COMPLETED),
        since=BEGAN + 6,
        started_at=BEGAN,
        last_line="no data, see README",
    )
    alone = replace(
        STILL,
        now=BEGAN + 7,
        parts=(*but(Role.ENV, State.COMPLETED)[:1], left, *PARTS[2:]),
        last_step=9,
    )
    found = ended_early(alone)[left.name]
    assert found is not None and found.rule == "environment_ended" and left.name in found.title
    assert (
        "exited with 0 after 6 s; its last line: no data, see README; no environment is left"
        in found.evidence
    )
    beside = ended_early(replace(alone, parts=(*alone.parts, replace(PARTS[1], name="other"))))[
        left.name
    ]
    assert beside is not None and "the run goes on with other" in beside.evidence
    assert not ended_early(replace(alone, step=9)), "the trainer has done its steps"
    done = tuple(
        replace(each, state=State.COMPLETED) if each.role is Role.TRAINER else each
        for each in alone.parts
    )
    assert not ended_early(replace(alone, parts=done))
    assert not ended_early(replace(alone, parts=but(Role.ENV, State.STOPPED))), (
        "somebody stopped it"
    )


CAUSES = [
    (
        replace(STILL, api=ApiView(problem="http://127.0.0.1:8000: refused")),
        "run-api does not answer",
        "refused",
    ),
    (replace(STILL, api=ApiView(-1)), "no trainer is registered", "batch_size -1"),
    (
        replace(STILL, api=ApiView(12, 5, 8)),
        "do not fit",
        "groups of 8 never add up to a batch of 12 (5 groups wait)",
    ),
    (
        replace(STILL, api=ApiView(32, 4, 8)),
        "the trainer hangs",
        "holds 4 groups of 8, a batch is 32",
    ),
    (replace(STILL, parts=but(Role.ENV, State.FAILED)), "no environment runs", "the-env is failed"),
    (
        replace(STILL, parts=but(Role.ENGINE, State.UNHEALTHY)),
        "engine is not healthy",
        "the-engine is unhealthy",
    ),
    (
        replace(STILL, counts={"timed-out rollouts": 2}),
        "cancelled before they are done",
        "2 workers timed out",
    ),
    (replace(STILL, ghosts=1), "an environment that is gone", "1 more registrations"),
    (STILL, "rollouts are slow", "3 groups wait"),
    (replace(STILL, api=None), "rollouts are slow", "is unknown"),
]


@pytest.mark.parametrize(("scene", "title", "evidence"), CAUSES, ids=[case[1] for case in CAUSES])
def test_the_cause_that_fits_is_named(scene: RunSnapshot, title: str, evidence: str) -> None:
    found = no_batches(scene)
    assert found is not None and found.rule == "no_batches"
    assert found.title.startswith("no batches: ") and title in found.title
    assert (
        found.evidence.startswith("no optimizer step for 300 s after step 7; ")
        and evidence in found.evidence
    )
    assert "{" not in found.fix and found.fix


@pytest.mark.parametrize(
    "scene",
    [
        replace(STILL, now=BEGAN + 250),
        replace(
            STILL, pace_s=31.0
        ),  # steps of half a minute: five minutes are less than ten of them
        replace(STILL, parts=but(Role.ENGINE, State.STARTING)),
        replace(STILL, parts=but(Role.API, State.BACKOFF)),
        replace(STILL, parts=but(Role.TRAINER, State.STARTING)),
        replace(STILL, parts=but(Role.TRAINER, State.COMPLETED)),
        replace(STILL, parts=PARTS[:3]),
        replace(STILL, parts=tuple(replace(old, since=BEGAN + 300) for old in PARTS)),
    ],
)
def test_no_stall(scene: RunSnapshot) -> None:
    assert stalled_s(scene) is None
    assert no_batches(scene) is None


def test_a_trainer_that_saves_the_model_after_its_last_step_does_not_hang() -> None:
    assert stalled_s(STILL) == 300
    assert no_batches(replace(STILL, last_step=7)) is None


def test_who_is_starting() -> None:
    assert starting_roles(STILL) == frozenset()
    assert starting_roles(replace(STILL, parts=but(Role.ENGINE, State.STARTING))) == {Role.ENGINE}


@pytest.mark.parametrize(
    ("role", "timeout_s", "after", "slow"),
    [
        (Role.ENGINE, 1800.0, 440, False),
        (Role.ENGINE, 1800.0, 460, True),
        (Role.API, 600.0, 151, True),
        (Role.API, 60.0, 21, True),
        (Role.API, 60.0, 19, False),
        (Role.TRAINER, 100.0, 81, True),
        (Role.OTHER, 600.0, 149, False),
    ],
)
def test_a_slow_start(role: Role, timeout_s: float, after: float, slow: bool) -> None:
    waiting = part(
        role,
        State.STARTING,
        start_timeout_s=timeout_s,
        gated=True,
        waiting_for="GET /x",
        last_line="42 %",
    )
    found = slow_start(waiting, BEGAN + after)
    assert (found is not None) is slow
    if found:
        assert found.rule == "slow_start"
        for word in (f"{after:.0f} s", f"{timeout_s:g} s", "waits for: GET /x", "last line: 42 %"):
            assert word in found.evidence
    assert slow_start(replace(waiting, gated=False), BEGAN + after) is None
    assert slow_start(replace(waiting, state=State.HEALTHY), BEGAN + after) is None


def test_a_disk_that_fills_up() -> None:
    found = disk_low(replace(STILL, free_bytes=100_000_000, disk_bytes=10**12))
    assert found is not None and found.rule == "disk_low" and "100 MB" in found.evidence
    assert disk_low(replace(STILL, free_bytes=300_000_000, disk_bytes=10**12)) is None
    assert disk_low(replace(STILL, free_bytes=40_000_000, disk_bytes=64_000_000)) is None, (
        "a small one, half empty"
    )
    assert disk_low(STILL) is None


@pytest.fixture(scope="module")
def run_api() -> Iterator[str]:
    """A real run-api, as a stack starts it."""
    from atropos_tui.profile.ports import free_port

    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "atropos_api", "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        give_up = time.monotonic() + 60
        while ask_api(url).problem:
            assert time.monotonic() < give_up
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def test_a_real_run_api_is_asked(run_api: str) -> None:
    """From nobody registered to groups of 8 that never fill a batch of 12."""
    assert ask_api(run_api) == ApiView(-1, 0, 0, 0)
    registration = {
        "wandb_group": "",
        "wandb_project": "",
        "batch_size": 12,
        "max_token_len": 64,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 1,
        "starting_step": 5,
        "num_steps": 10,
    }
    group = {"tokens": [[1, 2]] * 8, "masks": [[-100, 2]] * 8, "scores": [1.0, 0.0] * 4}
    with httpx.Client(base_url=run_api, trust_env=False) as http:
        assert http.post("/register", json=registration).status_code == 200
        assert ask_api(run_api) == ApiView(12, 0, 0, 5)
        for _ in range(3):
            assert http.post("/scored_data", json=group).status_code == 200
        assert http.get("/batch").json()["batch"] is None
    view = ask_api(run_api)
    assert view == ApiView(12, 3, 8, 5)
    found = no_batches(replace(STILL, api=view))
    assert found is not None and "groups of 8 never add up to a batch of 12" in found.evidence
    spoilt = json.dumps({**group, "scores": [float("nan"), 0.0] * 4})
    with httpx.Client(
        base_url=run_api, trust_env=False, headers={"Content-Type": "application/json"}
    ) as http:
        assert http.post("/scored_data", content=spoilt).status_code == 200
        assert http.get("/latest_example").status_code == 500
    assert ask_api(run_api) == ApiView(12, 4, 0, 5), (
        "a group that run-api cannot send spoils no other answer"
    )


class Seen:
    """A component that prints nothing."""

    def __init__(self, found: Part) -> None:
        self.part = found
        self.reached: list[tuple[str, int]] = []

    def observe(self) -> tuple[Part, None]:
        return self.part, None

    def reach(self, stage: str, attempt: int) -> None:
        self.reached.append((stage, attempt))


def test_a_stall_is_seen_although_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is set back by an hour, a minute after the last step: the stall is seen at once."""
    told: list[str] = []
    monkeypatch.setattr(
        Seen, "diagnose", lambda _, found, attempt: told.append(found.title), raising=False
    )
    specs = [ComponentSpec(name=part.name, role=part.role, command=["x"]) for part in PARTS]
    stack = StackSpec(run_id="r", name="r", mode="none", run_dir=str(tmp_path), components=specs)
    watcher = Watcher(stack, {part.name: Seen(part) for part in PARTS})  # type: ignore[arg-type]
    for after, expected in ((60.0, 0), (61.0 - 3600, 0), (200.0 - 3600, 0), (300.0 - 3600, 1)):
        monkeypatch.setattr(
            "atropos_tui.diagnoses.watcher.time.time", lambda after=after: BEGAN + after
        )
        asyncio.run(watcher.look())
        assert len([title for title in told if title.startswith("no batches")]) == expected, (
            after,
            told,
        )


@pytest.mark.parametrize("jump_s", [7200.0, -86400.0])
def test_a_clock_that_jumps_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        Seen, "diagnose", lambda _, found, attempt: told.append(found.title), raising=False
    )
    specs = [ComponentSpec(name=part.name, role=part.role, command=["x"]) for part in PARTS]
    stack = StackSpec(run_id="r", name="r", mode="none", run_dir=str(tmp_path), components=specs)
    watcher = Watcher(stack, {part.name: Seen(part) for part in PARTS})  # type: ignore[arg-type]
    for after, jumped in ((1.0, 0.0), (2.0, jump_s), (200.0, jump_s)):
        clocks = SimpleNamespace(
            time=lambda at=BEGAN + after + jumped: at, monotonic=lambda at=after: at
        )
        monkeypatch.setattr("atropos_tui.diagnoses.watcher.time", clocks)
        if after == 1.0:
            step = StepRecord(**FIELDS["step"], step=1, time=BEGAN + after)
            (tmp_path / "telemetry.jsonl").write_text(step.to_line())
        asyncio.run(watcher.look())
        stalls = [title for title in told if title.startswith("no batches")]
        assert bool(stalls) is (after == 200.0), after


def test_an_environment_of_ones_own_is_registered_when_run_api_says_so(
    run_api: str, tmp_path: Path
) -> None:
    """A program started by `command` need not print what ours do; a registration of an earlier life
    is none."""
    registration = {
        "max_token_length": 8,
        "desired_name": "mine",
        "weight": 1.0,
        "group_size": 4,
        "min_batch_allocation": None,
    }
    commands = {"api": ["x"], "own": ["x", "--name", "mine"], "other": ["x", "--name", "theirs"]}
    roles = {"api": Role.API, "own": Role.ENV, "other": Role.ENV}
    specs = [
        ComponentSpec(
            name=name, role=roles[name], command=command, port=int(run_api.rpartition(":")[2])
        )
        for name, command in commands.items()
    ]
    stack = StackSpec(run_id="r", name="r", mode="none", run_dir=str(tmp_path), components=specs)

    def looked(started_at: float) -> dict[str, list[tuple[str, int]]]:
        seen = {
            name: Seen(
                Part(name, roles[name], State.HEALTHY, BEGAN, attempt=3, started_at=started_at)
            )
            for name in commands
        }
        asyncio.run(Watcher(stack, seen).look())  # type: ignore[arg-type]
        return {name: each.reached for name, each in seen.items()}

    with httpx.Client(base_url=run_api, trust_env=False) as http:
        http.get("/batch")
        before = time.time()
        assert looked(before) == {"api": [], "own": [], "other": []}
        answer = http.post("/register-env", json=registration).json()
        assert answer["status"] == "success"
        assert looked(before) == {"api": [], "own": [("registered", 3)], "other": []}
        assert looked(time.time())["own"] == [], "its earlier life was"
        http.post("/disconnect-env", json={"env_id": answer["env_id"]})
        assert looked(before)["own"] == []


def test_a_run_api_that_is_away_or_something_else(free_port: int) -> None:
    view = ask_api(f"http://127.0.0.1:{free_port}")
    assert "refused" in view.problem and str(free_port) in view.problem
