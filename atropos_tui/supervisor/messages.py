"""What is sent to the core; `attempt` tells a late message from a present one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from atropos_tui.supervisor.diagnoses import Diagnosis
from atropos_tui.supervisor.probe import ProbeResult
from trainer_core.contracts.control import Accepted, CommandRequest


@dataclass(frozen=True)
class Exited:
    """The main process of a component ended; others of its set may live."""

    name: str
    attempt: int


@dataclass(frozen=True)
class Leftovers:
    """It ended by itself and left so many others, which are being ended."""

    name: str
    attempt: int
    count: int


@dataclass(frozen=True)
class Draining:
    """No process of its set is left, but this much GPU memory is not back yet."""

    name: str
    attempt: int
    memory: str


@dataclass(frozen=True)
class Staged:
    """Its log shows that it reached a stage."""

    name: str
    attempt: int
    stage: str


@dataclass(frozen=True)
class Gone:
    """No process of its set is left, and its GPU memory is back."""

    name: str
    attempt: int
    killed: int
    """How many did not go by themselves."""
    diagnosis: Diagnosis | None
    error: str = ""
    """The error line of its log, where another start would fail in the same way."""


@dataclass(frozen=True)
class Verdict:
    """A probe changed its mind."""

    name: str
    attempt: int
    result: ProbeResult


@dataclass(frozen=True)
class Deadline:
    """`start_timeout_s` is over."""

    name: str
    attempt: int


@dataclass(frozen=True)
class Noted:
    """Something is wrong with a component that changes no state."""

    name: str
    diagnosis: Diagnosis
    attempt: int | None = None
    """Set by rules that watch: they speak once in an attempt."""


@dataclass(frozen=True)
class PortTaken:
    """The port of a component that shall start is held by a stranger and did not become free."""

    name: str
    diagnosis: Diagnosis


@dataclass(frozen=True)
class Submit:
    """A command; the future gets the answer."""

    request: CommandRequest
    answer: asyncio.Future[Accepted]


@dataclass(frozen=True)
class Interrupt:
    """A signal to the supervisor: the first one stops the stack, the second kills it."""

    name: str


@dataclass(frozen=True)
class Hurry:
    """Patience is over: kill what is left."""


@dataclass(frozen=True)
class Wake:
    """Look again at what is possible now."""


@dataclass(frozen=True)
class Fault:
    """A helper task of the supervisor raised: a fault of ours."""

    error: BaseException


Message = (
    Exited
    | Leftovers
    | Draining
    | Staged
    | Gone
    | Verdict
    | Deadline
    | Noted
    | PortTaken
    | Submit
    | Interrupt
    | Hurry
    | Wake
    | Fault
)
