"""Environments on atroposlib's BaseEnv, and the tiny model that the demo trains.

python -m atropos_envs.warm_start --output runs/warm-start
python -m atropos_envs.arithmetic_server serve --help
python -m atropos_envs.gsm8k_server serve --help
python -m atropos_envs.math_zero_server serve --help
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from pathlib import Path

NEEDS_NO_TORCH = (sys.stdlib_module_names - {"importlib", "runpy"}) | {"numpy", "pydantic"}
"""Modules that an environment can use where transformers has no models."""


class EnvFault(Exception):
    """Ends an environment with a sentence in the place of a traceback: what happened, and the way out.

    Args:
        message: one or two sentences for the user.
        exit_code: 1 when a part of the stack is gone (a restart may help), 2 for a mistake in the configuration.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Dismissed(Exception):
    """A signal asked an environment to leave, and it has left. It was not done: a supervisor that has not asked for it
    starts another one.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"left after signal {number}")
        self.exit_code = 128 + number


def without_torch() -> None:
    """Import transformers as it is where there is no torch: with its tokenizers, and without models. For a program that
    asks servers and computes nothing itself; torch and what is built upon it are two thirds of what such a program
    takes to start, and of its memory. Does nothing where torch is imported already.
    """
    if "torch" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("transformers").is_torch_available()  # which it remembers
    finally:
        del sys.modules["torch"]


def needs_no_torch(file: Path) -> bool:
    """Whether all that an environment's file imports, wherever in it, is known to do without torch."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return all(name.startswith("atroposlib.envs.") or name.split(".")[0] in NEEDS_NO_TORCH for name in names)
