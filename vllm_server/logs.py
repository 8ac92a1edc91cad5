"""One log format for the server's own lines, in the API process and in vLLM's child processes."""

from __future__ import annotations

import logging
import sys

LOGGER_NAME = "vllm_server"


def configure_logging() -> None:
    """Send this package's log lines to standard error once; the root logger is left alone."""
    logger = logging.getLogger(LOGGER_NAME)
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [vllm_server] %(message)s", "%m-%d %H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
