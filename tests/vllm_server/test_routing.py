"""Experts of completions: kept from every form of vLLM's outputs, bounded, found by tokens,
served."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI

from atropos_common.protocol.bridge import RoutingRequest, prompt_digest
from trainer_core.errors import EngineError
from trainer_core.server.client import ServerClient
from vllm_server import bridge as bridge_routes
from vllm_server import flags
from vllm_server.auth import GenerationHold
from vllm_server.bridge import WeightBridge
from vllm_server.config import ConfigError, ServerConfig
from vllm_server.recorded import (
    MOST_SURPLUS,
    OVERHEAD,
    CompletionStore,
    KeptRequest,
    RoutingRecorder,
    RoutingStore,
    SlotRecorder,
    compact,
    record,
)
from vllm_server.versions import VersionHistory

PROMPT = [5, 6, 7]


def _experts(count: int, largest: int = 8) -> np.ndarray[Any, Any]:
    """[count, 2 layers, 2], no two tokens alike."""
    return np.arange(count * 4).reshape(count, 2, 2) % largest


def _found(
    store: RoutingStore, ids: list[int], start: int = 0, prompt: list[int] = PROMPT
) -> list[Any] | None:
    found = store.look_up(prompt_digest(prompt), ids, start)
    return None if found is None else found.tolist()


def test_a_completion_is_found_by_its_prompt_and_how_it_begins() -> None:
    store, whole = RoutingStore(), _experts(5)
    store.remember(PROMPT, [1, 2, 3], whole)
    assert _found(store, [1, 2, 3]) == whole.tolist()
    assert _found(store, [1, 2], start=2) == whole[2:4].tolist(), (
        "its end may be cut off; the last token has none"
    )
    assert _found(store, [1, 2, 3, 4], start=2) == whole[2:].tolist(), (
        "a chat template appended a newline"
    )
    assert (
        _found(store, [2]) is None
        and _found(store, [1, 2, 3, *[4] * (MOST_SURPLUS + 1)]) is None
        and _found(store, [1], prompt=[5]) is None
    )
    store.remember(PROMPT, [1, 2, 9], whole + 1)
    assert _found(store, [1]) == (whole + 1)[:3].tolist(), "of two alike the later one"


def test_numbers_take_as_few_bytes_as_they_need() -> None:
    assert compact(_experts(4)).dtype == np.uint8 and compact(_experts(100, 300)).dtype == np.dtype(
        "<u2"
    )
    assert (compact(_experts(100, 300)) == _experts(100, 300)).all()


def test_the_oldest_prompts_go_first_and_are_counted() -> None:
    each = 5 * 4 + 3 * 4 + OVERHEAD
    store = RoutingStore(most_bytes=3 * each)
    for prompt in range(7):
        store.remember([prompt, 0, 0], [1, 2, 3], _experts(5))
    assert [_found(store, [1], prompt=[i, 0, 0]) is not None for i in range(7)] == [False] * 4 + [
        True
    ] * 3
    assert (store.bytes, store.dropped) == (3 * each, 4)
    store.remember([9, 9, 9], [1, 2, 3], _experts(4 * each))
    assert (store.bytes, store.dropped) == (0, 8), "one that is larger than all is not kept either"


def _completion(index: int, ids: list[int], reason: str | None, **more: Any) -> Any:
    return SimpleNamespace(index=index, token_ids=ids, finish_reason=reason, logprobs=None, **more)


def _outputs(kind: str) -> list[Any]:
    """Two completions, [1, 2] and [3, 4], as vLLM tells them in its three ways."""
    first, second = {"routed_experts": _experts(4)}, {"routed_experts": _experts(4) + 1}
    told = {
        "final": [
            [_completion(0, [1, 2], "stop", **first), _completion(1, [3, 4], "length", **second)]
        ],
        "deltas": [
            [_completion(0, [1], None)],
            [_completion(1, [3], None)],
            [_completion(1, [4], "stop", **second)],
            [_completion(0, [2], "stop", **first)],
        ],
        "whole": [
            [_completion(0, [1], None), _completion(1, [3], None)],
            [_completion(0, [1, 2], "stop", **first), _completion(1, [3, 4], None)],
            [_completion(0, [1, 2], "stop", **first), _completion(1, [3, 4], "stop", **second)],
        ],
    }[kind]
    return [
        SimpleNamespace(outputs=each, prompt_token_ids=PROMPT, finished=each is told[-1])
        for each in told
    ]


@pytest.mark.parametrize("kind", ["final", "deltas", "whole"])
def test_every_completion_of_a_request_is_kept(kind: str) -> None:
    """However its tokens come; the caller sees what it would have seen."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kinds = {"final": RequestOutputKind.FINAL_ONLY, "deltas": RequestOutputKind.DELTA}
    params = SamplingParams(logprobs=1, output_kind=kinds.get(kind, RequestOutputKind.CUMULATIVE))
    store = RoutingStore()

    async def generate(prompt: Any, given: Any, request_id: str) -> AsyncIterator[Any]:
        assert given is params
        for output in _outputs(kind):
            yield output

    async def request() -> int:
        asking = record(generate, CompletionStore(), VersionHistory(), RoutingRecorder(store, None))
        return len([output async for output in asking("p", params, "id")])

    assert asyncio.run(request()) == len(_outputs(kind))
    assert (
        _found(store, [1, 2]) == _experts(4).tolist()
        and _found(store, [3, 4]) == (_experts(4) + 1).tolist()
    )
    assert store.bytes == 2 * (4 * 4 + 2 * 4 + OVERHEAD), "once each"


