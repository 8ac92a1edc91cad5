"""Reports of a step and a run: records, console line, tracker metrics, summary, callbacks."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import psutil
import torch

from atropos_common.models.model_math import peak_flops, reached_flops, step_flops
from atropos_common.protocol.benchmark_summary import summary_sections, summary_text
from atropos_common.protocol.records import FLAT, SKIPPED
from atropos_common.protocol.trainer_records import (
    AlignmentRecord,
    BenchmarkRecord,
    MemoryRecord,
    RanksRecord,
    RankUse,
    RolloutRecord,
    StepRecord,
    SyncRecord,
    TimingRecord,
    metrics_of,
)
from trainer_core.checkpoints.checkpoint import Saved
from trainer_core.config import TrainingConfig
from trainer_core.errors import CallbackError, Stopped, UsageError
from trainer_core.objective.alignment import Alignment, ProbeDiffs
from trainer_core.optimization.step import METRICS, StepOutcome
from trainer_core.policy.load import dimensions
from trainer_core.policy.speed import layers_reached
from trainer_core.ranks.world import World
from trainer_core.rollouts.batch import Batch
from trainer_core.rollouts.samples import Sample, TextReader, sample_fields
from trainer_core.rollouts.source import Lags, token_mean
from trainer_core.server.client import UNKNOWN_USE, EngineUse
from trainer_core.telemetry import Telemetry
from trainer_core.weight_sync.base import SyncReport


@dataclass(frozen=True)
class Mfu:
    """Model FLOP utilization of the training part, 0 to 1; None on an unknown card."""

    of_peak: float | None = None
    """Share of the card's dense bfloat16 peak."""
    of_reached: float | None = None
    """Share of the FLOP/s that matrix products reach on this card."""


UNKNOWN_MFU = Mfu()


@dataclass(frozen=True)
class StepReport:
    """Everything known about one optimizer step."""

    step: int
    weight_version: int
    objective: str
    ratio_base: Literal["rollout", "proximal"]
    batch: Batch
    outcome: StepOutcome
    lags: Lags
    probe: ProbeDiffs | None
    alignment: Alignment
    sync: SyncReport | None
    """None if the gradient was not finite."""
    taught_tokens: int
    """Generated tokens of the batch with a gradient."""
    wait_s: float
    train_s: float
    checkpoint_s: float
    step_s: float
    mfu: Mfu = UNKNOWN_MFU
    engine: EngineUse = UNKNOWN_USE
    """Since the last report."""
    ranks: Sequence[RankUse] = ()
    """Empty for a single rank."""
    samples: Sequence[Sample] = ()
    """Rollouts that are written as text."""

    @property
    def tokens_per_s(self) -> float:
        return self.batch.tokens / self.step_s if self.step_s else 0.0

    @property
    def accepted_tokens_per_s(self) -> float | None:
        return self.accepted_tokens / self.step_s if self.step_s else None

    @property
    def accepted_tokens(self) -> int:
        """Generated tokens that entered an update of the weights."""
        return 0 if self.sync is None else self.taught_tokens

    @property
    def left_out_tokens(self) -> dict[str, int]:
        """Generated tokens of the batch that were thrown away, by reason."""
        untaught = Counter({FLAT: self.batch.trained_tokens - self.taught_tokens})
        skipped = Counter({SKIPPED: self.taught_tokens - self.accepted_tokens})
        # Adding counters drops entries of 0.
        return dict(self.batch.left_out_tokens + untaught + skipped)


def write_records(telemetry: Telemetry, report: StepReport, reader: TextReader) -> None:
    step = report.step
    telemetry.write(StepRecord, step, **step_fields(report))
    telemetry.write(AlignmentRecord, step, **alignment_fields(report))
    telemetry.write(TimingRecord, step, **timing_fields(report))
    telemetry.write(MemoryRecord, step, **memory_fields())
    # A single rank's use is in the other records already.
    if len(report.ranks) > 1:
        telemetry.write(RanksRecord, step, ranks=report.ranks)
    if report.sync is not None:
        telemetry.write(SyncRecord, step, **vars(report.sync))
    for sample in report.samples:
        rollout, lag = report.batch.rollouts[sample.index], report.lags[sample.index]
        telemetry.write(RolloutRecord, step, **sample_fields(rollout, sample, lag, reader))


