"""Scores of episodes, by a Python function, a command, or the program's own last line."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from atropos_envs.recording.programs import run_program
from atropos_envs.recording.tasks import Task, load_function

MOST_AT_A_TIME = 512
"""Calls of a scoring function at a time; a thread is made when it is needed."""


class EpisodeError(RuntimeError):
    """An episode that does not count; the message is its reason."""


@dataclass(frozen=True)
class Episode:
    """Input of a scorer."""

    task: Task
    output: str
    """End of the program's standard output."""
    exit_status: int | None
    answers: list[str]
    """Text of each completion, in the order of their ends."""
    folder: str
    """Folder of the episode, as ATROPOS_EPISODE_DIR; it is removed after the score."""


@dataclass(frozen=True)
class Score:
    value: float
    metrics: dict[str, float] = field(default_factory=dict)


class Scorer:
    """Scores episodes.

    Args:
        source: `module:function`, which gets an `Episode`; a command, which gets it as JSON on its
            standard input; None: the program itself prints the score.
    """

    def __init__(self, source: str | Sequence[str] | None, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # asyncio's own pool has few threads: scores would wait, and run out of time, behind others.
        self._threads = ThreadPoolExecutor(MOST_AT_A_TIME, thread_name_prefix="scorer")
        self._command = None if isinstance(source, str) else source
        self._function = load_function(source, "scorer") if isinstance(source, str) else None

    async def score(self, episode: Episode) -> Score:
        """Score one episode.

        Raises:
            EpisodeError: the scorer fails, or gives no finite number.
        """
        if self._function is not None:
            given = await self._call(episode)
        elif self._command is not None:
            given = _last_line(await self._run(self._command, episode), "the scorer")
        else:
            given = _last_line(episode.output, "the program (no scorer is set)")
        return _score(given)

    async def _call(self, episode: Episode) -> Any:
        assert self._function is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                if inspect.iscoroutinefunction(self._function):
                    return await self._function(episode)
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, self._function, episode)
        except TimeoutError:
            raise EpisodeError(f"the scorer took over {self._timeout_s:g} s") from None
        except Exception as error:
            raise EpisodeError(f"the scorer raised {type(error).__name__}: {error}") from error

    async def _run(self, command: Sequence[str], episode: Episode) -> str:
        given = json.dumps(asdict(episode)).encode()
        try:
            ended = await run_program(command, env={}, given=given, timeout_s=self._timeout_s)
        except OSError as error:
            raise EpisodeError(f"the scorer cannot be started: {error}") from None
        if ended.status is None:
            raise EpisodeError(f"the scorer took over {self._timeout_s:g} s")
        if ended.status:
            raise EpisodeError(f"the scorer ended with status {ended.status}: {ended.complaint}")
        return ended.output


def _last_line(output: str, who: str) -> Any:
    lines = output.strip().split("\n")
    try:
        return json.loads(lines[-1])
    except (ValueError, IndexError):
        raise EpisodeError(f"{who} printed no score in its last line") from None


def _score(given: Any) -> Score:
    metrics: dict[str, float] = {}
    if isinstance(given, dict):
        named = {name: value for name, value in given.items() if name != "score"}
        metrics = {name: float(value) for name, value in named.items() if _is_number(value)}
        given = given.get("score")
    if not _is_number(given):
        raise EpisodeError(f"the score is not a finite number: {str(given)[:40]}")
    return Score(float(given), metrics)


def _is_number(value: Any) -> bool:
    try:
        return hasattr(value, "__float__") and math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False
