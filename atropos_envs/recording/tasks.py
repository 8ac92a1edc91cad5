"""Tasks of programs, from a file, a folder or a Python function."""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from atropos_envs import EnvFault
from atropos_envs.hosting.base import epochs

Task = Any
"""Anything that JSON can hold."""
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Import `module:function`; the working directory is searched first.

    Raises:
        EnvFault: it does not exist, or cannot be imported.
    """
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        fix = "Give module:function, importable from the working directory"
        raise EnvFault(
            f"{what} = {name!r} cannot be imported ({reason}). {fix}", exit_code=2
        ) from (None if isinstance(error, ImportError | AttributeError) else error)
    if not callable(found):
        raise EnvFault(f"{what} = {name!r} is not a function", exit_code=2)
    return found  # type: ignore[no-any-return]


def load_tasks(source: str, seed: int) -> tuple[Iterator[Task], list[Task]]:
    """Return an endless stream of tasks, and the held-out ones.

    Args:
        source: a file of JSON lines; a folder with `train.jsonl` and perhaps `test.jsonl`; or
            `module:function`, which returns tasks or yields them without end.

    Raises:
        EnvFault: there are none, or they cannot be read.
    """
    shuffled = random.Random(seed)
    if FUNCTION.fullmatch(source) and not Path(source).exists():
        found = load_function(source, "tasks")()
        if isinstance(found, Iterator):
            return found, []
        return epochs(_some(list(found), source), shuffled), []
    path = Path(source)
    files = [path / "train.jsonl", path / "test.jsonl"] if path.is_dir() else [path]
    training = _some(_read(files[0]), source)
    held_out = _read(files[1]) if len(files) > 1 and files[1].exists() else []
    return epochs(training, shuffled), held_out


def _some(tasks: list[Task], source: str) -> list[Task]:
    if not tasks:
        raise EnvFault(f"tasks = {source!r} has no task", exit_code=2)
    return tasks


def _read(path: Path) -> list[Task]:
    try:
        # Not `splitlines`, which also splits at U+2028 and U+0085 inside JSON strings.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EnvFault(f"tasks = {str(path)!r} cannot be read ({error})", exit_code=2) from None
    tasks = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(json.loads(line))
            except ValueError as error:
                fault = f"{path}, line {number}: not JSON ({error})"
                raise EnvFault(f"{fault}. Give one JSON value a line", exit_code=2) from None
    return tasks
