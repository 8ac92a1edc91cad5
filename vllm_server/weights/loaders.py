"""Load formats for vLLM that keep weights writable, and the export of weights to a trainer (single
copy).

`atropos_folder` is vLLM's default loader with the weights from the folder in
`ATROPOS_START_WEIGHTS`, if that is set: a restarted server begins with the trainer's weights.
`atropos_plain` does the same on a CPU, where layers then compute from the parameters themselves.
vLLM otherwise repacks linear weights into a private copy and drops the original, so later writes
would have no effect.

In single copy vLLM serves the same weights that the trainer steps. On the CPU
`atropos_shared_memory` moves every parameter into one file under /dev/shm; on a GPU the worker
exports CUDA IPC handles. Both fill the same manifest, which lists parameters under vLLM's own
names, a tied one once.

Runs in vLLM's worker process.
"""

from __future__ import annotations

import base64
import copy
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from atropos_common.protocol.manifest import CudaIpc, Shard, TensorEntry, TensorView
from atropos_common.protocol.strided import extent
from vllm_server.config import ENV_SHM_PATH, ENV_START_WEIGHTS
from vllm_server.weights.copy_recorder import CopyRecorder, Named

logger = logging.getLogger(__name__)

FOLDER_FORMAT = "atropos_folder"
PLAIN_FORMAT = "atropos_plain"
SHARED_FORMAT = "atropos_shared_memory"
ALIGNMENT = 64
"""Alignment in bytes: a cache line, and a multiple of every dtype's size."""
SAMPLED = 256
"""Number of values of a parameter that show a changed layout: hardly one of them would stay in
place."""

_mapping: torch.UntypedStorage | None = None
"""Mapped file of this process, for `describe_shared_file`."""


ANOTHER_MODE = (
    "Single copy needs that; use another weight bridge mode (broadcast, lora_only, lora_restart "
    "or none)"
)


class SharedWeightsError(RuntimeError):
    """The weights cannot be shared with a trainer in their present form."""


@cache
def register_loaders() -> None:
    """Register our load formats with vLLM in this process; a second call has no effect."""
    register_model_loader(FOLDER_FORMAT)(FolderLoader)
    register_model_loader(PLAIN_FORMAT)(PlainLoader)
    register_model_loader(SHARED_FORMAT)(SharedMemoryLoader)


@dataclass(frozen=True)
class LoadTrace:
    """Observations of a worker while it loaded its model."""

    views: dict[str, TensorView]
    """Places of the checkpoint's tensors, by their own names."""
    without_view: dict[str, str]
    """Tensors without a place, with the reason as the end of a sentence."""
    laid_anew: list[str]
    """Parameters that vLLM gave another layout after its loader had filled them."""


_trace: LoadTrace | None = None
"""Trace of this process's model, draft models excluded; None after another loader or a quantized
model's own."""


def why_not_in_place() -> str | None:
    """Reason against writing new weights over those of this worker's model; None if there is
    none."""
    if _trace is None:
        return (
            "how its weights were loaded was not recorded: leave out --load-format and "
            "--quantization"
        )
    if anew := _trace.laid_anew:
        return (
            f"after loading vLLM lays out {len(anew)} parameters anew for its kernels, such "
            f"as {anew[0]}; for a "
            "mixture of experts on a GPU --moe-backend triton leaves them as they are"
        )
    return None


