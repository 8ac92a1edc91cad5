"""Measure what `/generate` costs beside the engine: CPU time of server and client per completion.

    python -m benchmarks.rollouts.engine_http [--tokens 300] [--against FOLDER] [--json]

The engine is a stand-in that returns each completion at once, with logprobs in vLLM's flat form.
Server (our routes and middleware under uvicorn) and client run in processes of their own. Clients:

    atroposlib     its `VLLMServer`: token ids and logprobs as a list of dicts
    ours           `EngineClient`, which asks for plain arrays
    rollout        ours, and atroposlib's `ManagedServer` over it, as environments use it

`--against` is a checkout of another commit, whose server and client run as "before".
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.support.checks import Checks
from benchmarks.support.children import Child, answer, free_ports
from benchmarks.support.shapes import byte_level

ROOT = Path(__file__).resolve().parents[2]
READY_S = 120.0
WORKERS = 32  # groups in flight
WARM_UP = 40  # groups before the measurement
PROMPT_TOKENS = 150
CLIENTS = "atroposlib", "ours", "rollout"
SPECIAL = ["<|pad|>", "<|eos|>"]


@dataclass(frozen=True)
class Cost:
    """CPU milliseconds per completion."""

    version: str
    client: str
    server_ms: float
    client_ms: float
    completions_per_s: float


def make_tokenizer(folder: Path) -> None:
    """Save a byte-level tokenizer without merges."""
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = byte_level(models.BPE({token: at for at, token in enumerate([*SPECIAL, *letters])}, []))
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[1]
    ).save_pretrained(folder)


class InstantEngine:
    """vLLM's engine client as far as `Generator` uses it."""

    def __init__(self, tokenizer: Any, tokens: int) -> None:
        from vllm.logprobs import FlatLogprobs

        self.tokenizer = tokenizer
        self.model_config = SimpleNamespace(get_vocab_size=lambda: len(tokenizer))
        dice = random.Random(0)
        ids = [*tokenizer.encode("x" + "so 3 + 4 = 7. " * tokens)[: tokens - 1], 1]
        logprobs = FlatLogprobs()
        for token in ids:
            logprobs.append_fast([token], [math.log(dice.uniform(0.01, 1))], iter([1]), [None])  # type: ignore[arg-type]
        self._made = {"token_ids": ids, "logprobs": logprobs, "finish_reason": "stop", "text": ""}

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0)
        now = time.monotonic()
        yield SimpleNamespace(
            outputs=[SimpleNamespace(**self._made)],
            metrics=SimpleNamespace(first_token_ts=now, last_token_ts=now),
            prompt_logprobs=None,
            num_cached_tokens=0,
            finished=True,
        )


async def serve(port: int, model: Path, tokens: int) -> None:
    """Serve our routes over the stand-in; print the CPU seconds so far for each line of input."""
    import uvicorn
    from fastapi import FastAPI
    from transformers import AutoTokenizer

    from atropos_common.net.connections import ConnectionLimits
    from atropos_common.net.http import allowed_hosts
    from vllm_server import auth, generate, refusals
    from vllm_server.versions import SpanStore, VersionHistory

    engine = InstantEngine(AutoTokenizer.from_pretrained(model), tokens)
    spans = SpanStore(model / "spans")
    generator = generate.Generator(engine, history=VersionHistory(), spans=spans, model_names=["m"])
    app = FastAPI()
    app.include_router(generate.make_router(generator))
    for middleware in (refusals.PlainSampling, auth.AuthMiddleware, refusals.Refusals):
        app.add_middleware(middleware)
    hold = auth.GenerationHold(held=False)
    app.state.atropos_access = auth.Access("t" * 32, allowed_hosts("127.0.0.1", ()), hold)
    http = ConnectionLimits().protocol()
    options: dict[str, Any] = {"http": http, "log_level": "warning", "loop": "uvloop"}
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, **options))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    await _answer_lines(_cpu_s)
    server.should_exit = True
    await task


async def _cpu_s(_: Any) -> float:
    return time.process_time()


