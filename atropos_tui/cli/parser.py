"""All commands and flags of `atropos-tui`. Imports nothing heavy: `--help` answers at once."""

from __future__ import annotations

import argparse
from pathlib import Path

from atropos_tui import __version__

EPILOG = """exit codes: 0 done · 1 fault of ours · 2 usage or failed pre-flight · 3 a component failed for good ·
4 timeout · 5 no such run · 130 interrupted, stack stopped cleanly"""


def build_parser() -> argparse.ArgumentParser:
    """The parser; every command sets `handler` to "module:function" below `atropos_tui.cli`."""
    parser = argparse.ArgumentParser(
        prog="atropos-tui",
        description="Run the four-process Atropos RL stack from one TOML profile.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"atropos-tui {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _up(commands)
    _profiles(commands)
    _acting(commands)
    _watching(commands)
    return parser


def _command(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, handler: str, text: str):  # type: ignore[no-untyped-def]
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(handler=handler)
    return parser


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", metavar="PROFILE", help="a path, or the name of a shipped profile")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="sets",
        action="append",
        default=[],
        help="override a key, e.g. trainer.lr=1e-4",
    )


def _run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-dir", metavar="DIR", type=Path, help="the run (default: the newest live run, else the newest)"
    )


def _up(commands) -> None:  # type: ignore[no-untyped-def]
    parser = _command(commands, "up", "up:up", "start a stack")
    _profile_arguments(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--headless", action="store_true", help="stay in the foreground, one line per event, end with the trainer"
    )
    how.add_argument("--detach", action="store_true", help="start in the background and return")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--run-dir", metavar="DIR", type=Path, help="where the run's files go (default: runs/NAME-TIME-ID)"
    )
    where.add_argument("--resume", metavar="RUN", type=Path, help="continue a run from its last checkpoint")
    attach = _command(commands, "attach", "up:attach", "open the screen of a running stack")
    _run_argument(attach)


def _profiles(commands) -> None:  # type: ignore[no-untyped-def]
    _profile_arguments(_command(commands, "validate", "profiles:validate", "check a profile: every problem at once"))
    plan = _command(commands, "plan", "profiles:plan", "show what a profile would start: commands, order, ports")
    _profile_arguments(plan)
    plan.add_argument("--json", action="store_true", help="as JSON")
    _command(commands, "schema", "profiles:schema", "print the JSON Schema of a profile")


def _acting(commands) -> None:  # type: ignore[no-untyped-def]
    for name, text in (
        ("start", "start a stopped component"),
        ("stop", "stop a component; the run goes on"),
        ("restart", "restart a component, with whatever must go along"),
        ("kill", "SIGKILL every process of a component"),
    ):
        parser = _command(commands, name, f"control:{name}", text)
        parser.add_argument("component", metavar="COMPONENT")
        parser.add_argument("--yes", action="store_true", help="do not ask")
        parser.add_argument("--dry-run", action="store_true", help="show what would be touched, and do nothing")
        _run_argument(parser)
    down = _command(commands, "down", "control:down", "stop the whole stack")
    down.add_argument("--timeout", metavar="S", type=float, help="kill what is left after S seconds")
    _run_argument(down)
    wait = _command(commands, "wait", "control:wait", "wait until the stack is ready, done, or a component is healthy")
    wait.add_argument("--for", dest="target", metavar="ready|done|COMPONENT", required=True)
    wait.add_argument("--timeout", metavar="S", type=float, default=600.0)
    _run_argument(wait)


def _watching(commands) -> None:  # type: ignore[no-untyped-def]
    ps = _command(commands, "ps", "reading:ps", "list the components of a run")
    ps.add_argument("--json", action="store_true", help="as JSON")
    _run_argument(ps)
    why = _command(commands, "why", "reading:why", "what a component waits for, or why it failed")
    why.add_argument("component", metavar="COMPONENT", nargs="?")
    _run_argument(why)
    logs = _command(commands, "logs", "reading:logs", "show a component's log")
    logs.add_argument("component", metavar="COMPONENT")
    logs.add_argument("-f", "--follow", action="store_true", help="keep printing as it grows")
    logs.add_argument("-n", "--lines", metavar="N", type=int, default=200, help="the last N lines (default 200)")
    logs.add_argument("--grep", metavar="RE", help="only lines that match the regular expression")
    _run_argument(logs)
    events = _command(commands, "events", "reading:events", "show transitions, commands and diagnoses")
    events.add_argument("-f", "--follow", action="store_true", help="keep printing")
    events.add_argument("--json", action="store_true", help="one JSON object a line")
    _run_argument(events)
    runs = _command(commands, "runs", "reading:list_runs", "list runs, newest first")
    runs.add_argument("--json", action="store_true", help="as JSON")
    bench = _command(commands, "bench", "reading:bench", "print the benchmark summary of runs")
    bench.add_argument("runs", metavar="RUN", type=Path, nargs="*", help="run directories (default: the newest)")
    bench.add_argument("--json", action="store_true", help="as JSON")
