"""A profile as typed, strict sections: an unknown key is an error, and all problems are reported
together."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from atropos_common.protocol.bridge import SamplingPolicy
from atropos_common.protocol.control import Role
from atropos_common.protocol.trainer_records import HELD_OUT_METRIC, METRIC_KINDS
from atropos_tui.profile.errors import (
    did_you_mean,
    value_text,
)
from atropos_tui.profile.placement import Placement
from atropos_tui.profile.schema import PROGRAM_KEYS
from atropos_tui.profile.spec import (
    AlertSpec,
    ExecCheck,
    HttpCheck,
    LauncherName,
    LogCheck,
    NotifyPolicy,
    Probe,
    RestartPolicy,
    StopPolicy,
    TcpCheck,
    references,
)
from atropos_tui.profile.values import (
    Argv,
    Condition,
    EnvName,
    GpuIndex,
    HostName,
    Module,
    Name,
    Port,
    SbatchOption,
    Scalar,
    Words,
    mistake,
)

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
MOST_RANKS = 64
"""GPUs of one machine, or that share one copy of a model."""
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
    """Check of the start: the others begin when it passes; without `readiness` the component
    is then healthy."""
    readiness: Probe | None = None
    """Check of health: the component is healthy while it passes."""
    liveness: Probe | None = None
    """Check of life: when it fails, the component restarts by its policy."""
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
    """Address to bind. On the loopback only this user and root may call; on any other address
    requests need the run's key."""
    command: Argv | None = None
    """Whole command line instead of the derived one."""


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


AUTO = "auto"
ServersPerGpu = Annotated[
    int,
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 8}, {"const": AUTO}], "default": 1}
    ),
]
VLLM_FRACTION = 0.92
"""Default of vLLM's gpu_memory_utilization."""


# TOML writes a single section as [env] and several as [[env]]; both become a list.
def as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


def engines_per_gpu(data: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Replace `per_gpu = "auto"` in the data of a profile; return it, and the indexes of [[vllm]]
    where it was."""
    sections = as_list(data.get("vllm"))
    if not isinstance(sections, list):
        return data, []
    found = [
        index
        for index, section in enumerate(sections)
        if isinstance(section, dict) and section.get("per_gpu") == AUTO
    ]
    data = data | {"vllm": list(sections)}
    for index in found:
        number = 2 if _shares_one_gpu(data, sections[index]) else 1
        data["vllm"][index] = sections[index] | {"per_gpu": number}
    return data, found


def _shares_one_gpu(data: dict[str, Any], section: dict[str, Any]) -> bool:
    """Return True if all of the stack is in single copy on the only GPU of `section`."""

    def of(name: str, key: str) -> Any:
        table = data.get(name)
        return table.get(key) if isinstance(table, dict) else None

    gpus, args = section.get("gpus"), section.get("args")
    parts = [section.get("tensor_parallel"), section.get("replicas")]
    return (
        data.get("mode", "shared_vllm") == "shared_vllm"
        and len(data["vllm"]) == 1
        and isinstance(gpus, list)
        and len(gpus) == 1
        and of("trainer", "gpus") in (None, [], gpus)
        and all(part in (None, 1) for part in parts)
        and not any("parallel" in str(key) for key in (args if isinstance(args, dict) else {}))
        and of("cluster", "launcher") in (None, "local")
        and data.get("inference_gpus") is None
    )


class EngineSection(ComponentOptions):
    """A vLLM server, or several equal ones."""

    # `plan` derives vLLM flags from these keys; `checks.DERIVED_FLAGS` forbids the same flags in
    # `args`.
    name: Name = "vllm"
    """Name in logs, commands and `depends_on`; several servers are NAME-0, NAME-1 and so on, and
    `depends_on` NAME waits for each."""
    port: Port = 9001
    """Port on this machine; several servers have consecutive ports from here."""
    gpus: list[GpuIndex] = Field(default_factory=list)
    """GPUs by index within CUDA_VISIBLE_DEVICES; empty: all that the process sees. More GPUs than
    one engine needs make several engines. With `node`: GPUs of each of its machines; empty: those
    that no other section names."""
    tensor_parallel: int = Field(1, ge=1, le=MOST_RANKS)
    """GPUs that share one copy of the model."""
    machines: int | None = Field(None, ge=1, le=MOST_NODES)
    """Machines of one server, each with an equal part of its GPUs; default: as few as have
    enough."""
    replicas: int | None = Field(None, ge=1, le=MOST_NODES)
    """Number of equal servers, each with its own GPUs; default: as many as `gpus` suffice for."""
    per_gpu: ServersPerGpu = Field(1, ge=1, le=8)
    """Servers on the same GPUs, each with weights and KV cache of its own. More than one computes
    more tokens per second where the Python of one server is the limit, as with small models. auto:
    two for a model below 2.5 billion parameters in single copy on one GPU, else one."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of the GPU memory for weights and KV cache, of all `per_gpu` servers together;
    default: vLLM's."""
    max_model_len: int | None = Field(None, ge=8)
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
    # Servers that divide `gpu_memory_utilization`, where `per_gpu` no longer says it: in the
    # section of one of them.
    _beside: int = PrivateAttr(1)
    _automatic: bool = PrivateAttr(False)  # `per_gpu` was "auto"

    def flag_key(self, name: str) -> str:
        """Key in `args` that sets `--name`, in the user's spelling."""
        return next((key for key in self.args if key.replace("_", "-") == name), name)

    def profile_key(self, index: int, name: str) -> str:
        """Key of the profile that sets `--name`, in entry `index` of [[vllm]]."""
        return f"vllm.{index}.args.{self.flag_key(name)}"

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
            self._one(
                index,
                count * self.per_gpu,
                {"gpus": self.gpus[index // self.per_gpu * each :][:each]},
            )
            for index in range(count * self.per_gpu)
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

    def mark_automatic(self) -> None:
        """Note that `per_gpu` was "auto"."""
        self._automatic = True

    @property
    def is_automatic(self) -> bool:
        """True if `per_gpu` was "auto"."""
        return self._automatic

    @property
    def memory_flag(self) -> float | None:
        """--gpu-memory-utilization of one server; None: vLLM's default."""
        alone = self.per_gpu * self._beside == 1
        return self.gpu_memory_utilization if alone else round(self.memory_share, 4)

    @property
    def gpu_share(self) -> float:
        """Share of the GPU memory of all servers of the section."""
        return self.gpu_memory_utilization or VLLM_FRACTION

    @property
    def memory_share(self) -> float:
        """Share of the GPU memory of one server."""
        return self.gpu_share / (self.per_gpu * self._beside)

    def _one(self, index: int, count: int, where: dict[str, Any]) -> EngineSection:
        alone = (
            {
                "name": f"{self.name}-{index}",
                "port": self.port + index,
                "replicas": None,
                "per_gpu": 1,
            }
            if count > 1
            else {}
        )
        one = self.model_copy(update=where | alone)
        one._beside = self.per_gpu * self._beside // one.per_gpu
        return one


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


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        inner = _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
        if twice := sorted(flat.keys() & inner.keys()):
            raise mistake("is given twice", "remove one of the two spellings", twice[0])
        flat |= inner
    return flat
