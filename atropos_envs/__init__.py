"""Environments on atroposlib's BaseEnv, and the models of the demos.

python -m atropos_envs.arithmetic_server serve --help
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from pathlib import Path

# Imports of an environment that work without torch.
NEEDS_NO_TORCH = (sys.stdlib_module_names - {"importlib", "runpy"}) | {"numpy", "pydantic"}


class EnvFault(Exception):
    """End of an environment with an explanation in place of a traceback.

    Args:
        message: what happened, and the fix.
        exit_code: 1: a part of the stack is gone; 2: a mistake in the configuration.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Dismissed(Exception):
    """End of an environment after a signal; exit status 128 + `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(f"left after signal {number}")
        # Not finished: a supervisor that did not send the signal restarts the environment.
        self.exit_code = 128 + number


def without_torch() -> None:
    """Import transformers with its tokenizers but without torch."""
    # torch and the packages on top of it are two thirds of a client's start-up time and memory.
    if "torch" in sys.modules:
        return
    # No warning that torch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # `None` makes `import torch` fail, and transformers then offers its tokenizers alone. The entry
    # goes away again, so a later import of torch works.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        # Transformers caches the answer.
        importlib.import_module("transformers").is_torch_available()
    finally:
        del sys.modules["torch"]


def needs_no_torch(file: Path) -> bool:
    """Return True if every import of the file works without torch."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    names: list[str] = []
    for node in ast.walk(tree):
        # Walk the whole tree: a function may import torch long after start-up.
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return all(
        name.startswith("atroposlib.envs.") or name.split(".")[0] in NEEDS_NO_TORCH
        for name in names
    )
