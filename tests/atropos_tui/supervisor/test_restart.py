"""Crashes and restarts: policy, backoff, partners, restarts by hand, liveness."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.control import CommandRequest, Role, State
from atropos_common.protocol.records import DiagnosisRecord, ProbeRecord
from atropos_common.system.run_dir import GAVE_UP_CODE, NO_UPDATE_CODE
from atropos_tui.monitor.format import reason_of
from atropos_tui.profile.spec import HttpCheck, Probe, Probes, RestartPolicy, StopPolicy
from atropos_tui.supervisor.launchers import launcher
from atropos_tui.supervisor.restarts import next_delay
from tests.support.harness import QUICK, alive, part, pids_in, python, ready, script


@pytest.mark.launchers("direct", "remote")
async def test_backoff_then_failed_with_exit_3(launch: Any) -> None:
    crash = part(
        "crash",
        python("import time; print('boom'); time.sleep(.05); raise SystemExit(9)"),
        restart=QUICK,
    )
    async with launch(crash, part("other")) as running:
        assert await running.end() == 3
        once = ["starting", "healthy", "backoff", "pending"]
        assert running.path("crash") == once + once + ["starting", "healthy", "failed"]
        assert [row.attempt for row in running.states("crash") if row.new == "starting"] == [
            1,
            2,
            3,
        ]
        assert running.path("other") == ["starting", "healthy", "stopping", "stopped"]
        result = running.result()
        assert (result.exit_code, result.component, result.last_lines) == (3, "crash", ["boom"])
        assert "exit code 9; gave up after 2 restarts" in result.reason
        assert any(isinstance(record, DiagnosisRecord) for record in running.records)
        assert all(running.run.log("crash", attempt).exists() for attempt in (1, 2, 3))


async def test_crash_takes_its_partners_along_and_nobody_else(launch: Any, tmp_path: Path) -> None:
    engine = part(
        "engine", role=Role.ENGINE, probes=ready(), restart=QUICK, restart_with=["trainer"]
    )
    trainer = part(
        "trainer", role=Role.TRAINER, depends_on={"engine": "healthy"}, ends_run=True, restart=QUICK
    )
    async with launch(engine, part("bystander"), trainer) as running:
        first = await running.until("trainer", State.HEALTHY)
        pid = (await running.until("engine", State.HEALTHY)).pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        again = await running.until("trainer", State.HEALTHY, attempt=2)
        assert running.path("engine") == [
            "starting",
            "healthy",
            "backoff",
            "pending",
            "starting",
            "healthy",
        ]
        assert running.path("trainer")[2:] == [
            "stopping",
            "stopped",
            "pending",
            "starting",
            "healthy",
        ]
        assert running.path("bystander") == ["starting", "healthy"]
        by_state = {(row.component, row.new, row.attempt): row.seq for row in running.states()}
        assert (
            by_state["trainer", "stopped", 1]
            < by_state["engine", "starting", 2]
            < by_state["trainer", "starting", 2]
        )
        assert by_state["engine", "healthy", 2] < by_state["trainer", "starting", 2]
        assert first.pid and again.pid and not alive(first.pid)
        status = {row.name: row for row in (await running.client.status()).components}
        assert (status["engine"].restarts, status["trainer"].restarts) == (1, 0)


@pytest.mark.launchers("direct")
async def test_restart_by_hand_follows_the_recipe_and_counts_as_nothing(launch: Any) -> None:
    engine = part("engine", role=Role.ENGINE, probes=ready(), restart_with=["trainer"])
    trainer = part("trainer", role=Role.TRAINER, depends_on={"engine": "healthy"}, ends_run=True)
    async with launch(engine, trainer) as running:
        await running.until("trainer", State.HEALTHY)
        client = running.client
        for attempt in range(2, 6):  # more often than any policy would allow
            accepted = await client.command(CommandRequest(action="restart", component="engine"))
            assert accepted.recipe.stop == ["trainer", "engine"]
            await running.until("trainer", State.HEALTHY, attempt=attempt)
            mine = [row for row in running.states() if row.command_id == accepted.command_id]
            assert [(row.component, row.new) for row in mine if row.component == "trainer"] == [
                ("trainer", state)
                for state in ("stopping", "stopped", "pending", "starting", "healthy")
            ]
            assert len([row for row in mine if row.component == "engine"]) == 5
            status = await client.command_status(accepted.command_id)
            assert status.status == "done"
        assert all(row.restarts == 0 for row in (await client.status()).components)


@pytest.mark.launchers("direct")
async def test_a_restart_asked_for_by_the_trainer_leaves_the_trainer(launch: Any) -> None:
    engine = part("engine", role=Role.ENGINE, probes=ready(), restart_with=["trainer"])
    trainer = part("trainer", role=Role.TRAINER, depends_on={"engine": "healthy"}, ends_run=True)
    async with launch(engine, trainer) as running:
        await running.until("trainer", State.HEALTHY)
        request = CommandRequest(action="restart", component="engine", initiator="trainer")
        accepted = await running.client.command(request)
        assert accepted.recipe.stop == ["engine"]
        await running.until("engine", State.HEALTHY, attempt=2)
        assert running.path("trainer") == ["starting", "healthy"]


async def test_a_trainer_that_stops_cleanly_for_a_restart_does_not_end_the_run(launch: Any) -> None:
    polite = (
        "import signal,sys,time; signal.signal(15, lambda *a: sys.exit(0)); "
        "print('up',flush=True); time.sleep(600)"
    )
    async with launch(part("trainer", python(polite), probes=ready(), ends_run=True)) as running:
        await running.until("trainer", State.HEALTHY)
        await running.client.command(CommandRequest(action="restart", component="trainer"))
        await running.until("trainer", State.HEALTHY, attempt=2)
        assert running.states("trainer")[3].exit_code == 0


@pytest.mark.launchers("direct")
async def test_wrong_usage_is_not_retried(launch: Any) -> None:
    wrong = part(
        "wrong", python("print('error: no such flag --x'); raise SystemExit(2)"), restart=QUICK
    )
    async with launch(wrong) as running:
        assert await running.end() == 3
        assert running.path("wrong") == ["starting", "healthy", "failed"]
        assert "not retried" in running.result().reason
        assert "error: no such flag --x" in _diagnoses(running)[0].evidence


@pytest.mark.launchers("direct")
@pytest.mark.parametrize(
    "said",
    [
        "curl: (7) Failed to connect: Connection refused\nmake: *** [Makefile:2: all] Error 2",
        "error: timed out",
    ],
)
async def test_exit_2_without_words_of_wrong_usage_is_a_crash(said: str, launch: Any) -> None:
    """make ends with 2 whatever failed."""
    make = part("make", python(f"print({said!r}); raise SystemExit(2)"), restart=QUICK)
    async with launch(make) as running:
        assert await running.end() == 3
        assert running.path("make").count("starting") == 3


@pytest.mark.launchers("direct")
async def test_exit_2_of_what_was_healthy_is_a_crash(launch: Any) -> None:
    code = "import time; print('up',flush=True); time.sleep(1); raise SystemExit(2)"
    async with launch(part("late", python(code), probes=ready(), restart=QUICK)) as running:
        assert await running.end() == 3
        assert running.path("late").count("starting") == 3


@pytest.mark.launchers("direct")
@pytest.mark.parametrize(
    ("exit_code", "said", "rule", "title"),
    [
        (
            NO_UPDATE_CODE,
            "error: no update was made, so no final model is saved: 24 of 24 sequences were left "
            "out",
            "no_update",
            "trainer made no update, or none in its last steps",
        ),
        (
            GAVE_UP_CODE,
            "error: 30 of the last 40 sequences cannot train, more than max_left_out = 0.5",
            "gave_up",
            "trainer gave up: a restart would end the same way",
        ),
    ],
)
async def test_a_final_exit_code_is_not_retried_whenever_it_comes(
    launch: Any, exit_code: int, said: str, rule: str, title: str
) -> None:
    """A trainer that made no update would make none again; it was healthy for long, and has its own
    words."""
    code = (
        f"import sys, time; print('up', flush=True); time.sleep(1); sys.exit(print('{said}', "
        f"flush=True) or {exit_code})"
    )
    trainer = part(
        "trainer",
        python(code),
        probes=ready(),
        restart=QUICK,
        final_codes=[NO_UPDATE_CODE, GAVE_UP_CODE],
        role=Role.TRAINER,
    )
    async with launch(trainer) as running:
        assert await running.end() == 3
        assert running.path("trainer").count("starting") == 1
        found = [record for record in running.records if isinstance(record, DiagnosisRecord)]
        assert [(record.rule, record.evidence) for record in found] == [(rule, said)]
        assert title in found[0].title


@pytest.mark.launchers("direct")
async def test_liveness_failure_restarts_what_answers_no_more(launch: Any, free_port: int) -> None:
    health = HttpCheck(url=f"http://127.0.0.1:{free_port}/health")
    probes = Probes(
        startup=Probe(checks=[health], interval_s=0.02),
        liveness=Probe(checks=[health], interval_s=0.05, timeout_s=0.3, failure_threshold=2),
    )
    policy = RestartPolicy(backoff_s=0.02, max_restarts=1)
    hangs = part(
        "hangs",
        script("server", free_port, 0.1, 0.3),
        port=free_port,
        probes=probes,
        restart=policy,
    )
    async with launch(hangs) as running:
        assert await running.end() == 3
        assert running.path("hangs")[:5] == [
            "starting",
            "healthy",
            "unhealthy",
            "stopping",
            "backoff",
        ]
        assert "liveness failed: no answer within 0.3 s" in running.states("hangs")[2].reason
        failed = [
            record
            for record in running.records
            if isinstance(record, ProbeRecord) and not record.ok
        ]
        assert [record.probe for record in failed] == ["liveness", "liveness"]


async def test_readiness_lost_is_unhealthy_and_comes_back(
    launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atropos_tui.profile.spec import FileCheck

    monkeypatch.setattr("atropos_tui.supervisor.probe.RECHECK_S", 0.02)
    flag = tmp_path / "flag"
    flag.touch()
    async with launch(
        part("wavers", probes=ready(FileCheck(path=str(flag)), failure_threshold=2))
    ) as running:
        await running.until("wavers", State.HEALTHY)
        flag.unlink()
        await running.until("wavers", State.UNHEALTHY)
        flag.touch()
        while running.path("wavers") != ["starting", "healthy", "unhealthy", "healthy"]:
            await asyncio.sleep(0.01)
        assert running.states("wavers")[0].pid == running.states("wavers")[-1].pid


@pytest.mark.launchers("direct", "remote")
async def test_kill_counts_as_a_crash_and_takes_the_whole_set(launch: Any, tmp_path: Path) -> None:
    pidfile = tmp_path / "pids"
    async with launch(part("deaf", script("stubborn", pidfile), restart=QUICK)) as running:
        await running.until("deaf", State.HEALTHY)
        pids = await pids_in(pidfile)
        accepted = await running.client.command(CommandRequest(action="kill", component="deaf"))
        assert accepted.recipe.stop == ["deaf"]
        back = await running.until("deaf", State.BACKOFF)
        assert not any(map(alive, pids))
        assert back.exit_code == -9
        await running.until("deaf", State.HEALTHY, attempt=2)
        row = (await running.client.status()).components[0]
        assert row.restarts == 1
        moves = [(move.new, move.command_id) for move in running.states("deaf")]
        assert ("backoff", accepted.command_id) in moves, "records tell a kill by hand from a crash"
        assert moves[-2:] == [("starting", None), ("healthy", None)], (
            "what follows is the supervisor's own"
        )


@pytest.mark.launchers("direct", "remote")
async def test_clears_before_start_and_after_stop(launch: Any, tmp_path: Path) -> None:
    stale = tmp_path / "manifest.json"
    stale.write_text("of an earlier server")
    code = (
        "import pathlib,sys,time; p=pathlib.Path(sys.argv[1]); print('stale' if p.exists() "
        "else 'clean')\n"
        "p.write_text('mine'); print('up',flush=True); time.sleep(600)"
    )
    async with launch(
        part("engine", python(code, stale), clears=[str(stale)], probes=ready())
    ) as running:
        await running.until("engine", State.HEALTHY)
        assert running.logs("engine") == ["clean", "up"]
        assert stale.read_text() == "mine"
        await running.client.command(CommandRequest(action="stop", component="engine"))
        await running.until("engine", State.STOPPED)
        assert not stale.exists()


@pytest.mark.launchers("direct")
async def test_temporary_files_are_private_and_go_with_their_attempt(launch: Any) -> None:
    """vLLM leaves three sockets in the temporary folder at each start, for everybody where the
    umask lets them in."""
    code = (
        "import socket,tempfile,time; tmp = tempfile.gettempdir(); s = "
        "socket.socket(socket.AF_UNIX)\n"
        "s.bind(tmp + '/' + 36 * 'x'); open(tmp + '/file', 'w'); print(tmp); print('up', "
        "flush=True); time.sleep(600)"
    )
    before = os.umask(0)
    try:
        async with launch(
            part("engine", python(code), scratch=True, probes=ready(), restart=QUICK)
        ) as running:
            await running.until("engine", State.HEALTHY)
            first = Path(running.logs("engine")[0])
            modes = {
                path.name[0]: path.stat().st_mode & 0o777 for path in [first, *first.iterdir()]
            }
            assert modes == {first.name[0]: 0o700, "x": 0o700, "f": 0o600}
            await running.client.command(CommandRequest(action="kill", component="engine"))
            await running.until("engine", State.HEALTHY, attempt=2)
            second = Path(running.logs("engine")[0])
            assert second.is_dir() and second != first and not first.exists()
            await running.client.command(CommandRequest(action="stop", component="engine"))
            await running.until("engine", State.STOPPED)
            assert not second.exists()
    finally:
        os.umask(before)


@pytest.mark.launchers("direct")
async def test_stop_during_backoff_and_start_during_backoff(launch: Any) -> None:
    slow = RestartPolicy(backoff_s=60, max_restarts=5)
    async with launch(
        part("crash", python("raise SystemExit(1)"), restart=slow), part("other")
    ) as running:
        await running.until("crash", State.BACKOFF)
        client = await running.answers()
        await client.command(CommandRequest(action="start", component="crash"))
        await running.until("crash", State.STARTING, attempt=2)
        while running.path("crash")[-1] != "backoff":
            await asyncio.sleep(0.01)
        await client.command(CommandRequest(action="stop", component="crash"))
        await running.until("crash", State.STOPPED)
        assert not running.task.done()


@pytest.mark.launchers("direct")
async def test_stop_by_hand_keeps_the_run_and_the_component_down(launch: Any) -> None:
    always = RestartPolicy(policy="always", backoff_s=0.01)
    async with launch(part("one", restart=always), part("two")) as running:
        await running.until("one", State.HEALTHY)
        client = await running.answers()
        await client.command(CommandRequest(action="stop", component="one"))
        await running.until("one", State.STOPPED)
        await asyncio.sleep(0.2)
        assert running.path("one")[-1] == "stopped"
        assert not running.task.done()
        await client.command(CommandRequest(action="start", component="one"))
        await running.until("one", State.HEALTHY, attempt=2)


@pytest.mark.launchers("direct", "remote")
async def test_stop_signal_of_the_spec_is_the_one_sent(launch: Any) -> None:
    code = (
        "import signal,sys,time; signal.signal(signal.SIGINT, lambda *a: sys.exit(42))\n"
        "print('up',flush=True); time.sleep(600)"
    )
    picky = part("picky", python(code), probes=ready(), stop=StopPolicy(signal="INT", grace_s=5))
    async with launch(picky) as running:
        await running.until("picky", State.HEALTHY)
        await running.client.command(CommandRequest(action="stop", component="picky"))
        assert (await running.until("picky", State.STOPPED)).exit_code == 42


async def test_run_api_takes_its_environments_first_and_leaves_the_trainer(launch: Any) -> None:
    """An environment says goodbye while run-api still listens, and comes back to the new one."""
    api = part("api", role=Role.API, probes=ready(), restart_with=["env-a", "env-b"])
    gated = {"role": Role.ENV, "depends_on": {"api": "healthy"}, "probes": ready()}
    trainer = part("trainer", role=Role.TRAINER, depends_on={"api": "healthy"}, ends_run=True)
    async with launch(api, part("env-a", **gated), part("env-b", **gated), trainer) as run:
        await run.until("env-a", State.HEALTHY)
        await run.until("env-b", State.HEALTHY)
        first = (await run.until("trainer", State.HEALTHY)).pid
        accepted = await run.client.command(CommandRequest(action="restart", component="api"))
        assert accepted.recipe.stop == ["env-b", "env-a", "api"]
        assert accepted.recipe.start == ["api", "env-a", "env-b"]
        await run.until("env-a", State.HEALTHY, attempt=2)
        await run.until("env-b", State.HEALTHY, attempt=2)
        at = {(row.component, row.new, row.attempt): row.seq for row in run.states()}
        assert max(at["env-a", "stopped", 1], at["env-b", "stopped", 1]) < at["api", "stopping", 1]
        assert at["api", "healthy", 2] < min(at["env-a", "starting", 2], at["env-b", "starting", 2])
        rows = {row.name: row for row in (await run.client.status()).components}
        assert (rows["trainer"].pid, rows["trainer"].attempt) == (first, 1)
        assert [rows[name].restarts for name in ("api", "env-a", "env-b")] == [0, 0, 0]


@pytest.mark.launchers("direct")
async def test_stop_of_run_api_takes_its_environments_and_start_brings_those_back(
    launch: Any,
) -> None:
    """Environments that were stopped before stay so; the dry run tells each time what then
    happens."""
    api = part("api", role=Role.API, probes=ready(), restart=QUICK, restart_with=["env-a", "env-b"])
    gated = {
        "role": Role.ENV,
        "depends_on": {"api": "healthy"},
        "probes": ready(),
        "restart": QUICK,
    }
    async with launch(api, part("env-a", **gated), part("env-b", **gated), part("other")) as run:
        await run.until("env-a", State.HEALTHY)
        await run.until("env-b", State.HEALTHY)
        await run.client.command(CommandRequest(action="stop", component="env-b"))
        await run.until("env-b", State.STOPPED)
        assert (await run.client.recipe("stop", "api")).stop == ["env-a", "api"]
        await run.client.command(CommandRequest(action="stop", component="api"))
        await run.until("api", State.STOPPED)
        at = {(row.component, row.new, row.attempt): row.seq for row in run.states()}
        assert at["env-a", "stopped", 1] < at["api", "stopping", 1]
        assert run.states("env-a")[-1].reason == "stopped by hand with api"
        assert (await run.client.recipe("start", "api")).start == ["api", "env-a"]
        await run.client.command(CommandRequest(action="start", component="api"))
        await run.until("env-a", State.HEALTHY, attempt=2)
        rows = {row.name: row for row in (await run.client.status()).components}
        assert (rows["env-b"].state, rows["env-b"].attempt) == (State.STOPPED, 1)
        assert [row.restarts for row in rows.values()] == [0, 0, 0, 0]


async def test_a_stop_in_backoff_takes_along_what_the_crash_has_stopped(launch: Any) -> None:
    api = part(
        "api",
        role=Role.API,
        probes=ready(),
        restart=RestartPolicy(backoff_s=30),
        restart_with=["env"],
    )
    env = part("env", role=Role.ENV, depends_on={"api": "healthy"}, probes=ready())
    async with launch(api, env) as running:
        await running.until("env", State.HEALTHY)
        assert (await running.client.recipe("kill", "api")).stop == ["api", "env"]
        await running.client.command(CommandRequest(action="kill", component="api"))
        await running.until("env", State.STOPPED)
        await running.client.command(CommandRequest(action="stop", component="api"))
        await running.until("api", State.STOPPED)
        await asyncio.sleep(0.1)
        assert running.path("env")[-1] == "stopped", (
            "it does not wait for a run-api that nobody will start"
        )
        await running.client.command(CommandRequest(action="start", component="api"))
        await running.until("env", State.HEALTHY, attempt=2)


async def test_the_dry_run_of_a_kill_tells_what_follows(launch: Any) -> None:
    engine = part(
        "engine", role=Role.ENGINE, probes=ready(), restart=QUICK, restart_with=["trainer"]
    )
    trainer = part("trainer", role=Role.TRAINER, depends_on={"engine": "healthy"}, ends_run=True)
    async with launch(engine, trainer) as running:
        await running.until("trainer", State.HEALTHY)
        told = await running.client.recipe("kill", "engine")
        await running.client.command(CommandRequest(action="kill", component="engine"))
        await running.until("trainer", State.HEALTHY, attempt=2)
        began = [
            row.component for row in running.states() if row.new == "starting" and row.attempt == 2
        ]
        ended = {row.component for row in running.states() if row.new in ("backoff", "stopped")}
        assert (set(told.stop), told.start) == (ended, began)
        final = await running.client.recipe("kill", "trainer")
        assert (final.stop, final.start) == (["trainer", "engine"], [])
        await running.client.command(CommandRequest(action="kill", component="trainer"))
        assert await running.end() == 3


@pytest.mark.launchers("direct")
async def test_a_crashed_run_api_takes_its_environments_before_it_comes_back(launch: Any) -> None:
    api = part("api", role=Role.API, probes=ready(), restart=QUICK, restart_with=["env"])
    env = part("env", role=Role.ENV, depends_on={"api": "healthy"}, probes=ready())
    async with launch(api, env) as running:
        await running.until("env", State.HEALTHY)
        pid = (await running.until("api", State.HEALTHY)).pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        await running.until("env", State.HEALTHY, attempt=2)
        at = {(row.component, row.new, row.attempt): row.seq for row in running.states()}
        assert (
            at["env", "stopped", 1]
            < at["api", "starting", 2]
            < at["api", "healthy", 2]
            < at["env", "starting", 2]
        )
        assert running.states("env")[3].reason == "stopped because api crashed"


async def test_the_backoff_begins_anew_after_health(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crashes close together wait longer and longer; one after a time of health waits as little as
    the first."""
    monkeypatch.setattr("atropos_tui.supervisor.restarts.HEALTHY_RESET_S", 0.4)
    monkeypatch.setattr("atropos_tui.supervisor.restarts.random.uniform", lambda low, high: 1.0)
    lives = (
        "import os,time; print('up',flush=True)\n"
        "time.sleep(.7 if os.environ['ATROPOS_ATTEMPT'] == '3' else .05); os._exit(1)"
    )
    policy = RestartPolicy(backoff_s=0.1, max_backoff_s=10, max_restarts=3)
    async with launch(part("crash", python(lives), probes=ready(), restart=policy)) as running:
        assert await running.end() == 3
        said = [reason_of(row) for row in running.states("crash") if row.new == "backoff"]
        assert said == [f"exit code 1; again in {delay} s" for delay in ("0.1", "0.2", "0.1")]
        assert "gave up after 3 restarts" in running.result().reason, (
            "the window is not reset by health"
        )


