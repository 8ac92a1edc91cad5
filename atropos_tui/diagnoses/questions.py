"""HTTP requests to the servers of a run, with limits on time and size: a user's program may run
there."""

from __future__ import annotations

import os
import time

import httpx

from atropos_common.net.http import LIMITS, certificates, key_headers

RESPONSE_TIMEOUT_S = 10.0
"""Limit of a whole response, in seconds."""
MOST_BYTES = 64 * 1024 * 1024
"""Limit of a response body; a group can be large."""


def asking(url: str, timeout_s: float) -> httpx.Client:
    """Return a client without proxy, with the run's key for other machines."""
    return httpx.Client(
        base_url=url,
        timeout=timeout_s,
        limits=LIMITS,
        trust_env=False,
        follow_redirects=True,
        headers=key_headers(os.environ),
        verify=certificates(url or "http:"),
    )


def fetch(http: httpx.Client, url: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the body of GET `url`.

    Raises:
        httpx.HTTPError: no response, a status other than 200, or a body over the limits.
    """
    give_up, parts, size = time.monotonic() + RESPONSE_TIMEOUT_S, list[bytes](), 0
    with http.stream("GET", url) as answer:
        answer.raise_for_status()
        for part in answer.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > most_bytes or time.monotonic() > give_up:
                raise httpx.ReadTimeout(f"no end after {size:,} bytes")
    return b"".join(parts)


def fetch_page(http: httpx.Client, url: str, most_bytes: int = MOST_BYTES) -> str | None:
    try:
        return fetch(http, url, most_bytes).decode(errors="replace")
    except (httpx.HTTPError, OSError):
        return None
