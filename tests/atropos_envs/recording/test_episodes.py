"""Episodes of programs and of OpenEnv servers, against an engine that answers by rule."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from atropos_common.protocol.bridge import ROLLOUT_HEADER, TAKE_PATH, RecordedTurn, RecordedTurns
from atropos_envs import EnvFault
from atropos_envs.openenv_server import OpenEnvEnv
from atropos_envs.program_server import ProgramEnv
from atropos_envs.recording.openenv import ActionForm
from atropos_envs.recording.scoring import EpisodeError
from tests.atropos_envs.support import decode, encode, make_env, text_tokenizer
from vllm_server.rollouts import Conversation

AGENTS = Path(__file__).parents[3] / "examples" / "agents"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ANSWER = "3"


class _Engine:
    """vLLM's chat route with our recording: the answer is always `ANSWER`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.rollouts: dict[str, Conversation] = {}
        self.bodies: list[dict[str, Any]] = []
        self.away = 0
        """Requests that get 503 first."""

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.away:
            self.away -= 1
            return web.json_response({"error": "starting"}, status=503)
        self.bodies.append(body)
        if body.get("max_tokens") == 0:
            return web.json_response({"error": {"message": "max_tokens: not 0"}}, status=400)
        ids = self.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=False
        )
        conversation = self.rollouts.setdefault(request.headers[ROLLOUT_HEADER], Conversation())
        begun = conversation.begin(ids, self.tokenizer)
        made = encode(ANSWER)
        turn = RecordedTurn(
            after=begun.after,
            prompt_ids=begun.ids[begun.own_from :].tolist(),
            token_ids=made,
            logprobs=[-0.5] * len(made),
            token_versions=[(4, len(made))],
            temperature=body["temperature"],
            finish_reason="stop",
        )
        conversation.add(begun, turn)
        message = {"role": "assistant", "content": ANSWER}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        fields = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
        return web.json_response(fields | {"choices": [choice]})

    async def take(self, request: web.Request) -> web.Response:
        found = self.rollouts.pop((await request.json())["rollout"], None)
        turns = RecordedTurns(turns=found.turns if found else [])
        return web.json_response(text=turns.model_dump_json())


@asynccontextmanager
async def _environment(
    folder: Path, env_class: Any, **fields: Any
) -> AsyncIterator[tuple[Any, _Engine]]:
    tokenizer = text_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    engine, app = _Engine(tokenizer), web.Application()
    app.router.add_post("/v1/chat/completions", engine.chat)
    app.router.add_post(TAKE_PATH, engine.take)
    async with TestServer(app) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        env = make_env(env_class, folder, url, **{"max_token_length": 1000} | fields)
        env._may_roll.set()
        try:
            await env.setup()
            yield env, engine
        finally:
            await env._close_servers()


def _agent(name: str) -> str:
    return json.dumps([sys.executable, str(AGENTS / name)])


SCORER = json.dumps([sys.executable, str(AGENTS / "score.py")])


def _tasks(folder: Path, *tasks: Any) -> str:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return str(path)


async def test_a_program_plays_and_the_sampled_tokens_train(tmp_path: Path) -> None:
    task = {"question": "What is 1 + 2?", "answer": "3"}
    options = {"agent": _agent("plain_agent.py"), "scorer": SCORER, "group_size": 2}
    tasks = _tasks(tmp_path, task)
    async with _environment(tmp_path, ProgramEnv, tasks=tasks, **options) as (env, engine):
        engine.away = 1
        assert await env.get_next_item() == task
        (group,), _ = await env._make_groups(task)
    assert group["scores"] == [1.0, 1.0] and len(group["tokens"]) == 2
    for tokens, mask in zip(group["tokens"], group["masks"], strict=True):
        trained = [token for token in mask if token != -100]
        assert trained == encode(ANSWER) * 2, "both turns, as sampled"
        assert "Are you sure?" in decode([token for token in tokens if token > 1])
    assert env.tally.episodes == {"played": 2}
    assert all(body["temperature"] == 1.0 for body in engine.bodies)
    assert all(row["score"] == 1.0 and row["right"] == 1.0 for row in env._measured)


@pytest.mark.parametrize(
    ("does", "outcome"),
    [
        ("never asks", "asked for nothing"),
        ("crashes midway", "crashed with status 1: RuntimeError: the agent's own mistake"),
        ("runs out of time", "timed out after 5 s"),
    ],
)
async def test_an_episode_that_fails_is_counted_by_its_reason(
    tmp_path: Path, does: str, outcome: str
) -> None:
    options = {"agent": _agent("misbehaving_agent.py"), "scorer": SCORER, "timeout_s": 5.0}
    options["tasks"] = _tasks(tmp_path, "any")
    async with _environment(tmp_path, ProgramEnv, **options) as (env, _):
        with pytest.raises(EpisodeError):
            await env._episode({"question": "x", "answer": "3", "does": does})
        assert env.tally.episodes == {outcome: 1}
        if does == "crashes midway":
            env.config.failed_score = -1.0
            played = await env._episode({"question": "x", "answer": "3", "does": does})
            assert played.score.value == -1.0 and played.recorded.tokens > 0


