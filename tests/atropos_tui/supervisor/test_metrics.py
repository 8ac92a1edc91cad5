"""`[metrics] port`: a real supervisor's page for Prometheus, read by the client library's own
parser."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from typing import Any

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from atropos_common.protocol.control import Role
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import (
    DiagnosisRecord,
    EngineGauges,
    EnvCountsRecord,
    EnvFlow,
    EvalRecord,
    GaugesRecord,
    HostUse,
    parse_line,
)
from atropos_common.protocol.trainer_records import StepRecord, TimingRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.profile.spec import MetricsPolicy, RestartPolicy
from tests.support.harness import part, python, ready

STEP: dict[str, Any] = {
    "loss": float("nan"),
    "reward_mean": 0.5,
    "reward_std": 0.1,
    "lr": 1e-5,
    "grad_norm": 1.0,
    "ratio_mean": 1.0,
    "clip_fraction": 0.0,
    "tokens": 10,
    "sequences": 2,
    "weight_version": 3,
    "attempt": 1,
    "policy_lag_mean": 0.25,
    "left_out_tokens": {"too_old": 5},
}
SECRET = "sk-live-0123456789abcdef"


def write(run: RunDir, *records: Record) -> None:
    for record in records:
        sums = run.eval_jsonl("sums")
        path = {"eval": sums, "env_counts": sums, "gauges": run.gauges_jsonl}.get(
            record.kind, run.telemetry_jsonl
        )
        with path.open("a") as file:
            file.write(record.to_line())


def timing(step: int) -> TimingRecord:
    return TimingRecord(
        attempt=1,
        step=step,
        step_s=2.0,
        data_wait_s=1.5,
        train_s=0.4,
        sync_s=0.1,
        checkpoint_s=0.0,
        tokens_per_s=5.0,
        engine_capacity_used=0.4,
        accepted_tokens_per_s=3.0,
    )


async def scrape(port: int, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(f"http://127.0.0.1:{port}/metrics", headers=headers)


def values(families: dict[str, Metric], name: str) -> dict[tuple[str, ...], float]:
    """Return the values by those of the labels, in the order of their names."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for sample in families[name].samples
    }


async def test_what_a_live_run_tells(launch: Any, free_port: int) -> None:
    crash = python("import sys; print('up', flush=True); sys.exit('boom ' + sys.argv[1])", SECRET)
    bad = part("bad", crash, restart=RestartPolicy(backoff_s=60), gpus=[0, 1])
    async with launch(
        part("vllm", probes=ready(), gpus=[0]), bad, metrics=MetricsPolicy(port=free_port)
    ) as running:
        await running.until("vllm", "healthy")
        await running.until("bad", "backoff")
        write(
            running.run, StepRecord(step=1, **STEP), timing(1), StepRecord(step=2, rank=1, **STEP)
        )
        write(running.run, EvalRecord(env="sums", accuracy=0.75, policy_step=1))
        write(running.run, EnvCountsRecord(env="sums", sent=1, left_out_tokens={"flat": 40}))
        write(
            running.run,
            GaugesRecord(
                engines={"vllm": EngineGauges(running=4, generated_tokens=100)},
                host=HostUse(memory_total=1000),
                queue=7,
                flows={"math": EnvFlow(engine="vllm", capacity_used=0.25)},
            ),
        )
        answer = await scrape(free_port)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(
            "text/plain; version="
        )
        families = {family.name: family for family in text_string_to_metric_families(answer.text)}
        assert values(families, "atropos_run_info")[("none", "test", running.stack.run_id)] == 1
        states = values(families, "atropos_component_state")
        assert (
            states[("vllm", "other", "healthy")] == 1 and states[("bad", "other", "backoff")] == 1
        )
        assert sum(states.values()) == 2, "each component is in one state"
        assert values(families, "atropos_component_restarts") == {("vllm",): 0, ("bad",): 1}
        assert ("bad",) in values(families, "atropos_component_diagnosed")
        assert values(families, "atropos_component_memory_bytes")[("vllm",)] > 100_000
        assert values(families, "atropos_step") == {(): 1}, "of rank 0"
        assert values(families, "atropos_reward_mean") == {(): 0.5}
        assert values(families, "atropos_policy_lag_mean") == {(): 0.25}
        assert values(families, "atropos_step_waiting_ratio") == {(): 0.75}
        assert values(families, "atropos_step_engine_capacity_ratio") == {(): 0.4}
        assert values(families, "atropos_accepted_tokens_per_second") == {(): 3.0}
        assert values(families, "atropos_accepted_tokens_per_second_per_gpu") == {(): 1.5}
        assert values(families, "atropos_accepted_tokens") == {(): 6.0}
        thrown = values(families, "atropos_thrown_away_tokens")
        assert thrown == {("", "too_old"): 5.0, ("sums", "flat"): 40.0}
        assert values(families, "atropos_env_engine_capacity_ratio") == {("math",): 0.25}
        assert values(families, "atropos_eval_accuracy_ratio") == {("sums", "held_out"): 0.75}
        assert values(families, "atropos_engine_requests_running") == {("vllm",): 4}
        assert values(families, "atropos_engine_generated_tokens") == {("vllm",): 100}
        assert values(families, "atropos_api_queue_groups") == {(): 7}
        assert str(values(families, "atropos_loss")[()]) == "nan"
        assert "atropos_entropy_nats" not in families, "nobody knows it"
        assert SECRET not in answer.text and str(running.run.root) not in answer.text
        write(running.run, StepRecord(step=2, **STEP), GaugesRecord(queue=0))
        families = {
            family.name: family
            for family in text_string_to_metric_families((await scrape(free_port)).text)
        }
        assert values(families, "atropos_step") == {(): 2} and values(
            families, "atropos_api_queue_groups"
        ) == {(): 0}


