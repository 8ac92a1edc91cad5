"""Questions to the servers of a run, in whose place a program of the user's may be: run-api's routes, engines' pages.

with asking(url, timeout_s) as http: fetch(http, "/status")
"""

from __future__ import annotations

import os
import time

import httpx

from atropos_common.http import LIMITS, certificates, door_headers

PATIENCE_S = 10.0
"""So long an answer may take as a whole, however it drips."""
MOST_BYTES = 64 * 1024 * 1024
"""A longer answer is none; the newest group of run-api may be large."""


def asking(url: str, timeout_s: float) -> httpx.Client:
    """For questions to servers of the run: no proxy, and with its key where other machines reach them.

    Args:
        url: what addresses are relative to; empty where each is given in full.
    """
    return httpx.Client(
        base_url=url, timeout=timeout_s, limits=LIMITS, trust_env=False, follow_redirects=True,
        headers=door_headers(os.environ), verify=certificates(url or "http:"),
    )  # fmt: skip


def fetch(http: httpx.Client, url: str, most_bytes: int = MOST_BYTES) -> bytes:
    """What a server answers to GET `url`.

    Raises:
        httpx.HTTPError: none answers, or with another status than 200, or its answer does not end.
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
    """The same as text, decoded with replacement; None where there is none to be had."""
    try:
        return fetch(http, url, most_bytes).decode(errors="replace")
    except (httpx.HTTPError, OSError):
        return None
