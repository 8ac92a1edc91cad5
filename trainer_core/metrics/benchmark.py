"""Where the time went, as the guides' BENCHMARK SUMMARY and as a record; MFU; and the memory of this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from atropos_common.benchmark_summary import summary_sections, summary_text
from atropos_common.model_math import Dimensions, peak_flops, step_flops
from atropos_common.records import BenchmarkRecord


@dataclass
class BenchmarkTotals:
    """Sums over the steps of one attempt; seconds and bytes."""

    mode: str
    began: float = field(default_factory=time.perf_counter)
    steps: int = 0
    step_s: float = 0.0
    sync_s: float = 0.0
    syncs: int = 0
    wait_s: float = 0.0
    tokens: int = 0
    byte_sum: int = 0

    def add(self, *, step_s: float, sync_s: float | None, wait_s: float, tokens: int, allocated: int | None) -> None:
        """Count one step; `sync_s` is null when no weights moved to a server."""
        self.steps += 1
        self.step_s += step_s
        self.wait_s += wait_s
        self.tokens += tokens
        self.byte_sum += allocated or 0
        if sync_s is not None:
            self.syncs += 1
            self.sync_s += sync_s

    def fields(self) -> dict[str, Any]:
        """The fields of a `benchmark` record. `tokens_per_s` counts every token trained on, prompts included, by the
        seconds of all steps."""
        steps, syncs = max(1, self.steps), max(1, self.syncs)
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return {
            "mode": self.mode,
            "total_s": time.perf_counter() - self.began,
            "steps": self.steps,
            "avg_step_s": self.step_s / steps,
            "total_step_s": self.step_s,
            "avg_sync_s": self.sync_s / syncs,
            "syncs": self.syncs,
            "total_sync_s": self.sync_s,
            "avg_data_wait_s": self.wait_s / steps,
            "total_data_wait_s": self.wait_s,
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            "avg_bytes": self.byte_sum // steps if cuda else None,
            "tokens_per_s": self.tokens / self.step_s if self.step_s else 0.0,
        }

    def summary(self) -> str:
        """The guides' block of text."""
        figures = BenchmarkRecord(**self.fields())
        return summary_text(f"({self.mode})", summary_sections(figures, no_memory="n/a (CPU)"))


class MfuMeter:
    """MFU of the training part of a step, on a GPU whose peak is known."""

    def __init__(self, model: Dimensions, device: torch.device) -> None:
        self._model = model
        self._peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None

    def measure(self, lengths: Sequence[int], seconds: float) -> float | None:
        """Share of the peak, from 0 to 1; null where there is no peak to compare with."""
        return step_flops(self._model, lengths) / seconds / self._peak if self._peak and seconds > 0 else None


def memory_fields() -> dict[str, int | None]:
    """The fields of a `memory` record; GPU fields are null without a GPU in use."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "allocated_bytes": torch.cuda.memory_allocated() if cuda else None,
        "reserved_bytes": torch.cuda.memory_reserved() if cuda else None,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "rss_bytes": psutil.Process().memory_info().rss,
    }
