"""Groups that do not train are dropped, counted, recorded and logged; they never end the run."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.bridge import MOST_DIGESTS, VersionSpan
from atropos_common.protocol.control import Role
from atropos_common.protocol.records import parse_line
from atropos_common.protocol.trainer_records import StepRecord
from atropos_tui.diagnoses import Names
from atropos_tui.diagnoses.log_scanner import LogScanner
from tests.support.harness import part
from tests.trainer_core.stand_ins import Engine, RunApiThread, group, run_config
from trainer_core.config import TrainingConfig
from trainer_core.errors import TooMuchLeftOut
from trainer_core.loop import train
from trainer_core.rollouts.batch import Selection, read_batch
from trainer_core.rollouts.source import LOST_IN_API, BatchSource, Lag, LagMeter, OwnSource
from trainer_core.telemetry import Telemetry

GOOD = {
    "tokens": [[5, 6], [5, 7]],
    "masks": [[-100, 6], [-100, 7]],
    "scores": [1.0, 0.0],
    "inference_logprobs": [[1.0, -1.0], [1.0, -1.0]],
    "env_id": 0,
}
BAD = {**GOOD, "masks": [[6], [7]], "env_id": 1}
FOREIGN = {**GOOD, "tokens": [[5, 600], [5, 7]], "masks": [[-100, 600], [-100, 7]], "env_id": 1}
BLIND = {**GOOD, "inference_logprobs": None, "env_id": 1}


class Feed:
    """run-api that has these batches, one after another."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = iter(batches)

    def next_batch(self, step: int, on_idle: Any = None) -> Any:
        return next(self.batches)

    def close(self) -> None:
        pass


def _intake(tmp_path: Path, batches: list[Any], **fields: Any) -> BatchSource:
    config = TrainingConfig(model_name="m", save_path=str(tmp_path), batch_size=4, **fields)
    return BatchSource(
        config,
        Feed(batches),
        Telemetry(tmp_path / "t.jsonl"),
        selection=Selection(vocab_size=512),  # type: ignore[arg-type]
        advantage_std=True,
        lag_meter=LagMeter([]),
        while_waiting=lambda: None,
    )


def _diagnosed(text: str) -> dict[str, str]:
    """Rule -> fix, of what a trainer printed."""
    looks = LogScanner(
        part("trainer", role=Role.TRAINER), Names("api", "arithmetic", "vllm", "trainer")
    )
    return {found.rule: found.fix for found in looks.scan([text.encode()], 0.0)}


def test_a_thousand_malformed_batches_in_a_row_do_not_end_the_run(
    tmp_path: Path, capsys: Any
) -> None:
    intake = _intake(tmp_path, [[BAD, BAD]] * 400 + [[FOREIGN]] * 600 + [[{}], [None, 3], [GOOD]])
    batch, lags = intake.next_batch(4, 0)
    assert len(batch.rollouts) == len(lags) == 2
    assert batch.left_out == {
        "malformed masks": 1600,
        "token ids outside of the vocabulary": 1200,
        "malformed tokens": 1,
        "malformed group": 2,
    }
    faults = {
        reason: sum(each[reason] for each in batch.faults_by_env.values())
        for reason in batch.left_out
    }
    assert faults == batch.left_out and set(batch.fault_examples) == set(batch.faults_by_env), (
        "by environment"
    )
    said = capsys.readouterr().out
    assert len(said.splitlines()) < 12, "each reason once a minute"
    assert (
        "4 sequences left out: malformed masks; group 0 of the batch (environment 'env 1'), "
        "sequence 0" in said
    )
    assert "vocabulary has 512 tokens: the environment uses another model's tokenizer" in said
    assert "nothing to train on in the last 10 batches" in said and "fix: correct" in said
    assert "rollouts_left_out" in _diagnosed(said)


