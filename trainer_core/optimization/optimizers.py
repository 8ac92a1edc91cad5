"""Optimizers over parameters that may be half precision or in another process's memory.

`Stepper.compute` works on the trainer's own memory. `write` changes the model's parameters, so only
it needs the inference server paused. `benchmarks/trainer/optimizer_memory.py` measures the memory.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import torch

from atropos_common.models.model_math import PART_PARAMETERS, effective_optimizer
from trainer_core.config import TrainingConfig, flag
from trainer_core.errors import UsageError
from trainer_core.policy.offload import SMALL, HostMemory
from trainer_core.policy.sharding import compute_dtype, local, rows_of, scatter
from trainer_core.policy.speed import compiled_on_cuda
from trainer_core.policy.tensor_parallel import parallel_of
from trainer_core.ranks.world import ALONE, World

# Limit on a CPU: larger rows exceed its caches and gain nothing.
CPU_PACK_TOKENS = 2048


class Stepper:
    """One optimizer over a model's trainable parameters."""

    def __init__(
        self, model: torch.nn.Module, config: TrainingConfig, world: World = ALONE
    ) -> None:
        wholes = [p for p in model.parameters() if p.requires_grad]
        if not wholes:
            raise UsageError("nothing to train: --train-layer-indices leaves no parameter")
        self.params = [local(p) for p in wholes]
        """This rank's rows of sharded parameters, and whole unsharded ones."""
        self.config = config
        self._model, self.world = model, world
        self._parallel = parallel_of(model)
        self.parts = 1 if self._parallel is None else self._parallel.size
        """Tensor-parallel parts of the policy; each rank steps one."""
        self._sharded = [part is not whole for part, whole in zip(self.params, wholes, strict=True)]
        self.rows = [rows_of(whole) for whole in wholes]
        # A sharded parameter may be float32 itself and computed in half precision (FSDP).
        narrow = [
            w.dtype != torch.float32 or (s and compute_dtype(model) != torch.float32)
            for w, s in zip(wholes, self._sharded, strict=True)
        ]
        self.halves = [index for index, each in enumerate(narrow) if each]
        """Indices of `params` with master weights, or that are masters themselves."""
        # float32 parameters are stepped in place; the others as what `masters` makes of them.
        half = [p for p in self.params if p.dtype != torch.float32]
        first = [
            r.first * math.prod(r.shape[1:])
            for r, p in zip(self.rows, self.params, strict=True)
            if p.dtype != torch.float32
        ]
        self.host = HostMemory(self.params[0].device) if config.optimizer_offload else None
        self.half: MasterWeights = make_master_weights(
            config.master_weights, half, config.seed, self.host, first
        )
        copies = iter(self.half.masters)
        self.masters = [p if p.dtype == torch.float32 else next(copies) for p in self.params]
        self._wide = config.gradient_dtype == "float32"
        for whole, param, master in zip(wholes, self.params, self.masters, strict=True):
            target = master if self._wide else param
            if target is not whole:
                # Move each gradient out as soon as it exists, so that never all of them exist
                # twice.
                whole.register_post_accumulate_grad_hook(_collect_into(target))
        # Clipping factor, applied when bfloat16 gradients become float32.
        self._shrink: torch.Tensor | None = None
        self.optimizer = _build(self.masters, config)
        self.scale = LossScale() if compute_dtype(model) == torch.float16 else None
        self._pending = False
        self.unwritten = False
        """An update is at least partly computed, and not written."""

    @property
    def dtype(self) -> str:
        """Dtype of the trained weights to which the optimizer state belongs."""
        return str(compute_dtype(self._model)).removeprefix("torch.") if self.halves else "float32"

    def set_lr(self, step: int) -> float:
        """Set and return the learning rate of optimizer step `step` (from 1)."""
        lr = learning_rate(self.config, step)
        own_lr = self.config.optimizer == "adafactor" and self.config.adafactor_relative_step
        for group in self.optimizer.param_groups:
            # transformers' Adafactor computes its own rate only if lr is None.
            group["lr"] = None if own_lr else lr
        return lr

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Accumulated gradients in the order of `params`, without missing ones."""
        return [gradient for gradient in self._collected() if gradient is not None]

    def _collected(self) -> list[torch.Tensor | None]:
        pairs = zip(self.params, self.masters, strict=True)
        return [master.grad if param.grad is None else param.grad for param, master in pairs]

    def take_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        """Replace the accumulated gradients of `params` with these float32 ones."""
        for param, master, gradient in zip(self.params, self.masters, gradients, strict=True):
            if self._wide or gradient is None:
                master.grad = gradient
            else:
                param.grad = gradient.to(param.dtype)

    def unscale(self, factor: torch.Tensor) -> None:
        torch._foreach_div_(self.gradients, factor.float())

    def add_up(self) -> None:
        """Sum gradients of unsharded parameters over all ranks."""
        # A tensor-parallel model sums in its backward pass, and FSDP sums the sharded ones.
        if self._parallel is not None:
            return
        for shared, gradient in zip(self._sharded, self._collected(), strict=True):
            if not shared and gradient is not None:
                self.world.total(gradient)

    def clip(self) -> torch.Tensor:
        """Clip the gradient; return its norm before clipping over all ranks, []."""
        found = self._collected()
        if self._parallel is not None:
            pairs = zip(self.params, found, strict=True)
            norm = self._parallel.norm(
                {param: gradient for param, gradient in pairs if gradient is not None}
            )
        else:
            known = [(s, g) for s, g in zip(self._sharded, found, strict=True) if g is not None]
            norm = _norm([g for sharded, g in known if not sharded])
            if any(self._sharded):
                # Each rank has some rows, so squares are summed over ranks. Others are whole.
                parts = _norm([g for sharded, g in known if sharded])
                norm = (norm.square() + self.world.total(parts.square())).sqrt()
        limit = self.config.max_grad_norm
        if limit:
            # Clips the masters' float32 gradients; bfloat16 ones are clipped later, when they are
            # widened.
            torch.nn.utils.clip_grads_with_norm_(self.masters, limit, norm)
            halved = any(g.dtype == torch.bfloat16 for g in self.gradients)
            self._shrink = (
                (limit / (norm + 1e-6)).clamp(max=1.0) if halved else None
            )  # the 1e-6 is torch's
        return norm

    def compute(self) -> None:
        """Compute the update without touching shared memory."""
        self.unwritten = True
        # Plain AdamW in bf16 loses most small updates, so half-precision parameters have masters.
        # Parameters stepped in place may be the server's memory, so then all work waits for
        # `write`.
        self._pending = len(self.half.masters) < len(self.params)
        if not self._pending:
            self._step()
        if self.params[0].is_cuda:  # finish before the server is paused
            torch.cuda.current_stream(self.params[0].device).synchronize()

    @torch.no_grad()
    def write(self) -> None:
        """Apply the update to the model's parameters, in place, and clear the gradient."""
        if self._pending:
            self._step()
        self.half.write()
        scatter(self._model)
        self.zero_grad()

    def copies(self) -> dict[torch.Tensor, torch.Tensor]:
        """Map parameters to their current copies in the trainer's own memory."""
        pairs = zip(self.half.params, self.half.copies(), strict=True)
        return {param: copy.detach() for param, copy in pairs if copy is not None}

    def _step(self) -> None:
        gradients = {master: master.grad for master in self.masters}
        # Take all gradients away first, so that each `optimizer.step` below touches only one part.
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
        collected = [
            gradients[m] if p.grad is None else p.grad
            for p, m in zip(half.params, half.masters, strict=True)
        ]
        parts: Iterable[list[int]] = half.parts(
            [i for i, gradient in enumerate(collected) if gradient is not None]
        )
        if self.host is not None:
            # Copies of the next part overlap with the step of this one.
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
        if gradient.dtype == torch.float32:
            return gradient
        wide = gradient.float()
        return wide if self._shrink is None else wide.mul_(self._shrink)

    def _streamed(self, part: list[int]) -> list[torch.Tensor]:
        states = (
            value for i in part for value in self.optimizer.state[self.half.masters[i]].values()
        )
        large = [
            value for value in states if isinstance(value, torch.Tensor) and value.numel() > SMALL
        ]
        return [*(tensor for index in part for tensor in self.half.in_host(index)), *large]

    def zero_grad(self) -> None:
        self.unwritten = False
        self._shrink = None
        for param, master in zip(self.params, self.masters, strict=True):
            param.grad = None
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resume, with or without `optimizer_offload`."""
        state = {
            "name": self.config.optimizer,
            "masters": self.half.name,
            "parameters": len(self.params),
            "optimizer": self.optimizer.state_dict(),
            "weights": self._weights(),
            "loss_scale": self.scale and self.scale.state(),
        }
        # Offloaded tensors have no storage on the device; checkpoints need their host copies.
        return state if self.host is None else self.host.content(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore moments, weights and loss scale.

        Raises:
            UsageError: the checkpoint has another optimizer, other master weights or other
            parameters.
        """
        mine = (self.config.optimizer, self.half.name, len(self.params))
        theirs = (state["name"], state["masters"], state["parameters"])
        if mine != theirs:
            raise UsageError(
                "the checkpoint was written with --optimizer {} and --master-weights {} over "
                "{} parameters, this run "
                "has {} and {} over {}: use the same, or --resume never".format(*theirs, *mine)
            )
        self._load_optimizer(state["optimizer"])
        self._load_weights(state["weights"])
        if self.scale is not None and state["loss_scale"]:
            self.scale = LossScale(*state["loss_scale"])

    def _weights(self) -> dict[str, Any]:
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
                named = (
                    v.items() if isinstance(v, dict) else [(k, v)] for k, v in entry.items()
                )  # bitsandbytes nests
                state = {
                    key: self.host.adopt(value, away) for items in named for key, value in items
                }
                self.optimizer.state[master] = state
            return
        # `load_state_dict` also overwrites lr, betas and decay; put this run's own back.
        settings = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict(saved)
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)


