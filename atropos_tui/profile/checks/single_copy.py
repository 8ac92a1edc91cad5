"""Cross-checks of single copy, in which trainer and engine share one set of weights. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from atropos_tui.errors import Problem
from atropos_tui.profile.errors import counted
from atropos_tui.profile.profile import Profile
from atropos_tui.profile.sections import EngineSection
from atropos_tui.profile.site import copied, fed_sections, receivers, traits_of
from trainer_core.config import TrainingConfig

SAFE_LOADING = ("auto", "safetensors", "pt", "hf", "mistral", "fastsafetensors")
"""Load formats that store each weight as the model has it."""


def check_place(profile: Profile) -> Iterator[Problem]:
    engine, trainer = profile.engines[0], profile.trainer
    if engine.tensor_parallel > 1 and traits_of(profile).lora:
        yield Problem(
            "adapters in single copy need the whole model on one GPU, but a tensor-parallel "
            "engine divides it",
            "set tensor_parallel = 1, or trainer.single_copy = false with separate GPUs for "
            "the trainer",
            key="vllm.0.tensor_parallel",
        )
    if trainer.gpus and trainer.gpus != engine.gpus:
        fix = f"set trainer.gpus = {engine.gpus}"
        if not engine.gpus:
            count = len(trainer.gpus)
            workers = f" and vllm.tensor_parallel = {count}" if count != engine.gpus_needed else ""
            fix = f"set vllm.gpus = {trainer.gpus}{workers}"
        where = f"GPU {engine.gpus}" if engine.gpus else "no GPU by name"
        which = f"the first engine, {engine.name}," if receivers(profile) else "the engine"
        if trainer.gpus in [other.gpus for other in receivers(profile)]:
            fix += f", or set vllm.gpus so that GPU {trainer.gpus} comes first"
        yield Problem(
            f"single copy needs trainer and engine on the same GPUs, and {which} has {where}",
            f"{fix}, or leave trainer.gpus out",
            key="trainer.gpus",
        )
    if engine.gpus and trainer.settings.get("device") == "cpu":
        yield Problem(
            f"single copy shares the engine's memory, which is on GPU {engine.gpus}",
            'use "auto", or set vllm.gpus = []',
            key="trainer.device",
        )


def check_further_engines(profile: Profile) -> Iterator[Problem]:
    """Engines that get the weights from the memory of the first."""
    others = [*copied(profile), *receivers(profile)]
    if not others:
        return
    first = profile.engines[0]
    if first.tensor_parallel > 1:
        yield Problem(
            f"with further engines ({', '.join(each.name for each in others)}) single copy needs "
            f"the whole model on the trainer's GPU, but {first.name} divides it among "
            f"{first.tensor_parallel}",
            f"set vllm.tensor_parallel = 1, vllm.gpus = {first.gpus} for one engine, or "
            'mode = "broadcast"',
            key="vllm.0.tensor_parallel",
        )
    # Without any `gpus` the stack runs on CPUs.
    for index, section in fed_sections(profile).items() if first.gpus else ():
        if not (section.gpus or profile.is_spread):
            yield Problem(
                f"{section.name} gets its weights by broadcast, so it needs a GPU of its own",
                f"name its GPUs, other than {first.gpus}",
                key=f"vllm.{index}.gpus",
            )


_UNSHARED = {
    "quantization": "quantized weights cannot be trained in place",
    "enable-sleep-mode": "a sleeping engine frees the memory of its weights, which the trainer "
    "uses",
    "enable-lora": "adapters wrap the layers whose weights are shared",
}
"""vLLM flags with which a weight in memory differs from the trainer's."""


def check_flags(engine: EngineSection, *, adapters: bool) -> Iterator[Problem]:
    for name, why in _UNSHARED.items():
        if adapters and name == "enable-lora":
            continue
        if engine.flag(name) not in (None, False):
            yield Problem(why, "remove it, or use another mode", key=engine.profile_key(0, name))
    for name in ("pipeline-parallel-size", "data-parallel-size"):
        if engine.flag_number(name, 1) > 1:
            fix = "set it to 1, or remove it"
            yield Problem(
                "single copy attaches to one process of vLLM", fix, key=engine.profile_key(0, name)
            )
    if engine.flag_number("cpu-offload-gb", 0) > 0:
        reason = "weights on the host cannot be shared with the trainer"
        yield Problem(reason, "remove it", key=engine.profile_key(0, "cpu-offload-gb"))
    loading = engine.flag("load-format")
    if loading is not None and loading not in SAFE_LOADING:
        reason = f"single copy cannot share weights that were loaded as {loading!r}"
        yield Problem(
            reason,
            f"use one of: {', '.join(SAFE_LOADING)}",
            key=engine.profile_key(0, "load-format"),
        )


_TYPES = {"half": "float16", "float": "float32"}


def check_dtype(engine: EngineSection, settings: TrainingConfig) -> Iterator[Problem]:
    # "auto" follows the model's own type, which is unknown here.
    theirs = _TYPES.get(engine.dtype or "", engine.dtype)
    if theirs is not None and "auto" not in (theirs, settings.dtype) and theirs != settings.dtype:
        yield Problem(
            f"single copy has one set of weights, and trainer.dtype is {settings.dtype}",
            f"set it to {settings.dtype!r}, or leave it out",
            key="vllm.0.dtype",
        )


def check_ranks(profile: Profile, gpus: list[int], ranks: int) -> Iterator[Problem]:
    """Ranks that differ from the engine's workers because of `trainer.processes`."""
    # In single copy rank i trains on the memory of worker i.
    workers = profile.vllm[0].tensor_parallel
    same_gpus = profile.is_spread or profile.trainer.gpus in ([], profile.engines[0].gpus)
    if ranks != workers and same_gpus and len(gpus) in (0, workers):
        given = "" if profile.trainer.processes else " (it is not set, which means 1)"
        reason = (
            f"{counted(ranks, 'rank')}{given} for {counted(workers, 'worker')} of the engine: in "
            f"single copy each"
        )
        fix = f"set it to {workers}" + (", or leave it out" if gpus or workers == 1 else "")
        yield Problem(
            f"{reason} rank shares the memory of one worker", fix, key="trainer.processes"
        )
