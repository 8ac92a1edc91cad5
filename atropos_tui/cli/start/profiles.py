from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from atropos_common.system.files import read_regular
from atropos_common.system.run_dir import ENV_SHARED_WEIGHTS, ENV_WEIGHT_UPDATES
from atropos_tui.cli.answers import Validated
from atropos_tui.cluster.machines import lacking
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.profile.budget import memory
from atropos_tui.profile.budget.disk import disk_of
from atropos_tui.profile.budget.fit import (
    advice,
    settle,
    settle_engines,
    split_gpus,
    split_text,
)
from atropos_tui.profile.budget.inventory import EXAMPLES, Hardware, named_machine
from atropos_tui.profile.budget.memory import (
    Inventory,
    as_data,
    as_lines,
    site_budget,
    take_inventory,
)
from atropos_tui.profile.checks.consistency import (
    check_commands,
    check_curriculum,
    check_graph,
    check_notes,
    check_profile,
    placed,
)
from atropos_tui.profile.checks.preflight import (
    lacks,
    machines_of,
    made_for_gpus,
    mismatches,
    preflight,
    unfit,
)
from atropos_tui.profile.checks.turns import turn_warnings
from atropos_tui.profile.errors import did_you_mean, in_words, printable, refused
from atropos_tui.profile.plan import redacted, stack_of
from atropos_tui.profile.profile import Profile, load_profile, profile_schema
from atropos_tui.profile.site import Site, make_site
from atropos_tui.profile.spec import ComponentSpec, StackSpec


@dataclass(frozen=True)
class Checked:
    """A profile that passed every check."""

    site: Site
    stack: StackSpec
    inventory: Inventory
    chosen: str
    """GPU division and memory settings that were chosen, and why."""


def checked(
    profile: Profile,
    file: Path,
    site: Site,
    *,
    machine: bool,
    named: Hardware | None = None,
    resumed: bool = False,
) -> Checked:
    """Check a profile on the machine where it will run.

    Args:
        machine: also report what this machine lacks.
        named: GPUs of another machine to check against.
        resumed: the profile continues a run.

    Raises:
        UserError: lists all problems of the profile and of the machine.
    """
    with in_words(printable(str(file))):
        site, divided = _divided(site, named)
        # Placement first: later checks depend on which machine has which component.
        if few := lacking(site.profile, site.hosts):
            raise _refused(few, profile)
        inventory = take_inventory(site, named)
        site, engines = settle_engines(site, inventory)
        profile = site.profile
        problems = check_profile(site)
        try:
            stack = stack_of(site)
        except ValueError:
            # with problems, the ValueError is one of them: contradictory settings of the trainer
            if not problems:
                raise
            raise _refused(problems, profile) from None
        problems += [*check_graph(profile, stack), *check_curriculum(profile, stack)]
        if problems:
            more = (
                preflight(site, stack, inventory)
                if machine
                else unfit(site, inventory)
                if named
                else []
            )
            # A missing GPU causes problems with counts as well; report the missing one only.
            absent = {problem.key for problem in more if problem.key.endswith(".gpus")}
            raise _refused([*(each for each in problems if each.key not in absent), *more], profile)
        site, chosen = settle(site, inventory, resumed=resumed)
        stack = stack_of(site)  # again: `settle` may have changed settings
        if machine and (wrong := mismatches(site, inventory)):
            raise _refused(
                [*wrong, *lacks(site, stack, inventory.machine), *unfit(site, inventory)], profile
            )
        if machine and (missing := preflight(site, stack, inventory)):
            problems = [placed(problem, profile) for problem in missing]
            raise refused(problems, "the profile is valid, but cannot start on this machine")
        return Checked(site, stack, inventory, "; ".join(filter(None, [divided, engines, chosen])))


def _divided(site: Site, named: Hardware | None) -> tuple[Site, str]:
    """Divide the GPUs between trainer and engines if `inference_gpus` leaves that to the machine.

    Returns:
        The site, and what was chosen.

    Raises:
        UserError: this division is not possible.
    """
    if site.profile.inference_gpus is None:
        return site, ""
    found = split_gpus(site.profile, named or memory.read_machine())
    if isinstance(found, Problem):
        raise _refused([found], site.profile)
    return replace(site, profile=found), split_text(site.profile, found)


def _refused(problems: list[Problem], profile: Profile) -> UserError:
    return refused([placed(problem, profile) for problem in problems], "cannot start this profile")


def planned_site(profile: Profile, file: Path | None = None) -> Site:
    """Site with a placeholder run directory, for commands that start nothing.

    Args:
        file: the profile's, whose `.env` counts.
    """
    name = f"{profile.name}-TIME-ID"
    dotenv = None if file is None else read_env_files(file)
    return make_site(
        profile, Path("runs") / name, run_id=name, dotenv=dotenv, hosts=machines_of(profile)
    )


