"""Types of a profile's values: ports, names, hosts, commands."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
)
from pydantic_core import PydanticCustomError

from atropos_common.system.run_dir import is_safe_name
from atropos_tui.cluster import sbatch
from atropos_tui.profile.errors import (
    value_text,
)
from atropos_tui.profile.spec import (
    references,
)


def mistake(reason: str, fix: str, at: str = "") -> PydanticCustomError:
    """Error that a validator raises; `at`: position below the validated key."""
    return PydanticCustomError("mistake", "{reason}", {"reason": reason, "fix": fix, "at": at})


def _name(value: str) -> str:
    if not is_safe_name(value):
        raise mistake(
            f"not a valid name (got {value_text(value)})",
            "use at most 64 letters, digits, dots, dashes or underscores; begin with a "
            "letter or digit",
        )
    return value


def _variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise mistake(
            "not a valid variable name",
            "use letters, digits and underscores; do not begin with a digit",
        )
    return value


def _module(value: str) -> str:
    if not references(value) and not all(part.isidentifier() for part in value.split(".")):
        raise mistake(
            f"not a module name (got {value_text(value)})",
            "write it as for python -m, such as atropos_envs.gsm8k_server; for a file use script",
        )
    return value


def _argv(value: list[str]) -> list[str]:
    if not value[0].strip():
        raise mistake(
            "names no program", 'begin with the program, such as ["python", "-m", "http.server"]'
        )
    return value


def _host(value: str) -> str:
    # IPv6 in brackets, as in a URL, loses them; a host never begins with a dash: ssh would read a
    # flag.
    value = re.sub(r"(^|@)\[([0-9A-Fa-f:.%\w]*:[0-9A-Fa-f:.%\w]*)\]$", r"\1\2", value)
    if not re.fullmatch(r"(?:::(?=[0-9A-Fa-f])|[A-Za-z0-9_])[A-Za-z0-9_.@:%-]*", value):
        raise mistake(
            f"not a host (got {value_text(value)})",
            "give a name or an address, such as 10.0.0.2 or me@box2",
        )
    return value


def _words(value: str) -> str:
    if not value.isprintable():
        raise mistake(
            f"contains control characters (got {value_text(value)})",
            "write one line of printable text",
        )
    return value


def _sbatch_option(value: str) -> str:
    if found := sbatch.problem(value):
        raise mistake(*found)
    return value


Port = Annotated[int, Field(ge=1, le=65535)]
GpuIndex = Annotated[int, Field(ge=0)]
Condition = Literal["started", "healthy", "completed"]
Scalar = bool | int | float | str
Name = Annotated[
    str,
    AfterValidator(_name),
    Field(json_schema_extra={"pattern": r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"}),
]
EnvName = Annotated[str, AfterValidator(_variable)]
Module = Annotated[str, AfterValidator(_module)]
Argv = Annotated[list[str], Field(min_length=1), AfterValidator(_argv)]
HostName = Annotated[str, AfterValidator(_host)]
Words = Annotated[str, Field(min_length=1), AfterValidator(_words)]
SbatchOption = Annotated[Words, AfterValidator(_sbatch_option)]
"""One printable line, because a second line would run as a command."""
