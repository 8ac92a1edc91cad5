"""Run an environment of another author, unmodified.

    python -m atropos_envs.hosting.runner FILE.py serve --env.rollout_server_url ...
    python -m atropos_envs.hosting.runner PACKAGE.MODULE serve ...

The file or module runs as `__main__`, and the class whose `cli()` it calls is hosted first. A file
that calls no `cli()` must define one environment class, or name it: FILE.py:ClassName.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import logging
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from atropos_envs import EnvFault, needs_no_torch, without_torch

if __name__ == "__main__" and needs_no_torch(Path("".join(sys.argv[1:2]).partition(":")[0])):
    without_torch()

from atroposlib.envs import base
from atroposlib.envs.base import APIServerConfig, BaseEnv, EvalHandlingEnum
from atroposlib.envs.server_handling.server_baseline import ServerBaseline

from atropos_common.system.run_dir import ENV_SEQUENCES
from atropos_envs.hosting.base import configure_logging, exit_code_of, leave, one_off_defaults
from atropos_envs.hosting.engine_client import NO_SERVER, EngineClient, addresses
from atropos_envs.hosting.evaluation import reason_of
from atropos_envs.hosting.hosted import PARSER_PROTOCOL, Hosted
from atropos_envs.hosting.rollout import note_scored_groups

log = logging.getLogger(__name__)

LEAST_WORKERS = 8
# atroposlib's defaults of `max_num_workers` and `max_num_workers_per_node`. Eight groups in flight
# starve a GPU.
NO_CHOICE = (-1, LEAST_WORKERS)
# Modules that atroposlib's tool parsers import -> their place in newer releases of vLLM.
MOVED = {PARSER_PROTOCOL: "vllm.entrypoints.generate.base.protocol"}
PACKAGES = {name.rpartition(".")[0] for name in MOVED}


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
    """Run the file or module of the first argument with the other arguments.

    Raises:
        EnvFault: the file, module or class does not exist, or cannot be imported.
    """
    if not arguments or arguments[0].startswith("-"):
        usage = "python -m atropos_envs.hosting.runner FILE.py|MODULE serve"
        raise EnvFault(f"no environment is given; run {usage}", exit_code=2)
    target, _, wanted = arguments[0].partition(":")
    sys.argv = [target, *one_off_defaults(arguments[1:])]
    # Patch `cli` on the base class: every environment of the file inherits it.
    original, began = BaseEnv.cli, []
    accept_older_names()
    note_scored_groups()

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


# The file


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
                module = _as_module(folder, depth, path.stem)
                return runpy.run_module(module, run_name=name, alter_sys=True)
            return runpy.run_path(str(path), run_name=name)
        # As `python -m` does; our own modules are imported already.
        sys.path.insert(0, str(Path.cwd()))
        return runpy.run_module(target, run_name=name, alter_sys=True)
    except ImportError as error:
        raise EnvFault(missing_package(error), exit_code=2) from error
    except SyntaxError as error:
        raise EnvFault(f"{error.filename}, line {error.lineno}: {error.msg}", exit_code=2) from None


def _package_depth(path: Path) -> int:
    """Return how many parent folders must be packages for the file's relative imports."""
    tree = ast.parse(path.read_bytes(), str(path))
    levels = [node.level for node in tree.body if isinstance(node, ast.ImportFrom)]
    depth, parents = max(levels, default=0), path.resolve().parents
    # Parents with an `__init__.py` belong to the package too. A file without relative imports runs
    # alone, wherever it is.
    while 0 < depth < len(parents) - 1 and (parents[depth] / "__init__.py").exists():
        depth += 1
    return depth


# The file's dotted name, after its last `depth` folders have become packages.
def _as_module(folder: Path, depth: int, stem: str) -> str:
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
            fault = f"{target} defines no environment {wanted!r}; it has {_names(classes)}"
            raise EnvFault(fault, exit_code=2)
        return classes[wanted]
    # A base class of another environment in the file is not meant.
    parents = {parent for each in classes.values() for parent in each.__mro__[1:]}
    leaves = {name: each for name, each in classes.items() if each not in parents}
    if len(leaves) != 1:
        fault = f"{target} calls no cli() and defines {_names(leaves)}"
        raise EnvFault(f"{fault}; name one: {target}:ClassName", exit_code=2)
    return next(iter(leaves.values()))


def _names(classes: dict[str, Any]) -> str:
    return ", ".join(sorted(classes)) or "no environment class (a subclass of atroposlib's BaseEnv)"


# The class