@pytest.mark.launchers("direct")
async def test_restarts_by_hand_do_not_use_up_the_crashes(launch: Any) -> None:
    policy = RestartPolicy(backoff_s=0.02, max_restarts=1)
    async with launch(part("one", probes=ready(), restart=policy)) as running:
        for attempt in range(2, 6):
            await running.until("one", State.HEALTHY, attempt=attempt - 1)
            await running.client.command(CommandRequest(action="restart", component="one"))
        pid = (await running.until("one", State.HEALTHY, attempt=5)).pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        await running.until("one", State.HEALTHY, attempt=6)
        row = (await running.client.status()).components[0]
        assert (row.restarts, row.crashes) == (1, 1)


async def test_a_backoff_tells_when_the_next_try_comes(launch: Any) -> None:
    policy = RestartPolicy(backoff_s=60, max_restarts=5)
    async with launch(
        part("crash", python("raise SystemExit(1)"), restart=policy), part("other")
    ) as running:
        began = (await running.until("crash", State.BACKOFF)).time
        row = (await (await running.answers()).status()).components[0]
        assert row.retry_at is not None
        assert 24 <= row.retry_at - began <= 36  # max_backoff_s and its jitter
        assert row.crashes == 1
        await running.client.command(CommandRequest(action="start", component="crash"))
        await running.until("crash", State.STARTING, attempt=2)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("", "stopped by hand"),
        ("signal.signal(15, lambda *_: sys.exit(0))", "stopped by hand"),
        ("signal.signal(15, lambda *_: sys.exit(143))", "stopped by hand"),
        ("signal.signal(15, lambda *_: sys.exit(7))", "stopped by hand; exit code 7"),
        ("signal.signal(15, signal.SIG_IGN)", "stopped by hand; 1 killed after the grace period"),
    ],
)
@pytest.mark.launchers("direct")
async def test_a_stop_that_was_asked_for_reads_like_one(launch: Any, code: str, said: str) -> None:
    command = python(f"import signal,sys,time\n{code}\nprint('up', flush=True); time.sleep(600)")
    async with launch(part("one", command, probes=ready()), part("two")) as running:
        await running.until("one", State.HEALTHY)
        await running.client.command(CommandRequest(action="stop", component="one"))
        assert (await running.until("one", State.STOPPED)).reason == said
        await running.client.command(CommandRequest(action="down"))
        assert await running.end() == 130
        assert running.states("two")[-1].reason == "stopped with the stack"


