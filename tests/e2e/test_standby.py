"""A server that is prepared and waits: nothing of its predecessor's is touched, and its engine is
as far as it.

python -m pytest -m "e2e and slow" tests/e2e/test_standby.py

In CI `tests/unit/test_vllm_server_standby.py` drives both processes' waiting without vLLM's import.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atropos_envs.tiny_model import make_tiny_model
from tests.e2e.vllm_server_live import Server, await_ready, begin_server, end_of, still_running
from vllm_server.plugin import ENGINE_IMPORTED

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]
WAITS = {"ATROPOS_WAIT_FOR_GO": "1", "ATROPOS_FORK_ENGINE": "0", "VLLM_ENABLE_SHARED_WEIGHTS": "0"}
"""An adapter's server: one that takes whole weights looks at its predecessor's first."""


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Server]:
    server = begin_server(tmp_path, make_tiny_model(tmp_path / "model"), plain=True, **WAITS)
    deadline = time.monotonic() + 120
    try:
        while ENGINE_IMPORTED not in server.log.read_text():
            assert time.monotonic() < deadline, server.log.read_text()[-3000:]
            time.sleep(0.05)
        yield server
    finally:
        end_of(server.process)


def test_it_waits_with_its_engine_and_takes_over_when_told(waiting: Server) -> None:
    assert not waiting.bridge_dir.exists(), "its predecessor's folder"
    port = int(waiting.url.rsplit(":", 1)[1])
    with socket.create_server(("127.0.0.1", port)):
        pass  # its predecessor's port
    parts = psutil.Process(waiting.process.pid).children(recursive=True)
    assert any(
        "spawn_main" in " ".join(part.cmdline()) or "EngineCore" in part.name() for part in parts
    ), parts
    assert waiting.process.stdin is not None
    waiting.process.stdin.write(b"go\n")
    waiting.process.stdin.close()
    await_ready(waiting)
    print(f"\nfrom the word to the first answer {waiting.started_s:.1f} s")
    assert waiting.generate(prompt={"prompt_token_ids": [1, 2, 3]}, max_tokens=3)["token_ids"]


def test_nobody_needs_it_any_more(waiting: Server) -> None:
    parts = psutil.Process(waiting.process.pid).children(recursive=True)
    assert waiting.process.stdin is not None
    waiting.process.stdin.close()
    assert waiting.process.wait(10) == 0
    psutil.wait_procs(parts, timeout=5)
    assert not still_running(parts)


HIDDEN = """
import os
from vllm_server import app, compat
app.parse_arguments(["--model", "any"])
os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = "77"
compat.import_heavy_parts()
from vllm.v1.engine import core_client
print(core_client.VLLM_ENGINE_READY_TIMEOUT_S, os.environ["VLLM_ENGINE_READY_TIMEOUT_S"])
del os.environ["VLLM_ENGINE_READY_TIMEOUT_S"]
compat.import_heavy_parts()
print("VLLM_ENGINE_READY_TIMEOUT_S" in os.environ)
"""


def test_its_patience_is_no_part_of_the_compile_cache_s_key() -> None:
    """vLLM hashes its environment variables into that key: one more, and the next server compiles
    everything anew."""
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-2:] == ["1000000 77", "False"]
