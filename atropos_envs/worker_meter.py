"""Mean number of groups under way, and of queue slots that none takes: what bounds an environment."""

from __future__ import annotations

from dataclasses import dataclass, field

from atropos_envs.places import Places


@dataclass
class WorkerMeter:
    """Means over the looks since the last `take`."""

    looks: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def look(self, workers: int, places: Places | None, *, awaited: bool | None, in_engine: int | None) -> None:
        """Note the present moment.

        Args:
            workers: groups under way.
            places: the environment's queue slots, where it keeps them itself.
            awaited: a batch waits for this environment's share; None where it has the queue to itself.
            in_engine: completions that it waits for; None where nobody counts them.
        """
        self.looks += 1
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
        """The means, as fields of an `env_counts` record; counting starts over."""
        means = {name: total / self.looks for name, total in self.sums.items()}
        self.looks, self.sums = 0, {}
        return means
