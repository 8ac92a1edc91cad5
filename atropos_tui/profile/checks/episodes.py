"""Checks of `[env] agent` and `[env] openenv` before the start, without running anything."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from atropos_tui.errors import Problem
from atropos_tui.profile.builders.commands import is_interpreter
from atropos_tui.profile.builders.environment import openenv_app
from atropos_tui.profile.checks.programs import (
    PIP_NAMES,
    may_install,
    module_folders,
    user_module,
)
from atropos_tui.profile.sections import EnvSection
from atropos_tui.profile.site import Site, env_node
from atropos_tui.profile.source import EnvSource, names_in
from atropos_tui.profile.spec import references

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
TRAINING = "train.jsonl"


def episode_files(site: Site, env: EnvSection, key: str) -> Iterator[Problem]:
    """Yield what is missing of an agent's program, tasks and scorer, or of an OpenEnv server."""
    place = site.place(env_node(site.profile, env))
    # Files on another machine cannot be read here; a `prepare` step may make files and packages.
    if (place and place.prefix) or may_install(site):
        return
    if env.agent:
        yield from _command(site, env, list(env.agent), f"{key}.agent")
        yield from _tasks(site, env, f"{key}.tasks")
        if isinstance(env.scorer, str):
            yield from _function(site, env, env.scorer, f"{key}.scorer")
        elif env.scorer:
            yield from _command(site, env, list(env.scorer), f"{key}.scorer")
    elif env.starts_openenv:
        yield from _openenv(site, env, f"{key}.openenv")


def _command(site: Site, env: EnvSection, command: list[str], key: str) -> Iterator[Problem]:
    program, *arguments = site.texts(command)
    if references(f"{program}{env.cwd}"):
        return
    folder = Path(env.cwd or ".")
    if not is_interpreter(program):
        path = env.env.get("PATH", os.environ.get("PATH"))
        found = str(folder / program) if os.sep in program else program
        if shutil.which(found, path=path) is None:
            fix = "install it, or give its path, relative to env.cwd or else the current directory"
            yield Problem(f"no program {program!r}", fix, key=key)
    name = Path(program).name
    if not name.startswith("python") or not arguments or references(arguments[0]):
        return
    if arguments[0].endswith(".py") and not (folder / arguments[0]).is_file():
        yield Problem(f"no such file: {arguments[0]}", _from(folder), key=key)


def _tasks(site: Site, env: EnvSection, key: str) -> Iterator[Problem]:
    text = site.path(env.tasks or "")
    if references(f"{text}{env.cwd}"):
        return
    path = Path(env.cwd or ".") / text
    if FUNCTION.fullmatch(text) and not path.exists():
        yield from _function(site, env, text, key)
    elif path.is_dir() and not (path / TRAINING).is_file():
        yield Problem(f"{text} has no {TRAINING}", "write one task a line there, as JSON", key=key)
    elif not path.exists():
        fix = f"{_from(path.parent)}; a function is module:function"
        yield Problem(f"no such file or folder: {text}", fix, key=key)


def _function(site: Site, env: EnvSection, text: str, key: str) -> Iterator[Problem]:
    text = site.text(text)
    if references(text):
        return
    if not FUNCTION.fullmatch(text):
        fix = 'write "module:function", or a command: ["python", "score.py"]'
        yield Problem(f"{text!r} is no function", fix, key=key)
        return
    module, _, name = text.partition(":")
    spec = user_module(module, module_folders(site, env))
    if spec is None:
        fix = "give a module of env.cwd, or of a folder in PYTHONPATH below [env.env]"
        yield Problem(f"no module {module!r}", fix, key=key)
        return
    path = Path(spec.origin or "")
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    known = names_in(path, *kinds) if path.suffix == ".py" else None
    if known is not None and name not in known:
        fix = f"it has {', '.join(sorted(known))[:200] or 'no function'}"
        yield Problem(f"{module} defines no function {name!r}", fix, key=key)


def _openenv(site: Site, env: EnvSection, key: str) -> Iterator[Problem]:
    target = site.path(env.openenv or "")
    if references(target):
        return
    module, folder = openenv_app(target)
    name = module.partition(":")[0]
    if folder is not None:
        file = folder.joinpath(*name.split(".")).with_suffix(".py")
        if not file.is_file():
            fix = "give the folder that has server/app.py, as `openenv init` makes it"
            yield Problem(f"{target} has no server/app.py", fix, key=key)
            return
    else:
        # The server starts in the current directory.
        spec = user_module(name, [".", *module_folders(site, env)])
        if spec is None:
            fix = "install its package, or give a folder, module:app or http://HOST:PORT"
            yield Problem(f"no module {name!r} for the server of {target!r}", fix, key=key)
            return
        file = Path(spec.origin or "")
    if file.suffix == ".py" and (missing := EnvSource(file, [str(folder or ".")]).missing):
        names = [OPENENV_NAMES.get(each, PIP_NAMES.get(each, each)) for each in missing]
        listed = ", ".join(f"{each!r} ({where})" for each, where in missing.items())
        fix = shlex.join([sys.executable, "-m", "pip", "install", *names])
        yield Problem(f"{file.name} needs Python packages: {listed}", fix, key=key)


OPENENV_NAMES = {"openenv": "openenv-core"}
"""Import name -> name on PyPI."""


def _from(folder: Path) -> str:
    return f"relative paths are resolved from {folder.absolute()}"
