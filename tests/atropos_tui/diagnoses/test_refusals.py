"""Requests that an engine refuses become diagnoses of their environments: from lines, and in a real
supervisor."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from atropos_common.protocol.control import Role, State
from atropos_common.protocol.records import DiagnosisRecord
from atropos_common.system.run_dir import ENV_ENGINE_URLS
from atropos_tui.diagnoses import stall_rules, watcher
from atropos_tui.diagnoses.model import Diagnosis
from atropos_tui.diagnoses.stall_rules import (
    LASTS_S,
    Part,
    RefusalWatch,
    RunSnapshot,
    asked_engines,
    no_batches,
)
from atropos_tui.profile.spec import StackSpec
from tests.support.harness import NEVER, SLEEP, Running, part, python, ready, wait_until
from vllm_server import refusals as server
from vllm_server.refusals import WHY, instead

TOP_P = (
    f"top_p=0.95: {WHY}. {instead(['top_p=0.95'])}, or, for an answer that is not trained on, "
    f"send x"
)
BIAS = f"logit_bias={{'5': 1}}: {WHY}. {instead(['logit_bias={}'])}, or ask for no logprobs"
BEGAN = 1e9


def line(count: int, seen: int, reason: str = TOP_P) -> str:
    said = f"refused {count} requests to /generate (400): {reason} [of {seen} since 10:04:51]"
    return f"WARNING 11-22 10:04:52 [vllm_server] {said}"


def engine(name: str = "vllm", port: int = 9001) -> Any:
    return part(name, role=Role.ENGINE, port=port)


def environment(name: str, port: int = 9001) -> Any:
    return part(
        name, [*python(SLEEP), "--openai.base_url", f"http://127.0.0.1:{port}/v1"], role=Role.ENV
    )


def running(name: str, role: Role) -> Part:
    return Part(name, role, State.HEALTHY, BEGAN, started_at=BEGAN, attempt=1)


def watch(*components: Any) -> tuple[RefusalWatch, tuple[Part, ...]]:
    stack = StackSpec(run_id="r", name="n", mode="none", run_dir="/r", components=list(components))
    return RefusalWatch(stack), tuple(running(spec.name, spec.role) for spec in components)


def judge(lines: list[str], *, later: float = 0.0) -> dict[str, Diagnosis]:
    """One engine and one environment."""
    looks, parts = watch(engine(), environment("rg"))
    looks.feed("vllm", 1, lines, BEGAN + 10, BEGAN + 10)
    return looks.judge(parts, BEGAN + 10 + later)


def test_the_environment_the_reason_and_what_to_change() -> None:
    found = judge([line(1, 1), line(331, 332)])["rg"]
    assert (found.rule, found.title) == (
        "rollouts_refused",
        "vllm refuses the requests of rg (400)",
    )
    assert found.evidence.startswith(
        "refused 331 requests to /generate (400): top_p=0.95: changes the distribution"
    )
    assert found.evidence.endswith("[of 332 since 10:04:51]")
    assert "send top_p=1." in found.fix and "atropos-tui restart rg" in found.fix


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("The model `x` does not exist.", "openai.model_name"),
        ("model: 'x' is not served here; this server has ['y']", "openai.model_name"),
        (
            "This model's maximum context length is 256 tokens. However, your prompt "
            "contains 300 input",
            "max_model_len",
        ),
        ("max_tokens=1000000 cannot be greater than max_model_len=256.", "max_model_len"),
        (
            "As of transformers v4.44, default chat template is no longer allowed, so you "
            "must provide a chat template "
            "if the tokenizer does not define one.",
            "the model has no chat template",
        ),
        ("temprature: Extra inputs are not permitted", "atropos-tui logs vllm --grep refused"),
        (BIAS, "leave out logit_bias."),
    ],
)
def test_the_way_out_by_the_words_of_the_reason(reason: str, fix: str) -> None:
    assert fix in judge([line(9, 9, reason)])["rg"].fix


@pytest.mark.parametrize(
    ("lines", "later", "stands"),
    [
        ([line(4, 4)], 0.0, False),
        ([line(5, 64)], 0.0, False),
        ([line(5, 10)], 0.0, True),
        ([line(3, 6), line(3, 6, "another")], 0.0, True),
        ([line(331, 332)], LASTS_S, True),
        ([line(331, 332)], LASTS_S + 1, False),
        ([line(331, 332), line(1, 2)], 0.0, False),
        (["WARNING [vllm_server] refused to start", "refused x requests"], 0.0, False),
    ],
)
def test_only_what_stops_the_rollouts(lines: list[str], later: float, stands: bool) -> None:
    """Not an accident, not a few long prompts among many, not what is long over; several reasons
    add up."""
    assert bool(judge(lines, later=later)) is stands


def test_an_environment_that_was_restarted_is_not_told_of_what_was_before() -> None:
    looks, (vllm, rg) = watch(engine(), environment("rg"))
    looks.feed("vllm", 1, [line(331, 332)], BEGAN + 10, BEGAN + 10)
    again = replace(rg, started_at=BEGAN + 20, attempt=2)
    assert looks.judge((vllm, again), BEGAN + 21) == {}
    looks.feed("vllm", 1, [line(340, 341)], BEGAN + 22, BEGAN + 22)
    assert looks.judge((vllm, again), BEGAN + 22) == {}, "refused before, said only now"
    looks.feed("vllm", 1, [line(400, 401)], BEGAN + 30, BEGAN + 30)
    assert set(looks.judge((vllm, again), BEGAN + 30)) == {"rg"}
    third = replace(rg, started_at=BEGAN + 40, attempt=3)
    assert looks.judge((vllm, third), BEGAN + 41) == {}
    looks.note_refusals("rg", 3, 5)
    assert set(looks.judge((vllm, third), BEGAN + 42)) == {"rg"}, "it says so itself"
    assert looks.judge((replace(vllm, state=State.BACKOFF), third), BEGAN + 42) == {}
    looks.feed("vllm", 2, [], BEGAN + 50, BEGAN + 50)
    assert looks.judge((vllm, third), BEGAN + 50) == {}, "another engine"


def test_of_several_environments_those_that_hear_of_it_else_all() -> None:
    looks, parts = watch(
        engine(), engine("judge", 9002), environment("a"), environment("b"), environment("c", 9002)
    )
    looks.feed("vllm", 1, [line(50, 60)], BEGAN + 10, BEGAN + 10)
    assert set(looks.judge(parts, BEGAN + 10)) == {"a", "b"}
    looks.note_refusals("b", 1, 1)
    assert set(looks.judge(parts, BEGAN + 10)) == {"b"}
    looks.feed("judge", 1, [line(50, 60)], BEGAN + 10, BEGAN + 10)
    assert set(looks.judge(parts, BEGAN + 10)) == {"b", "c"}
    assert looks.judge(parts, BEGAN + 10)["c"].title.startswith("judge refuses")


def test_whom_an_environment_asks() -> None:
    own = part("own", python(SLEEP), role=Role.ENV)
    asked = asked_engines([engine(), engine("judge", 90010), environment("c", 90010), own])
    assert asked == {"c": ("judge",), "own": ("vllm",)}
    assert asked_engines([own]) == {}
    told = part(
        "told",
        python(SLEEP),
        role=Role.ENV,
        env={ENV_ENGINE_URLS: "http://h:9001/v1 http://h:90010/v1"},
    )
    assert asked_engines([engine(), engine("judge", 90010), told]) == {"told": ("vllm", "judge")}


def test_no_batches_gives_way_but_not_to_what_is_more_certain() -> None:
    parts = tuple(
        running(role.value, role) for role in (Role.API, Role.ENV, Role.ENGINE, Role.TRAINER)
    )
    still = RunSnapshot(BEGAN + 400, parts, refused={"env": stall_rules.REFUSED.diagnosis("", "")})
    assert no_batches(still) is None
    found = no_batches(replace(still, ghosts=1))
    assert found is not None and "gone" in found.title


def test_a_late_line_of_the_engine_does_not_prolong_a_refusal_that_ended() -> None:
    """The engine delays its lines by up to 300 s. An environment counts its groups every 5 s."""
    looks, (vllm, rg) = watch(engine(), environment("rg"))
    looks.feed("vllm", 1, [line(300, 301)], BEGAN, BEGAN)
    assert set(looks.judge((vllm, rg), BEGAN)) == {"rg"}
    ended_after = []
    for second in range(1, 26):
        if second % 5 == 0:
            looks.accepted("rg", 4, BEGAN + second)
        if second == 15:
            late = f"{line(331, 360)} (last 15 s ago)"
            looks.feed("vllm", 1, [late], BEGAN + second, BEGAN + second)
        if not looks.judge((vllm, rg), BEGAN + second):
            ended_after.append(second)
    assert ended_after == list(range(10, 26))
    assert ended_after[0] + watcher.GONE_S < 30
    looks.feed("vllm", 1, [line(400, 430)], BEGAN + 26, BEGAN + 26)
    assert set(looks.judge((vllm, rg), BEGAN + 26)) == {"rg"}, "a new refusal"


ENGINE = """import asyncio, sys
from vllm_server.plugin import configure_logging
from vllm_server.refusals import RefusalLog
async def main():
    log, share = RefusalLog(), int(sys.argv[1])
    print('up', flush=True)
    number = 0
    while True:
        await asyncio.sleep(0.05)
        number += 1
        log.begun += 1
        if number % 10 < share:
            log.note('/generate', 400, sys.argv[2])
        log.ended += 1
