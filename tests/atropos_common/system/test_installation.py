"""The install command that a message names, in a checkout and for an installed wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from atropos_common.system import installation

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "atropos_api",
    "atropos_common",
    "atropos_envs",
    "atropos_tui",
    "trainer_core",
    "vllm_server",
)


def as_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, pip: bool = True) -> None:
    """Run the functions as if this code lay in `site-packages` of a new environment."""
    installed = tmp_path / "site-packages" / "atropos_common" / "system" / "installation.py"
    monkeypatch.setattr(installation, "__file__", str(installed))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    found = SimpleNamespace(find_spec=lambda name: object() if pip else None)
    monkeypatch.setattr(installation, "PathFinder", found)


def test_a_checkout_names_make() -> None:
    assert installation.checkout() == ROOT
    assert installation.install_command("cpu") == "make install"
    assert installation.install_command("gpu") == "make install EXTRA=gpu"
    assert installation.install_command("report").endswith("install '.[report]'")


def test_a_wheel_names_pip_and_the_index_of_pytorch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    as_wheel(monkeypatch, tmp_path)
    cpu = 'python -m pip install "atropos-tui[cpu]" --extra-index-url ' + (
        installation.TORCH_CPU_INDEX
    )
    gpu = 'python -m pip install "atropos-tui[gpu]"'
    assert installation.install_command("cpu") == cpu
    assert installation.install_command("gpu") == gpu
    assert installation.install_command("mcp") == 'python -m pip install "atropos-tui[mcp]"'
    fix = installation.install_stack()
    assert cpu in fix and gpu in fix and "make" not in fix


def test_uv_installs_where_there_is_no_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_wheel(monkeypatch, tmp_path, pip=False)
    cpu = installation.install_command("cpu")
    assert cpu.startswith('uv pip install "atropos-tui[cpu]" ')
    assert "--index-strategy unsafe-best-match" in cpu
    assert installation.pip_install() == "uv pip install"
    (tmp_path / "uv-receipt.toml").write_text("[tool]\n")
    assert installation.install_command("gpu") == 'uv tool install "atropos-tui[gpu]"'


def test_the_fix_of_an_installed_copy(tmp_path: Path) -> None:
    """A real process that finds this code outside a checkout names no Makefile."""
    shutil.copytree(
        ROOT / "atropos_common",
        tmp_path / "atropos_common",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    asked = "from atropos_common.system.installation import *; print(checkout(), install_stack())"
    said = subprocess.run(
        [sys.executable, "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith("None ") and "make " not in said and "atropos-tui[cpu]" in said


def test_only_this_module_names_make() -> None:
    """Messages elsewhere ask `installation` for the command."""
    own = Path(installation.__file__)
    named = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if path != own
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\bmake (install|demo|demo-gpu|test|dist)\b|in a checkout", line)
    ]
    assert not named


def test_one_repository() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == installation.REPOSITORY
    assert f"{installation.REPOSITORY}/security" in (ROOT / "SECURITY.md").read_text()


def test_looking_for_pip_leaves_setuptools_its_distutils() -> None:
    """vLLM imports setuptools, which refuses to run beside another `distutils`."""
    code = "from atropos_common.system import installation as i; i.pip_install(); import setuptools"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
