"""An environment of verifiers from its id or folder, and its tasks."""

from __future__ import annotations

import itertools
import os
import random
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError

from atropos_envs import EnvFault
from atropos_envs.hosting.evaluation import reason_of
from atropos_envs.hosting.runner import missing_package
from atropos_envs.verifiers.harness import HARNESS_ID, offer_harness

EVALUATION = "eval"
"""First part of the keys that apply to evaluations only."""
# Values of a taskset's `split` for evaluations, in the order of preference.
SPLITS = ("eval", "validation", "valid", "dev", "test")
# Share of the tasks that are held out where the environment has no split of its own.
HELD_OUT_SHARE = 0.1

# Errors of environments for releases before 0.4, which had another API.
OLDER = re.compile(r"module 'verifiers' has no attribute|exports no Taskset|defines no `__all__`")
OLDER_FIX = "If it was made for verifiers before 0.4, it needs its newer release"

Tree = dict[str, Any]


def load(name: str, arguments: Tree) -> vf.Env:
    """Load an environment with its settings.

    Args:
        name: id of an installed environment, or a folder or file.
        arguments: dotted key -> value; a key that no environment has belongs to the taskset.

    Raises:
        EnvFault: it does not exist, or cannot be loaded with these settings.
    """
    offer_harness()
    ident = _importable(name)
    try:
        config_type = vf.env_config_type(ident, str(arguments.get("id", "")))
        tree = _tree(arguments, set(config_type.model_fields))
        tree["taskset"] = tree.get("taskset", {}) | {"id": ident}
        for role in _roles(config_type):
            tree[role] = _with_defaults(tree.get(role, {}), ident)
        return vf.load_environment(vf.resolve_env_config(tree))
    except ValidationError as error:
        raise EnvFault(_wrong_settings(name, error), exit_code=2) from None
    except ImportError as error:
        inner = error.__cause__  # verifiers says the same of an environment that lacks a package
        if isinstance(inner, ModuleNotFoundError) and not _is_environment(inner.name, ident):
            raise EnvFault(missing_package(inner), exit_code=2) from error
        if str(error).startswith("taskset "):
            fault = f"there is no environment {name!r} of verifiers: no package {ident!r}"
            fix = "Install it, or give its folder"
            raise EnvFault(f"{fault}. {fix}", exit_code=2) from None
        raise EnvFault(missing_package(error), exit_code=2) from error
    except EnvFault:
        raise
    except Exception as error:
        reason = reason_of(error)
        older = isinstance(error, AttributeError | TypeError) and OLDER.search(reason)
        fix = f". {OLDER_FIX}" if older else ""
        raise EnvFault(f"{name} cannot be loaded: {reason}{fix}", exit_code=2) from error


def _is_environment(module_name: str | None, ident: str) -> bool:
    """Tell whether a module that is missing is the environment itself."""
    module = ident.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    return module_name is None or module_name.rpartition(".")[2] == module


def tasks_of(taskset: vf.Taskset) -> Iterator[Any]:
    """Yield the tasks.

    Raises:
        EnvFault: the environment's own code fails.
    """
    try:
        yield from taskset
    except ImportError as error:
        raise EnvFault(missing_package(error), exit_code=2) from error
    except Exception as error:
        reason = reason_of(error)
        raise EnvFault(f"the environment's setup failed: {reason}", exit_code=2) from error


def split_arguments(arguments: Tree) -> tuple[Tree, Tree]:
    """Return the arguments for rollouts, and those for evaluations alone."""
    start = f"{EVALUATION}."
    own = {key: value for key, value in arguments.items() if not key.startswith(start)}
    return own, {
        key.removeprefix(start): value for key, value in arguments.items() if key.startswith(start)
    }


def own_evaluation(env: vf.Env, arguments: Tree) -> Tree | None:
    """Return arguments of the environment's own evaluation split; None if it has none."""
    field = type(env.taskset.config).model_fields.get("split")
    values = _choices(field.annotation) if field else []
    present = getattr(env.taskset.config, "split", None)
    wanted = next((split for split in SPLITS if split in values and split != present), None)
    return None if wanted is None else arguments | {"taskset.split": wanted}


def divide(tasks: list[Any], most: int, rng: random.Random) -> tuple[list[Any], list[Any]]:
    """Return the tasks to train on, and those that are held out."""
    count = min(most, int(len(tasks) * HELD_OUT_SHARE))
    held_out = set(rng.sample(range(len(tasks)), count))
    training = [task for at, task in enumerate(tasks) if at not in held_out]
    return training, [tasks[at] for at in sorted(held_out)]


def take(tasks: Iterator[Any], count: int) -> list[Any]:
    return list(itertools.islice(tasks, count))


def _importable(name: str) -> str:
    """Return the environment's id; put its folder on the import path."""
    path = Path(name).expanduser()
    if not (path.exists() and (path.is_dir() or path.suffix == ".py")):
        if "/" in name and not path.parent.name == name.partition("/")[0]:
            raise EnvFault(f"there is no folder {name}", exit_code=2)
        return name
    path = path.resolve()
    # A project's folder has a package of the same name in it (`vf-init`).
    inner = path / path.name.replace("-", "_")
    if inner.is_dir() or inner.with_suffix(".py").is_file():
        path = inner if inner.is_dir() else inner.with_suffix(".py")
    parent = str(path.parent)
    sys.path.insert(0, parent)
    # Tool servers are processes of their own.
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [parent, known]))
    return path.stem


def _roles(config_type: type[Any]) -> list[str]:
    fields = config_type.model_fields.items()
    return [name for name, field in fields if isinstance(field.default, vf.AgentConfig)]


def _with_defaults(role: Tree, ident: str) -> Tree:
    """Return an agent's settings; by default it runs on this machine, without a shell."""
    role = {"runtime": {"type": "subprocess"}} | role
    if "harness" not in role and vf.default_harness_id(ident) == "bash":
        role["harness"] = {"id": HARNESS_ID}
    return role


def _tree(arguments: Tree, fields: set[str]) -> Tree:
    tree: Tree = {}
    for key, value in arguments.items():
        first = key.partition(".")[0]
        *parents, last = key.split(".") if first in fields else ["taskset", *key.split(".")]
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return tree


def _choices(annotation: Any) -> list[Any]:
    """Return the values of a Literal, also inside a union."""
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [value for each in typing.get_args(annotation) for value in _choices(each)]


def _wrong_settings(name: str, error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    return f"{name} does not accept {key!r} below [env.args]: {first['msg']}"
