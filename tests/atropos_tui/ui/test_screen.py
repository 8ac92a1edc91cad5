"""The screen of a run at one frozen moment, with a supervisor in memory and real files."""

from __future__ import annotations

import gc
import json
import math
import random
from pathlib import Path

import pytest
from textual.widgets import Static

from atropos_common.protocol.control import (
    GpuStatus,
    NodeStatus,
    Phase,
    Role,
    RunStatus,
    StageStatus,
    State,
)
from atropos_common.protocol.records import (
    DiagnosisRecord,
    EngineGauges,
    StateRecord,
)
from atropos_common.protocol.trainer_records import (
    AlignmentRecord,
    BenchmarkRecord,
    RanksRecord,
    RankUse,
    RolloutRecord,
    StepRecord,
)
from atropos_common.system.run_dir import RunDir
from atropos_tui.diagnoses import node_lost
from atropos_tui.supervisor.client import Refused
from atropos_tui.ui import terminal
from atropos_tui.ui.app import CockpitApp
from atropos_tui.ui.views import VIEWS
from atropos_tui.ui.widgets.components import Components
from tests.atropos_tui.ui.conftest import Screen, cockpit
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, gauges, live_status, make_run, step_records, write_records

NOW = T0 + 31 + 0.33 * 37 + 0.4


def now() -> float:
    return NOW


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


def changed(status: RunStatus, name: str, **fields: object) -> RunStatus:
    """`status` with some fields of one component replaced."""
    rows = [row.model_copy(update=fields) if row.name == name else row for row in status.components]
    return status.model_copy(update={"components": rows})


async def test_garbage_is_collected_while_it_is_looked_at(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "COLLECT_S", 0.05)
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    async with cockpit(run, (80, 24), FakeControl(live_status(run, NOW)), now) as screen:
        await screen.shows("step 37/60")
        await screen.until(lambda: len(collected) > 2)


async def test_ranks_stand_under_their_component(run: RunDir) -> None:
    use = {"tokens": 4096, "peak_bytes": 61 * 10**9, "rss_bytes": 5 * 10**9}
    ranks = [
        RankUse(rank=0, gpu="4", alone_s=0.031, **use),
        RankUse(rank=1, gpu="5", alone_s=0.047, **use),
    ]
    write_records(run.telemetry_jsonl, [RanksRecord(step=37, time=NOW, ranks=ranks)], start=9000)
    async with cockpit(run, (160, 45), FakeControl(live_status(run, NOW)), now) as screen:
        await screen.shows("step 37/60")
        await screen.select("trainer")
        await screen.press("9")
        await screen.shows("rank 0      GPU 4, memory 61.0 GB, 4,096 tokens, alone 31.0 ms")
        await screen.shows(
            "rank 1      GPU 5, memory 61.0 GB, 4,096 tokens, alone 47.0 ms, the slowest"
        )


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (160, 45), (200, 50)])
async def test_everything_that_matters_is_on_the_screen(run: RunDir, size: tuple[int, int]) -> None:
    async with cockpit(run, size, FakeControl(live_status(run, NOW)), now) as screen:
        await screen.shows("step 37/60")
        await screen.shows("probe 4.1e-07")
        expected = [
            "demo",
            "shared_vllm",
            "arithmetic-0.8M",
            "● running",
            "62%",
            "ETA",
            "✔ completed",
            "● healthy",
        ]
        expected += ["prepare", "run-api", "vllm", "env", "trainer", "40014", "1.5 GB", "61%"]
        expected += ["Reward", "0.937", "held-out 0.588", "|diff|", "0.012", "probe 5.1e-07", "Log"]
        expected += ["r Restart", "s Stop/start", "K Kill", "q Quit", "? Help"]
        if size[0] >= 160:
            expected += ["Benchmark", "wait", "tokens/s", "✔ ok", "Rollouts", "answer ← question"]
        for words in expected:
            await screen.shows(words)
        assert len(screen.text().splitlines()) == size[1]


