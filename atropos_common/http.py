"""What every HTTP client of this project has in common, and by which names our servers let themselves be called.

A web page whose name leads to this machine sends its own name in the Host header: that is refused.

A server that other machines reach asks for a key, in the way in which each client can be told one: the API key of an
OpenAI client (`Authorization: Bearer KEY`), or the password in an address (`http://atropos:KEY@HOST`, sent as Basic).
"""

from __future__ import annotations

import base64
import binascii
import functools
import hmac
import ssl
from collections.abc import Collection, Iterable, Mapping

import httpx

from atropos_common.run_dir import ENV_ALLOWED_HOSTS, ENV_DOOR_KEY
from atropos_common.transfer import is_loopback

LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=2.0)
"""uvicorn, as run-api and a stock vLLM have it, closes a connection that was idle for five seconds. httpx's limit is
the same, and a request sent at that very moment is lost without an answer. A client with a transport of its own takes
no heed of its own `limits`: they are the transport's then."""


def certificates(url: str) -> ssl.SSLContext | bool:
    """What a client of `url` takes for httpx's `verify`.

    Every client reads the machine's certificates, 20 to 100 ms of a core, also one that never meets TLS. A client of an
    http:// address goes without; led to https:// all the same it trusts nobody.
    """
    return True if url.lower().startswith("https:") else _no_certificates()


@functools.cache
def _no_certificates() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


AFTER_HEADER = "X-Atropos-After"
"""Of a `GET /batch` of our trainer: the name of the batch that it had last, empty for none. Our run-api lets that one
go, and keeps the next until it is named here in turn; others do not know the header."""
BATCH_HEADER = "X-Atropos-Batch"
"""Of the answer: the name of a batch that run-api keeps."""

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::"})


DOOR_USER = "atropos"
"""Stands before the key in an address; any other does as well."""


def door_key(token: str) -> str:
    """The key that goes with a run's token. Whoever has it cannot find the token, nor what that opens."""
    return hmac.digest(token.encode(), b"door", "sha256").hex()


def door_headers(env: Mapping[str, str]) -> dict[str, str]:
    """What a component of a run sends to the run's servers, as `env` says: nothing where all is on one machine."""
    return {"Authorization": f"Bearer {key}"} if (key := env.get(ENV_DOOR_KEY)) else {}


def door_keys(bound: str, token: str) -> frozenset[str]:
    """What opens a server bound to `bound`; empty where only this machine reaches it, or there is no token."""
    return frozenset() if not token or is_loopback(bound) else run_keys(token)


def run_keys(token: str) -> frozenset[str]:
    """What a request may carry to prove that it belongs to the run of `token`."""
    return frozenset({token, door_key(token)})


def opens(authorization: str | None, keys: Collection[str]) -> bool:
    """Whether an Authorization header carries one of `keys`."""
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode("latin-1").partition(":")[2]
        except (binascii.Error, ValueError):
            return False
    elif scheme.lower() != "bearer":
        return False
    said = given.strip().encode("latin-1", "replace")
    return any(hmac.compare_digest(said, key.encode()) for key in keys)


def key_refusal(what: str) -> tuple[int, str]:
    """HTTP status and reason for a stranger at a server that other machines reach."""
    return 401, (
        f"{what} is reached by other machines, so it asks for the run's key: send it as `Authorization: Bearer KEY` "
        "(components have it in ATROPOS_DOOR_KEY; the token that the run was started with does as well)"
    )


def host_name(header: str) -> str:
    """Host header without its port, lower case, IPv6 without brackets."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0] if header.count(":") == 1 else header


def allowed_hosts(bound: str | None, extra: Iterable[str] = ()) -> frozenset[str]:
    """Names a Host header may carry for a server bound to `bound`."""
    own = set() if bound is None or bound in _WILDCARD_HOSTS else {host_name(bound)}
    return LOOPBACK_HOSTS | own | frozenset(extra)


def hosts_in(env: Mapping[str, str], name: str) -> frozenset[str]:
    """The hosts that the variable `name` of `env` lists, with commas between them; lower case."""
    return frozenset(host.strip().lower() for host in env.get(name, "").split(",") if host.strip())


def page_refusal(headers: Mapping[str, str], hosts: frozenset[str]) -> tuple[int, str] | None:
    """HTTP status and reason where a web page of another site asks; None for our own pages and for programs.

    `Origin` names the site of a script's request. A tag such as `<img>` sends none, but the browser adds
    `Sec-Fetch-Site` to it.
    """
    if (origin := headers.get("origin")) is not None and host_name(origin.partition("://")[2]) not in hosts:
        page = f"the page {origin!r}"
    elif (site := headers.get("sec-fetch-site", "none")) not in ("same-origin", "none"):
        page = f"a page (Sec-Fetch-Site: {site})"
    else:
        return None
    return 403, f"{page} of another site may ask nothing here (further names: {ENV_ALLOWED_HOSTS})"


def host_refusal(header: str | None, hosts: frozenset[str]) -> tuple[int, str] | None:
    """HTTP status and reason where a Host header is missing or names none of `hosts`; null where it is right."""
    if not header:
        return 400, "the Host header is missing"
    if host_name(header) in hosts:
        return None
    return 403, (
        f"Host {header!r} is not this server's: use localhost or the bound address (further names: {ENV_ALLOWED_HOSTS})"
    )
