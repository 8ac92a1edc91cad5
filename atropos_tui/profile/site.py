"""Facts that all builders of a run share: mode, machines, addresses, fed engines, settings.
Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atropos_common.broadcast.transfer import meeting_place
from atropos_common.net.ports import LOOPBACK
from atropos_common.system.run_dir import ENV_API_URL, ENV_ENGINE_URLS, ENV_MODEL, RunDir
from atropos_tui.cluster.machines import Hosts, foreseen, place_of
from atropos_tui.profile.load import CACHE, cache_dir, expand_home
from atropos_tui.profile.placement import Placement, left_over
from atropos_tui.profile.profile import MODE_SETTINGS, Profile
from atropos_tui.profile.sections import EngineSection, EnvSection
from atropos_tui.profile.spec import Place, expand, references
from trainer_core.config import Mode, TrainingConfig


@dataclass(frozen=True)
class ModeTraits:
    shares_memory: bool = False
    """The trainer attaches to the first engine's weights."""
    other_gpus: bool = False
    """Trainer and engine need separate GPUs."""
    feeds_all: bool = False
    """The trainer feeds every engine, not only the first."""
    updates_weights: bool = False
    """The running engine receives whole models."""
    lora: bool = False
    """The trainer trains adapters, and the engine serves them."""
    holds_generation: bool = True
    """The engine answers no request until the trainer has published weights."""
    restarts_engine: bool = False
    """The trainer restarts the engine every few steps."""
    trainer_follows_engine: bool = False
    """A restart of the engine restarts the trainer too."""


TRAITS: dict[Mode, ModeTraits] = {
    "shared_vllm": ModeTraits(shares_memory=True, feeds_all=True, trainer_follows_engine=True),
    "broadcast": ModeTraits(other_gpus=True, feeds_all=True, updates_weights=True),
    "lora_only": ModeTraits(feeds_all=True, lora=True),
    "lora_restart": ModeTraits(lora=True, restarts_engine=True),
    "none": ModeTraits(feeds_all=True, updates_weights=True),
}


def traits_of(profile: Profile) -> ModeTraits:
    # Adapters in single copy use the engine's memory, so its restart restarts the trainer.
    traits = TRAITS[profile.mode]
    if profile.trainer.command:  # another trainer never releases a held engine
        return replace(traits, holds_generation=False)
    if not (traits.lora and profile.trainer.settings.get("single_copy")):
        return traits
    # Without `gpus` the engine runs on the CPU, where the shared memory outlives it.
    return replace(
        traits,
        shares_memory=True,
        feeds_all=False,
        trainer_follows_engine=bool(profile.vllm[0].gpus),
    )


@dataclass(frozen=True)
class Site:
    profile: Profile
    run: RunDir
    run_id: str
    variables: Mapping[str, str]
    """Resolved while planning."""
    dotenv: Mapping[str, str]
    """Values of `.env` files for references that stay until a process starts."""
    hosts: Hosts = field(default_factory=Hosts)

    @property
    def traits(self) -> ModeTraits:
        return traits_of(self.profile)

    @property
    def model(self) -> str:
        return self.path(self.profile.model)

    def text(self, value: str) -> str:
        return expand(value, self.variables)

    def path(self, value: str) -> str:
        """As `text`, with a leading `~` expanded."""
        return str(expand_home(text)) if (text := self.text(value)).startswith("~") else text

    def texts(self, values: list[str]) -> list[str]:
        return [self.text(value) for value in values]

    def address(self, node: str | None, dialled_from: Iterable[str | None]) -> str:
        """Address that a server on `node` binds: the loopback if all clients and the supervisor
        are on the same machine."""
        if node is None:
            return LOOPBACK
        own = self.hosts.node(node)
        # The supervisor's own machine counts too: it probes every server.
        at = {self.hosts.node(name).host for name in dialled_from if name is not None} | {
            self.hosts.here
        }
        return LOOPBACK if at == {own.host} else own.address

    @property
    def api_address(self) -> str:
        profile = self.profile
        if not profile.is_spread or "host" in profile.api.model_fields_set:
            return profile.api.host
        dialling = [*(env_node(profile, env) for env in profile.env), *trainer_nodes(profile)]
        return self.address(node_of(profile, profile.api.node), dialling)

    @property
    def api_url(self) -> str:
        return f"http://{in_url(self.api_address)}:{self.profile.api.port}"

    def engine_address(self, engine: EngineSection) -> str:
        return self._engine_addresses.get(engine.name, LOOPBACK)

    @cached_property
    def _engine_addresses(self) -> dict[str, str]:
        profile = self.profile
        dialling: dict[str, set[str | None]] = {}
        trainer = set(trainer_nodes(profile))
        for env in profile.env:
            for engine in env_engines(profile, env):
                # The trainer reaches every engine, for weights and for logprobs.
                dialling.setdefault(engine.name, set(trainer)).add(env_node(profile, env))
        return {
            engine.name: self.address(engine.node, dialling.get(engine.name, trainer))
            for engine in profile.engines
            if profile.is_spread
        }

    @cached_property
    def met_at(self) -> dict[str, str]:
        """MASTER_ADDR of a broadcast to an engine on another machine."""
        node, *others = trainer_nodes(self.profile)
        if node is None or not receivers(self.profile):
            return {}
        placements = {
            placement.node
            for each in self.profile.placed
            for _, placements in each
            for placement in placements
        }
        own = self.hosts.node(node)
        beyond = any(
            self.hosts.node(name).host != own.host for name in placements.union(others) if name
        )
        return {"MASTER_ADDR": own.address} if beyond else {}

    def engine_url(self, engine: EngineSection) -> str:
        return f"http://{in_url(self.engine_address(engine))}:{engine.port}"

    def place(self, node: str | None) -> Place | None:
        return place_of(self.profile, self.hosts, node) if node is not None else None


