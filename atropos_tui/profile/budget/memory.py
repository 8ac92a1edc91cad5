"""The memory budget of a stack before it starts.

`take_inventory` looks at the machine; the budget is a pure function of it. Bytes are per device.
Weights, gradients, master weights, optimizer state and vLLM's share are exact for each tensor;
activations, CUDA graphs and contexts are estimates. Shared tensors are divided evenly over
tensor-parallel GPUs or FSDP2 ranks. In single copy the weights count once, on the engine.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

from atropos_common.broadcast.transfer import CHUNK_BYTES, SLOTS
from atropos_common.models import model_math
from atropos_common.models.model_math import Adapters, Dimensions
from atropos_common.protocol.bridge import few_graph_sizes, server_rank
from atropos_tui.profile.budget.inventory import (
    LAYER,
    Hardware,
    Model,
    Shapes,
    read_machine,
    read_model,
)
from atropos_tui.profile.builders.commands import resolve_path
from atropos_tui.profile.builders.engine import LORA_SLOTS, MOST_SEQUENCES
from atropos_tui.profile.placement import Placement
from atropos_tui.profile.profile import Profile
from atropos_tui.profile.sections import EngineSection
from atropos_tui.profile.site import (
    Site,
    engine_model,
    fed_engines,
    is_mapped,
    is_shared,
    longest_sequence,
    receivers,
    trainer_placements,
    training_config,
    traits_of,
)
from trainer_core.config import TrainingConfig

HOST = "host"
CONTEXT = 750 * 1024**2
"""CUDA context and libraries of a process, in bytes."""
GRAPH = 512 * 1024
"""Bytes of one CUDA graph for one batch size and layer."""
LONG_ROW = 16_384
"""Sequence length from which the notes mention sharing rows among ranks."""
MASTERS = {"fp32": "float32", "kahan": "what rounding lost"}
"""Extra copies of each `master_weights` setting, for display."""
_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Inventory:
    """The machine, and each engine's model or the reason why it is unknown."""

    machine: Hardware
    models: dict[str, Model | str]
    has_eight_bit: bool = True
    """The 8-bit optimizer's package is installed; assumed for another machine."""


def gpu_count() -> int:
    return len(read_machine().gpus)


def take_inventory(site: Site, machine: Hardware | None = None) -> Inventory:
    names = {section.name: engine_model(site, section) for section in site.profile.vllm}
    known = {name: read_model(name) for name in set(names.values())}
    for step in site.profile.prepare:
        # A model that a `prepare` step creates does not exist before the first run.
        made = site.text(step.creates or "")
        if isinstance(known.get(made), str) and not resolve_path(made).exists():
            known[made] = f"{step.name} makes the model when the run starts"
    eight_bit = machine is not None or importlib.util.find_spec("bitsandbytes") is not None
    if machine is None:
        # With several machines nothing is known about the others, so all are treated as unknown.
        machine = Hardware((), None) if site.profile.is_spread else read_machine()
    return Inventory(machine, {section: known[name] for section, name in names.items()}, eight_bit)


@dataclass(frozen=True)
class Item:
    """Bytes of one component on one device; None if unknown."""

    component: str
    what: str
    bytes: int | None
    note: str = ""
    estimate: bool = False


@dataclass
class Device:
    """One GPU ("GPU 0") or the host."""

    name: str
    model: str = ""
    total: int | None = None
    """Bytes; None for a GPU that this machine does not have."""
    items: list[Item] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        """Bytes that all components request, as far as known."""
        return sum(item.bytes or 0 for item in self.items)

    @property
    def certain(self) -> int:
        """`wanted` without estimates, with all that vLLM reserves."""
        counted = (i for i in self.items if not i.estimate or i.component != "trainer")
        return sum(item.bytes or 0 for item in counted)

    @property
    def is_too_small(self) -> bool:
        """Too small even without activations."""
        return self.total is not None and self.certain > self.total


@dataclass(frozen=True)
class Budget:
    devices: list[Device]
    notes: list[str]
    warnings: list[str]
    too_small_caches: list[str]
    """Engines whose cache does not hold one sequence."""


