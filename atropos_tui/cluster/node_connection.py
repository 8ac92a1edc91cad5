"""Connection to a program on another machine, over a launcher's command.

`NodeConnection` sends `node_probe.py` there as text: nothing of ours has to be installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from atropos_tui.cluster import node_probe
from atropos_tui.diagnoses.model import plain
from atropos_tui.diagnoses.node_rules import LAUNCHER_RULES
from atropos_tui.profile.spec import Place

BOOT = (
    f"import sys; print({node_probe.MARK!r} + '{{}}', flush=True); "
    "exec(compile(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())), 'node_probe', 'exec'))"
)
"""Reports that it listens, then reads the real program: a line with its length, then its text.
Start-up files of a login shell may consume earlier input."""
GUARD = (
    "; in the login shell's start-up files (.bashrc) put `[ -t 0 ] &&` before lines that start a "
    "shell or ask questions"
)
CALL_TIMEOUT_S = 30.0
"""Seconds; a busy srun takes some to begin a step."""
CLOSE_TIMEOUT_S = 2.0
NOT_THERE = re.compile(r"No such file or directory|not found", re.IGNORECASE)
LONGEST_LINE = 1 << 20


class NodeFault(Exception):
    """A node failed to answer: reason and fix."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix


def launcher_said(lines: Sequence[str], host: str) -> tuple[str, str, str] | None:
    for rule in LAUNCHER_RULES:
        for line in reversed(lines):
            if any(pattern.match(line) for pattern in rule.patterns):
                return rule.title, str(rule.fix).replace("HOST", host), line.strip()
    return None


def explain(lines: Sequence[str], code: int | None, command: Sequence[str], host: str) -> NodeFault:
    """Fault of a launcher that ended: the explanation of its last lines, or the last line."""
    text = [line for line in lines if line.strip()]
    if known := launcher_said(text, host):
        title, fix, line = known
        return NodeFault(f"{title}: {line}", fix)
    said = text[-1].strip() if text else "it printed nothing"
    if missing := next((line for line in text if "python" in line and NOT_THERE.search(line)), ""):
        fix = "set [cluster] python to an interpreter that every node has under the same path"
        return NodeFault(f"the interpreter is missing there: {missing.strip()}", fix)
    how = "was ended" if code is None else f"ended with code {code}"
    return NodeFault(f"{command[0]} {how}: {said}", f"try it by hand: {shlex.join(command)}")


class NodeConnection:
    """Connection to `node_probe`; `process` is the local launcher."""

    def __init__(self, place: Place, process: asyncio.subprocess.Process) -> None:
        self._place = place
        self._process = process
        self._listens = False
        self._errors: deque[str] = deque(maxlen=40)
        self._reading = asyncio.create_task(self._read_errors())

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, place: Place) -> AsyncIterator[NodeConnection]:
        """Start the probe; it ends with the `async with`.

        Raises:
            NodeFault: it does not answer within `CALL_TIMEOUT_S`.
        """
        try:
            # -I: neither the node's current folder nor its PYTHONPATH can change the probe. A
            # session of its own, so that ^C here does not reach the launcher before `_close`.
            process = await asyncio.create_subprocess_exec(
                *place.command(place.python, "-I", "-c", BOOT),
                limit=LONGEST_LINE,
                start_new_session=True,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            program = [*place.prefix, place.python][0]
            fix = "install the launcher's client here, or correct [cluster] launcher and python"
            raise NodeFault(f"{program} cannot be run here: {error.strerror}", fix) from None
        line, source = cls(place, process), Path(node_probe.__file__).read_bytes()
        try:
            await line._answer(b"", CALL_TIMEOUT_S, None)
            line._listens = True
            await line._answer(b"%d\n%b" % (len(source), source), CALL_TIMEOUT_S, None)
            yield line
        finally:
            await line._close()

    async def ask(
        self,
        question: str,
        *,
        limit_s: float = CALL_TIMEOUT_S,
        stage: Callable[[str], None] | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Ask one of `node_probe.ANSWERS`; `stage` gets each stage of a long answer.

        Raises:
            NodeFault: no answer within `limit_s`, or the probe failed.
        """
        answer = await self._answer(
            (json.dumps({"ask": question} | arguments) + "\n").encode(), limit_s, stage
        )
        if "error" in answer:
            raise NodeFault(str(answer["error"]))
        return answer

    async def _answer(
        self, sent: bytes, limit_s: float, stage: Callable[[str], None] | None
    ) -> dict[str, Any]:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(
                    ConnectionError
                ):  # `_next` reports the end with its last lines
                    stdin.write(sent)
                    await stdin.drain()
                while "stage" in (answer := await self._next()):
                    if stage is not None:
                        stage(answer["stage"])
        except TimeoutError:
            said = f" (last line: {self._errors[-1]})" if self._errors else ""
            fix = (
                f"try it by hand: "
                f"{shlex.join(self._place.command(self._place.python, '--version'))}"
            )
            fix += "" if self._listens else GUARD
            raise NodeFault(f"no answer within {limit_s:.0f} s{said}", fix) from None
        return answer

    async def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        mark = node_probe.MARK.encode()
        while line := await self._process.stdout.readline():
            _, found, text = line.partition(mark)
            if found:
                answer: dict[str, Any] = json.loads(text)
                return answer
        code = await self._process.wait()
        await asyncio.wait({self._reading}, timeout=CLOSE_TIMEOUT_S)
        raise explain(
            self._errors,
            code,
            self._place.command(self._place.python, "--version"),
            self._place.host,
        )

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):  # a line longer than LONGEST_LINE
            while line := await self._process.stderr.readline():
                self._errors.append(plain(line))

    async def _close(self) -> None:
        """Close the probe's input, which ends it, then kill the launcher."""
        process = self._process
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await process.wait()
        # The whole session: a launcher such as ssh may have helpers.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        self._reading.cancel()
