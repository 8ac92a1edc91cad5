"""Behaviour of every environment in the stack, atroposlib's own `BaseEnv` unchanged."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import aiohttp
from atroposlib.envs.base import BaseEnv
from tenacity import RetryError

from atropos_common.protocol.records import (
    CANCELLED,
    FLAT,
    REFUSED,
    RETURNED_NONE,
    SURPLUS,
    UNANSWERED,
    UNSENDABLE,
)
from atropos_common.protocol.stages import REGISTERED, SET_UP, reach
from atropos_common.system.installation import install_stack
from atropos_common.system.run_dir import (
    ENV_BESIDE_TRAINER,
    ENV_ENGINE_URLS,
    ENV_ON_ONE_GPU,
    ENV_REFILL,
    ENV_RUN_KEY,
)
from atropos_envs import Dismissed, EnvFault
from atropos_envs.hosting.concurrency import (
    LOOK_S,
    GroupMeter,
    LoadReader,
    Targets,
    batches_ahead,
    every,
    from_environment,
)
from atropos_envs.hosting.curriculum import curriculum_of, key_of
from atropos_envs.hosting.engine_client import (
    EngineClient,
    EngineGate,
    EngineRefused,
    begin_group,
)
from atropos_envs.hosting.evaluation import EvalLog, Tally, component_name, eval_path
from atropos_envs.hosting.groups import Unsendable, convert, encoded
from atropos_envs.hosting.queue_slots import PendingGroup, QueueSlots, WorkerMeter
from atropos_envs.hosting.registration import Registration
from atropos_envs.hosting.rollout import begin_rollout, present
from atropos_envs.hosting.run_key import with_run_key

log = logging.getLogger(__name__)

SUMMARY_S = 5.0
# First and longest wait after a failed group.
BACKOFF_S, BACKOFF_MOST_S = 0.01, 5.0
# Poll interval for the trainer's next batch while the queue is full, and for how long; later the
# manager's rounds of 0.1 s are enough.
QUEUE_POLL_S, FAST_POLL_S = 0.02, 1.0
LEAST_WEIGHT = 1e-6
PARSER_TRANSLATOR = "atroposlib.envs.server_handling.tool_call_translator"
PARSER_PROTOCOL = "vllm.entrypoints.openai.engine.protocol"
# The group that the present task makes.
_pending: ContextVar[PendingGroup | None] = ContextVar("pending", default=None)


def load_tool_parser(name: str) -> None:
    """Import vLLM's tool parser `name` for atroposlib's ManagedServer.

    Raises:
        EnvFault: the import fails.
    """
    # ManagedServer ignores a failed import, and would train as if the model never called a tool.
    translator = importlib.import_module(PARSER_TRANSLATOR)
    if not translator.VLLM_AVAILABLE:
        raise EnvFault(
            f"tool_parser = {name!r} needs vLLM's tool parsers beside the environment "
            f"({_why_no_parsers()}). Where the environment runs, {install_stack()}; or leave "
            "tool_parser out",
            exit_code=2,
        )
    try:
        translator.ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(sorted(translator.ToolParserManager.list_registered()))
        raise EnvFault(f"vLLM has no tool parser {name!r}. It has: {known}", exit_code=2) from None


def _why_no_parsers() -> str:
    chat = "vllm.entrypoints.openai.chat_completion.protocol"
    for module in (chat, PARSER_PROTOCOL, "vllm.tool_parsers"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return str(error)
    return "vLLM lacks a name that atroposlib imports"


class Hosted(BaseEnv):  # type: ignore[misc]
    """Base in front of the environment's own class, in the method resolution order."""

    def __init__(
        self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False
    ) -> None:
        key = os.environ.get(ENV_RUN_KEY, "")
        config, server_configs = with_run_key(config, server_configs, key)
        try:
            super().__init__(config, server_configs, slurm=slurm, testing=testing)
        except (OSError, ValueError) as error:
            first_line = str(error).strip().split("\n")[0]
            raise EnvFault(
                f"no tokenizer at {config.tokenizer_name!r}, nor at the model ({first_line}). "
                "Give --env.tokenizer_name and --openai.model_name a model folder or a hub id",
                exit_code=2,
            ) from error
        # BaseEnv's own rule would also drop a lone score, and groups with advantages or a teacher
        # of their own, so `why_left_out` decides alone.
        self._drops_flat = self.config.ensure_scores_are_not_same
        self.config.ensure_scores_are_not_same = False
        # Connections, under the component's name.
        self.component = component_name(self.name or type(self).__name__)
        self._registration = Registration(config.rollout_server_url, self.component)
        engines = os.environ.get(ENV_ENGINE_URLS, "").split()
        self._gate = EngineGate(engines, self._registration.http)
        self._loads = LoadReader(engines, self._registration.http)

        # Rollouts and queue. With `min_batch_allocation` atroposlib divides the batch and bounds
        # the workers itself.
        refills = os.environ.get(ENV_REFILL) != "0" and config.min_batch_allocation is None
        self.queue_slots = QueueSlots() if refills else None
        self.concurrency: Targets | None = None
        """Set at the registration, which tells the batch size."""
        self._group_meter = GroupMeter(config.group_size)
        self.num_steps: int | None = None
        self.status_dict: dict[str, Any] = {}
        self._adding_workers = asyncio.Lock()
        # Groups in run-api's queue, and on their way to it.
        self._queued = self._sending = 0
        self._failed_in_row = 0
        """Failed groups since the last success."""
        self._awaited: bool | None = None

        self._curriculum = curriculum_of(self.component, self.config.group_size)
        if self._curriculum:
            # On the instance, in front of the method of every subclass.
            self.__dict__["get_next_item"] = partial(self._curriculum.choose, self.get_next_item)

        # Evaluations and counts.
        self.eval_runner: asyncio.Task[None] | None = None
        eval_file = eval_path(self.component, config.data_dir_to_save_evals)
        self.eval_log = EvalLog(eval_file, self.component)
        self.tally = Tally()
        self._worker_meter = WorkerMeter()
        self._requests_before = 0
        self._summary_at = self._began_at = time.monotonic()

        # The command `serve`, and why it ends.
        self._serving = self._stopping = False
        self._dismissed: Dismissed | None = None
        self._fault: EnvFault | None = None
        self._main: asyncio.Task[Any] | None = None

    async def env_manager(self) -> None:
        """Run the command `serve`: until total_steps, SIGTERM or a fault.

        Raises:
            EnvFault: run-api is gone, or the server refuses every request.
            Dismissed: SIGTERM or SIGINT arrived.
        """
        loop = asyncio.get_running_loop()
        self._serving, self._main = True, asyncio.current_task()
        # BaseEnv handles no signals: the process would die with its share still reserved.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._dismiss, number)
        work = (self._watch_queue(), self._gate.watch(), every(LOOK_S, self._steer))
        watchers = [asyncio.create_task(each) for each in work]
        self._began_at = time.monotonic()
        try:
            await super().env_manager()
        except asyncio.CancelledError:
            # A cancellation that `_stop` did not send belongs to the caller.
            if not self._stopping:
                raise
        except (RetryError, aiohttp.ClientError) as error:
            self._fault = self._fault or EnvFault(self._registration.lost(error))
        finally:
            for watcher in watchers:
                watcher.cancel()
            await self._leave()
        if why := self._fault or self._dismissed:
            raise why

    # Rollouts

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        """Return the environment's groups; count a failure, or None, by its reason."""
        try:
            groups, items = await self._make_groups(item)
        except Exception as error:
            if not self._serving:
                raise
            if isinstance(error, EngineRefused):
                # Every request would be refused, so there is nothing to wait for.
                if error.fatal:
                    self._give_up(EnvFault(str(error), exit_code=2))
            elif await self._gate.explains(error):
                return None, [item]  # the item comes again when an engine answers
            self.tally.failed(error, present().take())
            await self._back_off()
            return None, []
        self._failed_in_row = 0
        if not groups and not items:  # further items: a step towards a group, not a failure
            self._returned_none("collect_trajectories")
        return groups, items

    def _returned_none(self, method: str) -> None:
        reason = FLAT if present().is_flat else RETURNED_NONE
        self.tally.lose(reason, present().take())
        if reason == FLAT:
            # Many environments drop flat groups themselves; these count like those dropped here.
            self.tally.leave_out(FLAT)
            self._count_result([FLAT])
        else:
            self.tally.leave_out(reason, f"{method} returned no group")

    # Without this a group that always fails, such as a refused request, is tried a hundred times a
    # second.
    async def _back_off(self) -> None:
        self._failed_in_row += 1
        await asyncio.sleep(min(BACKOFF_MOST_S, BACKOFF_S * 2 ** min(self._failed_in_row, 20)))

    async def _make_groups(self, item: Any) -> tuple[Any, list[Any]]:
        return await super().collect_trajectories(item)  # type: ignore[no-any-return]

    async def postprocess_histories(self, trajectories: Any) -> Any:
        """Return the environment's own result; count a failure, and None."""
        try:
            groups = await super().postprocess_histories(trajectories)
        except Exception as error:
            if not self._serving:
                raise
            self.tally.failed(error, present().take())
            return None
        if groups is None:
            self._returned_none("postprocess_histories")
        return groups

    async def handle_send_to_api(
        self, scored_data: Any, item: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Count groups that are left out, and pass the others on."""
        several = isinstance(scored_data, list)
        groups = scored_data if several else [scored_data]
        present().divide(groups)
        made = [(group, self._judge(group)) for group in groups]
        for group, reason in made:
            if reason is not None:
                self.tally.lose(reason, present().take(group))
        if not await self._gets_slot([reason for _, reason in made], item):
            return
        if good := [group for group, reason in made if reason is None]:
            sendable = good if several else good[0]
            await super().handle_send_to_api(sendable, item, *args, **kwargs)

    def _judge(self, group: Any) -> str | None:
        try:
            if isinstance(group, dict):
                # The trainer counts by the environment's name and applies its lag bound.
                if isinstance(params := group.get("generation_params") or {}, dict):
                    # A constant, while `max_batches_offpolicy` follows the groups in flight.
                    steered = self.concurrency
                    ahead = steered.ahead if steered else self.config.max_batches_offpolicy
                    signed = {"env": self.component, "max_batches_offpolicy": ahead}
                    group["generation_params"] = signed | params
                convert(group)
            return self.tally.group(
                group, self.config.group_size, self.max_token_len, drops_flat=self._drops_flat
            )
        except Unsendable as error:
            self.tally.leave_out(UNSENDABLE, str(error), str(error).partition("[")[0])
            return UNSENDABLE

    # In place of BaseEnv's method, which takes a refusal for success, and whose gzip takes nine
    # times as long as JSON. One request for each group: run-api refuses a whole list for one
    # malformed group.
    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            group["env_id"] = self._registration.env_id
            self._sending += 1
            try:
                reason = await self._send(group)
            finally:
                self._sending -= 1
            pending = _pending.get()
            tokens = present().take(group)
            if reason is None:
                self.tally.accepted(group, tokens)
                if self.queue_slots is not None:
                    self._drop(self.queue_slots.sent(pending, 1))
                continue
            self.tally.lose(reason, tokens)
            if pending is not None:
                # The manager's next round starts another group, as after a failure.
                pending.made = False

    async def _send(self, group: dict[str, Any]) -> str | None:
        """Return why the group did not arrive, None if run-api accepted it."""
        try:
            refused = await self._registration.send(encoded(group))
        except Unsendable as error:
            self.tally.leave_out(UNSENDABLE, str(error))
            return UNSENDABLE
        except (aiohttp.ClientError, TimeoutError) as error:
            self.tally.leave_out(UNANSWERED, type(error).__name__)
            return UNANSWERED
        if refused is None:
            return None
        self.tally.leave_out(REFUSED, refused.words, refused.kind)
        return REFUSED

    # Start and order of groups

    async def handle_env(self, item_uuid: str) -> Any:
        """Make one group, and start the next one at its end."""
        begin_group()
        rollout = begin_rollout()
        # Before the rollout, which may change the item.
        key = key_of(self.running_items[item_uuid]["item"]) if self._curriculum else None
        try:
            return await self._handle_group(item_uuid)
        except asyncio.CancelledError:
            self.tally.lose(CANCELLED, rollout.take())
            raise
        finally:
            if self._curriculum:
                self._curriculum.learn(key, rollout.scores)

    async def _handle_group(self, item_uuid: str) -> Any:
        if self.queue_slots is None:
            return await super().handle_env(item_uuid)
        pending, late = self.queue_slots.begin(self.running_items[item_uuid]["item"], item_uuid)
        _pending.set(pending)
        self._drop(late)
        try:
            made = await super().handle_env(item_uuid)
        finally:
            self._drop(self.queue_slots.end(pending))
        self.workers.discard(asyncio.current_task())
        # After a failure the manager's next round starts another group: a loop of failures would
        # keep a core busy.
        if pending.made:
            # `get_next_item` may raise; the manager's next round meets and reports the same error.
            with suppress(Exception):
                await self.add_train_workers()
        return made

    async def _gets_slot(self, reasons: list[str | None], item: Any) -> bool:
        """Return True with a queue slot, False for a spare group that is not needed."""
        pending = _pending.get()
        if self.queue_slots is None or pending is None:
            return True
        self._count_result(reasons)
        useful = reasons.count(None)
        try:
            if not useful or await pending.wait_for_slot():
                return True
        except asyncio.CancelledError:
            self.backlog.append(item)
            raise
        self.tally.left_out[SURPLUS] += useful
        self.tally.lose(SURPLUS, present().take())
        self.backlog.append(item)
        return False

    def _count_result(self, reasons: list[str | None]) -> None:
        pending = _pending.get()
        if self.queue_slots is not None and pending is not None and reasons:
            useful = reasons.count(None)
            flat = not useful and FLAT in reasons
            self._drop(self.queue_slots.finish(pending, useful=useful, flat=flat))

    def _drop(self, late: list[PendingGroup]) -> None:
        """Cancel the rollouts of late groups; their items come again."""
        for pending in late:
            if running := self.running_items.pop(pending.uuid, None):
                running["worker"].cancel()
                self.workers.discard(running["worker"])
                self.backlog.append(pending.item)

    async def add_train_workers(self) -> None:
        """Start groups as BaseEnv does, spare groups too."""
        if not self._gate.open:
            return
        if self.queue_slots is None:
            await super().add_train_workers()
            return
        async with self._adding_workers:
            if self._stopping:
                return
            status = self.status_dict
            most = None
            if self.concurrency is not None:
                most = self._group_meter.groups(self.concurrency.target)
                most = round(most * self.queue_slots.demand)
                # BaseEnv cancels rollouts above this limit; a lower target only starts no more.
                waiting = self.queue_slots.waiting
                self.max_num_workers = max(most + waiting, len(self.workers))
            wanted = max(self.queue_slots.wanted(most), len(self.workers))
            seen = status["queue_size"]
            # BaseEnv starts workers up to the slots that it computes from `queue_size`; pretend a
            # size for which that is `wanted`.
            status["queue_size"] = self._all_slots() - wanted
            try:
                await super().add_train_workers()
            finally:
                # Other users of the status need the real size.
                status["queue_size"] = seen

    def _all_slots(self) -> int:
        return self.config.max_batches_offpolicy * self.derived_batch_size // self.config.group_size

    async def _steer(self) -> None:
        """Move the number of sequences in flight, and the queue slots for them."""
        if self.concurrency is None or self.queue_slots is None:
            return
        loads = await self._loads.read()
        if loads:
            # The engine knows which completions of a group have ended.
            own = {root: float(load.running + load.waiting) for root, load in loads.items()}
            clients = [each for each in self.server.servers if isinstance(each, EngineClient)]
            if self.concurrency.share != 1.0 and clients:
                counts = sum((client.under_way_at for client in clients), Counter())
                own = {root: float(counts[root]) for root in loads}
            self._group_meter.add(sum(own.values()), self.queue_slots.making)
            self.concurrency.look(loads, own, time.monotonic())
            for client in clients:
                client.weigh(self.concurrency.targets)
        elif self._loads.has_no_route:
            self.concurrency.without_load(self.config.batch_size)
        batch = self.derived_batch_size // self.config.group_size
        waiting = self._queued / max(1, batch)
        self.concurrency.look_at_queue(waiting, self.queue_slots.step, time.monotonic())
        groups = self._group_meter.groups(self.concurrency.target)
        ahead = batches_ahead(groups, batch, self.concurrency.ahead)
        self.config.max_batches_offpolicy = ahead
        # The manager's next round meets and reports the same error.
        with suppress(Exception):
            await self.add_train_workers()

    def _in_engine(self) -> float | None:
        # Server classes of other authors have no such counts.
        servers = self.server.servers
        known = [server.under_way for server in servers if hasattr(server, "under_way")]
        return float(sum(known)) if known else None

    async def _watch_queue(self) -> None:
        """Start the next batch's groups as soon as the trainer takes a batch."""
        full_since = time.monotonic()
        while self.queue_slots is not None:
            await asyncio.sleep(QUEUE_POLL_S)
            if not self.queue_slots.full:
                full_since = time.monotonic()
            elif time.monotonic() - full_since < FAST_POLL_S:
                step = await self._registration.current_step()
                if step in (None, self.queue_slots.step):
                    continue
                # The manager's next round meets and reports the same error.
                with suppress(Exception):
                    await self.get_status()
                    await self.add_train_workers()

    async def get_status(self) -> None:
        """Read run-api's status, and add the groups that arrived while it answered."""
        # Groups that arrive between the request and the answer may or may not be in `queue_size`.
        # If they were missed, BaseEnv would start rollouts for used slots, some groups would wait a
        # batch longer, and the policy lag would exceed `max_batches_offpolicy`.
        sent_before = self.tally.sent
        await super().get_status()
        status, all_slots = self.status_dict, self._all_slots()
        self._queued = status["queue_size"]
        own, ahead = None, self.config.max_batches_offpolicy
        if self.config.min_batch_allocation is None and ahead > 0:
            # Each of several environments has slots by its share. BaseEnv would cancel its rollouts
            # because others filled the queue.
            own = await self._registration.places(ahead, self.tally.barren)
        # No group of another environment is in the queue.
        alone = status["queue_size"] <= status.get("self_queue_size", 0)
        places, queued = (own.places, own.queued) if own else (all_slots, status["queue_size"])
        self._awaited = own.awaited if own else None
        came = self.tally.sent - sent_before
        if self.queue_slots is not None:
            late = self.queue_slots.update(
                queued=queued,
                came=came,
                coming=self._sending,
                places=places,
                ahead=ahead,
                step=status["current_step"],
            )
            self._drop(late)
        status["queue_size"] = all_slots - (places - queued - came)
        if (own or alone) and self.config.batch_size > 0:
            # Rollouts in flight have their slots already; BaseEnv must not cancel them.
            status["queue_size"] = max(0, min(status["queue_size"], all_slots - len(self.workers)))

    async def env_step_checks(self) -> None:
        """Evaluate at every multiple of `steps_per_eval`, and write a progress line."""
        every, before = self.config.steps_per_eval, self.curr_step
        now = self.status_dict["current_step"]
        await super().env_step_checks()
        # BaseEnv misses a multiple that passes between two of its checks, and each one of 1.
        if every > 0 and before // every < now // every and before % every <= now % every:
            self._evaluate_soon()
        self._worker_meter.add(
            len(self.workers),
            self.queue_slots,
            awaited=self._awaited,
            in_engine=self._in_engine(),
        )
        if self.tally.urgent or time.monotonic() - self._summary_at > SUMMARY_S:
            self._write_counts()

    def _write_counts(self) -> None:
        """Write a progress line and an `env_counts` record, if anything is new."""
        servers = self.server.servers
        requests = sum(getattr(server, "asked", 0) for server in servers)
        if not (self.tally.urgent or self.tally.news() or requests != self._requests_before):
            return
        self._requests_before, self._summary_at = requests, time.monotonic()
        log.info("step %d: %s", self.curr_step, self.tally.line())
        adjusted: Counter[str] = Counter()
        for server in servers:
            adjusted.update(getattr(server, "adjusted", {}))
        curriculum = self._curriculum.record() if self._curriculum else None
        self.eval_log.counted(
            self.tally, adjusted, requests, self.curr_step, self._bounds(), curriculum
        )

    # Workers and queue slots, as fields of an `env_counts` record.
    def _bounds(self) -> dict[str, Any]:
        slots = {} if self.queue_slots is None else {"queue_slots": self.queue_slots.all}
        known: dict[str, Any] = {
            "max_workers": self.max_num_workers,
            "group_size": self.config.group_size,
        }
        if steered := self.concurrency:
            known |= {
                "target_sequences": steered.target,
                "knee_sequences": steered.knee,
                "concurrency": steered.phase,
                "batches_ahead": steered.ahead,
            }
        return self._worker_meter.take() | slots | known

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the environment's own evaluation; count a failure by its reason."""
        try:
            result = await self._evaluation(*args, **kwargs)
        except Exception as error:
            if not self._serving:
                raise
            self.tally.evaluated(error)
            return None
        self.tally.evaluated(None)
        return result

    async def _evaluation(self, *args: Any, **kwargs: Any) -> Any:
        own = super().evaluate
        return None if getattr(own, "__isabstractmethod__", False) else await own(*args, **kwargs)

    def _evaluate_soon(self) -> None:
        if self.eval_runner is None or self.eval_runner.done():
            self.eval_runner = asyncio.create_task(self.evaluate())

    # Metrics

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Record every metric that the environment logs."""
        # BaseEnv calls this with or without wandb.
        self.eval_log.measured(wandb_metrics, self.curr_step)
        return dict(await super().create_rollout_table(wandb_metrics))

    async def evaluate_log(self, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Record an evaluation's result."""
        named = {f"eval/{name.removeprefix('eval/')}": value for name, value in metrics.items()}
        self.eval_log.measured(named, self.curr_step)
        if self.config.data_dir_to_save_evals is not None:
            await super().evaluate_log(metrics, *args, **kwargs)

    # Registration

    async def setup_wandb(self) -> None:
        """Load the tool parser that `setup` chose, and report the next stage."""
        # BaseEnv calls this right after `setup`, so it is the earliest point with that choice.
        if name := getattr(self.server, "tool_parser", None):
            log.info("importing vLLM for its tool parser %r", name)
            await asyncio.to_thread(load_tool_parser, name)
        log.info("set up after %.1f s", time.monotonic() - self._began_at)
        reach(SET_UP)
        await super().setup_wandb()

    async def _register_env(self) -> dict[str, Any]:
        answer = await self._registration.register(
            max_token_length=self.config.max_token_length,
            desired_name=self.config.wandb_name,
            # run-api divides by the sum of all weights, and -1 means "no share" in atroposlib.
            weight=max(self.config.inference_weight, LEAST_WEIGHT),
            min_batch_allocation=self.config.min_batch_allocation,
            group_size=self.config.group_size,
        )
        self.num_steps = answer["num_steps"] if answer["num_steps"] > 0 else None
        return answer

    async def get_server_info(self) -> None:
        await super().get_server_info()
        if self.queue_slots is not None:
            whole = from_environment(os.environ, max(1, self.config.batch_size))
            beside = os.environ.get(ENV_BESIDE_TRAINER, "").split()
            on_one_gpu = [each.split(",") for each in os.environ.get(ENV_ON_ONE_GPU, "").split()]
            # Without an engine's address there is no curve; the worker settings decide.
            if whole is not None and self._loads.roots:
                self.concurrency = Targets(whole, self._loads.roots, beside, on_one_gpu)
        reach(REGISTERED)
        log.info("registered as environment %d at step %d", self.env_id, self.curr_step)

    # Leaving

    def _stop(self) -> None:
        if not self._stopping and self._main is not None:
            self._stopping = True
            self._main.cancel()

    def _dismiss(self, number: int) -> None:
        self._dismissed = Dismissed(number)
        self._stop()

    def _give_up(self, fault: EnvFault) -> None:
        self._fault = self._fault or fault
        self._stop()

    async def _before_disconnect(self) -> None:
        """Hook between the last rollout and the end of the registration."""

    async def _leave(self) -> None:
        # Rollouts that the end cancels are not counted.
        self._write_counts()
        # Before the hook: an evaluation in it needs the engine for itself.
        for task in [*self.workers, *([self.eval_runner] if self.eval_runner else [])]:
            task.cancel()
        if self._curriculum:
            self._curriculum.save()
        await self._before_disconnect()
        # Free our share of the batch, so that it does not compete with the next process.
        await self._registration.disconnect()
        await self._registration.close()
        await self._close_servers()

    async def _close_servers(self) -> None:
        for server in self.server.servers:
            with suppress(AttributeError):  # the environment's own server class
                await server.close()
