"""When the checkpoints of one run are written, and what happens where the disk is full.

    saver = Saver(config, model, stepper, world, saved_step=..., stop=..., progress=..., record=...)
    saver.save_if_due(step, version)    # after each step; all ranks together, as everything that writes
    saver.save(step, version)
    saver.save_final(step, version)

With `checkpoint_in_background` one is written while training goes on: a step waits for the copy into the host's memory
alone (`BackgroundSave`). It is written as `checkpoint.save` does: aside, brought to the disk, renamed, so whenever the
process or the machine dies the checkpoint before it is whole. Threads of several ranks speak through the folder that
they write to, never by the connections of the world, which training uses meanwhile: each leaves a mark there when its
files are written, and rank 0 completes the folder once it has seen all of them.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from trainer_core import checkpoint
from trainer_core.config import TrainingConfig
from trainer_core.durable import why_full
from trainer_core.errors import DiskFull
from trainer_core.optim import Stepper
from trainer_core.policy.reference import Reference
from trainer_core.policy.sharding import weights
from trainer_core.world import World

WRITTEN, FAILED = ".written-by-{}", ".failed-by-{}"
"""Files that a rank leaves when it is done. The second may fail too, as on a full disk; `finish` hears of it anyhow."""
LOOK_S = 0.05
FULL_DISK_RETRY_S = 60.0
"""So long a checkpoint that found no room waits before it is tried again in any case."""
MORE_ROOM = 1 << 20
"""Bytes by which the free room of a full disk must grow before a checkpoint is tried again at once."""


class Saver:
    """The checkpoints of one run, on each rank. What it writes is told to `record`, on rank 0."""

    def __init__(
        self, config: TrainingConfig, model: torch.nn.Module, stepper: Stepper, world: World, *, saved_step: int,
        stop: threading.Event, progress: Callable[[], dict[str, Any]], record: Callable[[checkpoint.Saved, int], None],
        reference: Reference | None = None,
    ) -> None:  # fmt: skip
        """Nothing is written yet.

        Args:
            saved_step: what a later attempt would begin with as things are.
            progress: gives what a checkpoint keeps beside weights and optimizer.
        """
        self.saved_step = saved_step
        """The newest step of which there is a checkpoint."""
        self._config, self._model, self._stepper, self._world = config, model, stepper, world
        self._stop, self._progress, self._record, self._reference = stop, progress, record, reference
        self._saving: BackgroundSave | None = None

    def save_if_due(self, step: int, version: int) -> float:
        """Seconds that the loop spent on a checkpoint, 0 when none is due."""
        if self._saving is not None and self._world.share(self._saving.over):
            self.finish(step, version)
        interval = self._config.checkpoint_interval
        if not interval or step % interval:
            return 0.0
        if not self._config.checkpoint_in_background or self._config.trains_adapters:
            return self.save(step, version).seconds
        began = time.perf_counter()
        self.finish(step, version)
        self._saving = BackgroundSave(
            self._model, self._config, self._stepper, step=step, version=version, progress=self._progress(),
            world=self._world,
        )  # fmt: skip
        return time.perf_counter() - began

    def finish(self, step: int, version: int) -> None:
        """Wait for the checkpoint that is being written, if any; where the disk was full `step`, the present one, is
        saved in its place, which waits for room."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        try:
            saved = saving.finish()
        except OSError as error:
            if not why_full(error):
                raise
            self.save(step, version)
            return
        self._remember(saved, saving.step)

    def save(self, step: int, version: int) -> checkpoint.Saved:
        """Write step_N/ of the present step."""
        saved = checkpoint.save_step(
            self._model, self._config, self._stepper, step=step, version=version, progress=self._progress(),
            reference=self._reference, wait_for_room=partial(self.wait_for_room, step), world=self._world,
        )  # fmt: skip
        self._remember(saved, step)
        return saved

    def save_final(self, step: int, version: int) -> checkpoint.Saved:
        """Write final_model/."""
        saved = checkpoint.save_final(
            self._model, self._config, step=step, version=version, progress=self._progress(),
            wait_for_room=partial(self.wait_for_room, step), world=self._world,
        )  # fmt: skip
        self._world.share(lambda: self._record(saved, step))
        return saved

    def _remember(self, saved: checkpoint.Saved, step: int) -> None:
        self.saved_step = step
        self._world.share(lambda: self._record(saved, step))

    def wait_for_room(self, step: int, folder: Path, words: str) -> None:
        """Pause until there is more room on a full disk, or a minute has passed: a quota does not show.

        Raises:
            DiskFull: the run is to stop, so there is nothing to wait for.
        """
        free = shutil.disk_usage(folder).free
        text = f"{words}: step {step} cannot be saved in {folder} ({free / 1e9:.1f} GB free)"
        if self._stop.is_set():
            raise DiskFull(f"{text}. {checkpoint.describe_last(self._config)}")
        print(f"[WARNING] {text}. Training pauses until there is room: free some, and it goes on by itself")
        until = time.monotonic() + FULL_DISK_RETRY_S
        while time.monotonic() < until and shutil.disk_usage(folder).free <= free + MORE_ROOM:
            if self._stop.wait(1.0):
                break


