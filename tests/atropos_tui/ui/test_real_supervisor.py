"""The screen against a real supervisor with small children: its display and its keys."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil

from atropos_common.protocol.control import Phase, Role, State
from atropos_tui.profile.spec import StopPolicy
from atropos_tui.supervisor.client import ControlClient
from atropos_tui.ui.widgets.log_view import LogView
from tests.atropos_tui.ui.conftest import CHILD, Supervise, child, cockpit, lines_of, small_stack

HEALTHY = ("run-api", "vllm", "trainer")


async def test_the_table_shows_what_the_supervisor_knows(
    tmp_path: Path, supervise: Supervise
) -> None:
    run = supervise(small_stack(tmp_path / "run"))
    async with cockpit(run) as screen:
        await screen.until(lambda: all(screen.row(name).state is State.HEALTHY for name in HEALTHY))
        await screen.shows("● running")
        known = {row.name: row for row in (await ControlClient(run.root).status()).components}
        text = screen.text()
        for name in HEALTHY:
            line = next(
                line for line in text.splitlines() if f" {name} " in line and "● healthy" in line
            )
            assert f" {known[name].pid} " in line
        await screen.until(lambda: (screen.row("vllm").memory_bytes or 0) > 1e6)


async def test_restart_asks_then_takes_along_what_must_go_and_tells_when_done(
    tmp_path: Path, supervise: Supervise
) -> None:
    run = supervise(small_stack(tmp_path / "run"))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("trainer").state is State.HEALTHY)
        before = {name: screen.row(name).pid for name in HEALTHY}
        await screen.select("vllm")
        await screen.press("r")
        await screen.shows("Restart vllm?")
        await screen.shows("trainer → vllm")
        await screen.shows("vllm → trainer")
        await screen.press("enter")
        await screen.until(lambda: any("restart vllm: done" in toast for toast in screen.toasts()))
        await screen.until(
            lambda: (
                screen.row("trainer").state is State.HEALTHY and screen.row("trainer").attempt == 2
            )
        )
        assert screen.row("vllm").pid not in (None, before["vllm"])
        assert screen.row("run-api").pid == before["run-api"]
        await screen.until(lambda: "◔ restart" not in screen.text())


async def test_escape_and_cancel_send_nothing(tmp_path: Path, supervise: Supervise) -> None:
    run = supervise(small_stack(tmp_path / "run"))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("trainer").state is State.HEALTHY)
        for keys in (("escape",), ("enter",), ("right", "right", "enter")):
            await screen.press("K")
            await screen.shows("Kill trainer?")
            await screen.press(*keys)
            await screen.until(lambda: "Kill trainer?" not in screen.text())
        await asyncio.sleep(0.3)
        assert "command" not in {
            json.loads(line)["kind"] for line in run.supervisor_jsonl.read_text().splitlines()
        }


async def test_kill_is_confirmed_and_seen(tmp_path: Path, supervise: Supervise) -> None:
    run = supervise(small_stack(tmp_path / "run"))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("trainer").state is State.HEALTHY)
        victim = psutil.Process(screen.row("trainer").pid)
        await screen.select("trainer")
        await screen.press("K", "left", "enter")
        await screen.until(
            lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
        )
        await screen.until(
            lambda: (
                screen.row("trainer").pid not in (None, victim.pid)
                or screen.row("trainer").state is not State.HEALTHY
            )
        )


async def test_stop_and_start_are_one_key(tmp_path: Path, supervise: Supervise) -> None:
    run = supervise(small_stack(tmp_path / "run"))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("trainer").state is State.HEALTHY)
        await screen.select("trainer")
        await screen.press("s", "y")
        await screen.until(lambda: screen.row("trainer").state is State.STOPPED)
        await screen.shows("■ stopped")
        await screen.press("s")
        await screen.until(lambda: screen.row("trainer").state is State.HEALTHY)


async def test_what_waits_to_be_started_is_stopped_by_the_same_key(
    tmp_path: Path, supervise: Supervise
) -> None:
    late = child("late", Role.OTHER, "import time; time.sleep(600)")
    waits = child("waits", Role.OTHER, depends_on={"late": "healthy"})
    run = supervise(small_stack(tmp_path / "run", late, waits))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("late").state is State.STARTING)
        await screen.select("waits")
        assert screen.row("waits").state is State.PENDING
        offered = {command.title for command in screen.app.get_system_commands(screen.app.screen)}
        assert {"Stop waits", "Restart waits"} <= offered
        assert not {"Start waits", "Kill waits"} & offered
        await screen.press("s")
        await screen.shows("Stop waits?")
        await screen.press("y")
        await screen.until(lambda: screen.row("waits").state is State.STOPPED)
        assert not any("refused" in toast for toast in screen.toasts())


async def test_a_death_from_outside_is_seen_within_two_seconds(
    tmp_path: Path, supervise: Supervise
) -> None:
    run = supervise(small_stack(tmp_path / "run"))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("run-api").state is State.HEALTHY)
        pid = screen.row("run-api").pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        # Its restart or its cause, whichever comes first.
        await screen.until(
            lambda: screen.row("run-api").restarts == 1 or "killed by SIGKILL" in screen.text(),
            timeout_s=2.0,
        )
        await screen.until(
            lambda: (
                screen.row("run-api").restarts == 1 and screen.row("run-api").state is State.HEALTHY
            )
        )


async def test_a_refused_command_says_why(tmp_path: Path, supervise: Supervise) -> None:
    slow = child(
        "slow",
        Role.OTHER,
        "import signal, time\nsignal.signal(15, lambda *_: "
        "time.sleep(60))\nprint('ready')\ntime.sleep(60)",
        stop=StopPolicy(grace_s=12.0),  # time enough for the keys on a busy machine
    )
    run = supervise(small_stack(tmp_path / "run", slow))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("slow").state is State.HEALTHY)
        await screen.select("slow")
        await screen.press("s", "y")
        await screen.until(lambda: screen.row("slow").state is State.STOPPING)
        await screen.shows("◔ stop slow")
        await screen.press("r")
        await screen.until(
            lambda: (
                "Restart slow?" in screen.text()
                or any("refused" in toast for toast in screen.toasts())
            )
        )
        if "Restart slow?" in screen.text():
            await screen.press("enter")
        await screen.until(lambda: any("refused" in toast for toast in screen.toasts()))
        psutil.Process(screen.row("slow").pid).kill()  # or the end waits for its grace


async def test_quit_asks_and_detaching_leaves_the_run_alone(
    tmp_path: Path, supervise: Supervise
) -> None:
    run = supervise(small_stack(tmp_path / "run"))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("trainer").state is State.HEALTHY)
        await screen.press("q")
        await screen.shows("Quit?")
        await screen.press("escape")
        await screen.until(lambda: "Quit?" not in screen.text())
        await screen.press("q", "enter")
    assert screen.app.return_value == "detach"
    assert (await ControlClient(run.root).status()).phase is Phase.RUNNING


async def test_quit_can_stop_the_run_and_shows_it_going(
    tmp_path: Path, supervise: Supervise
) -> None:
    run = supervise(small_stack(tmp_path / "run"))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("trainer").state is State.HEALTHY)
        await screen.press("q", "s")
        await screen.until(lambda: screen.app.return_value is not None, timeout_s=20)
    assert screen.app.return_value == "stop"
    assert json.loads(run.result_json.read_text())["exit_code"] == 130


async def test_the_end_of_the_run_stays_on_the_screen(tmp_path: Path, supervise: Supervise) -> None:
    ends = child(
        "trainer",
        Role.TRAINER,
        "import time; print('ready', flush=True); time.sleep(1)",
        ends_run=True,
    )
    stack = small_stack(tmp_path / "run")
    stack = stack.model_copy(update={"components": [*stack.components[:-1], ends]})
    run = supervise(stack)
    async with cockpit(run) as screen:
        await screen.shows("✔ done", timeout_s=20)
        await screen.until(lambda: screen.row("trainer").state is State.COMPLETED)
        await screen.until(lambda: screen.row("vllm").state is State.STOPPED)
        await screen.press("r")
        await screen.until(lambda: any("this run has ended" in toast for toast in screen.toasts()))
        await screen.press("q")
    assert screen.app.return_value == "ended"


async def test_the_log_follows_and_can_be_held(tmp_path: Path, supervise: Supervise) -> None:
    run = supervise(small_stack(tmp_path / "run"))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("run-api").state is State.HEALTHY)
        await screen.select("run-api")
        log = screen.app.query_one(LogView)
        await screen.until(lambda: log.component == "run-api" and len(log.buffer) > 30)
        await screen.until(lambda: lines_of(log)[-1] in screen.text())
        log.focus()
        await screen.press("pageup")
        await screen.until(lambda: not log.following)
        top, count = log.scroll_y, len(log.buffer)
        await screen.until(lambda: len(log.buffer) > count + 5)
        assert log.scroll_y == top
        await screen.press("f")
        await screen.until(lambda: log.following and lines_of(log)[-1] in screen.text())
        await screen.press("home")
        await screen.shows("run-api ready")


async def test_selecting_another_component_switches_the_log(
    tmp_path: Path, supervise: Supervise
) -> None:
    run = supervise(small_stack(tmp_path / "run"))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("trainer").state is State.HEALTHY)
        log = screen.app.query_one(LogView)
        for name in ("run-api", "vllm"):
            await screen.select(name)
            await screen.until(
                lambda name=name: any(line.startswith(f"{name} line") for line in lines_of(log))
            )  # type: ignore[misc]
            assert all(line.startswith(name) for line in lines_of(log))


async def test_hostile_output_stays_text(tmp_path: Path, supervise: Supervise) -> None:
    hostile = (
        "print('ready', flush=True)\n"
        "print('\\x1b]52;c;ZXZpbA==\\x07[bold red]not markup[/] \\x1b[2J\\x1b[31mred\\x1b[0m "
        "[link=x]y', flush=True)\n"
        "import sys; sys.stdout.buffer.write(b'\\xff\\xfe raw \\x9b5A bytes\\n'); "
        "sys.stdout.flush()\n"
    )
    run = supervise(small_stack(tmp_path / "run", child("hostile", Role.OTHER, hostile + CHILD)))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("hostile").state is State.HEALTHY)
        await screen.select("hostile")
        log = screen.app.query_one(LogView)
        await screen.until(lambda: len(log.buffer) > 3)
        await screen.press("3")
        log.action_top()
        await screen.shows("[bold red]not markup[/] red [link=x]y")
        assert "52;c" not in screen.text()
        assert not any(ord(char) < 32 and char != "\n" for char in screen.text())


async def test_a_screen_that_comes_late_shows_the_whole_history(
    tmp_path: Path, supervise: Supervise
) -> None:
    run = supervise(small_stack(tmp_path / "run"))
    async with cockpit(run) as first:
        await first.until(lambda: first.row("trainer").state is State.HEALTHY)
        await first.press("ctrl+d")
    assert first.app.return_value == "detach"
    async with cockpit(run) as late:
        await late.until(lambda: late.app.loaded)
        news = [(move.component, move.new) for move in late.app.state.transitions]
        for name in HEALTHY:
            assert [new for component, new in news if component == name] == ["starting", "healthy"]


async def test_a_supervisor_that_is_killed_is_a_message_and_not_a_crash(
    tmp_path: Path, supervise: Supervise
) -> None:
    run = supervise(small_stack(tmp_path / "run"))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("trainer").state is State.HEALTHY)
        assert screen.app.status
        assert screen.app.status.supervisor_pid
        os.kill(screen.app.status.supervisor_pid, signal.SIGKILL)
        await screen.shows("supervisor gone, no result written")
        await screen.press("q")
    assert screen.app.return_value == "ended"
