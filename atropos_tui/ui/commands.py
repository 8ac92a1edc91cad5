"""Commands from the screen: ask with the blast radius, send, say what became of it; and how the screen is left.

`palette` is what Ctrl+P offers: every action, made from the bindings, and each component's actions by name; `explained`
is the help, made from them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from rich.cells import cell_len
from rich.segment import Segment
from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.color import Color
from textual.dom import DOMNode
from textual.filter import LineFilter
from textual.screen import Screen
from textual.widget import Widget

from atropos_common.control import Action, CommandRequest, ComponentStatus
from atropos_common.records import CommandRecord
from atropos_tui.gate import harmless
from atropos_tui.monitor.format import one_line
from atropos_tui.supervisor.client import Refused
from atropos_tui.ui import faults
from atropos_tui.ui.dialogs import ConfirmDialog, QuitDialog
from atropos_tui.ui.feed import Feed
from atropos_tui.ui.widgets.bars import CommandBar
from atropos_tui.ui.widgets.components import Components

Outcome = Literal["detach", "stop", "ended", "failed"]
"""How the screen was left: the run goes on, was stopped from here, or was over."""

Kind = TypeVar("Kind", bound=Widget)


class OnlyPlainText(LineFilter):
    """Drop whatever a terminal would obey from the text of every line that any widget draws."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if all(text.isprintable() for text, _, _ in segments):
            return segments
        return [segment if segment.control else _plain_segment(segment) for segment in segments]


def _plain_segment(segment: Segment) -> Segment:
    text = harmless(segment.text).replace("\n", " ").replace("\t", " ")
    return Segment(text + " " * (cell_len(segment.text) - cell_len(text)), segment.style)


class CommandApp(App[Outcome]):
    """An app over one run whose keys act on the component under the cursor."""

    feed: Feed

    def __init__(self) -> None:
        super().__init__()
        self._only_plain_text = OnlyPlainText()
        self.is_over = False
        """The run has ended, or nobody owns it any more."""
        self.gone = ""
        """Why no supervisor answers; empty while one does."""
        self.user_selects = False
        """The cursor is where the user put it."""
        self.read_only = False
        """No command is sent from here."""
        self.is_leaving = False
        """The run was told to stop from here, and its end is waited for."""
        self._seen_commands: set[str] = set()
        self._is_asking = self._asks_to_leave = False
        """A question, or what comes before and after it, is under way: impatient keys ask no second one."""

    def _fatal_error(self) -> None:
        """End after an unhandled error. Textual's own method prints a traceback with all local variables: for a long
        run that takes minutes, in which no key works."""
        faults.record(self._exception or RuntimeError("unknown"), "the screen")
        self._close_messages_no_wait()

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), self._only_plain_text]

    @property
    def main(self) -> Screen[object] | None:
        """The screen below any dialog; None while the app comes up or goes down, when messages may still arrive."""
        return self.screen_stack[0] if self.is_running and self._screen_stack else None

    def find(self, kind: type[Kind]) -> Kind | None:
        """The panel of this kind, whatever dialog is above it."""
        return next(iter(self.main.query(kind)), None) if self.main else None

    def tell_command(self, record: CommandRecord, *, silently: bool = False) -> None:
        """Say how a command ended, once, whoever gave it; `silently`: it is history, also if it comes again."""
        if record.status in ("done", "failed") and record.command_id not in self._seen_commands:
            self._seen_commands.add(record.command_id)
            if silently:
                return
            words = f"{record.action} {record.component or 'the stack'}: {record.status}"
            detail = f" · {one_line(record.detail)}" if record.detail else ""
            self.notify(words + detail, severity="error" if record.status == "failed" else "information", markup=False)

    # Acting.

    @property
    def can_act(self) -> bool:
        """Whether there is a run that takes commands from here."""
        return not (self.is_over or self.read_only)

    def idle_actions(self) -> tuple[str, ...]:
        """Actions that only say why they do nothing."""
        return () if self.can_act else ACTS if not self.is_over else (*ACTS, "detach")

    def action_act(self, action: Action) -> None:
        table = self.find(Components)
        row = table.selected if table else None
        if row is None:
            self.refuse("no component is selected", "")
            return
        self.act(action, row.name)

    def act(self, action: Action, component: str | None) -> None:
        """Ask for `action` on a component, or on the whole stack, unless something is being asked."""
        if self.read_only:
            self.refuse("this screen only shows", "atropos-tui attach without --read-only can act")
        elif self.is_over:
            self.refuse("this run has ended", "atropos-tui up starts another; up --resume continues this one")
        elif not (self._is_asking or self._asks_to_leave):
            self.user_selects = self._is_asking = True
            self.run_worker(self._act(action, component), group="commands")

    async def _act(self, action: Action, component: str | None) -> None:
        try:
            await self._ask_and_send(action, component)
        finally:
            self._is_asking = False

    def action_restart_all(self) -> None:
        self.act("restart", None)

    def action_stop_or_start(self) -> None:
        table = self.find(Components)
        rests = table and table.selected and table.selected.state.is_resting
        self.action_act("start" if rests else "stop")

    async def _ask_and_send(self, action: Action, component: str | None, *, ask: bool = True) -> bool:
        """Show the blast radius, then send. Whether the command was accepted."""
        try:
            recipe = await self.feed.recipe(action, component)
            if ask and action != "start" and not await self.push_screen_wait(ConfirmDialog(recipe)):
                return False
            accepted = await self.feed.send(CommandRequest(action=action, component=component))
        except Refused as refusal:
            self.refuse(refusal.error, refusal.fix, f"{action} {component or 'the stack'} refused")
            return False
        if bar := self.find(CommandBar):
            bar.note(accepted.command_id, accepted.recipe)
        self.notify(f"{action} {component or 'the stack'}: accepted", timeout=2, markup=False)
        return True

    def refuse(self, error: str, fix: str, heading: str = "refused") -> None:
        """Say why nothing is done; the same words are not repeated while they are still on the screen."""
        words = one_line(error) + (f"\n{one_line(fix)}" if fix else "")
        if all((note.title, note.message) != (heading, words) for note in self._notifications):
            self.notify(words, title=heading, severity="warning", timeout=8, markup=False)

    # Leaving.

    def action_detach(self) -> None:
        self.exit("ended" if self.is_over else "detach")

    def action_ask_quit(self) -> None:
        """Over: leave. Running: ask. Asked again while the run stops: leave without waiting."""
        if self.read_only:
            self.action_detach()
        elif self.is_over or self.is_leaving:
            self.exit("ended" if self.is_over and not self.is_leaving else "stop")
        elif not self._asks_to_leave:
            self._asks_to_leave = True
            self.run_worker(self._ask_quit(), group="commands")

    def action_interrupt(self) -> None:
        """Ask as `q` does; pressed again at the question, detach: that never ends the run."""
        if self._asks_to_leave:
            self.exit("detach")
        else:
            self.action_ask_quit()

    async def _ask_quit(self) -> None:
        try:
            choice = await self.push_screen_wait(QuitDialog())
        finally:
            self._asks_to_leave = False
        if choice == "detach":
            self.exit("detach")
        elif choice == "stop" and await self._ask_and_send("down", None, ask=False):
            self.is_leaving = True
            self.notify("stopping the run; q leaves without waiting", timeout=10, markup=False)


