"""The GPU memory gate with real children and a stand-in driver: late, never, other users, host
pids."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from atropos_common.protocol.control import CommandRequest, ComponentStatus, Role, State
from atropos_common.protocol.records import DiagnosisRecord
from atropos_tui.gpu import Card, NoDriverError, Nvml
from atropos_tui.supervisor.launchers import gpu_memory
from atropos_tui.supervisor.launchers.gpu_memory import GIB, GpuMemory, Reader, excess_of
from tests.support.harness import QUICK, Running, alive, part, ready, wait_until

HOST = 1_000_000
"""Added to a pid as the host sees it."""


class FakeDriver:
    """A machine of cards whose memory belongs to live processes, and as long as `stuck`, to dead
    ones too."""

    def __init__(self, cards: int = 1) -> None:
        self.base = 0.6
        """GiB that the driver itself takes of each card."""
        self.count = cards
        self.taken: list[tuple[int, int, float]] = []
        """Pid, card and GiB of processes of this machine."""
        self.others: dict[int, float] = {}
        """GiB by host pid, on card 0."""
        self.stuck = False
        self.shift = 0
        self.lists = True
        self.fail: Callable[[], None] | None = None
        self.readings = 0

    def take(self, pid: int | None, size: float, card: int = 0) -> None:
        assert pid
        self.taken.append((pid, card, size))

    def _processes(self, card: int) -> dict[int, float]:
        held = {
            pid: size for pid, on, size in self.taken if on == card and (self.stuck or alive(pid))
        }
        shown = {pid + self.shift: size for pid, size in held.items()}
        return shown | (self.others if card == 0 else {})

    def read(self) -> list[Card]:
        self.readings += 1
        if self.fail:
            self.fail()
        return [self._card(index, self._processes(index)) for index in range(self.count)]

    def _card(self, index: int, held: dict[int, float]) -> Card:
        used = self.base + sum(held.values())
        rows = {pid: int(size * GIB) for pid, size in held.items()}
        return Card(index, int(used * GIB), 80 * GIB, "H200", 7, rows if self.lists else None)

    def has_open(self, pid: int, index: int) -> bool:
        return any((mine, card) == (pid, index) for mine, card, _ in self.taken)


AT_ONCE = 10.0
"""Seconds, of the minute or more that a wait would take: on a busy machine all takes longer."""


class Clock:
    """The time, some seconds ahead."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr("atropos_tui.supervisor.launchers.launcher.Nvml", lambda _: fake)
    times = {
        "RELEASE_TIMEOUT_S": 60.0,
        "SETTLE_S": 0.1,
        "OTHERS_S": 0.3,
        "READING_PAUSE_S": (0.01, 0.05),
    }
    for name, value in times.items():
        monkeypatch.setattr(gpu_memory, name, value)
    monkeypatch.setattr("atropos_tui.supervisor.launchers.launcher.MAX_AGE_S", 0.0)
    monkeypatch.setattr("atropos_tui.supervisor.launchers.launcher.USAGE_TIMEOUT_S", 10.0)
    return fake


