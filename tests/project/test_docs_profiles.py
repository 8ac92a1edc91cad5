"""TOML of the documents: complete profiles are valid, and parts of one use only keys that exist.

A block is a complete profile, unless its fence says `title="part of a profile"`, or names the key
file of the screen.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from atropos_tui.cli.main import run
from atropos_tui.errors import UserError
from atropos_tui.profile.profile import load_profile
from atropos_tui.ui.app import CockpitApp
from atropos_tui.ui.keymap import kinds_with_keys, read_key_file
from tests.project.test_docs import DOCUMENTS, ROOT

BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]*)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)
PART = "part of a profile"
KEY_FILE = "keys.toml"
SCRIPT = re.compile(r"^script = \"(\w+\.py)\"", re.MULTILINE)
HARDWARE = "8xH100"
"""GPUs of each machine that the documents speak of."""


class Block(NamedTuple):
    page: str
    line: int
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, language: str) -> list[Block]:
    """Fenced blocks of a page in one language."""
    text = (ROOT / page).read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[2] or "", found[3])
        for found in BLOCK.finditer(text)
        if found[1] == language
    ]


TOML = [block for page in DOCUMENTS for block in blocks(page, "toml")]


def environment(page: str) -> str:
    """The environment that a page shows, else that of the page on environments."""
    return next(
        block.text
        for each in (page, "docs/environments.md")
        for block in blocks(each, "python")
        if "(BaseEnv)" in block.text
    )


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.mark.parametrize("block", [one for one in TOML if not one.title], ids=str)
def test_a_complete_profile_is_valid(
    block: Block, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "profile.toml").write_text(block.text)
    for script in SCRIPT.findall(block.text):
        (folder / script).write_text(environment(block.page))
    code = run(["validate", "profile.toml", "--gpus", HARDWARE])
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err


@pytest.mark.parametrize("block", [one for one in TOML if one.title == KEY_FILE], ids=str)
def test_a_key_file_has_no_wrong_entry(block: Block, folder: Path) -> None:
    (folder / KEY_FILE).write_text(block.text)
    kinds = kinds_with_keys()
    assert CockpitApp in kinds
    found = read_key_file(folder / KEY_FILE, kinds)
    assert not found.problems and found.keys and found.commands


@pytest.mark.parametrize("block", [one for one in TOML if one.title not in ("", KEY_FILE)], ids=str)
def test_a_part_of_a_profile_has_only_keys_that_exist(block: Block, folder: Path) -> None:
    assert block.title == PART
    path = folder / "part.toml"
    path.write_text(f'extends = "gsm8k"\nname = "part"\n{block.text}')
    try:
        load_profile(str(path))
    except UserError as error:
        pytest.fail(str(error))


def test_the_blocks_are_found() -> None:
    assert sum(not block.title for block in TOML) >= 8
    assert sum(bool(block.title) for block in TOML) >= 10


def test_a_refused_profile_is_noticed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of ssh.md once asked for eight engines on one GPU."""
    (folder / "bad.toml").write_text('extends = "gsm8k"\nname = "x"\n[vllm]\nnone = 1\n')
    assert run(["validate", "bad.toml", "--gpus", HARDWARE]) == 2
    assert "none" in capsys.readouterr().err
