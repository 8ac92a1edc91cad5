"""Rollouts of programs that only know vLLM's own routes: recorded turn by turn, as sampled.

A request with the header `ROLLOUT_HEADER` belongs to a rollout. Whatever route it takes, its prompt
ids, sampled ids, logprobs and weight versions are kept until `POST /rollouts/take`. A chat template
may encode an earlier answer to other tokens than the sampled ones; if the text is equal, the
sampled tokens take their place, so that the conversation stays one sequence.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_common.protocol.bridge import (
    GREEDY_BELOW,
    ROLLOUT_HEADER,
    TAKE_PATH,
    RecordedTurn,
    RecordedTurns,
    TakeRequest,
)
from vllm_server.generate import ABORTED_AGAIN_S, sampled_logprobs
from vllm_server.recorded import MASKS, PLAIN, CompletionLog
from vllm_server.versions import TokensAt

# Bytes of all rollouts. The rollout that was used longest ago goes first.
MOST_BYTES = 1 << 30
# Bytes of a token: its number as an int of Python and in an array, and its logprob as a float.
TOKEN_BYTES = 72
# Bytes of a token of a prompt that a turn keeps, as vLLM's route encoded it and as it was answered.
PROMPT_BYTES = 8
# Earlier turns whose text is compared with a prompt; each comparison decodes both.
MOST_COMPARED = 4
# Tokens before a difference that are decoded with it: a token's text may depend on its neighbours.
CONTEXT = 4
ABORTED = "abort"
UNFINISHED = "unfinished"
# An adapter's name, of `lora.ServedAdapters.load`.
_ADAPTER = re.compile(r"atropos-v(\d+)-")

Generate = Callable[..., AsyncIterator[Any]]
_rollout: ContextVar[str] = ContextVar("rollout", default="")


class NamedRollouts:
    """ASGI middleware for vLLM's `--middleware`: tells the engine client a request's rollout."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = Headers(scope=scope).get(ROLLOUT_HEADER, "") if scope["type"] == "http" else ""
        before = _rollout.set(name)
        try:
            await self.app(scope, receive, send)
        finally:
            _rollout.reset(before)


@dataclass(frozen=True)
class Prompt:
    """A request's prompt, and its place in the conversation."""

    ids: array[int]
    """As the engine gets them."""
    rendered: array[int]
    """As vLLM's route encoded them."""
    after: int | None = None
    own_from: int = 0
    """Number of tokens up to the end of turn `after`."""
    replaced: int = 0
    rewritten: bool = False


@dataclass(frozen=True)
class _Path:
    """All tokens up to a turn's end: the first `length` of `ids`, which later turns share."""

    ids: array[int]
    length: int
    prompt: Prompt

    def begins(self, ids: array[int]) -> bool:
        return self.length <= len(ids) and self.ids[: self.length] == ids[: self.length]

    def asked(self, ids: array[int]) -> bool:
        """Return True if `ids` continue the turn's prompt."""
        length = len(self.prompt.ids)
        return length < len(ids) and self.prompt.ids == ids[:length]


class Conversation:
    """The turns of one rollout."""

    def __init__(self) -> None:
        self.turns: list[RecordedTurn] = []
        self.bytes = 0
        self._paths: list[_Path] = []

    def begin(self, rendered: Sequence[int], tokenizer: Any) -> Prompt:
        """Return the prompt to answer: with the sampled tokens of the turn that it continues."""
        wanted = array("i", rendered)
        numbers = sorted(range(len(self._paths)), key=lambda at: -self._paths[at].length)
        after = next((at for at in numbers if self._paths[at].begins(wanted)), None)
        ids, length = wanted, 0 if after is None else self._paths[after].length
        longer = [at for at in numbers if self._paths[at].length > length]
        for at in longer[:MOST_COMPARED] if tokenizer is not None else ():
            path = self._paths[at]
            if (rest := _behind(path, wanted, tokenizer)) is not None:
                after, ids, length = at, path.ids[: path.length] + rest, path.length
                break
        replaced = sum(a != b for a, b in zip(ids[:length], wanted, strict=False))
        rewritten = any(len(path.prompt.ids) >= length and path.asked(ids) for path in self._paths)
        return Prompt(ids, wanted, after, length, replaced, rewritten)

    def add(self, prompt: Prompt, turn: RecordedTurn) -> None:
        new = prompt.ids[prompt.own_from :] + array("i", turn.token_ids)
        before = None if prompt.after is None else self._paths[prompt.after]
        # A turn that continues the newest one shares its array; a branch copies the beginning.
        if before is not None and len(before.ids) == before.length:
            ids = before.ids
            ids.extend(new)
        else:
            ids = prompt.ids + array("i", turn.token_ids)
        self.bytes += TOKEN_BYTES * len(new) + PROMPT_BYTES * len(prompt.ids)
        self._paths.append(_Path(ids, len(prompt.ids) + len(turn.token_ids), prompt))
        self.turns.append(turn)


