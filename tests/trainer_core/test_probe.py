"""The probe's requests: all in flight together, none left behind, and no endless wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from atropos_common.protocol.trainer_records import SAMPLING
from tests.support.made_rollouts import rollouts_of
from tests.support.small_models import CONFIGS, build
from trainer_core import probe
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone
from trainer_core.objective.alignment import Alignment
from trainer_core.policy.load import load_model
from trainer_core.policy.logprobs import head_scores, row_logprobs
from trainer_core.probe import LogprobProbe, explain
from trainer_core.ranks.world import ALONE, World
from trainer_core.rollouts.packing import pack
from trainer_core.rollouts.source import Lag
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
    rollouts = [
        SimpleNamespace(tokens=torch.tensor(prompt), prompt_length=len(prompt))
        for prompt in PROMPTS
    ]
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


def test_answers_bring_the_experts_that_they_took() -> None:
    """Where routing is replayed: those of each answer's own prompt and tokens."""
    asked = []

    def of_answer(prompt: list[int], token_ids: list[int]) -> Any:
        asked.append((prompt, token_ids))
        return np.full((len(prompt) + len(token_ids), 1, 1), len(asked), dtype=np.int16)

    prober = _prober(Engine())
    prober._routing = SimpleNamespace(of_answer=of_answer)  # type: ignore[assignment]
    prober.start(1, 0)
    found = prober._collected()
    assert found is not None
    answers = [found.anchor[1], *(one for _, *both in found.answers for one in both)]
    assert len(asked) == len(answers) == ALL
    assert sorted(int(one.experts[0, 0, 0]) for one in answers if one.experts is not None) == [
        *range(1, ALL + 1)
    ]
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
    assert "no logprob probe in this step: refused" in capsys.readouterr().out
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
    """Many closes at any moment: `wait` never ends for a request that is cancelled before it
    begins."""
    for attempt in range(60):
        prober = _prober(Engine())
        prober.start(1, 0)
        running = prober._running
        assert running is not None
        time.sleep(attempt % 6 * 1e-4)
        prober.close()
        assert wait([running], timeout=10).done, "the process could not end"


class Heard(World):
    """Rank 0, which notes what it shares; or, with that, another rank."""

    def __init__(self, heard: list[Any] | None = None) -> None:
        super().__init__()
        self.said: list[Any] = []
        self._heard = heard

    def share(self, make: Callable[[], Any]) -> Any:
        self.said.append(make() if self._heard is None else self._heard[len(self.said)])
        return self.said[-1]


def test_every_rank_looks_for_a_cause_as_rank_0_does(tmp_path: Path) -> None:
    """Each would go another way with its own figures, and wait for the others in a pass that they
    never make."""
    torch.manual_seed(0)
    models, rollouts = [], rollouts_of(4, longest=30)
    for each in range(2):
        build(CONFIGS["qwen3"]).save_pretrained(tmp_path / str(each))
        models.append(load_model(tmp_path / str(each), torch.float32, torch.device("cpu")))
    for rollout in rollouts:
        hotter = replace(rollout, temperature=0.6)
        row = pack([hotter], 100)[0]
        rollout.logprobs[rollout.trained] = row_logprobs(models[0], row).detach().numpy()
    rollouts = [replace(rollout, temperature=1.0) for rollout in rollouts]
    judged = Alignment("mismatch", SAMPLING, "fresh rollouts differ")
    fresh = [Lag(0)] * len(rollouts)

    def causes(model: torch.nn.Module, world: World) -> tuple[Alignment, int]:
        passes: list[Any] = []
        with patch.object(
            probe, "head_scores", lambda *args: passes.append(args) or head_scores(*args)
        ):
            found = explain(judged, model, rollouts, [], step=1, lags=fresh, world=world)
        return found, len(passes)

    rank_0 = Heard()
    found, alone = causes(models[0], rank_0), causes(models[1], ALONE)
    assert (
        found[0].cause.startswith("temperature: the rollouts' logprobs fit 0.60")
        and found[0] != alone[0]
    )
    assert causes(models[1], Heard(rank_0.said)) == found
