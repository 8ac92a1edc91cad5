"""Sums of two numbers as an atroposlib environment: the demo's task, learnable on two CPU cores.

    python -m atropos_envs.arithmetic_server serve|process|evaluate --env.tokenizer_name MODEL \\
        --openai.model_name MODEL --openai.base_url http://127.0.0.1:9001/v1

The reward is 1 for the exact digits and the end token, else 0.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from atropos_envs import without_torch

# Before the import of atroposlib, which would import torch.
if __name__ == "__main__":
    without_torch()

from atroposlib.envs.base import BaseEnvConfig
from pydantic import Field

from atropos_envs.arithmetic import MAX_NEW_TOKENS, Sum, Task, load_task, reward
from atropos_envs.hosting.base import StackEnv, epochs, run
from atropos_envs.hosting.evaluation import Graded


class ArithmeticConfig(BaseEnvConfig):  # type: ignore[misc]
    seed: int = Field(
        0,
        description="Order of the questions; also the split, where the model folder has no "
        "task.json",
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature of rollouts")
    carry_questions: int = Field(
        25, ge=0, description="Number of training questions with a carry in an evaluation"
    )


class ArithmeticEnv(StackEnv):
    name = "arithmetic"
    env_config_cls = ArithmeticConfig

    env_defaults: ClassVar[dict[str, Any]] = {
        "batch_size": 128,
        # A whole batch in flight at once; `Hosted.get_status` bounds it.
        "max_num_workers": 16,
        # Flat groups are sent, so that the mean reward can reach 1.
        "ensure_scores_are_not_same": False,
        "steps_per_eval": 10,
        "max_token_length": 32,
    }
    server_defaults: ClassVar[dict[str, Any]] = {"timeout": 120}

    async def setup(self) -> None:
        """Load the split of the model."""
        self.task: Task = load_task(Path(self.config.tokenizer_name), seed=self.config.seed)
        self.items = epochs(self.task.training, random.Random(self.config.seed))
        carries = self.task.carries
        count = min(self.config.carry_questions, len(carries))
        self._carries = random.Random(self.config.seed).sample(carries, count)

    async def rollout(self, item: Sum) -> dict[str, Any]:
        sampling = {"temperature": self.config.temperature, "max_tokens": MAX_NEW_TOKENS}
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(prompt=item.prompt, n=self.config.group_size, **sampling)
            nodes = managed.get_state()["nodes"]
        # The generated tokens are those whose mask is not -100.
        pairs = [zip(node.tokens, node.masked_tokens, strict=True) for node in nodes]
        completions = [[token for token, mask in pair if mask != -100] for pair in pairs]
        scores = [self._reward(item, completion) for completion in completions]
        return self.scored_group(nodes, scores, sampling)

    def eval_questions(self) -> dict[str, Sequence[Sum]]:
        # The warm-started model never answers a carry greedily.
        return {"held_out": self.task.held_out, "carries": self._carries}

    async def grade(self, question: Sum, *, wait: bool) -> Graded:
        prompt = self.tokenizer.encode(question.prompt)
        done = await self.greedy(prompt, wait=wait, max_tokens=MAX_NEW_TOKENS)
        return Graded(self._reward(question, done.token_ids[0]) == 1.0, done.oldest_version)

    def _reward(self, question: Sum, completion: Sequence[int]) -> float:
        answer = self.tokenizer.encode(question.answer)
        return reward(completion, answer, self.tokenizer.eos_token_id)


if __name__ == "__main__":
    run(ArithmeticEnv)
