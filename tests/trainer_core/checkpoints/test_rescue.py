"""The server dies in single copy: the trainer saves the step, and the next attempt continues
exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer_core.stand_ins import TOKEN, Engine, Recorded, group, plain_model, run_config
from trainer_core.checkpoints import checkpoint
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineGone
from trainer_core.loop import train
from trainer_core.optimization.optimizers import Stepper
from trainer_core.weight_sync.base import Start
from trainer_core.weight_sync.shared_vllm import SingleCopy

STEPS = 4


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)


class Mortal(Engine):
    """Dies at the given call of a route: hangs up before it acts on it, or after."""

    def __init__(self, *args: Any, route: str, call: int, after: bool = False) -> None:
        super().__init__(*args)
        self.route, self.left, self.after = route, call, after

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == self.route:
            self.left -= 1
        if path != self.route or self.left:
            return super().answer(path, body)
        if self.after:
            super().answer(path, body)
        self.die()
        raise ConnectionAbortedError("died")


DEATHS = {
    "at the pause": {"route": "/bridge/pause", "call": 3},
    "at the resume, weights written": {"route": "/bridge/resume", "call": 4},
    "after the resume, answer lost": {"route": "/bridge/resume", "call": 4, "after": True},
    "while it is asked for versions": {"route": "/bridge/versions", "call": 3},
}


def _config(engine: Engine, base: Path, folder: Path, **fields: Any) -> TrainingConfig:
    wanted = {
        "training_steps": STEPS,
        "resume": "auto",
        "probe_interval": 0,
        "warmup_steps": 3,
        # An engine of these tests forgets its versions when it dies, and so the lag.
        "ratio_base": "rollout",
        **fields,
    }
    return run_config(engine, base, folder, **wanted)


def _final(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / "final_model" / "model.safetensors")


MASTERS = ("fp32", "kahan", "stochastic", "float32")
SLOW = {(death, masters) for death in list(DEATHS)[1:] for masters in MASTERS[1:]}
"""CI takes every kind of weights through the first death, and one kind through every death."""


@pytest.mark.parametrize(
    ("death", "masters"),
    [
        pytest.param(death, masters, marks=[pytest.mark.slow] if (death, masters) in SLOW else [])
        for death in DEATHS
        for masters in MASTERS
    ],
)
def test_the_next_attempt_goes_on_bit_for_bit(
    base: Path, tmp_path: Path, death: str, masters: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = (
        {"dtype": "float32"}
        if masters == "float32"
        else {"dtype": "bfloat16", "master_weights": masters}
    )
    dtype = getattr(torch, fields["dtype"])
    folders = [tmp_path / name for name in ("straight", "died", "again")]
    for folder in folders:
        folder.mkdir()
    torch.manual_seed(1)
    straight = Engine(folders[0], plain_model(base).to(dtype))
    batches = [[group(straight, [3, 12, 4, 13], 4, 3) for _ in range(4)] for _ in range(STEPS)]
    train(_config(straight, base, folders[0], **fields), api=Recorded(batches))  # type: ignore[arg-type]
    mortal = Mortal(folders[1], plain_model(base).to(dtype), **DEATHS[death])
    with pytest.raises(EngineGone):
        train(_config(mortal, base, folders[1], **fields), api=Recorded(batches))  # type: ignore[arg-type]
    mortal.close()
    for tensor in mortal.tensors.values():
        tensor.fill_(float("nan"))
    out = capsys.readouterr().out
    assert "No step is lost: the weights of step 3 are intact after the end of the server" in out
    (saved,) = checkpoint.complete_checkpoints(folders[1] / "out")
    assert saved.name == "step_3"

    again = Engine(folders[2], plain_model(base).to(dtype))
    resumed = _config(again, base, folders[1], **fields).model_copy(update={"resume": str(saved)})
    done = train(resumed, api=Recorded(batches))  # type: ignore[arg-type]
    assert (done.step, done.weight_version, again.version) == (STEPS, STEPS, STEPS)
    assert "Resuming from" in capsys.readouterr().out
    expected, found = _final(folders[0]), _final(folders[1])
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    straight.close()
    again.close()


@pytest.mark.parametrize("layers", [None, [1]])
def test_over_cuda_the_copies_are_the_weights(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: list[int] | None
) -> None:
    """The rule for a GPU, on memory that this test may break: nothing of the server's is read
    again."""
    engine = Engine(tmp_path, plain_model(base).to(torch.bfloat16))
    config = _config(engine, base, tmp_path, dtype="bfloat16", train_layer_indices=layers)
    import threading

    sync = SingleCopy(config, torch.device("cpu"), threading.Event())
    model = sync.attach(Start())
    from trainer_core.policy.load import train_only

    train_only(model, layers)
    stepper = Stepper(model, config)
    wanted = {name: param.detach().clone() for name, param in model.named_parameters()}
    for tensor in engine.tensors.values():
        tensor.fill_(float("nan"))
    gpu = torch.device("cuda")
    monkeypatch.setattr(sync, "device", gpu)
    monkeypatch.setattr(
        "trainer_core.weight_sync.shared_vllm.load_model",
        lambda source, dtype, _: plain_model(Path(source)).to(dtype),
    )
    assert sync.let_go(stepper.copies()) == ""
    assert all(torch.equal(param, wanted[name]) for name, param in model.named_parameters())
    engine.close()


def test_without_a_copy_it_says_what_is_lost(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    engine = Engine(tmp_path, plain_model(base).to(torch.bfloat16))
    config = _config(engine, base, tmp_path, dtype="bfloat16", master_weights="kahan")
    sync = SingleCopy(config, torch.device("cpu"), threading.Event())
    stepper = Stepper(sync.attach(Start()), config)
    monkeypatch.setattr(sync, "device", torch.device("cuda"))
    assert "--master-weights fp32" in sync.let_go(stepper.copies())
    engine.close()


def test_an_error_of_the_gpu_is_the_server_s_end_where_it_has_ended(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def illegal(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."
        )

    engine = Engine(tmp_path, plain_model(base))
    batches = [[group(engine, [3, 12, 4, 13], 4, 3) for _ in range(4)] for _ in range(2)]
    monkeypatch.setattr("trainer_core.loop.accumulate", illegal)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        train(_config(engine, base, tmp_path), api=Recorded(batches))  # type: ignore[arg-type]

    class Dying(Recorded):
        def next_batch(self, *args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(
                "trainer_core.weight_sync.shared_vllm.has_ended", lambda process: True
            )
            return super().next_batch(*args, **kwargs)

    monkeypatch.setattr(SingleCopy, "_move_out", illegal)
    with pytest.raises(EngineGone, match="has ended"):
        train(_config(engine, base, tmp_path), api=Dying(batches))  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert (
        "lost with the server: the GPU does not answer any more (CUDA error: an illegal "
        "memory access" in said
    )
    assert "There is no checkpoint" in said
    engine.close()
