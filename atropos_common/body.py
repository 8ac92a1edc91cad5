"""The body of a request, read and unpacked within limits, before the application sees any of it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope

_GZIP = 16 + zlib.MAX_WBITS
_PIECE = 1024 * 1024
"""Bytes that are unpacked at a time."""


class BodyError(Exception):
    """A body that is refused, with the HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class GoneError(Exception):
    """The caller has left before the end of its body."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> tuple[Scope, Receive]:
    """Take the whole body in; the request without its packing.

    Args:
        limit: bytes that the body may have, as it was sent and unpacked.

    Raises:
        BodyError: it is larger, or not the gzip that it says it is.
        GoneError: nobody is there any more.
    """
    headers = Headers(scope=scope)
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit, "as sent")
    if not length and "transfer-encoding" not in headers:
        return scope, receive
    packed = "gzip" in headers.get("content-encoding", "").lower()
    pieces = await _collect(receive, limit, Gunzip(limit) if packed else None)
    if packed:
        scope = {**scope, "headers": list(scope["headers"])}
        changed = MutableHeaders(scope=scope)
        changed["content-length"] = str(sum(map(len, pieces)))
        del changed["content-encoding"]
    last = max(0, len(pieces) - 1)
    whole: list[Message] = [
        {"type": "http.request", "body": piece, "more_body": at < last} for at, piece in enumerate(pieces or [b""])
    ]
    return scope, replayed(whole, receive)


def replayed(messages: list[Message], receive: Receive) -> Receive:
    """`receive`, whose first messages were `messages`; takes them out of the list."""

    async def next_message() -> Message:
        return messages.pop(0) if messages else await receive()

    return next_message


async def _collect(receive: Receive, limit: int, gunzip: Gunzip | None) -> list[bytes]:
    pieces: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise GoneError
        body, more = message.get("body", b""), message.get("more_body", False)
        size += len(body)
        if size > limit:
            raise _too_large(limit, "as sent")
        pieces.extend(gunzip.feed(body) if gunzip else [body])
    if gunzip and size:
        gunzip.finish()
    return pieces


class Gunzip:
    """Unpacks gzip piece by piece, and stops at `limit` bytes: a kilobyte may hold a megabyte."""

    def __init__(self, limit: int) -> None:
        self._limit, self._left = limit, limit
        self._member = zlib.decompressobj(_GZIP)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What comes out of the next part.

        Raises:
            BodyError: too much, or no gzip.
        """
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
            self._left -= len(piece)
            if self._left < 0:
                raise _too_large(self._limit, "unpacked")
            yield piece
            data = self._member.unconsumed_tail or self._member.unused_data

    def finish(self) -> None:
        """Nothing more comes.

        Raises:
            BodyError: it is cut off.
        """
        if not self._member.eof:
            raise _no_gzip()


def _too_large(limit: int, how: str) -> BodyError:
    return BodyError(413, f"the body is larger than {limit // 2**20} MiB {how}")


def _no_gzip() -> BodyError:
    return BodyError(400, "Invalid gzip payload")
