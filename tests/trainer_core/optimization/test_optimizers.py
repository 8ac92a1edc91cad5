"""Optimizers: half-precision weights move as far as float32 ones, schedules, saved state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer_core.checkpoints.state import join_tensors, split_tensors
from trainer_core.config import TrainingConfig
from trainer_core.errors import UsageError
from trainer_core.optimization.optimizers import (
    Stepper,
    dice,
    learning_rate,
    round_stochastically,
    salt,
)

STEPS, LR = 100, 1e-6
MASTERS = ["fp32", "kahan", "stochastic"]


def _optimizer(name: str) -> str:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return name


class Weights(torch.nn.Module):
    """Weights of the usual size, and a norm of ones, where half precision is coarsest."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = torch.nn.Parameter((torch.randn(128, 64) * 0.02).bfloat16().to(dtype))
        self.norm = torch.nn.Parameter(torch.ones(128, dtype=dtype))

    def flat(self) -> torch.Tensor:
        return torch.cat([p.detach().float().flatten() for p in self.parameters()])


def _gradients(model: Weights, step: int) -> None:
    """The same noisy gradients with a drift for every run."""
    generator = torch.Generator().manual_seed(step)
    loss = sum(
        (p * (torch.randn(p.shape, generator=generator) + 1).to(p.dtype)).sum()
        for p in model.parameters()
    )
    loss.backward()  # type: ignore[union-attr]


def _config(**fields: Any) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {"model_name": "m", "lr": LR, "max_grad_norm": 0, **fields}
    )


def _train(model: Weights, stepper: Stepper, steps: range) -> None:
    for step in steps:
        _gradients(model, step)
        stepper.set_lr(step)
        stepper.clip()
        stepper.compute()
        stepper.write()


def _travel(dtype: torch.dtype, **fields: Any) -> torch.Tensor:
    model = Weights(dtype)
    start = model.flat()
    _train(model, Stepper(model, _config(**fields)), range(1, STEPS + 1))
    return model.flat() - start


@pytest.fixture(scope="module")
def exact() -> dict[str, torch.Tensor]:
    return {}


@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "adafactor"])
def test_bf16_weights_travel_with_the_float32_ones(
    optimizer: str, masters: str, exact: dict[str, torch.Tensor]
) -> None:
    """At lr 1e-6 over 100 steps: at least 95 % of the distance, and (at random, so on average) in
    its direction."""
    if _optimizer(optimizer) not in exact:
        exact[optimizer] = _travel(torch.float32, optimizer=optimizer)
    moved, wanted = (
        _travel(torch.bfloat16, optimizer=optimizer, master_weights=masters),
        exact[optimizer],
    )
    distance = (moved.norm() / wanted.norm()).item()
    along = (moved @ wanted / (wanted @ wanted)).item()
    print(f"{optimizer} {masters}: {distance:.3f} of the distance, {along:.3f} along it")
    assert distance >= 0.95
    assert along >= (0.95 if masters == "stochastic" else 0.9)


def test_plain_bf16_loses_most_of_it() -> None:
    wanted = _travel(torch.float32, optimizer="adamw")
    model = Weights(torch.bfloat16)
    start, optimizer = model.flat(), torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for step in range(1, STEPS + 1):
        _gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
    distance = ((model.flat() - start).norm() / wanted.norm()).item()
    print(f"plain bf16: {distance:.3f} of the distance")
    assert distance < 0.25


@pytest.mark.parametrize("masters", ["kahan", "stochastic"])
def test_nothing_but_what_is_named_stays_in_memory(masters: str) -> None:
    model = Weights(torch.bfloat16)
    stepper = Stepper(model, _config(optimizer="adafactor", master_weights=masters))
    _train(model, stepper, range(1, 3))
    assert sum(m.untyped_storage().nbytes() for m in stepper.masters) == 0
    kept = split_tensors(stepper.half.state_dict())[1].values()
    sizes = {"kahan": 2 * sum(p.numel() for p in model.parameters()), "stochastic": 0}
    assert sum(t.nbytes for t in kept if t.dtype != torch.uint8) == sizes[masters]


def test_stochastic_rounding_is_right_on_average() -> None:
    salted = salt(bytes(8), 0, torch.device("cpu"))
    low, high = 1.0, 1.0 + 2**-7  # neighbours in bfloat16
    value = low + 0.25 * (high - low)
    rounded = round_stochastically(torch.full((20_000,), value), salted)
    assert set(rounded.tolist()) == {low, high}
    assert (rounded == high).double().mean().item() == pytest.approx(0.25, abs=0.02)
    negative = round_stochastically(torch.full((20_000,), -value), salted)
    assert (negative == -high).double().mean().item() == pytest.approx(0.25, abs=0.02)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    kept = round_stochastically(special, salted)
    assert kept.isnan()[0] and kept[1:].tolist() == [float("inf"), -float("inf"), 0.0]


