"""Why did it die? Rules over exit code and last log lines, each giving a title, the evidence and the fix.

Rules are tried in order; the first that recognises its case speaks. `diagnose` may look at the machine (who holds a
port) and is called in a thread.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

from atropos_tui.stack import ports
from atropos_tui.stack.spec import ComponentSpec
from trainer_core.contracts.control import Role


@dataclass(frozen=True)
class Evidence:
    """What is known about an end.

    `exit_code` is negative for a signal, `lines` are the last of the log, `api` is what this stack calls its run-api.
    """

    spec: ComponentSpec
    exit_code: int
    lines: list[str]
    api: str = "api"

    def last(self, pattern: str) -> tuple[re.Match[str], str] | None:
        """The last line that matches, with its match."""
        for line in reversed(self.lines):
            if match := re.search(pattern, line, re.IGNORECASE):
                return match, line.strip()
        return None


@dataclass(frozen=True)
class Diagnosis:
    title: str
    evidence: str
    fix: str


Rule = Callable[[Evidence], Diagnosis | None]


def missing_module(found: Evidence) -> Diagnosis | None:
    if (hit := found.last(r"No module named '?([\w.]+)'?")) is not None:
        module = hit[0].group(1)
        where = f"install {module.partition('.')[0]} into the environment that runs {found.spec.name}"
        return Diagnosis(f"Python module {module} is missing", hit[1], f"{where}, or correct its module or cwd")
    if (hit := found.last(r"ImportError: .+")) is not None:
        fix = "installed versions do not fit each other: run `make install` in a fresh .venv"
        return Diagnosis("a Python import failed", hit[1], fix)
    return None


def port_in_use(found: Evidence) -> Diagnosis | None:
    hit = found.last(r"address already in use|errno 98|EADDRINUSE")
    if hit is None:
        return None
    number = re.search(r"(?:port |:|', )(\d{2,5})\b", hit[1])
    port = found.spec.port or (int(number.group(1)) if number else None)
    return port_taken(found.spec.name, port, hit[1])


def port_taken(name: str, port: int | None, evidence: str) -> Diagnosis:
    """The diagnosis for a port that someone else holds, naming them where the system tells."""
    holder = ports.holder(port) if port else None
    held = f"; held by {holder}" if holder else ""
    return Diagnosis(
        f"port {port or '?'} is in use",
        evidence + held,
        f"stop {holder or 'the process that holds it'}, or give {name} another port in the profile",
    )


def out_of_gpu_memory(found: Evidence) -> Diagnosis | None:
    hit = found.last(
        r"CUDA out of memory|OutOfMemoryError|No available memory for the cache blocks|Free memory on device"
    )
    if hit is None:
        return None
    fixes = {
        Role.ENGINE: "lower gpu_memory_utilization or max_model_len under [vllm], or use more GPUs",
        Role.TRAINER: "lower batch size or sequence length under [trainer], or gpu_memory_utilization under [vllm]",
    }
    return Diagnosis("GPU memory is exhausted", hit[1], fixes.get(found.spec.role, "free GPU memory: see nvidia-smi"))


def model_missing(found: Evidence) -> Diagnosis | None:
    hit = found.last(
        r"is not a local folder and is not a valid model identifier|Repository Not Found|RepositoryNotFoundError"
        r"|(?:model|config\.json|safetensors|tokenizer).*(?:No such file or directory|does not exist|not found)"
        r"|No such file or directory.*(?:config\.json|safetensors|tokenizer)"
        r"|Incorrect path_or_model_id|HFValidationError|Can't load tokenizer for|does not appear to have a file named"
    )
    if hit is None:
        return None
    return Diagnosis(
        "the model was not found", hit[1], "correct `model` in the profile: a folder with config.json, or a hub id"
    )


def trainer_not_registered(found: Evidence) -> Diagnosis | None:
    hit = found.last(r"Trainer not registered")
    if hit is None:
        return None
    return Diagnosis(
        "run-api has forgotten the trainer",
        hit[1],
        f"run-api keeps its state in memory: restart it with its partners (atropos-tui restart {found.api})",
    )


def bad_usage(found: Evidence) -> Diagnosis | None:
    hit = found.last(r"error: .+|usage: .+|unrecognized arguments.+|ValidationError.*")
    if found.exit_code != 2 or hit is None:
        return None
    return Diagnosis(f"{found.spec.name} refused its arguments", hit[1], "correct its section of the profile")


def not_executable(found: Evidence) -> Diagnosis | None:
    if found.exit_code not in (126, 127):
        return None
    hit = found.last(r"not found|cannot execute|permission denied")
    return Diagnosis(
        f"the command of {found.spec.name} cannot be run",
        hit[1] if hit else f"exit code {found.exit_code}: {found.spec.command[0]}",
        "install the program, or correct the command in the profile",
    )


def killed_by_signal(found: Evidence) -> Diagnosis | None:
    if found.exit_code >= 0:
        return None
    name = describe_exit(found.exit_code)
    if found.exit_code == -signal.SIGKILL:
        fix = "if nobody killed it, the kernel's out-of-memory killer did: see dmesg, and use less memory"
    elif found.exit_code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGABRT):
        fix = "a crash in native code: see the last log lines; a full /dev/shm shows as SIGBUS"
    else:
        fix = "someone sent that signal: atropos-tui stop is the way that keeps it stopped"
    return Diagnosis(f"killed by {name}", _last_words(found), fix)


def python_error(found: Evidence) -> Diagnosis | None:
    hit = found.last(r"^\s*(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Exit))(?::|$)")
    if hit is None:
        return None
    return Diagnosis(
        f"{found.spec.name} raised {hit[0].group(1)}", hit[1], f"atropos-tui logs {found.spec.name} shows it all"
    )


def generic(found: Evidence) -> Diagnosis:
    return Diagnosis(
        f"{found.spec.name} exited with code {found.exit_code}",
        _last_words(found),
        f"atropos-tui logs {found.spec.name} shows the whole log",
    )


RULES: tuple[Rule, ...] = (
    port_in_use,
    out_of_gpu_memory,
    missing_module,
    model_missing,
    trainer_not_registered,
    bad_usage,
    not_executable,
    killed_by_signal,
    python_error,
)


def diagnose(found: Evidence) -> Diagnosis:
    """The first rule that recognises the case, else the plain exit code with the last log line."""
    for rule in RULES:
        if (diagnosis := rule(found)) is not None:
            return diagnosis
    return generic(found)


def describe_exit(code: int) -> str:
    """`exit code 1` or `SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _last_words(found: Evidence) -> str:
    return next((line.strip() for line in reversed(found.lines) if line.strip()), "it printed nothing")
