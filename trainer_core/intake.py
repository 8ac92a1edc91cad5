"""The way in: the next batch of run-api, the policy lag of its rollouts, and what of it is left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer_core.config import TrainingConfig
from trainer_core.contracts.records import MISSING, AlignmentRecord
from trainer_core.errors import EngineError, EngineGone, MissingLogprobs
from trainer_core.rollouts.batch import Batch, Rollout, Selection, read_batch
from trainer_core.rollouts.client import RawBatch, RunApi
from trainer_core.telemetry import Telemetry

Lags = list[int | None]
"""Policy lag of each rollout in weight versions; null where the server does not know the completion."""
Versions = Callable[[list[str]], list[tuple[int, int] | None]]
"""Digests of completions -> oldest and newest weight version of each; null for one not known."""


class LagMeter:
    """Asks the servers which weights wrote each completion: one of them did. Stops asking one that cannot tell."""

    def __init__(self, servers: Sequence[Versions]) -> None:
        self._servers = list(servers)

    def measure(self, rollouts: list[Rollout], version: int) -> Lags:
        """`version` (what the policy holds) minus the oldest version of each rollout."""
        found = iter(self._ask([digest for r in rollouts for digest in r.digests]))
        lags: Lags = []
        for rollout in rollouts:
            oldest = [pair[0] for pair in (next(found) for _ in rollout.digests) if pair is not None]
            lags.append(version - min(oldest) if oldest else None)
        return lags

    def _ask(self, digests: list[str]) -> list[tuple[int, int] | None]:
        """Oldest and newest version of each, by the server that knows it; null where none does."""
        known: list[tuple[int, int] | None] = [None] * len(digests)
        for ask in list(self._servers):
            try:
                answer = ask(digests)
            except EngineGone as error:
                print(f"Policy lag of this batch unknown: {error}")
            except EngineError as error:
                print(f"Policy lag unknown: {error}")
                self._servers.remove(ask)
            else:
                known = [old or new for old, new in zip(known, answer, strict=True)]
        return known


class Intake:
    """Batches for one policy."""

    def __init__(
        self,
        config: TrainingConfig,
        api: RunApi,
        telemetry: Telemetry,
        *,
        selection: Selection,
        advantage_std: bool,
        servers: Sequence[Versions],
        while_waiting: Callable[[], None],
    ) -> None:
        """Args:
        selection, advantage_std: what the objective needs of a batch.
        while_waiting: called before a batch is taken and about once a second until it comes; may raise.
        """
        self.config = config
        self.api = api
        self.telemetry = telemetry
        self.selection = selection
        self.advantage_std = advantage_std
        self.lag_meter = LagMeter(servers)
        self.while_waiting = while_waiting
        self._greeted = False

    def next_batch(self, step: int, version: int) -> tuple[Batch, Lags]:
        """The next batch that holds something to train on, and the policy lag of each of its rollouts.

        Args:
            step: optimizer steps done.
            version: of the weights that the policy holds.

        Raises:
            BatchError: what came is no batch; `MissingLogprobs` with a record for the screen.
        """
        while True:
            # Without a server a batch stays in run-api, for whoever goes on with a new one.
            self.while_waiting()
            batch = self._read(self.api.next_batch(step, on_idle=self.while_waiting), step)
            measured = self.lag_meter.measure(batch.rollouts, version)
            lags = leave_out_by_lag(batch, measured, self.config.max_policy_lag)
            self._tell(batch)
            if batch.trained_tokens:
                return batch, lags
            print("[WARNING] nothing to train on in this batch; taking the next one")

    def _read(self, raw: RawBatch, step: int) -> Batch:
        if self.config.dump_last_batch:
            target = Path(self.config.save_path)
            target.mkdir(parents=True, exist_ok=True)
            (target / "temp.json").write_text(json.dumps({"batch": raw}))
        try:
            return read_batch(
                raw, seq_len=self.config.seq_len, temperature=self.config.temperature,
                advantage_std=self.advantage_std, selection=self.selection,
            )  # fmt: skip
        except MissingLogprobs as error:
            self.telemetry.write(AlignmentRecord, step + 1, verdict="mismatch", cause=f"{MISSING}: {error}")
            raise

    def _tell(self, batch: Batch) -> None:
        """On the console: the first batch with logprobs, and what is odd about any."""
        if not self._greeted and batch.sample_len:
            self._greeted = True
            print(f"✓ inference_logprobs found in batch (sample len: {batch.sample_len})")
        if batch.logprob_warning:
            print(f"[WARNING] {batch.logprob_warning}")
        for why, count in batch.skipped.items():
            print(f"[WARNING] {count} sequences left out: {why}")


def leave_out_by_lag(batch: Batch, lags: Lags, most: int | None) -> Lags:
    """Leave out what is older than `most` versions, and what weights wrote that a return to a checkpoint gave up: no
    update leads to those. Rollouts of unknown age stay."""

    def reason(lag: int | None) -> str | None:
        if lag is not None and lag < 0:
            return "generated by weights that a restart gave up"
        return f"older than --max-policy-lag {most}" if lag is not None and most is not None and lag > most else None

    why = [reason(lag) for lag in lags]
    for text in filter(None, why):
        batch.skip(text, 1)
    batch.rollouts = [rollout for rollout, out in zip(batch.rollouts, why, strict=True) if out is None]
    return [lag for lag, out in zip(lags, why, strict=True) if out is None]
