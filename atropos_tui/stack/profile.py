"""TOML to a typed profile. Strict: an unknown key is an error, and every problem is reported at once.

`load_profile` reads a path or the name of a shipped profile with what it extends, applies `--set KEY=VALUE` and returns
a `Profile`, or raises `UserError` that lists file, key, reason and fix. A profile says what the user wants; `plan.py`
derives the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from atropos_tui.errors import Problem
from atropos_tui.stack.extends import Origins, check_nesting, find_profile, read_merged, shipped_profiles
from atropos_tui.stack.impossible import impossible
from atropos_tui.stack.notify_policy import NotifyPolicy
from atropos_tui.stack.overrides import apply_sets
from atropos_tui.stack.schema import Schema, build_schema
from atropos_tui.stack.shown import key_text, shown
from atropos_tui.stack.spec import LogPolicy, Probe, RestartPolicy, StopPolicy
from atropos_tui.stack.values import Argv, EnvName, Module, Name, PathText, check_probe, check_webhook
from atropos_tui.stack.wording import mistake, problems_of, refused
from trainer_core.config import TrainingConfig
from trainer_core.contracts.control import Role

__all__ = ["Profile", "apply_sets", "find_profile", "load_profile", "parse_profile", "shipped_profiles"]

Mode = Literal["none", "shared_vllm", "broadcast", "lora_only", "lora_restart"]

DERIVED_TRAINER_KEYS = {
    "model_name": "model",
    "weight_bridge_mode": "mode",
    "single_copy": "mode",
    "use_shared_memory": "mode",
    "vllm_port": "vllm.port",
    "gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_gpu": "vllm.gpus",
    "max_model_len": "vllm.max_model_len",
    "vllm_config_path": "mode",
    "atropos_url": "api.port",
    "seed": "seed",
}
"""Trainer fields that the plan derives, and the profile key to set instead."""


READ_WORDS = {"betas", "train_layer_indices", "lora_target_modules", "lora_layer_indices"}
"""Trainer fields that also read text: "0.9 0.95", "20-31", "q_proj v_proj"."""
PAIRS = {"betas"}
"""Trainer fields that are tuples, which TOML writes as lists."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


Port = Annotated[int, Field(ge=1, le=65535)]
Gpu = Annotated[int, Field(ge=0)]
Condition = Literal["started", "healthy", "completed"]
Scalar = bool | int | float | str


class ComponentOptions(Section):
    """What every component takes; whatever is left out keeps the default of its role."""

    env: dict[EnvName, str] = Field(default_factory=dict)
    """Environment variables; `${VAR}` is looked up when the process starts and never written to a file."""
    cwd: PathText | None = None
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
        return check_probe(probe) if probe else None


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
    script: PathText | None = Field(None, min_length=1)
    """Python file to run, with the `serve` command of atroposlib's environments."""
    command: Argv | None = None
    """Any other program: the whole command line, with nothing derived added."""
    args: dict[str, Scalar | list[Scalar]] = Field(default_factory=dict)
    """Flags of the environment's `serve`, such as `env.group_size = 8` or `openai.timeout = 600`."""
    config: PathText | None = Field(None, min_length=1)
    """A YAML file, passed as `--config`."""
    weight: float | None = Field(None, gt=0)
    """Share of a batch beside other environments."""
    engine: Name | None = None
    """Name of the [[vllm]] that generates its rollouts; default: the first, which the trainer feeds."""

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
            raise mistake(f"wrong value (got {shown(size)})", "give a whole number of at least 1", "env.group_size")
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
    """A vLLM server."""

    name: Name = "vllm"
    """Its name in logs, commands and `depends_on`."""
    port: Port = 9001
    """Port on this machine."""
    gpus: list[Gpu] = Field(default_factory=list)
    """GPUs by index; empty: what the process sees by itself."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that share one model."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of the GPU's memory for weights and KV cache; default: vLLM's."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest context in tokens, prompt included; default: the model's."""
    model: PathText | None = Field(None, min_length=1)
    """Only for an engine that the trainer does not feed, such as a judge; default: the stack's."""
    dtype: str | None = None
    """Type of the weights; default: the trainer's."""
    args: dict[str, Scalar] = Field(default_factory=dict)
    """Any flag of vLLM, without the dashes; `true` is a bare flag."""


class TrainerSection(ComponentOptions):
    """The trainer: options of a component, and every field of `TrainingConfig` that is not derived."""

    model_config = ConfigDict(extra="allow")
    gpus: list[Gpu] = Field(default_factory=list)
    """GPUs by index; in single copy the engine's own, which is the default."""
    processes: int = Field(1, ge=1, le=1)
    """Trainer processes; this version runs one."""

    @property
    def settings(self) -> dict[str, Any]:
        """The fields meant for `TrainingConfig`, unchecked."""
        return dict(self.model_extra or {})


class PrepareSection(Section):
    """A one-shot step before everything else."""

    name: Name = "prepare"
    """Its name in logs and commands."""
    command: Argv
    """Program and arguments; `python` is the interpreter that runs atropos-tui."""
    creates: PathText | None = None
    """Skipped when this path exists."""
    env: dict[EnvName, str] = Field(default_factory=dict)
    """Environment variables."""


