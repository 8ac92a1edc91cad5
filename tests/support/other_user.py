"""Another user of this machine: run a function as uid 65534, in a process forked from the test.

Forked, not started: that user may be unable to read the interpreter and the packages.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NOBODY = 65534
SECOND_USER_S = 30.0

needs_another_user = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can act as another user"
)


class OtherUser:
    """A process of another user that runs `work`; what that returns comes back as JSON."""

    def __init__(self, work: Callable[[], Any], keep: int) -> None:
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                for descriptor in set(range(3, 1024)) - {
                    writing,
                    keep,
                }:  # sockets of the test are not the other user's
                    os.closerange(descriptor, descriptor + 1)
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
                os.write(writing, json.dumps(work()).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(writing)

    def waits(self) -> bool:
        """Return True while it works."""
        return not select.select([self._reading], [], [], 0)[0]

    def said(self, timeout_s: float = SECOND_USER_S) -> Any:
        """Return the result of `work`."""
        give_up = time.monotonic() + timeout_s
        data = b""
        while time.monotonic() < give_up:
            if select.select([self._reading], [], [], 0.1)[0]:
                part = os.read(self._reading, 65536)
                if not part:
                    return json.loads(data)
                data += part
        raise AssertionError("the other user does not come to an end")

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._reading)


@contextmanager
def other_user(work: Callable[[], Any], keep: int = -1) -> Iterator[OtherUser]:
    """`work` as another user, beside the block; of the test's open files it has `keep` alone."""
    there = OtherUser(work, keep)
    try:
        yield there
    finally:
        there.close()


def as_another_user(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, called as another user."""
    with other_user(work) as there:
        return there.said()


def call(
    port: int, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, str, dict[str, str]]:
    """Status, text and headers of one answer. Works in a forked process of that user."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        line.request(method, path, body, {"Content-Type": "application/json"} | (headers or {}))
        answer = line.getresponse()
        return (
            answer.status,
            answer.read().decode(),
            {key.lower(): value for key, value in answer.getheaders()},
        )
    finally:
        line.close()


def squat(port: int, seconds: float, *, pause_s: float = 0.0) -> list[str]:
    """Try for `port` all the time, in every way that there is; what was got, at once when something
    was."""
    kinds = [
        (reuse, share, host)
        for reuse in (0, 1)
        for share in (0, 1)
        for host in ("127.0.0.1", "0.0.0.0")
    ]
    got: list[str] = []
    bound: list[socket.socket] = []
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up and not got:
        for reuse, share, host in kinds:
            attempt = socket.socket()
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, share)
            try:
                attempt.bind((host, port))
                bound.append(attempt)
            except OSError:
                attempt.close()
        for attempt in bound:
            try:
                attempt.listen()
                got.append(str(attempt.getsockname()))
            except OSError:
                continue
        time.sleep(pause_s)
    return got
