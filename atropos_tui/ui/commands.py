"""Commands, the palette (Ctrl+P), the help, and the ways to leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

from textual.app import SystemCommand
from textual.binding import Binding
from textual.dom import DOMNode
from textual.keys import format_key
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.widget import Widget

from atropos_common.protocol.control import Action, CommandRequest, ComponentStatus
from atropos_common.protocol.records import CommandRecord
from atropos_tui.monitor.format import one_line
from atropos_tui.supervisor.client import Refused
from atropos_tui.ui.base import BaseApp
from atropos_tui.ui.dialogs import ConfirmDialog, QuitDialog
from atropos_tui.ui.feed import Feed
from atropos_tui.ui.keymap import KeyFile, bindings_of, remapped
from atropos_tui.ui.widgets.bars import CommandBar
from atropos_tui.ui.widgets.components import Components

# detach: the run goes on; stop: stopped from here; ended: it was over; home: to the list of runs;
# failed: an internal error.
Outcome = Literal["detach", "stop", "ended", "home", "failed"]

Kind = TypeVar("Kind", bound=Widget)


class CommandApp(BaseApp[Outcome]):
    """App for one run; its keys act on the component under the cursor."""

    feed: Feed
    always: ClassVar[tuple[str, ...]] = ("view('settings')", "ask_quit", "help")

    def __init__(self) -> None:
        super().__init__()
        # The run has ended, or its supervisor is gone for good.
        self.is_over = False
        self.gone = ""  # reason why no supervisor answers; empty while one does
        # The user has moved the cursor, so the screen no longer moves it.
        self.user_selects = False
        # Stopping was requested here; the screen closes once the run has ended.
        self.is_leaving = False
        self._seen_commands: set[str] = set()
        # A dialog is open, or its recipe is being fetched: further key presses must not open a
        # second one.
        self._is_asking = self._asks_to_leave = False

    @property
    def main(self) -> Screen[object] | None:
        """Screen below any dialog; None while the app starts or ends."""
        return self.screen_stack[0] if self.is_running and self._screen_stack else None

    def find(self, kind: type[Kind]) -> Kind | None:
        """Return the panel of this kind, even below a dialog."""
        return next(iter(self.main.query(kind)), None) if self.main else None

    def report_command(self, record: CommandRecord, *, silently: bool = False) -> None:
        """Report the end of a command once, whichever client sent it."""
        if record.status in ("done", "failed") and record.command_id not in self._seen_commands:
            # A record may arrive again when the streams are read from the start.
            self._seen_commands.add(record.command_id)
            if silently:
                return
            words = f"{record.action} {record.component or 'the stack'}: {record.status}"
            detail = f" · {one_line(record.detail)}" if record.detail else ""
            severity: SeverityLevel = "error" if record.status == "failed" else "information"
            self.notify(words + detail, severity=severity, markup=False)

    # Acting.

    @property
    def can_act(self) -> bool:
        """True if the run accepts commands from here."""
        return not (self.is_over or self.read_only)

    def idle_actions(self) -> tuple[str, ...]:
        return () if self.can_act else ACTS if not self.is_over else (*ACTS, "detach")

    def action_act(self, action: Action) -> None:
        table = self.find(Components)
        row = table.selected if table else None
        if row is None:
            self.refuse("no component is selected", "")
            return
        self.act(action, row.name)

    def act(self, action: Action, component: str | None) -> None:
        """Ask for confirmation of `action` on a component (None: the whole stack)."""
        if self.read_only:
            self.refuse("this screen is read-only", "attach without --read-only to send commands")
        elif self.is_over:
            fix = "start another with `atropos-tui up`, or continue this one with `up --resume`"
            self.refuse("this run has ended", fix)
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
        is_resting = table and table.selected and table.selected.state.is_resting
        self.action_act("start" if is_resting else "stop")

    async def _ask_and_send(
        self, action: Action, component: str | None, *, ask: bool = True
    ) -> bool:
        # Shows what the command will stop and start; True if it was accepted.
        try:
            recipe = await self.feed.recipe(action, component)
            # A start ends nothing, so it needs no confirmation.
            if ask and action != "start" and not await self.push_screen_wait(ConfirmDialog(recipe)):
                return False
            accepted = await self.feed.send(CommandRequest(action=action, component=component))
        except Refused as refusal:
            self.refuse(refusal.error, refusal.fix, f"{action} {component or 'the stack'} refused")
            return False
        if bar := self.find(CommandBar):
            # The accepted recipe, which may differ from the one that was confirmed.
            bar.note(accepted.command_id, accepted.recipe)
        self.notify(f"{action} {component or 'the stack'}: accepted", timeout=2, markup=False)
        return True

    # Leaving.

    def action_detach(self) -> None:
        self.exit("ended" if self.is_over else "detach")

    def action_home(self) -> None:
        """Leave for the list of runs; the run goes on."""
        self.exit("home")

    def action_ask_quit(self) -> None:
        """Leave if the run is over or stops, otherwise ask."""
        if self.read_only:
            self.action_detach()
        elif self.is_over or self.is_leaving:
            # Still stopping: the exit must read as `stop`, as the user chose.
            self.exit("ended" if self.is_over and not self.is_leaving else "stop")
        elif not self._asks_to_leave:
            self._asks_to_leave = True
            self.run_worker(self._ask_quit(), group="commands")

    def action_interrupt(self) -> None:
        """Ask as `q` does; a second press detaches, which never ends the run."""
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


MOST_TOGETHER = 4  # keys of one action that the help lists one by one
ACTS = ("act('restart')", "stop_or_start", "act('kill')")
# Keys whose own character would be parsed as markup.
_NAMED = {"left_square_bracket": "left bracket", "right_square_bracket": "right bracket"}

Act = Callable[[Action, str], object]


def palette(
    app: BaseApp[Any],
    panels: Iterable[DOMNode],
    rows: Iterable[ComponentStatus] = (),
    act: Act = lambda action, component: None,
) -> Iterator[SystemCommand]:
    """Yield the commands of the palette; `panels` have keys of their own, `act` is for `rows`."""
    for owner in (app, *panels):
        for binding in _by_action(remapped(bindings_of(type(owner)), app.key_file.keys)):
            if binding.tooltip and not binding.system:
                key = _NAMED.get(binding.key) or app.get_key_display(binding)
                run = partial(app.run_action, binding.action, owner)
                yield SystemCommand(binding.description, f"{binding.tooltip} · key {key}", run)
    for command in app.key_file.commands:
        about = f"own command · key {format_key(command.key)}"
        run = partial(app.run_action, f"own({command.name!r})")
        yield SystemCommand(command.description, about, run)
    for row in rows:
        for action in _possible(row):
            name = f"{action.capitalize()} {row.name}"
            yield SystemCommand(name, f"{row.name} is {row.state}", partial(act, action, row.name))


def _by_action(bindings: Iterable[Binding]) -> list[Binding]:
    # One binding for each action, with its first key.
    by_action: dict[str, Binding] = {}
    for binding in bindings:
        by_action.setdefault(binding.action, binding)
    return list(by_action.values())


def _possible(row: ComponentStatus) -> tuple[Action, ...]:
    if row.state.is_resting:
        return ("start",)
    return ("restart", "stop", "kill") if row.state.has_process else ("restart", "stop")


def explained(app: BaseApp[Any], widgets: Iterable[Widget]) -> dict[str, dict[str, str]]:
    """Return key and description by section: focused panel, app, views, other panels."""
    # Keys by section and words; the first binding of a key is the one that works.
    sections: dict[str, dict[str, list[str]]] = {}
    taken: dict[str, set[str]] = {}

    def explain(binding: Binding) -> None:
        if binding.system or not binding.tooltip:
            return
        # A tooltip starts with its panel's name and a colon, except for keys that work everywhere.
        panel, colon, words = binding.tooltip.partition(": ")
        if binding.action.startswith("view("):
            panel, words = "Views", f"{binding.description}: {binding.tooltip}"
        elif not colon or panel == "Refused":
            panel, words = "Everywhere", binding.tooltip
        keys, shown = taken.setdefault(panel, set()), app.get_key_display(binding)
        if shown not in keys:
            keys.add(shown)
            sections.setdefault(panel, {}).setdefault(words, []).append(shown)

    # These come first in the order of the focus chain: panel, screen, app.
    for active in app.screen.active_bindings.values():
        explain(active.binding)
    # Move the general sections behind the focused panel's.
    for everywhere in ("Everywhere", "Views"):
        sections[everywhere] = sections.pop(everywhere, {})
    own = {one.description: [format_key(one.key)] for one in app.key_file.commands}
    sections = {"Own commands": own, **sections, "Key file": problems(app.key_file)}
    here = set(sections)
    for widget in widgets:
        bindings = Binding.make_bindings(type(widget).BINDINGS)
        for binding in remapped(bindings, app.key_file.keys):
            if binding.tooltip.partition(": ")[0] not in here:
                explain(binding)
    away = " (focus it with tab or a click)"
    named = ((name if name in here else name + away, rows) for name, rows in sections.items())
    return {
        name: {_together(keys): words for words, keys in rows.items()}
        for name, rows in named
        if rows
    }


def _together(keys: Sequence[str]) -> str:
    # `f1 to f9`, or all keys.
    return f"{keys[0]} to {keys[-1]}" if len(keys) > MOST_TOGETHER else " ".join(keys)


def problems(file: KeyFile) -> dict[str, list[str]]:
    """Return the wrong entries of the key file, each with its number."""
    return {words: [f"▲{number}"] for number, words in enumerate(file.problems, 1)}
