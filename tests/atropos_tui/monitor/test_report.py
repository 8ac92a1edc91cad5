"""The report: one self-contained, well-formed page with the run's own values, for any content of
its files."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import time
from pathlib import Path
from xml.etree import ElementTree

import html5lib
import pytest

from atropos_common.protocol.control import State
from atropos_common.protocol.records import (
    CommandRecord,
    DiagnosisRecord,
    StateRecord,
)
from atropos_common.protocol.trainer_records import (
    BenchmarkRecord,
    RolloutRecord,
    StepRecord,
)
from atropos_common.system.run_dir import LATEST_TIME, RunDir
from atropos_tui.monitor.charts import PAGE
from atropos_tui.monitor.format import number
from atropos_tui.monitor.report import exit_words, lanes, render_report
from atropos_tui.monitor.report_charts import POINTS, charts, draw
from atropos_tui.monitor.run.run_files import load_run, status_from_files
from atropos_tui.monitor.run.series import Series, averaged, thin
from atropos_tui.monitor.run.state import RunState
from tests.support.run_maker import T0, live_status, make_run, step_records, write_records

XHTML = "{http://www.w3.org/1999/xhtml}"
SYSTEM = ("Requests at the engines", "KV cache", "run-api queue", "CPU")
"""Charts of what the supervisor recorded of the machine, in a run without a GPU."""
SVG = "{http://www.w3.org/2000/svg}"
NASTY = (
    "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)> "
    "\x1b[31mred\x1b[0m"
)
CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"


def page_of(run: RunDir) -> str:
    info, state, _ = load_run(run.root)
    return render_report(run, status_from_files(run, info, state), time.time())


def parsed(page: str) -> ElementTree.Element:
    """The page as a tree; fails where HTML5 knows an error in it."""
    return html5lib.HTMLParser(tree=html5lib.getTreeBuilder("etree"), strict=True).parse(page)


def text_of(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def table_rows(tree: ElementTree.Element) -> list[list[str]]:
    return [[text_of(cell) for cell in row] for row in tree.iter(f"{XHTML}tr")]


def assert_self_contained(tree: ElementTree.Element) -> None:
    """One script, which the policy names; no handler, and no reference that leaves the page."""
    (script,) = (one for one in tree.iter() if str(one.tag).rpartition("}")[2] == "script")
    digest = base64.b64encode(hashlib.sha256((script.text or "").encode()).digest()).decode()
    for outside in ("http:", "https:", "fetch", "XMLHttpRequest", "import(", "eval"):
        assert outside not in (script.text or "").replace("http://www.w3.org/2000/svg", "")
    for element in tree.iter():
        name = str(element.tag).rpartition("}")[2]
        assert name not in (
            "link",
            "iframe",
            "object",
            "embed",
            "img",
            "image",
            "base",
            "form",
        )
        for key, value in element.attrib.items():
            attribute = str(key).rpartition("}")[2].rpartition(":")[2]
            assert not attribute.startswith("on"), attribute
            if attribute in ("src", "href", "srcset", "action", "data"):
                assert value.startswith("#"), value
            assert "url(" not in value or "url(#" in value
    styles = "".join(element.text or "" for element in tree.iter(f"{XHTML}style"))
    assert "url(" not in styles
    assert "@import" not in styles
    policy = next(meta for meta in tree.iter(f"{XHTML}meta") if meta.get("http-equiv"))
    assert policy.get("content") == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:"
    )


def assert_ids_are_unique(tree: ElementTree.Element) -> None:
    ids = [element.get("id") for element in tree.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    for element in tree.iter():
        for key, value in element.attrib.items():
            for target in (
                re.findall(r"^#(.+)$|url\(#([^)]+)\)", value) if str(key) != "style" else []
            ):
                assert (target[0] or target[1]) in ids, value
            for names in [value.split()] if str(key) == "aria-labelledby" else []:
                assert set(names) <= set(ids)


def test_the_page_is_well_formed_self_contained_and_has_the_runs_values(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=37)
    run.result_json.write_text(json.dumps({"exit_code": 0, "reason": "trainer finished"}))
    run.run_json.write_text(
        json.dumps(
            {
                "run_id": "demo-test",
                "started_at": T0,
                "host": "box",
                "seed": 11,
                "versions": {"torch": "2.13.0"},
                "git": {"commit": "abc123", "dirty": True},
            }
        )
    )
    write_records(
        run.telemetry_jsonl,
        [
            BenchmarkRecord(
                step=37,
                mode="shared_vllm",
                total_s=168.65,
                steps=37,
                avg_step_s=11.95,
                total_step_s=59.76,
                avg_sync_s=0.03,
                syncs=37,
                total_sync_s=1.1,
                avg_data_wait_s=10.9,
                total_data_wait_s=54.52,
                peak_bytes=31_440_000_000,
                avg_bytes=18_880_000_000,
                tokens_per_s=1234.5,
            )
        ],
    )
    page = page_of(run)
    tree = parsed(page)
    assert_self_contained(tree)
    assert_ids_are_unique(tree)
    _, state, _ = load_run(run.root)
    whole = text_of(tree)
    for words in (
        "✔ done",
        "37 of 60",
        'mode = "shared_vllm"',
        number(state.metric("reward_mean").last),
    ):
        assert words in whole
    rows = table_rows(tree)
    for row in (
        ["Avg step time", "11.95s"],
        ["Total training time", "168.65s (2.81 min)"],
        ["Peak GPU memory", "31.44 GB"],
        ["Host", "box"],
        ["Seed", "11"],
        ["torch", "2.13.0"],
        ["Git commit", "abc123 with changes"],
        ["End", "done (0)"],
    ):
        assert row in rows
    assert any(row[1:] == ["vllm", "● healthy", "probe passed from starting"] for row in rows)
    newest = state.rollouts[-1]
    assert [
        newest.completion,
        number(newest.reward),
        number(newest.advantage),
        "1",
        number(newest.tokens, 0),
    ] in rows


def test_rollouts_stand_in_whole_groups_best_first_with_the_spread_of_their_rewards(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run", steps=0)
    system = "<|im_start|>system\nYou add.<|im_end|>\n<|im_start|>user\nWhat is the sum of "
    groups = [
        RolloutRecord(
            step=step,
            env="sums",
            prompt=f"{system}{step} and 1?<|im_end|>\n",
            completion=f"step {step}: {reward:g}",
            reward=reward,
            advantage=reward - 0.5,
            group_size=16,
        )
        for step in (1, 2, 3)
        for reward in ([0.0] * 15 + [1.0] if step > 1 else [0.0] * 16)
    ]
    write_records(run.telemetry_jsonl, groups)
    tree = parsed(page_of(run))
    (section,) = [
        each for each in tree.iter(f"{XHTML}section") if each.get("aria-labelledby") == "rollouts"
    ]
    shown = [
        text_of(each)
        for each in section.iter(f"{XHTML}summary")
        if "whole prompt" not in text_of(each)
    ]
    assert shown == ["Step 3 · sums …3 and 1?", "Step 2 · sums …2 and 1?"], (
        "16 of the third would be too many"
    )
    rows = [text_of(row) for row in section.iter(f"{XHTML}tr") if "Completion" not in text_of(row)]
    assert len(rows) == 32 and rows[0].startswith("step 3: 1") and rows[1].startswith("step 3: 0")
    words = [text_of(each) for each in section.iter(f"{XHTML}p")]
    assert "16 completions, rewards from 0.000 to 1.000, mean 0.062 ± 0.242" in words[1], words
    places = [each.get("style") for each in section.iter(f"{XHTML}i")]
    assert places.count("left: 0.0%") == 30 and places.count("left: 100.0%") == 2


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_leaves_the_spread_to_the_others(
    tmp_path: Path, reward: float
) -> None:
    run = make_run(tmp_path / "run", steps=0)
    rollouts = [
        RolloutRecord(
            step=step, env="sums", prompt="1 + 1?", completion=f"{one}", reward=one, advantage=0.0
        )
        for step, rewards in ((1, [reward]), (2, [0.0, reward, 1.0]))
        for one in rewards
    ]
    write_records(run.telemetry_jsonl, rollouts)
    tree = parsed(page_of(run))
    words = [text_of(each) for each in tree.iter(f"{XHTML}p")]
    whole = (
        "3 completions, 1 without a finite reward, rewards from 0.000 to 1.000, mean 0.500 ± 0.500"
    )
    assert any(whole in each for each in words), words
    assert any(each.startswith("1 completion, 1 without a finite reward") for each in words), words
    rows = [
        text_of(row) for row in tree.iter(f"{XHTML}tr") if text_of(row).startswith(("0.0", "1.0"))
    ]
    assert [row[:3] for row in rows] == ["1.0", "0.0"], "best first, whatever stands between"
    assert [each.get("style") for each in tree.iter(f"{XHTML}i") if each.get("style")] == [
        "left: 0.0%",
        "left: 100.0%",
    ]


def test_every_chart_is_an_accessible_picture_with_the_last_value_beside_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20)
    _, state, _ = load_run(run.root)
    tree = parsed(page_of(run))
    titles = []
    for picture in tree.iter(f"{SVG}svg"):
        assert picture.get("role") == "img"
        title, description = picture.find(f"{SVG}title"), picture.find(f"{SVG}desc")
        assert title is not None and title.text and description is not None and description.text
        titles.append(title.text)
    assert titles == [
        "Reward",
        "Useful groups",
        "Loss",
        "Learning rate",
        "Ratio",
        "Ratio max",
        "Clip fraction",
        "Entropy",
        "Completion tokens",
        "Cut off",
        "Gradient norm",
        "Policy lag",
        "Logprobs",
        "Logprob |diff|",
        "KL",
        "Tokens per second",
        "Trainer memory",
        "Where a step's time goes",
        *SYSTEM,
    ]
    legends = [text_of(item) for item in tree.iter(f"{XHTML}li")]
    for label, metric in (
        ("loss", "loss"),
        ("norm", "grad_norm"),
        ("trainer", "train_mean"),
        ("k3", "kl_k3"),
    ):
        assert any(
            words.startswith(f"{label} {number(state.metric(metric).last)} ") for words in legends
        ), label
    for table in tree.iter(f"{XHTML}table"):
        assert all(cell.get("scope") for cell in table.iter(f"{XHTML}th"))


def test_curves_are_drawn_where_the_values_are(tmp_path: Path) -> None:
    """Read back from the picture: the highest loss is the highest point of the line."""
    run = make_run(tmp_path / "run", steps=30)
    _, state, _ = load_run(run.root)
    tree = parsed(page_of(run))
    picture = next(svg for svg in tree.iter(f"{SVG}svg") if svg.find(f"{SVG}title").text == "Loss")  # type: ignore[union-attr]
    drawn = [
        path.get("d", "")
        for path in picture.iter(f"{SVG}path")
        if "var(--c1)" in (path.get("style") or "")
    ]
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", max(drawn, key=len))]
    values = state.metric("loss").values
    assert len(points) == len(values) == 30
    ys = [y for _, y in points]
    assert ys.index(min(ys)) == values.index(max(values))
    assert ys.index(max(ys)) == values.index(min(values))


def test_what_models_and_programs_wrote_stays_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    nasty = f"[bold]{NASTY}{CLIPBOARD} {{{{ 7*7 }}}} $x^2$ hf_abcdefghijklmnopqrstuvwxyz"
    write_records(
        run.telemetry_jsonl,
        [
            RolloutRecord(
                step=3,
                env=nasty,
                prompt=f"first\n{nasty}",
                completion=nasty,
                reward=1.0,
                advantage=math.nan,
            )
        ],
    )
    half = {
        "kind": "rollout",
        "step": 3,
        "prompt": "half \ud800",
        "completion": "",
        "reward": 1.0,
        "advantage": 0.0,
    }
    with run.telemetry_jsonl.open("a") as file:
        file.write(json.dumps(half) + "\n")
    more = [
        DiagnosisRecord(time=T0 + 40, component="trainer", title=nasty, evidence=nasty, fix=nasty),
        StateRecord(time=T0 + 41, component=nasty, old=nasty, new=nasty, reason=nasty),
        CommandRecord(
            time=T0 + 42, command_id="c", action=nasty, status="done", initiator=nasty, detail=nasty
        ),
    ]
    write_records(run.supervisor_jsonl, list(more), start=100)
    run.eval_jsonl("x").write_text(
        json.dumps(
            {
                "kind": "eval",
                "env": nasty,
                "accuracy": 0.5,
                "correct": 1,
                "questions": 2,
                "weight_version": 2,
            }
        )
        + "\n"
    )
    run.profile_toml.write_text(f"# {NASTY}\n", errors="replace")
    run.run_json.write_text(
        json.dumps({"run_id": nasty, "host": nasty, "versions": {nasty: nasty}})
    )
    page = page_of(run)
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", page)
    assert "ZXZpbA" not in page
    assert "hf_abcdef" not in page
    tree = parsed(page)
    assert_self_contained(tree)
    shown = [text_of(cell) for cell in tree.iter(f"{XHTML}td")]
    expected = (
        "[bold]</script><script>alert(1)</script><img src=http://evil.example/x "
        "onerror=alert(2)> red {{ 7*7 }}"
    )
    assert any(words.startswith(expected) for words in shown)
    assert any(text_of(each).startswith(f"first {expected}") for each in tree.iter(f"{XHTML}pre"))
    assert "1 line of the streams left out" in text_of(tree), (
        "no writer can write half a pair again"
    )


def test_a_configuration_that_leads_elsewhere_is_left_out(tmp_path: Path) -> None:
    """The page is passed on: it held what a link in the run's folder led to."""
    run = make_run(tmp_path / "run", steps=3)
    secret = tmp_path / "secret"
    secret.write_text("victim-private-line-42\n")
    shown = run.profile_toml.read_text().splitlines()[0]
    assert shown in text_of(parsed(page_of(run)))
    run.profile_toml.unlink()
    run.profile_toml.symlink_to(secret)
    page = page_of(run)
    assert "victim-private-line-42" not in page


