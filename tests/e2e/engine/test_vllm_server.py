"""The inference server with real vLLM on the CPU: contract, single copy, weight versions, auth, and
its end.

pytest -m e2e tests/e2e/engine/test_vllm_server.py        # three servers, one after the other
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import torch

from atropos_common.net import ports
from atropos_common.protocol.bridge import ARRAYS, FORM_HEADER, prompt_digest
from atropos_common.system.run_dir import ENV_HELD_PORT, ENV_LOADS_AFTER
from atropos_tui.profile.ports import free_port
from tests.e2e.vllm_server_live import (
    TOKEN,
    Server,
    await_ready,
    begin_server,
    cache_hits,
    client,
    digests,
    end_of,
    largest_gap,
    mapped,
    reference_logprobs,
    start_server,
    still_running,
)
from tests.support.json_server import JsonServer
from tests.support.other_user import needs_another_user, other_user, squat
from trainer_core.config import TrainingConfig
from trainer_core.probe import LogprobProbe
from trainer_core.server.client import ServerClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROMPT = [3, 12, 4, 13]
LONG_PROMPT = [2 + i * 7 % 12 for i in range(75)]
"""More than two cache blocks of 32 tokens."""
PREFILLED_AT_ONCE = 128
"""Tokens that the engine takes in one step: longer prompts come in parts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from atropos_envs.tiny_model import build_tiny_model, save_model

    return save_model(build_tiny_model(seed=3), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    in_parts = ("--max-num-batched-tokens", str(PREFILLED_AT_ONCE), "--max-num-seqs", "64")
    running = start_server(
        tmp_path_factory.mktemp("server"), model, flags=in_parts, ATROPOS_TOKEN=TOKEN
    )
    print(f"\nstart to /health_generate: {running.started_s:.1f} s")
    yield running
    end_of(running.process)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    """The same model in transformers; tests that change the server's weights change these too."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


async def test_atroposlib_s_own_client_gets_tokens_and_true_logprobs(
    server: Server, reference: Any
) -> None:
    atropos = client(server)
    prompt, tokens, logprobs, reasons = await asyncio.wait_for(
        atropos.tokens_and_logprobs_completion(prompt="1+2=", n=6, max_tokens=8, temperature=1.0),
        timeout=60,
    )
    atropos.check_task.cancel()
    assert prompt == PROMPT
    assert len(tokens) == len(logprobs) == len(reasons) == 6
    assert set(reasons) <= {"stop", "length"}
    for ids, values in zip(tokens, logprobs, strict=True):
        expected = reference_logprobs(reference, prompt, ids)
        assert max(abs(a - b) for a, b in zip(values, expected, strict=True)) < 1e-4
    assert len({tuple(ids) for ids in tokens}) > 1, "n completions are sampled, not copied"


def test_arrays_are_the_numbers_of_the_usual_answer(server: Server, reference: Any) -> None:
    body = {"prompt": PROMPT, "n": 4, "max_tokens": 8}
    answer = server.post("/generate", body, token=False, headers={FORM_HEADER: ARRAYS}).json()
    assert "text" not in answer and "logprobs" not in answer
    assert len({tuple(ids) for ids in answer["token_ids"]}) > 1, "each has its own random numbers"
    for ids, values in zip(answer["token_ids"], answer["sampled_logprobs"], strict=True):
        expected = reference_logprobs(reference, PROMPT, ids)
        assert max(abs(a - b) for a, b in zip(values, expected, strict=True)) < 1e-4


def test_a_probe_of_prompts_that_are_prefilled_in_parts(server: Server, reference: Any) -> None:
    """The engine lives on, and its answers are those of the same weights: the sampled ones and the
    anchor."""
    prompts = [[2 + i * (7 + n) % 12 for i in range(PREFILLED_AT_ONCE + 60)] for n in range(2)]
    rollouts = [
        SimpleNamespace(tokens=torch.tensor(prompt), prompt_length=len(prompt))
        for prompt in prompts
    ]
    asker = ServerClient(server.url, TOKEN)
    prober = LogprobProbe(
        [asker], TrainingConfig(model_name="m", probe_prompts=2, max_model_len=256)
    )
    prober.learn(SimpleNamespace(rollouts=rollouts))  # type: ignore[arg-type]
    for step in (1, 2):
        prober.start(step, asker.info().weight_version)  # type: ignore[arg-type]
        found = prober.finish(reference)
        assert found is not None and found.anchor is not None
        assert max(found.fresh.abs_max, found.cached.abs_max, found.anchor.abs_max) < 1e-4
        assert found.anchor.inference != found.fresh.inference
    prober.close()


async def test_atroposlib_s_client_scores_a_prompt(server: Server, reference: Any) -> None:
    result = await client(server)._get_logprobs_wrapper(input_ids=LONG_PROMPT, top_k=2)
    scored = [
        dict(zip(ids, values, strict=True))
        for ids, values in zip(
            result["prompt_topk_token_ids"], result["prompt_topk_logprobs"], strict=True
        )
    ]
    assert scored[0] == {}
    expected = reference_logprobs(reference, LONG_PROMPT[:1], LONG_PROMPT[1:])
    mine = [scored[i][LONG_PROMPT[i]] for i in range(1, len(LONG_PROMPT))]
    assert max(abs(a - b) for a, b in zip(mine, expected, strict=True)) < 1e-4


def test_a_bare_request_returns_logprobs_and_the_text(server: Server) -> None:
    answer = server.generate(prompt="1+2=", max_tokens=3)
    assert answer["prompt"] == "1+2="
    assert answer["prompt_token_ids"] == PROMPT
    assert len(answer["text"]) == len(answer["logprobs"]) == 1
    assert server.generate(prompt={"prompt_token_ids": PROMPT}, max_tokens=3)["prompt"] == "1+2="


def test_rollouts_beside_requests_for_other_numbers_of_logprobs(
    server: Server, reference: Any
) -> None:
    """An engine's arrays are as wide in a step as the request with the most logprobs wants."""
    asked = [0, 3, 0, 1, 0, 5]

    def one(at: int) -> dict[str, Any]:
        time.sleep(0.05 * at)
        prompt = {"prompt_token_ids": [*PROMPT, 2 + at]}
        return server.generate(
            prompt=prompt, max_tokens=60, ignore_eos=True, logprobs=asked[at], n=2
        )

    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(one, range(len(asked))))
    for number, answer in zip(asked, answers, strict=True):
        assert largest_gap(reference, answer) < 1e-4
        wanted = {number, number + 1} if number else {1}
        assert {len(entry) for one in answer["logprobs"] for (entry,) in one} <= wanted


