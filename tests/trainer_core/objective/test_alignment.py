"""The alignment gate: verdict and cause from sums of logprobs, and from a real model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from atropos_common.protocol.bridge import completion_digest
from atropos_common.protocol.records import parse_line
from atropos_common.protocol.trainer_records import AlignmentRecord
from tests.trainer_core.stand_ins import Engine, Recorded, group, run_config
from trainer_core.errors import MismatchError, MissingLogprobs
from trainer_core.loop import train
from trainer_core.objective.alignment import (
    Alignment,
    AlignmentGate,
    DiffSums,
    ProbeDiffs,
    Thresholds,
    diff_sums,
    thresholds,
)
from trainer_core.policy.load import load_model
from trainer_core.policy.logprobs import completions_logprobs
from trainer_core.probe import explain
from trainer_core.rollouts.batch import read_batch
from trainer_core.rollouts.source import Lag
from trainer_core.server.client import GeneratedTokens

BOUNDS = Thresholds(0.01, 0.1)
TRAIN, SERVER = -1.3, -1.0


def _sums(train: float, inference: float = SERVER, tokens: int = 10) -> DiffSums:
    return diff_sums([train] * tokens, [inference] * tokens)


def _off(diff: float) -> DiffSums:
    return _sums(SERVER + diff)


def _probe(fresh: float, cached: float, anchor: DiffSums | None = None) -> ProbeDiffs:
    return ProbeDiffs(_off(fresh), _off(cached), 32, anchor)


def test_diff_sums_and_nan() -> None:
    sums = diff_sums([-1.0, -2.0], [-1.5, -1.0])
    assert (sums.tokens, sums.diff, sums.abs_diff, sums.abs_max) == (2, -0.5, 1.5, 1.0)
    assert math.isnan((diff_sums([math.nan], [-1.0]) + sums).abs_max)
    assert math.isnan((sums + diff_sums([math.nan, -1.0], [-1.0, -1.0])).abs_max)
    assert DiffSums().abs_mean is None


def test_thresholds_follow_the_dtype_and_the_flags() -> None:
    assert thresholds("bfloat16").ok == 0.1
    assert thresholds("float32").ok == 1e-3
    assert thresholds("float32", 0.2, None) == Thresholds(0.2, 0.2)


@pytest.mark.parametrize(
    ("probe", "verdict", "cause"),
    [
        (_probe(1e-4, 1e-4), "ok", ""),
        (_probe(0.05, 0.05), "drift", "other weights"),
        (_probe(1e-4, 1.0), "mismatch", "stale prefix cache"),
        (_probe(math.nan, 0.0), "mismatch", "broken weights"),
    ],
)
def test_the_probe_decides_first(probe: ProbeDiffs, verdict: str, cause: str) -> None:
    found = AlignmentGate(BOUNDS).judge(_off(0.0), probe)
    assert (found.verdict, found.kind) == (verdict, cause)


def _lone(far: float, others: float = 0.0, tokens: int = 16) -> DiffSums:
    return diff_sums([SERVER + others] * (tokens - 1) + [SERVER + far], [SERVER] * tokens)


def test_one_token_that_differs_is_called_what_it_is() -> None:
    """Seen in bf16 on a healthy run: it looked like stale weights."""
    gate = AlignmentGate(thresholds("bfloat16"))
    assert gate.judge(_off(0.0), ProbeDiffs(_off(0.0), _off(0.0))).verdict == "ok"
    lone, calm = _lone(2.0, 0.02), _off(0.02)
    for probe in (ProbeDiffs(calm, lone), ProbeDiffs(lone, calm), ProbeDiffs(lone, lone)):
        found = gate.judge(_off(0.0), probe)
        assert found == Alignment(
            "drift", "outlier", "one of 16 tokens differs by 2 nats, the others by 0.02 on average"
        )
    assert gate.judge(_off(0.5), ProbeDiffs(lone, lone), lag_max=4).cause.startswith(
        "policy lag"
    ), "rollouts are heard too"
    assert gate.judge(_off(math.nan), ProbeDiffs(lone, lone)).cause.startswith("broken weights")


@pytest.mark.parametrize(
    ("dtype", "cached", "cause"),
    [
        ("bfloat16", _lone(0.25, 0.095), "stale prefix cache"),
        ("bfloat16", _lone(9.0), "stale prefix cache"),
        ("bfloat16", _sums(SERVER + 0.2, tokens=1), "stale prefix cache"),
        ("float32", _lone(0.1), "stale prefix cache"),
    ],
    ids=[
        "the others differ too",
        "too far for rounding",
        "one token in all",
        "float32 does not round so far",
    ],
)
def test_what_is_no_outlier(dtype: str, cached: DiffSums, cause: str) -> None:
    assert (
        AlignmentGate(thresholds(dtype))
        .judge(_off(0.0), ProbeDiffs(_off(0.0), cached))
        .cause.startswith(cause)
    )


@pytest.mark.parametrize(
    ("anchor", "words"),
    [(_sums(-1.7), "has not moved"), (_sums(-1.7, -1.2), "only in part (means moved by 0.2 there")],
)
def test_stale_weights_stand_still_or_follow_in_part(anchor: DiffSums, words: str) -> None:
    gate = AlignmentGate(BOUNDS)
    assert gate.judge(_off(0.0), _probe(0.0, 0.0, _sums(SERVER))).verdict == "ok"
    found = gate.judge(_off(0.0), _probe(0.7, 0.7, anchor))
    assert (
        found.verdict == "mismatch"
        and found.cause.startswith("stale weights: ")
        and words in found.cause
    )


def _rough(by: float, shift: float = 0.0) -> ProbeDiffs:
    """Half of the tokens differ by `by` to one side, half to the other; both means have moved by
    `shift`."""
    one = diff_sums([SERVER + shift + by, SERVER + shift - by] * 8, [SERVER + shift] * 16)
    return ProbeDiffs(one, one)


def test_what_the_first_probe_rounds_by_is_no_drift_later() -> None:
    """Seen with 64 layers in bf16: 0.08 nats with untouched weights, 0.11 later, called a tensor
    that is not shared."""
    gate = AlignmentGate(thresholds("bfloat16"))
    assert gate.judge(_off(0.0), _rough(0.08)).verdict == "ok"
    assert gate.judge(_off(0.12), _rough(0.11, 0.05), lag_max=2).verdict == "ok"
    found = gate.judge(_off(0.0), _rough(0.17, 0.05))
    assert found.verdict == "drift" and found.cause.startswith("rounding: both sides moved alike")
    still = gate.judge(_off(0.0), ProbeDiffs(_sums(-1.25, -0.95), _sums(-1.25, -0.95)))
    assert still.cause.startswith("stale weights: the server's mean has not moved")


def test_a_bound_that_somebody_chose_stays_and_a_calm_model_keeps_the_plain_one() -> None:
    for bounds, first in ((thresholds("bfloat16", ok=0.09), 0.08), (thresholds("bfloat16"), 0.01)):
        gate = AlignmentGate(bounds)
        assert gate.judge(_off(0.0), _rough(first)).verdict == "ok"
        assert gate.judge(_off(0.0), _rough(0.11)).verdict == "drift"


def test_a_first_probe_that_is_not_ok_sets_no_bound() -> None:
    gate = AlignmentGate(thresholds("bfloat16"))
    assert [gate.judge(_off(0.0), _rough(0.2)).verdict for _ in range(3)] == ["drift"] * 3


def test_stale_weights_are_seen_in_rollouts_where_there_is_no_probe() -> None:
    gate = AlignmentGate(BOUNDS)
    assert gate.judge(_off(0.001), None, lag_max=1, version=1).verdict == "ok"
    still = gate.judge(_sums(SERVER - 0.4, SERVER + 0.01), None, lag_max=1, version=2)
    assert still.verdict == "mismatch" and "has not moved" in still.cause
    both = gate.judge(_sums(SERVER - 0.8, SERVER - 0.6), None, lag_max=1, version=2)
    assert (both.verdict, both.kind) == ("drift", "large update"), "it follows"


def test_old_rollouts_that_stand_still_are_lag_and_nothing_else() -> None:
    """As between two reloads: the version that answers is the same as when both agreed."""
    gate = AlignmentGate(BOUNDS)
    assert gate.judge(_off(0.001), None, lag_max=0, version=5).verdict == "ok"
    found = gate.judge(_sums(SERVER - 0.4, SERVER + 0.01), None, lag_max=4, version=9)
    assert found == Alignment(
        "drift", "policy lag", "rollouts are far from the policy (lag up to 4)"
    )
    once = gate.judge(_sums(SERVER - 0.4, SERVER + 0.01), None, lag_max=1, version=6)
    assert once == Alignment(
        "drift", "large update", "one update moved the policy by 0.41 nats a token (lag 1)"
    )


def test_what_the_probe_sees_too_was_not_the_sampling() -> None:
    gate = AlignmentGate(BOUNDS)
    found = gate.judge(_off(0.02), _probe(0.0095, 0.0), lag_max=0)
    assert found.verdict == "drift" and found.cause.startswith(
        "other weights: fresh rollouts differ by 0.02"
    )
    assert gate.judge(_off(0.02), _probe(0.001, 0.0), lag_max=0).cause.startswith("sampling")


def test_rollouts_tell_lag_from_temperature() -> None:
    good = _probe(0.0, 0.0)
    gate = AlignmentGate(BOUNDS)
    assert gate.judge(_off(0.05), good, lag_max=1).verdict == "ok"
    assert gate.judge(_off(0.2), good, lag_max=1).cause == (
        "large update: one update moved the policy by 0.2 nats a token (lag 1)"
    )
    lagging = gate.judge(_off(2.0), good, lag_max=5)
    assert (
        lagging.verdict == "drift"
        and lagging.cause == "policy lag: rollouts are far from the policy (lag up to 5)"
    )
    fresh = gate.judge(_off(2.0), good, lag_max=1)
    assert fresh.verdict == "mismatch" and fresh.cause.startswith("sampling")
    assert fresh.cause.endswith("or an update too large (lr)")
    assert gate.judge(_off(2.0), None).verdict == "mismatch"
    same = gate.judge(_off(0.05), good, lag_max=0)
    assert same.verdict == "drift", "without lag rollouts are held to the bounds of a probe"
    assert gate.judge(_off(0.005), good, lag_max=0).verdict == "ok"
    assert gate.judge(DiffSums(), good).verdict == "ok"
    assert gate.judge(_off(math.nan), good).cause.startswith("broken weights")


def _batch(engine: Engine) -> list[dict[str, Any]]:
    return [group(engine, [3 + i, 12, 4, 13], 4, 6) for i in range(4)]


def _rescored(
    engine: Engine, temperature: float, *, say: float = 1.0, version: int = 0
) -> list[dict[str, Any]]:
    """Rollouts whose logprobs are the model's at `temperature`, while the batch says `say`."""
    batch = _batch(engine)
    for each in batch:
        tokens = torch.tensor(each["tokens"])
        with torch.no_grad():
            scores = (engine.model(tokens).logits[:, 3:-1] / temperature).log_softmax(-1)
        found = scores.gather(2, tokens[:, 4:, None])[..., 0]
        each["inference_logprobs"] = [[1.0] * 4 + row.tolist() for row in found]
        for row, values in zip(tokens[:, 4:].tolist(), found.tolist(), strict=True):
            engine.digests[completion_digest(row, values)] = (version, version)
        each["generation_params"] |= {"temperature": say}
    return batch


