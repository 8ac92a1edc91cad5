"""Several runs on one chart: which belong together, differences, bands, final values, and their
page."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from atropos_tui.cli import main
from atropos_tui.monitor.charts import Along
from atropos_tui.monitor.overlay import (
    by_setting,
    differing,
    final_table,
    lines,
    read_runs,
    seeds_table,
    settings_table,
)
from tests.support.run_maker import make_run

PROFILE = """name = "{name}"
mode = "{mode}"
seed = {seed}
[api]
port = {port}
[trainer]
lr = {lr}
gpus = [{port}]
[[env]]
name = "arithmetic"
[env.args]
"env.seed" = {seed}
"""


def made(root: Path, seed: int, mode: str = "none", lr: float = 1e-4, steps: int = 30) -> Path:
    run = make_run(root, steps=steps, seed=seed)
    run.plan_json.unlink()  # which would name another mode
    run.profile_toml.write_text(
        PROFILE.format(name=root.name, mode=mode, seed=seed, port=8000 + seed, lr=lr)
    )
    return run.root


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Three seeds of one setting, and another setting."""
    return [
        *(made(tmp_path / f"s{seed}", seed) for seed in range(3)),
        made(tmp_path / "other", 0, lr=1e-5, steps=20),
    ]


def test_seeds_of_one_setting_belong_together(roots: list[Path]) -> None:
    runs = read_runs(roots)
    assert list(differing(runs)) == ["trainer.lr", "seed"], (
        "not names, ports, places on GPUs, or seeds derived from it"
    )
    assert [(setting.label, len(setting.runs)) for setting in by_setting(runs)] == [
        ("lr 0.0001, 3 runs", 3),
        ("lr 1e-05", 1),
    ]
    assert settings_table(runs)[1] == ["trainer.lr", "0.0001", "0.0001", "0.0001", "1e-05"]
    assert [row[0] for row in final_table(runs)] == ["run", "s0", "s1", "s2", "other"]
    assert [row[0] for row in seeds_table(runs)] == ["setting", "lr 0.0001, 3 runs"]


def test_a_band_is_mean_lowest_and_highest_of_the_runs_that_reach_a_place(
    roots: list[Path],
) -> None:
    runs = read_runs(roots[:3])
    (setting,) = by_setting(runs)
    (found,) = lines([setting], "reward_mean", Along.STEPS)
    assert found is not None and list(found.places) == list(range(1, 31))
    rewards = [run.state.metric("reward_mean").at(10) or 0.0 for run in runs]
    at = list(found.places).index(10)
    assert (found.values[at], found.low[at], found.high[at]) == pytest.approx(
        (sum(rewards) / 3, min(rewards), max(rewards))
    )
    (tokens,) = lines([setting], "reward_mean", Along.TOKENS)
    assert tokens is not None and tokens.places[0] == 384.0
    assert lines([setting], "never heard of", Along.STEPS) == [None]


def test_runs_of_a_comparison_are_smoothed_and_averaged_alike(tmp_path: Path) -> None:
    """A run of 20 steps was drawn raw beside a smooth one of 60, and its "last 20" were its whole
    life."""
    runs = read_runs(
        [made(tmp_path / "long", 0, steps=60), made(tmp_path / "short", 0, lr=1e-5, steps=20)]
    )
    settings = by_setting(runs)
    assert [
        found.smoothing for found in lines(settings, "reward_mean", Along.STEPS, 10) if found
    ] == [10, 10]
    assert [found.smoothing for found in lines(settings, "lr", Along.STEPS, 10) if found] == [0, 0]
    titles, *rows = final_table(runs)
    assert "reward, last 5 steps" in titles
    at = titles.index("reward, last 5 steps")
    for run, row in zip(runs, rows, strict=True):
        newest = run.state.metric("reward_mean").tail(5)
        assert float(row[at]) == pytest.approx(sum(newest) / 5, abs=1e-3)


def test_labels_are_told_apart_by_the_fewest_settings_that_differ(tmp_path: Path) -> None:
    runs = read_runs(
        [
            made(tmp_path / name, 0, mode, lr)
            for name, mode, lr in (
                ("a", "none", 1e-4),
                ("b", "none", 1e-3),
                ("c", "lora_only", 1e-2),
            )
        ]
    )
    assert [setting.label for setting in by_setting(runs)] == ["lr 0.0001", "lr 0.001", "lr 0.01"]
    assert [setting.label for setting in by_setting([runs[0], runs[2]])] == ["none", "lora_only"]


def test_runs_without_a_profile_and_of_the_same_name_stay_apart(tmp_path: Path) -> None:
    roots = [make_run(tmp_path / folder / "run", steps=3).root for folder in ("a", "b")]
    for root in roots:
        (root / "profile.toml").unlink()
    assert [setting.label for setting in by_setting(read_runs(roots))] == ["a/run", "b/run"]


def test_report_of_several_runs_is_one_page(
    roots: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main.run(["report", *map(str, roots), "-o", str(page)]) == 0
    text = page.read_text()
    assert (
        "4 runs on the same axes" in text
        and "Settings that differ" in text
        and "lr 0.0001, 3 runs" in text
    )
    # The page's own script alone: the policy names its digest, so no other runs.
    assert text.count("<script") == 1 and "script-src 'sha256-" in text
    pictures = [
        ElementTree.fromstring(part.partition("</svg>")[0] + "</svg>")
        for part in (f"<svg{rest}" for rest in text.split("<svg")[1:])
    ]
    words = [
        title.text
        for picture in pictures
        for title in picture.iter("{http://www.w3.org/2000/svg}title")
    ]
    assert any(word and word.startswith("step 10\nlr 0.0001, 3 runs: 0.") for word in words), (
        "values to point at"
    )
    assert any(word and word.startswith("tokens ") for word in words) and any(
        word and word.startswith("minutes ") for word in words
    )
