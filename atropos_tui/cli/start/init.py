"""`init`: ask a few questions and write a valid profile.

    atropos-tui init                                  # asks
    atropos-tui init math.toml --yes --env math-zero  # asks nothing

The profile passes every check before it is written. No file is overwritten.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_common.system.run_dir import is_safe_name, safe_text
from atropos_tui.cli.answers import Written
from atropos_tui.cli.start.init_fit import CPU_CACHE, MOST_CPU_CACHE, fit_environment, fit_model
from atropos_tui.cli.start.init_text import Changes, by_table, with_changes, without_table
from atropos_tui.cli.start.profiles import Checked, checked, planned_site, schema_text
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.profile import ports
from atropos_tui.profile.budget.fit import lack, nearest
from atropos_tui.profile.budget.memory import Inventory, gpu_count, site_budget
from atropos_tui.profile.builders.environment import openenv_app
from atropos_tui.profile.checks.consistency import placed
from atropos_tui.profile.checks.preflight import lacks, mismatches, unfit
from atropos_tui.profile.checks.programs import user_module
from atropos_tui.profile.errors import did_you_mean, printable, value_text
from atropos_tui.profile.load import Origins, shipped_profiles
from atropos_tui.profile.profile import parse_profile
from atropos_tui.profile.schema import TITLE
from atropos_tui.profile.site import TRAITS
from atropos_tui.profile.source import is_verifiers_package
from trainer_core.config import Mode

SCHEMA_FILE = "profile.schema.json"
"""Named in the profile's first line."""
SCRIPT = "script"
"""Kind of an environment that is the user's own file or module."""
TEMPLATES = {"gsm8k": "gsm8k", "arithmetic": "demo", "math-zero": "math-zero", SCRIPT: "gsm8k"}
"""Kind of environment -> shipped profile that is the template."""
TAKEN = ("api", "vllm", "trainer")
"""Names of other components."""
GPU_TEMPLATES = {"arithmetic": "arithmetic-gpu"}
"""Templates with GPUs, where they differ."""
Given = dict[str, Any]
"""Question -> answer so far."""
WANTED = "wanted_vllm_port"
"""Value of --vllm-port, which the default of --api-port must leave free."""


@dataclass(frozen=True)
class Answers:
    """GPUs by index; an empty list means the CPU."""

    name: str
    kind: str
    program: dict[str, Any]
    """Keys and values of `[env]` for an environment that is the user's own."""
    tasks: str
    scorer: str | list[str]
    """Empty, or of an agent."""
    mode: Mode
    model: str
    vllm_gpus: list[int]
    trainer_gpus: list[int]
    api_port: int
    vllm_port: int


@dataclass(frozen=True)
class InitQuestion:
    name: str
    text: str
    default: Callable[[Given], str]
    parse: Callable[[str, Given], Any]
    """Raises ValueError for an invalid answer."""
    asked: Callable[[Given], bool] = lambda given: True

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


def init(options: argparse.Namespace) -> int:
    """Collect the answers and check the profile before anything is written."""
    if options.file is not None:
        _refuse_existing(options.file)
    if options.json and not options.yes:
        raise UserError(
            "--json requires --yes",
            [Problem("questions would mix with the JSON output", "add --yes")],
        )
    if not options.yes and not (sys.stdin.isatty() and sys.stdout.isatty()):
        problem = Problem(
            "stdin or stdout is not one", "add --yes, and flags for what differs from the defaults"
        )
        raise UserError("init asks questions and needs a terminal", [problem])
    # An answer's default may depend on earlier answers, so questions are taken in order in both
    # cases.
    given = _from_flags(options) if options.yes else _from_terminal(options)
    answers = Answers(**{key: given[key] for key in Answers.__dataclass_fields__})
    file = options.file or Path(f"{answers.name}.toml")
    _refuse_existing(file)  # again: without FILE, the path is known only now
    text, said = fitted(profile_text(answers, file=printable(str(file))), file)
    name = printable(str(file))
    profile = parse_profile(tomllib.loads(text), name, Origins(name, texts={name: text}))
    # The profile may be for another machine, so only its own mistakes keep it from being written.
    ready = checked(profile, file, planned_site(profile), machine=False)
    _write(file, text)
    done = Written(
        file=str(file),
        mode=profile.mode,
        components=[part.name for part in ready.stack.components],
        said=said,
        problems=[placed(each, profile) for each in mismatches(ready.site, ready.inventory)],
        lacking=[placed(each, profile) for each in _lacking(ready)],
    )
    if options.json:
        print(done.as_json())
        return Exit.DONE
    print(f"{file}: written, valid ({profile.mode}: {', '.join(done.components)})")
    if said:
        print(said)
    for title, problems in (
        ("fix these first:", done.problems),
        ("this machine cannot start it yet:", done.lacking),
    ):
        if problems:
            print("\n".join([title, *(f"  {problem}" for problem in problems)]))
    print(f"next: atropos-tui plan {file} · atropos-tui up {file}")
    return Exit.DONE


