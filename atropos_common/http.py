"""What every HTTP client of this project has in common, and by which names our servers let themselves be called.

A web page whose name leads to this machine sends its own name in the Host header: that is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import httpx

from atropos_common.run_dir import ENV_ALLOWED_HOSTS

LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=2.0)
"""uvicorn, as run-api and a stock vLLM have it, closes a connection that was idle for five seconds. httpx's limit is
the same, and a request sent at that very moment is lost without an answer. A client with a transport of its own takes
no heed of its own `limits`: they are the transport's then."""

AFTER_HEADER = "X-Atropos-After"
"""Of a `GET /batch` of our trainer: the name of the batch that it had last, empty for none. Our run-api lets that one
go, and keeps the next until it is named here in turn; others do not know the header."""
BATCH_HEADER = "X-Atropos-Batch"
"""Of the answer: the name of a batch that run-api keeps."""

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::"})


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


def origin_refusal(header: str | None, hosts: frozenset[str]) -> tuple[int, str] | None:
    """HTTP status and reason where a web page of another site asks; null for our own pages and for programs."""
    if header is None or host_name(header.partition("://")[2]) in hosts:
        return None
    return (
        403,
        f"the page {header!r} is of another site, which may ask nothing here (further names: {ENV_ALLOWED_HOSTS})",
    )


def host_refusal(header: str | None, hosts: frozenset[str]) -> tuple[int, str] | None:
    """HTTP status and reason where a Host header is missing or names none of `hosts`; null where it is right."""
    if not header:
        return 400, "the Host header is missing"
    if host_name(header) in hosts:
        return None
    return 403, (
        f"Host {header!r} is not this server's: use localhost or the bound address (further names: {ENV_ALLOWED_HOSTS})"
    )
