"""Read and unpack a request body within limits, before the application sees any of it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope

# zlib's code for gzip with its header.
_GZIP = 16 + zlib.MAX_WBITS
_PIECE = 1024 * 1024
"""Bytes unpacked at a time."""
# Bytes of a body without a Content-Length: programs that send more know the length.
UNSIZED_LIMIT = 4 * 1024 * 1024
# Bytes of a body that need no memory budget.
_SMALL = 64 * 1024


class BodyError(Exception):
    """Refused body, with the HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class GoneError(Exception):
    """The client disconnected before the end of its body."""


class BodyBudget:
    """Memory budget in bytes for all bodies in flight."""

    def __init__(self, limit: int) -> None:
        self._limit, self._taken = limit, 0

    def take(self, size: int) -> None:
        if self._taken + size > self._limit:
            raise BodyError(
                503,
                f"more than {self._limit // 2**20} MiB of bodies are in flight: try again later",
            )
        self._taken += size

    def give_back(self, size: int) -> None:
        self._taken -= size


async def read_body(
    scope: Scope,
    receive: Receive,
    limit: int,
    budget: BodyBudget | None = None,
    timeout_s: float | None = None,
) -> tuple[Scope, Receive]:
    """Read the whole body; return the request with an unpacked body.

    Args:
        limit: largest body in bytes, sent and unpacked.
        budget: memory budget until the body is complete.
        timeout_s: seconds for the whole body; None: no limit.

    Raises:
        BodyError: too large, too slow, not gzip, or the budget is used up.
        GoneError: the client disconnected.
    """
    headers = Headers(scope=scope)
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit, "as sent")
    # Without either header HTTP/1.1 has no body.
    if not length and "transfer-encoding" not in headers:
        return scope, receive
    packed = "gzip" in headers.get("content-encoding", "").lower()
    sent = limit if length else min(limit, UNSIZED_LIMIT)
    try:
        async with asyncio.timeout(timeout_s):
            pieces = await _collect(
                receive, sent, Gunzip(limit) if packed else None, budget or BodyBudget(2 * limit)
            )
    except TimeoutError:
        raise BodyError(408, f"the body did not arrive within {timeout_s:.0f} s") from None
    if packed:
        # A copy: other middleware may still hold the original scope.
        scope = {**scope, "headers": list(scope["headers"])}
        changed = MutableHeaders(scope=scope)
        changed["content-length"] = str(sum(map(len, pieces)))
        del changed["content-encoding"]
    last = max(0, len(pieces) - 1)
    whole: list[Message] = [
        {"type": "http.request", "body": piece, "more_body": at < last}
        for at, piece in enumerate(pieces or [b""])
    ]
    return scope, replayed(whole, receive)


def replayed(messages: list[Message], receive: Receive) -> Receive:
    """`receive` that first takes from `messages`."""

    async def next_message() -> Message:
        return messages.pop(0) if messages else await receive()

    return next_message


async def _collect(
    receive: Receive, limit: int, gunzip: Gunzip | None, budget: BodyBudget
) -> list[bytes]:
    pieces: list[bytes] = []
    size, kept, taken, more = 0, 0, 0, True
    try:
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise GoneError
            body, more = message.get("body", b""), message.get("more_body", False)
            size += len(body)
            if size > limit:
                raise _too_large(
                    limit, "as sent" + (": send a Content-Length" if limit == UNSIZED_LIMIT else "")
                )
            for piece in gunzip.feed(body) if gunzip else [body]:
                pieces.append(piece)
                kept += len(piece)
                # Reserve what this request holds beyond the free part, in steps as it grows.
                wanted = max(kept - _SMALL, 0) - taken
                budget.take(wanted)
                taken += wanted
    finally:
        budget.give_back(taken)
    if gunzip and size:
        gunzip.finish()
    return pieces


class Gunzip:
    """Unpack gzip in pieces and stop at `limit` bytes: a kilobyte can hold a megabyte."""

    def __init__(self, limit: int) -> None:
        self._limit, self._left = limit, limit
        self._member = zlib.decompressobj(_GZIP)

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._member.eof:  # several files in a row are one
                data = data.lstrip(b"\0")
                if not data:
                    return
                self._member = zlib.decompressobj(_GZIP)
            try:
                piece = self._member.decompress(data, _PIECE)
            except zlib.error:
                raise _no_gzip() from None
            # Checked for each piece, before the next one is unpacked.
            self._left -= len(piece)
            if self._left < 0:
                raise _too_large(self._limit, "unpacked")
            yield piece
            data = self._member.unconsumed_tail or self._member.unused_data

    def finish(self) -> None:
        if not self._member.eof:
            raise _no_gzip()


def _too_large(limit: int, how: str) -> BodyError:
    return BodyError(413, f"the body is larger than {limit // 2**20} MiB {how}")


def _no_gzip() -> BodyError:
    return BodyError(400, "Invalid gzip payload")
