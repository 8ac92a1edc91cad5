"""Start the inference server.

    python -m vllm_server --model MODEL [--port 9001] [any flag of vLLM's server]

Settings are checked before vLLM is imported, so that a mistake costs a second and one line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import sys
from pathlib import Path

from atropos_common.models import engine_release
from atropos_common.net import ports
from atropos_common.system.installation import install_stack
from atropos_common.system.leaving import leave
from atropos_common.system.run_dir import ENV_WEIGHT_UPDATES
from vllm_server import compat
from vllm_server.config import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    ENV_INSTANCE_ID,
    ENV_SHM_PATH,
    ConfigError,
    ServerConfig,
    prepare_environment,
    prepare_network,
    remove_temporary_folder,
    take_temporary_folder,
)
from vllm_server.plugin import configure_logging, die_with_parent, hide_torchcodec

if multiprocessing.parent_process() is not None:
    # vLLM's child processes import this file first, so they die with the server from their first
    # moment on.
    die_with_parent()
hide_torchcodec()

HELP = f"""\
usage: python -m vllm_server --model MODEL [--host {DEFAULT_HOST}] [--port {DEFAULT_PORT}]
                             [flags of vLLM's server]

vLLM's OpenAI server plus POST /generate (tokens with logprobs), /health_generate and the weight
bridge under /bridge. All flags are vLLM's own; `--help=all` lists them (slow: it imports vLLM).
Defaults that differ from vLLM's:
  --host {DEFAULT_HOST}   --port {DEFAULT_PORT}
  --logprobs-mode processed_logprobs (the trainer's ratios need it)

environment:
  LOGDIR=DIR                       bridge directory: manifest, version stamp, token
  VLLM_BRIDGE_CONFIG_PATH=FILE     the manifest itself, instead of LOGDIR/vllm_bridge_config.json
  VLLM_ENABLE_SHARED_WEIGHTS=1     single copy: export the weights so that a trainer can map them
  ATROPOS_WEIGHT_UPDATES=1         take new weights while running (POST /bridge/load, broadcast)
  ATROPOS_TOKEN=SECRET             needed on control routes, in the header X-Atropos-Token;
                                   made and written if unset
  ATROPOS_HOLD_GENERATION=1        answer only requests with the token until POST /bridge/resume
  ATROPOS_LOADS_AFTER=URL          load the model once the server at URL, on the same GPU, is
                                   healthy
  ATROPOS_SHM_NAME=NAME            name of the weight file under /dev/shm
  ATROPOS_ALLOWED_HOSTS=A,B        further names accepted in the Host header
  OMP_NUM_THREADS=1                on a CPU: also starts the engine by fork, in half the time
  ATROPOS_FORK_ENGINE=0            never start it that way
  ATROPOS_NODE_ADDRESS=ADDRESS     of this machine, for an engine over several: --nnodes N
                                   --node-rank R --master-addr A --master-port P on each, and
                                   --headless on all but the first, which serves
"""


def main(argv: list[str] | None = None) -> int:
    """Run the server until SIGTERM.

    Returns:
        0 stopped; 1 the engine failed; 2 wrong flags, environment or installation; 130 interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    if any(flag in ("-h", "--help") for flag in argv):
        print(HELP, end="")
        return 0
    configure_logging()
    try:
        if "--help=all" not in argv:
            _check_arguments(argv)
        _check_vllm()
        config = ServerConfig.from_env()
        prepare_network(os.environ)
        take_temporary_folder(config, os.environ)
    except (ConfigError, OSError) as error:  # OSError: a path without permission
        print(f"vllm_server: {error}", file=sys.stderr)
        return 2
    try:
        return _serve(config, argv)
    finally:
        remove_temporary_folder(config, os.environ)


def _serve(config: ServerConfig, argv: list[str]) -> int:
    os.environ[ENV_INSTANCE_ID] = config.instance_id
    release = engine_release.installed()
    cpu = os.environ.get("VLLM_TARGET_DEVICE") == "cpu" or (release is not None and release.cpu)
    if config.shared_weights and cpu:
        os.environ[ENV_SHM_PATH] = str(config.shm_path)
    os.environ.pop(ENV_WEIGHT_UPDATES, None)
    if config.weight_updates:
        os.environ[ENV_WEIGHT_UPDATES] = "1"
        # A dead trainer would fill the log with C++ stacks of torch's store; our own log line is
        # enough.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    notes = prepare_environment(os.environ, cpu=cpu)
    if release and (reason := engine_release.why_not_supported(release)):
        notes.append(f"{reason}: it may fail, or compute other logprobs than the trainer")
    try:
        compat.require_parts()
        from vllm_server import app
    except ImportError as error:
        print(f"vllm_server: vLLM does not import: {error}", file=sys.stderr)
        return 2
    return app.run(config, argv, notes)


def _check_arguments(argv: list[str]) -> None:
    """Check the flags that are often wrong, without vLLM's slow parser."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model")
    parser.add_argument("--host", default=DEFAULT_HOST)
    parser.add_argument("--port", default=str(DEFAULT_PORT))
    parser.add_argument("--uds")
    parser.add_argument("--config")
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--nnodes", "-n", default="1")
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", default="29501")
    known, _ = parser.parse_known_args(argv)
    model = known.model or (argv[0] if argv and not argv[0].startswith("-") else None)
    if model is None and known.config is None:
        fix = "name a directory with config.json, or a hub id such as Qwen/Qwen3-0.6B"
        raise ConfigError(f"--model is missing: {fix}")
    if model is not None:
        check_model(model)
        check_release(model)
    if known.headless:
        return  # workers of an engine whose API server is on another machine
    if known.nnodes != "1" and known.master_port.isdecimal():
        check_port(known.master_addr, int(known.master_port), "--master-port")
    if known.uds is None:
        if not known.port.isdecimal() or not 0 < int(known.port) < 65536:
            raise ConfigError(f"--port {known.port}: a number from 1 to 65535 is needed")
        check_port(known.host, int(known.port))


def check_model(model: str) -> None:
    """Accept a local folder with a config.json, or a hub id `owner/name`.

    Raises:
        ConfigError: it is neither.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            fault = "the directory has no config.json, so it is not a model"
            raise ConfigError(f"--model {model}: {fault}")
        return
    is_path = path.exists() or path.is_absolute() or model.startswith((".", "~"))
    if is_path or model.count("/") > 1:
        raise ConfigError(f"--model {model}: no such directory")


def check_release(model: str) -> None:
    """Check that the installed vLLM computes a local model as the trainer does.

    Raises:
        ConfigError: it does not, with the way out.
    """
    file = Path(model).expanduser() / "config.json"
    release = engine_release.installed()
    if release is None or not file.is_file():
        return
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return  # vLLM's own message is better
    if isinstance(config, dict) and (refused := engine_release.why_not_served(release, config)):
        raise ConfigError(f"--model {model}: {'; '.join(refused)}")


def check_port(host: str, port: int, flag: str = "--port") -> None:
    """Raise ConfigError if the port is in use; the message names the listener."""
    try:
        with ports.bind(host, port, held=ports.is_held(port, os.environ)) as probe:
            probe.listen(1)
    except OSError as error:
        why = f"{error.strerror}{_listener(port)}"
        fault = f"{host}:{port} cannot be bound ({why})"
        raise ConfigError(f"{fault}; choose another {flag}") from None


def _listener(port: int) -> str:
    import psutil

    # Without the right to see another user's processes there is no name.
    with contextlib.suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            address = found.laddr
            listens = found.status == psutil.CONN_LISTEN and address and address.port == port
            if listens and found.pid:
                process = psutil.Process(found.pid)
                return f": used by pid {process.pid}, {' '.join(process.cmdline())[:120]}"
    return ""


def _check_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"vLLM is not installed for {sys.executable}; {install_stack()}")


if __name__ == "__main__":
    leave(main())
