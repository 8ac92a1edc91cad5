"""Order in which the engines of one GPU load their models.

vLLM measures the GPU's free memory at its start, and nobody else may change that meanwhile. So an
engine imports vLLM while the one before it starts, and its workers wait before they use the GPU.

Runs in vLLM's worker processes.
"""

from __future__ import annotations

import logging
import time
from functools import cache
from typing import Any

import httpx

from atropos_common.net.http import certificates
from atropos_common.protocol import stages

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""Seconds between two looks at the other engine."""


@cache
def register_wait(url: str) -> None:
    """Let workers of this process wait for the engine at `url` before they use the device."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    init_device = WorkerWrapperBase.init_device

    def wait_and_init(self: Any) -> None:
        wait_for_engine(url)
        init_device(self)

    WorkerWrapperBase.init_device = wait_and_init  # type: ignore[method-assign]


def wait_for_engine(url: str) -> None:
    """Wait until the engine at `url` is healthy, however long it takes."""
    began = time.monotonic()
    with httpx.Client(base_url=url, timeout=2, verify=certificates(url), trust_env=False) as http:
        if not _is_healthy(http):
            logger.info("waits for %s, which loads its model on the same GPU", url)
            while not _is_healthy(http):
                time.sleep(LOOK_S)
            logger.info(
                "loads its model: %s is healthy after %.1f s", url, time.monotonic() - began
            )
    stages.reach(stages.GPU_TURN)


def _is_healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.HTTPError:
        return False
