"""Choice of problems by pass rate: keys of items, chances, what is kept, and the real host."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest
import torch
from pydantic import BaseModel

from atropos_envs import EnvFault
from atropos_envs.hosting import curriculum as module
from atropos_envs.hosting.curriculum import (
    MOST_SKIPPED,
    Curriculum,
    curriculum_of,
    flat_chance,
    key_of,
    prior,
)
from tests.atropos_envs.support import begin_at_once, plain_env, run_api, trainer_registration

RIGHT, WRONG, MIXED = [1.0] * 8, [0.0] * 8, [1.0, 0.0] * 4


@dataclass
class Question:
    text: str


class Pair(NamedTuple):
    left: int
    right: int


class Row(BaseModel):
    text: str


class Level(Enum):
    EASY = "easy"


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ({"q": "2+2", "a": 4}, {"a": 4, "q": "2+2"}, {"q": "2+2", "a": 5}),
        (Question("a"), Question("a"), Question("b")),
        (Row(text="a"), Row(text="a"), Row(text="b")),
        (Pair(1, 2), Pair(1, 2), Pair(2, 1)),
        (
            (frozenset({("role", "user"), ("content", "x")}), "4"),
            (frozenset({("content", "x"), ("role", "user")}), "4"),
            (frozenset({("content", "y"), ("role", "user")}), "4"),
        ),
        (np.arange(4), np.arange(4), np.arange(4).reshape(2, 2)),
        ([torch.tensor([1.0])], [torch.tensor([1.0])], [torch.tensor([2.0])]),
        ([Level.EASY, None, b"x"], [Level.EASY, None, b"x"], [Level.EASY, None, b"y"]),
        (1, 1, "1"),
        ("\ud800", "\ud800", "\ud801"),
    ],
)
def test_the_key_of_an_item_is_its_content(one: Any, same: Any, other: Any) -> None:
    assert key_of(one) == key_of(same) != key_of(other)
    assert key_of(one)


def test_an_item_without_a_stable_form_has_no_key() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for item in (object(), {"q": "2+2", "sandbox": object()}, lambda: 0, endless):
        assert key_of(item) is None


def test_the_chance_of_a_flat_group_is_that_of_its_formula() -> None:
    # A strong belief in a pass rate p: p^n + (1 - p)^n.
    for p in (0.1, 0.5, 0.9):
        assert flat_chance(1e6 * p, 1e6 * (1 - p), 8) == pytest.approx(p**8 + (1 - p) ** 8, 1e-3)
    assert flat_chance(1, 1, 8) == pytest.approx(2 / 9), "every pass rate equally likely"


@pytest.mark.parametrize(("rate", "flat"), [(0.5, 0.5), (0.3, 0.8), (0.9, 0.7)])
def test_the_prior_has_the_mean_and_the_flat_share_that_were_measured(
    rate: float, flat: float
) -> None:
    passes, fails = prior(rate, flat, 8)
    assert passes / (passes + fails) == pytest.approx(rate)
    assert flat_chance(passes, fails, 8) == pytest.approx(flat, abs=0.01)


def items(*names: str) -> Any:
    source = cycle(names)

    async def draw() -> str:
        return next(source)

    return draw


def drawn(curriculum: Curriculum, draw: Any, count: int, **results: list[float]) -> Counter[Any]:
    """Items that go, each followed by its result."""
    found = Counter[Any]()

    async def work() -> None:
        for _ in range(count):
            item = await curriculum.choose(draw)
            found[item] += 1
            curriculum.learn(key_of(item), [results[item]] if item in results else [])

    asyncio.run(work())
    return found


def experienced(*results: tuple[str, list[float]], times: int = 4, **fields: Any) -> Curriculum:
    curriculum = Curriculum(dice=random.Random(0), **fields)
    for _ in range(times):
        for name, scores in results:
            curriculum.learn(key_of(name), [scores])
    return curriculum


def test_flat_problems_go_less_often_and_are_never_forgotten() -> None:
    curriculum = experienced(("easy", RIGHT), ("hard", WRONG), ("half", MIXED))
    results = {"easy": RIGHT, "hard": WRONG, "half": MIXED}
    found = drawn(curriculum, items(*results, "new"), 400, **results)
    assert found["half"] == pytest.approx(found["new"], abs=2), "neither is skipped"
    for flat in ("easy", "hard"):
        assert 0.08 < found[flat] / found["half"] < 0.4
    counts = curriculum.record()
    assert counts.offered - counts.skipped == 400 and 0 < counts.known < counts.offered


def test_a_problem_that_changes_is_seen_again() -> None:
    curriculum = experienced(("hard", WRONG), ("half", MIXED))
    before = drawn(curriculum, items("hard", "half"), 300, hard=WRONG, half=MIXED)["hard"]
    after = drawn(curriculum, items("hard", "half"), 300, hard=MIXED, half=MIXED)["hard"]
    assert before < 100 and after > 140


def test_what_is_skipped_slowly_comes_closer_to_an_unknown_problem() -> None:
    curriculum = experienced(("hard", WRONG), ("half", MIXED))
    problem = curriculum._problem(str(key_of("hard")))
    before = curriculum._useful(problem)
    drawn(curriculum, items("hard", "half"), 40)
    assert curriculum._useful(problem) > before


def test_at_most_a_bounded_number_is_skipped_and_the_most_useful_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LEAST_CHANCE", 0.0)
    monkeypatch.setattr(module, "SHARPNESS", 1e9)
    curriculum = experienced(("easy", RIGHT), ("hard", WRONG), ("half", MIXED))
    curriculum.learn(key_of("easy"), [[1.0] * 7 + [0.0]])
    curriculum._usual = 1.0  # more useful than any problem
    assert drawn(curriculum, items("easy", "hard"), 1) == {"easy": 1}
    counts = curriculum.record()
    assert (counts.offered, counts.skipped) == (MOST_SKIPPED, MOST_SKIPPED - 1)


def test_items_without_a_key_and_the_end_of_items_pass() -> None:
    curriculum = experienced(("easy", RIGHT))
    things = [object(), object()]
    given: Iterator[Any] = iter([*things, None])

    async def draw() -> Any:
        return next(given)

    async def choose() -> list[Any]:
        return [await curriculum.choose(draw) for _ in range(3)]

    assert asyncio.run(choose()) == [*things, None]
    assert curriculum.record().without_key == 2


def test_partial_rewards_are_not_mistaken_for_flat_ones() -> None:
    graded = [0.2, 0.3, 0.5, 0.2, 0.3, 0.4, 0.2, 0.3]
    curriculum = experienced(("one", graded), ("other", [0.2] * 8), ("top", [0.9] * 8), times=6)
    results = {"one": graded, "other": [0.2] * 8, "top": [0.9] * 8}
    found = drawn(curriculum, items(*results), 300, **results)
    assert found["one"] > 2 * found["other"] and found["one"] > 2 * found["top"]
    curriculum.learn(key_of("one"), [[float("nan")] * 8])
    curriculum.learn(key_of("one"), [[0.5], []])
    curriculum.learn(None, [RIGHT])


def test_the_flat_share_without_the_choice_is_estimated() -> None:
    # 60 of 100 problems are always flat.
    curriculum = Curriculum(dice=random.Random(1))
    order = cycle(range(100))

    async def draw() -> int:
        return next(order)

    async def work() -> None:
        for _ in range(3000):
            item = await curriculum.choose(draw)
            flat = RIGHT if item % 2 else WRONG
            curriculum.learn(key_of(item), [flat if item < 60 else MIXED])

    asyncio.run(work())
    counts = curriculum.record()
    assert counts.flat_share is not None and counts.flat_share < 0.35
    assert counts.flat_share_without == pytest.approx(0.6, abs=0.1)


def test_the_next_process_takes_the_state_over(tmp_path: Path) -> None:
    path = tmp_path / "state"
    curriculum = experienced(("easy", RIGHT), ("half", MIXED), path=path)
    curriculum.save()
    again = Curriculum(path, random.Random(0))
    assert again._useful(again._problem(str(key_of("easy")))) == pytest.approx(
        curriculum._useful(curriculum._problem(str(key_of("easy")))), abs=0.01
    )
    assert again.record().flat_share == pytest.approx(curriculum.record().flat_share)
    for broken in ("", "[]", '{"format": 9}', '{"format": 1}', "\udcff"):
        path.write_bytes(broken.encode("utf-8", "surrogateescape"))
        assert Curriculum(path).record().flat_share is None


def test_the_state_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PROBLEMS", 100)
    curriculum = Curriculum(tmp_path / "state")
    for number in range(500):
        curriculum.learn(key_of(number), [MIXED])
    curriculum.save()
    assert len(json.loads((tmp_path / "state").read_text())["problems"]) == 100


def test_a_group_of_one_is_never_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_CURRICULUM", "pass_rate")
    assert curriculum_of("theirs", 1) is None and curriculum_of("theirs", 2) is not None
    monkeypatch.delenv("ATROPOS_CURRICULUM")
    assert curriculum_of("theirs", 8) is None


async def test_an_unmodified_environment_is_chosen_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its items have no name, and it changes them while it works on them."""
    begin_at_once(monkeypatch)
    bridge = tmp_path / "run/bridge"
    bridge.mkdir(parents=True)
    monkeypatch.setenv("ATROPOS_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("ATROPOS_COMPONENT", "theirs")
    monkeypatch.setenv("ATROPOS_CURRICULUM", "pass_rate")
    monkeypatch.setattr(module, "SAVE_S", 0.2)
    rolled = Counter[int]()

    async def collect(item: Any) -> Any:
        await asyncio.sleep(0.005)
        number, item["number"] = item["number"] % 8, None
        rolled[number] += 1
        scores = [0.0, 1.0] if number % 4 == 0 else [1.0, 1.0]
        return {"tokens": [[3, 4], [3, 5]], "masks": [[-100, 4], [-100, 5]], "scores": scores}

    async def evaluate() -> None:
        pass

    async with run_api() as api, aiohttp.ClientSession() as http:
        await http.post(f"{api}/register", json=trainer_registration(8))
        await http.get(f"{api}/batch")
        env = plain_env(
            tmp_path / "model",
            api,
            collect,
            evaluate,
            lambda count: {"number": count % 8},
            group_size=2,
            wandb_name="theirs",
        )
        serving = asyncio.create_task(env.env_manager())
        async with asyncio.timeout(30):
            while sum(rolled.values()) < 300 and not serving.done():
                await asyncio.sleep(0.02)
                await http.get(f"{api}/batch")
        serving.cancel()
        with pytest.raises((asyncio.CancelledError, EnvFault)):
            await serving
    useful = sum(rolled[number] for number in (0, 4)) / 2
    flat = sum(rolled[number] for number in range(8) if number % 4) / 6
    assert flat < 0.6 * useful
    counts = env._curriculum.record()
    assert counts.skipped > 0 and counts.flat_share < counts.flat_share_without
    assert len(json.loads((bridge / "env.theirs.curriculum").read_text())["problems"]) == 8
