"""`validate`, `plan`, `schema`: what a profile means, without starting anything; and the `.env` files beside it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.format import one_line
from atropos_tui.profile.checks import check_commands, check_graph, check_notes, check_profile, placed
from atropos_tui.profile.errors import in_words, printable, refused
from atropos_tui.profile.memory import as_data, as_lines, site_budget, take_inventory
from atropos_tui.profile.plan import Site, make_site, redacted, stack_of
from atropos_tui.profile.preflight import preflight, unfit
from atropos_tui.profile.sections import Profile, load_profile, profile_schema
from atropos_tui.profile.spec import ComponentSpec, StackSpec


def checked(profile: Profile, file: Path, site: Site, *, machine: bool) -> StackSpec:
    """The stack of a profile that passed every check.

    Raises:
        UserError: with all problems; `machine` adds those of this machine.
    """
    with in_words(printable(str(file))):
        problems = check_profile(site)
        try:
            stack = stack_of(site)
        except ValueError:
            if not problems:  # else the trainer's settings contradict each other, which is among them
                raise
        else:
            problems += check_graph(profile, stack)
            problems += preflight(site, stack) if machine else []
            if not problems:
                return stack
        raise refused([placed(problem, profile) for problem in problems], "cannot start this profile")


def planned_site(profile: Profile, dotenv: Mapping[str, str] | None = None) -> Site:
    """A site for showing: where a run would lie."""
    name = f"{profile.name}-TIME-ID"
    return make_site(profile, Path("runs") / name, run_id=name, dotenv=dotenv)


def validate(options: argparse.Namespace) -> int:
    """Check the profile and this machine; silent problems are none."""
    profile, file = load_profile(options.profile, options.sets)
    site = planned_site(profile, read_env_files(file))
    stack = checked(profile, file, site, machine=True)
    tell_unused(site.dotenv, stack.variables)
    warnings = site_budget(site, take_inventory(site)).warnings
    for line in [*check_notes(site), *check_commands(stack), *(f"WARNING {warning}" for warning in warnings)]:
        print(line)
    names = ", ".join(component.name for component in stack.components)
    print(f"{file}: valid ({profile.mode}: {names})")
    return Exit.DONE


def plan(options: argparse.Namespace) -> int:
    """Print what would run, and the memory it wants; of this machine only memory, GPUs and local models are asked.

    Raises:
        UserError: after printing, when this machine lacks GPUs or memory for it.
    """
    profile, file = load_profile(options.profile, options.sets)
    site = planned_site(profile)
    stack = checked(profile, file, site, machine=False)
    with in_words(printable(str(file))):
        inventory = take_inventory(site)
        budget = site_budget(site, inventory)
        lacking = [placed(problem, profile) for problem in unfit(site, inventory)]
    if options.json:
        more = {"notes": check_notes(site), "budget": as_data(budget), "problems": [asdict(p) for p in lacking]}
        print(json.dumps(redacted(stack) | more, indent=2))
    else:
        _print_plan(stack, [*check_notes(site), *as_lines(budget)])
    if lacking:
        raise refused(lacking, "this machine cannot run this profile")
    return Exit.DONE


def _print_plan(stack: StackSpec, more: list[str]) -> None:
    print(f"{stack.name}: mode {stack.mode}, {len(stack.components)} components in start order")
    for component, data in zip(stack.components, redacted(stack)["components"], strict=True):
        print(f"\n{component.name} ({component.role})")
        print("\n".join(f"  {line}" for line in _component_lines(component, data["command"], data["env"])))
    print("\n" + "\n".join(more))


def _component_lines(component: ComponentSpec, command: list[str], env: dict[str, str]) -> list[str]:
    lines = [f"command   {shlex.join(command)}"]
    if env:
        lines.append("env       " + " ".join(f"{key}={shlex.quote(value)}" for key, value in env.items()))
    if component.port:
        lines.append(f"port      {component.port}")
    if component.gpus:
        lines.append(f"gpus      {component.gpus}")
    if component.depends_on:
        lines.append("after     " + ", ".join(f"{name} {state}" for name, state in component.depends_on.items()))
    if component.creates:
        lines.append(f"creates   {component.creates} (skipped when it exists)")
    if component.restart_with:
        lines.append(f"restarts  with {', '.join(component.restart_with)}")
    return lines


def schema(options: argparse.Namespace) -> int:
    """The JSON Schema, for editors: `#:schema ./profile.schema.json` at the top of a profile."""
    if options.output is None:
        print(schema_text(), end="")
        return Exit.DONE
    try:
        options.output.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        problem = Problem(str(error.strerror), "choose another file", file=printable(str(options.output)))
        raise UserError("the schema cannot be written", [problem]) from None
    return Exit.DONE


def schema_text() -> str:
    """The schema as it lies beside the shipped profiles and beside those that `init` writes."""
    return json.dumps(profile_schema(), indent=2, ensure_ascii=False) + "\n"


def read_env_files(profile: Path) -> dict[str, str]:
    """Names and values in `.env` of the current folder and of the profile's folder, where the former wins.

    They feed `${VAR}` alone and enter no environment: a folder can be somebody else's, and names such as LD_PRELOAD or
    PYTHONPATH would run his code. For the same reason a file of another user is left alone, which is said.

    Raises:
        UserError: one of them cannot be read.
    """
    from dotenv import dotenv_values

    found: dict[str, str] = {}
    for folder in dict.fromkeys((Path.cwd(), profile.resolve().parent)):
        file = folder / ".env"
        try:
            if _is_own(file):
                found = {name: value for name, value in dotenv_values(file).items() if value is not None} | found
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in a value
            problem = Problem(str(error), "write lines of NAME=value in UTF-8", file=str(file))
            raise UserError("unreadable .env", [problem]) from None
    return found


def tell_unused(names: Iterable[str], used: Iterable[str]) -> None:
    """Say which names of `.env` reach nobody."""
    if unused := sorted({*names} - {*used} - {*os.environ}):
        print(
            f".env: no component gets {one_line(', '.join(unused))}, since no ${{...}} of the profile names it; where "
            f'one needs it, write {one_line(unused[0])} = "${{{one_line(unused[0])}}}" into its env',
            file=sys.stderr,
        )


def _is_own(file: Path) -> bool:
    """Whether there is such a file, and it is this user's; neither a link of somebody else."""
    if not file.exists():
        return False
    if {file.lstat().st_uid, file.stat().st_uid} == {os.geteuid()}:
        return True
    text = "belongs to another user and is not read: chown it, or export what it names"
    print(f"{one_line(str(file))} {text}", file=sys.stderr)
    return False
