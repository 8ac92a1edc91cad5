"""Hypotheses about the weights and the architecture that an engine computes with.

Each changes the reference model for a moment; the logprobs that it then computes are compared with
the engine's. The model is a plain transformers model in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from atropos_common.protocol.audit import (
    ADAPTER,
    CONFIG,
    DTYPE,
    HALF_LOADED,
    QUANTISED,
    ROTARY,
    TIED_HEAD,
    WINDOW,
)
from atropos_common.protocol.trainer_records import STALE_WEIGHTS

Change = Callable[[], AbstractContextManager[None]]
Rounding = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """One thing that the engine may do otherwise than the folder says."""

    kind: str
    evidence: str
    change: Change
    """Makes the reference model compute like the engine, until it ends."""
    inexact: bool = False
    """It shrinks the difference without removing it: other rounding remains."""


@dataclass
class Known:
    """Tensors on this side that an engine may have in place of the right ones."""

    base: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Parameters without the adapter, by name; only those that the adapter changes."""
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]] = field(default_factory=dict)
    """Adapter: parameter name -> A [r, in], B [out, r], scale."""
    older: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Parameters of an older checkpoint."""
    stored_head: torch.Tensor | None = None
    """Head that a folder with tied embeddings contains nevertheless."""
    shards: Sequence[Sequence[str]] = ()
    """Names of the parameters in each file of the folder."""


def hypotheses(model: nn.Module, known: Known) -> Iterator[Hypothesis]:
    """Yield hypotheses, the simplest and most frequent first."""
    yield from _adapter(model, known)
    yield from _older(model, known)
    yield from _head(model, known)
    yield from _rotary(model)
    yield from _config(model)
    yield from _window(model)
    yield from _unloaded(model, known)
    yield from _rounded(model)


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the decoder's layers: the longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())


@contextmanager
def swapped(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give parameters other values for a moment."""
    own = dict(model.named_parameters())
    kept = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            kept[name] = own[name].detach().clone()
            own[name].copy_(tensor)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in kept.items():
                own[name].copy_(tensor)


