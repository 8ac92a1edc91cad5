"""Logprob probe: compare logprobs of tokens that the server decodes with ours at the same weights,
and find the cause of a difference.

The server decodes, once without and once with the prefix cache: `prompt_logprobs` alone would miss
stale CUDA graphs and a stale KV cache. Threads query it while the trainer waits for rollouts, and
the answers are collected before the next publish, so both sides have the same version.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from atropos_common.protocol.trainer_records import (
    LARGE_UPDATE,
    OTHER_WEIGHTS,
    POLICY_LAG,
    SAMPLING,
)
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone
from trainer_core.objective.alignment import Alignment, Cause, DiffSums, ProbeDiffs, diff_sums
from trainer_core.objective.causes.sampling import (
    UNMOVED,
    Moved,
    cause_in_head,
    cause_in_rollouts,
    from_updates,
    moved_by,
)
from trainer_core.objective.causes.scores import FEWEST_TOKENS
from trainer_core.policy.logprobs import (
    completions_logprobs,
    head_scores,
    head_type,
    predicting_states,
)
from trainer_core.ranks.world import ALONE, World
from trainer_core.rollouts.asking import RoutingAsker
from trainer_core.rollouts.batch import Batch, Rollout
from trainer_core.rollouts.compared import UNKNOWN_LAG, Compared, EarlierLogprobs, compared
from trainer_core.rollouts.packing import PackedRow, pack
from trainer_core.rollouts.source import Lags, oldest_lag
from trainer_core.server.client import GeneratedTokens, ServerClient

POLL_S = 0.02
USUAL_BLOCK = 16  # tokens of a block of the prefix cache, if no server reports it
LAG_INTERVAL = 4  # steps between two explanations of a lag of several versions
ENVIRONMENTS = 4  # environments whose rollouts are explained in one step
MOVED = "the updates since the rollouts moved the policy by up to {nats:.2g} nats a token"

Answers = list[tuple[list[int], GeneratedTokens, GeneratedTokens]]
"""Prompt, answer decoded fresh, answer decoded on the cached prefix."""


@dataclass(frozen=True)
class ProbeAnswers:
    answers: Answers
    anchor: tuple[list[int], GeneratedTokens]


class LogprobProbe:
    """Takes a probe every `probe_interval` steps, from one server after another."""

    def __init__(
        self,
        engines: Sequence[ServerClient],
        config: TrainingConfig,
        routing: RoutingAsker | None = None,
    ) -> None:
        self._routing = routing
        self.engines = list(engines)
        self.config = config
        self._block: int | None = None
        self._prompts: list[list[int]] = []
        self._anchor: list[int] = []
        self.answers: Answers = []
        """Answers of the probe that `finish` returned last."""
        # One thread each for `_ask`, the anchor, and the two answers of each prompt.
        self._pool = ThreadPoolExecutor(2 + 2 * config.probe_prompts, thread_name_prefix="probe")
        self._running: Future[ProbeAnswers | None] | None = None

    def learn(self, batch: Batch) -> None:
        """Take different prompts with space for the answer from the newest batch."""
        longest = self.config.max_model_len - self.config.probe_tokens
        needed = min(self._block_size() + 1, longest)
        prompts = sorted({tuple(r.tokens[: r.prompt_length].tolist()) for r in batch.rollouts})
        # Only whole blocks are cached, so concatenate rollouts if prompts are shorter than one
        # block.
        fitting = [list(p) for p in prompts if needed <= len(p) <= longest] or _concatenated(
            batch, needed
        )
        self._prompts = fitting[: self.config.probe_prompts] or self._prompts
        # The anchor's prompt stays the same for the whole run, so that stale weights repeat its
        # answer.
        if not self._anchor and self._prompts:
            self._anchor = self._prompts[0]

    def _block_size(self) -> int:
        for engine in self.engines if self._block is None and self.config.probe_interval else ():
            with suppress(EngineGone):
                self._block = engine.info().block_size or USUAL_BLOCK
                break
        return self._block or USUAL_BLOCK

    def start(self, step: int, version: int) -> None:
        """Start the probe of `step` if it is due; for a server at `version`."""
        due = self.config.probe_interval and (step - 1) % self.config.probe_interval == 0
        if due and self.engines and self._prompts and self._running is None:
            self._running = self._pool.submit(
                _ask,
                self._asked(step),
                self._pool,
                self._prompts,
                self._anchor,
                self.config.probe_tokens,
                version,
                self._routing,
                self.config.broadcast_timeout if self.config.overlap_publish else 0.0,
            )

    def _asked(self, step: int) -> ServerClient:
        return self.engines[(step - 1) // self.config.probe_interval % len(self.engines)]

    def asked_at(self, step: int) -> str:
        """Name the server of the probe of `step`, if there are several."""
        return f"; probed server: {self._asked(step).base_url}" if len(self.engines) > 1 else ""

    def finish(self, model: torch.nn.Module, world: World = ALONE) -> ProbeDiffs | None:
        """Return the comparison, on all ranks; None without answers."""
        # Rank 0 alone talks to servers; every rank computes with the model.
        asked = world.share(self._collected)
        self.answers = asked.answers if asked else []
        return compare(model, asked) if asked else None

    def _collected(self) -> ProbeAnswers | None:
        running, self._running = self._running, None
        try:
            return running.result() if running else None
        except (EngineError, EngineGone) as error:
            print(f"[WARNING] no logprob probe in this step: {error}")
            return None

    def close(self) -> None:
        # Cancel nothing: `wait` in `_ask` would hang on a cancelled future. Running requests fail
        # when the client closes.
        self._pool.shutdown(wait=False)


def compare(model: torch.nn.Module, asked: ProbeAnswers) -> ProbeDiffs:
    """Sum the differences of our logprobs to the server's."""
    answers = asked.answers
    ours = iter(_logprobs_of(model, [asked.anchor, *_all_of(answers)]))
    anchor = diff_sums(next(ours), asked.anchor[1].logprobs)
    fresh, cached = DiffSums(), DiffSums()
    for _, first, second in answers:
        fresh += diff_sums(next(ours), first.logprobs)
        cached += diff_sums(next(ours), second.logprobs)
    hits = [second.cached_tokens for _, _, second in answers if second.cached_tokens is not None]
    return ProbeDiffs(fresh, cached, sum(hits) if hits else None, anchor)


