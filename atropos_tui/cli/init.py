"""`init`: a few questions, and a valid profile comes of it.

    atropos-tui init                                     # asks, with defaults for this machine
    atropos-tui init math.toml --yes --env math-zero     # asks nothing

The profile goes through the same checks as any other before it is written. No file is overwritten.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_common.run_dir import is_safe_name
from atropos_tui.cli.profiles import checked, planned_site, schema_text
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.profile import ports
from atropos_tui.profile.errors import did_you_mean, printable, value_text
from atropos_tui.profile.hardware import gpu_count
from atropos_tui.profile.modes import TRAITS
from atropos_tui.profile.schema import TITLE
from atropos_tui.profile.sections import Mode, parse_profile
from atropos_tui.profile.template import SCHEMA_FILE, SCRIPT, TEMPLATES, Answers, default_model, profile_text

Given = dict[str, Any]
"""Answers so far, by question."""
WANTED = "wanted_vllm_port"
"""What the flag says, which run-api's default must leave free."""


@dataclass(frozen=True)
class Question:
    """One thing to know: from its flag, from the terminal, else its default."""

    name: str
    text: str
    default: Callable[[Given], str]
    parse: Callable[[str, Given], Any]
    """Raises ValueError, in words, for an answer that cannot be."""
    asked: Callable[[Given], bool] = lambda given: True

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


def init(options: argparse.Namespace) -> int:
    """Ask or take flags, check, write. Nothing is written unless everything is right."""
    if options.file is not None:
        _refuse_existing(options.file)
    if not options.yes and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(
            "no terminal to ask on",
            [Problem("the questions need one", "add --yes, and flags for what differs from the defaults")],
        )
    given = _from_flags(options) if options.yes else _from_terminal(options)
    answers = Answers(**{key: given[key] for key in Answers.__dataclass_fields__})
    file = options.file or Path(f"{answers.name}.toml")
    _refuse_existing(file)
    text = profile_text(answers, file=printable(str(file)))
    profile = parse_profile(tomllib.loads(text), printable(str(file)))
    stack = checked(profile, file, planned_site(profile), machine=False)
    _write(file, text)
    print(f"{file}: written, valid ({profile.mode}: {', '.join(part.name for part in stack.components)})")
    try:
        checked(profile, file, planned_site(profile), machine=True)
    except UserError as error:
        print("this machine is not ready for it yet:")
        print("\n".join(f"  {problem}" for problem in error.problems))
    print(f"next: atropos-tui plan {file} · atropos-tui up {file}")
    return Exit.DONE


def _from_flags(options: argparse.Namespace) -> Given:
    """Every answer without asking; all mistakes at once."""
    given: Given = {WANTED: options.vllm_port}
    problems = []
    for question in QUESTIONS:
        text = getattr(options, question.name)
        try:
            given |= _answer(question, question.default(given) if text is None else text, given)
        except ValueError as error:
            problems.append(Problem(f"cannot be {value_text(text)}", str(error), key=question.flag))
            given |= _answer(question, question.default(given), given)
    if problems:
        raise UserError("no profile was written", problems)
    return given


def _from_terminal(options: argparse.Namespace) -> Given:
    """Ask what no flag says, again where the answer cannot be; Enter takes the default."""
    given: Given = {WANTED: options.vllm_port}
    print("Enter takes the value in brackets.")
    for question in QUESTIONS:
        flag = getattr(options, question.name)
        while True:
            try:
                given |= _answer(question, _ask(question, given) if flag is None else flag, given)
                break
            except ValueError as error:
                print(f"  {error}")
                flag = None
            except EOFError:
                raise UserError("no answer", [Problem("the input has ended", "answer, or use --yes")]) from None
    return given


def _ask(question: Question, given: Given) -> str:
    default = question.default(given)
    if not question.asked(given):
        return default
    return input(f"{question.text} [{default or 'none'}]: ").strip() or default


def _answer(question: Question, text: str, given: Given) -> Given:
    value = question.parse(text.strip(), given)
    return value if question.name == "env" else {question.name: value}


