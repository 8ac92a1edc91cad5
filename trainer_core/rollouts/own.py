"""A caller's own source of batches: an object with `next_batch`, or any iterable.

    train(config, rollouts=[[group, group], [group, group]])

Batches are checked here, so that a wrong type is a clear error instead of an endless loop of empty
batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from trainer_core.errors import RolloutsEnd, UsageError
from trainer_core.rollouts.client import RawBatch

MOST_USELESS = 100
"""Limit of consecutive batches with only malformed groups, after which the run fails."""
SHAPE = 'a batch is a list of groups, or {"batch": [GROUP, ...]}'


class OwnSource:
    """A `RolloutSource` over the caller's `rollouts` argument of `train`."""

    def __init__(self, source: Any) -> None:
        """Accept an iterable or an object with `next_batch`.

        Raises:
            UsageError: `source` is neither.
        """
        self.name = type(source).__name__
        self._source = source
        call = getattr(source, "next_batch", None)
        if isinstance(source, type):
            raise UsageError(f"rollouts: {source.__name__} is a class. fix: pass an instance of it")
        if callable(call):
            self._ask = _fitted(call, self.name)
        elif isinstance(source, Iterable) and not isinstance(source, str | bytes | dict):
            batches = iter(source)
            self._ask = lambda step, on_idle: next(batches)
        else:
            raise UsageError(
                f"rollouts: {self.name} is not a source of batches. fix: pass a file's path, "
                f"an iterable of batches, "
                f"or an object with next_batch(step, on_idle); {SHAPE}"
            )

    def next_batch(self, step: int, on_idle: Callable[[], None] = lambda: None) -> RawBatch:
        """Return the groups of the next batch.

        Raises:
            RolloutsEnd: the source has no more.
            UsageError: it returned something that is not a batch.
        """
        try:
            given = self._ask(step, on_idle)
        except StopIteration:
            raise RolloutsEnd(f"{self.name} has no more rollouts") from None
        batch = given.get("batch") if isinstance(given, dict) else given
        if not isinstance(batch, list | tuple):
            keys = f" with the keys {', '.join(map(str, given))}" if isinstance(given, dict) else ""
            raise UsageError(
                f"rollouts: {self.name} returned {type(given).__name__}{keys} as a batch. "
                f"fix: {SHAPE}"
            )
        return list(batch)

    def close(self) -> None:
        """Close the source if it has a `close` method."""
        if callable(close := getattr(self._source, "close", None)):
            close()


def _fitted(call: Callable[..., Any], name: str) -> Callable[[int, Callable[[], None]], Any]:
    """Adapt `call` to (step, on_idle); it may take both arguments, only `step`, or none."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # a builtin without a signature
        return lambda step, on_idle: call(step, on_idle=on_idle)
    # Most arguments first, so that a callable gets all that it accepts.
    ways: list[tuple[tuple[str, ...], Callable[[int, Callable[[], None]], Any]]] = [
        (("step", "on_idle"), lambda step, on_idle: call(step, on_idle=on_idle)),
        (("step",), lambda step, on_idle: call(step)),
        ((), lambda step, on_idle: call()),
    ]
    for names, ask in ways:
        with suppress(TypeError):
            signature.bind(*names[:1], **dict.fromkeys(names[1:]))
            return ask
    raise UsageError(f"rollouts: {name}.next_batch{signature} must take (step, on_idle)")
