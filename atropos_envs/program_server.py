"""Any program that asks an OpenAI-compatible address: it plays the episodes, a scorer rewards them.

    python -m atropos_envs.program_server serve --env.agent '["python", "agent.py"]' \\
        --env.tasks tasks.jsonl --env.scorer scores:score --env.tokenizer_name MODEL \\
        --openai.model_name MODEL --openai.base_url http://127.0.0.1:9001/v1

Each episode is one run of the program. Its environment has OPENAI_BASE_URL, OPENAI_API_KEY and
OPENAI_MODEL. The task is JSON on its standard input, and in ATROPOS_TASK.
"""

from __future__ import annotations

import json
import tempfile

from atropos_envs import EnvFault, without_torch

# Before the import of atroposlib, which would import torch.
if __name__ == "__main__":
    without_torch()

from pydantic import Field

from atropos_envs.hosting.base import run
from atropos_envs.recording.episodes import EpisodeConfig, EpisodeEnv, Played
from atropos_envs.recording.programs import Ended, run_program
from atropos_envs.recording.recorder import OpenRollout
from atropos_envs.recording.scoring import Episode, EpisodeError, Score, Scorer
from atropos_envs.recording.tasks import Task, load_tasks

# Bytes of a task in ATROPOS_TASK; Linux takes 128 KiB. A larger one is on standard input alone.
MOST_VARIABLE = 100_000


class ProgramConfig(EpisodeConfig):
    agent: str = Field("", description="The program: a JSON list of its arguments")
    tasks: str = Field("", description="JSON lines, a folder with train.jsonl, or module:function")
    scorer: str = Field("", description="module:function, or a JSON list of a command's arguments")
    scorer_timeout_s: float = Field(60.0, gt=0, description="Seconds of a score")
    failed_score: float | None = Field(
        None, description="Score of episodes that fail after an answer; else they do not train"
    )


class ProgramEnv(EpisodeEnv):
    name = "program"
    env_config_cls = ProgramConfig

    async def setup(self) -> None:
        config = self.config
        self.prepare()
        self._agent = _arguments(config.agent, "agent")
        if not config.tasks:
            raise EnvFault("no tasks are given; set tasks under [env]", exit_code=2)
        self.items, self._held_out = load_tasks(config.tasks, config.seed)
        scorer = config.scorer
        source = _arguments(scorer, "scorer") if scorer.startswith("[") else scorer or None
        self._scorer = Scorer(source, timeout_s=config.scorer_timeout_s)

    async def play(self, task: Task, temperature: float) -> Played:
        async with self.slots, self.open_rollout(temperature) as rollout:
            with tempfile.TemporaryDirectory(prefix="episode-") as folder:
                ended = await self._run(task, rollout, folder)
                recorded = await self.collect(rollout)
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

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


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
