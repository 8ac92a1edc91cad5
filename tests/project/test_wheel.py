"""The wheel and the source archive, and the wheel in an environment with only its light
dependencies."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from atropos_tui import __version__
from tests.atropos_tui.cli.results.test_mcp import trained
from tests.support.terminal import Terminal

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "vllm", "transformers", "atroposlib", "peft", "safetensors")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, and the source archive."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def needed(name: str, extras: frozenset[str]) -> Iterator[metadata.Distribution]:
    """A package that is installed here and all that it says it needs, without its optional
    parts."""
    seen: set[tuple[str, frozenset[str]]] = set()
    left = [(name, extras)]
    while left:
        now = left.pop()
        if now in seen:
            continue
        seen.add(now)
        found = metadata.distribution(now[0])
        yield found
        for requirement in map(Requirement, found.requires or []):
            wanted = any(
                not requirement.marker or requirement.marker.evaluate({"extra": e})
                for e in ("", *now[1])
            )
            if wanted:
                left.append((requirement.name, frozenset(requirement.extras)))


@pytest.fixture(scope="module")
def python(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose packages are the wheel and what its metadata says the extras `report`
    and `mcp` need.

    They are links to what is installed here, for a download would cost CI a minute. `make dist`
    installs from PyPI, and names that interpreter.
    """
    if named := os.environ.get("ATROPOS_EMPTY_PYTHON"):
        return Path(named)
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(packages)
    ours = Parser().parsestr(
        (packages / f"atropos_tui-{__version__}.dist-info" / "METADATA").read_text()
    )
    first = [Requirement(text) for text in ours.get_all("Requires-Dist") or []]
    light = [
        r
        for r in first
        if not r.marker or any(r.marker.evaluate({"extra": e}) for e in ("report", "mcp"))
    ]
    assert {canonicalize_name(r.name) for r in light} >= {
        "textual",
        "pydantic",
        "prometheus-client",
        "matplotlib",
        "mcp",
    }
    for requirement in light:
        for found in needed(requirement.name, frozenset(requirement.extras)):
            for top in {Path(str(found.locate_file(file.parts[0]))) for file in found.files or []}:
                if top.name not in ("..", "__pycache__") and not (packages / top.name).exists():
                    (packages / top.name).symlink_to(top)
    return folder / "bin" / "python"


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run, module or setting of this machine."""
    for name in [name for name in os.environ if name.startswith(("ATROPOS_", "PYTHON"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(
        "MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib")
    )  # its fonts take seconds to list
    monkeypatch.chdir(tmp_path)


def call(python: Path, *words: str) -> str:
    done = subprocess.run(
        [python, "-m", "atropos_tui", *words],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_one_version_and_nothing_that_does_not_belong(built: tuple[Path, Path]) -> None:
    wheel, source = built
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packages = {
        "atropos_common",
        "atropos_tui",
        "trainer_core",
        "vllm_server",
        "atropos_envs",
        "atropos_api",
    }
    assert {name.partition("/")[0] for name in names} == packages | {
        f"atropos_tui-{__version__}.dist-info"
    }
    assert {"atropos_tui/profiles/demo.toml", "atropos_tui/profiles/profile.schema.json"} <= set(
        names
    )
    with tarfile.open(source) as archive:
        files = {Path(*Path(name).parts[1:]).as_posix() for name in archive.getnames()}
    assert {"README.md", "docs/architecture.md", "tests/project/test_wheel.py", "LICENSE"} <= files
    assert not any(name.startswith(("runs/", ".venv", "dist/", "models/")) for name in files)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_copied_run_is_read_without_torch(python: Path, tmp_path: Path) -> None:
    missing = f"import importlib.util as u; print([name for name in {HEAVY} if u.find_spec(name)])"
    assert (
        subprocess.run([python, "-c", missing], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )
    run = trained(tmp_path / "copied")
    assert __version__ in call(python, "--version")
    assert "vllm" in call(python, "ps", str(run.root))
    assert "out of memory" in call(python, "why", str(run.root))
    assert "three" in call(python, "logs", str(run.root), "vllm")
    assert "Reward, last 5" in call(python, "bench", str(run.root), str(run.root))
    assert "valid" in call(python, "validate", "demo", "--gpus", "1xH100")
    assert '"tokens_per_s"' in call(python, "schema", "bench")
    call(python, "report", str(run.root), "-o", "page.html")
    assert "</html>" in (tmp_path / "page.html").read_text()
    terminal = Terminal(
        [str(python), "-m", "atropos_tui", "replay", str(run.root), "--speed", "64"], 120, 35
    )
    try:
        terminal.shows(lambda text: "Reward" in text, 60)
        terminal.type(b"q")
        assert terminal.ends() == 0
    finally:
        terminal.close()
