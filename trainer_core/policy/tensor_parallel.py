"""A policy cut over ranks as a tensor-parallel server has it, each rank computing with the parts in its own GPU.

How a parameter is cut is not looked up anywhere: it is what each of the server's workers has loaded of it
(`atropos_common.manifest.View`). From that follows how a layer computes, after Megatron-LM (Shoeybi et al. 2019,
arXiv:1909.08053, section 3): products by rows of a weight leave their outputs cut, products by columns are added up
over ranks. A region is a module with such a column product in it, attention or MLP. What goes into one is the same on
all ranks, and so is what comes out; inside, each rank has its own heads or channels. So the gradient of a region's
input, and of a weight in it that several ranks have, is a sum over ranks; elsewhere it is complete on each of them.

Copies of a weight that several ranks have (norms; heads for keys where there are fewer than ranks) follow the first one
of these ranks after every write, bit for bit: kernels that each rank has chosen for itself round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as collectives

from atropos_common.manifest import Shard, TensorView
from trainer_core.errors import UsageError
from trainer_core.policy.checkpoint_layout import checkpoint_layout

ANOTHER_WAY = "tensor_parallel = 1 needs no cutting, and mode broadcast takes any model"


@dataclass(frozen=True)
class ParameterPart:
    """What one rank has of a parameter."""

    begin: tuple[int, ...]
    """Index of its first element in the whole."""
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def of(cls, view: TensorView) -> ParameterPart:
        begin = view.begin or [0] * len(view.shape)
        return cls(tuple(begin), tuple(view.shape), tuple(view.whole or view.shape))

    @property
    def cuts(self) -> list[int]:
        """Dimensions in which it is not all of it."""
        return [dim for dim, size in enumerate(self.shape) if size != self.whole[dim]]

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of a tensor of the whole's shape, a view."""
        return whole[tuple(slice(at, at + n) for at, n in zip(self.begin, self.shape, strict=True))]