class FolderLoader(DefaultModelLoader):
    """vLLM's default loader for the weights of another folder; records its copies."""

    def __init__(self, load_config: Any) -> None:
        load_config = copy.copy(load_config)
        load_config.load_format = "auto"
        super().__init__(load_config)
        self._recorder: CopyRecorder | None = None
        self._samples: dict[str, torch.Tensor] = {}

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Load and process the model, then check which parameters changed their layout."""
        global _trace
        model = super().load_model(*args, **kwargs)
        self.keep_plain()
        if (recorder := self._recorder) is not None:
            now = dict(model.named_parameters())
            anew = [
                name
                for name, was in self._samples.items()
                if name not in now or not _same(was, now[name])
            ]
            _trace = LoadTrace(*recorder.views(), anew)
            self._recorder, self._samples = None, {}
        return model

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load the weights, and report tensors that the model has no place for.

        Raises:
            ValueError: such tensors are in a trainer's weights, so the engine would not serve what
                is trained.
        """
        is_draft = model_config.runner_type == "draft"  # a speculative model is not trained
        if folder := "" if is_draft else os.environ.get(ENV_START_WEIGHTS):
            model_config = copy.copy(model_config)
            model_config.model = folder
            model_config.revision = None
        if model_config.quantization is not None or is_draft:
            super().load_weights(model, model_config)  # quantized models load in their own way
            return
        self._recorder = CopyRecorder(model)
        with self._recorder:
            super().load_weights(model, model_config)
        self._samples = {name: _sample(parameter) for name, parameter in model.named_parameters()}
        reason = self._recorder.without_place()
        if reason and folder:
            raise ValueError(reason)
        if reason:
            logger.warning("%s", reason)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[Named]:
        weights = super().get_all_weights(model_config, model)
        return self._recorder.one_by_one(weights) if self._recorder else weights

    def keep_plain(self) -> None:
        """Undo vLLM's repacking after the load; a no-op here."""


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """Some values of a parameter, at the same places every time."""
    drawn = torch.Generator("cpu").manual_seed(
        0
    )  # vLLM may have named another device as the default one
    places = [
        torch.randint(max(size, 1), (SAMPLED,), generator=drawn, device="cpu")
        for size in parameter.shape
    ]
    values = parameter.detach()
    if parameter.numel() and places:
        values = values[tuple(each.to(parameter.device) for each in places)]
    return values.clone()


def _same(sample: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Compare bit for bit: unfilled memory may be NaN."""
    now = _sample(parameter)
    alike = (sample.dtype, sample.shape) == (now.dtype, now.shape)
    return alike and torch.equal(
        sample.reshape(-1).view(torch.uint8), now.reshape(-1).view(torch.uint8)
    )


class PlainLoader(FolderLoader):
    """Loader after which no CPU layer holds a repacked copy of its weight."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._plain: PlainLayers | None = None

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        super().load_weights(model, model_config)
        if model_config.quantization is None:  # quantized layers need vLLM's processed weights
            self._plain = PlainLayers(model)

    def keep_plain(self) -> None:
        if self._plain is not None:
            self._plain.restore()
        self._plain = None


class SharedMemoryLoader(PlainLoader):
    """Plain loader that moves every parameter into this rank's file (`shared_file`)."""

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        model = super().load_model(*args, **kwargs)
        move_parameters(model, shared_file())
        return model


def shared_file() -> Path:
    """File of this worker's parameters on a CPU: `ATROPOS_SHM_PATH`, with a number appended on
    ranks other than 0."""
    from vllm.distributed import get_tensor_model_parallel_rank

    rank = get_tensor_model_parallel_rank()
    return Path(os.environ[ENV_SHM_PATH] + (f".{rank}" if rank else ""))


def move_parameters(model: torch.nn.Module, path: Path) -> None:
    """Copy every parameter into a new file `path` (mode 0600) and make the model use the copy.

    Raises:
        SharedWeightsError: no space, another user's file at `path`, or a parameter that is not
            dense.
    """
    global _mapping
    parameters = dict(model.named_parameters())
    offsets, total = _layout(parameters)
    _create(path, total)
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=total)
    with torch.no_grad():
        for name, parameter in parameters.items():
            view = torch.empty(0, dtype=parameter.dtype)
            view.set_(
                storage,
                offsets[name] // parameter.element_size(),
                parameter.size(),
                parameter.stride(),
            )
            view.copy_(parameter.data)
            parameter.data = view
    _mapping = storage
    logger.info("Moved %d params, %.1f MB, into %s", len(parameters), total / 1e6, path)


