"""What environments of mathematics problems share: problems in epochs, groups of completions, a greedy test.

A subclass says how a problem becomes a prompt, what its answer is, and how a group of completions is scored.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from atroposlib.envs.base import BaseEnvConfig
from pydantic import Field

from atropos_envs.base import StackEnv, epochs
from atropos_envs.evaluation import Graded
from atropos_envs.problems import MathProblem, is_right


class MathConfig(BaseEnvConfig):  # type: ignore[misc]
    """BaseEnv's fields and ours; on the command line `--env.NAME`."""

    seed: int = Field(42, description="Order of the problems")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature of rollouts")
    dataset_path: str | None = Field(None, description="Folder with train.jsonl and test.jsonl in the place of the hub")
    eval_size: int = Field(128, ge=1, description="Problems of each test split in an evaluation")


@dataclass(frozen=True)
class Completion:
    """One completion of a group."""

    text: str
    tokens: int
    """Of the whole sequence, prompt included."""
    truncated: bool
    """It ran into its token limit, so it never said that it is done."""


class MathEnv(StackEnv):
    """Base of the mathematics environments."""

    env_config_cls = MathConfig
    # Minutes long with a real model: rollouts do not wait for it, nor does the end of the run.
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

    # What a subclass gives

    def train_rows(self) -> list[MathProblem]:
        """The problems that are rolled out."""
        raise NotImplementedError

    def test_rows(self) -> dict[str, list[MathProblem]]:
        """The problems of each split that is evaluated."""
        raise NotImplementedError

    def gold(self, row: MathProblem) -> list[Any]:
        """The answer as math_verify's candidates; empty where it cannot be read."""
        raise NotImplementedError

    def prompt_ids(self, row: MathProblem) -> list[int]:
        """The prompt as ManagedServer makes it in `complete`."""
        raise NotImplementedError

    async def complete(self, managed: Any, row: MathProblem, sampling: dict[str, Any]) -> list[tuple[str, str]]:
        """`group_size` completions of one problem, each with its finish reason, by atroposlib's managed server."""
        raise NotImplementedError

    def score(self, right: list[bool], group: list[Completion]) -> list[float] | None:
        """A score for each completion; None when nothing can be learned from them."""
        raise NotImplementedError

    # What it gets

    async def setup(self) -> None:
        """Load all splits and shuffle them by the seed."""
        rng = random.Random(self.config.seed)
        self.items = epochs(self.train_rows(), rng)
        self._test = {
            split: rng.sample(rows, min(self.config.eval_size, len(rows))) for split, rows in self.test_rows().items()
        }

    async def rollout(self, item: MathProblem) -> dict[str, Any] | None:
        """One scored group; None without a readable answer in the data set or with equal scores."""
        gold = self.gold(item)
        if not gold:
            return None
        sampling = self._sampling(item) | {"temperature": self.config.temperature}
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            texts = await self.complete(managed, item, sampling | {"n": self.config.group_size})
            nodes = managed.get_state()["nodes"]
        group = [
            Completion(text, len(node.tokens), reason == "length")
            for (text, reason), node in zip(texts, nodes, strict=True)
        ]
        scores = self.score([self.right(each, gold) for each in group], group)
        if scores is None:
            return None
        return self.scored_group(nodes, scores, sampling) | {"overrides": [self.override(each) for each in group]}

    def right(self, completion: Completion, gold: list[Any]) -> bool:
        """Whether one completion answers the problem."""
        return is_right(completion.text, gold)

    def override(self, completion: Completion) -> dict[str, Any]:
        """What the trainer shall do otherwise with one completion."""
        return {}

    def eval_questions(self) -> dict[str, Sequence[MathProblem]]:
        """A fixed sample of each test split."""
        return dict(self._test)

    async def grade(self, question: MathProblem, *, wait: bool) -> Graded:
        done = await self.greedy(self.prompt_ids(question), wait=wait, **self._sampling(question))
        completion = Completion(
            self.tokenizer.decode(done.token_ids[0], skip_special_tokens=True),
            len(done.prompt_ids) + len(done.token_ids[0]),
            done.finish_reasons[0] == "length",
        )
        return Graded(self.right(completion, self.gold(question)), done.oldest_version)

    def _sampling(self, row: MathProblem) -> dict[str, Any]:
        """Tokens left for the completion are one less than the limit: run-api's side drops what reaches it."""
        room = self.config.max_token_length - len(self.prompt_ids(row)) - 1
        stop = {"stop": self.stop} if self.stop else {}
        return {"max_tokens": max(1, room)} | stop
