"""The run directory: its files and their writers, and the environment variables that name it.

Every path has one writer. `RunDir` only computes paths; `create` makes the folders with mode 0700.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

# `sun_path` has 108 bytes, with the final zero.
LONGEST_SOCKET = 107
"""Longest path in bytes of a Unix socket."""

ENV_RUN_DIR = "ATROPOS_RUN_DIR"
"""The run directory, for every component."""
ENV_RUN_ID = "ATROPOS_RUN_ID"
"""The run's id; leftover processes of a run are found by it."""
ENV_CONTROL_SOCKET = "ATROPOS_CONTROL_SOCKET"
"""The supervisor's Unix socket; absent when a component runs alone."""
ENV_TOKEN = "ATROPOS_TOKEN"
"""The run's random token for control routes of the inference server."""
ENV_DOOR_KEY = "ATROPOS_DOOR_KEY"
"""Key for run-api, generation and metrics of this run where other machines reach them
(`atropos_common/net/http.py`); environments get it, and not the token."""
NO_UPDATE_CODE = 3
"""Exit code of a trainer whose run made no update, or none in its last steps."""
ENV_COMPONENT = "ATROPOS_COMPONENT"
"""The component's own name in the plan."""
ENV_ATTEMPT = "ATROPOS_ATTEMPT"
"""Number of starts of this component in this run, from 1."""
ENV_HOLD_GENERATION = "ATROPOS_HOLD_GENERATION"
""""1": the server answers only requests with the token until `/bridge/resume` names a weight
version."""
ENV_TRAINER_HOSTS = "ATROPOS_TRAINER_HOSTS"
"""Further addresses, separated by commas, of trainers that may broadcast weights to the server. The
loopback and MASTER_ADDR are always allowed."""
ENV_HELD_PORT = "ATROPOS_HELD_PORT"
"""Port that the parent process holds for this one (`atropos_common/net/ports.py`)."""
ENV_ENGINE_URLS = "ATROPOS_ENGINE_URLS"
"""For environments: OpenAI base URLs (http://127.0.0.1:9001/v1) of all servers that they may use,
separated by spaces."""
ENV_API_URL = "ATROPOS_API_URL"
"""For a trainer of another project: the address of run-api."""
ENV_MODEL = "ATROPOS_MODEL"
"""For such a trainer: the stack's model, a folder or a hub id."""
ENV_CHECKPOINTS = "ATROPOS_CHECKPOINTS"
"""For such a trainer: the folder of its checkpoints in the run."""
ENV_SEQUENCES = "ATROPOS_SEQUENCES_IN_FLIGHT"
"""Completions in flight of an environment, where neither it nor the profile limits its workers."""
ENV_REFILL = "ATROPOS_REFILL"
"""`0`: an environment starts only as many groups as there are queue slots, in atroposlib's
rounds."""
ENV_RANKS_DIR = "ATROPOS_RANKS_DIR"
"""Folder shared by all nodes of a trainer, for the rendezvous of its ranks; required for several
nodes."""
ENV_NODE_ADDRESS = "ATROPOS_NODE_ADDRESS"
"""Address under which other nodes reach a component; without it, all components are on one
machine."""
ENV_ALLOWED_HOSTS = "ATROPOS_ALLOWED_HOSTS"
"""Further names, separated by commas, that our servers accept in the Host header."""

MANIFEST_NAME = "vllm_bridge_config.json"
LATEST_TIME = 253_402_300_799.0
"""Latest plausible time in Unix seconds (the year 9999): calendars refuse later ones."""

# No leading dot or dash: neither a hidden file, nor `..`, nor a flag.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_safe_name(name: str) -> bool:
    """Return True if `name` is safe in a path, a flag and a log line: letters, digits, dot, dash,
    underscore."""
    return _NAME.fullmatch(name) is not None


class _Below:
    """A path below the root of a run directory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        # A descriptor, so that each path is one line in the class below.
        return run.root / self.name


@dataclass(frozen=True)
class RunDir:
    """Paths below one run directory."""

    root: Path

    run_json = _Below("run.json")
    result_json = _Below("result.json")
    profile_toml = _Below("profile.toml")
    plan_json = _Below("plan.json")
    control_sock = _Below("control.sock")
    journal_json = _Below("journal.json")
    supervisor_jsonl = _Below("supervisor.jsonl")
    telemetry_jsonl = _Below("telemetry.jsonl")
    gauges_jsonl = _Below("gauges.jsonl")
    fault_txt = _Below("fault.txt")
    """Report of an internal error, to file as an issue."""
    supervisor_log = _Below("supervisor.log")
    """Output of a supervisor that runs in the background."""
    slurm_job = _Below("slurm_job")
    """Number of the run's SLURM job."""
    slurm_script = _Below("slurm.sh")
    slurm_log = _Below("slurm.log")
    """Output of the batch script."""
    logs = _Below("logs")
    bridge = _Below("bridge")
    checkpoints = _Below("checkpoints")

    @classmethod
    def from_env(cls) -> RunDir | None:
        """The run directory that the supervisor named; None when this program runs alone."""
        value = os.environ.get(ENV_RUN_DIR)
        # An empty value counts as unset, as in a shell.
        return cls(Path(value)) if value else None

    @property
    def socket_name(self) -> str:
        """File name of this run's control socket: a digest of the run directory's real path."""
        return (
            hashlib.blake2b(os.fsencode(self.root.resolve()), digest_size=10).hexdigest() + ".sock"
        )

    def create(self) -> None:
        """Create the directory and its folders, private to the user.

        Raises:
            OSError: it cannot be created, or the folder belongs to another user.
        """
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        # In a shared folder such as /tmp another user could have created it first.
        if self.root.stat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", str(self.root))
        # `mkdir` keeps the mode of an existing folder.
        self.root.chmod(0o700)
        for folder in (self.logs, self.bridge, self.checkpoints):
            folder.mkdir(exist_ok=True, mode=0o700)

    def eval_jsonl(self, env: str) -> Path:
        return self.root / f"eval.{env}.jsonl"

    def stages_jsonl(self, component: str) -> Path:
        """Where one of our programs records the stages that it reaches
        (`atropos_common/protocol/stages.py`)."""
        return self.root / f"stages.{component}.jsonl"

    def log(self, component: str, attempt: int) -> Path:
        return self.logs / component / f"{attempt}.log"

    def engine_bridge(self, component: str) -> Path:
        """Folder of one engine's manifest and version stamps."""
        return self.bridge / component

    def manifest(self, component: str) -> Path:
        return self.engine_bridge(component) / MANIFEST_NAME


def registry() -> Path:
    """Folder with a symlink to each run directory of this user."""
    import platformdirs

    return Path(platformdirs.user_state_dir("atropos-tui")) / "runs"
