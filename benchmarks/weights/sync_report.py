"""Print the table of `weight_sync.py`: promised beside measured figures."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.support.checks import Checks

ASKED_OF = "qwen3-1.7b"
"""The shape that the promises are about, on an H200."""
MISSED = "MISSED"
SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}


@dataclass(frozen=True)
class Row:
    """One promise: its bound, and where the figure is in the result."""

    name: str
    sign: str
    limit: float
    unit: str
    measured: Callable[[dict[str, Any]], float]

    def text(self, found: dict[str, Any]) -> str:
        asked = f"{self.sign} {self.limit:g}{self.unit}"
        try:
            value = self.measured(found)
        except (KeyError, TypeError):
            return f"{self.name:<58}{'not measured':>14}{asked:>14}"
        kept = "" if SIGNS[self.sign](value, self.limit) else f"   {MISSED}"
        return f"{self.name:<58}{f'{value:.4g}{self.unit}':>14}{asked:>14}{kept}"


def ratio(over: str, under: str, key: str = "decode") -> Callable[[dict[str, Any]], float]:
    return lambda found: float(found[key][over] / found[key][under])


def moving(mode: str) -> Callable[[dict[str, Any]], float]:
    """Median seconds of a publish without what belongs to the optimizer (write) and to the disk
    (save)."""

    def seconds(found: dict[str, Any]) -> float:
        row = found["modes"][mode]
        return float(
            row["publish_s"] - sum(row["phases"].get(name, 0.0) for name in ("write", "save"))
        )

    return seconds


def probe(mode: str) -> Row:
    return Row(
        f"{mode}: probe mean |diff| after all steps (nats)",
        "<",
        0.03,
        "",
        lambda found: float(found["modes"][mode]["probe_abs_mean"]),
    )


PROBES = [probe(mode) for mode in ("shared_vllm", "lora_only", "broadcast", "none", "lora_restart")]
ROWS = [
    Row(
        "shared_vllm: decode, of vLLM's own server", ">=", 0.97, "x", ratio("shared_vllm", "plain")
    ),
    Row("shared_vllm: decode, of eager vLLM", ">=", 6.0, "x", ratio("shared_vllm", "eager")),
    Row(
        "the same with a single request",
        ">=",
        6.0,
        "x",
        ratio("shared_vllm", "eager", "decode_one"),
    ),
    Row(
        "shared_vllm: attach, all mapped",
        "<",
        1.0,
        " s",
        lambda f: float(f["modes"]["shared_vllm"]["map_s"]),
    ),
    Row(
        "shared_vllm: the trainer's own weight memory",
        "<=",
        0.0,
        " GB",
        lambda f: f["modes"]["shared_vllm"]["weight_bytes"] / 1e9,
    ),
    Row(
        "lora_only: swap",
        "<",
        0.05,
        " s",
        lambda f: float(f["modes"]["lora_only"]["phases"]["swap"]),
    ),
    Row(
        "lora_only: decode with an adapter, of vLLM's own server",
        ">=",
        0.6,
        "x",
        ratio("lora_only", "plain"),
    ),
    Row("broadcast: weights sent", "<", 0.085, " s", moving("broadcast")),
    Row("none: reload in place", "<", 5.0, " s", moving("none")),
    Row("lora_restart: restart, compile cache warm", "<", 25.0, " s", moving("lora_restart")),
    Row(
        "/generate over HTTP, of AsyncLLM in process",
        ">=",
        0.85,
        "x",
        lambda f: float(f["generate"]["ratio"]),
    ),
    *PROBES,
]


COSTS = [
    ("mode", 14),
    ("attach (s)", 12),
    ("own weights (GB)", 18),
    ("masters, states (GB)", 22),
    ("step (s)", 10),
    ("checkpoint (GB)", 17),
    ("probe max", 11),
]
"""Costs of each mode in the trainer, with widths. A step is forward, backward, optimizer and
publish (the batch is made up); a checkpoint is what inference needs: the model, or the adapter."""


def _costs(mode: str, row: dict[str, Any]) -> str:
    gigabytes = {
        key: row[key] / 1e9
        for key in ("weight_bytes", "state_bytes", "checkpoint_bytes")
        if row.get(key)
    }
    figures = [
        mode,
        f"{row['attach_s']:.2f}",
        f"{gigabytes.get('weight_bytes', 0.0):.3f}",
        f"{gigabytes['state_bytes']:.2f}" if "state_bytes" in gigabytes else "-",
        f"{row['step_s']:.3f}" if "step_s" in row else "-",
        f"{gigabytes['checkpoint_bytes']:.3f}" if "checkpoint_bytes" in gigabytes else "-",
        f"{row.get('probe_abs_max', float('nan')):.4f}",
    ]
    return "".join(f"{figure:>{width}}" for figure, (_, width) in zip(figures, COSTS, strict=True))


def checked(found: dict[str, Any]) -> Checks:
    """No error, and every promise that was measured holds; other shapes than `ASKED_OF` have to
    align alone."""
    checks = Checks()
    for name, text in found["errors"].items():
        checks.that(text.startswith("skipped"), f"{name}: {text.splitlines()[0]}")
    for row in ROWS if found["shape"] == ASKED_OF else PROBES:
        text = row.text(found)
        checks.that(not text.endswith(MISSED), " ".join(text.split()))
    return checks


def show(found: dict[str, Any]) -> str:
    """The whole table."""
    lines = [
        f"{found['shape']} in {found['dtype']}, {found['device']}, torch {found['torch']}, "
        f"vLLM {found.get('vllm')}, "
        f"{found['seconds']:.0f} s in all; asked: of Qwen3-1.7B's shape on an H200",
        f"{'':<58}{'measured':>14}{'asked':>14}",
        *(row.text(found) for row in ROWS),
        "",
        f"{'publish (s)':<14}{'n':>4}{'median':>9}{'max':>9}  phases (median)",
    ]
    for mode, row in found["modes"].items():
        if "publish_s" in row:
            phases = ", ".join(f"{name} {seconds:.4f}" for name, seconds in row["phases"].items())
            lines.append(
                f"{mode:<14}{row['publishes']:>4}{row['publish_s']:>9.4f}"
                f"{row['publish_max_s']:>9.4f}  {phases}"
            )
    lines += ["", "".join(f"{name:>{width}}" for name, width in COSTS)]
    lines += [_costs(mode, row) for mode, row in found["modes"].items()]
    lines.append("")
    for key, title in (("decode", "decode"), ("decode_one", "decode of a single request")):
        if speeds := found[key]:
            lines.append(
                f"{title}, tokens/s: "
                + ", ".join(f"{name} {value:,.0f}" for name, value in speeds.items())
            )
    if "generate" in found:
        row = found["generate"]
        lines.append(
            f"/generate on {row['server']}: {row['http']:,.0f} tokens/s, in process "
            f"{row['in_process']:,.0f}"
        )
    lines.append(
        "start to ready (s): "
        + ", ".join(f"{name} {s:.0f}" for name, s in found["starts_s"].items())
    )
    if "heads" in found:
        lines += [
            "",
            f"{'mean |diff| by head, base weights':<36}{'ours half':>12}{'ours fp32':>12}",
        ]
        lines += [
            f"{name:<36}{r['ours_half']:>12.5f}{r['ours_fp32']:>12.5f}"
            for name, r in found["heads"].items()
        ]
    lines += [f"{name}: {text.splitlines()[0]}" for name, text in found["errors"].items()]
    return "\n".join(lines)
