"""Prompts and requests of an audit, and the answers as spans with logprobs."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer_core.audit.engine import Answer, CannotTell, Engine, Request
from trainer_core.audit.reference import Span
from trainer_core.objective.causes.sampling import PLAIN, Sampler
from trainer_core.objective.causes.weights import slides

TEXTS = (
    "The river rises in the north and runs through three valleys before it reaches the sea.",
    "def mean(values):\n    return sum(values) / len(values)\n\nprint(mean([1, 2, 3]))",
    "Question: a train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "1 + 1 = 2, 2 + 3 = 5, 7 * 8 = 56, 90 / 6 = 15, 12 - 30 = -18",
)
PROMPTS = 6
PROMPT_TOKENS = 48
DRAWN = 48
DEFAULT_DRAWN = 32
CACHED_PROMPTS = 2
# vLLM caches whole blocks of 16 tokens on a GPU and 128 on a CPU.
CACHED_TOKENS = 288
CACHED_DRAWN = 24
BEYOND_WINDOW = 40
# Longest prompt for a sliding window: a longer one does not fit the time.
LONGEST = 8192
OTHER_TEMPERATURE = 0.5


@dataclass(frozen=True)
class Observed:
    """Tokens of one answer with the engine's logprobs."""

    group: str
    span: Span
    logprobs: list[float]
    sampler: Sampler = PLAIN
    """Settings that the logprobs should have passed."""


