"""Alignment panel: do trainer and engine compute the same token probabilities?"""

from __future__ import annotations

from rich.text import Text

from atropos_common.protocol.records import AlignmentRecord
from atropos_tui.diagnoses import ALIGNMENT_RULES
from atropos_tui.monitor.explain.why import silent_s
from atropos_tui.monitor.format import duration, number, one_line
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.panel import TextPanel, View

VERDICTS = {"ok": ("✔", "good"), "drift": ("▲", "warn"), "mismatch": ("✖", "bad")}
_LABEL = 10
_VALUE = 9


def verdict_text(alignment: AlignmentRecord) -> tuple[str, str]:
    """Return glyph and word, and tone."""
    glyph, tone = VERDICTS[alignment.verdict]
    return f"{glyph} {alignment.verdict}", tone


class AlignmentPanel(TextPanel):
    """Newest alignment record in words."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    AlignmentPanel {
        width: 46;
        height: 1fr;
    }
    .-narrow .view AlignmentPanel { width: 40; }
    """

    def show(self, view: View) -> None:
        super().show(view)
        found = view.state.alignment
        self.border_title = title(
            "Alignment", (f"step {found.step}" if found else "no data", "quiet")
        )

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        if (found := view.state.alignment) is None:
            return []
        words, tone = verdict_text(found)
        head = Text(words, self.ink(tone), no_wrap=True, end="")
        head.append_text(self._age(view, found))
        # What to do comes before the numbers: a low panel cuts the end.
        lines = [head]
        if found.verdict != "ok":
            lines += self._wrapped("cause", found.cause, width) + self._wrapped(
                "fix", fix_of(view), width
            )
        return [
            *lines,
            # Absolute differences of log-probabilities, trainer against engine.
            self._pair("", "mean", "max"),
            self._pair(
                "rollouts", number(found.logprob_diff_abs_mean), number(found.logprob_diff_abs_max)
            ),
            self._pair(
                "probe", number(found.probe_diff_abs_mean), number(found.probe_diff_abs_max)
            ),
            self._pair("", "inference", "training"),
            self._pair("logprob", number(found.inference_mean), number(found.train_mean)),
            self._pair("KL (k3)", number(found.kl_k3), ""),
            self._pair("tokens", f"{found.tokens:,}", f"{found.probe_tokens} probed"),
        ]

    def _age(self, view: View, found: AlignmentRecord) -> Text:
        age, silent = view.now - found.time, silent_s(view.state, view.now)
        # The age means nothing in a finished run, or when a clock is behind.
        over = bool(view.gone) or view.state.benchmark is not None
        if over or age < 0:
            return Text(f"  step {found.step}", self.ink("dim"))
        if silent is not None:
            return Text(f"  trainer silent for {duration(silent)}", self.ink("warn"))
        return Text(f"  {duration(age)} ago", self.ink("dim"))

    def _pair(self, label: str, first: str, second: str) -> Text:
        line = self.labelled(label, _LABEL)
        quiet = self.ink("dim") if not label else None
        return line.append(f"{first:>{_VALUE}}", quiet).append(f"  {second:>{_VALUE}}", quiet)

    def _wrapped(self, label: str, words: str, width: int) -> list[Text]:
        if not words:
            return []
        room = max(8, width - 7)
        parts = Text(one_line(words)).wrap(self.app.console, room)[:3]
        heads = [f"{label:<7}", *[" " * 7] * (len(parts) - 1)]
        return [
            Text.assemble((head, self.ink("dim")), part, end="", no_wrap=True)
            for head, part in zip(heads, parts, strict=True)
        ]


def fix_of(view: View) -> str:
    """Return the fix of the newest diagnosis about alignment, if any."""
    found = [item for item in view.state.diagnoses if item.rule in ALIGNMENT_RULES and item.fix]
    return found[-1].fix if found else ""
