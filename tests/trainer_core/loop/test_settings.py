"""Whole runs with other settings: every objective learns, early ends, exact resume of every
optimizer."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atropos_common.protocol.records import parse_line
from atropos_common.protocol.trainer_records import StepRecord
from tests.trainer_core.stand_ins import TOKEN, Engine, Recorded, group, plain_model, run_config
from trainer_core.checkpoints import checkpoint
from trainer_core.errors import MemoryFullError, MismatchError, UsageError
from trainer_core.loop import TrainResult, train
from trainer_core.policy.logprobs import LogitTransform, TokenScores, row_scores

PROMPTS = [[3 + i, 12, 4, 13] for i in range(4)]


class OneBehind:
    """Batches from the engine as it was one update ago: a policy lag of 1, as in a real run."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ahead = self._sample()

    def _sample(self) -> list[dict[str, Any]]:
        return [group(self.engine, prompt, 8, 3) for prompt in PROMPTS]

    def next_batch(self, step: int, on_idle: Any = None) -> list[dict[str, Any]]:
        batch, self.ahead = self.ahead, self._sample()
        return batch

    def close(self) -> None:
        pass


def _steps(tmp_path: Path) -> list[StepRecord]:
    records = [
        parse_line(line) for line in (tmp_path / "out" / "telemetry.jsonl").read_text().splitlines()
    ]
    return [r for r in records if isinstance(r, StepRecord)]


def _train(
    engine: Engine, base: Path, tmp_path: Path, api: Any = None, **fields: Any
) -> TrainResult:
    config = run_config(
        engine, base, tmp_path, **{"probe_interval": 0, "rollout_samples": 0, **fields}
    )
    return train(config, api=api or OneBehind(engine))  # type: ignore[arg-type]


