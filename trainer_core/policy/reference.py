"""The frozen reference of `ref_kl_coef`: the policy before the run's first step."""

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
from trainer_core.ranks.world import ALONE, World
from trainer_core.rollouts.packing import PackedRow

FOLDER = "reference"
"""Checkpoint folder of the starting adapter."""


class Reference:
    """Reference logprobs for rows whose environment sent none.

    When adapters train, the reference is the policy's model with its starting adapter.
    """

    def __init__(
        self,
        config: TrainingConfig,
        policy: nn.Module,
        device: torch.device,
        world: World = ALONE,
        *,
        resumed: Path | None = None,
        origin: str | None = None,
    ) -> None:
        """Load or reuse the model.

        Args:
            resumed: checkpoint that the run continues from.
            origin: `lora_adapter_path` of the run's start.
        """
        self._device = device
        self._adapted = config.trains_adapters
        self._start: dict[str, torch.Tensor] | None = None
        """None: a new adapter, which has no effect."""
        if self._adapted:
            self._model = policy
            folder = world.share(lambda: _starting_adapter(resumed, origin))
            if folder is not None:
                values = world.share(lambda: read_adapter(policy, folder))
                self._start = {name: value.to(device).float() for name, value in values.items()}
            print(f"Frozen reference of --ref-kl-coef: {folder or 'the model without the adapter'}")
            return
        model = load_for(world, config.model_name, compute_dtype(policy), device)
        self._model = shard(model.requires_grad_(False), world, device, config)
        use_head(self._model, config.head_dtype)
        use_attention(self._model, config.attention_kernel)
        if config.routing_replay:  # otherwise the KL would include different choices of experts
            replay_in(self._model)
        size = sum(p.numel() * p.element_size() for p in self._model.parameters()) / 1e9
        print(f"Frozen reference of --ref-kl-coef: {config.model_name}, a copy of {size:.2f} GB")

    @torch.no_grad()
    def fill(
        self, rows: Sequence[PackedRow], threads: int = 1, world: World = ALONE
    ) -> list[PackedRow]:
        """Complete `reference` in each row where the environment sent none."""
        # Running the model is a collective, so all ranks run it for a row if one of them needs it.
        own = [row.reference is None or bool(row.reference.isnan().any()) for row in rows]
        lacks = anywhere(world, own)

        def complete(item: tuple[PackedRow, bool], _: int) -> PackedRow:
            row, lacking = item
            if not lacking:
                return row
            given, own = row.reference, row_logprobs(self._model, row.to(self._device)).float()
            if given is not None:
                # NaN marks the tokens for which the environment sent no value.
                given = given.to(own.device)
                own = torch.where(given.isnan(), own, given)
            return replace(row, reference=own)

        with self._frozen():
            return in_threads(complete, list(zip(rows, lacks, strict=True)), threads)

    def write(self, checkpoint: Path) -> None:
        """Write the starting adapter into a checkpoint for a later attempt."""
        if self._start is not None:
            write_adapter(self._model, checkpoint / FOLDER, values=self._start)

    def _frozen(self) -> AbstractContextManager[None]:
        if not self._adapted:
            return nullcontext()
        if self._start is None:
            return adapters_off(self._model)
        return adapter_values(self._model, self._start)


def _starting_adapter(resumed: Path | None, origin: str | None) -> Path | None:
    # A resumed run keeps its first attempt's reference.
    if resumed is not None and (resumed / FOLDER).is_dir():
        return resumed / FOLDER
    return Path(origin) if origin else None
