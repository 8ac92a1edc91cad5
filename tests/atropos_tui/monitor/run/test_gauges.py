"""Gauges from foreign texts, rates from counters, and the users of GPU and host memory."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_common.protocol.bridge import METRIC_VERSION
from atropos_common.protocol.control import (
    ComponentStatus,
    GpuStatus,
    Phase,
    Role,
    RunStatus,
    State,
)
from atropos_common.protocol.record_tail import RecordTail
from atropos_common.protocol.records import (
    ComponentUse,
    EngineGauges,
    GaugesRecord,
    HostUse,
)
from atropos_tui.diagnoses.stall_rules import Flow
from atropos_tui.monitor.run.gauges import (
    KEPT,
    NEWEST,
    GaugeHistory,
    Share,
    Split,
    cells,
    split_cpu,
    split_gpu,
    split_memory,
)
from atropos_tui.supervisor import gauges
from atropos_tui.supervisor.gauges import DENSE, GaugeReader, GaugesFile, parse_metrics, parse_queue

PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m }x"} 12.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0"} 0.4
vllm:kv_cache_usage_perc{engine="1"} 0.2
vllm:prefix_cache_queries_total{engine="0"} 1000.0
vllm:prefix_cache_hits_total{engine="0"} 880.0
vllm:prompt_tokens_total{engine="0"} 5e+02
vllm:generation_tokens_total{engine="0"} 2000.0
vllm:generation_tokens_created{engine="0"} 1.7e+09
python_gc_objects_collected_total{generation="0"} 1.0
"""


def test_a_metrics_page_of_two_engines() -> None:
    found = parse_metrics(PAGE)
    assert (found.running, found.waiting, found.kv_use) == (15.0, 4.0, pytest.approx(0.3))
    assert (found.prefix_queries, found.prefix_hits) == (1000.0, 880.0)
    assert (found.prompt_tokens, found.generated_tokens) == (500.0, 2000.0)


def test_the_version_of_the_weights_is_read() -> None:
    assert (
        parse_metrics(
            f"{PAGE}# TYPE {METRIC_VERSION} gauge\n{METRIC_VERSION} 12.0\n"
        ).weight_version
        == 12.0
    )
    assert parse_metrics(PAGE).weight_version is None


def test_a_page_without_labels() -> None:
    assert parse_metrics("vllm:num_requests_running 7\n").running == 7.0


@given(st.text())
def test_no_text_breaks_the_parsers(text: str) -> None:
    parse_metrics(text)
    parse_metrics(f"vllm:num_requests_running{text}")
    parse_queue(text)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"queue_size": null}', '{"queue_size": "3"}', '{"queue_size": true}']
)
def test_what_is_no_queue_is_none(text: str) -> None:
    assert parse_queue(text) is None


def test_the_queue_of_run_api() -> None:
    assert parse_queue('{"current_step": 4, "queue_size": 3}') == 3


def sampled(at: float, generated: float, hits: float = 0.0, queries: float = 0.0) -> GaugesRecord:
    metrics = EngineGauges(generated_tokens=generated, prefix_hits=hits, prefix_queries=queries)
    return GaugesRecord(time=at, engines={"vllm": metrics}, queue=int(at))


def test_counters_become_rates_over_the_window() -> None:
    history = GaugeHistory()
    for at in range(30):
        history.add(sampled(at, 100.0 * at, 8.0 * at, 10.0 * at))
    rates = history.rates("vllm")
    assert rates
    assert rates.generated_per_s == pytest.approx(100.0)
    assert rates.prefix_hit_rate == pytest.approx(0.8)
    assert history.rates("another") is None
    assert history.queue()[1] == [float(at) for at in range(30)]


def test_one_sample_has_no_rate_and_a_counter_that_began_anew_has_no_negative_one() -> None:
    history = GaugeHistory()
    history.add(sampled(0, 1000.0))
    assert history.rates("vllm")
    assert history.rates("vllm").generated_per_s is None  # type: ignore[union-attr]
    history.add(sampled(2, 60.0))
    assert history.rates("vllm").generated_per_s == pytest.approx(30.0)  # type: ignore[union-attr]


def test_an_engine_that_does_not_answer_now_has_no_rates() -> None:
    history = GaugeHistory()
    history.add(sampled(0, 1.0))
    history.add(GaugesRecord(time=1.0))
    assert history.rates("vllm") is None


