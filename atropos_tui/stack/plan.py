"""Profile to `StackSpec`: commands, order, ports, probes, who restarts with whom. A function from data to data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atropos_tui.stack import components
from atropos_tui.stack.components import Site
from atropos_tui.stack.profile import Profile
from atropos_tui.stack.redact import hide_tree
from atropos_tui.stack.spec import ComponentSpec, StackSpec
from atropos_tui.stack.variables import planning_variables, references
from trainer_core.config import TrainingConfig
from trainer_core.contracts.run_dir import RunDir


def make_site(profile: Profile, run_dir: Path, *, run_id: str, dotenv: Mapping[str, str] | None = None) -> Site:
    """What is known about the run while planning."""
    variables = planning_variables(seed=profile.seed, run_dir=run_dir)
    site = Site(profile, RunDir(run_dir), run_id, variables, dotenv or {})
    return replace(site, variables=variables | {"ATROPOS_MODEL": site.model})


def training_config(site: Site, *, grouped: bool = True) -> TrainingConfig:
    """The trainer's settings with everything derived from the rest of the profile.

    Args:
        grouped: hand on the group size, of which a batch must be a multiple.

    Raises:
        ValueError: the settings contradict each other.
    """
    profile, engine = site.profile, site.profile.vllm[0]
    derived: dict[str, Any] = {
        "model_name": site.model,
        "seed": profile.seed,
        "atropos_url": site.url(profile.api.port),
        "vllm_port": engine.port,
        "save_path": str(site.run.checkpoints),
        "resume": "auto",
        "benchmark": True,
        **dict(site.traits.trainer_settings),
    }
    if site.traits.feeds_all:
        derived["vllm_urls"] = [site.url(each.port) for each in components.fed_engines(profile)]
    if site.traits.shares_memory:
        derived["vllm_config_path"] = str(site.run.manifest(engine.name))
    if engine.max_model_len is not None:
        derived["max_model_len"] = engine.max_model_len
    if grouped and (group := group_size(profile)) is not None:
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


def build_stack(profile: Profile, run_dir: Path, *, run_id: str) -> StackSpec:
    """The complete stack in start order: prepare steps, run-api, engines, environments, extras, trainer."""
    return stack_of(make_site(profile, run_dir, run_id=run_id))


def stack_of(site: Site) -> StackSpec:
    """As `build_stack`, with what `.env` files say to the references of the profile."""
    profile = site.profile
    settings = training_config(site)
    prepared: list[ComponentSpec] = []
    for section in profile.prepare:
        prepared.append(components.prepare(site, section, [spec.name for spec in prepared]))
    after = [spec.name for spec in prepared]
    stack = [
        *prepared,
        components.api(site, profile.api, after),
        *(components.engine(site, section, after, settings) for section in profile.vllm),
        *(components.environment(site, section, after, settings) for section in profile.env),
        *(components.extra(site, name, section) for name, section in profile.component.items()),
        components.trainer(site, settings, after),
    ]
    spec = StackSpec(
        run_id=site.run_id,
        name=profile.name,
        mode=profile.mode,
        run_dir=str(site.run.root),
        components=stack,
        logs=profile.logs,
        notify=profile.notify,
        survive=profile.survive,
    )
    named = {name: site.dotenv[name] for name in references(spec.model_dump_json()) if name in site.dotenv}
    return spec.model_copy(update={"variables": named})


def redacted(stack: StackSpec) -> dict[str, Any]:
    """The plan as data that may be written to a file."""
    data: dict[str, Any] = hide_tree(stack.model_dump(mode="json", exclude={"variables"}))
    return data
