"""Find the environments of a checkout, how far each starts without an engine, and why one does not.

`find` reads them without running anything. `screen` runs each one's import, `config_init` and
`setup` as the stack would, up to the point where it asks run-api for a place. `why` says in words
what stopped one.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atropos_tui.profile.source import EnvSource

SET_UP = re.compile("waiting for (run-api|the inference server)")
"""The line of an environment whose import and `setup` went well, or whose `setup` asks the
model."""
NOBODY = "http://127.0.0.1:9"
"""A port where nobody listens."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "MPLBACKEND": "Agg",
}
"""Environment that reports an unreachable hub at once, not after a minute of tries."""
_ERROR = re.compile(
    r"^\S+ \S+ ERROR (?:__main__|atropos_envs\.hosting\.runner): (.*)$", re.MULTILINE
)
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.@+-]+/)+")
"""Folders of this machine, which are no part of a reason."""
_EXCEPTION = re.compile(
    r"^((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt))\b:? ?(.*)$", re.MULTILINE
)


@dataclass(frozen=True)
class Candidate:
    """A file with an environment class."""

    path: str
    """Within the checkout."""
    classes: tuple[str, ...]
    """Those that no other class of the file is derived from, in the order of the file."""
    names_itself: bool
    """Calls `cli()`, so that nobody has to choose a class."""
    trains: bool
    """Makes groups: some class has a `collect_trajectory` or `collect_trajectories` that does
    something."""

    @property
    def name(self) -> str:
        """A name for its files, and in a profile, where names end at 64 characters."""
        words = re.sub(r"\W+", "-", self.path.removeprefix("environments/").removesuffix(".py"))
        return words[-60:].strip("-_")

    @property
    def target(self) -> str:
        """Module or file that the runner gets."""
        return self.path if self.names_itself else f"{self.path}:{self.classes[-1]}"


