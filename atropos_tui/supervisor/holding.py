"""The ports that a run holds for its components, from before the first start until after the last.

One that an earlier supervisor of the run started (`survive`) listens already, and shares its port with nobody: such a
port is held from that component's end on.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable

from atropos_common.ports import hold
from atropos_tui.profile import ports
from atropos_tui.profile.spec import ComponentSpec


class HeldPorts:
    """Those of one run. What cannot be held now is tried again when its component ends, and before each start."""

    def __init__(self, components: Iterable[ComponentSpec]) -> None:
        self._held: dict[int, socket.socket] = {}
        for spec in components:
            self.hold(spec)

    def hold(self, spec: ComponentSpec) -> bool:
        """See that the component's port is held, where it shall be; False if somebody else has it."""
        if spec.port is not None and spec.port_held and spec.port not in self._held:
            with contextlib.suppress(OSError):
                self._held[spec.port] = hold(spec.port)
            return spec.port in self._held
        return True

    def is_free(self, spec: ComponentSpec) -> bool:
        """Whether the component could listen on its port now."""
        return spec.port is None or (self.hold(spec) and ports.is_free(spec.port, held=spec.port_held))

    def close(self) -> None:
        """The run is over: they are free for everyone."""
        while self._held:
            self._held.popitem()[1].close()
