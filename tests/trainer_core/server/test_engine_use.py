"""Use of the engines by their own counters, between two reads by the trainer, over all of them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from trainer_core.server.client import EngineMeter, ServerClient


class Engines:
    """Answers of two servers, and the trainer's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        self.idle: list[float | None] = [0.0, 0.0]
        self.life = ["a", "b"]
        self.tokens: list[int | None] = [None, None]
        self.capacity: list[float | None] = [None, None]
        monkeypatch.setattr("trainer_core.server.client.time.monotonic", lambda: self.now)
        self.meter = EngineMeter(
            [ServerClient("http://x", transport=self._transport(at)) for at in range(2)]
        )

    def _transport(self, at: int) -> httpx.MockTransport:
        def answer(request: httpx.Request) -> httpx.Response:
            assert request.url.path == "/bridge/info"
            if self.idle[at] == -1:
                return httpx.Response(503, json={"error": "the engine died"})
            info: dict[str, Any] = {
                "instance_id": self.life[at],
                "model": "m",
                "vllm_version": "0",
                "idle_s": self.idle[at],
                "generated_tokens": self.tokens[at],
                "capacity_tokens_per_s": self.capacity[at],
            }
            return httpx.Response(200, json=info)

        return httpx.MockTransport(answer)

    def look(self, after_s: float, *idle: float | None) -> float | None:
        self.now += after_s
        self.idle = list(idle)
        return self.meter.measure().idle


def test_the_share_is_of_the_time_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    assert engines.look(0, 100.0, 7.0) is None, "nothing to compare with"
    assert engines.look(4, 103.0, 8.0) == pytest.approx(0.5)
    assert engines.look(2, 105.1, 10.0) == 1.0, "the way there takes time, too"
    engines.life[0] = "c"
    assert engines.look(2, 106.0, 11.0) == 0.5, (
        "one began anew, however long it has idled since: the other speaks"
    )
    assert engines.look(2, 106.0, 12.0) == pytest.approx(0.25)
    assert engines.look(2, -1, 12.0) == 0.0 and engines.look(2, 107.0, 12.0) == 0.0, (
        "one did not answer"
    )
    assert engines.look(2, -1, -1) is None, "nobody tells"
    assert engines.look(2, 107.0, 12.0) is None, "nothing to compare with"
    assert engines.look(2, 108.0, 12.0) == pytest.approx(0.25)
    assert engines.look(2, None, 13.0) == 0.5, "a server that does not count"


def test_the_capacity_used_is_of_the_servers_that_know_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines(monkeypatch)

    def used(after_s: float, *tokens: int | None) -> float | None:
        engines.now += after_s
        engines.tokens = list(tokens)
        return engines.meter.measure().capacity

    assert used(0, 1000, 0) is None
    assert used(2, 3000, 500) is None, "no ceiling is known"
    engines.capacity = [2000.0, None]
    assert used(2, 5000, 900) == pytest.approx(0.5), "of the one that knows"
    engines.capacity = [2000.0, 3000.0]
    assert used(2, 7000, 4900) == pytest.approx(3000 / 5000)
    assert used(2, 19000, 4900) == pytest.approx(1.2), "the ceiling is an estimate"
    engines.life[0] = "c"
    assert used(2, 10, 7900) == pytest.approx(0.5), "one began anew"
    assert used(2, None, None) is None, "nobody counts"


def test_generated_tokens_are_counted_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)

    def generated(*tokens: int | None) -> int | None:
        engines.now += 2
        engines.tokens = list(tokens)
        return engines.meter.measure().generated

    assert generated(1000, 50) is None, "nothing to compare with"
    assert generated(1500, 80) == 530
    engines.life[0] = "c"
    assert generated(40, 90) == 50, "a new server counts from 0"
    assert generated(None, 100) == 10 and generated(None, None) is None
