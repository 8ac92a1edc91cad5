"""The cockpit as its user has it: the real demo under `atropos-tui up` in a terminal, driven by keys alone.

python -m pytest -m e2e tests/e2e/test_cockpit.py
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.live_stack import LiveStack, free_ports
from tests.ui.terminal import Terminal

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
COMPONENTS = ("warm-start", "api", "vllm", "arithmetic", "trainer")
STEPS = 100_000


@dataclass
class Cockpit:
    """The screen of a live run, and the run's own files."""

    terminal: Terminal
    files: LiveStack

    def press(self, *keys: bytes) -> None:
        for key in keys:
            self.terminal.type(key)
            self.terminal.read(0.2)

    def step(self) -> int:
        """The optimizer step in the header, 0 before the first."""
        found = re.search(rf"step ([\d,]+)/{STEPS}", self.terminal.cells.text)
        return int(found[1].replace(",", "")) if found else 0

    def row(self, component: str) -> str:
        """The line of a component in the table."""
        lines = self.terminal.cells.text.splitlines()
        return next((line for line in lines if re.match(rf"[│┃\s]*{component} ", line)), "")

    def select(self, component: str) -> None:
        """Put the cursor on a component: to the top of the table, then down to it."""
        self.press(*[b"\x1b[A"] * len(COMPONENTS), *[b"\x1b[B"] * COMPONENTS.index(component))
        self.terminal.shows(lambda text: re.search(rf"Log +{component} ", text))

    def until_step(self, step: int, timeout_s: float = 240) -> None:
        self.terminal.shows(lambda _: self.step() >= step, timeout_s)


@pytest.fixture
def cockpit(tmp_path: Path) -> Iterator[Cockpit]:
    api, engine = free_ports(2)
    root = tmp_path / "run"
    sets = {"api.port": api, "vllm.port": engine, "trainer.training_steps": STEPS}
    command = [sys.executable, "-m", "atropos_tui", "up", "profiles/demo.toml", "--run-dir", str(root)]
    command += [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    files = LiveStack(root)
    terminal = Terminal(command, columns=160, rows=45)
    yield Cockpit(terminal, files)
    terminal.close()
    files.cli("down", "--timeout", "10")


def test_the_stack_is_watched_and_driven_from_the_screen(cockpit: Cockpit) -> None:
    terminal, files = cockpit.terminal, cockpit.files
    cockpit.until_step(3)
    assert all("● healthy" in cockpit.row(name) for name in COMPONENTS[1:]), terminal.cells.text

    _curves_follow_within(cockpit, 2.0)

    cockpit.select("vllm")
    old = _pid(cockpit, "vllm")
    cockpit.press(b"r")
    terminal.shows(lambda text: "Restart vllm?" in text and "trainer → vllm" in text and "vllm → trainer" in text)
    cockpit.press(b"\r")
    terminal.shows(lambda text: "restart vllm: done" in text, 240)
    done = max(step.step for step in files.telemetry("step") if step.attempt == 1)
    cockpit.until_step(done + 3)
    assert _pid(cockpit, "vllm") != old
    _nothing_was_lost(files, attempts=2)
    syncs = [sync.weight_version for sync in files.telemetry("sync")]
    assert syncs == sorted(set(syncs)), "after a restart no version is published twice"

    killed = time.time()
    os.kill(_pid(cockpit, "vllm"), signal.SIGKILL)
    seen = terminal.shows(
        lambda _: "● healthy" not in cockpit.row("vllm") and "killed by SIGKILL" in cockpit.row("vllm"), 10
    )
    assert seen - killed < 2.0, f"state and diagnosis were on the screen after {seen - killed:.2f} s"
    terminal.shows(lambda text: re.search(r"[▲✖↻] .*vllm|vllm: ", text.splitlines()[0] + text.splitlines()[1]))
    _shows_what_the_file_says(cockpit)
    done = files.telemetry("step")[-1].step
    cockpit.until_step(done + 2)
    assert f"No step is lost: the weights of step {done} outlived the server" in files.run.log("trainer", 2).read_text()
    _nothing_was_lost(files, attempts=3)

    cockpit.press(b"q")
    terminal.shows(lambda text: "Leave the cockpit?" in text)
    cockpit.press(b"s")
    assert terminal.ends(150) == 130
    files.assert_nothing_left()


def _nothing_was_lost(files: LiveStack, attempts: int) -> None:
    """Each attempt of the trainer went on from the weights of the one before it, and no rollout is of base weights."""
    steps = files.telemetry("step")
    assert {step.attempt for step in steps} == set(range(1, attempts + 1)), "vLLM and the trainer began anew together"
    numbers = list(range(1, len(steps) + 1))
    assert [step.step for step in steps] == numbers, "no step is lost, none is repeated"
    assert [step.weight_version for step in steps] == numbers, "no version is lost, none is used twice"
    assert all(0 <= step.policy_lag_max <= 2 for step in steps if step.policy_lag_max is not None), "the policy lag"
    assert {record.verdict for record in files.telemetry("alignment")} == {"ok"}


def _pid(cockpit: Cockpit, component: str) -> int:
    """The process of a component, read off the screen."""
    found = re.search(rf"{component} +● healthy +[\d.]+ m?s +(\d+) ", cockpit.row(component))
    assert found, cockpit.terminal.cells.text
    return int(found[1])


def _curves_follow_within(cockpit: Cockpit, seconds: float) -> None:
    """Three times: the newest point of the reward curve is of a step that came a moment ago."""
    since = time.time()
    for _ in range(3):
        before = _reward(cockpit.terminal.cells.text)
        seen = cockpit.terminal.shows(lambda text, before=before: _reward(text) not in ("", before))  # type: ignore[misc]
        shown = _reward(cockpit.terminal.cells.text)
        steps = cockpit.files.telemetry("step")
        times = [s.time for s in steps if f"{s.reward_mean:.3f}" == shown and since - 1 < s.time <= seen]
        assert times, f"no step of the last second has the reward {shown}"
        assert seen - min(times) < seconds, f"reward {shown} was drawn {seen - min(times):.2f} s late"
        since = seen


def _reward(text: str) -> str:
    found = re.search(r"Reward .*?mean ([\d.]+)", text)
    return found[1] if found else ""


def _shows_what_the_file_says(cockpit: Cockpit) -> None:
    """Without vLLM no step comes: two seconds after the last one, screen and newest records are at rest, and equal."""
    cockpit.files.until(lambda: time.time() - cockpit.files.telemetry("step")[-1].time > 0.7, 20, "an end of steps")
    step, aligned = cockpit.files.telemetry("step")[-1], cockpit.files.telemetry("alignment")
    probed = [record.probe_diff_abs_mean for record in aligned if record.probe_diff_abs_mean is not None]
    for words in (
        f"step {step.step}/{STEPS} ",
        f"mean {step.reward_mean:.3f}",
        f"rollout {aligned[-1].logprob_diff_abs_mean:.3f}",
        f"probe {probed[-1]:.1e}",
    ):
        cockpit.terminal.shows(lambda text, words=words: words in text, 1.5)  # type: ignore[misc]
