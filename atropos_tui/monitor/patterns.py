"""Regular expressions that a user types. They are matched by RE2, in time linear in the text: none takes for ever."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence

import re2

_SPECIAL = frozenset(r"\.^$*+?{}[]|()")


class PatternError(ValueError):
    """The text is no regular expression; the message says why, in one line."""


class UnsupportedPatternError(PatternError):
    """Python would take the text as a regular expression, RE2 does not: look-around, back-references and the like."""


class Pattern:
    """One regular expression of RE2's syntax.

    Args:
        text: the expression.
        literal: the text stands for itself.
        ignore_case: capitals and small letters are the same.

    Raises:
        UnsupportedPatternError: RE2 lacks what the text asks for.
        PatternError: the text is no regular expression.
    """

    def __init__(self, text: str, *, literal: bool = False, ignore_case: bool = False) -> None:
        self.text = text
        self.is_literal = literal
        expression = re2.escape(text) if literal else text
        self._one = _compiled(expression, ignore_case, never_nl=False)
        self._many = _compiled(f"(?m:{expression})", ignore_case, never_nl=True)
        folded = text.lower() if ignore_case else text
        self._ignore_case = ignore_case
        self._words = folded if literal or not _SPECIAL.intersection(text) else None
        """What is looked for, where that is no more than a stretch of text: the most common case, and the fastest."""
        self._knows_ends = any(mark in expression for mark in (r"\A", r"\z"))

    def search(self, text: str) -> bool:
        """Whether any part of `text` matches."""
        if self._words is not None:
            return self._words in (text.lower() if self._ignore_case else text)
        return self._one.search(_encoded(text)) is not None

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Begin and end of each match in `text`, in characters; those of no length are left out."""
        matches = self._one.finditer(_encoded(text).decode())
        return (match.span() for match in matches if match.end() > match.start())

    def matching(self, lines: Sequence[str]) -> Iterator[int]:
        """The indices of the lines that match, ascending.

        A call of RE2 costs more than the search in a line, so lines are searched as one text where they can.
        """
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
    """`text` as a search field takes it: no case unless it has capitals, and taken literally where it is half typed.

    Raises:
        UnsupportedPatternError: it asks for what RE2 lacks.
    """
    ignore_case = text == text.lower()
    try:
        return Pattern(text, ignore_case=ignore_case)
    except UnsupportedPatternError:
        raise
    except PatternError:
        return Pattern(text, literal=True, ignore_case=ignore_case)


def _encoded(text: str) -> bytes:
    """UTF-8 with a question mark for half a surrogate pair, so that every character stays one."""
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
            words = f"{reason} (look-around, back-references and other extensions of Perl are not supported)"
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
