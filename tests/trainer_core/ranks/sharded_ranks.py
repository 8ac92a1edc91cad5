"""Ranks of `test_sharded.py`: every case beside the same on one rank."""

from __future__ import annotations

import errno
import json
import math
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from tests.support.made_rollouts import rollouts_of
from trainer_core.checkpoints import checkpoint, saving, state
from trainer_core.checkpoints.saving import BackgroundSave
from trainer_core.config import TrainingConfig
from trainer_core.objective.registry import Objective
from trainer_core.optimization.optimizers import Stepper
from trainer_core.optimization.step import StepOutcome, accumulate
from trainer_core.policy.load import load_model, train_only
from trainer_core.policy.lora import add_adapter, load_adapter
from trainer_core.policy.proof import prove
from trainer_core.policy.reference import Reference
from trainer_core.policy.routing import replay_in
from trainer_core.policy.sharding import compute_dtype, load_for, shard
from trainer_core.policy.speed import compile_layers, compiles, gathered_bytes, use_checkpointing
from trainer_core.ranks.group import join
from trainer_core.ranks.world import ALONE, World
from trainer_core.rollouts.asking import RouterShape
from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.packing import PackedRow, empty_row, pack

CPU = torch.device("cpu")
BF16 = {"dtype": "bfloat16"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("Qwen3", {"dtype": "float32"}),
    "fp32 masters": ("Qwen3", BF16),
    "fp32 masters beside": ("Qwen3", BF16 | {"optimizer_offload": True}),
    "kahan": ("Qwen3", BF16 | {"master_weights": "kahan"}),
    "stochastic": ("Qwen3", BF16 | {"master_weights": "stochastic"}),
    "tied": ("Gemma 2", {"dtype": "float32"}),
    "experts": ("Qwen3-MoE", {"dtype": "float32", "router_aux_loss_coef": 0.1}),
    "routing replayed": (
        "Qwen3-MoE",
        {"dtype": "float32", "routing_replay": True, "gradient_checkpointing": "on"},
    ),
    "checkpointing": ("Qwen3", BF16 | {"gradient_checkpointing": "on"}),
    "some layers": ("Qwen3", BF16 | {"train_layer_indices": [1]}),
    "adapters": ("Qwen3", BF16 | {"weight_bridge_mode": "lora_only"}),
    "proximal": ("Qwen3", {"dtype": "float32", "ratio_base": "proximal", "objective": "gspo"}),
    "reference": ("Qwen3", {"dtype": "float32", "ref_kl_coef": 0.1}),
}
"""Name -> model of the zoo, settings."""
COMPILED = {
    "compiled": ("Qwen3", {"dtype": "float32", "compile": "on", "gradient_checkpointing": "on"})
}
"""Takes minutes on a CPU."""


