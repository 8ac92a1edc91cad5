"""Does a model repeat itself? Pure, on rollout records."""

from __future__ import annotations

from collections.abc import Sequence

from atropos_common.records import RolloutRecord

LOOKED_AT = 12
SHARE = 0.5
"""Of the rollouts looked at."""
LONG = 120
"""Characters of the end of a completion that must be one and the same piece over and over."""
LONGEST_PIECE = 40
SHOWN = 60


def repeated_piece(text: str) -> str | None:
    """The piece that the last `LONG` characters repeat, at least three times; None where they do not.

    A row of dots or spaces, as tables have them, counts: a completion that ends in 120 of them is no answer.
    """
    end = text.rstrip("\n")[-LONG:]
    if len(end) < LONG:
        return None
    for size in range(1, LONGEST_PIECE + 1):
        if end[size:] == end[:-size]:
            return end[-size:]
    return None


def repeating(rollouts: Sequence[RolloutRecord]) -> str | None:
    """Half of the last rollouts or more end in a repetition."""
    found = [(rollout, piece) for rollout in rollouts if (piece := repeated_piece(rollout.completion)) is not None]
    if len(rollouts) < LOOKED_AT or len(found) < SHARE * len(rollouts):
        return None
    rollout, piece = found[-1]
    shown = " ".join(piece.split())[:SHOWN] or repr(piece[:SHOWN])
    many = f"{len(found)} of the last {len(rollouts)} rollouts end in a repetition"
    return f"{many}; step {rollout.step}: {shown!r} again and again"
