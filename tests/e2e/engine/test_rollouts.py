"""Rollouts that are recorded at a real engine: what was sampled, however a program asks for it.

pytest -m e2e tests/e2e/engine/test_rollouts.py
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from atroposlib.envs.base import APIServerConfig

from atropos_envs.hosting.engine_client import EngineClient
from atropos_envs.recording.recorder import OpenRollout, Recorded, Recorder
from benchmarks.support.chat_model import SPECIAL, make_chat_model
from tests.e2e.vllm_server_live import Server, end_of, reference_logprobs, start_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
USER = {"role": "user", "content": "What is 1 + 2? Answer with the number."}
MORE = {"role": "user", "content": "Are you sure?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("rollouts")
    texts = Path(__file__).parents[3] / "docs"
    model = make_chat_model(Path(os.environ["ATROPOS_CACHE"]) / "chat-model", texts)
    flags = ["--max-model-len", "1024", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    started = start_server(folder, model, flags=flags)
    try:
        yield started
    finally:
        end_of(started.process)


@asynccontextmanager
async def _rollout(
    server: Server, **options: Any
) -> AsyncIterator[tuple[OpenRollout, openai.AsyncOpenAI]]:
    config = APIServerConfig(
        model_name=str(server.model), base_url=f"{server.url}/v1", api_key="x", server_type="vllm"
    )
    engine = EngineClient(config)
    async with Recorder(engine).rollout(**options) as rollout:
        client = openai.AsyncOpenAI(base_url=rollout.base_url, api_key=rollout.api_key)
        async with client:
            yield rollout, client
    await engine.close()


def _play(
    server: Server, play: Callable[[openai.AsyncOpenAI], Awaitable[Any]], **options: Any
) -> tuple[Recorded, Any]:
    async def run() -> tuple[Recorded, Any]:
        async with _rollout(server, **options) as (rollout, client):
            result = await play(client)
            return await rollout.collect(), result

    return asyncio.run(run())


def _require_exact(server: Server, recorded: Recorded) -> None:
    """Every logprob is the model's own for exactly these tokens."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(server.model).eval()
    for each in recorded.sequences:
        assert len(each.tokens) == len(each.masks) == len(each.logprobs)
        theirs = reference_logprobs(
            reference, each.tokens[:1], each.tokens[1:], temperature=each.temperature
        )
        for at, (token, mask) in enumerate(zip(each.tokens, each.masks, strict=True)):
            assert mask in (-100, token)
            if mask != -100:
                assert abs(theirs[at - 1] - each.logprobs[at]) < 1e-3


async def _stream(client: openai.AsyncOpenAI, **request: Any) -> str:
    parts = []
    async for chunk in await client.chat.completions.create(stream=True, **request):
        parts += [choice.delta.content or "" for choice in chunk.choices]
    return "".join(parts)


def test_a_conversation_is_one_sequence_of_sampled_tokens(server: Server) -> None:
    async def play(client: openai.AsyncOpenAI) -> list[str]:
        messages, said = [USER], []
        for stream in (False, True, False):
            request = {"model": "gpt-4o", "messages": messages, "max_tokens": 40}
            if stream:
                text = await _stream(client, **request)
            else:
                answer = await client.chat.completions.create(**request)
                assert not getattr(answer, "prompt_token_ids", None)
                text = answer.choices[0].message.content or ""
            said.append(text)
            messages = [*messages, {"role": "assistant", "content": text}, MORE]
        return said

    total = replaced = 0
    for temperature in (1.0, 0.7, 1.0, 1.0):
        recorded, said = _play(server, play, temperature=temperature)
        assert recorded.counts.answered == 3 and recorded.counts.other_models == {"gpt-4o": 3}
        assert len(recorded.turns) == 3
        # The model also samples tokens such as <|im_start|> within an answer. Its text lacks them.
        answered = (token for turn in recorded.turns[:-1] for token in turn.token_ids[:-1])
        if any(token < len(SPECIAL) for token in answered):
            continue
        assert recorded.rewritten == 0
        (sequence,) = recorded.sequences
        assert sequence.turns == [0, 1, 2] and sequence.temperature == temperature
        _require_exact(server, recorded)
        assert all(said)
        for turn in recorded.turns:
            assert turn.token_versions == [(0, len(turn.token_ids))]
        total += 1
        replaced += recorded.replaced
    assert total
    print("replaced", replaced, "of", 2 * total)


def test_n_completions_fork_the_conversation(server: Server) -> None:
    async def play(client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(
            model="m", messages=[USER], max_tokens=20, n=3, seed=5
        )
        texts = [choice.message.content for choice in answer.choices]
        assert len(set(texts)) > 1, "each with a seed of its own"
        again = await _stream(client, model="m", messages=[USER], max_tokens=20, n=2)
        assert again
        reply = {"role": "assistant", "content": texts[1]}
        await client.chat.completions.create(model="m", messages=[USER, reply, MORE], max_tokens=9)

    recorded, _ = _play(server, play)
    assert recorded.counts.answered == 6 and len(recorded.turns) == 6
    assert len(recorded.sequences) == 5, "the last turn continues one of the first three"
    assert sum(each.trained for each in recorded.sequences) == recorded.tokens
    _require_exact(server, recorded)


def test_a_changed_answer_becomes_a_branch(server: Server) -> None:
    async def play(client: openai.AsyncOpenAI) -> None:
        await client.chat.completions.create(model="m", messages=[USER], max_tokens=20)
        other = {"role": "assistant", "content": "Something else entirely."}
        await client.chat.completions.create(model="m", messages=[USER, other, MORE], max_tokens=9)

    recorded, _ = _play(server, play)
    assert recorded.rewritten == 1 and len(recorded.sequences) == 2
    _require_exact(server, recorded)


def test_other_routes_and_tools(server: Server) -> None:
    async def play(client: openai.AsyncOpenAI) -> None:
        models = await client.models.list()
        name = models.data[0].id
        calls = 0
        for _ in range(8):
            answer = await client.chat.completions.create(
                model=name, messages=[USER], tools=[TOOL], max_tokens=60, tool_choice="auto"
            )
            calls += len(answer.choices[0].message.tool_calls or [])
        print("tool calls", calls)
        done = await client.completions.create(model=name, prompt="1 + 2 =", max_tokens=7)
        await client.completions.create(
            model=name, prompt="1 + 2 =" + done.choices[0].text, max_tokens=7
        )
        said = await client.responses.create(model=name, input="hello", max_output_tokens=9)
        assert said.output
        async for _ in await client.responses.create(
            model=name, input="hello", max_output_tokens=9, stream=True
        ):
            pass

    recorded, _ = _play(server, play)
    assert len(recorded.turns) == 12 and recorded.counts.answered == 12
    assert not recorded.counts.other_models
    _require_exact(server, recorded)


def test_what_a_program_does_wrong_is_counted(server: Server) -> None:
    async def play(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=[USER], max_tokens=-1)
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="m", input="x")
        wrong = client.with_options(api_key="other")
        with pytest.raises(openai.AuthenticationError):
            await wrong.chat.completions.create(model="m", messages=[USER])
        # The client leaves in the middle of its answer.
        stream = await client.chat.completions.create(
            model="m", messages=[USER], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await anext(aiter(stream))
        await stream.close()
        await asyncio.sleep(1)

    recorded, _ = _play(server, play)
    assert recorded.counts.refused.total() == 3, recorded.counts
    assert [turn.finish_reason for turn in recorded.turns] == ["unfinished"]
    assert 0 < recorded.tokens < 400 and recorded.counts.answered == 0
    _require_exact(server, recorded)
