"""Every item of the guides has a rule, and every rule a test and an entry in the docs."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from atropos_tui.diagnoses import RULES

TESTS = Path(__file__).parents[2]
NAMES = {rule.name for rule in RULES}
MANUAL = TESTS.parent / "docs/troubleshooting.md"

GUIDES = {
    # Health numbers
    "mean_ratio 0.8-1.2": ("ratio_out_of_range", "test_one_number_that_is_wrong_is_told_once"),
    "clipped fraction < 0.3": ("clip_fraction_high", "test_one_number_that_is_wrong_is_told_once"),
    "loss not below -10": ("loss_too_low", "test_telemetry_is_judged_while_it_is_written"),
    "alignment |diff| < 0.1": ("alignment_drift", "test_one_number_that_is_wrong_is_told_once"),
    "accuracy collapse": ("accuracy_collapse", "test_evaluations_are_judged"),
    "repetition": ("repetition", "test_one_number_that_is_wrong_is_told_once"),
    # Troubleshooting
    "API not reachable": (
        "api_unreachable",
        "test_a_captured_log_is_explained_live_and_at_the_exit",
    ),
    "vLLM not running": (
        "engine_unreachable",
        "test_a_captured_log_is_explained_live_and_at_the_exit",
    ),
    "without `--enable-lora`": ("lora_not_enabled", "test_lines_of_the_sources"),
    "manifest not found": (
        "manifest_missing",
        "test_a_captured_log_is_explained_live_and_at_the_exit",
    ),
    "manifest empty": ("manifest_empty", "test_a_captured_log_is_explained_live_and_at_the_exit"),
    "alignment MISMATCH": ("alignment_mismatch", "test_one_number_that_is_wrong_is_told_once"),
    "ref_logprobs positive": ("logprobs_positive", "test_what_a_running_program_says"),
    "404 on `/generate`": ("generate_404", "test_a_captured_log_is_explained_live_and_at_the_exit"),
    "wrong server_type, no logprobs": (
        "no_logprobs",
        "test_a_captured_log_is_explained_live_and_at_the_exit",
    ),
    "Triton on Blackwell": ("triton_blackwell", "test_lines_of_the_sources"),
    "port in use": ("port_in_use", "test_the_holder_of_the_port_is_named"),
    "no batches, trainer hangs": ("no_batches", "test_the_cause_that_fits_is_named"),
    "forked CUDA": ("forked_cuda", "test_a_captured_log_is_explained_live_and_at_the_exit"),
    "`FlexibleArgumentParser` import": (
        "flexible_argument_parser",
        "test_a_captured_log_is_explained_live_and_at_the_exit",
    ),
    "OOM with the five ways out": ("out_of_memory", "test_the_five_ways_out_of_memory_by_role"),
    "daemonic processes": (
        "daemonic_processes",
        "test_a_captured_log_is_explained_live_and_at_the_exit",
    ),
    "stuck at Gloo": ("gloo_stuck", "test_a_captured_log_is_explained_live_and_at_the_exit"),
    "NCCL not connected": ("nccl_failed", "test_a_captured_log_is_explained_live_and_at_the_exit"),
    "slow or no progress": ("slow_progress", "test_one_number_that_is_wrong_is_told_once"),
    "vLLM health time-out": (
        "health_timeout",
        "test_a_captured_log_is_explained_live_and_at_the_exit",
    ),
    "worker time-outs at 600 s": ("worker_timeout", "test_lines_of_the_sources"),
    "lost gradients with layer filters": (
        "lost_gradients",
        "test_a_captured_log_is_explained_live_and_at_the_exit",
    ),
    "W&B fields None": (
        "registration_refused",
        "test_a_captured_log_is_explained_live_and_at_the_exit",
    ),
    "`use_cache` with gradient checkpointing": (
        "use_cache_with_checkpointing",
        "test_what_a_running_program_says",
    ),
    "run-api restarted by its file watcher": (
        "api_reloaded",
        "test_a_captured_log_is_explained_live_and_at_the_exit",
    ),
}
"""Item of the guides' checklist -> the rule, and the test that shows it."""

SHOWN_BY_TITLE = {
    "log_unwritable": (
        "atropos_tui/supervisor/processes/test_full_disk.py",
        "the log cannot be written",
    ),
    "gpu_memory_held": (
        "atropos_tui/supervisor/launchers/test_gpu_memory.py",
        "GPU memory of engine was not given back",
    ),
}


@cache
def texts() -> dict[str, str]:
    found = [
        path
        for folder in ("atropos_tui", "atropos_envs", "trainer_core/ranks")
        for path in (TESTS / folder).rglob("test_*.py")
        if path != Path(__file__)
    ]
    return {path.relative_to(TESTS).as_posix(): path.read_text() for path in found}


@cache
def functions() -> set[str]:
    trees = (ast.parse(text) for text in texts().values())
    return {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("item", GUIDES)
def test_every_item_of_the_guides_has_a_rule_and_a_test(item: str) -> None:
    rule, test = GUIDES[item]
    assert rule in NAMES
    assert test in functions()


@pytest.mark.parametrize("rule", sorted(NAMES))
def test_every_rule_is_named_in_a_test(rule: str) -> None:
    file, title = SHOWN_BY_TITLE.get(rule, ("", ""))
    named = [
        name
        for name, text in texts().items()
        if f'"{rule}"' in text or (name == file and title in text)
    ]
    assert named, f"no test expects the rule {rule}"


def test_the_manual_has_one_entry_for_each_rule_and_no_other() -> None:
    entries = re.findall(r"^\| `(\w+)` \|(.+)\|(.+)\|$", MANUAL.read_text(), flags=re.MULTILINE)
    rules = [name for name, *_ in entries]
    assert sorted(rules) == sorted(NAMES)
    assert len(rules) == len(set(rules))
    for name, means, do in entries:
        assert means.strip() and do.strip(), name


def test_the_checklist_is_answered_by_name() -> None:
    """The items are the guides' own words; losing one here would lose its rule."""
    assert len(GUIDES) == 31
    assert {rule for rule, _ in GUIDES.values()} <= set(NAMES)
