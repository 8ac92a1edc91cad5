"""`bundle`: secrets planted in every place do not appear in the unpacked archive."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import main
from atropos_tui.cli.results import bundle
from atropos_tui.errors import Exit
from atropos_tui.profile.redact import REDACTED, Scrubber
from atropos_tui.supervisor.journal.store import ProcessTable
from tests.support.own_places import own_places  # noqa: F401

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SECRETS = {
    "in our environment": "env-secret-value-Q1",
    "in .env of the folder": "dotenv-secret-Q2",
    "in .env beside the profile": "profile-dotenv-Q3",
    "of the live run": "run-token-only-its-processes-know-Q4",
    "in ~/.netrc": "netrc-password-Q5",
    "of the hub": "hub-login-file-Q6",
    "in .env under an innocent name": "tok-SECRETSECRET123",
    "in our environment, in a secret of the profile": "innocent-but-referenced-Q9",
    "in our environment, sent by a command": "innocent-but-sent-Q0",
    "webhook variable": "https://hooks.example/very/private/path-Q7",
    "with odd letters": 'odd "quoted" & p@ss/wörd-Q8',
}
"""Values that no rule could recognise: they must be known from where they come."""
SHAPES = {
    "hugging face": "hf_abcdefghijklmnopqrstuvwxyz012345",
    "openai": "sk-proj-abcdef0123456789abcdef",
    "wandb": "fedcba9876543210fedcba9876543210fedcba98",
    "github": "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "run token": "aB3dE5gH7jK9mN1pQ3rS5tU7vW9xY1zA3bC5dE7fG9h",
    "json web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0"
    ".dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "slack": "hooks.slack.com/services/T0000/B0000/abcdefghij",
}
SAID = {
    "Authorization: Bearer shortbearer9": "shortbearer9",
    "authorization': 'Basic dXNlcjpwYXNzd29yZA=='": "dXNlcjpwYXNzd29yZA",
    "connecting to postgres://user:dbpassw0rd@db.example/x": "dbpassw0rd",
    "MY_API_KEY=plainkey-value": "plainkey-value",
    "x-api-key: headerkey123": "headerkey123",
    '{"password": "jsonpassw0rd"}': "jsonpassw0rd",
    "GET /x?token=querytoken123&y=1": "querytoken123",
    "Set-Cookie: session=cookievalue1; Path=/": "cookievalue1",
}
HARMLESS = (
    "loss=0.1234",
    "max_tokens=64",
    "tokens: 41166",
    "Qwen/Qwen3-1.7B",
    "a WARNING at 8000.00",
    "eos_token='<|im_end|>'",
    "KeyError: key",
)


pytestmark = pytest.mark.usefixtures("own_places")


def plant_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put every secret of `SECRETS` but the run's where its owner keeps it."""
    home = tmp_path / "home" / "me"
    (home / ".cache" / "huggingface").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    for name in ("HF_HOME", "HF_TOKEN_PATH", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SOME_SERVICE_TOKEN", SECRETS["in our environment"])
    monkeypatch.setenv("DB_PASSWORD", SECRETS["with odd letters"])
    monkeypatch.setenv("ALERTS", SECRETS["webhook variable"])
    (tmp_path / ".env").write_text(
        f"FOLDER_SECRET={SECRETS['in .env of the folder']}\nMODEL=Qwen/Qwen3-1.7B\n"
    )
    settings = f"LEVEL=WARNING\nPORT_OF=8000.00\nSWITCH=true\nDATA={tmp_path}\nBAD LINE\n"
    mytok = f"MYTOK={SECRETS['in .env under an innocent name']}\n"
    (tmp_path / ".env").write_text((tmp_path / ".env").read_text() + settings + mytok)
    monkeypatch.setenv("INNOCENT", SECRETS["in our environment, in a secret of the profile"])
    monkeypatch.setenv("SENT", SECRETS["in our environment, sent by a command"])
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / ".env").write_text(
        f"PROFILE_API_KEY={SECRETS['in .env beside the profile']}\n"
    )
    netrc = home / ".netrc"
    netrc.write_text(f"machine api.wandb.ai login user password {SECRETS['in ~/.netrc']}\n")
    netrc.chmod(0o600)
    (home / ".cache" / "huggingface" / "token").write_text(SECRETS["of the hub"] + "\n")


