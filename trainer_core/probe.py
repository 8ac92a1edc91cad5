"""The probe: compare logprobs of tokens that the server decodes with ours at the same weights, and say why they differ.

Decoding, not prefilling, without the prefix cache and once more with it: `prompt_logprobs` alone would miss stale
CUDA graphs and stale KV. One more answer, the anchor, is the likeliest one to the same prompt every time: a server with
stale weights repeats itself. (A seed would do as well, but ends a vLLM on a CPU that prefills the prompt in parts: "CPU
Generator does not use offset".) The server works in a background thread while the trainer waits for rollouts; the
answer is collected before the next publish, so both sides still hold the same version.

On a verdict that is not ok, `explain` supposes one cause after another, computes the logprobs of a few sequences anew
under it and sees whether they agree then. A cause is accepted when it accounts for most of the difference, so policy
lag or noise is never taken for one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from atropos_common.records import HEAD_DTYPE, OTHER_WEIGHTS, POLICY_LAG, SAMPLING, SHIFTED, TEMPERATURE
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone
from trainer_core.objective.alignment import Alignment, DiffSums, ProbeDiffs, diff_sums
from trainer_core.policy.logprobs import completions_logprobs, head_scores, head_type, predicting_states
from trainer_core.rollouts.asking import RoutingAsker
from trainer_core.rollouts.batch import Batch, Rollout
from trainer_core.rollouts.packing import PackedRow, pack
from trainer_core.server.client import GeneratedTokens, ServerClient
from trainer_core.world import ALONE, World

LEFT = 0.3
"""A cause accounts for a difference of which at most this share is left under it."""
NOISE = 0.05
"""Nats by which two computations of a logprob may differ in half precision."""
NEAREST_TEMPERATURE = 0.04
"""Share by which a temperature has to differ before it is called the cause."""
SEQUENCES = 6
FEWEST_TOKENS = 8
POLL_S = 0.02
USUAL_BLOCK = 16
"""Tokens of a block of the prefix cache, where no server tells."""
LAG_INTERVAL = 10
"""A lag of several versions is an ordinary cause: look behind it only at every so many steps."""

Answers = list[tuple[list[int], GeneratedTokens, GeneratedTokens]]
"""Prompt, decoded fresh, decoded on the cached prefix."""


@dataclass(frozen=True)
class ProbeAnswers:
    """What the server answered to one probe."""

    answers: Answers
    anchor: tuple[list[int], GeneratedTokens]


class LogprobProbe:
    """Takes a probe every `probe_interval` steps, of one server after another."""

    def __init__(
        self, engines: Sequence[ServerClient], config: TrainingConfig, routing: RoutingAsker | None = None
    ) -> None:
        """Args:
        engines: without any no probe is ever taken.
        routing: knows the experts that the answers took, which are replayed; null: routers choose.
        """
        self._routing = routing
        self.engines = list(engines)
        self.config = config
        self._block: int | None = None
        self._prompts: list[list[int]] = []
        self._anchor: list[int] = []
        self.answers: Answers = []
        """Of the probe that `finish` returned last; empty when it returned none."""
        self._pool = ThreadPoolExecutor(2 + 2 * config.probe_prompts, thread_name_prefix="probe")
        self._running: Future[ProbeAnswers | None] | None = None

    def learn(self, batch: Batch) -> None:
        """Take real prompts from the newest batch: different ones, with room for the answer.

        Only whole blocks are cached, so rollouts are strung together where prompts alone are too short for one.
        """
        room = self.config.max_model_len - self.config.probe_tokens
        needed = min(self._block_size() + 1, room)
        prompts = sorted({tuple(r.tokens[: r.prompt_length].tolist()) for r in batch.rollouts})
        fitting = [list(p) for p in prompts if needed <= len(p) <= room] or _strung(batch, needed)
        self._prompts = fitting[: self.config.probe_prompts] or self._prompts
        if not self._anchor and self._prompts:
            self._anchor = self._prompts[0]

    def _block_size(self) -> int:
        """Tokens of a block of the prefix cache, by the first server that tells."""
        for engine in self.engines if self._block is None and self.config.probe_interval else ():
            with suppress(EngineGone):
                self._block = engine.info().block_size or USUAL_BLOCK
                break
        return self._block or USUAL_BLOCK

    def start(self, step: int, version: int) -> None:
        """Begin the probe that belongs to `step`, unless it runs already, none is due, or the server answers with
        another weight version than `version`."""
        due = self.config.probe_interval and (step - 1) % self.config.probe_interval == 0
        if due and self.engines and self._prompts and self._running is None:
            self._running = self._pool.submit(
                _ask, self._asked(step), self._pool, self._prompts, self._anchor, self.config.probe_tokens, version,
                self._routing, self.config.broadcast_timeout if self.config.overlap_publish else 0.0,
            )  # fmt: skip

    def _asked(self, step: int) -> ServerClient:
        """Whose turn it is at `step`."""
        return self.engines[(step - 1) // self.config.probe_interval % len(self.engines)]

    def asked_at(self, step: int) -> str:
        """The server that the probe of `step` is of, where there are several."""
        return f"; the probe asked {self._asked(step).base_url}" if len(self.engines) > 1 else ""

    def finish(self, model: torch.nn.Module, world: World = ALONE) -> ProbeDiffs | None:
        """The comparison, on all ranks; null when none was started, or the server refused or is gone: the publish finds
        that out."""
        asked = world.share(self._collected)
        self.answers = asked.answers if asked else []
        return compare(model, asked) if asked else None

    def _collected(self) -> ProbeAnswers | None:
        running, self._running = self._running, None
        try:
            return running.result() if running else None
        except (EngineError, EngineGone) as error:
            print(f"[WARNING] no probe of this step: {error}")
            return None

    def close(self) -> None:
        # Nothing is cancelled: `wait` never learns of a cancelled one. What has begun fails with the closed client.
        self._pool.shutdown(wait=False)


def compare(model: torch.nn.Module, asked: ProbeAnswers) -> ProbeDiffs:
    """Sums of our logprobs against the server's: fresh, cached and the anchor apart."""
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
    model: torch.nn.Module, answers: list[tuple[list[int], GeneratedTokens]], head_dtype: torch.dtype | None = None
) -> list[list[float]]:
    """Ours, with the experts that the engine took where they are known."""
    pairs = [(prompt, done.token_ids) for prompt, done in answers]
    return completions_logprobs(model, pairs, head_dtype=head_dtype, experts=[done.experts for _, done in answers])


