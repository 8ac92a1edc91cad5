"""Outputs that vLLM's engine process holds back, as its own structures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from vllm_server.app import require_plugin
from vllm_server.config import PLUGIN_NAME, ConfigError
from vllm_server.held_outputs import MOST, HeldOutputs


def output(name: str, token: int, *, width: int = 2, **fields: Any) -> EngineCoreOutput:
    others = range(1, width)
    rows = LogprobsLists(
        np.array([[token, *others]]),
        np.array([[-float(token), *(-9.0 for _ in others)]]),
        np.array([1]),
    )
    return EngineCoreOutput(name, [token], new_logprobs=rows, **fields)


def request(kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY, **fields: Any) -> Any:
    return SimpleNamespace(sampling_params=SamplingParams(output_kind=kind, **fields))


class Engine:
    """One step is one token of every unfinished request."""

    def __init__(self, **requests: Any) -> None:
        self.requests = dict(requests)
        self.held = HeldOutputs(EngineCoreOutput.__struct_fields__)
        self.made = 0
        self.seen: dict[str, list[EngineCoreOutput]] = {name: [] for name in requests}

    def step(self, *ended: str, **fields: Any) -> int:
        """Return the number of outputs that went on."""
        self.made += 1
        outputs = [
            output(
                name,
                self.made,
                finish_reason=FinishReason.STOP if name in ended else None,
                **fields,
            )
            for name in self.requests
        ]
        for name in ended:  # vLLM has freed it by then
            del self.requests[name]
        return self.note(self.held.passed(outputs, 0, self.requests))

    def note(self, outputs: list[EngineCoreOutput]) -> int:
        for each in outputs:
            self.seen[each.request_id].append(each)
        return len(outputs)

    def tokens(self, name: str) -> list[int]:
        for each in self.seen[name]:
            assert each.new_logprobs is not None
            assert each.new_logprobs.logprob_token_ids[:, 0].tolist() == each.new_token_ids
            assert each.new_logprobs.logprobs[:, 0].tolist() == [-t for t in each.new_token_ids]
            assert len(each.new_logprobs.sampled_token_ranks) == len(each.new_token_ids)
        return [token for each in self.seen[name] for token in each.new_token_ids]


def test_the_first_token_goes_on_and_the_others_with_the_end() -> None:
    engine = Engine(a=request(), b=request())
    assert [engine.step() for _ in range(5)] == [2, 0, 0, 0, 0]
    assert engine.step("a") == 1
    assert engine.tokens("a") == [1, 2, 3, 4, 5, 6]
    assert engine.seen["a"][-1].finish_reason is FinishReason.STOP
    assert engine.tokens("b") == [1]
    engine.step("b")
    assert engine.tokens("b") == [1, 2, 3, 4, 5, 6, 7] and not len(engine.held)


def test_a_neighbour_that_asks_for_more_logprobs_changes_nothing() -> None:
    """vLLM's arrays are as wide in a step as the request with the most logprobs wants."""
    engine = Engine(a=request())
    for width in (1, 1, 3, 2, 1):
        engine.step(width=width)
    engine.step("a", width=6)
    assert engine.tokens("a") == [1, 2, 3, 4, 5, 6]
    assert engine.seen["a"][-1].new_logprobs.logprobs.shape == (5, 1)  # type: ignore[union-attr]


def test_no_more_than_so_many_tokens_are_held() -> None:
    engine = Engine(a=request())
    passed = [engine.step() for _ in range(1 + 3 * MOST)]
    assert sum(passed) == 4 and passed[MOST] == 1
    assert engine.tokens("a") == list(range(1, 2 + 3 * MOST))


@pytest.mark.parametrize(
    "streams",
    [request(RequestOutputKind.DELTA), request(RequestOutputKind.CUMULATIVE), request(stop=["x"])],
)
def test_what_somebody_reads_at_once_is_not_held(streams: Any) -> None:
    engine = Engine(a=streams)
    assert [engine.step() for _ in range(3)] == [1, 1, 1]
    assert not len(engine.held)


def test_all_held_tokens_go_on_at_once_when_the_requests_are_aborted() -> None:
    engine = Engine(a=request(), b=request(RequestOutputKind.DELTA))
    for _ in range(4):
        engine.step()
    released = engine.held.release()
    assert list(released) == [0] and engine.note(released[0]) == 1
    assert engine.tokens("a") == [1, 2, 3, 4] == engine.tokens("b")
    assert engine.held.release() == {}
    assert engine.step() == 1, "later ones are held again"


def test_an_output_with_more_than_tokens_takes_the_held_ones_along() -> None:
    engine = Engine(a=request())
    engine.step()
    engine.step()
    assert engine.step(kv_transfer_params={"x": 1}) == 1
    assert engine.seen["a"][-1].new_token_ids == [2, 3]
    assert engine.seen["a"][-1].kv_transfer_params == {"x": 1}


def test_an_aborted_request_is_forgotten() -> None:
    engine = Engine(a=request(), b=request())
    engine.step()
    engine.step()
    del engine.requests["a"]
    engine.step()
    assert len(engine.held) == 1 and list(engine.held.release()[0][0].new_token_ids) == [2, 3]


def test_without_logprobs_there_are_tokens_alone() -> None:
    held = HeldOutputs(EngineCoreOutput.__struct_fields__)
    requests = {"a": request()}
    for token in (1, 2, 3):
        held.passed([EngineCoreOutput("a", [token])], 0, requests)
    (found,) = held.release()[0]
    assert found.new_token_ids == [2, 3] and found.new_logprobs is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("Call to atropos_tokens_made method failed: no attribute", ConfigError),
        ("EngineCore encountered an issue", RuntimeError),
    ],
)
async def test_an_engine_without_the_plugin_is_refused_at_the_start(
    words: str, expected: type[Exception]
) -> None:
    """It became ready, and the trainer's first publish paused it for good."""

    async def utility(name: str) -> Any:
        raise RuntimeError(words)

    engine = SimpleNamespace(engine_core=SimpleNamespace(call_utility_all_async=utility))
    with pytest.raises(expected, match=PLUGIN_NAME if expected is ConfigError else words):
        await require_plugin(engine)
