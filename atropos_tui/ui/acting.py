"""Commands from the screen: ask with the blast radius, send, say what became of it; and how the screen is left."""

from __future__ import annotations

from typing import Literal, TypeVar

from textual.app import App
from textual.screen import Screen
from textual.widget import Widget

from atropos_common.control import Action, CommandRequest
from atropos_common.records import CommandRecord
from atropos_tui.monitor.plain import one_line
from atropos_tui.supervisor.client import Refused
from atropos_tui.ui.bridge import Bridge
from atropos_tui.ui.command_bar import CommandBar
from atropos_tui.ui.components import Components
from atropos_tui.ui.dialogs import ConfirmDialog, QuitDialog

Outcome = Literal["detach", "stop", "ended", "failed"]
"""How the screen was left: the run goes on, was stopped from here, or was over."""

Kind = TypeVar("Kind", bound=Widget)


class ActingApp(App[Outcome]):
    """An app over one run whose keys act on the component under the cursor."""

    bridge: Bridge

    def __init__(self) -> None:
        super().__init__()
        self.is_over = False
        """The run has ended, or nobody owns it any more."""
        self.user_selects = False
        """The cursor is where the user put it."""
        self.is_leaving = False
        """The run was told to stop from here, and its end is waited for."""
        self._seen_commands: set[str] = set()
        self._is_asking = self._asks_to_leave = False
        """A question, or what comes before and after it, is under way: impatient keys ask no second one."""

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

    def action_act(self, action: Action) -> None:
        table = self.find(Components)
        row = table.selected if table else None
        if row is None:
            self.refuse("no component is selected", "")
            return
        self.act(action, row.name)

    def act(self, action: Action, component: str | None) -> None:
        """Ask for `action` on a component, or on the whole stack, unless something is being asked."""
        if not (self._is_asking or self._asks_to_leave):
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
            recipe = await self.bridge.recipe(action, component)
            if ask and action != "start" and not await self.push_screen_wait(ConfirmDialog(recipe)):
                return False
            accepted = await self.bridge.send(CommandRequest(action=action, component=component))
        except Refused as refusal:
            self.refuse(refusal.error, refusal.fix, f"{action} {component or 'the stack'} refused")
            return False
        if bar := self.find(CommandBar):
            bar.note(accepted.command_id, accepted.recipe)
        self.notify(f"{action} {component or 'the stack'}: accepted", timeout=2, markup=False)
        return True

    def refuse(self, error: str, fix: str, heading: str = "refused") -> None:
        words = one_line(error) + (f"\n{one_line(fix)}" if fix else "")
        self.notify(words, title=heading, severity="warning", timeout=8, markup=False)

    # Leaving.

    def action_detach(self) -> None:
        self.exit("ended" if self.is_over else "detach")

    def action_ask_quit(self) -> None:
        """Over: leave. Running: ask. Asked again while the run stops: leave without waiting."""
        if self.is_over or self.is_leaving:
            self.exit("ended" if self.is_over and not self.is_leaving else "stop")
        elif not self._asks_to_leave:
            self._asks_to_leave = True
            self.run_worker(self._ask_quit(), group="commands")

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
