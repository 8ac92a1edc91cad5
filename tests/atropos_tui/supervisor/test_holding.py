"""A run holds its servers' ports: no other user gets one during a kill, a restart, or a load."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.control import CommandRequest, State
from atropos_common.protocol.records import DiagnosisRecord
from atropos_tui.profile.plan import stack_of
from atropos_tui.profile.ports import is_free
from atropos_tui.profile.profile import parse_profile
from atropos_tui.profile.site import make_site
from atropos_tui.profile.spec import ComponentSpec, HttpCheck, RestartPolicy
from tests.support.harness import part, python, ready, script
from tests.support.other_user import as_another_user, needs_another_user, other_user, squat

OFTEN = RestartPolicy(policy="always", backoff_s=0.02, max_backoff_s=0.05, max_restarts=20)


def engine(port: int, **fields: Any) -> ComponentSpec:
    """A server on a port that is held for it."""
    health = ready(HttpCheck(url=f"http://127.0.0.1:{port}/"))
    command = script("held_server", port, 0.2)
    return part(
        "engine", command, port=port, port_held=True, probes=health, restart=OFTEN, **fields
    )


@needs_another_user
async def test_no_other_user_gets_the_port_of_an_engine_that_is_killed(
    launch: Any, free_port: int
) -> None:
    async with launch(
        part("first", python("import time; time.sleep(.3)")), engine(free_port)
    ) as running:
        await running.answers()
        with other_user(lambda: squat(free_port, 6.0)) as waiting:
            attempt = 0
            while waiting.waits():
                attempt += 1
                row = await running.until("engine", State.HEALTHY, attempt)
                os.kill(row.pid, signal.SIGKILL)
            assert waiting.said() == []
        assert attempt > 2
        await running.until("engine", State.HEALTHY, attempt + 1)
        running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)
    assert as_another_user(lambda: squat(free_port, 2.0)) != [], "with the run it is free again"


@pytest.mark.slow
@needs_another_user
async def test_no_other_user_gets_the_port_of_run_api(
    launch: Any, free_port: int, tmp_path: Path
) -> None:
    """The very component of a plan; without its port held, another user has it after the first
    kill."""
    data = {
        "name": "p",
        "model": "/models/m",
        "env": {"module": "json"},
        "api": {"port": free_port},
    }
    planned = stack_of(
        make_site(parse_profile(data, "p.toml"), tmp_path / "run", run_id="r")
    ).component("api")
    assert planned is not None
    api = planned.model_copy(update={"restart": OFTEN, "restart_with": []})
    async with launch(api) as running:
        row = await running.until("api", State.HEALTHY, 1)
        with other_user(lambda: squat(free_port, 3.0)) as waiting:
            os.kill(row.pid, signal.SIGKILL)
            assert await asyncio.to_thread(waiting.said) == []
        await running.until("api", State.HEALTHY, 2)


async def test_a_port_is_held_before_the_first_start_and_while_it_rests(
    launch: Any, free_port: int
) -> None:
    gate = part(
        "gate", python("import time; time.sleep(600)"), probes=ready()
    )  # never healthy: it prints nothing
    async with launch(gate, engine(free_port, depends_on={"gate": "healthy"})) as running:
        await running.until("gate", State.STARTING)
        assert not is_free(free_port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", free_port))
    assert is_free(free_port)


async def test_restarts_by_hand_find_the_port_again(launch: Any, free_port: int) -> None:
    async with launch(engine(free_port)) as running:
        for attempt in (1, 2, 3):
            await running.until("engine", State.HEALTHY, attempt)
            with socket.create_connection(
                ("127.0.0.1", free_port)
            ):  # its end lingers in the kernel
                await (await running.answers()).command(
                    CommandRequest(action="restart", component="engine")
                )
                await running.until("engine", State.STARTING, attempt + 1)


async def test_the_descriptor_goes_to_no_component(launch: Any, free_port: int) -> None:
    async with launch(engine(free_port), part("other")) as running:
        other = await running.until("other", State.HEALTHY)
        await running.until("engine", State.HEALTHY)
        links = [str(link.readlink()) for link in Path(f"/proc/{other.pid}/fd").iterdir()]
        assert not [link for link in links if link.startswith("socket:")]
        assert b"ATROPOS_HELD_PORT" not in Path(f"/proc/{other.pid}/environ").read_bytes()


async def test_a_port_that_somebody_else_has_is_said_as_ever(launch: Any, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        async with launch(engine(free_port)) as running:
            assert await running.end() == 3
            said = [record for record in running.records if isinstance(record, DiagnosisRecord)]
            assert [record.rule for record in said] == ["port_in_use"]
            assert f"(pid {os.getpid()})" in said[0].evidence