def _lacking(ready: Checked) -> list[Problem]:
    missing = lacks(ready.site, ready.stack, ready.inventory.machine)
    return [*missing, *unfit(ready.site, ready.inventory)]


def fitted(text: str, file: Path) -> tuple[str, str]:
    """Fit the profile to its environment, its model and this machine.

    Returns:
        The new text, and what was set and why, or why nothing fits.
    """
    # In this order: the memory depends on the lengths, which depend on the environment's own
    # settings.
    text, own = fit_environment(text)
    profile = parse_profile(tomllib.loads(text), printable(str(file)))
    inventory = checked(profile, file, planned_site(profile), machine=False).inventory
    text, lengths = fit_model(text, inventory)
    text, sizes = _fit_memory(text, file, inventory)
    return text, "\n".join(filter(None, [own, lengths, sizes]))


def _fit_memory(text: str, file: Path, inventory: Inventory) -> tuple[str, str]:
    profile = parse_profile(tomllib.loads(text), printable(str(file)))
    site = planned_site(profile)
    model = inventory.models[profile.vllm[0].name]
    if isinstance(model, str):
        return text, f"its memory use is not known: {model}" if inventory.machine.gpus else ""
    missing = lack(site_budget(site, inventory))
    if not missing:
        return text, ""
    found = nearest(site, inventory, fixed={"mode"}, most=1)  # the mode was an answer of the user
    if not found:
        return (
            text,
            f"no known setting makes it fit: {missing}; use a smaller model, or a mode with "
            f"adapters",
        )
    return with_changes(
        text, by_table(found[0].settings)
    ), f"set so that it fits: {found[0].text} ({missing})"


def _from_flags(options: argparse.Namespace) -> Given:
    """Take every answer from flags and defaults; report all mistakes at once."""
    given: Given = {WANTED: options.vllm_port}
    problems = []
    for question in QUESTIONS:
        text = getattr(options, question.name)
        try:
            given |= _answer(question, question.default(given) if text is None else text, given)
        except ValueError as error:
            reason = "is missing" if text is None else f"cannot be {value_text(text)}"
            problems.append(Problem(reason, str(error), key=question.flag))
            # Go on with the default, so that later questions can be checked as well.
            try:
                given |= _answer(question, question.default(given), given)
            except ValueError:
                break
    if problems:
        raise UserError("no profile was written", problems)
    return given


def _from_terminal(options: argparse.Namespace) -> Given:
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
                raise UserError(
                    "no answer", [Problem("the input has ended", "answer, or use --yes")]
                ) from None
    return given


def _ask(question: InitQuestion, given: Given) -> str:
    default = question.default(given)
    if not question.asked(given):
        return default
    print(
        f"{question.text} [{default or 'none'}]: ", end="", flush=True
    )  # `input(prompt)` would bypass the gate
    return input().strip() or default


def _answer(question: InitQuestion, text: str, given: Given) -> Given:
    value = question.parse(text.strip(), given)
    return value if question.name == "env" else {question.name: value}


