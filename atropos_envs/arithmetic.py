"""The demo's task as pure functions: the sums, the held-out split, the reward."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atropos_envs import EnvFault

# Both numbers are below this. 400 sums are few enough to learn in minutes on a CPU, with enough
# carries to be hard.
OPERANDS = 20
# Share of the sums without a carry that are used. Carries are what the model has to learn, so all
# sums with one are used.
EASY_SHARE = 0.3
# Questions that neither the warm start nor the rollouts use.
HELD_OUT = 25
# The largest answer, 38, needs two digits and the end token; one token more shows a run-on answer.
MAX_NEW_TOKENS = 4
TASK_FILE = "task.json"


@dataclass(frozen=True, order=True)
class Sum:
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
        return self.left % 10 + self.right % 10 >= 10

    @property
    def without_carry(self) -> str:
        """The answer with a forgotten carry."""
        return str(self.left + self.right - (10 if self.carries else 0))


@dataclass(frozen=True)
class Task:
    """Training and held-out questions; disjoint and sorted."""

    seed: int
    held_out: tuple[Sum, ...]
    training: tuple[Sum, ...]

    @property
    def carries(self) -> tuple[Sum, ...]:
        return tuple(question for question in self.training if question.carries)


def all_questions() -> list[Sum]:
    return [Sum(left, right) for left in range(OPERANDS) for right in range(OPERANDS)]


def make_task(seed: int) -> Task:
    """Return the split of `seed`, which depends on nothing else."""
    # An own generator: the split must not depend on what else the process draws.
    rng = random.Random(seed)
    easy = [question for question in all_questions() if not question.carries]
    asked = [question for question in all_questions() if question.carries]
    asked += rng.sample(easy, round(EASY_SHARE * len(easy)))
    held_out = set(rng.sample(asked, HELD_OUT))
    return Task(seed, tuple(sorted(held_out)), tuple(sorted(set(asked) - held_out)))


def write_task(task: Task, folder: Path, accuracy: dict[str, float]) -> None:
    """Save the split beside a model, with its first accuracies."""
    content = {
        "seed": task.seed,
        "held_out": [[question.left, question.right] for question in task.held_out],
        "training": [[question.left, question.right] for question in task.training],
        "accuracy": accuracy,
    }
    (folder / TASK_FILE).write_text(json.dumps(content) + "\n")


def load_task(folder: Path, *, seed: int) -> Task:
    """Load the split that the model in `folder` was warm-started with, else that of `seed`.

    Raises:
        EnvFault: the file is not a split of this task.
    """
    path = folder / TASK_FILE
    # A model that was not warm-started, such as one of the user's own.
    if not path.is_file():
        return make_task(seed)
    fix = "delete the folder and warm-start again"
    try:
        content = json.loads(path.read_text())
        held_out, training = _questions(content["held_out"]), _questions(content["training"])
        task = Task(int(content["seed"]), held_out, training)
    except (ValueError, KeyError, TypeError) as error:
        raise EnvFault(f"{path}: not a task file ({error}); {fix}", exit_code=2) from None
    # A hand-edited file could train on held-out questions, and the evaluation would be worthless.
    if not task.held_out or not task.training or set(task.held_out) & set(task.training):
        raise EnvFault(f"{path}: its two parts are empty or overlap; {fix}", exit_code=2)
    return task


def _questions(pairs: list[list[int]]) -> tuple[Sum, ...]:
    found = {Sum(int(left), int(right)) for left, right in pairs}
    if not found <= set(all_questions()):
        raise ValueError(f"operands must be below {OPERANDS}")
    return tuple(sorted(found))


def reward(completion: Sequence[int], answer: Sequence[int], eos: int) -> float:
    """Return 1.0 for exactly the answer's token ids and the end token."""
    return float(list(completion) == [*answer, eos])