ACTS = ("act('restart')", "stop_or_start", "act('kill')")
"""Of keys in the footer, those that change the run."""
_NAMED = {"left_square_bracket": "left bracket", "right_square_bracket": "right bracket"}
"""Keys whose own sign would be read as markup."""

Act = Callable[[Action, str], object]


def palette(
    app: App[Any], panels: Iterable[DOMNode], rows: Iterable[ComponentStatus], act: Act
) -> Iterator[SystemCommand]:
    """Commands for the palette.

    Args:
        panels: whose keys work when they have the focus.
        act: asks for an action on a component.
    """
    for owner in (app, *panels):
        for binding in _bindings(owner):
            if binding.tooltip and not binding.system:
                key = _NAMED.get(binding.key) or app.get_key_display(binding)
                yield SystemCommand(
                    binding.description,
                    f"{binding.tooltip} · key {key}",
                    partial(app.run_action, binding.action, owner),
                )
    for row in rows:
        for action in _possible(row):
            yield SystemCommand(
                f"{action.capitalize()} {row.name}", f"{row.name} is {row.state}", partial(act, action, row.name)
            )


def _bindings(owner: DOMNode) -> list[Binding]:
    """One for each action, its first key; a class's own stand before, and instead of, those it inherits."""
    by_key: dict[str, Binding] = {}
    for kind in type(owner).__mro__:
        for binding in Binding.make_bindings(vars(kind).get("BINDINGS", ())):
            by_key.setdefault(binding.key, binding)
    by_action: dict[str, Binding] = {}
    for binding in by_key.values():
        by_action.setdefault(binding.action, binding)
    return list(by_action.values())


def _possible(row: ComponentStatus) -> tuple[Action, ...]:
    if row.state.is_resting:
        return ("start",)
    return ("restart", "stop", "kill") if row.state.has_process else ("restart", "stop")


def explained(app: App[Any], widgets: Iterable[Widget]) -> dict[str, dict[str, str]]:
    """Keys by what they act on, each with what it does: of the panel that has them, everywhere, then of other panels.

    Args:
        widgets: those on the screen.
    """
    sections: dict[str, dict[str, str]] = {}

    def explain(binding: Binding) -> None:
        """Put a key where it belongs: a tooltip begins with the panel that it is of, unless it is of all."""
        if binding.system or not binding.tooltip:
            return
        panel, colon, words = binding.tooltip.partition(": ")
        if binding.action.startswith("view("):
            panel, words = "Views", f"{binding.description}: {binding.tooltip}"
        elif not colon or panel == "Refused":
            panel, words = "Everywhere", binding.tooltip
        sections.setdefault(panel, {}).setdefault(app.get_key_display(binding), words)

    for active in app.screen.active_bindings.values():
        explain(active.binding)
    for everywhere in ("Everywhere", "Views"):
        sections[everywhere] = sections.pop(everywhere, {})
    here = set(sections)
    for widget in widgets:
        for binding in Binding.make_bindings(type(widget).BINDINGS):
            if binding.tooltip.partition(": ")[0] not in here:
                explain(binding)
    away = " (tab or a click leads there)"
    return {name if name in here else f"{name}{away}": keys for name, keys in sections.items() if keys}
