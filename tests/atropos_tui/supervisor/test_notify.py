"""`[notify]` over real sockets: the posted messages, and that no bad server delays the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.control import CommandRequest, Phase, RunStatus
from atropos_common.protocol.records import DiagnosisRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.profile.plan import redacted
from atropos_tui.profile.spec import ComponentSpec, NotifyPolicy, StackSpec
from atropos_tui.supervisor import notify
from atropos_tui.supervisor.journal.store import Journal, RunResult, Store
from atropos_tui.ui.terminal import Bell
from tests.support.harness import Running, check_history, part, python

SECRET = "T000-B000-averysecretpath"
FAILS = python("import sys; print('boom <!channel>', flush=True); sys.exit(7)")


class Receiver:
    """A webhook on a real port: `answers` gives the status of each try, the last one for all
    further ones."""

    def __init__(self, *answers: int, delay_s: float = 0.0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        outer, left = self, list(answers or (204,))

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.bodies.append(json.loads(body))
                outer.paths.append(self.path)
                time.sleep(delay_s)
                with contextlib.suppress(OSError):
                    self.send_response(left.pop(0) if len(left) > 1 else left[0])
                    self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                    self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hooks/{SECRET}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Callable[..., Receiver]]:
    started: list[Receiver] = []

    def start(*answers: int, delay_s: float = 0.0) -> Receiver:
        started.append(Receiver(*answers, delay_s=delay_s))
        return started[-1]

    yield start
    for one in started:
        one.server.shutdown()
        one.server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


def stack_of(tmp_path: Path, policy: NotifyPolicy, *components: ComponentSpec) -> StackSpec:
    run_id = f"notify-{os.getpid()}-{time.monotonic_ns()}"
    run_dir = str(tmp_path / "run")
    return StackSpec(
        run_id=run_id,
        name="weekly",
        mode="none",
        run_dir=run_dir,
        components=list(components),
        notify=policy,
    )


async def run_to_its_end(stack: StackSpec) -> tuple[Running, int, float]:
    """The run, its exit code, and the seconds between its result and its end."""
    running = Running(stack)
    code = await running.end(60)
    after = time.time() - running.result().ended_at
    await running.client.close()
    check_history(running)
    return running, code, after


def undelivered(running: Running) -> list[DiagnosisRecord]:
    rows = [record for record in running.records if isinstance(record, DiagnosisRecord)]
    return [row for row in rows if "notif" in row.title]


async def test_a_failure_is_posted_once_with_everything_a_reader_needs(
    tmp_path: Path, receiver: Any
) -> None:
    hook = receiver()
    stack = stack_of(
        tmp_path, NotifyPolicy(webhook=hook.url), part("trainer", FAILS), part("other")
    )
    running, code, _ = await run_to_its_end(stack)
    assert code == 3 and undelivered(running) == []
    (body,) = hook.bodies
    expected = {
        "run_id": stack.run_id,
        "name": "weekly",
        "event": "failed",
        "component": "trainer",
        "exit_code": 3,
    }
    assert {key: body[key] for key in expected} == expected
    assert (
        body["run_dir"] == stack.run_dir and body["host"] and abs(body["time"] - time.time()) < 30
    )
    assert (
        "exit code 7" in body["reason"]
        and "exit code 7" in body["text"]
        and "exit code 7" in body["content"]
    )
    assert "<!channel>" not in body["text"], "a log line must not call everybody on Slack"
    assert body["allowed_mentions"] == {"parse": []}


async def test_done_is_told_and_a_stop_by_hand_is_not(tmp_path: Path, receiver: Any) -> None:
    hook = receiver()
    quick = part("trainer", python("pass"), ends_run=True)
    _, code, _ = await run_to_its_end(
        stack_of(tmp_path / "a", NotifyPolicy(webhook=hook.url), quick)
    )
    assert code == 0 and [body["event"] for body in hook.bodies] == ["done"]
    assert hook.bodies[0]["exit_code"] == 0
    only = NotifyPolicy(webhook=hook.url, on=("failed",))
    await run_to_its_end(stack_of(tmp_path / "b", only, quick))
    assert len(hook.bodies) == 1, "`on` leaves it out"
    running = Running(stack_of(tmp_path / "c", NotifyPolicy(webhook=hook.url), part("one")))
    await running.until("one", "healthy")
    await (await running.answers()).command(CommandRequest(action="down"))
    assert await running.end() == 130
    await running.client.close()
    assert len(hook.bodies) == 1


async def test_a_server_that_recovers_gets_it_on_the_third_try(
    tmp_path: Path, receiver: Any
) -> None:
    hook = receiver(500, 503, 200)
    running, _, after = await run_to_its_end(
        stack_of(tmp_path, NotifyPolicy(webhook=hook.url), part("x", FAILS))
    )
    assert len(hook.bodies) == 3 and undelivered(running) == []
    assert after < 5


@pytest.mark.parametrize(("answer", "tries"), [(500, 3), (404, 1), (302, 1)])
async def test_a_refusal_is_a_diagnosis(
    tmp_path: Path, receiver: Any, answer: int, tries: int
) -> None:
    """A redirect is not followed: it would carry the report to somewhere else."""
    hook = receiver(answer)
    running, code, after = await run_to_its_end(
        stack_of(tmp_path, NotifyPolicy(webhook=hook.url), part("x", FAILS))
    )
    (said,) = undelivered(running)
    assert code == 3 and str(answer) in said.evidence and said.fix
    assert len(hook.bodies) == tries and after < 5


async def test_a_dead_server_costs_two_seconds_and_no_exit_code(
    tmp_path: Path, free_port: int
) -> None:
    url = f"http://127.0.0.1:{free_port}/{SECRET}"
    running, code, after = await run_to_its_end(
        stack_of(tmp_path, NotifyPolicy(webhook=url), part("x", FAILS))
    )
    (said,) = undelivered(running)
    assert code == 3 and "ConnectError" in said.evidence and after < 4


async def test_a_server_that_never_answers_is_left_after_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drips its answer byte by byte, so that no time limit of a single read is ever reached."""
    monkeypatch.setattr(notify, "END_PATIENCE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        over = threading.Event()

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                while not over.wait(0.05):
                    connection.sendall(b"H")

        threading.Thread(target=drip, daemon=True).start()
        running, code, after = await run_to_its_end(
            stack_of(tmp_path, NotifyPolicy(webhook=url), part("x", FAILS))
        )
        over.set()
    (said,) = undelivered(running)
    assert code == 3 and "no answer within 1 s" in said.evidence
    assert 0.9 < after < 3


async def test_an_answer_that_drips_is_given_up_at_every_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notify, "TRY_S", 0.3)
    monkeypatch.setattr(notify, "PAUSES_S", (0.01, 0.01))
    tries = 0

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        with contextlib.suppress(OSError):
            while True:
                writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(0.02)

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        with pytest.raises(notify.DeliveryError, match=r"no answer within 0\.3 s"):
            await notify.post(url, {})
    assert tries == 3


