"""Registration of an environment at run-api, and the requests that need it."""

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

from atropos_common.net.http import key_headers
from atropos_common.system.files import write_private
from atropos_common.system.run_dir import RunDir
from atropos_envs import EnvFault

log = logging.getLogger(__name__)

REGISTER_AGAIN_S = 0.25
REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=5)
# While run-api answers with 5xx or not at all: tries to send a group, and seconds between them.
TRIES, AGAIN_S = 3, 1.0
LONGEST_WORDS = 200
# Seconds that an idle connection is kept; uvicorn closes it after five.
KEPT_S = 2.0


@dataclass(frozen=True)
class Refusal:
    words: str
    """Status and run-api's own text."""
    kind: str
    """Status and field, without the field's index."""


def refusal(status: int, text: str) -> Refusal:
    """Read a refusal of FastAPI, of our auth middleware, or of any other form."""
    # Any other form of answer falls through to its plain text.
    with suppress(ValueError, LookupError, TypeError):
        answer = json.loads(text)
        if "error" in answer:
            return Refusal(f"{status}: {answer['error']}", str(status))
        first = answer["detail"][0]
        at = [str(part) for part in first["loc"] if part != "body"]
        # The index of a group or token differs each time: without it equal faults are one kind.
        field = next((part for part in at if not part.isdecimal()), "")
        message = first["msg"]
        return Refusal(f"{status}: {'.'.join(at)}: {message}", f"{status} {field} {message}")
    return Refusal(f"{status}: {text.strip()[:LONGEST_WORDS] or 'without a reason'}", str(status))


@dataclass(frozen=True)
class QueueShare:
    """This environment's slots in run-api's queue."""

    places: int
    """Slots of this environment, used or not."""
    queued: int
    """Slots in use."""
    awaited: bool
    """A batch waits for more groups."""


