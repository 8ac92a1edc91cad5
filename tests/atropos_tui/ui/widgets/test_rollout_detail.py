"""A rollout in full: conversation, coloured tokens, the group side by side, export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atropos_common.protocol.token_columns import TokenSpan, pack
from atropos_common.protocol.trainer_records import RolloutRecord, RolloutTurn
from atropos_tui.ui.widgets.rollout_detail import RolloutDetail
from atropos_tui.ui.widgets.rollouts import Rollouts
from tests.atropos_tui.monitor.test_conversation import PROMPT, TURNS
from tests.atropos_tui.ui.conftest import Screen, cockpit
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, live_status, make_run, write_records

NOW = T0 + 31 + 0.33 * 40


def episode(step: int, reward: float, answer: str = "") -> RolloutRecord:
    texts = [*TURNS[:2], answer or TURNS[2]]
    text = "".join(texts)
    lengths, diffs = pack([TokenSpan(1, 0.7 if at == 5 else 0.0) for at in range(len(text))])
    turns = [RolloutTurn(at, len(one), len(one), 38, 39, 4) for at, one in enumerate(texts)]
    return RolloutRecord(
        step=step,
        time=NOW,
        env="tools",
        prompt=PROMPT,
        completion=text,
        reward=reward,
        advantage=reward - 0.5,
        group_size=4,
        turns=turns,
        turn_count=3,
        token_chars=lengths,
        token_diffs=diffs,
    )


@pytest.fixture
def run(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = make_run(tmp_path / "run", steps=37)
    rewards = (0.5, 0.0, 1.0, 0.25)
    records = [episode(step, reward) for step in (38, 39) for reward in rewards]
    records.append(episode(40, 0.9, "It is 13.<|im_end|>"))
    write_records(made.telemetry_jsonl, records, start=1000)
    return made


def words(screen: Screen) -> str:
    return screen.app.query_one(RolloutDetail)._text.plain


async def test_a_tool_episode_reads_as_a_conversation(run) -> None:  # type: ignore[no-untyped-def]
    control = FakeControl(live_status(run, NOW))
    async with cockpit(run, (160, 50), control, lambda: NOW) as screen:
        await screen.press("4")
        await screen.until(lambda: "model calls" in words(screen))
        lines = words(screen).splitlines()
        signs = [line.split("  ")[0] for line in lines if line and line[0] in "▪▸◆◇→←"]
        assert signs == [
            "▪ system",
            "▸ user",
            "◆ model",
            "→ model calls",
            "← tool returns",
            "◆ model",
        ]
        assert 'calculator(expression="3*4")' in lines and "<|im_end|>" not in words(screen)


async def test_keys_colour_tokens_and_a_legend_names_the_colours(run) -> None:  # type: ignore[no-untyped-def]
    control = FakeControl(live_status(run, NOW))
    async with cockpit(run, (160, 50), control, lambda: NOW) as screen:
        await screen.press("4", "C")
        await screen.until(lambda: "2 nats or more" in words(screen))
        assert "largest 0.700" in words(screen)
        detail = screen.app.query_one(RolloutDetail)
        loud = detail.style("diff-3")
        assert [words(screen)[s.start : s.end] for s in detail._text.spans if s.style == loud][
            1:
        ] == [TURNS[0][5]]
        await screen.press("C")
        await screen.until(lambda: "newest first  v39" in words(screen))
        assert "⟨v38⟩" in words(screen) and "⟨v39⟩" in words(screen), "a sign beside the colour"
        await screen.press("C")
        await screen.until(lambda: "model calls" in words(screen))


async def test_the_lowest_reward_of_a_step_takes_two_keys(run) -> None:  # type: ignore[no-untyped-def]
    control = FakeControl(live_status(run, NOW))
    async with cockpit(run, (160, 50), control, lambda: NOW) as screen:
        await screen.press("4")
        listing = screen.app.query_one(Rollouts)
        await screen.until(lambda: len(listing.items) > 8)
        listing.go_to(39)
        await screen.shows("S Sort   o One step")
        await screen.press("o", "S")
        await screen.until(lambda: len(listing.items) == 4)
        assert [item.rollout.reward for item in listing.items] == [0.0, 0.25, 0.5, 1.0]
        assert listing.current and listing.current.rollout.reward == 0.0
        assert "reward↑" in listing.head_line().plain
        await screen.shows("4 of 157  step 39  lowest reward first")
        await screen.shows("step reward↑")
        await screen.press("escape")
        await screen.until(lambda: len(listing.items) > 8)


async def test_the_group_stands_side_by_side_with_scores(run) -> None:  # type: ignore[no-untyped-def]
    control = FakeControl(live_status(run, NOW))
    async with cockpit(run, (200, 50), control, lambda: NOW) as screen:
        await screen.press("4")
        listing = screen.app.query_one(Rollouts)
        await screen.until(lambda: len(listing.items) > 8)
        listing.go_to(39)
        await screen.press("B")
        await screen.shows("reward 0.25")
        for reward in ("0.50", "0.00", "1.00"):
            assert f"reward {reward}" in screen.text()


async def test_the_listed_rollouts_are_exported_as_jsonl(  # type: ignore[no-untyped-def]
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    control = FakeControl(live_status(run, NOW))
    async with cockpit(run, (160, 50), control, lambda: NOW) as screen:
        await screen.press("4")
        listing = screen.app.query_one(Rollouts)
        await screen.until(lambda: len(listing.items) > 8)
        listing.go_to(39)
        await screen.press("o", "S", "e")
        await screen.until(lambda: any("4 rollouts written" in words for words in screen.toasts()))
        (path,) = run.exports.glob("atropos-*-rollouts-*.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["reward"] for row in rows] == [0.0, 0.25, 0.5, 1.0]
        assert [message["role"] for message in rows[0]["messages"]][:4] == [
            "system",
            "user",
            "assistant",
            "call",
        ]