@pytest.mark.parametrize("begin", [0, (1 << 31) - 1000, (1 << 32) - 700])
def test_dice_do_not_depend_on_how_a_parameter_is_cut(begin: int) -> None:
    def of(key: int, first: int, rows: int) -> torch.Tensor:
        return dice(
            salt(key.to_bytes(8), begin + first, torch.device("cpu")), torch.Size([rows, 50])
        )

    whole = of(7, 0, 40)
    assert torch.equal(whole[25:], of(7, 25 * 50, 15))
    for other in (8, 1 << 60):  # another half of the key each
        same = (whole == of(other, 0, 40)).double().mean().item()
        assert same < 0.01
    shares = [((whole >> bit) & 1).double().mean().item() for bit in range(16)]
    assert shares == pytest.approx([0.5] * 16, abs=0.04)
    assert not (whole >> 16).any()


def test_dice_of_neighbours_and_of_two_steps_have_nothing_to_do_with_each_other() -> None:
    salts = [salt(key.to_bytes(8), 0, torch.device("cpu")) for key in (1, 2)]
    first, second = (dice(each, torch.Size([200_000])).double() / 65536 for each in salts)
    assert first.mean().item() == pytest.approx(0.5, abs=0.004)
    pairs = (
        (first[1:], first[:-1]),
        (first[64:], first[:-64]),
        (first, second),
        (first[1:], second[:-1]),
    )
    for one, other in pairs:
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1].item()) < 0.012


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_a_compiler_rounds_the_same() -> None:
    """As on a GPU: sums and products that wrap stay those of int32."""
    plain = round_stochastically.__wrapped__
    compiled = torch.compile(plain, dynamic=True)
    for count, first in ((100_003, 5), (65_536, (1 << 32) - 1000), (70_000, 1 << 31)):
        values, salted = torch.randn(count), salt(b"8 bytes.", first, torch.device("cpu"))
        assert torch.equal(compiled(values, salted), plain(values, salted))


def test_stochastic_rounding_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(UsageError, match="needs bfloat16"):
        Stepper(Weights(torch.float16), _config(optimizer="adamw", master_weights="stochastic"))
    with pytest.raises(ValueError, match="needs --dtype bfloat16"):
        _config(master_weights="stochastic", dtype="float16")
    Stepper(
        Weights(torch.float32), _config(optimizer="adamw", master_weights="stochastic")
    )  # nothing to round


@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "adafactor"])
def test_state_through_json_and_safetensors_is_exact(
    tmp_path: Path, optimizer: str, masters: str
) -> None:
    """Six steps straight equal three, a checkpoint, and three more: bit for bit."""
    fields = {"optimizer": _optimizer(optimizer), "master_weights": masters, "lr": 1e-3}
    straight, cut = Weights(torch.bfloat16), Weights(torch.bfloat16)
    first = Stepper(straight, _config(**fields))
    _train(straight, first, range(1, 7))
    before = Stepper(cut, _config(**fields))
    _train(cut, before, range(1, 4))
    plain, tensors = split_tensors(before.state_dict())
    save_file(tensors, tmp_path / "state.safetensors")
    resumed = Weights(torch.bfloat16)
    resumed.load_state_dict(cut.state_dict())
    after = Stepper(resumed, _config(**fields))
    after.load_state_dict(
        join_tensors(json.loads(json.dumps(plain)), load_file(tmp_path / "state.safetensors"))
    )
    _train(resumed, after, range(4, 7))
    assert torch.equal(straight.flat(), resumed.flat())
    theirs, mine = (split_tensors(s.state_dict())[1] for s in (first, after))
    assert theirs.keys() == mine.keys() and all(torch.equal(theirs[k], mine[k]) for k in theirs)


def test_a_resumed_run_takes_its_own_decay_and_betas() -> None:
    for optimizer in ("adamw", "adafactor"):
        first = Stepper(Weights(torch.bfloat16), _config(optimizer=optimizer))
        edited = _config(optimizer=optimizer, weight_decay=0.1, betas=(0.9, 0.95))
        again = Stepper(Weights(torch.bfloat16), edited)
        again.load_state_dict(first.state_dict())
        (found,), (wanted,) = (
            again.optimizer.param_groups,
            Stepper(Weights(torch.bfloat16), edited).optimizer.param_groups,
        )
        assert found["weight_decay"] == 0.1
        assert {k: v for k, v in found.items() if k != "params"} == {
            k: v for k, v in wanted.items() if k != "params"
        }


