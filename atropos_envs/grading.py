r"""Comparison of answers as mathematics: `1,000` is `1000`, `\frac{1}{2}` is `0.5`.

    python -m atropos_envs.grading

runs a worker of `Graders`, which compares answers from its standard input, a socket. A comparison
may take seconds, too long for the environment's event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from typing import Any

from atropos_common.system.parent_death import with_parent

log = logging.getLogger(__name__)

THINK_END = "</think>"
BOX = "\\boxed"
# Limit of parsed characters of an answer: the parser could take hours for a long crafted one.
LONGEST_ANSWER = 400
# Seconds for parsing, and for comparing, one answer. A usual answer takes milliseconds.
VERIFY_TIMEOUT_S = 3
# Seconds between the repetitions of a limit's signal.
AGAIN_S = 1
# Limit of one question, in seconds; then the worker is killed. Python's signal handlers cannot
# interrupt a long operation in C.
KILL_S = 3 * VERIFY_TIMEOUT_S + 1
# Seconds for a worker's start, mostly the import of sympy: one second on an idle machine.
START_S = 120
MOST_WORKERS = 8
# Seconds without an idle worker before another one starts.
BUSY_S = 0.5
# Limit of a worker's address space, in bytes: a crafted number must not fill the machine's memory.
MEMORY = 2 << 30


def answer_of(completion: str) -> str:
    """Return the last box after the thinking, else the completion's end."""
    text = completion.rpartition(THINK_END)[2]
    # The last box: models often box intermediate results first.
    box = text.rfind(BOX)
    return text[box : box + LONGEST_ANSWER] if box >= 0 else text[-LONGEST_ANSWER:]


class _TooLong(BaseException):
    pass


@contextmanager
def _time_limit() -> Iterator[None]:
    """End the block after `VERIFY_TIMEOUT_S`; for the main thread."""
    # In place of math_verify's own limit, which is one signal. Its exception can be lost: Python
    # drops one that is raised in a destructor, for example. A comparison then went on without end.

    def end(*_: object) -> None:
        raise _TooLong

    handler = signal.signal(signal.SIGALRM, end)
    before = signal.setitimer(signal.ITIMER_REAL, VERIFY_TIMEOUT_S, AGAIN_S)
    try:
        with suppress(_TooLong):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


# math_verify's configuration: the last box, else any LaTeX. Cached, since it compiles patterns.
@cache
def _extraction() -> list[Any]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    normalization = NormalizationConfig(
        basic_latex=True,
        units=True,
        malformed_operators=False,
        nits=False,
        boxed="all",
        equations=False,
    )
    latex = LatexExtractionConfig(
        normalization_config=normalization, boxed_match_priority=0, try_extract_without_anchor=False
    )
    return [latex]


def parse_answer(answer: str) -> list[Any]:
    """Return math_verify's candidates; empty if unreadable."""
    from math_verify import parse

    with _time_limit():
        return list(
            parse(
                answer,
                extraction_config=_extraction(),
                extraction_mode="first_match",
                parsing_timeout=None,
            )
        )
    return []


# The completions of a group share their gold answer, and often their answers.
@lru_cache(maxsize=256)
def _gold(gold: str) -> list[Any]:
    return parse_answer(gold)


@lru_cache(maxsize=4096)
def is_right(answer: str, gold: str) -> bool:
    """Compare two results of `answer_of`."""
    from math_verify import verify

    candidates = parse_answer(answer)
    with _time_limit():
        return bool(verify(_gold(gold), candidates, timeout_seconds=None))
    return False


class WorkerEnded(Exception):
    pass


class _Worker:
    """Process that answers one question at a time."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls) -> _Worker:
        process, connection = _spawn()
        worker = cls(process, *await asyncio.open_unix_connection(sock=connection))
        try:
            async with asyncio.timeout(START_S):
                await worker._line()
        except BaseException:
            worker.close()
            raise
        return worker

    async def ask(self, question: tuple[str, ...]) -> bool:
        self._writer.write(json.dumps(question).encode() + b"\n")
        return bool(json.loads(await self._line()))

    def close(self) -> None:
        self._writer.close()
        self._process.kill()
        self._process.wait()

    async def _line(self) -> bytes:
        try:
            line = await self._reader.readline()
        except OSError:
            line = b""
        if not line:
            raise WorkerEnded(f"exit status {self._process.poll()}")
        return line


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    safe = ["-P"] if sys.flags.safe_path else []
    command = with_parent([sys.executable, *safe, "-m", "atropos_envs.grading"])
    with theirs:
        return subprocess.Popen(command, stdin=theirs.fileno()), ours


class Graders:
    """Worker processes, at most one per core; another starts when all stay busy."""

    # A worker takes 90 MB and a second of CPU time to start, and compares a usual answer in 1 ms.
    def __init__(self) -> None:
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        self._most = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        self._count = 0
        self._starting = False

    async def readable(self, gold: str) -> bool:
        return await self._ask(answer_of(gold))

    async def right(self, completion: str, gold: str) -> bool:
        return await self._ask(answer_of(gold), answer_of(completion))

    def close(self) -> None:
        while not self._idle.empty():
            self._end(self._idle.get_nowait())

    async def _ask(self, *question: str) -> bool:
        # Two attempts: a worker may die for a reason other than its question.
        for _ in range(2):
            worker = await self._take()
            try:
                async with asyncio.timeout(KILL_S):
                    verdict = await worker.ask(question)
            except TimeoutError:
                self._end(worker)
                log.warning("an answer took over %.0f s and counts as wrong", KILL_S)
                return False
            except WorkerEnded:
                self._end(worker)
            except BaseException:
                self._end(worker)  # its late verdict would answer the next question
                raise
            else:
                self._idle.put_nowait(worker)
                return verdict
        log.warning("an answer crashed two graders and counts as wrong")
        return False

    async def _take(self) -> _Worker:
        while True:
            if self._count:
                with suppress(TimeoutError):
                    async with asyncio.timeout(BUSY_S):
                        return await self._idle.get()
            if self._starting or self._count >= self._most:
                continue
            self._count += 1
            self._starting = True
            try:
                return await _Worker.start()
            except BaseException:
                self._count -= 1
                raise
            finally:
                self._starting = False

    def _end(self, worker: _Worker) -> None:
        self._count -= 1
        worker.close()


def serve(connection: socket.socket) -> None:
    """Answer each line `[gold]` (is it readable?) or `[gold, answer]` (is it right?)."""
    import latex2sympy2_extended  # noqa: F401  # before the first line: it takes a second
    import math_verify  # noqa: F401

    # Ignore signals to the environment's process group: the environment ends its graders itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)  # math_verify logs every unreadable answer
    with connection, connection.makefile("rw") as lines:
        lines.write("true\n")
        lines.flush()
        for line in lines:
            gold, *answers = json.loads(line)
            try:
                verdict = is_right(answers[0], gold) if answers else bool(_gold(gold))
            except Exception:  # sympy raises many types
                verdict = False
            lines.write(json.dumps(verdict) + "\n")
            lines.flush()


if __name__ == "__main__":
    serve(socket.socket(fileno=0))
