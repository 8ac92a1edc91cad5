"""Two real engines by `vllm.replicas = 2`: each gets half of the requests, and every version."""

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


@pytest.mark.parametrize("mode", ["none", "broadcast"])
def test_each_engine_gets_its_share_and_every_version(
    stack: Callable[..., LiveStack], mode: str
) -> None:
    first = free_pair()
    run = stack(
        mode=mode,
        vllm__port=first,
        vllm__replicas=2,
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
    assert {record.verdict for record in run.telemetry("alignment")} == {"ok"}
    for name, port in zip(NAMES, (first, first + 1), strict=True):
        assert (
            f":{port} answers with weight version" in log_of(run.run, "trainer")
            or mode == "broadcast"
        ), name
    run.assert_nothing_left()


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