def _behind(path: _Path, wanted: array[int], tokenizer: Any) -> array[int] | None:
    """Return the tokens of `wanted` behind the text of `path`; None if it has another text."""
    asked, ours = path.prompt, path.ids[: path.length]
    # Templates mostly encode a conversation as they did for the request before.
    same = asked.rendered == wanted[: len(asked.rendered)]
    own, theirs = (len(asked.ids), len(asked.rendered)) if same else (0, 0)
    equal = _common(ours[own:], wanted[theirs:])
    own, theirs = own + equal, theirs + equal
    for _ in range(CONTEXT):
        if not own or not theirs or ours[own - 1] != wanted[theirs - 1]:
            break
        own, theirs = own - 1, theirs - 1
    rest = wanted[theirs:]

    def text_of(ids: array[int]) -> str:
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    text, whole = text_of(ours[own:]), text_of(rest)
    if not whole.startswith(text) or not text:
        return None
    at = _boundary(ours[own:], rest, text, text_of)
    if text_of(rest[:at]) == text:
        return rest[at:]
    # A token of `wanted` spans the end. This encodes text that was never sampled.
    tail = array("i", tokenizer.encode(whole[len(text) :], add_special_tokens=False))
    return tail if text_of(ours[own:] + tail) == whole else None


def _boundary(
    ours: array[int], theirs: array[int], text: str, text_of: Callable[[array[int]], str]
) -> int:
    """Return how many of `theirs` make `text`, the text of `ours`."""
    # Mostly the last token ends the turn: it has one encoding, so it occurs as often in both.
    seen, last = ours.count(ours[-1]), ours[-1]
    places = [at + 1 for at, token in enumerate(theirs) if token == last][seen - 1 : seen]
    if places and text_of(theirs[: places[0]]) == text:
        return places[0]
    lengths = range(len(theirs) + 1)
    return bisect_left(lengths, len(text), key=lambda count: len(text_of(theirs[:count])))


def _common(one: array[int], other: array[int]) -> int:
    """Return how many tokens at the beginning are equal."""
    ends = range(1, min(len(one), len(other)) + 1)
    return bisect_left(ends, True, key=lambda end: one[:end] != other[:end])


@dataclass
class _Completion:
    """Output of one engine request so far."""

    deltas: bool
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = UNFINISHED
    metrics: Any = None

    def see(self, output: Any) -> None:
        one = output.outputs[0]
        if not self.deltas:
            self.token_ids, self.logprobs = [], []
        self.token_ids += one.token_ids
        self.logprobs += sampled_logprobs(one.token_ids, one.logprobs or [])
        self.finish_reason = one.finish_reason or UNFINISHED
        self.metrics = output.metrics


