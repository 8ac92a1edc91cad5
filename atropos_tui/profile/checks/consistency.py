"""Cross-checks of a profile that need no machine: all problems together, each with its fix. Pure.

Keys name entries of `[[env]]` and `[[vllm]]` by index: `vllm.0.gpus`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd, lcm
from typing import Any
from urllib.parse import urlsplit

from atropos_common.net.ports import is_loopback, is_wildcard
from atropos_common.protocol.bridge import LORA_RANKS, ROUTING_FLAG, server_rank
from atropos_tui.cluster.checks import check_nodes, crowded, unused_gpus
from atropos_tui.errors import Problem
from atropos_tui.profile.checks import single_copy
from atropos_tui.profile.errors import (
    as_keys,
    counted,
    gpu_named_twice,
    key_text,
    one_engine_fed,
    printable,
)
from atropos_tui.profile.placement import host_names, part_names
from atropos_tui.profile.profile import Profile
from atropos_tui.profile.redact import is_plain_setting, is_secret_name
from atropos_tui.profile.schema import SECTION_LISTS, KeyPath
from atropos_tui.profile.sections import EngineSection, EnvSection, ExtraSection
from atropos_tui.profile.site import (
    Site,
    env_engines,
    fed_engines,
    fed_sections,
    longest_sequence,
    meeting_address,
    receivers,
    trainer_gpus,
    trainer_placements,
    trainer_ranks,
    training_config,
    traits_of,
)
from atropos_tui.profile.spec import (
    ComponentSpec,
    StackSpec,
    dependency_faults,
    is_hosted,
    references,
)
from trainer_core.config import TrainingConfig, never_filled, sharding_contradictions

MAX_REASON = 1000
"""Characters of a reason or fix: both may quote the profile."""
PROCESSED = "processed_logprobs"
IN_ARGV = (
    "is in its command line, which every user of this machine can read: pass it as a variable "
    "under env"
)
LEAST_ADAPTER_LR = 5e-5
"""Learning rate below which a LoRA profile was probably meant for the whole model."""


def check_profile(site: Site) -> list[Problem]:
    profile = site.profile
    if other := list(_other_trainer(profile)):
        return other
    if nodes := check_nodes(profile):
        return nodes  # placement errors first: the later checks depend on the placement
    problems = [
        *_trainer_gpus(profile),
        *_fed(profile),
        *_names(profile),
        *_ports(profile),
        *_urls(site),
    ]
    problems += [*_derived(profile), *_twice(profile), *_server_types(profile), *_several(profile)]
    problems += [*_gpu_lists(profile), *crowded(profile)] if not profile.is_spread else []
    problems += [*_logprobs(profile), *_fed_urls(site)]
    if site.traits.shares_memory:
        problems += [
            *single_copy.check_further_engines(profile),
            *single_copy.check_place(profile),
            *single_copy.check_flags(profile.vllm[0], adapters=site.traits.lora),
        ]
    if site.traits.other_gpus and not profile.is_spread:
        problems += _other_gpus(profile)
    try:
        settings = training_config(site, grouped=False)
    except ValueError as error:
        fix = "change one of the two settings under [trainer]"
        return problems + [Problem(line, fix, key="trainer") for line in str(error).splitlines()]
    problems += [
        *(_groups(profile, settings) if profile.trainer.command is None else []),
        *_meeting_place(site, settings),
        *_lengths(profile, settings),
    ]
    problems += _recorded(settings)
    fix = "change trainer.optimizer, or give the trainer one GPU"
    problems += [
        Problem(reason, fix, key="trainer")
        for reason in sharding_contradictions(settings, trainer_ranks(profile))
    ]
    if site.traits.shares_memory:
        problems += single_copy.check_dtype(profile.vllm[0], settings)
    if settings.routing_replay:
        problems += [
            found
            for index, engine in fed_sections(profile).items()
            for found in _routing(index, engine, on_gpu=settings.device != "cpu")
        ]
    if site.traits.lora:
        for index, engine in fed_sections(profile).items():
            problems += _adapters(index, engine, settings)
    return problems


def placed(problem: Problem, profile: Profile) -> Problem:
    """A problem with the user's spelling of its key, and the file that sets it."""
    first, *rest = problem.key.split(".")
    key = problem.key
    path: KeyPath = (first, *rest)
    if first in SECTION_LISTS and rest and rest[0].isdecimal():
        path = (first, int(rest[0]), *rest[1:])
        key = key_text(path, {first: [{"name": part.name} for part in getattr(profile, first)]})
    reason, fix = printable(problem.reason, MAX_REASON), printable(problem.fix, MAX_REASON)
    return profile.origins.problem(reason, fix, path, key)


