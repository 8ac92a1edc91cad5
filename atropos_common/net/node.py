"""Address and network interface of this machine, as other machines of a run reach it."""

from __future__ import annotations

import contextlib
import os
import socket

import psutil

from atropos_common.system.run_dir import ENV_NODE_ADDRESS


class NoSuchAddress(ValueError):
    """ATROPOS_NODE_ADDRESS names an address of another machine."""


def address_here() -> str:
    """Numeric address under which other machines reach this one.

    Raises:
        NoSuchAddress: ATROPOS_NODE_ADDRESS is not of this machine.
    """
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
    interfaces = psutil.net_if_addrs().items()
    return next(
        (name for name, found in interfaces if any(each.address == number for each in found)), "lo"
    )