class Registration:
    def __init__(self, url: str, component: str) -> None:
        self._url = url.rstrip("/")
        run = RunDir.from_env()
        self._id_file: Path | None = run.bridge / f"env.{component}.json" if run else None
        self._session: aiohttp.ClientSession | None = None
        self.env_id: int | None = None
        # False after a 404: another run-api, which has no `/share`.
        self._knows_shares = True

    def lost(self, error: BaseException) -> str:
        """Return the message for a run-api that does not answer, or answers with an error."""
        # BaseEnv wraps its requests in tenacity's retries; the real error is in the last attempt.
        cause = error.last_attempt.exception() if hasattr(error, "last_attempt") else error
        if isinstance(cause, aiohttp.ClientResponseError):
            path = cause.request_info.url.path
            answer = f"{cause.status} ({cause.message})"
            fix = "its log says why (atropos-tui logs api -n 50)"
            return f"run-api at {self._url} answers {path} with {answer}; {fix}"
        why = type(cause).__name__
        return f"run-api at {self._url} is gone ({why}); restart it, then this environment"

    async def send(self, body: bytes) -> Refusal | None:
        """Send a group (JSON); return the refusal, None if run-api accepted it.

        Raises:
            aiohttp.ClientError, TimeoutError: no answer in `TRIES` tries.
        """
        headers = {"Content-Type": "application/json", **key_headers(os.environ)}
        for left in reversed(range(TRIES)):
            try:
                url = f"{self._url}/scored_data"
                async with self.http().post(url, data=body, headers=headers) as response:
                    if response.status < 400:
                        return None
                    # A 4xx concerns the group, so another try would fail as well.
                    if response.status < 500 or not left:
                        return refusal(response.status, await response.text())
            except (aiohttp.ClientError, TimeoutError):
                if not left:
                    raise
            await asyncio.sleep(AGAIN_S)
        raise AssertionError("the last try returns or raises")

    async def register(self, **fields: Any) -> dict[str, Any]:
        """Repeat `POST /register-env` until it succeeds.

        Raises:
            EnvFault: run-api refuses the request.
        """
        logged = ""
        # run-api takes no environment before the trainer's first `GET /batch`.
        while True:
            try:
                answer = await self._call("POST", "/register-env", fields)
                # `env_not_registered` matches "says:".
                reason = f"run-api at {self._url} says: {answer['status']}"
                if answer["status"] == "success":
                    break
            # run-api may start after the environment; the supervisor has the timeout.
            except (aiohttp.ClientConnectionError, TimeoutError):
                reason = f"waiting for run-api at {self._url}"
            except aiohttp.ClientResponseError as error:
                fault = f"run-api refused the registration ({error.status}: {fields})"
                raise EnvFault(fault, exit_code=2) from None
            # One line for each new reason, not one for each try.
            if reason != logged:
                log.info("%s", reason)
                logged = reason
            await asyncio.sleep(REGISTER_AGAIN_S)
        self.env_id = answer["env_id"]
        await self._free_earlier_ids(answer["wandb_name"], fields["desired_name"])
        return answer

    async def current_step(self) -> int | None:
        """Return the number of batches drained so far; None without an answer."""
        with suppress(aiohttp.ClientError, TimeoutError):
            return int((await self._call("GET", "/status"))["current_step"])
        return None

    async def places(self, ahead: int, barren: bool) -> QueueShare | None:
        """Return the queue slots for `ahead` batches; None for the only environment.

        Args:
            barren: none of our groups can be sent.
        """
        if not self._knows_shares:
            return None
        query = f"env_id={self.env_id}&ahead={ahead}&barren={barren:d}"
        try:
            answer = await self._call("GET", f"/share?{query}")
        except aiohttp.ClientResponseError as error:
            self._knows_shares = error.status != 404
            return None
        except (aiohttp.ClientError, TimeoutError):
            return None
        return QueueShare(**answer) if answer else None

    async def disconnect(self) -> None:
        """Give the registration back if run-api still answers."""
        if self.env_id is None:
            return
        with suppress(aiohttp.ClientError, TimeoutError):
            await self._call("POST", "/disconnect-env", {"env_id": self.env_id})
            if self._id_file is not None:
                self._id_file.unlink(missing_ok=True)
        self.env_id = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def http(self) -> aiohttp.ClientSession:
        """Return the session of all requests."""
        if self._session is None:
            # No limit of connections: every group in flight may send at the same time.
            connector = aiohttp.TCPConnector(keepalive_timeout=KEPT_S, limit=0)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    # run-api never notices that an environment died, and reserves a share of every batch for it. So
    # the ids are kept in the run directory, and the next process disconnects them.
    async def _free_earlier_ids(self, real_name: str, desired_name: str) -> None:
        earlier = _read_ids(self._id_file)
        # `real_name` is the name with run-api's number, such as `gsm8k_1`. Number 0 means that
        # run-api has restarted, so the ids in the file now belong to other environments.
        if earlier and real_name != f"{desired_name}_0":
            for env_id in earlier:
                with suppress(aiohttp.ClientError, TimeoutError):
                    await self._call("POST", "/disconnect-env", {"env_id": env_id})
            ids = ", ".join(map(str, earlier))
            log.info("disconnected an earlier registration of this environment (id %s)", ids)
        if self._id_file is not None:
            # On a full disk the next attempt only leaves this registration behind.
            with suppress(OSError):
                self._id_file.parent.mkdir(parents=True, exist_ok=True)
                write_private(self._id_file, json.dumps({"env_ids": [self.env_id]}) + "\n")

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        # The run's key, if run-api is behind one.
        key = key_headers(os.environ)
        async with self.http().request(
            method, self._url + path, json=body, timeout=REQUEST_TIMEOUT, headers=key
        ) as response:
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer


def _read_ids(path: Path | None) -> list[int]:
    if path is None:
        return []
    with suppress(OSError, ValueError, KeyError, TypeError):
        return [int(env_id) for env_id in json.loads(path.read_text())["env_ids"]]
    return []
