"""Base class of our own environments, and the program around them."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, ClassVar, NoReturn

import wandb
from atroposlib.envs.base import APIServerConfig, EvalHandlingEnum

from atropos_common.system.files import read_regular, write_private
from atropos_common.system.leaving import exit_now
from atropos_common.system.run_dir import RunDir
from atropos_envs import Dismissed, EnvFault
from atropos_envs.hosting.engine_client import (
    NO_SERVER,
    EngineClient,
    EngineRefused,
    EngineUnavailable,
    Generation,
)
from atropos_envs.hosting.evaluation import Graded
from atropos_envs.hosting.hosted import Hosted

log = logging.getLogger(__name__)

# Seconds that process and evaluate wait for the inference server.
ONE_OFF_PATIENCE_S = 60.0
# Seconds of the last evaluation after SIGTERM, well below the supervisor's grace period.
LAST_EVALUATION_S = 3.0


class StackEnv(Hosted):
    """Base of our environments.

    A subclass defines `eval_questions`, `grade`, `rollout`, and a `setup` that sets `items`.
    """

    server_cls = EngineClient
    name = "env"
    evaluates_first: ClassVar[bool] = True
    """Start no rollout before the first evaluation, which measures the untrained weights."""
    evaluates_last: ClassVar[bool] = True
    """Evaluate once more on SIGTERM, within a few seconds."""
    env_defaults: ClassVar[dict[str, Any]] = {}
    """Overrides of `env_config_cls`."""
    server_defaults: ClassVar[dict[str, Any]] = {}
    """Overrides of APIServerConfig."""
    items: Iterator[Any]
    """Endless stream of items to roll out."""

    @classmethod
    def config_init(cls) -> tuple[Any, list[Any]]:
        fields: dict[str, Any] = {
            "wandb_name": cls.name,
            "use_wandb": False,
            "group_size": 8,
            "max_batches_offpolicy": 1,
            "max_eval_workers": 64,
            "eval_handling": EvalHandlingEnum.NONE,
            # The trainer ends the run. An environment that counts batches would exit before it.
            "total_steps": 1_000_000_000,
            "rollout_server_url": "http://127.0.0.1:8000",
        }
        server: dict[str, Any] = {
            "server_type": "vllm",
            "base_url": "http://127.0.0.1:9001/v1",
            "api_key": "local",
            "model_name": "",
        }
        return cls.env_config_cls(**fields | cls.env_defaults), [
            APIServerConfig(**server | cls.server_defaults)
        ]

    def __init__(
        self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False
    ) -> None:
        # Before BaseEnv, which loads the tokenizer first.
        _check_servers(server_configs)
        super().__init__(config, server_configs, slurm=slurm, testing=testing)
        self._may_roll = asyncio.Event()
        self._evaluating = asyncio.Lock()
        self._evaluated: dict[str, tuple[int, int, list[Any]]] = {}
        """Step, weight version and questions of each split's newest evaluation in a run."""
        run = RunDir.from_env()
        # Outside of a run nothing is saved: every start begins with the first item.
        self._position_file = run.bridge / f"env.{self.component}.items" if run else None
        self._taken: int | None = None

    # To be defined by a subclass

    def eval_questions(self) -> dict[str, Sequence[Any]]:
        """Return the questions of each split."""
        raise NotImplementedError

    async def grade(self, question: Any, *, wait: bool) -> Graded:
        """Answer one question greedily.

        With `wait=False` raise EngineUnavailable at once if no engine answers.
        """
        raise NotImplementedError

    async def rollout(self, item: Any) -> dict[str, Any]:
        """Return one scored group (a ScoredDataGroup)."""
        raise NotImplementedError

    # For use by a subclass

    async def get_next_item(self) -> Any:
        self._taken = (self._taken or 0) + 1
        return next(self.items)

    async def greedy(self, prompt_ids: list[int], *, wait: bool, **sampling: Any) -> Generation:
        return await self.server.servers[0].generate(
            prompt_ids, wait=wait, temperature=0.0, **sampling
        )

    def require_chat_template(self) -> None:
        if not self.tokenizer.chat_template:
            model = self.config.tokenizer_name
            fault = f"{model} has no chat template; use an instruction-tuned model"
            raise EnvFault(fault, exit_code=2)

    def scored_group(
        self, nodes: Sequence[Any], scores: list[float], sampling: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the group in run-api's form."""
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": scores,
            "generation_params": sampling | {"env": self.component},
        }

    # The three commands

    async def process_manager(self) -> None:
        """Run the command `process`: write `env.total_steps` groups to a file."""
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
            fix = "Start the inference server or check --openai.base_url"
            raise EnvFault(f"{error}. {fix}") from None
        finally:
            await self._close_servers()

    # Rollouts

    async def _make_groups(self, item: Any) -> tuple[Any, list[Any]]:
        await self._may_roll.wait()
        return await self.rollout(item), []

    async def env_step_checks(self) -> None:
        before, now = self.curr_step, self.status_dict["current_step"]
        await super().env_step_checks()
        if now != before:
            self._save_position()
        # `current_step` can jump over `num_steps`, so test if it has passed it.
        if self._evaluates and self.num_steps is not None and before < self.num_steps <= now:
            self._evaluate_soon()

    async def get_server_info(self) -> None:
        """Register, then start the first evaluation."""
        await super().get_server_info()
        self._skip_done()
        if self._evaluates:
            self.eval_runner = asyncio.create_task(self._evaluate_first())
        if not (self._evaluates and self.evaluates_first):
            self._may_roll.set()

    # Earlier attempts of this run have rolled these items out.
    def _skip_done(self) -> None:
        self._taken = 0
        with suppress(OSError, ValueError):
            self._taken = int(read_regular(self._position_file)) if self._position_file else 0
        next(islice(self.items, self._taken, self._taken), None)

    def _save_position(self) -> None:
        # Items in flight and in the backlog are lost with this process, so the next attempt repeats
        # them.
        if self._position_file is not None and self._taken is not None:
            done = max(0, self._taken - len(self.workers) - len(self.backlog))
            with suppress(OSError):  # a full disk costs the position, not the environment
                write_private(self._position_file, str(done))

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
        """Append one record for each split."""
        async with self._evaluating:
            # Read the step first: a batch that the trainer fetches meanwhile would raise it.
            step = await self._registration.current_step() if self._serving else None
            for split, questions in self.eval_questions().items():
                if not questions:
                    continue
                try:
                    if await self._is_known(split, questions, step, wait):
                        continue
                    graded = await self._grade_all(questions, wait)
                except (EngineUnavailable, EngineRefused) as error:
                    if not self._serving:
                        raise
                    # An unreachable server is logged; it does not count as a failed evaluation.
                    log.warning("no evaluation of %s: %s", split, error)
                    return
                done = self.eval_log.append(split, graded, step)
                self._remember(split, questions, graded, step)
                if wandb.run is not None:
                    name = f"{self.wandb_prepend}_eval/{split}"
                    wandb.log({name: done.accuracy}, step=self.curr_step)
                right = f"{done.correct} of {done.questions} right ({done.accuracy:.2f})"
                version = done.weight_version
                at = "" if version is None else f" at weight version {version}"
                log.info("%s: %s%s", split, right, at)

    def _remember(
        self, split: str, questions: Sequence[Any], graded: Sequence[Graded], step: int | None
    ) -> None:
        self._evaluated.pop(split, None)
        versions = {each.weight_version for each in graded}
        version = versions.pop()
        # Answers of two versions are no evaluation of the newer one.
        if step is not None and version is not None and not versions:
            self._evaluated[split] = (step, version, list(questions))

    async def _is_known(
        self, split: str, questions: Sequence[Any], step: int | None, wait: bool
    ) -> bool:
        """True if the engine's present weights have answered these questions already.

        The last evaluation would otherwise repeat the one that follows the last step.
        """
        known = self._evaluated.get(split)
        if known is None or known[0] != step or known[2] != list(questions):
            return False
        # Within a step the version changes once; one answer tells which the engine has.
        first = await self.grade(questions[0], wait=wait)
        if first.weight_version != known[1]:
            return False
        log.info("%s: evaluated at weight version %d before", split, known[1])
        return True

    async def _grade_all(self, questions: Sequence[Any], wait: bool) -> list[Graded]:
        # The engine serves rollouts at the same time; a whole test split at once would fill its
        # queue.
        slots = asyncio.Semaphore(self.config.max_eval_workers)

        async def one(question: Any) -> Graded:
            async with slots:
                return await self.grade(question, wait=wait)

        return await asyncio.gather(*(one(question) for question in questions))

    async def _before_disconnect(self) -> None:
        self._save_position()
        if self._stopping and self._fault is None and self._evaluates and self.evaluates_last:
            # The evaluation that held the old lock is cancelled.
            self._evaluating = asyncio.Lock()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.evaluate(wait=False), LAST_EVALUATION_S)


