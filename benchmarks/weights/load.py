"""Put a fixed load on an engine, over HTTP or in process; a child of `weight_sync.py`.

    python -m benchmarks.weights.load http
    python -m benchmarks.weights.load engine [flags of vLLM's server]

Each line on stdin is a `Load`; the answer is `{"tokens": ..., "seconds": ..., "tokens_per_s":
...}`. All requests start together, every completion has exactly `max_tokens` tokens, and answers
are parsed after the clock has stopped, so that the client's own work is not measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.support.children import answer


@dataclass(frozen=True)
class Load:
    """`requests` prompts of `prompt_tokens` random ids below `vocabulary`, all different, all at
    once."""

    vocabulary: int
    url: str = ""
    route: str = "/generate"
    model: str = ""
    requests: int = 64
    prompt_tokens: int = 64
    max_tokens: int = 256
    seed: int = 0
    logprobs: bool = False
    """True to request logprobs; `/generate` always returns them."""

    def prompts(self) -> list[list[int]]:
        dice = random.Random(self.seed)
        return [
            [dice.randrange(2, self.vocabulary) for _ in range(self.prompt_tokens)]
            for _ in range(self.requests)
        ]

    def body(self, prompt: list[int]) -> dict[str, Any]:
        common: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        if self.route == "/generate":
            return common | {"prompt": {"prompt_token_ids": prompt}, "logprobs": 0}
        return (
            common
            | {"prompt": prompt, "model": self.model}
            | ({"logprobs": 0} if self.logprobs else {})
        )

    def tokens_in(self, reply: dict[str, Any]) -> int:
        if self.route == "/generate":
            return sum(len(ids) for ids in reply["token_ids"])
        return int(reply["usage"]["completion_tokens"])


Run = Callable[[Load], Awaitable[tuple[float, int]]]
"""Carries out a load; seconds and number of generated tokens."""


async def over_http() -> None:
    import aiohttp

    headers = {
        "Content-Type": "application/json",
        "X-Atropos-Token": os.environ.get("ATROPOS_TOKEN", ""),
    }
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers=headers
    ) as session:

        async def one(address: str, body: bytes) -> bytes:
            async with session.post(address, data=body) as response:
                raw = await response.read()
                if response.status != 200:
                    raise RuntimeError(f"{address}: HTTP {response.status} {raw[:300]!r}")
                return raw

        async def run(load: Load) -> tuple[float, int]:
            bodies = [json.dumps(load.body(prompt)).encode() for prompt in load.prompts()]
            began = time.perf_counter()
            replies = await asyncio.gather(*(one(load.url + load.route, body) for body in bodies))
            seconds = time.perf_counter() - began
            return seconds, sum(load.tokens_in(json.loads(raw)) for raw in replies)

        await serve(run)


async def in_process(argv: list[str]) -> None:
    """vLLM's `AsyncLLM`, with the arguments that our server would give it."""
    from vllm_server import compat, flags
    from vllm_server.config import ServerConfig

    compat.cli_env_setup()
    config = ServerConfig.from_env({})
    args = flags.parse_arguments(argv)
    flags.check_arguments(args, config)
    shutil.rmtree(config.bridge_dir, ignore_errors=True)
    async with compat.build_async_engine_client(args) as engine:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        async def one(prompt: list[int], load: Load) -> int:
            params = SamplingParams(
                max_tokens=load.max_tokens,
                ignore_eos=True,
                logprobs=0 if load.logprobs else None,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            count = 0
            async for output in engine.generate(
                {"prompt_token_ids": prompt}, params, uuid.uuid4().hex
            ):
                count = len(output.outputs[0].token_ids)
            return count

        async def run(load: Load) -> tuple[float, int]:
            prompts = load.prompts()
            began = time.perf_counter()
            counts = await asyncio.gather(*(one(prompt, load) for prompt in prompts))
            return time.perf_counter() - began, sum(counts)

        await serve(run)


async def serve(run: Run) -> None:
    """Answer every line of stdin until it ends."""
    answer({"ready": True})
    while line := await asyncio.to_thread(sys.stdin.readline):
        load = Load(**json.loads(line))
        try:
            seconds, tokens = await run(load)
            if tokens != load.requests * load.max_tokens:
                raise RuntimeError(f"{tokens} tokens came of {load.requests} x {load.max_tokens}")
            answer({"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def main(argv: list[str]) -> None:
    import uvloop

    uvloop.run(in_process(argv[1:]) if argv[0] == "engine" else over_http())


if __name__ == "__main__":
    main(sys.argv[1:])
