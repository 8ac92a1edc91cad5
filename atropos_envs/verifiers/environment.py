"""`VerifiersEnv`: an environment of verifiers behind atroposlib's `BaseEnv`."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import AsyncExitStack
from typing import Any, ClassVar

import verifiers.v1 as vf
from atroposlib.envs.base import BaseEnvConfig
from pydantic import Field
from renderers.base import MODEL_RENDERER_MAP
from renderers.configs import CustomRendererConfig, config_from_name

from atropos_envs import EnvFault
from atropos_envs.hosting.base import StackEnv, epochs
from atropos_envs.hosting.engine_client import EngineRefused, EngineUnavailable
from atropos_envs.hosting.evaluation import Graded
from atropos_envs.recording.groups import GroupMaker
from atropos_envs.recording.sequences import Sequence
from atropos_envs.verifiers.endpoint import Endpoint, Recorded
from atropos_envs.verifiers.loading import (
    divide,
    load,
    own_evaluation,
    split_arguments,
    take,
    tasks_of,
)
from atropos_envs.verifiers.renderer import HERMES
from atropos_envs.verifiers.sequences import (
    RolloutFailed,
    branches_of,
    check_trace,
    measured,
)
from atropos_envs.verifiers.tool_servers import ForkServer, fork_tool_servers

log = logging.getLogger(__name__)

HELD_OUT = "held_out"
KEY_VARIABLE = "ATROPOS_VERIFIERS_KEY"
RENDERER = "atropos_envs.verifiers.renderer.TemplateRenderer"


class VerifiersConfig(BaseEnvConfig):  # type: ignore[misc]
    """BaseEnv's fields and ours; on the command line `--env.NAME`."""

    verifiers: str = Field("", description="Id of an installed environment, or a folder or file")
    arguments: str = Field("{}", description="The environment's settings, as JSON: dotted keys")
    seed: int = Field(0, description="Order of the tasks, and choice of those held out")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature of rollouts")
    max_tokens: int | None = Field(None, ge=1, description="Tokens of one answer, at most")
    eval_size: int = Field(64, ge=0, description="Tasks of an evaluation; 0: no evaluation")
    pass_reward: float = Field(1.0, description="Least reward of a right answer in an evaluation")
    renderer: str = Field("", description="Renderer of the package renderers, such as qwen3")
    tool_parser: str = Field(HERMES, description="Parser of tool calls in the chat template's form")