def _env(text: str, given: Given) -> Given:
    """The kind of environment, and the script where it is one's own."""
    if text in TEMPLATES and text != SCRIPT:
        return {"kind": text, "script": ""}
    if text.endswith(".py"):
        if not Path(text).is_file():
            raise ValueError(f"no such file: {value_text(text)}")
        return {"kind": SCRIPT, "script": str(Path(text).resolve())}
    kinds = [kind for kind in TEMPLATES if kind != SCRIPT]
    raise ValueError(f"{did_you_mean(text, kinds)}give {', '.join(kinds)}, or a script that ends in .py")


def _mode(text: str, given: Given) -> Mode:
    if text in TRAITS:
        return text
    raise ValueError(f"{did_you_mean(text, list(TRAITS))}choose one of: {', '.join(TRAITS)}")


def _model(text: str, given: Given) -> str:
    if not text:
        raise ValueError("give a directory or a hub id")
    return text


def _name(text: str, given: Given) -> str:
    if not is_safe_name(text):
        raise ValueError("use letters, digits, dot, dash or underscore: at most 64, and a letter or digit first")
    return text


def _gpus(text: str, given: Given) -> list[int]:
    words = text.replace(",", " ").split() if text != "none" else []
    if not all(word.isascii() and word.isdecimal() and int(word[:9]) < 1024 for word in words):
        raise ValueError('give GPUs by index, such as 0 or 0,1, or "none" for the CPU')
    return sorted({int(word) for word in words})


def _port(text: str, given: Given) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and 1 <= int(text) <= 65535):
        raise ValueError("give a whole number from 1 to 65535")
    if int(text) == given.get("api_port"):
        raise ValueError(f"run-api has port {text}: give another one")
    return int(text)


def _free_port(first: int, given: Given) -> str:
    used = (str(given.get("api_port")), given[WANTED])
    return str(next((port for port in range(first, 65536) if str(port) not in used and ports.is_free(port)), first))


def _vllm_gpus(given: Given) -> str:
    return "0" if gpu_count() else ""


def _trainer_gpus(given: Given) -> str:
    """The engine's own in single copy and where there is only one, else the next one."""
    engine = given["vllm_gpus"]
    others = [gpu for gpu in range(gpu_count()) if gpu not in engine]
    chosen = engine if TRAITS[given["mode"]].shares_memory or not others else others[:1]
    return ",".join(map(str, chosen))


QUESTIONS = (
    Question("env", "Environment: gsm8k, arithmetic, math-zero or your script.py",
             lambda given: "gsm8k" if gpu_count() else "arithmetic", _env),
    Question("mode", f"How weights reach vLLM: {', '.join(TRAITS)}", lambda given: "shared_vllm", _mode),
    Question("model", "Model, a directory or a hub id", lambda given: default_model(given["kind"]), _model),
    Question("name", "Name", lambda given: Path(given["script"]).stem if given["script"] else given["kind"], _name),
    Question("vllm_gpus", "GPUs of vLLM", _vllm_gpus, _gpus),
    Question("trainer_gpus", "GPUs of the trainer", _trainer_gpus, _gpus,
             lambda given: bool(given["vllm_gpus"]) and not TRAITS[given["mode"]].shares_memory),
    Question("api_port", "Port of run-api", lambda given: _free_port(8000, given), _port),
    Question("vllm_port", "Port of vLLM", lambda given: _free_port(9001, given), _port),
)  # fmt: skip


def _refuse_existing(file: Path) -> None:
    if os.path.lexists(file):
        raise UserError(
            "that file exists", [Problem("it would be overwritten", "name another FILE", file=printable(str(file)))]
        )


def _write(file: Path, text: str) -> None:
    """The profile, and the schema beside it; a schema that is not ours is left alone."""
    schema = file.parent / SCHEMA_FILE
    try:
        if not schema.exists() or f'"title": "{TITLE}"' in schema.read_text(encoding="utf-8", errors="replace"):
            schema.write_text(schema_text(), encoding="utf-8")
        else:
            print(f"{schema} is another program's file and stays; `atropos-tui schema -o FILE` writes ours")
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise UserError(
            "the profile cannot be written",
            [Problem(str(error.strerror), "choose another FILE", file=printable(str(error.filename or file)))],
        ) from None
