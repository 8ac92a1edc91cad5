"""Ranks of `test_loop.py`: a whole run without a server, with an event in it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trainer_core.loop as loop
from tests.trainer_core.offline_runs import group_of, offline_config
from trainer_core import Stopped, train
from trainer_core.checkpoints.saving import BackgroundSave
from trainer_core.errors import ApiError, RankGone, TrainerError
from trainer_core.ranks.world import on_every_rank, own_rank
from trainer_core.report import Callback, StepReport


class Waits:
    """Two batches, and then none: rank 0 waits."""

    def __init__(self, folder: Path, *, broken: bool = False) -> None:
        self.folder, self.broken = folder, broken

    def next_batch(self, step: int, on_idle: Callable[[], None]) -> list[Any]:
        if step < 2:
            return [group_of(2 * step), group_of(2 * step + 1)]
        if self.broken:
            raise ApiError("run-api is away")
        (self.folder / "waiting").touch()
        while True:
            time.sleep(0.05)
            on_idle()

    def close(self) -> None:
        assert own_rank() == 0, "no other rank speaks to it"


class StopsAfterOne(Callback):
    """As a stop would that comes between two steps."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop

    def on_step(self, report: StepReport) -> None:
        assert own_rank() == 0
        self.stop.set()


def die(*_: Any, **__: Any) -> Any:
    """Kill this process by SIGKILL if it is rank 1."""
    os.kill(os.getpid(), signal.SIGKILL) if own_rank() else None


def dying_before(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """`function`, before whose n-th call rank 1 dies."""
    left = iter(range(calls - 1))

    def planted(*values: Any, **named: Any) -> Any:
        next(left, None) is None and die()
        return function(*values, **named)

    return planted


def dies_once(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)
    die()


def run(folder: Path, how: str) -> int:
    """One run; how it ends in words is printed, also by rank 1, which is silent else."""
    stop, callbacks = threading.Event(), []
    if how == "stop":
        callbacks.append(StopsAfterOne(stop))
    elif how == "killed waiting":
        threading.Thread(target=dies_once, args=(folder / "waiting",), daemon=True).start()
    elif how == "killed in forward":
        loop.accumulate = dying_before(loop.accumulate, 2)  # type: ignore[attr-defined]
    elif how == "killed in publish":
        loop.Run.write = dying_before(loop.Run.write, 2)  # type: ignore[method-assign]
    elif how == "killed in save":
        loop.checkpoint.save_step = dying_before(loop.checkpoint.save_step, 2)
    elif how == "killed in background save":
        BackgroundSave._run = dying_before(BackgroundSave._run, 2)  # type: ignore[method-assign]
    elif how == "raises" and own_rank():
        loop.Run.accumulate = lambda *_: [][0]  # type: ignore[method-assign]
    source = Waits(folder, broken=how == "broken")
    config = offline_config(
        folder / "tiny",
        folder,
        checkpoint_interval=0 if how in ("stop", "broken") else 1,
        checkpoint_in_background=how != "killed in save",
    )
    try:
        result = train(config, rollouts=source, stop=stop, callbacks=callbacks)
        print(f"ended: {result.step} {result.done}", flush=True)
    except RankGone as error:
        print(f"gone: {error}", flush=True)
        return 70
    except (TrainerError, Stopped) as error:
        print(f"error: {error} (known: {on_every_rank(error)})", flush=True)
        return 1
    except IndexError:
        return 5
    return 0
