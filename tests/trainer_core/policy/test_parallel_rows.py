"""Rows in parallel on the cores of a CPU: the same loss and gradient in any order."""

from __future__ import annotations

import os
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.made_rollouts import rollouts_of
from trainer_core.config import TrainingConfig
from trainer_core.objective.registry import Objective
from trainer_core.optimization.optimizers import Stepper, for_device
from trainer_core.optimization.step import StepOutcome, accumulate
from trainer_core.policy.load import load_model, train_only
from trainer_core.policy.speed import (
    SMALL_MODEL,
    ThreadGradients,
    in_threads,
    use_checkpointing,
    use_cores,
)
from trainer_core.rollouts.packing import _cuts, _equal_room, pack

CPU = torch.device("cpu")


def _step(
    base: Path,
    threads: int,
    *,
    dtype: torch.dtype = torch.float32,
    layers: list[int] | None = None,
    **fields: object,
) -> tuple[StepOutcome, list[torch.Tensor | None]]:
    values = {"model_name": "m", "optimizer": "adamw", "max_grad_norm": 0, **fields}
    config = TrainingConfig.model_validate(values)
    model = load_model(str(base), dtype, CPU)
    train_only(model, layers)
    use_checkpointing(
        model, config.gradient_checkpointing, tokens=64, optimizer="adamw", device=CPU
    )
    stepper = Stepper(model, config)
    outcome = accumulate(
        model, stepper, pack(rollouts_of(13), 40, threads), Objective(config), 1, threads=threads
    )
    return outcome, [master.grad for master in stepper.masters]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"ratio_base": "proximal", "tis_mask": "token", "objective": "cispo"},
        {"objective": "gspo", "gradient_checkpointing": "on"},
        {"layers": [1]},
        {"dtype": torch.bfloat16},
    ],
    ids=["grpo", "proximal", "gspo-checkpointed", "some-layers", "bf16"],
)
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_neither_loss_nor_gradient(
    base: Path, threads: int, fields: dict[str, object]
) -> None:
    one, expected = _step(base, 1, **fields)  # type: ignore[arg-type]
    side, found = _step(base, threads, **fields)  # type: ignore[arg-type]
    half = "dtype" in fields
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None and theirs is not None and mine.dtype == torch.float32
        torch.testing.assert_close(
            mine, theirs, atol=1e-2 if half else 1e-6, rtol=1e-2 if half else 1e-5
        )
    assert one.metrics["loss"] == pytest.approx(side.metrics["loss"], abs=1e-2 if half else 1e-6)
    assert (one.tokens, one.diffs.tokens) == (side.tokens, side.diffs.tokens)
    assert one.metrics["grad_norm"] == pytest.approx(
        side.metrics["grad_norm"], rel=1e-2 if half else 1e-5
    )


def test_threads_repeat_bit_for_bit(base: Path) -> None:
    """Threads finish in any order; sums are made in one."""
    _, first = _step(base, 3)
    for _ in range(3):
        _, again = _step(base, 3)
        assert all(
            torch.equal(a, b)
            for a, b in zip(first, again, strict=True)
            if a is not None and b is not None
        )


def test_a_parameter_that_nothing_depends_on_has_no_gradient(base: Path) -> None:
    model = load_model(str(base), torch.float32, CPU)
    model.unused = torch.nn.Parameter(torch.ones(3))
    config = TrainingConfig(model_name="m", optimizer="adamw")
    stepper = Stepper(model, config)
    assert accumulate(
        model, stepper, pack(rollouts_of(), 40, 2), Objective(config), 1, threads=2
    ).finite
    assert model.unused.grad is None and sum(p.grad is None for p in stepper.params) == 1


def test_two_parameters_with_one_gradient_tensor_do_not_count_twice() -> None:
    """Autograd hands the same tensor out for both terms of a sum."""
    one, other, weights = (
        torch.zeros(3, requires_grad=True),
        torch.zeros(3, requires_grad=True),
        torch.arange(3.0),
    )
    gradients = ThreadGradients([one, other], 2)
    for thread in (0, 0, 1):
        gradients.backward((weights * (one + other)).sum(), thread)
    assert [total.tolist() for total in gradients.total() if total is not None] == [
        [0, 3, 6],
        [0, 3, 6],
    ]


def test_threads_really_run_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=20)

    def work(item: int, thread: int) -> tuple[int, int]:
        if item < 3:
            together.wait()  # raises where the others do not come
        time.sleep(0.01 * (7 - item))
        return item, thread

    assert in_threads(work, range(7), 3) == [(i, i % 3) for i in range(7)]
    assert in_threads(lambda item, thread: (item, thread), range(3), 1) == [(0, 0), (1, 0), (2, 0)]
    assert in_threads(work, [], 3) == []


def test_a_lane_that_fails_fails_the_step() -> None:
    def work(item: int, _: int) -> int:
        return 1 // (item - 1)

    with pytest.raises(ZeroDivisionError):
        in_threads(work, range(4), 2)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(50, 600), st.integers(2, 5)
)
def test_rows_fill_the_threads_evenly(lengths: list[int], most: int, threads: int) -> None:
    lengths.sort(reverse=True)
    room = _equal_room(lengths, most, threads)
    cuts = _cuts(lengths, room)
    fewest, rows = len(_cuts(lengths, most)) - 1, len(cuts) - 1
    assert room <= most and fewest <= rows <= -(-fewest // threads) * threads
    assert room == 1 or len(_cuts(lengths, room - 1)) - 1 > -(-fewest // threads) * threads, (
        "no smaller room would do"
    )
    sizes = [sum(lengths[a:b]) for a, b in pairwise(cuts)]
    assert sum(sizes) == sum(lengths) and all(size <= max(most, lengths[0]) for size in sizes)


def test_packing_for_threads_gives_each_one_its_share() -> None:
    rollouts = rollouts_of(40)
    assert len(pack(rollouts, 10_000)) == 1
    sizes = [len(row.tokens) for row in pack(rollouts, 10_000, 2)]
    assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)
    assert pack([], 100, 2) == []


def test_cores_that_a_model_gets(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(str(base), torch.float32, CPU)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        assert use_cores(model, TrainingConfig(model_name="m"), CPU) == 3
        assert torch.get_num_threads() == 1
        assert use_cores(model, TrainingConfig(model_name="m", torch_threads=2), CPU) == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert use_cores(model, TrainingConfig(model_name="m"), CPU) == 1
        monkeypatch.setattr("trainer_core.policy.speed.SMALL_MODEL", 1000)
        assert use_cores(model, TrainingConfig(model_name="m", torch_threads=2), CPU) == 1
        assert torch.get_num_threads() == 2, "a large model's operations are split instead"
        assert sum(p.numel() for p in model.parameters()) < SMALL_MODEL
    finally:
        torch.set_num_threads(before)


def test_rows_on_a_cpu_are_small_unless_asked_for() -> None:
    assert for_device(TrainingConfig(model_name="m", batch_size=64), CPU).tokens_per_pass == 2048
    assert (
        for_device(TrainingConfig(model_name="m", batch_size=2, seq_len=100), CPU).tokens_per_pass
        == 200
    )
    assert for_device(TrainingConfig(model_name="m", pack_tokens=9000), CPU).tokens_per_pass == 9000
    assert (
        for_device(
            TrainingConfig(model_name="m", batch_size=64), torch.device("cuda")
        ).tokens_per_pass
        == 131_072
    )
