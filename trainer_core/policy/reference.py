"""The frozen reference that `ref_kl_coef` pulls back to: the model as it was before training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from trainer_core.config import TrainingConfig
from trainer_core.policy.kernel_choice import use_attention
from trainer_core.policy.logprobs import row_logprobs, use_head
from trainer_core.policy.lora import adapters_off
from trainer_core.policy.routing import replay_in
from trainer_core.policy.sharding import anywhere, compute_dtype, load_for, shard
from trainer_core.policy.speed import in_threads
from trainer_core.rollouts.packing import PackedRow
from trainer_core.world import ALONE, World


class Reference:
    """Answers for the rows of a step, where the environment did not. Holds a model of its own, or the policy's, whose
    adapters are off while it answers."""

    def __init__(self, config: TrainingConfig, policy: nn.Module, device: torch.device, world: World = ALONE) -> None:
        """Args:
        policy: on `device`; with adapters, if the configuration trains any.
        """
        self._device = device
        self._adapted = config.trains_adapters
        if self._adapted:
            self._model = policy
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

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        if not self._adapted:
            yield
            return
        with adapters_off(self._model):
            yield