def make_run(tmp_path: Path) -> RunDir:
    """A run in whose every file every secret stands."""
    run = RunDir(tmp_path / "runs" / "p-1")
    run.create()
    lines = [
        *SECRETS.values(),
        *(f"key {value} end" for value in SHAPES.values()),
        *SAID,
        *HARMLESS,
    ]
    lines.append("sent " + json.dumps({"x": SECRETS["with odd letters"]}))
    text = (
        "\n".join(
            [
                "\x1b[31mred\x1b[0m <b>model</b> text ünïcödé \u2028 x",
                *lines,
                str(Path.home() / "x"),
            ]
        )
        + "\n"
    )
    command = [
        "up",
        str(tmp_path / "profiles" / "p.toml"),
        "--set",
        f"env.X_TOKEN={SHAPES['openai']}",
    ]
    info = {
        "run_id": "p-1",
        "name": "p",
        "mode": "none",
        "model": "${MODEL}",
        "started_at": 1.0,
        "command": command,
        "note": text,
    }
    run.run_json.write_text(json.dumps(info | {"git": {"commit": COMMIT, "dirty": False}}))
    plan = {
        "components": [
            {
                "name": "x",
                "command": ["serve", "--api-key", "flagvalue12"],
                "env": {"A_KEY": "abc999"},
            }
        ]
    }
    run.plan_json.write_text(json.dumps(plan | {"notify": {"webhook": "${ALERTS}"}, "note": lines}))
    sent = (
        '[component.y]\ncommand = ["curl", "-H", "Authorization: Bearer ${SENT}", "--model", '
        '"${MODEL}"]\n'
    )
    side = '[component.side]\nenv = {SIDE_TOKEN = "${INNOCENT}"}\n'
    run.profile_toml.write_text(
        f'model = "m"\n{sent}{side}[trainer.env]\nWANDB_API_KEY = "abc777"\nX = '
        f"{json.dumps(lines)}\n"
    )
    run.result_json.write_text(json.dumps({"exit_code": 3, "reason": text, "last_lines": lines}))
    run.fault_txt.write_text(text)
    record = (
        json.dumps(
            {"kind": "diagnosis", "evidence": text, "password": "abc555"}, ensure_ascii=False
        )
        + "\n"
    )
    for path in (run.supervisor_jsonl, run.telemetry_jsonl, run.eval_jsonl("math")):
        path.write_text(record + record + '{"torn ' + SHAPES["hugging face"])
    run.supervisor_log.write_text(text)
    for attempt in range(1, 8):
        log = run.log("vllm", attempt)
        log.parent.mkdir(exist_ok=True)
        log.write_text(text)
    return run


def unpack(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        members = tar.getmembers()
        assert all(member.isfile() and member.mode == 0o600 for member in members)
        files = {member.name: tar.extractfile(member) for member in members}
        return {name: file.read().decode() for name, file in files.items() if file}


def packed(output: Path, *arguments: str) -> dict[str, str]:
    assert main.run(["bundle", *arguments, "-o", str(output)]) == 0
    return unpack(output)


def test_no_secret_is_in_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_sources(tmp_path, monkeypatch)
    run = make_run(tmp_path)
    token = SECRETS["of the live run"]
    env = {"ATROPOS_RUN_ID": "p-1", "ATROPOS_TOKEN": token, "PATH": os.environ["PATH"]}
    ProcessTable(run_id="p-1").write(run.journal_json)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "print(flush=True); input()"],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as component:
        assert component.stdout is not None and component.stdout.readline()
        files = packed(tmp_path / "out.tar.gz", str(run.root))
        component.kill()
    values = [
        *SECRETS.values(),
        *SHAPES.values(),
        *SAID.values(),
        "abc999",
        "abc777",
        "abc555",
        "flagvalue12",
    ]
    forms = [form for value in values for form in (value, json.dumps(value)[1:-1])]
    leaks = [(name, form) for name, text in files.items() for form in forms if form in text]
    assert leaks == []
    assert not any(str(Path.home()) in text for text in files.values())
    assert stat.S_IMODE((tmp_path / "out.tar.gz").stat().st_mode) == 0o600