class ExtraSection(ComponentOptions):
    """Any further process."""

    role: Annotated[Role, BeforeValidator(lambda v: Role(v) if v in list(Role) else v)] = Role.OTHER
    """What it is for: decides who restarts with whom."""
    command: Argv
    """Program and arguments; `python` is the interpreter that runs atropos-tui."""
    port: Port | None = None
    """The port it listens on: checked to be free, and shown."""


class NotifySection(NotifyPolicy):
    """Tell someone who is not looking."""

    on: Annotated[
        tuple[Literal["failed", "mismatch", "done"], ...],
        BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v),
    ] = NotifyPolicy().on
    """The occasions: a run that failed, weights that do not match, a run that is done."""

    _webhook = field_validator("webhook")(check_webhook)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


class Profile(Section):
    """One runnable stack: run-api, environments, vLLM servers and the trainer."""

    name: Name
    """Name of the stack: the first part of its runs' names."""
    mode: Mode = "shared_vllm"
    """How weights reach vLLM."""
    model: PathText = Field(min_length=1)
    """A directory or a hub id; one place, handed to every component."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seed of every random generator."""
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
    survive: bool = False
    """Components outlive a supervisor that is killed; `up --resume RUN` adopts them."""
    _origins: Origins = PrivateAttr(default_factory=Origins)

    @property
    def origins(self) -> Origins:
        """Which file each key comes from."""
        return self._origins

    def section_of(self, component: str) -> str:
        """The key of the section that describes a component: `env.0`, `component.x`, `trainer`."""
        for key in ("env", "vllm", "prepare"):
            for index, part in enumerate(getattr(self, key)):
                if part.name == component:
                    return f"{key}.{index}"
        return f"component.{component}" if component in self.component else component


@cache
def profile_schema() -> Schema:
    """The JSON Schema of a profile file; one object, to be read only."""
    return build_schema(Profile, derived=set(DERIVED_TRAINER_KEYS), words=READ_WORDS)


def parse_profile(data: dict[str, Any], file: str, origins: Origins | None = None) -> Profile:
    """Validate; all problems at once.

    Args:
        data: as TOML gives it.
        file: what problems name where `origins` knows no better.

    Raises:
        UserError: with every problem.
    """
    origins = origins or Origins(file)
    check_nesting(data, file)
    faults = list(impossible(data))
    problems = [Problem(reason, fix, origins.of(path), key_text(path, data)) for path, reason, fix in faults]
    errors: list[Problem] = []
    profile: Profile | None = None
    try:
        profile = Profile.model_validate(data, strict=True)
    except ValidationError as error:
        errors += problems_of(error.errors(include_url=False), data, profile_schema(), origins)
    errors += _trainer_problems(data, origins)
    told = {problem.key for problem in problems}
    problems += [problem for problem in errors if problem.key not in told]
    if problems or profile is None:
        from atropos_tui.stack.remainder import remaining_problems  # whose checks need this module

        told = {problem.key for problem in problems}
        rest = remaining_problems(data, [path for path, *_ in faults], origins)
        raise refused([*problems, *(problem for problem in rest if problem.key not in told)])
    profile._origins = origins
    return profile


def load_profile(name_or_path: str, sets: Sequence[str] = ()) -> tuple[Profile, Path]:
    """Find, read, merge, override and validate. Returns the profile and its file."""
    if not name_or_path:
        raise refused([Problem("no profile was given", f"give a path or one of: {', '.join(shipped_profiles())}")])
    path = find_profile(name_or_path)
    data, origins = read_merged(path)
    apply_sets(data, sets, origins)
    return parse_profile(data, origins.main, origins), path


def _trainer_problems(data: dict[str, Any], origins: Origins) -> list[Problem]:
    """What TrainingConfig says of [trainer]; types as strict as elsewhere, but for fields that read words."""
    section = data.get("trainer")
    if not isinstance(section, dict):
        return []
    problems = [
        Problem("is derived from the rest", f"set {source} instead", origins.of(("trainer", key)), f"trainer.{key}")
        for key, source in DERIVED_TRAINER_KEYS.items()
        if section.get(key) is not None
    ]
    for items in _trainer_readings(section):
        problems += problems_of(items, data, profile_schema(), origins, ("trainer",)) if items else []
    return problems


def trainer_errors(data: dict[str, Any]) -> list[Any]:
    """pydantic's errors of [trainer], as TrainingConfig sees them."""
    section = data.get("trainer")
    return [item for items in _trainer_readings(section) for item in items] if isinstance(section, dict) else []


def _trainer_readings(section: dict[str, Any]) -> Iterator[list[Any]]:
    known = {*TrainerSection.model_fields, *DERIVED_TRAINER_KEYS}
    settings = {key: value for key, value in section.items() if key not in known}
    words = {key for key in READ_WORDS if isinstance(settings.get(key), str)}
    strict = settings | {key: tuple(settings[key]) for key in PAIRS if isinstance(settings.get(key), list)}
    for values, is_strict in ((strict, True), (settings, False)):
        try:
            TrainingConfig.model_validate({"model_name": "model", **values}, strict=is_strict)
        except ValidationError as error:
            # The strict reading judges each field but those given in words; the other one these, and combinations.
            lenient = [not item["loc"] or item["loc"][0] in words for item in error.errors(include_url=False)]
            found = zip(error.errors(include_url=False), lenient, strict=True)
            yield [item for item, is_lenient in found if is_lenient != is_strict]