def test_logprobs_that_nobody_asked_for_are_known_afterwards(
    server: Server, reference: Any
) -> None:
    """vLLM's own routes answered without logprobs: requested later, they are those of the same
    tokens, by transformers."""
    asker = ServerClient(server.url, TOKEN)
    request = {
        "model": str(server.model),
        "prompt": PROMPT,
        "n": 4,
        "max_tokens": 6,
        "return_token_ids": True,
    }
    answer = server.post("/v1/completions", {**request, "temperature": 0.7}, token=False).json()
    completions = [choice["token_ids"] for choice in answer["choices"]]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    found = asker.logprobs([prompt_digest(PROMPT)] * 4, completions)
    for ids, known in zip(completions, found, strict=True):
        assert known is not None and known.temperature == 0.7
        expected = reference_logprobs(reference, PROMPT, ids, 0.7)
        assert max(abs(a - b) for a, b in zip(known.logprobs, expected, strict=True)) < 1e-4
    cut = asker.logprobs([prompt_digest(PROMPT)], [completions[0][:2]])[0]
    assert cut is not None and cut.logprobs == found[0].logprobs[:2]  # type: ignore[union-attr]
    narrow = server.post(
        "/v1/completions", {**request, "prompt": [9, 9, 9], "top_p": 0.5}, token=False
    ).json()
    ids = narrow["choices"][0]["token_ids"]
    assert asker.logprobs([prompt_digest([9, 9, 9])], [ids]) == [None], (
        "their logprobs would be of a part"
    )
    assert server.post(
        "/bridge/logprobs", {"prompts": [], "completions": []}, token=False
    ).status_code in (401, 403)