async def _answer_lines(work: Callable[[Any], Coroutine[Any, Any, Any]]) -> None:
    answer("ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        answer(await work(json.loads(line)))


async def drive(port: int, model: Path, tokens: int, kind: str) -> None:
    """Request groups of 8 from the server; each line of input is a number of groups."""
    from atropos_envs import without_torch

    without_torch()
    from atroposlib.envs.base import APIServerConfig
    from atroposlib.envs.server_handling.managed_server import ManagedServer
    from atroposlib.envs.server_handling.vllm_server import VLLMServer

    from atropos_envs.hosting.engine_client import EngineClient

    config = APIServerConfig(
        base_url=f"http://127.0.0.1:{port}/v1", model_name=str(model), api_key="k", timeout=60
    )
    client = (VLLMServer if kind == "atroposlib" else EngineClient)(config)
    client.initialized = client.server_healthy = True
    prompt = client.tokenizer.encode("3 + 4 = " * PROMPT_TOKENS)[:PROMPT_TOKENS]
    text = client.tokenizer.decode(prompt)
    sampling = {"n": 8, "max_tokens": tokens, "temperature": 1.0}

    async def group() -> int:
        if kind == "rollout":
            managed = ManagedServer(client, client.tokenizer)
            await managed.completion(prompt=text, **sampling)
            return len(managed.get_state()["nodes"])
        done = await client.tokens_and_logprobs_completion(input_ids=list(prompt), **sampling)
        assert len(done[2]) == 8 and len(done[2][0]) == tokens
        return 8

    async def work(groups: int) -> dict[str, float]:
        slots, began, cpu = asyncio.Semaphore(WORKERS), time.perf_counter(), time.process_time()

        async def one() -> int:
            async with slots:
                return await group()

        made = sum(await asyncio.gather(*(one() for _ in range(groups))))
        lasted_s = time.perf_counter() - began
        return {"cpu_s": time.process_time() - cpu, "made": made, "lasted_s": lasted_s}

    await _answer_lines(work)


def measure(asked: argparse.Namespace, version: str, root: Path, kind: str) -> Cost:
    with tempfile.TemporaryDirectory(prefix="engine-http-") as place:
        folder = Path(place)
        make_tokenizer(folder / "model")
        (port,) = free_ports(1)
        # Without `-P` this folder would come before `root` on the import path.
        command = ["-P", __file__, "--port", str(port), "--tokens", str(asked.tokens)]
        command += ["--model", str(folder / "model")]
        env = os.environ | {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        env["TOKENIZERS_PARALLELISM"] = "false"
        server = Child(folder / "server", [*command, "--role", "server"], env)
        client = Child(folder / "client", [*command, "--role", kind], env)
        try:
            for part in (server, client):
                part.wait(READY_S)
            client.ask(WARM_UP, READY_S)
            before = server.ask(0, READY_S)
            found = client.ask(asked.groups, READY_S)
            server_s = server.ask(0, READY_S) - before
        finally:
            for part in (client, server):
                part.close()
        each = 1e3 / found["made"]
        rate = found["made"] / found["lasted_s"]
        return Cost(version, kind, server_s * each, found["cpu_s"] * each, rate)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.rollouts.engine_http", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--tokens", type=int, default=300, help="tokens of a completion")
    parser.add_argument("--groups", type=int, default=400, help="groups of 8 per measurement")
    parser.add_argument("--clients", nargs="+", default=list(CLIENTS), choices=CLIENTS)
    parser.add_argument("--against", type=Path, help="a checkout of another commit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for hidden in ("--role", "--port", "--model"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.role:
        import uvloop

        role = (int(asked.port), Path(asked.model), asked.tokens)
        work = serve(*role) if asked.role == "server" else drive(*role, asked.role)
        with suppress(KeyboardInterrupt):
            uvloop.run(work)
        return 0
    versions = [("before", asked.against.resolve())] if asked.against else []
    versions.append(("now", ROOT))
    costs = []
    if not asked.json:
        print(f"{'':8}{'client':12}{'server CPU ms':>15}{'client CPU ms':>15}{'completions/s':>15}")
    for kind in asked.clients:
        for version, root in versions:
            costs.append(cost := measure(asked, version, root, kind))
            if not asked.json:
                print(
                    f"{version:8}{kind:12}{cost.server_ms:15.3f}{cost.client_ms:15.3f}"
                    f"{cost.completions_per_s:15.0f}",
                    flush=True,
                )
    if asked.json:
        print(json.dumps({"tokens": asked.tokens, "costs": [asdict(cost) for cost in costs]}))
    now, checks = {cost.client: cost for cost in costs if cost.version == "now"}, Checks()
    if {"ours", "atroposlib"} <= now.keys():
        for side in ("server_ms", "client_ms"):
            share = getattr(now["ours"], side) / getattr(now["atroposlib"], side)
            checks.at_most(f"{side} of our client, as a share of atroposlib's,", share, 0.7)
    return checks.status()


if __name__ == "__main__":
    sys.exit(main())
