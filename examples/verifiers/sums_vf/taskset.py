from __future__ import annotations

from typing import Literal

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.answer))

    @vf.reward(weight=0.2)
    async def is_number(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip().isdigit())

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    num_tasks: int = 80


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> list[SumTask]:
        first = 0 if self.config.split == "train" else 50
        numbers = [(first + n % 40, n // 2) for n in range(self.config.num_tasks)]
        return [
            SumTask(
                SumData(
                    prompt=f"{left} + {right} =",
                    system_prompt="Answer with the number only.",
                    answer=left + right,
                ),
                self.config.task,
            )
            for left, right in numbers
        ]
