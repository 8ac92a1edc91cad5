"""`validate`, `plan`, `schema`: what a profile means, without starting anything."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.stack.checks import check_graph, check_profile, preflight
from atropos_tui.stack.components import Site
from atropos_tui.stack.plan import build_stack, make_site, redacted
from atropos_tui.stack.profile import Profile, load_profile
from atropos_tui.stack.spec import ComponentSpec, StackSpec


def checked(profile: Profile, file: Path, site: Site, *, machine: bool) -> StackSpec:
    """The stack of a profile that passed every check.

    Raises:
        UserError: with all problems; `machine` adds those of this machine.
    """
    problems = check_profile(site, str(file))
    if not problems:
        stack = build_stack(profile, site.run.root, run_id=site.run_id)
        problems = check_graph(stack, str(file))
        problems += preflight(site, stack, str(file)) if machine and not problems else []
        if not problems:
            return stack
    raise UserError(f"cannot start this profile: {_count(problems)}", problems)


def _count(problems: list[Problem]) -> str:
    return f"{len(problems)} problem{'' if len(problems) == 1 else 's'}"


def _site(profile: Profile) -> Site:
    """A site for showing: where a run would lie."""
    return make_site(profile, Path("runs") / f"{profile.name}-TIME-ID", run_id=f"{profile.name}-TIME-ID")


def validate(options: argparse.Namespace) -> int:
    """Check the profile and this machine; silent problems are none."""
    profile, file = load_profile(options.profile, options.sets)
    stack = checked(profile, file, _site(profile), machine=True)
    names = ", ".join(component.name for component in stack.components)
    print(f"{file}: valid ({profile.mode}: {names})")
    return Exit.DONE


def plan(options: argparse.Namespace) -> int:
    """Print what would run; the machine is not asked."""
    profile, file = load_profile(options.profile, options.sets)
    stack = checked(profile, file, _site(profile), machine=False)
    if options.json:
        print(json.dumps(redacted(stack), indent=2))
        return Exit.DONE
    print(f"{stack.name}: mode {stack.mode}, {len(stack.components)} components in start order")
    for component, shown in zip(stack.components, redacted(stack)["components"], strict=True):
        print(f"\n{component.name} ({component.role})")
        print("\n".join(f"  {line}" for line in _component_lines(component, shown["command"], shown["env"])))
    return Exit.DONE


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
    """The JSON Schema, for editors: `#:schema` at the top of a profile."""
    print(json.dumps(Profile.model_json_schema(), indent=2))
    return Exit.DONE
