"""Trials of other numbers of sequences in flight, by the tokens that the engine makes with them.

They correct a knee of the engine's throughput curve that is too low. The curve misleads if an
engine shares its GPU: the steps of its start were fast, because the others had not begun.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

from atropos_common.protocol.bridge import EngineLoad

log = logging.getLogger(__name__)

# Factor of a trial's target. A trial with more sequences must raise the token rate by the factor
# `WORTH`. One with fewer may lower it by the factor `NO_LOSS`. Rates of `TRIAL_S` scatter by 4 %.
# At the knee twice as many sequences make 5 % more tokens a second.
TRIED, WORTH, NO_LOSS = 2.0, 1.12, 1.04
# Minimum relative change of the target, and of the sequences in flight, for a trial.
LEAST_CHANGE = 0.25
# Minimum share of the target in flight, and of the looks at which nothing else was the bound.
REACHED, FREE = 0.8, 0.8
# Seconds after a change of the target that do not count.
CHANGE_S = 5.0
# Minimum seconds of steps in a measured rate. A rate before a trial is at most `BASE_S` old, and a
# trial ends after `LIMIT_S`, whatever the engine did.
TRIAL_S, BASE_S, LIMIT_S = 30.0, 120.0, 180.0
# Seconds until the next trial after the first that failed. They double up to the second number.
FIRST_WAIT_S, LAST_WAIT_S = 60.0, 600.0


@dataclass
class Window:
    """Means since the last change of an engine's target."""

    seconds: float = 0.0
    """Duration of the engine's steps, without its pauses."""
    rate: float = 0.0
    """Tokens per second of steps."""
    _since: float = -math.inf
    _start: tuple[int, float] | None = None
    """Tokens and seconds of steps at `_since`; None: not read yet."""
    _looks: int = 0
    _own: float = 0.0
    _free: int = 0

    def restart(self, at: float) -> None:
        """Measure from `at` on, or from a later restart on."""
        self._since, self._start = max(at, self._since), None
        self._looks, self._own, self._free = 0, 0.0, 0
        self.seconds = self.rate = 0.0

    def look(self, load: EngineLoad, own: float, free: bool, now: float) -> None:
        """Add a look; the parameters are those of `Concurrency.look`."""
        if now < self._since:
            return
        tokens, steps_s = load.generated_tokens, load.steps_s
        # A restarted engine counts from 0.
        if self._start is None or tokens < self._start[0] or steps_s < self._start[1]:
            self.restart(now)
            self._start = tokens, steps_s
        self._looks, self._own, self._free = self._looks + 1, self._own + own, self._free + free
        self.seconds = steps_s - self._start[1]
        self.rate = (tokens - self._start[0]) / self.seconds if self.seconds > 0 else 0.0

    def age(self, now: float) -> float:
        return now - self._since

    @property
    def own(self) -> float:
        """Mean number of this environment's sequences in flight."""
        return self._own / max(1, self._looks)

    @property
    def free(self) -> float:
        """Share of the looks at which nothing else was the bound."""
        return self._free / max(1, self._looks)


@dataclass(frozen=True)
class _Before:
    target: float
    rate: float
    """Tokens per second of steps."""
    own: float
    began_at: float


@dataclass
class Trials:
    """Trials of an engine's target, one at a time."""

    window: Window = field(default_factory=Window)
    proved: float = 0.0
    """Highest target that a trial accepted; a trial of fewer may lower it."""
    _before: _Before | None = None
    _ended_at: float = -math.inf
    _wait_s: float = 0.0
    _tries_lower: bool = False

    @property
    def is_on(self) -> bool:
        return self._before is not None

    def begun(self, target: float, most: float, knee: float, now: float) -> float:
        """Return the target from now on: another one if it is time for a trial.

        Args:
            most: highest target.
            knee: that of the engine's own curve.
        """
        window = self.window
        if window.age(now) > BASE_S:
            window.restart(now)
        if window.seconds < TRIAL_S or now - self._ended_at < self._wait_s:
            return target
        if window.own < REACHED * target or window.free < FREE or not window.rate:
            window.restart(now)
            return target
        higher, lower = min(most, TRIED * target), max(knee, target / TRIED)
        # After a failed trial of more, and at the limit: fewer may be enough.
        tries_lower = self._tries_lower or higher < (1.0 + LEAST_CHANGE) * target
        other = lower if tries_lower and self.proved > knee else higher
        if abs(other - target) < LEAST_CHANGE * target:
            return target
        self._before = _Before(target, window.rate, window.own, now)
        return other

    def kept(self, target: float, now: float) -> float:
        """Return the target from now on: the one before the trial if that fails."""
        window, before = self.window, self._before
        if before is None:
            return target
        ended = window.seconds >= TRIAL_S
        if not ended and now - before.began_at < LIMIT_S:
            return target
        gain, lower = window.rate / before.rate, target < before.target
        log.info("%.2f times the tokens/s of %.0f sequences in flight", gain, before.target)
        changed = lower or window.own > (1.0 + LEAST_CHANGE) * before.own
        accepted = gain >= (1.0 / NO_LOSS if lower else WORTH)
        if ended and changed and window.free >= FREE and accepted:
            self._before, self._tries_lower, self.proved = None, False, target
            self._ended_at, self._wait_s = now, FIRST_WAIT_S if lower else 0.0
            return target
        self.give_up(now)
        self._tries_lower = not lower
        return before.target

    def give_up(self, now: float) -> None:
        """End a trial as failed; the next one comes later."""
        if self._before is not None:
            self._before, self._ended_at = None, now
            self._wait_s = min(LAST_WAIT_S, max(FIRST_WAIT_S, 2.0 * self._wait_s))
