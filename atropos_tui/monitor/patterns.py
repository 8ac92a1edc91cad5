"""Regular expressions typed by a user. RE2 matches in linear time, so none can block."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence

import re2

_SPECIAL = frozenset(r"\.^$*+?{}[]|()")


class PatternError(ValueError):
    """The text is not a regular expression; the message is the reason."""


class UnsupportedPatternError(PatternError):
    """Python accepts the expression, RE2 does not."""


class Pattern:
    """One regular expression; `literal`: search for the text itself."""

    def __init__(self, text: str, *, literal: bool = False, ignore_case: bool = False) -> None:
        self.text = text
        self.is_literal = literal
        expression = re2.escape(text) if literal else text
        self._one = _compiled(expression, ignore_case, never_nl=False)
        self._many = _compiled(f"(?m:{expression})", ignore_case, never_nl=True)
        folded = text.lower() if ignore_case else text
        self._ignore_case = ignore_case
        # A plain substring search is faster than RE2.
        self._words = folded if literal or not _SPECIAL.intersection(text) else None
        self._knows_ends = any(mark in expression for mark in (r"\A", r"\z"))

    def search(self, text: str) -> bool:
        if self._words is not None:
            return self._words in (text.lower() if self._ignore_case else text)
        return self._one.search(_encoded(text)) is not None

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Return begin and end of each non-empty match, in characters."""
        matches = self._one.finditer(_encoded(text).decode())
        return (match.span() for match in matches if match.end() > match.start())

    def matching(self, lines: Sequence[str]) -> Iterator[int]:
        """Yield the indices of the matching lines."""
        # One text only if lines have no newlines of their own and the expression has no \A or \z.
        data = _encoded("\n".join(lines)) if self._words is None else b""
        if self._words is not None or self._knows_ends or data.count(b"\n") >= len(lines):
            yield from (number for number, line in enumerate(lines) if self.search(line))
            return
        number = begin = 0
        while number < len(lines) and (match := self._many.search(data, begin)) is not None:
            number += data.count(b"\n", begin, match.start())
            yield number
            number += 1
            begin = data.find(b"\n", match.start()) + 1


def compiled(text: str) -> Pattern:
    ignore_case = text == text.lower()
    try:
        return Pattern(text, ignore_case=ignore_case)
    except UnsupportedPatternError:
        raise
    except PatternError:
        return Pattern(text, literal=True, ignore_case=ignore_case)


def _encoded(text: str) -> bytes:
    # A lone surrogate becomes a question mark, so that offsets stay the same.
    return text.encode("utf-8", "replace")


def _compiled(expression: str, ignore_case: bool, *, never_nl: bool) -> re2._Regexp:
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.case_sensitive = not ignore_case
    options.never_nl = never_nl
    try:
        return re2.compile(expression, options)
    except UnicodeEncodeError:
        raise PatternError("it holds bytes that are no text") from None
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        if _python_takes(expression):
            words = (
                f"{reason} (look-around, back-references and other extensions of Perl are not "
                f"supported)"
            )
            raise UnsupportedPatternError(words) from None
        raise PatternError(reason) from None


def _python_takes(expression: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(expression)
    except (re.error, OverflowError, RecursionError):
        return False
    return True
