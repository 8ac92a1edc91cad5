"""Five pictures of the screen with frozen clocks: starting, healthy, mismatch, failed, no GPU.

python -m pytest tests/atropos_tui/ui/test_snapshots.py --snapshot-update

updates them after an intended change; then look at them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from atropos_common.protocol.control import GpuStatus, Phase, RunStatus, State
from atropos_common.protocol.records import DiagnosisRecord, StateRecord
from atropos_common.protocol.trainer_records import AlignmentRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.ui.app import CockpitApp, Outcome
from atropos_tui.ui.widgets.log_view import LogView
from tests.atropos_tui.ui.conftest import has_news
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, live_status, make_run, write_records

NOW = T0 + 31 + 0.33 * 37 + 0.4
GPUS = [
    GpuStatus(
        index=0,
        name="NVIDIA H200",
        used_bytes=84_200_000_000,
        total_bytes=150_000_000_000,
        utilization_percent=93,
        power_w=612.0,
        temperature_c=54,
        held_bytes={"vllm": 60_000_000_000, "trainer": 12_000_000_000},
    )
]

Look = Callable[[CockpitApp], bool]


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of day are local: pictures of them are made in one zone."""
    monkeypatch.setenv("TZ", "UTC")
    import time

    time.tzset()


def frozen(run: RunDir, status: RunStatus | None) -> CockpitApp:
    return CockpitApp(run.root, control=FakeControl(status), clock=lambda: NOW)


def settled(app: CockpitApp, done: Look) -> Callable[[Pilot[Outcome]], object]:
    """Waits until `done` and everything that is known is drawn."""

    async def wait(pilot: Pilot[Outcome]) -> None:
        for _ in range(400):
            await pilot.pause(0.05)
            if (
                app.loaded
                and app.status
                and app.state.gauges.last
                and not has_news(app)
                and done(app)
            ):
                break
        else:
            raise AssertionError("the screen never came to rest")
        app.query_one(LogView).focus()
        await pilot.pause(0.3)

    return wait


def has_log(app: CockpitApp) -> bool:
    return app.state.step == 37 and len(app.query_one(LogView).buffer) > 30


def test_starting(tmp_path: Path, snap_compare: Callable[..., bool]) -> None:
    run = make_run(tmp_path / "run", steps=0)
    status = live_status(run, NOW, vllm=State.STARTING, trainer=State.PENDING)
    changes = {
        "vllm": {"since": NOW - 12.4, "waiting_for": "http://127.0.0.1:9001/health"},
        "trainer": {"waiting_for": "vllm to be healthy"},
    }
    rows = [row.model_copy(update=changes.get(row.name, {})) for row in status.components]
    app = frozen(run, status.model_copy(update={"components": rows, "phase": Phase.STARTING}))
    assert snap_compare(
        app,
        terminal_size=(100, 30),
        run_before=settled(app, lambda app: bool(app.state.transitions)),
    )


def test_healthy(tmp_path: Path, snap_compare: Callable[..., bool]) -> None:
    run = make_run(tmp_path / "run")
    app = frozen(run, live_status(run, NOW).model_copy(update={"gpus": GPUS}))
    assert snap_compare(app, terminal_size=(200, 50), run_before=settled(app, has_log))


def test_mismatch(tmp_path: Path, snap_compare: Callable[..., bool]) -> None:
    run = make_run(tmp_path / "run")
    found = AlignmentRecord(
        time=NOW - 1,
        step=37,
        logprob_diff_abs_mean=0.61,
        logprob_diff_abs_max=4.2,
        kl_k3=0.3,
        train_mean=-0.31,
        inference_mean=-0.92,
        tokens=384,
        probe_diff_abs_mean=0.58,
        probe_diff_abs_max=3.9,
        probe_tokens=32,
        verdict="mismatch",
        cause="the engine does not serve the weights that the trainer has",
    )
    write_records(run.telemetry_jsonl, [found], start=10_000)
    said = DiagnosisRecord(
        time=NOW - 1,
        component="trainer",
        rule="alignment_mismatch",
        severity="alarm",
        title="trainer and engine disagree about the same tokens",
        evidence="probe |diff| 0.58",
        fix="restart the engine: atropos-tui restart vllm",
    )
    write_records(run.supervisor_jsonl, [said], start=100)
    app = frozen(run, live_status(run, NOW))
    assert snap_compare(app, press=["7"], terminal_size=(140, 40), run_before=settled(app, has_log))


def test_failed(tmp_path: Path, snap_compare: Callable[..., bool]) -> None:
    run = make_run(tmp_path / "run")
    failed = StateRecord(
        time=NOW,
        component="vllm",
        role="engine",
        old="healthy",
        new="failed",
        attempt=4,
        reason="exit code 1",
        exit_code=1,
    )
    said = DiagnosisRecord(
        time=NOW, component="vllm", title="CUDA out of memory", fix="lower gpu_memory_utilization"
    )
    write_records(run.supervisor_jsonl, [failed, said], start=100)
    run.result_json.write_text(json.dumps({"exit_code": 3, "reason": "vllm failed for good"}))
    app = frozen(run, None)
    assert snap_compare(
        app,
        terminal_size=(80, 24),
        run_before=settled(app, lambda app: app.query_one(LogView).component == "vllm"),
    )


def test_no_gpu(tmp_path: Path, snap_compare: Callable[..., bool]) -> None:
    run = make_run(tmp_path / "run")
    app = frozen(run, live_status(run, NOW))
    assert snap_compare(app, press=["6"], terminal_size=(120, 36), run_before=settled(app, has_log))