def test_temperature_is_in_the_logprobs(server: Server, reference: Any) -> None:
    """`processed_logprobs`: what was sampled from, not the raw distribution."""
    import torch

    answer = server.generate(prompt=PROMPT, max_tokens=5, temperature=0.5, seed=4, ignore_eos=True)
    tokens = answer["token_ids"][0]
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
        expected = (logits / 0.5).log_softmax(-1)[range(5), tokens].tolist()
    mine = [
        position[0][str(token)]
        for token, position in zip(tokens, answer["logprobs"][0], strict=True)
    ]
    assert max(abs(a - b) for a, b in zip(mine, expected, strict=True)) < 1e-4


def test_a_seed_repeats_and_n_completions_differ(server: Server) -> None:
    body = {"prompt": PROMPT, "n": 4, "max_tokens": 6, "seed": 11, "ignore_eos": True}
    first, second = server.generate(**body), server.generate(**body)
    assert first["token_ids"] == second["token_ids"]
    assert len({tuple(tokens) for tokens in first["token_ids"]}) > 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": [10**6]}, "vocabulary"),
        ({"prompt": [2] * 300}, "256"),
        ({"prompt": ""}, "empty"),
        ({"prompt": PROMPT, "temperature": "hot"}, "temperature"),
        ({"prompt": PROMPT, "logprobs": 1000}, "logprobs"),
        ({"prompt": PROMPT, "stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"prompt": PROMPT, "allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": PROMPT, "logit_bias": {"1000000": 1.0}}, "logit_bias"),
        ({"prompt": PROMPT, "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"prompt": PROMPT, "model": "gpt-99"}, "not served"),
        ({}, "prompt"),
    ],
)
def test_bad_input_is_a_400_with_its_reason(
    server: Server, body: dict[str, Any], says: str
) -> None:
    answer = server.post("/generate", body, token=False)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]
    assert "Traceback" not in answer.text
    assert server.get("/health_generate").status_code == 200


def test_the_manifest_names_every_parameter_once(server: Server, reference: Any) -> None:
    manifest = server.manifest()
    shard = manifest.ranks[0]
    assert manifest.instance_id == server.get("/bridge/info").json()["instance_id"]
    assert manifest.server_pid == server.process.pid
    assert psutil.Process(manifest.server_pid).create_time() == manifest.server_create_time
    assert manifest.architecture == "Qwen3ForCausalLM"
    assert shard.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert {
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.3.mlp.gate_up_proj.weight",
    } <= set(shard.param_mappings)
    assert server.get("/bridge/info").json()["exported"] == len(shard.param_mappings)
    assert f"Exported {len(shard.param_mappings)} params" in server.log.read_text()
    assert shard.shm_path is not None
    assert Path(shard.shm_path).stat().st_mode & 0o777 == 0o600
    down = mapped(manifest, "model.layers.1.mlp.down_proj.weight")
    assert down.equal(reference.model.layers[1].mlp.down_proj.weight)


def test_a_write_from_another_process_changes_the_answers_cached_prefix_included(
    server: Server, reference: Any
) -> None:
    import torch

    body = {"prompt": LONG_PROMPT, "n": 3, "max_tokens": 8, "ignore_eos": True, "temperature": 1.0}
    assert largest_gap(reference, server.generate(**body)) < 1e-4
    hits = cache_hits(server)
    assert largest_gap(reference, server.generate(**body)) < 1e-4
    assert cache_hits(server) > hits, "the second request must have used the cached prefix"

    manifest = server.manifest()
    gate_up = mapped(manifest, "model.layers.0.mlp.gate_up_proj.weight")
    head = mapped(manifest, "lm_head.weight")
    rows = reference.config.intermediate_size
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(gate_up.shape, generator=generator) * 0.05
    tilt = torch.randn(reference.config.vocab_size, head.shape[1], generator=generator) * 0.05

    def write() -> None:
        gate_up.add_(noise)
        head[: reference.config.vocab_size].add_(tilt)

    server.publish(1, write)
    after = server.generate(**body)
    assert largest_gap(reference, after) > 1e-2, (
        "the unchanged reference must be off now, or this test sees nothing"
    )
    reference = copy.deepcopy(reference)  # other tests have it as well
    with torch.no_grad():
        layer = reference.model.layers[0].mlp
        layer.gate_proj.weight.add_(noise[:rows])
        layer.up_proj.weight.add_(noise[rows:])
        reference.model.embed_tokens.weight.add_(tilt)
    assert largest_gap(reference, after) < 1e-4
    assert (
        largest_gap(reference, server.generate(prompt=PROMPT, n=4, max_tokens=8, ignore_eos=True))
        < 1e-4
    )


def test_each_completion_knows_its_versions_even_across_a_publish(
    server: Server, reference: Any
) -> None:
    """With a norm of zeros all logits are equal, so each logprob tells which weights made it."""
    norm = mapped(server.manifest(), "model.norm.weight")
    true = norm.clone()
    server.publish(5)
    plain = server.generate(prompt=PROMPT, n=2, max_tokens=4, ignore_eos=True)
    assert plain["weight_versions"] == [[5, 5], [5, 5]]

    async def across() -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=60) as http:
            body = {"prompt": PROMPT, "n": 48, "max_tokens": 240, "ignore_eos": True}
            for _ in range(5):  # a request may be over before a busy machine has seen it run
                running = asyncio.create_task(http.post(server.url + "/generate", json=body))
                while not running.done() and not await asyncio.to_thread(requests_running, server):
                    await asyncio.sleep(0.02)
                assert (
                    await asyncio.to_thread(server.post, "/bridge/pause", {"lease_s": 30})
                ).status_code == 200
                await asyncio.sleep(0.3)  # what was done before the pause arrives
                frozen = not running.done()
                await asyncio.sleep(0.3)
                assert running.done() != frozen, "frozen requests must not finish"
                if frozen:
                    norm.zero_()
                await asyncio.to_thread(
                    server.post, "/bridge/resume", {"weight_version": 6 if frozen else 5}
                )
                answer = await running
                assert answer.status_code == 200, answer.text
                if frozen:
                    return answer.json()
            raise AssertionError("no request was caught in flight")

    try:
        crossed = asyncio.run(across())
    finally:
        server.publish(7, lambda: norm.copy_(true))
    assert all(len(tokens) == 240 for tokens in crossed["token_ids"]), "frozen requests survive"
    assert [5, 6] in crossed["weight_versions"]
    uniform = -math.log(reference.config.vocab_size)
    for runs, rows in zip(crossed["token_versions"], crossed["logprobs"], strict=True):
        by_weights = [
            6 if abs(logprob - uniform) < 1e-4 else 5 for (row,) in rows for logprob in row.values()
        ]
        assert [version for version, tokens in runs for _ in range(tokens)] == by_weights
    asked = digests(plain) + digests(crossed) + ["0" * 32]
    found = server.post("/bridge/versions", {"digests": asked}).json()["versions"]
    assert found == plain["weight_versions"] + crossed["weight_versions"] + [None]
    stamp = json.loads((server.bridge_dir / "state.json").read_text())
    assert stamp == {"instance_id": server.manifest().instance_id, "weight_version": 7}


