"""Weights & Biases and TensorBoard, both optional: the guides' metric names, and never a reason to stop training."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trainer_core.config import TrainingConfig

Metrics = dict[str, Any]


class Backend(Protocol):
    """Where metrics go. Whatever it raises ends it, and nothing else."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Numbers of one step."""
        ...

    def finish(self, summary: Metrics) -> None:
        """The benchmark, then the end."""
        ...


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, config: TrainingConfig) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=config.wandb_project, group=config.wandb_group, config=config.model_dump(mode="json")
        )
        print(f"W&B run: {self._run.url}" if self._run.url else f"W&B run (offline): {self._run.dir}")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)

    def finish(self, summary: Metrics) -> None:
        self._run.summary.update({f"benchmark/{k}": v for k, v in summary.items()})
        self._run.finish()


class TensorBoard:
    """Event files for `tensorboard --logdir`."""

    def __init__(self, config: TrainingConfig) -> None:
        try:
            from tensorboardX import SummaryWriter  # type: ignore[import-not-found]
        except ImportError as error:
            raise ImportError(f"{error}: pip install tensorboardX, which writes without TensorBoard itself") from None
        folder = Path(config.tensorboard_dir or Path(config.save_path).parent / "tensorboard")
        self._writer: Any = SummaryWriter(str(folder))
        print(f"TensorBoard: {folder}")

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, summary: Metrics) -> None:
        numbers = {k: v for k, v in summary.items() if isinstance(v, (int, float)) and math.isfinite(v)}
        for name, value in numbers.items():
            self._writer.add_scalar(f"benchmark/{name}", value, 0)
        self._writer.close()


class Trackers:
    """The backends that the configuration asks for; the first failure of one is said once and ends that one."""

    def __init__(self, config: TrainingConfig) -> None:
        self._backends: dict[str, Backend] = {}
        if config.use_wandb:
            self._try("Weights & Biases", partial(self._begin, "Weights & Biases", Wandb, config))
        if config.use_tensorboard:
            self._try("TensorBoard", partial(self._begin, "TensorBoard", TensorBoard, config))

    def log(self, step: int, metrics: Metrics) -> None:
        """Metrics of one step; null values are left out."""
        known = {name: value for name, value in metrics.items() if value is not None}
        for name, backend in list(self._backends.items()):
            self._try(name, partial(backend.log, step, known))

    def finish(self, summary: Metrics) -> None:
        """Hand over the benchmark and close every backend."""
        for name, backend in list(self._backends.items()):
            self._try(name, partial(backend.finish, summary))

    def _begin(self, name: str, make: Callable[[TrainingConfig], Backend], config: TrainingConfig) -> None:
        self._backends[name] = make(config)

    def _try(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # whatever the backend raises, training goes on
            print(f"Warning: {name} failed ({type(error).__name__}: {error}); training goes on without it")
            self._backends.pop(name, None)
