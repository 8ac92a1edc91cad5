"""Faults planted into a real server by vLLM's own flags; only tests name them."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send


class StalePrefix:
    """`--middleware tests.e2e.planted.StalePrefix`: a publish forgets to reset the prefix cache."""

    def __init__(self, app: ASGIApp) -> None:
        from vllm_server import compat
        from vllm_server.bridge import WeightBridge

        self.app = app
        true = compat.pause_and_keep

        async def pause(engine: Any, *, clear_cache: bool) -> None:
            await true(engine, clear_cache=False)

        async def no_reset(bridge: WeightBridge) -> None:
            pass

        compat.pause_and_keep = pause
        WeightBridge.reset_prefix_cache = no_reset  # type: ignore[method-assign]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)
