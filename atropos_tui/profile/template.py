"""The text of a new profile, for `init`: a shipped profile with its comments, and a few keys that say something else.

Functions from data to data, but for reading the shipped file; whoever writes the text validates it first.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import Any

import tomli_w

from atropos_tui.profile.load import shipped_profiles
from atropos_tui.profile.modes import TRAITS
from atropos_tui.profile.sections import Mode

SCHEMA_FILE = "profile.schema.json"
"""Lies beside the profile, which points at it in its first line."""
SCRIPT = "script"
"""The kind of an environment that is a file of the user's own."""
TEMPLATES = {"gsm8k": "gsm8k", "arithmetic": "demo", "math-zero": "math-zero", SCRIPT: "gsm8k"}
"""The shipped profile that a kind of environment begins with."""
GPU_TEMPLATES = {"arithmetic": "demo-gpu"}
"""The same where the run has GPUs, if it is another one."""
Changes = dict[str, dict[str, Any]]
"""By table ("" is the top), new values of keys; None takes a key out."""


@dataclass(frozen=True)
class Answers:
    """What `init` asks; GPUs by index, none of them means a run on the CPU."""

    name: str
    kind: str
    script: str
    mode: Mode
    model: str
    vllm_gpus: list[int]
    trainer_gpus: list[int]
    api_port: int
    vllm_port: int


def default_model(kind: str) -> str:
    """The model of the shipped profile for this kind of environment."""
    return str(tomllib.loads(_template(TEMPLATES[kind]))["model"])


def profile_text(answers: Answers, *, file: str) -> str:
    """A whole profile with the comments of the shipped one; `file` is how its own head names it."""
    shipped = TEMPLATES[answers.kind]
    if answers.vllm_gpus:
        shipped = GPU_TEMPLATES.get(answers.kind, shipped)
    text = _template(shipped)
    top: dict[str, Any] = {"name": answers.name, "mode": answers.mode}
    if answers.model != default_model(answers.kind):
        top["model"] = answers.model
        text = _without_table(text, "prepare")  # which makes the template's own model
    env = {"name": "env", "module": None, "script": answers.script} if answers.kind == SCRIPT else {}
    changes: Changes = {"": top, "api": {"port": answers.api_port}, "env": env} | _placement(answers)
    for table, values in changes.items():
        text = _with(text, table, values)
    head = (
        f"#:schema ./{SCHEMA_FILE}\n"
        f"# Written by `atropos-tui init` after the shipped profile {shipped}. What each key means: docs/profiles.md.\n"
        f"#   atropos-tui up {file}\n"
    )
    return head + text


def _template(name: str) -> str:
    """A shipped profile without the comments at its head, which speak of that profile."""
    text = shipped_profiles()[name].read_text(encoding="utf-8")
    return text[re.search(r"^(?!#)", text, re.MULTILINE).start() :]  # type: ignore[union-attr]


def _placement(answers: Answers) -> Changes:
    """Where engine and trainer run."""
    vllm: dict[str, Any] = {"port": answers.vllm_port}
    if not answers.vllm_gpus:
        if answers.kind == "arithmetic":
            return {"vllm": vllm}
        args = {"enforce-eager": True, "kv-cache-memory-bytes": 2**32, "block-size": 32}
        trainer = {"gpus": None, "device": "cpu", "dtype": "float32"}
        return {"vllm": vllm | {"gpus": None, "gpu_memory_utilization": None}, "vllm.args": args, "trainer": trainer}
    vllm["gpus"] = answers.vllm_gpus
    if len(answers.vllm_gpus) > 1 and not TRAITS[answers.mode].shares_memory:
        vllm["tensor_parallel"] = len(answers.vllm_gpus)
    if answers.kind != "arithmetic" and not set(answers.vllm_gpus) & set(answers.trainer_gpus or answers.vllm_gpus):
        vllm["gpu_memory_utilization"] = 0.85
    return {"vllm": vllm, "trainer": {"gpus": answers.trainer_gpus or answers.vllm_gpus}}


def _with(text: str, table: str, values: dict[str, Any]) -> str:
    """TOML with other values in one table: a key keeps its line and comment, a new one comes last in the table."""
    header = re.search(rf"^\[{table}\].*\n", text, re.MULTILINE) if table else re.match("", text)
    if header is None:
        text += f"\n[{table}]\n"
    start = header.end() if header else len(text)
    following = re.compile(r"\n*^\[|\n*\Z", re.MULTILINE).search(text, start)
    end = following.start() if following else len(text)
    body = text[start:end]
    for key, value in values.items():
        line = re.search(rf"^{re.escape(key)} = .*?( *#.*)?$", body, re.MULTILINE)
        if line and value is None:
            body = body[: line.start()] + body[line.end() + 1 :]
        elif line:
            body = f"{body[: line.start()]}{key} = {_toml(value)}{line[1] or ''}{body[line.end() :]}"
        elif value is not None:
            body = f"{body.rstrip()}\n{key} = {_toml(value)}".lstrip("\n")
    return text[:start] + body.rstrip("\n") + (text[end:] or "\n")


def _without_table(text: str, name: str) -> str:
    """TOML without the tables called `name`."""
    return re.sub(rf"^\[+{name}\]+(?:.*\n)+?(?=^\[|\Z)", "", text, flags=re.MULTILINE)


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")
