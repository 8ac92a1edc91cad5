"""Base of all records, and types of their fields.

A missing value is JSON's null, a non-finite float one of the strings "NaN", "Infinity" and
"-Infinity".
"""

import math
import re
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer

from atropos_common.system.run_dir import LATEST_TIME

# Written into every line. The screen tells the user when a run has a newer version.
SCHEMA_VERSION = 1


class RecordError(ValueError):
    pass


# JSON has no literals for these values, and strict parsers refuse Python's `NaN`.
def _encode_float(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


Number = Annotated[float, PlainSerializer(_encode_float, return_type=float | str, when_used="json")]
"""Float, finite or not."""


# A recorded file may come from another machine, and its names go to the terminal as they are.
def _as_name(text: str) -> str:
    is_name = len(text) <= MAX_NAME and text.isascii() and text.isprintable()
    return text if is_name else _NO_NAME.sub("?", text[:MAX_NAME])


# Python's integers have no limit, but numpy and conversion to float have one.
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
MAX_NAME = 64
# Everything outside of printable ASCII, control sequences of a terminal included.
_NO_NAME = re.compile("[^ -~]")
Name = Annotated[str, AfterValidator(_as_name)]
"""Printable ASCII, at most 64 characters; others are replaced or cut on reading."""


class Record(BaseModel):
    """Fields of every line."""

    # Unknown fields stay in the record. `defer_build` saves start-up time: a process uses few
    # kinds.
    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)
    KIND: ClassVar[str] = ""
    """`kind`; empty in a base class."""

    v: int = SCHEMA_VERSION
    run_id: str = ""
    # The upper limit keeps the time within the range of `datetime`, which charts and tables use.
    time: Annotated[float, Field(ge=0, le=LATEST_TIME)] = 0.0
    """Unix seconds."""
    seq: Whole = 0
    """Position in its file, from 0, without gaps."""
    kind: str = ""

    # Called after pydantic has collected the fields, when `model_fields` is complete.
    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.KIND = cls.model_fields["kind"].default

    def to_line(self) -> str:
        return self.model_dump_json() + "\n"
