"""Usual mistakes in a profile or on the command line: the message names the line, the key and a fix
that works."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import main
from atropos_tui.cli.doctor import machine
from atropos_tui.cli.manage import control
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.profile.load import key_lines
from atropos_tui.profile.profile import load_profile
from atropos_tui.supervisor.journal.store import RunResult

HEAD = 'name = "p"\nmodel = "m"\n[env]\nmodule = "json"\n'


def refused(text: str, *sets: str, folder: Path | None = None) -> list[Problem]:
    file = (folder or Path.cwd()) / "p.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load_profile(str(file), sets)
    return caught.value.problems


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "line", "reason", "fix"),
    [
        (
            HEAD + "[trainer]\nlr = 1\n\n# a comment\nlr = 2\n",
            9,
            "trainer.lr is set twice, in lines 6 and 9",
            "remove",
        ),
        (
            HEAD + "[vllm]\n[api]\n[vllm]\n",
            7,
            "the table [vllm] is there twice, in lines 5 and 7",
            "into one of them",
        ),
        (HEAD + "seed = True\n", 5, "True is not a value", "write true"),
        (HEAD + "cwd = None\n", 5, "None is not a value", "remove the line"),
        ("name: p\nmodel: m\n", 1, "this is YAML", "write TOML"),
        ("---\nname: p\n", 1, "this is YAML", "write TOML"),
        ('{"name": "p"}', 1, "this is JSON", "write TOML"),
        ("name = p\n", 1, "p is not a value", 'put text in quotes: "p"'),
        (
            HEAD + "[x\n",
            5,
            "Expected ']' at the end of a table declaration (column 3)",
            "correct the syntax",
        ),
    ],
)
def test_text_that_is_not_toml(text: str, line: int, reason: str, fix: str) -> None:
    (problem,) = refused(text)
    assert (problem.line, problem.reason.startswith("not TOML: ")) == (line, True)
    assert reason in problem.reason and fix in problem.fix, problem
    assert f"p.toml:{line}: not TOML" in str(problem)


def test_lines_of_keys() -> None:
    text = (
        '"name" = "p" # x = 1\n'
        "[env]\n"
        'args.env.group_size = 8\nargs."env.seed" = 1\n'
        "[[vllm]]\nport = 1\n"
        "[vllm.args]\nx = [\n  1,\n]\ny = '''\nz = 1\n'''\n"
        "[[vllm]]\nport = 2\nargs = { a = 1, b = 2 }\n"
        "[component.'a.b']\nport = 3\n"
    )
    assert key_lines(text) == {
        ("name",): 1,
        ("env",): 2,
        ("env", "args", "env", "group_size"): 3,
        ("env", "args", "env", "seed"): 4,
        ("vllm", 0): 5,
        ("vllm", 0, "port"): 6,
        ("vllm", 0, "args"): 7,
        ("vllm", 0, "args", "x"): 8,
        ("vllm", 0, "args", "y"): 11,
        ("vllm", 1): 14,
        ("vllm", 1, "port"): 15,
        ("vllm", 1, "args"): 16,
        ("component", "a.b"): 17,
        ("component", "a.b", "port"): 18,
    }


def test_problems_name_the_line(tmp_path: Path) -> None:
    """Unknown keys, wrong types, contradictions between keys, in a file and in the one that it
    extends."""
    (tmp_path / "base.toml").write_text(HEAD + "\n[trainer]\nlr = 'fast'\n")
    text = (
        'extends = "base.toml"\n[[vllm]]\nport = 1\n[[vllm]]\nname = "b"\nport = '
        "0\n[trainer]\nbogus = 1\n"
    )
    where = {problem.key: problem.place for problem in refused(text, "trainer.clip_eps=0")}
    assert where == {
        "trainer.lr": f"{tmp_path}/base.toml:7: trainer.lr",
        'vllm.1.port ([[vllm]] "b")': f'{tmp_path}/p.toml:6: vllm.1.port ([[vllm]] "b")',
        "trainer.bogus": f"{tmp_path}/p.toml:8: trainer.bogus",
        "trainer.clip_eps": "--set: trainer.clip_eps",
    }


def test_contradictions_name_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.toml").write_text(
        HEAD + "args.env.group_size = 8\n[trainer]\nbatch_size = 100\n"
    )
    assert (
        main.run(["plan", "p.toml", "--set", "trainer.gradient_accumulation_steps=1"]) == Exit.USAGE
    )
    said = capsys.readouterr().err
    assert "p.toml:5: env.args.env.group_size: batch_size 100 is not a multiple" in said
    assert "trainer.batch_size = 96 or 104" in said


@pytest.mark.parametrize(
    ("lines", "key", "fix"),
    [
        ("lr = 1e-4\n", "lr", "did you mean trainer.lr?"),
        ("learning_rate = 1e-4\n", "learning_rate", "did you mean trainer.lr?"),
        ("trainr.lr = 1\n", "trainr", "did you mean trainer?"),
        ("trainer.lr = '2e-4'\n", "trainer.lr", "write it without quotes: 2e-4"),
        (
            "vllm.enforce-eager = true\n",
            "vllm.enforce-eager",
            "goes below [vllm.args]: enforce-eager = ...",
        ),
        ("vllm.mode = 'none'\n", "vllm.mode", "did you mean mode?"),
    ],
)
def test_keys_in_the_wrong_place_and_form(lines: str, key: str, fix: str) -> None:
    (problem,) = refused(lines + HEAD)
    assert problem.key == key and fix in problem.fix, problem


def test_a_flag_of_the_environment_beside_args() -> None:
    (problem,) = refused(HEAD + "group_size = 8\n")
    assert problem.fix == "a flag of the environment goes below [env.args]: env.group_size = ..."


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["demo", "--set", "trainer.lr", "1e-4"], "write --set trainer.lr=1e-4"),
        (["--set", "trainer.lr", "1e-4", "demo"], "write --set trainer.lr=1e-4"),
        (["demo", "--set", "seed=1", "trainer.lr=1", "a=b"], "write --set trainer.lr=1 --set a=b"),
    ],
)
def test_one_assignment_for_each_set(
    words: list[str], fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["plan", *words]) == Exit.USAGE
    assert fix in capsys.readouterr().err


def test_a_profile_that_does_not_exist(tmp_path: Path) -> None:
    for name in ("alpha", "alpine", "beta"):
        (tmp_path / f"{name}.toml").touch()

    def fix(name: str) -> str:
        with pytest.raises(UserError) as caught:
            load_profile(name)
        return caught.value.problems[0].fix

    assert fix("alpa.toml") == "did you mean alpha.toml or alpine.toml?"
    assert fix(".") == "name a file in it: alpha.toml, alpine.toml, beta.toml"
    assert "gsm8k-lora" in fix("gsm8k-lra") and fix("gsm8k-lra").count(" or ") <= 3
    assert len(fix("nothing-like-it")) < 100


def test_home_is_expanded_and_a_bare_variable_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}")
    (tmp_path / "p.toml").write_text(
        HEAD.replace('"m"', '"~/m"').replace("json", "atropos_envs.gsm8k_server")
    )
    assert main.run(["plan", "p.toml"]) == 0
    shown = capsys.readouterr().out
    assert "~" not in shown and shown.count(f"{tmp_path}/m") >= 4, (
        "engine, trainer and environment get one path"
    )
    assert main.run(["validate", "p.toml", "--set", "model=$HOME/x"]) == Exit.USAGE
    assert "put the variable in braces: ${HOME}/x" in capsys.readouterr().err
    assert main.run(["validate", "p.toml", "--set", "model=${NOPE}/x"]) == Exit.USAGE
    said = capsys.readouterr().err
    assert "variable NOPE is not set" in said and "no such model directory" not in said


def test_a_fix_of_several_problems_stands_once() -> None:
    both = UserError("title", [Problem("a", "do it"), Problem("b", "do it"), Problem("c", "other")])
    assert str(both) == "title\n  a\n  b\n    fix: do it\n  c\n    fix: other"
    assert str(UserError("title")) == "title"


def test_a_run_that_ended_is_told_with_its_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "one")
    run.root.mkdir(mode=0o700)
    run.result_json.write_text(RunResult(exit_code=0, reason="done").model_dump_json())
    said = str(control.not_live(run.root))
    assert (
        f"it ended at {time.strftime('%H:%M')}" in said
        and "exit code 0: done" in said
        and "--resume" in said
    )
    os.utime(run.result_json)
    run.result_json.write_text(
        RunResult(exit_code=3, reason="x", ended_at=86_400 * 2).model_dump_json()
    )
    assert "it ended on 1970-01-0" in str(control.not_live(run.root))


def test_cores_that_others_use_are_a_warning() -> None:
    assert machine.cores(2, 2, 10.1).verdict == "warn" and machine.cores(2, 2, 1.9).verdict == "ok"


def test_a_machine_that_is_named_lacks_gpus_beside_other_problems(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sets = ["--set", "vllm.gpus=[0, 1]", "--set", "trainer.lr=1", "--set", "api.port=9001"]
    assert main.run(["validate", "gsm8k", "--gpus", "1xH100", *sets]) == Exit.USAGE
    said = capsys.readouterr().err
    assert "GPU 1 does not exist: that machine has GPU 0" in said and "is also api.port" in said
    assert said.count(": vllm.gpus: ") == 1 and "trainer.processes" not in said
