"""Check before serving that every kind of layer computes from the tensor that a trainer writes to.

Compiled code and CUDA graphs bake in addresses. A layer that rebinds its weights, or computes from
a copy, would use old weights forever without an error. The check changes one tensor of each kind,
decodes one token on a cached prefix (the path of decode graphs), requires its logprob to change,
and restores the tensor.
"""

from __future__ import annotations

import logging
import math
import secrets
from typing import TYPE_CHECKING, Any

from vllm_server.generate import GenerateRequest, Generator, TokenPrompt

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

FOLLOWS = 1e-5
"""Smallest change of the logprob in nats that shows a write. A tensor changed by its own magnitude
moves it far more."""
ROWS = 1024
"""Rows that are changed in a larger tensor; the prompt's tokens are among them."""
EXPERT_ROWS = 64
"""Rows that are changed for each expert in a tensor of all experts: the token may use any of
them."""


class UnsafeGraphs(RuntimeError):
    """With CUDA graphs or compiled code some layers do not see new weights."""


_kept: dict[str, torch.Tensor] = {}
"""Original values of what `nudge` changed, in the worker process."""


def kinds(model: torch.nn.Module) -> list[str]:
    """In the worker: name one parameter of each kind, from the middle of the layers that have it.

    Two parameters are of one kind if their names differ only in numbers, and shape and layer class
    are equal. Models that mix kinds of attention, or dense layers with experts, use equal names for
    them.
    """
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, parameter in model.named_parameters():
        owner = type(model.get_submodule(name.rpartition(".")[0]))
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        if parameter.is_floating_point():
            found.setdefault((kind, owner, parameter.shape), []).append(name)
    return [same[len(same) // 2] for same in found.values()]


def nudge(model: torch.nn.Module, name: str) -> None:
    """In the worker: change the parameter in place by its own magnitude; no effect if another rank
    has it."""
    import torch

    if (part := _part(model, name)) is None:
        return
    _kept[name] = part.detach().clone()
    generator = torch.Generator(part.device).manual_seed(len(_kept[name]))
    noise = torch.empty(part.shape, dtype=torch.float32, device=part.device).normal_(
        generator=generator
    )
    scale = max(float(part.float().square().mean().sqrt()), 0.1)
    part.add_((noise * scale).to(part.dtype))


def put_back(model: torch.nn.Module, name: str) -> None:
    """In the worker: undo `nudge`."""
    if (part := _part(model, name)) is not None:
        part.copy_(_kept.pop(name))


def _part(model: torch.nn.Module, name: str) -> torch.Tensor | None:
    if (parameter := dict(model.named_parameters()).get(name)) is None:
        return None
    parameter = parameter.detach()
    if parameter.ndim > 2:
        return parameter[:, :EXPERT_ROWS]
    return parameter[:ROWS] if parameter.ndim > 1 else parameter


async def stale_kinds(engine: Any, generator: Generator) -> list[str]:
    """In the server: parameters whose change a decoded token does not show; empty if all follow.

    No other request may run meanwhile.
    """
    body = _request(engine)
    await generator.first_token(body)  # fills the prefix cache
    before, again = await generator.first_token(body), await generator.first_token(body)
    least = max(FOLLOWS, 4 * _distance(before, again))
    stale = []
    found = await engine.collective_rpc("atropos_parameter_kinds")
    names = list(dict.fromkeys(name for rank in found for name in rank))
    for name in names:
        await engine.collective_rpc("atropos_nudge", args=(name,))
        try:
            changed = await generator.first_token(body)
        finally:
            await engine.collective_rpc("atropos_put_back", args=(name,))
        if _distance(before, changed) <= least:
            stale.append(name)
    await engine.reset_prefix_cache()
    logger.info(
        "%d of %d kinds of layers compute from the weights in place",
        len(names) - len(stale),
        len(names),
    )
    return stale


def _distance(one: tuple[int, float], other: tuple[int, float]) -> float:
    """Distance of two answers' logprobs in nats; infinite for different tokens or NaN."""
    gap = abs(one[1] - other[1])
    return gap if one[0] == other[0] and math.isfinite(gap) else math.inf


def _request(engine: Any) -> GenerateRequest:
    """A request for one token, whose prompt without its last token fills one block of the prefix
    cache."""
    block = int(engine.vllm_config.cache_config.block_size or 16)
    length = min(block + 1, int(engine.model_config.max_model_len) - 1)
    tokens = min(int(engine.model_config.get_vocab_size()), 64)
    prompt = [(2 + i * 7) % tokens for i in range(length)]
    salted = TokenPrompt(prompt_token_ids=prompt, cache_salt=secrets.token_hex(8))
    # Seeded: the same weights must draw the same token again.
    return GenerateRequest(prompt=salted, max_tokens=1, ignore_eos=True, for_training=False, seed=0)
