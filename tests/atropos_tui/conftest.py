"""Fixtures of the cockpit's tests: one parser of its commands, and no look-up on the model hub."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from atropos_tui.cli import main
from atropos_tui.gpu import VISIBLE
from atropos_tui.profile.budget import inventory


@pytest.fixture(scope="session", autouse=True)
def _one_parser() -> Iterator[None]:
    """Build the parser once: it takes three quarters of the time of a command that runs in the
    test's own process, and thousands do. Parsing does not change a parser."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "build_parser", functools.cache(main.build_parser))
        yield


@pytest.fixture(scope="session", autouse=True)
def _all_gpus() -> Iterator[None]:
    """The tests name GPUs of machines that they make up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VISIBLE, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_hub() -> Iterator[None]:
    """Shipped profiles name hub models, and `plan` would ask the hub for their configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inventory, "_from_hub", lambda name: "model not on this machine")
        yield
