"""Does single copy find the tensors of models that it knows nothing of: a start, the proof and two writes of each.

    python -m benchmarks.any_model [--models qwen3-moe phi3 gemma3 ...] [--wide] [--limit SECONDS] [--json FILE]

Random weights, real servers (`python -m vllm_server`, CUDA graphs on a GPU), all started together. For each the
trainer's own strategy attaches; the views are compared with the checkpoint bit for bit; then all weights change in
place, twice, and what the server answers is compared with transformers on the same weights. Exit 1 if one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.children import TOKEN, Server, environment, free_ports

_TWO_EXPERTS = {"num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name: class, class of its configuration, and what differs from the common shape
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"tie_word_embeddings": True}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"sliding_window": 64}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"num_experts": 8, "moe_intermediate_size": 128, **_TWO_EXPERTS},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {"num_local_experts": 4, "sliding_window": None, **_TWO_EXPERTS},
    ),
}
BOUND = {"float32": 1e-4, "bfloat16": 0.25}
"""Nats between server and transformers, at most; the weights' change moves answers by more."""
PROMPT = [2 + (i * 7) % 60 for i in range(40)]


def make(name: str, folder: Path, *, wide: bool, dtype: str) -> Path:
    """Save a random model; `wide` is 1,024 across instead of 128."""
    import transformers

    cls, config_cls, changes = MODELS[name]
    size = 1024 if wide else 128
    shape = {
        "vocab_size": 2048, "hidden_size": size, "intermediate_size": 2 * size, "num_hidden_layers": 4,
        "num_attention_heads": size // 64, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "dtype": dtype,
    }  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config_cls)(**{**shape, **changes}))
    with torch.no_grad():  # larger than transformers' own start: a tensor in the wrong place shows in every logprob
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1, "pad_token_id": 0}')
    return folder


def begin(folder: Path, model: Path, port: int, device: str, dtype: str) -> Server:
    flags = [
        "--model", str(model), "--dtype", dtype, "--max-model-len", "256", "--skip-tokenizer-init",
        "--kv-cache-memory-bytes", str((64 if device == "cpu" else 512) << 20),
    ]  # fmt: skip
    flags += ["--enforce-eager"] if device == "cpu" else ["--gpu-memory-utilization", "0.1"]
    extra = {"VLLM_ENABLE_SHARED_WEIGHTS": "1", "ATROPOS_HOLD_GENERATION": "1"}
    return Server(folder, port, flags, environment(folder, None if device == "cpu" else 0, extra))


def answer_of(url: str) -> list[tuple[int, float]]:
    """Sampled tokens and their logprobs."""
    body = {"prompt": PROMPT, "n": 4, "max_tokens": 16, "ignore_eos": True, "temperature": 1.0}
    found = httpx.post(url + "/generate", json=body, headers={"X-Atropos-Token": TOKEN}, timeout=60).json()
    return [
        [(token, position[0][str(token)]) for token, position in zip(tokens, positions, strict=True)]
        for tokens, positions in zip(found["token_ids"], found["logprobs"], strict=True)
    ]


@torch.no_grad()
def gap(policy: torch.nn.Module, plain: torch.nn.Module, answers: Any) -> float:
    """Mean |server - transformers with the policy's weights|."""
    for mine, theirs in zip(plain.parameters(), policy.parameters(), strict=True):
        mine.copy_(theirs)
    gaps = []
    for answer in answers:
        tokens, theirs = [token for token, _ in answer], [value for _, value in answer]
        logits = plain(torch.tensor([PROMPT + tokens], device=plain.device)).logits[0, len(PROMPT) - 1 : -1]
        ours = logits.float().log_softmax(-1)[range(len(tokens)), tokens].tolist()
        gaps += [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return sum(gaps) / len(gaps)


@torch.no_grad()
def change(policy: torch.nn.Module) -> None:
    for parameter in policy.parameters():
        parameter.mul_(1 + torch.rand_like(parameter) * 0.5)


def check(server: Server, model: Path, device: str, dtype: str, until: float) -> dict[str, Any]:
    """Attach, compare, write twice.

    Raises:
        AssertionError: something does not fit; whatever server and trainer raise.
    """
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from trainer_core.config import TrainingConfig
    from trainer_core.policy.checkpoint_layout import checkpoint_tensors
    from trainer_core.weight_sync.base import Start
    from trainer_core.weight_sync.shared_vllm import SingleCopy

    server.wait_ready(until)
    manifest = server.log.parent / "bridge" / "vllm_bridge_config.json"
    config = TrainingConfig.model_validate(
        {
            "model_name": str(model), "weight_bridge_mode": "shared_vllm", "dtype": dtype, "device": device,
            "vllm_config_path": str(manifest), "engine_timeout": 60,
        }
    )  # fmt: skip
    sync = SingleCopy(config, torch.device(device), threading.Event())
    began = time.perf_counter()
    policy = sync.attach(Start())
    attach_s = time.perf_counter() - began
    mine, checkpoint = checkpoint_tensors(policy), load_file(model / "model.safetensors")
    assert mine.keys() == checkpoint.keys(), mine.keys() ^ checkpoint.keys()
    unequal = [name for name in mine if not torch.equal(mine[name].cpu(), checkpoint[name])]
    assert not unequal, f"not the checkpoint's: {unequal[:5]}"
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()
    before = answer_of(server.url)
    gaps, moved = [gap(policy, plain, before)], []
    for version in (1, 2):
        sync.publish(version, lambda: change(policy))
        moved.append(gap(policy, plain, before))
        before = answer_of(server.url)
        gaps.append(gap(policy, plain, before))
    info = sync.engine.info()
    sync.close()
    assert max(gaps) < BOUND[dtype] and max(gaps) < min(moved) / 2, f"gaps {gaps}, the changes moved by {moved}"
    return {
        "start_s": round(server.ready_s or 0, 1), "attach_s": round(attach_s, 2), "tensors": len(mine),
        "parameters": len(list(policy.parameters())), "mean_abs_diff": gaps, "moved": moved,
        "eager_because": info.eager_because,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=["qwen3-moe", "phi3", "gemma3"])
    parser.add_argument("--wide", action="store_true", help="1,024 across instead of 128")
    parser.add_argument("--limit", type=float, default=400, help="seconds for everything")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    os.environ["ATROPOS_TOKEN"] = TOKEN
    found: dict[str, Any] = {}
    until = time.perf_counter() + options.limit
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        servers = {}
        for name, port in zip(options.models, free_ports(len(options.models)), strict=True):
            model = make(name, folder / name / "model", wide=options.wide, dtype=dtype)
            servers[name] = begin(folder / name, model, port, device, dtype)
            stack.callback(servers[name].close)
        for name, server in servers.items():
            try:
                found[name] = check(server, folder / name / "model", device, dtype, until)
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
            print(name, json.dumps(found[name]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return int(any("error" in each for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