class LossScale:
    """Loss scale for float16, whose smallest number is 6e-8 and largest 65,504.

    Halved after an overflow, doubled after `PATIENCE` good steps (Micikevicius et al. 2018, "Mixed
    Precision Training", arXiv:1710.03740, section 3.2).
    """

    PATIENCE = 2000

    def __init__(self, exponent: int = 0, good_steps: int = 0) -> None:
        self.exponent, self.good_steps = exponent, good_steps

    def factor(self, denominator: torch.Tensor) -> torch.Tensor:
        """Return the scale for a loss divided by `denominator`: a power of two."""
        # The loss is divided by the step's tokens, so a token's gradient can fall below 6e-8; this
        # brings it to the size of the advantage for any batch.
        # denominator = mantissa * 2^n with mantissa in [0.5, 1), so the quotient is exactly 2^n.
        mantissa, _ = torch.frexp(denominator)
        return denominator / mantissa * 2.0**self.exponent

    def saw(self, finite: bool) -> None:
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.exponent -= 1
        elif self.good_steps == self.PATIENCE:
            self.exponent, self.good_steps = self.exponent + 1, 0

    def state(self) -> list[int]:
        """Arguments that recreate this object."""
        return [self.exponent, self.good_steps]


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Return the learning rate of optimizer step `step` (from 1)."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    # The last step is a little above `lr_min`, as in transformers: rate 0 would waste it.
    done = min(
        1.0, (step - 1 - config.warmup_steps) / max(1, config.training_steps - config.warmup_steps)
    )
    left = 1.0 - done if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr_min + (config.lr - config.lr_min) * left


