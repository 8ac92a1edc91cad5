"""`POST /bridge/load`: load a folder's safetensors into this server, now or at its next start."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open

from atropos_common.protocol.bridge import LoadWeightsRequest, WeightsLoaded
from atropos_common.system.files import write_private
from vllm_server.bridge import ASLEEP, NotDone, WeightBridge, answered, folder_of_run, timed
from vllm_server.config import ENV_START_WEIGHTS, ServerConfig
from vllm_server.weights.copy_recorder import NO_WEIGHT, TIED_HEAD, CopyRecorder
from vllm_server.weights.loaders import FOLDER_FORMAT, PLAIN_FORMAT, register_loaders

logger = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]
"""Tensor name -> shape, of a whole checkpoint."""

# Values of --load-format that read a trainer's files.
SAFETENSORS_FORMATS = ("auto", "hf", "safetensors")


class RefusedWeights(NotDone):
    """Weights that this server refuses; usually it goes on with the old ones."""

    status = 409


class BrokenLoad(NotDone):
    """A load that failed halfway: the server refuses requests."""

    status = 503


class StartWeights(BaseModel):
    """Record of `/bridge/load` with `at_restart`, for the next start."""

    path: str
    weight_version: int


def note_of(config: ServerConfig) -> StartWeights | None:
    """Return the weights recorded for this start, if they still exist."""
    try:
        note = StartWeights.model_validate_json(config.start_weights_path.read_bytes())
        folder_of_run(note.path, config.run_dir, "weights", RefusedWeights)
        shapes_in(Path(note.path))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, RefusedWeights) as error:
        logger.warning("the weights noted in %s are not used: %s", config.start_weights_path, error)
        return None
    return note


def prepare_start(config: ServerConfig, args: Namespace, *, plain: bool) -> None:
    """Choose loader and weights of this start; the `plain` loader keeps weights writable."""
    os.environ.pop(ENV_START_WEIGHTS, None)
    if args.load_format in SAFETENSORS_FORMATS:
        args.load_format = PLAIN_FORMAT if plain else FOLDER_FORMAT
    if note := note_of(config):
        os.environ[ENV_START_WEIGHTS] = note.path
        args.load_format = PLAIN_FORMAT if plain else FOLDER_FORMAT
        logger.info("starting with the weights of version %d: %s", note.weight_version, note.path)
    register_loaders()


def weight_files(folder: Path) -> list[Path]:
    # `consolidated*` is Mistral's second copy under other names.
    files = folder.glob("*.safetensors")
    return sorted(file for file in files if not file.name.startswith("consolidated"))


def shapes_in(folder: Path) -> Shapes:
    """Return shapes from the files' headers.

    Raises:
        RefusedWeights: no safetensors, or an incomplete file.
    """
    shapes: Shapes = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict)
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise RefusedWeights(f"{file} is not a whole safetensors file: {error}") from None
    if not shapes:
        raise RefusedWeights(f"{folder} holds no safetensors")
    return shapes


def require_same(new: Shapes, own: Shapes, *, tied: bool) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        RefusedWeights: names the first tensors that differ.
    """
    # A tied head may be in one checkpoint and not in the other.
    passed = {TIED_HEAD} if tied else set()
    passed |= {name for name in own.keys() | new.keys() if name.endswith(NO_WEIGHT)}
    odd = [f"{name} is missing" for name in sorted(own.keys() - new.keys() - passed)]
    odd += [f"{name} is not of this model" for name in sorted(new.keys() - own.keys() - passed)]
    for name in sorted(own.keys() & new.keys()):
        if new[name] != own[name] and not name.endswith(NO_WEIGHT):
            odd.append(f"{name} is {list(new[name])}, not {list(own[name])}")
    if odd:
        more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
        raise RefusedWeights(f"these are the weights of another model: {'; '.join(odd[:4])}{more}")


