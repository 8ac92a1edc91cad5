"""What vLLM's worker can do for the bridge, added by its own `--worker-extension-cls`.

Every method name starts with `atropos_`: vLLM refuses an extension whose attributes collide with its worker's.
"""

from __future__ import annotations

from typing import Any


class AtroposWorkerExtension:
    """Mixed into vLLM's worker class; called by `collective_rpc`."""

    def atropos_export_weights(self) -> dict[str, Any]:
        """Describe this rank's parameters for the manifest (a `Shard` as plain data)."""
        from vllm_server import shared_weights

        model = self.get_model()  # type: ignore[attr-defined]
        on_cpu = next(model.parameters()).device.type == "cpu"
        shard = shared_weights.describe_shared_file(model) if on_cpu else shared_weights.describe_cuda(model)
        return shard.model_dump()
