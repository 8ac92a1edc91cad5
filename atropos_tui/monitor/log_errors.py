"""The errors in the logs of a run, by component: how many, and each kind's newest line. For the page of a report."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

from atropos_common.run_dir import RunDir
from atropos_tui.monitor.format import masked_line
from atropos_tui.monitor.log_buffer import Classifier
from atropos_tui.monitor.log_reader import LogReader

LINES = 50_000
"""Of each component, the newest."""
KINDS = 8
"""Kinds of errors of a component that are kept, the newest."""
_FIGURES = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass
class Errors:
    """Of one component."""

    component: str
    count: int
    kinds: list[tuple[float, int, str]]
    """Time of the newest, how many, and its text; the newest kind first."""


def errors_of(run: RunDir) -> list[Errors]:
    """The errors of every component that printed any. Lines that differ only in figures are of one kind."""
    try:
        folders = sorted(folder for folder in run.logs.iterdir() if folder.is_dir())
    except OSError:
        return []
    found = []
    for folder in folders:
        reader, classifier = LogReader(folder, "all"), Classifier()
        reader.skip(count=LINES)
        kinds: dict[str, tuple[float, int, str]] = {}
        count = 0
        for line in chain(reader.drain(), reader.rest()):
            is_first = not line.text.startswith((" ", "\t"))  # what a traceback holds belongs to its error
            if classifier.kind(line.text) == "error" and is_first and line.text.strip():
                count += 1
                kind = _FIGURES.sub("#", line.text)
                kinds[kind] = line.time, kinds.pop(kind, (0.0, 0, ""))[1] + 1, masked_line(line.text)
        reader.close()
        if count:
            found.append(Errors(masked_line(folder.name), count, list(kinds.values())[: -KINDS - 1 : -1]))
    return found
