"""The server's main function around vLLM's parts: arguments, engine, routes, auth, serving, and a
clean shutdown."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
import uvloop
from prometheus_client import REGISTRY

from atropos_common.broadcast.transfer import is_loopback
from atropos_common.net import ports
from atropos_common.net.http import allowed_hosts, run_keys
from atropos_common.protocol.bridge import ENV_SAMPLING, ROUTING_FLAG
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
from vllm_server import compat, generate, lora, part, plugin, refusals
from vllm_server.auth import Access, GenerationHold, LoadMetrics
from vllm_server.bridge import WeightBridge
from vllm_server.capacity import EngineCapacity
from vllm_server.config import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    ENV_EAGER_BECAUSE,
    ConfigError,
    ServerConfig,
    remove_temporary_folder,
    require_own_folder,
)
from vllm_server.generate import Generator
from vllm_server.recorded import Experts, RoutingKeeper, RoutingStore, record
from vllm_server.weights import broadcast, reload
from vllm_server.weights.graph_check import UnsafeGraphs, stale_kinds

logger = logging.getLogger(__name__)

LOGPROBS_MODE = "processed_logprobs"
SHUTDOWN_TIMEOUT_S = 2
"""Seconds that requests in flight get after SIGTERM. vLLM's default of 0 kills its engine in the
middle of a step."""
SHARED_MEMORY = Path("/dev/shm")
TORCH_COUNTER = re.compile(r"/torch_(\d+)_\d+_\d+")
"""File name pattern of torch's reference counters (StorageSharing.cpp)."""
WORKER_EXTENSION = "vllm_server.plugin.AtroposWorkerExtension"
QUIET_ROUTES = "/health,/health_generate,/metrics,/bridge/info,/bridge/versions"
"""Polled routes that stay out of the access log."""


