"""Start processes at once by forking one that has already imported the slow modules.

    python -m benchmarks.support.nursery MODULE...

Each line on stdin is a request {"call": "module:function", "args": [...], "env": {...}, "cwd": DIR,
"stdin": FILE, "log": FILE}; the answer is the pid of a process that ends with what the function
returns for `args`, in a session of its own. Or it is {"modules": [...]}, further ones to import.
All processes die with this one; how one ended is written to LOG.exit. On a CPU neither torch nor
vLLM starts a thread when it is imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from atropos_common.system.parent_death import die_with_parent
from benchmarks.support.children import Child, Server, answer

VLLM = "vllm_server.app"
"""Module that an inference server imports."""


def main(modules: list[str]) -> None:
    _import(modules)
    for line in sys.stdin:
        request = json.loads(line)
        if "modules" in request:
            _import(request["modules"])
            continue
        pid = os.fork()
        if pid:
            threading.Thread(
                target=_reap, args=[pid, Path(request["log"] + ".exit")], daemon=True
            ).start()
            answer({"pid": pid})
            continue
        _run(request)


def _import(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    # what was imported stays: no child looks through it for garbage, which would copy its pages
    gc.freeze()
    answer({"ready": True})


def _run(request: dict[str, Any]) -> None:
    """In the new process: as if it had been started with this environment."""
    os.setsid()
    die_with_parent(os.getppid())
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # of the environment before
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:0] = [each for each in given if each not in sys.path]
    out = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.chdir(request["cwd"])
    os.dup2(os.open(request["stdin"], os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    module, function = request["call"].split(":")
    sys.argv = [module, *request["args"]]
    sys.exit(getattr(importlib.import_module(module), function)(request["args"]))


def _reap(pid: int, place: Path) -> None:
    place.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    place.with_suffix(".new").rename(place)


class ForkedProcess:
    """A process of the nursery with the ways of `subprocess.Popen`; it runs `call` with `args`, its
    output in `log`."""

    def __init__(
        self,
        nursery: Child,
        call: str,
        args: list[str],
        env: dict[str, str],
        log: Path,
        stdin: Path | None = None,
    ) -> None:
        self._exit = Path(f"{log}.exit")
        self._exit.unlink(missing_ok=True)  # of an earlier one in this place
        log.write_bytes(b"")  # it can be read at once
        request = {"call": call, "args": args, "env": env, "cwd": str(Path.cwd()), "log": str(log)}
        self.pid: int = nursery.ask(request | {"stdin": str(stdin or os.devnull)}, 30)["pid"]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while it runs."""
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
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(
                ProcessLookupError
            ):  # it has ended since, as `subprocess.Popen` has it
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def forked_server(nursery: Child, argv: list[str], env: dict[str, str], log: Path) -> ForkedProcess:
    """Start a process that does what `python -m vllm_server ARGV` does."""
    return ForkedProcess(nursery, "vllm_server.__main__:main", argv, env, log)


class Forked(Server):
    """A server out of the nursery, with the ways of one that was started."""

    def __init__(
        self, nursery: Child, folder: Path, port: int, flags: list[str], env: dict[str, str]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log, self.began, self.ready_s = folder / "log", time.perf_counter(), None
        self.url, self.health = f"http://127.0.0.1:{port}", "/health_generate"
        argv = ["--host", "127.0.0.1", "--port", str(port), *flags]
        env = env | {"LOGDIR": str(folder / "bridge")}
        self.popen = forked_server(nursery, argv, env, self.log)  # type: ignore[assignment]


if __name__ == "__main__":
    main(sys.argv[1:])
