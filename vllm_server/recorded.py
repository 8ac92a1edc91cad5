"""Completions with their logprobs, kept for the trainer that asks afterwards.

Most environments speak to vLLM's own routes, which answer without logprobs, or lose them on their way (atroposlib's
`ScoredDataItem` has no place for any). The engine knew them: every request for plainly sampled text gets them computed,
and what came of it is kept under its prompt, as `/generate` keeps its own, until newer completions need the room.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from atropos_common.bridge import GREEDY_BELOW, KnownLogprobs, prompt_digest
from vllm_server.routing import RoutingKeeper
from vllm_server.versions import VersionHistory

MOST_TOKENS = 4_000_000
"""Generated tokens that are kept: 8 bytes each."""
OVERHEAD = 64
"""What a completion takes beside its tokens, in tokens."""
PLAIN = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "repetition_penalty": 1.0, "min_tokens": 0,
}  # fmt: skip
MASKS = ("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs")
"""Options of vLLM's as they leave the distribution alone, and those that must not be there: others would be in the
logprobs."""


class _Completion(NamedTuple):
    token_ids: array[int]
    logprobs: array[float]
    """float32, as long as `token_ids`."""
    temperature: float
    oldest_version: int


class CompletionStore:
    """Completions by the digest of their prompt; of too many tokens the prompts longest unused go first."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most_tokens
        self._tokens = 0
        self._by_prompt: OrderedDict[str, list[_Completion]] = OrderedDict()

    def remember(
        self, prompt: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float], *, temperature: float,
        oldest_version: int,
    ) -> None:  # fmt: skip
        """Keep one completion of `prompt`; `logprobs` in nats, as long as `token_ids`, as the sampler returned them."""
        if not token_ids:
            return
        key = prompt_digest(prompt)
        known = self._by_prompt.setdefault(key, [])
        heat = temperature if temperature >= GREEDY_BELOW else 1.0
        known.append(_Completion(array("i", token_ids), array("f", logprobs), heat, oldest_version))
        self._by_prompt.move_to_end(key)
        self._tokens += len(token_ids) + OVERHEAD
        while self._tokens > self._most:
            _, oldest = self._by_prompt.popitem(last=False)
            self._tokens -= sum(len(one.token_ids) + OVERHEAD for one in oldest)

    def look_up(self, prompt: str, token_ids: Sequence[int]) -> KnownLogprobs | None:
        """Of the latest completion of the prompt with this digest that begins with `token_ids`: an environment may have
        cut the end off, and of two equal ones the later is taken. None where there is none."""
        wanted = array("i", token_ids)
        for known in reversed(self._by_prompt.get(prompt, [])):
            if known.token_ids[: len(wanted)] == wanted:
                return KnownLogprobs(
                    logprobs=known.logprobs[: len(wanted)].tolist(), temperature=known.temperature,
                    oldest_version=known.oldest_version,
                )  # fmt: skip
        return None


def record(
    generate: Callable[..., AsyncIterator[Any]], store: CompletionStore, history: VersionHistory,
    routing: RoutingKeeper | None = None,
) -> Callable[..., AsyncIterator[Any]]:  # fmt: skip
    """`generate` of vLLM's engine, which asks for logprobs where the caller did not, and keeps what comes of it. The
    weights of when the request came are the oldest that can have made it, or those of its adapter.

    Streams of deltas pass as they are, and so does what is not sampled plainly; of all of them `routing` keeps which
    experts they took.
    """
    from vllm.sampling_params import RequestOutputKind

    async def recording(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        params, wanted, version = sampling_params, False, history.current
        if getattr(params, "logprobs", 0) is None and params.output_kind != RequestOutputKind.DELTA:
            wanted = _is_plain(params)
        if wanted:
            params = params.clone()
            params.logprobs = 0
        deltas = getattr(params, "output_kind", None) == RequestOutputKind.DELTA
        kept = routing.request(deltas=deltas) if routing else None
        async with aclosing(generate(prompt, params, *args, **kwargs)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                if wanted and output.finished:
                    _keep(output, params.temperature, version, store)
                if kept:
                    await kept.see(output)
                yield output

    return recording


def _is_plain(params: Any) -> bool:
    plain = all(getattr(params, name) == value for name, value in PLAIN.items())
    return plain and not any(getattr(params, name, None) for name in MASKS)


def _keep(output: Any, temperature: float, version: int, store: CompletionStore) -> None:
    for completion in output.outputs:
        ids = list(completion.token_ids)
        rows = completion.logprobs or []
        if output.prompt_token_ids and len(rows) == len(ids):
            values = [float(row[token].logprob) for token, row in zip(ids, rows, strict=True)]
            store.remember(output.prompt_token_ids, ids, values, temperature=temperature, oldest_version=version)
