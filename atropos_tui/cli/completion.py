"""`completion SHELL`: a script that asks `atropos-tui __complete WORDS...` at every TAB.

    source <(atropos-tui completion bash)        # in ~/.bashrc; the same with zsh in ~/.zshrc
    atropos-tui completion fish | source         # in ~/.config/fish/config.fish

The answer comes from the parser itself, so a new command or flag needs nothing here: one candidate a line, its
description after a tab, folders with a slash at their end. Values are completed by the metavar of their argument.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from atropos_tui.errors import Exit, UserError

BASH = r"""
_atropos_tui() {
    mapfile -t COMPREPLY < <("${COMP_WORDS[0]/#\~/$HOME}" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    COMPREPLY=("${COMPREPLY[@]%%$'\t'*}")
    if [[ "${COMPREPLY[*]}" == */* ]]; then
        compopt -o filenames 2>/dev/null
        COMPREPLY=("${COMPREPLY[@]%/}")
    fi
}
complete -F _atropos_tui atropos-tui
"""

ZSH = r"""
#compdef atropos-tui
_atropos_tui() {
    local line word
    local -a lines plain folders
    lines=("${(@f)$("${${(Q)words[1]}/#\~/$HOME}" __complete "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
    for line in $lines; do
        word=${line%%$'\t'*}
        if [[ $word == */ ]]; then
            folders+=("$word")
        elif [[ $line == *$'\t'* ]]; then
            plain+=("${word//:/\\:}:${line#*$'\t'}")
        else
            plain+=("${word//:/\\:}")
        fi
    done
    (( $#folders )) && compadd -f -S '' -a folders
    (( $#plain )) && _describe 'atropos-tui' plain
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _atropos_tui "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
    compdef _atropos_tui atropos-tui
fi
"""

FISH = r"""
function __atropos_tui_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    $words[1] __complete $words[2..] "$current" 2>/dev/null
end
complete -c atropos-tui -f -a '(__atropos_tui_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
PLAIN = re.compile(r"[\w.:@+-]+")
"""Names from files are offered only if no shell could take them for more than a word."""

Candidate = tuple[str, str]


def completion(options: argparse.Namespace) -> int:
    """Print the script."""
    print(SCRIPTS[options.shell].strip())
    return Exit.DONE


def answer(words: Sequence[str]) -> int:
    """Print what may stand at the last of `words`; nothing, and no error, where nothing is known."""
    from atropos_tui.cli.parser import build_parser

    for word, description in candidates(build_parser(), words):
        print(f"{word}\t{description}" if description else word)
    return Exit.DONE


def candidates(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[Candidate]:
    """Words that may stand at the last of `words`, with descriptions; the program's name is not among `words`."""
    *before, current = _joined(words) or [""]
    line = _Line(parser)
    for word in before:
        line.take(word)
    flag, separator, value = current.partition("=")
    option = line.option(flag) if separator else None
    if option is not None:
        found: Iterator[Candidate] = ((f"{flag}={word}", text) for word, text in line.values(option, value))
    elif line.waiting is not None:
        found = line.values(line.waiting, current)
    else:
        found = line.offered(current)
    yield from (pair for pair in found if pair[0].startswith(current))


def _joined(words: Sequence[str]) -> list[str]:
    """bash gives `--flag=value` as three words: the flag and its value; and `KEY=VALUE` as one again."""
    result: list[str] = []
    for word in words:
        if word == "=" and result:
            result.append("" if result[-1].startswith("--") else result.pop() + "=")
        elif len(result) > 1 and result[-1] == "" and result[-2].startswith("--"):
            result[-1] = word
        elif result and result[-1].endswith("=") and not result[-1].startswith("-"):
            result[-1] += word
        else:
            result.append(word)
    return result


class _Line:
    """How far the parser has come before the word at the cursor."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser
        self.waiting: argparse.Action | None = None
        """The option whose value comes next."""
        self.command = ""
        self.given: list[str] = []
        """Positional words, the command left out."""
        self.flags: set[str] = set()
        self.run_dir: Path | None = None
        self._literal = False

    def take(self, word: str) -> None:
        """One complete word."""
        if self.waiting is not None:
            self._note_run(self.waiting, word)
            self.waiting = None
        elif word == "--":
            self._literal = True
        elif word.startswith("-") and not self._literal:
            flag, separator, value = word.partition("=")
            self.flags.add(flag)
            action = self.option(flag)
            if action is not None and separator:
                self._note_run(action, value)
            elif action is not None and action.nargs != 0:
                self.waiting = action
        elif (commands := self._commands()) is not None:
            self.command = word
            self.parser = commands.choices.get(word) or argparse.ArgumentParser(add_help=False)
        else:
            self.given.append(word)

    def _note_run(self, action: argparse.Action, word: str) -> None:
        if action.dest == "run_dir":
            self.run_dir = Path(word)

    def option(self, flag: str) -> argparse.Action | None:
        return self.parser._option_string_actions.get(flag)

    def _commands(self) -> argparse._SubParsersAction[argparse.ArgumentParser] | None:
        actions = (action for action in self.parser._actions if isinstance(action, argparse._SubParsersAction))
        return next(actions, None)

    def offered(self, current: str) -> Iterator[Candidate]:
        """Commands, flags, or values of the next positional argument."""
        commands = self._commands()
        if current.startswith("-") and not self._literal:
            yield from self._offered_flags()
        elif commands is not None:
            yield from ((choice.dest, choice.help or "") for choice in commands._choices_actions)
        elif (action := self._positional()) is not None:
            yield from (pair for pair in self.values(action, current) if pair[0] not in self.given)

    def _offered_flags(self) -> Iterator[Candidate]:
        for action in self.parser._actions:
            repeats = isinstance(action, argparse._AppendAction)
            if repeats or not self.flags.intersection(action.option_strings):
                yield from ((flag, action.help or "") for flag in action.option_strings)

    def _positional(self) -> argparse.Action | None:
        left = len(self.given)
        for action in self.parser._actions:
            if not action.option_strings and not isinstance(action, argparse._SubParsersAction):
                if left == 0 or action.nargs in ("*", "+"):
                    return action
                left -= 1
        return None

    def values(self, action: argparse.Action, current: str) -> Iterator[Candidate]:
        """What `action` takes: its choices, the words of its metavar, or what the metavar stands for."""
        if action.choices is not None:
            yield from ((str(choice), "") for choice in action.choices)
            return
        for kind in str(action.metavar or "").split("|"):
            if kind.islower():
                yield kind, ""
            elif kind == "COMPONENT":
                yield from _components(self.run_dir)
            elif kind == "PROFILE":
                yield from _profiles()
                yield from _paths(current, ".toml")
            elif kind == "FILE":
                yield from _paths(current, "")
            elif kind in ("RUN", "DIR"):
                if self.command != "up" or kind == "RUN":
                    yield from _runs()
                yield from _paths(current, None)


def _components(run_dir: Path | None) -> Iterator[Candidate]:
    from atropos_tui.cli import runs

    try:
        plan = json.loads(runs.pick(run_dir).dir.plan_json.read_bytes())
        rows = [(part["name"], part.get("role", "")) for part in plan["components"]]
    except (UserError, OSError, ValueError, KeyError, TypeError):
        return
    yield from ((name, str(role)) for name, role in rows if isinstance(name, str) and PLAIN.fullmatch(name))


def _profiles() -> Iterator[Candidate]:
    from atropos_tui.stack.load import shipped_profiles

    yield from ((name, "shipped profile") for name in shipped_profiles())


def _runs() -> Iterator[Candidate]:
    from atropos_tui.cli import runs

    for entry in runs.all_runs():
        run_id = entry.info.get("run_id")
        if isinstance(run_id, str) and PLAIN.fullmatch(run_id):
            yield run_id, "live" if entry.is_live else "ended"


def _paths(current: str, ending: str | None) -> Iterator[Candidate]:
    """Folders, and files with this ending (None: no files), as a continuation of `current`."""
    folder, _, prefix = current.rpartition("/")
    start = f"{folder}/" if "/" in current else ""
    try:
        entries = sorted(os.scandir(Path(start).expanduser() if start else "."), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        hidden = entry.name.startswith(".") and not prefix.startswith(".")
        if hidden or not entry.name.startswith(prefix) or not entry.name.isprintable():
            continue
        if entry.is_dir():
            yield f"{start}{entry.name}/", ""
        elif ending is not None and entry.name.endswith(ending):
            yield f"{start}{entry.name}", ""
