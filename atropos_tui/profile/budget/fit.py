"""Settings with which a stack fits its GPUs, and `memory = auto
 speed
 fit`.

Each setting that saves memory has a cost, the factor by which a step becomes slower. `nearest`
tries combinations in the order of their cost. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import tomli_w

from atropos_tui.errors import Problem
from atropos_tui.profile.budget import memory
from atropos_tui.profile.budget.inventory import Hardware, Model
from atropos_tui.profile.budget.memory import Budget, Inventory
from atropos_tui.profile.profile import Profile
from atropos_tui.profile.sections import MOST_RANKS, EngineSection
from atropos_tui.profile.site import (
    Site,
    fed_engines,
    longest_sequence,
    trainer_ranks,
    training_config,
    traits_of,
)
from trainer_core.config import TrainingConfig, sharding_contradictions

SLACK = 0.03
"""Free share of a GPU: an allocator cannot use every gap."""
FEWEST_TOKENS = 2048
"""Smallest proposed forward pass in tokens."""
SEQUENCES = {64: 1.02, 32: 1.08, 16: 1.2, 8: 1.4, 4: 1.8, 2: 2.5}
"""Longest sequences that a KV cache holds -> cost."""
MORE_GPUS = 1.25
"""Cost of idle GPUs."""
LAST = 100.0
"""Cost of a change of precision or of the trained parameters."""
Setting = tuple[str, Any]
"""Profile key and value."""
OPTIMIZERS = {"adamw": 1.0, "adamw_8bit": 1.08, "adafactor": 1.3}
"""Cost by optimizer, measured with 1.7 billion parameters on an H200."""
MASTERS = {"fp32": 1.0, "kahan": 1.03, "stochastic": 1.06}
"""Cost by kind of master weights."""


@dataclass(frozen=True)
class Option:
    """Settings that belong together."""

    settings: tuple[Setting, ...] = ()
    cost: float = 1.0


@dataclass(frozen=True)
class Fit:
    settings: dict[str, Any]
    """Profile key -> value; empty: the profile fits as it is."""
    cost: float
    """Factor of a step's time, roughly."""
    budget: Budget

    @property
    def lines(self) -> list[str]:
        tables: dict[str, list[str]] = {}
        for key, value in self.settings.items():
            table, _, name = key.rpartition(".")
            tables.setdefault(table, []).append(f"{name} = {toml(value)}")
        top = tables.pop("", [])
        return [*top, *(line for table, lines in tables.items() for line in (f"[{table}]", *lines))]

    @property
    def text(self) -> str:
        return ", ".join(f"{key} = {toml(value)}" for key, value in self.settings.items())


def toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def fits(budget: Budget, slack: float = 0.0) -> bool:
    """True if known devices have enough memory and every engine can start."""
    # Devices without a known total are assumed to be large enough.
    known = [device for device in budget.devices if device.total is not None]
    return not budget.too_small_caches and all(
        d.wanted <= (1 - slack) * (d.total or 0) for d in known
    )


def nearest(
    site: Site, inventory: Inventory, *, fixed: Iterable[str] = (), most: int = 3
) -> list[Fit]:
    """Return up to `most` of the cheapest combinations that fit.

    If all of them cost precision, LoRA adapters are tried too. Empty: nothing fits, or model or
    GPUs are unknown.

    Args:
        fixed: keys that keep their values.
    """
    first = inventory.models[site.profile.vllm[0].name]
    settings = training_config(site)
    if not isinstance(first, Model) or not on_gpus(site.profile, settings, inventory):
        return []
    ladders = [
        [
            Option(),
            *(option for option in ladder if not {key for key, _ in option.settings} & set(fixed)),
        ]
        for ladder in _ladders(site, settings, first, inventory)
    ]
    found = _search(site, settings, inventory, ladders, most)
    if "mode" not in fixed and all(fit.cost >= LAST for fit in found):
        found += _with_adapters(site, settings, inventory)
    return found


