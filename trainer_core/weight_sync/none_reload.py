"""Mode `none`: the trainer writes its weights into a folder, and the server loads them, every N steps.

While they are written the old server serves; only the load pauses it. In between it answers with the weights of the
last load, so rollouts lag up to `vllm_restart_interval` versions. A server that cannot load while it runs, or is not to
(`engine_reload` restart), is told where they lie and restarted: it begins with them.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from atropos_common.bridge import BridgeInfo, LoadWeightsRequest
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineGone, UsageError
from trainer_core.policy.sharding import weights
from trainer_core.server.client import ServerClient
from trainer_core.server.lifecycle import make_lifecycle
from trainer_core.weight_sync.base import FIRST_PAUSE_S, Phases, WrittenWeights

LONGEST_PAUSE_S = 5.0
TAKES_WEIGHTS = "ATROPOS_WEIGHT_UPDATES"
"""What the server's environment must say."""


class Backoff:
    """Pauses that double, between attempts that the same server failed; a new one is tried at once."""

    def __init__(self) -> None:
        self._failed = ""
        """Instance of the last attempt, if it failed."""
        self._last_error = ""
        self._pause_s = self._not_before = 0.0

    @contextmanager
    def attempt(self, instance: str) -> Iterator[None]:
        """Around one attempt.

        Raises:
            EngineGone: what the attempt said, or what the last one said, when it is too early for another.
        """
        again = instance == self._failed
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
    """Strategy of mode `none`."""

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        super().__init__(config, device, stop, "weights")
        self._backoff = Backoff()
        if not config.vllm_urls:
            self.lifecycle = make_lifecycle(config, stop, env={TAKES_WEIGHTS: "1"})
        self._given: Path | None = None
        """What servers loaded last: one that begins anew starts from it."""
        self._loaded: dict[str, float] = {}
        """Seconds by phase that servers reported of the present load."""

    def load(self, weights: Path | None) -> torch.nn.Module:
        self._base = weights is None
        return super().load(weights)

    def _collect(self, clock: Phases) -> None:
        """Of several ranks' weights each version is written: a server that begins anew may want any, and rank 0 is
        alone then."""
        if self.world.size > 1 and (self.version or not self._base):
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
        """Seconds by phase; a server that is away, or is restarted, is waited for."""
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
        """In place where that can be, else by a restart."""
        named = info.weight_version is not None
        if self._base and not info.weight_version and not info.dirty and info.started_from is None:
            engine.resume(self.version)  # it has loaded the base model by itself
            return
        path = self._present()
        restart = "engine_reload is restart" if self.config.engine_reload == "restart" and named else None
        reason = info.load_obstacle or restart
        if reason and (named or info.started_from != str(path)):
            self._restart(engine, path, reason)
        answer = engine.load_weights(self._request(path))
        for name, seconds in answer.phases.items():
            self._loaded[name] = self._loaded.get(name, 0.0) + seconds

    def _restart(self, engine: ServerClient, path: Path, reason: str) -> None:
        """Let a new server begin with the weights in `path`.

        Raises:
            EngineGone: always; the new server is another one.
            UsageError: it cannot be restarted from here.
        """
        if self.lifecycle is None or not self.lifecycle.can_restart:
            way_out = "let the trainer start its own server, or run all with atropos-tui"
            if len(self.engines) > 1:
                way_out = "of several servers none is restarted for that; take one, or mode broadcast or lora_only"
            raise UsageError(
                f"{engine.base_url} gets new weights by a restart only ({reason}), and it is not ours to restart: "
                f"{way_out}"
            )
        engine.load_weights(self._request(path, at_restart=True))
        self.lifecycle.restart(f"weights of version {self.version} ({reason})")
        raise EngineGone(f"{engine.base_url} was restarted")

    def _request(self, path: Path, *, at_restart: bool = False) -> LoadWeightsRequest:
        return LoadWeightsRequest(
            path=str(path), weight_version=self.version, lease_s=self.config.engine_timeout, at_restart=at_restart,
            in_flight=self.config.in_flight, wait_s=self.config.in_flight_timeout,
        )  # fmt: skip

    def _present(self) -> Path:
        """The folder of the present weights, written if need be."""
        path = self._path(self.version)
        if not path.is_dir():
            self._save()
        return path

    def _save(self) -> None:
        self._write(weights(self.model))

    def _write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write the present weights, unfused."""
        size = sum(param.nbytes for param in self.model.parameters())
        self._write_present(
            lambda folder: save_torch_state_dict(tensors, folder), "the weights", f"Free {2 * size / 1e9:.1f} GB"
        )

    def _forget(self) -> None:
        """Remove all weights but the present ones and those that servers have; earlier attempts' and half-written
        ones too."""
        for path in self._folder.iterdir():
            if path not in (self._path(self.version), self._given):
                shutil.rmtree(path, ignore_errors=True)
