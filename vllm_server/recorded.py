"""Logprobs and expert choices of recent completions, for a trainer that asks for them later.

Most environments use vLLM's own routes, which answer without logprobs.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atropos_common.protocol.bridge import (
    GREEDY_BELOW,
    KnownLogprobs,
    KnownRouting,
    RoutingRequest,
    RoutingResponse,
    completion_digest,
    prompt_digest,
)
from vllm_server import compat
from vllm_server.versions import Runs, Span, SpanStore, TokensAt, VersionHistory, span_of

logger = logging.getLogger(__name__)

# Bytes; 4 million generated tokens.
MOST_OF_LOGPROBS = 32_000_000
# Bytes; a token takes 384 with 48 layers and 8 of 128 experts.
MOST_OF_EXPERTS = 2 << 30
# Tokens that a chat template may append to a completion: an end of turn, a newline.
MOST_SURPLUS = 8
# Bytes of bookkeeping per completion.
OVERHEAD = 512
# Finished requests that a worker remembers; the server asks for them at once.
FINISHED = 256
# Least wait before a request that the engine refused is sent again.
REFUSED_AGAIN_S = 0.02
# Options that leave the distribution as it is; any of `MASKS` would show in the logprobs.
PLAIN = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}
MASKS = (
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "thinking_token_budget",
)

Experts = NDArray[Any]
"""[tokens, layers, experts per token], uint8 or uint16."""


class _Completion(NamedTuple):
    token_ids: array[int]
    known: Any
    bytes: int


class _Store:
    """Completions by the digest of their prompt; drops the least recently used prompts."""

    def __init__(self, most_bytes: int) -> None:
        self.bytes = 0
        self.dropped = 0
        """Completions dropped for memory."""
        self._most = most_bytes
        self._by_prompt: OrderedDict[str, list[_Completion]] = OrderedDict()

    def _keep(self, prompt: Sequence[int], token_ids: Sequence[int], known: Any, size: int) -> None:
        key, ids = prompt_digest(prompt), array("i", token_ids)
        new = _Completion(ids, known, size + ids.itemsize * len(ids) + OVERHEAD)
        self._by_prompt.setdefault(key, []).append(new)
        self._by_prompt.move_to_end(key)
        self.bytes += new.bytes
        while self.bytes > self._most:
            _, oldest = self._by_prompt.popitem(last=False)
            self.bytes -= sum(one.bytes for one in oldest)
            self.dropped += len(oldest)

    def _latest(
        self, prompt: str, token_ids: Sequence[int], surplus: int = 0
    ) -> _Completion | None:
        """Return the latest completion of this prompt that begins with `token_ids`.

        Args:
            surplus: else, the longest one that `token_ids` exceed by at most this many tokens.
        """
        wanted = array("i", token_ids)
        known = self._by_prompt.get(prompt, [])
        # An environment may have cut a completion's end off.
        for one in reversed(known):
            if one.token_ids[: len(wanted)] == wanted:
                return one
        begins = [
            one
            for one in known
            if len(wanted) - surplus <= len(one.token_ids) < len(wanted)
            and one.token_ids == wanted[: len(one.token_ids)]
        ]
        return max(reversed(begins), key=lambda one: len(one.token_ids), default=None)


class CompletionStore(_Store):
    """Completions with their logprobs."""

    def __init__(self, most_bytes: int = MOST_OF_LOGPROBS) -> None:
        super().__init__(most_bytes)

    def remember(
        self,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        temperature: float,
        oldest_version: int,
    ) -> None:
        """Keep one completion; `logprobs` in nats, one for each of `token_ids`."""
        if not token_ids:
            return
        values = array("f", logprobs)
        heat = temperature if temperature >= GREEDY_BELOW else 1.0
        self._keep(prompt, token_ids, (values, heat, oldest_version), values.itemsize * len(values))

    def look_up(self, prompt: str, token_ids: Sequence[int]) -> KnownLogprobs | None:
        """Return the logprobs of `token_ids` after this prompt; fewer if a chat template appended
        tokens."""
        if (found := self._latest(prompt, token_ids, MOST_SURPLUS)) is None:
            return None
        logprobs, temperature, version = found.known
        return KnownLogprobs(
            logprobs=logprobs[: len(token_ids)].tolist(),
            temperature=temperature,
            oldest_version=version,
        )


class CompletionLog(NamedTuple):
    """Weight versions and logprobs of completions, for a trainer that asks for them later."""

    history: VersionHistory
    spans: SpanStore
    kept: CompletionStore

    def note(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        metrics: Any,
        tokens_at: TokensAt,
        version: int | None,
        temperature: float,
        for_training: bool = True,
    ) -> tuple[Span, Runs]:
        """Record a completion, and return the weight versions behind it.

        Args:
            metrics: vLLM's token times.
            version: an adapter's, which is certain; None: the base model's, by token times.
        """
        tokens = len(token_ids)
        if version is None and metrics is not None and metrics.first_token_ts:
            times = metrics.first_token_ts, metrics.last_token_ts
            span, runs = self.history.span(*times), self.history.runs(*times, tokens, tokens_at)
            if self.history.keeps_cache and metrics.scheduled_ts:
                # A publish between them leaves the prompt's keys and values to older weights.
                span = self.history.span(metrics.scheduled_ts, times[1])
        else:
            known = self.history.current if version is None else version
            span, runs = (known, known), [(known, tokens)]
        if for_training:
            self.kept.remember(
                prompt_ids, token_ids, logprobs, temperature=temperature, oldest_version=span[0]
            )
            self.spans.remember(completion_digest(token_ids, logprobs), span_of(span, runs))
        return span, runs


class RoutingStore(_Store):
    """Completions with the experts of their tokens."""

    def __init__(self, most_bytes: int = MOST_OF_EXPERTS) -> None:
        super().__init__(most_bytes)

    def remember(self, prompt: Sequence[int], token_ids: Sequence[int], experts: Experts) -> None:
        """Keep one completion; `experts` of prompt and completion tokens, except the last."""
        narrow = compact(experts)
        self._keep(prompt, token_ids, narrow, narrow.nbytes)

    def look_up(self, prompt: str, token_ids: Sequence[int], start: int) -> Experts | None:
        """Return the experts from token `start` of prompt and completion on, except the last
        token's; fewer if a chat template appended tokens."""
        if (found := self._latest(prompt, token_ids, MOST_SURPLUS)) is None:
            return None
        experts: Experts = found.known
        cut_off = max(0, len(found.token_ids) - len(token_ids))
        return experts[start : len(experts) - cut_off]

    def answer(self, request: RoutingRequest) -> RoutingResponse:
        asked = zip(request.prompts, request.completions, request.starts, strict=False)
        found = [_known(self.look_up(*one)) for one in asked]
        return RoutingResponse(found=found, dropped=self.dropped)


