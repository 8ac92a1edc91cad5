"""Gauges of a run: `RUN/gauges.jsonl`, a line every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atropos_common.protocol.bridge import METRIC_RECOMPUTED, METRIC_VERSION
from atropos_common.protocol.control import ComponentStatus, Role, RunStatus
from atropos_common.protocol.records import (
    ComponentUse,
    EngineGauges,
    EnvFlow,
    GaugesRecord,
    HostUse,
)
from atropos_common.system.files import cut_torn_line, write_private
from atropos_tui.diagnoses.flow import read_figures
from atropos_tui.diagnoses.questions import asking, fetch_page
from atropos_tui.diagnoses.stall_rules import RUNS, Flow
from atropos_tui.supervisor.processes import procfs

GAUGES_EVERY_S = 5.0
MOST_BYTES = 2_000_000
"""File size above which every second old line is dropped."""
DENSE = 720
"""Newest lines that are always kept: one hour."""
SCRAPE_TIMEOUT_S = 1.0
MOST_ANSWER_BYTES = 4_000_000
"""Largest metrics page, in bytes."""
_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_use",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
    METRIC_RECOMPUTED: "recomputed_tokens",
    METRIC_VERSION: "weight_version",
}
"""vLLM's metric -> ours. Engines with data parallelism have several lines; they are added."""


def parse_metrics(text: str) -> EngineGauges:
    found = {_GAUGES[name]: values for name, values in read_figures(text, _GAUGES).items()}
    # A share is averaged over engines; counts are added.
    means = {"kv_use": sum(found["kv_use"]) / len(found["kv_use"])} if "kv_use" in found else {}
    return EngineGauges(**{name: sum(values) for name, values in found.items()} | means)


def parse_queue(text: str) -> int | None:
    try:
        size = json.loads(text)["queue_size"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    # In Python, True is an int.
    return size if isinstance(size, int) and not isinstance(size, bool) else None


class GaugeReader:
    """Polls the components; keeps connections and the last CPU ticks."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        """`urls`: base URL of each component."""
        self._urls = urls
        self._http = asking("", SCRAPE_TIMEOUT_S)
        self._machine = procfs.MachineMeter()

    def read(self, status: RunStatus, flows: Mapping[str, Flow], folder: Path) -> GaugesRecord:
        """Poll every engine and run-api in parallel, then the host and the disk of `folder`."""
        rows = [row for row in status.components if row.port and row.state in RUNS]
        engines = [row for row in rows if row.role is Role.ENGINE]
        apis = [row for row in rows if row.role is Role.API]
        answers = self._ask(
            [(row, "/metrics") for row in engines] + [(row, "/status") for row in apis]
        )
        metrics = dict(zip((row.name for row in engines), answers, strict=False))
        queues = [parse_queue(text) for text in answers[len(engines) :] if text is not None]
        return GaugesRecord(
            run_id=status.run_id,
            time=time.time(),
            components={
                row.name: ComponentUse.model_validate(row, from_attributes=True)
                for row in status.components
                if row.pid
            },
            engines={
                name: parse_metrics(text) for name, text in metrics.items() if text is not None
            },
            gpus=status.gpus,
            queue=next((depth for depth in queues if depth is not None), None),
            host=HostUse(cores=float(os.cpu_count() or 1), **self._machine.read()),
            **_disk(folder),
            flows={name: _flow(found) for name, found in flows.items()},
        )

    def close(self) -> None:
        self._http.close()

    def _ask(self, routes: list[tuple[ComponentStatus, str]]) -> list[str | None]:
        if not routes:
            return []
        # One thread per address, so that a slow one delays the line by at most `SCRAPE_TIMEOUT_S`.
        with ThreadPoolExecutor(len(routes), thread_name_prefix="gauges") as pool:
            return list(
                pool.map(lambda route: self._page(self._urls[route[0].name] + route[1]), routes)
            )

    def _page(self, url: str) -> str | None:
        return fetch_page(self._http, url, MOST_ANSWER_BYTES)


def _disk(folder: Path) -> dict[str, int]:
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return {}
    return {"disk_free_bytes": disk.free, "disk_bytes": disk.total}


def _flow(flow: Flow) -> EnvFlow:
    # Rates need two readings; before that they are None.
    known = flow.seconds is not None
    return EnvFlow(
        engine=flow.engine,
        workers=flow.workers,
        made=flow.made,
        flat=flow.flat,
        counted_s=flow.counted_s,
        waiting=min(1.0, max(0.0, flow.waiting)) if known else None,
        idle=flow.idle if known else None,
        running=flow.running if known else None,
        slots=flow.slots if known else None,
        queued=flow.queued if known else None,
        tokens_per_s=flow.tokens_per_s if known else None,
        capacity_used=flow.capacity_used,
        **flow.bounds,
    )


class GaugesFile:
    """Appends to `gauges.jsonl` and limits its size. A full disk costs lines, never the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seq = 0

    def append(self, record: GaugesRecord) -> None:
        descriptor = -1
        try:
            descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            # A full disk or a kill may have left half a line at the end.
            cut_torn_line(descriptor)
            os.write(descriptor, record.model_copy(update={"seq": self._seq}).to_line().encode())
            self._seq += 1
            if os.fstat(descriptor).st_size > MOST_BYTES:
                self._thin()
        except OSError:
            return
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _thin(self) -> None:
        lines = self._path.read_text().splitlines(keepends=True)
        write_private(self._path, "".join([*lines[:-DENSE:2], *lines[-DENSE:]]))


async def record_gauges(
    path: Path,
    status: Callable[[], Awaitable[RunStatus]],
    flows: Callable[[], Mapping[str, Flow]],
    urls: Mapping[str, str],
) -> None:
    """Write a line every `GAUGES_EVERY_S` seconds until cancelled."""
    reader, file = GaugeReader(urls), GaugesFile(path)
    try:
        while True:
            # Sleep first: at the start nothing answers yet.
            await asyncio.sleep(GAUGES_EVERY_S)
            with contextlib.suppress(OSError):
                now = await status()
                record = await asyncio.to_thread(reader.read, now, flows(), path.parent)
                await asyncio.to_thread(file.append, record)
    finally:
        reader.close()
