"""Any task of reasoning-gym, by its name: `dataset = "chain_sum"`."""

from __future__ import annotations

import functools
from typing import Any

import reasoning_gym
import verifiers.v1 as vf
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

__all__ = ["GymTaskset"]


class GymData(vf.TaskData):
    dataset: str
    seed: int
    index: int


class GymTask(vf.Task[GymData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        data = questions(self.data.dataset, self.data.seed, self.data.index + 1)
        return float(data.score_answer(extract_answer(trace.last_reply), data[self.data.index]))

    @vf.metric
    async def answered(self, trace: vf.Trace) -> float:
        return float(extract_answer(trace.last_reply) is not None)


class GymConfig(vf.TasksetConfig):
    dataset: str = "chain_sum"
    seed: int = 0
    num_tasks: int = 200


class GymTaskset(vf.Taskset[GymTask, GymConfig]):
    def load(self) -> list[GymTask]:
        name, seed = self.config.dataset, self.config.seed
        data = questions(name, seed, self.config.num_tasks)
        return [
            GymTask(
                GymData(
                    prompt=data[index]["question"],
                    system_prompt=SYSTEM_PROMPTS["default"],
                    dataset=name,
                    seed=seed,
                    index=index,
                ),
                self.config.task,
            )
            for index in range(len(data))
        ]


@functools.lru_cache(maxsize=64)
def questions(name: str, seed: int, size: int) -> Any:
    """Return the data set; an item depends on the seed and its index alone."""
    return reasoning_gym.create_dataset(name, seed=seed, size=size)
