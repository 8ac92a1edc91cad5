"""Make a run directory as the real programs leave it, with plausible figures from a seeded
generator.

python -m tests.support.run_maker DIR [STEPS]
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

from atropos_common.protocol.control import ComponentStatus, Phase, Role, RunStatus, State
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import (
    EngineGauges,
    EvalRecord,
    GaugesRecord,
    HostUse,
    StateRecord,
)
from atropos_common.protocol.trainer_records import (
    AlignmentRecord,
    MemoryRecord,
    RolloutRecord,
    StepRecord,
    SyncRecord,
    TimingRecord,
)
from atropos_common.system.run_dir import RunDir

T0 = 1_790_000_000.0
RUN_ID = "demo-test"
PARTS = [
    ("prepare", Role.PREPARE),
    ("run-api", Role.API),
    ("vllm", Role.ENGINE),
    ("env", Role.ENV),
    ("trainer", Role.TRAINER),
]


def write_records(path: Path, records: list[Record], start: int = 0) -> None:
    """Append `records` with run, and sequence numbers from `start`."""
    with path.open("a") as file:
        for seq, record in enumerate(records, start):
            file.write(record.model_copy(update={"run_id": RUN_ID, "seq": seq}).to_line())


def step_records(
    step: int, rng: random.Random, *, attempt: int = 1, time: float | None = None
) -> list[Record]:
    """Records that a trainer writes for one step."""
    reward = 0.95 - 0.45 * math.exp(-step / 14) + rng.gauss(0, 0.02)
    wait, train, sync = (
        0.12 + rng.random() * 0.05,
        0.14 + rng.random() * 0.02,
        0.028 + rng.random() * 0.004,
    )
    common: dict[str, Any] = {
        "step": step,
        "attempt": attempt,
        "time": time if time is not None else T0 + 31 + 0.33 * step,
    }
    lag = 1.0 if rng.random() < 0.8 else 0.5
    return [
        StepRecord(
            **common,
            loss=rng.gauss(0, 0.02),
            reward_mean=reward,
            reward_std=0.3,
            lr=2e-4,
            grad_norm=abs(rng.gauss(0.4, 0.1)),
            ratio_mean=1 + rng.gauss(0, 0.003),
            clip_fraction=0.01,
            tokens=384,
            sequences=128,
            policy_lag_mean=lag,
            policy_lag_max=1,
            weight_version=step,
            ratio_max=1.4,
            entropy_mean=2.0 * math.exp(-step / 40),
            completion_tokens_mean=3.0 + step / 40,
            truncated_fraction=0.25,
            groups=16,
            flat_groups=min(step // 4, 12),
        ),
        AlignmentRecord(
            **common,
            logprob_diff_mean=rng.gauss(0, 0.002),
            logprob_diff_abs_mean=0.012 * math.exp(rng.gauss(0, 0.25)),
            logprob_diff_abs_max=0.4,
            kl_k3=2e-4,
            train_mean=-0.31,
            inference_mean=-0.31,
            tokens=384,
            probe_diff_abs_mean=4e-7 * math.exp(rng.gauss(0, 0.15)),
            probe_diff_abs_max=9e-6,
            probe_tokens=32,
            verdict="ok",
        ),
        TimingRecord(
            **common,
            step_s=wait + train + sync + 0.004,
            data_wait_s=wait,
            train_s=train,
            sync_s=sync,
            checkpoint_s=0.0,
            tokens_per_s=384 / (wait + train + sync),
        ),
        MemoryRecord(**common, rss_bytes=431_000_000 + 40_000 * step),
        SyncRecord(
            **common,
            mode="shared_vllm",
            weight_version=step,
            seconds=sync,
            phases={"pause": 0.02, "write": 0.003},
        ),
        *(_rollout(rng, common) for _ in range(4)),
    ]


def _rollout(rng: random.Random, common: dict[str, Any]) -> Record:
    a, b = rng.randrange(20), rng.randrange(20)
    right = rng.random() < 0.85
    answer = a + b if right else a + b - 10
    return RolloutRecord(
        **common,
        env="arithmetic",
        prompt=f"{a}+{b}=",
        completion=f"{answer}",
        reward=float(right),
        advantage=0.41 if right else -2.31,
        policy_lag=1.0,
    )  # type: ignore[arg-type]


def start_records() -> list[Record]:
    """The supervisor's transitions of an ordinary start."""

    def moved(name: str, role: Role, old: State, new: State, at: float, reason: str) -> Record:
        return StateRecord(
            time=T0 + at,
            component=name,
            role=role,
            node="local",
            old=old,
            new=new,
            attempt=1,
            reason=reason,
        )

    records = []
    for at, (name, role) in enumerate(PARTS):
        ready = (0.4, 1.2, 24.0, 6.0, 29.0)[at]
        last = State.COMPLETED if role is Role.PREPARE else State.HEALTHY
        records.append(moved(name, role, State.PENDING, State.STARTING, 0.1 * at, "started"))
        records.append(moved(name, role, State.STARTING, last, ready, "probe passed"))
    return records


