"""The trainer as a library: names, offline runs on recorded rollouts, callbacks, and the result of
a run."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import trainer_core
from tests.trainer_core.offline_runs import STEPS, group_of, offline_config, write_lines
from tests.trainer_core.stand_ins import (
    Engine,
    EnvThread,
    Recorded,
    RunApiThread,
    group,
    run_config,
)
from trainer_core import (
    CallbackError,
    RolloutsEnd,
    Stopped,
    TrainingConfig,
    TrainResult,
    UsageError,
    train,
)
from trainer_core.__main__ import main
from trainer_core.checkpoints.checkpoint import Saved
from trainer_core.report import Callback, StepReport
from trainer_core.rollouts.recorded import RecordedRollouts, Recorder


def test_every_name_is_there_and_importing_costs_nothing() -> None:
    assert sorted(trainer_core.__all__) == sorted(trainer_core._EXPORTS)
    for name in trainer_core.__all__:
        assert getattr(trainer_core, name).__doc__, name
    assert dir(trainer_core) == sorted(trainer_core.__all__)
    code = (
        "import sys, trainer_core; dir(trainer_core); sys.exit('torch' in sys.modules or "
        "'pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture
def batches(tmp_path: Path) -> Path:
    """Four batches of two groups of four."""
    return write_lines(
        tmp_path / "rollouts.jsonl",
        [{"batch": [group_of(2 * i), group_of(2 * i + 1)]} for i in range(STEPS)],
    )


def test_a_replay_trains_the_weights_that_the_run_trained(
    engine: Engine, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real run-api and a decoding server, whose weights the run trains in place; then the file
    alone."""
    api = RunApiThread()
    env = EnvThread(api.url, engine, groups=4, size=4)
    record = tmp_path / "kept" / "rollouts.jsonl"
    fields: dict[str, Any] = {"training_steps": STEPS, "max_policy_lag": 5}
    try:
        run = train(
            run_config(engine, base, tmp_path, api.url, record_rollouts=str(record), **fields)
        )
    finally:
        env.close()
        api.close()
    engine.die()
    config = offline_config(base, tmp_path, gradient_accumulation_steps=4, **fields)
    replay = train(config, rollouts=record)
    out = capsys.readouterr().out
    assert (
        f"✓ Rollouts of {record}: {STEPS} batches, steps 1 to {STEPS}" in out and "No server" in out
    )
    assert (replay.done, replay.step, replay.weight_version) == (True, STEPS, STEPS)
    same = [
        [(h["loss"], h["grad_norm"], h["reward_mean"], h["policy_lag_max"]) for h in r.history]
        for r in (run, replay)
    ]
    assert same[0] == same[1] and len(same[0]) == STEPS
    assert all(lag is not None for *_, lag in same[1]), "versions come from the record"
    weights = [
        load_file(tmp_path / name / "final_model" / "model.safetensors")
        for name in ("out", "offline")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert oct(record.stat().st_mode)[-3:] == "600"


def test_logprobs_that_a_server_told_are_recorded(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    """Rollouts that came without inference_logprobs: what the engine knew of them is in the
    file."""

    class Knowing(Engine):
        def answer(self, path: str, body: dict[str, Any]) -> Any:
            if path == "/bridge/logprobs":
                known = {"logprobs": [-1.5, -0.5, -1.0], "temperature": 1.0, "oldest_version": 0}
                return {"found": [known for _ in body["prompts"]]}
            return super().answer(path, body)

    engine.__class__ = Knowing
    groups = [
        [{**group(engine, [3, 12, 4, 13], 4, 3), "inference_logprobs": None} for _ in range(4)]
        for _ in range(2)
    ]
    record = tmp_path / "rollouts.jsonl"
    config = run_config(engine, base, tmp_path, training_steps=2, record_rollouts=str(record))
    run = train(config, api=Recorded(groups))
    replay = train(
        offline_config(base, tmp_path, gradient_accumulation_steps=4, training_steps=2),
        rollouts=record,
    )
    assert [h["logprobs_from"] for h in replay.history] == [{"engine": 16}] * 2
    for name in ("loss", "ratio_mean", "policy_lag_max"):
        assert [h[name] for h in run.history] == [h[name] for h in replay.history], name


def test_the_end_of_the_file_ends_the_run_well(base: Path, batches: Path, tmp_path: Path) -> None:
    result = train(offline_config(base, tmp_path, training_steps=100), rollouts=str(batches))
    assert (result.done, result.step) == (True, STEPS)
    assert "has no more rollouts" in result.reason
    assert result.path is not None and (result.path / "model.safetensors").is_file()
    assert [h["step"] for h in result.history] == [1, 2, 3, 4] and result.history[0][
        "policy_lag_max"
    ] is None


def test_lines_of_groups_and_of_batches_train_alike(
    base: Path, batches: Path, tmp_path: Path
) -> None:
    groups = [group_of(i) for i in range(2 * STEPS)]
    lines = write_lines(tmp_path / "groups.jsonl", [*groups, group_of(99, size=2)])
    both = [
        train(offline_config(base, tmp_path), rollouts=path).history for path in (batches, lines)
    ]
    assert [h["loss"] for h in both[0]] == [h["loss"] for h in both[1]]


def test_a_stopped_replay_goes_on_where_it_was(base: Path, batches: Path, tmp_path: Path) -> None:
    whole = train(offline_config(base, tmp_path), rollouts=batches).history
    fields = {"save_path": str(tmp_path / "cut"), "checkpoint_interval": 1, "resume": "auto"}
    first = train(
        offline_config(base, tmp_path, training_steps=2, **fields), rollouts=batches
    ).history
    second = train(offline_config(base, tmp_path, **fields), rollouts=batches).history
    assert [h["loss"] for h in first + second] == [h["loss"] for h in whole]


@pytest.mark.parametrize(
    "mode", [{}, {"weight_bridge_mode": "lora_only", "lora_merged_export": True}]
)
def test_more_steps_after_a_good_end_go_on_from_what_it_made(
    base: Path,
    batches: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    mode: dict[str, Any],
) -> None:
    """The end keeps no optimizer: without a newer checkpoint the optimizer starts fresh, the
    weights do not."""
    config = offline_config(base, tmp_path, resume="auto", training_steps=2, **mode)
    assert train(config, rollouts=batches).step == 2
    made = (tmp_path / "offline" / ("final_adapter" if mode else "final_model")).resolve()
    more = train(config.model_copy(update={"training_steps": 3}), rollouts=batches)
    said = capsys.readouterr().out
    assert f"Resuming from {made}: step 2, weight version 2; the optimizer restarts" in said
    assert [record["step"] for record in more.history] == [3] and more.weight_version == 3
    named = config.model_copy(update={"training_steps": 3, "resume": str(made)})
    assert train(named, rollouts=batches).weight_version == 3
    assert f"Resuming from {made}: step 3, weight version 3; the optimizer restarts" in (
        capsys.readouterr().out
    ), "a final model by its name"
    exact = train(
        config.model_copy(update={"training_steps": 4, "checkpoint_interval": 1}), rollouts=batches
    )
    assert exact.step == 4
    assert train(config.model_copy(update={"training_steps": 4}), rollouts=batches).history == []
    said = capsys.readouterr().out
    assert "step_4: step 4" in said and said.count("the optimizer restarts") == 1, (
        "the checkpoint of the last step is as new"
    )


def test_a_line_replaces_what_an_earlier_attempt_left(tmp_path: Path) -> None:
    """A trainer that died at step 3 and went on from a checkpoint of step 1: its own steps 2 and 3
    were given up."""
    path = tmp_path / "rollouts.jsonl"
    for steps in ([1, 2, 3], [2, 3, 4]):
        recorder = Recorder(path)
        for step in steps:
            recorder.write(step, step - 1, [{"tokens": [[step, len(steps), steps[0]]]}])
        recorder.close()
    with path.open("a") as file:
        file.write('{"batch": [{"tok')
    source = RecordedRollouts(path, 16)
    read = [(source.next_batch(step)[0]["tokens"][0], source.weight_version) for step in range(4)]
    assert read == [([1, 3, 1], 0), ([2, 3, 2], 1), ([3, 3, 2], 2), ([4, 3, 2], 3)]
    with pytest.raises(RolloutsEnd):
        source.next_batch(4)
    assert RecordedRollouts(path, 16).next_batch(2)[0]["tokens"] == [[3, 3, 2]], (
        "the batch of step 3"
    )
    recorder = Recorder(path)
    recorder.write(5, 4, [{"tokens": [[5]]}])
    assert RecordedRollouts(path, 16).next_batch(4)[0]["tokens"] == [[5]], "the torn line is gone"


def test_a_group_s_own_fields_are_no_recorder_s(tmp_path: Path) -> None:
    groups = [{"tokens": [[1]], "logprobs": [[-1.0]], "versions": None, "weight_version": "3"}]
    path = write_lines(tmp_path / "r.jsonl", groups)
    assert RecordedRollouts(path, 1).next_batch(0) == groups
    write_lines(path, [{"batch": groups, "step": 1, "versions": None}])
    with pytest.raises(UsageError, match="step 1: Expected `object`, got `null`"):
        RecordedRollouts(path, 1).next_batch(0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_another_batch_size_goes_on_at_the_next_group(tmp_path: Path, size: int) -> None:
    path = write_lines(tmp_path / "r.jsonl", [{"tokens": [[i], [i]]} for i in range(12)])
    first = RecordedRollouts(path, 4)
    read = [group["tokens"][0][0] for step in range(2) for group in first.next_batch(step)]
    second = RecordedRollouts(path, 2 * size)
    second.go_on_from(first.position())
    for step in range(8 // size):
        read += [group["tokens"][0][0] for group in second.next_batch(step)]
    assert read == list(range(4 + 8 // size * size)), "none twice and none left out"
    with pytest.raises(RolloutsEnd):
        second.next_batch(9)


def test_the_end_of_a_file_that_grows_is_where_the_next_run_begins(tmp_path: Path) -> None:
    rows = [{"batch": [{"tokens": [[i]]}]} for i in range(3)]
    path = write_lines(tmp_path / "r.jsonl", rows[:2])
    first = RecordedRollouts(path, 1)
    for step in range(2):
        first.next_batch(step)
    write_lines(path, rows)
    second = RecordedRollouts(path, 1)
    second.go_on_from(first.position())
    assert second.next_batch(0)[0]["tokens"] == [[2]]


def test_a_record_that_begins_later_serves_both(tmp_path: Path) -> None:
    """The record of a resumed run serves to continue from its checkpoint, and to start a new
    run."""
    path = write_lines(
        tmp_path / "r.jsonl", [{"batch": [{"tokens": [[s]]}], "step": s} for s in (11, 12, 13)]
    )
    assert [RecordedRollouts(path, 1).next_batch(step)[0]["tokens"] for step in (0, 1, 10, 11)] == [
        [[11]],
        [[12]],
        [[11]],
        [[12]],
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it has no complete batch of 8 sequences"),
        ('{"batch": []}\n{"a": 1}\n', "line 2: neither"),
        ('{"batch": 3}\n', "line 1: not a batch or group"),
        ("[" * 5000 + "\n", "line 1: not a batch or group"),
        ("\xff\n", "line 1: not a batch or group"),
    ],
)
def test_a_file_that_holds_something_else(
    base: Path, tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=words):
        train(offline_config(base, tmp_path), rollouts=path)


def test_no_file_and_modes_that_need_a_server(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="No such file"):
        train(offline_config(base, tmp_path), rollouts=tmp_path / "nothing")
    with pytest.raises(UsageError, match="needs one: leave it out, or lora_only"):
        train(
            offline_config(base, tmp_path, weight_bridge_mode="shared_vllm"),
            rollouts=tmp_path / "nothing",
        )
    with pytest.raises(UsageError, match=r"--record-rollouts .*File exists"):
        (tmp_path / "file").touch()
        config = offline_config(
            base,
            tmp_path,
            weight_bridge_mode="lora_only",
            record_rollouts=str(tmp_path / "file" / "x"),
        )
        Recorder(config.record_rollouts or "")
    assert main(["--model-name", str(base), "--rollouts", "a", "--record-rollouts", "b"]) == 2
    assert "they are in a file already" in capsys.readouterr().err


def test_adapters_train_offline(base: Path, batches: Path, tmp_path: Path) -> None:
    result = train(
        offline_config(base, tmp_path, weight_bridge_mode="lora_only", lr=1e-2), rollouts=batches
    )
    assert result.path is not None and (result.path / "adapter_model.safetensors").is_file()
    assert result.history[-1]["grad_norm"] > 0


def test_the_program_trains_offline(
    base: Path, batches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*offline_config(base, tmp_path).to_args(), "--rollouts", str(batches)]) == 0
    assert "Training finished: 4 steps" in capsys.readouterr().out


class Silent(Callback):
    """Overrides nothing."""


class Teller(Callback):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_start(self, config: TrainingConfig, step: int) -> None:
        self.heard.append(("start", step))

    def on_step(self, report: StepReport) -> None:
        self.heard.append(("step", report.step, report.outcome.metrics["loss"]))

    def on_checkpoint(self, saved: Saved) -> None:
        self.heard.append(("checkpoint", saved.path.name))

    def on_end(self, result: TrainResult) -> None:
        self.heard.append(("end", result.done))


def test_callbacks_are_told(base: Path, batches: Path, tmp_path: Path) -> None:
    teller = Teller()
    config = offline_config(
        base,
        tmp_path,
        checkpoint_interval=2,
        checkpoint_in_background=False,
        training_steps=3,
    )
    result = train(config, rollouts=batches, callbacks=[Silent(), teller])
    losses = [h["loss"] for h in result.history]
    assert teller.heard == [
        ("start", 0),
        ("step", 1, losses[0]),
        ("checkpoint", "step_2"),
        ("step", 2, losses[1]),
        ("step", 3, losses[2]),
        ("checkpoint", "final_model"),
        ("end", True),
    ]


def test_a_callback_that_raises_is_said_in_words_and_loses_nothing(
    base: Path, batches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Callback):
        def on_step(self, report: StepReport) -> None:
            if report.step == 2:
                raise KeyError("oops")

    with pytest.raises(CallbackError, match=r"Broken.on_step raised KeyError: 'oops'"):
        train(offline_config(base, tmp_path), rollouts=batches, callbacks=[Broken()])
    assert "No step is lost: the weights of step 2" in capsys.readouterr().out
    assert (tmp_path / "offline" / "step_2" / "model.safetensors").is_file()


def test_a_callback_may_stop_the_run(base: Path, batches: Path, tmp_path: Path) -> None:
    class Enough(Callback):
        def on_step(self, report: StepReport) -> None:
            if report.step == 2:
                raise Stopped

    result = train(offline_config(base, tmp_path), rollouts=batches, callbacks=[Enough()])
    assert (result.done, result.step, len(result.history)) == (False, 2, 2)


def test_a_source_of_ones_own(base: Path, tmp_path: Path) -> None:
    """No file and no server: an object that hands out batches, and ends."""

    class Two:
        closed = False

        def next_batch(self, step: int, on_idle: Any = None) -> list[Any]:
            if step == 2:
                raise RolloutsEnd("two are enough")
            return [group_of(step), group_of(step + 9)]

        def close(self) -> None:
            self.closed = True

    source = Two()
    result = train(offline_config(base, tmp_path), rollouts=source)
    assert (result.done, result.step, result.reason, source.closed) == (
        True,
        2,
        "two are enough",
        True,
    )


def test_the_process_is_the_callers_again(base: Path, batches: Path, tmp_path: Path) -> None:
    import torch._dynamo

    torch.set_num_threads(2)
    torch.manual_seed(12345)  # not the state that the run's own seed makes
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index,union-attr]
    patience = torch._dynamo.config.suppress_errors

    class Watcher(Callback):
        def on_end(self, result: TrainResult) -> None:
            self.threads = torch.get_num_threads()
            self.moved = not torch.equal(torch.get_rng_state(), states[2])

    watcher = Watcher()
    try:
        train(
            offline_config(base, tmp_path, training_steps=1, compile="off"),
            rollouts=batches,
            callbacks=[watcher],
        )
        assert (watcher.threads, watcher.moved) == (1, True), "it does change them meanwhile"
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert random.getstate() == states[0] and np.random.get_state()[1].tolist() == states[1]  # type: ignore[index,union-attr]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch._dynamo.config.suppress_errors == patience


def test_recording_never_ends_a_run(
    engine: Engine, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = [[group(engine, [3, 12, 4, 13], 4, 3) for _ in range(4)] for _ in range(2)]
    config = run_config(engine, base, tmp_path, training_steps=2, record_rollouts="/dev/full")
    assert train(config, api=Recorded(batches)).done
    assert capsys.readouterr().out.count("the recording of rollouts is incomplete") == 1


def test_a_long_run_need_not_hold_every_step(base: Path, batches: Path, tmp_path: Path) -> None:
    result = train(offline_config(base, tmp_path), rollouts=str(batches), keep_history=False)
    assert result.done and result.step > 0 and result.history == []
