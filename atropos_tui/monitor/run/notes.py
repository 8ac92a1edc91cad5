"""Note and tags of a run, kept in its directory as notes.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from atropos_common.system.files import write_private
from atropos_common.system.run_dir import RunDir, is_safe_name
from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.run.run_files import read_json

LONGEST = 2_000  # characters of a note
MOST_TAGS = 20


@dataclass(frozen=True)
class Notes:
    """A person's words about a run."""

    text: str = ""
    tags: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.tags)

    @property
    def line(self) -> str:
        """Tags and text in one line."""
        return " ".join([*(f"#{tag}" for tag in self.tags), self.text]).strip()


def read_notes(run: RunDir) -> Notes:
    """Read the notes of `run`; what is invalid is left out."""
    data = read_json(run.notes_json)
    text, tags = data.get("text"), data.get("tags")
    return Notes(
        one_line(text)[:LONGEST] if isinstance(text, str) else "",
        _distinct(tags) if isinstance(tags, list) else (),
    )


def write_notes(run: RunDir, notes: Notes) -> None:
    """Replace the notes of `run`; empty ones remove the file.

    Raises:
        OSError: the file cannot be written.
    """
    if notes:
        words = {"text": notes.text, "tags": notes.tags}
        write_private(run.notes_json, json.dumps(words, indent=2) + "\n")
    else:
        run.notes_json.unlink(missing_ok=True)


def notes_of(text: str, tags: Iterable[str]) -> Notes:
    """Make notes of what a person typed.

    Raises:
        ValueError: with the reason and the way out.
    """
    words = one_line(" ".join(text.split()))
    if len(words) > LONGEST:
        raise ValueError(f"the note has {len(words):,} characters: at most {LONGEST:,} are kept")
    names = [name for tag in tags if (name := tag.strip().removeprefix("#"))]
    if wrong := next((name for name in names if not is_safe_name(name)), None):
        raise ValueError(f"{one_line(wrong)!r} is not a tag: use letters, digits, . _ and -")
    if len(found := _distinct(names)) > MOST_TAGS:
        raise ValueError(f"{len(found)} tags: a run has at most {MOST_TAGS}")
    return Notes(words, found)


def _distinct(tags: Iterable[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tag for tag in tags if isinstance(tag, str) and is_safe_name(tag)))
