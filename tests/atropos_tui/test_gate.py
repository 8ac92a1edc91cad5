"""No string of any file brings a terminal control sequence into the output of a command or the
screen."""

from __future__ import annotations

import json
import shutil
import struct
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import (
    CommandRecord,
    DiagnosisRecord,
    ProbeRecord,
    StageRecord,
)
from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import main
from atropos_tui.streams import OWN_STYLES, harmless
from tests.support.own_places import own_places  # noqa: F401
from tests.support.run_maker import RUN_ID, T0, make_run, write_records
from tests.support.terminal import Terminal

pytestmark = [pytest.mark.usefixtures("own_places"), pytest.mark.timeout(120)]
Captured = pytest.CaptureFixture[str]
Change = Callable[[Any], Any]

EVIL = (
    "\x1b]52;c;cHduZWQ=\x07\x1b[2J\x9b31m\x90q\x9c"
    "\u202e\u2066\u061c\U000e0041\x1bc\r\x08\x7f\x1b[8m"
)
OBEYED = {
    *map(chr, range(9)),
    *map(chr, range(11, 32)),
    *map(chr, range(127, 160)),
    *"\u202e\u2066\u061c\U000e0041",
}
"""Every C0 and C1 control character except tab and line feed, and the format characters of
`EVIL`."""


def obeyed(text: str) -> set[str]:
    """Characters of `text` that a terminal obeys, outside our own colours."""
    for style in OWN_STYLES:
        text = text.replace(style, "")
    return OBEYED & set(text)


