"""Limits for a server's foreign connections: their number, and the time to send a request.

A connection is the run's own if this user holds its other end, or once a request carries the run's
key. Any other is foreign.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

PER_PEER = 64
"""Foreign connections of one user, or of one address of another machine."""
IN_ALL = 256
"""Foreign connections together."""
# Seconds for a whole request head, idle time included. aiohttp keeps an idle connection for 15 s,
# and the side that opened a connection should close it.
HEAD_S = 20.0
# Seconds for the body of a request.
BODY_S = 60.0
# Seconds between two log lines about closed connections.
REPORT_S = 60.0
SCOPE_KEY = "atropos_connection"
"""Key of the `Connection` in an ASGI scope."""

logger = logging.getLogger("uvicorn.error")


class Connection:
    """One connection; `own` becomes True with `prove`."""

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
        """User at the other end; None if remote or unknown."""
        self.peer_name = address if uid is None else f"user {uid}"
        self.busy = 0
        """Requests in flight; more than one with pipelining."""
        self.close = close
        self._limits = limits
        self._over = False
        self._deadline: asyncio.TimerHandle | None = None
        if not own:
            self._expect_head()

    @property
    def body_timeout_s(self) -> float | None:
        """Seconds for a request body; None: no limit."""
        return None if self.own else BODY_S

    def prove(self) -> None:
        """Make the connection the run's own: a request carried the key."""
        if not self.own:
            self.own = True
            self._limits.forget(self)
            self._cancel()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Mark one request. The deadline of the next head starts at its end."""
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
    """Logger that is silent until the connection is the run's own: other users must not fill the
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
    """Foreign connections of one server, and the uvicorn protocol that counts them."""

    def __init__(self, ours: Collection[int] | None = None) -> None:
        """`ours`: uids of the run's own connections; None: this user and root."""
        self._ours = frozenset({os.geteuid(), 0} if ours is None else ours)
        self._uid_of = uid_lookup()
        self._foreign: dict[Connection, None] = {}  # in the order of arrival
        self._closed = 0
        self._reported_at = float("-inf")

    def accept(
        self, client: Address | None, server: Address | None, close: Callable[[], None]
    ) -> Connection | None:
        """Register a connection. Return None if it is over a limit and no idle one could give way.

        Args:
            client: the other end; None for a Unix socket.
            close: closes the connection at once.
        """
        # A Unix socket: only this user can open it.
        if client is None or server is None:
            return Connection(self, "a Unix socket", os.geteuid(), close, own=True)
        uid = self._uid(client, server)
        if uid in self._ours:
            return Connection(self, client[0], uid, close, own=True)
        new = Connection(self, client[0], uid, close, own=False)
        of_peer = [each for each in self._foreign if each.peer_name == new.peer_name]
        full = of_peer if len(of_peer) >= PER_PEER else [*self._foreign]
        if full is of_peer or len(full) >= IN_ALL:
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

    def _uid(self, client: Address, server: Address) -> int | None:
        try:
            return self._uid_of(client, server)
        except (UnknownPeerError, OSError):
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
    """The connection of an ASGI request; None without `ConnectionLimits`."""
    found = (scope.get("state") or {}).get(SCOPE_KEY)
    return found if isinstance(found, Connection) else None


# `sock_diag` answers for one socket in microseconds. Without it (no kernel module, a sandbox),
# /proc/net/tcp lists every connection: 3 ms at least.
Address = tuple[str, int]
IP = IPv4Address | IPv6Address

PROC_NET = Path("/proc/self/net")
LISTENING = 10
# NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, and any state, interface or cookie.
_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ANY = 4, 20, 1, 0xFFFFFFFF
# nlmsghdr: length, type, flags, sequence, port.
_HEADER = struct.Struct("=IHHII")
# inet_diag_req_v2: family, protocol, extensions, padding, states; ports, two addresses, interface,
# cookie.
_QUESTION = struct.Struct("=BBBBI4s16s16sIII")
# inet_diag_msg: family, state, timer, retransmits, the same socket, expiry, two queues, uid, inode.
_ANSWER = struct.Struct("=BBBB48sIIIII")