class Trainer:
    """A policy and its optimizer, on one rank or on all."""

    def __init__(
        self,
        folder: Path,
        model: str,
        world: World,
        *,
        resume: Path | None = None,
        double: bool = False,
        **settings: Any,
    ) -> None:
        """Args:
        double: the model computes in float64, so that the order of a sum tells nothing.
        """
        self.world = world
        values = {
            "model_name": str(folder / model),
            "optimizer": "adamw",
            "lr": 1e-4,
            "max_grad_norm": 0.5,
        }
        self.config = config = TrainingConfig.model_validate(values | settings)
        dtype = torch.float64 if double else getattr(torch, config.dtype)
        torch.manual_seed(0)
        weights = config.model_name if resume is None or config.trains_adapters else resume
        self.model = load_for(world, weights, dtype, CPU)
        if double:  # torch's products of groups have no such type
            self.model.config._experts_implementation = "eager"
        if config.trains_adapters:
            add_adapter(self.model, config)
            if resume is not None:
                load_adapter(self.model, resume)
        train_only(self.model, config.train_layer_indices)
        shard(self.model, world, CPU, config)
        self.proved = prove(self.model) if resume is None else 0.0
        self.routers = replay_in(self.model) if config.routing_replay else None
        use_checkpointing(
            self.model, config.gradient_checkpointing, tokens=64, optimizer="adamw", device=CPU
        )
        if compiles(self.model, config.compile, CPU):
            compile_layers(self.model)
        self.stepper = Stepper(self.model, config, world)
        if resume is not None:
            state.restore(resume, self.stepper)
        self.reference = Reference(config, self.model, CPU, world) if config.ref_kl_coef else None
        self.objective = Objective(config)

    def rows(self, step: int) -> list[PackedRow]:
        """This rank's rows: of an odd number, so that one rank has an empty one."""
        rollouts = rollouts_of(8, seed=step)
        for flat in rollouts[:3]:
            flat.advantages[:] = 0.0
        if self.routers is not None:
            rollouts = [_routed(rollout, self.routers, i) for i, rollout in enumerate(rollouts)]
        rows = pack(rollouts, 40)
        rows = rows if len(rows) % 2 else rows[:-1]
        assert len(rows) >= 3, "or all but one rank would have an empty one alone"
        dealt = self.world.dealt
        mine = rows[dealt.rank :: dealt.size]
        return mine + [empty_row()] * (-(-len(rows) // dealt.size) - len(mine))

    def step(self, number: int) -> StepOutcome:
        outcome = accumulate(
            self.model,
            self.stepper,
            self.rows(number),
            self.objective,
            number,
            world=self.world.dealt,
            reference=self.reference,
        )
        self.gradients = [
            self._whole(i, g) for i, g in enumerate(self.stepper._collected()) if g is not None
        ]
        self.stepper.compute()
        self.stepper.write()
        return outcome

    def save(self, folder: Path, step: int) -> Path:
        config = self.config.model_copy(update={"save_path": str(folder)})
        saved = checkpoint.save_step(
            self.model, config, self.stepper, step=step, version=step, world=self.world
        )
        return saved.path

    def weights(self) -> list[torch.Tensor]:
        """Whole, of what trains: the masters where they are kept, else what the parameters are."""
        copies = self.stepper.copies()
        parts = [copies.get(param, param) for param in self.stepper.params]
        return [self._whole(i, part) for i, part in enumerate(parts)]

    def _whole(self, index: int, part: torch.Tensor) -> torch.Tensor:
        wholes = [p for p in self.model.parameters() if p.requires_grad]
        like = wholes[index]
        if not isinstance(like, DTensor):
            return part.detach().clone()
        return DTensor.from_local(
            part.detach(), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        ).full_tensor()


def _routed(rollout: Rollout, routers: RouterShape, seed: int) -> Rollout:
    """With experts of which the engine told all but the last tokens'; of every fifth sequence it
    told none."""
    dice = np.random.default_rng(seed)
    ranks = dice.random((len(rollout.tokens), len(routers.sparse), routers.experts))
    experts = ranks.argsort(-1)[..., : routers.chosen].astype(np.int16)
    experts[-2:] = -1
    return rollout if seed % 5 == 4 else replace(rollout, experts=experts)


def apart(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference of any tensor, by the largest element of that tensor."""
    assert [t.shape for t in mine] == [t.shape for t in theirs]
    pairs = zip(mine, theirs, strict=True)
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))
        for a, b in pairs
    )


def taken(
    trainer: Trainer, number: int
) -> tuple[StepOutcome, list[torch.Tensor], list[torch.Tensor]]:
    """A step, its gradient and the weights after it, both whole."""
    outcome = trainer.step(number)
    return outcome, trainer.gradients, trainer.weights()


def one_case(folder: Path, world: World, model: str, settings: dict[str, Any]) -> dict[str, float]:
    """On rank 0 alone, which has seen all that the others have: what the same case is on one
    rank."""
    many = Trainer(folder, model, world, **settings)
    assert any(isinstance(p, DTensor) for p in many.model.parameters())
    of_all = [taken(many, number) for number in (1, 2)]
    if world.rank:
        return {}
    one = Trainer(folder, model, ALONE, **settings)
    whole = sum(p.nbytes for p in one.model.get_input_embeddings().parameters())
    assert gathered_bytes(many.model) > 2 * whole and gathered_bytes(one.model) == 0
    first, second = zip(of_all, [taken(one, number) for number in (1, 2)], strict=True)
    (mine, *mine_then), (theirs, *theirs_then) = first
    found = {
        "loss": abs(mine.metrics["loss"] - theirs.metrics["loss"]) / abs(theirs.metrics["loss"])
    }
    found["gradient"], found["weights"] = map(apart, mine_then, theirs_then)
    (mine, _, mine_later), (theirs, _, theirs_later) = second
    found["norm"] = (
        abs(mine.metrics["grad_norm"] - theirs.metrics["grad_norm"]) / theirs.metrics["grad_norm"]
    )
    # A KL is half a squared difference of logprobs: its root is what rounds as they do.
    roots = [math.sqrt(outcome.metrics.get("ref_kl", 1.0)) for outcome in (mine, theirs)]
    pairs = (
        (mine.metrics["entropy_mean"], theirs.metrics["entropy_mean"]),
        (mine.metrics["ratio_max"], theirs.metrics["ratio_max"]),
        (mine.tokens, theirs.tokens),
        (mine.diffs.abs_max, theirs.diffs.abs_max),
        (roots[0], roots[1]),
    )
    found["rest"] = max(abs(a - b) / abs(b) for a, b in pairs)
    found["later"] = apart(mine_later, theirs_later)
    found["proof"] = abs(many.proved - one.proved)
    return found


RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    name: CASES[name] for name in ("fp32 masters", "kahan", "stochastic", "adapters")
} | {"experts in half": ("Qwen3-MoE", BF16)}


def one_resume(folder: Path, world: World, name: str) -> dict[str, float]:
    """Two ranks, then one (rank 0), then two again; each goes on from what the ones before have
    written."""
    model, settings = RESUMED[name]
    many = Trainer(folder, model, world, **settings)
    many.step(1)
    first = many.save(folder / f"{name} 2", 1)
    one = None if world.rank else Trainer(folder, model, ALONE, resume=first, **settings)
    found: dict[str, float] = {}

    def compare(words: str, trainer: Trainer) -> None:
        weights = trainer.weights()
        if one is not None:
            found[words] = apart(weights, one.weights())

    compare("written", many)
    if one is not None and not one.config.trains_adapters:
        served = load_model(first, compute_dtype(many.model), CPU)
        found["served"] = apart(
            [p.detach() for p in served.parameters()], [p.detach() for p in one.model.parameters()]
        )
    many.step(2)
    if one is not None:
        one.step(2)
    compare("to one", many)
    second = world.share(lambda: one and one.save(folder / f"{name} 1", 2))
    again = Trainer(folder, model, world, resume=second, **settings)
    compare("read", again)
    again.step(3)
    if one is not None:
        one.step(3)
    compare("to two", again)
    third = again.save(folder / f"{name} 2", 3)
    same = Trainer(folder, model, world, resume=third, **settings)
    again.step(4)
    same.step(4)
    found["same"] = apart(same.weights(), again.weights())
    return found


def broken_disk(folder: Path, world: World) -> dict[str, float]:
    """A write that fails on one rank fails on all, and leaves nothing; on a full disk all wait for
    room."""
    model, settings = CASES["float32"]
    many = Trainer(folder, model, world, **settings)
    out = folder / "broken"
    waits: list[str] = []
    real = checkpoint._save_state

    def full(path: Path, stepper: Stepper) -> Any:
        if world.rank and len(waits) == 0:
            waits.append("")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, stepper)

    def fail(path: Path, stepper: Stepper) -> Any:
        if world.rank:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, stepper)

    config = many.config.model_copy(update={"save_path": str(out)})
    checkpoint._save_state = fail
    try:
        checkpoint.save_step(many.model, config, many.stepper, step=1, version=1, world=world)
        raise AssertionError("it was written")
    except OSError as error:
        assert os.strerror(errno.EIO) in str(error), error
    finally:
        checkpoint._save_state = real
    world.gather(0)
    assert list(out.iterdir()) == []
    checkpoint._save_state = full
    room: list[str] = []
    saved = checkpoint.save_step(
        many.model,
        config,
        many.stepper,
        step=1,
        version=1,
        world=world,
        wait_for_room=lambda _, words: room.append(words),
    )
    checkpoint._save_state = real
    assert len(room) == (world.rank == 0) and checkpoint._why_damaged(saved.path, deep=True) is None
    return _in_background(many, world, out)


def _in_background(many: Trainer, world: World, out: Path) -> dict[str, float]:
    """The same of a write beside the training: all ranks hear of it, and the next one is whole."""
    config = many.config.model_copy(update={"save_path": str(out)})

    def begun(step: int) -> BackgroundSave:
        return BackgroundSave(
            many.model,
            config,
            many.stepper,
            step=step,
            version=step,
            progress={},
            world=world,
            copies=copies,
        )

    copies: dict[str, torch.Tensor] = {}
    real = saving.write_state
    for broken in (0, 1):

        def fail(*values: Any, broken: int = broken) -> None:
            if world.rank == broken:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(*values)

        saving.write_state = fail
        try:
            begun(2).finish()
            raise AssertionError("it was written")
        except OSError as error:
            assert os.strerror(errno.ENOSPC) in str(error), error
        finally:
            saving.write_state = real
        world.gather(0)
        assert [path.name for path in out.iterdir()] == ["step_1"]
    write = begun(2)
    state = [part.clone() for part in many.weights()]
    many.step(2)
    saved = write.finish()
    assert checkpoint._why_damaged(saved.path, deep=True) is None
    assert not [path for path in saved.path.iterdir() if path.name.startswith(".")]
    again = Trainer(out.parent, "Qwen3", world, resume=saved.path, dtype="float32")
    return {"in background": apart(again.weights(), state)}


EXACT = {"dtype": "float32", "double": True}
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "as many keys as ranks": ("Qwen3", EXACT),
    "one key for all heads": ("one key", EXACT | {"gradient_checkpointing": "on"}),
    "windows and caps": ("Gemma 2", EXACT),
    "sinks and experts": ("GPT-OSS", EXACT),
    "latent": ("DeepSeek-V3", EXACT),
    "balance of experts": ("Qwen3-MoE", EXACT | {"router_aux_loss_coef": 0.1}),
    "routing replayed": ("Qwen3-MoE", EXACT | {"routing_replay": True}),
    "adapters": ("Qwen3", EXACT | {"weight_bridge_mode": "lora_only"}),
    "sequences": ("Qwen3", EXACT | {"ratio_base": "proximal", "objective": "gspo"}),
    "reference": ("Qwen3", EXACT | {"ref_kl_coef": 0.1}),
}
"""Cases of rows that two ranks share."""


def shared_rows(folder: Path, *names: str) -> int:
    """Those of `SHARED`, each beside the same on one rank."""
    world = join(CPU, 60.0)
    world.split(2)
    assert world.context is not None and world.dealt.size == world.size // 2
    return _all(
        folder, world, {name: partial(one_case, folder, world, *SHARED[name]) for name in names}
    )


def all_cases(folder: Path, *names: str) -> int:
    """Those of `CASES`, `COMPILED`, `RESUMED` (as `resume NAME`), and `broken disk`."""
    world = join(CPU, 60.0)
    work = {
        name: partial(one_case, folder, world, *case) for name, case in (CASES | COMPILED).items()
    }
    work |= {f"resume {name}": partial(one_resume, folder, world, name) for name in RESUMED}
    work["broken disk"] = partial(broken_disk, folder, world)
    return _all(folder, world, {name: work[name] for name in names})


def _all(folder: Path, world: World, work: dict[str, Callable[[], dict[str, float]]]) -> int:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, do in work.items():
        began = time.perf_counter()
        try:
            found[name] = do()
        except Exception:
            found[name] = traceback.format_exc()
            print(name, found[name])
            break
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    world.close()
    return 0
