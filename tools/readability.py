"""Measure how readable the code base is, or refuse text that the language rules forbid.

    python -m tools.readability [--root DIR] [--json]     # the table of figures
    python -m tools.readability --lint [PATH...]          # a line for each forbidden phrase, and
    for each file or function that is too long; exit 1 if there is one

A text is a docstring, or a string that stands alone below an attribute. Product code is every
package but the tests, benchmarks and tools. The figures "formatted" come from `ruff format` on a
copy without `# fmt: skip`.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    "atropos_api",
    "atropos_common",
    "atropos_envs",
    "atropos_tui",
    "trainer_core",
    "vllm_server",
)
LINE_LENGTH = 100
MOST_MODULES = 16
"""Modules of one folder from which on a newcomer no longer sees what belongs together."""
ARCHITECTURE = "docs/architecture.md"
MOST_LINES, MOST_FUNCTION_LINES = 700, 60
"""Limits for the lines of a Python file, and of a function."""
LONGER = {
    "tests/atropos_tui/monitor/test_report.py": 710,
    "tests/atropos_tui/profile/budget/test_fit.py": 720,
    "tests/atropos_tui/profile/test_plan.py": 1140,
    "tests/trainer_core/weight_sync/test_broadcast.py": 745,
    "trainer_core/config.py": 850,
    "trainer_core/optimization/optimizers.py": 720,
    # functions
    "atropos_common/models/model_math.py:activation_bytes": 70,
    "atropos_tui/profile/budget/memory.py:trainer": 65,
    "atropos_tui/cluster/node_probe.py:collective": 63,
    "atropos_tui/monitor/report_charts.py:system_charts": 62,
    "benchmarks/publish.py:rank": 77,
    "benchmarks/routing.py:measure": 61,
    "benchmarks/support/curve.py:draw": 73,
    "trainer_core/loop.py:__init__": 90,
    "trainer_core/loop.py:one_step": 75,
    "trainer_core/loop.py:train": 68,
    "trainer_core/optimization/step.py:accumulate": 92,
}
"""Limits of the files and functions that are longer; a limit may only fall."""

_PARTICIPLES = r"(?:told|said|asked)"
PHRASES = re.compile(
    r"\b(?:anew|whoever|whom|shall|thereof|all the same|mend(?:s|ed|ing)?)\b"
    rf"|\b(?:is|are|was|were|be|been|being) {_PARTICIPLES}\b"
    r"|\bbesides\b(?=\s*(?:[.,;:)]|$))"
    r"|\bso (?:long|many|much|often)\b(?! as\b)",
    re.IGNORECASE,
)
"""Phrases that no text may hold."""
NULL = re.compile(r"\bnull\b")
"""Python has `None`; `null` is JSON's, and stays where the text speaks of JSON."""
OPENINGS = re.compile(r"^\s*(?:Of|What|Whether|Who|Whose|Which|For whom|By) ")
"""Words with which no docstring may begin: the fragment has no subject, or continues a name."""


@dataclass(frozen=True)
class Text:
    """One docstring or attribute string."""

    path: Path
    line: int
    words: str


@dataclass(frozen=True)
class TooLong:
    """A file or function above its limit, or one with an exception that it no longer needs."""

    path: Path
    line: int
    name: str
    lines: int
    limit: int

    def __str__(self) -> str:
        what = f"{self.name}() has" if self.name else "the file has"
        limits = f"of at most {self.limit}" if self.lines > self.limit else "so delete it in LONGER"
        return f"{self.path}:{self.line}: {what} {self.lines} lines, {limits}"


@dataclass(frozen=True)
class Finding:
    path: Path
    line: int
    phrase: str

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.line}: {self.phrase!r}: see the rules of language in "
            f"CONTRIBUTING.md"
        )


def modules(root: Path) -> list[Path]:
    """Python files of the product below `root`, in order."""
    return sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))


