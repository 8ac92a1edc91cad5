"""What vLLM loads in each of its processes through the entry point group `vllm.general_plugins`.

`register` makes our model loader known and ties the process's life to its parent's. Importing this module imports
neither vLLM nor torch.
"""

from __future__ import annotations

import os

from vllm_server.config import ENV_INSTANCE_ID, ENV_SHM_PATH
from vllm_server.logs import configure_logging
from vllm_server.processes import die_with_parent


def register() -> None:
    """Entry point `atropos_bridge`. Does nothing in a vLLM that this package's server did not start."""
    if ENV_INSTANCE_ID not in os.environ:
        return
    configure_logging()
    die_with_parent()
    if ENV_SHM_PATH in os.environ:
        from vllm_server.shared_weights import register_loader

        register_loader()
