"""One rollout in full: its conversation, its tokens, its group side by side, or what changed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widgets import Static

from atropos_common.protocol.trainer_records import RolloutRecord
from atropos_tui.monitor.conversation import (
    LEVEL_WORDS,
    SIGNS,
    Part,
    Token,
    completion_parts,
    prompt_parts,
    shown,
    tokens_of,
    version_words,
)
from atropos_tui.monitor.format import counted, number, one_line, plain_lines
from atropos_tui.monitor.patterns import Pattern
from atropos_tui.monitor.rollout_groups import diff, known_rewards
from atropos_tui.ui.plot import sparkline
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.panel import Guarded

Colours = Literal["roles", "logprobs", "versions"]
COLOURS: tuple[Colours, ...] = get_args(Colours)
ABOUT: dict[Colours, str] = {
    "roles": "",
    "logprobs": "tokens by |trainer − engine|",
    "versions": "tokens by weight version",
}
ROLE_STYLES = {
    "system": "dim",
    "user": "primary",
    "assistant": "success",
    "thinking": "note",
    "call": "accent",
    "result": "warning",
    "environment": "dim",
}
DIFF_STYLES = ("plain", "diff-1", "diff-2", "diff-3", "diff-4")
VERSION_STYLES = ("version-0", "version-1", "version-2", "version-3")
MOST_SPREAD = 16
"""Limit of a group's rewards in one line."""
SHORT_PROMPT = 800
"""Longest prompt before the answer, in characters; a longer one comes last."""
COLUMN_CELLS = 30
"""Narrowest column of a completion beside others, in cells."""


@dataclass(frozen=True)
class Look:
    """Choices for the detail of a rollout."""

    colours: Colours = "roles"
    beside: bool = False
    """The group's completions side by side."""


