"""Answers compared in worker processes: hard and hostile ones, and workers that end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from atropos_envs import grading
from atropos_envs.grading import LONGEST_ANSWER, VERIFY_TIMEOUT_S, Graders, answer_of, is_right

GOLD = "\\boxed{2}"
HARD = "\\boxed{\\sum_{n=1}^{10^9} n^n}"


@pytest.fixture
async def graders() -> AsyncIterator[Graders]:
    made = Graders()
    yield made
    made.close()


def workers() -> list[psutil.Process]:
    """The graders of this process."""
    return [
        each for each in psutil.Process().children() if "atropos_envs.grading" in each.cmdline()
    ]


def test_the_answer_is_the_last_box_after_the_thinking() -> None:
    assert answer_of("<think>\\boxed{1}</think> \\boxed{3} or \\boxed{2}.") == "\\boxed{2}."
    assert answer_of("no box") == "no box"
    assert len(answer_of("\\boxed{" + "1+" * 20000)) == len(answer_of("$" * 9999)) == LONGEST_ANSWER


@pytest.mark.parametrize(
    "hostile",
    [
        "\\boxed{9^{9^{9^{9}}}}",
        "\\boxed{100000000!}",
        "\\boxed{" * 5000,
        "\\boxed{" + "{" * 20000 + "}" * 20000 + "}",
        "\\boxed{" + "1+" * 20000 + "1}",
        HARD,
        "\\boxed{2",
        "$" * 60000,
    ],
)
def test_a_hostile_completion_is_wrong_in_bounded_time(hostile: str) -> None:
    assert is_right(GOLD, GOLD), "this imports sympy"
    began = time.monotonic()
    assert is_right(answer_of(hostile), GOLD) is False
    # Parsing and comparing may each take `VERIFY_TIMEOUT_S`.
    assert time.monotonic() - began < 2 * VERIFY_TIMEOUT_S + 1


def test_the_limit_ends_code_that_loses_its_first_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """And catches every other exception. math_verify's own limit, one signal, was lost once, and a
    comparison went on for half an hour. The timer of the caller, pytest's for one, goes on."""
    monkeypatch.setattr(grading, "VERIFY_TIMEOUT_S", 0.1)
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    before = signal.setitimer(signal.ITIMER_REAL, 500)
    began = time.monotonic()
    with grading._time_limit():
        with contextlib.suppress(BaseException):
            time.sleep(5)
        while time.monotonic() - began < 5:
            with contextlib.suppress(Exception):
                while time.monotonic() - began < 5:
                    pass
    assert time.monotonic() - began < 3
    assert 490 < signal.setitimer(signal.ITIMER_REAL, *before)[0] <= 500
    signal.signal(signal.SIGALRM, handler)


async def test_the_event_loop_goes_on_while_answers_are_compared(graders: Graders) -> None:
    gaps = [0.0]

    async def beat() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - began)

    heart = asyncio.create_task(beat())
    texts = [HARD, "\\boxed{2}", "\\boxed{4/2}", "\\boxed{3}"]
    assert await asyncio.gather(*(graders.right(text, GOLD) for text in texts)) == [
        False,
        True,
        True,
        False,
    ]
    heart.cancel()
    assert max(gaps) < VERIFY_TIMEOUT_S / 2, "the hard answer alone takes `VERIFY_TIMEOUT_S`"
    assert await graders.readable(GOLD) and not await graders.readable("\\boxed{")
    assert len(workers()) <= len(os.sched_getaffinity(0))
    assert not any("torch" in part.path for each in workers() for part in each.memory_maps())
    graders.close()
    assert not workers()


async def test_a_worker_that_answers_too_late_is_replaced(
    graders: Graders, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await graders.right(GOLD, GOLD)
    (first,) = workers()
    first.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(grading, "KILL_S", 0.2)
    assert not await graders.right(GOLD, GOLD)
    monkeypatch.undo()
    assert await graders.right(GOLD, GOLD)
    assert workers() != [first] and not first.is_running()


async def test_a_worker_that_was_killed_costs_no_verdict(graders: Graders) -> None:
    assert await graders.right(GOLD, GOLD)
    (first,) = workers()
    first.terminate()  # as a signal to the environment's process group
    assert await graders.right("\\boxed{4/2}", GOLD) and workers() == [first]
    first.kill()
    assert await graders.right("\\boxed{6/3}", GOLD)


def test_workers_end_with_their_environment() -> None:
    program = (
        "import asyncio, os; from atropos_envs.grading import Graders\n"
        "async def main():\n"
        "    graders = Graders(); await graders.readable('\\\\boxed{1}')\n"
        "    print(graders._idle.get_nowait()._process.pid, flush=True); os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)

    def runs() -> bool:
        # The machine's first process may take its time to collect an exit status.
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(int(done.stdout)).status() != psutil.STATUS_ZOMBIE
        return False

    deadline = time.monotonic() + 5
    while runs() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs()