@pytest.mark.parametrize("width", [80, 120, 170])
async def test_accepted_tokens_are_the_headline(run: RunDir, width: int) -> None:
    plan = json.loads(run.plan_json.read_text())
    plan["components"][2]["gpus"] = plan["components"][4]["gpus"] = [0]
    run.plan_json.write_text(json.dumps(plan))
    records = []
    for step in range(38, 58):
        step_record, _, timing, *_ = step_records(step, random.Random(step))
        of_step = {"left_out_tokens": {"too_old": 300, "malformed": 100}}
        of_timing = {"step_s": 1.0, "accepted_tokens_per_s": 4400.0, "generated_tokens": 10_000}
        records += [
            step_record.model_copy(update=of_step),
            timing.model_copy(update=of_timing | {"mfu_peak": 0.41, "mfu": 0.51}),
        ]
    write_records(run.telemetry_jsonl, records, start=9000)
    async with cockpit(run, (width, 45), FakeControl(live_status(run, NOW)), now) as screen:
        await screen.shows("4,400 accepted tokens/s/GPU")
        if width >= 170:
            await screen.shows("thrown away 56%: other 52%, too old 3%, malformed 1%")
        if width >= 120:
            await screen.shows("trainer waits")
        await screen.press("5")
        await screen.shows("accepted        4,400  tokens/s/GPU")
        await screen.shows("41.0%  of peak, 51% of 790")


@pytest.mark.parametrize("size", [(20, 5), (1, 1), (40, 12), (300, 100)])
async def test_no_size_breaks_it(run: RunDir, size: tuple[int, int]) -> None:
    async with cockpit(run, size, FakeControl(live_status(run, NOW)), now) as screen:
        await screen.until(lambda: screen.app.state.step == 37)
        await screen.pilot.resize_terminal(80, 24)
        await screen.shows("step 37/60")


async def test_values_on_screen_equal_those_in_the_file(run: RunDir) -> None:
    last: dict[str, float] = {}
    for line in run.telemetry_jsonl.read_text().splitlines():
        last |= json.loads(line)
    async with cockpit(run, (160, 45), FakeControl(live_status(run, NOW)), now) as screen:
        await screen.shows(f"mean {last['reward_mean']:.3f}")
        await screen.shows(f"rollout {last['logprob_diff_abs_mean']:.3f}")
        await screen.shows(f"probe {last['probe_diff_abs_mean']:.1e}")


async def test_the_header_names_the_run_as_the_list_does(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.run_json.write_text(json.dumps({"run_id": "lr-5e-4", "started_at": T0}))
    plan = json.loads(run.plan_json.read_text()) | {"run_id": "lr-5e-4"}
    run.plan_json.write_text(json.dumps(plan))
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), now) as screen:
        await screen.shows("lr-5e-4  ·  demo  ·  shared_vllm")


async def test_while_starting_it_says_what_is_waited_for_and_how_long(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=0)
    status = live_status(run, NOW, vllm=State.STARTING, trainer=State.PENDING)
    refused = "GET http://127.0.0.1:9001/health: All connection attempts failed"
    stages = [StageStatus(name="its imports", reached_at=NOW - 3), StageStatus(name="its weights")]
    status = changed(
        status,
        "vllm",
        since=NOW - 12.4,
        waiting_for=refused,
        probe_detail=refused,
        healthy=False,
        stages=stages,
    ).model_copy(update={"phase": Phase.STARTING})
    status = changed(status, "trainer", waiting_for="vllm to be healthy")
    async with cockpit(run, (120, 40), FakeControl(status), now) as screen:
        await screen.shows("◔ vllm waits for its weights · 12 s")
        await screen.shows("3/5 up")
        await screen.shows("◔ starting")
        await screen.shows("○ pending")
        assert "connection attempts" not in screen.text() and "fails" not in screen.text()
        await screen.shows("waits for vllm to be healthy")
        await screen.shows("no data")
        table = screen.app.query_one(Components)
        await screen.until(lambda: table.selected is not None and table.selected.name == "vllm")


async def test_no_data_is_never_zero(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=0)
    async with cockpit(run, (160, 45), FakeControl(live_status(run, NOW)), now) as screen:
        await screen.shows("tokens/s")
        rows = {
            line.split()[0]: line
            for line in screen.text().replace("│", "\n").splitlines()
            if line.split()
        }
        for name in ("tokens/s", "steps/h", "lag", "wait"):
            assert "–" in rows[name], name
            assert "0" not in rows[name], name


