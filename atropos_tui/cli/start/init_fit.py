"""Changes that fit a template of `init` to the environment's own file and to the model."""

from __future__ import annotations

import tomllib
from math import gcd
from typing import Any

from atropos_tui.cli.start.init_text import by_table, with_changes, with_comment, with_values
from atropos_tui.cli.start.profiles import planned_site
from atropos_tui.profile.budget.inventory import Model
from atropos_tui.profile.budget.memory import Inventory, kv_bytes_per_token
from atropos_tui.profile.builders.commands import is_ours
from atropos_tui.profile.checks.programs import environment_source
from atropos_tui.profile.errors import value_text
from atropos_tui.profile.profile import Profile, parse_profile
from atropos_tui.profile.site import training_config

CPU_CACHE = "kv-cache-memory-bytes"
"""vLLM's flag; on a CPU vLLM does not derive the cache from the memory."""
MOST_CPU_CACHE = 4 * 2**30
LEAST_CPU_CACHE = 64 * 2**20
CACHE_SHARE = 8
"""Divisor of the machine's memory for the KV cache; weights and optimizer need the rest."""
FLOAT32 = 4
"""Bytes of a value in the KV cache on a CPU."""
SMALL_MODELS = ((10_000_000, 2e-4), (300_000_000, 1e-5))
"""Most parameters -> learning rate: of the demo's model, and of SmolLM2-135M."""


def fit_environment(text: str) -> tuple[str, str]:
    """Remove flags that the environment's own file sets, and choose a batch size that its groups
    fill.

    Returns:
        The new text, and what changed.
    """
    profile = _parsed(text)
    (env,) = profile.env
    source = None if is_ours(env.module or "") else environment_source(planned_site(profile), env)
    if source is None:
        return text, ""
    own = {name: value for name, value in source.settings.items() if f"env.{name}" in env.args}
    if not own:
        return text, ""
    listed = ", ".join(
        f"{name} = {value_text(value)}" if value is not None else name
        for name, value in own.items()
    )
    text = with_values(text, "env.args", {f"env.{name}": None for name in own})
    text = with_comment(
        text, "env.args", f"{source.path.name} sets {listed}: a flag here would override it"
    )
    said = f"not set here, because {source.path.name} sets them: {listed}"
    size = own.get("group_size")
    if isinstance(size, int) and size > 0 and (batch := _batch(profile, size)):
        text = with_values(text, "trainer", {"batch_size": batch})
        said += f"; set so that groups of {size} fill a batch: trainer.batch_size = {batch}"
    return text, said


def _batch(profile: Profile, size: int) -> int | None:
    """Nearest `trainer.batch_size` that groups of `size` fill; None if the present one does."""
    settings = training_config(planned_site(profile), grouped=False)
    if settings.sequences_per_step % size == 0:
        return None
    # A step takes batch_size * gradient_accumulation_steps sequences; that product must be a
    # multiple of `size`.
    multiple = size // gcd(size, settings.gradient_accumulation_steps)
    return max(1, round(settings.batch_size / multiple)) * multiple


def fit_model(text: str, inventory: Inventory) -> tuple[str, str]:
    """Limit lengths to the model's maximum, raise the learning rate of a small model, and on a CPU
    set the KV cache.

    Returns:
        The new text, and what changed and why.
    """
    profile = _parsed(text)
    model = inventory.models[profile.vllm[0].name]
    known = model if isinstance(model, Model) else None
    changes = _lengths(profile, known.max_length) if known and known.max_length else {}
    said = ""
    if changes and known:
        listed = ", ".join(f"{key} = {value}" for key, value in changes.items())
        said = f"set because the model's limit is {known.max_length} tokens: {listed}"
        text = with_changes(
            text, by_table({k: v for k, v in changes.items() if not k.startswith("env.")})
        )
        text = with_values(
            text,
            "env.args",
            {k.removeprefix("env.args."): v for k, v in changes.items() if k.startswith("env.")},
        )
    if known and (rate := _learning_rate(profile, known)):
        text = with_values(text, "trainer", {"lr": rate})
        small = f"set because the model is small: trainer.lr = {rate:g}"
        said = "\n".join(filter(None, [said, small]))
    # `init` writes MOST_CPU_CACHE as a placeholder; another value was set by the template and
    # stays.
    if profile.vllm[0].flag(CPU_CACHE) == MOST_CPU_CACHE:
        size = _cpu_cache(_parsed(text), known, inventory.machine.host)
        text = with_values(text, "vllm.args", {CPU_CACHE: size})
    return text, said


def _lengths(profile: Profile, longest: int) -> dict[str, Any]:
    engine, wanted = profile.vllm[0], profile.env[0].args.get("env.max_token_length")
    changes: dict[str, Any] = {}
    if (engine.max_model_len or 0) > longest:
        changes["vllm.max_model_len"] = longest
    if profile.trainer.settings.get("seq_len", 0) > longest:
        changes["trainer.seq_len"] = longest
    if isinstance(wanted, int) and wanted > longest:
        changes["env.args.env.max_token_length"] = longest // 2
    return changes


def _learning_rate(profile: Profile, model: Model) -> float | None:
    """A higher learning rate for a model that is too small for the template's; None: it fits."""
    settings = training_config(planned_site(profile))
    rate = next((rate for most, rate in SMALL_MODELS if model.parameters <= most), 0.0)
    return rate if rate > settings.lr and not settings.trains_adapters else None


def _cpu_cache(profile: Profile, model: Model | None, host: int | None) -> int:
    """Bytes for all sequences of a step, at most 1 / `CACHE_SHARE` of the memory, at least one
    sequence: vLLM does not start with less."""
    most = min(MOST_CPU_CACHE, (host or MOST_CPU_CACHE * CACHE_SHARE) // CACHE_SHARE)
    if model is None:
        return _whole_mib(most)
    engine = profile.vllm[0]
    length = engine.max_model_len or model.max_length or 1
    one = length * kv_bytes_per_token(engine, model, FLOAT32)
    sequences = training_config(planned_site(profile), grouped=False).sequences_per_step
    return _whole_mib(max(LEAST_CPU_CACHE, one, min(one * sequences, most)))


def _whole_mib(size: int) -> int:
    return -(-size // 2**20) * 2**20


def _parsed(text: str) -> Profile:
    return parse_profile(tomllib.loads(text), "the new profile")