def compact(experts: NDArray[Any]) -> Experts:
    narrow = not experts.size or int(experts.max()) < 256
    return np.ascontiguousarray(experts, dtype=np.uint8 if narrow else np.dtype("<u2")).copy()


def _known(experts: Experts | None) -> KnownRouting | None:
    if experts is None:
        return None
    tokens, layers, chosen = experts.shape
    data = base64.b64encode(experts.tobytes()).decode()
    return KnownRouting(shape=(tokens, layers, chosen), wide=experts.itemsize == 2, data=data)


class RoutingRecorder:
    """Moves expert choices from engine outputs into the store.

    Args:
        ask: returns the experts of given tokens except the last.
    """

    def __init__(
        self, store: RoutingStore, ask: Callable[[list[int]], Awaitable[Experts | None]] | None
    ) -> None:
        self.store = store
        self._ask = ask
        self._warned = False

    async def keep(self, output: Any, completion: Any, token_ids: list[int]) -> None:
        """Keep one finished completion of `output`."""
        prompt = list(output.prompt_token_ids or [])
        needed = len(prompt) + len(token_ids) - 1
        if not prompt or not token_ids:
            return
        if self._ask is None:
            experts = completion.routed_experts
        else:
            experts = await self._ask([*prompt, *token_ids])
        if experts is not None and len(experts) >= needed and experts.ndim == 3:
            self.store.remember(prompt, token_ids, experts[:needed])
        elif not self._warned:
            self._warned = True
            what = "nothing" if experts is None else f"experts of shape {experts.shape}"
            of = f"a prompt of {len(prompt)} tokens and {len(token_ids)} generated ones"
            logger.warning("vLLM recorded %s for %s: such completions are not replayed", what, of)


class KeptRequest:
    """Follows the outputs of one request; with `deltas` each output brings only new tokens."""

    def __init__(self, recorder: RoutingRecorder, *, deltas: bool) -> None:
        self._recorder = recorder
        self._deltas = deltas
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._done: set[int] = set()

    async def see(self, output: Any) -> None:
        """Keep the completions that `output` finishes."""
        for completion in output.outputs:
            ids = self._token_ids[completion.index]
            if not self._deltas:
                ids.clear()
            ids += completion.token_ids
            ended = completion.finish_reason not in (None, "abort")
            if ended and completion.index not in self._done:
                self._done.add(completion.index)
                await self._recorder.keep(output, completion, ids)


