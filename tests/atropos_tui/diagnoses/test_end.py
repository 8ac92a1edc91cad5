"""Every rule opens by its evidence and ends by the opposite, in `ps`, `why` and the report
alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol import records
from atropos_common.protocol.control import Phase, Role, RunStatus, State
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import (
    DiagnosisRecord,
    EvalRecord,
    StateRecord,
)
from atropos_common.protocol.trainer_records import SyncRecord
from atropos_tui.cli.manage.inspect import _diagnoses
from atropos_tui.cli.show import ps_table
from atropos_tui.diagnoses import RULES, SEVERITIES, Diagnosis, Names
from atropos_tui.diagnoses.exit_rules import EXIT_RULES
from atropos_tui.diagnoses.flow_rules import FLOW_RULES, FlowRule, explain
from atropos_tui.diagnoses.ledger import Ledger
from atropos_tui.diagnoses.log_rules import LOG_RULES
from atropos_tui.diagnoses.log_scanner import NORMAL, LogScanner, Work
from atropos_tui.diagnoses.metric_rules import ALERT, METRIC_RULES, MetricRule, alert_rules
from atropos_tui.diagnoses.metric_watch import SLOWEST, MetricWatch
from atropos_tui.diagnoses.model import (
    LONGEST_ABSENCE_S,
    NO_METRICS,
    OWN_RULES,
    WORK_S,
    Ends,
    LogRule,
    Rule,
)
from atropos_tui.diagnoses.node_rules import NODE_LOST
from atropos_tui.diagnoses.stall_rules import STALL_RULES, ApiView, RunSnapshot, StallRule
from atropos_tui.diagnoses.watcher import GONE_S, Watcher
from atropos_tui.monitor.report import _diagnosis as reported
from atropos_tui.monitor.run.run_files import PlannedComponent, RunInfo, component_rows
from atropos_tui.monitor.run.state import RunState
from atropos_tui.monitor.verdict import verdict
from atropos_tui.monitor.why import Explanation, open_diagnoses
from atropos_tui.profile.spec import AlertSpec, StackSpec
from tests.atropos_tui.diagnoses.test_flow import GROUP_SIZE, WAITS, flow
from tests.atropos_tui.diagnoses.test_log_rules import CAPTURED, LIVE_ONLY, LOGS, WORDS
from tests.atropos_tui.diagnoses.test_metric_rules import CASES, EVALS, RUN
from tests.atropos_tui.diagnoses.test_stall_rules import STILL
from tests.support.harness import part

BEGAN = 1e9
NAMES = {
    Role.API: "api",
    Role.ENV: "env",
    Role.ENGINE: "vllm",
    Role.TRAINER: "trainer",
    Role.OTHER: "other",
}


class Run:
    """A run of healthy components, its journal, and what every reader makes of it."""

    def __init__(self) -> None:
        self.state = RunState()
        self.info = RunInfo(
            components=[PlannedComponent(name, role) for role, name in NAMES.items()]
        )
        self.seq = 0
        self.written: list[dict[str, Any]] = []
        self.ledger = Ledger(self.write)
        for name in NAMES.values():
            self.move(name, State.HEALTHY, 1)

    def write(self, record: Record) -> None:
        self.seq += 1
        self.written.append(record.model_dump())
        self.state.apply(record.model_copy(update={"seq": self.seq, "time": BEGAN + self.seq}))

    def move(self, name: str, new: State, attempt: int) -> None:
        record = StateRecord(component=name, role="other", old="starting", new=new, attempt=attempt)
        self.write(record)
        self.ledger.moved(record)

    def tell(self, component: str | None, said: Sequence[Diagnosis]) -> None:
        for found in said:
            self.ledger.add(component, found, 1)

    def status(self, **end: Any) -> RunStatus:
        return RunStatus(
            run_id="r",
            name="r",
            mode="none",
            run_dir="/r",
            started_at=BEGAN,
            components=component_rows(self.info, self.state),
            **{"phase": Phase.RUNNING} | end,
        )

    def shown(self, rule: str, **end: Any) -> dict[str, bool]:
        """Where the run's readers show a diagnosis of `rule` as open."""
        status, now = self.status(**end), BEGAN + self.seq
        titles = {found.title for found in self.state.diagnoses if found.rule == rule}
        sentence = verdict(status, self.info, self.state, now)
        table = ps_table(status, sentence.line, now)
        told = "\n".join(Explanation(status, self.info, self.state, now).lines())
        ended = status.phase is Phase.ENDED
        return {
            "sentence": sentence.diagnosis is not None and sentence.diagnosis.rule == rule,
            "ps": any(title in table for title in titles),
            "why": not ended and any(f"diagnosis: {title}" in told for title in titles),
            "why --json": any(
                each.rule == rule and not each.over for each in _diagnoses(self.state, status)
            ),
            "report": any(
                reported(each, self.state, status)["open"]
                for each in self.state.diagnoses
                if each.rule == rule
            ),
            "screen": any(each.rule == rule for each in open_diagnoses(self.state, status)),
        }


