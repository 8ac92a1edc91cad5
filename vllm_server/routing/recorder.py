"""What vLLM does for `--enable-return-routed-experts`, for its runner on a CPU, which has no such thing: keep the
experts of every token by its place in the KV cache.

A token's keys and values lie in a slot of the cache for as long as anyone can use them, and its experts belong to
them: a prefix that comes from the cache brings those that computed it. vLLM itself hangs the recorder onto the routers
(`bind_routed_experts_capturer`). A finished request is read before its slots are written again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_server.routing.store import Experts

FINISHED = 256
"""Requests that are remembered beyond their end; the server asks at once."""


class SlotRecorder:
    """Sits in the worker.

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
