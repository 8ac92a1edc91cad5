"""The training loop, from top to bottom; `weight_sync` knows how weights travel in each mode.

    from trainer_core import TrainingConfig, train
    train(TrainingConfig(model_name="...", weight_bridge_mode="shared_vllm"))
    train(TrainingConfig(model_name="..."), rollouts="rollouts.jsonl", loss_fn=..., callbacks=[...])

Every rank runs the same steps and the model. Rank 0 alone uses run-api, servers, files, trackers
and callbacks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from atropos_common.protocol.stages import ATTACHED, reach
from atropos_common.protocol.trainer_records import BenchmarkRecord, CheckpointRecord, SyncRecord
from atropos_common.system.run_dir import RunDir
from trainer_core.checkpoints import checkpoint
from trainer_core.checkpoints.companions import read_companions
from trainer_core.checkpoints.saving import Saver
from trainer_core.config import TrainingConfig, sharding_contradictions
from trainer_core.ending import StopConditions, Updates
from trainer_core.errors import (
    EngineGone,
    MemoryFullError,
    MismatchError,
    NonFiniteError,
    NoUpdateError,
    RolloutsEnd,
    Stopped,
    TrainerError,
    UsageError,
)
from trainer_core.objective.alignment import Alignment, AlignmentGate, ProbeDiffs, thresholds
from trainer_core.objective.loss import Formula, balance_coefficient
from trainer_core.objective.registry import Objective, objective_hint, own_loss
from trainer_core.optimization.minibatches import Minibatches, merged
from trainer_core.optimization.optimizers import for_device
from trainer_core.optimization.step import StepOutcome, accumulate
from trainer_core.policy.kernel_choice import use_attention
from trainer_core.policy.load import end_tokens, train_only
from trainer_core.policy.logprobs import use_head
from trainer_core.policy.proof import prove
from trainer_core.policy.reference import Reference
from trainer_core.policy.routing import replay_in
from trainer_core.policy.sharding import compute_dtype
from trainer_core.policy.speed import use_cores, use_memory
from trainer_core.preparation import (
    compile_scoring,
    device_of,
    joined_world,
    make_stepper,
    open_source,
    require_recorded_routing,
    restored_process_state,
    seed_all,
    with_rollouts,
)
from trainer_core.probe import LogprobProbe, explain
from trainer_core.ranks.world import ALONE, SEEN_S, World, speaks_for_node
from trainer_core.report import (
    BenchmarkTotals,
    Callback,
    Callbacks,
    MfuMeter,
    StepReport,
    TrainResult,
    console_line,
    rank_use,
    step_fields,
    tracker_metrics,
    write_records,
)
from trainer_core.rollouts.asking import MissingAsker, RouterShape, RoutingAsker
from trainer_core.rollouts.batch import Baselines
from trainer_core.rollouts.client import RolloutSource
from trainer_core.rollouts.compared import TOKENS, EarlierLogprobs, spread_out
from trainer_core.rollouts.packing import PackedRow
from trainer_core.rollouts.recorded import (
    Provenance,
    RecordedLags,
    RecordedRollouts,
    Recorder,
)
from trainer_core.rollouts.samples import Samples, TextReader, sampled
from trainer_core.rollouts.source import BatchSource, LagMeter, Lags, oldest_lag
from trainer_core.server.client import EngineMeter
from trainer_core.telemetry import Trackers, open_telemetry
from trainer_core.weight_sync.base import Start, SyncReport, make_sync

# A server may end seconds after its engine.
DYING_S = 5.0


class _StopConditionMet(Exception):
    pass


def train(
    config: TrainingConfig,
    *,
    api: RolloutSource | None = None,
    stop: threading.Event | None = None,
    start: checkpoint.StartingPoint | None = None,
    rollouts: str | Path | RolloutSource | Iterable[Any] | None = None,
    loss_fn: Formula | None = None,
    callbacks: Sequence[Callback] = (),
    keep_history: bool = True,
) -> TrainResult:
    """Train until `training_steps`, a stop condition, the end of recorded rollouts, or `stop`.

    Args:
        api: source of batches; default: run-api, where the trainer registers.
        stop: set it to end after the current step, or at once while waiting.
        start: starting point, as registered with `api`; default: found by `resume`.
        rollouts: a file, an object with `next_batch` or batches, instead of run-api and server.
        loss_fn: replaces the objective's formula.
        callbacks: called at the start, each step, each checkpoint and the end.
        keep_history: keep the fields of every step for the result, about 2 kB each.

    Raises:
        TrainerError: a user can act on it.
        Stopped: stopped before the first step.
    """
    stop = stop or threading.Event()
    config = with_rollouts(config, rollouts).in_run_dir(RunDir.from_env())
    with ExitStack() as opened:
        opened.enter_context(restored_process_state())
        world = opened.enter_context(joined_world(config, stop))
        if problems := sharding_contradictions(config, world.size):
            raise UsageError("\n".join(problems))
        # Before the model is loaded, whose sharding depends on it.
        world.split(config.context_parallel)
        # Rank 0 reads the disk, so that all ranks start from the same checkpoint.
        start = world.share(lambda: start or checkpoint.starting_point(config))
        device = device_of(config)
        config = for_device(config, device)
        print(checkpoint.describe(start, config))
        if hint := objective_hint(config):
            print(f"[NOTE] {hint}")
        source = world.first(lambda: open_source(config, api or rollouts, start.step, stop))
        # `first` leaves the source on rank 0; other ranks get None.
        if source is not None:
            opened.callback(source.close)
        try:
            try:
                run = Run(
                    config,
                    device,
                    start,
                    source,
                    stop,
                    opened,
                    world,
                    loss_fn=loss_fn,
                    callbacks=callbacks,
                    keep_history=keep_history,
                )
            except Stopped:
                raise
            except Exception:  # nothing to rescue yet: print what the next attempt starts from
                print(checkpoint.describe_last(config))
                raise
            return run.to_the_end()
        except torch.OutOfMemoryError as error:
            raise MemoryFullError(error, config.tokens_per_pass) from None


class Run:
    """One attempt. Once constructed, the policy is attached and ready."""

    def __init__(
        self,
        config: TrainingConfig,
        device: torch.device,
        start: checkpoint.StartingPoint,
        api: RolloutSource,
        stop: threading.Event,
        opened: ExitStack,
        world: World = ALONE,
        *,
        loss_fn: Formula | None = None,
        callbacks: Sequence[Callback] = (),
        keep_history: bool = True,
    ) -> None:
        """Args:
        api: source of batches; used on rank 0 only.
        opened: closes what is opened here, in reverse order.
        """
        # 1. Settings and counters, which need no model.
        self.world = world
        self.device = device
        use_memory(device)
        self.config = config
        self.step, self.version = start.step, start.version
        self.partly = False  # the current batch has changed the weights, and is not done
        self.stop = stop
        self.stopping = StopConditions(config, start.progress if start.exact else None)
        self.updates = Updates(start.step, start.version, start.progress)
        # Error that ends this attempt after the current step, which is complete.
        self.failed: TrainerError | None = None
        self.reason = ""  # for an end before the last step
        self.callbacks = Callbacks(callbacks)
        self.history: list[dict[str, Any]] = []
        self.keeps_history = keep_history
        self.objective = Objective(config, own_loss(config, loss_fn, self.device))

        # 2. Records: whatever follows may write them.
        self.telemetry = open_telemetry(config.save_path, config.trainer_rank)
        opened.callback(self.telemetry.close)
        self.tracker = world.first(lambda: Trackers(config, start.step + 1))
        if self.tracker:
            self.telemetry.listener = self.tracker.see
        self.reader = TextReader(config.model_name)

        # 3. The policy.
        self.sync = make_sync(config, device, stop, world)
        opened.callback(self.sync.close)
        self.dealt = self.sync.spread.dealt
        self.model, routers = self._attach(start)
        self.objective.balance_coef = balance_coefficient(self.model, config.router_aux_loss_coef)
        self.threads = use_cores(self.model, config, device, world.size)

        # 4. Optimizer and checkpoints, over the parameters that are trained now.
        # Before the first update: the reference is the policy as it was at the run's start.
        self.reference = self._reference(start) if config.ref_kl_coef else None
        self.stepper = make_stepper(
            self.model, config, self.device, start.path if start.exact else None, world
        )
        self.saver = self._saver(start.step)
        self.sync.arrived = self.record_sync
        self.sync.wait_for_room = lambda folder, words: self.saver.wait_for_room(
            self.step, folder, words
        )

        # 5. Around a step. The batches come last: they talk to the attached servers.
        self.minibatches = Minibatches(
            config,
            self.model,
            self.objective,
            threads=self.threads,
            reference=self.reference,
            world=self.dealt,
        )
        self.mfu = MfuMeter(self.model, self.device, world.size)
        dtype = str(compute_dtype(self.model)).removeprefix("torch.")
        self.gate = AlignmentGate(thresholds(dtype, config.alignment_ok, config.alignment_mismatch))
        self.probe = LogprobProbe(self.sync.engines, config, self._routing_asker(routers))
        opened.callback(self.probe.close)
        self.earlier = EarlierLogprobs()
        self.engine_use = EngineMeter(self.sync.engines)
        self.engine_use.measure()  # sets the zero point of the counters
        self.batches = self._batches(api, start, self._routing_asker(routers), opened)
        self.bench = BenchmarkTotals(config.mode)
        print(f"Ready to train from step {self.step + 1} with weight version {self.version}")
        if speaks_for_node():
            text = f"Ready to train beside rank 0, from rank {world.rank} on"
            print(text, file=sys.__stdout__, flush=True)
        # The trainer on each node is a component with a stage of its own.
        if not world.rank or speaks_for_node():
            reach(ATTACHED)

    def _attach(
        self, start: checkpoint.StartingPoint
    ) -> tuple[torch.nn.Module, RouterShape | None]:
        """Attach the policy and prepare it. Each call takes the model as the one before left it."""
        config = self.config
        # Before the model: a new LoRA adapter is initialised at random, equally on all ranks.
        seed_all(config.seed)
        # While the server starts, for which `attach` waits.
        self.world.first(lambda: read_companions(config.model_name))
        if self.device.type == "cuda":
            with suppress(Exception):  # `prove` meets the same error, and says what it means
                compile_scoring(config, self.device)
        model = self.sync.attach(Start(start.path, start.version))
        # Before the optimizer, which takes the parameters that require a gradient.
        train_only(model, config.train_layer_indices)
        # Packing must not change the logprobs; test it on this very model before training.
        print(f"Verified: packed logprobs equal the model's within {prove(model):.1g} nats")
        use_head(model, config.head_dtype)
        print(f"Attention: {use_attention(model, config.attention_kernel)}")
        routers = replay_in(model) if config.routing_replay else None
        self.world.share(lambda: require_recorded_routing(config, self.sync.engines))
        return model, routers

    def _reference(self, start: checkpoint.StartingPoint) -> Reference:
        origin = start.settings.get("lora_adapter_path", self.config.lora_adapter_path)
        spread = self.sync.spread
        return Reference(
            self.config, self.model, self.device, spread, resumed=start.path, origin=origin
        )

    def _saver(self, step: int) -> Saver:
        return Saver(
            self.config,
            self.model,
            self.stepper,
            self.world,
            saved_step=step,
            stop=self.stop,
            progress=self.progress,
            record=self.record_checkpoint,
            reference=self.reference,
        )

    def _batches(
        self,
        api: RolloutSource,
        start: checkpoint.StartingPoint,
        routing: RoutingAsker | None,
        opened: ExitStack,
    ) -> BatchSource:
        sources: list[Provenance] = (
            [api] if isinstance(api, RecordedRollouts) else [*self.sync.engines]
        )
        record = None
        if self.config.record_rollouts is not None and not self.world.rank:
            recorder = Recorder(self.config.record_rollouts)
            opened.callback(recorder.close)
            sources = [recorder.record_answers_of(source) for source in sources]
            record = recorder.write
        if isinstance(api, RecordedRollouts):
            api.go_on_from(start.progress.get("position"))
        meter = (
            RecordedLags(api)
            if isinstance(api, RecordedRollouts)
            else LagMeter([each.versions for each in sources])
        )
        return BatchSource(
            self.config,
            api,
            self.telemetry,
            selection=self.objective.selection(
                self.model.config.vocab_size, end_tokens(self.model)
            ),
            advantage_std=self.objective.advantage_std,
            lag_meter=meter,
            while_waiting=self.while_waiting,
            missing=MissingAsker([source.logprobs for source in sources]),
            routing=routing,
            record=record,
            baselines=Baselines(start.progress.get("baselines")),
            position=api.position if isinstance(api, RecordedRollouts) else lambda: None,
        )

    def _routing_asker(self, routers: RouterShape | None) -> RoutingAsker | None:
        return (
            None
            if routers is None
            else RoutingAsker([engine.routing for engine in self.sync.engines], routers)
        )

    def to_the_end(self) -> TrainResult:
        """Train to the end or a stop; after a crash, save what is left."""
        try:
            self.tell("on_start", self.config, self.step)
            result = self._train()
            self.tell("on_end", result)
            return result
        # Expected ends: no crash to rescue from. Only wait for a checkpoint that is being written.
        except (Stopped, MismatchError, NonFiniteError, NoUpdateError):
            self.saver.finish(self.step, self.version)
            raise
        except Exception as error:
            if self.world.known(error):
                self.rescue(error)
            else:  # saving is a collective, and a rank is missing
                print(
                    f"The steps after the last checkpoint are lost. "
                    f"{checkpoint.describe_last(self.config)}"
                )
            raise

    def tell(self, method: str, *values: Any) -> None:
        self.world.share(lambda: self.callbacks.tell(method, *values))

    def _train(self) -> TrainResult:
        try:
            # Rank 0 decides, so that all ranks make the same number of steps.
            while self.world.share(lambda: not self.ended() and not self.stop.is_set()):
                try:
                    self.one_step()
                # A dead server can surface as any CUDA or gloo error: find the cause before
                # reporting it.
                except RuntimeError:
                    self.raise_server_end()
                    raise
        except _StopConditionMet:
            return self.finish()
        except RolloutsEnd as end:
            self.reason = str(end)
            return self.finish()
        except Stopped:
            return self.save_at_stop()
        return self.finish() if self.world.share(self.ended) else self.save_at_stop()

    def ended(self) -> bool:
        return self.step >= self.config.training_steps or self.stopping.reason() is not None

    def one_step(self) -> None:
        """Train one batch: one optimizer step, or one for each of its minibatches."""
        began = time.perf_counter()
        batch, lags = self.world.share(lambda: self.batches.next_batch(self.step, self.version))
        step = self.step + 1
        self.probe.learn(batch)
        # Usually a no-op: the probe was started right after the last publish.
        self.probe.start(step, self.version)
        fetched = time.perf_counter()
        objective = self.objective.for_lag(oldest_lag(lags))
        proximal = objective.ratio_base == "proximal"
        parts = self.minibatches.rows(batch.rollouts, step, proximal=proximal)
        # Computes the base of every ratio, so it must happen before weights change.
        rows = next(parts)
        tokens = sum(len(row.tokens) for row in rows) // self.config.context_parallel
        packed = time.perf_counter()
        chosen = sampled(batch.rollouts, self.config.rollout_samples, step)
        samples = Samples(batch.rollouts, chosen, spread_out(batch.rollouts))
        outcomes = [self.accumulate(rows, step, objective, samples)]
        # Before the first write: trainer and server still have the same weights.
        probe_diffs = self.probe.finish(self.model, self.world)
        alignment = self.judge(outcomes[0], probe_diffs, lags, samples)
        for rows in parts:
            self.write_between(outcomes[-1])
            outcomes.append(self.accumulate(rows, step, objective, samples))
        outcome, last = merged(outcomes, self.config.epochs), outcomes[-1]
        summed = time.perf_counter()
        if last.finite:
            self.stepper.compute()
        trained = time.perf_counter()
        sync = self.publish(last)
        self.stopping.saw(float(batch.scores.mean()))
        broken = self.config.stop_on_mismatch and alignment.verdict == "mismatch"
        # Start the next probe now, so that it runs while the trainer waits for rollouts.
        if step < self.config.training_steps and not broken and self.failed is None:
            self.probe.start(step + 1, self.version)
        checkpoint_s = 0.0 if broken else self.saver.save_if_due(self.step, self.version)
        # Only rollouts with a gradient count for MFU: the others pass forward only.
        taught = [r for r in batch.rollouts if self.objective.teaches(r.advantages[r.trained])]
        taught_tokens = sum(int(r.trained.sum()) for r in taught)
        report = StepReport(
            step,
            self.version,
            self.config.objective,
            objective.ratio_base,
            batch,
            outcome,
            lags,
            probe_diffs,
            alignment,
            sync,
            taught_tokens=taught_tokens,
            wait_s=fetched - began,
            train_s=trained - fetched,
            checkpoint_s=checkpoint_s,
            mfu=self.mfu.measure(
                [len(r.tokens) for r in taught] * self.config.epochs,
                taught_tokens * self.config.epochs,
                trained - fetched,
            ),
            engine=self.engine_use.measure(),
            step_s=time.perf_counter() - began,
            ranks=rank_use(self.world, tokens, packed - fetched + trained - summed),
            samples=samples.known(self.world.gather),
        )
        if self.keeps_history:
            self.history.append({"step": step, **step_fields(report)})
        self.world.share(lambda: self.report(report))
        if broken:
            self.failed = MismatchError(
                f"--stop-on-mismatch: {alignment.cause}. The weights of this step are not saved. "
                f"{checkpoint.describe_last(self.config)}"
            )
        # After the report, so that the failing step is recorded too.
        self.world.agree(self.failed)

    def while_waiting(self) -> None:
        self.sync.check()
        if self.stopping.reason() is not None:
            raise _StopConditionMet

    def raise_server_end(self) -> None:
        """Raise `EngineGone` if the server's end explains an error of torch."""
        self.world.check(patience_s=SEEN_S)
        # The process that owned the memory may be gone seconds before the one that the trainer
        # watches.
        until = time.monotonic() + (DYING_S if self.device.type == "cuda" else 0.0)
        self.sync.check()
        while time.monotonic() < until:
            time.sleep(0.1)
            self.sync.check()

    def accumulate(
        self, rows: list[PackedRow], step: int, objective: Objective, samples: Samples
    ) -> StepOutcome:
        return accumulate(
            self.model,
            self.stepper,
            rows,
            objective,
            step,
            world=self.dealt,
            threads=self.threads,
            reference=self.reference,
            seen=samples.take,
        )

    def write_between(self, outcome: StepOutcome) -> None:
        """Write the update of a minibatch that is not the batch's last."""
        if not outcome.finite:
            self.stepper.zero_grad()
            return
        # In single copy the server sees each write at once, so each update is a version of its own:
        # otherwise the policy lag would be wrong. Other servers get the batch as a whole.
        self.stepper.compute()
        self.partly = True
        if self.sync.shares_memory:
            self._publish(self.write_version)
        else:
            self.sync.settle()
            self.stepper.write()

    def publish(self, outcome: StepOutcome) -> SyncReport | None:
        """Write and publish the batch's last update; None if nothing has changed."""
        changes = outcome.finite or self.partly
        self.updates.saw(updated=changes)
        if not outcome.finite:
            self.stepper.zero_grad()
        if not changes:
            self.step += 1
            self.failed = self.updates.too_many_skipped(
                self.version, checkpoint.describe_last(self.config)
            )
            return None
        return self._publish(self.write)

    def _publish(self, write: Callable[[], None]) -> SyncReport:
        """Call `write` and publish the next version; if the server is gone, only call `write`."""
        began, before = time.perf_counter(), self.version
        try:
            if self.failed is not None:
                raise self.failed
            return self.sync.publish(self.version + 1, write)
        except TrainerError as error:
            # A reason: the weights are lost with the server, so there is nothing to complete.
            if self.sync.let_go(self.stepper.copies()):
                raise
            if self.version == before:
                write()  # needs no server: complete the update, so that the batch is not lost
            self.failed, lasted = error, time.perf_counter() - began
            return SyncReport(
                self.config.mode, self.version, lasted, {"server_gone": lasted}, moved=False
            )

    def write(self) -> None:
        self.write_version()
        self.step += 1
        self.partly = False

    def write_version(self) -> None:
        self.stepper.write()
        self.version += 1

    def rescue(self, error: Exception) -> None:
        """Save unsaved steps if the weights are still valid, and print what remains."""
        cause = "the server" if isinstance(error, EngineGone) else "the error"
        try:
            with suppress(TrainerError):
                self.sync.settle()
            with suppress(OSError):  # the step is saved again below
                self.saver.finish(self.step, self.version)
            lost = self.sync.let_go(self.stepper.copies())
            if self.partly and not self.stepper.unwritten:
                # an interrupted minibatch; the batch counts with what it has changed
                self.stepper.zero_grad()
            if not lost and (self.stepper.unwritten or self.partly):
                self.write()
            if not lost and self.step > self.saver.saved_step:
                self.saver.save(self.step, self.version)
        except Exception as another:  # must not hide `error`, which the caller raises
            lost = f"they cannot be saved ({type(another).__name__}: {another})"
        last = checkpoint.describe_last(self.config)
        if lost:
            print(f"The weights of step {self.step} are lost with {cause}: {lost}. {last}")
        else:
            ended = "the end of the server" if isinstance(error, EngineGone) else "the error"
            kept = f"the weights of step {self.step} are intact after {ended}"
            print(f"✓ No step is lost: {kept}. {last}")

    def judge(
        self, outcome: StepOutcome, probe: ProbeDiffs | None, lags: Lags, samples: Samples
    ) -> Alignment:
        """Judge the alignment, before weights change."""
        verdict = self.gate.judge(
            outcome.diffs, probe, lag_max=oldest_lag(lags), version=self.version
        )
        known = [pair for pair in zip(samples.rollouts, lags, strict=True) if pair[0].complete]
        alignment = explain(
            self.world.share(lambda: verdict),
            self.model,
            [rollout for rollout, _ in known],
            self.probe.answers,
            step=self.step + 1,
            lags=[lag for _, lag in known],
            version=self.version,
            earlier=self.earlier,
            world=self.world,
        )
        # Of the rows that have passed: the other minibatches meet newer weights.
        kept = samples.first_logprobs(self.world.gather, TOKENS)
        self.earlier.keep(self.version, samples.rollouts, kept)
        if alignment.verdict != "ok":
            asked = self.probe.asked_at(self.step + 1) if probe is not None else ""
            alignment = replace(alignment, evidence=f"{alignment.evidence}{asked}")
            print(f"LogProb Alignment: {alignment.verdict.upper()} ({alignment.cause})")
        return alignment

    def report(self, report: StepReport) -> None:
        write_records(self.telemetry, report, self.reader)
        print(console_line(report, self.config.training_steps, benchmark=self.config.benchmark))
        self.tracker.log(report.step, tracker_metrics(report))
        self.bench.add(report)
        self.callbacks.tell("on_step", report)

    def save_at_stop(self) -> TrainResult:
        self.sync.settle()
        # In single copy a dead server takes the weights along: check it before saving from its
        # memory.
        self.world.share(self.sync.check)
        self.saver.finish(self.step, self.version)
        path = (
            self.saver.save(self.step, self.version).path
            if self.step > self.saver.saved_step
            else None
        )
        self.world.share(lambda: self.tracker.finish({}))
        print(f"Stopped after step {self.step}. {checkpoint.describe_last(self.config)}")
        return TrainResult(self.step, self.version, False, path, history=self.history)

    def finish(self) -> TrainResult:
        """Save the final model and write the benchmark.

        Raises:
            NoUpdateError: the run, or its last steps, made no update.
        """
        self.sync.settle()
        self.saver.finish(self.step, self.version)
        early = self.step < self.config.training_steps
        reason = (self.reason or self.world.share(self.stopping.reason) or "") if early else ""
        if self.world.share(lambda: self._verdict(reason)):
            if self.version and self.step > self.saver.saved_step:  # keep the earlier updates
                self.saver.save(self.step, self.version)
            self.world.share(lambda: self.tracker.finish({}))
            # Again: the saved checkpoint is now the one that the message names.
            self.world.agree(self.world.share(lambda: self._verdict(reason)))
        final = self.saver.save_final(self.step, self.version)
        self.world.share(self._finished)
        why = f" ({reason})" if reason else ""
        print(f"Training finished: {self.step} steps{why}, final model in {final.path}")
        return TrainResult(self.step, self.version, True, final.path, reason, self.history)

    def _verdict(self, reason: str) -> NoUpdateError | None:
        return self.updates.verdict(
            self.step,
            self.version,
            self.batches.left_out_in_words(),
            reason,
            checkpoint.describe_last(self.config),
        )

    def progress(self) -> dict[str, Any]:
        """Return the state, except weights and optimizer, of a later attempt."""
        return {**self.stopping.state(), **self.updates.state(), **self.batches.state()}

    def _finished(self) -> None:
        fields = self.bench.fields()
        self.telemetry.write(BenchmarkRecord, self.step, **fields)
        self.tracker.finish(fields)
        if self.config.benchmark or RunDir.from_env() is not None:
            print(self.bench.summary())

    def record_sync(self, sync: SyncReport) -> None:
        self.telemetry.write(SyncRecord, self.step, **vars(sync))
        self.bench.add_sync(sync)

    def record_checkpoint(self, saved: checkpoint.Saved, step: int) -> None:
        self.telemetry.write(
            CheckpointRecord, step, path=str(saved.path), seconds=saved.seconds, bytes=saved.bytes
        )
        print(f"Saved {saved.path.name} ({saved.bytes / 1e6:.1f} MB, {saved.seconds:.2f} s)")
        self.callbacks.tell("on_checkpoint", saved)
