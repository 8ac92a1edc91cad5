"""The interface of all modes: attach to the servers, publish each version, close."""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetensors import SafetensorError

from atropos_common.protocol.bridge import BridgeInfo
from atropos_common.system.files import why_full
from atropos_common.system.run_dir import RunDir
from trainer_core.config import Mode, TrainingConfig
from trainer_core.errors import EngineGone, Stopped, TrainerError
from trainer_core.ranks.world import ALONE, World
from trainer_core.server.client import ServerClient
from trainer_core.server.lifecycle import Lifecycle, supervised, wait_for_server

if TYPE_CHECKING:
    import torch

CHECK_S = 1.0
"""Seconds between checks whether the server is still the same."""
FIRST_PAUSE_S = 0.2

T = TypeVar("T")


@dataclass(frozen=True)
class SyncReport:
    """Report of one publish; `phases` are seconds."""

    mode: str
    weight_version: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    moved: bool = True
    """False: only the trainer has the version so far."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Reason by server that is away and lacks the version."""


class Phases:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - began


@dataclass(frozen=True)
class Start:
    """Checkpoint directory, or the base model (None) at version 0, to start from."""

    weights: Path | None = None
    version: int = 0


class WeightSync(ABC):
    """Strategy that brings trained weights to inference servers.

    Each rank has one. All ranks call attach, publish and let_go together; only rank 0 knows servers
    and calls `check`.
    """

    shares_memory = False
    """The server computes with the policy's memory, so every write must be a publish."""

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        self.config = config
        self.device = device
        self.stop = stop
        self.world: World = ALONE
        self.engines: list[ServerClient] = []  # known from `attach` on
        self.left_out: dict[str, str] = {}
        """Reason by address of a server that the run goes on without."""
        self.arrived: Callable[[SyncReport], None] = lambda report: None
        """Called on rank 0 when a version arrives after its `publish` has returned."""
        self.wait_for_room: Callable[[Path, str], None] | None = None
        """Called on a full disk, with folder and message; returns when a retry makes sense."""
        # Without a supervisor nobody reports that a server is on its way.
        supervisor = supervised(config, stop)
        self._coming = supervisor.coming if supervisor else lambda: None

    @property
    def spread(self) -> World:
        """Ranks that hold the policy, each as if it had all of it."""
        return self.world

    def _spread(self, model: torch.nn.Module) -> torch.nn.Module:
        # Late imports: this module is read before torch is needed.
        from trainer_core.policy.load import train_only
        from trainer_core.policy.sharding import shard

        train_only(model, self.config.train_layer_indices)
        return shard(model, self.world, self.device, self.config)

    @abstractmethod
    def attach(self, start: Start) -> torch.nn.Module:
        """Wait for the server and return the policy, both with the weights of `start`."""

    def settle(self) -> None:  # noqa: B027 - most modes have nothing under way
        """Wait on all ranks until the last published version has arrived.

        Raises:
            EngineGone: no server has it, and none came back within `engine_timeout`.
        """

    def publish(self, version: int, write: Callable[[], None]) -> SyncReport:
        """Let `write` change the parameters in place, and the server generate with `version`."""
        clock = Phases()
        moved = self._publish(version, write, clock)
        return self._report(version, clock.seconds, moved)

    def _report(self, version: int, phases: dict[str, float], moved: bool) -> SyncReport:
        seconds, left_out = sum(phases.values()), dict(self.left_out)
        return SyncReport(self.config.mode, version, seconds, phases, moved, left_out)

    @abstractmethod
    def _publish(self, version: int, write: Callable[[], None], clock: Phases) -> bool:
        """Publish; return True if a server now generates with `version`."""

    @abstractmethod
    def check(self) -> None:
        """Raise `EngineGone` if the server has died for good; cheap."""

    def let_go(self, copies: Mapping[torch.Tensor, torch.Tensor]) -> str:
        """Give the policy its own memory, because the server is gone.

        Return why the present weights are lost; empty if they are not.

        Args:
            copies: parameter -> float32 copy of its present weights, where one exists.
        """
        return ""

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def _await_server(
        self, ready: Callable[[], T], meanwhile: tuple[type[Exception], ...] = (EngineGone,)
    ) -> T:
        timeout_s, coming = self.config.engine_timeout, self._coming
        return wait_for_server(ready, timeout_s, self.stop, meanwhile=meanwhile, coming=coming)


