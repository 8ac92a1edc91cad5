"""The table of benchmarks/weight_sync.py: promised beside measured figures, nothing made up."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.weights.sync_report import ROWS, show


def found(**more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "device": "a GPU",
        "torch": "2",
        "shape": "tiny",
        "dtype": "bfloat16",
        "seconds": 1.0,
        "modes": {},
        "starts_s": {},
        "decode": {},
        "decode_one": {},
        "errors": {},
    }
    return base | more


def line(text: str, name: str) -> str:
    return next(each for each in text.splitlines() if each.startswith(name))


def test_what_was_not_measured_is_said_and_misses_nothing() -> None:
    text = show(found(errors={"broadcast": "skipped: it needs 2 GPUs"}))
    assert text.count("not measured") == len(ROWS) and "MISSED" not in text
    assert "skipped: it needs 2 GPUs" in text


@pytest.mark.parametrize(("shared", "missed"), [(98.0, False), (90.0, True)])
def test_a_ratio_is_held_against_what_was_asked(shared: float, missed: bool) -> None:
    text = show(found(decode={"plain": 100.0, "shared_vllm": shared}))
    assert ("MISSED" in line(text, "shared_vllm: decode, of vLLM's own")) is missed


def test_a_reload_counts_without_the_optimizer_and_the_disk() -> None:
    row = {
        "attach_s": 2.0,
        "weight_bytes": 4e9,
        "publishes": 2,
        "publish_s": 9.0,
        "publish_max_s": 9.5,
        "phases": {"write": 1.0, "save": 5.0, "load": 2.0, "resume": 1.0},
        "probe_abs_mean": 0.04,
    }
    text = show(found(modes={"none": row}))
    assert "3 s" in line(text, "none: reload in place") and "MISSED" not in line(
        text, "none: reload in place"
    )
    assert "MISSED" in line(text, "none: probe")
