"""Health checks of a component: startup, readiness, liveness. All checks of one must pass;
thresholds decide when the verdict changes."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from atropos_common.protocol.record_tail import RecordTail
from atropos_common.protocol.records import StageRecord
from atropos_tui.profile.spec import (
    Check,
    ComponentSpec,
    ExecCheck,
    FileCheck,
    HttpCheck,
    LogCheck,
    Probe,
    Probes,
    StageCheck,
    TcpCheck,
)
from atropos_tui.supervisor.processes.launch import Launch
from atropos_tui.supervisor.processes.logs import LogDrain
from atropos_tui.supervisor.processes.process import spawn

Which = Literal["startup", "readiness", "liveness"]

STAGE_LOOK_S = 0.2
RECHECK_S = 5.0
"""Seconds between readiness rounds while the component is ready."""


@dataclass(frozen=True)
class ProbeResult:
    """Result of one round of one health check."""

    which: Which
    ok: bool
    latency_s: float
    detail: str


def checks_of(probes: Probes) -> Iterator[Check]:
    """Yield every check of a component."""
    for probe in (probes.startup, probes.readiness, probes.liveness):
        yield from probe.checks if probe else ()


def log_patterns(probes: Probes) -> list[str]:
    return [check.pattern for check in checks_of(probes) if isinstance(check, LogCheck)]


class CheckFailedError(Exception):
    pass


class Prober:
    """Health checks of one attempt; reports changed verdicts."""

    def __init__(
        self,
        probes: Probes,
        http: httpx.AsyncClient,
        launch: Launch,
        log: LogDrain,
        reached: Collection[str],
        report: Callable[[ProbeResult], None],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """`reached`: live view of the attempt's stages."""
        self._http, self._launch, self._log, self._stages = http, launch, log, reached
        self._report = report
        self.last: dict[Which, ProbeResult] = {}
        self._was_ready = asyncio.Event()
        for pattern in log_patterns(probes):  # from the first log line, before the first round
            with contextlib.suppress(re.error):  # the check itself reports a bad pattern
                log.watch(pattern)
        self._task = start(self._run(probes))

    def cancel(self) -> None:
        self._task.cancel()

    async def _run(self, probes: Probes) -> None:
        if probes.startup:
            await self._follow("startup", probes.startup, once=True)
        # Readiness and liveness run side by side, each with its own interval.
        async with asyncio.TaskGroup() as group:
            if probes.readiness:
                group.create_task(self._follow("readiness", probes.readiness))
            if probes.liveness:
                group.create_task(
                    self._stay_alive(probes.liveness, gated=probes.readiness is not None)
                )

    async def _stay_alive(self, probe: Probe, *, gated: bool) -> None:
        # A program that is still loading may be slow: until it is ready once, only
        # `start_timeout_s` limits it.
        if gated:
            await self._was_ready.wait()
        await self._follow("liveness", probe)

    async def _follow(self, which: Which, probe: Probe, *, once: bool = False) -> None:
        began = time.monotonic()
        passed = failed = 0
        verdict: bool | None = None
        while True:
            result = self.last[which] = await self._round(which, probe)
            if result.ok:
                passed, failed = passed + 1, 0
            else:
                # Failures within `start_period_s` do not count.
                passed, failed = 0, failed + (time.monotonic() - began >= probe.start_period_s)
            if passed >= probe.success_threshold and verdict is not True:
                verdict = True
                self._report(result)
                if which == "readiness":
                    self._was_ready.set()
            elif failed >= probe.failure_threshold and verdict is not False:
                verdict = False
                self._report(result)
            if once and verdict:
                return
            # A ready component is checked less often.
            settled = which == "readiness" and verdict and not failed
            await asyncio.sleep(max(probe.interval_s, RECHECK_S) if settled else probe.interval_s)

    async def _round(self, which: Which, probe: Probe) -> ProbeResult:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(probe.timeout_s):
                found = await asyncio.gather(
                    *map(self._check, probe.checks), return_exceptions=True
                )
            # Wait for all checks, then report the first failure: a cancelled check could leave a
            # process.
            for problem in found:
                if isinstance(problem, BaseException):
                    raise problem
            ok, detail = True, "; ".join(map(str, found))
        except CheckFailedError as error:
            ok, detail = False, str(error)
        except TimeoutError:
            ok, detail = False, f"no answer within {probe.timeout_s:g} s"
        except (ValueError, re.error, httpx.InvalidURL) as error:
            ok, detail = False, f"{type(error).__name__}: {error}"
        return ProbeResult(which, ok, time.perf_counter() - began, detail)

    async def _check(self, check: Check) -> str:
        """Return the finding of a passed check.

        Raises:
            CheckFailedError: it did not pass.
        """
        if isinstance(check, HttpCheck):
            return await self._get(check)
        if isinstance(check, TcpCheck):
            return await self._connect(check)
        if isinstance(check, ExecCheck):
            return await self._execute(check)
        if isinstance(check, LogCheck):
            self._log.watch(check.pattern)
            if not self._log.seen(check.pattern):
                raise CheckFailedError(
                    f"not {check.label} yet" if check.label else f"no line {check.pattern!r} yet"
                )
            return check.label or f"log line matches {check.pattern!r}"
        if isinstance(check, StageCheck):
            if check.stage not in self._stages:
                raise CheckFailedError(f"not {check.label or check.stage} yet")
            return check.label or check.stage
        assert isinstance(check, FileCheck)
        found = False
        with contextlib.suppress(OSError):  # a stale mount may answer again
            found = Path(check.path).exists()
        if not found:
            raise CheckFailedError(f"{check.path} does not exist yet")
        return f"{check.path} exists"

    async def _get(self, check: HttpCheck) -> str:
        # Send no token: health routes need none, and before the component binds, another process
        # may hold its port.
        try:
            answer = await self._http.get(check.url, headers={"Connection": "close"}, timeout=None)
        except httpx.HTTPError as error:
            raise CheckFailedError(f"GET {check.url}: {error or type(error).__name__}") from None
        if answer.status_code != check.status:
            raise CheckFailedError(f"GET {check.url}: {answer.status_code}, wanted {check.status}")
        return f"GET {check.url}: {answer.status_code}"

    async def _connect(self, check: TcpCheck) -> str:
        try:
            _, writer = await asyncio.open_connection(check.host, check.port)
        except OSError as error:
            raise CheckFailedError(
                f"{check.host}:{check.port}: {error.strerror or error}"
            ) from None
        writer.close()
        return f"{check.host}:{check.port} accepts connections"

    async def _execute(self, check: ExecCheck) -> str:
        try:
            child, pipe = spawn(check.command, self._launch.env, self._launch.cwd)
        except OSError as error:
            raise CheckFailedError(f"{check.command[0]}: {error.strerror}") from None
        output = LogDrain(pipe, None)
        try:
            await child.exited.wait()
        finally:
            # Also on timeout: the program must not outlive its check.
            child.abandon()
            output.finish()
        if child.exit_code != 0:
            raise CheckFailedError(
                f"{check.command[0]} exited {child.exit_code}: {' '.join(output.tail(1))}"
            )
        return f"{check.command[0]} exited 0"


