"""Reasons why a group does not reach the trainer: keys of `left_out` in `env_counts` records."""

from __future__ import annotations

# Keys of a record: recordings contain them, so they never change.
REFUSED = "refused"
UNSENDABLE = "unsendable"
UNANSWERED = "unanswered"
NONE = "none"
FLAT = "flat"
GROUP_SIZE = "group_size"
TOO_LONG = "too_long"
NOT_FINITE = "not_finite"
SURPLUS = "surplus"

WORDS = {
    REFUSED: "run-api refused it",
    UNSENDABLE: "JSON cannot hold it",
    UNANSWERED: "run-api did not answer",
    # None is how an atroposlib environment gives a group up.
    NONE: "the environment returned None in its place",
    FLAT: "all scores equal",
    GROUP_SIZE: "another number of completions than group_size",
    TOO_LONG: "a sequence longer than the trainer takes",
    NOT_FINITE: "a score that is not a finite number",
    SURPLUS: "surplus: a spare group that was not needed",
}
"""Reason -> one line."""


def in_words(reason: str) -> str:
    """The line for `reason`; an unknown reason is its own line."""
    return WORDS.get(reason, reason)
