"""The component that limits a run, and the setting that moves the limit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from atropos_common.protocol.control import ComponentStatus, Role, RunStatus
from atropos_common.protocol.records import DiagnosisRecord, EnvFlow
from atropos_tui.diagnoses.flow_rules import BOTH_WAIT, MUCH_FLAT
from atropos_tui.monitor.bench import pace
from atropos_tui.monitor.format import number
from atropos_tui.monitor.run.run_files import RunInfo, flag
from atropos_tui.monitor.run.state import RunState
from atropos_tui.monitor.why import open_diagnoses

# Share of the time without a batch above which the trainer is not the limit.
WAITS = 0.5
HARDLY_WAITS = 0.25
# Share of the time without a request above which the engine could do more.
IDLES = 0.3
# Share of the engine's slots below which few sequences are in flight.
FEW_IN_FLIGHT = 0.1
# Share of its capacity (if unknown: of its slots) below which an engine could generate more.
HAS_ROOM = 0.6
# Share of the KV cache above which it, and no longer the number of slots, bounds an engine.
CACHE_FULL = 0.9
# Share of an environment's sequences outside the engine above which its own work dominates.
MOSTLY_OUTSIDE = 0.5
# Share of an environment's workers above which their number is the bound.
ALL_BUSY = 0.9
# Older rates are not used.
FRESH_S = 20.0
# Newest steps whose rates are used if the supervisor recorded none.
STEPS = 5

OWN_GPUS = "more [vllm] gpus with tensor_parallel, or mode broadcast with GPUs"
FURTHER_ENGINE = "a further GPU in [vllm] gpus"
"""Fix in the modes in which the trainer feeds several engines."""
# Fixes of the other modes.
MORE_ENGINE = {
    "shared_vllm": f"{FURTHER_ENGINE}, with [trainer] gpus = the first of them",
    "lora_restart": "mode lora_only with more engines",
}
# Modes in which several engines can use the same GPUs, and the share of the newest seconds in which
# a GPU computes below which the Python of its one engine is the limit.
PER_GPU_MODES = ("shared_vllm", "none")
HARDLY_BUSY, BUSY_S = 0.5, 60.0
# Most engines that the advice names for a GPU: each takes a CPU core and a set of weights.
MOST_PER_GPU = 4
# Tokens computed again for each new token above which `in_flight = "reuse"` is the advice, over so
# many seconds.
MUCH_AGAIN, AGAIN_S = 1.0, 180.0
# Modes in which a weight update pauses completions, and may make the engine compute them again.
PAUSING_MODES = ("shared_vllm", "broadcast", "none")
# Modes in which trainer and engine use the same GPUs.
SHARED_MODES = ("shared_vllm",)


@dataclass(frozen=True)
class Limit:
    """The limit of a run, and the change that moves it, if any."""

    what: str
    do: str = ""


@dataclass(frozen=True)
class Rates:
    """Shares of the newest seconds in which one component waited for another."""

    waiting: float
    """The trainer without a batch."""
    idle: float
    """The engine without a request."""
    capacity: float | None = None
    """Used share of the engine's capacity, if known."""
    env: str = ""
    flow: EnvFlow | None = None
    """Environment that the others wait for."""
    again: float = 0.0
    """Tokens that its engines compute again after weight updates, for each new one; 0 if that
    cannot be changed."""

    @property
    def engine_has_room(self) -> bool:
        """True if the engine could clearly generate more while it has requests."""
        if self.capacity is not None:
            return self.capacity < HAS_ROOM * (1.0 - self.idle)
        flow = self.flow
        return bool(flow and flow.slots and (flow.running or 0.0) < FEW_IN_FLIGHT * flow.slots)

    @property
    def has_engine_queue(self) -> bool:
        """True if at least as many requests wait in the engine as it has slots."""
        flow = self.flow
        return bool(flow and flow.slots and (flow.queued or 0.0) >= flow.slots)

    @property
    def engine_words(self) -> str:
        if self.capacity is None:
            return f"the engine idles {self.idle:.0%}"
        return f"engine capacity used {self.capacity:.0%}"


