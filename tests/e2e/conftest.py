"""Fixtures of the real stack on the CPU. One prepared model serves every test of a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.e2e.cockpit import Cockpit, open_cockpit
from tests.e2e.live_stack import LiveStack, prepare_demo


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the prepared model, one for all test processes, and the registry of runs out of the
    user's own folders."""
    patch = pytest.MonkeyPatch()
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "cache"
    cache.mkdir(exist_ok=True)
    given = os.environ.get("ATROPOS_CACHE")
    if given:
        Path(given).mkdir(parents=True, exist_ok=True)
    patch.setenv("ATROPOS_CACHE", given or str(cache))
    patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Undo what a trainer sets in this process for its own server."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Any]:
    """A factory of running stacks; each is ended with the test."""
    started: list[LiveStack] = []

    def start(*extra: str, profile: str = "demo", **sets: Any) -> LiveStack:
        prepare_demo()
        dotted = {key.replace("__", "."): value for key, value in sets.items()}
        started.append(
            LiveStack(tmp_path / f"run{len(started)}", profile, dotted, list(extra)).up()
        )
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def cockpit(tmp_path: Path) -> Iterator[Callable[[int], Cockpit]]:
    """Open the demo with some steps on a terminal; the run ends with the test."""
    opened: list[Cockpit] = []

    def open_one(steps: int) -> Cockpit:
        opened.append(open_cockpit(tmp_path / "run", steps))
        return opened[-1]

    yield open_one
    for each in opened:
        each.terminal.close()
        each.files.cli("down", "--timeout", "10")
