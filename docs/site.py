"""Hooks of `make docs`: the README is the first page, and linked files are part of the site.

Documents link each other as they lie, so that links work in a checkout and on a code host too. Here
`docs/` is the root: `../X` of a page in it becomes `X`; so does `docs/X` of a page beside it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|#")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link, and what those pages link in turn."""
    left = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
    seen: set[Path] = set()
    while left:
        file = left.pop()
        if file in seen:
            continue
        seen.add(file)
        if files.get_file_from_path(_place(file)) is None:
            files.append(File.generated(config, _place(file), abs_src_path=str(file)))
        for found in (
            LINK.finditer(file.read_text(encoding="utf-8")) if file.suffix == ".md" else ()
        ):
            linked = (file.parent / found[2]).resolve()
            if not ELSEWHERE.match(found[2]) and linked.is_file() and linked.is_relative_to(ROOT):
                left.append(linked)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they lie in the repository, made links of the site; a folder is its README, if there
    is one."""
    source = Path(page.file.abs_src_path or "").resolve()
    here = posixpath.dirname(page.file.src_uri)

    def moved(found: re.Match[str]) -> str:
        begin, target, end = found.groups()
        linked = (source.parent / target).resolve()
        if ELSEWHERE.match(target) or not linked.exists() or not linked.is_relative_to(ROOT):
            return found[0]
        if linked.is_dir():
            return begin.removeprefix("!").lstrip("[").removesuffix("](")
        return begin + posixpath.relpath(_place(linked), here or ".") + end

    return LINK.sub(moved, markdown)


def _place(file: Path) -> str:
    """Where a file of the repository lies in the site."""
    if file == ROOT / "README.md":
        return "index.md"
    return file.relative_to(
        ROOT / "docs" if file.is_relative_to(ROOT / "docs") else ROOT
    ).as_posix()
