"""What an environment of ours adds to a hosted one (`hosted.py`), and the program around it.

An evaluation before the first rollout and after the last, accuracies with the weight version behind them, and faults of
its servers in words. An environment module ends with `run(ItsClass)`; the commands serve, process and evaluate are
atroposlib's own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, ClassVar, NoReturn

import wandb
from atroposlib.envs.base import APIServerConfig, EvalHandlingEnum

from atropos_common.files import read_regular, write_private
from atropos_common.run_dir import RunDir
from atropos_envs import Dismissed, EnvFault
from atropos_envs.engine_client import EngineClient, EngineRefused, EngineUnavailable, Generation
from atropos_envs.evaluation import Graded
from atropos_envs.hosted import Hosted

log = logging.getLogger(__name__)

ONE_OFF_PATIENCE_S = 60.0
"""How long process and evaluate wait for the inference server."""
LEAVE_S = 3.0
"""For the last evaluation on SIGTERM, well inside of the supervisor's grace."""


class StackEnv(Hosted):
    """Base of our environments.

    A subclass gives `eval_questions`, `grade`, `rollout` in the place of `collect_trajectories`, and BaseEnv's `setup`,
    which has to set `items`.
    """

    server_cls = EngineClient
    name = "env"
    evaluates_first: ClassVar[bool] = True
    """No rollout starts before the first evaluation is over, so that it surely sees the untrained weights."""
    evaluates_last: ClassVar[bool] = True
    """Evaluate once more on SIGTERM: for evaluations that take a moment only."""
    env_defaults: ClassVar[dict[str, Any]] = {}
    """Fields of `env_config_cls` that differ from every environment's defaults."""
    server_defaults: ClassVar[dict[str, Any]] = {}
    """Fields of APIServerConfig, likewise."""
    items: Iterator[Any]
    """What is rolled out, one after the other."""

    @classmethod
    def config_init(cls) -> tuple[Any, list[Any]]:
        """Defaults that hold the policy lag at one, without wandb; the server configs are a list."""
        fields: dict[str, Any] = {
            "wandb_name": cls.name,
            "use_wandb": False,
            "group_size": 8,
            "max_batches_offpolicy": 1,
            "max_eval_workers": 64,
            "eval_handling": EvalHandlingEnum.NONE,
            # The trainer ends the run. An environment that counts drained batches would leave first.
            "total_steps": 1_000_000_000,
            "rollout_server_url": "http://127.0.0.1:8000",
        }
        server: dict[str, Any] = {
            "server_type": "vllm",
            "base_url": "http://127.0.0.1:9001/v1",
            "api_key": "local",
            "model_name": "",
        }
        return cls.env_config_cls(**fields | cls.env_defaults), [APIServerConfig(**server | cls.server_defaults)]

    def __init__(self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        _check_servers(server_configs)
        super().__init__(config, server_configs, slurm=slurm, testing=testing)
        self._may_roll = asyncio.Event()
        self._evaluating = asyncio.Lock()
        run = RunDir.from_env()
        self._place = run.bridge / f"env.{self.component}.items" if run is not None else None
        self._taken: int | None = None

    # What a subclass gives

    def eval_questions(self) -> dict[str, Sequence[Any]]:
        """The questions of each split that is evaluated."""
        raise NotImplementedError

    async def grade(self, question: Any, *, wait: bool) -> Graded:
        """Answer one question greedily; with `wait=False` raise EngineUnavailable rather than wait."""
        raise NotImplementedError

    async def rollout(self, item: Any) -> dict[str, Any]:
        """Return one scored group (a ScoredDataGroup). Flat ones are counted and replaced by others."""
        raise NotImplementedError

    # What it may use

    async def get_next_item(self) -> Any:
        """The next of `items`."""
        self._taken = (self._taken or 0) + 1
        return next(self.items)

    async def greedy(self, prompt_ids: list[int], *, wait: bool, **sampling: Any) -> Generation:
        """The likeliest completion."""
        return await self.server.servers[0].generate(prompt_ids, wait=wait, temperature=0.0, **sampling)

    def require_chat_template(self) -> None:
        """Raises EnvFault for a model that cannot chat."""
        if not self.tokenizer.chat_template:
            raise EnvFault(
                f"{self.config.tokenizer_name} has no chat template; use an instruction-tuned model", exit_code=2
            )

    def scored_group(self, nodes: Sequence[Any], scores: list[float], sampling: dict[str, Any]) -> dict[str, Any]:
        """What run-api takes, of the sequences that ManagedServer has noted."""
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": scores,
            "generation_params": sampling | {"env": self.component},
        }

    # The three commands

    async def process_manager(self) -> None:
        """process: write `env.total_steps` groups to a file."""
        await self._one_off(super().process_manager())

    async def _run_evaluate(self) -> None:
        await self._one_off(super()._run_evaluate())

    async def _one_off(self, work: Any) -> None:
        for server in self.server.servers:
            server.patience_s = ONE_OFF_PATIENCE_S
        self._may_roll.set()
        try:
            await work
        except (EngineUnavailable, EngineRefused) as error:
            raise EnvFault(f"{error}. Start the inference server or check --openai.base_url") from None
        finally:
            await self._close_servers()

    # Rollouts

    async def _make_groups(self, item: Any) -> tuple[dict[str, Any], list[Any]]:
        await self._may_roll.wait()
        return await self.rollout(item), []

    async def env_step_checks(self) -> None:
        """The cadence of evaluations, and one more when the trainer has drained its last batch."""
        before, now = self.curr_step, self.status_dict["current_step"]
        await super().env_step_checks()
        if now != before:
            self._note_place()
        if self._evaluates and self.num_steps is not None and before < self.num_steps <= now:
            self._evaluate_soon()

    async def get_server_info(self) -> None:
        """After registering: learn the batch size, then evaluate while BaseEnv waits its five seconds."""
        await super().get_server_info()
        self._go_on()
        if self._evaluates:
            self.eval_runner = asyncio.create_task(self._evaluate_first())
        if not (self._evaluates and self.evaluates_first):
            self._may_roll.set()

    def _go_on(self) -> None:
        """Leave out the items that earlier attempts of this run have rolled out."""
        self._taken = 0
        with suppress(OSError, ValueError):
            self._taken = int(read_regular(self._place)) if self._place is not None else 0
        next(islice(self.items, self._taken, self._taken), None)

    def _note_place(self) -> None:
        """Items in flight, and those to come again, are lost with this process: the next one begins so many before."""
        if self._place is not None and self._taken is not None:
            with suppress(OSError):  # a full disk costs the place, not the environment
                write_private(self._place, str(max(0, self._taken - len(self.workers) - len(self.backlog))))

    # Evaluation

    @property
    def _evaluates(self) -> bool:
        return bool(self.config.steps_per_eval > 0)

    async def _evaluate_first(self) -> None:
        try:
            await self.evaluate()
        finally:
            self._may_roll.set()

    async def _evaluation(self, *args: Any, wait: bool = True, **kwargs: Any) -> None:
        """Answer every split's questions greedily and append one record for each split."""
        async with self._evaluating:
            step = await self._registration.current_step() if self._serving else None
            for split, questions in self.eval_questions().items():
                if not questions:
                    continue
                try:
                    graded = await self._grade_all(questions, wait)
                except (EngineUnavailable, EngineRefused) as error:
                    if not self._serving:
                        raise
                    log.warning("no evaluation of %s: %s", split, error)
                    return
                record = self.eval_log.append(split, graded, step)
                if wandb.run is not None:
                    wandb.log({f"{self.wandb_prepend}_eval/{split}": record.accuracy}, step=self.curr_step)
                version = "" if record.weight_version is None else f" at weight version {record.weight_version}"
                log.info(
                    "%s: %d of %d right (%.2f)%s", split, record.correct, record.questions, record.accuracy, version
                )

    async def _grade_all(self, questions: Sequence[Any], wait: bool) -> list[Graded]:
        places = asyncio.Semaphore(self.config.max_eval_workers)

        async def one(question: Any) -> Graded:
            async with places:
                return await self.grade(question, wait=wait)

        return await asyncio.gather(*(one(question) for question in questions))

    async def _last_words(self) -> None:
        self._note_place()
        if self._stopping and self._fault is None and self._evaluates and self.evaluates_last:
            self._evaluating = asyncio.Lock()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.evaluate(wait=False), LEAVE_S)