@contextmanager
def attributes(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give attributes other values for a moment."""
    kept = [(thing, name, getattr(thing, name)) for thing, name, _ in changes]
    try:
        for thing, name, value in changes:
            setattr(thing, name, value)
        yield
    finally:
        for thing, name, value in kept:
            setattr(thing, name, value)


def _swap(model: nn.Module, make: Callable[[], Mapping[str, torch.Tensor]]) -> Change:
    return lambda: swapped(model, make())


def _mapped(model: nn.Module, names: Sequence[str], new: Rounding) -> Change:
    """Give each of the named parameters what `new` makes of it."""
    own = dict(model.named_parameters())
    return _swap(model, lambda: {name: new(own[name].detach()) for name in names})


def _filled(model: nn.Module, names: Sequence[str], value: float) -> Change:
    return _mapped(model, names, lambda tensor: torch.full_like(tensor, value))


def _adapter(model: nn.Module, known: Known) -> Iterator[Hypothesis]:
    base, factors = known.base, known.factors
    if not factors:
        return

    def scaled(scale: float, names: Sequence[str] = tuple(base), rank: int | None = None) -> Change:
        def make() -> dict[str, torch.Tensor]:
            return {
                name: base[name] + scale * own * (b[:, :rank] @ a[:rank])
                for name in names
                for a, b, own in (factors[name],)
            } | {name: base[name] for name in base if name not in names}

        return _swap(model, make)

    yield Hypothesis(ADAPTER, "the engine answers as the base model: no adapter", scaled(0.0))
    ranks = {a.shape[0] for a, _, _ in factors.values()}
    most = max(ranks)
    for scale, why in (
        (2.0, "the adapter is applied twice, or with twice its scale"),
        (math.sqrt(most), "the adapter is scaled by alpha/sqrt(rank) instead of alpha/rank"),
        (1 / math.sqrt(most), "the adapter is scaled by alpha/rank instead of alpha/sqrt(rank)"),
        (float(most), "the adapter is scaled by alpha instead of alpha/rank"),
        (0.5, "the adapter has half of its scale"),
        (4.0, "the adapter has four times its scale"),
        (0.25, "the adapter has a quarter of its scale"),
        *((1 / own, "the adapter's scale is missing") for own in {f[2] for f in factors.values()}),
    ):
        if abs(scale - 1.0) > 1e-6:
            yield Hypothesis(ADAPTER, why, scaled(scale))
    for rank in sorted({most // 2, most // 4, 8, 16, 32, 64} - {0, most}):
        if rank < most:
            why = f"only {rank} of {most} ranks of the adapter are there: another rank"
            yield Hypothesis(ADAPTER, why, scaled(1.0, rank=rank))
    for what in sorted({name.split(".")[-2] for name in factors}):
        names = [name for name in factors if name.split(".")[-2] != what]
        why = f"the adapter is missing on {what}"
        yield Hypothesis(ADAPTER, why, scaled(1.0, names))
    attention = [name for name in factors if "attn" in name]
    if 0 < len(attention) < len(factors):
        others = [name for name in factors if name not in attention]
        yield Hypothesis(ADAPTER, "only its attention part is applied", scaled(1.0, attention))
        yield Hypothesis(ADAPTER, "only its MLP part is applied", scaled(1.0, others))


def _older(model: nn.Module, known: Known) -> Iterator[Hypothesis]:
    older = known.older
    if not older:
        return
    own = dict(model.named_parameters())

    def with_older(keep: Callable[[str], bool]) -> Change:
        return _swap(model, lambda: {n: t for n, t in older.items() if keep(n)})

    def stepped(names: Sequence[str], factor: float) -> Change:
        def make() -> dict[str, torch.Tensor]:
            return {n: older[n] + factor * (own[n].detach() - older[n]) for n in names}

        return _swap(model, make)

    yield Hypothesis(
        STALE_WEIGHTS, "every weight is that of the older checkpoint", with_older(lambda name: True)
    )
    head = _head_names(model)
    embedding = [n for n in head if n in older]
    for factor, how in ((2.0, "two updates for one"), (0.0, "the older checkpoint's")):
        why = f"the head differs alone and holds {how}: a tied head that was updated separately"
        change = _head_change(model, _stepped_head(model, older, factor))
        if change is not None:
            yield Hypothesis(TIED_HEAD, why, change)
        if embedding and factor:
            why = "embedding and head have moved twice as far from the older checkpoint"
            yield Hypothesis(TIED_HEAD, why, stepped(embedding, factor))
    yield Hypothesis(
        STALE_WEIGHTS,
        "every weight has moved twice as far from the older checkpoint",
        stepped(tuple(older), 2.0),
    )
    yield from _older_parts(model, known, with_older)


def _older_parts(
    model: nn.Module, known: Known, with_older: Callable[[Callable[[str], bool]], Change]
) -> Iterator[Hypothesis]:
    prefixes = _layer_prefixes(model)
    for at, prefix in enumerate(prefixes):
        after = tuple(prefixes[at:])
        if at:
            why = f"layers {at} to {len(prefixes) - 1} are the older checkpoint's"
            yield Hypothesis(HALF_LOADED, why, with_older(_starting(after)))
            why = f"layers 0 to {at - 1} are the older checkpoint's"
            before = tuple(prefixes[:at])
            yield Hypothesis(HALF_LOADED, why, with_older(_starting(before)))
        why = f"layer {at} is the older checkpoint's"
        yield Hypothesis(HALF_LOADED, why, with_older(_starting((prefix,))))
    for number, names in enumerate(known.shards if len(known.shards) > 1 else ()):
        why = f"the weights of file {number + 1} of {len(known.shards)} are the older checkpoint's"
        yield Hypothesis(HALF_LOADED, why, with_older(frozenset(names).__contains__))
    for part, words in (
        ("norm", "norms"),
        ("attn", "attention weights"),
        ("mlp", "MLP weights"),
        ("embed", "embeddings"),
        ("bias", "biases"),
    ):
        why = f"the {words} are the older checkpoint's"
        yield Hypothesis(HALF_LOADED, why, with_older(partial(_holds, part)))


def _starting(prefixes: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefixes)


def _holds(part: str, name: str) -> bool:
    return part in name


def _head_names(model: nn.Module) -> list[str]:
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    return [name for name, tensor in model.named_parameters() if tensor is head]


def _stepped_head(
    model: nn.Module, older: Mapping[str, torch.Tensor], factor: float
) -> torch.Tensor | None:
    names = _head_names(model)
    if not names or names[0] not in older:
        return None
    own = dict(model.named_parameters())[names[0]].detach()
    return older[names[0]] + factor * (own - older[names[0]])


def _head_change(model: nn.Module, weight: torch.Tensor | None) -> Change | None:
    """Give the head alone another weight, although it may share the embedding's."""
    if weight is None:
        return None
    head = model.get_output_embeddings()  # type: ignore[operator]

    @contextmanager
    def change() -> Iterator[None]:
        own, head.weight = head.weight, nn.Parameter(weight, requires_grad=False)
        try:
            yield
        finally:
            head.weight = own

    return change


def _head(model: nn.Module, known: Known) -> Iterator[Hypothesis]:
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    if head is embedding:
        if (change := _head_change(model, known.stored_head)) is not None:
            why = "the engine's head is the file's own, although the config ties it"
            yield Hypothesis(TIED_HEAD, why, change)
    elif head.shape == embedding.shape:
        change = _head_change(model, embedding.detach())
        assert change is not None
        why = "the engine uses the embedding as its head, although the config does not tie them"
        yield Hypothesis(TIED_HEAD, why, change)
    empty = _head_change(model, torch.zeros_like(head))
    assert empty is not None
    yield Hypothesis(HALF_LOADED, "the head is empty: every token is equally likely", empty)


def _rotary(model: nn.Module) -> Iterator[Hypothesis]:
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name
    ]
    # Gemma has one base for each type of layer.
    names = sorted({name for _, name, _ in buffers})
    for group in [names, *([name] for name in names if len(names) > 1)]:
        of = [(module, name, buffer) for module, name, buffer in buffers if name in group]
        for base in (1e4, 1e5, 1.5e5, 5e5, 1e6, 1.5e6, 5e6, 8e6, 1e7, 1.1e7, 2.5e4, 1e3):
            change = _frequencies(of, partial(_of_base, base))
            if all(torch.allclose(_of_base(base, old), old, rtol=1e-4) for _, _, old in of):
                continue
            which = "" if len(names) == 1 else f" of {', '.join(group)}"
            yield Hypothesis(ROTARY, f"rotary base {base:,.0f}{which}", change)
        for factor in (2.0, 4.0, 8.0, 16.0, 0.5, 0.25, 0.125):
            how = f"rotary positions are divided by {factor:g}: rope scaling"
            yield Hypothesis(ROTARY, how, _frequencies(of, partial(torch.mul, 1 / factor)))