@dataclass(eq=False)
class Pointed(Message, namespace="rollouts"):
    """Show another completion, compared with `base` if there is one."""

    rollout: RolloutRecord | None
    base: RolloutRecord | None
    words: str
    group: tuple[RolloutRecord, ...] = ()
    pattern: Pattern | None = None
    look: Look = field(default_factory=Look)


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
        self._text = Text()
        self._turns: list[int] = []
        """Offsets in the text where turns or matches begin."""
        self._shown: RolloutRecord | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="rollout-text")

    def on_mount(self) -> None:
        self.border_title = title("Rollout")

    def show_rollout(self, message: Pointed) -> None:
        self.recover()
        with self.guard():
            self._show(message)

    def _show(self, message: Pointed) -> None:
        rollout, look = message.rollout, message.look
        about = f"step {rollout.step} · {one_line(rollout.env)}" if rollout else "no data"
        how = "" if message.base else ABOUT[look.colours]
        parts = (about, "quiet"), (message.words, "accent"), (how, "accent")
        self.border_title = title("Rollout", *parts)
        self._turns = []
        self._text = text = Text()
        if rollout:
            text.append_text(self._figures(rollout, message.group))
            if not look.beside:
                text.append_text(self._body(rollout, message.base, look, text))
        found = list(message.pattern.spans(text.plain)) if message.pattern else []
        for start, end in found:
            text.stylize(self.style("found"), start, end)
        if found:
            self._turns = [start for start, _ in found]
        body: RenderableType = text
        if rollout and look.beside:
            body = self._group(rollout, message)
        self.query_one("#rollout-text", Static).update(body)
        if rollout is not self._shown:
            self._shown = rollout
            self.scroll_to(y=0, animate=False)

    # Scrolling, for keys of the list.

    def page(self, by: int) -> None:
        self.scroll_relative(y=by * max(self.size.height - 1, 1), animate=False)

    def turn(self, by: int) -> None:
        """Scroll to the next or previous turn, or match of the search."""
        width = max(self.query_one("#rollout-text").content_size.width, 1)
        rows = sorted({self._row_of(offset, width) for offset in self._turns})
        now = round(self.scroll_y)
        after = [row for row in rows if row > now]
        before = [row for row in rows if row < now]
        wanted = after[:1] if by > 0 else before[-1:]
        for row in wanted:
            self.scroll_to(y=row, animate=False)

    def _row_of(self, offset: int, width: int) -> int:
        above = self._text.plain[:offset].split("\n")
        console = self.app.console
        return sum(max(len(Text(line).wrap(console, width)), 1) for line in above) - 1

    # Contents.

    def _figures(self, rollout: RolloutRecord, group: Sequence[RolloutRecord]) -> Text:
        label = self.style("dim")
        text = Text()
        figures = [
            ("reward", number(rollout.reward, 2)),
            ("advantage", number(rollout.advantage, 2)),
            ("lag", number(rollout.policy_lag, 1)),
            ("tokens", "–" if rollout.tokens is None else f"{rollout.tokens:,}"),
        ]
        if (rollout.turn_count or 0) > 1:
            figures.append(("turns", f"{rollout.turn_count:,}"))
        if len(group) > 1:
            known = known_rewards(group) or [math.nan]
            # The list may hold only part of the group.
            is_part = (rollout.group_size or 0) > len(group)
            of = f", {len(group)} of {rollout.group_size}" if is_part else ""
            low, high = number(min(known), 2), number(max(known), 2)
            figures.append(("group", f"{low} {spread(group)} {high}{of}"))
        for name, value in figures:
            text.append(f"{name} ", label).append(f"{value}   ")
        return text

    def _body(
        self, rollout: RolloutRecord, base: RolloutRecord | None, look: Look, before: Text
    ) -> Text:
        text = Text()
        offset = len(before)
        if base:
            for name in ("completion", "prompt"):
                text.append(f"\n\n{name}\n", self.style("dim"))
                old, new = plain_lines(getattr(base, name)), plain_lines(getattr(rollout, name))
                text.append_text(self._changes(old, new))
            return text
        tokens = tokens_of(rollout) if look.colours != "roles" else []
        if look.colours != "roles":
            text.append("\n").append_text(self._legend(tokens, look.colours))
        # A long prompt would hide the answer, which is what a reader of a list wants.
        prompt = prompt_parts(rollout.prompt)
        is_short = len(rollout.prompt) <= SHORT_PROMPT
        if is_short:
            self._parts(text, offset, prompt, rollout.prompt)
        if tokens:
            for begin, words, part in self._token_turns(rollout, tokens, look.colours):
                self._turns.append(offset + len(text) + 2)
                text.append(f"\n\n{begin}\n", self.style("dim"))
                if part:
                    text.append(f"{part}\n", self.style("dim"))
                text.append_text(words)
        else:
            self._parts(text, offset, completion_parts(rollout), rollout.completion)
        if not is_short:
            text.append("\n\nprompt", self.style("dim"))
            self._parts(text, offset, prompt, rollout.prompt)
        return text

    def _parts(self, text: Text, offset: int, parts: Sequence[Part], words: str) -> None:
        last: Part | None = None
        for part in parts:
            if part.skipped:
                gone = f"… {counted(part.skipped, 'turn')} left out of the record …"
                text.append(f"\n\n{gone}", self.style("dim"))
            sign, name = SIGNS[part.role]
            style = self.style(ROLE_STYLES[part.role])
            self._turns.append(offset + len(text) + 2)
            text.append(f"\n\n{sign} {name}", style)
            if part.turn and (last is None or last.turn is not part.turn):
                text.append(f"  {_about_turn(part)}", self.style("dim"))
            quiet = part.role in ("system", "environment", "thinking")
            body = shown(part, words)
            text.append("\n").append(body, self.style("dim") if quiet else "")
            last = part

    def _token_turns(
        self, rollout: RolloutRecord, tokens: Sequence[Token], colours: Colours
    ) -> Iterator[tuple[str, Text, str]]:
        order = _versions_of(tokens)
        start, at, before = 0, 0, ""
        expected = 0
        for turn in rollout.turns:
            end = start + turn.chars
            words = Text()
            while at < len(tokens) and tokens[at].start < end:
                token = tokens[at]
                written = plain_lines(rollout.completion[token.start : token.end])
                if colours == "versions" and token.version and token.version != before:
                    words.append(f"⟨{token.version}⟩", self.style("dim"))
                    before = token.version
                words.append(written, self.style(_style_of(token, colours, order)))
                at += 1
            sign, name = SIGNS["environment" if turn.number % 2 else "assistant"]
            made = version_words(turn)
            about = " · ".join(filter(None, (f"turn {turn.number}", _tokens(turn.tokens), made)))
            gap = turn.number - expected
            gone = f"… {counted(gap, 'turn')} left out of the record …" if gap > 0 else ""
            yield f"{sign} {name}  {about}", words, gone
            start, expected = end, turn.number + 1

    def _legend(self, tokens: Sequence[Token], colours: Colours) -> Text:
        text = Text()
        if not tokens:
            return text.append("this recording has no tokens", self.style("warn"))
        if colours == "logprobs":
            text.append("|trainer − engine| from  ", self.style("dim"))
            for words, style in zip(LEVEL_WORDS, DIFF_STYLES, strict=True):
                text.append(words, self.style(style)).append("  ")
            known = [abs(token.diff) for token in tokens if token.diff is not None]
            if known:
                mean, most = number(sum(known) / len(known)), number(max(known))
                text.append(f"mean {mean}  largest {most}", self.style("dim"))
            return text
        order = _versions_of(tokens)
        if not order:
            return text.append("the weight versions are not known", self.style("warn"))
        counts = Counter(token.version for token in tokens)
        text.append("newest first  ", self.style("dim"))
        for version, rank in order.items():
            style = VERSION_STYLES[min(rank, len(VERSION_STYLES) - 1)]
            text.append(version, self.style(style))
            text.append(f" {counted(counts[version], 'token')}  ", self.style("dim"))
        return text

    def _group(self, rollout: RolloutRecord, message: Pointed) -> Table:
        width = max(self.content_size.width - 1, COLUMN_CELLS)
        group = [rollout, *(one for one in message.group if one is not rollout)]
        group[1:] = sorted(group[1:], key=lambda one: (math.isnan(one.reward), -one.reward))
        count = max(1, min(len(group), width // COLUMN_CELLS))
        table = Table.grid(expand=True, padding=(0, 2, 1, 0))
        for _ in range(count):
            table.add_column(ratio=1, overflow="fold")
        for at in range(0, len(group), count):
            cells = [self._cell(one, one is rollout, message) for one in group[at : at + count]]
            table.add_row(*cells)
        return table

    def _cell(self, one: RolloutRecord, is_current: bool, message: Pointed) -> Text:
        tone = "good" if one.advantage > 0 else "bad" if one.advantage < 0 else "dim"
        text = Text()
        text.append("◆ " if is_current else "  ", self.style("accent"))
        text.append(f"reward {number(one.reward, 2)}  ", self.style(tone))
        text.append(f"advantage {number(one.advantage, 2)}", self.style(tone))
        text.append(f"  {_tokens(one.tokens)}", self.style("dim"))
        for part in completion_parts(one):
            sign, _ = SIGNS[part.role]
            if part.skipped:
                gone = f"\n… {counted(part.skipped, 'turn')} left out …"
                text.append(gone, self.style("dim"))
            text.append(f"\n{sign} ", self.style(ROLE_STYLES[part.role]))
            text.append(shown(part, one.completion))
        for start, end in message.pattern.spans(text.plain) if message.pattern else ():
            text.stylize(self.style("found"), start, end)
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


def _about_turn(part: Part) -> str:
    turn = part.turn
    if turn is None:
        return ""
    words = (f"turn {turn.number}", _tokens(turn.tokens), version_words(turn))
    return " · ".join(filter(None, words))


def _tokens(count: int | None) -> str:
    return "" if count is None else counted(count, "token")


def _versions_of(tokens: Sequence[Token]) -> dict[str, int]:
    """Return the rank of each version, the newest first."""
    names = {token.version for token in tokens if token.version}
    newest = sorted(names, key=lambda name: int(name.rpartition("v")[2]), reverse=True)
    return {name: rank for rank, name in enumerate(newest)}


def _style_of(token: Token, colours: Colours, order: dict[str, int]) -> str:
    if colours == "logprobs":
        return "dim" if token.level is None else DIFF_STYLES[token.level]
    rank = order.get(token.version)
    return "dim" if rank is None else VERSION_STYLES[min(rank, len(VERSION_STYLES) - 1)]
