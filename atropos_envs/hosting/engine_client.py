"""Client of the inference servers: kept connections, retries while a server is away, weight
versions.

atroposlib's `VLLMServer` opens a connection for every request, gives up after three tries, and
drops everything in an answer but tokens and logprobs. This client keeps atroposlib's interface, so
`ManagedServer` works on it unchanged.

atroposlib treats several servers with the same weights as one. Its `ServerManager` binds a group to
the server with the freest semaphore at the group's start, so groups that start together all go to
one server. Here a group goes to the server with the fewest completions in flight, and stays there
(for its prefix cache) until that server is away.
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

from atropos_common.protocol.bridge import SAMPLING_HEADER, SPLIT_HEADER
from atropos_common.system.run_dir import ENV_ENGINE_URLS

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Seconds between two tries while the server is away, held or starting."""
# Statuses that mean a wrong server or key. Other 4xx answers concern one request.
_FATAL = {
    401: "refuses this client",
    403: "refuses this client",
    404: "has no such route",
    405: "has no such route",
}


class EngineUnavailable(RuntimeError):
    """The server is down, starting, or held until its first weights, for longer than the caller
    waits."""


class EngineRefused(ValueError):
    """The server refused the request, so a retry cannot help."""

    def __init__(self, message: str, *, fatal: bool) -> None:
        super().__init__(message)
        self.fatal = fatal
        """The server refuses every request: it is the wrong server, or the key is wrong."""


@dataclass(frozen=True)
class Generation:
    """N completions of one prompt. `token_ids` and `logprobs` are N lists of equal lengths, end
    token included."""

    prompt_ids: list[int]
    token_ids: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    weight_versions: list[tuple[int, int] | None]
    """Oldest and newest weight version of each completion; None if the server reports none."""

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version of the first completion."""
        return self.weight_versions[0] and self.weight_versions[0][0]


def parse_generation(prompt_ids: Sequence[int], answer: dict[str, Any]) -> Generation:
    """Read the answer of `POST /generate`; its `logprobs` is [N][T] of `[{token id: logprob}]`.

    Raises:
        EngineRefused: it has no logprobs, so it cannot be trained on.
    """
    try:
        # [N][T] pairs of token id and logprob; with `logprobs: 0` each step has the sampled token
        # alone.
        chosen = [
            [next(iter(step[0].items())) for step in sequence] for sequence in answer["logprobs"]
        ]
        reasons = [str(reason) for reason in answer["finish_reasons"]]
    except (KeyError, TypeError, IndexError, StopIteration, AttributeError):
        raise EngineRefused(
            "the server's /generate returns no logprobs; start it with `python -m vllm_server`",
            fatal=True,
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
    """Return both versions; None until the server's weights have one."""
    return (int(pair[0]), int(pair[1])) if pair and None not in pair else None


def addresses(base_url: str) -> list[str]:
    """Return the addresses of all servers that the plan puts behind `base_url`, itself included."""
    known = os.environ.get(ENV_ENGINE_URLS, "").split()
    return known if base_url.rstrip("/") in known else [base_url.rstrip("/")]


class Server:
    """State of one server."""

    def __init__(self, base_url: str) -> None:
        self.root = base_url.removesuffix("/v1")
        self.under_way = 0
        """Completions in flight."""
        self.asked = 0
        """Requests since the start."""
        self.tried_at = 0.0
        self.lost_at: float | None = None
        """Start of its absence (monotonic seconds); None while it answers."""

    @contextmanager
    def busy(self, completions: int) -> Iterator[None]:
        """Count a request of `completions` completions while it runs."""
        self.asked += 1
        self.tried_at = time.monotonic()
        self.under_way += completions
        try:
            yield
        finally:
            self.under_way -= completions


_chosen: ContextVar[dict[Any, Server] | None] = ContextVar("chosen", default=None)
"""Client -> server of the present group."""


def begin_group() -> None:
    """Start a group in this task and its children: its requests go to one server."""
    _chosen.set({})


