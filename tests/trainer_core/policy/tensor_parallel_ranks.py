"""Ranks of `test_tensor_parallel.py`: a policy over the parts of a made-up server, laid out as vLLM
does, against the same policy whole."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from atropos_common.protocol.manifest import Shard, TensorEntry, TensorView
from tests.support.made_rollouts import rollouts_of
from trainer_core.checkpoints import checkpoint, state
from trainer_core.config import TrainingConfig
from trainer_core.errors import UsageError
from trainer_core.objective.registry import Objective
from trainer_core.optimization.optimizers import Stepper
from trainer_core.optimization.step import accumulate
from trainer_core.policy import sharding
from trainer_core.policy.attention import register
from trainer_core.policy.load import (
    attach_views,
    decoder_layers,
    empty_model,
    load_model,
)
from trainer_core.policy.logprobs import row_logprobs, row_scores, whole_row
from trainer_core.policy.proof import prove
from trainer_core.policy.sharding import copy_weights
from trainer_core.policy.tensor_parallel import TensorParallel
from trainer_core.ranks.group import join
from trainer_core.ranks.world import World
from trainer_core.rollouts.packing import pack

BACKEND = aot_autograd(fw_compiler=lambda graph, _: graph.forward)
PADDING = 64
"""To a multiple of it vLLM pads a vocabulary before it splits it."""
SHAPE: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
ONE_KEY = SHAPE | {"num_key_value_heads": 1}
CONFIGS: dict[str, PreTrainedConfig] = {
    "norms of heads": Qwen3Config(**SHAPE),
    "tied": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "fewer heads for keys than ranks": Qwen3Config(**ONE_KEY),
    "biases of fewer heads": Qwen2Config(
        **{name: n for name, n in ONE_KEY.items() if name != "head_dim"}
    ),
    "soft caps": Gemma2Config(**SHAPE, query_pre_attn_scalar=8, sliding_window=16),
}


def whole_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The same weights on every rank, none of them 0 or 1 by rule."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape).to(dtype))
    return model


def served(model: torch.nn.Module, rank: int, size: int) -> tuple[dict[str, torch.Tensor], Shard]:
    """Return the tensors that vLLM's worker `rank` holds of `model`, and its manifest of them."""
    config, tensors, views = model.config, {}, {}
    fused: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        value, leaf = parameter.detach(), name.split(".")[-2]
        begin = [0] * value.ndim
        if leaf in ("q_proj", "gate_proj", "up_proj"):
            part, begin[0] = value.chunk(size)[rank], rank * (len(value) // size)
        elif leaf in ("k_proj", "v_proj"):
            parts = min(size, config.num_key_value_heads)
            at = rank * parts // size
            part, begin[0] = value.chunk(parts)[at], at * (len(value) // parts)
        elif leaf in ("o_proj", "down_proj") and value.ndim == 2:
            part, begin[1] = value.chunk(size, dim=1)[rank], rank * (value.shape[1] // size)
        elif leaf in ("embed_tokens", "lm_head"):
            rows = -(-len(value) // PADDING) * PADDING // size
            part = value[
                rank * rows : (rank + 1) * rows
            ]  # of the last one nothing, where the padding is all it has
            begin[0] = rank * rows if len(part) else 0
        else:
            part = value
        holder = {
            "q_proj": "qkv_proj",
            "k_proj": "qkv_proj",
            "v_proj": "qkv_proj",
            "gate_proj": "gate_up_proj",
            "up_proj": "gate_up_proj",
        }.get(leaf, leaf)
        where = name.replace(leaf, holder)
        offset = sum(each.numel() for each in fused.get(where, []))
        fused.setdefault(where, []).append(part)
        cut = part.shape != value.shape
        views[name] = TensorView(
            parameter=where,
            offset=offset,
            shape=list(part.shape),
            stride=[*part.shape[1:], 1],
            begin=begin if cut else None,
            whole=list(value.shape) if cut else None,
        )
    for where, parts in fused.items():
        tensors[where] = torch.cat(parts).contiguous()
    entries = {
        name: TensorEntry(shape=list(t.shape), stride=list(t.stride()), dtype=str(t.dtype)[6:])
        for name, t in tensors.items()
    }
    return tensors, Shard(kind="shm", param_mappings=entries, views=views)


def cut_model(whole: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The policy over this rank's part of what a server has of `whole`, and that memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, _ = served(whole, rank, size)
    shards = {each: served(whole, each, size)[1] for each in range(size)}
    model = empty_model(whole.config, next(whole.parameters()).dtype)
    attach_views(model, mine, shards[rank])
    model.parallel = TensorParallel(model, shards, rank)  # type: ignore[assignment]
    return model, mine


def config_of(**fields: Any) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {"model_name": "m", "optimizer": "adamw", "lr": 1e-2, **fields}
    )


def step(model: torch.nn.Module, config: TrainingConfig) -> tuple[Any, Stepper]:
    """Gradient of some rollouts, not yet applied."""
    stepper = Stepper(model, config)
    outcome = accumulate(model, stepper, pack(rollouts_of(), 60), Objective(config), 1)
    return outcome, stepper


def largest_gap(
    model: torch.nn.Module, wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> float:
    """Between this rank's parts and what they should be, in the largest of `wanted`."""
    worst = 0.0
    for name, whole in wanted.items():
        mine = model.parallel.part(name).take(whole)
        assert mine.shape == found[name].shape
        if mine.numel():
            worst = max(
                worst, ((mine - found[name]).abs().max() / whole.abs().max().clamp(min=1e-3)).item()
            )
    return worst


def compare(name: str) -> dict[str, float]:
    """Scores, what is saved, gradient and step of one model in parts, each against the whole
    one."""
    whole = whole_model(CONFIGS[name])
    whole.set_attn_implementation(register())
    whole.eval()
    model, memory = cut_model(whole)
    pair = (whole, model)
    found = {"proof": prove(model), **_scores(pair)}
    saved = dict(model.parallel.gathered())
    if dist.get_rank() == 0:
        assert saved.keys() == dict(whole.named_parameters()).keys()
        found["saved"] = max((saved[n] - p).abs().max().item() for n, p in whole.named_parameters())
    config = config_of(max_grad_norm=0.05)
    (one, wholly), (other, partly) = (step(each, config) for each in pair)
    gradients = [{n: p.grad.clone() for n, p in each.named_parameters()} for each in pair]
    found["gradient"] = largest_gap(model, *gradients)
    found["norm"] = (
        abs(one.metrics["grad_norm"] - other.metrics["grad_norm"]) / one.metrics["grad_norm"]
    )
    found["loss"], found["entropy"] = (
        abs(one.metrics["loss"] - other.metrics["loss"]),
        abs(one.metrics["entropy_mean"] - other.metrics["entropy_mean"]),
    )
    for stepper in (wholly, partly):
        stepper.compute()
        stepper.write()
    model.parallel.settle()
    # Adam divides a gradient by its size, and with it the rounding of one that is nearly 0.
    clear = {n: g.abs() > 0.01 * g.abs().max() for n, g in gradients[0].items()}
    after = {n: p.detach() * clear[n] for n, p in whole.named_parameters()}
    mine = {
        n: p.detach() * model.parallel.part(n).take(clear[n]) for n, p in model.named_parameters()
    }
    found["step"] = largest_gap(model, after, mine)
    places = {tensor.untyped_storage().data_ptr() for tensor in memory.values()}
    assert all(p.untyped_storage().data_ptr() in places for p in model.parameters()), (
        "the server's memory is stepped"
    )
    return found


def _scores(pair: tuple[torch.nn.Module, torch.nn.Module]) -> dict[str, float]:
    """Logprobs of several labels at each position, as a teacher's, and the gradient of what knows
    the vocabulary."""
    row = whole_row([torch.arange(3, 40), torch.arange(30, 75)])
    labels = torch.stack([row.labels, (row.labels + 40) % 80, row.labels], dim=1)
    scores = [row_scores(each, row, labels=labels) for each in pair]
    weights = torch.linspace(-1, 1, labels.numel()).view(labels.shape)
    ends = []
    for each, score in zip(pair, scores, strict=True):
        (score.logprobs * weights).sum().backward()
        ends.append(
            {n: p.grad.clone() for n, p in each.named_parameters() if "embed" in n or "head" in n}
        )
        each.zero_grad()
    return {
        "several labels": (scores[0].logprobs - scores[1].logprobs).abs().max().item(),
        "their entropy": (scores[0].entropy - scores[1].entropy).abs().max().item(),
        "their gradient": largest_gap(pair[1], *ends),
    }


def everything(folder: Path, *models: str) -> int:
    """All of it on this rank; what it found is left as JSON."""
    torch.set_num_threads(1)
    world = join(torch.device("cpu"), 60.0)
    found = {
        "models": {name: compare(name) for name in models},
        "copies": _copies(),
        "resume": _resume(folder, world),
    }
    found["compiled"] = _compiled()
    (folder / f"answer.{world.rank}").write_text(json.dumps(found))
    world.close()
    return 0


def _resume(folder: Path, world: World) -> dict[str, Any]:
    """The step after a checkpoint, made at once and by a trainer that begins with it; and by one
    that has no parts."""
    whole = whole_model(CONFIGS["norms of heads"])
    world.share(lambda: whole.save_pretrained(folder / "base"))
    config = config_of(model_name=str(folder / "base"), save_path=str(folder / "out"))

    def one(model: torch.nn.Module, stepper: Stepper, number: int) -> list[torch.Tensor]:
        accumulate(model, stepper, pack(rollouts_of(seed=number), 60), Objective(config), number)
        stepper.compute()
        stepper.write()
        model.parallel.settle()
        return [parameter.detach().clone() for parameter in model.parameters()]

    model, _ = cut_model(whole)
    stepper = Stepper(model, config, world)
    one(model, stepper, 1)
    saved = checkpoint.save_step(model, config, stepper, step=1, version=1, world=world)
    at_once = one(model, stepper, 2)
    read: list[Any] = []
    with patch.object(sharding, "load_model", lambda *args: read.append(args) or load_model(*args)):
        copy_weights(model, saved.path, world)
    again = Stepper(model, config, world)
    state.restore(saved.path, again)
    later = one(model, again, 2)
    try:
        state.restore(saved.path, Stepper(whole, config, world))
        refused = ""
    except UsageError as error:
        refused = str(error)
    return {"equal": all(map(torch.equal, at_once, later)), "refused": refused, "read": len(read)}


def _copies() -> dict[str, Any]:
    """Five steps in half precision, with kernels that round each in their own way: copies with
    other bits."""
    whole = whole_model(CONFIGS["fewer heads for keys than ranks"], torch.bfloat16)
    model, _ = cut_model(whole)
    stepper = Stepper(model, config_of(master_weights="stochastic", max_grad_norm=0.05))
    apart = 0
    for number in range(1, 6):
        accumulate(
            model, stepper, pack(rollouts_of(seed=number), 60), Objective(stepper.config), number
        )
        stepper.compute()
        stepper.write()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + dist.get_rank() / 128)
        apart += _differ(model)
        model.parallel.settle()
    moved = max(
        (model.parallel.part(n).take(p) - model.get_parameter(n)).abs().max().item()
        for n, p in whole.named_parameters()
        if model.get_parameter(n).numel()
    )
    return {"before": apart, "after": _differ(model), "moved": moved}


def _compiled() -> dict[str, Any]:
    """Compare the layers that torch compiles with those it does not. A graph for each layer would
    end after the eighth."""
    whole = whole_model(CONFIGS["norms of heads"])
    whole.set_attn_implementation(register())
    model, _ = cut_model(whole)
    gradients = []
    for compiled in (False, True):
        for layer in decoder_layers(model) if compiled else ():
            layer.compile(dynamic=True, backend=BACKEND)
        for length in (40, 57):
            model.zero_grad()
            row_logprobs(model, whole_row([torch.arange(3, 3 + length)])).sum().backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    equal = all(
        torch.equal(*pair)
        for i in (0, 1)
        for pair in zip(gradients[i], gradients[i + 2], strict=True)
    )
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": len(counters["graph_break"]),
        "equal": equal,
    }


def _differ(model: torch.nn.Module) -> int:
    """Parameters that all ranks have, and not with the same bits."""
    count = 0
    for name, parameter in model.named_parameters():
        if (
            math.prod(model.parallel.part(name).shape) == math.prod(model.parallel.part(name).whole)
            or "k_proj" in name
        ):
            seen = [torch.empty_like(parameter.detach()) for _ in range(dist.get_world_size())]
            dist.all_gather(seen, parameter.detach().contiguous())
            count += any(not torch.equal(seen[0], each) for each in seen)
    return count
