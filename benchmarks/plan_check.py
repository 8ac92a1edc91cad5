"""Compare the memory budget of `plan` with measured peaks, within a tenth.

    python -m benchmarks.large_models --shape llama-3.1-8b --output 8b.json ...
    python -m benchmarks.plan_check 8b.json ... [--json]
    python -m benchmarks.plan_check    # figures of docs/benchmarks.md without an engine

A record is what `benchmarks.large_models` writes: `shape` (or `config`: config.json itself, or its
folder), `mode`, `settings` of the trainer (a table, or KEY=VALUE), `kv_cache_gib`, and of the bytes
that were measured those that there
are: `trainer_peak_bytes` (torch.cuda.max_memory_allocated), `server_bytes` and `device_peak_bytes`
(NVML), of several devices the largest. The budget is that of `atropos-tui plan` for the same
settings on GPUs of `memory_limit_gib`, which decides what `gradient_checkpointing = auto` does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from atropos_tui.profile.budget.inventory import Gpu, Hardware, Model, build, model_shapes
from atropos_tui.profile.budget.memory import Budget, make_budget
from atropos_tui.profile.profile import parse_profile
from atropos_tui.profile.site import make_site, training_config
from benchmarks.support.shapes import SHAPES

GIB = 1 << 30
BOUND = 0.1
H200 = 140.4
"""GiB of the GPU where a record names none."""
KNOWN: list[dict[str, Any]] = [
    {
        "shape": "qwen3-1.7b",
        "mode": "none",
        "name": f"benchmarks/trainer_step.py, {name}",
        "seq_len": 2048,
        "settings": {"optimizer": "adamw", "gradient_checkpointing": "off"} | settings,
        "trainer_peak_bytes": peak,
    }
    for name, peak, settings in (
        ("rows of 16,384", 70.1e9, {}),
        ("with gradient checkpointing", 37.8e9, {"gradient_checkpointing": "on"}),
        ("adamw_8bit", 59.8e9, {"optimizer": "adamw_8bit"}),
        ("stochastic", 63.2e9, {"master_weights": "stochastic"}),
    )
]
"""One NVIDIA H200, 2026-11-21: docs/benchmarks.md, "One optimizer step"."""
NAMES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def model_of(record: dict[str, Any]) -> Model:
    """The model of a record: a shape of `benchmarks.support.shapes`, or a folder."""
    config = record.get("config") or SHAPES[record["shape"]]
    if isinstance(config, str):
        config = json.loads((Path(config) / "config.json").read_text())
    config = {"architectures": [NAMES.get(config["model_type"], "")]} | config
    if shapes := model_shapes(config):
        return Model(config, shapes, "config.json")
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "config.json").write_text(json.dumps(config))
        built = build(Path(made), config)
    if isinstance(built, str):
        raise SystemExit(built)
    return built


def settings_of(record: dict[str, Any]) -> dict[str, Any]:
    """The trainer's settings as a profile has them."""
    given = record["settings"]
    if isinstance(given, dict):
        return given
    pairs = (item.split("=", 1) for item in given)
    return {key: _value(text) for key, text in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def budget_of(record: dict[str, Any]) -> Budget:
    """Return the budget that `plan` computes for the same settings."""
    length = record.get("seq_len") or record.get("prompt", 128) + record.get("completion", 512)
    sequences = record.get("sequences", 64)
    gpus = list(range(record.get("parallel", 1)))
    adapters = {"lora_target_modules": ["all-linear"]} if record["mode"].startswith("lora") else {}
    profile = parse_profile(
        {
            "name": "check",
            "mode": record["mode"],
            "model": "/model",
            "env": {"module": "json"},
            "vllm": {
                "gpus": gpus,
                "tensor_parallel": len(gpus),
                "max_model_len": length,
                "args": {
                    "kv-cache-memory-bytes": int(record.get("kv_cache_gib", 6) * GIB),
                    "max-num-seqs": sequences,
                    "max-loras": 1,
                },
            },
            "trainer": {
                "gpus": gpus,
                "batch_size": max(1, sequences // 8),
                "gradient_accumulation_steps": 8,
                "seq_len": length,
                "pack_tokens": 16_384,
                "memory": "speed",
                **adapters,
                **settings_of(record),
            },
        },
        "record",
    )
    machine = Hardware(
        (Gpu("GPU", int((record.get("memory_limit_gib") or H200) * GIB)),) * len(gpus), None
    )
    settings = training_config(make_site(profile, Path("/run"), run_id="check"))
    return make_budget(profile, settings, {"vllm": model_of(record)}, machine)


def compare(record: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each figure that was measured: planned and measured bytes, and the error."""
    (device,) = [device for device in budget_of(record).devices if device.name == "GPU 0"]
    trainer = [
        item for item in device.items if item.component == "trainer" and item.what != "CUDA context"
    ]
    planned = {
        "trainer_peak_bytes": sum(item.bytes or 0 for item in trainer),
        "server_bytes": sum(item.bytes or 0 for item in device.items if item.component == "vllm"),
        "device_peak_bytes": device.wanted,
    }
    settings = " ".join(f"{key}={value}" for key, value in settings_of(record).items())
    found = {what: record.get(what) for what in planned}
    measured = {
        what: max(size) if isinstance(size, list) else size for what, size in found.items() if size
    }
    name = record.get("name") or f"{record.get('shape', 'model')}, {record['mode']}, {settings}"
    return [
        {
            "name": name,
            "what": what.removesuffix("_bytes"),
            "planned": planned[what],
            "measured": size,
            "error": planned[what] / size - 1,
            "items": {f"{i.component} {i.what}": i.bytes for i in device.items},
        }
        for what, size in measured.items()
    ]


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file: one object, or one in each line."""
    text = path.read_text()
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


def show(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"| {'run':<70} | what | planned GiB | measured GiB | error |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']:<70} | {row['what']} | {row['planned'] / GIB:.1f} | "
        f"{row['measured'] / GIB:.1f} "
        f"| {row['error']:+.1%} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "records", nargs="*", type=Path, help="JSON files, or JSON lines; default: known figures"
    )
    parser.add_argument("--json", action="store_true", help="with each item of the budget")
    options = parser.parse_args()
    records = [record for path in options.records for record in read(path)] or KNOWN
    measured = [
        record for record in records if not record.get("error") or record.get("trainer_peak_bytes")
    ]
    rows = [row for record in measured for row in compare(record)]
    print(json.dumps(rows) if options.json else show(rows))
    peaks = [row for row in rows if row["what"] != "server"]
    return 1 if any(abs(row["error"]) > BOUND for row in peaks) else 0


if __name__ == "__main__":
    sys.exit(main())
