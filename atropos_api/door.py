"""The door before atroposlib's application, for every request: whose process calls, by which name, from a browser or
not, what it must not reach, and how much it sends.

run-api itself asks nobody who he is and answers every page of the web (CORS `*`), while the loopback is shared by all
users of a machine, and by its browsers. Refused is what no part of a stack does; what is let in finds run-api as it is.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_common.body import BodyError, GoneError, read_body
from atropos_common.bridge import TOKEN_HEADER
from atropos_common.connections import Connection, connection_of
from atropos_common.http import allowed_hosts, door_keys, host_refusal, hosts_in, key_refusal, opens
from atropos_common.run_dir import ENV_ALLOWED_HOSTS, ENV_TOKEN

ENV_UIDS = "ATROPOS_API_UIDS"
ENV_MAX_BODY = "ATROPOS_API_MAX_BODY_MIB"
MAX_BODY_MIB = 400
"""A batch of 16 groups of 16 completions of 32,768 tokens, all in one body, has 285 MB: as JSON a token takes 7 bytes,
its mask another 7, its logprob 20."""
ROOT = 0
RESET = "/reset_data"
"""Forgets trainer, environments and queue, and is a GET."""
HEALTH = "/info"
"""What the supervisor asks, who sends no key to a port that nobody may have yet: sizes of a batch and a rollout."""
BROWSER_HEADERS = ("origin", "sec-fetch-")
"""What begins like this comes from a browser, which has no business here."""


@dataclass(frozen=True)
class Settings:
    """What the door asks of a request."""

    uids: frozenset[int] | None
    """Users who may call; null: everyone, from other machines too."""
    hosts: frozenset[str]
    """Names that the Host header may have."""
    max_body: int
    """Bytes of a body, as sent and unpacked."""
    token: str = ""
    """The run's; empty: there is none."""
    keys: frozenset[str] = frozenset()
    """Who has one of them may call from another machine; empty: only this machine reaches us."""

    @classmethod
    def from_env(cls, env: Mapping[str, str], bound: str) -> Settings:
        """Read `env`, for a server bound to the address `bound`.

        Raises:
            ValueError: a variable makes no sense; says which.
        """
        hosts = allowed_hosts(bound, hosts_in(env, ENV_ALLOWED_HOSTS))
        token = env.get(ENV_TOKEN, "")
        return cls(_uids(env), hosts, _max_body(env), token, door_keys(bound, token))


def _uids(env: Mapping[str, str]) -> frozenset[int] | None:
    given = env.get(ENV_UIDS, "").strip()
    if given == "any":
        return None
    words = [word.strip() for word in given.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"{ENV_UIDS}={given!r}: numbers of users with commas between them, or `any`")
    return frozenset({ROOT, os.geteuid(), *map(int, words)})


def _max_body(env: Mapping[str, str]) -> int:
    given = env.get(ENV_MAX_BODY) or str(MAX_BODY_MIB)
    if not given.isdecimal() or int(given) == 0:
        raise ValueError(f"{ENV_MAX_BODY}={given!r}: a number of MiB from 1 is needed")
    return int(given) * 1024 * 1024


class Door:
    """ASGI application around `app`."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # begin and end of the server
            return
        connection = connection_of(scope)
        with connection.request() if connection else nullcontext():
            await self._request(connection, scope, receive, send)

    async def _request(self, connection: Connection | None, scope: Scope, receive: Receive, send: Send) -> None:
        keyed = opens(Headers(scope=scope).get("authorization"), self._settings.keys)
        if connection and keyed:
            connection.prove()
        refused = (None if keyed else self._foreign(connection, scope)) or self._misaddressed(scope)
        if refused:
            # What it still sends is of no interest.
            headers = {"Connection": "close"}
            await JSONResponse({"error": refused[1]}, refused[0], headers)(scope, receive, send)
            return
        try:
            timeout_s = connection.body_timeout_s if connection else None
            scope, receive = await read_body(scope, receive, self._settings.max_body, timeout_s=timeout_s)
        except BodyError as error:
            fix = f": send fewer groups at a time, or raise {ENV_MAX_BODY} (under [api.env] of the profile)"
            reason = f"{error}{fix if error.status == 413 else ''}"
            await JSONResponse({"error": reason}, error.status)(scope, receive, send)
        except GoneError:
            return
        else:
            await self._app(scope, receive, send)

    def _foreign(self, connection: Connection | None, scope: Scope) -> tuple[int, str] | None:
        """Why the process at the other end may not call; None where it may."""
        keys = self._settings.keys
        if self._settings.uids is None or (connection and connection.own) or (keys and scope["path"] == HEALTH):
            return None
        if connection and (uid := connection.uid) is not None:
            may_call = f"user {uid} may call with {ENV_UIDS}={uid} in run-api's environment"
            return 403, f"run-api serves its own user; {may_call}"
        if keys:
            return key_refusal("run-api")
        return 403, (
            "run-api serves processes of its own user on this machine, and the system does not say whose this "
            f"connection is; {ENV_UIDS}=any lets everyone in"
        )

    def _misaddressed(self, scope: Scope) -> tuple[int, str] | None:
        """Why a request is none of a stack's."""
        headers = Headers(scope=scope)
        if misnamed := host_refusal(headers.get("host"), self._settings.hosts):
            return misnamed
        if name := next((name for name in headers if name.startswith(BROWSER_HEADERS)), ""):
            return 403, f"the header {name} comes from a browser, and run-api serves none: ask with curl"
        token, given = self._settings.token, headers.get(TOKEN_HEADER, "")
        trusted = bool(token) and hmac.compare_digest(given.encode("latin-1", "replace"), token.encode())
        if scope["path"].rstrip("/") == RESET and not trusted:
            return 403, (
                f"{RESET} makes run-api forget trainer and environments: send the run's token in the header "
                f"{TOKEN_HEADER}, or restart it with its partners (atropos-tui restart api)"
            )
        return None
