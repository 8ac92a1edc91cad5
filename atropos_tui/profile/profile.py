"""One profile: its sections together, and their validation with all problems at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from atropos_tui.errors import Problem
from atropos_tui.profile.errors import (
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
from atropos_tui.profile.schema import KeyPath, Schema, build_schema
from atropos_tui.profile.sections import (
    MOST_RANKS,
    AlertSection,
    ApiSection,
    ClusterSection,
    ComponentOptions,
    EngineSection,
    EnvSection,
    ExtraSection,
    NodeSection,
    NotifySection,
    PrepareSection,
    Section,
    TrainerSection,
    as_list,
    engines_per_gpu,
)
from atropos_tui.profile.spec import (
    LogPolicy,
    MetricsPolicy,
)
from atropos_tui.profile.values import Name
from trainer_core.config import Mode, TrainingConfig, WeightBridgeMode

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
    "copy_config_paths": "vllm.per_gpu",
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
MEETING_PORT = 29501
"""Default of vLLM's --master-port."""
OPENENV_PORT = 8100
"""Port of the first OpenEnv server that the stack starts."""


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
    node: Annotated[list[NodeSection], BeforeValidator(as_list)] = Field(default_factory=list)
    """The machines, as [[node]]; the first one is the supervisor's."""
    api: ApiSection = ApiSection()
    """run-api, the queue of rollouts between environments and trainer."""
    env: Annotated[list[EnvSection], BeforeValidator(as_list)] = Field(min_length=1)
    """The environment; several as [[env]], each with a name."""
    vllm: Annotated[list[EngineSection], BeforeValidator(as_list)] = Field(
        [EngineSection()], min_length=1
    )
    """The vLLM server; several as [[vllm]], each with a name."""
    trainer: TrainerSection = TrainerSection()
    """The trainer."""
    prepare: Annotated[list[PrepareSection], BeforeValidator(as_list)] = Field(default_factory=list)
    """One-shot steps, in order, before everything else."""
    component: dict[Name, ExtraSection] = Field(default_factory=dict)
    """Further processes, by name."""
    logs: LogPolicy = LogPolicy()
    """Limits for the stored output of components."""
    notify: NotifySection = NotifySection()
    """Notifications of important events."""
    metrics: MetricsPolicy = MetricsPolicy()
    """Metrics for Prometheus."""
    alert: Annotated[list[AlertSection], BeforeValidator(as_list)] = Field(default_factory=list)
    """Warnings when a metric leaves its bounds; several as [[alert]]."""
    _origins: Origins = PrivateAttr(default_factory=Origins)

    @model_validator(mode="wrap")
    @classmethod
    def _resolve(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        data, automatic = engines_per_gpu(data)
        profile = handler(data)
        for index in automatic:
            profile.vllm[index].mark_automatic()
        return profile

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
    def servers(self) -> dict[str, list[str]]:
        """Name of each [[vllm]] -> names of its servers."""
        return {
            section.name: [engine.name for engine, _ in made]
            for section, made in zip(self.vllm, self.placed, strict=True)
        }

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
