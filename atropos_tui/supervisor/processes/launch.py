"""A component's spec with every `${VAR}` resolved just before the start."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from atropos_common.system import run_dir
from atropos_common.system.files import scratch_below
from atropos_tui.gpu import VISIBLE, given_here, gpus_within
from atropos_tui.profile import redact
from atropos_tui.profile.spec import ComponentSpec, StackSpec, expand, references
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.processes.process import LaunchError


@dataclass(frozen=True)
class Launch:
    command: list[str]
    env: dict[str, str]
    cwd: str | None
    clears: list[Path]
    creates: Path | None
    scratch: Path | None = None
    """Folder for its temporary files, deleted after its end."""

    @property
    def leaves(self) -> list[Path]:
        """Files and folders to delete at its end."""
        return [*self.clears, *([self.scratch] if self.scratch else [])]


def resolve(text: str, variables: dict[str, str], where: str) -> str:
    for name in references(text):
        if name not in variables:
            raise LaunchError(
                f"environment variable {name} is not set (used in {where})",
                f"export {name}=..., or put it into the .env file beside the profile; write "
                f"${name} for a shell's own",
            )
    return expand(text, variables)


def prepare(stack: StackSpec, spec: ComponentSpec, attempt: int, socket: str, token: str) -> Launch:
    """Resolve `spec` against this process's environment and the stack's variables.

    Paths on another node are checked and created there.

    Raises:
        LaunchError: a variable, the working directory or the program is missing.
    """
    own = {
        run_dir.ENV_RUN_DIR: stack.run_dir,
        run_dir.ENV_RUN_ID: stack.run_id,
        run_dir.ENV_CONTROL_SOCKET: socket,
        run_dir.ENV_COMPONENT: spec.name,
        run_dir.ENV_ATTEMPT: str(attempt),
    } | ({run_dir.ENV_HELD_PORT: str(spec.port)} if spec.port_held and not spec.is_far else {})
    # Later entries win: the run's own values cannot be overridden.
    variables = {**stack.variables, run_dir.ENV_TOKEN: token, **os.environ, **own}
    inherited = {run_dir.ENV_TOKEN: token, **os.environ}
    env = {name: value for name, value in inherited.items() if redact.goes_to(name, spec.role)}
    # vLLM sets its process title, which overwrites the environment block and the run's marker in
    # it. SPT_NOENV stops that.
    env |= {"PYTHONUNBUFFERED": "1", "SPT_NOENV": "1"}
    env |= {
        key: resolve(value, variables, f"{spec.name}: env.{key}") for key, value in spec.env.items()
    }
    # After the spec's env, so that a profile cannot change the run's markers.
    env |= own
    if spec.gpus and not spec.is_far:
        # The plan counts the GPUs of this shell or job; CUDA counts those of the machine.
        given = given_here()
        _check_gpus(spec, given)
        env = gpus_within(env, given)
    command = [resolve(part, variables, f"{spec.name}: command") for part in spec.command]
    cwd = resolve(spec.cwd, variables, f"{spec.name}: cwd") if spec.cwd else None
    if not spec.is_far:
        _check_here(command[0], cwd, env.get("PATH"), spec.name)
    base = Path(cwd or ".")
    paths = [base / resolve(path, variables, f"{spec.name}: clears") for path in spec.clears]
    creates = (
        base / resolve(spec.creates, variables, f"{spec.name}: creates") if spec.creates else None
    )
    scratch = None
    if spec.scratch and not spec.is_far:
        scratch, env = scratch_below(env, scratch_name(token, spec.name, attempt))
    return Launch(command, env, cwd, paths, creates, scratch)


def _check_gpus(spec: ComponentSpec, given: str | None) -> None:
    if given is None:
        return
    shown = len(given.split(",")) if given else 0
    if max(spec.gpus) < shown:
        return
    raise LaunchError(
        f"{spec.name}: GPU {max(spec.gpus)} does not exist: {VISIBLE}={given} shows {shown}",
        f"use lower numbers in gpus, or set {VISIBLE} to more GPUs",
    )


def _check_here(program: str, cwd: str | None, path: str | None, name: str) -> None:
    if cwd and not Path(cwd).is_dir():
        raise LaunchError(
            f"working directory {cwd} does not exist", f"create it, or change cwd of {name}"
        )
    if "/" in program:
        target = Path(cwd or ".") / program
        if not target.is_file():
            raise LaunchError(f"program {program} does not exist", f"correct the command of {name}")
        if not os.access(target, os.X_OK):
            raise LaunchError(f"program {program} is not executable", f"chmod +x {target}")
    elif shutil.which(program, path=path) is None:
        raise LaunchError(
            f"program {program} was not found on PATH",
            f"install it, or correct the command of {name}",
        )


def scratch_name(token: str, name: str, attempt: int) -> str:
    """Short, because sockets lie in it, and not guessable."""
    # The token makes the name secret: another user cannot create the folder first.
    digest = hashlib.blake2b(f"{token} {name} {attempt}".encode(), digest_size=8).digest()
    return procfs.SCRATCH + base64.urlsafe_b64encode(digest).decode().rstrip("=")
