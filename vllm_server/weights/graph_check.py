"""Check before serving that every kind of layer computes from the tensor that a trainer writes."""

from __future__ import annotations

import logging
import math
import secrets
from typing import TYPE_CHECKING, Any

from vllm_server.generate import GenerateRequest, Generator, TokenPrompt

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Smallest change of the logprob in nats that shows a write. A tensor changed by its own magnitude
# moves it far more.
FOLLOWS = 1e-5
# Prompts that are tried before a kind counts as stale. One prompt is too few: a norm of the keys
# acts on the last key alone, so 2 to 17 % of a tiny model's tokens do not show it, and a token with
# a probability of 0.99 hides every small change.
PROMPTS = 8
# Rows that are changed in a larger tensor; the prompt's tokens are among them.
ROWS = 1024
# Rows that are changed for each expert: the token may use any of them.
EXPERT_ROWS = 64


class UnsafeGraphs(RuntimeError):
    """With CUDA graphs or compiled code some layers do not see new weights."""


# Original values of what `nudge` changed, in the worker process.
_kept: dict[str, torch.Tensor] = {}


def kinds(model: torch.nn.Module) -> list[str]:
    """In the worker: return one parameter of each kind, from the middle of the layers that have
    it."""
    # Compiled code and CUDA graphs bake in addresses, so a layer that rebinds its weights would use
    # the old ones without an error. Layers of one kind are compiled alike. Shape and class belong
    # to the kind: models with several kinds of attention, or with dense layers beside experts, use
    # equal names for them.
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, parameter in model.named_parameters():
        owner = type(model.get_submodule(name.rpartition(".")[0]))
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        if parameter.is_floating_point():
            found.setdefault((kind, owner, parameter.shape), []).append(name)
    return [same[len(same) // 2] for same in found.values()]


def nudge(model: torch.nn.Module, name: str) -> None:
    """In the worker: change the parameter in place, if this rank has it."""
    import torch

    if (part := _part(model, name)) is None:
        return
    _kept[name] = part.detach().clone()
    generator = torch.Generator(part.device).manual_seed(len(_kept[name]))
    noise = torch.empty(part.shape, dtype=torch.float32, device=part.device)
    noise.normal_(generator=generator)
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
    """In the server: return the parameters whose change no decoded token shows.

    No other request may run meanwhile.
    """
    found = await engine.collective_rpc("atropos_parameter_kinds")
    names = list(dict.fromkeys(name for rank in found for name in rank))
    stale = names
    for index in range(PROMPTS):
        if stale:
            stale = await _unmoved(stale, _request(engine, index), engine, generator)
    await engine.reset_prefix_cache()
    follow = f"{len(names) - len(stale)} of {len(names)}"
    logger.info("%s kinds of layers compute from the weights in place", follow)
    return stale


async def _unmoved(
    names: list[str], body: GenerateRequest, engine: Any, generator: Generator
) -> list[str]:
    """Return the parameters whose change leaves the answer to `body` as it is."""
    await generator.first_token(body)  # fills the prefix cache
    # Twice the same request, for the noise of the engine itself.
    before, again = await generator.first_token(body), await generator.first_token(body)
    least = max(FOLLOWS, 4 * _distance(before, again))
    unmoved = []
    # One token on a cached prefix, which is the path of decode graphs, has to show each change.
    for name in names:
        await engine.collective_rpc("atropos_nudge", args=(name,))
        try:
            changed = await generator.first_token(body)
        finally:
            await engine.collective_rpc("atropos_put_back", args=(name,))
        if _distance(before, changed) <= least:
            unmoved.append(name)
    return unmoved


# In nats; infinite for other tokens or NaN.
def _distance(one: tuple[int, float], other: tuple[int, float]) -> float:
    gap = abs(one[1] - other[1])
    return gap if one[0] == other[0] and math.isfinite(gap) else math.inf


def _request(engine: Any, index: int) -> GenerateRequest:
    block = int(engine.vllm_config.cache_config.block_size or 16)
    # The prompt without its last token fills one block of the prefix cache.
    length = min(block + 1, int(engine.model_config.max_model_len) - 1)
    tokens = min(int(engine.model_config.get_vocab_size()), 64)
    prompt = [(2 + 11 * index + i * (7 + 2 * index)) % tokens for i in range(length)]
    salted = TokenPrompt(prompt_token_ids=prompt, cache_salt=secrets.token_hex(8))
    # Seeded: the same weights must draw the same token again.
    return GenerateRequest(prompt=salted, max_tokens=1, ignore_eos=True, for_training=False, seed=0)
