"""The probe's requests: all under way together, none left behind, and nothing that waits for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone
from trainer_core.probe import LogprobProbe
from trainer_core.server.client import GeneratedTokens

PROMPTS = [[2 + i] * 20 for i in range(3)]
ALL = 2 * len(PROMPTS) + 1
"""Requests of one probe: each prompt fresh and on the cached prefix, and the anchor."""


class Engine:
    """The server: whatever `answer` does for each request."""

    def __init__(self) -> None:
        self.under_way, self.most, self.begun = 0, 0, 0
        self.lock = threading.Lock()

    def info(self) -> Any:
        return SimpleNamespace(block_size=16, weight_version=0)

    def generate(self, prompt: list[int], max_tokens: int, **_: Any) -> GeneratedTokens:
        with self.lock:
            self.under_way, self.begun = self.under_way + 1, self.begun + 1
            self.most, number = max(self.most, self.under_way), self.begun
        try:
            self.answer(number)
        finally:
            with self.lock:
                self.under_way -= 1
        return GeneratedTokens([1] * max_tokens, [-0.1] * max_tokens, 16)

    def answer(self, number: int) -> None: ...


def _prober(*engines: Engine) -> LogprobProbe:
    config = TrainingConfig(model_name="m", probe_prompts=len(PROMPTS), max_model_len=64)
    prober = LogprobProbe(engines, config)  # type: ignore[arg-type]
    rollouts = [SimpleNamespace(tokens=torch.tensor(prompt), prompt_length=len(prompt)) for prompt in PROMPTS]
    prober.learn(SimpleNamespace(rollouts=rollouts))  # type: ignore[arg-type]
    return prober


def test_a_server_that_is_away_from_the_beginning_costs_its_turn_alone() -> None:
    class Away(Engine):
        def info(self) -> Any:
            raise EngineGone("it is not there")

    away, there = Away(), Engine()
    prober = _prober(away, there)
    for step, expected in ((1, False), (2, True)):
        prober.start(step, 0)
        assert (prober._collected() is not None) is expected
    prober.close()


def test_all_answers_are_decoded_together() -> None:
    together = threading.Barrier(ALL)

    class Together(Engine):
        def answer(self, number: int) -> None:
            together.wait(timeout=10)  # breaks where one waits for another's answer

    engine = Together()
    prober = _prober(engine)
    prober.start(1, 0)
    assert prober._running is not None
    asked = prober._running.result(timeout=20)
    assert asked is not None and [prompt for prompt, *_ in asked.answers] == PROMPTS
    assert asked.anchor[0] == PROMPTS[0] and engine.most == engine.begun == ALL
    prober.close()


def test_none_is_under_way_when_the_publish_comes(capsys: pytest.CaptureFixture[str]) -> None:
    class OneRefused(Engine):
        def answer(self, number: int) -> None:
            if number == 1:
                raise EngineError("refused")
            time.sleep(0.3)

    engine = OneRefused()
    prober = _prober(engine)
    prober.start(1, 0)
    assert prober.finish(torch.nn.Identity()) is None
    assert engine.under_way == 0 and engine.begun == ALL
    assert "no probe of this step: refused" in capsys.readouterr().out
    prober.close()


def test_of_several_servers_each_has_its_turn() -> None:
    """One that has other weights than it says would else never be found."""
    engines = [Engine(), Engine(), Engine()]
    prober = _prober(*engines)
    prober.config = prober.config.model_copy(update={"probe_interval": 2})
    for number, engine in enumerate(engines):
        engine.base_url = f"http://{number}"  # type: ignore[attr-defined]
    for step in range(1, 9):
        prober.start(step, 0)
        if prober._running is not None:
            prober._running.result(timeout=20)
            prober._running = None
    assert [engine.begun for engine in engines] == [2 * ALL, ALL, ALL]
    assert [prober.asked_at(step)[-1] for step in (1, 3, 5, 7)] == ["0", "1", "2", "0"]
    assert _prober(engines[0]).asked_at(1) == ""
    prober.close()


def test_a_close_in_the_middle_leaves_no_thread_that_waits() -> None:
    """Of many closes at any moment: a request that is cancelled before it begins is one that `wait` never ends for."""
    for attempt in range(60):
        prober = _prober(Engine())
        prober.start(1, 0)
        running = prober._running
        assert running is not None
        time.sleep(attempt % 6 * 1e-4)
        prober.close()
        assert wait([running], timeout=10).done, "the process could not end"