def test_a_run_without_telemetry_and_one_without_anything_say_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=0)
    run.telemetry_jsonl.unlink()
    run.eval_jsonl("arithmetic").unlink()
    run.gauges_jsonl.unlink()
    run.result_json.write_text(
        json.dumps({"exit_code": 3, "reason": "vllm failed", "component": "vllm"})
    )
    tree = parsed(page_of(run))
    words = text_of(tree)
    assert "✖ a component failed (3)" in words
    assert "The trainer has written no telemetry" in words
    assert ["Reason", "vllm failed"] in table_rows(tree)
    assert not list(tree.iter(f"{SVG}svg"))
    empty = RunDir(tmp_path / "empty")
    empty.create()
    tree = parsed(page_of(empty))
    assert "no components recorded" in text_of(tree)
    assert "holds no readable profile.toml" in text_of(tree)


def test_a_live_run_is_told_as_live(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=5)
    now = T0 + 60
    page = render_report(run, live_status(run, now, vllm=State.UNHEALTHY), now)
    words = text_of(parsed(page))
    assert "● running" in words
    assert "▲ unhealthy" in words
    assert "1:00" in words


FOREIGN_LINES = [
    b"\x00\xff\xfe\n",
    b"{}\n",
    b"[" * 100_000 + b"\n",
    b'{"kind": "step"}\n',
    b'{"kind": "hologram", "v": 99, "step": 4}\n',
    b"x" * (5 * 1024 * 1024) + b"\n",
    b'{"kind": "step", "step": 12, "rew',
]


