"""All commands and flags of `atropos-tui`. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from atropos_tui import __version__

EPILOG = """exit codes: 0 done · 1 internal error · 2 usage or failed pre-flight ·
3 a component failed for good · 4 timeout · 5 no such run ·
130 interrupted, stack stopped cleanly"""


def build_parser() -> argparse.ArgumentParser:
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
    _results(commands)
    _caring(commands)
    _audit(commands)
    return parser


def command_names(parser: argparse.ArgumentParser) -> list[str]:
    (commands,) = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    return list(commands.choices)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    handler: str,
    text: str,
) -> Any:
    # Abbreviated flags would become ambiguous, and scripts would break, when a flag is added.
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(handler=handler)
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # false for nan as well
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0, e.g. 30")
    return value


def _count(text: str) -> int:
    if not (
        text.isascii() and text.isdecimal()
    ):  # `int` also takes "1_0", " 1" and digits of other scripts
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0, e.g. 100")
    return int(text)


def _speed(text: str) -> float:
    """Playback speed from 1/16 to 4096, such as `8x`."""
    try:
        value = float(text.removesuffix("x"))
    except ValueError:
        value = math.nan
    if not 0.0625 <= value <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is not a speed from 0.0625 to 4096, e.g. 8")
    return value


def _profile_arguments(parser: argparse.ArgumentParser, *, or_resume: bool = False) -> None:
    text = "a path, or the name of a shipped profile" + (
        " (--resume: the run's own)" if or_resume else ""
    )
    parser.add_argument("profile", metavar="PROFILE", nargs="?" if or_resume else None, help=text)
    _sets(parser, "override a key, e.g. trainer.lr=1e-4")


def _sets(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--set", metavar="KEY=VALUE", dest="sets", action="append", default=[], help=text
    )


REMOTE = "user@host or user@host:RUN for a run on another machine, over ssh"
NAMED = "a run's directory, id or name, or a unique prefix of its id"
RUN = f"{NAMED} (default: the latest live run, otherwise the latest); {REMOTE}"
ACTED_ON = f"{NAMED} (default: the only live run); {REMOTE}"


def _run_argument(
    parser: argparse.ArgumentParser, text: str = RUN, *, positional: bool = True
) -> None:
    """Add `[RUN]` and `--run-dir`."""
    # Both name the run, so giving both is a mistake.
    where = parser.add_mutually_exclusive_group()
    if positional:
        where.add_argument("run", metavar="RUN", type=Path, nargs="?", help=text)
    where.add_argument(
        "--run-dir", metavar="DIR", type=Path, help="same as RUN" if positional else text
    )


def _up(commands) -> None:  # type: ignore[no-untyped-def]
    parser = _command(commands, "up", "start.up:up", "start a stack")
    _profile_arguments(parser, or_resume=True)
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--headless",
        action="store_true",
        help="stay in the foreground, print one line per event, end with the trainer",
    )
    how.add_argument("--detach", action="store_true", help="start in the background and return")
    how.add_argument(
        "--dry-run", action="store_true", help="with SLURM: only print the batch script"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--run-dir",
        metavar="DIR",
        type=Path,
        help="directory for the run's files (default: runs/NAME-TIME-ID)",
    )
    where.add_argument(
        "--resume", metavar="RUN", type=Path, help="continue a run from its last checkpoint"
    )
    # Handlers are names, not functions: importing them here would make `--help` slow.
    attach = _command(
        commands, "attach", "manage.control:attach", "open the screen of a running stack"
    )
    attach.add_argument(
        "--read-only", action="store_true", help="disable all commands in the screen"
    )
    _run_argument(attach)


def _profiles(commands) -> None:  # type: ignore[no-untyped-def]
    validate = _command(
        commands, "validate", "start.profiles:validate", "check a profile and list every problem"
    )
    _profile_arguments(validate)
    plan = _command(
        commands,
        "plan",
        "start.profiles:plan",
        "show what a profile would start: commands, order, ports",
    )
    _profile_arguments(plan)
    for parser in (validate, plan):
        parser.add_argument("--json", action="store_true", help="print JSON")
        text = (
            "check for other GPUs than this machine's, such as 8xH100, 2xH200, A100-40GB or 4x80GB"
        )
        parser.add_argument("--gpus", metavar="GPUS", help=text)
    text = "print the JSON Schema of a profile, for editors, or of a command's --json output"
    schema = _command(commands, "schema", "start.profiles:schema", text)
    schema.add_argument(
        "command",
        metavar="COMMAND",
        nargs="?",
        help="such as ps, runs or events (default: a profile)",
    )
    schema.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write to FILE instead of standard output"
    )
    _init(commands)


def _init(commands) -> None:  # type: ignore[no-untyped-def]
    init = _command(
        commands, "init", "start.init:init", "ask a few questions and write a valid profile"
    )
    init.add_argument(
        "file", metavar="FILE", type=Path, nargs="?", help="file to write (default: NAME.toml)"
    )
    init.add_argument(
        "--json", action="store_true", help="print the result as JSON (requires --yes)"
    )
    init.add_argument(
        "-y",
        "--yes",
        action="store_true",
        help="do not ask: use defaults for flags that are not given",
    )
    init.add_argument(
        "--name", metavar="NAME", help="name of the stack, used as the prefix of run names"
    )
    init.add_argument(
        "--env",
        metavar="ENV",
        help="gsm8k, arithmetic, math-zero, your own script.py or package.module, an environment "
        "of verifiers by id or folder, one of OpenEnv by package, folder or address, or an "
        "agent's command in quotes",
    )
    init.add_argument(
        "--tasks", metavar="TASKS", help="an agent's tasks: a file, a folder or module:function"
    )
    init.add_argument(
        "--scorer",
        metavar="SCORER",
        help="an agent's scorer: module:function or a command in quotes",
    )
    modes = "shared_vllm, broadcast, lora_only, lora_restart or none"
    init.add_argument("--mode", metavar="MODE", help=f"how weights reach vLLM: {modes}")
    init.add_argument("--model", metavar="MODEL", help="a model's directory or hub id")
    init.add_argument("--vllm-gpus", metavar="N,N", help="GPUs of vLLM by index; '' for none (CPU)")
    init.add_argument("--trainer-gpus", metavar="N,N", help="GPUs of the trainer by index")
    init.add_argument(
        "--api-port", metavar="PORT", help="port of run-api (default: a free one from 8000)"
    )
    init.add_argument(
        "--vllm-port", metavar="PORT", help="port of vLLM (default: a free one from 9001)"
    )


def _acting(commands) -> None:  # type: ignore[no-untyped-def]
    for name, text in (
        ("start", "start a stopped component"),
        ("stop", "stop a component; the run goes on"),
        ("restart", "restart a component and those that must restart with it"),
        ("kill", "SIGKILL every process of a component"),
    ):
        parser = _command(commands, name, "manage.control:act", text)
        parser.set_defaults(action=name)
        parser.add_argument(
            "component", metavar="COMPONENT", help="name of a component, as `ps` lists it"
        )
        parser.add_argument("--yes", action="store_true", help="do not ask")
        parser.add_argument(
            "--dry-run", action="store_true", help="only show which components would stop and start"
        )
        _run_argument(parser, ACTED_ON)
    down = _command(commands, "down", "manage.control:down", "stop the whole stack")
    down.add_argument(
        "--timeout", metavar="S", type=_seconds, help="kill the remaining processes after S seconds"
    )
    _run_argument(down, ACTED_ON)
    wait = _command(
        commands,
        "wait",
        "manage.control:wait",
        "wait until the stack is ready, done, or a component is healthy",
    )
    # `dest`: `for` is a keyword of Python. Lower-case words of the metavar are completed as they
    # are.
    text = "ready: every component is healthy; done: the run has ended; or one component is healthy"
    wait.add_argument(
        "--for", dest="target", metavar="ready|done|COMPONENT", required=True, help=text
    )
    wait.add_argument(
        "--timeout",
        metavar="S",
        type=_seconds,
        default=600.0,
        help="give up after S seconds, with exit code 4 (default 600)",
    )
    _run_argument(wait)


def _watching(commands) -> None:  # type: ignore[no-untyped-def]
    ps = _command(commands, "ps", "manage.inspect:ps", "list the components of a run")
    ps.add_argument("-f", "--follow", action="store_true", help="then print a line for each change")
    ps.add_argument("--json", action="store_true", help="print JSON")
    _run_argument(ps)
    why = _command(
        commands,
        "why",
        "manage.inspect:why",
        "explain what a component waits for, or why it failed",
    )
    text = "a component, or a run by its directory, id or name; or both"
    # Completion reads the metavars: RUN and COMPONENT stand for the names that exist.
    why.add_argument("words", metavar="RUN|COMPONENT", nargs="*", help=text)
    why.add_argument("--json", action="store_true", help="print JSON")
    _run_argument(why, positional=False)
    _logs(commands)
    _events(commands)
    runs = _command(commands, "runs", "manage.inspect:list_runs", "list runs, newest first")
    runs.add_argument("--json", action="store_true", help="print JSON")
    runs.add_argument(
        "--limit",
        metavar="N",
        type=_count,
        help="show only the newest N, 0: all (default 20; --json: all)",
    )
    note = _command(commands, "note", "manage.notes:note", "show or write a run's note and tags")
    note.add_argument("run", metavar="RUN", type=Path, help=NAMED)
    note.add_argument("text", metavar="TEXT", nargs="?", help="replaces the note; '' removes it")
    for name, dest, text in (("--tag", "tags", "add a tag"), ("--untag", "untags", "remove a tag")):
        note.add_argument(name, metavar="TAG", dest=dest, action="append", default=[], help=text)


def _logs(commands) -> None:  # type: ignore[no-untyped-def]
    logs = _command(
        commands,
        "logs",
        "manage.logs:logs",
        "show the output of components, merged by time of arrival",
    )
    text = "components (default: all), and a run by its directory, id or name"
    logs.add_argument("words", metavar="RUN|COMPONENT", nargs="*", help=text)
    logs.add_argument("-f", "--follow", action="store_true", help="keep printing new lines")
    logs.add_argument(
        "-n", "--lines", metavar="N", type=_count, help="the last N lines overall (default 200)"
    )
    logs.add_argument(
        "--grep", metavar="RE", help="only lines that match the regular expression (RE2)"
    )
    logs.add_argument(
        "--since",
        metavar="TIME",
        help="only lines since a time: 5m ago (s, m, h, d), 14:30, or a date and time",
    )
    logs.add_argument(
        "--attempt", metavar="N|all", help="one attempt, or all (default: the latest)"
    )
    logs.add_argument("--no-prefix", action="store_true", help="omit time and component")
    logs.add_argument("--json", action="store_true", help="print one JSON object per line")
    _run_argument(logs, positional=False)


def _events(commands) -> None:  # type: ignore[no-untyped-def]
    events = _command(
        commands, "events", "manage.inspect:events", "show transitions, commands and diagnoses"
    )
    events.add_argument("-f", "--follow", action="store_true", help="keep printing new events")
    events.add_argument("--json", action="store_true", help="print one JSON object per line")
    events.add_argument(
        "--grep", metavar="RE", help="only events that match the regular expression (RE2)"
    )
    events.add_argument("--component", metavar="COMPONENT", help="only events of one component")
    events.add_argument(
        "--kind",
        metavar="KIND",
        help="only events of one kind: state, probe (health checks), stage, command or diagnosis",
    )
    _run_argument(events)


def _results(commands) -> None:  # type: ignore[no-untyped-def]
    report = _command(
        commands,
        "report",
        "results.report:report",
        "write one HTML page about a run, or about several on the same axes",
    )
    report.add_argument("runs", metavar="RUN", type=Path, nargs="*", help=RUN)
    report.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="default: RUN-report.html"
    )
    _rollouts(commands)
    replay = _command(commands, "replay", "results.report:replay", "play back a run in the screen")
    replay.add_argument("run", metavar="RUN", type=Path, nargs="?", help=RUN)
    replay.add_argument(
        "--speed", metavar="N", type=_speed, default=1.0, help="playback speed: 8 is 8x (default 1)"
    )
    replay.add_argument("--at", metavar="STEP", type=_count, help="start at this step")
    bench = _command(
        commands, "bench", "results.report:bench", "show the figures of existing runs, side by side"
    )
    bench.add_argument("runs", metavar="RUN", type=Path, nargs="*", help=RUN)
    bench.add_argument("--json", action="store_true", help="print JSON")
    _compare(commands)
    _sweep(commands)


def _rollouts(commands) -> None:  # type: ignore[no-untyped-def]
    rollouts = _command(
        commands,
        "rollouts",
        "results.rollouts:rollouts",
        "list recorded rollouts, or write them as JSONL",
    )
    rollouts.add_argument("--step", metavar="N", type=_count, help="only those of one step")
    rollouts.add_argument("--env", metavar="NAME", help="only those of one environment")
    rollouts.add_argument(
        "--grep", metavar="RE", help="only those whose text matches the regular expression (RE2)"
    )
    rollouts.add_argument(
        "--sort",
        choices=("newest", "score", "advantage", "lag", "tokens"),
        default="newest",
        help="newest first (default), or the lowest first",
    )
    rollouts.add_argument("--reverse", action="store_true", help="the other way round")
    rollouts.add_argument(
        "-n",
        "--limit",
        metavar="N",
        type=_count,
        help="only the first N, 0: all (default 20; --json and -o: all)",
    )
    rollouts.add_argument("--full", action="store_true", help="print whole conversations")
    rollouts.add_argument("--json", action="store_true", help="print one JSON object per line")
    rollouts.add_argument("-o", "--output", metavar="FILE", type=Path, help="write JSONL to FILE")
    _run_argument(rollouts)


def _compare(commands) -> None:  # type: ignore[no-untyped-def]
    compare = _command(
        commands,
        "compare",
        "results.compare:compare",
        "start several stacks, wait, and print their figures side by side",
    )
    compare.add_argument(
        "profiles",
        metavar="PROFILE",
        nargs="+",
        help="two or more paths or names; repeat a name to run it twice",
    )
    text = (
        "override a key of all stacks, or with LABEL:KEY=VALUE of one (labels: demo, demo-2, ...)"
    )
    _several(compare, text, "runs/compare-TIME")
    compare.add_argument(
        "--sequential", action="store_true", help="one after another (default: side by side)"
    )


def _sweep(commands) -> None:  # type: ignore[no-untyped-def]
    text = "run a profile with every combination of settings, and print one table"
    sweep = _command(commands, "sweep", "results.sweep:sweep", text)
    sweep.add_argument(
        "profile", metavar="PROFILE", nargs="?", help="a path, or the name of a shipped profile"
    )
    text = "a key and its values, such as trainer.lr=1e-5,1e-6 or seed=0..3; several make a grid"
    _several(sweep, text, "runs/sweep-NAME-TIME")
    text = "how many runs at once, GPUs permitting (default 1: one after another)"
    sweep.add_argument("--parallel", metavar="N", type=_count, default=1, help=text)
    text = "continue a sweep without repeating finished runs"
    sweep.add_argument("--resume", metavar="DIR", type=Path, help=text)


def _several(parser: argparse.ArgumentParser, sets: str, where: str) -> None:
    _sets(parser, sets)
    parser.add_argument("--steps", metavar="N", type=int, help="optimizer steps of each run")
    parser.add_argument(
        "--json", action="store_true", help="print figures as JSON, progress to stderr"
    )
    text = f"parent of the run directories (default: {where})"
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help=text)


def _caring(commands) -> None:  # type: ignore[no-untyped-def]
    doctor = _command(
        commands,
        "doctor",
        "doctor.command:doctor",
        "check this machine: one line per check, with the fix",
    )
    doctor.add_argument(
        "profile", metavar="PROFILE", nargs="?", help="also check what this profile needs"
    )
    instead = doctor.add_mutually_exclusive_group()
    instead.add_argument(
        "--notify",
        action="store_true",
        help="send one test notification with the profile's [notify]",
    )
    text = "check the machines that the profile runs on, and the network between them"
    instead.add_argument("--nodes", action="store_true", help=text)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    clean = _command(
        commands,
        "clean",
        "manage.cleanup:clean",
        "remove processes and files of runs whose supervisor died",
    )
    clean.add_argument("--yes", action="store_true", help="do not ask")
    clean.add_argument(
        "--dry-run", action="store_true", help="only show what would be ended and removed"
    )
    _run_argument(clean, "only this run: its directory, id or name")
    bundle = _command(
        commands,
        "bundle",
        "results.bundle:bundle",
        "pack a run for a support request, without secrets",
    )
    bundle.add_argument("run", metavar="RUN", type=Path, nargs="?", help=RUN)
    bundle.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="default: RUN-bundle-TIME.tar.gz"
    )
    text = "serve runs to agents, read-only: Model Context Protocol over stdin and stdout"
    mcp = _command(commands, "mcp", "results.mcp:serve", text)
    mcp.add_argument(
        "--allow-actions",
        action="store_true",
        help="let agents also start, stop and restart components",
    )
    completion = _command(
        commands, "completion", "completion:completion", "print a completion script for a shell"
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell to complete in")


def _audit(commands) -> None:  # type: ignore[no-untyped-def]
    audit = _command(
        commands,
        "audit",
        "results.audit:audit",
        "tell whether an engine serves the weights of a folder, and if not, why",
    )
    audit.epilog = "exit codes: 0 serves · 1 does not · 2 usage · 3 cannot tell"
    audit.add_argument(
        "--engine", metavar="URL", help="a vLLM or SGLang server, such as http://127.0.0.1:8000"
    )
    audit.add_argument(
        "--weights", metavar="FOLDER", type=Path, required=True, help="a Hugging Face folder"
    )
    audit.add_argument(
        "--adapter", metavar="FOLDER", type=Path, help="a LoRA adapter that should be applied"
    )
    audit.add_argument(
        "--older",
        metavar="FOLDER",
        type=Path,
        help="an earlier checkpoint or the base model, to recognize old weights",
    )
    audit.add_argument(
        "--rollouts",
        metavar="FILE",
        type=Path,
        help="recorded rollouts: JSONL, or a dump of TRL, verl or prime-rl",
    )
    text = "name of the model in requests (default: the only one that fits)"
    audit.add_argument("--model", metavar="NAME", help=text)
    audit.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype in which the engine should compute (default: the folder's)",
    )
    audit.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda or cuda:N for this side (default: what fits)"
    )
    audit.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        help="temperature that the logprobs should include (default 1)",
    )
    audit.add_argument(
        "--token-env", metavar="NAME", help="environment variable with the server's API key"
    )
    audit.add_argument("--seed", metavar="N", type=int, help="fixed prompts, to repeat an audit")
    audit.add_argument(
        "--timeout", metavar="S", type=_seconds, help="time limit in seconds (default 60)"
    )
    audit.add_argument(
        "--prompt-logprobs",
        action="store_true",
        help="compare prompts too; vLLM on a CPU crashes on it when LoRA is enabled",
    )
    audit.add_argument("--json", action="store_true", help="print JSON")