def epochs(items: Sequence[Any], rng: random.Random) -> Iterator[Any]:
    """Yield all of `items` in a new order, again and again."""
    while True:
        yield from reversed(rng.sample(items, len(items)))


def _check_servers(server_configs: Any) -> None:
    configs = server_configs if isinstance(server_configs, list) else [server_configs]
    for config in configs:
        if config.server_type != "vllm":
            fault = f"server_type={config.server_type} returns no logprobs to train on"
            raise EnvFault(f"{fault}; use --openai.server_type vllm", exit_code=2)
        if not getattr(config, "base_url", ""):
            raise EnvFault(NO_SERVER, exit_code=2)


def configure_logging() -> None:
    """Log one line per event, and only warnings of libraries."""
    layout = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=layout, force=True)
    # BaseEnv logs its state ten times a second at INFO. Its module sets its own level as soon as
    # the root logger has a handler, so the list names the module too.
    libraries = "atroposlib", "atroposlib.envs.base", "httpx", "httpx2", "openai", "datasets"
    for name in (*libraries, "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)


def one_off_defaults(arguments: Sequence[str]) -> list[str]:
    """Add defaults to the commands process and evaluate."""
    added = list(arguments)
    command = arguments[0] if arguments else ""
    given = {argument.split("=")[0] for argument in arguments}
    # atroposlib would enable wandb, and process would run for all `total_steps`.
    if command in ("process", "evaluate") and "--env.use_wandb" not in given:
        added += ["--env.use_wandb", "false"]
    if command == "process" and "--env.total_steps" not in given:
        added += ["--env.total_steps", "10"]
    return added


def run(env_class: type[StackEnv]) -> NoReturn:
    """Run atroposlib's command line for `env_class`.

    Exit status: 0 done; 1 another component is gone; 2 wrong settings; 143 SIGTERM.
    """
    configure_logging()
    sys.argv[1:] = one_off_defaults(sys.argv[1:])
    leave(exit_code_of(env_class.cli))


def exit_code_of(work: Callable[[], None], *, causes: bool = False) -> int:
    """Call `work` and return its exit status; log a fault as one message.

    Args:
        causes: also log the traceback of a fault's cause.
    """
    try:
        work()
    except EnvFault as fault:
        log.error("%s", fault)
        if causes and fault.__cause__ is not None and not isinstance(fault.__cause__, ImportError):
            log.info("traceback:\n%s", "".join(traceback.format_exception(fault.__cause__)))
        return fault.exit_code
    except Dismissed as dismissed:
        return dismissed.exit_code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def leave(code: int) -> NoReturn:
    """Exit without the interpreter's shutdown, and only with the ends that this process needs."""
    if wandb.run is not None:
        wandb.finish()
    logging.shutdown()
    exit_now(code)
