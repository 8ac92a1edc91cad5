"""`up`: plan, check, write the run directory, then run in the foreground or hand over to a supervisor."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from atropos_common.run_dir import RunDir
from atropos_tui import __version__
from atropos_tui.cli import resume, runs, show
from atropos_tui.cli.attach import open_screen
from atropos_tui.cli.control import tell_end
from atropos_tui.cli.dead_runs import left_text, with_processes
from atropos_tui.cli.env_files import read_env_files, tell_unused
from atropos_tui.cli.printer import Printer
from atropos_tui.cli.profiles import checked
from atropos_tui.cli.run_files import write_run_files
from atropos_tui.cli.steps import StepLines
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.run_files import read_info
from atropos_tui.profile.errors import printable
from atropos_tui.profile.plan import make_site
from atropos_tui.profile.sections import Profile, load_profile
from atropos_tui.profile.spec import StackSpec

MAX_PATH = 120
"""Characters of a path in a message about it."""
SUPERVISOR_START_S = 90.0
"""Longer than the guard of a killed supervisor may take to finish with this directory."""


def up(options: argparse.Namespace) -> int:
    """Start a stack; the exit codes are those of `atropos_tui.errors.Exit`."""
    profile, file = load_profile(resume.profile_name(options), options.sets)
    dotenv = read_env_files(resume.first_profile(options) or file)
    root, run_id = _choose_run(options, profile)
    if left := left_text(with_processes(but={run_id})):
        print(left, file=sys.stderr)
    stack = checked(profile, file, make_site(profile, root, run_id=run_id, dotenv=dotenv), machine=True)
    tell_unused(dotenv, stack.variables)
    run = RunDir(root)
    if options.resume is not None:
        resume.tell_changes(run, profile)
    with _usable(root, options):
        run.create()
        write_run_files(run, stack, profile, version=__version__)
    runs.remember(run, run_id)
    if options.detach:
        spawn_supervisor(run, stack)
        print(f"{run_id} runs in the background: {one_line(str(root))}\n  atropos-tui attach · ps · down")
        return Exit.DONE
    if options.headless or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _headless(run, stack)
    spawn_supervisor(run, stack)
    return open_screen(run)


def _choose_run(options: argparse.Namespace, profile: Profile) -> tuple[Path, str]:
    """Directory and id of the run; a used directory is only taken to resume it."""
    if options.resume is not None:
        entry = runs.pick(options.resume)
        if entry.is_live:
            raise UserError("that run is live", [Problem(str(entry.dir.root), "atropos-tui attach")])
        return entry.dir.root, str(entry.info["run_id"])
    run_id = runs.new_run_id(profile.name)
    named = options.run_dir or Path("runs") / run_id
    with _usable(named, options):
        root = named.resolve()
        is_used = runs.is_used(root)
    if not _is_plain(str(root)):
        reason = f"{printable(str(root))} holds control characters or is not UTF-8"
        raise UserError("not a directory for a run", [Problem(reason, "choose a --run-dir without", key="--run-dir")])
    if is_used:
        raise UserError(
            "the run directory is in use",
            [Problem(f"{root} is not empty", f"choose another --run-dir, or continue it with --resume {root}")],
        )
    return root, run_id


@contextlib.contextmanager
def _usable(root: Path, options: argparse.Namespace) -> Iterator[None]:
    """A directory that cannot be made or written is a mistake of whoever chose it, not a fault of ours."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        reason = f"{printable(str(root), MAX_PATH)}: {getattr(error, 'strerror', None) or error}"
        fix = "choose a new or empty directory that you may write to"
        raise UserError(
            "the run directory cannot be used",
            [Problem(reason, fix, key="--resume" if options.resume is not None else "--run-dir")],
        ) from None


def _is_plain(text: str) -> bool:
    """Whether a terminal shows `text` as it is: no control characters, no bytes that are not UTF-8."""
    return one_line(text) == text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _headless(run: RunDir, stack: StackSpec) -> int:
    from atropos_tui.profile.graph import StackError
    from atropos_tui.supervisor.runner import run_stack
    from atropos_tui.supervisor.sockets import SocketError
    from atropos_tui.supervisor.store import RunInUseError

    print(f"{stack.run_id}: {one_line(str(run.root))}", flush=True)
    try:
        with Printer() as printer:
            lines = StepLines(run, read_info(run).training_steps, printer.say)
            code = asyncio.run(
                lines.beside(run_stack(stack, on_event=lambda record: printer.say(show.event_line(record))))
            )
    except (StackError, RunInUseError, SocketError) as error:
        raise UserError("the stack cannot be run", [Problem(str(error))]) from None
    return tell_end(run, code)


def spawn_supervisor(run: RunDir, stack: StackSpec) -> None:
    """Start the supervisor in a session of its own and wait until its socket answers.

    The spec goes through a pipe: it holds what must not be written to a file.
    """
    run.result_json.unlink(missing_ok=True)
    run.control_sock.unlink(missing_ok=True)  # of a supervisor that was killed with its guard: nobody listens there
    descriptor = os.open(run.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "atropos_tui.supervisor"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(stack.model_dump(mode="json")).encode())
    process.stdin.close()
    deadline = time.monotonic() + SUPERVISOR_START_S
    while not run.control_sock.exists():
        if process.poll() is not None and run.result_json.exists():
            return
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            code = Exit.USAGE if process.wait() == Exit.USAGE else Exit.FAULT
            tail = run.supervisor_log.read_text(errors="replace").splitlines()[-5:]
            raise UserError("the supervisor did not start", [Problem(line) for line in tail], code)
        time.sleep(0.02)