class StageWatch:
    """Stages of one attempt: from the component's records, or by pattern in its log."""

    def __init__(
        self,
        spec: ComponentSpec,
        records: Path,
        attempt: int,
        log: LogDrain,
        reached: Callable[[str, float], None],
    ) -> None:
        """`reached` is called once for every stage, with its name and Unix time."""
        self._attempt, self._log, self._reached = attempt, log, reached
        self._tail = RecordTail(records)
        asked = [check.stage for check in checks_of(spec.probes) if isinstance(check, StageCheck)]
        self._waiting = {stage.name: stage.pattern for stage in spec.stages} | dict.fromkeys(
            asked, ""
        )
        for stage in spec.stages:
            if stage.pattern:
                with contextlib.suppress(
                    re.error
                ):  # a stage with a bad pattern is shown as not reached
                    log.watch(stage.pattern)

    async def look(self) -> None:
        """Report the stages reached since the last call."""
        found: dict[str, float] = {}
        for record in await asyncio.to_thread(lambda: list(self._tail.rest())):
            if isinstance(record, StageRecord) and record.attempt == self._attempt:
                found.setdefault(record.stage, record.time)
        for name, pattern in self._waiting.items():
            if pattern and self._log.seen(pattern):
                found.setdefault(name, time.time())
        # In the order of the profile's stages, and each only once.
        for name in [name for name in self._waiting if name in found]:
            del self._waiting[name]
            self._reached(name, found[name])

    async def follow(self) -> None:
        """Poll until every stage is reached."""
        while self._waiting:
            await asyncio.sleep(STAGE_LOOK_S)
            await self.look()
