"""GSM8K, grade-school mathematics, from the hub or from `--env.dataset_path FOLDER`.

    python -m atropos_envs.gsm8k_server serve --env.tokenizer_name MODEL \\
        --openai.model_name MODEL --openai.base_url http://127.0.0.1:9001/v1

The folder has `train.jsonl` and `test.jsonl`, as GitHub's openai/grade-school-math.
"""

from __future__ import annotations

from typing import Any

from atropos_envs import without_torch

# Before the import of atroposlib, which would import torch.
if __name__ == "__main__":
    without_torch()

from atropos_envs.hosting.base import run
from atropos_envs.hosting.engine_client import with_one_bos
from atropos_envs.math_env import (
    Completion,
    HubSplit,
    MathEnv,
    MathProblem,
    boxed,
    gold_answer,
    group_scores,
    read_split,
)

SYSTEM_PROMPT = (
    "You solve mathematics problems. Think as long as you need between <think> and </think>, then "
    "give a short solution whose last line is the final answer inside \\boxed{}."
)
DATASET, SUBSET = "openai/gsm8k", "main"


def load_rows(split: str, folder: str | None) -> list[MathProblem]:
    return read_split(folder, split) if folder else HubSplit(DATASET, split, SUBSET).load()


class Gsm8kEnv(MathEnv):
    name = "gsm8k"

    async def setup(self) -> None:
        self.require_chat_template()
        await super().setup()

    def train_rows(self) -> list[MathProblem]:
        return load_rows("train", self.config.dataset_path)

    def test_rows(self) -> dict[str, list[MathProblem]]:
        return {"test": load_rows("test", self.config.dataset_path)}

    def gold(self, row: MathProblem) -> str:
        # The worked solution, which ends in `#### NUMBER`.
        return boxed(gold_answer(row["answer"]))

    def prompt_ids(self, row: MathProblem) -> list[int]:
        # Text first, as in ManagedServer: a direct encoding could give other tokens.
        text = self.tokenizer.apply_chat_template(
            _messages(row), tokenize=False, add_generation_prompt=True
        )
        return with_one_bos(list(self.tokenizer.encode(text)), self.tokenizer)

    async def complete(
        self, managed: Any, row: MathProblem, sampling: dict[str, Any]
    ) -> list[tuple[str, str]]:
        answer = await managed.chat_completion(messages=_messages(row), **sampling)
        # A model with a reasoning parser may answer without any content.
        return [(choice.message.content or "", choice.finish_reason) for choice in answer.choices]

    def score(self, right: list[bool], group: list[Completion]) -> list[float]:
        return group_scores(right, [each.tokens for each in group], self.config.max_token_length)


def _messages(row: MathProblem) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": row["question"]},
    ]


if __name__ == "__main__":
    run(Gsm8kEnv)
