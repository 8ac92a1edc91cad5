"""A start that fails twice in the same words is not repeated; one that may succeed later is. Real
children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.control import CommandRequest, Role, State
from atropos_tui.diagnoses import RULES
from atropos_tui.diagnoses.exit_rules import PASSING_RULES, lasting_error
from atropos_tui.diagnoses.roots import is_passing, same_words
from atropos_tui.profile.spec import LogCheck, RestartPolicy, Stage
from atropos_tui.supervisor import restarts
from tests.support.harness import QUICK, part, python, ready

LOG = Path(__file__).parent / "logs/engine_start.log"
HEADS = "AssertionError: num_heads (7) is not divisible by num_kv_heads (2)"
RAISES = "import os, time, sys\nraise ValueError(f'{os.getpid()} at {time.time()}: %s')"
"""The words of an error, among numbers that differ each time."""
SAYS = "import os, sys\nprint(sys.argv[1]); sys.exit(int(sys.argv[2]))"


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal failures are final however soon they come: starts in tests take milliseconds."""
    monkeypatch.setattr(restarts, "ALIKE_S", 0.0)


def raises(words: str) -> list[str]:
    return python(RAISES % words)


async def starts_of(launch: Any, command: list[str], **fields: Any) -> tuple[int, str]:
    """How often it was started until the run gave up, and why it gave up."""
    async with launch(part("x", command, restart=QUICK, **fields)) as running:
        assert await running.end() == 3
        return running.path("x").count("starting"), running.result().reason


@pytest.mark.usefixtures("no_patience")
async def test_the_same_words_twice_are_final(launch: Any) -> None:
    starts, reason = await starts_of(launch, raises("the config has no heads"))
    assert starts == 2
    assert "the start failed twice with the same error, not retried: ValueError: " in reason
    assert "the config has no heads" in reason


@pytest.mark.usefixtures("no_patience")
async def test_an_engine_that_cannot_start_is_started_twice(launch: Any) -> None:
    """With the real lines of one, whose pids and times differ."""
    code = (
        "import os, sys, time, pathlib\n"
        "text = pathlib.Path(sys.argv[1]).read_text()\n"
        "print(text.replace('8925', str(os.getpid())).replace('13:28:28', "
        "time.strftime('%H:%M:%S')))\n"
        "sys.exit(1)"
    )
    command = python(code, LOG)
    starts, reason = await starts_of(
        launch, command, role=Role.ENGINE, probes=ready(LogCheck(pattern="^ready after"))
    )
    assert starts == 2
    assert f"not retried: {HEADS}" in reason


COUNTS = "import os\nraise ValueError('abc'[int(os.environ['ATROPOS_ATTEMPT']) - 1])"


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize(
    "command",
    [
        python(COUNTS),
        raises("[Errno 98] Address already in use"),
        raises("CUDA out of memory. Tried to allocate 2.00 GiB"),
        raises("Free memory on device cuda:0 (39/139 GiB) on startup is less than desired"),
        raises("run-api at http://127.0.0.1:8000 is not reachable"),
        raises("Temporary failure in name resolution"),
        python("raise OSError(116, 'Stale file handle', '/nfs/config.json')"),
        python("raise OSError(5, 'Input/output error', '/nfs/config.json')"),
        python(
            "import ssl\nraise ssl.SSLEOFError(8, 'EOF occurred in violation of protocol "
            "(_ssl.c:1016)')"
        ),
        python("import http.client\nraise http.client.IncompleteRead(b'1024', 4096)"),
        python(
            "class NVMLError_Unknown(Exception): pass\nraise NVMLError_Unknown('Unknown Error')"
        ),
        python("import os\nprint('ValueError: no', flush=True); os.kill(os.getpid(), 9)"),
        python("raise SystemExit(1)"),
        python(SAYS, "the last words of a program, which are no error", 1),
    ],
    ids=[
        "other words",
        "port",
        "gpu",
        "free gpu",
        "run-api",
        "network",
        "stale",
        "io",
        "tls",
        "cut",
        "nvml",
        "killed",
        "nothing said",
        "no error line",
    ],
)
async def test_what_may_pass_is_tried_again(launch: Any, command: list[str]) -> None:
    starts, reason = await starts_of(launch, command)
    assert starts == 3 and "gave up after 2 restarts" in reason


