"""Servers on the trainer's GPU with weights of their own: each gets a copy of every version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from atropos_common.protocol.bridge import InFlight
from atropos_common.protocol.manifest import ManifestError
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineGone, UsageError
from trainer_core.server.client import ServerClient
from trainer_core.server.lifecycle import supervised, wait_for_server
from trainer_core.weight_sync.mapping import (
    LEASE_S,
    answering,
    has_ended,
    live_server,
    meet,
    open_tensors,
    server_token,
)

Tensors = Mapping[str, torch.Tensor]
"""Parameters by the server's names."""


@dataclass(frozen=True)
class _Copy:
    engine: ServerClient
    process: psutil.Process
    tensors: Tensors


class Copies:
    """The servers of `copy_config_paths`.

    They serve the same model with the same dtype, so that all their parameters have the names and
    shapes of the first server's, which are the trainer's.
    """

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        self.config, self.device, self.stop = config, device, stop
        self.paths = [Path(path) for path in config.copy_config_paths or []]
        self._source: Tensors = {}
        self._check_source: Callable[[], None] = lambda: None
        self._copies: list[_Copy] = []
        self._supervisor = supervised(config, stop)
        # A thread for each pause and one for each update, which waits for it: a server that pauses
        # late must not keep another's update in the queue.
        self._threads = ThreadPoolExecutor(max(1, 2 * len(self.paths)), "publish")

    @property
    def engines(self) -> list[ServerClient]:
        return [each.engine for each in self._copies]

    def feed(self, source: Tensors, version: int, check_source: Callable[[], None]) -> None:
        """Wait for each server, map its parameters, and write `source` into them.

        Args:
            check_source: raises `EngineGone` if the process with the memory of `source` has ended.

        Raises:
            ManifestError: no usable manifest within `engine_timeout`, or another model.
            UsageError: a tensor-parallel server.
        """
        self._source, self._check_source = source, check_source
        for path in self.paths:
            copy = self._map(path)
            self._copies.append(copy)
            self._pause(copy, "keep")
            self._write(copy, version)
            print(f"✓ {copy.engine.base_url} has a copy of the weights, version {version}")

    def pause(self) -> list[Future[None]]:
        """Begin to pause the servers, and do not wait: the first server is paused meanwhile."""
        how = self.config.in_flight
        return [self._threads.submit(self._pause, copy, how) for copy in self._copies]

    def publish(self, version: int, pauses: list[Future[None]]) -> list[Future[None]]:
        """Begin to write the present weights into each server once it is paused, and to resume it.

        The first server resumes meanwhile. A result raises `EngineGone` if its server has ended or
        does not answer.
        """
        return [
            self._threads.submit(self._update, copy, version, paused)
            for copy, paused in zip(self._copies, pauses, strict=True)
        ]

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def check(self) -> None:
        """Raise `EngineGone` if a server has ended."""
        for copy in self._copies:
            if has_ended(copy.process):
                raise EngineGone(f"{_name(copy)} has ended, and its copy of the weights with it")

    def _coming(self, path: Path) -> str | None:
        # A stack keeps the manifest of an engine in a folder of its name.
        return self._supervisor.coming(path.parent.name) if self._supervisor else None

    def _map(self, path: Path) -> _Copy:
        manifest = wait_for_server(
            lambda: answering(path),
            self.config.engine_timeout,
            self.stop,
            meanwhile=(ManifestError, EngineGone),
            coming=lambda: self._coming(path),
        )
        if (workers := manifest.tensor_parallel_size) > 1:
            raise UsageError(
                f"{path}: the server runs with --tensor-parallel-size {workers}, and a copy on the "
                "trainer's GPU needs the whole model there: run it with 1"
            )
        engine = ServerClient(manifest.base_url, server_token(path))
        meet(engine, manifest, path)
        (shard,) = manifest.ranks.values()
        tensors = open_tensors(shard, self.device)
        if odd := _differences(self._source, tensors):
            raise ManifestError(f"{path} is of another model than the first server's: {odd}")
        return _Copy(engine, live_server(manifest, path), tensors)

    def _pause(self, copy: _Copy, in_flight: InFlight) -> None:
        wait_s = self.config.in_flight_timeout
        copy.engine.pause(dirty=True, lease_s=LEASE_S, in_flight=in_flight, wait_s=wait_s)

    def _update(self, copy: _Copy, version: int, paused: Future[None]) -> None:
        paused.result()
        self._write(copy, version)

    @torch.no_grad()
    def _write(self, copy: _Copy, version: int) -> None:
        # Using a dead process's memory would make every later use of the GPU fail.
        if has_ended(copy.process):
            raise EngineGone(f"{_name(copy)} has ended")
        self._check_source()
        names = list(copy.tensors)
        torch._foreach_copy_(
            [copy.tensors[name] for name in names], [self._source[name] for name in names]
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        copy.engine.resume(version)


def _differences(source: Tensors, tensors: Tensors) -> str:
    if missing := sorted(source.keys() ^ tensors.keys()):
        return f"only one of them has {', '.join(missing[:3])}"
    for name, tensor in tensors.items():
        here = source[name]
        if (tensor.shape, tensor.dtype) != (here.shape, here.dtype):
            ours, theirs = (f"{list(each.shape)} {each.dtype}" for each in (here, tensor))
            return f"{name} is {theirs} there and {ours} here"
    return ""


def _name(copy: _Copy) -> str:
    return f"the inference server at {copy.engine.base_url} (pid {copy.process.pid})"
