"""Parts without processes: the transition table, publish and subscribe."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atropos_common.protocol.control import State
from atropos_common.protocol.record_base import Record
from atropos_tui.supervisor import transitions
from atropos_tui.supervisor.journal.store import Hub, SubscriberDroppedError
from atropos_tui.supervisor.processes import procfs


def test_every_state_has_its_row_and_can_be_left_and_reached() -> None:
    assert set(transitions.TRANSITIONS) == set(State)
    reachable = {State.PENDING}
    while True:
        more = reachable.union(*(transitions.TRANSITIONS[state] for state in reachable))
        if more == reachable:
            break
        reachable = more
    assert reachable == set(State)
    only_by_command = {
        state for state, after in transitions.TRANSITIONS.items() if after == {State.PENDING}
    }
    assert only_by_command == {state for state in State if state.is_resting}
    assert not any(state.has_process for state in only_by_command)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (State.PENDING, State.HEALTHY),
        (State.STOPPED, State.STARTING),
        (State.COMPLETED, State.HEALTHY),
        (State.STOPPING, State.HEALTHY),
        (State.HEALTHY, State.STARTING),
        (State.HEALTHY, State.HEALTHY),
    ],
)
def test_illegal_steps_raise(old: State, new: State) -> None:
    with pytest.raises(transitions.IllegalTransitionError, match=f"{old} -> {new}"):
        transitions.check_step(old, new)


def test_conditions() -> None:
    assert {s for s in State if s.satisfies("completed")} == {State.COMPLETED}
    assert {s for s in State if s.satisfies("healthy")} == {State.HEALTHY, State.COMPLETED}
    assert State.STOPPING not in {s for s in State if s.satisfies("started")}


async def test_every_event_after_the_subscription() -> None:
    hub, records = Hub(), [Record(seq=number) for number in range(7)]
    for record in records[:4]:
        hub.publish(record)
    live = hub.subscribe()
    for record in records[4:6]:
        hub.publish(record)
    hub.close()
    assert [event async for event in live] == records[4:6]
    hub.publish(records[6])
    assert [event async for event in hub.subscribe()] == []


async def test_a_slow_subscriber_is_dropped_and_told_the_fast_one_loses_nothing() -> None:
    hub = Hub(limit=10)
    slow, fast = hub.subscribe(), hub.subscribe()
    got: list[int] = []

    async def read() -> None:
        async for event in fast:
            got.append(event.seq)

    reader = asyncio.create_task(read())
    for number in range(100):
        hub.publish(Record(seq=number))
        if number % 5 == 0:
            await asyncio.sleep(0)
    hub.close()
    await reader
    assert got == list(range(100))
    assert slow.dropped
    with pytest.raises(SubscriberDroppedError):
        await anext(slow)


def test_the_supervisor_imports_no_screen_no_profile_and_no_trainer() -> None:
    code = (
        "import sys, atropos_tui.supervisor.runner, atropos_tui.supervisor.client\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in "
        "('textual','torch','vllm','transformers')"
        " or m in "
        "('atropos_tui.profile.profile','atropos_tui.profile.plan','trainer_core.loop')]\n"
        "print(bad)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


MAPS = (
    "import mmap; f = open(sys.argv[1], 'wb+'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096)"
)
SEMAPHORE = (
    "import _multiprocessing, os; s = _multiprocessing.SemLock(1, 1, 1, '/' + "
    "os.path.basename(sys.argv[1])[4:], False)"
)
"""As a library's: mapped before it has its name."""


@pytest.mark.parametrize("make", [MAPS, SEMAPHORE])
def test_shared_memory_of_the_dead_is_removed_and_of_the_living_kept(make: str) -> None:
    code = f"import sys, time\n{make}\nprint('up', flush=True); time.sleep(600)"
    path = Path(f"/dev/shm/sem.atropos-test-{os.getpid()}")
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, str(path)], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        assert procfs.mapped_by(child.pid) == {str(path)}
        assert procfs.remove_unused([str(path)]) == [] and path.exists()
        child.kill()
        child.wait()
        assert procfs.remove_unused([str(path)]) == [str(path)] and not path.exists()
    finally:
        child.kill()
        child.wait()
        path.unlink(missing_ok=True)
