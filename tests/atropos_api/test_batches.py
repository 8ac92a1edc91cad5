"""`GET /batch` of a plan's run-api: oldest first, one at a time, kept until released, robust to
garbage."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from atroposlib.api.utils import (
    grab_batch_with_minimum_allocations,
    grab_exact_from_heterogeneous_queue,
)

from atropos_api.batches import form_batch
from atropos_common.net.http import AFTER_HEADER, BATCH_HEADER
from atropos_common.protocol.bridge import TOKEN_HEADER
from tests.atropos_api.test_auth import GROUP, REGISTRATION, TOKEN, serving
from trainer_core.rollouts.batch import read_batch


class Api:
    """A run-api with a trainer's registration of batches of 8."""

    def __init__(self, port: int) -> None:
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={TOKEN_HEADER: TOKEN}, timeout=120
        )

    def fresh(self) -> Api:
        self.http.get("/reset_data").raise_for_status()
        self.http.post("/register", json=REGISTRATION).raise_for_status()
        assert self.http.get("/batch").json() == {"batch": None}
        return self

    def send(self, *scores: float, size: int = 8, **fields: Any) -> None:
        """A group for each score, which is that of its first sequence."""
        for score in scores:
            group = {name: rows[:size] for name, rows in GROUP.items()}
            body = json.dumps({**group, "scores": [score, *group["scores"][1:]], **fields})
            self.http.post(
                "/scored_data", content=body, headers={"content-type": "application/json"}
            ).raise_for_status()

    def batch(self, after: str | None = None) -> tuple[list[Any], str | None]:
        """The first score of each group, and the name of the batch."""
        answer = self.http.get("/batch", headers={} if after is None else {AFTER_HEADER: after})
        return [group["scores"][0] for group in answer.json()["batch"] or []], answer.headers.get(
            BATCH_HEADER
        )

    def status(self) -> tuple[int, int]:
        """Batches let go, groups in the queue."""
        found = self.http.get("/status").json()
        return found["current_step"], found["queue_size"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with serving(tmp_path_factory.mktemp("api"), ATROPOS_TOKEN=TOKEN) as (port, _):
        yield Api(port)


@pytest.fixture
def api(server: Api) -> Api:
    return server.fresh()


def test_the_oldest_comes_first_and_the_others_stay_where_environments_count_them(api: Api) -> None:
    """atroposlib's own answer empties the queue and begins with the newest."""
    api.send(1, 2, 3)
    for taken in (1, 2, 3):
        assert api.batch() == ([taken], None)
        assert api.status() == (taken, 3 - taken)
    assert api.batch() == ([], None)


def test_a_batch_is_kept_until_the_one_after_it_is_asked_for(api: Api) -> None:
    api.send(1, 2)
    scores, first = api.batch("")
    assert (scores, api.status()) == ([1], (0, 2)), "still counted"
    assert api.batch("") == ([1], first) == api.batch("of another life"), (
        "who lost it gets it again"
    )
    scores, second = api.batch(first)
    assert (scores, api.status()) == ([2], (1, 1))
    assert api.batch(first) == ([2], second), "asked twice, let go once"
    assert api.batch(second) == ([], None) and api.status() == (2, 0)
    api.send(3)
    assert api.batch(second)[0] == [3]
    assert api.batch()[0] == [3] and api.batch() == ([], None), (
        "without the header it is gone for good"
    )


def test_a_question_waits_a_moment_for_its_answer(api: Api) -> None:
    other = Api(api.http.base_url.port or 0)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(api.batch, "")
        time.sleep(0.2)
        assert api.batch() == ([], None) and not asked.done(), (
            "without the header it is answered at once"
        )
        other.send(1)
        assert asked.result(10)[0] == [1]


def test_a_reset_forgets_what_was_kept(api: Api) -> None:
    api.send(1)
    _, name = api.batch("")
    api.fresh().send(2)
    assert api.batch(name)[0] == [2] and api.status() == (0, 1)
    api.http.get("/reset_data")
    assert "not registered" in api.http.get("/batch").json()["message"]


def test_a_trainer_that_registers_after_a_group_gets_the_next_ones(api: Api) -> None:
    """atroposlib ignored its registration, and every batch was empty for good."""
    api.http.get("/reset_data").raise_for_status()
    api.send(1)
    api.http.post("/register", json=REGISTRATION).raise_for_status()
    assert api.batch() == ([], None), "nobody knows which weights made the early group"
    api.send(2)
    assert api.batch() == ([2], None)
    api.send(3)
    api.http.post("/register", json=REGISTRATION).raise_for_status()
    assert api.batch() == ([3], None), "a second registration keeps the queue"


def test_an_answer_is_never_compressed(api: Api) -> None:
    api.send(1, messages=[[{"role": "user", "content": "x" * 5000}]] * 8)
    answer = api.http.get("/batch", headers={"Accept-Encoding": "gzip"})
    assert len(answer.content) > 5000 and "content-encoding" not in answer.headers


def test_what_json_cannot_hold_costs_its_own_group_alone(api: Api) -> None:
    """NaN, and text that is no Unicode: with atroposlib's answer all of the batch is lost (HTTP
    500)."""
    api.send(float("nan"), size=2, env_id=7)
    api.send(1, size=2, generation_params={"odd": "\ud800"})
    api.send(2, 3, size=2)
    groups = api.http.get("/batch").json()["batch"]
    batch = read_batch(groups, seq_len=8, recompute=True)
    assert (
        batch.left_out == {"malformed scores": 2, "malformed group": 1} and len(batch.rollouts) == 4
    )
    assert "environment 'env 7'" in batch.examples["malformed scores"]


def test_groups_of_unequal_sizes_add_up(api: Api) -> None:
    """Threes and a two among fours: atroposlib's rule alone would leave them in the queue for
    ever."""
    api.send(1, 2, size=3)
    api.send(3, size=2)
    assert api.batch()[0] == [1, 2, 3]
    api.send(4, size=3)
    api.send(5, 6, size=4)
    assert api.batch()[0] == [5, 6] and api.status()[1] == 1
    api.send(7, size=5)
    assert api.batch()[0] == [4, 7] and api.status()[1] == 0


def _groups(sizes: list[int], dice: random.Random) -> list[dict[str, Any]]:
    return [{"tokens": [[1]] * size, "env_id": dice.randrange(2)} for size in sizes]


@pytest.mark.parametrize("share", [None, 0.5])
def test_what_atroposlib_would_give_is_given(share: float | None) -> None:
    """Groups of powers of two, with and without a share that an environment is promised."""
    dice = random.Random(0)
    envs = [
        {"registered_id": i, "connected": True, "min_batch_allocation": share} for i in range(2)
    ]
    given = 0
    for _ in range(300):
        queue = _groups([dice.choice([1, 2, 4]) for _ in range(dice.randrange(20))], dice)
        if share is None:
            theirs, _ = grab_exact_from_heterogeneous_queue(queue, 8)
        else:
            theirs, _ = grab_batch_with_minimum_allocations(queue, 8, envs)
        ours = form_batch(queue, 8, envs)
        given += theirs is not None
        assert theirs is None or [id(group) for group in theirs] == [
            id(group) for group in ours or []
        ]
        assert ours is None or sum(len(group["tokens"]) for group in ours) == 8
    assert given > 100


def test_an_environment_that_dies_while_it_sends_leaves_nothing_half(api: Api) -> None:
    body = json.dumps(GROUP).encode()
    head = f"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((api.http.base_url.host, api.http.base_url.port)) as line:
        line.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body[:-9])
    api.send(1, size=4)
    assert api.batch() == ([], None) and api.status() == (0, 1)
    api.send(2, size=4)
    assert api.batch()[0] == [1, 2], "the next one's groups complete the batch"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_batch_of_200_mb_comes_whole(api: Api) -> None:
    """As JSON; the auth middleware admits half a GiB at a time."""
    text = "x" * 25_000_000
    api.send(1, messages=[[{"role": "user", "content": text}]] * 8)
    answer = api.http.get("/batch", headers={AFTER_HEADER: ""})
    assert len(answer.content) > 200_000_000
    batch = read_batch(answer.json()["batch"], seq_len=8, recompute=True)
    assert len(batch.rollouts) == 8 and not batch.left_out
    assert api.batch(answer.headers[BATCH_HEADER]) == ([], None) and api.status() == (1, 0)
