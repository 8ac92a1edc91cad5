"""GSM8K, grade-school mathematics, as an atroposlib environment with the data set from the Hugging Face hub.

    python -m atropos_envs.gsm8k_server serve --env.tokenizer_name MODEL --openai.model_name MODEL \\
        --env.rollout_server_url http://127.0.0.1:8000 --openai.base_url http://127.0.0.1:9001/v1

Without the hub: `--env.dataset_path FOLDER` with `train.jsonl` and `test.jsonl`, lines of `{"question", "answer"}` as
the data set has them. Scores are +1 and -1 (see `gsm8k_scoring`); groups of equal scores are dropped.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, EvalHandlingEnum
from pydantic import Field

from atropos_envs.base import StackEnv, run
from atropos_envs.errors import EnvFault
from atropos_envs.evaluation import Graded
from atropos_envs.gsm8k_scoring import group_scores, is_right, parse_gold

SYSTEM_PROMPT = (
    "You solve mathematics problems. Think as long as you need between <think> and </think>, then give a short "
    "solution whose last line is the final answer inside \\boxed{}."
)
DATASET, SUBSET = "openai/gsm8k", "main"


class Row(TypedDict):
    """One problem; `answer` is the worked solution that ends in `#### NUMBER`."""

    question: str
    answer: str


class Gsm8kConfig(BaseEnvConfig):  # type: ignore[misc]
    """BaseEnv's fields and ours; on the command line `--env.NAME`."""

    seed: int = Field(42, description="Order of the problems")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature of rollouts")
    dataset_path: str | None = Field(None, description="Folder with train.jsonl and test.jsonl in the place of the hub")
    eval_size: int = Field(128, ge=1, description="Test problems per evaluation; the test split has 1319")


def load_rows(split: str, folder: str | None) -> list[Row]:
    """One split, `train` or `test`.

    Raises:
        EnvFault: no such file, a line that is no problem, or no hub.
    """
    rows = _rows_from_file(Path(folder) / f"{split}.jsonl") if folder else _rows_from_hub(split)
    if not rows:
        raise EnvFault(f"the {split} split of {folder or DATASET} is empty", exit_code=2)
    return rows


def _rows_from_file(path: Path) -> list[Row]:
    if not path.is_file():
        raise EnvFault(f"{path}: no such file; --env.dataset_path needs train.jsonl and test.jsonl", exit_code=2)
    rows: list[Row] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append(Row(question=str(row["question"]), answer=str(row["answer"])))
        except (ValueError, KeyError, TypeError):
            raise EnvFault(
                f'{path}:{number}: not a problem; expected {{"question": ..., "answer": ...}}', exit_code=2
            ) from None
    return rows


def _rows_from_hub(split: str) -> list[Row]:
    from datasets import load_dataset

    try:
        return [
            Row(question=row["question"], answer=row["answer"]) for row in load_dataset(DATASET, SUBSET, split=split)
        ]
    except Exception as error:  # the hub's client raises many unrelated types, and all mean: no data
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise EnvFault(
            f"the data set {DATASET} cannot be loaded ({reason[:200]}). Check the network or HF_ENDPOINT, use "
            "HF_HUB_OFFLINE=1 with a filled cache, or give --env.dataset_path FOLDER with train.jsonl and test.jsonl",
            exit_code=2,
        ) from None


class Gsm8kEnv(StackEnv):
    """Problems in epochs; the chat template makes the prompts."""

    name = "gsm8k"
    env_config_cls = Gsm8kConfig
    # Minutes long with a real model: rollouts do not wait for it, nor does the end of the run.
    evaluates_first = False
    evaluates_last = False

    @classmethod
    def config_init(cls) -> tuple[Gsm8kConfig, list[Any]]:
        """The guide's defaults, without wandb and without a limit of its own."""
        env_config = Gsm8kConfig(
            wandb_name=cls.name,
            use_wandb=False,
            group_size=8,
            batch_size=64,
            max_batches_offpolicy=1,
            max_num_workers=32,
            max_eval_workers=64,
            eval_handling=EvalHandlingEnum.NONE,
            steps_per_eval=100,
            max_token_length=2048,
            total_steps=1_000_000_000,
            rollout_server_url="http://127.0.0.1:8000",
        )
        server = APIServerConfig(
            server_type="vllm", base_url="http://127.0.0.1:9001/v1", api_key="local", model_name=""
        )
        return env_config, [server]

    async def setup(self) -> None:
        """Load both splits and shuffle them by the seed."""
        if not self.tokenizer.chat_template:
            raise EnvFault(
                f"{self.config.tokenizer_name} has no chat template; use an instruction-tuned model", exit_code=2
            )
        self._rng = random.Random(self.config.seed)
        self._train = load_rows("train", self.config.dataset_path)
        test = load_rows("test", self.config.dataset_path)
        self._test = self._rng.sample(test, min(self.config.eval_size, len(test)))
        self._epoch: list[Row] = []

    async def get_next_item(self) -> Row:
        """The next training problem."""
        if not self._epoch:
            self._epoch = self._rng.sample(self._train, len(self._train))
        return self._epoch.pop()

    async def rollout(self, item: Row) -> dict[str, Any] | None:
        """`group_size` completions, scored; None without a readable answer in the data set or with equal scores."""
        gold = parse_gold(item["answer"])
        if not gold:
            return None
        sampling = {"temperature": self.config.temperature, "max_tokens": self._room(item)}
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(messages=_messages(item), n=self.config.group_size, **sampling)
            nodes = managed.get_state()["nodes"]
        right = [is_right(choice.message.content or "", gold) for choice in answer.choices]
        scores = group_scores(right, [len(node.tokens) for node in nodes], self.config.max_token_length)
        if scores is None:
            return None
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": scores,
            "generation_params": sampling | {"env": self.component},
        }

    def eval_questions(self) -> dict[str, Sequence[Row]]:
        """A fixed sample of the test split."""
        return {"test": self._test}

    async def grade(self, question: Row, *, wait: bool) -> Graded:
        """Greedy, on the first server."""
        done = await self.server.servers[0].generate(
            self._prompt_ids(question), wait=wait, temperature=0.0, max_tokens=self._room(question)
        )
        text = self.tokenizer.decode(done.token_ids[0], skip_special_tokens=True)
        span = done.weight_versions[0]
        return Graded(is_right(text, parse_gold(question["answer"])), span[0] if span is not None else None)

    def _prompt_ids(self, row: Row) -> list[int]:
        """Prompt as ManagedServer makes it: the template as text, then encoded."""
        text = self.tokenizer.apply_chat_template(_messages(row), tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(text))

    def _room(self, row: Row) -> int:
        """Tokens left for the completion; one less than the limit, because run-api's side drops what reaches it."""
        return max(1, self.config.max_token_length - len(self._prompt_ids(row)) - 1)


def _messages(row: Row) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": row["question"]}]


if __name__ == "__main__":
    run(Gsm8kEnv)
