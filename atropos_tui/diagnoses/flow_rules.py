"""Rules for the output of environments. The first rule that applies explains an environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from atropos_common.protocol.records import (
    FLAT,
    GROUP_SIZE,
    NOT_FINITE,
    REFUSED,
    RETURNED_NONE,
    SURPLUS,
    TOO_LONG,
    UNANSWERED,
    UNSENDABLE,
    reason_text,
)
from atropos_tui.diagnoses.metric_rules import GROUPS_ALL_FLAT, LOOK_AT_ROLLOUTS, NEARLY_ALL
from atropos_tui.diagnoses.model import Diagnosis, Ends, Layer, Rule, shortened
from atropos_tui.diagnoses.stall_rules import Flow, Part, RunSnapshot

MANY = 8
ENV_SILENT_S = 20.0
"""Seconds without a request after which a registered environment is silent."""
HOSTED_WAITS = (
    "Move calls that block its event loop (time.sleep, requests, a large computation) to "
    "asyncio.to_thread"
)
PROGRAM_WAITS = (
    "A program of your own must send requests to the engines in ATROPOS_ENGINE_URLS; one "
    "started by script = or "
    "module = does so automatically"
)
"""Usual reasons why an environment sends no requests."""
BOTH_WAIT = 0.3
"""Smallest idle share of trainer and engine at once that makes an environment the bottleneck."""
AWAITED = 0.3
"""Smallest share of waiting for one environment that makes it the bottleneck."""
MUCH_FLAT = 0.3
"""Flat share above which the fix mentions it."""
REFUSALS = ("EngineRefused", "BadRequestError", "ClientResponseError")
"""Request errors that the rule `rollouts_refused` explains."""

LEFT_OUT_FIXES = {
    RETURNED_NONE: "return the group with its scores instead of None in collect_trajectories: flat "
    "groups are counted and replaced. If it is None for another reason, print that reason there",
    GROUP_SIZE: "make env.group_size completions for each group, or change env.group_size under "
    "[env.args]",
    TOO_LONG: "set env.max_token_length under [env.args] below [trainer] seq_len",
    NOT_FINITE: "correct its scores: NaN and infinities cannot be trained on",
    UNANSWERED: "atropos-tui why api shows the reason; atropos-tui restart api",
}
"""Reason -> fix."""

Judgement = tuple[str, str, str] | None


def all_flat(env: str, flow: Flow) -> Judgement:
    if flow.made < MANY or flow.flat < NEARLY_ALL * flow.made:
        return None
    # Flat groups do not reach the trainer, so its recorded rollouts do not show their scores.
    scores = f" (newest flat groups: {flow.examples[FLAT]})" if FLAT in flow.examples else ""
    return (
        f"the groups of {env} are flat: nothing is learnt from them",
        f"{flow.flat} of the newest {flow.made} groups have one score for all of the group{scores}",
        LOOK_AT_ROLLOUTS,
    )


def refused(env: str, flow: Flow) -> Judgement:
    reasons = [
        (reason, flow.left_out[reason]) for reason in (REFUSED, UNSENDABLE) if flow.left_out[reason]
    ]
    if not reasons:
        return None
    words = "; ".join(
        f"{count} times {reason_text(why)} ({flow.examples.get(why, '')})" for why, count in reasons
    )
    return (
        f"groups of {env} do not reach run-api",
        f"of the newest {flow.made} groups {words}",
        f"correct the named field in the program of {env}: docs/environments.md lists what "
        f"each field of a group holds",
    )


def malformed(env: str, flow: Flow) -> Judgement:
    if not flow.malformed:
        return None
    reasons = ", ".join(
        f"{count} times {reason}" for reason, count in flow.malformed.most_common(3)
    )
    return (
        f"rollouts of {env} cannot be trained on",
        f"the trainer left out {flow.malformed.total()} sequences of the newest steps: {reasons}; "
        f"{flow.malformed_example}",
        f"correct the named field in the program of {env}, or stop it: atropos-tui stop "
        f"{env}. Token ids outside of "
        "the vocabulary come from another model's tokenizer",
    )


def left_out(env: str, flow: Flow) -> Judgement:
    """Apply if nearly all newest groups were left out, or many since the last accepted one."""
    made, out = flow.made, flow.left_out
    # A streak may be older than the counting window of a slow environment.
    if _others(flow.streak).total() >= MANY:
        made, out = flow.streak.total(), flow.streak
    others = _others(out)
    if made < MANY or out.total() < NEARLY_ALL * made or not others:
        return None
    reasons = ", ".join(
        f"{count} times {reason_text(reason)}" for reason, count in out.most_common(3)
    )
    return (
        f"the groups of {env} are left out",
        f"{out.total()} of the newest {made}: {reasons}",
        LEFT_OUT_FIXES.get(others.most_common(1)[0][0], "correct its program, as the reason says"),
    )


def _others(out: Counter[str]) -> Counter[str]:
    return Counter(
        {reason: count for reason, count in out.items() if reason not in (FLAT, SURPLUS)}
    )


def evaluations_fail(env: str, flow: Flow) -> Judgement:
    if not flow.evaluation_failures:
        return None
    reason, count = flow.evaluation_failures.most_common(1)[0]
    return (
        f"the evaluations of {env} fail",
        f"{flow.evaluation_failures.total()} failed since the last successful one; {count} "
        f"times {reason}",
        f"correct evaluate() in its program; the log has the line: atropos-tui logs {env} "
        f"--grep 'an evaluation "
        "failed'",
    )


def failing(env: str, flow: Flow) -> Judgement:
    # Requests that the engine refuses are explained by the engine's own lines.
    failures = Counter(
        {why: count for why, count in flow.failures.items() if not why.startswith(REFUSALS)}
    )
    failed = failures.total()
    if failed < MANY or failed < NEARLY_ALL * (failed + flow.made):
        return None
    reason, count = failures.most_common(1)[0]
    return (
        f"the rollouts of {env} fail",
        f"{failed} failed and {flow.made} were made in {flow.counted_s:.0f} s; {count} times "
        f"{reason}",
        f"correct its program; its log has the first failure of each kind with the line: "
        f"atropos-tui logs {env} "
        "--grep 'a rollout failed'",
    )


def silent(env: str, flow: Flow) -> Judgement:
    if (
        flow.could_ask_s is None
        or flow.could_ask_s < ENV_SILENT_S
        or flow.asked_s is not None
        or flow.requests
    ):
        return None
    # Without the engine's counter, silence and uncounted traffic look alike.
    if not flow.watches_engine or flow.made or flow.failures:
        return None
    return (
        f"{env} is registered but sends nothing",
        f"{env} is registered and {flow.engine} is ready for {flow.could_ask_s:.0f} s; "
        f"{flow.engine} received no "
        "request, and run-api no group",
        f"atropos-tui logs {env} -n 50 shows what it waits for. "
        f"{HOSTED_WAITS if flow.hosted else PROGRAM_WAITS}",
    )


def bottleneck(env: str, flow: Flow) -> Judgement:
    """Apply if the trainer has no batch while the engine has no request."""
    # waiting + idle - 1 is the least share of the time in which both are without work.
    if flow.seconds is None or flow.waiting + flow.idle - 1.0 < BOTH_WAIT:
        return None
    if flow.bounds.get("awaited", 1.0) < AWAITED:
        return None  # batches wait for another environment
    came, could = "no group" if flow.counts else "an unknown number of groups", ""
    if flow.made:
        per_s = flow.made / max(flow.counted_s, 1.0)
        came = (
            f"{flow.made} groups in {flow.counted_s:.0f} s ({per_s:.2f}/s, "
            f"{flow.flat / flow.made:.0%} of them flat)"
        )
        could = (
            f"; with no idle time it could make {per_s / (1.0 - flow.idle):.2f}/s"
            if flow.idle < 1.0
            else ""
        )
    workers = "" if flow.workers is None else f" (now {flow.workers})"
    fix = (
        f"raise env.max_num_workers under [env.args] of {env}{workers} for more groups in "
        f"flight, within the limit of "
        "env.max_batches_offpolicy; move slow work outside the engine (scoring, tools) to "
        "threads: asyncio.to_thread"
    )
    if flow.flat > MUCH_FLAT * flow.made:
        fix += f". Also make fewer flat groups: {LOOK_AT_ROLLOUTS}"
    return (
        f"{env} is the bottleneck: trainer and engine wait for it",
        f"in {flow.seconds:.0f} s the trainer waited {flow.waiting:.0%} of the time and "
        f"{flow.engine} had no request "
        f"{flow.idle:.0%} of it; from {env} came {came}; {flow.engine} made "
        f"{flow.tokens_per_s:.0f} tokens/s, with {flow.running:.1f} of {flow.slots:.0f} "
        f"possible sequences at a time"
        f"{could}",
        fix,
    )


@dataclass(frozen=True)
class FlowRule(Rule):
    judge: Callable[[str, Flow], Judgement]
    opposite: Callable[[Flow], bool]
    """The flow shows the opposite; a few groups are enough for that."""
    end: str
    """Reason recorded at the end of the diagnosis."""
    each_attempt = True
    ends: Ends = field(default=Ends.LOOK, kw_only=True)
    layer: Layer = field(default=Layer.ROLLOUTS, kw_only=True)

    def refuted(self, run: RunSnapshot, part: Part) -> bool:
        flow = run.flows.get(part.name)
        return flow is not None and self.opposite(flow)

    def look(self, run: RunSnapshot) -> dict[str, Diagnosis | None]:
        return {env: found for env, found in run.explained.items() if found.rule == self.name}


def explain(flows: Mapping[str, Flow], refused: Collection[str]) -> dict[str, Diagnosis]:
    """Return the first finding for each environment that the engine does not refuse."""
    found = {}
    for env, flow in flows.items():
        judged = ((rule, rule.judge(env, flow)) for rule in FLOW_RULES if env not in refused)
        first = next(((rule, words) for rule, words in judged if words is not None), None)
        if first is not None:
            rule, (title, evidence, fix) = first
            found[env] = rule.diagnosis(shortened(evidence), fix, title)
    return found


# The lambda of each rule is `opposite`, which ends its diagnosis.
FLOW_RULES = (
    FlowRule(
        "rollouts_fail",
        "the rollouts of an environment fail",
        failing,
        lambda flow: flow.made > (1 - NEARLY_ALL) * (flow.made + flow.failures.total()),
        "its rollouts succeed again",
        severity="alarm",
    ),
    FlowRule(
        "groups_refused",
        "groups of an environment do not reach run-api",
        refused,
        lambda flow: (
            flow.sent > 0 and not any(flow.left_out[reason] for reason in (REFUSED, UNSENDABLE))
        ),
        "run-api takes its groups",
        severity="alarm",
    ),
    FlowRule(
        "rollouts_malformed",
        "rollouts of an environment cannot be trained on",
        malformed,
        lambda flow: not flow.malformed,
        "the trainer takes its rollouts",
    ),
    FlowRule(
        "groups_left_out",
        "the groups of an environment are left out",
        left_out,
        lambda flow: flow.sent > (1 - NEARLY_ALL) * flow.made,
        "its groups are sent again",
        severity="alarm",
    ),
    FlowRule(
        GROUPS_ALL_FLAT,
        "the groups of an environment are flat",
        all_flat,
        lambda flow: flow.made > 0 and flow.flat < NEARLY_ALL * flow.made,
        "its groups differ in score again",
        severity="alarm",
    ),
    FlowRule(
        "evaluations_fail",
        "the evaluations of an environment fail",
        evaluations_fail,
        lambda flow: not flow.evaluation_failures,
        "an evaluation has succeeded since",
    ),
    FlowRule(
        "environment_silent",
        "an environment is registered but sends nothing",
        silent,
        lambda flow: bool(flow.asked_s is not None or flow.requests or flow.made or flow.failures),
        "it sends requests",
    ),
    FlowRule(
        "environment_bound",
        "an environment is the bottleneck",
        bottleneck,
        lambda flow: flow.seconds is not None,
        "trainer and engine no longer wait for it at the same time",
        severity="advice",
    ),
)
"""Most certain first."""
