"""What vLLM loads in each of its processes through the entry point group `vllm.general_plugins`.

`register` makes our model loaders known, ties the process's life to its parent's, and lets an engine wait whose server
was told to. Importing this module imports neither vLLM nor torch.
"""

from __future__ import annotations

import os

from vllm_server import standby
from vllm_server.config import ENV_INSTANCE_ID, ENV_SHM_PATH, ENV_WEIGHT_UPDATES
from vllm_server.logs import configure_logging
from vllm_server.processes import die_with_parent

ENGINE_PARTS = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "vllm.compilation.backends",
    "vllm.v1.worker.gpu_worker",
    "vllm.model_executor.models.llama",
)
"""What an engine imports on its way, the layers of every model among it; none of them touches a GPU."""


def register() -> None:
    """Entry point `atropos_bridge`. Does nothing in a vLLM that this package's server did not start."""
    if ENV_INSTANCE_ID not in os.environ:
        return
    configure_logging()
    die_with_parent()
    standby.wait_in_engine(os.environ, ENGINE_PARTS)
    if ENV_SHM_PATH in os.environ:
        from vllm_server.shared_weights import register_loader

        register_loader()
    if ENV_WEIGHT_UPDATES in os.environ:
        from vllm_server.plain_weights import register_loaders
        from vllm_server.transfer_engine import register_engine

        register_loaders()
        register_engine()
