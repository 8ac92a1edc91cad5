"""Connections of other users of this machine, of which a server keeps few.

Each takes a descriptor and asks for nothing: who holds them all keeps the run's own processes out.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from atropos_common import peer

MOST_OF_STRANGERS = 64


def few_strangers(ours: Collection[int] | None = None) -> type[asyncio.Protocol]:
    """uvicorn's own protocol; beyond `MOST_OF_STRANGERS` at a time, a connection of another user is closed at once.

    Args:
        ours: whose connections are not counted, by uid; null: this user's and root's.
    """
    known = {os.geteuid(), 0} if ours is None else ours
    uid_of, strangers = peer.way(), set[asyncio.Protocol]()

    class FewStrangers(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        client: Any
        server: Any

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            try:
                strange = uid_of(self.client, self.server) not in known
            except (peer.UnknownPeerError, OSError, TypeError):
                strange = False  # of another machine, who needs a key; or there is no address (TypeError)
            if strange and len(strangers) >= MOST_OF_STRANGERS:
                transport.abort()
            elif strange:
                strangers.add(self)

        def connection_lost(self, exc: Exception | None) -> None:
            strangers.discard(self)
            super().connection_lost(exc)

    return FewStrangers