async def test_equal_failures_within_seconds_are_tried_again(launch: Any) -> None:
    """A hub's error page (`json.decoder.JSONDecodeError: Expecting value`) was final after three
    seconds."""
    starts, reason = await starts_of(launch, python("import json\njson.loads('<html>')"))
    assert starts == 3 and "gave up after 2 restarts" in reason


@pytest.mark.parametrize(
    ("words", "passing"),
    [
        ("OSError: [Errno 2] No such file or directory: '/models/x'", False),
        ("PermissionError: [Errno 13] Permission denied: '/models/x'", False),
        (
            "requests.exceptions.SSLError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate "
            "verify failed",
            False,
        ),
        ("ValueError: num_heads", False),
        ("Error: No such file (os error 2)", False),
        ("Error: Transport endpoint (os error 107)", True),
        ("requests.exceptions.ChunkedEncodingError: Response ended prematurely", True),
        ("httpx.RemoteProtocolError: peer closed without a complete body", True),
        ("huggingface_hub.errors.HfHubHTTPError: 520 Server Error", True),
        ("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", True),
        ("ModuleNotFoundError: No module named 'connectorx'", False),
    ],
)
def test_errors_by_number_and_by_name(words: str, passing: bool) -> None:
    assert is_passing(words) is passing


async def test_what_was_up_once_is_tried_again(launch: Any) -> None:
    late = "import os, time\nprint('up', flush=True)\ntime.sleep(0.3)\nraise ValueError('late')"
    assert (await starts_of(launch, python(late), probes=ready()))[0] == 3


async def test_who_was_up_once_can_start_so_what_keeps_it_from_it_may_pass(launch: Any) -> None:
    once = (
        "import os, time\n"
        "if os.environ['ATROPOS_ATTEMPT'] == '1': print('up', flush=True); time.sleep(3)\n"
        "raise ValueError('then')"
    )
    assert (await starts_of(launch, python(once), probes=ready()))[0] == 3


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize(("said", "starts"), [("up", 3), ("not yet", 2)])
async def test_a_component_without_probes_is_past_its_start_at_its_first_stage(
    launch: Any, said: str, starts: int
) -> None:
    code = f"import time\nprint('{said}', flush=True)\ntime.sleep(0.6)\nraise ValueError('then')"
    stages = [Stage(name="registered", pattern="^up")]
    assert (await starts_of(launch, python(code), stages=stages))[0] == starts


async def test_whoever_starts_it_by_hand_may_have_mended_it(launch: Any) -> None:
    slow = RestartPolicy(backoff_s=60, max_restarts=5)
    async with launch(part("x", raises("no heads"), restart=slow), part("other")) as running:
        await running.until("x", State.BACKOFF, attempt=1)
        client = await running.answers()
        await client.command(CommandRequest(action="start", component="x"))
        await running.until("x", State.BACKOFF, attempt=2)
        assert not running.task.done()


def test_passing_rules_are_rules() -> None:
    assert {rule.name for rule in RULES} >= PASSING_RULES
    assert (
        lasting_error("python_error", [f"Traceback (most recent call last):\n  x\n{HEADS}"]) == ""
    )
    assert (
        lasting_error("engine_dead", ["Traceback (most recent call last):", "  x", HEADS]) == HEADS
    )
    assert (
        lasting_error("out_of_memory", ["Traceback (most recent call last):", "  x", HEADS]) == ""
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("E: pid 7 at 0x7f3a", "E: pid 4711 at 0x11", True),
        ("E: /tmp/tmpab12x/f of 1b671a64-40d5", "E: /tmp/tmpzz9/f of 9f0c1d22-0a1b", True),
        ("E: port 80", "E: path 80", False),
        ("", "", False),
    ],
)
def test_numbers_do_not_make_words_differ(one: str, other: str, same: bool) -> None:
    assert same_words(one, other) is same
