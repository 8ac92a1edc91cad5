"""The record of weight versions and the state of one server, without an engine."""

from __future__ import annotations

import errno
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_common.protocol.bridge import VersionSpan
from vllm_server.versions import BridgeState, SpanStore, VersionHistory, span_of


def test_store_finds_what_it_keeps_and_forgets_the_least_recently_used() -> None:
    store = SpanStore(capacity=2)
    store.remember("a", VersionSpan(0, 0))
    store.remember("b", VersionSpan(1, 2))
    assert store.look_up(["a", "x"]) == [VersionSpan(0, 0), None]
    store.remember("c", VersionSpan(3, 3))
    assert store.look_up(["a", "b", "c"]) == [VersionSpan(0, 0), None, VersionSpan(3, 3)]
    assert len(store) == 2


def test_store_lets_the_later_of_two_equal_completions_win() -> None:
    store = SpanStore()
    store.remember("a", VersionSpan(0, 0))
    store.remember("a", VersionSpan(5, 5))
    assert store.look_up(["a"]) == [VersionSpan(5, 5)]
    assert len(store) == 1


def test_a_later_server_knows_what_an_earlier_one_generated(tmp_path: Path) -> None:
    path = tmp_path / "versions.txt"
    first = SpanStore(path)
    first.remember("aa", VersionSpan(3, 4))
    first.remember("bb", VersionSpan(5, 5))
    store = SpanStore(path)
    store.remember("cc", VersionSpan(6, 6))
    assert store.look_up(["aa", "bb", "cc"]) == [
        VersionSpan(3, 4),
        VersionSpan(5, 5),
        VersionSpan(6, 6),
    ]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_at_a_rewrite_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "versions.txt"
    kept = SpanStore(path, capacity=2)
    for number in range(3):
        kept.remember(f"{number}", VersionSpan(number, number))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vllm_server.versions.write_private", full)
    for number in range(3, 12):
        kept.remember(f"{number}", VersionSpan(number, number))
    SpanStore(tmp_path / "none" / "versions.txt").remember("a", VersionSpan(1, 1))
    monkeypatch.undo()
    for number in range(12, 16):
        kept.remember(f"{number}", VersionSpan(number, number))
    again = SpanStore(path, capacity=2)
    assert again.look_up(["15", "14", "13"]) == [VersionSpan(15, 15), VersionSpan(14, 14), None]


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "versions.txt"
    path.write_bytes(b"aa 1 2\n\xff\xfe\nbb x 2\ncc 1\ndd 3 3\nee 4 ")
    store = SpanStore(path)
    assert len(store) == 2 and store.look_up(["aa", "dd"]) == [VersionSpan(1, 2), VersionSpan(3, 3)]


def test_the_file_stays_as_bounded_as_the_store(tmp_path: Path) -> None:
    path = tmp_path / "versions.txt"
    kept = SpanStore(path, capacity=10)
    for number in range(100):
        kept.remember(f"{number:02}", VersionSpan(number, number))
    assert len(path.read_text().splitlines()) <= 20
    again = SpanStore(path, capacity=10)
    assert again.look_up(["99", "90", "10"]) == [VersionSpan(99, 99), VersionSpan(90, 90), None]


def test_history_knows_the_version_at_each_moment() -> None:
    history = VersionHistory()
    history.change(1, 10.0)
    history.change(2, 20.0)
    assert [history.span(moment, moment)[0] for moment in (0.0, 9.99, 10.0, 19.99, 20.0, 99.0)] == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]
    assert history.current == 2


def test_history_spans_everything_between_first_and_last_token() -> None:
    history = VersionHistory()
    for version, moment in ((1, 10.0), (2, 20.0), (3, 30.0)):
        history.change(version, moment)
    assert history.span(5.0, 6.0) == (0, 0)
    assert history.span(15.0, 25.0) == (1, 2)
    assert history.span(5.0, 35.0) == (0, 3)
    assert history.span(20.0, 20.0) == (2, 2)


def test_history_spans_a_version_that_went_back() -> None:
    history = VersionHistory()
    for version, moment in ((7, 10.0), (4, 20.0), (5, 30.0)):
        history.change(version, moment)
    assert history.span(15.0, 35.0) == (4, 7)


