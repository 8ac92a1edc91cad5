"""`/bridge/*`: how the trainer pauses the engine, writes weights, and names what now answers.

Messages are those of `atropos_common.bridge`. Pausing freezes requests in flight and keeps them; resuming
resets the prefix cache, so that no key or value of older weights is used again. Only a resume opens a hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from atropos_common.bridge import (
    ROUTING_FLAG,
    BridgeInfo,
    LoadWeightsRequest,
    LogprobsRequest,
    LogprobsResponse,
    PauseRequest,
    ResumeRequest,
    RoutingRequest,
    VersionsRequest,
    VersionsResponse,
)
from atropos_common.files import write_private
from atropos_common.manifest import Manifest
from atropos_common.transfer import TransferBackend, TransferUpdate
from vllm_server.auth import GenerationHold, ServerLoad, error_response
from vllm_server.config import ServerConfig
from vllm_server.generate import Generator
from vllm_server.recorded import CompletionStore, RoutingStore
from vllm_server.versions import MAX_LEASE_S, SpanStore, VersionHistory

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0
ASLEEP = "the engine sleeps: POST /bridge/wake_up first"


NOT_THE_HOLDER = "another trainer paused generation, and its weights may be half-written: POST /bridge/pause takes over"


class NotDone(ValueError):
    """What was asked is not done; the message says why, and what would help."""

    status = 400
    """Of the answer."""


class NotTheHolder(NotDone):
    """A resume by someone who did not pause, or whose pause another has taken over."""

    status = 409


async def answered(action: Coroutine[Any, Any, Any]) -> Any:
    """The answer of an action on the engine, or why it was refused or failed."""
    try:
        return await action
    except NotDone as error:
        if error.status != NotDone.status:
            logger.warning("%s", error, exc_info=error.__cause__)
        return error_response(error.status, str(error))
    except Exception as error:
        logger.exception("the engine did not follow")
        return error_response(503, f"{type(error).__name__}: {error}")


def folder_of_run(path: str, root: Path | None, what: str, refusal: type[NotDone] = NotDone) -> Path:
    """The folder `path` of `what`, resolved; below `root`, the run's directory, where there is one.

    Raises:
        NotDone: it is not there, or elsewhere; as `refusal`.
    """
    try:
        folder = Path(path).resolve()
        there = folder.is_dir()
    except (OSError, ValueError) as error:  # a name that the kernel does not take
        raise refusal(f"{path!r} is no path: {error}") from None
    if root is not None and not folder.is_relative_to(root.resolve()):
        raise refusal(f"{path} lies outside {root}: {what} are loaded from the run's directory only")
    if not there:
        raise refusal(f"{path} is not a folder")
    return folder


@contextlib.contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Note the seconds of a phase."""
    began = time.perf_counter()
    yield
    phases[name] = time.perf_counter() - began


