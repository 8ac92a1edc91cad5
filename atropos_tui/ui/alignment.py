"""The alignment panel: do trainer and engine agree on the tokens' probabilities? Figures, verdict, cause, fix."""

from __future__ import annotations

from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from atropos_common.records import AlignmentRecord
from atropos_tui.monitor.plain import duration, number, one_line
from atropos_tui.monitor.trouble import silent_s
from atropos_tui.ui.look import title
from atropos_tui.ui.view import View

VERDICTS = {"ok": ("✔", "good"), "drift": ("▲", "warn"), "mismatch": ("✖", "bad")}
_LABEL = 10
_VALUE = 9


def verdict_text(alignment: AlignmentRecord) -> tuple[str, str]:
    """Glyph and word, and tone."""
    glyph, tone = VERDICTS[alignment.verdict]
    return f"{glyph} {alignment.verdict}", tone


class Alignment(Widget):
    """The newest alignment record in words; its history is in the charts beside it."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"alignment--{name}" for name in ("label", "good", "warn", "bad")}

    view: reactive[View | None] = reactive(None)

    def show(self, view: View) -> None:
        self.view = view
        found = view.state.alignment
        self.border_title = title("Alignment", (f"step {found.step}" if found else "no data", "quiet"))

    def render(self) -> RenderResult:
        if self.view is None or self.view.state.alignment is None:
            return Text("")
        width, height = self.content_size
        lines = self._lines(self.view, self.view.state.alignment, width)
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Text("\n", end="").join(lines[:height])

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"alignment--{name}", partial=True)

    def _lines(self, view: View, found: AlignmentRecord, width: int) -> list[Text]:
        words, tone = verdict_text(found)
        head = Text(words, self._style(tone), no_wrap=True, end="")
        head.append_text(self._age(view, found))
        lines = [head]
        if found.verdict != "ok":
            lines += self._wrapped("cause", found.cause, width) + self._wrapped("fix", fix_of(view), width)
        return [
            *lines,
            self._pair("", "mean", "max"),
            self._pair("rollouts", number(found.logprob_diff_abs_mean), number(found.logprob_diff_abs_max)),
            self._pair("probe", number(found.probe_diff_abs_mean), number(found.probe_diff_abs_max)),
            self._pair("", "inference", "training"),
            self._pair("logprob", number(found.inference_mean), number(found.train_mean)),
            self._pair("KL (k3)", number(found.kl_k3), ""),
            self._pair("tokens", f"{found.tokens:,}", f"{found.probe_tokens} probed"),
        ]

    def _age(self, view: View, found: AlignmentRecord) -> Text:
        """How old the figures are; a silent trainer is said loudly, unless it is done."""
        age, silent = view.now - found.time, silent_s(view.state, view.now)
        over = bool(view.gone) or view.state.benchmark is not None
        if over or age < 0:
            return Text(f"  step {found.step}", self._style("label"))
        if silent is not None:
            return Text(f"  trainer silent for {duration(silent)}", self._style("warn"))
        return Text(f"  {duration(age)} ago", self._style("label"))

    def _pair(self, label: str, first: str, second: str) -> Text:
        line = Text(f"{label:<{_LABEL}}", self._style("label"), no_wrap=True, end="")
        quiet = self._style("label") if not label else None
        return line.append(f"{first:>{_VALUE}}", quiet).append(f"  {second:>{_VALUE}}", quiet)

    def _wrapped(self, label: str, words: str, width: int) -> list[Text]:
        """`label` and `words` below each other, in at most three lines."""
        if not words:
            return []
        room = max(8, width - 7)
        parts = Text(one_line(words)).wrap(self.app.console, room)[:3]
        heads = [f"{label:<7}", *[" " * 7] * (len(parts) - 1)]
        return [Text.assemble((head, self._style("label")), part, end="", no_wrap=True)
                for head, part in zip(heads, parts, strict=True)]  # fmt: skip


def fix_of(view: View) -> str:
    """What the newest diagnosis about alignment advises; empty where there is none."""
    found = [item for item in view.state.diagnoses if item.rule.startswith("alignment") and item.fix]
    return found[-1].fix if found else ""
