"""Hatchling metadata hook: the README of a package, whose links must work outside a checkout.

README.md links files as they lie, for a checkout and a code host. A package index shows the text
alone. There each link leads to the repository, at the tag of the packaged version.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z][a-z0-9+.-]*:|#)([^)\s]+\))")


class AbsoluteReadme(MetadataHookInterface):
    """The field `readme`, from README.md and the repository's address in `[project.urls]`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        version = re.search(
            r'^__version__ = "(.+)"', Path(self.root, "atropos_tui/__init__.py").read_text(), re.M
        )
        assert version is not None
        text = absolute(text, metadata["urls"]["Repository"], f"v{version[1]}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(markdown: str, repository: str, tag: str) -> str:
    """Return `markdown` with each relative link to a file of the repository at `tag`."""

    def moved(found: re.Match[str]) -> str:
        image, begin, target = found.groups()
        return f"{image}{begin}{repository}/{'raw' if image else 'blob'}/{tag}/{target}"

    return LINK.sub(moved, markdown)
