"""Stages of our own programs: records in `RUN/stages.COMPONENT.jsonl`, which the supervisor reads.

The run directory is shared by all nodes, so this works behind each launcher.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from atropos_common.protocol.records import StageRecord
from atropos_common.system.files import append_line
from atropos_common.system.run_dir import (
    ENV_ATTEMPT,
    ENV_COMPONENT,
    ENV_RUN_ID,
    RunDir,
    is_safe_name,
)

ATTACHED = "attached"
"""A trainer has model, rollouts and engines."""
REGISTERED = "registered"
"""run-api accepted a trainer or an environment."""
SET_UP = "its setup"
FIRST_BATCH = "first batch"
GPU_TURN = "its turn on the GPU"
"""The inference servers that load their models on the same GPU before this one are healthy."""
READY = "its first answer"
"""An inference server, or its part on another node, can serve."""
# Seconds between attempts to write to a full disk.
RETRY_S = 1.0


def reach(stage: str) -> None:
    """Record that this program has reached `stage`; a program without a supervisor records
    nothing."""
    run, component = RunDir.from_env(), os.environ.get(ENV_COMPONENT, "")
    if run is None or not is_safe_name(component):
        return
    attempt = os.environ.get(ENV_ATTEMPT, "1")
    record = StageRecord(
        run_id=os.environ.get(ENV_RUN_ID, ""),
        time=time.time(),
        component=component,
        stage=stage,
        attempt=int(attempt) if attempt.isdigit() else 1,
    )
    # One `write` with O_APPEND: ranks on several nodes may report at the same time.
    path, line = run.stages_jsonl(component), record.to_line().encode()
    if not append_line(path, line):
        threading.Thread(target=_retry, args=(path, line), name="stage", daemon=True).start()


def _retry(path: Path, line: bytes) -> None:
    while not append_line(path, line):
        time.sleep(RETRY_S)
