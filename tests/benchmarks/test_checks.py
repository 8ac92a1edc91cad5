"""Benchmarks with checks end with 1 when a check fails."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import large_models, models, supervisor, trainer_step
from benchmarks.support.checks import Checks
from benchmarks.trainer import step_variants
from benchmarks.weights import sync_report

CPU = torch.device("cpu")
ONLY_MEASURE = {
    "chat_model",
    "idle_shares",
    "link",
    "load",
    "long_run",
    "nursery",
    "optimizer_memory",
    "overlay_picture",
    "pictures",
    "planted_env",
    "screenshot",
    "several",
    "shapes",
    "sync_trainer",
    "ui",
    "upstream",
}
"""Scripts without a bound of their own: figures, pictures, and parts of other scripts."""


@pytest.mark.parametrize(
    ("value", "fails"), [(1.0, False), (2.0, False), (2.1, True), (float("nan"), True)]
)
def test_a_bound_that_does_not_hold_is_named(
    value: float, fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = Checks()
    checks.at_most("the error", value, 2.0)
    checks.at_least("minus the error", -value, -2.0)
    assert checks.status() == int(fails)
    said = capsys.readouterr().err
    assert said.count("CHECK FAILED") == 2 * int(fails) and ("the error is" in said) is fails


def test_a_script_that_checks_gives_its_status_to_the_caller() -> None:
    """A new script belongs into `ONLY_MEASURE`, or its `main` returns what its checks say."""
    for path in Path(trainer_step.__file__).parent.rglob("*.py"):
        functions = {
            n.name: n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)
        }
        if "main" not in functions or path.stem in ONLY_MEASURE:
            continue
        returned = [n.value for n in ast.walk(functions["main"]) if isinstance(n, ast.Return)]
        constant = all(isinstance(value, ast.Constant) for value in returned)
        assert returned and not constant, f"{path.name} always ends with the same status"
        assert "sys.exit(main(" in path.read_text(), path.name


def test_the_gradient_follows_the_default_objective() -> None:
    """With `dual_clip`, whose bound the shape's almost uniform policy reaches; without it on our
    side, it is seen."""
    threads = torch.get_num_threads()
    try:
        right, wrong = (
            trainer_step.check_gradient("tiny", CPU, **fields) for fields in ({}, {"dual_clip": 0})
        )
    finally:
        torch.set_num_threads(threads)
    assert trainer_step.checked(right, CPU).status() == 0, right
    assert wrong["gradient_relative_error"] > 10 * right["gradient_relative_error"]
    assert trainer_step.checked(wrong, CPU).status() == 1


@pytest.mark.parametrize("error", [1e-7, 0.15])
def test_trainer_step_ends_with_what_the_gradient_says(
    error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"gradient_cosine": 1.0, "gradient_relative_error": error}
    monkeypatch.setattr(trainer_step, "check_gradient", lambda *_: found)
    monkeypatch.setattr(trainer_step, "compare", lambda *_: {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["trainer_step", "--json"])
    assert trainer_step.main() == int(error > 1e-5)


@pytest.mark.parametrize(
    ("card", "share"),
    [("NVIDIA H200", 0.5), ("NVIDIA A100-SXM4-80GB", 989 / 624), ("a card", None)],
)
def test_mfu_is_relative_to_the_dense_peak_of_the_card(
    card: str, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert trainer_step.mfu_of(989e12, 1.0) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card)
    expected = None if share is None else pytest.approx(share)
    assert trainer_step.mfu_of(989e12, 1.0, cards=2) == expected


def test_a_variant_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["step_variants", "--shape", "tiny", "--mix", "short", "--json"]
    )
    monkeypatch.setattr(step_variants, "show", lambda *_: "")
    monkeypatch.setattr(step_variants, "measure", lambda *_, **__: {"step_s": 1.0})
    assert step_variants.main() == 0
    monkeypatch.setattr(step_variants, "measure", lambda *_, **__: 1 / 0)
    assert step_variants.main() == 1


@pytest.mark.parametrize(
    ("shape", "reload_s", "probe", "status"),
    [
        ("qwen3-1.7b", 1.0, 0.02, 0),
        ("qwen3-1.7b", 6.0, 0.02, 1),
        ("tiny", 6.0, 0.02, 0),
        ("tiny", 1.0, 0.2, 1),
    ],
)
def test_promises_of_weight_sync(shape: str, reload_s: float, probe: float, status: int) -> None:
    """Those about speed are of one shape; the probe is of all."""
    mode = {"publish_s": reload_s, "phases": {}, "probe_abs_mean": probe}
    found: dict[str, Any] = {
        "shape": shape,
        "errors": {"lora": "skipped: no time"},
        "modes": {"none": mode},
    }
    assert sync_report.checked(found).status() == status
    assert sync_report.checked(found | {"errors": {"none": "it ended\nmore"}}).status() == 1


@pytest.mark.parametrize("lost", [0, 3])
def test_lines_that_a_flood_loses(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(_: int) -> dict[str, float]:
        return {"flood_lines_lost": lost}

    monkeypatch.setattr(supervisor, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["supervisor"])
    assert supervisor.main() == int(lost > 0)


def test_scripts_with_children_use_the_same_checks() -> None:
    """Their mains need a GPU or an engine; that they check is read off their source."""
    for module in (large_models, models):
        assert "checks.status()" in Path(module.__file__).read_text(), module.__name__
