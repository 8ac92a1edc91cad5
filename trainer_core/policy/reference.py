"""The frozen reference that `ref_kl_coef` pulls back to: the model as it was before training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from trainer_core.config import TrainingConfig
from trainer_core.policy.load import load_model
from trainer_core.policy.logprobs import row_logprobs, use_head
from trainer_core.policy.lora import adapters_off
from trainer_core.policy.speed import in_threads
from trainer_core.rollouts.packing import PackedRow


class Reference:
    """Answers for the rows of a step, where the environment did not. Holds a model of its own, or the policy's, whose
    adapters are off while it answers."""

    def __init__(self, config: TrainingConfig, policy: nn.Module, device: torch.device) -> None:
        """Args:
        policy: on `device`; with adapters, if the configuration trains any.
        """
        self._device = device
        self._adapted = config.trains_adapters
        if self._adapted:
            self._model = policy
            return
        dtype = next(policy.parameters()).dtype
        self._model = load_model(config.model_name, dtype, device).requires_grad_(False)
        use_head(self._model, config.head_dtype)
        size = sum(p.numel() * p.element_size() for p in self._model.parameters())
        print(f"Frozen reference of --ref-kl-coef: {config.model_name}, a copy of {size / 1e9:.2f} GB")

    @torch.no_grad()
    def fill(self, rows: Sequence[PackedRow], threads: int = 1) -> list[PackedRow]:
        """The rows with `reference` known for each token: the environment's where it sent one, else this model's.

        Args:
            rows: on any device.
            threads: as in `step.accumulate`.
        """

        def complete(row: PackedRow, _: int) -> PackedRow:
            given = row.reference
            if given is not None and not given.isnan().any():
                return row
            own = row_logprobs(self._model, row.to(self._device)).float()
            if given is not None:
                given = given.to(own.device)
                own = torch.where(given.isnan(), own, given)
            return replace(row, reference=own)

        with self._frozen():
            return in_threads(complete, rows, threads)

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        if not self._adapted:
            yield
            return
        with adapters_off(self._model):
            yield
