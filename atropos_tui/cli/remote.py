"""A run on another machine: `attach me@box`, `ps me@box:RUN`, over ssh, by the program that is installed there.

The run is asked where it lies, so nothing of it comes here but what its own commands show. The words after the host are
handed on as they are; ports, keys and jumps are what ~/.ssh/config says.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from atropos_tui.errors import Exit, Problem, UserError

COMMANDS = (
    "attach", "ps", "why", "logs", "events", "bench", "wait", "start", "stop", "restart", "kill", "down",
)  # fmt: skip
"""Those that show a run, or act on it through its supervisor; what writes a file writes it where the run is."""
_PLACE = re.compile(r"([A-Za-z0-9_][\w.+-]*@[A-Za-z0-9][\w.-]*)(?::(.*))?")
_RUN_DIR = "--run-dir="
_WITH_TEXT = ("--grep",)
"""Options whose value may look like a place."""
_NO_CONNECTION, _NOT_THERE = 255, 127
"""Exit codes of ssh, and of a shell that finds no such program."""


def place_in(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The host of `user@host[:RUN]` among the words of a command line, and the words that are left for its own program;
    None where all of it is meant for this machine."""
    if not words or words[0] not in COMMANDS:
        return None
    for at, word in enumerate(words[1:], 1):
        if words[at - 1] in _WITH_TEXT:
            continue
        place = word.removeprefix(_RUN_DIR)
        if (found := _PLACE.fullmatch(place)) and not Path(place).exists():
            before = list(words[:at])
            if found[2]:
                before.append(word.removesuffix(place) + found[2])
            elif before[-1] == "--run-dir":  # which would take the next word
                before.pop()
            return found[1], [*before, *words[at + 1 :]]
    return None


def over_ssh(host: str, words: Sequence[str]) -> int:
    """Run `atropos-tui WORDS` there, on a terminal where there is one here, and give back its exit code.

    Raises:
        UserError: ssh does not get there, or the program is not there.
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    command = ["ssh", *(["-t"] if terminal else []), "--", host, _program(words)]
    try:
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
    except OSError as error:
        problem = Problem(f"ssh cannot be run: {error.strerror}", "install an ssh client")
        raise UserError(f"{host} is not reached", [problem]) from None
    assert process.stderr is not None
    last: deque[str] = deque(maxlen=20)
    reader = threading.Thread(target=_pass_on, args=(process.stderr, last), daemon=True)
    reader.start()
    code = process.wait()
    reader.join(1.0)
    if code == _NO_CONNECTION:
        raise UserError(f"{host} is not reached", [_why(host, last)], Exit.NO_RUN)
    if code == _NOT_THERE:
        fix = f"install it there, on the PATH of a login shell or as {sys.executable}; ssh {host} atropos-tui --version"
        raise UserError(f"there is no atropos-tui on {host}", [Problem("no such program there", fix)], Exit.NO_RUN)
    return code


def _program(words: Sequence[str]) -> str:
    """What the shell at the far end runs: the program of a login shell's PATH, else the interpreter of here."""
    said = shlex.join(words)
    here = shlex.quote(sys.executable)
    text = (
        f"if command -v atropos-tui >/dev/null 2>&1; then exec atropos-tui {said}; "
        f"elif [ -x {here} ]; then exec {here} -P -m atropos_tui {said}; else exit {_NOT_THERE}; fi"
    )
    return f'exec "${{SHELL:-sh}}" -lc {shlex.quote(text)}'


def _pass_on(stream: IO[bytes], last: deque[str]) -> None:
    from atropos_tui.diagnoses.model import plain  # every command imports this file, a shell's completion too

    for line in stream:
        last.append(plain(line))
        sys.stderr.buffer.write(line)
        sys.stderr.flush()


def _why(host: str, lines: Sequence[str]) -> Problem:
    from atropos_tui.cli.doctor.node_line import launcher_said

    if known := launcher_said(lines, host):
        title, fix, _ = known
        return Problem(title, fix)
    return Problem(lines[-1] if lines else "ssh said nothing", f"ssh -v {host} true shows where it stops")