def on_gpus(profile: Profile, settings: TrainingConfig, inventory: Inventory) -> bool:
    if profile.is_spread:
        return False  # machines may differ, and none of their GPUs are known
    names = memory.trainer_devices(profile, settings, inventory.machine)
    return names != [memory.HOST] and all(
        int(name.split()[1]) < len(inventory.machine.gpus) for name in names
    )


def _search(
    site: Site,
    settings: TrainingConfig,
    inventory: Inventory,
    ladders: Sequence[Sequence[Option]],
    most: int,
) -> list[Fit]:
    combinations = sorted(product(*ladders), key=lambda options: math.prod(o.cost for o in options))
    found: list[Fit] = []
    for options in combinations:  # the cheapest first, so the first hits are the answer
        chosen = dict(setting for option in options for setting in option.settings)
        if any(fit.settings.keys() <= chosen.keys() for fit in found):
            continue  # a cheaper combination with fewer settings fits already
        profile, config = _chosen(site, settings, chosen)
        if sharding_contradictions(config, trainer_ranks(profile)):
            continue
        budget = memory.make_budget(profile, config, inventory.models, inventory.machine)
        if fits(budget, SLACK if chosen else 0.0):
            found.append(Fit(chosen, math.prod(o.cost for o in options), budget))
            if len(found) == most or not chosen:  # nothing chosen: the profile fits as it is
                break
    return found


def budget_with(
    site: Site, settings: TrainingConfig, inventory: Inventory, chosen: Mapping[str, Any]
) -> Budget:
    profile, config = _chosen(site, settings, chosen)
    return memory.make_budget(profile, config, inventory.models, inventory.machine)


def _chosen(
    site: Site, settings: TrainingConfig, chosen: Mapping[str, Any]
) -> tuple[Profile, TrainingConfig]:
    trainer = {
        key.removeprefix("trainer."): value
        for key, value in chosen.items()
        if key.startswith("trainer.")
    }
    trainer.pop("gpus", None)  # a key of the section, and no field of TrainingConfig
    return with_settings(site.profile, chosen), settings.model_copy(update=trainer)


def with_settings(profile: Profile, chosen: Mapping[str, Any]) -> Profile:
    update: dict[str, Any] = {key: value for key, value in chosen.items() if "." not in key}
    trainer = {
        key.removeprefix("trainer."): value
        for key, value in chosen.items()
        if key.startswith("trainer.")
    }
    if trainer:
        update["trainer"] = profile.trainer.model_copy(update=trainer)
    engine = {
        key.removeprefix("vllm."): value for key, value in chosen.items() if key.startswith("vllm.")
    }
    if engine:
        args = {
            key.removeprefix("args."): value
            for key, value in engine.items()
            if key.startswith("args.")
        }
        changes = {key: value for key, value in engine.items() if not key.startswith("args.")}
        if args:
            changes["args"] = profile.vllm[0].args | args
        update["vllm"] = [profile.vllm[0].model_copy(update=changes), *profile.vllm[1:]]
    return profile.model_copy(update=update)


def _ladders(
    site: Site, settings: TrainingConfig, model: Model, inventory: Inventory
) -> list[list[Option]]:
    """One list of options for each kind of setting; a combination takes one of each."""
    # float32 weights and adapters have no separate masters.
    half = memory.dtype_bytes(settings.dtype, model) < 4 and not settings.trains_adapters
    # Options that this machine or this dtype cannot run are left out.
    absent = "" if inventory.has_eight_bit else "adamw_8bit"
    refused = "" if settings.dtype == "bfloat16" else "stochastic"
    return [
        _more_gpus(site.profile, model, inventory),
        []
        if settings.trains_adapters
        else _leaner("optimizer", settings.optimizer, OPTIMIZERS, absent),
        _leaner("master_weights", settings.master_weights, MASTERS, refused) if half else [],
        _offloads(settings),
        _passes(site.profile, settings),
        [Option((("trainer.gradient_dtype", "bfloat16"),), LAST)]
        if half and settings.gradient_dtype == "float32" and settings.dtype != "float16"
        else [],
        _caches(site, settings, model, inventory),
    ]