def _env(text: str, given: Given) -> Given:
    if text in TEMPLATES and text != SCRIPT:
        return {"kind": text, "program": {}}
    file, colon, name = text.partition(":")
    if " " in text and not Path(file).exists():
        return _own("agent", _command(text))
    if file.endswith(".py"):
        if not Path(file).is_file():
            raise ValueError(f"no such file: {value_text(file)}")
        return _own("script", f"{Path(file).resolve()}{colon}{name}")
    if text.startswith(("http://", "https://")):
        return _own("openenv", text)
    if Path(text).is_dir():
        if is_verifiers_package(Path(text)):
            return _own("verifiers", str(Path(text).resolve()))
        if (Path(text) / "server/app.py").is_file():
            return _own("openenv", str(Path(text).resolve()))
        raise ValueError(
            "this folder has no environment of verifiers and no server/app.py of OpenEnv; give a "
            "script or a module"
        )
    folders = [".", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if _is_installed_verifiers(text, folders):
        return _own("verifiers", text)
    if all(part.isidentifier() for part in text.split(".")) and user_module(text, folders):
        served = user_module(openenv_app(text)[0].partition(":")[0], folders)
        return _own("openenv" if served else "module", text)
    if "." in text and all(part.isidentifier() for part in text.split(".")):
        raise ValueError(f"module {text} is neither installed nor in this folder")
    kinds = [kind for kind in TEMPLATES if kind != SCRIPT]
    raise ValueError(
        f"{did_you_mean(text, kinds)}give {', '.join(kinds)}, a script that ends in .py, or "
        f"package.module, an environment of verifiers by its id or folder, one of OpenEnv by its "
        f"package, folder or address, or an agent's command, such as 'python agent.py'"
    )


def _own(key: str, value: Any) -> Given:
    return {"kind": SCRIPT, "program": {key: value}}


def _command(text: str) -> list[str]:
    """Split a command; its files become absolute paths."""
    words = shlex.split(text)
    return [str(Path(word).resolve()) if Path(word).is_file() else word for word in words]


def _tasks(text: str, given: Given) -> str:
    if not _is_agent(given):
        if text:
            raise ValueError("it belongs to an agent; leave it out")
        return ""
    if Path(text).exists() and text:
        return str(Path(text).resolve())
    if ":" not in text:
        raise ValueError("an agent needs tasks: a file of JSON lines, a folder or module:function")
    return text


def _scorer(text: str, given: Given) -> str | list[str]:
    if text and not _is_agent(given):
        raise ValueError("it belongs to an agent; leave it out")
    return _command(text) if " " in text else text


def _is_agent(given: Given) -> bool:
    return "agent" in given["program"]


def _is_installed_verifiers(text: str, folders: list[str]) -> bool:
    # Ids of verifiers may have dashes where their packages have underscores.
    spec = user_module(text.replace("-", "_").lower(), folders) if text.isascii() else None
    places = (spec.submodule_search_locations or []) if spec else []
    return any(is_verifiers_package(Path(place)) for place in places)


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
        raise ValueError(
            "use letters, digits, dot, dash or underscore: at most 64, and a letter or digit first"
        )
    return text


def _gpus(text: str, given: Given) -> list[int]:
    words = text.replace(",", " ").split() if text != "none" else []
    # [:9]: a word of thousands of digits must not reach `int`, which refuses it with another error.
    if not all(word.isascii() and word.isdecimal() and int(word[:9]) < 1024 for word in words):
        raise ValueError('give GPUs by index, such as 0 or 0,1, or "none" for the CPU')
    return sorted({int(word) for word in words})


def _port(text: str, given: Given) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and 1 <= int(text) <= 65535):
        raise ValueError("give a whole number from 1 to 65535")
    if int(text) == given.get("api_port"):
        raise ValueError(f"run-api uses port {text}: give another one")
    return int(text)


def _free_port(first: int, given: Given, row: int = 1) -> str:
    """Return the first of `row` free ports, from `first` on."""
    used = (str(given.get("api_port")), given[WANTED])

    def is_free(port: int) -> bool:
        return str(port) not in used and ports.is_free(port)

    starts = range(first, 65537 - row)
    found = (port for port in starts if all(map(is_free, range(port, port + row))))
    return str(next(found, first))


