"""Adapters come and go while requests run: fresh names, the newest for all, an old one as long as a
request needs it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from safetensors.torch import save_file

from tests.vllm_server.test_bridge import RecordingEngine
from vllm_server import compat, lora
from vllm_server.auth import GenerationHold
from vllm_server.bridge import NotDone, WeightBridge
from vllm_server.config import ServerConfig
from vllm_server.lora import ServedAdapters, make_router, misfit

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 4), "model.layers.0.self_attn.v_proj": (4, 4)}


class LoraEngine(RecordingEngine):
    errored = False
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=32), lora_config=SimpleNamespace(max_lora_rank=16)
    )

    def __init__(self) -> None:
        super().__init__()
        self.removed: list[int] = []
        self.model_config = SimpleNamespace(hf_config=None)
        self.output_processor = SimpleNamespace(request_states={})

    async def remove_lora(self, lora_id: int) -> bool:
        self.removed.append(lora_id)
        return True


class Models:
    """vLLM's list of served models, in its shape."""

    base_model_paths = (SimpleNamespace(name="base"),)

    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}
        self.loaded = 0
        self.refusal = ""

    async def load_lora_adapter(self, request: Any) -> Any:
        if self.refusal:
            return SimpleNamespace(error=SimpleNamespace(message=self.refusal))
        self.loaded += 1
        self.lora_requests[request.lora_name] = SimpleNamespace(
            lora_name=request.lora_name, lora_int_id=self.loaded, lora_path=request.lora_path
        )
        return "Success"


@pytest.fixture
def parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[ServedAdapters, Models, LoraEngine, WeightBridge]:
    monkeypatch.setattr(lora, "linear_shapes", lambda _: SHAPES)
    monkeypatch.setattr(
        compat, "load_adapter_request", lambda n, p: SimpleNamespace(lora_name=n, lora_path=p)
    )
    engine, models = LoraEngine(), Models()
    config = ServerConfig.from_env({"LOGDIR": str(tmp_path / "bridge")})
    config.bridge_dir.mkdir()
    bridge = WeightBridge(
        engine, config=config, gate=GenerationHold(held=True), model="base", vllm_version="0"
    )
    return ServedAdapters(bridge, models, tmp_path), models, engine, bridge