def _layout(parameters: dict[str, torch.nn.Parameter]) -> tuple[dict[str, int], int]:
    """Byte offset of each parameter, and the total size in bytes."""
    offsets, end = {}, 0
    for name, parameter in parameters.items():
        spans = extent(parameter.size(), parameter.stride())
        if parameter.device.type != "cpu" or parameter.numel() == 0 or spans != parameter.numel():
            raise SharedWeightsError(
                f"{name} ({parameter.device}, shape {tuple(parameter.shape)}, stride "
                f"{parameter.stride()}) is not a "
                "plain dense CPU tensor; this model cannot run in single copy, use another "
                "weight bridge mode"
            )
        offsets[name] = end
        end += -(-parameter.numel() * parameter.element_size() // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _create(path: Path, size: int) -> None:
    """Create `path` with `size` reserved bytes; replaces a file of an earlier server of this
    user."""
    if path.is_symlink() or (path.exists() and path.stat().st_uid != os.getuid()):
        raise SharedWeightsError(
            f"{path} is in the way and not ours; set ATROPOS_SHM_NAME to another name"
        )
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        # Reserving now turns a full /dev/shm into an error here rather than a SIGBUS at the first
        # write.
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise SharedWeightsError(
            f"{path}: cannot reserve {size / 1e6:.0f} MB ({error.strerror}); enlarge "
            f"/dev/shm or use a smaller model"
        ) from error
    finally:
        os.close(descriptor)


def describe_shared_file(model: torch.nn.Module) -> Shard:
    """The shard of a model whose parameters `move_parameters` moved.

    Raises:
        SharedWeightsError: something rebound a parameter since.
    """
    assert _mapping is not None, "the shared memory loader has not run in this process"
    entries = {}
    for name, parameter in _parameters(model):
        if parameter.untyped_storage().data_ptr() != _mapping.data_ptr():
            raise SharedWeightsError(
                f"{name} left the shared file after loading; this model cannot run in single copy"
            )
        entries[name] = _entry(parameter)
    return Shard(
        kind="shm",
        shm_path=str(shared_file()),
        shm_bytes=_mapping.nbytes(),
        param_mappings=entries,
        aliases=_aliases(model),
        views=_views(),
    )


def describe_cuda(model: torch.nn.Module) -> Shard:
    """The shard of a model on a GPU: one CUDA IPC handle for each parameter, as plain fields.

    Call it once: each call pins the storages again for a receiver.
    """
    entries = {}
    gpu = str(torch.cuda.get_device_properties(next(model.parameters()).device).uuid)
    for name, parameter in _parameters(model):
        if not parameter.is_cuda:
            raise SharedWeightsError(
                f"{name} lies on {parameter.device}; single copy needs every parameter on the GPU"
            )
        entry = _entry(parameter)
        entry.ipc_handle = _cuda_handle(parameter.untyped_storage())
        entries[name] = entry
    return Shard(
        kind="cuda_ipc", gpu=gpu, param_mappings=entries, aliases=_aliases(model), views=_views()
    )


def _views() -> dict[str, TensorView]:
    """Places of all tensors of the checkpoint.

    Raises:
        SharedWeightsError: some tensors have no place, or have lost it.
    """
    if reason := why_not_in_place():
        raise SharedWeightsError(
            f"{reason}. Or use another weight bridge mode (lora_only, lora_restart or none)"
        )
    assert _trace is not None, "or there would be a reason"
    if without := _trace.without_view:
        named = "; ".join(f"{name} {why}" for name, why in list(without.items())[:3])
        raise SharedWeightsError(
            f"{len(without)} tensors of the checkpoint do not lie in vLLM's parameters as "
            f"they are: {named}. "
            f"{ANOTHER_MODE}"
        )
    return _trace.views


def _cuda_handle(storage: torch.UntypedStorage) -> CudaIpc:
    try:
        device, handle, size, offset, counter, counter_offset, event, event_sync = (
            storage._share_cuda_()
        )
    except RuntimeError as error:
        raise SharedWeightsError(
            f"CUDA IPC refused a parameter ({error}); unset PYTORCH_CUDA_ALLOC_CONF and do "
            f"not use --enable-sleep-mode"
        ) from error
    return CudaIpc(
        device=device,
        handle=base64.b64encode(handle).decode(),
        storage_bytes=size,
        storage_offset_bytes=offset,
        ref_counter_handle=base64.b64encode(counter).decode(),
        ref_counter_offset=counter_offset,
        event_handle=base64.b64encode(event).decode(),
        event_sync_required=event_sync,
    )


def _entry(parameter: torch.nn.Parameter) -> TensorEntry:
    return TensorEntry(
        shape=list(parameter.shape),
        stride=list(parameter.stride()),
        dtype=str(parameter.dtype).removeprefix("torch."),
        offset=parameter.storage_offset(),
    )


def _aliases(model: torch.nn.Module) -> dict[str, str]:
    """Further names of listed parameters, such as a tied `lm_head.weight`."""
    first = {parameter: name for name, parameter in _parameters(model)}
    return {
        name: first[parameter]
        for name, parameter in _parameters(model, remove_duplicate=False)
        if first[parameter] != name
    }


def _parameters(model: torch.nn.Module, **options: bool) -> Iterator[Named]:
    """`named_parameters` with the names of a model without adapters: LoRA wraps each layer, which
    is then called `base_layer`."""
    return (
        (name.replace(".base_layer.", "."), param)
        for name, param in model.named_parameters(**options)
    )


EXPERTS = ("w13_weight", "w2_weight")
"""Parameters of vLLM's mixtures of experts, shapes [experts, 2 * width, hidden] and [experts,
hidden, width]."""

Activation = Callable[[torch.Tensor], torch.Tensor]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"),
}


