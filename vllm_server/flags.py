"""vLLM's flags: our defaults, what cannot work here, and what the bridge needs."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from typing import NoReturn

from atropos_common.protocol.bridge import ENV_SAMPLING, ROUTING_FLAG
from vllm_server import compat, plugin
from vllm_server.config import DEFAULT_HOST, DEFAULT_PORT, ConfigError, ServerConfig
from vllm_server.weights import reload
from vllm_server.weights.loaders import FOLDER_FORMAT, SHARED_FORMAT, register_loaders

LOGPROBS_MODE = "processed_logprobs"
# Requests in flight get this long after SIGTERM. vLLM's default of 0 kills its engine in the middle
# of a step.
SHUTDOWN_TIMEOUT_S = 2
WORKER_EXTENSION = "vllm_server.plugin.AtroposWorkerExtension"
# Polled routes that stay out of the access log.
QUIET_ROUTES = "/health,/health_generate,/metrics,/engine/load,/bridge/info,/bridge/versions"


def machines(args: Namespace) -> int:
    return int(getattr(args, "nnodes", 1))


def ranks(args: Namespace) -> int:
    """Return the number of worker processes."""
    sizes = args.tensor_parallel_size, args.pipeline_parallel_size, args.data_parallel_size
    return math.prod(map(int, sizes))


class Parser(compat.FlexibleArgumentParser):  # type: ignore[misc, name-defined, valid-type]
    """vLLM's parser, without the hundred lines of usage before an error."""

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
    compat.configure_logging_from_args(args)
    try:
        compat.validate_parsed_serve_args(args)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None
    return args


def check_arguments(args: Namespace, config: ServerConfig) -> None:
    """Refuse flags that cannot work here, and set those that the bridge needs.

    Raises:
        ConfigError: names the flag to change.
    """
    if config.sampling == "as_asked":
        # `atropos_whole_distribution` brings them to each request's temperature.
        args.logprobs_mode = "raw_logprobs"
    elif args.logprobs_mode != LOGPROBS_MODE:
        raise ConfigError(
            f"--logprobs-mode {args.logprobs_mode}: leave it at {LOGPROBS_MODE}. The trainer "
            "compares these logprobs with its own at the sampling temperature; raw ones are off as "
            "soon as the temperature is not 1"
        )
    if (args.api_server_count or 1) > 1 or getattr(args, "grpc", False):
        fix = "leave out --api-server-count and --grpc"
        raise ConfigError(f"one API server process is needed: {fix}")
    check_machines(args)
    if args.disable_access_log_for_endpoints is None:
        args.disable_access_log_for_endpoints = QUIET_ROUTES
    # The last one is the outermost.
    ours = [
        "vllm_server.rollouts.NamedRollouts",
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
    given = args.worker_extension_cls
    if given not in ("", WORKER_EXTENSION):
        raise ConfigError(f"--worker-extension-cls {given}: {why} needs its own; drop the flag")
    args.worker_extension_cls = WORKER_EXTENSION


def _prepare_routing(args: Namespace) -> None:
    # vLLM's own flag works on a GPU; on a CPU our recorder sees the choices.
    args.records_routing = bool(getattr(args, "enable_return_routed_experts", False))
    if not args.records_routing or not compat.is_cpu():
        return
    if not args.enforce_eager:
        limit = f"--{ROUTING_FLAG} on a CPU sees what routers do in plain code alone"
        raise ConfigError(f"{limit}: add --enforce-eager")
    args.enable_return_routed_experts = False
    _extend_worker(args, f"--{ROUTING_FLAG}")


def _prepare_single_copy(args: Namespace) -> None:
    split = ranks(args) > int(args.tensor_parallel_size)
    refused = {
        "--nnodes": machines(args) > 1,
        "--pipeline-parallel-size, --data-parallel-size": split,
        "--quantization": bool(args.quantization),
        "--enable-sleep-mode": bool(args.enable_sleep_mode),
        "--cpu-offload-gb": bool(getattr(args, "cpu_offload_gb", 0)),
    }
    for what, given in refused.items():
        if given:
            raise ConfigError(
                f"single copy (VLLM_ENABLE_SHARED_WEIGHTS=1) does not work with {what}: the "
                "trainer maps the plain weights of each tensor-parallel rank. Drop the flag, or "
                "use another weight bridge mode (broadcast, lora_only)"
            )
    _extend_worker(args, "single copy (VLLM_ENABLE_SHARED_WEIGHTS=1)")
    if args.load_format not in reload.SAFETENSORS_FORMATS:
        fix = f"leave out --load-format {args.load_format}"
        raise ConfigError(f"single copy loads safetensors: {fix}")
    register_loaders()
    args.load_format = SHARED_FORMAT if compat.is_cpu() else FOLDER_FORMAT


def _prepare_weight_updates(args: Namespace, config: ServerConfig) -> None:
    _extend_worker(args, "ATROPOS_WEIGHT_UPDATES=1")
    if args.weight_transfer_config is not None:
        fault = "--weight-transfer-config: ATROPOS_WEIGHT_UPDATES=1 sets it"
        raise ConfigError(f"{fault}; drop the flag")
    from vllm_server.weights.broadcast_engine import BACKEND, register_engine

    register_engine()
    args.weight_transfer_config = {"backend": BACKEND}
    if compat.is_cpu() and args.load_format not in reload.SAFETENSORS_FORMATS:
        fix = f"leave out --load-format {args.load_format}"
        raise ConfigError(f"ATROPOS_WEIGHT_UPDATES=1 on the CPU loads safetensors: {fix}")
    reload.prepare_start(config, args, plain=compat.is_cpu())


def check_machines(args: Namespace) -> None:
    """Refuse flags of an engine over several machines that do not fit together."""
    count, rank = machines(args), int(getattr(args, "node_rank", 0))
    workers = int(args.tensor_parallel_size) * int(args.pipeline_parallel_size)
    if count == 1 and not (args.headless or rank):
        return
    if count == 1:
        use = "are for a part of an engine over several machines"
        raise ConfigError(f"--headless and --node-rank {use}: add --nnodes N")
    if not 0 <= rank < count:
        known = f"it is a number from 0 to {count - 1}"
        raise ConfigError(f"--node-rank {rank}: with --nnodes {count} {known}")
    if args.headless != (rank > 0):
        which = "those with a --node-rank above 0, and only they"
        raise ConfigError(f"--headless is for all machines but the first: {which}")
    if int(args.data_parallel_size) > 1:
        fix = "start a server for each replica"
        raise ConfigError(f"--data-parallel-size does not go with --nnodes here: {fix}")
    if workers % count:
        product = "--tensor-parallel-size times --pipeline-parallel-size"
        raise ConfigError(
            f"{workers} workers ({product}) cannot be divided evenly among --nnodes {count} "
            "machines"
        )