def make_site(
    profile: Profile,
    run_dir: Path,
    *,
    run_id: str,
    dotenv: Mapping[str, str] | None = None,
    hosts: Hosts | None = None,
) -> Site:
    """Collect the facts about a run for planning.

    A variable in the model's name must have a value now; others are resolved when a process starts.
    """
    outside = {**(dotenv or {}), **os.environ}
    models = [profile.model, *(engine.model or "" for engine in profile.vllm)]
    named = {name: outside[name] for text in models for name in references(text) if name in outside}
    variables = named | {
        CACHE: str(cache_dir()),
        "ATROPOS_SEED": str(profile.seed),
        "ATROPOS_RUN_DIR": str(run_dir),
    }
    site = Site(
        profile, RunDir(run_dir), run_id, variables, dotenv or {}, hosts or foreseen(profile)
    )
    contract = {ENV_MODEL: site.model}
    if profile.trainer.command:
        contract |= {ENV_API_URL: site.api_url, ENV_ENGINE_URLS: engine_urls(site)}
    return replace(site, variables=variables | contract)


def in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def meeting_address(site: Site, settings: TrainingConfig) -> str:
    environment = {name: site.text(value) for name, value in site.profile.trainer.env.items()}
    return meeting_place(settings.init_method, site.met_at | environment)[0]


def training_config(site: Site, *, grouped: bool = True) -> TrainingConfig:
    """The trainer's settings with everything derived.

    Args:
        grouped: pass on the group size, of which a batch must be a multiple.

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
    if site.traits.shares_memory:
        fed = receivers(profile)  # manifests name the others
    if site.traits.other_gpus or len(fed) > 1 or (fed and site.traits.shares_memory):
        derived["vllm_urls"] = [site.engine_url(each) for each in fed]
    if site.traits.shares_memory:
        derived["vllm_config_path"] = str(site.run.manifest(engine.name))
        if beside := copied(profile):
            derived["copy_config_paths"] = [str(site.run.manifest(each.name)) for each in beside]
    if engine.max_model_len is not None:
        derived["max_model_len"] = engine.max_model_len
    if profile.trainer.settings.get("use_wandb"):
        derived["wandb_group"] = site.run_id
    # The checks report group sizes themselves, with better keys, so they leave `group_size` out.
    if grouped and profile.trainer.command is None and (group := group_size(profile)) is not None:
        derived["group_size"] = group
    try:
        return TrainingConfig.model_validate(derived | profile.trainer.settings)
    except ValidationError as error:
        raise ValueError(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None


def group_size(profile: Profile) -> int | None:
    """Group size, if the profile sets the same for all environments."""
    sizes = {env.args.get("env.group_size") for env in profile.env}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) else None


def is_fed(site: Site, section: EngineSection) -> bool:
    return section.name in {each.name for each in fed_engines(site.profile)}


def fed_sections(profile: Profile) -> dict[int, EngineSection]:
    """Fed [[vllm]] sections by index."""
    others = profile.vllm if traits_of(profile).feeds_all else []
    return {index: part for index, part in enumerate(others) if part.model is None} | {
        0: profile.vllm[0]
    }


def longest_sequence(profile: Profile) -> int | None:
    """Tokens; None if an engine uses its model's limit."""
    lengths = [section.max_model_len for section in fed_sections(profile).values()]
    stated = [length for length in lengths if length is not None]
    return max(stated) if len(stated) == len(lengths) else None


