"""A profile as typed, strict sections: an unknown key is an error, and all problems are reported
together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from atropos_common.protocol.bridge import SamplingPolicy
from atropos_common.protocol.control import Role
from atropos_common.protocol.trainer_records import HELD_OUT_METRIC, METRIC_KINDS
from atropos_common.system.run_dir import is_safe_name
from atropos_tui.cluster import sbatch
from atropos_tui.errors import Problem
from atropos_tui.profile.errors import (
    did_you_mean,
    in_words,
    key_text,
    problems_of,
    refused,
    value_text,
)
from atropos_tui.profile.load import (
    SET,
    Origins,
    apply_sets,
    file_text,
    find_profile,
    read_merged,
    shipped_profiles,
)
from atropos_tui.profile.placement import Demand, Placement, host_names, part_names, place_engines
from atropos_tui.profile.redact import REDACTED
from atropos_tui.profile.schema import PROGRAM_KEYS, KeyPath, Schema, build_schema
from atropos_tui.profile.spec import (
    AlertSpec,
    ExecCheck,
    HttpCheck,
    LauncherName,
    LogCheck,
    LogPolicy,
    MetricsPolicy,
    NotifyPolicy,
    Probe,
    RestartPolicy,
    StopPolicy,
    TcpCheck,
    references,
)
from trainer_core.config import Mode, TrainingConfig, WeightBridgeMode

__all__ = [
    "Profile",
    "apply_sets",
    "find_profile",
    "load_profile",
    "parse_profile",
    "shipped_profiles",
]


DERIVED_TRAINER_KEYS = {
    "model_name": "model",
    "weight_bridge_mode": "mode",
    "use_shared_memory": "mode",
    "vllm_port": "vllm.port",
    "vllm_host": "vllm.node",
    "gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_gpu": "vllm.gpus",
    "max_model_len": "vllm.max_model_len",
    "vllm_config_path": "mode",
    "atropos_url": "api.port",
    "seed": "seed",
}
"""Trainer field that the plan derives -> profile key to set instead."""


MODE_SETTINGS: dict[str, dict[str, Any]] = {
    "broadcast": {"weight_bridge_mode": "shared_vllm", "use_shared_memory": True},
    **{mode: {"weight_bridge_mode": mode} for mode in get_args(WeightBridgeMode)},
}
"""Trainer fields that select a mode."""


READ_WORDS = {
    "betas",
    "train_layer_indices",
    "lora_target_modules",
    "lora_layer_indices",
    "lora_modules_to_save",
}
"""Trainer fields that also read text: "0.9 0.95", "20-31"."""
PAIRS = {"betas"}
"""Tuples, which TOML writes as lists."""


def mistake(reason: str, fix: str, at: str = "") -> PydanticCustomError:
    """Error that a validator raises; `at`: position below the validated key."""
    return PydanticCustomError("mistake", "{reason}", {"reason": reason, "fix": fix, "at": at})


def _name(value: str) -> str:
    if not is_safe_name(value):
        raise mistake(
            f"not a valid name (got {value_text(value)})",
            "use at most 64 letters, digits, dots, dashes or underscores; begin with a "
            "letter or digit",
        )
    return value


def _variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise mistake(
            "not a valid variable name",
            "use letters, digits and underscores; do not begin with a digit",
        )
    return value


def _module(value: str) -> str:
    if not references(value) and not all(part.isidentifier() for part in value.split(".")):
        raise mistake(
            f"not a module name (got {value_text(value)})",
            "write it as for python -m, such as atropos_envs.gsm8k_server; for a file use script",
        )
    return value


def _argv(value: list[str]) -> list[str]:
    if not value[0].strip():
        raise mistake(
            "names no program", 'begin with the program, such as ["python", "-m", "http.server"]'
        )
    return value


def _host(value: str) -> str:
    # IPv6 in brackets, as in a URL, loses them; a host never begins with a dash: ssh would read a
    # flag.
    value = re.sub(r"(^|@)\[([0-9A-Fa-f:.%\w]*:[0-9A-Fa-f:.%\w]*)\]$", r"\1\2", value)
    if not re.fullmatch(r"(?:::(?=[0-9A-Fa-f])|[A-Za-z0-9_])[A-Za-z0-9_.@:%-]*", value):
        raise mistake(
            f"not a host (got {value_text(value)})",
            "give a name or an address, such as 10.0.0.2 or me@box2",
        )
    return value


def _words(value: str) -> str:
    if not value.isprintable():
        raise mistake(
            f"contains control characters (got {value_text(value)})",
            "write one line of printable text",
        )
    return value


def _sbatch_option(value: str) -> str:
    if found := sbatch.problem(value):
        raise mistake(*found)
    return value


Port = Annotated[int, Field(ge=1, le=65535)]
GpuIndex = Annotated[int, Field(ge=0)]
Condition = Literal["started", "healthy", "completed"]
Scalar = bool | int | float | str
Name = Annotated[
    str,
    AfterValidator(_name),
    Field(json_schema_extra={"pattern": r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"}),
]
EnvName = Annotated[str, AfterValidator(_variable)]
Module = Annotated[str, AfterValidator(_module)]
Argv = Annotated[list[str], Field(min_length=1), AfterValidator(_argv)]
HostName = Annotated[str, AfterValidator(_host)]
Words = Annotated[str, Field(min_length=1), AfterValidator(_words)]
SbatchOption = Annotated[Words, AfterValidator(_sbatch_option)]
"""One printable line, because a second line would run as a command."""

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
MOST_RANKS = 64
"""GPUs of one machine, or that share one copy of a model."""
MEETING_PORT = 29501
"""Default of vLLM's --master-port."""
MOST_NODES = 1024
"""Machines, engines or trainer ranks of a stack."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def _check_probe(probe: Probe) -> Probe:
    for index, check in enumerate(probe.checks):
        at = f"checks[{index}]"
        # A URL with `${VAR}` is known only when the process starts.
        match check:
            case HttpCheck(url=url) if not references(url) and not re.match(
                r"https?://[^/\s]", url
            ):
                raise mistake(
                    f"not a URL (got {value_text(url)})",
                    "begin with http:// or https://",
                    f"{at}.url",
                )
            case TcpCheck(port=port) if not 1 <= port <= 65535:
                raise mistake(
                    f"out of range (got {port})",
                    "give a whole number from 1 to 65535",
                    f"{at}.port",
                )
            case ExecCheck(command=command) if not command or not command[0].strip():
                raise mistake(
                    "names no program", 'begin with the program, such as ["test", "-e", "x"]', at
                )
            case LogCheck(pattern=pattern):
                try:
                    re.compile(pattern)
                except (re.error, OverflowError) as error:
                    reason = f"not a regular expression: {error} (got {value_text(pattern)})"
                    fix = "correct it, or escape special characters with a backslash"
                    raise mistake(reason, fix, f"{at}.pattern") from None
    return probe


class ClusterSection(Section):
    """How components start on several machines. Without this table all run on this machine."""

    launcher: LauncherName = "local"
    """slurm: srun inside an allocation, which `up` requests. ssh: hosts that accept this user
    without a password. kubernetes: pods, through kubectl exec. ray: nodes of a Ray cluster. local:
    everything on this machine."""
    python: str | None = Field(None, min_length=1)
    """Python interpreter on every node; default: the path of the interpreter that runs
    atropos-tui."""
    time: Words | None = None
    """slurm: time limit of the job, such as 04:00:00; default: the partition's."""
    partition: Words | None = None
    """slurm: partition of the nodes that name none of their own."""
    account: Words | None = None
    """slurm: account that pays for the job."""
    sbatch: list[SbatchOption] = Field(default_factory=list)
    """slurm: further sbatch options, such as "--qos=high", one an entry; GPU options apply to nodes
    with GPUs."""
    requeue: bool = True
    """slurm: at the time limit or after a preemption the run saves, queues again and continues."""
    ssh: list[str] = Field(default_factory=list)
    """ssh: further ssh options, one word an entry, such as ["-p", "2222"]."""
    kubectl: list[str] = Field(default_factory=list)
    """kubernetes: further kubectl options, one word an entry, such as ["-n", "training"]."""
    address: str | None = Field(None, min_length=1)
    """ray: address of the cluster, as in RAY_ADDRESS; default: the one that Ray finds."""