def make_run(root: Path, steps: int = 37, training_steps: int = 60, seed: int = 0) -> RunDir:
    """Write a run that has done `steps` steps."""
    run = RunDir(root)
    run.create()
    rng = random.Random(seed)
    components = [
        {
            "name": name,
            "role": role,
            "command": ["python"],
            "port": {"run-api": 8000, "vllm": 9001}.get(name),
        }
        for name, role in PARTS
    ]
    components[-1]["command"] = [
        "python",
        "-m",
        "trainer_core",
        "--training-steps",
        str(training_steps),
    ]
    run.plan_json.write_text(
        json.dumps(
            {"run_id": RUN_ID, "name": "demo", "mode": "shared_vllm", "components": components}
        )
    )
    run.profile_toml.write_text('name = "demo"\nmode = "shared_vllm"\nmodel = "arithmetic-0.8M"\n')
    run.run_json.write_text(json.dumps({"run_id": RUN_ID, "started_at": T0}))
    write_records(run.supervisor_jsonl, start_records())
    records = [record for step in range(1, steps + 1) for record in step_records(step, rng)]
    write_records(run.telemetry_jsonl, records)
    evals = [
        EvalRecord(
            time=T0 + 31 + 0.33 * at,
            env="arithmetic",
            accuracy=0.2 + 0.5 * (1 - math.exp(-at / 20)),
            correct=10,
            questions=25,
            weight_version=at,
        )
        for at in range(0, steps + 1, 10)
    ]
    write_records(run.eval_jsonl("arithmetic"), list(evals))
    write_records(run.gauges_jsonl, [gauges()])
    for name, _ in PARTS:
        path = run.log(name, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(_log_lines(name, steps)))
    return run


def _log_lines(name: str, steps: int) -> list[str]:
    if name == "trainer":
        return [
            f"step {step:>3}  reward {0.5 + step / 100:.3f}  loss {0.01:+.4f}  |diff| "
            f"1.2e-02  probe 4.1e-07\n"
            for step in range(1, steps + 1)
        ]
    return [f"INFO:     {name} line {at}\n" for at in range(200)]


def gauges(at: float = T0 + 40, **changes: Any) -> GaugesRecord:
    """The supervisor's record of a machine."""
    engine = EngineGauges(
        running=12,
        waiting=3,
        kv_use=0.41,
        prefix_queries=1000,
        prefix_hits=880,
        prompt_tokens=50_000,
        generated_tokens=120_000,
    )
    host = HostUse(
        cpu_percent=37.5, cores=16.0, memory_used=9_300_000_000, memory_total=64_000_000_000
    )
    return GaugesRecord(
        **{"time": at, "engines": {"vllm": engine}, "queue": 3, "host": host} | changes
    )


def live_status(run: RunDir, now: float, **changes: State) -> RunStatus:
    """A healthy stack at `now`; `changes` maps component names (dashes as underscores) to other
    states."""
    rows = []
    for at, (name, role) in enumerate(PARTS):
        state = State.COMPLETED if role is Role.PREPARE else State.HEALTHY
        state = changes.get(name.replace("-", "_"), state)
        alive = state in (State.STARTING, State.HEALTHY, State.UNHEALTHY, State.STOPPING)
        rows.append(
            ComponentStatus(
                name=name,
                role=role,
                state=state,
                attempt=1,
                pid=40_000 + 7 * at if alive else None,
                port={"run-api": 8000, "vllm": 9001}.get(name),
                started_at=T0 + 0.1 * at,
                since=T0 + 2 * at,
                healthy=True if state is State.HEALTHY else None,
                probe_latency_s=0.003 if state is State.HEALTHY else None,
                cpu_percent=(0, 1.2, 61.0, 9.0, 73.0)[at] if alive else None,
                memory_bytes=(0, 88, 1480, 331, 431)[at] * 10**6 if alive else None,
                reason="probe passed" if alive else "done",
            )
        )
    return RunStatus(
        run_id=RUN_ID,
        name="demo",
        mode="shared_vllm",
        run_dir=str(run.root),
        phase=Phase.RUNNING,
        started_at=T0,
        seq=9,
        components=rows,
    )


if __name__ == "__main__":
    print(make_run(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 37).root)
