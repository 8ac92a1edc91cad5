"""The only module that knows the differences between the supported vLLM releases.

It finds the parts that vLLM's own API server calls, and imports vLLM on first use.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from atropos_common.models import engine_release
from vllm_server.capacity import Step
from vllm_server.config import ConfigError
from vllm_server.held_outputs import TOKENS_MADE

logger = logging.getLogger(__name__)

PLACES: dict[str, tuple[str, ...]] = {
    # name: modules to look in, newest release first
    "setup_server": ("vllm.entrypoints.launchers.launcher",),
    "build_async_engine_client": ("vllm.entrypoints.launchers.api_server.entry",),
    "build_async_engine_client_from_engine_args": ("vllm.entrypoints.launchers.api_server.entry",),
    "build_app": ("vllm.entrypoints.launchers.app",),
    "init_app_state": ("vllm.entrypoints.launchers.api_server.app_state",),
    "serve_http": ("vllm.entrypoints.launchers.launcher",),
    "make_arg_parser": (
        "vllm.entrypoints.common.cli_args",
        "vllm.entrypoints.launchers.cli_args",
    ),
    "validate_parsed_serve_args": (
        "vllm.entrypoints.common.cli_args",
        "vllm.entrypoints.launchers.cli_args",
    ),
    "get_uvicorn_log_config": ("vllm.entrypoints.launchers.utils.server_utils",),
    "cli_env_setup": (
        "vllm.entrypoints.common.startup",
        "vllm.entrypoints.serve.utils.api_utils",
    ),
    "with_cancellation": ("vllm.entrypoints.serve.utils.api_utils",),
    "FlexibleArgumentParser": ("vllm.utils.argparse_utils",),
    "EngineDeadError": ("vllm.v1.engine.exceptions",),
    "RetryableRequestError": ("vllm.exceptions",),
    "VLLMClientError": ("vllm.exceptions",),
    "configure_logging_from_args": ("vllm.logger",),
}

# Seconds that open connections get at shutdown, after requests in flight have ended.
CONNECTIONS_CLOSE_S = 1


class _StepLogger:
    def __init__(self, hear: Callable[[Step], None]) -> None:
        self._hear = hear
        # vLLM may already wait for the first step when the server begins to note times.
        self.ended_at: float | None = None
        """Engine time, in seconds, at the end of the newest step read."""

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **_: Any,
    ) -> None:
        if iteration_stats is None and scheduler_stats is None:
            return
        # Without new outputs there are no iteration stats: the engine may hold tokens back.
        tokens = iteration_stats.num_generation_tokens if iteration_stats else 0
        stats = scheduler_stats
        if stats is None:
            self._hear(Step(engine_idx, self.ended_at, tokens, None, None, None))
            return
        running, waiting = stats.num_running_reqs, stats.num_waiting_reqs
        cache = getattr(stats, "prefix_cache_stats", None)
        # Preempted sequences that run again, less what the cache still has of them.
        again = getattr(cache, "preempted_queries", 0) - getattr(cache, "preempted_hits", 0)
        use = stats.kv_cache_usage
        self._hear(Step(engine_idx, self.ended_at, tokens, running, waiting, use, again))

    def _ignore(self, *_: Any, **__: Any) -> None:
        pass

    log = log_engine_initialized = record_sleep_state = record_admission_rejection = _ignore


def sequences_at_a_time(engine: Any) -> int:
    """Most sequences that the engine computes at a time at its full speed."""
    most = int(engine.vllm_config.scheduler_config.max_num_seqs)
    compilation = engine.vllm_config.compilation_config
    # Without CUDA graphs of that size a step of a small model takes several times as long.
    graphs = getattr(compilation, "max_cudagraph_capture_size", None)
    mode = getattr(compilation, "cudagraph_mode", None)
    graphs = graphs if getattr(mode, "name", "NONE") != "NONE" else None
    return min(most, int(graphs)) if graphs else most


def counts_recomputed(engine: Any) -> bool:
    """Return True if the statistics have the tokens that are computed again."""
    return bool(engine.vllm_config.cache_config.enable_prefix_caching)


def hear_steps(engine: Any, hear: Callable[[Step], None]) -> bool:
    """Call `hear` with every step of the engine; return False without statistics."""
    loggers = getattr(getattr(engine, "logger_manager", None), "stat_loggers", None)
    if not isinstance(loggers, list):
        return False
    loggers.append(logger := _StepLogger(hear))
    core = engine.engine_core
    read = core.get_output_async

    # A logger does not get the engine's time. The server reads several steps at once if it is busy,
    # so the time of reading is not the step's.
    async def read_and_note_time() -> Any:
        outputs = await read()
        logger.ended_at = outputs.timestamp
        return outputs

    core.get_output_async = read_and_note_time
    return True


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return _find(name)


def _find(name: str) -> Any:
    for module_name in PLACES[name]:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if f"{module_name}.".startswith(f"{error.name}."):
                continue
            raise  # a package that vLLM needs
        if hasattr(module, name):
            return getattr(module, name)
    missing = f"vLLM {vllm_version()} has no {name} in {' or '.join(PLACES[name])}"
    raise ImportError(f"{missing} ({engine_release.SUPPORTED_TEXT})")


def require_parts() -> None:
    """Import every part.

    Raises:
        ImportError: a part is missing, or vLLM cannot be imported.
    """
    for name in PLACES:
        _find(name)


def vllm_version() -> str:
    from vllm.version import __version__

    return str(__version__)


def request_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that vLLM raises for a request it cannot serve."""
    return (ValueError, TypeError, OverflowError, _find("VLLMClientError"))


