"""The sampling policy of rollouts, and the log of refused and adjusted requests.

The trainer computes log softmax(logits / temperature). Sampling options that cut, mask or shift the
distribution renormalise what vLLM returns and so enter every importance ratio. A request counts as
a rollout if it asks for logprobs or its header says so; `SamplingPolicy` decides about such
options. Requests without logprobs (evaluation over `/v1`) sample freely, and greedy requests may
name filters, which have no effect on them.

The log gives each reason once, then its count:

    refused 331 requests to /generate (400): top_p=0.95: changes ... Send top_p=1 [of 332 since
    10:04:51]
    adjusted 331 requests to /generate: top_p=0.95 was left out: it changes ... [of 332 since
    10:04:51]

The cockpit's `diagnoses/stall_rules.py` reads these lines. Reasons that differ only in values are
one. Clients choose the words, so the log cuts lines, escapes control characters and keeps few
reasons apart.
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
    "changes the distribution in a way that the trainer, which knows only the temperature, "
    "cannot follow, so the "
    "returned logprobs would leak into the importance ratio"
)

AS_ASKED = '`sampling = "as_asked"` under [vllm] takes such options, "refuse" refuses them'
ADJUSTED = "atropos.adjusted"
"""Key of the log in a request's scope."""

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
    "thinking_token_budget": (
        None,
        -1.0,
    ),  # a float, so `without` does not send it: -1 differs between releases
    "watermarking": (None, False),
    "use_beam_search": (None, False),
}
"""Option -> values that have no effect."""
_FILTERS = ("top_p", "top_k", "min_p")
"""Options without effect on greedy decoding: they never drop the likeliest token."""
_ROUTES = ("/v1/completions", "/v1/chat/completions")


def leaks(options: Mapping[str, Any]) -> list[str]:
    """Options, as `name=value`, that would change the returned logprobs."""
    greedy = options.get("temperature") == 0
    return [
        f"{name}={options[name]!r}"
        for name, neutral in _NEUTRAL.items()
        if name in options and options[name] not in neutral and not (greedy and name in _FILTERS)
    ]


def instead(leaking: Iterable[str]) -> str:
    """Advice for such options: `Send top_p=1`, `Leave out logit_bias`."""
    names = names_of(leaking)
    neutral = {name: value for name in names for value in _NEUTRAL[name] if type(value) is int}
    send = [f"{name}={value}" for name, value in neutral.items()]
    leave = [name for name in names if name not in neutral]
    said = [
        f"{verb} {', '.join(names)}"
        for verb, names in (("send", send), ("leave out", leave))
        if names
    ]
    return " and ".join(said).capitalize()


def without(names: Iterable[str]) -> dict[str, Any]:
    """Neutral values for options of these names."""
    return {
        name: next((value for value in _NEUTRAL[name] if type(value) is int), None)
        for name in names
    }


def names_of(leaking: Iterable[str]) -> list[str]:
    """Names in the result of `leaks`."""
    return [item.partition("=")[0] for item in leaking]


def served_defaults(model_config: Any) -> dict[str, Any]:
    """Defaults that vLLM's routes add to a request; logs which defaults of the model are not
    applied."""
    served: dict[str, Any] = model_config.get_diff_sampling_param()
    if model_config.generation_config == "vllm":
        left_out = leaks(model_config.try_get_generation_config())
        if left_out:
            logger.info(
                "the model's generation_config.json asks for %s: not applied, since it %s. "
                "Requests may name it "
                "themselves; --generation-config auto makes it the default of /v1 requests "
                "without logprobs",
                ", ".join(left_out),
                WHY,
            )
    elif leaking := leaks(served):
        logger.warning(
            "--generation-config %s makes %s the default of /v1: rollouts go without, or are "
            "refused unless they name "
            "neutral values, as the sampling policy has it",
            model_config.generation_config,
            ", ".join(leaking),
        )
    return served


