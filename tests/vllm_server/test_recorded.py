"""Recorded logprobs of requests without them: beside vLLM's routes, found by prompt, bounded, put
into rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atropos_common.protocol.bridge import MOST_COMPLETIONS, KnownLogprobs, prompt_digest
from tests.atropos_envs.support import encode, text_tokenizer
from trainer_core.errors import EngineError, EngineGone
from trainer_core.rollouts.asking import MissingAsker
from trainer_core.rollouts.batch import Batch, read_batch
from trainer_core.rollouts.source import Lag, LagMeter
from vllm_server.recorded import (
    OVERHEAD,
    REFUSED_AGAIN_S,
    CompletionStore,
    record,
    until_accepted,
)
from vllm_server.versions import VersionHistory

PROMPT = [5, 6]


def _found(
    store: CompletionStore, ids: list[int], prompt: list[int] = PROMPT
) -> KnownLogprobs | None:
    return store.look_up(prompt_digest(prompt), ids)


def test_a_completion_is_found_by_its_prompt_and_how_it_begins() -> None:
    store = CompletionStore()
    store.remember(PROMPT, [7, 8, 9], [-0.5, -1.0, -1.5], temperature=0.5, oldest_version=3)
    store.remember(PROMPT, [7, 9], [-0.25, -2.0], temperature=1.0, oldest_version=4)
    assert _found(store, [7, 8]) == KnownLogprobs(
        logprobs=[-0.5, -1.0], temperature=0.5, oldest_version=3
    ), "its end may be cut off"
    latest = _found(store, [7])
    assert latest is not None and latest.logprobs == [-0.25], "of two alike the later one"
    assert _found(store, [8]) is None and _found(store, [7], [5]) is None


def test_what_a_chat_template_puts_behind_a_completion_hides_nothing() -> None:
    """ChatML ends a turn with a newline behind the engine's last token."""
    store = CompletionStore()
    store.remember(PROMPT, [7, 2], [-0.5, -1.0], temperature=1.0, oldest_version=3)
    store.remember(
        PROMPT, [7, 2, 4, 2], [-0.5, -1.0, -2.0, -3.0], temperature=1.0, oldest_version=4
    )
    found = _found(store, [7, 2, 9])
    assert found is not None and found.logprobs == [-0.5, -1.0] and found.oldest_version == 3
    found = _found(store, [7, 2, 4, 2, 9])
    assert found is not None and found.logprobs == [-0.5, -1.0, -2.0, -3.0], "the longest"
    assert _found(store, [7, 3, 9]) is None, "the engine made another one"
    assert _found(store, [7, 2, *range(20, 29)]) is None, "nine tokens are no template's end"


def test_the_newline_of_a_chatml_template_costs_no_logprobs_and_is_not_trained() -> None:
    """From the template to the batch: the tokens are those that atroposlib's `tokenize_for_trainer`
    makes."""
    from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

    tokenizer = text_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    question, answer = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "four"}
    prompt = tokenizer.apply_chat_template(
        [question], add_generation_prompt=True, return_dict=False
    )
    engine = encode("four")
    made = tokenize_for_trainer(_TokenIds(tokenizer), [question, answer])
    asked = [token for token in made["masks"] if token != -100]
    assert asked == [*engine, *encode("\n")[:-1]], (
        "the template's newline is behind the engine's end token"
    )

    store = CompletionStore()
    store.remember(prompt, engine, [-0.5] * 5, temperature=1.0, oldest_version=3)
    group = {"tokens": [made["tokens"]] * 2, "masks": [made["masks"]] * 2, "scores": [0, 1]}
    batch = read_batch([group], seq_len=99, recompute=True)
    MissingAsker([lambda p, c: [store.look_up(*one) for one in zip(p, c, strict=True)]]).fill(batch)
    assert batch.logprobs_from == {"engine": 2}
    for rollout in batch.rollouts:
        assert rollout.complete and rollout.trained.sum() == 5 and not rollout.trained[-1]
        assert (
            rollout.logprobs[rollout.trained].tolist() == [-0.5] * 5 and rollout.oldest_version == 3
        )


