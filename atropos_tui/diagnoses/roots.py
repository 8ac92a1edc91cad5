"""Find the error line behind the lines that wrap it, and judge whether a restart can help."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence

from atropos_tui.diagnoses.model import ANSI

FAILED = re.compile(
    r"(?:EngineCore|WorkerProc) (?:failed|encountered a fatal error|hit an exception)"
)
"""A vLLM process begins to report its failure."""
WRAPPER = re.compile(
    r"root cause|[Ss]ee stack trace|EngineDeadError|Engine core initialization "
    r"failed|Executor failed\b|lines are above"
    r"|^(?:\w+\.)*(?:SystemExit|KeyboardInterrupt|CancelledError)\b"
)
VANISHED = re.compile(r"died unexpectedly|engine core exited unexpectedly")
"""A process that was killed before it could report."""
ERROR_LINE = re.compile(
    r"^(?:[\w.-]+: )?(?:[Ff]atal )?[Ee]rror: .+|^(?:\d[\d:., -]+ "
    r")?(?:CRITICAL|ERROR|FATAL)\b:? .+|^vllm_server: .+"
)
"""Last error line of a program without a traceback."""
TRACEBACK = "Traceback (most recent call last):"
SOURCE = re.compile(
    r"^(\(\w+(?: [\w=]+)* pid=\d+\) )?((?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL) [\d-]+ "
    r"[\d:]+ \[[^\]]*\] ?)?"
)
"""Prefix of vLLM's log lines."""


def root_error(lines: Sequence[str]) -> str | None:
    """Return the line with the cause, without its log prefix."""
    lines = [ANSI.sub("", line).rstrip() for line in lines]
    # After vLLM's failure line the first exception is the cause; later ones come from other
    # processes.
    begin = next((index for index, line in enumerate(lines) if FAILED.search(line)), None)
    raised = [line for line in _exceptions(lines[begin or 0 :]) if not WRAPPER.search(line)]
    if begin is not None and raised:
        return raised[0]
    vanished = next((line for line in lines if VANISHED.search(line)), None)
    if vanished is not None:
        return _split(vanished)[1]
    errors = [line for line in lines if ERROR_LINE.match(line) and not WRAPPER.search(line)]
    return next(iter([*raised[-1:], *errors[-1:]]), None)


def _exceptions(lines: Sequence[str]) -> Iterator[str]:
    inside: set[str] = set()
    for line in lines:
        source, bare = _split(line)
        if bare == TRACEBACK:
            inside.add(source)
        # The exception is the first line of that process without indentation.
        elif source in inside and bare and not bare[0].isspace():
            inside.remove(source)
            yield bare


def _split(line: str) -> tuple[str, str]:
    match = SOURCE.match(line)
    assert match is not None, "both parts are optional"
    return match[1] or "", line[match.end() :]


PASSING_WORDS = re.compile(
    r"connect|econn|timed?[ -]?out|reachable|resolv|name resolution|temporar|try again|reset "
    r"by peer"
    r"|too many requests|\b(?:429|50[0234])\b|in use|busy|\block(?:ed|file)?\b|out of "
    r"memory|memory profiling"
    r"|cannot allocate|no space left"
    # A hub that answers with a page of its own instead of JSON.
    r"|Expecting value: line 1 column 1 ",
    re.IGNORECASE,
)
"""Words of errors that a restart may cure."""
LASTING = re.compile(r"^(?:\w+\.)*(?:ModuleNotFound|Import|Syntax|Name|Attribute)Error\b")
"""Errors of the code itself, which may name modules such as `connectorx`."""
PASSING_ERRNO = frozenset(
    number
    for name in (
        "EAGAIN",
        "EALREADY",
        "EBUSY",
        "ECOMM",
        "ECONNABORTED",
        "ECONNREFUSED",
        "ECONNRESET",
        "EDEADLK",
        "EDQUOT",
        "EADDRINUSE",
        "EADDRNOTAVAIL",
        "EHOSTDOWN",
        "EHOSTUNREACH",
        "EINTR",
        "EIO",
        "EMFILE",
        "ENETDOWN",
        "ENETRESET",
        "ENETUNREACH",
        "ENFILE",
        "ENOBUFS",
        "ENOLCK",
        "ENOLINK",
        "ENOMEM",
        "ENONET",
        "ENOSPC",
        "ENOTCONN",
        "EPIPE",
        "EPROTO",
        "EREMOTEIO",
        "ESHUTDOWN",
        "ESTALE",
        "ETIMEDOUT",
        "ETXTBSY",
    )
    if (number := getattr(errno, name, None)) is not None
)
"""Error numbers of networks and exhausted resources."""
_ERRNO = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
_NETWORK_ERROR = re.compile(
    r"^(?:\w+\.)*(?:SSL(?!Cert)\w*Error|IncompleteRead|(?:Chunked|Content)\w*Error|\w*ProtocolError|Remote\w*Error"
    r"|RemoteDisconnected|Client(?:Payload|OS)Error|ServerDisconnectedError|MaxRetryError|ProxyError|gaierror"
    r"|URLError|(?:HfHub)?HTTPError|(?:Read|Write|Pool)(?:Error|Timeout)|NVMLError_(?:Unknown|GpuIsLost|Timeout"
    r"|ResetRequired|DriverNotLoaded))\b(?!.*CERTIFICATE_VERIFY_FAILED)"
)
"""Exceptions of network clients, and of a GPU driver that does not answer."""
_VARIES = re.compile(r"0x[0-9a-fA-F]+|\b(?=\w*\d)[0-9a-f]+\b|\btmp\w+|\d+")
"""Addresses, ids, times, ports and pids."""


def is_passing(line: str) -> bool:
    """True if a restart may succeed."""
    if LASTING.match(line):
        return False
    number = next((int(found[1] or found[2]) for found in _ERRNO.finditer(line)), None)
    known = number in PASSING_ERRNO or _NETWORK_ERROR.search(line)
    return bool(known or VANISHED.search(line) or PASSING_WORDS.search(line))


def same_words(one: str, other: str) -> bool:
    """True if two error lines differ in numbers only; an empty line equals none."""
    return bool(one) and _VARIES.sub("#", one) == _VARIES.sub("#", other)
