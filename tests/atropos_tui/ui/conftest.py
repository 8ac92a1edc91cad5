"""A real supervisor over small children, and helpers to read the screen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot

from atropos_common.protocol.control import ComponentStatus, Role
from atropos_common.system.run_dir import RunDir
from atropos_tui.profile.spec import (
    ComponentSpec,
    LogCheck,
    Probe,
    Probes,
    RestartPolicy,
    StackSpec,
    StopPolicy,
)
from atropos_tui.supervisor.client import ControlClient
from atropos_tui.ui import user_files
from atropos_tui.ui.app import CockpitApp, Outcome
from atropos_tui.ui.feed import Control
from atropos_tui.ui.widgets.components import Components
from atropos_tui.ui.widgets.log_view import LogView
from benchmarks.support.nursery import ForkedProcess
from tests.support import nursery

CHILD = """
import sys, time
name = sys.argv[1]
print(name, "ready", flush=True)
n = 0
while True:
    n += 1
    print(f"{name} line {n}", flush=True)
    time.sleep(0.05)
"""


def child(name: str, role: Role, script: str = CHILD, **more: object) -> ComponentSpec:
    """A component that runs `script` and is healthy once it said so."""
    probe = Probe(checks=[LogCheck(pattern="ready")], interval_s=0.05)
    return ComponentSpec.model_validate(
        {
            "name": name,
            "role": role,
            "command": [sys.executable, "-u", "-c", script, name],
            "probes": Probes(startup=probe),
            "restart": RestartPolicy(backoff_s=0.1),
            "stop": StopPolicy(grace_s=2.0),
        }
        | more
    )


def small_stack(run_dir: Path, *more: ComponentSpec) -> StackSpec:
    """Engine and trainer as in single copy (one restarts with the other), run-api, and `more`."""
    components = [
        child("run-api", Role.API),
        child("vllm", Role.ENGINE, restart_with=["trainer"]),
        *more,
        child("trainer", Role.TRAINER, depends_on={"vllm": "healthy"}),
    ]
    return StackSpec(
        run_id=f"ui-{os.getpid()}",
        name="small",
        mode="shared_vllm",
        run_dir=str(run_dir),
        components=components,
    )


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads, or changes, what its user has chosen for the charts, or sees that user's
    runs."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(autouse=True)
def no_failed_panel() -> Iterator[None]:
    """Fail where a panel hid an error of its own; a test that provokes one forgets it with
    `user_files._recorded.clear()`."""
    user_files._recorded.clear()
    yield
    assert not user_files._recorded


Supervise = Callable[[StackSpec], RunDir]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Supervise]:
    """Start a supervisor process for a stack; it and its children are gone after the test."""
    started: list[ForkedProcess] = []

    def start(stack: StackSpec) -> RunDir:
        run = RunDir(Path(stack.run_dir))
        run.create()
        run.plan_json.write_text(stack.model_dump_json())
        (folder := tmp_path / f"supervisor-{len(started)}").mkdir()
        process = nursery.supervisor(stack.model_dump_json(), folder)
        started.append(process)
        deadline = time.monotonic() + 20
        while not run.control_sock.exists():
            assert process.poll() is None, "the supervisor ended at once"
            assert time.monotonic() < deadline, "no control socket"
            time.sleep(0.02)
        return run

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(5)
            raise


def has_news(app: CockpitApp) -> bool:
    """Return True if something that has arrived is not drawn yet."""
    return app.painter.dirty or (app.painter.fresh_records and app.loaded)


def lines_of(log: LogView) -> list[str]:
    return [entry.text for entry in log.buffer.entries]


class Screen:
    """The app under a pilot, read the way a user reads it."""

    def __init__(self, app: CockpitApp, pilot: Pilot[Outcome]) -> None:
        self.app = app
        self.pilot = pilot

    def text(self) -> str:
        """Every cell of the screen, line by line."""
        width, _ = self.app.size
        lines = (
            self.app.screen._compositor.render_strips()
        )  # as many as there were before a new size is drawn
        return "\n".join(strip.text[:width] for strip in lines)

    def row(self, name: str) -> ComponentStatus:
        """Return the table's row of a component."""
        table = self.app.screen_stack[0].query_one(Components)
        found = [row for row in table.statuses if row.name == name]
        if not found:
            raise LookupError(f"{name} is not in the table")
        return found[0]

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def until(self, true: Callable[[], object], timeout_s: float = 15.0) -> None:
        """Wait until `true()`; an assertion with the whole screen if it never is."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(LookupError):
                if true():
                    return
            assert time.monotonic() < deadline, f"never came true; the screen:\n{self.text()}"
            await asyncio.sleep(0.03)
            await self.pilot.pause()

    async def shows(self, words: str, timeout_s: float = 15.0) -> None:
        await self.until(lambda: words in self.text(), timeout_s)

    async def select(self, component: str) -> None:
        """Move the cursor to a component with the arrow keys."""
        table = self.app.screen_stack[0].query_one(Components)
        names = [row.name for row in table.statuses]
        for _ in names:
            if table.selected and table.selected.name == component:
                return
            down = names.index(component) > table.cursor_row
            await self.press("down" if down else "up")
        assert table.selected
        assert table.selected.name == component

    def toasts(self) -> list[str]:
        """Title and text of the notifications on screen."""
        return [f"{note.title} {note.message}" for note in self.app._notifications]


@asynccontextmanager
async def cockpit(
    run: RunDir,
    size: tuple[int, int] = (120, 40),
    control: Control | None = None,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[Screen]:
    """The running app on `run`."""
    app = CockpitApp(run.root, control=control or ControlClient(run.root), clock=clock)
    async with app.run_test(size=size, notifications=True) as pilot:
        yield Screen(app, pilot)
