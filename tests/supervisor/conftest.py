"""`launch`: a real stack of small, nasty children under a supervisor in the test's own event loop."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atropos_tui.profile.spec import ComponentSpec, LogPolicy, StackSpec
from atropos_tui.supervisor import tracker
from tests.supervisor.harness import Running, check_history


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Any]:
    """`async with launch(part(...), ...) as running`: ended and checked at the end, whatever the test did."""

    @asynccontextmanager
    async def run(
        *components: ComponentSpec, max_bytes: int = 64 * 1024 * 1024, survive: bool = False, **more: Any
    ) -> AsyncIterator[Running]:
        stack = StackSpec(
            run_id=f"test-{secrets.token_hex(6)}",
            name="test",
            mode="none",
            run_dir=str(tmp_path / "run"),
            components=list(components),
            logs=LogPolicy(max_bytes=max_bytes),
            survive=survive,
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
