"""LoRA adapters on a transformers model: injected in place, saved in peft's format, which vLLM
loads.

Without peft's wrapper class the model keeps its interface for packed attention and the chunked
head. Dropout is off: the ratio would compare two different masks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from atropos_common.protocol.bridge import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS
from trainer_core.config import TrainingConfig
from trainer_core.errors import UsageError
from trainer_core.policy.load import load_model

TARGETS = ("q_proj", "v_proj")
ALL_LINEAR = "all-linear"
"""Stands for every linear layer except the head."""
_ADAPTER = "default"
"""peft's name of the adapter in the model; saved names leave it out."""


def add_adapter(model: nn.Module, config: TrainingConfig) -> int:
    """Freeze `model` and add trainable float32 adapters that start without effect (B is 0); return
    the number of their parameters.

    Raises:
        UsageError: the model lacks a target module or a layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = _targets(model, list(config.lora_target_modules or TARGETS))
    count = model.config.num_hidden_layers
    if wrong := [i for i in config.lora_layer_indices or [] if i >= count]:
        raise UsageError(f"--lora-layer-indices {wrong}: the model has layers 0-{count - 1}")
    if config.lora_dropout and "lora_dropout" in config.model_fields_set:
        print(
            f"--lora-dropout {config.lora_dropout} is ignored: policy ratios between two "
            f"dropout masks are noise"
        )
    # Freeze first: peft adds parameters that require a gradient.
    model.requires_grad_(False)
    settings = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=targets,
        layers_to_transform=config.lora_layer_indices,
        task_type="CAUSAL_LM",
        use_rslora=config.lora_use_rslora,
        base_model_name_or_path=config.model_name,
    )
    inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
    model.peft_config = {_ADAPTER: settings}  # type: ignore[assignment]
    for parameter in model.parameters():
        # peft creates adapters in the base's dtype; small updates would be lost in half precision.
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.eval()
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _targets(model: nn.Module, wanted: list[str]) -> list[str]:
    """Target module names in the model. The head is excluded: its product is computed in chunks
    from its weight."""
    head = model.get_output_embeddings()
    linear = (
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    )
    names = {name.rpartition(".")[2] for name in linear}
    if not names:
        raise UsageError(
            f"adapters need linear layers, and {type(model).__name__} has none (GPT-2's are "
            f"convolutions): train all "
            "weights with --weight-bridge-mode broadcast, shared_vllm or none"
        )
    if wanted == [ALL_LINEAR]:
        return sorted(names)
    if missing := sorted(set(wanted) - names):
        raise UsageError(
            f"--lora-target-modules {' '.join(missing)}: choose from "
            f"{' '.join(sorted(names))}; or {ALL_LINEAR} for all"
        )
    return wanted


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the model's adapters in all threads while the block runs."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextmanager
def adapter_values(model: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give the model the adapter `values` in all threads while the block runs."""
    mine = {name: parameter.detach() for name, parameter in adapter_parameters(model).items()}
    kept = {name: parameter.clone() for name, parameter in mine.items()}
    try:
        for name, parameter in mine.items():
            parameter.copy_(values[name])
        yield
    finally:
        for name, parameter in mine.items():
            parameter.copy_(kept[name])


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by the names under which peft saves them."""
    return {
        ADAPTER_PREFIX + name.replace(f".{_ADAPTER}.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The frozen parameters by their names in the model without adapters."""
    return {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


def merged_model(model: nn.Module, config: TrainingConfig, folder: Path) -> nn.Module:
    """Load the base of `model` from disk on the CPU and let peft merge the adapter in `folder` into
    it. Exact in float32; otherwise each weight is rounded once, to the base's dtype."""
    from peft import PeftModel

    dtype = next(iter(base_parameters(model).values())).dtype
    if dtype != torch.float32:
        print(
            f"Merging the adapter in {dtype} rounds each weight once, so logprobs differ "
            f"slightly from training"
        )
    base = load_model(config.model_name, dtype, torch.device("cpu"))
    merged: nn.Module = PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    return merged


def write_adapter(
    model: nn.Module,
    folder: Path,
    dtype: torch.dtype | None = None,
    values: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the two files of an adapter into `folder`, in `dtype`; default: as kept, in float32.

    Args:
        values: of an adapter with the model's shapes; default: the model's own.
    """
    from safetensors.torch import save_file

    tensors = {
        name: value.detach().to(dtype or value.dtype).to("cpu").contiguous()
        for name, value in (values or adapter_parameters(model)).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    model.peft_config[_ADAPTER].save_pretrained(str(folder))  # type: ignore[index,operator]


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path) -> None:
    """Overwrite the adapter's parameters with those in `folder`; raises as `read_adapter` does."""
    values = read_adapter(model, folder)
    for name, parameter in adapter_parameters(model).items():
        parameter.copy_(values[name])


def read_adapter(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Read an adapter with the model's shapes from `folder`, by the names of `adapter_parameters`.

    Raises:
        UsageError: the adapter has other modules, shapes or scale.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text())
        saved = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"{folder} has no readable adapter ({error})") from None
    mine = adapter_parameters(model)
    if odd := sorted(mine.keys() ^ saved.keys()):
        raise UsageError(
            f"{folder} has an adapter for other modules "
            f"({odd[0].removeprefix(ADAPTER_PREFIX)}): use its "
            f"--lora-target-modules {' '.join(sorted(settings.get('target_modules', [])))} "
            f"and --lora-layer-indices"
        )
    for name, parameter in mine.items():
        if saved[name].shape != parameter.shape:
            raise UsageError(
                f"{folder} has an adapter of another shape: {name.removeprefix(ADAPTER_PREFIX)} "
                f"{list(saved[name].shape)} there, {list(parameter.shape)} here (its "
                f"--lora-r is {settings.get('r')})"
            )
    # Scale and rsLoRA change the effect of the same values.
    ours = model.peft_config[_ADAPTER]  # type: ignore[index]
    if settings.get("lora_alpha") != ours.lora_alpha:
        raise UsageError(
            f"{folder} was trained with --lora-alpha {settings.get('lora_alpha')}, not "
            f"{ours.lora_alpha}"
        )
    if settings.get("use_rslora", False) != ours.use_rslora:
        raise UsageError(
            f"{folder} was trained with --lora-use-rslora {str(not ours.use_rslora).lower()}"
        )
    return dict(saved)
