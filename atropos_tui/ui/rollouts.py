"""The newest rollouts: reward, advantage, prompt and completion. Their text is data: shown, never obeyed."""

from __future__ import annotations

from itertools import islice
from typing import ClassVar

from rich.text import Text
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from atropos_tui.monitor.plain import number, one_line
from atropos_tui.ui.look import title
from atropos_tui.ui.view import View
from trainer_core.contracts.records import RolloutRecord


class Rollouts(Widget):
    """One line per completion, newest first."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"rollouts--quiet", "rollouts--good", "rollouts--bad", "rollouts--prompt"}

    view: reactive[View | None] = reactive(None)

    def show(self, view: View) -> None:
        self.view = view
        count = len(view.state.rollouts)
        self.border_title = title("Rollouts", (f"newest of {count}" if count else "no data", "secondary"))

    def render(self) -> RenderResult:
        if self.view is None or not self.view.state.rollouts:
            return Text("")
        width, height = self.content_size
        quiet = self.get_component_rich_style("rollouts--quiet", partial=True)
        lines = [Text(f"{'step':>5} {'reward':>7} {'adv':>6}  prompt → completion", quiet, no_wrap=True, end="")]
        newest = islice(reversed(self.view.state.rollouts), max(0, height - 1))
        lines += [self._line(record) for record in newest]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Text("\n", end="").join(lines)

    def _line(self, record: RolloutRecord) -> Text:
        style = self.get_component_rich_style
        tone = "good" if record.advantage > 0 else "bad" if record.advantage < 0 else "quiet"
        line = Text(no_wrap=True, end="")
        line.append(f"{record.step:>5} ", style("rollouts--quiet", partial=True))
        line.append(
            f"{number(record.reward, 2):>7} {number(record.advantage, 2):>6}  ",
            style(f"rollouts--{tone}", partial=True),
        )
        line.append(one_line(record.prompt), style("rollouts--prompt", partial=True))
        return line.append(" → ", style("rollouts--quiet", partial=True)).append(one_line(record.completion))
