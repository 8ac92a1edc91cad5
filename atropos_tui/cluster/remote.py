"""Runs on other machines over ssh: `attach me@box`, `ps me@box:RUN`.

The command runs there, with the atropos-tui installed there; only its output arrives here. Ports,
keys and jump hosts come from ~/.ssh/config.
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
    "attach",
    "ps",
    "why",
    "logs",
    "events",
    "bench",
    "wait",
    "start",
    "stop",
    "restart",
    "kill",
    "down",
)
_PLACE = re.compile(r"([A-Za-z0-9_][\w.+-]*@[A-Za-z0-9][\w.-]*)(?::(.*))?")
_RUN_DIR = "--run-dir="
_WITH_TEXT = ("--grep",)
"""Options whose value may look like a host."""
CHUNK = 64 * 1024
"""Bytes of one read, and of the greeting that is kept."""
MARK = "\x1eatropos-tui"
"""Start of the line after which the remote command's output follows."""
_SAFE = frozenset(string.ascii_letters + string.digits + " _@+=:,./-")
"""Characters that every shell reads literally between single quotes, and sh between double
quotes."""
_NO_CONNECTION, _NOT_THERE = 255, 127
"""Exit codes of ssh for a failed connection, and of a shell for a missing program."""


def place_in(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Find `user@host[:RUN]` among the words of a command line.

    Returns:
        The host and the words for its own program; None if the command is for this machine.
    """
    if not words or words[0] not in COMMANDS:
        return None
    for at, word in enumerate(words[1:], 1):
        if words[at - 1] in _WITH_TEXT:
            continue
        place = word.removeprefix(_RUN_DIR)
        # A file of that name wins: `a@b` may be a run directory of this machine.
        if (found := _PLACE.fullmatch(place)) and not Path(place).exists():
            before = list(words[:at])
            if found[2]:
                before.append(word.removesuffix(place) + found[2])
            elif before[-1] == "--run-dir":  # without a value it would take the next word
                before.pop()
            return found[1], [*before, *words[at + 1 :]]
    return None


def over_ssh(host: str, words: Sequence[str]) -> int:
    """Run `atropos-tui WORDS` on `host`; return its exit code.

    Raises:
        UserError: ssh cannot connect, the login shell does not run the command, or the program is
            missing.
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    token = secrets.token_hex(8)
    command = ["ssh", *(["-t"] if terminal else []), "--", host, _far_command(words, token)]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        problem = Problem(f"ssh cannot be run: {error.strerror}", "install an ssh client")
        raise UserError(f"cannot reach {host} over ssh", [problem]) from None
    assert process.stdout is not None and process.stderr is not None
    last: deque[str] = deque(maxlen=20)
    # In a thread of its own: an unread pipe of stderr would fill up and block ssh.
    reader = threading.Thread(target=_pass_on, args=(process.stderr, last), daemon=True)
    reader.start()
    answer = Answer(token, shows_greeting=terminal)
    try:
        while data := os.read(process.stdout.fileno(), CHUNK):
            sys.stdout.buffer.write(answer.take(data))
            sys.stdout.buffer.flush()
        code = process.wait()
    except BaseException:  # such as ^C, or a reader of our output that has left
        process.terminate()
        raise
    reader.join(
        1.0
    )  # the last lines explain a failure; a background process may keep the pipe open
    if code == _NO_CONNECTION:
        raise UserError(f"cannot reach {host} over ssh", [_why(host, last)], Exit.NO_RUN)
    if not answer.begun:
        last.extend(answer.greeting())
        raise UserError(f"{host} runs no command", [_bad_shell(host, code, last)], Exit.NO_RUN)
    if code == _NOT_THERE:
        fix = (
            f"install it there, on the PATH of a login shell or as {sys.executable}; ssh {host} "
            f"atropos-tui --version"
        )
        raise UserError(
            f"there is no atropos-tui on {host}",
            [Problem("it is not installed there", fix)],
            Exit.NO_RUN,
        )
    return code


class Answer:
    """Output over ssh: a greeting, a line that ends with our mark, then the command's output.

    Without the mark the login shell did not run our command, and its exit code means nothing.
    """

    def __init__(self, token: str, *, shows_greeting: bool) -> None:
        """`shows_greeting`: the login shell may ask a question on a terminal first."""
        self._mark = f"{MARK}-{token}".encode()
        self._shows = shows_greeting
        self._held = b""
        self.begun = False

    def take(self, data: bytes) -> bytes:
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
        # Show everything up to the control character that may start the mark; the rest waits for
        # more bytes.
        shown, begin, rest = self._held.partition(MARK[0].encode())
        self._held = begin + rest
        return shown

    def greeting(self) -> list[str]:
        """Last line that arrived in place of the mark."""
        from atropos_tui.diagnoses.model import plain

        return [plain(line) for line in self._held.splitlines() if line.strip()][-1:]


def _far_command(words: Sequence[str], token: str) -> str:
    """`exec sh -c '...'` without a character that some login shell reads differently from sh."""
    posix = "*/sh|*/bash|*/dash|*/ash|*/zsh|*/ksh|*/mksh"
    program = shlex.quote(_program(words, token))
    # The login shell sets its own PATH. The PATH of sshd's shell is appended: fish and tcsh extend
    # only that one.
    text = (
        f'case "$SHELL" in {posix}) s=$SHELL ;; *) s=sh ;; esac; exec "$s" -lc {program} sh "$PATH"'
    )
    # Octal escapes for all other characters, decoded by printf %b on the remote machine.
    coded = "".join(
        char if char in _SAFE else "".join(f"\\0{byte:03o}" for byte in os.fsencode(char))
        for char in text
    )
    return f'exec sh -c \'eval "$(printf %b "{coded}")"\''


def _program(words: Sequence[str], token: str) -> str:
    """Script for sh there: the program on its PATH, or the interpreter path of this machine."""
    said = shlex.join(words)
    here = shlex.quote(sys.executable)
    mark = rf"printf '\036%s\n' {MARK[1:]}-{token}"
    return (
        f"PATH=$PATH:$1; {mark}; "
        f"if command -v atropos-tui >/dev/null 2>&1; then exec atropos-tui {said}; "
        f"elif [ -x {here} ]; then exec {here} -P -m atropos_tui {said}; else exit {_NOT_THERE}; fi"
    )


def _pass_on(stream: IO[bytes], last: deque[str]) -> None:
    from atropos_tui.diagnoses.model import (
        plain,
    )  # imported late: completion imports this file at every TAB

    for line in stream:
        last.append(plain(line))
        sys.stderr.buffer.write(line)
        sys.stderr.flush()


def _bad_shell(host: str, code: int, lines: Sequence[str]) -> Problem:
    said = f": {lines[-1]}" if lines else " and printed nothing"
    fix = (
        f"make `ssh {host} echo works` print `works`: in its start-up files (.bashrc, "
        f"config.fish), put `[ -t 0 ] &&` "
        "before every line that starts another shell, asks a question or reads input"
    )
    return Problem(f"its login shell ended with code {code}{said}", fix)


def _why(host: str, lines: Sequence[str]) -> Problem:
    from atropos_tui.cluster.node_connection import launcher_said

    if known := launcher_said(lines, host):
        title, fix, _ = known
        return Problem(title, fix)
    return Problem(
        lines[-1] if lines else "ssh printed nothing", f"ssh -v {host} true shows where it stops"
    )