class RolloutRecorder:
    """Records the completions of named rollouts.

    Args:
        tokenizer: returns the engine's tokenizer; None if it has none.
        as_asked: sample as requests ask; else the distribution of a rollout stays whole.
    """

    def __init__(
        self, log: CompletionLog, tokenizer: Callable[[], Awaitable[Any]], *, as_asked: bool
    ) -> None:
        self._log, self._tokenizer, self._as_asked = log, tokenizer, as_asked
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()

    def take(self, name: str) -> RecordedTurns:
        """Return the turns of a rollout, and forget it."""
        found = self._conversations.pop(name, None)
        return RecordedTurns(turns=found.turns if found else [])

    def wrap(self, generate: Generate) -> Generate:
        """Return the engine's `generate` with the recording."""

        async def recording(
            prompt: Any, sampling_params: Any, request_id: str, *args: Any, **options: Any
        ) -> AsyncIterator[Any]:
            name = _rollout.get()
            ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
            if not name or ids is None:
                outputs = generate(prompt, sampling_params, request_id, *args, **options)
            else:
                conversation = self._conversations.setdefault(name, Conversation())
                self._conversations.move_to_end(name)
                begun = await self._begin(conversation, prompt, ids)
                recorded = prompt | {"prompt_token_ids": begun.ids.tolist()}
                start = _Start(generate, recorded, options, conversation)
                params = self._params(sampling_params)
                make = self._one if params.n == 1 else self._several
                outputs = make(begun, start, params, request_id)
            async with aclosing(outputs) as stream:  # type: ignore[type-var]
                async for output in stream:
                    yield output

        return recording

    async def _begin(self, conversation: Conversation, prompt: Any, ids: list[int]) -> Prompt:
        # Images have places in the prompt, which another encoding would move.
        tokenizer = await self._tokenizer() if prompt.get("type", "token") == "token" else None
        return conversation.begin(ids, tokenizer)

    def _params(self, given: Any) -> Any:
        params = given.clone()
        if params.logprobs is None:
            params.logprobs = 0
        # The middleware has done this for the routes that it reads; others come here alone.
        if not self._as_asked:
            for name, neutral in (PLAIN | dict.fromkeys(MASKS)).items():
                if hasattr(params, name):
                    setattr(params, name, neutral)
        return params

    async def _one(
        self, begun: Prompt, start: _Start, params: Any, request_id: str
    ) -> AsyncIterator[Any]:
        from vllm.sampling_params import RequestOutputKind

        whole = params.output_kind == RequestOutputKind.FINAL_ONLY
        while True:
            made = _Completion(deltas=params.output_kind == RequestOutputKind.DELTA)
            with self._log.history.follow(request_id) as tokens_at:
                try:
                    async with aclosing(start(params, request_id)) as outputs:  # type: ignore[type-var]
                        async for output in outputs:
                            made.see(output)
                            if whole and made.finish_reason == ABORTED:
                                break
                            # Before the client has the end of its answer.
                            if output.finished:
                                self._note(begun, start, params, made, tokens_at)
                            yield output
                finally:
                    if made.finish_reason == UNFINISHED and made.token_ids:
                        self._note(begun, start, params, made, tokens_at)
            if not (whole and made.finish_reason == ABORTED):
                return
            # A publish with `recompute` aborted it, as in `Generator`.
            await asyncio.sleep(ABORTED_AGAIN_S)
            request_id += "-again"

    async def _several(
        self, begun: Prompt, start: _Start, params: Any, request_id: str
    ) -> AsyncIterator[Any]:
        """Make each of `n` completions in an engine request of its own, with its own versions."""
        from vllm.sampling_params import RequestOutputKind

        outputs: asyncio.Queue[Any] = asyncio.Queue()

        async def make(index: int) -> None:
            own = copy(params)
            own.n, own.seed = 1, None if params.seed is None else params.seed + index
            try:
                stream = self._one(begun, start, own, f"{request_id}-{index}")
                async for output in stream:
                    output.outputs[0].index, output.request_id = index, request_id
                    outputs.put_nowait(output)
            except Exception as error:
                outputs.put_nowait(error)

        tasks = [asyncio.ensure_future(make(index)) for index in range(params.n)]
        whole, left, ended = params.output_kind == RequestOutputKind.FINAL_ONLY, params.n, []
        try:
            while left:
                if isinstance(output := await outputs.get(), Exception):
                    raise output
                left -= output.finished
                output.finished = not left
                ended.append(output)
                if not whole:
                    yield output
            if whole:
                ended.sort(key=lambda output: output.outputs[0].index)
                ended[0].outputs = [output.outputs[0] for output in ended]
                ended[0].finished = True
                yield ended[0]
        finally:
            for task in tasks:
                task.cancel()

    def _note(
        self,
        begun: Prompt,
        start: _Start,
        params: Any,
        made: _Completion,
        tokens_at: TokensAt,
    ) -> None:
        found = _ADAPTER.match(getattr(start.options.get("lora_request"), "lora_name", ""))
        _, runs = self._log.note(
            begun.ids.tolist(),
            made.token_ids,
            made.logprobs,
            metrics=made.metrics,
            tokens_at=tokens_at,
            version=int(found[1]) if found else None,
            temperature=params.temperature,
        )
        heat = params.temperature if params.temperature >= GREEDY_BELOW else 1.0
        turn = RecordedTurn.model_construct(
            after=begun.after,
            prompt_ids=begun.ids[begun.own_from :].tolist(),
            token_ids=made.token_ids,
            logprobs=made.logprobs,
            token_versions=runs,
            temperature=heat,
            finish_reason=made.finish_reason,
            replaced=begun.replaced,
            rewritten=begun.rewritten,
        )
        # If the rollout was taken meanwhile, nobody asks for this turn.
        start.conversation.add(begun, turn)
        # The oldest rollouts give way.
        while sum(each.bytes for each in self._conversations.values()) > MOST_BYTES:
            self._conversations.popitem(last=False)


@dataclass(frozen=True)
class _Start:
    """The engine's `generate` with everything but parameters and name."""

    generate: Generate
    prompt: Any
    options: dict[str, Any]
    conversation: Conversation

    def __call__(self, params: Any, request_id: str) -> AsyncIterator[Any]:
        return self.generate(self.prompt, params, request_id, **self.options)


def make_router(recorder: RolloutRecorder) -> APIRouter:
    router = APIRouter()

    @router.post(TAKE_PATH)
    async def take(request: TakeRequest) -> Response:
        answer = recorder.take(request.rollout).model_dump_json()
        return Response(answer, media_type="application/json")

    return router
