"""Schedule of a run's checkpoints, background writes, and behaviour on a full disk.

    saver = Saver(config, model, stepper, world, saved_step=..., stop=..., progress=..., record=...)
    saver.save_if_due(step, version)    # after each step; all ranks together

A background write is as safe as `checkpoint.save`: temporary name, flush, rename.
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

from atropos_common.system.files import why_full
from trainer_core.checkpoints import checkpoint
from trainer_core.checkpoints.state import state_file, state_of, write_state
from trainer_core.config import TrainingConfig
from trainer_core.errors import DiskFull
from trainer_core.optimization.optimizers import Stepper
from trainer_core.policy.reference import Reference
from trainer_core.policy.sharding import weights
from trainer_core.ranks.world import World

# Files by which writing threads of ranks communicate: training uses the connections. Writing the
# second may fail on a full disk; `finish` then learns of the failure.
WRITTEN, FAILED = ".written-by-{}", ".failed-by-{}"
POLL_S = 0.05
# A retry comes at once after this much new space, else after a minute: a quota shows no free space.
FULL_DISK_RETRY_S = 60.0
MORE_SPACE = 1 << 20


class Saver:
    """Checkpoints of one run, on each rank. Rank 0 passes each one to `record`."""

    def __init__(
        self,
        config: TrainingConfig,
        model: torch.nn.Module,
        stepper: Stepper,
        world: World,
        *,
        saved_step: int,
        stop: threading.Event,
        progress: Callable[[], dict[str, Any]],
        record: Callable[[checkpoint.Saved, int], None],
        reference: Reference | None = None,
    ) -> None:
        self.saved_step = saved_step
        """Latest step with a checkpoint."""
        self._config, self._model, self._stepper, self._world = config, model, stepper, world
        self._stop, self._progress = stop, progress
        self._record, self._reference = record, reference
        self._saving: BackgroundSave | None = None
        # Gigabytes, kept between writes: new memory takes longer than the copy into it.
        self._copies: dict[str, torch.Tensor] = {}

    def save_if_due(self, step: int, version: int) -> float:
        """Save if a checkpoint is due; return the seconds that the loop waited."""
        began = time.perf_counter()
        # Rank 0 decides, so that all ranks enter the collective `finish` together.
        if self._saving is not None and self._world.share(self._saving.over):
            self.finish(step, version)
        interval = self._config.checkpoint_interval
        if interval and step % interval == 0:
            self.finish(step, version)  # one write at a time
            if step != self.saved_step:  # else `finish` has saved it after a full disk
                self._begin(step, version)
        return time.perf_counter() - began

    def _begin(self, step: int, version: int) -> None:
        # Adapters are small, so they are written in the foreground.
        if not self._config.checkpoint_in_background or self._config.trains_adapters:
            self.save(step, version)
            return
        try:
            self._saving = BackgroundSave(
                self._model,
                self._config,
                self._stepper,
                step=step,
                version=version,
                progress=self._progress(),
                world=self._world,
                copies=self._copies,
            )
        except OSError as error:
            if not why_full(error):
                raise
            self.save(step, version)

    def finish(self, step: int, version: int) -> None:
        """Wait for a background write; after a full disk save `step` instead."""
        if self._saving is None:
            return
        # Cleared first: an error below must not leave the failed write behind.
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
        more = self._facts(step, version)
        saved = checkpoint.save_step(
            self._model, self._config, self._stepper, reference=self._reference, **more
        )
        self._remember(saved, step)
        return saved

    def save_final(self, step: int, version: int) -> checkpoint.Saved:
        more = self._facts(step, version)
        saved = checkpoint.save_final(self._model, self._config, **more)
        self._world.share(lambda: self._record(saved, step))
        return saved

    def _facts(self, step: int, version: int) -> dict[str, Any]:
        return {
            "step": step,
            "version": version,
            "progress": self._progress(),
            "wait_for_room": partial(self.wait_for_room, step),
            "world": self._world,
        }

    def _remember(self, saved: checkpoint.Saved, step: int) -> None:
        self.saved_step = step
        self._world.share(lambda: self._record(saved, step))

    def wait_for_room(self, step: int, folder: Path, words: str) -> None:
        """Pause until a full disk has more space, or a minute has passed.

        Raises:
            DiskFull: the run is stopping, so it cannot wait.
        """
        free = shutil.disk_usage(folder).free
        text = f"{words}: step {step} cannot be saved in {folder} ({free / 1e9:.1f} GB free)"
        if self._stop.is_set():
            raise DiskFull(f"{text}. {checkpoint.describe_last(self._config)}")
        print(
            f"[WARNING] {text}. Training pauses until there is room: free some disk space, "
            f"and training goes on"
        )
        until = time.monotonic() + FULL_DISK_RETRY_S
        # Polls, since other processes may free space at any time.
        while time.monotonic() < until and shutil.disk_usage(folder).free <= free + MORE_SPACE:
            if self._stop.wait(1.0):
                break


class BackgroundSave:
    """Background write of one step's checkpoint; one object on each rank."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: TrainingConfig,
        stepper: Stepper,
        *,
        step: int,
        version: int,
        progress: dict[str, Any],
        world: World,
        copies: dict[str, torch.Tensor],
    ) -> None:
        """Copy all state and start the write. A collective.

        Args:
            copies: of the write before, which has ended; their memory is used again.
        """
        began = time.perf_counter()
        self.step, self._began, self._config, self._world = step, began, config, world
        self._model, self._tensors = model, weights(model, copies)
        self._plain, self._state = state_of(stepper, copies)
        self._kept = checkpoint.kept_of(stepper, progress, self._plain)
        self._version = version
        self._error: OSError | None = None
        self._peer_failed = False
        self._target = checkpoint.step_folder(config, step)
        self._aside = checkpoint.written_in(self._target)
        # All ranks wait here, so no thread writes before the folder exists.
        world.share(lambda: checkpoint.begin(self._aside))
        self._saved: checkpoint.Saved | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def over(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> checkpoint.Saved:
        """Wait for the end of the write. A collective.

        Raises:
            OSError: a rank could not write; the partial checkpoint is removed.
        """
        if self._world.rank:
            self._thread.join()
        # A failed mark may be missing on a full disk, so tell rank 0 directly; it would wait
        # forever.
        self._peer_failed = any(
            self._world.gather(self._error is not None and self._world.rank > 0)
        )
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
            # safetensors has error types of its own; `finish` expects an OSError.
            self._error = error if isinstance(error, OSError) else OSError(str(error))
        if self._world.rank:
            with suppress(OSError):
                self._mark(FAILED if self._error else WRITTEN, self._world.rank).touch()
        self._tensors, self._state = {}, {}  # frees what is not in `copies`, as gathered weights

    def _write(self) -> None:
        write_state(self._aside / state_file(self._world), self._plain, self._state, self._world)
        if self._world.rank:
            return
        checkpoint.write_model(self._model, self._tensors, self._config, self._aside)
        # Another rank failed: `finish` raises its error and removes the folder.
        if not all(map(self._written, range(1, self._world.size))):
            return
        checkpoint.complete(self._config, self._aside, self.step, self._version, self._kept)
        size = checkpoint.replace_folder(self._target, self._aside)
        checkpoint.drop_old(self._config, self.step)
        self._saved = checkpoint.Saved(self._target, time.perf_counter() - self._began, size)

    def _written(self, rank: int) -> bool:
        written, failed = self._mark(WRITTEN, rank), self._mark(FAILED, rank)
        # A rank that dies leaves no mark, but then `ranks/group.py` ends this process too.
        while not self._peer_failed:
            here = set(self._aside.iterdir())  # a network file system may cache a missing name
            if failed in here:
                return False
            if written in here:
                # Marks are no part of the checkpoint, which is sealed next.
                written.unlink()
                return True
            time.sleep(POLL_S)
        return False

    def _mark(self, name: str, rank: int) -> Path:
        return self._aside / name.format(rank)
