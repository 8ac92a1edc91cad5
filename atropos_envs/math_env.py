"""Base of the mathematics environments: problems in epochs, groups of completions, a greedy test.

Worker processes (`grading.py`) compare the answers.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from atroposlib.envs.base import BaseEnvConfig
from pydantic import Field

from atropos_envs import EnvFault
from atropos_envs.grading import BOX, Graders
from atropos_envs.hosting.base import StackEnv, epochs
from atropos_envs.hosting.evaluation import Graded

RIGHT, WRONG = 1.0, -1.0
# Share of the token limit up to which length does not lower the score of a right answer.
FREE_LENGTH = 0.5


class MathProblem(TypedDict):
    question: str
    answer: str


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set on the hub, and its two columns."""

    dataset: str
    split: str
    subset: str | None = None
    question: str = "question"
    answer: str = "answer"

    def load(self) -> list[MathProblem]:
        """Return the rows that have text in both columns.

        Raises:
            EnvFault: neither the hub nor its cache has the data.
        """
        from datasets import load_dataset

        where = (self.dataset, self.subset) if self.subset else (self.dataset,)
        try:
            rows = [self._row(row) for row in load_dataset(*where, split=self.split)]
        except Exception as error:
            # The hub's client raises many unrelated types, and all mean: no data.
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise EnvFault(
                f"the data set {self.dataset} cannot be loaded ({reason[:200]}). Check the network "
                "or HF_ENDPOINT, use HF_HUB_OFFLINE=1 with a filled cache, or give "
                "--env.dataset_path FOLDER with train.jsonl and test.jsonl",
                exit_code=2,
            ) from None
        problems = [row for row in rows if row is not None]
        return _filled(problems, f"the {self.split} split of {self.dataset}")

    def _row(self, row: Any) -> MathProblem | None:
        question, answer = row[self.question], row[self.answer]
        both = isinstance(question, str) and isinstance(answer, str)
        return MathProblem(question=question, answer=answer) if both else None


def read_split(folder: str, split: str) -> list[MathProblem]:
    """Read `FOLDER/SPLIT.jsonl`.

    Raises:
        EnvFault: the file is missing or empty, or a line is not a problem.
    """
    path = Path(folder) / f"{split}.jsonl"
    try:
        # Not `splitlines`, which also splits at U+2028 and U+0085 inside JSON strings.
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        needed = "--env.dataset_path needs train.jsonl and test.jsonl"
        raise EnvFault(f"{path}: no such file; {needed}", exit_code=2) from None
    except (OSError, UnicodeDecodeError) as error:
        raise EnvFault(f"{path}: cannot be read as text ({error})", exit_code=2) from None
    problems = [_parse(path, n, line) for n, line in enumerate(lines, start=1) if line.strip()]
    return _filled(problems, str(path))


