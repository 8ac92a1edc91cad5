"""Commands with standard streams that are closed, not UTF-8 or on a full disk, and without a
working directory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui import streams
from atropos_tui.profile.spec import LogPolicy, StackSpec
from tests.support.harness import part, python
from tests.support.run_maker import make_run

HEADLESS = """
import sys
from pathlib import Path
from atropos_common.system.run_dir import RunDir
from atropos_tui import streams
streams.prepare()
from atropos_tui.cli.start import up
from atropos_tui.profile.spec import StackSpec
stack = StackSpec.model_validate_json(Path(sys.argv[1]).read_text())
sys.exit(streams.finish(up._headless(RunDir(Path(stack.run_dir)), stack, goes_on=False), ["up"]))
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path)}


def shell(line: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[bytes]:
    """A line of sh in which `tui` is atropos-tui."""
    text = f'tui() {{ {sys.executable} -P -m atropos_tui "$@"; }}\n{line}'
    return subprocess.run(
        ["bash", "-c", text], capture_output=True, env=env, cwd=cwd, check=False, timeout=120
    )


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """A run that has ended, with a reason that is not Latin."""
    root = make_run(tmp_path / "ended").root
    (root / "result.json").write_text(
        '{"exit_code": 0, "reason": "trainer → 完了"}', encoding="utf-8"
    )
    return root


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("tui ps RUN >&-", 0),
        ("tui ps RUN <&- >&- 2>&-", 0),
        ("tui events RUN 2>&- >/dev/null", 0),
        ("PYTHONIOENCODING=latin-1 tui ps RUN | grep -q ended", 0),
        ("set -o pipefail; PYTHONIOENCODING=latin-1 tui events RUN | grep -q healthy && exit 0", 0),
        ("PYTHONIOENCODING=ascii tui why RUN", 0),
        ("tui ps RUN > /dev/full", 2),
        ("tui --help > /dev/full", 2),
        ("tui wait RUN --for done > /dev/full", 0),
        ("tui ps RUN | true", 0),
        ("mkdir gone; cd gone; rmdir ../gone; tui ps RUN", 0),
        ("mkdir gone; cd gone; rmdir ../gone; tui validate demo", 2),
        ("mkdir gone; cd gone; rmdir ../gone; tui up demo", 2),
        ("mkdir gone; cd gone; rmdir ../gone; tui doctor > /dev/null", 2),
    ],
)
def test_no_surroundings_are_an_internal_error(
    line: str, code: int, env: dict[str, str], ended: Path, tmp_path: Path
) -> None:
    done = shell(line.replace("RUN", str(ended)), env, tmp_path)
    said = done.stderr.decode(errors="replace")
    assert done.returncode == code, said
    assert (
        not list(tmp_path.glob("atropos-tui-fault-*"))
        and "Traceback" not in said
        and "of ours" not in said
    )
    if code and "full" in line:
        assert "bytes of the output are lost: No space left on device" in said
    elif code:
        assert "the current directory does not exist" in said


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_code_of_a_run_does_not_depend_on_its_streams(
    closed: str, code: int, env: dict[str, str], tmp_path: Path
) -> None:
    """It was 1 for a run that had ended well, so that a wrapper started it again."""
    trainer = part("trainer", python(f"raise SystemExit({code})"), ends_run=True)
    stack = StackSpec(
        run_id="t",
        name="t",
        mode="none",
        run_dir=str(tmp_path / "run"),
        components=[trainer],
        logs=LogPolicy(),
    )
    (tmp_path / "stack.json").write_text(stack.model_dump_json())
    (tmp_path / "headless.py").write_text(HEADLESS)
    RunDir(tmp_path / "run").create()
    done = shell(f"{sys.executable} headless.py stack.json {closed}", env, tmp_path)
    assert done.returncode == (3 if code else 0), done.stderr.decode()
    assert (tmp_path / "run/result.json").exists()


PRINTER = """
import sys, time
from atropos_tui import streams
streams.prepare()
from atropos_tui.cli.show import Printer
with Printer() as printer:
    for line in ("pending → starting", "healthy", "step 1", "step 2", "run ended"):
        printer.say(line)
        time.sleep(0.3)
sys.exit(streams.finish(0, ["up"]))
"""


def test_a_run_that_prints_in_latin_1_is_not_silent(env: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRINTER],
        env=env | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert done.stdout.decode("latin-1").splitlines()[::4] == ["pending ? starting", "run ended"]


def test_what_a_full_disk_refuses_is_counted_and_printing_goes_on(tmp_path: Path) -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    output = streams.Output(descriptor)
    assert [output.write(line) for line in (b"one\n", b"two\n")] == [4, 4]
    assert (output.lost, output.problem) == (8, "No space left on device")
    room = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(room, descriptor)
    output.write(b"room again\n")
    os.close(room)
    os.close(descriptor)
    note = "[atropos] 8 bytes of output are missing here: No space left on device\n"
    assert (tmp_path / "log").read_text() == note + "room again\n"


def test_a_stream_that_somebody_made_non_blocking_is_waited_for() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    output, got = streams.Output(writing), bytearray()

    def read() -> None:
        time.sleep(0.2)
        while len(got) < 3_000_000 and (data := os.read(reading, 65536)):
            got.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    sent = 0
    while sent < 3_000_000:
        sent += output.write(bytes(3_000_000 - sent))
    reader.join(20)
    os.close(writing)
    os.close(reading)
    assert len(got) == 3_000_000 and not output.lost
