"""A rollout as a conversation: turns by role, tool calls and results, and its tokens. Pure.

The texts are those of chat templates (ChatML, Llama, Gemma, Phi, Zephyr). Everything else is one
turn. Positions are offsets in the text as recorded, so that tokens can be placed in it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from atropos_common.protocol.token_columns import unpack
from atropos_common.protocol.trainer_records import RolloutRecord, RolloutTurn
from atropos_tui.monitor.format import plain_lines

Role = Literal["system", "user", "assistant", "thinking", "call", "result", "environment"]
SIGNS: dict[Role, tuple[str, str]] = {
    "system": ("▪", "system"),
    "user": ("▸", "user"),
    "assistant": ("◆", "model"),
    "thinking": ("◇", "model thinks"),
    "call": ("→", "model calls"),
    "result": ("←", "tool returns"),
    "environment": ("▫", "environment"),
}
"""Sign and words of each role, which tell it without colour."""
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "result",
    "ipython": "result",
    "observation": "result",
    "function": "result",
}
_ROLE_NAMES = "|".join(_ROLES)
# A role begins, a part begins or ends, or a token that means nothing to a reader.
_MARK = re.compile(
    rf"(?:<\|im_start\|>|<start_of_turn>)\s*(?P<chat>{_ROLE_NAMES})[ \t]*\n?"
    rf"|<\|start_header_id\|>\s*(?P<llama>{_ROLE_NAMES})\s*<\|end_header_id\|>\s*"
    rf"|<\|(?P<bar>{_ROLE_NAMES})\|>\n?"
    r"|(?P<inst>\[INST\])|(?P<uninst>\[/INST\])"
    r"|(?P<call><tool_call>|\[TOOL_CALLS\])|(?P<uncall></tool_call>)"
    r"|(?P<result><tool_response>)|(?P<unresult></tool_response>)"
    r"|(?P<think><think>)|(?P<unthink></think>)"
    r"|<\|[^|<>\s]{1,40}\|>|</?(?:s|bos|eos|pad|unk|end_of_turn)>|<end_of_turn>"
)


@dataclass(frozen=True)
class Part:
    """A range of the prompt or of the completion with one role."""

    role: Role
    start: int
    end: int
    turn: RolloutTurn | None = None
    """Recorded turn of the completion."""
    skipped: int = 0
    """Turns left out of the record before this one."""


def prompt_parts(prompt: str) -> list[Part]:
    return [Part(role, a, b) for role, a, b in _split(prompt, 0, len(prompt), "user")]


def completion_parts(record: RolloutRecord) -> list[Part]:
    """Return the parts of a completion; with the recorded turns if they fit the text."""
    text, turns = record.completion, record.turns
    if not turns or sum(turn.chars for turn in turns) != len(text):
        return [Part(role, a, b) for role, a, b in _split(text, 0, len(text), "assistant")]
    found: list[Part] = []
    start, expected = 0, 0
    for turn in turns:
        first: Role = "environment" if turn.number % 2 else "assistant"
        skipped = max(0, turn.number - expected)
        for role, a, b in _split(text, start, start + turn.chars, first):
            found.append(Part(role, a, b, turn, skipped))
            skipped = 0
        start, expected = start + turn.chars, turn.number + 1
    return found


def _split(text: str, start: int, end: int, first: Role) -> Iterator[tuple[Role, int, int]]:
    base = role = first
    at = start
    for mark in _MARK.finditer(text, start, end):
        if text[at : mark.start()].strip():
            yield role, at, mark.start()
        at = mark.end()
        if name := mark["chat"] or mark["llama"] or mark["bar"]:
            # The environment writes the header of the model's next turn.
            base = role = _ROLES[name]
        elif mark["inst"] or mark["uninst"]:
            base = role = "user" if mark["inst"] else "assistant"
        elif mark["call"] or mark["result"] or mark["think"]:
            role = "call" if mark["call"] else "result" if mark["result"] else "thinking"
        elif mark["uncall"] or mark["unresult"] or mark["unthink"]:
            role = base
    if text[at:end].strip():
        yield role, at, end


def shown(part: Part, text: str) -> str:
    """Return the text of a part for readers; a tool call as `name(key=value)`."""
    words = plain_lines(text[part.start : part.end]).strip()
    return (called(words) or words) if part.role == "call" else words


def called(words: str) -> str:
    """Return a call that is valid JSON as `name(key=value)`, else an empty text."""
    try:
        call = json.loads(words)
        arguments = call["arguments"] if "arguments" in call else call.get("parameters", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        pairs = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
        return plain_lines(f"{call['name']}({pairs})")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""


# Tokens.

LEVELS = (0.01, 0.1, 0.5, 2.0)
"""Bounds of the classes of a logprob difference, in nats."""
LEVEL_WORDS = ("under 0.01", "0.01", "0.1", "0.5", "2 nats or more")


@dataclass(frozen=True)
class Token:
    start: int
    end: int
    diff: float | None
    """Trainer minus engine, in nats."""
    version: str = ""
    """Weight version, or a range of them; empty if unknown."""

    @property
    def level(self) -> int | None:
        """Class of the difference, from 0; None if unknown."""
        return None if self.diff is None else sum(abs(self.diff) >= bound for bound in LEVELS)


def tokens_of(record: RolloutRecord) -> list[Token]:
    """Return the tokens of a completion; none if the record has none that fit."""
    found, at = [], 0
    for span in unpack(record.token_chars, record.token_diffs, record.completion):
        found.append(Token(at, at + span.chars, span.diff))
        at += span.chars
    start = 0
    for turn in record.turns:
        end = start + turn.chars
        first = bisect_left(found, start, key=lambda token: token.start)
        last = bisect_left(found, end, key=lambda token: token.start)
        words = version_words(turn)
        # A turn that is not whole has fewer tokens, so the place of the change is unknown.
        known = turn.newest_tokens is not None and last - first == turn.tokens
        for place in range(first, last):
            if known and turn.newest_tokens is not None:
                is_newest = place >= last - turn.newest_tokens
                words = f"v{turn.newest if is_newest else turn.oldest}"
            found[place] = replace(found[place], version=words)
        start = end
    return found


def version_words(turn: RolloutTurn) -> str:
    """Return `v7`, `v7–v8`, or an empty text if the version is unknown."""
    if turn.oldest is None or turn.newest is None:
        return ""
    return f"v{turn.oldest}" if turn.oldest == turn.newest else f"v{turn.oldest}–v{turn.newest}"
