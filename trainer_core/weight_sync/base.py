"""What every mode does, whatever moves: attach, publish each version, close."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from trainer_core.engine.client import EngineClient


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
    engine: EngineClient | None
    """The server that the probe asks; null when nothing can be asked about it."""

    @property
    def engines(self) -> Sequence[EngineClient]:
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