configure_logging()
asyncio.run(main())"""
"""Program with the real server's log: it refuses argv[1] of ten requests, at twenty requests a
second."""

Launch = Callable[..., Any]


def stack_of(share: int) -> list[Any]:
    command = [sys.executable, "-c", ENGINE, str(share), TOP_P]
    vllm = part("vllm", command, role=Role.ENGINE, probes=ready(), restart=NEVER)
    return [vllm, environment("rg"), part("train", role=Role.TRAINER)]


def diagnoses(run: Running) -> list[DiagnosisRecord]:
    return [each for each in run.records if isinstance(each, DiagnosisRecord) and not each.over]


async def test_it_is_told_within_fifteen_seconds(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the supervisor's own pace. The stall rule is made quick here: it would otherwise come
    later."""
    assert watcher.CHECK_EVERY_S == 1.0 and server.FIRST_GAP_S == 5.0
    monkeypatch.setattr(stall_rules, "STALL_S", 9.0)
    async with launch(*stack_of(10)) as run:
        await run.until("vllm", State.HEALTHY)
        took = await wait_until(lambda: bool(diagnoses(run)), timeout_s=15)
        print(f"{took:.1f} s from the first refusal to the diagnosis")
        (found,) = diagnoses(run)
        assert (found.component, found.role, found.rule) == ("rg", "env", "rollouts_refused")
        assert "top_p=0.95" in found.evidence and "top_p=1" in found.fix
        row = next(row for row in (await run.client.status()).components if row.name == "rg")
        assert row.diagnosis.startswith("vllm refuses the requests of rg (400)")
        await asyncio.sleep(12 - took)
        assert diagnoses(run) == [found], "once, and not that rollouts are slow"


async def test_a_few_refusals_among_many_answers_are_not_told(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "CHECK_EVERY_S", 0.05)
    async with launch(*stack_of(3)) as run:
        await run.until("vllm", State.HEALTHY)
        log = run.run.log("vllm", 1)
        await wait_until(lambda: log.read_text().count(" refused ") > 1, timeout_s=15)
        await asyncio.sleep(0.3)
        assert diagnoses(run) == []
