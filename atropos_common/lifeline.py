"""How a rank of a broadcast's group waits: for as long as the trainer's rank 0 lives, and no longer than it may.

Every wait is a poll with a deadline. While it lasts the store of rank 0 is looked at, which says when the group is
given up, and breaks off when that process dies. So a peer that is gone is an error, never a hang. Needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from atropos_common.group import SealedStore
from atropos_common.transfer import TransferInit

POLL_S = 0.0002
BRISK_S = 0.05
"""After this long without an end, polls become rare."""
LOOK_S = 0.1
"""How often the trainer's store is looked at during a wait."""


class LinkError(RuntimeError):
    """The group did not form, or broke; the message says in which phase."""


class Lifeline:
    """Waits that end with the trainer."""

    def __init__(self, init: TransferInit, rank: int, gpu: str = "") -> None:
        """Find the trainer's store and report there.

        Args:
            gpu: the name of this rank's GPU, which no other rank may use; nothing on a CPU.

        Raises:
            LinkError: there is none.
        """
        self._where, self._timeout_s = f"{init.address}:{init.port}", init.timeout_s
        timeout = timedelta(seconds=init.timeout_s)
        try:
            store: Any = dist.TCPStore(init.address, init.port, None, False, timeout, wait_for_workers=False)
            self.store = SealedStore(dist.PrefixStore(init.key, store), init.secret, timeout)
            self.store.set(f"here/{rank}", gpu.encode())
        except RuntimeError as error:
            raise LinkError(
                f"no trainer at {self._where} (phase rendezvous: {first_line(error)}). Is it alive, and does "
                "MASTER_ADDR name an address of its machine that this one reaches?"
            ) from None
        self.until(lambda: self.store.check(["go"]), "rendezvous", "the others did not come")
        self._rank = rank

    def connecting(self) -> None:
        """Let the trainer know that this rank does its part now."""
        self.store.set(f"connecting/{self._rank}", b"1")

    def until(self, done: Callable[[], bool], phase: str, otherwise: str) -> None:
        """Poll until `done`.

        Raises:
            LinkError: the trainer left or died, or `otherwise` for as long as the timeout.
        """
        began = looked = time.monotonic()
        while not self._asked(done, phase):
            now = time.monotonic()
            if now - looked > LOOK_S:
                looked = now
                if self._asked(lambda: self.store.check(["off"]), phase):
                    raise LinkError(f"the trainer gave this group up (phase {phase})")
            if now - began > self._timeout_s:
                raise LinkError(f"{otherwise} within {self._timeout_s:.0f} s (phase {phase})")
            time.sleep(POLL_S if now - began < BRISK_S else 20 * POLL_S)

    def _asked(self, question: Callable[[], bool], phase: str) -> bool:
        try:
            return question()
        except RuntimeError as error:
            raise self.died(phase, error) from None

    def died(self, phase: str, error: Exception) -> LinkError:
        """What a connection to the trainer that breaks off means."""
        return LinkError(f"the trainer at {self._where} died (phase {phase}: {first_line(error)})")


def gpu_of(device: torch.device) -> str:
    """A name that no other GPU has; nothing for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def first_line(error: Exception) -> str:
    """Of what torch says, without the C++ stack below it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