@pytest.mark.parametrize(
    ("completion", "kept"),
    [
        (_experts(4), _experts(4)),
        (_experts(5), _experts(5)[:4]),
        (_experts(1), None),
        (None, None),
    ],
)
def test_experts_of_fewer_tokens_are_not_kept(completion: Any, kept: Any) -> None:
    """Prompt and completion together, with the last token or without."""
    store = RoutingStore()
    done = _completion(0, [1, 2], "stop", routed_experts=completion)
    output = SimpleNamespace(outputs=[done], prompt_token_ids=PROMPT)
    recorder = RoutingRecorder(store, None)
    asyncio.run(KeptRequest(recorder, deltas=False).see(output))
    assert _found(store, [1, 2]) == (None if kept is None else kept.tolist())


async def test_where_outputs_bring_none_the_worker_is_asked() -> None:
    asked = []

    async def ask(token_ids: list[int]) -> Any:
        asked.append(token_ids)
        return _experts(4)

    store = RoutingStore()
    request = KeptRequest(RoutingRecorder(store, ask), deltas=False)
    for reason in (None, "stop", "stop"):
        await request.see(
            SimpleNamespace(outputs=[_completion(0, [1, 2], reason)], prompt_token_ids=PROMPT)
        )
    assert asked == [[5, 6, 7, 1, 2]] and _found(store, [1, 2]) == _experts(4).tolist()
    aborted = KeptRequest(RoutingRecorder(store, ask), deltas=False)
    await aborted.see(
        SimpleNamespace(outputs=[_completion(0, [8], "abort")], prompt_token_ids=PROMPT)
    )
    assert len(asked) == 1


# The route


def _served(store: RoutingStore | None, tmp_path: Path) -> tuple[FastAPI, WeightBridge]:
    config = ServerConfig.from_env({"LOGDIR": str(tmp_path)})
    engine: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(block_size=32))
    )
    bridge = WeightBridge(
        engine, config=config, gate=GenerationHold(held=False), model="m", vllm_version="0"
    )
    bridge.routing = store
    app = FastAPI()
    app.include_router(bridge_routes.make_router(bridge, Any, app, sleep_mode=False))  # type: ignore[arg-type]
    return app, bridge


def _client(answer: httpx.Response) -> ServerClient:
    """The trainer's, of a server that gives this answer."""
    said = httpx.Response(answer.status_code, content=answer.content)
    return ServerClient("http://s", "", transport=httpx.MockTransport(lambda _: said))