def _strung(batch: Batch, length: int) -> list[list[int]]:
    """Prompts of `length` tokens each, cut from the batch's rollouts laid end to end."""
    stream = [token for rollout in batch.rollouts for token in rollout.tokens.tolist()]
    return [stream[at : at + length] for at in range(0, len(stream) - length + 1, length)]


def _ask(
    engine: ServerClient, pool: Executor, prompts: list[list[int]], anchor: list[int], tokens: int, version: int,
    routing: RoutingAsker | None = None, patience_s: float = 0.0,
) -> ProbeAnswers | None:  # fmt: skip
    """Everything at once: the server decodes all answers together in the time of one.

    Args:
        patience_s: so long a server without `version` may be about to get it.
    """
    until = time.monotonic() + patience_s
    while engine.info().weight_version != version:
        if time.monotonic() > until:
            return None
        time.sleep(POLL_S)

    def unseen(prompt: list[int], temperature: float = 1.0) -> Future[GeneratedTokens]:
        return pool.submit(engine.generate, prompt, tokens, temperature=temperature, salt=secrets.token_hex(8))

    again = unseen(anchor, temperature=0.0)
    fresh = [unseen(prompt) for prompt in prompts]
    cached = [pool.submit(_on_cached_prefix, engine, prompt, tokens) for prompt in prompts]
    wait([again, *fresh, *cached])  # none is under way when the publish comes, whatever became of the others

    def known(prompt: list[int], answer: Future[GeneratedTokens]) -> GeneratedTokens:
        done = answer.result()
        return done if routing is None else replace(done, experts=routing.of_answer(prompt, done.token_ids))

    answers = [(p, known(p, first), known(p, second)) for p, first, second in zip(prompts, fresh, cached, strict=True)]
    return ProbeAnswers(answers, (anchor, known(anchor, again)))


def _on_cached_prefix(engine: ServerClient, prompt: list[int], tokens: int) -> GeneratedTokens:
    """Rollouts may have left this prefix in the cache already, from older weights even if its reset failed."""
    first = engine.generate(prompt, tokens)
    return engine.generate(prompt, tokens) if first.cached_tokens == 0 else first


@torch.no_grad()
def explain(
    judged: Alignment, model: torch.nn.Module, rollouts: Sequence[Rollout], answers: Answers, *, step: int,
    lag_max: float | None, world: World = ALONE,
) -> Alignment:  # fmt: skip
    """`judged`, or a mismatch with the cause that accounts for it; by rank 0's figures, for another rank's may lie just
    beyond a bound, and it would run the model once more than all others.

    Args:
        rollouts: of the step's batch.
        answers: of the step's probe, at the model's present weights; empty when there was none.
        lag_max: oldest rollout in weight versions; null when unknown.
    """
    if judged.verdict == "ok":
        return judged
    cause = judged.cause.partition(":")[0]
    often = lag_max is None or lag_max <= 1 or step % LAG_INTERVAL == 1
    if cause == SAMPLING or (cause == POLICY_LAG and often):
        return judged.explained(_of_rollouts(model, rollouts, world))
    return judged.explained(_of_head(model, answers, world)) if cause == OTHER_WEIGHTS else judged


