"""HTTP requests to the servers of a run (run-api, engines), with limits on time and size.

A user's own program may run in their place, so no response is trusted to end:

with asking(url, timeout_s) as http: fetch(http, "/status")
"""

from __future__ import annotations

import os
import time

import httpx

from atropos_common.net.http import LIMITS, certificates, door_headers

PATIENCE_S = 10.0
"""Limit of a whole response, in seconds, however slowly it arrives."""
MOST_BYTES = 64 * 1024 * 1024
"""Limit of a response body; the newest group of run-api can be large."""


def asking(url: str, timeout_s: float) -> httpx.Client:
    """Return a client for servers of the run: no proxy, and with the run's key for other machines.

    Args:
        url: base of relative addresses; empty if every address is absolute.
    """
    return httpx.Client(
        base_url=url,
        timeout=timeout_s,
        limits=LIMITS,
        trust_env=False,
        follow_redirects=True,
        headers=door_headers(os.environ),
        verify=certificates(url or "http:"),
    )


def fetch(http: httpx.Client, url: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the response body of GET `url`.

    Raises:
        httpx.HTTPError: no response, a status other than 200, or a body over the limits.
    """
    give_up, parts, size = time.monotonic() + PATIENCE_S, list[bytes](), 0
    with http.stream("GET", url) as answer:
        answer.raise_for_status()
        for part in answer.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > most_bytes or time.monotonic() > give_up:
                raise httpx.ReadTimeout(f"no end after {size:,} bytes")
    return b"".join(parts)


def fetch_page(http: httpx.Client, url: str, most_bytes: int = MOST_BYTES) -> str | None:
    """Return the body as text, decoded with replacement; None if the request fails."""
    try:
        return fetch(http, url, most_bytes).decode(errors="replace")
    except (httpx.HTTPError, OSError):
        return None
