"""The site's source tree: complete, without broken links, and nothing in it is undescribed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

import trainer_core
from atropos_tui.cli.parser import build_parser, command_names
from atropos_tui.cli.start.profiles import schema_text
from tests.project.test_docs import broken_links
from tools import reference, site
from trainer_core.config import TrainingConfig


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "pages"
    site.write(folder)
    return folder


def test_every_page_is_in_the_navigation_and_every_entry_exists(tree: Path) -> None:
    pages = {page.relative_to(tree).as_posix() for page in tree.rglob("*.md")}
    assert pages == site.nav_pages()


def test_no_link_of_the_site_is_broken(tree: Path) -> None:
    assert site.missing_files(tree) == []
    assert {
        page.name: broken for page in tree.rglob("*.md") if (broken := broken_links(page))
    } == {}


def test_every_key_command_option_and_public_name_has_a_description() -> None:
    assert reference.undocumented() == []


def test_the_pages_name_every_key_command_flag_and_export(tree: Path) -> None:
    profile, commands, library = (
        (tree / "reference" / name).read_text()
        for name in ("profile.md", "commands.md", "library.md")
    )
    schema = json.loads(schema_text())
    keys = {key for part in schema["$defs"].values() for key in part.get("properties", {})}
    assert [key for key in keys if f"| `{key}` |" not in profile] == []
    assert [
        name for name in command_names(build_parser()) if f"## atropos-tui {name}\n" not in commands
    ] == []
    flags = ("--" + name.replace("_", "-") for name in TrainingConfig.model_fields)
    assert [flag for flag in flags if f"`{flag}" not in commands] == []
    assert [name for name in trainer_core.__all__ if f"{name}" not in library] == []


def test_a_missing_description_is_found() -> None:
    schema = {"properties": {"a": {"type": "string"}, "b": {"description": "Known."}}, "$defs": {}}
    assert reference.undescribed_keys(schema) == ["profile key .a"]
    parser = argparse.ArgumentParser("program")
    parser.add_argument("--silent")
    parser.add_argument("--known", help="known")
    parser.add_subparsers().add_parser("mute")
    assert reference.undescribed_options(parser) == ["program `--silent SILENT`", "command mute"]


def test_a_missing_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.svg").touch()
    (tmp_path / "a.md").write_text("![x](there.svg) ![y](gone.svg)\n```\n[z](code.md)\n```\n")
    assert site.missing_files(tmp_path) == ["a.md: no file gone.svg"]