class VerifiersEnv(StackEnv):
    """Environment whose rollouts verifiers plays and scores."""

    name = "verifiers"
    env_config_cls = VerifiersConfig
    evaluates_first = False
    evaluates_last = False
    env_defaults: ClassVar[dict[str, Any]] = {
        "batch_size": 64,
        "max_num_workers": 64,
        "steps_per_eval": 50,
        "max_token_length": 2048,
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._resources = AsyncExitStack()
        self._numbers: defaultdict[str, list[float]] = defaultdict(list)
        self._graded: defaultdict[str, list[float]] = defaultdict(list)
        self._held_out: list[Any] = []
        self._tasks: list[Any] = []
        self._maker = GroupMaker(self.config.group_size)

    async def setup(self) -> None:
        """Load the environment and its tasks, and serve what its rollouts need.

        Raises:
            EnvFault: the environment does not exist, or its own code fails.
        """
        self.require_chat_template()
        arguments, changed = split_arguments(json.loads(self.config.arguments))
        self._env = load(self.config.verifiers, arguments)
        own = arguments | changed if changed else own_evaluation(self._env, arguments)
        self._eval_env = self._env if own is None else load(self.config.verifiers, own)
        self._choose_tasks(has_own_evaluation=own is not None)
        client = self.server.servers[0]
        # BaseEnv leaves out a group with a sequence of the full length.
        self._endpoint = Endpoint(client, self.config.max_token_length - 1)
        os.environ[KEY_VARIABLE] = self._endpoint.key
        await self._resources.enter_async_context(self._endpoint.serving())
        forks = ForkServer()
        self._resources.push_async_callback(forks.close)
        fork_tool_servers(forks)
        for env in {id(each): each for each in (self._env, self._eval_env)}.values():
            await self._resources.enter_async_context(env.serving())

    def _choose_tasks(self, *, has_own_evaluation: bool) -> None:
        rng = random.Random(self.config.seed)
        if not self._env.taskset.bounded:
            stream = tasks_of(self._env.taskset)
            if not has_own_evaluation:
                self._held_out = take(stream, self.config.eval_size)
            self.items = self._endless(stream)
        else:
            tasks = list(tasks_of(self._env.taskset))
            if not has_own_evaluation:
                tasks, self._held_out = divide(tasks, self.config.eval_size, rng)
            if not tasks:
                raise EnvFault(f"{self.config.verifiers} has no tasks", exit_code=2)
            self._tasks = tasks
            self.items = epochs(range(len(tasks)), rng)
        if has_own_evaluation:
            found = take(tasks_of(self._eval_env.taskset), max(1, 8 * self.config.eval_size))
            self._held_out = rng.sample(found, min(len(found), self.config.eval_size))
        log.info("%d tasks held out for evaluations", len(self._held_out))

    def _endless(self, stream: Iterator[Any]) -> Iterator[int]:
        for number in itertools.count():
            self._tasks.extend(take(stream, 1))
            yield number

    async def get_server_info(self) -> None:
        await super().get_server_info()
        # The trainer's own limit (`trainer.seq_len`), which the registration tells.
        if self.max_token_len > 0:
            self._endpoint.limit = min(self._endpoint.limit, self.max_token_len - 1)

    # Rollouts

    async def rollout(self, item: int) -> Any:
        """Play the task `group_size` times; return a group for each role of the environment."""
        by_role: defaultdict[str, list[tuple[list[Sequence], float]]] = defaultdict(list)
        for episode in await self._play_group(self._tasks[item]):
            for role, sequences, score in episode:
                by_role[role].append((sequences, score))
        size = self.config.group_size
        groups: list[dict[str, Any]] = []
        for rows in by_role.values():
            # An environment may let one agent play several times in an episode.
            for start in range(0, len(rows) - len(rows) % size, size):
                sequences, scores = zip(*rows[start : start + size], strict=True)
                groups += self._maker.groups(sequences, scores)
        return groups[0] if len(groups) == 1 else groups or None

    async def _play_group(self, task: Any) -> list[Any]:
        """Return `group_size` episodes; replace as many failed ones at most.

        Raises:
            RolloutFailed: more failed.
        """
        # A failure is the environment's (a judge, a sandbox), so a replacement is not a better
        # sample.
        spare = self.config.group_size
        pending = {asyncio.create_task(self._play(task)) for _ in range(self.config.group_size)}
        played = []
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when="FIRST_COMPLETED")
                for each in done:
                    try:
                        played.append(each.result())
                    except RolloutFailed as error:
                        self._numbers["failed"].append(1.0)
                        if not spare:
                            raise
                        spare -= 1
                        self.tally.failed(error)
                        pending.add(asyncio.create_task(self._play(task)))
        finally:
            for each in pending:
                each.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return played

    async def _play(self, task: Any) -> list[tuple[str, list[Sequence], float]]:
        """Return role, sequences and score of each trainable trace of one episode."""
        made = []
        for trace, recorded in await self._episode(self._env, task, training=True):
            for name, value in measured(trace).items():
                self._numbers[name].append(value)
            if not trace.agent.trainable:
                continue
            if len(recorded.temperatures) > 1:
                raise RolloutFailed("it samples at several temperatures")
            temperature = next(iter(recorded.temperatures), self.config.temperature)
            sequences = branches_of(trace, recorded.turns, temperature)
            if not sequences:
                raise RolloutFailed("it sent no request to the model")
            self._numbers["branches"].append(float(len(sequences)))
            self._numbers["failed"].append(0.0)
            made.append((trace.agent.name, sequences, trace.reward))
        return made

    async def _episode(
        self, env: vf.Env, task: Any, *, training: bool, wait: bool = True
    ) -> list[tuple[Any, Recorded]]:
        """Play one episode; return its traces with the turns as the engine sampled them.

        Raises:
            RolloutFailed: the environment failed.
            EngineUnavailable: no engine answers.
        """
        async with AsyncExitStack() as recordings:
            recorded: dict[str, Recorded] = {}

            def begin(trace: Any) -> None:
                recorded[trace.id] = recordings.enter_context(
                    self._endpoint.recording(trace.id, wait=wait)
                )

            context = self._model_context(training=training)
            slot = env.slots(task)[0]
            episode = await env.run_slot(slot, context, on_trace=begin)
            for each in recorded.values():
                if isinstance(each.refused, EngineUnavailable):
                    raise each.refused
                if isinstance(each.refused, EngineRefused) and each.refused.fatal:
                    raise each.refused
            for trace in episode.traces:
                check_trace(trace)
            if episode.errors:
                last = episode.errors[-1]
                raise RolloutFailed(f"{last.type}: {' '.join(last.message.split())}")
            return [(trace, recorded[trace.id]) for trace in episode.traces]

    def _model_context(self, *, training: bool) -> vf.ModelContext:
        sampling = {"temperature": self.config.temperature if training else 0.0}
        if self.config.max_tokens is not None:
            sampling["max_tokens"] = self.config.max_tokens
        client = vf.TrainClientConfig(
            base_url=self._endpoint.base_url(training=training),
            api_key_var=KEY_VARIABLE,
            renderer=self._renderer(),
            renderer_model_name=self.config.tokenizer_name,
        )
        model = self.server.servers[0].config.model_name
        return vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig(**sampling))

    def _renderer(self) -> Any:
        if self.config.renderer:
            return config_from_name(self.config.renderer)
        # The renderers' own class for a model that they know by its hub id.
        if self.config.tokenizer_name in MODEL_RENDERER_MAP:
            return None
        return CustomRendererConfig(import_path=RENDERER, tool_parser=self.config.tool_parser)

    # Evaluation

    def eval_questions(self) -> dict[str, Items[Any]]:
        return {HELD_OUT: self._held_out}

    async def grade(self, question: Any, *, wait: bool) -> Graded:
        """Play one task greedily; it is right if the reward reaches `pass_reward`."""
        traces = await self._episode(self._eval_env, question, training=False, wait=wait)
        for trace, _ in traces:
            for name, value in measured(trace).items():
                self._graded[name].append(value)
        trained = [(trace, each) for trace, each in traces if trace.agent.trainable]
        reward = statistics.fmean(trace.reward for trace, _ in trained)
        versions = [each.oldest_version for _, each in trained]
        oldest = None if None in versions else min(v for v in versions if v is not None)
        return Graded(reward >= self.config.pass_reward, oldest)

    async def _evaluation(self, *args: Any, wait: bool = True, **kwargs: Any) -> None:
        self._graded.clear()
        await super()._evaluation(*args, wait=wait, **kwargs)
        self.eval_log.measured(_means(HELD_OUT, self._graded), self.curr_step)

    # Metrics

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Add the means of rewards and metrics since the last call."""
        metrics = wandb_metrics | _means("train", self._numbers)
        self._numbers.clear()
        return await super().create_rollout_table(metrics)

    async def _close_servers(self) -> None:
        await self._resources.aclose()
        await super()._close_servers()


def _means(prefix: str, numbers: Mapping[str, list[float]]) -> dict[str, float]:
    return {f"{prefix}/{name}": statistics.fmean(each) for name, each in numbers.items() if each}