class WeightBridge:
    """The engine's pause state and weight version. One lock orders everything that changes them."""

    def __init__(
        self, engine: Any, *, config: ServerConfig, gate: GenerationHold, model: str, vllm_version: str
    ) -> None:
        self.engine = engine
        self.config = config
        self.gate = gate
        self.model = model
        self.vllm_version = vllm_version
        self.history = VersionHistory()
        self.spans = SpanStore(config.spans_path)
        self.completions = CompletionStore()
        self.routing: RoutingStore | None = None
        """Null where the engine does not record which experts it takes."""
        self.state = gate.state
        self.manifest: Manifest | None = None
        self.workers = 1
        self.receives: TransferBackend | None = None
        """Over what a trainer can broadcast weights to the workers."""
        self.not_in_place: str | None = None
        """Why new weights must not be written over those in memory, in a server that takes new ones."""
        self.sleeping = False
        self._stopped = False
        """Whether it is certain that the engine makes no token: it was told to pause, and not yet to go on."""
        self.load_obstacle: str | None = None
        """Why weights of a folder cannot be written over those in memory; null when they can."""
        self.started_from: str | None = None
        self.lock = asyncio.Lock()
        """Held by whoever changes what answers."""
        self.load = ServerLoad()
        self._lease: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def info(self) -> BridgeInfo:
        return BridgeInfo(
            instance_id=self.config.instance_id,
            model=self.model,
            vllm_version=self.vllm_version,
            weight_version=self.state.weight_version,
            held=self.state.held,
            paused=self.state.paused,
            dirty=self.state.dirty,
            shared_weights=self.manifest is not None,
            manifest=None if self.manifest is None else str(self.config.manifest_path),
            exported=0 if self.manifest is None else len(self.manifest.ranks[0].param_mappings),
            workers=self.workers,
            receives=self.receives,
            load_obstacle=self.load_obstacle,
            started_from=self.started_from,
            block_size=self.engine.vllm_config.cache_config.block_size,
            idle_s=self.load.idle_s,
            records_routing=self.routing is not None,
            eager_because=self.config.eager_because,
        )

    async def pause(self, request: PauseRequest) -> BridgeInfo:
        """Freeze the engine, or renew the lease of a pause.

        Raises:
            ValueError: a lease that makes no sense, or an engine that sleeps.
        """
        async with self.lock:
            self._require_awake()
            await self.freeze(request)
            return self.info()

    async def freeze(self, request: PauseRequest) -> None:
        """As `pause`; the caller holds the lock."""
        lease: dict[str, Any] = {"lease_s": request.lease_s, "dirty": request.dirty, "holder": request.holder}
        try:
            self.state.pause(**lease, now=time.monotonic())
        except ValueError as error:
            raise NotDone(str(error)) from None
        self._arm_lease(request.lease_s + request.wait_s)  # already now, should the engine refuse
        if not self._stopped:
            await self._stop_generating(request)
            self._stopped = True
            self.state.pause(**lease, now=time.monotonic())
        self._arm_lease(request.lease_s)

    async def freeze_to_write(self, request: LoadWeightsRequest | TransferUpdate, limit_s: float) -> None:
        """Freeze the engine for a write of at most `limit_s` seconds; the caller holds the lock.

        The lease is for a server that is stuck then: a write that fails says so itself.
        """
        lease_s = min(request.wait_s + 2 * limit_s, MAX_LEASE_S)
        await self.freeze(PauseRequest(lease_s=lease_s, dirty=True, in_flight=request.in_flight, wait_s=request.wait_s))

    async def _stop_generating(self, request: PauseRequest) -> None:
        """Return once no token is made any more."""
        waiting = None
        if request.in_flight == "wait":
            waiting = asyncio.ensure_future(self.engine.pause_generation(mode="wait", clear_cache=True))
            await asyncio.wait({waiting}, timeout=request.wait_s)
            if waiting.done():
                await waiting
                return
            logger.warning("requests in flight did not end within %g s: the rest is frozen", request.wait_s)
        mode = "abort" if request.in_flight == "recompute" else "keep"
        await self.engine.pause_generation(mode=mode, clear_cache=True)
        if waiting is not None:
            await waiting

    def fail(self, fault: str) -> None:
        """The weights are not whole: unhealthy, and no answer to anyone, until someone declares them complete."""
        self._disarm_lease()
        self.state.fail(fault)
        logger.error("unhealthy: %s", fault)

    async def resume(self, request: ResumeRequest) -> BridgeInfo:
        """Declare the weights complete and go on.

        Raises:
            NotDone: a version that cannot be, or an engine that sleeps.
            NotTheHolder: the pause is another's.
        """
        async with self.lock:
            self._require_awake()
            if self.state.holder not in ("", request.holder):
                raise NotTheHolder(NOT_THE_HOLDER)
            if request.weight_version < 0:
                raise NotDone(f"weight_version must not be negative, not {request.weight_version}")
            if not self.state.paused:
                await self.freeze(PauseRequest(dirty=True))
            await self.reset_prefix_cache()
            # The engine makes no token between here and its resume, so this moment parts old from new exactly.
            await self.declare(request.weight_version)
            return self.info()

    async def declare(self, version: int) -> None:
        """What answers from here on is `version`: end pause, hold and fault. The caller holds the lock."""
        self.history.change(version, time.monotonic())
        await self._go_on()
        self.state.resume(version)
        self._disarm_lease()
        self.gate.release()
        self.stamp()

    async def _go_on(self) -> None:
        """Let the engine make tokens. Where that fails it may do so all the same, and the next pause stops it again."""
        self._stopped = False
        await self.engine.resume_generation()

    async def reset_prefix_cache(self) -> None:
        """Forget every cached key and value; frozen requests are computed anew from their tokens."""
        if not await self.engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError(
                "vLLM could not reset its prefix cache, so old keys and values would mix with new weights"
            )

    def stamp(self) -> None:
        """Write instance and version beside the manifest, atomically; where the disk takes nothing there is no stamp,
        which costs nobody anything."""
        told = {"instance_id": self.config.instance_id, "weight_version": self.state.weight_version}
        try:
            write_private(self.config.state_path, json.dumps(told))
        except OSError as error:
            logger.warning("cannot write %s (%s); it is left out", self.config.state_path, error.strerror)
            with contextlib.suppress(OSError):
                self.config.state_path.unlink(missing_ok=True)

    def _require_awake(self) -> None:
        """Asleep, the weights' memory is not mapped: nothing may write there, or go on."""
        if self.sleeping:
            raise NotDone(ASLEEP)

    def _require_running(self) -> None:
        """vLLM goes on generating at a wake-up, whatever was paused."""
        if self.state.paused:
            raise NotDone("generation is paused: POST /bridge/resume first")

    async def sleep(self, level: int) -> dict[str, bool]:
        """Raises NotDone while paused."""
        async with self.lock:
            self._require_running()
            await self.engine.sleep(level)
            self.sleeping = True
            return {"sleeping": True}

    async def wake_up(self) -> dict[str, bool]:
        """Raises NotDone while paused."""
        async with self.lock:
            self._require_running()
            await self.engine.wake_up()
            self.sleeping = False
            return {"sleeping": False}

    def _arm_lease(self, lease_s: float) -> None:
        self._disarm_lease()
        # A hair late, so that the lease has run out for certain when it is looked at.
        self._lease = asyncio.get_running_loop().call_later(lease_s + 0.01, lambda: self.spawn(self._expire()))

    def _disarm_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background until it ends."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _expire(self) -> None:
        async with self.lock:
            expiry = self.state.expire(time.monotonic())
            if expiry == "resume":
                logger.warning("the pause's lease is over and no weights were touched: resuming by itself")
                try:
                    await self.reset_prefix_cache()
                    await self._go_on()
                except Exception as error:
                    self.fail(f"the pause's lease is over, and the engine did not go on: {error}")
            elif expiry == "fault":
                logger.error("unhealthy: %s", self.state.fault)

    async def health_generate(self, generator: Generator) -> JSONResponse:
        """Generate one token for real, whatever the hold says; a pause within its lease is healthy."""
        if self.state.fault:
            return error_response(503, self.state.fault)
        probe = asyncio.ensure_future(generator.probe())
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        try:
            while not probe.done() and time.monotonic() < deadline and not (self.state.paused or self.sleeping):
                await asyncio.wait({probe}, timeout=0.1)
            if not probe.done() and (self.state.paused or self.sleeping):
                return JSONResponse({"paused": self.state.paused, "sleeping": self.sleeping, **self._short()})
            if not probe.done():
                return error_response(503, f"no token within {PROBE_TIMEOUT_S:.0f} s")
            return JSONResponse({"paused": False, "tokens": probe.result(), **self._short()})
        except Exception as error:
            return error_response(503, f"generation fails: {type(error).__name__}: {error}")
        finally:
            probe.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await probe

    def _short(self) -> dict[str, Any]:
        return {"held": self.state.held, "weight_version": self.state.weight_version}


