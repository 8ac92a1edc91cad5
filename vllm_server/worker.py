"""What vLLM's worker can do for the bridge, added by its own `--worker-extension-cls`.

Every method name starts with `atropos_`: vLLM refuses an extension whose attributes collide with its worker's.

What can fail on one rank alone says so in its answer and never raises: of an error vLLM leaves the other ranks' answers
unread, each later call then takes an older one for its own, and returns before those ranks have done their part.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class AtroposWorkerExtension:
    """Mixed into vLLM's worker class; called by `collective_rpc`."""

    def atropos_export_weights(self) -> dict[str, Any]:
        """Describe this rank's parameters for the manifest (a `Shard` as plain data)."""
        from vllm_server import shared_weights

        model = self.get_model()  # type: ignore[attr-defined]
        on_cpu = next(model.parameters()).device.type == "cpu"
        shard = shared_weights.describe_shared_file(model) if on_cpu else shared_weights.describe_cuda(model)
        return shard.model_dump()

    def atropos_parameter_kinds(self) -> list[str]:
        """One parameter of each kind of layer, by name."""
        from vllm_server import graph_check

        return graph_check.kinds(self.get_model())  # type: ignore[attr-defined]

    def atropos_nudge(self, name: str) -> None:
        """Change this rank's parameter in place until `atropos_put_back`."""
        from vllm_server import graph_check

        graph_check.nudge(self.get_model(), name)  # type: ignore[attr-defined]

    def atropos_put_back(self, name: str) -> None:
        """Give the parameter the values it had before `atropos_nudge`."""
        from vllm_server import graph_check

        graph_check.put_back(self.get_model(), name)  # type: ignore[attr-defined]

    def atropos_load_weights(self, path: str) -> dict[str, Any]:
        """Load the safetensors of a folder over this rank's parameters; returns what was read and seconds by phase, or
        under `failed` why it broke off."""
        from vllm_server import reload

        try:
            return reload.load_in_worker(self, path)
        except Exception as error:
            logger.exception("the load of %s broke off", path)
            return {"failed": f"{type(error).__name__}: {error}"}

    def atropos_transfer_failure(self) -> str | None:
        """Why this rank's last part in a broadcast failed; null when it did not. Asked once, forgotten."""
        from vllm_server import transfer_engine

        return transfer_engine.take_failure()