def until_accepted(
    generate: Callable[..., AsyncIterator[Any]], accepts: asyncio.Event
) -> Callable[..., AsyncIterator[Any]]:
    """Wrap the engine's `generate`: send a request again that a paused engine refused.

    Args:
        accepts: set while the engine is not paused.
    """

    # vLLM 0.32 queues requests that arrive in a pause. 0.33 refuses them in pauses that end or
    # abort the requests in flight.
    async def patient(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        while True:
            begun = False
            try:
                async with aclosing(generate(*args, **kwargs)) as outputs:  # type: ignore[type-var]
                    async for output in outputs:
                        begun = True
                        yield output
                return
            except compat.RetryableRequestError:
                if begun:
                    raise
            # The engine may accept requests again since it refused this one.
            await asyncio.sleep(REFUSED_AGAIN_S)
            await accepts.wait()

    return patient


def record(
    generate: Callable[..., AsyncIterator[Any]],
    store: CompletionStore,
    history: VersionHistory,
    routing: RoutingRecorder | None = None,
    cache_salt: Callable[[], int] = lambda: 0,
) -> Callable[..., AsyncIterator[Any]]:
    """Wrap the engine's `generate`: request logprobs if the caller does not, keep the results, and
    add `cache_salt` to the prompt's."""
    from vllm.sampling_params import RequestOutputKind

    async def recording(
        prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        # The oldest weights that can make this completion are those at the request's arrival.
        # Streams of deltas and requests that are not plainly sampled get no logprobs.
        params, version = sampling_params, history.current
        if (salt := cache_salt()) and isinstance(prompt, dict):
            prompt = {**prompt, "cache_salt": f"{prompt.get('cache_salt') or ''}#{salt}"}
        deltas = getattr(params, "output_kind", None) == RequestOutputKind.DELTA
        wanted = getattr(params, "logprobs", 0) is None and not deltas and _is_plain(params)
        if wanted:
            params = params.clone()
            params.logprobs = 0
        kept = KeptRequest(routing, deltas=deltas) if routing else None
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
    return plain and all(getattr(params, name, None) in (None, [], {}) for name in MASKS)


def _keep(output: Any, temperature: float, version: int, store: CompletionStore) -> None:
    for completion in output.outputs:
        ids = list(completion.token_ids)
        rows = completion.logprobs or []
        if output.prompt_token_ids and len(rows) == len(ids):
            values = [float(row[token].logprob) for token, row in zip(ids, rows, strict=True)]
            prompt = output.prompt_token_ids
            store.remember(prompt, ids, values, temperature=temperature, oldest_version=version)


class SlotRecorder:
    """Experts of every token by KV cache slot, in a worker on a CPU.

    Raises:
        ValueError: this model cannot be recorded.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            bind_routed_experts_capturer,
        )

        # A token's keys and values stay in their slot as long as anyone can use them, and so do its
        # experts. A cached prefix brings the experts that computed it.
        groups = runner.kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            kinds = f"its layers share {len(groups)} kinds of KV cache"
            raise ValueError(f"{kinds}, and one is recorded on a CPU")
        model = runner.model_config
        slots = runner.kv_cache_config.num_blocks * groups[0].kv_cache_spec.block_size
        shape = (model.get_total_num_hidden_layers(), model.get_num_experts_per_tok())
        self._block = groups[0].kv_cache_spec.block_size
        # One extra row for tokens without a slot (-1). Untouched pages of zeros take no memory.
        kind = np.uint8 if model.get_num_experts() <= 256 else "<u2"
        self._slots = np.zeros((slots + 1, *shape), dtype=kind)
        self._finished: deque[tuple[list[int], Experts]] = deque(maxlen=FINISHED)
        self._runner, self._execute = runner, runner.execute_model
        # vLLM itself attaches this object to the routers.
        bind_routed_experts_capturer(runner.get_model(), self)
        runner.execute_model = self._execute_model

    def capture(self, layer_id: int, topk_ids: Any) -> None:
        """Store a sparse layer's choice, [N, experts per token]; vLLM's router calls this."""
        from vllm.forward_context import get_forward_context

        mappings = get_forward_context().slot_mapping
        if not isinstance(mappings, dict) or not mappings:
            return  # a warm-up pass
        slots = next(iter(mappings.values()))[: len(topk_ids)].numpy()
        self._slots[slots, layer_id] = topk_ids.numpy()

    def look_up(self, token_ids: Sequence[int]) -> Experts | None:
        """Return the experts of a known request's tokens, except the last."""
        wanted, count = list(token_ids), len(token_ids)
        for name in self._runner.input_batch.req_id_to_index:
            request = self._runner.requests[name]
            if self._tokens(request)[:count] == wanted:
                return self._read(request, count - 1)
        for tokens, experts in reversed(self._finished):
            if tokens[:count] == wanted:
                return experts[: count - 1]
        return None

    def _execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        # Read finished requests before the runner's method overwrites their slots.
        for name in scheduled.finished_req_ids & self._runner.input_batch.req_id_to_index.keys():
            request = self._runner.requests[name]
            tokens = self._tokens(request)
            self._finished.append((tokens, self._read(request, len(tokens) - 1)))
        return self._execute(scheduled, *args, **kwargs)

    @staticmethod
    def _tokens(request: Any) -> list[int]:
        return [*(request.prompt_token_ids or []), *request.output_token_ids]

    def _read(self, request: Any, count: int) -> Experts:
        at = np.arange(count)
        blocks = np.asarray(request.block_ids[0])
        return self._slots[blocks[at // self._block] * self._block + at % self._block]
