"""How an environment asks the inference servers: kept connections, patience while one is away, weight versions.

atroposlib's own `VLLMServer` opens a connection for every request, gives up after three tries and drops what the answer
says beyond tokens and logprobs. This one keeps atroposlib's interface, so `ManagedServer` works on top of it unchanged.

Several servers with the same weights are one to atroposlib: its `ServerManager` binds a group to the server whose
semaphore is the freest when the group begins, so groups that begin together all go to the first one. Here each group is
for whoever has the fewest completions under way, and stays there (its prompt is in that server's prefix cache) until
that one is away.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
import openai
from atroposlib.envs.server_handling.vllm_server import VLLMServer

from atropos_common.bridge import SAMPLING_HEADER, SPLIT_HEADER
from atropos_common.run_dir import ENV_ENGINE_URLS

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Between two tries while the server is away, held or starting."""
_FATAL = {401: "refuses this client", 403: "refuses this client", 404: "has no such route", 405: "has no such route"}


class EngineUnavailable(RuntimeError):
    """The server did not answer in the time given: down, starting, or held until its weights are named."""


class EngineRefused(ValueError):
    """The server answered, and trying again cannot help."""

    def __init__(self, message: str, *, fatal: bool) -> None:
        super().__init__(message)
        self.fatal = fatal
        """Every request will be refused alike: a wrong server, not a wrong prompt."""


@dataclass(frozen=True)
class Generation:
    """N completions of one prompt. `token_ids` and `logprobs` have N lists of equal lengths, end token included."""

    prompt_ids: list[int]
    token_ids: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    weight_versions: list[tuple[int, int] | None]
    """Oldest and newest weight version of each completion; null where the server names none."""

    @property
    def oldest_version(self) -> int | None:
        """Behind the first completion."""
        return self.weight_versions[0] and self.weight_versions[0][0]


def parse_generation(prompt_ids: Sequence[int], answer: dict[str, Any]) -> Generation:
    """Read the body of `POST /generate`: `logprobs` is [N][T] of `[{token id: logprob}]`.

    Raises:
        EngineRefused: no logprobs in it, so nothing can be trained on it.
    """
    try:
        chosen = [[next(iter(step[0].items())) for step in sequence] for sequence in answer["logprobs"]]
        reasons = [str(reason) for reason in answer["finish_reasons"]]
    except (KeyError, TypeError, IndexError, StopIteration, AttributeError):
        raise EngineRefused(
            "the server's /generate returns no logprobs; start it with `python -m vllm_server`", fatal=True
        ) from None
    versions = answer.get("weight_versions") or [None] * len(chosen)
    return Generation(
        prompt_ids=list(prompt_ids),
        token_ids=[[int(token) for token, _ in sequence] for sequence in chosen],
        logprobs=[[float(logprob) for _, logprob in sequence] for sequence in chosen],
        finish_reasons=reasons,
        weight_versions=[_version_span(pair) for pair in versions],
    )


def _version_span(pair: Any) -> tuple[int, int] | None:
    """Both versions, or None while the server has no name for its weights."""
    return (int(pair[0]), int(pair[1])) if pair and None not in pair else None


def addresses(base_url: str) -> list[str]:
    """All servers that stand for the one at `base_url`, itself among them: the plan names them."""
    known = os.environ.get(ENV_ENGINE_URLS, "").split()
    return known if base_url.rstrip("/") in known else [base_url.rstrip("/")]


class Server:
    """One of the servers."""

    def __init__(self, base_url: str) -> None:
        self.root = base_url.removesuffix("/v1")
        self.under_way = 0
        """Completions."""
        self.asked = 0
        """Requests so far."""
        self.tried_at = 0.0
        self.lost_at: float | None = None
        """Since when it does not answer; null while it does."""

    @contextmanager
    def busy(self, completions: int) -> Iterator[None]:
        """Around a request."""
        self.asked += 1
        self.tried_at = time.monotonic()
        self.under_way += completions
        try:
            yield
        finally:
            self.under_way -= completions


_chosen: ContextVar[dict[Any, Server] | None] = ContextVar("chosen", default=None)
"""By client, whom the present group asks."""


def begin_group() -> None:
    """From here on this task and its children are one group: its requests go to one server."""
    _chosen.set({})


