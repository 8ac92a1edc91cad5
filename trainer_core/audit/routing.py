"""Mixtures of experts whose router is at a tie: both sides are right, and take other experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer_core.audit.reference import Reference, Span

# Share of the tokens that must be far from a tie for a comparison.
APART = 0.2
FEWEST = 16
APART_FACTOR = 3.0
"""Least ratio of the differences near a tie and far from one."""


def router_ties(
    reference: Reference, spans: Sequence[Span], theirs: torch.Tensor, bound: float
) -> str | None:
    """Evidence that only tokens near a router's tie differ, or None."""
    margins = _margins(reference, spans)
    if margins is None:
        return None
    gaps = (torch.cat(reference.logprobs(spans)) - theirs).abs()
    order = margins.argsort(descending=True)
    count = max(FEWEST, int(APART * len(order)))
    if 2 * count > len(order):
        return None
    far, near = gaps[order[:count]], gaps[order[-count:]]
    if float(far.mean()) > bound or float(near.mean()) < APART_FACTOR * float(far.mean()):
        return None
    return (
        f"tokens near a tie of the router differ by {float(near.mean()):.2g} nats, tokens far from "
        f"one by {float(far.mean()):.2g}: both sides take other experts"
    )


def has_routers(model: nn.Module) -> bool:
    """Tell whether the model is a mixture of experts that this module can read."""
    return bool(_routers(model))


def _routers(model: nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "top_k", None), int) and hasattr(module, "weight")
    ]


def _margins(reference: Reference, spans: Sequence[Span]) -> torch.Tensor | None:
    """Smallest distance of a token, or of one before it, to another choice of experts."""
    routers = _routers(reference.model)
    if not routers:
        return None
    found = []
    for span in spans:
        seen: list[torch.Tensor] = []
        with _watched(routers, seen):
            reference.logprobs([span])
        least = torch.stack(seen).amin(0)[: len(span.tokens)]
        # The state that predicts a token lies one position before it.
        found.append(least[span.start - 1 : len(span.tokens) - 1].cpu())
    return torch.cat(found)


@contextmanager
def _watched(routers: Sequence[Any], seen: list[torch.Tensor]) -> Iterator[None]:
    def note(module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        states = arguments[0].reshape(-1, arguments[0].shape[-1])
        scores = torch.nn.functional.linear(states, module.weight)
        top = scores.topk(module.top_k + 1, dim=-1).values
        seen.append(top[:, -2] - top[:, -1])

    handles = [router.register_forward_hook(note) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
