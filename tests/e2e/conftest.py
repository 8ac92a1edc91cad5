"""The real stack on the CPU. One prepared model serves every test of a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.e2e.live_stack import LiveStack


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the prepared model and the registry of runs out of the user's own folders."""
    patch = pytest.MonkeyPatch()
    patch.setenv("ATROPOS_CACHE", os.environ.get("ATROPOS_CACHE") or str(tmp_path_factory.mktemp("cache")))
    patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """What a trainer sets in this process for its own server is not there for the next test's."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Any]:
    """A factory of running stacks; each is ended with the test."""
    started: list[LiveStack] = []

    def start(*extra: str, profile: str = "demo", **sets: Any) -> LiveStack:
        dotted = {key.replace("__", "."): value for key, value in sets.items()}
        started.append(LiveStack(tmp_path / f"run{len(started)}", profile, dotted, list(extra)).up())
        return started[-1]

    yield start
    for each in started:
        each.close()
