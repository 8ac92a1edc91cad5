"""The server's main function around vLLM's parts: engine, routes, serving, and a clean shutdown."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
import uvloop
from prometheus_client import REGISTRY

from atropos_common.net import ports
from atropos_common.net.http import allowed_hosts, run_keys
from atropos_common.net.ports import is_loopback
from atropos_common.protocol.bridge import ROUTING_FLAG
from atropos_common.protocol.manifest import (
    Manifest,
    ManifestError,
    Shard,
    left_out,
    read_manifest,
    write_manifest,
)
from atropos_common.protocol.stages import READY, reach
from atropos_common.system.files import write_private
from vllm_server import bridge as bridge_routes
from vllm_server import compat, flags, generate, lora, plugin, refusals
from vllm_server.auth import Access, GenerationHold, LoadMetrics
from vllm_server.bridge import WeightBridge
from vllm_server.capacity import EngineCapacity
from vllm_server.config import (
    ENV_EAGER_BECAUSE,
    PLUGIN_NAME,
    ConfigError,
    ServerConfig,
    remove_temporary_folder,
    require_own_folder,
)
from vllm_server.generate import Generator
from vllm_server.held_outputs import TOKENS_MADE
from vllm_server.recorded import Experts, RoutingRecorder, RoutingStore, record, until_accepted
from vllm_server.rollouts import RolloutRecorder
from vllm_server.rollouts import make_router as rollouts_routes
from vllm_server.weights import broadcast, reload
from vllm_server.weights.graph_check import UnsafeGraphs, stale_kinds

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
# File names of torch's reference counters (StorageSharing.cpp).
TORCH_COUNTER = re.compile(r"/torch_(\d+)_\d+_\d+")


def run(config: ServerConfig, argv: list[str], notes: list[str]) -> int:
    """Serve until SIGTERM; return the exit code that `__main__.main` documents."""
    for note in notes:
        logger.info(note)
    compat.cli_env_setup()
    try:
        args = flags.parse_arguments(argv)
        flags.check_arguments(args, config)
    except ConfigError as error:
        print(f"vllm_server: {error}", file=sys.stderr)
        return 2
    try:
        return run_headless(args) if args.headless else uvloop.run(serve(config, args))
    except (ConfigError, compat.EngineStartError) as error:
        print(f"vllm_server: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except UnsafeGraphs as error:
        again = "starting again with --enforce-eager"
        print(f"vllm_server: {error}: {again}", file=sys.stderr, flush=True)
        os.environ[ENV_EAGER_BECAUSE] = str(error)
    except KeyboardInterrupt:
        return 130
    finally:
        clean_up(config)
    # The process keeps its pid, so the supervisor sees one start that takes longer.
    command = [sys.executable, "-P", "-m", "vllm_server", *argv, "--enforce-eager"]
    return os.execv(sys.executable, command)


class _Stopped(BaseException):
    pass


def run_headless(args: Namespace) -> int:
    """Run an engine's workers on a machine other than its API server's, until SIGTERM.

    Returns:
        0 after SIGTERM, 1 when a worker died.

    Raises:
        ConfigError, EngineStartError: see `compat.starting`.
    """

    # vLLM does the distributed work: a step, new weights and an adapter arrive over its own
    # channel. The end of the other machines is not noticed here; their supervisor ends all of them.
    def leave(signum: int, _: object) -> NoReturn:
        # vLLM's start may swallow an exception, and there is nothing to save yet: exit at once.
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(128 + signum)

    def stop(*_: object) -> NoReturn:
        raise _Stopped

    began = time.monotonic()
    _on_end(leave)
    with compat.starting("this part of vLLM's engine"):
        executor = compat.executor_of_part(args)
    try:
        _on_end(stop)
        here = f"part {args.node_rank + 1} of {flags.machines(args)}"
        reach(READY)
        took_s = time.monotonic() - began
        logger.info("ready after %.1f s: %s, with its first at %s", took_s, here, args.master_addr)
        executor.start_worker_monitor(inline=True)
    except _Stopped:
        _on_end(leave)
        executor.shutdown()
        logger.info("stopped")
        return 0
    logger.error("a worker died; its own log lines are above")
    return 1


def _on_end(do: Callable[[int, object], NoReturn]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, do)


async def serve(config: ServerConfig, args: Namespace) -> int:
    """Start the engine, build the app, serve.

    Returns:
        0 after SIGTERM, 1 when the engine died.
    """

    def leave(code: int) -> NoReturn:
        # vLLM's start may swallow an exception, and there is nothing to save yet. End the engine
        # first, so that it makes no file after the clean-up.
        for child in multiprocessing.active_children():
            child.kill()
            child.join(1)
        clean_up(config)
        os._exit(code)

    # vLLM replaces these once it serves.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _: leave(128 + signum))
    why_not = _why_not_fork(args)
    began = time.monotonic()
    prepare_bridge_dir(config)
    with _taking_the_port(args):
        reuse = ports.is_held(args.port, os.environ)
        address, sock = compat.setup_server(args, reuse_port=reuse)
    async with start_engine(args, why_not, sock) as engine:
        app = await build(config, args, engine, address)
        access: Access = app.state.atropos_access  # vLLM takes the state off its app at the end
        reach(READY)
        logger.info("ready after %.1f s on %s", time.monotonic() - began, address)
        if not args.uds:  # accept connections; from here on no other process can bind the port
            with _taking_the_port(args):
                ports.listen(sock)
        shutdown = await compat.serve_http(app, sock, args, limited=not access.for_everyone)
        # A dying engine's process may run a little longer, so ask only whether a signal came.
        requested = access.ending
    try:
        await shutdown
    finally:
        sock.close()
    if requested:
        logger.info("stopped")
    else:
        logger.error("the engine died; its own log lines are above")
    return int(not requested)


def _why_not_fork(args: Namespace) -> str | None:
    cpu, backend = compat.is_cpu(), args.distributed_executor_backend
    # By default the engine of one GPU is one process; on a CPU it has a worker beside it.
    one_process = backend == "uni" or (backend is None and not cpu)
    if flags.ranks(args) > 1 or not one_process:
        return "it starts workers of its own"
    return plugin.why_not_fork(os.environ, cpu=cpu)


@contextlib.asynccontextmanager
async def start_engine(args: Namespace, why_not: str | None, sock: Any) -> AsyncIterator[Any]:
    """Yield vLLM's engine client.

    Args:
        why_not: result of `_why_not_fork`.
        sock: the server's socket, which a forked engine must not keep open.

    Raises:
        ConfigError, EngineStartError: see `compat.starting`.
    """
    async with contextlib.AsyncExitStack() as stack:
        with compat.starting("vLLM's engine"):
            compat.inspect_models_here()
            if why_not:
                logger.info("the engine process is not forked, and imports vLLM again: %s", why_not)
                client = compat.build_async_engine_client(args)
            else:
                plugin.prepare_fork(sock.fileno())
                # vLLM's configuration may start threads: check once more before the fork.
                client = compat.forked_engine_client(args, lambda: _why_not_fork(args))
            engine = await stack.enter_async_context(client)
        yield engine


@contextlib.contextmanager
def _taking_the_port(args: Namespace) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fault = f"{args.host}:{args.port} cannot be bound ({error.strerror})"
        raise ConfigError(f"{fault}; choose another --port") from None


async def build(config: ServerConfig, args: Namespace, engine: Any, address: str) -> Any:
    """Return vLLM's app with our routes and auth, ready to serve."""
    tasks = await engine.get_supported_tasks()
    if "generate" not in tasks:
        able = ", ".join(tasks)
        raise ConfigError(f"--model {args.model} does not generate text (it can {able})")
    await require_plugin(engine)
    app = compat.build_app(args, tasks, engine.model_config)
    await compat.init_app_state(engine, app.state, args, tasks)

    gate = GenerationHold(held=config.hold_generation)
    bridge = WeightBridge(
        engine, config=config, gate=gate, model=str(args.model), vllm_version=compat.vllm_version()
    )
    recorder = await record_routing(bridge, args) if args.records_routing else None
    engine.generate = record(
        until_accepted(engine.generate, bridge.accepts),
        bridge.completions,
        bridge.history,
        recorder,
        lambda: bridge.cache_salt,
    )
    names = args.served_model_name or [args.model]
    adapters = lora.ServedAdapters(bridge, app.state.openai_serving_models, config.run_dir)
    generator = Generator(
        engine,
        history=bridge.history,
        spans=bridge.spans,
        completions=bridge.completions,
        model_names=names,
        adapters=adapters,
    )

    # Outside of `record`, which then sees requests with logprobs and keeps only routing.
    rollouts = RolloutRecorder(
        generator.log,
        functools.partial(compat.tokenizer_of, engine),
        as_asked=config.sampling == "as_asked",
    )
    engine.generate = rollouts.wrap(engine.generate)

    await prepare_weights(bridge, generator, args, address)
    bridge.stamp()

    add_routes(app, bridge, generator, adapters, rollouts, args)
    app.state.atropos_sampling_policy = config.sampling
    app.state.atropos_sampling = refusals.served_defaults(engine.model_config)
    app.state.atropos_access = access_of(bridge, args)
    show_load(bridge)
    if gate.held:
        logger.info("generation is held for everyone without the token until POST /bridge/resume")
    return app


