"""Mode `none`: the trainer writes its weights into a folder every N steps, and servers load them.

Only the load pauses a server. A server that cannot load while running is restarted, and begins with
the folder.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from atropos_common.protocol.bridge import BridgeInfo, LoadWeightsRequest
from atropos_common.system.run_dir import ENV_WEIGHT_UPDATES
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineGone, UsageError
from trainer_core.policy.load import dtype_of, load_config
from trainer_core.policy.sharding import load_for, weights
from trainer_core.server.client import ServerClient
from trainer_core.server.lifecycle import make_lifecycle
from trainer_core.weight_sync.base import FIRST_PAUSE_S, Phases, Start, WeightSync, WrittenWeights
from trainer_core.weight_sync.lora import LoraSwap

LONGEST_PAUSE_S = 5.0


class Backoff:
    """Doubling pauses between failed attempts with the same server."""

    def __init__(self) -> None:
        self._failed = ""
        self._last_error = ""
        self._pause_s = self._not_before = 0.0

    @contextmanager
    def attempt(self, instance: str) -> Iterator[None]:
        """Context of one attempt."""
        again = instance == self._failed  # a new instance is tried at once
        if again and time.monotonic() < self._not_before:
            raise EngineGone(self._last_error)
        try:
            yield
        except EngineGone as error:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if again else FIRST_PAUSE_S
            self._failed, self._last_error = instance, str(error)
            self._not_before = time.monotonic() + self._pause_s
            raise
        self._failed = ""


class Reload(WrittenWeights):
    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        super().__init__(config, device, stop, "weights")
        self._backoff = Backoff()
        if not config.vllm_urls:
            self.lifecycle = make_lifecycle(config, stop, env={ENV_WEIGHT_UPDATES: "1"})
        self._given: Path | None = None  # folder that servers loaded last
        self._loaded: dict[str, float] = {}  # seconds by phase, as servers reported

    def load(self, weights: Path | None) -> torch.nn.Module:
        self._base = weights is None
        return super().load(weights)

    def _collect(self, clock: Phases) -> None:
        # A server may need any version, the base model too if it has served another trainer, and
        # then rank 0 is alone.
        if self.world.size > 1:
            with clock("save"):
                tensors = weights(self.model)
                self.world.share(lambda: self._write(tensors))
                self.world.first(self._forget)

    def _deliver(self, clock: Phases) -> bool:
        self._base = False
        if not self._restart_is_due():
            return False
        if self.world.size == 1:
            with clock("save"):
                self._save()
        clock.seconds |= self._give_all()
        self._given = self._path(self.version)
        self._forget()
        return True

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _give_all(self) -> dict[str, float]:
        restarts, self._loaded = 0.0, {}
        for engine in self.engines:
            began = time.perf_counter()
            try:
                self._give(engine, engine.info())
            except EngineGone:
                self._serve_again(engine)
                restarts += time.perf_counter() - began
        return {"restart": restarts} if restarts else self._loaded

    def _give(self, engine: ServerClient, info: BridgeInfo) -> None:
        with self._backoff.attempt(info.instance_id):
            self._offer(engine, info)

    def _offer(self, engine: ServerClient, info: BridgeInfo) -> None:
        named = info.weight_version is not None
        if self._base and not info.weight_version and not info.dirty and info.started_from is None:
            engine.resume(self.version)  # it starts with the base model
            return
        path = self._present()
        restart = self.config.engine_reload == "restart" and named
        reason = info.load_obstacle or ("engine_reload is restart" if restart else None)
        # Not again, if the restarted server has begun with this folder.
        if reason and (named or info.started_from != str(path)):
            self._restart(engine, path, reason)
        answer = engine.load_weights(self._request(path))
        for name, seconds in answer.phases.items():
            self._loaded[name] = self._loaded.get(name, 0.0) + seconds

    def _restart(self, engine: ServerClient, path: Path, reason: str) -> None:
        """Start a new server with the weights in `path`, and raise `EngineGone`: it is another
        instance."""
        if self.lifecycle is None or not self.lifecycle.can_restart:
            fix = "let the trainer start its own server, or run all with atropos-tui"
            if len(self.engines) > 1:
                fix = "take one server, or mode broadcast or lora_only"
            raise UsageError(
                f"{engine.base_url} gets new weights by a restart only ({reason}), and this "
                f"trainer cannot restart it. fix: {fix}"
            )
        engine.load_weights(self._request(path, at_restart=True))
        self.lifecycle.restart(f"weights of version {self.version} ({reason})")
        raise EngineGone(f"{engine.base_url} was restarted")

    def _request(self, path: Path, *, at_restart: bool = False) -> LoadWeightsRequest:
        return LoadWeightsRequest(
            path=str(path),
            weight_version=self.version,
            lease_s=self.config.engine_timeout,
            at_restart=at_restart,
            in_flight=self.config.in_flight,
            wait_s=self.config.in_flight_timeout,
        )

    def _present(self) -> Path:
        path = self._path(self.version)
        if not path.is_dir():
            self._save()
        return path

    def _save(self) -> None:
        self._write(weights(self.model))

    def _write(self, tensors: dict[str, torch.Tensor]) -> None:
        # Twice the weights: the folder that servers have stays until they have the new one.
        size = 2 * sum(param.nbytes for param in self.model.parameters())

        def write(folder: Path) -> None:
            save_torch_state_dict(tensors, folder)

        self._write_present(write, "the weights", f"Free {size / 1e9:.1f} GB")

    def _forget(self) -> None:
        # Also half-written ones, and those of earlier attempts.
        for path in self._folder.iterdir():
            if path not in (self._path(self.version), self._given):
                shutil.rmtree(path, ignore_errors=True)


class Offline(WeightSync):
    """Strategy of a run with recorded rollouts: every version stays here."""

    def attach(self, start: Start) -> torch.nn.Module:
        """Return the policy with the weights of `start`."""
        config = self.config
        print("No server: there is no logprob probe, and the policy lag is the recorded one")
        if config.trains_adapters:
            adapted = LoraSwap(config, self.device, self.stop)
            adapted.world = self.world
            return self._spread(adapted.load(start.weights))
        dtype = dtype_of(load_config(config.model_name), config.dtype)
        return self._spread(
            load_for(self.world, start.weights or config.model_name, dtype, self.device)
        )

    def _publish(self, version: int, write: Callable[[], None], clock: Phases) -> bool:
        with clock("write"):
            write()
        return False

    def check(self) -> None:
        pass  # there is no server
