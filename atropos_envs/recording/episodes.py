"""Environments whose rollouts are episodes: recorded at the engine, scored at their end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from atroposlib.envs.base import BaseEnvConfig
from pydantic import Field

from atropos_envs.hosting.base import StackEnv
from atropos_envs.hosting.evaluation import Graded
from atropos_envs.recording.groups import GroupMaker
from atropos_envs.recording.proxy import LIMITS
from atropos_envs.recording.recorder import LostTurns, OpenRollout, Recorded, Recorder
from atropos_envs.recording.scoring import EpisodeError, Score
from atropos_envs.recording.tasks import Task

PLAYED = "played"
# Score from which on a held-out task counts as solved.
SOLVED = 1.0


class EpisodeConfig(BaseEnvConfig):  # type: ignore[misc]
    seed: int = Field(0, description="Order of the tasks")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature of all requests")
    timeout_s: float = Field(300.0, gt=0, description="Seconds of an episode")
    max_tokens: int | None = Field(None, ge=1, description="Tokens of each answer, at most")
    episodes: int = Field(16, ge=1, description="Episodes at a time")


@dataclass(frozen=True)
class Played:
    recorded: Recorded
    score: Score


class EpisodeEnv(StackEnv):
    """Base of environments that record episodes; a subclass defines `setup` and `play`."""

    env_config_cls = EpisodeConfig
    env_defaults: ClassVar[dict[str, Any]] = {"max_token_length": 4096, "steps_per_eval": 0}

    async def play(self, task: Task, temperature: float) -> Played:
        """Play and score one episode.

        Raises:
            EpisodeError: it does not train.
        """
        raise NotImplementedError

    def prepare(self) -> None:
        """Set up everything that episodes share; `setup` calls it."""
        self.require_chat_template()
        self._held_out: list[Task] = []
        self.recorder = Recorder(self.server.servers[0])
        self.slots = asyncio.Semaphore(self.config.episodes)
        self._groups = GroupMaker(self.config.group_size)
        self._measured: list[dict[str, float]] = []

    def open_rollout(self, temperature: float) -> AbstractAsyncContextManager[OpenRollout]:
        """Open a rollout with the profile's sampling in place of the program's."""
        most = self.config.max_tokens
        names = LIMITS if most else ()
        return self.recorder.rollout(temperature=temperature, **dict.fromkeys(names, most))

    async def collect(self, rollout: OpenRollout) -> Recorded:
        """Count the faults of a rollout's program, and return what the engine recorded."""
        self._note_faults(rollout)
        try:
            return await rollout.collect()
        except LostTurns as error:
            raise EpisodeError(f"lost: {error}") from None

    # Groups

    async def _make_groups(self, item: Task) -> tuple[list[dict[str, Any]], list[Any]]:
        await self._may_roll.wait()
        played = await self._play_group(item)
        sequences = [each.recorded.sequences for each in played]
        groups = self._groups.groups(sequences, [each.score.value for each in played])
        return [group | {"generation_params": {"env": self.component}} for group in groups], []

    async def _play_group(self, task: Task) -> list[Played]:
        """Play the group's episodes; one that fails is played once more.

        Raises:
            EpisodeError: an episode failed twice.
        """

        async def play() -> Played:
            try:
                return await self._episode(task)
            except EpisodeError:
                return await self._episode(task)

        episodes = [asyncio.ensure_future(play()) for _ in range(self.config.group_size)]
        try:
            return list(await asyncio.gather(*episodes))
        finally:
            for each in episodes:
                each.cancel()
            # Their programs end before the group does.
            await asyncio.gather(*episodes, return_exceptions=True)

    async def _episode(self, task: Task) -> Played:
        """Play and score one episode; count its outcome.

        Raises:
            EpisodeError: it does not train.
        """
        try:
            played = await self.play(task, self.config.temperature)
        except EpisodeError as error:
            self.tally.episode(str(error))
            raise
        self.tally.episode(PLAYED)
        self._measured.append(played.score.metrics | {"score": played.score.value})
        return played

    def _note_faults(self, rollout: OpenRollout) -> None:
        counts = rollout.counts
        for name in counts.other_models:
            self.tally.episode(f"asked for another model ({name}); the trained one answered")
        for reason in counts.refused:
            self.tally.episode(f"had a request refused ({reason})")
        if counts.surplus_connections:
            self.tally.episode("held too many connections; the surplus was closed")
        if counts.cut:
            self.tally.episode("had an answer cut by the engine's end")

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log the mean score and metrics of the episodes since the last call."""
        measured, self._measured = self._measured, []
        sums: Counter[str] = Counter()
        seen: Counter[str] = Counter()
        for each in measured:
            sums.update(each)
            seen.update(each.keys())
        means = {f"episode/{name}": sums[name] / seen[name] for name in seen}
        await super().wandb_log((wandb_metrics or {}) | means)

    # Evaluation

    def eval_questions(self) -> dict[str, Sequence[Task]]:
        return {"held_out": self._held_out}

    async def grade(self, question: Task, *, wait: bool) -> Graded:
        try:
            played = await self.play(question, 0.0)
        except EpisodeError:
            return Graded(False)
        versions = [turn.token_versions[0][0] for turn in played.recorded.turns]
        return Graded(played.score.value >= SOLVED, min(versions))
