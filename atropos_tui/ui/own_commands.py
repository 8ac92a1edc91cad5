"""Own commands of the user on the selection: `[ui.command.NAME]` of the key file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from string import Formatter
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from textual.app import App, SuspendNotSupported

from atropos_tui.monitor.format import one_line
from atropos_tui.profile.errors import did_you_mean
from atropos_tui.streams import harmless

PLACEHOLDERS = {
    "run_dir": "Run directory",
    "component": "Component under the cursor",
    "pid": "Its process id",
    "log": "File with its log",
    "step": "Step under the cursor, otherwise the newest",
}
MOST_BYTES = 64 * 1024  # of the output of a command in the background
MOST_LINES = 8  # of that output in the message


class OwnCommand(BaseModel):
    """A key, and the program it starts."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    key: str = Field(min_length=1)
    description: str = Field(min_length=1, max_length=80)
    argv: list[str] = Field(min_length=1)
    """Program and arguments. No shell reads them."""
    background: bool = False
    """Show the result as a message, instead of giving the terminal to the program."""
    confirm: bool = False
    pause: bool = False
    """Wait for Enter before the screen returns."""
    name: str = ""

    @field_validator("argv")
    @classmethod
    def _known(cls, argv: list[str]) -> list[str]:
        if not argv[0]:
            raise ValueError("the program's name is empty")
        for word in argv:
            try:
                parts = list(Formatter().parse(word))
            except ValueError:
                raise ValueError(f"{word!r}: write {{{{ and }}}} for a brace") from None
            for _, name, form, conversion in parts:
                if name is not None and (name not in PLACEHOLDERS or form or conversion):
                    meant = did_you_mean(name, PLACEHOLDERS)
                    fix = meant or "write {{ and }} for a brace; known: " + " ".join(PLACEHOLDERS)
                    raise ValueError(f"{{{name}}} is not a placeholder; {fix.strip()}")
        return argv


def command_of(name: str, entry: Any) -> tuple[OwnCommand | None, list[str]]:
    """Return the command of a section, or its problems, each after the key it is about."""
    if not isinstance(entry, dict):
        return None, ["not a section; fix: write [ui.command.NAME], with key, description, argv"]
    if not re.fullmatch(r"[\w-]+", name):
        return None, ["name: only letters, digits, _ and - may stand in it"]
    if "name" in entry:
        return None, ["name: unknown key; fix: the section's title is the name"]
    try:
        return OwnCommand.model_validate(entry | {"name": name}), []
    except ValidationError as error:
        found = error.errors(include_url=False)
        return None, [_problem(item["loc"], item["type"], item["msg"]) for item in found]


def _problem(place: tuple[int | str, ...], kind: str, message: str) -> str:
    key = ".".join(map(str, place))
    known = set(OwnCommand.model_fields) - {"name"}
    if kind == "list_type":
        return f'{key}: not a list; fix: write one word each, such as ["less", "{{log}}"]'
    if kind == "extra_forbidden":
        fix = did_you_mean(key, known) or "known: " + " ".join(sorted(known))
        return f"{key}: unknown key; {fix.strip()}"
    return f"{key}: {one_line(message.removeprefix('Value error, '))}"


def filled(command: OwnCommand, values: Mapping[str, str | None]) -> list[str]:
    """Return the arguments with the selection in place of the placeholders.

    Raises:
        ValueError: the selection has no such value, or one that reads as an option.
    """
    words = []
    for word in command.argv:
        text = ""
        for literal, name, _, _ in Formatter().parse(word):
            value = values.get(name) if name is not None else ""
            if value is None:
                raise ValueError(f"the selection has no {name}")
            # A recording may come from someone else: its names must not become options.
            if value.startswith("-") and not (text or literal):
                raise ValueError(f"{name} is {one_line(value)!r}, which would be an option")
            text += literal + value
        words.append(text)
    return words


def run_in_terminal(app: App[Any], command: OwnCommand, argv: list[str]) -> str:
    """Give the terminal to the program until it ends; return an error, empty on success."""
    # Ctrl+C in the program also reaches this process. A handler, unlike SIG_IGN, is not inherited.
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        with app.suspend():
            status = subprocess.run(argv, check=False).returncode
            if status or command.pause:
                # A program that fails at once would leave nothing to read.
                print(f"\n{command.name}: exit status {status}. Enter returns to the screen.")
                with contextlib.suppress(EOFError, KeyboardInterrupt):
                    sys.stdin.readline()
    except SuspendNotSupported:
        return "this terminal cannot be suspended; fix: background = true"
    except OSError as error:
        return f"{argv[0]} cannot be started: {error.strerror}"
    finally:
        signal.signal(signal.SIGINT, before)
    return ""


async def run_in_background(argv: list[str]) -> tuple[int, str]:
    """Return exit status and the end of the output. The program ends with the screen.

    Raises:
        OSError: the program cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    output = b""
    try:
        while process.stdout and (part := await process.stdout.read(MOST_BYTES)):
            output = (output + part)[-MOST_BYTES:]
        status = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGTERM)
    lines = [
        harmless(line) for line in output.decode(errors="replace").splitlines() if line.strip()
    ]
    return status, "\n".join(lines[-MOST_LINES:])


def line_of(argv: list[str]) -> str:
    """Return the command as one line to read."""
    return one_line(shlex.join(argv))
