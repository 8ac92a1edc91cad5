"""Whether a saved LoRA adapter is one of the served model. vLLM itself copies a smaller matrix into a part of a larger
one without a word, and the model then answers with noise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""What peft puts before every name in a saved adapter."""

Shapes = dict[str, tuple[int, int]]
"""Linear module -> (out features, in features)."""


def linear_shapes(hf_config: Any) -> Shapes:
    """Every linear layer of the model that transformers makes from `hf_config`; takes no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def misfit(folder: Path, model: Shapes) -> str | None:
    """Why the adapter in `folder` is not one of the model with these layers; null when it fits."""
    from safetensors import SafetensorError, safe_open

    try:
        rank = int(json.loads((folder / CONFIG_NAME).read_text())["r"])
        with safe_open(str(folder / WEIGHTS_NAME), "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        return f"it cannot be read ({type(error).__name__}: {error})"
    matrices = 0
    for name, shape in shapes.items():
        module, _, part = name.removeprefix(_PREFIX).rpartition(".lora_")
        if not module:
            return f"{name} is not the matrix of a LoRA layer"
        if module not in model:
            return f"the model has no linear layer {module}"
        out, into = model[module]
        wanted = (rank, into) if part == "A.weight" else (out, rank)
        if shape != wanted:
            return f"{name} is {list(shape)}, the model's layer needs {list(wanted)}"
        matrices += 1
    return None if matrices else "it holds no matrix"
