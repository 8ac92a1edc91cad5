"""Cross-checks of a profile, whatever the machine: every problem at once, each with its way out. Pure.

Keys name entries of `[[env]]` and `[[vllm]]` by index: `vllm.0.gpus`. What needs this machine is in `preflight`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from atropos_tui.errors import Problem
from atropos_tui.stack.check_engines import check_engines
from atropos_tui.stack.components import Site, fed_engines, meeting_address
from atropos_tui.stack.graph import find_faults
from atropos_tui.stack.modes import TRAITS
from atropos_tui.stack.plan import training_config
from atropos_tui.stack.preflight import preflight
from atropos_tui.stack.profile import ComponentOptions, Profile
from atropos_tui.stack.spec import StackSpec
from trainer_core.contracts.transfer import is_loopback, is_wildcard

__all__ = ["check_graph", "check_notes", "check_profile", "preflight"]


def check_profile(site: Site, file: str) -> list[Problem]:
    """What contradicts itself, whatever the machine."""
    profile = site.profile
    groups = _groups(site, file)
    return [
        *_mode(profile, file),
        *_wildcard(site, file),
        *_names(profile, file),
        *_ports(profile, file),
        *_urls(site, file),
        *_derived(profile, file),
        *_environments(profile, file),
        *groups,
        *_trainer(site, file, grouped=not groups),
        *check_engines(site, file),
    ]


def check_graph(profile: Profile, stack: StackSpec, file: str) -> list[Problem]:
    """What cannot be started in any order."""
    return [
        Problem(fault.reason, fault.fix, file, f"{profile.section_of(fault.component)}.depends_on")
        for fault in find_faults(stack)
        if fault.field == "depends_on"  # names are checked in the profile, which knows their sections
    ]


def check_notes(site: Site) -> list[str]:
    """What is accepted, and does nothing or more than one may think."""
    parts = {
        **{f"vllm.{index}": engine for index, engine in enumerate(site.profile.vllm)},
        **{f"env.{index}": env for index, env in enumerate(site.profile.env)},
        "trainer": site.profile.trainer,
    }
    notes = [
        f"{key}.env.VLLM_USE_V1 is ignored: vLLM has only one engine now"
        for key, part in parts.items()
        if "VLLM_USE_V1" in part.env
    ]
    if (place := _meeting_place(site)) and not is_loopback(place[1]):
        notes.append(
            f"WARNING {place[0]}: the broadcast's group meets at {place[1]}, beyond the loopback. Its weights travel "
            "unencrypted, and whoever reaches that network can read them or break the group: keep it to machines that "
            "you trust"
        )
    return notes


def _meeting_place(site: Site) -> tuple[str, str] | None:
    """Key and address where a broadcast's group meets, of a profile whose trainer's settings are sound."""
    if not site.traits.feeds_all:
        return None
    try:
        settings = training_config(site, grouped=False)
    except ValueError:
        return None  # its own problem
    key = "trainer.init_method" if settings.init_method != "env://" else "trainer.env.MASTER_ADDR"
    return key, meeting_address(site, settings)


def _mode(profile: Profile, file: str) -> list[Problem]:
    traits = TRAITS[profile.mode]
    problems = []
    if len(profile.trainer.gpus) > 1:
        problems.append(
            Problem(
                f"{len(profile.trainer.gpus)} GPUs, and the trainer of this version uses one",
                f"name one, such as trainer.gpus = [{profile.trainer.gpus[0]}], and a model that fits",
                file,
                "trainer.gpus",
            )
        )
    nodes, fed = profile.trainer.settings.get("num_inference_nodes"), len(fed_engines(profile))
    if nodes and nodes != fed:
        problems.append(
            Problem(
                f"{nodes} inference servers, and the trainer feeds {fed} of this profile's",
                "leave it out, or write a [[vllm]] for each one"
                + ("" if traits.feeds_all else ' with mode = "broadcast": this mode feeds one'),
                file,
                "trainer.num_inference_nodes",
            )
        )
    return problems


def _wildcard(site: Site, file: str) -> Iterator[Problem]:
    if (place := _meeting_place(site)) and is_wildcard(place[1]):
        yield Problem(
            f"{place[1]} is every interface of this machine, and the group of a broadcast meets at one address",
            "leave it out for the loopback, or name the one address that the servers reach",
            file,
            place[0],
        )


def _names(profile: Profile, file: str) -> list[Problem]:
    named = [("api", "api"), ("trainer", "trainer"), *((name, f"component.{name}") for name in profile.component)]
    named += [(part.name, f"env.{index}.name") for index, part in enumerate(profile.env)]
    named += [(part.name, f"vllm.{index}.name") for index, part in enumerate(profile.vllm)]
    named += [(part.name, f"prepare.{index}.name") for index, part in enumerate(profile.prepare)]
    last = dict(named)
    return [
        Problem(f"the name {name!r} is used {count} times", "give each component its own name", file, last[name])
        for name, count in Counter(name for name, _ in named).items()
        if count > 1
    ]


def used_ports(profile: Profile) -> list[tuple[str, int]]:
    """Every port of the profile with its key."""
    return [
        ("api.port", profile.api.port),
        *((f"vllm.{index}.port", engine.port) for index, engine in enumerate(profile.vllm)),
        *((f"component.{name}.port", part.port) for name, part in profile.component.items() if part.port),
    ]


def _ports(profile: Profile, file: str) -> list[Problem]:
    seen: dict[int, str] = {}
    problems = []
    for key, port in used_ports(profile):
        if port in seen:
            problems.append(Problem(f"port {port} is also {seen[port]}", "choose distinct ports", file, key))
        seen.setdefault(port, key)
    if profile.api.host not in ("127.0.0.1", "localhost"):
        problems.append(
            Problem(
                "run-api has no authentication and would be open to the network", 'use "127.0.0.1"', file, "api.host"
            )
        )
    return problems


_API_URL = re.compile(r"(rollout_server|atropos|run_api|api_server)_url$")
_ENGINE_URL = re.compile(r"(base|vllm|openai_base)_url$")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _urls(site: Site, file: str) -> Iterator[Problem]:
    """Addresses of this machine, given by hand to a program, that lead to another port than run-api or vLLM has."""
    profile = site.profile
    servers = {engine.port for engine in profile.vllm} | {part.port for part in profile.component.values()}
    for key, name, value in _settings(site):
        if (port := _loopback_port(value)) is None:
            continue
        flat = name.lower().replace("-", "_")
        if _API_URL.search(flat) and port != profile.api.port:
            fix = f"use http://127.0.0.1:{profile.api.port}, or set api.port = {port}"
            yield Problem(f"{name} leads to port {port}, and run-api has port {profile.api.port}", fix, file, key)
        elif _ENGINE_URL.search(flat) and port not in servers:
            own = profile.vllm[0].port
            fix = f"use http://127.0.0.1:{own}/v1, or set vllm.port = {port}"
            yield Problem(f"{name} leads to port {port}, where nothing of this profile listens", fix, file, key)


def _settings(site: Site) -> Iterator[tuple[str, str, str]]:
    """Key, name and value of every flag and variable that a profile hands to environments and extra components."""
    profile = site.profile
    parts: list[tuple[str, ComponentOptions, list[str]]] = []
    parts += [(f"env.{index}", env, env.command or []) for index, env in enumerate(profile.env)]
    parts += [(f"component.{name}", part, part.command) for name, part in profile.component.items()]
    for key, part, command in parts:
        words = site.texts(command)
        for word, following in zip(words, [*words[1:], ""], strict=False):
            name, equals, value = word.partition("=")
            yield f"{key}.command", name.lstrip("-").rpartition(".")[2], value if equals else following
        for name, value in part.env.items():
            yield f"{key}.env.{name}", name, site.text(value)


def _loopback_port(text: str) -> int | None:
    try:
        url = urlsplit(text)
        return url.port if url.scheme in ("http", "https") and url.hostname in _LOOPBACK else None
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
    },
    "env": {
        "openai.base_url": "vllm.port",
        "openai.model_name": "model",
        "env.rollout_server_url": "api.port",
        "env.tokenizer_name": "model",
    },
}
"""Flags that the plan derives, and the profile key to set instead (none: it must stay as it is)."""


def _derived(profile: Profile, file: str) -> list[Problem]:
    sections = [("vllm", f"vllm.{index}", list(part.args)) for index, part in enumerate(profile.vllm)]
    sections += [("env", f"env.{index}", list(part.args)) for index, part in enumerate(profile.env)]
    return [
        Problem("is derived", f"set {instead} instead" if instead else "remove it", file, f"{key}.args.{word}")
        for kind, key, words in sections
        for word in words
        if (instead := DERIVED_FLAGS[kind].get(word.replace("_", "-") if kind == "vllm" else word)) is not None
    ]


def _environments(profile: Profile, file: str) -> Iterator[Problem]:
    for index, env in enumerate(profile.env):
        server_type = env.args.get("openai.server_type", "vllm")
        if server_type != "vllm":
            yield Problem(
                f"server_type {server_type!r} returns no logprobs, and GRPO cannot train without them",
                'use "vllm", or leave it out',
                file,
                f"env.{index}.args.openai.server_type",
            )


def _groups(site: Site, file: str) -> list[Problem]:
    """run-api fills a batch only when it is a multiple of every environment's group size."""
    try:
        settings = training_config(site, grouped=False)
    except ValueError:
        return []  # its own problem, and sizes cannot be told
    total = settings.sequences_per_step
    problems = []
    for index, env in enumerate(site.profile.env):
        size = env.args.get("env.group_size")
        if isinstance(size, int) and size > 0 and total % size:
            wanted = -(-total // size) * size
            steps = wanted // settings.batch_size if wanted % settings.batch_size == 0 else None
            change = f"trainer.gradient_accumulation_steps = {steps}" if steps else f"trainer.batch_size = {size}"
            problems.append(
                Problem(
                    f"batch_size {settings.batch_size} x gradient_accumulation_steps "
                    f"{settings.gradient_accumulation_steps} = {total} sequences is no multiple of {env.name}'s group "
                    f"size {size}: run-api would never fill a batch",
                    f"set {change}, or another env.group_size",
                    file,
                    f"env.{index}.args.env.group_size",
                )
            )
    return problems


def _trainer(site: Site, file: str, *, grouped: bool) -> list[Problem]:
    try:
        training_config(site, grouped=grouped)
    except ValueError as error:
        lines = str(error).splitlines()
        return [Problem(line, "change one of the two settings under [trainer]", file, "trainer") for line in lines]
    return []