class NodeSection(Section):
    """One machine, or several equal ones."""

    name: Name
    """Name for the `node` key of components; with `count` the second machine is NAME-2."""
    count: int = Field(1, ge=1, le=MOST_NODES)
    """Number of machines."""
    gpus: int = Field(0, ge=0, le=MOST_RANKS)
    """GPUs that the stack uses on each machine."""
    hosts: list[HostName] = Field(default_factory=list)
    """ssh, ray, kubernetes: `count` host names as the launcher knows them, such as "user@10.0.0.2";
    slurm chooses them."""
    addresses: list[HostName] = Field(default_factory=list)
    """Addresses for the other nodes' connections, one for each of `hosts`; default: the host's
    name."""
    partition: Words | None = None
    """slurm: partition of these nodes."""
    constraint: Words | None = None
    """slurm: features that these nodes must have, such as "h100"."""
    sbatch: list[SbatchOption] = Field(default_factory=list)
    """slurm: further sbatch options for these nodes alone, such as "--cpus-per-task=4", one an
    entry."""


class ComponentOptions(Section):
    """Keys of every component; a key that is left out has the default of the component's role."""

    node: Name | None = None
    """Name of the [[node]] where it runs; default: the first one, the supervisor's own."""

    env: dict[EnvName, str] = Field(default_factory=dict)
    """Environment variables; `${VAR}` is resolved when the process starts and never written to a
    file."""
    cwd: str | None = None
    """Working directory; default: the folder where atropos-tui was started."""
    depends_on: dict[str, Condition] | None = None
    """Components that must be started, healthy or completed before this one starts."""
    startup: Probe | None = None
    """Probe of the start: the other probes begin when it passes; without `readiness` the component
    is then healthy."""
    readiness: Probe | None = None
    """Probe of health: the component is healthy while it passes."""
    liveness: Probe | None = None
    """Probe of life: when it fails, the component restarts by its policy."""
    restart: RestartPolicy | None = None
    """When a process that exited by itself starts again."""
    stop: StopPolicy | None = None
    """How the component is stopped."""
    start_timeout_s: float | None = Field(None, gt=0)
    """Seconds to become healthy; after that the run ends with exit code 4."""

    @field_validator("startup", "readiness", "liveness")
    @classmethod
    def _probe(cls, probe: Probe | None) -> Probe | None:
        return _check_probe(probe) if probe else None