@pytest.fixture
def _impatient(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not back is given up soon."""
    monkeypatch.setattr(gpu_memory, "RELEASE_TIMEOUT_S", 0.6)


def engine(**fields: Any) -> Any:
    return part(
        "engine", role=Role.ENGINE, probes=ready(), gpus=[0], **({"restart": QUICK} | fields)
    )


async def row(running: Running, name: str = "engine") -> ComponentStatus:
    return next(found for found in (await running.client.status()).components if found.name == name)


async def started(running: Running, driver: FakeDriver, size: float = 40.0) -> int:
    """The pid of an engine that is healthy and holds `size` GiB, as one look has seen."""
    pid = (await running.until("engine", State.HEALTHY)).pid
    driver.take(pid, size)
    await running.client.status()
    assert pid
    return pid


async def stop(running: Running, name: str = "engine") -> None:
    await running.client.command(CommandRequest(action="stop", component=name))


def gap(running: Running, earlier: str, later: str, attempt: int | None = None) -> float:
    """Seconds between two states of the engine."""
    times = {(r.new, r.attempt): r.time for r in running.states("engine")}
    return times[later, attempt or 1] - times[earlier, 1]


def diagnoses(running: Running) -> list[DiagnosisRecord]:
    return [each for each in running.records if isinstance(each, DiagnosisRecord) and not each.over]


async def test_stopped_means_that_the_memory_is_back(launch: Any, driver: FakeDriver) -> None:
    async with launch(engine()) as running:
        pid = await started(running, driver)
        status = await running.client.status()
        assert status.components[0].gpu_bytes == 40 * GIB
        card = status.gpus[0]
        assert (card.index, card.used_bytes, card.total_bytes) == (0, int(40.6 * GIB), 80 * GIB)
        assert card.utilization_percent == 7
        driver.stuck = True
        await stop(running)
        await wait_until(lambda: not alive(pid))
        async with asyncio.timeout(10):
            while "waiting for" not in (found := await row(running)).reason:
                await asyncio.sleep(0.02)
        assert (found.state, found.reason) == (
            State.STOPPING,
            "stop of engine by hand; waiting for 40.0 GiB on GPU 0",
        )
        assert found.waiting_for == "40.0 GiB on GPU 0 to be given back"
        driver.stuck = False
        freed = time.time()
        assert (await running.until("engine", State.STOPPED)).time > freed
        assert (await row(running)).reason == "stopped by hand"
        assert not diagnoses(running)


async def test_a_crash_is_restarted_only_when_the_memory_is_back(
    launch: Any, driver: FakeDriver
) -> None:
    async with launch(engine()) as running:
        pid = await started(running, driver)
        driver.stuck = True
        os.kill(pid, signal.SIGKILL)
        record = await running.until("engine", State.STOPPING)
        assert (record.reason, record.exit_code) == ("SIGKILL; waiting for 40.0 GiB on GPU 0", -9)
        await asyncio.sleep(0.2)
        assert running.path("engine")[-1] == "stopping"
        driver.stuck = False
        freed = time.time()
        crash = await running.until("engine", State.BACKOFF)
        assert (
            crash.reason == "SIGKILL" and crash.retry_at is not None and crash.retry_at > crash.time
        )
        assert (await running.until("engine", State.STARTING, attempt=2)).time > freed
        assert (await row(running)).restarts == 1


@pytest.mark.usefixtures("_impatient")
async def test_memory_that_never_comes_back_is_named_and_bars_the_card_for_a_while(
    launch: Any, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.count = 2
    clock = Clock()
    monkeypatch.setattr(gpu_memory, "time", clock)
    beside = part("beside", gpus=[1])
    async with launch(engine(), beside) as running:
        await started(running, driver)
        driver.stuck = True
        await stop(running)
        await running.until("engine", State.STOPPED)
        assert gap(running, "stopping", "stopped") >= 0.6
        found = diagnoses(running)[0]
        assert found.title == "GPU memory of engine was not given back"
        assert "40.0 GiB on GPU 0 0.6 s after its last process was gone" in found.evidence
        assert found.evidence.endswith("which has ended, 40.0 GiB")
        await running.client.command(CommandRequest(action="start", component="engine"))
        async with asyncio.timeout(20):
            while (waits := await row(running)).waiting_for != "40.0 GiB on GPU 0, left by engine":
                await asyncio.sleep(0.02)
        assert waits.state is State.PENDING
        await running.client.command(CommandRequest(action="restart", component="beside"))
        await running.until("beside", State.HEALTHY, attempt=2)  # another card is not barred
        clock.ahead = gpu_memory.BARRED_S / 2
        await asyncio.sleep(0.2)
        assert (await row(running)).state is State.PENDING
        clock.ahead = gpu_memory.BARRED_S + 1
        await running.until("engine", State.HEALTHY, attempt=2)


@pytest.mark.usefixtures("_impatient")
async def test_a_barred_card_opens_as_soon_as_it_is_free(launch: Any, driver: FakeDriver) -> None:
    async with launch(engine()) as running:
        await started(running, driver)
        driver.stuck = True
        await stop(running)
        await running.until("engine", State.STOPPED)
        await running.client.command(CommandRequest(action="start", component="engine"))
        await asyncio.sleep(0.2)
        assert running.path("engine")[-1] == "pending"
        driver.stuck = False
        await running.until("engine", State.HEALTHY, attempt=2)


@pytest.mark.usefixtures("_impatient")
async def test_a_stop_by_hand_ends_the_waiting_of_a_start(launch: Any, driver: FakeDriver) -> None:
    async with launch(engine(), part("other")) as running:
        await started(running, driver)
        driver.stuck = True
        await stop(running)
        await running.until("engine", State.STOPPED)
        await running.client.command(CommandRequest(action="start", component="engine"))
        await running.until("engine", State.PENDING)
        await stop(running)
        driver.stuck = False
        await asyncio.sleep(0.3)
        assert running.path("engine")[-2:] == ["pending", "stopped"]


async def test_what_others_do_on_the_card_disturbs_nothing(
    launch: Any, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pids tell: another process that comes, grows and stays is never waited for, one that leaves
    hides nothing."""
    monkeypatch.setattr(gpu_memory, "OTHERS_S", 60.0)
    driver.others = {HOST: 10.0}
    async with launch(engine()) as running:
        await started(running, driver)
        driver.others = {HOST + 1: 35.0}
        await stop(running)
        await running.until("engine", State.STOPPED)
        assert gap(running, "stopping", "stopped") < AT_ONCE
        await running.client.command(CommandRequest(action="start", component="engine"))
        driver.take((await running.until("engine", State.HEALTHY, attempt=2)).pid, 20)
        await running.client.status()
        driver.stuck, driver.others = True, {}
        await stop(running)
        await asyncio.sleep(0.3)
        assert (await row(running)).state is State.STOPPING
        driver.taken.clear()
        await wait_until(lambda: running.path("engine")[-1] == "stopped")
        assert not diagnoses(running)


async def test_inside_a_container_the_used_memory_decides(launch: Any, driver: FakeDriver) -> None:
    """Listed are pids of the host; the other process of before may grow by more than what is waited
    for."""
    driver.shift, driver.others = HOST, {7: 10.0}
    async with launch(engine()) as running:
        pid = await started(running, driver)
        assert (await row(running)).gpu_bytes is None
        driver.stuck, driver.others = True, {7: 4.0}
        await stop(running)
        await wait_until(lambda: not alive(pid))
        await asyncio.sleep(0.3)
        assert (await row(running)).waiting_for == "40.0 GiB on GPU 0 to be given back"
        driver.stuck, driver.others = False, {7: 60.0}
        await running.until("engine", State.STOPPED)
        assert not diagnoses(running)


async def test_a_newcomer_seen_from_a_container_costs_a_moment_and_no_more(
    launch: Any, driver: FakeDriver
) -> None:
    driver.shift = HOST
    async with launch(engine()) as running:
        await started(running, driver)
        driver.others = {8: 20.0}
        await stop(running)
        await running.until("engine", State.STOPPED)
        assert 0.3 <= gap(running, "stopping", "stopped") < AT_ONCE
        assert not diagnoses(running)


async def test_a_number_that_means_another_process_on_the_host_is_not_ours(
    launch: Any, driver: FakeDriver
) -> None:
    async with launch(engine()) as running:
        pid = (await running.until("engine", State.HEALTHY)).pid
        assert pid
        driver.others = {pid: 30.0}
        assert (await row(running)).gpu_bytes is None
        driver.take(pid, 5)
        driver.shift = HOST
        assert (await row(running)).gpu_bytes is not None, "shown to be ours by the open device"


async def test_an_unknown_amount_is_no_figure(driver: FakeDriver) -> None:
    driver.taken = [(os.getpid(), 0, 1.0)]
    memory = GpuMemory(Reader(driver))
    assert (await memory.note({"me": [os.getpid()]}))[0] == {"me": GIB}
    driver._card = lambda index, held: Card(0, GIB, GIB, processes=dict.fromkeys(held))  # type: ignore[method-assign]
    assert (await memory.note({"me": [os.getpid()]}))[0] == {}


@pytest.mark.parametrize("lists", [True, False])
async def test_sharing_a_card_in_single_copy(
    launch: Any, driver: FakeDriver, lists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer does not wait for the engine's memory; the last to leave answers for both."""
    monkeypatch.setattr(gpu_memory, "OTHERS_S", 60.0)
    driver.lists = lists
    trainer = part("trainer", role=Role.TRAINER, gpus=[0], depends_on={"engine": "healthy"})
    async with launch(engine(restart_with=["trainer"]), trainer) as running:
        await started(running, driver, 60.0)
        driver.take((await running.until("trainer", State.HEALTHY)).pid, 12.0)
        await running.client.status()
        await stop(running, "trainer")
        await running.until("trainer", State.STOPPED)
        times = {r.new: r.time for r in running.states("trainer")}
        assert times["stopped"] - times["stopping"] < AT_ONCE
        driver.stuck = True
        await stop(running)
        await asyncio.sleep(0.3)
        assert (await row(running)).state is State.STOPPING
        driver.stuck = False
        await running.until("engine", State.STOPPED)
        assert not diagnoses(running)


async def test_who_never_touched_the_card_is_not_waited_for(
    launch: Any, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "OTHERS_S", 60.0)
    driver.others = {HOST: 70.0}
    async with launch(engine()) as running:
        await running.until("engine", State.HEALTHY)
        await stop(running)
        await running.until("engine", State.STOPPED)
        assert gap(running, "stopping", "stopped") < AT_ONCE


async def test_without_a_driver_there_is_no_gate(
    launch: Any, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "OTHERS_S", 60.0)
    driver.fail = _no_driver
    async with launch(engine()) as running:
        await started(running, driver)
        driver.stuck = True
        await stop(running)
        await running.until("engine", State.STOPPED)
        assert gap(running, "stopping", "stopped") < AT_ONCE
        assert (await running.client.status()).gpus == []
        assert driver.readings == 1


async def test_a_driver_that_fails_midway_stops_nobody(launch: Any, driver: FakeDriver) -> None:
    async with launch(engine()) as running:
        await started(running, driver)
        driver.stuck = True
        await stop(running)
        await asyncio.sleep(0.2)
        assert (await row(running)).state is State.STOPPING
        driver.fail = _gpu_is_lost
        await running.until("engine", State.STOPPED)
        assert gap(running, "stopping", "stopped") < AT_ONCE
        await running.client.command(CommandRequest(action="start", component="engine"))
        await running.until("engine", State.HEALTHY, attempt=2)
        assert (await row(running)).gpu_bytes is None


async def test_a_driver_that_hangs_holds_up_nobody(
    launch: Any, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "READING_TIMEOUT_S", 0.2)
    free = threading.Event()
    async with launch(engine()) as running:
        await started(running, driver)
        driver.fail = lambda: free.wait(30) and None
        began = time.monotonic()
        await running.client.status()
        assert time.monotonic() - began < 0.5
        await stop(running)
        await running.until("engine", State.STOPPED)
        assert gap(running, "stopping", "stopped") < 2
        await running.client.command(CommandRequest(action="down"))
        assert await running.end() == 130
    assert [thread.name for thread in threading.enumerate()].count("nvml") == 1, (
        "one hangs, no other is sent after it"
    )
    free.set()


async def test_a_second_interrupt_waits_for_no_memory(launch: Any, driver: FakeDriver) -> None:
    async with launch(engine()) as running:
        await started(running, driver)
        driver.stuck = True
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert running.path("engine")[-1] == "stopping"
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running.end(2.0) == 130
        assert running.path("engine")[-1] == "stopped"


async def test_a_machine_without_nvml_says_so_once() -> None:
    reader = Reader(Nvml())
    cards = await reader.cards()
    assert (cards is None) == reader.absent


def test_other_processes_of_before_are_left_out_on_both_sides() -> None:
    floor = Card(0, 30 * GIB, 80 * GIB, processes={1: 20 * GIB, 2: None})
    assert excess_of(Card(0, 30 * GIB, 80 * GIB, processes={1: 20 * GIB}), floor) == 0
    assert excess_of(Card(0, 45 * GIB, 80 * GIB, processes={1: 35 * GIB}), floor) == 0
    assert excess_of(Card(0, 45 * GIB, 80 * GIB, processes={9: 35 * GIB}), floor) == 35 * GIB
    assert excess_of(Card(0, 45 * GIB, 80 * GIB), Card(0, 30 * GIB, 80 * GIB)) == 15 * GIB
    assert excess_of(Card(0, 5 * GIB, 80 * GIB), floor) == 0


def _no_driver() -> None:
    raise NoDriverError("NVML Shared Library Not Found")


def _gpu_is_lost() -> None:
    raise OSError("GPU is lost")
