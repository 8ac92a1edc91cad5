"""Bytes that the checkpoints of a run take of its disk, and of the host's memory."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from atropos_tui.profile.budget.inventory import Model
from atropos_tui.profile.budget.memory import (
    Budget,
    Inventory,
    adapter_shapes,
    count,
    dtype_bytes,
    size_text,
)
from atropos_tui.profile.errors import counted
from atropos_tui.profile.site import Site, training_config, traits_of
from trainer_core.config import TrainingConfig

STATES = ("master weights", "optimizer state", "masters, states")
"""Items of the memory budget that a checkpoint holds as well."""
FEW = 3
"""Checkpoints that are worth keeping."""


@dataclass(frozen=True)
class Disk:
    """Checkpoints of one run; the final model is not counted."""

    each: int
    """Bytes of one checkpoint."""
    checkpoints: int
    """Largest number that exists at once."""
    interval: int
    keeps_all: bool
    free: int | None
    """Free bytes on the disk of the run; None: another machine's."""
    host_copy: int = 0
    """Bytes of host memory in which a checkpoint is copied for the write in the background."""

    @property
    def wanted(self) -> int:
        return self.each * self.checkpoints

    def lines(self) -> list[str]:
        kept = "all kept" if self.keeps_all else "the newest ones kept"
        of = "" if self.free is None else f" of {size_text(self.free)} free"
        row = f"{self.checkpoints} of {size_text(self.each)}, every {self.interval} steps, {kept}"
        found = ["disk", f"  checkpoints: {size_text(self.wanted)}{of}  {row}"]
        if self.host_copy:
            found.append(
                f"  copy in host memory: {size_text(self.host_copy)}, kept while it trains"
            )
        return [*found, *(f"  WARNING {warning}" for warning in self.warnings())]

    def warnings(self) -> list[str]:
        if self.free is None or self.wanted <= self.free:
            return []
        # One more than are kept exists while the newest is written.
        room = self.free // self.each - 1
        if room < 1:
            fixes = ["choose another disk (--run-dir)"]
        elif self.keeps_all:
            fixes = [
                f"raise trainer.checkpoint_interval (now {self.interval})",
                f"set trainer.keep_checkpoints = {min(room, FEW)}",
            ]
        else:
            fixes = [f"set trainer.keep_checkpoints = {room}"]
        verb = "takes" if self.checkpoints == 1 else "take"
        return [
            f"disk: {counted(self.checkpoints, 'checkpoint')} {verb} {size_text(self.wanted)}, but "
            f"only {size_text(self.free)} are free. Fixes: {'; '.join(fixes)}"
        ]


def disk_of(site: Site, inventory: Inventory, budget: Budget, *, here: bool = True) -> Disk | None:
    """Return None if nothing is saved, or the size is unknown.

    Args:
        here: the run starts on this machine, so its free space counts.
    """
    settings, model = training_config(site), inventory.models[site.profile.vllm[0].name]
    interval, kept = settings.checkpoint_interval, settings.keep_checkpoints
    if site.profile.trainer.command is not None or isinstance(model, str) or not interval:
        return None
    made = settings.training_steps // interval
    # The oldest checkpoint goes after the newest is complete.
    most = min(made, kept + 1) if kept else made
    if not most:
        return None
    states = sum(
        item.bytes or 0
        for device in budget.devices
        for item in device.items
        if item.component == "trainer" and item.what in STATES
    )
    each = _weights(site, settings, model) + states
    free = _free(site.run.root) if here else None
    beside = settings.checkpoint_in_background and not settings.trains_adapters
    return Disk(each, most, interval, not kept, free, each if beside else 0)


def _weights(site: Site, settings: TrainingConfig, model: Model) -> int:
    if traits_of(site.profile).lora:
        return 4 * count(adapter_shapes(model, settings))
    return dtype_bytes(settings.dtype, model) * model.parameters


def _free(folder: Path) -> int:
    # The folder may not exist yet; its first existing parent is on the same disk.
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free
