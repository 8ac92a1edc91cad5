"""The bound of docs/modes.md on the policy lag holds at the batch, in an environment's worst case.

A stand-in for run-api and environment: a group begins for every free place, of as many as
`max_batches_offpolicy` batches have; run-api hands out the groups in the order in which they came.
Time is counted in steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atropos_common.protocol.bridge import VersionSpan
from tests.trainer_core.offline_runs import group_of, offline_config
from trainer_core.config import TrainingConfig
from trainer_core.loop import train
from trainer_core.optimization import step
from trainer_core.rollouts.batch import Rollout, Selection
from trainer_core.rollouts.recorded import RecordedRollouts, Recorder
from trainer_core.rollouts.source import (
    BatchSource,
    Lag,
    LagMeter,
    Lags,
    lag_bound,
    oldest_lag,
    token_mean,
)
from trainer_core.telemetry import Telemetry

SIZE, GROUPS = 2, 4
"""Sequences of a group, groups of a batch."""


class Stack:
    """run-api and one environment; a group is (begun at version, ready at step)."""

    def __init__(self, ahead: int, lasts: Callable[[], int], says: bool = True) -> None:
        self.ahead, self.lasts = ahead, lasts
        self.params = {"env": "slow"} | ({"max_batches_offpolicy": ahead} if says else {})
        self.under_way: list[tuple[int, int]] = []
        self.queue: list[tuple[int, int]] = []

    def begin(self, step: int) -> None:
        """Begin a group for each free place, with the weights of `step`."""
        while len(self.queue) + len(self.under_way) < self.ahead * GROUPS:
            self.under_way.append((step, step + self.lasts()))

    def next_batch(self, step: int, on_idle: Any = None) -> list[dict[str, Any]]:
        """Wait until the queue has a batch; its places are free as soon as it trains, with the
        weights of before."""
        self.begin(step)
        now = step
        while True:
            ready = [group for group in self.under_way if group[1] <= now]
            self.under_way = [group for group in self.under_way if group[1] > now]
            self.queue += ready
            if len(self.queue) >= GROUPS:
                break
            now += 1  # the trainer waits: no new version meanwhile
        self.under_way = [(begun, ready - (now - step)) for begun, ready in self.under_way]
        taken, self.queue = self.queue[:GROUPS], self.queue[GROUPS:]
        self.begin(step)
        return [self.group(begun) for begun, _ in taken]

    def group(self, version: int) -> dict[str, Any]:
        tokens = [[5, 100 + version]] * SIZE
        return {
            "tokens": tokens,
            "masks": [[-100, 100 + version]] * SIZE,
            "scores": [0.0, 1.0],
            "inference_logprobs": [[1.0, -1.0]] * SIZE,
            "generation_params": self.params,
        }

    def close(self) -> None:
        """Nothing is open."""


class Meter(LagMeter):
    """Tells the version by the token."""

    def __init__(self) -> None:
        super().__init__([])
        self.met: list[int] = []

    def measure(self, rollouts: list[Rollout], version: int) -> Lags:
        lags = [version - (int(rollout.tokens[1]) - 100) for rollout in rollouts]
        self.met += lags
        return [Lag(lag) for lag in lags]


def lags_of(stack: Stack, tmp_path: Path, steps: int = 60, **fields: Any) -> tuple[int, int, int]:
    """The largest lag that came, and that trained; how many sequences were left out."""
    config = TrainingConfig(
        model_name="m",
        save_path=str(tmp_path),
        batch_size=SIZE * GROUPS,
        gradient_accumulation_steps=1,
        weight_bridge_mode="shared_vllm",
        **fields,
    )
    meter, trained, left_out = Meter(), 0, 0
    source = BatchSource(
        config,
        stack,
        Telemetry(tmp_path / "t.jsonl"),
        selection=Selection(),
        advantage_std=True,
        lag_meter=meter,
        while_waiting=lambda: None,
    )
    for number in range(steps):
        batch, lags = source.next_batch(number, number)
        trained = max(trained, oldest_lag(lags) or 0)
        left_out += sum(batch.left_out.values())
    return max(meter.met), trained, left_out


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_groups_within_a_step_are_never_older_than_the_places(ahead: int, tmp_path: Path) -> None:
    assert lags_of(Stack(ahead, lambda: 0), tmp_path) == (ahead, ahead, 0)


def test_with_one_batch_of_places_no_group_overtakes_another(tmp_path: Path) -> None:
    """The trainer waits for the slowest of each batch."""
    dice = random.Random(0)
    assert lags_of(Stack(1, lambda: dice.randrange(9)), tmp_path) == (1, 1, 0)


@pytest.mark.parametrize("ahead", [2, 4])
def test_slow_groups_pass_the_bound_and_are_left_out_there(ahead: int, tmp_path: Path) -> None:
    """One in ten takes thirty steps: others overtake it. Without what the environment says it would
    train."""

    def lasts() -> int:
        return 30 if dice.random() < 0.1 else 0

    dice = random.Random(0)
    came, trained, left_out = lags_of(Stack(ahead, lasts), tmp_path)
    assert came > 2 * ahead >= trained and left_out > 0
    dice = random.Random(0)
    came, trained, left_out = lags_of(Stack(ahead, lasts, says=False), tmp_path)
    assert came == trained > 2 * ahead and left_out == 0
    dice = random.Random(0)
    assert lags_of(Stack(ahead, lasts), tmp_path, max_policy_lag=3)[1] <= 3, "a setting goes first"


def test_groups_of_a_few_steps_stay_within_the_bound(tmp_path: Path) -> None:
    """As GSM8K did with 4: lags of 5 came, and train."""
    dice = random.Random(0)
    came, trained, left_out = lags_of(Stack(4, lambda: dice.choice([0, 1, 1, 2, 4])), tmp_path)
    assert 4 < came == trained <= 8 and left_out == 0


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({"weight_bridge_mode": "shared_vllm"}, 6),
        ({"weight_bridge_mode": "shared_vllm", "minibatches": 2, "epochs": 2}, 24),
        ({"weight_bridge_mode": "shared_vllm", "use_shared_memory": True, "minibatches": 2}, 6),
        (
            {
                "weight_bridge_mode": "shared_vllm",
                "use_shared_memory": True,
                "overlap_publish": True,
            },
            7,
        ),
        ({"weight_bridge_mode": "lora_only"}, 6),
        ({"weight_bridge_mode": "lora_restart", "vllm_restart_interval": 4}, 9),
        ({"weight_bridge_mode": "none"}, 8),
    ],
)
def test_the_bound_of_each_mode_is_that_of_the_docs(fields: dict[str, Any], bound: int) -> None:
    assert lag_bound(TrainingConfig(model_name="m", **fields), 3) == bound


def all_by_three(digests: list[str]) -> list[VersionSpan | None]:
    return [VersionSpan(3, 3)] * len(digests)


@pytest.mark.parametrize(
    ("version", "fields", "ratio_base"),
    [
        (4, {}, "rollout"),
        (5, {}, "proximal"),
        (5, {"ratio_base": "rollout"}, "rollout"),
        (4, {"ratio_base": "proximal"}, "proximal"),
        (5, {"objective": "gspo"}, "proximal"),
        (5, {"objective": "cispo"}, "rollout"),
        (None, {}, "rollout"),
    ],
)
def test_a_batch_of_a_lag_above_one_gets_importance_weights(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: int | None,
    fields: dict[str, Any],
    ratio_base: str,
) -> None:
    """Rollouts of version 3 train at `version`, with no pass beside the training pass."""
    monkeypatch.setattr(step, "row_logprobs", None)
    path = tmp_path / "rollouts.jsonl"
    recorder = Recorder(path)
    recorder.write(1, version or 0, [group_of(1), group_of(2)])
    recorder.close()

    def trained(**fields: Any) -> dict[str, Any]:
        source = RecordedRollouts(path, 8)
        if version is not None:
            source.versions = all_by_three  # type: ignore[method-assign]
        (record,) = train(
            offline_config(base, tmp_path, training_steps=1, **fields), rollouts=source
        ).history
        return record

    record = trained(**fields)
    assert record["ratio_base"] == ratio_base
    assert (record["tis_mean"] is not None) == (ratio_base == "proximal")
    fixed = trained(**fields | {"ratio_base": ratio_base})
    assert all(record[name] == fixed[name] for name in ("loss", "grad_norm", "tis_mean"))


def test_the_oldest_token_bounds_and_each_token_counts_in_the_mean() -> None:
    """Two turns of one rollout, one of 10 tokens across a publish, and a rollout nobody knows."""
    spans = {
        "a": VersionSpan(3, 4, 10, 3.4),
        "b": VersionSpan(5, 5, 30, 5.0),
        "old": VersionSpan(2, 2),
    }
    rollouts: Any = [
        SimpleNamespace(digests=digests, oldest_version=None)
        for digests in (("a", "b"), ("a",), ("unknown",), ("old",))
    ]
    lags = LagMeter([lambda digests: [spans.get(each) for each in digests]]).measure(rollouts, 5)
    assert [lag and lag.oldest for lag in lags] == [2, 2, None, 3] and oldest_lag(lags) == 3
    assert token_mean(lags) == pytest.approx((20 * (5 - 3.4) + 30 * 0) / 50)
    assert token_mean(lags[2:]) is None, "an older server tells no tokens"


def test_a_completion_begun_by_weights_that_a_restart_discarded_does_not_train() -> None:
    """The trainer went back from version 9 to 6 while it was in flight: it looked fresh."""
    spans = {"a": VersionSpan(6, 9, 4, 8.5), "b": VersionSpan(7, 9, 4, 8.0), "c": VersionSpan(5, 6)}
    rollouts: Any = [SimpleNamespace(digests=(digest,), oldest_version=None) for digest in spans]
    lags = LagMeter([lambda digests: [spans.get(each) for each in digests]]).measure(rollouts, 6)
    assert [lag and lag.oldest for lag in lags] == [-3, -3, 1]


def test_a_replay_has_the_bound_of_the_run(base: Path, tmp_path: Path) -> None:
    """Recorded in a mode with another bound; a file without one leaves nothing out."""
    old = {"generation_params": {"env": "a", "max_batches_offpolicy": 1}}
    groups = [group_of(1, **old), group_of(2)]
    for bounds, trained in (({"a": 9}, 8), ({"a": 1}, 4), ({}, 8)):
        path = tmp_path / f"{trained}-{len(bounds)}.jsonl"
        recorder = Recorder(path)
        recorder.write(1, 6, groups, bounds)
        recorder.close()
        source = RecordedRollouts(path, 8)
        source.versions = all_by_three  # type: ignore[method-assign]
        result = train(offline_config(base, tmp_path, training_steps=1), rollouts=source)
        assert result.history[0]["sequences"] == trained, bounds
