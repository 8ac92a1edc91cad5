"""Cross-checks of a profile and the pre-flight of a machine: every problem at once, each with its way out.

`check_profile` is pure and looks at the profile alone; `preflight` also looks at this machine: ports, packages, models,
GPUs. Neither starts anything.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter
from pathlib import Path

from atropos_tui.errors import Problem
from atropos_tui.stack import ports
from atropos_tui.stack.components import Site, resolve_path
from atropos_tui.stack.graph import StackError, check_stack
from atropos_tui.stack.modes import TRAITS
from atropos_tui.stack.plan import training_config
from atropos_tui.stack.profile import EnvSection, Profile
from atropos_tui.stack.spec import StackSpec
from atropos_tui.stack.variables import references

UNSEEN = "a process that this user may not see"


def check_profile(site: Site, file: str) -> list[Problem]:
    """What contradicts itself, whatever the machine."""
    profile = site.profile
    return [
        *_mode(profile, file),
        *_names(profile, file),
        *_ports(profile, file),
        *_derived(profile, file),
        *_environments(profile, file),
        *_trainer(site, file),
    ]


def check_graph(stack: StackSpec, file: str) -> list[Problem]:
    """What cannot be started in any order."""
    try:
        check_stack(stack)
    except StackError as error:
        return [Problem(str(error), "", file, "depends_on")]
    return []


def preflight(site: Site, stack: StackSpec, file: str) -> list[Problem]:
    """What this machine lacks to start the stack."""
    return [
        *_taken_ports(stack, file),
        *_packages(site.profile, file),
        *_programs(site, file),
        *_model(site, file),
        *_gpus(site.profile, file),
    ]


def _mode(profile: Profile, file: str) -> list[Problem]:
    problems = []
    if not TRAITS[profile.mode].runs:
        running = ", ".join(mode for mode, traits in TRAITS.items() if traits.runs)
        problems.append(Problem(f"{profile.mode!r} is not run by this version", f"use one of: {running}", file, "mode"))
    for index, engine in enumerate(profile.vllm):
        if TRAITS[profile.mode].shares_memory and engine.tensor_parallel > 1:
            problems.append(
                Problem(
                    "single copy cannot attach to a tensor-parallel engine",
                    "set tensor_parallel = 1",
                    file,
                    f"vllm.{index}.tensor_parallel",
                )
            )
        if TRAITS[profile.mode].shares_memory and engine.gpus and profile.trainer.gpus not in ([], engine.gpus):
            problems.append(
                Problem(
                    "single copy needs trainer and engine on the same GPU", f"set {engine.gpus}", file, "trainer.gpus"
                )
            )
    if len(profile.vllm) > 1:
        problems.append(Problem("several engines are not run by this version", "keep one [vllm]", file, "vllm"))
    return problems


def _names(profile: Profile, file: str) -> list[Problem]:
    sections = (*(e.name for e in profile.env), *(e.name for e in profile.vllm), *(e.name for e in profile.prepare))
    names = ["api", "trainer", *sections, *profile.component]
    return [
        Problem(f"the name {name!r} is used {count} times", "give each component its own `name`", file, "name")
        for name, count in Counter(names).items()
        if count > 1
    ]


def _ports(profile: Profile, file: str) -> list[Problem]:
    used = [("api.port", profile.api.port), *((f"{e.name}.port", e.port) for e in profile.vllm)]
    used += [(f"component.{name}.port", part.port) for name, part in profile.component.items() if part.port]
    seen: dict[int, str] = {}
    problems = []
    for key, port in used:
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


DERIVED_FLAGS = {
    "vllm": {"model": "model", "host": "", "port": "vllm.port", "tensor-parallel-size": "vllm.tensor_parallel"},
    "env": {
        "openai.base_url": "vllm.port",
        "openai.model_name": "model",
        "env.rollout_server_url": "api.port",
        "env.tokenizer_name": "model",
    },
}
"""Flags that the plan derives, and the profile key to set instead (none: it must stay as it is)."""


def _derived(profile: Profile, file: str) -> list[Problem]:
    sections = [("vllm", section.name, list(section.args)) for section in profile.vllm]
    sections += [("env", section.name, list(section.args)) for section in profile.env]
    return [
        Problem(
            "is derived",
            f"set {DERIVED_FLAGS[kind][flag]} instead" if DERIVED_FLAGS[kind][flag] else "remove it",
            file,
            f"{name}.args.{flag}",
        )
        for kind, name, args in sections
        for flag in (word.replace("_", "-") if kind == "vllm" else word for word in args)
        if flag in DERIVED_FLAGS[kind]
    ]


def _environments(profile: Profile, file: str) -> list[Problem]:
    problems = []
    for env in profile.env:
        server_type = env.args.get("openai.server_type", "vllm")
        if server_type != "vllm":
            problems.append(
                Problem(
                    f"server_type {server_type!r} returns no logprobs, and GRPO cannot train without them",
                    'use "vllm", or leave it out',
                    file,
                    f"{env.name}.args.openai.server_type",
                )
            )
    return problems


def _trainer(site: Site, file: str) -> list[Problem]:
    try:
        training_config(site)
    except ValueError as error:
        return [Problem(line, "", file, "trainer") for line in str(error).splitlines()]
    return []


def _taken_ports(stack: StackSpec, file: str) -> list[Problem]:
    problems = []
    for component in stack.components:
        if component.port is not None and not ports.is_free(component.port):
            keys = {"engine": "vllm.port", "api": "api.port"}
            key = keys.get(component.role.value, f"component.{component.name}.port")
            problems.append(
                Problem(
                    f"port {component.port} is taken by {ports.holder(component.port) or UNSEEN}",
                    f"stop that process, or use another port: --set {key}={ports.free_port()}",
                    file,
                    key,
                )
            )
    return problems


def _packages(profile: Profile, file: str) -> list[Problem]:
    needed = {"vllm": "vllm", "atroposlib": "api", "torch": "trainer", "transformers": "trainer"}
    return [
        Problem(
            f"Python package {package!r} is not installed",
            "run `make install` (CPU) or `make install EXTRA=gpu`, and start atropos-tui from that environment",
            file,
            key,
        )
        for package, key in needed.items()
        if importlib.util.find_spec(package) is None
    ]


def _programs(site: Site, file: str) -> list[Problem]:
    problems = []
    for env in site.profile.env:
        problems += _environment_program(site, env, file)
    for name, part in site.profile.component.items():
        program = site.text(part.command[0])
        if program not in ("python", "python3") and shutil.which(program) is None:
            problems.append(
                Problem(f"no such program: {program}", "install it or give its path", file, f"component.{name}.command")
            )
    return problems


def _environment_program(site: Site, env: EnvSection, file: str) -> list[Problem]:
    problems = []
    if env.module and not _module_exists(site.text(env.module)):
        problems.append(
            Problem(
                f"no module {env.module!r}", "check the name, or use `script` with a path", file, f"{env.name}.module"
            )
        )
    for key, value in (("script", env.script), ("config", env.config)):
        if value and not references(site.text(value)) and not resolve_path(site.text(value)).is_file():
            problems.append(Problem(f"no such file: {site.text(value)}", "check the path", file, f"{env.name}.{key}"))
    return problems


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _model(site: Site, file: str) -> list[Problem]:
    model = site.model
    made = {site.text(step.creates) for step in site.profile.prepare if step.creates}
    if model in made or _looks_like_hub_id(model):
        return []
    folder = resolve_path(model)
    if not folder.is_dir():
        return [
            Problem(
                f"no such model directory: {model}", "give a directory with config.json, or a hub id", file, "model"
            )
        ]
    if not (folder / "config.json").is_file():
        return [
            Problem(
                f"{model} holds no config.json: not a model",
                "point at the folder that `save_pretrained` wrote",
                file,
                "model",
            )
        ]
    return []


def _looks_like_hub_id(model: str) -> bool:
    """`owner/name`, as against a path: not absolute, not dotted, one slash, and no such folder here."""
    return model.count("/") == 1 and not model.startswith((".", "/", "~")) and not Path(model.split("/")[0]).is_dir()


def _gpus(profile: Profile, file: str) -> list[Problem]:
    wanted = {gpu for engine in profile.vllm for gpu in engine.gpus} | set(profile.trainer.gpus)
    if not wanted:
        return []
    present = gpu_count()
    return [
        Problem(f"GPU {gpu} does not exist: this machine has {present or 'none'}", "change gpus", file, "gpus")
        for gpu in sorted(wanted)
        if gpu >= present
    ]


def gpu_count() -> int:
    """Number of NVIDIA GPUs that the driver shows; 0 without one."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # NVML has an error class per cause, and none of them matters here
        return 0
