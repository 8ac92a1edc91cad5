"""Processes that will be the next attempt of a component: they import everything, then wait for the line `go`.

One waits per component. It is no member of the component yet (`Tracker.set_aside`), listens nowhere, and dies with
this process. What it prints stays in its pipe: the log belongs to the attempt that runs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from atropos_tui.supervisor.environment import Launch
from atropos_tui.supervisor.process import Child, spawn
from trainer_core.contracts.run_dir import ENV_WAIT_FOR_GO, GO_LINE


@dataclass(frozen=True)
class Waiting:
    """One that waits."""

    attempt: int
    launch: Launch
    """What the attempt would be started with; if that has changed by then, it is of no use."""
    child: Child
    output: int
    """Read end of the pipe with its stdout and stderr."""
    word: int
    """Write end of its stdin."""

    def discard(self) -> None:
        os.close(self.word)
        os.close(self.output)
        self.child.abandon()

    def tell(self) -> bool:
        """Say `go`; False if nobody is there to hear it."""
        try:
            os.write(self.word, GO_LINE)
        except BrokenPipeError:
            return False
        return self.child.exit_code is None


class Standby:
    """Those of one run."""

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}

    def prepare(self, name: str, attempt: int, launch: Launch, group: str) -> int:
        """Let one wait to be `attempt` of component `name`; nothing happens if it does already.

        Args:
            group: the control group of that attempt, or "".

        Returns:
            Its pid, which is its session.

        Raises:
            OSError: it cannot be started.
        """
        there = self._waiting.get(name)
        if there and there.attempt == attempt and there.launch == launch and there.child.exit_code is None:
            return there.child.pid
        self.discard(name)
        listening, word = os.pipe2(os.O_CLOEXEC)
        try:
            env = launch.env | {ENV_WAIT_FOR_GO: "1"}
            child, output = spawn(launch.command, env, launch.cwd, group=group, stdin=listening)
        except OSError:
            os.close(word)
            raise
        finally:
            os.close(listening)
        self._waiting[name] = Waiting(attempt, launch, child, output, word)
        return child.pid

    def take(self, name: str, attempt: int, launch: Launch) -> tuple[Child, int] | None:
        """The process that waited to be this attempt, told to go, and the read end of its pipe; null if none does."""
        found = self._waiting.pop(name, None)
        if found is None:
            return None
        if found.attempt != attempt or found.launch != launch or not found.tell():
            found.discard()
            return None
        os.close(found.word)
        return found.child, found.output

    def discard(self, name: str | None = None) -> None:
        """Nobody waits any more to be the next of `name`, or of anyone."""
        for each in list(self._waiting) if name is None else [name]:
            if found := self._waiting.pop(each, None):
                found.discard()
