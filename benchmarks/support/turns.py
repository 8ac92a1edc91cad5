"""Run environments one after another in one stack, three steps each; collect rows for a table.

Most of the time is the engine's start, so one `atropos-tui up` has many environments. Each depends
on a gate: a component that ends when a file appears.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atropos_common.protocol.bridge import completion_digest
from atropos_common.protocol.record_base import RecordError
from atropos_common.protocol.records import (
    EnvCountsRecord,
    StageRecord,
    StateRecord,
    parse_line,
    reason_text,
)
from atropos_common.protocol.stages import ATTACHED, REGISTERED
from atropos_common.system.run_dir import RunDir
from benchmarks.support.chat_model import CONTEXT
from benchmarks.support.children import free_ports, up
from benchmarks.support.upstream_files import why
from trainer_core.rollouts.batch import segments
from trainer_core.rollouts.fields import IGNORED, environment

STEPS = 3
GROUP = 4
BATCH = 8
A_STACK = 12
"""Environments of one stack."""
RECORDING = "rollouts.jsonl"
SILENT = "no group came in time"
FEWEST_GROUPS = STEPS * BATCH // GROUP
"""Groups of three steps. With fewer, some groups of the steps came from another environment."""
READY_S, EACH_S = 300.0, 120.0
"""Timeouts in seconds: start of engine and trainer; three steps of a running environment."""
PROFILE = """
name = "upstream"
model = {model}

[api]
port = {api}

[vllm]
port = {engine}
max_model_len = {context}

[vllm.env]
OMP_NUM_THREADS = "1"
VLLM_CPU_OMP_THREADS_BIND = "nobind"

[vllm.args]
enforce-eager = true
kv-cache-memory-bytes = 134217728
block-size = 32
max-num-seqs = 128
enable-auto-tool-choice = true
tool-call-parser = "hermes"

[trainer]
device = "cpu"
dtype = "float32"
training_steps = 1000000
batch_size = {batch}
gradient_accumulation_steps = 1
lr = 1e-5
checkpoint_interval = 0
record_rollouts = "{recording}"

[trainer.env]
OMP_NUM_THREADS = "1"
"""
ENVIRONMENT = """
[[env]]
name = {name}
{keys}
restart = {{policy = "never"}}
depends_on = {{api = "healthy", {gate} = "completed"}}

[env.env]
{env}

[env.args]
{args}

[component.{gate}]
command = ["sh", "-c", "until [ -e {go} ]; do sleep 1; done"]
"""
"""Sections of one environment and its gate, which ends when the file `go` exists."""


@dataclass(eq=False)
class Turn:
    """One environment: its keys in the profile, and its row of the table."""

    name: str
    keys: dict[str, Any]
    """Keys of its `[[env]]` other than `name`, `env` and `args`."""
    args: dict[str, Any]
    env: dict[str, str]
    row: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    """Further sections of the profile, such as another component."""
    patience_s: float = EACH_S
    """Timeout for its start, and for its three steps."""

    def write(self, results: Path) -> None:
        """Write the row to `results`, and print its outcome."""
        (results / f"{self.name}.json").write_text(json.dumps(self.row, indent=1) + "\n")
        print(
            f"{self.row['outcome']:8} {self.row['path']}: "
            f"{self.row['reason'] or self.row['groups']}",
            flush=True,
        )


def new_row(path: str, shown: dict[str, Any], data: list[str], reason: str = "") -> dict[str, Any]:
    """Return the row of an environment that has not run yet."""
    return {
        "path": path,
        "outcome": "failed",
        "groups": 0,
        "steps": 0,
        "left_out": {},
        "failures": {},
        "adjusted": {},
        "set": shown,
        "data": data,
        "reason": reason,
    }


def run_stack(
    chunk: Sequence[Turn], results: Path, model: Path, *, until: float = math.inf
) -> list[Turn]:
    """Run the environments of `chunk` one after another in one `atropos-tui up`.

    Return those that did not run, because the stack ended early or `until` was over.

    Args:
        until: start no environment after this time (`time.monotonic`).
    """
    root = results / "work" / f"run-{int(time.time())}"
    gates = {
        turn.name: root.with_name(f"{root.name}.{index}.go") for index, turn in enumerate(chunk)
    }
    profile = write_profile(root.with_suffix(".toml"), gates, chunk, model)
    keys = {
        name: value
        for name, value in os.environ.items()
        if not name.endswith(("API_KEY", "_TOKEN"))
    }
    with (results / "work" / "up.log").open("w") as log:
        stack = subprocess.Popen(
            up(profile, root),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=keys | {"XDG_STATE_HOME": str(results / "work" / "state")},
        )
    run, had = RunDir(root), []
    try:
        if not _until(lambda: _reached(run, "trainer", ATTACHED), stack, READY_S):
            raise SystemExit(f"the stack does not come up: see {results}/work/up.log")
        for turn, following in zip(chunk, [*chunk[1:], None], strict=True):
            if stack.poll() is not None or time.monotonic() > until:
                break
            gates[turn.name].touch()
            take_turn(turn, run, stack, gates[following.name].touch if following else None)
            turn.write(results)
            had.append(turn)
    finally:
        stack.send_signal(signal.SIGTERM)
        stack.wait(120)
    return [turn for turn in chunk if turn not in had]


def write_profile(path: Path, gates: dict[str, Path], chunk: Sequence[Turn], model: Path) -> Path:
    """Write the stack's profile, with free ports, and return its path."""
    api, engine = free_ports(2)
    text = PROFILE.format(
        model=json.dumps(str(model)),
        api=api,
        engine=engine,
        batch=BATCH,
        context=CONTEXT,
        recording=RECORDING,
    )
    for index, turn in enumerate(chunk):
        text += ENVIRONMENT.format(
            name=json.dumps(turn.name),
            keys=_toml(turn.keys),
            gate=f"turn{index}",
            go=gates[turn.name],
            env=_toml(turn.env),
            args=_toml(turn.args),
        )
        text += turn.text
    path.write_text(text)
    return path