@dataclass(frozen=True)
class Run:
    """One moment of a run."""

    status: RunStatus
    info: RunInfo
    state: RunState
    now: float

    @property
    def standing(self) -> list[DiagnosisRecord]:
        """Open diagnoses except advice, gravest first."""
        found = open_diagnoses(self.state, self.status)
        return [each for each in found if each.severity != "advice"]

    def of(self, role: Role) -> list[ComponentStatus]:
        return [row for row in self.status.components if row.role is role]

    def option(self, role: Role, name: str) -> str:
        """Return a flag of the first component of `role` that sets it."""
        commands = (list(item.command) for item in self.info.components if item.role is role)
        return next(filter(None, (flag(words, name) for words in commands)), "")

    @property
    def has_gpus(self) -> bool:
        return any(item.gpus for item in self.info.components)

    @property
    def shares_gpus(self) -> bool:
        return self.has_gpus and self.status.mode in SHARED_MODES

    def offpolicy(self, flow: EnvFlow | None) -> str:
        """Value of env.max_batches_offpolicy."""
        if flow and flow.batches_ahead:
            return str(flow.batches_ahead)
        return self.option(Role.ENV, "--env.max_batches_offpolicy") or "1"


def rates(state: RunState, now: float) -> Rates | None:
    """Return the supervisor's rates, else those of the newest steps, if known."""
    last = state.gauges.last
    if last and now - last.time <= FRESH_S:
        known = {
            env: flow
            for env, flow in last.flows.items()
            if flow.waiting is not None and flow.idle is not None
        }
        if known:
            env, flow = max(known.items(), key=lambda item: _rank(item[1]))
            return Rates(flow.waiting or 0.0, flow.idle or 0.0, flow.capacity_used, env, flow)
    speed = pace(state, None, window=STEPS)
    if speed.waiting is None or speed.engine_idle is None:
        return None
    return Rates(speed.waiting, speed.engine_idle, speed.engine_capacity)


def _rank(flow: EnvFlow) -> tuple[float, float, float]:
    # The largest is the environment that the others wait for.
    return flow.awaited or 0.0, flow.idle or 0.0, flow.busy_workers or 0.0


def limit(run: Run) -> Limit | None:
    """Return the limit of a training run; None if trainer and engine both have work."""
    found = rates(run.state, run.now)
    if found is None:
        return None
    found = replace(found, again=_again(run, found.flow))
    # waiting + idle - 1 is the least share of the time in which trainer and engine both wait.
    if found.waiting + found.idle - 1.0 >= BOTH_WAIT:
        return _by_supply(run, found)
    if (found.has_engine_queue or _computes_again(found)) and found.waiting >= HARDLY_WAITS:
        return _by_engine(run, found)
    if found.waiting >= WAITS and found.engine_has_room:
        return _by_supply(run, found)
    if found.idle < IDLES:
        return _by_engine(run, found) if found.waiting >= WAITS else None
    return _by_training(run, found) if found.waiting < HARDLY_WAITS else _by_turns(run, found)


def _again(run: Run, flow: EnvFlow | None) -> float:
    """Return `Rates.again`."""
    reuses = run.option(Role.TRAINER, "--in-flight") == "reuse"
    if flow is None or reuses or run.status.mode not in PAUSING_MODES:
        return 0.0
    return run.state.gauges.recomputed(_engines([flow.engine]), AGAIN_S) or 0.0


def _computes_again(found: Rates) -> bool:
    """Return True if a busy engine computes more tokens again than it generates."""
    outside = _outside(found.flow) or 0.0
    return found.again >= MUCH_AGAIN and found.idle < IDLES and outside < MOSTLY_OUTSIDE


# Limit: the environment sends too few requests.

Bound = Literal["slots", "workers", "target", "unknown"]


def bound(flow: EnvFlow | None) -> Bound:
    """Return the bound on an environment's groups in flight."""
    if flow and flow.concurrency:
        # The environment follows its engine, and knows its bound.
        return "slots" if flow.concurrency == "queue slots" else "target"
    if flow is None or flow.busy_workers is None or not flow.max_workers:
        return "unknown"
    if flow.busy_workers >= ALL_BUSY * flow.max_workers:
        return "workers"
    return "slots" if flow.free_slots is not None and flow.free_slots < 1.0 else "unknown"


def _outside(flow: EnvFlow | None) -> float | None:
    # Share of an environment's sequences outside the engine: in scoring or tools.
    if flow is None or flow.busy_workers is None or not flow.group_size or flow.in_engine is None:
        return None
    # A worker makes one group at a time; those that wait for a queue slot have finished theirs.
    sequences = (flow.busy_workers - (flow.waiting_for_slot or 0.0)) * flow.group_size
    return 1.0 - min(1.0, flow.in_engine / sequences) if sequences > 0 else None


