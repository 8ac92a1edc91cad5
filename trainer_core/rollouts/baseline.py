"""What a group of one sequence is compared with: the scores that its environment sent before, in groups of one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW = 256
"""Scores that the running mean stands for: of more than that, each new one weighs 1 / WINDOW."""


@dataclass
class _Running:
    """Mean and variance (the population's) of about the last `WINDOW` scores."""

    count: float = 0.0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, scores: NDArray[np.float64]) -> None:
        """Chan et al. 1983, "Algorithms for computing the sample variance": two sets of scores become one."""
        new = len(scores)
        total = self.count + new
        mean = (self.count * self.mean + new * float(scores.mean())) / total
        old_part = self.count * (self.variance + (self.mean - mean) ** 2)
        self.variance = (old_part + new * (float(scores.var()) + (float(scores.mean()) - mean) ** 2)) / total
        self.mean, self.count = mean, min(total, WINDOW)


class Baselines:
    """A running mean for each environment, from the first batch of this attempt on.

    REINFORCE with a baseline (Williams 1992), which takes no bias from it but what a score adds to its own baseline:
    1 / N of N scores, as in a group of N.
    """

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}

    def advantages(self, env: str, scores: NDArray[np.float64], flat: float, *, std: bool) -> NDArray[np.float64]:
        """Scores minus the mean of those so far, these included, divided by their standard deviation; all zero where
        that deviation is below `flat` times the larger of the mean and 1.

        Args:
            env: the environment's name.
            scores: [N] of its groups of one in this batch.
        """
        running = self._running.setdefault(env, _Running())
        running.add(scores)
        deviation = running.variance**0.5
        if not deviation >= flat * max(1.0, abs(running.mean)):
            return np.zeros_like(scores)
        centred = scores - running.mean
        return centred / deviation if std else centred
