"""Client of the inference server's routes; every request carries the run's token."""

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
    VersionSpan,
    VersionsRequest,
    VersionsResponse,
    WeightsLoaded,
)
from atropos_common.system.run_dir import ENV_TOKEN
from trainer_core.errors import EngineError, EngineGone

AWAY_S = 1.0
"""Timeout in seconds for a server that hangs."""


@dataclass(frozen=True)
class GeneratedTokens:
    """Generated tokens and their logprobs in nats."""

    token_ids: list[int]
    logprobs: list[float]
    cached_tokens: int | None = None
    """Prompt tokens from the prefix cache."""
    experts: NDArray[np.int16] | None = None
    """Chosen experts of prompt and answer, as `Rollout.experts`."""


class ServerClient:
    """Client of one inference server; threads may share it.

    Raises (every method):
        EngineGone: no answer, HTTP 5xx, or another server than `instance` answers.
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
        self.instance: str | None = None  # the only server that may answer; None: any
        self.away = False  # given up as hanging
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
        """Stop generation, as in `PauseRequest`; `dirty` before writing weights."""
        request = PauseRequest(
            lease_s=lease_s, dirty=dirty, in_flight=in_flight, wait_s=wait_s, holder=self._holder
        )
        return _parse(BridgeInfo, self._call("POST", "/bridge/pause", request, more_s=wait_s))

    def resume(self, weight_version: int) -> BridgeInfo:
        """Reset the prefix cache and generate with the current weights."""
        request = ResumeRequest(weight_version=weight_version, holder=self._holder)
        return _parse(BridgeInfo, self._call("POST", "/bridge/resume", request))

    def versions(self, digests: list[str]) -> list[VersionSpan | None]:
        """Return the weight versions of each completion."""
        answer = self._call("POST", "/bridge/versions", VersionsRequest(digests=digests))
        return _parse(VersionsResponse, answer).spans()

    def logprobs(
        self, prompts: list[str], completions: list[list[int]]
    ) -> list[KnownLogprobs | None]:
        """Return the logprobs recorded with each completion."""
        request = LogprobsRequest(prompts=prompts, completions=completions)
        return _parse(LogprobsResponse, self._call("POST", "/bridge/logprobs", request)).found

    def routing(
        self, prompts: list[str], completions: list[list[int]], starts: list[int]
    ) -> list[NDArray[Any] | None]:
        """Return the recorded experts of each completion."""
        request = RoutingRequest(prompts=prompts, completions=completions, starts=starts)
        found = _parse(RoutingResponse, self._call("POST", "/bridge/routing", request)).found

        def decoded(one: Any) -> NDArray[Any]:
            raw = np.frombuffer(base64.b64decode(one.data), "<u2" if one.wide else "u1")
            return raw.reshape(one.shape)

        try:
            return [None if one is None else decoded(one) for one in found]
        except ValueError as error:
            where = f"{self.base_url}/bridge/routing"
            raise EngineError(f"{where}: malformed answer ({error})") from None

    def join_transfer(self, request: TransferInit) -> BridgeInfo:
        """Make every worker join the trainer's process group."""
        more_s = request.timeout_s
        answer = self._call("POST", "/bridge/transfer/init", request, more_s=more_s)
        return _parse(BridgeInfo, answer)

    def receive(self, request: TransferUpdate) -> TransferReport:
        """Receive the group's broadcast and serve those weights."""
        more_s = request.wait_s + request.timeout_s
        answer = self._call("POST", "/bridge/transfer/update", request, more_s=more_s)
        return _parse(TransferReport, answer)

    def load_weights(self, request: LoadWeightsRequest) -> WeightsLoaded:
        """Serve the weights in a folder, now or from the next start on."""
        more_s = request.wait_s + request.lease_s
        return _parse(WeightsLoaded, self._call("POST", "/bridge/load", request, more_s=more_s))

    def load_adapter(self, path: str, weight_version: int) -> AdapterInfo:
        """Serve the LoRA adapter in `path` from the next request on."""
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
        """Decode exactly `max_tokens` tokens; a new `salt` bypasses the prefix cache."""
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
            what = f"{self.base_url}/generate answers without logprobs"
            raise EngineError(f"{what}. fix: serve with python -m vllm_server") from None

    def close(self) -> None:
        self._http.close()

    def _call(self, method: str, path: str, body: Any = None, *, more_s: float = 0.0) -> Any:
        # `body` is a pydantic request or a plain dict.
        payload = body.model_dump() if hasattr(body, "model_dump") else body
        limit_s = AWAY_S if self.away else self._timeout_s + more_s
        headers = {INSTANCE_HEADER: self.instance} if self.instance else {}
        more: dict[str, Any] = {"json": payload, "headers": headers, "timeout": limit_s}
        try:
            response = self._http.request(method, path, **more)
        except httpx.TransportError as error:
            detail = str(error) or type(error).__name__
            raise EngineGone(
                f"the inference server at {self.base_url} does not answer {path} ({detail})"
            ) from None
        if (status := response.status_code) >= 400:
            what = f"{self.base_url}{path}: HTTP {status} {_error_text(response)}{_hint(response)}"
            # 5xx may pass, so callers retry it; 4xx is our own mistake.
            raise EngineGone(what, answered=True) if status >= 500 else EngineError(what)
        try:
            return response.json()
        except ValueError:
            what = f"{self.base_url}{path} does not answer JSON"
            raise EngineError(f"{what}. fix: serve with python -m vllm_server") from None


@dataclass(frozen=True)
class EngineUse:
    """Use of the engines over a time span."""

    idle: float | None = None
    """Share of the time without a completion request, mean over servers."""
    capacity: float | None = None
    """Tokens per second divided by the servers' estimated maximum; may exceed 1 for a moment."""
    generated: int | None = None
    """Tokens that the servers generated, evaluations included."""


UNKNOWN_USE = EngineUse()


class EngineMeter:
    """Use of the engines between two calls."""

    def __init__(self, servers: Sequence[ServerClient]) -> None:
        self._servers = servers
        self._before: tuple[float, list[BridgeInfo | None]] = (0.0, [])

    def measure(self) -> EngineUse:
        """Return the use since the last call, by servers that have not restarted."""
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
        return EngineUse(
            _idle_share(pairs, at - before_at),
            _capacity_share(pairs, at - before_at),
            _generated(before, infos),
        )

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
        before, after = then.generated_tokens, now.generated_tokens
        if now.capacity_tokens_per_s and before is not None and after is not None:
            tokens += after - before
            ceiling += now.capacity_tokens_per_s
    # May exceed 1: tokens arrive in groups, and the ceiling is an estimate. A limit for each step
    # would lower the mean over steps.
    return tokens / seconds / ceiling if ceiling else None


def _generated(
    before: Sequence[BridgeInfo | None], infos: Sequence[BridgeInfo | None]
) -> int | None:
    grown = []
    for then, now in zip(before, infos, strict=True):
        if then and now and now.generated_tokens is not None:
            # A new server counts from 0.
            same = then.instance_id == now.instance_id
            grown.append(now.generated_tokens - ((then.generated_tokens or 0) if same else 0))
    return sum(grown) if grown else None


def _error_text(response: httpx.Response) -> str:
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
        what = error.errors()[0]["msg"]
        raise EngineError(f"unexpected answer, not a {kind.__name__}: {what}") from None