def test_torn_foreign_newer_and_endless_lines_are_counted_not_fatal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=5)
    with run.telemetry_jsonl.open("ab") as file:
        file.writelines(FOREIGN_LINES)
    tree = parsed(page_of(run))
    words = text_of(tree)
    assert "5 lines of the streams left out: torn, foreign or too long" in words
    assert "Records claim schema version 99; this version reads 1" in words
    assert "1 record of unknown kinds" in words
    for path in (run.profile_toml, run.run_json, run.plan_json, run.result_json):
        path.write_bytes(b"\xff\x00[[[")
    parsed(page_of(run))


@pytest.mark.parametrize(
    "value",
    [
        "NaN",
        -1e308,
        *(
            pytest.param(value, marks=pytest.mark.slow)
            for value in ("Infinity", "-Infinity", 1e308, 0.0, 5e-324)
        ),
    ],
)
def test_any_figure_can_be_drawn(tmp_path: Path, value: object) -> None:
    run = make_run(tmp_path / "run", steps=0)
    lines = []
    for step in range(1, 6):
        for record in step_records(step, random.Random(step)):
            data = json.loads(record.to_line())
            changed = value if step > 2 else None
            for key in list(data):
                if (
                    changed is not None
                    and isinstance(data[key], float)
                    and key not in ("time", "reward", "advantage")
                ):
                    data[key] = changed
            lines.append(json.dumps(data))
    run.telemetry_jsonl.write_text("\n".join(lines) + "\n")
    page = page_of(run)
    tree = parsed(page)
    assert len(list(tree.iter(f"{SVG}svg"))) == len(PAGE) + 1 + len(SYSTEM)
    finite = isinstance(value, float) and abs(value) < 1e300
    assert ("NaN, infinite or beyond any scale: crosses" in text_of(tree)) != finite
    assert ">nan<" not in page


