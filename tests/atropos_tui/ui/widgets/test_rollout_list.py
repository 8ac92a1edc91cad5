"""The list of rollouts: at every width an answer has room, and its end is visible."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_common.protocol.trainer_records import RolloutRecord
from atropos_tui.ui.widgets.rollouts import LEGIBLE, Rollouts
from tests.atropos_tui.ui.conftest import cockpit
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, live_status, make_run, write_records

QUESTION = (
    "<|im_start|>user\nWhat is 8931 + 1508? Answer with the number "
    "alone.<|im_end|>\n<|im_start|>assistant\n"
)
NOW = T0 + 31 + 0.33 * 40


def group(answers: list[str]) -> list[RolloutRecord]:
    rewards = [1.0 if "10439" in answer else 0.2 for answer in answers]
    return [
        RolloutRecord(
            step=40,
            time=NOW,
            env="add",
            prompt=QUESTION,
            completion=answer,
            reward=reward,
            advantage=1.25 if reward == 1.0 else -1.25,
            group_size=len(answers),
        )
        for answer, reward in zip(answers, rewards, strict=True)
    ]


LONG = (
    "To add 8931 and 1508 we first line up the digits, then carry what is more than nine. The "
    "answer is {}."
)


@pytest.mark.parametrize(
    ("size", "keys", "columns"),
    [
        ((80, 24), ("4",), "adv rewards"),
        ((100, 30), ("4",), "adv rewards"),
        ((120, 40), ("4",), "rewards"),
        ((120, 40), (), ""),
        ((200, 50), (), ""),
        ((200, 50), ("4",), "adv rewards"),
    ],
)
async def test_an_answer_has_room_and_shows_its_end(
    tmp_path: Path, size: tuple[int, int], keys: tuple[str, ...], columns: str
) -> None:
    run = make_run(tmp_path / "run", steps=37)
    write_records(
        run.telemetry_jsonl, group([LONG.format(sum_) for sum_ in (10439, 10429) * 4]), start=1000
    )
    async with cockpit(run, size, FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.press(*keys)
        listing = screen.app.query_one(Rollouts)
        await screen.until(lambda: len(listing.items) > 8 and listing.is_on_screen)
        head = " ".join(listing.head_line().plain.split())
        assert head.removeprefix("step reward").removesuffix("answer ← question").strip() == columns
        width = listing.scrollable_content_region.width
        lines = [listing.draw(item, width).plain for item in listing.items[1:8]]
        assert all(len(line) <= width for line in lines)
        ends = ["10439." if item.rollout.reward == 1.0 else "10429." for item in listing.items[1:8]]
        assert [line[-6:] for line in lines] == ends
        begin = listing.head_line().plain.index("answer")
        assert width - begin >= LEGIBLE - 10, "the narrowest list has 36 cells in all"


async def test_a_short_answer_stands_beside_its_question_even_in_a_narrow_list(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run", steps=37)
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        listing = screen.app.query_one(Rollouts)
        await screen.until(lambda: bool(listing.items))
        line = listing.draw(listing.items[0], 36).plain
        rollout = listing.items[0].rollout
        assert line.rstrip().endswith(f"{rollout.completion} ← {rollout.prompt}"), line


async def test_ordered_by_advantage_the_list_shows_it_first(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=37)
    write_records(
        run.telemetry_jsonl, group([LONG.format(sum_) for sum_ in (10439, 10429) * 4]), start=1000
    )
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.press("4", "S", "S", "S")
        listing = screen.app.query_one(Rollouts)
        await screen.until(lambda: len(listing.items) > 8)
        assert "adv" in listing.head_line().plain and "rewards" not in listing.head_line().plain
        worst = min(item.rollout.advantage for item in listing.items)
        assert f"{worst:.2f}" in listing.draw(listing.items[0], 56).plain
