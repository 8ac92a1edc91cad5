"""Any program that asks an OpenAI-compatible address: it plays the episodes, a scorer rewards them.

    python -m atropos_envs.program_server serve --env.agent '["python", "agent.py"]' \\
        --env.tasks tasks.jsonl --env.scorer scores:score --env.tokenizer_name MODEL \\
        --openai.model_name MODEL --openai.base_url http://127.0.0.1:9001/v1

Each episode is one run of the program. Its environment has OPENAI_BASE_URL, OPENAI_API_KEY and
OPENAI_MODEL. The task is JSON on its standard input, and in ATROPOS_TASK.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from atropos_envs import EnvFault, without_torch

# Before the import of atroposlib, which would import torch.
if __name__ == "__main__":
    without_torch()

from atroposlib.envs.base import BaseEnvConfig
from pydantic import Field

from atropos_envs.hosting.base import StackEnv, run
from atropos_envs.hosting.evaluation import Graded
from atropos_envs.recording.groups import GroupMaker
from atropos_envs.recording.programs import Ended, run_program
from atropos_envs.recording.recorder import LostTurns, OpenRollout, Recorded, Recorder
from atropos_envs.recording.scoring import Episode, EpisodeError, Score, Scorer
from atropos_envs.recording.tasks import Task, load_tasks

PLAYED = "played"
# Bytes of a task in ATROPOS_TASK; Linux takes 128 KiB. A larger one is on standard input alone.
MOST_VARIABLE = 100_000
# Score from which on a held-out task counts as solved.
SOLVED = 1.0


class ProgramConfig(BaseEnvConfig):  # type: ignore[misc]
    seed: int = Field(0, description="Order of the tasks")
    agent: str = Field("", description="The program: a JSON list of its arguments")
    tasks: str = Field("", description="JSON lines, a folder with train.jsonl, or module:function")
    scorer: str = Field("", description="module:function, or a JSON list of a command's arguments")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature of all requests")
    timeout_s: float = Field(300.0, gt=0, description="Seconds of an episode")
    scorer_timeout_s: float = Field(60.0, gt=0, description="Seconds of a score")
    programs: int = Field(16, ge=1, description="Programs that run at a time")
    failed_score: float | None = Field(
        None, description="Score of episodes that fail after an answer; else they do not train"
    )


@dataclass(frozen=True)
class Played:
    recorded: Recorded
    score: Score


class ProgramEnv(StackEnv):
    name = "program"
    env_config_cls = ProgramConfig
    env_defaults: ClassVar[dict[str, Any]] = {
        "max_token_length": 4096,
        "steps_per_eval": 0,
    }

    async def setup(self) -> None:
        self.require_chat_template()
        config = self.config
        self._agent = _arguments(config.agent, "agent")
        if not config.tasks:
            raise EnvFault("no tasks are given; set tasks under [env]", exit_code=2)
        self.items, self._held_out = load_tasks(config.tasks, config.seed)
        scorer = config.scorer
        source = _arguments(scorer, "scorer") if scorer.startswith("[") else scorer or None
        self._scorer = Scorer(source, timeout_s=config.scorer_timeout_s)
        self._recorder = Recorder(self.server.servers[0])
        self._programs = asyncio.Semaphore(config.programs)
        self._groups = GroupMaker(config.group_size)
        self._measured: list[dict[str, float]] = []

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
            played = await self._play(task, self.config.temperature)
        except EpisodeError as error:
            self.tally.episode(str(error))
            raise
        self.tally.episode(PLAYED)
        self._measured.append(played.score.metrics | {"score": played.score.value})
        return played

    async def _play(self, task: Task, temperature: float) -> Played:
        async with self._programs, self._recorder.rollout(temperature=temperature) as rollout:
            with tempfile.TemporaryDirectory(prefix="episode-") as folder:
                ended = await self._run(task, rollout, folder)
                self._note_faults(rollout)
                try:
                    recorded = await rollout.collect()
                except LostTurns as error:
                    raise EpisodeError(f"lost: {error}") from None
                fault = _fault(ended, self.config.timeout_s)
                if not recorded.sequences:
                    raise EpisodeError(_why_silent(fault, rollout))
                if fault:
                    if self.config.failed_score is None:
                        raise EpisodeError(fault)
                    self.tally.episode(fault)
                    return Played(recorded, Score(self.config.failed_score))
                answers = [self._text(turn.token_ids) for turn in recorded.turns]
                episode = Episode(task, ended.output, ended.status, answers, folder)
                return Played(recorded, await self._scorer.score(episode))

    async def _run(self, task: Task, rollout: OpenRollout, folder: str) -> Ended:
        text = json.dumps(task)
        env = {
            "OPENAI_BASE_URL": rollout.base_url,
            "OPENAI_API_BASE": rollout.base_url,
            "OPENAI_API_KEY": rollout.api_key,
            "OPENAI_MODEL": rollout.model,
            "ATROPOS_EPISODE_DIR": folder,
        }
        if len(text) <= MOST_VARIABLE:
            env["ATROPOS_TASK"] = text
        timeout_s = self.config.timeout_s
        try:
            return await run_program(self._agent, env=env, given=text.encode(), timeout_s=timeout_s)
        except OSError as error:
            raise EpisodeError(f"the program cannot be started: {error}") from None

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

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

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
            played = await self._play(question, 0.0)
        except EpisodeError:
            return Graded(False)
        versions = [turn.token_versions[0][0] for turn in played.recorded.turns]
        return Graded(played.score.value >= SOLVED, min(versions))


def _arguments(text: str, what: str) -> list[str]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not found or not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        fix = f'set {what} = ["PROGRAM", "ARGUMENT", ...] under [env]'
        raise EnvFault(f"--env.{what} is not a JSON list of a command: {fix}", exit_code=2)
    return found


def _fault(ended: Ended, timeout_s: float) -> str | None:
    if ended.status is None:
        return f"timed out after {timeout_s:g} s"
    if ended.status < 0:
        return f"ended by signal {-ended.status}"
    return f"crashed with status {ended.status}: {ended.complaint}" if ended.status else None


def _why_silent(fault: str | None, rollout: OpenRollout) -> str:
    asked = rollout.counts.requests
    what = f"got no answer to its {asked} requests" if asked else "asked for nothing"
    return f"{what}, and {fault}" if fault else what


if __name__ == "__main__":
    run(ProgramEnv)
