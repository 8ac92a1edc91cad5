"""Any environment of atroposlib's as a good citizen of the stack, whoever wrote it.

`hosted(TheirEnv)` is their class, unmodified, with this in front of it: patience while the inference server or run-api
is away, a place at run-api that is given back, SIGTERM as a request to leave, groups and failures counted by reason,
and what it evaluates written to the run. `StackEnv` is the same for environments of ours.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import aiohttp
from atroposlib.envs.base import APIServerConfig, BaseEnv, EvalHandlingEnum
from atroposlib.envs.server_handling.server_baseline import ServerBaseline
from tenacity import RetryError

from atropos_common.group_reasons import FLAT, NONE, REFUSED, SURPLUS, UNANSWERED, UNSENDABLE
from atropos_common.http import DOOR_USER
from atropos_common.run_dir import ENV_DOOR_KEY, ENV_ENGINE_URLS, ENV_REFILL, ENV_SEQUENCES
from atropos_common.stages import REGISTERED, SET_UP, reach
from atropos_envs import Dismissed, EnvFault
from atropos_envs.engine_client import EngineClient, EngineRefused, addresses, begin_group
from atropos_envs.engine_gate import EngineGate
from atropos_envs.evaluation import EvalLog, Tally, component_name, eval_path
from atropos_envs.groups import Unsendable, convert, encoded
from atropos_envs.older_names import load_tool_parser
from atropos_envs.places import Places, Slot
from atropos_envs.registration import Registration
from atropos_envs.worker_meter import WorkerMeter

log = logging.getLogger(__name__)

LEAST_WORKERS = 8
NO_CHOICE = (-1, LEAST_WORKERS)
"""atroposlib's defaults of `max_num_workers` and `max_num_workers_per_node`: eight groups in flight starve a GPU."""
SUMMARY_S = 5.0
"""Between two lines of progress."""
BACKOFF_S, BACKOFF_MOST_S = 0.01, 5.0
"""First and longest wait after a group that failed."""
LOOK_S = 0.02
"""Between two looks whether the trainer took a batch, where the queue is full."""
LOOK_FOR_S = 1.0
"""So long; then the manager's rounds of 0.1 s do."""
LEAST_WEIGHT = 1e-6
_slot: ContextVar[Slot | None] = ContextVar("slot", default=None)
"""The group that the present task makes."""


class DoorUrl(str):
    """An address that carries the run's key where a request's URL is made of it (`f"{url}/info"`), which atroposlib's
    clients send as a password, and nowhere else: what is written to W&B or a log is the address alone."""

    key: str

    @classmethod
    def of(cls, url: str, key: str) -> DoorUrl:
        """`url` with `key`."""
        made = cls(url)
        made.key = key
        return made

    def __format__(self, form: str) -> str:
        scheme, mark, rest = self.partition("://")
        return format(f"{scheme}{mark}{DOOR_USER}:{self.key}@{rest}", form)


def with_door_key(config: Any, server_configs: Any, key: str) -> tuple[Any, Any]:
    """The configurations with the run's key for run-api and for the servers that the plan names."""
    if not key:
        return config, server_configs
    known = {base_url.rstrip("/") for base_url in os.environ.get(ENV_ENGINE_URLS, "").split()}

    def keyed(each: Any) -> Any:
        url = str(getattr(each, "base_url", None) or "").rstrip("/")
        return each.model_copy(update={"api_key": key}) if url in known else each

    several = isinstance(server_configs, list)
    servers = [keyed(each) for each in server_configs] if several else keyed(server_configs)
    url = DoorUrl.of(str(config.rollout_server_url), key)
    return config.model_copy(update={"rollout_server_url": url}), servers


