"""Rollouts by group, newest first, searched, and one against another. Their text is data: shown, never obeyed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widgets import Static

from atropos_common.records import RolloutRecord
from atropos_tui.monitor.format import number, one_line, plain_lines
from atropos_tui.monitor.patterns import Pattern
from atropos_tui.monitor.rollout_groups import Group, diff, earlier_twin, groups
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.listing import Listing
from atropos_tui.ui.widgets.panel import View, inks


@dataclass(frozen=True)
class RolloutRow:
    """One completion; the first of its group also speaks for the group."""

    group: Group
    at: int

    @property
    def rollout(self) -> RolloutRecord:
        return self.group.rollouts[self.at]


class Rollouts(Listing[RolloutRow]):
    """One line per completion; a group's prompt stands in its first line only."""

    INK = "rollouts"
    COMPONENT_CLASSES: ClassVar[set[str]] = inks(INK, "quiet", "good", "bad", "prompt", "found")
    DEFAULT_CSS = """
    Rollouts {
        .rollouts--quiet { color: $quiet; }
        .rollouts--good { color: $success; }
        .rollouts--bad { color: $error; }
        .rollouts--prompt { color: $quiet; }
        .rollouts--found { background: $warning 40%; text-style: bold underline; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "Open", show=False, tooltip="Rollouts: open the completion under the cursor"),
        Binding("m", "mark", "Mark", show=False, tooltip="Rollouts: mark this completion as the one to compare with"),
        Binding("equals_sign,D", "diff", "Compare", show=False, tooltip="Rollouts: show what changed since the mark, "
                "or since the same prompt in an earlier step"),
    ]  # fmt: skip

    head = 1

    @dataclass(eq=False)
    class Pointed(Message):
        """Another completion is to be shown in full, perhaps against `base`."""

        rollout: RolloutRecord | None
        base: RolloutRecord | None
        words: str

    def __init__(self) -> None:
        super().__init__(id="rollouts")
        self._all: list[RolloutRecord] = []
        self._pattern: Pattern | None = None
        self._mark: RolloutRecord | None = None
        self._comparing = False

    def on_mount(self) -> None:
        self._retitle()

    def key_of(self, item: RolloutRow) -> Hashable:
        return item.group.step, item.group.prompt, item.at

    def show(self, view: View) -> None:
        if len(view.state.rollouts) == len(self._all) and (not self._all or view.state.rollouts[-1] is self._all[-1]):
            return
        self._all = list(view.state.rollouts)
        self._fill()

    def search(self, pattern: Pattern | None) -> str:
        """Show only groups and completions that match; how many do."""
        self._pattern = pattern
        self._fill()
        return f"{len(self.items)} completions"

    def _fill(self) -> None:
        matching = groups(self._all, self._pattern)
        self.put([RolloutRow(group, at) for group in matching for at in range(len(group.rollouts))])
        self._retitle()

    def _retitle(self) -> None:
        note = f"{len(self.items)} of {len(self._all)}" if self._pattern else f"newest of {len(self._all)}"
        parts = [(note if self._all else "no data", "quiet")]
        if self._mark:
            parts.append((f"marked: step {self._mark.step}", "accent"))
        self.border_title = title("Rollouts", *parts)

    def on_listing_moved(self) -> None:
        self.point()

    def go_to(self, step: int) -> None:
        """Put the cursor on the first completion of `step`, or of the newest step before it that has any."""
        self.cursor = next((at for at, item in enumerate(self.items) if item.rollout.step <= step), self.cursor)

    def point(self) -> None:
        """Say which completion is to be shown in full."""
        rollout = self.current.rollout if self.current else None
        base, words = None, ""
        if self._comparing and rollout:
            base = self._mark or earlier_twin(rollout, self._all)
            words = f"against step {base.step}" if base else "no earlier step to compare with"
        self.post_message(self.Pointed(rollout, base, words))

    def action_mark(self) -> None:
        now = self.current.rollout if self.current else None
        self._mark = None if now is self._mark else now
        self._retitle()
        self.point()
        self.refresh()

    def action_diff(self) -> None:
        self._comparing = not self._comparing
        self.point()

    def head_line(self) -> Text:
        return Text(
            f"{'step':>5} {'reward':>7} {'adv':>6}  prompt → completion", self.ink("quiet"), no_wrap=True, end=""
        )

    def draw(self, item: RolloutRow, width: int) -> Text:
        record = item.rollout
        tone = "good" if record.advantage > 0 else "bad" if record.advantage < 0 else "quiet"
        mark = "◆" if record is self._mark else " "
        line = Text(no_wrap=True, end="")
        line.append(f"{record.step:>5}{mark}" if item.at == 0 else f"{mark:>6}", self.ink("quiet"))
        line.append(f"{number(record.reward, 2):>7} {number(record.advantage, 2):>6}  ", self.ink(tone))
        line.append(one_line(record.prompt) if item.at == 0 else "↳", self.ink("prompt"))
        line.append(" → ", self.ink("quiet")).append(one_line(record.completion))
        for start, end in self._pattern.spans(line.plain) if self._pattern else ():
            line.stylize(self.ink("found"), start, end)
        return line


class RolloutDetail(VerticalScroll):
    """One completion in full, or what changed between two: told by the list, not by a `View`."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"detail--label", "detail--gone", "detail--new"}
    DEFAULT_CLASSES = "panel"
    DEFAULT_CSS = """
    RolloutDetail {
        width: 1fr;
        height: 1fr;

        .detail--label { color: $quiet; }
        .detail--gone { color: $error; text-style: strike; }
        .detail--new { color: $success; text-style: underline; }
    }
    """

    def __init__(self) -> None:
        super().__init__(id="rollout-detail")

    def compose(self) -> ComposeResult:
        yield Static(id="rollout-text")

    def on_mount(self) -> None:
        self.border_title = title("Rollout")

    def tell(self, message: Rollouts.Pointed) -> None:
        """Show what the list points at."""
        rollout = message.rollout
        about = f"step {rollout.step} · {one_line(rollout.env)}" if rollout else "no data"
        self.border_title = title("Rollout", (about, "quiet"), (message.words, "accent"))
        self.query_one("#rollout-text", Static).update(self._text(rollout, message.base) if rollout else "")

    def _text(self, rollout: RolloutRecord, base: RolloutRecord | None) -> Text:
        label = self.get_component_rich_style("detail--label", partial=True)
        text = Text()
        figures = [
            ("reward", number(rollout.reward, 2)),
            ("advantage", number(rollout.advantage, 2)),
            ("policy lag", number(rollout.policy_lag, 1)),
        ]
        for name, value in figures:
            text.append(f"{name} ", label).append(f"{value}   ")
        for name in ("prompt", "completion"):
            text.append(f"\n\n{name}\n", label)
            new = plain_lines(getattr(rollout, name))
            text.append_text(self._changes(plain_lines(getattr(base, name)), new) if base else Text(new))
        return text

    def _changes(self, old: str, new: str) -> Text:
        """What went is struck out, what came is underlined: to be read without colours, too."""
        styles: dict[str, Style | str] = {
            "same": "",
            "gone": self.get_component_rich_style("detail--gone", partial=True),
            "new": self.get_component_rich_style("detail--new", partial=True),
        }
        return Text.assemble(*((words, styles[change]) for change, words in diff(old, new)))
