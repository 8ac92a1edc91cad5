"""A running demo, observed from outside: its states, its steps, its processes.

What `restarts`, `chaos` and `long_run` need alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from atropos_common.protocol.control import CommandRequest, ComponentStatus, RunStatus, State
from atropos_tui.supervisor.client import ControlClient, NoSupervisor, Refused
from tests.e2e.live_stack import LiveStack

RECOVERY_S = 240.0
SETTLED = (State.HEALTHY, State.COMPLETED)


class NotRecovered(Exception):
    """The stack did not come back; the message says what it is doing."""


class Stack:
    """A running demo, and what is known of it from outside."""

    def __init__(
        self, root: Path, mode: str, *, workers: int, profile: str, given: dict[str, str]
    ) -> None:
        sets: dict[str, Any] = {"mode": mode, "trainer.training_steps": 1_000_000}
        # A run gives up after three crashes in ten minutes; here they come one a minute.
        for name in ("api", "env", "vllm", "trainer"):
            sets |= {f"{name}.restart.max_restarts": 10_000, f"{name}.restart.max_backoff_s": 1}
        if workers > 1:
            sets["vllm.tensor_parallel"] = workers
        self.live = LiveStack(root, profile=profile, sets=sets | given)
        self.overwritten: dict[Path, int] = {}
        """Lines of its files that were overwritten on purpose."""
        self.resumed = False
        self._steps: list[tuple[float, int]] = []
        self._read = 0

    def status(self) -> RunStatus:
        return asyncio.run(self._status())

    async def _status(self) -> RunStatus:
        try:
            return await ControlClient(self.live.root).status()
        except NoSupervisor:
            result = self.live.run.result_json
            raise NotRecovered(
                f"the run ended: {result.read_text()[:200] if result.exists() else ''}"
            ) from None

    def component(self, name: str) -> ComponentStatus:
        return next(each for each in self.status().components if each.name == name)

    def command(self, action: str, name: str) -> None:
        async def ask() -> None:
            request = CommandRequest.model_validate({"action": action, "component": name})
            while True:
                try:
                    await ControlClient(self.live.root).command(request)
                    return
                except Refused:  # the trainer's own restart in `lora_restart` is under way
                    await asyncio.sleep(0.2)

        asyncio.run(asyncio.wait_for(ask(), RECOVERY_S))

    def url(self) -> str:
        return f"http://127.0.0.1:{self.component('vllm').port}"

    def steps(self) -> list[tuple[float, int]]:
        """When each step ended, and its number, as written."""
        with (
            contextlib.suppress(FileNotFoundError),
            self.live.run.telemetry_jsonl.open("rb") as stream,
        ):
            stream.seek(self._read)
            whole = stream.read().rpartition(b"\n")[0]
            self._read += len(whole) + 1 if whole else 0
            for line in whole.splitlines():
                if b'"kind":"step"' in line:
                    with contextlib.suppress(ValueError):  # a line that a fault has overwritten
                        record = json.loads(line)
                        self._steps.append((record["time"], record["step"]))
        return self._steps

    def wait(self, done: Callable[[], bool], what: str, seconds: float = RECOVERY_S) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if self.live.process is not None and self.live.process.poll() is not None:
                raise NotRecovered(f"the run ended with code {self.live.process.returncode}")
            if time.monotonic() > deadline:
                states = ", ".join(
                    f"{each.name} {each.state} ({each.attempt})"
                    for each in self.status().components
                )
                raise NotRecovered(f"{what} not within {seconds:.0f} s: {states}")
            time.sleep(0.1)

    def settled(self) -> bool:
        return all(each.state in SETTLED for each in self.status().components)

    def process(self, kind: str) -> psutil.Process:
        """A process of the engine: its server, its core or the last worker.

        Raises:
            NotRecovered: there is none.
        """
        if server := self.component("vllm").pid:
            with contextlib.suppress(psutil.Error, KeyError):
                return engine_processes(server)[kind]
        raise NotRecovered(f"the engine has no {kind} process")


def engine_processes(server: int) -> dict[str, psutil.Process]:
    """The processes of an engine by what they are: its server, its core and the last worker.

    By their titles (`VLLM::EngineCore`, `VLLM::Worker_TP0`). A process that was forked has that of
    its parent where setproctitle does not find the command line, as after a change of the
    environment; then by descent: what multiprocessing began is the server's core, or the core's
    worker.

    Raises:
        psutil.Error: one of them has ended meanwhile.
    """
    found = {"server": psutil.Process(server)}
    for kind, title, above in (("core", "EngineCore", "server"), ("worker", "Worker", "core")):
        if parent := found.get(above):
            family = [(child, " ".join(child.cmdline())) for child in parent.children()]
            titled = [child for child, said in family if title in said]
            begun = [
                child
                for child, said in family
                if "spawn_main" in said or said == " ".join(parent.cmdline())
            ]
            if titled or begun:
                found[kind] = (titled or begun)[-1]
    return found


def lost_steps(steps: list[tuple[float, int]], written: int) -> int:
    """Steps after the first `written` that had been written before."""
    last = steps[written - 1][1] if written else 0
    lost = 0
    for _, step in steps[written:]:
        lost += max(last + 1 - step, 0)
        last = step
    return lost