class EngineClient(VLLMServer):  # type: ignore[misc]
    """Client of one inference server, or of several alike. `server_healthy` is True while any
    answers."""

    patience_s: float = math.inf
    """Seconds that a request waits for a server that is away; a serving environment waits without
    limit."""

    def __init__(self, config: Any, reasoning_config: Any = None) -> None:
        urls = addresses(str(config.base_url))
        # The limits are per server, and this client stands for all of them.
        numbers = ("num_max_requests_at_once", "num_requests_for_eval")
        each = {name: getattr(config, name) * len(urls) for name in numbers}
        super().__init__(config.model_copy(update=each), reasoning_config=reasoning_config)
        # No polls of /health by the base class: a failed request says more.
        self.initialized = True
        self._session: aiohttp.ClientSession | None = None
        # Tokens of prompt and completion together; fetched with the first request.
        self._context: int | None = None
        self.adjusted: Counter[str] = Counter()
        """Requests from which the server removed sampling options, by option."""
        self._warned_context = False
        # One connection pool for all servers; the hook reads our headers, which the openai client
        # drops.
        http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [self._on_response]})
        self._v1_clients: dict[Server, EngineClient] = {}
        """atroposlib's client of vLLM's own routes, for each server."""
        for url in urls:
            view = copy.copy(self)
            # The openai client's own retries would all go to one server.
            retries = self.openai.max_retries if len(urls) == 1 else 0
            view.openai = self.openai.with_options(
                base_url=url, http_client=http, max_retries=retries
            )
            self._v1_clients[Server(url)] = view
        self._servers = list(self._v1_clients)

    def _choose(self) -> Server:
        """Return the group's server, else the one with the fewest completions in flight.

        An absent server is tried again every `RETRY_S` by one request. If all are absent, return
        the one whose last try is the oldest.
        """
        now, group = time.monotonic(), _chosen.get()
        present = [
            server
            for server in self._servers
            # An absent server gets one request at a time, so that a group does not hang on it with
            # all its requests.
            if server.lost_at is None or (not server.under_way and now - server.tried_at >= RETRY_S)
        ]
        own = group.get(self) if group is not None else None
        if own in present:
            return own
        if not present:
            return min(self._servers, key=lambda server: server.tried_at)
        # Among equally busy servers the least used one, so that a sequence of single requests
        # alternates.
        server = min(present, key=lambda server: (server.under_way, server.asked))
        if group is not None:
            group[self] = server
        return server

    @property
    def asked(self) -> int:
        """Requests since the start."""
        return sum(server.asked for server in self._servers)

    @property
    def under_way(self) -> int:
        """Completions in flight, over all servers."""
        return sum(server.under_way for server in self._servers)

    @property
    def _away(self) -> str:
        """Names of the servers (without `/v1`) if none answers, else an empty string."""
        return (
            ""
            if any(s.lost_at is None for s in self._servers)
            else " and ".join(s.root for s in self._servers)
        )

    async def generate(
        self, prompt_ids: Sequence[int], *, wait: bool = True, **sampling: Any
    ) -> Generation:
        """Call `POST /generate` with vLLM's sampling parameters; errors as in `_request`."""
        body: dict[str, Any] = {
            "prompt": {"prompt_token_ids": list(prompt_ids)},
            "logprobs": 0,
        } | sampling
        answer = await self._request(self._post, body, lambda: len(prompt_ids), wait=wait)
        return parse_generation(prompt_ids, answer)

    async def tokens_and_logprobs_completion(
        self, **request: Any
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """Return prompt ids, and token ids, logprobs and finish reasons of each completion
        (atroposlib's interface)."""
        split = request.pop("split", "train")
        wait = request.pop("wait", True)
        # Fields of atroposlib that `/generate` does not know.
        for unused in ("model", "skip_reasoning"):
            request.pop(unused, None)
        prompt = request.pop("prompt", None)
        ids = request.pop("input_ids", None)
        prompt_ids = self._single_bos(
            list(ids) if ids is not None else self.tokenizer.encode(prompt)
        )
        for name in ("max_new_tokens", "max_completion_tokens"):
            if name in request:
                request["max_tokens"] = request.pop(name)
        # The server then accepts sampling options that it refuses for training.
        if split != "train":
            request["for_training"] = False
        async with self._limited(split):
            done = await self.generate(prompt_ids, wait=wait, **request)
        return done.prompt_ids, done.token_ids, done.logprobs, done.finish_reasons

    async def chat_completion(self, **request: Any) -> Any:
        """Return an answer of `/v1/chat/completions` (atroposlib's interface)."""
        split = request.pop("split", "train")
        request = self._inject_reasoning_kwargs(request)
        messages = request.get("messages")
        return await self._call_v1(
            "_chat_completion_wrapper", request, split, lambda: self._chat_length(messages)
        )

    async def completion(self, **request: Any) -> Any:
        """Return an answer of `/v1/completions` (atroposlib's interface)."""
        split = request.pop("split", "train")
        prompt = request.get("prompt")
        return await self._call_v1(
            "_completion_wrapper",
            request,
            split,
            lambda: (
                len(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt or [])
            ),
        )

    async def _call_v1(
        self, call: str, request: dict[str, Any], split: str, prompt_length: Callable[[], int]
    ) -> Any:
        """Call one of vLLM's own routes by atroposlib's method `call`; errors as in `_request`."""
        request["model"] = self.config.model_name
        request["extra_headers"] = {**(request.get("extra_headers") or {}), SPLIT_HEADER: split}

        async def ask(server: Server, fitted: dict[str, Any]) -> Any:
            try:
                return await getattr(self._v1_clients[server], call)(**fitted)
            except openai.APIStatusError as error:
                # 5xx: the server is starting or held, so `_request` tries again.
                if isinstance(error, openai.InternalServerError):
                    raise
                text = f"{server.root}/v1: {error.status_code}: {error.message[:300]}"
                raise EngineRefused(text, fatal=error.status_code in (401, 403, 405)) from None

        async with self._limited(split):
            return await self._request(ask, request, prompt_length)

    @asynccontextmanager
    async def _limited(self, split: str) -> AsyncIterator[None]:
        """Limit the requests in flight of one split, and record the seconds of each."""
        started = time.time()
        # Evaluations have their own limit, so that they do not wait behind all rollouts.
        async with self.sem if split == "train" else self.eval_sem:
            yield
        timings = self.request_timings if split == "train" else self.eval_request_timings
        timings.append(time.time() - started)
        del timings[: -self.config.rolling_buffer_length]

    async def _request(
        self,
        ask: Callable[[Server, dict[str, Any]], Awaitable[Any]],
        request: dict[str, Any],
        prompt_length: Callable[[], int],
        *,
        wait: bool = True,
    ) -> Any:
        """Return the result of `ask` for `request`, shortened to the server's context; retry while
        no server answers.

        Raises:
            EngineUnavailable: no server answered within `patience_s`, or the first try with
                `wait=False`.
            EngineRefused: the request is wrong, or the server is not a vLLM server.
        """
        # `patience_s` limits the whole request, retries on other servers included.
        started = time.monotonic()
        while True:
            # On every try: the group moves to another server when its own is away.
            server = self._choose()
            try:
                with server.busy(int(request.get("n") or 1)):
                    for name in ("max_tokens", "max_completion_tokens"):
                        if request.get(name) is not None:
                            request[name] = await self._fit_context(
                                server, request[name], prompt_length
                            )
                    answer = await ask(server, request)
            except (
                openai.APIConnectionError,
                openai.InternalServerError,
                aiohttp.ClientError,
                OSError,
            ) as error:
                await self._lost(
                    server, error, may_wait=wait and time.monotonic() - started <= self.patience_s
                )
            else:
                self._note_found(server)
                return answer

    async def _fit_context(
        self, server: Server, max_tokens: int, prompt_length: Callable[[], int]
    ) -> int:
        """Return `max_tokens`, reduced to the server's context; environments are written for models
        with longer ones."""
        if self._context is None:
            self._context = await self._served_context(server)
        left = self._context - prompt_length()
        if max_tokens <= left or left < 1:
            return max_tokens  # a prompt that is too long is refused in the server's own words
        if not self._warned_context:
            self._warned_context = True
            log.warning(
                "a request asks for %d tokens beyond its prompt, but the server's context is "
                "%d in all: completions "
                "are cut shorter; raise vllm.max_model_len",
                max_tokens,
                self._context,
            )
        return left

    async def _served_context(self, server: Server) -> int:
        """Return the limit for prompt and completion together; without an answer practically
        unlimited."""
        async with self._http().get(f"{server.root}/v1/models") as response:
            # A server without this route or without access to it.
            if 400 <= response.status < 500:
                return 2**31
            response.raise_for_status()
            models = (await response.json())["data"]
        return int(models[0].get("max_model_len") or 2**31)

    def _chat_length(self, messages: Any) -> int:
        try:
            return len(
                self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=False
                )
            )
        except Exception:  # no template, or parts that are not text: the server judges
            return 0

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _single_bos(self, ids: list[int]) -> list[int]:
        """Remove a doubled first token, which the chat template and the tokenizer both add."""
        bos = self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self.config.timeout, sock_connect=5),
                connector=aiohttp.TCPConnector(limit=0),
                headers={"Authorization": f"Bearer {self.config.api_key}"}
                if self.config.api_key
                else {},
            )
        return self._session

    async def _post(self, server: Server, body: dict[str, Any]) -> dict[str, Any]:
        async with self._http().post(f"{server.root}/generate", json=body) as response:
            # 408, 425 and 429 are temporary: `raise_for_status` below makes them errors to retry.
            if 400 <= response.status < 500 and response.status not in (408, 425, 429):
                raise await self._refusal(server, response)
            response.raise_for_status()
            self._count_adjusted(response.headers)
            answer: dict[str, Any] = await response.json()
            return answer

    async def _on_response(self, response: httpx.Response) -> None:
        self._count_adjusted(response.headers)

    def _count_adjusted(self, headers: Mapping[str, str]) -> None:
        if SAMPLING_HEADER in headers:
            self.adjusted.update(headers[SAMPLING_HEADER].split(", "))

    async def _refusal(self, server: Server, response: aiohttp.ClientResponse) -> EngineRefused:
        text = (await response.text())[:300]
        if response.status in _FATAL:
            reason = f"{server.root}/generate {_FATAL[response.status]} ({response.status}): {text}"
            return EngineRefused(
                f"{reason}. Start `python -m vllm_server` and check --openai.base_url", fatal=True
            )
        return EngineRefused(f"{server.root}/generate: {response.status}: {text}", fatal=False)

    async def _lost(self, server: Server, error: BaseException, *, may_wait: bool) -> None:
        """Mark the server as absent; return when another try makes sense: at once if another server
        answers.

        Raises:
            EngineUnavailable: none answers, and `may_wait` is False.
        """
        if server.lost_at is None:
            server.lost_at = time.monotonic()
            others = "" if len(self._servers) == 1 or self._away else "; the others go on"
            log.warning(
                "waiting for the inference server at %s (%s)%s", server.root, _name(error), others
            )
        self.server_healthy = not self._away
        if self._away and not may_wait:
            raise EngineUnavailable(f"{self._away} does not answer ({_name(error)})") from None
        await asyncio.sleep(RETRY_S if self._away else 0)

    def _note_found(self, server: Server) -> None:
        self.server_healthy = True
        if server.lost_at is not None:
            log.info(
                "inference server at %s answers after %.1f s",
                server.root,
                time.monotonic() - server.lost_at,
            )
            server.lost_at = None


def _name(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientResponseError):
        return f"status {error.status}"
    if isinstance(error, openai.APIStatusError):
        return f"status {error.status_code}"
    return "time-out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