class ApiSection(ComponentOptions):
    """run-api, the queue of rollouts between environments and trainer."""

    port: Port = 8000
    """Port on this machine."""
    host: str = "127.0.0.1"
    """Address to bind; run-api has no authentication, so keep it on this machine's own
    addresses."""
    command: Argv | None = None
    """Whole command line instead of the derived one."""


OPENENV_PORT = 8100
"""Port of the first OpenEnv server that the stack starts."""


class EnvSection(ComponentOptions):
    """An environment: set exactly one of `module`, `script`, `verifiers`, `openenv`, `agent` and
    `command`."""

    name: Name = "env"
    """Name in logs, commands and `depends_on`."""
    module: Module | None = None
    """Python module to run, such as atropos_envs.gsm8k_server."""
    script: str | None = Field(None, min_length=1)
    """Python file with the `serve` command of atroposlib's environments."""
    verifiers: str | None = Field(None, min_length=1)
    """Environment of the package verifiers: the id of an installed one, or a folder."""
    openenv: str | None = Field(None, min_length=1)
    """OpenEnv server: its address (http://HOST:PORT). Or its Python package, folder, or module:app:
    then the stack starts the server as the component NAME-openenv."""
    openenv_port: Port | None = None
    """Port of a server that the stack starts; default: 8100 for the first, then 8101 and so on."""
    agent: Argv | None = None
    """Program that plays an episode with the model at OPENAI_BASE_URL. The task is JSON on its
    standard input."""
    tasks: str | None = Field(None, min_length=1)
    """Tasks of `agent`: a file of JSON lines, a folder with train.jsonl and perhaps test.jsonl
    (held out), or module:function."""
    scorer: str | Argv | None = None
    """Reward of an episode of `agent`: module:function, or a command that gets the episode as JSON
    and prints the score. Default: the last line that the program prints."""
    command: Argv | None = None
    """Whole command line of any other program; the plan adds nothing."""
    args: dict[str, Scalar | list[Scalar]] = Field(default_factory=dict)
    """Flags of the environment's `serve`, such as `env.group_size = 8` or `openai.timeout =
    600`. With `verifiers`, other keys are settings of its environment."""
    config: str | None = Field(None, min_length=1)
    """YAML file, passed as `--config`."""
    weight: float | None = Field(None, gt=0)
    """Share of every batch, relative to other environments (default: 1). Batches wait for a slow
    environment."""
    engine: Name | None = None
    """Name of the [[vllm]] that generates its rollouts; default: the first, which the trainer
    feeds."""
    refill: bool = True
    """Replace a group with equal scores at once, and start further groups for those expected to end
    flat."""
    curriculum: Literal["none", "pass_rate"] = "none"
    """Choice of problems. pass_rate: problems that are always right or always wrong come less
    often, because a group of equal scores teaches nothing."""
    concurrency: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Sequences that are generated at a time. auto: as many as the engine needs to come close to
    its highest token rate, within the lag bound (env.max_batches_offpolicy, by default 8 batches).
    It has no effect if env.max_batches_offpolicy = 1, which generates batch by batch, or if workers
    are set (env.max_num_workers)."""

    @field_validator("args", mode="before")
    @classmethod
    def _flatten(cls, value: Any) -> Any:
        """Accept TOML tables and dotted strings."""
        return _flat(value) if isinstance(value, dict) else value

    @field_validator("args")
    @classmethod
    def _group_size(cls, args: dict[str, Any]) -> dict[str, Any]:
        """Check the group size, which the plan reads too."""
        # bool is an int in Python, but `true` is no group size.
        size = args.get("env.group_size", 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise mistake(
                f"wrong value (got {value_text(size)})",
                "give a whole number of at least 1",
                "env.group_size",
            )
        return args

    @model_validator(mode="after")
    def _one_program(self) -> EnvSection:
        count = sum(getattr(self, key) is not None for key in PROGRAM_KEYS)
        if count != 1:
            *others, last = PROGRAM_KEYS
            raise mistake(
                "names more than one program to run" if count else "names no program to run",
                f"set exactly one of {', '.join(others)} and {last}",
            )
        if self.agent and not self.tasks:
            raise mistake("has no tasks for its agent", "give a file, folder or function", "tasks")
        for key in ("tasks", "scorer"):
            if getattr(self, key) and not self.agent:
                raise mistake("belongs to `agent`", "remove it, or set agent", key)
        return self

    @property
    def starts_openenv(self) -> bool:
        """True if the stack starts the OpenEnv server."""
        return bool(self.openenv and not self.openenv.startswith(("http://", "https://")))

    @property
    def openenv_name(self) -> str:
        """Name of that server's component."""
        return f"{self.name}-openenv"


