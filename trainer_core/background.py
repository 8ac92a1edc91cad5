"""A checkpoint that is written while training goes on: a step waits for the copy into the host's memory alone.

    saving = BackgroundSave(model, config, stepper, step=..., version=..., stopping=..., world=world)
    ...                       # weights may change
    saved = saving.finish()

It is written as `checkpoint.save` does: aside, brought to the disk, renamed, so whenever the process or the machine
dies the checkpoint before it is whole. Threads of several ranks speak through the folder that they write to, never by
the connections of the world, which training uses meanwhile: each leaves a mark there when its files are written, and
rank 0 completes the folder once it has seen all of them.
"""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch

from trainer_core import checkpoint
from trainer_core.config import TrainingConfig
from trainer_core.optim import Stepper
from trainer_core.policy.sharding import weights
from trainer_core.ranks import World

WRITTEN, FAILED = ".written-by-{}", ".failed-by-{}"
"""Files that a rank leaves when it is done. The second may fail too, as on a full disk; `finish` hears of it anyhow."""
LOOK_S = 0.05


class BackgroundSave:
    """The checkpoint of one step, of a whole model; each rank has one of its own."""

    def __init__(
        self, model: torch.nn.Module, config: TrainingConfig, stepper: Stepper, *, step: int, version: int,
        stopping: dict[str, Any], world: World,
    ) -> None:  # fmt: skip
        """Copy everything, and begin to write. A collective."""
        began = time.perf_counter()
        self.step, self._began, self._config, self._world = step, began, config, world
        self._model, self._tensors = model, weights(model)
        self._plain, self._state = checkpoint.state_of(stepper)
        self._kept = {"stopping": stopping, "state": self._plain, "parts": stepper.parts}
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
        """Wait for another rank; false where it failed. One that dies ends this process too (`world.py`)."""
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
