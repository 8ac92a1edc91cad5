"""`POST /generate`: completions with the logprob of every token, as atroposlib's vLLM client reads
them.

    {"prompt": "1+2=" | {"prompt_token_ids": [3, 12, 4]}, "n": 8, "max_tokens": 4, ...}
    -> {"text": [...], "prompt": "1+2=", "finish_reasons": ["stop", ...], "prompt_token_ids": [...],
        "token_ids": [[...], ...], "logprobs": [[[{"5": -0.1}], ...], ...],
        "weight_versions": [[3, 4], ...], "token_versions": [[[3, 17], [4, 9]], ...]}

`logprobs[i][t][0]` maps token ids to logprobs in nats, the sampled token first. `weight_versions`
are the oldest and newest, `token_versions` each version and its tokens, in order.

A request with the header `X-Atropos-Form: arrays` gets the same numbers at a fraction of the cost:

    {"finish_reasons": [...], "token_ids": [[5, ...], ...], "sampled_logprobs": [[-0.1, ...], ...],
        "weight_versions": [[3, 4], ...], "token_versions": [[[3, 17], [4, 9]], ...]}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import uuid
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from atropos_common.protocol.bridge import (
    ARRAYS,
    FORM_HEADER,
    SAMPLING_HEADER,
    SamplingPolicy,
)
from vllm_server import compat, refusals
from vllm_server.auth import error_response
from vllm_server.recorded import CompletionLog, CompletionStore
from vllm_server.versions import Runs, Span, SpanStore, VersionHistory

logger = logging.getLogger(__name__)

LOWEST_LOGPROB = -9999.0  # minus infinity, which JSON lacks, on vLLM's own routes too
MAX_COMPLETIONS = 4096
# Wait before a completion that a publish aborted is requested again.
ABORTED_AGAIN_S = 0.02

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class RequestError(ValueError):
    pass


class BrokenWeights(RuntimeError):
    """The model returned NaN logprobs."""


class TokenPrompt(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    prompt_token_ids: list[TokenId] = Field(min_length=1)
    cache_salt: str | None = Field(None, max_length=64)
    """Shares the prefix cache only with requests of the same salt."""


# A bare list of token ids and vLLM's `{"prompt": text}` are prompts too.
def _as_prompt(value: object) -> object:
    if isinstance(value, list):
        return {"prompt_token_ids": value}
    if isinstance(value, dict) and set(value) == {"prompt"}:
        return value["prompt"]
    return value


class GenerateRequest(BaseModel):
    """The request body; an unknown field is an error."""

    # A misspelt `temperature` must not train a model.
    model_config = ConfigDict(extra="forbid", strict=True)
    prompt: Annotated[str | TokenPrompt, BeforeValidator(_as_prompt)]
    model: str | None = None
    """A name that this server serves; None: any."""
    for_training: bool = True
    """False: no sampling limits, and no record of the weight version."""
    stream: Literal[False] = False  # `/v1/completions` streams
    n: int = Field(1, ge=1, le=MAX_COMPLETIONS)
    temperature: Finite = Field(1.0, ge=0)
    max_tokens: int | None = Field(16, ge=1)
    """None: up to the model's maximum length."""
    min_tokens: int = Field(0, ge=0)
    top_p: Finite = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: Finite = Field(0.0, ge=0, le=1)
    presence_penalty: Finite = Field(0.0, ge=-2, le=2)
    frequency_penalty: Finite = Field(0.0, ge=-2, le=2)
    repetition_penalty: Finite = Field(1.0, gt=0)
    seed: int | None = Field(None, ge=-(2**62), lt=2**62)
    """Completion i of `n` samples with seed + i."""
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    logprobs: int | None = Field(0, ge=-1)
    """Alternatives per position beyond the sampled token; None counts as 0."""
    prompt_logprobs: int | None = Field(None, ge=-1)
    logit_bias: dict[str, Finite] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False


