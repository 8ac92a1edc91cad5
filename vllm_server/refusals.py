"""The sampling policy of rollouts, and the log of refused and adjusted requests.

The trainer computes log softmax(logits / temperature). Sampling options that cut, mask or shift the
distribution renormalise what vLLM returns, and so enter every importance ratio. `SamplingPolicy`
decides about such options in rollouts: requests that ask for logprobs, or whose header says so.

The log gives each reason once, then its count; the cockpit's `diagnoses/stall_rules.py` reads it:

    refused 331 requests to /generate (400): top_p=0.95: changes ... [of 332 since 10:04:51]
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atropos_common.net.body import replayed
from atropos_common.net.connections import connection_of
from atropos_common.protocol.bridge import SAMPLING_HEADER, SPLIT_HEADER
from vllm_server.auth import error_response, path_kind, route_path

logger = logging.getLogger(__name__)

WHY = (
    "changes the distribution, and the trainer knows only the temperature, so the returned "
    "logprobs would bias the importance ratio"
)
AS_ASKED = '`sampling = "as_asked"` under [vllm] takes such options, "refuse" refuses them'
# Key of the log in a request's scope.
ADJUSTED = "atropos.adjusted"

# Option -> values that have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),  # a forced call is generated under a grammar
    # A float, so `without` does not send it: -1 differs between releases.
    "thinking_token_budget": (None, -1.0),
    "watermarking": (None, False),
    "use_beam_search": (None, False),
}
# Without effect on greedy decoding: they never drop the likeliest token.
_FILTERS = ("top_p", "top_k", "min_p")
_ROUTES = ("/v1/completions", "/v1/chat/completions")


def leaks(options: Mapping[str, Any]) -> list[str]:
    """Return the options, as `name=value`, that would change the returned logprobs."""
    greedy = options.get("temperature") == 0
    return [
        f"{name}={options[name]!r}"
        for name, neutral in _NEUTRAL.items()
        if name in options and options[name] not in neutral and not (greedy and name in _FILTERS)
    ]


def instead(leaking: Iterable[str]) -> str:
    """Return advice, such as `Send top_p=1`, `Leave out logit_bias`."""
    names = names_of(leaking)
    neutral = {name: value for name in names for value in _NEUTRAL[name] if type(value) is int}
    send = [f"{name}={value}" for name, value in neutral.items()]
    leave = [name for name in names if name not in neutral]
    parts = [f"send {', '.join(send)}"] if send else []
    parts += [f"leave out {', '.join(leave)}"] if leave else []
    return " and ".join(parts).capitalize()


def without(names: Iterable[str]) -> dict[str, Any]:
    """Return neutral values for options of these names."""
    return {
        name: next((value for value in _NEUTRAL[name] if type(value) in (int, bool, list)), None)
        for name in names
    }


def names_of(leaking: Iterable[str]) -> list[str]:
    return [item.partition("=")[0] for item in leaking]


def served_defaults(model_config: Any) -> dict[str, Any]:
    """Return the defaults that vLLM's routes add to a request; log those that are not applied."""
    served: dict[str, Any] = model_config.get_diff_sampling_param()
    if model_config.generation_config == "vllm":
        left_out = leaks(model_config.try_get_generation_config())
        if left_out:
            logger.info(
                "the model's generation_config.json asks for %s: not applied, since it %s. "
                "Requests may name it themselves; --generation-config auto makes it the default of "
                "/v1 requests without logprobs",
                ", ".join(left_out),
                WHY,
            )
    elif leaking := leaks(served):
        logger.warning(
            "--generation-config %s makes %s the default of /v1. The sampling policy decides "
            "whether rollouts ignore it, or are refused unless they send neutral values",
            model_config.generation_config,
            ", ".join(leaking),
        )
    return served


