"""Benchmark, alignment and summary panels."""

from __future__ import annotations

from dataclasses import replace

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from atropos_common.protocol.control import Role
from atropos_common.protocol.trainer_records import AlignmentRecord
from atropos_tui.diagnoses import ALIGNMENT_RULES
from atropos_tui.monitor.bench import (
    Pace,
    benchmark_state,
    pace,
    ratio,
    reasons_text,
    render_benchmarks,
    token_use,
)
from atropos_tui.monitor.format import bytes_text, duration, number, one_line, seconds_text
from atropos_tui.monitor.overlay import summary
from atropos_tui.monitor.why import silent_s
from atropos_tui.ui.plot import progress_bar
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.panel import Panel, TextPanel, View

_LABEL = 12
_VALUE = 9


VERDICTS = {"ok": ("✔", "good"), "drift": ("▲", "warn"), "mismatch": ("✖", "bad")}


def verdict_text(alignment: AlignmentRecord) -> tuple[str, str]:
    """Return glyph and word, and tone."""
    glyph, tone = VERDICTS[alignment.verdict]
    return f"{glyph} {alignment.verdict}", tone


class AlignmentPanel(TextPanel, can_focus=True):
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
        note = f"step {found.step}" if found else "no data"
        self.border_title = title("Alignment", (note, "quiet"))

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        if (found := view.state.alignment) is None:
            return []
        words, tone = verdict_text(found)
        head = Text(words, self.style(tone), no_wrap=True, end="")
        head.append_text(self._age(view, found))
        # What to do comes before the numbers: a low panel cuts the end.
        lines = [head]
        if found.verdict != "ok":
            lines += self._wrapped("cause", found.cause, width)
            lines += self._wrapped("fix", fix_of(view), width)
        # Absolute differences of log-probabilities, trainer against engine, come first.
        rows: tuple[tuple[str, float | None, float | None], ...] = (
            ("rollouts", found.logprob_diff_abs_mean, found.logprob_diff_abs_max),
            ("probe", found.probe_diff_abs_mean, found.probe_diff_abs_max),
        )
        return [
            *lines,
            self._pair("", "mean", "max"),
            *(self._pair(label, number(mean), number(most)) for label, mean, most in rows),
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
            return Text(f"  step {found.step}", self.style("dim"))
        if silent is not None:
            return Text(f"  trainer silent for {duration(silent)}", self.style("warn"))
        return Text(f"  {duration(age)} ago", self.style("dim"))

    def _pair(self, label: str, first: str, second: str) -> Text:
        line = self.labelled(label, _LABEL - 2)  # narrower, for two columns of values
        quiet = self.style("dim") if not label else None
        return line.append(f"{first:>{_VALUE}}", quiet).append(f"  {second:>{_VALUE}}", quiet)

    def _wrapped(self, label: str, words: str, width: int) -> list[Text]:
        if not words:
            return []
        room = max(8, width - 7)
        parts = Text(one_line(words)).wrap(self.app.console, room)[:3]
        heads = [f"{label:<7}", *[" " * 7] * (len(parts) - 1)]
        return [
            Text.assemble((head, self.style("dim")), part, end="", no_wrap=True)
            for head, part in zip(heads, parts, strict=True)
        ]


def fix_of(view: View) -> str:
    """Return the fix of the newest diagnosis about alignment, if any."""
    found = [item for item in view.state.diagnoses if item.rule in ALIGNMENT_RULES and item.fix]
    return found[-1].fix if found else ""


class Benchmark(TextPanel, can_focus=True):
    """Live figures over the newest steps."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    Benchmark {
        width: 46;
        height: 1fr;
    }
    .view Benchmark { width: 56; }
    .-narrow .view Benchmark { width: 1fr; }
    .-narrow #view-benchmark { layout: vertical; }
    """

    def show(self, view: View) -> None:
        super().show(view)
        window = pace(view.state, None).window
        note = (f"last {window} steps", "quiet") if window else ("no data", "quiet")
        if view.state.benchmark:
            note = (f"final, all {window} steps", "success")
        self.set_title(title("Benchmark", note))

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        # The most important figures first: a low panel cuts the end.
        speed = pace(view.state, view.info.training_steps)
        return [
            *self._tokens(view, speed),
            *self._split(speed, width),
            *self._figures(view, speed),
        ]

    def _line(self, label: str, value: str, rest: Text | str = "", tone: str = "") -> Text:
        line = self.labelled(label, _LABEL)
        line.append(f"{value:>{_VALUE}}", self.style(tone) if tone else None)
        words = rest if isinstance(rest, Text) else Text(rest, self.style("dim"))
        return line.append("  ").append_text(words)

    def _tokens(self, view: View, speed: Pace) -> list[Text]:
        use = token_use(view.state, view.info.gpu_count, speed.window)
        if use is None:
            return []
        return [
            self._line("accepted", use.rate, use.unit),
            self._line("thrown away", f"{1 - use.accepted:.0%}", reasons_text(use.thrown_away)),
        ]

    def _split(self, speed: Pace, width: int) -> list[Text]:
        lines = [self._line("step", seconds_text(speed.step_s))]
        # Two cells of gap, and six for the percentage.
        room = max(0, width - _LABEL - _VALUE - 2 - 6)
        for name, value in speed.parts.items():
            bar = Text(no_wrap=True, end="")
            share = ratio(value, speed.step_s)
            if share is not None:
                share = min(1.0, share)
                bar = progress_bar(share, room, self.style("busy"), self.style("track"))
                bar.append(f" {share:4.0%}", self.style("dim"))
            lines.append(self._line(f"  {name}", seconds_text(value), bar))
        return lines

    def _figures(self, view: View, speed: Pace) -> list[Text]:
        state = view.state
        lag, most = state.metric("policy_lag_mean").last, state.metric("policy_lag_max").last
        versions = "versions" if most is None else f"versions, max {number(most, 0)}"
        engines = [row.name for row in view.rows if row.role is Role.ENGINE and row.port]
        lines = [
            self._line("tokens/s", number(speed.tokens_per_s, 0), "with prompts"),
            *self._mfu(speed),
            *self._engine_use(speed),
            *(line for name in engines for line in self._engine(view, name)),
            self._line("steps/h", number(speed.steps_per_hour, 0)),
            self._line("lag", number(lag, 1), versions),
            *self._memory(view),
        ]
        if state.alignment:
            words, tone = verdict_text(state.alignment)
            # Second, because a mismatch makes the throughput worthless.
            lines.insert(1, self._line("alignment", words, one_line(state.alignment.cause), tone))
        if state.benchmark:
            steps = f"{state.benchmark.steps} steps"
            lines.append(self._line("total", duration(state.benchmark.total_s), steps))
        return lines

    def _mfu(self, speed: Pace) -> list[Text]:
        if speed.mfu_peak is None:
            return []
        words = "of dense peak" if speed.mfu is None else f"of peak, {speed.mfu:.0%} of 790"
        return [self._line("MFU", f"{speed.mfu_peak:.1%}", words)]

    def _engine_use(self, speed: Pace) -> list[Text]:
        lines = []
        if speed.engine_capacity is not None:
            words = "of its top tokens/s"
            lines.append(self._line("capacity", f"{speed.engine_capacity:.0%}", words))
        if speed.engine_idle is not None:
            idle = f"{speed.engine_idle:.0%}"
            lines.append(self._line("engine idle", idle, "nothing in flight"))
        return lines

    def _engine(self, view: View, name: str) -> list[Text]:
        rates = view.gauges.rates(name)
        label = one_line(name)[: _LABEL - 1]
        if rates is None:
            return [self._line(label, "–", "no metrics")]
        counts = (rates.running, rates.waiting)
        running, waiting = ("–" if value is None else f"{value:.0f}" for value in counts)
        hits = "" if rates.prefix_hit_rate is None else f"prefix hits {rates.prefix_hit_rate:.0%}"
        used = "–" if rates.kv_use is None else f"{rates.kv_use:.0%}"
        return [
            self._line(label, number(rates.generated_per_s, 0), "tokens/s"),
            self._line("  requests", running, f"running, {waiting} waiting"),
            self._line("  KV cache", used, hits),
        ]

    def _memory(self, view: View) -> list[Text]:
        state = view.state
        gpu, held, rss = (state.metric(f"{name}_bytes") for name in ("peak", "allocated", "rss"))
        # Only components with a known value.
        total = [row.memory_bytes for row in view.rows if row.memory_bytes]
        queue = view.gauges.last.queue if view.gauges.last else None
        lines = [self._line("queue", "–" if queue is None else str(queue), "groups in run-api")]
        if not view.loaded:  # peaks are unknown until the history is loaded
            return lines
        if len(gpu):
            words = f"peak, mean {bytes_text(held.mean)}" if len(held) else "peak"
            lines.append(self._line("GPU memory", bytes_text(gpu.highest), words))
        words = f"peak, mean {bytes_text(rss.mean)}" if len(rss) else ""
        lines.append(self._line("trainer RSS", bytes_text(rss.highest), words))
        stack, words = (bytes_text(sum(total)), "memory of all") if total else ("–", "")
        return [*lines, self._line("stack", stack, words)]


class Summary(VerticalScroll, Panel):
    """Summary table of this run and the compared one."""

    DEFAULT_CSS = """
    Summary { width: 1fr; height: 1fr; }
    Summary > #summary-text { width: 100%; }
    """

    def __init__(self) -> None:
        super().__init__(id="summary")
        self._text = ""

    def compose(self) -> ComposeResult:
        yield Static(id="summary-text")

    def on_mount(self) -> None:
        self.border_title = title("Summary")

    def show(self, view: View) -> None:
        info = view.info
        mine = benchmark_state(
            view.state, run=info.name or "this run", mode=info.mode, gpus=info.gpu_count
        )
        mine = replace(mine, exit_code=view.status.exit_code if view.status else None)
        # Two columns with a comparison, one without.
        text = render_benchmarks([mine, view.other] if view.other else [mine])
        if view.runs:
            text = f"{text}\n\n{summary(view.runs)}"
        about = "c: compare"
        if view.other:
            about = f"vs {one_line(view.other.run)} (x = ratio to this run)"
        self.set_title(title("Summary", (about, "quiet")))
        # The rules of the summary, and its first line, are wider than a narrow panel.
        room = self.scrollable_content_region.width
        lines = (line[:room] if set(line) == {"="} else line for line in text.splitlines())
        text = "\n".join(lines)
        # An update causes a new layout, so skip it without a change.
        if text != self._text:
            self._text = text
            self.query_one("#summary-text", Static).update(Text(text, no_wrap=bool(view.runs)))
