"""GPU memory gate: a component is stopped once its GPU memory is free; nothing starts on its cards
before.

`gpus` are card numbers in NVML's PCI order; in a SLURM job they index the job's cards. Without
`gpus` or a driver there is no gate. Decision for each card, once no process is left:

1. If NVML listed the component's pids on this card, the memory is free once none is listed.
2. Otherwise (a container does not see NVML's pids) the used memory decides, compared with the
*floor*, the reading before our first component came. What is left is the *excess*. It is free at
`SLACK` or less; with another component of ours on the card once it has not fallen for `SETTLE_S`;
else once it has fallen and rested for `OTHERS_S`: the rest is another user's.
3. After `RELEASE_TIMEOUT_S` the component counts as stopped, with a diagnosis. A start on that
card waits at most `BARRED_S`.

So every wait ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atropos_tui.diagnoses.model import GPU_MEMORY_HELD, Diagnosis
from atropos_tui.gpu import Card, NoDriverError, Nvml

GIB = 1024**3
SLACK = 256 * 1024**2
"""Bytes by which the driver's own use varies."""
SETTLE_S = 1.0
OTHERS_S = 5.0
RELEASE_TIMEOUT_S = 30.0
BARRED_S = 120.0
READING_PAUSE_S = (0.05, 0.5)
"""Shortest and longest pause between two readings, in seconds."""
ADMISSION_S = 2.0
"""Seconds for which an admission is valid."""
FAILURES = 3
"""Failed readings in a row that end a wait."""
HOST_NAMESPACE = "pid:[4026531836]"
"""The host's pid namespace, whose pids NVML reports."""

READING_TIMEOUT_S = 5.0
"""Timeout of a reading, in seconds; a broken driver may never answer."""
AFTER_FAILURE_S = 30.0
"""Seconds without readings after a failed one."""

Sharers = Callable[[int], bool]
"""True if another component of ours lives on this card."""


class Reader:
    """Readings of the driver, in a thread that may hang. Never raises or blocks."""

    def __init__(self, driver: Nvml) -> None:
        self.driver = driver
        self.absent = False
        self.awake = False
        """A reading has returned. The first takes seconds."""
        self._running: asyncio.Future[list[Card] | None] | None = None
        self._began = 0.0
        self._silent_until = 0.0

    async def cards(self, patience_s: float | None = None) -> list[Card] | None:
        """Read every card; None without a driver, after a failure, and after `patience_s`
        seconds."""
        if self._running is None:
            if self.absent or time.monotonic() < self._silent_until:
                return None
            self._begin()
        assert self._running is not None
        left = self._began + READING_TIMEOUT_S - time.monotonic()
        wait_s = max(0.0, left if patience_s is None else min(left, patience_s))
        # Several callers share one reading; each has its own timeout.
        running = self._running
        await asyncio.wait([running], timeout=wait_s)
        return running.result() if running.done() else None

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._running, self._began = loop.create_future(), time.monotonic()

        def read() -> None:
            found = self._read()
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self._finish, found)

        # A daemon thread: a pool's thread that hangs in the driver would block the exit of the
        # program.
        threading.Thread(target=read, name="nvml", daemon=True).start()

    def _finish(self, found: list[Card] | None) -> None:
        assert self._running is not None
        self._running.set_result(found)
        self._running, self.awake = None, True

    def _read(self) -> list[Card] | None:
        try:
            return self.driver.read()
        except NoDriverError:
            self.absent = True
        except Exception:  # a GPU that fell off the bus must not end the run
            self._silent_until = time.monotonic() + AFTER_FAILURE_S
        return None


@dataclass
class _Presence:
    """One component on one card while it lived."""

    pids: set[int] = field(default_factory=set)
    """Its pids that NVML listed."""
    highest: int = 0


@dataclass
class _Claim:
    """Memory that a stopped component may still hold on one card."""

    name: str
    gpu: int
    seen: _Presence
    floor: Card | None
    lowest: int | None = None
    lowest_at: float = 0.0
    barred_until: float = 0.0

    def left(self, card: Card, shared: bool) -> int | None:
        """Bytes that are not free yet (0: unknown); None once all is free."""
        if self.seen.pids:
            held = self.seen.pids & (card.processes or {}).keys()
            return sum((card.processes or {})[pid] or 0 for pid in held) if held else None
        excess = excess_of(card, self.floor)
        now = time.monotonic()
        self.seen.highest = max(self.seen.highest, excess)
        # The time of the newest minimum: the memory rests since then.
        if self.lowest is None or excess < self.lowest:
            self.lowest, self.lowest_at = excess, now
        if self.floor is not None and excess <= SLACK:
            return None
        rested = now - self.lowest_at
        if shared or self.floor is None:
            return None if rested >= SETTLE_S else excess
        fell = self.seen.highest - self.lowest > SLACK
        return None if fell and rested >= OTHERS_S else excess


