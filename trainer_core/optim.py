"""Optimizers over parameters that may be half precision and may lie in another process's memory.

A step has two halves: `compute` works on the trainer's own memory, `write` changes the model's parameters. Only `write`
needs the inference server paused. Half-precision parameters are stepped as float32 with float32 gradients, since plain
AdamW on bf16 loses most small updates. What of them stays between two steps is the strategy of the master weights:

    fp32         a float32 copy stays; 4 bytes a parameter
    kahan        only what rounding lost stays, in half precision; 2 bytes
    stochastic   nothing stays: rounded up or down at random, right on average

Every strategy shows the optimizer float32 tensors, so all optimizers work with all of them. Those that keep no copy
fill them a part at a time and put what a step made of them into the gradients' memory, so that a step takes little more
than the gradients did. What is measured: `benchmarks/optimizer_memory.py`.

In float16 the loss is scaled by a power of two (`LossScale`), or most of a gradient would be too small for it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from atropos_common.model_math import PART_PARAMETERS, effective_optimizer
from trainer_core.config import TrainingConfig
from trainer_core.errors import UsageError

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
        self.half: MasterWeights = make_master_weights(config.master_weights, half, config.seed)
        copies = iter(self.half.masters)
        self.masters = [p if p.dtype == torch.float32 else next(copies) for p in self.params]
        for param, master in zip(half, self.half.masters, strict=True):
            param.register_post_accumulate_grad_hook(_collect_into(master))
        self.optimizer = _build(self.masters, config)
        self.scale = LossScale() if any(p.dtype == torch.float16 for p in model.parameters()) else None
        """Null where gradients need none."""
        self._pending = False
        self.unwritten = False
        """Whether an update is computed, in full or in part, that `write` has not put into the parameters."""

    def set_lr(self, step: int) -> float:
        """Learning rate of optimizer step `step` (from 1)."""
        lr = learning_rate(self.config, step)
        own_lr = self.config.optimizer == "adafactor" and self.config.adafactor_relative_step
        for group in self.optimizer.param_groups:
            group["lr"] = None if own_lr else lr
        return lr

    def take_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        """Use `gradients` of `params`, float32, instead of what backward passes collect."""
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient

    def unscale(self, factor: torch.Tensor) -> None:
        """Divide the gradient by what the loss was multiplied with."""
        torch._foreach_div_([m.grad for m in self.masters if m.grad is not None], factor.float())

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
        pairs = zip(self.half.params, self.half.copies(), strict=True)
        return {param: copy.detach() for param, copy in pairs if copy is not None}

    def _step(self) -> None:
        gradients = {master: master.grad for master in self.masters}
        in_place = [param for param in self.params if param.dtype == torch.float32]
        for part in filter(None, chain([in_place], self.half.parts())):
            for master in self.masters:  # an optimizer passes over what has no gradient
                master.grad = None
            for master in part:
                master.grad = gradients[master]
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
            "loss_scale": self.scale and self.scale.state(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore moments, weights and what else was gathered; learning rate, decay and betas stay this run's own.

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
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)
        self.half.load_state_dict(state["weights"])
        if self.scale is not None and state.get("loss_scale"):
            self.scale = LossScale(*state["loss_scale"])


class LossScale:
    """What the loss is multiplied with in float16, whose smallest number is 6e-8 and largest 65,504.

    The loss of a step is divided by its tokens, so the gradient of one token's logits falls below 6e-8 as soon as there
    are many. Times the power of two at that denominator it is of the size of the advantage, whatever the batch; where
    something overflows all the same the step is left out and the scale halved, and after `PATIENCE` steps that went
    well it is doubled (Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740, section 3.2; torch's
    `GradScaler` has the same interval).
    """

    PATIENCE = 2000

    def __init__(self, exponent: int = 0, good_steps: int = 0) -> None:
        self.exponent, self.good_steps = exponent, good_steps

    def factor(self, denominator: torch.Tensor) -> torch.Tensor:
        """A power of two for a loss that is divided by `denominator`, on its device."""
        mantissa, _ = torch.frexp(denominator)
        return denominator / mantissa * 2.0**self.exponent

    def saw(self, finite: bool) -> None:
        """How a step went."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.exponent -= 1
        elif self.good_steps == self.PATIENCE:
            self.exponent, self.good_steps = self.exponent + 1, 0

    def state(self) -> list[int]:
        """The arguments that make it again."""
        return [self.exponent, self.good_steps]


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
    optimizer = effective_optimizer(config.optimizer, chosen="optimizer" in config.model_fields_set, on_gpu=False)
    if optimizer != config.optimizer:
        print(f"Optimizer: {optimizer} (the default {config.optimizer} needs a GPU)")
        update["optimizer"] = optimizer
    return config.model_copy(update=update)