async def prepare_weights(
    bridge: WeightBridge, generator: Generator, args: Namespace, address: str
) -> None:
    """Export the weights, generate once, and test how the model takes new weights.

    Raises:
        UnsafeGraphs, ConfigError: see `require_safe_graphs`.
    """
    config, engine = bridge.config, bridge.engine
    if config.shared_weights:
        await export_weights(bridge, address)
    if config.sampling == "as_asked":
        await engine.collective_rpc("atropos_whole_distribution")
    # The first request with logprobs compiles or loads kernels: do it before the first rollout.
    await generator.probe(tokens=2, logprobs=1)
    if config.shared_weights:
        await require_safe_graphs(engine, generator, eager=bool(args.enforce_eager))
    if config.weight_updates:
        bridge.not_in_place = await why_not_in_place(engine, generator)


async def require_plugin(engine: Any) -> None:
    """Raise `ConfigError` if the engine process runs without our plugin: it could never resume."""
    try:
        await compat.tokens_in_flight(engine)
    except Exception as error:
        if TOKENS_MADE not in str(error):
            raise
        raise ConfigError(
            f"the engine process has not loaded the vLLM plugin {PLUGIN_NAME} ({error}). Install "
            "atropos-tui in the engine's Python environment; a folder in PYTHONPATH is not enough"
        ) from None


