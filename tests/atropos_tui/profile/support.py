"""A valid profile, and the assertions for a broken one that is refused."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w

from atropos_tui.cli import main
from atropos_tui.errors import Exit
from atropos_tui.profile.ports import free_port

COMMANDS = (["validate"], ["plan"], ["up", "--headless"])
ONE_IN_CI = [COMMANDS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in COMMANDS[1:])]
"""For input that takes seconds: all of them read it by the same functions."""
MEGABYTE = 1024 * 1024


def make_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with a model beside it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def valid(folder: Path) -> dict[str, Any]:
    """A profile with every section and most keys, which `validate` accepts here."""
    probe = {
        "checks": [{"kind": "http", "url": "http://127.0.0.1/x"}, {"kind": "log", "pattern": "^ok"}]
    }
    return {
        "name": "p",
        "mode": "shared_vllm",
        "model": str(folder / "model"),
        "seed": 1,
        "api": {
            "port": free_port(),
            "host": "127.0.0.1",
            "env": {"A": "b"},
            "stop": {"signal": "INT", "grace_s": 1.5},
        },
        "env": [
            {
                "name": "a",
                "module": "json",
                "weight": 0.5,
                "args": {"env": {"group_size": 8}, "openai": {"x": 5}},
            },
            {"name": "b", "module": "json", "args": {"words": ["x", 1, True], "env.group_size": 8}},
        ],
        "vllm": {
            "port": free_port(),
            "gpus": [],
            "tensor_parallel": 1,
            "gpu_memory_utilization": 0.4,
            "max_model_len": 64,
            "dtype": "auto",
            "args": {"enforce-eager": True, "block-size": 32},
            "startup": probe,
            "restart": {"policy": "never", "backoff_s": 1, "max_restarts": 2},
            "start_timeout_s": 60,
        },
        "trainer": {
            "gpus": [],
            "processes": 1,
            "training_steps": 3,
            "batch_size": 16,
            "gradient_accumulation_steps": 1,
            "lr": 1e-4,
            "optimizer": "adamw",
            "device": "cpu",
            "dtype": "float32",
            "betas": [0.9, 0.99],
            "train_layer_indices": "0-1",
            "advantage_std": True,
            "depends_on": {"api": "healthy"},
        },
        "prepare": [{"name": "first", "command": ["true"], "creates": "/nowhere/made"}],
        "component": {"extra": {"role": "other", "command": ["sleep", "9"], "port": free_port()}},
        "logs": {"max_bytes": 4096},
        "notify": {"bell": True, "webhook": "${HOOK}", "on": ["done"]},
    }


def ask(command: list[str], profile: Path | str, *more: str) -> tuple[int, str]:
    """Exit code and what was printed to standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run([command[0], str(profile), *command[1:], *more])
    return code, err.getvalue()


def assert_refused(command: list[str], profile: Path | str, *more: str) -> str:
    """Exit 2, a fix for every problem, nothing a terminal would obey, nothing started, nothing
    left. Returns the text without line numbers."""
    if command[0] == "up":  # a test that is wrong must not start a stack
        assert ask(["validate"], profile, *more)[0] == Exit.USAGE, "validate accepts it"
    before = sorted(Path.cwd().parent.rglob("*"))
    children = _children()  # of earlier tests, perhaps
    code, text = ask(command, profile, *more)
    assert code == Exit.USAGE, f"{command}: exit {code}\n{text[:2000]}"
    assert_readable(text)
    assert sorted(Path.cwd().parent.rglob("*")) == before, "something was written"
    assert _children() <= children, "something was started"
    return re.sub(r"(\.toml):\d+: ", r"\1: ", text)


def _children() -> set[int]:
    """As the kernel lists them for each of our threads: thousands of refusals read no process
    table."""
    listed = list(Path("/proc/self/task").glob("*/children"))
    if not listed:  # a kernel without these files
        return {child.pid for child in psutil.Process().children()}
    return {int(pid) for children in listed for pid in children.read_text().split()}


def assert_readable(text: str) -> None:
    # What other runs on this machine have left behind, `up` tells first.
    text = re.sub(r"\Anote: .* still here: .*\n", "", text)
    # The message quotes the profile's values, which may be these words.
    assert not re.search(r"^Traceback|errors\.pydantic\.dev", text, re.MULTILINE) and "\n" in text
    title, *lines = text.rstrip("\n").split("\n")
    assert title.startswith("atropos-tui: ") and lines
    reasons = [line for line in lines if not line.startswith("    fix: ")]
    fixes = [line for line in lines if line.startswith("    fix: ") and len(line) > 12]
    # Problems with the same fix stand above it.
    assert (
        len(reasons) >= len(fixes)
        and lines[-1] in fixes
        and all(re.match(r"  \S", line) for line in reasons)
    ), text[:2000]
    assert all(line.isprintable() and len(line) < 2000 for line in lines), (
        "a value forges or floods the report"
    )


def write(folder: Path, data: Mapping[str, Any] | bytes | str, name: str = "p.toml") -> Path:
    path = folder / name
    text = tomli_w.dumps(data) if isinstance(data, Mapping) else data
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path
