"""Mathematics from a base model ("zero"): no chat template, no system prompt, answers in a box.

    python -m atropos_envs.math_zero_server serve --env.tokenizer_name MODEL \\
        --openai.model_name MODEL --openai.base_url http://127.0.0.1:9001/v1

Trains on DeepMath-103K; evaluates on MATH-500 and AIME 2024.
"""

from __future__ import annotations

from typing import Any, ClassVar

from atropos_envs import without_torch

# Before the import of atroposlib, which would import torch.
if __name__ == "__main__":
    without_torch()

from pydantic import Field

from atropos_envs.grading import BOX
from atropos_envs.hosting.base import run
from atropos_envs.math_env import (
    RIGHT,
    WRONG,
    Completion,
    HubSplit,
    MathConfig,
    MathEnv,
    MathProblem,
    boxed,
    read_split,
)

PROMPT = (
    "Below is a mathematics problem, then a solution that reasons step by step and ends with the "
    "final answer inside \\boxed{{}}.\n\nProblem: {question}\n\nSolution:"
)
TRAIN = HubSplit("zwhe99/DeepMath-103K", "train", answer="final_answer")
TESTS = {
    "math500": HubSplit("HuggingFaceH4/MATH-500", "test", question="problem"),
    "aime24": HubSplit("HuggingFaceH4/aime_2024", "train", question="problem"),
}


class MathZeroConfig(MathConfig):
    mask_truncated: bool = Field(
        True,
        description="Count a truncated completion as wrong for its group, and do not train on it",
    )


class MathZeroEnv(MathEnv):
    name = "math-zero"
    env_config_cls = MathZeroConfig
    env_defaults: ClassVar[dict[str, Any]] = MathEnv.env_defaults | {
        "max_token_length": 4096,
        "steps_per_eval": 50,
    }
    # After its answer a base model often invents the next problem.
    stop: ClassVar[list[str]] = ["\nProblem:", "\nUser:", "\nHuman:"]

    def train_rows(self) -> list[MathProblem]:
        folder = self.config.dataset_path
        return read_split(folder, "train") if folder else TRAIN.load()

    def test_rows(self) -> dict[str, list[MathProblem]]:
        if folder := self.config.dataset_path:
            return {"test": read_split(folder, "test")}
        return {name: split.load() for name, split in TESTS.items()}

    def gold(self, row: MathProblem) -> str:
        answer = row["answer"]
        # The data sets have bare answers; math_verify needs LaTeX, and a box makes them that.
        return answer if BOX in answer else boxed(answer)

    def prompt_ids(self, row: MathProblem) -> list[int]:
        return list(self.tokenizer.encode(_prompt(row)))

    async def complete(
        self, managed: Any, row: MathProblem, sampling: dict[str, Any]
    ) -> list[tuple[str, str]]:
        answer = await managed.completion(prompt=_prompt(row), **sampling)
        return [(choice.text or "", choice.finish_reason) for choice in answer.choices]

    async def right(self, completion: Completion, gold: str) -> bool:
        # A completion has to end by itself, with its answer in a box.
        ended = not completion.truncated and BOX in completion.text
        return ended and await super().right(completion, gold)

    def score(self, right: list[bool], group: list[Completion]) -> list[float]:
        return [RIGHT if each else WRONG for each in right]

    def override(self, completion: Completion) -> dict[str, Any]:
        masked = completion.truncated and self.config.mask_truncated
        return {"set_advantage_to_zero": True} if masked else {}


def _prompt(row: MathProblem) -> str:
    # Spaces around a question would become tokens of their own.
    return PROMPT.format(question=row["question"].strip())


if __name__ == "__main__":
    run(MathZeroEnv)