def _all_of(answers: Answers) -> list[tuple[list[int], GeneratedTokens]]:
    return [(prompt, done) for prompt, *both in answers for done in both]


def _logprobs_of(
    model: torch.nn.Module,
    answers: list[tuple[list[int], GeneratedTokens]],
    head_dtype: torch.dtype | None = None,
) -> list[list[float]]:
    pairs = [(prompt, done.token_ids) for prompt, done in answers]
    return completions_logprobs(
        model, pairs, head_dtype=head_dtype, experts=[done.experts for _, done in answers]
    )


def _concatenated(batch: Batch, length: int) -> list[list[int]]:
    stream = [token for rollout in batch.rollouts for token in rollout.tokens.tolist()]
    return [stream[at : at + length] for at in range(0, len(stream) - length + 1, length)]


def _ask(
    engine: ServerClient,
    pool: Executor,
    prompts: list[list[int]],
    anchor: list[int],
    tokens: int,
    version: int,
    routing: RoutingAsker | None = None,
    patience_s: float = 0.0,
) -> ProbeAnswers | None:
    """Query all answers concurrently: the server decodes them in the time of one.

    Args:
        patience_s: seconds to wait for a server to receive `version`.
    """
    until = time.monotonic() + patience_s
    while engine.info().weight_version != version:
        if time.monotonic() > until:
            return None
        time.sleep(POLL_S)

    def unseen(prompt: list[int], temperature: float = 1.0) -> Future[GeneratedTokens]:
        # A random salt keeps this request out of the prefix cache.
        return pool.submit(
            engine.generate, prompt, tokens, temperature=temperature, salt=secrets.token_hex(8)
        )

    # The likeliest answer, since a fixed seed ends a vLLM on a CPU that prefills in chunks ("CPU
    # Generator does not use offset"). A server with stale weights repeats it.
    again = unseen(anchor, temperature=0.0)
    fresh = [unseen(prompt) for prompt in prompts]
    cached = [pool.submit(_on_cached_prefix, engine, prompt, tokens) for prompt in prompts]
    # Also after a failure of one: no request may be in flight when the publish starts.
    wait([again, *fresh, *cached])

    def known(prompt: list[int], answer: Future[GeneratedTokens]) -> GeneratedTokens:
        done = answer.result()
        return (
            done
            if routing is None
            else replace(done, experts=routing.of_answer(prompt, done.token_ids))
        )

    answers = [
        (p, known(p, first), known(p, second))
        for p, first, second in zip(prompts, fresh, cached, strict=True)
    ]
    return ProbeAnswers(answers, (anchor, known(anchor, again)))


def _on_cached_prefix(engine: ServerClient, prompt: list[int], tokens: int) -> GeneratedTokens:
    # A miss fills the cache, so ask again. A hit may use blocks of older weights: the fault to
    # find.
    first = engine.generate(prompt, tokens)
    return engine.generate(prompt, tokens) if first.cached_tokens == 0 else first