def fed_engines(profile: Profile) -> list[EngineSection]:
    """In a mode that feeds one engine, the first."""
    if not traits_of(profile).feeds_all:
        return profile.engines[:1]
    return [
        engine for index in sorted(fed_sections(profile)) for engine, _ in profile.placed[index]
    ]


def is_shared(profile: Profile, engine: EngineSection) -> bool:
    """Return True if the trainer computes with this engine's memory."""
    return traits_of(profile).shares_memory and engine.name == profile.engines[0].name


def copied(profile: Profile) -> list[EngineSection]:
    """Engines in single copy beside the first one on its GPU: the trainer copies each version into
    their memory."""
    traits, beside = traits_of(profile), profile.vllm[0].per_gpu
    return profile.engines[1:beside] if traits.shares_memory and traits.feeds_all else []


def is_mapped(profile: Profile, engine: EngineSection) -> bool:
    """Return True if the trainer maps this engine's weights, to compute with them or to copy."""
    return is_shared(profile, engine) or engine.name in {each.name for each in copied(profile)}


def is_beside_trainer(profile: Profile, engine: EngineSection) -> bool:
    """Return True if this engine and the trainer compute on the same device."""
    if is_mapped(profile, engine):
        return True
    same_machine = not profile.is_spread
    own = trainer_gpus(profile)
    return same_machine and (bool(set(engine.gpus) & set(own)) or not (engine.gpus or own))


def on_one_gpu(profile: Profile) -> list[list[EngineSection]]:
    """Groups of equal engines, of more than one, that share a GPU or the cores of a machine."""
    return [
        [engine for engine, _ in made[first : first + section.per_gpu]]
        for section, made in zip(profile.vllm, profile.placed, strict=True)
        if section.per_gpu > 1
        for first in range(0, len(made), section.per_gpu)
    ]


def receivers(profile: Profile) -> list[EngineSection]:
    """Engines that get the weights by broadcast; in single copy all fed ones that the trainer does
    not map."""
    traits = traits_of(profile)
    if not (traits.other_gpus or traits.shares_memory):
        return []
    return [engine for engine in fed_engines(profile) if not is_mapped(profile, engine)]


def engine_urls(site: Site) -> str:
    return " ".join(f"{site.engine_url(engine)}/v1" for engine in fed_engines(site.profile))


def engine_model(site: Site, section: EngineSection) -> str:
    return site.path(section.model) if section.model else site.model


def env_engines(profile: Profile, section: EnvSection) -> list[EngineSection]:
    """Engines that an environment names, else all fed ones."""
    each = zip(profile.vllm, profile.placed, strict=True)
    named = [
        engine
        for kind, made in each
        for engine, _ in made
        if section.engine in (kind.name, engine.name)
    ]
    return named or fed_engines(profile)


def node_of(profile: Profile, node: str | None) -> str | None:
    """Machine of a component that runs once; None if the stack has one machine."""
    return next(iter(profile.hosts_named(node)), None)


def env_node(profile: Profile, env: EnvSection) -> str | None:
    """Machine of an environment; several on one [[node]] are spread over its machines."""
    # Round robin over the node's machines, in the order of the [[env]] tables.
    beside = [each.name for each in profile.env if each.node == env.node]
    hosts = profile.hosts_named(env.node)
    return hosts[beside.index(env.name) % len(hosts)] if hosts else None


def trainer_nodes(profile: Profile) -> list[str | None]:
    """Rank 0's first."""
    return [placement.node for placement in trainer_placements(profile)] or [None]


def trainer_placements(profile: Profile) -> list[Placement]:
    """The trainer's machines with its GPUs: the engine's in single copy, else those named, else
    all that no engine uses."""
    hosts = profile.hosts_named(profile.trainer.node)
    if not profile.is_spread:
        return []
    if traits_of(profile).shares_memory:
        return next((placements for each in profile.placed for _, placements in each), [])
    taken: dict[str, list[int]] = {}
    for _, placements in (pair for each in profile.placed for pair in each):
        for placement in placements:
            taken.setdefault(placement.node, []).extend(placement.gpus)
    own, machines = profile.trainer.gpus, profile.machines
    return [Placement(host, own or left_over(machines, host, taken)) for host in hosts]


def trainer_gpus(profile: Profile) -> list[int]:
    """The trainer's GPUs, machine by machine."""
    if profile.is_spread:
        return [gpu for placement in trainer_placements(profile) for gpu in placement.gpus]
    return profile.trainer.gpus or (
        profile.engines[0].gpus if traits_of(profile).shares_memory else []
    )


def trainer_ranks(profile: Profile) -> int:
    """One rank for each GPU, and at least one on each machine."""
    return (
        profile.trainer.processes
        or len(trainer_gpus(profile))
        or len(trainer_placements(profile))
        or 1
    )
