"""The probe: let the server decode a few tokens and compare its logprobs with ours at the same weights.

Decoding, not prefilling, without the prefix cache and once more with it: `prompt_logprobs` alone would miss stale
CUDA graphs and stale KV. One more answer, the anchor, is to the same prompt with the same seed every time: a server
with stale weights repeats itself. The server works in a background thread while the trainer waits for rollouts; the
answer is collected before the next publish, so both sides still hold the same version.
"""

from __future__ import annotations

import secrets
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone
from trainer_core.objective.alignment import DiffSums, ProbeDiffs, diff_sums
from trainer_core.policy.logprobs import completions_logprobs
from trainer_core.rollouts.batch import Batch
from trainer_core.server.client import GeneratedTokens, ServerClient

Answers = list[tuple[list[int], GeneratedTokens, GeneratedTokens]]
"""Prompt, decoded fresh, decoded on the cached prefix."""


@dataclass(frozen=True)
class ProbeAnswers:
    """What the server answered to one probe."""

    answers: Answers
    anchor: tuple[list[int], GeneratedTokens]


class LogprobProbe:
    """Takes a probe every `probe_interval` steps."""

    def __init__(self, engine: ServerClient | None, config: TrainingConfig) -> None:
        self.engine = engine if config.probe_interval else None
        self.config = config
        self._block = (self.engine.info().block_size if self.engine else None) or 16
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
        needed = min(self._block + 1, room)
        prompts = sorted({tuple(r.tokens[: r.prompt_length].tolist()) for r in batch.rollouts})
        fitting = [list(p) for p in prompts if needed <= len(p) <= room] or _strung(batch, needed)
        self._prompts = fitting[: self.config.probe_prompts] or self._prompts
        if not self._anchor and self._prompts:
            self._anchor = self._prompts[0]

    def start(self, step: int, version: int) -> None:
        """Begin the probe that belongs to `step`, unless it runs already, none is due, or the server answers with
        another weight version than `version`."""
        due = self.config.probe_interval and (step - 1) % self.config.probe_interval == 0
        if self.engine is not None and due and self._prompts and self._running is None:
            self._running = self._pool.submit(
                _ask, self.engine, self._pool, self._prompts, self._anchor, self.config.probe_tokens, version
            )

    def finish(self, model: torch.nn.Module) -> ProbeDiffs | None:
        """The comparison; null when none was started, or the server refused or is gone: the publish finds that out."""
        running, self._running = self._running, None
        self.answers = []
        if running is None:
            return None
        try:
            asked = running.result()
        except (EngineError, EngineGone) as error:
            print(f"[WARNING] no probe of this step: {error}")
            return None
        if asked is None:
            return None
        self.answers = asked.answers
        return compare(model, asked)

    def close(self) -> None:
        # Nothing is cancelled: `wait` never learns of a cancelled one. What has begun fails with the closed client.
        self._pool.shutdown(wait=False)


def compare(model: torch.nn.Module, asked: ProbeAnswers) -> ProbeDiffs:
    """Sums of our logprobs against the server's: fresh, cached and the anchor apart."""
    answers, (prompt, again) = asked.answers, asked.anchor
    pairs = [(prompt, again.token_ids), *((p, c.token_ids) for p, *both in answers for c in both)]
    ours = iter(completions_logprobs(model, pairs))
    anchor = diff_sums(next(ours), again.logprobs)
    fresh, cached = DiffSums(), DiffSums()
    for _, first, second in answers:
        fresh += diff_sums(next(ours), first.logprobs)
        cached += diff_sums(next(ours), second.logprobs)
    hits = [second.cached_tokens for _, _, second in answers if second.cached_tokens is not None]
    return ProbeDiffs(fresh, cached, sum(hits) if hits else None, anchor)


def _strung(batch: Batch, length: int) -> list[list[int]]:
    """Prompts of `length` tokens each, cut from the batch's rollouts laid end to end."""
    stream = [token for rollout in batch.rollouts for token in rollout.tokens.tolist()]
    return [stream[at : at + length] for at in range(0, len(stream) - length + 1, length)]


def _ask(
    engine: ServerClient, pool: Executor, prompts: list[list[int]], anchor: list[int], tokens: int, version: int
) -> ProbeAnswers | None:
    """Everything at once: the server decodes all answers together in the time of one."""
    if engine.info().weight_version != version:
        return None

    def unseen(prompt: list[int], seed: int | None = None) -> Future[GeneratedTokens]:
        return pool.submit(engine.generate, prompt, tokens, seed=seed, salt=secrets.token_hex(8))

    again = unseen(anchor, seed=0)
    fresh = [unseen(prompt) for prompt in prompts]
    cached = [pool.submit(_on_cached_prefix, engine, prompt, tokens) for prompt in prompts]
    wait([again, *fresh, *cached])  # none is under way when the publish comes, whatever became of the others
    answers = [(p, first.result(), second.result()) for p, first, second in zip(prompts, fresh, cached, strict=True)]
    return ProbeAnswers(answers, (anchor, again.result()))


def _on_cached_prefix(engine: ServerClient, prompt: list[int], tokens: int) -> GeneratedTokens:
    """Rollouts may have left this prefix in the cache already, from older weights even if its reset failed."""
    first = engine.generate(prompt, tokens)
    return engine.generate(prompt, tokens) if first.cached_tokens == 0 else first
