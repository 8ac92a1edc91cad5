"""Several optimizer steps on a batch: against a plain implementation, with each base of the ratio,
and as versions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.made_rollouts import plain_logprobs, rollouts_of
from tests.trainer_core.offline_runs import group_of, offline_config, write_lines
from tests.trainer_core.stand_ins import Engine, Recorded, group, plain_model, run_config
from trainer_core import EngineGone, train
from trainer_core.objective.registry import Objective
from trainer_core.optimization.minibatches import Minibatches, merged, split
from trainer_core.optimization.step import StepOutcome
from trainer_core.rollouts.batch import read_batch
from trainer_core.rollouts.packing import pack

BATCHES = 2
LR, CLIP, CAP = 3e-3, 0.05, 1.5


def _batches(**extra: Any) -> list[list[dict[str, Any]]]:
    """Batches of three groups; in one of them all scores are equal, and it teaches nothing."""
    flat = {"scores": [1.0] * 4, **extra}
    return [
        [group_of(3 * i, **extra), group_of(3 * i + 1, **flat), group_of(3 * i + 2, **extra)]
        for i in range(BATCHES)
    ]


@pytest.fixture
def batch_file(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "r.jsonl", [{"batch": batch} for batch in _batches()])


def test_sets_hold_every_rollout_once_and_about_equal_tokens() -> None:
    rollouts = rollouts_of(64, longest=60)
    sets = split(rollouts, 5, np.random.default_rng(0))
    assert sorted(map(id, rollouts)) == sorted(id(r) for part in sets for r in part)
    tokens = [sum(len(r.tokens) for r in part) for part in sets]
    assert max(tokens) - min(tokens) <= max(len(r.tokens) for r in rollouts)
    again, other = (split(rollouts, 5, np.random.default_rng(seed)) for seed in (0, 1))
    assert (
        [list(map(id, p)) for p in again]
        == [list(map(id, p)) for p in sets]
        != [list(map(id, p)) for p in other]
    )
    assert [len(part) for part in split(rollouts[:3], 5, np.random.default_rng(0))] == [1, 1, 1]


def test_one_step_is_what_it_always_was(base: Path, tmp_path: Path) -> None:
    """The same rows in the same order, no further pass, and the outcome itself."""
    config, rollouts = offline_config(base, tmp_path, ratio_base="proximal"), rollouts_of(20)
    minibatches = Minibatches(config, plain_model(base), Objective(config))
    (rows,) = minibatches.rows(rollouts, 1, proximal=True)
    for ours, theirs in zip(rows, pack(rollouts, config.tokens_per_pass), strict=True):
        assert ours.base is None and ours.lengths == theirs.lengths
        assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(
            ours.advantages, theirs.advantages
        )
    outcome = StepOutcome({}, None, 7)  # type: ignore[arg-type]
    assert merged([outcome]) is outcome


def _plain(
    base: Path, batches: Sequence[Any], *, parts: int, epochs: int, proximal: bool, known: bool
) -> tuple[list[dict[str, float]], torch.nn.Module]:
    """PPO's inner loop as one writes it down: float64, one sequence at a time, torch's AdamW."""
    model = plain_model(base).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    told = []
    for step, raw in enumerate(batches, 1):
        rollouts = read_batch(raw, seq_len=2048, recompute=True).rollouts
        with torch.no_grad():
            before = {id(r): plain_logprobs(model, r) for r in rollouts}
        figures: list[tuple[float, float, float, float]] = []
        for epoch in range(epochs):
            for part in split(rollouts, parts, np.random.default_rng([0, step, epoch])):
                tokens = sum(int(r.trained.sum()) for r in part)
                total, ratios = torch.zeros((), dtype=torch.float64), []
                for r in part:
                    ours = plain_logprobs(model, r)
                    rollout = (
                        torch.from_numpy(r.logprobs[r.trained]).double() if known else before[id(r)]
                    )
                    weight = (before[id(r)] - rollout).exp().clamp(max=CAP) if proximal else 1.0
                    ratio = (ours - (before[id(r)] if proximal else rollout)).exp()
                    advantages = torch.from_numpy(r.advantages[r.trained]).double()
                    loss = -torch.minimum(
                        ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
                    )
                    total = total + (loss * weight).sum()
                    ratios.append(ratio.detach())
                optimizer.zero_grad()
                (total / tokens).backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                ratio = torch.cat(ratios)
                outside = ((ratio < 1 - CLIP) | (ratio > 1 + CLIP)).double().mean()
                figures.append(
                    (
                        float(total.detach()) / tokens,
                        float(ratio.mean()),
                        float(outside),
                        float(norm),
                    )
                )
        means = np.mean(figures, axis=0).tolist()
        told.append(
            dict(zip(("loss", "ratio_mean", "clip_fraction", "grad_norm"), means, strict=True))
        )
    return told, model


@pytest.mark.parametrize(
    ("kind", "parts", "epochs"),
    [
        pytest.param(kind, *parts, marks=[pytest.mark.slow] * (at not in (own, 1)))
        for own, kind in enumerate(("rollout", "proximal", "recomputed"))
        for at, parts in enumerate(((1, 1), (2, 2), (1, 3)))
    ],
)
def test_against_a_plain_implementation(
    base: Path, tmp_path: Path, parts: int, epochs: int, kind: str
) -> None:
    """Whatever the ratio is against: the rollouts, the policy at batch start, or that in place of
    missing logprobs."""
    batches = _batches(**({"inference_logprobs": None} if kind == "recomputed" else {}))
    path = write_lines(tmp_path / "r.jsonl", [{"batch": batch} for batch in batches])
    fields: dict[str, Any] = (
        {"ratio_base": "proximal", "tis_cap": CAP} if kind == "proximal" else {}
    )
    config = offline_config(
        base,
        tmp_path,
        lr=LR,
        clip_eps=CLIP,
        dual_clip=0.0,
        minibatches=parts,
        epochs=epochs,
        training_steps=BATCHES,
        **fields,
    )
    result = train(config, rollouts=path)
    told, model = _plain(
        base,
        batches,
        parts=parts,
        epochs=epochs,
        proximal=kind == "proximal",
        known=kind != "recomputed",
    )
    for ours, theirs in zip(result.history, told, strict=True):
        assert ours["optimizer_steps"] == parts * epochs
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=2e-3, abs=2e-4), (ours["step"], name)
    assert result.path is not None
    trained, begun = (
        load_file(result.path / "model.safetensors"),
        dict(plain_model(base).named_parameters()),
    )
    moved = {name: (p - begun[name]).detach() for name, p in model.named_parameters()}
    off = (
        sum(float((trained[n] - begun[n].detach() - m).norm()) ** 2 for n, m in moved.items())
        ** 0.5
    )
    assert off < 0.02 * sum(float(m.norm()) ** 2 for m in moved.values()) ** 0.5, (
        "the weights moved the same way"
    )


def test_with_proximal_the_clip_range_acts_from_the_second_step_on(
    base: Path, batch_file: Path, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {
        "ratio_base": "proximal",
        "clip_eps": 1e-3,
        "lr": 1e-2,
        "training_steps": 1,
    }
    one, four = (
        train(offline_config(base, tmp_path, epochs=epochs, **fields), rollouts=batch_file).history[
            0
        ]
        for epochs in (1, 4)
    )
    assert (one["ratio_mean"], one["clip_fraction"]) == (pytest.approx(1.0, abs=1e-6), 0.0)
    assert four["ratio_max"] > 1.01 and four["clip_fraction"] > 0.5
    assert four["tokens"] == one["tokens"] and four["sequences"] == one["sequences"] == 12


def test_the_reference_is_asked_once_a_batch(
    base: Path, batch_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its answer belongs to the right tokens, wherever a shuffle puts them: a policy that has
    not moved agrees."""
    from trainer_core.policy import reference

    asked: list[int] = []

    def counted(model: torch.nn.Module, row: Any) -> torch.Tensor:
        asked.append(len(row.labels))
        return reference_logprobs(model, row)

    reference_logprobs = reference.row_logprobs
    monkeypatch.setattr(reference, "row_logprobs", counted)
    fields: dict[str, Any] = {
        "ref_kl_coef": 0.5,
        "minibatches": 3,
        "epochs": 2,
        "lr": 0.0,
        "training_steps": 1,
    }
    (step,) = train(offline_config(base, tmp_path, **fields), rollouts=batch_file).history
    assert sum(asked) == step["tokens"] and step["ref_kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_equals_never_stopped(
    base: Path, batch_file: Path, tmp_path: Path, dtype: str
) -> None:
    fields: dict[str, Any] = {
        "minibatches": 2,
        "epochs": 2,
        "dtype": dtype,
        "checkpoint_interval": 1,
        "resume": "auto",
    }
    ends = []
    for name, cuts in (("straight", [BATCHES]), ("cut", [1, BATCHES])):
        for steps in cuts:
            save = {
                "save_path": str(tmp_path / name),
                "training_steps": steps,
                "ratio_base": "proximal",
            }
            result = train(offline_config(base, tmp_path, **fields, **save), rollouts=batch_file)
        assert result.path is not None
        ends.append(load_file(result.path / "model.safetensors"))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_elsewhere_a_batch_is_one_version(base: Path, batch_file: Path, tmp_path: Path) -> None:
    result = train(
        offline_config(base, tmp_path, minibatches=2, training_steps=BATCHES), rollouts=batch_file
    )
    assert (result.step, result.weight_version) == (BATCHES, BATCHES)