@dataclass(frozen=True)
class Vocabulary:
    """This rank's rows of embeddings and head."""

    begin: int
    size: int
    most: int
    """Rows of the rank that has the most of them."""
    whole: int

    def own(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of `tokens` here, 0 for those of other ranks; and which are those, bool, of the same shape."""
        rows = tokens - self.begin
        elsewhere = (rows < 0) | (rows >= self.size)
        return rows.masked_fill(elsewhere, 0), elsewhere


class TensorParallel:
    """The parts of a model's parameters, and what is between its ranks. They are those of torch's default group."""

    vocabulary: Vocabulary | None = None
    """Of the head; null where each rank has all of it."""

    def __init__(self, model: nn.Module, shards: Mapping[int, Shard], rank: int) -> None:
        """Let `model`, whose parameters are this rank's parts already, compute with those of all ranks.

        Args:
            shards: of every rank of torch's default group, by rank.

        Raises:
            UsageError: something is cut in a way that this trainer does not compute; all of it listed.
        """
        self.rank, self.size = rank, len(shards)
        layout = [(name, spot.parameter) for name, spot in checkpoint_layout(model).items() if spot is not None]
        self.names = {parameter: name for name, parameter in layout}
        """Of each parameter in the checkpoint."""
        self.parameters = dict(model.named_parameters())
        self.parts = {
            parameter: [ParameterPart.of(shards[each].views[name]) for each in sorted(shards)]
            for parameter, name in self.names.items()
        }
        """By parameter and rank."""
        self._holders = {
            name: tuple(rank for rank, part in enumerate(parts) if part == parts[self.rank])
            for name, parts in self.parts.items()
        }
        every = {tuple(r for r, p in enumerate(parts) if p == part) for parts in self.parts.values() for part in parts}
        shared = sorted(ranks for ranks in every if len(ranks) > 1)
        self._groups: dict[tuple[int, ...], Any] = {
            ranks: dist.group.WORLD if len(ranks) == self.size else dist.new_group(list(ranks)) for ranks in shared
        }
        problems = [f"{name}, one of several in {where}" for name, where in layout if self.names[where] != name]
        problems += self._install(model)
        if problems:
            raise UsageError(
                "the trainer does not compute this model in parts:\n  " + "\n  ".join(problems) + f"\n{ANOTHER_WAY}"
            )

    def part(self, name: str) -> ParameterPart:
        """This rank's part of a parameter."""
        return self.parts[name][self.rank]

    def norm(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Of the gradients of all ranks together, float32, a scalar; what several ranks have counts once."""
        holders = {self.parameters[name]: len(ranks) for name, ranks in self._holders.items()}
        squares = [
            torch.linalg.vector_norm(gradient, dtype=torch.float32).square() / holders[parameter]
            for parameter, gradient in gradients.items()
        ]
        return over_ranks(torch.stack(squares).sum()).sqrt()

    @torch.no_grad()
    def settle(self) -> None:
        """Give each copy of a parameter the values of the first rank that has one."""
        for ranks, group in self._groups.items():
            copies = [self.parameters[name] for name, holders in sorted(self._holders.items()) if holders == ranks]
            if not copies:
                continue
            flat = torch.cat([copy.reshape(-1) for copy in copies])
            dist.broadcast(flat, ranks[0], group=group)
            for copy, values in zip(copies, flat.split([copy.numel() for copy in copies]), strict=True):
                copy.copy_(values.view(copy.shape))

    @torch.no_grad()
    def fill(self, wholes: Mapping[str, torch.Tensor]) -> None:
        """Give every rank its part of each parameter's values, which rank 0 has whole: by parameter, in their type.
        Another rank's `wholes` are not looked at. All ranks go through all of it."""
        for name, own in self.parameters.items():
            for rank, part in enumerate(self.parts[name]):
                if self.rank == 0:
                    values = part.take(wholes[name]).to(own.device).contiguous()
                    if rank:
                        dist.send(values, rank)
                    else:
                        own.copy_(values)
                elif rank == self.rank:
                    values = torch.empty_like(own, memory_format=torch.contiguous_format)
                    dist.recv(values, 0)
                    own.copy_(values)

    @torch.no_grad()
    def gathered(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every tensor of the checkpoint under its name there, whole and on the CPU, on rank 0; null on the others.
        All ranks go through all of it."""
        for parameter, name in self.names.items():
            own, parts = self.parameters[parameter].detach(), self.parts[parameter]
            whole = torch.empty(parts[0].whole, dtype=own.dtype) if self.rank == 0 else None
            for rank in [rank for rank, part in enumerate(parts) if parts.index(part) == rank]:
                if whole is not None:
                    values = own if rank == 0 else torch.empty(parts[rank].shape, dtype=own.dtype, device=own.device)
                    if rank:
                        dist.recv(values, rank)
                    parts[rank].take(whole).copy_(values)
                elif rank == self.rank:
                    dist.send(own.contiguous(), 0)
            yield name, whole

    def _install(self, model: nn.Module) -> Iterator[str]:
        """Change how the modules of `model` compute; what cannot be computed, in words."""
        known = {id(parameter): name for name, parameter in self.parameters.items()}
        layers = {layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module}
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        by_rows, regions = {}, []
        for path, module in model.named_modules():
            cuts = {leaf: self._cut(known[id(p)]) for leaf, p in module._parameters.items() if p is not None}
            if not any(cuts.values()):
                continue
            if module in ends and set(cuts.values()) == {BY_ROWS}:
                self._install_end(model, module)
            elif module in ends or type(module) is not nn.Linear or cuts not in _LINEAR:
                yield from (f"{path}.{leaf}, a {type(module).__name__}, cut {cut}" for leaf, cut in cuts.items() if cut)
            elif cuts["weight"] == BY_ROWS:
                by_rows[path] = module
            else:
                module.__class__ = ColumnsLinear
                regions.append(model.get_submodule(path.rpartition(".")[0]))
                if regions[-1] in layers or regions[-1] is model:
                    yield f"{path}, which stands in no module of its own together with what computes its input"
        inside = {module for region in regions for module in region.modules()}
        yield from (f"{path}, whose outputs nothing adds up" for path, m in by_rows.items() if m not in inside)
        for region in dict.fromkeys(regions):
            self._install_region(region, known)

    def _install_end(self, model: nn.Module, module: nn.Module) -> None:
        """The embedding or the head; a tied pair has the same rows."""
        parts = next(parts for name, parts in self.parts.items() if self.parameters[name] is module.weight)
        own, most = parts[self.rank], max(part.shape[0] for part in parts)
        rows = Vocabulary(own.begin[0], own.shape[0], most, own.whole[0])
        if module is model.get_output_embeddings():
            self.vocabulary = rows
            module.forward = partial(_whole_logits, module.forward, rows)
        else:
            module.forward = partial(_look_up, module, module.forward, rows)
            if module.padding_idx is not None:  # that row learns nothing
                here = module.padding_idx - rows.begin
                module.padding_idx = here if 0 <= here < rows.size else None

    def _install_region(self, region: nn.Module, known: Mapping[int, str]) -> None:
        region.register_forward_pre_hook(_enter_region, with_kwargs=True)
        if hasattr(region, "num_key_value_groups"):  # what transformers' own attention repeats heads by
            region.num_key_value_groups = len(region.q_proj.weight) // len(region.k_proj.weight)
        for module in region.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is None or (leaf == "bias" and isinstance(module, ColumnsLinear)):
                    continue
                ranks = self._holders[known[id(parameter)]]
                if len(ranks) > 1:
                    parameter.register_hook(partial(over_ranks, group=self._groups[ranks]))

    def _cut(self, name: str) -> str:
        """How a parameter is cut; empty: not at all."""
        parts = self.parts[name]
        cuts = {dim for part in parts for dim in part.cuts}
        if not cuts:
            return ""
        return BY_DIMENSION.get(min(cuts), f"in dimension {min(cuts)}") if len(cuts) == 1 else "in several dimensions"


def parallel_of(model: nn.Module) -> TensorParallel | None:
    """What `model` is a part of; null where it is whole."""
    found: TensorParallel | None = getattr(model, "parallel", None)
    return found


def own_part(model: nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    """What of a parameter's values is this rank's, a view; all of them where the model is whole."""
    parallel = parallel_of(model)
    return whole if parallel is None else parallel.part(name).take(whole)


class ColumnsLinear(nn.Linear):
    """A product by the columns of the weight that are here, added up over ranks; the bias is added once.

    A class, not a `forward` of the module's own: torch.compile would take each of those for another function, compile a
    layer for each, and give up after the eighth.
    """

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = _Leave.apply(F.linear(states, self.weight))
        return summed if self.bias is None else summed + self.bias


BY_ROWS, BY_COLUMNS = "by rows", "by columns"
BY_DIMENSION = {0: BY_ROWS, 1: BY_COLUMNS}
_LINEAR = (
    {"weight": BY_ROWS}, {"weight": BY_ROWS, "bias": BY_ROWS}, {"weight": BY_COLUMNS},
    {"weight": BY_COLUMNS, "bias": ""},
)  # fmt: skip
"""How a linear layer may be cut: of outputs each rank has some, or of inputs."""


def over_ranks(tensor: torch.Tensor, how: str = "sum", group: Any = None) -> torch.Tensor:
    """The sum, or what `how` names, over the ranks of a group, all of them by default; the same bits on each."""
    reduced = collectives.all_reduce(tensor.contiguous(), how, group or dist.group.WORLD)
    return collectives.wait_tensor(reduced)  # type: ignore[no-any-return]


class _Enter(torch.autograd.Function):
    """The same forward; the gradient is a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return over_ranks(grads[0])


class _Leave(torch.autograd.Function):
    """A sum over ranks; the gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return over_ranks(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def enter(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, the same on all ranks, as each rank goes on with it in its own way."""
    entered: torch.Tensor = _Enter.apply(tensor)
    return entered


def _enter_region(
    region: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a region of transformers: what it computes from is its first argument, or named `hidden_states`."""
    if args:
        return (enter(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"])}


def _look_up(module: nn.Embedding, forward: Callable[[torch.Tensor], torch.Tensor], rows: Vocabulary,
             tokens: torch.Tensor) -> torch.Tensor:  # fmt: skip
    if rows.size:
        here, elsewhere = rows.own(tokens)
        own = forward(here).masked_fill(elsewhere[..., None], 0)
    else:  # a vocabulary so small that this rank has none of it; the gradient of nothing is there all the same
        own = module.weight.sum(0).expand(*tokens.shape, -1)
    found: torch.Tensor = _Leave.apply(own)
    return found


def _whole_logits(
    forward: Callable[[torch.Tensor], torch.Tensor], rows: Vocabulary, hidden: torch.Tensor
) -> torch.Tensor:
    """Every rank's, for the model's own forward pass: training never holds them (`policy/logprobs.py`)."""
    logits = forward(hidden)
    whole = logits.new_zeros(*logits.shape[:-1], rows.whole)
    whole[..., rows.begin : rows.begin + rows.size] = logits
    return over_ranks(whole)
