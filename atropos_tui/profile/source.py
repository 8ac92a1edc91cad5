"""Static reading of a Python file: its classes and functions, and whether it uses atroposlib."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

LIBRARY = b"atroposlib"
MOST_FILES = 50
"""Files followed from one file."""


def is_hostable(file: Path) -> bool:
    """`file`, or a file around it that it imports, mentions atroposlib."""
    waiting, seen = [file], set[Path]()
    while waiting and len(seen) < MOST_FILES:
        source = waiting.pop()
        if source in seen or not source.is_file():
            continue
        seen.add(source)
        if LIBRARY in source.read_bytes():
            return True
        waiting += _imported(source)
    return False


def names_in(file: Path, kind: type[ast.ClassDef] | type[ast.FunctionDef]) -> set[str] | None:
    """Names at the top of `file`; None if any may exist: a star import, or a definition below
    `if` or `try`."""
    tree = _tree(file)
    found: set[str] = set()
    for node in tree.body if tree else []:
        if isinstance(node, kind):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.If | ast.Try):
            return None
    return found if tree and "*" not in found else None


def find_module(name: str, folders: list[str]) -> ModuleSpec | None:
    """Find a module as `python -m` does. Nothing is imported: that would run the packages around
    it."""
    first, *parts = name.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        spec = None
    # Absolute paths, because Python caches a folder's listing by its path as given.
    spec = spec or PathFinder.find_spec(first, [str(Path(folder).absolute()) for folder in folders])
    for part in parts:
        inside = spec and spec.submodule_search_locations
        # The last name alone: with the full name PathFinder would need the parent package, which is
        # not imported.
        spec = PathFinder.find_spec(part, inside) if inside else None
    return spec


def _tree(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _imported(file: Path) -> Iterator[Path]:
    for node in ast.walk(_tree(file) or ast.Module([], [])):
        if isinstance(node, ast.Import):
            names = [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [
                (node.level, base),
                *((node.level, f"{base}.{alias.name}".strip(".")) for alias in node.names),
            ]
        else:
            continue
        for level, name in names:
            place = file.parent.joinpath(*[".."] * max(0, level - 1), *name.split("."))
            yield place.with_name(f"{place.name}.py")
            yield place / "__init__.py"
