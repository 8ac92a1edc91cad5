"""Static reading of Python files: syntax, packages, environments, settings and flags.

Anything that needs running Python is None or left out: the checks refuse only what is certain to
fail.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

MAX_FILES = 200
"""Files read for one environment."""
MAX_STEPS = 8
"""Imports through which one name is followed."""
MAX_FILE_BYTES = 2 * 1024 * 1024
BASE_ENV, BASE_CONFIG = "BaseEnv", "BaseEnvConfig"
"""atroposlib's base classes of environments and settings."""
DYNAMIC = (b"create_model", b"__annotations__", b"exec(")
"""Words of files that may create classes which the syntax tree does not show."""
CHAT_CALLS, TEXT_CALLS = (
    {"chat_completion", "tokens_and_logprobs_chat"},
    {"completion", "tokens_and_logprobs_completion"},
)
"""Methods of atroposlib's servers that need a chat template, and those that do not."""
OWN_TEMPLATE = re.compile(rb"(?<!apply_)(?<!require_)chat_template")
"""The file has, or looks for, its own template."""
COMPUTED = "?"
"""Name of a base class that is computed by an expression."""
Value = int | float | str | bool | None


@dataclass(frozen=True)
class ClassSource:
    node: ast.ClassDef
    file: SourceFile

    @property
    def key(self) -> tuple[Path, str]:
        return self.file.path, self.node.name


@dataclass(repr=False)
class SourceFile:
    path: Path
    tree: ast.Module
    content: bytes
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    imports: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    """Local name -> import level, module, and name within it."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Alias -> name."""
    values: set[str] = field(default_factory=set)
    has_star: bool = False

    def __post_init__(self) -> None:
        for node in _top(self.tree.body):
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.values.add(node.name)
            elif isinstance(node, ast.Assign):
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
                if isinstance(node.value, ast.Name | ast.Attribute):
                    self.aliases |= dict.fromkeys(names, _base_name(node.value))
                elif not isinstance(node.value, ast.Call):
                    self.values |= names
            elif isinstance(node, ast.ImportFrom):
                self.has_star |= any(alias.name == "*" for alias in node.names)
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (
                        node.level,
                        node.module or "",
                        alias.name,
                    )
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    module = alias.name if alias.asname else alias.name.partition(".")[0]
                    self.imports[alias.asname or module] = (0, module, "")


@dataclass(frozen=True)
class SyntaxFault:
    file: Path
    line: int
    reason: str


