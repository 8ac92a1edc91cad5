"""A profile as typed sections. Strict: an unknown key is an error, and every problem is reported at once.

`load_profile` reads a path or the name of a shipped profile with what it extends, applies `--set KEY=VALUE` and returns
a `Profile`, or raises `UserError` that lists file, key, reason and fix. A profile says what the user wants; `plan.py`
derives the rest.
"""

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

from atropos_common.bridge import SamplingPolicy
from atropos_common.control import Role
from atropos_common.records import HELD_OUT_METRIC, METRIC_KINDS
from atropos_common.run_dir import is_safe_name
from atropos_tui.errors import Problem
from atropos_tui.profile import sbatch
from atropos_tui.profile.errors import did_you_mean, in_words, key_text, problems_of, refused, value_text
from atropos_tui.profile.load import SET, Origins, apply_sets, file_text, find_profile, read_merged, shipped_profiles
from atropos_tui.profile.redact import REDACTED
from atropos_tui.profile.schema import KeyPath, Schema, build_schema
from atropos_tui.profile.seats import Seat, Want, host_names, part_names, seat_engines
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

__all__ = ["Profile", "apply_sets", "find_profile", "load_profile", "parse_profile", "shipped_profiles"]


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
"""Trainer fields that the plan derives, and the profile key to set instead."""


MODE_SETTINGS: dict[str, dict[str, Any]] = {
    "broadcast": {"weight_bridge_mode": "shared_vllm", "use_shared_memory": True},
    **{mode: {"weight_bridge_mode": mode} for mode in get_args(WeightBridgeMode)},
}
"""Trainer fields that select a mode."""


READ_WORDS = {"betas", "train_layer_indices", "lora_target_modules", "lora_layer_indices", "lora_modules_to_save"}
"""Trainer fields that also read text: "0.9 0.95", "20-31", "q_proj v_proj"."""
PAIRS = {"betas"}
"""Trainer fields that are tuples, which TOML writes as lists."""


def mistake(reason: str, fix: str, at: str = "") -> PydanticCustomError:
    """What a validator raises: the reason, the way out, and where below the validated key (`checks[0].url`)."""
    return PydanticCustomError("mistake", "{reason}", {"reason": reason, "fix": fix, "at": at})


def _name(value: str) -> str:
    if not is_safe_name(value):
        raise mistake(
            f"cannot be a name (got {value_text(value)})",
            "use letters, digits, dot, dash or underscore: at most 64, and a letter or digit first",
        )
    return value


def _variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise mistake("cannot be the name of a variable", "use letters, digits and underscore, and no digit first")
    return value


def _module(value: str) -> str:
    if not references(value) and not all(part.isidentifier() for part in value.split(".")):
        raise mistake(
            f"cannot be a module (got {value_text(value)})",
            "write it as for python -m, such as atropos_envs.gsm8k_server; a file goes into script",
        )
    return value


def _argv(value: list[str]) -> list[str]:
    if not value[0].strip():
        raise mistake("names no program", 'begin with the program, such as ["python", "-m", "http.server"]')
    return value


def _host(value: str) -> str:
    value = re.sub(r"(^|@)\[([0-9A-Fa-f:.%\w]*:[0-9A-Fa-f:.%\w]*)\]$", r"\1\2", value)  # an address as in a URL
    if not re.fullmatch(r"(?:::(?=[0-9A-Fa-f])|[A-Za-z0-9_])[A-Za-z0-9_.@:%-]*", value):
        raise mistake(f"no host (got {value_text(value)})", "give a name or an address, such as 10.0.0.2 or me@box2")
    return value


def _words(value: str) -> str:
    if not value.isprintable():
        raise mistake(f"holds control characters (got {value_text(value)})", "write it in one line, without any")
    return value


def _sbatch_option(value: str) -> str:
    if found := sbatch.problem(value):
        raise mistake(*found)
    return value


