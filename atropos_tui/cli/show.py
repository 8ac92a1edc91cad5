"""Text for terminals: events, component tables, ends of runs. Pure functions from messages to strings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from atropos_common.control import ComponentStatus, GpuStatus, Recipe, RunStatus, State
from atropos_common.records import CommandRecord, DiagnosisRecord, ProbeRecord, Record, StageRecord, StateRecord
from atropos_tui.monitor.format import bytes_text, duration, glyph_and_word, one_line
from atropos_tui.monitor.run_files import is_crashed
from atropos_tui.monitor.why import next_stage


def event_line(record: Record) -> str:
    """One record of supervisor.jsonl as one line (a diagnosis takes three)."""
    clock = time.strftime("%H:%M:%S", time.localtime(record.time))
    match record:
        case StateRecord():
            reason = f"  ({one_line(record.reason)})" if record.reason else ""
            return f"{clock}  {record.component or '':<14} {record.old} → {record.new}{reason}"
        case ProbeRecord():
            verdict = "passed" if record.ok else "failed"
            said = f"{record.probe} probe {verdict}  {one_line(record.detail)}"
            return f"{clock}  {record.component or '':<14} {said}".rstrip()
        case StageRecord():
            return f"{clock}  {record.component or '':<14} reached: {one_line(record.stage)}"
        case CommandRecord():
            target = f" {record.component}" if record.component else ""
            return (
                f"{clock}  command        {record.action}{target}: {record.status}  {one_line(record.detail)}".rstrip()
            )
        case DiagnosisRecord():
            return (
                f"{clock}  {record.component or '':<14} {one_line(record.title)}\n"
                f"{'':<10}evidence: {one_line(record.evidence)}\n{'':<10}fix: {one_line(record.fix)}"
            )
    return f"{clock}  {record.kind}"


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Aligned columns; the first row is the head."""
    right = set(right)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def ps_table(status: RunStatus, now: float | None = None) -> str:
    """The components of a run, as `ps` prints them."""
    now = time.time() if now is None else now
    gpu = ("GPU",) if any(component.gpu_bytes is not None for component in status.components) else ()
    head = ("COMPONENT", "ROLE", "STATE", "PID", "UPTIME", "RESTARTS", "MEMORY", *gpu, "CPU", "PORT", "NOTE")
    rows = [head, *(_ps_row(component, now, with_gpu=bool(gpu)) for component in status.components)]
    phase = "crashed" if is_crashed(status) else status.phase
    title = f"{status.run_id}  {status.mode}  {phase}" + (f"  ({one_line(status.reason)})" if status.reason else "")
    return "\n".join([f"{title}\n{table(rows, right=range(3, len(head) - 1))}", *map(_gpu_line, status.gpus)])


def _gpu_line(gpu: GpuStatus) -> str:
    """One card, whoever uses it."""
    busy = "" if gpu.utilization_percent is None else f", {gpu.utilization_percent} % busy"
    name = f" ({one_line(gpu.name)})" if gpu.name else ""
    return f"GPU {gpu.index}{name}: {bytes_text(gpu.used_bytes)} of {bytes_text(gpu.total_bytes)} used{busy}"


def _ps_row(component: ComponentStatus, now: float, *, with_gpu: bool) -> tuple[str, ...]:
    alive = component.pid is not None and component.started_at is not None
    note = component.waiting_for or component.diagnosis or component.reason
    if component.state is State.HEALTHY:
        stage = next_stage(component)
        note = f"waiting for: {stage.name}" if stage else ""
    return (
        component.name,
        component.role.value,
        glyph_and_word(component.state),
        str(component.pid or "-"),
        duration(now - component.started_at) if alive and component.started_at else "-",
        str(component.restarts),
        bytes_text(component.memory_bytes),
        *([bytes_text(component.gpu_bytes)] if with_gpu else []),
        "-" if component.cpu_percent is None else f"{component.cpu_percent:.0f}%",
        str(component.port or "-"),
        one_line(note),
    )


def recipe_text(recipe: Recipe) -> str:
    """The blast radius of a command."""
    target = f" {recipe.component}" if recipe.component else ""
    lines = [f"{recipe.action}{target}"]
    if recipe.stop:
        lines.append(f"  stops:  {' → '.join(recipe.stop)}")
    if recipe.start:
        lines.append(f"  starts: {' → '.join(recipe.start)}")
    if recipe.note:
        lines.append(f"  note:   {recipe.note}")
    return "\n".join(lines)


def ending(result: dict[str, Any]) -> str:
    """How a run ended; for a failure the component, its last lines and the fix."""
    code = result.get("exit_code")
    lines = [f"run ended with code {code}: {one_line(str(result.get('reason', '')))}"]
    last = result.get("last_lines") or []
    if code and last:
        lines.append(f"last lines of {result.get('component')}:")
        lines += [f"  | {one_line(str(line))}" for line in last]
    return "\n".join(lines)