def _of_base(base: float, like: torch.Tensor) -> torch.Tensor:
    exponents = torch.arange(len(like), device=like.device, dtype=torch.float32) / len(like)
    return base**-exponents


def _frequencies(
    buffers: Sequence[tuple[nn.Module, str, torch.Tensor]],
    new: Callable[[torch.Tensor], torch.Tensor],
) -> Change:
    return lambda: attributes([(module, name, new(old)) for module, name, old in buffers])


def _config(model: nn.Module) -> Iterator[Hypothesis]:
    config: Any = model.config
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(config, name, None):
            sites: list[tuple[Any, str, Any]] = [(config, name, None)]
            if name.startswith("attn"):
                sites += _having(model, name, None)
            yield Hypothesis(CONFIG, f"{name} is off", _set(sites))
    for name in ("eps", "variance_epsilon"):
        modules = [m for m in model.modules() if isinstance(getattr(m, name, None), float)]
        for eps in (1e-5, 1e-6, 1e-12, 1e-8):
            if modules and getattr(modules[0], name) != eps:
                yield Hypothesis(
                    CONFIG, f"norms use epsilon {eps:g}", _set([(m, name, eps) for m in modules])
                )
    attentions = [m for m in model.modules() if isinstance(getattr(m, "scaling", None), float)]
    for factor in (2.0, 0.5, math.sqrt(2.0), math.sqrt(0.5)):
        sites = [(m, "scaling", m.scaling * factor) for m in attentions]
        if sites:
            yield Hypothesis(CONFIG, f"attention scores are scaled by {factor:.3g}", _set(sites))
    routers = [m for m in model.modules() if isinstance(getattr(m, "top_k", None), int)]
    for more in (-1, 1):
        sites = [(m, "top_k", m.top_k + more) for m in routers if m.top_k + more > 0]
        if sites:
            yield Hypothesis(CONFIG, f"{sites[0][2]} experts a token", _set(sites))
    normed = [m for m in model.modules() if isinstance(getattr(m, "norm_topk_prob", None), bool)]
    if normed:
        sites = [(m, "norm_topk_prob", not m.norm_topk_prob) for m in normed]
        yield Hypothesis(CONFIG, "expert weights are normalised otherwise", _set(sites))
    yield from _dropped_kinds(model)


def _dropped_kinds(model: nn.Module) -> Iterator[Hypothesis]:
    names = [name for name, _ in model.named_parameters()]
    for kind in sorted({".".join(n.split(".")[-2:]) for n in names if n.endswith(".bias")}):
        chosen = [n for n in names if n.endswith(kind)]
        why = f"{kind} is missing in {len(chosen)} layers"
        yield Hypothesis(HALF_LOADED, why, _filled(model, chosen, 0.0))
    biases = [n for n in names if n.endswith(".bias")]
    if biases:
        yield Hypothesis(HALF_LOADED, "every bias is missing", _filled(model, biases, 0.0))
    norms = [n for n in names if "norm" in n]
    for value in (0.0, 1.0):
        change = _filled(model, norms, value)
        yield Hypothesis(HALF_LOADED, f"every norm weight is {value:g}", change)