def check_graph(profile: Profile, stack: StackSpec) -> list[Problem]:
    """Dependencies that no start order satisfies."""
    return [
        replace(each, key=f"{profile.section_of(each.key)}.depends_on")
        for each in dependency_faults(stack)
    ]


def check_curriculum(profile: Profile, stack: StackSpec) -> list[Problem]:
    """Environments whose items nobody can choose, because they do not run in our host."""
    hosted = {spec.name for spec in stack.components if is_hosted(spec.command)}
    fix = 'run it by `module` or `script`, from a class of atroposlib\'s BaseEnv, or set "none"'
    return [
        Problem(
            f"curriculum needs an environment that atropos-tui hosts, and {env.name} is not",
            fix,
            key=f"env.{index}.curriculum",
        )
        for index, env in enumerate(profile.env)
        if env.curriculum != "none" and env.name not in hosted
    ]


def check_notes(site: Site) -> list[str]:
    """Notes about keys that have no effect, or more than expected."""
    profile = site.profile
    notes = [
        f"{key}.env.VLLM_USE_V1 is ignored: vLLM has only its V1 engine"
        for key, part in profile.parts.items()
        if "VLLM_USE_V1" in part.env
    ]
    settings = training_config(site, grouped=False)
    if beyond := sorted(
        {part.address for part in site.hosts.nodes if not is_loopback(part.address)}
    ):
        notes.append(
            f"WARNING run-api, engines and trainer use the addresses {', '.join(beyond[:4])}"
            f"{', ...' if beyond[4:] else ''} without encryption: use a network that you trust"
        )
    elif receivers(profile) and not is_loopback(place := meeting_address(site, settings)):
        notes.append(
            f"WARNING {_meeting_key(settings)}: the broadcast's group meets at {place}, beyond "
            "the loopback. Weights are not encrypted, and anyone on that network can read them or "
            "break the group: use a network that you trust"
        )
    # A note, not a problem: idle GPUs may be intended.
    for node, gpus in unused_gpus(profile).items():
        notes.append(f"{counted(gpus, 'GPU')} of {node} {'is' if gpus == 1 else 'are'} unused")
    asked = {engine.name for env in profile.env for engine in env_engines(profile, env)}
    if idle := [engine.name for engine in fed_engines(profile) if engine.name not in asked]:
        notes.append(
            f"WARNING no environment uses {', '.join(idle)}: remove `engine` from an "
            f"environment, and it uses all"
        )
    if site.traits.lora and 0 < settings.lr < LEAST_ADAPTER_LR:
        notes.append(
            f"WARNING trainer.lr = {settings.lr:g} suits a whole model; an adapter learns almost "
            "nothing with it. Use 1e-4 to 2e-4"
        )
    return notes


def check_commands(stack: StackSpec) -> list[str]:
    return [f"WARNING {part.name}: {note}" for part in stack.components for note in _exposed(part)]


