"""The attached screen rings for events while it is open, when `[notify]` says so."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from atropos_common.protocol.control import Phase, RunStatus
from atropos_common.system.run_dir import RunDir
from atropos_tui.ui.app import CockpitApp
from tests.atropos_tui.ui.fakes import FakeControl


def line(seq: int, when: float) -> str:
    about = {"title": "mismatch", "rule": "alignment_mismatch"}
    record = {"kind": "diagnosis", "seq": seq, "time": when, "run_id": "r"} | about
    return json.dumps(record) + "\n"


async def rung(app: CockpitApp, count: int) -> None:
    async with asyncio.timeout(10):
        while app.rung < count:  # type: ignore[attr-defined]
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    assert app.rung == count  # type: ignore[attr-defined]


@pytest.mark.parametrize("bell", [True, False])
async def test_it_rings_for_a_mismatch_and_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bell: bool
) -> None:
    run = RunDir(tmp_path)
    run.plan_json.write_text(
        json.dumps({"run_id": "r", "notify": {"bell": bell}, "components": []})
    )
    run.supervisor_jsonl.write_text(line(0, time.time() - 3600))
    running = RunStatus(
        run_id="r",
        name="n",
        mode="none",
        run_dir=str(tmp_path),
        phase=Phase.RUNNING,
        started_at=1.0,
    )
    control = FakeControl(running)
    app = CockpitApp(tmp_path, control=control)
    app.rung = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(app, "bell", lambda: setattr(app, "rung", app.rung + 1))  # type: ignore[attr-defined]
    async with app.run_test() as pilot:
        await pilot.pause(0.5)
        assert app.status is not None
        await rung(app, 0)
        with run.supervisor_jsonl.open("a") as file:
            file.write(line(1, time.time()))
        await rung(app, 1 if bell else 0)
        control.answer = running.model_copy(update={"phase": Phase.ENDED, "exit_code": 3})
        await pilot.pause(1.5)
        await rung(app, 2 if bell else 0)