def take_turn(
    turn: Turn,
    run: RunDir,
    stack: subprocess.Popen[bytes],
    call_next: Callable[[], None] | None = None,
) -> None:
    """Wait for three steps, the environment's end or the timeout; then stop it and fill in its row.

    Args:
        call_next: starts the next environment, because its imports take longer than three steps.
    """
    name, before = turn.name, 0

    def done() -> bool:
        return _steps(run) - before >= STEPS and _counts(run, name).sent >= FEWEST_GROUPS

    def over() -> bool:
        return done() or _ended(run, name)

    _until(lambda: _reached(run, name, REGISTERED) or _ended(run, name), stack, turn.patience_s)
    before = _steps(run)
    if call_next:
        call_next()
    _until(over, stack, turn.patience_s)
    steps, counts = _steps(run) - before, _counts(run, name)
    log, started = _log(run, name), _reached(run, name, REGISTERED)
    if stack.poll() is None:
        command = [sys.executable, "-m", "atropos_tui", "stop", name, "--run-dir", str(run.root)]
        subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False
        )
    trained = steps >= STEPS and counts.sent >= FEWEST_GROUPS
    bad = counts.failures or counts.left_out
    reason = ""
    if not trained:
        reason = why(log) if not started or _ended(run, name) else _silence(log)
        reason = (
            f"every group: {reason_text(max(bad, key=lambda each: bad[each]))}"
            if started and bad
            else reason
        )
    turn.row |= {
        "outcome": "trained" if trained else "started" if started else "failed",
        "reason": reason,
        "steps": min(steps, STEPS) if counts.sent else 0,
        "groups": counts.sent,
        "left_out": dict(counts.left_out),
        "failures": dict(counts.failures),
        "adjusted": dict(counts.adjusted),
    }
    turn.row |= _alignment(run, before) | _recorded_ids(run, name)


def _alignment(run: RunDir, before: int) -> dict[str, Any]:
    """Return the share of tokens whose logprob came from the engine with the rollout, and the worst
    |trainer - engine| in nats, over the steps after `before`."""
    records = list(_records(run.telemetry_jsonl))
    steps = [each for each in records if each.kind == "step"][before:]
    came: Counter[str] = Counter()
    for each in steps:
        came.update(each.logprobs_from or {})
    first = steps[0].step if steps else None
    worst = [
        each.logprob_diff_abs_mean
        for each in records
        if each.kind == "alignment" and first is not None and each.step >= first
    ]
    measured = [each for each in worst if each is not None]
    return {
        "from_engine": came["environment"] / came.total() if came.total() else None,
        "alignment": max(measured, default=None),
        "verdicts": sorted(
            {each.verdict for each in records if each.kind == "alignment" and first is not None}
        ),
    }