def step_fields(report: StepReport) -> dict[str, Any]:
    """Fields of a `step` record."""
    batch, outcome, scores = report.batch, report.outcome, report.batch.scores
    # The lag is None for rollouts whose completion no server knows.
    known = [lag.oldest for lag in report.lags if lag is not None]
    return {
        # None for a metric that applies to no token.
        **{name: outcome.metrics.get(name) for name in METRICS},
        "objective": report.objective,
        "ratio_base": report.ratio_base,
        "reward_mean": float(scores.mean()),
        "reward_std": float(scores.std()),
        "tokens": outcome.tokens,
        "sequences": len(batch.rollouts),
        "optimizer_steps": outcome.steps,
        "completion_tokens_mean": batch.completion_tokens_mean,
        "truncated_fraction": batch.truncated_fraction,
        "policy_lag_mean": float(np.mean(known)) if known else None,
        "policy_lag_max": float(max(known)) if known else None,
        "policy_lag_token_mean": token_mean(report.lags),
        "weight_version": report.weight_version,
        "left_out": batch.left_out,
        "left_out_tokens": report.left_out_tokens,
        "skipped_sequences": sum(batch.left_out.values()),
        "too_old": batch.too_old,
        "policy_lag_bound": batch.policy_lag_bound,
        "faults_by_env": {env: dict(reasons) for env, reasons in batch.faults_by_env.items()},
        "fault_examples": batch.fault_examples,
        "skipped_update": report.sync is None,
        "groups": batch.groups,
        "flat_groups": batch.flat_groups,
        "groups_by_env": dict(batch.groups_by_env),
        "flat_groups_by_env": dict(batch.flat_by_env),
        "unused_fields": dict(batch.unused),
        "logprobs_from": dict(batch.logprobs_from),
    }


def alignment_fields(report: StepReport) -> dict[str, Any]:
    """Fields of an `alignment` record."""
    diffs = report.outcome.diffs
    # `both`: fresh and cached answers together.
    probe = report.probe.both if report.probe else None
    return {
        "logprob_diff_mean": diffs.mean(diffs.diff),
        "logprob_diff_abs_mean": diffs.abs_mean,
        "logprob_diff_abs_max": diffs.abs_max if diffs.tokens else None,
        "kl_k3": report.outcome.metrics["kl_k3"],
        "train_mean": diffs.mean(diffs.train),
        "inference_mean": diffs.mean(diffs.inference),
        "tokens": diffs.tokens,
        "probe_diff_abs_mean": probe.abs_mean if probe else None,
        "probe_diff_abs_max": probe.abs_max if probe and probe.tokens else None,
        "probe_tokens": probe.tokens if probe else 0,
        "probe_cached_tokens": report.probe.cached_tokens if report.probe else None,
        "routing_replayed": report.batch.routing_replayed,
        "verdict": report.alignment.verdict,
        "cause": report.alignment.cause,
        "cause_kind": report.alignment.kind,
    }


def timing_fields(report: StepReport) -> dict[str, Any]:
    """Fields of a `timing` record."""
    return {
        "step_s": report.step_s,
        "data_wait_s": report.wait_s,
        "train_s": report.train_s,
        "sync_s": report.sync.seconds if report.sync else 0.0,
        "checkpoint_s": report.checkpoint_s,
        "tokens_per_s": report.tokens_per_s,
        "mfu": report.mfu.of_reached,
        "mfu_peak": report.mfu.of_peak,
        "engine_idle_fraction": report.engine.idle,
        "engine_capacity_used": report.engine.capacity,
        "accepted_tokens_per_s": report.accepted_tokens_per_s,
        "generated_tokens": report.engine.generated,
    }


