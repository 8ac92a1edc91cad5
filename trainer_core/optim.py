"""Optimizers over parameters that may be half precision and may lie in another process's memory.

A step has two halves: `compute` works on the trainer's own memory, `write` changes the model's parameters. Only `write`
needs the inference server paused. Half-precision parameters are stepped as float32 with float32 gradients, since plain
AdamW on bf16 loses most small updates. What of them stays between two steps is the strategy of the master weights:

    fp32         a float32 copy stays; 4 bytes a parameter
    kahan        only what rounding lost stays, in half precision; 2 bytes
    stochastic   nothing stays: rounded up or down at random, right on average

Every strategy shows the optimizer float32 tensors, so all optimizers work with all of them. Those that keep no copy on
the device fill them a part at a time and put what a step made of them, rounded, into the gradients' memory, so that a
step takes little more than the gradients did. With `gradient_dtype = bfloat16` gradients stay as backward passes leave
them, and become float32 a part at a time. With `optimizer_offload` what stays between two steps lies in the host's
memory and comes with its part (`offload.py`). What is measured: `benchmarks/optimizer_memory.py`.

In float16 the loss is scaled by a power of two (`LossScale`), or most of a gradient would be too small for it.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import torch

from atropos_common.model_math import PART_PARAMETERS, effective_optimizer
from trainer_core.config import TrainingConfig, flag
from trainer_core.errors import UsageError
from trainer_core.offload import SMALL, HostMemory
from trainer_core.policy.sharding import compute_dtype, local, rows_of, scatter
from trainer_core.policy.speed import compiled_on_cuda
from trainer_core.policy.tensor_parallel import parallel_of
from trainer_core.world import ALONE, World

CPU_PACK_TOKENS = 2048
"""Tokens of a forward pass on a CPU: larger rows leave its caches and gain nothing."""


class Stepper:
    """One optimizer over the trainable parameters of a model; gradients are collected in float32, or as they are."""

    def __init__(self, model: torch.nn.Module, config: TrainingConfig, world: World = ALONE) -> None:
        wholes = [p for p in model.parameters() if p.requires_grad]
        if not wholes:
            raise UsageError("nothing to train: --train-layer-indices leaves no parameter")
        self.params = [local(p) for p in wholes]
        """This rank's rows of what trains, and all of what no rank shares."""
        self.config = config
        self._model, self.world = model, world
        self._parallel = parallel_of(model)
        self.parts = 1 if self._parallel is None else self._parallel.size
        """Into how many parts the policy is cut, each of which one rank steps."""
        self._sharded = [part is not whole for part, whole in zip(self.params, wholes, strict=True)]
        self.rows = [rows_of(whole) for whole in wholes]
        narrow = [w.dtype != torch.float32 or (s and compute_dtype(model) != torch.float32)
                  for w, s in zip(wholes, self._sharded, strict=True)]  # fmt: skip
        self.halves = [index for index, each in enumerate(narrow) if each]
        """Which of `params` have master weights, whether those are the parameters themselves or not."""
        # float32 parameters are stepped in place; the others as what `masters` makes of them.
        half = [p for p in self.params if p.dtype != torch.float32]
        first = [
            r.first * math.prod(r.shape[1:])
            for r, p in zip(self.rows, self.params, strict=True)
            if p.dtype != torch.float32
        ]
        self.host = HostMemory(self.params[0].device) if config.optimizer_offload else None
        self.half: MasterWeights = make_master_weights(config.master_weights, half, config.seed, self.host, first)
        copies = iter(self.half.masters)
        self.masters = [p if p.dtype == torch.float32 else next(copies) for p in self.params]
        self._wide = config.gradient_dtype == "float32"
        for whole, param, master in zip(wholes, self.params, self.masters, strict=True):
            target = master if self._wide else param
            if target is not whole:
                whole.register_post_accumulate_grad_hook(_collect_into(target))
        self._shrink: torch.Tensor | None = None
        """What half-precision gradients are still to be multiplied with, once they are float32."""
        self.optimizer = _build(self.masters, config)
        self.scale = LossScale() if compute_dtype(model) == torch.float16 else None
        """Null where gradients need none."""
        self._pending = False
        self.unwritten = False
        """Whether an update is computed, in full or in part, that `write` has not put into the parameters."""

    @property
    def dtype(self) -> str:
        """Type of the trained weights that the optimizer state belongs to."""
        return str(compute_dtype(self._model)).removeprefix("torch.") if self.halves else "float32"

    def set_lr(self, step: int) -> float:
        """Learning rate of optimizer step `step` (from 1)."""
        lr = learning_rate(self.config, step)
        own_lr = self.config.optimizer == "adafactor" and self.config.adafactor_relative_step
        for group in self.optimizer.param_groups:
            group["lr"] = None if own_lr else lr
        return lr

    @property
    def gradients(self) -> list[torch.Tensor]:
        """What was collected, in the order of `params`, without those that nothing depends on."""
        return [gradient for gradient in self._collected() if gradient is not None]

    def _collected(self) -> list[torch.Tensor | None]:
        pairs = zip(self.params, self.masters, strict=True)
        return [master.grad if param.grad is None else param.grad for param, master in pairs]

    def take_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        """Use `gradients` of `params`, float32, instead of what backward passes collect."""
        for param, master, gradient in zip(self.params, self.masters, gradients, strict=True):
            if self._wide or gradient is None:
                master.grad = gradient
            else:
                param.grad = gradient.to(param.dtype)

    def unscale(self, factor: torch.Tensor) -> None:
        """Divide the gradient by what the loss was multiplied with."""
        torch._foreach_div_(self.gradients, factor.float())

    def add_up(self) -> None:
        """Add up over all ranks the gradients of what each of them has whole; FSDP has done so with the others, and a
        model in parts sums up on its way back."""
        if self._parallel is not None:
            return
        for shared, gradient in zip(self._sharded, self._collected(), strict=True):
            if not shared and gradient is not None:
                self.world.total(gradient)

    def clip(self) -> torch.Tensor:
        """Clip the gradient to `max_grad_norm`; returns its norm before, over all ranks, a scalar."""
        found = self._collected()
        if self._parallel is not None:
            pairs = zip(self.params, found, strict=True)
            norm = self._parallel.norm({param: gradient for param, gradient in pairs if gradient is not None})
        else:
            parts = [g for shared, g in zip(self._sharded, found, strict=True) if shared and g is not None]
            norm = _norm([g for shared, g in zip(self._sharded, found, strict=True) if not shared and g is not None])
            if any(self._sharded):
                norm = (norm.square() + self.world.total(_norm(parts).square())).sqrt()
        limit = self.config.max_grad_norm
        if limit:
            torch.nn.utils.clip_grads_with_norm_(self.masters, limit, norm)
            halved = any(g.dtype == torch.bfloat16 for g in self.gradients)
            self._shrink = (limit / (norm + 1e-6)).clamp(max=1.0) if halved else None  # as torch does
        return norm

    def compute(self) -> None:
        """The part that touches no shared memory: the whole update, unless some parameter is stepped in place."""
        self.unwritten = True
        self._pending = len(self.half.masters) < len(self.params)
        if not self._pending:
            self._step()
        if self.params[0].is_cuda:  # the server's pause begins after it
            torch.cuda.current_stream(self.params[0].device).synchronize()

    @torch.no_grad()
    def write(self) -> None:
        """Put the update into the model's parameters, in place, and forget the gradient."""
        if self._pending:
            self._step()
        self.half.write()
        scatter(self._model)
        self.zero_grad()

    def copies(self) -> dict[torch.Tensor, torch.Tensor]:
        """Parameter -> its float32 copy in the trainer's own memory, for those that have one at this moment."""
        pairs = zip(self.half.params, self.half.copies(), strict=True)
        return {param: copy.detach() for param, copy in pairs if copy is not None}

    def _step(self) -> None:
        gradients = {master: master.grad for master in self.masters}
        for master in self.masters:  # an optimizer passes over what has no gradient
            master.grad = None
        in_place = [param for param in self.params if param.dtype == torch.float32]
        for param in in_place:
            param.grad = gradients[param]
        if in_place:
            self.optimizer.step()
        for param in in_place:
            param.grad = None
        half = self.half
        collected = [gradients[m] if p.grad is None else p.grad for p, m in zip(half.params, half.masters, strict=True)]
        parts: Iterable[list[int]] = half.parts([i for i, gradient in enumerate(collected) if gradient is not None])
        if self.host is not None:
            parts = self.host.streamed(list(parts), self._streamed)
        for part in parts:
            for index in part:
                half.fill(index)
                half.masters[index].grad = self._widened(collected[index])
            self.optimizer.step()
            for index in part:
                half.masters[index].grad = None
                half.keep(index, collected[index])

    def _widened(self, gradient: torch.Tensor) -> torch.Tensor:
        """float32, and clipped."""
        if gradient.dtype == torch.float32:
            return gradient
        wide = gradient.float()
        return wide if self._shrink is None else wide.mul_(self._shrink)

    def _streamed(self, part: list[int]) -> list[torch.Tensor]:
        """What of a part lies in the host's memory between two steps."""
        states = (value for i in part for value in self.optimizer.state[self.half.masters[i]].values())
        large = [value for value in states if isinstance(value, torch.Tensor) and value.numel() > SMALL]
        return [*(tensor for index in part for tensor in self.half.in_host(index)), *large]

    def zero_grad(self) -> None:
        self.unwritten = False
        self._shrink = None
        for param, master in zip(self.params, self.masters, strict=True):
            param.grad = None
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later attempt needs, wherever it lies: the same with `optimizer_offload` and without."""
        state = {
            "name": self.config.optimizer, "masters": self.half.name, "parameters": len(self.params),
            "optimizer": self.optimizer.state_dict(), "weights": self._weights(),
            "loss_scale": self.scale and self.scale.state(),
        }  # fmt: skip
        return state if self.host is None else self.host.content(state)

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
        self._load_optimizer(state["optimizer"])
        self._load_weights(state["weights"])
        if self.scale is not None and state.get("loss_scale"):
            self.scale = LossScale(*state["loss_scale"])

    def _weights(self) -> dict[str, Any]:
        """As on a single rank, where no parameter is its own master."""
        if len(self.half.params) == len(self.halves):
            return self.half.state_dict()
        return {"masters": [self.masters[index].detach() for index in self.halves]}

    @torch.no_grad()
    def _load_weights(self, saved: dict[str, Any]) -> None:
        if len(self.half.params) < len(self.halves):
            for index, value in zip(self.halves, saved["masters"], strict=True):
                self.masters[index].copy_(value)
            scatter(self._model)
            return
        self.half.load_state_dict(saved)

    def _load_optimizer(self, saved: dict[str, Any]) -> None:
        if self.host is not None:  # never all of it on the device
            for index, entry in saved["state"].items():
                master = self.masters[index]
                away = master is not self.params[index]
                named = (v.items() if isinstance(v, dict) else [(k, v)] for k, v in entry.items())  # bitsandbytes nests
                state = {key: self.host.adopt(value, away) for items in named for key, value in items}
                self.optimizer.state[master] = state
            return
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(saved)
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)


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
    for name in ("optimizer_offload", "activation_offload"):
        if getattr(config, name):
            print(f"{flag(name)} does nothing on a CPU: its memory is the host's")
            update[name] = False
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


def _collect_into(target: torch.Tensor) -> Any:
    @torch.no_grad()
    def hook(param: torch.Tensor) -> None:
        if param.grad is None:
            return
        gradient = local(param.grad)
        if target.grad is not None:
            target.grad.add_(gradient)
        elif target.numel():  # a rank may have no row of a small parameter
            target.grad = gradient.to(target.dtype)
        param.grad = None

    return hook


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all of them together, summed in at least float32; a scalar."""
    halves = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients if g.dtype == torch.bfloat16]
    return torch.nn.utils.get_total_norm([*(g for g in gradients if g.dtype != torch.bfloat16), *halves])


