"""Daemons of a test: it starts and ends them, and keeps the output of each in a file."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

HOSTS = {"n1": "127.0.0.11", "n2": "127.0.0.12", "n3": "127.0.0.13"}
"""Three nodes on one host: what binds to one of these addresses is not reached at another, nor at
127.0.0.1."""


class Missing(RuntimeError):
    """A program that these nodes are made of is not installed."""


def program(name: str, package: str) -> str:
    """Where a daemon's program lies; those of the system are not on everybody's PATH.

    Raises:
        Missing: it is nowhere.
    """
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/sbin")
    if found is None:
        raise Missing(f"{name} is not installed: apt-get install {package}")
    return found


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody uses now."""
    with socket.socket() as held:
        held.bind((host, 0))
        return int(held.getsockname()[1])


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait for a condition; `what` says in the error what did not come."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{what} did not come within {timeout_s:.0f} s")
        time.sleep(0.05)


def listens(host: str, port: int) -> bool:
    """Return True if a program accepts connections there."""
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


class Daemons:
    """Programs in the foreground, as children of this process; the one started last ends first."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.env = dict(env)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> None:
        """Begin `command`; its output goes to NAME.out."""
        with (self.folder / f"{name}.out").open("ab") as out:
            self.running[name] = subprocess.Popen(
                command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def pid(self, name: str) -> int:
        return self.running[name].pid

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to one of them; after one that ends it, it is reaped."""
        child = self.running[name]
        child.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            child.wait(timeout=10)

    def stop(self) -> None:
        """End them all."""
        for child in reversed(self.running.values()):
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGCONT)
                child.terminate()
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def said(self) -> str:
        """The end of what each has said, for an error."""
        return "\n".join(
            f"{file.name}: {file.read_text(errors='replace')[-800:]}"
            for file in self.folder.glob("*.out")
        )


def named(word: str) -> list[psutil.Process]:
    """Processes with `word` somewhere in their command line or environment: what a cluster or a run
    has left."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(word in part for part in (*process.cmdline(), *process.environ().values())):
                found.append(process)
    return found