def _by_supply(run: Run, found: Rates) -> Limit:
    flow, binding, outside = found.flow, bound(found.flow), _outside(found.flow)
    own_work = outside is not None and outside >= MOSTLY_OUTSIDE
    waits = f"the trainer waits {found.waiting:.0%} of the time, {found.engine_words}"
    if flow and flow.made and flow.counted_s:
        per_s = flow.made / flow.counted_s
        # Without idle time the engine would make this many; outside these bounds the figure is
        # noise.
        is_known = 0.05 <= found.idle < 0.99
        could = f" of {per_s / (1.0 - found.idle):.2g} possible" if is_known else ""
        waits = f"{per_s:.2g}{could} groups/s; {waits}"
    if binding == "slots" and not own_work:
        what, do = _by_slots(run, found)
    else:
        what = f"limited by the environment {found.env}".rstrip()
        do = _more_work(run, flow, binding, own_work=own_work)
    if own_work:
        waits += f"; {outside:.0%} of its sequences are outside the engine (scoring, tools)"
    if flow and flow.made and flow.flat > MUCH_FLAT * flow.made:
        do += f"; {flow.flat / flow.made:.0%} of its groups are flat and teach nothing"
    return Limit(f"{what}: {waits}", do)


def _by_slots(run: Run, found: Rates) -> tuple[str, str]:
    flow = found.flow
    assert flow is not None
    room = f", {flow.queue_slots} groups" if flow.queue_slots else ""
    workers = f" (on average {flow.busy_workers:.0f} of {flow.max_workers} workers are busy)"
    return (
        f"limited by the queue slots of {found.env}{room}{workers}",
        f"raise env.max_batches_offpolicy above {run.offpolicy(flow)} (policy lag grows with it); "
        "more env.max_num_workers change nothing",
    )


def _more_work(run: Run, flow: EnvFlow | None, binding: Bound, *, own_work: bool) -> str:
    now = flow.max_workers if flow and flow.max_workers else flow.workers if flow else None
    workers = "raise env.max_num_workers" + (f" (now {now})" if now else "")
    slots = flow.queue_slots if flow else None
    # More workers alone would wait for a queue slot.
    if binding == "workers" and slots and flow and flow.max_workers and slots <= flow.max_workers:
        workers += f" together with env.max_batches_offpolicy (now {run.offpolicy(flow)})"
    elif binding == "slots":
        workers = f"raise env.max_batches_offpolicy above {run.offpolicy(flow)}"
    elif binding == "target" and flow:
        workers = _more_sequences(flow)
    faster = "make its scoring faster"
    return f"{faster}, or {workers}" if own_work else f"{workers}, or {faster}"


def _more_sequences(flow: EnvFlow) -> str:
    if flow.concurrency == "rising":
        return "wait: the sequences in flight still rise to what the engine needs"
    return f"set [env] concurrency above {flow.target_sequences or 0.0:.0f} sequences"


# Limit: the engine, the trainer, or both in turns.


def _by_engine(run: Run, found: Rates) -> Limit:
    names = [found.flow.engine] if found.flow else [row.name for row in run.of(Role.ENGINE)]
    full, do = "", ["shorter env.max_token_length"]
    if run.has_gpus:
        do.append(MORE_ENGINE.get(run.status.mode, FURTHER_ENGINE))
        engines = (part for part in run.info.components if part.role is Role.ENGINE)
        if any("--enforce-eager" in engine.command for engine in engines):
            do.append("no enforce-eager")
        do = _more_per_gpu(run, names) + do
    if found.again >= MUCH_AGAIN:
        why = f"keys and values of {found.again:.1f} tokens are computed again for each new one"
        do.insert(0, f'[trainer] in_flight = "reuse" ({why})')
    if found.flow and found.flow.slots:
        running, slots = found.flow.running or 0.0, found.flow.slots
        full = f" with {running:.0f} of {slots:.0f} possible sequences"
        if found.has_engine_queue:
            full = f" with at most {slots:.0f} at a time, {found.flow.queued or 0.0:.0f} more wait"
            asked = _engines(names)
            if not any(_has_full_cache(run, engine) for engine in asked):
                each = slots / len(asked)
                do.insert(0, f"raise max-num-seqs of [vllm.args] (now {each:.0f})")
        elif (
            running < HAS_ROOM * slots
            and found.again < MUCH_AGAIN
            and bound(found.flow) not in ("workers", "target")
        ):
            above = run.offpolicy(found.flow)
            lag = f"env.max_batches_offpolicy above {above} (policy lag grows with it)"
            do.insert(0, f"more at a time: {lag}")
    used = f"busy {1.0 - found.idle:.0%} of the time"
    if found.capacity is not None:
        used = f"{found.capacity:.0%} used"
    waits = f"while the trainer waits {found.waiting:.0%}"
    return Limit(
        f"limited by the engine {', '.join(names)}: {used}{full}, {waits}",
        f"{', '.join(do[:-1])}, or {do[-1]}" if len(do) > 1 else do[0],
    )


