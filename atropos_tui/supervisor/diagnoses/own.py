"""What the supervisor says of its own doing: it names the rule where it finds the trouble."""

from __future__ import annotations

from atropos_tui.supervisor.diagnoses.model import Rule

HEALTH_TIMEOUT = Rule("health_timeout", "vLLM did not become healthy in time")
NOT_READY = Rule("not_ready", "a component did not become ready")
NOT_ANSWERING = Rule("not_answering", "a component runs but does not answer")
CANNOT_START = Rule("cannot_start", "a component cannot be started as written")
LOG_UNWRITABLE = Rule("log_unwritable", "the log cannot be written")
STALE_FILE = Rule("stale_file", "a stale file cannot be removed")
GPU_MEMORY_HELD = Rule("gpu_memory_held", "GPU memory of a component was not given back")
UNKILLABLE = Rule("unkillable", "a process cannot be killed")
WATCHER_FAULT = Rule("watcher_fault", "the diagnosing itself failed")

OWN_RULES = (
    HEALTH_TIMEOUT,
    NOT_READY,
    NOT_ANSWERING,
    CANNOT_START,
    LOG_UNWRITABLE,
    STALE_FILE,
    GPU_MEMORY_HELD,
    UNKILLABLE,
    WATCHER_FAULT,
)