async def test_what_a_program_does_beside_its_episode_is_counted_too(tmp_path: Path) -> None:
    options = {"agent": _agent("misbehaving_agent.py"), "scorer": SCORER}
    options["tasks"] = _tasks(tmp_path, "any")
    async with _environment(tmp_path, ProgramEnv, **options) as (env, _):
        for does in ("asks for another model", "holds connections"):
            played = await env._episode({"question": "x", "answer": "3", "does": does})
            assert played.score.value == 1.0, "the run goes on"
    assert env.tally.episodes == {
        "played": 2,
        "asked for another model (some-other-model); the trained one answered": 1,
        "held too many connections; the surplus was closed": 1,
    }


@pytest.mark.parametrize(
    ("prints", "reason"),
    [
        ("print('NaN')", "the score is not a finite number: nan"),
        ("print('well')", "the scorer printed no score in its last line"),
        ("raise SystemExit('no')", "the scorer ended with status 1: no"),
    ],
)
async def test_a_scorer_that_fails_is_counted(tmp_path: Path, prints: str, reason: str) -> None:
    scorer = json.dumps([sys.executable, "-c", prints])
    options = {"agent": _agent("plain_agent.py"), "scorer": scorer}
    options["tasks"] = _tasks(tmp_path, "any")
    async with _environment(tmp_path, ProgramEnv, **options) as (env, _):
        with pytest.raises(EpisodeError):
            await env._episode({"question": "x"})
    assert env.tally.episodes == {reason: 1}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"agent": "python"}, "set agent = "),
        ({"agent": '["python"]'}, "no tasks are given"),
        ({"agent": '["python"]', "tasks": "nowhere.jsonl"}, "cannot be read"),
        ({"agent": '["python"]', "tasks": "no_module:tasks"}, "cannot be imported"),
    ],
)
async def test_a_wrong_setting_ends_the_environment_with_its_name(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(EnvFault, match=words):
        async with _environment(tmp_path, ProgramEnv, **fields):
            pass


class _OpenEnvServer:
    """OpenEnv's protocol, as openenv-core 0.3 speaks it; `places` sessions at a time."""

    def __init__(self, places: int) -> None:
        self.places, self.open, self.seen = places, 0, Counter[str]()

    async def schema(self, _: web.Request) -> web.Response:
        properties = {"message": {"type": "string"}, "metadata": {"type": "object"}}
        return web.json_response({"action": {"properties": properties, "required": ["message"]}})

    async def socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open >= self.places:
            self.seen["full"] += 1
            error = {"message": "no place", "code": "CAPACITY_REACHED"}
            await socket.send_json({"type": "error", "data": error})
            await socket.close()
            return socket
        self.open += 1
        try:
            turns = 0
            async for message in socket:
                asked = json.loads(message.data)
                self.seen[asked["type"]] += 1
                turns += asked["type"] == "step"
                if asked["data"].get("message") == "die":
                    break
                await asyncio.sleep(0.05)
                data = {"observation": {"text": f"turn {turns}"}, "reward": 0.5 * turns}
                await socket.send_json({"type": "observation", "data": data | {"done": turns == 2}})
        finally:
            self.open -= 1
        return socket


async def test_openenv_episodes_take_turns_for_the_servers_sessions(tmp_path: Path) -> None:
    server, app = _OpenEnvServer(places=2), web.Application()
    app.router.add_get("/schema", server.schema)
    app.router.add_get("/ws", server.socket)
    async with TestServer(app) as site:
        address = f"http://127.0.0.1:{site.port}"
        async with _environment(tmp_path, OpenEnvEnv, openenv=address) as (env, engine):
            (group,), _ = await env._make_groups(await env.get_next_item())
    assert group["scores"] == [1.5] * 4 and env.tally.episodes == {"played": 4}
    assert server.seen["reset"] == 4 and server.seen["step"] == 8 and server.seen["full"] > 0
    assert len({tuple(body["messages"][0].items()) for body in engine.bodies}) == 1
    for mask in group["masks"]:
        assert [token for token in mask if token != -100] == encode(ANSWER) * 2


async def test_an_openenv_server_that_ends_costs_its_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ActionForm, "read", lambda self, text: {"message": "die"})
    server, app = _OpenEnvServer(places=9), web.Application()
    app.router.add_get("/schema", server.schema)
    app.router.add_get("/ws", server.socket)
    async with TestServer(app) as site:
        address = f"http://127.0.0.1:{site.port}"
        async with _environment(tmp_path, OpenEnvEnv, openenv=address) as (env, _):
            with pytest.raises(EpisodeError):
                await env._episode(1)
    assert env.tally.episodes == {"the OpenEnv server failed: the server closed the session": 1}


def test_an_action_of_typed_fields_is_a_json_object() -> None:
    fields = {"x": {"type": "integer"}, "metadata": {"type": "object"}}
    form = ActionForm({"properties": fields, "required": ["x"]})
    assert '"x"' in form.advice and "metadata" not in form.advice
    assert form.read('so: {"x": 3} there') == {"x": 3} and form.read("no") == {}
    text = ActionForm({"properties": {"code": {"type": "string"}}})
    assert text.advice == "" and text.read("{1}") == {"code": "{1}"}