async def test_nan_is_shown(run: RunDir) -> None:
    write_records(
        run.telemetry_jsonl,
        [
            AlignmentRecord(
                step=38,
                logprob_diff_abs_mean=math.nan,
                probe_diff_abs_mean=4e-7,
                verdict="mismatch",
                cause="NaN in logprobs",
            )
        ],
    )
    async with cockpit(run, (160, 45), FakeControl(live_status(run, NOW)), now) as screen:
        await screen.shows("rollout NaN")
        await screen.shows("×")
        await screen.shows("▲ logprob mismatch")
        await screen.shows("✖ mismatch  NaN in logprobs")


async def test_what_a_model_writes_stays_text(run: RunDir) -> None:
    evil = "[bold red]x[/] \x1b]52;c;ZXZpbA==\x07\x1b[2J</script>\nsecond"
    write_records(
        run.telemetry_jsonl,
        [RolloutRecord(step=38, prompt="[link=x]p", completion=evil, reward=1.0, advantage=0.5)],
    )
    async with cockpit(run, (160, 45), FakeControl(live_status(run, NOW)), now) as screen:
        await screen.press("4")
        await screen.shows("[bold red]x[/] </script>⏎second ← [link=x]p")
        assert not any(ord(char) < 32 and char != "\n" for char in screen.text())


async def test_a_failed_run_says_what_failed_from_its_files(run: RunDir) -> None:
    write_records(
        run.supervisor_jsonl,
        [
            StateRecord(
                time=NOW,
                component="vllm",
                role="engine",
                old="healthy",
                new="failed",
                attempt=4,
                reason="exit code 1",
                exit_code=1,
            ),
            DiagnosisRecord(
                time=NOW, component="vllm", title="[CUDA] out of memory", fix="lower it"
            ),
        ],
        start=10,
    )
    run.result_json.write_text(json.dumps({"exit_code": 3, "reason": "vllm failed for good"}))
    async with cockpit(run, (120, 40), FakeControl(None), now) as screen:
        await screen.shows("failed with code 3: vllm failed for good")
        await screen.shows("✖ failed")
        await screen.shows("[CUDA] out of memory")
        await screen.press("q")
    assert screen.app.return_value == "ended"


async def test_the_end_shows_the_summary(run: RunDir) -> None:
    write_records(
        run.telemetry_jsonl,
        [
            BenchmarkRecord(
                step=37,
                mode="shared_vllm",
                total_s=47.0,
                steps=37,
                avg_step_s=0.3,
                total_step_s=11.0,
                avg_sync_s=0.03,
                syncs=37,
                total_sync_s=1.0,
                avg_data_wait_s=0.1,
                total_data_wait_s=4.0,
                tokens_per_s=1162,
            )
        ],
    )
    run.result_json.write_text(json.dumps({"exit_code": 0, "reason": "trainer finished"}))
    async with cockpit(run, (160, 45), FakeControl(None), now) as screen:
        await screen.shows("✔ done")
        await screen.shows("Benchmark  final, all 37 steps")
        await screen.shows("37 steps")


async def test_a_directory_that_holds_nothing_is_a_message(tmp_path: Path) -> None:
    async with cockpit(RunDir(tmp_path / "nothing"), (80, 24), FakeControl(None), now) as screen:
        await screen.shows("supervisor gone, no result written")
        await screen.press("r", "s", "K", "f", "2", "3", "4", "1", "down", "up")
        await screen.until(
            lambda: any("no component is selected" in toast for toast in screen.toasts())
        )


async def test_foreign_lines_are_counted_on_the_screen(run: RunDir) -> None:
    with run.telemetry_jsonl.open("ab") as file:
        file.write(b'\xff\x00garbage\n{"kind": "step"}\n{"kind": "hologram"}\n{"torn": ')
    async with cockpit(run, (160, 45), FakeControl(live_status(run, NOW)), now) as screen:
        await screen.shows("2 lines of the run's streams skipped: not a valid record")
        await screen.shows("1 records of an unknown kind are not shown")


async def test_new_records_are_drawn_as_they_come(run: RunDir) -> None:
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), now) as screen:
        await screen.shows("step 37/60")
        newest = json.loads(run.telemetry_jsonl.read_text().splitlines()[-9])
        assert newest["kind"] == "step"
        fresh = StepRecord.model_validate(newest | {"step": 38, "reward_mean": 0.123})
        write_records(run.telemetry_jsonl, [fresh])
        await screen.shows("step 38/60", timeout_s=3)
        await screen.shows("━ mean 0.123")


