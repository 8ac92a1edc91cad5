"""Whether engines, trainer and environments fit each other: GPUs, shares of memory, lengths, types, adapters. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from atropos_tui.errors import Problem
from atropos_tui.stack.components import Site, env_engine, fed_engines
from atropos_tui.stack.flags import flag, gpus_needed, number, written
from atropos_tui.stack.modes import TRAITS
from atropos_tui.stack.plan import training_config
from atropos_tui.stack.profile import EngineSection, Profile
from atropos_tui.stack.sizes import VLLM_FRACTION
from trainer_core.config import TrainingConfig
from trainer_core.contracts.bridge import LORA_RANKS, server_rank

SAFE_LOADING = ("auto", "safetensors", "pt", "hf", "mistral", "fastsafetensors")
"""Load formats that leave each weight in memory as the model has it."""
PROCESSED = "processed_logprobs"


def check_engines(site: Site, file: str) -> list[Problem]:
    """Every contradiction between the engines and the rest of the profile."""
    profile = site.profile
    problems = [*_several(profile, file), *_gpu_lists(profile, file), *_shares(profile, file)]
    problems += _logprobs(profile, file)
    if TRAITS[profile.mode].shares_memory:
        problems += _single_copy_place(profile, file)
        problems += _single_copy_flags(profile.vllm[0], file)
    if TRAITS[profile.mode].other_gpus:
        problems += _other_gpus(profile, file)
    try:
        settings = training_config(site, grouped=False)
    except ValueError:
        return problems  # told elsewhere
    problems += _lengths(profile, settings, file)
    if TRAITS[profile.mode].shares_memory:
        problems += _single_copy_type(profile.vllm[0], settings, file)
    if TRAITS[profile.mode].lora:
        problems += _adapters(profile.vllm[0], settings, file)
    return problems


def _several(profile: Profile, file: str) -> Iterator[Problem]:
    """Rollouts must come from an engine that the trainer feeds."""
    first = profile.vllm[0]
    if first.model is not None:
        yield Problem(
            "the trainer feeds the first engine, so that serves the stack's model",
            "set `model` at the top instead; another model is for a further [[vllm]]",
            file,
            "vllm.0.model",
        )
    for index, env in enumerate(profile.env):
        key = f"env.{index}.engine"
        if env.engine is None or env.engine in [engine.name for engine in fed_engines(profile)]:
            continue
        names = ", ".join(engine.name for engine in profile.vllm)
        if env_engine(profile, env).name != env.engine:
            yield Problem(f"no engine is called {env.engine!r}", f"use one of: {names}", file, key)
        else:
            yield Problem(
                f"the trainer feeds {', '.join(engine.name for engine in fed_engines(profile))}: rollouts of "
                f"{env.engine} would come from weights that no update reaches",
                f'use engine = {first.name!r}, or mode = "broadcast" with engines of one model',
                file,
                key,
            )


def _gpu_lists(profile: Profile, file: str) -> Iterator[Problem]:
    for index, engine in enumerate(profile.vllm):
        key, needed = f"vllm.{index}.gpus", gpus_needed(engine)
        if len(set(engine.gpus)) < len(engine.gpus):
            yield Problem(f"names a GPU twice: {engine.gpus}", "name each GPU once", file, key)
        elif engine.gpus and len(engine.gpus) != needed:
            plural = "GPU" if len(engine.gpus) == 1 else "GPUs"
            yield Problem(
                f"{len(engine.gpus)} {plural} for an engine that takes {needed} (tensor_parallel = "
                f"{engine.tensor_parallel})",
                f"set vllm.tensor_parallel = {len(engine.gpus)}, or name {needed}",
                file,
                key,
            )


def _shares(profile: Profile, file: str) -> Iterator[Problem]:
    """Several engines on one GPU: their shares must fit on it."""
    on: dict[int, list[tuple[int, float]]] = {}
    for index, engine in enumerate(profile.vllm):
        if flag(engine, "kv-cache-memory-bytes") is None:
            for gpu in dict.fromkeys(engine.gpus):
                on.setdefault(gpu, []).append((index, engine.gpu_memory_utilization or VLLM_FRACTION))
    told: set[int] = set()
    for gpu, shares in on.items():
        total, last = sum(share for _, share in shares), shares[-1][0]
        if len(shares) > 1 and total > 1 and last not in told:
            told.add(last)
            parts = " + ".join(f"{profile.vllm[index].name} {share:g}" for index, share in shares)
            yield Problem(
                f"the engines on GPU {gpu} take {total:.2f} of its memory ({parts})",
                f"let them add up to less than 1, such as {0.9 / len(shares):.2f} each",
                file,
                f"vllm.{last}.gpu_memory_utilization",
            )


def _logprobs(profile: Profile, file: str) -> Iterator[Problem]:
    mode = flag(profile.vllm[0], "logprobs-mode")
    if mode not in (None, PROCESSED):
        yield Problem(
            f"{mode!r} are not the logprobs that were sampled from, and the trainer's ratios need those",
            f'use "{PROCESSED}", or leave it out',
            file,
            f"vllm.0.args.{written(profile.vllm[0], 'logprobs-mode')}",
        )


def _single_copy_place(profile: Profile, file: str) -> Iterator[Problem]:
    engine, trainer = profile.vllm[0], profile.trainer
    if engine.tensor_parallel > 1:
        yield Problem(
            "single copy cannot attach to a tensor-parallel engine in this version: a rank holds part of the weights",
            "set tensor_parallel = 1 and one GPU, with a model that fits on it",
            file,
            "vllm.0.tensor_parallel",
        )
    if trainer.gpus and trainer.gpus != engine.gpus:
        fix = f"set trainer.gpus = {engine.gpus}" if engine.gpus else f"set vllm.gpus = {trainer.gpus}"
        where = f"GPU {engine.gpus}" if engine.gpus else "no GPU by name"
        yield Problem(
            f"single copy needs trainer and engine on the same GPU, and the engine has {where}",
            f"{fix}, or leave trainer.gpus out",
            file,
            "trainer.gpus",
        )
    if engine.gpus and trainer.settings.get("device") == "cpu":
        yield Problem(
            f"single copy shares the engine's memory, and that is on GPU {engine.gpus}",
            'use "auto", or take vllm.gpus out',
            file,
            "trainer.device",
        )


def _single_copy_flags(engine: EngineSection, file: str) -> Iterator[Problem]:
    """Flags after which a weight in the engine's memory is not what the trainer has, or not where it looks."""
    conflicts = {
        "quantization": "quantized weights cannot be trained in place",
        "enable-sleep-mode": "a sleeping engine gives its weights' memory away, and the trainer is attached to it",
        "enable-lora": "adapters wrap the layers whose weights are shared",
    }
    for name, why in conflicts.items():
        if flag(engine, name) not in (None, False):
            yield Problem(why, "take it out, or use another mode", file, f"vllm.0.args.{written(engine, name)}")
    for name in ("pipeline-parallel-size", "data-parallel-size"):
        if number(engine, name, 1) > 1:
            key = f"vllm.0.args.{written(engine, name)}"
            yield Problem("single copy attaches to one process of vLLM", "set it to 1, or take it out", file, key)
    if number(engine, "cpu-offload-gb", 0) > 0:
        key = f"vllm.0.args.{written(engine, 'cpu-offload-gb')}"
        yield Problem("weights on the host cannot be shared with the trainer", "take it out", file, key)
    loading = flag(engine, "load-format")
    if loading is not None and loading not in SAFE_LOADING:
        yield Problem(
            f"single copy cannot share weights that were loaded as {loading!r}",
            f"use one of: {', '.join(SAFE_LOADING)}",
            file,
            f"vllm.0.args.{written(engine, 'load-format')}",
        )


