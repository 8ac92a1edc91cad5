"""Which line of a log is the error, not one of those that wrap it, and would it come again? Pure.

When vLLM's engine dies, the last lines are wrappers ("See root cause above"); the first traceback of the process that
failed holds the reason.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence

from atropos_tui.diagnoses.model import ANSI

FAILED = re.compile(r"(?:EngineCore|WorkerProc) (?:failed|encountered a fatal error|hit an exception)")
"""With such a line a process of vLLM begins to say why it dies."""
WRAPPER = re.compile(
    r"root cause|[Ss]ee stack trace|EngineDeadError|Engine core initialization failed|Executor failed\b|lines are above"
    r"|^(?:\w+\.)*(?:SystemExit|KeyboardInterrupt|CancelledError)\b"
)
VANISHED = re.compile(r"died unexpectedly|engine core exited unexpectedly")
"""A process that could say nothing more: it was killed."""
SAID = re.compile(
    r"^(?:[\w.-]+: )?(?:[Ff]atal )?[Ee]rror: .+|^(?:\d[\d:., -]+ )?(?:CRITICAL|ERROR|FATAL)\b:? .+|^vllm_server: .+"
)
"""How a program says its last error where it prints no traceback; ours too."""
TRACEBACK = "Traceback (most recent call last):"
SOURCE = re.compile(
    r"^(\(\w+(?: [\w=]+)* pid=\d+\) )?((?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL) [\d-]+ [\d:]+ \[[^\]]*\] ?)?"
)
"""What vLLM puts before each line: the process, then level, time and place."""


def root_error(lines: Sequence[str]) -> str | None:
    """The line that tells why a program failed, without what a logger put before it; None where there is none."""
    lines = [ANSI.sub("", line).rstrip() for line in lines]
    begin = next((index for index, line in enumerate(lines) if FAILED.search(line)), None)
    raised = [line for line in _exceptions(lines[begin or 0 :]) if not WRAPPER.search(line)]
    if begin is not None and raised:
        return raised[0]
    vanished = next((line for line in lines if VANISHED.search(line)), None)
    if vanished is not None:
        return _split(vanished)[1]
    said = [line for line in lines if SAID.match(line) and not WRAPPER.search(line)]
    return next(iter([*raised[-1:], *said[-1:]]), None)


def _exceptions(lines: Sequence[str]) -> Iterator[str]:
    """The last line of each traceback, in the order in which they end; processes may print at once."""
    inside: set[str] = set()
    for line in lines:
        source, bare = _split(line)
        if bare == TRACEBACK:
            inside.add(source)
        elif source in inside and bare and not bare[0].isspace():
            inside.remove(source)
            yield bare


def _split(line: str) -> tuple[str, str]:
    """Who says a line, and the line."""
    match = SOURCE.match(line)
    assert match is not None, "both parts are optional"
    return match[1] or "", line[match.end() :]


PASSING_WORDS = re.compile(
    r"connect|econn|timed?[ -]?out|reachable|resolv|name resolution|temporar|try again|reset by peer"
    r"|too many requests|\b(?:429|50[0234])\b|in use|busy|\block(?:ed|file)?\b|out of memory|memory profiling"
    r"|cannot allocate|no space left",
    re.IGNORECASE,
)
"""Words for what another process holds or the machine has not done yet, in errors that no rule knows."""
PASSING_ERRNO = frozenset(
    number
    for name in (
        "EAGAIN", "EALREADY", "EBUSY", "ECOMM", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EDEADLK", "EDQUOT",
        "EADDRINUSE", "EADDRNOTAVAIL", "EHOSTDOWN", "EHOSTUNREACH", "EINTR", "EIO", "EMFILE", "ENETDOWN", "ENETRESET",
        "ENETUNREACH", "ENFILE", "ENOBUFS", "ENOLCK", "ENOLINK", "ENOMEM", "ENONET", "ENOSPC", "ENOTCONN", "EPIPE",
        "EPROTO", "EREMOTEIO", "ESHUTDOWN", "ESTALE", "ETIMEDOUT", "ETXTBSY",
    )
    if (number := getattr(errno, name, None)) is not None
)  # fmt: skip
"""Errors of a network, of a network disk, and of a machine that is out of something."""
_ERRNO = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
_NETWORK_ERROR = re.compile(
    r"^(?:\w+\.)*(?:SSL(?!Cert)\w*Error|IncompleteRead|(?:Chunked|Content)\w*Error|\w*ProtocolError|Remote\w*Error"
    r"|RemoteDisconnected|Client(?:Payload|OS)Error|ServerDisconnectedError|MaxRetryError|ProxyError|gaierror"
    r"|URLError|(?:HfHub)?HTTPError|(?:Read|Write|Pool)(?:Error|Timeout)|NVMLError_(?:Unknown|GpuIsLost|Timeout"
    r"|ResetRequired|DriverNotLoaded))\b(?!.*CERTIFICATE_VERIFY_FAILED)"
)
"""Exceptions of clients of HTTP and TLS, and of a driver that does not answer."""
_VARIES = re.compile(r"0x[0-9a-fA-F]+|\b(?=\w*\d)[0-9a-f]+\b|\btmp\w+|\d+")
"""Addresses, ids, times, ports and pids."""


def is_passing(line: str) -> bool:
    """Return whether another start may succeed, by error number, exception or words of its error line."""
    number = next((int(found[1] or found[2]) for found in _ERRNO.finditer(line)), None)
    known = number in PASSING_ERRNO or _NETWORK_ERROR.search(line)
    return bool(known or VANISHED.search(line) or PASSING_WORDS.search(line))


def same_words(one: str, other: str) -> bool:
    """Whether two error lines differ in numbers only. What says nothing is like nothing."""
    return bool(one) and _VARIES.sub("#", one) == _VARIES.sub("#", other)
