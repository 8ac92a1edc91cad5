"""The real stack watched and driven from the screen: a restart by a key, a crash, and a stop.

python -m pytest -m "e2e and slow" tests/e2e/stack/test_cockpit.py

CI drives a real supervisor over small children by the same keys
(`tests/atropos_tui/ui/test_real_supervisor.py`), and watches the demo on a terminal while its
server is killed (`test_demo.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.cockpit import COMPONENTS, Cockpit

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_stack_is_watched_and_driven_from_the_screen(cockpit: Callable[[int], Cockpit]) -> None:
    live = cockpit(100_000)
    terminal, files = live.terminal, live.files
    live.until_step(3)
    assert all("● healthy" in live.row(name) for name in COMPONENTS[1:]), terminal.cells.text
    live.select("vllm")
    old = live.pid("vllm")
    live.press(b"r")
    terminal.shows(
        lambda text: (
            "Restart vllm?" in text and "trainer → vllm" in text and "vllm → trainer" in text
        )
    )
    live.press(b"\r")
    terminal.shows(lambda text: "restart vllm: done" in text, 240)
    done = max(step.step for step in files.telemetry("step") if step.attempt == 1)
    live.until_step(done + 3)
    assert live.pid("vllm") != old
    live.nothing_was_lost(attempts=2)
    syncs = [sync.weight_version for sync in files.telemetry("sync")]
    assert syncs == sorted(set(syncs)), "after a restart no version is published twice"

    live.kill_vllm()
    live.nothing_was_lost(attempts=3)

    live.press(b"q")
    terminal.shows(lambda text: "Quit?" in text)
    live.press(b"s")
    assert terminal.ends(150) == 130
    files.assert_nothing_left()
