"""Mean numbers of groups in flight and of free queue slots, which show what limits an
environment."""

from __future__ import annotations

from dataclasses import dataclass, field

from atropos_envs.hosting.queue_slots import QueueSlots


@dataclass
class WorkerMeter:
    """Means over the samples since the last `take`."""

    looks: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def look(
        self,
        workers: int,
        places: QueueSlots | None,
        *,
        awaited: bool | None,
        in_engine: int | None,
    ) -> None:
        """Add a sample.

        Args:
            workers: groups in flight.
            places: the environment's queue slots; None if BaseEnv manages them.
            awaited: a batch waits for this environment's share; None if it is the only one in the
                queue.
            in_engine: completions that it waits for; None if its servers do not count them.
        """
        self.looks += 1
        # Keys are field names of `EnvCountsRecord`. An unknown value adds no key, so the record has
        # None.
        now: dict[str, float] = {"workers": workers}
        if awaited is not None:
            now["awaited"] = awaited
        if in_engine is not None:
            now["in_engine"] = in_engine
        if places is not None:
            now |= {"waiting_for_slot": places.waiting, "free_slots": places.free}
        for name, value in now.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def take(self) -> dict[str, float]:
        """Return the means as fields of an `env_counts` record, and start over."""
        # A value that was unknown in some samples is averaged as if it were 0 there.
        means = {name: total / self.looks for name, total in self.sums.items()}
        self.looks, self.sums = 0, {}
        return means
