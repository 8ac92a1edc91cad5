"""`launch`: a real stack of small, stubborn children under a supervisor in the test's own event
loop."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atropos_tui.profile.spec import ComponentSpec, LogPolicy, Place, StackSpec
from atropos_tui.supervisor.journal import tracker
from tests.support.harness import Running, check_history

PLAIN = ["/bin/sh", "-c", 'echo a word before the line; exec "$@"', "--"]
"""A prefix that brings a component nowhere, by the same means as srun and ssh; it prints, as a
login shell may."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests marked with `launchers("direct", "remote")` run with each of these."""
    marker = metafunc.definition.get_closest_marker("launchers")
    if marker and "launch" in metafunc.fixturenames:
        given = metafunc.config.getoption("--launcher-prefix")
        launchers = [name for name in marker.args if name == "remote" or not given]
        metafunc.parametrize("launch", launchers, indirect=True)


def far(spec: ComponentSpec, prefix: list[str]) -> ComponentSpec:
    """The component, on a node that `prefix` leads to."""
    place = Place(
        node="far", host="host-7", address="127.0.0.1", prefix=prefix, python=sys.executable
    )
    return spec.model_copy(update={"place": place})


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> list[str]:
    """Command prefix that brings a component to another node in this test."""
    return shlex.split(request.config.getoption("--launcher-prefix") or "") or PLAIN


@pytest.fixture
def launch(tmp_path: Path, prefix: list[str], request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`async with launch(part(...), ...) as running`: ended and checked at the end, whatever the
    test did."""
    launcher = getattr(request, "param", "direct")

    @asynccontextmanager
    async def run(
        *components: ComponentSpec,
        max_bytes: int = 64 * 1024 * 1024,
        **more: Any,
    ) -> AsyncIterator[Running]:
        if launcher == "remote":
            components = tuple(far(spec, prefix) for spec in components)
            more["launcher"] = "ssh" if Path(prefix[0]).name == "ssh" else "slurm"
        stack = StackSpec(
            run_id=f"test-{secrets.token_hex(6)}",
            name="test",
            mode="none",
            run_dir=str(tmp_path / "run"),
            components=list(components),
            logs=LogPolicy(max_bytes=max_bytes),
            **more,
        )
        running = Running(stack)
        try:
            yield running
        finally:
            if not running.task.done():
                running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
            await running.client.close()
            left = tracker.find_leftovers(stack.run_id)
            if left:
                tracker.reap_leftovers(stack.run_id)
        assert left == []
        check_history(running)

    return run


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def no_inherited_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests may themselves run below a supervisor."""
    for name in [name for name in os.environ if name.startswith("ATROPOS_")]:
        monkeypatch.delenv(name)
    yield