class _TokenIds:
    """A tokenizer whose chat template gives token ids, as with the transformers for which
    atroposlib is written."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer.apply_chat_template(*args, **{"return_dict": False} | kwargs)


def test_the_oldest_prompts_go_first() -> None:
    store = CompletionStore(most_bytes=3 * (3 * 8 + OVERHEAD))
    for prompt in range(6):
        store.remember(
            [9], [], [], temperature=1.0, oldest_version=0
        )  # one that was given up takes no room
        store.remember([prompt], [1, 2, 3], [-1.0] * 3, temperature=1.0, oldest_version=0)
    assert [_found(store, [1], [prompt]) is not None for prompt in range(6)] == [False] * 3 + [
        True
    ] * 3


def _run(params: Any, store: CompletionStore) -> Any:
    """Send one request to an engine that computes logprobs on request; return its parameters."""
    seen = []

    async def generate(prompt: Any, given: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        seen.append(given)
        rows = None if given.logprobs is None else [{4: SimpleNamespace(logprob=-0.75)}]
        for finished in (False, True):
            one = SimpleNamespace(token_ids=[4], logprobs=rows)
            yield SimpleNamespace(finished=finished, outputs=[one, one], prompt_token_ids=PROMPT)

    history = VersionHistory()
    history.change(2, 1.0)

    async def request() -> int:
        return len(
            [
                output
                async for output in record(generate, store, history)("a", params, "id", priority=1)
            ]
        )

    assert asyncio.run(request()) == 2
    return seen[0]


def test_plainly_sampled_text_is_recorded_and_the_caller_sees_nothing_of_it() -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    store = CompletionStore()
    params = SamplingParams(temperature=0.5, output_kind=RequestOutputKind.FINAL_ONLY)
    assert _run(params, store).logprobs == 0 and params.logprobs is None
    assert _found(store, [4]) == KnownLogprobs(logprobs=[-0.75], temperature=0.5, oldest_version=2)


async def test_a_request_that_a_paused_engine_refuses_is_sent_again_after_the_resume() -> None:
    """vLLM 0.33 refuses requests in pauses that wait for or abort those in flight."""
    from vllm.exceptions import RetryableRequestError

    accepts, sent = asyncio.Event(), 0

    async def generate(prompt: str, fails_at: int) -> AsyncIterator[int]:
        nonlocal sent
        sent += 1
        for at in range(3):
            if at == fails_at and not accepts.is_set():
                raise RetryableRequestError("Generation is paused. Please retry after it resumes.")
            yield at

    patient = until_accepted(generate, accepts)

    async def answer(fails_at: int) -> list[int]:
        return [output async for output in patient("a", fails_at=fails_at)]

    waiting = asyncio.ensure_future(answer(0))
    await asyncio.sleep(3 * REFUSED_AGAIN_S)
    assert sent == 1 and not waiting.done(), "it waits for the resume"
    accepts.set()
    assert await waiting == [0, 1, 2] and sent == 2
    accepts.clear()
    with pytest.raises(RetryableRequestError):  # the caller has a part of it
        await answer(1)


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.9},
        {"top_k": 3},
        {"logit_bias": {3: 1.0}},
        {"thinking_token_budget": 0},
        {"logprobs": 1},
        {"output_kind": 1},
    ],
)
def test_what_would_be_another_distribution_is_not(options: dict[str, Any]) -> None:
    """Nor what asks for logprobs itself, nor a stream of deltas."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kind = RequestOutputKind(options.pop("output_kind", RequestOutputKind.FINAL_ONLY.value))
    store = CompletionStore()
    params = SamplingParams(output_kind=kind, **options)
    assert _run(params, store) is params and _found(store, [4]) is None


def _batch() -> Batch:
    """A rollout that lacks both of its turns, one that lacks nothing, one that nobody knows."""
    tokens = [[5, 6, 7, 8, 2, 9], [5, 6, 7], [1, 3, 3]]
    masks = [[-100, -100, 7, 8, -100, 9], [-100, -100, 7], [-100, 3, 3]]
    logprobs = [[1.0] * 6, [1.0, 1.0, -0.1], [1.0] * 3]
    group = {"tokens": tokens, "masks": masks, "scores": [1, 2, 3], "inference_logprobs": logprobs}
    return read_batch([group], seq_len=9, recompute=True)


def test_what_is_missing_is_asked_for_turn_by_turn() -> None:
    store = CompletionStore()
    store.remember(PROMPT, [7, 8, 0], [-0.5, -1.0, -9.0], temperature=0.5, oldest_version=3)
    store.remember([5, 6, 7, 8, 2], [9], [-0.25], temperature=0.5, oldest_version=3)
    first, second = _batch(), _batch()

    def ask(prompts: list[str], completions: list[list[int]]) -> list[KnownLogprobs | None]:
        return [
            store.look_up(prompt, ids) for prompt, ids in zip(prompts, completions, strict=True)
        ]

    def gone(prompts: list[str], completions: list[list[int]]) -> list[KnownLogprobs | None]:
        raise EngineGone("away")

    asked = []

    def old(prompts: list[str], completions: list[list[int]]) -> list[KnownLogprobs | None]:
        asked.append(len(prompts))
        raise EngineError("HTTP 404")

    asker = MissingAsker([old, gone, ask])
    for batch in (first, second):
        asker.fill(batch)
        assert batch.logprobs_from == {"environment": 1, "engine": 1, "trainer": 1}
        whole, came, unknown = batch.rollouts
        assert LagMeter([]).measure(batch.rollouts, 9) == [Lag(6), None, None]
        assert whole.complete and whole.temperature == 0.5 and came.temperature == 1.0
        assert whole.logprobs[whole.trained].tolist() == [-0.5, -1.0, -0.25]
        assert np.isnan(unknown.logprobs[unknown.trained]).all()
    assert asked == [3], "who cannot tell is asked once"


def test_many_are_asked_for_in_parts() -> None:
    parts = []

    def ask(prompts: list[str], completions: list[list[int]]) -> list[KnownLogprobs | None]:
        parts.append(len(prompts))
        return [KnownLogprobs(logprobs=[-1.0], temperature=1.0, oldest_version=0)] * len(prompts)

    count = MOST_COMPLETIONS + 2
    group = {"tokens": [[5, 6]] * count, "masks": [[-100, 6]] * count, "scores": list(range(count))}
    batch = read_batch([group], seq_len=9, recompute=True)
    MissingAsker([ask]).fill(batch)
    assert parts == [MOST_COMPLETIONS, 2] and batch.logprobs_from == {"engine": count}
