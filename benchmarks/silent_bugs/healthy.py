"""Audits of healthy engines: how many are false alarms?"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from atropos_common.protocol.audit import Audit
from benchmarks.silent_bugs import models
from benchmarks.silent_bugs.engines import Nursery, vllm
from trainer_core.audit.program import Settings, audit
from trainer_core.audit.reference import Reference

# Audits of one engine at once: it decodes them together.
AT_ONCE = 8
DTYPES = ("float32", "bfloat16")
# vLLM serves adapters of these here.
WITH_ADAPTER = ("llama", "qwen2", "qwen3")
TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def count_false_alarms(audits: int, work: Path, only: str = "") -> int:
    """Audit each of ten engines in turn; return the exit status."""
    kinds = list(enumerate(product(models.FAMILIES, DTYPES)))
    each = -(-audits // len(kinds))
    total: Counter[str] = Counter()
    nursery = Nursery(work)
    for number, (family, dtype) in kinds:
        if only not in f"{family} {dtype}":
            continue
        # Alternate, so that every family and every dtype has an engine with and one without.
        cache = (number + number // 2) % 2 == 0
        total += _audited(nursery, family, dtype, cache, each, work)
    made = sum(total.values())
    print(f"{made} audits of healthy engines: {dict(total)}; false alarms {total['does not']}")
    return 0 if total["serves"] == made else 1


def _audited(
    nursery: Nursery, family: str, dtype: str, cache: bool, each: int, work: Path
) -> Counter[str]:
    root = work / f"{family}-{dtype}"
    root.mkdir(parents=True, exist_ok=True)
    folder = models.save(models.build(family), root / "weights", dtype=dtype)
    flags = ["--dtype", dtype, *([] if cache else ["--no-enable-prefix-caching"])]
    adapters: list[Path | None] = [None]
    if family in WITH_ADAPTER:
        adapter = models.write_adapter(folder, root / "adapter", targets=TARGETS)
        adapters.append(adapter)
        flags += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"a={adapter}"]
    references = {a: Reference(folder, a, device="cpu") for a in adapters}
    verdicts: Counter[str] = Counter()
    worst = cost = 0.0
    begun = time.monotonic()
    with vllm(folder, root / "vllm.log", flags, nursery=nursery) as url:
        ready = time.monotonic() - begun

        def one(adapter: Path | None) -> Audit:
            settings = Settings(folder, engine=url, adapter=adapter, device="cpu", timeout_s=300.0)
            return audit(settings, references[adapter])

        results: list[Audit] = []
        # One after another: vLLM on a CPU applies an adapter to requests for the base model that
        # are in the same batch.
        for applied in adapters:
            # The first alone: it makes the reference's copy in half precision.
            results.append(one(applied))
            with ThreadPoolExecutor(AT_ONCE) as pool:
                results += pool.map(one, [applied] * (each // len(adapters) - 1))
    for number, result in enumerate(results):
        verdicts[result.verdict] += 1
        cost += result.tokens
        worst = max([worst, *(group.difference / group.bound for group in result.groups)])
        if result.verdict != "serves":
            print(f"  {family} {dtype} #{number}: {result.cause} {result.evidence}")
    seconds = time.monotonic() - begun - ready
    print(
        f"{family:<6} {dtype:<9} prefix cache {'on' if cache else 'off':<3} "
        f"adapter {'half' if len(adapters) > 1 else 'none'}: {dict(verdicts)}, largest "
        f"difference {worst:.2f} of its bound, {cost / each:.0f} tokens and {seconds / each:.2f} s "
        f"an audit, engine ready after {ready:.0f} s",
        flush=True,
    )
    return verdicts