class EngineSection(ComponentOptions):
    """A vLLM server, or several equal ones."""

    # `plan` derives vLLM flags from these keys; `checks.DERIVED_FLAGS` forbids the same flags in
    # `args`.
    name: Name = "vllm"
    """Name in logs, commands and `depends_on`; several servers are NAME-0, NAME-1 and so on."""
    port: Port = 9001
    """Port on this machine; several servers have consecutive ports from here."""
    gpus: list[GpuIndex] = Field(default_factory=list)
    """GPUs by index; empty: all that the process sees. More GPUs than one engine needs make several
    engines. With `node`: GPUs of each of its machines; empty: those that no other section names."""
    tensor_parallel: int = Field(1, ge=1, le=MOST_RANKS)
    """GPUs that share one copy of the model."""
    machines: int | None = Field(None, ge=1, le=MOST_NODES)
    """Machines of one server, each with an equal part of its GPUs; default: as few as have
    enough."""
    replicas: int | None = Field(None, ge=1, le=MOST_NODES)
    """Number of equal servers, each with its own GPUs; default: as many as `gpus` suffice for."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of the GPU memory for weights and KV cache; default: vLLM's."""
    max_model_len: int | None = Field(None, ge=1)
    """Limit of the context in tokens, prompt included; default: the model's."""
    model: str | None = Field(None, min_length=1)
    """Model of an engine that the trainer does not feed, such as a judge; default: the stack's
    model."""
    dtype: str | None = None
    """Data type of the weights; default: the trainer's."""
    sampling: SamplingPolicy = "plain"
    """Sampling options that importance ratios do not cover (top-p, top-k, min-p, penalties). plain:
    remove them, with a warning and a count. as_asked: apply them, with logprobs of the whole
    distribution. refuse: reject such requests."""
    open: bool = False
    """Let other users of this machine request completions without the run's key."""
    args: dict[str, Scalar] = Field(default_factory=dict)
    """Further flags of vLLM without the leading dashes; `true` is a flag without a value."""

    def flag_key(self, name: str) -> str:
        """Key in `args` that sets `--name`, in the user's spelling."""
        return next((key for key in self.args if key.replace("_", "-") == name), name)

    def flag(self, name: str) -> Scalar | None:
        """Return the value of `--name`; None: it is not set."""
        return self.args.get(self.flag_key(name))

    def flag_number(self, name: str, default: int) -> int:
        """`--name` as a whole number (1k is 1,000, 1K is 1,024), or `default`: vLLM reports the
        error."""
        value = self.flag(name)
        match = None if isinstance(value, bool) else _NUMBER.fullmatch(str(value).strip())
        if match is None:
            return default
        base = 1000 if match[2].islower() else 1024  # vLLM's own rule
        return int(float(match[1]) * base ** _POWER[match[2].lower()])

    @property
    def gpus_per_copy(self) -> int:
        """GPUs that share one copy of the weights."""
        return self.tensor_parallel * self.flag_number("pipeline-parallel-size", 1)

    @property
    def gpus_needed(self) -> int:
        """GPUs of one engine with all data-parallel copies."""
        return self.gpus_per_copy * self.flag_number("data-parallel-size", 1)

    @property
    def engines(self) -> list[EngineSection]:
        """One section for each server, on one machine."""
        # Without `gpus` one server starts on the GPUs that its process sees.
        count = self.replicas or max(1, len(self.gpus) // self.gpus_needed)
        each = len(self.gpus) // count
        return [
            self._one(index, count, {"gpus": self.gpus[index * each :][:each]})
            for index in range(count)
        ]

    def with_placements(
        self, engines: list[list[Placement]]
    ) -> list[tuple[EngineSection, list[Placement]]]:
        """`engines` with their placements; `node` and `gpus` come from the first."""
        return [
            (
                self._one(
                    index,
                    len(engines),
                    {"node": placements[0].node, "gpus": placements[0].gpus} if placements else {},
                ),
                placements,
            )
            for index, placements in enumerate(engines)
        ]

    def _one(self, index: int, count: int, where: dict[str, Any]) -> EngineSection:
        alone = (
            {"name": f"{self.name}-{index}", "port": self.port + index, "replicas": None}
            if count > 1
            else {}
        )
        return self.model_copy(update=where | alone)


class TrainerSection(ComponentOptions):
    """The trainer: keys of a component, and every field of `TrainingConfig` that the plan does not
    derive."""

    # `_trainer_problems` validates the extra keys against `TrainingConfig`.
    model_config = ConfigDict(extra="allow")
    command: Argv | None = None
    """Whole command line of another trainer. It receives none of our trainer settings; environment
    variables name run-api and the engines (docs/trainers.md)."""
    gpus: list[GpuIndex] = Field(default_factory=list)
    """GPUs by index, one for each rank; default in single copy: the engine's. With `node`: GPUs of
    each of its machines; empty: all that no engine uses."""
    processes: int | None = Field(None, ge=1, le=MOST_NODES)
    """Ranks of the trainer; default: one for each of `gpus`, or one."""
    memory: Literal["auto", "speed", "fit"] = "auto"
    """How the plan chooses memory settings that this table leaves open; `plan` shows which and why.
    auto: none if all fits, else those that cost the least speed. speed: none. fit: the smallest GPU
    memory."""

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class PrepareSection(Section):
    """A step that runs once, before everything else."""

    name: Name = "prepare"
    """Name in logs and commands."""
    command: Argv
    """Program and arguments."""
    creates: str | None = None
    """Path that makes the step unnecessary: if it exists, the step is skipped."""
    env: dict[EnvName, str] = Field(default_factory=dict)
    """Environment variables."""


class ExtraSection(ComponentOptions):
    """Any further process."""

    role: Annotated[Role, BeforeValidator(lambda v: Role(v) if v in list(Role) else v)] = Role.OTHER
    """Role of the process: decides which components restart together."""
    command: Argv
    """Program and arguments."""
    port: Port | None = None
    """Port on which it listens: checked before the start, and shown."""


class NotifySection(NotifyPolicy):
    """Notifications of important events."""

    on: Annotated[
        tuple[Literal["failed", "mismatch", "alert", "done"], ...],
        BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v),
    ] = NotifyPolicy().on
    """Events to notify: a failed run, weights that do not match, an [[alert]], a finished run."""

    @field_validator("webhook")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        if url is not None and not re.fullmatch(r"(https?://[^/\s]|\$\{\w+\})\S*", url):
            raise mistake(
                "not an http(s) URL",
                'give https://..., or "${VAR}" and set VAR in .env, which keeps a secret URL '
                "out of the profile",
            )
        return url