def test_the_history_is_bounded_and_a_clock_set_back_starts_anew() -> None:
    history = GaugeHistory()
    for at in range(10 * KEPT):
        history.add(sampled(at, 0))
        assert len(history.samples) <= 1440
    times = [sample.time for sample in history.samples]
    assert times[-NEWEST:] == [float(at) for at in range(10 * KEPT - NEWEST, 10 * KEPT)]
    assert times[0] == 0.0, "it still covers the whole run"
    assert times == sorted(times)
    history.add(sampled(5, 0))
    assert len(history.samples) == 1


ROWS = [
    ComponentStatus(
        name="vllm",
        role=Role.ENGINE,
        state=State.HEALTHY,
        pid=1,
        cpu_percent=150.0,
        memory_bytes=2000,
    ),
    ComponentStatus(
        name="trainer",
        role=Role.TRAINER,
        state=State.HEALTHY,
        pid=2,
        cpu_percent=50.0,
        memory_bytes=1000,
    ),
]
BOTH = {"vllm": [0], "trainer": [0]}


def gpu(**held: int) -> GpuStatus:
    return GpuStatus(index=0, used_bytes=90, total_bytes=150, held_bytes=held)


def test_a_gpu_is_split_by_component_with_the_rest_as_other() -> None:
    split = split_gpu(gpu(vllm=60, trainer=12), ROWS, BOTH, 5.0)
    assert split.parts == [Share("vllm", 60), Share("trainer", 12), Share("other", 18)]
    assert split.note == ""


def test_where_the_driver_tells_nothing_apart_the_trainer_speaks_for_itself() -> None:
    split = split_gpu(gpu(), ROWS, BOTH, 30.0)
    assert split.parts == [Share("trainer", 30.0), Share("vllm + other", 60.0)]
    assert "does not tell" in split.note


def test_a_trainer_on_two_gpus_is_not_told_for_one() -> None:
    split = split_gpu(gpu(), ROWS, {"vllm": [1], "trainer": [0, 1]}, 30.0)
    assert split.parts == [Share("trainer + other", 90.0)]


def test_a_gpu_that_nobody_of_ours_has() -> None:
    split = split_gpu(gpu(), ROWS, {}, None)
    assert (split.parts, split.note) == ([Share("other", 90.0)], "")


def test_the_host_is_split_by_component() -> None:
    host = HostUse(cpu_percent=50.0, cores=8.0, memory_used=10_000, memory_total=64_000)
    memory, cpu = split_memory(ROWS, host), split_cpu(ROWS, host)
    assert memory
    assert memory.parts[-1] == Share("other", 7000)
    assert cpu
    assert (cpu.total, cpu.used, cpu.parts[-1]) == (800.0, 400.0, Share("other", 200.0))
    assert split_memory(ROWS, HostUse()) is None
    assert split_cpu(ROWS, HostUse()) is None


@given(st.lists(st.floats(0, 1e12), max_size=8), st.floats(0.001, 1e12), st.integers(0, 300))
def test_cells_fill_never_more_than_the_bar(amounts: list[float], total: float, width: int) -> None:
    split = Split([Share(str(at), amount) for at, amount in enumerate(amounts)], total)
    found = cells(split, width)
    assert len(found) == len(amounts)
    assert all(count >= 0 for count in found)
    assert sum(found) <= width


def test_small_parts_are_seen() -> None:
    assert cells(Split([Share("a", 1), Share("b", 500), Share("c", 1)], 1000), 20) == [1, 9, 1]


class Pages(http.server.BaseHTTPRequestHandler):
    """An engine on /metrics, run-api on /status."""

    def do_GET(self) -> None:
        body = PAGE.encode() if self.path == "/metrics" else b'{"current_step": 1, "queue_size": 5}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


def status(port: int, dead: int) -> RunStatus:
    rows = [
        ComponentStatus(name="run-api", role=Role.API, state=State.HEALTHY, port=port),
        ComponentStatus(name="vllm", role=Role.ENGINE, state=State.HEALTHY, port=port),
        ComponentStatus(name="dead", role=Role.ENGINE, state=State.HEALTHY, port=dead),
        ComponentStatus(name="stopped", role=Role.ENGINE, state=State.STOPPED, port=port),
    ]
    return RunStatus(
        run_id="r",
        name="n",
        mode="none",
        run_dir="",
        phase=Phase.RUNNING,
        started_at=0,
        components=rows,
    )


