"""A policy split over ranks like a tensor-parallel server (Megatron-LM, arXiv:1909.08053, section
3).

A weight split by rows gives outputs split over ranks; the product with one split by columns is
summed over ranks. A region (attention or MLP) is a module with a column product. Its input and
output are equal on all ranks; inside, each rank has its own heads or channels. Gradients of a
region's input, and of weights in it that several ranks hold, are summed over ranks. All others are
complete.
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

from atropos_common.protocol.manifest import Shard, TensorView
from trainer_core.errors import UsageError
from trainer_core.policy.load import checkpoint_layout

ANOTHER_WAY = "Set tensor_parallel = 1, or use mode broadcast, which takes any model"


@dataclass(frozen=True)
class ParameterPart:
    """One rank's part of a parameter."""

    begin: tuple[int, ...]
    """Index of the first element in the whole."""
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def of(cls, view: TensorView) -> ParameterPart:
        begin = view.begin or [0] * len(view.shape)
        return cls(tuple(begin), tuple(view.shape), tuple(view.whole or view.shape))

    @property
    def cuts(self) -> list[int]:
        """Dimensions smaller than the whole."""
        return [dim for dim, size in enumerate(self.shape) if size != self.whole[dim]]

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this part of `whole`, a view."""
        return whole[tuple(slice(at, at + n) for at, n in zip(self.begin, self.shape, strict=True))]


@dataclass(frozen=True)
class Vocabulary:
    """This rank's rows of embeddings and head."""

    begin: int
    size: int
    most: int
    """Most rows on any rank."""
    whole: int

    def own(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's row here (0 for other ranks' tokens), and the mask of those
        tokens."""
        rows = tokens - self.begin
        elsewhere = (rows < 0) | (rows >= self.size)
        return rows.masked_fill(elsewhere, 0), elsewhere


class TensorParallel:
    """Parts of a model's parameters, and the communication between ranks."""

    vocabulary: Vocabulary | None = None
    """The head's rows; None if it is whole."""

    def __init__(self, model: nn.Module, shards: Mapping[int, Shard], rank: int) -> None:
        """Make `model`, whose parameters are already parts, compute with the other ranks.

        Args:
            shards: manifest of each rank.
        """
        self.rank, self.size = rank, len(shards)
        spots = checkpoint_layout(model).items()
        layout = [(name, spot.parameter) for name, spot in spots if spot is not None]
        self.names = {parameter: name for name, parameter in layout}
        """Checkpoint name by parameter name."""
        self.parameters = dict(model.named_parameters())
        self.parts = {
            parameter: [ParameterPart.of(shards[each].views[name]) for each in sorted(shards)]
            for parameter, name in self.names.items()
        }
        """Part on each rank by parameter name."""
        self._holders = {
            name: tuple(rank for rank, part in enumerate(parts) if part == parts[self.rank])
            for name, parts in self.parts.items()
        }
        every = {
            tuple(r for r, p in enumerate(parts) if p == part)
            for parts in self.parts.values()
            for part in parts
        }
        # `new_group` is a collective, so all ranks create all groups in the same order.
        self._groups: dict[tuple[int, ...], Any] = {
            ranks: dist.group.WORLD if len(ranks) == self.size else dist.new_group(list(ranks))
            for ranks in sorted(every)
            if len(ranks) > 1
        }
        stacked = [(name, where) for name, where in layout if self.names[where] != name]
        problems = [f"{name}, stacked with others in {where}" for name, where in stacked]
        problems += self._install(model)
        if problems:
            listed = "\n  ".join(problems)
            raise UsageError(
                f"the trainer cannot split this model over ranks:\n  {listed}\n{ANOTHER_WAY}"
            )

    def part(self, name: str) -> ParameterPart:
        return self.parts[name][self.rank]

    def norm(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Norm over all ranks, a float32 scalar; a parameter that several ranks hold counts
        once."""
        holders = {self.parameters[name]: len(ranks) for name, ranks in self._holders.items()}
        # Each of n holders contributes one n-th of the squared norm.
        squares = [
            torch.linalg.vector_norm(gradient, dtype=torch.float32).square() / holders[parameter]
            for parameter, gradient in gradients.items()
        ]
        return over_ranks(torch.stack(squares).sum()).sqrt()

    @torch.no_grad()
    # Each rank autotunes its kernels, and they round differently, so copies would drift apart.
    def settle(self) -> None:
        """Copy each shared parameter from the first rank that holds it."""
        for ranks, group in self._groups.items():
            names = sorted(name for name, holders in self._holders.items() if holders == ranks)
            copies = [self.parameters[name] for name in names]
            if not copies:
                continue
            # One broadcast per group instead of one per parameter.
            flat = torch.cat([copy.reshape(-1) for copy in copies])
            dist.broadcast(flat, ranks[0], group=group)
            values = flat.split([copy.numel() for copy in copies])
            for copy, value in zip(copies, values, strict=True):
                copy.copy_(value.view(copy.shape))

    @torch.no_grad()
    def fill(self, wholes: Mapping[str, torch.Tensor]) -> None:
        """Distribute values from rank 0, which has them in `wholes`; a collective."""
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
        """Yield each checkpoint tensor, on the CPU of rank 0, None elsewhere.

        A collective: all ranks must exhaust it.
        """
        for parameter, name in self.names.items():
            own, parts = self.parameters[parameter].detach(), self.parts[parameter]
            whole = torch.empty(parts[0].whole, dtype=own.dtype) if self.rank == 0 else None
            # Only the first rank that holds a part sends it.
            for rank in [rank for rank, part in enumerate(parts) if parts.index(part) == rank]:
                if whole is not None:
                    values = own
                    if rank:
                        values = own.new_empty(parts[rank].shape)
                        dist.recv(values, rank)
                    parts[rank].take(whole).copy_(values)
                elif rank == self.rank:
                    dist.send(own.contiguous(), 0)
            yield name, whole

    # Yields a description of each parameter that cannot be split so.
    def _install(self, model: nn.Module) -> Iterator[str]:
        known = {id(parameter): name for name, parameter in self.parameters.items()}
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        layers = {layer for several in lists for layer in several}
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        by_rows, regions = {}, []
        for path, module in model.named_modules():
            own = ((leaf, p) for leaf, p in module._parameters.items() if p is not None)
            cuts = {leaf: self._cut(known[id(p)]) for leaf, p in own}
            if not any(cuts.values()):
                continue
            if module in ends and set(cuts.values()) == {BY_ROWS}:
                self._install_end(model, module)
            elif module in ends or type(module) is not nn.Linear or cuts not in _LINEAR:
                kind = type(module).__name__
                yield from (
                    f"{path}.{leaf}, a {kind}, split {cut}" for leaf, cut in cuts.items() if cut
                )
            elif cuts["weight"] == BY_ROWS:
                by_rows[path] = module
            else:
                module.__class__ = ColumnsLinear
                regions.append(model.get_submodule(path.rpartition(".")[0]))
                if regions[-1] in layers or regions[-1] is model:
                    apart = "shares no submodule with the layers that compute its input"
                    yield f"{path}, which {apart}"
        inside = {module for region in regions for module in region.modules()}
        alone = (path for path, module in by_rows.items() if module not in inside)
        yield from (f"{path}, whose split outputs no layer sums" for path in alone)
        for region in dict.fromkeys(regions):
            self._install_region(region, known)

    def _install_end(self, model: nn.Module, module: nn.Module) -> None:
        # Tied weights have the same rows.
        parts = next(self.parts[n] for n, p in self.parameters.items() if p is module.weight)
        own, most = parts[self.rank], max(part.shape[0] for part in parts)
        rows = Vocabulary(own.begin[0], own.shape[0], most, own.whole[0])
        if module is model.get_output_embeddings():
            self.vocabulary = rows
            module.forward = partial(_whole_logits, module.forward, rows)
        else:
            module.forward = partial(_look_up, module, module.forward, rows)
            if module.padding_idx is not None:  # this row gets no gradient
                here = module.padding_idx - rows.begin
                module.padding_idx = here if 0 <= here < rows.size else None

    def _install_region(self, region: nn.Module, known: Mapping[int, str]) -> None:
        region.register_forward_pre_hook(_enter_region, with_kwargs=True)
        # transformers' own attention repeats key heads by this factor.
        if hasattr(region, "num_key_value_groups"):
            region.num_key_value_groups = len(region.q_proj.weight) // len(region.k_proj.weight)
        for module in region.modules():
            for leaf, parameter in module._parameters.items():
                # The bias of a column product is added after the sum, so its gradient is complete.
                if parameter is None or (leaf == "bias" and isinstance(module, ColumnsLinear)):
                    continue
                ranks = self._holders[known[id(parameter)]]
                if len(ranks) > 1:
                    parameter.register_hook(partial(over_ranks, group=self._groups[ranks]))

    def _cut(self, name: str) -> str:
        parts = self.parts[name]
        cuts = {dim for part in parts for dim in part.cuts}
        if len(cuts) > 1:
            return "in several dimensions"
        return "".join(BY_DIMENSION.get(dim, f"in dimension {dim}") for dim in cuts)


def parallel_of(model: nn.Module) -> TensorParallel | None:
    found: TensorParallel | None = getattr(model, "parallel", None)
    return found


def own_part(model: nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `whole`, a view; all of it if the model is whole."""
    parallel = parallel_of(model)
    return whole if parallel is None else parallel.part(name).take(whole)


class ColumnsLinear(nn.Linear):
    """Linear layer with some columns of the weight, summed over ranks."""

    # A class, because torch.compile takes a `forward` attribute of each module for a function of
    # its own: it would compile every layer separately, and give up after the eighth.
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = _Leave.apply(F.linear(states, self.weight))
        return summed if self.bias is None else summed + self.bias


BY_ROWS, BY_COLUMNS = "by rows", "by columns"
BY_DIMENSION = {0: BY_ROWS, 1: BY_COLUMNS}
_LINEAR = (
    {"weight": BY_ROWS},
    {"weight": BY_ROWS, "bias": BY_ROWS},
    {"weight": BY_COLUMNS},
    {"weight": BY_COLUMNS, "bias": ""},
)
"""Supported splits: by outputs (rows) or by inputs (columns)."""


def over_ranks(tensor: torch.Tensor, how: str = "sum", group: Any = None) -> torch.Tensor:
    """All-reduce; the result has the same bits on each rank."""
    reduced = collectives.all_reduce(tensor.contiguous(), how, group or dist.group.WORLD)
    return collectives.wait_tensor(reduced)  # type: ignore[no-any-return]


class _Enter(torch.autograd.Function):
    """Identity forward; the backward pass sums the gradient over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return over_ranks(grads[0])


class _Leave(torch.autograd.Function):
    """Sum over ranks forward; the gradient is equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return over_ranks(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def enter(tensor: torch.Tensor) -> torch.Tensor:
    """Mark where ranks start to use an equal `tensor` differently."""
    entered: torch.Tensor = _Enter.apply(tensor)
    return entered


def _enter_region(
    region: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # transformers passes a region's input as the first argument or as `hidden_states`.
    if args:
        return (enter(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"])}


def _look_up(
    module: nn.Embedding,
    forward: Callable[[torch.Tensor], torch.Tensor],
    rows: Vocabulary,
    tokens: torch.Tensor,
) -> torch.Tensor:
    if rows.size:
        here, elsewhere = rows.own(tokens)
        own = forward(here).masked_fill(elsewhere[..., None], 0)
    else:  # a small vocabulary leaves this rank without rows; the weight still needs a gradient
        own = module.weight.sum(0).expand(*tokens.shape, -1)
    found: torch.Tensor = _Leave.apply(own)
    return found


def _whole_logits(
    forward: Callable[[torch.Tensor], torch.Tensor], rows: Vocabulary, hidden: torch.Tensor
) -> torch.Tensor:
    """Logits of all ranks, for the model's own forward pass only."""
    logits = forward(hidden)
    # Each rank fills its columns and the sum joins them.
    whole = logits.new_zeros(*logits.shape[:-1], rows.whole)
    whole[..., rows.begin : rows.begin + rows.size] = logits
    return over_ranks(whole)