def _vllm_gpus(given: Given) -> str:
    return "0" if gpu_count() else ""


def _trainer_gpus(given: Given) -> str:
    """The engine's GPUs in single copy or if there is no other, otherwise the first other one."""
    engine = given["vllm_gpus"]
    others = [gpu for gpu in range(gpu_count()) if gpu not in engine]
    chosen = engine if TRAITS[given["mode"]].shares_memory or not others else others[:1]
    return ",".join(map(str, chosen))


QUESTIONS = (
    InitQuestion(
        "env",
        "Environment: gsm8k, arithmetic, math-zero, your script.py or package.module, an "
        "environment of verifiers or OpenEnv, or an agent's command",
        lambda given: "gsm8k" if gpu_count() else "arithmetic",
        _env,
    ),
    InitQuestion(
        "tasks",
        "Tasks of the agent: a file of JSON lines, a folder or module:function",
        lambda given: "tasks.jsonl" if _is_agent(given) else "",
        _tasks,
        _is_agent,
    ),
    InitQuestion(
        "scorer",
        "Scorer of the agent: module:function or a command; without one, its last line",
        lambda given: "",
        _scorer,
        _is_agent,
    ),
    InitQuestion(
        "mode", f"How weights reach vLLM: {', '.join(TRAITS)}", lambda given: "shared_vllm", _mode
    ),
    InitQuestion(
        "model",
        "Model, a directory or a hub id",
        lambda given: default_model(given["kind"]),
        _model,
    ),
    InitQuestion(
        "name",
        "Name",
        lambda given: _program_name(given["program"]) or given["kind"],
        _name,
    ),
    InitQuestion("vllm_gpus", "GPUs of vLLM", _vllm_gpus, _gpus),
    InitQuestion(
        "trainer_gpus",
        "GPUs of the trainer",
        _trainer_gpus,
        _gpus,
        lambda given: bool(given["vllm_gpus"]) and not TRAITS[given["mode"]].shares_memory,
    ),
    InitQuestion("api_port", "Port of run-api", lambda given: _free_port(8000, given), _port),
    # `per_gpu = "auto"` may start a second engine, at the next port.
    InitQuestion("vllm_port", "Port of vLLM", lambda given: _free_port(9001, given, 2), _port),
)


def _refuse_existing(file: Path) -> None:
    if os.path.lexists(file):
        problem = Problem(
            "the file exists and would be overwritten",
            "name another FILE",
            file=printable(str(file)),
        )
        raise UserError("no profile was written", [problem])


def _write(file: Path, text: str) -> None:
    """Write the profile and its schema; leave a schema of another program alone."""
    schema = file.parent / SCHEMA_FILE
    try:
        if not schema.exists() or f'"title": "{TITLE}"' in schema.read_text(
            encoding="utf-8", errors="replace"
        ):
            schema.write_text(schema_text(), encoding="utf-8")
        else:
            print(
                f"{schema} belongs to another program and is kept; `atropos-tui schema -o "
                f"FILE` writes ours"
            )
        # Mode x: a file that appeared since the check is not overwritten.
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        problem = Problem(
            str(error.strerror), "choose another FILE", file=printable(str(error.filename or file))
        )
        raise UserError("the profile cannot be written", [problem]) from None


def default_model(kind: str) -> str:
    """Model of the shipped profile for this kind."""
    return str(tomllib.loads(_template(TEMPLATES[kind]))["model"])


