"""The bridge: the order of engine calls, its lease and its version stamp, with an engine that
records its calls."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from atropos_common.broadcast.transfer import TransferInit, TransferUpdate
from atropos_common.protocol.bridge import PauseRequest, ResumeRequest, VersionSpan
from vllm_server.auth import GenerationHold
from vllm_server.bridge import NotTheHolder, WeightBridge, make_router
from vllm_server.config import ServerConfig
from vllm_server.held_outputs import TOKENS_MADE
from vllm_server.weights import broadcast
from vllm_server.weights.broadcast import BrokenTransfer, Transfers


class RecordingEngine:
    """Keeps the order of calls; `resets` says whether the prefix cache can be reset."""

    model_config = SimpleNamespace(dtype="torch.float32")
    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=32))

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.resets = True
        self.pauses = True
        self.resumes = True
        self.drained = asyncio.Event()
        """Nothing is in flight any more."""
        self.made: list[dict[str, int]] = [{}]
        """Tokens of the unfinished requests, for each engine process."""
        self.renderer: Any = SimpleNamespace(clear_mm_cache_async=lambda: asyncio.sleep(0))
        self.output_processor: Any = SimpleNamespace(request_states={})
        self.engine_core: Any = SimpleNamespace(
            pause_scheduler_async=self.pause_generation, call_utility_all_async=self._tokens_made
        )

    async def _tokens_made(self, method: str) -> list[dict[str, int]]:
        assert method == TOKENS_MADE
        return self.made

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause:{mode}")
        if not self.pauses:
            raise RuntimeError("a connector refused")
        if mode == "wait":
            await self.drained.wait()
        else:
            self.drained.set()

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        if not self.resumes:
            raise RuntimeError("one of the engines did not answer")

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.calls.append(f"reset:{reset_running_requests}")
        return self.resets


class SlowGenerator:
    """A probe that takes `seconds`, or fails."""

    completions = 0

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds, self.error = seconds, error

    async def probe(self) -> int:
        await asyncio.sleep(self.seconds)
        if self.error:
            raise self.error
        return 1


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    return ServerConfig.from_env({"LOGDIR": str(tmp_path)})


def make(config: ServerConfig, *, held: bool = False) -> tuple[WeightBridge, RecordingEngine]:
    engine = RecordingEngine()
    return WeightBridge(
        engine, config=config, gate=GenerationHold(held=held), model="m", vllm_version="0"
    ), engine


async def test_a_publish_pauses_resets_then_resumes_and_stamps(config: ServerConfig) -> None:
    bridge, engine = make(config, held=True)
    paused = await bridge.pause(PauseRequest(lease_s=5, dirty=True))
    assert (paused.paused, paused.dirty, paused.held) == (True, True, True)
    info = await bridge.resume(ResumeRequest(weight_version=7))
    assert engine.calls == ["pause:keep", "reset:True", "resume"]
    assert (info.paused, info.dirty, info.held, info.weight_version) == (False, False, False, 7)
    assert not bridge.gate.held
    assert bridge.history.current == 7
    assert json.loads(config.state_path.read_text()) == {
        "instance_id": config.instance_id,
        "weight_version": 7,
    }
    assert config.state_path.stat().st_mode & 0o777 == 0o600


async def test_a_publish_counts_the_tokens_that_the_engine_has_made(config: ServerConfig) -> None:
    """The server has not read all of them: the engine holds outputs back."""
    bridge, engine = make(config)
    names = {"r-1": "r", "s-1": "s", "late-1": "late"}
    states = {name: SimpleNamespace(external_req_id=own) for name, own in names.items()}
    engine.output_processor.request_states = states
    engine.made = [{"r-1": 23, "its client left": 3}, {"s-1": 4}]
    with (
        bridge.history.follow("r") as of_r,
        bridge.history.follow("s") as of_s,
        bridge.history.follow("late") as of_late,  # ended, and its end is not read yet
    ):
        await bridge.pause(PauseRequest())
        await bridge.resume(ResumeRequest(weight_version=7))
    assert (list(of_r.values()), list(of_s.values()), of_late) == ([23], [4], {})


async def test_a_disk_that_takes_no_stamp_keeps_no_weights_from_answering(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resume failed with the engine resumed, and the trainer's attempt ended over it."""
    bridge, engine = make(config)
    await bridge.resume(ResumeRequest(weight_version=1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vllm_server.bridge.write_private", full)
    info = await bridge.resume(ResumeRequest(weight_version=2))
    assert (info.paused, info.weight_version, engine.calls[-1]) == (False, 2, "resume")
    assert not config.state_path.exists(), "it would name the older version"


async def test_in_flight_ends_or_begins_anew(config: ServerConfig) -> None:
    bridge, engine = make(config)
    pausing = asyncio.create_task(bridge.pause(PauseRequest(lease_s=5, in_flight="wait", wait_s=5)))
    await asyncio.sleep(0.05)
    assert bridge.state.paused and not pausing.done()
    engine.drained.set()
    await asyncio.wait_for(pausing, 1)
    await bridge.resume(ResumeRequest(weight_version=1))
    await bridge.pause(PauseRequest(lease_s=5, in_flight="recompute"))
    assert engine.calls == ["pause:wait", "reset:True", "resume", "pause:abort"]


async def test_waiting_ends_with_its_time_and_the_lease_begins_then(config: ServerConfig) -> None:
    bridge, engine = make(config)
    await bridge.pause(PauseRequest(lease_s=0.3, dirty=True, in_flight="wait", wait_s=0.2))
    assert engine.calls == ["pause:wait", "pause:keep"]
    await asyncio.sleep(0.2)
    assert bridge.gate.refusal is None, "the lease counts from the frozen engine on"
    await asyncio.sleep(0.2)
    assert bridge.gate.refusal is not None


async def test_an_engine_that_does_not_pause_is_not_paused_for_ever(config: ServerConfig) -> None:
    bridge, engine = make(config)
    engine.pauses = False
    with pytest.raises(RuntimeError, match="a connector refused"):
        await bridge.pause(PauseRequest(lease_s=0.05, wait_s=0.05))
    assert bridge.state.paused
    await asyncio.sleep(0.3)
    assert not bridge.state.paused and engine.calls[-1] == "resume"


async def test_an_engine_that_may_have_gone_on_is_stopped_again(config: ServerConfig) -> None:
    """Weights would be written while it makes tokens."""
    bridge, engine = make(config)
    await bridge.pause(PauseRequest())
    engine.resumes = False
    with pytest.raises(RuntimeError, match="did not answer"):
        await bridge.resume(ResumeRequest(weight_version=1))
    assert bridge.state.paused and bridge.state.weight_version is None
    engine.resumes = True
    await bridge.pause(PauseRequest())
    assert engine.calls == ["pause:keep", "reset:True", "resume", "pause:keep"]
    info = await bridge.resume(ResumeRequest(weight_version=1))
    assert not info.paused and info.weight_version == 1


async def test_a_lease_that_ends_without_a_resume_of_the_engine_is_a_fault(
    config: ServerConfig,
) -> None:
    bridge, engine = make(config)
    await bridge.pause(PauseRequest(lease_s=0.05))
    engine.resets = False
    await asyncio.sleep(0.2)
    assert (
        "the engine did not resume" in str(bridge.state.fault)
        and bridge.gate.refusal == bridge.state.fault
    )


async def test_sleep_and_pause_keep_out_of_each_other_s_way(
    config: ServerConfig, tmp_path: Path
) -> None:
    """Asleep there are no weights to write to; and vLLM goes on generating at a wake-up, paused or
    not."""
    bridge, engine = make(config)
    for name in ("sleep", "wake_up"):
        setattr(engine, name, lambda *_, name=name: asyncio.sleep(0, engine.calls.append(name)))
    await bridge.pause(PauseRequest(lease_s=5, dirty=True))
    for refused in (bridge.sleep(1), bridge.wake_up()):
        with pytest.raises(ValueError, match="generation is paused"):
            await refused
    await bridge.resume(ResumeRequest(weight_version=1))
    await bridge.sleep(1)
    for asleep in (bridge.pause(PauseRequest()), bridge.resume(ResumeRequest(weight_version=2))):
        with pytest.raises(ValueError, match="wake_up first"):
            await asleep
    with pytest.raises(BrokenTransfer, match="wake_up first"):
        await Transfers(bridge).update(TransferUpdate(weight_version=2, timeout_s=1))
    await bridge.wake_up()
    assert engine.calls == ["pause:keep", "reset:True", "resume", "sleep", "wake_up"]


async def test_a_broadcast_is_refused_where_layers_do_not_follow(config: ServerConfig) -> None:
    bridge, engine = make(config)
    bridge.not_in_place = "it computes from a copy of layers.1.kv_b_proj.weight"
    request = TransferInit(
        backend="gloo",
        address="127.0.0.1",
        port=5000,
        key="k",
        secret=b"s" * 32,
        first_rank=1,
        world_size=2,
        timeout_s=1,
        chunk_bytes=1,
        tensors=[],
    )
    with pytest.raises(
        BrokenTransfer,
        match=r"^refused: .*a copy of layers.1.kv_b_proj.weight.*none, which restarts",
    ):
        await Transfers(bridge).join(request)
    assert engine.calls == []


async def test_what_one_rank_says_of_a_broadcast_is_heard(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank raises: vLLM would leave the others' answers for the calls that follow."""
    bridge, engine = make(config)
    monkeypatch.setattr(broadcast, "_update", lambda *_: asyncio.sleep(0))
    said: list[str | None] = [
        None,
        "no data from the trainer",
        "refused: is it the same model on both sides?",
    ]
    engine.collective_rpc = lambda method: asyncio.sleep(0, said)  # type: ignore[attr-defined]
    for name in ("start_weight_update", "finish_weight_update"):
        setattr(engine, name, lambda: asyncio.sleep(0))
    update = TransferUpdate(weight_version=2, timeout_s=1)
    with pytest.raises(BrokenTransfer, match=r"^refused: is it the same model"):
        await Transfers(bridge).update(update)
    assert (
        "received only in part" in str(bridge.gate.refusal) and bridge.state.weight_version is None
    )
    said[:] = [None, None, None]
    assert (
        (await Transfers(bridge).update(update)).weight_version == bridge.state.weight_version == 2
    )
    assert bridge.gate.refusal is None


async def test_a_resume_without_a_pause_pauses_first(config: ServerConfig) -> None:
    bridge, engine = make(config)
    await bridge.resume(ResumeRequest(weight_version=0))
    assert engine.calls == ["pause:keep", "reset:True", "resume"]


async def test_a_stopped_trainer_that_wakes_cannot_declare_anothers_half_written_weights(
    config: ServerConfig,
) -> None:
    bridge, engine = make(config)
    await bridge.pause(PauseRequest(dirty=True, holder="old"))
    await bridge.pause(PauseRequest(dirty=True, holder="new"))
    for holder in ("old", ""):
        with pytest.raises(NotTheHolder, match="POST /bridge/pause takes over"):
            await bridge.resume(ResumeRequest(weight_version=4, holder=holder))
    assert bridge.state.paused and bridge.state.dirty and "resume" not in engine.calls
    await bridge.resume(ResumeRequest(weight_version=5, holder="new"))
    assert not bridge.state.paused and bridge.state.weight_version == 5
    await bridge.resume(
        ResumeRequest(weight_version=6, holder="anyone")
    )  # its own pause goes with it


async def test_a_cache_that_cannot_be_reset_keeps_the_engine_paused(config: ServerConfig) -> None:
    bridge, engine = make(config)
    engine.resets = False
    await bridge.pause(PauseRequest(dirty=True))
    with pytest.raises(RuntimeError, match="prefix cache"):
        await bridge.resume(ResumeRequest(weight_version=1))
    assert bridge.state.paused
    assert bridge.state.weight_version is None
    assert "resume" not in engine.calls


async def test_a_clean_lease_resumes_by_itself(config: ServerConfig) -> None:
    bridge, engine = make(config, held=True)
    await bridge.pause(PauseRequest(lease_s=0.05))
    await asyncio.sleep(0.15)
    assert engine.calls == ["pause:keep", "reset:True", "resume"]
    assert not bridge.state.paused
    assert bridge.gate.held, "only a resume names weights, so only it opens the hold"


async def test_a_dirty_lease_refuses_until_a_resume(config: ServerConfig) -> None:
    bridge, engine = make(config)
    await bridge.pause(PauseRequest(lease_s=0.05, dirty=True))
    await asyncio.sleep(0.15)
    assert bridge.state.paused
    assert bridge.gate.refusal is not None
    health = await bridge.health_generate(SlowGenerator())  # type: ignore[arg-type]
    assert health.status_code == 503
    await bridge.resume(ResumeRequest(weight_version=2))
    assert bridge.gate.refusal is None
    assert engine.calls == ["pause:keep", "reset:True", "resume"]


async def test_renewing_a_lease_does_not_pause_twice(config: ServerConfig) -> None:
    bridge, engine = make(config)
    await bridge.pause(PauseRequest(lease_s=0.1))
    await asyncio.sleep(0.06)
    await bridge.pause(PauseRequest(lease_s=0.2))
    await asyncio.sleep(0.1)
    assert bridge.state.paused
    assert engine.calls == ["pause:keep"]
    await bridge.resume(ResumeRequest(weight_version=1))


async def test_health_generates_unless_legitimately_paused(config: ServerConfig) -> None:
    bridge, _ = make(config, held=True)
    health = await bridge.health_generate(SlowGenerator())  # type: ignore[arg-type]
    assert json.loads(bytes(health.body)) == {
        "paused": False,
        "tokens": 1,
        "held": True,
        "weight_version": None,
    }
    probing = asyncio.create_task(bridge.health_generate(SlowGenerator(60)))  # type: ignore[arg-type]
    await asyncio.sleep(0.02)
    await bridge.pause(PauseRequest(lease_s=5))
    answer = await asyncio.wait_for(probing, timeout=2)
    assert answer.status_code == 200
    assert json.loads(bytes(answer.body))["paused"] is True
    await bridge.resume(ResumeRequest(weight_version=1))


async def test_health_tells_why_generation_fails(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge, _ = make(config)
    broken = await bridge.health_generate(SlowGenerator(error=ValueError("no")))  # type: ignore[arg-type]
    assert (broken.status_code, json.loads(bytes(broken.body))) == (
        503,
        {"error": "generation fails: ValueError: no"},
    )
    monkeypatch.setattr("vllm_server.bridge.PROBE_TIMEOUT_S", 0.1)
    slow = await bridge.health_generate(SlowGenerator(60))  # type: ignore[arg-type]
    assert slow.status_code == 503


@pytest.mark.parametrize(
    ("address", "env", "taken"),
    [
        ("127.0.0.1", {}, True),
        ("localhost", {}, True),
        ("::1", {}, True),
        ("10.0.0.7", {}, False),
        ("0.0.0.0", {}, False),
        ("localhost.evil.example", {}, False),
        ("10.0.0.7", {"ATROPOS_TRAINER_HOSTS": "10.0.0.6, 10.0.0.7"}, True),
        ("Node-3", {"ATROPOS_TRAINER_HOSTS": "node-3"}, True),
        ("10.0.0.8", {"ATROPOS_TRAINER_HOSTS": "10.0.0.7"}, False),
        ("10.0.0.7", {"MASTER_ADDR": "10.0.0.7"}, True),
    ],
)
async def test_weights_come_from_the_loopback_or_from_where_the_configuration_says(
    address: str, env: dict[str, str], taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge, _ = make(ServerConfig.from_env({"LOGDIR": str(tmp_path)} | env))
    asked: list[dict[str, Any]] = []

    async def init(engine: Any, info: dict[str, Any]) -> None:
        asked.append(info)
        raise RuntimeError("nobody is there")

    monkeypatch.setattr(broadcast, "_init", init)
    app = FastAPI()
    app.include_router(broadcast.make_router(Transfers(bridge)))
    request = TransferInit(
        backend="gloo",
        address=address,
        port=5000,
        key="k",
        secret=b"s" * 32,
        first_rank=1,
        world_size=2,
        timeout_s=1,
        chunk_bytes=1,
        tensors=[],
    )
    transport: Any = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        answer = await http.post("/bridge/transfer/init", json=request.model_dump())
    if taken:
        assert (answer.status_code, answer.json()["error"]) == (503, "nobody is there")
        assert TransferInit(**asked[0]) == request, "the worker reads what the trainer wrote"
    else:
        assert answer.status_code == 409 and not asked
        assert f"ATROPOS_TRAINER_HOSTS={address}" in answer.json()["error"]


async def test_routes_speak_the_contract(config: ServerConfig) -> None:
    bridge, _ = make(config)
    bridge.spans.remember("d", VersionSpan(1, 2, 4, 1.25))
    app = FastAPI()
    app.include_router(make_router(bridge, SlowGenerator(), app, sleep_mode=False))  # type: ignore[arg-type]
    transport: Any = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        info = (await http.get("/bridge/info")).json()
        assert (
            0 < info["idle_s"] <= (now := bridge.info().model_dump()).pop("idle_s")
            and info == now | info
        )
        answer = await http.post("/bridge/versions", json={"digests": ["d", "e"]})
        found = {"versions": [[1, 2], None], "token_means": [[4, 1.25], None]}
        assert answer.json() == found
        assert (await http.post("/bridge/pause", json={"lease_s": -1})).status_code == 400
        assert (await http.post("/bridge/pause")).json()["paused"] is True
        assert (await http.get("/bridge/is_paused")).json() == {"paused": True}
        assert (await http.post("/bridge/resume", json={"weight_version": -1})).status_code == 400
        assert (await http.post("/bridge/resume", json={"weight_version": 1e30})).status_code == 422
        await http.post("/bridge/pause", json={"holder": "me"})
        assert (await http.post("/bridge/resume", json={"weight_version": 3})).status_code == 409
        await http.post("/bridge/pause")
        assert (await http.post("/bridge/resume")).status_code == 422
        assert (await http.post("/bridge/resume", json={"weight_version": 3})).json()[
            "weight_version"
        ] == 3
        assert (await http.post("/bridge/sleep")).status_code == 501
        paths = {
            route["path"]
            for route in (await http.get("/bridge/list_endpoints")).json()["endpoints"]
        }
        assert {"/bridge/info", "/bridge/resume", "/health_generate"} <= paths
        debug = (await http.get("/bridge/debug")).json()
        assert debug["spans_kept"] == 1
        assert config.token not in json.dumps(debug)
