"""Settings of all HTTP clients, and the servers' checks of Host, Origin and key.

A web page whose domain resolves to this machine sends its own name in the Host header. A server
that other machines reach requires a key: `Authorization: Bearer KEY`, or the password in a URL.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hmac
import ssl
from collections.abc import Collection, Iterable, Mapping

import httpx

from atropos_common.broadcast.transfer import is_loopback
from atropos_common.protocol.bridge import TOKEN_HEADER
from atropos_common.system.run_dir import ENV_ALLOWED_HOSTS, ENV_DOOR_KEY

LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=2.0)
"""uvicorn closes a connection after five idle seconds, httpx's own default, and a request at
that moment is lost. A client with its own transport ignores `limits`."""


def certificates(url: str) -> ssl.SSLContext | bool:
    """httpx's `verify` for a client of `url`. Reading the machine's certificates takes 20 to 100
    ms; an http:// address needs none."""
    # `True` lets httpx load the machine's certificates.
    return True if url.lower().startswith("https:") else _no_certificates()


@functools.cache
def _no_certificates() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


AFTER_HEADER = "X-Atropos-After"
"""Name of the previous batch in our trainer's `GET /batch`. Our run-api then drops that batch
and keeps the next one."""
BATCH_HEADER = "X-Atropos-Batch"
"""Name of a batch that run-api keeps."""

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::"})


DOOR_USER = "atropos"
"""User name before the key in a URL; any other works too."""


def door_key(token: str) -> str:
    """Key of a run, derived from its token, which it does not reveal."""
    # One-way: an environment that has the key cannot compute the token.
    return hmac.digest(token.encode(), b"door", "sha256").hex()


def door_headers(env: Mapping[str, str]) -> dict[str, str]:
    """Headers that a component sends to the run's servers; empty on a single machine."""
    return {"Authorization": f"Bearer {key}"} if (key := env.get(ENV_DOOR_KEY)) else {}


def door_keys(bound: str, token: str) -> frozenset[str]:
    """Keys that a server bound to `bound` accepts; empty if only this machine reaches it."""
    return frozenset() if not token or is_loopback(bound) else run_keys(token)


def run_keys(token: str) -> frozenset[str]:
    """Secrets that prove a request to belong to the run."""
    return frozenset({token, door_key(token)})


def opens(authorization: str | None, keys: Collection[str]) -> bool:
    """The Authorization header carries one of `keys`."""
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() == "basic":
        try:
            # The user name before the colon does not matter.
            given = base64.b64decode(given, validate=True).decode("latin-1").partition(":")[2]
        except (binascii.Error, ValueError):
            return False
    elif scheme.lower() != "bearer":
        return False
    key_given = given.strip().encode("latin-1", "replace")
    # Constant time, so that timing does not reveal the key.
    return any(hmac.compare_digest(key_given, key.encode()) for key in keys)


def has_token(headers: Mapping[str, str], token: str) -> bool:
    """The request carries the run's token."""
    given = headers.get(TOKEN_HEADER, "")
    # Constant time, so that the answer's timing does not reveal the token.
    return bool(token) and hmac.compare_digest(given.encode("latin-1", "replace"), token.encode())


def key_refusal(what: str) -> tuple[int, str]:
    """Status and reason for a request without the key."""
    return 401, (
        f"{what} is open to other machines, so it requires the run's key: send it as "
        f"`Authorization: Bearer KEY` "
        "(components have it in ATROPOS_DOOR_KEY; the token that the run was started with "
        "works too)"
    )


def host_name(header: str) -> str:
    """Host header without its port, lower case, IPv6 without brackets."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    # More than one colon: an IPv6 address without brackets, which has no port.
    return header.partition(":")[0] if header.count(":") == 1 else header


def allowed_hosts(bound: str | None, extra: Iterable[str] = ()) -> frozenset[str]:
    """Names in the Host header for a server bound to `bound`."""
    own = set() if bound is None or bound in _WILDCARD_HOSTS else {host_name(bound)}
    return LOOPBACK_HOSTS | own | frozenset(extra)


def hosts_in(env: Mapping[str, str], name: str) -> frozenset[str]:
    """Hosts in the variable `name`, separated by commas."""
    return frozenset(host.strip().lower() for host in env.get(name, "").split(",") if host.strip())


def page_refusal(headers: Mapping[str, str], hosts: frozenset[str]) -> tuple[int, str] | None:
    """Status and reason where a web page of another site asks.

    `Origin` names the site of a script's request. A tag such as `<img>` sends none, but the browser
    adds `Sec-Fetch-Site`.
    """
    if (origin := headers.get("origin")) is not None and host_name(
        origin.partition("://")[2]
    ) not in hosts:
        page = f"the page {origin!r}"
    elif (site := headers.get("sec-fetch-site", "none")) not in ("same-origin", "none"):
        page = f"a page (Sec-Fetch-Site: {site})"
    else:
        return None
    return 403, f"{page} of another site is refused (allow further names in {ENV_ALLOWED_HOSTS})"


def host_refusal(header: str | None, hosts: frozenset[str]) -> tuple[int, str] | None:
    """Status and reason where a Host header names none of `hosts`."""
    if not header:
        return 400, "the Host header is missing"
    if host_name(header) in hosts:
        return None
    return 403, (
        f"Host {header!r} is not this server's: use localhost or the bound address (further "
        f"names: {ENV_ALLOWED_HOSTS})"
    )