def epochs(items: Sequence[Any], rng: random.Random) -> Iterator[Any]:
    """All of `items` in a new order, again and again."""
    while True:
        yield from reversed(rng.sample(items, len(items)))


def _check_servers(server_configs: Any) -> None:
    configs = server_configs if isinstance(server_configs, list) else [server_configs]
    for config in configs:
        if config.server_type != "vllm":
            raise EnvFault(
                f"server_type={config.server_type} returns no logprobs to train on; use --openai.server_type vllm",
                exit_code=2,
            )
        if not getattr(config, "base_url", ""):
            raise EnvFault("which inference server? Give --openai.base_url http://127.0.0.1:PORT/v1", exit_code=2)


def configure_logging() -> None:
    """One line per event. BaseEnv reports its inner state ten times a second at INFO, and at DEBUG once any root
    logger call has installed a handler; here only its warnings pass."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    for name in ("atroposlib", "atroposlib.envs.base", "httpx", "httpx2", "openai", "datasets", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)


def one_off_defaults(arguments: Sequence[str]) -> list[str]:
    """atroposlib turns wandb on for process and evaluate, and process runs for total_steps: without a word from the
    user, no wandb and ten groups."""
    command = arguments[0] if arguments else ""
    if command not in ("process", "evaluate"):
        return list(arguments)
    defaults = {"--env.use_wandb": "false"} | ({"--env.total_steps": "10"} if command == "process" else {})
    given = {argument.split("=")[0] for argument in arguments}
    added = [word for flag, value in defaults.items() if flag not in given for word in (flag, value)]
    return [*arguments, *added]


def run(env_class: type[StackEnv]) -> NoReturn:
    """atroposlib's command line around `env_class`. Exit 0, 1 (a part is gone), 2 (a mistake), 143 (SIGTERM)."""
    configure_logging()
    sys.argv[1:] = one_off_defaults(sys.argv[1:])
    leave(exit_code_of(env_class.cli))


def exit_code_of(work: Callable[[], None], *, causes: bool = False) -> int:
    """Call `work`; how it ended, for the system, and in words where that was a fault.

    Args:
        causes: show the traceback of what a fault came from, in code that nobody here wrote.
    """
    try:
        work()
    except EnvFault as fault:
        log.error("%s", fault)
        if causes and fault.__cause__ is not None and not isinstance(fault.__cause__, ImportError):
            log.info("where it happened:\n%s", "".join(traceback.format_exception(fault.__cause__)))
        return fault.exit_code
    except Dismissed as told:
        return told.exit_code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def leave(code: int) -> NoReturn:
    """Leave at once: taking torch apart, which transformers brings along, costs seconds on a busy machine."""
    if wandb.run is not None:
        wandb.finish()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
