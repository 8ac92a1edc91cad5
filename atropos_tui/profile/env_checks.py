"""Checks of environments before anything starts: their files, packages, classes, flags and the model's chat template.

Nothing of an environment is run or imported; `env_source` reads it. What cannot be known so is not refused.
"""

from __future__ import annotations

import ast
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from atropos_tui.errors import Problem
from atropos_tui.profile.checks import batches_that_fill
from atropos_tui.profile.env_source import EnvSource, class_fields
from atropos_tui.profile.errors import counted, in_braces, nearest_names
from atropos_tui.profile.plan import config_file, is_ours, resolve_path
from atropos_tui.profile.sections import EnvSection
from atropos_tui.profile.site import Site, engine_model, env_engines, env_node, training_config
from atropos_tui.profile.source import find_module, is_hostable, names_in
from atropos_tui.profile.spec import references

PIP_NAMES = {"bs4": "beautifulsoup4", "cv2": "opencv-python-headless", "dotenv": "python-dotenv", "PIL": "pillow",
             "sklearn": "scikit-learn", "yaml": "pyyaml"}  # fmt: skip
"""Packages that are installed under another name than they are imported by."""
SERVER_MODULE = "atroposlib.envs.server_handling"
SIMILAR = 0.5
"""How alike a flag must be to be proposed, from 0 to 1. Names share a prefix, so less than elsewhere is enough."""


def environment_files(site: Site, env: EnvSection, key: str) -> Iterator[Problem]:
    """What of an environment is not on this machine: its module or file, and the packages that it imports."""
    if env.module and user_module(site.text(env.module), _folders(site, env)) is None:
        fix = "check the name, or use `script` with a path"
        yield Problem(f"no module {env.module!r}", fix, key=f"{key}.module")
    for name, value in (("script", (env.script or "").partition(":")[0]), ("config", env.config)):
        text = site.path(value or "")
        if not text or references(text):
            continue
        path = config_file(text) if name == "config" else resolve_path(text)
        if not path.is_file():
            fix = in_braces(text) or f"relative paths are resolved from the current directory, {Path.cwd()}"
            yield Problem(f"no such file: {text}", fix, key=f"{key}.{name}")
        elif name == "config":
            yield from _environment_config(site, env, path, f"{key}.config")
    source = environment_source(site, env)
    if source and not _may_install(site) and (missing := source.missing):
        packages = ", ".join(f"{name!r} ({where})" for name, where in missing.items())
        names = [PIP_NAMES.get(name, name) for name in missing]
        yield Problem(
            f"{source.path.name} needs {counted(len(missing), 'Python package')} that this interpreter does not have: "
            f"{packages}",
            f"{shlex.join([sys.executable, '-m', 'pip', 'install', *names])}; or, for a folder of yours, PYTHONPATH = "
            f'"FOLDER" below [env.env]',
            key=f"{key}.{_program_key(env)}",
        )


def environment_faults(site: Site, env: EnvSection, key: str) -> Iterator[Problem]:
    """What an environment's file says that cannot work, on any machine."""
    source = environment_source(site, env)
    if source is None:
        return
    program = f"{key}.{_program_key(env)}"
    if source.fault:
        where = f"{source.fault.file.name}, line {source.fault.line}"
        yield Problem(f"{where}: {source.fault.reason}", "correct the Python syntax there", key=program)
        return
    wanted = (env.script or "").partition(":")[2]
    yield from _class(source, wanted, program)
    if not is_hostable(source.path):
        return
    yield from _flags(source, env, key)
    yield from _group_size(site, env, source, key)
    yield from _chat_template(site, env, source)


def environment_source(site: Site, env: EnvSection) -> EnvSource | None:
    """The source of an environment that runs on this machine; None where there is no file to read."""
    place = site.place(env_node(site.profile, env))
    if env.command or (place and place.prefix):
        return None
    if env.module:
        spec = user_module(site.text(env.module), _folders(site, env))
        path = Path(spec.origin) if spec and spec.origin else None
    else:
        text = site.path((env.script or "").partition(":")[0])
        path = None if references(text) else resolve_path(text)
    if path is None or path.suffix != ".py" or not path.is_file():
        return None
    own = [str(path.parent)] if env.script else []
    return _read_source(path, (*own, *_folders(site, env)), path.stat().st_mtime_ns)


@cache
def _read_source(path: Path, folders: tuple[str, ...], written_ns: int) -> EnvSource:
    """An environment's file, read once as long as it does not change."""
    return EnvSource(path, list(folders))


def user_module(name: str, folders: list[str]) -> ModuleSpec | None:
    """A module, installed or (unless it is ours) in one of `folders`."""
    return find_module(name, [] if is_ours(name) else folders)


def python_path(site: Site, variables: Mapping[str, str]) -> list[str]:
    """The folders of PYTHONPATH."""
    return [folder for folder in site.text(variables.get("PYTHONPATH", "")).split(os.pathsep) if folder]


def _folders(site: Site, env: EnvSection) -> list[str]:
    return [env.cwd or ".", *python_path(site, env.env), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]


def _program_key(env: EnvSection) -> str:
    return "module" if env.module else "script"


def _may_install(site: Site) -> bool:
    """Whether a step before the start may bring packages along."""
    return any(not is_ours([*step.command, "", "", ""][2]) for step in site.profile.prepare)


