"""The trainer's side of one mode: attach, steps with a publish, probe; for `weight_sync.py`.

    python -m benchmarks.weights.sync_trainer MODEL_DIR SHAPE MODE PORT FOLDER DEVICE DTYPE
        PUBLISH_EVERY

It is the product's own strategy (`make_sync`), optimizer and step, on random batches, without
run-api. Lines on stdin, each answered with one JSON line: "attach", "train N", "head URL" (see
`Heads`).
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import random
import re
import sys
import threading
import time
import traceback
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.support.children import answer
from benchmarks.trainer_step import make_batch
from trainer_core.checkpoints import checkpoint
from trainer_core.config import TrainingConfig
from trainer_core.objective.alignment import DiffSums, diff_sums
from trainer_core.objective.registry import Objective
from trainer_core.optimization.optimizers import Stepper
from trainer_core.optimization.step import accumulate
from trainer_core.policy.attention import layout
from trainer_core.policy.load import empty_model, load_config, load_model
from trainer_core.policy.logprobs import chunked_scores, completions_logprobs
from trainer_core.rollouts.batch import read_batch
from trainer_core.rollouts.packing import pack
from trainer_core.server.client import GeneratedTokens, ServerClient
from trainer_core.weight_sync.base import Start, make_sync

PROMPTS, PROMPT_TOKENS, PROBE_TOKENS = 8, 100, 64
BLOCK = 512
"""Bytes; the least that torch's allocator gives out on a GPU."""
BRIDGE_MODES: dict[str, dict[str, Any]] = {
    "heads": {},
    "broadcast": {"weight_bridge_mode": "shared_vllm", "use_shared_memory": True},
}


