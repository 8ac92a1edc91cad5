"""Exit rules against the lines that the real programs print."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from atropos_common.protocol.control import Role
from atropos_tui.diagnoses import Evidence, Names, describe_exit, diagnose
from atropos_tui.profile.spec import StackSpec
from tests.support.harness import part

UVICORN = (
    "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address "
    "already in use"
)
VLLM_PORT = "OSError: [Errno 98] Address already in use"
NO_MODULE = [
    "Traceback (most recent call last):",
    '  File "<frozen runpy>"',
    "ModuleNotFoundError: No module named 'peft.tuners'",
]
RUNPY = (
    "python: Error while finding module specification for 'no.such' (ModuleNotFoundError: No "
    "module named 'no')"
)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 139.80 GiB"
)
KV = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
HUB = (
    "OSError: nobody/nothing is not a local folder and is not a valid model identifier listed on "
    "'https://huggingface.co/models'"
)
FOLDER = "FileNotFoundError: [Errno 2] No such file or directory: '/models/x/config.json'"
HFPATH = (
    "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name': "
    "'/models/none'"
)
FORGOT = 'RuntimeError: run-api: {"error": "Trainer not registered"}'
NO_FLAG = "vllm_server: error: unrecognized arguments: --no-such-flag 3 --other"
BAD_FLAG = "atropos-trainer: error: argument --lr: invalid float value: 'fast'"
USAGE = ["usage: x [-h]", "x: error: unrecognized arguments: --nope"]
GLOO = (
    "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40312"
)
RANK_KILLED = "error: rank 1 was killed by SIGKILL"
LEFT_OUT = (
    "[WARNING] http://127.0.0.1:9002 is left out of the broadcast: it has not answered for 5 s"
)
RANK_FAILED = "error: rank 2 ended first, with exit code 1"
RAISED = [
    "Traceback (most recent call last):",
    '  File "t.py", line 3',
    "ValueError: labels and logprobs differ in length",
    "",
]


@pytest.mark.parametrize(
    ("lines", "code", "title", "evidence", "fix", "rule"),
    [
        (
            [GLOO, RANK_KILLED],
            1,
            "rank 1 of x was killed by SIGKILL",
            RANK_KILLED,
            "out-of-memory killer",
            "rank_killed",
        ),
        (
            [LEFT_OUT, OOM, RANK_KILLED],
            1,
            "rank 1 of x was killed by SIGKILL",
            RANK_KILLED,
            "out-of-memory killer",
            "rank_killed",
        ),
        (
            [RANK_FAILED],
            1,
            "rank 2 of x ended first, with exit code 1",
            RANK_FAILED,
            "logs x",
            "rank_failed",
        ),
        ([UVICORN], 1, "port 8000 is in use", UVICORN, "another port", "port_in_use"),
        ([VLLM_PORT], 1, "port ? is in use", VLLM_PORT, "another port", "port_in_use"),
        (
            NO_MODULE,
            1,
            "Python module peft.tuners is missing",
            NO_MODULE[-1],
            "install peft",
            "missing_module",
        ),
        ([RUNPY], 1, "Python module no is missing", RUNPY, "install no", "missing_module"),
        (
            ["ImportError: cannot import name 'x' from 'y'"],
            1,
            "import failed",
            "cannot import name",
            "make install",
            "import_failed",
        ),
        ([OOM], 1, "GPU memory is exhausted", OOM, "gpu_memory_utilization", "out_of_memory"),
        ([KV], 1, "GPU memory is exhausted", KV, "gpu_memory_utilization", "kv_cache_too_small"),
        ([HUB], 1, "model was not found", HUB, "`model` in the profile", "model_missing"),
        ([FOLDER], 1, "model was not found", FOLDER, "`model` in the profile", "model_missing"),
        ([HFPATH], 1, "model was not found", HFPATH, "`model` in the profile", "model_missing"),
        (
            [FORGOT],
            1,
            "no registration of the trainer",
            FORGOT,
            "atropos-tui restart api: ",
            "trainer_not_registered",
        ),
        (USAGE, 2, "refused its arguments", USAGE[-1], "profile", "bad_usage"),
        (
            [NO_FLAG],
            2,
            "x refused its arguments: --no-such-flag --other",
            NO_FLAG,
            "profile",
            "bad_usage",
        ),
        (
            [BAD_FLAG],
            2,
            "x refused its arguments: --lr: invalid float",
            BAD_FLAG,
            "profile",
            "bad_usage",
        ),
        (
            ["atropos: command not found: vllm"],
            127,
            "cannot be run",
            "command not found",
            "install",
            "not_executable",
        ),
        (["last words"], -9, "killed by SIGKILL", "last words", "out-of-memory", "killed"),
        (["saved"], 143, "killed by SIGTERM", "saved", "find out who sent the signal", "killed"),
        ([], -11, "killed by SIGSEGV", "printed nothing", "native code", "killed"),
        (RAISED, 1, "x raised ValueError", RAISED[2], "logs x", "python_error"),
        (["bye", ""], 17, "exited with code 17", "bye", "logs x", "exited"),
        ([], 1, "exited with code 1", "printed nothing", "logs x", "exited"),
    ],
)
def test_rules(lines: list[str], code: int, title: str, evidence: str, fix: str, rule: str) -> None:
    found = diagnose(
        Evidence(
            part("x", role=Role.ENGINE), code, ["noise before", *lines][-200:] if lines else []
        )
    )
    assert title in found.title
    assert evidence.strip() in found.evidence
    assert fix in found.fix
    assert found.rule == rule


def test_the_holder_of_the_port_is_named(free_port: int) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", free_port))
        holder.listen()
        found = diagnose(Evidence(part("x", port=free_port), 1, [VLLM_PORT]))
    assert found.title == f"port {free_port} is in use"
    assert f"(pid {os.getpid()})" in found.evidence
    assert f"(pid {os.getpid()})" in found.fix


def test_exit_codes_in_words() -> None:
    assert [describe_exit(code) for code in (0, 3, -15, -99)] == [
        "exit code 0",
        "exit code 3",
        "SIGTERM",
        "signal 99",
    ]


def test_a_real_model_that_is_not_there() -> None:
    lines = (Path(__file__).parent / "logs/model_missing.log").read_text().splitlines()
    found = diagnose(Evidence(part("x", role=Role.TRAINER), 1, lines))
    assert (found.rule, found.title) == ("model_missing", "the model was not found")
    assert "/models/none" in found.evidence


def test_names_are_those_of_the_stack() -> None:
    stack = StackSpec(
        run_id="r",
        name="n",
        mode="none",
        run_dir="/r",
        components=[
            part("judge", role=Role.API),
            part("a", role=Role.ENV),
            part("b", role=Role.ENV),
        ],
    )
    assert Names.of(stack) == Names("judge", "a", "vllm", "trainer")
    found = diagnose(
        Evidence(
            part("b", role=Role.ENV), 1, ["RuntimeError: Trainer not registered"], Names.of(stack)
        )
    )
    assert "atropos-tui restart judge" in found.fix