def check_open(run: Run, rule: Rule, about_run: bool = False) -> None:
    shown = run.shown(rule.name)
    assert shown["why --json"] and shown["report"] and shown["screen"]
    assert shown["why"] is not about_run
    assert shown["sentence"] is shown["ps"] is (rule.severity != "advice"), "advice hides nothing"


def check_over(run: Run, rule: Rule, **end: Any) -> None:
    assert not any((shown := run.shown(rule.name, **end)).values()), shown
    if not end:
        newest = max(run.state.diagnoses, key=lambda each: each.seq)
        assert run.state.over_at(newest) is not None


def test_every_rule_has_a_severity_and_an_end() -> None:
    for rule in RULES:
        assert rule.severity in SEVERITIES and isinstance(rule.ends, Ends), rule.name
        same = [other for other in RULES if other.name == rule.name]
        assert len({(each.severity, each.event) for each in same}) == 1, (
            f"{rule.name}: readers know it by name"
        )
        assert len({each.layer for each in same}) == 1, rule.name


# Log rules.


def lines_of(rule: LogRule) -> tuple[Role, bytes]:
    """A role and what it prints in the case of `rule`."""
    for log, role, name, _ in CAPTURED + LIVE_ONLY:
        if name == rule.name:
            return role, (LOGS / f"{log}.log").read_bytes() + b"\n"
    return next((role, f"{line}\n".encode()) for role, name, line in WORDS if name == rule.name)


