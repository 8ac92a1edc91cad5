"""The owner of a port: a foreign process, a live run of ours, or the rest of a dead run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atropos_tui.diagnoses import port_taken
from atropos_tui.profile import ports

LISTEN = (
    "import socket,sys,time; s=socket.socket(); s.bind(('127.0.0.1',0)); s.listen(); "
    "print(s.getsockname()[1],flush=True); time.sleep(600)"
)


@contextmanager
def listening(**environ: str) -> Iterator[tuple[int, int]]:
    """Port and pid of a process that was started with `environ`."""
    env = {
        key: value for key, value in os.environ.items() if not key.startswith("ATROPOS_")
    } | environ
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN], env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        yield int(process.stdout.readline()), process.pid
    finally:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


def test_a_foreign_process_is_named() -> None:
    with listening() as (port, pid):
        found = ports.holder(port)
        assert found is not None
        assert f"(pid {pid}): " in str(found) and "run" not in str(found).partition(":")[0]
        assert found.way_out.startswith("stop python") and found.way_out.endswith(f"(pid {pid})")


def test_a_live_run_is_named_with_the_command_that_ends_it(tmp_path: Path) -> None:
    address = f"/tmp/atropos-test-{os.getpid()}.sock"
    run = {
        "ATROPOS_RUN_ID": "demo-1",
        "ATROPOS_RUN_DIR": "/runs/my demo",
        "ATROPOS_COMPONENT": "vllm",
    }
    try:
        with (
            socket.socket(socket.AF_UNIX) as supervisor,
            listening(ATROPOS_CONTROL_SOCKET=address, **run) as (port, pid),
        ):
            supervisor.bind(address)
            supervisor.listen()
            found = port_taken("api", port, "address already in use")
            assert (
                "held by vllm of live run demo-1, python" in found.evidence
                and f"(pid {pid})" in found.evidence
            )
            assert "end that run: atropos-tui down --run-dir '/runs/my demo'" in found.fix
            assert "give api another port" in found.fix
    finally:
        Path(address).unlink(missing_ok=True)


def test_what_a_dead_run_left_is_named_with_clean(tmp_path: Path) -> None:
    gone = str(tmp_path / "control.sock")
    with listening(ATROPOS_RUN_ID="demo-2", ATROPOS_CONTROL_SOCKET=gone) as (port, _):
        found = ports.holder(port)
        assert found is not None
        assert str(found).startswith("a process of run demo-2, ")
        assert "atropos-tui clean" in found.way_out


def test_a_free_port_has_no_holder() -> None:
    assert ports.holder(ports.free_port()) is None
