"""Result of `atropos-tui audit`: its causes, and what `--json` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

# Causes that only the audit names; the others stand in `protocol.trainer_records`.
ADAPTER = "adapter"
TIED_HEAD = "tied head"
HALF_LOADED = "half-loaded weights"
ROTARY = "rotary base"
WINDOW = "sliding window"
PADDING = "vocabulary padding"
QUANTISED = "quantised weights"
DTYPE = "dtype"
TOKENIZER = "tokenizer or template"
ROUTING = "router replay"
PROMPT = "prompt"
CONFIG = "model configuration"


class AuditExit(IntEnum):
    """Exit codes of `atropos-tui audit`."""

    SERVES = 0
    DOES_NOT = 1
    USAGE = 2
    CANNOT_TELL = 3
    INTERRUPTED = 130


@dataclass
class AuditGroup:
    """Tokens of one kind of request, compared."""

    name: str
    """`prompt` and `long` are tokens of prompts; `sampled` is drawn at temperature 1, `default`
    without sampling parameters, `cached` behind a prefix that the engine may have cached."""
    tokens: int
    difference: float
    """Mean difference of the logprobs, in nats."""
    largest: float
    """Largest difference, in nats."""
    bound: float
    """Mean difference that rounding explains, in nats."""

    @property
    def agrees(self) -> bool:
        return self.difference <= self.bound  # false for NaN


@dataclass
class AuditTried:
    """One hypothesis about the engine, and what it leaves of the difference."""

    cause: str
    evidence: str
    left: float
    """Mean difference in nats that remains if the hypothesis holds."""


@dataclass
class RolloutsAudit:
    """Comparison of recorded rollouts with the stated weights."""

    file: str
    rollouts: int
    tokens: int
    foreign: float
    """Share of tokens whose logprob is not of the stated weights and settings."""
    difference: float
    """Mean difference in nats."""
    bound: float
    explained_by: str
    """Temperature, filter, shift or older weights that explain the difference; empty: none."""
    left: float
    """Mean difference in nats that remains under `explained_by`."""
    by_version: dict[str, float] = field(default_factory=dict)
    """Mean difference in nats by the rollouts' own weight version, as text."""


@dataclass
class Audit:
    """Answer to the question whether an engine serves the weights of a folder."""

    verdict: Literal["serves", "does not", "cannot tell"]
    engine: str
    """Name, version and model that the server gives."""
    weights: str
    cause: str = ""
    """Most likely cause; empty unless `verdict` is `does not`."""
    evidence: str = ""
    """Evidence for the verdict."""
    fix: str = ""
    groups: list[AuditGroup] = field(default_factory=list)
    logprobs: str = "unknown"
    """`raw`: before temperature and filters; `processed`: after them."""
    notes: list[str] = field(default_factory=list)
    tried: list[AuditTried] = field(default_factory=list)
    """Best hypotheses first."""
    rollouts: RolloutsAudit | None = None
    requests: int = 0
    tokens: int = 0
    """Tokens that the engine read and wrote."""
    seconds: float = 0.0

    @property
    def exit_code(self) -> AuditExit:
        return {
            "serves": AuditExit.SERVES,
            "does not": AuditExit.DOES_NOT,
            "cannot tell": AuditExit.CANNOT_TELL,
        }[self.verdict]