def _having(model: nn.Module, name: str, value: Any) -> list[tuple[Any, str, Any]]:
    return [(m, name, value) for m in model.modules() if getattr(m, name, None)]


def _set(sites: Sequence[tuple[Any, str, Any]]) -> Change:
    return lambda: attributes(sites)


def _window(model: nn.Module) -> Iterator[Hypothesis]:
    config: Any = model.config
    window = getattr(config, "sliding_window", None)
    if not window or not slides(config):
        return
    for size, how in (
        (window - 1, "one token shorter"),
        (window + 1, "one token longer"),
        (10**9, "off"),
        (window // 2, "half as long"),
        (window * 2, "twice as long"),
    ):
        sites = [(config, "sliding_window", size), *_having(model, "sliding_window", size)]
        yield Hypothesis(WINDOW, f"the sliding window of {window} tokens is {how}", _set(sites))


def slides(config: Any) -> bool:
    """Tell whether any layer attends to a sliding window."""
    types = getattr(config, "layer_types", None)
    return bool(getattr(config, "sliding_window", None)) and (
        types is None or "sliding_attention" in types
    )


def _layer_prefixes(model: nn.Module) -> list[str]:
    layers = layers_of(model)
    names = {id(module): name for name, module in model.named_modules()}
    return [f"{names[id(layer)]}." for layer in layers]


def _unloaded(model: nn.Module, known: Known) -> Iterator[Hypothesis]:
    layers = layers_of(model)
    count = len(layers)
    for at in range(1, count):
        yield Hypothesis(
            HALF_LOADED,
            f"layers {at} to {count - 1} of {count} do nothing: left empty, or at their "
            f"initialization",
            partial(_skipped, layers[at:]),
        )
        yield Hypothesis(
            HALF_LOADED,
            f"layers 0 to {at - 1} of {count} do nothing",
            partial(_skipped, layers[:at]),
        )
    for at in range(count):
        why = f"layer {at} of {count} does nothing: left empty, or at its initialization"
        yield Hypothesis(HALF_LOADED, why, partial(_skipped, [layers[at]]))
    own = dict(model.named_parameters())
    for number, names in enumerate(known.shards if len(known.shards) > 1 else ()):
        chosen = tuple(name for name in names if name in own)
        why = f"the weights of file {number + 1} of {len(known.shards)} are empty"
        yield Hypothesis(HALF_LOADED, why, _filled(model, chosen, 0.0))


@contextmanager
def _skipped(layers: Sequence[nn.Module]) -> Iterator[None]:
    def identity(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        states = arguments[0]
        return (states, *output[1:]) if isinstance(output, tuple) else states

    handles = [layer.register_forward_hook(identity) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rounded(model: nn.Module) -> Iterator[Hypothesis]:
    own = dict(model.named_parameters())
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        change = _mapped(model, tuple(own), partial(torch.Tensor.to, dtype=dtype))
        yield Hypothesis(DTYPE, f"the weights are rounded to {name}", change, inexact=True)
    matrices = [
        f"{name}.weight"
        for layer in _layer_prefixes(model)
        for name, module in model.named_modules()
        if name.startswith(layer) and isinstance(module, nn.Linear)
    ]
    for scheme, rounded in SCHEMES.items():
        change = _mapped(model, matrices, rounded)
        why = f"the layers' matrices are rounded to {scheme}"
        yield Hypothesis(QUANTISED, why, change, inexact=True)


def _grid(levels: int, group: int | None, whole: bool = False) -> Rounding:
    def rounded(weight: torch.Tensor) -> torch.Tensor:
        shape = weight.shape
        size = weight.numel() if whole else (group or shape[-1])
        if shape[-1] % size and not whole:
            size = shape[-1]
        rows = weight.reshape(-1, size)
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / levels
        return ((rows / scale).round().clamp(-levels - 1, levels) * scale).reshape(shape)

    return rounded


def _float8(whole: bool) -> Rounding:
    def rounded(weight: torch.Tensor) -> torch.Tensor:
        rows = weight.reshape(1, -1) if whole else weight
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448.0
        return ((rows / scale).to(torch.float8_e4m3fn).float() * scale).reshape(weight.shape)

    return rounded


SCHEMES: dict[str, Rounding] = {
    "int8 with a scale for each row": _grid(127, None),
    "int8 with one scale": _grid(127, None, whole=True),
    "fp8 with a scale for each row": _float8(False),
    "fp8 with one scale": _float8(True),
    "int4 in groups of 128": _grid(7, 128),
    "int4 in groups of 64": _grid(7, 64),
    "int4 in groups of 32": _grid(7, 32),
    "int4 with a scale for each row": _grid(7, None),
}
