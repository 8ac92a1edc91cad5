"""Two real engines by `vllm.replicas = 2` or `vllm.per_gpu = 2`: each gets half of the requests,
and every version."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import httpx
import pytest

from atropos_common.protocol.bridge import METRIC_REQUESTS
from atropos_common.protocol.trainer_records import POLICY_LAG
from atropos_common.system.run_dir import RunDir
from tests.e2e.live_stack import LiveStack, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]
NAMES = ["vllm-0", "vllm-1"]


def free_pair() -> int:
    """The first of two neighbouring ports that were free a moment ago."""
    while True:
        (first,) = free_ports(1)
        with suppress(OSError), socket.socket() as beside:
            beside.bind(("127.0.0.1", first + 1))
            return first


def asked(first: int) -> list[float]:
    """Requests for completions that each engine got."""
    pages = [
        httpx.get(f"http://127.0.0.1:{first + index}/metrics").text.splitlines()
        for index in range(2)
    ]
    return [
        float(line.rsplit(" ", 1)[1])
        for page in pages
        for line in page
        if line.startswith(METRIC_REQUESTS)
    ]


def log_of(run: RunDir, component: str) -> str:
    return "".join(
        path.read_text() for path in sorted((run.root / "logs" / component).glob("*.log"))
    )


@pytest.mark.parametrize(
    ("mode", "key"),
    [
        ("none", "replicas"),
        ("broadcast", "replicas"),
        ("shared_vllm", "replicas"),
        ("shared_vllm", "per_gpu"),
    ],
)
def test_each_engine_gets_its_share_and_every_version(
    stack: Callable[..., LiveStack], mode: str, key: str
) -> None:
    first = free_pair()
    run = stack(
        mode=mode,
        vllm__port=first,
        **{f"vllm__{key}": 2},
        trainer__training_steps=8,
        trainer__vllm_restart_interval=2,
        trainer__checkpoint_interval=0,
    )
    run.until_step(6, timeout=240)
    counts = asked(first)
    code, output = run.wait(timeout=120)
    assert code == 0, output[-4000:]
    print(f"\n{mode}: requests {counts}")
    assert min(counts) >= 0.4 * sum(counts) > 60, counts
    assert [
        name for name in NAMES if {s.new for s in run.states(name)} >= {"starting", "healthy"}
    ] == NAMES
    lags = [step.policy_lag_max for step in run.steps()]
    assert None not in lags and max(lags) <= 3, "rollouts of both engines have a known version"
    alignment = run.telemetry("alignment")
    # Between two loads the engines of `none` have older weights.
    allowed = POLICY_LAG if mode == "none" else ""
    wrong = [each for each in alignment if each.verdict != "ok" and each.cause_kind != allowed]
    assert not wrong, wrong
    if key == "per_gpu":
        copied = [record.phases["copy"] for record in run.telemetry("sync")]
        assert len(copied) >= 8 and max(copied[1:]) < 1.0, copied
    else:
        assert_told(run, mode, first)
    run.assert_nothing_left()


def assert_told(run: LiveStack, mode: str, first: int) -> None:
    """The log names each server that the trainer fed."""
    for name, port in zip(NAMES, (first, first + 1), strict=True):
        told = f":{port} answers with weight version" in log_of(run.run, "trainer")
        assert told or mode == "broadcast" or (mode, name) == ("shared_vllm", "vllm-0"), name


def test_an_engine_that_is_killed_costs_no_rollout_and_comes_back(
    stack: Callable[..., LiveStack],
) -> None:
    first = free_pair()
    run = stack(
        mode="none",
        vllm__port=first,
        vllm__replicas=2,
        trainer__training_steps=24,
        trainer__checkpoint_interval=0,
        trainer__vllm_restart_interval=4,
    )
    run.until_step(5, timeout=240)
    os.kill(run.pid_of("vllm-1"), signal.SIGKILL)
    killed = time.time()
    code, output = run.wait(timeout=200)
    assert code == 0, output[-4000:]
    again = [s.time for s in run.states("vllm-1") if s.new == "healthy" and s.time > killed]
    assert again, "restarted by the supervisor"
    log = log_of(run.run, "arithmetic")
    assert "the others go on" in log and f":{first + 1} answers after" in log, log[-3000:]
    assert {s.attempt for s in run.states("vllm-0")} == {1}
    assert {s.attempt for s in run.states("trainer")} == {1} and {
        s.attempt for s in run.states("arithmetic")
    } == {1}
    run.assert_nothing_left()


def versions(first: int) -> list[int]:
    """Weight version that each engine answers with."""
    pages = [
        httpx.get(f"http://127.0.0.1:{first + index}/health_generate", timeout=20).json()
        for index in range(2)
    ]
    return [page["weight_version"] for page in pages]


def assert_goes_on(run: LiveStack, first: int, killed: str) -> None:
    """Four steps later both engines answer with the newest version, or the one before."""
    run.until_step(len(run.steps()) + 4, timeout=240)
    seen = versions(first)
    assert abs(seen[0] - seen[1]) <= 1 and min(seen) >= len(run.steps()) - 2, (killed, seen)


def attempts_at_the_end(run: LiveStack) -> dict[str, set[int]]:
    """Take the stack down, check its steps and its alignment, and return the attempts by
    component."""
    run.cli("down", timeout=180)
    run.wait(timeout=60)
    steps = [step.step for step in run.telemetry("step")]
    assert steps == list(range(1, len(steps) + 1)), "no step is lost or repeated"
    assert {record.verdict for record in run.telemetry("alignment")} == {"ok"}
    run.assert_nothing_left()
    return {
        name: {s.attempt for s in run.states(name)} for name in (*NAMES, "trainer", "arithmetic")
    }


@pytest.mark.timeout(900)
def test_single_copy_with_an_engine_beside_it_survives_each_of_them(
    stack: Callable[..., LiveStack],
) -> None:
    """The engine with a copy of its own comes back alone, with the present weights. The other one
    takes the trainer along, and no step is lost."""
    first = free_pair()
    run = stack(
        mode="shared_vllm",
        vllm__port=first,
        vllm__replicas=2,
        trainer__training_steps=5000,
        trainer__checkpoint_interval=0,
    )
    run.until_step(5, timeout=240)

    def back(name: str, since: float) -> bool:
        return any(s.new == "healthy" and s.time > since for s in run.states(name))

    for name in ("vllm-1", "vllm-0"):
        os.kill(run.pid_of(name), signal.SIGKILL)
        killed = time.time()
        run.until(lambda name=name, at=killed: back(name, at), 240, f"{name} healthy again")
        assert_goes_on(run, first, name)
    attempts = attempts_at_the_end(run)
    assert attempts == {"vllm-0": {1, 2}, "vllm-1": {1, 2}, "trainer": {1, 2}, "arithmetic": {1}}
    alignments = run.telemetry("alignment")
    assert sum(bool(record.probe_tokens) for record in alignments) >= 10, "of both, by turns"
    assert any(record.left_out for record in run.telemetry("sync")), "one was away meanwhile"


@pytest.mark.timeout(900)
def test_the_end_of_any_engine_on_the_trainers_device_costs_no_step(
    stack: Callable[..., LiveStack],
) -> None:
    """The trainer maps the memory of both, so that it restarts with either of them."""
    first = free_pair()
    run = stack(
        mode="shared_vllm",
        vllm__port=first,
        vllm__per_gpu=2,
        trainer__training_steps=5000,
        trainer__checkpoint_interval=0,
    )
    run.until_step(5, timeout=240)
    for at, name in enumerate(("vllm-1", "vllm-0"), 2):
        os.kill(run.pid_of(name), signal.SIGKILL)
        again = lambda at=at: {s.attempt for s in run.states("trainer")} >= {at}  # noqa: E731
        run.until(again, 240, f"the trainer restarted with {name}")
        assert_goes_on(run, first, name)
    attempts = attempts_at_the_end(run)
    assert attempts["vllm-0"] == attempts["vllm-1"] == {1, 2}
    assert attempts["trainer"] == {1, 2, 3} and attempts["arithmetic"] == {1}