def add_routes(
    app: Any,
    bridge: WeightBridge,
    generator: Generator,
    adapters: lora.ServedAdapters,
    rollouts: RolloutRecorder,
    args: Namespace,
) -> None:
    """Add our routes to vLLM's."""
    config = bridge.config
    sleep_mode = bool(args.enable_sleep_mode) and not compat.is_cpu()
    app.include_router(generate.make_router(generator, config.sampling))
    app.include_router(bridge_routes.make_router(bridge, generator, app, sleep_mode=sleep_mode))
    app.include_router(lora.make_router(adapters))
    app.include_router(rollouts_routes(rollouts))
    app.include_router(reload.make_router(reload.Reloader(bridge, args)))
    if config.weight_updates:
        bridge.workers = flags.ranks(args)
        bridge.receives = "gloo" if compat.is_cpu() else "nccl"
        app.include_router(broadcast.make_router(broadcast.Transfers(bridge)))


def access_of(bridge: WeightBridge, args: Namespace) -> Access:
    """Return the rules of access to a server at its address."""
    config = bridge.config
    public = not is_loopback(args.host or "")
    return Access(
        config.token,
        allowed_hosts(args.host, config.allowed_hosts),
        bridge.gate,
        instance_id=config.instance_id,
        engine_died=lambda: bool(bridge.engine.errored),
        signals=(signal.SIGTERM, signal.SIGINT),
        load=bridge.load,
        keys=run_keys(config.token),
        public=public,
        open=config.open_generation and not public,
        # A server that was started by hand at a public address, without a token, has no one to
        # share a key with.
        for_everyone=public and config.token_generated,
    )


