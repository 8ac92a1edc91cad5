"""A completion's tokens leave the engine process in lumps where nobody reads them one by one.

vLLM sends every token of every sequence to the server at once, with three small arrays of logprobs,
also if the server only answers when the completion has ended. Packing and unpacking them is most of
the server's work, and competes with the scheduler for the interpreter. Held back are the outputs of
requests that want their final output only and have no stop strings, after their first token. They
go on with the completion's end, with every `MOST` tokens, and before a pause that aborts the
completions. At a change of the weight version the server asks for the number of tokens alone.

Runs in vLLM's engine process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np

TOKENS_MADE = "atropos_tokens_made"
"""Method of the engine process: request -> tokens so far, of every unfinished request."""
MOST = 32
"""Tokens of one sequence that are held back at most."""
# Fields that a held output may have; another one that is set lets the output pass at once.
PLAIN = {"request_id", "new_token_ids", "new_logprobs", "trace_headers", "num_nans_in_logits"}


class HeldOutputs:
    """The held outputs of one engine, by request."""

    def __init__(self, fields: Iterable[str]) -> None:
        """`fields` are those of vLLM's outputs."""
        self._others = attrgetter(*(name for name in fields if name not in PLAIN))
        self._parts: dict[str, list[Any]] = {}
        self._clients: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def passed(self, outputs: list[Any], client: int, requests: Mapping[str, Any]) -> list[Any]:
        """Return what of a step's outputs goes on now, held parts included.

        Args:
            requests: unfinished requests by id.
        """
        now = []
        for output in outputs:
            name = output.request_id
            parts = self._parts.get(name)
            if parts is None:
                now.append(output)  # the first token, whose time the server records
                if output.finish_reason is None and _may_wait(requests.get(name)):
                    self._parts[name], self._clients[name] = [], client
                continue
            parts.append(output)
            is_plain = all(value is None for value in self._others(output))
            if not is_plain or len(parts) >= MOST:
                now.append(joined(parts))
                self._parts[name] = []
            if output.finish_reason is not None:
                self._forget(name)
        if len(self._parts) > len(requests):
            for name in self._parts.keys() - requests.keys():  # aborted without an output
                self._forget(name)
        return now

    def release(self) -> dict[int, list[Any]]:
        """Return all held outputs, by client."""
        found: dict[int, list[Any]] = {}
        for name, parts in self._parts.items():
            if parts:
                found.setdefault(self._clients[name], []).append(joined(parts))
                self._parts[name] = []
        return found

    def _forget(self, name: str) -> None:
        del self._parts[name], self._clients[name]


def joined(parts: list[Any]) -> Any:
    """Return the last of a request's outputs, in order, with the tokens of all."""
    last = parts[-1]
    if len(parts) > 1:
        last.new_token_ids = [token for part in parts for token in part.new_token_ids]
        rows = [part.new_logprobs for part in parts if part.new_logprobs is not None]
        if rows:
            ids, logprobs, ranks, *_ = zip(*rows, strict=True)
            # As wide as the request with the most logprobs in its step, at least as its own wants.
            width = min(each.shape[1] for each in ids)
            narrow = ([each[:, :width] for each in wide] for wide in (ids, logprobs))
            last.new_logprobs = type(rows[0])(*map(np.concatenate, narrow), np.concatenate(ranks))
    return last


def _may_wait(request: Any) -> bool:
    sampling = getattr(request, "sampling_params", None)
    return sampling is not None and sampling.output_kind.name == "FINAL_ONLY" and not sampling.stop


@cache
def register_held_outputs() -> None:
    """Let vLLM's schedulers in this process hold outputs back, and tell the tokens made."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.core import EngineCoreProc

    update, pause = Scheduler.update_from_output, EngineCoreProc.pause_scheduler

    def held_by(scheduler: Any) -> HeldOutputs:
        if (held := getattr(scheduler, "atropos_held", None)) is None:
            held = scheduler.atropos_held = HeldOutputs(EngineCoreOutput.__struct_fields__)
        return held

    def update_and_hold(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = update(self, *args, **kwargs)
        # Without speculation a step has one token of each sequence.
        if self.num_spec_tokens == 0:
            held = held_by(self)
            for client, one in made.items():
                one.outputs = held.passed(one.outputs, client, self.requests)
        return made

    def release_and_pause(self: Any, mode: str = "abort", clear_cache: bool = True) -> Any:
        if mode == "abort":
            for client, outputs in held_by(self.scheduler).release().items():
                self.output_queue.put_nowait((client, EngineCoreOutputs(outputs=outputs)))
        return pause(self, mode, clear_cache)

    def tokens_made(self: Any) -> dict[str, int]:
        unfinished = self.scheduler.requests
        return {name: request.num_output_tokens for name, request in unfinished.items()}

    Scheduler.update_from_output = update_and_hold
    EngineCoreProc.pause_scheduler = release_and_pause
    setattr(EngineCoreProc, TOKENS_MADE, tokens_made)
