"""The server's settings from its environment, checked before vLLM and torch are imported."""

from __future__ import annotations

import os
import secrets
import shutil
import string
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from atropos_common.net.http import hosts_in
from atropos_common.net.ports import NoSuchAddress, address_here, interface_of, is_loopback
from atropos_common.protocol.bridge import ENV_OPEN_GENERATION, ENV_SAMPLING, SamplingPolicy
from atropos_common.system.files import scratch_below
from atropos_common.system.run_dir import (
    ENV_ALLOWED_HOSTS,
    ENV_HOLD_GENERATION,
    ENV_LOGDIR,
    ENV_NODE_ADDRESS,
    ENV_RUN_DIR,
    ENV_SHARED_WEIGHTS,
    ENV_TOKEN,
    ENV_TRAINER_HOSTS,
    ENV_WEIGHT_UPDATES,
    LONGEST_SOCKET,
    MANIFEST_NAME,
    is_safe_name,
)

ENV_BRIDGE_CONFIG_PATH = "VLLM_BRIDGE_CONFIG_PATH"
ENV_SHM_NAME = "ATROPOS_SHM_NAME"
ENV_FORK_ENGINE = "ATROPOS_FORK_ENGINE"
# Set by the server itself. Its child processes know themselves by the id, and the worker finds the
# file of all parameters and the folder of its weights. A restart without CUDA graphs finds why.
ENV_INSTANCE_ID = "ATROPOS_INSTANCE_ID"
ENV_SHM_PATH = "ATROPOS_SHM_PATH"
ENV_START_WEIGHTS = "ATROPOS_START_WEIGHTS"
ENV_EAGER_BECAUSE = "ATROPOS_EAGER_BECAUSE"

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9001
PLUGIN_NAME = "atropos_bridge"  # in vLLM's entry point group `vllm.general_plugins`

# Bytes of a temporary folder, so that vLLM's sockets (a UUID each) below it can be bound.
LONGEST_TEMPORARY = LONGEST_SOCKET - len("/01234567-89ab-cdef-0123-456789abcdef")

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}
_TOKEN_CHARACTERS = set(string.ascii_letters + string.digits + "-_.~+/=")
_MIN_TOKEN_LENGTH = 8


class ConfigError(ValueError):
    """A setting that the user has to change; the message names the way out."""


