"""Auth middleware in front of atroposlib's application, which itself accepts every caller.

It checks the caller's user, the Host header, browser headers, `/reset_data` and the body's size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_common.net.body import BodyError, GoneError, read_body
from atropos_common.net.connections import Connection, connection_of
from atropos_common.net.http import (
    accepted_keys,
    allowed_hosts,
    carries_key,
    has_token,
    host_refusal,
    hosts_in,
    key_refusal,
)
from atropos_common.protocol.bridge import TOKEN_HEADER
from atropos_common.system.run_dir import ENV_ALLOWED_HOSTS, ENV_TOKEN

ENV_UIDS = "ATROPOS_API_UIDS"
ENV_MAX_BODY = "ATROPOS_API_MAX_BODY_MIB"
# A token takes 34 bytes of JSON (id 7, mask 7, logprob 20), so 16 groups of 16 completions of
# 32,768 tokens in one body are 285 MB.
MAX_BODY_MIB = 400
# root can read every process's memory anyway, so refusing it protects nothing.
ROOT = 0
# A GET that makes run-api forget trainer, environments and queue.
RESET = "/reset_data"
# The supervisor's health check asks without a key: another process may hold the port.
HEALTH = "/info"
# Prefixes of headers that only browsers send. All pages of a user's browser reach the loopback.
BROWSER_HEADERS = ("origin", "sec-fetch-")


@dataclass(frozen=True)
class Settings:
    uids: frozenset[int] | None
    """None: everyone, from other machines too."""
    hosts: frozenset[str]
    """Accepted names in the Host header."""
    max_body: int
    """Bytes of a body, both as sent and unpacked."""
    token: str = ""
    """The run's token; empty if there is none."""
    keys: frozenset[str] = frozenset()
    """Keys that admit other machines."""

    @classmethod
    def from_env(cls, env: Mapping[str, str], bound: str) -> Settings:
        """Read the settings of a server that is bound to the address `bound`.

        Raises:
            ValueError: a variable is invalid; the message names it.
        """
        hosts = allowed_hosts(bound, hosts_in(env, ENV_ALLOWED_HOSTS))
        token = env.get(ENV_TOKEN, "")
        return cls(_uids(env), hosts, _max_body(env), token, accepted_keys(bound, token))


def _uids(env: Mapping[str, str]) -> frozenset[int] | None:
    given = env.get(ENV_UIDS, "").strip()
    if given == "any":
        return None
    words = [word.strip() for word in given.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"{ENV_UIDS}={given!r}: give user numbers separated by commas, or `any`")
    return frozenset({ROOT, os.geteuid(), *map(int, words)})


def _max_body(env: Mapping[str, str]) -> int:
    given = env.get(ENV_MAX_BODY) or str(MAX_BODY_MIB)
    if not given.isdecimal() or int(given) == 0:
        raise ValueError(f"{ENV_MAX_BODY}={given!r}: give a number of MiB, 1 or more")
    return int(given) * 1024 * 1024


class AuthMiddleware:
    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    # Every request passes here first; `connection` is None for a server without our protocol class.
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # start-up and shutdown of the server
            return
        connection = connection_of(scope)
        # Suspend the connection's deadline for the next request while this one runs.
        with connection.request() if connection else nullcontext():
            await self._request(connection, scope, receive, send)

    async def _request(
        self, connection: Connection | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        keyed = carries_key(Headers(scope=scope).get("authorization"), self._settings.keys)
        # A key proves the connection for its further requests, which then have the limits of the
        # run's own.
        if connection and keyed:
            connection.prove()
        # A key replaces the check of the user, never the checks of the request itself.
        refused = (None if keyed else self._foreign(connection, scope)) or self._misaddressed(scope)
        if refused:
            # The rest of the request is not read, so the connection cannot be used again.
            headers = {"Connection": "close"}
            await JSONResponse({"error": refused[1]}, refused[0], headers)(scope, receive, send)
            return
        try:
            timeout_s = connection.body_timeout_s if connection else None
            scope, receive = await read_body(
                scope, receive, self._settings.max_body, timeout_s=timeout_s
            )
        except BodyError as error:
            fix = f": send fewer groups at a time, or raise {ENV_MAX_BODY} under [api.env]"
            reason = f"{error}{fix if error.status == 413 else ''}"
            await JSONResponse({"error": reason}, error.status)(scope, receive, send)
        except GoneError:
            return
        else:
            await self._app(scope, receive, send)

    def _foreign(self, connection: Connection | None, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason against this caller; None if it may call."""
        keys, own = self._settings.keys, connection is not None and connection.own
        if self._settings.uids is None or own or (keys and scope["path"] == HEALTH):
            return None
        if connection and (uid := connection.uid) is not None:
            may_call = f"user {uid} may call with {ENV_UIDS}={uid} in run-api's environment"
            return 403, f"run-api serves its own user; {may_call}"
        if keys:
            return key_refusal("run-api")
        return 403, (
            "run-api serves its own user, and the owner of this connection is unknown; "
            f"{ENV_UIDS}=any admits everyone"
        )

    def _misaddressed(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason against the request itself; None if it is fine."""
        headers = Headers(scope=scope)
        if misnamed := host_refusal(headers.get("host"), self._settings.hosts):
            return misnamed
        if name := next((name for name in headers if name.startswith(BROWSER_HEADERS)), ""):
            return 403, f"the header {name} comes from a browser: run-api serves none, use curl"
        if scope["path"].rstrip("/") == RESET and not has_token(headers, self._settings.token):
            return 403, (
                f"{RESET} makes run-api forget trainer and environments: send the run's token in "
                f"the header {TOKEN_HEADER}, or run: atropos-tui restart api"
            )
        return None