class Foreign(Hosted):
    """Class in front of another author's environment."""

    servers_wanted: int = 1

    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        """Return the environment's configuration, and a list of one server."""
        # One server in a list, so that `--openai.*` and YAML keys always reach it.
        config, servers = super().config_init()
        wanted = servers if isinstance(servers, list) else [servers]
        cls.servers_wanted = max(len(wanted), 1)
        first = wanted[0] if wanted else APIServerConfig()
        if "eval_handling" not in config.model_fields_set:
            # The default, STOP_TRAIN, stops rollouts during an evaluation and restarts those in
            # flight.
            config.eval_handling = EvalHandlingEnum.NONE
        fields = APIServerConfig.model_fields
        known = {name: value for name, value in first.model_dump().items() if name in fields}
        return config, [APIServerConfig(**known)]

    def __init__(
        self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False
    ) -> None:
        configs = server_configs if isinstance(server_configs, list) else [server_configs]
        if all(type(each) is ServerBaseline for each in configs) or not configs[0].base_url:
            raise EnvFault(NO_SERVER, exit_code=2)
        # As many servers as by default: some environments address them by number. Each is the
        # plan's server.
        each_of = configs if len(configs) > 1 else configs * self.servers_wanted
        # Our own client spreads the requests over the plan's engines; another needs each of them.
        if not issubclass(self.server_cls, EngineClient):
            urls = addresses(configs[0].base_url)
            each_of = [one.model_copy(update={"base_url": url}) for url in urls for one in each_of]
        copies = [one.model_copy() for one in each_of]
        super().__init__(config, copies, slurm=slurm, testing=testing)

    async def get_server_info(self) -> None:
        await super().get_server_info()
        # Unless the user chose a number, as many groups in flight as the plan has sequences for.
        chosen = (self.config.max_num_workers, self.config.max_num_workers_per_node)
        groups = int(os.environ.get(ENV_SEQUENCES, "0")) // self.config.group_size
        if chosen == NO_CHOICE and groups > LEAST_WORKERS:
            self.config.max_num_workers = groups
            log.info("up to %d groups in flight", groups)

    async def setup(self) -> None:
        """Run the environment's own set-up.

        Raises:
            EnvFault: a package or data set is missing, or a hub does not answer.
        """
        try:
            await super().setup()
        except ImportError as error:
            raise EnvFault(missing_package(error), exit_code=2) from error
        except EnvFault:
            raise
        except Exception as error:
            message = str(error).strip().split("\n")[0] or "without a message"
            reason = f"{type(error).__name__}: {message}"
            raise EnvFault(f"the environment's setup failed: {reason}", exit_code=2) from error


def missing_package(error: ImportError) -> str:
    """Return the message and the fix for a failed import."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or not package:
        return f"the environment cannot be imported: {error}"
    if package != error.name and package in sys.modules:
        fault = f"the installed {package} has no module {error.name!r}"
        return f"{fault}: install another version, or its submodules"
    return (
        f"the environment needs the Python package {package!r}, which is not installed. Install "
        f"what its own requirements name (perhaps: python -m pip install {package}); if it is in "
        'another folder than the script, set PYTHONPATH = "FOLDER" under [env.env]'
    )


def hosted(env_class: type[BaseEnv]) -> type[BaseEnv]:
    """Return `env_class` with `Foreign` in front; our own classes stay unchanged."""
    if issubclass(env_class, Hosted):
        return env_class
    members: dict[str, Any] = {"__module__": env_class.__module__, "__doc__": env_class.__doc__}
    # An environment with a server class of its own keeps it.
    if inspect.isabstract(env_class.server_cls):
        members["server_cls"] = EngineClient
    return type(env_class.__name__, (Foreign, env_class), members)


# Older names


def accept_older_names() -> None:
    """Accept names and answers of older libraries, which environments expect."""
    base.OpenaiConfig = APIServerConfig  # atroposlib before 0.2
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())  # at the end: only modules that are really missing come here
    _token_ids_by_default()


# Chat templates return token ids in transformers 4, and a dictionary in 5.
def _token_ids_by_default() -> None:
    from transformers import PreTrainedTokenizerBase

    original = PreTrainedTokenizerBase.apply_chat_template
    # `functools.wraps` sets this: the method is patched already.
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def apply(self: Any, *args: Any, return_dict: bool = False, **options: Any) -> Any:
        return original(self, *args, return_dict=return_dict, **options)

    PreTrainedTokenizerBase.apply_chat_template = apply


class _Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook for modules that moved, by their older names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in MOVED and name not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name in PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in MOVED:
            moved = importlib.import_module(MOVED[module.__name__])
            # All but `__name__`, `__spec__` and the like, which belong to the older name.
            contents = {name: value for name, value in vars(moved).items() if name[:2] != "__"}
            module.__dict__.update(contents)


if __name__ == "__main__":
    main()
