"""Rules about groups that environments make: from given numbers, and from the watcher's input."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from atropos_common.protocol.bridge import (
    METRIC_CAPACITY,
    METRIC_IDLE_S,
    METRIC_REQUESTS,
    METRIC_SLOTS,
)
from atropos_common.protocol.control import Role, State
from atropos_common.protocol.records import (
    FLAT,
    GROUP_SIZE,
    REFUSED,
    RETURNED_NONE,
    SURPLUS,
    UNSENDABLE,
    EnvCountsRecord,
)
from atropos_common.protocol.stages import FIRST_BATCH
from atropos_common.protocol.trainer_records import StepRecord, TimingRecord
from atropos_common.system.run_dir import ENV_ENGINE_URLS
from atropos_tui.diagnoses import questions
from atropos_tui.diagnoses.flow import FlowWatch, parse_look
from atropos_tui.diagnoses.flow_rules import explain
from atropos_tui.diagnoses.stall_rules import Flow, Part, RunSnapshot, no_batches
from atropos_tui.profile.spec import ComponentSpec, StackSpec

BEGAN = 1e9


def flow(sent: int = 0, flat: int = 0, failures: int = 0, **fields: Any) -> Flow:
    out = Counter({FLAT: flat} if flat else {}) + fields.pop("out", Counter())
    return Flow(
        sent=sent,
        left_out=out,
        failures=Counter({"KeyError: 'answer'": failures} if failures else {}),
        **{"counted_s": 20.0} | fields,
    )


WAITS = {
    "seconds": 12.0,
    "waiting": 0.9,
    "idle": 0.8,
    "running": 2.5,
    "slots": 128.0,
    "tokens_per_s": 300.0,
}
SHORT = Counter({GROUP_SIZE: 9})


@pytest.mark.parametrize(
    ("rule", "scene", "evidence"),
    [
        ("groups_all_flat", flow(1, 19), "19 of the newest 20 groups have one score"),
        ("groups_all_flat", flow(0, 8, **WAITS), "8 of the newest 8"),
        (
            "groups_all_flat",
            flow(0, 8, examples={FLAT: "score 1 in 5, 0 in 3"}),
            "(newest flat groups: score 1 in 5, 0 in 3)",
        ),
        (
            "groups_left_out",
            flow(0, 1, out=SHORT),
            "9 times another number of completions than group_size",
        ),
        (
            "groups_left_out",
            flow(400, out=Counter({RETURNED_NONE: 9}), streak=Counter({RETURNED_NONE: 9})),
            "9 of the newest 9: 9 times",
        ),
        (
            "groups_left_out",
            flow(out=Counter({RETURNED_NONE: 8})),
            "8 times the environment returned None in its place",
        ),
        (
            "groups_refused",
            flow(
                9,
                0,
                out=Counter({REFUSED: 1}),
                examples={REFUSED: "422: advantages.0: Input should be a list"},
            ),
            "1 times run-api refused it (422: advantages.0: Input should be a list)",
        ),
        (
            "groups_refused",
            flow(out=Counter({UNSENDABLE: 3}), examples={UNSENDABLE: "scores[0] is a str"}),
            "of the newest 3 groups 3 times JSON cannot hold it (scores[0] is a str)",
        ),
        (
            "evaluations_fail",
            flow(9, evaluation_failures=Counter({"ZeroDivisionError": 2})),
            "2 times ZeroDivisionError",
        ),
        (
            "rollouts_malformed",
            flow(
                9,
                malformed=Counter({"malformed masks": 8}),
                malformed_example="group 0 of the batch",
            ),
            "left out 8 sequences of the newest steps: 8 times malformed masks; group 0 of "
            "the batch",
        ),
        ("rollouts_fail", flow(1, 0, 20), "20 times KeyError: 'answer'"),
        (
            "environment_silent",
            flow(could_ask_s=21.0, watches_engine=True),
            "and vllm is ready for 21 s",
        ),
        (
            "environment_bound",
            flow(6, 4, **WAITS),
            "waited 90% of the time and vllm had no request 80% of it",
        ),
        ("environment_bound", flow(6, 4, **WAITS), "10 groups in 20 s (0.50/s, 40% of them flat)"),
        ("environment_bound", flow(6, 4, **WAITS), "with 2.5 of 128 possible sequences"),
        ("environment_bound", flow(6, 4, **WAITS), "it could make 2.50/s"),
        ("environment_bound", flow(**WAITS), "came no group"),
        ("environment_bound", flow(**WAITS, bounds={"awaited": 0.9}), "came no group"),
        ("environment_bound", flow(**WAITS, counts=False), "came an unknown number of groups"),
    ],
)
def test_what_holds_an_environment_up_is_told_with_its_numbers(
    rule: str, scene: Flow, evidence: str
) -> None:
    found = explain({"rg": scene}, ())
    assert found["rg"].rule == rule and "rg" in found["rg"].title
    assert evidence in found["rg"].evidence, found["rg"].evidence
    assert not any(letter.isdigit() for letter in found["rg"].title), (
        "another title is another cause, told again"
    )
    assert explain({"rg": scene}, ("rg",)) == {}, "its refused requests explain it"


@pytest.mark.parametrize(
    "scene",
    [
        flow(2, 8),
        flow(0, 7),
        flow(90, 10, 60),
        flow(400, streak=Counter({FLAT: 20, SURPLUS: 9, RETURNED_NONE: 7})),
        replace(flow(), failures=Counter({"EngineRefused: the server refuses top_p": 90})),
        flow(could_ask_s=19.0, watches_engine=True),
        flow(could_ask_s=300.0),  # nobody knows what the engine got
        flow(could_ask_s=300.0, watches_engine=True, asked_s=200.0),
        flow(could_ask_s=300.0, watches_engine=True, requests=1),
        flow(10, **WAITS | {"idle": 0.3}),
        flow(10, **WAITS, bounds={"awaited": 0.1}),  # the batch waits for another environment
        flow(10, **WAITS | {"waiting": 0.4}),
        flow(10, **WAITS | {"seconds": None}),
    ],
)
def test_an_ordinary_flow_is_no_trouble(scene: Flow) -> None:
    assert explain({"rg": scene}, ()) == {}


def test_the_fix_names_the_key_with_its_present_value() -> None:
    assert (
        "env.max_num_workers under [env.args] of rg (now 8)"
        in explain({"rg": flow(9, workers="8", **WAITS)}, ())["rg"].fix
    )
    assert "fewer flat groups" in explain({"rg": flow(6, 4, **WAITS)}, ())["rg"].fix


def test_who_is_explained_makes_no_slow_rollouts() -> None:
    parts = tuple(part(role, BEGAN) for role in (Role.API, Role.ENV, Role.ENGINE, Role.TRAINER))
    still = RunSnapshot(BEGAN + 400, parts, step=7, step_at=BEGAN + 100)
    assert no_batches(still) is not None
    assert (
        no_batches(RunSnapshot(**vars(still) | {"explained": explain({"env": flow(0, 9)}, ())}))
        is None
    )


def part(role: Role, since: float, attempt: int = 1) -> Part:
    names = {Role.ENGINE: "vllm"}
    return Part(
        names.get(role, role.value),
        role,
        State.HEALTHY,
        since,
        started_at=since - 2,
        attempt=attempt,
    )


def component(role: Role, name: str = "", **fields: Any) -> ComponentSpec:
    return ComponentSpec(
        name=name or role.value, role=role, command=["x", "--env.max_num_workers", "8"], **fields
    )


STACK = StackSpec(
    run_id="r",
    name="r",
    mode="none",
    run_dir="/nowhere",
    components=[
        component(Role.API, port=1),
        component(Role.ENGINE, "vllm", port=2),
        component(Role.ENV),
        component(Role.TRAINER),
    ],
)
PARTS = [part(role, BEGAN) for role in (Role.API, Role.ENGINE, Role.ENV, Role.TRAINER)]
STEP = StepRecord(
    time=BEGAN,
    attempt=1,
    step=1,
    loss=0.0,
    reward_mean=0.0,
    reward_std=0.0,
    lr=0.0,
    grad_norm=0.0,
    ratio_mean=1.0,
    clip_fraction=0.0,
    tokens=1,
    sequences=1,
    weight_version=1,
)
STEPPED = {"train_s": 1.0, "sync_s": 0.0, "checkpoint_s": 0.0, "tokens_per_s": 1.0, "attempt": 1}


def page(
    idle_s: float, requests: int, running: float, tokens: float, capacity: float | None = None
) -> str:
    return ("" if capacity is None else f"{METRIC_CAPACITY} {capacity}\n") + (
        f"# TYPE {METRIC_IDLE_S} counter\n{METRIC_IDLE_S} {idle_s}\n{METRIC_REQUESTS} "
        f"{requests}\n{METRIC_SLOTS} 16.0\n"
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {running}\n'
        f'vllm:generation_tokens_total{{engine="0"}} {tokens}\nvllm:other{{engine="0"}} nonsense\n'
    )


def test_a_page_of_another_server_is_no_look() -> None:
    assert parse_look('vllm:num_requests_running{engine="0"} 3.0\n', 1.0) is None


def test_a_page_without_an_end_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the user's on the engine's port: it says a line now and then, and never that it
    is done."""
    monkeypatch.setattr(questions, "RESPONSE_TIMEOUT_S", 0.2)
    over = threading.Event()

    class Endless(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while not over.wait(0.02):
                    self.wfile.write(b"a_figure 1.0\n")

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack = STACK.model_copy(
        update={"components": [component(Role.ENGINE, "vllm", port=server.server_address[1])]}
    )
    look = threading.Thread(target=FlowWatch(stack).ask, args=(PARTS, BEGAN), daemon=True)
    look.start()
    look.join(10)
    held_up = look.is_alive()
    over.set()
    server.shutdown()
    assert not held_up


def played(*, requests: int = 3, capacity: float | None = None) -> tuple[FlowWatch, float]:
    """Twenty seconds: of each two the engine has a request for half a second; steps of 4 s wait for
    3; no ninth."""
    watch, env = FlowWatch(STACK), PARTS[2]
    watch.registered(env, BEGAN)
    for second in range(21):
        now = BEGAN + second
        seen = requests if second else 0
        watch.ask(
            PARTS,
            now,
            lambda _, at=second, seen=seen: page(
                at * 0.75, seen + at * bool(seen), 1.0, at * 30.0, capacity
            ),
        )
        if second % 4 == 0 and 0 < second <= 16:
            watch.step(
                TimingRecord(time=now, step=second // 4, step_s=4.0, data_wait_s=3.0, **STEPPED)
            )
        if second % 5 == 0 and second:
            watch.count(EnvCountsRecord(time=now, env="env", sent=second, left_out={FLAT: second}))
    return watch, now


def test_waiting_and_idleness_are_measured_over_the_newest_seconds() -> None:
    watch, now = played()
    found = watch.view(PARTS, now)["env"]
    assert (found.sent, found.flat, found.workers, found.slots) == (20, 20, "8", 16.0)
    assert found.idle == pytest.approx(0.75) and found.tokens_per_s == pytest.approx(30.0)
    # From 8 to 20: 8-11 and 12-15 of the steps; 16-19 after the last one, whose successor would
    # train for one second.
    assert found.waiting == pytest.approx(9 / 12)
    assert explain({"env": found}, ())["env"].rule == "environment_bound"
    assert watch.view(PARTS, BEGAN + 7)["env"].seconds is None, "too early to say"


def test_capacity_used_and_what_bounds_an_environment_are_measured() -> None:
    """30 tokens a second of 120; workers and queue slots as means of the newest records."""
    watch, now = played(capacity=120.0)
    assert watch.view(PARTS, now)["env"].capacity_used == pytest.approx(0.25)
    assert played()[0].view(PARTS, now)["env"].capacity_used is None, "the engine does not know"
    for at, workers in ((now - 60, 48.0), (now - 8, 4.0), (now - 2, 6.0)):
        watch.count(
            EnvCountsRecord(
                time=at,
                env="env",
                sent=20,
                left_out={FLAT: 20},
                workers=workers,
                max_workers=48,
                queue_slots=16,
                free_slots=0.5,
                waiting_for_slot=0.0,
                in_engine=12.0,
                group_size=8,
                # A batch waited for another environment, which is gone since.
                awaited=0.0 if at < now - 5 else None,
            )
        )
    found = watch.view(PARTS, now)["env"].bounds
    assert found == {
        "busy_workers": 5.0,
        "free_slots": 0.5,
        "waiting_for_slot": 0.0,
        "in_engine": 12.0,
        "max_workers": 48,
        "queue_slots": 16,
        "group_size": 8,
    }


def test_a_trainer_that_waits_for_room_on_a_disk_waits_for_no_environment() -> None:
    watch, now = played()
    watch.printed(PARTS[3], Counter({"pauses": 1}), now - 3)
    found = watch.view(PARTS, now)["env"]
    assert found.waiting == pytest.approx(6 / 12), "of the steps alone"
    assert "env" not in explain({"env": replace(found, left_out=Counter(), sent=20)}, ())
    watch.step(TimingRecord(time=now, step=5, step_s=4.0, data_wait_s=3.0, **STEPPED))
    assert watch.view(PARTS, now)["env"].waiting == pytest.approx(9 / 12), "it goes on"


def test_of_several_engines_what_they_do_together() -> None:
    stack = STACK.model_copy(
        update={
            "components": [
                component(Role.ENGINE, "a", port=2),
                component(Role.ENGINE, "b", port=3),
                component(
                    Role.ENV, env={ENV_ENGINE_URLS: "http://127.0.0.1:2/v1 http://127.0.0.1:3/v1"}
                ),
                component(Role.TRAINER),
            ]
        }
    )
    parts = [replace(part(Role.ENGINE, BEGAN), name=name) for name in "ab"] + PARTS[2:]
    watch, env = FlowWatch(stack), parts[2]
    watch.registered(env, BEGAN)
    for second in range(21):
        watch.ask(
            parts,
            BEGAN + second,
            lambda url, at=second: (
                page(0.0, at, 2.0, at * 30.0) if ":3/" in url else page(at * 0.5, 0, 1.0, 0.0)
            ),
        )
    found = watch.view(parts, BEGAN + 20)["env"]
    assert found.engine == "a and b" and found.slots == 32.0 and found.running == 3.0
    assert found.idle == pytest.approx(0.25) and found.tokens_per_s == pytest.approx(30.0)
    assert found.asked_s is not None, "one of them was asked"


def test_an_engine_that_nobody_asks_makes_a_silent_environment_and_no_bottleneck() -> None:
    watch, env = FlowWatch(STACK), PARTS[2]
    watch.registered(env, BEGAN)
    for second in range(25):
        watch.ask(PARTS, BEGAN + second, lambda _, at=second: page(at, 7, 0.0, 0.0))
    found = watch.view(PARTS, BEGAN + 24)["env"]
    assert explain({"env": found}, ())["env"].rule == "environment_silent"
    again = [
        part(Role.ENV, BEGAN + 20, attempt=2) if each.role is Role.ENV else each for each in PARTS
    ]
    assert explain(watch.view(again, BEGAN + 24), ()) == {}, (
        "its next attempt is not registered yet"
    )


def test_malformed_rollouts_are_told_of_each_environment_that_sends_them() -> None:
    """One that was named first kept a second one out of sight, and the fix named neither."""
    names = ("mask01", "images", "good")
    stack = STACK.model_copy(update={"components": [component(Role.ENV, name) for name in names]})
    parts = [replace(part(Role.ENV, BEGAN), name=name) for name in names]
    watch = FlowWatch(stack)

    def said(**faults: dict[str, int]) -> dict[str, str]:
        examples = {env: f"example of {env}" for env in faults}
        watch.trained(STEP.model_copy(update={"faults_by_env": faults, "fault_examples": examples}))
        found = explain(watch.view(parts, BEGAN + 6), ())
        return {env: one.evidence for env, one in found.items() if one.rule == "rollouts_malformed"}

    assert said(mask01={"malformed masks": 8}).keys() == {"mask01"}
    both = said(mask01={"malformed masks": 8}, images={"with images": 4})
    assert both.keys() == {"mask01", "images"} and "example of images" in both["images"]
    for _ in range(5):
        last = said()
    assert last == {}, "both are corrected"


def test_time_in_which_the_engine_was_not_ready_makes_no_environment_silent() -> None:
    """Registered at once; vLLM is healthy after two minutes, as on a GPU."""
    watch, env = FlowWatch(STACK), PARTS[2]
    watch.registered(env, BEGAN)
    ready = BEGAN + 120

    def said(now: float) -> Any:
        parts = [
            replace(
                each,
                state=State.HEALTHY if now >= ready else State.STARTING,
                since=ready if now >= ready else BEGAN,
            )
            if each.role is Role.ENGINE
            else each
            for each in PARTS
        ]
        watch.ask(parts, now, lambda _: page(0.0, 7, 0.0, 0.0) if now >= ready else None)
        return explain(watch.view(parts, now), ()).get("env")

    assert [said(BEGAN + second) for second in range(0, 139, 2)] == [None] * 70
    assert said(BEGAN + 142).rule == "environment_silent"


def test_a_clock_that_is_set_back_stops_no_look_and_makes_no_idleness() -> None:
    """Half a minute back, an hour after the registration: the engine has been busy all the time but
    for a tenth."""
    watch, asked = FlowWatch(STACK), []
    watch.registered(PARTS[2], BEGAN)
    for second in range(3600, 3660):
        now = BEGAN + second - (30 if second >= 3630 else 0)
        watch.ask(PARTS, now, lambda _, at=second: asked.append(at) or page(at * 0.1, at, 1.0, 0.0))
        found = watch.view(PARTS, now)["env"]
        assert found.seconds is None or found.idle == pytest.approx(0.1), second
    assert max(late - early for early, late in pairwise([*asked, second])) == 2


def test_a_trainer_that_has_its_first_batch_does_not_wait() -> None:
    watch, env = FlowWatch(STACK), PARTS[2]
    watch.registered(env, BEGAN)
    for second in range(20):
        watch.ask(PARTS, BEGAN + second, lambda _, at=second: page(at, at, 0.0, 0.0))
    assert watch.view(PARTS, BEGAN + 19)["env"].waiting == pytest.approx(1.0)
    watch.reached(PARTS[3], FIRST_BATCH, BEGAN + 19)
    assert watch.view(PARTS, BEGAN + 19)["env"].waiting == 0.0


def test_what_was_before_the_newest_whole_steps_fades_with_them() -> None:
    """For 18 s nothing but waiting, then steps of a second that wait for a tenth of it."""
    watch, env = FlowWatch(STACK), PARTS[2]
    watch.registered(env, BEGAN)
    for second in range(25):
        idle = min(second, 18) * 0.9
        watch.ask(PARTS, BEGAN + second, lambda _, at=second, idle=idle: page(idle, at, 1.0, 0.0))
        if second in (6, 12, 18):
            watch.step(
                TimingRecord(
                    time=BEGAN + second, step=second, step_s=6.0, data_wait_s=5.0, **STEPPED
                )
            )
        elif second > 18:
            watch.step(
                TimingRecord(
                    time=BEGAN + second, step=second, step_s=1.0, data_wait_s=0.1, **STEPPED
                )
            )
        if second == 18:
            before = watch.view(PARTS, BEGAN + second)["env"]
    assert explain({"env": before}, ())["env"].rule == "environment_bound"
    now = watch.view(PARTS, BEGAN + 24)["env"]
    assert now.waiting == pytest.approx(0.1) and now.idle < 0.2
    assert explain({"env": now}, ()) == {}


def test_a_trainer_that_has_done_its_last_step_waits_for_nothing() -> None:
    """It saves, and ends; the engine has nothing to do any more."""
    trainer = STACK.components[-1].model_copy(
        update={"command": ["python", "--training-steps", "4"]}
    )
    watch = FlowWatch(STACK.model_copy(update={"components": [*STACK.components[:-1], trainer]}))
    watch.registered(PARTS[2], BEGAN)
    for second in range(31):
        watch.ask(PARTS, BEGAN + second, lambda _, at=second: page(max(0.0, at - 20), at, 1.0, 0.0))
        if 16 < second <= 20:
            watch.step(
                TimingRecord(
                    time=BEGAN + second, step=second - 16, step_s=1.0, data_wait_s=0.1, **STEPPED
                )
            )
    found = watch.view(PARTS, BEGAN + 30)["env"]
    assert found.waiting < 0.1 and explain({"env": found}, ()) == {}


def test_groups_of_one_that_nobody_hosts_are_counted_from_the_logs() -> None:
    watch = FlowWatch(STACK)
    assert watch.view(PARTS, BEGAN)["env"].counts is False
    for second in range(1, 11):
        watch.printed(PARTS[0], Counter({"groups": 1}), BEGAN + second)
        watch.printed(PARTS[2], Counter({"dropped groups": 9}), BEGAN + second)
    found = watch.view(PARTS, BEGAN + 11)["env"]
    assert (found.sent, found.flat) == (10, 90)
    assert explain({"env": found}, ())["env"].rule == "groups_all_flat"
