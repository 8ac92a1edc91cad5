"""Length and logprob difference of each token of a text, as two short strings of a record.

Base64 of one byte (characters) and of two bytes (thousandths of a nat, little-endian) per token:
four bytes of JSON for each, in a stream that has thousands of them per step.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

UNKNOWN = -(2**15)
"""Stands for an unknown difference."""
SCALE = 1000
MOST_CHARS = 255
MOST_DIFF = 2**15 - 1


class TokenSpan(NamedTuple):
    chars: int
    diff: float | None = None
    """Logprob of the trainer minus that of the engine, in nats."""


def pack(spans: Iterable[TokenSpan]) -> tuple[str, str]:
    """Return the columns of lengths and of differences."""
    parts = [part for span in spans for part in _parts(span)]
    diffs = [
        UNKNOWN
        if part.diff is None or math.isnan(part.diff)
        else round(max(-MOST_DIFF, min(MOST_DIFF, part.diff * SCALE)))
        for part in parts
    ]
    lengths = bytes(part.chars for part in parts)
    columns = lengths, struct.pack(f"<{len(diffs)}h", *diffs)
    return base64.b64encode(columns[0]).decode(), base64.b64encode(columns[1]).decode()


def _parts(span: TokenSpan) -> list[TokenSpan]:
    # A longer token becomes several.
    whole, rest = divmod(span.chars, MOST_CHARS)
    return [TokenSpan(MOST_CHARS, span.diff)] * whole + [TokenSpan(rest, span.diff)]


def unpack(lengths: str, diffs: str, text: str) -> Sequence[TokenSpan]:
    """Return the tokens of `text`; none if the columns do not fit it."""
    try:
        sizes = base64.b64decode(lengths, validate=True)
        values = struct.unpack(f"<{len(sizes)}h", base64.b64decode(diffs, validate=True))
    except (binascii.Error, struct.error, ValueError):
        return ()
    if sum(sizes) != len(text):
        return ()
    return [
        TokenSpan(size, None if value == UNKNOWN else value / SCALE)
        for size, value in zip(sizes, values, strict=True)
    ]
