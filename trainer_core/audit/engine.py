"""HTTP client of an engine under audit: vLLM's OpenAI-compatible API, or SGLang's own."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx


class CannotTell(Exception):
    """The engine does not answer, or does not say what the audit needs; the message has the fix."""


@dataclass(frozen=True)
class Answer:
    """Tokens that the engine drew after one prompt, with their logprobs."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    """One for each token, in nats; NaN where the engine gave no number."""
    prompt_logprobs: list[float] | None = None
    """One for each of prompt[1:]; None if the engine gives none."""
    cached: int | None = None
    """Prompt tokens from the prefix cache; None if unknown."""


@dataclass
class Served:
    """One model in the server's list."""

    name: str
    root: str = ""
    parent: str = ""
    """Base model of an adapter."""
    longest: int | None = None


@dataclass
class Counter:
    """Cost of an audit to the engine."""

    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Request:
    """Settings of one request for several prompts."""

    tokens: int
    sampling: dict[str, Any] | None = field(default_factory=dict)
    """Sampling parameters in addition to the plain ones; None: send none at all."""
    with_prompt: bool = False
    fresh: bool = True
    """Keep the request out of the prefix cache, if the engine can."""


PLAIN: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
# Parameters beyond OpenAI's, which a server may refuse. The audit goes on without.
OPTIONAL = (
    "cache_salt",
    "min_p",
    "repetition_penalty",
    "top_k",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "prompt_logprobs",
    "ignore_eos",
)


class Dialect(Protocol):
    """How one kind of server spells a request."""

    name: str

    def ask(self, prompts: Sequence[list[int]], request: Request) -> list[Answer]: ...


class Engine:
    """A server, one of its models, and the requests sent so far."""

    def __init__(
        self, url: str, *, model: str = "", adapter: str = "", token: str = "", timeout_s: float
    ) -> None:
        self.url = re.sub(r"/v1/?$", "", url.rstrip("/"))
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Not `trust_env`: a proxy of the shell would answer for an engine on this machine.
        self.http = httpx.Client(headers=headers, timeout=timeout_s, trust_env=False)
        self.count = Counter()
        self.model = self._choose(self._models(), model, adapter)
        self.version = self._version()
        sglang = self.get("/get_model_info") is not None
        self.dialect: Dialect = _SGLang(self, bool(adapter)) if sglang else _OpenAI(self)

    def close(self) -> None:
        self.http.close()

    @property
    def title(self) -> str:
        version = f" {self.version}" if self.version else ""
        return f"{self.dialect.name}{version}, model {self.model.name}"

    def _models(self) -> list[Served]:
        found = self.get("/v1/models")
        if found is None:
            raise CannotTell(
                f"{self.url} does not answer GET /v1/models; fix: give the address of an "
                f"OpenAI-compatible server that is ready"
            )
        return [
            Served(
                str(entry["id"]),
                str(entry.get("root") or ""),
                str(entry.get("parent") or ""),
                entry.get("max_model_len"),
            )
            for entry in found.get("data", [])
        ]

    def _choose(self, models: list[Served], name: str, adapter: str) -> Served:
        listed = ", ".join(model.name for model in models) or "none"
        if name:
            found = [model for model in models if model.name == name]
        elif adapter:
            found = [model for model in models if model.parent]
            found = [model for model in found if model.root == adapter] or found
        else:
            found = [model for model in models if not model.parent]
        if len(found) != 1 and not (found and not adapter and not name):
            raise CannotTell(
                f"{len(found)} of the served models can be meant (served: {listed}); fix: name "
                f"one with --model"
            )
        longest = [m.longest for m in (found[0], *models) if m.longest is not None]
        found[0].longest = longest[0] if longest else None
        return found[0]

    def _version(self) -> str:
        for path in ("/version", "/get_server_info"):
            found = self.get(path)
            if found and isinstance(found.get("version"), str):
                return str(found["version"])
        return ""

    def get(self, path: str) -> dict[str, Any] | None:
        try:
            answer = self.http.get(self.url + path)
            found = answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        self.count.requests += 1
        try:
            return self.http.post(self.url + path, json=body)
        except httpx.HTTPError as error:
            raise CannotTell(
                f"{self.url}{path} does not answer ({type(error).__name__}); fix: see the "
                f"server's log"
            ) from error

    def ask(self, prompts: Sequence[list[int]], request: Request) -> list[Answer]:
        """Send all prompts in one request; the answers stand in their order."""
        answers = self.dialect.ask(prompts, request)
        self.count.tokens += sum(len(a.prompt) + len(a.tokens) for a in answers)
        return answers