def validate(options: argparse.Namespace) -> int:
    if not options.json:
        found = _validated(options)
        for line in [*found.notes, *(f"WARNING {warning}" for warning in found.warnings)]:
            print(line)
        print(f"{found.file}: valid ({found.mode}: {', '.join(found.components)})")
        return Exit.DONE
    try:
        found = _validated(options)
    except UserError as error:
        problems = error.problems or [Problem(error.title)]
        found = Validated(valid=False, file=str(options.profile), problems=problems)
    print(found.as_json())
    return Exit.DONE if found.valid else Exit.USAGE


def _validated(options: argparse.Namespace) -> Validated:
    profile, file = load_profile(options.profile, options.sets)
    named = _named(options)
    ready = checked(
        profile,
        file,
        planned_site(profile, file),
        machine=named is None,
        named=named,
    )
    site, stack = ready.site, ready.stack
    warn_unused(site.dotenv, stack.variables)
    notes = []
    if named is not None:
        wrong = [*mismatches(site, ready.inventory), *unfit(site, ready.inventory)]
        if wrong:
            raise refused(
                [placed(problem, profile) for problem in wrong],
                f"cannot start this profile on {options.gpus}",
            )
        # Files of this machine may exist on the other one, so what lacks here is a note, not an
        # error.
        notes += [
            f"not on this machine: {placed(problem, profile).reason}"
            for problem in lacks(site, stack, named)
        ]
    notes += [
        *check_notes(site),
        *check_commands(stack),
        *([ready.chosen] if site.profile != profile else []),
    ]
    return Validated(
        valid=True,
        file=str(file),
        mode=profile.mode,
        components=[component.name for component in stack.components],
        notes=notes,
        warnings=warnings_of(site, ready.inventory, here=named is None),
    )


def warnings_of(site: Site, inventory: Inventory, *, here: bool = True) -> list[str]:
    """Memory and disk that the stack may lack, and answers to chats that may run on."""
    budget = site_budget(site, inventory)
    disk = disk_of(site, inventory, budget, here=here)
    cpu = made_for_gpus(site, inventory.machine) if here else []
    return [*cpu, *budget.warnings, *(disk.warnings() if disk else []), *turn_warnings(site)]


def _named(options: argparse.Namespace) -> Hardware | None:
    try:
        return named_machine(options.gpus) if options.gpus is not None else None
    except ValueError as error:
        raise UserError(
            "no such hardware", [Problem(str(error), f"write GPUs as {EXAMPLES}", key="--gpus")]
        ) from None


def plan(options: argparse.Namespace) -> int:
    """Read of this machine only memory, GPUs and local models are read.

    Raises:
        UserError: after printing, if the machine lacks GPUs or memory.
    """
    profile, file = load_profile(options.profile, options.sets)
    named = _named(options)
    ready = checked(profile, file, planned_site(profile, file), machine=False, named=named)
    site, inventory = ready.site, ready.inventory
    with in_words(printable(str(file))):
        budget = site_budget(site, inventory)
        short = [placed(problem, profile) for problem in unfit(site, inventory)]
        ways = advice(site, inventory)
        disk = disk_of(site, inventory, budget, here=named is None)
    notes = [*check_notes(site), *filter(None, [ready.chosen])]
    if options.json:
        more = {
            "notes": notes,
            "budget": as_data(budget),
            "disk": asdict(disk) | {"wanted": disk.wanted} if disk else None,
            "advice": ways,
            "problems": [asdict(p) for p in short],
        }
        print(json.dumps(redacted(ready.stack) | more, indent=2))
    else:
        rows = [*as_lines(budget), *(f"  {line}" for line in ways), *(disk.lines() if disk else [])]
        _print_plan(ready.stack, [*notes, *rows])
    if short:
        raise refused(
            short, f"{'this machine' if named is None else options.gpus} cannot run this profile"
        )
    return Exit.DONE


def _print_plan(stack: StackSpec, more: list[str]) -> None:
    print(f"{stack.name}: mode {stack.mode}, {len(stack.components)} components in start order")
    print("".join(f"\n{line}" for line in _node_lines(stack)), end="\n" if stack.nodes else "")
    # The trainer computes with the memory of the first engine that exports its weights.
    mapped = [each.name for each in stack.components if ENV_SHARED_WEIGHTS in each.env]
    for component, data in zip(stack.components, redacted(stack)["components"], strict=True):
        lines = _component_lines(component, data["command"], data["env"], mapped[:1])
        print(f"\n{component.name} ({component.role})")
        print("\n".join(f"  {line}" for line in lines))
    print("\n" + "\n".join(more))