def show_load(bridge: WeightBridge) -> None:
    """Register the metrics of the engine's load, and time its steps."""
    slots = compat.sequences_at_a_time(bridge.engine)
    bridge.capacity = measure_capacity(bridge.engine, slots)
    ceiling = bridge.capacity.ceiling if bridge.capacity else lambda: None
    counts = compat.counts_recomputed(bridge.engine)

    def version() -> int | None:
        return bridge.state.weight_version

    def recomputed() -> int | None:
        return bridge.capacity.recomputed if bridge.capacity and counts else None

    REGISTRY.register(LoadMetrics(bridge.load, slots, version, ceiling, recomputed))


def measure_capacity(engine: Any, slots: int) -> EngineCapacity | None:
    """Time the engine's steps from now on; None if vLLM reports too little."""
    # With guessed tokens a step's tokens do not tell its number of sequences.
    if engine.vllm_config.speculative_config is not None:
        return None
    capacity = EngineCapacity(slots)
    return capacity if compat.hear_steps(engine, capacity.step) else None


async def record_routing(bridge: WeightBridge, args: Namespace) -> RoutingRecorder:
    """Record the experts that every completion uses.

    Raises:
        ConfigError: a CPU engine cannot record them for this model.
    """
    bridge.routing, engine = RoutingStore(), bridge.engine
    if not compat.is_cpu():
        return RoutingRecorder(bridge.routing, None)
    reasons = filter(None, await engine.collective_rpc("atropos_record_routing"))
    if reason := next(reasons, None):
        raise ConfigError(f"--{ROUTING_FLAG} with --model {args.model}: {reason}")

    async def ask(token_ids: list[int]) -> Experts | None:
        answers = await engine.collective_rpc("atropos_routing", args=(token_ids,))
        data, shape, kind = next((each for each in answers if each), (None, None, None))
        return None if data is None else np.frombuffer(data, kind).reshape(shape)

    return RoutingRecorder(bridge.routing, ask)


async def require_safe_graphs(engine: Any, generator: Generator, *, eager: bool) -> None:
    """Check that every kind of layer follows an in-place write to its weights.

    Raises:
        UnsafeGraphs: some do not, with CUDA graphs or compiled code.
        ConfigError: some do not, even without.
    """
    stale = await stale_kinds(engine, generator)
    if not stale:
        return
    what = f"{', '.join(stale)}: this model computes from a copy of these weights"
    if not eager:
        raise UnsafeGraphs(f"{what} with CUDA graphs or compiled code")
    fix = "Use another weight bridge mode (lora_only, none)"
    raise ConfigError(f"{what}, so it cannot run in single copy. {fix}")


async def why_not_in_place(engine: Any, generator: Generator) -> str | None:
    """Return the reason against writing new weights over those in memory."""
    if quantization := engine.model_config.quantization:
        return f"its weights are quantized ({quantization})"
    reasons = filter(None, await engine.collective_rpc("atropos_why_not_in_place"))
    if reason := next(reasons, None):
        return str(reason)
    stale = await stale_kinds(engine, generator)
    return f"it computes from a copy of {', '.join(stale)}" if stale else None


