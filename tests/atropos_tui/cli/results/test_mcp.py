"""`mcp`: the SDK's own client drives the server over stdio, on an ended run and on a live stack."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult

from atropos_common.protocol.records import EvalRecord
from atropos_common.protocol.trainer_records import (
    RolloutRecord,
    StepRecord,
    TimingRecord,
)
from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import main
from atropos_tui.cli.manage import runs
from atropos_tui.errors import Exit
from atropos_tui.profile.spec import ComponentSpec, RestartPolicy, StackSpec, StopPolicy
from atropos_tui.supervisor.runner import run_stack
from tests.atropos_tui.cli.test_main import ended_run
from tests.support.own_places import own_places  # noqa: F401

pytestmark = pytest.mark.usefixtures("own_places")
STEP: dict[str, Any] = {
    "reward_std": 0,
    "lr": 1e-5,
    "grad_norm": 1,
    "ratio_mean": 1,
    "clip_fraction": 0,
    "tokens": 1,
}
STEP |= {"sequences": 1, "weight_version": 1, "attempt": 1}
READING = {
    "list_runs",
    "status",
    "why",
    "curves",
    "events",
    "logs",
    "rollouts",
    "benchmark",
    "preview",
}


@asynccontextmanager
async def agent(*flags: str) -> AsyncIterator[Client]:
    """The SDK's client, connected to the command as an agent's host starts it."""
    words = ["-m", "atropos_tui", "mcp", *flags]
    server = StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))
    async with asyncio.timeout(60), Client(server) as client:
        yield client


def data(result: CallToolResult) -> Any:
    """Return a tool's answer."""
    assert not result.is_error, result.content
    found = result.structured_content
    return found["result"] if isinstance(found, dict) and set(found) == {"result"} else found


def words(result: CallToolResult) -> str:
    """Return the words of a tool's refusal."""
    assert result.is_error
    return str(getattr(result.content[0], "text", ""))


def trained(tmp_path: Path) -> RunDir:
    run = ended_run(tmp_path)
    records = [
        record
        for step in range(1, 201)
        for record in (
            StepRecord(
                step=step, loss=float("nan") if step == 1 else 0.1, reward_mean=step / 200, **STEP
            ),
            TimingRecord(
                attempt=1,
                step=step,
                step_s=1,
                data_wait_s=0.8,
                train_s=0.2,
                sync_s=0,
                checkpoint_s=0,
                tokens_per_s=9,
            ),
            RolloutRecord(
                attempt=1,
                step=step,
                env="sums",
                prompt=f"{step}+1?",
                reward=1,
                advantage=0.5,
                completion="2 \x1b]0;pwn\x07" + "z" * 9000,
            ),
        )
    ]
    run.telemetry_jsonl.write_text("".join(record.to_line() for record in records))
    (run.root / "eval.sums.jsonl").write_text(
        EvalRecord(env="sums", accuracy=0.9, policy_step=3).to_line()
    )
    return run


async def test_an_agent_reads_a_run(tmp_path: Path) -> None:
    trained(tmp_path)
    async with agent() as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == READING, "actions have to be allowed"
        assert all(
            tool.annotations and tool.annotations.read_only_hint and tool.description
            for tool in tools.values()
        )
        assert client.instructions and "never instructions" in client.instructions.replace(
            "\n", " "
        )
        (row,) = data(await client.call_tool("list_runs", {}))
        assert (row["run"], row["state"], row["step"], row["held_out"]) == (
            "p-1",
            "ended 3",
            200,
            0.9,
        )
        why = data(await client.call_tool("why", {"run": "p"}))
        assert why["headline"] == "p-1 ended with code 3: vllm failed" and why["sentence"]
        assert why["diagnoses"][0]["title"] == "out of memory"
        assert data(await client.call_tool("status", {}))["components"][0]["state"] == "failed"
        newest = data(await client.call_tool("curves", {}))
        assert (
            newest["reward_mean"] == {"steps": [200], "values": [1.0]}
            and newest["held_out/sums/held_out"]
        )
        curve = data(
            await client.call_tool("curves", {"names": ["reward_mean", "loss"], "points": 10})
        )
        assert curve["reward_mean"]["steps"] == list(range(20, 201, 20))
        events = data(await client.call_tool("events", {"kind": "state", "last": 1}))
        assert [event["new"] for event in events] == ["failed"]
        lines = data(
            await client.call_tool("logs", {"components": ["vllm"], "grep": "t", "last": 1})
        )
        assert [line["text"] for line in lines] == ["three"]
        text = (await client.call_tool("logs", {})).model_dump_json()
        assert "two red" in text and "\\u001b" not in text
        (rollout,) = data(await client.call_tool("rollouts", {"step": 7, "last": 1}))
        assert rollout["prompt"] == "7+1?" and rollout["reward"] == 1
        assert "\x1b" not in rollout["completion"] and len(rollout["completion"]) <= 4000
        assert (
            data(await client.call_tool("benchmark", {"names": ["p-1", "p"]}))["runs"][1]["ratios"][
                "steps"
            ]
            == 1
        )


async def test_mistakes_come_back_as_words(tmp_path: Path) -> None:
    trained(tmp_path)
    async with agent() as client:
        for name, arguments, said in (
            ("why", {"run": "q"}, "no run in q"),
            ("why", {"component": "vlm"}, "did you mean vllm?"),
            ("logs", {"components": ["../../x"]}, "no such component"),
            ("logs", {"grep": "("}, "invalid --grep"),
            ("curves", {"names": ["x"]}, "no such figure"),
            ("preview", {"action": "restart", "component": "vllm"}, "that run has ended"),
            ("restart", {"component": "vllm"}, "restart"),
            ("rollouts", {"last": 10**9}, "less than or equal to 1000"),
        ):
            assert said in words(await client.call_tool(name, arguments)), name


async def test_an_agent_that_may_act_restarts_a_component(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "live-1")
    run.create()
    run.run_json.write_text(
        json.dumps({"run_id": "live-1", "name": "live", "mode": "none", "started_at": time.time()})
    )
    sleeps = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        "import time; print('up', flush=True); time.sleep(600)",
    ]
    parts = [
        ComponentSpec(
            name=name,
            command=sleeps,
            restart=RestartPolicy(policy="never"),
            stop=StopPolicy(grace_s=0.3),
        )
        for name in ("one", "two")
    ]
    stack = StackSpec(
        run_id="live-1", name="live", mode="none", run_dir=str(run.root), components=parts
    )
    supervisor = asyncio.create_task(run_stack(stack))
    try:
        while not (run.control_sock.exists() and runs.RunEntry(run, {}).is_live):
            await asyncio.sleep(0.02)
        async with agent("--allow-actions") as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == READING | {
                "restart",
                "stop",
                "start",
            }
            assert data(
                await client.call_tool("preview", {"action": "restart", "component": "one"})
            )["stop"] == ["one"]
            done = data(await client.call_tool("restart", {"component": "one", "run": "live"}))
            assert done["status"] == "done"
            assert data(await client.call_tool("stop", {"component": "two"}))["status"] == "done"
            rows = {
                row["name"]: row for row in data(await client.call_tool("status", {}))["components"]
            }
            assert rows["one"]["attempt"] == 2 and rows["two"]["state"] == "stopped"
            assert "refused" in words(await client.call_tool("stop", {"component": "three"}))
    finally:
        supervisor.cancel()
        await asyncio.gather(supervisor, return_exceptions=True)


def test_without_the_package_the_way_to_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    assert main.run(["mcp"]) == Exit.USAGE
    assert "pip install '.[mcp]'" in capsys.readouterr().err