@torch.no_grad()
def explain(
    judged: Alignment,
    model: torch.nn.Module,
    rollouts: Sequence[Rollout],
    answers: Answers,
    *,
    step: int,
    lags: Lags,
    version: int = 0,
    earlier: EarlierLogprobs | None = None,
    world: World = ALONE,
) -> Alignment:
    """Return `judged`, or what the model itself shows of its cause.

    Args:
        rollouts: rollouts of the step's batch.
        answers: the step's probe, at the model's current weights.
        lags: policy lag of each rollout; None if unknown.
        version: weight version of the model.
        earlier: the model's logprobs at earlier versions.
    """
    if judged.verdict == "ok":
        return judged
    lag_max = oldest_lag(lags)
    # With a lag of several versions the difference is ordinary, so only test it now and then.
    often = lag_max is None or lag_max <= 1 or step % LAG_INTERVAL == 1
    if judged.kind in (SAMPLING, LARGE_UPDATE) or (judged.kind == POLICY_LAG and often):
        earlier = earlier or EarlierLogprobs()
        return _in_rollouts(judged, model, compared(rollouts, lags), step, version, earlier, world)
    return (
        judged.explained(_cause_in_head(model, answers, world))
        if judged.kind == OTHER_WEIGHTS
        else judged
    )


def _in_rollouts(
    judged: Alignment,
    model: torch.nn.Module,
    sets: Sequence[Compared],
    step: int,
    version: int,
    earlier: EarlierLogprobs,
    world: World,
) -> Alignment:
    """Look for the cause in the rollouts of each environment, `ENVIRONMENTS` of them a step."""
    moves: list[float] = []
    unexplained = False
    for at in range(min(len(sets), ENVIRONMENTS)):
        each = sets[(step + at) % len(sets)]
        scored = _scored(model, each.rollouts, world)
        if scored is None:
            continue
        moved = _moved(model, each, version, earlier, world)
        if cause := cause_in_rollouts(scored, moved):
            kind, why = cause
            return judged.explained((kind, f"{why} ({each.env})" if len(sets) > 1 else why))
        if moved is not None and from_updates(scored, moved):
            moves.append(moved.nats)
        else:
            unexplained = True
    # The gate cannot tell these two apart at a lag of 1.
    if judged.kind == SAMPLING and moves and not unexplained:
        return Alignment("drift", LARGE_UPDATE, MOVED.format(nats=max(moves)))
    return judged


def _moved(
    model: torch.nn.Module, each: Compared, version: int, earlier: EarlierLogprobs, world: World
) -> Moved | None:
    """Return how far the updates since these rollouts moved the policy.

    None: the trainer's logprobs of that time are unknown.
    """
    lag = UNKNOWN_LAG if each.lag is None else each.lag
    if not lag:
        return UNMOVED
    then = earlier.at(version - lag, each.env)
    own = None if then is None else _scored(model, then.rollouts, world)
    if then is None or own is None or then.version >= version:
        # Of unknown age, and this process has made no update.
        return UNMOVED if each.lag is None else None
    # Without logprobs as old as the rollouts: as much again for each update between.
    return moved_by(own).times(max(1.0, lag / (version - then.version)))


def _scored(model: torch.nn.Module, rollouts: Sequence[Rollout], world: World) -> _ScoredRow | None:
    rows = pack(rollouts, sum(len(r.tokens) for r in rollouts))
    if not rows or len(rows[0].labels) < FEWEST_TOKENS:
        return None
    (row,) = rows
    return _ScoredRow(model, row.to(next(model.parameters()).device), world)


class _ScoredRow:
    """A packed row with its hidden states: another temperature costs only the head's product."""

    def __init__(self, model: torch.nn.Module, row: PackedRow, world: World) -> None:
        self.row, self.model, self.world = row, model, world
        self.theirs, self.sequences = row.logprobs, row.sequences
        self.states = predicting_states(model, row)
        self.train = self.at(1.0)

    @property
    def assumed(self) -> float:
        return float(self.row.temperatures.median())

    def at(self, factor: float) -> torch.Tensor:
        """Logprobs of the labels with every temperature times `factor`, [T]."""
        temperatures = self.row.temperatures * factor
        return head_scores(self.model, self.states, self.row.labels, temperatures).logprobs

    def left(self, factor: float) -> float:
        gaps = (self.at(factor) - self.row.logprobs).abs()
        return self.world.share(lambda: float(gaps.mean()))

    def share(self, cause: Callable[[], Cause | None]) -> Cause | None:
        return self.world.share(cause)


def _cause_in_head(model: torch.nn.Module, answers: Answers, world: World) -> Cause | None:
    # [N] logprobs of all answers, in the order of `_all_of`.
    theirs = torch.tensor(
        [value for _, *both in answers for done in both for value in done.logprobs]
    )
    if not len(theirs):
        return None

    def left(dtype: torch.dtype | None) -> float:
        mine = _logprobs_of(model, _all_of(answers), dtype)
        gaps = (torch.tensor([value for one in mine for value in one]) - theirs).abs()
        return world.share(lambda: float(gaps.mean()))

    return cause_in_head(left, head_type(model))
