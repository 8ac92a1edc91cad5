"""Client of the inference server's routes. Every request carries the run's token."""

from __future__ import annotations

import base64
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from atropos_common.broadcast.transfer import TransferInit, TransferReport, TransferUpdate
from atropos_common.net.http import LIMITS, certificates
from atropos_common.protocol.bridge import (
    INSTANCE_HEADER,
    TOKEN_HEADER,
    AdapterInfo,
    BridgeInfo,
    InFlight,
    KnownLogprobs,
    LoadAdapterRequest,
    LoadWeightsRequest,
    LogprobsRequest,
    LogprobsResponse,
    PauseRequest,
    ResumeRequest,
    RoutingRequest,
    RoutingResponse,
    VersionsRequest,
    VersionsResponse,
    WeightsLoaded,
)
from atropos_common.system.run_dir import ENV_TOKEN
from trainer_core.errors import EngineError, EngineGone

AWAY_S = 1.0
"""Timeout in seconds for a server that was given up as hanging."""


@dataclass(frozen=True)
class GeneratedTokens:
    """T generated tokens and their logprobs in nats."""

    token_ids: list[int]
    logprobs: list[float]
    cached_tokens: int | None = None
    """Prompt tokens from the prefix cache; None if the server does not report it."""
    experts: NDArray[np.int16] | None = None
    """Chosen experts of prompt and answer, as `Rollout.experts`; None: not requested, or
    unknown."""


