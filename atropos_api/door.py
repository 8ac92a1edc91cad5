"""The door before atroposlib's application, for every request: whose process calls, by which name, from a browser or
not, what it must not reach, and how much it sends.

run-api itself asks nobody who he is and answers every page of the web (CORS `*`), while the loopback is shared by all
users of a machine, and by its browsers. Refused is what no part of a stack does; what is let in finds run-api as it is.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_api import peer
from atropos_api.body import BodyError, GoneError, read_body
from atropos_api.settings import ENV_UIDS, Settings
from atropos_common.bridge import TOKEN_HEADER
from atropos_common.http import host_refusal

RESET = "/reset_data"
"""Forgets trainer, environments and queue, and is a GET."""
BROWSER_HEADERS = ("origin", "sec-fetch-")
"""What begins like this comes from a browser, which has no business here."""


class Door:
    """ASGI application around `app`."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._uid = peer.way()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # begin and end of the server
            return
        refused = self._stranger(scope) or self._misaddressed(scope)
        if refused:
            # What it still sends is of no interest.
            headers = {"Connection": "close"}
            await JSONResponse({"error": refused[1]}, refused[0], headers)(scope, receive, send)
            return
        try:
            scope, receive = await read_body(scope, receive, self._settings.max_body)
        except BodyError as error:
            await JSONResponse({"error": str(error)}, error.status)(scope, receive, send)
        except GoneError:
            return
        else:
            await self._app(scope, receive, send)

    def _stranger(self, scope: Scope) -> tuple[int, str] | None:
        """Why the process at the other end may not call."""
        allowed = self._settings.uids
        if allowed is None:
            return None
        try:
            uid = self._uid(scope["client"], scope["server"])
        except (peer.UnknownPeerError, TypeError):  # TypeError: no address
            return 403, (
                "run-api serves processes of its own user on this machine, and the system does not say whose this "
                f"connection is; {ENV_UIDS}=any lets everyone in"
            )
        if uid in allowed:
            return None
        return 403, f"run-api serves its own user; user {uid} may call with {ENV_UIDS}={uid} in run-api's environment"

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
