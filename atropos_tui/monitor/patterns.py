"""Regular expressions that a user types: compiled whatever they are, and matched for a limited time.

Matching is limited by a timer signal of this process, so `in_time` is called in the main thread alone.
"""

from __future__ import annotations

import re
import signal
import warnings
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

SEARCH_S = 0.2
"""Of our CPU time, for one search of all that is kept."""
TOO_SLOW = "given up: this pattern takes too long"

Result = TypeVar("Result")


def compiled(pattern: str) -> re.Pattern[str]:
    """`pattern` as a regular expression, case-insensitive unless it has capitals; what is none is taken literally.

    So is what is too large or too deep for one. Half-typed ones draw warnings, which would be written over the screen.
    """
    flags = re.NOFLAG if pattern != pattern.lower() else re.IGNORECASE
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(pattern, flags)
    except (re.error, OverflowError, RecursionError):
        return re.compile(re.escape(pattern), flags)


class TooSlow(Exception):
    """A search was given up."""


_timed = False
"""Whether a search is under way: a signal that comes late hits nobody else."""


def in_time(search: Callable[[], Result]) -> Result:
    """What `search` gives; TooSlow after `SEARCH_S`.

    Some patterns take for ever on one line, and the interpreter with them: only a signal ends that, and only in the
    main thread. So nothing but matching belongs into `search`, which may end anywhere. Does not nest.
    """
    global _timed
    signal.signal(signal.SIGPROF, _give_up)
    try:
        _timed = True
        signal.setitimer(signal.ITIMER_PROF, SEARCH_S)
        return search()
    finally:
        _timed = False
        signal.setitimer(signal.ITIMER_PROF, 0)


def _give_up(number: int, frame: FrameType | None) -> None:
    if _timed:
        raise TooSlow