def test_steps_and_times_beyond_any_clock_do_not_stop_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    step = json.loads(step_records(5, random.Random(1))[0].to_line())
    with run.telemetry_jsonl.open("a") as file:
        for changes in (
            {"step": 10**400},
            {"step": 10**30},
            {"tokens": 10**400, "v": 10**400},
            {"groups": 1, "flat_groups": 10**400},
            {"step": -7},
            {"time": 1e300},
            {"time": "NaN"},
            {"time": -5.0},
        ):
            file.write(json.dumps(step | changes) + "\n")
        file.write(
            json.dumps(
                {"kind": "memory", "step": 5, "rss_bytes": 10**400, "allocated_bytes": 10**400}
            )
            + "\n"
        )
    far = StateRecord(
        time=LATEST_TIME, component="vllm", old="healthy", new="failed", reason="far away"
    )
    write_records(run.supervisor_jsonl, [far], start=50)
    run.run_json.write_text(
        json.dumps(json.loads(run.run_json.read_text()) | {"started_at": 10**400})
    )
    assert "far away" in text_of(parsed(page_of(run)))


@pytest.mark.slow
def test_fifty_thousand_records_keep_their_spikes_on_a_small_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=0)
    rng = random.Random(3)
    records = [record for step in range(1, 5_556) for record in step_records(step, rng)]
    assert len(records) >= 49_990
    spike = next(
        at
        for at, record in enumerate(records)
        if isinstance(record, StepRecord) and record.step == 4_321
    )
    records[spike] = records[spike].model_copy(update={"grad_norm": 987.5})
    write_records(run.telemetry_jsonl, records)
    page = page_of(run)
    tree = parsed(page)
    assert "5,555 points, thinned; every slice keeps its extremes." in text_of(tree)
    assert len(page) < 3_000_000
    _, state, _ = load_run(run.root)
    norm = next(chart for chart in charts(state) if chart.name == "Gradient norm").lines[0]
    assert len(norm.points) <= POINTS + 2
    assert norm.points.values[norm.points.steps.index(4_321)] == 987.5
    assert norm.span.endswith("987.5")


