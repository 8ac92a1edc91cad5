"""The run directory, and the environment variables of components."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

# `sun_path` has 108 bytes, with the final zero.
LONGEST_SOCKET = 107

ENV_RUN_DIR = "ATROPOS_RUN_DIR"
# Leftover processes of a run are found by it.
ENV_RUN_ID = "ATROPOS_RUN_ID"
ENV_CONTROL_SOCKET = "ATROPOS_CONTROL_SOCKET"
"""Absent when a component runs alone."""
ENV_TOKEN = "ATROPOS_TOKEN"
"""Secret for control routes of the inference server."""
ENV_RUN_KEY = "ATROPOS_RUN_KEY"
"""Key for the run's servers where other machines reach them; environments get it, and not the
token."""
NO_UPDATE_CODE = 3
"""Exit code of a trainer whose run made no update, or none in its last steps."""
GAVE_UP_CODE = 4
"""Exit code of a trainer that ends for a reason that a restart would meet again."""
ENV_COMPONENT = "ATROPOS_COMPONENT"
ENV_ATTEMPT = "ATROPOS_ATTEMPT"
"""Number of this start, from 1."""
ENV_HOLD_GENERATION = "ATROPOS_HOLD_GENERATION"
"""1: the server answers only requests with the token until `/bridge/resume`."""
ENV_LOADS_AFTER = "ATROPOS_LOADS_AFTER"
"""URL of another inference server on the same GPU: this one loads its model once that one is
healthy."""
ENV_TRAINER_HOSTS = "ATROPOS_TRAINER_HOSTS"
"""Further addresses, separated by commas, of trainers that may broadcast weights to the server."""
ENV_LOGDIR = "LOGDIR"
"""Folder of an inference server's manifest and version stamps."""
ENV_WEIGHT_UPDATES = "ATROPOS_WEIGHT_UPDATES"
"""1: the inference server takes new weights while it runs."""
ENV_SHARED_WEIGHTS = "VLLM_ENABLE_SHARED_WEIGHTS"
"""1: the inference server exports its weights, so that a trainer can map them."""
ENV_HELD_PORT = "ATROPOS_HELD_PORT"
"""Port that the parent process holds for this one."""
ENV_ENGINE_URLS = "ATROPOS_ENGINE_URLS"
"""OpenAI base URLs of an environment's servers, separated by spaces."""
# The next three are for a trainer of another project.
ENV_API_URL = "ATROPOS_API_URL"
ENV_MODEL = "ATROPOS_MODEL"
ENV_CHECKPOINTS = "ATROPOS_CHECKPOINTS"
ENV_SEQUENCES = "ATROPOS_SEQUENCES_IN_FLIGHT"
"""Limit of an environment, where neither it nor the profile limits its workers."""
ENV_CONCURRENCY = "ATROPOS_CONCURRENCY"
"""auto, or an environment's sequences in flight; unset: its own worker settings."""
ENV_AHEAD = "ATROPOS_BATCHES_AHEAD"
"""Limit of batches that an environment's groups in flight and in the queue may fill."""
ENV_ENGINE_SHARE = "ATROPOS_ENGINE_SHARE"
"""Part of its engines that is an environment's, above 0, at most 1."""
ENV_BESIDE_TRAINER = "ATROPOS_ENGINES_BESIDE_TRAINER"
"""Those of an environment's servers that share the trainer's device, separated by spaces."""
ENV_ON_ONE_GPU = "ATROPOS_ENGINES_ON_ONE_GPU"
"""Equal servers that share a GPU: groups separated by spaces, addresses in them by commas."""
ENV_REFILL = "ATROPOS_REFILL"
"""0: an environment keeps atroposlib's rounds and does not fill free queue slots early."""
ENV_CURRICULUM = "ATROPOS_CURRICULUM"
"""pass_rate: an environment skips items whose group is probably flat."""
ENV_RANKS_DIR = "ATROPOS_RANKS_DIR"
"""Folder shared by a trainer's nodes, for the rendezvous of its ranks."""
ENV_NODE_ADDRESS = "ATROPOS_NODE_ADDRESS"
"""Address under which other nodes reach a component; unset on a single machine."""
ENV_ALLOWED_HOSTS = "ATROPOS_ALLOWED_HOSTS"
"""Further names in the Host header, separated by commas."""

MANIFEST_NAME = "vllm_bridge_config.json"
STATE_JSON = "trainer_state.json"
"""File of a checkpoint with its step, weight version and other plain values."""
STEP_FOLDER = re.compile(r"(adapter_)?step_(\d+)")
"""Name of a checkpoint's folder."""
# The year 9999: calendars refuse later times.
LATEST_TIME = 253_402_300_799.0

# No leading dot or dash: neither a hidden file, nor `..`, nor a flag.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_safe_name(name: str) -> bool:
    """True if safe in a path, a flag and a log line."""
    return _NAME.fullmatch(name) is not None


def safe_text(text: str) -> str:
    """Replace characters that a safe name cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)


class _Below:
    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        # A descriptor, so that each path is one line in the class below.
        return run.root / self.name


@dataclass(frozen=True)
class RunDir:
    """Paths of one run; each has one writer."""

    root: Path

    run_json = _Below("run.json")
    result_json = _Below("result.json")
    notes_json = _Below("notes.json")
    """Note and tags, written by `note` and the screen."""
    profile_toml = _Below("profile.toml")
    plan_json = _Below("plan.json")
    control_sock = _Below("control.sock")
    journal_json = _Below("journal.json")
    supervisor_jsonl = _Below("supervisor.jsonl")
    telemetry_jsonl = _Below("telemetry.jsonl")
    gauges_jsonl = _Below("gauges.jsonl")
    fault_txt = _Below("fault.txt")
    """Report of an internal error."""
    supervisor_log = _Below("supervisor.log")
    """Output of a background supervisor."""
    slurm_job = _Below("slurm_job")
    slurm_script = _Below("slurm.sh")
    slurm_log = _Below("slurm.log")
    logs = _Below("logs")
    bridge = _Below("bridge")
    checkpoints = _Below("checkpoints")
    exports = _Below("exports")
    """Pictures, rollouts and reports that the user has written from the screen."""

    @classmethod
    def from_env(cls) -> RunDir | None:
        """None when this program runs alone."""
        value = os.environ.get(ENV_RUN_DIR)
        # An empty value counts as unset, as in a shell.
        return cls(Path(value)) if value else None

    @property
    def socket_name(self) -> str:
        """Digest of the run directory's real path."""
        return (
            hashlib.blake2b(os.fsencode(self.root.resolve()), digest_size=10).hexdigest() + ".sock"
        )

    def create(self) -> None:
        """Create the folders, mode 0700.

        Raises:
            OSError: it cannot be created, or belongs to another user.
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
        return self.root / f"stages.{component}.jsonl"

    def log(self, component: str, attempt: int) -> Path:
        return self.logs / component / f"{attempt}.log"

    def engine_bridge(self, component: str) -> Path:
        return self.bridge / component

    def manifest(self, component: str) -> Path:
        return self.engine_bridge(component) / MANIFEST_NAME


def registry() -> Path:
    """Folder with a symlink to each run of this user."""
    import platformdirs

    return Path(platformdirs.user_state_dir("atropos-tui")) / "runs"