class PlainLayers:
    """Keeps the weights of a model just loaded, and restores them after vLLM has processed the
    layers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
        for module in model.modules():
            weight = module._parameters.get("weight")
            # The kernel of a causal convolution only accepts the packed weight, [channels, 1,
            # width].
            if weight is not None and weight.ndim < 3:
                self._weights.append((module, "weight", weight))
                # vLLM's own switch (0.28 and later) for layers whose weight is read elsewhere: no
                # repacking.
                module._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]
            if (
                all(name in module._parameters for name in EXPERTS)
                and "w13_bias" not in module._parameters
            ):
                self._weights += [(module, name, module.get_parameter(name)) for name in EXPERTS]

    def restore(self) -> None:
        """Make every layer compute from the kept weights."""
        for module, name, weight in self._weights:
            if name in EXPERTS and not _computes_plainly(module):
                continue
            if module._parameters.get(name) is not weight:
                setattr(module, name, weight)
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = linear
        self._weights.clear()


def _computes_plainly(experts: Any) -> bool:
    """Make these experts compute from their parameters; return False, without a change, for an
    unknown kind."""
    kernel: Any = getattr(getattr(experts, "quant_method", None), "moe_kernel", None)
    activation = _ACTIVATIONS.get(getattr(getattr(experts, "activation", None), "value", ""))
    if not hasattr(kernel, "fused_experts") or activation is None:
        return False

    def apply(
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *_: Any,
        apply_router_weight_on_input: bool,
        **__: Any,
    ) -> None:
        output.zero_()
        for expert in topk_ids.unique().tolist():
            rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
            answer = linear(activation(gate) * up, w2[expert])
            if (
                not apply_router_weight_on_input
            ):  # the weight is already applied to the hidden states
                answer = answer * topk_weights[rows, slots, None].to(answer.dtype)
            output.index_add_(0, rows, answer)

    kernel.fused_experts.apply = apply
    return True
