"""HTML reports: `render_report` of one run, `render_overlay` of several.

A page uses no network, and is complete without its script, which zooms, smooths and saves charts.
Texts of others are masked and escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import pstdev
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from atropos_common.protocol.control import Phase, RunStatus, State
from atropos_common.protocol.record_base import SCHEMA_VERSION
from atropos_common.protocol.records import DiagnosisRecord
from atropos_common.protocol.trainer_records import RolloutRecord
from atropos_common.system.files import names_in, read_regular
from atropos_common.system.run_dir import LATEST_TIME, RunDir
from atropos_tui import __version__
from atropos_tui.errors import Exit
from atropos_tui.monitor.bench import (
    TokenUse,
    benchmark_state,
    origin,
    reasons_text,
    summary_sections,
    token_use,
    tokens_per_second,
)
from atropos_tui.monitor.charts import CHARTS, WRITERS, Along, ChartSpec, CurveSpec
from atropos_tui.monitor.format import (
    counted,
    duration,
    glyph_and_word,
    masked_line,
    number,
    plain_text,
    real,
)
from atropos_tui.monitor.log_buffer import Classifier
from atropos_tui.monitor.log_reader import LogReader
from atropos_tui.monitor.overlay import (
    PLACES,
    MetricLine,
    RunCurves,
    Setting,
    by_setting,
    final,
    final_table,
    last_steps,
    lines,
    seeds_table,
    settings_of,
    settings_table,
    splits,
)
from atropos_tui.monitor.report_charts import PageChart, PageCurve, charts, draw, system_charts
from atropos_tui.monitor.rollout_groups import (
    RolloutGroup,
    groups,
    known_rewards,
    question,
    shared_beginning,
)
from atropos_tui.monitor.run.notes import read_notes
from atropos_tui.monitor.run.run_files import RunInfo, is_crashed, load_run, read_json
from atropos_tui.monitor.run.series import Series, mean
from atropos_tui.monitor.run.state import (
    COMMANDS_KEPT,
    DIAGNOSES_KEPT,
    TRANSITIONS_KEPT,
    RunState,
    timeline,
)
from atropos_tui.monitor.verdict import GLYPHS, verdict
from atropos_tui.monitor.why import open_diagnoses
from atropos_tui.profile.redact import mask
from trainer_core.config import TrainingConfig

# Rollouts on the page: whole groups, newest first, until this number is reached.
SAMPLES = 24
QUESTION_CHARS = 300  # of a group's question in its heading
# Longer prompts, completions and profiles are cut; the run's files have the rest.
TEXT_CHARS, PROFILE_CHARS = 2_000, 100_000


@dataclass
class Lane:
    """States of one component over time."""

    name: str
    bars: list[tuple[float, float, str, str]] = field(default_factory=list)
    """Left and width in percent of the whole time, state, description."""


def render_report(run: RunDir, status: RunStatus, now: float) -> str:
    """Return the page as text that UTF-8 can encode; `now` in Unix seconds."""
    info, state, feed = load_run(run.root)
    figures = benchmark_state(
        state, run=run.root.name, mode=info.mode or status.mode, gpus=info.gpu_count
    )
    end, sentence = _end(status, state, now), verdict(status, info, state, now)
    return _page(
        "report.html.j2",
        now,
        name=masked_line(info.name or run.root.name),
        identity=_identity(info, status),
        note=masked_line(read_notes(run).line),
        verdict=_verdict(status),
        sentence=(masked_line(sentence.line), sentence.tone),
        learned=_learned(state),
        headline=_headline(state, info, status, end),
        errors=errors_of(run),
        settings=_settings(run),
        remarks=list(_remarks(state, feed.bad_lines)),
        charts=_pictures(charts(state), "chart"),
        system=_pictures(system_charts(state), "system"),
        lanes=lanes(state, end),
        span=_span(state, end),
        diagnoses=[_diagnosis(record, state, status) for record in state.diagnoses],
        timeline=timeline(state),
        components=[_component(row) for row in status.components],
        sections=summary_sections(figures),
        origin=origin(figures),
        rollouts=_rollouts(state),
        facts=_facts(run, status),
        profile=_profile(run),
        clock=_clock,
        masked_line=masked_line,
        counted=counted,
    )


def _page(template: str, now: float, **values: object) -> str:
    made = f"{_clock(now)} by atropos-tui {__version__}"
    pages = environment()
    script = Markup(pages.get_template("page.js.j2").render().strip())
    # No other script may run, whatever a text of others says.
    digest = base64.b64encode(hashlib.sha256(str(script).encode()).digest()).decode()
    page = pages.get_template(template).render(made=made, script=script, digest=digest, **values)
    return page.encode("utf-8", "replace").decode("utf-8")  # lone surrogates in a model's output


def environment() -> Environment:
    """Return the environment for the templates in this folder; it escapes inserted values."""
    loader = PackageLoader("atropos_tui.monitor", package_path=".")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    made.trim_blocks = made.lstrip_blocks = True
    return made


def _pictures(drawn: Sequence[PageChart], name: str) -> list[tuple[PageChart, Markup]]:
    # ElementTree has escaped the texts of a picture.
    return [(chart, Markup(draw(chart, f"{name}{at}"))) for at, chart in enumerate(drawn)]


# How it stands.


def _identity(info: RunInfo, status: RunStatus) -> str:
    parts = (info.run_id, info.mode or status.mode, info.short_model)
    return " · ".join(masked_line(part) for part in parts if part)


def _verdict(status: RunStatus) -> tuple[str, str]:
    if status.phase is not Phase.ENDED:
        return f"● {status.phase.value}", "good"
    if is_crashed(status):
        return "▲ ended without a result", "bad"
    if status.exit_code == Exit.INTERRUPTED:
        return f"■ {masked_line(status.reason) or 'interrupted'}", "dim"
    if status.exit_code == 0:
        return "✔ done", "good"
    return f"✖ {_run_end(status.exit_code)}", "bad"


def _learned(state: RunState) -> str:
    # First and newest held-out accuracy of every environment and split.
    return "; ".join(
        f"{masked_line(name)} {number(series.values[0])} → {number(series.last)}"
        for name, series in state.evals.items()
        if len(series) > 1
    )


Rows = list[tuple[str, str]]


def _tokens(use: TokenUse | None) -> Rows:
    if use is None:
        return []
    thrown = f"{1 - use.accepted:.0%}{reasons_text(use.thrown_away, ': ')}"
    return [
        (f"Accepted {use.unit}", use.rate),
        ("Thrown away of the generated", masked_line(thrown)),
    ]


def _headline(state: RunState, info: RunInfo, status: RunStatus, end: float) -> Rows:
    steps = f"{state.step:,}" + (f" of {info.training_steps:,}" if info.training_steps else "")
    name, held_out = next(iter(state.evals.items()), ("", Series()))
    accuracy = f"Accuracy, {masked_line(name)}, newest" if name else "Held-out accuracy"
    rewards = state.metric("reward_mean")
    count = last_steps([RunCurves("", info, state, {})])
    newest = f", last {counted(count, 'step')}" if len(rewards) else ""
    use = token_use(state, info.gpu_count)
    return [
        *_tokens(use),
        ("Steps", steps),
        ("Duration", duration(end - status.started_at) if status.started_at else "–"),
        (f"Reward{newest}", number(final(rewards, count))),
        (accuracy, number(held_out.last)),
        ("Alignment, newest step", state.alignment.verdict if state.alignment else "–"),
        (f"Tokens/s{newest}", number(tokens_per_second(state, count), 0)),
    ]


def _remarks(state: RunState, bad_lines: int) -> Iterator[str]:
    if bad_lines:
        yield f"{counted(bad_lines, 'line')} of the streams left out: torn, foreign or too long."
    if state.unknown:
        yield f"{counted(state.unknown, 'record')} of unknown kinds: a newer version wrote them."
    if state.newest_version > SCHEMA_VERSION:
        newest = f"{state.newest_version:,}"
        yield f"Records claim schema version {newest}; this version reads {SCHEMA_VERSION}."
    if not state.series:
        yield "The trainer has written no telemetry: there are no curves and no figures."
    if len(state.transitions) == TRANSITIONS_KEPT or len(state.commands) == COMMANDS_KEPT:
        yield f"Only the newest {TRANSITIONS_KEPT:,} transitions shown; supervisor.jsonl has all."
    if len(state.diagnoses) == DIAGNOSES_KEPT:
        yield f"Only the newest {DIAGNOSES_KEPT} diagnoses shown; supervisor.jsonl has all."
    if len(state.attempt_steps) > 1:
        yield (
            f"The trainer was started {len(state.attempt_steps)} times. Steps of an attempt after "
            "the checkpoint of the next one are left out. Dotted lines mark where it began."
        )


# Time.


def _clock(at: float) -> str:
    if not 0 < at < LATEST_TIME:
        return "–"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _end(status: RunStatus, state: RunState, now: float) -> float:
    if status.phase is not Phase.ENDED:
        return now
    times = [record.time for record in state.transitions] + [state.trainer_time or 0.0]
    return max((at for at in times if 0 < at < LATEST_TIME), default=now)


def _span(state: RunState, end: float) -> tuple[str, str, str]:
    start = _start(state, end)
    return _clock(start), _clock(end), duration(end - start)


def _start(state: RunState, end: float) -> float:
    return min((record.time for record in state.transitions if 0 < record.time <= end), default=end)


def lanes(state: RunState, end: float) -> list[Lane]:
    """Return the states of each component up to `end`, without resting ones except failed."""
    start = _start(state, end)
    whole = max(end - start, 1e-3)
    found: dict[str, Lane] = {}
    open_: dict[str, tuple[float, str]] = {}

    def close(name: str, until: float) -> None:
        since, word = open_.pop(name, (until, ""))
        if word and word not in (State.PENDING, State.STOPPED, State.COMPLETED):
            left, width = 100 * (since - start) / whole, 100 * max(0.0, until - since) / whole
            words = f"{word} from {_clock(since)} for {duration(until - since)}"
            found[name].bars.append((left, width, word, words))

    for record in state.transitions:
        if not start <= record.time <= end:
            continue
        name = masked_line(record.component or "")
        found.setdefault(name, Lane(name))
        close(name, record.time)
        open_[name] = record.time, record.new if record.new in set(State) else ""
    for name in list(open_):
        close(name, end)
    return list(found.values())


def _diagnosis(record: DiagnosisRecord, state: RunState, status: RunStatus) -> dict[str, str]:
    over_at = state.over_at(record)
    texts = {key: masked_line(getattr(record, key)) for key in ("title", "evidence", "fix")}
    over = "" if over_at is None else _clock(over_at)
    return texts | {
        "time": _clock(record.time),
        "component": masked_line(record.component or ""),
        "glyph": GLYPHS[record.severity],
        "open": "open" if record in open_diagnoses(state, status) else "",
        "over": over,
    }


def _component(row: Any) -> dict[str, str]:
    return {
        "name": masked_line(row.name),
        "role": row.role.value,
        "state": glyph_and_word(row.state),
        "attempts": str(row.attempt or "–"),
        "crashes": str(row.restarts),
        "exit": exit_words(row.exit_code),
        "note": masked_line(row.diagnosis or row.reason),
    }


def exit_words(code: int | None) -> str:
    """Return how a process ended, from its exit code (-N or 128 + N: by a signal)."""
    if code is None:
        return "–"
    number_ = -code if code < 0 else code - 128  # Python's convention, then the shell's
    known = {one.value: one.name for one in signal.Signals}
    if number_ not in known:
        return "ended normally" if code == 0 else f"error, exit code {code}"
    stopped = number_ in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    verb = "stopped" if stopped else "killed" if number_ == signal.SIGKILL else "crashed"
    return f"{verb} ({known[number_]})"


_RUN_ENDS = {
    Exit.DONE: "done",
    Exit.FAULT: "internal error",
    Exit.USAGE: "invalid profile or failed check",
    Exit.COMPONENT_FAILED: "a component failed",
    Exit.TIMEOUT: "timeout",
    Exit.INTERRUPTED: "stopped by hand",
}


def _run_end(code: int | None) -> str:
    if code is None:
        return "no result"
    words = _RUN_ENDS.get(Exit(code)) if code in list(Exit) else None
    return f"{words} ({code})" if words else str(code)


# Texts of others.


def _block(text: str, most: int) -> str:
    cut = text[:most]
    lines = [mask(plain_text(line)) for line in cut.replace("\r\n", "\n").split("\n")]
    more = f"\n… {len(text) - most:,} more characters" if len(text) > most else ""
    return "\n".join(lines) + more


def _settings(run: RunDir) -> list[tuple[str, str, str]]:
    # Key, value and default of every setting that is not at its default.
    fields = TrainingConfig.model_fields
    rows = []
    for key, value in settings_of(run).items():
        field_ = fields.get(key.removeprefix("trainer.")) if key.startswith("trainer.") else None
        default = masked_line(str(field_.default)) if field_ else "–"
        if value != default:
            rows.append((key, value, default))
    return rows


def _rollouts(state: RunState) -> list[dict[str, Any]]:
    newest: list[RolloutGroup] = []
    for group in groups(state.rollouts):
        if sum(len(one.rollouts) for one in newest) >= SAMPLES:
            break
        newest.append(group)
    shared = shared_beginning({question(group.prompt) for group in newest})
    return [_group(group, shared) for group in newest]


def _group(group: RolloutGroup, shared: int) -> dict[str, Any]:
    asked = masked_line(question(group.prompt)[shared:])
    cut = "…" if len(asked) > QUESTION_CHARS else ""
    best_first = sorted(
        group.rollouts, key=lambda one: (not math.isnan(one.reward), one.reward), reverse=True
    )
    return {
        "step": group.step,
        "env": masked_line(group.env),
        "question": f"{'…' if shared else ''}{asked[:QUESTION_CHARS]}{cut}",
        "rewards": _spread(group),
        "dots": _dots(known_rewards(group.rollouts)),
        "prompt": _block(group.prompt, TEXT_CHARS),
        "samples": [_sample(one) for one in best_first],
    }


def _spread(group: RolloutGroup) -> str:
    known, made = known_rewards(group.rollouts), len(group.rollouts)
    whole = group.rollouts[0].group_size
    size = counted(made, "completion") + (f" of {whole}" if whole and whole > made else "")
    if lost := made - len(known):
        size += f", {lost} without a finite reward"
    if not known:
        return size
    low, high = number(min(known)), number(max(known))
    if len(set(known)) == 1:
        return f"{size}, {'reward' if len(known) == 1 else 'all with the reward'} {low}"
    spread = f"mean {number(mean(known))} ± {number(pstdev(known))}"
    return f"{size}, rewards from {low} to {high}, {spread}"


def _dots(known: Sequence[float]) -> list[float]:
    # Positions between lowest and highest in percent; none if all are equal.
    low, high = min(known, default=0.0), max(known, default=0.0)
    if not (math.isfinite(high - low) and high > low):
        return []
    return [100 * (reward - low) / (high - low) for reward in known]


def _sample(record: RolloutRecord) -> dict[str, str]:
    return {
        "completion": _block(record.completion, TEXT_CHARS),
        "reward": number(record.reward),
        "advantage": number(record.advantage),
        "lag": number(record.policy_lag, 0),
        "tokens": number(record.tokens, 0),
    }


_FACTS = {
    "run_id": "Run",
    "mode": "Mode",
    "model": "Model",
    "seed": "Seed",
    "profile": "Profile",
    "started_at": "Started",
    "resumed_at": "Resumed",
    "command": "Command",
    "host": "Host",
    "platform": "Platform",
    "python": "Python",
}


def _facts(run: RunDir, status: RunStatus) -> Rows:
    data = {key: value for key, value in read_json(run.run_json).items() if value is not None}
    if "${" in str(data.get("model")):
        data["model"] = _model_path(run) or data["model"]
    rows = [(title, _fact(key, data[key])) for key, title in _FACTS.items() if key in data]
    versions, git = data.get("versions"), data.get("git")
    if isinstance(versions, dict):
        rows += [(masked_line(name), masked_line(str(one))) for name, one in versions.items()]
    if isinstance(git, dict):
        changed = " with changes" if git.get("dirty") else ""
        rows.append(("Git commit", masked_line(str(git.get("commit"))) + changed))
    if status.phase is Phase.ENDED:
        rows.append(("End", _run_end(status.exit_code)))
        rows.append(("Reason", masked_line(status.reason) or "–"))
    return [*rows, ("Run directory", masked_line(str(run.root)))]


def _model_path(run: RunDir) -> str:
    # The profile keeps variables as references; the plan's commands have their values.
    components = read_json(run.plan_json).get("components")
    for component in components if isinstance(components, list) else ():
        command = component.get("command") if isinstance(component, dict) else None
        words = command if isinstance(command, list) else []
        for flag in ("--model", "--model-name"):
            if flag in words[:-1]:
                return str(words[words.index(flag) + 1])
    return ""


def _fact(key: str, value: object) -> str:
    if key.endswith("_at"):
        return _clock(real(value)) if isinstance(value, int | float) else masked_line(str(value))
    words = " ".join(map(str, value)) if isinstance(value, list) else value
    return masked_line(words if isinstance(words, str) else json.dumps(words, default=str))


def _profile(run: RunDir) -> str:
    # The run redacted its profile when it wrote it.
    try:
        return _block(read_regular(run.profile_toml), PROFILE_CHARS)
    except (OSError, UnicodeDecodeError):
        return ""


LINES = 50_000  # newest log lines that are searched, for each component
KINDS = 8  # newest kinds of errors that are kept, for each component
_FIGURES = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass
class Errors:
    component: str
    count: int
    kinds: list[tuple[float, int, str]]
    """Time of the newest, count and text; newest kind first."""


def errors_of(run: RunDir) -> list[Errors]:
    """Return each component's errors. Lines that differ in numbers only are one kind."""
    found = []
    for name in names_in(run.logs, folders=True):
        reader, classifier = LogReader(run.logs / name, "all"), Classifier()
        reader.skip(count=LINES)
        kinds: dict[str, tuple[float, int, str]] = {}
        count = 0
        for at, _, _, text, *_ in chain(reader.drain(), reader.rest()):
            # Lines inside a traceback belong to its error.
            is_first = not text.startswith((" ", "\t"))
            if classifier.kind(text) == "error" and is_first and text.strip():
                count += 1
                kind = _FIGURES.sub("#", text)
                # Pop and insert again: the dict is ordered by the newest line of each kind.
                kinds[kind] = at, kinds.pop(kind, (0.0, 0, ""))[1] + 1, masked_line(text)
        reader.close()
        if count:
            found.append(Errors(masked_line(name), count, list(kinds.values())[: -KINDS - 1 : -1]))
    return found