class EngineClient(VLLMServer):  # type: ignore[misc]
    """One inference server, or several that are alike. `server_healthy` says whether any answers."""

    patience_s: float = math.inf
    """How long a request waits for a server that is away; a serving environment waits for ever."""

    def __init__(self, config: Any, reasoning_config: Any = None) -> None:
        urls = addresses(str(config.base_url))
        numbers = ("num_max_requests_at_once", "num_requests_for_eval")
        each = {name: getattr(config, name) * len(urls) for name in numbers}
        super().__init__(config.model_copy(update=each), reasoning_config=reasoning_config)
        # The base class polls /health, and would only hide what a request tells better.
        self.initialized = True
        self._session: aiohttp.ClientSession | None = None
        self._context: int | None = None
        self.adjusted: Counter[str] = Counter()
        """Requests of which the server left sampling options out, by their names."""
        self._said_shorter = False
        http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [self._hear_adjusted]})
        self._over: dict[Server, EngineClient] = {}
        """atroposlib's calls of vLLM's own routes, to each server."""
        for url in urls:
            view = copy.copy(self)
            # Tries of its own would all go to the same server.
            retries = self.openai.max_retries if len(urls) == 1 else 0
            view.openai = self.openai.with_options(base_url=url, http_client=http, max_retries=retries)
            self._over[Server(url)] = view
        self._servers = list(self._over)

    def _choose(self) -> Server:
        """Whom the group asks already, else who has the fewest completions under way. One that is away is tried again
        every `RETRY_S`, by one request; where all are, the one that was not tried for the longest time is chosen."""
        now, group = time.monotonic(), _chosen.get()
        there = [
            server
            for server in self._servers
            if server.lost_at is None or (not server.under_way and now - server.tried_at >= RETRY_S)
        ]
        own = group.get(self) if group is not None else None
        if own in there:
            return own
        if not there:
            return min(self._servers, key=lambda server: server.tried_at)
        server = min(there, key=lambda server: (server.under_way, server.asked))
        if group is not None:
            group[self] = server
        return server

    @property
    def asked(self) -> int:
        """Requests so far."""
        return sum(server.asked for server in self._servers)

    @property
    def under_way(self) -> int:
        """Completions that were asked of the servers and are not answered yet."""
        return sum(server.under_way for server in self._servers)

    @property
    def _away(self) -> str:
        """The servers without `/v1`, where none answers."""
        return "" if any(s.lost_at is None for s in self._servers) else " and ".join(s.root for s in self._servers)

    async def generate(self, prompt_ids: Sequence[int], *, wait: bool = True, **sampling: Any) -> Generation:
        """`POST /generate` with vLLM's sampling parameters, as `_asked`."""
        body: dict[str, Any] = {"prompt": {"prompt_token_ids": list(prompt_ids)}, "logprobs": 0} | sampling
        answer = await self._asked(self._post, body, lambda: len(prompt_ids), wait=wait)
        return parse_generation(prompt_ids, answer)

    async def tokens_and_logprobs_completion(
        self, **request: Any
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """atroposlib's interface: prompt ids, then token ids, logprobs and finish reasons of each completion."""
        split = request.pop("split", "train")
        wait = request.pop("wait", True)
        for unused in ("model", "skip_reasoning"):
            request.pop(unused, None)
        prompt = request.pop("prompt", None)
        ids = request.pop("input_ids", None)
        prompt_ids = self._single_bos(list(ids) if ids is not None else self.tokenizer.encode(prompt))
        for name in ("max_new_tokens", "max_completion_tokens"):
            if name in request:
                request["max_tokens"] = request.pop(name)
        if split != "train":
            request["for_training"] = False
        async with self._in_turn(split):
            done = await self.generate(prompt_ids, wait=wait, **request)
        return done.prompt_ids, done.token_ids, done.logprobs, done.finish_reasons

    async def chat_completion(self, **request: Any) -> Any:
        """atroposlib's interface: an answer of `/v1/chat/completions`."""
        split = request.pop("split", "train")
        request = self._inject_reasoning_kwargs(request)
        messages = request.get("messages")
        return await self._over_v1("_chat_completion_wrapper", request, split, lambda: self._chat_length(messages))

    async def completion(self, **request: Any) -> Any:
        """atroposlib's interface: an answer of `/v1/completions`."""
        split = request.pop("split", "train")
        prompt = request.get("prompt")
        return await self._over_v1(
            "_completion_wrapper", request, split,
            lambda: len(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt or []),
        )  # fmt: skip

    async def _over_v1(self, call: str, request: dict[str, Any], split: str, prompt_length: Callable[[], int]) -> Any:
        """vLLM's own routes, by atroposlib's method `call`, as `_asked`."""
        request["model"] = self.config.model_name
        request["extra_headers"] = {**(request.get("extra_headers") or {}), SPLIT_HEADER: split}

        async def ask(server: Server, fitting: dict[str, Any]) -> Any:
            try:
                return await getattr(self._over[server], call)(**fitting)
            except openai.APIStatusError as error:
                if isinstance(error, openai.InternalServerError):
                    raise
                text = f"{server.root}/v1: {error.status_code}: {error.message[:300]}"
                raise EngineRefused(text, fatal=error.status_code in (401, 403, 405)) from None

        async with self._in_turn(split):
            return await self._asked(ask, request, prompt_length)

    @asynccontextmanager
    async def _in_turn(self, split: str) -> AsyncIterator[None]:
        """Around a request: wait for the others of its kind, and note its seconds once it is answered."""
        started = time.time()
        async with self.sem if split == "train" else self.eval_sem:
            yield
        timings = self.request_timings if split == "train" else self.eval_request_timings
        timings.append(time.time() - started)
        del timings[: -self.config.rolling_buffer_length]

    async def _asked(
        self, ask: Callable[[Server, dict[str, Any]], Awaitable[Any]], request: dict[str, Any],
        prompt_length: Callable[[], int], *, wait: bool = True,
    ) -> Any:  # fmt: skip
        """What `ask` gets for `request`, which is made to fit the server's context; again and again while none answers.

        Raises:
            EngineUnavailable: away for longer than `patience_s`, or at all with `wait=False`.
            EngineRefused: the request is wrong, or the server is no server of ours.
        """
        started = time.monotonic()
        while True:
            server = self._choose()
            try:
                with server.busy(int(request.get("n") or 1)):
                    for name in ("max_tokens", "max_completion_tokens"):
                        if request.get(name) is not None:
                            request[name] = await self._fitting(server, request[name], prompt_length)
                    answer = await ask(server, request)
            except (openai.APIConnectionError, openai.InternalServerError, aiohttp.ClientError, OSError) as error:
                await self._lost(server, error, may_wait=wait and time.monotonic() - started <= self.patience_s)
            else:
                self._note_found(server)
                return answer

    async def _fitting(self, server: Server, max_tokens: int, prompt_length: Callable[[], int]) -> int:
        """`max_tokens` within the server's context; environments are written for models with longer ones."""
        if self._context is None:
            self._context = await self._served_context(server)
        room = self._context - prompt_length()
        if max_tokens <= room or room < 1:
            return max_tokens  # a prompt that is too long is refused in the server's own words
        if not self._said_shorter:
            self._said_shorter = True
            log.warning(
                "asked for %d tokens beyond the prompt; the server's context is %d in all (vllm.max_model_len), so "
                "answers end earlier", max_tokens, self._context,
            )  # fmt: skip
        return room

    async def _served_context(self, server: Server) -> int:
        """Tokens of prompt and completion together; without bound where the server does not say."""
        async with self._http().get(f"{server.root}/v1/models") as response:
            if 400 <= response.status < 500:
                return 2**31
            response.raise_for_status()
            models = (await response.json())["data"]
        return int(models[0].get("max_model_len") or 2**31)

    def _chat_length(self, messages: Any) -> int:
        try:
            return len(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        except Exception:  # no template, or parts that are not text: the server judges
            return 0

    async def close(self) -> None:
        """Close the kept connections; a later request opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _single_bos(self, ids: list[int]) -> list[int]:
        """A chat template that writes the first token, and a tokenizer that adds it, make it two."""
        bos = self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self.config.timeout, sock_connect=5),
                connector=aiohttp.TCPConnector(limit=0),
                headers={"Authorization": f"Bearer {self.config.api_key}"} if self.config.api_key else {},
            )
        return self._session

    async def _post(self, server: Server, body: dict[str, Any]) -> dict[str, Any]:
        async with self._http().post(f"{server.root}/generate", json=body) as response:
            if 400 <= response.status < 500 and response.status not in (408, 425, 429):
                raise await self._refusal(server, response)
            response.raise_for_status()
            self._count_adjusted(response.headers)
            answer: dict[str, Any] = await response.json()
            return answer

    async def _hear_adjusted(self, response: httpx.Response) -> None:
        self._count_adjusted(response.headers)

    def _count_adjusted(self, headers: Mapping[str, str]) -> None:
        if SAMPLING_HEADER in headers:
            self.adjusted.update(headers[SAMPLING_HEADER].split(", "))

    async def _refusal(self, server: Server, response: aiohttp.ClientResponse) -> EngineRefused:
        text = (await response.text())[:300]
        if response.status in _FATAL:
            reason = f"{server.root}/generate {_FATAL[response.status]} ({response.status}): {text}"
            return EngineRefused(f"{reason}. Start `python -m vllm_server` and check --openai.base_url", fatal=True)
        return EngineRefused(f"{server.root}/generate: {response.status}: {text}", fatal=False)

    async def _lost(self, server: Server, error: BaseException, *, may_wait: bool) -> None:
        """Return when another try makes sense: at once where another server is there.

        Raises:
            EngineUnavailable: none is, and waiting is over.
        """
        if server.lost_at is None:
            server.lost_at = time.monotonic()
            others = "" if len(self._servers) == 1 or self._away else "; the others go on"
            log.warning("waiting for the inference server at %s (%s)%s", server.root, _name(error), others)
        self.server_healthy = not self._away
        if self._away and not may_wait:
            raise EngineUnavailable(f"{self._away} does not answer ({_name(error)})") from None
        await asyncio.sleep(RETRY_S if self._away else 0)

    def _note_found(self, server: Server) -> None:
        self.server_healthy = True
        if server.lost_at is not None:
            log.info("inference server at %s answers after %.1f s", server.root, time.monotonic() - server.lost_at)
            server.lost_at = None


def _name(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientResponseError):
        return f"status {error.status}"
    if isinstance(error, openai.APIStatusError):
        return f"status {error.status_code}"
    return "time-out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