class EngineStartError(RuntimeError):
    """vLLM's engine did not start; its own log lines give the reason."""


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Turn a failure of the block into one line; `what` names what starts.

    Raises:
        ConfigError: vLLM refuses the model or a flag.
        EngineStartError: any other failure.
    """
    try:
        yield
    except Exception as error:
        logger.debug("start", exc_info=True)
        reason = " ".join(str(error).split())[:400]
        if isinstance(error, ValueError | OSError):
            raise ConfigError(f"vLLM refuses this configuration: {reason}") from None
        fault = f"{what} did not start: {reason} (its log lines are above)"
        raise EngineStartError(fault) from error


async def serve_http(app: Any, sock: Any, args: Namespace, *, limited: bool) -> Awaitable[None]:
    """Serve `app` on `sock` as vLLM's own server would, until SIGTERM.

    Args:
        limited: apply `ConnectionLimits`, which also tell the app who called.

    Returns:
        An awaitable of the engine's end.
    """
    from vllm import envs

    from atropos_common.net.connections import ConnectionLimits

    # Requests whose engine is gone never end: without a limit the server would wait forever.
    options: dict[str, Any] = {"timeout_graceful_shutdown": CONNECTIONS_CLOSE_S}
    if limited:
        options["http"] = ConnectionLimits().protocol()
    log_config = _find("get_uvicorn_log_config")(args)
    if log_config is not None:
        options["log_config"] = log_config
    serve: Callable[..., Any] = _find("serve_http")
    return await serve(
        app,
        sock=sock,
        enable_ssl_refresh=args.enable_ssl_refresh,
        host=args.host,
        port=args.port,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
        h11_max_header_count=args.h11_max_header_count,
        **options,
    )


def inspect_models_here() -> None:
    """Let vLLM import a model's class in this process when it reads what the model can do.

    vLLM starts a process for it, which imports vLLM again: 12 s on an H100, at the first start of
    each architecture. It does so to keep CUDA out of this process, where a fork would not survive
    it. Here no fork follows, or no CUDA exists.
    """
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda call: call()


def forked_engine_client(
    args: Namespace, why_not: Callable[[], str | None]
) -> contextlib.AbstractAsyncContextManager[Any]:
    """Return vLLM's engine client with a forked engine.

    Args:
        why_not: called once more just before the fork; a reason means `spawn`.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    # This is vLLM's own method for library use. Its CPU platform asks for `spawn` because of OpenMP
    # threads; the caller guarantees that there are none.
    class ForkingEngineArgs(AsyncEngineArgs):
        def create_engine_config(self, *args: Any, **kwargs: Any) -> Any:
            config = super().create_engine_config(*args, **kwargs)
            reason = why_not()
            if reason:
                logger.info("the engine process is not forked, and imports vLLM again: %s", reason)
            else:
                os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            return config

    build = _find("build_async_engine_client_from_engine_args")
    return build(ForkingEngineArgs.from_cli_args(args))


def executor_of_part(args: Namespace) -> Any:
    """Return the executor of this machine's workers, which have joined all others."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    # As vLLM's `serve --headless`.
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER, headless=True
    )
    return MultiprocExecutor(config, monitor_workers=False)


def load_adapter_request(name: str, path: str) -> Any:
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

    return LoadLoRAAdapterRequest(lora_name=name, lora_path=path)


def adapters_in_flight(engine: Any) -> set[str]:
    """Return the names of adapters that unfinished requests use."""
    states = getattr(getattr(engine, "output_processor", None), "request_states", {})
    return {name for state in states.values() if (name := getattr(state, "lora_name", None))}


async def tokens_in_flight(engine: Any) -> dict[str, int]:
    """Return the tokens that each unfinished request has so far, held ones included."""
    made = await engine.engine_core.call_utility_all_async(TOKENS_MADE)  # of each engine
    states = engine.output_processor.request_states
    return {
        states[name].external_req_id: tokens
        for one in made
        for name, tokens in one.items()
        if name in states  # not of a client that left
    }


async def pause_and_keep(engine: Any, *, clear_cache: bool) -> None:
    """Freeze the requests in flight.

    `AsyncLLM.pause_generation` waits another 20 ms, in which the server reads outputs. Here nothing
    needs them.
    """
    if clear_cache:
        await engine.renderer.clear_mm_cache_async()
    core = engine.engine_core
    # vLLM 0.33 has a method that also ends the refusal of new requests by the pause before.
    pause = getattr(core, "pause_generation_async", core.pause_scheduler_async)
    await pause(mode="keep", clear_cache=clear_cache)


async def tokenizer_of(engine: Any) -> Any | None:
    """Return the engine's tokenizer; None if it runs without one."""
    try:
        tokenizer = engine.get_tokenizer()
        return await tokenizer if inspect.isawaitable(tokenizer) else tokenizer
    except ValueError:
        return None


def is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
