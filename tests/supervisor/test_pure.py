"""Parts without processes: the transition table, publish and subscribe."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atropos_common.control import State
from atropos_tui.supervisor import component, procfs
from atropos_tui.supervisor.store import Hub, SubscriberDroppedError


def test_every_state_has_its_row_and_can_be_left_and_reached() -> None:
    assert set(component.TRANSITIONS) == set(State)
    reachable = {State.PENDING}
    while True:
        more = reachable.union(*(component.TRANSITIONS[state] for state in reachable))
        if more == reachable:
            break
        reachable = more
    assert reachable == set(State)
    only_by_command = {state for state, after in component.TRANSITIONS.items() if after == {State.PENDING}}
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
    with pytest.raises(component.IllegalTransitionError, match=f"{old} -> {new}"):
        component.check_step(old, new)


def test_conditions() -> None:
    assert {s for s in State if s.satisfies("completed")} == {State.COMPLETED}
    assert {s for s in State if s.satisfies("healthy")} == {State.HEALTHY, State.COMPLETED}
    assert State.STOPPING not in {s for s in State if s.satisfies("started")}


async def test_snapshot_then_every_later_event() -> None:
    hub: Hub[int] = Hub()
    state = [0]
    for number in range(1, 4):
        state[0] = number
        hub.publish(number)
    snapshot, live = hub.subscribe(lambda: state[0])
    hub.publish(4)
    hub.publish(5)
    hub.close()
    assert snapshot == 3
    assert [event async for event in live] == [4, 5]
    hub.publish(6)
    assert [event async for event in hub.subscribe(lambda: 0)[1]] == []


async def test_a_slow_subscriber_is_dropped_and_told_the_fast_one_loses_nothing() -> None:
    hub: Hub[int] = Hub(limit=10)
    _, slow = hub.subscribe(lambda: None)
    _, fast = hub.subscribe(lambda: None)
    got: list[int] = []

    async def read() -> None:
        async for event in fast:
            got.append(event)

    reader = asyncio.create_task(read())
    for number in range(100):
        hub.publish(number)
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
        "bad = [m for m in sys.modules if m.split('.')[0] in ('textual','torch','vllm','transformers')"
        " or m in ('atropos_tui.profile.sections','atropos_tui.profile.plan','trainer_core.loop')]\n"
        "print(bad)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


MAPS = "import mmap; f = open(sys.argv[1], 'wb+'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096)"
SEMAPHORE = (
    "import _multiprocessing, os; s = _multiprocessing.SemLock(1, 1, 1, '/' + os.path.basename(sys.argv[1])[4:], False)"
)
"""As a library's: mapped before it has its name."""


@pytest.mark.parametrize("make", [MAPS, SEMAPHORE])
def test_shared_memory_of_the_dead_is_removed_and_of_the_living_kept(make: str) -> None:
    code = f"import sys, time\n{make}\nprint('up', flush=True); time.sleep(600)"
    path = Path(f"/dev/shm/sem.atropos-test-{os.getpid()}")
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, str(path)], stdout=subprocess.PIPE)
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
