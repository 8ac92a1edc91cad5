"""Questions about completions, put to one server after the other until each is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from atropos_common.bridge import MOST_COMPLETIONS
from trainer_core.errors import EngineError, EngineGone


class Wanted(Protocol):
    """What is asked about."""

    @property
    def tokens(self) -> int: ...


Server = TypeVar("Server")
Item = TypeVar("Item", bound=Wanted)
Answer = TypeVar("Answer")


class ServersInTurn(Generic[Server]):
    """Asks each server in turn; one that cannot tell is not asked again.

    Args:
        most_tokens: about so many go into one question: the server refuses larger ones.
        otherwise: what happens without a server that cannot tell, in words for its log.
    """

    def __init__(self, servers: Sequence[Server], most_tokens: int, otherwise: str) -> None:
        self._servers = list(servers)
        self._most_tokens = most_tokens
        self._otherwise = otherwise

    def ask(
        self, wanted: list[Item], question: Callable[[Server, list[Item]], Sequence[Answer | None]],
        take: Callable[[Item, Answer], bool],
    ) -> list[Item]:  # fmt: skip
        """What no server knows, in the order asked.

        Args:
            question: asks a server about some; None for what it does not know. May raise EngineError.
            take: uses an answer; False when it is of no use.
        """
        for server in list(self._servers):
            wanted = self._ask(server, wanted, question, take) if wanted else wanted
        return wanted

    def _ask(
        self, server: Server, wanted: list[Item], question: Callable[[Server, list[Item]], Sequence[Answer | None]],
        take: Callable[[Item, Answer], bool],
    ) -> list[Item]:  # fmt: skip
        left: list[Item] = []
        asked = 0
        for part in self._parts(wanted):
            try:
                answers = question(server, part)
            except EngineGone:
                return [*left, *wanted[asked:]]  # it may know the next batch
            except EngineError as error:
                print(f"{self._otherwise}: {error}")
                self._servers.remove(server)
                return [*left, *wanted[asked:]]
            asked += len(part)
            pairs = zip(part, answers, strict=True)
            left += [item for item, answer in pairs if answer is None or not take(item, answer)]
        return left

    def _parts(self, wanted: list[Item]) -> Iterator[list[Item]]:
        part: list[Item] = []
        size = 0
        for item in wanted:
            if part and (len(part) == MOST_COMPLETIONS or size + item.tokens > self._most_tokens):
                yield part
                part, size = [], 0
            part.append(item)
            size += item.tokens
        if part:
            yield part