def test_delays_double_with_jitter_up_to_the_cap_and_the_window_forgets() -> None:
    policy = RestartPolicy(backoff_s=1, max_backoff_s=8, max_restarts=3, window_s=100)
    for streak, expected in enumerate([1, 2, 4, 8, 8]):
        delays = {next_delay(policy, deque(), streak, now=0.0) for _ in range(50)}
        assert len(delays) > 1
        assert all(
            delay is not None and 0.8 * expected <= delay <= 1.2 * expected for delay in delays
        )
    crashes: deque[float] = deque()
    assert [next_delay(policy, crashes, 0, now) is None for now in (0.0, 1.0, 2.0, 3.0)] == [
        False,
        False,
        False,
        True,
    ]
    assert next_delay(policy, crashes, 0, now=500.0) is not None
    assert next_delay(RestartPolicy(policy="never"), deque(), 0, 0.0) is None


def _diagnoses(running: Any) -> list[DiagnosisRecord]:
    return [record for record in running.records if isinstance(record, DiagnosisRecord)]


async def test_memory_is_shown_after_the_clock_was_set_back(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with launch(part("a")) as run:
        await run.until("a", State.HEALTHY)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() - 86400)
        await asyncio.sleep(launcher.MAX_AGE_S)
        (row,) = (await run.client.status()).components
        assert row.memory_bytes and row.pid in row.pids