class EnvSource:
    def __init__(self, path: Path, folders: list[str]) -> None:
        self.path = path
        self.folders = folders
        self.fault: SyntaxFault | None = None
        self._files: dict[Path, SourceFile | None] = {}
        self.main = self._read(path)
        if self.main and any(level for _, level, _ in _loaded_imports(self.main.tree)):
            # It runs as part of its package (`atropos_envs.hosting.runner`), whose folders are then
            # searched, too.
            self.folders = [*folders, *map(str, path.resolve().parents[:MAX_STEPS])]

    @cached_property
    def missing(self) -> dict[str, str]:
        """Packages that are not installed although loading imports them, each with "FILE, line
        N". Empty if a file changes `sys.path`."""
        found: dict[str, str] = {}
        waiting, seen = [self.path], set[Path]()
        while waiting and len(seen) < MAX_FILES:
            path = waiting.pop(0)
            source = self._read(path) if path not in seen else None
            seen.add(path)
            if source is None:
                continue
            # The file extends its search path, so a missing package may be found at run time.
            if b"sys.path" in source.content or b"addsitedir" in source.content:
                return {}
            for line, level, name in _loaded_imports(source.tree):
                there = self._find(source, level, name)
                if there is None and not level:
                    found.setdefault(name.partition(".")[0], f"{path.name}, line {line}")
                waiting += [] if there is None or _is_installed(there) else [there]
        return found if self.fault is None else {}

    @cached_property
    def environments(self) -> list[ClassSource] | None:
        """Environments, without the bases of others; None if unknown."""
        if self.main is None or self.main.has_star:
            return None
        found = []
        for name in self.main.classes:
            derives = self._derives(self.main, name, BASE_ENV)
            if derives is None:
                return None
            found += [ClassSource(self.main.classes[name], self.main)] if derives else []
        bases = {
            base
            for each in found
            for base in map(_base_name, each.node.bases)
            if base != each.node.name
        }
        return [each for each in found if each.node.name not in bases]

    @cached_property
    def starts_itself(self) -> bool:
        if self.main is None:
            return True
        guards = [
            node
            for node in self.main.tree.body
            if isinstance(node, ast.If) and _is_main_guard(node.test)
        ]
        return "cli" in _called(self.main.tree) or any(_called(guard) for guard in guards)

    @cached_property
    def only_chats(self) -> bool:
        if self.main is None or OWN_TEMPLATE.search(self.main.content):
            return False
        called = _called(self.main.tree)
        return bool(called & CHAT_CALLS) and not called & TEXT_CALLS

    @cached_property
    def flags(self) -> set[str] | None:
        """Flags after `--env.` that `serve` accepts; None if unknown."""
        names: set[str] = set()
        for source in self._env_files() or []:
            # The flags of such a file are unknown without running it.
            if any(word in source.content for word in DYNAMIC) or _defines(source.tree, "cli"):
                return None
            for name in [*source.classes, *source.imports]:
                derives = self._derives(source, name, BASE_CONFIG)
                fields = self._fields(source, name) if derives else set()
                if derives is None or fields is None:
                    return None
                names |= fields
        return names or None

    @cached_property
    def settings(self) -> dict[str, Value]:
        """Settings that the author chose, in `config_init` or as defaults. None: computed, or
        two files differ."""
        chosen: dict[str, Value] = {}
        for source in self._env_files() or []:
            for name, value in self._settings_in(source).items():
                chosen[name] = value if chosen.get(name, value) == value else None
        return chosen

    def _settings_in(self, source: SourceFile) -> dict[str, Value]:
        own = {
            name
            for name in [*source.classes, *source.imports]
            if self._derives(source, name, BASE_CONFIG)
        }
        chosen: dict[str, Value] = {}
        for name in own & source.classes.keys():
            chosen |= _defaults(source.classes[name])
        for function in ast.walk(source.tree):
            if isinstance(function, ast.FunctionDef) and function.name == "config_init":
                chosen |= _arguments(function, own)
        return chosen

    def _env_files(self) -> list[SourceFile] | None:
        """Files, other than atroposlib's, that define the class and its bases."""
        if self.main is None or self.environments is None:
            return None
        files = {self.main.path: self.main}
        waiting = list(self.environments)
        for name in self.main.imports:  # `from theirs import TheirEnv`, then `TheirEnv.cli()`
            derives, found = self._derives(self.main, name, BASE_ENV), self._class(self.main, name)
            if derives is None:
                return None
            waiting += [found] if derives and isinstance(found, ClassSource) else []
        while waiting:
            each = waiting.pop()
            if not _is_library(each.file.path):
                files[each.file.path] = each.file
                waiting += [
                    base
                    for base in self._bases(each)
                    if isinstance(base, ClassSource) and base not in waiting
                ]
        return list(files.values())

    def _derives(
        self, source: SourceFile, name: str, base: str, seen: frozenset[Any] = frozenset()
    ) -> bool | None:
        found = self._class(source, name)
        if not isinstance(found, ClassSource):
            return found
        if found.node.name == base and _is_library(found.file.path):
            return True
        if found.key in seen or len(seen) > MAX_FILES:
            return False
        answers = [
            self._derives(each.file, each.node.name, base, seen | {found.key})
            if isinstance(each, ClassSource)
            else each
            for each in self._bases(found)
        ]
        return True if True in answers else None if None in answers else False

    def _bases(self, found: ClassSource) -> list[ClassSource | bool | None]:
        # A base with the class's own name is the imported one.
        names = map(_base_name, found.node.bases)
        return [
            self._class(found.file, name, only_imported=name == found.node.name) for name in names
        ]

    def _fields(self, source: SourceFile, name: str) -> set[str] | None:
        found = self._class(source, name)
        if not isinstance(found, ClassSource):
            return set() if found is False else None
        names: set[str] = {
            node.target.id
            for node in found.node.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        for base in self._bases(found):
            above = (
                self._fields(base.file, base.node.name) if isinstance(base, ClassSource) else set()
            )
            if base is None or above is None:
                return None
            names |= above
        return names

    def _class(
        self, source: SourceFile, name: str, depth: int = 0, *, only_imported: bool = False
    ) -> ClassSource | bool | None:
        """Resolve the class that `name` means: False for no class with settings, None if only
        running Python would tell."""
        if name == COMPUTED:
            return None
        # "base.BaseEnv": the module is `base`, the rest is looked up in it.
        first, _, rest = name.partition(".")
        if not rest and first in source.classes and not only_imported:
            return ClassSource(source.classes[first], source)
        if first in source.aliases and depth < MAX_STEPS:
            return self._class(
                source, ".".join(filter(None, [source.aliases[first], rest])), depth + 1
            )
        if first not in source.imports:
            plain = first in source.values or not _may_be_class(first) or hasattr(builtins, first)
            return False if plain else None
        level, module, own = source.imports[first]
        wanted = ".".join(filter(None, [own, rest]))
        target = self._find(source, level, module)
        inner = self._find(source, level, f"{module}.{own}".strip(".")) if own else None
        if inner is not None and inner != target:  # `from package import module`
            target, wanted = inner, rest
        if not _may_be_class(wanted.rpartition(".")[2]):
            return False  # a module, a function or a constant
        if target is None:
            return (
                False if not level and module.partition(".")[0] in sys.stdlib_module_names else None
            )
        if _is_installed(target) and not _speaks_of_library(target):
            return False
        below = self._read(target)
        return None if below is None or depth > MAX_STEPS else self._class(below, wanted, depth + 1)

    def _find(self, source: SourceFile, level: int, module: str) -> Path | None:
        """File of an imported module; the folder of a package without `__init__.py`."""
        if level:
            # A relative import: one dot is the file's own package, each further dot its parent.
            folder = source.path.parent.joinpath(*[".."] * (level - 1)).resolve()
            place = folder.joinpath(*module.split(".")) if module else folder
            files = (place.with_name(f"{place.name}.py"), place / "__init__.py", place)
            return next(
                (file for file in files if file.is_file() or (file is place and file.is_dir())),
                None,
            )
        if module.partition(".")[0] in sys.stdlib_module_names:
            return Path(ast.__file__)
        return self._find_absolute(module)

    def _find_absolute(self, module: str) -> Path | None:
        # `find_module` reads folders, so each module is looked up once.
        known: dict[str, Path | None] = self.__dict__.setdefault("_modules", {})
        if module not in known:
            spec = find_module(module, self.folders)
            place = spec.origin if spec else None
            if spec and place in (None, "namespace"):
                place = next(iter(spec.submodule_search_locations or []), None)
            known[module] = Path(place) if place else None
        return known[module]

    def _read(self, path: Path) -> SourceFile | None:
        path = path.resolve()
        if path in self._files or len(self._files) >= MAX_FILES or path.suffix != ".py":
            return self._files.get(path)
        self._files[path] = None
        try:
            content = path.read_bytes()[: MAX_FILE_BYTES + 1]
            if len(content) <= MAX_FILE_BYTES:
                self._files[path] = SourceFile(path, ast.parse(content, str(path)), content)
        except SyntaxError as error:
            if self.fault is None and not _is_installed(path):
                self.fault = SyntaxFault(path, error.lineno or 1, error.msg)
        except (OSError, ValueError, RecursionError):
            pass
        return self._files[path]


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        # Both branches count: which one runs is unknown.
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _top(getattr(node, part, []))
        for handler in node.handlers if isinstance(node, ast.Try) else []:
            yield from _top(handler.body)


def _loaded_imports(tree: ast.Module) -> Iterator[tuple[int, int, str]]:
    for node in _certain(tree.body):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, 0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.level, node.module or ""


def _certain(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run for certain; those with an exception handler may fail silently."""
    for node in body:
        yield node
        if isinstance(node, ast.ClassDef) or (
            isinstance(node, ast.If) and _is_main_guard(node.test)
        ):
            yield from _certain(node.body)
        elif isinstance(node, ast.Try):
            yield from _certain([] if node.handlers else node.body)
            yield from _certain(node.finalbody)


def _is_main_guard(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and test.left.id == "__name__"
    )


def _base_name(node: ast.expr) -> str:
    """`BaseEnv`, `base.BaseEnv`; of `Generic[T]` the part before the bracket."""
    if isinstance(node, ast.Subscript):
        return _base_name(node.value)
    if isinstance(node, ast.Attribute):
        return f"{_base_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else COMPUTED


def _may_be_class(name: str) -> bool:
    return name[:1].isupper() and not (name.isupper() and len(name) > 1)


def _called(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            names |= {called.attr} if isinstance(called, ast.Attribute) else set()
            names |= {called.id} if isinstance(called, ast.Name) else set()
    return names


def _defines(tree: ast.AST, function: str) -> bool:
    return any(
        isinstance(node, ast.FunctionDef) and node.name == function for node in ast.walk(tree)
    )


def _constant(node: ast.expr | None) -> Value:
    try:
        value = ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None
    return value if isinstance(value, int | float | str | bool) else None


def _defaults(node: ast.ClassDef) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for each in node.body:
        if (
            isinstance(each, ast.AnnAssign)
            and isinstance(each.target, ast.Name)
            and each.value is not None
        ):
            value: ast.expr | None = each.value
            if isinstance(value, ast.Call):
                named = {word.arg: word.value for word in value.keywords}
                value = named.get("default", value.args[0] if value.args else None)
            found[each.target.id] = _constant(value)
    return found


def _arguments(function: ast.FunctionDef, classes: set[str]) -> dict[str, Value]:
    return {
        word.arg: _constant(word.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and (_base_name(node.func) in classes or _base_name(node.func).endswith("_config_cls"))
        for word in node.keywords
        if word.arg is not None
    }


def _is_installed(path: Path) -> bool:
    parts = path.parts
    return (
        "site-packages" in parts
        or "dist-packages" in parts
        or path.is_relative_to(Path(ast.__file__).parent)
    )


def _is_library(path: Path) -> bool:
    return LIBRARY.decode() in path.parts and _is_installed(path)


def _speaks_of_library(path: Path) -> bool:
    if _is_library(path):
        return True
    try:
        return path.is_file() and LIBRARY in path.read_bytes()
    except OSError:
        return False


def class_fields(path: Path, name: str) -> set[str] | None:
    source = EnvSource(path, [])
    return source._fields(source.main, name) if source.main else None


LIBRARY = b"atroposlib"
OWN_CLASSES = b"atropos_envs.hosting"
VERIFIERS = b"verifiers.v1"
MOST_FILES = 50
"""Files followed from one file."""


def is_hostable(file: Path) -> bool:
    """True if `file`, or a file beside it that it imports, mentions atroposlib, or our classes over
    it."""
    waiting, seen = [file], set[Path]()
    while waiting and len(seen) < MOST_FILES:
        source = waiting.pop()
        if source in seen or not source.is_file():
            continue
        seen.add(source)
        content = source.read_bytes()
        if LIBRARY in content or OWN_CLASSES in content:
            return True
        waiting += _imported(source)
    return False


def is_verifiers_package(folder: Path) -> bool:
    """True if a file of `folder`, or of a package in it, uses the package verifiers."""
    files = [*folder.glob("*.py"), *folder.glob("*/*.py")][:MOST_FILES]
    return any(VERIFIERS in file.read_bytes() for file in files if file.is_file())


def names_in(file: Path, *kinds: type[ast.stmt]) -> set[str] | None:
    """Names at the top of `file`; None if any may exist: a star import, or a definition below
    `if` or `try`."""
    tree = _tree(file)
    found: set[str] = set()
    for node in tree.body if tree else []:
        if isinstance(node, kinds):
            found.add(node.name)  # type: ignore[attr-defined]
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