def _more_gpus(profile: Profile, model: Model, inventory: Inventory) -> list[Option]:
    engine, there = profile.vllm[0], range(len(inventory.machine.gpus))
    # Separate GPUs: give the trainer all idle ones, if its own are among them.
    if not traits_of(profile).shares_memory:
        taken = {gpu for each in profile.engines for gpu in each.gpus}
        free, own = [gpu for gpu in there if gpu not in taken], profile.trainer.gpus
        more = len(free) > len(own) > 0 and set(own) <= set(free)
        return [Option((("trainer.gpus", free),), MORE_GPUS)] if more else []
    heads, keys, now = model.dimensions.heads, model.dimensions.kv_heads, engine.tensor_parallel
    # Beside other engines the first one needs the whole model on the trainer's GPU.
    several = len(fed_engines(profile)) > 1
    if traits_of(profile).lora or several or engine.gpus != list(there[:now]):
        return []
    options = []
    for parts in (2, 4, 8):
        # vLLM splits attention heads evenly, and replicates key/value heads if there are fewer than
        # parts.
        if (
            now < parts <= len(there)
            and heads % parts == 0
            and (keys % parts == 0 or parts % keys == 0)
        ):
            gpus = list(there[:parts])
            both: tuple[Setting, ...] = (("vllm.gpus", gpus), ("vllm.tensor_parallel", parts))
            both += (("trainer.gpus", gpus),) if profile.trainer.gpus else ()
            options.append(Option(both, MORE_GPUS * parts / now))
    return options


def _leaner(key: str, now: str, costs: Mapping[str, float], without: str) -> list[Option]:
    """Values that use less memory than `now`, except `without`."""
    return [
        Option(((f"trainer.{key}", name),), cost)
        for name, cost in costs.items()
        if cost > costs[now] and name != without
    ]


def _offloads(settings: TrainingConfig) -> list[Option]:
    recompute: Setting = ("trainer.gradient_checkpointing", "on")
    options = []
    if settings.gradient_checkpointing == "off":
        options.append(Option((recompute,), 1.25))
    if not settings.activation_offload:
        # Offload keeps one hidden state for each layer, so it needs checkpointing.
        options.append(Option((recompute, ("trainer.activation_offload", True)), 1.35))
    if not settings.optimizer_offload and not settings.trains_adapters:
        away: Setting = ("trainer.optimizer_offload", True)
        others = [option for option in options if option.settings]
        options.append(Option((away,), 1.4))
        options += [Option((*option.settings, away), option.cost * 1.4) for option in others]
    return options