class _OpenAI:
    """`POST /v1/completions` with lists of token ids, as vLLM takes it."""

    name = "vLLM"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.refused: set[str] = set()
        if engine.get("/version") is None:
            self.name = "OpenAI-compatible server"

    def ask(self, prompts: Sequence[list[int]], request: Request) -> list[Answer]:
        body: dict[str, Any] = {
            "model": self.engine.model.name,
            "prompt": list(prompts),
            "max_tokens": request.tokens,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,
        }
        if request.sampling is not None:
            body |= PLAIN | request.sampling
        if request.with_prompt:
            body["prompt_logprobs"] = 0
        if request.fresh:
            body["cache_salt"] = secrets.token_hex(8)
        found = self._send({k: v for k, v in body.items() if k not in self.refused})
        usage = found.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        choices = sorted(found.get("choices") or [], key=lambda choice: choice.get("index", 0))
        if len(choices) != len(prompts):
            raise CannotTell(f"the server gave {len(choices)} answers to {len(prompts)} prompts")
        return [_choice(p, c, cached) for p, c in zip(prompts, choices, strict=True)]

    def _send(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.engine.post("/v1/completions", body)
        if answer.status_code in (400, 422):
            for name in OPTIONAL:
                if name in body and name in answer.text:
                    self.refused.add(name)
                    return self._send({k: v for k, v in body.items() if k != name})
        if answer.status_code != 200:
            raise CannotTell(
                f"POST /v1/completions: {answer.status_code} {answer.text[:200]!r}; fix: the "
                f"server must take prompts of token ids and return logprobs"
            )
        return dict(answer.json())


def _choice(prompt: list[int], choice: dict[str, Any], cached: int | None) -> Answer:
    logprobs = choice.get("logprobs") or {}
    values = logprobs.get("token_logprobs")
    if not values:
        raise CannotTell("the server returns no logprobs; fix: allow them (vLLM: --max-logprobs)")
    ids = choice.get("token_ids") or _ids_in_text(logprobs.get("tokens") or [])
    if not ids:
        raise CannotTell(
            "the server does not say which token ids it drew; fix: a server that knows "
            "return_token_ids or return_tokens_as_token_ids (vLLM), or /generate (SGLang)"
        )
    before = choice.get("prompt_logprobs")
    return Answer(
        prompt,
        [int(i) for i in ids],
        [_number(value) for value in values],
        _of_prompt(prompt, before) if before else None,
        cached,
    )


def _ids_in_text(tokens: Sequence[str]) -> list[int]:
    found = [re.fullmatch(r"token_id:(\d+)", str(token)) for token in tokens]
    return [int(match[1]) for match in found if match] if all(found) else []


def _of_prompt(prompt: list[int], found: Sequence[Any]) -> list[float] | None:
    values = []
    # The first token has no logprob. Each entry maps token ids to their logprobs.
    for token, entry in zip(prompt[1:], found[1:], strict=False):
        own = (entry or {}).get(str(token))
        if own is None:
            return None
        values.append(_number(own.get("logprob") if isinstance(own, dict) else own))
    return values if len(values) == len(prompt) - 1 else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


class _SGLang:
    """`POST /generate` with `input_ids`, as SGLang takes it."""

    name = "SGLang"

    def __init__(self, engine: Engine, adapter: bool) -> None:
        self.engine, self.adapter = engine, adapter

    def ask(self, prompts: Sequence[list[int]], request: Request) -> list[Answer]:
        plain = {} if request.sampling is None else PLAIN | request.sampling
        body: dict[str, Any] = {
            "input_ids": list(prompts),
            "sampling_params": {**plain, "max_new_tokens": request.tokens, "ignore_eos": True},
            "return_logprob": True,
        }
        if request.with_prompt:
            body["logprob_start_len"] = 0
        if self.adapter:
            body["lora_path"] = [self.engine.model.name] * len(prompts)
        answer = self.engine.post("/generate", body)
        if answer.status_code != 200:
            raise CannotTell(f"POST /generate: {answer.status_code} {answer.text[:200]!r}")
        found = answer.json()
        found = [found] if isinstance(found, dict) else found
        return [self._read(p, one, request) for p, one in zip(prompts, found, strict=True)]

    def _read(self, prompt: list[int], found: dict[str, Any], request: Request) -> Answer:
        meta = found.get("meta_info") or {}
        drawn = meta.get("output_token_logprobs") or []
        if not drawn:
            raise CannotTell("the server returns no logprobs")
        before = (meta.get("input_token_logprobs") or []) if request.with_prompt else []
        return Answer(
            prompt,
            [int(entry[1]) for entry in drawn],
            [_number(entry[0]) for entry in drawn],
            [_number(entry[0]) for entry in before[1:]] if len(before) == len(prompt) else None,
            meta.get("cached_tokens"),
        )
