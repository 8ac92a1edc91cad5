"""Bad input by hand: for any profile, `validate`, `plan` and `up` end with exit code 2 and a
message, and leave nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from atropos_tui.profile.redact import REDACTED
from tests.atropos_tui.profile.support import (
    COMMANDS,
    MEGABYTE,
    ONE_IN_CI,
    ask,
    assert_refused,
    make_folder,
    valid,
    write,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


@pytest.mark.parametrize("command", COMMANDS[:2])
def test_the_valid_profile_is_valid(folder: Path, command: list[str]) -> None:
    """Else every test here could pass for the wrong reason."""
    code, text = ask(command, write(folder, valid(folder)))
    assert (code, text) == (0, "")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("content", "key", "reason"),
    [
        (b"", "model", "is missing"),
        (bytes(range(256)) * 40, "", "not UTF-8 text"),
        (b"\x7fELF\x02\x01\x01\x00\x00", "", "not TOML"),
        ("name = 'é'\n".encode("utf-16"), "", "not UTF-8 text"),
        (b"#" * (10 * MEGABYTE), "", "larger than 1 MiB"),
        (b"name = ", "", "not TOML"),
        (b"name = 'p'\nname = 'q'\n", "", "not TOML"),
        (b"a = " + b"[" * 4000 + b"]" * 4000, "", "is nested too deep to be read"),
        (b".".join([b"a"] * 5000) + b" = 1", "", "not TOML: a line with more than 1,000 dots"),
        (b"[" + b".".join([b"env"] * 900) + b"]", "env.env.env", "wrong type"),
        (b"seed = " + b"9" * 5000, "", "not TOML"),
        (b"seed = " + b"9" * 400, "seed", "out of range"),
        (b"seed = nan", "seed", "wrong type"),
        (b"[vllm]\ngpu_memory_utilization = -inf", "vllm.gpu_memory_utilization", "must be finite"),
        (b"\xef\xbb\xbfname = 3\r\nmodel = 'm'\r\n", "name", "wrong type"),
        (b"[[name]]\n[[model]]\n[[seed]]\n", "name", "wrong type"),
        (
            b"env = 7\nvllm = 'x'\ntrainer = 1\nprepare = 1.5\ncomponent = []",
            "trainer",
            "wrong type",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else f"{len(value)} bytes {value[:12]!r}",
)
def test_broken_files(
    folder: Path, command: list[str], content: bytes, key: str, reason: str
) -> None:
    path = write(folder, content)
    text = assert_refused(command, path)
    assert f"{path}: {key + ': ' if key else ''}{reason}" in text


@pytest.mark.parametrize("command", ONE_IN_CI, ids=lambda command: command[0])
def test_half_a_megabyte_of_keys(folder: Path, command: list[str]) -> None:
    path = write(folder, b"".join(b"k%d = 1\n" % number for number in range(50_000)))
    assert f"{path}: k100: unknown key" in assert_refused(command, path)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_what_is_no_file(folder: Path, command: list[str]) -> None:
    assert "is a directory" in assert_refused(command, folder)
    (folder / "loop").symlink_to(folder / "loop")
    names = (
        "nowhere.toml",
        "",
        "x" * 5000,
        "a\0b",
        "\x1b[31mred",
        folder / "loop",
        folder / "model/config.json/x",
    )
    for name in names:
        assert_refused(command, name)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_unreadable_files(folder: Path, command: list[str]) -> None:
    assert "unreadable" in assert_refused(
        command, "/proc/self/mem"
    )  # reading it fails for root too
    locked = write(folder, valid(folder))
    locked.chmod(0)
    if not os.access(locked, os.R_OK):
        assert "unreadable" in assert_refused(command, locked)


def test_line_ends_and_byte_order_mark_do_not_matter(folder: Path) -> None:
    text = "\ufeff" + tomli_w.dumps(valid(folder)).replace("\n", "\r\n")
    assert ask(["validate"], write(folder, text)) == (0, "")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_circles_and_broken_chains(folder: Path, command: list[str]) -> None:
    write(folder, 'extends = "b.toml"', "a.toml")
    write(folder, 'extends = "./a.toml"', "b.toml")
    text = assert_refused(command, folder / "a.toml")
    assert (
        f"{folder}/b.toml: extends: goes in a circle: {folder}/a.toml → {folder}/b.toml → "
        f"{folder}/a.toml" in text
    )
    assert "circle" in assert_refused(command, write(folder, 'extends = "self.toml"', "self.toml"))
    for number in range(12):
        write(folder, f'extends = "{number + 1}.toml"', f"{number}.toml")
    text = assert_refused(command, folder / "0.toml")
    assert (
        f"{folder}/11.toml: extends: no such profile: {folder}/0.toml → " in text
        and "12.toml\n" in text
    )
    for wrong in ('""', "3", '["a.toml"]', '"/"', '"\\u0000"', json.dumps("x" * 9000), "{}"):
        assert "extends" in assert_refused(command, write(folder, f"extends = {wrong}", "c.toml"))
    assert "not TOML" in assert_refused(
        command, write(folder, f'extends = "{write(folder, "[", "d.toml")}"', "e.toml")
    )


def loop(data: dict[str, Any]) -> None:
    data["component"]["one"] = {"command": ["true"], "depends_on": {"two": "healthy"}}
    data["component"]["two"] = {"command": ["true"], "depends_on": {"one": "healthy"}}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (loop, "circular depends_on"),
        (lambda data: data["api"].update(depends_on={"nobody": "healthy"}), "nobody"),
        (lambda data: data["api"].update(depends_on={"api": "healthy"}), "circular depends_on"),
        (lambda data: data["api"].update(port=data["vllm"]["port"]), "is also"),
        (lambda data: data["component"]["extra"].update(port=data["vllm"]["port"]), "is also"),
        (lambda data: data["env"][1].update(name="a"), "is used 2 times"),
        (lambda data: data["env"][1].update(name="trainer"), "is used 2 times"),
        (lambda data: data.update(component={"vllm": {"command": ["true"]}}), "is used 2 times"),
        (lambda data: data["prepare"].append(data["prepare"][0]), "is used 2 times"),
        (
            lambda data: data["env"][0].update(script="x.py"),
            "set exactly one of module, script, verifiers, openenv, agent and command",
        ),
        (
            lambda data: data["env"][0].pop("module"),
            "set exactly one of module, script, verifiers, openenv, agent and command",
        ),
        (lambda data: data["trainer"].update(batch_size=3), "multiple of"),
        (lambda data: data["trainer"].update(model_name="m"), "set model instead"),
        (
            lambda data: data["vllm"].update(startup={"checks": [{"kind": "log", "pattern": "("}]}),
            "checks[0].pattern",
        ),
        (
            lambda data: data["vllm"].update(startup={"checks": [{"kind": "tcp", "port": 0}]}),
            "checks[0].port",
        ),
        (
            lambda data: data["vllm"].update(startup={"checks": [{"kind": "http", "url": "x"}]}),
            "checks[0].url",
        ),
        (
            lambda data: data["vllm"].update(startup={"checks": [{"url": "http://x"}]}),
            "http, tcp, exec, log, stage, file",
        ),
        (lambda data: data["notify"].update(webhook="ftp://x"), "notify.webhook"),
        (lambda data: data["api"].update(env={"A=B": "x"}), 'api.env."A=B"'),
        (lambda data: data["api"].update(command=[]), "api.command"),
        (lambda data: data["api"].update(command=[" "]), "names no program"),
        (
            lambda data: data["vllm"]["args"].update({"api-key": REDACTED}),
            "does not write to files",
        ),
        (lambda data: data["vllm"]["args"].update(x="a\0b"), "holds a NUL"),
        (lambda data: data.pop("env"), "env: is missing"),
        (lambda data: data.update(env=[]), "env: wrong length"),
    ],
)
def test_contradictions(folder: Path, command: list[str], change: Any, expected: str) -> None:
    data = valid(folder)
    change(data)
    assert expected in assert_refused(command, write(folder, data))


def test_cross_checks_name_the_file_in_which_the_key_stands(folder: Path) -> None:
    """Contradictions that only show in the whole."""
    data = valid(folder)
    data["api"]["host"] = "0.0.0.0"
    data["env"][1]["args"]["openai.base_url"] = "http://x"
    write(folder, data, "base.toml")
    child = {"extends": "base.toml", "vllm": {"port": data["api"]["port"], "args": {"model": "m"}}}
    text = assert_refused(
        ["validate"],
        write(folder, child, "child.toml"),
        "--set",
        "component.extra.command=['no-such']",
    )
    assert f"{folder}/base.toml: api.host: " in text
    assert f'{folder}/base.toml: env.1.args.openai.base_url ([[env]] "b"): ' in text
    assert (
        f"{folder}/child.toml: vllm.port: " in text
        and f"{folder}/child.toml: vllm.args.model: " in text
    )
    assert "--set: component.extra.command: " in text


def told(text: str) -> set[str]:
    """The keys that a report names."""
    lines = [
        line
        for line in text.splitlines()
        if line.startswith("  ") and not line.startswith("    fix")
    ]
    return {line.split(": ")[1].split(" (")[0] for line in lines}


def test_contradictions_are_told_once_the_keys_are_right(folder: Path) -> None:
    data = valid(folder)
    data["trainer"] |= {"lr": "x", "batch_size": 10}
    data["component"]["one"] = {"command": ["true"], "depends_on": ["extra"]}
    text = assert_refused(["validate"], write(folder, data))
    assert told(text) == {"trainer.lr", "component.one.depends_on"} and "more checks follow" in text
    assert 'depends_on = { extra = "healthy" }' in text
    data["trainer"]["lr"] = 1e-4
    data["component"]["one"]["depends_on"] = {"extra": "healthy"}
    text = assert_refused(["validate"], write(folder, data))
    assert told(text) == {"env.0.args.env.group_size", "env.1.args.env.group_size"}


@pytest.mark.parametrize(
    "command", [["validate"], ["up", "--headless"]], ids=lambda command: command[0]
)
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("y" * 300, "cannot be read as a profile ("),
        ("~nobody-here/model", "model: no such model directory: ~nobody"),
    ],
)
def test_what_the_operating_system_refuses_still_ends_in_words(
    folder: Path, command: list[str], model: str, words: str
) -> None:
    """It has exceptions of its own for these names."""
    path = write(folder, valid(folder) | {"model": model})
    assert f"{path}: {words}" in assert_refused(command, path)


def test_every_fault_of_the_graph_is_told_at_its_key(folder: Path) -> None:
    data = valid(folder)
    loop(data)
    data["api"]["depends_on"] = {"api": "healthy"}
    data["env"][1]["depends_on"] = {"nobody": "healthy", "noone": "started"}
    text = assert_refused(["validate"], write(folder, data))
    assert told(text) == {"component.one.depends_on", "api.depends_on", "env.1.depends_on"}
    assert "'nobody'" in text and "'noone'" in text and "among: one, two" in text


def test_a_name_used_twice_is_one_problem(folder: Path) -> None:
    data = valid(folder)
    data["env"][1]["name"] = "a"
    text = assert_refused(["validate"], write(folder, data))
    assert "1 problem\n" in text and "env.1.name" in text


def test_a_gpu_named_twice_is_one_problem(folder: Path) -> None:
    data = valid(folder)
    data["vllm"] |= {"gpus": [0, 0], "gpu_memory_utilization": 0.92}
    del data["trainer"]["device"]
    assert told(assert_refused(["plan"], write(folder, data))) == {"vllm.gpus"}


def test_no_profile(folder: Path) -> None:
    assert "no profile was given" in assert_refused(["validate"], "")


def test_variables_and_folders_are_missed_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UNSET_A", "UNSET_B", "UNSET_C"):
        monkeypatch.setenv(name, "")  # so that what the .env file sets is undone
        monkeypatch.delenv(name)
    data = valid(folder)
    data["component"]["extra"] |= {
        "env": {"X": "${UNSET_A}"},
        "command": ["sleep", "${UNSET_B}"],
        "cwd": "${UNSET_C}",
    }
    data["env"][1]["cwd"] = "/no/such/folder"
    keys = {"component.extra.env.X", "component.extra.command", "component.extra.cwd"}
    for command in (["validate"], ["up", "--headless"]):
        text = assert_refused(command, write(folder, data))
        assert told(text) == {*keys, "env.1.cwd"} and "export UNSET_A=..." in text
    (folder / ".env").write_text(f"UNSET_A=1\nUNSET_B=1\nUNSET_C={folder}\n")
    assert told(assert_refused(["validate"], write(folder, data))) == {"env.1.cwd"}


@pytest.mark.parametrize(
    "item",
    [
        "novalue",
        "=1",
        "name.x=1",
        "env.9.module=x",
        "env.-1.module=x",
        "env.٣.module=x",
        "seed=nan",
        "seed=1e999",
        "seed=" + "9" * 5000,
        "seed=" + "[" * 5000,
        "a" + ".a" * 5000 + "=1",
        "extends=demo",
        "extnds=1",
        "trainer=1",
        "env.0=1",
        "vllm.0.port=x",
        "model=\udcff",
        "name=\udcff",
        ".=1",
        "..=1",
        "prepare.0.command=1",
    ],
)
def test_bad_overrides(folder: Path, item: str) -> None:
    for command in COMMANDS:
        text = assert_refused(command, write(folder, valid(folder)), "--set", item)
        assert "--set" in text or "seed" not in item


@pytest.mark.parametrize("content", [b"\xff\xfe", b"A=\xc3\x28\n"])
def test_a_broken_env_file(folder: Path, content: bytes) -> None:
    (folder / ".env").write_bytes(content)
    assert f"{folder}/.env: " in assert_refused(
        ["up", "--headless"], write(folder, valid(folder)), "--set", "api.host=x"
    )
