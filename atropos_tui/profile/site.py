"""What a run's builders share: what its mode asks for, who is on which machine and at which address, whose weights
reach whom, and the trainer's settings with all that follows from the rest of the profile. Data to data.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atropos_common.ports import LOOPBACK
from atropos_common.run_dir import ENV_API_URL, ENV_ENGINE_URLS, ENV_MODEL, RunDir
from atropos_common.transfer import meeting_place
from atropos_tui.profile.load import CACHE, cache_dir, expand_home
from atropos_tui.profile.machines import Hosts, foreseen, place_of
from atropos_tui.profile.seats import Seat, left_over
from atropos_tui.profile.sections import MODE_SETTINGS, EngineSection, EnvSection, Mode, Profile
from atropos_tui.profile.spec import Place, expand, references
from trainer_core.config import TrainingConfig


@dataclass(frozen=True)
class ModeTraits:
    """Derived once per profile; every component builder reads it."""

    shares_memory: bool = False
    """The engine exports its weights, and the trainer attaches to them."""
    other_gpus: bool = False
    """Trainer and engine need GPUs of their own."""
    feeds_all: bool = False
    """The trainer's weights reach every engine that serves the stack's model, else only the first."""
    updates_weights: bool = False
    """The engine takes whole models while it runs: from a folder, or over the network."""
    lora: bool = False
    """Adapters are trained, and the engine must serve them."""
    holds_generation: bool = True
    """The engine serves nobody until the trainer has named its weights."""
    restarts_engine: bool = False
    """The trainer has the engine restarted every few steps, so its start must be quick."""
    trainer_follows_engine: bool = False
    """A restarted engine takes the trainer with it."""


TRAITS: dict[Mode, ModeTraits] = {
    "shared_vllm": ModeTraits(shares_memory=True, trainer_follows_engine=True),
    "broadcast": ModeTraits(other_gpus=True, feeds_all=True, updates_weights=True),
    "lora_only": ModeTraits(feeds_all=True, lora=True),
    "lora_restart": ModeTraits(lora=True, restarts_engine=True),
    "none": ModeTraits(feeds_all=True, updates_weights=True),
}


def traits_of(profile: Profile) -> ModeTraits:
    """What a profile's mode asks of its stack. Adapters over the one copy live on the engine's memory; that of a GPU
    must not go while the trainer computes with it, so there a restart takes the trainer along."""
    traits = TRAITS[profile.mode]
    if profile.trainer.command:  # nobody names weights to the engine, so it must not wait for that
        return replace(traits, holds_generation=False)
    if not (traits.lora and profile.trainer.settings.get("single_copy")):
        return traits
    return replace(traits, shares_memory=True, feeds_all=False, trainer_follows_engine=bool(profile.vllm[0].gpus))


@dataclass(frozen=True)
class Site:
    """What the builders share about one run."""

    profile: Profile
    run: RunDir
    run_id: str
    variables: Mapping[str, str]
    """What is put in while planning."""
    dotenv: Mapping[str, str]
    """From `.env` files, for the references that stay until a process starts."""
    hosts: Hosts = field(default_factory=Hosts)
    """The machines, where the profile is for several."""

    @property
    def traits(self) -> ModeTraits:
        """What the profile's mode asks of the stack."""
        return traits_of(self.profile)

    @property
    def model(self) -> str:
        """The stack's model, with the variables that are known while planning put in."""
        return self.path(self.profile.model)

    def text(self, value: str) -> str:
        """`value` with the variables put in that are known while planning."""
        return expand(value, self.variables)

    def path(self, value: str) -> str:
        """`text` of a path or hub id, with a leading `~` replaced by the home directory."""
        return str(expand_home(text)) if (text := self.text(value)).startswith("~") else text

    def texts(self, values: list[str]) -> list[str]:
        """The same for each of several."""
        return [self.text(value) for value in values]

    def address(self, node: str | None, dialled_from: Iterable[str | None]) -> str:
        """What a server on `node` binds to and is dialled at: the loopback where all who dial are on the same machine,
        and the supervisor, which probes it, as well."""
        if node is None:
            return LOOPBACK
        own = self.hosts.node(node)
        at = {self.hosts.node(name).host for name in dialled_from if name is not None} | {self.hosts.here}
        return LOOPBACK if at == {own.host} else own.address

    @property
    def api_address(self) -> str:
        """Where run-api is."""
        profile = self.profile
        if not profile.is_spread or "host" in profile.api.model_fields_set:
            return profile.api.host
        dialling = [*(env_node(profile, env) for env in profile.env), *trainer_nodes(profile)]
        return self.address(node_of(profile, profile.api.node), dialling)

    @property
    def api_url(self) -> str:
        """run-api, for whoever speaks to it."""
        return f"http://{in_url(self.api_address)}:{self.profile.api.port}"

    def engine_address(self, engine: EngineSection) -> str:
        """Where an engine of `profile.engines` is."""
        return self._engine_addresses.get(engine.name, LOOPBACK)

    @cached_property
    def _engine_addresses(self) -> dict[str, str]:
        profile = self.profile
        dialling: dict[str, set[str | None]] = {}
        trainer = set(trainer_nodes(profile))
        for env in profile.env:
            for engine in env_engines(profile, env):
                dialling.setdefault(engine.name, set(trainer)).add(env_node(profile, env))
        return {
            engine.name: self.address(engine.node, dialling.get(engine.name, trainer))
            for engine in profile.engines
            if profile.is_spread
        }

    @cached_property
    def met_at(self) -> dict[str, str]:
        """Where the trainer of a broadcast is met, for engines on other machines than its first."""
        node, *others = trainer_nodes(self.profile)
        if node is None or not self.traits.other_gpus:
            return {}
        seats = {seat.node for each in self.profile.seated for _, seats in each for seat in seats}
        own = self.hosts.node(node)
        beyond = any(self.hosts.node(name).host != own.host for name in seats.union(others) if name)
        return {"MASTER_ADDR": own.address} if beyond else {}

    def engine_url(self, engine: EngineSection) -> str:
        """An engine, for whoever speaks to it."""
        return f"http://{in_url(self.engine_address(engine))}:{engine.port}"

    def place(self, node: str | None) -> Place | None:
        """Where what runs on `node` runs; None where there is only one machine."""
        return place_of(self.profile, self.hosts, node) if node is not None else None


