"""Training in single copy against one live server, on rollouts that it generates on request: the
gate's verdict on healthy runs and on planted faults, on the CPU and on a GPU alike."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atropos_common.protocol.records import parse_line
from atropos_common.protocol.trainer_records import AlignmentRecord
from tests.e2e.streams import Streams
from tests.e2e.vllm_server_live import Server
from trainer_core.config import TrainingConfig
from trainer_core.errors import MismatchError
from trainer_core.loop import train
from trainer_core.weight_sync import shared_vllm
from trainer_core.weight_sync.base import Start

PROMPTS = [[2 + (i * 7 + j) % 12 for j in range(70)] for i in range(4)]
Spoil = Callable[[dict[str, Any]], None]


class Live:
    """run-api's part: the server generates each batch on request, so nothing lags."""

    def __init__(self, server: Server, spoil: Spoil | None = None, **sampling: Any) -> None:
        self.server, self.spoil, self.sampling = server, spoil, sampling

    def next_batch(self, step: int, on_idle: Any = None) -> Any:
        return [self._group(prompt) for prompt in PROMPTS]

    def _group(self, prompt: list[int]) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "n": 4,
            "max_tokens": 10,
            "ignore_eos": True,
            "temperature": 1.0,
            **self.sampling,
        }
        answer = self.server.generate(**body)
        theirs = [
            [next(iter(position[0].values())) for position in one] for one in answer["logprobs"]
        ]
        group = {
            "tokens": [prompt + ids for ids in answer["token_ids"]],
            "masks": [[-100] * len(prompt) + ids for ids in answer["token_ids"]],
            "scores": [sum(i % 2 == 0 for i in ids) / len(ids) for ids in answer["token_ids"]],
            "inference_logprobs": [[1.0] * len(prompt) + values for values in theirs],
            "generation_params": {"temperature": 1.0},
        }
        if self.spoil:
            self.spoil(group)
        return group

    def close(self) -> None:
        pass


def config(server: Server, folder: Path, **fields: Any) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "model_name": str(server.model),
            "weight_bridge_mode": "shared_vllm",
            "dtype": "float32",
            "device": "cpu",
            "optimizer": "adamw",
            "lr": 2e-3,
            "training_steps": 3,
            "batch_size": 16,
            "gradient_accumulation_steps": 1,
            "checkpoint_interval": 0,
            "vllm_config_path": str(server.bridge_dir / "vllm_bridge_config.json"),
            "save_path": str(folder / "out"),
            "max_model_len": 256,
            "engine_timeout": 60,
            **fields,
        }
    )


def train_on(server: Server, folder: Path, api: Live | None = None, **fields: Any) -> list[Any]:
    """A run against the server; its records."""
    train(config(server, folder, **fields), api=api or Live(server))  # type: ignore[arg-type]
    return records(folder)


def records(folder: Path) -> list[Any]:
    return [
        parse_line(line) for line in (folder / "out" / "telemetry.jsonl").read_text().splitlines()
    ]


def alignments(found: list[Any]) -> list[AlignmentRecord]:
    return [record for record in found if isinstance(record, AlignmentRecord)]


def stopped_for(
    cause: str, server: Server, folder: Path, api: Live | None = None, **fields: Any
) -> AlignmentRecord:
    """Train under load until the gate stops the run for `cause`; the record that did."""
    api = api or Live(server, by_luck)
    settings = {"training_steps": 40, "lr": 5e-3, "stop_on_mismatch": True, **fields}
    with (
        Streams(server.url, server.token, with_token=True) as load,
        pytest.raises(MismatchError, match=cause),
    ):
        train_on(server, folder, api, **settings)
    load.assert_whole()
    last = alignments(records(folder))[-1]
    assert last.verdict == "mismatch" and last.cause.startswith(f"{cause}: "), last
    return last


# What is planted.


def by_luck(group: dict[str, Any]) -> None:
    """Nothing to learn, so weights never come to rest: a fault that grows with their way has to
    show."""
    group["scores"] = [random.random() for _ in group["scores"]]


def shift(group: dict[str, Any]) -> None:
    for row in group["inference_logprobs"]:
        row[70:] = row[-1:] + row[70:-1]


def train_on_copies(
    monkeypatch: pytest.MonkeyPatch,
    chosen: Callable[[str], bool],
    server: Server,
    folder: Path,
    **fields: Any,
) -> None:
    """The trainer works on copies of some of the server's tensors, which hold the base weights at
    first."""
    settings = config(server, folder, **fields)
    clean = shared_vllm.SingleCopy(settings, torch.device(settings.device), threading.Event())
    clean.attach(Start())
    clean.publish(1, lambda: None)
    clean.close()
    true = shared_vllm.open_tensors

    def some_private(*args: Any) -> dict[str, torch.Tensor]:
        return {
            name: tensor.clone() if chosen(name) else tensor for name, tensor in true(*args).items()
        }

    monkeypatch.setattr(shared_vllm, "open_tensors", some_private)