def ask(engine: ServerClient, vocabulary: int) -> list[tuple[list[int], GeneratedTokens]]:
    """Prompts with two completions each, the second on the cached prefix."""
    dice = random.Random(7)
    prompts = [
        [dice.randrange(2, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)
    ]
    return [(prompt, engine.generate(prompt, PROBE_TOKENS)) for prompt in prompts for _ in range(2)]


def allocated(device: torch.device) -> int:
    """Bytes of tensors on a GPU, 0 elsewhere. Without cuBLAS' workspaces (32 MiB at the first
    product on an H100 or H200), which the same allocator holds; the CUDA notes of torch name this
    call to free them."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return int(torch.cuda.memory_allocated(device))


def own_bytes(model: torch.nn.Module, device: torch.device, before: int) -> int:
    """Memory that the model's weights take in this process: none for views of a server's
    tensors."""
    if device.type == "cuda":
        # Rotary tables are the trainer's own in every mode; torch gives memory out in whole blocks.
        buffers = {
            b.untyped_storage().data_ptr(): b.untyped_storage().nbytes()
            for b in model.buffers()
            if b.is_cuda
        }
        return (
            allocated(device) - before - sum(-(-size // BLOCK) * BLOCK for size in buffers.values())
        )
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(s.nbytes() for s in storages.values() if s.filename is None)


class Trainer:
    """The work of `atropos-trainer` in `mode`."""

    def __init__(self, argv: list[str]) -> None:
        model, self.shape, self.mode, port, folder, device, dtype, every = argv
        self.device = torch.device(device)
        settings = BRIDGE_MODES.get(self.mode, {"weight_bridge_mode": self.mode})
        self.config = TrainingConfig.model_validate(
            settings
            | {
                "model_name": model,
                "vllm_port": int(port),
                "dtype": dtype,
                "device": device,
                "batch_size": 8,
                "gradient_accumulation_steps": 2,
                "seq_len": 2048,
                "optimizer": "adamw",
                "lr": 1e-5,
                "lora_r": 16,
                "save_path": f"{folder}/checkpoints",
                "log_dir": f"{folder}/logs",
                "vllm_restart_interval": int(every),
                "gpu_memory_utilization": 0.12,
                "max_model_len": 1024,
            }
        )
        if device == "cpu":
            torch.set_num_threads(1)
        # What a process pays once is not part of attaching: imports, the CUDA context,
        # transformers' lazy modules.
        torch.zeros(1, device=self.device)
        empty_model(load_config(model), getattr(torch, dtype))

    def attach(self, flags: list[str]) -> dict[str, Any]:
        before = allocated(self.device)
        began = time.perf_counter()
        self.sync = make_sync(self.config, self.device, threading.Event())
        # Broadcasts have none, and leave every server to others.
        if (lifecycle := getattr(self.sync, "lifecycle", None)) is not None:
            lifecycle.flags += flags  # of the server that it starts by itself
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            self.model = self.sync.attach(Start())
        seconds = time.perf_counter() - began
        print(said.getvalue(), end="")
        mapped = re.search(r"^Attached .* in ([\d.]+) s", said.getvalue(), re.MULTILINE)
        weights = own_bytes(self.model, self.device, before)
        self.stepper = Stepper(self.model, self.config)
        # Single copy says how long mapping took; the rest of attaching proves the sharing, with
        # kernels' first use.
        return {
            "attach_s": seconds,
            "map_s": float(mapped[1]) if mapped else None,
            "weight_bytes": weights,
        }

    def train(self, steps: int) -> dict[str, Any]:
        reports, lasted = [], []
        for step in range(1, steps + 1):
            began = time.perf_counter()
            batch = read_batch(
                make_batch(self.shape, "short", groups=2, prompt=64), seq_len=self.config.seq_len
            )
            rows = pack(batch.rollouts, self.config.tokens_per_pass)
            outcome = accumulate(self.model, self.stepper, rows, Objective(self.config), step)
            assert outcome.finite, outcome
            self.stepper.compute()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            reports.append(self.sync.publish(step, self.stepper.write))
            lasted.append(time.perf_counter() - began)
        # A mode that reloads every N steps only writes in between.
        whole = [report for report in reports if report.moved]
        names = list(dict.fromkeys(name for report in whole for name in report.phases))
        answers = ask(self.sync.engines[0], self.model.config.vocab_size)
        ours = completions_logprobs(self.model, [(prompt, c.token_ids) for prompt, c in answers])
        total = sum(
            (diff_sums(mine, c.logprobs) for mine, (_, c) in zip(ours, answers, strict=True)),
            DiffSums(),
        )
        cuda = self.device.type == "cuda"
        target = Path(self.config.save_path) / "final_model"
        saved = checkpoint.save(
            self.model, self.config, target, step=steps, version=steps, stepper=None
        )
        return {
            "steps": steps,
            "step_s": median(lasted),
            "checkpoint_bytes": saved.bytes,
            "checkpoint_s": saved.seconds,
            "publishes": len(whole),
            "publish_s": median(r.seconds for r in whole),
            "publish_max_s": max(r.seconds for r in whole),
            "each_s": [r.seconds for r in whole],
            "phases": {name: median(r.phases.get(name, 0.0) for r in whole) for name in names},
            "probe_abs_mean": total.abs_diff / total.tokens,
            "probe_abs_max": total.abs_max,
            "probe_tokens": total.tokens,
            "cached_tokens": sum(c.cached_tokens or 0 for _, c in answers),
            "state_bytes": allocated(self.device) if cuda else None,
            "version": self.sync.engines[0].info().weight_version,
        }


class Heads:
    """Logprobs of servers with a half-precision and an fp32 head, against ours with either, all at
    the base weights."""

    def __init__(self, trainer: Trainer) -> None:
        self.model = load_model(
            trainer.config.model_name, getattr(torch, trainer.config.dtype), trainer.device
        )

    @torch.no_grad()
    def ours(self, prompt: list[int], completion: list[int], *, wide: bool) -> list[float]:
        tokens = torch.tensor(prompt + completion, device=self.model.device)
        head = self.model.get_output_embeddings().weight
        hidden = self.model.base_model(
            input_ids=tokens[None],
            position_ids=torch.arange(len(tokens), device=tokens.device)[None],
            use_cache=False,
            packing=layout((len(tokens),), tokens.device, head.dtype),
        ).last_hidden_state[0, len(prompt) - 1 : -1]
        if wide:
            hidden, head = hidden.float(), head.float()
        ones = torch.ones(len(completion), device=tokens.device)
        return chunked_scores(hidden, head, None, tokens[len(prompt) :], ones).logprobs.tolist()

    def against(self, url: str) -> dict[str, float]:
        """Mean |difference| of the server at `url` to our half-precision and our fp32 head."""
        half, wide = DiffSums(), DiffSums()
        for prompt, completion in ask(ServerClient(url), self.model.config.vocab_size):
            half += diff_sums(
                self.ours(prompt, completion.token_ids, wide=False), completion.logprobs
            )
            wide += diff_sums(
                self.ours(prompt, completion.token_ids, wide=True), completion.logprobs
            )
        return {"ours_half": half.abs_diff / half.tokens, "ours_fp32": wide.abs_diff / wide.tokens}


def carry_out(trainer: Trainer, verb: str, rest: list[Any]) -> dict[str, Any]:
    if verb == "attach":
        return trainer.attach(rest)
    if verb == "train":
        return trainer.train(int(rest[0]))
    heads = Heads(trainer)
    return {name: heads.against(url) for name, url in rest[0].items()}


def main(argv: list[str]) -> None:
    Path(argv[4]).mkdir(parents=True, exist_ok=True)
    trainer = Trainer(argv)
    answer({"ready": True})
    for line in sys.stdin:
        verb, *rest = json.loads(line)
        try:
            answer(carry_out(trainer, verb, rest))
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
    if hasattr(trainer, "sync"):
        trainer.sync.close()


if __name__ == "__main__":
    main(sys.argv[1:])
