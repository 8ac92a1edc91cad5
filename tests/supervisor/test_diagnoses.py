"""Each rule against the lines that the real program prints."""

from __future__ import annotations

import os
import socket

import pytest

from atropos_tui.supervisor.diagnoses import Evidence, describe_exit, diagnose
from tests.supervisor.harness import part
from trainer_core.contracts.control import Role

UVICORN = "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use"
VLLM_PORT = "OSError: [Errno 98] Address already in use"
NO_MODULE = [
    "Traceback (most recent call last):",
    '  File "<frozen runpy>"',
    "ModuleNotFoundError: No module named 'vllm.entrypoints'",
]
RUNPY = "python: Error while finding module specification for 'no.such' (ModuleNotFoundError: No module named 'no')"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB"
KV = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
HUB = "OSError: nobody/nothing is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'"
FOLDER = "FileNotFoundError: [Errno 2] No such file or directory: '/models/x/config.json'"
HFPATH = "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name': '/models/none'"
FORGOT = 'RuntimeError: run-api: {"error": "Trainer not registered"}'
USAGE = ["usage: x [-h]", "x: error: unrecognized arguments: --nope"]
RAISED = [
    "Traceback (most recent call last):",
    '  File "t.py", line 3',
    "ValueError: labels and logprobs differ in length",
    "",
]


@pytest.mark.parametrize(
    ("lines", "code", "title", "evidence", "fix"),
    [
        ([UVICORN], 1, "port 8000 is in use", UVICORN, "another port"),
        ([VLLM_PORT], 1, "port ? is in use", VLLM_PORT, "another port"),
        (NO_MODULE, 1, "Python module vllm.entrypoints is missing", NO_MODULE[-1], "install vllm"),
        ([RUNPY], 1, "Python module no is missing", RUNPY, "install no"),
        (["ImportError: cannot import name 'x' from 'y'"], 1, "import failed", "cannot import name", "make install"),
        ([OOM], 1, "GPU memory is exhausted", OOM, "gpu_memory_utilization"),
        ([KV], 1, "GPU memory is exhausted", KV, "gpu_memory_utilization"),
        ([HUB], 1, "model was not found", HUB, "`model` in the profile"),
        ([FOLDER], 1, "model was not found", FOLDER, "`model` in the profile"),
        ([HFPATH], 1, "model was not found", HFPATH, "`model` in the profile"),
        ([FORGOT], 1, "forgotten the trainer", FORGOT, "atropos-tui restart api)"),
        (USAGE, 2, "refused its arguments", USAGE[-1], "profile"),
        (["atropos: command not found: vllm"], 127, "cannot be run", "command not found", "install"),
        (["last words"], -9, "killed by SIGKILL", "last words", "out-of-memory"),
        ([], -11, "killed by SIGSEGV", "printed nothing", "native code"),
        (RAISED, 1, "x raised ValueError", RAISED[2], "logs x"),
        (["bye", ""], 17, "exited with code 17", "bye", "logs x"),
        ([], 1, "exited with code 1", "printed nothing", "logs x"),
    ],
)
def test_rules(lines: list[str], code: int, title: str, evidence: str, fix: str) -> None:
    found = diagnose(Evidence(part("x", role=Role.ENGINE), code, ["noise before", *lines][-200:] if lines else []))
    assert title in found.title
    assert evidence.strip() in found.evidence
    assert fix in found.fix


def test_the_holder_of_the_port_is_named(free_port: int) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", free_port))
        holder.listen()
        found = diagnose(Evidence(part("x", port=free_port), 1, [VLLM_PORT]))
    assert found.title == f"port {free_port} is in use"
    assert f"(pid {os.getpid()})" in found.evidence
    assert f"(pid {os.getpid()})" in found.fix


def test_exit_codes_in_words() -> None:
    assert [describe_exit(code) for code in (0, 3, -15, -99)] == ["exit code 0", "exit code 3", "SIGTERM", "signal 99"]
