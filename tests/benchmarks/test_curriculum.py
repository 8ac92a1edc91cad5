"""The proof that the choice by pass rate helps, at a size that takes a second."""

from __future__ import annotations

from benchmarks.rollouts.curriculum import LEAST_GAIN, SETTINGS, World, simulate


def test_more_groups_are_useful_for_the_same_tokens_and_the_learner_learns_more() -> None:
    none, chosen = (simulate(World("small", 400, 5), each, 0) for each in SETTINGS)
    assert chosen.useful_per_million > LEAST_GAIN * none.useful_per_million
    assert chosen.accuracy_last > none.accuracy_last
    assert 0 < chosen.low < none.low, "rare successes at hard problems are seen less, as documented"


def test_the_first_pass_is_the_same() -> None:
    none, chosen = (simulate(World("one", 200, 0.9), each, 0) for each in SETTINGS)
    assert chosen.useful_per_million == none.useful_per_million
