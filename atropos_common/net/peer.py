"""User of the process at the other end of a local connection.

The kernel answers by `sock_diag` in microseconds. Otherwise `/proc/net/tcp` has the data, but lists
every connection: 3 ms at least.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

Address = tuple[str, int]
IP = IPv4Address | IPv6Address

PROC_NET = Path("/proc/self/net")
LISTENING = 10
"""State of a socket without another end."""
_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ANY = 4, 20, 1, 0xFFFFFFFF
"""NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, and any state, interface or cookie."""
_HEADER = struct.Struct("=IHHII")
"""nlmsghdr: length, type, flags, sequence, port."""
_QUESTION = struct.Struct("=BBBBI4s16s16sIII")
"""inet_diag_req_v2: family, protocol, extensions, padding, states; ports, two addresses,
interface, cookie."""
_ANSWER = struct.Struct("=BBBB48sIIIII")
"""inet_diag_msg: family, state, timer, retransmits, the same socket, expiry, two queues, uid,
inode."""


class UnknownPeerError(Exception):
    """The system does not report the owner of the socket."""


def way() -> Callable[[Address, Address], int]:
    """The fastest function that returns the uid at the other end, from the addresses of that end
    and ours.

    It raises `UnknownPeerError` if the other end is closed, on another machine, or not reported.
    """
    with contextlib.suppress(OSError, UnknownPeerError):
        # Try it on a connection of our own: a sandbox may accept the socket but not answer.
        kernel = Kernel()
        with (
            socket.create_server(("127.0.0.1", 0)) as other,
            socket.create_connection(other.getsockname()) as own,
        ):
            if kernel.uid(own.getsockname(), own.getpeername()) == os.geteuid():
                return kernel.uid
    return listed


class Kernel:
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


def listed(client: Address, server: Address) -> int:
    """From /proc/net/tcp and tcp6; see `way`."""
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
    """`uid` if a process holds the socket: a closed one has no inode, and may be listed as
    root's."""
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
    """Words in this machine's byte order; `mapped`: IPv4 in tcp6's form."""
    packed = b"\0" * 10 + b"\xff\xff" + ip.packed if mapped and ip.version == 4 else ip.packed
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return b"%s:%04X" % (b"".join(b"%08X" % word for word in words), port)
