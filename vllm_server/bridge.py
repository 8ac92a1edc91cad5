"""Routes `/bridge/*`: the trainer pauses the engine, writes weights, and names their version.

Messages are defined in `atropos_common.protocol.bridge`.
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

from atropos_common.broadcast.transfer import TransferBackend, TransferUpdate
from atropos_common.protocol.bridge import (
    LOAD_PATH,
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
from atropos_common.protocol.manifest import Manifest
from atropos_common.system.files import write_private
from vllm_server import compat
from vllm_server.auth import GenerationHold, ServerLoad, error_response
from vllm_server.capacity import EngineCapacity
from vllm_server.config import ServerConfig
from vllm_server.generate import Generator
from vllm_server.recorded import CompletionStore, RoutingStore
from vllm_server.versions import MAX_LEASE_S, SpanStore, VersionHistory

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0
ASLEEP = "the engine sleeps: POST /bridge/wake_up first"


NOT_THE_HOLDER = (
    "another trainer paused generation, and its weights may be half-written: "
    "POST /bridge/pause takes over"
)


class NotDone(ValueError):
    """A refused or failed bridge action, with the way out."""

    status = 400  # of the HTTP answer


class NotTheHolder(NotDone):
    """A resume by a client that does not hold the pause."""

    status = 409


async def answered(action: Coroutine[Any, Any, Any]) -> Any:
    """Return an action's answer, or an error answer."""
    try:
        return await action
    except NotDone as error:
        if error.status != NotDone.status:
            logger.warning("%s", error, exc_info=error.__cause__)
        return error_response(error.status, str(error))
    except Exception as error:
        logger.exception("the engine did not carry out the request")
        return error_response(503, f"{type(error).__name__}: {error}")


def folder_of_run(
    path: str, root: Path | None, what: str, refusal: type[NotDone] = NotDone
) -> Path:
    """Return the folder `path` of `what`, which must lie below `root` if that is given.

    Raises:
        NotDone: it does not exist or lies elsewhere; raised as `refusal`.
    """
    try:
        folder = Path(path).resolve()
        there = folder.is_dir()
    except (OSError, ValueError) as error:  # ValueError: a name that the kernel refuses
        raise refusal(f"{path!r} is no path: {error}") from None
    if root is not None and not folder.is_relative_to(root.resolve()):
        where = "are loaded from the run's directory only"
        raise refusal(f"{path} lies outside {root}: {what} {where}")
    if not there:
        raise refusal(f"{path} is not a folder")
    return folder


