"""Client of the inference servers, with the interface of atroposlib's `VLLMServer`."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import httpx
import msgspec
import openai
from atroposlib.envs.server_handling.vllm_server import VLLMServer

from atropos_common.protocol.bridge import (
    ARRAYS,
    FORM_HEADER,
    SAMPLING_HEADER,
    SPLIT_HEADER,
    TAKE_PATH,
    RecordedTurn,
    RecordedTurns,
    TakeRequest,
)
from atropos_common.system.run_dir import ENV_ENGINE_URLS
from atropos_envs.hosting.rollout import present

log = logging.getLogger(__name__)
T = TypeVar("T")

# Seconds between two tries while the server is away, held or starting.
RETRY_S = 0.5
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=2)
NO_SERVER = "no inference server is given; pass --openai.base_url http://127.0.0.1:PORT/v1"
# Errors of a client whose server is unreachable.
AWAY = (
    openai.APIConnectionError,
    aiohttp.ClientConnectionError,
    httpx.TransportError,
    OSError,
    TimeoutError,
)
# Statuses that mean a wrong server or key. Other 4xx answers concern one request.
_FATAL = dict.fromkeys((401, 403), "refuses this client")
_FATAL |= dict.fromkeys((404, 405), "has no such route")


class EngineUnavailable(RuntimeError):
    """No server answers, or it is held, and the caller waits no longer."""


class EngineRefused(ValueError):
    """The server refused the request, so a retry cannot help."""

    def __init__(self, message: str, *, fatal: bool) -> None:
        super().__init__(message)
        self.fatal = fatal
        """Wrong server or key: it refuses every request."""


@dataclass(frozen=True)
class Generation:
    """N completions of one prompt, with lists of equal lengths, end token included."""

    prompt_ids: list[int]
    token_ids: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    weight_versions: list[tuple[int, int] | None]
    """Oldest and newest of each completion; None if unknown."""

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version of the first completion."""
        return self.weight_versions[0] and self.weight_versions[0][0]


def parse_generation(prompt_ids: Sequence[int], answer: dict[str, Any]) -> Generation:
    """Read the answer of `POST /generate` in either form.

    Raises:
        EngineRefused: it has no logprobs, so it cannot be trained on.
    """
    try:
        token_ids, logprobs = _tokens(answer)
        reasons = [str(reason) for reason in answer["finish_reasons"]]
    except (KeyError, TypeError, IndexError, StopIteration, AttributeError):
        fault = "the server's /generate returns no logprobs; start it with `python -m vllm_server`"
        raise EngineRefused(fault, fatal=True) from None
    versions = answer.get("weight_versions") or [None] * len(token_ids)
    return Generation(
        prompt_ids=list(prompt_ids),
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reasons=reasons,
        # A server whose weights have no version yet answers None, or a pair with None.
        weight_versions=[
            (int(pair[0]), int(pair[1])) if pair and None not in pair else None for pair in versions
        ],
    )


def _tokens(answer: dict[str, Any]) -> tuple[list[list[int]], list[list[float]]]:
    if "sampled_logprobs" in answer:
        return answer["token_ids"], answer["sampled_logprobs"]
    # Other servers ignore `FORM_HEADER`. [N][T] of `[{token id: logprob}]`; with `logprobs: 0` each
    # step has the sampled token alone.
    chosen = [[next(iter(step[0].items())) for step in sequence] for sequence in answer["logprobs"]]
    return (
        [[int(token) for token, _ in sequence] for sequence in chosen],
        [[float(logprob) for _, logprob in sequence] for sequence in chosen],
    )


def with_one_bos(prompt_ids: list[int], tokenizer: Any) -> list[int]:
    """Drop the second of two first tokens: chat template and tokenizer may both add one."""
    bos = tokenizer.bos_token_id
    return prompt_ids[1:] if bos is not None and prompt_ids[:2] == [bos, bos] else prompt_ids


def root_of(base_url: str) -> str:
    """Return a server's address without the path of its OpenAI routes."""
    return base_url.rstrip("/").removesuffix("/v1")


def addresses(base_url: str) -> list[str]:
    """Return the plan's servers behind `base_url`, itself included."""
    known = os.environ.get(ENV_ENGINE_URLS, "").split()
    return known if base_url.rstrip("/") in known else [base_url.rstrip("/")]


