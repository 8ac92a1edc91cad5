"""The training loop, read top to bottom. It names no mode: `weight_sync` knows how weights travel.

    from trainer_core import TrainingConfig, train
    train(TrainingConfig(model_name="...", weight_bridge_mode="shared_vllm"))

Each optimizer step: wait for one batch, gradient over all of it, compare with the server at the same weights, write and
publish the new version, report, now and then a checkpoint.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trainer_core import checkpoint
from trainer_core.benchmark import Benchmark, memory_fields
from trainer_core.config import TrainingConfig
from trainer_core.contracts.records import BenchmarkRecord, CheckpointRecord
from trainer_core.contracts.run_dir import RunDir
from trainer_core.errors import EngineGone, MemoryFullError, MismatchError, Stopped, TrainerError, UsageError
from trainer_core.explain import explain
from trainer_core.intake import Intake, Lags
from trainer_core.objective.alignment import Alignment, Gate, Probe, thresholds
from trainer_core.objective.registry import Objective
from trainer_core.optimizers import Stepper, for_device
from trainer_core.policy.checkpointing import use_checkpointing
from trainer_core.policy.compiled import compile_layers
from trainer_core.policy.flops import MfuMeter
from trainer_core.policy.lanes import use_cores
from trainer_core.policy.load import train_only
from trainer_core.probe import Prober
from trainer_core.reporting import StepReport, TextReader, console_line, tracker_metrics, write_records
from trainer_core.rollouts.batch import Batch
from trainer_core.rollouts.client import RunApi, open_api
from trainer_core.rollouts.packing import pack
from trainer_core.step import StepOutcome, accumulate
from trainer_core.stopping import StopConditions
from trainer_core.telemetry import open_telemetry
from trainer_core.trackers import Trackers
from trainer_core.weight_sync.base import Start, SyncReport
from trainer_core.weight_sync.factory import make_sync

OUT_OF_MEMORY = """{error}
The trainer does not fit into the GPU's memory. Ways out, the cheapest first:
  --gradient-checkpointing on, or --pack-tokens below {tokens}: fewer activations, the same gradient
  --master-weights kahan or stochastic, --optimizer adamw_8bit or adafactor: less state
  a lower --gpu-memory-utilization of the server (vllm.gpu_memory_utilization in a profile)
  --train-layer-indices for the upper layers alone, or a shorter --seq-len
  another GPU, or a smaller model"""

DYING_S = 5.0
"""In this time a server whose engine has died ends too."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended: `done` when all steps are trained or a stop condition held, else it was stopped and a checkpoint
    saved."""

    step: int
    weight_version: int
    done: bool
    path: Path | None
    """final_model/, or the checkpoint written at the stop."""
    reason: str = ""
    """The stop condition that ended the run early."""


class _Enough(Exception):
    """A stop condition came true while waiting for a batch."""


def train(config: TrainingConfig, *, api: RunApi | None = None, stop: threading.Event | None = None) -> TrainResult:
    """Train until `training_steps`, a stop condition, or until `stop` is set.

    Args:
        api: already registered with run-api; default: registers itself.
        stop: set it to end after the present optimizer step, or at once while waiting.

    Raises:
        TrainerError: what a user can act on, such as `EngineGone` or `MissingLogprobs`.
        Stopped: stopped before the first step.
    """
    stop = stop or threading.Event()
    config = config.in_run_dir(RunDir.from_env())
    start = checkpoint.starting_point(config)
    print(checkpoint.describe(start, config))
    run = Run(config, start, api or open_api(config, start.step, stop), stop)
    try:
        return _to_the_end(run, start)
    except torch.OutOfMemoryError as error:
        run.rescue(error)
        raise MemoryFullError(OUT_OF_MEMORY.format(error=error, tokens=config.tokens_per_pass)) from None
    except (Stopped, MismatchError):
        raise
    except Exception as error:
        run.rescue(error)
        raise
    finally:
        run.close()


def _to_the_end(run: Run, start: checkpoint.StartingPoint) -> TrainResult:
    """All steps, or as many as there are before a stop condition or the stop."""
    try:
        run.attach(start)
        while not run.ended() and not run.stop.is_set():
            try:
                run.one_step()
            except RuntimeError:
                run.blame_the_server()
                raise
    except _Enough:
        return run.finish()
    except Stopped:
        return run.save_at_stop()
    return run.finish() if run.ended() else run.save_at_stop()


class Run:
    """One attempt: what the loop holds, and its step."""

    def __init__(
        self, config: TrainingConfig, start: checkpoint.StartingPoint, api: RunApi, stop: threading.Event
    ) -> None:
        self.device = _device(config)
        self.config = config = for_device(config, self.device)
        self.step, self.version = start.step, start.version
        self.saved_step = start.step
        self.api = api
        self.stop = stop
        self.sync = make_sync(config, self.device, stop)
        self.telemetry = open_telemetry(config.save_path, config.trainer_rank)
        self.tracker = Trackers(config)
        self.objective = Objective(config)
        self.stopping = StopConditions(config, start.stopping)
        self.reader = TextReader(config.model_name)
        self.bench = Benchmark(self.sync.mode)
        self.failed: TrainerError | None = None
        """Why the present step, which is complete, is the last one of this attempt."""

    def attach(self, start: checkpoint.StartingPoint) -> None:
        """Get the policy with the starting weights on both sides, and an optimizer over it."""
        _seed(self.config.seed)
        self.model = self.sync.attach(Start(start.path, start.version))
        train_only(self.model, self.config.train_layer_indices)
        self.lanes = use_cores(self.model, self.config, self.device)
        self.stepper = Stepper(self.model, self.config)
        if start.path is not None:
            checkpoint.restore(start.path, self.stepper)
        use_checkpointing(
            self.model, self.config.gradient_checkpointing, device=self.device, optimizer=self.config.optimizer,
            tokens=max(self.config.tokens_per_pass, self.config.seq_len),
        )  # fmt: skip
        compile_layers(self.model, self.config.compile, self.device)
        self.mfu = MfuMeter(self.model.config, self.device)
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        self.gate = Gate(thresholds(dtype, self.config.alignment_ok, self.config.alignment_mismatch))
        self.prober = Prober(self.sync.engine, self.config)
        self.intake = Intake(
            self.config, self.api, self.telemetry, selection=self.objective.selection(self.model.config.vocab_size),
            advantage_std=self.objective.advantage_std, servers=[engine.versions for engine in self.sync.engines],
            while_waiting=self.while_waiting,
        )  # fmt: skip
        self.bench = Benchmark(self.sync.mode)
        print(f"Ready to train from step {self.step + 1} with weight version {self.version}")

    def ended(self) -> bool:
        """Whether all steps are trained, or a stop condition holds."""
        return self.step >= self.config.training_steps or self.stopping.reason() is not None

    def one_step(self) -> None:
        """One batch, one optimizer step, one version."""
        began = time.perf_counter()
        batch, lags = self.intake.next_batch(self.step, self.version)
        step = self.step + 1
        self.prober.learn(batch)
        self.prober.start(step, self.version)
        fetched = time.perf_counter()
        rows = pack(batch.rollouts, self.config.tokens_per_pass, self.lanes)
        outcome = accumulate(self.model, self.stepper, rows, self.config, step, lanes=self.lanes)
        probe = self.prober.finish(self.model)
        alignment = self.judge(outcome, probe, lags, batch)
        if outcome.finite:
            self.stepper.compute()
        trained = time.perf_counter()
        sync = self.publish(outcome)
        self.stopping.saw(float(batch.scores.mean()))
        broken = self.config.stop_on_mismatch and alignment.verdict == "mismatch"
        if step < self.config.training_steps and not broken and self.failed is None:
            self.prober.start(step + 1, self.version)
        checkpoint_s = 0.0 if broken else self.save_if_due()
        self.report(
            StepReport(
                step, self.version, self.config.objective, batch, outcome, lags, probe, alignment, sync,
                wait_s=fetched - began, train_s=trained - fetched, checkpoint_s=checkpoint_s,
                mfu=self.mfu.measure([len(r.tokens) for r in batch.rollouts], trained - fetched),
                step_s=time.perf_counter() - began,
            )
        )  # fmt: skip
        if broken:
            raise MismatchError(
                f"--stop-on-mismatch: {alignment.cause}. The weights of this step are not saved. "
                f"{self.last_checkpoint()}"
            )
        if self.failed is not None:
            raise self.failed

    def while_waiting(self) -> None:
        """Is there still a server, and reason to go on?"""
        self.sync.check()
        if self.stopping.reason() is not None:
            raise _Enough

    def blame_the_server(self) -> None:
        """After an error of torch: raise `EngineGone` where the server's end explains that memory could not be read.

        The process that owned it may be gone seconds before the one that is watched.
        """
        until = time.monotonic() + (DYING_S if self.device.type == "cuda" else 0.0)
        self.sync.check()
        while time.monotonic() < until:
            time.sleep(0.1)
            self.sync.check()

    def publish(self, outcome: StepOutcome) -> SyncReport | None:
        """Write the update and let the server see it; null when the gradient is not finite and nothing changes."""
        if not outcome.finite:
            self.stepper.zero_grad()
            self.step += 1
            return None
        began = time.perf_counter()
        try:
            return self.sync.publish(self.version + 1, self.write)
        except TrainerError as error:
            if self.sync.let_go(self.stepper.copies()):
                raise
            if self.stepper.unwritten:
                self.write()  # the update needs no server: complete it, so that the batch is not lost with one
            self.failed, lasted = error, time.perf_counter() - began
            return SyncReport(self.sync.mode, self.version, lasted, {"server_gone": lasted}, moved=False)

    def write(self) -> None:
        """Put the computed update into the policy: with this the step is done."""
        self.stepper.write()
        self.step += 1
        self.version += 1

    def rescue(self, error: Exception) -> None:
        """After `error`: save what is not saved yet, if the weights are still the policy's, and say what remains."""
        cause = "the server" if isinstance(error, EngineGone) else "the error"
        if not hasattr(self, "stepper"):
            print(self.last_checkpoint())
            return
        try:
            lost = self.sync.let_go(self.stepper.copies())
            if not lost and self.stepper.unwritten:
                self.write()
            if not lost and self.step > self.saved_step:
                self.save()
        except Exception as another:  # what brought us here is told, whatever comes on top of it
            lost = f"they cannot be saved ({type(another).__name__}: {another})"
        last = self.last_checkpoint()
        if lost:
            print(f"The weights of step {self.step} are lost with {cause}: {lost}. {last}")
        else:
            print(f"✓ No step is lost: the weights of step {self.step} outlived {cause}. {last}")

    def judge(self, outcome: StepOutcome, probe: Probe | None, lags: Lags, batch: Batch) -> Alignment:
        """Before weights change: what the server said, the rollouts and the policy belong together now."""
        known = [lag for lag in lags if lag is not None]
        lag_max = max(known) if known else None
        found = self.gate.judge(outcome.diffs, probe, lag_max=lag_max, version=self.version)
        alignment = explain(found, self.model, batch.rollouts, self.prober.answers, step=self.step + 1, lag_max=lag_max)
        if alignment.verdict != "ok":
            print(f"LogProb Alignment: {alignment.verdict.upper()} ({alignment.cause})")
        return alignment

    def report(self, report: StepReport) -> None:
        write_records(self.telemetry, report, self.config, self.reader)
        print(console_line(report, self.config.training_steps, benchmark=self.config.benchmark))
        self.tracker.log(report.step, tracker_metrics(report))
        self.bench.add(
            step_s=report.step_s, wait_s=report.wait_s,
            sync_s=report.sync.seconds if report.sync and report.sync.moved else None,
            tokens=report.batch.tokens, allocated=memory_fields()["allocated_bytes"],
        )  # fmt: skip

    def save_if_due(self) -> float:
        """Seconds spent on a checkpoint, 0 when none is due."""
        interval = self.config.checkpoint_interval
        return self.save().seconds if interval and self.step % interval == 0 else 0.0

    def save(self) -> checkpoint.Saved:
        """Write step_N/ for the present step."""
        saved = checkpoint.save_step(
            self.model, self.config, self.stepper, step=self.step, version=self.version, stopping=self.stopping.state()
        )
        self.saved_step = self.step
        self._record(saved)
        return saved

    def save_at_stop(self) -> TrainResult:
        """A checkpoint of what was trained since the last one."""
        if not hasattr(self, "stepper"):
            raise Stopped
        path = None
        # A server that has died may have taken the weights with it: what is read then is nobody's model.
        self.sync.check()
        if self.step > self.saved_step:
            path = self.save().path
        print(f"Stopped after step {self.step}. {self.last_checkpoint()}")
        return TrainResult(self.step, self.version, False, path)

    def finish(self) -> TrainResult:
        """The final model and the benchmark."""
        final = checkpoint.save(
            self.model, self.config, Path(self.config.save_path) / "final_model", step=self.step, version=self.version,
            stepper=None,
        )  # fmt: skip
        self._record(final)
        fields = self.bench.fields()
        self.telemetry.write(BenchmarkRecord, self.step, **fields)
        self.tracker.finish(fields)
        if self.config.benchmark or RunDir.from_env() is not None:
            print(self.bench.summary())
        reason = self.stopping.reason() if self.step < self.config.training_steps else None
        why = f" ({reason})" if reason else ""
        print(f"Training finished: {self.step} steps{why}, final model in {final.path}")
        return TrainResult(self.step, self.version, True, final.path, reason or "")

    def last_checkpoint(self) -> str:
        """What a later attempt would go on from, in words."""
        found = checkpoint.complete_checkpoints(Path(self.config.save_path), self.config.trains_adapters)
        return (
            f"Last checkpoint: {found[-1]}" if found else "There is no checkpoint: a restart begins with the base model"
        )

    def close(self) -> None:
        if hasattr(self, "prober"):
            self.prober.close()
        self.sync.close()
        self.api.close()
        self.telemetry.close()

    def _record(self, saved: checkpoint.Saved) -> None:
        self.telemetry.write(
            CheckpointRecord, self.step, path=str(saved.path), seconds=saved.seconds, bytes=saved.bytes
        )
        print(f"Saved {saved.path.name} ({saved.bytes / 1e6:.1f} MB, {saved.seconds:.2f} s)")


def _device(config: TrainingConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {config.device}: torch sees no GPU here")
    return torch.device(config.device)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