class MasterWeights(ABC):
    """A strategy over some half-precision parameters (none is fine).

    A step goes by parts. For each parameter of a part: `fill`, then the optimizer's step, then `keep`.
    """

    name: str
    params: list[torch.Tensor]
    masters: list[torch.Tensor]
    """float32 stand-ins with the parameters' shapes, which carry the gradient while their part is stepped."""

    def parts(self, indices: list[int]) -> Iterator[list[int]]:
        """`indices`, as many together as have `PART_PARAMETERS` elements; a larger parameter alone."""
        part: list[int] = []
        size = 0
        for index in indices:
            count = self.params[index].numel()
            if part and size + count > PART_PARAMETERS:
                yield part
                part, size = [], 0
            part.append(index)
            size += count
        if part:
            yield part

    @abstractmethod
    def fill(self, index: int) -> None:
        """See to it that a master holds the weights."""

    @abstractmethod
    def keep(self, index: int, gradient: torch.Tensor) -> None:
        """Its part is stepped: until `write` what came out may lie in the memory of `gradient`."""

    def in_host(self, index: int) -> list[torch.Tensor]:
        """What of a parameter lies in the host's memory between two steps; optimizer state is not counted."""
        return []

    @abstractmethod
    def copies(self) -> Sequence[torch.Tensor | None]:
        """For each parameter its weights in memory of this process, where they are kept at this moment."""

    @abstractmethod
    def write(self) -> None:
        """Put what the step made into the parameters, in place."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly; the parameters already hold the checkpoint's weights."""