def test_thinning_keeps_first_last_extremes_and_gaps() -> None:
    steps = list(range(1, 10_001))
    values = [math.sin(step) for step in steps]
    values[5_000], values[7_000], values[8_000] = 50.0, -50.0, math.nan
    small = thin(Series(steps, values, [0.0] * len(steps)), 100)
    assert len(small) <= 103
    assert (small.steps[0], small.steps[-1]) == (1, 10_000)
    assert list(small.steps) == sorted(small.steps)
    assert 50.0 in small.values and -50.0 in small.values
    assert small.steps[[math.isnan(value) for value in small.values].index(True)] == 8_001
    few = Series([1, 2], [1.0, 2.0], [0.0, 0.0])
    assert thin(few, 100) is few
    means = averaged(Series(steps, [float(step) for step in steps], [0.0] * len(steps)), 10)
    assert (len(means), means.steps[0], means.values[0]) == (10, 1, 500.5)


def test_lanes_are_the_states_over_time() -> None:
    state = RunState()
    for seq, (at, old, new) in enumerate(
        [
            (0, "pending", "starting"),
            (10, "starting", "healthy"),
            (60, "healthy", "backoff"),
            (80, "backoff", "failed"),
        ]
    ):
        state.apply(StateRecord(time=T0 + at, seq=seq, component="vllm", old=old, new=new))
    [lane] = lanes(state, T0 + 100)
    assert [(round(left), round(width), word) for left, width, word, _ in lane.bars] == [
        (0, 10, "starting"),
        (10, 50, "healthy"),
        (60, 20, "backoff"),
        (80, 20, "failed"),
    ]