def test_what_helps_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_sources(tmp_path, monkeypatch)
    make_run(tmp_path)
    files = packed(tmp_path / "out.tar.gz", "p-1")
    names = {name.removeprefix("p-1/") for name in files}
    assert names >= {
        *(
            "run.json",
            "plan.json",
            "profile.toml",
            "result.json",
            "fault.txt",
            "supervisor.jsonl",
            "telemetry.jsonl",
        ),
        *("eval.math.jsonl", "supervisor.log", "logs/vllm/7.log", "doctor.json", "versions.json"),
        *("files.txt", "contents.json"),
    }
    assert "logs/vllm/1.log" not in names, "only the last attempts"
    log = files["p-1/logs/vllm/7.log"]
    assert all(word in log for word in HARMLESS) and "~/x" in log and REDACTED in log
    assert "\x1b[31mred" in log and "<b>model</b>" in log, "what was printed stays data"
    assert json.loads(files["p-1/run.json"])["git"]["commit"] == COMMIT, "a commit is no key"
    for line in files["p-1/telemetry.jsonl"].split("\n")[:2]:
        assert json.loads(line)["evidence"].startswith("\x1b[31mred")
    assert json.loads(files["p-1/plan.json"])["notify"]["webhook"] == "${ALERTS}"
    assert {check["name"] for check in json.loads(files["p-1/doctor.json"])["checks"]} >= {
        "Python",
        "memory",
    }
    assert json.loads(files["p-1/versions.json"])["pydantic"]
    contents = json.loads(files["p-1/contents.json"])
    assert set(contents) == names and contents["run.json"] == "whole"


