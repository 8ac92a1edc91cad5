"""Order and gates: dependencies, parallel starts, and a gate that never opens."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.control import CommandRequest, Role, State
from atropos_tui.profile.spec import (
    FileCheck,
    HttpCheck,
    LogCheck,
    Probe,
    Probes,
    StackError,
    TcpCheck,
)
from tests.support.harness import Running, part, python, ready, script


def when(running: Running, component: str, state: str) -> float:
    return next(row.time for row in running.states(component) if row.new == state)


@pytest.mark.launchers("direct", "remote")
async def test_conditions_order_starts_and_the_end_is_reversed(launch: Any) -> None:
    prepare = part("prepare", python("import time; time.sleep(0.2)"), role=Role.PREPARE)
    base = part("base", probes=ready(), depends_on={"prepare": "completed"})
    near = part("near", depends_on={"base": "started"})
    last = part(
        "last",
        python("import time; time.sleep(0.2)"),
        depends_on={"base": "healthy", "near": "started"},
        ends_run=True,
    )
    async with launch(prepare, base, near, last) as running:
        assert await running.end() == 0
        assert when(running, "base", "starting") >= when(running, "prepare", "completed")
        assert when(running, "near", "starting") < when(running, "base", "healthy")
        assert when(running, "last", "starting") >= when(running, "base", "healthy")
        assert running.path("prepare") == ["starting", "completed"]
        assert running.path("last") == ["starting", "healthy", "completed"]
        ends = [row.component for row in running.states() if row.new == "stopped"]
        assert ends == ["near", "base"]
        assert when(running, "base", "stopping") >= when(running, "near", "stopped")


async def test_independent_parts_start_side_by_side(launch: Any) -> None:
    slow = "import time; time.sleep(0.4); print('up', flush=True); time.sleep(600)"
    parts = [part(f"p{number}", python(slow), probes=ready()) for number in range(4)]
    last = part(
        "last", python("pass"), depends_on={p.name: "healthy" for p in parts}, ends_run=True
    )
    async with launch(*parts, last) as running:
        began = time.monotonic()
        assert await running.end() == 0
        assert (
            time.monotonic() - began < 1.6 + 0.4
        )  # one after the other would take 1.6 s to become healthy
        starts = [when(running, p.name, "starting") for p in parts]
        assert max(starts) < min(when(running, p.name, "healthy") for p in parts)


@pytest.mark.launchers("direct")
async def test_a_step_whose_result_exists_is_skipped(launch: Any, tmp_path: Path) -> None:
    made = tmp_path / "model"
    step = part(
        "step",
        python("open(__import__('sys').argv[1],'w')", made),
        creates=str(made),
        role=Role.PREPARE,
    )
    async with launch(step) as running:
        assert await running.end() == 0
        assert running.path("step") == ["starting", "completed"]
    (running.run.root / "supervisor.jsonl").unlink()
    async with launch(step) as running:
        assert await running.end() == 0
        assert running.path("step") == ["completed"]
        assert f"{made} exists" in running.states("step")[0].reason


async def test_never_ready_times_out_with_exit_4(launch: Any) -> None:
    quiet = part(
        "quiet",
        python("print('busy',flush=True); import time; time.sleep(600)"),
        probes=ready(),
        start_timeout_s=0.4,
    )
    after = part("after", depends_on={"quiet": "healthy"})
    async with launch(quiet, after) as running:
        assert await running.end() == 4
        assert running.path("quiet") == ["starting", "stopping", "failed"]
        assert running.path("after") == ["stopped"]
        result = running.result()
        assert result.component == "quiet"
        assert result.last_lines == ["busy"]
        assert "no line 'up' yet" in result.reason


async def test_a_one_shot_step_that_hangs_times_out(launch: Any) -> None:
    async with launch(part("stuck", role=Role.PREPARE, start_timeout_s=0.3)) as running:
        assert await running.end() == 4
        assert "not done within 0.3 s" in running.result().reason


async def test_all_checks_of_a_probe_must_pass(launch: Any, tmp_path: Path, free_port: int) -> None:
    flag = tmp_path / "flag"
    checks = [
        HttpCheck(url=f"http://127.0.0.1:{free_port}/health"),
        TcpCheck(port=free_port),
        FileCheck(path=str(flag)),
        LogCheck(pattern="^READY"),
    ]
    code = (
        "import sys,time,threading,http.server as h\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "    def log_message(self,*a): pass\n"
        "threading.Thread(target=h.HTTPServer(('127.0.0.1',int(sys.argv[1])),H).serve_forever).start()\n"
        "time.sleep(.2); print('READY',flush=True)"
    )
    server = part(
        "server",
        python(code, free_port),
        port=free_port,
        probes=Probes(readiness=Probe(checks=checks, interval_s=0.02)),
    )
    async with launch(server) as running:
        client = await running.answers()
        found = await client.wait("server", timeout=1.0)
        assert found.outcome == "timeout"
        assert str(flag) in (await client.status()).components[0].waiting_for
        flag.touch()
        assert (await client.wait("server", timeout=10)).outcome == "reached"


@pytest.mark.launchers("direct")
async def test_a_probe_fails_at_once_when_the_process_exits(launch: Any) -> None:
    hopeless = Probes(startup=Probe(checks=[TcpCheck(port=1)], interval_s=30, timeout_s=30))
    async with launch(
        part("brief", python("import time; time.sleep(0.3); raise SystemExit(5)"), probes=hopeless)
    ) as running:
        began = time.monotonic()
        assert await running.end() == 3
        assert time.monotonic() - began < 5


async def test_the_port_of_a_foreign_process_is_not_taken_for_ours(
    launch: Any, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the foreign process would answer our health check, and the component seem healthy."""
    monkeypatch.setattr("atropos_tui.supervisor.component.PORT_PATIENCE_S", 0.3)
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", free_port))
        foreign.listen()
        server = part("server", script("server", free_port, 0, 600), port=free_port)
        async with launch(server) as running:
            assert await running.end() == 3
            assert running.path("server") == ["failed"]

            assert f"port {free_port} is in use" in running.result().reason
            assert f"pid {os.getpid()}" in running.result().reason


@pytest.mark.launchers("direct")
async def test_dependents_wait_for_what_was_stopped_by_hand(launch: Any) -> None:
    base = part(
        "base",
        python("import time; time.sleep(0.3); print('up',flush=True); time.sleep(600)"),
        probes=ready(),
    )
    async with launch(base, part("after", depends_on={"base": "healthy"})) as running:
        client = await running.answers()
        await client.command(CommandRequest(action="stop", component="base"))
        await running.until("base", State.STOPPED)
        rows = {row.name: row for row in (await client.status()).components}
        assert rows["after"].state is State.PENDING
        assert rows["after"].waiting_for == "base to be healthy (it is stopped)"
        await client.command(CommandRequest(action="start", component="base"))
        await running.until("after", State.HEALTHY)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            [part("a", depends_on={"b": "healthy"}), part("b", depends_on={"a": "started"})],
            "circular",
        ),
        ([part("a"), part("a")], "two components"),
        ([part("a", depends_on={"zz": "healthy"})], "'zz'"),
        ([part("../a")], "letters"),
    ],
)
async def test_stacks_that_cannot_run_are_refused(
    launch: Any, parts: list[Any], words: str
) -> None:
    async with launch(*parts) as running:
        with pytest.raises(StackError, match=words):
            await running.task
