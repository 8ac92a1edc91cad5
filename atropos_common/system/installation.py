"""How this installation gets a missing part: `make` in a checkout, pip or uv elsewhere."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

Extra = Literal["cpu", "gpu", "mcp", "report"]

REPOSITORY = "https://github.com/atropos-tui/atropos-tui"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Index of PyTorch's CPU builds. PyPI has none, and vLLM for the CPU requires one."""


def checkout() -> Path | None:
    """Return the folder of the checkout that this code runs from; None for an installed wheel."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "Makefile").is_file() and (folder / "docs").is_dir() else None


def pip_install() -> str:
    """Return the command that installs a package into the environment of this interpreter."""
    # `importlib.util.find_spec` asks the hook of setuptools too, which then takes this process for
    # pip and leaves it the old `distutils`: a later import of vLLM fails.
    if PathFinder.find_spec("pip") is not None:
        return "python -m pip install"
    return "uv pip install"


def install_command(extra: Extra) -> str:
    """Return the command that installs our optional dependencies `extra`."""
    if checkout() is not None:
        of_make = {"cpu": "make install", "gpu": "make install EXTRA=gpu"}
        return of_make.get(extra) or f"{pip_install()} '.[{extra}]'"
    package, installer = f'"atropos-tui[{extra}]"', pip_install()
    if (Path(sys.prefix) / "uv-receipt.toml").is_file():
        installer = "uv tool install"
    if extra != "cpu":
        return f"{installer} {package}"
    # The index also has old releases of common packages; uv would look for newer ones nowhere else.
    every = " --index-strategy unsafe-best-match" if installer.startswith("uv") else ""
    return f"{installer} {package} --extra-index-url {TORCH_CPU_INDEX}{every}"


def install_stack() -> str:
    """Return the two commands that install what the stack needs, as one fix."""
    return (
        f"run `{install_command('cpu')}` (CPU) or `{install_command('gpu')}` (CUDA), and start "
        "atropos-tui from that environment"
    )