class Float32Copy(MasterWeights):
    """A float32 copy of every parameter, on its device."""

    name = "fp32"

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params = params
        self.masters = [p.detach().float().clone().requires_grad_() for p in params]

    def fill(self, index: int) -> None:
        """It does."""

    def keep(self, index: int, gradient: torch.Tensor) -> None:
        """It is kept."""

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


class _Rounded(MasterWeights):
    """Masters that have memory only while their part is stepped. What came out is rounded at once, and waits in the
    gradients' memory until it is written: a copy is all that the server's pause has to wait for."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params = params
        self.masters = []
        for param in params:  # one after the other, so that never all of them have memory
            self.masters.append(torch.empty_like(param, dtype=torch.float32).requires_grad_())
            self.masters[-1].untyped_storage().resize_(0)
        self._stepped: list[torch.Tensor | None] = [None] * len(params)

    @torch.no_grad()
    def fill(self, index: int) -> None:
        master = self.masters[index]
        master.untyped_storage().resize_(master.numel() * master.element_size())
        master.copy_(self.params[index])

    @torch.no_grad()
    def keep(self, index: int, gradient: torch.Tensor) -> None:
        master = self.masters[index]
        self._round(index, master.detach(), gradient)
        self._stepped[index] = gradient
        master.untyped_storage().resize_(0)

    @abstractmethod
    def _round(self, index: int, weights: torch.Tensor, into: torch.Tensor) -> None:
        """Put float32 `weights`, rounded to the type of parameter `index`, into `into`."""

    def copies(self) -> Sequence[torch.Tensor | None]:
        return self._stepped

    @torch.no_grad()
    def write(self) -> None:
        for param, stepped in zip(self.params, self._stepped, strict=True):
            if stepped is not None:
                param.copy_(stepped)
        self._stepped = [None] * len(self.params)


class Float32InHost(_Rounded):
    """A float32 copy of every parameter in the host's memory; needs its part to be streamed."""

    name = "fp32"

    def __init__(self, params: list[torch.Tensor], host: HostMemory) -> None:
        self.params = params
        self.masters = [
            host.put_away(torch.empty_like(p, dtype=torch.float32), p.detach()).requires_grad_() for p in params
        ]
        self._host = host
        self._stepped = [None] * len(params)

    def fill(self, index: int) -> None:
        """It came with its part."""

    @torch.no_grad()
    def keep(self, index: int, gradient: torch.Tensor) -> None:
        self._round(index, self.masters[index].detach(), gradient)
        self._stepped[index] = gradient

    def _round(self, index: int, weights: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(weights.to(self.params[index].dtype))

    def in_host(self, index: int) -> list[torch.Tensor]:
        return [self.masters[index]]

    def copies(self) -> Sequence[torch.Tensor | None]:
        return [self._host.content(master) for master in self.masters]

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self.masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for master, saved in zip(self.masters, state["masters"], strict=True):
            self._host.content(master).copy_(saved)


class Kahan(_Rounded):
    """Kahan summation: what rounding lost is added again in the next step.

    "Revisiting BFloat16 Training" (Zamirai et al. 2020, arXiv:2010.06192, algorithm 1): the pair of parameter and
    compensation holds about 16 bits of mantissa.
    """

    name = "kahan"

    def __init__(self, params: list[torch.Tensor], host: HostMemory | None) -> None:
        super().__init__(params)
        self._host = host
        self.lost = []
        for param in params:
            lost = torch.zeros_like(param, requires_grad=False)
            self.lost.append(lost if host is None else host.put_away(lost))

    @torch.no_grad()
    def fill(self, index: int) -> None:
        super().fill(index)
        self.masters[index].add_(self.lost[index])

    def _round(self, index: int, weights: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(weights.to(self.params[index].dtype))
        self.lost[index].copy_(weights.sub_(into))

    def in_host(self, index: int) -> list[torch.Tensor]:
        return [] if self._host is None else [self.lost[index]]

    def state_dict(self) -> dict[str, Any]:
        return {"lost": self.lost}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for lost, saved in zip(self.lost, state["lost"], strict=True):
            (lost if self._host is None else self._host.content(lost)).copy_(saved)


class Stochastic(_Rounded):
    """Stochastic rounding to bfloat16 (Gupta et al. 2015): up with the probability of the part that is cut off."""

    name = "stochastic"

    def __init__(self, params: list[torch.Tensor], seed: int, first: Sequence[int] | None = None) -> None:
        """Args:
        first: of each of `params`, which element of the whole one it begins with; default: all are whole.
        """
        odd = next((p.dtype for p in params if p.dtype != torch.bfloat16), None)
        if odd is not None:
            raise UsageError(f"--master-weights stochastic needs bfloat16 weights, these are {odd}: take fp32 or kahan")
        super().__init__(params)
        self._seed, self._first, self._steps = seed, first or [0] * len(params), 0

    def _round(self, index: int, weights: torch.Tensor, into: torch.Tensor) -> None:
        key = blake2b(f"{self._seed} {self._steps} {index}".encode(), digest_size=8).digest()
        rows = max(1, PART_PARAMETERS * len(weights) // weights.numel())  # rounding takes several times their memory
        begin = self._first[index]
        for some, values in zip(into.split(rows), weights.split(rows), strict=True):
            rounded = round_stochastically(values.flatten(), salt(key, begin, values.device))
            some.copy_(rounded.view_as(values))
            begin += values.numel()

    def write(self) -> None:
        super().write()
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state.get("steps", 0)


def salt(key: bytes, first: int, device: torch.device) -> torch.Tensor:
    """What makes the `dice` of elements `first` and on under `key` (8 bytes), [2] int32: the same whatever part of a
    parameter a rank has."""
    low, high = struct.unpack("<2I", key)
    return torch.tensor([(first + low) % (1 << 32), high], device=device).int()


def dice(salt: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """16 random bits for each element, int32: a hash of 32 bits, twice, of its number (lowbias32: Wellons 2018,
    "Prospecting for Hash Functions"). Sums and products wrap as those of int32 do."""
    bits = torch.arange(shape.numel(), dtype=torch.int32, device=salt.device).view(shape)
    for each in salt:
        bits = bits + each
        for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975), (16, 1)):
            bits = (bits ^ (bits >> shift & (1 << 32 - shift) - 1)) * factor
    return bits & 0xFFFF


@compiled_on_cuda
def round_stochastically(values: torch.Tensor, salt: torch.Tensor) -> torch.Tensor:
    """float32 `values` rounded to a neighbour in bfloat16, at random as `dice` of `salt` say, right on average; NaN and
    infinity stay. By operations this would be some twenty passes over the memory: compiled it is one."""
    # bfloat16 is the upper half of a float32: random lower halves carry into it as often as they should.
    bits = values.detach().view(torch.int32)
    rounded = ((bits + dice(salt, values.shape)) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def make_master_weights(
    name: str, params: list[torch.Tensor], seed: int, host: HostMemory | None = None,
    first: Sequence[int] | None = None,
) -> MasterWeights:  # fmt: skip
    """The strategy `name` over half-precision `params`; with `host` what it keeps lies there; `first` as in
    `Stochastic`."""
    if name == "stochastic":
        return Stochastic(params, seed, first)
    if name == "kahan":
        return Kahan(params, host)
    return Float32Copy(params) if host is None else Float32InHost(params, host)
