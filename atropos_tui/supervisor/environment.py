"""The environment of a component: `${VAR}` resolved at the last moment, and the run's own variables."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from atropos_common import run_dir
from atropos_tui.profile.spec import ComponentSpec, StackSpec, expand, references


class LaunchError(ValueError):
    """A component that cannot be started as written: what is wrong, and the way out."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix


@dataclass(frozen=True)
class Launch:
    """A component with every reference resolved."""

    command: list[str]
    env: dict[str, str]
    cwd: str | None
    clears: list[Path]
    creates: Path | None


def resolve(text: str, variables: dict[str, str], where: str) -> str:
    """Replace each `${VAR}`.

    Raises:
        LaunchError: a variable is not set.
    """
    for name in references(text):
        if name not in variables:
            raise LaunchError(
                f"environment variable {name} is not set (used in {where})",
                f"export {name}=..., or put it into the .env file beside the profile",
            )
    return expand(text, variables)


def stamps(stack: StackSpec, spec: ComponentSpec, attempt: int, socket: str) -> dict[str, str]:
    """Variables that a component gets, whatever its `env` says."""
    held = {run_dir.ENV_HELD_PORT: str(spec.port)} if spec.port_held else {}
    return held | {
        run_dir.ENV_RUN_DIR: stack.run_dir,
        run_dir.ENV_RUN_ID: stack.run_id,
        run_dir.ENV_CONTROL_SOCKET: socket,
        run_dir.ENV_COMPONENT: spec.name,
        run_dir.ENV_ATTEMPT: str(attempt),
    }


def prepare(stack: StackSpec, spec: ComponentSpec, attempt: int, socket: str, token: str) -> Launch:
    """Resolve `spec` against this process's environment, and the stack's variables, which nobody inherits.

    `SPT_NOENV` keeps programs that set their process title (vLLM) from overwriting the environment block, and with it
    the marker by which the run's processes are found.

    Args:
        token: the run's token for control routes, unless the spec or the environment names one.

    Raises:
        LaunchError: a variable, the working directory or the program is missing.
    """
    own = stamps(stack, spec, attempt, socket)
    variables = {**stack.variables, run_dir.ENV_TOKEN: token, **os.environ, **own}
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1"}
    env |= {key: resolve(value, variables, f"{spec.name}: env.{key}") for key, value in spec.env.items()}
    env = {run_dir.ENV_TOKEN: token, **env, **own}
    command = [resolve(part, variables, f"{spec.name}: command") for part in spec.command]
    cwd = resolve(spec.cwd, variables, f"{spec.name}: cwd") if spec.cwd else None
    if cwd and not Path(cwd).is_dir():
        raise LaunchError(f"working directory {cwd} does not exist", f"create it, or change cwd of {spec.name}")
    _check_program(command[0], cwd, env.get("PATH"), spec.name)
    base = Path(cwd or ".")
    paths = [base / resolve(path, variables, f"{spec.name}: clears") for path in spec.clears]
    creates = base / resolve(spec.creates, variables, f"{spec.name}: creates") if spec.creates else None
    return Launch(command, env, cwd, paths, creates)


def _check_program(program: str, cwd: str | None, path: str | None, name: str) -> None:
    if "/" in program:
        target = Path(cwd or ".") / program
        if not target.is_file():
            raise LaunchError(f"program {program} does not exist", f"correct the command of {name}")
        if not os.access(target, os.X_OK):
            raise LaunchError(f"program {program} is not executable", f"chmod +x {target}")
    elif shutil.which(program, path=path) is None:
        raise LaunchError(f"program {program} was not found on PATH", f"install it, or correct the command of {name}")


def remove(paths: list[Path]) -> None:
    """Delete files that must not outlive a process; missing ones are fine, folders are left alone."""
    for path in paths:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
