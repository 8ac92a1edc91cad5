"""The frozen reference that `ref_kl_coef` pulls back to: the policy as it was before the run's first step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from trainer_core.config import TrainingConfig
from trainer_core.policy.kernel_choice import use_attention
from trainer_core.policy.logprobs import row_logprobs, use_head
from trainer_core.policy.lora import adapter_values, adapters_off, read_adapter, write_adapter
from trainer_core.policy.routing import replay_in
from trainer_core.policy.sharding import anywhere, compute_dtype, load_for, shard
from trainer_core.policy.speed import in_threads
from trainer_core.rollouts.packing import PackedRow
from trainer_core.world import ALONE, World

FOLDER = "reference"
"""Folder of a checkpoint with the adapter that the run started from."""


class Reference:
    """Logprobs for the rows of a step whose environment sent none. Holds a model of its own; with adapters it computes
    with the policy's, whose adapter is off or has the values of the start meanwhile."""

    def __init__(
        self, config: TrainingConfig, policy: nn.Module, device: torch.device, world: World = ALONE, *,
        resumed: Path | None = None, origin: str | None = None,
    ) -> None:  # fmt: skip
        """Args:
        policy: on `device`; with adapters, if the configuration trains any.
        resumed: checkpoint that the run continues from, which may hold the adapter of its start.
        origin: `lora_adapter_path` of the run's start; default: a new adapter.
        """
        self._device = device
        self._adapted = config.trains_adapters
        self._start: dict[str, torch.Tensor] | None = None
        """Values of the adapter that the run started from; None: a new one, which is the same as none."""
        if self._adapted:
            self._model = policy
            folder = world.share(lambda: _starting_adapter(resumed, origin))
            if folder is not None:
                values = world.share(lambda: read_adapter(policy, folder))
                self._start = {name: value.to(device).float() for name, value in values.items()}
            print(f"Frozen reference of --ref-kl-coef: {folder or 'the model without the adapter'}")
            return
        model = load_for(world, config.model_name, compute_dtype(policy), device).requires_grad_(False)
        self._model = shard(model, world, device, config)
        use_head(self._model, config.head_dtype)
        use_attention(self._model, config.attention_kernel)
        if config.routing_replay:  # else the choice of experts would count as a difference to the policy
            replay_in(self._model)
        size = sum(p.numel() * p.element_size() for p in self._model.parameters())
        print(f"Frozen reference of --ref-kl-coef: {config.model_name}, a copy of {size / 1e9:.2f} GB")

    @torch.no_grad()
    def fill(self, rows: Sequence[PackedRow], threads: int = 1, world: World = ALONE) -> list[PackedRow]:
        """The rows with `reference` known for each token: the environment's where it sent one, else this model's.

        Args:
            rows: on any device.
            threads, world: as in `step.accumulate`.
        """
        lacks = anywhere(world, [row.reference is None or bool(row.reference.isnan().any()) for row in rows])

        def complete(item: tuple[PackedRow, bool], _: int) -> PackedRow:
            row, lacking = item
            if not lacking:
                return row
            given, own = row.reference, row_logprobs(self._model, row.to(self._device)).float()
            if given is not None:
                given = given.to(own.device)
                own = torch.where(given.isnan(), own, given)
            return replace(row, reference=own)

        with self._frozen():
            return in_threads(complete, list(zip(rows, lacks, strict=True)), threads)

    def write(self, checkpoint: Path) -> None:
        """Write the starting adapter, if there is one, into a checkpoint for a later attempt."""
        if self._start is not None:
            write_adapter(self._model, checkpoint / FOLDER, values=self._start)

    def _frozen(self) -> AbstractContextManager[None]:
        if not self._adapted:
            return nullcontext()
        return adapters_off(self._model) if self._start is None else adapter_values(self._model, self._start)


def _starting_adapter(resumed: Path | None, origin: str | None) -> Path | None:
    """The folder of the adapter that the run started from; None for a new one."""
    if resumed is not None and (resumed / FOLDER).is_dir():
        return resumed / FOLDER
    return Path(origin) if origin else None
