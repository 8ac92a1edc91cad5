"""Parts of a run that exist before its first step: ranks, device, source of batches, optimizer; and
the process state that the run gives back at its end."""

from __future__ import annotations

import math
import os
import random
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atropos_common.protocol.bridge import ROUTING_FLAG
from trainer_core.checkpoints import state
from trainer_core.config import TrainingConfig, validate
from trainer_core.errors import EngineGone, UsageError
from trainer_core.optimization.optimizers import Stepper
from trainer_core.policy.load import dtype_of, load_config
from trainer_core.policy.logprobs import compile_scores
from trainer_core.policy.speed import compile_layers, compiles, use_checkpointing
from trainer_core.ranks.group import join
from trainer_core.ranks.world import World
from trainer_core.rollouts.client import RolloutSource, RunApi, open_api
from trainer_core.rollouts.recorded import RecordedRollouts, open_rollouts
from trainer_core.rollouts.source import OwnSource
from trainer_core.server.client import ServerClient

# Ranks reach a pass at different times while one compiles or loads its model.
COLLECTIVE_S = 600.0


@contextmanager
def joined_world(config: TrainingConfig, stop: threading.Event) -> Iterator[World]:
    """Join the other ranks for the duration of the block; `stop` ends the waiting for them."""
    # Only rank 0 prints: the others would print the same.
    world = join(device_of(config), COLLECTIVE_S, stop)
    with ExitStack() as silent:
        if world.rank:
            silent.enter_context(redirect_stdout(silent.enter_context(Path(os.devnull).open("w"))))
        try:
            yield world
        except BaseException as error:
            world.close(error)
            raise
        world.close()


def with_rollouts(
    config: TrainingConfig, rollouts: str | Path | RolloutSource | Iterable[Any] | None
) -> TrainingConfig:
    """Return the configuration with `rollouts` set.

    Raises:
        UsageError: a setting needs a server.
    """
    if rollouts is None:
        return config
    name = str(rollouts) if isinstance(rollouts, (str, Path)) else type(rollouts).__name__
    # Validated again: rollouts without a server exclude some settings.
    changed, problems = validate(config.model_dump(exclude_unset=True) | {"rollouts": name})
    if changed is None:
        raise UsageError("\n".join(problems))
    return changed


def open_source(
    config: TrainingConfig,
    given: str | Path | RolloutSource | Iterable[Any] | None,
    step: int,
    stop: threading.Event,
) -> RolloutSource:
    """Open run-api, a file of recorded rollouts, or the caller's own batches."""
    if given is not None and not isinstance(given, (str, Path)):
        return given if isinstance(given, RunApi | RecordedRollouts) else OwnSource(given)
    return open_api(config, step, stop) if config.rollouts is None else open_rollouts(config)


def require_recorded_routing(config: TrainingConfig, engines: Sequence[ServerClient]) -> None:
    """Raise `UsageError` if routing is to be replayed and an engine does not record it."""
    for engine in engines if config.routing_replay else ():
        with suppress(EngineGone):  # the publish finds that out
            if not engine.info().records_routing:
                raise UsageError(
                    f"--routing-replay: the server at {engine.base_url} does not record expert "
                    f"choices: start it with --{ROUTING_FLAG}, or leave out --routing-replay"
                )


@contextmanager
def restored_process_state() -> Iterator[None]:
    """Give back import paths, random states, threads and compiler settings at the end."""
    places = list(sys.path)
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = (
        torch.cuda.get_rng_state_all()
        if torch.cuda.is_available() and torch.cuda.is_initialized()
        else []
    )
    threads, compiler = torch.get_num_threads(), sys.modules.get("torch._dynamo.config")
    patience = getattr(compiler, "suppress_errors", False)
    try:
        yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.set_rng_state(generators[2])
        for index, state in enumerate(cuda):
            torch.cuda.set_rng_state(state, index)
        torch.set_num_threads(threads)
        sys.path[:] = places
        if (compiler := sys.modules.get("torch._dynamo.config")) is not None:
            compiler.suppress_errors = patience  # type: ignore[attr-defined]


def make_stepper(
    model: torch.nn.Module,
    config: TrainingConfig,
    device: torch.device,
    weights: Path | None,
    world: World,
) -> Stepper:
    """Make the optimizer, with its state from the checkpoint `weights`, and compile the layers."""
    stepper = Stepper(model, config, world)
    if weights is not None:
        state.restore(weights, stepper)
    # The memory estimate of checkpointing depends on it; compilation itself comes last.
    compiled = compiles(model, config.compile, device)
    use_checkpointing(
        model,
        config.gradient_checkpointing,
        device=device,
        tokens=math.ceil(max(config.tokens_per_pass, config.seq_len) / config.context_parallel),
        optimizer="" if config.optimizer_offload else config.optimizer,
        offload=config.activation_offload,
        gradient_bytes=4 if config.gradient_dtype == "float32" else 2,
        compiled=compiled,
        world=world,
    )
    if compiled:
        compile_layers(model)
    return stepper


def compile_scoring(config: TrainingConfig, device: torch.device) -> None:
    """Compile the kernels of the logprobs, from the model's shape alone."""
    shape = load_config(config.model_name, frozen=config.trains_adapters)
    compile_scores(
        shape, dtype_of(shape, config.dtype), device, wide=config.head_dtype == "float32"
    )


def device_of(config: TrainingConfig) -> torch.device:
    """Return the device that `config` asks for.

    Raises:
        UsageError: torch sees no such device.
    """
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {config.device}: torch sees no GPU here")
    return torch.device(config.device)


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