def _more_per_gpu(run: Run, names: list[str]) -> list[str]:
    asked = _engines(names)
    engines = [part for part in run.info.components if part.name in asked]
    gpus = engines[0].gpus if engines else ()
    # In single copy the trainer's GPU has all of the model, and every engine.
    one_gpu = len(gpus) == 1 and all(part.gpus == gpus for part in engines)
    spread = any(part.node for part in run.info.components)
    if run.status.mode not in PER_GPU_MODES or spread or (run.shares_gpus and not one_gpu):
        return []
    busy = run.state.gauges.busy({gpu for part in engines for gpu in part.gpus}, BUSY_S)
    if busy is None or busy >= HARDLY_BUSY:
        return []
    more = 1 + sum(part.gpus == gpus for part in engines)
    if more > MOST_PER_GPU:
        return []
    why = f"its GPU computes {busy:.0%} of the time, so one core of its Python is the limit"
    return [f"vllm.per_gpu = {more} ({why})"]


def _engines(names: list[str]) -> set[str]:
    """Return the engines of names that may stand for several: "vllm-0 and vllm-1"."""
    return {engine for name in names for engine in name.split(" and ")}


def _has_full_cache(run: Run, engine: str) -> bool:
    last = run.state.gauges.last
    seen = last.engines.get(engine) if last else None
    return seen is not None and (seen.kv_use or 0.0) >= CACHE_FULL


def _by_training(run: Run, found: Rates) -> Limit:
    speed = pace(run.state, None, window=STEPS)
    part = max(_SLOW, key=lambda name: speed.parts.get(name) or 0.0)
    share = (speed.parts.get(part) or 0.0) / speed.step_s if speed.step_s else 0.0
    lag = run.state.metric("policy_lag_max").last
    most = run.option(Role.ENV, "--env.max_batches_offpolicy")
    full = f", lag {number(lag, 0)} of {most}" if most and lag is not None else ""
    is_shared = run.shares_gpus and part == "train"
    engine = found.engine_words + (", which shares its GPUs with the trainer" if is_shared else "")
    what = f"limited by {_SLOW[part]}: {part} is {share:.0%} of a step{full}; {engine}"
    return Limit(what, _faster_step(run, part))


def _faster_step(run: Run, part: str) -> str:
    mode = run.status.mode
    if part == "sync":
        other = "broadcast or shared_vllm publish faster; or raise [trainer] vllm_restart_interval"
        return _SYNC.get(mode, other)
    if part == "checkpoint":
        return "raise [trainer] checkpoint_interval"
    do = []
    if run.has_gpus:
        do.append(f"{OWN_GPUS} for the trainer" if run.shares_gpus else "more [trainer] gpus")
    if (run.option(Role.TRAINER, "--epochs") or "1") != "1":
        do.append("fewer [trainer] epochs")
    return ", or ".join(do)


def _by_turns(run: Run, found: Rates) -> Limit:
    shares = f"the trainer waits {found.waiting:.0%}, the engine idles {found.idle:.0%}"
    above = run.offpolicy(found.flow)
    do = f"raise env.max_batches_offpolicy above {above} to overlap them"
    return Limit(f"trainer and engine take turns: {shares}", f"{do} (policy lag rises with it)")


_SLOW = {"train": "training", "sync": "publishing weights", "checkpoint": "checkpoints"}
_KEEP = '[trainer] in_flight = "keep" does not wait for completions'
# Fixes for a slow publish, by mode.
_SYNC = {
    "shared_vllm": _KEEP,
    "broadcast": f"{_KEEP}; adapters (lora_only) are smaller",
    "lora_only": "a smaller [trainer] lora_r",
}