def _build(params: list[torch.Tensor], config: TrainingConfig) -> torch.optim.Optimizer:
    if config.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        relative = config.adafactor_relative_step
        return Adafactor(
            params, lr=None if relative else config.lr, weight_decay=config.weight_decay, relative_step=relative,
            scale_parameter=config.adafactor_scale_parameter, warmup_init=False,
        )  # fmt: skip
    common: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw_8bit":
        try:
            from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found]
        except ImportError as error:
            raise UsageError(
                f"--optimizer adamw_8bit needs bitsandbytes ({error}): pip install bitsandbytes, or --optimizer adamw "
                "(more memory) or adafactor (no momentum)"
            ) from None
        built: torch.optim.Optimizer = AdamW8bit(params, **common)
        return built
    return torch.optim.AdamW(params, **common, fused=True)


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


class MasterWeights(ABC):
    """A strategy over some half-precision parameters (none is fine)."""

    name: str
    params: list[torch.Tensor]
    masters: list[torch.Tensor]
    """float32 stand-ins with the parameters' shapes, which carry the gradient."""

    @abstractmethod
    def parts(self) -> Iterator[list[torch.Tensor]]:
        """Masters that hold the weights now, some at a time: each part is to be stepped before the next is asked for,
        and loses its gradient then."""

    @abstractmethod
    def copies(self) -> Sequence[torch.Tensor | None]:
        """For each parameter its weights in float32, where they are kept at this moment."""

    @abstractmethod
    def write(self) -> None:
        """Round what the step made into the parameters, in place."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly; the parameters already hold the checkpoint's weights."""


