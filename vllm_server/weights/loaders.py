"""Load formats for vLLM that keep weights writable, and their export to a trainer (single copy).

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

from atropos_common.protocol.manifest import CudaIpc, Shard, TensorEntry, TensorView, extent
from vllm_server.config import ENV_SHM_PATH, ENV_START_WEIGHTS
from vllm_server.weights.copy_recorder import CopyRecorder, Named

logger = logging.getLogger(__name__)

# vLLM's default loader, for the folder in `ATROPOS_START_WEIGHTS` if that is set: a restarted
# server begins with the trainer's weights.
FOLDER_FORMAT = "atropos_folder"
# The same on a CPU. vLLM otherwise repacks linear weights into a private copy and drops the
# original, so later writes would have no effect.
PLAIN_FORMAT = "atropos_plain"
# Single copy on a CPU: also moves every parameter into one file below /dev/shm.
SHARED_FORMAT = "atropos_shared_memory"
ALIGNMENT = 64  # bytes: a cache line, and a multiple of every dtype's size
# Values of a parameter that show a changed layout: hardly one of them would stay in place.
SAMPLED = 256

# The mapped file of this process, for `describe_shared_file`.
_mapping: torch.UntypedStorage | None = None
ANOTHER_MODE = (
    "Single copy needs that; use another weight bridge mode (broadcast, lora_only, "
    "lora_restart or none)"
)


class SharedWeightsError(RuntimeError):
    pass


@cache
def register_loaders() -> None:
    register_model_loader(FOLDER_FORMAT)(FolderLoader)
    register_model_loader(PLAIN_FORMAT)(PlainLoader)
    register_model_loader(SHARED_FORMAT)(SharedMemoryLoader)


@dataclass(frozen=True)
class LoadTrace:
    """Observations of a worker while it loaded its model."""

    views: dict[str, TensorView]
    """Places of the checkpoint's tensors."""
    without_view: dict[str, str]
    """Tensors without a place, with the reason as a sentence's end."""
    laid_anew: list[str]
    """Parameters with another layout after the load."""


# Of this process's model, draft models excluded; None after another loader, or a quantized model's
# own.
_trace: LoadTrace | None = None


def why_not_in_place() -> str | None:
    """Return the reason against writing over this worker's weights."""
    if _trace is None:
        fix = "leave out --load-format and --quantization"
        return f"how its weights were loaded was not recorded: {fix}"
    if anew := _trace.laid_anew:
        return (
            f"after loading vLLM changes the layout of {len(anew)} parameters for its "
            f"kernels, such as "
            f"{anew[0]}; for a mixture of experts on a GPU --moe-backend triton leaves them as "
            "they are"
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
        global _trace
        model = super().load_model(*args, **kwargs)
        self.keep_plain()
        if (recorder := self._recorder) is not None:
            now, then = dict(model.named_parameters()), self._samples
            anew = [name for name in then if name not in now or not _same(then[name], now[name])]
            _trace = LoadTrace(*recorder.views(), anew)
            self._recorder, self._samples = None, {}
        return model

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load the weights, and report tensors without a place.

        Raises:
            ValueError: they are in a trainer's weights.
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
        # In a trainer's weights every tensor is trained, so the engine has to serve each of them.
        if reason and folder:
            raise ValueError(reason)
        if reason:
            logger.warning("%s", reason)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[Named]:
        weights = super().get_all_weights(model_config, model)
        return self._recorder.one_by_one(weights) if self._recorder else weights

    def keep_plain(self) -> None:
        """Undo vLLM's repacking after the load; a no-op here."""


# At the same places every time.
def _sample(parameter: torch.Tensor) -> torch.Tensor:
    # On the CPU by name: vLLM may have made another device the default one.
    cpu: dict[str, Any] = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}
    places = [torch.randint(max(size, 1), (SAMPLED,), **cpu) for size in parameter.shape]
    values = parameter.detach()
    if parameter.numel() and places:
        values = values[tuple(each.to(parameter.device) for each in places)]
    return values.clone()


def _same(sample: torch.Tensor, parameter: torch.Tensor) -> bool:
    now = _sample(parameter)
    if (sample.dtype, sample.shape) != (now.dtype, now.shape):
        return False
    # Bit for bit: unfilled memory may be NaN.
    was_bits, now_bits = (each.reshape(-1).view(torch.uint8) for each in (sample, now))
    return torch.equal(was_bits, now_bits)


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
    """Plain loader that moves every parameter into this rank's file."""

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        model = super().load_model(*args, **kwargs)
        move_parameters(model, shared_file())
        return model


def shared_file() -> Path:
    """Return this worker's file of parameters on a CPU."""
    from vllm.distributed import get_tensor_model_parallel_rank

    rank = get_tensor_model_parallel_rank()
    return Path(os.environ[ENV_SHM_PATH] + (f".{rank}" if rank else ""))


def move_parameters(model: torch.nn.Module, path: Path) -> None:
    """Copy every parameter into a new file and make the model use the copy.

    Raises:
        SharedWeightsError: no space, another user's file, or a parameter that is not dense.
    """
    global _mapping
    parameters = dict(model.named_parameters())
    offsets, total = _layout(parameters)
    _create(path, total)
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=total)
    with torch.no_grad():
        for name, parameter in parameters.items():
            view = torch.empty(0, dtype=parameter.dtype)
            start = offsets[name] // parameter.element_size()
            view.set_(storage, start, parameter.size(), parameter.stride())
            view.copy_(parameter.data)
            parameter.data = view
    _mapping = storage
    logger.info("Moved %d params, %.1f MB, into %s", len(parameters), total / 1e6, path)