def for_device(config: TrainingConfig, device: torch.device) -> TrainingConfig:
    """Adapt defaults to a CPU: optimizer adamw, small rows, no offload."""
    if device.type != "cpu":
        return config
    update: dict[str, Any] = {}
    if config.pack_tokens is None:
        update["pack_tokens"] = min(config.tokens_per_pass, CPU_PACK_TOKENS)
    optimizer = effective_optimizer(
        config.optimizer, chosen="optimizer" in config.model_fields_set, on_gpu=False
    )
    if optimizer != config.optimizer:
        print(f"Optimizer: {optimizer} (the default {config.optimizer} needs a GPU)")
        update["optimizer"] = optimizer
    for name in ("optimizer_offload", "activation_offload"):
        if getattr(config, name):
            print(f"{flag(name)} does nothing on a CPU: its memory is host memory already")
            update[name] = False
    return config.model_copy(update=update)


def _build(params: list[torch.Tensor], config: TrainingConfig) -> torch.optim.Optimizer:
    if config.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        relative = config.adafactor_relative_step
        return Adafactor(
            params,
            lr=None if relative else config.lr,
            weight_decay=config.weight_decay,
            relative_step=relative,
            scale_parameter=config.adafactor_scale_parameter,
            warmup_init=False,
        )
    common: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "weight_decay": config.weight_decay,
    }
    if config.optimizer == "adamw_8bit":
        try:
            from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found]
        except ImportError as error:
            raise UsageError(
                f"--optimizer adamw_8bit needs bitsandbytes ({error}): pip install bitsandbytes, "
                f"or --optimizer adamw (more memory) or adafactor (no momentum)"
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
    # A norm accumulated in bfloat16 would lose most of its terms.
    halves = [
        torch.linalg.vector_norm(g, dtype=torch.float32)
        for g in gradients
        if g.dtype == torch.bfloat16
    ]
    return torch.nn.utils.get_total_norm(
        [*(g for g in gradients if g.dtype != torch.bfloat16), *halves]
    )


class MasterWeights(ABC):
    """Strategy for half-precision parameters (possibly none), stepped in parts.

    For each parameter of a part: `fill`, then the optimizer's step, then `keep`.
    """

    name: str
    params: list[torch.Tensor]
    masters: list[torch.Tensor]
    """float32 stand-ins; they carry the gradient while their part is stepped."""

    def parts(self, indices: list[int]) -> Iterator[list[int]]:
        """Group `indices` into parts of at most `PART_PARAMETERS` elements."""
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
        """Make the master hold the weights."""

    @abstractmethod
    def keep(self, index: int, gradient: torch.Tensor) -> None:
        """Take the result; until `write` it may occupy the memory of `gradient`."""

    def in_host(self, index: int) -> list[torch.Tensor]:
        """Tensors in host memory between two steps, except optimizer state."""
        return []

    @abstractmethod
    def copies(self) -> Sequence[torch.Tensor | None]:
        """Each parameter's current copy in this process, if any."""

    @abstractmethod
    def write(self) -> None:
        """Copy the result of the step into the parameters, in place."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; the parameters already hold the checkpoint's weights."""


class Float32Copy(MasterWeights):
    """A float32 copy of every parameter: 4 bytes a parameter."""

    name = "fp32"

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params = params
        self.masters = [p.detach().float().clone().requires_grad_() for p in params]

    def fill(self, index: int) -> None:
        pass  # the master always holds the weights

    def keep(self, index: int, gradient: torch.Tensor) -> None:
        pass

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
    """Masters that have memory only while their part is stepped."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params = params
        self.masters = []
        for param in params:  # one after the other, so that never all of them have memory
            # Storage of size 0: the tensor keeps its shape and can be the optimizer's key.
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
        """Round float32 `weights` into `into`, of the dtype of parameter `index`."""

    def copies(self) -> Sequence[torch.Tensor | None]:
        return self._stepped

    @torch.no_grad()
    def write(self) -> None:
        for param, stepped in zip(self.params, self._stepped, strict=True):
            if stepped is not None:
                param.copy_(stepped)
        self._stepped = [None] * len(self.params)


class Float32InHost(_Rounded):
    """A float32 copy of every parameter in host memory; its parts must be streamed."""

    name = "fp32"

    def __init__(self, params: list[torch.Tensor], host: HostMemory) -> None:
        self.params = params
        self.masters = [
            host.put_away(torch.empty_like(p, dtype=torch.float32), p.detach()).requires_grad_()
            for p in params
        ]
        self._host = host
        self._stepped = [None] * len(params)

    def fill(self, index: int) -> None:
        pass  # `HostMemory.streamed` has fetched the master

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
    """The rounding error, in half precision, is added again in the next step: 2 bytes a parameter.

    "Revisiting BFloat16 Training" (Zamirai et al. 2020, arXiv:2010.06192, algorithm 1).
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
        # Rounding error = exact result - rounded result; `weights` is not needed any more.
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
    """Random rounding to bfloat16, right on average (Gupta et al. 2015): 0 bytes."""

    name = "stochastic"

    def __init__(
        self, params: list[torch.Tensor], seed: int, first: Sequence[int] | None = None
    ) -> None:
        """Args:
        first: index of each parameter's first element in the whole one; default: 0.
        """
        odd = next((p.dtype for p in params if p.dtype != torch.bfloat16), None)
        if odd is not None:
            raise UsageError(
                f"--master-weights stochastic needs bfloat16 weights, these are {odd}: use "
                f"fp32 or kahan"
            )
        super().__init__(params)
        self._seed, self._first, self._steps = seed, first or [0] * len(params), 0

    def _round(self, index: int, weights: torch.Tensor, into: torch.Tensor) -> None:
        # A fresh, reproducible seed for each step and parameter.
        key = blake2b(f"{self._seed} {self._steps} {index}".encode(), digest_size=8).digest()
        rows = max(
            1, PART_PARAMETERS * len(weights) // weights.numel()
        )  # rounding takes several times their memory
        # Indices count in the whole parameter, so the bits do not depend on the number of ranks.
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
        self._steps = state["steps"]


def salt(key: bytes, first: int, device: torch.device) -> torch.Tensor:
    """Return the seed for `dice` of elements from `first` on under `key` (8 bytes), [2] int32."""
    low, high = struct.unpack("<2I", key)
    return torch.tensor([(first + low) % (1 << 32), high], device=device).int()


def dice(salt: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return 16 random bits for each element, int32.

    Two rounds of a hash of its index (lowbias32: Wellons 2018, "Prospecting for Hash Functions").
    """
    bits = torch.arange(shape.numel(), dtype=torch.int32, device=salt.device).view(shape)
    for each in salt:  # two rounds, one per half of the key
        bits = bits + each
        # `>>` of int32 is arithmetic: the mask removes the copies of the sign bit.
        for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975), (16, 1)):
            bits = (bits ^ (bits >> shift & (1 << 32 - shift) - 1)) * factor
    return bits & 0xFFFF


@compiled_on_cuda  # one pass over the memory; as separate operations it takes about twenty
def round_stochastically(values: torch.Tensor, salt: torch.Tensor) -> torch.Tensor:
    """Round float32 `values` to a neighbouring bfloat16 at random; NaN stays."""
    # bfloat16 is the upper half of a float32. Adding 16 random bits to the lower half carries into
    # it with exactly the probability of the cut-off fraction.
    bits = values.detach().view(torch.int32)
    rounded = ((bits + dice(salt, values.shape)) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def make_master_weights(
    name: str,
    params: list[torch.Tensor],
    seed: int,
    host: HostMemory | None = None,
    first: Sequence[int] | None = None,
) -> MasterWeights:
    """Create the strategy `name` over half-precision `params`."""
    if name == "stochastic":
        return Stochastic(params, seed, first)
    if name == "kahan":
        return Kahan(params, host)
    return Float32Copy(params) if host is None else Float32InHost(params, host)
