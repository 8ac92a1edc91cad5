"""Audits of healthy engines: how many are false alarms?"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from atropos_common.protocol.audit import Audit
from benchmarks.silent_bugs import models
from benchmarks.silent_bugs.engines import Nursery, vllm
from benchmarks.silent_bugs.state import State
from trainer_core.audit.program import Settings, audit
from trainer_core.audit.reference import Reference

# Audits of one engine at once: it decodes them together.
AT_ONCE = 16
DTYPES = ("float32", "bfloat16")
# vLLM serves adapters of these here.
WITH_ADAPTER = ("llama", "qwen2", "qwen3")
TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


class Kind(NamedTuple):
    """One healthy engine."""

    family: str
    dtype: str
    cache: bool

    def __str__(self) -> str:
        return f"{self.family:<6} {self.dtype:<9} prefix cache {'on' if self.cache else 'off':<3}"

    @property
    def adapters(self) -> tuple[str, ...]:
        return ("base", "adapter") if self.family in WITH_ADAPTER else ("base",)


def kinds() -> list[Kind]:
    """Twenty engines; the first ten have every family and dtype once."""
    pairs = list(product(models.FAMILIES, DTYPES))
    return [
        Kind(family, dtype, (number + number // 2 + turn) % 2 == 0)
        for turn in range(2)
        for number, (family, dtype) in enumerate(pairs)
    ]


def count_false_alarms(audits: int, work: Path, only: str, state: State) -> int:
    """Audit each of twenty engines in turn; return the exit status."""
    chosen = [kind for kind in kinds() if only in str(kind)]
    each = -(-audits // len(chosen))
    nursery: Nursery | None = None
    for kind in chosen:
        if _missing(kind, each, state) and not state.over:
            nursery = nursery or Nursery(work)
            _audit_engine(nursery, kind, each, work, state)
    return _print(chosen, each, state)


def _missing(kind: Kind, each: int, state: State) -> dict[str, int]:
    """Adapter or base -> audits that are still to be made."""
    shares = {"base": each - each // 2, "adapter": each // 2} if kind.adapters[1:] else {}
    done = Counter(row["of"] for row in state.done.get(str(kind), []))
    wanted = {name: n - done[name] for name, n in (shares or {"base": each}).items()}
    return {name: n for name, n in wanted.items() if n > 0}


def _audit_engine(nursery: Nursery, kind: Kind, each: int, work: Path, state: State) -> None:
    root = work / f"{kind.family}-{kind.dtype}"
    root.mkdir(parents=True, exist_ok=True)
    folder = models.save(models.build(kind.family), root / "weights", dtype=kind.dtype)
    flags = ["--dtype", kind.dtype, *([] if kind.cache else ["--no-enable-prefix-caching"])]
    adapter = None
    if "adapter" in kind.adapters:
        adapter = models.write_adapter(folder, root / "adapter", targets=TARGETS)
        flags += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"a={adapter}"]
    rows: list[dict[str, Any]] = state.done.setdefault(str(kind), [])
    with vllm(folder, root / "vllm.log", flags, nursery=nursery) as url:
        # Base model and adapter one after another: see "What it cannot prove" in the audit's page.
        for name, count in _missing(kind, each, state).items():
            applied = adapter if name == "adapter" else None
            reference = Reference(folder, applied, device="cpu")
            settings = Settings(folder, engine=url, adapter=applied, device="cpu", timeout_s=300.0)

            def one(_: int, settings: Settings = settings, of: Reference = reference) -> Any:
                return None if state.over else audit(settings, of)

            with ThreadPoolExecutor(AT_ONCE) as pool:
                for result in pool.map(one, range(count)):
                    if result is not None:
                        rows.append(_row(name, result))
                        state.save()


def _row(name: str, result: Audit) -> dict[str, Any]:
    ratios = [group.difference / group.bound for group in result.groups]
    told = "" if result.verdict == "serves" else f"{result.cause}: {result.evidence}"
    return {
        "of": name,
        "verdict": result.verdict,
        "told": told,
        "worst": max(ratios, default=0.0),
        "tokens": result.tokens,
        "time": time.time(),
    }


def _print(chosen: list[Kind], each: int, state: State) -> int:
    total: Counter[str] = Counter()
    for kind in chosen:
        rows = state.done.get(str(kind), [])
        verdicts = Counter(row["verdict"] for row in rows)
        total += verdicts
        if not rows:
            print(f"{kind}  not audited")
            continue
        of = ", ".join(f"{n} {name}" for name, n in Counter(r["of"] for r in rows).items())
        print(
            f"{kind}  {len(rows)} audits ({of}): {dict(verdicts)}, largest difference "
            f"{max(r['worst'] for r in rows):.2f} of its bound, "
            f"{sum(r['tokens'] for r in rows) / len(rows):.0f} tokens an audit"
        )
        for row in rows:
            if row["told"]:
                print(f"  {row['of']}: {row['verdict']}: {row['told']}")
    made = sum(total.values())
    print(
        f"{made} of {each * len(chosen)} audits of healthy engines at {state.commit}: "
        f"{dict(total)}; false alarms {total['does not']}"
    )
    return 0 if total["serves"] == made == each * len(chosen) else 1
