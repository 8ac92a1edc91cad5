"""Rollouts by group, searched and compared; the timeline; the list of runs."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_common.protocol.records import (
    CommandRecord,
    DiagnosisRecord,
    StateRecord,
)
from atropos_common.protocol.trainer_records import CheckpointRecord, RolloutRecord
from atropos_common.system.run_dir import registry
from atropos_tui.monitor.format import clock, plain_text
from atropos_tui.monitor.rollout_groups import (
    _stayed,
    answer,
    chosen,
    diff,
    earlier_twin,
    groups,
    known_rewards,
    question,
    shared_beginning,
)
from atropos_tui.monitor.run.state import RunState, timeline
from atropos_tui.monitor.run_list import HEADINGS, listed, other_runs, table
from tests.support.run_maker import make_run, start_records


@pytest.fixture(autouse=True)
def no_runs_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def rollout(
    step: int, prompt: str, completion: str = "", reward: float = 1.0, env: str = "e"
) -> RolloutRecord:
    return RolloutRecord(
        step=step, prompt=prompt, completion=completion, reward=reward, advantage=0.0, env=env
    )


def test_groups_are_newest_first_and_hold_completions_of_one_prompt() -> None:
    rows = [rollout(1, "a"), rollout(2, "b", "x", 1.0), rollout(2, "c"), rollout(2, "b", "y", 0.0)]
    found = groups(rows)
    assert [(group.step, group.prompt, len(group.rollouts)) for group in found] == [
        (2, "b", 2),
        (2, "c", 1),
        (1, "a", 1),
    ]


def test_a_search_keeps_what_matches() -> None:
    rows = [rollout(1, "apple", "1"), rollout(1, "pear", "an apple"), rollout(1, "pear", "2")]
    found = groups(rows, re.compile("apple"))
    assert [[r.completion for r in group.rollouts] for group in found] == [["1"], ["an apple"]]


CHAT = (
    "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhat is "
    "{}?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        (CHAT.format("2 + 3"), "What is 2 + 3?"),
        ("<bos><start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n", "Why?"),
        ("<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>", "Why?"),
        ("[INST] first [/INST] yes [INST] Why? [/INST]", "Why?"),
        ("8+6=", "8+6="),
    ],
)
def test_the_question_is_the_last_turn_without_its_template(prompt: str, asked: str) -> None:
    assert question(prompt) == asked
    assert answer("14<|im_end|>") == "14"


def test_what_questions_share_is_cut_in_whole_words() -> None:
    shared = "Solve the following task: "
    assert shared_beginning([f"{shared}one apple", f"{shared}one axe"]) == len(f"{shared}one ")
    assert shared_beginning([shared, shared]) == shared_beginning(["a b", "a c"]) == 0


def test_what_failed_is_chosen_and_flat_groups_are() -> None:
    worse = rollout(1, "a", reward=0.0).model_copy(update={"advantage": -1.0})
    better = rollout(1, "a", reward=1.0).model_copy(update={"advantage": 1.0})
    found = groups([better, worse, rollout(1, "flat"), rollout(1, "flat"), rollout(1, "alone")])
    assert [group.rollouts for group in chosen(found, "worse")] == [(worse,)]
    assert [group.prompt for group in chosen(found, "flat")] == ["flat"]
    assert chosen(found, "all") == found


def test_the_twin_is_the_same_prompt_in_the_latest_earlier_step() -> None:
    rows = [
        rollout(1, "a"),
        rollout(2, "a"),
        rollout(3, "b"),
        rollout(3, "a", env="other"),
        rollout(4, "a"),
    ]
    assert earlier_twin(rows[-1], rows) is rows[1]
    assert earlier_twin(rows[2], rows) is rows[1]
    assert earlier_twin(rows[0], rows) is None


def test_a_diff_in_words() -> None:
    assert diff("the cat sat", "the dog sat") == [
        ("same", "the "),
        ("gone", "cat"),
        ("new", "dog"),
        ("same", " sat"),
    ]
    assert diff("", "") == []


@given(st.text(max_size=200), st.text(max_size=200))
def test_a_diff_holds_both_texts_in_full(old: str, new: str) -> None:
    parts = diff(old, new)
    assert "".join(text for change, text in parts if change != "new") == old
    assert "".join(text for change, text in parts if change != "gone") == new


@given(st.lists(st.sampled_from("abc"), max_size=9), st.lists(st.sampled_from("abc"), max_size=9))
def test_as_much_stays_as_can(old: list[str], new: list[str]) -> None:
    longest = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for i, word in enumerate(old):
        for j, other in enumerate(new):
            longest[i + 1][j + 1] = (
                longest[i][j] + 1 if word == other else max(longest[i][j + 1], longest[i + 1][j])
            )
    found = _stayed(old, new)
    assert len(found) == longest[-1][-1] and all(old[i] == new[j] for i, j in found)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(found))


def test_a_long_diff_still_holds_both_texts() -> None:
    old, new = "a " * 5000, "b " * 5000
    parts = diff(old, new)
    assert "".join(text for change, text in parts if change != "gone") == new
    assert "".join(text for change, text in parts if change != "new") == old


def test_the_timeline_tells_everything_in_order() -> None:
    state = RunState()
    for record in [
        StateRecord(
            seq=0,
            time=3,
            component="vllm",
            old="pending",
            new="starting",
            attempt=2,
            reason="by hand",
        ),
        DiagnosisRecord(
            seq=1, time=5, component="vllm", title="[oom]\x1b[2J", evidence="e", fix="f", rule="r"
        ),
        CommandRecord(
            seq=2,
            time=4,
            component=None,
            command_id="c",
            action="restart",
            status="failed",
            detail="d",
        ),
        StateRecord(seq=3, time=6, component="vllm", old="starting", new="melted", exit_code=-9),
        CheckpointRecord(step=20, time=1, path="p", seconds=0.5, bytes=10),
    ]:
        state.apply(record)
    found = timeline(state)
    assert [event.time for event in found] == [1, 3, 4, 5, 6]
    assert [event.mark for event in found] == [
        "▪ checkpoint",
        "◔ starting",
        "→ command",
        "▲ diagnosis",
        "· melted",
    ]
    assert found[1].text == "by hand · attempt 2"
    assert found[2].text == "restart the stack: failed"
    assert found[3].text == "[oom]"
    assert "fix: f" in found[3].detail
    assert "exit code -9" in found[4].detail


EVIL = "\x1b]52;c;ZXZpbA==\x07 \x1b[2J \x9b5A \ud800"


def test_every_text_of_an_event_is_plain() -> None:
    state = RunState()
    for record in [
        StateRecord(seq=0, component=EVIL, old=EVIL, new=EVIL, reason=EVIL),
        DiagnosisRecord(
            seq=1, component=EVIL, title=EVIL, evidence=f"one{EVIL}\ntwo", fix=EVIL, rule=EVIL
        ),
        CommandRecord(
            seq=2,
            component=EVIL,
            command_id=EVIL,
            action=EVIL,
            status="done",
            initiator=EVIL,
            detail=EVIL,
        ),
        CheckpointRecord(step=1, path=EVIL, seconds=0.5, bytes=10**400),
    ]:
        state.apply(record)
    for event in timeline(state):
        for text in (event.component, event.mark, event.text, *event.detail.split("\n")):
            assert plain_text(text) == text
    assert any("two\n" in event.detail for event in timeline(state)), "lines of evidence stay apart"


def test_a_clock_is_a_time_of_day_whatever_it_is_given() -> None:
    assert re.fullmatch(r"\d\d:\d\d:\d\d", clock(1_790_000_000.0))
    assert {clock(at) for at in (float("nan"), float("inf"), 1e300)} == {"--:--:--"}


def test_an_ordinary_start_is_on_the_timeline() -> None:
    state = RunState()
    for seq, record in enumerate(start_records()):
        state.apply(record.model_copy(update={"seq": seq}))
    assert len(timeline(state)) == 10


def test_neighbours_are_runs_with_records_newest_first(tmp_path: Path) -> None:
    for at, name in enumerate(("old", "new", "mine")):
        run = make_run(tmp_path / name, steps=1)
        run.run_json.write_text(json.dumps({"started_at": 1000.0 + at}))
    (tmp_path / "old" / "result.json").write_text('{"exit_code": 3}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    found = other_runs(tmp_path / "mine")
    assert [(run.run, run.state, run.step) for run in found] == [
        ("new", "unfinished", 1),
        ("old", "ended 3", 1),
    ]
    assert found[0].mode == "shared_vllm"
    assert other_runs(tmp_path / "no" / "such") == []
    registry().mkdir(parents=True)
    (registry() / "far-away").symlink_to(make_run(tmp_path / "elsewhere" / "far", steps=1).root)
    assert {run.run for run in other_runs(tmp_path / "mine")} == {"new", "old", "far"}


def test_a_narrow_table_of_runs_leaves_out_the_least_telling_columns(tmp_path: Path) -> None:
    found = listed(make_run(tmp_path / "run", steps=9), is_live=True, now=time.time())
    assert table([found], time.time())[0].split() == " ".join(HEADINGS[:-1]).split()
    narrow = table([found], time.time(), width=50)
    assert (
        narrow[0].split() == ["RUN", "STARTED", "STEPS", "REWARD", "STATE"] and "9/60" in narrow[1]
    )


def test_a_neighbour_that_cannot_be_read_or_began_at_no_time_of_this_world_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("far", "forbidden", "good", "mine"):
        make_run(tmp_path / name, steps=1)
    (tmp_path / "far" / "run.json").write_text(f'{{"started_at": 1{"0" * 400}}}')
    (tmp_path / "good" / "run.json").write_text('{"started_at": 5}')
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if "forbidden" in path.parts:
            raise PermissionError(path)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    far, good = other_runs(tmp_path / "mine")
    assert (far.run, good.run, good.started_at) == ("far", "good", 5.0)
    assert far.started_at == pytest.approx(time.time(), abs=600), "by its directory"


def test_a_folder_that_cannot_be_listed_has_no_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> Iterator[Path]:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    assert other_runs(tmp_path / "mine") == []


def test_a_reward_that_is_no_number_has_no_place_among_others() -> None:
    rewards = [math.nan, 0.0, math.inf, 1.0]
    rollouts = [
        RolloutRecord(step=1, prompt="", completion="", reward=reward, advantage=0.0)
        for reward in rewards
    ]
    assert known_rewards(rollouts) == [0.0, 1.0]
