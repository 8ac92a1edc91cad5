"""Settings of HTTP clients, and the servers' checks of Host, Origin and key.

A server that other machines reach requires a key: as `Authorization: Bearer KEY`, or as the
password in its URL, `http://atropos:KEY@HOST`.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hmac
import ssl
from collections.abc import Collection, Iterable, Mapping

import httpx

from atropos_common.net.ports import is_loopback
from atropos_common.protocol.bridge import TOKEN_HEADER
from atropos_common.system.run_dir import ENV_ALLOWED_HOSTS, ENV_RUN_KEY

# Below uvicorn's 5 s: with an equal expiry, a request at that moment is lost. A client with its own
# transport ignores `limits`: pass them to the transport.
LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=2.0)


def certificates(url: str) -> ssl.SSLContext | bool:
    """Value of httpx's `verify` for a client of `url`."""
    # `True` lets httpx load the machine's certificates.
    return True if url.lower().startswith("https:") else _no_certificates()


@functools.cache
def _no_certificates() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


AFTER_HEADER = "X-Atropos-After"
"""In `GET /batch`: name of the previous batch, which run-api drops; empty for none."""
BATCH_HEADER = "X-Atropos-Batch"
"""Name of a batch that run-api keeps until it is named in `AFTER_HEADER`."""

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::"})


KEY_USER = "atropos"


def run_key(token: str) -> str:
    """Key of a run, from which its token cannot be computed."""
    # One-way: an environment that has the key cannot compute the token. The label stays as it is,
    # since a running stack and a newer command must derive the same key.
    return hmac.digest(token.encode(), b"door", "sha256").hex()


def key_headers(env: Mapping[str, str]) -> dict[str, str]:
    """Headers of a component for the run's servers; empty on a single machine."""
    return {"Authorization": f"Bearer {key}"} if (key := env.get(ENV_RUN_KEY)) else {}


def accepted_keys(bound: str, token: str) -> frozenset[str]:
    """Keys that a server accepts; empty without a token or on the loopback."""
    return frozenset() if not token or is_loopback(bound) else run_keys(token)


def run_keys(token: str) -> frozenset[str]:
    """Secrets of the requests of a run."""
    return frozenset({token, run_key(token)})


def carries_key(authorization: str | None, keys: Collection[str]) -> bool:
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
    """True if a request carries the run's token."""
    given = headers.get(TOKEN_HEADER, "")
    # Constant time, so that the answer's timing does not reveal the token.
    return bool(token) and hmac.compare_digest(given.encode("latin-1", "replace"), token.encode())


def key_refusal(what: str) -> tuple[int, str]:
    """HTTP status and reason."""
    return 401, (
        f"{what} is open to other machines, so it requires the run's key: send it as "
        "`Authorization: Bearer KEY` (components have it in ATROPOS_RUN_KEY; the token that the "
        "run was started with works too)"
    )


def host_name(header: str) -> str:
    """Lower case, without port and brackets."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    # More than one colon: an IPv6 address without brackets, which has no port.
    return header.partition(":")[0] if header.count(":") == 1 else header


def allowed_hosts(bound: str | None, extra: Iterable[str] = ()) -> frozenset[str]:
    """Names that a Host header may carry."""
    own = set() if bound is None or bound in _WILDCARD_HOSTS else {host_name(bound)}
    return LOOPBACK_HOSTS | own | frozenset(extra)


def hosts_in(env: Mapping[str, str], name: str) -> frozenset[str]:
    """Hosts in a variable, separated by commas."""
    return frozenset(host.strip().lower() for host in env.get(name, "").split(",") if host.strip())


def page_refusal(headers: Mapping[str, str], hosts: frozenset[str]) -> tuple[int, str] | None:
    """HTTP status and reason for a request from a page of another site."""
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
    """HTTP status and reason unless a Host header names one of `hosts`."""
    if not header:
        return 400, "the Host header is missing"
    if host_name(header) in hosts:
        return None
    return 403, (
        f"Host {header!r} is not this server's: use localhost or the bound address (further "
        f"names: {ENV_ALLOWED_HOSTS})"
    )