def profile_text(answers: Answers, *, file: str) -> str:
    """Text with the comments of its template; `file` is the path in its header."""
    shipped = TEMPLATES[answers.kind]
    if answers.vllm_gpus:
        shipped = GPU_TEMPLATES.get(answers.kind, shipped)
    text = _template(shipped)
    top: dict[str, Any] = {"name": answers.name, "mode": answers.mode}
    if answers.model != default_model(answers.kind):
        top["model"] = answers.model
        text = without_table(text, "prepare")  # it creates the template's own model
    env: dict[str, Any] = {}
    if answers.kind == SCRIPT:
        program = _program_name(answers.program)
        name = program if is_safe_name(program) and program not in TAKEN else "env"
        # None removes the template's own key.
        env = {"name": name, "module": None} | answers.program
        env |= {key: value for key in ("tasks", "scorer") if (value := getattr(answers, key))}
    changes: Changes = {"": top, "api": {"port": answers.api_port}, "env": env} | _placement(
        answers
    )
    changes["trainer"] = changes.get("trainer", {}) | _adapters(answers)
    text = with_changes(text, changes)
    head = (
        f"#:schema ./{SCHEMA_FILE}\n"
        f"# Written by `atropos-tui init` from the shipped profile {shipped}. All keys: "
        f"docs/reference, or `atropos-tui schema`.\n"
        f"#   atropos-tui up {file}\n"
    )
    return head + text


def _program_name(program: Mapping[str, Any]) -> str:
    """Last name of a module, file or folder as a safe name; empty without one."""
    return safe_text(_last_name(program)).lstrip("._-")[:64]


def _last_name(program: Mapping[str, Any]) -> str:
    for key, value in program.items():
        if key == "agent":
            return Path(next((word for word in value if word.endswith(".py")), value[0])).stem
        if "://" in value:
            return "openenv"
        return value.rpartition(".")[2] if key == "module" else Path(value.partition(":")[0]).stem
    return ""


def _template(name: str) -> str:
    """Shipped profile without the comments at its head."""
    text = shipped_profiles()[name].read_text(encoding="utf-8")
    return text[re.search(r"^(?!#)", text, re.MULTILINE).start() :]  # type: ignore[union-attr]


def _placement(answers: Answers) -> Changes:
    vllm: dict[str, Any] = {"port": answers.vllm_port}
    if not answers.vllm_gpus:
        if answers.kind == "arithmetic":  # its template is made for a CPU already
            return {"vllm": vllm}
        args: dict[str, Any] = {"enforce-eager": True, CPU_CACHE: MOST_CPU_CACHE, "block-size": 32}
        args |= dict.fromkeys(("distributed-executor-backend", "max-num-seqs"))  # for a GPU
        trainer = {"gpus": None, "device": "cpu", "dtype": "float32"}
        # Engine and trainer share the cores; threads that spin while they wait slow the others.
        threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2))}
        return {
            "vllm": vllm | dict.fromkeys(("gpus", "per_gpu", "gpu_memory_utilization")),
            # The engine fills its queue long before the trainer has made a step.
            "env.args": {"env.max_batches_offpolicy": 1},
            "vllm.env": threads | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            "vllm.args": args,
            "trainer": trainer,
            "trainer.env": threads,
        }
    vllm["gpus"] = answers.vllm_gpus
    if len(answers.vllm_gpus) > 1 and not TRAITS[answers.mode].shares_memory:
        vllm["tensor_parallel"] = len(answers.vllm_gpus)
    if answers.kind != "arithmetic" and not set(answers.vllm_gpus) & set(
        answers.trainer_gpus or answers.vllm_gpus
    ):
        vllm["gpu_memory_utilization"] = (
            0.85  # no trainer on these GPUs, so vLLM may take most of them
        )
    return {"vllm": vllm, "trainer": {"gpus": answers.trainer_gpus or answers.vllm_gpus}}


def _adapters(answers: Answers) -> dict[str, Any]:
    """Trainer settings of a mode with adapters: a higher learning rate than the full model's,
    and on one device the engine's base model."""
    if not TRAITS[answers.mode].lora:
        return {}
    rate = 1e-3 if answers.kind == "arithmetic" else 1e-4
    settings: dict[str, Any] = {"lr": rate, "lora_target_modules": ["all-linear"]}
    shares = (
        len(answers.vllm_gpus) < 2
        and (answers.trainer_gpus or answers.vllm_gpus) == answers.vllm_gpus
    )
    return settings | ({"single_copy": True} if shares and answers.mode == "lora_only" else {})