class Reloader:
    """Loads checkpoints for one server."""

    def __init__(self, bridge: WeightBridge, args: Namespace) -> None:
        self.bridge = bridge
        self._args = args
        self._own: Shapes | None = None
        bridge.started_from = os.environ.get(ENV_START_WEIGHTS)
        offloaded = getattr(args, "cpu_offload_gb", 0)
        obstacles = {
            "it was started without ATROPOS_WEIGHT_UPDATES=1": not bridge.config.weight_updates,
            f"{bridge.not_in_place}": bridge.not_in_place,
            "it serves adapters (--enable-lora)": args.enable_lora,
            "a part of its weights is offloaded (--cpu-offload-gb)": offloaded,
            "it has several replicas (--data-parallel-size)": int(args.data_parallel_size) > 1,
        }
        bridge.load_obstacle = next((reason for reason, holds in obstacles.items() if holds), None)

    async def load(self, request: LoadWeightsRequest) -> WeightsLoaded:
        """Serve the weights in `path` as `weight_version`.

        Raises:
            RefusedWeights: the server goes on with the old weights; if the model has no place for
                some tensors, it refuses requests instead.
            BrokenLoad: the load failed halfway, so the server refuses requests.
        """
        folder = folder_of_run(request.path, self.bridge.config.run_dir, "weights", RefusedWeights)
        shapes = await asyncio.to_thread(shapes_in, folder)
        if request.at_restart:
            return self._note(folder, request)
        state = self.bridge.state
        untouched = state.weight_version is None and not state.dirty
        if untouched and self.bridge.started_from == str(folder):
            return await self._as_started(request)
        if reason := self.bridge.load_obstacle:
            fault = "weights cannot be loaded into this server while it runs"
            raise RefusedWeights(f"{fault}: {reason}. Restart it")
        own = await asyncio.to_thread(self._own_shapes)
        tied = bool(self.bridge.engine.model_config.hf_config.tie_word_embeddings)
        require_same(shapes, own, tied=tied)
        async with self.bridge.lock:
            if self.bridge.sleeping:
                raise RefusedWeights(ASLEEP)
            return await self._in_place(folder, request)

    async def _in_place(self, folder: Path, request: LoadWeightsRequest) -> WeightsLoaded:
        phases: dict[str, float] = {}
        with timed(phases, "pause"):
            await self.bridge.freeze_to_write(request, request.lease_s)
        # vLLM's `reload_weights` would process each layer's weights again. On a CPU that repacks
        # them and leaves a tied head stale. It would also rename the served model.
        call = self.bridge.engine.collective_rpc("atropos_load_weights", args=(str(folder),))
        try:
            found = await asyncio.wait_for(call, request.lease_s)
            if failed := next((rank["failed"] for rank in found if "failed" in rank), None):
                raise RuntimeError(failed)
        except Exception as error:
            late = f"no end after {request.lease_s:g} s"
            what = late if isinstance(error, TimeoutError) else str(error) or repr(error)
            why = " ".join(what.split())[:300]
            fault = f"the load of {folder} broke off, so weights are mixed: {why}"
            self.bridge.fail(fault)
            raise BrokenLoad(fault) from error
        if reason := next((rank["without_place"] for rank in found if rank["without_place"]), None):
            self.bridge.fail(reason)
            raise RefusedWeights(reason)
        # The engine waited for the slowest rank.
        phases |= {name: max(rank[name] for rank in found) for name in ("load", "device_sync")}
        with timed(phases, "resume"):
            await self.bridge.reset_prefix_cache()
            await self.bridge.declare(request.weight_version)
        version, took_s = request.weight_version, sum(phases.values())
        logger.info("weights of version %d serve after %.3f s: %s", version, took_s, folder)
        return self._answer(phases, tensors=int(found[0]["tensors"]), size=int(found[0]["bytes"]))

    # The weights are in memory already.
    async def _as_started(self, request: LoadWeightsRequest) -> WeightsLoaded:
        phases: dict[str, float] = {}
        async with self.bridge.lock:
            with timed(phases, "resume"):
                await self.bridge.declare(request.weight_version)
        logger.info("the weights of the start serve as version %d", request.weight_version)
        return self._answer(phases)

    def _note(self, folder: Path, request: LoadWeightsRequest) -> WeightsLoaded:
        config = self.bridge.config
        if not config.weight_updates:
            raise RefusedWeights(f"{self.bridge.load_obstacle}")
        if config.private_dir:
            fix = "start this one with LOGDIR=DIR"
            raise RefusedWeights(f"a restarted server would not find these weights: {fix}")
        form = self._args.load_format
        if form not in (*SAFETENSORS_FORMATS, FOLDER_FORMAT, PLAIN_FORMAT):
            raise RefusedWeights(f"--load-format {form} does not read safetensors: leave it out")
        note = StartWeights(path=str(folder), weight_version=request.weight_version)
        write_private(config.start_weights_path, note.model_dump_json())
        return self._answer({})

    def _answer(
        self, phases: dict[str, float], *, tensors: int = 0, size: int = 0
    ) -> WeightsLoaded:
        return WeightsLoaded(
            instance_id=self.bridge.config.instance_id,
            weight_version=self.bridge.state.weight_version,
            tensors=tensors,
            bytes=size,
            phases=phases,
        )

    def _own_shapes(self) -> Shapes:
        if self._own is None:
            places = filter(None, (self.bridge.started_from, self._args.model))
            known = [Path(path).expanduser() for path in places]
            # The trainer may have removed the first one.
            folder = next((path for path in known if path.is_dir()), None)
            self._own = shapes_in(folder or _downloaded(self._args))
        return self._own


