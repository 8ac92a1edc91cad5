"""One line per command that is under way: what was asked, how long ago, and where its components stand."""

from __future__ import annotations

from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from atropos_common.control import Recipe
from atropos_common.records import CommandRecord
from atropos_tui.monitor.plain import duration, one_line
from atropos_tui.ui.look import TONES, state_text
from atropos_tui.ui.view import View


class CommandBar(Widget):
    """Hidden while nothing is under way."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"command--{tone}" for tone in TONES}

    view: reactive[View | None] = reactive(None)

    def __init__(self) -> None:
        super().__init__(id="commands")
        self._recipes: dict[str, Recipe] = {}
        self._since: dict[str, float] = {}
        self._lines = 0

    def note(self, command_id: str, recipe: Recipe) -> None:
        """Remember what a command of this screen touches."""
        self._recipes[command_id] = recipe

    def show(self, view: View) -> None:
        for command in self._open(view):
            self._since.setdefault(command.command_id, command.time)
        count = len(self._open(view))
        if count != self._lines:
            self._lines, self.display = count, count > 0
            self.refresh(layout=True)
        if count:
            self.view = view

    def render(self) -> RenderResult:
        if self.view is None:
            return Text("")
        return Text("\n").join(self._line(self.view, command) for command in self._open(self.view))

    def _open(self, view: View) -> list[CommandRecord]:
        """What the present supervisor was told; one that is dead left its own open for ever."""
        since = view.status.started_at or 0.0 if view.status else 0.0
        return [] if view.gone else [command for command in view.state.open_commands() if command.time >= since]

    def _style(self, tone: str) -> Style:
        return self.get_component_rich_style(f"command--{tone}", partial=True)

    def _line(self, view: View, command: CommandRecord) -> Text:
        by = "" if command.initiator == "user" else f" (asked by the {command.initiator})"
        line = Text(f"◔ {command.action} {command.component or 'the stack'}{by}", self._style("busy"), no_wrap=True)
        line.append(f"  {duration(view.now - self._since[command.command_id])}", self._style("dim"))
        recipe = self._recipes.get(command.command_id)
        rows = {row.name: row for row in view.status.components} if view.status else {}
        names = dict.fromkeys([*recipe.stop, *recipe.start]) if recipe else [command.component]
        for name in names:
            if name in rows:
                words, tone = state_text(rows[name].state)
                line.append(f"   {name} ", self._style("dim")).append(words, self._style(tone))
        if command.detail:
            line.append(f"   {one_line(command.detail)}", self._style("dim"))
        return line