_TYPES = {"half": "float16", "float": "float32"}


def _single_copy_type(engine: EngineSection, settings: TrainingConfig, file: str) -> Iterator[Problem]:
    theirs = _TYPES.get(engine.dtype or "", engine.dtype)
    if theirs is not None and "auto" not in (theirs, settings.dtype) and theirs != settings.dtype:
        yield Problem(
            f"single copy has one set of weights, and the trainer's are {settings.dtype}",
            f"set it to {settings.dtype!r}, or leave it out",
            file,
            "vllm.0.dtype",
        )


def _other_gpus(profile: Profile, file: str) -> Iterator[Problem]:
    trainer = set(profile.trainer.gpus)
    unnamed = [f"vllm.{index}.gpus" for index, engine in enumerate(profile.vllm) if not engine.gpus]
    unnamed += [] if trainer else ["trainer.gpus"]
    if len(unnamed) <= len(profile.vllm):  # none at all is a machine without GPUs
        for key in unnamed:
            yield Problem("a broadcast goes to other GPUs, so all of them must be named", "name its GPUs", file, key)
    for index, engine in enumerate(profile.vllm):
        if both := sorted(trainer & set(engine.gpus)):
            yield Problem(
                f"a broadcast goes to other GPUs, and GPU {both} has trainer and engine",
                'give each GPUs of its own, or use mode = "shared_vllm"',
                file,
                f"vllm.{index}.gpus",
            )


def _lengths(profile: Profile, settings: TrainingConfig, file: str) -> Iterator[Problem]:
    longest = profile.vllm[0].max_model_len
    if longest is None:
        return
    if "seq_len" in settings.model_fields_set and settings.seq_len > longest:
        yield Problem(
            f"sequences of {settings.seq_len} tokens cannot come from an engine with max_model_len = {longest}",
            f"set trainer.seq_len = {longest}, or raise vllm.max_model_len",
            file,
            "trainer.seq_len",
        )
    for index, env in enumerate(profile.env):
        wanted = env.args.get("env.max_token_length")
        if isinstance(wanted, int) and wanted > longest:
            yield Problem(
                f"asks for sequences of {wanted} tokens, and an engine with max_model_len = {longest} refuses them",
                f"set it to {longest}, or raise vllm.max_model_len",
                file,
                f"env.{index}.args.env.max_token_length",
            )


def _adapters(engine: EngineSection, settings: TrainingConfig, file: str) -> Iterator[Problem]:
    given = flag(engine, "max-lora-rank")
    key = f"vllm.0.args.{written(engine, 'max-lora-rank')}"
    ranks = ", ".join(map(str, LORA_RANKS))
    if flag(engine, "enable-lora") is False:
        key_off = f"vllm.0.args.{written(engine, 'enable-lora')}"
        yield Problem("this mode serves adapters", "take it out: the plan sets it", file, key_off)
    if given is not None and given not in LORA_RANKS:
        yield Problem(f"vLLM takes no rank {given}", f"use one of: {ranks}", file, key)
    elif settings.lora_r > LORA_RANKS[-1]:
        yield Problem(f"vLLM serves adapters up to rank {LORA_RANKS[-1]}", "lower it", file, "trainer.lora_r")
    elif isinstance(given, int) and settings.lora_r > given:
        fit = server_rank(settings.lora_r)
        yield Problem(
            f"the trainer's adapters have rank {settings.lora_r}, and the server takes up to {given}",
            f"set it to {fit}, leave it out, or lower trainer.lora_r",
            file,
            key,
        )
