"""The control client against sockets that misbehave, and requests of another user to the
supervisor."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.control import CommandRequest, Role, State
from atropos_common.protocol.records import (
    CommandRecord,
    ComponentRecord,
    DiagnosisRecord,
    ProbeRecord,
    StateRecord,
)
from atropos_common.system.run_dir import RunDir
from atropos_tui.errors import Exit, UserError
from atropos_tui.profile.spec import HttpCheck, Probe, Probes
from atropos_tui.supervisor import client as client_module
from atropos_tui.supervisor import supervisor as supervisor_module
from atropos_tui.supervisor.client import ControlClient, NoSupervisor, NotAnswering, StreamLost
from atropos_tui.supervisor.journal.tracker import Tracker
from atropos_tui.supervisor.processes import procfs
from tests.support.harness import part, python, ready


@asynccontextmanager
async def listener(run: Path, *, hang: bool) -> AsyncIterator[list[bytes]]:
    """Somebody on the run's socket who reads requests and never answers, or hangs up."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n"))
        if hang:
            await reader.read()
        writer.close()

    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/{RunDir(run).socket_name}"
        server = await asyncio.start_unix_server(serve, address)
        (run / "control.sock").symlink_to(address)
        try:
            yield requests
        finally:
            server.close()


@pytest.mark.parametrize("hang", [True, False])
async def test_who_listens_but_does_not_answer_is_there(
    tmp_path: Path, hang: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CONTROL_TIMEOUT_S", 0.1)
    monkeypatch.setattr(client_module, "RETRY_PAUSE_S", 0.01)
    async with listener(tmp_path, hang=hang) as requests, ControlClient(tmp_path) as client:
        with pytest.raises(NotAnswering) as caught:
            await client.status()
        assert [line.split()[1] for line in requests] == [b"/status"] * client_module.TRIES
        assert not isinstance(caught.value, NoSupervisor | StreamLost)
        assert isinstance(caught.value, UserError) and caught.value.exit_code == Exit.TIMEOUT
        assert "does not answer" in str(caught.value) and "journal.json" in str(caught.value)
        requests.clear()
        with pytest.raises(NotAnswering):
            await client.command(CommandRequest(action="down"))
        assert [line.split()[0] for line in requests].count(b"POST") == 1, (
            "a command must not be given twice"
        )


async def test_a_slow_answer_is_waited_for(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with launch(part("one")) as running:
        await running.until("one", State.HEALTHY)
        await running.client.status()
        http = running.client._connection()
        send, calls = http.request, []

        async def slow(*arguments: Any, **fields: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 1:
                raise client_module.httpx.ReadTimeout("")
            return await send(*arguments, **fields)

        monkeypatch.setattr(http, "request", slow)
        assert (await running.client.status()).components[0].state is State.HEALTHY
        assert len(calls) == 2


async def test_every_record_of_a_component_says_role_and_node(launch: Any) -> None:
    engine = part("one", role=Role.ENGINE, probes=ready())
    dies = part("two", python("raise SystemExit(9)"), role=Role.ENV, depends_on={"one": "healthy"})
    async with launch(engine, dies) as running:
        client = await running.answers()
        await running.until("one", State.HEALTHY)
        await client.command(CommandRequest(action="restart", component="one"))
        assert await running.end() == 3
        found = [record for record in running.records if isinstance(record, ComponentRecord)]
        assert {type(record) for record in found} >= {StateRecord, ProbeRecord, DiagnosisRecord}
        roles = {"one": "engine", "two": "env", None: None}
        assert all(
            (row.role, row.node) == (roles[row.component], os.uname().nodename) for row in found
        ), found


async def test_a_command_says_role_and_node(launch: Any) -> None:
    async with launch(part("one", role=Role.API, probes=ready())) as running:
        client = await running.answers()
        await running.until("one", State.HEALTHY)
        await client.command(CommandRequest(action="restart", component="one"))
        await running.until("one", State.HEALTHY, attempt=2)
        (first, *_) = [record for record in running.records if isinstance(record, CommandRecord)]
        assert (first.component, first.role, first.node) == ("one", "api", os.uname().nodename)


async def test_probes_give_no_secret_to_who_holds_the_port(launch: Any) -> None:
    heads: list[bytes] = []

    async def foreign(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(foreign, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        check = HttpCheck(url=f"http://127.0.0.1:{port}/health")
        one = part(
            "one",
            probes=Probes(readiness=Probe(checks=[check], interval_s=0.02)),
            env={"ATROPOS_TOKEN": "hush"},
        )
        async with launch(one) as running:
            await running.until("one", State.HEALTHY)
    assert heads and not any(b"hush" in head or b"token" in head.lower() for head in heads)


async def test_a_stray_that_cannot_be_killed_does_not_keep_the_result(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ghost = procfs.read(os.getpid())
    assert ghost is not None
    monkeypatch.setattr(supervisor_module, "STRAYS_S", 0.2)
    monkeypatch.setattr(procfs, "send", lambda row, number: None)
    monkeypatch.setattr(Tracker, "strays", lambda self, since: [ghost])
    async with launch(part("brief", python("pass"))) as running:
        assert await running.end(10) == 0
        assert running.result().exit_code == 0
        (found,) = [
            each for each in running.records if isinstance(each, DiagnosisRecord) and not each.over
        ]
        assert (
            found.title == "a process cannot be killed" and f"pid {os.getpid()}" in found.evidence
        )