def test_a_restart_is_marked_and_what_it_undid_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10)
    rng = random.Random(1)
    write_records(
        run.telemetry_jsonl,
        [r for step in range(8, 13) for r in step_records(step, rng, attempt=2)],
    )
    _, state, _ = load_run(run.root)
    assert {
        tuple(mark.step for mark in chart.marks if mark.kind == "restart")
        for chart in charts(state)
    } == {(8,)}
    assert "The trainer was started 2 times" in text_of(parsed(page_of(run)))


CHROMIUM = os.environ.get("CHROME_BIN") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)


@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: apt-get install chromium, or set CHROME_BIN to one"
)
def test_chromium_opens_it_without_an_error_or_a_request(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=12)
    write_records(
        run.telemetry_jsonl,
        [RolloutRecord(step=12, prompt=NASTY, completion=NASTY, reward=1.0, advantage=0.0)],
    )
    page = tmp_path / "run.html"
    page.write_text(page_of(run))
    log = tmp_path / "net.json"
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
            f"--screenshot={tmp_path / 'page.png'}",
            "--window-size=1280,2400",
            "--dump-dom",
            f"--log-net-log={log}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    assert (tmp_path / "page.png").stat().st_size > 50_000
    tree = html5lib.parse(done.stdout)
    assert_self_contained(tree)
    assert len(list(tree.iter(f"{SVG}svg"))) == len(PAGE) + 1 + len(SYSTEM)
    assert "evil.example" not in log.read_text()


def test_a_chart_has_the_scales_that_the_script_zooms_by(tmp_path: Path) -> None:
    _, state, _ = load_run(make_run(tmp_path / "run").root)
    chart = charts(state)[0]
    picture = ElementTree.fromstring(draw(chart, "one"))
    plot = json.loads(picture.get("data-plot", ""))
    left, top, right, bottom = plot["box"]
    view = [float(number) for number in picture.get("viewBox", "").split()]
    assert 0 < left < right <= view[2] and 0 < top < bottom < view[3]
    ids = {element.get("id", "") for element in picture.iter()}
    assert {"one-noisy-1", "one-axes_1"} <= ids
    curve = next(one for one in picture.iter() if one.get("id") == "one-noisy-1")
    path = next(one for one in curve.iter() if str(one.tag).endswith("path"))
    xs = [float(x) for x, _ in re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))]
    low, high = plot["x"]
    first = low + (xs[0] - left) / (right - left) * (high - low)
    assert first == pytest.approx(chart.lines[0].points.steps[0], abs=0.2)


def test_the_model_is_named_by_its_path(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    facts = json.loads(run.run_json.read_text()) | {"model": "${ATROPOS_CACHE}/tiny"}
    run.run_json.write_text(json.dumps(facts))
    plan = {"components": [{"command": ["python", "-m", "vllm_server", "--model", "/cache/tiny"]}]}
    run.plan_json.write_text(json.dumps(plan))
    assert ["Model", "/cache/tiny"] in table_rows(parsed(page_of(run)))


def test_evaluations_stand_only_beside_accuracies(tmp_path: Path) -> None:
    """They stood under all charts, two splits side by side, and hid the restarts."""
    _, state, _ = load_run(make_run(tmp_path / "run").root)
    found = {
        chart.name
        for chart in charts(state)
        if any(mark.kind == "evaluation" for mark in chart.marks)
    }
    assert found == {"Reward"}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "–"),
        (0, "ended normally"),
        (3, "error, exit code 3"),
        (-15, "stopped (SIGTERM)"),
        (143, "stopped (SIGTERM)"),
        (-9, "killed (SIGKILL)"),
        (139, "crashed (SIGSEGV)"),
        (250, "error, exit code 250"),
    ],
)
def test_an_exit_code_is_told_in_words(code: int | None, words: str) -> None:
    assert exit_words(code) == words
