"""Routes `/lora/*`: replace the trainer's adapter while requests run.

POST /lora/load    LoadAdapterRequest -> AdapterInfo
POST /lora/unload                     -> AdapterInfo   (back to the base model)
GET  /lora/status                     -> AdapterInfo
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from atropos_common.protocol.bridge import (
    ADAPTER_CONFIG,
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    AdapterInfo,
    LoadAdapterRequest,
)
from vllm_server import compat
from vllm_server.bridge import ASLEEP, NotDone, WeightBridge, answered, folder_of_run

logger = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, int]]
"""Linear module -> (out features, in features)."""


class ServedAdapters:
    """The current adapter, and older ones that still have completions in flight."""

    def __init__(self, bridge: WeightBridge, models: Any, root: Path | None) -> None:
        """Args:
        models: vLLM's list of served models.
        root: folder below which adapters must lie; None: anywhere.
        """
        self._bridge = bridge
        self._models = models
        self._root = root
        self._config = bridge.engine.vllm_config.lora_config
        self._users: Counter[str] = Counter()
        self._retired: dict[str, Any] = {}
        self._current: tuple[Any, int] | None = None
        self._layers: Shapes | None = None

    def info(self) -> AdapterInfo:
        request, version = self._current or (None, None)
        self._sweep()
        return AdapterInfo(
            enabled=self._config is not None,
            name=request.lora_name if request else None,
            weight_version=version,
            path=request.lora_path if request else None,
            max_lora_rank=self._config.max_lora_rank if self._config else None,
            retiring=len(self._retired),
            retiring_paths=[old.lora_path for old in self._retired.values()],
        )

    @contextlib.contextmanager
    def use(self) -> Iterator[tuple[Any, int] | None]:
        """Yield adapter and weight version for one request; None: base model."""
        if self._current is None:
            yield None
            return
        request, version = self._current
        # A completion ends on the adapter that it began with.
        self._users[request.lora_name] += 1
        try:
            yield request, version
        finally:
            self._users[request.lora_name] -= 1
            self._sweep()

    async def load(self, path: str, version: int) -> AdapterInfo:
        """Serve the adapter in `path` as weight version `version` from the next request on.

        Raises:
            NotDone: LoRA is off, the adapter does not fit, or vLLM refused it.
        """
        folder = self._checked(path)
        async with self._bridge.lock:
            if self._bridge.sleeping:
                raise NotDone(ASLEEP)
            await self._require_fit(folder)
            began = time.perf_counter()
            # A new name and id each time, so that no prefix cached under older weights matches.
            request = await self._add(f"atropos-v{version}-{secrets.token_hex(4)}", folder)
            for name in self._base_names():
                self._models.lora_requests[name] = request
            self._replace((request, version))
            await self._bridge.declare(version)
        took_s = time.perf_counter() - began
        logger.info("adapter of version %d serves after %.3f s: %s", version, took_s, folder)
        return self.info()

    async def unload(self) -> AdapterInfo:
        """Serve the base model again, as version 0."""
        async with self._bridge.lock:
            for name in self._base_names():
                self._models.lora_requests.pop(name, None)
            if self._current is not None:  # before the first load, base weights may not answer yet
                self._replace(None)
                await self._bridge.declare(0)
        return self.info()

    def _base_names(self) -> list[str]:
        return [path.name for path in self._models.base_model_paths]

    def _checked(self, path: str) -> Path:
        if self._config is None:
            fix = "in a profile, mode = lora_only sets it"
            raise NotDone(f"this server was started without --enable-lora: {fix}")
        folder = folder_of_run(path, self._root, "adapters")
        try:
            there = (folder / ADAPTER_CONFIG).is_file()
        except OSError as error:  # a folder without permission
            raise NotDone(f"{path}: {error.strerror}") from None
        if not there:
            raise NotDone(f"{path} holds no {ADAPTER_CONFIG}: not an adapter of peft")
        return folder

    async def _require_fit(self, folder: Path) -> None:
        if self._layers is None:
            config = self._bridge.engine.model_config.hf_config
            self._layers = await asyncio.to_thread(linear_shapes, config)
        if why := await asyncio.to_thread(misfit, folder, self._layers):
            raise NotDone(f"the adapter in {folder} is not one of {self._bridge.model}: {why}")

    async def _add(self, name: str, folder: Path) -> Any:
        request = compat.load_adapter_request(name, str(folder))
        answer = await self._models.load_lora_adapter(request)
        if not isinstance(answer, str):
            raise NotDone(f"vLLM refuses the adapter in {folder}: {answer.error.message}")
        return self._models.lora_requests[name]

    def _replace(self, new: tuple[Any, int] | None) -> None:
        old, self._current = self._current, new
        if old is not None:
            self._retired[old[0].lora_name] = old[0]
        self._sweep()

    def _sweep(self) -> None:
        if not self._retired:
            return
        # Completions may also have come by vLLM's own routes. The files of an adapter must stay
        # until its last one, because vLLM may read them again.
        running = compat.adapters_in_flight(self._bridge.engine)
        idle = [name for name in self._retired if not self._users[name] and name not in running]
        for name in idle:
            self._bridge.spawn(self._remove(name, self._retired.pop(name)))

    async def _remove(self, name: str, request: Any) -> None:
        self._users.pop(name, None)
        self._models.lora_requests.pop(name, None)
        with contextlib.suppress(Exception):  # vLLM may have evicted it already
            await self._bridge.engine.remove_lora(request.lora_int_id)


def make_router(adapters: ServedAdapters) -> APIRouter:
    router = APIRouter()

    @router.get("/lora/status")
    async def status() -> AdapterInfo:
        return adapters.info()

    @router.post("/lora/load")
    async def load(request: LoadAdapterRequest) -> Any:
        return await answered(adapters.load(request.path, request.weight_version))

    @router.post("/lora/unload")
    async def unload() -> Any:
        return await answered(adapters.unload())

    return router


def linear_shapes(hf_config: Any) -> Shapes:
    """Return the shapes of every linear layer of the model for `hf_config`; allocate no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def misfit(folder: Path, model: Shapes) -> str | None:
    """Return the reason why the adapter in `folder` does not fit these layers."""
    from safetensors import SafetensorError, safe_open

    # vLLM copies a smaller matrix into a part of a larger one without an error, and the model then
    # answers with noise.
    unreadable = OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError
    try:
        rank = int(json.loads((folder / ADAPTER_CONFIG).read_text())["r"])
        with safe_open(str(folder / ADAPTER_WEIGHTS), "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (*unreadable, SafetensorError) as error:
        return f"it cannot be read ({type(error).__name__}: {error})"
    matrices = 0
    for name, shape in shapes.items():
        module, _, part = name.removeprefix(ADAPTER_PREFIX).rpartition(".lora_")
        if not module:
            return f"{name} is not the matrix of a LoRA layer"
        if module not in model:
            return f"the model has no linear layer {module}"
        out, into = model[module]
        wanted = (rank, into) if part == "A.weight" else (out, rank)
        if shape != wanted:
            return f"{name} is {list(shape)}, the model's layer needs {list(wanted)}"
        matrices += 1
    return None if matrices else "it holds no matrix"