def _shift(batch: list[dict[str, Any]], by: int) -> list[dict[str, Any]]:
    for each in batch:
        for row in each["inference_logprobs"]:
            kept = row[4:]
            row[4:] = kept[-by:] + kept[:-by]
    return batch


def _first(
    engine: Engine, base: Path, folder: Path, batch: list[Any], **fields: Any
) -> AlignmentRecord:
    config = run_config(engine, base, folder, training_steps=1, **fields)
    train(config, api=Recorded([batch]))  # type: ignore[arg-type]
    return _alignments(folder)[0]


def _alignments(folder: Path) -> list[AlignmentRecord]:
    records = [
        parse_line(line) for line in (folder / "out" / "telemetry.jsonl").read_text().splitlines()
    ]
    return [record for record in records if isinstance(record, AlignmentRecord)]


@pytest.mark.parametrize(
    ("temperature", "say", "words"),
    [
        (0.7, 1.0, "temperature: the rollouts' logprobs fit 0.70; the trainer uses 1.00"),
        (0.9, 1.0, "fit 0.90"),
        (1.0, 0.5, "fit 1.00: raw logprobs, or that temperature; the trainer uses 0.50"),
    ],
)
def test_a_wrong_temperature_is_named(
    engine: Engine, base: Path, tmp_path: Path, temperature: float, say: float, words: str
) -> None:
    found = _first(engine, base, tmp_path, _rescored(engine, temperature, say=say))
    assert found.verdict == "mismatch" and words in found.cause


