"""Hold groups back while no engine of the plan answers: an environment's own clients do not wait for one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import aiohttp
import httpx
import openai

log = logging.getLogger(__name__)

POLL_S = 0.5
ANSWER_S = aiohttp.ClientTimeout(total=2)
AWAY = (openai.APIConnectionError, aiohttp.ClientConnectionError, httpx.TransportError, OSError, TimeoutError)
"""Errors of a client whose server is away."""


class EngineGate:
    """Open while an engine answers `/health`.

    Args:
        urls: the engines' OpenAI addresses; without any the gate is always open.
        http: gives the session to ask with.
    """

    def __init__(self, urls: Sequence[str], http: Callable[[], aiohttp.ClientSession]) -> None:
        self._roots = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self._http = http
        self._closed = asyncio.Event()
        if self._roots:
            self._closed.set()

    @property
    def open(self) -> bool:
        """Whether groups may begin."""
        return not self._closed.is_set()

    async def watch(self) -> None:
        """Open the gate whenever it is closed and an engine answers, until cancelled."""
        while True:
            await self._closed.wait()
            began = time.monotonic()
            if not await self._answers():
                log.info("no group begins before an engine answers: %s", " or ".join(self._roots))
                while not await self._answers():
                    await asyncio.sleep(POLL_S)
                log.info("an engine answers after %.1f s", time.monotonic() - began)
            self._closed.clear()

    async def explains(self, error: BaseException) -> bool:
        """Return whether a rollout failed because no engine answers, and close the gate if so."""
        if not self._roots or not any(isinstance(cause, AWAY) for cause in _causes(error)) or await self._answers():
            return False
        self._closed.set()
        return True

    async def _answers(self) -> bool:
        for root in self._roots:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self._http().get(f"{root}/health", timeout=ANSWER_S) as response:
                    if response.status < 500:
                        return True
        return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and what led to it, tenacity's last attempt included."""
    while error is not None:
        yield error
        last = getattr(error, "last_attempt", None)
        error = last.exception() if last is not None else error.__cause__ or error.__context__