def make_site(
    profile: Profile, run_dir: Path, *, run_id: str, dotenv: Mapping[str, str] | None = None, hosts: Hosts | None = None
) -> Site:
    """What is known about the run while planning. Which model it is must be known by then: a variable in its name has
    its value here, as in the environment or `.env` file, where others wait until a process starts.

    Args:
        hosts: the machines of a profile for several; what they are called where that is not known yet.
    """
    outside = {**(dotenv or {}), **os.environ}
    models = [profile.model, *(engine.model or "" for engine in profile.vllm)]
    named = {name: outside[name] for text in models for name in references(text) if name in outside}
    variables = named | {CACHE: str(cache_dir()), "ATROPOS_SEED": str(profile.seed), "ATROPOS_RUN_DIR": str(run_dir)}
    site = Site(profile, RunDir(run_dir), run_id, variables, dotenv or {}, hosts or foreseen(profile))
    told = {ENV_MODEL: site.model}
    if profile.trainer.command:
        told |= {ENV_API_URL: site.api_url, ENV_ENGINE_URLS: engine_urls(site)}
    return replace(site, variables=variables | told)


def in_url(address: str) -> str:
    """An address as URLs have it."""
    return f"[{address}]" if ":" in address else address


def meeting_address(site: Site, settings: TrainingConfig) -> str:
    """Where the trainer of a broadcast is met; a reference where only the environment knows it."""
    environment = {name: site.text(value) for name, value in site.profile.trainer.env.items()}
    return meeting_place(settings.init_method, site.met_at | environment)[0]


def training_config(site: Site, *, grouped: bool = True) -> TrainingConfig:
    """The trainer's settings with everything derived from the rest of the profile.

    Args:
        grouped: hand on the group size, of which a batch must be a multiple.

    Raises:
        ValueError: the settings contradict each other.
    """
    profile, engine = site.profile, site.profile.engines[0]
    derived: dict[str, Any] = {
        "model_name": site.model,
        "seed": profile.seed,
        "atropos_url": site.api_url,
        "vllm_port": engine.port,
        "save_path": str(site.run.checkpoints),
        "resume": "auto",
        "benchmark": True,
        **MODE_SETTINGS[profile.mode],
    }
    fed = fed_engines(profile)
    if (address := site.engine_address(engine)) != LOOPBACK:
        derived["vllm_host"] = in_url(address)
    if site.traits.other_gpus or len(fed) > 1:
        derived["vllm_urls"] = [site.engine_url(each) for each in fed]
    if site.traits.shares_memory:
        derived["vllm_config_path"] = str(site.run.manifest(engine.name))
    if engine.max_model_len is not None:
        derived["max_model_len"] = engine.max_model_len
    if profile.trainer.settings.get("use_wandb"):
        derived["wandb_group"] = site.run_id
    if grouped and profile.trainer.command is None and (group := group_size(profile)) is not None:
        derived["group_size"] = group
    try:
        return TrainingConfig.model_validate(derived | profile.trainer.settings)
    except ValidationError as error:
        raise ValueError(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None


def group_size(profile: Profile) -> int | None:
    """The environments' group size where the profile states it for all alike."""
    sizes = {env.args.get("env.group_size") for env in profile.env}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) else None


