"""The control socket: the client against a real supervisor."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from atropos_common.protocol.control import CommandRequest, Phase, Role, RunStatus, Snapshot, State
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import CommandRecord, parse_line
from atropos_common.system.run_dir import RunDir
from atropos_tui.supervisor.client import ControlClient, NoSupervisor, Refused, socket_path
from atropos_tui.supervisor.journal.store import RunInUseError
from atropos_tui.supervisor.runner import run_stack
from tests.support.harness import part, python, ready, script


async def test_status_measures_the_whole_set(launch: Any, tmp_path: Path) -> None:
    burner = (
        "import os,time\nprint('up',flush=True)\nif os.fork(): time.sleep(600)\nwhile True: pass"
    )
    async with launch(
        part("burner", python(burner), probes=ready(), port=4),
        part("waits", depends_on={"burner": "completed"}),
    ) as running:
        await running.until("burner", State.HEALTHY)
        client = running.client
        first = await client.status()
        assert isinstance(first, RunStatus)
        assert (first.phase, first.exit_code, first.supervisor_pid) == (
            Phase.STARTING,
            None,
            os.getpid(),
        )
        row, waits = first.components
        assert len(row.pids) == 2
        assert row.pid in row.pids
        assert row.memory_bytes is not None
        assert 2_000_000 < row.memory_bytes < 60_000_000
        assert (row.port, row.attempt, row.healthy) == (4, 1, True)
        assert waits.waiting_for == "burner to be completed (it is healthy)"
        assert (waits.pid, waits.memory_bytes, waits.cpu_percent) == (None, None, None)
        cpu, until = None, time.monotonic() + 10
        while cpu is None and time.monotonic() < until:
            await asyncio.sleep(0.5)
            cpu = (await client.status()).components[0].cpu_percent
        assert cpu is not None
        assert 20 < cpu < 130


async def test_snapshot_and_live_without_gap_or_duplicate(launch: Any) -> None:
    """Ten subscribers join at different moments of a busy run; each sees exactly what the file
    holds."""
    busy = [
        part(
            f"b{number}",
            python("pass"),
            depends_on={f"b{number - 1}": "completed"} if number else {},
        )
        for number in range(15)
    ]
    gate = part("last", python("pass"), ends_run=True, depends_on={"b14": "completed"})

    async def listen(running: Any, records: int) -> tuple[int, list[int]]:
        while len(running.records) < records:
            await asyncio.sleep(0.001)
        async with ControlClient(running.run.root) as client:
            stream = client.events()
            snapshot = await anext(stream)
            assert isinstance(snapshot, Snapshot)
            return snapshot.status.seq, [
                item.seq async for item in stream if isinstance(item, Record)
            ]

    async with launch(*busy, gate) as running:
        await running.answers()
        seen = await asyncio.gather(*(listen(running, number * 4) for number in range(10)))
        assert await running.end() == 0
        last = running.records[-1].seq
        assert len({seq for seq, _ in seen}) > 2, "they should have joined at different moments"
        for snapshot_seq, after in seen:
            assert after == list(range(snapshot_seq + 1, last + 1))


async def test_events_after_a_known_record_brings_the_missed_ones(launch: Any) -> None:
    async with launch(part("one"), part("two")) as running:
        await running.until("two", State.HEALTHY)
        client = await running.answers()
        everything = client.events(after=-1)
        assert isinstance(await anext(everything), Snapshot)
        assert (await anext(everything)).seq == 0  # type: ignore[union-attr]
        await everything.aclose()
        stream = client.events(after=1)
        snapshot = await anext(stream)
        assert isinstance(snapshot, Snapshot)
        missed = [await anext(stream) for _ in range(snapshot.status.seq - 1)]
        assert [item.seq for item in missed if isinstance(item, Record)] == list(
            range(2, snapshot.status.seq + 1)
        )
        await client.command(CommandRequest(action="stop", component="one"))
        following = await anext(stream)
        assert isinstance(following, CommandRecord)
        assert following.seq == snapshot.status.seq + 1
        await stream.aclose()


@pytest.mark.parametrize(
    ("request_", "error", "fix", "status"),
    [
        (
            CommandRequest(action="restart", component="nobody"),
            "no component 'nobody'",
            "one of: up, down-by-hand",
            404,
        ),
        (CommandRequest(action="stop"), "stop needs a component", "one of", 422),
        (CommandRequest(action="restart", component=""), "restart needs a comp", "one of", 422),
        (
            CommandRequest(action="start", component="up"),
            "up is healthy already",
            "use: restart up",
            409,
        ),
        (
            CommandRequest(action="stop", component="down-by-hand"),
            "is stopped already",
            "nothing to do",
            409,
        ),
        (
            CommandRequest(action="kill", component="down-by-hand"),
            "has no process",
            "use: stop",
            409,
        ),
    ],
)
async def test_refusals_say_why_and_what_instead(
    launch: Any, request_: CommandRequest, error: str, fix: str, status: int
) -> None:
    async with launch(part("up"), part("down-by-hand")) as running:
        client = await running.answers()
        await running.until("down-by-hand", State.HEALTHY)
        await client.command(CommandRequest(action="stop", component="down-by-hand"))
        await running.until("down-by-hand", State.STOPPED)
        with pytest.raises(Refused) as caught:
            await client.command(request_)
        assert error in caught.value.error
        assert fix in caught.value.fix
        assert caught.value.status == status
        refused = [
            r for r in running.records if isinstance(r, CommandRecord) and r.status == "refused"
        ]
        assert len(refused) == 1


@pytest.mark.launchers("direct")
async def test_a_restart_within_a_restart_is_refused_but_stop_wins(
    launch: Any, tmp_path: Path
) -> None:
    slow = part("slow", script("stubborn", tmp_path / "pids"), stop={"grace_s": 0.5})
    async with launch(slow) as running:
        client = await running.answers()
        await running.until("slow", State.HEALTHY)
        while not (tmp_path / "pids").exists():
            await asyncio.sleep(0.01)
        first = await client.command(CommandRequest(action="restart", component="slow"))
        await running.until("slow", State.STOPPING)
        with pytest.raises(Refused, match=f"part of restart slow \\({first.command_id}\\)"):
            await client.command(CommandRequest(action="restart", component="slow"))
        assert (await client.command_status(first.command_id)).status == "running"
        await client.command(CommandRequest(action="kill", component="slow"))
        await running.until("slow", State.HEALTHY, attempt=2)


async def test_recipe_changes_nothing(launch: Any) -> None:
    engine = part("engine", restart_with=["trainer"])
    async with launch(engine, part("trainer")) as running:
        client = await running.answers()
        await running.until("trainer", State.HEALTHY)
        count = len(running.records)
        found = await client.recipe("restart", "engine")
        assert (found.stop, found.start) == (["trainer", "engine"], ["engine", "trainer"])
        assert (await client.recipe("down")).stop == ["trainer", "engine"]
        with pytest.raises(Refused, match="no component"):
            await client.recipe("restart", "ghost")
        assert len(running.records) == count


async def test_wait(launch: Any) -> None:
    slow = part(
        "slow",
        python("import time; time.sleep(.4); print('up',flush=True); time.sleep(600)"),
        probes=ready(),
    )
    last = part(
        "last", python("import time; time.sleep(.3)"), depends_on={"slow": "healthy"}, ends_run=True
    )
    async with launch(slow, last) as running:
        client = await running.answers()
        late = await client.wait("ready", timeout=0.05)
        assert (late.outcome, "last is pending, waiting for slow" in late.detail) == (
            "timeout",
            True,
        )
        with pytest.raises(Refused, match="nothing called"):
            await client.wait("nonsense")
        with pytest.raises(Refused, match="timeout must be a number"):
            await asyncio.wait_for(
                client._request("GET", "/wait", params={"for": "done", "timeout": "nan"}), 5
            )
        assert (await client.wait("slow", timeout=10)).outcome == "reached"
        assert (await client.wait("ready", timeout=10)).outcome == "reached"
        assert (await client.status()).phase is Phase.RUNNING
        done = await client.wait("done")
        assert (done.outcome, done.detail) == ("reached", "exit code 0: last finished")
        assert running.run.result_json.exists(), "the result is written before anyone is told"


async def test_wait_becomes_impossible(launch: Any) -> None:
    breaks = part(
        "breaks", python("import time; time.sleep(.3); raise SystemExit(1)"), probes=ready()
    )
    async with launch(breaks) as running:
        client = await running.answers()
        found = await asyncio.gather(
            client.wait("breaks"), client.wait("ready"), client.wait("done")
        )
        assert [one.outcome for one in found] == ["impossible"] * 3
        assert "breaks failed: exit code 1" in found[0].detail
        assert await running.end() == 3


@pytest.mark.launchers("direct")
async def test_down_with_a_timeout_kills_what_is_left(launch: Any, tmp_path: Path) -> None:
    deaf = part("deaf", script("stubborn", tmp_path / "pids"), stop={"grace_s": 60})
    async with launch(deaf) as running:
        client = await running.answers()
        while not (tmp_path / "pids").exists():
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await client.command(CommandRequest(action="down", timeout_s=0.3))
        assert await running.end() == 130
        assert time.monotonic() - began < 5


async def test_nobody_home(tmp_path: Path, launch: Any) -> None:
    with pytest.raises(NoSupervisor):
        await ControlClient(tmp_path).status()
    (tmp_path / "control.sock").symlink_to(tmp_path / "gone.sock")
    with pytest.raises(NoSupervisor):
        await ControlClient(tmp_path).status()
    async with launch(part("brief", python("pass"))) as running:
        assert await running.end() == 0
        with pytest.raises(NoSupervisor):
            await running.client.status()
        with pytest.raises(NoSupervisor):
            await anext(running.client.events())


def test_a_time_limit_that_is_no_number_is_no_command() -> None:
    for wrong in ("NaN", "Infinity"):
        with pytest.raises(ValidationError):
            CommandRequest.model_validate_json(f'{{"action": "down", "timeout_s": {wrong}}}')


async def test_a_name_of_megabytes_is_not_journaled_and_a_larger_body_not_read(launch: Any) -> None:
    async with launch(part("one")) as running:
        await running.until("one", State.HEALTHY)
        await running.answers()
        transport = httpx.AsyncHTTPTransport(uds=str(running.run.control_sock.resolve()))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            for size, status in ((300, 422), (900_000, 422), (3_000_000, 413)):
                answer = await http.post(
                    "/commands", json={"action": "stop", "component": "x" * size}
                )
                assert answer.status_code == status, answer.text
                assert len(answer.content) < 1000
        assert running.run.supervisor_jsonl.stat().st_size < 100_000


async def test_the_socket_is_private_and_short_however_long_the_run_directory(
    launch: Any, tmp_path: Path
) -> None:
    async with launch(part("one")) as running:
        await running.answers()
        target = running.run.control_sock.readlink()
        assert stat.S_IMODE(target.stat().st_mode) == 0o600
        assert stat.S_IMODE(target.parent.stat().st_mode) == 0o700
        deep = tmp_path / ("x" * 120) / ("y" * 120)
        assert len(str(socket_path(RunDir(deep)))) < 108


async def test_two_supervisors_do_not_share_a_run_directory(launch: Any) -> None:
    async with launch(part("one")) as running:
        await running.until("one", State.HEALTHY)
        with pytest.raises(RunInUseError, match="another supervisor"):
            await run_stack(running.stack)
        assert (await running.client.status()).components[0].state is State.HEALTHY


@pytest.mark.launchers("direct")
async def test_secrets_go_only_where_they_are_needed(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = ["HF_TOKEN", "JUDGE_API_KEY", "WANDB_API_KEY"]
    for name in secrets:
        monkeypatch.setenv(name, "hush-hush")
    code = (
        "import os,time\nprint(*sorted(k for k in os.environ if 'TOKEN' in k or 'API_KEY' in k))\n"
        "print('up',flush=True); time.sleep(600)"
    )
    roles = [Role.API, Role.ENGINE, Role.TRAINER, Role.ENV]
    parts = [part(role.value, python(code), role=role, probes=ready()) for role in roles]
    parts[0].env["JUDGE_API_KEY"] = "${JUDGE_API_KEY}"
    async with launch(*parts) as running:
        got = {}
        for role in roles:
            await running.until(role.value, State.HEALTHY)
            got[role] = [line.split() for line in running.logs(role.value) if line != "up"][-1]
    assert got == {
        Role.API: ["ATROPOS_TOKEN", "JUDGE_API_KEY"],  # the one that its profile names
        Role.ENGINE: ["ATROPOS_TOKEN", "HF_TOKEN"],
        Role.TRAINER: ["ATROPOS_TOKEN", "HF_TOKEN", "WANDB_API_KEY"],
        Role.ENV: secrets,
    }


async def test_logs_and_environment_of_a_component(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_OUTSIDE", "seen")
    code = (
        "import os,time\n"
        "for k in sorted(os.environ):\n"
        "    if 'ATROPOS' in k or k in ('MINE','PYTHONUNBUFFERED'): print(k, os.environ[k])\n"
        "print('up',flush=True); time.sleep(600)"
    )
    async with launch(
        part("one", python(code), env={"MINE": "<${FROM_OUTSIDE}>"}, probes=ready())
    ) as running:
        await running.until("one", State.HEALTHY)
        found = dict(line.split(" ", 1) for line in running.logs("one") if " " in line)
        assert found == {
            "ATROPOS_ATTEMPT": "1",
            "ATROPOS_COMPONENT": "one",
            "ATROPOS_CONTROL_SOCKET": str(running.run.control_sock.readlink()),
            "ATROPOS_RUN_DIR": str(running.run.root),
            "ATROPOS_RUN_ID": running.stack.run_id,
            "MINE": "<seen>",
            "PYTHONUNBUFFERED": "1",
        }


async def test_flood_is_complete_on_disk_while_commands_are_answered(launch: Any) -> None:
    """Two children print 100,000 lines each as fast as they can; the client asks all the while."""
    floods = [part(f"flood{number}", script("flood", 100_000, "stay")) for number in range(2)]
    async with launch(*floods) as running:
        client = await running.answers()
        slowest = 0.0
        logs = [running.run.log(f"flood{number}", 1) for number in range(2)]

        def size() -> int:
            return sum(log.stat().st_size for log in logs if log.exists())

        while size() < 2 * 100_000 * len("line 000000000 of the flood\n"):
            began = time.monotonic()
            await client.recipe("restart", "flood0")
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 0.5
        for log in logs:
            lines = log.read_bytes().splitlines()
            assert lines == [b"line %09d of the flood" % number for number in range(100_000)]


@pytest.mark.launchers("direct")
async def test_a_resumed_run_goes_on_counting(launch: Any) -> None:
    """In the same directory: attempts, logs and sequence of the earlier run stay."""
    one = part("one", python("print('said'); import time; time.sleep(.1)"))
    async with launch(one) as first:
        assert await first.end() == 0
    stream = [record.seq for record in first.records]
    code = await run_stack(first.stack, on_event=first.records.append)
    assert code == 0
    assert [record.seq for record in first.records] == list(range(2 * len(stream)))
    assert [row.attempt for row in first.states("one") if row.new == "starting"] == [1, 2]
    assert first.run.log("one", 1).read_text() == first.run.log("one", 2).read_text() == "said\n"


def test_events_file_is_strict_json(tmp_path: Path) -> None:
    from atropos_common.protocol.records import ProbeRecord
    from atropos_tui.supervisor.journal.store import Journal

    journal = Journal(tmp_path / "supervisor.jsonl", "run")
    journal.append(
        ProbeRecord(
            probe="startup", ok=True, latency_s=float("nan"), detail="\x1b]52;c;x\x07\n\u2028"
        )
    )
    journal.close()
    (line,) = (tmp_path / "supervisor.jsonl").read_text().split("\n")[:-1]
    assert "NaN" in line
    assert parse_line(line).run_id == "run"