class PlainSampling:
    """ASGI middleware for vLLM's `--middleware`: applies the sampling policy to `/v1`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # vLLM's app carries the policy, and the defaults of the served model.
        state = scope["app"].state if "app" in scope else None
        policy = "as_asked"
        if state is not None:
            policy = getattr(state, "atropos_sampling_policy", "plain")
        post = scope["type"] == "http" and scope["method"] == "POST"
        if policy == "as_asked" or not post or not scope["path"].endswith(_ROUTES):
            await self.app(scope, receive, send)
            return
        raw = await Request(scope, receive).body()  # the auth middleware has read it completely
        body = _parsed(raw)
        defaults = getattr(state, "atropos_sampling", {})
        leaking = _leaking(body, defaults, Headers(scope=scope).get(SPLIT_HEADER) == "train")
        if not leaking:
            await self.app(scope, replayed([_request(raw)], receive), send)
        elif policy == "refuse":
            reason = f"{', '.join(leaking)}: {WHY}. {instead(leaking)}, or ask for no logprobs"
            await error_response(400, reason)(scope, receive, send)
        else:
            note_adjusted(scope, leaking)
            raw = json.dumps(body | without(names_of(leaking))).encode()
            scope = {**scope, "headers": list(scope["headers"])}
            headers = MutableHeaders(scope=scope)
            headers["content-length"] = str(len(raw))
            del headers["transfer-encoding"]
            await self.app(scope, replayed([_request(raw)], receive), _with_header(send, leaking))


def _request(body: bytes) -> Message:
    return {"type": "http.request", "body": body, "more_body": False}


def _with_header(send: Send, leaking: Iterable[str]) -> Send:
    named = (SAMPLING_HEADER.lower().encode(), ", ".join(names_of(leaking)).encode())

    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), named]}
        await send(message)

    return add


# Anything but an object is left to vLLM, whose error message is better.
def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _leaking(body: dict[str, Any], defaults: Mapping[str, Any], rollout: bool) -> list[str]:
    # Other requests, such as an evaluation's over `/v1`, sample freely. 0 asks for the sampled
    # token's logprob; only None and False ask for none.
    asks = body.get("logprobs") is not None and body["logprobs"] is not False
    if not body or not (rollout or asks):
        return []
    named = {name: value for name, value in body.items() if value is not None}
    return leaks({**defaults, **named})


# Seconds between the first two lines of a reason; later intervals triple.
FIRST_GAP_S = 5.0
LAST_GAP_S = 300.0
# Refusals up to which the interval does not grow.
FEW = 10
# Seconds without a refusal after which a reason counts as new.
FORGET_S = 600.0
# Reasons that are kept apart; all others share one entry.
REASONS = 32
BODY_BYTES = 64 * 1024
REASON_CHARACTERS = 480
PATH_CHARACTERS = 60

_VALUES = re.compile(
    r"""\{[^{}]*\}|\[[^\[\]]*\]|'[^']*'|"[^"]*"|[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"""
)
_OTHERS = (0, "", "")


@dataclass
class _Reason:
    """Count and log state of one reason; times of the event loop's clock."""

    path: str
    status: int
    text: str
    ended_before: int
    """Requests answered before its first refusal."""
    since: float
    """Unix seconds of its first refusal."""
    count: int = 0
    said: int = 0
    said_at: float = float("-inf")
    """Time of its last log line."""
    heard_at: float = 0.0
    gap_s: float = field(default_factory=lambda: FIRST_GAP_S)
    timer: asyncio.TimerHandle | None = None