def test_the_same_again_is_said_once_a_minute_with_the_count_since(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("trainer_core.rollouts.source.time.monotonic", lambda: now[0])
    intake = _intake(tmp_path, [[BAD, GOOD]] * 5)
    for _ in range(4):
        intake.next_batch(0, 0)
        now[0] += 20
    now[0] += 1
    intake.next_batch(0, 0)
    lines = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert [line.split(" sequences")[0] for line in lines] == ["[WARNING] 2", "[WARNING] 6"]


def test_a_batch_that_run_api_lost_counts(tmp_path: Path, capsys: Any) -> None:
    intake = _intake(tmp_path, [[], [], [GOOD]])
    batch, _ = intake.next_batch(0, 0)
    assert batch.left_out == {LOST_IN_API: 2 * intake.config.sequences_per_step}
    assert "one of its groups has NaN or Infinity" in capsys.readouterr().out


def test_an_empty_batch_of_another_source_is_not_run_apis(tmp_path: Path, capsys: Any) -> None:
    intake = _intake(tmp_path, [])
    intake.api = OwnSource([[], [GOOD]])
    intake.next_batch(0, 0)
    said = capsys.readouterr().out
    assert "empty batches of list" in said and "run-api" not in said


def test_above_a_share_the_run_ends_in_words(tmp_path: Path, capsys: Any) -> None:
    """Not before there are enough batches to speak of a share, and not for what is left out of good
    ones."""
    most = {"max_left_out": 0.6}
    halves = _intake(tmp_path, [[BAD, GOOD]] * 60, **most)
    for step in range(60):
        halves.next_batch(step, 0)
    intake = _intake(tmp_path, [[BAD, GOOD]] * 16 + [[BAD, BAD, GOOD]] * 40, **most)
    taken = 0
    with pytest.raises(
        TooMuchLeftOut, match=r"malformed masks \(.*'env 1'.*max_left_out under \[trainer\]"
    ):
        for taken in range(56):
            intake.next_batch(taken, 0)
    assert taken == 16 + 10, "(20 + 11) of (40 + 11) groups are bad in the window then"
    flat = _intake(
        tmp_path, [[GOOD, {**GOOD, "scores": [1, 1]}, {**GOOD, "scores": [1, 1]}]] * 30, **most
    )
    flat.selection = Selection(drop_flat=True)
    for step in range(30):
        flat.next_batch(step, 0)


def test_what_nobody_reads_is_said_once(tmp_path: Path, capsys: Any) -> None:
    odd = {**GOOD, "ref_logprobs": GOOD["inference_logprobs"], "group_overrides": {"color": 1}}
    intake = _intake(tmp_path, [[GOOD], [odd, odd], [odd]])
    for step in range(3):
        batch, _ = intake.next_batch(step, 0)
    assert batch.unused == {"ref_logprobs": 1, "group_overrides.color": 1}
    notes = [line for line in capsys.readouterr().out.splitlines() if "[NOTE]" in line]
    assert len(notes) == 2
    assert "ref_logprobs, which is not used: ref_kl_coef under [trainer] is 0" in notes[1]


def test_a_baseline_lasts_over_batches(tmp_path: Path) -> None:
    alone = {name: value[:1] for name, value in GOOD.items() if isinstance(value, list)}
    intake = _intake(tmp_path, [[alone], [{**alone, "scores": [3.0]}]])
    advantages = [intake.next_batch(step, 0)[0].rollouts[0].advantages[0] for step in range(2)]
    assert advantages == [0.0, 1.0]


def test_an_environment_without_logprobs_among_others_ends_nothing(
    tmp_path: Path, capsys: Any
) -> None:
    """A whole batch of its groups does not end it either, once others came with logprobs; the
    diagnosis still appears."""
    intake = _intake(
        tmp_path, [[GOOD, BLIND], [BLIND, BLIND], [BLIND], [GOOD]], missing_logprobs="refuse"
    )
    assert intake.next_batch(0, 0)[0].left_out == {"without inference_logprobs": 2}
    assert "no_logprobs" in _diagnosed(capsys.readouterr().out)
    assert intake.next_batch(1, 0)[0].left_out == {"without inference_logprobs": 6}


def test_rollouts_of_unknown_age_are_named_where_a_lag_is_asked_for(
    tmp_path: Path, capsys: Any
) -> None:
    _intake(tmp_path, [[GOOD]]).next_batch(0, 0)
    assert "unknown age" not in capsys.readouterr().out
    _intake(tmp_path, [[GOOD]], max_policy_lag=2).next_batch(0, 0)
    assert "2 rollouts are of unknown age" in capsys.readouterr().out


def test_many_short_turns_are_asked_for_in_parts() -> None:
    """As many as a server takes at a time: more would be refused, and the lag unknown from then
    on."""
    count = MOST_DIGESTS + 3
    tokens = [5, 6] * count
    raw = {
        "tokens": [tokens],
        "masks": [[-100, 6] * count],
        "scores": [1.0],
        "inference_logprobs": [[1.0, -1.0] * count],
    }
    asked: list[int] = []

    def versions(digests: list[str]) -> list[VersionSpan | None]:
        asked.append(len(digests))
        return [VersionSpan(7, 7)] * len(digests)

    batch = read_batch([raw], seq_len=2 * count)
    spans = (VersionSpan(7, 7),) * count
    assert LagMeter([versions]).measure(batch.rollouts, 9) == [Lag(2, spans=spans)]
    assert asked == [MOST_DIGESTS, 3]


def test_a_dump_that_cannot_be_written_ends_nothing(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    intake = _intake(tmp_path, [[GOOD]])
    intake.config = intake.config.model_copy(
        update={"dump_last_batch": True, "save_path": str(tmp_path / "file")}
    )
    assert (
        intake.next_batch(0, 0)[0].rollouts
        and "could not be written to temp.json" in capsys.readouterr().out
    )


@pytest.fixture
def api() -> Iterator[RunApiThread]:
    made = RunApiThread()
    yield made
    made.close()


def test_a_run_beside_a_broken_environment_records_what_it_left_out(
    engine: Engine,
    api: RunApiThread,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Through the real run-api: every batch has a good group, one with some trouble or of equal
    scores, now and then NaN."""
    good = group(engine, [3, 12, 4, 13], 4, 3)
    troubles: list[dict[str, Any]] = []
    for name, value in (
        ("masks", [[1]] * 4),
        ("scores", [1.0]),
        ("inference_logprobs", None),
        ("tokens", None),
    ):
        bad = copy.deepcopy(good)
        bad[name] = [[99_999, *row[1:]] for row in bad["tokens"]] if name == "tokens" else value
        troubles.append(bad)
    troubles.append({**good, "scores": [0.5] * 4, "generation_params": {"env": "flat"}})
    stop = threading.Event()

    def send() -> None:
        import httpx

        with httpx.Client(
            base_url=api.url, limits=httpx.Limits(max_keepalive_connections=0)
        ) as http:
            for i in range(10_000):
                while not stop.is_set() and http.get("/status").json()["queue_size"] > 2:
                    stop.wait(0.01)
                if stop.is_set():
                    return
                odd = {**good, "scores": [float("nan")] * 4} if i % 6 == 5 else troubles[i % 6]
                for each in (good, odd):
                    body = json.dumps({**each, "env_id": None})
                    http.post(
                        "/scored_data", content=body, headers={"content-type": "application/json"}
                    )

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        config = run_config(
            engine,
            base,
            tmp_path,
            api.url,
            training_steps=12,
            batch_size=4,
            gradient_accumulation_steps=2,
            missing_logprobs="refuse",
            api_timeout=30,
        )
        result = train(config)
    finally:
        stop.set()
        sender.join(5)
    assert result.done and result.step == 12
    records = [
        parse_line(line) for line in (tmp_path / "out" / "telemetry.jsonl").read_text().splitlines()
    ]
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [record.step for record in steps] == list(range(1, 13))
    seen = {reason for record in steps for reason in record.left_out}
    assert {
        "malformed masks",
        "malformed scores",
        "without inference_logprobs",
        "token ids outside of the vocabulary",
        LOST_IN_API,
    } == seen
    assert any(record.groups_by_env == {"even": 1, "flat": 1} for record in steps)
    assert {"flat": 1} in [
        record.flat_groups_by_env for record in steps
    ] and "flat 1/2 groups" in capsys.readouterr().out
    assert all(record.sequences >= 4 for record in steps)
