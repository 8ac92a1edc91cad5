"""The list of rollouts: by group or sorted, with search, comparison and export. Their text is
untrusted."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar

from rich.text import Text
from textual.binding import BindingType
from textual.message import Message

from atropos_common.protocol.trainer_records import RolloutRecord
from atropos_tui.monitor.format import counted, cut, number, one_line
from atropos_tui.monitor.patterns import Pattern
from atropos_tui.monitor.rollout_groups import (
    ONLY,
    ORDERS,
    Only,
    Order,
    RolloutGroup,
    answer,
    chosen,
    earlier_twin,
    groups,
    in_order,
    question,
    shared_beginning,
)
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.panel import Listing, View, after, hidden
from atropos_tui.ui.widgets.rollout_detail import (
    COLOURS,
    MOST_SPREAD,
    Look,
    Pointed,
    RolloutDetail,
    spread,
)

STEP, REWARD, ADVANTAGE, GAP = 6, 6, 7, 2
GROUP = "rewards"  # heading of the bars of a group
LEGIBLE = 30  # cells that the answer keeps when advantage and rewards get columns
ASKED = 40  # cells from which the question is shown beside a long answer
# Search text that asks for one step.
A_STEP = re.compile(r"step[:=] ?(\d+)", re.IGNORECASE)
# Cells from which an answer is cut in its middle: answers of a group start alike and end with the
# result.
BOTH_ENDS = 16


@dataclass(frozen=True)
class RolloutRow:
    group: RolloutGroup
    at: int

    @property
    def rollout(self) -> RolloutRecord:
        return self.group.rollouts[self.at]


class Rollouts(Listing[RolloutRow]):
    """One line per completion; the first of a group has its question and rewards."""

    BINDINGS: ClassVar[list[BindingType]] = [
        hidden("enter", "choose", "Open", "Rollouts: open the completion under the cursor"),
        hidden("m", "mark", "Mark", "Rollouts: mark this completion as the one to compare with"),
        hidden(
            "equals_sign,D",
            "diff",
            "Compare",
            "Rollouts: show what changed since the mark, "
            "or since the same prompt in an earlier step",
        ),
        hidden("v", "only", "Which", "Rollouts: all, those worse than their group, flat groups"),
        hidden("S", "order", "Sort", "Rollouts: sort by step, by reward, by advantage"),
        hidden("o", "one_step", "One step", "Rollouts: only the step under the cursor, or all"),
        hidden(
            "C",
            "colours",
            "Colours",
            "Rollouts: colour tokens by logprob difference, or by weight version",
        ),
        hidden("B", "beside", "Group", "Rollouts: the group's completions side by side"),
        hidden("n", "turn(1)", "Next turn", "Rollouts: next turn, or next match of the search"),
        hidden("N", "turn(-1)", "Turn before", "Rollouts: the turn or match before"),
        hidden("space", "page_text(1)", "Page text", "Rollouts: scroll the completion down"),
        hidden("b", "page_text(-1)", "Page back", "Rollouts: scroll the completion up"),
        hidden("y", "copy", "Copy", "Rollouts: copy prompt and completion"),
        hidden("e", "export", "Export", "Rollouts: write the listed ones as JSONL"),
    ]

    head = 1
    search_hint = "a regular expression, or a step: step:31"
    best = ("order", "one_step", "only", "app.search", "diff")

    Pointed = Pointed

    @dataclass
    class Exported(Message):
        """The user asks for a file of the listed rollouts."""

        records: list[RolloutRecord]

    def __init__(self) -> None:
        super().__init__(id="rollouts")
        self._all: list[RolloutRecord] = []
        self._pattern: Pattern | None = None
        self._mark: RolloutRecord | None = None
        self._comparing = False
        self._only: Only = "all"
        self._order: Order = "newest"
        self._step: int | None = None  # the only step that is shown
        self._is_step_searched = False  # the search line asked for that step
        self._look = Look()
        self._shared = 0  # characters that all questions begin with; not shown
        self._spread = 0  # width in cells of a group's rewards

    def on_mount(self) -> None:
        self._retitle()

    def key_of(self, item: RolloutRow) -> Hashable:
        return item.group.step, item.group.prompt, item.at

    def show(self, view: View) -> None:
        # The list has a limit: when it is full, only its last item shows that it has changed.
        if len(view.state.rollouts) == len(self._all) and (
            not self._all or view.state.rollouts[-1] is self._all[-1]
        ):
            return
        self._all = list(view.state.rollouts)
        self._fill()

    def search(self, pattern: Pattern | None) -> str:
        """Show only matching completions, or one step; return their number in words."""
        asked = A_STEP.fullmatch(pattern.text.strip()) if pattern else None
        if asked or self._is_step_searched:
            self._step = int(asked[1]) if asked else None
        self._is_step_searched = asked is not None
        self._pattern = None if asked else pattern
        self._fill()
        if asked and self._all and not self.items:
            steps = [one.step for one in self._all]
            return f"steps {min(steps)} to {max(steps)} are here"
        return counted(len(self.items), "completion")

    def accept(self) -> None:
        """Go to the first match."""
        self.cursor = 0

    def drop(self) -> bool:
        """Remove search, restriction or comparison; return False if there was none."""
        if self._pattern is not None:
            self.search(None)
        elif self._only != "all":
            self._only = "all"
            self._fill()
        elif self._step is not None:
            self._step, self._is_step_searched = None, False
            self._fill()
        elif self._mark is not None or self._comparing:
            self._mark, self._comparing = None, False
            self._retitle()
            self.point()
            self.refresh()
        else:
            return False
        return True

    def _fill(self) -> None:
        known = [one for one in self._all if self._step in (None, one.step)]
        matching = chosen(groups(known, self._pattern), self._only)
        rows = [RolloutRow(group, at) for group in matching for at in range(len(group.rollouts))]
        rows = in_order(rows, self._order, lambda row: row.rollout)
        self._shared = shared_beginning({question(group.prompt) for group in matching})
        largest = max((len(group.rollouts) for group in matching), default=0)
        self._spread = min(max(largest, len(GROUP)), MOST_SPREAD) if largest > 1 else 0
        self.put(rows)
        self._retitle()

    def _retitle(self) -> None:
        is_part = self._pattern or self._only != "all" or self._step is not None
        note = f"{len(self.items) if is_part else 'newest'} of {len(self._all)}"
        only = {"all": "", "worse": "worse than their group", "flat": "flat groups"}[self._only]
        order = "" if self._order == "newest" else f"{self._order} first"
        step = "" if self._step is None else f"step {self._step}"
        parts = (
            (note if self._all else "no data", "quiet"),
            (f"/ {one_line(self._pattern.text)}" if self._pattern else "", "accent"),
            (step, "accent"),
            (only, "warning"),
            (order, "accent"),
            (f"marked: step {self._mark.step}" if self._mark else "", "accent"),
        )
        self.set_title(title("Rollouts", *parts))

    def action_only(self) -> None:
        self._only = after(self._only, ONLY)
        self._fill()

    def action_order(self) -> None:
        self._order = after(self._order, ORDERS)
        self._fill()

    def action_one_step(self) -> None:
        # The cursor goes to the first row: that of the lowest reward, if sorted by it.
        now = self.current.rollout.step if self.current else None
        self._step = None if self._step is not None else now
        self._is_step_searched = False
        self.cursor = 0
        self._fill()

    def action_colours(self) -> None:
        self._look = replace(self._look, colours=after(self._look.colours, COLOURS), beside=False)
        self.point()

    def action_beside(self) -> None:
        self._look = replace(self._look, beside=not self._look.beside)
        self.point()

    def action_turn(self, by: int) -> None:
        for detail in self.screen.query(RolloutDetail):
            detail.turn(by)

    def action_page_text(self, by: int) -> None:
        for detail in self.screen.query(RolloutDetail):
            detail.page(by)

    def action_export(self) -> None:
        self.post_message(self.Exported([item.rollout for item in self.items]))

    def action_copy(self) -> None:
        if self.current:
            rollout = self.current.rollout
            self.app.copy_to_clipboard(f"{rollout.prompt}{rollout.completion}")
            self.app.notify("copied prompt and completion", timeout=2)

    def on_listing_moved(self) -> None:
        self.point()

    def go_to(self, step: int) -> None:
        """Put the cursor on the first completion of `step`, or before."""
        earlier = (at for at, item in enumerate(self.items) if item.rollout.step <= step)
        self.cursor = next(earlier, self.cursor)

    def point(self) -> None:
        rollout = self.current.rollout if self.current else None
        base, words = None, ""
        if self._comparing and rollout:
            # Without a mark, compare with the same prompt in an earlier step.
            base = self._mark or earlier_twin(rollout, self._all)
            words = f"against step {base.step}" if base else "no earlier step to compare with"
            words += ", another prompt" if base and base.prompt != rollout.prompt else ""
        group = self.current.group.rollouts if self.current else ()
        self.post_message(self.Pointed(rollout, base, words, group, self._pattern, self._look))

    def action_mark(self) -> None:
        # A second press removes the mark.
        now = self.current.rollout if self.current else None
        self._mark = None if now is self._mark else now
        self._retitle()
        self.point()
        self.refresh()

    def action_diff(self) -> None:
        self._comparing = not self._comparing
        self.point()

    def head_line(self) -> Text:
        columns = self._columns(self.scrollable_content_region.width)
        rewards = {"lowest reward": "reward↑", "highest reward": "reward↓"}
        advantages = {"lowest advantage": "adv↑", "highest advantage": "adv↓"}
        reward = rewards.get(self._order, "reward")
        line = f"{'step':>{STEP + REWARD - len(reward) - 1}} {reward}"
        advantage = advantages.get(self._order, "adv")
        for name in columns:
            line += (
                f"{advantage:>{ADVANTAGE}}" if name == "advantage" else f" {GROUP:<{self._spread}}"
            )
        return Text(f"{line}{' ' * GAP}answer ← question", self.style("dim"), no_wrap=True, end="")

    def _columns(self, width: int) -> tuple[str, ...]:
        cells = {"advantage": ADVANTAGE, "spread": 1 + self._spread if self._spread else 0}
        wanted = ("advantage", "spread") if self._order != "newest" else ("spread", "advantage")
        room, found = width - STEP - REWARD - GAP - LEGIBLE, set()
        # In a sorted list, which tears groups apart, the advantage is the column to keep.
        for name in wanted:
            if cells[name] and cells[name] <= room:
                room -= cells[name]
                found.add(name)
        return tuple(name for name in cells if name in found)

    def draw(self, item: RolloutRow, width: int) -> Text:
        record, columns = item.rollout, self._columns(width)
        # Sorted, groups are torn apart, so every row shows its question.
        is_first = item.at == 0 or self._order != "newest"
        tone = "good" if record.advantage > 0 else "bad" if record.advantage < 0 else "dim"
        mark = "◆" if record is self._mark else " "
        line = Text(no_wrap=True, end="")
        line.append(f"{record.step:>5}{mark}" if is_first else f"{mark:>6}", self.style("dim"))
        line.append(f"{number(record.reward, 2):>{REWARD}}", self.style(tone))
        if "advantage" in columns:
            line.append(f"{number(record.advantage, 2):>{ADVANTAGE}}", self.style(tone))
        if "spread" in columns:
            words = spread(item.group.rollouts) if is_first else "↳"
            line.append(f" {words:<{self._spread}.{self._spread}}", self.style("dim"))
        asked = one_line(question(record.prompt)[self._shared :]) if is_first else ""
        room = width - line.cell_len - GAP
        answered = one_line(answer(record.completion))
        beside = f" ← {'…' if self._shared else ''}{asked}" if asked else ""
        # The question gives way to the answer: at most half of the space, none on narrow screens.
        if len(answered) + len(beside) > room:
            if room < ASKED:
                beside = ""
            elif len(beside) > room // 2:
                beside = f"{beside[: room // 2 - 1]}…"
        line.append(" " * GAP).append(self._fitted(answered, room - len(beside)))
        line.append(beside, self.style("dim"))
        # Search the line as drawn, so that the highlight fits the cut text.
        for start, end in self._pattern.spans(line.plain) if self._pattern else ():
            line.stylize(self.style("found"), start, end)
        return line

    def _fitted(self, text: str, room: int) -> str:
        # Both ends, or the surroundings of the first match.
        if len(text) <= room:
            return text
        spans = self._pattern.spans(text) if self._pattern else iter(())
        hit = next((start for start, _ in spans), None)
        if hit is None and room >= BOTH_ENDS:
            end = room // 2
            return f"{text[: room - end - 1]}…{text[-end:]}"
        # The match would be cut off: start shortly before it.
        if hit is not None and hit > room - 8:
            text = f"…{text[max(hit - room // 3, 0) :]}"
        return cut(text, room)