Port = Annotated[int, Field(ge=1, le=65535)]
GpuIndex = Annotated[int, Field(ge=0)]
Condition = Literal["started", "healthy", "completed"]
Scalar = bool | int | float | str
Name = Annotated[str, AfterValidator(_name), Field(json_schema_extra={"pattern": r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"})]
EnvName = Annotated[str, AfterValidator(_variable)]
Module = Annotated[str, AfterValidator(_module)]
Argv = Annotated[list[str], Field(min_length=1), AfterValidator(_argv)]
HostName = Annotated[str, AfterValidator(_host)]
Words = Annotated[str, Field(min_length=1), AfterValidator(_words)]
SbatchOption = Annotated[Words, AfterValidator(_sbatch_option)]
"""What becomes part of a line of a batch script, where another line would be a command."""

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
MOST_RANKS = 64
"""Of a trainer, parts of an engine, and GPUs of engines: more are no single machine's."""
MEETING_PORT = 29501
"""vLLM's own --master-port."""
MOST_NODES = 1024
"""Machines of a stack; its engines, and its trainer's ranks."""


class Section(BaseModel):
    """The base of every table of a profile."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def _check_probe(probe: Probe) -> Probe:
    """Let a probe pass whose checks can be made."""
    for index, check in enumerate(probe.checks):
        at = f"checks[{index}]"
        match check:
            case HttpCheck(url=url) if not references(url) and not re.match(r"https?://[^/\s]", url):
                raise mistake(f"no address (got {value_text(url)})", "begin with http:// or https://", f"{at}.url")
            case TcpCheck(port=port) if not 1 <= port <= 65535:
                raise mistake(f"out of range (got {port})", "give a whole number from 1 to 65535", f"{at}.port")
            case ExecCheck(command=command) if not command or not command[0].strip():
                raise mistake("names no program", 'begin with the program, such as ["test", "-e", "x"]', at)
            case LogCheck(pattern=pattern):
                try:
                    re.compile(pattern)
                except (re.error, OverflowError) as error:
                    reason = f"no regular expression: {error} (got {value_text(pattern)})"
                    fix = "correct it, or escape what is meant literally"
                    raise mistake(reason, fix, f"{at}.pattern") from None
    return probe


class ClusterSection(Section):
    """Several machines: what brings the components there. Without this table all run on this one."""

    launcher: LauncherName = "local"
    """slurm: srun inside an allocation, which `up` asks for itself. ssh: hosts that let this user in without a
    question. kubernetes: pods, by kubectl exec. ray: the nodes of a Ray cluster. local: all here."""
    python: str | None = Field(None, min_length=1)
    """The interpreter on every node; default: the path of the one that runs atropos-tui."""
    time: Words | None = None
    """slurm: the time limit, such as 04:00:00; default: the partition's."""
    partition: Words | None = None
    """slurm: of the nodes that name none of their own."""
    account: Words | None = None
    """slurm: who pays."""
    sbatch: list[SbatchOption] = Field(default_factory=list)
    """slurm: further options, such as "--qos=high", one each; those about GPUs count for nodes with GPUs."""
    requeue: bool = True
    """slurm: at the time limit or after a preemption the run saves, waits for its turn again and goes on."""
    ssh: list[str] = Field(default_factory=list)
    """ssh: further options, one word each, such as ["-p", "2222"]."""
    kubectl: list[str] = Field(default_factory=list)
    """kubernetes: further options, one word each, such as ["-n", "training"]."""
    address: str | None = Field(None, min_length=1)
    """ray: where the cluster is, as in RAY_ADDRESS; default: what Ray finds."""


class NodeSection(Section):
    """A machine, or several that are alike."""

    name: Name
    """What `node` of a component says; of several the second is NAME-2."""
    count: int = Field(1, ge=1, le=MOST_NODES)
    """How many."""
    gpus: int = Field(0, ge=0, le=MOST_RANKS)
    """GPUs of each that the stack takes."""
    hosts: list[HostName] = Field(default_factory=list)
    """ssh, ray, kubernetes: `count` names, as the launcher knows them, such as "user@10.0.0.2"; slurm chooses them."""
    addresses: list[HostName] = Field(default_factory=list)
    """What the other nodes dial, one for each of `hosts`; default: the host's name."""
    partition: Words | None = None
    """slurm: where these nodes come from."""
    constraint: Words | None = None
    """slurm: what they must have, such as "h100"."""
    sbatch: list[SbatchOption] = Field(default_factory=list)
    """slurm: further options for these nodes alone, such as "--cpus-per-task=4", one each."""


class ComponentOptions(Section):
    """What every component takes; whatever is left out keeps the default of its role."""

    node: Name | None = None
    """Name of the [[node]] where it runs; default: the first, which is the supervisor's own."""

    env: dict[EnvName, str] = Field(default_factory=dict)
    """Environment variables; `${VAR}` is looked up when the process starts and never written to a file."""
    cwd: str | None = None
    """Working directory; default: where atropos-tui was started."""
    depends_on: dict[str, Condition] | None = None
    """Other components, each with the state that it must reach before this one starts."""
    startup: Probe | None = None
    """Gates the other probes; without `readiness` the component is healthy once this passed."""
    readiness: Probe | None = None
    """Healthy while it passes."""
    liveness: Probe | None = None
    """When it fails, the component is restarted by its policy."""
    restart: RestartPolicy | None = None
    """When a process that ended by itself is started again."""
    stop: StopPolicy | None = None
    """How the component is stopped."""
    start_timeout_s: float | None = Field(None, gt=0)
    """Seconds; not healthy by then, the run ends with exit code 4."""

    @field_validator("startup", "readiness", "liveness")
    @classmethod
    def _probe(cls, probe: Probe | None) -> Probe | None:
        return _check_probe(probe) if probe else None


class ApiSection(ComponentOptions):
    """run-api, which hands rollouts from the environments to the trainer."""

    port: Port = 8000
    """Port on this machine."""
    host: str = "127.0.0.1"
    """Address that it binds; it has no authentication, so only this machine's own."""
    command: Argv | None = None
    """Replaces the whole command line."""


class EnvSection(ComponentOptions):
    """An environment: one of `module`, `script` or `command`."""

    name: Name = "env"
    """Its name in logs, commands and `depends_on`."""
    module: Module | None = None
    """Python module to run, such as atropos_envs.gsm8k_server."""
    script: str | None = Field(None, min_length=1)
    """Python file to run, with the `serve` command of atroposlib's environments."""
    command: Argv | None = None
    """Any other program: the whole command line, with nothing derived added."""
    args: dict[str, Scalar | list[Scalar]] = Field(default_factory=dict)
    """Flags of the environment's `serve`, such as `env.group_size = 8` or `openai.timeout = 600`."""
    config: str | None = Field(None, min_length=1)
    """A YAML file, passed as `--config`."""
    weight: float | None = Field(None, gt=0)
    """Share of every batch beside other environments (default: 1). Batches wait for a slow one."""
    engine: Name | None = None
    """Name of the [[vllm]] that generates its rollouts; default: the first, which the trainer feeds."""
    refill: bool = True
    """A group whose scores came out equal is replaced at once, and as many more begun as will come out so."""

    @field_validator("args", mode="before")
    @classmethod
    def _flatten(cls, value: Any) -> Any:
        """Accept TOML tables (`env.group_size = 8` is one) beside dotted strings."""
        return _flat(value) if isinstance(value, dict) else value

    @field_validator("args")
    @classmethod
    def _group_size(cls, args: dict[str, Any]) -> dict[str, Any]:
        """The one flag that the plan reads too."""
        size = args.get("env.group_size", 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise mistake(
                f"wrong value (got {value_text(size)})", "give a whole number of at least 1", "env.group_size"
            )
        return args

    @model_validator(mode="after")
    def _one_program(self) -> EnvSection:
        count = sum(part is not None for part in (self.module, self.script, self.command))
        if count != 1:
            raise mistake(
                "says more than one program to run" if count else "does not say what to run",
                "set exactly one of module, script and command",
            )
        return self


class EngineSection(ComponentOptions):
    """A vLLM server, or several that are alike."""

    # `plan` makes flags of these; a flag that may then not stand in `args` besides is in `checks.DERIVED_FLAGS`.
    name: Name = "vllm"
    """Its name in logs, commands and `depends_on`; of several NAME-0, NAME-1 and so on."""
    port: Port = 9001
    """Port on this machine; of several the first one's, and the next ones' follow."""
    gpus: list[GpuIndex] = Field(default_factory=list)
    """GPUs by index; empty: what the process sees by itself. More than one engine takes make several engines. With
    `node`, of each of its machines; empty: those that nobody names."""
    tensor_parallel: int = Field(1, ge=1, le=MOST_RANKS)
    """GPUs that share one model."""
    machines: int | None = Field(None, ge=1, le=MOST_NODES)
    """Machines that one server is spread over, each with as many of its GPUs; default: as few as have them."""
    replicas: int | None = Field(None, ge=1, le=MOST_NODES)
    """Servers of this kind, each with GPUs of its own; default: as many as `gpus` are enough for."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of the GPU's memory for weights and KV cache; default: vLLM's."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest context in tokens, prompt included; default: the model's."""
    model: str | None = Field(None, min_length=1)
    """Only for an engine that the trainer does not feed, such as a judge; default: the stack's."""
    dtype: str | None = None
    """Type of the weights; default: the trainer's."""
    sampling: SamplingPolicy = "plain"
    """Options of rollouts that the ratio cannot follow (top-p, top-k, min-p, penalties). plain: left out, said and
    counted. as_asked: taken, with logprobs of the whole distribution. refuse: such requests fail."""
    open: bool = False
    """Let other users of this machine ask for completions without the run's key."""
    args: dict[str, Scalar] = Field(default_factory=dict)
    """Any flag of vLLM, without the dashes; `true` is a bare flag."""

    def flag_key(self, name: str) -> str:
        """The key in `args` that sets `--name`, as the user wrote it: for vLLM `max_num_seqs` is `max-num-seqs`."""
        return next((key for key in self.args if key.replace("_", "-") == name), name)

    def flag(self, name: str) -> Scalar | None:
        """The value of `--name`, None where it is not set."""
        return self.args.get(self.flag_key(name))

    def flag_number(self, name: str, default: int) -> int:
        """The value of `--name` as a whole number: 1k is 1,000, 1K is 1,024. What cannot be read, vLLM refuses."""
        value = self.flag(name)
        match = None if isinstance(value, bool) else _NUMBER.fullmatch(str(value).strip())
        if match is None:
            return default
        base = 1000 if match[2].islower() else 1024
        return int(float(match[1]) * base ** _POWER[match[2].lower()])

    @property
    def gpus_per_copy(self) -> int:
        """GPUs that share one copy of the engine's weights."""
        return self.tensor_parallel * self.flag_number("pipeline-parallel-size", 1)

    @property
    def gpus_needed(self) -> int:
        """GPUs that one engine takes: every copy of its weights."""
        return self.gpus_per_copy * self.flag_number("data-parallel-size", 1)

    @property
    def engines(self) -> list[EngineSection]:
        """The servers that this section stands for, each as a section of its own."""
        count = self.replicas or max(1, len(self.gpus) // self.gpus_needed)
        each = len(self.gpus) // count
        return [self._one(index, count, {"gpus": self.gpus[index * each :][:each]}) for index in range(count)]

    def seated(self, engines: list[list[Seat]]) -> list[tuple[EngineSection, list[Seat]]]:
        """As `engines`, on several machines: `node` and `gpus` of each are those of its first seat."""
        return [
            (self._one(index, len(engines), {"node": seats[0].node, "gpus": seats[0].gpus} if seats else {}), seats)
            for index, seats in enumerate(engines)
        ]

    def _one(self, index: int, count: int, where: dict[str, Any]) -> EngineSection:
        alone = {"name": f"{self.name}-{index}", "port": self.port + index, "replicas": None} if count > 1 else {}
        return self.model_copy(update=where | alone)


class TrainerSection(ComponentOptions):
    """The trainer: options of a component, and every field of `TrainingConfig` that is not derived."""

    model_config = ConfigDict(extra="allow")
    command: Argv | None = None
    """Another trainer in the place of ours: its whole command line. It takes none of our settings, and finds run-api
    and engines in its environment (docs/trainers.md)."""
    gpus: list[GpuIndex] = Field(default_factory=list)
    """GPUs by index, one for each rank; in single copy the engine's own, which is the default. With `node`, of each of
    its machines; empty: all that no engine has."""
    processes: int | None = Field(None, ge=1, le=MOST_NODES)
    """Ranks that train together; default: as many as `gpus`, else one."""
    memory: Literal["auto", "speed", "fit"] = "auto"
    """What the plan may set, of what this table leaves open, to fit the GPU's memory: `plan` says what and why. auto:
    nothing where all fits, else what costs least speed. speed: nothing. fit: as little of the GPU as can be."""

    @property
    def settings(self) -> dict[str, Any]:
        """The fields meant for `TrainingConfig`, unchecked."""
        return dict(self.model_extra or {})


class PrepareSection(Section):
    """A one-shot step before everything else."""

    name: Name = "prepare"
    """Its name in logs and commands."""
    command: Argv
    """Program and arguments."""
    creates: str | None = None
    """Skipped when this path exists."""
    env: dict[EnvName, str] = Field(default_factory=dict)
    """Environment variables."""


class ExtraSection(ComponentOptions):
    """Any further process."""

    role: Annotated[Role, BeforeValidator(lambda v: Role(v) if v in list(Role) else v)] = Role.OTHER
    """What it is for: decides who restarts with whom."""
    command: Argv
    """Program and arguments."""
    port: Port | None = None
    """The port it listens on: checked to be free, and shown."""


class NotifySection(NotifyPolicy):
    """Tell someone who is not looking."""

    on: Annotated[
        tuple[Literal["failed", "mismatch", "alert", "done"], ...],
        BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v),
    ] = NotifyPolicy().on
    """The occasions: a run that failed, weights that do not match, an [[alert]], a run that is done."""

    @field_validator("webhook")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        """Let an http(s) address pass, or a reference to a variable that holds one."""
        if url is not None and not re.fullmatch(r"(https?://[^/\s]|\$\{\w+\})\S*", url):
            raise mistake(
                "no web address",
                'give https://..., or "${VAR}" with the address in .env, which keeps a secret one out of files',
            )
        return url


class AlertSection(AlertSpec):
    """Tell when a metric of the records leaves its bounds."""

    @field_validator("metric")
    @classmethod
    def _known(cls, metric: str) -> str:
        if metric not in METRIC_KINDS and not metric.partition(HELD_OUT_METRIC)[2]:
            meant = did_you_mean(metric, METRIC_KINDS)
            raise mistake(
                f"no such metric (got {value_text(metric)})",
                f"{meant}docs/telemetry.md has every metric; a held-out accuracy is eval/SPLIT, such as eval/held_out",
            )
        return metric

    @model_validator(mode="after")
    def _bounded(self) -> AlertSection:
        if all(bound is None for bound in (self.below, self.above, self.slope, self.z)):
            raise mistake("it has no condition", "give below, above, slope or z")
        if self.slope == 0:
            raise mistake("a slope of 0 is no change", "give the change a step: above 0 for a rise, below for a fall")
        return self


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
    """Name of the stack: the first part of its runs' names."""
    mode: Mode = "shared_vllm"
    """How weights reach vLLM."""
    model: str = Field(min_length=1)
    """A directory or a hub id; one place, handed to every component."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seed of every random generator."""
    inference_gpus: int | None = Field(None, ge=1, le=MOST_RANKS)
    """The machine's first so many GPUs are the engines', and all others the trainer's, in the place of `gpus` there."""
    cluster: ClusterSection | None = None
    """Several machines: what brings the components there."""
    node: Annotated[list[NodeSection], BeforeValidator(_as_list)] = Field(default_factory=list)
    """The machines, as [[node]], the supervisor's own first."""
    api: ApiSection = ApiSection()
    """run-api, which hands rollouts from the environments to the trainer."""
    env: Annotated[list[EnvSection], BeforeValidator(_as_list)] = Field(min_length=1)
    """The environment; several as [[env]], each with a name."""
    vllm: Annotated[list[EngineSection], BeforeValidator(_as_list)] = Field([EngineSection()], min_length=1)
    """The vLLM server; several as [[vllm]], each with a name."""
    trainer: TrainerSection = TrainerSection()
    """The trainer."""
    prepare: Annotated[list[PrepareSection], BeforeValidator(_as_list)] = Field(default_factory=list)
    """One-shot steps, in order, before everything else."""
    component: dict[Name, ExtraSection] = Field(default_factory=dict)
    """Any further processes, by name."""
    logs: LogPolicy = LogPolicy()
    """How much of the components' output is kept."""
    notify: NotifySection = NotifySection()
    """Tell someone who is not looking."""
    metrics: MetricsPolicy = MetricsPolicy()
    """Figures for Prometheus."""
    alert: Annotated[list[AlertSection], BeforeValidator(_as_list)] = Field(default_factory=list)
    """Tell when a metric leaves its bounds; several as [[alert]]."""
    survive: bool = False
    """Components outlive a supervisor that is killed; `up --resume RUN` adopts them."""
    _origins: Origins = PrivateAttr(default_factory=Origins)

    @property
    def origins(self) -> Origins:
        """Which file each key comes from."""
        return self._origins

    @property
    def is_spread(self) -> bool:
        """Whether it is for several machines."""
        return self.cluster is not None and self.cluster.launcher != "local"

    @property
    def machines(self) -> dict[str, int]:
        """GPUs of each machine, by its name, the supervisor's own first; empty where there is only that."""
        if not self.is_spread:
            return {}
        return {host: group.gpus for group in self.node for host in host_names(group.name, group.count)}

    def hosts_named(self, node: str | None) -> list[str]:
        """The machines that a `node` key means: all of a [[node]], or one by its own name; without it the first. None
        where there is no such name."""
        if node is None:
            return list(self.machines)[:1]
        group = next((group for group in self.node if group.name == node), None)
        return host_names(node, group.count) if group else [host for host in self.machines if host == node]

    @property
    def seated(self) -> list[list[tuple[EngineSection, list[Seat]]]]:
        """The servers of each [[vllm]], each as a section of its own, with its machine, if there are several."""
        read = (self.vllm, self.node, self.trainer, self.cluster)
        # Found once: hundreds of machines are asked for hundreds of times. No private attribute, which would count
        # when profiles are compared.
        known: tuple[Any, list[list[tuple[EngineSection, list[Seat]]]]] | None = self.__dict__.get("_seats")
        if known is None or any(old is not new for old, new in zip(known[0], read, strict=True)):
            known = self.__dict__["_seats"] = read, self._seated()
        return known[1]

    def _seated(self) -> list[list[tuple[EngineSection, list[Seat]]]]:
        if not self.is_spread:
            return [[(engine, []) for engine in section.engines] for section in self.vllm]
        wants = [
            Want(self.hosts_named(each.node), each.gpus_needed, each.machines, each.replicas, each.gpus)
            for each in self.vllm
        ]
        named = dict.fromkeys(self.hosts_named(self.trainer.node), self.trainer.gpus)
        found = seat_engines(wants, self.machines, named)
        return [section.seated(engines) for section, engines in zip(self.vllm, found, strict=True)]

    @property
    def engines(self) -> list[EngineSection]:
        """Every server, each as a section of its own."""
        return [engine for section in self.seated for engine, _ in section]

    @property
    def meeting_ports(self) -> dict[str, int]:
        """Of each server over several machines, by its name: the port on the first at which its parts meet."""
        found: dict[str, int] = {}
        for section, made in zip(self.vllm, self.seated, strict=True):
            port = section.flag_number("master-port", MEETING_PORT)
            for engine in [engine for engine, seats in made if len(seats) > 1]:
                while port in found.values():
                    port += 1
                found[engine.name] = port
        return found

    @property
    def parts(self) -> dict[str, ComponentOptions]:
        """The sections of all components but one-shot steps, by their keys."""
        return {
            "api": self.api,
            **{f"env.{index}": part for index, part in enumerate(self.env)},
            **{f"vllm.{index}": part for index, part in enumerate(self.vllm)},
            **{f"component.{name}": part for name, part in self.component.items()},
            "trainer": self.trainer,
        }

    def used_ports(self) -> list[tuple[str, int]]:
        """Every port of the profile with its key."""
        return [
            ("api.port", self.api.port),
            *((f"vllm.{i}.port", engine.port) for i, section in enumerate(self.seated) for engine, _ in section),
            *((f"{self.section_of(name)}.args.master-port", port) for name, port in self.meeting_ports.items()),
            *((f"component.{name}.port", part.port) for name, part in self.component.items() if part.port),
            *([("metrics.port", self.metrics.port)] if self.metrics.port else []),
        ]

    def short_key(self, key: str) -> str:
        """`vllm.0.port` as `vllm.port` where there is one engine."""
        return key.replace("vllm.0.", "vllm.") if len(self.vllm) == 1 else key

    def section_of(self, component: str) -> str:
        """The key of the section that describes a component: `env.0`, `component.x`, `trainer`."""
        for index, seated in enumerate(self.seated):
            if component in [name for engine, seats in seated for name in part_names(engine.name, len(seats))]:
                return f"vllm.{index}"
        for key in ("env", "prepare"):
            for index, part in enumerate(getattr(self, key)):
                if component == part.name:
                    return f"{key}.{index}"
        if component in self.component:
            return f"component.{component}"
        return "trainer" if component.startswith("trainer-") else component


@cache
def profile_schema() -> Schema:
    """The JSON Schema of a profile file; one object, to be read only."""
    return build_schema(Profile, TrainingConfig, derived=set(DERIVED_TRAINER_KEYS), words=READ_WORDS)


def load_profile(name_or_path: str, sets: Sequence[str] = ()) -> tuple[Profile, Path]:
    """Find, read, merge, override and validate. Returns the profile and its file.

    Raises:
        UserError: with every problem, whatever the file holds.
    """
    if not name_or_path:
        raise refused([Problem("no profile was given", f"give a path or one of: {', '.join(shipped_profiles())}")])
    path = find_profile(name_or_path)
    with in_words(file_text(path)):
        data, origins = read_merged(path)
        with in_words(SET):
            apply_sets(data, sets, origins)
        return parse_profile(data, origins.main, origins), path


def parse_profile(data: dict[str, Any], file: str, origins: Origins | None = None) -> Profile:
    """Validate each key; all problems at once. How the keys fit together is for `checks` to say.

    Args:
        data: as TOML gives it.
        file: what problems name where `origins` knows no better.

    Raises:
        UserError: with every problem.
    """
    origins = origins or Origins(file)
    problems = [origins.problem(reason, fix, path, key_text(path, data)) for path, reason, fix in _unusable_texts(data)]
    profile: Profile | None = None
    try:
        profile = Profile.model_validate(data, strict=True)
    except ValidationError as error:
        problems += problems_of(error.errors(include_url=False), data, profile_schema(), origins.problem)
    problems += _trainer_problems(data, origins)
    if problems or profile is None:
        raise refused(problems, "invalid profile (fix these first; more checks follow)")
    profile._origins = origins
    return profile


def _unusable_texts(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str, str]]:
    """Path, reason and fix of each text of any key that no program could be given."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        here = (*path, key)
        if isinstance(value, dict | list):
            yield from _unusable_texts(value, here)
        elif isinstance(value, str) and REDACTED in value:
            yield (
                here,
                "was a secret, and secrets are not written to files",
                "put NAME=value into .env and write ${NAME} here, or go on with the profile that has it: "
                "atropos-tui up PROFILE --resume RUN",
            )
        elif isinstance(value, str) and "\0" in value:
            yield here, f"holds a NUL character (got {value_text(value)})", "take it out"


def _trainer_problems(data: dict[str, Any], origins: Origins) -> list[Problem]:
    """What TrainingConfig says of [trainer]; types as strict as elsewhere, but for fields that read words."""
    section = data.get("trainer")
    if not isinstance(section, dict):
        return []
    problems = [
        origins.problem("is derived from the rest", f"set {source} instead", ("trainer", key), f"trainer.{key}")
        for key, source in DERIVED_TRAINER_KEYS.items()
        if section.get(key) is not None
    ]
    known = {*TrainerSection.model_fields, *DERIVED_TRAINER_KEYS}
    settings = {key: value for key, value in section.items() if key not in known}
    words = {key for key in READ_WORDS if isinstance(settings.get(key), str)}
    mode = MODE_SETTINGS.get(str(data.get("mode", "shared_vllm")), {})
    strict = settings | {key: tuple(settings[key]) for key in PAIRS if isinstance(settings.get(key), list)}
    for values, is_strict in ((strict, True), (settings, False)):
        try:
            TrainingConfig.model_validate({"model_name": "model", **mode, **values}, strict=is_strict)
        except ValidationError as error:
            # The strict reading judges each field but those given in words; the other one these, and combinations.
            errors = [
                item
                for item in error.errors(include_url=False)
                if (bool(item["loc"]) and item["loc"][0] not in words) == is_strict
            ]
            problems += problems_of(errors, data, profile_schema(), origins.problem, ("trainer",))
    return problems
