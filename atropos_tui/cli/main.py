"""Dispatch of commands, and the outermost error handling: a user's mistake becomes a message, an
internal error a report."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import importlib
import os
import platform
import resource
import sys
import tempfile
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path

from atropos_common.system.installation import REPOSITORY
from atropos_tui import __version__
from atropos_tui.cli.parser import build_parser, command_names
from atropos_tui.errors import LEAST_FILES, Elsewhere, Exit, Problem, UserError
from atropos_tui.streams import gated


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    with gated():
        return _run(argv)


def _run(argv: Sequence[str]) -> int:
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell completes a command line
        from atropos_tui.cli.completion import answer

        answer(parser)
    if not argv and not _is_on_terminal():
        return _introduce(parser)
    if argv and not argv[0].startswith("-") and argv[0] not in (known := command_names(parser)):
        _say(_no_command(argv[0], known))
        return int(Exit.USAGE)
    # `parse_known_args` leaves unknown words to us: a misplaced --set gets a message of its own.
    home = argparse.Namespace(handler="manage.control:open_home")
    options, unknown = parser.parse_known_args(argv) if argv else (home, [])
    if mistake := _misplaced_set(argv, getattr(options, "sets", []), unknown):
        _say(mistake)
        return int(Exit.USAGE)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    module, _, name = options.handler.partition(":")
    try:
        if any("@" in word for word in argv):  # user@host:RUN; all other commands save the import
            from atropos_tui.cluster import remote

            if (far := remote.place_in(argv)) is not None:
                return remote.over_ssh(*far)
        handler = getattr(importlib.import_module(f"atropos_tui.cli.{module}"), name)
        result = handler(options)
        return int(asyncio.run(result) if asyncio.iscoroutine(result) else result)
    except UserError as error:
        _say(error)
        return int(error.exit_code)
    except Elsewhere as there:
        return there.run([*argv])
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe, which is no failure. Without /dev/null as
        # stdout Python would report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.DONE)
    except Exception as error:
        if mistake := _of_this_shell(error):
            _say(mistake)
            return int(Exit.USAGE)
        return _report_fault(argv, getattr(options, "run_dir", None))


def _of_this_shell(error: Exception) -> UserError | None:
    """Explain an error whose cause is this shell: its current directory is removed, or its limit
    of open files is low."""
    if isinstance(error, FileNotFoundError) and _folder_is_gone():
        problem = Problem(
            "it was removed or replaced after this shell entered it", "cd to a folder that exists"
        )
        return UserError("the current directory does not exist any more", [problem])
    # With a usual limit, EMFILE is a leak of ours and gets a report.
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if isinstance(error, OSError) and error.errno == errno.EMFILE and limit < LEAST_FILES:
        return UserError(
            "too many open files",
            [Problem(f"a process here may open {limit} files", "ulimit -n 4096")],
        )
    return None


def _folder_is_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109
    except OSError:
        return True
    return False


def _is_on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _introduce(parser: argparse.ArgumentParser) -> int:
    from atropos_tui.cli.manage import runs

    parser.print_help()
    live = next((entry.run_id for entry in runs.all_runs() if entry.is_live), None)
    steps = (
        (("attach", f"open the screen of {live}"), ("why", "show what it waits for"))
        if live
        else ()
    )
    steps = (
        *steps,
        ("up demo", "train a tiny model on this machine's CPU"),
        ("doctor", "show what this machine lacks"),
    )
    print("\nnext:\n" + "\n".join(f"  atropos-tui {words:<10}{text}" for words, text in steps))
    return int(Exit.DONE)


def _no_command(word: str, known: Collection[str]) -> UserError:
    from atropos_tui.profile.errors import did_you_mean

    path = Path(word)
    # `atropos-tui my.toml` is a frequent slip for `atropos-tui up my.toml`.
    if path.suffix == ".toml" and path.is_file():
        fix = f"atropos-tui up {word} starts it"
    else:
        fix = f"{did_you_mean(word, known)}atropos-tui --help lists the commands"
    return UserError(f"no command {word!r}", [Problem(fix)])


def _misplaced_set(
    argv: Sequence[str], sets: Sequence[str], unknown: Sequence[str]
) -> UserError | None:
    """Error for a `--set` with several assignments, or with KEY and VALUE as two words."""
    given = [*argv]
    for item in sets:
        # Words after this --set and its argument; the next --set is searched only among them.
        words = given[given.index("--set") + 2 :] if "--set" in given else []
        given = words
        if "=" not in item and words and not words[0].startswith("-"):
            problem = Problem(
                f'"{item}" and "{words[0]}" are two words',
                f"write --set {item}={words[0]}",
                key="--set",
            )
            return UserError("invalid --set", [problem])
    if (
        several := [word for word in unknown if "=" in word and not word.startswith("-")]
        if sets
        else []
    ):
        fix = f"write {' '.join(f'--set {word}' for word in several)}"
        return UserError("invalid --set", [Problem("--set takes one KEY=VALUE", fix, key="--set")])
    return None


def _report_fault(argv: Sequence[str], run_dir: Path | None) -> int:
    """Write a report beside the run, or to a private temporary file, and print its path. Never
    raises."""
    from atropos_tui.profile.redact import hide_command

    versions = (
        f"atropos-tui {__version__}, Python {platform.python_version()}, {platform.platform()}"
    )
    report = f"{versions}\narguments: {hide_command(argv)}\n\n{traceback.format_exc()}"
    last = traceback.format_exc(limit=0).strip().splitlines()[-1]
    try:
        where = f"The report is in {_write_report(report, run_dir)}"
    except OSError as error:  # such as a full disk
        where = f"It cannot be written to a file ({error.strerror}); this is its text:\n{report}"
    print(
        f"atropos-tui: internal error: {last}\n  {where}; please file it at {REPOSITORY}/issues.",
        file=sys.stderr,
    )
    return int(Exit.FAULT)


def _write_report(report: str, run_dir: Path | None) -> Path:
    """Raises:
    OSError: even a temporary file cannot be written.
    """
    from atropos_common.system.run_dir import RunDir

    data = report.encode("utf-8", "backslashreplace")
    if run_dir is not None:
        # O_NOFOLLOW: the directory may be a copy from elsewhere, with a link under this name.
        path = RunDir(run_dir).fault_txt
        with contextlib.suppress(OSError):
            descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600
            )
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            return path
    descriptor, name = tempfile.mkstemp(prefix="atropos-tui-fault-", suffix=".txt")
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    return Path(name)


def _say(error: UserError) -> None:
    print(f"atropos-tui: {error}", file=sys.stderr)
