"""`user@host[:RUN]`: a command runs on the run's machine over a private sshd; and its errors."""

from __future__ import annotations

import getpass
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atropos_tui.cli.main import run
from atropos_tui.cluster import remote
from atropos_tui.cluster.remote import place_in
from tests.cluster.ssh_nodes import SshNodes
from tests.support.run_maker import make_run

ME = getpass.getuser()


@pytest.fixture
def ssh(hosts: SshNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SshNodes:
    """`ssh` of the PATH knows the private hosts, as ~/.ssh/config would make it."""
    wrapper = tmp_path / "bin/ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f"#!/bin/sh\nexec /usr/bin/ssh -F {hosts.config} -o BatchMode=yes -o "
        f'ConnectTimeout=2 "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    return hosts


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("attach me@box", ("me@box", "attach")),
        ("attach me@box:demo-1", ("me@box", "attach demo-1")),
        ("ps --json me@10.0.0.2:/scratch/runs/x", ("me@10.0.0.2", "ps --json /scratch/runs/x")),
        ("logs me@box:demo trainer -n 5", ("me@box", "logs demo trainer -n 5")),
        ("ps --run-dir me@box:demo", ("me@box", "ps --run-dir demo")),
        ("ps --run-dir me@box --json", ("me@box", "ps --json")),
        ("ps --run-dir=me@box:demo", ("me@box", "ps --run-dir=demo")),
        ("ps --run-dir=me@box --json", ("me@box", "ps --json")),
        ("attach demo", None),
        ("attach -oProxyCommand=x@y", None),
        ("attach ./me@box", None),
        ("report me@box", None),
        ("up me@box", None),
    ],
)
def test_which_words_name_another_machine(words: str, found: tuple[str, str] | None) -> None:
    expected = (found[0], found[1].split()) if found else None
    assert place_in(words.split()) == expected


def test_a_folder_of_that_name_here_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me@box").mkdir()
    assert place_in(["ps", "me@box"]) is None
    assert place_in(["logs", "trainer", "--grep", "me@box"]) is None, "what is looked for"


STRICT = """#!{python} -I
# Reads `-c TEXT` as {kind} does where it differs from sh: words, and single quotes. All else is
# refused.
import os, sys
text, words, word, quoted = sys.argv[2], [], None, False
for at, char in enumerate(text):
    after = text[at + 1 : at + 2]
    if {history} and char == "!":
        sys.exit(print("event not found", file=sys.stderr) or 1)
    if {escapes} and quoted and char == chr(92) and after in ("'", chr(92)):
        sys.exit(print("an escape in single quotes", file=sys.stderr) or 0)
    if char == "'":
        quoted, word = not quoted, word or ""
    elif quoted or char.isalnum() or char in "_-./":
        word = (word or "") + char
    elif char == " ":
        words, word = words + ([word] if word is not None else []), None
    else:
        print("a character that this shell reads in its own way:", char, file=sys.stderr)
        sys.exit(0)
words += [word] if word is not None else []
if words[0] == "exec":
    words = words[1:]
os.execvp(words[0], words)
"""
"""A login shell that takes what every shell takes, and ends with 0 where it does not understand, as
fish did."""


def strict_shell(kind: str, **differs: bool) -> str:
    return STRICT.format(kind=kind, python=sys.executable, **differs)


SHELLS = {
    "like-fish": strict_shell("fish", history=False, escapes=True),
    "like-tcsh": strict_shell("tcsh", history=True, escapes=False),
    "greets": '#!/bin/sh\necho "Welcome to box"; printf "no newline here"; exec sh "$@"\n',
}
REAL_SHELLS = ("sh", "bash", "dash", "zsh", "fish", "tcsh")


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`ssh` of the PATH does what sshd does: LOGIN -c COMMAND, with that shell in SHELL."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(
        '#!/bin/sh\nfor text; do :; done\nSHELL=$LOGIN exec "$LOGIN" -c "$text"\n'
    )
    (folder / "atropos-tui").write_text(
        f'#!/bin/sh\nexec {sys.executable} -P -m atropos_tui "$@"\n'
    )
    for name, text in SHELLS.items():
        (folder / name).write_text(text)
    for file in folder.iterdir():
        file.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize("shell", [*SHELLS, *REAL_SHELLS])
