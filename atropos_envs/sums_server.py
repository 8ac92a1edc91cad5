"""Sums of two-digit numbers in a chat, on which a chat model of 135 M parameters learns.

    python -m atropos_envs.sums_server serve --env.tokenizer_name MODEL \\
        --openai.model_name MODEL --openai.base_url http://127.0.0.1:9001/v1

The evaluation asks `HELD_OUT` sums greedily and accepts only the bare number.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from atropos_envs import without_torch

# Before the import of atroposlib, which would import torch.
if __name__ == "__main__":
    without_torch()

from atroposlib.envs.base import BaseEnvConfig
from pydantic import Field

from atropos_envs.hosting.base import StackEnv, epochs, run
from atropos_envs.hosting.engine_client import with_one_bos
from atropos_envs.hosting.evaluation import Graded

# Number of questions that are evaluated and never rolled out.
HELD_OUT = 128
# SmolLM2 writes each digit as a token of its own; an explanation is cut off.
MAX_NEW_TOKENS = 8
# With an example the untrained model answers three of four questions with a bare number, one of a
# hundred correctly. Without it the model talks, and nine of twelve groups are flat.
SHOWN = [
    {"role": "system", "content": "You are a calculator. Reply with the number only."},
    {"role": "user", "content": "12 + 31"},
    {"role": "assistant", "content": "43"},
]
# Distance at which a wrong number earns nothing but its form.
NEAR = 50
NUMBER = re.compile(r"[0-9]+")


class TwoDigitSum(NamedTuple):
    left: int
    right: int

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*SHOWN, {"role": "user", "content": f"{self.left} + {self.right}"}]


def reward(question: TwoDigitSum, text: str) -> float:
    """Reward of one answer, 0 to 1."""
    answer, text = question.left + question.right, text.strip()
    # The right number among words earns a little.
    if not NUMBER.fullmatch(text):
        return 0.1 if str(answer) in NUMBER.findall(text) else 0.0
    if text == str(answer):
        return 1.0
    # 0.2 to 0.5 for a wrong number: the distance ranks the answers of a group without a right one,
    # so that it is not flat.
    return 0.2 + 0.3 * max(0.0, 1 - abs(int(text) - answer) / NEAR)


def split(seed: int) -> tuple[list[TwoDigitSum], list[TwoDigitSum]]:
    """Return training and held-out questions; they depend on `seed` alone."""
    sums = [TwoDigitSum(left, right) for left in range(10, 100) for right in range(10, 100)]
    random.Random(seed).shuffle(sums)
    return sums[HELD_OUT:], sums[:HELD_OUT]


class SumsConfig(BaseEnvConfig):  # type: ignore[misc]
    seed: int = Field(0, description="Choice of the held-out sums, and order of the others")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature of rollouts")


class SumsEnv(StackEnv):
    name = "sums"
    env_config_cls = SumsConfig
    env_defaults: ClassVar[dict[str, Any]] = {
        "batch_size": 64,
        "max_num_workers": 64,
        "steps_per_eval": 25,
        "max_token_length": 128,
    }

    async def setup(self) -> None:
        self.require_chat_template()
        training, self._held_out = split(self.config.seed)
        self.items = epochs(training, random.Random(self.config.seed))

    async def rollout(self, item: TwoDigitSum) -> dict[str, Any]:
        sampling = {"temperature": self.config.temperature, "max_tokens": MAX_NEW_TOKENS}
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(
                messages=item.messages, n=self.config.group_size, **sampling
            )
            # Tokens, masks and logprobs of each completion, in the order of `answer.choices`.
            nodes = managed.get_state()["nodes"]
        scores = [reward(item, choice.message.content or "") for choice in answer.choices]
        return self.scored_group(nodes, scores, sampling)

    def eval_questions(self) -> dict[str, Sequence[TwoDigitSum]]:
        return {"held_out": self._held_out}

    async def grade(self, question: TwoDigitSum, *, wait: bool) -> Graded:
        prompt = self.tokenizer.apply_chat_template(
            question.messages, tokenize=False, add_generation_prompt=True
        )
        ids = with_one_bos(list(self.tokenizer.encode(prompt)), self.tokenizer)
        done = await self.greedy(ids, wait=wait, max_tokens=MAX_NEW_TOKENS)
        text = self.tokenizer.decode(done.token_ids[0], skip_special_tokens=True)
        # Partial rewards guide training; the accuracy counts exact answers only.
        return Graded(reward(question, text) == 1.0, done.oldest_version)


if __name__ == "__main__":
    run(SumsEnv)