class AlertSection(AlertSpec):
    """Warning when a metric of the records leaves its bounds."""

    @field_validator("metric")
    @classmethod
    def _known(cls, metric: str) -> str:
        if metric not in METRIC_KINDS and not metric.partition(HELD_OUT_METRIC)[2]:
            meant = did_you_mean(metric, METRIC_KINDS)
            raise mistake(
                f"no such metric (got {value_text(metric)})",
                f"{meant}docs/telemetry.md has every metric; a held-out accuracy is "
                f"eval/SPLIT, such as eval/held_out",
            )
        return metric

    @model_validator(mode="after")
    def _bounded(self) -> AlertSection:
        if all(bound is None for bound in (self.below, self.above, self.slope, self.z)):
            raise mistake("has no condition", "set below, above, slope or z")
        if self.slope == 0:
            raise mistake(
                "a slope of 0 is no change",
                "give the change per step: above 0 for a rise, below 0 for a fall",
            )
        return self


# TOML writes a single section as [env] and several as [[env]]; both become a list.
def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        inner = _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
        if twice := sorted(flat.keys() & inner.keys()):
            raise mistake("is given twice", "remove one of the two spellings", twice[0])
        flat |= inner
    return flat


class Profile(Section):
    """One runnable stack: run-api, environments, vLLM servers and the trainer."""

    name: Name
    """Name of the stack, and first part of its runs' names."""
    mode: Mode = "shared_vllm"
    """How weights reach vLLM."""
    model: str = Field(min_length=1)
    """Model folder or hub id for all components."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seed of every random generator."""
    inference_gpus: int | None = Field(None, ge=1, le=MOST_RANKS)
    """Give the first N GPUs of the machine to the engines and the rest to the trainer; replaces
    both `gpus` keys."""
    cluster: ClusterSection | None = None
    """How components start on several machines."""
    node: Annotated[list[NodeSection], BeforeValidator(_as_list)] = Field(default_factory=list)
    """The machines, as [[node]]; the first one is the supervisor's."""
    api: ApiSection = ApiSection()
    """run-api, the queue of rollouts between environments and trainer."""
    env: Annotated[list[EnvSection], BeforeValidator(_as_list)] = Field(min_length=1)
    """The environment; several as [[env]], each with a name."""
    vllm: Annotated[list[EngineSection], BeforeValidator(_as_list)] = Field(
        [EngineSection()], min_length=1
    )
    """The vLLM server; several as [[vllm]], each with a name."""
    trainer: TrainerSection = TrainerSection()
    """The trainer."""
    prepare: Annotated[list[PrepareSection], BeforeValidator(_as_list)] = Field(
        default_factory=list
    )
    """One-shot steps, in order, before everything else."""
    component: dict[Name, ExtraSection] = Field(default_factory=dict)
    """Further processes, by name."""
    logs: LogPolicy = LogPolicy()
    """Limits for the stored output of components."""
    notify: NotifySection = NotifySection()
    """Notifications of important events."""
    metrics: MetricsPolicy = MetricsPolicy()
    """Metrics for Prometheus."""
    alert: Annotated[list[AlertSection], BeforeValidator(_as_list)] = Field(default_factory=list)
    """Warnings when a metric leaves its bounds; several as [[alert]]."""
    _origins: Origins = PrivateAttr(default_factory=Origins)

    @property
    def origins(self) -> Origins:
        return self._origins

    @property
    def is_spread(self) -> bool:
        return self.cluster is not None and self.cluster.launcher != "local"

    @property
    def machines(self) -> dict[str, int]:
        """GPUs of each machine, the supervisor's first; empty for one machine."""
        if not self.is_spread:
            return {}
        return {
            host: group.gpus for group in self.node for host in host_names(group.name, group.count)
        }

    def hosts_named(self, node: str | None) -> list[str]:
        """Machines that a `node` key means. None: the first. Empty if the name is unknown."""
        if node is None:
            return list(self.machines)[:1]
        group = next((group for group in self.node if group.name == node), None)
        return (
            host_names(node, group.count)
            if group
            else [host for host in self.machines if host == node]
        )

    @property
    def placed(self) -> list[list[tuple[EngineSection, list[Placement]]]]:
        """Servers of each [[vllm]], each as its own section with its placements."""
        # `model_copy` copies the cache too: it is valid only for the same sections.
        read = (self.vllm, self.node, self.trainer, self.cluster)
        # Cached: with hundreds of machines it is computed hundreds of times otherwise. Kept in
        # `__dict__`, because a pydantic private attribute would take part in comparisons of
        # profiles.
        known: tuple[Any, list[list[tuple[EngineSection, list[Placement]]]]] | None = (
            self.__dict__.get("_placed")
        )
        if known is None or any(old is not new for old, new in zip(known[0], read, strict=True)):
            known = self.__dict__["_placed"] = read, self._place()
        return known[1]

    def _place(self) -> list[list[tuple[EngineSection, list[Placement]]]]:
        if not self.is_spread:
            return [[(engine, []) for engine in section.engines] for section in self.vllm]
        wants = [
            Demand(
                self.hosts_named(each.node),
                each.gpus_needed,
                each.machines,
                each.replicas,
                each.gpus,
            )
            for each in self.vllm
        ]
        # Engines must not take GPUs that the trainer names.
        named = dict.fromkeys(self.hosts_named(self.trainer.node), self.trainer.gpus)
        found = place_engines(wants, self.machines, named)
        return [
            section.with_placements(engines)
            for section, engines in zip(self.vllm, found, strict=True)
        ]

    @property
    def engines(self) -> list[EngineSection]:
        return [engine for section in self.placed for engine, _ in section]

    @property
    def meeting_ports(self) -> dict[str, int]:
        """Engine -> port where its parts on several machines meet."""
        found: dict[str, int] = {}
        for section, made in zip(self.vllm, self.placed, strict=True):
            port = section.flag_number("master-port", MEETING_PORT)
            for engine in [engine for engine, placements in made if len(placements) > 1]:
                # Engines may share their first machine, so each needs its own port.
                while port in found.values():
                    port += 1
                found[engine.name] = port
        return found

    @property
    def parts(self) -> dict[str, ComponentOptions]:
        return {
            "api": self.api,
            **{f"env.{index}": part for index, part in enumerate(self.env)},
            **{f"vllm.{index}": part for index, part in enumerate(self.vllm)},
            **{f"component.{name}": part for name, part in self.component.items()},
            "trainer": self.trainer,
        }

    @property
    def openenv_servers(self) -> list[tuple[EnvSection, int]]:
        """OpenEnv servers that the stack starts, with their ports."""
        started = [section for section in self.env if section.starts_openenv]
        first = OPENENV_PORT
        return [(each, each.openenv_port or first + at) for at, each in enumerate(started)]

    def used_ports(self) -> list[tuple[str, int]]:
        return [
            ("api.port", self.api.port),
            *(
                (f"vllm.{i}.port", engine.port)
                for i, section in enumerate(self.placed)
                for engine, _ in section
            ),
            *(
                (f"{self.section_of(name)}.args.master-port", port)
                for name, port in self.meeting_ports.items()
            ),
            *(
                (f"component.{name}.port", part.port)
                for name, part in self.component.items()
                if part.port
            ),
            *(
                (f"env.{self.env.index(section)}.openenv_port", port)
                for section, port in self.openenv_servers
            ),
            *([("metrics.port", self.metrics.port)] if self.metrics.port else []),
        ]

    def short_key(self, key: str) -> str:
        """`vllm.0.port` becomes `vllm.port` if there is one [[vllm]]."""
        return key.replace("vllm.0.", "vllm.") if len(self.vllm) == 1 else key

    def section_of(self, component: str) -> str:
        """Key of a component's section: `env.0`, `component.x`, `trainer`."""
        for index, placed in enumerate(self.placed):
            if component in [
                name
                for engine, placements in placed
                for name in part_names(engine.name, len(placements))
            ]:
                return f"vllm.{index}"
        for key in ("env", "prepare"):
            for index, part in enumerate(getattr(self, key)):
                if component in (part.name, getattr(part, "openenv_name", part.name)):
                    return f"{key}.{index}"
        if component in self.component:
            return f"component.{component}"
        return "trainer" if component.startswith("trainer-") else component


