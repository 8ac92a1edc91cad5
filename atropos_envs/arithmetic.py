"""The demo's task as pure functions: sums of two numbers from 0 to 19, the held-out split, the
reward.

Imports neither torch nor atroposlib: the warm start, the environment and the tests share it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atropos_envs import EnvFault

# 400 sums: small enough to learn in minutes on a CPU, with enough carries to be hard.
OPERANDS = 20
"""Both numbers are below this."""
EASY_SHARE = 0.3
"""Share of the sums without a carry that are used. Every sum with a carry is used: carries are what
the model has to learn."""
HELD_OUT = 25
"""Number of questions that neither the warm start nor the rollouts use."""
# The largest answer, 38, needs two digits and the end token; one token more shows a run-on answer.
MAX_NEW_TOKENS = 4
TASK_FILE = "task.json"


@dataclass(frozen=True, order=True)
class Sum:
    """`left + right`."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    @property
    def carries(self) -> bool:
        """True if the ones add up to ten or more."""
        return self.left % 10 + self.right % 10 >= 10

    @property
    def without_carry(self) -> str:
        """The answer with the carry forgotten; the right answer if there is no carry."""
        return str(self.left + self.right - (10 if self.carries else 0))


@dataclass(frozen=True)
class Task:
    """Split into training and held-out questions; disjoint and sorted."""

    seed: int
    held_out: tuple[Sum, ...]
    training: tuple[Sum, ...]

    @property
    def carries(self) -> tuple[Sum, ...]:
        """Training questions with a carry."""
        return tuple(question for question in self.training if question.carries)


def all_questions() -> list[Sum]:
    """All sums, in order."""
    return [Sum(left, right) for left in range(OPERANDS) for right in range(OPERANDS)]


def make_task(seed: int) -> Task:
    """Choose all sums with a carry and `EASY_SHARE` of the others, and hold `HELD_OUT` of them out;
    depends on `seed` alone."""
    # An own generator: the split must not depend on what else the process draws.
    rng = random.Random(seed)
    easy = [question for question in all_questions() if not question.carries]
    asked = [question for question in all_questions() if question.carries]
    asked += rng.sample(easy, round(EASY_SHARE * len(easy)))
    held_out = set(rng.sample(asked, HELD_OUT))
    return Task(
        seed=seed,
        held_out=tuple(sorted(held_out)),
        training=tuple(sorted(set(asked) - held_out)),
    )


def write_task(task: Task, folder: Path, accuracy: dict[str, float]) -> None:
    """Save the split beside a model, with its accuracies before training."""
    content = {
        "seed": task.seed,
        "held_out": [[question.left, question.right] for question in task.held_out],
        "training": [[question.left, question.right] for question in task.training],
        "accuracy": accuracy,
    }
    (folder / TASK_FILE).write_text(json.dumps(content) + "\n")


def load_task(folder: Path, *, seed: int) -> Task:
    """Load the split that the model in `folder` was warm-started with; without a file, make the
    split of `seed`.

    Raises:
        EnvFault: the file is not a split of this task.
    """
    path = folder / TASK_FILE
    # A model that was not warm-started, such as one of the user's own.
    if not path.is_file():
        return make_task(seed)
    try:
        content = json.loads(path.read_text())
        task = Task(
            int(content["seed"]), _questions(content["held_out"]), _questions(content["training"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise EnvFault(
            f"{path}: not a task file ({error}); delete the folder and warm-start again",
            exit_code=2,
        ) from None
    # A hand-edited file could train on held-out questions, and the evaluation would be worthless.
    if not task.held_out or not task.training or set(task.held_out) & set(task.training):
        raise EnvFault(
            f"{path}: its two parts are empty or overlap; delete the folder and warm-start again",
            exit_code=2,
        )
    return task


def _questions(pairs: list[list[int]]) -> tuple[Sum, ...]:
    found = {Sum(int(left), int(right)) for left, right in pairs}
    if not found <= set(all_questions()):
        raise ValueError(f"operands must be below {OPERANDS}")
    return tuple(sorted(found))


def reward(completion: Sequence[int], answer: Sequence[int], eos: int) -> float:
    """Return 1.0 if the completion is exactly the answer's tokens and the end token, else 0.0.

    Args:
        completion: generated token ids, end token included.
        answer: token ids of the right digits.
        eos: id of the end token.
    """
    return float(list(completion) == [*answer, eos])