class Float32Copy(MasterWeights):
    """A float32 copy of every parameter."""

    name = "fp32"

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params = params
        self.masters = [p.detach().float().clone().requires_grad_() for p in params]

    def parts(self) -> Iterator[list[torch.Tensor]]:
        yield self.masters

    def copies(self) -> Sequence[torch.Tensor | None]:
        return self.masters

    @torch.no_grad()
    def write(self) -> None:
        if self.params:
            torch._foreach_copy_(self.params, self.masters)

    def state_dict(self) -> dict[str, Any]:
        return {"masters": [m.detach() for m in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)


class _FilledForAStep(MasterWeights):
    """Float32 tensors that have memory only while their part is stepped; what came out waits in the gradients' memory
    until it is written."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params = params
        self.masters = []
        for param in params:  # one after the other, so that never all of them have memory
            self.masters.append(torch.empty_like(param, dtype=torch.float32).requires_grad_())
            self.masters[-1].untyped_storage().resize_(0)
        self._stepped: list[torch.Tensor | None] = [None] * len(params)

    def parts(self) -> Iterator[list[torch.Tensor]]:
        for part in _parts(self.params):
            for index in part:
                self._fill(index)
            yield [self.masters[index] for index in part]
            for index in part:
                self._stepped[index] = self._into_gradient(self.masters[index])

    @torch.no_grad()
    def _fill(self, index: int) -> None:
        master = self.masters[index]
        master.untyped_storage().resize_(master.numel() * master.element_size())
        master.copy_(self.params[index])

    @torch.no_grad()
    def _into_gradient(self, master: torch.Tensor) -> torch.Tensor | None:
        """The weights where the gradient was, which is not needed any more; null where there was none."""
        stepped = None if master.grad is None else master.grad.copy_(master)
        master.untyped_storage().resize_(0)
        return stepped

    def copies(self) -> Sequence[torch.Tensor | None]:
        return self._stepped

    @torch.no_grad()
    def write(self) -> None:
        for index, stepped in enumerate(self._stepped):
            if stepped is not None:
                self._round(index, stepped)
        self._stepped = [None] * len(self.params)

    @abstractmethod
    def _round(self, index: int, weights: torch.Tensor) -> None:
        """Put float32 `weights` into parameter `index`."""


def _parts(params: list[torch.Tensor]) -> Iterator[list[int]]:
    """Indices of parameters, as many together as have `PART_PARAMETERS` elements; a larger one alone."""
    part: list[int] = []
    size = 0
    for index, param in enumerate(params):
        if part and size + param.numel() > PART_PARAMETERS:
            yield part
            part, size = [], 0
        part.append(index)
        size += param.numel()
    if part:
        yield part


class Kahan(_FilledForAStep):
    """Kahan summation: what rounding lost is added again in the next step.

    "Revisiting BFloat16 Training" (Zamirai et al. 2020, arXiv:2010.06192, algorithm 1): the pair of parameter and
    compensation holds about 16 bits of mantissa.
    """

    name = "kahan"

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params)
        self.lost = [torch.zeros_like(p, requires_grad=False) for p in params]

    @torch.no_grad()
    def _fill(self, index: int) -> None:
        super()._fill(index)
        self.masters[index].add_(self.lost[index])

    def _round(self, index: int, weights: torch.Tensor) -> None:
        self.params[index].copy_(weights)
        self.lost[index].copy_(weights.sub_(self.params[index]))

    def state_dict(self) -> dict[str, Any]:
        return {"lost": self.lost}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for lost, saved in zip(self.lost, state["lost"], strict=True):
            lost.copy_(saved)


class Stochastic(_FilledForAStep):
    """Stochastic rounding to bfloat16 (Gupta et al. 2015): up with the probability of the part that is cut off."""

    name = "stochastic"

    def __init__(self, params: list[torch.Tensor], seed: int) -> None:
        odd = next((p.dtype for p in params if p.dtype != torch.bfloat16), None)
        if odd is not None:
            raise UsageError(f"--master-weights stochastic needs bfloat16 weights, these are {odd}: take fp32 or kahan")
        super().__init__(params)
        self._generators = {p.device: torch.Generator(p.device).manual_seed(seed) for p in params}

    def _round(self, index: int, weights: torch.Tensor) -> None:
        param = self.params[index]
        rows = max(1, PART_PARAMETERS * len(param) // param.numel())  # rounding takes several times their memory
        for some, values in zip(param.split(rows), weights.split(rows), strict=True):
            some.copy_(round_stochastically(values, self._generators[param.device]))

    def state_dict(self) -> dict[str, Any]:
        return {"generators": [g.get_state() for g in self._generators.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for generator, saved in zip(self._generators.values(), state["generators"], strict=True):
            generator.set_state(saved)


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """float32 `values` rounded at random to a neighbour in bfloat16, right on average; NaN and infinity stay."""
    # bfloat16 is the upper half of a float32: random lower halves carry into it as often as they should.
    bits = values.detach().contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    rounded = (bits + noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def make_master_weights(name: str, params: list[torch.Tensor], seed: int) -> MasterWeights:
    """The strategy `name` over half-precision `params`."""
    if name == "stochastic":
        return Stochastic(params, seed)
    return Kahan(params) if name == "kahan" else Float32Copy(params)