def excess_of(card: Card, floor: Card | None) -> int:
    """Bytes beyond the floor that are not of the floor's processes."""
    if floor is None:
        return card.used
    earlier = floor.processes or {}
    now = sum((card.processes or {}).get(pid) or 0 for pid in earlier)
    before = sum(size or 0 for size in earlier.values())
    return max(0, (card.used - now) - (floor.used - before))


class GpuMemory:
    """State of the gate. Event loop only."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.asking: dict[str, str] = {}
        """Component that waits to start -> reason."""
        self._admitted: dict[str, float] = {}
        self._floors: dict[int, Card] = {}
        self._present: dict[str, dict[int, _Presence]] = {}
        self._barred: dict[int, _Claim] = {}
        self._leaving: set[str] = set()

    def is_leaving(self, name: str) -> bool:
        return name in self._leaving

    def admitted(self, name: str, gpus: Iterable[int]) -> bool:
        """True if `name` may start now. This uses the admission up; without one, call `admit`."""
        at = self._admitted.pop(name, -ADMISSION_S)
        return self.reader.absent or not gpus or time.monotonic() - at < ADMISSION_S

    async def admit(
        self, name: str, gpus: Iterable[int], shared: Sharers, changed: Callable[[], None]
    ) -> None:
        """Wait until the cards are free, then take their floors.

        Args:
            changed: called when the reason to wait changes.
        """
        self.asking[name] = "a reading of its GPU memory"
        pause = READING_PAUSE_S[0]
        try:
            while (cards := await self._cards(gpus)) is not None:
                barred = {
                    gpu: left
                    for gpu in gpus
                    if (left := self._still_barred(gpu, cards, shared)) is not None
                }
                if not barred:
                    self._enter(name, cards, shared)
                    break
                holder = self._barred[min(barred)].name
                self.asking[name] = f"{amounts(barred)}, left by {holder}"
                changed()
                await asyncio.sleep(pause)
                pause = min(pause * 2, READING_PAUSE_S[1])
            self._admitted[name] = time.monotonic()
        finally:
            self.asking.pop(name, None)
            changed()

    async def leave(
        self,
        name: str,
        gpus: Iterable[int],
        shared: Sharers,
        hurry: asyncio.Event,
        tell: Callable[[str], None],
    ) -> Diagnosis | None:
        """Return once the memory of `name` is free, or a diagnosis after `RELEASE_TIMEOUT_S`.

        Args:
            hurry: set to stop waiting; the cards are then barred.
            tell: called with the memory that is not free.
        """
        seen = self._present.pop(name, {})
        claims = [
            _Claim(name, gpu, seen.get(gpu, _Presence()), self._floors.get(gpu)) for gpu in gpus
        ]
        self._leaving.add(name)
        try:
            return await self._wait(claims, shared, hurry, tell)
        finally:
            self._leaving.discard(name)

    async def note(
        self, members: Mapping[str, Iterable[int]], patience_s: float | None = None
    ) -> tuple[dict[str, int], list[Card]]:
        """Read the cards and record their processes; return bytes by component, and the cards."""
        cards = await self.reader.cards(patience_s) or []
        held: dict[str, int] = {}
        for name, pids in members.items():
            own = set(pids)
            for card in cards:
                listed = self._listed(own, card)
                if (size := _size(listed, card)) is not None:
                    held[name] = held.get(name, 0) + size
                if own:  # creates the entry of a component that started without a reading
                    seen = self._present.setdefault(name, {}).setdefault(card.index, _Presence())
                    seen.pids |= listed
                    seen.highest = max(seen.highest, excess_of(card, self._floors.get(card.index)))
        return held, cards

    def held_on(self, card: Card, members: Mapping[str, Iterable[int]]) -> dict[str, int]:
        sizes = {name: _size(self._listed(set(pids), card), card) for name, pids in members.items()}
        return {name: size for name, size in sizes.items() if size is not None}

    def _listed(self, own: set[int], card: Card) -> set[int]:
        return {pid for pid in own & (card.processes or {}).keys() if self._uses(pid, card)}

    def _uses(self, pid: int, card: Card) -> bool:
        """True if our pid has the card open. In a container NVML's pid may mean another process."""
        try:
            return self.reader.driver.has_open(pid, card.index)
        except Exception:  # any error of the driver: unknown
            return False

    async def _cards(self, gpus: Iterable[int]) -> dict[int, Card] | None:
        """Existing cards by index; None after `FAILURES` failures."""
        for _ in range(FAILURES):
            if (found := await self.reader.cards()) is not None:
                return {card.index: card for card in found if card.index in set(gpus)}
            if self.reader.absent:
                return None
            await asyncio.sleep(READING_PAUSE_S[0])
        return None

    def _enter(self, name: str, cards: Mapping[int, Card], shared: Sharers) -> None:
        for gpu, card in cards.items():
            # The floor is the reading before the first of our components, so a shared card keeps
            # its floor.
            if not shared(gpu):
                self._floors[gpu] = card
        self._present[name] = {gpu: _Presence() for gpu in cards}

    def _still_barred(self, gpu: int, cards: Mapping[int, Card], shared: Sharers) -> int | None:
        claim = self._barred.get(gpu)
        if claim is None:
            return None
        left = claim.left(cards[gpu], shared(gpu)) if gpu in cards else None
        # Barred for too long: start anyway.
        if left is None or time.monotonic() > claim.barred_until:
            del self._barred[gpu]
            return None
        return left

    async def _wait(
        self,
        claims: list[_Claim],
        shared: Sharers,
        hurry: asyncio.Event,
        tell: Callable[[str], None],
    ) -> Diagnosis | None:
        give_up = time.monotonic() + RELEASE_TIMEOUT_S
        pause, reported = READING_PAUSE_S[0], ""
        while (cards := await self._cards([claim.gpu for claim in claims])) is not None:
            here = [claim for claim in claims if claim.gpu in cards]
            left = {
                c.gpu: size
                for c in here
                if (size := c.left(cards[c.gpu], shared(c.gpu))) is not None
            }
            claims = [claim for claim in here if claim.gpu in left]
            if not claims:
                return None
            # On `hurry` no diagnosis: the memory may still be on its way.
            late = time.monotonic() > give_up
            if late or hurry.is_set():
                self._bar(claims)
                return _not_back(claims, left, cards) if late else None
            if (text := amounts(left)) != reported:
                reported = text
                tell(text)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(hurry.wait(), pause)
            pause = min(pause * 2, READING_PAUSE_S[1])
        return None

    def _bar(self, claims: Iterable[_Claim]) -> None:
        for claim in claims:
            claim.barred_until = time.monotonic() + BARRED_S
            self._barred[claim.gpu] = claim


