"""`report` writes a run as an HTML page, `replay` plays it in the screen, `bench` prints its
figures."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from atropos_common.protocol.control import RunStatus
from atropos_common.system.files import write_private
from atropos_common.system.installation import install_command
from atropos_tui.cli.manage import inspect, runs
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.format import bytes_text
from atropos_tui.monitor.overlay import RunCurves, read_runs
from atropos_tui.profile.errors import printable

NEEDED = ("jinja2", "markupsafe", "matplotlib")


async def report(options: argparse.Namespace) -> int:
    entries = [runs.pick(run) for run in options.runs or [None]]
    first = entries[0]
    if len(entries) > 1:
        write(
            overlay(read_runs([entry.dir.root for entry in entries])),
            options.output or Path("runs-report.html"),
        )
    else:
        page = render(first, await _status(first))
        write(page, options.output or Path(f"{first.dir.root.name}-report.html"))
    return Exit.DONE


def write(page: str, path: Path) -> None:
    """Write a page that only this user can read: it holds prompts.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        # Write through a link: `write_private` replaces the file, and would replace the link
        # itself.
        path = path.resolve() if path.is_symlink() else path
        write_private(path, page)
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # ValueError: a NUL in the name; RuntimeError: a loop of links
        raise UserError(
            "the report cannot be written",
            [
                Problem(
                    getattr(error, "strerror", None) or str(error),
                    "choose another -o FILE",
                    printable(str(path)),
                )
            ],
        ) from None
    print(f"{path}  ({bytes_text(len(page.encode()))}; open it in a browser)")


@contextlib.contextmanager
def _needing() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in NEEDED:
            raise  # a broken installation of ours, which gets a report
        fix = install_command("report")
        raise UserError(
            "a report needs more packages", [Problem(f"{error.name} is not installed", fix)]
        ) from None


def render(entry: runs.RunEntry, status: RunStatus) -> str:
    with _needing():
        from atropos_tui.monitor.report import render_report
    return render_report(entry.dir, status, time.time())


def overlay(compared: Sequence[RunCurves]) -> str:
    with _needing():
        from atropos_tui.monitor.report import render_overlay
    return render_overlay(compared, time.time())


async def _status(entry: runs.RunEntry) -> RunStatus:
    from atropos_tui.supervisor.client import NotAnswering

    try:
        return await inspect.status_of(entry)
    except NotAnswering:
        return inspect.status_of_files(entry)


def replay(options: argparse.Namespace) -> int:
    """Play the run's records; exit 2 without a terminal or without records."""
    from atropos_tui.monitor.replay import Recording, Replay

    entry = runs.pick(options.run)
    recording = Recording.load(entry.dir)
    if not recording.records:
        raise UserError(
            "nothing to replay",
            [
                Problem(
                    "the run has no records",
                    "`atropos-tui runs` lists other runs",
                    str(entry.dir.root),
                )
            ],
        )
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        fix = "use `atropos-tui report` for a page, events and logs for text"
        raise UserError("no terminal", [Problem("the screen needs one", fix)])
    show = Replay(recording, options.speed)
    if options.at is not None:
        if (at := recording.time_of(options.at)) is None:
            raise UserError(
                "no such step",
                [Problem(f"--at {options.at} is past the run's last step", "choose a smaller one")],
            )
        show.clock.seek(at)
    from atropos_tui.ui import user_files
    from atropos_tui.ui.replay import run_replay

    if run_replay(show) == "failed":
        print(
            user_files.crash_line(entry.dir.root, command="replay", is_over=True), file=sys.stderr
        )
        return Exit.FAULT
    return Exit.DONE


def _sentence(entry: runs.RunEntry) -> str:
    from atropos_tui.monitor.run.run_files import load_run
    from atropos_tui.monitor.verdict import verdict

    info, state, _ = load_run(entry.dir.root)
    return verdict(inspect.status_without_socket(entry, info, state), info, state, time.time()).line


def bench(options: argparse.Namespace) -> int:
    """Print the BENCHMARK SUMMARY of each run, in the format of the Atropos guides."""
    from atropos_tui.monitor import bench as summary

    chosen = [runs.pick(path) for path in options.runs or [None]]
    figures = summary.benchmark_runs([entry.dir.root for entry in chosen])
    if len(chosen) == 1 and not options.json:
        print(_sentence(chosen[0]))
    print(summary.benchmarks_json(figures) if options.json else summary.render_benchmarks(figures))
    return Exit.DONE
