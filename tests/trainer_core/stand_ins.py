"""Stand-ins for the trainer's neighbours: an inference server that decodes from fused weights in a
shared file, atroposlib's own run-api in a thread, and an environment that sends rollouts to it."""

from __future__ import annotations

import base64
import os
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from atropos_common.protocol.bridge import completion_digest
from atropos_common.protocol.manifest import (
    CudaIpc,
    Manifest,
    Shard,
    TensorEntry,
    TensorView,
    write_manifest,
)
from tests.support.json_server import JsonServer
from trainer_core.config import TrainingConfig

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
VOCAB_PADDING = 64
TOKEN = "unit-test-token"


def fused_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters as vLLM keeps them: q,k,v and gate,up in one, the vocabulary
    padded."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for name, value in params.items():
        fused = next(
            (f for f, parts in FUSED.items() for part in parts if f".{part}." in name), None
        )
        if fused is None:
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                value = torch.nn.functional.pad(value, (0, 0, 0, -len(value) % VOCAB_PADDING))
            found[name] = value
        elif f".{FUSED[fused][0]}." in name:
            parts = [params[name.replace(FUSED[fused][0], part)] for part in FUSED[fused]]
            found[name.replace(FUSED[fused][0], fused)] = torch.cat(parts)
    return found


def cuda_handle(tensor: torch.Tensor) -> CudaIpc:
    """The tensor's storage as a CUDA IPC handle in plain fields."""
    device, handle, size, offset, counter, counter_offset, event, sync = (
        tensor.untyped_storage()._share_cuda_()
    )
    text = [base64.b64encode(raw).decode() for raw in (handle, counter, event)]
    return CudaIpc(
        device=device,
        handle=text[0],
        storage_bytes=size,
        storage_offset_bytes=offset,
        ref_counter_handle=text[1],
        ref_counter_offset=counter_offset,
        event_handle=text[2],
        event_sync_required=sync,
    )


def slice_of(tensors: dict[str, torch.Tensor], name: str, param: torch.Tensor) -> torch.Tensor:
    """The rows of a fused tensor that hold the parameter `name`, for the tiny model's shapes."""
    if name in tensors:
        return tensors[name][: len(param)]
    part = name.split(".")[-2]
    fused = next(f for f, parts in FUSED.items() if part in parts)
    whole = tensors[name.replace(part, fused)]
    start = {
        "q_proj": 0,
        "k_proj": len(whole) // 2,
        "v_proj": len(whole) * 3 // 4,
        "gate_proj": 0,
        "up_proj": len(param),
    }
    return whole[start[part] : start[part] + len(param)]


class Refused(Exception):
    """An engine's refusal, with an HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Engine:
    """An inference server: `/bridge/*` and `/generate`, computing from the shared file."""

    def __init__(self, folder: Path, model: torch.nn.Module, *, held: bool = True) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.held, self.paused, self.dirty = held, False, False
        self.version: int | None = None
        self.calls: list[str] = []
        self.digests: dict[str, tuple[int, int]] = {}
        self.dead = False
        self.stale = False
        """Planted fault: decode from a private copy of the weights."""
        self.manifest_path = folder / "vllm_bridge_config.json"
        self.lock = threading.Lock()
        self.tensors = self._share(folder / "weights", fused_tensors(model))
        self.pairs = [(p, slice_of(self.tensors, name, p)) for name, p in model.named_parameters()]
        self.server = JsonServer(self._reply)
        self.url = self.server.url
        self._write_manifest(folder / "weights")

    def die(self) -> None:
        """Hang up on every connection, as a killed process does."""
        self.dead = True

    def close(self) -> None:
        self.server.close()

    def _share(self, path: Path, fused: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.size = 0
        if self.device.type == "cuda":
            return fused
        size = sum(t.numel() * t.element_size() for t in fused.values())
        path.write_bytes(bytes(size))
        storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=size)
        shared, offset = {}, 0
        for name, value in fused.items():
            shared[name] = torch.empty(0, dtype=value.dtype).set_(
                storage, offset, value.shape, value.contiguous().stride()
            )
            shared[name].copy_(value)
            offset += value.numel()
        self.size = size
        return shared

    def _write_manifest(self, path: Path) -> None:
        entries = {
            name: TensorEntry(
                shape=list(t.shape),
                stride=list(t.stride()),
                dtype=str(t.dtype)[6:],
                offset=t.storage_offset(),
                ipc_handle=cuda_handle(t) if t.is_cuda else None,
            )
            for name, t in self.tensors.items()
        }
        views = {name: self._where(name, param) for name, param in self.model.named_parameters()}
        if self.device.type == "cuda":
            shard = Shard(kind="cuda_ipc", param_mappings=entries, views=views)
        else:
            shard = Shard(
                kind="shm",
                shm_path=str(path),
                shm_bytes=self.size,
                param_mappings=entries,
                views=views,
            )
        self.manifest = Manifest(
            model="m",
            architecture="Qwen3ForCausalLM",
            config=self.model.config.to_dict(),
            instance_id="i-1",
            server_pid=os.getpid(),
            server_create_time=psutil.Process().create_time(),
            base_url=self.url,
            vllm_version="0",
            ranks={0: shard},
        )
        write_manifest(self.manifest, self.manifest_path)

    def _where(self, name: str, param: torch.Tensor) -> TensorView:
        part = slice_of(self.tensors, name, param)
        whole = next(
            each
            for each, tensor in self.tensors.items()
            if tensor.data_ptr() <= part.data_ptr() < tensor.data_ptr() + tensor.nbytes
        )
        return TensorView(
            parameter=whole,
            offset=part.storage_offset() - self.tensors[whole].storage_offset(),
            shape=list(part.shape),
            stride=list(part.stride()),
        )

    def info(self) -> dict[str, Any]:
        return {
            "instance_id": "i-1",
            "model": "m",
            "vllm_version": "0",
            "weight_version": self.version,
            "held": self.held,
            "paused": self.paused,
            "dirty": self.dirty,
            "shared_weights": True,
        }

    @torch.no_grad()
    def sample(
        self, prompt: list[int], count: int, size: int
    ) -> list[tuple[list[int], list[float]]]:
        """`size` completions from the weights in the file, at temperature 1; their digests are
        remembered."""
        with self.lock:
            version = self.version or 0
            if not self.stale:
                for parameter, view in self.pairs:
                    parameter.copy_(view)
            tokens = torch.tensor([prompt] * size, device=self.device)
            logprobs = []
            for _ in range(count):
                last = self.model(tokens).logits[:, -1].float().log_softmax(-1)
                choice = torch.multinomial(last.exp(), 1)
                tokens = torch.cat([tokens, choice], dim=1)
                logprobs.append(last.gather(1, choice))
        found = list(
            zip(tokens[:, len(prompt) :].tolist(), torch.cat(logprobs, dim=1).tolist(), strict=True)
        )
        self.digests |= {
            completion_digest(ids, values): (version, version) for ids, values in found
        }
        return found

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        self.calls.append(path)
        if path == "/bridge/pause":
            self.paused, self.dirty = True, body["dirty"]
        elif path == "/bridge/resume":
            self.paused = self.dirty = self.held = False
            self.version = body["weight_version"]
        elif path == "/bridge/versions":
            return {"versions": [self.digests.get(d) for d in body["digests"]]}
        elif path == "/generate":
            ((ids, logprobs),) = self.sample(
                body["prompt"]["prompt_token_ids"], body["max_tokens"], 1
            )
            return {
                "logprobs": [[[{str(i): p}] for i, p in zip(ids, logprobs, strict=True)]],
                "finish_reasons": ["length"],
            }
        return self.info()

    def _reply(self, path: str, body: dict[str, Any], token: str | None) -> tuple[int, Any] | None:
        if self.dead:
            return None
        if token != TOKEN:
            return 403, {"error": "token"}
        try:
            return 200, self.answer(path, body)
        except Refused as refused:
            return refused.status, {"error": str(refused)}


class RunApiThread:
    """atroposlib's run-api, its own state wiped."""

    def __init__(self) -> None:
        import uvicorn
        from atroposlib.api.server import app

        app.state._state.clear()
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(5)