class Hosted(BaseEnv):  # type: ignore[misc]
    """What the stack gives every environment; its own class comes behind this one in the order of resolution."""

    def __init__(self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        config, server_configs = with_door_key(config, server_configs, os.environ.get(ENV_DOOR_KEY, ""))
        try:
            super().__init__(config, server_configs, slurm=slurm, testing=testing)
        except (OSError, ValueError) as error:
            first_line = str(error).strip().split("\n")[0]
            raise EnvFault(
                f"no tokenizer at {config.tokenizer_name!r} or the model's own ({first_line}). "
                "Give --env.tokenizer_name and --openai.model_name a model folder or a hub id",
                exit_code=2,
            ) from error
        if self.config.group_size == 1:
            # A lone score equals itself: BaseEnv would send nothing at all. The trainer compares it with earlier ones.
            self.config.ensure_scores_are_not_same = False
        self.eval_runner: asyncio.Task[None] | None = None
        self.component = component_name(self.name or type(self).__name__)
        self.eval_log = EvalLog(eval_path(self.component, config.data_dir_to_save_evals), self.component)
        self.tally = Tally()
        self.places = Places() if os.environ.get(ENV_REFILL) != "0" and config.min_batch_allocation is None else None
        self._worker_meter = WorkerMeter()
        self._beginning = asyncio.Lock()
        self._coming = 0
        """Groups on their way to run-api."""
        self.num_steps: int | None = None
        self.status_dict: dict[str, Any] = {}
        self._serving = False
        self._stopping = False
        self._dismissed: Dismissed | None = None
        self._fault: EnvFault | None = None
        self._main: asyncio.Task[Any] | None = None
        self._registration = Registration(config.rollout_server_url, self.component)
        self._gate = EngineGate(os.environ.get(ENV_ENGINE_URLS, "").split(), self._registration.http)
        self._asked_before = 0
        self._failed_in_row = 0
        """Groups that failed since the last one that did not."""
        self._awaited: bool | None = None
        self._summary_at = self._began_at = time.monotonic()

    async def env_manager(self) -> None:
        """serve: until total_steps, SIGTERM, or a fault.

        Raises:
            EnvFault: run-api is gone, or the server will never do.
            Dismissed: it was SIGTERM or SIGINT.
        """
        loop = asyncio.get_running_loop()
        self._serving, self._main = True, asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._dismiss, number)
        watchers = [asyncio.create_task(each) for each in (self._watch_queue(), self._gate.watch())]
        self._began_at = time.monotonic()
        try:
            await super().env_manager()
        except asyncio.CancelledError:
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
        """Return the environment's groups. A failure costs one group and is counted by its reason, and so is None; a
        server that refuses every request ends the program."""
        try:
            groups, items = await self._make_groups(item)
        except EngineRefused as error:
            if not self._serving:
                raise
            if error.fatal:
                self._give_up(EnvFault(str(error), exit_code=2))
            self.tally.failed(error)
            await self._back_off()
            return None, []
        except Exception as error:
            if not self._serving:
                raise
            if await self._gate.explains(error):
                return None, [item]  # it comes again when an engine answers
            self.tally.failed(error)
            await self._back_off()
            return None, []
        self._failed_in_row = 0
        if not groups and not items:  # with further items it is a step on the way to a group
            self.tally.leave_out(NONE, "collect_trajectories returned no group")
        return groups, items

    async def _back_off(self) -> None:
        """Wait after a failure, twice as long after each further one in a row: a group that cannot succeed, such as a
        request that the engine refuses, would otherwise be tried a hundred times a second."""
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
            self.tally.failed(error)
            return None
        if groups is None:
            self.tally.leave_out(NONE, "postprocess_histories returned no group")
        return groups

    async def handle_send_to_api(self, scored_data: Any, item: Any = None, *args: Any, **kwargs: Any) -> None:
        """Count what is left out, and give the other groups to BaseEnv, as plain numbers."""
        several = isinstance(scored_data, list)
        made = [(group, self._judge(group)) for group in (scored_data if several else [scored_data])]
        if not await self._has_place([reason for _, reason in made], item):
            return
        if sendable := [group for group, reason in made if reason is None]:
            await super().handle_send_to_api(sendable if several else sendable[0], item, *args, **kwargs)

    def _judge(self, group: Any) -> str | None:
        """Convert a group in place and count it; return the reason why it is not sent, None for one that goes out."""
        try:
            if isinstance(group, dict):
                self._sign(group)
                convert(group)
            return self.tally.group(group, self.config, self.max_token_len)
        except Unsendable as error:
            self.tally.leave_out(UNSENDABLE, str(error), str(error).partition("[")[0])
            return UNSENDABLE

    def _sign(self, group: dict[str, Any]) -> None:
        """Say whose group it is, by which the trainer counts, and how far ahead its environment may be."""
        if isinstance(params := group.get("generation_params") or {}, dict):
            ahead = {"max_batches_offpolicy": self.config.max_batches_offpolicy}
            group["generation_params"] = {"env": self.component} | ahead | params

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        """Send each group by itself: run-api refuses a list as a whole for one group that is malformed. BaseEnv's own
        also takes a refusal for success, and its gzip takes nine times as long as JSON."""
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            group["env_id"] = self._registration.env_id
            self._coming += 1
            try:
                accepted = await self._send(group)
            finally:
                self._coming -= 1
            slot = _slot.get()
            if accepted:
                self.tally.accepted()
                if self.places is not None:
                    self._drop(self.places.sent(slot, 1))
            elif slot is not None:
                slot.made = False  # the next one begins in the manager's rounds, as after a failure

    async def _send(self, group: dict[str, Any]) -> bool:
        """Return whether run-api accepted `group`; count it where it did not."""
        try:
            refused = await self._registration.send(encoded(group))
        except Unsendable as error:
            self.tally.leave_out(UNSENDABLE, str(error))
        except (aiohttp.ClientError, TimeoutError) as error:
            self.tally.leave_out(UNANSWERED, type(error).__name__)
        else:
            if refused is None:
                return True
            self.tally.leave_out(REFUSED, refused.words, refused.kind)
        return False

    # Which of them, and how many at a time

    async def handle_env(self, item_uuid: str) -> Any:
        """One group; the next begins as soon as this one is over, not in the manager's next round."""
        begin_group()
        if self.places is None:
            return await super().handle_env(item_uuid)
        slot, late = self.places.begin(self.running_items[item_uuid]["item"], item_uuid)
        _slot.set(slot)
        self._drop(late)
        try:
            made = await super().handle_env(item_uuid)
        finally:
            self._drop(self.places.end(slot))
        self.workers.discard(asyncio.current_task())
        if slot.made:  # who fails is tried again in the manager's rounds, not as fast as it can fail
            with suppress(Exception):  # of their next item: the manager's next round meets it, too
                await self.add_train_workers()
        return made

    async def _has_place(self, reasons: list[str | None], item: Any) -> bool:
        """Wait for a place where there is something to send; False for a spare group that is not needed."""
        slot = _slot.get()
        if self.places is None or slot is None:
            return True
        slot.made = any(reason in (None, FLAT) for reason in reasons)  # else as after a failure
        self.places.came_out(flat=all(reason == FLAT for reason in reasons))
        useful = reasons.count(None)
        if not useful or await slot.place():
            return True
        self.tally.left_out[SURPLUS] += useful
        self.backlog.append(item)
        return False

    def _drop(self, late: list[Slot]) -> None:
        """End the rollouts of groups that cannot go out any more; their items come again, as those that were made."""
        for slot in late:
            if running := self.running_items.pop(slot.uuid, None):
                running["worker"].cancel()
                self.workers.discard(running["worker"])
                self.backlog.append(slot.item)

    async def add_train_workers(self) -> None:
        """BaseEnv's, with room for spare groups: it bounds the number of workers by the places that it sees free. No
        group begins while no engine answers."""
        if not self._gate.open:
            return
        if self.places is None:
            await super().add_train_workers()
            return
        async with self._beginning:
            if self._stopping:
                return
            status = self.status_dict
            seen, wanted = status["queue_size"], max(self.places.wanted(), len(self.workers))
            status["queue_size"] = self._all_places() - wanted
            try:
                await super().add_train_workers()
            finally:
                status["queue_size"] = seen

    def _all_places(self) -> int:
        return self.config.max_batches_offpolicy * self.derived_batch_size // self.config.group_size

    async def _watch_queue(self) -> None:
        """Begin the next batch's groups as soon as the trainer took one, not in the manager's next round, which is soon
        enough where the trainer takes its time."""
        full_since = time.monotonic()
        while self.places is not None:
            await asyncio.sleep(LOOK_S)
            if not self.places.full:
                full_since = time.monotonic()
            elif time.monotonic() - full_since < LOOK_FOR_S and await self._taken_from():
                with suppress(Exception):  # the manager's next round meets it, too
                    await self.get_status()
                    await self.add_train_workers()

    async def _taken_from(self) -> bool:
        """Whether the trainer took a batch since run-api was looked at."""
        assert self.places is not None
        return await self._registration.current_step() not in (None, self.places.step)

    async def get_status(self) -> None:
        """run-api's view, with groups counted that it received while it answered.

        Without them BaseEnv would start rollouts for places already taken, some would wait in the queue for one batch
        more, and the policy lag would exceed `max_batches_offpolicy`. Beside other environments each has places of its
        own, by its share, so that BaseEnv ends no rollout because others filled the queue.
        """
        sent_before = self.tally.sent
        await super().get_status()
        status, all_places = self.status_dict, self._all_places()
        own = None
        if self.config.min_batch_allocation is None and self.config.max_batches_offpolicy > 0:
            own = await self._registration.places(self.config.max_batches_offpolicy, self.tally.barren)
        alone = status["queue_size"] <= status.get("self_queue_size", 0)
        places, queued = (own.places, own.queued) if own else (all_places, status["queue_size"])
        self._awaited = own.awaited if own else None
        came = self.tally.sent - sent_before
        if self.places is not None:
            late = self.places.looked(
                queued=queued, came=came, coming=self._coming, places=places,
                ahead=self.config.max_batches_offpolicy, step=status["current_step"],
            )  # fmt: skip
            self._drop(late)
        status["queue_size"] = all_places - (places - queued - came)
        if (own or alone) and self.config.batch_size > 0:
            # Our own rollouts in flight have their place already; BaseEnv must not cancel them.
            status["queue_size"] = max(0, min(status["queue_size"], all_places - len(self.workers)))

    async def env_step_checks(self) -> None:
        """BaseEnv's cadence of evaluations, and a line of progress."""
        await super().env_step_checks()
        self._worker_meter.look(len(self.workers), self.places, awaited=self._awaited, in_engine=self._in_engine())
        news = self.tally.news() or self._asked() != self._asked_before
        if self.tally.urgent or (time.monotonic() - self._summary_at > SUMMARY_S and news):
            self._asked_before = self._asked()
            log.info("step %d: %s", self.curr_step, self.tally.line())
            self.eval_log.counted(self.tally, self._adjusted(), self._asked_before, self.curr_step, self._bounds())
            self._summary_at = time.monotonic()

    def _in_engine(self) -> int | None:
        """Completions under way; None with a server class that does not count them."""
        counts = [getattr(server, "under_way", None) for server in self.server.servers]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def _bounds(self) -> dict[str, float]:
        """Workers and queue slots, as fields of an `env_counts` record."""
        slots = {} if self.places is None else {"queue_slots": self.places.all}
        known = {"max_workers": self.max_num_workers, "group_size": self.config.group_size}
        return self._worker_meter.take() | slots | known

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the environment's own evaluation; a failure is counted by its reason."""
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
        """Beside the rollouts, unless an evaluation is under way."""
        if self.eval_runner is None or self.eval_runner.done():
            self.eval_runner = asyncio.create_task(self.evaluate())

    def _asked(self) -> int:
        """Return how many requests went to engines by atroposlib's servers."""
        return sum(getattr(server, "asked", 0) for server in self.server.servers)

    def _adjusted(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for server in self.server.servers:
            total.update(getattr(server, "adjusted", {}))
        return total

    # What is measured

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Every metric that the environment logs passes here, wandb or not: it becomes a record of the run."""
        self.eval_log.measured(wandb_metrics, self.curr_step)
        return dict(await super().create_rollout_table(wandb_metrics))

    async def evaluate_log(self, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """An evaluation's result, named with `eval/` in front or without: a record of the run, and a file where
        `data_dir_to_save_evals` asks for one."""
        named = {f"eval/{name.removeprefix('eval/')}": value for name, value in metrics.items()}
        self.eval_log.measured(named, self.curr_step)
        if self.config.data_dir_to_save_evals is not None:
            await super().evaluate_log(metrics, *args, **kwargs)

    # Registration

    async def setup_wandb(self) -> None:
        """Load the tool parser that `setup` chose, and say that the set-up is over, a stage in `ps` and `why`."""
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
            # run-api divides by the sum of all weights; -1 is atroposlib's word for "no share asked for".
            weight=max(self.config.inference_weight, LEAST_WEIGHT),
            min_batch_allocation=self.config.min_batch_allocation,
            group_size=self.config.group_size,
        )
        self.num_steps = answer["num_steps"] if answer["num_steps"] > 0 else None
        return answer

    async def get_server_info(self) -> None:
        await super().get_server_info()
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

    async def _last_words(self) -> None:
        """What a subclass does between the end of the rollouts and the end of its place at run-api."""

    async def _leave(self) -> None:
        """Free our share of the batch, so that a successor does not compete with our ghost."""
        for task in [*self.workers, *([self.eval_runner] if self.eval_runner else [])]:
            task.cancel()
        await self._last_words()
        await self._registration.disconnect()
        await self._registration.close()
        await self._close_servers()

    async def _close_servers(self) -> None:
        for server in self.server.servers:
            with suppress(AttributeError):  # a server class of their own
                await server.close()


class Foreign(Hosted):
    """In front of a class that nobody here wrote: its servers are the plan's, and its set-up fails in words."""

    servers_asked: int = 1

    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        """Theirs, as a list of one server, so that `--openai.*` and a YAML file's keys reach it whatever it was."""
        config, servers = super().config_init()
        asked = servers if isinstance(servers, list) else [servers]
        cls.servers_asked = max(len(asked), 1)
        first = asked[0] if asked else APIServerConfig()
        if "eval_handling" not in config.model_fields_set:
            # The default, STOP_TRAIN, makes no rollout meanwhile, and begins those that were under way anew.
            config.eval_handling = EvalHandlingEnum.NONE
        known = {name: value for name, value in first.model_dump().items() if name in APIServerConfig.model_fields}
        return config, [APIServerConfig(**known)]

    def __init__(self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        """As many servers as they asked for, each the one that the plan names: some speak to them by number. A server
        class of their own has one for each of the plan's; ours spreads by itself."""
        configs = server_configs if isinstance(server_configs, list) else [server_configs]
        if all(type(each) is ServerBaseline for each in configs) or not configs[0].base_url:
            raise EnvFault("no inference server is given; pass --openai.base_url http://127.0.0.1:PORT/v1", exit_code=2)
        each_of = configs if len(configs) > 1 else configs * self.servers_asked
        if not issubclass(self.server_cls, EngineClient):
            urls = addresses(configs[0].base_url)
            each_of = [one.model_copy(update={"base_url": url}) for url in urls for one in each_of]
        super().__init__(config, [one.model_copy() for one in each_of], slurm=slurm, testing=testing)

    async def get_server_info(self) -> None:
        """After registering: as many groups in flight as the plan has sequences for, where nobody chose a number. What
        `max_batches_offpolicy` allows at a time bounds it further."""
        await super().get_server_info()
        chosen = (self.config.max_num_workers, self.config.max_num_workers_per_node)
        sequences = int(os.environ.get(ENV_SEQUENCES, "0"))
        if chosen == NO_CHOICE and sequences // self.config.group_size > LEAST_WORKERS:
            self.config.max_num_workers = sequences // self.config.group_size
            log.info("up to %d groups in flight", self.config.max_num_workers)

    async def env_step_checks(self) -> None:
        """Every multiple of `steps_per_eval` is evaluated; BaseEnv misses those that pass between two of its looks."""
        every, before, now = self.config.steps_per_eval, self.curr_step, self.status_dict["current_step"]
        await super().env_step_checks()
        if every > 0 and before // every < now // every and before % every <= now % every:
            self._evaluate_soon()

    async def setup(self) -> None:
        """Theirs.

        Raises:
            EnvFault: a package or data set is missing, or a hub is not reached.
        """
        try:
            await super().setup()
        except ImportError as error:
            raise EnvFault(missing_package(error), exit_code=2) from error
        except EnvFault:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip() or 'no words'}".split("\n")[0]
            raise EnvFault(f"the environment's setup failed: {reason}", exit_code=2) from error


def missing_package(error: ImportError) -> str:
    """The way out of an import that failed."""
    package = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package != error.name and package in sys.modules:
        return f"the {package} that is here has no module {error.name!r}: another version is needed, or its submodules"
    if isinstance(error, ModuleNotFoundError) and package:
        return (
            f"the environment needs the Python package {package!r}, which is not installed. Install what its own "
            f"requirements name (perhaps: python -m pip install {package}); if it lies in another "
            'folder than the script, name that folder: PYTHONPATH = "FOLDER" under [env.env]'
        )
    return f"the environment cannot be imported: {error}"


def hosted(env_class: type[BaseEnv]) -> type[BaseEnv]:
    """`env_class` with `Foreign` in front; classes of ours stay as they are."""
    if issubclass(env_class, Hosted):
        return env_class
    own_server = not inspect.isabstract(env_class.server_cls)
    names = {"__module__": env_class.__module__, "__doc__": env_class.__doc__}
    return type(
        env_class.__name__, (Foreign, env_class),
        names | ({} if own_server else {"server_cls": EngineClient}),
    )  # fmt: skip
