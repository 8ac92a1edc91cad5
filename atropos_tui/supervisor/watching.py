"""The live side of the diagnoses: about once a second it looks at what components printed and the trainer recorded.

Everything that takes time (finding signs, parsing records, asking run-api, who holds a port) happens in a thread; the
event loop only hands over what was printed and gets diagnoses back.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from atropos_common.control import Role
from atropos_common.run_dir import RunDir
from atropos_tui.profile.spec import StackSpec
from atropos_tui.supervisor.component import Component
from atropos_tui.supervisor.diagnoses import own
from atropos_tui.supervisor.diagnoses.following import NumberWatch
from atropos_tui.supervisor.diagnoses.model import Diagnosis, Names, Rule, Voice
from atropos_tui.supervisor.diagnoses.refusals import REFUSED, RefusalWatch
from atropos_tui.supervisor.diagnoses.scanner import LogScanner
from atropos_tui.supervisor.diagnoses.waiting import (
    DISK_LOW,
    NO_BATCHES,
    SLOW_START,
    ApiView,
    Part,
    Scene,
    disk_low,
    no_batches,
    slow_start,
    stalled_s,
    starting_roles,
)
from atropos_tui.supervisor.record_tail import RecordTail

LOOK_S = 1.0
ASK_S = 30.0
"""run-api is asked no more often than this, and only while nothing trains."""
ANSWER_S = 3.0
DISK_S = 10.0
GONE = ("disconnections",)
CAME = ("registrations", "stock registrations")
HEARD = ("refusals", "stock refusals", "openai refusals")


@dataclass(frozen=True)
class _Printed:
    """What one component printed since the last look."""

    name: str
    attempt: int
    scanner: LogScanner
    pieces: list[bytes]
    over: bool
    """It prints no more."""
    asked_to_go: bool
    """It was stopped or killed on purpose: what it cries out while it dies is no trouble."""


class Watcher:
    """Runs every rule that speaks while the run goes. `look` belongs to the event loop; one at a time."""

    def __init__(self, stack: StackSpec, components: Mapping[str, Component]) -> None:
        self._stack, self._components = stack, components
        self._run = RunDir(Path(stack.run_dir))
        self._names = Names.of(stack)
        self._numbers = NumberWatch(time.time())
        self._tails: dict[Path, RecordTail] = {}
        self._looking = asyncio.Lock()
        self._voices: dict[tuple[str, str, str, int], Voice] = {}
        """By rule, component, title (what has another is another cause) and attempt, where each is told anew."""
        self._episodes: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._since_step: Counter[str] = Counter()
        self._refusals = RefusalWatch(stack)
        self._api_attempt = 0
        self._api: ApiView | None = None
        self._asked_at = self._disk_at = float("-inf")
        self._disk: tuple[int, int] | None = None

    async def watch(self) -> None:
        """Look again and again, until cancelled. A fault in here is told, and never ends the run."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                # Shielded: what a look has read is not read again, so its end must come even when we are cancelled.
                await asyncio.shield(asyncio.ensure_future(self.look()))
            except Exception as error:
                fix = "the run goes on, its diagnoses may be missing; please report it with the run's supervisor.jsonl"
                found = own.WATCHER_FAULT.diagnosis(repr(error), fix)
                next(iter(self._components.values())).diagnose(found, 0)

    async def look(self) -> None:
        """One look at everything; what is found is told."""
        async with self._looking:
            await self._look()

    async def _look(self) -> None:
        now = time.time()
        printed = [
            _Printed(each.name, each.attempt, each.scanner, each.scanner.take(), each.child is None, on_purpose(each))
            for each in self._components.values()
            if each.scanner is not None
        ]
        parts = tuple(_part(component) for component in self._components.values())
        attempts = {component.name: component.attempt for component in self._components.values()}
        for name, found in await asyncio.to_thread(self._work, now, printed, parts):
            self._components[name].diagnose(found, attempts[name])

    # In the thread.

    def _work(self, now: float, printed: list[_Printed], parts: tuple[Part, ...]) -> list[tuple[str, Diagnosis]]:
        scene = Scene(now, parts, self._names)
        starting = starting_roles(scene)
        trainer = next((part.name for part in scene.of(Role.TRAINER)), parts[0].name)
        said = [(trainer, found) for found in self._read_records()]
        for what in printed:
            found_here = what.scanner.scan(what.pieces, now, starting)
            found_here += what.scanner.close(now) if what.over else []
            said += [(what.name, found) for found in found_here if not what.asked_to_go]
            self._count(what, now)
        refused = self._refusals.judge(parts, now)
        for part in scene.of(Role.ENV):
            said += self._speak(REFUSED, part.name, refused.get(part.name), now, part.attempt)
        scene = replace(self._scene(scene), refused=tuple(refused))
        said += self._speak(NO_BATCHES, trainer, no_batches(scene), now)
        said += self._speak(DISK_LOW, trainer, disk_low(scene), now)
        for part in parts:
            said += self._speak(SLOW_START, part.name, slow_start(part, now), now)
        return said

    def _read_records(self) -> list[Diagnosis]:
        said: list[Diagnosis] = []
        step = self._numbers.step_at
        for path in (self._run.telemetry_jsonl, *sorted(self._run.root.glob("eval.*.jsonl"))):
            tail = self._tails.setdefault(path, RecordTail(path))
            while True:
                for record in tail.read():
                    said += self._numbers.feed(record)
                if not tail.behind:
                    break
        if self._numbers.step_at != step:
            self._since_step.clear()
        return said

    def _count(self, what: _Printed, now: float) -> None:
        counts = what.scanner.counts
        if what.scanner.spec.role is Role.ENV:
            self._refusals.hear(what.name, what.attempt, sum(counts[name] for name in HEARD))
        if what.scanner.spec.role is Role.ENGINE:
            self._refusals.feed(what.name, what.attempt, what.scanner.noted, now)
            what.scanner.noted.clear()
        if what.scanner.spec.role is Role.API and what.attempt != self._api_attempt:
            self._api_attempt = what.attempt
            self._counts.clear()  # a new run-api knows nobody
        self._counts.update(counts)
        self._since_step.update(counts)
        counts.clear()

    def _scene(self, bare: Scene) -> Scene:
        numbers = self._numbers
        live = sum(not part.state.is_resting for part in bare.of(Role.ENV))
        came, gone = (sum(self._counts[name] for name in names) for names in (CAME, GONE))
        free, size = self._free(bare.now)
        scene = replace(
            bare, step=numbers.step, step_at=numbers.step_at, pace_s=numbers.pace_s, counts=dict(self._since_step),
            ghosts=max(0, came - gone - live), free_bytes=free, disk_bytes=size,
        )  # fmt: skip
        if stalled_s(scene) is None:
            self._api = None
            return scene
        if bare.now - self._asked_at >= ASK_S:
            self._asked_at = bare.now
            self._api = self._ask()
        return replace(scene, api=self._api)

    def _free(self, now: float) -> tuple[int | None, int | None]:
        if now - self._disk_at >= DISK_S:
            self._disk_at = now
            try:
                disk = os.statvfs(self._run.root)
                self._disk = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
            except OSError:
                self._disk = None
        return self._disk or (None, None)

    def _ask(self) -> ApiView | None:
        """What run-api says of itself, where this stack has one on a known port."""
        spec = next((spec for spec in self._stack.components if spec.role is Role.API and spec.port), None)
        return None if spec is None else ask_api(f"http://127.0.0.1:{spec.port}")

    def _speak(
        self, rule: Rule, name: str, found: Diagnosis | None, now: float, attempt: int = 0
    ) -> list[tuple[str, Diagnosis]]:
        """`found`, if it is new; with `attempt` it is new in each."""
        cause = found.title if found else "", attempt
        for key, voice in self._voices.items():
            if key[:2] == (rule.name, name) and key[2:] != cause:
                voice.lowered()
        if found is None or not self._voices.setdefault((rule.name, name, *cause), Voice()).raised(now):
            return []
        episode = self._episodes[rule.name]
        self._episodes[rule.name] += 1
        return [(name, replace(found, episode=episode))]


def ask_api(url: str) -> ApiView:
    """What the run-api at `url` says of itself; its newest group only when groups wait, since it may be large."""
    try:
        with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False) as http:
            status, info = http.get("/status").json(), http.get("/info").json()
            queue = int(status.get("queue_size") or 0)
            group = len(http.get("/latest_example").json().get("tokens") or []) if queue else 0
            return ApiView(int(info.get("batch_size", -1)), queue, group, int(status.get("current_step") or 0))
    except (httpx.HTTPError, ValueError, AttributeError, TypeError) as error:
        return ApiView(problem=f"{url}: {str(error) or type(error).__name__}")


def on_purpose(component: Component) -> bool:
    """Whether it was told to go."""
    return component.outcome in ("stopped", "killed")


def _part(component: Component) -> Part:
    row = component.log.tail(1) if component.log and component.state.value == "starting" else []
    return Part(
        component.name,
        component.spec.role,
        component.state,
        component.since,
        component.spec.start_timeout_s,
        component.started_at or 0.0,
        component.attempt,
        component.has_gate,
        component.waiting_for,
        row[0].strip()[:200] if row else "",
    )