def group(engine: Engine, prompt: list[int], size: int, count: int) -> dict[str, Any]:
    """One scored group sampled from the engine: the reward is the share of even tokens."""
    answers = engine.sample(prompt, count, size)
    return {
        "tokens": [[*prompt, *ids] for ids, _ in answers],
        "masks": [[*[-100] * len(prompt), *ids] for ids, _ in answers],
        "scores": [sum(i % 2 == 0 for i in ids) / count for ids, _ in answers],
        "inference_logprobs": [[*[1.0] * len(prompt), *logprobs] for _, logprobs in answers],
        "generation_params": {"temperature": 1.0, "env": "even"},
        "env_id": 0,
    }


class EnvThread:
    """Keeps run-api's queue at one batch, sampling from the engine while it is neither held nor
    paused."""

    def __init__(self, url: str, engine: Engine, *, groups: int, size: int) -> None:
        self.stop = threading.Event()
        self.thread = threading.Thread(
            target=self._run, args=(url, engine, groups, size), daemon=True
        )
        self.thread.start()

    def _run(self, url: str, engine: Engine, groups: int, size: int) -> None:
        with httpx.Client(base_url=url) as http:
            while not self.stop.wait(0.005):
                if (
                    engine.held
                    or engine.paused
                    or http.get("/status").json()["queue_size"] >= groups
                ):
                    continue
                for i in range(groups):
                    http.post("/scored_data", json=group(engine, [3 + i % 5, 12, 4, 13], size, 3))

    def close(self) -> None:
        self.stop.set()
        self.thread.join(5)


def plain_model(base: Path) -> torch.nn.Module:
    """The model as plain transformers loads it, in float32."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return model.eval()


def run_config(
    engine: Engine, base: Path, tmp_path: Path, url: str = "http://127.0.0.1:9", **fields: Any
) -> TrainingConfig:
    """A run of four steps against `engine`; `fields` go on top."""
    return TrainingConfig.model_validate(
        {
            "model_name": str(base),
            "weight_bridge_mode": "shared_vllm",
            "dtype": "float32",
            "device": "cpu",
            "optimizer": "adamw",
            "lr": 1e-3,
            "training_steps": 4,
            "batch_size": 4,
            "gradient_accumulation_steps": 4,
            "checkpoint_interval": 0,
            "vllm_config_path": str(engine.manifest_path),
            "atropos_url": url,
            "save_path": str(tmp_path / "out"),
            "engine_timeout": 0.3,
            "api_timeout": 0.3,
            **fields,
        }
    )


class Recorded:
    """A fixed stream of batches in place of run-api."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def next_batch(self, step: int, on_idle: Any = None) -> Any:
        return self.batches[step]

    def close(self) -> None:
        pass