class RefusalLog:
    """Counts requests and writes the log lines; belongs to one event loop."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self._reasons: dict[tuple[int, str, str], _Reason] = {}

    def note(self, path: str, status: int, words: str) -> None:
        """Count a request in flight as refused with `status`, or as adjusted (status 0)."""
        now = asyncio.get_running_loop().time()
        text = shown(words, REASON_CHARACTERS)
        reason = self._reason(path, status, text, now)
        reason.count += 1
        reason.heard_at = now
        if reason.timer is not None:
            return
        if (wait := reason.said_at + reason.gap_s - now) > 0:
            reason.timer = asyncio.get_running_loop().call_later(wait, self._say, reason)
        else:
            self._say(reason)

    def close(self) -> None:
        """Log everything that is still unlogged, at shutdown."""
        for reason in self._reasons.values():
            self._say(reason)

    def _reason(self, path: str, status: int, text: str, now: float) -> _Reason:
        key = (status, path, _VALUES.sub("", text))
        if key not in self._reasons and len(self._reasons) >= REASONS:
            self._forget(now)
            key = _OTHERS if len(self._reasons) >= REASONS else key
        reason = self._reasons.get(key)
        if reason is None or now - reason.heard_at > FORGET_S:
            if reason is not None:
                self._say(reason)
            reason = self._reasons[key] = _Reason(path, status, text, self.ended, time.time())
        if key == _OTHERS:
            reason.path, reason.status, reason.text = path, status, text
        return reason

    def _forget(self, now: float) -> None:
        for key, reason in list(self._reasons.items()):
            if now - reason.heard_at > FORGET_S:
                self._say(reason)
                del self._reasons[key]

    def _say(self, reason: _Reason) -> None:
        if reason.timer is not None:
            reason.timer.cancel()
            reason.timer = None
        if reason.count == reason.said:
            return
        if reason.said and reason.count > FEW:
            reason.gap_s = min(3 * reason.gap_s, LAST_GAP_S)
        reason.said, reason.said_at = reason.count, asyncio.get_running_loop().time()
        # A delayed line says how old its newest refusal is: the cause may have ended since.
        age_s = int(reason.said_at - reason.heard_at)
        requests = f"{reason.count} request{'' if reason.count == 1 else 's'}"
        path = shown(quote(reason.path), PATH_CHARACTERS)
        what = f"adjusted {requests} to {path}"
        if reason.status:
            what = f"refused {requests} to {path} ({reason.status})"
        of = self.begun - reason.ended_before
        since = time.strftime("%H:%M:%S", time.localtime(reason.since))
        ago = f" (last {age_s} s ago)" if age_s else ""
        logger.warning("%s: %s [of %d since %s]%s", what, reason.text, of, since, ago)


def note_adjusted(scope: Scope, leaking: Iterable[str]) -> None:
    """Log that these options were removed from a request."""
    log: RefusalLog | None = scope.get(ADJUSTED)
    if log is not None:
        log.note(route_path(scope), 0, f"{', '.join(leaking)} left out: {WHY}. {AS_ASKED}")


class Refusals:
    """Outermost ASGI middleware: counts refusals from any layer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.log = RefusalLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                await self.app(scope, receive, send)
            finally:
                self.log.close()
        elif _generates(scope) and _is_of_the_run(scope):
            await self._watch(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, body = 0, bytearray()

        async def listen(message: Message) -> None:
            nonlocal status
            if status:
                body.extend(message.get("body", b"")[: BODY_BYTES - len(body)])
            elif message["type"] == "http.response.start" and 400 <= message["status"] < 500:
                status = message["status"]
            await send(message)

        self.log.begun += 1
        try:
            await self.app({**scope, ADJUSTED: self.log}, receive, listen)
        finally:
            if status:
                self.log.note(route_path(scope), status, reason_of(bytes(body)))
            self.log.ended += 1


def _generates(scope: Scope) -> bool:
    post = scope["type"] == "http" and scope["method"] == "POST"
    return post and path_kind(route_path(scope)) == "generation"


# A diagnosis blames an environment for what this log counts.
def _is_of_the_run(scope: Scope) -> bool:
    connection = connection_of(scope)
    return connection is None or connection.own


def reason_of(body: bytes) -> str:
    """Return the reason in an error answer, else the body itself."""
    text = body.decode(errors="replace")
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text or "no reason was given"
    if isinstance(found, dict):
        found = found.get("error", found.get("detail", found))
    if isinstance(found, dict):
        found = found.get("message", found)
    return found if isinstance(found, str) else json.dumps(found)


def shown(text: str, limit: int) -> str:
    """Return `text` as one line with escaped control characters, cut in its middle if too long."""
    # Clients choose the words.
    text = " ".join(text.split())
    text = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