def _of_rollouts(model: torch.nn.Module, rollouts: Sequence[Rollout], world: World) -> str | None:
    chosen = [r for r in rollouts if r.trained.any()][:SEQUENCES]
    rows = pack(chosen, max((len(r.tokens) for r in chosen), default=0) * len(chosen))
    row = max(rows, key=lambda row: len(row.labels), default=None)  # those without advantages have one of their own
    if row is None or len(row.labels) < FEWEST_TOKENS:
        return None
    row = row.to(next(model.parameters()).device)
    scored = _Scored(model, row, world)
    shifted = world.share(lambda: _shifted(scored))
    return shifted or _temperature(scored) or world.share(lambda: _filtered(scored))


class _Scored:
    """A packed row whose hidden states are kept, so that other temperatures cost a product with the head alone."""

    def __init__(self, model: torch.nn.Module, row: PackedRow, world: World) -> None:
        self.row, self.model, self.world = row, model, world
        self.states = predicting_states(model, row)
        self.train = self.at(1.0)

    def at(self, factor: float) -> torch.Tensor:
        """Logprobs of the labels with every temperature times `factor`, [T]."""
        temperatures = self.row.temperatures * factor
        return head_scores(self.model, self.states, self.row.labels, temperatures).logprobs

    def left(self, factor: float) -> float:
        """Mean |trainer - rollout| then, as rank 0 has it."""
        gaps = (self.at(factor) - self.row.logprobs).abs()
        return self.world.share(lambda: float(gaps.mean()))


def _shifted(scored: _Scored) -> str | None:
    """Do the rollouts' logprobs belong to the token before, or after?"""
    train, theirs, ids = scored.train, scored.row.logprobs, scored.row.sequences
    for mine, other, where in (
        (slice(1, None), slice(None, -1), "the token before"),
        (slice(None, -1), slice(1, None), "the next token"),
    ):
        inside = ids[mine] == ids[other]
        if int(inside.sum()) < FEWEST_TOKENS:
            continue
        as_given = (train[mine] - theirs[mine]).abs()[inside].mean()
        moved = (train[other] - theirs[mine]).abs()[inside].mean()
        if float(moved) <= LEFT * float(as_given):
            return f"{SHIFTED}: each rollout logprob is that of {where}"
    return None


def _temperature(scored: _Scored) -> str | None:
    """Is there a temperature at which both agree? One too close to ours is not told from an update that sharpened."""
    before = scored.left(1.0)
    best, width = 1.0, 2.0
    for _ in range(5):
        best = min((best * width ** (i / 3) for i in range(-6, 7)), key=scored.left)
        width **= 1 / 3
    if scored.left(best) > LEFT * before or abs(best - 1.0) < NEAREST_TEMPERATURE:
        return None
    assumed = float(scored.row.temperatures.median())
    raw = ": raw logprobs, or that temperature" if abs(best * assumed - 1.0) < 0.02 else ""
    return f"{TEMPERATURE}: the rollouts' logprobs fit {best * assumed:.2f}{raw}; the trainer counts with {assumed:.2f}"


def _filtered(scored: _Scored) -> str | None:
    """Is every token likelier to the server? So it is where a filter took the others' probability away."""
    surplus = scored.row.logprobs - scored.train
    if float(surplus.min()) < -NOISE or float(surplus.mean()) < NOISE:
        return None
    return (
        f"{SAMPLING}: every rollout logprob is above the trainer's, by {float(surplus.mean()):.2g} on average: top-p, "
        "top-k or min-p took the other tokens away"
    )


def _of_head(model: torch.nn.Module, answers: Answers, world: World) -> str | None:
    """Does the server multiply with its head in another type?"""
    theirs = torch.tensor([value for _, *both in answers for done in both for value in done.logprobs])
    if not len(theirs):
        return None

    def left(dtype: torch.dtype | None) -> float:
        mine = _logprobs_of(model, _all_of(answers), dtype)
        gaps = (torch.tensor([value for one in mine for value in one]) - theirs).abs()
        return world.share(lambda: float(gaps.mean()))

    own = head_type(model)
    before = left(None)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if dtype != own and left(dtype) <= LEFT * before:
            return f"{HEAD_DTYPE}: the server computes with its head in {_name(dtype)}, the trainer in {_name(own)}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