class SeparateWeights(WeightSync):
    """Base of the strategies with separate trainer weights, which every server gets."""

    # A server started with `ATROPOS_HOLD_GENERATION=1` answers only after it has them.
    lifecycle: Lifecycle | None = None  # in modes that need restarts

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        super().__init__(config, device, stop)
        self.version = 0
        self.urls = config.engine_urls
        self.fed: set[ServerClient] = set()
        """Servers that answer with the present weights."""
        self._checked = 0.0

    def attach(self, start: Start) -> torch.nn.Module:
        """Load the weights of `start` and bring them to every server.

        Raises:
            EngineGone: a server did not answer with them within `engine_timeout`.
            UsageError: a server was started for another mode.
            EngineError: a server serves another model.
        """
        self.version = start.version
        self.model = self._spread(self.load(start.weights))
        self._collect(Phases())
        self.world.share(self._meet_servers)
        return self.model

    def _meet_servers(self) -> None:
        if self.lifecycle is not None:
            self.lifecycle.ensure()  # first: a server of our own brings the token
        self.engines = [ServerClient(url) for url in self.urls]
        self._serve_all()

    def _serve_all(self) -> None:
        for engine in self.engines:
            if engine not in self.fed:
                self._serve_again(engine)

    def load(self, weights: Path | None) -> torch.nn.Module:
        """Load `weights` or the base model in the trainer's dtype, for `shard`."""
        from trainer_core.policy.load import dtype_of, load_config
        from trainer_core.policy.sharding import load_for

        name = self.config.model_name
        config = load_config(name, frozen=self.config.trains_adapters)
        dtype = dtype_of(config, self.config.dtype)
        return load_for(self.world, weights or name, dtype, self.device)

    def _publish(self, version: int, write: Callable[[], None], clock: Phases) -> bool:
        with clock("write"):
            write()
        self.version = version
        # Collected on all ranks, because rank 0 may be alone when a server needs the weights.
        self._collect(clock)
        return self.world.share(lambda: self._delivered(clock))

    def _collect(self, clock: Phases) -> None:
        """Prepare the present weights on all ranks for rank 0."""

    def _delivered(self, clock: Phases) -> bool:
        try:
            return self._deliver(clock)
        except Stopped:
            late = f"Stopped before every server had version {self.version}"
            print(f"{late}; the update is complete here")
            return False

    @abstractmethod
    def _deliver(self, clock: Phases) -> bool:
        """Bring the present weights to every server if that is due; return True if it was."""

    @abstractmethod
    def _give(self, engine: ServerClient, info: BridgeInfo) -> None:
        """Make `engine`, whose state is `info`, answer with the present weights, or raise
        `EngineGone`."""

    def check(self) -> None:
        """Give a restarted server the present weights; it answers no rollouts before.

        Raises:
            EngineGone: it did not come back within `engine_timeout`.
        """
        now = time.monotonic()
        if now - self._checked < CHECK_S or self.stop.is_set():
            return  # at the end no server is needed: the weights are here
        self._checked = now
        for engine in self.engines:
            # A restarted server is another instance, which `info` refuses.
            try:
                engine.info()
            except EngineGone:
                self.fed.discard(engine)
            if engine not in self.fed:
                self._serve_again(engine)

    def close(self) -> None:
        super().close()
        if self.lifecycle is not None:
            self.lifecycle.close()

    def _serve_again(self, engine: ServerClient) -> None:
        if self.lifecycle is not None:
            self.lifecycle.ensure()
        self.fed.discard(engine)
        self._await_server(lambda: self._give(engine, engine.meet()))
        self.fed.add(engine)
        print(f"✓ The server at {engine.base_url} answers with weight version {self.version}")

    def _restart_is_due(self) -> bool:
        return self.version % self.config.vllm_restart_interval == 0


class WrittenWeights(SeparateWeights):
    """Base of the strategies whose servers load each version from a folder."""

    def __init__(
        self, config: TrainingConfig, device: torch.device, stop: threading.Event, what: str
    ) -> None:
        """`what` is weights or adapters, and the folder's name."""
        super().__init__(config, device, stop)
        run = RunDir.from_env()
        # Keep links unresolved: another node may mount the same disk elsewhere.
        self._folder = ((run.bridge if run else Path(config.save_path)) / what).absolute()
        self._tag = secrets.token_hex(3)
        """A server may still read this version's folder of an earlier attempt."""

    def _path(self, version: int) -> Path:
        return self._folder / f"v{version}-{self._tag}"

    def _write_present(self, write: Callable[[Path], None], what: str, room: str) -> None:
        """Let `write` fill the present version's folder; wait for disk space and retry."""
        target = self._path(self.version)
        aside = target.with_name(f".{target.name}.writing")
        while True:
            # Renamed once it is complete, so that no server loads half of it.
            try:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
                write(aside)
                shutil.rmtree(target, ignore_errors=True)
                aside.rename(target)
                return
            except (OSError, SafetensorError) as error:
                shutil.rmtree(aside, ignore_errors=True)
                if self.wait_for_room is None or not (words := why_full(error)):
                    raise TrainerError(
                        f"{what} of version {self.version} cannot be written into {self._folder}: "
                        f"{error}. The server keeps the older version. {room} there, or put the "
                        "run on another disk"
                    ) from None
                self.wait_for_room(self._folder, words)


# Imported by name when it is chosen: each mode has heavy imports of its own.
_STRATEGIES: dict[Mode, tuple[str, str]] = {
    "shared_vllm": ("shared_vllm", "SingleCopy"),
    "broadcast": ("broadcast", "Broadcast"),
    "none": ("none_reload", "Reload"),
    "lora_only": ("lora", "LoraSwap"),
    "lora_restart": ("lora", "LoraRestart"),
}


def make_sync(
    config: TrainingConfig, device: torch.device, stop: threading.Event, world: World = ALONE
) -> WeightSync:
    """Return the strategy for `config.mode`; recorded rollouts need no server."""
    module, name = _STRATEGIES[config.mode]
    if config.mode == "shared_vllm" and (config.vllm_urls or config.copy_config_paths):
        module, name = "further_servers", "SingleCopyAndOthers"
    if config.rollouts is not None:
        module, name = "none_reload", "Offline"
    strategy = getattr(import_module(f"trainer_core.weight_sync.{module}"), name)
    made: WeightSync = strategy(config, device, stop)
    made.world = world
    return made