@dataclass(frozen=True)
class ServerConfig:
    instance_id: str
    """Random, new at every start."""
    temporary: Path
    manifest_path: Path
    """Beside the version stamp and the token file."""
    token: str
    """Secret that control routes require."""
    token_generated: bool
    """Made by this server, which then writes `token_path`."""
    shared_weights: bool
    weight_updates: bool
    """Accept new weights while running."""
    hold_generation: bool
    """Answer only requests with the token until `/bridge/resume`."""
    shm_path: Path
    run_dir: Path | None = None
    """Adapters are loaded only from below it."""
    allowed_hosts: frozenset[str] = field(default_factory=frozenset)
    """Additional names that the Host header may have."""
    trainer_hosts: frozenset[str] = field(default_factory=frozenset)
    """Addresses, beyond the loopback, of trainers that may broadcast weights."""
    sampling: SamplingPolicy = "plain"
    open_generation: bool = False
    """Other users of this machine need no key for completions."""
    eager_because: str | None = None
    """Reason why an earlier start gave up CUDA graphs."""

    @property
    def bridge_dir(self) -> Path:
        return self.manifest_path.parent

    @property
    def private_dir(self) -> bool:
        """The bridge directory is removed with the temporary folder."""
        return self.bridge_dir.parent == self.temporary

    @property
    def state_path(self) -> Path:
        """Version stamp: `{"instance_id": ..., "weight_version": ...}`."""
        return self.bridge_dir / "state.json"

    @property
    def spans_path(self) -> Path:
        """Weight versions by completion, kept across restarts."""
        return self.bridge_dir / "versions.txt"

    @property
    def start_weights_path(self) -> Path:
        """Weights of the next start: `{"path": ..., "weight_version": ...}`."""
        return self.bridge_dir / "start_weights.json"

    @property
    def token_path(self) -> Path:
        return self.bridge_dir / "token"

    def may_meet(self, address: str) -> bool:
        """Return True if a trainer at `address` may send weights."""
        return is_loopback(address) or address.lower() in self.trainer_hosts

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> ServerConfig:
        """Read and check the environment.

        Raises:
            ConfigError: an invalid value, with the way out.
        """
        env = os.environ if env is None else env
        shared = _flag(env, ENV_SHARED_WEIGHTS)
        manifest_path = _manifest_path(env)
        if manifest_path is None and shared:
            raise ConfigError(
                f"{ENV_SHARED_WEIGHTS}=1 needs a place for the manifest: set {ENV_LOGDIR}=DIR "
                f"(or {ENV_BRIDGE_CONFIG_PATH}=FILE)"
            )
        instance_id = secrets.token_hex(8)
        token = _token(env)
        shm_name = env.get(ENV_SHM_NAME) or f"atropos-{instance_id}"
        if not is_safe_name(shm_name):
            allowed = "letters, digits, dot, dash, underscore"
            fault = f"{ENV_SHM_NAME}={shm_name!r}: a plain file name is needed"
            raise ConfigError(f"{fault} ({allowed})")
        temporary = scratch_below(env, f"atropos-vllm-{instance_id}")[0]
        if manifest_path is None:
            manifest_path = temporary / "bridge" / MANIFEST_NAME
        elif manifest_path.parent.exists():
            require_own_folder(manifest_path.parent)
        return cls(
            instance_id=instance_id,
            temporary=temporary,
            manifest_path=manifest_path,
            token=token or secrets.token_urlsafe(24),
            token_generated=token is None,
            shared_weights=shared,
            weight_updates=_flag(env, ENV_WEIGHT_UPDATES),
            hold_generation=_flag(env, ENV_HOLD_GENERATION),
            shm_path=Path("/dev/shm") / shm_name,
            run_dir=Path(env[ENV_RUN_DIR]) if env.get(ENV_RUN_DIR) else None,
            allowed_hosts=hosts_in(env, ENV_ALLOWED_HOSTS),
            trainer_hosts=hosts_in(env, ENV_TRAINER_HOSTS) | hosts_in(env, "MASTER_ADDR"),
            sampling=_sampling(env),
            open_generation=_flag(env, ENV_OPEN_GENERATION),
            eager_because=env.get(ENV_EAGER_BECAUSE) or None,
        )


def require_own_folder(folder: Path) -> None:
    """Check that only this user can write to the bridge directory.

    Raises:
        ConfigError: the folder belongs to another user, or others may write there.
    """
    # A writer could take the token and choose the start weights.
    info = folder.stat()
    if info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise ConfigError(
            f"others may write into {folder}: take a folder of this user alone "
            f"({ENV_LOGDIR}=$(mktemp -d)), or, if it is yours, chmod go-w {folder}"
        )


def take_temporary_folder(config: ServerConfig, env: os._Environ[str]) -> None:
    """Create the server's temporary folder and use it for everything.

    Args:
        env: changed in place, unless socket paths would be too long.

    Raises:
        ConfigError: the folder cannot be created.
    """
    # vLLM leaves sockets and files behind even at a clean end.
    try:
        config.temporary.mkdir(mode=0o700)
    except OSError as error:
        fault = f"{config.temporary.parent} takes no temporary folder ({error.strerror})"
        raise ConfigError(f"{fault}: set TMPDIR to one that does") from None
    if len(os.fsencode(config.temporary)) <= LONGEST_TEMPORARY:
        env.update(scratch_below(env, config.temporary.name)[1])
        tempfile.tempdir = None  # it was computed from the old environment


def remove_temporary_folder(config: ServerConfig, env: os._Environ[str]) -> None:
    shutil.rmtree(config.temporary, ignore_errors=True)
    if env.get("TMPDIR") == str(config.temporary):
        env["TMPDIR"] = str(config.temporary.parent)
        tempfile.tempdir = None


def _sampling(env: Mapping[str, str]) -> SamplingPolicy:
    named = env.get(ENV_SAMPLING) or "plain"
    for policy in get_args(SamplingPolicy):
        if named == policy:
            return policy  # type: ignore[no-any-return]
    known = ", ".join(get_args(SamplingPolicy))
    raise ConfigError(f"{ENV_SAMPLING}={named!r}: it is one of {known}")