async def export_weights(bridge: WeightBridge, address: str) -> None:
    """Collect the parameters of all tensor-parallel ranks and write the manifest.

    Raises:
        ConfigError: some tensors are not stored as they are trained.
    """
    from vllm_server.weights.loaders import ANOTHER_MODE

    described = await bridge.engine.collective_rpc("atropos_export_weights")
    if reason := next((each["refused"] for each in described if "refused" in each), None):
        raise ConfigError(f"--model {bridge.model}: {reason}")
    shards = {rank: Shard.model_validate(each) for rank, each in enumerate(described)}
    if names := left_out(shards):
        raise ConfigError(
            f"--model {bridge.model}: {len(names)} tensors of the checkpoint do not lie whole in "
            f"vLLM's parameters, such as {names[0]}. {ANOTHER_MODE}"
        )
    model = bridge.engine.model_config
    local = Path(str(model.model)) / "config.json"
    written = local.read_text() if local.is_file() else model.hf_config.to_json_string()
    bridge.manifest = Manifest(
        model=bridge.model,
        architecture=str((model.hf_config.architectures or ["unknown"])[0]),
        config=json.loads(written),
        instance_id=bridge.config.instance_id,
        server_pid=os.getpid(),
        server_create_time=psutil.Process().create_time(),
        base_url=address.replace("//0.0.0.0", "//127.0.0.1"),
        vllm_version=bridge.vllm_version,
        tensor_parallel_size=len(shards),
        ranks=shards,
    )
    path, exported = bridge.config.manifest_path, len(shards[0].param_mappings)
    write_manifest(bridge.manifest, path)
    logger.info("Exported %d params of %d ranks to %s", exported, len(shards), path)


def prepare_bridge_dir(config: ServerConfig) -> None:
    """Create the bridge directory, and remove files of an earlier server.

    Raises:
        ConfigError: the directory is not writable, or other users may write there.
    """
    try:
        config.bridge_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        require_own_folder(config.bridge_dir)
        _remove_counters(config.manifest_path)
        config.manifest_path.unlink(missing_ok=True)
        config.state_path.unlink(missing_ok=True)
        if config.token_generated:
            write_private(config.token_path, config.token)
            logger.info("control routes ask for a token; it is in %s", config.token_path)
    except OSError as error:
        fault = f"the bridge directory {config.bridge_dir} cannot be used"
        raise ConfigError(f"{fault} ({error.strerror})") from None


def clean_up(config: ServerConfig) -> None:
    """Remove the weight files, the manifest that names them, and the temporary folder."""
    if config.shared_weights:
        ranks = config.shm_path.parent.glob(f"{config.shm_path.name}.[0-9]*")
        for path in [config.shm_path, *ranks]:
            path.unlink(missing_ok=True)
        _remove_counters(config.manifest_path)
        config.manifest_path.unlink(missing_ok=True)
    remove_temporary_folder(config, os.environ)


def _remove_counters(manifest: Path) -> None:
    # Files of torch and the CUDA driver for the memory in this manifest.
    # torch counts the openers of shared memory in such a file. A killed trainer never decrements
    # its count, so the file outlives the engine.
    with contextlib.suppress(ManifestError):
        shards = read_manifest(manifest).ranks.values()
        entries = [entry for shard in shards for entry in shard.param_mappings.values()]
        counters = {entry.ipc_handle.ref_counter_handle for entry in entries if entry.ipc_handle}
        names = {base64.b64decode(each).decode(errors="replace") for each in counters}
        for name in filter(None, map(TORCH_COUNTER.fullmatch, names)):
            pid = int(name[1])
            if not psutil.pid_exists(pid):
                drivers = SHARED_MEMORY.glob(f"cuda.shm.{os.getuid()}.{pid:x}.*")
                for path in [SHARED_MEMORY / name[0][1:], *drivers]:
                    path.unlink(missing_ok=True)