class SleepRequest(BaseModel):
    level: int = 1


def _add_changing(router: APIRouter, bridge: WeightBridge) -> None:
    """Pause and resume."""

    @router.post("/bridge/pause")
    async def pause(request: PauseRequest | None = None) -> Any:
        return await answered(bridge.pause(request or PauseRequest()))

    @router.post("/bridge/resume")
    async def resume(request: ResumeRequest) -> Any:
        return await answered(bridge.resume(request))


def _add_sleeping(router: APIRouter, bridge: WeightBridge, *, sleep_mode: bool) -> None:
    """Sleep and wake up, where the engine was started for it."""

    @router.post("/bridge/sleep")
    async def sleep(request: SleepRequest | None = None) -> Any:
        if not sleep_mode:
            return error_response(
                501, "the engine cannot sleep: that needs a GPU, --enable-sleep-mode, and weights that are not shared"
            )
        return await answered(bridge.sleep((request or SleepRequest()).level))

    @router.post("/bridge/wake_up")
    async def wake_up() -> Any:
        if not sleep_mode:
            return error_response(501, "the engine cannot sleep, so there is nothing to wake")
        return await answered(bridge.wake_up())

    @router.get("/bridge/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"sleeping": bridge.sleeping}


def make_router(bridge: WeightBridge, generator: Generator, app: FastAPI, *, sleep_mode: bool) -> APIRouter:
    """All `/bridge` routes and `/health_generate`. `sleep_mode`: the engine was started so that it can sleep."""
    router = APIRouter()
    _add_changing(router, bridge)
    _add_sleeping(router, bridge, sleep_mode=sleep_mode)

    @router.get("/health_generate")
    async def health_generate() -> Any:
        return await bridge.health_generate(generator)

    @router.get("/bridge/info")
    async def info() -> BridgeInfo:
        return bridge.info()

    @router.get("/bridge/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"paused": bridge.state.paused}

    @router.post("/bridge/versions")
    async def versions(request: VersionsRequest) -> VersionsResponse:
        return VersionsResponse(versions=bridge.spans.look_up(request.digests))

    @router.post("/bridge/logprobs")
    async def logprobs(request: LogprobsRequest) -> LogprobsResponse:
        pairs = zip(request.prompts, request.completions, strict=False)
        return LogprobsResponse(found=[bridge.completions.look_up(prompt, ids) for prompt, ids in pairs])

    @router.post("/bridge/routing")
    async def routing(request: RoutingRequest) -> Any:
        if bridge.routing is None:
            return error_response(400, f"this server records no experts: start it with --{ROUTING_FLAG}")
        # Some MB to encode: beside the loop that streams tokens.
        found = await asyncio.to_thread(lambda store: store.answer(request).model_dump_json(), bridge.routing)
        return Response(found, media_type="application/json")

    @router.get("/bridge/state_dict_info")
    async def state_dict_info() -> dict[str, Any]:
        return describe_parameters(bridge)

    @router.get("/bridge/debug")
    async def debug() -> dict[str, Any]:
        return {
            **bridge.info().model_dump(),
            "pid": os.getpid(),
            "engine_type": type(bridge.engine).__name__,
            "fault": bridge.state.fault,
            "completions": generator.completions,
            "spans_kept": len(bridge.spans),
            "bridge_dir": str(bridge.config.bridge_dir),
            "dtype": str(bridge.engine.model_config.dtype),
        }

    @router.get("/bridge/list_endpoints")
    async def list_endpoints() -> dict[str, Any]:
        return {"endpoints": list_routes(app)}

    return router


def describe_parameters(bridge: WeightBridge) -> dict[str, Any]:
    """Names, shapes and types of what is exported; without single copy only the model itself."""
    parameters = {} if bridge.manifest is None else bridge.manifest.ranks[0].param_mappings
    return {
        "model": bridge.model,
        "dtype": str(bridge.engine.model_config.dtype).removeprefix("torch."),
        "shared_weights_enabled": bridge.manifest is not None,
        "manifest": bridge.info().manifest,
        "parameters": {name: {"shape": entry.shape, "dtype": entry.dtype} for name, entry in parameters.items()},
        "aliases": {} if bridge.manifest is None else bridge.manifest.ranks[0].aliases,
    }


def list_routes(app: FastAPI) -> list[dict[str, Any]]:
    """Every HTTP route with its methods."""
    routes: list[Any] = list(app.routes)
    return [
        {"path": route.path, "methods": sorted(route.methods)}
        for route in routes
        if getattr(route, "methods", None) and hasattr(route, "path")
    ]
