"""The line that tells why a program failed, in captured and made-up logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_common.protocol.control import Role
from atropos_tui.diagnoses import Evidence, Names, diagnose
from atropos_tui.diagnoses.log_scanner import LogScanner
from atropos_tui.diagnoses.roots import root_error
from tests.support.harness import part

LOGS = Path(__file__).parent / "logs"
HEADS = "AssertionError: num_heads (7) is not divisible by num_kv_heads (2)"
GONE = "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"


def lines_of(log: str) -> list[str]:
    return (LOGS / f"{log}.log").read_text().splitlines()


@pytest.mark.parametrize(
    ("log", "root"),
    [
        ("engine_start", HEADS),
        ("engine_killed", GONE),
        ("engine_kv_cache", "ValueError: No available memory for the cache blocks. Try increasing"),
        ("cuda_oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 100.00 GiB."),
        ("model_missing", "OSError: Repo id must be in the form"),
        ("our_manifest_missing", "error: /tmp/run/none.json: no manifest."),
        (
            "our_env_server_type",
            "2026-11-21 13:03:44,482 ERROR atropos_envs.hosting.base: server_type=openai",
        ),
        ("port_in_use", "ERROR:    [Errno 98] error while attempting to bind"),
        ("vllm_stopped", None),
        ("clean/vllm", None),
        ("clean/trainer", None),
        ("clean/arithmetic", None),
    ],
)
def test_the_root_of_a_captured_log(log: str, root: str | None) -> None:
    found = root_error(lines_of(log))
    assert found == root if root is None else (found or "").startswith(root)


@pytest.mark.parametrize(("log", "root"), [("engine_start", HEADS), ("engine_killed", GONE)])
def test_the_evidence_of_a_dead_engine_is_the_root_live_and_at_the_exit(
    log: str, root: str
) -> None:
    lines = lines_of(log)
    ended = diagnose(Evidence(part("vllm", role=Role.ENGINE), 1, lines[-200:]))
    assert (ended.rule, ended.evidence) == ("engine_dead", root)
    looks, said = LogScanner(part("vllm", role=Role.ENGINE), Names()), []
    for number, line in enumerate(lines):  # it goes on telling after its first sign
        looks.feed(line.encode() + b"\n")
        said += looks.scan(looks.take(), number / 50)
    said += looks.close(len(lines) / 50)
    assert [(found.rule, found.evidence) for found in said] == [("engine_dead", root)]
    assert ("dmesg" in ended.fix) is (root is GONE)


def test_a_better_rule_speaks_alone() -> None:
    text = (LOGS / "engine_kv_cache.log").read_bytes()
    looks = LogScanner(part("vllm", role=Role.ENGINE), Names())
    looks.feed(text)
    said = looks.scan(looks.take(), 0.0) + looks.scan([], 60.0) + looks.close(61.0)
    assert [found.rule for found in said] == ["kv_cache_too_small"]


def workers(size: int) -> list[str]:
    """An engine of two workers, whose lines mix; the words are those of vLLM 0.32's sources."""
    frames = [
        f'  File "/venv/lib/vllm/{number}.py", line {number}, in call' for number in range(size)
    ]
    place = "ERROR 11-22 13:28:28 [multiproc_executor.py:1063]"
    both = [
        f"(Worker_TP{rank} pid={rank + 7}) {place} {line}"
        for line in ["WorkerProc hit an exception.", "Traceback (most recent call last):", *frames]
        for rank in (0, 1)
    ]
    raised = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    core = "(EngineCore pid=5) ERROR 11-22 13:28:29 [core.py:1512]"
    wrapped = [
        "EngineCore encountered a fatal error.",
        "Traceback (most recent call last):",
        *frames,
        f"RuntimeError: Worker failed with error '{raised}', please check the stack trace "
        f"above for the root cause",
    ]
    return [
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in an_older_request',
        "ValueError: of a request that was refused long before",
        *both,
        f"(Worker_TP1 pid=8) {place} {raised}",
        f"(Worker_TP0 pid=7) {place} {raised}",
        *(f"{core} {line}" for line in wrapped),
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See "
        "stack trace (above) for the "
        "root cause.",
        "ERROR 11-22 13:29:03 [vllm_server] the engine died; its own log lines are above",
    ]


def test_the_first_worker_that_fails_tells_why_however_long_it_takes() -> None:
    lines = workers(150)
    assert (root_error(lines) or "").startswith(
        "torch.AcceleratorError: CUDA error: an illegal memory"
    )
    found = Evidence(part("vllm", role=Role.ENGINE), 1, lines[-200:], above=tuple(lines[:-200]))
    assert diagnose(found).evidence.startswith("torch.AcceleratorError")


def test_wrappers_alone_are_no_root() -> None:
    assert (
        root_error(
            ["EngineCore failed to start.", "RuntimeError: Engine core initialization failed."]
        )
        is None
    )
    found = diagnose(Evidence(part("vllm", role=Role.ENGINE), 1, ["vllm.EngineDeadError: x"]))
    assert (found.rule, found.evidence) == ("engine_dead", "vllm.EngineDeadError: x")
