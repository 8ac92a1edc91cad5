"""Trials of other numbers of sequences in flight, by the tokens that the engine makes with them.

They correct a knee of the engine's throughput curve that is too low. Its steps mislead where their
conditions changed: an engine that shares its GPU was faster before the others began, and the steps
of its start then seem to say that more sequences only take longer.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

# Factor of a trial's target. A higher one is kept if the token rate is at least `WORTH` times as
# high, a lower one if the rate before is at most `NO_LOSS` times as high. Rates of 20 s scatter by
# 4 %, and at the knee twice as many sequences make 5 % more tokens a second.
TRIED, WORTH, NO_LOSS = 2.0, 1.1, 1.04
# A target that changes the other by less than this share shows nothing.
LEAST_CHANGE = 0.25
# Seconds after a change of the target that do not count.
CHANGE_S = 5.0
# Seconds of a trial; of the rate before it, at least that and at most `BASE_S`.
TRIAL_S, BASE_S = 20.0, 60.0
# Seconds until the next trial after the first in vain, which double, and their limit.
FIRST_WAIT_S, LAST_WAIT_S = 60.0, 600.0


@dataclass
class TokenRate:
    """Tokens a second of an engine since the last change of its target."""

    rate: float = 0.0
    seconds: float = 0.0
    """Length of the measurement."""
    _since: float = -math.inf
    _tokens: int = -1
    """Number at `_since`; -1: not read yet."""

    def restart(self, at: float = -math.inf) -> None:
        """Measure from `at` on; default: from the next look on."""
        self.rate, self.seconds, self._since, self._tokens = 0.0, 0.0, at, -1

    def look(self, tokens: int, now: float) -> None:
        """Take the number of tokens since the engine's start."""
        if now < self._since:
            return
        # A restarted engine counts from 0.
        if self._tokens < 0 or tokens < self._tokens:
            self._since, self._tokens = now, tokens
        if (seconds := now - self._since) > 0:
            self.seconds, self.rate = seconds, (tokens - self._tokens) / seconds


@dataclass(frozen=True)
class _Before:
    target: float
    rate: float
    """Tokens a second with it."""


@dataclass
class Trials:
    """Trials of an engine's target, one at a time."""

    rate: TokenRate = field(default_factory=TokenRate)
    proved: float = 0.0
    """Target that a trial found worth it."""
    _before: _Before | None = None
    _ended_at: float = -math.inf
    _wait_s: float = 0.0
    _tries_lower: bool = False

    @property
    def is_on(self) -> bool:
        return self._before is not None

    def begun(self, target: float, most: float, now: float) -> float:
        """Return the target from now on: another one if it is time for a trial."""
        if self.rate.seconds < TRIAL_S or now - self._ended_at < self._wait_s:
            if self.rate.seconds > BASE_S:
                self.rate.restart(now)
            return target
        other = target / TRIED if self._tries_lower else min(most, TRIED * target)
        if not self.rate.rate or abs(other / target - 1.0) < LEAST_CHANGE:
            return target
        self._before = _Before(target, self.rate.rate)
        return other

    def kept(self, target: float, knee: float, now: float) -> float:
        """Return the target from now on: the one before the trial if it ends in vain.

        Args:
            knee: that of the engine's own curve.
        """
        if self._before is None or self.rate.seconds < TRIAL_S:
            return target
        before, lower = self._before, target < self._before.target
        gain = self.rate.rate / before.rate
        log.info("%.2f times the tokens/s of %.0f sequences in flight", gain, before.target)
        if gain >= (1.0 / NO_LOSS if lower else WORTH):
            self._before, self.proved, self._wait_s = None, target, 0.0
            return target
        self.give_up(now)
        # A number that a trial found once is tried again from above.
        self._tries_lower = not lower and self.proved > knee
        return before.target

    def give_up(self, now: float) -> None:
        """End a trial in vain; the next one comes later."""
        if self._before is not None:
            self._before, self._ended_at = None, now
            self._wait_s = min(LAST_WAIT_S, max(FIRST_WAIT_S, 2.0 * self._wait_s))