def run(config: ServerConfig, argv: list[str], notes: list[str]) -> int:
    """Serve until SIGTERM; return the exit code that `vllm_server.__main__.main` documents."""
    for note in notes:
        logger.info(note)
    compat.cli_env_setup()
    try:
        args = parse_arguments(argv)
        check_arguments(args, config)
    except ConfigError as error:
        print(f"vllm_server: {error}", file=sys.stderr)
        return 2
    try:
        return part.run(args) if args.headless else uvloop.run(serve(config, args))
    except (ConfigError, compat.EngineStartError) as error:
        print(f"vllm_server: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except UnsafeGraphs as error:
        print(
            f"vllm_server: {error}: starting again with --enforce-eager",
            file=sys.stderr,
            flush=True,
        )
        os.environ[ENV_EAGER_BECAUSE] = str(error)
    except KeyboardInterrupt:
        return 130
    finally:
        clean_up(config)
    # The process keeps its pid, so the supervisor sees one start that takes longer.
    return os.execv(
        sys.executable, [sys.executable, "-P", "-m", "vllm_server", *argv, "--enforce-eager"]
    )


class Parser(compat.FlexibleArgumentParser):  # type: ignore[misc, name-defined, valid-type]
    """vLLM's argument parser, without the hundred lines of usage before an error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (`python -m vllm_server --help=all` lists all flags)")


def parse_arguments(argv: list[str]) -> Namespace:
    """Parse vLLM's flags with our defaults.

    Raises:
        ConfigError: vLLM refuses the combination.
    """
    parser = compat.make_arg_parser(Parser(prog="python -m vllm_server"))
    parser.set_defaults(
        host=DEFAULT_HOST,
        port=DEFAULT_PORT,
        logprobs_mode=LOGPROBS_MODE,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        generation_config="vllm",
        # `prepare_environment` turns Dynamo off on a CPU, and without it vLLM cannot compile.
        enforce_eager=compat.is_cpu() and os.environ.get("TORCHDYNAMO_DISABLE") == "1",
    )
    if "--help=all" in argv:
        parser.print_help()
        raise SystemExit(0)
    args = parser.parse_args(argv)
    if getattr(args, "model_tag", None):
        args.model = args.model_tag
    compat.configure_vllm_logging(args)
    try:
        compat.validate_parsed_serve_args(args)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None
    return args


def check_arguments(args: Namespace, config: ServerConfig) -> None:
    """Refuse flags that cannot work here, and set the flags that the bridge needs.

    Raises:
        ConfigError: names the flag to change.
    """
    if config.sampling == "as_asked":
        args.logprobs_mode = (
            "raw_logprobs"  # `atropos_whole_distribution` brings them to each request's temperature
        )
    elif args.logprobs_mode != LOGPROBS_MODE:
        raise ConfigError(
            f"--logprobs-mode {args.logprobs_mode}: leave it at {LOGPROBS_MODE}. The trainer "
            f"compares these logprobs "
            "with its own at the sampling temperature; raw ones are off as soon as the "
            "temperature is not 1"
        )
    if (args.api_server_count or 1) > 1 or getattr(args, "grpc", False):
        raise ConfigError(
            "one API server process is needed: leave out --api-server-count and --grpc"
        )
    part.check_arguments(args)
    if args.disable_access_log_for_endpoints is None:
        args.disable_access_log_for_endpoints = QUIET_ROUTES
    # The last one is the outermost.
    ours = [
        "vllm_server.refusals.PlainSampling",
        "vllm_server.auth.AuthMiddleware",
        "vllm_server.refusals.Refusals",
    ]
    args.middleware = [*args.middleware, *ours]
    if config.shared_weights:
        _prepare_single_copy(args)
    elif config.weight_updates:
        _prepare_weight_updates(args, config)
    if config.sampling == "as_asked":
        _extend_worker(args, f"{ENV_SAMPLING}=as_asked")
    _prepare_routing(args)
    if compat.is_cpu() and ranks(args) == 1:
        plugin.merge_worker_into_engine(args, os.environ)


def _extend_worker(args: Namespace, why: str) -> None:
    """Add our methods to vLLM's workers; `why` names the feature that needs them."""
    if args.worker_extension_cls not in ("", WORKER_EXTENSION):
        raise ConfigError(
            f"--worker-extension-cls {args.worker_extension_cls}: {why} needs its own; drop "
            f"the flag"
        )
    args.worker_extension_cls = WORKER_EXTENSION


def _prepare_routing(args: Namespace) -> None:
    """Record expert choices: by vLLM's own flag on a GPU, by our recorder on a CPU."""
    args.records_routing = bool(getattr(args, "enable_return_routed_experts", False))
    if not args.records_routing or not compat.is_cpu():
        return
    if not args.enforce_eager:
        raise ConfigError(
            f"--{ROUTING_FLAG} on a CPU sees what routers do in plain code alone: add "
            f"--enforce-eager"
        )
    args.enable_return_routed_experts = False
    _extend_worker(args, f"--{ROUTING_FLAG}")


def _prepare_single_copy(args: Namespace) -> None:
    """Set the flags of single copy, and refuse flags that it excludes."""
    refused = {
        "--nnodes": part.machines(args) > 1,
        "--pipeline-parallel-size, --data-parallel-size": ranks(args)
        > int(args.tensor_parallel_size),
        "--quantization": bool(args.quantization),
        "--enable-sleep-mode": bool(args.enable_sleep_mode),
        "--cpu-offload-gb": bool(getattr(args, "cpu_offload_gb", 0)),
    }
    for what, given in refused.items():
        if given:
            raise ConfigError(
                f"single copy (VLLM_ENABLE_SHARED_WEIGHTS=1) does not work with {what}: the "
                f"trainer maps the plain "
                "weights of each tensor-parallel rank. Drop the flag, or use another weight "
                "bridge mode (broadcast, "
                "lora_only)"
            )
    _extend_worker(args, "single copy (VLLM_ENABLE_SHARED_WEIGHTS=1)")
    if args.load_format not in reload.SAFETENSORS_FORMATS:
        raise ConfigError(
            f"single copy loads safetensors: leave out --load-format {args.load_format}"
        )
    from vllm_server.weights.loaders import FOLDER_FORMAT, SHARED_FORMAT, register_loaders

    register_loaders()
    args.load_format = SHARED_FORMAT if compat.is_cpu() else FOLDER_FORMAT


def _prepare_weight_updates(args: Namespace, config: ServerConfig) -> None:
    """Set the flags of a server that receives new weights while it runs."""
    _extend_worker(args, "ATROPOS_WEIGHT_UPDATES=1")
    if args.weight_transfer_config is not None:
        raise ConfigError(
            "--weight-transfer-config: ATROPOS_WEIGHT_UPDATES=1 sets it; drop the flag"
        )
    from vllm_server.weights.broadcast_engine import BACKEND, register_engine

    register_engine()
    args.weight_transfer_config = {"backend": BACKEND}
    if compat.is_cpu() and args.load_format not in reload.SAFETENSORS_FORMATS:
        raise ConfigError(
            f"ATROPOS_WEIGHT_UPDATES=1 on the CPU loads safetensors: leave out --load-format "
            f"{args.load_format}"
        )
    reload.prepare_start(config, args, plain=compat.is_cpu())


async def serve(config: ServerConfig, args: Namespace, *, waits: bool = False) -> int:
    """Start the engine, build the app, serve.

    Args:
        waits: wait for the line `go` on standard input before binding the port.

    Returns:
        0 after SIGTERM, 1 when the engine died.
    """

    def leave(code: int) -> NoReturn:
        # An exception raised here can land in code that swallows it, and vLLM's start is full of
        # such code. There is nothing to save yet: end the engine, so that it makes no file after
        # the last look, and go.
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
        door: Access = app.state.atropos_door  # vLLM takes the state off its app at the end
        reach(READY)
        logger.info("ready after %.1f s on %s", time.monotonic() - began, address)
        if not args.uds:  # accept connections; from here on no other process can bind the port
            with _taking_the_port(args):
                ports.listen(sock)
        shutdown = await compat.serve_http(
            app, sock, args, limited=not app.state.atropos_door.for_everyone
        )
        # A dying engine's process may run a little longer; certain is only that this shutdown was
        # not requested.
        told = door.ending
    try:
        await shutdown
    finally:
        sock.close()
    if told:
        logger.info("stopped")
    else:
        logger.error("the engine died; its own log lines are above")
    return int(not told)


def ranks(args: Namespace) -> int:
    """Number of worker processes that hold the model or a part of it."""
    return (
        int(args.tensor_parallel_size)
        * int(args.pipeline_parallel_size)
        * int(args.data_parallel_size)
    )


def _why_not_fork(args: Namespace) -> str | None:
    """Reason against forking the engine from this process; None if forking is safe."""
    cpu = compat.is_cpu()
    one_process = ranks(args) == 1 and args.distributed_executor_backend in (
        ("uni",) if cpu else ("uni", None)
    )
    return (
        plugin.why_not_fork(os.environ, cpu=cpu) if one_process else "it starts workers of its own"
    )


@contextlib.asynccontextmanager
async def start_engine(args: Namespace, why_not: str | None, sock: Any) -> AsyncIterator[Any]:
    """Yield vLLM's engine client; the engine is forked where that is safe, else started vLLM's way.

    Args:
        why_not: result of `_why_not_fork`.
        sock: the server's socket, which a forked engine must not keep open.

    Raises:
        ConfigError, EngineStartError: see `compat.starting`.
    """
    async with contextlib.AsyncExitStack() as stack:
        with compat.starting("vLLM's engine"):
            if why_not:
                logger.info("the engine process starts afresh, and imports vLLM again: %s", why_not)
                client = compat.build_async_engine_client(args)
            else:
                plugin.prepare_fork(sock.fileno())
                client = compat.forked_engine_client(
                    args, lambda: plugin.why_not_fork(os.environ, cpu=compat.is_cpu())
                )
            engine = await stack.enter_async_context(client)
        yield engine


@contextlib.contextmanager
def _taking_the_port(args: Namespace) -> Iterator[None]:
    """Raise ConfigError if the block finds the port in use."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{args.host}:{args.port} cannot be bound ({error.strerror}); choose another --port"
        ) from None


async def build(config: ServerConfig, args: Namespace, engine: Any, address: str) -> Any:
    """Return vLLM's app with our routes and auth; the engine is warmed up and its weights are
    exported."""
    tasks = await engine.get_supported_tasks()
    if "generate" not in tasks:
        raise ConfigError(
            f"--model {args.model} does not generate text (it can {', '.join(tasks)})"
        )
    app = compat.build_app(args, tasks, engine.model_config)
    await compat.init_app_state(engine, app.state, args, tasks)

    gate = GenerationHold(held=config.hold_generation)
    bridge = WeightBridge(
        engine, config=config, gate=gate, model=str(args.model), vllm_version=compat.vllm_version()
    )
    keeper = await record_routing(bridge, args) if args.records_routing else None
    engine.generate = record(engine.generate, bridge.completions, bridge.history, keeper)
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
    bridge.stamp()

    sleep_mode = bool(args.enable_sleep_mode) and not compat.is_cpu()
    app.include_router(generate.make_router(generator, config.sampling))
    app.include_router(bridge_routes.make_router(bridge, generator, app, sleep_mode=sleep_mode))
    app.include_router(lora.make_router(adapters))
    app.include_router(reload.make_router(reload.Reloader(bridge, args)))
    if config.weight_updates:
        bridge.workers = ranks(args)
        bridge.receives = "gloo" if compat.is_cpu() else "nccl"
        app.include_router(broadcast.make_router(broadcast.Transfers(bridge)))
    app.state.atropos_sampling_policy = config.sampling
    app.state.atropos_sampling = refusals.served_defaults(engine.model_config)
    public = not is_loopback(args.host or "")
    app.state.atropos_door = Access(
        config.token,
        allowed_hosts(args.host, config.allowed_hosts),
        gate,
        instance_id=config.instance_id,
        engine_died=lambda: bool(engine.errored),
        signals=(signal.SIGTERM, signal.SIGINT),
        load=bridge.load,
        keys=run_keys(config.token),
        public=public,
        open=config.open_generation and not public,
        # A server that was started by hand at a public address, without a token, has no one to
        # share a key with.
        for_everyone=public and config.token_generated,
    )
    slots = engine.vllm_config.scheduler_config.max_num_seqs
    bridge.capacity = measure_capacity(engine, slots)
    ceiling = bridge.capacity.ceiling if bridge.capacity else lambda: None
    REGISTRY.register(LoadMetrics(bridge.load, slots, lambda: bridge.state.weight_version, ceiling))
    if gate.held:
        logger.info("generation is held for everyone without the token until POST /bridge/resume")
    return app


def measure_capacity(engine: Any, slots: int) -> EngineCapacity | None:
    """Time the engine's steps from now on; None where vLLM keeps no statistics or guesses tokens
    ahead: then a step's tokens do not tell its number of sequences."""
    capacity = EngineCapacity(slots)
    if engine.vllm_config.speculative_config is not None or not compat.hear_steps(
        engine, capacity.step
    ):
        return None
    return capacity


async def record_routing(bridge: WeightBridge, args: Namespace) -> RoutingKeeper:
    """Record the experts that every completion uses.

    Raises:
        ConfigError: a CPU engine cannot record them for this model.
    """
    bridge.routing, engine = RoutingStore(), bridge.engine
    if not compat.is_cpu():
        return RoutingKeeper(bridge.routing, None)
    if reason := next(
        (each for each in await engine.collective_rpc("atropos_record_routing") if each), None
    ):
        raise ConfigError(f"--{ROUTING_FLAG} with --model {args.model}: {reason}")

    async def ask(token_ids: list[int]) -> Experts | None:
        answers = await engine.collective_rpc("atropos_routing", args=(token_ids,))
        data, shape, kind = next((each for each in answers if each), (None, None, None))
        return None if data is None else np.frombuffer(data, kind).reshape(shape)

    return RoutingKeeper(bridge.routing, ask)


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
    raise ConfigError(
        f"{what}, so it cannot run in single copy. Use another weight bridge mode (lora_only, none)"
    )


async def why_not_in_place(engine: Any, generator: Generator) -> str | None:
    """Reason against writing new weights over those in memory; None if every kind of layer follows
    a write."""
    if quantization := engine.model_config.quantization:
        return f"its weights are quantized ({quantization})"
    if reason := next(
        (each for each in await engine.collective_rpc("atropos_why_not_in_place") if each), None
    ):
        return str(reason)
    stale = await stale_kinds(engine, generator)
    return f"it computes from a copy of {', '.join(stale)}" if stale else None


async def export_weights(bridge: WeightBridge, address: str) -> None:
    """Collect the parameters of all tensor-parallel ranks and write the manifest.

    Raises:
        ConfigError: the engine stores some tensors in another form than the one that is trained.
    """
    from vllm_server.weights.loaders import ANOTHER_MODE

    described = await bridge.engine.collective_rpc("atropos_export_weights")
    if reason := next((each["refused"] for each in described if "refused" in each), None):
        raise ConfigError(f"--model {bridge.model}: {reason}")
    shards = {rank: Shard.model_validate(each) for rank, each in enumerate(described)}
    if names := left_out(shards):
        raise ConfigError(
            f"--model {bridge.model}: {len(names)} tensors of the checkpoint do not lie "
            f"whole in vLLM's parameters, "
            f"such as {names[0]}. {ANOTHER_MODE}"
        )
    model = bridge.engine.model_config
    local = Path(str(model.model)) / "config.json"
    bridge.manifest = Manifest(
        model=bridge.model,
        architecture=str((model.hf_config.architectures or ["unknown"])[0]),
        config=json.loads(
            local.read_text() if local.is_file() else model.hf_config.to_json_string()
        ),
        instance_id=bridge.config.instance_id,
        server_pid=os.getpid(),
        server_create_time=psutil.Process().create_time(),
        base_url=address.replace("//0.0.0.0", "//127.0.0.1"),
        vllm_version=bridge.vllm_version,
        tensor_parallel_size=len(shards),
        ranks=shards,
    )
    path = bridge.config.manifest_path
    write_manifest(bridge.manifest, path)
    logger.info(
        "Exported %d params of %d ranks to %s", len(shards[0].param_mappings), len(shards), path
    )


def prepare_bridge_dir(config: ServerConfig) -> None:
    """Create the bridge directory, remove files of an earlier server, and write the token if this
    server made it.

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
        raise ConfigError(
            f"the bridge directory {config.bridge_dir} cannot be used ({error.strerror})"
        ) from None


def clean_up(config: ServerConfig) -> None:
    """Remove the weight files, the manifest that names them, and the temporary folder."""
    if config.shared_weights:
        for path in [
            config.shm_path,
            *config.shm_path.parent.glob(f"{config.shm_path.name}.[0-9]*"),
        ]:
            path.unlink(missing_ok=True)
        _remove_counters(config.manifest_path)
        config.manifest_path.unlink(missing_ok=True)
    remove_temporary_folder(config, os.environ)


def _remove_counters(manifest: Path) -> None:
    """Remove files of torch and the CUDA driver in /dev/shm for the memory in this manifest.

    torch counts the openers of shared memory in such a file. A killed trainer never decrements its
    count, so the file outlives the engine.
    """
    with contextlib.suppress(ManifestError):
        ranks = read_manifest(manifest).ranks.values()
        handles = [
            entry.ipc_handle
            for rank in ranks
            for entry in rank.param_mappings.values()
            if entry.ipc_handle
        ]
        names = {
            base64.b64decode(handle.ref_counter_handle).decode(errors="replace")
            for handle in handles
        }
        for name in filter(None, map(TORCH_COUNTER.fullmatch, names)):
            pid = int(name[1])
            if not psutil.pid_exists(pid):
                for path in [
                    SHARED_MEMORY / name[0][1:],
                    *SHARED_MEMORY.glob(f"cuda.shm.{os.getuid()}.{pid:x}.*"),
                ]:
                    path.unlink(missing_ok=True)
