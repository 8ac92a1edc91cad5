"""What the modes share whose trainer keeps weights of its own: servers come and go, and get the present ones again."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from atropos_common.bridge import BridgeInfo
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineGone
from trainer_core.policy.load import dtype_of, load_config, load_model
from trainer_core.server.client import ServerClient
from trainer_core.server.lifecycle import supervised, wait_for_server
from trainer_core.weight_sync.base import Start, SyncReport

LOOK_S = 1.0
"""How often `check` asks whether it is still the same server."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0


class Backoff:
    """Pauses that double, between attempts that the same servers failed; a new server is tried at once."""

    def __init__(self) -> None:
        self._failed: tuple[str, ...] = ()
        """Instances of the last attempt, if it failed."""
        self._last_error = ""
        self._pause_s = self._not_before = 0.0

    @contextmanager
    def attempt(self, *instances: str) -> Iterator[None]:
        """Around one attempt.

        Raises:
            EngineGone: what the attempt said, or what the last one said, when it is too early for another.
        """
        again = instances == self._failed
        if again and time.monotonic() < self._not_before:
            raise EngineGone(self._last_error)
        try:
            yield
        except EngineGone as error:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if again else FIRST_PAUSE_S
            self._failed, self._last_error = instances, str(error)
            self._not_before = time.monotonic() + self._pause_s
            raise
        self._failed = ()


class SeparateWeights(ABC):
    """Base of a strategy: which servers there are, and that each one answers with the trainer's present weights.

    A server started with `ATROPOS_HOLD_GENERATION=1` serves nobody until it has them.
    """

    mode: str

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        self.config = config
        self.device = device
        self.stop = stop
        self.version = 0
        self.engines: list[ServerClient] = []
        self.fed: set[ServerClient] = set()
        """Servers that answer with the present weights, as far as is known."""
        self._looked = 0.0
        self.backoff = Backoff()
        supervisor = supervised(config, stop)
        self._coming = supervisor.coming if supervisor else lambda: None

    @property
    def engine(self) -> ServerClient | None:
        """The server that the probe asks: the first."""
        return self.engines[0] if self.engines else None

    @abstractmethod
    def attach(self, start: Start) -> torch.nn.Module: ...

    @abstractmethod
    def publish(self, version: int, write: Callable[[], None]) -> SyncReport: ...

    @abstractmethod
    def _give(self, engine: ServerClient, info: BridgeInfo) -> None:
        """Let `engine`, which said `info` of itself, answer with the trainer's present weights, as `self.version`.

        Raises:
            EngineGone: it does not answer; tried again.
        """

    def load(self, weights: Path | None) -> torch.nn.Module:
        """The model on the trainer's device and in its type, with `weights`, else the base model's."""
        dtype = dtype_of(load_config(self.config.model_name), self.config.dtype)
        return load_model(weights or self.config.model_name, dtype, self.device)

    def connect(self) -> None:
        """Find every server and give it the present weights.

        Raises:
            EngineGone: one did not answer within `engine_timeout`.
        """
        self.engines = [ServerClient(url) for url in self.config.engine_urls]
        for engine in self.engines:
            if engine not in self.fed:
                self._serve_again(engine)

    def check(self) -> None:
        """Give a server that was restarted the present weights; it serves nobody before.

        Raises:
            EngineGone: it did not come back within `engine_timeout`.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_S or self.stop.is_set():
            return  # at the end nobody waits for a server: the weights are here
        self._looked = now
        for engine in self.engines:
            try:
                engine.info()
            except EngineGone:
                self.fed.discard(engine)
            if engine not in self.fed:
                self._serve_again(engine)

    def let_go(self, copies: Mapping[torch.Tensor, torch.Tensor]) -> str:
        """The weights were the trainer's own all along."""
        return ""

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def _serve_again(self, engine: ServerClient) -> None:
        self.fed.discard(engine)
        wait_for_server(
            lambda: self._give(engine, engine.meet()), self.config.engine_timeout, self.stop, coming=self._coming
        )
        self.fed.add(engine)
        print(f"✓ The server at {engine.base_url} answers with weight version {self.version}")