def test_a_model_that_is_computed_wrong_is_not_trained(
    engine: Engine, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its name: a logit scale that the model does not have."""
    monkeypatch.setattr(
        "trainer_core.policy.logprobs.logit_transform", lambda config: LogitTransform(0.5)
    )
    with pytest.raises(UsageError, match="does not compute Qwen3ForCausalLM right"):
        _train(engine, base, tmp_path, training_steps=1)
    assert not (tmp_path / "out" / "telemetry.jsonl").exists(), "no step, and nothing saved"


OTHERS = (
    *({"objective": name} for name in ("grpo", "dr_grpo", "dapo", "cispo")),
    *({"objective": name, "ratio_base": "proximal"} for name in ("grpo", "cispo")),
)
"""Slow: each one's loss and gradient are proved in objective/test_losses.py, and the demo learns by
grpo."""


@pytest.mark.parametrize(
    "fields",
    [
        {"objective": "gspo"},
        *(pytest.param(fields, marks=pytest.mark.slow) for fields in OTHERS),
    ],
    ids=lambda fields: "-".join(fields.values()),
)
def test_every_objective_learns(
    demo_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """With all layers of the demo's model, since fewer learn less in this number of steps."""
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    torch.manual_seed(0)
    engine = Engine(tmp_path, plain_model(demo_base))
    try:
        _train(
            engine, demo_base, tmp_path, training_steps=25, gradient_checkpointing="on", **fields
        )
    finally:
        engine.close()
    steps = _steps(tmp_path)
    assert sum(s.reward_mean for s in steps[-4:]) > sum(s.reward_mean for s in steps[:4]) + 1.0
    assert {s.objective for s in steps} == {fields["objective"]}
    for s in steps:
        assert s.clip_fraction == pytest.approx(
            (s.clip_fraction_low or 0) + (s.clip_fraction_high or 0)
        )
        assert s.kl_k3 is not None and s.kl_k3 >= 0
        if fields.get("ratio_base"):
            assert s.ratio_mean == pytest.approx(1.0, abs=1e-6) and s.tis_mean is not None
            assert s.tis_truncated_fraction is not None and 0 < s.tis_mean <= 2.0
        else:
            assert s.tis_mean is None


def _recorded(engine: Engine, count: int) -> list[Any]:
    return [[group(engine, [3, 12, 4, 13], 4, 3) for _ in range(4)] for _ in range(count)]


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "adamw", "master_weights": "kahan", "lr_schedule": "cosine"},
        {"optimizer": "adamw", "master_weights": "stochastic", "objective": "gspo"},
        {
            "optimizer": "adafactor",
            "master_weights": "kahan",
            "ratio_base": "proximal",
            "objective": "dapo",
        },
        {"optimizer": "adamw_8bit", "master_weights": "fp32", "lr_schedule": "linear"},
        {"optimizer": "adamw_8bit", "master_weights": "stochastic", "objective": "cispo"},
    ],
    ids=lambda fields: "-".join(list(fields.values())[:2]),
)
def test_resumed_equals_never_stopped_bit_for_bit(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    if fields["optimizer"] == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    ends: list[dict[str, torch.Tensor]] = []
    batches: list[Any] = []
    bases = []
    made: dict[str, Any] = {}  # one memory of the versions, on which the ratio's base depends
    for name, cuts in (("straight", [4]), ("cut", [2, 4])):
        torch.manual_seed(1)
        (tmp_path / name).mkdir()
        engine = Engine(tmp_path / name, plain_model(base).bfloat16())
        engine.digests = made
        batches = batches or _recorded(engine, 4)
        for last in cuts:
            # Both attempts are of one run of 4 steps; the first is cut off by a stop.
            stop_after = {"api": Stopping(batches, last)}
            result = _train(
                engine,
                base,
                tmp_path / name,
                training_steps=4,
                checkpoint_interval=1,
                resume="auto",
                dtype="bfloat16",
                warmup_steps=2,
                **stop_after,
                **fields,
            )
            assert (result.step, result.done) == (last, last == 4)
            if last == 2:
                for tensor in engine.tensors.values():
                    tensor.zero_()
                engine.version, engine.held = None, True
        ends.append(load_file(tmp_path / name / "out" / "final_model" / "model.safetensors"))
        bases.append([(step.step, step.ratio_base) for step in _steps(tmp_path / name)])
        engine.close()
    assert bases[0] == bases[1]
    straight, cut = ends
    assert all(torch.equal(straight[k], cut[k]) for k in straight)
    start = dict(plain_model(base).bfloat16().named_parameters())
    assert any(not torch.equal(straight[k], start[k]) for k in straight), "something was trained"


class Stopping(Recorded):
    """A recorded stream that asks to stop after `last` batches."""

    def __init__(self, batches: list[Any], last: int) -> None:
        super().__init__(batches)
        self.last = last

    def next_batch(self, step: int, on_idle: Any = None) -> Any:
        from trainer_core.errors import Stopped

        if step >= self.last:
            raise Stopped
        return super().next_batch(step)


def test_checkpoints_hold_no_pickle_and_load_in_plain_transformers(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    _train(engine, base, tmp_path, training_steps=2, checkpoint_interval=1)
    step = tmp_path / "out" / "step_2"
    assert {p.suffix for p in step.rglob("*") if p.is_file()} <= {
        ".json",
        ".safetensors",
        ".jinja",
        ".txt",
    }
    assert load_file(step / "trainer_state" / "tensors.safetensors")
    assert [p.name for p in step.glob("*.safetensors")] == ["model.safetensors"], (
        "vLLM reads all of them as weights"
    )
    for saved in (step, tmp_path / "out" / "final_model"):
        model = plain_model(saved)
        assert torch.isfinite(model(torch.tensor([[3, 12, 4]])).logits).all()


def test_max_time_ends_well_while_waiting_for_a_batch(
    engine: Engine, base: Path, tmp_path: Path, capsys: Any
) -> None:
    class Silent(OneBehind):
        def next_batch(self, step: int, on_idle: Any = None) -> Any:
            while step >= 1:
                on_idle()
            return super().next_batch(step)

    result = _train(engine, base, tmp_path, Silent(engine), training_steps=50, max_time="2s")
    assert result.done and result.step == 1 and "--max-time 2 s" in result.reason
    assert result.path == tmp_path / "out" / "final_model" and result.path.is_dir()
    assert "Training finished: 1 steps (--max-time" in capsys.readouterr().out


def test_stop_reward_ends_well_and_is_remembered(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    result = _train(
        engine,
        base,
        tmp_path,
        training_steps=50,
        stop_reward=0.0,
        stop_window=3,
        checkpoint_interval=1,
    )
    assert (result.done, result.step) == (True, 3) and "--stop-reward 0" in result.reason
    seen = json.loads((tmp_path / "out" / "step_3" / "trainer_state.json").read_text())["progress"]
    assert seen["rewards"] == [s.reward_mean for s in _steps(tmp_path)] and seen["elapsed_s"] > 0
    assert (
        checkpoint.starting_point(run_config(engine, base, tmp_path, resume="auto")).progress
        == seen
    )


def test_stop_on_mismatch_fails_and_saves_nothing(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    shifted = _recorded(engine, 4)
    for batch in shifted[2:]:
        for made in batch:
            made["inference_logprobs"] = [
                [x if x == 1.0 else x - 3.0 for x in row] for row in made["inference_logprobs"]
            ]
    with pytest.raises(MismatchError, match=r"--stop-on-mismatch.*not saved.*step_2"):
        _train(
            engine,
            base,
            tmp_path,
            Recorded(shifted),
            training_steps=4,
            checkpoint_interval=1,
            stop_on_mismatch=True,
            lr=0.0,
        )
    assert [p.name for p in checkpoint.complete_checkpoints(tmp_path / "out")] == [
        "step_1",
        "step_2",
    ]


def test_a_run_on_two_cores_learns_the_same(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch_threads` = 2: rows side by side in two threads, and the weights of a run on one."""
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    seen: dict[int, set[int]] = {1: set(), 2: set()}
    ends, batches, made = [], [], dict[str, Any]()
    for cores in (1, 2):
        torch.manual_seed(0)
        (tmp_path / str(cores)).mkdir()
        engine = Engine(tmp_path / str(cores), plain_model(base))
        engine.digests = made
        batches = batches or _recorded(engine, 3)

        def watched(*args: Any, threads: set[int] = seen[cores], **more: Any) -> TokenScores:
            threads.add(threading.get_ident())
            return row_scores(*args, **more)

        monkeypatch.setattr("trainer_core.optimization.step.row_scores", watched)
        _train(
            engine,
            base,
            tmp_path / str(cores),
            Recorded(batches),
            training_steps=3,
            torch_threads=cores,
        )
        ends.append(load_file(tmp_path / str(cores) / "out" / "final_model" / "model.safetensors"))
        engine.close()
    assert len(seen[1]) == 1 and len(seen[2]) >= 2
    for name, one in ends[0].items():
        torch.testing.assert_close(one, ends[1][name], atol=1e-4, rtol=1e-3)


def test_max_policy_lag_leaves_old_rollouts_out(
    engine: Engine, base: Path, tmp_path: Path, capsys: Any
) -> None:
    old = _recorded(engine, 1)[0]

    class Mixed(OneBehind):
        def next_batch(self, step: int, on_idle: Any = None) -> Any:
            return [*super().next_batch(step), old[0]]

    _train(engine, base, tmp_path, Mixed(engine), training_steps=4, max_policy_lag=2)
    assert [s.left_out for s in _steps(tmp_path)] == [
        {},
        {},
        {},
        {"older than --max-policy-lag 2": 4},
    ]
    assert [(s.too_old, s.policy_lag_bound) for s in _steps(tmp_path)] == [(0, 2)] * 3 + [(4, 2)]
    assert [s.policy_lag_max for s in _steps(tmp_path)] == [0, 1, 2, 1]
    assert "4 sequences left out: older than --max-policy-lag 2" in capsys.readouterr().out


def test_every_setting_can_be_set_from_a_profile(tmp_path: Path) -> None:
    from atropos_tui.profile.profile import load_profile
    from trainer_core.__main__ import parse_args
    from trainer_core.config import TrainingConfig

    sets = [
        "objective=gspo",
        "ratio_base=proximal",
        "tis_mask=token",
        "clip_eps_high=0.3",
        "master_weights=kahan",
        "max_time=2h",
        "stop_reward=0.95",
        "max_policy_lag=2",
        "lr_schedule=cosine",
        "use_tensorboard=true",
        "gradient_checkpointing=on",
        "advantage_std=false",
    ]
    profile, _ = load_profile("demo", [f"trainer.{text}" for text in sets])
    config = TrainingConfig.model_validate({"model_name": "m", **profile.trainer.settings})
    assert (config.objective, config.max_time, config.clip_eps_high) == ("gspo", 7200.0, 0.3)
    assert parse_args(config.to_args()) == config, "what the plan passes on the command line"


def test_a_model_that_does_not_fit_says_the_ways_out(
    engine: Engine, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr("trainer_core.loop.accumulate", full)
    with pytest.raises(
        MemoryFullError, match=r"(?s)Tried to allocate 20 GiB.*--pack-tokens below 2048"
    ):
        _train(engine, base, tmp_path)