def make_budget(
    profile: Profile, settings: TrainingConfig, models: Mapping[str, Model | str], machine: Hardware
) -> Budget:
    """`models`: engine name -> model, or why it is unknown."""
    builder = _Builder(profile, settings, machine)
    # Engines first: the trainer's activations fill what engines leave on a shared GPU.
    for section, made in zip(profile.vllm, profile.placed, strict=True):
        if isinstance(model := models[section.name], Model):
            for engine, placements in made:
                builder.engine(engine, model, placements)
    notes = [
        f"{section.name}: unknown: {m}"
        for section in profile.vllm
        if isinstance(m := models[section.name], str)
    ]
    if isinstance(first := models[profile.vllm[0].name], Model):
        notes.insert(0, f"{first.parameters:,} parameters, from {first.source}")
        if profile.trainer.command is None:  # the memory of another trainer is unknown
            builder.trainer(first)
    if any(map(is_host, builder.devices)):
        notes.append("host memory of the programs themselves is not counted")
    order = list(profile.machines)

    # GPUs before hosts, machines in the profile's order, GPU 2 before GPU 10.
    def position(name: str) -> tuple[bool, int, int, str]:
        return is_host(name), order.index(name.split()[0]) if order else 0, len(name), name

    devices = [builder.devices[name] for name in sorted(builder.devices, key=position)]
    overflows = [
        warning for device in alike(devices) if (warning := overflow(device, profile, settings))
    ]
    return Budget(devices, notes, [*builder.warnings, *overflows], builder.warnings)


def alike(devices: list[Device]) -> list[Device]:
    """Merge devices with equal contents, engine numbers aside."""
    found = []
    for _, group in groupby(devices, _contents):
        first, *others = group
        if not others:
            found.append(first)
        elif first.name.startswith("GPU "):
            last = others[-1].name.removeprefix("GPU ")
            found.append(replace(first, name=f"GPUs {first.name.removeprefix('GPU ')}-{last} each"))
        else:
            found.append(replace(first, name=f"{first.name} to {others[-1].name} each"))
    return found


def _contents(device: Device) -> tuple[int | None, list[Item]]:
    if device.name == HOST or device.name.startswith("GPU "):
        return device.total, device.items
    return device.total, [
        replace(item, component=_NUMBER.sub("", item.component)) for item in device.items
    ]


_NUMBER = re.compile(r"-\d+$")


def is_host(name: str) -> bool:
    return name == HOST or name.endswith(f" {HOST}")


def host_of(name: str) -> str:
    return name if is_host(name) else name.rpartition("GPU")[0] + HOST


def placement_devices(placements: Sequence[Placement]) -> list[str]:
    gpus = [f"{placement.node} GPU {gpu}" for placement in placements for gpu in placement.gpus]
    return gpus or [f"{placement.node} {HOST}" for placement in placements]


def site_budget(site: Site, inventory: Inventory) -> Budget:
    return make_budget(site.profile, training_config(site), inventory.models, inventory.machine)


def engine_devices(section: EngineSection, machine: Hardware) -> list[str]:
    """An engine's GPUs, else the first ones that it sees, else the host."""
    indices = section.gpus or (range(section.gpus_per_copy) if machine.gpus else [])
    return [f"GPU {index}" for index in indices] or [HOST]


def trainer_devices(profile: Profile, settings: TrainingConfig, machine: Hardware) -> list[str]:
    if profile.is_spread:
        placements = trainer_placements(profile)
        on_cpu = settings.device == "cpu"
        return placement_devices(
            [placement._replace(gpus=[]) for placement in placements] if on_cpu else placements
        )
    if settings.device == "cpu":
        return [HOST]
    if profile.trainer.gpus:
        return [f"GPU {index}" for index in profile.trainer.gpus]
    if traits_of(profile).shares_memory:
        return engine_devices(profile.engines[0], machine)
    return ["GPU 0"] if machine.gpus else [HOST]


