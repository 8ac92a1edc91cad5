"""The cockpit as a user has it: the real demo under `atropos-tui up` in a terminal, driven by
keys."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from atropos_tui.monitor.format import number
from tests.e2e.live_stack import LiveStack, free_ports
from tests.support.terminal import Terminal

SEEN_S = 2.0
"""In this time the screen shows what has happened."""
COMPONENTS = ("warm-start", "api", "vllm", "arithmetic", "trainer")


def open_cockpit(root: Path, steps: int) -> Cockpit:
    """Start the demo with `steps` steps; it has just begun when this returns."""
    api, engine = free_ports(2)
    sets = {"api.port": api, "vllm.port": engine, "trainer.training_steps": steps}
    command = [
        sys.executable,
        "-m",
        "atropos_tui",
        "up",
        "profiles/demo.toml",
        "--run-dir",
        str(root),
    ]
    command += [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    files = LiveStack(root)
    return Cockpit(Terminal(command, columns=160, rows=45), files, steps)


@dataclass
class Cockpit:
    """The screen of a live run, and the run's own files."""

    terminal: Terminal
    files: LiveStack
    steps: int
    """Steps of the whole run."""

    def press(self, *keys: bytes) -> None:
        for key in keys:
            self.terminal.type(key)
            self.terminal.read(0.2)

    def step(self) -> int:
        """The optimizer step in the header, 0 before the first."""
        found = re.search(rf"step ([\d,]+)/{self.steps}", self.terminal.cells.text)
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

    def pid(self, component: str) -> int:
        """The process of a component, read off the screen."""
        found = re.search(rf"{component} +● healthy +[\d.]+ m?s +(\d+) ", self.row(component))
        assert found, self.terminal.cells.text
        return int(found[1])

    def kill_vllm(self) -> int:
        """With SIGKILL: within `SEEN_S` the screen shows it and why, and what the run's files say;
        it goes on from the very step."""
        attempt = self.files.states("trainer")[-1].attempt
        vllm, killed = self.pid("vllm"), time.time()
        os.kill(vllm, signal.SIGKILL)
        seen = self.terminal.shows(
            lambda _: (
                "● healthy" not in self.row("vllm") and "killed by SIGKILL" in self.row("vllm")
            ),
            10,
        )
        assert seen - killed < SEEN_S, (
            f"state and diagnosis were on the screen after {seen - killed:.2f} s"
        )
        self.terminal.shows(
            lambda text: re.search(r"[▲✖↻] .*vllm|vllm: ", "".join(text.splitlines()[:2]))
        )
        self.shows_what_the_file_says()
        step = self.files.telemetry("step")[-1].step
        self.until_step(step + 2)
        said = self.files.run.log("trainer", attempt).read_text()
        assert (
            f"No step is lost: the weights of step {step} are intact after the end of the server"
            in said
        )
        return int(step)

    def curves_follow(self) -> None:
        """Three times, of five at most: the newest point of the reward curve is of a step that came
        a moment ago."""
        since, late = time.time(), list[float]()
        while sum(each < SEEN_S for each in late) < 3:
            assert len(late) < 5, f"rewards were drawn {late} s late"
            before = _reward(self.terminal.cells.text)
            seen = self.terminal.shows(
                lambda text, before=before: _reward(text) not in ("", before)
            )  # type: ignore[misc]
            shown = _reward(self.terminal.cells.text)
            steps = self.files.telemetry("step")
            times = [
                s.time
                for s in steps
                if f"{s.reward_mean:.3f}" == shown and since - 10 < s.time <= seen
            ]
            assert times, f"no step of the last seconds has the reward {shown}"
            late.append(round(seen - max(times), 2))
            since = seen

    def shows_what_the_file_says(self) -> None:
        """Without vLLM no step comes: two seconds after the last one, screen and newest records
        rest, and are equal."""
        self.files.until(
            lambda: time.time() - self.files.telemetry("step")[-1].time > 0.7, 20, "an end of steps"
        )
        step, aligned = self.files.telemetry("step")[-1], self.files.telemetry("alignment")
        probed = [
            record.probe_diff_abs_mean
            for record in aligned
            if record.probe_diff_abs_mean is not None
        ]
        for words in (
            f"step {step.step}/{self.steps} ",
            f"mean {step.reward_mean:.3f}",
            f"rollout {number(aligned[-1].logprob_diff_abs_mean)}",
            f"probe {probed[-1]:.1e}",
        ):
            self.terminal.shows(lambda text, words=words: words in text, 1.5)  # type: ignore[misc]

    def nothing_was_lost(self, attempts: int) -> None:
        """Each attempt of the trainer went on from the weights of the one before, and no rollout is
        of base weights."""
        steps = self.files.telemetry("step")
        assert {step.attempt for step in steps} == set(range(1, attempts + 1)), (
            "vLLM and trainer began anew together"
        )
        numbers = list(range(1, len(steps) + 1))
        assert [step.step for step in steps] == numbers, "no step is lost, none is repeated"
        assert [step.weight_version for step in steps] == numbers, (
            "no version is lost, none is used twice"
        )
        assert all(
            0 <= step.policy_lag_max <= 2 for step in steps if step.policy_lag_max is not None
        ), "the policy lag"
        assert {record.verdict for record in self.files.telemetry("alignment")} == {"ok"}


def _reward(text: str) -> str:
    found = re.search(r"Reward .*?mean ([\d.]+)", text)
    return found[1] if found else ""
