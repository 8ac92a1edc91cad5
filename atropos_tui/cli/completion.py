"""Shell completion: `completion SHELL` prints a script that calls atropos-tui at every TAB.

source <(atropos-tui completion bash)      # in ~/.bashrc, the same with zsh in ~/.zshrc
atropos-tui completion fish | source       # in ~/.config/fish/config.fish
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any

import argcomplete
from argcomplete.completers import DirectoriesCompleter, FilesCompleter

from atropos_tui.errors import Exit, UserError

LOAD_COMPINIT = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }"
"""Sets up completion in a zsh that has not done so."""
PLAIN = re.compile(r"[\w.:@+-]+")
"""Names that every shell reads as one plain word."""


def completion(options: argparse.Namespace) -> int:
    script = argcomplete.shellcode(["atropos-tui"], use_defaults=False, shell=options.shell).strip()
    if options.shell == "zsh":
        head, _, rest = script.partition("\n")  # line 1 is `#compdef`, which zsh expects first
        script = f"{head}\n{LOAD_COMPINIT}\n{rest}"
    print(script)
    return Exit.DONE


def answer(parser: argparse.ArgumentParser) -> None:
    """Answer the shell's question in the environment, then raise SystemExit."""
    _complete_values(parser)
    finder = argcomplete.ExclusiveCompletionFinder()
    finder(parser, always_complete_options=False, exit_method=sys.exit)


def _complete_values(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_values(command)
        elif action.choices is None:
            action.completer = values  # type: ignore[attr-defined]


def values(
    prefix: str, action: argparse.Action, parser: argparse.ArgumentParser, **parsed: Any
) -> dict[str, str]:
    """Possible values of `action` with descriptions, from its metavar."""
    # Words that a list argument already has are not offered again.
    given = getattr(parsed["parsed_args"], action.dest, None)
    taken = given if isinstance(given, list) and not action.option_strings else []
    offered: dict[str, str] = {}
    for kind in str(action.metavar or "").split("|"):
        if kind.islower():
            offered[kind] = ""
        elif kind == "COMPONENT":
            offered |= _components(parsed["parsed_args"])
        elif kind == "KIND":
            from atropos_tui.cli.manage.inspect import event_kinds

            offered |= dict.fromkeys(event_kinds(), "")
        elif kind == "KEY=VALUE":
            offered |= _keys()
        elif kind == "PROFILE":
            offered |= _profiles() | dict.fromkeys(FilesCompleter("toml")(prefix), "")
        elif kind == "FILE":
            offered |= dict.fromkeys(FilesCompleter()(prefix), "")
        elif kind in ("RUN", "DIR"):
            # `up --run-dir` names a new directory; everywhere else DIR is an existing run.
            known = _runs() if kind == "RUN" or parser.get_default("handler") != "up:up" else {}
            offered |= known | dict.fromkeys(DirectoriesCompleter()(prefix), "")
    return {word: text for word, text in offered.items() if word not in taken}


def _components(options: argparse.Namespace) -> dict[str, str]:
    from atropos_tui.cli.manage import runs

    try:
        entry, _ = runs.with_components(
            getattr(options, "words", None) or [], getattr(options, "run_dir", None)
        )
        names = runs.component_names(entry)
    except UserError:
        return {}
    return {name: role for name, role in names.items() if PLAIN.fullmatch(name)}


def _keys() -> dict[str, str]:
    """Keys of a profile with their types, from the shipped JSON Schema: no pydantic."""
    from atropos_tui.profile.load import shipped_profiles

    beside = next(iter(shipped_profiles().values()))
    schema = json.loads(beside.with_name("profile.schema.json").read_bytes())
    found: dict[str, str] = {}
    for name, part in schema["properties"].items():
        table = _table(part, schema["$defs"])
        found |= {f"{name}.{key}=": str(inner.get("type", "")) for key, inner in table.items()} or {
            f"{name}=": ""
        }
    return found


def _table(part: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Keys of a table, or of the table in a list of tables."""
    for form in [part, *part.get("anyOf", []), *part.get("allOf", [])]:
        if "$ref" in form:
            return dict(definitions[form["$ref"].rpartition("/")[2]].get("properties", {}))
    return {}


def _profiles() -> dict[str, str]:
    from atropos_tui.profile.load import shipped_profiles

    return dict.fromkeys(shipped_profiles(), "shipped profile")


def _runs() -> dict[str, str]:
    from atropos_tui.cli.manage import runs

    return {
        run_id: "live" if entry.is_live else "ended"
        for entry in runs.all_runs()
        if isinstance(run_id := entry.info.get("run_id"), str) and PLAIN.fullmatch(run_id)
    }
