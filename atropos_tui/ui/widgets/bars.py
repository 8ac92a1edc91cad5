"""Single lines: search bar, pending commands, folded components, list of views."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.text import Text
from textual import events
from textual.app import ComposeResult, RenderResult
from textual.containers import Horizontal
from textual.widgets import Input, Label

from atropos_common.protocol.control import Recipe
from atropos_common.protocol.records import CommandRecord
from atropos_tui.monitor.format import duration, one_line
from atropos_tui.monitor.patterns import Pattern, PatternError, compiled
from atropos_tui.monitor.why import open_diagnoses
from atropos_tui.ui.theme import state_text
from atropos_tui.ui.widgets.panel import TextPanel, View, hidden

# Applies a pattern, or None; returns how much matches, in words.
Apply = Callable[[Pattern | None], str]
# Note for patterns with a syntax error, for example a lone bracket.
PLAIN = "not a regular expression, searched as plain text"
HINT = "a regular expression; capitals make it case-sensitive"

RUNS = "runs"  # entry of the line of views that leads to the list of runs


class SearchBar(Horizontal):
    """Line of a search or filter: Enter keeps it, Esc drops it."""

    DEFAULT_CSS = """
    SearchBar {
        display: none;
        height: 1;
        background: $panel;
        padding: 0 1;

        #search-what { color: $primary; text-style: bold; width: 2; }
        Input { border: none; height: 1; padding: 0; width: 1fr; background: $panel; }
        Input:focus { border: none; }
        #search-found { color: $quiet; width: auto; padding: 0 1; }
    }
    """

    BINDINGS = [hidden("escape", "drop", "Drop the search")]  # noqa: RUF012
    best = ("drop",)

    def __init__(self) -> None:
        super().__init__(id="search")
        self._apply: Apply | None = None
        self._done: Callable[[], object] = lambda: None
        self._accept: Callable[[], object] = lambda: None

    def compose(self) -> ComposeResult:
        yield Label("/", id="search-what")
        yield Input(id="search-text")
        yield Label("", id="search-found", markup=False)

    def ask(
        self,
        what: str,
        apply: Apply,
        done: Callable[[], object],
        accept: Callable[[], object],
        hint: str = HINT,
    ) -> None:
        """Open the line.

        Args:
            apply: called at every change.
            done: returns the focus at the end.
            accept: called after Enter.
            hint: shown while the line is empty.
        """
        self._apply, self._done, self._accept = apply, done, accept
        self.query_one("#search-what", Label).update(what)
        self.query_one("#search-found", Label).update("")
        field = self.query_one(Input)
        field.value, field.placeholder = "", hint
        self.display = True
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self._apply is not None and self.display:
            self.query_one("#search-found", Label).update(self._applied(self._apply, event.value))

    @staticmethod
    def _applied(apply: Apply, text: str) -> str:
        try:
            pattern = compiled(text) if text else None
        except PatternError as error:
            # Remove the last valid pattern, or it would stay active beside the error.
            apply(None)
            return str(error)
        result = apply(pattern)
        if pattern is None:
            return ""
        return f"{PLAIN}: {result}" if pattern.is_literal else result

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._close()
        if event.value:
            self._accept()

    def action_drop(self) -> None:
        if self._apply is not None:
            self._apply(None)
        self._close()

    def _close(self) -> None:
        self._apply, self.display = None, False
        self._done()


class CommandBar(TextPanel):
    """One line per pending command: action, age, state of its components."""

    DEFAULT_CLASSES = ""
    DEFAULT_CSS = """
    CommandBar {
        height: auto;
        max-height: 3;
        padding: 0 1;
        background: $panel;
        display: none;
    }
    """
    hides_itself = True

    def __init__(self) -> None:
        super().__init__(id="commands")
        self._recipes: dict[str, Recipe] = {}
        # Unix seconds of each command.
        self._since: dict[str, float] = {}
        self._count = 0

    def note(self, command_id: str, recipe: Recipe) -> None:
        """Remember the recipe of a command that this screen sent."""
        self._recipes[command_id] = recipe

    def show(self, view: View) -> None:
        count = len(self._open(view))
        if count != self._count:
            self._count, self.display = count, count > 0
            self.refresh(layout=True)
        if count:
            self.view = view

    def render(self) -> RenderResult:
        view = self.view
        lines = [self._line(view, command) for command in self._open(view)] if view else []
        return Text("\n").join(lines)

    def _open(self, view: View) -> list[CommandRecord]:
        # A supervisor that died left its pending commands in the records forever: show only those
        # of the current one.
        since = (view.status.started_at if view.status else None) or 0.0
        commands = [
            one for one in view.state.open_commands() if one.time >= since and not view.gone
        ]
        # Here, because `view.state` grows: a repaint may be the first to see a command.
        for command in commands:
            self._since.setdefault(command.command_id, command.time)
        return commands

    def _line(self, view: View, command: CommandRecord) -> Text:
        by = "" if command.initiator == "user" else f" (by the {command.initiator})"
        words = f"◔ {command.action} {command.component or 'the stack'}{by}"
        line = Text(words, self.style("busy"), no_wrap=True)
        line.append(f"  {duration(view.now - self._since[command.command_id])}", self.style("dim"))
        recipe = self._recipes.get(command.command_id)
        rows = {row.name: row for row in view.status.components} if view.status else {}
        # The recipe is known only for commands of this screen.
        names = dict.fromkeys([*recipe.stop, *recipe.start]) if recipe else [command.component]
        for name in names:
            if name in rows:
                words, tone = state_text(rows[name].state)
                line.append(f"   {name} ", self.style("dim")).append(words, self.style(tone))
        if command.detail:
            line.append(f"   {one_line(command.detail)}", self.style("dim"))
        return line


class FoldedComponents(TextPanel):
    """One line instead of the table of components: the state of each."""

    DEFAULT_CLASSES = ""
    DEFAULT_CSS = """
    FoldedComponents { height: 1; padding: 0 1; display: none; }
    """

    def __init__(self) -> None:
        super().__init__(id="folded")

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        line = Text(no_wrap=True, end="")
        for row in view.rows:
            words, tone = state_text(row.state)
            is_here = row.name == view.selected
            line.append("  " if line else "").append(words.split()[0], self.style(tone))
            line.append(f" {one_line(row.name)}", self.style("title" if is_here else "dim"))
        return [line]

    async def on_click(self) -> None:
        await self.app.run_action("fold")


class ViewsLine(TextPanel):
    """Every view with its number key; a click opens a view."""

    DEFAULT_CLASSES = ""
    SCOPED_CSS = False
    DEFAULT_CSS = """
    ViewsLine {
        height: 1;
        padding: 0 1;
        color: $foreground;
    }
    .-narrow ViewsLine, .-tiny ViewsLine { padding: 0; }
    """

    def __init__(self, titles: Mapping[str, tuple[str, str]]) -> None:
        """Args: `titles`: long and short title by view."""
        super().__init__(id="views")
        self._titles = titles
        self._here = next(iter(titles))
        # Cell behind each title, as last drawn.
        self._ends: dict[str, int] = {}

    def highlight(self, name: str) -> None:
        self._here = name
        self.refresh()

    async def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        # Titles are drawn left to right, so the first end beyond the click is the one.
        name = next((name for name, end in self._ends.items() if at is not None and at.x < end), "")
        if name:
            await self.app.run_action("home" if name == RUNS else f"view({name!r})")

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        open_ones = len(open_diagnoses(view.state, view.status)) if view.status else 0
        long = {name: titles[0] for name, titles in self._titles.items()}
        short = {name: titles[1] for name, titles in self._titles.items()}
        line = self._line(long, "  ", open_ones)
        if line.cell_len > width:
            line = self._line(short, " ", open_ones)
        if line.cell_len > width:
            # Every key stays; only the open view keeps its title.
            line = self._line({self._here: short.get(self._here, "")}, " ", open_ones)
        return [line]

    def _line(self, titles: Mapping[str, str], gap: str, open_ones: int) -> Text:
        line = Text(no_wrap=True, end="")
        self._ends.clear()
        has_list = self.app.check_action("home", ())
        for key, name in enumerate((RUNS, *self._titles)):
            if name == RUNS and not has_list:
                continue
            is_here = name == self._here
            line.append(gap if line else "").append(
                str(key), self.style("here" if is_here else "busy")
            )
            if words := RUNS.capitalize() if name == RUNS else titles.get(name):
                line.append(f" {words}", self.style("here" if is_here else "dim"))
            if name == "events" and open_ones:
                line.append(f" ▲{open_ones}", self.style("warn"))
            self._ends[name] = line.cell_len + len(gap)
        return line
