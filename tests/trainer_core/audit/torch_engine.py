"""An OpenAI-compatible server in this process that answers from a torch model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from trainer_core.objective.causes.sampling import PLAIN, Distribution, Sampler

Row = tuple[list[int], list[int], list[float]]
"""Prompt, drawn tokens, their logprobs."""


class SGLangLike:
    """The same answers in the words of SGLang's `/generate`."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/get_model_info":
            return 200, {"model_path": "tiny"}
        if path != "/generate":
            return self.engine.answer(path, body)
        settings = body["sampling_params"]
        done = self.engine.complete(
            {**settings, "prompt": body["input_ids"], "max_tokens": settings["max_new_tokens"]}
        )
        return 200, [
            {
                "meta_info": {
                    "output_token_logprobs": [
                        [value, token, None]
                        for value, token in zip(
                            choice["logprobs"]["token_logprobs"], choice["token_ids"], strict=True
                        )
                    ],
                    "cached_tokens": 0,
                }
            }
            for choice in done["choices"]
        ]


class TorchEngine:
    """Answers requests as vLLM does; a test replaces what it wants to break."""

    def __init__(self, model: Any, *, names: tuple[str, ...] = ("tiny",)) -> None:
        self.model, self.names = model, names
        self.default = PLAIN
        self.processed = True
        self.refuse: tuple[str, ...] = ()
        self.without_ids = False
        self.alter: Callable[[Row], Row] = lambda row: row
        self.old_prefix: Any = None
        """Model that answers requests without a salt."""
        self.tokenizer: Any = None
        self.draw = torch.Generator().manual_seed(11)
        self.lock = threading.Lock()

    @torch.inference_mode()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = Sampler(
            body.get("temperature", self.default.temperature),
            max(0, body.get("top_k", self.default.top_k)),
            body.get("top_p", self.default.top_p),
        )
        model = self.model if "cache_salt" in body or not self.old_prefix else self.old_prefix
        rows: list[Row] = [([], [], [])] * len(body["prompt"])
        lengths = [len(prompt) for prompt in body["prompt"]]
        for length in dict.fromkeys(lengths):
            alike = [i for i, other in enumerate(lengths) if other == length]
            prompts = [body["prompt"][i] for i in alike]
            for i, row in zip(alike, self._drawn(model, prompts, body, asked), strict=True):
                rows[i] = row
        choices = []
        for index, row in enumerate(rows):
            prompt, drawn, given = self.alter(row)
            choices.append(
                {
                    "index": index,
                    "logprobs": {"token_logprobs": given, "tokens": ["?"] * len(given)},
                    **({} if self.without_ids else {"token_ids": drawn}),
                    **self._prompt(prompt, body),
                }
            )
        return {"choices": choices}

    def _drawn(
        self, model: Any, prompts: list[list[int]], body: dict[str, Any], asked: Sampler
    ) -> list[Row]:
        """Decode prompts of one length together."""
        rows: list[Row] = [(list(prompt), [], []) for prompt in prompts]
        output = model(input_ids=torch.tensor(prompts), use_cache=True)
        for _ in range(body["max_tokens"]):
            step = []
            for (_, tokens, logprobs), logits in zip(rows, output.logits[:, -1], strict=True):
                values, drawn_from = self._scores(logits.float(), asked)
                token = int(torch.multinomial(drawn_from.exp(), 1, generator=self.draw))
                tokens.append(token)
                logprobs.append(float(values[token]))
                step.append([token])
            output = model(
                input_ids=torch.tensor(step),
                past_key_values=output.past_key_values,
                use_cache=True,
            )
        return rows

    def _scores(self, logits: torch.Tensor, asked: Sampler) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs of every token as shown, and as drawn from."""
        plain = logits.log_softmax(0)
        if asked == PLAIN:
            return plain, plain
        every = torch.arange(len(logits))
        wide = logits.expand(len(every), -1)
        drawn_from = Distribution(wide, every, [[]] * len(every), [0] * len(every)).logprobs(asked)
        return (drawn_from if self.processed else plain), drawn_from

    def _prompt(self, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        if "prompt_logprobs" not in body:
            return {}
        scores = self.model(input_ids=torch.tensor([prompt])).logits[0].float().log_softmax(1)
        given = [
            {str(t): {"logprob": float(s[t])}} for s, t in zip(scores, prompt[1:], strict=False)
        ]
        return {"prompt_logprobs": [None, *given]}

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            parents: list[dict[str, Any]] = [{"id": self.names[0], "root": "", "parent": None}]
            parents += [{"id": name, "parent": self.names[0]} for name in self.names[1:]]
            return 200, {"data": parents}
        if path == "/version":
            return 200, {"version": "0.0-torch"}
        if path == "/tokenize" and self.tokenizer is not None:
            if "messages" in body:
                ids = self.tokenizer.apply_chat_template(
                    body["messages"], add_generation_prompt=True, return_dict=False
                )
            else:
                ids = self.tokenizer(body["prompt"])["input_ids"]
            return 200, {"tokens": list(ids)}
        if path == "/v1/completions":
            for name in self.refuse:
                if name in body:
                    return 400, {"error": f"{name}: extra inputs are not permitted"}
            with self.lock:
                return 200, self.complete(body)
        return 404, {}


@contextmanager
def served(engine: TorchEngine | SGLangLike) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(*engine.answer(self.path, {}))

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self._send(*engine.answer(self.path, json.loads(self.rfile.read(length))))

        def _send(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