async def test_a_refusal_is_a_toast_with_the_way_out(run: RunDir) -> None:
    control = FakeControl(live_status(run, NOW))
    control.refusal = Refused("vllm [is] stopping", "wait until it has stopped")
    async with cockpit(run, (120, 40), control, now) as screen:
        await screen.shows("● running")
        await screen.press("r")
        await screen.shows("vllm [is] stopping")
        await screen.shows("wait until it has stopped")
        assert control.commands == []


def help_text(screen: Screen) -> str:
    return str(screen.app.screen.query_one(".dialog-text", Static).content)


async def test_help_lists_every_binding_of_the_app(run: RunDir) -> None:
    async with cockpit(run, (120, 50), FakeControl(live_status(run, NOW)), now) as screen:
        await screen.press("question_mark")
        await screen.shows("Keys")
        for binding in CockpitApp.BINDINGS:
            if not binding.system:  # type: ignore[union-attr]
                # Long descriptions go on in the next line.
                words = " ".join(help_text(screen).split())
                assert binding.tooltip in words  # type: ignore[union-attr]
        headings = [line for line in help_text(screen).splitlines() if line and "   " not in line]
        assert headings.index("Views") == headings.index("Everywhere") + 1
        assert headings.index("Log (focus it with tab or a click)") > headings.index("Views")
        assert "1   Overview: Everything" in help_text(screen)
        await screen.press("escape")
        await screen.until(lambda: "Keys" not in screen.text())


VIEW_WORDS = {
    "1": ("Reward", "Summary"),
    "2": ("Gradient", "Log "),
    "3": ("Log ", "Reward"),
    "4": ("answer ← question", "Log "),
    "5": ("Summary", "Rollouts"),
    "6": ("Host  no GPU", "Reward"),
    "7": ("Alignment  step 37", "Rollouts"),
    "8": ("Events  10", "Reward"),
    "9": ("--training-steps 60", "Reward"),
}


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
async def test_number_keys_give_one_subject_the_room(run: RunDir, size: tuple[int, int]) -> None:
    assert len(VIEW_WORDS) == len(VIEWS)
    async with cockpit(run, size, FakeControl(live_status(run, NOW)), now) as screen:
        await screen.shows("step 37/60")
        for key, (there, gone) in [*VIEW_WORDS.items(), ("1", VIEW_WORDS["1"])]:
            await screen.press(key)
            if key == "2" and size[0] < 100:
                # The charts do not fit: its last page has those of throughput.
                await screen.press("tab", *["pagedown"] * 6)
                there = "Tokens/s"
            await screen.until(
                lambda there=there, gone=gone: there in screen.text() and gone not in panels(screen)
            )  # type: ignore[misc]


def panels(screen: Screen) -> str:
    """Return the text between the header and the line of views."""
    line = "\n 0 Runs" if "\n 0 Runs" in screen.text() else "\n 1 "
    return screen.text().rpartition(line)[0]


async def test_the_user_s_choice_of_a_component_stays(run: RunDir) -> None:
    control = FakeControl(live_status(run, NOW))
    async with cockpit(run, (120, 40), control, now) as screen:
        table = screen.app.query_one(Components)
        await screen.until(lambda: table.selected is not None and table.selected.name == "trainer")
        await screen.press("up")
        assert table.selected
        assert table.selected.name == "env"
        control.answer = live_status(run, NOW, vllm=State.FAILED)
        await screen.shows("✖ vllm failed")
        assert table.selected.name == "env"