def every_value(value: Any) -> Any:
    """Each string of a document behind and before something evil."""
    if isinstance(value, dict):
        return {key: every_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [every_value(item) for item in value]
    return f"{EVIL}{value}{EVIL}" if isinstance(value, str) else value


def free_values(value: Any, key: str = "") -> Any:
    """The same but for words that decide what a reader makes of the rest."""
    if isinstance(value, dict):
        return {name: free_values(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [free_values(item, key) for item in value]
    kept = (
        "kind",
        "run_id",
        "old",
        "new",
        "role",
        "component",
        "name",
        "model_type",
        "architectures",
        "mode",
    )
    return value if key in kept else every_value(value)


def every_key(value: Any) -> Any:
    """Each key of a document twice, the second time with something evil."""
    if isinstance(value, dict):
        inner = {key: every_key(item) for key, item in value.items()}
        return inner | {f"{key}{EVIL}": item for key, item in inner.items()}
    return [every_key(item) for item in value] if isinstance(value, list) else value


CHANGES = [every_value, free_values, every_key]


def poison(path: Path, change: Change) -> None:
    """Change every document of a file."""
    text = path.read_text()
    if path.suffix == ".toml":
        # TOML allows no control characters but as \u escapes, which is how tomli_w writes them.
        path.write_text(tomli_w.dumps(change(tomllib.loads(text))))
    elif path.suffix == ".jsonl":
        path.write_text(
            "".join(json.dumps(change(json.loads(line))) + "\n" for line in text.splitlines())
        )
    elif path.suffix == ".json":
        path.write_text(json.dumps(change(json.loads(text))))
    else:
        path.write_text("".join(f"{EVIL}{line}{EVIL}\n" for line in text.splitlines()))


def poisoned_run(root: Path, change: Change) -> RunDir:
    """A run with records of every kind, each file of it changed, and evil names of folders and
    files."""
    run = make_run(root, steps=3)
    records: list[Record] = [
        DiagnosisRecord(
            time=T0 + 30, component="vllm", title="a title", evidence="what was seen", fix="do this"
        ),
        ProbeRecord(time=T0 + 30, component="vllm", probe="readiness", ok=False, detail="refused"),
        StageRecord(time=T0 + 30, component="vllm", stage="weights"),
        CommandRecord(
            time=T0 + 30,
            command_id="c",
            component="vllm",
            action="restart",
            status="done",
            detail="words",
        ),
    ]
    write_records(run.supervisor_jsonl, records, 90)
    with run.supervisor_jsonl.open("a") as file:
        file.write(
            json.dumps({"v": 1, "time": T0 + 30, "seq": 99, "kind": "unknown", "what": {"a": "b"}})
            + "\n"
        )
    plan = json.loads(run.plan_json.read_text())
    for part in plan["components"]:
        part |= {
            "depends_on": {"vllm": "healthy"},
            "stages": [{"name": "weights", "usually": "the disk"}],
        }
    run.plan_json.write_text(json.dumps(plan))
    meta = {
        "run_id": RUN_ID,
        "name": "demo",
        "mode": "none",
        "host": "h",
        "git": {"commit": "abc"},
        "started_at": T0,
    }
    run.run_json.write_text(json.dumps(meta | {"versions": {"torch": "2"}, "argv": ["up", "demo"]}))
    result = {
        "exit_code": 3,
        "reason": "it failed",
        "component": "vllm",
        "last_lines": ["Traceback", "ValueError: x"],
    }
    run.result_json.write_text(json.dumps(result))
    run.fault_txt.write_text("a traceback\n")
    for path in run.root.rglob("*"):
        if path.is_file():
            poison(path, change)
    told = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps(told | {"run_id": RUN_ID}))  # with any other id it is no run
    name = EVIL.replace("/", "")
    shutil.copytree(run.logs / "vllm", run.logs / name)
    shutil.copy(run.eval_jsonl("arithmetic"), run.eval_jsonl(name))
    (run.checkpoints / f"step_{name}").mkdir()
    (run.root / name).touch()
    return run


READING = [
    ["events"],
    ["events", "--json"],
    ["ps"],
    ["ps", "--json"],
    ["why"],
    ["why", "--json"],
    ["bench"],
    ["bench", "--json"],
    ["report", "-o", "page.html"],
    ["bundle", "-o", "all.tar.gz"],
    ["clean", "--dry-run"],
    ["replay"],
]


@pytest.mark.parametrize("change", CHANGES)
def test_no_string_and_no_key_of_a_run_reaches_a_terminal_as_it_is(
    tmp_path: Path, change: Change, capsys: Captured
) -> None:
    run = poisoned_run(Path("runs").absolute() / "evil", change)
    spoken = 0
    commands = [[*command, str(run.root)] for command in READING]
    commands += [
        ["logs", "--run-dir", str(run.root), *words]
        for words in ([], ["--json"], ["--attempt", "7"])
    ]
    commands += [
        ["why", "--run-dir", str(run.root), "no-such"],
        ["runs"],
        ["runs", "--json"],
        ["doctor", "--json"],
    ]
    commands += [["up", "--resume", str(run.root), "--headless", "--set", "nothing=1"]]
    for command in commands:
        main.run(command)
        said = "".join(capsys.readouterr())
        assert not obeyed(said), command
        spoken += bool(said)
    assert spoken > len(commands) // 2, "they had something to say"


def poisoned_model(folder: Path, change: Change) -> Path:
    """A model folder of an architecture that no formula knows, each file of it changed."""
    folder.mkdir()
    config = {
        "model_type": "strange",
        "architectures": ["StrangeForCausalLM"],
        "hidden_size": 8,
        "dtype": "float32",
    }
    config |= {
        "quantization_config": {"quant_method": "strange"},
        "rope_scaling": {"type": "strange"},
    }
    files = {
        "config.json": config,
        "tokenizer_config.json": {"tokenizer_class": "Strange", "chat_template": "{{x}}"},
    }
    files["generation_config.json"] = {"transformers_version": "5"}
    files["model.safetensors.index.json"] = {"weight_map": {"a.weight": "model.safetensors"}}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(change(content)))
    header = json.dumps(
        change({"a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    return folder


@pytest.mark.parametrize("known", [True, False], ids=["a known model_type", "an unknown one"])
@pytest.mark.parametrize("change", CHANGES)
def test_no_string_and_no_key_of_a_model_reaches_a_terminal_as_it_is(
    tmp_path: Path, change: Change, known: bool, capsys: Captured
) -> None:
    folder = poisoned_model(tmp_path / "model", change)
    if known:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(config | {"model_type": "llama", "architectures": [EVIL]})
        )
    for command in (
        ["plan", "demo", "--gpus", "1xH100"],
        ["plan", "demo", "--json"],
        ["validate", "demo"],
    ):
        main.run([*command, "--set", f"model={str(folder)!r}"])
        said = "".join(capsys.readouterr())
        assert said and not obeyed(said), command


@pytest.mark.parametrize("change", CHANGES)
def test_no_string_and_no_key_of_a_profile_reaches_a_terminal_as_it_is(
    tmp_path: Path, change: Change, capsys: Captured
) -> None:
    profile = {
        "name": "p",
        "mode": "none",
        "model": "/no/such/model",
        "env": [{"name": "e", "command": ["python", "x.py"], "env": {"A": "${NOTHING}"}}],
        "component": {"extra": {"command": ["no-such-program"], "role": "other"}},
        "trainer": {"training_steps": 3},
    }
    path = tmp_path / "p.toml"
    path.write_text(tomli_w.dumps(change(profile)))
    for command in (["validate", "p.toml"], ["plan", "p.toml"], ["plan", "p.toml", "--json"]):
        main.run(command)
        said = "".join(capsys.readouterr())
        assert said and not obeyed(said), command


@pytest.mark.parametrize("change", CHANGES)
def test_no_string_and_no_key_of_a_run_reaches_a_terminal_by_the_screen(
    tmp_path: Path, change: Change
) -> None:
    """In a real terminal, over its views: Textual's own sequences come, none of the recording's
    does."""
    run = poisoned_run(tmp_path / "evil", change)
    terminal = Terminal(
        [sys.executable, "-m", "atropos_tui", "replay", str(run.root), "--speed", "4096"], 120, 40
    )
    try:
        terminal.until(lambda seen: b"REPLAY" in seen)
        for key in b"1234567890":
            terminal.type(bytes([key]))
            end = time.monotonic() + 0.4
            while time.monotonic() < end and terminal.read(0.1):
                pass
        seen = terminal.seen.decode("utf-8", "replace")
        assert "\x1b]52" not in seen and "\x1bc" not in seen and "\x1b[8m" not in seen
        assert not set(seen) & (OBEYED - set("\x1b\r\x08\x07")), "these four are also of Textual"
    finally:
        terminal.close()


def test_our_own_colours_pass_and_no_others() -> None:
    for style in OWN_STYLES:
        assert harmless(f"{style}a\x1b[0m") == f"{style}a\x1b[0m"
    assert harmless("a\x1b[8mb\x1b[1;31mc\x1b[2Jd\x1b[") == "abcd"
    assert harmless("one\n\ttwo\r\nthree") == "one\n\ttwo\nthree"
    assert harmless("\x1b]0;never ended\nthe next line") == "\nthe next line"
    assert harmless("half \ud800") == "half ?"


def test_a_sequence_that_comes_in_two_pieces_does_not_pass() -> None:
    for cut in range(1, len(EVIL)):
        assert not obeyed(harmless(EVIL[:cut]) + harmless(EVIL[cut:]))
