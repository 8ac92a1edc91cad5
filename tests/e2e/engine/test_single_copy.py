"""Single copy on real vLLM under 16 streams: exact before and after training, for every
architecture. Then completions during a publish, sampling that would leak, and planted faults, each
named by the gate.

python -m pytest -m e2e tests/e2e/engine/test_single_copy.py    # one server
python -m pytest -m "e2e and slow" tests/e2e/engine/test_single_copy.py    # the other architectures
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from atropos_common.protocol.bridge import METRIC_RECOMPUTED, InFlight
from atropos_common.protocol.trainer_records import StepRecord
from tests.e2e.gate import PROMPTS, Live, alignments, shift, stopped_for, train_on, train_on_copies
from tests.e2e.small_models import ARCHITECTURES, make_model
from tests.e2e.streams import Streams
from tests.e2e.vllm_server_live import TOKEN, Server, end_of, largest_gap, start_server
from tests.support.nursery import SERVER, forked
from trainer_core.errors import EngineGone
from trainer_core.server.client import ServerClient
from trainer_core.weight_sync import shared_vllm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]
IN_CI = "qwen2"
"""Biases, grouped heads, an untied head; the demo and `test_vllm_server.py` run Qwen3, tied."""
LEAKING = {"do_sample": True, "temperature": 0.6, "top_p": 0.8, "top_k": 2}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    for name in ("ATROPOS_RUN_DIR", "LOGDIR", "VLLM_BRIDGE_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)


def _serve(folder: Path, name: str, **options: Any) -> Iterator[Server]:
    model = make_model(name, folder / "model", generation=LEAKING)
    running = start_server(
        folder, model, ATROPOS_TOKEN=TOKEN, ATROPOS_HOLD_GENERATION="1", **options
    )
    yield running
    end_of(running.process)
    (Path("/dev/shm") / Path(running.manifest().ranks[0].shm_path or "none").name).unlink(
        missing_ok=True
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(tmp_path_factory.mktemp("single"), IN_CI)


def _reference(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _assert_equal_before_and_after(server: Server, folder: Path, **settings: Any) -> None:
    """Against plain transformers: 1e-4 at the base weights and after 20 optimizer steps, under load
    all the time."""
    body = {"prompt": PROMPTS[0], "n": 4, "max_tokens": 24, "ignore_eos": True}
    base = _reference(server.model)
    answer = server.post("/generate", body).json()
    before = largest_gap(base, answer)
    with Streams(server.url, TOKEN, with_token=True) as load:
        load.until(16)
        records = train_on(server, folder, training_steps=20, **settings)
        after_publish = time.monotonic()
        fresh, cached = server.generate(**body), server.generate(**body)
        load.until(24)
    trained = _reference(folder / "out" / "final_model")
    after = max(largest_gap(trained, fresh), largest_gap(trained, cached))
    moved = largest_gap(base, fresh)
    streamed = [done for done in load.completions if done.sent > after_publish]
    under_load = max(done.gap(trained) for done in streamed)
    print(
        f"\nbefore {before:.1e}, after 20 steps {after:.1e}, streams {under_load:.1e}; moved "
        f"by {moved:.2f}"
    )
    load.assert_whole()
    assert max(before, after, under_load) < 1e-4
    assert moved > 0.1, "training must have changed the answers, or this test sees nothing"
    verdicts = [record.verdict for record in alignments(records)]
    assert verdicts == ["ok"] * 20
    assert all(record.probe_diff_abs_max < 1e-4 for record in alignments(records))
    assert all(record.probe_cached_tokens for record in alignments(records)), (
        "the cached prefix was probed"
    )
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [step.policy_lag_max for step in steps] == [0.0] * 20


@pytest.mark.slow
def test_equal_before_and_after_twenty_steps_under_streams(server: Server, tmp_path: Path) -> None:
    assert "kinds of layers compute from the weights in place" in server.log.read_text()
    _assert_equal_before_and_after(server, tmp_path)


@pytest.mark.slow
def test_reused_keys_and_values_reach_no_later_request(tmp_path: Path) -> None:
    """The same prompts before and after each publish: a block of older weights would be found."""
    for running in _serve(tmp_path, IN_CI):
        _assert_equal_before_and_after(running, tmp_path, in_flight="reuse")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != IN_CI])
def test_every_other_architecture(name: str, tmp_path: Path) -> None:
    for running in _serve(tmp_path, name):
        _assert_equal_before_and_after(running, tmp_path)


def test_the_model_s_own_sampling_defaults_do_not_leak(server: Server) -> None:
    assert (
        "generation_config.json asks for top_p=0.8, top_k=2: not applied" in server.log.read_text()
    )
    server.publish(1)
    body = {
        "model": str(server.model),
        "prompt": PROMPTS[0],
        "max_tokens": 60,
        "n": 2,
        "ignore_eos": True,
        "seed": 3,
    }
    body |= {"return_token_ids": True, "logprobs": 0}
    plain = server.post("/v1/completions", body, token=False)
    named = server.post(
        "/v1/completions", {**body, "temperature": 1.0, "top_p": 1.0, "top_k": -1}, token=False
    )
    chosen = [choice["token_ids"] for choice in plain.json()["choices"]]
    assert chosen == [choice["token_ids"] for choice in named.json()["choices"]]
    adjusted = server.post("/v1/completions", {**body, "top_p": 0.8}, token=False)
    assert chosen == [choice["token_ids"] for choice in adjusted.json()["choices"]]
    assert adjusted.headers["X-Atropos-Sampling"] == "top_p"
    asked = {"prompt": PROMPTS[0], "max_tokens": 20, "seed": 5}
    adjusted = server.post("/generate", {**asked, "top_k": 2}, token=False)
    assert adjusted.json() == server.post("/generate", asked, token=False).json()
    assert adjusted.headers["X-Atropos-Sampling"] == "top_k"
    assert "adjusted 1 request to /generate: top_k=2 left out: changes" in server.log.read_text()
    evaluated = {key: value for key, value in body.items() if key != "logprobs"} | {"top_p": 0.8}
    assert server.post("/v1/completions", evaluated, token=False).status_code == 200
    greedy = server.generate(prompt=PROMPTS[0], max_tokens=4, temperature=0.0, top_p=0.8)
    assert len(greedy["token_ids"][0]) <= 4
    free = server.generate(prompt=PROMPTS[0], max_tokens=4, top_k=2, for_training=False)
    asked = server.post("/bridge/versions", {"digests": _digests(free)})
    assert asked.json()["versions"] == [None], "nothing is known of what nobody may train on"


def _digests(answer: dict[str, Any]) -> list[str]:
    from tests.e2e.vllm_server_live import digests

    return digests(answer)


@pytest.mark.parametrize(
    ("in_flight", "versions"),
    [
        ("keep", [20, 21]),
        ("reuse", [20, 21]),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("wait", [20, 20]), ("recompute", [21, 21]))
        ),
    ],
)
def test_a_publish_and_completions_in_flight(
    server: Server, in_flight: InFlight, versions: list[int]
) -> None:
    engine = ServerClient(server.url, TOKEN)
    for _ in range(8):
        server.publish(20)
        before = _metric(server, METRIC_RECOMPUTED)
        if answer := asyncio.run(_across(server, engine, in_flight)):
            break
    else:
        pytest.fail("at no attempt were all completions in flight when generation was paused")
    engine.close()
    assert {len(tokens) for tokens in answer["token_ids"]} == {240} and set(
        answer["finish_reasons"]
    ) == {"length"}
    assert answer["weight_versions"] == [versions] * AT_ONCE
    again = _metric(server, METRIC_RECOMPUTED) - before
    if in_flight == "keep":  # the prompt of 6, and from 1 to 240 new ones
        assert 7 * AT_ONCE <= again <= 246 * AT_ONCE
    else:
        assert again == 0


AT_ONCE = 96


async def _across(
    server: Server, engine: ServerClient, in_flight: InFlight
) -> dict[str, Any] | None:
    """Publish 21 while completions run; return their answer, or None when they had ended before
    generation was paused."""
    async with httpx.AsyncClient(timeout=60) as http:
        body = {"prompt": PROMPTS[0][:6], "n": AT_ONCE, "max_tokens": 240, "ignore_eos": True}
        running = asyncio.create_task(http.post(server.url + "/generate", json=body))
        while await asyncio.to_thread(_running, server) < AT_ONCE:
            if running.done():  # before it was seen that all of them run
                return None
        pausing = asyncio.create_task(
            asyncio.to_thread(engine.pause, dirty=True, in_flight=in_flight, wait_s=30.0)
        )
        while not (await asyncio.to_thread(server.get, "/bridge/is_paused")).json()["paused"]:
            pass
        interrupted = await asyncio.to_thread(_running, server) == AT_ONCE and not running.done()
        await pausing
        if in_flight == "wait":
            await running  # of itself, nothing has resumed
        else:
            await asyncio.wait({running}, timeout=0.5)
            interrupted = not running.done()
        await asyncio.to_thread(engine.resume, 21)
        answer = await running
        return answer.json() if interrupted else None


def _running(server: Server) -> float:
    return _metric(server, "vllm:num_requests_running")


def _metric(server: Server, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_waiting_has_an_end(server: Server) -> None:
    server.publish(30)
    engine = ServerClient(server.url, TOKEN)
    with Streams(server.url, TOKEN, count=2, recorded=6, max_tokens=170) as load:
        for version in range(31, 39):
            while _running(server) < 8:
                time.sleep(0.005)
            begun = time.monotonic()
            engine.pause(dirty=False, in_flight="wait", wait_s=0.05)
            lasted = time.monotonic() - begun
            engine.resume(version)
            load.until(8)
            if kept := (version - 1, version) in [span for _, span in load.versions()]:
                break
    engine.close()
    load.assert_whole()
    assert lasted < 3
    assert kept, "what had not ended within 0.05 s went on with the new weights"


def killed_at_two(arguments: list[str]) -> None:
    """A trainer that is killed after it has written its second update, before the server knows."""
    url, bridge_dir, model, folder = arguments
    shared_vllm.LEASE_S = 1.0  # type: ignore[attr-defined]
    publish = shared_vllm.SingleCopy.publish

    def half_at_two(self: Any, version: int, write: Any) -> Any:
        def half() -> None:
            write()
            os.kill(os.getpid(), signal.SIGKILL)

        return publish(self, version, half if version == 2 else write)

    shared_vllm.SingleCopy.publish = half_at_two  # type: ignore[method-assign]
    train_on(Server(None, url, Path(bridge_dir), Path("none"), Path(model)), Path(folder))  # type: ignore[arg-type]


def test_a_trainer_killed_while_it_writes(server: Server, tmp_path: Path) -> None:
    """When its lease ends nobody is served, until the next trainer has given whole weights."""
    paths = [str(server.bridge_dir), str(server.model), str(tmp_path / "killed")]
    with Streams(server.url, TOKEN, with_token=True, patient=True) as load:
        load.until(16)
        log = tmp_path / "killed.log"
        child = forked(
            SERVER, "tests.e2e.engine.test_single_copy:killed_at_two", [server.url, *paths], log
        )
        assert child.wait(120) == -signal.SIGKILL, log.read_text()
        killed = time.monotonic()
        while server.get("/health", token=False).status_code != 503:
            assert time.monotonic() < killed + 20, "its lease has ended"
            time.sleep(0.1)
        assert "half-written" in server.get("/health", token=False).json()["error"]
        refused = server.post("/generate", {"prompt": PROMPTS[0]}, token=False)
        assert refused.status_code == 503 and not [
            done for done in load.completions if done.sent > killed
        ]
        found = alignments(train_on(server, tmp_path / "next", training_steps=2))
        load.until(16)
    assert [record.verdict for record in found] == ["ok", "ok"]
    assert server.get("/health", token=False).status_code == 200


def test_one_unmapped_tensor_is_stale_weights(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same to see from outside: a graph of the server that computes with a copy of one
    tensor."""
    train_on_copies(
        monkeypatch, lambda name: name == "model.layers.1.mlp.gate_up_proj.weight", server, tmp_path
    )
    # The first difference is to count: a policy that becomes sure of itself shows none any more.
    found = stopped_for("stale weights", server, tmp_path, alignment_mismatch=0.02)
    # The gate judges fresh and cached prefixes each; the record has the mean over both.
    assert "only in part" in found.cause and found.probe_diff_abs_mean > 0.02 / 2