def _node_lines(stack: StackSpec) -> list[str]:
    lines = [f"{len(stack.nodes)} machines, launcher {stack.launcher}"] if stack.nodes else []
    width = max((len(node.name) for node in stack.nodes), default=0)
    for node in stack.nodes:
        on = [part for part in stack.components if part.place and part.place.node == node.name]
        parts = ", ".join(f"{part.name} {part.gpus}" if part.gpus else part.name for part in on)
        named = "" if node.host == node.name else f" = {node.host}"
        at = "" if node.address in (node.host, node.name) else f" at {node.address}"
        lines.append(f"  {node.name:<{width}}{named}{at}  {node.gpus} GPUs: {parts or 'nothing'}")
    return lines


def _component_lines(
    component: ComponentSpec, command: list[str], env: dict[str, str], shared: list[str]
) -> list[str]:
    lines = [f"command   {shlex.join(command)}"]
    if env:
        lines.append(
            "env       " + " ".join(f"{key}={shlex.quote(value)}" for key, value in env.items())
        )
    if component.place:
        lines.append(f"node      {component.place.node}")
    if component.place and component.place.prefix:
        lines.append(f"through   {shlex.join(component.place.prefix)}")
    if component.port:
        lines.append(f"port      {component.port}")
    if component.gpus:
        lines.append(f"gpus      {component.gpus}")
    if component.name in shared:
        lines.append("weights   the trainer's own, in this engine's memory")
    elif ENV_WEIGHT_UPDATES in env or ENV_SHARED_WEIGHTS in env:
        lines.append("weights   a copy, which the trainer updates")
    if component.depends_on:
        lines.append(
            "after     "
            + ", ".join(f"{name} {state}" for name, state in component.depends_on.items())
        )
    if component.creates:
        lines.append(f"creates   {component.creates} (skipped when it exists)")
    if component.restart_with:
        lines.append(f"restarts  with {', '.join(component.restart_with)}")
    return lines


def schema(options: argparse.Namespace) -> int:
    """Print the JSON Schema of a profile (`#:schema ./profile.schema.json`), or of a command's
    JSON."""
    text = schema_text() if options.command is None else _answer_schema(options.command)
    if options.output is None:
        print(text, end="")
        return Exit.DONE
    try:
        options.output.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = Problem(
            str(error.strerror), "choose another file", file=printable(str(options.output))
        )
        raise UserError("the schema cannot be written", [problem]) from None
    return Exit.DONE


def _answer_schema(command: str) -> str:
    from atropos_tui.cli.schemas import ANSWERS, answer_schema

    if command not in ANSWERS:
        fix = f"{did_you_mean(command, ANSWERS)}one of: {', '.join(ANSWERS)}"
        raise UserError(
            "no such schema",
            [Problem(f"the command {printable(command)} has no --json output", fix)],
        )
    return json.dumps(answer_schema(command), indent=2) + "\n"


def schema_text() -> str:
    """Schema file beside the shipped profiles."""
    return json.dumps(profile_schema(), indent=2, ensure_ascii=False) + "\n"


def read_env_files(profile: Path) -> dict[str, str]:
    """Read `.env` of the current folder and of the profile's folder; the former wins.

    The values fill `${VAR}` only: the folder may belong to another user, and LD_PRELOAD or
    PYTHONPATH would run that user's code. A file of another user is skipped.

    Raises:
        UserError: one of them cannot be read.
    """
    from dotenv import dotenv_values

    found: dict[str, str] = {}
    for folder in dict.fromkeys((Path.cwd(), profile.resolve().parent)):
        file = folder / ".env"
        try:
            if _is_own(file):
                # A pipe that came with the folder would keep `up` waiting for ever.
                values = dotenv_values(stream=io.StringIO(read_regular(file, unlinked=0)))
                found = {name: value for name, value in values.items() if value is not None} | found
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in a value
            problem = Problem(
                str(error), "make it a file of NAME=value lines, UTF-8", file=str(file)
            )
            raise UserError("unreadable .env", [problem]) from None
    return found


def warn_unused(names: Iterable[str], used: Iterable[str]) -> None:
    if unused := sorted({*names} - {*used} - {*os.environ}):
        print(
            f".env: no component gets {', '.join(unused)}, because no ${{...}} of the "
            f"profile names it; if "
            f'one needs it, write {unused[0]} = "${{{unused[0]}}}" into its env',
            file=sys.stderr,
        )


def _is_own(file: Path) -> bool:
    """The file, as a link and as its target, belongs to this user."""
    if not file.exists():
        return False
    if {file.lstat().st_uid, file.stat().st_uid} == {os.geteuid()}:
        return True
    text = "belongs to another user and is not read: chown it, or export its variables"
    print(f"{file} {text}", file=sys.stderr)
    return False