@cache
def profile_schema() -> Schema:
    """Schema of a profile file. The object is shared: do not change it."""
    return build_schema(
        Profile, TrainingConfig, derived=set(DERIVED_TRAINER_KEYS), words=READ_WORDS
    )


def load_profile(name_or_path: str, sets: Sequence[str] = ()) -> tuple[Profile, Path]:
    """Find, read, merge, override and validate a profile; return it and its file.

    Raises:
        UserError: all problems of the file.
    """
    if not name_or_path:
        raise refused(
            [
                Problem(
                    "no profile was given",
                    f"give a path or one of: {', '.join(shipped_profiles())}",
                )
            ]
        )
    path = find_profile(name_or_path)
    with in_words(file_text(path)):
        data, origins = read_merged(path)
        with in_words(SET):
            apply_sets(data, sets, origins)
        return parse_profile(data, origins.main, origins), path


def parse_profile(data: dict[str, Any], file: str, origins: Origins | None = None) -> Profile:
    """Validate each key; `checks` judges later how they fit together.

    Raises:
        UserError: all problems.
    """
    origins = origins or Origins(file)
    # All kinds of problems are collected, so that the user fixes them in one round.
    problems = [
        origins.problem(reason, fix, path, key_text(path, data))
        for path, reason, fix in _unusable_texts(data)
    ]
    profile: Profile | None = None
    try:
        profile = Profile.model_validate(data, strict=True)
    except ValidationError as error:
        problems += problems_of(
            error.errors(include_url=False), data, profile_schema(), origins.problem
        )
    problems += _trainer_problems(data, origins)
    # Cross-checks need a valid profile; they come later, in `checks`.
    if problems or profile is None:
        raise refused(problems, "invalid profile (fix these first; more checks follow)")
    # The model is frozen, except for private attributes.
    profile._origins = origins
    return profile