def test_history_is_bounded_and_answers_the_oldest_kept_before_its_start() -> None:
    history = VersionHistory(keep=3)
    for version in range(1, 10):
        history.change(version, float(version))
    assert history.span(0.0, 0.0)[0] == 7
    assert history.span(0.0, 8.5) == (7, 8)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0.01, 5)), max_size=30),
    st.floats(0, 100),
    st.floats(0, 50),
)
def test_span_agrees_with_looking_at_each_change(
    changes: list[tuple[int, float]], first: float, length: float
) -> None:
    history, now, moments = VersionHistory(), 0.0, []
    for version, gap in changes:
        now += gap
        history.change(version, now)
        moments.append(now)
    last = first + length
    seen = [
        history.span(moment, moment)[0]
        for moment in (first, last, *(m for m in moments if first <= m <= last))
    ]
    assert history.span(first, last) == (min(seen), max(seen))


def test_tokens_are_counted_at_each_change_while_the_request_is_in_flight() -> None:
    """Against a stand-in engine that makes one token at a time at an uneven rate."""
    history = VersionHistory()
    history.change(3, 0.0)
    dice, made, now, times = random.Random(0), [], 1.0, []
    with history.follow("r") as tokens_at:
        for version in (3, 4, 6):
            if version > 3:
                history.change(version, now, {"r": len(made), "another": 7})
            for _ in range(dice.randrange(1, 40)):
                now += dice.expovariate(1.0) * version**3
                made.append(version)
                times.append(now)
        history.change(7, now + 0.5, {"another": 9})
    history.change(8, now + 1.0, {"r": 1000})
    runs = history.runs(times[0], times[-1], len(made), tokens_at)
    assert runs == [(version, made.count(version)) for version in (3, 4, 6)]
    assert span_of((3, 6), runs) == (3, 6, len(made), pytest.approx(sum(made) / len(made)))
    guess = history.runs(times[0], times[-1], len(made), {})
    assert guess != runs and sum(tokens for _, tokens in guess) == len(made)


def test_a_version_without_a_token_is_no_run() -> None:
    history = VersionHistory()
    for version, moment in ((1, 10.0), (2, 11.0), (3, 12.0)):
        history.change(version, moment)
    assert history.runs(9.0, 13.0, 5, {10.0: 2, 11.0: 4, 12.0: 4}) == [(0, 2), (1, 2), (3, 1)]
    assert history.runs(9.0, 13.0, 5, {}) == [(0, 2), (1, 1), (2, 1), (3, 1)], "by time"
    assert history.runs(12.5, 12.5, 1, {}) == [(3, 1)]


def test_a_clean_lease_ends_by_itself_and_leaves_the_hold() -> None:
    state = BridgeState(held=True)
    state.pause(lease_s=5, dirty=False, now=100)
    assert state.expire(104.9) is None
    assert state.paused
    assert state.expire(105) == "resume"
    assert (state.paused, state.held, state.fault) == (False, True, None)
    assert state.expire(200) is None


def test_a_dirty_lease_stays_paused_and_names_its_fault_until_a_resume() -> None:
    state = BridgeState()
    state.pause(lease_s=5, dirty=True, now=100)
    assert state.expire(105) == "fault"
    assert state.paused
    assert state.fault is not None
    assert "half-written" in state.fault
    assert state.expire(106) is None
    state.resume(3)
    assert (state.paused, state.dirty, state.fault, state.weight_version) == (False, False, None, 3)


def test_pausing_again_renews_the_lease_but_does_not_clean() -> None:
    state = BridgeState()
    state.pause(lease_s=5, dirty=True, now=100)
    state.pause(lease_s=5, dirty=False, now=104)
    assert state.expire(106) is None
    assert state.dirty
    assert state.expire(109) == "fault"
    state.pause(lease_s=5, dirty=True, now=110)
    assert state.fault is None, "a trainer is at work again"


def test_resume_names_the_version_and_opens_the_hold() -> None:
    state = BridgeState(held=True)
    state.resume(0)
    assert (state.held, state.weight_version) == (False, 0)


@pytest.mark.parametrize("lease_s", [0, -1, math.nan, math.inf, 1e9])
def test_a_senseless_lease_is_refused_and_changes_nothing(lease_s: float) -> None:
    state = BridgeState()
    with pytest.raises(ValueError, match="lease_s"):
        state.pause(lease_s=lease_s, dirty=True, now=0)
    assert state == BridgeState()