def _recorded_ids(run: RunDir, name: str) -> dict[str, Any]:
    """Return how many completions of an environment the trainer took, and how many of them have
    the ids and logprobs that the engine sampled.

    The recording has the engine's answer for each digest of ids and logprobs that it knows.
    """
    taken = same = 0
    for line in _lines(run.root / RECORDING):
        for group in line["batch"]:
            # An environment may send no logprobs: the trainer computes them.
            if environment(group) != name or not group.get("inference_logprobs"):
                continue
            for ids, mask, logprobs in zip(
                group["tokens"], group["masks"], group["inference_logprobs"], strict=True
            ):
                trained = np.array([label != IGNORED for label in mask])
                for start, end in segments(trained):
                    digest = completion_digest(ids[start:end], logprobs[start:end])
                    taken += 1
                    same += digest in line.get("versions", {})
    return {"completions": taken, "same_ids": same}


def _silence(log: str) -> str:
    """Return why a running environment sends no group: a missing API key, or its last error."""
    key = re.search(r"\b[A-Z][A-Z_]*API_KEY\b", log)
    errors = re.findall(r"^\S+ \S+ ERROR [\w.]+: (.*)$", log, re.MULTILINE)
    said = "; ".join([*([f"wants {key[0]}"] if key else []), *errors[-1:]])
    return f"{SILENT}: {said}"[:200] if said else f"{SILENT}; it leaves out flat groups"


def _until(condition: Callable[[], bool], stack: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for the condition; return False if the stack ends first, or after the timeout."""
    end = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < end and stack.poll() is None:
        time.sleep(0.5)
    return held


def _log(run: RunDir, name: str) -> str:
    return "".join(
        path.read_text(errors="replace") for path in sorted((run.logs / name).glob("*.log"))
    )


def _reached(run: RunDir, name: str, stage: str) -> bool:
    """Return True if a component has recorded that stage."""
    return any(
        each.stage == stage
        for each in _records(run.stages_jsonl(name))
        if isinstance(each, StageRecord)
    )


def _steps(run: RunDir) -> int:
    return sum(each.kind == "step" for each in _records(run.telemetry_jsonl))


def _counts(run: RunDir, name: str) -> EnvCountsRecord:
    """Return the environment's newest counts."""
    told = [each for each in _records(run.eval_jsonl(name)) if isinstance(each, EnvCountsRecord)]
    return told[-1] if told else EnvCountsRecord(env=name, sent=0)


def _ended(run: RunDir, name: str) -> bool:
    """Return True if the component is not running any more."""
    states = [
        each
        for each in _records(run.supervisor_jsonl)
        if isinstance(each, StateRecord) and each.component == name
    ]
    return bool(states) and states[-1].new in (
        "failed",
        "exited",
        "completed",
        "stopped",
        "backoff",
    )


def _toml(table: dict[str, Any]) -> str:
    return "\n".join(f"{name} = {json.dumps(value)}" for name, value in table.items())


def _lines(path: Path) -> list[Any]:
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _records(path: Path) -> Iterator[Any]:
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        try:
            yield parse_line(line)
        except RecordError:
            continue


@contextmanager
def machine_lock() -> Iterator[None]:
    """Let only one of the programs with the same lock file (ATROPOS_BENCH_LOCK) run a stack."""
    path = os.environ.get("ATROPOS_BENCH_LOCK")
    if path is None:
        yield
        return
    with Path(path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def notes_of(row: dict[str, Any]) -> str:
    parts = [f"`{name} = {json.dumps(value)}`" for name, value in row["set"].items()]
    parts += [f"data: {name}" for name in row["data"]]
    parts += [f"{name} left out of {count} requests" for name, count in row["adjusted"].items()]
    parts += [
        f"{count} groups left out ({reason_text(reason)})"
        for reason, count in row["left_out"].items()
    ]
    parts += [f"{count} failed ({reason})" for reason, count in row["failures"].items()]
    return cell("; ".join(parts))


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