def _unusable_texts(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str, str]]:
    """Texts that cannot be passed to a program."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        here = (*path, key)
        if isinstance(value, dict | list):
            yield from _unusable_texts(value, here)
        elif isinstance(value, str) and REDACTED in value:
            yield (
                here,
                "was a secret, which atropos-tui does not write to files",
                "put NAME=value into .env and write ${NAME} here, or resume with the profile that "
                "has it: atropos-tui up PROFILE --resume RUN",
            )
        elif isinstance(value, str) and "\0" in value:
            # A NUL ends a string in argv and environ.
            yield here, f"holds a NUL character (got {value_text(value)})", "remove it"


def _trainer_problems(data: dict[str, Any], origins: Origins) -> list[Problem]:
    """Problems that `TrainingConfig` finds in [trainer]. Types are strict, except for
    `READ_WORDS`."""
    section = data.get("trainer")
    if not isinstance(section, dict):
        return []
    problems = [
        origins.problem(
            "is derived from other keys",
            f"set {source} instead",
            ("trainer", key),
            f"trainer.{key}",
        )
        for key, source in DERIVED_TRAINER_KEYS.items()
        if section.get(key) is not None
    ]
    known = {*TrainerSection.model_fields, *DERIVED_TRAINER_KEYS}
    # Fields of TrainingConfig; keys of [trainer] itself are validated above.
    settings = {key: value for key, value in section.items() if key not in known}
    words = {key for key in READ_WORDS if isinstance(settings.get(key), str)}
    mode = MODE_SETTINGS.get(str(data.get("mode", "shared_vllm")), {})
    strict = settings | {
        key: tuple(settings[key]) for key in PAIRS if isinstance(settings.get(key), list)
    }
    for values, is_strict in ((strict, True), (settings, False)):
        try:
            TrainingConfig.model_validate(
                {"model_name": "model", **mode, **values}, strict=is_strict
            )
        except ValidationError as error:
            # The strict pass judges each field except those given as text; the lax pass judges
            # these, and errors of the whole section (empty `loc`).
            errors = [
                item
                for item in error.errors(include_url=False)
                if (bool(item["loc"]) and item["loc"][0] not in words) == is_strict
            ]
            problems += problems_of(errors, data, profile_schema(), origins.problem, ("trainer",))
    return problems