async def test_the_run_is_not_held_up_while_it_is_told(tmp_path: Path, receiver: Any) -> None:
    """The POST leaves while the stack is still being stopped."""
    hook = receiver(delay_s=1.0)
    deaf = part(
        "deaf",
        python(
            "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', "
            "flush=True); time.sleep(60)"
        ),
    )
    slow = deaf.model_copy(update={"stop": deaf.stop.model_copy(update={"grace_s": 1.5})})
    fails = python("import sys, time; time.sleep(0.5); sys.exit(7)")
    stack = stack_of(tmp_path, NotifyPolicy(webhook=hook.url), slow, part("x", fails))
    running, _, after = await run_to_its_end(stack)
    assert len(hook.bodies) == 1 and undelivered(running) == []
    assert hook.bodies[0]["time"] < running.result().ended_at - 1 and after < 0.5


async def test_the_address_is_written_nowhere(
    tmp_path: Path, receiver: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hook = receiver(500)
    monkeypatch.setenv("MY_HOOK", hook.url)
    stack = stack_of(tmp_path, NotifyPolicy(webhook="${MY_HOOK}"), part("x", FAILS))
    with caplog.at_level(logging.DEBUG):
        running, _, _ = await run_to_its_end(stack)
    assert hook.paths[0].endswith(SECRET), "it was resolved"
    written = "".join(
        path.read_text(errors="replace") for path in running.run.root.rglob("*") if path.is_file()
    )
    assert SECRET not in written + caplog.text and len(undelivered(running)) == 1
    plain = stack_of(tmp_path, NotifyPolicy(webhook=hook.url), part("x"))
    assert SECRET not in json.dumps(redacted(plain)) and "${MY_HOOK}" in json.dumps(redacted(stack))


@pytest.mark.parametrize(
    ("webhook", "evidence"), [("${NO_SUCH_HOOK}", "NO_SUCH_HOOK is not set"), ("ftp://x", "http")]
)
async def test_an_address_that_cannot_be_used_is_said_at_the_start(
    tmp_path: Path, webhook: str, evidence: str
) -> None:
    stack = stack_of(tmp_path, NotifyPolicy(webhook=webhook), part("x", FAILS))
    running, code, _ = await run_to_its_end(stack)
    first = running.records[0]
    assert isinstance(first, DiagnosisRecord) and evidence in first.evidence and first.fix
    assert (first.rule, first.severity, first.component) == ("not_notified", "advice", None)
    assert code == 3


def mismatch() -> DiagnosisRecord:
    return DiagnosisRecord.model_validate(
        {
            "component": "trainer",
            "title": "LogProb Alignment: MISMATCH",
            "evidence": "0.9",
            "rule": "alignment_mismatch",
        }
    )


async def test_a_mismatch_is_told_at_once_but_not_at_every_step(
    tmp_path: Path, receiver: Any
) -> None:
    hook = receiver()
    stack = stack_of(tmp_path, NotifyPolicy(webhook=hook.url), part("trainer"))
    RunDir(tmp_path / "run").create()
    with contextlib.closing(
        Journal(tmp_path / "run" / "supervisor.jsonl", stack.run_id)
    ) as journal:
        store = Store(stack, journal)
        notifier = notify.Notifier(stack, store, lambda: None)
        await asyncio.sleep(0)
        store.emit(DiagnosisRecord(component="trainer", title="another thing"))
        for _ in range(5):
            store.emit(mismatch())
        async with asyncio.timeout(10):
            while not hook.bodies:
                await asyncio.sleep(0.01)
        await notifier.close(RunResult(exit_code=130, reason="by hand"))
    assert [(body["event"], body["component"], body["exit_code"]) for body in hook.bodies] == [
        ("mismatch", "trainer", None)
    ]


def test_the_screen_rings_for_what_it_sees_happen(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    stack = stack_of(tmp_path, NotifyPolicy(bell=True), part("trainer"))
    run.plan_json.write_text(json.dumps(redacted(stack)))
    fresh, old = (mismatch().model_copy(update={"time": when}) for when in (1000.0, 900.0))
    assert Bell(run).at_records([old, fresh], now=1001.0) and not Bell(run).at_records(
        [old], now=1001.0
    )
    running = RunStatus(
        run_id="r",
        name="n",
        mode="none",
        run_dir=str(tmp_path),
        phase=Phase.RUNNING,
        started_at=0.0,
        components=[],
    )
    ended = running.model_copy(update={"phase": Phase.ENDED, "exit_code": 3})
    by_hand = ended.model_copy(update={"exit_code": 130})
    for statuses, expected in (
        ([running, ended, ended], [False, True, False]),
        ([ended], [False]),
        ([running, by_hand], [False, False]),
    ):
        bell = Bell(run)
        assert [bell.at_status(status) for status in statuses] == expected
    run.plan_json.write_text("{}")
    silent = Bell(run)
    assert not silent.at_status(running) and not silent.at_status(ended)


@pytest.mark.parametrize(("bell", "rings"), [(True, 1), (False, 0)])
def test_without_a_screen_the_terminal_rings(tmp_path: Path, bell: bool, rings: int) -> None:
    stack = stack_of(tmp_path, NotifyPolicy(bell=bell), part("x", FAILS))
    ours, theirs = pty.openpty()
    try:
        command = [sys.executable, "-m", "atropos_tui.supervisor"]
        subprocess.run(
            command, input=stack.model_dump_json().encode(), stderr=theirs, timeout=60, check=False
        )
        os.write(theirs, b"|")
        said = b""
        while not said.endswith(b"|"):
            said += os.read(ours, 1000)
    finally:
        os.close(ours)
        os.close(theirs)
    assert said.count(b"\a") == rings, said
