"""One round on a GPU: a real model with CUDA graphs and LoRA, healthy and with planted faults."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from atropos_common.protocol.audit import Audit
from benchmarks.silent_bugs import models
from benchmarks.silent_bugs.engines import vllm
from trainer_core.audit.program import Settings, audit
from trainer_core.audit.reference import Reference

HEALTHY_AUDITS = 10
GPU_FLAGS = ("--gpu-memory-utilization", "0.4", "--max-num-seqs", "32")
FLAGS = ("--max-model-len", "2048", "--enable-lora", "--max-loras", "4", "--max-lora-rank", "16")

Case = tuple[str, str, Settings]
"""Name, expected verdict or cause (empty: any fault), arguments."""


class Table:
    """Rows that are printed as they come, and the totals at the end."""

    def __init__(self) -> None:
        self.audits: Counter[str] = Counter()
        self.right: Counter[str] = Counter()
        print(f"{'case':<22} {'named as':<22} {'right':<6}{'tokens':>6}{'s':>7}  evidence")

    def add(self, name: str, expected: str, result: Audit) -> None:
        named = result.cause or result.verdict
        right = named == expected if expected else result.verdict == "does not"
        self.audits[name] += 1
        self.right[name] += right
        groups = ", ".join(f"{g.name} {g.difference:.2g}" for g in result.groups)
        bound = f" ({groups}; bound {result.groups[0].bound:.2g})" if result.groups else ""
        print(
            f"{name:<22} {named:<22} {'yes' if right else 'NO':<6}{result.tokens:>6}"
            f"{result.seconds:>7.1f}  {result.evidence}{bound}",
            flush=True,
        )

    def close(self, planned: int) -> int:
        """Print the totals; return the exit status."""
        made, right = sum(self.audits.values()), sum(self.right.values())
        for name, count in self.audits.items():
            print(f"{name}: {self.right[name]} of {count} right")
        early = f"; ended early, {planned - made} audits were not made" if made < planned else ""
        print(f"{right} of {made} audits right{early}", flush=True)
        return 0 if right == made == planned else 1


def audit_on_gpu(model: Path, work: Path, limit_s: float) -> int:
    """Audit one engine with graphs and adapters; return the exit status.

    Args:
        model: folder of a model, such as Qwen2.5-0.5B.
        limit_s: seconds after which no further audit begins.
    """
    # A caller that ends the program early gets the totals and leaves no engine behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    gpu = torch.cuda.is_available()
    until = time.monotonic() + limit_s
    right = models.write_adapter(model, work / "adapter", spread=0.02)
    other = models.write_adapter(model, work / "other", seed=8, spread=0.02)
    twice = _rescaled(right, work / "twice", 32.0)
    # The engine lists this one and computes without it.
    void = _rescaled(right, work / "void", 1e-6)
    named = {"right": right, "other": other, "twice": twice, "void": void}
    flags = [*(GPU_FLAGS if gpu else ()), *FLAGS, "--lora-modules"]
    flags += [f"{name}={folder}" for name, folder in named.items()]
    # FlashInfer's sampler needs a package that vLLM does not install.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    begun = time.monotonic()
    with vllm(model, work / "vllm.log", flags, gpu=gpu) as url:
        where = torch.cuda.get_device_name(0) if gpu else "CPU, eager"
        print(f"{where}: {model.name} ready after {time.monotonic() - begun:.0f} s", flush=True)
        return _audited(url, _cases(model, work, right), until)


def _cases(model: Path, work: Path, right: Path) -> list[Callable[[], Case]]:
    """Cases in order; each makes its folder only when its turn comes."""

    def of(name: str, expected: str, adapter: str = "") -> Callable[[], Case]:
        if not adapter:
            return lambda: (name, expected, Settings(model))
        return lambda: (name, expected, Settings(model, adapter=right, model=adapter))

    def old() -> Case:
        return "old weights", "stale weights", Settings(_moved(model, work / "newer"), older=model)

    def rope() -> Case:
        other = {"rope_theta": 10_000.0, "rope_type": "default"}
        folder = models.copied(model, work / "rope", rope_theta=10_000.0, rope_parameters=other)
        return "rotary base", "rotary base", Settings(folder)

    healthy, adapted = of("healthy base", "serves"), of("healthy adapter", "serves", "right")
    return [
        *[healthy, adapted] * 2,
        of("adapter scaled twice", "adapter", "twice"),
        of("adapter missing", "adapter", "void"),
        of("another adapter", "", "other"),
        rope,
        old,
        *[healthy, adapted] * (HEALTHY_AUDITS - 2),
    ]


def _audited(url: str, cases: list[Callable[[], Case]], until: float) -> int:
    table = Table()
    references: dict[tuple[Path, Path | None, Path | None], Reference] = {}
    try:
        for make in cases:
            if time.monotonic() > until:
                break
            name, expected, settings = make()
            settings.engine = url
            begun = time.monotonic()
            key = (settings.weights, settings.adapter, settings.older)
            if key not in references:
                references[key] = Reference(*key)
            loaded = time.monotonic() - begun
            result = audit(settings, references[key])
            # A user's audit loads the reference each time.
            result.seconds += loaded
            table.add(name, expected, result)
    finally:
        status = table.close(len(cases))
    return status


def _rescaled(adapter: Path, target: Path, alpha: float) -> Path:
    """The adapter with another scale."""
    shutil.copytree(adapter, target, dirs_exist_ok=True)
    models.edit_json(target / "adapter_config.json", lora_alpha=alpha)
    return target


def _moved(model: Path, target: Path) -> Path:
    """A checkpoint some updates later than `model`."""

    def step(weights: torch.nn.Module) -> None:
        draw = torch.Generator().manual_seed(3)
        for weight in weights.parameters():
            spread = 0.05 * float(weight.std()) if weight.numel() > 1 else 0.0
            weight.add_(spread * torch.randn(weight.shape, generator=draw))

    return models.moved_copy(model, target, step)