def test_a_command_there_works_with_any_login_shell(
    shell: str,
    box: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """fish understood nothing, and 0 was given back: `down me@box && poweroff` went on."""
    if shell not in SHELLS and shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    monkeypatch.setenv("LOGIN", str(box / shell) if shell in SHELLS else shell)
    (tmp_path / "home/.profile").write_text("echo hello from .profile\n")
    there = make_run(tmp_path / "it's a \\run! of $HOME").root
    assert run(["bench", "--json", f"me@box:{there}"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["runs"], "a greeting is no part of the answer"
    assert run(["ps", "me@box:no-such-run"]) == 5
    assert "no run in no-such-run" in capfd.readouterr().err


@pytest.mark.parametrize("code", [0, 1, 127])
def test_a_login_shell_that_runs_nothing_is_no_success(
    code: int, box: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An `exec fish` in .bashrc reads its standard input, finds nothing and ends with 0."""
    (box / "deaf").write_text(f"#!/bin/sh\necho Welcome to fish\nexit {code}\n")
    (box / "deaf").chmod(0o755)
    monkeypatch.setenv("LOGIN", str(box / "deaf"))
    assert run(["down", "me@box"]) == 5
    said = capfd.readouterr()
    assert (
        f"its login shell ended with code {code}: Welcome to fish" in said.err
        and ".bashrc" in said.err
    )


def test_what_a_shell_asks_on_a_terminal_is_seen_and_the_mark_is_not() -> None:
    answer = remote.Answer("ff", shows_greeting=True)
    shown = [
        answer.take(data)
        for data in (b"Password: ", b"ok\r\n\x1eatropos-", b"tui-ff\r", b"\nab", b"c")
    ]
    assert b"".join(shown) == b"Password: ok\r\nabc" and shown[0] == b"Password: "


def test_a_command_there(ssh: SshNodes, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    there = make_run(tmp_path / "a run").root
    assert run(["bench", "--json", f"{ME}@n2:{there}"]) == 0
    assert '"steps": 37' in capfd.readouterr().out
    assert run(["ps", f"{ME}@n2:no-such-run"]) == 5
    assert "no run in no-such-run" in capfd.readouterr().err


def test_the_screen_there(ssh: SshNodes, tmp_path: Path) -> None:
    """`attach` on a terminal of ours is the screen of there, with its keys."""
    there = make_run(tmp_path / "far").root
    (there / "result.json").write_text('{"exit_code": 0, "reason": "trainer completed"}')
    parent, child = pty.openpty()
    command = [sys.executable, "-P", "-m", "atropos_tui", "attach", f"{ME}@n2:{there}"]
    screen = subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, env=os.environ | {"TERM": "xterm"}
    )
    os.close(child)
    seen, give_up = b"", time.monotonic() + 60
    try:
        while b"37/60" not in seen:
            assert time.monotonic() < give_up and screen.poll() is None, seen[-2000:]
            if select.select([parent], [], [], 0.2)[0]:
                seen += os.read(parent, 65536)
        os.write(parent, b"q")
        while screen.poll() is None:
            assert time.monotonic() < give_up, seen[-2000:]
            if select.select([parent], [], [], 0.1)[0]:
                try:
                    seen += os.read(parent, 65536)
                except OSError:
                    break
        assert screen.wait(10) == 0
    finally:
        screen.kill()
        screen.wait()
        os.close(parent)


def test_what_ssh_cannot_do_is_said(
    ssh: SshNodes,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    ssh.know("n3", key="host_n1")
    assert run(["attach", f"{ME}@n3"]) == 5
    said = capfd.readouterr().err
    ssh.know("n3")
    assert f"cannot reach {ME}@n3 over ssh" in said and f"ssh-keygen -R {ME}@n3" in said
    assert run(["ps", f"{ME}@no-such-host.invalid"]) == 5
    assert "ssh does not reach the machine" in capfd.readouterr().err
    assert run(["ps", "nobody-here@n2"]) == 5
    assert "ssh cannot log in" in capfd.readouterr().err
    monkeypatch.setattr(remote.sys, "executable", "/nowhere/python")
    monkeypatch.setenv("SHELL", "/bin/sh")
    assert run(["ps", f"{ME}@n2"]) == 5
    assert f"there is no atropos-tui on {ME}@n2" in capfd.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["ps", f"{ME}@n2"]) == 2
    assert "install an ssh client" in capfd.readouterr().err
