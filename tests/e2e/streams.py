"""Load on a running server: endless streams of completions, and the weight version of each.

    with Streams(server.url, server.token) as load:
        load.until(32)             # completions that ended
        ...                        # publish, restart, kill
    load.assert_whole()            # no request failed, none was cut off

Threads stream `/v1/completions` token by token. A few more ask `/generate`, as rollouts do: the
server records weight versions there, so `versions` is about those.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from atropos_common.net.http import LIMITS, certificates
from atropos_common.protocol.bridge import TOKEN_HEADER, completion_digest
from tests.e2e.vllm_server_live import reference_logprobs
from trainer_core.server.client import ServerClient


@dataclass
class Streamed:
    """One completion: token ids and logprobs of length T."""

    prompt: list[int]
    streamed: bool = True
    """True for `/v1/completions`, False for `/generate`, which the server records."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sent: float = 0.0
    ended: float = 0.0
    """Times of the request and of the last token; both `time.monotonic()` seconds."""

    @property
    def digest(self) -> str:
        return completion_digest(self.token_ids, self.logprobs)

    def gap(self, reference: Any) -> float:
        """Largest |server - transformers model `reference`| over its tokens, in nats."""
        theirs = reference_logprobs(reference, self.prompt, self.token_ids)
        return max(abs(a - b) for a, b in zip(self.logprobs, theirs, strict=True))


class Streams:
    """Threads, each with one request in flight at any time, until the block is left."""

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        count: int = 16,
        recorded: int = 2,
        max_tokens: int = 48,
        prompt: list[int] | None = None,
        with_token: bool = False,
        patient: bool = False,
    ) -> None:
        """`count` threads stream, `recorded` more send `/generate`. `prompt`: token ids for each of
        them, so that they share a prefix. `with_token`: go past a hold. `patient`: a server that is
        away is no error."""
        self.url, self.token = url.rstrip("/"), token
        self.completions: list[Streamed] = []
        self.errors: list[str] = []
        self._prompt = prompt or [2 + i * 7 % 12 for i in range(75)]
        self._max_tokens = max_tokens
        self._with_token, self._patient = with_token, patient
        self._model = ""
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(number, number < count), daemon=True)
            for number in range(count + recorded)
        ]

    def __enter__(self) -> Streams:
        self._model = self._served_model()
        for thread in self._threads:
            thread.start()
        return self

    def _served_model(self, patience_s: float = 120) -> str:
        deadline = time.monotonic() + patience_s * self._patient
        while True:
            try:
                answer = httpx.get(
                    f"{self.url}/v1/models", timeout=30, verify=certificates(self.url)
                )
                return str(answer.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, KeyError):
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def __exit__(self, *_: object) -> None:
        """Let each request that is in flight end, then stop."""
        self._stop.set()
        deadline = time.monotonic() + 60
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.1))
        if stuck := sum(thread.is_alive() for thread in self._threads):
            self.errors.append(f"{stuck} streams hang")

    def until(self, more: int, timeout: float = 60) -> None:
        """Wait until `more` completions have ended from now on."""
        goal, deadline = len(self.completions) + more, time.monotonic() + timeout
        while len(self.completions) < goal:
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{more} completions asked for, {goal - len(self.completions)} missing after "
                    f"{timeout:.0f} s; errors: {self.errors[:3]}"
                )
            time.sleep(0.01)

    def versions(self, since: float = 0.0) -> list[tuple[Streamed, tuple[int, int] | None]]:
        """Recorded completions sent at or after `since`, with the oldest and newest weight version
        of each."""
        chosen = [
            each for each in list(self.completions) if not each.streamed and each.sent >= since
        ]
        engine = ServerClient(self.url, self.token)
        try:
            found = engine.versions([each.digest for each in chosen])
            return [(each, span and span[:2]) for each, span in zip(chosen, found, strict=True)]
        finally:
            engine.close()

    def assert_whole(self) -> None:
        """No request failed, and every completion has all its tokens."""
        assert not self.errors, f"{len(self.errors)} of the streams failed: {self.errors[:3]}"
        assert self.completions, "no completion ended"
        short = [
            len(each.token_ids)
            for each in self.completions
            if len(each.token_ids) != self._max_tokens
        ]
        assert not short, f"completions cut off after {short[:5]} of {self._max_tokens} tokens"

    def _run(self, number: int, streamed: bool) -> None:
        headers = {TOKEN_HEADER: self.token} if self._with_token else {}
        verify = certificates(self.url)
        with httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=120,
            limits=LIMITS,
            trust_env=False,
            verify=verify,
        ) as http:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                try:
                    done = (self._stream if streamed else self._generate)(
                        http, seed=number * 100_003 + turn
                    )
                except (httpx.HTTPError, ValueError, KeyError, AssertionError) as error:
                    if not self._patient:
                        with self._lock:
                            self.errors.append(f"{type(error).__name__}: {error}")
                    self._stop.wait(0.2)
                    continue
                with self._lock:
                    self.completions.append(done)

    def _stream(self, http: httpx.Client, seed: int) -> Streamed:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": self._prompt,
            "max_tokens": self._max_tokens,
            "stream": True,
            "seed": seed,
            "logprobs": 0,
            "temperature": 1.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        done = Streamed(self._prompt, sent=time.monotonic())
        finished = False
        with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                raise AssertionError(f"HTTP {answer.status_code} {answer.text[:200]}")
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise AssertionError(f"the stream ended with {event['error']}")
                for choice in event["choices"]:
                    done.token_ids += choice.get("token_ids") or []
                    done.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
                    finished = finished or choice.get("finish_reason") is not None
        if not finished:
            raise AssertionError(f"cut off after {len(done.token_ids)} tokens")
        done.ended = time.monotonic()
        return done

    def _generate(self, http: httpx.Client, seed: int) -> Streamed:
        body = {
            "prompt": {"prompt_token_ids": self._prompt},
            "max_tokens": self._max_tokens,
            "seed": seed,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        done = Streamed(self._prompt, streamed=False, sent=time.monotonic())
        answer = http.post("/generate", json=body)
        if answer.status_code != 200:
            raise AssertionError(f"HTTP {answer.status_code} {answer.text[:200]}")
        for position in answer.json()["logprobs"][0]:
            token, logprob = next(iter(position[0].items()))
            done.token_ids.append(int(token))
            done.logprobs.append(logprob)
        done.ended = time.monotonic()
        return done
