"""`/bridge/load`: refusals before any change, the state after a failed load, and what waits for a
restart."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from pydantic import ValidationError
from safetensors.torch import save_file

from atropos_common.broadcast.transfer import TransferUpdate
from atropos_common.protocol.bridge import LoadAdapterRequest, LoadWeightsRequest, ResumeRequest
from tests.vllm_server.test_bridge import RecordingEngine
from vllm_server.auth import GenerationHold
from vllm_server.bridge import WeightBridge
from vllm_server.config import ENV_START_WEIGHTS, ServerConfig
from vllm_server.weights import reload
from vllm_server.weights.reload import BrokenLoad, RefusedWeights, Reloader, make_router

SHAPES = {
    "model.embed_tokens.weight": (6, 4),
    "model.layers.0.mlp.up_proj.weight": (8, 4),
    "lm_head.weight": (6, 4),
}


class LoadingEngine(RecordingEngine):
    """Answers the load of a rank; `breaks` is raised there, `hangs` never ends."""

    def __init__(self, **model: Any) -> None:
        super().__init__()
        hf_config = SimpleNamespace(architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False)
        facts = {"dtype": "torch.float32", "hf_config": hf_config, "quantization": None} | model
        self.model_config = SimpleNamespace(**facts)
        self.breaks: Exception | None = None
        self.hangs = False
        self.without_place: str | None = None
        self.failed: str | None = None
        """Error of the second rank."""

    async def collective_rpc(self, method: str, args: tuple[str]) -> list[dict[str, Any]]:
        self.calls.append(f"{method}:{Path(args[0]).name}")
        if self.hangs:
            await asyncio.sleep(60)
        if self.breaks is not None:
            raise self.breaks
        ranks = ({"load": 0.1, "device_sync": 0.3}, {"load": 0.2, "device_sync": 0.1})
        found = [
            {"tensors": 3.0, "bytes": 320.0, "without_place": self.without_place, **rank}
            for rank in ranks
        ]
        return [found[0], {"failed": self.failed}] if self.failed else found


def arguments(model: Path, **given: Any) -> Namespace:
    facts: dict[str, Any] = {
        "model": str(model),
        "load_format": "auto",
        "enable_lora": False,
        "data_parallel_size": 1,
        "revision": None,
        "download_dir": None,
    }
    return Namespace(**facts | given)


def checkpoint(folder: Path, **shapes: tuple[int, ...] | None) -> Path:
    """A folder of weights as in `SHAPES`; `shapes` by name (dots as `__`) replaces one, None leaves
    it out."""
    wanted: dict[str, Any] = SHAPES | {
        name.replace("__", "."): shape for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: torch.ones(shape) for name, shape in wanted.items() if shape is not None}
    save_file(tensors, folder / "model.safetensors")
    return folder


class Site:
    """A run directory with a model, a server in it, and new weights."""

    def __init__(self, root: Path) -> None:
        self.run = root / "run"
        self.environment = {
            "LOGDIR": str(self.run / "bridge" / "vllm"),
            "ATROPOS_RUN_DIR": str(self.run),
            "ATROPOS_WEIGHT_UPDATES": "1",
        }
        self.model = checkpoint(root / "model")
        self.new = checkpoint(self.run / "weights" / "v3")
        self.start()

    def start(
        self, engine: LoadingEngine | None = None, *, not_in_place: str | None = None, **flags: Any
    ) -> None:
        """A new server process, in effect; `not_in_place` is what it found out about its layers."""
        self.engine = engine or LoadingEngine()
        self.config = ServerConfig.from_env(self.environment)
        self.config.bridge_dir.mkdir(parents=True, exist_ok=True)
        args = arguments(self.model, **flags)
        if self.config.weight_updates:
            reload.prepare_start(self.config, args, plain=False)
        self.load_format = args.load_format
        self.gate = GenerationHold(held=True)
        self.bridge = WeightBridge(
            self.engine, config=self.config, gate=self.gate, model="m", vllm_version="0"
        )
        self.bridge.not_in_place = not_in_place
        self.reloader = Reloader(self.bridge, args)

    def load(self, path: Path | None = None, version: int = 3, **fields: Any) -> Any:
        request = LoadWeightsRequest(path=str(path or self.new), weight_version=version, **fields)
        return asyncio.run(self.reloader.load(request))

    def post(self, **body: Any) -> httpx.Response:
        return self.send(json.dumps(body).encode())

    def send(self, body: bytes) -> httpx.Response:
        async def ask() -> httpx.Response:
            app = FastAPI()
            app.include_router(make_router(self.reloader))
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                headers = {"Content-Type": "application/json"}
                return await client.post("/bridge/load", content=body, headers=headers)

        return asyncio.run(ask())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    yield Site(tmp_path)
    os.environ.pop(ENV_START_WEIGHTS, None)


def test_a_load_pauses_writes_resets_the_cache_and_resumes_as_the_new_version(site: Site) -> None:
    answer = site.post(path=str(site.new), weight_version=3)
    assert answer.status_code == 200, answer.text
    assert site.engine.calls == ["pause:keep", "atropos_load_weights:v3", "reset:True", "resume"]
    told = answer.json()
    assert (told["weight_version"], told["tensors"], told["bytes"]) == (3, 3, 320)
    assert told["phases"].keys() == {"pause", "load", "device_sync", "resume"}
    assert (told["phases"]["load"], told["phases"]["device_sync"]) == (0.2, 0.3), (
        "the slowest rank counts"
    )
    info = site.bridge.info()
    assert (info.weight_version, info.paused, info.dirty, info.held) == (3, False, False, False)
    assert json.loads(site.config.state_path.read_text())["weight_version"] == 3


def test_completions_in_flight_are_treated_as_asked(site: Site) -> None:
    site.load(in_flight="recompute")
    assert site.engine.calls[0] == "pause:abort"


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"lm_head__weight": None}, "lm_head.weight is missing"),
        ({"lm_head__weight": (7, 4)}, r"lm_head.weight is \[7, 4\], not \[6, 4\]"),
        (
            {"model__layers__1__mlp__up_proj__weight": (8, 4)},
            "model.layers.1.mlp.up_proj.weight is not of this model",
        ),
    ],
)
def test_weights_of_another_model_are_refused_before_anything_is_touched(
    site: Site, shapes: dict[str, Any], says: str
) -> None:
    site.load(version=1)
    site.engine.calls.clear()
    with pytest.raises(RefusedWeights, match=says):
        site.load(checkpoint(site.run / "other", **shapes))
    assert site.engine.calls == []
    assert site.bridge.info().weight_version == 1, "the old weights go on serving"


def test_half_written_missing_and_foreign_folders_are_refused(site: Site, tmp_path: Path) -> None:
    torn = checkpoint(site.run / "torn") / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-7])
    (site.run / "empty").mkdir()
    cases = {
        torn.parent: "not a whole safetensors file",
        site.run / "empty": "no safetensors",
        site.run / "nowhere": "not a folder",
        tmp_path / "model": "lies outside",
        site.run / ".." / "model": "lies outside",
    }
    for path, says in cases.items():
        answer = site.post(path=str(path), weight_version=3)
        assert answer.status_code == 409
        assert says in answer.json()["error"]
    assert site.engine.calls == []
    assert not site.bridge.state.paused


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "x" * 5000, "\ud800"])
def test_a_path_that_the_kernel_does_not_take_is_refused(site: Site, name: str) -> None:
    """It was taken for a fault of the server, which a trainer waits out."""
    body = json.dumps({"path": f"{site.run}/{name}", "weight_version": 3}).encode()
    assert site.send(body).status_code in (409, 422)
    assert site.engine.calls == [] and not site.bridge.state.paused


def test_a_version_that_no_reader_keeps_is_refused(site: Site) -> None:
    for version in ("1e30", "1" + 30 * "0", "-1", "1" + 5000 * "0"):
        body = f'{{"path": {json.dumps(str(site.new))}, "weight_version": {version}}}'
        assert site.send(body.encode()).status_code in (400, 422)
    for wrong in (10**30, 1e30):
        for message in (ResumeRequest, LoadAdapterRequest, TransferUpdate):
            with pytest.raises(ValidationError, match="weight_version"):
                message.model_validate({"path": "/a", "timeout_s": 1, "weight_version": wrong})
    assert site.engine.calls == [] and site.bridge.info().weight_version is None


def test_a_tied_head_may_be_there_or_not(site: Site) -> None:
    site.engine.model_config.hf_config.tie_word_embeddings = True
    site.load(checkpoint(site.run / "without", lm_head__weight=None))
    assert site.bridge.info().weight_version == 3


@pytest.mark.parametrize("fault", ["breaks", "hangs", "failed"])
def test_a_load_that_breaks_off_leaves_nobody_served_until_one_succeeds(
    site: Site, fault: str
) -> None:
    setattr(
        site.engine,
        fault,
        {"breaks": RuntimeError("cannot read"), "hangs": True, "failed": "cannot read"}[fault],
    )
    with pytest.raises(BrokenLoad, match=r"weights are mixed: (cannot read|no end after 0.05 s)"):
        site.load(lease_s=0.05)
    info = site.bridge.info()
    assert (info.paused, info.dirty, info.weight_version) == (True, True, None)
    assert site.gate.refusal is not None
    assert "mixed" in site.gate.refusal
    assert "resume" not in site.engine.calls
    site.engine.breaks, site.engine.hangs, site.engine.failed = None, False, None
    site.load()
    assert site.gate.refusal is None
    assert not site.bridge.info().dirty


def test_a_model_without_a_place_for_a_tensor_is_a_final_refusal_and_serves_nobody(
    site: Site,
) -> None:
    site.engine.without_place = "vLLM's Fused has no place for 1 of the tensors"
    answer = site.post(path=str(site.new), weight_version=3)
    assert (answer.status_code, answer.json()["error"]) == (409, site.engine.without_place)
    assert site.gate.refusal == site.engine.without_place
    assert site.bridge.info().dirty


def test_an_engine_timeout_of_days_asks_for_no_longer_lease_than_there_is(site: Site) -> None:
    assert site.load(lease_s=43_200).weight_version == 3


def test_broken_weights_are_not_taken_for_those_of_the_start(site: Site) -> None:
    site.load(at_restart=True)
    site.start()
    other = checkpoint(site.run / "weights" / "v4")
    site.engine.breaks = RuntimeError("cannot read")
    assert site.post(path=str(other), weight_version=4).status_code == 503
    site.engine.breaks = None
    site.engine.calls.clear()
    site.load()
    assert "atropos_load_weights:v3" in site.engine.calls


def test_a_start_folder_that_is_gone_is_compared_by_the_model(site: Site) -> None:
    site.load(at_restart=True)
    site.start()
    new = checkpoint(site.run / "weights" / "v4")
    shutil.rmtree(site.new)
    assert site.post(path=str(new), weight_version=4).status_code == 200


def test_frequencies_of_old_checkpoints_are_no_weights(site: Site) -> None:
    old = checkpoint(
        site.run / "weights" / "old", model__layers__0__self_attn__rotary_emb__inv_freq=(4,)
    )
    assert site.post(path=str(old), weight_version=4).status_code == 200


def test_a_break_is_a_503_so_that_the_trainer_waits_for_a_whole_server(site: Site) -> None:
    site.engine.breaks = RuntimeError("CUDA error")
    answer = site.post(path=str(site.new), weight_version=3)
    assert answer.status_code == 503
    assert "CUDA error" in answer.json()["error"]


def test_weights_noted_for_a_restart_are_what_the_next_server_begins_with(site: Site) -> None:
    site.load(version=1)
    site.engine.calls.clear()
    noted = site.load(at_restart=True)
    assert noted.weight_version == 1, "nothing changes now"
    assert site.engine.calls == []

    site.start()
    assert os.environ[ENV_START_WEIGHTS] == str(site.new)
    assert site.load_format == reload.FOLDER_FORMAT
    info = site.bridge.info()
    assert (info.started_from, info.weight_version, info.held) == (str(site.new), None, True)
    site.load()
    assert site.engine.calls == ["resume"], "they are in memory already: only the version is named"
    assert site.bridge.info().weight_version == 3
    assert not site.gate.held
    site.load(version=4)
    assert "atropos_load_weights:v3" in site.engine.calls, (
        "a second load of the same folder is a load"
    )


def test_a_note_that_leads_nowhere_is_not_followed(site: Site) -> None:
    site.load(at_restart=True)
    file = site.new / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])
    site.start()
    assert ENV_START_WEIGHTS not in os.environ
    assert site.bridge.info().started_from is None
    site.config.start_weights_path.write_text('{"path": ')
    site.start()
    assert site.load_format == reload.FOLDER_FORMAT, "which records what it copies where"


@pytest.mark.parametrize(
    ("proved", "flags", "says"),
    [
        (
            "it computes from a copy of layers.1.kv_b_proj",
            {},
            "runs: it computes from a copy of layers.1",
        ),
        (None, {"enable_lora": True}, "--enable-lora"),
        (None, {"cpu_offload_gb": 4}, "--cpu-offload-gb"),
        (None, {"data_parallel_size": 2}, "--data-parallel-size"),
    ],
)
def test_what_cannot_be_loaded_in_place_says_so_and_can_still_restart(
    site: Site, proved: str | None, flags: dict[str, Any], says: str
) -> None:
    site.start(not_in_place=proved, **flags)
    with pytest.raises(RefusedWeights, match=says):
        site.load()
    assert site.bridge.info().load_obstacle is not None
    assert site.engine.calls == []
    site.load(at_restart=True)
    site.start(not_in_place=proved, **flags)
    site.load()
    assert site.bridge.info().weight_version == 3


def test_a_server_that_could_not_begin_with_them_refuses_the_note(site: Site) -> None:
    site.start(load_format="bitsandbytes")
    with pytest.raises(RefusedWeights, match="--load-format bitsandbytes"):
        site.load(at_restart=True)
    del site.environment["LOGDIR"]
    site.start()
    with pytest.raises(RefusedWeights, match="LOGDIR"):
        site.load(at_restart=True)
    del site.environment["ATROPOS_WEIGHT_UPDATES"]
    site.start()
    for at_restart in (True, False):
        with pytest.raises(RefusedWeights, match="ATROPOS_WEIGHT_UPDATES=1"):
            site.load(at_restart=at_restart)


def test_a_sleeping_engine_is_not_written_to(site: Site) -> None:
    site.bridge.sleeping = True
    with pytest.raises(RefusedWeights, match="wake_up"):
        site.load()
    assert site.engine.calls == []