@pytest.mark.slow
def test_a_server_that_sees_no_update_stands_still(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_on_copies(monkeypatch, lambda name: True, server, tmp_path)
    found = stopped_for("stale weights", server, tmp_path)
    assert "has not moved" in found.cause


def test_a_wrong_temperature_is_named(server: Server, tmp_path: Path) -> None:
    found = stopped_for("temperature", server, tmp_path, Live(server, temperature=0.7))
    assert "fit 0.70" in found.cause and found.step == 1


def test_shifted_logprobs_are_named(server: Server, tmp_path: Path) -> None:
    assert stopped_for("shifted logprobs", server, tmp_path, Live(server, shift)).step == 1


@pytest.mark.slow
def test_filtered_sampling_is_named(server: Server, tmp_path: Path) -> None:
    """Past the refusal, as a foreign server would do it."""
    stopped_for(
        "sampling", server, tmp_path, Live(server, top_k=2, for_training=False, temperature=1.0)
    )


def _dies_in_publish(server: Server, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server and its engine are killed when the update of `version` is written, before they
    hear of it."""
    publish, family = shared_vllm.SingleCopy.publish, psutil.Process(server.process.pid)

    def killing(self: Any, now: int, write: Any) -> Any:
        def and_kill() -> None:
            write()
            for process in [family, *family.children(recursive=True)]:
                process.kill()

        return publish(self, now, and_kill if now == version else write)

    monkeypatch.setattr(shared_vllm.SingleCopy, "publish", killing)


def test_a_server_killed_in_the_middle_of_a_publish(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The update is complete in the memory that outlives the server, and it is saved. The end of
    the shared server: no test below this one may ask for it."""
    _dies_in_publish(server, 3, monkeypatch)
    with Streams(server.url, TOKEN, with_token=True, patient=True) as load:
        load.until(16)
        with pytest.raises(EngineGone):
            train_on(server, tmp_path, training_steps=5)
    said = capsys.readouterr().out
    assert (
        "No step is lost: the weights of step 3 are intact after the end of the server" in said
    ), said[-2000:]
    assert (tmp_path / "out" / "step_3" / "trainer_state.json").is_file()


@pytest.mark.slow
def test_a_stale_prefix_cache_is_named(tmp_path: Path) -> None:
    flags = ("--middleware", "tests.e2e.planted.StalePrefix")
    for running in _serve(tmp_path, "qwen3", flags=flags):
        found = stopped_for("stale prefix cache", running, tmp_path)
        assert found.probe_cached_tokens


@pytest.mark.slow
def test_graphs_that_are_unsafe_fall_back_to_eager_and_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model, registered by a plug-in of vLLM's own, that computes with a copy of a norm unless it
    is run eager."""
    plugin = Path(__file__).parents[1] / "planted_plugin"
    # Neither eager nor compiled: the server turns Dynamo off on a CPU, where vLLM could not compile
    # then.
    flags = ("--no-enforce-eager", "-cc.mode=none", "-cc.cudagraph_mode=none")
    python_path = os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")])
    for running in _serve(tmp_path, "qwen3", flags=flags, PYTHONPATH=python_path):
        log = running.log.read_text()
        assert (
            "model.norm.weight: this model computes from a copy of these weights with CUDA graphs"
            in log
        )
        assert "starting again with --enforce-eager" in log
        assert running.manifest().server_pid == running.process.pid
        because = running.get("/bridge/info").json()["eager_because"]
        assert "model.norm.weight" in because and "a copy of these weights" in because
        _assert_equal_before_and_after(running, tmp_path)
        assert (
            f"[WARNING] the server decodes without CUDA graphs, slower than it could: {because}"
            in (capsys.readouterr().out)
        )