class UnknownPeerError(Exception):
    pass


def uid_lookup() -> Callable[[Address, Address], int]:
    """Return the fastest function from the two addresses (theirs, ours) to the peer's uid.

    It raises `UnknownPeerError` if that end is closed, remote or not reported.
    """
    with contextlib.suppress(OSError, UnknownPeerError):
        # Try it on a connection of our own: a sandbox may accept the socket but not answer.
        kernel = SockDiag()
        with (
            socket.create_server(("127.0.0.1", 0)) as other,
            socket.create_connection(other.getsockname()) as own,
        ):
            if kernel.uid(own.getsockname(), own.getpeername()) == os.geteuid():
                return kernel.uid
    return uid_in_proc


class SockDiag:
    """Queries by `sock_diag`.

    Raises:
        OSError: the system has no such socket.
    """

    def __init__(self) -> None:
        self._line = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG)
        self._asked = 0

    def uid(self, client: Address, server: Address) -> int:
        theirs, ours = _ip(client), _ip(server)
        family = socket.AF_INET if theirs.version == 4 else socket.AF_INET6
        both = (
            struct.pack("!HH", client[1], server[1]),
            theirs.packed.ljust(16, b"\0"),
            ours.packed.ljust(16, b"\0"),
        )
        question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY, *both, 0, _ANY, _ANY)
        self._asked = (self._asked + 1) % _ANY
        size = _HEADER.size + len(question)
        self._line.send(_HEADER.pack(size, _BY_FAMILY, _REQUEST, self._asked, 0) + question)
        while True:  # the kernel answers at once; skip answers to earlier, interrupted queries
            answer = self._line.recv(8192)
            _, kind, _, number, _ = _HEADER.unpack_from(answer)
            if number == self._asked:
                break
        # An error message: the kernel does not know the socket.
        if kind != _BY_FAMILY:
            raise UnknownPeerError
        found = _ANSWER.unpack_from(answer, _HEADER.size)
        return _held(state=found[1], uid=found[8], inode=found[9])


def uid_in_proc(client: Address, server: Address) -> int:
    """From /proc/net/tcp and tcp6."""
    theirs, ours = _ip(client), _ip(server)
    for table, mapped in (("tcp", False), ("tcp6", True)):
        ends = (_shown(theirs, client[1], mapped), _shown(ours, server[1], mapped))
        with contextlib.suppress(OSError):
            rows = (PROC_NET / table).read_bytes()
            if (at := rows.find(b" %s %s " % ends)) >= 0:
                # Columns: local and remote address, state, queues, timer, retransmits, uid,
                # timeout, inode.
                fields = rows[at : rows.find(b"\n", at)].split()
                return _held(state=int(fields[2], 16), uid=int(fields[6]), inode=int(fields[8]))
    raise UnknownPeerError


def _held(*, state: int, uid: int, inode: int) -> int:
    # A closed socket has no inode, and may be listed as root's.
    if inode == 0 or state == LISTENING:
        raise UnknownPeerError
    return uid


def _ip(address: Address) -> IP:
    try:
        found = ipaddress.ip_address(address[0].partition("%")[0])
    except ValueError:
        raise UnknownPeerError from None
    # A server on `::` sees IPv4 callers as `::ffff:a.b.c.d`.
    return getattr(found, "ipv4_mapped", None) or found


def _shown(ip: IP, port: int, mapped: bool) -> bytes:
    """As the tables print it: words in this machine's byte order. `mapped`: IPv4 in tcp6's form."""
    packed = b"\0" * 10 + b"\xff\xff" + ip.packed if mapped and ip.version == 4 else ip.packed
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return b"%s:%04X" % (b"".join(b"%08X" % word for word in words), port)
