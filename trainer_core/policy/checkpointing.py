"""Gradient checkpointing by memory budget: on only where the activations of a forward pass would not fit."""

from __future__ import annotations

import math

import torch
from torch import nn

from atropos_common import model_math
from trainer_core.policy.load import dimensions


def use_checkpointing(model: nn.Module, mode: str, *, tokens: int, optimizer: str, device: torch.device) -> bool:
    """Switch gradient checkpointing for `mode` (auto, on or off); returns whether it is on, and says why.

    Args:
        tokens: of the largest forward pass.
        optimizer: its name; its state still has to find room.
    """
    on = mode == "on"
    if mode == "auto" and device.type == "cuda":
        trained = [p.shape for p in model.parameters() if p.requires_grad]
        wanted = activation_bytes(model, tokens)
        # Gradients and the optimizer's state are not allocated before the first step.
        gradients = model_math.GRADIENT_BYTES * sum(map(math.prod, trained))
        free = _free_bytes(device) - gradients - model_math.optimizer_bytes(trained, optimizer)
        on = wanted > free
        print(
            f"Gradient checkpointing {'on' if on else 'off'}: {tokens} tokens need about {wanted / 1e9:.1f} GB, "
            f"{max(0, free) / 1e9:.1f} GB are free"
        )
    if on:
        _enable(model)
    return on


def activation_bytes(model: nn.Module, tokens: int) -> int:
    """What the forward pass of `tokens` tokens on a GPU keeps for the backward pass, without checkpointing."""
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    estimate = model_math.activation_bytes(
        dimensions(model), tokens, width=next(model.parameters()).element_size(), on_gpu=True,
        layers=_layers_kept(model), largest=max(trained, default=0),
    )  # fmt: skip
    return estimate.total


def _layers_kept(model: nn.Module) -> int:
    """Layers from the lowest with a trained parameter up."""
    layers = model.base_model.layers
    if any(p.requires_grad for p in model.get_input_embeddings().parameters()):
        return len(layers)
    trained = [i for i, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())]
    return len(layers) - min(trained) if trained else 0


def _free_bytes(device: torch.device) -> int:
    """Free on the device, with what torch holds and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _enable(model: nn.Module) -> None:
    """Non-reentrant, and only the layers themselves in training mode: everything in them stays free of dropout."""
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    # The hook that makes embeddings require a gradient is for reentrant checkpointing: frozen layers would pay for it.
    model.disable_input_require_grads()
    for layer in model.base_model.layers:
        layer.training = True