def adapter(folder: Path, rank: int = 2, **tensors: tuple[int, int]) -> str:
    """A saved adapter of the layers in `SHAPES`; `tensors` by module replace the shape of its A."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    shapes = {f"{name}.lora_A.weight": (rank, into) for name, (_, into) in SHAPES.items()}
    shapes |= {f"{name}.lora_B.weight": (out, rank) for name, (out, _) in SHAPES.items()}
    shapes |= {
        f"model.layers.0.self_attn.{name}.lora_A.weight": shape for name, shape in tensors.items()
    }
    saved = {f"base_model.model.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    save_file(saved, folder / "adapter_model.safetensors")
    return str(folder)


async def test_the_newest_answers_under_the_base_name_and_the_old_one_leaves(
    parts: Any, tmp_path: Path
) -> None:
    adapters, models, engine, bridge = parts
    first = await adapters.load(adapter(tmp_path / "v0"), 0)
    second = await adapters.load(adapter(tmp_path / "v1"), 1)
    await asyncio.sleep(0)
    assert first.name != second.name
    assert models.lora_requests["base"].lora_name == second.name
    assert set(models.lora_requests) == {"base", second.name}
    assert engine.removed == [1]
    assert (second.weight_version, second.retiring) == (1, 0)
    assert adapters.info().retiring == 0
    assert bridge.state.weight_version == 1
    assert not bridge.gate.held


async def test_a_request_ends_on_the_adapter_it_began_with(parts: Any, tmp_path: Path) -> None:
    adapters, models, engine, _ = parts
    await adapters.load(adapter(tmp_path / "v3"), 3)
    with adapters.use() as old:
        await adapters.load(adapter(tmp_path / "v4"), 4)
        with adapters.use() as new:
            assert (old[1], new[1]) == (3, 4)
        await asyncio.sleep(0.01)
        assert engine.removed == []
        assert old[0].lora_name in models.lora_requests
    await asyncio.sleep(0.01)
    assert engine.removed == [1]
    assert old[0].lora_name not in models.lora_requests


async def test_requests_of_vllm_s_own_routes_keep_an_adapter_too(
    parts: Any, tmp_path: Path
) -> None:
    """They go to the engine without passing through here; its files must stay until they have
    ended."""
    adapters, models, engine, _ = parts
    old = await adapters.load(adapter(tmp_path / "v3"), 3)
    engine.output_processor.request_states["cmpl-1"] = SimpleNamespace(lora_name=old.name)
    info = await adapters.load(adapter(tmp_path / "v4"), 4)
    assert (info.retiring, info.retiring_paths) == (1, [str(tmp_path / "v3")])
    await asyncio.sleep(0.01)
    assert engine.removed == [] and old.name in models.lora_requests
    engine.output_processor.request_states.clear()
    assert adapters.info().retiring == 0
    await asyncio.sleep(0.01)
    assert engine.removed == [1] and old.name not in models.lora_requests


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q_proj": (2, 3)}, r"q_proj.lora_A.weight is \[2, 3\], the model's layer needs \[2, 4\]"),
        ({"k_proj": (2, 4)}, "no linear layer model.layers.0.self_attn.k_proj"),
        ({"rank": 3, "v_proj": (2, 4)}, r"needs \[3, 4\]"),
    ],
)
async def test_an_adapter_of_another_model_is_refused_and_the_old_one_stays(
    parts: Any, tmp_path: Path, change: Any, says: str
) -> None:
    adapters, models, engine, bridge = parts
    good = await adapters.load(adapter(tmp_path / "good"), 7)
    bad = adapter(tmp_path / "bad", **change)
    with pytest.raises(NotDone, match=says):
        await adapters.load(bad, 8)
    (tmp_path / "bad" / "adapter_model.safetensors").write_bytes(b"half a fi")
    with pytest.raises(NotDone, match="cannot be read"):
        await adapters.load(bad, 8)
    assert models.lora_requests["base"].lora_name == good.name == adapters.info().name
    assert bridge.state.weight_version == 7 and engine.removed == []


async def test_unloading_goes_back_to_the_base_model(parts: Any, tmp_path: Path) -> None:
    adapters, models, engine, bridge = parts
    await adapters.unload()
    assert bridge.state.weight_version is None, "nobody has said yet that base weights may answer"
    await adapters.load(adapter(tmp_path / "v1"), 1)
    info = await adapters.unload()
    assert (bridge.state.weight_version, bridge.history.current) == (0, 0), (
        "what answers now is no version 1"
    )
    await asyncio.sleep(0.01)
    assert (info.name, info.weight_version) == (None, None)
    assert models.lora_requests == {}
    assert engine.removed == [1]
    with adapters.use() as nothing:
        assert nothing is None


async def test_what_cannot_be_an_adapter_is_refused_and_nothing_changes(
    parts: Any, tmp_path: Path
) -> None:
    adapters, models, _, bridge = parts
    inside = adapter(tmp_path / "v1")
    (tmp_path / "empty").mkdir()
    link = tmp_path / "link"
    link.symlink_to("/")
    no_paths = [(f"{tmp_path}/{name}", "is no path") for name in ("a\0b", "x" * 300)]
    outside = [("/etc", "outside"), (str(link), "outside")]
    for path, says in [(str(tmp_path / "empty"), "adapter_config"), *outside, *no_paths]:
        with pytest.raises(NotDone, match=says):
            await adapters.load(path, 1)
    models.refusal = "LoRA rank 64 is greater than max_lora_rank 16"
    with pytest.raises(NotDone, match="rank 64"):
        await adapters.load(inside, 1)
    assert models.lora_requests == {}
    assert bridge.gate.held


@pytest.mark.parametrize("rank", ["1e999", '"x"', "[" * 100_000])
def test_a_hostile_adapter_is_refused_in_words(tmp_path: Path, rank: str) -> None:
    folder = Path(adapter(tmp_path / "v1"))
    (folder / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    assert "cannot be read" in (misfit(folder, {}) or "")


async def test_the_routes_and_a_server_without_lora(parts: Any, tmp_path: Path) -> None:
    adapters, _, _, bridge = parts
    app = FastAPI()
    app.include_router(make_router(adapters))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        body = {"path": adapter(tmp_path / "v1"), "weight_version": 5}
        assert (await http.post("/lora/load", json=body)).json()["weight_version"] == 5
        assert (await http.get("/lora/status")).json()["max_lora_rank"] == 16
        assert (
            await http.post("/lora/load", json={**body, "weight_version": -1})
        ).status_code == 422
        assert (await http.post("/lora/unload")).json()["name"] is None
        bridge.engine.vllm_config = SimpleNamespace(lora_config=None)
        plain = ServedAdapters(bridge, Models(), None)
        app.router.routes.clear()
        app.include_router(make_router(plain))
        answer = await http.post("/lora/load", json=body)
        assert answer.status_code == 400
        assert "--enable-lora" in answer.json()["error"]
        assert (await http.get("/lora/status")).json()["enabled"] is False
