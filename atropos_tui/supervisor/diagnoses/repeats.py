"""Would the same start fail in the same way again? Pure, on the error line and the rule that explains the end."""

from __future__ import annotations

import re

from atropos_tui.supervisor.diagnoses.roots import VANISHED, root_error

PASSING_RULES = frozenset(
    {
        "api_unreachable", "broadcast_broke", "dataset_unreachable", "disk_full", "engine_unreachable",
        "env_not_registered", "gloo_stuck", "health_timeout", "killed", "manifest_missing", "manifest_stale",
        "nccl_failed", "out_of_host_memory", "out_of_memory", "port_in_use", "shm_full", "too_many_files",
        "trainer_not_registered",
    }
)  # fmt: skip
"""What another process, or the machine, holds or has not done yet: the next start may find it otherwise."""
PASSING_WORDS = re.compile(
    r"connect|timed?[ -]?out|reachable|refused|resolv|name resolution|temporar|try again|reset by peer"
    r"|too many requests|\b(?:429|50[0234])\b|in use|busy|\block(?:ed|file)?\b|out of memory|memory profiling"
    r"|cannot allocate|no space left",
    re.IGNORECASE,
)
"""The same, in errors that no rule knows."""
_VARIES = re.compile(r"0x[0-9a-fA-F]+|\b(?=\w*\d)[0-9a-f]+\b|\btmp\w+|\d+")
"""Addresses, ids, times, ports and pids."""


def lasting_error(rule: str, lines: list[str]) -> str:
    """The error line of a log whose end `rule` explains; empty where there is none, or where another try can help."""
    line = root_error(lines)
    if line is None or rule in PASSING_RULES or VANISHED.search(line) or PASSING_WORDS.search(line):
        return ""
    return line


def same_words(one: str, other: str) -> bool:
    """Whether two error lines differ in numbers only. What says nothing is like nothing."""
    return bool(one) and _VARIES.sub("#", one) == _VARIES.sub("#", other)