class _Builder:
    def __init__(self, profile: Profile, settings: TrainingConfig, machine: Hardware) -> None:
        self.profile, self.settings, self.machine = profile, settings, machine
        self.traits = traits_of(profile)
        self.fed = {engine.name for engine in fed_engines(profile)}
        self.devices: dict[str, Device] = {}
        self.warnings: list[str] = []

    def device(self, name: str) -> Device:
        if name not in self.devices:
            # Names are "GPU 3", "host", "node1 GPU 3" or "node1 host".
            index = -1 if is_host(name) else int(name.split()[-1])
            gpu = self.machine.gpus[index] if 0 <= index < len(self.machine.gpus) else None
            total = self.machine.host if is_host(name) else gpu.total if gpu else None
            self.devices[name] = Device(name, gpu.name if gpu else "", total)
        return self.devices[name]

    def add(
        self,
        names: list[str],
        component: str,
        what: str,
        size: int | None,
        note: str = "",
        **more: bool,
    ) -> None:
        for name in names:
            self.device(name).items.append(Item(component, what, size, note, **more))

    def engine(
        self, section: EngineSection, model: Model, placements: Sequence[Placement] = ()
    ) -> None:
        names = (
            placement_devices(placements) if placements else engine_devices(section, self.machine)
        )
        fed = section.name in self.fed
        width = dtype_bytes(section.dtype or self.settings.dtype, model)
        # Bytes of this engine on one device; the KV cache fills what is left of vLLM's share.
        held = 0

        def add(what: str, size: int, note: str = "", *, estimate: bool = False) -> None:
            nonlocal held
            held += size
            self.add(names, section.name, what, size, note, estimate=estimate)

        only = ""
        if is_shared(self.profile, section):
            only = "the only copy: the trainer attaches to it"
        elif is_mapped(self.profile, section):
            only = "the trainer copies each version into it"
        add("weights", math.ceil(model.stored_bytes(width) / section.gpus_per_copy), only)
        if self.traits.lora and fed:
            elements = slot_elements(model, section, self.settings)
            add("adapters", math.ceil(elements * width / section.gpus_per_copy))
        if not is_host(names[0]):
            total = self.device(names[0]).total
            working = working_memory(section, model, width, total)
            add("working memory", working, "activations, sampler, CUDA", estimate=True)
            if graphs := graph_sizes(section, restarted=fed and self.traits.restarts_engine):
                size = graphs * model.dimensions.layers * GRAPH
                add("CUDA graphs", size, f"{graphs} sizes", estimate=True)
        self._kv_cache(names, section, model, width, held)

    def _kv_cache(
        self, names: list[str], section: EngineSection, model: Model, width: int, held: int
    ) -> None:
        device = self.device(names[0])
        per_token = kv_bytes_per_token(section, model, width)
        share = section.memory_share
        given = self._given_kv_cache(names, section)
        if given is None and device.total is None:
            note = f"{share:.0%} of the GPU less the above; {per_token:,} B a token"
            return self.add(names, section.name, "KV cache", None, note)
        # vLLM fills its share: the cache is what weights and working memory leave of it.
        size = max(0, given if given is not None else int(share * (device.total or 0)) - held)
        tokens = size // per_token
        longest = section.max_model_len or model.max_length
        fits = f" = {tokens / longest:,.1f} sequences of {longest:,}" if longest else ""
        self.add(names, section.name, "KV cache", size, f"{tokens:,} tokens{fits}")
        if longest and tokens < longest:
            self.warnings.append(
                f"{section.name}: the KV cache on {device.name} holds {tokens:,} tokens, and one "
                f"sequence may have {longest:,}: vLLM will not start. Raise "
                f"gpu_memory_utilization (now {section.gpu_share:g}) or lower max_model_len"
            )
        return None

    def _given_kv_cache(self, names: list[str], section: EngineSection) -> int | None:
        if (given := section.flag_number("kv-cache-memory-bytes", 0)) > 0:
            return given
        # On a CPU this variable of vLLM sets the cache, in GiB.
        gib = section.env.get("VLLM_CPU_KVCACHE_SPACE", "") if is_host(names[0]) else ""
        return int(gib) * 1024**3 if gib.isdecimal() else None

    def trainer(self, model: Model) -> None:
        settings = self.settings
        names = trainer_devices(self.profile, settings, self.machine)
        on_gpu = not is_host(names[0])
        width = dtype_bytes(settings.dtype, model)
        # Ranks shard the parameters, except in single copy, where each has its part of a
        # tensor-parallel engine.
        sharded = len(names) > 1 and not self.traits.shares_memory

        def add(
            what: str, size: int, note: str = "", *, at: list[str] = names, estimate: bool = False
        ) -> None:
            self.add(at, "trainer", what, math.ceil(size / len(at)), note, estimate=estimate)

        trained, half = model.trained(settings.train_layer_indices), width < 4
        parameters = count(trained)
        own = "a copy of its own" if not sharded else f"its rows of {len(names)} ranks'"
        if sharded and half and not self.traits.lora and _rows_are_masters(settings):
            kept = (model.parameters - parameters) * width + parameters * 4
            add("weights", kept, f"{own}, float32: they are the master weights")
            half = False  # no separate masters
        elif not self.traits.shares_memory:
            add("weights", model.parameters * width, own)
        if settings.ref_kl_coef and not self.traits.lora:
            add("frozen reference", model.parameters * width, "ref_kl_coef")
        if self.traits.lora:
            trained, half = adapter_shapes(model, settings), False
            # Every rank has a whole copy; `add` divides by the ranks.
            parameters = count(trained) * len(names)
            add("adapters", 4 * parameters, f"rank {settings.lora_r}, float32")
        all_train = parameters == model.parameters
        part = "" if all_train else f", {count(trained):,} parameters are trained"
        # Gradients are collected in float32 unless the weights are half precision and bfloat16 is
        # set.
        narrow = half and settings.gradient_dtype == "bfloat16"
        size = (2 if narrow else model_math.GRADIENT_BYTES) * parameters
        add("gradients", size, f"{'bfloat16' if narrow else 'float32'}{part}")
        away = settings.optimizer_offload and on_gpu
        optimizer = effective_optimizer(settings, on_gpu=on_gpu)
        # The optimizer step converts weights to float32 by parts, when no activations are left.
        masters = model_math.MASTER_BYTES[settings.master_weights] if half else 0
        # Adapter states are whole on every rank; `add` divides by the number of ranks.
        whole = len(names) if self.traits.lora else 1
        states = whole * model_math.optimizer_bytes(trained.values(), optimizer)
        if away:
            # Host tensors: the masters, and two optimizer states of equal width.
            widths = [masters] * bool(masters) + [model_math.STATE_BYTES[optimizer] // 2] * 2
            size = model_math.pinned_bytes(trained.values(), [width for width in widths if width])
            hosts = [*dict.fromkeys(map(host_of, names))]
            note = f"{settings.master_weights}, {optimizer}: optimizer_offload"
            add("masters, states", size, note, at=hosts)
        else:
            if masters:
                add("master weights", masters * parameters, MASTERS[settings.master_weights])
            add("optimizer state", states, optimizer)
        step = model_math.step_bytes(
            settings.master_weights,
            optimizer,
            half=half,
            narrow=narrow,
            offloaded=away,
            largest=largest_of(trained) // (len(names) if sharded else 1),
        )
        self._buffers(names, model, width, sharded=sharded)
        self._activations(names, model, trained, step)

    def _buffers(self, names: list[str], model: Model, width: int, *, sharded: bool) -> None:
        """Add the CUDA context, and the buffers in which weights travel."""
        if not is_host(names[0]):
            self.add(names, "trainer", "CUDA context", CONTEXT, estimate=True)
        if self.traits.shares_memory and (others := receivers(self.profile)):
            # A tensor larger than a chunk travels whole.
            size = SLOTS * max(CHUNK_BYTES, largest_of(model.shapes) * width)
            self.add(names, "trainer", "broadcast buffers", size, f"for {_names(others)}")
        if sharded:
            size, what = gathered_bytes(model, width, trains=not self.traits.lora)
            self.add(names, "trainer", "gathered layers", size, what, estimate=True)

    def _activations(self, names: list[str], model: Model, trained: Shapes, step: int) -> None:
        settings, on_gpu = self.settings, not is_host(names[0])
        dimensions = self._of_a_rank(model, len(names))
        wanted = self._kept(names, model, trained, dimensions)
        recomputes = settings.gradient_checkpointing == "on" or settings.activation_offload
        kept = wanted(dimensions.layers if recomputes else 0)
        note, logits = kept.formula, 0
        device = self.device(names[0])
        if settings.gradient_checkpointing == "auto" and on_gpu and device.total and not recomputes:
            # The same functions decide in the trainer, from the memory that is free then.
            room = model_math.room_for_activations(device.total - device.wanted, device.total)
            kept = wanted(model_math.layers_recomputed(wanted, dimensions.layers, room))
            note = kept.formula
            each = 4 if settings.head_dtype == "float32" else dtype_bytes(settings.dtype, model)
            all_logits = kept.tokens * dimensions.vocab * each
            # Logits [tokens, vocab] are kept for the backward pass only if all of them fit.
            if kept.recomputed:
                note += f" (gradient checkpointing of {kept.recomputed} layers: more would not fit)"
            elif kept.total + all_logits <= room:
                logits, note = all_logits, f"{note}; logits are kept, since they fit"
        # Activations are freed before the optimizer step, so the larger of both counts.
        if step > kept.total:
            note = "less than the optimizer step needs for one part of the parameters"
        size = max(kept.total + logits, step)
        self.add(names, "trainer", "activations", size, note, estimate=True)
        if kept.offloaded:
            note = "a hidden state for each layer"
            for host, ranks_there in Counter(map(host_of, names)).items():
                away = kept.offloaded * ranks_there
                self.add([host], "trainer", "activations", away, note, estimate=True)

    def _of_a_rank(self, model: Model, ranks: int) -> Dimensions:
        """Dimensions of one rank in tensor parallelism."""
        whole = model.dimensions
        if ranks == 1 or not self.traits.shares_memory:
            return whole
        return replace(
            whole,
            heads=whole.heads // ranks,
            kv_heads=max(1, whole.kv_heads // ranks),
            inner=whole.inner // ranks,
            vocab=math.ceil(whole.vocab / ranks),
        )

    def _kept(
        self, names: list[str], model: Model, trained: Shapes, dimensions: Dimensions
    ) -> Callable[[int], model_math.Activations]:
        """Number of checkpointed layers -> activations."""
        settings, ranks, on_gpu = self.settings, len(names), not is_host(names[0])
        largest = largest_of(trained) // ranks
        if ranks > 1 and not self.traits.shares_memory:
            largest = 0  # counted in "gathered layers"
        large = settings.compile == "on" or (
            settings.compile == "auto" and model.parameters >= model_math.LARGE_MODEL
        )
        layers = [int(layer[1]) for name in trained if (layer := LAYER.search(name))]
        # The backward pass runs down to the lowest trained layer, or to the embedding.
        all_layers, everything = dimensions.layers, len(trained) == len(model.shapes)
        reached = None if everything else all_layers - min(layers, default=all_layers)
        tokens = tokens_per_pass(settings, longest_sequence(self.profile), ranks)
        width, adapters = dtype_bytes(settings.dtype, model), Adapters.of(trained, all_layers)
        return lambda recomputed: model_math.activation_bytes(
            dimensions,
            tokens,
            width=width,
            on_gpu=on_gpu,
            layers=reached,
            largest=largest,
            compiled=large and on_gpu,
            recomputed=recomputed,
            offloaded=settings.activation_offload,
            adapters=adapters,
        )


def _rows_are_masters(settings: TrainingConfig) -> bool:
    # Any other setting needs half-precision rows with separate masters.
    plain = settings.master_weights == "fp32" and settings.gradient_dtype == "float32"
    return plain and not settings.optimizer_offload


def gathered_bytes(model: Model, width: int, *, trains: bool) -> tuple[int, str]:
    """Bytes and formula: two layers with embeddings and head; with gradients also one layer's, in
    its own type and in float32."""
    # Parameters of each layer; "" collects the embeddings, the final norm and the head.
    layers: Counter[str] = Counter()
    for name, shape in model.shapes.items():
        found = LAYER.search(name)
        layers[found[1] if found else ""] += math.prod(shape)
    beside = layers.pop("", 0)
    # Layers of a mixture of experts differ in size: the largest one counts.
    layer = max(layers.values(), default=0)
    size = width * (2 * layer + beside)
    if trains:
        size += width * (layer + beside) + 4 * max(layer, beside)
    gradients = ", and gradients of both" if trains else ""
    return size, f"two layers of {layer:,} parameters, {beside:,} beside the layers{gradients}"


def _names(engines: Sequence[EngineSection]) -> str:
    return ", ".join(engine.name for engine in engines)


def largest_of(shapes: Shapes) -> int:
    return max(map(math.prod, shapes.values()), default=0)


def graph_sizes(section: EngineSection, *, restarted: bool) -> int:
    """Number of CUDA graphs; fewer for an engine that restarts often."""
    if section.flag("enforce-eager"):
        return 0
    most = section.flag_number("max-cudagraph-capture-size", 512)
    sequences = section.flag_number("max-num-seqs", MOST_SEQUENCES)
    if restarted:
        return len(few_graph_sizes(sequences))
    most = min(most, 2 * sequences)
    # vLLM's sizes: 1, 2, 4, then steps of 8 up to 256, then steps of 16.
    return 3 + min(most, 256) // 8 + max(0, most - 256) // 16


def overflow(device: Device, profile: Profile, settings: TrainingConfig) -> str | None:
    if device.total is None or device.wanted <= device.total:
        return None
    return (
        f"{device.name}: {size_text(device.wanted)} are needed, but only "
        f"{size_text(device.total)} exist. Fixes: {'; '.join(ways_out(device, profile, settings))}"
    )


def cache_flag(section: EngineSection) -> str | None:
    """Flag that sets the KV cache size, in the profile's spelling."""
    given = section.flag_number("kv-cache-memory-bytes", 0) > 0
    return section.flag_key("kv-cache-memory-bytes") if given else None


def given_cache(device: Device, profile: Profile) -> str | None:
    """Key of the KV cache size, if that is the largest item of the device."""
    largest = max(device.items, key=lambda item: item.bytes or 0)
    for index, section in enumerate(profile.vllm):
        made = profile.servers[section.name]
        if largest.component not in made or largest.what != "KV cache":
            continue
        if key := cache_flag(section):
            return f"vllm.{index}.args.{key}"
        if is_host(device.name) and section.env.get("VLLM_CPU_KVCACHE_SPACE"):
            return f"vllm.{index}.env.VLLM_CPU_KVCACHE_SPACE"
    return None


def ways_out(device: Device, profile: Profile, settings: TrainingConfig) -> list[str]:
    """Fixes for this device, as profile keys; first for the largest item."""
    # The fix names the key of the first engine.
    share = profile.vllm[0].gpu_share
    cache = given_cache(device, profile)
    share_text = f"lower vllm.gpu_memory_utilization (now {share:g})"
    # With pack_tokens it limits a pass, whatever the batch size.
    row = "pack_tokens" if settings.pack_tokens else "batch_size"
    engines = {engine.name for engine in profile.engines}
    has_engine = any(item.component in engines for item in device.items)
    optimizer = effective_optimizer(settings, on_gpu=not is_host(device.name))
    ranks = len(profile.trainer.gpus)
    divisible = ranks > 1 and settings.seq_len >= LONG_ROW and not settings.shares_memory
    return [
        *([f"lower {profile.short_key(cache)}" if cache else share_text] if has_engine else []),
        f"lower trainer.{row} (now {getattr(settings, row)})",
        f"raise trainer.gradient_accumulation_steps as much (now "
        f"{settings.gradient_accumulation_steps})",
        f"lower trainer.seq_len (now {settings.seq_len})",
        *(["raise trainer.context_parallel, so that ranks share a row"] if divisible else []),
        f"name more than {ranks} under trainer.gpus"
        if ranks > 1
        else f'set trainer.optimizer = "adafactor" (now {optimizer})',
    ]


def size_text(count: int) -> str:
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"


def as_data(budget: Budget) -> dict[str, Any]:
    """For `plan --json`: bytes, JSON null if unknown; `by_component` counts unknown sizes as 0."""
    devices = [asdict(device) | {"wanted": device.wanted} for device in budget.devices]
    by_component: dict[str, dict[str, int]] = {}
    for device in budget.devices:
        for item in device.items:
            sizes = by_component.setdefault(item.component, {})
            sizes[device.name] = sizes.get(device.name, 0) + (item.bytes or 0)
    whole = {"notes": budget.notes, "warnings": budget.warnings}
    return whole | {"devices": devices, "by_component": by_component}


def as_lines(budget: Budget) -> list[str]:
    lines = [f"memory ({'; '.join(budget.notes)})"]
    for device in alike(budget.devices):
        missing = "(total unknown)" if is_host(device.name) else "(this machine has no such GPU)"
        if device.name[-1].isdigit() and not device.name.startswith("GPU"):
            missing = "(total unknown here: plan --gpus 8xH100 sets it for each machine)"
        known = f"of {size_text(device.total)}" if device.total is not None else missing
        more = " and more" if any(item.bytes is None for item in device.items) else ""
        model = f" ({device.model})" if device.model else ""
        lines.append(f"  {device.name}{model}: {size_text(device.wanted)}{more} {known}")
        for item in device.items:
            size = "unknown" if item.bytes is None else size_text(item.bytes)
            size = f"~{size}" if item.estimate and item.bytes is not None else size
            row = f"    {item.component:<10} {item.what:<16} {size:>12}  {item.note}"
            lines.append(row.rstrip())
    return [*lines, *(f"  WARNING {warning}" for warning in budget.warnings)]


def kv_bytes_per_token(section: EngineSection, model: Model, width: int) -> int:
    """Bytes of one token on one device."""
    dimensions = model.dimensions
    # Fewer heads than GPUs are replicated, so each GPU stores at least one.
    heads = max(1, dimensions.kv_heads // section.tensor_parallel)
    # Linear attention keeps a state of fixed size instead of keys and values.
    linear = (model.decoder.get("layer_types") or []).count("linear_attention")
    layers = math.ceil(
        (dimensions.layers - linear) / section.flag_number("pipeline-parallel-size", 1)
    )
    one = 1 if str(section.flag("kv-cache-dtype")).startswith("fp8") else width
    return 2 * layers * heads * dimensions.head_size * one  # 2: keys and values


def working_memory(section: EngineSection, model: Model, width: int, total: int | None) -> int:
    """Bytes of a full batch, float32 logits and CUDA. `total`: bytes of the GPU."""
    large = total is not None and total >= 70 * 1024**3  # vLLM's own threshold for its defaults
    tokens = section.flag_number("max-num-batched-tokens", 8192 if large else 2048)
    sequences = section.flag_number("max-num-seqs", 1024 if large else 256)
    dimensions = model.dimensions
    inner = math.ceil(3 * max(dimensions.inner, dimensions.chosen_inner) / section.tensor_parallel)
    return (
        tokens * width * (4 * dimensions.hidden + inner)
        + sequences * dimensions.vocab * 8
        + CONTEXT
    )


def tokens_per_pass(settings: TrainingConfig, longest: int | None, ranks: int = 1) -> int:
    sequence, context = (
        min(settings.seq_len, longest or settings.seq_len),
        settings.context_parallel,
    )
    # The ranks of one context-parallel group share a row, so each holds 1/context of its tokens.
    of_a_rank = math.ceil(settings.sequences_per_step * context / ranks) * sequence
    return math.ceil(min(max(settings.tokens_per_pass, sequence), of_a_rank) / context)


def effective_optimizer(settings: TrainingConfig, *, on_gpu: bool) -> str:
    chosen = "optimizer" in settings.model_fields_set
    return model_math.effective_optimizer(settings.optimizer, chosen=chosen, on_gpu=on_gpu)


def adapter_shapes(model: Model, settings: TrainingConfig) -> Shapes:
    """The two float32 matrices of each adapted linear layer."""
    wanted = set(settings.lora_target_modules or ["q_proj", "v_proj"])
    everywhere = wanted == {"all-linear"}
    shapes: Shapes = {}
    for name, shape in model.trained(settings.lora_layer_indices).items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        if len(shape) == 2 and (module in wanted or (everywhere and LAYER.search(name))):
            shapes[f"{name}.lora_A"] = (settings.lora_r, shape[1])
            shapes[f"{name}.lora_B"] = (shape[0], settings.lora_r)
    return shapes


def slot_elements(model: Model, section: EngineSection, settings: TrainingConfig) -> int:
    rank = section.flag_number("max-lora-rank", server_rank(settings.lora_r) or settings.lora_r)
    linear = [
        shape for name, shape in model.shapes.items() if len(shape) in (2, 3) and LAYER.search(name)
    ]
    # All experts of a layer are one tensor [experts, rows, columns].
    one = sum(rank * math.prod(shape[:-2]) * (shape[-2] + shape[-1]) for shape in linear)
    return section.flag_number("max-loras", LORA_SLOTS) * one


def dtype_bytes(dtype: str, model: Model) -> int:
    return _BYTES.get(model.dtype if dtype == "auto" else dtype, 2)


def count(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
