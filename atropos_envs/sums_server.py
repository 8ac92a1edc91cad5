"""Sums of two-digit numbers in a chat: the smallest task on which a chat model of 135 M parameters
learns.

    python -m atropos_envs.sums_server serve --env.tokenizer_name MODEL \\
        --openai.model_name MODEL --openai.base_url http://127.0.0.1:9001/v1 \\
        --env.rollout_server_url http://127.0.0.1:8000

A group is `group_size` completions of one question in the model's chat template. `HELD_OUT` sums,
chosen by the seed, are never rolled out. The evaluation asks them greedily and accepts only the
bare number.
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
from atropos_envs.hosting.evaluation import Graded

# Number of questions that are evaluated and never rolled out.
HELD_OUT = 128
MAX_NEW_TOKENS = 8
"""Limit of an answer. SmolLM2 writes each digit as a token of its own; an explanation is cut
off."""
SHOWN = [
    {"role": "system", "content": "You are a calculator. Reply with the number only."},
    {"role": "user", "content": "12 + 31"},
    {"role": "assistant", "content": "43"},
]
"""System prompt and one example. With the example the untrained model answers three of four
questions with a bare number, one of a hundred correctly. Without it the model talks, and nine of
twelve groups are flat."""
NEAR = 50
"""Distance from the right number at which a wrong number earns nothing but its form."""
NUMBER = re.compile(r"[0-9]+")


class TwoDigitSum(NamedTuple):
    """`left + right`, both from 10 to 99."""

    left: int
    right: int

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*SHOWN, {"role": "user", "content": f"{self.left} + {self.right}"}]


def reward(question: TwoDigitSum, text: str) -> float:
    """Reward of one answer, 0 to 1.

    1: the right number alone. 0.2 to 0.5: a wrong number alone, by its distance. 0.1: the right
    number among words. 0: everything else.
    """
    answer, text = question.left + question.right, text.strip()
    if not NUMBER.fullmatch(text):
        return 0.1 if str(answer) in NUMBER.findall(text) else 0.0
    if text == str(answer):
        return 1.0
    # The distance ranks answers of a group without a right one, so that it is not flat.
    return 0.2 + 0.3 * max(0.0, 1 - abs(int(text) - answer) / NEAR)


def split(seed: int) -> tuple[list[TwoDigitSum], list[TwoDigitSum]]:
    """Return training and held-out questions: all 8,100 sums in an order that depends on `seed`
    alone."""
    sums = [TwoDigitSum(left, right) for left in range(10, 100) for right in range(10, 100)]
    random.Random(seed).shuffle(sums)
    return sums[HELD_OUT:], sums[:HELD_OUT]


class SumsConfig(BaseEnvConfig):  # type: ignore[misc]
    """BaseEnv's fields and ours; on the command line `--env.NAME`."""

    seed: int = Field(0, description="Choice of the held-out sums, and order of the others")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature of rollouts")


class SumsEnv(StackEnv):
    """Epochs over all training questions, each in a new order."""

    name = "sums"
    env_config_cls = SumsConfig
    env_defaults: ClassVar[dict[str, Any]] = {
        "batch_size": 64,
        "max_num_workers": 64,
        "steps_per_eval": 25,
        "max_token_length": 128,
    }

    async def setup(self) -> None:
        """Split the sums.

        Raises:
            EnvFault: the model has no chat template.
        """
        self.require_chat_template()
        training, self._held_out = split(self.config.seed)
        self.items = epochs(training, random.Random(self.config.seed))

    async def rollout(self, item: TwoDigitSum) -> dict[str, Any]:
        """Return `group_size` scored completions of one question."""
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
        done = await self.greedy(
            self.tokenizer.encode(prompt), wait=wait, max_tokens=MAX_NEW_TOKENS
        )
        text = self.tokenizer.decode(done.token_ids[0], skip_special_tokens=True)
        # Partial rewards guide training; the accuracy counts exact answers only.
        return Graded(reward(question, text) == 1.0, done.oldest_version)


if __name__ == "__main__":
    run(SumsEnv)
