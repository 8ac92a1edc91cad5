"""One round on a GPU: a real model with CUDA graphs and LoRA, healthy and with planted faults."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch

from benchmarks.silent_bugs import models
from benchmarks.silent_bugs.engines import vllm
from trainer_core.audit.program import Settings, audit

HEALTHY_AUDITS = 10
FLAGS = ("--gpu-memory-utilization", "0.4", "--max-model-len", "4096", "--max-lora-rank", "16")


def audit_on_gpu(model: Path, work: Path) -> int:
    """Audit one engine with graphs and adapters; return the exit status.

    Args:
        model: folder of a model, such as Qwen2.5-0.5B.
    """
    right = models.write_adapter(model, work / "adapter", spread=0.02)
    other = models.write_adapter(model, work / "other", seed=8, spread=0.02)
    twice = models.write_adapter(model, work / "twice", alpha=32.0, spread=0.02)
    newer = _moved(model, work / "newer")
    rope = models.copied(model, work / "rope", rope_theta=10_000.0, rope_parameters=None)
    flags = [*FLAGS, "--enable-lora", "--lora-modules"]
    flags += [f"right={right}", f"other={other}", f"twice={twice}", f"void={_void(right, work)}"]
    cases: list[tuple[str, str, Settings]] = [
        ("healthy base", "serves", Settings(model)),
        ("healthy adapter", "serves", Settings(model, adapter=right, model="right")),
        ("adapter scaled twice", "adapter", Settings(model, adapter=right, model="twice")),
        ("adapter missing", "adapter", Settings(model, adapter=right, model="void")),
        ("another adapter", "", Settings(model, adapter=right, model="other")),
        ("old weights", "stale weights", Settings(newer, older=model)),
        ("rotary base", "rotary base", Settings(rope)),
    ]
    wrong = 0
    begun = time.monotonic()
    with vllm(model, work / "vllm.log", flags, gpu=True) as url:
        print(f"{torch.cuda.get_device_name(0)}: ready after {time.monotonic() - begun:.0f} s")
        for name, expected, settings in cases:
            for _ in range(HEALTHY_AUDITS if expected == "serves" else 1):
                settings.engine = url
                result = audit(settings)
                named = result.cause or result.verdict
                good = named == expected if expected else result.verdict == "does not"
                wrong += not good
                groups = ", ".join(f"{g.name} {g.difference:.2g}" for g in result.groups)
                print(
                    f"{name:<22} {named:<16} {'yes' if good else 'NO':<4}{result.tokens:>6} tokens "
                    f"{result.seconds:>5.1f} s  {groups} (bound {result.groups[0].bound:.2g}); "
                    f"{result.evidence}"
                    if result.groups
                    else f"{name:<22} {named}: {result.evidence}",
                    flush=True,
                )
    print(f"{wrong} wrong")
    return 1 if wrong else 0


def _moved(model: Path, target: Path) -> Path:
    """A checkpoint some updates later than `model`."""

    def step(weights: torch.nn.Module) -> None:
        draw = torch.Generator().manual_seed(3)
        for weight in weights.parameters():
            spread = 0.05 * float(weight.std()) if weight.numel() > 1 else 0.0
            weight.add_(spread * torch.randn(weight.shape, generator=draw))

    return models.moved_copy(model, target, step)


def _void(adapter: Path, work: Path) -> Path:
    """The adapter with a scale of nearly nothing: the engine lists it and computes without it."""
    target = work / "void"
    shutil.copytree(adapter, target, dirs_exist_ok=True)
    models.edit_json(target / "adapter_config.json", lora_alpha=1e-6)
    return target
