"""Addresses of this machine, and a loopback port held for one program between its starts.

Otherwise another user could take the free port between two attempts, and receive prompts and the
run's token. The owner keeps a socket that is bound but does not listen. The kernel lets only
processes of the same user bind beside it, with SO_REUSEPORT; the program does so until it listens
(`listen`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping

from atropos_common.system.run_dir import ENV_HELD_PORT, ENV_NODE_ADDRESS

LOOPBACK = "127.0.0.1"
BACKLOG = 2048
"""Accept queue; uvicorn's default."""
# Another user's failing attempt to listen blocks a held port for a moment.
_TRY_S = 2.0
# Another loopback address, where none of our programs listens.
_BESIDE = "127.0.0.2"


def hold(port: int) -> socket.socket:
    """Hold `port` until the socket is closed.

    Raises:
        OSError: in use (EADDRINUSE).
    """
    held = socket.socket()
    try:
        # Ignore lingering connections of an earlier server.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, port))
        held.listen()  # fails if another program listens, and ends binds by SO_REUSEADDR
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.shutdown(socket.SHUT_RD)  # stop listening, but stay bound
    except OSError:
        held.close()
        raise
    return held


def is_held(port: int, env: Mapping[str, str]) -> bool:
    """True if the parent process holds `port` for this one."""
    return env.get(ENV_HELD_PORT) == str(port)


def bind(host: str, port: int, *, held: bool) -> socket.socket:
    """Bind without listening. `held`: the parent holds the port.

    Raises:
        OSError: in use.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(held))
        _persistently(lambda: bound.bind((host, port)), _TRY_S if held else 0.0)
    except OSError:
        bound.close()
        raise
    return bound


def listen(bound: socket.socket) -> None:
    """Listen, and end shared binds by programs of the same user.

    Raises:
        OSError: in use.
    """
    shared = bool(bound.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT))
    _persistently(lambda: bound.listen(BACKLOG), _TRY_S if shared else 0.0)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
    # The kernel caches that the sockets of a port share it, until one binds that does not.
    with contextlib.suppress(OSError), socket.socket() as beside:
        beside.bind((_BESIDE, bound.getsockname()[1]))


def _persistently(take: Callable[[], None], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return take()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.001)


class NoSuchAddress(ValueError):
    pass


def address_here() -> str:
    """Numeric address under which other machines reach this one.

    Raises:
        NoSuchAddress: ATROPOS_NODE_ADDRESS is not an address of this machine.
    """
    import psutil  # here, because completion must not pay for it

    named = os.environ.get(ENV_NODE_ADDRESS, "127.0.0.1")
    try:
        numbers = {str(found[4][0]) for found in socket.getaddrinfo(named, None)}
    except OSError as error:
        raise NoSuchAddress(
            f"{ENV_NODE_ADDRESS}: {named} is not a known address ({error.strerror})"
        ) from None
    if named in numbers and named.startswith("127."):
        return named
    own = {
        each.address for addresses in psutil.net_if_addrs().values() for each in addresses
    } & numbers
    beyond = sorted(number for number in own if not number.startswith("127."))
    if beyond:
        return beyond[0]
    # /etc/hosts often maps a machine's own name to these.
    if all(number.startswith("127.") for number in numbers):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect(("192.0.2.1", 9))  # datagram socket: this sends nothing
            return str(probe.getsockname()[0])
    raise NoSuchAddress(
        f"no network interface here has the address {named}: see {ENV_NODE_ADDRESS}, and `ip "
        f"address`"
    )


def interface_of(number: str) -> str:
    """Network interface with the address; the loopback if none has it."""
    import psutil  # here, because completion must not pay for it

    interfaces = psutil.net_if_addrs().items()
    return next(
        (name for name, found in interfaces if any(each.address == number for each in found)), "lo"
    )


def is_loopback(address: str) -> bool:
    """True if only this machine reaches `address`; nothing but `localhost` is resolved."""
    return address.lower() == "localhost" or any(each.is_loopback for each in _numbers(address))


def is_wildcard(address: str) -> bool:
    return any(each.is_unspecified for each in _numbers(address))


def _numbers(address: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        # AI_NUMERICHOST accepts every notation of a number (0x7f.1) but never asks DNS.
        (found, *_) = socket.getaddrinfo(address, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return []
    made = ipaddress.ip_address(str(found[4][0]).partition("%")[0])
    # `::ffff:127.0.0.1` is the loopback too.
    return [getattr(made, "ipv4_mapped", None) or made]
