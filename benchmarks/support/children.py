"""Inference servers, and children that answer each line with a line of JSON.

A child writes `ANSWER {json}` to stdout; whatever else it prints goes to its log, whose end is part
of every error.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx

from atropos_common.net.http import certificates
from atropos_tui.gpu import VISIBLE, given_here, gpus_within
from atropos_tui.profile.ports import is_free

MARK = "ANSWER "
TOKEN = "benchmark-0123456789"
TAIL = 1500
MODE_SERVERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "shared_vllm": ([], {"VLLM_ENABLE_SHARED_WEIGHTS": "1", "ATROPOS_HOLD_GENERATION": "1"}),
    "broadcast": ([], {"ATROPOS_WEIGHT_UPDATES": "1"}),
    "lora_only": (["--enable-lora", "--max-lora-rank", "16"], {}),
    "none": ([], {"ATROPOS_WEIGHT_UPDATES": "1"}),
}
"""Flags and environment of a mode's server; that of `lora_restart` is the trainer's own child."""


class ChildError(RuntimeError):
    """A child failed, or took too long."""


def answer(found: Any) -> None:
    """In a child: the answer to the line that was read."""
    print(MARK + json.dumps(found), flush=True)


def free_ports(count: int) -> list[int]:
    """Return free ports of the loopback."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def free_ports_in_row(count: int) -> int:
    """Return the first of `count` free ports of the loopback, one after another."""
    while True:
        (first,) = free_ports(1)
        if first + count <= 65536 and all(is_free(first + more) for more in range(1, count)):
            return first


def environment(folder: Path, gpu: int | None, extra: dict[str, str]) -> dict[str, str]:
    """This one without the settings of another run; every process has a compile cache of its
    own."""
    mine = {key: value for key, value in os.environ.items() if not key.startswith("ATROPOS_")}
    mine |= {
        "ATROPOS_TOKEN": TOKEN,
        "VLLM_CACHE_ROOT": str(folder / "vllm-cache"),
        "HF_HUB_OFFLINE": "1",
    }
    if gpu is None:
        mine |= {"OMP_NUM_THREADS": "1"}
    else:
        mine |= visible([gpu])
    return mine | extra


def visible(gpus: Iterable[int]) -> dict[str, str]:
    """`CUDA_VISIBLE_DEVICES` of a child process for `gpus`, which count those of this process."""
    return gpus_within({VISIBLE: ",".join(map(str, gpus))}, given_here())


def up(profile: object, run_dir: Path, sets: Mapping[str, object] | None = None) -> list[str]:
    """The command that runs a profile in the foreground without a screen, with these keys of it."""
    command = [
        sys.executable,
        "-m",
        "atropos_tui",
        "up",
        str(profile),
        "--headless",
        "--run-dir",
        str(run_dir),
    ]
    return command + [
        word for key, value in (sets or {}).items() for word in ("--set", f"{key}={value}")
    ]


class Process:
    """One process in a session of its own, its output in `folder`/log."""

    def __init__(
        self, folder: Path, command: list[str], env: dict[str, str], *, talks: bool
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log"
        self.began = time.perf_counter()
        with self.log.open("wb") as out:
            self.popen = subprocess.Popen(
                [sys.executable, *command],
                env=env,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else out,
                stderr=out,
                start_new_session=True,
                text=True,
            )

    def tail(self) -> str:
        return self.log_end(TAIL)

    def log_end(self, most: int = 6000) -> str:
        """Return the last `most` characters of its log."""
        return self.log.read_text(errors="replace")[-most:] if self.log.exists() else ""

    def close(self) -> None:
        """SIGTERM, then SIGKILL for the whole session."""
        if self.popen.poll() is None:
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


class Child(Process):
    """`python -m benchmarks...`, asked line by line."""

    def __init__(self, folder: Path, command: list[str], env: dict[str, str]) -> None:
        super().__init__(folder, command, env, talks=True)
        self._answers: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, request: Any) -> None:
        """Send a line without waiting for its answer."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(json.dumps(request) + "\n")
            self.popen.stdin.flush()
        except OSError:
            raise ChildError(f"{self.log} ended:\n{self.tail()}") from None

    def wait(self, timeout_s: float) -> Any:
        """The next answer.

        Raises:
            ChildError: none within `timeout_s`, the child ended, or it answered with an error.
        """
        try:
            found = self._answers.get(timeout=max(timeout_s, 0.1))
        except queue.Empty:
            raise ChildError(f"no answer within {timeout_s:.0f} s:\n{self.tail()}") from None
        if found is None:
            self._answers.put(None)
            raise ChildError(f"ended with {self.popen.wait()}:\n{self.tail()}")
        if isinstance(found, dict) and found.get("error"):
            raise ChildError(found["error"])
        return found

    def ask(self, request: Any, timeout_s: float) -> Any:
        self.tell(request)
        return self.wait(timeout_s)

    def close(self) -> None:
        """Let it end by itself: there are no more requests. Then close it like every process."""
        assert self.popen.stdin is not None
        with contextlib.suppress(OSError):
            self.popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(10)
        super().close()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.log.open("a") as out:
            for line in self.popen.stdout:
                if line.startswith(MARK):
                    self._answers.put(json.loads(line[len(MARK) :]))
                else:
                    out.write(line)
                    out.flush()
        self._answers.put(None)


class Server(Process):
    """An inference server; `ours` is `python -m vllm_server`, else vLLM's own API server."""

    def __init__(
        self, folder: Path, port: int, flags: list[str], env: dict[str, str], *, ours: bool = True
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.health = "/health_generate" if ours else "/health"
        module = "vllm_server" if ours else "vllm.entrypoints.openai.api_server"
        address = ["--host", "127.0.0.1", "--port", str(port)]
        self.ready_s: float | None = None
        env = env | {"LOGDIR": str(folder / "bridge")}
        super().__init__(folder, ["-m", module, *address, *flags], env, talks=False)

    def is_ready(self) -> bool:
        """Return True if it serves now. Raises: ChildError: it has ended."""
        if self.ready_s is not None:
            return True
        if self.popen.poll() is not None:
            raise ChildError(f"ended with {self.popen.returncode}:\n{self.tail()}")
        try:
            there = httpx.get(
                self.url + self.health, timeout=5, trust_env=False, verify=certificates(self.url)
            )
            if there.status_code == 200:
                self.ready_s = time.perf_counter() - self.began
        except httpx.TransportError:
            pass
        return self.ready_s is not None

    def wait_ready(self, until: float) -> None:
        """Raises ChildError when it does not serve by `until` (`time.perf_counter()` seconds)."""
        while not self.is_ready():
            if time.perf_counter() > until:
                raise ChildError(
                    f"not ready after {time.perf_counter() - self.began:.0f} s:\n{self.tail()}"
                )
            time.sleep(0.2)
