"""`up` in a folder that another user prepared: packages of our names, a `.env` for the loader and
for Python."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import main
from atropos_tui.cli.start import up
from atropos_tui.cli.start.profiles import read_env_files
from atropos_tui.errors import Exit, UserError
from atropos_tui.profile.builders.commands import OUR_PACKAGES
from atropos_tui.profile.plan import stack_of
from atropos_tui.profile.ports import free_port
from atropos_tui.profile.profile import load_profile
from atropos_tui.profile.site import make_site
from tests.atropos_tui.cli.stand_in_stack import write_profile
from tests.support.own_places import own_places

__all__ = ["own_places"]

SCRIPT = Path(sys.executable).with_name("atropos-tui")
DUMP = "env | sort > {folder}/environment; echo hello $GREETING"


@pytest.fixture
def hostile(tmp_path: Path, own_places: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: whatever of it is run says so in `ran`."""
    folder = tmp_path / "hostile"
    says = f"open({str(tmp_path / 'ran')!r}, 'a').write(__file__ + chr(10))\n"
    for name in (*OUR_PACKAGES, "vllm", "torch"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(says)
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(says)
    names = {
        "PYTHONPATH": folder / "site",
        "LD_PRELOAD": "/no/such.so",
        "STOLEN": "1",
        "GREETING": "from-dotenv",
    }
    (folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in names.items()))
    monkeypatch.chdir(folder)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    return folder


def stack_of_stand_ins(folder: Path) -> Path:
    path = write_profile(folder, "p", ports=(free_port(), free_port()))
    extra = (
        '[[prepare]]\nname = "dump"\ncommand = ["sh", "-c", "{}"]\nenv = {{ GREETING = '
        '"${{GREETING}}" }}\n'
    )
    path.write_text(path.read_text() + extra.format(DUMP.format(folder=folder)))
    return path


@pytest.mark.parametrize("how", ["--headless", "--detach"])
def test_nothing_of_the_folder_runs_and_its_env_file_feeds_references_alone(
    how: str, hostile: Path, tmp_path: Path
) -> None:
    command = [
        str(SCRIPT),
        "up",
        str(stack_of_stand_ins(tmp_path)),
        how,
        "--run-dir",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    wait = [
        str(SCRIPT),
        "wait",
        "--for",
        "done",
        "--timeout",
        "60",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    assert subprocess.run(wait).returncode == 0
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    lines = (tmp_path / "environment").read_text().splitlines()
    assert "GREETING=from-dotenv" in lines, "the profile asks for it"
    assert not [
        line
        for line in lines
        if line.startswith(("STOLEN=", "LD_PRELOAD=", f"PYTHONPATH={hostile}"))
    ]
    run = RunDir(tmp_path / "run")
    assert "hello from-dotenv" in run.log("dump", 1).read_text()
    for file in (run.plan_json, run.run_json, run.profile_toml, run.supervisor_jsonl):
        assert "from-dotenv" not in file.read_text(), f"{file.name} holds what the .env file says"
    assert (
        ".env: no component gets LD_PRELOAD, PYTHONPATH, STOLEN, because no ${...} of the "
        "profile names" in done.stderr
    )


def test_a_module_of_one_s_own_is_found_in_the_folder_where_it_runs(
    tmp_path: Path, own_places: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stack_of_stand_ins(tmp_path)
    path.write_text(
        path.read_text().replace(f'script = "{tmp_path}/programs/env.py"', 'module = "my_env"')
    )
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setenv("GREETING", "x")
    Path("my_helper.py").write_text("ME = 'mine'\n")
    Path("my_env.py").write_text(
        "import my_helper, pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'env ran')!r}).write_text(my_helper.ME)\n"
        "time.sleep(600)\n"
    )
    command = [str(SCRIPT), "up", str(path), "--headless", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "env ran").read_text() == "mine"


def test_our_own_modules_never_come_from_the_working_directory(
    tmp_path: Path, own_places: None
) -> None:
    profile, _ = load_profile(
        "demo", ['component.extra.command=["python", "-m", "trainer_core", "--x"]']
    )
    stack = stack_of(make_site(profile, tmp_path / "run", run_id="r"))
    assert {part.name: part.command[1:3] for part in stack.components} == {
        part.name: ["-P", "-m"] for part in stack.components
    }


def test_a_file_of_somebody_else_is_not_read(
    tmp_path: Path,
    own_places: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("place").mkdir()
    Path("place/.env").write_text("A=1\n")
    assert read_env_files(Path("place/p.toml")) == {"A": "1"}
    Path(".env").write_text("A=2\nB=3\nC\n")
    assert read_env_files(Path("place/p.toml")) == {"A": "2", "B": "3"}, (
        "where atropos-tui is started wins"
    )
    assert capsys.readouterr().err == "" and "A" not in os.environ
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert read_env_files(Path("place/p.toml")) == {}
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[0] for line in said] == [
        str(tmp_path / ".env"),
        str(tmp_path / "place/.env"),
    ]
    assert all("belongs to another user and is not read" in line for line in said)


def test_a_link_of_somebody_else_to_a_file_of_ours_is_not_followed(
    tmp_path: Path, own_places: None
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a link of somebody else")
    (tmp_path / "secret").write_text("A=1\n")
    Path(".env").symlink_to(tmp_path / "secret")
    assert read_env_files(Path("p.toml")) == {"A": "1"}, "a link of one's own"
    os.lchown(".env", 65534, 65534)
    assert read_env_files(Path("p.toml")) == {}


@pytest.mark.timeout(30)
def test_a_pipe_that_came_with_a_folder_keeps_nobody_waiting(own_places: None) -> None:
    os.mkfifo(".env")
    with pytest.raises(UserError, match="not a regular file"):
        read_env_files(Path("p.toml"))


def test_a_reference_that_nobody_fills_is_still_a_mistake(
    tmp_path: Path, hostile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stack_of_stand_ins(tmp_path)
    Path(".env").write_text("OTHER=1\n")
    assert (
        main.run(["up", str(path), "--headless", "--run-dir", str(tmp_path / "run")]) == Exit.USAGE
    )
    assert "environment variable GREETING is not set" in capsys.readouterr().err


def test_a_run_below_a_folder_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    """Another user renames the run and puts a folder of links in its place, which it writes to."""
    shared = tmp_path / "shared"
    shared.mkdir()
    for mode, refused in ((0o777, True), (0o1777, False), (0o775, False)):
        shared.chmod(mode)
        expected = pytest.raises(UserError, match="cannot be used") if refused else nullcontext()
        with expected:
            up._refuse_shared_parents(shared / "runs/a", argparse.Namespace(resume=None))
