"""What every mode does, whatever moves: attach, publish each version, close."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainer_core.config import TrainingConfig

if TYPE_CHECKING:
    import torch

    from trainer_core.server.client import ServerClient


@dataclass(frozen=True)
class SyncReport:
    """One publish: `phases` in seconds add up to `seconds`."""

    mode: str
    weight_version: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    moved: bool = True
    """Whether a server got the version; else the trainer alone has it, until the next load is due."""


class Phases:
    """Seconds of each named phase of a publish."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


@dataclass(frozen=True)
class Start:
    """Which weights a run starts from: a checkpoint's directory, or the base model (null) at version 0."""

    weights: Path | None = None
    version: int = 0


class WeightSync(Protocol):
    """A strategy that brings trained weights to an inference server."""

    mode: str
    engine: ServerClient | None
    """The server that the probe asks; null when nothing can be asked about it."""

    @property
    def engines(self) -> Sequence[ServerClient]:
        """The servers that generate the rollouts."""
        ...

    def attach(self, start: Start) -> torch.nn.Module:
        """Wait for the server and return the policy, with the weights of `start` on both sides."""
        ...

    def publish(self, version: int, write: Callable[[], None]) -> SyncReport:
        """Call `write`, which changes the policy's parameters in place, and let the server generate with `version`."""
        ...

    def check(self) -> None:
        """Raise `EngineGone` when the server has died; cheap."""
        ...

    def let_go(self, copies: Mapping[torch.Tensor, torch.Tensor]) -> str:
        """The server is gone: from here on the policy has memory of its own, with the present weights.

        Args:
            copies: parameter -> float32 copy of its present weights, for those that have one.

        Returns:
            Why the present weights are lost, or nothing when they are not.
        """
        ...

    def close(self) -> None:
        """Let go of what is held; the server goes on with the last version."""
        ...


_STRATEGIES = {
    "shared_vllm": ("trainer_core.weight_sync.shared_vllm", "SingleCopy"),
    "broadcast": ("trainer_core.weight_sync.broadcast", "Broadcast"),
    "none": ("trainer_core.weight_sync.none_reload", "Reload"),
    "lora_only": ("trainer_core.weight_sync.lora", "LoraSwap"),
    "lora_restart": ("trainer_core.weight_sync.lora", "LoraRestart"),
}


def make_sync(config: TrainingConfig, device: torch.device, stop: threading.Event) -> WeightSync:
    """The strategy for `config.mode`."""
    module, name = _STRATEGIES[config.mode]
    made: WeightSync = getattr(import_module(module), name)(config, device, stop)
    return made
