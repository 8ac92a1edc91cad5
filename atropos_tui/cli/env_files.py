"""`.env` files: what `${VAR}` in a profile may refer to, beside the environment itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from atropos_tui.errors import Problem, UserError
from atropos_tui.monitor.format import one_line


def read_env_files(profile: Path) -> dict[str, str]:
    """Names and values in `.env` of the current folder and of the profile's folder, where the former wins.

    They feed `${VAR}` alone and enter no environment: a folder can be somebody else's, and names such as LD_PRELOAD or
    PYTHONPATH would run his code. For the same reason a file of another user is left alone, which is said.

    Raises:
        UserError: one of them cannot be read.
    """
    from dotenv import dotenv_values

    found: dict[str, str] = {}
    for folder in dict.fromkeys((Path.cwd(), profile.resolve().parent)):
        file = folder / ".env"
        try:
            if _is_own(file):
                found = {name: value for name, value in dotenv_values(file).items() if value is not None} | found
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in a value
            raise UserError(
                "unreadable .env", [Problem(str(error), "write lines of NAME=value in UTF-8", file=str(file))]
            ) from None
    return found


def tell_unused(names: Iterable[str], used: Iterable[str]) -> None:
    """Say which names of `.env` reach nobody."""
    if unused := sorted({*names} - {*used} - {*os.environ}):
        print(
            f".env: no component gets {one_line(', '.join(unused))}, since no ${{...}} of the profile names it; where "
            f'one needs it, write {one_line(unused[0])} = "${{{one_line(unused[0])}}}" into its env',
            file=sys.stderr,
        )


def _is_own(file: Path) -> bool:
    """Whether there is such a file, and it is this user's; neither a link of somebody else."""
    if not file.exists():
        return False
    if {file.lstat().st_uid, file.stat().st_uid} == {os.geteuid()}:
        return True
    text = "belongs to another user and is not read: chown it, or export what it names"
    print(f"{one_line(str(file))} {text}", file=sys.stderr)
    return False
