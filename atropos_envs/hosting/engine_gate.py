"""Hold groups back while no engine of the plan answers: an environment's own clients do not
wait."""

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
AWAY = (
    openai.APIConnectionError,
    aiohttp.ClientConnectionError,
    httpx.TransportError,
    OSError,
    TimeoutError,
)
"""Errors of a client whose server is unreachable."""


class EngineGate:
    """Gate that is open while an engine answers `/health`.

    Args:
        urls: the engines' OpenAI addresses; without any the gate stays open.
        http: returns the session for the requests.
    """

    def __init__(self, urls: Sequence[str], http: Callable[[], aiohttp.ClientSession]) -> None:
        self._roots = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self._http = http
        self._closed = asyncio.Event()
        # Closed at first: the environment may start before its engine.
        if self._roots:
            self._closed.set()

    @property
    def open(self) -> bool:
        """True if groups may begin."""
        return not self._closed.is_set()

    async def watch(self) -> None:
        """Open the gate when an engine answers again; run until cancelled."""
        while True:
            await self._closed.wait()
            began = time.monotonic()
            if not await self._answers():
                log.info("no engine answers at %s; new groups wait", " or ".join(self._roots))
                while not await self._answers():
                    await asyncio.sleep(POLL_S)
                log.info("an engine answers after %.1f s", time.monotonic() - began)
            self._closed.clear()

    async def explains(self, error: BaseException) -> bool:
        """Return True if a rollout failed because no engine answers, and close the gate then."""
        # One request decides: the same errors come from other servers, such as a judge or a search
        # tool.
        if (
            not self._roots
            or not any(isinstance(cause, AWAY) for cause in _causes(error))
            or await self._answers()
        ):
            return False
        self._closed.set()
        return True

    async def _answers(self) -> bool:
        for root in self._roots:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self._http().get(f"{root}/health", timeout=ANSWER_S) as response:
                    # A 401 or 404 also shows that a server is there.
                    if response.status < 500:
                        return True
        return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and its causes, tenacity's last attempt included."""
    while error is not None:
        yield error
        last = getattr(error, "last_attempt", None)
        # tenacity's RetryError hides the real error in its last attempt, not in `__cause__`.
        error = last.exception() if last is not None else error.__cause__ or error.__context__