def console_line(report: StepReport, total_steps: int, *, benchmark: bool) -> str:
    fields = step_fields(report)
    lag = "-" if fields["policy_lag_mean"] is None else f"{fields['policy_lag_mean']:.1f}"
    probe = (
        ""
        if report.probe is None or report.probe.both.abs_mean is None
        else f" {report.probe.both.abs_mean:.1e}"
    )
    text = (
        f"step {report.step}/{total_steps}  loss {fields['loss']:+.4f}  reward "
        f"{fields['reward_mean']:.3f}  lag {lag}  "
        f"ratio {fields['ratio_mean']:.3f}  clipped {fields['clip_fraction']:.1%}  "
        f"align {report.alignment.verdict}{probe}  {report.tokens_per_s:.0f} tok/s"
    )
    if report.batch.flat_groups:
        text += f"  flat {report.batch.flat_groups}/{report.batch.groups} groups"
    if report.sync is None:
        text += "  UPDATE SKIPPED (gradient not finite)"
    if benchmark:
        sync = report.sync.seconds if report.sync else 0.0
        text += (
            f"  step {report.step_s:.3f} s (data {report.wait_s:.3f}, train "
            f"{report.train_s:.3f}, sync {sync:.3f})"
        )
    return text


def tracker_metrics(report: StepReport) -> dict[str, Any]:
    """Metrics under the guides' names."""
    gpu = memory_fields()["allocated_bytes"]
    found: dict[str, Any] = {"train/gpu_memory_gb": None if gpu is None else gpu / 1e9}
    for kind, values in (
        (StepRecord, step_fields(report)),
        (AlignmentRecord, alignment_fields(report)),
        (TimingRecord, timing_fields(report)),
    ):
        found |= {
            metric.tracker: values[name]
            for name, metric in metrics_of(kind).items()
            if metric.tracker
        }
    return found


@dataclass
class BenchmarkTotals:
    """Sums over the steps of one attempt, in seconds and bytes."""

    mode: str
    began: float = field(default_factory=time.perf_counter)
    steps: int = 0
    step_s: float = 0.0
    sync_s: float = 0.0
    syncs: int = 0
    wait_s: float = 0.0
    idle_s: float = 0.0
    known_idle_s: float = 0.0
    """Seconds of steps with known engine idleness."""
    used_s: float = 0.0
    """Seconds of steps, weighted by the share of engine capacity in use."""
    rated_s: float = 0.0
    """Seconds of steps with known capacity use."""
    tokens: int = 0
    accepted_tokens: int = 0
    byte_sum: int = 0

    def add(self, report: StepReport) -> None:
        self.steps += 1
        self.step_s += report.step_s
        self.wait_s += report.wait_s
        # Each share needs its own total time: a server may report one and not the other.
        if report.engine.idle is not None:
            self.idle_s += report.engine.idle * report.step_s
            self.known_idle_s += report.step_s
        if report.engine.capacity is not None:
            self.used_s += report.engine.capacity * report.step_s
            self.rated_s += report.step_s
        self.tokens += report.batch.tokens
        self.accepted_tokens += report.accepted_tokens
        self.byte_sum += memory_fields()["allocated_bytes"] or 0
        if report.sync is not None:
            self.add_sync(report.sync)

    def add_sync(self, sync: SyncReport) -> None:
        if sync.moved:
            self.syncs += 1
            self.sync_s += sync.seconds

    def fields(self) -> dict[str, Any]:
        """Fields of a `benchmark` record. `tokens_per_s` counts every trained token, prompts
        included, over the seconds of all steps."""
        steps, syncs = max(1, self.steps), max(1, self.syncs)
        memory = memory_fields()
        return {
            "mode": self.mode,
            "total_s": time.perf_counter() - self.began,
            "steps": self.steps,
            "avg_step_s": self.step_s / steps,
            "total_step_s": self.step_s,
            "avg_sync_s": self.sync_s / syncs,
            "syncs": self.syncs,
            "total_sync_s": self.sync_s,
            "avg_data_wait_s": self.wait_s / steps,
            "total_data_wait_s": self.wait_s,
            "engine_idle_fraction": self.idle_s / self.known_idle_s if self.known_idle_s else None,
            "engine_capacity_used": self.used_s / self.rated_s if self.rated_s else None,
            "accepted_tokens_per_s": self.accepted_tokens / self.step_s if self.step_s else None,
            "peak_bytes": memory["peak_bytes"],
            "avg_bytes": None if memory["allocated_bytes"] is None else self.byte_sum // steps,
            "tokens_per_s": self.tokens / self.step_s if self.step_s else 0.0,
        }

    def summary(self) -> str:
        """Format the guides' summary."""
        figures = BenchmarkRecord(**self.fields())
        return summary_text(f"({self.mode})", summary_sections(figures, no_memory="n/a (CPU)"))