# Several runs.

# The first curve of each is drawn; held-out accuracy follows the reward.
LEARNING = ("reward", "useful", "entropy", "length", "kl", "loss", "grad")
DRAWN = (*LEARNING, "diff", "lag", "time", "tokens")
SMOOTHING = 10


def render_overlay(runs: Sequence[RunCurves], now: float) -> str:
    """Return the page as text that UTF-8 can encode; `now` in Unix seconds."""
    settings = by_setting(runs)
    reward, *others = DRAWN
    names = (reward, *splits(runs), *others)
    pictures = {}
    for along in Along:
        found = [chart for name in names if (chart := chart_over(name, settings, along))]
        pictures[along] = _pictures(found, along)
    tables = [("Final values", final_table(runs))]
    if spread := seeds_table(runs):
        tables.append(("Seeds of one setting: mean, lowest to highest", spread))
    if apart := settings_table(runs):
        tables.append(("Settings that differ", apart))
    title, last = " · ".join(one.label for one in settings), counted(last_steps(runs), "step")
    values = {"title": title, "count": len(runs), "pictures": pictures, "last": last}
    return _page("overlay.html.j2", now, tables=tables, **values)


def chart_over(name: str, settings: Sequence[Setting], along: Along) -> PageChart | None:
    """Draw the first curve of a chart, or an accuracy, for every setting; None without data."""
    accuracy = ChartSpec(f"Accuracy, {name}", (CurveSpec("accuracy", name),), low=0.0, high=1.0)
    spec = CHARTS.get(name, accuracy)
    found = lines(settings, spec.curves[0].metric, along, SMOOTHING)
    drawn = [_curve_of(one, at, spec) for at, one in enumerate(found, 1) if one is not None]
    span = max((one.smoothing for one in found if one is not None), default=0)
    note = f"Moving average over {span} points." if span else ""
    return PageChart(spec, drawn, [], note, over=along) if drawn else None


def _curve_of(found: MetricLine, colour: int, spec: ChartSpec) -> PageCurve:
    write = WRITERS[spec.unit]
    values = Series(range(len(found.values)), found.values, [0.0] * len(found.values))
    low, high = (found.low, found.high) if found.low else (found.values, found.values)
    return PageCurve(
        label=found.label,
        colour=colour,
        points=values,
        last=write(found.last),
        span=f"{write(min(low))} to {write(max(high))}",
        places=found.places,
        band=(found.low, found.high) if found.low else None,
        scatter=len(values) <= PLACES // 20,
    )