def _size(listed: Iterable[int], card: Card) -> int | None:
    sizes = [(card.processes or {})[pid] for pid in listed]
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def amounts(left: Mapping[int, int]) -> str:
    """`4.0 GiB on GPU 0, 1.2 GiB on GPU 1`."""
    return ", ".join(
        f"{f'{size / GIB:.1f} GiB' if size else 'memory'} on GPU {gpu}"
        for gpu, size in left.items()
    )


def _not_back(
    claims: list[_Claim], left: Mapping[int, int], cards: Mapping[int, Card]
) -> Diagnosis:
    holders = "; ".join(f"GPU {claim.gpu}: {_holders(claim, cards[claim.gpu])}" for claim in claims)
    return GPU_MEMORY_HELD.diagnosis(
        f"{amounts(left)} {RELEASE_TIMEOUT_S:g} s after its last process was gone; {holders}",
        f"nothing starts there until it is free, for {BARRED_S:g} s at most; end what holds "
        f"it (see nvidia-smi)",
        f"GPU memory of {claims[0].name} was not given back",
    )


def _holders(claim: _Claim, card: Card) -> str:
    before = {} if claim.seen.pids or claim.floor is None else claim.floor.processes or {}
    rows = {pid: size for pid, size in (card.processes or {}).items() if pid not in before}
    rows = {
        pid: size for pid, size in rows.items() if not claim.seen.pids or pid in claim.seen.pids
    }
    if not rows:
        return "NVML lists no process that holds it"
    own = bool(claim.seen.pids)
    return ", ".join(
        f"{_who(pid, own)}{f', {size / GIB:.1f} GiB' if size else ''}" for pid, size in rows.items()
    )


def _who(pid: int, own: bool) -> str:
    if own:
        return f"pid {pid}, which has ended"
    if not _pids_are_the_hosts():
        return f"a process this container cannot see (pid {pid} on the host)"
    try:
        return f"pid {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    except OSError:
        return f"pid {pid}, which has ended"


def _pids_are_the_hosts() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") == HOST_NAMESPACE  # noqa: PTH115
    except OSError:
        return False