def is_fed(site: Site, section: EngineSection) -> bool:
    """Whether the trainer's weights reach this engine. Others serve what they were started with."""
    return section.name in {each.name for each in fed_engines(site.profile)}


def fed_sections(profile: Profile) -> dict[int, EngineSection]:
    """By index the first [[vllm]]; in a mode that feeds all of them, each that serves the stack's model."""
    others = profile.vllm if traits_of(profile).feeds_all else []
    return {index: part for index, part in enumerate(others) if part.model is None} | {0: profile.vllm[0]}


def longest_sequence(profile: Profile) -> int | None:
    """Tokens of the longest sequence that an engine which the trainer feeds makes; None where one leaves that to its
    model."""
    lengths = [section.max_model_len for section in fed_sections(profile).values()]
    stated = [length for length in lengths if length is not None]
    return max(stated) if len(stated) == len(lengths) else None


def fed_engines(profile: Profile) -> list[EngineSection]:
    """The engines that the trainer feeds: in a mode that feeds one, the first."""
    if not traits_of(profile).feeds_all:
        return profile.engines[:1]
    return [engine for index in sorted(fed_sections(profile)) for engine, _ in profile.seated[index]]


def engine_urls(site: Site) -> str:
    """The OpenAI addresses of the engines that the trainer feeds, with spaces between them."""
    return " ".join(f"{site.engine_url(engine)}/v1" for engine in fed_engines(site.profile))


def engine_model(site: Site, section: EngineSection) -> str:
    """The model that an engine serves."""
    return site.path(section.model) if section.model else site.model


def env_engines(profile: Profile, section: EnvSection) -> list[EngineSection]:
    """The engines that generate an environment's rollouts: those that it names, else all that the trainer feeds."""
    each = zip(profile.vllm, profile.seated, strict=True)
    named = [engine for kind, made in each for engine, _ in made if section.engine in (kind.name, engine.name)]
    return named or fed_engines(profile)


def node_of(profile: Profile, node: str | None) -> str | None:
    """The machine of something that runs once, from its `node` key; None where there is only one machine."""
    return next(iter(profile.hosts_named(node)), None)


def env_node(profile: Profile, env: EnvSection) -> str | None:
    """The machine of an environment: those of one [[node]] are spread over it."""
    beside = [each.name for each in profile.env if each.node == env.node]
    hosts = profile.hosts_named(env.node)
    return hosts[beside.index(env.name) % len(hosts)] if hosts else None


def trainer_nodes(profile: Profile) -> list[str | None]:
    """The trainer's machines, the first rank's first."""
    return [seat.node for seat in trainer_seats(profile)] or [None]


def trainer_seats(profile: Profile) -> list[Seat]:
    """The trainer's machines and its GPUs there: those of the engine in single copy, else those that it names, else
    all of its machines' that no engine has; empty where there is only one machine."""
    hosts = profile.hosts_named(profile.trainer.node)
    if not profile.is_spread:
        return []
    if traits_of(profile).shares_memory:
        return next((seats for each in profile.seated for _, seats in each), [])
    taken: dict[str, list[int]] = {}
    for _, seats in (pair for each in profile.seated for pair in each):
        for seat in seats:
            taken.setdefault(seat.node, []).extend(seat.gpus)
    own, machines = profile.trainer.gpus, profile.machines
    return [Seat(host, own or left_over(machines, host, taken)) for host in hosts]


def trainer_gpus(profile: Profile) -> list[int]:
    """The trainer's GPUs, on several machines one after the other; single copy lives on the engine's own."""
    if profile.is_spread:
        return [gpu for seat in trainer_seats(profile) for gpu in seat.gpus]
    return profile.trainer.gpus or (profile.vllm[0].gpus if traits_of(profile).shares_memory else [])


def trainer_ranks(profile: Profile) -> int:
    """Processes that train together, each on a GPU of its own where there are any; on several machines at least one
    on each."""
    return profile.trainer.processes or len(trainer_gpus(profile)) or len(trainer_seats(profile)) or 1