def _sampled(engine: Engine, count: int) -> list[list[dict[str, Any]]]:
    return [[group(engine, [3, 12, 4, 13], 4, 3) for _ in range(4)] for _ in range(count)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_single_copy_each_write_is_published(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The server's memory never changes but while it is paused, and goes on as a version of its own
    each time."""
    from tests.trainer_core.stand_ins import TOKEN

    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    torch.manual_seed(0)
    seen: list[tuple[int | None, bool]] = []

    class Watching(Engine):
        def answer(self, path: str, body: dict[str, Any]) -> Any:
            weight = self.tensors["model.norm.weight"]
            if path == "/bridge/pause":
                self.at_pause = weight.clone()
                same = torch.equal(weight, self.at_resume) if hasattr(self, "at_resume") else True
                seen.append((self.version, same))
            if path == "/bridge/resume":
                self.at_resume = weight.clone()
            return super().answer(path, body)

    engine = Watching(tmp_path, plain_model(base).to(getattr(torch, dtype)))
    try:
        config = run_config(
            engine,
            base,
            tmp_path,
            training_steps=2,
            minibatches=2,
            epochs=2,
            dtype=dtype,
            lr=1e-2,
            probe_interval=1,
        )
        result = train(config, api=Recorded(_sampled(engine, 2)))
    finally:
        engine.close()
    assert (result.step, result.weight_version, engine.version) == (2, 8, 8)
    assert seen == [(version, True) for version in range(8)]
    assert [h["weight_version"] for h in result.history] == [4, 8]
    assert [h["policy_lag_max"] for h in result.history] == [0.0, 4.0], "versions, not batches"


def test_a_server_that_dies_between_minibatches_costs_nothing(
    engine: Engine, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = _sampled(engine, 1)
    weights = {name: t.clone() for name, t in engine.tensors.items()}
    fields: dict[str, Any] = {
        "training_steps": 1,
        "minibatches": 2,
        "epochs": 2,
        "probe_interval": 0,
    }
    whole = train(
        run_config(engine, base, tmp_path, save_path=str(tmp_path / "whole"), **fields),
        api=Recorded(batches),
    )
    for name, tensor in engine.tensors.items():
        tensor.copy_(weights[name])
    engine.version, engine.held, engine.calls = None, True, []

    class Dying(Engine):
        def answer(self, path: str, body: dict[str, Any]) -> Any:
            if self.calls.count("/bridge/pause") == 1 and path == "/bridge/pause":
                self.die()
            return super().answer(path, body)

    engine.__class__ = Dying
    with pytest.raises(EngineGone):
        train(run_config(engine, base, tmp_path, **fields), api=Recorded(batches))
    assert "No step is lost: the weights of step 1" in capsys.readouterr().out
    saved = load_file(tmp_path / "out" / "step_1" / "model.safetensors")
    assert whole.path is not None
    healthy = load_file(whole.path / "model.safetensors")
    assert all(torch.equal(saved[name], healthy[name]) for name in healthy), (
        "the batch is trained to its end"
    )


def test_one_minibatch_that_is_not_finite_is_left_out(base: Path, tmp_path: Path) -> None:
    """The other one trains; a batch is skipped only where nothing of it was applied."""
    calls: list[bool] = []

    def now_and_then(
        logprobs: torch.Tensor, base_: torch.Tensor, advantages: torch.Tensor, _: Any
    ) -> torch.Tensor:
        calls.append(True)
        broken = len(calls) in (
            2,
            4,
            5,
        )  # after the trial: the first of batch 1, then both of batch 2
        return -(logprobs - base_).exp() * advantages * (float("nan") if broken else 1.0)

    lines = [
        {"batch": [group_of(2 * i), group_of(2 * i + 1)]} for i in range(2)
    ]  # a row for each minibatch
    path = write_lines(tmp_path / "two.jsonl", lines)
    config = offline_config(base, tmp_path, minibatches=2, training_steps=2, torch_threads=1)
    result = train(config, rollouts=path, loss_fn=now_and_then)
    assert [h["skipped_update"] for h in result.history] == [False, True]
    assert result.weight_version == 1


def test_more_minibatches_than_sequences_are_refused() -> None:
    from trainer_core.config import validate

    _, problems = validate(
        {"model_name": "m", "minibatches": 9, "batch_size": 4, "gradient_accumulation_steps": 2}
    )
    assert problems and "--minibatches 9 is more than the 8 sequences of a batch" in problems[0]