def test_a_temperature_next_to_ours_is_not_taken_for_the_cause(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    """Weights that sharpened fit one as well."""
    found = _first(engine, base, tmp_path, _rescored(engine, 0.97))
    assert found.verdict == "drift" and found.cause.startswith("sampling: fresh rollouts differ")


@pytest.mark.parametrize(("by", "words"), [(1, "the token before"), (-1, "the next token")])
def test_shifted_logprobs_are_named(
    engine: Engine, base: Path, tmp_path: Path, by: int, words: str
) -> None:
    found = _first(engine, base, tmp_path, _shift(_batch(engine), by))
    assert found.verdict == "mismatch"
    assert found.cause == f"shifted logprobs: each rollout logprob is that of {words}"


def test_a_filter_that_took_probability_away_is_named(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    batch = _batch(engine)
    for each in batch:
        each["inference_logprobs"] = [
            row[:4] + [value * 0.7 for value in row[4:]] for row in each["inference_logprobs"]
        ]
    found = _first(engine, base, tmp_path, batch)
    assert found.verdict == "mismatch" and found.cause.startswith(
        "sampling: every rollout logprob is above"
    )


def test_good_rollouts_are_ok(engine: Engine, base: Path, tmp_path: Path) -> None:
    assert _first(engine, base, tmp_path, _batch(engine)).verdict == "ok"


def test_missing_logprobs_end_the_run_with_a_record(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    batch = _batch(engine)
    for each in batch:
        each["inference_logprobs"] = None
    with pytest.raises(MissingLogprobs, match="requires inference_logprobs"):
        _first(engine, base, tmp_path, batch, missing_logprobs="refuse")
    (record,) = _alignments(tmp_path)
    assert (
        record.verdict == "mismatch"
        and record.cause.startswith("missing logprobs: ")
        and record.step == 1
    )


def test_missing_logprobs_are_recomputed_and_the_probe_still_judges(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    batch = _batch(engine)
    for each in batch:
        each["inference_logprobs"] = None
    found = _first(engine, base, tmp_path, batch)
    assert found.verdict == "ok" and not found.tokens and found.probe_diff_abs_mean is not None, (
        found
    )


def test_a_head_in_another_type_is_named(base: Path) -> None:
    policy = load_model(str(base), torch.float32, torch.device("cpu"))
    prompts = [[3, 12, 4, 13], [5, 12, 6, 13]]
    tokens = [[4, 5, 6, 7, 8, 9, 10, 11], [11, 10, 9, 8, 7, 6, 5, 4]]
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        theirs = completions_logprobs(
            policy, list(zip(prompts, tokens, strict=True)), head_dtype=dtype
        )
        answers = [
            (prompt, GeneratedTokens(ids, values), GeneratedTokens(ids, values))
            for prompt, ids, values in zip(prompts, tokens, theirs, strict=True)
        ]
        found = explain(
            Alignment("drift", "other weights", "from the start"),
            policy,
            [],
            answers,
            step=1,
            lags=[],
        )
        assert found.verdict == "mismatch"
        assert (
            found.cause
            == f"head dtype: the server computes with its head in {name}, the trainer in float32"
        )
    other = [
        (p, GeneratedTokens(c.token_ids, [v - 0.1 for v in c.logprobs]), c) for p, c, _ in answers
    ]
    left = Alignment("drift", "other weights", "from the start")
    assert explain(left, policy, [], other, step=1, lags=[]) == left, (
        "a difference of another kind stays unexplained"
    )


def test_policy_lag_is_not_taken_for_a_cause(engine: Engine, base: Path) -> None:
    batch = read_batch(json.loads(json.dumps(_batch(engine))), seq_len=64, temperature=1.0)
    policy = load_model(str(base), torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for index, parameter in enumerate(policy.parameters()):
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) * 0.02
            )
    lags = [Lag(5)] * len(batch.rollouts)
    lagging = Alignment("drift", "policy lag", "rollouts are far from the policy (lag up to 5)")
    assert explain(lagging, policy, batch.rollouts, [], step=1, lags=lags) == lagging


def test_stop_on_mismatch_stops_at_the_first(engine: Engine, base: Path, tmp_path: Path) -> None:
    config = run_config(
        engine, base, tmp_path, stop_on_mismatch=True, checkpoint_interval=1, lr=0.0
    )
    with pytest.raises(MismatchError, match=r"--stop-on-mismatch: temperature: .* fit 0\.70"):
        train(config, api=Recorded([_batch(engine), _rescored(engine, 0.7, version=1)]))  # type: ignore[arg-type]
    assert [record.verdict for record in _alignments(tmp_path)] == ["ok", "mismatch"]
    assert (tmp_path / "out" / "step_1").is_dir() and not (tmp_path / "out" / "step_2").exists()


@pytest.mark.parametrize(("minibatches", "steps"), [(1, 2), (2, 5)])
def test_a_wrong_temperature_is_named_behind_fresh_rollouts(
    engine: Engine, base: Path, tmp_path: Path, minibatches: int, steps: int
) -> None:
    """From the second step on every rollout is a step old; each minibatch is a version."""
    settings = {"lr": 1e-6, "minibatches": minibatches, "training_steps": steps}
    old = [_rescored(engine, 0.2, version=at * minibatches) for at in range(steps - 1)]
    train(
        run_config(engine, base, tmp_path, **settings),
        api=Recorded([_batch(engine), *old]),  # type: ignore[arg-type]
    )
    first, *_, last = _alignments(tmp_path)
    assert (first.verdict, last.verdict, last.cause_kind) == ("ok", "mismatch", "temperature")
    assert "fit 0.20" in last.cause


def test_an_update_that_moves_far_is_no_cause_in_the_rollouts(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    config = run_config(engine, base, tmp_path, lr=0.05, training_steps=2, warmup_steps=0)
    train(config, api=Recorded([_batch(engine), _rescored(engine, 1.0)]))  # type: ignore[arg-type]
    _, second = _alignments(tmp_path)
    assert (second.verdict, second.cause_kind) == ("drift", "large update"), second
    assert second.logprob_diff_abs_mean and second.logprob_diff_abs_mean > 1.0
    assert second.cause.startswith("large update: the updates since the rollouts moved the policy")
