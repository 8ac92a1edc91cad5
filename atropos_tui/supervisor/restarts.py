"""When a crash is answered with another start, and how long after. Pure but for the clock and a little chance."""

from __future__ import annotations

import random
import time
from collections import deque

from atropos_tui.profile.spec import RestartPolicy
from atropos_tui.supervisor.diagnoses.model import shortened
from atropos_tui.supervisor.diagnoses.roots import same_words

HEALTHY_RESET_S = 60.0
"""After so long in health the backoff begins anew."""
REASON_ROOM = 300
"""Characters of an error line in the reason of a state."""


class Restarts:
    """What the crashes of one component and the times between them say about its next start."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.count = 0
        """Starts that answered a crash."""
        self.proven = False
        """It was healthy once, so an exit is a crash and no mistake in its arguments."""
        self.came_up = False
        """It was past its start once, so how a later start fails is not how all do."""
        self._healthy_at: float | None = None
        self._crashes: deque[float] = deque()
        self._streak = 0
        self._start_error = ""
        """The error line of the start that failed last, if another start would fail in the same way."""

    def begin(self) -> None:
        """A new attempt lives."""
        self._healthy_at = None

    def healthy(self) -> None:
        """The attempt is healthy."""
        self._healthy_at = self._healthy_at or time.monotonic()

    def forgive(self) -> None:
        """Somebody has asked for a start: what hindered the last one may have been mended."""
        self._start_error = ""

    def recent(self) -> int:
        """Crashes within the policy's window."""
        return sum(time.monotonic() - crash <= self._policy.window_s for crash in self._crashes)

    def delay(self, exit_code: int | None, error: str) -> tuple[float | None, str]:
        """Seconds from this crash to the next start; or None, and why there is none.

        Args:
            error: the error line of a start that would fail in the same way again; "" for any other crash.
        """
        now = time.monotonic()
        if self._healthy_at is not None and now - self._healthy_at > HEALTHY_RESET_S:
            self._streak = 0
        hopeless = "wrong usage, not retried" if exit_code == 2 and not self.proven else ""
        if self._fails_alike(error):
            hopeless = f"the start failed twice in the same words, not tried again: {shortened(error, REASON_ROOM)}"
        if hopeless:
            return None, hopeless
        policy = self._policy
        delay = next_delay(policy, self._crashes, self._streak, now)
        if delay is None:
            gave_up = f"gave up after {policy.max_restarts} restarts in {policy.window_s:g} s"
            return None, "restart policy never" if policy.policy == "never" else gave_up
        self._streak += 1
        self.count += 1
        return delay, ""

    def _fails_alike(self, error: str) -> bool:
        """A start has failed with this error line (none: in a way that may pass); whether the last one did so, too."""
        last, self._start_error = self._start_error, "" if self.came_up else error
        return same_words(self._start_error, last)


def next_delay(policy: RestartPolicy, crashes: deque[float], streak: int, now: float) -> float | None:
    """Seconds until the next start after a crash at `now`; None when the policy is exhausted.

    Args:
        crashes: times of earlier crashes; those outside the window are removed, this one is added.
        streak: crashes since the last minute of health.
    """
    while crashes and now - crashes[0] > policy.window_s:
        crashes.popleft()
    crashes.append(now)
    if policy.policy == "never" or len(crashes) > policy.max_restarts:
        return None
    return min(policy.max_backoff_s, policy.backoff_s * 2.0**streak) * random.uniform(0.8, 1.2)