class Questions:
    """All requests of one audit."""

    def __init__(
        self,
        engine: Engine,
        config: Any,
        vocabulary: int,
        *,
        tokenizer: Any = None,
        seed: int | None = None,
        sampler: Sampler = PLAIN,
        prompt_logprobs: bool = False,
    ) -> None:
        self.with_prompt = prompt_logprobs
        self.engine, self.config, self.vocabulary = engine, config, vocabulary
        self.tokenizer, self.sampler = tokenizer, sampler
        self.random = random.Random(secrets.randbits(64) if seed is None else seed)
        limits = (engine.model.longest, getattr(config, "max_position_embeddings", None))
        self.longest = min([n for n in limits if n] or [LONGEST])

    def ask(self) -> list[Observed]:
        """Ask everything that every audit needs."""
        wanted = min(PROMPT_TOKENS, self.longest // 3)
        drawn = min(DRAWN, self.longest - wanted - 1)
        prompts = self._prompts(PROMPTS, wanted)
        sampling = {
            "temperature": self.sampler.temperature,
            "top_p": self.sampler.top_p,
            "top_k": self.sampler.top_k or -1,
        }
        answers = self.engine.ask(prompts, Request(drawn, sampling, with_prompt=self.with_prompt))
        found = [o for a in answers for o in _observed(a, "sampled", self.sampler)]
        default = min(DEFAULT_DRAWN, drawn)
        answers = self.engine.ask(prompts, Request(default, None))
        found += [o for a in answers for o in _observed(a, "default", PLAIN)]
        return found + self._cached() + self._long()

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        texts = [self._encoded(text)[:length] for text in TEXTS] if self.tokenizer else []
        # Half of them are text, where the model is at home; random tokens reach every embedding.
        texts = [ids for ids in texts if len(ids) >= 4][: count // 2]
        made = [self._random_tokens(self.random, 4) + ids for ids in texts]
        while len(made) < count:
            made.append(self._random_tokens(self.random, length))
        return [ids[:length] for ids in made]

    def _encoded(self, text: str) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [int(i) for i in ids if int(i) < self.vocabulary]

    def _random_tokens(self, source: random.Random, count: int) -> list[int]:
        return [source.randrange(self.vocabulary) for _ in range(count)]

    def _cached(self) -> list[Observed]:
        """Answers on a prefix that the engine may know from an earlier audit."""
        # The same prompts in every audit: after an update of the weights the engine may still have
        # the keys and values that the audit before left.
        source = random.Random(0)
        length = min(CACHED_TOKENS, self.longest - CACHED_DRAWN - 1)
        prompts = [self._random_tokens(source, length) for _ in range(CACHED_PROMPTS)]
        request = Request(min(CACHED_DRAWN, self.longest - length), fresh=False)
        found = []
        # The first request fills the cache where it is empty, the second reads it.
        for _ in range(2):
            for answer in self.engine.ask(prompts, request):
                found += _observed(answer, "cached", PLAIN)
        return found

    def on_prompts(self, prompts: Sequence[list[int]]) -> list[Observed]:
        """Answers to given prompts, which the engine may have in its cache."""
        fitting = [p for p in prompts if len(p) + CACHED_DRAWN < self.longest]
        if not fitting:
            return []
        answers = self.engine.ask(fitting, Request(CACHED_DRAWN, fresh=False))
        return [o for answer in answers for o in _observed(answer, "cached", PLAIN)]

    def _long(self) -> list[Observed]:
        """Tokens beyond the sliding window, where the model has one."""
        window = getattr(self.config, "sliding_window", None)
        if not window or not slides(self.config):
            return []
        length = window + BEYOND_WINDOW
        if length + BEYOND_WINDOW > min(self.longest, LONGEST):
            return []
        prompt = self._random_tokens(self.random, length)
        request = Request(BEYOND_WINDOW, with_prompt=self.with_prompt)
        (answer,) = self.engine.ask([prompt], request)
        # Tokens within the window say nothing about it.
        beyond = [o for o in _observed(answer, "long", PLAIN) if o.group == "long"]
        if answer.prompt_logprobs is not None:
            span = Span(prompt, window + 1, len(prompt))
            beyond.append(Observed("long", span, answer.prompt_logprobs[window:]))
        return beyond

    def meaning(self) -> list[Observed]:
        """Answers at another temperature, which show whether logprobs are raw or processed."""
        prompts = self._prompts(2, min(PROMPT_TOKENS, self.longest // 3))
        sampling = {"temperature": OTHER_TEMPERATURE}
        answers = self.engine.ask(prompts, Request(min(24, self.longest // 3), sampling))
        return [o for a in answers for o in _observed(a, "meaning", PLAIN)]

    def template(self) -> str | None:
        """Evidence that the server's tokenizer or chat template is not the folder's, or None."""
        if self.tokenizer is None:
            return None
        model = self.engine.model.name
        for text in TEXTS[:2]:
            theirs = self._tokenized({"model": model, "prompt": text})
            ours = [int(i) for i in self.tokenizer(text)["input_ids"]]
            if theirs is not None and theirs != ours:
                return f"the server's tokens of a short text differ: {_first(ours, theirs)}"
        messages = [{"role": "user", "content": "How long is a year?"}]
        if getattr(self.tokenizer, "chat_template", None):
            theirs = self._tokenized({"model": model, "messages": messages})
            ours = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            if theirs is not None and theirs != list(ours):
                return f"the server's chat template gives other tokens: {_first(ours, theirs)}"
        return None

    def _tokenized(self, body: dict[str, Any]) -> list[int] | None:
        try:
            answer = self.engine.post("/tokenize", body)
        except CannotTell:
            return None
        found = answer.json() if answer.status_code == 200 else {}
        tokens = found.get("tokens")
        return [int(i) for i in tokens] if isinstance(tokens, list) else None


def _first(ours: Sequence[int], theirs: Sequence[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return f"{len(theirs)} instead of {len(ours)}"
    return f"token {at} is {theirs[at]} there and {ours[at]} here"


def _observed(answer: Answer, group: str, sampler: Sampler) -> list[Observed]:
    prompt = len(answer.prompt)
    tokens = answer.prompt + answer.tokens[: len(answer.logprobs)]
    found = [Observed(group, Span(tokens, prompt, prompt), answer.logprobs, sampler)]
    if answer.prompt_logprobs is not None:
        found.append(Observed("prompt", Span(answer.prompt, 1, prompt), answer.prompt_logprobs))
    return found