@pytest.mark.parametrize("largest", [8, 300])
async def test_the_trainer_reads_what_the_server_kept(largest: int, tmp_path: Path) -> None:
    """One byte an expert or two, over the route and the client."""
    store, whole = RoutingStore(), _experts(90, largest)
    store.remember(PROMPT, list(range(88)), whole)
    app, bridge = _served(store, tmp_path)
    assert bridge.info().records_routing
    asked = RoutingRequest(
        prompts=[prompt_digest(PROMPT)] * 2, completions=[list(range(88)), [3]], starts=[2, 0]
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as http:
        answer = await http.post("/bridge/routing", json=asked.model_dump())
    client = ServerClient(
        "http://s",
        "",
        transport=httpx.MockTransport(lambda _: httpx.Response(200, content=answer.content)),
    )
    first, second = client.routing(asked.prompts, asked.completions, asked.starts)
    assert first is not None and (first == whole[2:]).all() and second is None


async def test_a_server_that_records_nothing_says_how_it_would(tmp_path: Path) -> None:
    app, bridge = _served(None, tmp_path)
    assert not bridge.info().records_routing
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as http:
        answer = await http.post(
            "/bridge/routing", json={"prompts": [], "completions": [], "starts": []}
        )
    client = ServerClient(
        "http://s",
        "",
        transport=httpx.MockTransport(
            lambda _: httpx.Response(answer.status_code, content=answer.content)
        ),
    )
    with pytest.raises(EngineError, match="start it with --enable-return-routed-experts"):
        client.routing([], [], [])


def test_a_broken_answer_is_said() -> None:
    broken = {"found": [{"shape": [2, 2, 2], "data": "AAA="}]}
    client = _client(httpx.Response(200, json=broken))
    with pytest.raises(EngineError, match="malformed answer"):
        client.routing(["x"], [[1]], [0])


# The recorder of a CPU's worker


class Runner:
    """vLLM's, as far as the recorder sees it: two requests in blocks of 4 slots."""

    model_config = SimpleNamespace(
        get_total_num_hidden_layers=lambda: 2,
        get_num_experts_per_tok=lambda: 2,
        get_num_experts=lambda: 8,
    )

    def __init__(self, groups: int = 1) -> None:
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=4))
        self.kv_cache_config = SimpleNamespace(num_blocks=6, kv_cache_groups=[group] * groups)
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_id_to_index={})
        self.executed: list[Any] = []

    def get_model(self) -> None: ...

    def execute_model(self, scheduled: Any) -> None:
        self.executed.append(scheduled)

    def begin(self, name: str, prompt: list[int], blocks: list[int]) -> Any:
        self.requests[name] = SimpleNamespace(
            prompt_token_ids=prompt, output_token_ids=[], block_ids=(blocks,)
        )
        self.input_batch.req_id_to_index[name] = 0
        return self.requests[name]


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The forward pass that is under way."""
    here = SimpleNamespace(slot_mapping={})
    module = (
        "vllm.model_executor.layers.fused_moe.routed_experts_capturer.bind_routed_experts_capturer"
    )
    monkeypatch.setattr(module, lambda model, capturer: None)
    monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: here)
    return here


def _compute(
    recorder: SlotRecorder, context: Any, slots: list[int], seed: int
) -> np.ndarray[Any, Any]:
    """One pass over tokens in these slots; what their routers chose."""
    chosen = np.random.default_rng(seed).integers(0, 8, (len(slots), 2, 2))
    context.slot_mapping = {"layer": torch.tensor(slots)}
    for layer in range(2):
        recorder.capture(layer, torch.tensor(chosen[:, layer]))
    return chosen


def test_experts_lie_where_keys_and_values_do(context: Any) -> None:
    """Two passes over a request in blocks 2 and 0, padded rows beside it; a second one shares the
    first block."""
    runner = Runner()
    recorder = SlotRecorder(runner)
    recorder.capture(0, torch.zeros(3, 2))  # a pass of nobody's
    one = runner.begin("one", [1, 2, 3, 4, 5], [2, 0])
    first = _compute(recorder, context, [8, 9, 10, 11, 0, -1, -1], 1)[:5]
    one.output_token_ids = [6]
    second = _compute(recorder, context, [1], 2)
    one.output_token_ids = [6, 7]
    whole = np.concatenate([first, second])
    found = recorder.look_up([1, 2, 3, 4, 5, 6, 7])
    assert found is not None and (found == whole).all()
    assert (recorder.look_up([1, 2, 3, 4, 5, 6]) == whole[:5]).all(), "it may have gone on"  # type: ignore[union-attr]
    other = runner.begin("other", [1, 2, 3, 4, 9], [2, 3])
    own = _compute(recorder, context, [12], 3)
    other.output_token_ids = [8]
    shared = recorder.look_up([1, 2, 3, 4, 9, 8])
    assert shared is not None and (shared == np.concatenate([first[:4], own])).all(), (
        "from the prefix cache"
    )
    assert recorder.look_up([1, 2, 3, 4, 4]) is None


def test_what_has_ended_is_read_before_its_place_is_written_again(context: Any) -> None:
    runner = Runner()
    recorder = SlotRecorder(runner)
    one = runner.begin("one", [1, 2, 3], [4])
    chosen = _compute(recorder, context, [16, 17, 18], 1)
    one.output_token_ids = [7]
    scheduled = SimpleNamespace(finished_req_ids={"one", "never seen"})
    runner.execute_model(scheduled)
    assert runner.executed == [scheduled]
    del runner.requests["one"], runner.input_batch.req_id_to_index["one"]
    _compute(recorder, context, [16, 17, 18], 2)
    found = recorder.look_up([1, 2, 3, 7])
    assert found is not None and (found == chosen).all()


def test_a_model_of_several_caches_is_refused(context: Any) -> None:
    with pytest.raises(ValueError, match="2 kinds of KV cache"):
        SlotRecorder(Runner(groups=2))


# Flags


def _flags(**given: Any) -> Namespace:
    return Namespace(
        **{"enable_return_routed_experts": True, "enforce_eager": True, "worker_extension_cls": ""}
        | given
    )


def test_on_a_cpu_the_flag_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags.compat, "is_cpu", lambda: True)
    args = _flags()
    flags._prepare_routing(args)
    assert args.records_routing and not args.enable_return_routed_experts
    assert args.worker_extension_cls == flags.WORKER_EXTENSION
    with pytest.raises(ConfigError, match="add --enforce-eager"):
        flags._prepare_routing(_flags(enforce_eager=False))
    with pytest.raises(ConfigError, match="needs its own"):
        flags._prepare_routing(_flags(worker_extension_cls="mine.Extension"))


def test_elsewhere_it_is_vllm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags.compat, "is_cpu", lambda: False)
    args = _flags(enforce_eager=False, worker_extension_cls="mine.Extension")
    flags._prepare_routing(args)
    assert args.records_routing and args.enable_return_routed_experts
    without = Namespace(enforce_eager=False)
    flags._prepare_routing(without)
    assert not without.records_routing, "nor does an older vLLM have it"


def _machine_flags(**changes: Any) -> Namespace:
    given = {
        "nnodes": 1,
        "node_rank": 0,
        "headless": False,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
    }
    return Namespace(**given | {"data_parallel_size": 1} | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"headless": True}, "add --nnodes"),
        ({"node_rank": 1}, "add --nnodes"),
        ({"nnodes": 2, "node_rank": 1}, "--headless is for all machines but the first"),
        ({"nnodes": 2, "headless": True}, "--headless is for all machines but the first"),
        ({"nnodes": 2, "node_rank": 2, "headless": True}, "a number from 0 to 1"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "cannot be divided evenly"),
        ({"nnodes": 2, "data_parallel_size": 2}, "--data-parallel-size does not go with --nnodes"),
    ],
)
def test_the_server_refuses_flags_that_do_not_fit(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        flags.check_machines(_machine_flags(**changes))


def test_flags_that_fit_pass() -> None:
    for changes in ({}, {"nnodes": 2}, {"nnodes": 2, "node_rank": 1, "headless": True}):
        flags.check_machines(_machine_flags(**changes))