def find(checkout: Path) -> list[Candidate]:
    """Files that define a subclass of atroposlib's `BaseEnv`, through classes of other files
    too."""
    trees: dict[str, ast.Module] = {}
    for path in sorted((checkout / "environments").rglob("*.py")):
        try:
            trees[str(path.relative_to(checkout))] = ast.parse(path.read_text(errors="replace"))
        except SyntaxError:
            continue
    classes = {
        name: [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for name, tree in trees.items()
    }
    envs = {"BaseEnv"}
    while new := {
        node.name
        for nodes in classes.values()
        for node in nodes
        if node.name not in envs and _bases(node) & envs
    }:
        envs |= new
    found = []
    for name, nodes in classes.items():
        mine = [node for node in nodes if node.name != "BaseEnv" and _bases(node) & envs]
        leaves = [node for node in mine if not any(node.name in _bases(other) for other in mine)]
        if leaves:
            calls = any(
                isinstance(node, ast.Attribute) and node.attr == "cli"
                for node in ast.walk(trees[name])
            )
            found.append(
                Candidate(name, tuple(n.name for n in leaves), calls, any(map(_makes_groups, mine)))
            )
    return found


def lacks(checkout: Path, path: str, stood_in: Sequence[str]) -> list[str]:
    """Return everything that a file needs and this machine lacks, by reading it: Python packages,
    data sets of a hub without a stand-in, and keys."""
    file = checkout / path
    source = EnvSource(file, [str(checkout), str(file.parent)])
    found = [f"the Python package {name}" for name in source.missing]
    for node in ast.walk(ast.parse(file.read_text(errors="replace"))):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = getattr(node.func, "id", getattr(node.func, "attr", ""))
        value = getattr(node.args[0], "value", None)
        if not isinstance(value, str):
            continue
        if called == "load_dataset" and value not in (*stood_in, "json", "csv", "parquet"):
            found.append(f"the data set {value}")
        if called in ("getenv", "get") and value.endswith("_API_KEY") and value not in os.environ:
            found.append(f"the key {value}")
    return list(dict.fromkeys(found))


def _bases(node: ast.ClassDef) -> set[str]:
    return {
        base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in node.bases
    }


def _makes_groups(node: ast.ClassDef) -> bool:
    """A class that inherits what makes groups counts as one that does."""
    methods = [
        n
        for n in node.body
        if isinstance(n, ast.AsyncFunctionDef) and n.name.startswith("collect_traj")
    ]
    return not methods or any(_does_something(method) for method in methods)


def _does_something(method: ast.AsyncFunctionDef) -> bool:
    """More than an exception or a constant answer."""
    body = [
        n
        for n in method.body
        if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
    ]
    return any(
        not isinstance(statement, (ast.Pass, ast.Raise, ast.Return)) for statement in body
    ) or any(isinstance(inner, ast.Await) for statement in body for inner in ast.walk(statement))


def flags(model: Path, args: dict[str, object]) -> list[str]:
    """Return the flags that a plan gives an environment, with addresses that nobody serves."""
    given = {
        "slurm": False,
        "env.rollout_server_url": NOBODY,
        "env.tokenizer_name": model,
        "env.use_wandb": False,
        "env.wandb_name": "screen",
        "env.total_steps": 1_000_000_000,
        "openai.base_url": f"{NOBODY}/v1",
        "openai.server_type": "vllm",
        "openai.model_name": model,
        "openai.api_key": "local",
    } | args
    return [word for name, value in given.items() for word in (f"--{name}", _word(value))]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def screen(
    target: Path,
    log: Path,
    words: list[str],
    env: dict[str, str],
    folder: Path,
    seconds: float = 90.0,
) -> bool:
    """Run it in a forked child until it is set up (True), ends, or the time is over (False). Output
    goes to `log`.

    A fork of this process, which has imported what all of them import, takes a tenth of a second
    instead of eight.
    """
    log.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _become(target, log, words, env, folder)
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            ended = bool(os.waitpid(child, os.WNOHANG)[0])
            child = 0 if ended else child
            if log.exists() and SET_UP.search(log.read_text(errors="replace")):
                return True
            if ended:
                return False
            time.sleep(0.1)
        return False
    finally:
        if child:
            with suppress(ProcessLookupError):  # it has no session of its own yet
                os.killpg(child, signal.SIGKILL)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _become(target: Path, log: Path, words: list[str], env: dict[str, str], folder: Path) -> None:
    """In the child: the runner's program."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, source in enumerate((null, descriptor, descriptor)):
        os.dup2(source, number)
    os.chdir(folder)
    os.environ |= env
    from atropos_envs.hosting import runner

    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep) if env.get("PYTHONPATH") else []
    sys.argv = ["runner", str(target), "serve", *words]
    try:
        runner.main()
    finally:
        os._exit(1)


REASONS: list[tuple[str, str]] = [
    (r"needs the Python package '([\w.]+)'", "needs the Python package {0}"),
    (
        r"(?:Couldn't reach|offline mode|OfflineModeIsEnabled|LocalEntryNotFound|Cannot "
        r"reach|hf\.co|huggingface\.co)"
        r"[^\n]*?['\"]([\w.-]+/[\w.-]+)['\"]",
        "needs the data set {0} from a hub",
    ),
    (
        r"['\"]([\w.-]+/[\w.-]+)['\"] (?:doesn't exist|on the Hub|is not a local)",
        "needs {0} from a hub",
    ),
    (
        r"(?:Couldn't reach|offline mode|OfflineMode|LocalEntryNotFound)",
        "needs a data set or model from a hub",
    ),
    (r"([A-Z][A-Z0-9_]*(?:API_KEY|TOKEN|_KEY))\b", "needs the key {0}"),
    (r"api_key client option must be set", "needs a key of OpenAI"),
    (r"(?i)\b(docker|playwright|chromium)\b", "needs {0}"),
    (
        r"cannot import name '(\w+)' from '([\w.]+)'",
        "{1} has no {0}: it is written for another version",
    ),
    (r"nltk\.download\(['\"](\w+)", "needs NLTK's data {0}"),
    (r"Name or service not known|Could not resolve host: (\S+?)\.? ", "needs the network {0}"),
    (r"No such file or directory: ['\"]([^'\"]+)['\"]", "needs the file {0}"),
    (r"(?:is abstract|abstract class (\w+))", "{0} lacks methods that BaseEnv asks for"),
]
"""Patterns in what stopped it, and what they say. The first that is found is the reason."""


def why(output: str) -> str:
    """The reason in a few words: of the last error that the runner said, else of the last
    exception."""
    said = [
        each for each in _ERROR.findall(output) if "*****" not in each
    ]  # NLTK's words are below its stars
    exceptions = [f"{name}: {text}".rstrip(": ") for name, text in _EXCEPTION.findall(output)]
    for text in [*said[-1:], *exceptions[::-1], output[-3000:]]:
        for pattern, words in REASONS:
            if match := re.search(pattern, text):
                return _FOLDERS.sub("", words.format(*match.groups(default=""))).strip()
    return _FOLDERS.sub("", (said or exceptions or ["says nothing"])[-1])[:160]
