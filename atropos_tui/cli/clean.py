"""`clean`: end and remove what runs left behind whose supervisor is gone, after saying what and asking.

    atropos-tui clean [--dry-run] [--yes] [--run-dir DIR]

Live runs are never touched, nothing is chosen by name or port, and run directories stay. Processes that were kept on
purpose (`survive = true`) are ended only when their run is named or each is confirmed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from atropos_common.run_dir import RunDir
from atropos_tui.cli import dead_runs, runs, show
from atropos_tui.cli.dead_runs import DeadRun
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.format import one_line
from atropos_tui.supervisor import leftovers, shared_memory

COMMAND_COLUMNS = 80


def clean(options: argparse.Namespace) -> int:
    """0: nothing is left; 2: not confirmed, or the run lives; 4: a process outlived SIGKILL; 5: no such run."""
    named = options.run_dir is not None
    found = [_named(options.run_dir)] if named else dead_runs.all_dead()
    kept = [] if named else [run for run in found if run.is_adoptable]
    chosen = [run for run in found if run not in kept and not run.is_clean]
    sockets = [] if named else _others(dead_runs.stale_sockets(), found)
    print(_report(chosen, kept, sockets), flush=True)
    if not named and (unknown := dead_runs.strangers()):
        print(_unknown(unknown), flush=True)
    if options.dry_run:
        return Exit.DONE
    if (chosen or sockets) and not options.yes and not _confirmed("end and remove these?"):
        chosen, sockets = [], []
    if kept and not options.yes and sys.stdin.isatty():
        chosen += [run for run in kept if _confirmed(f"end the processes that {run.run_id} keeps for adoption, too?")]
    codes = [_clean_run(run) for run in chosen]
    for path in sockets:
        path.unlink(missing_ok=True)
        print(f"removed  {path}")
    return max(codes, default=Exit.DONE)


def _named(run_dir: Path) -> DeadRun:
    """The run that --run-dir means; its folder may be gone as long as its processes tell of it."""
    try:
        entry = runs.pick(run_dir)
    except UserError:
        for run in dead_runs.strangers():
            if run_dir.resolve() == run.root or str(run_dir) == run.run_id:
                return run
        raise
    found = dead_runs.find_dead(entry.dir.root, entry.info)
    if found is None:
        raise UserError(
            f"{entry.info.get('run_id')} is live",
            [Problem("its supervisor runs", f"atropos-tui down --run-dir {run_dir}")],
        )
    return found


def _others(paths: list[Path], found: list[DeadRun]) -> list[Path]:
    named = {path for run in found for path in run.files}
    return [path for path in paths if path not in named]


def _report(chosen: list[DeadRun], kept: list[DeadRun], sockets: list[Path]) -> str:
    lines = []
    for run in chosen:
        lines += [f"{run.run_id}  {run.root}", *_contents(run)]
    if sockets:
        lines += ["sockets that nobody listens on", *(f"  file     {path}" for path in sockets)]
    for run in kept:
        lines += [
            f"{run.run_id} keeps {run.count_text} for adoption: atropos-tui up --resume {run.root}",
            *_contents(run),
        ]
    return "\n".join(lines) or "no run left anything behind"


def _contents(run: DeadRun) -> list[str]:
    rows = [
        ("  process ", str(p.pid), p.component or "?", one_line(p.command)[:COMMAND_COLUMNS]) for p in run.processes
    ]
    lines = show.table(rows, right=(1,)).split("\n") if rows else []
    lines += [f"  file     {path}" for path in run.files]
    return [*lines, f"  cgroup   {run.group}"] if run.group else lines


def _unknown(found: list[DeadRun]) -> str:
    lines = ["processes of runs that are not in the list of runs; name one to end them:"]
    for run in found:
        lines += [f"  atropos-tui clean --run-dir {run.run_id}   ({run.count_text}; {run.root})"]
    return "\n".join(lines)


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError(
            "not confirmed", [Problem("there is no terminal to ask", "look with --dry-run, then say --yes")]
        )
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _clean_run(run: DeadRun) -> int:
    """End and remove what is left of one run; says what it does."""
    if mine := dead_runs.ancestors() & {process.pid for process in run.processes}:
        fix = "run it from another terminal"
        raise UserError(f"this shell is a process of {run.run_id}", [Problem(f"pid {min(mine)}", fix)])
    with dead_runs.holding(RunDir(run.root)) as free:
        if not free:
            print(f"{run.run_id}: a supervisor has begun there meanwhile; not touched")
            return Exit.DONE
        shared = {path for process in run.processes for path in shared_memory.mapped_by(process.pid)}
        shared |= {str(path) for path in run.files if path.parent == dead_runs.SHARED_MEMORY}
        if run.processes or run.group:
            leftovers.reap(run.run_id, run.table)
        shared_memory.remove_unused(shared)
        for path in run.files:
            if path.parent != dead_runs.SHARED_MEMORY:
                path.unlink(missing_ok=True)
    left = {process.pid: process for process in leftovers.find(run.run_id, run.table)}
    for process in run.processes:
        if process.pid not in left:
            print(f"ended    {process.pid} {process.component}".rstrip())
    for name in sorted({*map(str, run.files), *shared, run.group} - {""}):
        print(f"{'kept, in use' if os.path.lexists(name) else 'removed '} {name}")
    for process in left.values():
        print(f"pid {process.pid} ({process.component or '?'}) outlived SIGKILL: only its driver or disk can let it go")
    return Exit.TIMEOUT if left else Exit.DONE
