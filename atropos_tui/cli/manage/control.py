"""Commands that act on a live run through its socket, and `attach`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from atropos_common.protocol.control import Action, CommandRequest
from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import show
from atropos_tui.cli.manage import runs
from atropos_tui.cluster import slurm
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.format import one_line
from atropos_tui.profile.errors import did_you_mean
from atropos_tui.supervisor.client import ControlClient, NoSupervisor, Refused

if TYPE_CHECKING:
    from atropos_tui.monitor.catalogue import Source
    from atropos_tui.monitor.run_list import RunRow
    from atropos_tui.supervisor.journal.store import RunResult

POLL_S = 0.1


def not_live(run_dir: Path) -> UserError:
    """Explain why nobody can act on this run."""
    from atropos_tui.monitor.run.run_files import living_supervisor
    from atropos_tui.supervisor.journal.store import ProcessTable, RunResult

    run = RunDir(run_dir)
    pid = living_supervisor(ProcessTable.load(run.journal_json))
    if pid and not run.result_json.exists():
        problem = Problem(
            f"it runs (pid {pid}), but its socket {run.control_sock} was moved or removed",
            f"kill {pid} ends the run as `down` does; then atropos-tui up --resume "
            f"{shlex.quote(str(run_dir))}",
        )
        return UserError(
            f"the supervisor of {run_dir.name} cannot be reached", [problem], Exit.TIMEOUT
        )
    return UserError(
        f"{run_dir.name} is not running",
        [_end_of(run, RunResult.load(run.result_json))],
        Exit.NO_RUN,
    )


def _end_of(run: RunDir, result: RunResult | None) -> Problem:
    # A finished run has nothing left to do unless it gets more steps.
    more = " --set trainer.training_steps=N" if result and result.exit_code == Exit.DONE else ""
    fix = (
        f"atropos-tui up --resume {shlex.quote(str(run.root))}{more} continues it; atropos-tui "
        f"runs lists all runs"
    )
    if result is None:
        return Problem("its supervisor died without recording an end", fix)
    ended = time.localtime(result.ended_at)
    today = ended[:3] == time.localtime()[:3]
    when = time.strftime("at %H:%M" if today else "on %Y-%m-%d at %H:%M", ended)
    return Problem(f"it ended {when} with exit code {result.exit_code}: {result.reason}", fix)


def act(options: argparse.Namespace) -> int:
    """`start`, `stop`, `restart`, `kill`: show what changes, ask, and follow the command to its
    end."""
    action: Action = options.action
    entry = runs.acted_on(options)
    slurm.require_here(entry.dir)
    try:
        recipe = asyncio.run(ControlClient(entry.dir.root).recipe(action, options.component))
        if options.dry_run:
            print(show.recipe_text(recipe))
            return Exit.DONE
        asks = not options.yes and action != "start" and sys.stdin.isatty()
        # Ask while no event loop runs: a running loop would keep ^C from ending the question.
        if asks and not show.confirmed(f"{show.recipe_text(recipe)}\ngo on?"):
            return Exit.DONE
        return asyncio.run(
            _carry_out(entry.dir.root, CommandRequest(action=action, component=options.component))
        )
    except Refused as refused:
        raise _refused(refused, options.component, entry) from None
    except NoSupervisor:
        raise not_live(entry.dir.root) from None


async def _carry_out(run_dir: Path, request: CommandRequest) -> int:
    socket = ControlClient(run_dir)
    accepted = await socket.command(request)
    while True:
        status = await socket.command_status(accepted.command_id)
        if status.status in ("done", "failed"):
            print(
                f"{status.action} {status.component or ''}: {status.status}  "
                f"{one_line(status.detail)}".rstrip()
            )
            return Exit.DONE if status.status == "done" else Exit.COMPONENT_FAILED
        await asyncio.sleep(POLL_S)


def _refused(refused: Refused, named: str, entry: runs.RunEntry) -> UserError:
    known = runs.component_names(entry)
    meant = did_you_mean(named, known) if named not in known else ""
    return UserError(
        f"refused: {refused.error}", [Problem(meant + refused.fix)] if meant or refused.fix else []
    )


async def bring_down(run_dir: Path, timeout_s: float | None) -> None:
    """Stop the stack and wait for its supervisor's end; an ended run is no error."""

    socket = ControlClient(run_dir)
    try:
        with contextlib.suppress(Refused):  # the run is ending already
            await socket.command(CommandRequest(action="down", timeout_s=timeout_s))
        while True:  # until the socket is gone
            await socket.status()
            await asyncio.sleep(POLL_S)
    except NoSupervisor:
        return


async def down(options: argparse.Namespace) -> int:
    """`down`: exit 0 once every process has ended."""
    entry = runs.acted_on(options)
    # A run may wait in SLURM's queue, run on another machine, or run here.
    if slurm.cancel_pending(entry.dir, entry.run_id):
        return Exit.DONE
    if (code := slurm.stop_there(entry.dir, options.timeout)) is not None:
        return code
    if not entry.is_live:
        raise not_live(entry.dir.root)
    await bring_down(entry.dir.root, options.timeout)
    print_end(entry.dir, Exit.DONE, to=sys.stdout)
    return Exit.DONE


