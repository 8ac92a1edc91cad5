"""Log checks read coloured, overwritten and unfinished lines, and lines behind a long progress
bar."""

from __future__ import annotations

import re
from typing import Any

import pytest

from atropos_common.protocol.control import State
from atropos_tui.profile.spec import LogCheck
from atropos_tui.supervisor.processes import log_watch
from atropos_tui.supervisor.processes.log_watch import LineWatch
from tests.support.harness import part, python, ready

PRINTS = (
    "import sys, time; print(end=sys.argv[1].encode().decode('unicode_escape'), flush=True); "
    "time.sleep(600)"
)
BAR = """
import sys, time
for i in range(1200):
    print(end='\\rloading shards: %3d%% |%s|' % (i // 12, '#' * 60), flush=True)
print('INFO: ready', flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("printed", "pattern"),
    [
        (r"\033[32mINFO\033[0m:     Uvicorn running\n", "INFO: +Uvicorn running"),
        (r"\rloading 100%\rready\n", "^ready"),
        (r"\rloading 100%\r\033[2Kready\r\n", "^ready$"),
        (r"listening on 8080", "listening on"),
        (r"\033]8;;http://x\033\\ready\033]8;;\033\\\n", "^ready$"),
    ],
)
async def test_a_component_is_ready_by_the_line_that_a_person_sees(
    printed: str, pattern: str, launch: Any
) -> None:
    """None of them became healthy; the run ended, and its diagnosis quoted the line."""
    probes = ready(LogCheck(pattern=pattern))
    async with launch(
        part("x", python(PRINTS, printed), probes=probes, start_timeout_s=8)
    ) as running:
        await running.until("x", State.HEALTHY)


async def test_a_line_behind_more_than_64_kib_of_progress_bar(launch: Any) -> None:
    probes = ready(LogCheck(pattern="INFO: ready"))
    async with launch(part("x", python(BAR), probes=probes, start_timeout_s=8)) as running:
        await running.until("x", State.HEALTHY)


def fed(pattern: str, *pieces: bytes) -> LineWatch:
    watch = LineWatch()
    watch.watch(pattern, b"")
    for piece in pieces:
        watch.take(piece)
    return watch


def test_pieces_of_one_line_are_one_line() -> None:
    assert fed("^listening on 80", b"listen", b"ing \x1b[3", b"2mon 80\n").seen("^listening on 80")
    assert not fed("^on", b"listening ", b"on\n").seen("^on")


def test_of_an_over_long_line_every_part_counts_and_its_middle_is_no_beginning() -> None:
    long = [b"x" * 50_000] * 10
    assert fed("up$", *long, b" up\n").seen("up$")
    assert fed("^first x", b"first ", *long, b"\n").seen("^first x")
    assert not fed("^x", b"first ", *long, b"\n").seen("^x")


def test_an_unfinished_line_counts_after_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = fed("^up$", b"bar 99%|####|")
    assert not watch.seen("^up$")
    monkeypatch.setattr(log_watch, "UNFINISHED_LINE_S", 0.0)
    watch.take(b"up\n")
    assert watch.seen("^up$"), "as when a progress bar and a print share stdout"
    assert fed("99%", b"bar 99%").seen("99%")


def test_a_pattern_is_looked_for_in_what_was_printed_before() -> None:
    watch = LineWatch()
    watch.watch("^up", b"one\nup")
    assert watch.seen("^up")
    with pytest.raises(re.error):
        watch.watch("(", b"")