def texts(path: Path) -> Iterator[Text]:
    """Docstrings and attribute strings of a module, in the order of the syntax tree."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield Text(path, statement.lineno, value.value)


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Line and words of each comment that speaks to a person: directives of tools are left out."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT and not re.match(
            r"#\s*(?:type:|noqa|fmt:|pragma|!|:schema)", token.string
        ):
            yield token.start[0], token.string.lstrip("# ")


def wrong_phrase(words: str, *, docstring: bool) -> str | None:
    """The first forbidden phrase of a text; None where there is none."""
    if docstring and (opening := OPENINGS.match(words)):
        return f"{opening.group().strip()} ..."
    if found := PHRASES.search(" ".join(words.split())):
        return found.group()
    return "null" if docstring and NULL.search(words) and "JSON" not in words else None


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and words of each string of three words or more that is no docstring: logs, errors,
    help."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = " ".join(node.value.split())
            if words.count(" ") > 1:
                yield node.lineno, words


def lint_python(path: Path) -> Iterator[Finding]:
    """Forbidden phrases in docstrings, attribute strings, messages and comments."""
    for text in texts(path):
        if phrase := wrong_phrase(text.words, docstring=True):
            yield Finding(path, text.line, phrase)
    if path.parts[0] in PACKAGES:
        for line, words in messages(path):
            if found := PHRASES.search(words):
                yield Finding(path, line, found.group())
    for line, words in comments(path):
        if found := PHRASES.search(words):
            yield Finding(path, line, found.group())


def too_long(path: Path) -> Iterator[TooLong]:
    """The file and its functions that exceed their limits, or no longer need an exception.

    Functions of tests may be longer.
    """
    text = path.read_text()
    measured = {"": [(1, len(text.splitlines()))]}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and path.parts[0] != "tests":
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            measured.setdefault(node.name, []).append((node.lineno, lines))
    for name, found in measured.items():
        usual = MOST_FUNCTION_LINES if name else MOST_LINES
        limit = LONGER.get(f"{path.as_posix()}:{name}" if name else path.as_posix(), usual)
        unneeded = limit > usual and all(lines <= usual for _, lines in found)
        for line, lines in found[:1] if unneeded else found:
            if unneeded or lines > limit:
                yield TooLong(path, line, name, lines, limit)


def lint_markdown(path: Path) -> Iterator[Finding]:
    """Forbidden phrases outside of code blocks."""
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and (found := PHRASES.search(line)):
            yield Finding(path, number, found.group())


def files(given: list[Path]) -> list[Path]:
    """The Python and Markdown files among `given` and below its folders."""
    found: set[Path] = set()
    for path in given:
        below = (
            (each for kind in ("*.py", "*.md") for each in path.rglob(kind))
            if path.is_dir()
            else [path]
        )
        found |= {each for each in below if not any(part.startswith(".") for part in each.parts)}
    return sorted(found)


def formatted_lines(root: Path) -> int:
    """Lines of the product as `ruff format` lays it out at `LINE_LENGTH`, without exceptions."""
    with tempfile.TemporaryDirectory() as folder:
        copies = []
        for path in modules(root):
            copy = Path(folder) / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(re.sub(r"[ \t]*# fmt: (?:skip|off|on)", "", path.read_text()))
            copies.append(copy)
        command = [
            "ruff",
            "format",
            "--quiet",
            "--isolated",
            "--line-length",
            str(LINE_LENGTH),
            folder,
        ]
        subprocess.run([sys.executable, "-m", *command], check=True)
        return sum(len(copy.read_text().splitlines()) for copy in copies)


def crowded_folders(root: Path) -> list[str]:
    """Folders with more than `MOST_MODULES` modules in one level."""
    counts: dict[Path, int] = {}
    for path in root.rglob("*.py"):
        if not any(part.startswith(".") for part in path.relative_to(root).parts):
            counts[path.parent] = counts.get(path.parent, 0) + (path.name != "__init__.py")
    return sorted(
        f"{folder.relative_to(root)} ({count})"
        for folder, count in counts.items()
        if count > MOST_MODULES
    )


def measure(root: Path) -> dict[str, float | int | str]:
    """Every figure of the table, by name."""
    paths = modules(root)
    found = [text for path in paths for text in texts(path)]
    lines = [line for path in paths for line in path.read_text().splitlines()]
    code = [line for line in lines if line.strip()]
    skips = sum("# fmt: skip" in line or "# fmt: off" in line for line in lines)
    page = (root / ARCHITECTURE).read_text().splitlines()
    return {
        "modules": len(paths),
        "lines as they are": len(lines),
        f"lines formatted at {LINE_LENGTH}": formatted_lines(root),
        "texts": len(found),
        "texts with a forbidden phrase": sum(
            wrong_phrase(text.words, docstring=True) is not None for text in found
        ),
        "words of texts": sum(len(text.words.split()) for text in found),
        "fmt: skip": skips,
        "characters a non-blank line": round(sum(map(len, code)) / len(code), 1),
        "comments per 100 non-blank lines": round(
            100 * sum(len(list(comments(p))) for p in paths) / len(code), 2
        ),
        f"folders with over {MOST_MODULES} modules": ", ".join(crowded_folders(root)) or "none",
        "lines of docs/architecture.md": len(page),
        "longest line of docs/architecture.md": max(map(len, page)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.readability", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--root", type=Path, default=Path(), help="checkout to measure (default: here)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--lint", nargs="*", type=Path, metavar="PATH", help="files to check (default: all)"
    )
    asked = parser.parse_args()
    if asked.lint is None:
        figures = measure(asked.root)
        rows = (
            f"{name:38} {value if isinstance(value, str) else f'{value:,}'}"
            for name, value in figures.items()
        )
        print(json.dumps(figures) if asked.json else "\n".join(rows))
        return 0
    paths = files(asked.lint or [asked.root])
    findings: list[Finding | TooLong] = []
    for path in paths:
        if path.suffix == ".py":
            findings += [*lint_python(path), *too_long(path)]
        else:
            findings += lint_markdown(path)
    fine = f"{len(paths)} files: no forbidden phrase, none too long"
    print("\n".join(map(str, findings)) or fine)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
