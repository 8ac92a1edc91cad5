"""Scores of many episodes, and values that are no scores."""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from atropos_envs.recording.groups import _advantages
from atropos_envs.recording.scoring import Scorer, _score


def _slowly(episode: Any) -> float:
    time.sleep(0.3)
    return 1.0


async def test_scores_do_not_wait_for_each_other() -> None:
    scorer = Scorer(f"{__name__}:_slowly", timeout_s=0.9)
    scores = await asyncio.gather(*(scorer.score(SimpleNamespace()) for _ in range(32)))  # type: ignore[arg-type]
    assert [one.value for one in scores] == [1.0] * 32


def test_what_is_no_finite_number_is_no_score() -> None:
    assert _score({"score": 1, "all": np.zeros(3)}).metrics == {}
    assert _advantages([math.nan, 1.0]) == [0.0, 0.0], "the group is left out, and counted"