async def test_the_page_of_an_engine_has_all_engines_side_by_side(run: RunDir) -> None:
    """Version, requests in flight, tokens a second; one that does not answer has dashes."""
    status = live_status(run, NOW)
    vllm = next(row for row in status.components if row.role is Role.ENGINE)
    status.components.append(vllm.model_copy(update={"name": "vllm-b"}))
    engine = {"running": 12, "waiting": 3, "kv_use": 0.41, "weight_version": 37}
    made = {at: 120_000 + 500 * (NOW + at - T0 - 40) for at in (0, 5)}
    records = [
        gauges(NOW + at, engines={"vllm": EngineGauges(**engine, generated_tokens=tokens)})
        for at, tokens in made.items()
    ]
    write_records(run.gauges_jsonl, records)
    async with cockpit(run, (160, 45), FakeControl(status), now) as screen:
        await screen.shows("step 37/60")
        await screen.press("9", "up", "up")
        await screen.shows("engines      version  running  waiting  tokens/s  KV cache")
        await screen.shows(
            "vllm              37       12        3       500       41%", timeout_s=10
        )
        await screen.shows("vllm-b             –        –        –         –         –")


def on_nodes(status: RunStatus, quiet_s: float = 0.4) -> RunStatus:
    """`status` as of a stack on three machines; the last has been quiet for `quiet_s`."""
    where = {"vllm": "infer", "trainer": "train"}
    rows = [
        row.model_copy(update={"node": where.get(row.name, "head")}) for row in status.components
    ]
    use = {"cpu_percent": 37.0, "memory_used": 12 * 10**9, "memory_total": 64 * 10**9}
    nodes = [
        NodeStatus(name="head", host="n1", address="10.0.0.1", heard_at=NOW, **use),
        NodeStatus(name="infer", host="n2", address="10.0.0.2", gpus=2, heard_at=NOW - 0.4, **use),
        NodeStatus(name="train", host="n3", address="10.0.0.3", gpus=2, heard_at=NOW - quiet_s),
    ]
    card = {
        "name": "NVIDIA H200",
        "used_bytes": 70 * 10**9,
        "total_bytes": 140 * 10**9,
        "utilization_percent": 80,
    }
    gpus = [
        GpuStatus(index=index, node=node, **card) for node in ("infer", "train") for index in (0, 1)
    ]
    return status.model_copy(update={"components": rows, "nodes": nodes, "gpus": gpus})


async def test_nodes_are_a_column_and_a_panel(run: RunDir) -> None:
    async with cockpit(run, (160, 45), FakeControl(on_nodes(live_status(run, NOW))), now) as screen:
        await screen.shows("step 37/60")
        await screen.until(
            lambda: any(line.split()[:2] == ["component", "node"] for line in table(screen))
        )
        await screen.until(
            lambda: any(line.split()[:2] == ["vllm", "infer"] for line in table(screen))
        )
        await screen.press("6")
        await screen.shows("head   CPU  37%  memory 12.0/64.0 GB  0 GPUs  heard 0.0 s ago")
        await screen.shows("infer  CPU  37%  memory 12.0/64.0 GB  2 GPUs 80%  heard 0.4 s ago")
        await screen.shows("train  CPU    –  memory –  2 GPUs 80%  heard 0.4 s ago")
        await screen.shows("train 1")


def table(screen: Screen) -> list[str]:
    """The lines of the components' table, without its frame."""
    return [line.strip("│┃ ").strip() for line in screen.text().splitlines()]


async def test_one_machine_has_no_column_and_no_panel_of_nodes(run: RunDir) -> None:
    async with cockpit(run, (160, 45), FakeControl(live_status(run, NOW)), now) as screen:
        await screen.shows("step 37/60")
        await screen.press("6")
        assert not any(line.split()[:2] == ["component", "node"] for line in table(screen))
        assert "Nodes" not in screen.text()


async def test_a_lost_node_is_the_sentence_and_says_what_is_done(run: RunDir) -> None:
    said = node_lost("node train (n3): nothing was heard from there for 20 s")
    lost = DiagnosisRecord(
        time=NOW - 1,
        component="trainer",
        rule=said.rule,
        severity=said.severity,
        title=said.title,
        evidence=said.evidence,
        fix=said.fix,
    )
    write_records(run.supervisor_jsonl, [lost], start=100)
    status = changed(
        on_nodes(live_status(run, NOW), 21.0), "trainer", state=State.STARTING, diagnosis=said.title
    )
    async with cockpit(run, (160, 45), FakeControl(status), now) as screen:
        await screen.shows(
            "✖ node train (n3) was lost, or could not be reached; check the node, its network"
        )
        await screen.press("6")
        await screen.shows("heard 21 s ago")
        await screen.shows("trainer  node train (n3) was lost")