class BackgroundSave:
    """The checkpoint of one step, of a whole model; each rank has one of its own."""

    def __init__(
        self, model: torch.nn.Module, config: TrainingConfig, stepper: Stepper, *, step: int, version: int,
        progress: dict[str, Any], world: World,
    ) -> None:  # fmt: skip
        """Copy everything, and begin to write. A collective."""
        began = time.perf_counter()
        self.step, self._began, self._config, self._world = step, began, config, world
        self._model, self._tensors = model, weights(model)
        self._plain, self._state = checkpoint.state_of(stepper)
        self._kept = checkpoint.kept_of(stepper, progress, self._plain)
        self._version = version
        self._error: OSError | None = None
        self._given_up = False
        self._target = checkpoint.step_folder(config, step)
        self._aside = checkpoint.written_in(self._target)
        world.share(lambda: checkpoint.begin(self._aside))
        self._saved: checkpoint.Saved | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def over(self) -> bool:
        """Whether this rank has nothing to do for it any more."""
        return not self._thread.is_alive()

    def finish(self) -> checkpoint.Saved:
        """Wait until it is written. A collective.

        Raises:
            OSError: it could not be written, on any rank; nothing is left of it.
        """
        if self._world.rank:
            self._thread.join()
        self._given_up = any(self._world.gather(self._error is not None and self._world.rank > 0))
        self._thread.join()
        try:
            self._world.agree(self._error)
        except OSError:
            if self._world.rank == 0:
                shutil.rmtree(self._aside, ignore_errors=True)
            raise
        return self._world.share(lambda: cast(checkpoint.Saved, self._saved))

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self._error = error if isinstance(error, OSError) else OSError(str(error))  # safetensors has its own
        if self._world.rank:
            with suppress(OSError):
                self._mark(FAILED if self._error else WRITTEN, self._world.rank).touch()
        self._tensors, self._state = {}, {}  # gigabytes

    def _write(self) -> None:
        checkpoint.write_state(self._aside / checkpoint.state_file(self._world), self._plain, self._state, self._world)
        if self._world.rank:
            return
        checkpoint.write_model(self._model, self._tensors, self._config, self._aside)
        if not all(map(self._written, range(1, self._world.size))):
            return
        checkpoint.complete(self._config, self._aside, self.step, self._version, self._kept)
        size = checkpoint.replace_folder(self._target, self._aside)
        checkpoint.drop_old(self._config)
        self._saved = checkpoint.Saved(self._target, time.perf_counter() - self._began, size)

    def _written(self, rank: int) -> bool:
        """Wait for another rank; false where it failed. One that dies ends this process too (`rank_group.py`)."""
        written, failed = self._mark(WRITTEN, rank), self._mark(FAILED, rank)
        while not self._given_up:
            here = set(self._aside.iterdir())  # on a network file system it may be remembered that a name was missing
            if failed in here:
                return False
            if written in here:
                written.unlink()
                return True
            time.sleep(LOOK_S)
        return False

    def _mark(self, name: str, rank: int) -> Path:
        return self._aside / name.format(rank)
