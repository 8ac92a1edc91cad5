"""Publish and subscribe, in one event loop: a late subscriber gets a snapshot and every event after it.

A leaf: imports nothing of ours. The publisher never waits. A subscriber that falls behind is dropped, and told so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Event = TypeVar("Event")
Snapshot = TypeVar("Snapshot")


class SubscriberDroppedError(Exception):
    """This subscriber was too slow and has lost events; subscribe again for a fresh snapshot."""


class Subscription(Generic[Event]):
    """Asynchronous iterator over events in order; ends when the hub closes."""

    def __init__(self, hub: Hub[Event], limit: int) -> None:
        self._hub = hub
        self._limit = limit
        self._events: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._closed = False
        self.dropped = False

    def _offer(self, event: Event) -> None:
        if len(self._events) >= self._limit:
            self.dropped = True
            self._events.clear()
            self._hub.unsubscribe(self)
        else:
            self._events.append(event)
        self._wake.set()

    def _end(self) -> None:
        self._closed = True
        self._wake.set()

    def close(self) -> None:
        """Stop receiving."""
        self._hub.unsubscribe(self)
        self._end()

    def __aiter__(self) -> Subscription[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self.dropped:
                raise SubscriberDroppedError
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()


class Hub(Generic[Event]):
    """Hands every event to every subscriber. All methods belong to the thread of the event loop."""

    def __init__(self, limit: int = 2000) -> None:
        self._limit = limit
        self._subscribers: set[Subscription[Event]] = set()
        self._closed = False

    def publish(self, event: Event) -> None:
        """Give `event` to all; never waits."""
        for subscriber in list(self._subscribers):
            subscriber._offer(event)

    def subscribe(
        self, snapshot: Callable[[], Snapshot], limit: int | None = None
    ) -> tuple[Snapshot, Subscription[Event]]:
        """A snapshot and all events after it: nothing can be published between the two, since neither waits."""
        subscription = Subscription(self, limit or self._limit)
        if self._closed:
            subscription._end()
        else:
            self._subscribers.add(subscription)
        return snapshot(), subscription

    def unsubscribe(self, subscription: Subscription[Event]) -> None:
        self._subscribers.discard(subscription)

    def close(self) -> None:
        """End every subscription once it has delivered what it holds."""
        self._closed = True
        for subscriber in list(self._subscribers):
            subscriber._end()
        self._subscribers.clear()