class PlainSampling:
    """ASGI middleware, passed to vLLM by its own `--middleware` flag; applies the sampling policy
    to rollouts over `/v1`.

    The app carries the served model's defaults as `app.state.atropos_sampling`, and the policy as
    `app.state.atropos_sampling_policy`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        policy = (
            getattr(scope["app"].state, "atropos_sampling_policy", "plain")
            if "app" in scope
            else "as_asked"
        )
        ours = (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and scope["path"].endswith(_ROUTES)
        )
        if not ours or policy == "as_asked":
            await self.app(scope, receive, send)
            return
        raw = await Request(scope, receive).body()  # the auth middleware has read it completely
        body = _parsed(raw)
        defaults = getattr(scope["app"].state, "atropos_sampling", {})
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
    """Wrap `send`: add the names of removed options to the answer's header."""
    named = (SAMPLING_HEADER.lower().encode(), ", ".join(names_of(leaking)).encode())

    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), named]}
        await send(message)

    return add


def _parsed(raw: bytes) -> dict[str, Any]:
    """Parse the body; return an empty object for anything else, because vLLM's error message is
    better."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _leaking(body: dict[str, Any], defaults: Mapping[str, Any], rollout: bool) -> list[str]:
    """Options that would change the logprobs of a rollout; empty for other requests."""
    # 0 asks for the sampled token's logprob; only None and False ask for none.
    asks = body.get("logprobs") is not None and body["logprobs"] is not False
    if not body or not (rollout or asks):
        return []
    named = {name: value for name, value in body.items() if value is not None}
    return leaks({**defaults, **named})


FIRST_GAP_S = 5.0
"""Seconds between the first two lines of a reason; later intervals triple."""
LAST_GAP_S = 300.0
FEW = 10
"""Number of refusals up to which the interval does not grow."""
FORGET_S = 600.0
"""Seconds without a refusal after which a reason counts as new."""
REASONS = 32
"""Number of reasons that are kept apart; all others share one entry."""
BODY_BYTES = 64 * 1024
REASON_CHARACTERS = 480
PATH_CHARACTERS = 60

_VALUES = re.compile(
    r"""\{[^{}]*\}|\[[^\[\]]*\]|'[^']*'|"[^"]*"|[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"""
)
_OTHERS = (0, "", "")


@dataclass
class _Reason:
    """Count and log state of one reason."""

    path: str
    status: int
    text: str
    ended_before: int
    """Number of requests that had been answered before the first refusal."""
    since: float
    """Time of the first refusal, Unix seconds."""
    count: int = 0
    said: int = 0
    said_at: float = float("-inf")
    """Time of the last log line, in seconds of the event loop's clock, as `heard_at`."""
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
        """Return the entry of this refusal's reason; create it if it is new."""
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
        """Log the reason, unless its count is logged already."""
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
        logger.warning(
            "%s: %s [of %d since %s]%s",
            f"refused {requests} to {path} ({reason.status})"
            if reason.status
            else f"adjusted {requests} to {path}",
            reason.text,
            self.begun - reason.ended_before,
            time.strftime("%H:%M:%S", time.localtime(reason.since)),
            f" (last {age_s} s ago)" if age_s else "",
        )


def note_adjusted(scope: Scope, leaking: Iterable[str]) -> None:
    """Log that these options were removed from a request."""
    log: RefusalLog | None = scope.get(ADJUSTED)
    if log is not None:
        log.note(route_path(scope), 0, f"{', '.join(leaking)} left out: {WHY}. {AS_ASKED}")


class Refusals:
    """Outermost ASGI middleware: counts the refusals of generating routes, from any layer."""

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
    return (
        scope["type"] == "http"
        and scope["method"] == "POST"
        and path_kind(route_path(scope)) == "generation"
    )


def _is_of_the_run(scope: Scope) -> bool:
    """Return True for the run's own connections: a diagnosis blames an environment for what this
    log counts."""
    connection = connection_of(scope)
    return connection is None or connection.own


def reason_of(body: bytes) -> str:
    """Reason in an error answer of ours, vLLM or FastAPI; the body itself in any other form."""
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
    """`text` as one line with escaped control characters, cut in its middle if too long."""
    text = " ".join(text.split())
    text = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