def _passes(profile: Profile, settings: TrainingConfig) -> list[Option]:
    longest = min(settings.seq_len, longest_sequence(profile) or settings.seq_len)
    tokens = memory.tokens_per_pass(settings, longest)
    options: list[Option] = []
    while tokens > max(longest, FEWEST_TOKENS):
        tokens = max(tokens // 2, longest, FEWEST_TOKENS)
        options.append(Option((("trainer.pack_tokens", tokens),), 1.02 ** (len(options) + 1)))
    return options


def _caches(
    site: Site, settings: TrainingConfig, model: Model, inventory: Inventory
) -> list[Option]:
    engine = site.profile.engines[0]
    names = memory.engine_devices(engine, inventory.machine)
    if not set(names) & set(memory.trainer_devices(site.profile, settings, inventory.machine)):
        return []  # on its own GPU a smaller cache frees nothing for the trainer
    budget = memory.make_budget(site.profile, settings, inventory.models, inventory.machine)
    # All GPUs of a tensor-parallel engine hold the same, so the first one stands for all.
    (device,) = [device for device in budget.devices if device.name == names[0]]
    items = [item for item in device.items if item.component == engine.name]
    cache = next(item.bytes or 0 for item in items if item.what == "KV cache")
    held = sum(item.bytes or 0 for item in items if item.what != "KV cache")
    longest = engine.max_model_len or model.max_length
    if device.total is None or not longest:
        return []
    width = memory.dtype_bytes(engine.dtype or settings.dtype, model)
    # Bytes of one sequence of the longest length.
    one = longest * memory.kv_bytes_per_token(engine, model, width)
    # Smaller caches than now; if the present one does not hold one sequence, all that do.
    sizes = {count: count * one for count in SEQUENCES if count * one < cache or cache < one}
    beside = site.profile.vllm[0].per_gpu
    return [
        Option(
            (_cache_setting(engine, size, beside * (size + held) / device.total),),
            SEQUENCES[count],
        )
        for count, size in sizes.items()
        if beside * (size + held) < device.total
    ]


def _cache_setting(engine: EngineSection, size: int, share: float) -> Setting:
    if key := memory.cache_flag(engine):
        return f"vllm.args.{key}", size
    return "vllm.gpu_memory_utilization", math.ceil(100 * share) / 100


def _with_adapters(site: Site, settings: TrainingConfig, inventory: Inventory) -> list[Fit]:
    """A fit with LoRA adapters, in single copy if the profile uses it."""
    if traits_of(site.profile).lora or (
        site.profile.vllm[0].tensor_parallel > 1 and site.traits.shares_memory
    ):
        return []
    # A learning rate for whole models is far too small for an adapter (checks.LEAST_ADAPTER_LR).
    chosen: dict[str, Any] = {"mode": "lora_only", "trainer.lr": 2e-4}
    if site.traits.shares_memory:
        chosen["trainer.single_copy"] = True
        if site.profile.vllm[0].per_gpu > 1:  # this mode feeds one engine
            chosen["vllm.per_gpu"] = 1
    adapted = settings.model_copy(
        update={
            "weight_bridge_mode": "lora_only",
            "train_layer_indices": None,
            "use_shared_memory": False,
            "single_copy": site.traits.shares_memory,
        }
    )
    lora = replace(site, profile=with_settings(site.profile, chosen))
    model = inventory.models[site.profile.vllm[0].name]
    assert isinstance(model, Model)
    # Adapters change what is trained, so they come last whatever else they need (cost LAST
    # squared).
    for passes in [Option(), *_passes(site.profile, adapted)]:
        for cache in [Option(), *_caches(lora, adapted, model, inventory)]:
            budget = budget_with(
                lora, adapted, inventory, dict((*passes.settings, *cache.settings))
            )
            if fits(budget, SLACK):
                return [Fit(chosen | dict((*passes.settings, *cache.settings)), LAST**2, budget)]
    return []


MOST_PARAMETERS_OF_TWO = 2.5e9
"""Models from here on are limited by the GPU, and not by the core of an engine's Python."""
KEPT_BY_A_RESUME = frozenset(
    {"trainer.optimizer", "trainer.master_weights", "trainer.gradient_dtype"}
)
"""Keys whose state a checkpoint holds."""


def settle(site: Site, inventory: Inventory, *, resumed: bool = False) -> tuple[Site, str]:
    """Apply the `memory` key; keys that the profile sets stay. Return the site, and what was chosen
    and why."""
    profile = site.profile
    try:
        settings = training_config(site)
    except ValueError:  # the settings contradict each other; the checks report it
        return site, ""
    wanted, model = profile.trainer.memory, inventory.models[profile.vllm[0].name]
    if (
        wanted == "speed"
        or profile.trainer.command
        or not isinstance(model, Model)
        or not on_gpus(profile, settings, inventory)
    ):
        return site, ""
    # A key that the profile sets is the user's choice.
    fixed = {f"trainer.{key}" for key in profile.trainer.settings} | {
        "mode",
        "trainer.gpus",
        "vllm.gpus",
    }
    fixed |= KEPT_BY_A_RESUME if resumed else set()
    if profile.vllm[0].gpu_memory_utilization is not None:
        fixed.add("vllm.gpu_memory_utilization")
    if key := memory.cache_flag(profile.vllm[0]):
        fixed.add(f"vllm.args.{key}")
    lean = _lean(settings, fixed) if wanted == "fit" else {}
    chosen = replace(site, profile=with_settings(profile, lean))
    # The budget without further settings, for the message if nothing fits.
    now = memory.site_budget(chosen, inventory)
    found = nearest(chosen, inventory, fixed=fixed | set(lean), most=1)
    if not found:
        return site, f"memory = {wanted}: no free setting makes it fit; {lack(now)}"
    settled = replace(site, profile=with_settings(chosen.profile, found[0].settings))
    all_chosen = replace(found[0], settings=lean | found[0].settings)
    if not all_chosen.settings:
        return site, f"memory = {wanted}: no change, the stack fits as it is"
    why = lack(memory.site_budget(site, inventory)) or "the smallest GPU memory"
    return settled, f"memory = {wanted}: {all_chosen.text} ({why})"


def settle_engines(site: Site, inventory: Inventory) -> tuple[Site, str]:
    """Apply `per_gpu = "auto"`: one engine of a model that is not small, that is unknown, or that
    does not fit twice. Return the site, and why it has one engine.

    The number of engines decides their names and ports, so the checks come after it.
    """
    engine = site.profile.vllm[0]
    if not engine.is_automatic or engine.per_gpu == 1:
        return site, ""
    model = inventory.models[engine.name]
    if not isinstance(model, Model):
        why = model
    elif model.parameters >= MOST_PARAMETERS_OF_TWO:
        why = f"{model.parameters / 1e9:.1f} billion parameters"
    else:
        try:
            why = "two do not fit" if lack(memory.site_budget(site, inventory)) else ""
        except ValueError:  # the settings contradict each other; the checks report it
            why = ""
    if not why:
        return site, ""
    one = replace(site, profile=with_settings(site.profile, {"vllm.per_gpu": 1}))
    return one, f"per_gpu = auto: one engine ({why})"


def _lean(settings: TrainingConfig, fixed: set[str]) -> dict[str, Any]:
    """Settings that save GPU memory and keep the arithmetic."""
    lean = {
        "gradient_checkpointing": "on",
        "activation_offload": True,
        "optimizer_offload": not settings.trains_adapters,
    }
    if "trainer.gradient_checkpointing" in fixed and settings.gradient_checkpointing != "on":
        lean.pop("activation_offload")  # it needs checkpointing, which the profile turns off
    return {
        f"trainer.{key}": value
        for key, value in lean.items()
        if value and f"trainer.{key}" not in fixed
    }


def lack(budget: Budget) -> str:
    missing = [
        f"{device.name} {'lack' if device.name.startswith('GPUs') else 'lacks'} "
        f"{memory.size_text(device.wanted - device.total)} of {memory.size_text(device.wanted)}"
        for device in memory.alike(budget.devices)
        if device.total is not None and device.wanted > device.total
    ]
    return "; ".join([*missing, *budget.too_small_caches])


def advice(site: Site, inventory: Inventory) -> list[str]:
    if not (missing := lack(memory.site_budget(site, inventory))):
        return []
    found = nearest(site, inventory)
    if not found:
        if not on_gpus(site.profile, training_config(site), inventory):
            return []
        text = f"{missing}. No known settings make it fit: use a smaller model, or larger GPUs"
        return [text, *filter(None, [_gpus_wanted(site, inventory)])]
    lines = [f"{missing}. The nearest settings that fit, cheapest first:"]
    for fit in found:
        cost = (
            f"about {fit.cost:.2g} times as long a step"
            if fit.cost < LAST
            else "at the cost of precision"
        )
        if gpus := fit.settings.get("trainer.gpus") or fit.settings.get("vllm.gpus"):
            cost = f"on {len(gpus)} GPUs"
        if "mode" in fit.settings:
            cost = "training adapters instead of the model"
        lines += [f"  # {cost}; {use_text(fit.budget)}", *(f"  {line}" for line in fit.lines), ""]
    return lines[:-1]


def _gpus_wanted(site: Site, inventory: Inventory) -> str:
    settings, machine = training_config(site), inventory.machine
    if site.traits.shares_memory or not site.profile.trainer.gpus:
        return ""
    kind, first = machine.gpus[site.profile.trainer.gpus[0]], len(machine.gpus)

    def needed(chosen: Mapping[str, Any]) -> int | None:
        # The added GPUs are of the trainer's own kind, and hold nothing else.
        for count in range(1, MOST_RANKS + 1):
            more = replace(
                inventory, machine=replace(machine, gpus=(*machine.gpus, *[kind] * count))
            )
            gpus = {"trainer.gpus": list(range(first, first + count))}
            devices = budget_with(site, settings, more, {**chosen, **gpus}).devices
            own = [
                each
                for each in devices
                if each.items[0].component == "trainer" and each.total is not None
            ]
            if all(each.wanted <= (1 - SLACK) * (each.total or 0) for each in own):
                return count
        return None

    least = {"trainer.gradient_checkpointing": "on"}
    if not settings.trains_adapters:
        least |= {"trainer.optimizer": "adamw_8bit", "trainer.master_weights": "stochastic"}
    changes = ", ".join(f"{key} = {toml(value)}" for key, value in least.items())
    found = {"as it is": needed({}), f"with {changes}": needed(least)}
    # The lean settings save no GPU, so they are not worth a mention.
    if len({*found.values()}) == 1:
        found.popitem()
    texts = [
        f"{count} {how}" if count else f"more than {MOST_RANKS} {how}"
        for how, count in found.items()
    ]
    return f"The trainer alone needs {kind.name} GPUs: {', '.join(texts)}"


def use_text(budget: Budget) -> str:
    known = [device for device in memory.alike(budget.devices) if device.total is not None]
    return ", ".join(
        f"{d.name}: {memory.size_text(d.wanted)} of {memory.size_text(d.total or 0)}" for d in known
    )


KEY = "inference_gpus"


def split_gpus(profile: Profile, machine: Hardware) -> Profile | Problem:
    """Replace `inference_gpus` by `gpus` of engine and trainer."""
    wanted, there, engine = profile.inference_gpus or 0, len(machine.gpus), profile.vllm[0]
    if traits_of(profile).shares_memory or not traits_of(profile).feeds_all:
        fix = f'remove it and set vllm.gpus, or use mode = "broadcast" (now "{profile.mode}")'
        return Problem("trainer and engine use the same GPUs in this mode", fix, key=KEY)
    named = [
        key
        for key, gpus in (("vllm.gpus", engine.gpus), ("trainer.gpus", profile.trainer.gpus))
        if gpus
    ]
    if named or len(profile.vllm) > 1:
        what = " and ".join(named) or "several [[vllm]]"
        return Problem(f"divides the GPUs, and so do {what}", "remove one of the two", key=KEY)
    if not there:
        fix = "remove it; on the CPU vllm.replicas = 2 makes two engines"
        return Problem("this machine has no NVIDIA GPU to divide", fix, key=KEY)
    each = engine.gpus_needed
    # Whole engines, and at least one GPU left for the trainer.
    possible = [
        count for count in range(each, there, each) if engine.replicas in (None, count // each)
    ]
    if wanted not in possible:
        engines = f"{engine.replicas} engines" if engine.replicas else "engines"
        fix = (
            f"use one of: {', '.join(map(str, possible))}"
            if possible
            else "use a machine with more GPUs"
        )
        return Problem(
            f"{wanted} of {there} GPUs cannot be divided into {engines} of {each} GPUs with "
            f"one left for the trainer",
            fix,
            key=KEY,
        )
    return profile.model_copy(
        update={
            KEY: None,
            "vllm": [engine.model_copy(update={"gpus": list(range(wanted))})],
            "trainer": profile.trainer.model_copy(update={"gpus": list(range(wanted, there))}),
        }
    )


def split_text(profile: Profile, divided: Profile) -> str:
    engines, trainer = divided.vllm[0].gpus, divided.trainer.gpus
    return (
        f"{KEY} = {profile.inference_gpus}: {len(divided.engines)} x engine on {engines}, the "
        f"trainer on {trainer}"
    )
