"""The policy: packed rows equal single forwards, gradients do not depend on the split, float64
agrees."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.made_rollouts import plain_logprobs, rollouts_of
from trainer_core.checkpoints.companions import write_companions
from trainer_core.config import TrainingConfig
from trainer_core.errors import UsageError
from trainer_core.objective.registry import Objective
from trainer_core.optimization.optimizers import Stepper, for_device
from trainer_core.optimization.step import StepOutcome, accumulate
from trainer_core.policy.load import load_config, load_model, train_only
from trainer_core.policy.logprobs import chunked_scores, row_logprobs, sequence_logprobs, use_head
from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.packing import PackedRow, pack

CPU = torch.device("cpu")


@pytest.fixture
def model(base: Path) -> torch.nn.Module:
    return load_model(str(base), torch.float32, CPU)


def _config(**fields: object) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {"model_name": "m", "optimizer": "adamw", "lr": 1e-3, **fields}
    )


def _gradient(
    model: torch.nn.Module, rows: list[PackedRow], **fields: object
) -> tuple[StepOutcome, torch.Tensor]:
    stepper = Stepper(model, _config(max_grad_norm=0, **fields))
    outcome = accumulate(model, stepper, rows, Objective(stepper.config), 1)
    return outcome, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("model_type", ["qwen3", "evil"])
def test_code_that_came_with_a_model_is_neither_run_nor_asked_about(
    model_type: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on a terminal, and waits for the answer, where nobody has said that it must
    not be run."""
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    hostile = shutil.copytree(base, tmp_path / "hostile")
    (hostile / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    kinds = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    config = json.loads((hostile / "config.json").read_text())
    config |= {"model_type": model_type, "auto_map": dict.fromkeys(kinds, "evil.Evil")}
    (hostile / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (hostile / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    if model_type == "evil":
        with pytest.raises(UsageError, match="--model-name"):
            load_config(str(hostile))
    else:
        load_config(str(hostile))
        load_model(str(hostile), torch.float32, CPU)
        write_companions(str(hostile), tmp_path)
    assert not asked and not (tmp_path / "ran").exists()


def test_packed_forward_equals_one_by_one(model: torch.nn.Module, base: Path) -> None:
    rollouts = rollouts_of()
    (row,) = pack(rollouts, 10_000)
    packed = row_logprobs(model, row)
    plain = load_model(str(base), torch.float32, CPU)
    ordered = sorted(rollouts, key=lambda r: np.flatnonzero(r.trained)[-1], reverse=True)
    torch.testing.assert_close(
        packed, torch.cat([plain_logprobs(plain, r) for r in ordered]), atol=1e-6, rtol=1e-5
    )
    assert packed.dtype == torch.float32


class OneHot(torch.nn.Module):
    """A policy that is sure: after token t comes t + 1."""

    def __init__(self, vocabulary: int = 14) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.head = torch.nn.Linear(vocabulary, vocabulary, bias=False)
        self.head.weight.data = 50.0 * torch.eye(vocabulary)

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head

    def base_model(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(
            last_hidden_state=torch.nn.functional.one_hot((input_ids + 1) % 14, 14).float()
        )


def test_labels_are_shifted_by_exactly_one() -> None:
    """Counting sequences are certain under a policy that counts; off by one in any place they are
    impossible."""
    rng = np.random.default_rng(0)
    rollouts = []
    for length in (5, 9, 3, 12):
        zeros = np.zeros(length, dtype=np.float32)
        trained = rng.random(length) < 0.6
        trained[0], trained[-1] = False, True
        rollouts.append(
            Rollout((np.arange(length) + length) % 14, trained, zeros, zeros, 1.0, 0.0, "", ())
        )
    for budget in (1, 14, 100):
        for row in pack(rollouts, budget):
            logprobs = row_logprobs(OneHot(), row)
            torch.testing.assert_close(logprobs, torch.zeros_like(logprobs), atol=1e-6, rtol=0)
    (row,) = pack(rollouts, 100)
    for wrong in (row.predict - 1, row.predict + 1):
        shifted = PackedRow(**{**row.__dict__, "predict": wrong.clamp(0, len(row.tokens) - 1)})
        assert row_logprobs(OneHot(), shifted).min() < -40


def test_a_sequence_does_not_see_its_neighbours(model: torch.nn.Module) -> None:
    rollouts = rollouts_of(4)
    (row,) = pack(rollouts, 1000)
    before = row_logprobs(model, row)
    last = row.lengths[-1]
    tokens = row.tokens.clone()
    tokens[-last:] = (tokens[-last:] + 1) % 14
    after = row_logprobs(model, PackedRow(**{**row.__dict__, "tokens": tokens}))
    inside = row.predict < len(tokens) - last
    torch.testing.assert_close(before[inside], after[inside], atol=0, rtol=0)
    assert not torch.equal(before[~inside], after[~inside])


@pytest.mark.parametrize("budget", [20, 45, 100])
def test_the_split_changes_nothing(model: torch.nn.Module, budget: int) -> None:
    rollouts = rollouts_of()
    whole, gradient = _gradient(model, pack(rollouts, 10_000))
    split, other = _gradient(model, pack(rollouts, budget))
    assert len(pack(rollouts, budget)) > 1
    torch.testing.assert_close(gradient, other, atol=1e-6, rtol=1e-5)
    assert whole.metrics["loss"] == pytest.approx(split.metrics["loss"], abs=1e-6)
    assert (whole.tokens, whole.diffs.tokens) == (split.tokens, split.diffs.tokens)
    assert whole.diffs.abs_max == pytest.approx(split.diffs.abs_max, abs=1e-5)


def test_gradient_against_float64(base: Path) -> None:
    rollouts = rollouts_of()
    model = load_model(str(base), torch.float32, CPU)
    _, gradient = _gradient(model, pack(rollouts, 60), kl_coef=0.05)
    exact = load_model(str(base), torch.float64, CPU)
    exact.base_model.rotary_emb.double()
    total = torch.zeros((), dtype=torch.float64)
    tokens = sum(int(r.trained.sum()) for r in rollouts)
    for r in rollouts:
        ratio = (plain_logprobs(exact, r) - torch.from_numpy(r.logprobs[r.trained]).double()).exp()
        advantage = torch.from_numpy(r.advantages[r.trained]).double()
        total -= torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
        total += 0.05 * (ratio - 1 - ratio.log()).sum()
    (total / tokens).backward()
    reference = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    error = (gradient.double() - reference).norm() / reference.norm()
    assert error < 1e-5


def test_chunks_of_the_head_agree_in_value_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(37, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    labels, temperatures = torch.randint(11, (37,)), torch.rand(37) + 0.5
    whole = chunked_scores(hidden, weight, None, labels, temperatures).logprobs
    parts = chunked_scores(hidden, weight, None, labels, temperatures, chunk_elements=55).logprobs
    torch.testing.assert_close(whole, parts)
    expected = torch.autograd.grad(whole.sum(), [hidden, weight])
    torch.testing.assert_close(torch.autograd.grad(parts.sum(), [hidden, weight]), expected)
    kept = chunked_scores(
        hidden, weight, None, labels, temperatures, chunk_elements=55, keep=True
    ).logprobs
    with monkeypatch.context() as patched:
        patched.setattr("trainer_core.policy.logprobs._logits", None)  # nothing is computed twice
        again = torch.autograd.grad(kept.sum(), [hidden, weight])
    assert all(
        map(
            torch.equal,
            again,
            torch.autograd.grad(
                chunked_scores(
                    hidden, weight, None, labels, temperatures, chunk_elements=55
                ).logprobs.sum(),
                [hidden, weight],
            ),
        )
    )


def test_a_float32_head_does_not_round_logits() -> None:
    """With half-precision states and weights the head gives the float64 result; rounded logits are
    off by hundreds of its error."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 64).bfloat16().requires_grad_() for n in (37, 11))
    labels, ones = torch.randint(11, (37,)), torch.ones(37)
    exact = chunked_scores(hidden.double(), weight.double(), None, labels, ones).logprobs
    wide = chunked_scores(hidden, weight, None, labels, ones, wide=True).logprobs
    half = chunked_scores(hidden, weight, None, labels, ones).logprobs
    assert (wide - exact).abs().max() < 1e-5 < 1e-3 < (half - exact).abs().max()
    for got, wanted in zip(
        torch.autograd.grad(wide.sum(), [hidden, weight]),
        torch.autograd.grad(exact.sum(), [hidden, weight]),
        strict=True,
    ):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.05)


def test_the_head_of_a_run_is_the_head_of_all_its_scores(base: Path) -> None:
    model = load_model(str(base), torch.bfloat16, CPU)
    (row,) = pack(rollouts_of(), 10_000)
    half = row_logprobs(model, row)
    use_head(model, "model")
    assert torch.equal(row_logprobs(model, row), half)
    use_head(model, "float32")
    wide = row_logprobs(model, row)
    assert torch.equal(
        wide, row_logprobs(model, row, head_dtype=torch.float32)
    ) and not torch.equal(wide, half)
    assert torch.equal(row_logprobs(model, row, head_dtype=torch.bfloat16), half)


def test_temperature_scales_logits(model: torch.nn.Module) -> None:
    hidden, weight, labels = torch.randn(5, 8), torch.randn(11, 8), torch.randint(11, (5,))
    hot = chunked_scores(hidden, weight, None, labels, torch.full((5,), 0.5))
    torch.testing.assert_close(hot, chunked_scores(hidden * 2, weight, None, labels, torch.ones(5)))


def test_entropy_is_that_of_the_distribution_that_was_sampled_from(base: Path) -> None:
    """Against the sum written out, at each token's temperature; half of them cold, some logits far
    from 0."""
    rollouts = rollouts_of()
    exact = load_model(str(base), torch.float64, CPU)
    exact.base_model.rotary_emb.double()
    exact.set_attn_implementation("eager")
    sums, rows = 0.0, pack(rollouts, 60)
    for r in rollouts:
        logits = exact(torch.from_numpy(r.tokens)[None]).logits[0, :-1] / r.temperature
        p = logits.softmax(-1)[torch.from_numpy(np.flatnonzero(r.trained)) - 1]
        sums -= (p * p.log()).sum().item()
    tokens = sum(int(r.trained.sum()) for r in rollouts)
    outcome, _ = _gradient(load_model(str(base), torch.float32, CPU), rows)
    assert outcome.metrics["entropy_mean"] == pytest.approx(sums / tokens, rel=1e-6)
    far = torch.tensor([[900.0, 900.0, -900.0]])
    sure = chunked_scores(torch.ones(1, 1), far.T, None, torch.tensor([0]), torch.ones(1))
    assert sure.entropy.item() == pytest.approx(
        np.log(2)
    ) and sure.logprobs.item() == pytest.approx(-np.log(2))
    assert not sure.entropy.requires_grad


def test_sequence_logprobs_sum_to_one(model: torch.nn.Module) -> None:
    values = [sequence_logprobs(model, [3, 4, 5], [token])[0] for token in range(14)]
    assert sum(np.exp(values)) == pytest.approx(1.0, abs=1e-5)


def test_equal_scores_leave_no_gradient(model: torch.nn.Module) -> None:
    rollouts = [
        Rollout(**{**r.__dict__, "advantages": np.zeros_like(r.advantages)}) for r in rollouts_of(4)
    ]
    outcome, gradient = _gradient(model, pack(rollouts, 1000))
    assert outcome.metrics["loss"] == 0 and not gradient.any()


def test_a_broken_gradient_is_noticed(model: torch.nn.Module) -> None:
    rows = pack(rollouts_of(3), 1000)
    rows[0].advantages[0] = float("nan")
    stepper = Stepper(model, _config())
    assert not accumulate(model, stepper, rows, Objective(stepper.config), 1).finite


def test_gradient_is_clipped_to_the_norm(model: torch.nn.Module) -> None:
    stepper = Stepper(model, _config(max_grad_norm=1e-3))
    outcome = accumulate(model, stepper, pack(rollouts_of(), 1000), Objective(stepper.config), 1)
    total = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert outcome.metrics["grad_norm"] > 1e-3 and total.item() == pytest.approx(1e-3, rel=1e-3)


def test_tied_embedding_is_stepped_once(model: torch.nn.Module) -> None:
    stepper = Stepper(model, _config())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (
        len(stepper.params)
        == len({p.data_ptr() for p in stepper.params})
        == len(list(model.parameters()))
    )


def test_bf16_weights_travel_with_master_weights(base: Path) -> None:
    """Plain bf16 AdamW at this rate loses most updates; the float32 copy keeps them."""
    rows = pack(rollouts_of(6), 1000)
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(str(base), dtype, CPU)
        start = torch.cat([p.detach().float().flatten() for p in model.parameters()])
        stepper = Stepper(model, _config(lr=1e-5))
        for step in range(1, 11):
            accumulate(model, stepper, rows, Objective(stepper.config), step)
            stepper.compute()
            stepper.write()
        state = torch.cat([m.detach().flatten() for m in stepper.masters])
        moved[dtype] = (state - start).norm().item()
        weights = torch.cat([p.detach().float().flatten() for p in model.parameters()])
        torch.testing.assert_close(weights, state.to(dtype).float(), atol=0, rtol=0)
    assert moved[torch.bfloat16] > 0.9 * moved[torch.float32]


def test_warmup_is_linear(model: torch.nn.Module) -> None:
    stepper = Stepper(model, _config(warmup_steps=4))
    assert [stepper.set_lr(s) for s in (1, 2, 4, 9)] == pytest.approx([2.5e-4, 5e-4, 1e-3, 1e-3])


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_optimizers_learn(model: torch.nn.Module, name: str) -> None:
    rollouts = [
        Rollout(**{**r.__dict__, "advantages": np.ones_like(r.advantages)}) for r in rollouts_of(4)
    ]
    rows = pack(rollouts, 1000)
    stepper = Stepper(model, _config(optimizer=name, clip_eps=100.0, lr=1e-3))
    losses = []
    for step in range(1, 6):
        outcome = accumulate(model, stepper, rows, Objective(stepper.config), step)
        losses.append(outcome.metrics["loss"])
        stepper.compute()
        stepper.write()
    assert losses[-1] < losses[0] - 0.5


def test_missing_bitsandbytes_is_a_clear_error(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.optim", None)
    with pytest.raises(UsageError, match=r"pip install bitsandbytes.*adamw"):
        Stepper(model, _config(optimizer="adamw_8bit"))


def test_the_default_optimizer_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert for_device(TrainingConfig(model_name="m"), CPU).optimizer == "adamw"
    assert "adamw_8bit needs a GPU" in capsys.readouterr().out
    assert (
        for_device(TrainingConfig(model_name="m", optimizer="adamw_8bit"), CPU).optimizer
        == "adamw_8bit"
    )


def test_train_only_some_layers(demo_base: Path) -> None:
    model = load_model(str(demo_base), torch.float32, CPU)
    train_only(model, [1, 3])
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".layers.1." in n or ".layers.3." in n for n in trained)
    outcome, _ = _gradient(model, pack(rollouts_of(4), 1000))
    assert outcome.finite and outcome.metrics["grad_norm"] > 0
    with pytest.raises(UsageError, match="layers 0-3"):
        train_only(model, [4])


def _with_flat_ones(flat: int) -> list[Rollout]:
    """Twelve rollouts, the first `flat` of which have no advantage."""
    return [
        replace(r, advantages=r.advantages * 0) if i < flat else r
        for i, r in enumerate(rollouts_of(spread=6.0))
    ]


@pytest.mark.parametrize("fields", [{}, {"ratio_base": "proximal"}], ids=["rollout", "proximal"])
@pytest.mark.parametrize("objective", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_rows_without_advantage_need_no_backward_pass(
    base: Path, monkeypatch: pytest.MonkeyPatch, objective: str, fields: dict[str, str]
) -> None:
    """Loss, gradient and all metrics are the same to the last bit; only the other rows are
    differentiated."""
    rows = pack(_with_flat_ones(7), 40)
    flat = [row for row in rows if not row.advantages.any()]
    assert len(flat) >= 2 and sum(bool(row.advantages.all()) for row in rows) == len(rows) - len(
        flat
    )
    found, differentiated = [], []
    for always in (False, True):
        if always:
            monkeypatch.setattr(Objective, "teaches", lambda *_: True)
        model = load_model(str(base), torch.float32, CPU)
        seen: list[bool] = []
        model.base_model.register_forward_hook(
            lambda *_, seen=seen: seen.append(torch.is_grad_enabled())
        )
        found.append(_gradient(model, rows, objective=objective, seq_len=32, **fields))
        differentiated.append(sum(seen))
    assert differentiated == [len(rows) - len(flat), len(rows)]
    assert found[0][0] == found[1][0], "everything that a step tells"
    assert torch.equal(found[0][1], found[1][1])


def test_another_term_of_the_loss_needs_all_of_them(base: Path) -> None:
    outcome, gradient = _gradient(
        load_model(str(base), torch.float32, CPU), pack(_with_flat_ones(12), 40), kl_coef=0.1
    )
    assert outcome.metrics["loss"] > 0 and gradient.norm() > 0
    config = _config(max_grad_norm=0)
    model = load_model(str(base), torch.float32, CPU)
    stepper = Stepper(model, config)
    outcome = accumulate(model, stepper, pack(_with_flat_ones(12), 40), Objective(config), 1)
    assert outcome.metrics["loss"] == 0 and outcome.finite
    assert all(p.grad is not None and not p.grad.any() for p in stepper.params), (
        "0, so that momentum moves on"
    )
