"""Source tree of the documentation site: pages of the repository, and the generated reference.

    python -m tools.site FOLDER    # then the site generator builds FOLDER; `make docs` does both

Documents link each other by their places in the repository, so links work in a checkout and on a
code host. In the tree `docs/` is the root and the README is the first page.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import shutil
import sys
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from tools import reference

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|#")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the source tree of the docs.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="replaced as a whole")
    folder = parser.parse_args().folder
    pages, nav = write(folder), nav_pages()
    problems = [
        *(f"{each}: no description" for each in reference.undocumented()),
        *missing_files(folder),
        *(f"mkdocs.yml: nav has no {page}" for page in sorted(pages - nav)),
        *(f"mkdocs.yml: nav has {page}, which does not exist" for page in sorted(nav - pages)),
    ]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def write(folder: Path) -> set[str]:
    """Replace `folder` by the tree, and return its pages."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = set()
    for file in sources():
        target = folder / place(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            target.write_text(relinked(file.read_text(encoding="utf-8"), file), encoding="utf-8")
            pages.add(place(file))
        else:
            shutil.copyfile(file, target)
    for name, text in reference.pages().items():
        file = ROOT / "docs/reference" / name
        (folder / place(file)).write_text(relinked(text, file), encoding="utf-8")
        pages.add(place(file))
    return pages


def sources() -> list[Path]:
    """Documents, and every file of the repository that they link."""
    left = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    found: dict[Path, None] = {}
    while left:
        file = left.pop(0)
        if file in found:
            continue
        found[file] = None
        for match in (
            LINK.finditer(file.read_text(encoding="utf-8")) if file.suffix == ".md" else ()
        ):
            linked = (file.parent / match[2]).resolve()
            if not ELSEWHERE.match(match[2]) and linked.is_file() and linked.is_relative_to(ROOT):
                left.append(linked)
    return list(found)


def relinked(text: str, source: Path) -> str:
    """Replace links of the repository by links of the tree; a folder's link becomes its text."""
    here = posixpath.dirname(place(source))

    def moved(found: re.Match[str]) -> str:
        begin, target, end = found.groups()
        linked = (source.parent / target).resolve()
        if ELSEWHERE.match(target) or not linked.is_relative_to(ROOT):
            return found[0]
        if linked.is_dir():
            return begin.removeprefix("!").lstrip("[").removesuffix("](")
        return begin + posixpath.relpath(place(linked), here or ".") + end

    return LINK.sub(moved, text)


def missing_files(folder: Path) -> list[str]:
    """Links of the tree to files that are not there; the generator checks only pages and
    anchors."""
    return [
        f"{page.relative_to(folder)}: no file {match[2]}"
        for page in sorted(folder.rglob("*.md"))
        for match in LINK.finditer(CODE.sub("", page.read_text(encoding="utf-8")))
        if not ELSEWHERE.match(match[2]) and not (page.parent / match[2]).is_file()
    ]


def place(file: Path) -> str:
    """Path of a file of the repository in the tree."""
    if file == ROOT / "README.md":
        return "index.md"
    docs = ROOT / "docs"
    return file.relative_to(docs if file.is_relative_to(docs) else ROOT).as_posix()


class _Loader(yaml.SafeLoader):
    """Reader of mkdocs.yml, in which tags name functions of the generator."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: None)


def nav_pages() -> set[str]:
    """Pages in the navigation of mkdocs.yml."""

    def flat(node: object) -> list[str]:
        if isinstance(node, dict):
            return [each for value in node.values() for each in flat(value)]
        if isinstance(node, list):
            return [each for value in node for each in flat(value)]
        return [str(node)]

    return set(flat(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]))


if __name__ == "__main__":
    sys.exit(main())