class ServerClient:
    """Client of one inference server. Safe to share between threads.

    Raises (every method):
        EngineGone: the server does not answer or fails (HTTP 5xx): it shuts down, its engine is
            dead, or it is another one than `instance`.
        EngineError: the server refuses the request itself.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        *,
        timeout_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        token = os.environ.get(ENV_TOKEN, "") if token is None else token
        headers = {TOKEN_HEADER: token} if token else {}
        self.base_url = base_url.rstrip("/")
        self.instance: str | None = None
        """Id of the only server that may answer; None: any."""
        self.away = False
        """The server was given up as hanging: the timeout is `AWAY_S`."""
        self._timeout_s = timeout_s
        # The server lets only the holder of a pause end it.
        self._holder = uuid.uuid4().hex
        self._http = httpx.Client(
            base_url=self.base_url,
            headers=headers,
            timeout=timeout_s,
            limits=LIMITS,
            transport=transport,
            # No proxy of the environment between trainer and server.
            trust_env=False,
            verify=certificates(self.base_url),
        )

    def info(self) -> BridgeInfo:
        info: BridgeInfo = _parse(BridgeInfo, self._call("GET", "/bridge/info"))
        if self.instance not in (None, info.instance_id):
            raise EngineGone(f"another server has started at {self.base_url}", answered=True)
        return info

    def meet(self) -> BridgeInfo:
        """Bind this client to the server that answers now."""
        self.instance = None
        info = self.info()
        self.instance = info.instance_id
        return info

    def pause(
        self,
        *,
        dirty: bool,
        lease_s: float = 60.0,
        in_flight: InFlight = "keep",
        wait_s: float = 30.0,
    ) -> BridgeInfo:
        """Stop generation as in `PauseRequest`; `dirty` before writing weights."""
        request = PauseRequest(
            lease_s=lease_s, dirty=dirty, in_flight=in_flight, wait_s=wait_s, holder=self._holder
        )
        return _parse(BridgeInfo, self._call("POST", "/bridge/pause", request, more_s=wait_s))

    def resume(self, weight_version: int) -> BridgeInfo:
        """Resume with the current weights: resets the prefix cache and ends the hold."""
        request = ResumeRequest(weight_version=weight_version, holder=self._holder)
        return _parse(BridgeInfo, self._call("POST", "/bridge/resume", request))

    def versions(self, digests: list[str]) -> list[tuple[int, int] | None]:
        """Oldest and newest weight version of each completion; None if unknown."""
        answer = self._call("POST", "/bridge/versions", VersionsRequest(digests=digests))
        return _parse(VersionsResponse, answer).versions

    def logprobs(
        self, prompts: list[str], completions: list[list[int]]
    ) -> list[KnownLogprobs | None]:
        """Logprobs recorded with each completion, as in `LogprobsRequest`; None if unknown."""
        answer = self._call(
            "POST", "/bridge/logprobs", LogprobsRequest(prompts=prompts, completions=completions)
        )
        return _parse(LogprobsResponse, answer).found

    def routing(
        self, prompts: list[str], completions: list[list[int]], starts: list[int]
    ) -> list[NDArray[Any] | None]:
        """Recorded experts of each completion, as in `RoutingRequest`; None if unknown."""
        request = RoutingRequest(prompts=prompts, completions=completions, starts=starts)
        found = _parse(RoutingResponse, self._call("POST", "/bridge/routing", request)).found
        try:
            return [
                None
                if each is None
                else np.frombuffer(
                    base64.b64decode(each.data), "<u2" if each.wide else "u1"
                ).reshape(each.shape)
                for each in found
            ]
        except ValueError as error:
            raise EngineError(
                f"{self.base_url}/bridge/routing: malformed answer ({error})"
            ) from None

    def join_transfer(self, request: TransferInit) -> BridgeInfo:
        """Make every worker join the trainer's process group; wait for it."""
        return _parse(
            BridgeInfo,
            self._call("POST", "/bridge/transfer/init", request, more_s=request.timeout_s),
        )

    def receive(self, request: TransferUpdate) -> TransferReport:
        """Receive the group's broadcast and serve those weights; wait for it."""
        more_s = request.wait_s + request.timeout_s
        return _parse(
            TransferReport, self._call("POST", "/bridge/transfer/update", request, more_s=more_s)
        )

    def load_weights(self, request: LoadWeightsRequest) -> WeightsLoaded:
        """Serve the weights in a folder, now or from the next start on; wait for it."""
        more_s = request.wait_s + request.lease_s
        return _parse(WeightsLoaded, self._call("POST", "/bridge/load", request, more_s=more_s))

    def load_adapter(self, path: str, weight_version: int) -> AdapterInfo:
        """Serve the LoRA adapter in `path` as `weight_version` from the next request on."""
        request = LoadAdapterRequest(path=path, weight_version=weight_version)
        return _parse(AdapterInfo, self._call("POST", "/lora/load", request))

    def adapters(self) -> AdapterInfo:
        return _parse(AdapterInfo, self._call("GET", "/lora/status"))

    def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        temperature: float = 1.0,
        salt: str | None = None,
    ) -> GeneratedTokens:
        """Decode exactly `max_tokens` tokens after the token ids `prompt`; a new `salt` bypasses
        the prefix cache."""
        request = {
            "prompt": {"prompt_token_ids": prompt, "cache_salt": salt},
            "max_tokens": max_tokens,
            "temperature": temperature,
            # 0: only the sampled token's own logprob.
            "logprobs": 0,
            "ignore_eos": True,
        }
        answer = self._call("POST", "/generate", request)
        try:
            steps = [next(iter(step[0].items())) for step in answer["logprobs"][0]]
            ids, logprobs = [int(token) for token, _ in steps], [float(value) for _, value in steps]
            return GeneratedTokens(ids, logprobs, (answer.get("cached_tokens") or [None])[0])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, StopIteration):
            raise EngineError(
                f"{self.base_url}/generate answers without logprobs. fix: serve with python "
                f"-m vllm_server"
            ) from None

    def close(self) -> None:
        self._http.close()

    def _call(self, method: str, path: str, body: Any = None, *, more_s: float = 0.0) -> Any:
        # `body` is a pydantic request or a plain dict.
        payload = body.model_dump() if hasattr(body, "model_dump") else body
        limit_s = AWAY_S if self.away else self._timeout_s + more_s
        headers = {INSTANCE_HEADER: self.instance} if self.instance else {}
        try:
            response = self._http.request(
                method, path, json=payload, headers=headers, timeout=limit_s
            )
        except httpx.TransportError as error:
            detail = str(error) or type(error).__name__
            raise EngineGone(
                f"the inference server at {self.base_url} does not answer {path} ({detail})"
            ) from None
        if response.status_code >= 400:
            what = (
                f"{self.base_url}{path}: HTTP {response.status_code} "
                f"{_error_text(response)}{_hint(response)}"
            )
            # 5xx may pass, so callers retry it; 4xx is our own mistake.
            raise (
                EngineGone(what, answered=True)
                if response.status_code >= 500
                else EngineError(what)
            )
        try:
            return response.json()
        except ValueError:
            raise EngineError(
                f"{self.base_url}{path} does not answer JSON. fix: serve with python -m vllm_server"
            ) from None