def _parse(path: Path, number: int, line: str) -> MathProblem:
    try:
        row = json.loads(line)
        return MathProblem(question=str(row["question"]), answer=str(row["answer"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        form = '{"question": ..., "answer": ...}'
        raise EnvFault(f"{path}:{number}: not a problem; expected {form}", exit_code=2) from None


def _filled(rows: list[MathProblem], what: str) -> list[MathProblem]:
    if not rows:
        raise EnvFault(f"{what} is empty", exit_code=2)
    return rows


# The number after `####`, without thousands separators.
def gold_answer(solution: str) -> str:
    _, mark, number = solution.rpartition("####")
    return number.strip().replace(",", "") if mark else ""


def boxed(answer: str) -> str:
    """Return `answer` in a box, as math_verify reads it; empty if there is none."""
    return f"{BOX}{{{answer}}}" if answer else ""


def group_scores(right: Sequence[bool], lengths: Sequence[int], longest: int) -> list[float]:
    """Return +1 for right and -1 for wrong; if all are right, scores that fall with length.

    Args:
        right: per completion.
        lengths: tokens per sequence, prompt included.
        longest: limit of tokens per sequence.
    """
    if right and all(right):
        return [_brevity(length, longest) for length in lengths]
    return [RIGHT if each else WRONG for each in right]


# 1 up to half of `longest` tokens; from there it falls linearly to 0 at `longest`.
def _brevity(length: int, longest: int) -> float:
    free = FREE_LENGTH * longest
    return 1.0 - min(1.0, max(0.0, (length - free) / (longest - free)))


class MathConfig(BaseEnvConfig):  # type: ignore[misc]
    """BaseEnv's fields and ours; on the command line `--env.NAME`."""

    seed: int = Field(42, description="Order of the problems")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature of rollouts")
    dataset_path: str | None = Field(
        None, description="Folder with train.jsonl and test.jsonl in the place of the hub"
    )
    eval_size: int = Field(128, ge=1, description="Problems of each test split in an evaluation")
    eval_interval_s: float | None = Field(
        None,
        gt=0,
        description="Seconds between evaluations from the first step on, beside steps_per_eval",
    )


@dataclass(frozen=True)
class Completion:
    text: str
    tokens: int
    """Tokens of the whole sequence, prompt included."""
    truncated: bool
    """Reached the token limit before its end token."""


class MathEnv(StackEnv):
    env_config_cls = MathConfig
    # An evaluation takes minutes with a real model: neither rollouts nor the end of the run wait
    # for it.
    evaluates_first = False
    evaluates_last = False
    env_defaults: ClassVar[dict[str, Any]] = {
        "batch_size": 64,
        "max_num_workers": 32,
        "steps_per_eval": 100,
        "max_token_length": 2048,
    }
    stop: ClassVar[list[str]] = []
    """Texts that end a completion."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._graders = Graders()

    # To be defined by a subclass

    def train_rows(self) -> list[MathProblem]:
        """Return the problems to roll out."""
        raise NotImplementedError

    def test_rows(self) -> dict[str, list[MathProblem]]:
        """Return the problems of each split to evaluate."""
        raise NotImplementedError

    def gold(self, row: MathProblem) -> str:
        """Return the answer in a box; empty if there is none."""
        raise NotImplementedError

    def prompt_ids(self, row: MathProblem) -> list[int]:
        """Return the prompt's token ids, the same as those of ManagedServer in `complete`."""
        raise NotImplementedError

    async def complete(
        self, managed: Any, row: MathProblem, sampling: dict[str, Any]
    ) -> list[tuple[str, str]]:
        """Return text and finish reason of `group_size` completions, in ManagedServer's order."""
        raise NotImplementedError

    def score(self, right: list[bool], group: list[Completion]) -> list[float]:
        """Return a score for each completion."""
        raise NotImplementedError

    # Provided for a subclass

    _evaluated_at: float | None = None
    """Start of the newest evaluation by the clock; at first, of the training."""

    async def setup(self) -> None:
        rng = random.Random(self.config.seed)
        self.items = epochs(self.train_rows(), rng)
        self._test = {
            split: rng.sample(rows, min(self.config.eval_size, len(rows)))
            for split, rows in self.test_rows().items()
        }

    async def rollout(self, item: MathProblem) -> dict[str, Any]:
        """Return one scored group.

        Raises:
            ValueError: an answer in the data set cannot be read.
        """
        # Before the completions: without a readable answer every completion would count as wrong.
        gold = self.gold(item)
        if not (gold and await self._graders.readable(gold)):
            raise ValueError("an answer in the data set cannot be read")
        sampling = self._sampling(item) | {"temperature": self.config.temperature}
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            texts = await self.complete(managed, item, sampling | {"n": self.config.group_size})
            nodes = managed.get_state()["nodes"]
        # ManagedServer keeps its nodes in the order of the answer; `strict` fails if one is
        # missing.
        group = [
            Completion(text, len(node.tokens), reason == "length")
            for (text, reason), node in zip(texts, nodes, strict=True)
        ]
        right = await asyncio.gather(*(self.right(each, gold) for each in group))
        scores = self.score(right, group)
        overrides = [self.override(each) for each in group]
        return self.scored_group(nodes, scores, sampling) | {"overrides": overrides}

    async def right(self, completion: Completion, gold: str) -> bool:
        return await self._graders.right(completion.text, gold)

    def override(self, completion: Completion) -> dict[str, Any]:
        """Return the trainer's override, such as `set_advantage_to_zero`."""
        return {}

    async def env_step_checks(self) -> None:
        """Evaluate at BaseEnv's intervals of steps, and at ours of seconds."""
        await super().env_step_checks()
        every, now = self.config.eval_interval_s, time.monotonic()
        if every is None or not self._evaluates or self.curr_step < 1:
            return
        if self._evaluated_at is None:
            self._evaluated_at = now
        elif now - self._evaluated_at >= every:
            self._evaluated_at = now
            self._evaluate_soon()

    def eval_questions(self) -> dict[str, Sequence[MathProblem]]:
        return dict(self._test)

    async def grade(self, question: MathProblem, *, wait: bool) -> Graded:
        # `/generate` takes ids, so the evaluation has exactly the tokens of the rollouts' prompts.
        done = await self.greedy(self.prompt_ids(question), wait=wait, **self._sampling(question))
        completion = Completion(
            self.tokenizer.decode(done.token_ids[0], skip_special_tokens=True),
            len(done.prompt_ids) + len(done.token_ids[0]),
            done.finish_reasons[0] == "length",
        )
        right = await self.right(completion, self.gold(question))
        return Graded(right, done.oldest_version)

    async def _close_servers(self) -> None:
        self._graders.close()
        await super()._close_servers()

    def _sampling(self, row: MathProblem) -> dict[str, Any]:
        # BaseEnv drops a group with a sequence that reaches the limit, so stay one token below it.
        left = self.config.max_token_length - len(self.prompt_ids(row)) - 1
        stop = {"stop": self.stop} if self.stop else {}
        return {"max_tokens": max(1, left)} | stop
