"""Neighbours of an environment: an engine that adds by rule, and atroposlib's real run-api."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from aiohttp import web
from aiohttp.test_utils import TestServer
from atroposlib.envs import base as atropos_base
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from atropos_api.auth import AuthMiddleware, Settings
from atropos_api.batches import Batches
from atropos_common.protocol.bridge import ARRAYS, FORM_HEADER
from atropos_envs.hosting.runner import hosted
from atropos_envs.tiny_model import make_tokenizer

EOS = 1
Answer = Callable[[list[int], dict[str, Any], int], list[int]]
"""Prompt ids, the request's body and the completion's index, to the completion's ids."""

ASCII = [chr(code) for code in range(10, 127)]


def text_tokenizer() -> PreTrainedTokenizerFast:
    """One id per ASCII character, `<eos>` is 1; no chat template."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *ASCII])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def encode(text: str) -> list[int]:
    """The ids of `text` and the end."""
    return [*(ASCII.index(character) + 2 for character in text), EOS]


def decode(ids: list[int]) -> str:
    return "".join(ASCII[token - 2] for token in ids)


def write_splits(
    folder: Path, train: Sequence[Mapping[str, str]], test: Sequence[Mapping[str, str]]
) -> None:
    """`train.jsonl` and `test.jsonl` as `--env.dataset_path` takes them."""
    folder.mkdir()
    for split, rows in (("train", train), ("test", test)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_env(env_class: Any, folder: Path, url: str, **fields: Any) -> Any:
    """An environment over `folder/model` and `folder/data` that asks the engine at `url`."""
    config, servers = env_class.config_init()
    servers[0].base_url, servers[0].model_name = url, str(folder / "model")
    fields = {
        "tokenizer_name": str(folder / "model"),
        "dataset_path": str(folder / "data"),
        "data_dir_to_save_evals": str(folder / "evals"),
        "group_size": 4,
    } | fields
    return env_class(config.model_copy(update=fields), servers)


class _Impatient:
    """`asyncio` for BaseEnv, without its five seconds after registering."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds if seconds < 1 else 0)


def begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make BaseEnv serve without its pause after registering, and keep atroposlib's log silent."""
    monkeypatch.setattr(atropos_base, "asyncio", _Impatient())
    for name in ("atroposlib", "atroposlib.envs.base"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.CRITICAL)


def plain_env(
    folder: Path,
    api: str,
    collect: Callable[[Any], Awaitable[Any]],
    evaluate: Callable[[], Awaitable[None]],
    item_of: Callable[[int], Any] = int,
    **fields: Any,
) -> Any:
    """A hosted environment of atroposlib's kind: its items are `item_of` 1, 2, 3 and so on, and its
    group of an item is what `collect` gives. `fields` are those of its BaseEnvConfig."""

    class Plain(BaseEnv):
        async def setup(self) -> None:
            self.count = 0

        async def get_next_item(self) -> Any:
            self.count += 1
            return item_of(self.count)

        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            return await collect(item), []

        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            await evaluate()

    make_tokenizer().save_pretrained(folder)
    config = {
        "tokenizer_name": str(folder),
        "rollout_server_url": api,
        "use_wandb": False,
        "max_batches_offpolicy": 1,
        "total_steps": 10**6,
    }
    server = APIServerConfig(base_url="http://127.0.0.1:9/v1", api_key="x", model_name=str(folder))
    return hosted(Plain)(BaseEnvConfig(**config | fields), [server])


def sums_right(prompt: list[int], body: dict[str, Any], index: int) -> list[int]:
    """The right sum and the end for even completions, a cut-off one for odd."""
    left, right = "".join("0123456789+="[token - 2] for token in prompt).rstrip("=").split("+")
    digits = [int(digit) + 2 for digit in str(int(left) + int(right))]
    return [*digits, EOS] if index % 2 == 0 else digits[:1]


class Engine:
    """`POST /generate` as `vllm_server` answers it; `status` other than 200 makes it refuse."""

    def __init__(self, answer: Answer = sums_right) -> None:
        self.answer = answer
        self.status = 200
        self.version = 0
        self.bodies: list[dict[str, Any]] = []
        self.delay_s = 0.0
        self.logprobs = True
        self.arrays = True
        """It knows `FORM_HEADER`."""

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.status != 200:
            return web.json_response({"error": "told to refuse"}, status=self.status)
        prompt = body["prompt"]["prompt_token_ids"]
        completions = [self.answer(prompt, body, index) for index in range(body.get("n", 1))]
        answer: dict[str, Any] = {
            "finish_reasons": ["stop" if ids[-1] == EOS else "length" for ids in completions],
            "weight_versions": [[self.version, self.version + 1] for _ in completions],
        }
        if self.logprobs and self.arrays and request.headers.get(FORM_HEADER) == ARRAYS:
            answer["token_ids"] = completions
            answer["sampled_logprobs"] = [
                [-0.25 * (n + 1) for n in range(len(ids))] for ids in completions
            ]
        elif self.logprobs:
            answer["logprobs"] = [
                [[{str(i): -0.25 * (n + 1)}] for n, i in enumerate(ids)] for ids in completions
            ]
        return web.json_response(answer)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.status)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serve, and give the base URL with `/v1`."""
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/health", self.health)
        async with TestServer(app) as server:
            yield f"http://127.0.0.1:{server.port}/v1"


@asynccontextmanager
async def run_api(*, keeps: bool = False, auth: Settings | None = None) -> AsyncIterator[str]:
    """atroposlib's own run-api, fresh, on a free port; with `keeps` behind our `GET /batch`, which
    keeps batches, and behind our `auth` where one is given."""
    from atroposlib.api.server import app

    app.state._state.clear()
    served: Any = Batches(app, app.state) if keeps else app
    served = AuthMiddleware(served, auth) if auth else served
    server = uvicorn.Server(uvicorn.Config(served, host="127.0.0.1", port=0, log_level="error"))
    server.capture_signals = nullcontext  # type: ignore[assignment, method-assign]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def trainer_registration(batch_size: int, num_steps: int = 100) -> dict[str, Any]:
    """Body of the trainer's `POST /register`."""
    return {
        "wandb_group": "",
        "wandb_project": "",
        "batch_size": batch_size,
        "max_token_len": 64,
        "checkpoint_dir": "",
        "save_checkpoint_interval": -1,
        "starting_step": 0,
        "num_steps": num_steps,
    }
