"""Optimizers over parameters that may be half precision and may lie in another process's memory.

Half-precision parameters are stepped as float32 (`masters.py`) with float32 gradients: plain AdamW on bf16 loses most
small updates. A step has two halves: `compute` works on the trainer's own memory, `write` changes the model's
parameters. Only `write` needs the inference server paused.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from trainer_core.config import TrainingConfig
from trainer_core.errors import UsageError
from trainer_core.masters import Masters, make_masters

CPU_PACK_TOKENS = 2048
"""Tokens of a forward pass on a CPU: larger rows leave its caches and gain nothing."""


class Stepper:
    """One optimizer over the trainable parameters of a model; gradients are collected in float32."""

    def __init__(self, model: torch.nn.Module, config: TrainingConfig) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        if not self.params:
            raise UsageError("nothing to train: --train-layer-indices leaves no parameter")
        self.config = config
        # float32 parameters are stepped in place; the others as what `masters` makes of them.
        half = [p for p in self.params if p.dtype != torch.float32]
        self.half: Masters = make_masters(config.master_weights, half, config.seed)
        found = iter(self.half.masters)
        self.masters = [p if p.dtype == torch.float32 else next(found) for p in self.params]
        for param, master in zip(half, self.half.masters, strict=True):
            param.register_post_accumulate_grad_hook(_collect_into(master))
        self.optimizer = _build(self.masters, config)
        self._pending = False
        self.unwritten = False
        """Whether an update is computed, in full or in part, that `write` has not put into the parameters."""

    def set_lr(self, step: int) -> float:
        """Learning rate of optimizer step `step` (from 1)."""
        lr = learning_rate(self.config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = None if self.config.adafactor_relative_step and _is_adafactor(self.optimizer) else lr
        return lr

    def take_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        """Use `gradients` of `params`, float32, instead of what backward passes collect."""
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient

    def clip(self) -> torch.Tensor:
        """Clip the gradient to `max_grad_norm`; returns its norm before, a scalar."""
        grads = [m.grad for m in self.masters if m.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if self.config.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self.masters, self.config.max_grad_norm, norm)
        return norm

    def compute(self) -> None:
        """The part that touches no shared memory: the whole update, unless some parameter is stepped in place."""
        self.unwritten = True
        self._pending = len(self.half.masters) < len(self.params)
        if not self._pending:
            self._step()

    @torch.no_grad()
    def write(self) -> None:
        """Put the update into the model's parameters, in place, and forget the gradient."""
        if self._pending:
            self._step()
        self.half.write()
        self.zero_grad()

    def copies(self) -> dict[torch.Tensor, torch.Tensor]:
        """Parameter -> its float32 copy in the trainer's own memory, for those that have one at this moment."""
        pairs = zip(self.params, self.masters, strict=True)
        return {p: m.detach() for p, m in pairs if m is not p and m.untyped_storage().nbytes()}

    def _step(self) -> None:
        self.half.load()
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.unwritten = False
        for param, master in zip(self.params, self.masters, strict=True):
            param.grad = None
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "name": self.config.optimizer, "masters": self.half.name, "parameters": len(self.params),
            "optimizer": self.optimizer.state_dict(), "weights": self.half.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; refuses the state of another optimizer.

        Raises:
            UsageError: the checkpoint was written with another optimizer, other master weights or another set of
                trained parameters.
        """
        mine = (self.config.optimizer, self.half.name, len(self.params))
        theirs = (state["name"], state["masters"], state["parameters"])
        if mine != theirs:
            raise UsageError(
                "the checkpoint was written with --optimizer {} and --master-weights {} over {} parameters, this run "
                "has {} and {} over {}: use the same, or --resume never".format(*theirs, *mine)
            )
        self.optimizer.load_state_dict(state["optimizer"])
        self.half.load_state_dict(state["weights"])


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Of optimizer step `step` (from 1): linear warm-up, then constant, or down to `lr_min` at the end of the run.

    The last step still has a little more than `lr_min`, as in transformers' schedules: a step of rate 0 is lost.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    done = min(1.0, (step - 1 - config.warmup_steps) / max(1, config.training_steps - config.warmup_steps))
    left = 1.0 - done if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr_min + (config.lr - config.lr_min) * left


def for_device(config: TrainingConfig, device: torch.device) -> TrainingConfig:
    """On a CPU the default optimizer becomes adamw, with a word, and rows are small; what was asked for stays."""
    if device.type != "cpu":
        return config
    update: dict[str, Any] = {}
    if config.pack_tokens is None:
        update["pack_tokens"] = min(config.tokens_per_pass, CPU_PACK_TOKENS)
    if config.optimizer == "adamw_8bit" and "optimizer" not in config.model_fields_set:
        print("Optimizer: adamw (the default adamw_8bit needs a GPU)")
        update["optimizer"] = "adamw"
    return config.model_copy(update=update)


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
