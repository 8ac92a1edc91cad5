"""Explain why a component ended, from its exit code and last log lines.

`diagnose` may inspect the machine (which process holds a port), so call it in a thread.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from atropos_common.protocol.control import Role
from atropos_common.system.installation import install_stack
from atropos_common.system.run_dir import GAVE_UP_CODE, NO_UPDATE_CODE
from atropos_tui.diagnoses.log_rules import LOG_RULES
from atropos_tui.diagnoses.model import (
    ANSI,
    USUAL,
    Diagnosis,
    Layer,
    LogMatch,
    LogPattern,
    Names,
    Rule,
    shortened,
)
from atropos_tui.diagnoses.roots import is_passing, root_error
from atropos_tui.profile.spec import ComponentSpec

USAGE_LINE = r"^(?:[\w ./-]+: )?error: .+|^usage: .+|unrecognized arguments.+|ValidationError.*"
"""Error messages of argparse, click and pydantic."""
OWN_USAGE = (
    r"^(?:vllm_server|SmolLM2): .+|^atropos: cannot start .+|^\S+ \S+ ERROR atropos_envs\S* .+"
)
"""Errors of our own programs after which a restart cannot help."""
RANK_SIGKILL = re.compile(r"error: rank \d+ was killed by SIGKILL")


UNKNOWN_FLAGS = re.compile(r"unrecognized arguments: (.+)")
WRONG_FLAG = re.compile(r"error: argument (-.+)")
LONGEST_FLAG = 100


@dataclass(frozen=True)
class Evidence:
    """Facts about the end of a component; `exit_code` is negative for a signal."""

    spec: ComponentSpec
    exit_code: int
    lines: list[str]
    names: Names = USUAL
    above: tuple[str, ...] = ()
    """Lines before `lines`, searched for the cause only."""

    def __post_init__(self) -> None:
        # Without colours, which hide the beginning of a line from the rules.
        object.__setattr__(self, "lines", [ANSI.sub("", line) for line in self.lines])

    def last(self, pattern: str) -> tuple[re.Match[str], str] | None:
        for line in reversed(self.lines):
            if match := re.search(pattern, line, re.IGNORECASE):
                return match, line.strip()
        return None


@dataclass(frozen=True)
class ExitRule(Rule):
    """A rule for the end of a component. `title` and `fix` may contain `{name}` and groups of the
    match (`{0}`)."""

    fix: str = ""
    pattern: str = ""
    """The last matching log line is the evidence."""
    codes: tuple[int, ...] = ()
    judge: Callable[[Evidence], tuple[str, str, str] | None] | None = None
    """Returns title, evidence and fix, or None; replaces `pattern` and `codes`."""
    layer: Layer = field(default=Layer.PROCESS, kw_only=True)

    def explain(self, found: Evidence) -> Diagnosis | None:
        if self.judge is not None:
            case = self.judge(found)
            return self.stamp(Diagnosis(*case)) if case else None
        hit = found.last(self.pattern)
        if hit is None or (self.codes and found.exit_code not in self.codes):
            return None
        title, fix = (
            found.names.fill(text, *hit[0].groups(), name=found.spec.name)
            for text in (self.title, self.fix)
        )
        return self.diagnosis(hit[1], fix, title)


def not_executable(found: Evidence) -> tuple[str, str, str] | None:
    if found.exit_code not in (126, 127):
        return None
    hit = found.last(r"not found|cannot execute|permission denied")
    evidence = hit[1] if hit else f"exit code {found.exit_code}: {found.spec.command[0]}"
    fix = "install the program, or correct the command in the profile"
    return f"the command of {found.spec.name} cannot be run", evidence, fix


def refused_arguments(found: Evidence) -> tuple[str, str, str] | None:
    """Name the flags that argparse or pydantic refused."""
    if found.exit_code != 2 or (hit := found.last(USAGE_LINE)) is None:
        return None
    unknown, wrong = UNKNOWN_FLAGS.search(hit[1]), WRONG_FLAG.search(hit[1])
    flags = " ".join(word for word in unknown[1].split() if word.startswith("-")) if unknown else ""
    named = flags or (shortened(wrong[1], LONGEST_FLAG) if wrong else "")
    title = f"{found.spec.name} refused its arguments" + (f": {named}" if named else "")
    return title, hit[1], "correct its section of the profile"


def is_wrong_usage(found: Evidence) -> bool:
    hit = found.last(f"{USAGE_LINE}|{OWN_USAGE}") if found.exit_code == 2 else None
    return hit is not None and not is_passing(hit[1])


def killed_by_signal(found: Evidence) -> tuple[str, str, str] | None:
    # A program that handles the signal and exits reports it as 128 + N.
    if found.exit_code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        found = replace(found, exit_code=128 - found.exit_code)
    if found.exit_code >= 0:
        return None
    if found.exit_code == -signal.SIGKILL:
        fix = (
            "if nobody killed it, the kernel's out-of-memory killer did: see dmesg, and use less "
            "memory"
        )
    elif found.exit_code == -signal.SIGBUS:
        fix = (
            "check if /dev/shm is full: df -h /dev/shm; atropos-tui clean removes files of "
            "earlier runs there"
        )
    elif found.exit_code in (-signal.SIGSEGV, -signal.SIGILL, -signal.SIGABRT):
        fix = "read the last log lines: native code crashed"
    else:
        fix = "find out who sent the signal; to stop it for good, use atropos-tui stop"
    return f"killed by {describe_exit(found.exit_code)}", _last_line(found), fix


def made_no_update(found: Evidence) -> tuple[str, str, str] | None:
    """Recognise a trainer that made no update."""
    if found.spec.role is not Role.TRAINER or found.exit_code != NO_UPDATE_CODE:
        return None
    fix = (
        "correct the cause named in the evidence: masks, tokens or logprobs of the "
        "environment's groups; or lr, dtype "
        "or loss under [trainer]"
    )
    return (
        f"{found.spec.name} made no update, or none in its last steps",
        _error_line(found),
        fix,
    )


def gave_up(found: Evidence) -> tuple[str, str, str] | None:
    """Recognise a trainer that a restart would not help."""
    if found.spec.role is not Role.TRAINER or found.exit_code != GAVE_UP_CODE:
        return None
    title = f"{found.spec.name} gave up: a restart would end the same way"
    return title, _error_line(found), "the evidence names the cause and the way out"


def exited(found: Evidence) -> tuple[str, str, str]:
    fix = f"atropos-tui logs {found.spec.name} shows the whole log"
    return f"{found.spec.name} exited with code {found.exit_code}", _last_line(found), fix


BY_CODE = (
    ExitRule("no_update", "the trainer made no update", judge=made_no_update),
    ExitRule("gave_up", "the trainer gave up", judge=gave_up),
)
"""Rules of the exit code alone."""
BY_EXIT = (
    ExitRule(
        "env_package_missing",
        "{name} needs the Python package {0}",
        "install it where atropos-tui is installed (python -m pip install {0}, or what the "
        "environment's own "
        "requirements name: packages are not always called like their modules); one in "
        "another folder "
        'than the script: PYTHONPATH = "FOLDER" under [env.env]',
        r"the environment needs the Python package '(\w+)', which is not installed",
    ),
    ExitRule(
        "env_setup_failed",
        "the setup of {name} failed: {0}",
        "see which data set, file or service is missing: atropos-tui logs {name}. Data from "
        "a hub needs the network, "
        "or a filled cache and HF_HUB_OFFLINE=1 under [env.env]; set its own paths and names "
        "under [env.args]",
        r"the environment's setup failed: (\w+)",
    ),
    ExitRule(
        "missing_module",
        "Python module {0} is missing",
        "install {1} into the environment that runs {name}, or correct its module or cwd",
        r"No module named '?((\w+)[\w.]*)'?",
    ),
    ExitRule(
        "import_failed",
        "a Python import failed",
        f"installed versions do not fit together; in a fresh environment, {install_stack()}",
        r"ImportError: .+",
    ),
    ExitRule(
        "model_missing",
        "the model was not found",
        "correct `model` in the profile: a folder with config.json, or a hub id",
        r"is not a local folder and is not a valid model identifier|Repository Not "
        r"Found|RepositoryNotFoundError"
        r"|(?:model|config\.json|safetensors|tokenizer).*(?:No such file or directory|does "
        r"not exist|not found)"
        r"|No such file or directory.*(?:config\.json|safetensors|tokenizer)|Repo id must be "
        r"in the form"
        r"|Incorrect path_or_model_id|HFValidationError|does not appear to have a file named"
        r"|--model\S* .*(?:no such directory|no model there|no config\.json)",
    ),
    ExitRule("bad_usage", "a component refused its arguments", judge=refused_arguments),
    ExitRule(
        "rank_killed",
        "rank {0} of {name} was killed by {1}",
        "if nobody killed it, the kernel's out-of-memory killer did: see dmesg, and use less "
        "memory; SIGABRT and "
        "SIGSEGV are a crash in native code: atropos-tui logs {name}",
        r"^error: rank (\d+) was killed by (SIG\w+)",
        passing=True,
    ),
    ExitRule(
        "rank_failed",
        "rank {0} of {name} ended first, with exit code {1}",
        "atropos-tui logs {name} shows its error; the other ranks ended because of it",
        r"^error: rank (\d+) ended first, with exit code (\d+)",
    ),
    ExitRule("not_executable", "a command cannot be run", judge=not_executable),
    ExitRule("killed", "killed by a signal", judge=killed_by_signal, passing=True),
)
AT_LAST = (
    ExitRule(
        "python_error",
        "{name} raised {0}",
        "atropos-tui logs {name} shows the traceback",
        r"^\s*(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Exit))(?::|$)",
    ),
    ExitRule("exited", "a component exited", judge=exited),
)
"""Fallback rules; the last one always applies."""
EXIT_RULES = BY_CODE + BY_EXIT + AT_LAST
PASSING_RULES = frozenset(rule.name for rule in (*LOG_RULES, *EXIT_RULES) if rule.passing)


def diagnose(found: Evidence) -> Diagnosis:
    # The ranks that ended because of the killed one print errors that hide it.
    if killed := [line for line in found.lines if RANK_SIGKILL.match(line)]:
        found = replace(found, lines=killed)
    # Patterns with patience only show what the component waited for, so they come late.
    diagnosis = _first(BY_CODE, found) or _from_lines(found, waits=False) or _first(BY_EXIT, found)
    diagnosis = diagnosis or _from_lines(found, waits=True) or _first(AT_LAST, found)
    assert diagnosis is not None
    return diagnosis


def lasting_error(rule: str, lines: list[str]) -> str:
    """Return the error line that `rule` explains; empty if a retry can help."""
    line = root_error(lines)
    return "" if line is None or rule in PASSING_RULES or is_passing(line) else line


def _first(rules: tuple[ExitRule, ...], found: Evidence) -> Diagnosis | None:
    return next(
        (diagnosis for rule in rules if (diagnosis := rule.explain(found)) is not None), None
    )


def _from_lines(found: Evidence, *, waits: bool) -> Diagnosis | None:
    """`waits`: use patterns with `patience_s` that no later line cleared; else those without."""
    for rule in LOG_RULES:  # in order: the first match explains the exit
        if rule.at_exit and rule.concerns(found.spec.role):
            for pattern in rule.patterns:
                if (pattern.patience_s > 0) is waits and (
                    hit := _last_match(pattern, found.lines)
                ) is not None:
                    line, match = hit
                    groups = tuple(group or "" for group in match.groups())
                    around = (*found.above, *found.lines)
                    return rule.explain(
                        LogMatch(found.spec, found.names, line.strip(), groups, around)
                    )
    return None


def _last_match(pattern: LogPattern, lines: list[str]) -> tuple[str, re.Match[str]] | None:
    for line in reversed(lines):
        if (match := pattern.match(line)) is not None:
            return line, match
        if any(text in line for text in pattern.cleared_by):
            return None  # read backwards: everything above this line is cleared
    return None


def describe_exit(code: int) -> str:
    """`exit code 1` or `SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _error_line(found: Evidence) -> str:
    hit = found.last(r"^error: ")
    return hit[1] if hit else _last_line(found)


def _last_line(found: Evidence) -> str:
    return shortened(
        next((line for line in reversed(found.lines) if line.strip()), "it printed nothing")
    )