def _downloaded(args: Namespace) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            args.model,
            revision=args.revision,
            cache_dir=args.download_dir,
            local_files_only=True,
            allow_patterns=["*.safetensors"],
        )
    except (LocalEntryNotFoundError, ValueError) as error:
        fault = f"the cache has no files of {args.model} to compare the new weights with"
        raise RefusedWeights(f"{fault}: {error}") from None
    return Path(folder)


def load_in_worker(worker: Any, path: str) -> dict[str, Any]:
    """Write the safetensors of `path` over the parameters of this worker's model.

    Returns:
        Counts of tensors and bytes, seconds by phase, and `without_place`: a message if the
        model has no place for some tensors, else None.

    Raises:
        RuntimeError: a parameter got no values.
    """
    import torch
    from vllm.config import set_current_vllm_config

    model = worker.get_model()
    first = next(model.parameters())
    sizes = {"tensors": 0.0, "bytes": 0.0}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for file in weight_files(Path(path)):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict)
                    tensor = opened.get_tensor(name)
                    sizes["tensors"] += 1
                    sizes["bytes"] += tensor.nbytes
                    yield name, tensor

    began = time.perf_counter()
    recorder = CopyRecorder(model)
    # vLLM's own loader splits for tensor parallelism and writes over the parameters in memory, so
    # CUDA graphs stay valid.
    with recorder, set_current_vllm_config(worker.vllm_config):
        model.load_weights(recorder.one_by_one(tensors()))
    if left := recorder.untouched():
        examples = ", ".join(left[:3])
        raise RuntimeError(f"{len(left)} parameters were not written, such as {examples}")
    loaded = time.perf_counter()
    if first.is_cuda:
        torch.cuda.synchronize(first.device)
    phases = {"load": loaded - began, "device_sync": time.perf_counter() - loaded}
    return {**sizes, **phases, "without_place": recorder.without_place()}


def make_router(reloader: Reloader) -> APIRouter:
    router = APIRouter()

    @router.post("/bridge/load")
    async def load(request: LoadWeightsRequest) -> Any:
        return await answered(reloader.load(request))

    return router
