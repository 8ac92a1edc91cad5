"""Inference servers that start in seconds on a CPU: forked from a process that has imported vLLM already.

    python -m benchmarks.server_nursery

Each line on stdin is a request {"argv": [...], "env": {...}, "log": FILE}; the answer is the pid of a server that runs
`python -m vllm_server` in a session of its own. Servers die with this process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from atropos_common.parent_death import die_with_parent
from benchmarks.children import TAIL, Child, Server, answer


def main() -> None:
    from vllm_server import __main__ as server
    from vllm_server import compat

    compat.require_parts()
    from vllm_server import app  # noqa: F401  its imports are what takes long

    answer({"ready": True})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid:
            answer({"pid": pid})
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        die_with_parent(os.getppid())
        os.environ.clear()
        os.environ.update(request["env"])
        out, nothing = os.open(request["log"], os.O_WRONLY | os.O_CREAT, 0o600), os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.argv = ["vllm_server", *request["argv"]]
        sys.exit(server.main(request["argv"]))


class Forked(Server):
    """A server out of the nursery, with the ways of one that was started."""

    def __init__(self, nursery: Child, folder: Path, port: int, flags: list[str], env: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log, self.began, self.ready_s = folder / "log", time.perf_counter(), None
        self.url, self.health = f"http://127.0.0.1:{port}", "/health_generate"
        argv = ["--host", "127.0.0.1", "--port", str(port), *flags]
        request = {"argv": argv, "env": env | {"LOGDIR": str(folder / "bridge")}, "log": str(self.log)}
        self.popen = _Gone(nursery.ask(request, 30)["pid"])  # type: ignore[assignment]

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-TAIL:] if self.log.exists() else ""


class _Gone:
    """What `Server` asks of a process, of one that is another's child."""

    returncode = "an error"

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        return None if Path(f"/proc/{self.pid}").exists() else 1

    def terminate(self) -> None:
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGTERM)

    def wait(self, timeout: float = 15) -> None:
        until = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.05)


if __name__ == "__main__":
    main()