def test_large_files_keep_head_and_tail(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    log = run.log("vllm", 7)
    secret = SHAPES["hugging face"]
    rows = [f"row {number:07} " + "x" * 80 for number in range(60_000)]
    log.write_text("\n".join(rows) + "\n")
    size = log.stat().st_size
    cut = bundle.HEAD_BYTES - 10  # a token across the place where the head ends
    log.write_bytes(
        log.read_bytes()[:cut] + secret.encode() + log.read_bytes()[cut + len(secret) :]
    )
    files = packed(tmp_path / "out.tar.gz", str(run.root))
    text = files["p-1/logs/vllm/7.log"]
    assert (
        rows[0] in text
        and rows[-1] in text
        and len(text) < bundle.HEAD_BYTES + bundle.TAIL_BYTES + 1000
    )
    assert "hf_" not in text and f"of {size:,} bytes left out here" in text
    assert f"{size:,} bytes" in json.loads(files["p-1/contents.json"])["logs/vllm/7.log"]


def test_links_weights_and_odd_files_stay_out(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "1.log").write_text("private diary")
    (outside / "fault.txt").write_text("private diary")
    (run.logs / "linked").symlink_to(outside)
    (run.logs / "vllm" / "9.log").symlink_to(outside / "1.log")
    run.fault_txt.unlink()
    run.fault_txt.symlink_to(outside / "fault.txt")
    run.telemetry_jsonl.unlink()
    os.mkfifo(run.telemetry_jsonl)
    for name in ("checkpoints/step_1/model.safetensors", "bridge/weights.bin", "my notes.txt"):
        (run.root / name).parent.mkdir(exist_ok=True)
        (run.root / name).write_text("private diary, weights")
    began = time.monotonic()
    files = packed(tmp_path / "out.tar.gz", str(run.root))
    assert time.monotonic() - began < 30, "a fifo is not waited for"
    assert not any("private diary" in text for text in files.values())
    assert (
        "model.safetensors" in files["p-1/files.txt"]
        and "fault.txt (link)" in files["p-1/files.txt"]
    )
    contents = json.loads(files["p-1/contents.json"])
    assert (
        "left out" in contents["fault.txt"] and "not a regular file" in contents["telemetry.jsonl"]
    )


def test_a_linked_folder_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    shutil.move(run.logs, tmp_path / "elsewhere")
    run.logs.symlink_to(tmp_path / "elsewhere")
    assert not any("logs/" in name for name in packed(tmp_path / "out.tar.gz", str(run.root)))


def test_a_run_json_of_another_shape_is_packed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.run_json.write_text(
        json.dumps({"run_id": "p-1", "command": 5, "git": 5, "profile": 5, "model": 5})
    )
    assert "p-1/run.json" in packed(tmp_path / "out.tar.gz", str(run.root))


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bundle"]) == Exit.NO_RUN
    make_run(tmp_path)
    taken = tmp_path / "taken.tar.gz"
    taken.write_text("precious")
    assert main.run(["bundle", "-o", str(taken)]) == Exit.USAGE and taken.read_text() == "precious"
    assert main.run(["bundle", "-o", str(tmp_path / "no" / "folder.tar.gz")]) == Exit.USAGE
    dangling = tmp_path / "dangling.tar.gz"
    dangling.symlink_to(tmp_path / "target")
    assert (
        main.run(["bundle", "-o", str(dangling)]) == Exit.USAGE
        and not (tmp_path / "target").exists()
    )
    assert "-o" in capsys.readouterr().err
    assert main.run(["bundle"]) == 0
    (made,) = tmp_path.glob("p-1-bundle-*.tar.gz")
    assert made.name in capsys.readouterr().out


def test_a_file_that_goes_while_a_run_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, walk = make_run(tmp_path), os.fwalk

    def late(*args: Any, **kwargs: Any) -> Any:
        for folder, folders, files, descriptor in walk(*args, **kwargs):
            yield folder, folders, [*files, "step_7.new"], descriptor

    monkeypatch.setattr(bundle.os, "fwalk", late)
    listed = packed(tmp_path / "out.tar.gz", str(run.root))["p-1/files.txt"]
    assert "run.json" in listed and "step_7.new" not in listed


def test_a_fault_leaves_no_half_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    monkeypatch.setattr(bundle, "_listing", lambda _: 1 / 0)
    assert main.run(["bundle", "-o", str(tmp_path / "out.tar.gz")]) == Exit.FAULT
    assert not (tmp_path / "out.tar.gz").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("HF_TOKEN=abcdef", f"HF_TOKEN={REDACTED}"),
        ("token: 12345", "token: 12345"),
        ("'token': None", "'token': None"),
        ("password=${DB_PASSWORD}", "password=${DB_PASSWORD}"),
        ("snapshots/" + COMMIT + "/config.json", "snapshots/" + COMMIT + "/config.json"),
        ("api key " + COMMIT, f"api key {REDACTED}"),
        ("git@" + COMMIT, "git@" + COMMIT),
        ("Basic understanding of Bearer bonds", "Basic understanding of Bearer bonds"),
        ("DB_PASSWORD=12345678", f"DB_PASSWORD={REDACTED}"),
        ("serve --api-key abcd1234efgh --port 9001", f"serve --api-key {REDACTED} --port 9001"),
        ("--max-token 500 --secret 4", "--max-token 500 --secret 4"),
        ("pays with sk_live_0123456789abcdefgh", f"pays with {REDACTED}"),
        ("curl -u admin:secret7 http://x", f"curl -u {REDACTED} http://x"),
        ("nvapi-" + 5 * "a1B2c3", REDACTED),
        ("npm_" + 6 * "a1B2c3", REDACTED),
        ("r8_" + 6 * "a1B2c3", REDACTED),
        ("/home/me/runs /home/meyer /mnt/home/me", "~/runs /home/meyer /mnt/home/me"),
        ("the value p%40ss%2Fword is url-encoded", f"the value {REDACTED} is url-encoded"),
    ],
)
def test_scrubbing_words(text: str, expected: Any) -> None:
    assert Scrubber(["p@ss/word", "abc"], home="/home/me").text(text) == expected


@pytest.mark.parametrize(
    "piece", ["eyJ-", "ä", "a-", "bearer ", "password", "-key ", "authorization ", "://", "A_"]
)
def test_a_long_line_costs_no_more_than_its_length(piece: str) -> None:
    """One line of a log held up the bundle for half an hour."""
    scrub = Scrubber(["p@ss/word"])

    def took(length: int) -> float:
        text = piece * (length // len(piece))
        begun = time.process_time()
        scrub.text(text)
        return time.process_time() - begun

    assert took(200_000) < 2.0
