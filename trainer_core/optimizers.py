"""Optimizers over parameters that may be half precision and may lie in another process's memory.

Half-precision parameters get float32 master weights and float32 gradients: plain AdamW on bf16 loses most small
updates. A step has two halves: `compute` works on the trainer's own memory, `write` changes the model's parameters.
Only `write` needs the inference server paused.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer_core.config import TrainingConfig
from trainer_core.errors import UsageError


class Stepper:
    """One optimizer over the trainable parameters of a model; gradients are collected in float32."""

    def __init__(self, model: torch.nn.Module, config: TrainingConfig) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        if not self.params:
            raise UsageError("nothing to train: --train-layer-indices leaves no parameter")
        self.config = config
        self.masters = [p if p.dtype == torch.float32 else _master(p) for p in self.params]
        for param, master in zip(self.params, self.masters, strict=True):
            if master is not param:
                param.register_post_accumulate_grad_hook(_collect_into(master))
        self.optimizer = _build(self.masters, config)
        self._pending = False

    def set_lr(self, step: int) -> float:
        """Learning rate of optimizer step `step` (from 1), warm-up included."""
        warmup = self.config.warmup_steps
        lr = self.config.lr * min(1.0, step / warmup) if warmup else self.config.lr
        for group in self.optimizer.param_groups:
            group["lr"] = None if self.config.adafactor_relative_step and _is_adafactor(self.optimizer) else lr
        return lr

    def clip(self) -> torch.Tensor:
        """Clip the gradient to `max_grad_norm`; returns its norm before, a scalar."""
        grads = [m.grad for m in self.masters if m.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if self.config.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self.masters, self.config.max_grad_norm, norm)
        return norm

    def compute(self) -> None:
        """The part that touches no shared memory: with master weights the whole update, else nothing."""
        self._pending = any(m is p for m, p in zip(self.masters, self.params, strict=True))
        if not self._pending:
            self.optimizer.step()

    @torch.no_grad()
    def write(self) -> None:
        """Put the update into the model's parameters, in place, and forget the gradient."""
        if self._pending:
            self.optimizer.step()
        own = [(p, m) for p, m in zip(self.params, self.masters, strict=True) if m is not p]
        if own:
            torch._foreach_copy_([p for p, _ in own], [m for _, m in own])
        self.zero_grad()

    def zero_grad(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            param.grad = None
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        masters = [None if m is p else m.detach() for m, p in zip(self.masters, self.params, strict=True)]
        return {"name": self.config.optimizer, "optimizer": self.optimizer.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; refuses the state of another optimizer.

        Raises:
            UsageError: the checkpoint was written with another optimizer or another set of trained parameters.
        """
        if state["name"] != self.config.optimizer or len(state["masters"]) != len(self.masters):
            raise UsageError(
                f"the checkpoint was written with --optimizer {state['name']} over {len(state['masters'])} parameters, "
                f"this run has {self.config.optimizer} over {len(self.masters)}: use the same, or --resume never"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        for master, saved in zip(self.masters, state["masters"], strict=True):
            if saved is not None:
                master.copy_(saved)


def for_device(config: TrainingConfig, device: torch.device) -> TrainingConfig:
    """On a CPU the default 8-bit optimizer becomes adamw, with a word; one that was asked for stays."""
    if device.type == "cpu" and config.optimizer == "adamw_8bit" and "optimizer" not in config.model_fields_set:
        print("Optimizer: adamw (the default adamw_8bit needs a GPU)")
        return config.model_copy(update={"optimizer": "adamw"})
    return config


def _build(params: list[torch.Tensor], config: TrainingConfig) -> torch.optim.Optimizer:
    if config.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        relative = config.adafactor_relative_step
        return Adafactor(
            params, lr=None if relative else config.lr, weight_decay=config.weight_decay, relative_step=relative,
            scale_parameter=config.adafactor_scale_parameter, warmup_init=False,
        )  # fmt: skip
    if config.optimizer == "adamw_8bit":
        try:
            from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found]
        except ImportError as error:
            raise UsageError(
                f"--optimizer adamw_8bit needs bitsandbytes ({error}): pip install bitsandbytes, or --optimizer adamw "
                "(more memory) or adafactor (no momentum)"
            ) from None
        built: torch.optim.Optimizer = AdamW8bit(
            params, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        return built
    return torch.optim.AdamW(params, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)


def _is_adafactor(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__name__ == "Adafactor"


def _master(param: torch.Tensor) -> torch.Tensor:
    return param.detach().float().clone().requires_grad_()


def _collect_into(master: torch.Tensor) -> Any:
    @torch.no_grad()
    def hook(param: torch.Tensor) -> None:
        if param.grad is None:
            return
        if master.grad is None:
            master.grad = param.grad.float()
        else:
            master.grad.add_(param.grad)
        param.grad = None

    return hook