@pytest.mark.parametrize("masters", ["kahan", "stochastic"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_part_at_a_time_is_the_same_step(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, masters: str
) -> None:
    """Bit for bit, though never more than one parameter has float32 memory of its own."""
    ends = []
    for size, most in ((1 << 26, 2), (64, 1)):
        monkeypatch.setattr("trainer_core.optimization.optimizers.PART_PARAMETERS", size)
        model = Weights(torch.bfloat16)
        stepper = Stepper(model, _config(optimizer=optimizer, master_weights=masters, lr=1e-3))
        seen = []
        step = stepper.optimizer.step

        def counted(stepper: Stepper = stepper, step: Any = step, seen: list[int] = seen) -> None:
            seen.append(sum(bool(m.untyped_storage().nbytes()) for m in stepper.masters))
            step()

        monkeypatch.setattr(stepper.optimizer, "step", counted)
        _gradients(model, 1)
        stepper.set_lr(1)
        stepper.compute()
        assert max(seen) == most and len(seen) == 3 - most
        assert (
            all(copy.dtype == torch.float32 for copy in stepper.copies().values())
            and len(stepper.copies()) == 2
        )
        stepper.write()
        assert not stepper.copies()
        ends.append(model.flat() if masters == "kahan" else model.flat().sign())
    assert torch.equal(*ends)


def test_another_optimizers_state_is_refused() -> None:
    model = Weights(torch.bfloat16)
    state = Stepper(model, _config(optimizer="adamw", master_weights="kahan")).state_dict()
    with pytest.raises(
        UsageError, match="kahan over 2 parameters, this run has adamw and fp32 over 2"
    ):
        Stepper(model, _config(optimizer="adamw")).load_state_dict(state)


def test_tensor_trees_keep_keys_and_share_memory() -> None:
    table = torch.arange(4.0)
    tree = {"a": {0: table, "1": [1, None, "x", table]}, "b": 2.5, "empty": torch.zeros(0)}
    plain, tensors = split_tensors(tree)
    assert len(tensors) == 2, "one table, kept once"
    back = join_tensors(json.loads(json.dumps(plain)), tensors)
    assert list(back["a"]) == [0, "1"] and torch.equal(back["a"][0], table) and back["b"] == 2.5
    with pytest.raises(TypeError, match="state/x"):
        split_tensors({"x": object()})


def test_schedules() -> None:
    def rates(**fields: Any) -> list[float]:
        return [
            learning_rate(_config(lr=1.0, training_steps=8, **fields), step) for step in range(1, 9)
        ]

    assert rates() == [1.0] * 8
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(warmup_steps=4, lr_schedule="linear") == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    )
    cosine = rates(lr_schedule="cosine", lr_min=0.2)
    assert (
        cosine[0] == 1.0
        and cosine[4] == pytest.approx(0.6)
        and cosine == sorted(cosine, reverse=True)
    )
    assert 0.2 < cosine[7] < 0.25, "the last step still does something"
    assert learning_rate(_config(lr=1.0, training_steps=8, lr_schedule="linear"), 20) == 0.0
    with pytest.raises(ValueError, match="--lr-min"):
        _config(lr_min=1.0)


def _trained(
    tmp_path: Path,
    fields: dict[str, Any],
    *,
    resumed: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Weights after six steps; with `resumed` the last three are another stepper's, from a
    checkpoint."""
    model = Weights(dtype)
    stepper = Stepper(model, _config(**fields))
    _train(model, stepper, range(1, 4))
    if resumed is not None:
        plain, tensors = split_tensors(stepper.state_dict())
        save_file(tensors, tmp_path / "state.safetensors")
        weights, model = model.state_dict(), Weights(dtype)
        model.load_state_dict(weights)
        stepper = Stepper(model, _config(**resumed))
        stepper.load_state_dict(
            join_tensors(json.loads(json.dumps(plain)), load_file(tmp_path / "state.safetensors"))
        )
    _train(model, stepper, range(4, 7))
    return model.flat()


@pytest.mark.parametrize("gradients", ["float32", "bfloat16"])
@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "adafactor"])
def test_what_lies_in_the_hosts_memory_is_stepped_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, masters: str, gradients: str
) -> None:
    """Bit for bit, part by part, clipped, and over a resume in either direction."""
    monkeypatch.setattr("trainer_core.optimization.optimizers.PART_PARAMETERS", 64)
    fields = {
        "optimizer": _optimizer(optimizer),
        "master_weights": masters,
        "lr": 1e-3,
        "max_grad_norm": 0.5,
        "gradient_dtype": gradients,
    }
    offloaded = fields | {"optimizer_offload": True}
    wanted = _trained(tmp_path, fields)
    assert torch.equal(_trained(tmp_path, offloaded), wanted)
    assert torch.equal(_trained(tmp_path, fields, resumed=offloaded), wanted)
    assert torch.equal(_trained(tmp_path, offloaded, resumed=fields), wanted)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_what_is_stepped_in_place_keeps_its_state_where_it_is(
    tmp_path: Path, optimizer: str
) -> None:
    """float32 weights, such as adapters: an offload has nothing to do there, and a resume does not
    take it away."""
    fields = {"optimizer": optimizer, "lr": 1e-3}
    offloaded = fields | {"optimizer_offload": True}
    wanted = _trained(tmp_path, fields, dtype=torch.float32)
    assert torch.equal(
        _trained(tmp_path, offloaded, resumed=offloaded, dtype=torch.float32), wanted
    )


@pytest.mark.parametrize("masters", MASTERS)
def test_between_two_steps_the_device_holds_none_of_it(
    monkeypatch: pytest.MonkeyPatch, masters: str
) -> None:
    """Three parameters of a part each: one comes, one is stepped, one goes."""
    monkeypatch.setattr("trainer_core.optimization.optimizers.PART_PARAMETERS", 64)
    monkeypatch.setattr("trainer_core.optimization.optimizers.SMALL", 64)
    model = torch.nn.ParameterList(torch.randn(128, 64).bfloat16() for _ in range(6))
    stepper = Stepper(
        model, _config(optimizer="adamw", master_weights=masters, optimizer_offload=True)
    )
    seen = []

    def held() -> int:
        kept = [*stepper.masters, *getattr(stepper.half, "lost", [])]
        kept += [
            v
            for state in stepper.optimizer.state.values()
            for v in state.values()
            if v.numel() > 64
        ]
        return sum(tensor.untyped_storage().nbytes() for tensor in kept)

    step = stepper.optimizer.step
    monkeypatch.setattr(stepper.optimizer, "step", lambda: (seen.append(held()), step()))
    for number in (1, 2):
        seen.clear()
        for param in model:
            (param * 1e-3).sum().backward()
        stepper.set_lr(number)
        stepper.compute()
        assert held() == 0
        stepper.write()
    whole = 128 * 64 * {"fp32": 12, "kahan": 10, "stochastic": 8}[masters]
    assert len(seen) == 6 and max(seen) <= 3 * whole + 4 * 128 * 64


@pytest.mark.parametrize("masters", MASTERS)
def test_bfloat16_gradients_stay_where_they_are_and_are_clipped_alike(masters: str) -> None:
    ends, norms = [], []
    for gradients in ("float32", "bfloat16"):
        model = Weights(torch.bfloat16)
        config = _config(
            optimizer="adafactor",
            master_weights=masters,
            lr=1e-3,
            gradient_dtype=gradients,
            max_grad_norm=0.5,
        )
        stepper = Stepper(model, config)
        _gradients(model, 1)  # one row: nothing is lost by adding up
        if gradients == "bfloat16":
            assert [g.dtype for g in stepper.gradients] == [torch.bfloat16] * 2
            assert all(m.grad is None for m in stepper.masters), "no float32 copy before the step"
        stepper.set_lr(1)
        norms.append(stepper.clip().item())
        stepper.compute()
        assert all(m.grad is None for m in stepper.masters)
        stepper.write()
        assert not stepper.gradients
        ends.append(model.flat())
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] > 0.5
    torch.testing.assert_close(
        ends[0], ends[1], rtol=2**-7, atol=1e-6
    )  # a unit in the last place of bfloat16


def test_gradients_add_up_in_bfloat16_where_that_is_said() -> None:
    sums = {}
    for gradients in ("float32", "bfloat16"):
        model = Weights(torch.bfloat16)
        stepper = Stepper(model, _config(optimizer="adamw", gradient_dtype=gradients))
        for scale in (1.0, 2.0**-10):
            (model.matrix * scale).sum().backward()
        sums[gradients] = stepper.gradients[0].float()
    assert (sums["float32"] == 1 + 2**-10).all() and (sums["bfloat16"] == 1).all()
    with pytest.raises(ValueError, match="needs --dtype bfloat16"):
        _config(gradient_dtype="bfloat16", dtype="float16")