@dataclass(frozen=True)
class EngineUse:
    """Use of the engines over a time span, by their own counts; shares from 0 to 1."""

    idle: float | None = None
    """Share of the time without a completion request; mean over the servers that report it."""
    capacity: float | None = None
    """Tokens per second divided by the servers' maximum; None if no server knows its maximum."""


UNKNOWN_USE = EngineUse()


class EngineMeter:
    """Use of the engines between two calls."""

    def __init__(self, servers: Sequence[ServerClient]) -> None:
        self._servers = servers
        self._before: tuple[float, list[BridgeInfo | None]] = (0.0, [])

    def measure(self) -> EngineUse:
        """Use since the last call; unknown at the first call, and for servers that restarted
        since."""
        at, infos = time.monotonic(), [self._info_or_none(server) for server in self._servers]
        (before_at, before), self._before = self._before, (at, infos)
        pairs = [
            (then, now)
            for then, now in zip(before, infos, strict=False)
            # Counters start at 0 in a new server.
            if then and now and then.instance_id == now.instance_id
        ]
        if not pairs or at <= before_at:
            return UNKNOWN_USE
        return EngineUse(_idle_share(pairs, at - before_at), _capacity_share(pairs, at - before_at))

    @staticmethod
    def _info_or_none(server: ServerClient) -> BridgeInfo | None:
        try:
            return server.info()
        except (EngineGone, EngineError):
            return None


def _idle_share(pairs: Sequence[tuple[BridgeInfo, BridgeInfo]], seconds: float) -> float | None:
    grown = [
        now.idle_s - then.idle_s
        for then, now in pairs
        if now.idle_s is not None and then.idle_s is not None
    ]
    # Clocks of two machines differ slightly, so a share may exceed 1.
    return min(1.0, sum(grown) / len(grown) / seconds) if grown else None


def _capacity_share(pairs: Sequence[tuple[BridgeInfo, BridgeInfo]], seconds: float) -> float | None:
    tokens = ceiling = 0.0
    for then, now in pairs:
        if (
            now.capacity_tokens_per_s
            and now.generated_tokens is not None
            and then.generated_tokens is not None
        ):
            tokens += now.generated_tokens - then.generated_tokens
            ceiling += now.capacity_tokens_per_s
    # The maximum is an estimate, so real speed may exceed it.
    return min(1.0, tokens / seconds / ceiling) if ceiling else None


def _error_text(response: httpx.Response) -> str:
    """Our servers' `error` field, or the start of another program's answer."""
    try:
        # `error` is a string in our servers and an object in vLLM's own errors.
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        error = None
    return error[:900] if isinstance(error, str) else response.text[:300]


def _hint(response: httpx.Response) -> str:
    if response.status_code in (401, 403):
        return f" (set {ENV_TOKEN} to the server's token)"
    if response.status_code == 404:
        return " (this server lacks the route: start python -m vllm_server)"
    return ""


def _parse(kind: Any, answer: Any) -> Any:
    try:
        return kind.model_validate(answer)
    except ValidationError as error:
        raise EngineError(
            f"unexpected answer, not a {kind.__name__}: {error.errors()[0]['msg']}"
        ) from None
