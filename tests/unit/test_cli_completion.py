"""Completion: what is offered where, and the three scripts really driven in their shells."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atropos_tui.cli import main
from atropos_tui.cli.completion import candidates
from atropos_tui.cli.parser import build_parser
from tests.unit.cli_places import own_places  # noqa: F401
from trainer_core.contracts.run_dir import RunDir

BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def place(own_places: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """A folder with a run, profiles and other files."""
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    run = RunDir(tmp_path / "runs" / "p-1")
    run.create()
    run.run_json.write_text(json.dumps({"run_id": "p-1", "name": "p", "mode": "none", "started_at": 5.0}))
    names = ["vllm", "trainer", "$(touch hacked)", "a\tb\nc", 7]
    run.plan_json.write_text(json.dumps({"components": [{"name": name, "role": "other"} for name in names]}))
    (tmp_path / "mine.toml").touch()
    (tmp_path / "my notes.txt").touch()
    (tmp_path / "my profiles").mkdir()
    (tmp_path / "my profiles" / "deep.toml").touch()
    return tmp_path


def offered(*words: str) -> list[str]:
    return [word for word, _ in candidates(build_parser(), words)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["res"], ["restart"]),
        (["--ver"], ["--version"]),
        (["restart", ""], ["vllm", "trainer"]),
        (["restart", "--yes", "v"], ["vllm"]),
        (["restart", "--run-dir", "runs/p-1", "t"], ["trainer"]),
        (["restart", "--run-dir", "nowhere", ""], []),
        (["restart", "vllm", ""], []),
        (["logs", "vllm", ""], ["trainer"]),
        (["restart", "--d"], ["--dry-run"]),
        (["restart", "--dry-run", "--d"], []),
        (["up", "--set", "a=1", "--se"], ["--set"]),
        (["up", "--set", ""], []),
        (["up", "demo", ""], []),
        (["up", "dem"], ["demo", "demo-gpu", "demo-lora"]),
        (["up", "min"], ["mine.toml"]),
        (["up", "my"], ["my profiles/"]),
        (["up", "my profiles/"], ["my profiles/deep.toml"]),
        (["up", "--resume", "p"], ["p-1"]),
        (["up", "--run-dir", "ru"], ["runs/"]),
        (["ps", "--run-dir", "p"], ["p-1"]),
        (["ps", "--run-dir=r"], ["--run-dir=runs/"]),
        (["ps", "--run-dir", "=", "r"], ["runs/"]),
        (["ps", "--run-dir", "=", "runs/p-1", "--js"], ["--json"]),
        (["wait", "--for", "r"], ["ready"]),
        (["wait", "--for", "v"], ["vllm"]),
        (["rep"], ["report", "replay"]),
        (["report", "p"], ["p-1"]),
        (["report", "p-1", "--o"], ["--output"]),
        (["report", "-o", "my n"], ["my notes.txt"]),
        (["replay", "p-1", "--s"], ["--speed"]),
        (["replay", "p"], ["p-1"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["no-such-command", ""], []),
        ([], None),
        ([""], None),
    ],
    ids=repr,
)
def test_what_is_offered(words: list[str], expected: list[str] | None) -> None:
    found = offered(*words)
    if expected is None:
        assert {"up", "doctor", "clean", "bundle", "completion"} <= set(found) and "__complete" not in found
    else:
        assert sorted(found) == sorted(expected)


def test_every_flag_of_every_command_is_offered() -> None:
    (commands,) = [action for action in build_parser()._actions if action.dest == "==SUPPRESS=="]
    assert commands.choices
    for name, command in dict(commands.choices).items():
        flags = {flag for action in command._actions for flag in action.option_strings}
        assert set(offered(name, "-")) == flags, name


def test_nothing_known_is_no_error(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(place / "runs")
    assert main.run(["__complete", "restart", ""]) == 0
    assert main.run(["__complete", "up", "/no/such/folder/"]) == 0
    assert main.run(["__complete"]) == 0
    assert capsys.readouterr().err == ""


def test_it_answers_quickly() -> None:
    took = []
    for words in (["re"], ["restart", ""], ["up", ""]):
        began = time.monotonic()
        subprocess.run([BIN / "atropos-tui", "__complete", *words], check=True, capture_output=True)
        took.append(time.monotonic() - began)
    assert max(took) < 1.5, "0.1 s when the machine is idle"


def test_heavy_modules_are_not_imported() -> None:
    code = (
        "import sys; from atropos_tui.cli.main import run\n"
        "for words in ([''], ['restart', ''], ['up', '']): run(['__complete', *words])\n"
        "print({'pydantic', 'textual', 'httpx', 'torch', 'psutil'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def bash(line: list[str]) -> list[str]:
    """Source the script in bash, call the function as readline does; the words it would insert."""
    words = " ".join(f"'{word}'" for word in ["atropos-tui", *line])
    script = (
        "source <(atropos-tui completion bash) && complete -p atropos-tui >&2 || exit 9\n"
        f'COMP_WORDS=({words}); COMP_CWORD={len(line)}; _atropos_tui; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and "-F _atropos_tui atropos-tui" in done.stderr, done
    return [word for word in done.stdout.splitlines() if word]


def fish(line: list[str]) -> list[str]:
    text = " ".join(["atropos-tui", *line])
    script = f"atropos-tui completion fish | source; complete -C '{text}'"
    done = subprocess.run(["fish", "--no-config", "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done
    return [word.partition("\t")[0] for word in done.stdout.splitlines()]


ZSH = r"""
autoload -Uz compinit; compinit -u -D
source <(atropos-tui completion zsh)
show() { print -r -- $BUFFER > shown; mv shown typed }
zle -N show
bindkey '^X' show
touch ready
"""


def zsh(line: str) -> str:
    """Type `line` and a TAB in a real interactive zsh on a pseudo-terminal; the line as it then stands."""
    Path("setup.zsh").write_text(ZSH)
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, env=dict(os.environ) | {"TERM": "dumb"}
    )
    try:
        os.write(ours, b"source ./setup.zsh\n")
        wait_for(Path("ready"))
        os.write(ours, line.encode() + b"\t\x18")
        wait_for(Path("typed"))
        return Path("typed").read_text().rstrip("\n")
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
        os.close(theirs)


def wait_for(path: Path) -> None:
    give_up = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < give_up, f"{path} did not come"
        time.sleep(0.02)


SHELLS = [
    pytest.param(run, marks=pytest.mark.skipif(not shutil.which(run.__name__), reason=f"no {run.__name__} here"))
    for run in (bash, fish)
]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_complete_in_their_shells(shell, place: Path) -> None:  # type: ignore[no-untyped-def]
    assert shell(["res"]) == ["restart"]
    assert sorted(shell(["restart", ""])) == ["trainer", "vllm"]
    assert shell(["restart", "--dr"]) == ["--dry-run"]
    assert "p-1" in shell(["up", "--resume", ""])
    assert [word.rstrip("/") for word in shell(["up", "run"])] == ["runs"]
    assert not (place / "hacked").exists()


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh here")
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("atropos-tui res", "atropos-tui restart "),
        ("atropos-tui restart v", "atropos-tui restart vllm "),
        ("atropos-tui restart --dr", "atropos-tui restart --dry-run "),
        ("atropos-tui up run", "atropos-tui up runs/"),
    ],
    ids=["command", "component", "flag", "folder"],
)
def test_zsh_completes_at_the_prompt(line: str, completed: str) -> None:
    assert zsh(line) == completed