async def test_a_diagnosis_is_over_when_its_component_is_well_again(
    launch: Any, free_port: int
) -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    dies_once = (
        "import os, sys, time; os.environ['ATROPOS_ATTEMPT'] == '1' and sys.exit(sys.argv[1]); "
        "time.sleep(600)"
    )
    crashes = part(
        "bad", python(dies_once, oom), role=Role.TRAINER, restart=RestartPolicy(backoff_s=2)
    )
    async with launch(crashes, metrics=MetricsPolicy(port=free_port)) as running:
        for state, attempt, diagnosed in (("backoff", 1, 1), ("healthy", 2, 0)):
            await running.until("bad", state, attempt)
            page = (await scrape(free_port)).text
            families = {family.name: family for family in text_string_to_metric_families(page)}
            assert values(families, "atropos_component_diagnosed") == {("bad",): diagnosed}


async def test_names_are_what_prometheus_takes(launch: Any, free_port: int) -> None:
    async with launch(part("a-b.c"), metrics=MetricsPolicy(port=free_port)) as running:
        await (await running.answers()).wait("ready")
        write(running.run, StepRecord(step=1, **STEP), timing(1))
        for family in text_string_to_metric_families((await scrape(free_port)).text):
            assert re.fullmatch(
                r"atropos_[a-z][a-z0-9_]*[a-z0-9]", family.name
            ) and family.documentation.endswith(".")
            assert family.samples and family.type in ("gauge", "counter")
            for sample in family.samples:
                assert all(re.fullmatch("[a-z_]+", label) for label in sample.labels)


async def test_a_page_of_another_name_may_not_read_it(launch: Any, free_port: int) -> None:
    async with launch(part("sleeps"), metrics=MetricsPolicy(port=free_port)) as running:
        await (await running.answers()).wait("ready")
        assert (await scrape(free_port, Host="evil.example")).status_code == 403
        assert (await scrape(free_port, Host=f"localhost:{free_port}")).status_code == 200
        for page in ("http://evil.example", "null", "http://localhost@evil.example"):
            assert (await scrape(free_port, Origin=page)).status_code == 403
        async with httpx.AsyncClient(
            trust_env=False, base_url=f"http://127.0.0.1:{free_port}"
        ) as client:
            assert (await client.post("/metrics")).status_code == 405
            assert (await client.get("/status")).status_code == 404


async def test_a_port_that_is_taken_costs_the_figures_and_not_the_run(launch: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with launch(
            part("works", python("pass"), ends_run=True),
            metrics=MetricsPolicy(port=taken.getsockname()[1]),
        ) as running:
            assert await asyncio.wait_for(running.task, 20) == 0
            lines = running.run.supervisor_jsonl.read_bytes().splitlines()
            said = [
                record for record in map(parse_line, lines) if isinstance(record, DiagnosisRecord)
            ]
            assert [(record.rule, record.over) for record in said] == [
                ("no_metrics", False),
                ("no_metrics", True),
            ]


def test_off_it_costs_not_even_an_import() -> None:
    code = "import sys, atropos_tui.supervisor.runner; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