def parse_body(raw: bytes) -> GenerateRequest:
    """Parse and check the body.

    Raises:
        RequestError: names the invalid field.
    """
    try:
        return GenerateRequest.model_validate(json.loads(raw))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise RequestError(f"{where}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None


def under_policy(
    request: GenerateRequest, sampling: SamplingPolicy
) -> tuple[GenerateRequest, list[str]]:
    """Return the request to answer, and the removed options as `name=value`.

    Raises:
        RequestError: the policy refuses an option.
    """
    leaking = refusals.leaks(request.model_dump(exclude_unset=True)) if request.for_training else []
    if not leaking or sampling == "as_asked":
        return request, []
    if sampling == "refuse":
        fix = 'or, for an answer that is not trained on, send "for_training": false'
        advice = f"{refusals.instead(leaking)}, {fix}"
        raise RequestError(f"{', '.join(leaking)}: {refusals.WHY}. {advice}")
    fields = GenerateRequest.model_fields
    defaults = {name: fields[name].default for name in refusals.names_of(leaking)}
    return request.model_copy(update=defaults), leaking


def sampling_options(body: GenerateRequest, index: int) -> dict[str, Any]:
    """Return arguments of vLLM's `SamplingParams` for completion `index`."""
    options = body.model_dump(exclude={"prompt", "model", "stream", "n", "for_training"})
    options["n"] = 1
    options["logprobs"] = body.logprobs or 0
    if body.seed is not None:
        options["seed"] = body.seed + index
    if index > 0:
        options["prompt_logprobs"] = None
    if body.logit_bias is not None:
        try:
            options["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
        except ValueError:
            raise RequestError("logit_bias: keys are token ids") from None
    return options


def finite_logprob(value: float) -> float:
    """Return `value`, or the lowest logprob for minus infinity.

    Raises:
        BrokenWeights: `value` is NaN.
    """
    if math.isnan(value):
        raise BrokenWeights("the model answers with NaN: its weights are broken")
    return max(value, LOWEST_LOGPROB)


def finite_logprobs(values: list[float]) -> list[float]:
    """Return all of `values` as `finite_logprob` does."""
    # One infinity or NaN makes the sum one, and a sum costs a fiftieth of a check of each value.
    return values if math.isfinite(sum(values)) else [finite_logprob(value) for value in values]


def position_logprobs(sampled: int | None, candidates: dict[int, Any]) -> dict[str, float]:
    """Return one position as `{token id: logprob}`, the sampled token first."""
    # The client reads the first key.
    order = [] if sampled is None else [sampled]
    order += [token for token in candidates if token != sampled]
    return {str(token): finite_logprob(float(candidates[token].logprob)) for token in order}


def completion_logprobs(
    token_ids: Sequence[int], positions: Sequence[dict[int, Any]]
) -> list[list[dict[str, float]]]:
    """Return all positions of one completion, each in a list as the client expects."""
    assert len(token_ids) == len(positions), "vLLM returns one logprob entry for each token"
    if isinstance(positions, list):
        rows = zip(token_ids, positions, strict=True)
        return [[position_logprobs(token, entry)] for token, entry in rows]
    # vLLM's flat form: lists over all candidates of all positions, several times cheaper to fill
    # and to read.
    flat: Any = positions
    names = [str(token) for token in flat.token_ids]
    values = finite_logprobs(flat.logprobs)
    if len(names) == len(token_ids):  # the sampled token alone
        return [[{name: value}] for name, value in zip(names, values, strict=True)]
    spans = list(zip(flat.start_indices, flat.end_indices, strict=True))
    first = [flat.token_ids[start] for start, _ in spans]
    assert first == list(token_ids), "the sampled token comes first"
    return [[dict(zip(names[start:end], values[start:end], strict=True))] for start, end in spans]


def sampled_logprobs(token_ids: Sequence[int], positions: Sequence[dict[int, Any]]) -> list[float]:
    """Return the logprob of each sampled token of one completion."""
    assert len(token_ids) == len(positions), "vLLM returns one logprob entry for each token"
    if isinstance(positions, list):
        rows = zip(token_ids, positions, strict=True)
        return finite_logprobs([float(entry[token].logprob) for token, entry in rows])
    flat: Any = positions
    if len(flat.logprobs) == len(token_ids):
        return finite_logprobs(flat.logprobs)
    return finite_logprobs([flat.logprobs[start] for start in flat.start_indices])


def text_of(tokenizer: Any, prompt_ids: list[int], completion: Any, options: Any) -> str:
    """Decode the completion at its end; equal to vLLM's own token-by-token text."""
    from tokenizers.decoders import DecodeStream

    ids = list(completion.token_ids)
    if completion.finish_reason == "stop" and not options.include_stop_str_in_output:
        ids.pop()
    stream = DecodeStream(ids=prompt_ids, skip_special_tokens=options.skip_special_tokens)
    backend = tokenizer.backend_tokenizer
    try:
        return "".join(stream.step(backend, token) or "" for token in ids)
    except Exception:  # vLLM's stream decoder fails on tokens that change earlier text
        return str(tokenizer.decode(ids, skip_special_tokens=options.skip_special_tokens))


class AdapterSource(Protocol):
    """Source of the LoRA adapter that answers in place of the base model."""

    def use(self) -> contextlib.AbstractContextManager[tuple[Any, int] | None]:
        """Yield adapter and weight version for one request; None: base model."""
        ...


class Generator:
    """Turns request bodies into answers and records their weight versions."""

    def __init__(
        self,
        engine: Any,
        *,
        history: VersionHistory,
        spans: SpanStore,
        completions: CompletionStore | None = None,
        model_names: Sequence[str],
        adapters: AdapterSource | None = None,
    ) -> None:
        self.engine = engine
        self.adapters = adapters
        self.log = CompletionLog(history, spans, completions or CompletionStore())
        self.completions = 0
        """Completions returned since the start."""
        self._model_names = list(model_names)
        self._vocabulary = int(engine.model_config.get_vocab_size())

    async def answer(self, body: GenerateRequest, *, arrays: bool = False) -> dict[str, Any]:
        """Generate `body.n` completions.

        Args:
            arrays: return `sampled_logprobs` in place of `logprobs` and all text. A request for
                alternatives gets `logprobs` as well.

        Raises:
            RequestError: unknown model or token id. vLLM's own request errors pass through.
        """
        if body.model is not None and body.model not in self._model_names:
            known = f"this server has {self._model_names}"
            raise RequestError(f"model: {body.model!r} is not served here; {known}")
        prompt_ids = await self._prompt_ids(body.prompt)
        with self.adapters.use() if self.adapters else contextlib.nullcontext() as adapter:
            outputs = await self._complete(prompt_ids, body, adapter and adapter[0])
        # Each engine request has one completion.
        made = [output.outputs[0] for output in outputs]
        sampled = [sampled_logprobs(one.token_ids, one.logprobs) for one in made]
        answer: dict[str, Any] = {
            "finish_reasons": [one.finish_reason for one in made],
            "token_ids": [list(one.token_ids) for one in made],
        }
        if arrays:
            answer["sampled_logprobs"] = sampled
        else:
            answer["text"] = await self._texts(prompt_ids, made, body)
            text = isinstance(body.prompt, str)
            answer["prompt"] = body.prompt if text else await self._decode(prompt_ids)
            answer["prompt_token_ids"] = prompt_ids
        if body.logprobs or not arrays:
            answer["logprobs"] = [completion_logprobs(one.token_ids, one.logprobs) for one in made]
        if body.prompt_logprobs is not None:
            scores = outputs[0].prompt_logprobs or []
            answer["prompt_logprobs"] = [
                row and position_logprobs(token, row)
                for token, row in zip(prompt_ids, scores, strict=True)
            ]
        answer["cached_tokens"] = [output.num_cached_tokens for output in outputs]
        recorded = [
            self._record(prompt_ids, output, values, adapter and adapter[1], body)
            for output, values in zip(outputs, sampled, strict=True)
        ]
        answer["weight_versions"] = [span for span, _ in recorded]
        answer["token_versions"] = [runs for _, runs in recorded]
        self.completions += len(outputs)
        return answer

    def require_valid_options(self, body: GenerateRequest) -> None:
        """Check all sampling options, also those that the policy removes; errors as in `answer`."""
        from vllm.sampling_params import SamplingParams

        options = sampling_options(body, 0)
        SamplingParams(**options)
        if body.allowed_token_ids == []:
            fix = "leave it out, or name at least one token"
            raise RequestError(f"allowed_token_ids: it is empty; {fix}")
        # vLLM's own check of some of these comes later, in the engine.
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self._require_known(name, options[name] or [])

    async def probe(self, *, tokens: int = 1, logprobs: int = 0) -> int:
        """Generate a few tokens from a one-token prompt; return their number."""
        prompt = [min(2, self._vocabulary - 1)]
        body = GenerateRequest(
            prompt=TokenPrompt(prompt_token_ids=prompt),
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            logprobs=logprobs,
        )
        (output,) = await self._complete(prompt, body)
        return len(output.outputs[0].token_ids)

    async def first_token(self, body: GenerateRequest) -> tuple[int, float]:
        """Return the first token of an answer and its logprob in nats; record nothing."""
        assert isinstance(body.prompt, TokenPrompt)
        (output,) = await self._complete(body.prompt.prompt_token_ids, body)
        token = output.outputs[0].token_ids[0]
        return token, float(output.outputs[0].logprobs[0][token].logprob)

    async def _complete(
        self, prompt_ids: list[int], body: GenerateRequest, adapter: Any = None
    ) -> list[Any]:
        """Send one engine request for each completion."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        # So each completion has its own token times and weight versions.
        tokenizer = await self._text_at_the_end(body)
        cheap = {
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "detokenize": tokenizer is None,
            # In the flat form the prompt's first position, which has no logprob, would look like an
            # empty one.
            "flat_logprobs": body.prompt_logprobs is None,
            # Nobody else has these objects, so vLLM need not copy them deeply.
            "skip_clone": True,
        }
        # vLLM copies them before it changes any, so equal completions share one object.
        alike = body.seed is None and body.prompt_logprobs is None
        params = [
            SamplingParams(**sampling_options(body, index), **cheap)
            for index in range(1 if alike else body.n)
        ] * (body.n if alike else 1)
        name = uuid.uuid4().hex
        prompt: dict[str, Any] = {"prompt_token_ids": prompt_ids}
        if isinstance(body.prompt, TokenPrompt) and body.prompt.cache_salt:
            prompt["cache_salt"] = body.prompt.cache_salt
        tasks = [
            asyncio.ensure_future(self._one(prompt, each, f"gen-{name}-{index}", adapter))
            for index, each in enumerate(params)
        ]
        try:
            outputs = list(await asyncio.gather(*tasks))
        finally:
            # After an error or a disconnect the other requests would go on without a client.
            for task in tasks:
                task.cancel()
        return outputs

    async def _texts(
        self, prompt_ids: list[int], made: Sequence[Any], body: GenerateRequest
    ) -> list[str]:
        tokenizer = await self._text_at_the_end(body)
        if tokenizer is None:
            return [one.text for one in made]
        return [text_of(tokenizer, prompt_ids, one, body) for one in made]

    async def _text_at_the_end(self, body: GenerateRequest) -> Any | None:
        """Return the tokenizer if the text can be decoded at the completion's end."""
        # vLLM's own decoding also decodes every logprob candidate, which costs more than all of
        # HTTP. Stop strings need it.
        if body.stop or not (body.skip_special_tokens or body.spaces_between_special_tokens):
            return None
        tokenizer = await compat.tokenizer_of(self.engine)
        return tokenizer if hasattr(tokenizer, "backend_tokenizer") else None

    async def _one(self, prompt: dict[str, Any], params: Any, request_id: str, adapter: Any) -> Any:
        while True:
            final = None
            with self.log.history.follow(request_id) as tokens_at:
                outputs = self.engine.generate(prompt, params, request_id, lora_request=adapter)
                async for output in outputs:
                    final = output
            assert final is not None and final.finished, "vLLM ends with a finished output"
            if final.outputs[0].finish_reason != "abort":
                final.tokens_at = tokens_at
                return final
            # A publish with `recompute` aborted it; vLLM accepts it again and runs it with the new
            # weights. During shutdown vLLM aborts every request at once: pause between retries.
            await asyncio.sleep(ABORTED_AGAIN_S)
            request_id += "-again"

    def _record(
        self,
        prompt_ids: list[int],
        output: Any,
        sampled: list[float],
        adapter_version: int | None,
        body: GenerateRequest,
    ) -> tuple[Span, Runs]:
        return self.log.note(
            prompt_ids,
            output.outputs[0].token_ids,
            sampled,
            metrics=output.metrics,
            tokens_at=getattr(output, "tokens_at", {}),
            version=adapter_version,
            temperature=body.temperature,
            for_training=body.for_training,
        )

    async def _prompt_ids(self, prompt: str | TokenPrompt) -> list[int]:
        if isinstance(prompt, str):
            tokenizer = await compat.tokenizer_of(self.engine)
            if tokenizer is None:
                fault = "this server runs without a tokenizer"
                raise RequestError(f"prompt: {fault}; send prompt_token_ids")
            ids = list(tokenizer.encode(prompt))
            if not ids:
                raise RequestError("prompt: it is empty; at least one token is needed")
            return ids
        self._require_known("prompt_token_ids", prompt.prompt_token_ids)
        return prompt.prompt_token_ids

    def _require_known(self, name: str, ids: Collection[int]) -> None:
        size = self._vocabulary
        if unknown := [token for token in ids if not 0 <= token < size]:
            raise RequestError(f"{name}: {unknown[0]} is outside the vocabulary of {size} tokens")

    async def _decode(self, ids: list[int]) -> str:
        tokenizer = await compat.tokenizer_of(self.engine)
        return "" if tokenizer is None else str(tokenizer.decode(ids))


def make_router(generator: Generator, sampling: SamplingPolicy = "plain") -> APIRouter:
    """Return the route; a client that disconnects cancels its request in the engine."""
    router = APIRouter()
    bad_request = compat.request_errors()

    @compat.with_cancellation
    async def run(body: GenerateRequest, raw_request: Request) -> Response:
        try:
            arrays = raw_request.headers.get(FORM_HEADER) == ARRAYS
            answer = msgspec.json.encode(await generator.answer(body, arrays=arrays))
            return Response(answer, media_type="application/json")
        except compat.EngineDeadError:
            fix = "see the server's log, then restart the server"
            return error_response(503, f"the engine has died; {fix}")
        except bad_request as error:
            return error_response(400, str(error))
        except Exception as error:
            logger.exception("/generate failed")
            return error_response(500, f"{type(error).__name__}: {error}")

    @router.post("/generate")
    async def generate(raw_request: Request) -> Any:
        try:
            body = parse_body(await raw_request.body())
            generator.require_valid_options(body)
            body, left_out = under_policy(body, sampling)
        except bad_request as error:
            return error_response(400, str(error))
        answer = await run(body, raw_request)
        if left_out and isinstance(answer, Response):
            refusals.note_adjusted(raw_request.scope, left_out)
            answer.headers[SAMPLING_HEADER] = ", ".join(refusals.names_of(left_out))
        return answer

    # FastAPI resolves annotations in the module, where `Request` is.
    return router
