"""Inference servers that start in seconds on a CPU: forked from a process that has imported vLLM already.

    python -m benchmarks.server_nursery

Each line on stdin is a request {"argv": [...], "env": {...}, "log": FILE}; the answer is the pid of a server that runs
`python -m vllm_server` in a session of its own. Servers die with this process; how one ended is written to FILE.exit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
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
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid:
            threading.Thread(target=_reap, args=[pid, Path(request["log"] + ".exit")], daemon=True).start()
            answer({"pid": pid})
            continue
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


def _reap(pid: int, place: Path) -> None:
    place.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    place.with_suffix(".new").rename(place)


class ForkedProcess:
    """A server of the nursery with the ways of `subprocess.Popen`."""

    def __init__(self, nursery: Child, argv: list[str], env: dict[str, str], log: Path) -> None:
        self._exit = Path(f"{log}.exit")
        self._exit.unlink(missing_ok=True)  # of an earlier one in this place
        self.pid: int = nursery.ask({"argv": argv, "env": env, "log": str(log)}, 30)["pid"]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative after a signal; null while it runs."""
        if self.returncode is None and self._exit.exists():
            self.returncode = int(self._exit.read_text())
        return self.returncode

    def wait(self, timeout: float = 15) -> int:
        """Its exit code.

        Raises:
            TimeoutExpired: it still runs after `timeout` seconds.
        """
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("vllm_server", timeout)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forked(Server):
    """A server out of the nursery, with the ways of one that was started."""

    def __init__(self, nursery: Child, folder: Path, port: int, flags: list[str], env: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log, self.began, self.ready_s = folder / "log", time.perf_counter(), None
        self.url, self.health = f"http://127.0.0.1:{port}", "/health_generate"
        argv = ["--host", "127.0.0.1", "--port", str(port), *flags]
        env = env | {"LOGDIR": str(folder / "bridge")}
        self.popen = ForkedProcess(nursery, argv, env, self.log)  # type: ignore[assignment]

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-TAIL:] if self.log.exists() else ""


if __name__ == "__main__":
    main()
