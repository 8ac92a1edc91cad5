"""OpenEnv environments: reset, step and reward over the server's WebSocket, several at a time.

    python -m atropos_envs.openenv_server serve --env.openenv http://127.0.0.1:8100 \\
        --env.tokenizer_name MODEL --openai.model_name MODEL --openai.base_url http://127.0.0.1:9001/v1

The observation becomes the user's message, and the model's answer the action. If an action has one
text field, the answer fills it; else the answer is a JSON object of the action's schema.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

from atropos_envs import EnvFault, without_torch

# Before the import of atroposlib, which would import torch.
if __name__ == "__main__":
    without_torch()

import openai
from pydantic import Field

from atropos_envs.hosting.base import run
from atropos_envs.recording.episodes import EpisodeConfig, EpisodeEnv, Played
from atropos_envs.recording.openenv import (
    ActionForm,
    OpenEnvError,
    ServerGone,
    Session,
    StepResult,
    action_schema,
    open_session,
    shown,
)
from atropos_envs.recording.recorder import OpenRollout
from atropos_envs.recording.scoring import EpisodeError, Score

# Seconds between two tries while the server is away, or has no free session.
AGAIN_S = 0.2
# Seconds in which a server that starts beside us answers first.
START_S = 120.0


class OpenEnvConfig(EpisodeConfig):
    openenv: str = Field("", description="Address of the OpenEnv server")
    system: str = Field("", description="System message before the first observation")
    max_turns: int = Field(16, ge=1, description="Steps of an episode, at most")
    returns: Literal["sum", "last"] = Field("sum", description="Score: all rewards, or the last")
    patience_s: float = Field(60.0, gt=0, description="Seconds that an episode waits for a session")


class OpenEnvEnv(EpisodeEnv):
    name = "openenv"
    env_config_cls = OpenEnvConfig

    async def setup(self) -> None:
        self.prepare()
        if not self.config.openenv:
            raise EnvFault("no server is given; set openenv under [env]", exit_code=2)
        self._action = ActionForm(await self._schema())
        seeds = random.Random(self.config.seed)
        # A task is the seed of a reset; the episodes of a group share it.
        self.items = (seeds.getrandbits(31) for _ in itertools.count())

    async def _schema(self) -> dict[str, Any]:
        until = time.monotonic() + START_S
        while True:
            try:
                return await action_schema(self.config.openenv)
            except OpenEnvError as error:
                if not isinstance(error, ServerGone) or time.monotonic() > until:
                    fix = "Start the server, or correct openenv under [env]"
                    raise EnvFault(f"{error}. {fix}", exit_code=2) from None
            await asyncio.sleep(AGAIN_S)

    async def play(self, task: int, temperature: float) -> Played:
        limit_s = self.config.timeout_s
        async with self.slots, self.open_rollout(temperature) as rollout:
            try:
                async with asyncio.timeout(limit_s), self._session(task) as (session, first):
                    rewards = await self._steps(session, first, rollout)
            except TimeoutError:
                raise EpisodeError(f"timed out after {limit_s:g} s") from None
            except openai.OpenAIError as error:
                raise EpisodeError(f"the engine refused a request: {error}") from None
            except OpenEnvError as error:
                raise EpisodeError(f"the OpenEnv server failed: {error}") from None
            recorded = await self.collect(rollout)
        if not recorded.sequences:
            raise EpisodeError("the episode was over before its first action")
        value = sum(rewards) if self.config.returns == "sum" else rewards[-1]
        return Played(recorded, Score(value, {"turns": float(len(rewards))}))

    @asynccontextmanager
    async def _session(self, seed: int) -> AsyncIterator[tuple[Session, StepResult]]:
        """Yield a session and its first result; wait while the server is away or full."""
        until = time.monotonic() + self.config.patience_s
        while True:
            async with AsyncExitStack() as stack:
                try:
                    session = await stack.enter_async_context(open_session(self.config.openenv))
                    first = await session.reset(seed=seed)
                except OpenEnvError as error:
                    waits = error.is_full or isinstance(error, ServerGone)
                    if not waits or time.monotonic() > until:
                        raise
                else:
                    yield session, first
                    return
            await asyncio.sleep(AGAIN_S)

    async def _steps(
        self, session: Session, result: StepResult, rollout: OpenRollout
    ) -> list[float]:
        """Play until the end of the episode; return the rewards."""
        messages: list[Any] = []
        if system := "\n\n".join(filter(None, [self.config.system, self._action.advice])):
            messages.append({"role": "system", "content": system})
        rewards: list[float] = []
        async with openai.AsyncOpenAI(base_url=rollout.base_url, api_key=rollout.api_key) as model:
            while not result.done and len(rewards) < self.config.max_turns:
                messages.append({"role": "user", "content": shown(result.observation)})
                answer = await model.chat.completions.create(model=rollout.model, messages=messages)
                text = answer.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})
                try:
                    result = await session.step(self._action.read(text))
                except OpenEnvError as error:
                    if not error.is_invalid:
                        raise
                    # The model's own mistake: the episode ends, and this step earns nothing.
                    self.tally.episode("ended with an action that the server refused")
                    return [*rewards, 0.0]
                rewards.append(result.reward or 0.0)
        return rewards


if __name__ == "__main__":
    run(OpenEnvEnv)