def _exposed(part: ComponentSpec) -> Iterator[str]:
    command, own = part.command, part.place.address if part.place else ""
    for flag, value in _flags(command):
        if flag == "--host" and value != own and not is_loopback(value.strip("[]")):
            yield (
                f"--host {printable(value)} makes it reachable for everybody on that network: "
                "leave it out for the loopback, and use ssh -L from other machines"
            )
        elif flag == "--middleware":
            yield (
                f"--middleware {printable(value)} runs code that sees every request with the "
                f"run's key"
            )
        elif flag == "--trust-remote-code" and value.lower() != "false":
            yield (
                "--trust-remote-code runs Python code of the model's author: read it first, and "
                "pin its revision"
            )
        elif is_secret_name(flag) and value and not is_plain_setting(value):
            yield f"the value of {printable(flag)} {IN_ARGV}"
    for name in sorted(
        {name for word in command for name in references(word) if is_secret_name(name)}
    ):
        yield f"${{{name}}} {IN_ARGV}"


def _flags(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            yield flag, value if equals else ("" if after.startswith("--") else after)


def _meeting_key(settings: TrainingConfig) -> str:
    return "trainer.init_method" if settings.init_method != "env://" else "trainer.env.MASTER_ADDR"


def _meeting_place(site: Site, settings: TrainingConfig) -> Iterator[Problem]:
    if receivers(site.profile) and is_wildcard(place := meeting_address(site, settings)):
        yield Problem(
            f"{place} means every interface of this machine, but a broadcast's group needs "
            f"one address",
            "leave it out for the loopback, or give the one address that the servers reach",
            key=_meeting_key(settings),
        )


def _fed_urls(site: Site) -> Iterator[Problem]:
    """The trainer must feed the profile's own engines: an engine that waits for weights answers
    nothing."""
    named = site.profile.trainer.settings.get("vllm_urls")
    by_broadcast = receivers(site.profile) or fed_engines(site.profile)
    fed = [site.engine_url(engine) for engine in by_broadcast]
    if named and sorted(url.rstrip("/") for url in _words(named)) != sorted(fed):
        yield Problem(
            f"the trainer would not feed {', '.join(fed)}, which this profile starts and which "
            "answer no request before they have weights",
            "leave it out: the plan derives it. For a server on another machine add a [[vllm]] "
            "with `node`, see docs/cluster.md; for servers outside the stack run the trainer "
            "alone: python -m trainer_core",
            key="trainer.vllm_urls",
        )


def _words(value: Any) -> list[str]:
    return (
        value.replace(",", " ").split() if isinstance(value, str) else [str(each) for each in value]
    )


def _other_trainer(profile: Profile) -> Iterator[Problem]:
    if profile.trainer.command is None:
        return
    for key in profile.trainer.settings:
        reason = "is a setting of our trainer, which trainer.command replaces"
        yield Problem(reason, "leave it out, and put it into the command", key=f"trainer.{key}")
    # The other modes need our trainer's side of the protocol.
    if profile.mode != "none":
        reason = (
            f'mode = "{profile.mode}" is how our trainer publishes weights, and trainer.command '
            f"replaces that trainer"
        )
        yield Problem(
            reason,
            'set mode = "none"; docs/trainers.md has other ways to publish weights',
            key="mode",
        )


def _trainer_gpus(profile: Profile) -> Iterator[Problem]:
    if profile.is_spread and not traits_of(profile).shares_memory:
        return  # `checks_nodes` checks them
    gpus, ranks = trainer_gpus(profile), trainer_ranks(profile)
    if len(set(gpus)) < len(gpus):
        if profile.trainer.gpus:  # else they are the engine's, and `_gpu_lists` reports it
            reason = f"a GPU is named twice in {gpus}"
            yield Problem(
                reason, "name each once: every rank needs its own GPU", key="trainer.gpus"
            )
    elif traits_of(profile).shares_memory:
        # The number of workers may be the mistake.
        if not any(single_copy.check_further_engines(profile)):
            yield from single_copy.check_ranks(profile, gpus, ranks)
    elif gpus and ranks != len(gpus):
        reason = (
            f"{counted(ranks, 'rank')} and {counted(len(gpus), 'GPU')}: each rank needs one GPU"
        )
        yield Problem(reason, f"set it to {len(gpus)}, or leave it out", key="trainer.processes")


def _fed(profile: Profile) -> Iterator[Problem]:
    nodes, fed = profile.trainer.settings.get("num_inference_nodes"), len(fed_engines(profile))
    if nodes and nodes != fed:
        one = (
            "" if traits_of(profile).feeds_all else ' with mode = "broadcast": this mode feeds one'
        )
        yield Problem(
            f"{nodes} inference servers, but the trainer feeds {fed} of this profile's",
            f"leave it out, or set vllm.replicas = {nodes}{one}",
            key="trainer.num_inference_nodes",
        )


def _names(profile: Profile) -> list[Problem]:
    named = [
        ("api", "api"),
        *(
            (name, "trainer")
            for name in host_names("trainer", len(trainer_placements(profile)) or 1)
        ),
    ]
    named += [(name, f"component.{name}") for name in profile.component]
    named += [(part.name, f"env.{index}.name") for index, part in enumerate(profile.env)]
    named += [
        (name, f"vllm.{index}.name")
        for index, made in enumerate(profile.placed)
        for part, placements in made
        for name in part_names(part.name, len(placements))
    ]
    named += [(part.name, f"prepare.{index}.name") for index, part in enumerate(profile.prepare)]
    last = dict(named)  # a later entry wins, so the problem names the last key with that name
    return [
        Problem(
            f"the name {name!r} is used {count} times",
            "give each component its own name",
            key=last[name],
        )
        for name, count in Counter(name for name, _ in named).items()
        if count > 1
    ]


def _ports(profile: Profile) -> Iterator[Problem]:
    seen: dict[int, str] = {}
    for key, port in profile.used_ports():
        if port in seen:
            yield Problem(f"port {port} is also {seen[port]}", "choose distinct ports", key=key)
        seen.setdefault(port, key)
    if profile.api.host not in ("127.0.0.1", "localhost") and not profile.is_spread:
        reason = "run-api would be open to the network, but all its clients are on this machine"
        yield Problem(reason, 'use "127.0.0.1"; for several machines add [cluster]', key="api.host")


_API_URL = re.compile(r"(rollout_server|atropos|run_api|api_server)_url$")
_ENGINE_URL = re.compile(r"(base|vllm|openai_base)_url$")


def _urls(site: Site) -> Iterator[Problem]:
    profile = site.profile
    # An extra component may be a server too, such as a judge.
    servers = {engine.port for engine in profile.engines} | {
        part.port for part in profile.component.values()
    }
    for key, name, value in _settings(site):
        if (port := _loopback_port(value)) is None:
            continue
        # Variables and flags follow the same patterns: OPENAI_BASE_URL, --openai.base-url.
        flat = name.lower().replace("-", "_")
        if _API_URL.search(flat) and port != profile.api.port:
            fix = f"use http://127.0.0.1:{profile.api.port}, or set api.port = {port}"
            yield Problem(
                f"{name} names port {port}, but run-api has port {profile.api.port}", fix, key=key
            )
        elif _ENGINE_URL.search(flat) and port not in servers:
            own = profile.vllm[0].port
            fix = f"use http://127.0.0.1:{own}/v1, or set vllm.port = {port}"
            yield Problem(
                f"{name} names port {port}, where no server of this profile listens", fix, key=key
            )


def _settings(site: Site) -> Iterator[tuple[str, str, str]]:
    for key, part in site.profile.parts.items():
        if not isinstance(part, EnvSection | ExtraSection):
            continue
        words = site.texts(part.command or [])
        for word, following in zip(words, [*words[1:], ""], strict=False):
            name, equals, value = word.partition("=")
            yield (
                f"{key}.command",
                name.lstrip("-").rpartition(".")[2],
                value if equals else following,
            )
        for name, value in part.env.items():
            yield f"{key}.env.{name}", name, site.text(value)


def _loopback_port(text: str) -> int | None:
    try:
        url = urlsplit(text)
        return (
            url.port
            if url.scheme in ("http", "https") and url.hostname and is_loopback(url.hostname)
            else None
        )
    except ValueError:
        return None


DERIVED_FLAGS = {
    "vllm": {
        "model": "model",
        "host": "",
        "port": "vllm.port",
        "tensor-parallel-size": "vllm.tensor_parallel",
        "dtype": "vllm.dtype",
        "max-model-len": "vllm.max_model_len",
        "gpu-memory-utilization": "vllm.gpu_memory_utilization",
        "nnodes": "vllm.machines",
        "node-rank": "",
        "headless": "",
        "master-addr": "addresses of [[node]]",
    },
    "env": {
        "openai.base_url": "vllm.port",
        "openai.model_name": "model",
        "env.rollout_server_url": "api.port",
        "env.tokenizer_name": "model",
        "env.total_steps": "trainer.training_steps",
    },
}
"""Flags that the plan derives -> profile key to set instead (empty: none)."""


def _derived(profile: Profile) -> list[Problem]:
    sections = [
        ("vllm", f"vllm.{index}", list(part.args)) for index, part in enumerate(profile.vllm)
    ]
    sections += [("env", f"env.{index}", list(part.args)) for index, part in enumerate(profile.env)]
    return [
        Problem(
            "is set by atropos-tui",
            f"set {instead} instead" if instead else "remove it",
            key=f"{key}.args.{word}",
        )
        for kind, key, words in sections
        for word in words
        if (instead := DERIVED_FLAGS[kind].get(word.replace("_", "-") if kind == "vllm" else word))
        is not None
    ]


def _twice(profile: Profile) -> Iterator[Problem]:
    for index, engine in enumerate(profile.vllm):
        # Spelling of each flag that came first, for the message.
        first: dict[str, str] = {}
        for word in engine.args:
            name = word.replace("_", "-").removeprefix("no-")
            if name in first:
                reason = f"is the same flag as {first[name]}, and vLLM uses only one of them"
                yield Problem(reason, "remove one of the two", key=f"vllm.{index}.args.{word}")
            first.setdefault(name, word)


def _server_types(profile: Profile) -> Iterator[Problem]:
    for index, env in enumerate(profile.env):
        server_type = env.args.get("openai.server_type", "vllm")
        if server_type != "vllm":
            yield Problem(
                f"server_type {server_type!r} returns no logprobs, and GRPO cannot train "
                f"without them",
                'use "vllm", or leave it out',
                key=f"env.{index}.args.openai.server_type",
            )


def _groups(profile: Profile, settings: TrainingConfig) -> Iterator[Problem]:
    sizes = [
        size for env in profile.env if isinstance(size := env.args.get("env.group_size", 1), int)
    ]
    for index, env in enumerate(profile.env):
        size = env.args.get("env.group_size", 1)
        assert isinstance(size, int)  # EnvSection validates it
        if reason := never_filled(settings, size):
            yield Problem(
                as_keys(reason),
                f"set {batches_that_fill(settings, sizes)}, or another env.group_size",
                key=f"env.{index}.args.env.group_size",
            )


def batches_that_fill(settings: TrainingConfig, sizes: Sequence[int]) -> str:
    """Nearest settings with which groups of all `sizes` fill a batch."""
    # Change one key: the accumulation steps if they are in use, else the batch size.
    key, value, other = "batch_size", settings.batch_size, settings.gradient_accumulation_steps
    if other > 1:
        key, value, other = "gradient_accumulation_steps", other, value
    # The product of both settings has to be a multiple of every size; only `key` changes.
    multiple = lcm(*sizes) // gcd(lcm(*sizes), other)
    below = value // multiple * multiple
    return f"trainer.{key} = {' or '.join(str(each) for each in (below, below + multiple) if each)}"


def _recorded(settings: TrainingConfig) -> Iterator[Problem]:
    # The key is for `python -m trainer_core` alone.
    if settings.rollouts is not None:
        yield Problem(
            "a stack generates rollouts, but with recorded rollouts the trainer requests none",
            f"leave it out; without a stack: python -m trainer_core --model-name ... "
            f"--rollouts {settings.rollouts}",
            key="trainer.rollouts",
        )


def _several(profile: Profile) -> Iterator[Problem]:
    first = profile.vllm[0]
    if first.model is not None:
        yield Problem(
            "the trainer feeds the first engine, which therefore serves the stack's model",
            "set `model` at the top instead; add another [[vllm]] for another model",
            key="vllm.0.model",
        )
    fed = [engine.name for engine in fed_engines(profile)]
    for index, env in enumerate(profile.env):
        key = f"env.{index}.engine"
        if env.engine is None or env.engine in (*fed, first.name):
            continue
        names = [each.name for each in profile.vllm] + [each.name for each in profile.engines]
        if env.engine not in names:
            known = ", ".join(dict.fromkeys(names))
            yield Problem(f"no engine is called {env.engine!r}", f"use one of: {known}", key=key)
        elif not {each.name for each in env_engines(profile, env)} <= set(fed):
            yield Problem(
                f"the trainer feeds only {', '.join(fed)}: {env.engine} would generate with "
                f"weights that never change",
                f'use engine = {first.name!r}, or mode = "broadcast" with engines of one model',
                key=key,
            )


def _gpu_lists(profile: Profile) -> Iterator[Problem]:
    for index, section in enumerate(profile.vllm):
        key, count, each = f"vllm.{index}.gpus", len(section.gpus), section.gpus_needed
        # The modes with one fed engine feed the first [[vllm]], which must then be a single server.
        alone = index == 0 and not traits_of(profile).feeds_all
        engines = 1 if alone else len(section.engines) // section.per_gpu
        if alone and (section.replicas or 1) > 1:
            fix = 'leave it out, or use mode = "broadcast" with separate GPUs for the trainer'
            yield one_engine_fed(section.replicas or 1, fix, f"vllm.{index}.replicas")
        elif wrong := _per_gpu(profile, index, alone=alone):
            yield wrong
        elif len(set(section.gpus)) < count:
            yield gpu_named_twice(section.gpus, key)
        elif section.gpus and count != engines * each:
            takers = "an engine that takes" if engines == 1 else f"{engines} engines that take"
            yield Problem(
                f"{counted(count, 'GPU')} for {takers} {engines * each} (tensor_parallel = "
                f"{section.tensor_parallel})",
                f"set vllm.tensor_parallel = {count}, or name {engines * each}"
                if engines == 1
                else f"name {engines * each}, or leave vllm.replicas out: {count // each} engines "
                f"then",
                key=key,
            )


def _per_gpu(profile: Profile, index: int, *, alone: bool) -> Problem | None:
    """Return what is against several engines on the same GPUs."""
    section, key = profile.vllm[index], f"vllm.{index}.per_gpu"
    if section.per_gpu == 1:
        return None
    if alone:
        fix = 'leave it out, or use mode = "shared_vllm" or "none"'
        return one_engine_fed(section.per_gpu, fix, key)
    if profile.is_spread:
        reason = "engines on the same GPUs are for a stack on one machine"
        return Problem(reason, "leave it out", key=key)
    made = {each.name for each, _ in profile.placed[index]}
    if sent := [each.name for each in receivers(profile) if each.name in made]:
        reason = f"{', '.join(sent)} would get the weights by broadcast"
        if not section.gpus:  # on a CPU
            return Problem(reason, f"set vllm.replicas = {len(made)} instead", key=key)
        one_gpu = 'mode = "shared_vllm" with the trainer on the only GPU of the engines'
        fix = f'leave it out, use mode = "none", or {one_gpu}'
        return Problem(f"{reason}, and NCCL takes one engine a GPU", fix, key=key)
    return None


def _logprobs(profile: Profile) -> Iterator[Problem]:
    for index, engine in fed_sections(profile).items():
        mode = engine.flag("logprobs-mode")
        if mode not in (None, PROCESSED):
            yield Problem(
                f"{mode!r} are not the logprobs of the sampling distribution, which the "
                f"trainer's ratios need",
                f'use "{PROCESSED}", or leave it out',
                key=engine.profile_key(index, "logprobs-mode"),
            )


def _other_gpus(profile: Profile) -> Iterator[Problem]:
    unnamed = [f"vllm.{index}.gpus" for index, engine in enumerate(profile.vllm) if not engine.gpus]
    unnamed += [] if profile.trainer.gpus else ["trainer.gpus"]
    if len(unnamed) <= len(profile.vllm):  # without any `gpus` the stack runs on CPUs
        for key in unnamed:
            yield Problem(
                "a broadcast needs separate GPUs, so every section must name its own",
                "name its GPUs",
                key=key,
            )


def _lengths(profile: Profile, settings: TrainingConfig) -> Iterator[Problem]:
    longest = longest_sequence(profile)
    if (
        longest is not None
        and "seq_len" in settings.model_fields_set
        and settings.seq_len > longest
    ):
        yield Problem(
            f"sequences of {settings.seq_len} tokens cannot come from an engine with "
            f"max_model_len = {longest}",
            f"set trainer.seq_len = {longest}, or raise vllm.max_model_len",
            key="trainer.seq_len",
        )
    for index, env in enumerate(profile.env):
        # Requests above the engine's limit fail one by one during the run.
        wanted = env.args.get("env.max_token_length")
        shortest = min(
            (one.max_model_len for one in env_engines(profile, env) if one.max_model_len),
            default=None,
        )
        if isinstance(wanted, int) and shortest is not None and wanted > shortest:
            yield Problem(
                f"requests sequences of {wanted} tokens, but an engine with max_model_len = "
                f"{shortest} refuses them",
                f"set it to {shortest}, or raise vllm.max_model_len",
                key=f"env.{index}.args.env.max_token_length",
            )


def _routing(index: int, engine: EngineSection, *, on_gpu: bool) -> Iterator[Problem]:
    if engine.flag(ROUTING_FLAG) is False:
        reason = "trainer.routing_replay needs this engine's expert choices"
        yield Problem(
            reason, "remove it: the plan sets it", key=engine.profile_key(index, ROUTING_FLAG)
        )
    if (stages := engine.flag_number("pipeline-parallel-size", 1)) > 1:
        reason = (
            f"vLLM records no experts over {stages} pipeline stages, but trainer.routing_replay "
            f"needs them"
        )
        key = engine.profile_key(index, "pipeline-parallel-size")
        yield Problem(reason, "use tensor_parallel, or leave trainer.routing_replay out", key=key)
    # On a GPU vLLM itself keeps the experts, beside the blocks of its prefix cache.
    off = engine.flag("enable-prefix-caching") is False or engine.flag("no-enable-prefix-caching")
    if on_gpu and off:
        name = "enable-prefix-caching"
        given = name if engine.flag(name) is not None else f"no-{name}"
        yield Problem(
            "vLLM records experts only with its prefix cache, and trainer.routing_replay needs "
            "them",
            "remove it, or leave trainer.routing_replay out",
            key=engine.profile_key(index, given),
        )


def _adapters(index: int, engine: EngineSection, settings: TrainingConfig) -> Iterator[Problem]:
    given = engine.flag("max-lora-rank")
    key = engine.profile_key(index, "max-lora-rank")
    # vLLM allots slots only for these ranks.
    ranks = ", ".join(map(str, LORA_RANKS))
    if engine.flag("enable-lora") is False:
        off = engine.profile_key(index, "enable-lora")
        yield Problem("this mode serves adapters", "remove it: the plan sets it", key=off)
    if given is not None and given not in LORA_RANKS:
        yield Problem(f"vLLM does not accept rank {given}", f"use one of: {ranks}", key=key)
    elif settings.lora_r > LORA_RANKS[-1]:
        yield Problem(
            f"vLLM serves adapters up to rank {LORA_RANKS[-1]}", "lower it", key="trainer.lora_r"
        )
    elif isinstance(given, int) and settings.lora_r > given:
        fit = server_rank(settings.lora_r)
        yield Problem(
            f"the trainer's adapters have rank {settings.lora_r}, but the server's limit is "
            f"{given}",
            f"set it to {fit}, leave it out, or lower trainer.lora_r",
            key=key,
        )
