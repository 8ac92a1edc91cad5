"""LoRA adapters, injected in place and saved in peft's format, which vLLM loads."""

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
"""Every linear layer except the head."""
_ADAPTER = "default"
"""peft's name of the adapter; saved names omit it."""


def add_adapter(model: nn.Module, config: TrainingConfig) -> int:
    """Freeze `model` and add trainable float32 adapters without effect; return their size."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = _targets(model, list(config.lora_target_modules or TARGETS))
    count = model.config.num_hidden_layers
    if wrong := [i for i in config.lora_layer_indices or [] if i >= count]:
        raise UsageError(f"--lora-layer-indices {wrong}: the model has layers 0-{count - 1}")
    if config.lora_dropout and "lora_dropout" in config.model_fields_set:
        print(
            f"--lora-dropout {config.lora_dropout} is ignored: two dropout masks make ratios noise"
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
    # Without peft's wrapper class the model keeps its interface for packed attention.
    inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
    model.peft_config = {_ADAPTER: settings}  # type: ignore[assignment]
    for parameter in model.parameters():
        # peft creates adapters in the base's dtype; small updates would be lost in half precision.
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.eval()
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _targets(model: nn.Module, wanted: list[str]) -> list[str]:
    # Without the head: its product is computed in chunks from its weight.
    head = model.get_output_embeddings()
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if not names:
        raise UsageError(
            f"adapters need linear layers, and {type(model).__name__} has none (GPT-2's are "
            f"convolutions): train all weights with --weight-bridge-mode broadcast, shared_vllm "
            f"or none"
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
    """Disable the adapters in all threads meanwhile."""
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
    """Give the adapters other values in all threads meanwhile."""
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
    """Trained parameters by the names under which peft saves them."""
    return {
        ADAPTER_PREFIX + name.replace(f".{_ADAPTER}.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Frozen parameters by their names without adapters."""
    return {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


def merged_model(model: nn.Module, config: TrainingConfig, folder: Path) -> nn.Module:
    """Load the base on the CPU and merge the adapter in `folder` into it."""
    from peft import PeftModel

    dtype = next(iter(base_parameters(model).values())).dtype
    if dtype != torch.float32:
        print(f"Merging in {dtype} rounds each weight once, so logprobs differ slightly")
    base = load_model(config.model_name, dtype, torch.device("cpu"))
    merged: nn.Module = PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    return merged


def write_adapter(
    model: nn.Module,
    folder: Path,
    dtype: torch.dtype | None = None,
    values: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the adapter, or `values` in its place, into `folder`; default dtype: float32, as
    kept."""
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
    """Overwrite the adapter with the one in `folder`; raises as `read_adapter` does."""
    values = read_adapter(model, folder)
    for name, parameter in adapter_parameters(model).items():
        parameter.copy_(values[name])


def read_adapter(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Read an adapter by the names of `adapter_parameters`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text())
        saved = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"{folder} has no readable adapter ({error})") from None
    mine = adapter_parameters(model)
    if odd := sorted(mine.keys() ^ saved.keys()):
        targets = " ".join(sorted(settings.get("target_modules", [])))
        raise UsageError(
            f"{folder} has an adapter for other modules ({odd[0].removeprefix(ADAPTER_PREFIX)}): "
            f"use its --lora-target-modules {targets} and --lora-layer-indices"
        )
    for name, parameter in mine.items():
        if saved[name].shape != parameter.shape:
            raise UsageError(
                f"{folder} has an adapter of another shape: {name.removeprefix(ADAPTER_PREFIX)} "
                f"{list(saved[name].shape)} there, {list(parameter.shape)} here (its "
                f"--lora-r is {settings.get('r')})"
            )
    # Scale and rsLoRA change the effect of the same values.
    ours, alpha = model.peft_config[_ADAPTER], settings.get("lora_alpha")  # type: ignore[index]
    if alpha != ours.lora_alpha:
        raise UsageError(f"{folder} was trained with --lora-alpha {alpha}, not {ours.lora_alpha}")
    if settings.get("use_rslora", False) != ours.use_rslora:
        wanted = str(not ours.use_rslora).lower()
        raise UsageError(f"{folder} was trained with --lora-use-rslora {wanted}")
    return dict(saved)
