"""Recorded rollouts: every format gives the same tokens, and a difference is explained."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atropos_common.protocol import trainer_records as records
from benchmarks.silent_bugs import models
from trainer_core.audit.program import Settings, audit
from trainer_core.audit.reference import Reference, Span
from trainer_core.audit.rollouts import read_rollouts
from trainer_core.errors import UsageError
from trainer_core.objective.causes.sampling import PLAIN, Sampler

Row = dict[str, Any]
PROMPT, COMPLETION, COUNT = 6, 24, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(models.build("qwen2"), tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder, device="cpu")


def rollouts_of(reference: Reference) -> list[Row]:
    source, rows = random.Random(2), []
    for number in range(COUNT):
        tokens = [source.randrange(3, models.VOCABULARY) for _ in range(PROMPT + COMPLETION)]
        spread = reference.distribution([Span(tokens, PROMPT, PROMPT)])
        logprobs = spread.logprobs(PLAIN).tolist()
        rows.append(
            {
                "prompt_ids": tokens[:PROMPT],
                "completion_ids": tokens[PROMPT:],
                "logprobs": logprobs,
                "version": number // 2,
            }
        )
    return rows


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _trl(rows: list[Row], path: Path) -> Path:
    keys = ("prompt_ids", "completion_ids")
    batch = {key: [row[key] for row in rows] for key in keys}
    return write(path, [{**batch, "logprobs": [[[v] for v in row["logprobs"]] for row in rows]}])


def _prime(rows: list[Row], path: Path) -> Path:
    return write(
        path,
        [
            {
                "prompt_ids": row["prompt_ids"],
                "completion_ids": row["completion_ids"],
                "completion_mask": [True] * COMPLETION,
                "completion_logprobs": row["logprobs"],
                "completion_temperatures": [1.0] * COMPLETION,
            }
            for row in rows
        ],
    )


def _verl(rows: list[Row], path: Path) -> Path:
    prompts = [[0, 0, *row["prompt_ids"]] for row in rows]
    seen = [0, 0] + [1] * (PROMPT + COMPLETION) + [0]
    batch = {
        "prompts": torch.tensor(prompts),
        "responses": torch.tensor([[*row["completion_ids"], 0] for row in rows]),
        "rollout_log_probs": torch.tensor([[*row["logprobs"], 0.0] for row in rows]),
        "attention_mask": torch.tensor([seen] * len(rows)),
        "response_mask": torch.tensor([seen[PROMPT + 2 :]] * len(rows)),
    }
    path = path.with_suffix(".pt")
    torch.save(batch, path)
    return path


def _atropos(rows: list[Row], path: Path) -> Path:
    group: Row = {"tokens": [], "masks": [], "inference_logprobs": []}
    for row in rows:
        group["tokens"].append(row["prompt_ids"] + row["completion_ids"])
        group["masks"].append([-100] * PROMPT + row["completion_ids"])
        group["inference_logprobs"].append([1.0] * PROMPT + row["logprobs"])
    return write(path, [{"batch": [group]}])


def _ours(rows: list[Row], path: Path) -> Path:
    return write(path, rows)


@pytest.mark.parametrize("dump", [_ours, _trl, _prime, _verl, _atropos])
def test_every_format_gives_the_same_rollouts(
    reference: Reference, tmp_path: Path, dump: Callable[[list[Row], Path], Path]
) -> None:
    rows = rollouts_of(reference)
    found = read_rollouts(dump(rows, tmp_path / "rollouts.jsonl"))
    for row, one in zip(rows, found, strict=True):
        assert (one.prompt, one.completion) == (row["prompt_ids"], row["completion_ids"])
        assert one.logprobs == pytest.approx(row["logprobs"], abs=1e-6) and all(one.mask)


def test_rollouts_of_these_weights(folder: Path, reference: Reference, tmp_path: Path) -> None:
    rows = rollouts_of(reference)
    # A user's turn within the completion has no logprobs of the engine.
    rows[0]["completion_mask"] = [1] * 10 + [0] * 4 + [1] * 10
    rows[0]["logprobs"][10:14] = [0.0] * 4
    file = write(tmp_path / "rollouts.jsonl", rows)
    result = audit(Settings(folder, rollouts=file), reference)
    assert result.verdict == "serves" and result.rollouts is not None
    assert result.rollouts.tokens == COUNT * COMPLETION - 4 and result.rollouts.foreign == 0.0


@pytest.mark.parametrize(
    ("sampler", "cause"),
    [
        (PLAIN._replace(temperature=0.7), records.TEMPERATURE),
        (PLAIN._replace(top_k=20), records.SAMPLING),
    ],
)
def test_settings_explain_rollouts(
    folder: Path, reference: Reference, tmp_path: Path, sampler: Sampler, cause: str
) -> None:
    rows = rollouts_of(reference)
    if sampler.top_k:
        # Completions that a filter could have drawn: the likeliest tokens.
        for row in rows:
            tokens = list(row["prompt_ids"])
            for _ in range(COMPLETION):
                spread = reference.distribution([Span([*tokens, 0], len(tokens), PROMPT)])
                tokens.append(int(spread.logits[0].topk(2).indices[len(tokens) % 2]))
            row["completion_ids"] = tokens[PROMPT:]
    for row in rows:
        span = Span(row["prompt_ids"] + row["completion_ids"], PROMPT, PROMPT)
        row["logprobs"] = reference.distribution([span]).logprobs(sampler).tolist()
    file = write(tmp_path / "rollouts.jsonl", rows)
    result = audit(Settings(folder, rollouts=file), reference)
    assert result.cause == cause, result
    assert result.rollouts is not None and result.rollouts.foreign > 0.5


def test_the_age_of_rollouts_shows(folder: Path, tmp_path: Path) -> None:
    older = models.save(models.build("qwen2", seed=8), tmp_path / "older")
    old = rollouts_of(Reference(older, device="cpu"))
    new = rollouts_of(Reference(folder, device="cpu"))
    file = write(tmp_path / "rollouts.jsonl", [*old[:2], *new[2:]])
    result = audit(Settings(folder, rollouts=file))
    assert result.verdict == "does not" and result.rollouts is not None
    assert result.rollouts.by_version["0"] > 0.1 > 1e-4 > result.rollouts.by_version["1"]
    file = write(tmp_path / "rollouts.jsonl", old)
    result = audit(Settings(folder, older=older, rollouts=file))
    assert result.rollouts is not None and "older" in result.rollouts.explained_by
    assert result.cause == records.STALE_WEIGHTS


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keys: text"):
        read_rollouts(write(tmp_path / "text.jsonl", [{"text": "no tokens"}]))
    with pytest.raises(UsageError, match=r"missing\.jsonl"):
        read_rollouts(tmp_path / "missing.jsonl")
