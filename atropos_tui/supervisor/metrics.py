"""`[metrics] port`: figures of the run for Prometheus. A scrape measures nothing; it reports the
newest records.

Access is checked by the headers Host and Origin, and by the run's key if other machines can reach
the port.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from atropos_common.net.connections import Connection, connection_of
from atropos_common.net.http import (
    accepted_keys,
    allowed_hosts,
    carries_key,
    host_refusal,
    hosts_in,
    key_refusal,
    page_refusal,
)
from atropos_common.protocol.control import Phase, RunStatus, State
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.record_tail import RecordTail
from atropos_common.protocol.records import EnvCountsRecord, EvalRecord, GaugesRecord
from atropos_common.protocol.trainer_records import (
    AlignmentRecord,
    MemoryRecord,
    StepRecord,
    SyncRecord,
    TimingRecord,
    TrainerRecord,
)
from atropos_common.system.run_dir import ENV_ALLOWED_HOSTS, RunDir
from atropos_tui.profile.spec import MetricsPolicy

R = TypeVar("R", bound=Record)
Field = tuple[str, str, str]
Rows = Sequence[tuple[Mapping[str, str], float]]
"""Label values and value of each row."""
Kind = GaugeMetricFamily | CounterMetricFamily

STEP_FIELDS: Sequence[Field] = (
    ("step", "step", "Newest optimizer step."),
    ("loss", "loss", "Loss."),
    ("reward_mean", "reward_mean", "Mean reward of the batch."),
    ("reward_std", "reward_std", "Standard deviation of the rewards of the batch."),
    ("lr", "learning_rate", "Learning rate."),
    ("grad_norm", "grad_norm", "Norm of the gradient before clipping."),
    ("ratio_mean", "ratio_mean", "Mean importance ratio."),
    ("clip_fraction", "clip_ratio", "Share of tokens whose ratio was clipped."),
    ("entropy_mean", "entropy_nats", "Mean entropy of the policy over trained tokens."),
    ("completion_tokens_mean", "completion_tokens", "Mean length of a completion."),
    ("truncated_fraction", "truncated_ratio", "Share of completions that were cut off."),
    ("policy_lag_mean", "policy_lag_mean", "Weight versions between generation and training."),
    (
        "policy_lag_max",
        "policy_lag_max",
        "The most weight versions between generation and training.",
    ),
    ("weight_version", "weight_version", "Version of the weights after the step."),
)
TIMING_FIELDS: Sequence[Field] = (
    ("step_s", "step_seconds", "The whole step."),
    ("data_wait_s", "step_data_wait_seconds", "Part of the step: waiting for rollouts."),
    ("train_s", "step_train_seconds", "Part of the step: computing."),
    ("sync_s", "step_sync_seconds", "Part of the step: publishing the weights."),
    ("checkpoint_s", "step_checkpoint_seconds", "Part of the step: saving the checkpoint."),
    ("tokens_per_s", "tokens_per_second", "Tokens trained per second."),
    ("mfu_peak", "mfu_peak_ratio", "Model FLOP utilization, of the card's dense bfloat16 peak."),
    ("mfu", "mfu_ratio", "Model FLOP utilization, of 790 TFLOP/s."),
    (
        "engine_idle_fraction",
        "step_engine_idle_ratio",
        "Share of the step in which the engines had no request.",
    ),
    (
        "engine_capacity_used",
        "step_engine_capacity_ratio",
        "Generated tokens divided by the engines' capacity.",
    ),
    (
        "accepted_tokens_per_s",
        "accepted_tokens_per_second",
        "Generated tokens per second of the step that were trained on.",
    ),
)
ALIGNMENT_FIELDS: Sequence[Field] = (
    (
        "logprob_diff_abs_mean",
        "logprob_diff_abs_mean",
        "Trainer against engine, policy lag included.",
    ),
    ("probe_diff_abs_mean", "probe_diff_abs_mean", "Trainer against engine at the same weights."),
    ("kl_k3", "kl_k3", "Estimate of KL(rollout policy || trainer)."),
)
MEMORY_FIELDS: Sequence[Field] = (
    ("peak_bytes", "trainer_gpu_peak_bytes", "Peak GPU memory of the trainer."),
)
SYNC_FIELDS: Sequence[Field] = (("seconds", "publish_seconds", "The newest publish of weights."),)
ENGINE_FIELDS: Sequence[Field] = (
    ("running", "engine_requests_running", "Requests in the current batch."),
    ("waiting", "engine_requests_waiting", "Requests that wait for a slot in it."),
    ("kv_use", "engine_kv_cache_ratio", "Share of the KV cache in use."),
)
ENGINE_TOTAL_FIELDS: Sequence[Field] = (
    ("prompt_tokens", "engine_prompt_tokens", "Tokens of prompts."),
    ("generated_tokens", "engine_generated_tokens", "Tokens generated."),
    (
        "recomputed_tokens",
        "engine_recomputed_tokens",
        "Tokens of preempted sequences, computed again.",
    ),
)
ENV_FIELDS: Sequence[Field] = (
    (
        "waiting",
        "env_trainer_waiting_ratio",
        "Share of recent time in which the trainer had no batch.",
    ),
    ("idle", "env_engine_idle_ratio", "Share of recent time in which its engine had no request."),
    ("capacity_used", "env_engine_capacity_ratio", "Share of its engine's capacity in recent use."),
    ("busy_workers", "env_workers_busy", "Groups in progress."),
    ("free_slots", "env_queue_slots_free", "Queue slots that no group in progress takes."),
)
HOST_FIELDS: Sequence[Field] = (
    ("cpu_percent", "host_cpu_percent", "CPU use of all cores."),
    (
        "memory_used",
        "host_memory_used_bytes",
        "Used memory of the machine, or of the container if it has a limit.",
    ),
    (
        "memory_total",
        "host_memory_total_bytes",
        "Memory of the machine, or the limit of the container.",
    ),
)
GPU_FIELDS: Sequence[Field] = (
    ("used_bytes", "gpu_memory_used_bytes", "Memory in use by any process."),
    ("total_bytes", "gpu_memory_total_bytes", "Memory of the GPU."),
    ("utilization_percent", "gpu_utilization_percent", "Share of time in use, in percent."),
    ("sm_percent", "gpu_sm_percent", "Busy streaming multiprocessors, in percent."),
    ("bandwidth_percent", "gpu_bandwidth_percent", "Used memory bandwidth, in percent."),
    (
        "memory_busy_percent",
        "gpu_memory_busy_percent",
        "Share of time in which memory was read or written, in percent.",
    ),
    ("power_w", "gpu_power_watts", "Power drawn."),
    ("temperature_c", "gpu_temperature_celsius", "Temperature of the GPU."),
)
COMPONENT_FIELDS: Sequence[Field] = (
    ("memory_bytes", "component_memory_bytes", "Memory of all its processes."),
    (
        "gpu_bytes",
        "component_gpu_memory_bytes",
        "GPU memory of all its processes, if the driver lists it by process.",
    ),
    (
        "cpu_percent",
        "component_cpu_percent",
        "CPU use of all its processes, in percent of one core.",
    ),
    ("attempt", "component_attempt", "Number of its newest attempt."),
)


class Newest:
    """Newest record of each kind; each `look` reads only what was appended."""

    def __init__(self, run: RunDir, gpus: int = 0) -> None:
        """`gpus`: GPUs of the stack."""
        self._run, self.gpus = run, gpus
        self._tails: dict[str, RecordTail] = {}
        self.records: dict[type[Record], Record] = {}
        self.evals: dict[tuple[str, str], EvalRecord] = {}
        """Keyed by environment and split."""
        self.envs: dict[str, EnvCountsRecord] = {}
        self.accepted_tokens = 0.0
        self.left_out_tokens: Counter[str] = Counter()
        """Counted by the trainer since its first step, by reason."""

    def look(self) -> None:
        for path in (
            self._run.telemetry_jsonl,
            self._run.gauges_jsonl,
            *self._run.root.glob("eval.*.jsonl"),
        ):
            tail = self._tails.setdefault(path.name, RecordTail(path))
            for record in tail.rest():
                self._take(record)

    def _take(self, record: Record) -> None:
        if isinstance(record, EvalRecord):
            self.evals[record.env, record.split] = record
        elif isinstance(record, EnvCountsRecord):
            self.envs[record.env] = record
        # Other ranks report the same step; rank 0 speaks for the trainer.
        elif not isinstance(record, TrainerRecord) or record.rank == 0:
            self.records[type(record)] = record
            if isinstance(record, StepRecord):
                self.left_out_tokens.update(record.left_out_tokens)
            elif isinstance(record, TimingRecord) and record.accepted_tokens_per_s is not None:
                self.accepted_tokens += record.accepted_tokens_per_s * record.step_s

    def of(self, kind: type[R]) -> R | None:
        record = self.records.get(kind)
        return record if isinstance(record, kind) else None


def metrics(status: RunStatus, newest: Newest) -> Iterator[Metric]:
    """Yield the metric families; an unknown value has no sample."""
    run = {"run_id": status.run_id, "name": status.name, "mode": status.mode}
    yield _family("run_info", "The run; always 1.", [(run, 1)])
    phases = [({"phase": phase.value}, float(phase is status.phase)) for phase in Phase]
    yield _family("run_phase", "1 for the phase that the run is in.", phases)
    yield _family(
        "run_started_timestamp_seconds", "When it was first started.", [({}, status.started_at)]
    )
    yield from _components(status)
    for kind, fields in (
        (StepRecord, STEP_FIELDS),
        (TimingRecord, TIMING_FIELDS),
        (AlignmentRecord, ALIGNMENT_FIELDS),
        (MemoryRecord, MEMORY_FIELDS),
        (SyncRecord, SYNC_FIELDS),
    ):
        yield from _gauges({"": newest.of(kind)}, "", fields)
    if (timing := newest.of(TimingRecord)) is not None and timing.step_s > 0:
        share = min(1.0, timing.data_wait_s / timing.step_s)
        yield _family(
            "step_waiting_ratio", "Share of the step spent waiting for rollouts.", [({}, share)]
        )
    yield from _tokens(newest)
    if newest.evals:
        rows = [
            ({"env": env, "split": split}, float(found.accuracy))
            for (env, split), found in newest.evals.items()
        ]
        yield _family("eval_accuracy_ratio", "Newest held-out accuracy.", rows)
    if (gauges := newest.of(GaugesRecord)) is not None:
        yield from _used(gauges)


def _tokens(newest: Newest) -> Iterator[Metric]:
    timing = newest.of(TimingRecord)
    if timing is None or timing.accepted_tokens_per_s is None:
        return
    if newest.gpus:
        yield _family(
            "accepted_tokens_per_second_per_gpu",
            "Generated tokens per second of the step and GPU of the stack that were trained on.",
            [({}, timing.accepted_tokens_per_s / newest.gpus)],
        )
    yield _family(
        "accepted_tokens",
        "Generated tokens that were trained on.",
        [({}, newest.accepted_tokens)],
        CounterMetricFamily,
    )
    tables = {"": newest.left_out_tokens} | {
        name: record.left_out_tokens for name, record in newest.envs.items()
    }
    rows = [
        ({"env": env, "reason": reason}, float(tokens))
        for env, table in tables.items()
        for reason, tokens in table.items()
    ]
    if rows:
        text = "Generated tokens that were not trained on, by environment; empty: by the trainer."
        yield _family("thrown_away_tokens", text, rows, CounterMetricFamily)


def _components(status: RunStatus) -> Iterator[Metric]:
    rows = status.components
    states = [
        (
            {"component": row.name, "role": row.role.value, "state": state.value},
            float(row.state is state),
        )
        for row in rows
        for state in State
    ]
    yield _family("component_state", "1 for the state that the component is in.", states)
    diagnosed = [({"component": row.name}, float(bool(row.diagnosis))) for row in rows]
    yield _family(
        "component_diagnosed",
        "1 while it has an open diagnosis above advice; `atropos-tui why` shows it.",
        diagnosed,
    )
    restarts = [({"component": row.name}, float(row.restarts)) for row in rows]
    yield _family("component_restarts", "Restarts after a crash.", restarts, CounterMetricFamily)
    yield from _gauges({row.name: row for row in rows}, "component", COMPONENT_FIELDS)


def _used(gauges: GaugesRecord) -> Iterator[Metric]:
    yield from _gauges(gauges.engines, "engine", ENGINE_FIELDS)
    for field, name, text in ENGINE_TOTAL_FIELDS:
        if rows := list(_rows(gauges.engines, "engine", field)):
            yield _family(name, text, rows, CounterMetricFamily)
    yield from _gauges(gauges.flows, "env", ENV_FIELDS)
    yield from _gauges({card.label: card for card in gauges.gpus}, "gpu", GPU_FIELDS)
    yield from _gauges({"": gauges.host}, "", HOST_FIELDS)
    if gauges.queue is not None:
        yield _family(
            "api_queue_groups", "Groups in run-api that wait for the trainer.", [({}, gauges.queue)]
        )
    if gauges.disk_free_bytes is not None:
        yield _family(
            "disk_free_bytes",
            "Free space of the disk that holds the run.",
            [({}, gauges.disk_free_bytes)],
        )


def _gauges(
    of: Mapping[str, BaseModel | None], label: str, fields: Iterable[Field]
) -> Iterator[Metric]:
    for field, name, text in fields:
        if rows := list(_rows(of, label, field)):
            yield _family(name, text, rows)


def _rows(
    of: Mapping[str, BaseModel | None], label: str, field: str
) -> Iterator[tuple[dict[str, str], float]]:
    for name, part in of.items():
        # An optional field without a value gets no sample: 0 would be wrong.
        value = getattr(part, field, None)
        if value is not None:
            yield {label: name} if label else {}, float(value)


def _family(name: str, text: str, rows: Rows, kind: type[Kind] = GaugeMetricFamily) -> Metric:
    family = kind(f"atropos_{name}", text, labels=list(rows[0][0]))
    for labels, value in rows:
        family.add_metric(list(labels.values()), value)
    return family


class _Ready(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def page(status: RunStatus, newest: Newest) -> bytes:
    # A registry of its own, without the library's metrics of this Python process.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Ready(metrics(status, newest)))
    return generate_latest(registry)


def metrics_app(
    run: RunDir,
    policy: MetricsPolicy,
    token: str,
    status: Callable[[], Awaitable[RunStatus]],
    gpus: int = 0,
) -> Starlette:
    """Application with `GET /metrics`, for our own host names and, from other machines, with the
    run's key."""
    keys = accepted_keys(policy.host, token)
    hosts = allowed_hosts(policy.host, hosts_in(os.environ, ENV_ALLOWED_HOSTS))
    newest, reading = Newest(run, gpus), asyncio.Lock()

    async def scrape(request: Request) -> Response:
        connection = connection_of(request.scope)
        with connection.request() if connection else nullcontext():
            return await answer(request, connection)

    async def answer(request: Request, connection: Connection | None) -> Response:
        sent = request.headers
        refusal = host_refusal(sent.get("host"), hosts) or page_refusal(sent, hosts)
        if refusal is None and keys and not carries_key(sent.get("authorization"), keys):
            refusal = key_refusal("[metrics]")
        elif refusal is None and keys and connection:
            connection.prove()
        if refusal:
            # Refuse before any work is done.
            return PlainTextResponse(f"{refusal[1]}\n", refusal[0])
        now = await status()
        # One reader at a time: `Newest` is not safe for two threads.
        async with reading:
            await asyncio.to_thread(newest.look)
            return Response(page(now, newest), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/metrics", scrape)])


def listen_tcp(policy: MetricsPolicy) -> socket.socket:
    """Raises:
    OSError: the port is in use, or the address is not of this machine.
    """
    assert policy.port is not None
    family, _, _, _, address = socket.getaddrinfo(
        policy.host, policy.port, type=socket.SOCK_STREAM
    )[0]
    server = socket.create_server(address[:2], family=family, backlog=16)
    server.setblocking(False)
    return server