def test_a_client_that_leaves_cancels_its_request(server: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            server.url + "/generate",
            json={"prompt": PROMPT, "n": 500, "max_tokens": 250, "ignore_eos": True},
            timeout=0.3,
        )
    deadline = time.monotonic() + 6
    while requests_running(server):
        assert time.monotonic() < deadline, "the engine still works for a client that left"
        time.sleep(0.05)


def requests_running(server: Server) -> float:
    return metric(server, "vllm:num_requests_running")


def metric(server: Server, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_the_auth_middleware(server: Server) -> None:
    for path in ("/bridge/info", "/lora/status", "/bridge/no-such-route"):
        assert server.get(path, token=False).status_code == 403
    assert server.post("/v1/load_lora_adapter", {}, token=False).status_code == 403
    assert server.post("/bridge/pause", {}, token=False).status_code == 403
    assert server.get("/bridge/is_paused").json() == {"paused": False}
    rebound = httpx.get(server.url + "/health", headers={"Host": "evil.example"})
    assert rebound.status_code == 403
    assert server.get("/health", token=False).status_code == 200
    assert server.get("/v1/models", token=False).json()["data"][0]["id"] == str(server.model)
    assert server.get("/lora/status").json()["enabled"] is False
    assert server.post("/bridge/sleep").status_code == 501


def test_leases(server: Server) -> None:
    server.post("/bridge/resume", {"weight_version": 6})
    server.post("/bridge/pause", {"lease_s": 2})
    paused = time.monotonic()
    assert server.get("/health_generate").json()["paused"] is True
    while server.get("/bridge/is_paused").json() == {"paused": True}:
        assert time.monotonic() - paused < 10
        time.sleep(0.05)
    assert time.monotonic() - paused > 1
    assert server.generate(prompt=PROMPT, max_tokens=2)["weight_versions"] == [[6, 6]]

    server.post("/bridge/pause", {"lease_s": 0.2, "dirty": True})
    paused = time.monotonic()
    while server.get("/health", token=False).status_code == 200:
        assert time.monotonic() - paused < 10
        time.sleep(0.05)
    for path in ("/health", "/health_generate"):
        unhealthy = server.get(path, token=False)
        assert unhealthy.status_code == 503
        assert "half-written" in unhealthy.json()["error"]
    assert server.post("/generate", {"prompt": PROMPT}, token=False).status_code == 503
    server.post("/bridge/resume", {"weight_version": 7})
    assert server.get("/health_generate").status_code == 200


def test_an_idle_connection_is_left_to_the_client_to_close(server: Server) -> None:
    """An environment may think for longer than uvicorn's five seconds, and send on the connection
    that it has."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        connection.sendall(ask)
        assert b"200 OK" in connection.recv(4096)
        time.sleep(6)
        connection.sendall(ask)
        assert b"200 OK" in connection.recv(4096)


def test_keep_alive_calls_do_not_wait_for_nagle(server: Server) -> None:
    """With Nagle's algorithm on, every single call takes over 40 ms; the fastest of many is deaf to
    a busy machine."""
    body = {"prompt": PROMPT, "max_tokens": 1}
    calls = []
    with httpx.Client() as http:
        for _ in range(20):
            begun = time.monotonic()
            http.post(server.url + "/generate", json=body)
            calls.append(time.monotonic() - begun)
    print(
        f"\n/generate of one token: fastest {min(calls) * 1000:.1f} ms, median "
        f"{sorted(calls)[10] * 1000:.1f} ms"
    )
    assert min(calls) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("part", ["EngineCore", "Worker_TP1"])
def test_a_server_whose_engine_was_killed_ends_as_one_that_crashed(
    tmp_path: Path, model: Path, part: str
) -> None:
    """A worker takes its engine along, whose process still runs when the server sees it; nobody has
    to ask anything."""
    server = start_server(
        tmp_path,
        model,
        flags=("--tensor-parallel-size", "2"),
        ATROPOS_TOKEN=TOKEN,
        VLLM_ENABLE_SHARED_WEIGHTS="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    try:
        family = psutil.Process(server.process.pid).children(recursive=True)
        (killed,) = (process for process in family if part in " ".join(process.cmdline()))
        begun = time.monotonic()
        killed.kill()
        assert server.process.wait(60) == 1, server.log.read_text()[-3000:]
        print(f"\nSIGKILL of {part} to exit: {time.monotonic() - begun:.1f} s")
        assert (
            "[vllm_server] the engine died; its own log lines are above" in server.log.read_text()
        )
    finally:
        end_of(server.process)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_it_imports_at_once_and_loads_after_the_engine_before_it(
    tmp_path: Path, model: Path, executor: str
) -> None:
    healthy = threading.Event()
    other = JsonServer(lambda *_: (200 if healthy.is_set() else 503, {}))
    flags = ("--distributed-executor-backend", executor)
    variables = {ENV_LOADS_AFTER: other.url, "ATROPOS_TOKEN": TOKEN}
    server = begin_server(tmp_path, model, flags=flags, **variables)
    try:
        waits = f"waits for {other.url}"
        while waits not in server.log.read_text():
            assert server.process.poll() is None, server.log.read_text()[-3000:]
            time.sleep(0.1)
        time.sleep(2)
        assert "Loading weights took" not in server.log.read_text()
        healthy.set()
        await_ready(server)
        assert "Loading weights took" in server.log.read_text()
    finally:
        end_of(server.process)
        other.close()


@pytest.mark.slow
@needs_another_user
def test_its_port_is_nobody_else_s_before_and_after_it(tmp_path: Path, model: Path) -> None:
    """As under a supervisor: another user tries for the port while it loads, serves, is killed and
    comes again."""
    port = free_port()
    held = {ENV_HELD_PORT: str(port), "ATROPOS_TOKEN": TOKEN}
    with (
        contextlib.closing(ports.hold(port)),
        other_user(lambda: squat(port, 280.0, pause_s=0.002)) as other,
    ):
        for number in (signal.SIGKILL, signal.SIGTERM):
            server = start_server(tmp_path, model, port=port, **held)
            try:
                assert server.get("/bridge/info").status_code == 200
                with pytest.raises(OSError, match="in use"):
                    ports.bind("127.0.0.1", port, held=True)
                server.process.send_signal(number)
                server.process.wait(20)
                with pytest.raises(httpx.ConnectError, match="refused"):
                    server.get("/bridge/info")
            finally:
                end_of(server.process)
        assert other.waits(), other.said()


def test_sigterm_ends_it_cleanly_and_leaves_nothing(tmp_path: Path, model: Path) -> None:
    """The log has each reason of a refused request at once, whether we or vLLM refused it, and the
    rest when the server ends. vLLM itself leaves its sockets and the file of its group."""
    temporary = Path(tempfile.mkdtemp(prefix="s-"))
    server = start_server(
        tmp_path, model, ATROPOS_TOKEN=TOKEN, ATROPOS_SAMPLING="refuse", TMPDIR=str(temporary)
    )
    assert len(list(temporary.rglob("*"))) > 2, "what vLLM makes there"
    shm = Path(server.manifest().ranks[0].shm_path or "")
    assert shm.exists()
    chat = {"model": "another", "messages": [{"role": "user", "content": "1+2="}]}
    asked = [
        ("/generate", {"prompt": PROMPT, "top_p": 0.9}, "/generate (400): top_p=0.9: changes"),
        (
            "/generate",
            {"prompt": LONG_PROMPT * 4},
            "/generate (400): This model's maximum context length",
        ),
        (
            "/v1/completions",
            {"model": str(model), "prompt": "1", "logprobs": 0, "min_p": 0.1},
            "min_p=0.1: changes",
        ),
        (
            "/v1/completions",
            {"model": str(model), "prompt": "1", "max_tokens": 10**6},
            "/v1/completions (400): ",
        ),
        (
            "/v1/chat/completions",
            chat,
            "/v1/chat/completions (404): The model `another` does not exist.",
        ),
    ]
    for path, body, _ in asked:
        for _ in range(3):
            assert server.post(path, body, token=False).status_code in (400, 404)
    server.generate(prompt=PROMPT)
    said = [
        line for line in server.log.read_text().splitlines() if "[vllm_server] refused " in line
    ]
    for _, _, words in asked:
        assert [line for line in said if words in line and "refused 1 request " in line], (
            words,
            said,
        )
    family = psutil.Process(server.process.pid).children(recursive=True)
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(15) == 0, server.log.read_text()[-3000:]
    print(f"\nSIGTERM to exit: {time.monotonic() - begun:.1f} s")
    text = server.log.read_text()
    assert text.count("[vllm_server] refused 3 requests to ") == len(asked)
    assert text.index("refused 3 requests to ") < text.index("[vllm_server] stopped")
    assert not shm.exists()
    assert not (server.bridge_dir / "vllm_bridge_config.json").exists()
    psutil.wait_procs(
        family, timeout=2
    )  # the kernel kills them with their parent, an instant later
    assert not still_running(family)
    left = list(temporary.rglob("*"))  # torch's compile cache stays for the next server
    assert not [path for path in left if not path.name.startswith("torchinductor_")]


@pytest.mark.slow
def test_sampling_as_asked_has_the_logprobs_of_the_whole_distribution(
    tmp_path: Path, model: Path, reference: Any
) -> None:
    """At each request's own temperature, in one batch with others; greedy ones have the model's
    own."""
    server = start_server(tmp_path, model, ATROPOS_TOKEN=TOKEN, ATROPOS_SAMPLING="as_asked")
    asked = [
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.6, "min_p": 0.1},
        {"temperature": 0.0},
        {"temperature": 1.3},
    ]
    with ThreadPoolExecutor(len(asked)) as threads:
        begin = partial(server.generate, prompt=PROMPT, max_tokens=24, ignore_eos=True)
        answers = list(threads.map(lambda one: begin(**one), asked))
    for one, answer in zip(asked, answers, strict=True):
        (tokens,) = answer["token_ids"]
        theirs = [next(iter(row[0].values())) for row in answer["logprobs"][0]]
        ours = reference_logprobs(reference, PROMPT, tokens, temperature=one["temperature"] or 1.0)
        assert max(abs(a - b) for a, b in zip(theirs, ours, strict=True)) < 1e-4, one
    end_of(server.process)


@pytest.mark.parametrize(
    ("several", "children"), [("0", 1), pytest.param("1", 2, marks=pytest.mark.slow)]
)
def test_hold_then_sigkill(tmp_path: Path, model: Path, several: str, children: int) -> None:
    """A restarted server answers no rollout before it knows its version. Killed hard, it takes its
    children along: its engine, and where vLLM starts them apart, the engine's worker and a resource
    tracker."""
    server = start_server(
        tmp_path,
        model,
        ATROPOS_HOLD_GENERATION="1",
        ATROPOS_SHM_NAME=f"atropos-e2e-{os.getpid()}",
        VLLM_ENABLE_V1_MULTIPROCESSING=several,
    )
    shm = Path(f"/dev/shm/atropos-e2e-{os.getpid()}")
    try:
        token_file = server.bridge_dir / "token"
        assert token_file.stat().st_mode & 0o777 == 0o600
        server.token = token_file.read_text()
        assert server.token not in server.log.read_text()
        assert server.get("/bridge/info").json()["held"] is True
        body = {"prompt": PROMPT, "max_tokens": 2}
        with pytest.raises(httpx.ReadTimeout):
            server.post("/generate", body, token=False, timeout=0.7)
        assert server.post("/generate", body, token=True).json()["weight_versions"] == [[0, 0]]
        assert server.get("/health_generate", token=False).json()["held"] is True

        async def held() -> dict[str, Any]:
            async with httpx.AsyncClient(timeout=60) as http:
                waiting = asyncio.create_task(http.post(server.url + "/generate", json=body))
                await asyncio.sleep(0.3)
                assert not waiting.done()
                await asyncio.to_thread(server.post, "/bridge/resume", {"weight_version": 9})
                return (await waiting).json()

        assert asyncio.run(held())["weight_versions"] == [[9, 9]]
        assert shm.exists()

        family = psutil.Process(server.process.pid).children(recursive=True)
        assert len(family) >= children
        begun = time.monotonic()
        server.process.kill()
        server.process.wait(5)
        while (alive := still_running(family)) and time.monotonic() - begun < 2:
            time.sleep(0.01)
        print(
            f"\nSIGKILL to the last child's end: {time.monotonic() - begun:.2f} s, "
            f"{len(family)} children"
        )
        assert not alive
    finally:
        end_of(server.process)
        shm.unlink(missing_ok=True)