@pytest.mark.parametrize("rule", LOG_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("way", ["works again", "next attempt"])
def test_what_a_log_tells_is_over(rule: LogRule, way: str) -> None:
    role, text = lines_of(rule)
    run, name = Run(), NAMES[role]
    looks = LogScanner(part(name, role=role), Names())
    counted = role in (Role.TRAINER, Role.ENV)
    idle = Work(healthy=True, steps=() if counted else None)

    def look(now: float, work: Work = idle, text: bytes = b"") -> bool:
        looks.feed(text)
        run.tell(
            name,
            [found for found in looks.scan(looks.take(), now, (), work) if found.rule == rule.name],
        )
        return bool(run.shown(rule.name)["why --json"])

    look(0.0, text=text)
    began = next(now for now in (0.0, 3.0, 200.0) if look(now))
    check_open(run, rule)
    assert look(began + WORK_S - 4)
    if way == "works again" and rule.ends is Ends.WORK:
        ends = [end for pattern in rule.patterns for end in pattern.ends]
        look(began + 30, text=b"".join(b"INFO " + end + b"\n" for end in ends))
        later = began + LONGEST_ABSENCE_S
        look(
            later,
            Work(
                healthy=True,
                steps=tuple(later - 3 + at for at in range(NORMAL)) if counted else None,
            ),
        )
    else:
        run.tell(name, looks.close(250.0))
        run.move(name, State.BACKOFF, 1)
        run.move(name, State.STARTING, 2)
        assert run.shown(rule.name)["why --json"], "being down is no cure"
        run.move(name, State.HEALTHY, 2)
    check_over(run, rule)


# Rules over records.


def well(record: Record, at: int) -> Record:
    """`record` as one of a later step, when all is well."""
    moved: dict[str, Any] = {"time": 2e9 + at}
    return record.model_copy(
        update=moved | ({"step": 1000 + at} if hasattr(record, "step") else {})
    )


def good_records(rule: MetricRule) -> Iterator[Record]:
    """Enough of the clean run to end what `rule` told."""
    sync = SyncRecord(mode="broadcast", weight_version=9, seconds=0.1)
    clean = [record for record in [*RUN, *EVALS, sync] if isinstance(record, rule.kinds)]
    for at in range((rule.window + rule.good) * SLOWEST + 400):
        yield well(clean[-1 - at % min(20, len(clean))], at)


@pytest.mark.parametrize(
    ("name", "records"), [case[:2] for case in CASES], ids=[case[0] for case in CASES]
)
def test_what_numbers_tell_is_over_when_they_are_back(name: str, records: list[Record]) -> None:
    run, watch = Run(), MetricWatch(0.0)
    first = next(
        at for at, record in enumerate(records) if any(not f.over for f in feed(run, watch, record))
    )
    assert first is not None
    rules = [rule for rule in METRIC_RULES if rule.name == name]
    check_open(run, rules[0])
    for rule in rules:
        if rule.kinds == (EvalRecord,):
            best = [each for each in EVALS if each.accuracy == max(one.accuracy for one in EVALS)]
            for each in EVALS:
                feed(run, watch, well(each.model_copy(update={"accuracy": best[0].accuracy}), 300))
        else:
            for record in good_records(rule):
                feed(run, watch, record)
    check_over(run, rules[0])


def feed(run: Run, watch: MetricWatch, record: Record) -> list[Diagnosis]:
    said = watch.feed(record)
    run.tell("trainer", said)
    return said


def test_an_alert_is_over_when_the_metric_is_back_and_leaves_another_open() -> None:
    alerts = [AlertSpec(metric="loss", above=3.0), AlertSpec(metric="grad_norm", above=10.0)]
    run, watch = Run(), MetricWatch(0.0, alert_rules(alerts))
    steps = [record for record in RUN if record.kind == "step"]
    for at in range(3):
        feed(run, watch, steps[at].model_copy(update={"loss": 4.0, "grad_norm": 11.0}))
    assert len(open_diagnoses(run.state, run.status())) == 2
    for at in range(3, 30):
        feed(run, watch, steps[at].model_copy(update={"grad_norm": 11.0}))
    (left,) = open_diagnoses(run.state, run.status())
    assert left.title == "alert: grad_norm is above 10"
    for at in range(30, 60):
        feed(run, watch, steps[at])
    check_over(run, ALERT)


# Rules over the whole run.

PARTS = tuple(replace(each, name=NAMES[each.role]) for each in STILL.parts)
STANDS = replace(STILL, parts=PARTS)
TRAINS = replace(STANDS, now=STANDS.now + 10, step=8, step_at=STANDS.now + 9)
REFUSED = next(rule for rule in STALL_RULES if rule.name == "rollouts_refused")
FULL = replace(STANDS, now=BEGAN + 10, free_bytes=10**7, disk_bytes=10**11)
LEFT = tuple(
    replace(each, state=State.COMPLETED) if each.role is Role.ENV else each for each in PARTS
)
LOADING = replace(PARTS[2], state=State.STARTING, gated=True, start_timeout_s=2000.0)
STALLS = {
    "no_batches": (replace(STANDS, api=ApiView(problem="refused")), TRAINS),
    "slow_start": (replace(STANDS, now=BEGAN + 900, parts=(LOADING,)), TRAINS),
    "environment_ended": (replace(STANDS, parts=LEFT), TRAINS),
    "process_stopped": (
        replace(TRAINS, parts=tuple(replace(each, stopped_pid=7) for each in PARTS)),
        TRAINS,
    ),
    "disk_low": (FULL, replace(FULL, free_bytes=10**10)),
    "rollouts_refused": (
        replace(STANDS, refused={"env": REFUSED.diagnosis("refused 331 requests", "send top_p=1")}),
        replace(TRAINS, accepted=("env",)),
    ),
}
"""For each rule the run in its case, and the run when it is over."""
FLOWS = {
    "groups_all_flat": (flow(1, 19), flow(2, 1)),
    "groups_left_out": (flow(out=Counter({GROUP_SIZE: 9})), flow(3)),
    "groups_refused": (flow(9, out=Counter({records.REFUSED: 1})), flow(3)),
    "rollouts_malformed": (flow(9, malformed=Counter({"malformed masks": 8})), flow(9)),
    "evaluations_fail": (flow(9, evaluation_failures=Counter({"KeyError": 2})), flow(9)),
    "rollouts_fail": (flow(1, 0, 20), flow(3, 0, 2)),
    "environment_silent": (
        flow(could_ask_s=21.0, watches_engine=True),
        flow(could_ask_s=31.0, asked_s=2.0),
    ),
    "environment_bound": (flow(6, 4, **WAITS), flow(6, 4, **WAITS | {"idle": 0.1})),
}
for name, (bad, good) in FLOWS.items():
    STALLS[name] = tuple(
        replace(TRAINS, flows={"env": each}, explained=explain({"env": each}, ()))
        for each in (bad, good)
    )


@pytest.mark.parametrize("rule", [*STALL_RULES, *FLOW_RULES], ids=lambda rule: rule.name)
def test_what_is_found_in_the_run_is_over_when_it_shows_the_opposite(
    rule: StallRule | FlowRule, tmp_path: Path
) -> None:
    run = Run()
    watcher = Watcher(
        StackSpec(run_id="r", name="n", mode="none", run_dir=str(tmp_path), components=[]), {}
    )

    def look(scene: RunSnapshot, clock: float) -> None:
        found = rule.look(scene)
        for each in scene.parts:
            for name, said in watcher._update(rule, each, found.get(each.name), scene, clock):
                run.tell(name, [said])

    bad, good = STALLS[rule.name]
    look(bad, 0.0)
    look(bad, 1.0)
    check_open(run, rule)
    loading = tuple(replace(each, state=State.STARTING) for each in PARTS)
    unknown = RunSnapshot(BEGAN + 1, LEFT if rule.name == "environment_ended" else loading)
    for clock in (10.0, 100.0):
        look(unknown, clock)
    check_open(run, rule)
    look(good, 101.0)
    look(bad, 102.0)
    look(good, 103.0)
    check_open(run, rule)
    look(good, 103.0 + GONE_S)
    check_over(run, rule)
    look(bad, 130.0)
    check_open(run, rule)


# Rules about attempts, and about the run.

OTHERS = [*EXIT_RULES, *OWN_RULES, NODE_LOST]


@pytest.mark.parametrize(
    "rule", [rule for rule in OTHERS if rule.ends is Ends.ATTEMPT], ids=lambda rule: rule.name
)
@pytest.mark.parametrize("new", [State.HEALTHY, State.COMPLETED])
def test_what_ended_an_attempt_is_over_with_a_good_one(rule: Rule, new: State) -> None:
    run = Run()
    run.tell("vllm", [rule.diagnosis("its evidence", "the way out")])
    run.move("vllm", State.HEALTHY, 1)
    check_open(run, rule)
    run.move("api", State.HEALTHY, 2)
    check_open(run, rule)
    run.move("vllm", new, 2)
    check_over(run, rule)


@pytest.mark.parametrize(
    "rule", [rule for rule in OTHERS if rule.ends is Ends.RUN], ids=lambda rule: rule.name
)
def test_what_is_about_the_run_is_over_with_it(rule: Rule) -> None:
    run = Run()
    run.ledger.add(None, rule.diagnosis("its evidence", "the way out"))
    check_open(run, rule, about_run=True)
    run.ledger.end_all("the run ended well")
    check_over(run, rule)


def test_every_other_rule_is_ended_by_who_found_it() -> None:
    """The watcher says when it works again (`test_watching.py`)."""
    assert [rule.name for rule in OTHERS if rule.ends not in (Ends.ATTEMPT, Ends.RUN)] == [
        "watcher_fault"
    ]
    tested = [*LOG_RULES, *METRIC_RULES, ALERT, *STALL_RULES, *FLOW_RULES, *OTHERS]
    assert {id(rule) for rule in RULES} == {id(rule) for rule in tested}, (
        "a rule of a new kind needs a test of its end here"
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{type(rule).__name__}")
def test_a_run_that_ended_well_has_no_open_diagnosis_and_one_that_failed_keeps_its_own(
    rule: Rule,
) -> None:
    run = Run()
    run.tell("trainer", [rule.diagnosis("its evidence", "the way out")])
    check_over(run, rule, phase=Phase.ENDED, exit_code=0)
    shown = run.shown(rule.name, phase=Phase.ENDED, exit_code=3, reason="trainer: exit code 1")
    assert shown["why --json"] and shown["report"] and shown["screen"]
    run.ledger.end_all("the run ended well")
    check_over(run, rule)


def test_a_new_supervisor_ends_what_an_earlier_one_left_open() -> None:
    run = Run()
    run.tell("trainer", [RULES[0].diagnosis("e", "f"), RULES[1].diagnosis("e", "f")])
    run.ledger.add(None, NO_METRICS.diagnosis("e", "f"))
    run.tell("trainer", [RULES[1].diagnosis("e", "f").ended("it works")])
    later = Ledger(run.write)
    later.restore(
        [
            DiagnosisRecord.model_validate(each)
            for each in run.written
            if each["kind"] == "diagnosis"
        ]
    )
    assert [found.rule for found in open_diagnoses(run.state, run.status())] == [RULES[0].name]
    run.ledger = later
    run.move("trainer", State.HEALTHY, 2)
    assert open_diagnoses(run.state, run.status()) == []
