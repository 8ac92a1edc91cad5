"""Finished traces of verifiers as training sequences, exactly as the engine sampled them."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from typing import Any

from atropos_envs.hosting.engine_client import Generation
from atropos_envs.hosting.rollout import PROMPT
from atropos_envs.recording.sequences import UNSAMPLED, Sequence


class RolloutFailed(RuntimeError):
    """A rollout that cannot be trained; the message is the reason by which it is counted."""


def branches_of(trace: Any, turns: Items[Generation], temperature: float) -> list[Sequence]:
    """Return the trace's branches, the one with the most sampled tokens first.

    A turn that several branches share trains in the first of them.

    Raises:
        RolloutFailed: the ids differ from those that the engine sampled.
    """
    branches = [branch for branch in trace.branches if branch.trainable]
    branches.sort(key=lambda branch: -sum(branch.sampled_mask))
    # Equal requests may have equal answers, whose logprobs differ in their last bits.
    known: dict[Any, list[list[float]]] = {}
    for turn in turns:
        key = tuple(turn.prompt_ids), tuple(turn.token_ids[0])
        known.setdefault(key, []).append(list(turn.logprobs[0]))
    trained: set[int] = set()
    made = []
    for branch in branches:
        sequence = Sequence(temperature)
        for node in branch.nodes:
            count = sum(node.mask) if node.sampled else 0
            start = len(node.token_ids) - count
            sampled = node.token_ids[start:]
            prompt = (*sequence.tokens, *node.token_ids[:start])
            if count and list(node.logprobs) not in known.get((prompt, tuple(sampled)), ()):
                raise RolloutFailed("its token ids are not those that the engine sampled")
            fresh = bool(count) and id(node) not in trained
            trained.add(id(node))
            sequence.tokens += node.token_ids
            sequence.masks += [PROMPT] * start + (sampled if fresh else [PROMPT] * count)
            sequence.logprobs += [UNSAMPLED] * start
            sequence.logprobs += node.logprobs if fresh else [UNSAMPLED] * count
        if sequence.trained:
            made.append(sequence)
    return made


def check_trace(trace: Any) -> None:
    """Refuse a trace whose reward is not known.

    Raises:
        RolloutFailed: it ended with an error, or a reward or metric is not a finite number.
    """
    if not trace.ok or trace.errors:
        error = trace.last_error
        if error is None:
            raise RolloutFailed(f"it stopped ({trace.stop_condition})")
        line = " ".join(error.message.split())
        raise RolloutFailed(f"{error.type}: {line}" if line else error.type)
    for name, reward in trace.rewards.items():
        if reward is not None and not math.isfinite(reward.value):
            raise RolloutFailed(f"reward {name!r} is {reward.score}")


def measured(trace: Any) -> dict[str, float]:
    """Return the numbers of a trace: rewards and metrics by name, turns, tool calls."""
    numbers = {
        "reward": trace.reward,
        "turns": float(trace.num_turns),
        "tool_calls": float(len(trace.tool_messages)),
        "truncated": float(trace.is_truncated),
    }
    numbers |= {
        f"reward/{name}": each.score for name, each in trace.rewards.items() if each is not None
    }
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return numbers | {
        f"metric/{name}": float(value) for name, value in metrics.items() if math.isfinite(value)
    }
