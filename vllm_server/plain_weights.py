"""Loaders of a server whose weights change while it lives, or between two of its lives.

`atropos_folder` is vLLM's default loader, which takes the weights from the folder in `ATROPOS_START_WEIGHTS` where that
is set: a restarted server begins with what the trainer had, and everything else about the model stays as it was named.
`atropos_plain` does the same on a CPU, and the layers there compute from the parameters themselves. vLLM otherwise
repacks linear weights into a private copy and drops the original, so that nothing written later would reach it.

Runs in vLLM's worker process.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from atropos_common.manifest import SINGLE_COPY_ARCHITECTURES
from vllm_server.config import ENV_START_WEIGHTS
from vllm_server.copy_recorder import CopyRecorder, Named

logger = logging.getLogger(__name__)

FOLDER_FORMAT = "atropos_folder"
PLAIN_FORMAT = "atropos_plain"

_registered = False


def register_loaders() -> None:
    """Make both load formats known to vLLM in this process; once is enough."""
    global _registered
    if not _registered:
        register_model_loader(FOLDER_FORMAT)(FolderLoader)
        register_model_loader(PLAIN_FORMAT)(PlainLoader)
        _registered = True


class FolderLoader(DefaultModelLoader):
    """vLLM's default loader, with the weights of another folder."""

    def __init__(self, load_config: Any) -> None:
        load_config = copy.copy(load_config)
        load_config.load_format = "auto"
        super().__init__(load_config)
        self._recorder: CopyRecorder | None = None

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load, and say which tensors the model has no place for.

        Raises:
            ValueError: so it is for a trainer's weights: what it trains would not be what answers.
        """
        is_draft = model_config.runner_type == "draft"  # a speculative one beside the model; nobody trains it
        if folder := "" if is_draft else os.environ.get(ENV_START_WEIGHTS):
            model_config = copy.copy(model_config)
            model_config.model = folder
            model_config.revision = None
        if model_config.quantization is not None or type(model).__name__ not in SINGLE_COPY_ARCHITECTURES:
            super().load_weights(model, model_config)  # how others take their weights is theirs
            return
        self._recorder = CopyRecorder(model)
        with self._recorder:
            super().load_weights(model, model_config)
        reason, self._recorder = self._recorder.without_place(), None
        if reason and folder:
            raise ValueError(reason)
        if reason:
            logger.warning("%s", reason)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[Named]:
        weights = super().get_all_weights(model_config, model)
        return self._recorder.one_by_one(weights) if self._recorder else weights


class PlainLoader(FolderLoader):
    """After it no layer on the CPU holds a repacked copy of its weight."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._weights: dict[torch.nn.Module, torch.nn.Parameter] = {}

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        super().load_weights(model, model_config)
        if model_config.quantization is not None:
            return  # such layers need what vLLM makes of them
        for module in model.modules():
            weight = module._parameters.get("weight")
            if weight is not None:
                self._weights[module] = weight
                # vLLM's own switch (0.28 and later) for layers whose weight is read elsewhere: no repacking.
                module._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        model = super().load_model(*args, **kwargs)
        for module, weight in self._weights.items():
            if module._parameters["weight"] is not weight:
                module.weight = weight  # releases without the switch replaced it by an empty one
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = torch.nn.functional.linear
        self._weights.clear()
        return model
