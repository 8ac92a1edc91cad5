"""Sums of two-digit numbers, asked in a chat: the smallest task on which a chat model of 135 M parameters learns.

    python -m atropos_envs.sums_server serve --env.tokenizer_name MODEL --openai.model_name MODEL \\
        --env.rollout_server_url http://127.0.0.1:8000 --openai.base_url http://127.0.0.1:9001/v1

A group is one question through the model's chat template, completed `group_size` times. `HELD_OUT` sums, chosen by the
seed, are never rolled out: their greedy answers are the evaluation, where only the bare number counts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from atropos_envs import without_torch

if __name__ == "__main__":
    without_torch()

from atroposlib.envs.base import BaseEnvConfig
from pydantic import Field

from atropos_envs.base import StackEnv, epochs, run
from atropos_envs.evaluation import Graded

HELD_OUT = 128
MAX_NEW_TOKENS = 8
"""SmolLM2 writes each digit as a token of its own; whoever begins to explain is cut off."""
SHOWN = [
    {"role": "system", "content": "You are a calculator. Reply with the number only."},
    {"role": "user", "content": "12 + 31"},
    {"role": "assistant", "content": "43"},
]
"""One example: with it the untrained model answers three of four questions with a bare number, one of a hundred
rightly; asked without it talks, and nine of twelve groups are all wrong alike."""
NEAR = 50
"""Distance of a wrong answer from which on it is worth no more than its form."""
NUMBER = re.compile(r"[0-9]+")


class TwoDigitSum(NamedTuple):
    """`left + right`, both from 10 to 99."""

    left: int
    right: int

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*SHOWN, {"role": "user", "content": f"{self.left} + {self.right}"}]


def reward(question: TwoDigitSum, text: str) -> float:
    """1 for the right number alone, 0.2 to 0.5 for a wrong one by how near it is, 0.1 for the right number among words,
    else 0: nearness ranks the answers of a group in which none is right."""
    answer, text = question.left + question.right, text.strip()
    if not NUMBER.fullmatch(text):
        return 0.1 if str(answer) in NUMBER.findall(text) else 0.0
    if text == str(answer):
        return 1.0
    return 0.2 + 0.3 * max(0.0, 1 - abs(int(text) - answer) / NEAR)


def split(seed: int) -> tuple[list[TwoDigitSum], list[TwoDigitSum]]:
    """All 8,100 sums in an order by `seed`, as training and held-out questions."""
    sums = [TwoDigitSum(left, right) for left in range(10, 100) for right in range(10, 100)]
    random.Random(seed).shuffle(sums)
    return sums[HELD_OUT:], sums[:HELD_OUT]


class SumsConfig(BaseEnvConfig):  # type: ignore[misc]
    """BaseEnv's fields and ours; on the command line `--env.NAME`."""

    seed: int = Field(0, description="Which sums are held out, and the order of the others")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature of rollouts")


class SumsEnv(StackEnv):
    """Questions in epochs, each epoch a new order of all training questions."""

    name = "sums"
    env_config_cls = SumsConfig
    env_defaults: ClassVar[dict[str, Any]] = {
        "batch_size": 64,
        "max_num_workers": 64,
        "steps_per_eval": 25,
        "max_token_length": 128,
    }

    async def setup(self) -> None:
        """Divide the sums.

        Raises:
            EnvFault: the model cannot chat.
        """
        self.require_chat_template()
        training, self._held_out = split(self.config.seed)
        self.items = epochs(training, random.Random(self.config.seed))

    async def rollout(self, item: TwoDigitSum) -> dict[str, Any]:
        """`group_size` completions of one question, scored."""
        sampling = {"temperature": self.config.temperature, "max_tokens": MAX_NEW_TOKENS}
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(messages=item.messages, n=self.config.group_size, **sampling)
            nodes = managed.get_state()["nodes"]
        scores = [reward(item, choice.message.content or "") for choice in answer.choices]
        return self.scored_group(nodes, scores, sampling)

    def eval_questions(self) -> dict[str, Sequence[TwoDigitSum]]:
        return {"held_out": self._held_out}

    async def grade(self, question: TwoDigitSum, *, wait: bool) -> Graded:
        prompt = self.tokenizer.apply_chat_template(question.messages, tokenize=False, add_generation_prompt=True)
        done = await self.greedy(self.tokenizer.encode(prompt), wait=wait, max_tokens=MAX_NEW_TOKENS)
        text = self.tokenizer.decode(done.token_ids[0], skip_special_tokens=True)
        return Graded(reward(question, text) == 1.0, done.oldest_version)


if __name__ == "__main__":
    run(SumsEnv)
