"""Weights & Biases, optional: under the guides' metric names, and never a reason to stop training."""

from __future__ import annotations

from typing import Any

from trainer_core.config import TrainingConfig


class WandbTracker:
    """Logs to Weights & Biases when asked to; the first failure is said once and ends it."""

    def __init__(self, config: TrainingConfig) -> None:
        self._run: Any = None
        if config.use_wandb:
            self._try(lambda: self._begin(config))

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Metrics of one step; null values are left out."""
        if self._run is not None:
            known = {name: value for name, value in metrics.items() if value is not None}
            self._try(lambda: self._run.log(known, step=step))

    def finish(self, summary: dict[str, Any]) -> None:
        """Put the benchmark into the run's summary and close it."""
        if self._run is not None:
            self._try(lambda: self._run.summary.update({f"benchmark/{k}": v for k, v in summary.items()}))
        if self._run is not None:
            self._try(lambda: self._run.finish())

    def _begin(self, config: TrainingConfig) -> None:
        import wandb

        self._run = wandb.init(
            project=config.wandb_project, group=config.wandb_group, config=config.model_dump(mode="json")
        )
        print(f"W&B run: {self._run.url}")

    def _try(self, action: Any) -> None:
        try:
            action()
        except Exception as error:  # whatever the backend raises, training goes on
            print(f"Warning: Weights & Biases failed ({type(error).__name__}: {error}); training goes on without it")
            self._run = None
