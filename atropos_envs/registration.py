"""An environment's place at run-api: take it patiently, give it back, and give back what an earlier life left.

run-api never notices that an environment died: the ghost keeps its share of every batch. So the id is remembered in the
run directory, and the next life disconnects it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from atropos_common.http import door_headers
from atropos_common.run_dir import RunDir
from atropos_envs import EnvFault

log = logging.getLogger(__name__)

POLL_S = 0.25
ANSWER_S = aiohttp.ClientTimeout(total=5)
TRIES, AGAIN_S = 3, 1.0
"""Tries to send a group, and seconds between them, while run-api answers with 5xx or not at all."""
LONGEST_WORDS = 200
KEPT_S = 2.0
"""uvicorn closes a connection that was idle for five seconds."""


@dataclass(frozen=True)
class Refusal:
    """An answer of run-api that a group is not accepted."""

    words: str
    """Its own, with the status."""
    kind: str
    """The status and the field, without its index."""


def refusal(status: int, text: str) -> Refusal:
    """Read an answer: FastAPI's list of wrong fields, the `error` of our own front, or any text."""
    with suppress(ValueError, LookupError, TypeError):
        answer = json.loads(text)
        if "error" in answer:
            return Refusal(f"{status}: {answer['error']}", str(status))
        first = answer["detail"][0]
        at = [str(part) for part in first["loc"] if part != "body"]
        field = next((part for part in at if not part.isdecimal()), "")
        return Refusal(f"{status}: {'.'.join(at)}: {first['msg']}", f"{status} {field} {first['msg']}")
    return Refusal(f"{status}: {text.strip()[:LONGEST_WORDS] or 'no words'}", str(status))


@dataclass(frozen=True)
class QueueShare:
    """Our part of run-api's queue."""

    places: int
    """Groups that may be in it."""
    queued: int
    """Groups that are."""
    awaited: bool
    """A batch waits for more."""


class Registration:
    """One environment at one run-api."""

    def __init__(self, url: str, component: str) -> None:
        self._url = url.rstrip("/")
        run = RunDir.from_env()
        self._memory: Path | None = run.bridge / f"env.{component}.json" if run is not None else None
        self._session: aiohttp.ClientSession | None = None
        self.env_id: int | None = None
        self._knows_shares = True

    def lost(self, error: BaseException) -> str:
        """Return what to say when run-api does not answer, or answers with an error."""
        cause = error.last_attempt.exception() if hasattr(error, "last_attempt") else error
        if isinstance(cause, aiohttp.ClientResponseError):
            path = cause.request_info.url.path
            return (
                f"run-api at {self._url} answers {path} with {cause.status} ({cause.message}); its log says why "
                "(atropos-tui logs api -n 50)"
            )
        return f"run-api at {self._url} is gone ({type(cause).__name__}); restart it, then this environment"

    async def send(self, body: bytes) -> Refusal | None:
        """`POST /scored_data` a group, as JSON; return how run-api refused it, None where it accepted it.

        Raises:
            aiohttp.ClientError, TimeoutError: it did not answer in `TRIES` tries.
        """
        headers = {"Content-Type": "application/json", **door_headers(os.environ)}
        for left in reversed(range(TRIES)):
            try:
                async with self.http().post(f"{self._url}/scored_data", data=body, headers=headers) as response:
                    if response.status < 400:
                        return None
                    if response.status < 500 or not left:
                        return refusal(response.status, await response.text())
            except (aiohttp.ClientError, TimeoutError):
                if not left:
                    raise
            await asyncio.sleep(AGAIN_S)
        raise AssertionError("the last try returns or raises")

    async def register(self, **fields: Any) -> dict[str, Any]:
        """`POST /register-env` until it succeeds: run-api takes no environment before the trainer's first `GET /batch`.

        Raises:
            EnvFault: run-api calls the request wrong.
        """
        said = ""
        while True:
            try:
                answer = await self._call("POST", "/register-env", fields)
                reason = f"run-api at {self._url} says: {answer['status']}"
                if answer["status"] == "success":
                    break
            except (aiohttp.ClientConnectionError, TimeoutError):
                reason = f"waiting for run-api at {self._url}"
            except aiohttp.ClientResponseError as error:
                raise EnvFault(f"run-api refused the registration ({error.status}: {fields})", exit_code=2) from None
            if reason != said:
                log.info("%s", reason)
                said = reason
            await asyncio.sleep(POLL_S)
        self.env_id = answer["env_id"]
        await self._free_earlier_lives(answer["wandb_name"], fields["desired_name"])
        return answer

    async def current_step(self) -> int | None:
        """Batches drained so far; None when run-api does not say."""
        with suppress(aiohttp.ClientError, TimeoutError):
            return int((await self._call("GET", "/status"))["current_step"])
        return None

    async def places(self, ahead: int, barren: bool) -> QueueShare | None:
        """Return how many groups of ours may be in the queue for `ahead` batches, and how many are; None where we have
        it to ourselves, or run-api knows no shares.

        Args:
            barren: nothing of what we make can be sent.
        """
        if not self._knows_shares:
            return None
        try:
            answer = await self._call("GET", f"/share?env_id={self.env_id}&ahead={ahead}&barren={barren:d}")
        except aiohttp.ClientResponseError as error:
            self._knows_shares = error.status != 404
            return None
        except (aiohttp.ClientError, TimeoutError):
            return None
        return QueueShare(**answer) if answer else None

    async def disconnect(self) -> None:
        """Give our place back, as far as run-api still answers."""
        if self.env_id is None:
            return
        with suppress(aiohttp.ClientError, TimeoutError):
            await self._call("POST", "/disconnect-env", {"env_id": self.env_id})
            if self._memory is not None:
                self._memory.unlink(missing_ok=True)
        self.env_id = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def http(self) -> aiohttp.ClientSession:
        """Connections that are kept between calls, but not so long that run-api closes one that is just being used."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=KEPT_S, limit=0))
        return self._session

    async def _free_earlier_lives(self, real_name: str, desired_name: str) -> None:
        """Disconnect the ids remembered, if this run-api knew us before; then remember the new one.

        run-api numbers registrations of one name from 0. Number 0 says that it has been restarted since, and the
        remembered ids are other environments' by now.
        """
        earlier = _read_ids(self._memory)
        if earlier and real_name != f"{desired_name}_0":
            for env_id in earlier:
                with suppress(aiohttp.ClientError, TimeoutError):
                    await self._call("POST", "/disconnect-env", {"env_id": env_id})
            log.info("gave back the place of an earlier life (environment %s)", ", ".join(map(str, earlier)))
        if self._memory is not None:
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            self._memory.write_text(json.dumps({"env_ids": [self.env_id]}) + "\n")

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        key = door_headers(os.environ)
        async with self.http().request(method, self._url + path, json=body, timeout=ANSWER_S, headers=key) as response:
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer


def _read_ids(path: Path | None) -> list[int]:
    if path is None:
        return []
    with suppress(OSError, ValueError, KeyError, TypeError):
        return [int(env_id) for env_id in json.loads(path.read_text())["env_ids"]]
    return []
