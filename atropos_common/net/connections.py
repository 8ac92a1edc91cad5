"""Limits of a server for foreign connections: their number, and the time to send a request.

A connection is the run's own if a process of this user holds its other end, or once a request
carries the run's key. All others are foreign: a peer that opens thousands would lock the run out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from atropos_common.net import peer

PER_PEER = 64
"""Foreign connections of one local user, or of one remote address."""
IN_ALL = 256
"""Foreign connections of all peers."""
HEAD_S = 20.0
"""Seconds for a whole request head, idle time included. aiohttp keeps an idle connection for 15
s, and the side that opened it should close it."""
BODY_S = 60.0
"""Seconds for the body of a request."""
REPORT_S = 60.0
"""Seconds between two log lines about closed connections."""
SCOPE_KEY = "atropos_connection"
"""Key of a request's `Connection` in its ASGI scope."""

logger = logging.getLogger("uvicorn.error")


class Connection:
    """One connection of a server; `own` if the run owns it."""

    def __init__(
        self,
        limits: ConnectionLimits,
        address: str,
        uid: int | None,
        close: Callable[[], None],
        *,
        own: bool,
    ) -> None:
        self.own = own
        self.uid = uid
        """User of the process at the other end; None if unknown."""
        self.peer_name = address if uid is None else f"user {uid}"
        self.busy = 0
        """Requests being answered."""
        self.close = close
        self._limits = limits
        self._over = False
        self._deadline: asyncio.TimerHandle | None = None
        if not own:
            self._expect_head()

    @property
    def body_timeout_s(self) -> float | None:
        return None if self.own else BODY_S

    def prove(self) -> None:
        """One of its requests carried the key."""
        if not self.own:
            self.own = True
            self._limits.forget(self)
            self._cancel()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Mark one request; the deadline of the next head starts at its end."""
        self.busy += 1
        self._cancel()
        try:
            yield
        finally:
            self.busy -= 1
            if not (self.own or self.busy or self._over):
                self._expect_head()

    def end(self) -> None:
        self._over = True
        self._cancel()

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expect_head(self) -> None:
        # One timer per request head, not per byte: uvicorn's own idle timer stops at the first byte
        # that arrives.
        self._deadline = asyncio.get_running_loop().call_later(HEAD_S, self.close)


class _OwnRequests:
    """Logger that is silent about requests of foreign connections: other users must not fill the
    log."""

    def __init__(self, logger: logging.Logger, connection: Connection) -> None:
        self._logger, self._connection = logger, connection

    def info(self, *args: Any) -> None:
        if self._connection.own:
            self._logger.info(*args)

    def warning(self, *args: Any) -> None:
        if self._connection.own:
            self._logger.warning(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)


class ConnectionLimits:
    """The foreign connections of one server, and the uvicorn protocol that counts them."""

    def __init__(self, ours: Collection[int] | None = None) -> None:
        """`ours`: uids whose connections are the run's own; None: this user and root."""
        self._ours = frozenset({os.geteuid(), 0} if ours is None else ours)
        self._uid_of = peer.way()
        self._foreign: dict[Connection, None] = {}  # in the order of arrival
        self._closed = 0
        self._reported_at = float("-inf")

    def accept(
        self, client: peer.Address | None, server: peer.Address | None, close: Callable[[], None]
    ) -> Connection | None:
        """Register a new connection.

        Args:
            client: address of the other end; None for a Unix socket.
            close: closes the connection at once.

        Returns:
            None if it is over a limit and no idle one could give way.
        """
        # A Unix socket: only this user can open it.
        if client is None or server is None:
            return Connection(self, "a Unix socket", os.geteuid(), close, own=True)
        uid = self._uid(client, server)
        if uid in self._ours:
            return Connection(self, client[0], uid, close, own=True)
        new = Connection(self, client[0], uid, close, own=False)
        of_peer = [each for each in self._foreign if each.peer_name == new.peer_name]
        full = (
            of_peer
            if len(of_peer) >= PER_PEER
            else self._foreign
            if len(self._foreign) >= IN_ALL
            else None
        )
        if full is not None:
            self._report(new.peer_name)
            # The run's own components on other machines begin as foreign too: newcomers win over
            # those that wait.
            oldest = next((each for each in full if not each.busy), None)
            if oldest is None:
                new.end()
                return None
            self.forget(oldest)
            oldest.close()
        # Behind the others: the dictionary is the order of arrival.
        self._foreign[new] = None
        return new

    def forget(self, connection: Connection) -> None:
        self._foreign.pop(connection, None)

    def _uid(self, client: peer.Address, server: peer.Address) -> int | None:
        try:
            return self._uid_of(client, server)
        except (peer.UnknownPeerError, OSError):
            return None

    def _report(self, name: str) -> None:
        self._closed += 1
        # A flood makes one log line a minute.
        if (now := time.monotonic()) - self._reported_at >= REPORT_S:
            logger.warning(
                "closed %d connections without the run's key, the newest of %s", self._closed, name
            )
            self._reported_at, self._closed = now, 0

    def protocol(self) -> type[asyncio.Protocol]:
        """uvicorn's HTTP protocol with these limits, for `uvicorn.Config(http=...)`."""
        from uvicorn.protocols.http.auto import AutoHTTPProtocol

        limits = self

        class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
            client: Any
            server: Any
            app_state: dict[str, Any]
            logger: Any
            access_logger: Any
            connection: Connection | None = None

            def connection_made(self, transport: asyncio.Transport) -> None:
                super().connection_made(transport)
                self.connection = limits.accept(self.client, self.server, transport.abort)
                # `abort`, not `close`: nothing is flushed to a peer over its limit.
                if self.connection is None:
                    transport.abort()
                else:
                    # uvicorn copies this dictionary into the scope of each request of this
                    # connection.
                    self.app_state = self.app_state | {SCOPE_KEY: self.connection}
                    self.logger = _OwnRequests(self.logger, self.connection)
                    self.access_logger = _OwnRequests(self.access_logger, self.connection)

            def connection_lost(self, exc: Exception | None) -> None:
                if self.connection is not None:
                    limits.forget(self.connection)
                    self.connection.end()
                super().connection_lost(exc)

        return LimitedProtocol


def connection_of(scope: Mapping[str, Any]) -> Connection | None:
    """None where the server does not use `ConnectionLimits`."""
    found = (scope.get("state") or {}).get(SCOPE_KEY)
    return found if isinstance(found, Connection) else None