def _class(source: EnvSource, wanted: str, key: str) -> Iterator[Problem]:
    """Which class runs, as `atropos_envs.runner` chooses it."""
    known = names_in(source.path, ast.ClassDef)
    if wanted and known is not None and wanted not in known:
        fix = f"it has {', '.join(sorted(known))[:200] or 'no class'}"
        yield Problem(f"{source.path.name} defines no class {wanted!r}", fix, key=key)
    environments = source.environments
    if wanted or environments is None or source.starts_itself or not is_hostable(source.path):
        return
    names = [each.node.name for each in environments]
    if not names:
        fix = "derive a class from BaseEnv (docs/environments.md), or name the file that has it"
        reason = f"{source.path.name} defines no environment: no class in it derives from atroposlib's BaseEnv"
        yield Problem(reason, fix, key=key)
    elif len(names) > 1:
        reason = f"{source.path.name} defines {len(names)} environments ({', '.join(names)}) and starts none with cli()"
        fix = f'name one: script = "{source.path.name}:{names[0]}", or end the file with {names[0]}.cli()'
        yield Problem(reason, fix, key=key)


def _flags(source: EnvSource, env: EnvSection, key: str) -> Iterator[Problem]:
    """Flags that `serve` does not take."""
    settings, server = source.flags, _library_fields("server_baseline", "APIServerConfig")
    manager = _library_fields("server_manager", "ServerManagerConfig")
    if settings is None or server is None or manager is None:
        return
    known = {f"env.{name}" for name in settings} | {f"openai.{name}" for name in server} | manager
    for flag in env.args:
        if flag in known:
            continue
        nearest = [f"env.{flag}"] if f"env.{flag}" in known else nearest_names(flag, known, cutoff=SIMILAR)
        fix = f"did you mean {nearest[0]}?" if nearest else "remove it"
        yield Problem(f"{source.path.name} takes no flag --{flag}", fix, key=f"{key}.args.{flag}")


@cache
def _library_fields(module: str, name: str) -> set[str] | None:
    """Fields of a settings class of the installed atroposlib; None where it cannot be read."""
    spec = find_module(f"{SERVER_MODULE}.{module}", [])
    return class_fields(Path(spec.origin), name) if spec and spec.origin else None


def _group_size(site: Site, env: EnvSection, source: EnvSource, key: str) -> Iterator[Problem]:
    """A group size of the file's own that fills no batch."""
    size = source.settings.get("group_size") if len(source.environments or []) == 1 else None
    if "env.group_size" in env.args or env.config or site.profile.trainer.command or not isinstance(size, int):
        return
    settings = training_config(site)
    if size > 0 and settings.sequences_per_step % size:
        yield Problem(
            f"{source.path.name} sets group_size {size}, and the {settings.sequences_per_step} sequences of a step are "
            "not a multiple of it, so run-api could never fill a batch",
            f"set {batches_that_fill(settings, [size])}, or env.group_size below [env.args]",
            key=f"{key}.{_program_key(env)}",
        )


def _chat_template(site: Site, env: EnvSection, source: EnvSource) -> Iterator[Problem]:
    """A model without a chat template below an environment that asks for chat completions alone."""
    engine = env_engines(site.profile, env)[0]
    if not source.only_chats or engine.flag("chat-template") is not None:
        return
    model = engine_model(site, engine)
    if has_chat_template(resolve_path(model)) is False:
        yield Problem(
            f"{model} has no chat template, and {source.path.name} asks for chat completions: vLLM would refuse each",
            "use an instruct model, or save the template of this model's family as chat_template.jinja in its folder",
            key="model",
        )


def has_chat_template(folder: Path) -> bool | None:
    """Whether a model's folder has a chat template; None where only vLLM or the model's own code can tell."""
    if any(
        (folder / name).exists() for name in ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    ):
        return True
    if (folder / "tekken.json").exists():
        return None
    try:
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    if not isinstance(tokenizer, dict) or "auto_map" in tokenizer or _vllm_has_template(str(kind)):
        return None
    return bool(tokenizer.get("chat_template"))


def _vllm_has_template(model_type: str) -> bool:
    """Whether vLLM brings a template for models of this type."""
    spec = find_module("vllm", [])
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for registry in Path(folder).glob("transformers_utils/chat_templates/registry.py"):
            return f'"{model_type}"' in registry.read_text(encoding="utf-8")
    return False


def _environment_config(site: Site, env: EnvSection, path: Path, key: str) -> Iterator[Problem]:
    """What atroposlib would do with the YAML file beside the flags that the plan derives."""
    try:
        import yaml  # type: ignore[import-untyped]

        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except ImportError:
        return  # comes with atroposlib, whose absence is a problem of its own
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        yield Problem(f"{path} is not YAML: {reason}", "correct the syntax at that place", key=key)
        return
    if not isinstance(data, dict) or not isinstance(data.get("env") or {}, dict):
        yield Problem(f"{path} is no table with env: and openai:", "see profiles/math-zero.yaml", key=key)
        return
    if isinstance(data.get("openai"), list) and len(data["openai"]) > 1:
        yield Problem(
            f"{path} lists {len(data['openai'])} servers, and atroposlib takes no --openai flags beside a list",
            "take openai: out of it: the plan derives the server",
            key=key,
        )
    size = (data.get("env") or {}).get("group_size")
    settings = training_config(site)
    total = settings.sequences_per_step
    ours = site.profile.trainer.command is None
    if ours and isinstance(size, int) and size > 0 and "env.group_size" not in env.args and total % size:
        yield Problem(
            f"{path} sets group_size {size}, and the {total} sequences of a step are not a multiple of it",
            f"set {batches_that_fill(settings, [size])}, or env.group_size below [env.args]",
            key=key,
        )
