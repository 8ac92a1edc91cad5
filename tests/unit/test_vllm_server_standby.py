"""A server that waits: it imports first, takes nothing before `go`, and its engine process waits
with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

WAITS = """
import os, sys
from vllm_server import compat, plugin
asked = plugin.is_asked(os.environ)
if asked:
    compat.import_parts(["json.tool", "no.such.part"])
print(asked and plugin.is_told_to_go(), "json.tool" in sys.modules, os.environ.get("ATROPOS_WAIT_FOR_GO"))
"""


@pytest.mark.parametrize(("said", "answer"), [("go\n", "True"), ("", "False"), ("stop\n", "False")])
def test_a_server_that_waits_imports_first_and_goes_when_told(said: str, answer: str) -> None:
    environment = os.environ | {"ATROPOS_WAIT_FOR_GO": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WAITS],
        input=said,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [answer, "True", "None"], (
        "a process that executes itself again does not wait again"
    )


def test_others_do_not_wait_at_all() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WAITS],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "False", "None"]


SERVER = """
import multiprocessing, os, sys, time
from vllm_server import plugin

def engine(late):
    time.sleep(late)
    plugin.wait_in_engine(os.environ, ["json.tool"])
    print("engine", os.getpid(), "json.tool" in sys.modules, os.environ.get("ATROPOS_ENGINE_LOCK"), flush=True)

def arrive():
    print("arrives", flush=True)
    if "taken" in sys.argv:
        raise ValueError("the port is taken")
    return 7

def leave(code):
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)

if __name__ == "__main__":
    turn = plugin.Turn(os.environ, arrive, leave)
    plugin.wait_in_engine(os.environ, ["json.tool"])  # vLLM loads plugins in the server, too, which must not wait
    child = multiprocessing.get_context("spawn").Process(target=engine, args=(float(sys.argv[1]),))
    child.start()
    print("begun", child.pid, flush=True)
    if "refused" in sys.argv:
        raise SystemExit(3)
    child.join()
    print("result", turn.result(), flush=True)
"""


@pytest.fixture
def waiting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    process = subprocess.Popen(
        [sys.executable, script, *request.param],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    yield process
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream is not None
        stream.close()


def begun(process: subprocess.Popen[str]) -> psutil.Process:
    assert process.stdout is not None
    name, pid = process.stdout.readline().split()
    assert name == "begun"
    return psutil.Process(int(pid))


def say(process: subprocess.Popen[str], text: str) -> list[str]:
    """Say it, and the lines until the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(text)
    process.stdin.close()
    lines = process.stdout.read().splitlines()
    process.wait(10)
    return lines


@pytest.mark.parametrize("waiting", [["0"]], indirect=True)
def test_the_engine_waits_until_the_server_has_arrived(waiting: subprocess.Popen[str]) -> None:
    engine = begun(waiting)
    time.sleep(1)
    assert engine.is_running(), "it waits"
    assert say(waiting, "go\n") == ["arrives", f"engine {engine.pid} True None", "result 7"]
    assert waiting.returncode == 0


@pytest.mark.parametrize("waiting", [["1"]], indirect=True)
def test_an_engine_that_comes_after_the_word_does_not_wait(waiting: subprocess.Popen[str]) -> None:
    engine = begun(waiting)
    assert say(waiting, "go\n") == ["arrives", f"engine {engine.pid} True None", "result 7"]


@pytest.mark.parametrize("waiting", [["0"]], indirect=True)
def test_nobody_needs_it_any_more(waiting: subprocess.Popen[str]) -> None:
    engine = begun(waiting)
    assert say(waiting, "") == [] and waiting.returncode == 0
    engine.wait(5)


@pytest.mark.parametrize("waiting", [["0", "refused"]], indirect=True)
def test_a_server_that_fails_while_it_waits_ends_with_its_own_code(
    waiting: subprocess.Popen[str],
) -> None:
    """Its engine is no daemon here, so the interpreter waits for it, as it does when vLLM has ended
    its own."""
    begun(waiting).kill()
    assert waiting.wait(10) == 3, "Python aborts (-6) over a thread that waits inside `sys.stdin`"


@pytest.mark.parametrize("waiting", [["0", "taken"]], indirect=True)
def test_what_goes_wrong_on_arrival_ends_it_at_once(waiting: subprocess.Popen[str]) -> None:
    engine = begun(waiting)
    assert say(waiting, "go\n") == ["arrives"] and waiting.returncode == 2
    engine.wait(5)
    assert waiting.stderr is not None and "vllm_server: the port is taken" in waiting.stderr.read()