def prepare_network(env: dict[str, str] | os._Environ[str]) -> None:
    """Make vLLM, gloo and NCCL use the interface that the engine's other machines dial.

    Args:
        env: changed in place; existing values stay.

    Raises:
        ConfigError: ATROPOS_NODE_ADDRESS is not an address of this machine.
    """
    if ENV_NODE_ADDRESS not in env:
        return
    try:
        address = address_here()
    except NoSuchAddress as error:
        raise ConfigError(str(error)) from None
    # By themselves they choose one, gloo that of the host name, which is often the loopback.
    interface = interface_of(address)
    env.setdefault("VLLM_HOST_IP", address)
    env.setdefault("GLOO_SOCKET_IFNAME", interface)
    env.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def prepare_environment(env: dict[str, str] | os._Environ[str], *, cpu: bool) -> list[str]:
    """Set environment variables that vLLM reads at import.

    Args:
        env: changed in place.

    Returns:
        Lines to log.
    """
    notes = []
    if env.pop("VLLM_USE_V1", None) is not None:
        notes.append("VLLM_USE_V1 is ignored: vLLM has only one engine now")
    plugins = env.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN_NAME not in plugins.split(","):
        env["VLLM_PLUGINS"] = ",".join([*filter(None, plugins.split(",")), PLUGIN_NAME])
        notes.append(f"VLLM_PLUGINS: {PLUGIN_NAME} added, the bridge needs it")
    if sys.flags.safe_path:
        # vLLM starts helpers by `python -m`, which would look for its modules in the working
        # directory first.
        env.setdefault("PYTHONSAFEPATH", "1")
    if _sampling(env) != "as_asked":
        # Calls of tools that say `strict`, and some models' always, would be written under a
        # grammar. That changes the distribution, and no option of a request shows it.
        env.setdefault("VLLM_ENFORCE_STRICT_TOOL_CALLING", "0")
    # A training stack sends no usage statistics.
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    # The client should close an idle connection. Our clients do so after 2 s, an environment's
    # aiohttp after 15 s. vLLM's default of 5 s would close it under a request that is on its way.
    env.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "75")
    if cpu:
        # Otherwise the first request with logprobs compiles a kernel for about 12 s.
        env.setdefault("TORCHDYNAMO_DISABLE", "1")
    else:
        # Unset, torch chooses: one folder for a start that compiles, another for one that finds its
        # compiled code. The kernels of LoRA and of the sampler are then compiled twice, half a
        # minute each time.
        env.setdefault("TRITON_CACHE_DIR", str(_vllm_cache(env) / "triton"))
    return notes


# vLLM's own rules.
def _vllm_cache(env: Mapping[str, str]) -> Path:
    caches = env.get("XDG_CACHE_HOME") or "~/.cache"
    # os.path.expanduser keeps the tilde where there is no home; Path's raises.
    return Path(os.path.expanduser(env.get("VLLM_CACHE_ROOT") or f"{caches}/vllm"))  # noqa: PTH111


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ConfigError(f"{name}={env[name]!r}: use 1 or 0")


def _manifest_path(env: Mapping[str, str]) -> Path | None:
    if value := env.get(ENV_BRIDGE_CONFIG_PATH):
        path = Path(value).absolute()
        if path.is_dir():
            fault = f"{ENV_BRIDGE_CONFIG_PATH}={value} is a directory"
            raise ConfigError(f"{fault}; name a file in it, or use {ENV_LOGDIR}")
        return path
    if value := env.get(ENV_LOGDIR):
        directory = Path(value).absolute()
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"{ENV_LOGDIR}={value} is not a directory")
        return directory / MANIFEST_NAME
    return None


def _token(env: Mapping[str, str]) -> str | None:
    token = env.get(ENV_TOKEN)
    if not token:
        return None
    if len(token) < _MIN_TOKEN_LENGTH or not set(token) <= _TOKEN_CHARACTERS:
        raise ConfigError(
            f"{ENV_TOKEN}: use at least {_MIN_TOKEN_LENGTH} letters, digits or -_.~+/= "
            "(such as `openssl rand -hex 16`), or unset it and one is made"
        )
    return token