def print_end(run: RunDir, code: int | None = None, *, to: TextIO | None = None) -> int:
    result = runs.read_result(run) or {
        "exit_code": code if code is not None else Exit.FAULT,
        "reason": "no result.json",
    }
    if result["exit_code"] in (Exit.DONE, Exit.INTERRUPTED):
        from atropos_tui.monitor.bench import benchmark_run, render_benchmarks

        figures = benchmark_run(run.root)
        if figures.steps or result["exit_code"] == Exit.DONE:
            print(render_benchmarks([figures]))
    print(
        show.ending(result),
        file=to or (sys.stderr if result["exit_code"] else sys.stdout),
        flush=True,
    )
    print(f"files: {run.root}")
    if not run.run_json.exists():
        what = "run.json is missing: the folder was deleted or moved while the run went on"
        print(f"{what}, and the figures are of what was written since")
    elif result["exit_code"] in (Exit.DONE, Exit.INTERRUPTED):
        whose = one_line(shlex.quote(str(run.root)))
        print(f"next: atropos-tui report {whose} -o report.html · atropos-tui replay {whose}")
    return int(result["exit_code"]) if code is None else code


async def wait(options: argparse.Namespace) -> int:
    from atropos_tui.monitor.run.run_files import GONE, supervisor_gone

    entry = runs.of(options)
    slurm.require_here(entry.dir)
    try:
        outcome = await ControlClient(entry.dir.root).wait(options.target, options.timeout)
    except Refused as refused:
        raise _refused(refused, options.target, entry) from None
    except NoSupervisor:
        _check_target(options.target, entry)
        result = runs.read_result(entry.dir)
        if (
            options.target == "done" and result is not None
        ):  # the run ended before this command began
            return int(result["exit_code"])
        if supervisor_gone(entry.dir):
            problem = Problem(
                GONE, f"atropos-tui up --resume {shlex.quote(str(entry.dir.root))} continues it"
            )
            raise UserError(
                f"{entry.dir.root.name} crashed", [problem], Exit.COMPONENT_FAILED
            ) from None
        raise not_live(entry.dir.root) from None
    if outcome.outcome == "timeout":
        print(f"timeout: {one_line(outcome.detail)}", file=sys.stderr)
        return Exit.TIMEOUT
    if options.target == "done" and (result := await _result_soon(entry)) is not None:
        return int(result["exit_code"])
    if outcome.outcome == "impossible":
        print(f"impossible: {one_line(outcome.detail)}", file=sys.stderr)
        return Exit.COMPONENT_FAILED
    return Exit.DONE


def _check_target(target: str, entry: runs.RunEntry) -> None:
    """Refuse an unknown target. Used without a supervisor, which otherwise does this."""
    known = runs.component_names(entry)
    if known and target not in ("ready", "done", *known):
        fix = f"{did_you_mean(target, known)}one of: ready, done, {', '.join(known)}"
        raise UserError(f"no component {target!r}", [Problem("not part of this run", fix)])


async def _result_soon(entry: runs.RunEntry) -> dict[str, Any] | None:
    """Wait for result.json, which appears just before the supervisor ends."""
    for _ in range(100):
        if (result := runs.read_result(entry.dir)) is not None:
            return result
        await asyncio.sleep(POLL_S)
    return None


def attach(options: argparse.Namespace) -> int:
    """Open the screen on a live run, or on the files of an ended one."""
    entry = runs.of(options)
    slurm.require_here(entry.dir)
    return open_screen(entry.dir, read_only=options.read_only)


def open_screen(run: RunDir, *, read_only: bool = False) -> int:
    """Open the screen; return 0 after a detach, the run's exit code after a stop of the stack."""
    if not sys.stdout.isatty():
        raise UserError(
            "no terminal", [Problem("the screen needs one", "use ps, logs and events instead")]
        )
    # Both lines save start-up time. Imports make no garbage, so the collector is off until the
    # screen turns it on. Pydantic's search for plugins would read the metadata of all packages.
    gc.disable()
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    from atropos_tui.ui import user_files
    from atropos_tui.ui.home.session import run_session

    last, choice = run_session(run_source(), run.root, read_only=read_only)
    if last != run.root and choice != "failed":
        # Another run, or the list, was left: the run of this command goes on.
        if last is not None and choice == "stop":
            asyncio.run(bring_down(last, timeout_s=None))
        elif last is not None:
            run = RunDir(last)
        choice = "detach"
    if choice == "failed":
        is_over = runs.read_result(run) is not None
        _print_if_open(user_files.crash_line(run.root, command="attach", is_over=is_over))
        return Exit.FAULT
    if choice == "detach" and runs.read_result(run) is not None:
        _print_if_open(
            f"the run has ended: {one_line(str(run.root))}\n  atropos-tui why · report · replay"
        )
        return Exit.DONE
    if choice == "detach":
        _print_if_open(f"detached; the run goes on: {run.root}\n  atropos-tui attach · ps · down")
        return Exit.DONE
    # The screen has sent `down` or seen the end; in both cases the supervisor may need a moment to
    # finish.
    asyncio.run(bring_down(run.root, timeout_s=None))
    return print_end(run)


def open_home(options: argparse.Namespace) -> int:
    """Open the list of runs; return 0, or the exit code of a run that was stopped there."""
    gc.disable()
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    from atropos_tui.ui import user_files
    from atropos_tui.ui.home.session import run_session

    last, choice = run_session(run_source())
    if choice == "failed":
        _print_if_open(f"the list of runs failed (traceback: {user_files.error_file()})")
        return Exit.FAULT
    if last is not None and choice == "stop":
        asyncio.run(bring_down(last, timeout_s=None))
        return print_end(RunDir(last))
    return Exit.DONE


def run_source() -> Source:
    """Access to all runs, for the list of the screen."""
    from atropos_tui.cli.manage import inspect
    from atropos_tui.monitor.catalogue import Source

    def row(root: Path) -> RunRow | None:
        entry = runs.read_run(root)
        return inspect.run_row(entry) if entry else None

    return Source(lambda: [entry.dir.root for entry in runs.all_runs()], row)


def _print_if_open(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # otherwise Python reports it again at exit
