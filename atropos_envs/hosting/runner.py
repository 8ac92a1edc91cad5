"""Run an environment of another author, unmodified.

python -m atropos_envs.hosting.runner FILE.py serve --env.rollout_server_url ... --openai.base_url
... python -m atropos_envs.hosting.runner PACKAGE.MODULE serve ...

The file or module runs as `__main__`. Where it calls `SomeEnv.cli()`, the class is hosted first
(`atropos_envs.hosting.hosted`). A file that calls no `cli()` must define one environment class, or
name it: FILE.py:ClassName.
"""

from __future__ import annotations

import ast
import logging
import runpy
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from atropos_envs import EnvFault, needs_no_torch, without_torch

if __name__ == "__main__" and needs_no_torch(Path("".join(sys.argv[1:2]).partition(":")[0])):
    without_torch()

from atroposlib.envs.base import BaseEnv

from atropos_envs.hosting import older_names
from atropos_envs.hosting.base import configure_logging, exit_code_of, leave, one_off_defaults
from atropos_envs.hosting.evaluation import reason_of
from atropos_envs.hosting.hosted import hosted, missing_package

log = logging.getLogger(__name__)


def main() -> NoReturn:
    """Exit status: 0; 1 a part of the stack is gone; 2 a mistake; 143 SIGTERM."""
    configure_logging()
    try:
        code = exit_code_of(lambda: run(sys.argv[1:]), causes=True)
    except Exception as error:
        log.info("traceback:\n%s", traceback.format_exc())
        log.error("the environment ended with %s", reason_of(error))
        code = 1
    leave(code)


def run(arguments: list[str]) -> None:
    """Load the file or module of the first argument, and pass the other arguments to its command
    line.

    Raises:
        EnvFault: the file, module or class does not exist, or cannot be imported.
    """
    if not arguments or arguments[0].startswith("-"):
        raise EnvFault(
            "no environment is given; run python -m atropos_envs.hosting.runner "
            "FILE.py|MODULE serve",
            exit_code=2,
        )
    target, _, wanted = arguments[0].partition(":")
    sys.argv = [target, *one_off_defaults(arguments[1:])]
    # Patch `cli` on the base class: every environment of the file inherits it.
    original, began = BaseEnv.cli, []
    older_names.install()

    def cli(cls: type[BaseEnv]) -> None:
        began.append(cls)
        original.__func__(hosted(cls))

    BaseEnv.cli = classmethod(cli)
    try:
        found = _execute(target, name="__main__" if not wanted else "environment")
        if not began:
            _only_class(found, target, wanted).cli()
    finally:
        BaseEnv.cli = original


def _execute(target: str, name: str) -> dict[str, Any]:
    """Run the file or module; return its globals."""
    try:
        if target.endswith(".py") or "/" in target:
            path = Path(target)
            if not path.is_file():
                raise EnvFault(f"there is no file {target}", exit_code=2)
            folder = path.resolve().parent
            sys.path.insert(0, str(folder))  # as `python FILE.py` does
            # A plain `python FILE.py` would fail at its first relative import.
            if depth := _package_depth(path):
                return runpy.run_module(
                    _as_module(folder, depth, path.stem), run_name=name, alter_sys=True
                )
            return runpy.run_path(str(path), run_name=name)
        # As `python -m` does; our own modules are imported already.
        sys.path.insert(0, str(Path.cwd()))
        return runpy.run_module(target, run_name=name, alter_sys=True)
    except ImportError as error:
        raise EnvFault(missing_package(error), exit_code=2) from error
    except SyntaxError as error:
        raise EnvFault(f"{error.filename}, line {error.lineno}: {error.msg}", exit_code=2) from None


def _package_depth(path: Path) -> int:
    """Return the number of parent folders that must be packages for the file's relative imports: as
    many as it uses, plus those with an `__init__.py`. 0: it has none and runs alone."""
    tree = ast.parse(path.read_bytes(), str(path))
    levels = [node.level for node in tree.body if isinstance(node, ast.ImportFrom)]
    depth, parents = max(levels, default=0), path.resolve().parents
    while 0 < depth < len(parents) - 1 and (parents[depth] / "__init__.py").exists():
        depth += 1
    return depth


def _as_module(folder: Path, depth: int, stem: str) -> str:
    """Return the dotted name of a file in its last `depth` folders, and make those folders
    packages."""
    sys.path.insert(0, str(folder.parents[depth - 1]))
    names = folder.parts[-depth:]
    for level in range(1, depth + 1):
        place = folder.parents[depth - level - 1] if level < depth else folder
        # Otherwise a file of the same name could be found first.
        if not (place / "__init__.py").exists():
            package = ModuleType(".".join(names[:level]))
            package.__path__ = [str(place)]
            sys.modules[package.__name__] = package
    return ".".join([*names, stem])


def _only_class(found: dict[str, Any], target: str, wanted: str) -> type[BaseEnv]:
    """Return the environment class that the file defines."""
    module = found.get("__name__")
    classes = {
        name: value
        for name, value in found.items()
        if isinstance(value, type) and issubclass(value, BaseEnv) and value.__module__ == module
    }
    if wanted:
        if wanted not in classes:
            raise EnvFault(
                f"{target} defines no environment {wanted!r}; it has {_names(classes)}", exit_code=2
            )
        return classes[wanted]
    # A base class of another environment in the file is not meant.
    leaves = {
        n: c
        for n, c in classes.items()
        if not any(c in other.__mro__[1:] for other in classes.values())
    }
    if len(leaves) != 1:
        raise EnvFault(
            f"{target} calls no cli() and defines {_names(leaves)}; name one: {target}:ClassName",
            exit_code=2,
        )
    return next(iter(leaves.values()))


def _names(classes: dict[str, Any]) -> str:
    return ", ".join(sorted(classes)) or "no environment class (a subclass of atroposlib's BaseEnv)"


if __name__ == "__main__":
    main()
