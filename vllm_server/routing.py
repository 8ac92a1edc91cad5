"""Completions with the experts that each of their tokens took, kept for the trainer that asks afterwards.

vLLM gives them with the finished completion (`--enable-return-routed-experts`); on a CPU, where its runner has no such
thing, our own recorder in the worker does. They travel neither through environments nor through run-api: the trainer
has the tokens, and asks for their experts by them.
"""

from __future__ import annotations

import base64
import logging
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atropos_common.bridge import KnownRouting, RoutingRequest, RoutingResponse, prompt_digest

logger = logging.getLogger(__name__)

MOST_BYTES = 2 << 30
"""Of experts that are kept: with 48 layers and 8 of 128 experts a token takes 384 bytes."""
OVERHEAD = 512
"""What a completion takes beside that, in bytes."""

FINISHED = 256
"""Requests that are remembered beyond their end by a worker; the server asks at once."""

Experts = NDArray[Any]
"""[tokens, layers, experts a token], uint8 or uint16."""


class _Completion(NamedTuple):
    token_ids: array[int]
    experts: Experts
    """Of prompt and completion, but the last token."""

    @property
    def bytes(self) -> int:
        return self.experts.nbytes + self.token_ids.itemsize * len(self.token_ids) + OVERHEAD


class RoutingStore:
    """Experts by the digest of the prompt; of too many bytes the prompts longest unused go first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.dropped = 0
        """Completions that had to go so far."""
        self.bytes = 0
        self._most = most_bytes
        self._by_prompt: OrderedDict[str, list[_Completion]] = OrderedDict()

    def remember(self, prompt: Sequence[int], token_ids: Sequence[int], experts: Experts) -> None:
        """Keep one completion; `experts` of all its tokens, those of the prompt first, but the last."""
        key = prompt_digest(prompt)
        new = _Completion(array("i", token_ids), compact(experts))
        self._by_prompt.setdefault(key, []).append(new)
        self._by_prompt.move_to_end(key)
        self.bytes += new.bytes
        while self.bytes > self._most:
            _, oldest = self._by_prompt.popitem(last=False)
            self.bytes -= sum(one.bytes for one in oldest)
            self.dropped += len(oldest)

    def look_up(self, prompt: str, token_ids: Sequence[int], start: int) -> Experts | None:
        """Of the latest completion of the prompt with this digest that begins with `token_ids`, from the token `start`
        of both on, but the last. None where there is none."""
        wanted = array("i", token_ids)
        for known in reversed(self._by_prompt.get(prompt, [])):
            if known.token_ids[: len(wanted)] == wanted:
                beyond = len(known.token_ids) - len(wanted)
                return known.experts[start : len(known.experts) - beyond]
        return None

    def answer(self, request: RoutingRequest) -> RoutingResponse:
        asked = zip(request.prompts, request.completions, request.starts, strict=False)
        return RoutingResponse(found=[_known(self.look_up(*one)) for one in asked], dropped=self.dropped)


def compact(experts: NDArray[Any]) -> Experts:
    """Their numbers in as few bytes as they need, in memory of their own."""
    narrow = not experts.size or int(experts.max()) < 256
    return np.ascontiguousarray(experts, dtype=np.uint8 if narrow else np.dtype("<u2")).copy()


def _known(experts: Experts | None) -> KnownRouting | None:
    if experts is None:
        return None
    tokens, layers, chosen = experts.shape
    data = base64.b64encode(experts.tobytes()).decode()
    return KnownRouting(shape=(tokens, layers, chosen), wide=experts.itemsize == 2, data=data)


class RoutingKeeper:
    """Takes what the engine's outputs hold into the store.

    Args:
        ask: for the experts of these tokens but the last, where outputs bring none; null: they do.
    """

    def __init__(self, store: RoutingStore, ask: Callable[[list[int]], Awaitable[Experts | None]] | None) -> None:
        self.store = store
        self._ask = ask
        self._said = False

    def request(self, *, deltas: bool) -> KeptRequest:
        """One request. `deltas`: each output brings new tokens alone."""
        return KeptRequest(self, deltas=deltas)

    async def keep(self, output: Any, index: int, token_ids: list[int]) -> None:
        """One finished completion of `output`."""
        prompt = list(output.prompt_token_ids or [])
        needed = len(prompt) + len(token_ids) - 1
        if not prompt or not token_ids:
            return
        if self._ask is None:
            experts = _of_output(output, index, len(prompt))
        else:
            experts = await self._ask([*prompt, *token_ids])
        if experts is not None and len(experts) >= needed and experts.ndim == 3:
            self.store.remember(prompt, token_ids, experts[:needed])
        elif not self._said:
            self._said = True
            what = "nothing" if experts is None else f"experts of shape {experts.shape}"
            logger.warning(
                "vLLM recorded %s for a prompt of %d tokens and %d generated ones: such completions are not replayed",
                what, len(prompt), len(token_ids),
            )  # fmt: skip


class KeptRequest:
    """Follows the outputs of one request."""

    def __init__(self, keeper: RoutingKeeper, *, deltas: bool) -> None:
        self._keeper = keeper
        self._deltas = deltas
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._done: set[int] = set()

    async def see(self, output: Any) -> None:
        """The next one: keep what is finished in it."""
        for completion in output.outputs:
            ids = self._token_ids[completion.index]
            if not self._deltas:
                ids.clear()
            ids += completion.token_ids
            if completion.finish_reason not in (None, "abort") and completion.index not in self._done:
                self._done.add(completion.index)
                await self._keeper.keep(output, completion.index, ids)


def _of_output(output: Any, index: int, prompt: int) -> NDArray[Any] | None:
    """What vLLM returned: of prompt and completion together, or (0.21 and some later ones) of each apart."""
    found = next((getattr(one, "routed_experts", None) for one in output.outputs if one.index == index), None)
    before = getattr(output, "prompt_routed_experts", None)
    if found is None or before is None:
        return None if found is None else np.asarray(found)
    return np.concatenate([np.asarray(before)[:prompt], np.asarray(found)])


class SlotRecorder:
    """The experts of every token by its place in the KV cache, in a worker on a CPU.

    A token's keys and values lie in a slot of the cache for as long as anyone can use them, and its experts belong to
    them: a prefix that comes from the cache brings those that computed it. vLLM itself hangs this onto the routers. A
    finished request is read before its slots are written again.

    Raises:
        ValueError: this model's routers, or its cache, cannot be recorded.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        groups = runner.kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ValueError(f"its layers share {len(groups)} kinds of KV cache, and one is recorded on a CPU")
        model = runner.model_config
        slots = runner.kv_cache_config.num_blocks * groups[0].kv_cache_spec.block_size
        shape = (model.get_total_num_hidden_layers(), model.get_num_experts_per_tok())
        self._block = groups[0].kv_cache_spec.block_size
        # One row more, for what stands nowhere (slot -1). Untouched pages of zeros take no memory.
        self._slots = np.zeros((slots + 1, *shape), dtype=np.uint8 if model.get_num_experts() <= 256 else "<u2")
        self._finished: deque[tuple[list[int], Experts]] = deque(maxlen=FINISHED)
        self._runner, self._execute = runner, runner.execute_model
        bind_routed_experts_capturer(runner.get_model(), self)
        runner.execute_model = self._execute_model

    def capture(self, layer_id: int, topk_ids: Any) -> None:
        """Called by the router of each sparse layer with what it chose, [N, experts a token]."""
        from vllm.forward_context import get_forward_context

        mappings = get_forward_context().slot_mapping
        if not isinstance(mappings, dict) or not mappings:
            return  # a pass that is no request's
        slots = next(iter(mappings.values()))[: len(topk_ids)].numpy()
        self._slots[slots, layer_id] = topk_ids.numpy()

    def look_up(self, token_ids: Sequence[int]) -> Experts | None:
        """Experts of these tokens but the last, if they begin a request that is running or has ended lately."""
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
        """The runner's own, which overwrites what has ended."""
        for name in scheduled.finished_req_ids & self._runner.input_batch.req_id_to_index.keys():
            request = self._runner.requests[name]
            tokens = self._tokens(request)
            self._finished.append((tokens, self._read(request, len(tokens) - 1)))
        return self._execute(scheduled, *args, **kwargs)

    @staticmethod
    def _tokens(request: Any) -> list[int]:
        return [*(request.prompt_token_ids or []), *request.output_token_ids]

    def _read(self, request: Any, count: int) -> Experts:
        """Of its first `count` tokens, a copy."""
        at = np.arange(count)
        blocks = np.asarray(request.block_ids[0])
        return self._slots[blocks[at // self._block] * self._block + at % self._block]
