"""Shell completion: the offers at each place, and the three scripts driven in their shells."""

from __future__ import annotations

import json
import os
import pty
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.cli.parser import build_parser
from tests.support.own_places import own_places  # noqa: F401

BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def place(own_places: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """A folder with a run, profiles and other files."""
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    run = RunDir(tmp_path / "runs" / "p-1")
    run.create()
    run.run_json.write_text(
        json.dumps({"run_id": "p-1", "name": "p", "mode": "none", "started_at": 5.0})
    )
    names = ["vllm", "trainer", "$(touch hacked)", "a\tb\nc", 7]
    run.plan_json.write_text(
        json.dumps({"components": [{"name": name, "role": "other"} for name in names]})
    )
    (tmp_path / "mine.toml").touch()
    (tmp_path / "my notes.txt").touch()
    (tmp_path / "my profiles").mkdir()
    (tmp_path / "my profiles" / "deep.toml").touch()
    return tmp_path


ASK = """
import json, os, sys
from atropos_tui.cli.main import run
for at, line in enumerate(json.load(sys.stdin)):
    if (child := os.fork()) == 0:
        os.environ |= {
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "_ARGCOMPLETE_STDOUT_FILENAME": f"answer-{at}",
        }
        run([])
    assert os.waitpid(child, 0)[1] == 0, line
"""
AS_FISH = {
    "_ARGCOMPLETE": "1",
    "_ARGCOMPLETE_SHELL": "fish",
    "_ARGCOMPLETE_IFS": "\n",
    "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
}


def offered(*lines: str) -> list[list[str]]:
    """Return the completions at the end of each line, requested as a shell does."""
    text = json.dumps([f"atropos-tui {line}" for line in lines])
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(
        command, input=text, env=os.environ | AS_FISH, capture_output=True, text=True
    )
    assert done.returncode == 0, done
    return [Path(f"answer-{at}").read_text().splitlines() for at in range(len(lines))]


OFFERED = {
    "res": ["restart"],
    "--ver": ["--version"],
    "restart ": ["vllm", "trainer"],
    "restart --yes v": ["vllm"],
    "restart --run-dir runs/p-1 t": ["trainer"],
    "restart --run-dir nowhere ": [],
    "restart vllm ": ["p-1", "my profiles/", "runs/"],
    "restart vllm p": ["p-1"],
    "logs vllm tr": ["trainer"],
    "why p-1 v": ["vllm"],
    "attach p": ["p-1"],
    "events --kind d": ["diagnosis"],
    "up demo --set trainer.use_w": ["trainer.use_wandb="],
    "up demo --set mo": ["mode=", "model="],
    "restart --d": ["--dry-run"],
    "restart --dry-run --d": [],
    "up --set a=1 --se": ["--set"],
    "up demo ": [],
    "up dem": ["demo", "demo-cluster", "demo-gpu", "demo-lora"],
    "up min": ["mine.toml"],
    "up my": ["my profiles/"],
    "up 'my profiles/": ["my profiles/deep.toml"],
    "up --resume p": ["p-1"],
    "up --run-dir ru": ["runs/"],
    "ps --run-dir p": ["p-1"],
    "ps --run-dir=r": ["--run-dir=runs/"],
    "ps --run-dir=runs/p-1 --js": ["--json"],
    "wait --for r": ["ready"],
    "wait --for v": ["vllm"],
    "rep": ["report", "replay"],
    "report p": ["p-1"],
    "report p-1 --o": ["--output"],
    "report -o my\\ n": ["my notes.txt"],
    "replay p-1 --s": ["--speed"],
    "replay p": ["p-1"],
    "completion ": ["bash", "zsh", "fish"],
    "up /no/such/folder/": [],
}


def test_what_is_offered(place: Path) -> None:
    answers = offered(*OFFERED)
    assert {line: sorted(words) for line, words in zip(OFFERED, answers, strict=True)} == {
        line: sorted(words) for line, words in OFFERED.items()
    }
    shutil.rmtree(place / "runs")
    commands, nothing = offered("", "restart ")
    assert {"up", "doctor", "clean", "bundle", "completion"} <= set(commands) and nothing == []


def test_every_flag_of_every_command_is_offered() -> None:
    (commands,) = [action for action in build_parser()._actions if action.dest == "==SUPPRESS=="]
    assert commands.choices
    flags = {
        name: {flag for action in command._actions for flag in action.option_strings}
        for name, command in dict(commands.choices).items()
    }
    assert (
        dict(zip(flags, map(set, offered(*(f"{name} -" for name in flags))), strict=True)) == flags
    )


def test_it_answers_quickly() -> None:
    """CPU time is measured, because waiting for a CPU is not the command's fault."""
    took = []
    for line in ("re", "restart ", "up "):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        env = {
            "COMP_LINE": f"atropos-tui {line}",
            "COMP_POINT": "99",
            "_ARGCOMPLETE_STDOUT_FILENAME": "answer",
        }
        subprocess.run(
            [BIN / "atropos-tui"], env=os.environ | AS_FISH | env, check=True, capture_output=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert Path("answer").read_text()
    assert max(took) < 0.6, "0.15 s when the machine is idle"


HEAVY = """
import sys
from atropos_tui.cli.main import run
try:
    run([])
finally:
    print(sorted({"pydantic", "textual", "httpx", "torch", "psutil", "re2"} & set(sys.modules)))
"""


@pytest.mark.parametrize("line", ["", "restart ", "up "])
def test_heavy_modules_are_not_imported(line: str) -> None:
    line = f"atropos-tui {line}"
    env = {
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": "answer",
    }
    command = [sys.executable, "-c", HEAVY]
    done = subprocess.run(
        command, env=os.environ | AS_FISH | env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def bash(line: list[str]) -> list[str]:
    """Source the script in bash, call the function as readline does; the words it would insert."""
    words = " ".join(f"'{word}'" for word in ["atropos-tui", *line])
    script = (
        "source <(atropos-tui completion bash) && complete -p atropos-tui >&2 || exit 9\n"
        f'COMP_WORDS=({words}); COMP_CWORD={len(line)}; COMP_LINE="${{COMP_WORDS[*]}}"; '
        f"COMP_POINT=${{#COMP_LINE}}\n"
        '_python_argcomplete atropos-tui; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0 and "-F _python_argcomplete atropos-tui" in done.stderr, done
    return [word.rstrip() for word in done.stdout.splitlines() if word]


def fish(line: list[str]) -> list[str]:
    text = " ".join(["atropos-tui", *line])
    script = f"atropos-tui completion fish | source; complete -C '{text}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], capture_output=True, text=True, timeout=30
    )
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
    """Type `line` and a TAB in a real interactive zsh on a pseudo-terminal; the line as it then
    stands."""
    Path("setup.zsh").write_text(ZSH)
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=dict(os.environ) | {"TERM": "dumb"},
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
    pytest.param(
        run,
        marks=pytest.mark.skipif(not shutil.which(run.__name__), reason=f"no {run.__name__} here"),
    )
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