def _layout(parameters: dict[str, torch.nn.Parameter]) -> tuple[dict[str, int], int]:
    offsets, end = {}, 0
    for name, parameter in parameters.items():
        spans = extent(parameter.size(), parameter.stride())
        if parameter.device.type != "cpu" or parameter.numel() == 0 or spans != parameter.numel():
            shape, stride = tuple(parameter.shape), parameter.stride()
            raise SharedWeightsError(
                f"{name} ({parameter.device}, shape {shape}, stride {stride}) is not a plain dense "
                "CPU tensor; this model cannot run in single copy, use another weight bridge mode"
            )
        offsets[name] = end
        end += -(-parameter.numel() * parameter.element_size() // ALIGNMENT) * ALIGNMENT
    return offsets, end


# Replaces a file of an earlier server.
def _create(path: Path, size: int) -> None:
    if path.is_symlink() or (path.exists() and path.stat().st_uid != os.getuid()):
        fix = "set ATROPOS_SHM_NAME to another name"
        raise SharedWeightsError(f"{path} exists and belongs to another user, or is a link; {fix}")
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        # Otherwise a full /dev/shm would be a SIGBUS at the first write.
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        fault = f"{path}: cannot reserve {size / 1e6:.0f} MB ({error.strerror})"
        raise SharedWeightsError(f"{fault}; enlarge /dev/shm or use a smaller model") from error
    finally:
        os.close(descriptor)


def describe_shared_file(model: torch.nn.Module) -> Shard:
    """Return the shard of a model whose parameters `move_parameters` moved.

    Raises:
        SharedWeightsError: something rebound a parameter since.
    """
    assert _mapping is not None, "the shared memory loader has not run in this process"
    entries = {}
    for name, parameter in _parameters(model):
        if parameter.untyped_storage().data_ptr() != _mapping.data_ptr():
            fault = f"{name} is outside the shared file after loading"
            raise SharedWeightsError(f"{fault}; this model cannot run in single copy")
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
    """Return the shard of a model on a GPU; call it once, for each call pins the storages."""
    entries = {}
    gpu = str(torch.cuda.get_device_properties(next(model.parameters()).device).uuid)
    for name, parameter in _parameters(model):
        if not parameter.is_cuda:
            needed = "single copy needs every parameter on the GPU"
            raise SharedWeightsError(f"{name} lies on {parameter.device}; {needed}")
        entry = _entry(parameter)
        entry.ipc_handle = _cuda_handle(parameter.untyped_storage())
        entries[name] = entry
    return Shard(
        kind="cuda_ipc", gpu=gpu, param_mappings=entries, aliases=_aliases(model), views=_views()
    )


def _views() -> dict[str, TensorView]:
    if reason := why_not_in_place():
        fix = "Or use another weight bridge mode (lora_only, lora_restart or none)"
        raise SharedWeightsError(f"{reason}. {fix}")
    assert _trace is not None, "or there would be a reason"
    if without := _trace.without_view:
        named = "; ".join(f"{name} {why}" for name, why in list(without.items())[:3])
        fault = f"{len(without)} tensors of the checkpoint do not lie in vLLM's parameters"
        raise SharedWeightsError(f"{fault} as they are: {named}. {ANOTHER_MODE}")
    return _trace.views


def _cuda_handle(storage: torch.UntypedStorage) -> CudaIpc:
    try:
        shared = storage._share_cuda_()
    except RuntimeError as error:
        fix = "unset PYTORCH_CUDA_ALLOC_CONF and do not use --enable-sleep-mode"
        raise SharedWeightsError(f"CUDA IPC refused a parameter ({error}); {fix}") from error
    device, handle, size, offset, counter, counter_offset, event, event_sync = shared
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


# Further names, such as a tied `lm_head.weight`.
def _aliases(model: torch.nn.Module) -> dict[str, str]:
    first = {parameter: name for name, parameter in _parameters(model)}
    return {
        name: first[parameter]
        for name, parameter in _parameters(model, remove_duplicate=False)
        if first[parameter] != name
    }


def _parameters(model: torch.nn.Module, **options: bool) -> Iterator[Named]:
    # LoRA wraps each layer, which is then called `base_layer`.
    for name, parameter in model.named_parameters(**options):
        yield name.replace(".base_layer.", "."), parameter


# Parameters of vLLM's mixtures of experts: [experts, 2 * width, hidden], [experts, hidden, width].
EXPERTS = ("w13_weight", "w2_weight")

Activation = Callable[[torch.Tensor], torch.Tensor]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"),
}


class PlainLayers:
    """Restores the weights of a model just loaded after vLLM's processing."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
        for module in model.modules():
            weight = module._parameters.get("weight")
            # The kernel of a causal convolution only accepts the packed weight, [channels, 1,
            # width].
            if weight is not None and weight.ndim < 3:
                self._weights.append((module, "weight", weight))
                # vLLM's own switch against repacking.
                module._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]
            own = module._parameters
            if all(name in own for name in EXPERTS) and "w13_bias" not in own:
                self._weights += [(module, name, module.get_parameter(name)) for name in EXPERTS]

    def restore(self) -> None:
        for module, name, weight in self._weights:
            if name in EXPERTS and not _computes_plainly(module):
                continue
            if module._parameters.get(name) is not weight:
                setattr(module, name, weight)
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = linear
        self._weights.clear()


# False, without a change, for an unknown kind.
def _computes_plainly(experts: Any) -> bool:
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
        # [tokens, hidden]: the sum of each token's experts, weighed by the router.
        output.zero_()
        for expert in topk_ids.unique().tolist():
            rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
            answer = linear(activation(gate) * up, w2[expert])
            # Else the weight is already in the hidden states.
            if not apply_router_weight_on_input:
                answer = answer * topk_weights[rows, slots, None].to(answer.dtype)
            output.index_add_(0, rows, answer)

    kernel.fused_experts.apply = apply
    return True
