"""Rollouts by group, newest first, with search and comparison. Their text is untrusted."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widgets import Static

from atropos_common.protocol.trainer_records import RolloutRecord
from atropos_tui.monitor.format import counted, number, one_line, plain_lines
from atropos_tui.monitor.patterns import Pattern
from atropos_tui.monitor.rollout_groups import (
    ONLY,
    ORDERS,
    Only,
    Order,
    RolloutGroup,
    answer,
    chosen,
    diff,
    earlier_twin,
    groups,
    known_rewards,
    question,
    shared_beginning,
)
from atropos_tui.ui.plot import sparkline
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.panel import Guarded, Listing, View, after, hidden

MOST_SPREAD = 16  # rewards of a group that are shown
STEP, REWARD, ADVANTAGE, GAP = 6, 6, 7, 2
LEGIBLE = 30  # cells that the answer keeps when advantage and rewards get columns
ASKED = 40  # cells from which the question is shown beside a long answer
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
        hidden("S", "order", "Order", "Rollouts: newest first, worst advantage first, best first"),
        hidden("y", "copy", "Copy", "Rollouts: copy prompt and completion"),
    ]

    head = 1
    best = ("app.search", "only", "order", "diff", "app.zoom")

    @dataclass(eq=False)
    class Pointed(Message):
        """Show another completion, compared with `base` if there is one."""

        rollout: RolloutRecord | None
        base: RolloutRecord | None
        words: str
        group: tuple[RolloutRecord, ...] = ()
        pattern: Pattern | None = None

    def __init__(self) -> None:
        super().__init__(id="rollouts")
        self._all: list[RolloutRecord] = []
        self._pattern: Pattern | None = None
        self._mark: RolloutRecord | None = None
        self._comparing = False
        self._only: Only = "all"
        self._order: Order = "newest"
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
        """Show only matching completions; return their number in words."""
        self._pattern = pattern
        self._fill()
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
        elif self._mark is not None or self._comparing:
            self._mark, self._comparing = None, False
            self._retitle()
            self.point()
            self.refresh()
        else:
            return False
        return True

    def _fill(self) -> None:
        matching = chosen(groups(self._all, self._pattern), self._only)
        rows = [RolloutRow(group, at) for group in matching for at in range(len(group.rollouts))]
        if self._order != "newest":
            rows.sort(key=lambda row: row.rollout.advantage, reverse=self._order == "best")
        self._shared = shared_beginning({question(group.prompt) for group in matching})
        self._spread = min(max((len(group.rollouts) for group in matching), default=0), MOST_SPREAD)
        self.put(rows)
        self._retitle()

    def _retitle(self) -> None:
        is_part = self._pattern or self._only != "all"
        note = f"{len(self.items) if is_part else 'newest'} of {len(self._all)}"
        only = {"all": "", "worse": "worse than their group", "flat": "flat groups"}[self._only]
        order = "" if self._order == "newest" else f"{self._order} advantage first"
        parts = (
            (note if self._all else "no data", "quiet"),
            (f"/ {one_line(self._pattern.text)}" if self._pattern else "", "accent"),
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
        self.post_message(self.Pointed(rollout, base, words, group, self._pattern))

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
        line = f"{'step':>{STEP - 1}}{'reward':>{REWARD + 1}}"
        for name in columns:
            title_ = "rewards" if self._spread > 6 else ""
            line += f"{'adv':>{ADVANTAGE}}" if name == "advantage" else f" {title_:<{self._spread}}"
        return Text(f"{line}{' ' * GAP}answer ← question", self.style("dim"), no_wrap=True, end="")

    def _columns(self, width: int) -> tuple[str, ...]:
        cells = {"advantage": ADVANTAGE, "spread": 1 + self._spread if self._spread > 1 else 0}
        wanted = ("advantage", "spread") if self._order != "newest" else ("spread", "advantage")
        room, found = width - STEP - REWARD - GAP - LEGIBLE, set()
        # Sorted by advantage, the advantage is the column to keep.
        for name in wanted:
            if cells[name] and cells[name] <= room:
                room -= cells[name]
                found.add(name)
        return tuple(name for name in cells if name in found)

    def draw(self, item: RolloutRow, width: int) -> Text:
        record, columns = item.rollout, self._columns(width)
        # Sorted by advantage, groups are torn apart, so every row shows its question.
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
        return text if len(text) <= room else f"{text[: max(room - 1, 0)]}…"


def spread(rollouts: Sequence[RolloutRecord]) -> str:
    """Return the rewards of a group as a sparkline, one cell each."""
    rewards = [one.reward for one in rollouts[:MOST_SPREAD]]
    known = known_rewards(rollouts[:MOST_SPREAD])
    # Lowest to highest reward of this group; equal rewards are drawn at half height.
    low, high = min(known, default=0.0), max(known, default=0.0)
    shares = [(reward - low) / (high - low) if high > low else 0.5 for reward in rewards]
    return sparkline(shares, len(rewards))


class RolloutDetail(VerticalScroll, Guarded):
    """One completion in full, or the changes between two."""

    DEFAULT_CLASSES = "panel"
    DEFAULT_CSS = """
    RolloutDetail {
        width: 1fr;
        height: 1fr;
    }
    """

    def __init__(self) -> None:
        super().__init__(id="rollout-detail")

    def compose(self) -> ComposeResult:
        yield Static(id="rollout-text")

    def on_mount(self) -> None:
        self.border_title = title("Rollout")

    def show_rollout(self, message: Rollouts.Pointed) -> None:
        self.recover()
        with self.guard():
            self._show(message)

    def _show(self, message: Rollouts.Pointed) -> None:
        rollout = message.rollout
        about = f"step {rollout.step} · {one_line(rollout.env)}" if rollout else "no data"
        self.border_title = title("Rollout", (about, "quiet"), (message.words, "accent"))
        text = self._text(rollout, message.base, message.group) if rollout else Text()
        for start, end in message.pattern.spans(text.plain) if message.pattern else ():
            text.stylize(self.style("found"), start, end)
        self.query_one("#rollout-text", Static).update(text)

    def _text(
        self, rollout: RolloutRecord, base: RolloutRecord | None, group: Sequence[RolloutRecord]
    ) -> Text:
        label = self.style("dim")
        text = Text()
        figures = [
            ("reward", number(rollout.reward, 2)),
            ("advantage", number(rollout.advantage, 2)),
            ("policy lag", number(rollout.policy_lag, 1)),
            ("tokens", number(rollout.tokens, 0)),
        ]
        if len(group) > 1:
            known = known_rewards(group) or [math.nan]
            # The list may hold only part of the group.
            is_part = (rollout.group_size or 0) > len(group)
            of = f", {len(group)} of {rollout.group_size}" if is_part else ""
            low, high = number(min(known), 2), number(max(known), 2)
            figures.append(("group", f"{low} {spread(group)} {high}{of}"))
        for name, value in figures:
            text.append(f"{name} ", label).append(f"{value}   ")
        for name in ("completion", "prompt"):
            text.append(f"\n\n{name}\n", label)
            new = plain_lines(getattr(rollout, name))
            old = plain_lines(getattr(base, name)) if base else new
            text.append_text(self._changes(old, new) if base else Text(new))
        return text

    def _changes(self, old: str, new: str) -> Text:
        # Brackets as in `wdiff`: the changes stay readable without colours and in copied text.
        around = {"same": ("", ""), "gone": ("[-", "-]"), "new": ("{+", "+}")}
        text = Text()
        for change, words in diff(old, new):
            begin, end = around[change]
            style = "" if change == "same" else self.style(change)
            text.append(f"{begin}{words}{end}", style)
        return text