class Server:
    """State of one server."""

    def __init__(self, base_url: str) -> None:
        self.root = base_url.removesuffix("/v1")
        self.under_way = 0
        """Completions in flight."""
        self.weight = 1.0
        """Completions that it can take, in proportion to the other servers."""
        self.asked = 0
        """Requests since the start."""
        self.tried_at = 0.0
        self.lost_at: float | None = None
        """Start of its absence in monotonic seconds."""

    @contextmanager
    def busy(self, completions: int) -> Iterator[None]:
        self.asked += 1
        self.tried_at = time.monotonic()
        self.under_way += completions
        try:
            yield
        finally:
            self.under_way -= completions


# Client -> server of the present group.
_chosen: ContextVar[dict[Any, Server] | None] = ContextVar("chosen", default=None)


def begin_group() -> None:
    """Start a group in this task and its children: its requests go to one server."""
    _chosen.set({})


def present_group() -> dict[Any, Server]:
    """Return the servers of this task's group, for `join_group`; a new group outside of one."""
    found = _chosen.get()
    return {} if found is None else found


def join_group(group: dict[Any, Server]) -> None:
    """Make this task's requests part of `group`."""
    _chosen.set(group)


class EngineClient(VLLMServer):  # type: ignore[misc]
    """Client of one inference server, or of several alike."""

    patience_s: float = math.inf
    """Seconds that a request waits for an absent server."""

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
        """Requests from which the server removed an option, by option."""
        self._warned_context = False
        # One connection pool for all servers; the hook reads our headers, which the openai client
        # drops.
        http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [self._on_response]})
        # atroposlib's client of vLLM's own routes, for each server.
        self._v1_clients: dict[Server, EngineClient] = {}
        for url in urls:
            view = copy.copy(self)
            # The openai client's own retries would all go to one server.
            retries = self.openai.max_retries if len(urls) == 1 else 0
            view.openai = self.openai.with_options(
                base_url=url, http_client=http, max_retries=retries
            )
            self._v1_clients[Server(url)] = view
        self._servers = list(self._v1_clients)

    # atroposlib's `ServerManager` chooses at a group's start, when all servers look free, so groups
    # that start together all go to one. A group stays with its server for the prefix cache.
    def _choose(self) -> Server:
        """Return the group's server, else the least busy one, else the one tried longest ago."""
        now, group = time.monotonic(), _chosen.get()
        present = [
            server
            for server in self._servers
            # An absent server gets one request every `RETRY_S`: a group must not hang on it whole.
            if server.lost_at is None or (not server.under_way and now - server.tried_at >= RETRY_S)
        ]
        own = group.get(self) if group is not None else None
        if own in present:
            return own
        if not present:
            return min(self._servers, key=lambda server: server.tried_at)
        # Among equally busy servers the least used one, so that a sequence of single requests
        # alternates.
        server = min(
            present,
            key=lambda each: (each.under_way / each.weight, each.asked / each.weight),
        )
        if group is not None:
            group[self] = server
        return server

    @property
    def under_way(self) -> int:
        """Completions in flight, over all servers."""
        return sum(self.under_way_at.values())

    @property
    def under_way_at(self) -> Counter[str]:
        """Completions in flight by server address."""
        return Counter({server.root: server.under_way for server in self._servers})

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Divide the groups that begin from now on in proportion to `weights`, by address."""
        for server in self._servers:
            server.weight = max(1.0, weights.get(server.root, server.weight))

    @property
    def _away(self) -> str:
        """Names of the servers if none answers."""
        if any(server.lost_at is None for server in self._servers):
            return ""
        return " and ".join(server.root for server in self._servers)

    async def generate(
        self, prompt_ids: Sequence[int], *, wait: bool = True, **sampling: Any
    ) -> Generation:
        """Call `POST /generate` with vLLM's sampling parameters; errors as in `_request`."""
        body: dict[str, Any] = {
            "prompt": {"prompt_token_ids": list(prompt_ids)},
            "logprobs": 0,
        } | sampling
        answer = await self._request(self._post, body, lambda: len(prompt_ids), wait=wait)
        generation = parse_generation(prompt_ids, answer)
        present().tokens += sum(map(len, generation.token_ids))
        return generation

    async def tokens_and_logprobs_completion(
        self, **request: Any
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """Return prompt ids, then ids, logprobs and finish reason of each completion."""
        split = request.pop("split", "train")
        wait = request.pop("wait", True)
        # Fields of atroposlib that `/generate` does not know.
        for unused in ("model", "skip_reasoning"):
            request.pop(unused, None)
        prompt = request.pop("prompt", None)
        ids = request.pop("input_ids", None)
        prompt_ids = list(ids) if ids is not None else self.tokenizer.encode(prompt)
        prompt_ids = with_one_bos(prompt_ids, self.tokenizer)
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
        """Return an answer of `/v1/chat/completions`."""
        request = self._inject_reasoning_kwargs(request)
        messages = request.get("messages")
        return await self._call_v1(
            "_chat_completion_wrapper", request, lambda: self._chat_length(messages)
        )

    async def completion(self, **request: Any) -> Any:
        """Return an answer of `/v1/completions`."""
        prompt = request.get("prompt")

        def length() -> int:
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            return len(ids or [])

        return await self._call_v1("_completion_wrapper", request, length)

    async def _call_v1(
        self, method: str, request: dict[str, Any], prompt_length: Callable[[], int]
    ) -> Any:
        split = request.pop("split", "train")
        request["model"] = self.config.model_name
        request["extra_headers"] = {**(request.get("extra_headers") or {}), SPLIT_HEADER: split}

        async def ask(server: Server, fitted: dict[str, Any]) -> Any:
            try:
                return await getattr(self._v1_clients[server], method)(**fitted)
            except openai.APIStatusError as error:
                # 5xx: the server is starting or held, so `_request` tries again.
                if isinstance(error, openai.InternalServerError):
                    raise
                text = f"{server.root}/v1: {error.status_code}: {error.message[:300]}"
                raise EngineRefused(text, fatal=error.status_code in (401, 403, 405)) from None

        async with self._limited(split):
            answer = await self._request(ask, request, prompt_length)
        # A stream has no usage.
        usage = getattr(answer, "usage", None)
        present().tokens += getattr(usage, "completion_tokens", 0)
        return answer

    async def forward(
        self, body: dict[str, Any], deliver: Callable[[Server, aiohttp.ClientSession], Awaitable[T]]
    ) -> T:
        """Let `deliver` send a rollout's request to a server; again while no server answers.

        Args:
            body: the request, for its number of completions.
            deliver: raises one of `AWAY` or aiohttp's errors if another try makes sense.
        """

        async def ask(server: Server, _: dict[str, Any]) -> T:
            return await deliver(server, self._http())

        async with self._limited("train"):
            # vLLM cuts `max_tokens` to its context by itself.
            return await self._request(ask, {"n": body.get("n")}, lambda: 0)  # type: ignore[no-any-return]

    async def take(self, server: Server, rollout: str) -> list[RecordedTurn]:
        """Return the turns that `server` recorded of a rollout; it forgets them."""
        body = TakeRequest(rollout=rollout).model_dump()
        async with self._http().post(f"{server.root}{TAKE_PATH}", json=body) as response:
            response.raise_for_status()
            return RecordedTurns.model_validate_json(await response.read()).turns

    @asynccontextmanager
    async def _limited(self, split: str) -> AsyncIterator[None]:
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
        """Return the result of `ask` for `request`; retry while no server answers.

        Raises:
            EngineUnavailable: no answer within `patience_s`; with `wait=False`, at the first try.
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
                        if wanted := request.get(name):
                            request[name] = await self._fit_context(server, wanted, prompt_length)
                    answer = await ask(server, request)
            except (*AWAY, openai.InternalServerError, aiohttp.ClientError) as error:
                may_wait = wait and time.monotonic() - started <= self.patience_s
                await self._lost(server, error, may_wait=may_wait)
            else:
                self._note_found(server)
                return answer

    # Environments are often written for models with a longer context.
    async def _fit_context(
        self, server: Server, max_tokens: int, prompt_length: Callable[[], int]
    ) -> int:
        if self._context is None:
            self._context = await self._served_context(server)
        left = self._context - prompt_length()
        if max_tokens <= left or left < 1:
            return max_tokens  # a prompt that is too long is refused in the server's own words
        if not self._warned_context:
            self._warned_context = True
            log.warning(
                "a request asks for %d tokens beyond its prompt, but the server's context is %d in "
                "all: completions are cut shorter; raise vllm.max_model_len",
                max_tokens,
                self._context,
            )
        return left

    async def _served_context(self, server: Server) -> int:
        async with self._http().get(f"{server.root}/v1/models") as response:
            # Without this route, or access to it, no limit is known.
            if 400 <= response.status < 500:
                return 2**31
            response.raise_for_status()
            models = (await response.json())["data"]
        return int(models[0].get("max_model_len") or 2**31)

    def _chat_length(self, messages: Any) -> int:
        options = {"add_generation_prompt": True, "return_dict": False}
        try:
            return len(self.tokenizer.apply_chat_template(messages, **options))
        except Exception:  # no template, or parts that are not text: the server judges
            return 0

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            key = self.config.api_key
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self.config.timeout, sock_connect=5),
                connector=aiohttp.TCPConnector(limit=0),
                headers={"Authorization": f"Bearer {key}"} if key else {},
            )
        return self._session

    async def _post(self, server: Server, body: dict[str, Any]) -> dict[str, Any]:
        url, headers = f"{server.root}/generate", {FORM_HEADER: ARRAYS}
        async with self._http().post(url, json=body, headers=headers) as response:
            # 408, 425 and 429 are temporary: `raise_for_status` below makes them errors to retry.
            if 400 <= response.status < 500 and response.status not in (408, 425, 429):
                raise await self._refusal(server, response)
            response.raise_for_status()
            self.count_adjusted(response.headers)
            answer: dict[str, Any] = await response.json(loads=_decoded)
            return answer

    async def _on_response(self, response: httpx.Response) -> None:
        self.count_adjusted(response.headers)

    def count_adjusted(self, headers: Mapping[str, str]) -> None:
        if SAMPLING_HEADER in headers:
            self.adjusted.update(headers[SAMPLING_HEADER].split(", "))

    async def _refusal(self, server: Server, response: aiohttp.ClientResponse) -> EngineRefused:
        text = (await response.text())[:300]
        if response.status in _FATAL:
            reason = f"{server.root}/generate {_FATAL[response.status]} ({response.status}): {text}"
            fix = "Start `python -m vllm_server` and check --openai.base_url"
            return EngineRefused(f"{reason}. {fix}", fatal=True)
        return EngineRefused(f"{server.root}/generate: {response.status}: {text}", fatal=False)

    # Returns when another try makes sense; raises EngineUnavailable if none does.
    async def _lost(self, server: Server, error: BaseException, *, may_wait: bool) -> None:
        if server.lost_at is None:
            server.lost_at = time.monotonic()
            others = "" if len(self._servers) == 1 or self._away else "; the others go on"
            why = f"{server.root} ({_name(error)})"
            log.warning("waiting for the inference server at %s%s", why, others)
        self.server_healthy = not self._away
        if self._away and not may_wait:
            raise EngineUnavailable(f"{self._away} does not answer ({_name(error)})") from None
        await asyncio.sleep(RETRY_S if self._away else 0)

    def _note_found(self, server: Server) -> None:
        self.server_healthy = True
        if server.lost_at is not None:
            away_s = time.monotonic() - server.lost_at
            log.info("inference server at %s answers after %.1f s", server.root, away_s)
            server.lost_at = None


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return json.loads(text)  # NaN and Infinity, which servers in Python write


def _name(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientResponseError):
        return f"status {error.status}"
    if isinstance(error, openai.APIStatusError):
        return f"status {error.status_code}"
    return "time-out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


# An environment's own clients do not wait for an engine, so its groups are held back.
class EngineGate:
    """Open while an engine answers `/health`, and always without engines."""

    def __init__(self, urls: Sequence[str], http: Callable[[], aiohttp.ClientSession]) -> None:
        self._roots = [root_of(url) for url in urls]
        self._http = http
        self._closed = asyncio.Event()
        # Closed at first: the environment may start before its engine.
        if self._roots:
            self._closed.set()

    @property
    def open(self) -> bool:
        return not self._closed.is_set()

    async def watch(self) -> None:
        """Open the gate when an engine answers again."""
        while True:
            await self._closed.wait()
            began = time.monotonic()
            if not await self._answers():
                log.info("no engine answers at %s; new groups wait", " or ".join(self._roots))
                while not await self._answers():
                    await asyncio.sleep(RETRY_S)
                log.info("an engine answers after %.1f s", time.monotonic() - began)
            self._closed.clear()

    async def explains(self, error: BaseException) -> bool:
        """Return True, and close the gate, if a rollout failed because no engine answers."""
        if not self._roots or not any(isinstance(cause, AWAY) for cause in _causes(error)):
            return False
        # One request decides: a judge or a search tool that is away raises the same errors.
        if await self._answers():
            return False
        self._closed.set()
        return True

    async def _answers(self) -> bool:
        for root in self._roots:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self._http().get(f"{root}/health", timeout=HEALTH_TIMEOUT) as response:
                    # A 401 or 404 also shows that a server is there.
                    if response.status < 500:
                        return True
        return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        last = getattr(error, "last_attempt", None)
        # tenacity's RetryError hides the real error in its last attempt, not in `__cause__`.
        error = last.exception() if last is not None else error.__cause__ or error.__context__
