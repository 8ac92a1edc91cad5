"""Restarts of one component after crashes: backoff, limits, and starts that fail alike."""

from __future__ import annotations

import random
import time
from collections import deque

from atropos_tui.diagnoses.model import shortened
from atropos_tui.diagnoses.roots import same_words
from atropos_tui.profile.spec import RestartPolicy

HEALTHY_RESET_S = 60.0
ALIKE_S = 10.0
"""Seconds between two equal failures of a start that are final: a network disk may be back by
then."""
MAX_REASON = 300
"""Longest error line in the reason of a state, in characters."""


class Restarts:
    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.count = 0
        self.proven = False
        """Was healthy once, so an exit is a crash and no mistake in its arguments."""
        self.came_up = False
        """Has started successfully at least once."""
        self.healthy_at: float | None = None
        """Monotonic time of becoming healthy."""
        self.start_error = ""
        """Error line of the last failed start, if another start would fail alike."""
        self._error_since = 0.0
        self._crashes: deque[float] = deque()
        self._streak = 0

    def recent(self) -> int:
        return sum(time.monotonic() - crash <= self._policy.window_s for crash in self._crashes)

    def delay(
        self, error: str, *, usage: bool = False, final: bool = False
    ) -> tuple[float | None, str]:
        """Return seconds until the next start, or None and the reason for no start.

        Args:
            error: error line of a start that would fail alike again; "" for any other crash.
            usage: the component refused its arguments.
            final: the exit code says that another start is useless.
        """
        now = time.monotonic()
        # A long healthy life starts the backoff again: this crash is not part of the last series.
        if self.healthy_at is not None and now - self.healthy_at > HEALTHY_RESET_S:
            self._streak = 0
        # The last of these reasons that applies is shown.
        hopeless = "wrong usage, not retried" if usage and not self.proven else ""
        hopeless = "final, not retried" if final else hopeless
        if self._fails_alike(error, now):
            hopeless = (
                f"the start failed twice with the same error, not retried: "
                f"{shortened(error, MAX_REASON)}"
            )
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

    def _fails_alike(self, error: str, now: float) -> bool:
        """True once starts have failed with the same words for `ALIKE_S`."""
        # A component that has started once may fail for reasons that pass, so its error is not
        # compared.
        last, self.start_error = self.start_error, "" if self.came_up else error
        alike = same_words(self.start_error, last)
        if not alike:
            self._error_since = now
        return alike and now - self._error_since >= ALIKE_S


def next_delay(
    policy: RestartPolicy, crashes: deque[float], streak: int, now: float
) -> float | None:
    """Return seconds until the next start after a crash at `now`; None if the policy is exhausted.

    Args:
        crashes: monotonic times of earlier crashes; updated.
        streak: crashes since the last minute of health.
    """
    while crashes and now - crashes[0] > policy.window_s:
        crashes.popleft()
    # Counted also where no start follows, because `Restarts.recent` shows it.
    crashes.append(now)
    if policy.policy == "never" or len(crashes) > policy.max_restarts:
        return None
    # Random +-20 %, so that components that crashed together do not start together.
    return min(policy.max_backoff_s, policy.backoff_s * 2.0**streak) * random.uniform(0.8, 1.2)
