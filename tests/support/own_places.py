"""`own_places`: a test of the command line sees only its own runs, sockets and environment."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """State, sockets (in a short path: they hold 108 bytes), current folder; and no run that the
    tests run below."""
    for name in [name for name in os.environ if name.startswith("ATROPOS_")]:
        monkeypatch.delenv(name)
    sockets = tempfile.mkdtemp(prefix="rt-")
    monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    yield
    shutil.rmtree(sockets)
