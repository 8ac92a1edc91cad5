"""The survey of upstream's environments: which files are environments, and the reasons of those
that do not start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.support.upstream_files import find, why
from benchmarks.upstream import table, write_data

PLAIN = """
class Sums(BaseEnv):
    async def collect_trajectories(self, item):
        return await self.answers(item), []
class Harder(Sums): ...
if __name__ == "__main__":
    Harder.cli()
"""
DERIVED = "from plain import Harder\nclass Hardest(Harder):\n    pass\n"
EVALUATES = """
class Judge(base.BaseEnv):
    async def collect_trajectories(self, item):
        '''Not needed.'''
        return None, []
"""


def test_files_that_define_an_environment_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "environments" / "games"
    folder.mkdir(parents=True)
    files = {
        "plain": PLAIN,
        "derived": DERIVED,
        "judge": EVALUATES,
        "other": "class A(list): ...",
        "torn": "def f(:",
    }
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    derived, judge, plain = find(tmp_path)
    assert (plain.target, plain.classes, plain.trains) == (
        "environments/games/plain.py",
        ("Harder",),
        True,
    )
    assert derived.target == "environments/games/derived.py:Hardest" and derived.trains, (
        "what it inherits makes groups"
    )
    assert not judge.trains and judge.name == "games-judge"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "1 2 ERROR __main__: it needs the Python package 'modal', which is",
            "needs the Python package modal",
        ),
        (
            "ConnectionError: Couldn't reach 'a/b' on the Hub (LocalEntry)",
            "needs the data set a/b from a hub",
        ),
        (
            "openai.OpenAIError: set the OPENAI_API_KEY environment variable",
            "needs the key OPENAI_API_KEY",
        ),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'anvil'", "needs the file anvil"),
        (
            "OSError: [Errno 2] No such file or directory: '/home/me/up/cards.json'",
            "needs the file cards.json",
        ),
        (
            "ImportError: cannot import name 'a' from 'b.c' (/x/y.py)",
            "b.c has no a: it is written for another version",
        ),
        ("x\nValueError: odd\n", "ValueError: odd"),
        ("1 2 ERROR atropos_envs.hosting.runner: cannot\nKeyError: 'a'", "cannot"),
        ("", "says nothing"),
    ],
)
def test_the_reason_is_the_last_word_of_the_runner_or_an_exception(
    output: str, reason: str
) -> None:
    assert why(output) == reason


def test_rows_that_stand_in_are_found_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = {
        "a/b": {
            "splits": ["test"],
            "config": "main",
            "count": 2,
            "rows": [{"q": "{n}?", "a": [{"v": "{n}"}]}],
        },
        "plain": {"file": "deep/rows.json", "count": 1, "rows": [{"q": "{n}", "number": 3}]},
    }
    write_data(tmp_path, sets, ["a/b", "plain"])
    assert json.loads((tmp_path / "deep" / "rows.json").read_text()) == [{"q": "0", "number": 3}]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from datasets import load_dataset

    rows = list(load_dataset("a/b", "main", split="test", cache_dir=str(tmp_path / "cache")))
    assert rows == [{"q": "0?", "a": [{"v": "0"}]}, {"q": "1?", "a": [{"v": "1"}]}]


def test_the_table_names_what_trained_first() -> None:
    row = {
        "left_out": {},
        "failures": {},
        "adjusted": {"top_p": 4},
        "set": {"env.x": 1},
        "data": ["gsm8k"],
    }
    rows = [
        row
        | {
            "path": "environments/a.py",
            "outcome": "failed",
            "groups": 0,
            "steps": 0,
            "reason": "needs a|b",
        },
        row
        | {
            "path": "environments/b.py",
            "outcome": "trained",
            "groups": 6,
            "steps": 3,
            "reason": "",
        },
    ]
    text = table(rows)
    assert text.startswith("1 of 2 files train.") and text.index("`b`") < text.index("`a`")
    assert (
        "| `b` | yes | 6 | 3 | `env.x = 1`; data: gsm8k; top_p left out of 4 requests |  |" in text
    )
    assert "needs a\\|b" in text
