"""Parts of the verifiers host that need no verifiers: tool servers, and logprobs of a trace."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from atropos_envs.verifiers import tool_servers
from atropos_envs.verifiers.sequences import branches_of

_CHILD = """
import sys, time
time.sleep(0.5)
for number, _ in enumerate(sys.stdin):
    print(2**22 + number, flush=True)
"""


async def test_a_cancelled_rollout_does_not_take_the_next_one_s_tool_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, killed = asyncio.create_subprocess_exec, []

    async def child(*_: Any, **options: Any) -> Any:
        return await start(sys.executable, "-c", _CHILD, **options)

    monkeypatch.setattr("asyncio.create_subprocess_exec", child)
    monkeypatch.setattr(tool_servers, "_end_unused", lambda task: killed.append(task.result().pid))
    monkeypatch.setattr(tool_servers, "Fork", lambda pid: SimpleNamespace(pid=pid))
    server = tool_servers.ForkServer()
    first = asyncio.create_task(server.fork("a", {}, "/", "x"))
    await asyncio.sleep(0.1)
    first.cancel()
    assert [(await server.fork(name, {}, "/", "x")).pid for name in "bc"] == [2**22 + 1, 2**22 + 2]
    assert killed == [2**22], "nobody has the handle of the first one"
    await server.close()


def test_equal_answers_of_one_trace_may_differ_in_their_last_bits() -> None:
    def node(ids: list[int], logprobs: list[float]) -> Any:
        return SimpleNamespace(
            token_ids=[1, *ids], mask=[False, *[True] * len(ids)], sampled=True, logprobs=logprobs
        )

    answers = [[-0.101], [-0.102]]
    turns: Any = [
        SimpleNamespace(prompt_ids=[1], token_ids=[[7]], logprobs=[each]) for each in answers
    ]
    branches = [
        SimpleNamespace(trainable=True, sampled_mask=[False, True], nodes=[node([7], each)])
        for each in answers
    ]
    made = branches_of(SimpleNamespace(branches=branches), turns, 1.0)
    assert [one.logprobs[-1] for one in made] == [-0.101, -0.102]
