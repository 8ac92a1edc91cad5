"""Ranks of `test_broadcast_ranks.py`, and the model that they serve."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainer_core.config import TrainingConfig
from trainer_core.errors import RankGone
from trainer_core.policy.sharding import local, weights
from trainer_core.ranks.group import join
from trainer_core.ranks.world import World
from trainer_core.weight_sync import broadcast, sending
from trainer_core.weight_sync.base import Start, make_sync

CPU = torch.device("cpu")
VERSIONS = 3
CHUNK_BYTES = 3000
"""So that there are many, and each buffer is used again."""


class Served(torch.nn.Module):
    """A worker's part of a Qwen3 of any kind, as vLLM lays it out: fused, split over `size` ranks,
    with a padded vocabulary, and a tied head that lies there once."""

    def __init__(
        self, names: dict[str, tuple[int, ...]], dtype: torch.dtype, rank: int, size: int
    ) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        rows: dict[str, int] = {}
        self.spots: dict[str, tuple[str, int]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in sorted(names.items()):
            where = name
            for part, fused in (
                ("q_proj", "qkv"),
                ("k_proj", "qkv"),
                ("v_proj", "qkv"),
                ("gate_proj", "gate_up"),
                ("up_proj", "gate_up"),
            ):
                where = where.replace(part, fused)
            self.spots[name] = (where, rows.get(where, 0))
            rows[where] = rows.get(where, 0) + -(-shape[0] // size)
            shapes[where] = shape
        for where, count in rows.items():
            zeros = torch.zeros(count, *shapes[where][1:], dtype=dtype)
            self.register_parameter(
                where.replace(".", "/"), torch.nn.Parameter(zeros, requires_grad=False)
            )

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            where, first = self.spots[name]
            share = -(-tensor.shape[0] // self.size)
            mine = tensor[self.rank * share : (self.rank + 1) * share]
            self.get_parameter(where.replace(".", "/")).data[first : first + len(mine)].copy_(mine)


def settings(model: str, urls: list[str], **fields: Any) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "model_name": model,
            "weight_bridge_mode": "shared_vllm",
            "use_shared_memory": True,
            "dtype": "bfloat16",
            "vllm_urls": urls,
            "engine_timeout": 30,
            "broadcast_timeout": 20,
            "device": "cpu",
            "optimizer": "adamw",
            **fields,
        }
    )


@torch.no_grad()
def change(model: torch.nn.Module, seed: int) -> None:
    """Every rank its own rows."""
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        rows = local(parameter)
        rows.add_(torch.randn(rows.shape, generator=random).to(rows.dtype), alpha=0.1)


def publish(world: World, model: str, urls: list[str], overlap: bool) -> None:
    """Several versions; each is written down whole, by what gathers it for checkpoints."""
    sync: Any = make_sync(
        settings(model, urls, overlap_publish=overlap), CPU, threading.Event(), world
    )
    policy = sync.attach(Start())
    left_out: list[list[str]] = []
    sync.arrived = lambda report: left_out.append(list(report.left_out))
    for version in range(VERSIONS + 1):
        if version:
            report = sync.publish(version, lambda v=version: change(policy, 10 * v + world.rank))
            assert report.moved is not overlap and report.weight_version == version
            if not overlap:
                sync.arrived(report)
        tensors = weights(policy)
        if world.rank == 0:
            save_file(tensors, f"{model}.v{version}.safetensors")
    sync.settle()
    sync.close()
    if world.rank == 0:
        Path(f"{model}.left_out.json").write_text(json.dumps(left_out))


def lose_a_rank(world: World, model: str, urls: list[str]) -> int:
    """Rank 1 dies while rank 0 sends."""
    sync: Any = make_sync(settings(model, urls), CPU, threading.Event(), world)
    policy = sync.attach(Start())
    try:
        sync.publish(1, lambda: os._exit(9) if world.rank else change(policy, 1))
    except RankGone as error:
        print(f"RankGone: {error}", flush=True)
        return 3
    return 0


def everything(_: Path, cases: str) -> int:
    """Args:
    cases: models to be published, with the addresses of their servers, the second one while the
    next step is
            computed; and the last, of which a rank is lost.
    """
    world = join(CPU, 60.0)
    torch.set_num_threads(1)
    sending.CHUNK_BYTES = broadcast.CHUNK_BYTES = CHUNK_BYTES
    *published, lost = json.loads(cases)
    for turn, (model, urls) in enumerate(published):
        publish(world, model, urls, overlap=bool(turn))
    return lose_a_rank(world, *lost)