@contextlib.contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Record the seconds of a phase in `phases`."""
    began = time.perf_counter()
    yield
    phases[name] = time.perf_counter() - began


class WeightBridge:
    """Pause state and weight version of the engine."""

    def __init__(
        self,
        engine: Any,
        *,
        config: ServerConfig,
        gate: GenerationHold,
        model: str,
        vllm_version: str,
    ) -> None:
        self.engine, self.config, self.gate = engine, config, gate
        self.model, self.vllm_version = model, vllm_version

        # Pause and version. The hold of generation shares the state.
        self.state = gate.state
        self.lock = asyncio.Lock()
        """Held while the answering weights change."""
        self.sleeping = False
        # The engine certainly makes no token: it has confirmed a pause and not been resumed.
        self._stopped = False
        self.accepts = asyncio.Event()
        """Set while the engine takes new requests for certain: no pause began."""
        self.accepts.set()
        self.cache_salt = 0
        """Part of every request's cache salt; 0: none."""
        self._lease: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

        # What completions leave behind.
        self.history = VersionHistory()
        self.spans = SpanStore(config.spans_path)
        self.completions = CompletionStore()
        self.load = ServerLoad()

        # Known only with a running engine: `app.build` and the routes of weights set these.
        self.routing: RoutingStore | None = None
        self.capacity: EngineCapacity | None = None
        self.manifest: Manifest | None = None
        self.workers = 1
        self.receives: TransferBackend | None = None
        """Backend of a trainer's broadcasts, if it may send any."""
        self.started_from: str | None = None
        self.not_in_place: str | None = None
        """Reason against writing broadcast weights over those in memory."""
        self.load_obstacle: str | None = None
        """Reason against loading a folder's weights over those in memory."""

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
            generated_tokens=None if self.capacity is None else self.capacity.generated,
            capacity_tokens_per_s=None if self.capacity is None else self.capacity.ceiling(),
            records_routing=self.routing is not None,
            eager_because=self.config.eager_because,
        )

    async def pause(self, request: PauseRequest) -> BridgeInfo:
        """Freeze the engine, or renew the lease of a pause.

        Raises:
            NotDone: an invalid lease, or a sleeping engine.
        """
        async with self.lock:
            self._require_awake()
            await self.freeze(request)
            return self.info()

    async def freeze(self, request: PauseRequest) -> None:
        """Pause; the caller holds the lock."""
        lease = request.model_dump(include={"lease_s", "dirty", "holder"})
        try:
            self.state.pause(**lease, now=time.monotonic())
        except ValueError as error:
            raise NotDone(str(error)) from None
        self._arm_lease(request.lease_s + request.wait_s)  # armed first, in case the engine refuses
        if not self._stopped:
            self.accepts.clear()
            await self._stop_generating(request)
            self._stopped = True
            self.state.pause(**lease, now=time.monotonic())
        self._arm_lease(request.lease_s)

    async def freeze_to_write(
        self, request: LoadWeightsRequest | TransferUpdate, limit_s: float
    ) -> None:
        """Freeze the engine for a write of at most `limit_s` seconds; the caller holds the lock."""
        # The lease only covers a stuck server: a write that fails reports that itself.
        lease_s = min(request.wait_s + 2 * limit_s, MAX_LEASE_S)
        flight: dict[str, Any] = request.model_dump(include={"in_flight", "wait_s"})
        await self.freeze(PauseRequest(lease_s=lease_s, dirty=True, **flight))

    async def _stop_generating(self, request: PauseRequest) -> None:
        waiting, self.history.keeps_cache = None, request.in_flight == "reuse"
        if request.in_flight == "wait":
            pausing = self.engine.pause_generation(mode="wait", clear_cache=True)
            waiting = asyncio.ensure_future(pausing)
            await asyncio.wait({waiting}, timeout=request.wait_s)
            if waiting.done():
                await waiting
                return
            late = f"requests in flight did not end within {request.wait_s:g} s"
            logger.warning("%s: the others are paused", late)
        clear_cache = not self.history.keeps_cache
        if request.in_flight == "recompute":
            await self.engine.pause_generation(mode="abort", clear_cache=clear_cache)
        else:
            await compat.pause_and_keep(self.engine, clear_cache=clear_cache)
        if waiting is not None:
            await waiting

    def fail(self, fault: str) -> None:
        """Mark the weights as half-written: no answers until a resume declares them complete."""
        self._disarm_lease()
        self.state.fail(fault)
        logger.error("unhealthy: %s", fault)

    async def resume(self, request: ResumeRequest) -> BridgeInfo:
        """Declare the weights complete and resume the engine.

        Raises:
            NotDone: an invalid version, or a sleeping engine.
            NotTheHolder: another client holds the pause.
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
            # The engine makes no token between here and its resume, so this moment separates the
            # versions exactly.
            await self.declare(request.weight_version)
            return self.info()

    async def declare(self, version: int) -> None:
        """Make `version` the answering version; the caller holds the lock."""
        if self.history.keeps_cache:
            # Cached blocks stay for the requests that have them. Later requests have another salt,
            # so that they never match such a block.
            self.cache_salt += 1
        # In this order: no token of the new weights may precede their version, and the hold ends
        # once they answer.
        made = await compat.tokens_in_flight(self.engine)
        self.history.change(version, time.monotonic(), made)
        await self._go_on()
        self.state.resume(version)
        self._disarm_lease()
        self.gate.release()
        # Beside the event loop: a disk that takes a checkpoint delays the rename, and the engine
        # generates already.
        await asyncio.to_thread(self.stamp)

    async def _go_on(self) -> None:
        # First: after a failure it may run, so the next pause stops it again.
        self._stopped = False
        if self.capacity is not None:
            self.capacity.resumes(time.monotonic())
        await self.engine.resume_generation()
        self.accepts.set()

    async def reset_prefix_cache(self) -> None:
        """Drop every cached key and value; frozen requests are recomputed from their tokens. After
        a pause with `reuse` they stay: `declare` keeps them from later requests."""
        if self.history.keeps_cache:
            return
        if not await self.engine.reset_prefix_cache(reset_running_requests=True):
            effect = "old keys and values would mix with new weights"
            raise RuntimeError(f"vLLM could not reset its prefix cache, so {effect}")

    def stamp(self) -> None:
        """Write instance id and weight version beside the manifest."""
        path, version = self.config.state_path, self.state.weight_version
        stamp = {"instance_id": self.config.instance_id, "weight_version": version}
        try:
            write_private(path, json.dumps(stamp))
        except OSError as error:
            # A full disk costs only the stamp. An older one would be wrong.
            logger.warning("cannot write %s (%s); it is left out", path, error.strerror)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _require_awake(self) -> None:
        # A sleeping engine's weights are not mapped, so nothing may write or resume.
        if self.sleeping:
            raise NotDone(ASLEEP)

    def _require_running(self) -> None:
        # vLLM resumes generation at a wake-up.
        if self.state.paused:
            raise NotDone("generation is paused: POST /bridge/resume first")

    async def sleep(self, level: int) -> dict[str, bool]:
        """Raise NotDone while paused."""
        async with self.lock:
            self._require_running()
            await self.engine.sleep(level)
            self.sleeping = True
            return {"sleeping": True}

    async def wake_up(self) -> dict[str, bool]:
        """Raise NotDone while paused."""
        async with self.lock:
            self._require_running()
            await self.engine.wake_up()
            self.sleeping = False
            return {"sleeping": False}

    def _arm_lease(self, lease_s: float) -> None:
        self._disarm_lease()
        # Slightly late, so that the lease has certainly expired when the check runs.
        self._lease = asyncio.get_running_loop().call_later(
            lease_s + 0.01, lambda: self.spawn(self._expire())
        )

    def _disarm_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _expire(self) -> None:
        async with self.lock:
            expiry = self.state.expire(time.monotonic())
            if expiry == "resume":
                untouched = "no weights were written: generation resumes"
                logger.warning("the pause's lease has expired and %s", untouched)
                try:
                    await self.reset_prefix_cache()
                    await self._go_on()
                except Exception as error:
                    self.fail(
                        f"the pause's lease has expired, and the engine did not resume: {error}"
                    )
            elif expiry == "fault":
                logger.error("unhealthy: %s", self.state.fault)

    async def health_generate(self, generator: Generator) -> JSONResponse:
        """Generate one real token; a pause within its lease counts as healthy."""
        if self.state.fault:
            return error_response(503, self.state.fault)
        probe = asyncio.ensure_future(generator.probe())
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        state = self.state
        try:
            # A pause may begin at any time, and the probe then waits for its end.
            while not (probe.done() or state.paused or self.sleeping):
                if time.monotonic() >= deadline:
                    return error_response(503, f"no token within {PROBE_TIMEOUT_S:.0f} s")
                await asyncio.wait({probe}, timeout=0.1)
            answer: dict[str, Any] = {"held": state.held, "weight_version": state.weight_version}
            if probe.done():
                return JSONResponse(answer | {"paused": False, "tokens": probe.result()})
            return JSONResponse(answer | {"paused": state.paused, "sleeping": self.sleeping})
        except Exception as error:
            return error_response(503, f"generation fails: {type(error).__name__}: {error}")
        finally:
            probe.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await probe


class SleepRequest(BaseModel):
    level: int = 1


def _add_changing(router: APIRouter, bridge: WeightBridge) -> None:
    @router.post("/bridge/pause")
    async def pause(request: PauseRequest | None = None) -> Any:
        return await answered(bridge.pause(request or PauseRequest()))

    @router.post("/bridge/resume")
    async def resume(request: ResumeRequest) -> Any:
        return await answered(bridge.resume(request))


def _add_sleeping(router: APIRouter, bridge: WeightBridge, *, sleep_mode: bool) -> None:
    @router.post("/bridge/sleep")
    async def sleep(request: SleepRequest | None = None) -> Any:
        if not sleep_mode:
            needs = "a GPU, --enable-sleep-mode, and weights that are not shared"
            return error_response(501, f"the engine cannot sleep: that needs {needs}")
        return await answered(bridge.sleep((request or SleepRequest()).level))

    @router.post("/bridge/wake_up")
    async def wake_up() -> Any:
        if not sleep_mode:
            return error_response(501, "the engine cannot sleep, so there is nothing to wake")
        return await answered(bridge.wake_up())

    @router.get("/bridge/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"sleeping": bridge.sleeping}


def make_router(
    bridge: WeightBridge, generator: Generator, app: FastAPI, *, sleep_mode: bool
) -> APIRouter:
    """Return all `/bridge` routes and `/health_generate`."""
    router = APIRouter()
    _add_changing(router, bridge)
    _add_sleeping(router, bridge, sleep_mode=sleep_mode)
    _add_views(router, bridge, generator, app)

    @router.get("/health_generate")
    async def health_generate() -> Any:
        return await bridge.health_generate(generator)

    @router.get("/bridge/info")
    async def info() -> BridgeInfo:
        return bridge.info()

    @router.get(LOAD_PATH)
    async def load() -> Any:
        if bridge.capacity is None:
            return error_response(501, "vLLM reports no load of its engine here")
        return bridge.capacity.load()

    @router.get("/bridge/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"paused": bridge.state.paused}

    @router.post("/bridge/versions")
    async def versions(request: VersionsRequest) -> VersionsResponse:
        return VersionsResponse.of(bridge.spans.look_up(request.digests))

    @router.post("/bridge/logprobs")
    async def logprobs(request: LogprobsRequest) -> LogprobsResponse:
        pairs = zip(request.prompts, request.completions, strict=False)
        found = [bridge.completions.look_up(prompt, ids) for prompt, ids in pairs]
        return LogprobsResponse(found=found)

    @router.post("/bridge/routing")
    async def routing(request: RoutingRequest) -> Any:
        if bridge.routing is None:
            fix = f"start it with --{ROUTING_FLAG}"
            return error_response(400, f"this server records no experts: {fix}")
        # Encode these megabytes in a thread, not in the loop that streams tokens.
        found = await asyncio.to_thread(
            lambda store: store.answer(request).model_dump_json(), bridge.routing
        )
        return Response(found, media_type="application/json")

    return router


def _add_views(router: APIRouter, bridge: WeightBridge, generator: Generator, app: FastAPI) -> None:
    """Add the routes that show the server to people."""

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


def describe_parameters(bridge: WeightBridge) -> dict[str, Any]:
    """Return names, shapes and dtypes of the exported tensors."""
    # Without single copy there are none, and the answer has only the model's name.
    shard = None if bridge.manifest is None else bridge.manifest.ranks[0]
    parameters = {} if shard is None else shard.param_mappings
    return {
        "model": bridge.model,
        "dtype": str(bridge.engine.model_config.dtype).removeprefix("torch."),
        "shared_weights_enabled": bridge.manifest is not None,
        "manifest": bridge.info().manifest,
        "parameters": {
            name: {"shape": entry.shape, "dtype": entry.dtype} for name, entry in parameters.items()
        },
        "aliases": {} if shard is None else shard.aliases,
    }


def list_routes(app: FastAPI) -> list[dict[str, Any]]:
    routes: list[Any] = list(app.routes)
    return [
        {"path": route.path, "methods": sorted(route.methods)}
        for route in routes
        if getattr(route, "methods", None) and hasattr(route, "path")
    ]