class MfuMeter:
    """MFU of a step's training part, on a GPU with a known peak."""

    def __init__(self, model: torch.nn.Module, device: torch.device, ranks: int = 1) -> None:
        self._sizes, self._reached, self._trained = dimensions(model), layers_reached(model), None
        # Adapters or upper layers only: count the trained matrices for the FLOPs of weight
        # gradients.
        if not model.get_input_embeddings().weight.requires_grad:
            self._trained = sum(
                p.numel() for p in model.parameters() if p.requires_grad and p.ndim == 2
            )
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._limits = [
            limit and limit * ranks for limit in (peak_flops(name), reached_flops(name))
        ]

    def flops(self, lengths: Sequence[int], predicted: int) -> float:
        """FLOPs of a step over sequences of these lengths, with `predicted` trained tokens."""
        return step_flops(
            self._sizes, lengths, predicted, reached=self._reached, trained=self._trained
        )

    def measure(self, lengths: Sequence[int], predicted: int, seconds: float) -> Mfu:
        if seconds <= 0:
            return UNKNOWN_MFU
        speed = self.flops(lengths, predicted) / seconds
        return Mfu(*(speed / limit if limit else None for limit in self._limits))


def rank_use(world: World, tokens: int, alone_s: float) -> list[RankUse]:
    """Return each rank's use in a step, on every rank.

    Args:
        tokens: tokens of this rank's rows.
        alone_s: seconds of work without the other ranks.
    """
    memory = memory_fields()
    # `RankUse` has no such field.
    memory.pop("reserved_bytes")
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES") if memory["allocated_bytes"] is not None else None
    return world.gather(RankUse(rank=world.rank, gpu=gpu, tokens=tokens, alone_s=alone_s, **memory))


def memory_fields() -> dict[str, int | None]:
    """Fields of a `memory` record, in bytes; None without a GPU in use."""
    # Without a CUDA context there is nothing to measure.
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "allocated_bytes": torch.cuda.memory_allocated() if cuda else None,
        "reserved_bytes": torch.cuda.memory_reserved() if cuda else None,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "rss_bytes": psutil.Process().memory_info().rss,
    }


@dataclass(frozen=True)
class TrainResult:
    """End of a run."""

    step: int
    weight_version: int
    done: bool  # else the run was stopped, with a checkpoint
    path: Path | None
    """final_model/, or the checkpoint of a stop if it had something to save."""
    reason: str = ""
    """Reason for an end before the last step."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """Fields of the `step` records of this attempt, if `keep_history`."""


class Callback(Protocol):
    """Base class for callbacks; any object with some of these methods works too.

    An exception ends the run: the trainer saves the step, and `train` raises `CallbackError`.
    `Stopped` stops the run in the normal way.
    """

    def on_start(self, config: TrainingConfig, step: int) -> None:
        """The policy is ready; `step` optimizer steps are done."""

    def on_step(self, report: StepReport) -> None:
        """A step is recorded. A kept report keeps its batch in memory."""

    def on_checkpoint(self, saved: Saved) -> None:
        """step_N/ or final_model/ is written."""

    def on_end(self, result: TrainResult) -> None:
        """`train` is about to return `result`; not after an error."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    def __init__(self, callbacks: Sequence[Callback]) -> None:
        """Raises:
        UsageError: a callback is a class, or has none of the methods.
        """
        self._callbacks = callbacks
        for callback in callbacks:
            if isinstance(callback, type):
                raise UsageError(
                    f"callbacks: {callback.__name__} is a class. fix: pass an instance of it"
                )
            # A misspelled method would be ignored without a word; an object without any is surely a
            # mistake.
            if not any(callable(getattr(callback, method, None)) for method in METHODS):
                raise UsageError(
                    f"callbacks: {type(callback).__qualname__} has none of {', '.join(METHODS)}"
                )

    def tell(self, method: str, *values: Any) -> None:
        """Call `method` of every callback that has it.

        Raises:
            CallbackError: a callback raised.
        """
        for callback in self._callbacks:
            call = getattr(callback, method, None)
            if call is None:
                continue
            try:
                call(*values)
            # The documented way for a callback to stop the run; it must not become an error.
            except Stopped:
                raise
            except Exception as error:
                name = f"{type(callback).__qualname__}.{method}"
                raise CallbackError(
                    f"the callback {name} raised {type(error).__name__}: {error}"
                ) from error