def test_the_sampler_reads_who_answers_and_leaves_out_who_does_not(
    port: int, tmp_path: Path
) -> None:
    rows = status(port, dead=1).components
    sampler = GaugeReader({row.name: f"http://127.0.0.1:{row.port}" for row in rows})
    found = sampler.read(
        status(port, dead=1), {"env": Flow(seconds=9.0, waiting=0.5, idle=0.25, sent=3)}, tmp_path
    )
    sampler.close()
    assert found.flows["env"].model_dump(include={"made", "waiting", "idle"}) == {
        "made": 3,
        "waiting": 0.5,
        "idle": 0.25,
    }
    assert found.disk_free_bytes
    assert list(found.engines) == ["vllm"]
    assert found.engines["vllm"].running == 15.0
    assert found.queue == 5


def test_a_page_of_nonsense_gives_no_figure() -> None:
    page = (
        "vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\nvllm:kv_cache_usage_perc "
        "+Inf\n"
    )
    assert parse_metrics(page) == EngineGauges()


def test_the_cpu_s_work_is_seen_from_any_thread() -> None:
    sampler = GaugeReader(
        {
            "run-api": "http://127.0.0.1:1",
            "vllm": "http://127.0.0.1:1",
            "dead": "http://127.0.0.1:1",
        }
    )
    for _ in range(2):
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        with ThreadPoolExecutor(1) as pool:
            cpu = pool.submit(sampler.read, status(1, 1), {}, Path()).result().host.cpu_percent
        assert cpu is not None
        assert 0 < cpu <= 100


def test_a_card_s_history_has_a_gap_where_it_was_not_recorded() -> None:
    history = GaugeHistory()
    card = GpuStatus(index=1, used_bytes=30, total_bytes=120, utilization_percent=50)
    for at, cards in ((1.0, [card]), (2.0, []), (3.0, [card])):
        history.add(GaugesRecord(time=at, gpus=cards))
    assert history.card(1) == [(0.5, 0.25), None, (0.5, 0.25)]


def test_use_of_ended_components_is_known_and_does_not_hide_what_is_measured_now() -> None:
    history = GaugeHistory()
    history.add(
        GaugesRecord(
            components={
                "vllm": ComponentUse(memory_bytes=7),
                "trainer": ComponentUse(memory_bytes=8),
            }
        )
    )
    bare = ROWS[0].model_copy(update={"cpu_percent": None, "memory_bytes": None})
    assert [row.memory_bytes for row in history.used([bare, ROWS[1]])] == [7, 1000]


def test_the_file_is_thinned_where_it_is_old_and_whole_where_it_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, path = GaugesFile(tmp_path / "gauges.jsonl"), tmp_path / "gauges.jsonl"
    path.write_text("torn")
    path.chmod(0o600)
    monkeypatch.setattr(gauges, "MOST_BYTES", 400 * (DENSE + 101))
    monkeypatch.setattr(gauges, "DENSE", DENSE // 10)
    count, before, after = 0, 0, 1
    while after > before:
        before = path.stat().st_size
        file.append(GaugesRecord(run_id="r" * 100, time=float(count)))
        after, count = path.stat().st_size, count + 1
    assert path.stat().st_mode & 0o777 == 0o600
    tail, times = RecordTail(path), []
    while records := tail.read():
        times += [record.time for record in records]
    assert tail.bad_lines == 0
    assert times[0] == 0.0
    dense = DENSE // 10
    assert times[-dense:] == [float(at) for at in range(count - dense, count)]
    assert {late - early for early, late in pairwise(times[:-dense])} == {2.0}


def test_cpu_of_nobody_is_not_taken_for_that_of_others() -> None:
    rows = [ComponentStatus(name="vllm", role=Role.ENGINE, state=State.HEALTHY, pid=7)]
    host = HostUse(cpu_percent=50.0, cores=2.0)
    assert split_cpu(rows, host) is None
    measured = split_cpu([rows[0].model_copy(update={"cpu_percent": 60.0})], host)
    assert measured
    assert [(part.label, part.amount) for part in measured.parts] == [
        ("vllm", 60.0),
        ("other", 40.0),
    ]
