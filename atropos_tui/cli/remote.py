"""A run on another machine: `attach me@box`, `ps me@box:RUN`, over ssh, by the program that is installed there.

The command runs where the run lies, so only its output comes here. The words after the host are handed on as they are;
ports, keys and jumps are what ~/.ssh/config says.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import string
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
CHUNK = 64 * 1024
"""Limit of one read, and of the greeting that is kept, in bytes."""
MARK = "\x1eatropos-tui"
"""Begins the line after which the output of the far command follows."""
_SAFE = frozenset(string.ascii_letters + string.digits + " _@+=:,./-")
"""Characters that every shell takes as they are between single quotes, and sh between double quotes."""
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
        UserError: ssh does not get there, the login shell does not run the command, or the program is not there.
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    token = secrets.token_hex(8)
    command = ["ssh", *(["-t"] if terminal else []), "--", host, _far_command(words, token)]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        problem = Problem(f"ssh cannot be run: {error.strerror}", "install an ssh client")
        raise UserError(f"{host} is not reached", [problem]) from None
    assert process.stdout is not None and process.stderr is not None
    last: deque[str] = deque(maxlen=20)
    reader = threading.Thread(target=_pass_on, args=(process.stderr, last), daemon=True)
    reader.start()
    answer = Answer(token, shows_greeting=terminal)
    try:
        while data := os.read(process.stdout.fileno(), CHUNK):
            sys.stdout.buffer.write(answer.take(data))
            sys.stdout.buffer.flush()
        code = process.wait()
    except BaseException:  # such as a reader of our output that has left
        process.terminate()
        raise
    reader.join(1.0)
    if code == _NO_CONNECTION:
        raise UserError(f"{host} is not reached", [_why(host, last)], Exit.NO_RUN)
    if not answer.begun:
        last.extend(answer.greeting())
        raise UserError(f"no command runs on {host}", [_bad_shell(host, code, last)], Exit.NO_RUN)
    if code == _NOT_THERE:
        fix = f"install it there, on the PATH of a login shell or as {sys.executable}; ssh {host} atropos-tui --version"
        raise UserError(f"there is no atropos-tui on {host}", [Problem("no such program there", fix)], Exit.NO_RUN)
    return code


class Answer:
    """The answer over ssh: a greeting of the login shell, a line that ends with our mark, then the output.

    Without the mark the login shell has not run our command, and its exit code means nothing: 0 least of all.
    """

    def __init__(self, token: str, *, shows_greeting: bool) -> None:
        """`shows_greeting`: on a terminal the login shell may ask something before it goes on."""
        self._mark = f"{MARK}-{token}".encode()
        self._shows = shows_greeting
        self._held = b""
        self.begun = False

    def take(self, data: bytes) -> bytes:
        """The part of the output that is to be printed now that `data` has arrived."""
        if self.begun:
            return data
        self._held += data
        mark = self._held.find(self._mark)
        end = self._held.find(b"\n", mark) if mark >= 0 else -1
        if end >= 0:
            self.begun = True
            return (self._held[:mark] if self._shows else b"") + self._held[end + 1 :]
        if not self._shows:
            self._held = self._held[-CHUNK:]
            return b""
        shown, begin, rest = self._held.partition(MARK[0].encode())
        self._held = begin + rest
        return shown

    def greeting(self) -> list[str]:
        """The last line that came in place of the mark."""
        from atropos_tui.diagnoses.model import plain

        return [plain(line) for line in self._held.splitlines() if line.strip()][-1:]


def _far_command(words: Sequence[str], token: str) -> str:
    """The text for the login shell of the far end, whichever that is: `exec sh -c '...'` and no character inside that a
    shell reads in another way than sh."""
    posix = "*/sh|*/bash|*/dash|*/ash|*/zsh|*/ksh|*/mksh"
    program = shlex.quote(_program(words, token))
    # A login shell sets its own PATH; that of sshd's shell is kept behind it, for only there fish or tcsh added to it.
    text = f'case "$SHELL" in {posix}) s=$SHELL ;; *) s=sh ;; esac; exec "$s" -lc {program} sh "$PATH"'
    coded = "".join(char if char in _SAFE else "".join(f"\\0{byte:03o}" for byte in os.fsencode(char)) for char in text)
    return f'exec sh -c \'eval "$(printf %b "{coded}")"\''


def _program(words: Sequence[str], token: str) -> str:
    """The text that sh runs at the far end: the program of its PATH, else the interpreter of here."""
    said = shlex.join(words)
    here = shlex.quote(sys.executable)
    mark = rf"printf '\036%s\n' {MARK[1:]}-{token}"
    return (
        f"PATH=$PATH:$1; {mark}; "
        f"if command -v atropos-tui >/dev/null 2>&1; then exec atropos-tui {said}; "
        f"elif [ -x {here} ]; then exec {here} -P -m atropos_tui {said}; else exit {_NOT_THERE}; fi"
    )


def _pass_on(stream: IO[bytes], last: deque[str]) -> None:
    from atropos_tui.diagnoses.model import plain  # every command imports this file, a shell's completion too

    for line in stream:
        last.append(plain(line))
        sys.stderr.buffer.write(line)
        sys.stderr.flush()


def _bad_shell(host: str, code: int, lines: Sequence[str]) -> Problem:
    """The problem of a login shell that ended without running our command."""
    said = f": {lines[-1]}" if lines else " and printed nothing"
    fix = (
        f"ssh {host} echo works has to print `works`. In its start-up files (.bashrc, config.fish) guard what starts "
        "another shell, asks a question or reads input, so that only terminals get it: [ -t 0 ] && ..."
    )
    return Problem(f"its login shell ended with code {code}{said}", fix)


def _why(host: str, lines: Sequence[str]) -> Problem:
    from atropos_tui.cli.doctor.node_line import launcher_said

    if known := launcher_said(lines, host):
        title, fix, _ = known
        return Problem(title, fix)
    return Problem(lines[-1] if lines else "ssh said nothing", f"ssh -v {host} true shows where it stops")
